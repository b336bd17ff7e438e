"""What surrounds runs of models: the process that judges them, what makes them faster, and what is shown meanwhile."""

from __future__ import annotations

import argparse
import atexit
import ctypes
import gc
import mmap
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from sturdyio.cli import LACK, positive_int, run

NO_STATUS = 255  # of a child in which `run` has not ended
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal when the parent ends
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # see glibc's malloc.h
BLOCK, KEPT = 2**28, 2**30  # bytes: the largest block kept, the most free memory kept
OWN_BLOCK, OWN_KEPT = 2**25, 2**26  # glibc's own largest values

_listeners: list[Callable[[], object]] = []


def add_threads_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        metavar="N",
        type=positive_int,
        help="threads of each framework (default: OMP_NUM_THREADS, else 1: more gain for large models only)",
    )


def use_threads(count: int | None) -> None:
    """Have both frameworks compute with `count` threads; None: with OMP_NUM_THREADS, else with one.

    Both read that variable when they are imported; where PyTorch has been imported already, it is told.
    """
    number = str(count or os.environ.get("OMP_NUM_THREADS", "1"))
    os.environ["OMP_NUM_THREADS"] = number
    torch = sys.modules.get("torch")
    if torch and number.isdigit():  # OpenMP takes a list such as 4,2 as well
        torch.set_num_threads(int(number))


def run_in_child(main: Callable[[], int | None], prog: str, fault_of: str = "") -> NoReturn:
    """`sturdyio.cli.run` in a child process, and exit with the status that it gives there.

    Code that is judged may end its process with any status. Where `run` has not ended, a line on stderr says so, and
    the status is 2, or, after a signal, 128 and its number. Only Linux forks safely; elsewhere it is this process.
    """
    if sys.platform != "linux":
        run(main, prog, fault_of)
    status = mmap.mmap(-1, 1)  # shared by both processes
    status[0] = NO_STATUS
    passed_on = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until each process handles them in its own way
    try:
        child = os.fork()
    except OSError as error:
        print(f"{prog}: error: no process can be started ({error.strerror}): {LACK}", file=sys.stderr)
        sys.exit(2)
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _run_as_child(main, prog, fault_of, status)
    for number in passed_on:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: _pass_on(number, child))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended < 0:
        memory = ": is there enough memory?" if -ended == signal.SIGKILL else ""
        print(f"{prog}: error: its process was ended by signal {-ended}{memory}", file=sys.stderr)
        sys.exit(128 - ended)
    if status[0] == NO_STATUS:
        what = f"the code that was run ended its process with status {ended}"
        print(f"{prog}: error: {what}, before there was a verdict: find what calls exit", file=sys.stderr)
        sys.exit(2)
    sys.exit(status[0])


def _run_as_child(main: Callable[[], int | None], prog: str, fault_of: str, status: mmap.mmap) -> NoReturn:
    """End this process without a return to the caller, which would do what its parent does once more."""
    signal_when_parent_ends(signal.SIGKILL)
    atexit._clear()  # what was registered until now is the parent's, and may wait for its threads
    if "torch" in sys.modules:
        use_threads(1)  # OpenMP would wait for ever for threads that the parent had
    try:
        try:
            run(main, prog, fault_of)
        except SystemExit as end:
            status[0] = int(end.code or 0)
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(ValueError, OSError):  # where it has been closed
                    stream.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def signal_when_parent_ends(number: int) -> None:
    """Send this process the signal then, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _pass_on(number: int, child: int) -> None:
    """Send the child the signal, unless it is of a terminal, which has sent it to both."""
    if number == signal.SIGINT and _is_in_foreground():
        return
    with suppress(ProcessLookupError):
        os.kill(child, number)


def _is_in_foreground() -> bool:
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False


@contextmanager
def proving() -> Iterator[None]:
    """Keep freed memory, and freeze the garbage collector's objects.

    glibc returns large blocks at once, and the system clears every new page: half of the time of vgg16's proof.
    Each garbage collection scans all objects of the frameworks.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    has_glibc = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    if libc and has_glibc:
        libc.mallopt(M_MMAP_THRESHOLD, BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if libc and has_glibc:
            libc.mallopt(M_MMAP_THRESHOLD, OWN_BLOCK)
            libc.mallopt(M_TRIM_THRESHOLD, OWN_KEPT)
            libc.malloc_trim(0)


def count_pass() -> None:
    """Call this for each pass through a model."""
    for listener in _listeners:
        listener()


@contextmanager
def shown(title: str) -> Iterator[None]:
    """Show each warning once, and a tqdm bar of passes if stderr is a terminal."""
    seen = set()
    with warnings.catch_warnings(), ExitStack() as ending:
        show = warnings.showwarning

        def show_once(message: Any, category: type, *where: Any, **more: Any) -> None:
            if (str(message), category) not in seen:
                seen.add((str(message), category))
                show(message, category, *where, **more)

        warnings.showwarning = show_once
        if sys.stderr.isatty() and find_spec("tqdm"):
            from tqdm import tqdm

            bar = ending.enter_context(tqdm(desc=title, unit=" passes", leave=False))
            _listeners.append(bar.update)
            ending.callback(_listeners.remove, bar.update)
        yield
