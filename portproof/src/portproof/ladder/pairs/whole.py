"""`portproof.align`: a whole pair of models judged at once, and where the port departs from the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from portproof.backends.trace import Inputs, module_of
from portproof.compare import FAIL, PASS, Verdict, joined
from portproof.compare.ruler import UNIT_ROUNDOFF
from portproof.ladder.pairs.modes import (
    all_notes,
    compare_mode,
    equal_weights,
    locate_failure,
    passes,
    structure,
    why_not_comparable,
    without_faultless,
)
from portproof.ladder.pairs.pair import MODES, Pair
from portproof.localize.locate import locate
from portproof.localize.location import Location
from portproof.mapping.name_map import NameMap
from portproof.report.text import render_sections
from sturdyio.cli import UserError


@dataclass(frozen=True)
class AlignVerdict(Verdict):
    """The verdict of `align`, which prints as its report."""

    names: NameMap | None = None  # which module and tensor of the port stands for which of the reference
    passes: str = ""  # how often the models were run, in words

    def __str__(self) -> str:
        return render_sections(self, self.passes)


def judge(
    ref: Any,
    port: Any,
    inputs: Inputs,
    names: Mapping[str, str] | None,
    weights: str,
    modes: Sequence[str],
    precisions: Sequence[str],
    leave_out: Sequence[str],
    outputs: Mapping[str, str] | None,
    seed: int,
    device: str,
) -> AlignVerdict:
    """What `portproof.align` does."""
    if not modes or not set(modes) <= set(MODES):
        raise UserError(f"modes {modes!r}: choose some of {', '.join(MODES)}")
    check_precisions(precisions)
    options = {"names": names, "weights": weights, "seed": seed, "device": device, "outputs": outputs}
    ordered = [dtype for dtype in UNIT_ROUNDOFF if dtype in precisions]
    pair = Pair.prepared(ref, port, inputs, **options, modes=modes, precisions=ordered)
    every_name = pair.name_map
    exclude_modules(pair, leave_out)
    verdicts = [structure(pair.name_map)]
    if pair.name_map.ambiguous:
        notes = all_notes(pair)
        return AlignVerdict("align", verdicts[0].rows, pair.name_map.ambiguous, notes=notes, names=every_name)
    if weights == "own":
        verdicts.append(equal_weights(pair))
    for mode in modes if verdicts[0].status == PASS else ():
        reason = why_not_comparable(pair, mode == "train")
        if reason is not None:
            verdicts.append(reason)
        else:  # without holding the runs of one precision while the next is compared
            verdicts.extend(map(attrgetter("verdict"), compare_mode(pair, mode == "train")))
    failed = any(verdict.status == FAIL for verdict in verdicts)
    location = locate_failure(pair, verdicts) if failed else None
    if location:
        verdicts = [without_faultless(pair, verdict, location.built_differently) for verdict in verdicts]
    every = joined("align", [verdicts[0], *map(_sectioned, verdicts[1:])])
    notes = all_notes(pair)
    return AlignVerdict("align", every.rows, every.refusal, location, notes, names=every_name, passes=passes(pair))


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
    if pair.name_map.ambiguous:
        raise UserError(f"the map is ambiguous: {pair.name_map.ambiguous}")
    pair.match_calls((False, True))
    exclude_modules(pair, leave_out)
    sides, ordered = (pair.ref, pair.port, pair.name_map, pair.inputs), [d for d in UNIT_ROUNDOFF if d in precisions]
    found = (locate(*sides, cotangent=pair.cotangent, dtype=dtype) for dtype in ordered)
    return next(filter(None, found), None), all_notes(pair)


def check_precisions(precisions: Sequence[str]) -> None:
    """Raise UserError unless these are some of those that there are."""
    if not precisions or not set(precisions) <= set(UNIT_ROUNDOFF):
        raise UserError(f"precisions {precisions!r}: choose some of {', '.join(UNIT_ROUNDOFF)}")


def exclude_modules(pair: Pair, modules: Sequence[str]) -> None:
    """Take these modules of the reference, and all in them, out of what the pair is compared by, and note it.

    Their tensors keep the values that they have. Raises UserError for a name that is no module's.
    """
    modules = [modules] if isinstance(modules, str) else modules
    for name in modules:
        if not name or name not in pair.ref.modules:
            raise UserError(f"leave_out names {name!r}, but the reference has no module of that name in it")

    def stays(module: str) -> bool:
        return not any(module == name or module.startswith(f"{name}.") for name in modules)

    if modules:
        pair.match_calls((False, True))
    names = pair.name_map
    calls = {label: port_label for label, port_label in names.calls.items() if stays(module_of(label))}
    tensors = {key: port_key for key, port_key in names.tensors.items() if stays(key.rpartition(".")[0])}
    problems = {item: reason for item, reason in names.problems.items() if stays(item)}
    pair.name_map = replace(names, calls=calls, tensors=tensors, problems=problems)
    counts = f"{len(names.tensors) - len(tensors)} tensors, {len(names.calls) - len(calls)} outputs"
    if modules:
        pair.note(f"left out, not compared: {', '.join(modules)} ({counts})")


def _sectioned(verdict: Verdict) -> Verdict:
    """The verdict, with its title over its items: of all modes and precisions together, one name has several."""
    rows = [
        replace(row, item=replace(row.item, section="/".join(filter(None, (verdict.title, row.item.section)))))
        for row in verdict.rows
    ]
    return replace(verdict, rows=rows)
