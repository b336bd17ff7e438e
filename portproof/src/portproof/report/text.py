"""A verdict as text: a table with one line a group of items, then the first failing item in full."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from portproof.compare import FAIL, PASS, REFUSED, Item, Row, Verdict
from portproof.report.hints import hint_for

LAST_WORDS = {PASS: "PASS", FAIL: "FAIL", REFUSED: "REFUSED"}
WORDS = {PASS: "ok", FAIL: "FAIL", REFUSED: "REFUSED"}


def badness(row: Row) -> tuple[int, float]:
    """Sorts rows: failures before refusals before passes, then by difference against limit, NaN above all."""
    share = row.difference / row.atol if row.atol > 0 else row.difference
    return {PASS: 0, REFUSED: 1, FAIL: 2}[row.status], share if share == share else float("inf")


def _values(row: Row) -> str:
    if row.reason:
        return row.reason
    text = f"max|d| {row.difference:<8.1e} limit {row.atol:<8.1e}"
    if row.status == FAIL and row.worst:
        text += f" outside {row.worst.outside}/{row.worst.size} ({row.worst.outside / row.worst.size:.1%})"
    return text.rstrip()


def _line(label: str, rows: list[Row], width: int) -> str:
    worst = max(rows, key=badness)
    if len(rows) == 1:
        what = "x".join(map(str, worst.shape)) or "scalar"
        return f"  {WORDS[worst.status]:<7} {label:<{width}}  {what:<16} {_values(worst)}"
    bad = sum(row.status != PASS for row in rows)
    what = f"{bad} of {len(rows)} items" if bad else f"{len(rows)} items"
    return f"  {WORDS[worst.status]:<7} {label:<{width}}  {what:<16} {_values(worst)}  at {worst.name}"


def row_line(row: Row) -> str:
    """One item in one line, as the log lists them all."""
    return f"  {WORDS[row.status]:<7} {row.name}  {'x'.join(map(str, row.shape)) or 'scalar'}  {_values(row)}"


def block_of(item: Item) -> str:
    """The label that an item is shown under: its section, iteration and kind, or the block that an output lies in."""
    where = str(replace(item, name=""))
    if item.kind == "buffer" and not where:
        return "running statistics"
    return where or (".".join(item.name.split(".")[:2]) if item.kind == "output" else item.name)


def section_of(item: Item) -> str:
    """What an item of `align` is shown under: "eval mode, float64/output"."""
    return "/".join(part for part in (item.section, item.kind) if part)


def table(rows: Iterable[Row], group: Callable[[Item], str]) -> list[str]:
    """One line for each run of rows that `group` gives the same label: its worst item decides and is shown."""
    groups = [(label, list(members)) for label, members in groupby(rows, key=lambda row: group(row.item))]
    width = max((len(label) for label, _ in groups), default=0)
    return [_line(label, members, width) for label, members in groups]


def first_difference(verdict: Verdict, types: Mapping[str, str]) -> list[str]:
    """The first failing item: where, both values, what agreed before it, what usually causes it."""
    row = verdict.first_failure
    if row is None:
        return []
    layer = f" ({types[row.item.module]})" if row.item.kind == "output" and row.item.module in types else ""
    word = "difference" if row.status == FAIL else "refusal"
    lines = [f"first {word}: {row.name}{layer}: {_values(row)}"]
    if row.worst:
        ref, port = row.worst.ref, row.worst.port
        place = f" at {row.worst.index}" if row.worst.index else ""
        relative = ""
        if isinstance(ref, (float, complex)) and row.scale > 0:
            relative = f", {row.difference / row.scale:.1e} of the largest value"
        lines.append(f"  worst{place}: reference {ref!r}, port {port!r}{relative}")
    before = verdict.rows[: verdict.rows.index(row)]
    if before and all(other.status == PASS for other in before):
        lines.append(f"  all items before it agree ({len(before)}): look at {row.name} itself")
    hint = hint_for(row.item, types, verdict.hints) if row.status == FAIL else ""
    if hint:
        lines.append(f"  usual causes: {hint}")
    return lines


def render(verdict: Verdict, group: Callable[[Item], str], types: Mapping[str, str]) -> str:
    """Title, table, and the first failing item."""
    lines = [verdict.title, *table(verdict.rows, group)]
    if verdict.refusal:
        lines.append(f"  REFUSED {verdict.refusal}")
    return "\n".join(lines + first_difference(verdict, types))


def render_sections(verdict: Verdict) -> str:
    """A verdict of `align` as text: notes, a line a section, the first failing item, where it begins, the last line."""
    lines = [*verdict.notes, *table(verdict.rows, section_of)]
    if verdict.refusal:
        lines.append(f"  REFUSED {verdict.refusal}")
    lines += first_difference(verdict, {})
    lines += verdict.location.lines() if verdict.location else []
    return "\n".join([*lines, last_line(verdict.title, verdict)])


def last_line(name: str, verdict: Verdict) -> str:
    """PASS, FAIL or REFUSED, in one line."""
    if verdict.status == PASS:
        return f"PASS {name}: all {len(verdict.rows)} items within their limits"
    if verdict.status == REFUSED:
        return f"REFUSED {name}: the comparison proves nothing, see above"
    bad = sum(row.status != PASS for row in verdict.rows)
    return f"FAIL {name}: {bad} of {len(verdict.rows)} items outside their limits, first {verdict.first_failure.name}"
