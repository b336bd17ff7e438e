"""Items, rows and verdicts: pure data, NumPy only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sturdyio.cli import UserError

PASS, FAIL, REFUSED = 0, 1, 2  # also the exit codes of the steps
NOT_JUDGED = 3  # of rows only: neither passed nor failed
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

    def __str__(self) -> str:
        iteration = "" if self.iteration is None else f"iteration {self.iteration}"
        kind = self.kind if self.kind in PRINTED_KINDS else ""
        return "/".join(part for part in (self.section, iteration, kind, self.name) if part)

    @property
    def leaf(self) -> str:
        """The name within its module, such as "running_mean"."""
        return self.name.removeprefix(f"{self.module}.")


def tensor_item(key: str, kind: str, **facts) -> Item:
    """The item of a tensor, by its state_dict key."""
    return Item(key, kind, key.rpartition(".")[0], **facts)


Items = Mapping[Item, np.ndarray]


def placed(items: Mapping[Item, Any], **facts) -> dict[Item, Any]:
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
    widened_by: str = ""  # the last such step, see compare/ruler.py
    hidden: float = 0.0  # relative change of inputs and weights that could hide

    @property
    def name(self) -> str:
        """As in reports."""
        return str(self.item)

    @property
    def share(self) -> float:
        """difference / limit; if the limit is 0 or unknown, the difference."""
        return self.difference / self.atol if self.atol > 0 else self.difference


class Refused(UserError):
    """A refused verdict, or one without items, was asked if it passed."""


@dataclass(frozen=True)
class Verdict:
    """FAIL outranks REFUSED; `bool()` raises Refused unless it passed or failed."""

    title: str
    rows: list[Row] = field(default_factory=list)
    refusal: str = ""
    location: Any = None  # locate.Location: where the failure begins
    notes: list[str] = field(default_factory=list)
    hints: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        statuses = {row.status for row in self.rows}
        if FAIL in statuses:
            return FAIL
        is_refused = self.refusal or REFUSED in statuses or statuses == {NOT_JUDGED}
        return REFUSED if is_refused else PASS

    @property
    def judged(self) -> list[Row]:
        """Passed, failed or refused rows."""
        return [row for row in self.rows if row.status != NOT_JUDGED]

    @property
    def not_judged(self) -> list[Row]:
        """Their `reason` says why."""
        return [row for row in self.rows if row.status == NOT_JUDGED]

    def __bool__(self) -> bool:
        if self.status == FAIL:
            return False
        if self.status == REFUSED or not self.counted:
            first = self.first_failure
            reason = self.refusal or (first.reason if first else NOTHING)
            raise Refused(f"{self.title or 'the verdict'} is refused, neither true nor false: {reason}")
        return True

    @property
    def counted(self) -> int:
        return len(self.judged)

    @property
    def bad(self) -> list[Row]:
        """Failed or refused rows."""
        return [row for row in self.rows if row.status in (FAIL, REFUSED)]

    @property
    def first_failure(self) -> Row | None:
        """The first failed row, or else the first refused one."""
        return min(self.bad, key=lambda row: row.status, default=None)


def joined(title: str, verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict with the rows of all; refused if there are none."""
    rows: list[Row] = []
    hints: dict[str, str] = {}
    refusal = ""
    for verdict in verdicts:
        rows += verdict.rows
        hints |= verdict.hints
        refusal = refusal or verdict.refusal
    if not rows and not refusal:
        refusal = NOTHING
    return Verdict(title, rows, refusal, hints=hints)


DONE = object()  # the outcome of a command without a verdict


def exit_status(outcome: Any) -> int:
    """0 for DONE, and for PASS with a counted item; else FAIL or REFUSED."""
    if outcome is DONE or (outcome.status == PASS and outcome.counted):
        return 0
    return outcome.status or REFUSED
