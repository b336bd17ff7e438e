"""The number that a float32 constant stands for: exporters write 1/6 or 1e-5 with 24 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

MOST_DIGITS = 6  # of a decimal: one float32 in ten thousand is that short by chance
MOST_DENOMINATOR = 1000
KNOWN = {
    "sqrt(2/pi)": math.sqrt(2 / math.pi),  # of the tanh approximation of GELU
    "pi": math.pi,
    "2 pi": 2 * math.pi,
    "ln 2": math.log(2),
    "ln 10": math.log(10),
}


def snapped(value: float) -> tuple[float, str]:
    """(the short number whose float32 is `value`, how it is written); ("value" itself, "") if there is none."""
    single = np.float32(value)
    if not is_rounded(np.asarray(single)):
        return float(value), ""
    for text, number in _short(single):
        if np.float32(number) == single:
            return number, text
    return float(value), ""


def is_rounded(array: np.ndarray) -> bool:
    """Whether finite numbers may have been rounded to the float32 that they are: a small fraction of two is exact."""
    with np.errstate(invalid="ignore", over="ignore"):
        times = array.astype(np.float64) * 2.0**12
    return bool(np.isfinite(times).all() and (times != np.round(times)).any())


def _short(single: np.float32) -> Iterator[tuple[str, float]]:
    """Short numbers near `single`, the shortest first."""
    decimal = str(single)
    digits = decimal.partition("e")[0].lstrip("-").replace(".", "").strip("0")
    if len(digits) <= MOST_DIGITS:
        yield f"{float(decimal):g}", float(decimal)
    yield _fraction(float(single), 64)
    sign = math.copysign(1.0, single)
    text, square = _fraction(float(single) ** 2, 256)
    yield f"{'-' if sign < 0 else ''}sqrt({text})", sign * math.sqrt(square)
    yield from KNOWN.items()
    yield _fraction(float(single), MOST_DENOMINATOR)


def _fraction(value: float, most: int) -> tuple[str, float]:
    found = Fraction(value).limit_denominator(most)
    return str(found), float(found)
