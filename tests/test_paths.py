"""Paths that cannot be used: below a folder that one may not search, too long, or no file; one line and status 2."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import paddle  # noqa: F401 - here and below: a child that drops its rights may not be able to import any more
import pytest
import torch  # noqa: F401
import yaml  # noqa: F401

import mobilenetv3_common.wnids
import mobilenetv3_ref.train.main
import portproof.__main__
import portproof.backends.probe
import portproof.commands.align
import portproof.commands.compare
import portproof.commands.judge
import portproof.commands.new
import portproof.ladder  # noqa: F401
from mobilenetv3_common.arguments import parse_args
from mobilenetv3_common.wnids import class_folders
from sturdyio.cli import UserError, run

ROOT = Path(__file__).parents[1]
NOBODY = 65534
PAIR = ("--ref", "torch.nn:ReLU", "--port", "paddle.nn:ReLU", "--input", "2,3")


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def started(name: str, flags: tuple[str, ...]) -> Callable[[], None]:
    """What runs a command as its own process would; it raises SystemExit."""
    if name == "train":
        module = mobilenetv3_ref.train.main
        return lambda: run(lambda: module.main(parse_args("train", "PyTorch", flags)), "train")
    if name.startswith("portproof "):

        def command() -> None:
            sys.argv = ["portproof", name.partition(" ")[2], *flags]
            portproof.__main__.main()

        return command
    module = tool(name)
    return lambda: run(lambda: module.main(module.get_args_parser().parse_args(flags)), name)


def commands(path: str) -> dict[str, tuple[str, ...]]:
    """Flags of each command that reads or writes, in all of which `path` is the first that it uses."""
    return {
        "predict": ("--weights", f"{path}/a.pdparams", "--input", f"{path}/cat.jpg"),
        "train": ("--data-path", path, "--output-dir", path),
        "convert_weights": (f"{path}/a.pth", "out.pdparams", "--from", "torch", "--to", "paddle"),
        "average_checkpoints": ("--framework", "torch", "average.pth", f"{path}/a.pth", f"{path}/b.pth"),
        "plot_curves": ("curves.png", path),
        "make_probe_weights": (f"{path}/probe.pth",),
        "portproof align": (*PAIR, "--map", f"{path}/map.yaml"),
        "portproof align ": (*PAIR, "--weights", f"{path}/a.pth"),
        "portproof judge": (f"{path}/a.safetensors", "--port", "paddle.nn:ReLU"),
        "portproof compare": (f"{path}/a.npy", f"{path}/b.npy", "--rtol", "0.1"),
        "portproof new": (path, *PAIR),
    }


NAMES = list(commands(""))


def lines_in(folder: Path, start: Callable[[], None], as_nobody: bool) -> tuple[int, list[str]]:
    """(exit status, lines on stderr) of a child that starts it in `folder`, as a user who owns nothing if told to."""
    said = folder / "stderr.txt"
    with said.open("w") as file:
        child = os.fork()
        if child == 0:
            status = 99
            try:
                os.chdir(folder)
                if as_nobody and os.getuid() == 0:
                    os.setgroups([])
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                sys.stderr = file
                start()
            except SystemExit as ended:
                status = ended.code
            finally:
                file.flush()
                os._exit(status if isinstance(status, int) else 98)
        _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), said.read_text().splitlines()


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


@pytest.mark.parametrize("name", NAMES)
def test_names_that_no_file_system_takes(tmp_path, name):
    status, lines = lines_in(tmp_path, started(name.strip(), commands("n" * 300)[name]), as_nobody=False)
    assert (status, len(lines)) == (2, 1), lines
    assert "File name too long" in lines[0] or "does not exist" in lines[0], lines


def test_a_class_folder_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    for wnid in mobilenetv3_common.wnids.WNIDS:
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


def test_names_that_would_steer_a_terminal_are_escaped(tmp_path, capsys):
    path = tmp_path / "a\n\x1b[31mb.jpg"
    predict = tool("predict")
    with contextlib.suppress(SystemExit):
        flags = ["--weights", "none.pdparams", "--input", str(path)]
        run(lambda: predict.main(predict.get_args_parser().parse_args(flags)), "predict")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and r"a\n\x1b[31mb.jpg does not exist" in error
