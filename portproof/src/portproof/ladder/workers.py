"""Processes that call a callable again and again, and leave a file of what each call recorded.

    LAUNCHER -m portproof.ladder.workers FOLDER/JOB.json [NAME]

`launch` starts a group of one side, `launch_runs` one process of each side, and both read what they recorded.
`write_job` writes JOB.json. The process, called NAME or its rank, prints to FOLDER/NAME.log, writes how far it came to
FOLDER/NAME.stage, and each record to FOLDER/NAME.NUMBER.npz. If a call raises, the log's last line says what, and the
status is 1, or MISTAKE for a user's mistake.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from portproof.compare import Item
from portproof.io.cli import resolve
from portproof.python39 import zip_strict
from sturdyio.cli import MachineError, UserError, one_line, user_code

WORKER = "portproof.ladder.workers"  # this module
MISTAKE = 65  # EX_DATAERR; a run may end with 2 by itself
JOINING, ENDED = "joining", "ended"  # stages that are asked for
Record = dict[Item, np.ndarray]  # of one run
KILLED = "its process was killed: is there enough memory?"


@dataclass
class _Worker:
    stage_file: Path | None = None  # None: not started here, and alone
    leave: Callable[[], Any] | None = None  # leaves its group

    def stage(self, name: str) -> None:
        assert self.stage_file is not None
        self.stage_file.write_text(name)


_worker = _Worker()


def join_group(join: Callable[[], Any], leave: Callable[[], Any]) -> None:
    """Join the other processes by `join()`, unless this one already has; `leave()` ends its last run.

    For the callables of `dist`: a process executes several, and no framework promises a second group. A `join()` that
    fails is the machine's fault. A process alone joins in every run.
    """
    if _worker.stage_file is None:
        join()
    elif _worker.leave is None:
        _worker.stage(JOINING)
        join()
        _worker.stage("joined")
        _worker.leave = leave


def place() -> tuple[int, int]:
    """(rank, number of processes) of this process, from the launcher's environment variables; (0, 1) alone."""
    found = os.environ
    rank = found.get("PADDLE_TRAINER_ID") or found.get("RANK", "0")
    return int(rank), int(found.get("PADDLE_TRAINERS_NUM") or found.get("WORLD_SIZE", "1"))


def record_of(run: Callable[..., Mapping[Item | str, Any]], *args: Any, **kwargs: Any) -> Record:
    """What `run` returns; TypeError if that is no dict of arrays of numbers or text."""
    with user_code():
        found = run(*args, **kwargs)
    if not isinstance(found, Mapping):
        raise TypeError(f"it returned {type(found).__name__}, not a dict of arrays")
    items = {key if isinstance(key, Item) else Item(str(key)): np.asarray(array) for key, array in found.items()}
    for item, array in items.items():
        if array.dtype.kind not in "biufU":
            raise TypeError(f"{item} is no array of numbers or text, its dtype is {array.dtype}")
    return items


def write_job(path: Path, run: str, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
    """Have a process call `run` with each (arguments, keyword arguments)."""
    path.write_text(json.dumps({"run": run, "calls": calls}), encoding="utf-8")


def read_record(path: Path) -> Record:
    with np.load(path, allow_pickle=False) as arrays:
        return {Item(**json.loads(key)): array for key, array in arrays.items()}


def _write_record(record: Record, path: Path) -> None:
    """The file is there when it is whole."""
    part = path.with_suffix(".part.npz")
    named: dict[str, Any] = {json.dumps(vars(item)): array for item, array in record.items()}
    np.savez(part, **named)
    part.rename(path)


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written
    os._exit(1)


def main(job_file: Path, name: str) -> None:
    folder = job_file.parent
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.stage_file = folder / f"{name}.stage"
    _worker.stage("started")
    job = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        with user_code():
            run = resolve(job["run"], "the callable")
            for number, (args, kwargs) in enumerate(job["calls"]):
                _write_record(record_of(run, *args, **kwargs), folder / f"{name}.{number}.npz")
            if _worker.leave:
                _worker.leave()
    except Exception as error:  # whatever a callable may raise
        traceback.print_exc()
        is_mistake = isinstance(error, UserError)
        print(error if is_mistake else one_line(error), file=sys.stderr, flush=True)
        sys.exit(MISTAKE if is_mistake else 1)
    _worker.stage(ENDED)


@dataclass
class Outcome:
    records: list[dict[Any, Any]]  # by process and run; runs that all ended
    reason: str = ""  # why not all runs ended
    log: str = ""  # its last lines
    is_machines: bool = False  # no side's fault: never joined, or killed


def last_words(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return "\n".join(text.rstrip().splitlines()[-40:])


@contextmanager
def _started(command: Sequence[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """A process in `folder`; at the end it is killed with all that it has started."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    absolute = dict.fromkeys(str(Path(path).absolute()) for path in [*given, *sys.path])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(absolute)} | variables
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (folder / "launcher.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, start_new_session=True, **streams)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()  # workers end then: the launcher gives them sessions of their own
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows, which has no groups of processes
            process.kill()
        process.wait()


def _records(folder: Path, processes: Collection[Any], runs: Iterable[Any]) -> list[dict[Any, Record]]:
    records: list[dict[Any, Record]] = [{} for _ in processes]
    for number, run in enumerate(runs):
        paths = [folder / f"{process}.{number}.npz" for process in processes]
        if all(path.is_file() for path in paths):
            for own, path in zip_strict(records, paths):
                own[run] = read_record(path)
    return records


def command(framework: str, world_size: int, folder: Path) -> list[str]:
    """The framework's launcher with its arguments; it chooses a free port itself."""
    options = ["--nproc_per_node", str(world_size), "--log_dir", str(folder / "launcher")]
    worker = ["-m", WORKER, str(folder / "job.json")]
    if framework == "torch":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, *worker]
    import paddle

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None or paddle.device.cuda.device_count():
        # Where it sees cards it wants one a process, also on the CPU: the first for all.
        first = "0" if visible is None else visible.split(",")[0]
        options += ["--devices", ",".join([first] * world_size)]
    # It knows no -m, but starts any program.
    return [sys.executable, "-m", "paddle.distributed.launch", *options, sys.executable, *worker]


def launch(framework: str, run: str, world_size: int, runs: Mapping[str, Any], folder: Path, timeout: float) -> Outcome:
    """Record `run(options, "float64")` of `runs` {name: options} in processes; `folder` must be empty."""
    write_job(folder / "job.json", run, [([options, "float64"], {}) for options in runs.values()])
    ended = "ended with an error"
    # The launcher's temporary files go with the folder.
    with _started(command(framework, world_size, folder), folder, TMPDIR=str(folder)) as process:
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = f"did not end within {timeout:g} s"
    ranks = range(world_size)
    records = _records(folder, ranks, runs)
    stages = [last_words(folder / f"{rank}.stage") for rank in ranks]
    if set(stages) == {ENDED}:
        return Outcome(records)
    said = folder / "launcher.log"
    if "" in stages:
        log = last_words(said)
        return Outcome(records, f"the launcher {ended} before all processes ran{_cause(log)}", log, is_machines=True)
    if re.search(r"code *:? -9\b", said.read_text(encoding="utf-8", errors="replace")):
        return Outcome(records, f"one of {world_size} processes: {KILLED}", is_machines=True)
    logs = [last_words(folder / f"{rank}.log") for rank in ranks]
    raised = [rank for rank in ranks if "Traceback" in logs[rank]]
    # Where several raised, the others lost the first, whose log is older.
    first = min(raised or ranks, key=lambda rank: (folder / f"{rank}.log").stat().st_mtime)
    reason = f"process {first} of {world_size} {ended}{_cause(logs[first])}"
    return Outcome(records, reason, logs[first], is_machines=stages[first] == JOINING)


def _cause(log: str) -> str:
    telling = [line for line in log.splitlines() if "Error" in line] or log.splitlines()
    return f": {telling[-1].strip()}" if telling else ""


def check_paths(paths: Mapping[str, str], options: Any) -> None:
    """Raise UserError unless processes can be handed `options` and call `paths`, {side: PKG.MOD:NAME}.

    Raises PortError for a module of the port that raises when imported.
    """
    for side, path in paths.items():
        resolve(path, side, of_port=side == "port")
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise UserError(f"options cannot be written as JSON ({error}): they are handed to other processes") from error


def launch_runs(
    paths: Mapping[str, str], calls: Mapping[str, Mapping[Any, Mapping[str, Any]]], folder: Path
) -> dict[str, Outcome]:
    """{side: its process, with records by name of `calls` {side: {name: keyword arguments}}}, made in their order.

    `paths` are those of the callables. Raises UserError where a run does, MachineError where a process was killed.
    """
    processes = {}
    with ExitStack() as stack:
        for side, path in paths.items():
            job = folder / f"{side}.json"
            write_job(job, path, [([], kwargs) for kwargs in calls[side].values()])
            worker = [sys.executable, "-m", WORKER, str(job), side]
            processes[side] = stack.enter_context(_started(worker, folder))
        for process in processes.values():
            process.wait()
    return {side: _outcome(folder, side, calls[side], process.returncode) for side, process in processes.items()}


def _outcome(folder: Path, side: str, runs: Collection[Any], status: int) -> Outcome:
    log = last_words(folder / f"{side}.log")
    last_line = log.rpartition("\n")[2]
    if status == MISTAKE and log:
        raise UserError(last_line)
    if status < 0 and status == -signal.SIGKILL:  # which Windows does not have
        raise MachineError(f"training runs of the {side}: {KILLED}")
    if status == 1 and log:
        return Outcome([], last_line, log)
    if status:
        return Outcome([], f"it ended with status {status}", log)
    [records] = _records(folder, [side], runs)
    if len(records) < len(runs):
        return Outcome([], "it ended with status 0 before all runs were done", log)
    by_name = {run: {item.name: array for item, array in record.items()} for run, record in records.items()}
    return Outcome([by_name])


if __name__ == "__main__":
    job, *names = sys.argv[1:]
    # The module that callables import is another than __main__.
    importlib.import_module(WORKER).main(Path(job), *(names or [str(place()[0])]))
