"""A verdict as text: a table of groups, then the first failing item."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from portproof.compare import FAIL, NOT_JUDGED, PASS, REFUSED, Item, Row, Verdict
from portproof.report.hints import usual_causes

LAST_WORDS = {PASS: "PASS", FAIL: "FAIL", REFUSED: "REFUSED", NOT_JUDGED: "NOT JUDGED"}
WORDS = {PASS: "ok", FAIL: "FAIL", REFUSED: "REFUSED", NOT_JUDGED: "-"}
ORDER = (NOT_JUDGED, PASS, REFUSED, FAIL)  # the worst last


def badness(row: Row) -> tuple[int, float]:
    """A sort key: `ORDER`, then the share of the limit, NaN last."""
    return ORDER.index(row.status), float("inf") if math.isnan(row.share) else row.share


def shape(row: Row) -> str:
    """2x3, or "scalar"."""
    return "x".join(map(str, row.shape)) or "scalar"


def with_layer(row: Row, types: Mapping[str, str]) -> str:
    """The name; of outputs with the layer type."""
    layer = types.get(row.item.module) if row.item.kind == "output" else None
    return f"{row.name} ({layer})" if layer else row.name


def place(row: Row) -> str:
    """The index of the largest difference; "" for a scalar."""
    return f" at {row.worst.index}" if row.worst.index else ""


def _values(row: Row) -> str:
    if row.reason:
        return row.reason
    text = f"max|d| {row.difference:<8.1e} limit {row.atol:<8.1e}"
    if row.status == FAIL and row.worst:
        text += f" outside {row.worst.outside}/{row.worst.size} ({row.worst.outside / row.worst.size:.1%})"
    return text.rstrip()


def row_line(row: Row) -> str:
    """An item as one line of the log."""
    return f"  {WORDS[row.status]:<7} {row.name}  {shape(row)}  {_values(row)}"


def block_of(item: Item) -> str:
    """The item's group: section, iteration and kind, or an output's block."""
    where = str(replace(item, name=""))
    if item.kind == "buffer" and not where:
        return "running statistics"
    return where or (".".join(item.name.split(".")[:2]) if item.kind == "output" else item.name)


def section_of(item: Item) -> str:
    """The group in `align`: "eval mode, float64/output"."""
    return "/".join(part for part in (item.section, item.kind) if part)


@dataclass(frozen=True)
class Group:
    """Items shown in one line, with the status of the worst."""

    label: str
    rows: list[Row]

    @property
    def worst(self) -> Row:
        return max(self.rows, key=badness)

    @property
    def size(self) -> str:
        """A single item's shape, else the number of items."""
        if len(self.rows) == 1:
            return shape(self.worst)
        bad = len(Verdict("", self.rows).bad)
        return f"{bad} of {len(self.rows)} items" if bad else f"{len(self.rows)} items"


def groups_of(rows: Iterable[Row], group: Callable[[Item], str]) -> list[Group]:
    """Consecutive rows to which `group` gives the same label."""
    return [Group(label, list(members)) for label, members in groupby(rows, key=lambda row: group(row.item))]


def table(rows: Iterable[Row], group: Callable[[Item], str]) -> list[str]:
    groups = groups_of(rows, group)
    width = max((len(each.label) for each in groups), default=0)
    lines = []
    for each in groups:
        worst = each.worst
        line = f"  {WORDS[worst.status]:<7} {each.label:<{width}}  {each.size:<16} {_values(worst)}"
        lines.append(line if len(each.rows) == 1 else f"{line}  at {worst.name}")
    return lines


def first_difference(verdict: Verdict, types: Mapping[str, str]) -> list[str]:
    """The first failing item and its usual causes, as lines."""
    row = verdict.first_failure
    if row is None:
        return []
    word = "difference" if row.status == FAIL else "refusal"
    lines = [f"first {word}: {with_layer(row, types)}: {_values(row)}"]
    if row.worst:
        line = f"  worst{place(row)}: reference {row.worst.ref!r}, port {row.worst.port!r}"
        if isinstance(row.worst.ref, (float, complex)) and row.scale > 0:
            line += f", {row.difference / row.scale:.1e} of the largest value"
        lines.append(line)
    before = verdict.rows[: verdict.rows.index(row)]
    if before and all(other.status in (PASS, NOT_JUDGED) for other in before):
        lines.append(f"  all items before it agree ({len(before)}): look at {row.name} itself")
    if row.status == FAIL and (causes := usual_causes(row.item, types, verdict.hints)):
        lines.append(f"  usual causes: {causes}")
    return lines


def _limit_lines(verdict: Verdict) -> list[str]:
    widened: dict[str, list[tuple[float, Row]]] = {}
    for row in verdict.rows:
        if row.widened_by and row.status == PASS:
            share_of_scale = row.atol / max(row.scale, 1e-300)
            widened.setdefault(row.widened_by, []).append((share_of_scale, row))
    lines = []
    for word, rows in widened.items():
        share, widest = max(rows, key=itemgetter(0))
        hidden = f"; a relative change of {widest.hidden:.1e} could hide in it" if widest.hidden else ""
        at_most = f"at most to {share:.1e} of the largest value, at {widest.name}"
        lines.append(f"  limits widened, {word}: {len(rows)} items, {at_most}{hidden}")
    for row in verdict.not_judged[:1]:
        lines.append(f"  not judged: {len(verdict.not_judged)} items, first {row.name}: {row.reason}")
    return lines


def render(verdict: Verdict, group: Callable[[Item], str], types: Mapping[str, str]) -> str:
    """The whole text report."""
    return "\n".join([verdict.title, *_body(verdict, group, types)])


def render_sections(verdict: Verdict, passes: str = "") -> str:
    """A verdict of `align`, with the place where it departs."""
    location = verdict.location.lines() if verdict.location else []
    last = last_line(verdict.title, verdict)
    notes = [*verdict.notes, passes] if passes else verdict.notes
    return "\n".join([*notes, *_body(verdict, section_of, {}), *location, last])


def _body(verdict: Verdict, group: Callable[[Item], str], types: Mapping[str, str]) -> list[str]:
    refusal = [f"  REFUSED {verdict.refusal}"] if verdict.refusal else []
    return [*table(verdict.rows, group), *refusal, *_limit_lines(verdict), *first_difference(verdict, types)]


def last_line(name: str, verdict: Verdict) -> str:
    """The outcome in one line."""
    skipped = f"; {len(verdict.not_judged)} not judged" if verdict.not_judged else ""
    if verdict.status == PASS:
        return f"PASS {name}: all {len(verdict.judged)} items within their limits{skipped}"
    if verdict.status == REFUSED:
        return f"REFUSED {name}: the comparison proves nothing, see above"
    of_all = f"{len(verdict.bad)} of {len(verdict.judged)} items"
    return f"FAIL {name}: {of_all} outside their limits{skipped}, first {verdict.first_failure.name}"
