"""Any reference and any port as a pair: the map between them, their runs in both precisions, and what these compare.

A whole model is judged mode by mode: in float64 every module's output, every gradient and every statistic; in float32
outputs and statistics, and gradients layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from portproof.backends import backend_of_side
from portproof.backends.model import OUTPUT, BackendModel, Run
from portproof.backends.trace import Inputs, checked_inputs, module_of
from portproof.compare import FAIL, Item, Items, Row, Verdict, compare, placed, tensor_item
from portproof.compare.tolerances import (
    MOVED,
    UNIT_ROUNDOFF,
    C,
    U,
    distances,
    exact_atol,
    kernel_limits,
    largest,
    lost_in_float32,
    noise_floor,
    semantic_limits,
    with_moved,
    with_noise_floor,
)
from portproof.io.cli import UserError
from portproof.ladder.pairs.randomness import switch_off_random
from portproof.localize.isolated import Calls, IsolatedRuns, isolated_layers, without_spare
from portproof.localize.locate import OTHER_VALUES, locate
from portproof.localize.location import Location
from portproof.mapping.name_map import NameMap, propose, same_names
from portproof.python39 import zip_strict

WEIGHTS = ("probe", "reference", "own")
MODES = ("eval", "train")
MOST = 1e-3  # of a constant's largest value: the most that float32's rounding may explain


@dataclass
class Pair:
    """Two models, the map between them, and what they are run on."""

    ref: BackendModel
    port: BackendModel
    names: NameMap
    inputs: Inputs
    cotangent: Sequence[np.ndarray] | None = None  # the gradient that is sent back, an array an output
    output: str = OUTPUT  # what the model's own output is called
    strict: bool = False  # every module has to give the reference's values, also where nothing comes of a difference
    notes: list[str] = field(default_factory=list)  # what a reader should know beside the rows
    built_differently: dict[str, str] = field(default_factory=dict)  # {module: in what, in words}, without a fault
    precisions: Sequence[str] = tuple(UNIT_ROUNDOFF)  # those in which the port is judged
    outputs: Sequence[np.ndarray] = ()  # of the form of the reference's, if they are known

    @classmethod
    def prepared(
        cls,
        ref: Any,
        port: Any,
        inputs: Inputs,
        *,
        names: Mapping[str, str] | None = None,
        weights: str = "probe",
        seed: int = 0,
        device: str = "cpu",
        mirrored: bool = False,
        output: str = OUTPUT,
        modes: Sequence[str] = MODES,
        outputs: Mapping[str, str] | None = None,
    ) -> Pair:
        """The pair of `ref` and `port`, to be run in `modes`; see `portproof.align` for the arguments.

        `ref` may also be a recorded model. With `mirrored` equal names stand for each other, where both sides have the
        same names and shapes; without it, and where they have not, the map is proposed and confirmed by values. Raises
        UserError for what is no model, and for inputs on which the reference cannot run.
        """
        if weights not in WEIGHTS:
            raise UserError(f"weights {weights!r}: choose one of {', '.join(WEIGHTS)}")
        inputs = checked_inputs(inputs)
        if isinstance(ref, BackendModel):
            ref_model = ref
        else:
            ref_model = backend_of_side(ref, "torch").wrap(ref, "reference", device)
            import scipy  # noqa: F401  whoever lacks it is told now, not when a fault is diagnosed
        port_model = backend_of_side(port, "paddle").wrap(port, "port", device)
        own = port_model.arrays() if weights == "own" else {}
        port_model.output_names = {_place(theirs): _place(name) for name, theirs in (outputs or {}).items()}
        first_outputs = []
        for train in sorted(mode == "train" for mode in modes):
            run = ref_model.run(inputs, "float32", train)
            check_reference(run, train)
            first_outputs = first_outputs or run.output
        if weights == "probe":
            from portproof.backends.probe import load_probe_weights

            load_probe_weights(ref_model, seed, inputs, runs_in_train="train" in modes)
        found = same_names(ref_model, port_model, inputs) if mirrored else None
        strict = found is not None
        found = found or propose(ref_model, port_model, inputs, names, [mode == "train" for mode in modes])
        if weights == "own":
            port_model.load(own)
        pair = cls(ref_model, port_model, found, inputs, output=output, strict=strict, outputs=first_outputs)
        pair._take_constants()
        return pair

    def _take_constants(self) -> None:
        """Give the port the reference's tables and other constants where it has the same up to float32's rounding.

        A table that both make in float32, with the functions of two libraries, differs by an ulp or so: far more than
        float64 arithmetic does, and no fault. One of n rows holds functions of arguments as large as n, which are
        rounded to n * U: so much, times C, is allowed, of its largest value, and never more than MOST of it: in a table
        of very many rows another formula could hide.
        """
        ref, taken = self.ref.constants(), []
        for key, array in self.port.constants().items():
            limit = min(C * U * max(array.shape, default=1), MOST) * largest(array)
            near = (name for name, other in ref.items() if other.size == array.size)
            for name in sorted(near, key=lambda name: name != key):
                value = ref[name].reshape(array.shape)
                difference = largest(value.astype(np.float64) - array)
                if difference <= limit:
                    if difference > 0:
                        self.port.set_constant(key, value)
                        taken.append(f"{key} (by {difference:.1e})")
                    break
        if taken:
            self.note(
                f"float32 constants of the port that are the reference's up to rounding, and taken from it: {taken}"
            )

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def draw_cotangent(self, seed: int) -> None:
        """Have the backward pass start from normal numbers."""
        outputs = self.outputs or self.ref.run(self.inputs, "float32", train=False).output
        self.cotangent = self.ref.cotangent or drawn_cotangent(outputs, seed)


def drawn_cotangent(outputs: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """Normal numbers for each output of the reference."""
    rng = np.random.default_rng([seed, 8])
    return [_normal(rng, output) for output in outputs]


def _normal(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Normal numbers of its shape, complex ones if it is."""
    drawn = rng.normal(size=like.shape)
    return drawn + 1j * rng.normal(size=like.shape) if like.dtype.kind == "c" else drawn


def same_weights(
    ref: Any,
    port: Any,
    inputs: Inputs,
    *,
    names: Mapping[str, str] | None = None,
    weights: str = "probe",
    seed: int = 0,
) -> tuple[Any, Any]:
    """Copies of both models with the same weights, for functions of the ladder that take models of equal weights.

    They are the "probe" weights of `seed`, or the "reference"'s own.

    Raises UserError as `portproof.align` does, and where the port has no counterpart of a tensor.
    """
    pair = Pair.prepared(ref, port, inputs, names=names, weights=weights, seed=seed)
    if pair.names.ambiguous:
        raise UserError(f"the map is ambiguous: {pair.names.ambiguous}")
    for name, reason in pair.names.problems.items():
        raise UserError(f"{name}: {reason}: rung 01 has to pass first")
    return pair.ref.loaded_copy(), pair.port.loaded_copy()


@dataclass(frozen=True)
class ModeRuns:
    """The runs of one mode, by precision; of the reference's gradients in float32 only their `errors` are kept."""

    ref: dict[str, Run]
    port: dict[str, Run]
    errors: dict[Item, float]  # the `distances` of the reference's float32 run


def run_mode(pair: Pair, train: bool) -> ModeRuns:
    """Both sides in both precisions; the port's backward pass in float64 alone, where it is judged as a whole.

    Of the reference's in float32 the calls are kept where gradients are judged, for `isolated_gradients`.
    """
    calls = {"float64": False, "float32": pair.cotangent is not None and "float32" in pair.precisions}
    ref = {d: pair.ref.run(pair.inputs, d, train, pair.cotangent, calls[d]) for d in UNIT_ROUNDOFF}
    check_reference(ref["float64"], train)
    errors = distances(*(items(pair, ref[dtype], False) for dtype in ("float64", "float32")))
    ref["float32"] = replace(ref["float32"], gradients={}, input_gradients=[])
    cotangents = {d: pair.cotangent if d == "float64" else None for d in UNIT_ROUNDOFF if d in pair.precisions}
    port = {d: pair.port.run(pair.inputs, d, train, given) for d, given in cotangents.items()}
    if "float64" in port and port["float64"].trace.lacking:
        lacking = f"the port's framework has no kernel in float64 for {port.pop('float64').trace.lacking}"
        if not port:
            raise UserError(f"{lacking}: judge the port in float32")
        pair.note(f"{lacking}: {MODES[train]} mode was not run in float64, {_FLOAT32_ALONE}")
    return ModeRuns(ref, port, errors)


_FLOAT32_ALONE = (
    "float32's limits alone judge it: less than these, and gradients in code between layers, are not proved"
)


def unfit(pair: Pair, train: bool) -> Verdict | None:
    """Why a mode cannot be compared: outputs of other keys, or a side that gives another result each time; else None.

    What is random in train mode is switched off where its mode does that, and named. It has to be asked before the mode
    is run.
    """
    mode = f"{MODES[train]} mode"
    if pair.strict:
        return None
    (ref_run, _), (port_run, _) = found = [switch_off_random(m, pair.inputs, train) for m in (pair.ref, pair.port)]
    if unclear := unclear_outputs(ref_run.places, port_run.places):
        return Verdict(mode, refusal=unclear)
    for model, (_, name) in zip_strict((pair.ref, pair.port), found):
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
    return None


def compare_mode(pair: Pair, train: bool, runs: ModeRuns | None = None) -> Iterator[Verdict]:
    """float64: everything. float32: the forward pass, and with a cotangent each layer's gradients in isolated runs.

    Where a module's values differ, but nothing that leaves the model does, the two are equal, and built differently:
    that is noted, unless the pair is `strict`.
    """
    runs = runs or run_mode(pair, train)
    calls, in_float64 = runs.ref["float32"].trace.calls, "float64" in runs.port
    equal = yield from _compare_whole(pair, train, runs)
    del runs  # what was compared is let go
    if equal is not None and pair.cotangent is not None and "float32" in pair.precisions:
        yield isolated_gradients(pair, train, calls, equal and not pair.strict and in_float64)


def _compare_whole(pair: Pair, train: bool, runs: ModeRuns) -> Generator[Verdict, None, bool | None]:
    """`compare_mode` without isolated runs -> whether the models are equal; None where the reference is not finite."""
    mode = MODES[train]
    fp64_ref, fp32_ref = (items(pair, runs.ref[dtype], False) for dtype in UNIT_ROUNDOFF)
    whole = Item(pair.output, "output")
    not_finite = [i for i, a in fp64_ref.items() if a.dtype.kind in "fc" and not np.isfinite(a).all()]
    for item in not_finite:
        if pair.strict or not _stays_inside(item):
            yield Verdict(f"{mode} mode", refusal=f"the reference itself gives NaN or infinity at {item}")
            return None
        pair.note(f"not compared, since it is not finite, a mask perhaps: {item}")
    fp64_ref, fp32_ref = (_without(side, not_finite) for side in (fp64_ref, fp32_ref))
    _note_runs(pair, runs)
    input_scales = runs.ref["float64"].trace.input_scales
    equal = True

    def moved() -> list[dict[Item, float]]:
        run = partial(pair.ref.run, pair.inputs, "float64", train, pair.cotangent)
        found = pair.ref.moved_runs(MOVED, lambda: distances(fp64_ref, items(pair, run(), False)))
        if found:
            pair.note(
                f"float32 loses values of the reference in {mode} mode: limits in float64 come from {len(found)} "
                "of its runs in float64 with inputs and weights an ulp off"
            )
        return found

    for dtype, port_run in runs.port.items():
        port = without_spare(_without(items(pair, port_run, True), not_finite), fp64_ref, pair.port)
        sides = fp64_ref, fp32_ref, runs.errors, port
        verdict = _compare_precision(whole, mode, dtype, *sides, input_scales, moved)
        data = {name for run in (runs.ref[dtype], port_run) for name in run.trace.float32_data}
        if verdict.status == FAIL and data and not pair.strict:
            rounded = _compare_precision(whole, mode, dtype, *sides, input_scales, moved, "float32")
            if rounded.status != FAIL:
                where = ", ".join(sorted(name or "the model itself" for name in data))
                pair.note(f"float32 data come in at {where}: the float64 run is judged with float32's limits")
                verdict = rounded
        if port_run.trace.error:
            item = Item("the port runs", mode=mode, dtype=dtype)
            row = Row(item, FAIL, reason=f"it raised {port_run.trace.error}{_OWN_RUN if dtype == 'float64' else ''}")
            verdict = replace(verdict, rows=[*verdict.rows, row])
        failed = [row for row in verdict.rows if row.status == FAIL]
        equal &= all(_stays_inside(row.item) for row in failed)
        if failed and equal and not pair.strict:
            for row in failed:
                pair.built_differently.setdefault(row.item.module, OTHER_VALUES)
            verdict = without(verdict, [row.item for row in failed])
        yield verdict
    return equal


_OWN_RUN = " (this run in float64 is the check's own: a port that works in float32 alone is judged in that alone)"


def _stays_inside(item: Item) -> bool:
    """Whether it is what a module inside the model gives, in the forward pass."""
    return item.kind == "output" and bool(item.module)


def _without(found: Items, left_out: Collection[Item]) -> dict[Item, np.ndarray]:
    return {item: array for item, array in found.items() if item not in left_out}


def without(verdict: Verdict, left_out: Iterable[Item]) -> Verdict:
    """`verdict` without these items."""
    items = set(left_out)
    return replace(verdict, rows=[row for row in verdict.rows if row.item not in items])


def without_faultless(pair: Pair, verdict: Verdict, built_differently: Mapping[str, str]) -> Verdict:
    """`verdict` without the outputs of module calls that a search for faults found to be `built_differently`."""
    items = [row.item for row in verdict.rows if row.status == FAIL and row.item.kind == "output" and row.item.module]
    items = [item for item in items if item.name.partition("[")[0] in built_differently]
    for item in items:
        pair.built_differently[item.module] = built_differently[item.name.partition("[")[0]]
    return without(verdict, items)


def _note_runs(pair: Pair, runs: ModeRuns) -> None:
    """Note what is particular about the float64 runs: float32 in their code, and what could not be recorded."""
    for model, of_model in ((pair.ref, runs.ref), (pair.port, runs.port)):
        run = of_model.get("float64")
        if run is None:  # the port is judged in float32 alone
            continue
        modules = sorted(name or "the model itself" for name in run.trace.float32)
        if modules:
            pair.note(
                f"the {model.role} asks for float32, and gets float64 in the float64 run: in {', '.join(modules)}"
            )
        for name, reason in run.trace.unrecorded.items():
            pair.note(f"not recorded of the {model.role}: {name or 'the model itself'}: {reason}")


def _compare_precision(
    whole: Item,
    mode: str,
    dtype: str,
    fp64_ref: Items,
    fp32_ref: Items,
    errors: Mapping[Item, float],
    port: Items,
    input_scales: Mapping[str, float],
    moved: Callable[[], Sequence[Mapping[Item, float]]],
    rounding: str = "",
) -> Verdict:
    """One precision of a mode; any item but the `whole` model's output may be zero throughout.

    Limits are those of that precision, or of `rounding`; `moved` gives runs for `with_moved`, where these decide.
    """
    rounding = rounding or dtype
    ref = fp64_ref
    if dtype == "float32":
        ref, port = _forward(fp32_ref), _forward(port)
    limits = semantic_limits if rounding == "float64" else kernel_limits
    atol = limits({item: fp64_ref[item] for item in ref}, errors)
    floor = noise_floor(ref, UNIT_ROUNDOFF[rounding], input_scales)
    atol, expected_zero = with_noise_floor(atol, floor, fp64_ref)
    expected_zero |= {item for item in atol if not largest(fp64_ref[item]) and item != whole}
    facts = {"mode": mode, "dtype": dtype}

    def judged(atol: Mapping[Item, float]) -> Verdict:
        placed_zero = placed(dict.fromkeys(expected_zero), **facts)
        sides = (placed(values, **facts) for values in (ref, port, atol))
        return compare(*sides, title=f"{mode} mode, {dtype}", expected_zero=placed_zero)

    verdict = judged(atol)
    if verdict.status == FAIL and rounding == "float64" and lost_in_float32(fp64_ref, errors, expected_zero):
        verdict = judged(with_moved(atol, moved()))
    return verdict


def isolated_gradients(pair: Pair, train: bool, calls: Calls, is_equal: bool = False) -> Verdict:
    """float32 gradients, layer by layer, each on the reference's own inputs and upstream gradients, those of `calls`.

    Through a whole network they cannot be judged: one activation on the other side of a kink by rounding moves them by
    a percent, on either framework. In an isolated run a layer receives the same on both sides, off its kinks (see
    activations.py). Where the whole `is_equal` in float64, a layer that differs there too is built differently.
    """
    mode = MODES[train]
    runs = IsolatedRuns(pair.ref, pair.port, pair.names, pair.inputs, train, calls)
    rows = []
    for label, found in isolated_layers(runs, "float32"):
        differs = found.failed(gradients=True)
        if not found.attempt.complete:
            pair.built_differently.setdefault(calls[label].name, found.attempt.how)
        elif differs and is_equal and not runs.run(label, "float64", True, adjusted=False).passed:
            pair.built_differently.setdefault(calls[label].name, OTHER_VALUES)
        else:
            there = {"mode": mode, "dtype": "float32", "section": label}
            gradients = (row for row in found.rows if row.item.kind == "gradient")
            rows += [replace(row, item=replace(row.item, **there)) for row in gradients]
    return Verdict(f"{mode} mode, float32, isolated layers", rows)


def structure(names: NameMap) -> Verdict:
    """Every tensor of the reference, whether it has its counterpart, of its shape."""
    rows = [Row(Item(name, "structure"), FAIL, reason=reason) for name, reason in names.problems.items()]
    fine = {tensor_item(ref, "structure"): np.array(port) for ref, port in names.tensors.items()}
    return Verdict("parameters and buffers", rows + compare(fine, fine, exact_atol(fine)).rows)


def equal_weights(pair: Pair) -> Verdict:
    """The port's weights against the reference's, bit for bit."""
    ref_arrays, port_arrays = pair.ref.arrays(), pair.port.arrays()
    ref = {tensor_item(key, "weights"): ref_arrays[key] for key in pair.names.tensors}
    port = {tensor_item(key, "weights"): port_arrays[port_key] for key, port_key in pair.names.tensors.items()}
    return compare(ref, port, exact_atol(ref), title="weights as they were given")


def all_notes(pair: Pair) -> list[str]:
    """What the map rests on, and what else a reader should know beside the rows."""
    notes = [map_note(pair), *pair.names.notes, *pair.notes, *pair.port.notes()]
    groups: dict[str, list[str]] = {}
    for name, how in pair.built_differently.items():
        groups.setdefault(how, []).append(f"{name} ({pair.ref.modules[name].type})")
    for how, modules in groups.items():
        more = f" and {len(modules) - 5} more" * (len(modules) > 5)
        notes.append(f"built differently, no fault: {how}: {', '.join(modules[:5])}{more}")
    return notes


def map_note(pair: Pair) -> str:
    """How much the map covers, and what it rests on."""
    return f"map: {len(pair.names.tensors)} tensors, {len(pair.names.calls)} outputs, {pair.names.how}"


def locate_failure(pair: Pair, verdicts: Sequence[Verdict]) -> Location | None:
    """Where the port departs, in the modes and the precision of the items that failed in `verdicts`; None: nowhere."""
    failed = [row.item for verdict in verdicts for row in verdict.rows if row.status == FAIL]
    modes = [mode == "train" for mode in MODES if mode in {item.mode for item in failed}] or [False, True]
    dtype = precision_of(verdicts)
    sides = pair.ref, pair.port, pair.names, pair.inputs
    return locate(*sides, modes=modes, cotangent=pair.cotangent, dtype=dtype)


def precision_of(verdicts: Iterable[Verdict]) -> str:
    """The precision to look for a fault in: float64, unless only items of float32 failed."""
    failed = {row.item.dtype for verdict in verdicts for row in verdict.rows if row.status == FAIL}
    return "float32" if failed == {"float32"} else "float64"


def items(pair: Pair, run: Run, is_port: bool) -> dict[Item, np.ndarray]:
    """What one side computed, by the reference's names: forward, then gradients from the output back, then buffers."""
    names = pair.names
    if is_port:
        keys, labels = {port_key: key for key, port_key in names.tensors.items()}, names.calls
    else:
        keys, labels = {key: key for key in names.tensors}, {label: label for label in names.calls}
    outputs = renamed(run.trace.outputs, labels)
    gradients = {keys[k]: array for k, array in run.gradients.items() if k in keys}
    order = [key for key in reversed(list(names.tensors)) if key in gradients]
    return {
        **{_output_item(label, pair.output): array for label, array in outputs.items()},
        **{tensor_item(key, "gradient"): gradients[key] for key in order},
        **{Item(f"input {i}", "gradient"): array for i, array in enumerate(run.input_gradients) if array is not None},
        **{tensor_item(keys[k], "buffer"): array for k, array in run.buffers.items() if k in keys},
    }


def _output_item(label: str, output: str) -> Item:
    module = module_of(label)
    return Item(output + label.removeprefix(OUTPUT), "output") if module == OUTPUT else Item(label, "output", module)


def renamed(outputs: Mapping[str, np.ndarray], calls: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The port's outputs under the reference's names; those without a counterpart are left out."""
    ref_labels, found = {port_label: label for label, port_label in calls.items()}, {}
    for name, array in outputs.items():
        label, bracket, rest = name.partition("[")
        if label in ref_labels:
            found[ref_labels[label] + bracket + rest] = array
    return found


def _forward(found: Mapping[Item, np.ndarray]) -> dict[Item, np.ndarray]:
    return {item: array for item, array in found.items() if item.kind in ("output", "buffer")}


def _place(key: str) -> str:
    """Where a model's output is in what it returns, by its key, attribute or number; "" where it is all of it."""
    return f"[{key}]" if key else ""


def unclear_outputs(ref: Sequence[str], port: Sequence[str]) -> str:
    """Why it cannot be told, from their places, which output of the port is the reference's; "" where it can."""
    if set(ref) & set(port) or not ref or not port or "" in ref + port:
        return ""
    both = (", ".join(place.strip("[]") for place in places) for places in (ref, port))
    return "the reference returns {} and the port {}: say which is which with outputs (--match REF=PORT)".format(*both)


def check_reference(run: Run, train: bool) -> None:
    """Raise UserError unless the reference's run gave something to compare."""
    if run.trace.error:
        what = f"the reference cannot run on these inputs in {MODES[train]} mode: it raised {run.trace.error}"
        raise UserError(f"{what}: check their shapes" + "; batch norm needs 2 samples at least" * train)
    if not run.output:
        raise UserError("the reference returns no tensor: wrap it in a module that does")
