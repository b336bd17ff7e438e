"""The forward pass of every module, in both modes and both precisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.backends.model import BackendModel
from portproof.backends.question import Run
from portproof.backends.trace import OUTPUT, Inputs, as_call, is_array, map_tensors
from portproof.compare import Item, leaves_the_model
from portproof.compare.ruler import Ruler, U
from portproof.ladder.pairs.as_built import compare_as_built
from portproof.ladder.pairs.pair import MODES, Options, Pair, PairOptions
from portproof.ladder.pairs.whole import all_notes, compare_mode, equal_weights, items, passes, structure, with_error
from portproof.ladder.rung import QUIET, Ended, Rung, of_kinds, on_rung, say_location

if TYPE_CHECKING:
    from typing_extensions import Unpack  # not in Python 3.9

DROPOUT_SHAPE = (256, 256)
NOT_ALONE = "one sample alone not compared"


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

    In eval and train mode; float64 judges formulas, float32 kernels. Then the outputs for the first sample alone in
    eval mode, where an axis of length 1 must not vanish (the last line says if the reference cannot run it), and every
    dropout layer on ones. A module at fault is located. For the `options` names, weights, seed, device, mirrored,
    output and drawn see `portproof.align` and `Options`. With `all_branches` it is refused if no input enters a branch
    of the reference, where a fault could hide.
    """
    chosen = Options(modes=modes, backward=False, **options)
    with _prepared(rung, ref, port, inputs, chosen) as pair:
        for mode in modes:
            for compared in compare_mode(pair, mode == "train"):
                ref_run, port_run = compared.ref, compared.port
                if ref_run is not None and compared.dtype == "float64":
                    rung.check_signal(ref_run.trace.outputs)
                rung.check(compared.verdict)
                if ref_run is not None and port_run is not None:
                    prefix = "" if (mode, compared.dtype) == ("eval", "float32") else f"{mode}/{compared.dtype}/"
                    blocks = [_blocks(run.trace.outputs, pair.output) for run in (ref_run, port_run)]
                    rung.keep(blocks[0], blocks[1], prefix)
        built = compare_as_built(pair, chosen.factories, chosen.weights)
    if built is not None:
        rung.check(built)
    one = _with_one_sample(pair)
    if "eval" in modes and one is not None:
        first = len(rung.verdicts)
        _check_one_sample(rung, one)
        say_location(rung, one, first)
    for name, module in pair.ref.modules.items():
        is_dropout = module.kind == "Dropout" or module.type == "Dropout"
        if is_dropout and name in pair.port.modules:
            _check_dropout(rung, pair, name)
    given = {f"input {i}" if i else "input": array for i, array in enumerate(as_call(pair.inputs).inputs)}
    rung.keep(given, given)
    if all_branches and not pair.ref.is_watched:
        rung.refuse("which branches are entered is seen in PyTorch alone: judge without all_branches")
    elif all_branches and (never := pair.ref.never_entered(modes, wished=True)):
        rung.refuse(f"{len(never)} branches are never entered, first {never[0]}: choose another --seed")


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


def _with_one_sample(pair: Pair) -> Pair | None:
    """The pair on the first sample alone; None where there are not several.

    Samples lie along the first axis of the array that has most axes, and of all others that are as long.
    """
    shape = max((array.shape for array in as_call(pair.inputs).inputs), key=len, default=())
    if not shape or shape[0] < 2:
        return None
    count = shape[:1]
    return replace(pair, inputs=map_tensors(pair.inputs, is_array, lambda a: a[:1] if a.shape[:1] == count else a))


def _check_one_sample(rung: Rung, pair: Pair) -> None:
    dtype = pair.precisions[0]

    def outputs(run: Run, is_port: bool = False) -> dict[Item, np.ndarray]:
        return {item: array for item, array in items(pair, run, is_port).items() if leaves_the_model(item)}

    def again(dtype: str, perturbation: int = 0) -> dict[Item, np.ndarray]:
        return outputs(pair.ask(pair.ref, dtype, False, perturbation))

    run = pair.ask(pair.ref, dtype, False)
    ref = outputs(run)
    if run.trace.error or not all(np.isfinite(array).all() for array in ref.values()):
        why = f"raised {run.trace.error}" if run.trace.error else "gives NaN or infinity"
        rung.say(f"eval mode, one sample: not compared, since the reference {why}")
        last = rung.verdicts[-1]
        rung.verdicts[-1] = replace(last, caveats=[*last.caveats, NOT_ALONE])
        return
    found = pair.ask(pair.port, dtype, False)
    ruler = Ruler.measured(ref, dtype, again, must_be_judged=list(ref))
    verdict = ruler.compare(outputs(found, True), title=f"eval mode, {dtype}, one sample", mode="eval", dtype=dtype)
    rung.check(with_error(verdict, found, "eval", dtype))


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
