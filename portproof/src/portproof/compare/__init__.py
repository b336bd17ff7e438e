"""Items, the comparison of two dicts of arrays, and its verdict: pure functions and data, NumPy only.

Nothing is broadcast, cast or transposed to fit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from portproof.arrays import largest, largest_difference
from sturdyio.cli import UserError

PASS, FAIL, REFUSED = 0, 1, 2  # also the exit codes of the steps
NOT_JUDGED = 3  # of rows only: neither passed nor failed
ACCEPTED = "accepted"  # begins the reason of a NOT_JUDGED row that fails, see accepted.py
NOTHING = "there is nothing to compare"
# One name can have several of these kinds, so the kind is printed.
PRINTED_KINDS = ("gradient", "parameter", "structure", "weights")


@dataclass(frozen=True)
class Item:
    """What is compared; `str(item)` is its full name."""

    name: str
    kind: str = ""  # "output", "gradient", "parameter", "buffer", "loss", "lr", ... or ""
    module: str = ""  # of the reference; "": the model itself, or none
    mode: str = ""  # "eval" or "train"
    dtype: str = ""  # "float64" or "float32"
    iteration: int | None = None
    section: str = ""
    projected: bool = field(default=False, compare=False)  # see `arrays.projected`

    def __str__(self) -> str:
        iteration = "" if self.iteration is None else f"iteration {self.iteration}"
        kind = self.kind if self.kind in PRINTED_KINDS else ""
        return "/".join(part for part in (self.section, iteration, kind, self.name) if part)

    @property
    def leaf(self) -> str:
        """The name within its module, such as "running_mean"."""
        return self.name.removeprefix(f"{self.module}.")


def tensor_item(key: str, kind: str, **facts: Any) -> Item:
    """The item of a tensor, by its state_dict key."""
    return Item(key, kind, key.rpartition(".")[0], **facts)


Items = Mapping[Item, np.ndarray]
Key = TypeVar("Key", Item, str, "Item | str")  # an item, or the name of one


def placed(items: Mapping[Item, Any], **facts: Any) -> dict[Item, Any]:
    """`items` with the fields `facts` changed."""
    return {replace(item, **facts): value for item, value in items.items()}


@dataclass(frozen=True)
class Worst:
    """The place of the largest difference."""

    index: tuple[int, ...]
    ref: object
    port: object
    outside: int  # number of elements
    size: int


@dataclass(frozen=True)
class Row:
    """One item's verdict; strings or booleans that differ are 1 apart."""

    item: Item
    status: int
    shape: tuple[int, ...] = ()
    difference: float = float("nan")  # max|ref - port|
    atol: float = float("nan")
    scale: float = float("nan")  # max|ref|
    reason: str = ""  # of a failure not by value, or a refusal
    worst: Worst | None = None
    widened_by: str = ""  # the last such step, see ruler.py
    hidden: float = 0.0  # relative change of inputs and weights that could hide
    widest: float = 0.0  # the widest limit that it could have got, as far as it was measured, see ruler.py

    @property
    def name(self) -> str:
        """As in reports."""
        return str(self.item) or "(no name)"

    @property
    def place(self) -> str:
        """Where the largest difference is; "" for a scalar."""
        assert self.worst is not None
        if self.item.projected:
            return f" in projection {self.worst.index[0]}"
        return f" at {self.worst.index}" if self.worst.index else ""

    @property
    def limit(self) -> float:
        """`widest`, or `atol` where that was the last."""
        return self.widest if self.widest > self.atol else self.atol

    @property
    def share(self) -> float:
        """difference / `limit`; if the limit is 0 or unknown, the difference."""
        return self.difference / self.limit if self.limit > 0 else self.difference


class Refused(UserError):
    """A refused verdict, or one without items, was asked if it passed."""


@dataclass(frozen=True)
class Verdict:
    """What was found of all items; `bool()` raises Refused unless it passed or failed."""

    title: str
    rows: list[Row] = field(default_factory=list)
    refusal: str = ""
    location: Any = None  # locate.Location: where the failure begins
    notes: list[str] = field(default_factory=list)
    hints: Mapping[str, str] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)  # what is not proved, for the last line

    @property
    def status(self) -> int:
        """0 passed, 1 failed, 2 refused: it proves nothing. A failure outranks a refusal."""
        if any(row.status == FAIL for row in self.rows):
            return FAIL
        return REFUSED if self.why_refused else PASS

    @property
    def why_refused(self) -> str:
        """Why it proves nothing, unless an item fails; "" if it proves something."""
        if self.refusal:
            return self.refusal
        for row in self.rows:
            if row.status == REFUSED:
                return f"{row.name}: {row.reason}"
        if self.rows and not self.judged:
            left = "accepted" if len(self.accepted) == len(self.rows) else "accepted or not judged"
            return f"all {len(self.rows)} items are {left}"
        proved = {row.item.mode for row in self.judged if leaves_the_model(row.item)}
        for row in self.accepted:
            if leaves_the_model(row.item) and row.item.mode not in proved:
                where = f" in {row.item.mode} mode" if row.item.mode else ""
                return f"every output of the model{where} is accepted: nothing is proved of it"
        return ""

    @property
    def judged(self) -> list[Row]:
        """Passed, failed or refused rows."""
        return [row for row in self.rows if row.status != NOT_JUDGED]

    @property
    def not_judged(self) -> list[Row]:
        """Their `reason` says why."""
        return [row for row in self.rows if row.status == NOT_JUDGED and not row.reason.startswith(ACCEPTED)]

    @property
    def accepted(self) -> list[Row]:
        """Rows that fail, which the user accepts."""
        return [row for row in self.rows if row.status == NOT_JUDGED and row.reason.startswith(ACCEPTED)]

    def __bool__(self) -> bool:
        if self.status == FAIL:
            return False
        if self.status == REFUSED or not self.counted:
            reason = self.why_refused or NOTHING
            raise Refused(f"{self.title or 'the verdict'} is refused, neither true nor false: {reason}")
        return True

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON holds it, see `report.summary`."""
        from portproof.report.summary import verdict_data

        return verdict_data(self)

    @property
    def counted(self) -> int:
        """How many items passed, failed or were refused."""
        return len(self.judged)

    @property
    def bad(self) -> list[Row]:
        """Failed or refused rows."""
        return [row for row in self.rows if row.status in (FAIL, REFUSED)]

    @property
    def first_failure(self) -> Row | None:
        """The first failed row, or else the first refused one."""
        return min(self.bad, key=lambda row: row.status, default=None)


def leaves_the_model(item: Item) -> bool:
    """Whether it is an output of the model itself."""
    return item.kind == "output" and not item.module


def joined(title: str, verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict with the rows of all, and the first location; refused if there are none."""
    rows: list[Row] = []
    location = None
    hints: dict[str, str] = {}
    caveats: list[str] = []
    refusal = ""
    for verdict in verdicts:
        caveats += verdict.caveats
        rows += verdict.rows
        hints |= verdict.hints
        refusal = refusal or verdict.refusal
        location = location or verdict.location
    if not rows and not refusal:
        refusal = NOTHING
    return Verdict(title, rows, refusal, location, hints=hints, caveats=list(dict.fromkeys(caveats)))


DONE = object()  # the outcome of a command without a verdict


def exit_status(outcome: Any) -> int:
    """0 for DONE, and for PASS with a counted item; else FAIL or REFUSED."""
    if outcome is DONE or (outcome.status == PASS and outcome.counted):
        return 0
    return outcome.status or REFUSED


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
    ref: Mapping[Key, np.ndarray],
    port: Mapping[Key, np.ndarray],
    atol: Mapping[Key, float],
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
