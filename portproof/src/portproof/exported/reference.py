"""What a recording says of the reference in eval mode: each call's arrays, their limits, what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from portproof.arrays import largest, largest_difference
from portproof.backends.question import Question, Run
from portproof.backends.trace import (
    OUTPUT,
    OUTPUTS,
    UPSTREAM,
    Inputs,
    ModuleCall,
    as_call,
    is_array,
    output_item,
    tensors_at,
)
from portproof.compare import Item
from portproof.compare.ruler import RUNS, SEMANTIC_RTOL, U64, UNIT_ROUNDOFF, S
from portproof.exported.graph import GraphInput
from portproof.recording.file import RecordedModel
from sturdyio.cli import UserError


@dataclass(frozen=True)
class Output:
    """One array that a module call gave."""

    label: str  # of the output, NAME#2[1]
    call: str  # label of the call
    array: np.ndarray  # float64
    atol: float

    @property
    def item(self) -> Item:
        return replace(output_item(self.label, OUTPUT), mode="eval", dtype="float64", section="eval mode, float64")


class Reference:
    """Raises UserError for a recording without eval mode."""

    def __init__(self, model: RecordedModel) -> None:
        if "eval" not in model.modes:
            raise UserError("the recording lacks eval mode, in which a graph is judged: record with --mode both")
        self.model = model
        self.cotangent = model.cotangents[False]
        self.run = model.ask(Question.of_model(model.inputs, "float64", False, self.cotangent, UPSTREAM))
        self.calls: Mapping[str, ModuleCall] = self.run.trace.calls
        self.weights = {key: array for key, array in model.arrays().items() if array.dtype.kind == "f"}

    @cached_property
    def outputs(self) -> list[Output]:
        """In the order in which the calls ended; the model's own is not among them."""
        found = []
        for label, call in sorted(self.calls.items(), key=lambda item: self._ends[item[0]]):
            for i, array in enumerate(call.outputs if label != OUTPUT else ()):
                name = label + call.places[i] if len(call.outputs) > 1 else label
                if array.dtype.kind == "f" and array.size:
                    found.append(Output(name, label, array, self._atol[name]))
        return found

    @cached_property
    def _ends(self) -> dict[str, int]:
        """{call: its place among the outputs of the trace, which come in the order in which calls end}."""
        order: dict[str, int] = {}
        for i, name in enumerate(self.run.trace.outputs):
            order[name.partition("[")[0]] = i
        return {label: order.get(label, len(order)) for label in self.calls}

    @cached_property
    def _atol(self) -> dict[str, float]:
        """The ruler's limits of float64, from the runs that were recorded (see compare/ruler.py)."""
        found = {label: SEMANTIC_RTOL * largest(array) for label, array in self.run.trace.outputs.items()}
        for factor, run in self._other_runs():
            for label, array in run.trace.outputs.items():
                own = self.run.trace.outputs.get(label)
                if own is not None and own.shape == array.shape and own.dtype.kind == "f":
                    distance = largest_difference(array, own)
                    found[label] = max(found[label], factor * distance if np.isfinite(distance) else 0.0)
        return found

    def _other_runs(self) -> list[tuple[float, Run]]:
        """(by what its distance is multiplied, run)."""
        inputs, cotangent = self.model.inputs, self.cotangent
        single = self.model.ask(Question.of_model(inputs, "float32", False, cotangent, OUTPUTS))
        moved = [Question.of_model(inputs, "float64", False, cotangent, OUTPUTS, i) for i in range(1, RUNS + 1)]
        ratio = S * U64 / UNIT_ROUNDOFF["float32"]
        return [(ratio, single), *((S, self.model.ask(question)) for question in moved)]

    @cached_property
    def atol_of_outputs(self) -> list[float]:
        """Of what the model returns."""
        places = self.run.places
        return [self._atol[OUTPUT + place if len(places) > 1 else OUTPUT] for place in places]

    def enclosing(self, label: str) -> list[str]:
        """The calls around a call, the innermost first, without the model's own."""
        found = []
        label = self.calls[label].inside
        while label in self.calls and label != OUTPUT:
            found.append(label)
            label = self.calls[label].inside
        return found

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """{call: those that get one of its outputs as it is}."""
        makers: dict[int, list[str]] = {}
        for label, call in self.calls.items():
            for array in call.outputs:
                makers.setdefault(id(array), []).append(label)
        found: dict[str, list[str]] = {label: [] for label in self.calls}
        for label, call in self.calls.items():
            for array in call.inputs:
                for maker in makers.get(id(array), ()):
                    if self.calls[maker].start < call.start and maker not in self.enclosing(label):
                        found[maker].append(label)
        return found

    def type_of(self, label: str) -> str:
        return self.model.modules[self.calls[label].name].type


def given_arrays(inputs: Inputs) -> dict[str, np.ndarray]:
    """{place or keyword: array} of a model's inputs, in order."""
    call = as_call(inputs)
    found = dict(tensors_at(call.args, is_array).items())
    for key, value in call.kwargs.items():
        found |= {key + place: array for place, array in tensors_at(value, is_array).items()}
    return found


def bound(inputs: Sequence[GraphInput], recorded: Inputs) -> dict[str, np.ndarray]:
    """{the graph's input: the recorded array}, by name where the names are the same, else in order.

    Whole numbers get the graph's dtype. Raises UserError if they are not as many.
    """
    arrays, names = given_arrays(recorded), [each.name for each in inputs]
    if len(names) != len(arrays):
        listed = ", ".join(names) or "none"
        raise UserError(f"the graph takes {len(names)} inputs ({listed}), the recording holds {len(arrays)}")
    ordered = [arrays[name] for name in names] if set(names) == set(arrays) else list(arrays.values())
    return {
        each.name: array.astype(each.dtype) if array.dtype.kind in "iu" and each.dtype.kind in "iu" else array
        for each, array in zip(inputs, ordered)
    }
