"""Processes that are started, and what they recorded: several of one side that make a group, or one of each side."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from portproof.ladder.workers.process_worker import ENDED, JOINING, Record, read_record
from portproof.ladder.workers.run_worker import MISTAKE
from sturdyio.cli import MachineError, UserError

WORKER, RUN_WORKER = "portproof.ladder.workers.process_worker", "portproof.ladder.workers.run_worker"
KILLED = "its process was killed: is there enough memory?"


def worker_environment() -> dict[str, str]:
    """Of processes that run in another folder and share the cores: they import the modules that this one does."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    absolute = dict.fromkeys(str(Path(path).absolute()) for path in [*given, *sys.path])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(absolute)}


def warm_processes(modules: Sequence[str]) -> multiprocessing.context.BaseContext:
    """A context whose processes are forked from one that has imported `modules`, and compute with one thread each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # other processes run beside them
    try:
        multiprocessing.forkserver.ensure_running()  # it keeps the environment that it starts with
    finally:
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)
    return context


def last_words(path: Path, count: int = 40) -> str:
    """The last lines of a log, "" if there is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return "\n".join(text.rstrip().splitlines()[-count:])


class LaunchError(Exception):
    """Processes that did not all end well: why, in one line, the last lines of the log that says so, what they left."""

    def __init__(self, reason: str, log: str = "", records: Sequence[dict[str, Record]] = ()) -> None:
        telling = [line for line in log.splitlines() if "Error" in line] or log.splitlines()
        super().__init__(f"{reason}: {telling[-1].strip()}" if telling else reason)
        self.log = log
        self.records = list(records)  # of every process those runs that all of them ended


class CouldNotStart(LaunchError):
    """They never came together on this machine, so nothing was compared."""


class Killed(CouldNotStart):
    """One of them was killed, as it is where memory runs out."""


class Died(LaunchError):
    """They came together, and then one ended with an error, or all waited for ever."""


def command(framework: str, world_size: int, folder: Path) -> list[str]:
    """The command line of the launcher of "torch" or "paddle"; either chooses a free port itself."""
    count, log = ("--nproc_per_node", str(world_size)), ("--log_dir", str(folder / "launcher"))
    if framework == "paddle":
        # It knows no -m, but starts any program.
        launcher = ["paddle.distributed.launch", *count, *log, *one_card(world_size), sys.executable]
    else:
        launcher = ["torch.distributed.run", "--standalone", *count, *log]
    return [sys.executable, "-m", *launcher, "-m", WORKER, str(folder)]


def one_card(world_size: int) -> list[str]:
    """Flags for Paddle's launcher, which wants a card for every process where it sees any, also on the CPU.

    They name the first card for all of them; none of them uses it.
    """
    import paddle

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and paddle.device.cuda.device_count() == 0:
        return []
    first = "0" if visible is None else visible.split(",")[0]
    return ["--devices", ",".join([first] * world_size)]


def _records(folder: Path, world_size: int, names: Iterable[str]) -> list[dict[str, Record]]:
    """Of every process the records of those runs that all of them ended."""
    paths = {name: [folder / f"{rank}.{i}.npz" for rank in range(world_size)] for i, name in enumerate(names)}
    ended = [name for name, files in paths.items() if all(path.is_file() for path in files)]
    return [{name: read_record(paths[name][rank]) for name in ended} for rank in range(world_size)]


def _explain(folder: Path, world_size: int, ended: str, records: list[dict[str, Record]]) -> LaunchError:
    """What went wrong, with the last lines of the process that it went wrong in."""
    stages = [last_words(folder / f"{rank}.stage") for rank in range(world_size)]
    if "" in stages:
        return CouldNotStart(f"the launcher {ended} before all processes ran", last_words(folder / "launcher.log"))
    said = (folder / "launcher.log").read_text(encoding="utf-8", errors="replace")
    if re.search(r"code *:? -9\b", said):
        return Killed(f"one of {world_size} processes: {KILLED}", records=records)
    logs = {rank: last_words(folder / f"{rank}.log") for rank in range(world_size)}
    raised = [rank for rank, log in logs.items() if "Traceback" in log]
    # Where several raised, the others lost the first, whose log is older.
    rank = min(raised or logs, key=lambda rank: (folder / f"{rank}.log").stat().st_mtime)
    kind = CouldNotStart if stages[rank] == JOINING else Died
    return kind(f"process {rank} of {world_size} {ended}", logs[rank], records)


def _run(arguments: list[str], folder: Path, timeout: float) -> str:
    """Run a launcher to its end -> how it ended; no process is left behind, nor any temporary file."""
    env = worker_environment() | {"TMPDIR": str(folder)}
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (folder / "launcher.log").open("wb") as log:
        process = subprocess.Popen(arguments, cwd=folder, env=env, stdout=log, start_new_session=True, **streams)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"did not end within {timeout:g} s"
    finally:
        process.stdin.close()  # the launcher gave its processes sessions of their own; they end when this closes
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows, which has no groups of processes
            process.kill()
        process.wait()
    return "ended with an error"


def launch(
    framework: str, run: str, world_size: int, runs: Mapping[str, Any], folder: Path, timeout: float
) -> list[dict[str, Record]]:
    """Of every process {name: what `run(options, "float64")` recorded} of the `runs` {name: options}, one by one.

    Files go to the empty folder `folder`. Raises CouldNotStart or Died.
    """
    job = {"run": run, "options": list(runs.values())}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    ended = _run(command(framework, world_size, folder), folder, timeout)
    records = _records(folder, world_size, runs)
    if {last_words(folder / f"{rank}.stage") for rank in range(world_size)} != {ENDED}:
        raise _explain(folder, world_size, ended, records)
    return records


class RunFailed(Exception):
    """One side's runs did not all end: why, in a line; the message is the end of their log."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(log)
        self.reason = reason


def launch_runs(
    paths: Mapping[str, str],
    runs: Mapping[str, Mapping[str, Mapping[str, int]]],
    options: Mapping[str, Any],
    folder: Path,
) -> dict[str, dict[str, dict[str, np.ndarray]] | RunFailed]:
    """{side: {name: record}} of `runs` {side: {name: {"seed": ..., "draw": ...}}}, or what a side ended in.

    `paths` names each side's callable. A process with one thread for each, side by side; files go to `folder`.
    """
    processes = {}
    with ExitStack() as stack:
        for side, path in paths.items():
            job = {"run": path, "runs": runs[side], "options": options}
            (folder / f"{side}.json").write_text(json.dumps(job), encoding="utf-8")
            log = stack.enter_context((folder / f"{side}.log").open("wb"))
            worker = [sys.executable, "-m", RUN_WORKER, str(folder), side]
            # In `folder`, since Python looks for packages in the current one first.
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            processes[side] = subprocess.Popen(worker, cwd=folder, env=worker_environment(), **streams)
            stack.callback(processes[side].wait)
            stack.callback(processes[side].kill)  # first: this is what happens to it when the other raises
        for process in processes.values():
            process.wait()
    return {side: _runs_of(folder, side, runs[side], process.returncode) for side, process in processes.items()}


def _runs_of(
    folder: Path, side: str, names: Mapping[str, Any], status: int
) -> dict[str, dict[str, np.ndarray]] | RunFailed:
    if status:
        words = last_words(folder / f"{side}.log")
        if status == MISTAKE and words:
            raise UserError(words.splitlines()[-1])
        if status == -signal.SIGKILL:
            raise MachineError(f"training runs of the {side}: {KILLED}")
        return RunFailed(words.splitlines()[-1] if status == 1 and words else f"it ended with status {status}", words)
    files = {name: folder / f"{side}.{name}.npz" for name in names}
    if not all(path.is_file() for path in files.values()):
        return RunFailed("it ended with status 0 before all runs were done", last_words(folder / f"{side}.log"))
    return {name: dict(np.load(path, allow_pickle=False)) for name, path in files.items()}
