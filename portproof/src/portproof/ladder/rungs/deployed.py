"""Engines that run an exported port, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.question import Question
from portproof.backends.trace import OUTPUTS, Inputs, ModuleCall, as_call, checked_inputs, output_items
from portproof.compare import Item, Items, compare, joined, placed
from portproof.compare.ruler import Ruler, exact_atol
from portproof.ladder.rung import QUIET, Rung, needed, on_rung
from sturdyio.cli import UserError

Engine = Callable[..., Any]  # takes what the reference takes, as NumPy arrays -> an array, or a list of several
Preprocess = Callable[[Any], np.ndarray]  # an example, such as a file's path -> float32


@on_rung
def deploy(
    ref: Any,
    engines: Mapping[str, Engine],
    batches: Mapping[str, Inputs],
    examples: Iterable[Any] = (),
    preprocess: tuple[Preprocess, Preprocess] | None = None,
    *,
    topk: int = 5,
    device: str = "cpu",
    rung: Rung = QUIET,
) -> None:
    """Compare what engines make of an exported port with the reference model, in eval mode.

    `batches` is {name: inputs}, positional in a list, or by keyword; the first axis is that of the samples. Each of the
    `engines` has to give the reference's outputs of each batch (an array, or a list of several), within the float32
    limits around its float64 run, and the same bits twice; of a first output (N, num_classes) the `topk` classes, too.
    `preprocess` are the two functions (the reference's, the deployed one) that make an input of each of the `examples`,
    such as a file's path: the inputs have to be equal to the last bit, and are then one more batch.

    Raises UserError if the reference cannot run, or there is nothing to compare.
    """
    examples = list(examples)
    if not engines or not (batches or examples):
        raise UserError("deploy has nothing to compare: give an engine at least, and a batch")
    if bool(examples) != (preprocess is not None):
        raise UserError("deploy takes examples and what preprocesses them together: give both or none")
    model = backend("torch").wrap(ref, "reference", device)
    for name, batch in batches.items():
        inputs = checked_inputs(batch)
        _compare_outputs(rung, model, engines, name, inputs, inputs, topk)
    if preprocess:
        made = rung.observe("preprocessing", lambda make: [np.asarray(make(each)) for each in examples], *preprocess)
        inputs, port_inputs = both = needed(made)
        items, port_items = (
            {Item(str(example), "input"): array for example, array in zip(examples, side)} for side in both
        )
        rung.compare(items, port_items, title="inputs made of the examples", group=lambda item: item.kind)
        shapes = {array.shape for array in (*inputs, *port_inputs)}
        if len(shapes) == 1:  # else the comparison has failed
            _compare_outputs(rung, model, engines, "examples", [np.stack(inputs)], [np.stack(port_inputs)], topk)


def _compare_outputs(
    rung: Rung,
    model: Any,
    engines: Mapping[str, Engine],
    name: str,
    batch: Inputs,
    port_batch: Inputs,
    topk: int,
) -> None:
    """On one batch, of which the engines get `port_batch`."""

    def again(dtype: str, perturbation: int = 0) -> Items:
        run = model.ask(Question.of_model(batch, dtype, False, None, OUTPUTS, perturbation))
        if run.trace.error or not run.output:
            raise UserError(f"the reference cannot run on batch {name}: {run.trace.error or 'it gives no array'}")
        return output_items(run.output)

    fp32_ref, (logits, *_) = again("float32"), again("float64").values()
    ruler = Ruler.measured(fp32_ref, "float32", again, must_be_judged=list(fp32_ref))
    rung.check_signal({f"batch {name}": logits})
    call = as_call(port_batch)
    for engine_name, engine in engines.items():
        title = f"{engine_name}, {name}"
        runs = rung.of_port(title, lambda engine=engine: [_outputs(engine, call) for _ in range(2)])
        if runs is None:
            continue
        compared = ruler.compare(runs[0], section=title, dtype="float32")
        first, second = (placed(outputs, section=f"{title}, the same twice") for outputs in runs)
        verdicts = [compared, compare(first, second, exact_atol(first))]
        ranking = next(iter(runs[0].values()))
        if logits.ndim == 2 and ranking.shape == logits.shape:
            ranked = Item(f"top{min(topk, logits.shape[1])}", "label", section=title)
            of_ref, of_engine = (_at_largest(logits, array, topk) for array in (logits, ranking))
            # Classes may change places only where both outputs' limits together allow it.
            atol = {ranked: 2 * compared.rows[0].atol}
            verdicts.append(compare({ranked: of_ref}, {ranked: of_engine}, atol))
        rung.check(joined(title, verdicts), group=str)
        rung.keep(ruler.ref, runs[0], f"{title}/")


def _outputs(engine: Engine, call: ModuleCall) -> dict[Item, np.ndarray]:
    returned = engine(*call.args, **call.kwargs)
    several = returned if isinstance(returned, (list, tuple)) else [returned]
    return output_items([np.asarray(array) for array in several])


def _at_largest(logits: np.ndarray, ranked: np.ndarray, k: int) -> np.ndarray:
    """The logits (N, k) of the classes that are largest in `ranked`, the largest first."""
    return np.take_along_axis(logits, np.argsort(-ranked, axis=1, kind="stable")[:, :k], axis=1)
