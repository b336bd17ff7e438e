"""Layers that were replaced for export, proved against those that were there: two models of one framework."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.model import BackendModel
from portproof.backends.question import Question
from portproof.backends.trace import OUTPUT, Trace, module_of, output_item, tracing
from portproof.compare import Item, Items, Row, Verdict, joined
from portproof.compare.ruler import Ruler
from sturdyio.cli import Failed

DTYPES = ("float64", "float32")
# Both sides of, and exactly at, the breakpoints -3 and 3 of a hard-sigmoid; of mean 1, so that no sum cancels.
ISOLATED = np.linspace(-5, 7, 49, dtype=np.float32).reshape(1, 1, 7, 7)


def replaced(
    framework: str, model: Any, replace: Callable[[Any], list[str]], batch: np.ndarray
) -> tuple[Any, list[str], Verdict]:
    """(a copy of `model`, in float32 and eval mode, after `replace`; the names of the layers that changed; the verdict).

    All modules' outputs for `batch` are compared, but those of changed layers with weights, whose meaning changes; the
    other changed layers also alone, where every branch of theirs is entered. Limits are the kit's (compare/ruler.py).
    In float64 `replace` works on float64 weights, so that what is folded is not rounded to float32 on the way.
    """
    side, asked = backend(framework), backend(framework).wrap(model, "model as trained")
    layers = dict(side.layers.named_modules(model))
    before: dict[str, Items] = {}
    after: dict[str, Items] = {}
    for dtype in DTYPES:
        changed = side.training.to_device(side.copied(model), side.device("cpu"), dtype)
        names = replace(changed)
        parts = dict(side.layers.named_modules(changed))
        weightless = [name for name in names if not list(layers[name].parameters())]
        hidden = set(names).difference(weightless)
        before[dtype] = of_run(asked, batch, dtype, hidden) | alone(framework, layers, weightless, dtype)
        with side.runs.grad_enabled(False), tracing(side, changed) as trace:
            changed(side.to_tensor(batch, changed))
        after[dtype] = items(trace, hidden) | alone(framework, parts, weightless, dtype)

    def again(dtype: str, perturbation: int = 0) -> Items:
        return of_run(asked, batch, dtype, hidden, perturbation) if perturbation else before[dtype]

    verdicts = [
        Ruler.measured(before[dtype], dtype, again).compare(after[dtype], mode="eval", dtype=dtype) for dtype in DTYPES
    ]
    return changed, names, joined("replaced", verdicts)  # the last copy, in float32


def of_run(
    asked: BackendModel, batch: np.ndarray, dtype: str, hidden: Collection[str], perturbation: int = 0
) -> dict[Item, np.ndarray]:
    """The modules' outputs in eval mode."""
    return items(asked.ask(Question.of_model([batch], dtype, False, perturbation=perturbation)).trace, hidden)


def items(trace: Trace, hidden: Collection[str]) -> dict[Item, np.ndarray]:
    """Its outputs, but those of modules that are `hidden`."""
    kept = {label: array for label, array in trace.outputs.items() if module_of(label) not in hidden}
    return {output_item(label, OUTPUT): array for label, array in kept.items()}


def alone(framework: str, layers: Mapping[str, Any], names: Sequence[str], dtype: str) -> dict[Item, np.ndarray]:
    """The outputs of layers without weights for ISOLATED."""
    side = backend(framework)
    x = side.tensor(ISOLATED, None, side.runs.dtypes[dtype])
    with side.runs.grad_enabled(False), side.runs.exact_constants():
        return {Item(f"{name} alone", "output", name): side.to_array(layers[name](x)) for name in names}


def proof_line(what: str, names: Sequence[str], verdict: Verdict) -> str:
    """`what` was replaced, and how far it was proved; raises Failed where it was not."""
    if verdict.status or not verdict.counted:
        row = verdict.first_failure
        where = f"{row.item} in {row.item.dtype}: {figures(row)}" if row else verdict.refusal
        raise Failed(f"{what}: not proved equal at {where}")
    proofs = []
    for dtype in DTYPES:
        rows = [row for row in verdict.judged if row.item.dtype == dtype]
        (whole,) = (row for row in rows if row.item.name == OUTPUT)
        proofs.append(f"{len(rows)} outputs in {dtype}, logits with {figures(whole)}")
    return f"{what}: {len(names)} layers, equal in {' and '.join(proofs)}"


def figures(row: Row) -> str:
    return row.reason or f"max|d| {row.difference:.1e} of at most {row.atol:.1e}"
