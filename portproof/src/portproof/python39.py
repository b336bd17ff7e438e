"""What Python 3.9 does not have."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import tee, zip_longest
from typing import Any

if sys.version_info >= (3, 10):
    from itertools import pairwise

    zip_strict = partial(zip, strict=True)
else:

    def pairwise(iterable: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """`itertools.pairwise`."""
        first, second = tee(iterable)
        next(second, None)
        return zip(first, second)

    def zip_strict(*iterables: Iterable[Any]) -> Iterator[tuple]:
        """`zip` that raises ValueError where one of them ends before another."""
        end = object()
        for items in zip_longest(*iterables, fillvalue=end):
            if any(item is end for item in items):
                raise ValueError("zip_strict: one of them is shorter than another")
            yield items


__all__ = ["pairwise", "zip_strict"]
