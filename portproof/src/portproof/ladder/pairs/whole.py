"""`portproof.align`: a whole pair of models judged at once, and where the port departs from the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portproof.compare import FAIL, PASS, Item, Row, Verdict, joined
from portproof.io.cli import UserError
from portproof.ladder.pairs.pair import MODES, Pair, compare_mode, equal_weights, locate_failure, structure
from portproof.localize.locate import locate
from portproof.localize.location import Location
from portproof.mapping.map_search import alike
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
    pair = Pair.prepared(ref, port, inputs, names=names, weights=weights, seed=seed, device=device)
    verdicts, notes = [structure(pair.names)], [map_note(pair), *pair.names.notes]
    if pair.names.ambiguous:
        return AlignVerdict("align", verdicts[0].rows, refusal=pair.names.ambiguous, notes=notes)
    pair.draw_cotangent(seed)
    if weights == "own":
        verdicts.append(equal_weights(pair))
    for mode in modes if verdicts[0].status == PASS else ():
        verdicts += _if_not_random(pair, mode == "train", list(compare_mode(pair, mode == "train")))
    failed = any(verdict.status == FAIL for verdict in verdicts)
    location = locate_failure(pair, verdicts) if failed else None
    every = joined("align", [verdicts[0], *map(_sectioned, verdicts[1:])])
    return AlignVerdict("align", every.rows, every.refusal, location, notes)


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


def _if_not_random(pair: Pair, train: bool, found: list[Verdict]) -> list[Verdict]:
    """`found`, unless it failed and a side gives another result each time: then that is what there is to say."""
    if all(verdict.status != FAIL for verdict in found):
        return found
    for model in (pair.ref, pair.port):
        runs = [model.run(pair.inputs, "float32", train).output for _ in range(2)]
        if not alike(*([np.nan_to_num(array, posinf=0.0, neginf=0.0) for array in run] for run in runs)):
            mode = f"{MODES[train]} mode"
            reason = f"the {model.role} gives another result each time it runs"
            if model is pair.port and not train:  # where the reference is not random the port has no reason to be
                item = Item("the same each time", mode="eval")
                return [Verdict(mode, [Row(item, FAIL, reason=f"{reason}: is dropout on?")])]
            return [Verdict(mode, refusal=f"{reason} in {mode}, dropout layers aside: judge the other mode")]
    return found


def map_note(pair: Pair) -> str:
    """How much the map covers, and what it rests on."""
    return f"map: {len(pair.names.tensors)} tensors, {len(pair.names.calls)} outputs, {pair.names.how}"
