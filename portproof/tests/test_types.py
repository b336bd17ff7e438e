"""What type checkers know of the kit's exported names, and that they are imported when they are used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import portproof
from portproof import ladder

# What is imported of the frameworks is not followed: that takes half a minute.
CONFIG = """
[mypy]
[mypy-torch.*,paddle.*,numpy.*]
follow_imports = skip
ignore_missing_imports = true
[mypy-scipy.*]
ignore_missing_imports = true
"""
RIGHT = """
from typing import Any

import portproof
from portproof import ladder


def prove(ref: Any, port: Any, recording: portproof.Recording) -> int:
    verdict: portproof.Verdict = portproof.align(ref, port, [], seed=1)
    rows: list[portproof.Row] = verdict.bad
    judged = portproof.judge(port, recording)
    rung = ladder.Rung("a step", quiet=True)
    step = ladder.forward(ref, port, [], seed=1, leave_out=["head"], rung=rung)
    portproof.assert_aligned(ref, port, [], names={"a": "b"}, accept=["*.running_var"])
    bound: float = ladder.Uniform(0.5).bound
    print(ladder.loss(ref, port).log, ladder.cases.losses(10), rows, bound)
    return judged.status + step.status
"""
WRONG = {
    "portproof.align(ref, port, []).statsu": '"AlignVerdict" has no attribute "statsu"',
    "portproof.Item('a', knd='output')": 'Unexpected keyword argument "knd" for "Item"',
    "portproof.algin(ref, port, [])": 'Module has no attribute "algin"',
    "ladder.forward(ref, port, []).statsu": '"RungVerdict" has no attribute "statsu"',
    "ladder.loss(ref, port, reduction='mean')": 'Unexpected keyword argument "reduction" for "loss"',
    "portproof.assert_aligned(ref, port, [], seeds=1)": 'Unexpected keyword argument "seeds" for "assert_aligned"',
    "portproof.assert_judged(port, 'net', seed=1)": 'Unexpected keyword argument "seed" for "assert_judged"',
    "ladder.forward(ref, port, [], sed=1)": 'Unexpected keyword argument "sed" for "forward"',
    "ladder.backward(ref, port, ref, port, [], trian=True)": 'Unexpected keyword argument "trian" for "backward"',
    "ladder.same_weights(ref, port, [], seeds=1)": 'Unexpected keyword argument "seeds" for "same_weights"',
    "ladder.Rung(1)": 'Argument 1 to "Rung" has incompatible type "int"',
    "ladder.farword": 'Module has no attribute "farword"',
}


@pytest.mark.parametrize("package", [portproof, ladder], ids=["portproof", "ladder"])
def test_each_exported_name_is_what_type_checkers_are_told(package: ModuleType):
    (block,) = [node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If)]
    told = dict(vars(package))
    exec(compile(ast.Module(block.body, []), package.__name__, "exec"), told)
    assert {name: getattr(package, name) for name in package.__all__} == {name: told[name] for name in package.__all__}
    for name in ("nothing", "Inputs"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(package, name)


def test_only_a_users_mistakes_are_type_errors(tmp_path):
    pytest.importorskip("mypy")
    start = f"{RIGHT}\n\ndef wrong(ref: Any, port: Any) -> None:\n"
    (tmp_path / "mypy.ini").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "program.py").write_text(start + "".join(f"    {line}\n" for line in WRONG), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if ": note: " not in line]
    for number, said in enumerate(WRONG.values(), start.count("\n") + 1):
        assert found and found.pop(0).startswith(f"program.py:{number}: error: {said}"), done.stdout + done.stderr
    assert found == []
