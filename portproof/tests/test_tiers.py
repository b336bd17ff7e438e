"""The two tiers of tests: what is left out without --all is counted, and each test left out has a guard that is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_is_thorough_runs_with_all_only(pytester, processes):
    pytester.makepyfile(SAMPLE)
    flags = ("-p", "kit_fixtures", "-p", "no:cacheprovider", "-n", processes)
    fewer, every = pytester.runpytest(*flags), pytester.runpytest(*flags, "--all")
    fewer.assert_outcomes(passed=2, deselected=0 if int(processes) else 3)
    fewer.stdout.fnmatch_lines("3 thorough tests were left out: --all runs them, too")
    every.assert_outcomes(passed=5)
    every.stdout.no_fnmatch_line("*left out*")


def markers(folder: Path) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """{(file, test or "" for the whole file): [(guard, but) of each `thorough` there]}."""
    found = {}
    for path in sorted(folder.glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name, where = node.name, node.decorator_list
            else:
                name, where = "", [node]
            calls = [call for part in where for call in ast.walk(part) if is_marker(call)]
            if name or calls:
                found.setdefault((path.name, name), []).extend(map(arguments, calls))
    return found


def is_marker(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "thorough"


def arguments(call: ast.Call) -> tuple[str, str]:
    guard, *rest = [ast.literal_eval(argument) for argument in call.args]
    assert not rest and set(keyword.arg for keyword in call.keywords) <= {"but"}
    return guard, "".join(ast.literal_eval(keyword.value) for keyword in call.keywords)


def unguarded(folder: Path) -> list[str]:
    """The thorough tests whose marker does not say what stays: a part of them, or tests of the folder by name."""
    found = markers(folder)
    whole_files = {file for (file, name), given in found.items() if not name and any(not but for _, but in given)}
    stay = {name for (file, name), given in found.items() if file not in whole_files and all(but for _, but in given)}
    stay |= {file.removesuffix(".py") for file, name in found if name in stay}
    return [
        f"{file}::{name}: {guard!r}"
        for (file, name), given in found.items()
        for guard, but in given
        if not guard or not (but or set(re.findall(r"\btest_\w+", guard)) & stay)
    ]


def test_every_thorough_test_has_a_guard_that_is_not():
    assert unguarded(TESTS) == []


def test_a_test_without_a_guard_is_found(tmp_path):
    marked = SAMPLE.replace("test_quick guards it", "test_slow guards itself").replace('"one of them"', '""')
    (tmp_path / "test_sample.py").write_text(marked)
    assert unguarded(tmp_path) == [
        "test_sample.py::test_slow: 'test_slow guards itself'",
        "test_sample.py::test_sizes: ''",
    ]
