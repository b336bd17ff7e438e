"""The forward pass of every module, in both modes and both precisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portproof.backends.model import BackendModel
from portproof.backends.trace import OUTPUT, Inputs, as_call, is_array, map_tensors
from portproof.compare import Item
from portproof.compare.activations import dead_branches
from portproof.compare.ruler import Ruler, U
from portproof.ladder.pairs.modes import (
    Compared,
    all_notes,
    compare_mode,
    equal_weights,
    items,
    passes,
    structure,
    why_not_comparable,
)
from portproof.ladder.pairs.of_rung import say_location
from portproof.ladder.pairs.pair import MODES, Pair
from portproof.ladder.rung import Rung, on_rung

DROPOUT_SHAPE = (256, 256)


@on_rung
def forward(
    ref: Any,
    port: Any,
    inputs: Inputs,
    *,
    names: Mapping[str, str] | None = None,
    weights: str = "probe",
    modes: Sequence[str] = MODES,
    seed: int = 0,
    device: str = "cpu",
    mirrored: bool = False,
    output: str = OUTPUT,
    all_branches: bool = False,
    rung: Rung,
) -> None:
    """Compare what every module of two models gives on `inputs`, and batch norm's statistics behind it.

    In eval and train mode; in float64, where formulas are judged, and in float32, where kernels are. Then the first
    sample alone in eval mode, where an axis of length 1 must not vanish, and every dropout layer on ones. If anything
    differs the module at fault is located. Arguments: see `portproof.align` and `Pair.prepared`. With `all_branches` it
    is refused if an activation has a branch that no input reaches, where a fault could hide.
    """
    how_found = {"names": names, "weights": weights, "seed": seed, "device": device, "mirrored": mirrored}
    pair = Pair.prepared(ref, port, inputs, **how_found, modes=modes, backward=False, output=output)
    first = len(rung.verdicts)
    if not _can_compare(rung, pair, weights):
        return
    dead = [_check_mode(rung, pair, mode == "train") for mode in modes]
    _say_notes(rung, pair)
    say_location(rung, pair, first)
    arrays = as_call(pair.inputs).inputs
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    if "eval" in modes and len(lengths) == 1 and max(lengths) > 1:
        one = replace(pair, inputs=map_tensors(pair.inputs, is_array, lambda array: array[:1]))
        first = len(rung.verdicts)
        _check_one_sample(rung, one)
        say_location(rung, one, first)
    for name in _dropouts(pair):
        _check_dropout(rung, pair, name)
    rung.keep(*[{f"input {i}" if i else "input": array for i, array in enumerate(arrays)}] * 2)
    _say_dead_branches(rung, set.intersection(*dead), all_branches)


@on_rung
def gradients(
    ref: Any,
    port: Any,
    inputs: Inputs,
    *,
    names: Mapping[str, str] | None = None,
    weights: str = "probe",
    modes: Sequence[str] = MODES,
    seed: int = 0,
    device: str = "cpu",
    mirrored: bool = False,
    rung: Rung,
) -> None:
    """Compare every gradient of two models, of the parameters and of the inputs, sent back from all outputs at once.

    float64 through the whole model, with the forward pass that it stands on; float32 layer by layer, each on what the
    reference's layer received. What is sent back is drawn from N(0, 1). If anything differs the module at fault is
    located. Arguments: see `portproof.align` and `Pair.prepared`. Refused if no parameter of the reference has a
    gradient.
    """
    how_found = {"names": names, "weights": weights, "seed": seed, "device": device, "mirrored": mirrored}
    pair = Pair.prepared(ref, port, inputs, **how_found, modes=modes)
    first = len(rung.verdicts)
    if not _can_compare(rung, pair, weights):
        return
    for mode in modes:
        reason = why_not_comparable(pair, mode == "train")
        if reason is not None:
            rung.check(reason)
            continue
        for compared in compare_mode(pair, mode == "train"):
            rung.check(compared.verdict)
            if compared.dtype == "float64" and compared.ref is not None:
                _keep_gradients(rung, pair, mode, compared)
    _say_notes(rung, pair)
    say_location(rung, pair, first)


def _keep_gradients(rung: Rung, pair: Pair, mode: str, compared: Compared) -> None:
    """Put both sides' gradients of a mode into the result files; refuse a reference that has none."""
    sides = (compared.ref, False), (compared.port, True)
    both = [{i: array for i, array in items(pair, *side).items() if i.kind == "gradient"} for side in sides]
    if not any(array.any() for array in both[0].values()):
        rung.refuse(f"{mode} mode: the reference has no gradients, so nothing is proved")
    rung.keep(*both, prefix=f"{mode}/")


def _say_notes(rung: Rung, pair: Pair) -> None:
    """What a reader should know beside the rows; how the map was found, unless all names agree."""
    for note in all_notes(pair)[pair.strict :]:
        rung.say(note)
    rung.say(passes(pair))


def _can_compare(rung: Rung, pair: Pair, weights: str) -> bool:
    """Whether the pair's map covers every tensor, which is checked; else only the module at fault can be told."""
    first = len(rung.verdicts)
    rung.types = rung.types or {name: module.type for name, module in pair.ref.modules.items()}
    if pair.name_map.ambiguous:
        rung.refuse(pair.name_map.ambiguous)
        return False
    fits = rung.check(structure(pair.name_map))
    if weights == "own":
        rung.check(equal_weights(pair))
    if not fits:
        say_location(rung, pair, first)
    return fits


def _check_mode(rung: Rung, pair: Pair, train: bool) -> set[str]:
    """Every module in one mode -> the branches of its activations that no input reached."""
    reason = why_not_comparable(pair, train)
    if reason is not None:
        rung.check(reason)
        return set()
    dead: set[str] = set()
    for compared in compare_mode(pair, train):
        mode, dtype = MODES[train], compared.dtype
        if dtype == "float64" and compared.ref is not None:
            rung.check_signal(compared.ref.trace.outputs)
            dead = dead_branches(compared.ref.trace.activation_inputs, rung.types)
        rung.check(compared.verdict)
        if compared.ref is not None:
            prefix = "" if (mode, dtype) == ("eval", "float32") else f"{mode}/{dtype}/"
            rung.keep(*(_blocks(run.trace.outputs, pair.output) for run in (compared.ref, compared.port)), prefix)
    return dead


def _blocks(outputs: Mapping[str, np.ndarray], output: str) -> dict[str, np.ndarray]:
    """The outputs that the guide's files hold: the model's own, and those of its blocks."""
    own = {output + label.removeprefix(OUTPUT): a for label, a in outputs.items() if label.partition("[")[0] == OUTPUT}
    return {label: array for label, array in outputs.items() if label.count(".") == 1} | own


def _check_one_sample(rung: Rung, pair: Pair) -> None:
    item = Item(pair.output, "output")

    def ref(dtype: str, perturbation: int = 0) -> dict[Item, np.ndarray]:
        question = replace(pair.question(pair.ref, dtype, False), perturbation=perturbation)
        return {item: pair.ref.ask(question).output[0]}

    found = pair.ask(pair.port, "float64", False).output
    ruler = Ruler.measured(ref("float64"), "float64", ref, must_be_judged=[item])
    port = {item: found[0]} if found else {}
    rung.check(ruler.compare(port, title="eval mode, float64, one sample", mode="eval", dtype="float64"))


def _dropouts(pair: Pair) -> Iterable[str]:
    """The reference's dropout layers that the port has under the same name, and that drop anything."""
    names = (name for name, module in pair.ref.modules.items() if module.kind == "Dropout" or module.type == "Dropout")
    return [name for name in names if name in pair.port.modules and pair.ref.dropout_probability(name) > 0]


def dropout_facts(model: BackendModel, name: str) -> dict[str, np.ndarray]:
    """What a dropout layer does to ones: nothing in eval mode; in train mode 0 or 1 / (1 - p), anew at each call."""
    kept, dropped, again = model.run_dropout(name, np.ones(DROPOUT_SHAPE, np.float32))
    return {
        "eval": kept,
        "train values": np.unique(dropped),
        "train share": np.array((dropped != 0).mean()),
        "another mask each time": np.array(bool((dropped != again).any())),
        **{f"train share of axis {axis}": (dropped != 0).mean(axis=axis) for axis in (0, 1)},
    }


def _check_dropout(rung: Rung, pair: Pair, name: str) -> None:
    """The masks are each framework's own, so what is compared is their distribution."""
    p = pair.ref.dropout_probability(name)

    def deviation(count: int) -> float:  # of the difference between two binomial shares
        return np.sqrt(2 * p * (1 - p) / count)

    atol = {"eval": 0.0, "another mask each time": 0.0, "train values": 4 * U}
    atol["train share"] = 6 * deviation(np.prod(DROPOUT_SHAPE))
    atol |= {f"train share of axis {axis}": 6 * deviation(DROPOUT_SHAPE[axis]) for axis in (0, 1)}
    named = (
        {Item(what, "dropout", name, section=name): value for what, value in side.items()}
        for side in (dropout_facts(pair.ref, name), dropout_facts(pair.port, name), atol)
    )
    rung.compare(*named, title="dropout on ones")


def _say_dead_branches(rung: Rung, dead: set[str], must_be_none: bool) -> None:
    rung.say(f"branches of activations that no input reached in any mode: {len(dead)}")
    for branch in sorted(dead):
        rung.say(f"  not proved: {branch}")
    if dead and must_be_none:
        rung.refuse(f"{len(dead)} branches are never taken, so they may be wrong: choose another --seed")
