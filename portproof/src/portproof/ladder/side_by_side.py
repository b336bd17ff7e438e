"""Rungs in processes of their own: a rung has passed only if its result is there.

Two at once are forked, from a process that has imported what they need but computed nothing yet: a fork lacks the
threads of its libraries, and would wait for them for ever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from portproof.ladder.workers.launching import KILLED
from portproof.python39 import zip_strict
from portproof.report.summary import Findings, RungResult
from sturdyio.cli import UserError

LANES = 2
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal when the parent ends
PAUSE = 0.05  # seconds between two looks at a rung's output
Rungs = Sequence[Callable[[], RungResult]]


def cores_of_a_lane() -> int:
    """Threads for each of LANES processes; 0 where rungs cannot run side by side."""
    if sys.platform != "linux":  # elsewhere libraries do not outlive a fork
        return 0
    return len(os.sched_getaffinity(0)) // LANES


def _sendable(result: RungResult) -> RungResult:
    """The result without functions, which cannot be pickled."""
    rung = result.rung
    if rung is None:
        return result
    groups = []
    for verdict, group in zip_strict(rung.verdicts, rung.groups):
        groups.append({row.item: group(row.item) for row in verdict.rows}.__getitem__)
    sent = Findings(rung.name, rung.verdicts, groups, rung.types, rung.curves, rung.pictures, rung.log)
    return replace(result, rung=sent)


def _lane(rungs: Rungs, order: Sequence[int], folder: Path, parent: int) -> None:
    """Run each rung that no other lane has taken; write N.by, N.out, N.err, and last N.result."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a rung ends its own processes
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in order:
        if os.getppid() != parent:
            return
        try:
            with (folder / f"{number}.by").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            continue
        for descriptor, name in ((1, "out"), (2, "err")):
            with (folder / f"{number}.{name}").open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        sys.stdout, sys.stderr = (open(i, "w", encoding="utf-8", closefd=False) for i in (1, 2))  # noqa: SIM115
        try:
            result: RungResult | UserError = _sendable(rungs[number]())
        except UserError as mistake:
            result = mistake
        sys.stdout.flush()
        sys.stderr.flush()
        part = folder / f"{number}.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(folder / f"{number}.result")


def side_by_side(
    rungs: Rungs, order: Sequence[int], count: int = LANES, method: str = "fork"
) -> Iterator[RungResult | str]:
    """Yield each rung's result, or why it died, and print its output; a rung's UserError is raised.

    They begin in `order`, `count` at a time; `method` is how multiprocessing starts processes.
    """
    context = multiprocessing.get_context(method)
    lanes = []
    with tempfile.TemporaryDirectory() as name:

        def begin() -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            lanes.append(context.Process(target=_lane, args=(rungs, order, Path(name), os.getpid())))
            lanes[-1].start()

        try:
            for _ in range(min(count, len(rungs))):
                begin()
            for number in range(len(rungs)):
                yield _followed(Path(name), number, lanes, begin)
        finally:
            started = [lane for lane in lanes if lane.pid is not None]
            for lane in started:
                lane.join(0.5)  # a terminal has interrupted it too: not twice
                if lane.is_alive():
                    lane.terminate()
            for lane in started:
                lane.join(10)
                if lane.is_alive():
                    lane.kill()
                    lane.join()


def _followed(folder: Path, number: int, lanes: list, begin: Callable[[], None]) -> RungResult | str:
    printed, most = {"out": 0, "err": 0}, len(lanes) + LANES
    while True:
        ended = [lane for lane in lanes if not lane.is_alive()]
        done = folder / f"{number}.result"
        is_done = done.is_file()
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            text = _bytes_of(folder / f"{number}.{name}")[printed[name] :]
            whole = len(text) if is_done else text.rfind(b"\n") + 1  # cuts no character
            printed[name] += whole
            stream.write(text[:whole].decode("utf-8", "replace"))
            stream.flush()
        if is_done:
            result = pickle.loads(done.read_bytes())  # our own process wrote it
            if isinstance(result, UserError):
                raise result
            return result
        taker = _bytes_of(folder / f"{number}.by")
        for lane in ended:
            if taker == str(lane.pid).encode():
                status = lane.exitcode
                how = f"by signal {-status}" if status < 0 else f"with status {status}"
                return KILLED if status == -signal.SIGKILL else f"its process ended {how}, and left no result"
        if len(ended) == most:
            return "no process could be started for it"
        if len(ended) == len(lanes):
            begin()
        time.sleep(PAUSE)


def _bytes_of(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
