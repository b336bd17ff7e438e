"""Rungs in processes of their own: whatever a rung does to its process, it has passed only if its result is there.

Two at once are forked from a process that has imported what they need: each has a core of its own. A process that has
already computed must not be forked for this: the threads with which its libraries compute are not in the fork, which
then waits for them for ever. So only a command that has computed nothing runs its rungs so; others start a new one.
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
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal that a process gets when the one that forked it ends
PAUSE = 0.05  # seconds between two looks at what a rung has printed
Run = Callable[[int], RungResult]  # the rung of that number


def cores_of_a_lane() -> int:
    """How many threads each process may compute with; 0 where rungs cannot run side by side."""
    if sys.platform != "linux":  # elsewhere libraries do not outlive a fork, or there is none
        return 0
    return len(os.sched_getaffinity(0)) // LANES


def _sendable(result: RungResult) -> RungResult:
    """The result with no more than the reports need, and with no function in it but look-ups."""
    rung = result.rung
    if rung is None:
        return result
    groups = [
        {row.item: group(row.item) for row in verdict.rows}.__getitem__
        for verdict, group in zip_strict(rung.verdicts, rung.groups)
    ]
    sent = Findings(rung.name, rung.verdicts, groups, rung.types, rung.curves, rung.pictures, rung.log)
    return replace(result, rung=sent)


def _lane(run: Run, order: Sequence[int], taken: multiprocessing.Value, folder: Path, parent: int) -> None:
    """Take one rung after the other, and leave N.by.PID, N.out and N.err, which it prints, and then N.result."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a rung ends the processes that it has started
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    while os.getppid() == parent:
        with taken.get_lock():
            place, taken.value = taken.value, taken.value + 1
        if place >= len(order):
            return
        number = order[place]
        (folder / f"{number}.by.{os.getpid()}").touch()
        for descriptor, name in ((1, "out"), (2, "err")):
            with (folder / f"{number}.{name}").open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        sys.stdout, sys.stderr = (open(i, "w", encoding="utf-8", closefd=False) for i in (1, 2))  # noqa: SIM115
        try:
            result: RungResult | UserError = _sendable(run(number))
        except UserError as mistake:
            result = mistake
        sys.stdout.flush()
        sys.stderr.flush()
        part = folder / f"{number}.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(folder / f"{number}.result")


def side_by_side(
    run: Run, order: Sequence[int], count: int = LANES, method: str = "fork"
) -> Iterator[RungResult | str]:
    """The result of each rung by its number, 0, 1, ..., and what it prints, when it is there; of one that died, why.

    They begin in `order`, `count` at a time, in processes that are started by this `method` of multiprocessing. Raises
    the UserError that one raises.
    """
    context = multiprocessing.get_context(method)
    taken, lanes = context.Value("i", 0), []
    with tempfile.TemporaryDirectory() as name:
        arguments = run, order, taken, Path(name), os.getpid()

        def begin() -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            lanes.append(context.Process(target=_lane, args=arguments))
            lanes[-1].start()

        try:
            for _ in range(min(count, len(order))):
                begin()
            for number in range(len(order)):
                yield _followed(Path(name), number, lanes, begin)
        finally:
            _end(lanes)


def _followed(folder: Path, number: int, lanes: list, begin: Callable[[], None]) -> RungResult | str:
    """Print what the rung prints until its result is there; where every lane has died another one begins."""
    printed, most = {"out": 0, "err": 0}, len(lanes) + LANES
    while True:
        takers = [lane for lane in lanes if (folder / f"{number}.by.{lane.pid}").exists()]
        has_ended = any(not lane.is_alive() for lane in takers)
        none_left = not any(lane.is_alive() for lane in lanes)
        done = folder / f"{number}.result"
        is_done = done.is_file()
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            path = folder / f"{number}.{name}"
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(printed[name])
                    text = file.read()
                whole = len(text) if is_done else text.rfind(b"\n") + 1  # no letter of several bytes is parted
                printed[name] += whole
                stream.write(text[:whole].decode("utf-8", "replace"))
                stream.flush()
        if is_done:
            result = pickle.loads(done.read_bytes())  # our own process wrote it, into a folder of ours
            if isinstance(result, UserError):
                raise result
            return result
        if has_ended:
            return _last_words(takers[0].exitcode)
        if none_left and len(lanes) == most:
            return "no process could be started for it"
        if none_left:
            begin()
        time.sleep(PAUSE)


def _last_words(status: int) -> str:
    """Why there is no result of a process that has ended with this status."""
    if status == -signal.SIGKILL:
        return KILLED
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    return f"its process ended {how}, and left no result"


def _end(lanes: list) -> None:
    """End what still runs, and what that has started."""
    for lane in lanes:
        if lane.pid is not None:
            lane.join(0.5)  # a terminal has told it, too, and twice would be once too often
        if lane.is_alive():
            lane.terminate()
    for lane in lanes:
        if lane.pid is not None:
            lane.join(10)
            if lane.is_alive():
                lane.kill()
                lane.join()
