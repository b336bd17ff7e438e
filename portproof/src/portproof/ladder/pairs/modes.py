"""A whole pair compared, mode by mode: in float64 everything, in float32 outputs, statistics and isolated layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from portproof.backends.question import OUTPUTS, Run
from portproof.backends.trace import output_item
from portproof.compare import FAIL, Item, Items, Row, Verdict, compare, tensor_item
from portproof.compare.ruler import Ruler, exact_atol
from portproof.ladder.pairs.pair import MODES, Pair, check_reference
from portproof.ladder.pairs.randomness import switch_off_random
from portproof.localize.isolated import Calls, IsolatedRuns, isolated_layers, without_optional
from portproof.localize.locate import KINDS, OTHER_VALUES, locate
from portproof.localize.location import Location
from portproof.mapping.name_map import NameMap
from sturdyio.cli import UserError

_FLOAT32_ALONE = (
    "float32's limits alone judge it: less than these, and gradients in code between layers, are not proved"
)
_OWN_RUN = " (this run in float64 is the check's own: a port that works in float32 alone is judged in that alone)"


@dataclass(frozen=True)
class Compared:
    """What came of one comparison of a mode, and the runs that were compared; None where modules were run alone."""

    verdict: Verdict
    dtype: str
    ref: Run | None = None
    port: Run | None = None


def why_not_comparable(pair: Pair, train: bool) -> Verdict | None:
    """Why a mode cannot be compared: outputs of other keys, or a side that gives another result each time; else None.

    What is random in train mode is switched off where its mode does that, and named. It has to be asked before the mode
    is compared.
    """
    mode = f"{MODES[train]} mode"
    if pair.strict:
        return None
    places = []
    for model in (pair.ref, pair.port):
        run, name = switch_off_random(model, pair.question(model, pair.precisions[0], train))
        places.append(run.places)
        if model.switched_off:
            names = ", ".join(sorted(model.switched_off))
            pair.note(f"random in train mode, and run as in eval mode: the {model.role}'s {names}")
        if name is None:
            continue
        reason = f"the {model.role} gives another result each time it runs in {mode}"
        where = f"random numbers are taken by {name or 'its own code'}"
        if model is pair.port and not train:  # where the reference is not random the port has no reason to be
            item = Item("the same each time", mode="eval")
            return Verdict(mode, [Row(item, FAIL, reason=f"{reason}, {where}: is dropout on?")])
        return Verdict(mode, refusal=f"{reason}, dropout layers aside, {where}: judge the other mode")
    unclear = unclear_outputs(*places)
    return Verdict(mode, refusal=unclear) if unclear else None


def compare_mode(pair: Pair, train: bool) -> Iterator[Compared]:
    """float64: everything. float32: the forward pass, and with a cotangent each layer's gradients in isolated runs.

    Where a module's values differ, but nothing that leaves the model does, the two are equal, and built differently:
    that is noted, unless the pair is `strict`. Raises UserError where the reference cannot run, and for a port without
    a kernel in float64 that is judged in that alone.
    """
    mode = _Mode(pair, train)
    if mode.refusal:
        yield Compared(Verdict(f"{MODES[train]} mode", refusal=mode.refusal), "float64")
        return
    for dtype in pair.precisions:
        yield from mode.compare(dtype)
    if pair.cotangent is not None and "float32" in pair.precisions:
        calls = pair.ask(pair.ref, "float32", train).trace.calls
        pair.ref.forget()
        pair.port.forget()
        may_differ = mode.is_equal and not pair.strict and mode.in_float64
        yield Compared(isolated_gradients(pair, train, calls, mode.port_calls, may_differ), "float32")


class _Mode:
    """One mode of a pair while it is compared."""

    def __init__(self, pair: Pair, train: bool) -> None:
        self.pair, self.train, self.mode = pair, train, MODES[train]
        pair.match_calls([train])
        self.is_equal, self.in_float64 = True, False
        self.decided: list[Item] = []  # what failed in float64
        self.port_calls: Calls | None = None  # of the port's float64 run
        run = pair.ask(pair.ref, "float64", train)
        check_reference(run, train)
        self.input_scales = run.trace.input_scales
        fp64_ref = items(pair, run, False)
        self.left_out = [i for i, a in fp64_ref.items() if a.dtype.kind in "fc" and not np.isfinite(a).all()]
        self.refusal = ""
        for item in self.left_out:
            if pair.strict or not _stays_inside(item):
                self.refusal = f"the reference itself gives NaN or infinity at {item}"
            else:
                pair.note(f"not compared, since it is not finite, a mask perhaps: {item}")

    def compare(self, dtype: str) -> Iterator[Compared]:
        """One precision; nothing of float64 where the port's framework has no kernel for it."""
        pair, train = self.pair, self.train
        ref_run, port_run = pair.ask(pair.ref, dtype, train), pair.ask(pair.port, dtype, train)
        if dtype == "float64" and port_run.trace.lacking:
            lacking = f"the port's framework has no kernel in float64 for {port_run.trace.lacking}"
            if "float32" not in pair.precisions:
                raise UserError(f"{lacking}: judge the port in float32")
            pair.note(f"{lacking}: {self.mode} mode was not run in float64, {_FLOAT32_ALONE}")
            return
        self.in_float64 |= dtype == "float64"
        _note_run(pair, dtype, ref_run, port_run)
        ref = self._items(dtype, ref_run, False)
        port = without_optional(self._items(dtype, port_run, True), ref, pair.port)
        data = sorted({*ref_run.trace.float32_data, *port_run.trace.float32_data})
        ruler = self._ruler(dtype, ref, bool(data) and not pair.strict)
        verdict = ruler.compare(port, title=f"{self.mode} mode, {dtype}", mode=self.mode, dtype=dtype)
        self.decided = [replace(row.item, mode="", dtype="") for row in verdict.rows if row.status == FAIL]
        if any(row.widened_by == "float32 data" for row in verdict.rows):
            where = ", ".join(name or "the model itself" for name in data)
            pair.note(f"float32 data come in at {where}: what differs is judged with float32's limits")
        if port_run.trace.error:
            reason = f"it raised {port_run.trace.error}{_OWN_RUN if dtype == 'float64' else ''}"
            row = Row(Item("the port runs", mode=self.mode, dtype=dtype), FAIL, reason=reason)
            verdict = replace(verdict, rows=[*verdict.rows, row])
        if verdict.not_judged and list(pair.precisions) == ["float32"]:
            first = verdict.not_judged[0].name
            verdict = replace(verdict, refusal=f"float32 keeps no digit of {first}: judge the port in float64, too")
        yield Compared(self._without_construction(verdict), dtype, ref_run, port_run)
        if dtype == "float64":
            self.port_calls = port_run.trace.calls
            pair.port.forget()

    def _items(self, dtype: str, run: Run, is_port: bool) -> dict[Item, np.ndarray]:
        """What is judged of a run in that precision."""
        found = items(self.pair, run, is_port)
        if dtype == "float32":
            found = {item: array for item, array in found.items() if item.kind in ("output", "buffer")}
        return {item: array for item, array in found.items() if item not in self.left_out}

    def _ruler(self, dtype: str, ref: Items, has_float32_data: bool) -> Ruler:
        pair, train = self.pair, self.train

        def again(other: str, perturbation: int = 0) -> Items:
            question = pair.question(pair.ref, other, train)
            if perturbation:
                question = replace(question, keeps=OUTPUTS, perturbation=perturbation)
            return items(pair, pair.ref.ask(question), False)

        whole = [Item(pair.output, "output")] if dtype == "float64" else []
        return Ruler.measured(
            ref,
            dtype,
            again,
            has_float32_data=has_float32_data and dtype == "float64",
            input_scales=self.input_scales,
            must_be_judged=whole,
            decided=self.decided,
        )

    def _without_construction(self, verdict: Verdict) -> Verdict:
        """`verdict` without differences that stay inside the model, which is then built differently."""
        failed = [row for row in verdict.rows if row.status == FAIL]
        self.is_equal &= all(_stays_inside(row.item) for row in failed)
        if not failed or not self.is_equal or self.pair.strict:
            return verdict
        for row in failed:
            self.pair.built_differently.setdefault(row.item.module, OTHER_VALUES)
        return without(verdict, [row.item for row in failed])


def _stays_inside(item: Item) -> bool:
    """Whether it is what a module inside the model gives, in the forward pass."""
    return item.kind == "output" and bool(item.module)


def without(verdict: Verdict, left_out: Collection[Item]) -> Verdict:
    """`verdict` without these items."""
    return replace(verdict, rows=[row for row in verdict.rows if row.item not in set(left_out)])


def without_faultless(pair: Pair, verdict: Verdict, built_differently: Mapping[str, str]) -> Verdict:
    """`verdict` without the outputs of module calls that a search for faults found to be `built_differently`."""
    rows = [row for row in verdict.rows if row.status == FAIL and _stays_inside(row.item)]
    found = [row.item for row in rows if row.item.name.partition("[")[0] in built_differently]
    for item in found:
        pair.built_differently[item.module] = built_differently[item.name.partition("[")[0]]
    return without(verdict, found)


def _note_run(pair: Pair, dtype: str, ref_run: Run, port_run: Run) -> None:
    """Note what is particular about float64 runs: float32 in their code, and what could not be recorded."""
    for model, run in ((pair.ref, ref_run), (pair.port, port_run)) if dtype == "float64" else ():
        modules = sorted(name or "the model itself" for name in run.trace.float32)
        if modules:
            pair.note(
                f"the {model.role} asks for float32, and gets float64 in the float64 run: in {', '.join(modules)}"
            )
        for name, reason in run.trace.unrecorded.items():
            pair.note(f"not recorded of the {model.role}: {name or 'the model itself'}: {reason}")


def isolated_gradients(
    pair: Pair, train: bool, calls: Calls, port_calls: Calls | None = None, is_equal: bool = False
) -> Verdict:
    """float32 gradients, layer by layer, each on the reference's own inputs and upstream gradients, those of `calls`.

    Through a whole network they cannot be judged: one activation on the other side of a kink by rounding moves them by
    a percent, on either framework. In an isolated run a layer receives the same on both sides, off its kinks (see
    activations.py). Where the whole `is_equal` in float64, a layer that differs there too is built differently.
    """
    pair.match_calls([train])
    runs = IsolatedRuns(pair.ref, pair.port, pair.name_map, pair.inputs, train, calls, port_calls)
    rows = []
    for label, found in isolated_layers(runs, "float32"):
        differs = found.failed(gradients=True)
        if not found.attempt.complete:
            pair.built_differently.setdefault(calls[label].name, found.attempt.built_differently)
        elif differs and is_equal and not runs.run(label, "float64", True, adjusted=False).passed:
            pair.built_differently.setdefault(calls[label].name, OTHER_VALUES)
        else:
            there = {"mode": MODES[train], "dtype": "float32", "section": label}
            gradients = (row for row in found.rows if row.item.kind == "gradient")
            rows += [replace(row, item=replace(row.item, **there)) for row in gradients]
    return Verdict(f"{MODES[train]} mode, float32, isolated layers", rows)


def structure(name_map: NameMap) -> Verdict:
    """Every tensor of the reference, whether it has its counterpart, of its shape."""
    rows = [Row(Item(name, "structure"), FAIL, reason=reason) for name, reason in name_map.problems.items()]
    fine = {tensor_item(ref, "structure"): np.array(port) for ref, port in name_map.tensors.items()}
    return Verdict("parameters and buffers", rows + compare(fine, fine, exact_atol(fine)).rows)


def equal_weights(pair: Pair) -> Verdict:
    """The port's weights against the reference's, bit for bit."""
    ref_arrays, port_arrays = pair.ref.arrays(), pair.port.arrays()
    tensors = pair.name_map.tensors
    ref = {tensor_item(key, "weights"): ref_arrays[key] for key in tensors}
    port = {tensor_item(key, "weights"): port_arrays[port_key] for key, port_key in tensors.items()}
    return compare(ref, port, exact_atol(ref), title="weights as they were given")


def all_notes(pair: Pair) -> list[str]:
    """What the map rests on, and what else a reader should know beside the rows."""
    notes = [map_note(pair), *pair.name_map.notes, *pair.notes, *pair.port.notes()]
    groups: dict[str, list[str]] = {}
    for name, word in pair.built_differently.items():
        groups.setdefault(word, []).append(f"{name} ({pair.ref.modules[name].type})")
    for word, modules in groups.items():
        more = f" and {len(modules) - 5} more" if len(modules) > 5 else ""
        notes.append(f"built differently, no fault: {word}: {', '.join(modules[:5])}{more}")
    return notes


def map_note(pair: Pair) -> str:
    """How much the map covers, and what it rests on."""
    return f"map: {len(pair.name_map.tensors)} tensors, {len(pair.name_map.calls)} outputs, {pair.name_map.how}"


def passes(pair: Pair) -> str:
    """How often the models were run."""
    counted = pair.ref.passes + pair.port.passes
    return f"runs: {counted['whole']} of whole models, {counted['alone']} of modules alone"


def locate_failure(pair: Pair, verdicts: Sequence[Verdict]) -> Location | None:
    """Where the port departs, in the modes and the precision of the items that failed in `verdicts`; None: nowhere."""
    failed = [row.item for verdict in verdicts for row in verdict.rows if row.status == FAIL]
    named = {item.mode for item in failed}
    dtype = precision_of(verdicts)
    modes: dict[bool, set[str]] = {}
    for mode in [mode for mode in MODES if mode in named] or MODES:
        # What is judged of a training step is more than what a pass of the whole model gives.
        whole = [item for item in failed if (item.mode, item.dtype) == (mode, "float64") and item.iteration is None]
        kinds = {item.kind for item in whole if not _stays_inside(item)} & KINDS
        modes[mode == "train"] = kinds if dtype == "float64" else set()
    pair.match_calls(list(modes))
    sides = pair.ref, pair.port, pair.name_map, pair.inputs
    return locate(*sides, modes=modes, cotangent=pair.cotangent, dtype=dtype)


def precision_of(verdicts: Iterable[Verdict]) -> str:
    """The precision to look for a fault in: float64, unless only items of float32 failed."""
    failed = {row.item.dtype for verdict in verdicts for row in verdict.rows if row.status == FAIL}
    return "float32" if failed == {"float32"} else "float64"


def items(pair: Pair, run: Run, is_port: bool) -> dict[Item, np.ndarray]:
    """What one side computed, by the reference's names: forward, then gradients from the output back, then buffers."""
    name_map = pair.name_map
    if is_port:
        keys, labels = {port_key: key for key, port_key in name_map.tensors.items()}, name_map.calls
    else:
        keys, labels = {key: key for key in name_map.tensors}, {label: label for label in name_map.calls}
    outputs = renamed(run.trace.outputs, labels)
    gradients = {keys[k]: array for k, array in run.gradients.items() if k in keys}
    order = [key for key in reversed(list(name_map.tensors)) if key in gradients]
    return {
        **{output_item(label, pair.output): array for label, array in outputs.items()},
        **{tensor_item(key, "gradient"): gradients[key] for key in order},
        **{Item(f"input {i}", "gradient"): array for i, array in enumerate(run.input_gradients) if array is not None},
        **{tensor_item(keys[k], "buffer"): array for k, array in run.buffers.items() if k in keys},
    }


def renamed(outputs: Mapping[str, np.ndarray], calls: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The port's outputs under the reference's names; those without a counterpart are left out."""
    ref_labels, found = {port_label: label for label, port_label in calls.items()}, {}
    for name, array in outputs.items():
        label, bracket, rest = name.partition("[")
        if label in ref_labels:
            found[ref_labels[label] + bracket + rest] = array
    return found


def unclear_outputs(ref: Sequence[str], port: Sequence[str]) -> str:
    """Why it cannot be told, from their places, which output of the port is the reference's; "" where it can."""
    if set(ref) & set(port) or not ref or not port or "" in (*ref, *port):
        return ""
    both = (", ".join(place.strip("[]") for place in places) for places in (ref, port))
    return "the reference returns {} and the port {}: say which is which with outputs (--match REF=PORT)".format(*both)
