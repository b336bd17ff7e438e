"""Isolated runs: one module at a time on both sides, teacher-forced: on what the reference's module received.

A difference in a network spreads to everything behind it, and in the backward pass to everything before it. A module
that differs in an isolated run is at fault itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portproof.backends.model import BackendModel, Run
from portproof.backends.trace import ModuleCall
from portproof.compare import FAIL, Item, Items, Row, compare, tensor_item
from portproof.compare.activations import off_kinks
from portproof.compare.tolerances import (
    UNIT_ROUNDOFF,
    kernel_atol,
    largest,
    noise_floor,
    semantic_atol,
    with_noise_floor,
)
from portproof.mapping.name_map import NameMap, port_module

Calls = Mapping[str, ModuleCall]  # the reference's, by their labels


@dataclass(frozen=True)
class IsolatedRun:
    """What one module gave on both sides, compared."""

    call: ModuleCall  # the reference's
    dtype: str
    rows: list[Row]
    ref: Items
    port: Items
    port_run: Run

    def failed(self, gradients: bool) -> list[Row]:
        """The rows of gradients, or all others, that failed."""
        return [row for row in self.rows if row.status == FAIL and (row.item.kind == "gradient") == gradients]


class IsolatedRuns:
    """Runs one module at a time on both sides, in one mode."""

    def __init__(self, ref: BackendModel, port: BackendModel, names: NameMap, train: bool) -> None:
        self.ref, self.port, self.names, self.train = ref, port, names, train
        self._ref_keys = {key: key for key in names.tensors}
        self._port_keys = {port_key: key for key, port_key in names.tensors.items()}

    def ref_items(
        self, call: ModuleCall, dtype: str, backward: bool, mutation: Callable[[Any], Any] | None = None
    ) -> dict[Item, np.ndarray]:
        """What the reference's module gives; with `mutation` what it gives then, see TorchModel.run_mutated."""
        if mutation:
            run = self.ref.run_mutated(mutation, call, dtype, self.train, backward)
        else:
            run = self.ref.run_module(call.name, call, dtype, self.train, backward)
        return _items(run, call.name, call.name, self._ref_keys)

    def run(self, label: str, call: ModuleCall, dtype: str, backward: bool) -> IsolatedRun:
        """The module behind `label` in "float64" or "float32"; in float32 no input of an activation is at a kink."""
        received = self._off_kinks(call) if dtype == "float32" else call
        fp64_ref, fp32_ref = (self.ref_items(received, precision, backward) for precision in UNIT_ROUNDOFF)
        port_name = port_module(self.names, label)
        port_run = self.port.run_module(port_name, received, dtype, self.train, backward)
        port = _items(port_run, call.name, port_name, self._port_keys)
        if port_run.trace.error:
            output = Item("output 0", "output", call.name)
            row = Row(output, FAIL, reason=f"the port's module raised {port_run.trace.error}")
            return IsolatedRun(call, dtype, [row], fp64_ref, port, port_run)
        if dtype == "float64":
            ref, atol = fp64_ref, semantic_atol(fp64_ref, fp32_ref)
        else:
            ref, atol = fp32_ref, kernel_atol(fp64_ref, fp32_ref)
        floor = noise_floor(fp64_ref, UNIT_ROUNDOFF[dtype], {call.name: call.scale})
        atol, expected_zero = with_noise_floor(atol, floor, fp64_ref)
        expected_zero |= {item for item, array in fp64_ref.items() if not largest(array)}
        # What is a parameter there and frozen here looks like a buffer; that it gets no gradient is the finding.
        port = {item: array for item, array in port.items() if item in ref or item.kind != "buffer"}
        rows = compare(ref, port, atol, expected_zero=expected_zero).rows
        return IsolatedRun(call, dtype, rows, ref, port, port_run)

    def _off_kinks(self, call: ModuleCall) -> ModuleCall:
        if not call.args or not isinstance(call.args[0], np.ndarray):
            return call
        return replace(call, args=(off_kinks(call.args[0], self.ref.modules[call.name].type), *call.args[1:]))


def _items(run: Run, module: str, name: str, keys: Mapping[str, str]) -> dict[Item, np.ndarray]:
    """What the reference's `module`, or its counterpart, gave, by the reference's names.

    `name` is what the module is called on its own side; `keys` are {its side's state_dict key: the reference's}.
    """
    prefix = f"{name}." if name else ""
    inputs = enumerate(run.input_gradients)
    return {
        **{Item(f"output {i}", "output", module): array for i, array in enumerate(run.output)},
        **{tensor_item(keys[prefix + k], "buffer"): a for k, a in run.buffers.items() if prefix + k in keys},
        **{Item(f"input {i}", "gradient", module): array for i, array in inputs if array is not None},
        **{tensor_item(keys[prefix + k], "gradient"): a for k, a in run.gradients.items() if prefix + k in keys},
    }


def forward_order(calls: Calls, names: NameMap) -> list[str]:
    """The labels of mapped calls as these end: a block after its layers."""
    return [label for label in calls if label in names.calls]


def backward_order(calls: Calls, names: NameMap) -> list[str]:
    """The last begun first: a block after its layers again."""
    return sorted(forward_order(calls, names), key=lambda label: -calls[label].start)


def isolated_layers(runs: IsolatedRuns, calls: Calls, dtype: str) -> Iterator[tuple[str, list[Row]]]:
    """(label, rows of gradients) of the isolated run of every layer; a layer is a module without children."""
    for label in backward_order(calls, runs.names):
        call = calls[label]
        if runs.ref.modules[call.name].is_leaf and has_upstream(call):
            rows = runs.run(label, call, dtype, backward=True).rows
            yield label, [row for row in rows if row.item.kind == "gradient"]


def has_upstream(call: ModuleCall) -> bool:
    """Whether a gradient came back to what the call returned."""
    return any(gradient is not None for gradient in call.upstream)
