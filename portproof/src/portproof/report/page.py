"""The report of a run of the ladder as one HTML page, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import jinja2

from portproof.compare import FAIL, PASS, REFUSED, Item, Row, Verdict
from portproof.io.records import save_text
from portproof.report.pictures import picture_row
from portproof.report.plots import STYLES, curve_plot, depth_plot, depth_rows, shares, shares_plot
from portproof.report.summary import Findings, LadderResult, RungResult
from portproof.report.text import LAST_WORDS, WORDS, badness, first_difference, place, shape, usual_causes, with_layer

FEWEST = 8  # items that make a depth
# What is on the axis of a curve whose name ends so.
CURVES = {"lr": "learning rate", "loss": "loss", "training top-1": "top-1 in training", "top-1": "top-1 in evaluation"}


@dataclass(frozen=True)
class Group:
    """Items that the report shows in one line, which its worst item decides."""

    label: str
    rows: list[Row]
    worst: Row

    @property
    def bad(self) -> int:
        return sum(row.status in (FAIL, REFUSED) for row in self.rows)


@dataclass(frozen=True)
class Plot:
    """An `<svg>` element and what is written under it."""

    title: str
    svg: str
    text: str = ""


def groups_of(verdict: Verdict, group: Callable[[Item], str]) -> list[Group]:
    """The lines of the text report, those that did not pass first."""
    runs = [(label, list(rows)) for label, rows in groupby(verdict.rows, key=lambda row: group(row.item))]
    groups = [Group(label, rows, max(rows, key=badness)) for label, rows in runs]
    return sorted(groups, key=lambda group: group.worst.status == PASS)


def number(value: float) -> str:
    """As the text report has it; a dash for what was not measured."""
    return f"{value:.1e}" if value == value else "–"


def _ratio(value: float) -> str:
    return f"{value:.1e}" if value >= 1000 or 0 < value < 0.001 else f"{value:.2g}"


def share(row: Row) -> str:
    """The difference as a share of the limit, in words where the limit is 0."""
    if row.difference != row.difference:
        return "–"
    if row.atol > 0:
        return _ratio(row.difference / row.atol)
    return "equal" if row.difference == 0 else "unequal"


def worst_share(verdicts: Sequence[Verdict]) -> str:
    """The largest share of a limit among all items; those without a difference say so by their status."""
    rows = [row for verdict in verdicts for row in verdict.rows]
    shares = [row.difference / row.atol for row in rows if row.atol > 0 and row.difference >= 0]
    if shares:
        return _ratio(max(shares))
    return share(max(rows, key=badness)) if rows else "–"


def outline(verdict: Verdict) -> str:
    """How many items, how close to their limits, and the first that did not pass."""
    count, share = len(verdict.rows), worst_share([verdict])
    parts = [f"{count:,} item{'' if count == 1 else 's'}"]
    if share == "equal":
        parts.append("all equal")
    elif share not in ("unequal", "–"):
        parts.append(f"worst share {share}")
    if verdict.first_failure:
        parts.append(f"first {verdict.first_failure.name}")
    return ", ".join(parts)


def first_lines(verdict: Verdict, types: Mapping[str, str]) -> list[str]:
    """What the text report says of the first failure, and where it begins."""
    return first_difference(verdict, types) + (verdict.location.lines() if verdict.location else [])


def _values(row: Row) -> Iterator[tuple[str, str]]:
    worst = row.worst
    if worst:
        yield f"Reference{place(row)}", repr(worst.ref)
        yield f"Port{place(row)}", repr(worst.port)
    if row.difference == row.difference:
        text = f"{row.difference:.3e}, limit {row.atol:.3e}"
        if row.atol > 0:
            text += f": {share(row)} times the limit"
        if row.scale > 0:
            text += f", {row.difference / row.scale:.1e} of the largest value"
        yield "Difference", text
    if worst:
        yield "Over the limit", f"{worst.outside:,} of {worst.size:,} values ({worst.outside / worst.size:.1%})"
    if row.reason:
        yield "Reason", row.reason


def _before(result: LadderResult, rung: RungResult, verdict: Verdict, row: Row) -> Iterator[str]:
    """What agreed before the row: rungs of its model, checks of its rung, items of its check."""
    earlier = [other for other in result.rungs[: result.rungs.index(rung)] if other.model == rung.model]
    if passed := [other.name for other in earlier if other.status == PASS]:
        yield ", ".join(passed)
    for things, what in (
        (rung.verdicts[: rung.verdicts.index(verdict)], "checks of this rung"),
        (verdict.rows[: verdict.rows.index(row)], "items of this check"),
    ):
        passed = sum(thing.status == PASS for thing in things)
        yield f"no {what}" if not things else f"{passed} of {len(things)} {what} agree"


def first_failure(result: LadderResult) -> list[tuple[str, str]]:
    """The first thing that failed, or was refused, of the whole run: (term, text) pairs."""
    rung = result.first_bad
    if rung is None:
        return []
    facts = [("Rung", f"{rung.name}, {rung.model}")]
    verdict = rung.first_bad
    if verdict is None:
        return [*facts, ("Error", rung.error or "nothing was compared")]
    facts.append(("Check", verdict.title))
    row = verdict.first_failure
    if row is None:
        return [*facts, ("Reason", verdict.refusal)]
    types = rung.rung.types
    facts.append(("Item", f"{with_layer(row, types)}, {shape(row)}"))
    facts += _values(row)
    facts.append(("Agreed before", "; ".join(_before(result, rung, verdict, row))))
    if verdict.location:
        facts.append(("Location", "\n".join(verdict.location.lines())))
    if causes := usual_causes(verdict, row, types):
        facts.append(("Usual causes", causes))
    return facts


def _depth_plots(rung: Findings, salt: str) -> Iterator[Plot]:
    for i, verdict in enumerate(rung.verdicts):
        rows = depth_rows(verdict.judged)
        if len(rows) < FEWEST:
            continue
        bad = [k for k, row in enumerate(rows) if row.status != PASS]
        gradients = rows[0].item.kind == "gradient"
        text = f"{len(bad)} of {len(rows)} over the limit, first no. {bad[0] + 1}: {rows[bad[0]].name}" if bad else ""
        x_label = "gradient, from the output to the input" if gradients else "item, in the order of execution"
        several = rows[0].item.iteration is not None
        title = f"{verdict.title}: gradients of iteration 0" if gradients and several else verdict.title
        yield Plot(title, depth_plot(rows, x_label, f"{salt}-depth-{i}"), text)


def _share_plots(rung: Findings, salt: str) -> Iterator[Plot]:
    for i, verdict in enumerate(rung.verdicts):
        if curves := shares(verdict.judged):
            over = set()
            for curve in curves.values():
                over.update(i for i, value in enumerate(curve) if value > 1)
            text = f"over the limit at iteration {', '.join(map(str, sorted(over)))}" if over else ""
            yield Plot(verdict.title, shares_plot(curves, f"{salt}-shares-{i}"), text)


def _curve_plots(rung: Findings, salt: str) -> Iterator[Plot]:
    for i, (name, (ref, port)) in enumerate(rung.curves.items()):
        what = CURVES.get(name.rpartition(", ")[2], "value")
        yield Plot(name, curve_plot(ref, port, what, f"{salt}-curve-{i}"))


def salt_of(number: int) -> str:
    """What parts the plots of the run's rung of this number, from 1 on, from those of others."""
    return f"r{number}"


def plots_of(rung: Findings, salt: str) -> dict[str, list[Plot]]:
    """The plots of a rung, by what they show; `salt` keeps the ids of different rungs apart."""
    kinds = {"depth": _depth_plots, "shares": _share_plots, "curves": _curve_plots}
    return {kind: list(draw(rung, salt)) for kind, draw in kinds.items()}


def render_page(result: LadderResult, drawn: Mapping[str, dict[str, list[Plot]]] | None = None) -> str:
    """The page of `result`; names and messages from outside are escaped.

    `drawn` are `plots_of` rungs that are drawn already, by their salts: `salt_of` their places in the run.
    """
    drawn = drawn or {}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("portproof.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {f.__name__: f for f in (number, shape, share, worst_share, outline)}
    return environment.get_template("report.html.j2").render(
        result=result,
        facts=first_failure(result),
        WORDS=WORDS,
        LAST_WORDS=LAST_WORDS,
        PASS=PASS,
        REFUSED=REFUSED,
        STYLES=STYLES,
        groups_of=groups_of,
        plots_of=lambda rung, salt: drawn[salt] if salt in drawn else plots_of(rung, salt),
        salt_of=salt_of,
        picture_row=picture_row,
        first_lines=first_lines,
    )


def write_page(result: LadderResult, path: Path, drawn: Mapping[str, dict[str, list[Plot]]] | None = None) -> None:
    """Write `render_page` of `result`; raises UserError when it cannot be written."""
    # a file name that is not UTF-8 may be an item's name
    save_text(render_page(result, drawn).encode("utf-8", "backslashreplace").decode("utf-8"), path)
