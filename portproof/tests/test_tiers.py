"""The two tiers of tests: what is left out without --all is counted, and each test left out has a guard that is not."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
SAMPLE = """
import pytest

@pytest.mark.thorough("test_quick guards it")
def test_slow():
    pass

@pytest.mark.thorough("one of them", but="small")
@pytest.mark.parametrize("size", ["small", "large", "huge"])
def test_sizes(size):
    pass

def test_quick():
    pass
"""


@pytest.mark.thorough("in one process", but="0")
@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_is_thorough_runs_with_all_only(pytester, processes):
    pytester.makepyfile(SAMPLE)
    flags = ("-p", "pytest_setup", "-p", "no:cacheprovider", "-n", processes)
    fewer, every = pytester.runpytest(*flags), pytester.runpytest(*flags, "--all")
    fewer.assert_outcomes(passed=2, deselected=0 if int(processes) else 3)
    fewer.stdout.fnmatch_lines("3 thorough tests were left out: --all runs them, too")
    every.assert_outcomes(passed=5)
    every.stdout.no_fnmatch_line("*left out*")


@pytest.mark.thorough("in one process", but="0")
@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_has_passed_is_left_out(pytester, processes):
    pytester.makepyfile(SAMPLE + "\n\ndef test_wrong():\n    assert False\n")
    flags = ("-p", "pytest_setup", "-p", "no:cacheprovider", "-n", processes, "--passed", "passed.txt")
    pytester.runpytest(*flags).assert_outcomes(passed=2, failed=1, deselected=0 if int(processes) else 3)
    pytester.runpytest(*flags, "--all").assert_outcomes(passed=3, failed=1, deselected=0 if int(processes) else 2)
    pytester.runpytest(*flags, "--all").assert_outcomes(failed=1, deselected=0 if int(processes) else 5)


@pytest.mark.parametrize(
    ("cores", "gigabytes", "processes"), [(2, 16, 2), (8, 64, 8), (8, 16, 4), (1, 16, 1), (2, 1, 1)]
)
def test_as_many_processes_as_there_are_cores_and_memory_for(pytester, monkeypatch, cores, gigabytes, processes):
    """pytest-xdist has a count of its own, too."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": gigabytes * 2**18, "SC_PAGE_SIZE": 2**12}.__getitem__)
    config = pytester.parseconfig("-p", "pytest_setup")
    assert config.hook.pytest_xdist_auto_num_workers(config=config) == processes


class Marked(NamedTuple):
    """A test, or a file with "" for its name, and the arguments of its markers; `param`: of one of its parameters."""

    file: str
    name: str
    given: list[tuple[str, str]]
    param: bool


def marked(folder: Path) -> list[Marked]:
    """Every test of the folder, and what else has a marker."""
    found = []
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            where = node.decorator_list if is_test else [node]
            given = [arguments(call) for part in where for call in ast.walk(part) if is_marker(call)]
            if is_test or given:
                whole = is_test or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark")
                found.append(Marked(path.name, node.name if is_test else "", given, not whole))
    return found


def is_marker(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "thorough"


def arguments(call: ast.Call) -> tuple[str, str]:
    guard, *rest = [ast.literal_eval(argument) for argument in call.args]
    assert not rest and all(keyword.arg == "but" for keyword in call.keywords)
    return guard, "".join(ast.literal_eval(keyword.value) for keyword in call.keywords)


def unguarded(folder: Path, *others: Path) -> list[str]:
    """The thorough tests whose marker does not say what stays: a part of them, or tests by name, of any folder."""
    found = [one for each in (folder, *others) for one in marked(each)]
    left = {(one.file, one.name) for one in found if not one.param and any(not but for _, but in one.given)}
    stay = {(one.file, one.name) for one in found if one.name} - left
    names = {part for file, name in stay if (file, "") not in left for part in (name, file.removesuffix(".py"))}
    return [
        f"{one.file}::{one.name}: {guard!r}"
        for one in marked(folder)
        for guard, but in one.given
        if not guard or not (but or (told := set(re.findall(r"\btest_\w+", guard))) and told <= names)
    ]


def test_every_thorough_test_has_a_guard_that_is_not():
    assert unguarded(TESTS) == []


def test_a_test_without_a_guard_is_found(tmp_path):
    wrong = SAMPLE.replace("test_quick guards it", "test_slow guards itself").replace('"one of them"', '""')
    (tmp_path / "test_sample.py").write_text(wrong)
    assert unguarded(tmp_path) == [
        "test_sample.py::test_slow: 'test_slow guards itself'",
        "test_sample.py::test_sizes: ''",
    ]
