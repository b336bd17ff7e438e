"""SIGTERM, which a cluster sends before it takes a machine away: training ends after its step, and is saved."""

import signal
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
    """For a loader's worker processes: they live as long as the process that reads from them, which sees to its end.

    A cluster sends SIGTERM to every process, and without its workers training could not finish its step.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
