"""What ONNX Runtime makes of a graph: at each recorded size, within float32's limits, twice the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from portproof.backends.question import Question
from portproof.backends.trace import OUTPUTS, Inputs, output_items
from portproof.compare import FAIL, NOT_JUDGED, PASS, Item, Row, Verdict
from portproof.compare.ruler import Ruler
from portproof.exported.graph import GraphInput
from portproof.exported.reference import bound
from portproof.recording.file import RecordedModel
from sturdyio.cli import UserError, one_line

ENGINE = "ONNX Runtime"
KERNEL = "float32"


def need_engine() -> None:
    """Raises UserError if ONNX Runtime is not installed."""
    try:
        import onnxruntime  # noqa: F401 - the import is the test
    except ImportError as error:
        fix = "run pip install 'portproof[onnx]', or judge without it: --engine none"
        raise UserError(f"{error}: {fix}") from error


class Engine:
    """A session on the processor; raises whatever the engine does for a graph that it cannot load."""

    def __init__(self, path: str | Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it refuses is in its exceptions
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.outputs = [each.name for each in self.session.get_outputs()]

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return self.session.run(self.outputs, dict(feeds))


def in_engine(path: str | Path, inputs: list[GraphInput], model: RecordedModel, alone: bool = False) -> Verdict:
    """The engine's outputs at the recorded sizes against the reference's float64 run.

    Where it is judged `alone`, an output of which float32 keeps no digit is refused.
    """
    try:
        engine = Engine(path)
    except Exception as error:  # it has many
        row = Row(Item("the engine loads it", section=ENGINE), FAIL, reason=one_line(error))
        return Verdict(ENGINE, [row])
    rows: list[Row] = []
    for given in (model.inputs, *model.also):
        rows += _at_size(engine, inputs, model, given, alone)
    return Verdict(ENGINE, [*rows, *_unseen_sizes(inputs, model)])


def _at_size(
    engine: Engine, inputs: list[GraphInput], model: RecordedModel, given: Inputs, alone: bool
) -> Iterator[Row]:
    feeds = bound(inputs, given)
    sizes = " and ".join("x".join(map(str, array.shape)) or "scalar" for array in feeds.values())
    there: dict[str, Any] = {"section": f"{ENGINE}, {sizes}", "mode": "eval", "dtype": KERNEL}
    try:
        first, second = engine.run(feeds), engine.run(feeds)
    except Exception as error:  # it has many
        yield Row(Item("the engine runs it", **there), FAIL, reason=one_line(error))
        return

    def again(dtype: str, perturbation: int = 0) -> dict[Item, np.ndarray]:
        run = model.ask(Question.of_model(given, dtype, False, keeps=OUTPUTS, perturbation=perturbation))
        return output_items(run.output)

    fp32_ref = again(KERNEL)
    ruler = Ruler.measured(fp32_ref, KERNEL, again, must_be_judged=list(fp32_ref) if alone else ())
    yield from ruler.compare(output_items(first), **there).rows
    same = all(np.array_equal(one, other, equal_nan=True) for one, other in zip(first, second))
    reason = "" if same else "it gives other bits the second time"
    yield Row(Item("the same each time", **there), PASS if same else FAIL, (), 0.0 if same else 1.0, 0.0, reason=reason)


def _unseen_sizes(inputs: list[GraphInput], model: RecordedModel) -> Iterator[Row]:
    """Axes for which the graph claims any size, and only one was recorded."""
    seen = [bound(inputs, given) for given in (model.inputs, *model.also)]
    for each in inputs:
        for axis, size in enumerate(each.sizes):
            sizes = {arrays[each.name].shape[axis] for arrays in seen if axis < arrays[each.name].ndim}
            if type(size) is str and len(sizes) == 1:
                item = Item(f"input {each.name}, axis {axis}: sizes other than {sizes.pop()}", section=ENGINE)
                yield Row(item, NOT_JUDGED, reason="the graph claims any, and none was recorded (record --also SHAPE)")
