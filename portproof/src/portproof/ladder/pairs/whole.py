"""`portproof.align`: a whole pair of models judged at once, and where the port departs from the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portproof.backends.trace import Inputs, module_of
from portproof.compare import FAIL, PASS, Item, Row, Verdict, joined
from portproof.compare.tolerances import UNIT_ROUNDOFF
from portproof.io.cli import UserError
from portproof.ladder.pairs.pair import MODES, Pair, compare_mode, equal_weights, locate_failure, structure
from portproof.localize.locate import locate
from portproof.localize.location import Location
from portproof.mapping.map_search import alike
from portproof.mapping.name_map import NameMap
from portproof.report.text import render_sections


@dataclass(frozen=True)
class AlignVerdict(Verdict):
    """The verdict of `align`, which prints as its report."""

    names: NameMap | None = None  # which module and tensor of the port stands for which of the reference

    def __str__(self) -> str:
        return render_sections(self)


def judge(
    ref: Any,
    port: Any,
    inputs: Inputs,
    names: Mapping[str, str] | None,
    weights: str,
    modes: Sequence[str],
    precisions: Sequence[str],
    leave_out: Sequence[str],
    seed: int,
    device: str,
) -> AlignVerdict:
    """What `portproof.align` does."""
    if not modes or not set(modes) <= set(MODES):
        raise UserError(f"modes {modes!r}: choose some of {', '.join(MODES)}")
    check_precisions(precisions)
    pair = Pair.prepared(ref, port, inputs, names=names, weights=weights, seed=seed, device=device)
    every_name, notes = pair.names, [map_note(pair), *left_out(pair, leave_out)]
    pair.precisions = precisions
    verdicts = [structure(pair.names)]
    if pair.names.ambiguous:
        return AlignVerdict("align", verdicts[0].rows, refusal=pair.names.ambiguous, notes=notes, names=every_name)
    pair.draw_cotangent(seed)
    if weights == "own":
        verdicts.append(equal_weights(pair))
    for mode in modes if verdicts[0].status == PASS else ():
        verdicts += _if_not_random(pair, mode == "train", list(compare_mode(pair, mode == "train")))
    failed = any(verdict.status == FAIL for verdict in verdicts)
    location = locate_failure(pair, verdicts) if failed else None
    every = joined("align", [verdicts[0], *map(_sectioned, verdicts[1:])])
    return AlignVerdict("align", every.rows, every.refusal, location, notes, names=every_name)


def search(
    ref: Any,
    port: Any,
    inputs: Inputs,
    names: Mapping[str, str] | None,
    weights: str,
    precisions: Sequence[str],
    leave_out: Sequence[str],
    seed: int,
    device: str,
) -> tuple[Location | None, list[str]]:
    """(where the port departs from the reference, notes): `judge` without the comparison of the whole.

    Raises UserError as `judge` does, and where the map is ambiguous.
    """
    check_precisions(precisions)
    pair = Pair.prepared(ref, port, inputs, names=names, weights=weights, seed=seed, device=device)
    if pair.names.ambiguous:
        raise UserError(f"the map is ambiguous: {pair.names.ambiguous}")
    pair.draw_cotangent(seed)
    notes = [map_note(pair), *left_out(pair, leave_out)]
    sides, ordered = (pair.ref, pair.port, pair.names, pair.inputs), [d for d in UNIT_ROUNDOFF if d in precisions]
    found = (locate(*sides, cotangent=pair.cotangent, dtype=dtype) for dtype in ordered)
    return next(filter(None, found), None), notes


def check_precisions(precisions: Sequence[str]) -> None:
    """Raise UserError unless these are some of those that there are."""
    if not precisions or not set(precisions) <= set(UNIT_ROUNDOFF):
        raise UserError(f"precisions {precisions!r}: choose some of {', '.join(UNIT_ROUNDOFF)}")


def left_out(pair: Pair, modules: Sequence[str]) -> list[str]:
    """Take these modules of the reference, and all in them, out of what the pair is compared by -> a note on it.

    Their tensors keep the values that they have. Raises UserError for a name that is no module's.
    """
    modules = [modules] if isinstance(modules, str) else modules
    for name in modules:
        if not name or name not in pair.ref.modules:
            raise UserError(f"leave_out names {name!r}, but the reference has no module of that name in it")

    def stays(module: str) -> bool:
        return not any(module == name or module.startswith(f"{name}.") for name in modules)

    names = pair.names
    calls = {label: port_label for label, port_label in names.calls.items() if stays(module_of(label))}
    tensors = {key: port_key for key, port_key in names.tensors.items() if stays(key.rpartition(".")[0])}
    problems = {item: reason for item, reason in names.problems.items() if stays(item)}
    pair.names = replace(names, calls=calls, tensors=tensors, problems=problems)
    counts = f"{len(names.tensors) - len(tensors)} tensors, {len(names.calls) - len(calls)} outputs"
    return [f"left out, not compared: {', '.join(modules)} ({counts})"] if modules else []


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
