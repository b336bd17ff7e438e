"""Whatever the code of a pair does to the process that runs it, no command, rung or ladder says that all is well."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import forked_python
import numpy as np
import paddle
import pytest
import torch
from toy_pairs import Port, Ref, chaotic, normal

import portproof
from portproof import ladder
from portproof.commands import align, compare, convert, judge, new, record
from portproof.compare import DONE, FAIL, PASS, REFUSED, Item, Refused, Row, Verdict, exit_status
from portproof.ladder import Rung
from portproof.report.summary import LadderResult, RungResult
from sturdyio.cli import LACKING, Escaped, MachineError, UserError, run

# At PLACE of SIDE the code does ACT, as DOOR says: "SIDE PLACE ACT".
ACTS = """
import errno, os, sys

class Own(BaseException):
    pass

class OwnInterrupt(KeyboardInterrupt):
    pass

def throw(error):
    raise error

def move():
    os.chdir("/")
    sys.argv[:] = ["nothing"]

ACTS = {
    "exits with 0": lambda: sys.exit(0),
    "exits with 1": lambda: sys.exit(1),
    "exits": lambda: sys.exit(),
    "raises GeneratorExit": lambda: throw(GeneratorExit()),
    "raises its own": lambda: throw(Own("no more")),
    "has no memory": lambda: throw(MemoryError()),
    "has no space": lambda: throw(OSError(errno.ENOSPC, "No space left on device")),
    "has too many files": lambda: throw(OSError(errno.EMFILE, "Too many open files")),
    "is interrupted": lambda: throw(OwnInterrupt()),
    "forks": os.fork,
    "kills itself": lambda: os.kill(os.getpid(), 9),
    "leaves with 0": lambda: os._exit(0),
    "closes stdout": lambda: sys.stdout.close(),
    "closes its descriptor": lambda: os.closerange(1, 2),
    "moves": move,
}

def at(place):
    side_and_place, _, act = os.environ.get("DOOR", "").partition(": ")
    if side_and_place == place:
        ACTS[act]()
"""
SIDE = """
import {framework}
from door_acts import at

at("{side} import")

class Net({layer}):
    def __init__(self):
        super().__init__()
        at("{side} make")
        self.line = {line}(5, 3)

    def forward(self, x):
        at("{side} forward")
        return self.line(x)
"""
SIDES = {
    "ref": SIDE.format(framework="torch", side="ref", layer="torch.nn.Module", line="torch.nn.Linear"),
    "port": SIDE.format(framework="paddle", side="port", layer="paddle.nn.Layer", line="paddle.nn.Linear"),
}
PAIR = ("--ref", "door_ref:Net", "--port", "door_port:Net", "--input", "4,5")
ESCAPES = ("exits with 0", "exits with 1", "exits", "raises GeneratorExit", "raises its own")
LACKS = ("has no memory", "has no space", "has too many files")
PLACES = ("import", "make", "forward")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, from which the pair is imported."""
    (tmp_path / "door_acts.py").write_text(ACTS, encoding="utf-8")
    for side, text in SIDES.items():
        (tmp_path / f"door_{side}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("door_ref", "door_port", "door_acts"):
        sys.modules.pop(name, None)


@pytest.fixture
def ended(folder, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """ended(command, words, door) -> how the command ends in this process, and what it prints."""

    def ended(command, words: tuple, door: str = "") -> tuple[int, str, str]:
        forget()
        monkeypatch.setenv("DOOR", door)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run(lambda: command.main(command.get_args_parser().parse_args(words)), command.PROG)
        return stop.value.code, *capsys.readouterr()

    return ended


@pytest.fixture
def recorded(ended) -> tuple[str, ...]:
    """The arguments of judge."""
    assert ended(record, (*PAIR[:2], *PAIR[4:], "--output", "net.ref.safetensors"))[0] == 0
    return (*PAIR[2:4], "net.ref.safetensors")


def status_of(side: str, act: str, is_judged: bool = True) -> int:
    if act == "is interrupted":
        return 130
    return FAIL if side == "port" and act in ESCAPES and is_judged else REFUSED


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("side", SIDES)
def test_align_and_locate_only(ended, side, place):
    few = place == "forward" and side == "port"  # each is judged as a whole
    for act in ("exits with 0", "has no memory", "is interrupted") if few else (*ESCAPES, *LACKS, "is interrupted"):
        for words in ((), ("--locate-only",)):
            status, out, err = ended(align, (*words, *PAIR), f"{side} {place}: {act}")
            assert status == status_of(side, act), (act, words, out, err)
            assert "PASS" not in out
            if status == REFUSED:
                assert err.count("\n") == 1 and "error: " in err
            if status == FAIL:
                assert err == "" and ("SystemExit" in out or "Own" in out or "GeneratorExit" in out)


@pytest.mark.parametrize("place", PLACES)
def test_judge_and_record(ended, recorded, place):
    for act in ("exits with 0", "has no space", "is interrupted"):
        assert ended(judge, recorded, f"port {place}: {act}")[0] == status_of("port", act)
        words = (*PAIR[:2], *PAIR[4:], "--output", f"{place}.ref.safetensors")
        assert ended(record, words, f"ref {place}: {act}")[0] == status_of("ref", act)
        assert not Path(f"{place}.ref.safetensors").exists()
    assert ended(judge, recorded)[0] == 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("place", PLACES[:2])
def test_convert_and_new_write_nothing(ended, folder, side, place):
    torch.save({"line.weight": torch.ones(3, 5), "line.bias": torch.ones(3)}, "a.pth")
    words = ("--from", "torch", "--to", "paddle", "a.pth", "b.pdparams", *PAIR)
    for act in (*ESCAPES, *LACKS, "is interrupted"):
        assert ended(convert, words, f"{side} {place}: {act}")[0] == status_of(side, act, is_judged=False)
        assert ended(new, ("proof", *PAIR), f"{side} {place}: {act}")[0] == status_of(side, act, is_judged=False)
        assert not Path("b.pdparams").exists() and not Path("proof").exists()
    assert ended(convert, words)[0] == ended(new, ("proof", *PAIR))[0] == 0


class Exits:
    def __reduce__(self):
        return sys.exit, (0,)


def test_compare_runs_no_code_of_a_file(ended):
    np.save("code.npy", np.array({"a": Exits()}, dtype=object), allow_pickle=True)
    np.savez("none.npz")
    status, _, err = ended(compare, ("code.npy", "code.npy", "--rtol", "0"))
    assert status == REFUSED and "refused" in err
    np.save("empty.npy", np.array({}, dtype=object), allow_pickle=True)
    assert ended(compare, ("empty.npy", "empty.npy", "--rtol", "0"))[0] == REFUSED


def test_paths_stay_what_they_name_where_code_moves(ended, recorded, folder):
    for side in SIDES:
        for place in PLACES:
            door = f"{side} {place}: moves"
            assert ended(align, (*PAIR, "--save-map", f"{side} {place}.yaml"), door)[0] == 0
            assert (folder / f"{side} {place}.yaml").is_file() and Path.cwd() == folder


# What does something to the process, in processes of its own


def command(*words: str | Path, door: str = "", folder: Path):
    paths = os.pathsep.join([str(folder), *sys.path])
    return forked_python.python(*words, env={**os.environ, "PYTHONPATH": paths, "DOOR": door})


@pytest.mark.thorough("the port's", but="port")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("act", "ends"),
    {
        "exits with 0": (None, ""),
        "forks": (0, ""),
        "kills itself": (137, "its process was ended by signal 9: is there enough memory?"),
        "leaves with 0": (2, "ended its process with status 0, before there was a verdict"),
        "closes stdout": (2, "standard output is closed or full"),
        "closes its descriptor": (2, "standard output is closed or full"),
    }.items(),
)
def test_align_as_a_command(folder, side, act, ends):
    status, said = ends
    done = command("-m", "portproof", "align", *PAIR, door=f"{side} forward: {act}", folder=folder)
    assert done.returncode == (status_of(side, act) if status is None else status), done.stdout + done.stderr
    assert len(re.findall("^PASS align", done.stdout, re.MULTILINE)) == (status == 0)
    assert said in done.stderr and (done.stderr.count("\n") == 1 or not said)


AROUND = """
import atexit, os, signal
import torch
from portproof.io.process import run_in_child, use_threads

def product():
    return float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())

def main():
    atexit.register(print, "at exit")
    use_threads(None)
    assert product() == 600**3
    return 3

os.environ["OMP_NUM_THREADS"] = "2"
torch.set_num_threads(2)
product()
signal.alarm(30)
atexit.register(print, "of the parent")
try:
    run_in_child(main, "it")
except SystemExit as end:
    print(end.code)
"""


def test_what_surrounds_a_command_runs_once_and_its_threads_are_not_waited_for(folder):
    (folder / "around.py").write_text(AROUND, encoding="utf-8")
    done = command(folder / "around.py", folder=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "at exit\n3\n", "")  # a forked Python runs no handlers


RUNG = """
import argparse
from door_acts import at
at("rung import")
from portproof.compare import PASS, Item, Row, Verdict
from portproof.ladder import Rung, run_rung, rung_parser

def get_args_parser():
    return rung_parser("rung", "")

def main(args):
    at("{name} main")
    rung = Rung("{name}")
    rung.check(Verdict("what", [Row(Item("it"), PASS)]))
    return rung.write(args.output_dir, "{name}")

if __name__ == "__main__":
    run_rung("{name}", main, get_args_parser())
"""
ALL = """
import sys
from pathlib import Path
from sturdyio.cli import run
from portproof.ladder import Planned, run_all

if __name__ == "__main__":
    rungs = [Planned(path, ["--output-dir", "out"]) for path in sorted(Path(sys.argv[2]).glob("rung_*.py"))]
    run(lambda: run_all(rungs, "out", dict(date="", seed=""), in_lanes=sys.argv[1] == "lanes"), "all")
"""
PASSING = ("forks", "moves")  # nothing of what was found is lost
STATUS = {"exits with 0": FAIL, "raises its own": FAIL, "has no memory": REFUSED, "is interrupted": 130}


@pytest.fixture
def rungs(folder) -> Path:
    """The folder of rungs; the one in the middle has a door."""
    for name in ("a", "b", "c"):
        (folder / f"rung_{name}.py").write_text(RUNG.format(name=name), encoding="utf-8")
    (folder / "all.py").write_text(ALL, encoding="utf-8")
    return folder


@pytest.mark.parametrize("act", [*STATUS, *PASSING, "kills itself", "leaves with 0", "closes stdout"])
def test_a_rung(rungs, act):
    done = command(rungs / "rung_b.py", "--output-dir", "out", door=f"b main: {act}", folder=rungs)
    expected = STATUS | {"kills itself": 137, "leaves with 0": 2, "closes stdout": 2} | dict.fromkeys(PASSING, 0)
    assert done.returncode == expected[act], done.stdout + done.stderr
    assert ("PASS b: all 1 items" in done.stdout) == (act in PASSING)
    assert (rungs / "out" / "b_ref.npy").is_file() == (act in PASSING)


@pytest.mark.skipif(sys.platform != "linux", reason="lanes are forked")
@pytest.mark.thorough("in lanes, and one that leaves in either", but="^lanes|leaves")
@pytest.mark.parametrize("act", [*STATUS, *PASSING, "kills itself", "closes stdout", "leaves with 0"])
@pytest.mark.parametrize("how", ["lanes", "one by one"])
def test_all_rungs(rungs, how, act):
    done = command(rungs / "all.py", how, rungs, door=f"b main: {act}", folder=rungs)
    if act == "has no memory":  # a mistake of the user's ends the ladder
        assert done.returncode == REFUSED and "MemoryError" in done.stderr and "ladder" not in done.stdout
        return
    table = {name: status for status, name in re.findall(r"^  (\w+) +(rung_\w) ", done.stdout, re.MULTILINE)}
    assert table == {"rung_a": "PASS", "rung_b": "PASS" if act in PASSING else "FAIL", "rung_c": "PASS"}
    assert done.returncode == (PASS if act in PASSING else FAIL)
    assert (rungs / "out" / "c_ref.npy").is_file()


# The one place that gives 0, and the truth of a verdict


def verdict_of(*statuses: int, refusal: str = "") -> Verdict:
    return Verdict("it", [Row(Item(str(i)), status) for i, status in enumerate(statuses)], refusal)


def test_nothing_but_a_verdict_that_passed_gives_0():
    assert exit_status(DONE) == exit_status(verdict_of(PASS)) == 0
    assert exit_status(verdict_of(PASS, FAIL)) == exit_status(verdict_of(FAIL, refusal="why")) == FAIL
    for refused in (verdict_of(), verdict_of(PASS, refusal="why"), verdict_of(PASS, REFUSED)):
        assert exit_status(refused) == REFUSED
    for nothing in (None, 0, False):
        with pytest.raises(AttributeError):
            exit_status(nothing)


def test_a_rung_and_a_ladder_without_items_have_not_passed():
    empty, full = Rung("empty", quiet=True), Rung("full", quiet=True)
    empty.check(verdict_of())
    full.check(verdict_of(PASS))
    assert exit_status(Rung("none")) == exit_status(empty) == REFUSED and exit_status(full) == 0
    for rungs, status in (([empty, full], REFUSED), ([full], 0), ([], REFUSED)):
        assert exit_status(LadderResult([RungResult(rung.name, "", 0.0, rung) for rung in rungs])) == status


def test_the_truth_of_a_verdict():
    assert verdict_of(PASS) and not verdict_of(FAIL) and not verdict_of(FAIL, REFUSED, refusal="why")
    for refused, reason in ((verdict_of(refusal="why"), "why"), (verdict_of(), "nothing to compare")):
        with pytest.raises(Refused, match=f"it is refused, neither true nor false: .*{reason}"):
            bool(refused)
    with pytest.raises(UserError):
        bool(verdict_of(PASS, REFUSED))


class Line(torch.nn.Linear):
    pass


class Turned(paddle.nn.Linear):
    def forward(self, x):
        return -super().forward(x)


class Leaves(paddle.nn.Linear):
    def train(self):
        sys.exit(0)


def test_what_passes_is_returned_and_anything_else_is_an_assertion(tmp_path):
    x = [np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)]
    ref, port, wrong = torch.nn.Linear(5, 3), paddle.nn.Linear(5, 3), Turned(5, 3)
    recording = portproof.record(ref, x)
    options = {"modes": ("eval",)}
    assert portproof.assert_aligned(ref, port, x, **options).status == PASS
    assert portproof.assert_judged(port, recording, **options).status == PASS
    assert portproof.align(ref, port, x, **options) and not portproof.align(ref, wrong, x, **options)
    with pytest.raises(AssertionError, match=r"(?s)first difference: .*\nFAIL align: "):
        portproof.assert_aligned(ref, wrong, x, **options)
    with pytest.raises(AssertionError, match=r"(?s)first difference: .*\nFAIL judge: "):
        portproof.assert_judged(wrong, recording, **options)
    with pytest.raises(AssertionError, match=r"\nREFUSED align: the reference itself gives NaN or infinity"):
        portproof.assert_aligned(torch.nn.Sequential(ref, torch.nn.LogSigmoid()), port, [x[0] * np.nan], **options)


def test_no_exit_leaves_a_function():
    """Of a script that calls them it would be status 0."""
    x = [np.ones((4, 5), np.float32)]
    with pytest.raises(Escaped, match="SystemExit: 0"):
        portproof.align(torch.nn.Linear(5, 3), Leaves(5, 3), x)
    rung = Rung("rung", quiet=True)
    with pytest.raises(UserError, match="the reference's end raised SystemExit: 0"):
        rung.of_ref("end", sys.exit, 0)
    assert rung.of_port("end", sys.exit, 0) is None and rung.status == FAIL


@pytest.mark.parametrize("lack", [MemoryError(), *(OSError(number, "none left") for number in LACKING)])
def test_what_the_machine_lacks_is_of_neither_side(lack):
    def raising() -> None:
        raise lack

    for of_side in (Rung("rung").of_ref, Rung("rung").of_port):
        with pytest.raises(MachineError, match="this machine lacks it"):
            of_side("function", raising)


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_of_which_no_output_can_be_judged_passes_no_door(count):
    """14 sines leave no digit in float64, so a port that gives zeros is as near as a faithful one."""
    lost, zeros = (chaotic(40.0, sin, lambda m, x: m.line(x), sines=14) for sin in (torch.sin, paddle.sin))
    ref = Ref(lambda m, x: (lost(m, x),) * count, line=torch.nn.Linear(6, 6))
    port = Port(lambda m, x: (0.0 * zeros(m, x),) * count, line=paddle.nn.Linear(6, 6))
    inputs = [normal(8, 6)]
    recorded = portproof.record(ref, inputs)
    verdicts = [
        portproof.align(ref, port, inputs),
        portproof.judge(port, recorded),
        ladder.forward(ref, port, inputs),
        ladder.gradients(ref, port, inputs),
    ]
    for verdict in verdicts:
        assert verdict.status == REFUSED, str(verdict)
        refused = {(row.item.mode, row.item.name) for row in verdict.rows if row.status == REFUSED}
        names = ["output"] if count == 1 else ["output[0]", "output[1]"]
        assert refused >= {(mode, name) for mode in ("eval", "train") for name in names}


def test_the_models_own_output_is_compared_where_a_layer_of_that_name_is_left_out():
    ref = Ref(lambda m, x: m.output(x), output=torch.nn.Linear(5, 3))
    port = Port(lambda m, x: 2 * m.output(x), output=paddle.nn.Linear(5, 3))
    verdict = ladder.forward(ref, port, [normal(4, 5)], leave_out=["output"])
    assert verdict.status == FAIL, str(verdict)
