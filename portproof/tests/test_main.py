"""The command `portproof`: what it lists, how it ends, and what it says of a framework that is missing."""

import re
import subprocess
import sys
from importlib import metadata

import pytest

from portproof import __version__
from portproof.__main__ import COMMANDS, main


def end(monkeypatch, capfd, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["portproof", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capfd.readouterr()


def test_help_lists_every_command_in_a_line(monkeypatch, capfd):
    code, out, err = end(monkeypatch, capfd, "--help")
    assert (code, err) == (0, "")
    listed = [line.split(maxsplit=1) for line in out.partition("commands:\n")[2].partition("\n\n")[0].splitlines()]
    assert dict(listed) == COMMANDS
    assert COMMANDS.keys() >= {"align", "compare", "convert"}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_its_own_help(monkeypatch, capfd, command):
    code, out, _ = end(monkeypatch, capfd, command, "--help")
    assert code == 0 and out.startswith(f"usage: portproof {command} ")
    defaults = re.findall(r"\(default:\s+([^)]*)\)", out)
    assert not {"None", "False", "[]"} & set(defaults) and not re.search(r"\(default:[^)]*\)\s+\(default:", out)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons have no -P")
def test_the_current_folder_is_imported_from(tmp_path):
    """By the command that pip installs, whose sys.path begins with its own folder."""
    (tmp_path / "here.py").write_text("raise ValueError('found')\n")
    code = "from portproof.__main__ import main; main()"
    command = [sys.executable, "-P", "-c", code, "align", "--ref", "here:Net", "--port", "here:Net"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "importing here raised ValueError: found" in done.stderr, done.stderr


def test_version(monkeypatch, capfd):
    assert end(monkeypatch, capfd, "--version") == (0, f"portproof {__version__}\n", "")
    assert metadata.version("portproof") == __version__


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: COMMAND"),
        (("aling",), "invalid choice: 'aling'"),
        (("--ref", "a:b"), "required: COMMAND"),
        (("align", "--port", "a:b"), "required: --ref"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_status_2(monkeypatch, capfd, words, message):
    code, out, err = end(monkeypatch, capfd, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("portproof") and message in err


def test_a_fault_of_its_own_is_no_verdict(monkeypatch, capfd):
    """Exit status 1 would say that the port is not aligned."""

    def fail(args):
        raise KeyError("output 0")

    monkeypatch.setattr("portproof.commands.align.main", fail)
    code, out, err = end(monkeypatch, capfd, "align", *PAIR)
    assert code == 2 and "Traceback" in err and out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("portproof align: KeyError: 'output 0': this is a fault of portproof, not of what")


PAIR = ("--ref", "torch.nn:ReLU", "--port", "paddle.nn:ReLU")


@pytest.mark.thorough("PyTorch and PyYAML", but="^(torch|yaml)-")
@pytest.mark.parametrize(
    ("missing", "extra", "command"),
    [
        ("torch", "torch", "align"),
        ("paddle", "paddle", "align"),
        ("scipy", "torch", "align"),
        ("yaml", "torch", "align"),
        ("torch", "torch", "convert"),
        ("paddle", "paddle", "convert"),
        ("torch", "torch", "record"),
    ],
)
def test_what_is_missing_is_named_with_the_extra_that_installs_it(tmp_path, missing, extra, command):
    (tmp_path / "map.yaml").write_text("a: b\n", encoding="utf-8")
    (tmp_path / "in.pth").write_bytes(b"weights")
    files = ("--from", "torch", "--to", "paddle", "in.pth", "out.pdparams") if command == "convert" else ()
    flags = (*PAIR, *files, *(("--map", "map.yaml") if missing == "yaml" else ()))
    flags = ("--ref", "torch.nn:ReLU", "--output", "a.safetensors") if command == "record" else flags
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom portproof.__main__ import main\nmain()"
    result = subprocess.run(
        [sys.executable, "-c", code, command, *flags],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stdout + result.stderr
    line = result.stderr.strip().splitlines()[-1]
    halted = f"portproof {command}: error: import of {missing} halted"
    assert line.startswith(halted) or missing == "scipy" or command == "record"
    assert line.endswith(f": run pip install 'portproof[{extra}]'") and "Traceback" not in result.stderr
