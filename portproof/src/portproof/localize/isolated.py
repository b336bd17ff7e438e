"""Isolated runs: one module at a time on both sides, teacher-forced: on what the reference's module received.

A difference in a network spreads to everything behind it, and in the backward pass to everything before it. A module
that differs in an isolated run is at fault itself. The two may be built differently all the same: called with other
keywords, returning more, or with the activation inside that is a module of its own on the other side. So what differs
at first is tried again in the port's own way of calling it, and together with what follows it (see attempts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from portproof.backends.model import BackendModel, Run
from portproof.backends.trace import Inputs, ModuleCall
from portproof.compare import FAIL, Item, Items, Row, Verdict, compare, tensor_item
from portproof.compare.activations import off_kinks
from portproof.compare.tolerances import (
    MOVED,
    UNIT_ROUNDOFF,
    distances,
    kernel_atol,
    largest,
    least_limits,
    lost_in_float32,
    noise_floor,
    semantic_limits,
    with_moved,
    with_noise_floor,
)
from portproof.localize.attempts import Attempt, attempts, paired_outputs, port_upstream
from portproof.mapping.name_map import NameMap, port_module

Calls = Mapping[str, ModuleCall]  # of one side, by their labels
OTHER_FORM = "returns its values in another form"
FAR = 4.0  # how much nearer another way than the plain one has to come where both differ


@dataclass(frozen=True)
class IsolatedRun:
    """What one module gave on both sides, compared."""

    call: ModuleCall  # the reference's
    dtype: str
    rows: list[Row]
    ref: Items
    port: Items
    port_run: Run
    attempt: Attempt

    def failed(self, gradients: bool) -> list[Row]:
        """The rows of gradients, or all others, that failed."""
        return [row for row in self.rows if row.status == FAIL and (row.item.kind == "gradient") == gradients]

    @property
    def kinds(self) -> set[str]:
        """The kinds of items that failed: "output", "gradient", "buffer"."""
        return {row.item.kind for row in self.rows if row.status == FAIL}

    def narrowed(self, kinds: Collection[str]) -> IsolatedRun:
        """The run with only these kinds of items that failed, and all that did not."""
        return replace(self, rows=[row for row in self.rows if row.status != FAIL or row.item.kind in kinds])

    def without_arrays(self) -> IsolatedRun:
        """The run with only its rows, which takes no memory."""
        return replace(self, ref={}, port={}, port_run=Run(self.port_run.trace))

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(row.status != FAIL for row in self.rows)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sorts failed runs of one module: those that raised last, the plainest first unless another is far nearer.

        Of a module that cannot be run alone it says nothing that it raised.
        """
        raised = bool(self.port_run.trace.error) and self.attempt.complete
        outputs = [row for row in self.rows if row.item.kind == "output"]
        if not outputs or any(row.status == FAIL and row.worst is None for row in outputs):
            return raised, True, 0.0
        distance = max(row.difference / max(row.scale, 1e-300) for row in outputs)
        return raised, False, distance if self.attempt.how else distance / FAR


class IsolatedRuns:
    """Runs one module at a time on both sides, in one mode, on what the reference's modules received in `calls`."""

    def __init__(
        self,
        ref: BackendModel,
        port: BackendModel,
        names: NameMap,
        inputs: Inputs,
        train: bool,
        calls: Calls,
    ) -> None:
        self.ref, self.port, self.names, self.inputs, self.train, self.calls = ref, port, names, inputs, train, calls
        self._ref_keys = {key: key for key in names.tensors}
        self._port_keys = {port_key: key for key, port_key in names.tensors.items()}

    @cached_property
    def port_calls(self) -> Calls:
        """Those of the port in a run of its own, in float64."""
        return self.port.run(self.inputs, "float64", self.train, calls=True).trace.calls

    def ref_items(
        self,
        call: ModuleCall,
        dtype: str,
        backward: bool,
        attempt: Attempt,
        mutation: Callable[[Any], Any] | None = None,
    ) -> dict[Item, np.ndarray]:
        """What the reference's module gives; with `mutation` what it gives then, see TorchModel.run_mutated."""
        call = attempt.sent_back(call)
        if mutation:
            run = self.ref.run_mutated(mutation, call, dtype, self.train, backward, attempt.ref_then)
        else:
            run = self.ref.run_module(call.name, call, dtype, self.train, backward, False, attempt.ref_then)
        return _items(run, call.name, call.name, self._ref_keys, attempt.ref_groups)

    def run(self, label: str, dtype: str, backward: bool, adjusted: bool = True) -> IsolatedRun:
        """The module behind `label` in "float64" or "float32", on inputs `adjusted` to show more.

        Of several attempts the first that passes, else the nearest; a later one only if it is far nearer.
        """
        call = adjusted_call(self.ref, self.calls[label], dtype) if adjusted else self.calls[label]
        best = None
        for attempt in attempts(self.ref, self.port, self.names, label, self.calls, call, lambda: self.port_calls):
            found = self._attempted(call, label, dtype, backward, attempt)
            if found.passed:
                return found
            if best is None or found.rank < best.rank:
                best = found
        return best

    def _attempted(self, call: ModuleCall, label: str, dtype: str, backward: bool, attempt: Attempt) -> IsolatedRun:
        fp64_ref = self.ref_items(call, "float64", backward, attempt)
        port_name, upstream = port_module(self.names, label), attempt.sent_back(call).upstream
        port_run = self._run_port(port_name, replace(attempt.port_call, upstream=upstream), dtype, backward, attempt)
        port = _items(port_run, call.name, port_name, self._port_keys, attempt.port_groups)
        if port_run.trace.error:
            output = Item("output 0", "output", call.name)
            row = Row(output, FAIL, reason=f"the port's module raised {port_run.trace.error}")
            return IsolatedRun(call, dtype, [row], fp64_ref, port, port_run, attempt)
        outputs, built = self._outputs(call.name, fp64_ref, port_run, upstream, attempt)
        if outputs is not None:
            if backward:
                sent = port_upstream(outputs, upstream, port_run.output)
                port_run = self._run_port(port_name, replace(attempt.port_call, upstream=sent), dtype, True, attempt)
            port = _items(port_run, call.name, port_name, self._port_keys, attempt.port_groups)
            port = {item: array for item, array in port.items() if item.kind != "output"}
            port |= {
                Item(f"output {i}", "output", call.name): shaped(port_run.output[j])
                for i, (j, shaped) in outputs.items()
            }
            fp64_ref = _of_outputs(fp64_ref, outputs)

        def ref_in(precision: str) -> Items:
            items = self.ref_items(call, precision, backward, attempt)
            return items if outputs is None else _of_outputs(items, outputs)

        port = without_spare(port, fp64_ref, self.port)
        ref, rows = self._compared(call, dtype, fp64_ref, port, ref_in)
        return IsolatedRun(call, dtype, rows, ref, port, port_run, built)

    def _compared(
        self, call: ModuleCall, dtype: str, fp64_ref: Items, port: Items, ref_in: Callable[[str], Items]
    ) -> tuple[Items, list[Row]]:
        """(what `port` is compared with, the rows); `ref_in` runs the reference's module in a precision."""
        floor = noise_floor(fp64_ref, UNIT_ROUNDOFF[dtype], {call.name: call.scale})
        zeros = {item for item, array in fp64_ref.items() if not largest(array)}

        def judged(ref: Items, atol: Mapping[Item, float], expected_zero: Collection[Item]) -> Verdict:
            return compare(ref, port, atol, expected_zero=zeros.union(expected_zero))

        if dtype == "float32":
            ref = ref_in("float32")
            return ref, judged(ref, *with_noise_floor(kernel_atol(fp64_ref, ref), floor, fp64_ref)).rows
        verdict = judged(fp64_ref, *with_noise_floor(least_limits(fp64_ref), floor, fp64_ref))
        if verdict.status == FAIL:
            errors = distances(fp64_ref, ref_in("float32"))
            atol, expected_zero = with_noise_floor(semantic_limits(fp64_ref, errors), floor, fp64_ref)
            verdict = judged(fp64_ref, atol, expected_zero)
            if verdict.status == FAIL and lost_in_float32(fp64_ref, errors, zeros | expected_zero):
                moved = self.ref.moved_runs(MOVED, lambda: distances(fp64_ref, ref_in("float64")))
                verdict = judged(fp64_ref, with_moved(atol, moved), expected_zero)
        return fp64_ref, verdict.rows

    def _run_port(self, name: str, call: ModuleCall, dtype: str, backward: bool, attempt: Attempt) -> Run:
        return self.port.run_module(name, call, dtype, self.train, backward, False, attempt.port_then)

    def _outputs(
        self, name: str, fp64_ref: Items, port_run: Run, upstream: list, attempt: Attempt
    ) -> tuple[dict | None, Attempt]:
        """(which output of the port stands for which of the reference's module `name`, the attempt).

        None where each stands for its own. What the whole model returns has to have the same form.
        """
        ref = [array for item, array in fp64_ref.items() if item.kind == "output"]
        if (
            not name
            or not port_run.output
            or [array.shape for array in ref] == [array.shape for array in port_run.output]
        ):
            return None, attempt
        pairs = paired_outputs(ref, port_run.output, [gradient is not None for gradient in upstream])
        return pairs, replace(attempt, how=attempt.how or OTHER_FORM) if pairs else attempt


def without_spare(port: Items, ref: Items, model: BackendModel) -> dict[Item, np.ndarray]:
    """What the port's `model` gave, without what need not be in `ref`.

    What is a parameter there and frozen here looks like a buffer; that it gets no gradient is the finding.
    """

    def is_spare(item: Item, array: np.ndarray) -> bool:
        is_zero = model.zeros_for_none and item.kind == "gradient" and not largest(array)
        return item.kind == "buffer" or is_zero

    return {item: array for item, array in port.items() if item in ref or not is_spare(item, array)}


def adjusted_call(ref: BackendModel, call: ModuleCall, dtype: str) -> ModuleCall:
    """The call with inputs that show more: whole numbers of an embedding's every kind, nothing at a kink."""
    if not call.args or not isinstance(call.args[0], np.ndarray):
        return call
    module, x = ref.modules[call.name], call.args[0]
    if module.kind == "Embedding":
        x = _with_special_rows(x, module.slots["weight"].shape[0])
    elif dtype == "float32":
        x = off_kinks(x, module.type)
    return replace(call, args=(x, *call.args[1:]))


def _with_special_rows(ids: np.ndarray, rows: int) -> np.ndarray:
    """`ids` with the rows in them that may be padding: the first two and the last."""
    special, flat = [0, 1, rows - 1], ids.flatten()
    special = [row for row in dict.fromkeys(special) if row < rows and row not in flat][: flat.size]
    flat[: len(special)] = special
    return flat.reshape(ids.shape)


def _of_outputs(items: Items, outputs: Mapping[int, Any]) -> dict[Item, np.ndarray]:
    """`items` without outputs that `outputs` does not have."""
    kept = {f"output {i}" for i in outputs}
    return {item: array for item, array in items.items() if item.kind != "output" or item.name in kept}


def _items(
    run: Run, module: str, name: str, keys: Mapping[str, str], groups: Sequence[tuple[int, tuple[int, ...]]] | None
) -> dict[Item, np.ndarray]:
    """What the reference's `module`, or its counterpart, gave, by the reference's names.

    `name` is what the module is called on its own side; `keys` are {its side's state_dict key: the reference's}.
    `groups` say which of the reference's inputs, of which shape, each input of floating point stands for, -1 for none;
    None: each for itself. Gradients of those that stand for one are added.
    """
    prefix = f"{name}." if name else ""
    gradients: dict[int, np.ndarray] = {}
    for i, array in enumerate(run.input_gradients):
        if array is not None and groups is None:
            gradients[i] = array
        elif array is not None and groups[i][0] >= 0:
            group, shape = groups[i]
            gradients[group] = gradients.get(group, 0.0) + array.reshape(shape)
    return {
        **{Item(f"output {i}", "output", module): array for i, array in enumerate(run.output)},
        **{tensor_item(keys[prefix + k], "buffer"): a for k, a in run.buffers.items() if prefix + k in keys},
        **{Item(f"input {i}", "gradient", module): array for i, array in gradients.items()},
        **{tensor_item(keys[prefix + k], "gradient"): a for k, a in run.gradients.items() if prefix + k in keys},
    }


def forward_order(calls: Calls, names: NameMap) -> list[str]:
    """The labels of mapped calls as these end: a block after its layers."""
    return [label for label in calls if label in names.calls]


def backward_order(calls: Calls, names: NameMap) -> list[str]:
    """The last begun first: a block after its layers again."""
    return sorted(forward_order(calls, names), key=lambda label: -calls[label].start)


def isolated_layers(runs: IsolatedRuns, dtype: str) -> Iterator[tuple[str, IsolatedRun]]:
    """(label, isolated run) of every layer that a gradient came back to; a layer is a module without children.

    Those that a recorded reference cannot run alone are left out.
    """
    for label in backward_order(runs.calls, runs.names):
        call = runs.calls[label]
        if label not in runs.ref.not_alone and runs.ref.modules[call.name].is_leaf and has_upstream(call):
            yield label, runs.run(label, dtype, backward=True)


def has_upstream(call: ModuleCall) -> bool:
    """Whether a gradient came back to what the call returned."""
    return any(gradient is not None for gradient in call.upstream)
