"""Whether values of both sides agree, perhaps with their axes in another order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import filterfalse, permutations

import numpy as np

from portproof.python39 import zip_strict

SAME = 1e-4  # of the largest: above float64 rounding, below another layer's

Axes = tuple[int, ...]


def alike(ref: Sequence[np.ndarray], port: Sequence[np.ndarray], tolerance: float = SAME) -> bool:
    """Whether floats agree within `tolerance` of the largest; integers exactly, as far as both go."""
    floats, port_floats = list(filter(_is_float, ref)), list(filter(_is_float, port))
    return (
        len(floats) == len(port_floats)
        and all(map(np.array_equal, filterfalse(_is_float, ref), filterfalse(_is_float, port)))
        and all(_close(r, p, tolerance) for r, p in zip_strict(floats, port_floats))
    )


def alike_in_any_order(ref: Sequence[np.ndarray], port: Sequence[np.ndarray], tolerance: float = SAME) -> bool:
    """`alike`, whatever the order of axes."""
    if [array.size for array in ref] != [array.size for array in port]:
        return False
    in_order = partial(np.sort, axis=None)
    return alike(ref, port, tolerance) or alike(list(map(in_order, ref)), list(map(in_order, port)), tolerance)


def exchanged_axes(array: np.ndarray, wanted: np.ndarray) -> Axes | None:
    """The order of axes in which `array` has the wanted values, else the only one with the wanted shape; or None.

    One side may have the batch first, or the channels last.
    """
    if array.ndim != wanted.ndim or not 1 < array.ndim <= 5 or sorted(array.shape) != sorted(wanted.shape):
        return None
    every = [axes for axes in permutations(range(array.ndim)) if array.transpose(axes).shape == wanted.shape]
    same = (axes for axes in every if alike([array.transpose(axes)], [wanted]))
    return next(same, every[0] if len(every) == 1 else None)


def in_axes(array: np.ndarray, axes: Axes | None) -> np.ndarray:
    return array if axes is None else array.transpose(axes)


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind in "fc"


def _close(ref: np.ndarray, port: np.ndarray, tolerance: float) -> bool:
    if ref.size != port.size:
        return False
    ref, port = ref.ravel(), port.ravel()  # (B, H, W, C) may be (B, H * W, C) there
    with np.errstate(invalid="ignore"):  # inf - inf is no agreement
        return np.abs(ref - port).max(initial=0) <= tolerance * np.abs(ref).max(initial=0)
