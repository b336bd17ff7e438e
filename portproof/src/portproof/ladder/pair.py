"""Any reference against any port: their map, both precisions, both modes, forward and backward, and where they part."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.model import BackendModel, Run
from portproof.backends.probe import probe_weights
from portproof.backends.trace import output_item
from portproof.compare import FAIL, PASS, Item, Items, Row, Verdict, compare, joined, placed, tensor_item
from portproof.compare.tolerances import (
    UNITS,
    exact_limits,
    kernel_limits,
    largest,
    noise_floors,
    semantic_limits,
    with_floors,
)
from portproof.io.cli import UserError
from portproof.localize.locate import Bench, Location, layers_alone, locate
from portproof.mapping.names import NameMap, propose
from portproof.mapping.values import alike
from portproof.report.text import render_sections

WEIGHTS = ("probe", "reference", "own")
MODES = ("eval", "train")


class AlignVerdict(Verdict):
    """The verdict of `align`, which prints as its report."""

    def __str__(self) -> str:
        return render_sections(self)


@dataclass
class Pair:
    """Two models, the map between them, and what they are run on."""

    ref: BackendModel
    port: BackendModel
    names: NameMap
    inputs: Sequence[np.ndarray]
    cotangent: Sequence[np.ndarray]  # the gradient that is sent back, an array an output


def renamed(outputs: Mapping[str, np.ndarray], calls: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The port's outputs under the reference's names; those without a counterpart are left out."""
    back = {other: one for one, other in calls.items()}
    pairs = ((name.partition("["), array) for name, array in outputs.items())
    return {back[label] + bracket + rest: array for (label, bracket, rest), array in pairs if label in back}


def items(run: Run, names: NameMap, is_port: bool) -> dict[Item, np.ndarray]:
    """What one side computed, by the reference's names: forward, then gradients from the output back, then buffers."""
    keys = {other: one for one, other in names.tensors.items()} if is_port else {k: k for k in names.tensors}
    outputs = renamed(run.record.outputs, names.calls if is_port else {label: label for label in names.calls})
    gradients = {keys[k]: array for k, array in run.gradients.items() if k in keys}
    order = [key for key in reversed(list(names.tensors)) if key in gradients]
    return {
        **{output_item(name, "output"): array for name, array in outputs.items()},
        **{tensor_item(key, "gradient"): gradients[key] for key in order},
        **{Item(f"input {i}", "gradient"): array for i, array in enumerate(run.input_gradients) if array is not None},
        **{tensor_item(keys[k], "buffer"): array for k, array in run.buffers.items() if k in keys},
    }


def _forward(found: Items) -> dict[Item, np.ndarray]:
    return {item: array for item, array in found.items() if item.kind == "output"}


def compare_mode(pair: Pair, train: bool) -> Iterator[Verdict]:
    """float64: everything. float32: the forward pass; its gradients are judged module by module (see locate.py)."""
    mode = MODES[train]
    runs = {d: pair.ref.run(pair.inputs, d, train, pair.cotangent) for d in ("float64", "float32")}
    _check(runs["float64"], train)
    fp64_ref, fp32_ref = (items(runs[d], pair.names, False) for d in ("float64", "float32"))
    for item, array in fp64_ref.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            yield Verdict(f"{mode} mode", refusal=f"the reference itself gives NaN or infinity at {item}")
            return
    for dtype in ("float64", "float32"):
        run = pair.port.run(pair.inputs, dtype, train, pair.cotangent if dtype == "float64" else None)
        port = items(run, pair.names, True)
        # What is a parameter there and frozen here looks like a buffer; that it gets no gradient is the finding.
        port = {item: array for item, array in port.items() if item in fp64_ref or item.kind != "buffer"}
        reference, limits = fp64_ref, semantic_limits(fp64_ref, fp32_ref)
        if dtype == "float32":
            reference, port = _forward(fp32_ref), _forward(port)
            limits = kernel_limits(fp64_ref, reference)
        floors = noise_floors(reference, UNITS[dtype], runs["float64"].record.input_scales)
        limits, zeros = with_floors(limits, floors, fp64_ref)
        zeros |= {item for item in limits if not largest(fp64_ref[item]) and item != Item("output", "output")}
        title = f"{mode} mode, {dtype}"
        there = {"mode": mode, "dtype": dtype, "section": title}
        reference, port, limits, zeros = (
            placed(side, **there) for side in (reference, port, limits, dict.fromkeys(zeros))
        )
        yield _with_error(compare(reference, port, limits, title=title, zeros=zeros), there, run.record.error)
    yield backward_alone(pair, train)


def _with_error(verdict: Verdict, there: dict[str, str], error: str) -> Verdict:
    """The verdict, and that the port raised, if it did."""
    if not error:
        return verdict
    row = Row(Item("the port runs", **there), FAIL, reason=f"it raised {error}")
    return replace(verdict, rows=[*verdict.rows, row])


def _structure(names: NameMap) -> Verdict:
    """Every tensor of the reference, whether it has its counterpart, of its shape."""
    rows = [Row(Item(name, "structure"), FAIL, reason=reason) for name, reason in names.problems.items()]
    fine = {tensor_item(one, "structure"): np.array(other) for one, other in names.tensors.items()}
    return Verdict("parameters and buffers", rows + compare(fine, fine, exact_limits(fine)).rows)


def _own_weights(pair: Pair, port_arrays: Mapping[str, np.ndarray]) -> Verdict:
    """The port's own weights against the reference's, bit for bit."""
    arrays = pair.ref.arrays()
    ref = {tensor_item(one, "weights"): arrays[one] for one in pair.names.tensors}
    port = {tensor_item(one, "weights"): port_arrays[other] for one, other in pair.names.tensors.items()}
    return compare(ref, port, exact_limits(ref), title="weights as they were given")


def _check(run: Run, train: bool) -> None:
    if run.record.error:
        what = f"the reference cannot run on these inputs in {MODES[train]} mode: it raised {run.record.error}"
        raise UserError(f"{what}: check their shapes" + "; batch norm needs 2 samples at least" * train)
    if not run.output:
        raise UserError("the reference returns no tensor: wrap it in a module that does")


def prepare(
    ref: Any, port: Any, inputs, names, weights: str, seed: int, device: str
) -> tuple[Pair, dict[str, np.ndarray]]:
    """(the pair with equal weights, the port's own weights)."""
    inputs = [np.asarray(array) for array in inputs]
    inputs = [array.astype(np.float32) if array.dtype.kind == "f" else array for array in inputs]
    ref_model = backend("torch").wrap(ref, "reference", device)
    port_model = backend("paddle").wrap(port, "port", device)
    own = port_model.arrays()
    for train in (False, True) if weights == "probe" else (False,):  # probe weights are measured in train mode
        _check(ref_model.run(inputs, "float32", train), train)
    if weights == "probe":
        ref_model.load(probe_weights(ref_model.model, seed, inputs))
    outputs = ref_model.run(inputs, "float32", train=False).output
    rng = np.random.default_rng([seed, 8])
    cotangent = [rng.normal(size=output.shape) for output in outputs]
    return Pair(ref_model, port_model, propose(ref_model, port_model, inputs, names), inputs, cotangent), own


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
    if weights not in WEIGHTS or not modes or not set(modes) <= set(MODES):
        raise UserError(f"weights {weights!r}, modes {modes!r}: weights are one of {WEIGHTS}, modes some of {MODES}")
    pair, own = prepare(ref, port, inputs, names, weights, seed, device)
    structure = _structure(pair.names)
    notes = [_map_note(pair.names)]
    if pair.names.ambiguous:
        return AlignVerdict("align", structure.rows, refusal=pair.names.ambiguous, notes=notes)
    verdicts = [structure]
    if weights == "own":
        verdicts.append(_own_weights(pair, own))
        pair.port.load(own)
    failed, location = [], None
    for mode in modes if structure.status == PASS else ():
        found = list(compare_mode(pair, mode == "train"))
        found = _if_not_random(pair, mode == "train", found)
        verdicts += found
        failed += [mode == "train"] * any(verdict.status == FAIL for verdict in found)
    if any(verdict.status == FAIL for verdict in verdicts):
        location = locate(*_sides(pair), modes=failed, cotangent=pair.cotangent, dtype=precision_of(verdicts))
    every = joined("align", verdicts)
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
    pair, own = prepare(ref, port, inputs, names, weights, seed, device)
    if pair.names.ambiguous:
        raise UserError(f"the map is ambiguous: {pair.names.ambiguous}")
    if weights == "own":
        pair.port.load(own)
    location = locate(*_sides(pair), cotangent=pair.cotangent)
    location = location or locate(*_sides(pair), cotangent=pair.cotangent, dtype="float32")
    return location, _map_note(pair.names)


def _if_not_random(pair: Pair, train: bool, found: list[Verdict]) -> list[Verdict]:
    """`found`, unless it failed and a side gives another result each time: then that is what there is to say."""
    if all(verdict.status != FAIL for verdict in found):
        return found
    for what, side in (("reference", pair.ref), ("port", pair.port)):
        runs = [side.run(pair.inputs, "float32", train).output for _ in range(2)]
        if not alike(*([np.nan_to_num(array, posinf=0.0, neginf=0.0) for array in run] for run in runs)):
            mode = f"{MODES[train]} mode"
            reason = f"the {what} gives another result each time it runs"
            if what == "port" and not train:  # where the reference is not random the port has no reason to be
                row = Row(
                    Item("the same each time", section=mode, mode="eval"), FAIL, reason=f"{reason}: is dropout on?"
                )
                return [Verdict(mode, [row])]
            return [Verdict(mode, refusal=f"{reason} in {mode}, dropout layers aside: judge the other mode")]
    return found


def _map_note(names: NameMap) -> str:
    return f"map: {len(names.tensors)} tensors, {len(names.calls)} outputs, {names.how}"


def _sides(pair: Pair) -> tuple:
    return pair.ref, pair.port, pair.names, pair.inputs


def precision_of(verdicts: Iterable[Verdict]) -> str:
    """The precision to look for a fault in: float64, unless only items of float32 failed."""
    failed = {row.item.dtype for verdict in verdicts for row in verdict.rows if row.status == FAIL}
    return "float32" if failed == {"float32"} else "float64"


def backward_alone(pair: Pair, train: bool) -> Verdict:
    """float32 gradients, layer by layer, each on the reference's own inputs and upstream gradients.

    Through a whole network they cannot be judged: one activation on the other side of a kink by rounding moves them by
    a percent, on either framework. A layer alone receives the same on both sides, off its kinks (gates.off_kinks).
    """
    mode = MODES[train]
    title = f"{mode} mode, float32, layers alone"
    calls = pair.ref.run(pair.inputs, "float32", train, pair.cotangent, calls=True).record.calls
    bench = Bench(pair.ref, pair.port, pair.names, train)
    rows = []
    for label, found in layers_alone(bench, calls, "float32"):
        there = {"mode": mode, "dtype": "float32", "section": f"{title}/{label}"}
        rows += [replace(row, item=replace(row.item, **there)) for row in found]
    return Verdict(title, rows)
