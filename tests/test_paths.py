"""Paths that cannot be used: below a folder that one may not search, too long, or no file; one line and status 2."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from started_commands import NAMES, commands, lines_in, started, tool

from mobilenetv3_common.wnids import WNIDS, class_folders
from sturdyio.cli import UserError, run


@pytest.mark.thorough("three commands", but="predict|train|judge")
@pytest.mark.parametrize("name", NAMES)
def test_below_a_folder_that_one_may_not_search(tmp_path, name):
    hidden, free = tmp_path / "hidden", tmp_path / "free"
    free.mkdir()
    hidden.mkdir(mode=0o700)
    (hidden / "x").mkdir()
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755) if os.getuid() == path.stat().st_uid else None
    if os.getuid():
        hidden.chmod(0)
    free.chmod(0o777)
    try:
        status, lines = lines_in(free, started(name.strip(), commands(str(hidden / "x"))[name]), as_nobody=True)
    finally:
        hidden.chmod(0o700)
    assert (status, len(lines)) == (2, 1), lines
    assert str(hidden) in lines[0] and "Permission denied" in lines[0], lines


@pytest.mark.thorough("three commands", but="predict|train|judge")
@pytest.mark.parametrize("name", NAMES)
def test_names_that_no_file_system_takes(tmp_path, name):
    status, lines = lines_in(tmp_path, started(name.strip(), commands("n" * 300)[name]), as_nobody=False)
    assert (status, len(lines)) == (2, 1), lines
    assert "File name too long" in lines[0] or "does not exist" in lines[0], lines


def test_a_class_folder_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    for wnid in WNIDS:
        (tmp_path / wnid).mkdir()
    scandir = os.scandir

    def denied(path):
        if Path(path).name == "n02123045":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    assert len(class_folders(tmp_path)[0]) == 1000
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UserError, match="n02123045 cannot be used .Permission denied.: check its permissions"):
        class_folders(tmp_path)


def test_what_the_machine_lacks_is_not_blamed_on_the_path(capsys):
    def fail() -> None:
        raise OSError(24, "Too many open files", "weights.pth")

    with pytest.raises(SystemExit) as ended:
        run(fail, "predict")
    assert ended.value.code == 2
    assert "Too many open files: 'weights.pth': this machine lacks it" in capsys.readouterr().err


def test_names_that_would_steer_a_terminal_are_escaped(tmp_path, capsys):
    path = tmp_path / "a\n\x1b[31mb.jpg"
    predict = tool("predict")
    with suppress(SystemExit):
        flags = ["--weights", "none.pdparams", "--input", str(path)]
        run(lambda: predict.main(predict.get_args_parser().parse_args(flags)), "predict")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and r"a\n\x1b[31mb.jpg does not exist" in error


@pytest.mark.parametrize("hard", [24, 256])
def test_too_few_open_files_are_said_before_anything_starts(hard):
    """With 24, loaders' workers die, training hangs and clean-up raises; what may be raised is raised."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, {hard}))\n"
        "from sturdyio.cli import run\n"
        "run(lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)), 'train')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if hard == 24:
        said = "train: error: only 24 files may be open at a time: allow more, with ulimit -n 1024\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    else:
        assert (done.returncode, done.stdout) == (0, "(64, 256)\n"), done.stderr
