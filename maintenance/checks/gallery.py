"""The fault gallery: real porting mistakes, each put into a copy of the port, and what the rungs say of it.

Every rung runs as its command does, in a process of its own with the copy in the port's place. The processes are
forked from one that has imported both frameworks and computed nothing, since the imports take longer than most rungs.

A fault's rungs run from the lowest on until one fails. One that never imports the edited file is left out: it runs the
same code as without the fault, which it passed.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from tqdm import tqdm

from maintenance import ROOT
from portproof.compare import FAIL, PASS, joined
from sturdyio.cli import UserError, existing_file, one_line

PORT = "mobilenetv3_paddle"
FAULTS = Path(__file__).with_name("faults.yaml")
AREAS = ("model", "weights", "data", "metric", "loss", "optimizer", "schedule", "initialisation", "training")
LOCATED_AREAS = ("model", "weights")  # where the module itself has to be named
PRELOADED = ["maintenance.checks.gallery", "torch", "torchvision", "paddle", "reprod_log"]
FLAGS = {"07_test_train": ["--short"]}  # all of it takes a quarter of an hour
TIMEOUT = 600  # seconds a rung; the longest takes 100 of one core


@dataclass(frozen=True)
class Fault:
    """One mistake: in `file` of the port the text `right`, which is there once, becomes `wrong`."""

    name: str
    area: str
    rung: str  # the first that can see it
    file: str  # in mobilenetv3_paddle/
    right: str
    wrong: str
    expected: str  # pattern that the module or item named by the rung has to match as a whole
    stands_for: str = ""  # who makes this mistake and how, in one sentence
    stands_for_zh: str = ""  # the same in Chinese
    issue: str = ""  # where somebody did, as OWNER/REPOSITORY#NUMBER, or ""


@dataclass(frozen=True)
class Run:
    """What one rung said: its exit status (None if it took too long) and output, and what it left behind."""

    status: int | None
    output: str
    errors: str = ""
    item: str = ""  # the first that failed, or that the rung raised
    located: str = ""  # the module that the locator names, "" if it was not asked
    imported: Sequence[str] = ()  # files of the port
    keys: Sequence[str] = ()  # what it recorded of the reference
    predecessor: str = ""  # "passes" or "fails", "" where nothing was written


@dataclass(frozen=True)
class Outcome:
    """What the ladder said of a fault; `problem` is empty if the right rung failed and named the right thing."""

    fault: Fault
    rung: str  # that caught it, "" if none did
    named: str
    predecessor: str  # "passes", "fails", "always fails" if also without the fault, "" where not all was written
    problem: str
    output: str = ""  # of that rung


def load_faults(path: Path) -> list[Fault]:
    """The definitions in `path`; raises UserError, which names the fault, for one that is not as it must be."""
    try:
        entries = yaml.safe_load(existing_file(path, "faults").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"faults {path} are no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list):
        raise UserError(f"faults {path} must be a list")
    faults = []
    for number, entry in enumerate(entries, 1):
        name = entry.get("name", f"number {number}") if isinstance(entry, dict) else f"number {number}"
        problem = _shape_problem(entry)
        if not problem:
            faults.append(Fault(**entry))
            problem = _value_problem(faults[-1], {fault.name for fault in faults[:-1]})
        if problem:
            raise UserError(f"fault {name!r} in {path}: {problem}")
    return faults


def _shape_problem(entry: object) -> str:
    names = [field.name for field in fields(Fault)]
    if not isinstance(entry, dict) or set(entry) != set(names):
        return f"its fields must be {', '.join(names)}"
    for name, value in entry.items():
        if not isinstance(value, str):
            return f"{name} must be text, not {value!r}"
        if not value.strip() and name not in ("issue", "wrong"):
            return f"{name} is empty"
    return ""


def _value_problem(fault: Fault, others: set[str]) -> str:
    """Why this fault cannot be tried, "" if it can."""
    if fault.name in others:
        return "another has the same name"
    if fault.area not in AREAS:
        return f"no such area: {fault.area!r}; choose from {', '.join(AREAS)}"
    if fault.issue and not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.issue):
        return f"issue {fault.issue!r} must be OWNER/REPOSITORY#NUMBER"
    if not (ROOT / "steps" / f"{fault.rung}.py").is_file():
        return f"no such rung: {fault.rung!r}"
    if fault.right == fault.wrong:
        return "right and wrong are the same"
    try:
        re.compile(fault.expected)
    except re.error as error:
        return f"expected is no pattern: {error}"
    path = ROOT / PORT / fault.file
    if not path.is_file():
        return f"the port has no file {fault.file!r}"
    count = path.read_text(encoding="utf-8").count(fault.right)
    return "" if count == 1 else f"{fault.file} has its right text {count} times, not once: {fault.right!r}"


def copy_port(folder: Path, fault: Fault | None) -> None:
    """The port, with the fault, in `folder`."""
    shutil.copytree(ROOT / PORT, folder / PORT, ignore=shutil.ignore_patterns("__pycache__"))
    if fault:
        path = folder / PORT / fault.file
        path.write_text(path.read_text(encoding="utf-8").replace(fault.right, fault.wrong), encoding="utf-8")


def run_rung(context: multiprocessing.context.BaseContext, rung: str, folder: Path) -> Run:
    """`rung` with the port in `folder`, where its files and output are left."""
    out = folder / rung
    out.mkdir()
    process = context.Process(target=_child, args=(rung, folder, out, multiprocessing.get_start_method()))
    process.start()
    process.join(TIMEOUT)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)  # its own processes too
        process.join()
        return Run(None, f"{rung} took more than {TIMEOUT} s")
    output, errors = ((out / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr"))
    left = json.loads((out / "left.json").read_text()) if (out / "left.json").is_file() else {}
    return Run(process.exitcode, output, errors, **left)


def _child(rung: str, folder: Path, out: Path, start_method: str) -> None:
    """What `PYTHONPATH=folder python steps/RUNG.py --output-dir out` does, and a look at its files."""
    os.setsid()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with (out / name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    multiprocessing.set_start_method(start_method, force=True)  # a loader's workers start as they do elsewhere
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    import_port(folder)
    namespace = runpy.run_path(str(ROOT / "steps" / f"{rung}.py"), run_name="rung")
    args = namespace["get_args_parser"]().parse_args(["--output-dir", str(out), *FLAGS.get(rung, [])])
    status, left = _named(namespace["main"], args)
    sys.stdout.flush()
    files = [Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    left["imported"] = sorted(str(f.relative_to(folder / PORT)) for f in files if f.is_relative_to(folder / PORT))
    left["keys"], left["predecessor"] = predecessor_says(out)
    (out / "left.json").write_text(json.dumps(left))
    sys.exit(status)


def _named(main: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """(how a rung ends, {"item": ..., "located": ...} as in `Run`)."""
    try:
        step = main(args)
    except Exception as error:
        traceback.print_exc()
        return 2 if isinstance(error, UserError) else FAIL, {"item": f"it raised {one_line(error)}", "located": ""}
    row = joined("", step.verdicts).first_failure
    locations = [verdict.location for verdict in step.verdicts if verdict.location]
    located = (locations[0].name or "the model itself") if locations else ""
    return step.status, {"item": row.name if row else "", "located": located}


def import_port(folder: Path) -> None:
    """Import the port from `folder` before anything else can from where it is installed."""
    spec = importlib.util.spec_from_file_location(PORT, folder / PORT / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PORT] = module
    spec.loader.exec_module(module)


def predecessor_says(out: Path) -> tuple[list[str], str]:
    """(what the reference's files in `out` hold, reprod_log's own verdict on the two sides: "passes" or "fails")."""
    from reprod_log import ReprodDiffHelper  # it imports both frameworks

    keys, verdicts = [], []
    for path in sorted(out.glob("*_ref.npy")):
        helper, log = ReprodDiffHelper(), out / f"{path.stem}_diff.txt"
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                ref, port = (helper.load_info(str(path.with_stem(path.stem[:-3] + side))) for side in ("ref", "paddle"))
                keys += ref
                helper.compare_info(ref, port)
                helper.report(diff_method="mean", diff_threshold=1e-6, path=str(log))
                verdicts.append("diff check passed" in log.read_text())
            except Exception:  # it asserts that both have the same keys, and subtracts whatever they hold
                verdicts.append(False)
    return keys, ("passes" if all(verdicts) else "fails") if verdicts else ""


def try_fault(
    context: multiprocessing.context.BaseContext, fault: Fault, controls: dict[str, Future[Run]], below: bool
) -> Outcome:
    """The rungs in order until one does not pass; `controls` are their runs without a fault, `below` is run_gallery's.

    Raises UserError if a rung does not pass without a fault.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_port(folder, fault)
        for rung, control in sorted(controls.items()):
            if rung == fault.rung or (below and fault.file in control.result().imported):
                run = run_rung(context, rung, folder)
                if control.result().status != PASS:
                    last = (control.result().output.splitlines() or ["it printed nothing"])[-1]
                    raise UserError(f"{rung} does not pass without a fault ({last}): run steps/{rung}.py")
                if run.status != PASS:
                    return judge(fault, rung, run, control.result())
    return Outcome(fault, "", "", "", "missed: every rung passes")


def judge(fault: Fault, rung: str, run: Run, control: Run) -> Outcome:
    """Whether this is the rung, and whether it names what it should."""
    named = run.located if fault.area in LOCATED_AREAS and run.located else run.item
    # A rung that stopped early has not recorded what the predecessor would compare.
    predecessor = run.predecessor if set(control.keys) <= set(run.keys) else ""
    if predecessor == control.predecessor == "fails":
        predecessor = "always fails"
    problem = ""
    if run.status != FAIL:
        problem = f"{rung} ended with status {run.status}: {run.output[-500:]}{run.errors[-2000:]}"
    elif rung != fault.rung:
        problem = f"caught by {rung}, which names {named}, not by {fault.rung}"
    elif not re.fullmatch(fault.expected, named):
        problem = f"{rung} names {named!r}, which does not match {fault.expected!r}"
    return Outcome(fault, rung, named, predecessor, problem, run.output)


def run_gallery(
    faults: Sequence[Fault],
    rungs: Iterable[str],
    jobs: int,
    below: bool = True,
    known: Mapping[str, Run] | None = None,
) -> tuple[dict[str, Run], list[Outcome]]:
    """(every rung without a fault, every fault's outcome in the order of `faults`), `jobs` rungs at a time.

    Without `below` only the rung that should catch a fault is run, not those below it. `known` are runs without a fault
    that need not be made. Raises UserError if a rung does not pass without a fault.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # other processes run beside them
        multiprocessing.forkserver.ensure_running()  # it keeps the environment that it starts with
    with ThreadPoolExecutor(jobs) as pool, tempfile.TemporaryDirectory() as name:
        copy_port(Path(name), None)
        known = known or {}
        controls = {
            rung: pool.submit(known.get, rung) if rung in known else pool.submit(run_rung, context, rung, Path(name))
            for rung in sorted(rungs, reverse=True)
        }
        # The longest first, so that none is left running alone at the end.
        order = sorted(faults, key=lambda fault: fault.rung, reverse=True)
        tried = {fault.name: pool.submit(try_fault, context, fault, controls, below) for fault in order}
        try:
            for future in tqdm(as_completed(tried.values()), "faults", len(faults), leave=False, disable=None):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        controls = {rung: future.result() for rung, future in sorted(controls.items())}
        return controls, [tried[fault.name].result() for fault in faults]
