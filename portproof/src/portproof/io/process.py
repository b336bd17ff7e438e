"""Settings of this process that make runs of models faster."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # see glibc's malloc.h
BLOCK, KEPT = 2**28, 2**30  # bytes: the largest block kept, the most free memory kept
OWN_BLOCK, OWN_KEPT = 2**25, 2**26  # glibc's own largest values


@contextmanager
def proving() -> Iterator[None]:
    """Keep freed memory, and freeze the garbage collector's objects.

    glibc returns large blocks at once, and the system clears every new page: half of the time of vgg16's proof.
    Each garbage collection scans all objects of the frameworks.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    has_glibc = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    if has_glibc:
        libc.mallopt(M_MMAP_THRESHOLD, BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if has_glibc:
            libc.mallopt(M_MMAP_THRESHOLD, OWN_BLOCK)
            libc.mallopt(M_TRIM_THRESHOLD, OWN_KEPT)
            libc.malloc_trim(0)
