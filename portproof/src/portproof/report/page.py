"""The HTML report of a run: one file, no network, in English or Chinese."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2

from portproof.compare import FAIL, PASS, REFUSED, Item, Row, Verdict, joined
from portproof.io.records import save_text
from portproof.report import text
from portproof.report.chinese import in_chinese
from portproof.report.plots import STYLES, picture_row, plots_of
from portproof.report.summary import LadderResult

LANGUAGES: dict[str, Callable[[str], str]] = {"en": str, "zh": in_chinese}
MOST = 800  # items that a page lists, some 100 bytes each; every check that is not equal has the same share of them,
FEWEST = 10  # or so many, whatever their number
AGREES = f"  {text.WORDS[PASS]} "  # begins a printed line that the tables have too


def failing_first(verdict: Verdict, group: Callable[[Item], str]) -> list[text.Group]:
    """The groups of the text report, failures first."""
    return sorted(text.groups_of(verdict.rows, group), key=lambda group: group.worst.status == PASS)


def share(row: Row, _: Callable[[str], str] = str) -> str:
    """The difference as a share of the widest limit; in words if that is 0."""
    if row.difference != row.difference:
        return "–"
    if row.limit > 0:
        return f"{row.share:.1e}" if row.share >= 1000 or 0 < row.share < 0.001 else f"{row.share:.2g}"
    return _("equal" if row.difference == 0 else "unequal")


def worst_share(verdicts: Sequence[Verdict], _: Callable[[str], str] = str) -> str:
    rows = joined("", verdicts).rows
    measured = [row for row in rows if row.atol > 0 and row.difference >= 0]
    if measured:
        return share(max(measured, key=lambda row: row.share), _)
    return share(max(rows, key=text.badness), _) if rows else "–"


def are_equal(rows: Sequence[Row]) -> bool:
    """Whether all were judged and are equal to the last bit."""
    return all(row.status == PASS and row.difference == 0 for row in rows)


def printed(log: Sequence[str]) -> str:
    """The log without what agrees."""
    lines = "\n".join(log).splitlines()
    return "\n".join(line for line in lines if not line.startswith(AGREES))


def most_telling(rows: Sequence[Row], most: int) -> Sequence[Row]:
    """All rows in order if they are not too many; else what did not pass, then what is nearest to its limit."""
    if len(rows) <= most:
        return rows
    return sorted(rows, key=text.badness, reverse=True)[:most]


def render_page(result: LadderResult, language: str = "en") -> str:
    checks = [verdict for rung in result.rungs for verdict in rung.verdicts if not are_equal(verdict.rows)]
    most = max(FEWEST, MOST // max(len(checks), 1))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("portproof.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    functions = (are_equal, failing_first, most_telling, picture_row, plots_of, printed, share, worst_share)
    environment.filters["translated"] = LANGUAGES[language]
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {"text": text, "PASS": PASS, "FAIL": FAIL, "REFUSED": REFUSED, "STYLES": STYLES}
    return environment.get_template("report.html.j2").render(
        result=result, language=language, most=most, _=LANGUAGES[language]
    )


def write_page(result: LadderResult, path: Path, language: str = "en") -> None:
    """Write the page, in "en" or "zh"; raises UserError if that fails."""
    # an item may be a file name that is not UTF-8
    save_text(render_page(result, language).encode("utf-8", "backslashreplace").decode("utf-8"), path)
