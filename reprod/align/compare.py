"""The comparison of two dicts of arrays: one pure function, which decides and never prints.

Structure comes before values: keys, then shape and dtype, then finite values, then the largest difference. Nothing is
broadcast, cast or transposed to make it fit, NaN never passes, and an item on which any port would pass is refused.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

PASS, FAIL, REFUSED = 0, 1, 2  # also the exit codes of the steps
# The kinds of item of which one name can have several, so that the kind is printed with it.
PRINTED_KINDS = ("gradient", "parameter", "structure", "weights")


@dataclass(frozen=True)
class Item:
    """What is compared. Its fields say what it is; `str(item)`, its name in reports, is made of them and never read."""

    name: str  # of the tensor, the module call, the statistic, ...
    kind: str = ""  # "output", "gradient", "parameter", "buffer", "loss", "lr", ...; "" for what its name says
    module: str = ""  # the reference's module that it belongs to; "" is the model itself, or none
    mode: str = ""  # "eval" or "train"; "" where there is none
    dtype: str = ""  # "float64" or "float32", the precision of the run; "" where there is none
    iteration: int | None = None
    section: str = ""  # what it is shown under

    def __str__(self) -> str:
        iteration = "" if self.iteration is None else f"iteration {self.iteration}"
        kind = self.kind if self.kind in PRINTED_KINDS else ""
        return "/".join(part for part in (self.section, iteration, kind, self.name) if part)

    @property
    def leaf(self) -> str:
        """A tensor's own name in its module, such as "running_mean"."""
        return self.name.removeprefix(f"{self.module}.")


def tensor_item(key: str, kind: str, **facts) -> Item:
    """The item of a tensor, by its state_dict key."""
    return Item(key, kind, key.rpartition(".")[0], **facts)


Items = Mapping[Item, np.ndarray]


def placed(items: Mapping[Item, Any], **facts) -> dict[Item, Any]:
    """`items` with these fields changed: where they were computed, and under what they are shown."""
    return {replace(item, **facts): value for item, value in items.items()}


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

    item: Item
    status: int
    shape: tuple[int, ...] = ()
    difference: float = float("nan")
    limit: float = float("nan")
    scale: float = float("nan")  # max|ref|
    reason: str = ""  # why it failed or was refused, when not by value
    worst: Worst | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """As reports print it."""
        return str(self.item)


@dataclass(frozen=True)
class Verdict:
    """What `compare` found; `status` is PASS, FAIL or REFUSED, and a failure outranks a refusal."""

    title: str
    rows: list[Row] = field(default_factory=list)
    refusal: str = ""  # why nothing could be compared
    location: Any = None  # locate.Location: where a failure begins, if that was looked for
    notes: list[str] = field(default_factory=list)  # what a reader should know beside the rows
    hints: Mapping[str, str] = field(default_factory=dict)  # {kind of item: what usually causes a difference here}

    @property
    def status(self) -> int:
        statuses = {row.status for row in self.rows}
        if FAIL in statuses:
            return FAIL
        return REFUSED if self.refusal or REFUSED in statuses else PASS

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


def _compare_exact(item: Item, ref: np.ndarray, port: np.ndarray) -> Row:
    unequal, error = np.asarray(ref != port), _error(ref, port)
    status = FAIL if unequal.any() else PASS
    worst = _worst(ref, port, np.where(unequal, error, -1.0), unequal) if unequal.any() else None
    return Row(item, status, ref.shape, float(error.max()), 0.0, worst=worst)


def _compare_close(item: Item, ref: np.ndarray, port: np.ndarray, limit: float, may_be_zero: bool) -> Row:
    error = _error(ref, port)
    difference, scale = float(error.max()), float(np.abs(ref.astype(np.float64)).max())
    outside = ~(error <= limit)
    row = Row(item, PASS, ref.shape, difference, limit, scale)
    if outside.any():
        return Row(item, FAIL, ref.shape, difference, limit, scale, worst=_worst(ref, port, error, outside))
    if limit >= scale and not may_be_zero:
        reason = f"limit {limit:.1e} is not below its largest value {scale:.1e}: zeros would pass"
        return Row(item, REFUSED, ref.shape, difference, limit, scale, reason)
    return row


def _compare_item(item: Item, ref: np.ndarray, port: np.ndarray, limit: float | None, may_be_zero: bool) -> Row:
    for array in (ref, port):
        if array.dtype.kind not in "biufU":
            return Row(item, FAIL, array.shape, reason=f"dtype {array.dtype} cannot be compared")
    if ref.shape != port.shape:
        return Row(item, FAIL, ref.shape, reason=f"shape: reference {ref.shape}, port {port.shape}")
    if ref.dtype != port.dtype and not ref.dtype.kind == port.dtype.kind == "U":
        return Row(item, FAIL, ref.shape, reason=f"dtype: reference {ref.dtype}, port {port.dtype}")
    if ref.dtype.kind == "f":
        bad_ref, bad_port = (int((~np.isfinite(array)).sum()) for array in (ref, port))
        if bad_ref or bad_port:
            return Row(item, FAIL, ref.shape, reason=f"not finite: reference {bad_ref}, port {bad_port} of {ref.size}")
    if limit is None:
        return Row(item, REFUSED, ref.shape, reason="no limit is given for it")
    if not 0 <= limit < float("inf"):
        return Row(item, REFUSED, ref.shape, reason=f"its limit is {limit}")
    if ref.size == 0:
        return Row(item, REFUSED, ref.shape, reason="it is empty")
    if limit == 0 or ref.dtype.kind in "bU":
        return _compare_exact(item, ref, port)
    return _compare_close(item, ref, port, limit, may_be_zero)


def compare(
    ref: Mapping[Item | str, np.ndarray],
    port: Mapping[Item | str, np.ndarray],
    limits: Mapping[Item | str, float],
    *,
    title: str = "",
    zeros: Collection[Item | str] = (),
    hints: Mapping[str, str] | None = None,
) -> Verdict:
    """Judge `port` against `ref`, item by item in the reference's order. A string is an item of that name alone.

    `limits` gives each item's allowed max|ref - port|, in the item's unit; 0 means equal, and is the only limit for
    strings and booleans. `zeros` names items that are zero by structure, whose limit may exceed their values. `hints`
    are kept for the report: {kind of item: what usually causes a difference here}.

    An item fails when it is on one side only, when shape or dtype differ, when either side holds NaN or infinity, or
    when an element is outside the limit. It is refused when it has no limit, is empty, or when its limit would let
    zeros pass. Nothing to compare at all is refused.
    """
    if not ref and not port:
        return Verdict(title, refusal="there is nothing to compare: both sides are empty")
    rows = []
    for key, array in ref.items():
        item = _item(key)
        if key in port:
            rows.append(_compare_item(item, np.asarray(array), np.asarray(port[key]), limits.get(key), key in zeros))
        else:
            rows.append(Row(item, FAIL, np.shape(array), reason="the port does not have it"))
    extra = [key for key in port if key not in ref]
    rows += [Row(_item(key), FAIL, np.shape(port[key]), reason="the reference does not have it") for key in extra]
    return Verdict(title, rows, hints=hints or {})


def _item(key: Item | str) -> Item:
    return key if isinstance(key, Item) else Item(key)


def joined(title: str, verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict over the rows of several; none at all, or only empty ones, is refused."""
    verdicts = list(verdicts)
    rows = [row for verdict in verdicts for row in verdict.rows]
    refusals = [verdict.refusal for verdict in verdicts if verdict.refusal]
    if not rows:
        refusals.append("there is nothing to compare")
    hints = {kind: hint for verdict in verdicts for kind, hint in verdict.hints.items()}
    return Verdict(title, rows, refusals[0] if refusals else "", hints=hints)
