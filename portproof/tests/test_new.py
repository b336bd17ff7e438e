"""`portproof new`: the project that it writes, what runs in it at once, and all of it filled in for a text model."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import forked_python
import pytest

TESTS = Path(__file__).parent
PAIR = ("--ref", "text_task:RefNet", "--port", "text_task:PortNet", "--input", "6,12:int64:40")
AT_ONCE, TO_FILL_IN = (
    ("01_test_forward", "06_test_init"),
    {
        "02_test_data": "ref_batches",
        "03_test_metric": "ref_metric",
        "04_test_loss": "ref_criterion",
        "05_test_backward": "ref_optimizer",
        "07_test_train": "ref_run",
        "08_test_dist": "ref_process",
        "09_test_deploy": "ref_with_weights",
    },
)
# A mistake in each part of the port, the rung that has to notice it, and what it has to name.
FAULTS = {
    "forward": ("01_test_forward", "located: act (GELU)"),
    "load": ("01_test_forward", "first file 1/weights/words.weight"),
    "data": ("02_test_data", "batch 0[0]"),
    "metric": ("03_test_metric", "samples, batches of 5"),
    "loss": ("04_test_loss", "drawn logits"),
    "gradient": ("05_test_backward", "gradient"),
    "optimizer": ("05_test_backward", "parameters after 8 updates"),
    "schedule": ("05_test_backward", "learning rates"),
    "step": ("05_test_backward", "iteration"),
    "init": ("06_test_init", "words.weight"),
    "train": ("07_test_train", "loss, "),
    "resume": ("07_test_train", "after loading/schedule/[last_epoch]"),
    "dist": ("08_test_dist", "gradient"),
    "deploy": ("09_test_deploy", "paddle, one sample"),
}


def run(*arguments: str | Path, fault: str = "") -> CompletedProcess:
    """Python's run of a script or module, which finds the text task."""
    paths = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return forked_python.python(*arguments, env={**os.environ, **paths, "TEXT_FAULT": fault})


def new(folder: Path, *pair: str) -> CompletedProcess:
    return run("-m", "portproof", "new", folder, *(pair or PAIR))


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    """A project in which nothing is filled in."""
    folder = tmp_path_factory.mktemp("new") / "proof"
    done = new(folder)
    assert (done.returncode, done.stderr) == (0, "") and "steps/run_all.py" in done.stdout
    return folder


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A project in which everything is: each function that waits calls that of its name in text_task."""
    folder = tmp_path_factory.mktemp("new") / "proof"
    assert new(folder).returncode == 0
    function = re.compile(
        r'(def (\w+)\(([^)]*)\)[^\n]*\n)(?:    """.*?"""\n)?    raise to_fill_in\(.*?"\)\n', re.DOTALL
    )

    def call(match: re.Match) -> str:
        names = ", ".join(argument.partition(":")[0].strip() for argument in match[3].split(",") if argument)
        return f"{match[1]}    import text_task\n\n    return text_task.{match[2]}({names})\n"

    count = 0
    for script in (folder / "steps").glob("*.py"):
        text, changed = function.subn(call, script.read_text())
        if script.name == "01_test_forward.py":
            text = text.replace("REF_LOAD = None\nPORT_LOAD = None", "from text_task import port_load, ref_load\n")
            text = text.replace("REF_LOAD", "ref_load").replace("PORT_LOAD", "port_load")
        if script.name == "04_test_loss.py":
            text = text.replace("CASES = None", "from text_task import loss_cases\n\nCASES = loss_cases()")
        script.write_text(text)
        count += changed
    assert count == 21
    return folder


def step(folder: Path, name: str, output: Path, fault: str = "") -> CompletedProcess:
    return run(folder / "steps" / f"{name}.py", "--output-dir", output, fault=fault)


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_needs_no_more_than_the_models_runs_at_once(name, empty, tmp_path):
    done = step(empty, name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PASS {name}" in done.stdout
    assert ("not checked: weights files" in done.stdout) == (name == "01_test_forward")
    assert len(list(tmp_path.glob("*_ref.npy"))) == len(list(tmp_path.glob("*_paddle.npy"))) == 1


@pytest.mark.thorough("the rungs that start no processes", but="^0[2-79]")
@pytest.mark.parametrize("name", TO_FILL_IN)
def test_the_others_say_in_one_line_what_to_fill_in(name, empty, tmp_path):
    done = step(empty, name, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert f"fill in {TO_FILL_IN[name]} in " in line and str(empty / "steps") in line
    if name == "05_test_backward":
        assert "ok      words/gradient" in done.stdout


@pytest.mark.parametrize("fault", ["forward", "gradient", "init"])
def test_what_runs_at_once_notices_faults(fault, empty, tmp_path):
    name, named = FAULTS[fault]
    done = step(empty, name, tmp_path, fault)
    assert done.returncode == 1, done.stdout + done.stderr
    assert named in done.stdout


def test_a_known_difference_is_accepted_in_every_step(tmp_path):
    folder = tmp_path / "proof"
    pair = "--ref", "test_accepted:Ref", "--port", "test_accepted:Port", "--input", "6,5"
    assert new(folder, *pair).returncode == 0
    assert step(folder, "01_test_forward", tmp_path).returncode == 1
    made = folder / "steps" / "pair.py"
    made.write_text(made.read_text().replace("list[str] = []", 'list[str] = ["*.running_var<=1: Paddle divides by n"]'))
    done = step(folder, "01_test_forward", tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("; 2 accepted\n"), done.stdout + done.stderr
    for script in (folder / "steps").glob("0*.py"):
        assert "Rung(NAME, accept=ACCEPT)" in script.read_text()


def test_results_lie_in_the_project(empty, tmp_path, monkeypatch):
    """Wherever one stands."""
    monkeypatch.chdir(tmp_path)
    assert run(empty / "steps" / "01_test_forward.py").returncode == 0
    assert (empty / "result" / "log").is_dir() and not list(tmp_path.iterdir())
    scripts = [script for script in (empty / "steps").glob("*.py") if "rung_parser(" in script.read_text()]
    assert len(scripts) == 10 and all("rung_parser(NAME, __doc__, RESULT)" in script.read_text() for script in scripts)


@pytest.mark.thorough("test_a_fault_in_each_part_is_caught_by_its_rung names what each part has, and no other")
def test_every_rung_of_a_text_model_passes_once_it_is_filled_in(filled, tmp_path):
    done = run(filled / "steps" / "run_all.py", "--output-dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^  (\w+) +(0\d_test_\w+)", done.stdout, re.MULTILINE) == [
        ("PASS", name) for name in sorted([*AT_ONCE, *TO_FILL_IN])
    ]
    assert (tmp_path / "report.html").is_file()


@pytest.mark.thorough("the rungs that start no processes", but="^(?!train|resume|dist)")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_each_part_is_caught_by_its_rung(fault, filled, tmp_path):
    name, named = FAULTS[fault]
    done = step(filled, name, tmp_path, fault)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.lstrip().startswith(("FAIL", "found", "first"))]
    assert named in done.stdout and failed


def test_a_port_that_is_not_filled_in_is_refused_and_does_not_fail(filled, tmp_path):
    script = (filled / "steps" / "03_test_metric.py").read_text()
    text = script.replace("return text_task.port_metric(outputs, targets)", 'raise to_fill_in("port_metric", "x", "y")')
    changed = filled / "steps" / "half.py"
    changed.write_text(text)
    done = run(changed, "--output-dir", tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and "fill in port_metric" in done.stderr


# Users' mistakes


@pytest.mark.parametrize("name", ["01_test_forward", "05_test_backward", "06_test_init"])
def test_a_pair_that_is_no_longer_there_is_one_line(name, empty, tmp_path):
    script = empty / "steps" / f"{name}.py"
    paths = os.pathsep.join(path for path in sys.path if Path(path) != TESTS)
    done = forked_python.python(script, "--output-dir", tmp_path, env={**os.environ, "PYTHONPATH": paths})
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "'text_task:RefNet'" in line and "PYTHONPATH" in line


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("kept")
    done = new(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_written_to(tmp_path):
    assert new(tmp_path).returncode == 0
    assert (tmp_path / "steps" / "pair.py").is_file()


@pytest.mark.parametrize(
    ("pair", "named"),
    [
        (("--ref", "no_such:Net", *PAIR[2:]), "--ref 'no_such:Net'"),
        ((*PAIR[:2], "--port", "text_task:Net", *PAIR[4:]), "no Net that can be called"),
        ((*PAIR[:2], "--port", "text_task:PortNet(width=3)", *PAIR[4:]), "making it raised TypeError"),
        ((*PAIR[:4], "--input", "six"), "'six' is no shape"),
    ],
)
def test_a_pair_that_cannot_be_made_writes_nothing(pair, named, tmp_path):
    done = new(tmp_path / "proof", *pair)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert named in done.stderr and not list(tmp_path.iterdir())
