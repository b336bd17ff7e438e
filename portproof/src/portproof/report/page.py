"""The HTML report of a run: one file, no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2

from portproof.compare import FAIL, PASS, REFUSED, Item, Row, Verdict, joined
from portproof.io.records import save_text
from portproof.report import text
from portproof.report.plots import STYLES, picture_row, plots_of
from portproof.report.summary import LadderResult


def failing_first(verdict: Verdict, group: Callable[[Item], str]) -> list[text.Group]:
    """The groups of the text report, failures first."""
    return sorted(text.groups_of(verdict.rows, group), key=lambda group: group.worst.status == PASS)


def share(row: Row) -> str:
    """The difference as a share of the limit; in words if that is 0."""
    if row.difference != row.difference:
        return "–"
    if row.atol > 0:
        return f"{row.share:.1e}" if row.share >= 1000 or 0 < row.share < 0.001 else f"{row.share:.2g}"
    return "equal" if row.difference == 0 else "unequal"


def worst_share(verdicts: Sequence[Verdict]) -> str:
    rows = joined("", verdicts).rows
    measured = [row for row in rows if row.atol > 0 and row.difference >= 0]
    if measured:
        return share(max(measured, key=lambda row: row.share))
    return share(max(rows, key=text.badness)) if rows else "–"


def render_page(result: LadderResult) -> str:
    style = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=jinja2.PackageLoader("portproof.report"), **style)
    functions = (failing_first, picture_row, plots_of, share, worst_share)
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {"text": text, "PASS": PASS, "FAIL": FAIL, "REFUSED": REFUSED, "STYLES": STYLES}
    return environment.get_template("report.html.j2").render(result=result)


def write_page(result: LadderResult, path: Path) -> None:
    """Write the page; raises UserError if that fails."""
    # an item may be a file name that is not UTF-8
    save_text(render_page(result).encode("utf-8", "backslashreplace").decode("utf-8"), path)
