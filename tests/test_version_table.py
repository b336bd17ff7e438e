"""The check of versions: what pytest reports is counted, both pages say it, and what was not run is said to be so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_pages import assert_same_content, blocks

from maintenance.checks import versions
from maintenance.checks.versions import COMBINATIONS, TESTS, Result, counted, find_interpreters, load_results, page

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = {"python": "3.9.18", "torch": "2.1.0+cpu", "paddlepaddle": "2.6.2", "numpy": "1.26.4"}
RESULTS = {
    "newest": Result("core", {**INSTALLED, "python": "3.13.0", "torch": "2.15.0"}, 9, 1, ["t::a: `no`"], 60),
    "oldest": Result("core", INSTALLED, 10, 0, [], 50),
    "paddle 3.0": Result("core", why="no wheel"),
}


@pytest.fixture
def written(tmp_path) -> dict[str, str]:
    """The paths of both languages' pages of RESULTS."""
    paths = {language: tmp_path / language / "versions.md" for language in ("en", "zh")}
    for language, path in paths.items():
        path.parent.mkdir()
        path.write_text(page(RESULTS, language, "3.9"), encoding="utf-8")
    return {language: str(path) for language, path in paths.items()}


def test_page_says_what_was_run_and_what_was_not(written):
    (table,) = (block for block in blocks(written["en"]) if block.kind == "table")
    assert table.cells[2:] == [
        ["3.9.18", "2.1.0", "2.6.2", "1.26.4", "`core`", "10", "0", "0", "50"],
        ["3.13.0", "2.15.0", "2.6.2", "1.26.4", "`core`", "9", "1", "1", "60"],
    ]
    text = Path(written["en"]).read_text(encoding="utf-8")
    failed, left = (text.partition(f"## {name}\n")[2] for name in ("What failed", "Not run"))
    assert "- Python 3.13, PyTorch 2.15.0, PaddlePaddle 3.3.1, `numpy>=2`: `t::a: 'no'`" in failed
    assert "PaddlePaddle 3.0.0, `numpy>=2`: `no wheel`" in text
    assert left.count("\n- ") == len(COMBINATIONS) - len(RESULTS) and "Python 3.9 compiles" in left


def test_both_languages_say_the_same(written):
    assert_same_content(written["en"], written["zh"])


def test_the_combinations_are_what_the_kit_says_it_works_with():
    minors = {tuple(each.torch.split(".")[:2]) for each in COMBINATIONS.values()}
    assert minors == {("2", str(minor)) for minor in range(1, 16)}
    assert {each.paddle[:3] for each in COMBINATIONS.values()} == {"2.6", "3.0", "3.1", "3.2", "3.3"}
    assert {each.python for each in COMBINATIONS.values()} == {f"3.{minor}" for minor in range(9, 14)}


def test_what_pytest_reports_is_counted(tmp_path):
    test = "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\ndef test_c(): pytest.skip('no')\n"
    (tmp_path / "test_x.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path / 'r.xml'}"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    assert counted(tmp_path / "r.xml") == (1, 1, ["test_x::test_b: assert 1 == 2"])


def test_every_chosen_test_is_there():
    for selection, _ in TESTS.values():
        for path in selection:
            assert (ROOT / "portproof" / path.partition("::")[0]).exists(), path


def test_interpreters_are_found_in_pyenv_and_those_that_do_not_run_are_not(tmp_path, monkeypatch):
    version = f"3.{sys.version_info.minor}"
    shims = tmp_path / "shims"
    shims.mkdir()
    run_this = f'exec {sys.executable} "$@"'
    for name, target in ((f"shims/python{version}", "exit 127"), (f"versions/{version}.1/bin/python", "")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{target or run_this}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(shims))
    found = find_interpreters([version, "3.1"])
    assert list(found) == [version] and Path(found[version]).samefile(sys.executable)


def test_the_stored_results_make_the_pages():
    results = load_results(ROOT / "docs" / "versions.json")
    assert {"oldest", "newest"} <= results.keys()
    for language in ("en", "zh"):
        written = (ROOT / "docs" / language / "versions.md").read_text(encoding="utf-8")
        assert written == page(results, language, "3.9")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--only", "torch 1.0"], "invalid choice: 'torch 1.0'"),
        (["--tests", "none"], "argument --tests"),
        (["--timeout", "0"], "argument --timeout"),
        (["--output", "/dev/null/x"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(flags, reason):
    command = [sys.executable, versions.__file__, *flags]
    ran = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert reason in ran.stderr
