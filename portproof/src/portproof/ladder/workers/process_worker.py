"""A process that calls a callable again and again, and leaves a file of what each call recorded.

    LAUNCHER -m portproof.ladder.workers.process_worker FOLDER/JOB.json [NAME]

`write_job` writes JOB.json. The process, called NAME or its rank, prints to FOLDER/NAME.log, writes how far it came to
FOLDER/NAME.stage, and each record to FOLDER/NAME.NUMBER.npz. If a call raises, the log's last line says what, and the
status is 1, or MISTAKE for a user's mistake.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from portproof.compare import Item
from portproof.io.cli import resolve
from sturdyio.cli import UserError, one_line, user_code

MISTAKE = 65  # EX_DATAERR; a run may end with 2 by itself
JOINING, ENDED = "joining", "ended"  # stages that are asked for
Record = dict[Item, np.ndarray]  # of one run


@dataclass
class _Worker:
    stage_file: Path | None = None  # None: not started here, and alone
    leave: Callable[[], Any] | None = None  # leaves its group

    def stage(self, name: str) -> None:
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
    np.savez(part, **{json.dumps(vars(item)): array for item, array in record.items()})
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


if __name__ == "__main__":
    rank = os.environ.get("PADDLE_TRAINER_ID") or os.environ.get("RANK", "0")
    job, *names = sys.argv[1:]
    # The module that callables import is another than __main__.
    importlib.import_module("portproof.ladder.workers.process_worker").main(Path(job), *(names or [rank]))
