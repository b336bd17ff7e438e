"""SIGTERM, which a cluster sends before it takes a machine away: training ends after its step, and is saved."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopped(Exception):
    """Training ended early because SIGTERM asked it to; the message says where it can go on."""


class StopRequest:
    """Whether SIGTERM has come; looked at between steps, so that none is cut in two."""

    asked = False

    def note(self, *_signal_and_frame: object) -> None:
        """The signal handler."""
        self.asked = True


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """In this context SIGTERM is noted instead of ending the process; afterwards it does what it did before."""
    request = StopRequest()
    before = signal.signal(signal.SIGTERM, request.note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)


def ignore_sigterm(_worker_id: int = 0) -> None:
    """For a loader's worker processes: they live as long as the process that reads from them, and no longer.

    A cluster sends SIGTERM to every process, and without its workers training could not finish its step. A process that
    is killed cannot end its workers, and PaddlePaddle's would wait for an order for ever.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(multiprocessing.parent_process().pid,), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
