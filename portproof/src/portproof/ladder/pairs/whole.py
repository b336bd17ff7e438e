"""`portproof.align`: judge a whole pair, and find where the port departs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from portproof.backends.trace import Inputs
from portproof.compare import FAIL, PASS, Verdict, joined
from portproof.ladder.pairs.modes import (
    all_notes,
    compare_mode,
    equal_weights,
    locate_failure,
    passes,
    random_or_unclear,
    structure,
    without_faultless,
)
from portproof.ladder.pairs.pair import Options, Pair
from portproof.localize.locate import Location
from portproof.mapping.name_map import NameMap
from portproof.report.text import render_sections
from sturdyio.cli import UserError


@dataclass(frozen=True)
class AlignVerdict(Verdict):
    """The verdict of `align`, which prints as its report."""

    names: NameMap | None = None
    passes: str = ""  # how often the models were run, in words

    def __str__(self) -> str:
        return render_sections(self, self.passes)


def judge(ref: Any, port: Any, inputs: Inputs, options: Options) -> AlignVerdict:
    """What `portproof.align` does."""
    pair = Pair.prepared(ref, port, inputs, options)
    names = pair.whole_map
    verdicts = [structure(pair.name_map)]
    if names.ambiguous:
        return AlignVerdict("align", verdicts[0].rows, names.ambiguous, notes=all_notes(pair), names=names)
    if options.weights == "own":
        verdicts.append(equal_weights(pair))
    for mode in options.modes if verdicts[0].status == PASS else ():
        # frees one precision's runs before the next
        verdicts.extend(map(attrgetter("verdict"), compare_mode(pair, mode == "train")))
    failed = any(verdict.status == FAIL for verdict in verdicts)
    location = locate_failure(pair, verdicts) if failed else None
    if location:
        verdicts = [without_faultless(pair, verdict, location.built_differently) for verdict in verdicts]
    every = joined("align", [verdicts[0], *map(_sectioned, verdicts[1:])])
    found = every.rows, every.refusal, location, all_notes(pair)
    return AlignVerdict("align", *found, names=names, passes=passes(pair))


def search(ref: Any, port: Any, inputs: Inputs, options: Options) -> tuple[Location | None, list[str]]:
    """(where the port departs in either mode, notes), without comparing the whole.

    Raises UserError as `judge` does, if it is refused in a mode, or if the map is ambiguous.
    """
    pair = Pair.prepared(ref, port, inputs, options)
    if pair.name_map.ambiguous:
        raise UserError(f"the map is ambiguous: {pair.name_map.ambiguous}")
    for train in (False, True):
        refused = random_or_unclear(pair, train)
        if refused is not None and refused.refusal:
            raise UserError(refused.refusal)
    found = (locate_failure(pair, dtype=dtype) for dtype in pair.precisions)
    return next(filter(None, found), None), all_notes(pair)


def _sectioned(verdict: Verdict) -> Verdict:
    """Put the title over the items: all modes and precisions have the same names."""
    rows = []
    for row in verdict.rows:
        section = "/".join(filter(None, (verdict.title, row.item.section)))
        rows.append(replace(row, item=replace(row.item, section=section)))
    return replace(verdict, rows=rows)
