"""The comparison of two dicts of arrays. Nothing is broadcast, cast or transposed to fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial

import numpy as np

from portproof.arrays import largest, largest_difference

from .verdict import FAIL, NOTHING, PASS, REFUSED, Item, Row, Verdict, Worst


def _error(ref: np.ndarray, port: np.ndarray) -> np.ndarray:
    if ref.dtype.kind in "iu":  # exact: float64 is not above 2^53; uint64 holds any difference
        larger, smaller = np.maximum(ref, port).astype(np.uint64), np.minimum(ref, port).astype(np.uint64)
        return np.subtract(larger, smaller).astype(np.float64)
    if ref.dtype.kind in "fc":
        wide = np.float64 if ref.dtype.kind == "f" else np.complex128
        with np.errstate(over="ignore", invalid="ignore"):  # infinity fails every limit
            error = np.asarray(np.subtract(ref, port, dtype=wide))  # without wide copies
            return np.abs(error, out=error if error.dtype.kind == "f" else None)
    return np.asarray(ref != port).astype(np.float64)


def _worst(ref: np.ndarray, port: np.ndarray, error: np.ndarray, outside: np.ndarray) -> Worst:
    index = np.unravel_index(int(np.argmax(error)), error.shape)
    return Worst(tuple(int(i) for i in index), ref[index].item(), port[index].item(), int(outside.sum()), ref.size)


def _compare_item(item: Item, ref: np.ndarray, port: np.ndarray, atol: float | None, expected_zero: bool) -> Row:
    row = partial(Row, item, shape=ref.shape)
    for array in (ref, port):
        if array.dtype.kind not in "biufcU":
            return Row(item, FAIL, array.shape, reason=f"dtype {array.dtype} cannot be compared")
    if ref.shape != port.shape:
        return row(FAIL, reason=f"shape: reference {ref.shape}, port {port.shape}")
    if ref.dtype != port.dtype and not ref.dtype.kind == port.dtype.kind == "U":
        return row(FAIL, reason=f"dtype: reference {ref.dtype}, port {port.dtype}")
    difference = largest_difference(ref, port) if ref.dtype.kind in "fc" else 0.0
    if not math.isfinite(difference):  # or the difference of two large numbers overflows
        bad_ref, bad_port = (int((~np.isfinite(array)).sum()) for array in (ref, port))
        if bad_ref or bad_port:
            return row(FAIL, reason=f"not finite: reference {bad_ref}, port {bad_port} of {ref.size}")
    if atol is None:
        return row(REFUSED, reason="no limit is given for it")
    if not 0 <= atol < float("inf"):
        return row(REFUSED, reason=f"its limit is {atol}")
    if ref.size == 0:
        return row(REFUSED, reason="it is empty")
    if atol == 0 or ref.dtype.kind in "bU":
        unequal, error = np.asarray(ref != port), _error(ref, port)
        worst = _worst(ref, port, np.where(unequal, error, -1.0), unequal) if unequal.any() else None
        return row(FAIL if worst else PASS, difference=float(error.max()), atol=0.0, worst=worst)
    if ref.dtype.kind in "iu":
        difference = float(_error(ref, port).max())
    scale = largest(ref)
    row = partial(row, difference=difference, atol=atol, scale=scale)
    if not difference <= atol:
        error = _error(ref, port)
        return row(FAIL, worst=_worst(ref, port, error, error > atol))
    if atol >= scale and not expected_zero:
        reason = f"limit {atol:.1e} is not below its largest value {scale:.1e}: zeros would pass"
        return row(REFUSED, reason=reason)
    return row(PASS)


def compare(
    ref: Mapping[Item | str, np.ndarray],
    port: Mapping[Item | str, np.ndarray],
    atol: Mapping[Item | str, float],
    *,
    title: str = "",
    expected_zero: Collection[Item | str] = (),
    hints: Mapping[str, str] | None = None,
) -> Verdict:
    """Judge `port` against `ref`, in the reference's order. A string key is an item of that name.

    `atol`: the largest |ref - port| allowed of each item; 0 means equal. Strings and booleans have to be equal.
    `expected_zero`: items that are zero by structure, whose limit may exceed their values.
    `hints`: {kind of item: usual causes}, for the report.

    An item fails if one side lacks it, shape or dtype differ, a value is NaN or infinite, or the limit is exceeded.
    It is refused if it has no limit, is empty, or zeros would pass. So are two empty sides.
    """
    if not ref and not port:
        return Verdict(title, refusal=f"{NOTHING}: both sides are empty")
    rows = []
    for key, array in {**ref, **port}.items():
        item = key if isinstance(key, Item) else Item(key)
        if key in ref and key in port:
            arrays = np.asarray(ref[key]), np.asarray(array)
            rows.append(_compare_item(item, *arrays, atol.get(key), key in expected_zero))
        else:
            side = "port" if key in ref else "reference"
            rows.append(Row(item, FAIL, np.shape(array), reason=f"the {side} does not have it"))
    return Verdict(title, rows, hints=hints or {})
