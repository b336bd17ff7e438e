"""The forward pass of every module, in both modes and both precisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.backends.model import BackendModel
from portproof.backends.trace import OUTPUT, Inputs, as_call, is_array, map_tensors
from portproof.compare import Item
from portproof.compare.activations import dead_branches
from portproof.compare.ruler import Ruler, U
from portproof.ladder.pairs.as_built import compare_as_built
from portproof.ladder.pairs.pair import MODES, Options, Pair, PairOptions
from portproof.ladder.pairs.whole import all_notes, compare_mode, equal_weights, items, passes, structure
from portproof.ladder.rung import QUIET, Ended, Rung, of_kinds, on_rung, say_location

if TYPE_CHECKING:
    from typing_extensions import Unpack  # not in Python 3.9

DROPOUT_SHAPE = (256, 256)


@on_rung
def forward(
    ref: Any,
    port: Any,
    inputs: Inputs,
    *,
    modes: Sequence[str] = MODES,
    all_branches: bool = False,
    rung: Rung = QUIET,
    **options: Unpack[PairOptions],
) -> None:
    """Compare every module's output on `inputs` in two models, and batch norm's statistics afterwards.

    In eval and train mode; float64 judges formulas, float32 kernels. Then the first sample alone in eval mode, where an
    axis of length 1 must not vanish, and every dropout layer on ones. A module at fault is located. For the `options`
    names, weights, seed, device, mirrored, output and drawn see `portproof.align` and `Options`. With `all_branches` it
    is refused if no input reaches a branch of an activation, where a fault could hide.
    """
    chosen = Options(modes=modes, backward=False, **options)
    dead: dict[str, set[str]] = {mode: set() for mode in modes}  # branches that no input reached
    with _prepared(rung, ref, port, inputs, chosen) as pair:
        for mode in modes:
            for compared in compare_mode(pair, mode == "train"):
                ref_run, port_run = compared.ref, compared.port
                if ref_run is not None and compared.dtype == "float64":
                    rung.check_signal(ref_run.trace.outputs)
                    dead[mode] = dead_branches(ref_run.trace.activation_inputs, rung.types)
                rung.check(compared.verdict)
                if ref_run is not None and port_run is not None:
                    prefix = "" if (mode, compared.dtype) == ("eval", "float32") else f"{mode}/{compared.dtype}/"
                    blocks = [_blocks(run.trace.outputs, pair.output) for run in (ref_run, port_run)]
                    rung.keep(blocks[0], blocks[1], prefix)
        built = compare_as_built(pair, chosen.factories, chosen.weights)
    if built is not None:
        rung.check(built)
    arrays = as_call(pair.inputs).inputs
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    if "eval" in modes and len(lengths) == 1 and max(lengths) > 1:
        one = replace(pair, inputs=map_tensors(pair.inputs, is_array, lambda array: array[:1]))
        first = len(rung.verdicts)
        _check_one_sample(rung, one)
        say_location(rung, one, first)
    for name, module in pair.ref.modules.items():
        is_dropout = module.kind == "Dropout" or module.type == "Dropout"
        if is_dropout and name in pair.port.modules:
            _check_dropout(rung, pair, name)
    given = {f"input {i}" if i else "input": array for i, array in enumerate(arrays)}
    rung.keep(given, given)
    never = sorted(set.intersection(*dead.values()))
    rung.say(f"branches of activations that no input reached in any mode: {len(never)}")
    for branch in never:
        rung.say(f"  not proved: {branch}")
    if never and all_branches:
        rung.refuse(f"{len(never)} branches are never taken, so they may be wrong: choose another --seed")


@on_rung
def gradients(
    ref: Any,
    port: Any,
    inputs: Inputs,
    *,
    modes: Sequence[str] = MODES,
    rung: Rung = QUIET,
    **options: Unpack[PairOptions],
) -> None:
    """Compare every gradient of two models, of parameters and inputs, sent back from all outputs at once.

    float64: through the whole model, with its forward pass. float32: layer by layer, on the reference's inputs. What is
    sent back is N(0, 1). A module at fault is located. For the `options` names, weights, seed, device and mirrored see
    `portproof.align` and `Options`. Refused if no parameter of the reference has a gradient.
    """
    with _prepared(rung, ref, port, inputs, Options(modes=modes, **options)) as pair:
        for mode in modes:
            for compared in compare_mode(pair, mode == "train"):
                rung.check(compared.verdict)
                if compared.dtype == "float64":
                    assert compared.ref is not None and compared.port is not None
                    of_ref = of_kinds(items(pair, compared.ref, False), "gradient")
                    of_port = of_kinds(items(pair, compared.port, True), "gradient")
                    if not any(array.any() for array in of_ref.values()):
                        rung.refuse(f"{mode} mode: the reference has no gradients, so nothing is proved")
                    rung.keep(of_ref, of_port, prefix=f"{mode}/")


@contextmanager
def _prepared(rung: Rung, ref: Any, port: Any, inputs: Inputs, options: Options) -> Iterator[Pair]:
    """The pair, if its structure fits; at the end say its notes, and where the port departs."""
    pair = Pair.prepared(ref, port, inputs, options)
    first = len(rung.verdicts)
    rung.types = rung.types or {name: module.type for name, module in pair.ref.modules.items()}
    if pair.name_map.ambiguous:
        rung.refuse(pair.name_map.ambiguous)
        raise Ended
    fits = rung.check(structure(pair))
    if options.weights == "own":
        rung.check(equal_weights(pair))
    if not fits:  # only the module at fault can be told
        say_location(rung, pair, first)
        raise Ended
    yield pair
    for note in [*all_notes(pair)[pair.strict :], passes(pair)]:
        rung.say(note)
    say_location(rung, pair, first)


def _blocks(outputs: Mapping[str, np.ndarray], output: str) -> dict[str, np.ndarray]:
    own = {output + label.removeprefix(OUTPUT): a for label, a in outputs.items() if label.partition("[")[0] == OUTPUT}
    return {label: array for label, array in outputs.items() if label.count(".") == 1} | own


def _check_one_sample(rung: Rung, pair: Pair) -> None:
    item = Item(pair.output, "output")

    def ref(dtype: str, perturbation: int = 0) -> dict[Item, np.ndarray]:
        return {item: pair.ask(pair.ref, dtype, False, perturbation).output[0]}

    found = pair.ask(pair.port, "float64", False).output
    ruler = Ruler.measured(ref("float64"), "float64", ref, must_be_judged=[item])
    port = {item: found[0]} if found else {}
    rung.check(ruler.compare(port, title="eval mode, float64, one sample", mode="eval", dtype="float64"))


def _dropout_facts(model: BackendModel, name: str) -> dict[Item, np.ndarray]:
    kept, dropped, again = model.run_dropout(name, np.ones(DROPOUT_SHAPE, np.float32))
    facts = {
        "eval": kept,
        "train values": np.unique(dropped),
        "train share": np.array((dropped != 0).mean()),
        "another mask each time": np.array(bool((dropped != again).any())),
        **{f"train share of axis {axis}": (dropped != 0).mean(axis=axis) for axis in (0, 1)},
    }
    return {Item(what, "dropout", name, section=name): value for what, value in facts.items()}


def _check_dropout(rung: Rung, pair: Pair, name: str) -> None:
    """Compare the masks' distribution: the masks are each framework's own."""
    assert isinstance(pair.ref, BackendModel)  # a recording has no runs of dropout
    p = pair.ref.dropout_probability(name)
    if not p > 0:
        return
    counts = {"train share": int(np.prod(DROPOUT_SHAPE))}
    counts |= {f"train share of axis {axis}": DROPOUT_SHAPE[axis] for axis in (0, 1)}
    atol = {"eval": 0.0, "another mask each time": 0.0, "train values": 4 * U}
    # 6 deviations of the difference of two binomial shares.
    atol |= {what: 6 * np.sqrt(2 * p * (1 - p) / count) for what, count in counts.items()}
    ref, port = _dropout_facts(pair.ref, name), _dropout_facts(pair.port, name)
    rung.compare(ref, port, {item: atol[item.name] for item in ref}, title="dropout on ones")
