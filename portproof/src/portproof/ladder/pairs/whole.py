"""`portproof.align`: a whole pair of models judged at once, and where the port departs from the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portproof.compare import FAIL, PASS, Verdict, joined
from portproof.io.cli import UserError
from portproof.ladder.pairs.pair import (
    MODES,
    Pair,
    equal_weights,
    judge_mode,
    locate_failure,
    structure,
    without_faultless,
)
from portproof.localize.locate import locate
from portproof.localize.location import Location
from portproof.report.text import render_sections


class AlignVerdict(Verdict):
    """The verdict of `align`, which prints as its report."""

    def __str__(self) -> str:
        return render_sections(self)


def judge(
    ref: Any,
    port: Any,
    inputs: Sequence[np.ndarray],
    names: Mapping[str, str] | None,
    weights: str,
    modes: Sequence[str],
    seed: int,
    device: str,
) -> Verdict:
    """What `portproof.align` does."""
    if not modes or not set(modes) <= set(MODES):
        raise UserError(f"modes {modes!r}: choose some of {', '.join(MODES)}")
    options = {"names": names, "weights": weights, "seed": seed, "device": device, "modes": modes}
    pair = Pair.prepared(ref, port, inputs, **options)
    verdicts = [structure(pair.names)]
    if pair.names.ambiguous:
        return AlignVerdict("align", verdicts[0].rows, refusal=pair.names.ambiguous, notes=all_notes(pair))
    pair.draw_cotangent(seed)
    if weights == "own":
        verdicts.append(equal_weights(pair))
    for mode in modes if verdicts[0].status == PASS else ():
        verdicts += judge_mode(pair, mode == "train")
    failed = any(verdict.status == FAIL for verdict in verdicts)
    location = locate_failure(pair, verdicts) if failed else None
    if location:
        verdicts = [without_faultless(pair, verdict, location.otherwise) for verdict in verdicts]
    every = joined("align", [verdicts[0], *map(_sectioned, verdicts[1:])])
    return AlignVerdict("align", every.rows, every.refusal, location, all_notes(pair))


def search(
    ref: Any,
    port: Any,
    inputs: Sequence[np.ndarray],
    names: Mapping[str, str] | None,
    weights: str,
    seed: int,
    device: str,
) -> tuple[Location | None, str]:
    """(where the port departs from the reference, what the map rests on): `judge` without the comparison of the whole.

    Raises UserError as `judge` does, and where the map is ambiguous.
    """
    pair = Pair.prepared(ref, port, inputs, names=names, weights=weights, seed=seed, device=device)
    if pair.names.ambiguous:
        raise UserError(f"the map is ambiguous: {pair.names.ambiguous}")
    pair.draw_cotangent(seed)
    sides = pair.ref, pair.port, pair.names, pair.inputs
    location = locate(*sides, cotangent=pair.cotangent)
    return location or locate(*sides, cotangent=pair.cotangent, dtype="float32"), map_note(pair)


def _sectioned(verdict: Verdict) -> Verdict:
    """The verdict, with its title over its items: of all modes and precisions together, one name has several."""
    rows = [
        replace(row, item=replace(row.item, section="/".join(filter(None, (verdict.title, row.item.section)))))
        for row in verdict.rows
    ]
    return replace(verdict, rows=rows)


def all_notes(pair: Pair) -> list[str]:
    """What the map rests on, and what else a reader should know beside the rows."""
    notes = [map_note(pair), *pair.names.notes, *pair.notes]
    groups: dict[str, list[str]] = {}
    for name, how in pair.made_otherwise.items():
        groups.setdefault(how, []).append(f"{name} ({pair.ref.modules[name].type})")
    return notes + [f"made otherwise, no fault: {how}: {', '.join(modules)}" for how, modules in groups.items()]


def map_note(pair: Pair) -> str:
    """How much the map covers, and what it rests on."""
    return f"map: {len(pair.names.tensors)} tensors, {len(pair.names.calls)} outputs, {pair.names.how}"
