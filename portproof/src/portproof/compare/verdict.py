"""What is compared, and what came of it: items, their rows, verdicts. Pure data, NumPy only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sturdyio.cli import UserError

PASS, FAIL, REFUSED = 0, 1, 2  # also the exit codes of the steps
NOT_JUDGED = 3  # of a row alone: it counts neither as passed nor as failed
NOTHING = "there is nothing to compare"
# The kinds of item of which one name can have several, so that the kind is printed with it.
PRINTED_KINDS = ("gradient", "parameter", "structure", "weights")


@dataclass(frozen=True)
class Item:
    """What is compared; `str(item)` is its name in reports."""

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
    """`items` with these fields changed."""
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
    """One item's verdict; strings or booleans that differ are 1 apart."""

    item: Item
    status: int
    shape: tuple[int, ...] = ()
    difference: float = float("nan")  # max|ref - port|
    atol: float = float("nan")  # its limit
    scale: float = float("nan")  # max|ref|
    reason: str = ""  # why it failed or was refused, when not by value
    worst: Worst | None = None
    widened_by: str = ""  # the last step of the ruler that did, see compare/ruler.py
    hidden: float = 0.0  # the relative change of inputs and weights that could hide then

    @property
    def name(self) -> str:
        """As reports print it."""
        return str(self.item)

    @property
    def share(self) -> float:
        """The difference as a share of the limit; where that is 0 or unknown, the difference."""
        return self.difference / self.atol if self.atol > 0 else self.difference


class Refused(UserError):
    """A verdict that was refused, or counted no item, was asked if it passed."""


@dataclass(frozen=True)
class Verdict:
    """What `compare` found; `status` is PASS, FAIL or REFUSED, and FAIL outranks REFUSED.

    It is true if it passed and false if it failed; of one that was refused, or has no row, this raises Refused.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    refusal: str = ""  # why nothing could be compared
    location: Any = None  # locate.Location: where a failure begins, if that was looked for
    notes: list[str] = field(default_factory=list)  # what a reader should know beside the rows
    hints: Mapping[str, str] = field(default_factory=dict)  # {kind of item: usual causes of a difference here}

    @property
    def status(self) -> int:
        statuses = {row.status for row in self.rows}
        if FAIL in statuses:
            return FAIL
        is_refused = self.refusal or REFUSED in statuses or statuses == {NOT_JUDGED}
        return REFUSED if is_refused else PASS

    @property
    def judged(self) -> list[Row]:
        """The rows that were judged."""
        return [row for row in self.rows if row.status != NOT_JUDGED]

    @property
    def not_judged(self) -> list[Row]:
        """The rows that count neither as passed nor as failed; their `reason` says why."""
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
        """The rows that failed or were refused."""
        return [row for row in self.rows if row.status in (FAIL, REFUSED)]

    @property
    def first_failure(self) -> Row | None:
        """The first row that failed, or that was refused where none failed."""
        return min(self.bad, key=lambda row: row.status, default=None)


def joined(title: str, verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict over the rows of several; none at all, or only empty ones, is refused."""
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


DONE = object()  # the outcome of a command without a verdict, which has done its work


def exit_status(outcome: Any) -> int:
    """The exit status of a command that ends in DONE, in a verdict, or in what has its `status` and `counted`.

    Only DONE gives 0, and what has passed and counted an item.
    """
    if outcome is DONE or (outcome.status == PASS and outcome.counted):
        return 0
    return outcome.status or REFUSED
