"""One process of several: executes the runs of one side, one by one, and writes what it recorded.

    LAUNCHER -m portproof.ladder.workers.process_worker FOLDER

FOLDER/job.json is {"run": "PKG.MOD:NAME", "options": [those of each run]}. Each process writes FOLDER/RANK.log (all
that it prints), FOLDER/RANK.stage (how far it came) and FOLDER/RANK.NUMBER.npz (what each run recorded).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from portproof.compare import Item
from portproof.io.cli import resolve
from sturdyio.cli import user_code

STARTED, JOINING, JOINED, ENDED = "started", "joining", "joined", "ended"
Record = dict[Item, np.ndarray]  # of one run of one process


@dataclass
class Worker:
    """This process, one of several: where it says how far it came, and what leaves the group that it has joined."""

    stage_file: Path
    leave: Callable[[], Any] | None = None

    def stage(self, name: str) -> None:
        self.stage_file.write_text(name)


_workers: list[Worker] = []  # this process, unless it is alone


def join_group(join: Callable[[], Any], leave: Callable[[], Any]) -> None:
    """Join the other processes by `join()`, unless an earlier run of this process did; `leave()` ends the last run.

    For the callables of `dist`, which a process executes one by one: no framework promises that of a second group. A
    `join()` that fails is the machine's fault and not the side's. A process alone calls it in every run.
    """
    if not _workers:
        join()
        return
    (worker,) = _workers
    if not worker.leave:
        worker.stage(JOINING)
        join()
        worker.stage(JOINED)
        worker.leave = leave


def record_of(run: Callable[[Any, str], Mapping[Item | str, Any]], options: Any, dtype: str) -> Record:
    """What `run(options, dtype)` returns; raises TypeError if that is no dict of arrays of numbers or text."""
    with user_code():
        found = run(options, dtype)
    if not isinstance(found, Mapping):
        raise TypeError(f"it returned {type(found).__name__}, not a dict of arrays")
    items = {key if isinstance(key, Item) else Item(key): np.asarray(array) for key, array in found.items()}
    for item, array in items.items():
        if array.dtype.kind not in "biufU":
            raise TypeError(f"{item} is no array of numbers or text, its dtype is {array.dtype}")
    return {replace(item, dtype=dtype): array for item, array in items.items()}


def write_record(record: Record, path: Path) -> None:
    """Arrays by the fields of their items; the file is there when it is whole."""
    part = path.with_suffix(".part.npz")
    np.savez(part, **{json.dumps(vars(item)): array for item, array in record.items()})
    part.rename(path)


def read_record(path: Path) -> Record:
    """What `write_record` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return {Item(**json.loads(key)): array for key, array in arrays.items()}


def end_with_parent() -> None:
    """End this process when the one that holds the other end of stdin does, however that ends."""

    def watch() -> None:
        os.read(0, 1)  # nothing is ever written
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path) -> None:
    rank = os.environ.get("PADDLE_TRAINER_ID") or os.environ["RANK"]
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    end_with_parent()
    worker = Worker(folder / f"{rank}.stage")
    _workers.append(worker)
    worker.stage(STARTED)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    run = resolve(job["run"], "the callable")
    for number, options in enumerate(job["options"]):
        write_record(record_of(run, options, "float64"), folder / f"{rank}.{number}.npz")
    if worker.leave:
        worker.leave()
    worker.stage(ENDED)


if __name__ == "__main__":
    # Of the module that callables import, which is another than __main__.
    importlib.import_module("portproof.ladder.workers.process_worker").main(Path(sys.argv[1]))
