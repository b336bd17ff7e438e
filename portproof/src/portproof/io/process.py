"""What surrounds runs of models: settings that make them faster, and what is shown meanwhile."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from sturdyio.cli import positive_int

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
    if "torch" in sys.modules and number.isdigit():  # OpenMP takes a list such as 4,2 as well
        sys.modules["torch"].set_num_threads(int(number))


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
