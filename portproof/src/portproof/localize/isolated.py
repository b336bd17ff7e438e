"""Isolated runs: one module at a time on both sides, teacher-forced: on what the reference's module received.

A difference in a network spreads to everything behind it, and in the backward pass to everything before it. A module
that differs in an isolated run is at fault itself. The two may be built differently all the same: called with other
keywords, returning more, or with the activation inside that is a module of its own on the other side. So what differs
at first is tried again in the port's own way of calling it, and together with what follows it (see attempts.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from portproof.backends.model import Model
from portproof.backends.question import Question, Run, to_precision
from portproof.backends.trace import Inputs, ModuleCall, is_array, map_tensors
from portproof.compare import FAIL, Item, Items, Row, tensor_item
from portproof.compare.activations import off_kinks
from portproof.compare.ruler import RUNS, UNIT_ROUNDOFF, Ruler, largest
from portproof.localize.attempts import Attempt, Way, attempts, paired_outputs, port_upstream, ways
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
        return raised, False, distance if self.attempt.built_differently else distance / FAR


class IsolatedRuns:
    """Runs one module at a time on both sides, in one mode, on what the reference's modules received in `calls`."""

    def __init__(
        self,
        ref: Model,
        port: Model,
        names: NameMap,
        inputs: Inputs,
        train: bool,
        calls: Calls,
        port_calls: Calls | None = None,
    ) -> None:
        """`port_calls` are those of the port in a run of its own, in float64, if they are known."""
        self.ref, self.port, self.names, self.inputs, self.train, self.calls = ref, port, names, inputs, train, calls
        self._ref_keys = {key: key for key in names.tensors}
        self._port_keys = {port_key: key for key, port_key in names.tensors.items()}
        self._given_port_calls = port_calls

    @cached_property
    def port_calls(self) -> Calls:
        """Those of the port in a run of its own, in float64."""
        if self._given_port_calls is not None:
            return self._given_port_calls
        return self.port.run(self.inputs, "float64", self.train, calls=True).trace.calls

    def forget(self) -> None:
        """Let go of all that whole models gave, but for the calls."""
        if self.port_calls:
            self.ref.forget()
            self.port.forget()

    def ref_items(
        self, call: ModuleCall, dtype: str, backward: bool, attempt: Attempt, **options: Any
    ) -> dict[Item, np.ndarray]:
        """What the reference's module gives; `options` are further fields of the question."""
        question = Question(
            attempt.way.asked(call), dtype, self.train, backward, followed_by=attempt.way.followed_by, **options
        )
        return _items(self.ref.ask(question), call.name, call.name, self._ref_keys, attempt.ref_groups)

    def run(self, label: str, dtype: str, backward: bool, adjusted: bool = True) -> IsolatedRun:
        """The module behind `label` in "float64" or "float32", on inputs `adjusted` to show more.

        Of several attempts the first that passes, else the nearest; a later one only if it is far nearer.
        """
        call = adjusted_call(self.ref, self.calls[label], dtype) if adjusted else self.calls[label]
        best = None
        for attempt in attempts(self.ref, self.port, self.names, label, self.calls, call, lambda: self.port_calls):
            found = self._attempted(call, label, dtype, backward, attempt)
            if found.passed or found.kinds == {"buffer"}:  # no other way to call it changes its statistics alone
                return found
            if best is None or found.rank < best.rank:
                best = found
        return best

    def _attempted(self, call: ModuleCall, label: str, dtype: str, backward: bool, attempt: Attempt) -> IsolatedRun:
        ref = self.ref_items(call, dtype, backward, attempt)
        port_name, upstream = port_module(self.names, label), attempt.way.asked(call).upstream
        port_run = self._run_port(port_name, replace(attempt.port_call, upstream=upstream), dtype, backward, attempt)
        port = _items(port_run, call.name, port_name, self._port_keys, attempt.port_groups)
        if port_run.trace.error:
            output = Item("output 0", "output", call.name)
            row = Row(output, FAIL, reason=f"the port's module raised {port_run.trace.error}")
            return IsolatedRun(call, dtype, [row], ref, port, port_run, attempt)
        outputs, attempt = self._outputs(call.name, ref, port_run, upstream, attempt)
        if outputs is not None:
            if backward:
                sent = port_upstream(outputs, upstream, port_run.output)
                port_run = self._run_port(port_name, replace(attempt.port_call, upstream=sent), dtype, True, attempt)
            port = _items(port_run, call.name, port_name, self._port_keys, attempt.port_groups)
            port = {item: array for item, array in port.items() if item.kind != "output"}
            for i, (j, shaped) in outputs.items():
                port[Item(f"output {i}", "output", call.name)] = shaped(port_run.output[j])
            ref = _of_outputs(ref, outputs)
        port = without_optional(port, ref, self.port)
        rows = self._ruler(call, dtype, backward, attempt, ref).compare(port).rows
        return IsolatedRun(call, dtype, rows, ref, port, port_run, attempt)

    def _ruler(self, call: ModuleCall, dtype: str, backward: bool, attempt: Attempt, ref: Items) -> Ruler:
        """How far the port's module may be from `ref`, what the reference's gave."""

        def again(other: str, perturbation: int = 0) -> Items:
            return self.ref_items(call, other, backward, attempt, perturbation=perturbation)

        upstream = [largest(array) for array in attempt.way.asked(call).upstream if array is not None]
        scales = {"input_scales": {call.name: call.scale}, "upstream_scale": max(upstream, default=0.0)}
        return Ruler.measured(ref, dtype, again, **scales)

    def _run_port(self, name: str, call: ModuleCall, dtype: str, backward: bool, attempt: Attempt) -> Run:
        call = replace(call, name=name)
        return self.port.ask(Question(call, dtype, self.train, backward, followed_by=attempt.port_followed_by))

    def _outputs(
        self, name: str, ref_items: Items, port_run: Run, upstream: list, attempt: Attempt
    ) -> tuple[dict | None, Attempt]:
        """(which output of the port stands for which of the reference's module `name`, the attempt).

        None where each stands for its own. What the whole model returns has to have the same form.
        """
        ref = [array for item, array in ref_items.items() if item.kind == "output"]
        if (
            not name
            or not port_run.output
            or [array.shape for array in ref] == [array.shape for array in port_run.output]
        ):
            return None, attempt
        pairs = paired_outputs(ref, port_run.output, [gradient is not None for gradient in upstream])
        word = attempt.built_differently or OTHER_FORM
        return pairs, replace(attempt, built_differently=word) if pairs else attempt


def all_questions(
    ref: Model, calls: Calls, label: str, received: ModuleCall, dtype: str, train: bool, backward: bool
) -> Iterator[Question]:
    """All that `IsolatedRuns.run` may ask of the reference for one call in that precision, the plainest first."""
    for way in ways(ref, calls, label) if received.name else [Way()]:
        question = Question(way.asked(received), dtype, train, backward, followed_by=way.followed_by)
        yield question
        yield from (replace(question, dtype=other) for other in UNIT_ROUNDOFF if other != dtype)
        yield from (replace(question, perturbation=i) for i in range(1, RUNS + 1))


def without_optional(port: Items, ref: Items, model: Model) -> dict[Item, np.ndarray]:
    """What the port's `model` gave, without what need not be in `ref`.

    What is a parameter there and frozen here looks like a buffer; that it gets no gradient is the finding.
    """

    def is_optional(item: Item, array: np.ndarray) -> bool:
        is_zero = model.zeros_for_none and item.kind == "gradient" and not largest(array)
        return item.kind == "buffer" or is_zero

    return {item: array for item, array in port.items() if item in ref or not is_optional(item, array)}


def adjusted_call(ref: Model, call: ModuleCall, dtype: str) -> ModuleCall:
    """The call with inputs that show more: whole numbers of an embedding's every kind, nothing at a kink.

    In "float32" its numbers are rounded to that, so that all runs in either precision receive the same.
    """
    if dtype == "float32":
        rounded = map_tensors((call.args, call.kwargs, call.upstream), is_array, partial(to_precision, dtype=dtype))
        call = replace(call, args=rounded[0], kwargs=rounded[1], upstream=rounded[2])
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
    `groups` hold for each input of floating point the place of the reference's input that it stands for (-1: none) and
    that one's shape; the gradients of inputs that stand for the same one are added. None: each stands for itself.
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
