"""SIGTERM, which a cluster sends before it takes a machine away: training ends after its step, and is saved."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import RawValue
from typing import Any

_asked = RawValue("b", 0)  # a byte that this process's children see, too, however they are started


class StopRequest:
    """Whether SIGTERM has come; looked at between steps, so that none is cut in two."""

    @property
    def asked(self) -> bool:
        return _asked.value == 1


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """In this context SIGTERM is noted instead of ending the process; afterwards it does what it did before."""

    def note(*_signal_and_frame: object) -> None:
        _asked.value = 1

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield StopRequest()
    finally:
        signal.signal(signal.SIGTERM, before)
        _asked.value = 0


@contextmanager
def starting_workers() -> Iterator[None]:
    """Processes that are started in this context get a SIGTERM only once `outlive_stop_request` has run in them.

    Those that are not forked import a framework first, for seconds in which SIGTERM would end them.
    """
    if multiprocessing.get_start_method(allow_none=True) not in (None, "fork"):
        resource_tracker.ensure_running()  # they need it, and its own start would let SIGTERM through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_stop_request() -> Callable[[int], None]:
    """What a loader's worker processes call first, with their number: not to end before the step that is under way.

    A cluster sends SIGTERM to every process, and training could not finish its step when its workers are gone. So they
    ignore one that its own process got, too, and obey one that comes from there alone, to end them. A process that is
    killed cannot end its workers, and PaddlePaddle's would wait for an order for ever, so they watch for that.
    """
    return partial(_outlive, _asked)


def _outlive(asked: Any, _worker_id: int) -> None:
    def end_unless_asked() -> None:
        time.sleep(3)  # the other process notes it once it has the batch that it waits for, which comes from here
        if not asked.value:
            os._exit(0)

    def obey(*_signal_and_frame: object) -> None:
        threading.Thread(target=end_unless_asked, daemon=True).start()

    signal.signal(signal.SIGTERM, obey)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # not os.getppid(): that may be the server that forks workers
    os._exit(1)
