"""Differences that are known and accepted: such items neither pass nor fail."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from portproof.compare import ACCEPTED, FAIL, NOT_JUDGED, PASS, Row, Verdict
from sturdyio.cli import UserError

FORM = re.compile(r"(?P<pattern>[^:<]+?)\s*(?:<=\s*(?P<most>[^:\s]+))?\s*(?::\s*(?P<reason>.*\S)\s*)?")


@dataclass
class Known:
    """One of `Accepted`: "PATTERN[<=LIMIT][: REASON]", and what it met."""

    text: str
    pattern: str = field(init=False)
    most: float = math.inf  # the largest difference that is accepted
    reason: str = ""
    met: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = FORM.fullmatch(self.text)
        try:
            if not parts:
                raise ValueError
            self.pattern, self.reason = parts["pattern"], parts["reason"] or ""
            self.most = float(parts["most"] or math.inf)
            if not self.most > 0:
                raise ValueError
        except ValueError as error:
            form = "NAME, NAME<=LIMIT or NAME<=LIMIT: REASON, with a limit above 0"
            raise UserError(f"accept {self.text!r}: write {form}") from error

    def names(self, *names: str) -> bool:
        return any(name == self.pattern or fnmatchcase(name, self.pattern) for name in names if name)

    def allows(self, row: Row) -> bool:
        """Only a difference in value is accepted, and none of weights: that of another shape, or of NaN, is NaN."""
        return row.status == FAIL and row.difference <= self.most and row.item.kind != "weights"

    def note(self) -> str:
        accepted = [row for row in self.met if self.allows(row)]
        if not self.met:
            return f"accept {self.text!r}: no item has this name"
        if not accepted:
            state = "agrees" if all(row.status == PASS for row in self.met) else "is beyond what is accepted"
            return f"accept {self.text!r}: what it names {state}"
        largest = max(row.difference for row in accepted)
        return f"accepted {self.text!r}: {len(accepted)} items, largest difference {largest:.1e}"


class Accepted:
    """What a user accepts, by items' names or patterns of them; raises UserError for another form."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.known = [Known(text) for text in texts]

    def __bool__(self) -> bool:
        return bool(self.known)

    def apply(self, verdict: Verdict) -> Verdict:
        """The verdict with accepted rows NOT_JUDGED."""
        return replace(verdict, rows=[self._row(row) for row in verdict.rows]) if self else verdict

    def _row(self, row: Row) -> Row:
        mine = [known for known in self.known if known.names(row.item.name, row.name)]
        for known in mine:
            known.met.append(row)
        by = next((known for known in mine if known.allows(row)), None)
        return replace(row, status=NOT_JUDGED, reason=": ".join(filter(None, (ACCEPTED, by.reason)))) if by else row

    def covers(self, module: str, row: Row | None) -> bool:
        """Whether a fault of `module` that `row` proves is accepted."""
        if row is None:
            return False
        return any(known.names(module, row.item.name) and known.allows(row) for known in self.known)

    def notes(self) -> list[str]:
        return [known.note() for known in self.known]


NOTHING = Accepted(())
