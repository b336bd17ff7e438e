"""The comparison of two dicts of arrays: one pure function, which decides and never prints.

Structure comes before values: keys, then shape and dtype, then finite values, then the largest difference. Nothing is
broadcast, cast or transposed to make it fit, NaN never passes, and an item on which any port would pass is refused.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PASS, FAIL, REFUSED = 0, 1, 2  # also the exit codes of the steps


@dataclass(frozen=True)
class Worst:
    """The place of the largest difference."""

    index: tuple[int, ...]
    ref: object
    port: object
    outside: int  # how many elements are outside the limit
    size: int


@dataclass(frozen=True)
class Row:
    """One item's verdict; `difference` is max|ref - port|, in which strings or booleans that differ are 1 apart."""

    name: str
    status: int
    shape: tuple[int, ...] = ()
    difference: float = float("nan")
    limit: float = float("nan")
    scale: float = float("nan")  # max|ref|
    reason: str = ""  # why it failed or was refused, when not by value
    worst: Worst | None = None
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What `compare` found; `status` is PASS, FAIL or REFUSED, and a failure outranks a refusal."""

    title: str
    rows: list[Row] = field(default_factory=list)
    refusal: str = ""  # why nothing could be compared
    location: Any = None  # locate.Location: where a failure begins, if that was looked for
    notes: list[str] = field(default_factory=list)  # what a reader should know beside the rows

    @property
    def status(self) -> int:
        statuses = {row.status for row in self.rows}
        if FAIL in statuses:
            return FAIL
        return REFUSED if self.refusal or REFUSED in statuses else PASS

    def __str__(self) -> str:
        from .report import render_sections  # which needs this module

        return render_sections(self)

    @property
    def first_failure(self) -> Row | None:
        """The first row that failed, or was refused, in the reference's order."""
        bad = [row for row in self.rows if row.status == FAIL] or [row for row in self.rows if row.status == REFUSED]
        return bad[0] if bad else None


def _error(ref: np.ndarray, port: np.ndarray) -> np.ndarray:
    """|ref - port| in float64; whole numbers are subtracted exactly first, which float64 cannot do above 2^53."""
    if ref.dtype.kind in "iu":
        larger, smaller = np.maximum(ref, port).astype(np.uint64), np.minimum(ref, port).astype(np.uint64)
        return np.subtract(larger, smaller).astype(np.float64)  # modulo 2^64, in which the difference fits
    if ref.dtype.kind == "f":
        with np.errstate(over="ignore"):  # an infinite difference is outside every limit
            return np.abs(ref.astype(np.float64) - port.astype(np.float64))
    return np.asarray(ref != port).astype(np.float64)


def _worst(ref: np.ndarray, port: np.ndarray, error: np.ndarray, outside: np.ndarray) -> Worst:
    index = np.unravel_index(int(np.argmax(error)), error.shape)
    return Worst(tuple(int(i) for i in index), ref[index].item(), port[index].item(), int(outside.sum()), ref.size)


def _compare_exact(name: str, ref: np.ndarray, port: np.ndarray) -> Row:
    unequal, error = np.asarray(ref != port), _error(ref, port)
    status = FAIL if unequal.any() else PASS
    worst = _worst(ref, port, np.where(unequal, error, -1.0), unequal) if unequal.any() else None
    return Row(name, status, ref.shape, float(error.max()), 0.0, worst=worst)


def _compare_close(name: str, ref: np.ndarray, port: np.ndarray, limit: float, may_be_zero: bool) -> Row:
    error = _error(ref, port)
    difference, scale = float(error.max()), float(np.abs(ref.astype(np.float64)).max())
    outside = ~(error <= limit)
    row = Row(name, PASS, ref.shape, difference, limit, scale)
    if outside.any():
        return Row(name, FAIL, ref.shape, difference, limit, scale, worst=_worst(ref, port, error, outside))
    if limit >= scale and not may_be_zero:
        reason = f"limit {limit:.1e} is not below its largest value {scale:.1e}: zeros would pass"
        return Row(name, REFUSED, ref.shape, difference, limit, scale, reason)
    return row


def _compare_item(name: str, ref: np.ndarray, port: np.ndarray, limit: float | None, may_be_zero: bool) -> Row:
    for array in (ref, port):
        if array.dtype.kind not in "biufU":
            return Row(name, FAIL, array.shape, reason=f"dtype {array.dtype} cannot be compared")
    if ref.shape != port.shape:
        return Row(name, FAIL, ref.shape, reason=f"shape: reference {ref.shape}, port {port.shape}")
    if ref.dtype != port.dtype and not ref.dtype.kind == port.dtype.kind == "U":
        return Row(name, FAIL, ref.shape, reason=f"dtype: reference {ref.dtype}, port {port.dtype}")
    if ref.dtype.kind == "f":
        bad_ref, bad_port = (int((~np.isfinite(array)).sum()) for array in (ref, port))
        if bad_ref or bad_port:
            return Row(name, FAIL, ref.shape, reason=f"not finite: reference {bad_ref}, port {bad_port} of {ref.size}")
    if limit is None:
        return Row(name, REFUSED, ref.shape, reason="no limit is given for it")
    if not 0 <= limit < float("inf"):
        return Row(name, REFUSED, ref.shape, reason=f"its limit is {limit}")
    if ref.size == 0:
        return Row(name, REFUSED, ref.shape, reason="it is empty")
    if limit == 0 or ref.dtype.kind in "bU":
        return _compare_exact(name, ref, port)
    return _compare_close(name, ref, port, limit, may_be_zero)


def compare(
    ref: Mapping[str, np.ndarray],
    port: Mapping[str, np.ndarray],
    limits: Mapping[str, float],
    *,
    title: str = "",
    zeros: Collection[str] = (),
) -> Verdict:
    """Judge `port` against `ref`, item by item in the reference's order.

    `limits` gives each item's allowed max|ref - port|, in the item's unit; 0 means equal, and is the only limit for
    strings and booleans. `zeros` names items that are zero by structure, whose limit may exceed their values.

    An item fails when it is on one side only, when shape or dtype differ, when either side holds NaN or infinity, or
    when an element is outside the limit. It is refused when it has no limit, is empty, or when its limit would let
    zeros pass. Nothing to compare at all is refused.
    """
    if not ref and not port:
        return Verdict(title, refusal="there is nothing to compare: both sides are empty")
    rows = []
    for name, array in ref.items():
        if name in port:
            rows.append(_compare_item(name, np.asarray(array), np.asarray(port[name]), limits.get(name), name in zeros))
        else:
            rows.append(Row(name, FAIL, np.shape(array), reason="the port does not have it"))
    extra = [name for name in port if name not in ref]
    rows += [Row(name, FAIL, np.shape(port[name]), reason="the reference does not have it") for name in extra]
    return Verdict(title, rows)


def joined(title: str, verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict over the rows of several; none at all, or only empty ones, is refused."""
    verdicts = list(verdicts)
    rows = [row for verdict in verdicts for row in verdict.rows]
    refusals = [verdict.refusal for verdict in verdicts if verdict.refusal]
    if not rows:
        refusals.append("there is nothing to compare")
    return Verdict(title, rows, refusals[0] if refusals else "")
