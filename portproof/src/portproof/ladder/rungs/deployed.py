"""Engines that run an exported port, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.question import Question
from portproof.backends.trace import OUTPUTS, Inputs, as_call, checked_inputs
from portproof.compare import Item, Items, compare, joined
from portproof.compare.ruler import Ruler
from portproof.ladder.rung import QUIET, Rung, needed, on_rung
from sturdyio.cli import UserError

OUTPUT = Item("output", "output")
Engine = Callable[..., np.ndarray]  # takes what the reference takes, as NumPy arrays
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
    `engines` has to give the reference's first output of each batch, within the float32 limits around its float64 run,
    and the same bits twice; of outputs (N, num_classes) the `topk` classes, too. `preprocess` are the two functions
    (the reference's, the deployed one) that make an input of each of the `examples`, such as a file's path: the inputs
    have to be equal to the last bit, and are then one more batch.

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
        return {OUTPUT: run.output[0]}

    ruler = Ruler.measured(again("float32"), "float32", again, must_be_judged=[OUTPUT])
    rung.check_signal({f"batch {name}": ruler.ref[OUTPUT]})
    logits, call = again("float64")[OUTPUT], as_call(port_batch)
    for engine_name, engine in engines.items():
        title = f"{engine_name}, {name}"
        outputs = rung.of_port(
            title, lambda engine=engine: [np.asarray(engine(*call.args, **call.kwargs)) for _ in range(2)]
        )
        if outputs is None:
            continue
        compared = ruler.compare({OUTPUT: outputs[0]}, section=title, dtype="float32")
        twice = Item("the same twice", "output", section=title)
        verdicts = [compared, compare({twice: outputs[0]}, {twice: outputs[1]}, {twice: 0.0})]
        if logits.ndim == 2 and outputs[0].shape == logits.shape:
            ranked = Item(f"top{min(topk, logits.shape[1])}", "label", section=title)
            of_ref, of_engine = (_at_largest(logits, array, topk) for array in (logits, outputs[0]))
            # Classes may change places only where both outputs' limits together allow it.
            atol = {ranked: 2 * max(row.atol for row in compared.rows)}
            verdicts.append(compare({ranked: of_ref}, {ranked: of_engine}, atol))
        rung.check(joined(title, verdicts), group=lambda item: item.name)
        rung.keep({"output": logits.astype(np.float32)}, {"output": outputs[0]}, f"{title}/")


def _at_largest(logits: np.ndarray, ranked: np.ndarray, k: int) -> np.ndarray:
    """The logits (N, k) of the classes that are largest in `ranked`, the largest first."""
    return np.take_along_axis(logits, np.argsort(-ranked, axis=1, kind="stable")[:, :k], axis=1)
