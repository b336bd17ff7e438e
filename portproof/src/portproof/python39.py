"""What Python 3.9 lacks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

if sys.version_info >= (3, 10):
    zip_strict = partial(zip, strict=True)
else:

    def zip_strict(*iterables: Iterable[Any]) -> Iterator[tuple]:
        end = object()
        for items in zip_longest(*iterables, fillvalue=end):
            if any(item is end for item in items):
                raise ValueError("zip_strict: one of them is shorter than another")
            yield items
