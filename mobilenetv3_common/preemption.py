"""SIGTERM, which a cluster sends before it takes a machine away: training ends after its step, and is saved."""

import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_asked = mmap.mmap(-1, 1)  # one byte that processes forked from this one see, too


class StopRequest:
    """Whether SIGTERM has come; looked at between steps, so that none is cut in two."""

    @property
    def asked(self) -> bool:
        return _asked[0] == 1


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """In this context SIGTERM is noted instead of ending the process; afterwards it does what it did before."""

    def note(*_signal_and_frame: object) -> None:
        _asked[0] = 1

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield StopRequest()
    finally:
        signal.signal(signal.SIGTERM, before)
        _asked[0] = 0


def outlive_stop_request(_worker_id: int = 0) -> None:
    """For a loader's worker processes: not to end before the step that is under way.

    A cluster sends SIGTERM to every process, and training could not finish its step when its workers are gone. So they
    ignore one that its own process got, too, and obey one that comes from there alone, to end them. A process that is
    killed cannot end its workers, and PaddlePaddle's would wait for an order for ever, so they watch for that.
    """

    def obey(*_signal_and_frame: object) -> None:
        time.sleep(1)  # the other process may not have noted it yet
        if not _asked[0]:
            os._exit(0)

    signal.signal(signal.SIGTERM, obey)
    threading.Thread(target=_end_after, args=(multiprocessing.parent_process().pid,), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
