"""Run single modules on both sides, on what the reference's received (teacher forcing).

A difference spreads to everything behind it, and backward to everything before it. A
module that differs alone is at fault itself, unless it is built differently: then
other ways are tried (see `Attempt`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, takewhile
from operator import attrgetter
from typing import Any

import numpy as np

from portproof.arrays import is_projected, projected
from portproof.backends.model import BackendModel, Model
from portproof.backends.question import CONSTANTS, Question, Run, to_precision
from portproof.backends.slots import Module
from portproof.backends.trace import OUTPUT, Inputs, ModuleCall, Trace, is_array, map_tensors, module_of
from portproof.compare import FAIL, NOT_JUDGED, Item, Items, Row, tensor_item
from portproof.compare.activations import off_kinks
from portproof.compare.ruler import RUNS, UNIT_ROUNDOFF, Distances, Ruler, largest, moved_distances
from portproof.mapping.agreement import alike, exchanged_axes
from portproof.mapping.arguments import LARGE, InputGradients, arguments
from portproof.mapping.module_calls import EXACT
from portproof.mapping.name_map import NameMap
from portproof.python39 import zip_strict
from sturdyio.cli import MachineError

Calls = Mapping[str, ModuleCall]  # of one side, by label
Chain = tuple[ModuleCall, ...]  # each takes the output of the one before
Pairs = Mapping[int, tuple[int, np.ndarray]]  # {reference's output: (port's, flat places)}
OTHER_INPUTS = "takes other inputs"
MORE_VALUES = "returns more, which is cut off outside"
OTHER_FORM = "returns its values in another form"
OTHER_ROWS = "differs for inputs that it does not get here"
AT_KINKS = "has another gradient where an operation has a kink, and only there"
FAR = 4.0  # how much nearer another way must be


@dataclass(frozen=True)
class Attempt:
    """A way to run a module of the port in place of the reference's.

    The port's may be called differently, return another form, or include its neighbour:
    `BatchNorm(act="relu")` is two modules of the reference. None is a fault.
    """

    question: Question  # to the reference
    port_call: ModuleCall
    port_followed_by: tuple[str, ...] = ()  # as in `Question`
    ref_gradients: InputGradients | None = None  # None: each input stands for itself
    port_gradients: InputGradients | None = None
    built_differently: str = ""  # in words
    complete: bool = True  # the reference's inputs give all it takes
    is_turned: bool = False  # axes of its inputs are in another order: those of its outputs may be


def followed(question: Question, chain: Chain) -> Question:
    call = replace(question.call, upstream=list(chain[-1].upstream))
    return replace(question, call=call, followed_by=names_of(chain))


def types_of(modules: Mapping[str, Module], chain: Chain) -> str:
    return ", ".join(modules[call.name].type for call in chain)


def names_of(chain: Chain) -> tuple[str, ...]:
    return tuple(call.name for call in chain)


def neighbours(
    modules: Mapping[str, Module], calls: Calls, label: str, mapped: Collection[str] = ()
) -> tuple[list[Chain], list[Chain]]:
    """(calls behind `label`: one, two and so on, the last inside), which the other side may have elsewhere."""

    def is_spare(call: ModuleCall) -> bool:
        return not modules[call.name].slots and call.label not in mapped

    behind = list(takewhile(is_spare, _behind(calls, label)))
    leaves = 1 + len(list(takewhile(lambda call: modules[call.name].is_leaf, behind[1:])))
    last = _last_inside(calls, label) if modules[calls[label].name].slots else None
    chains = [tuple(behind[: n + 1]) for n in range(len(behind[:leaves]))]
    return chains, [(last,)] if last and is_spare(last) else []


def _last_inside(calls: Calls, label: str) -> ModuleCall | None:
    """The last call inside, if the layer returns its output, with its input's gradient."""
    outputs = calls[label].outputs
    inside = sorted((c for c in calls.values() if c.inside == label), key=attrgetter("start"))
    if not inside or len(outputs) != 1 or len(inside[-1].inputs) != 1 or not alike(outputs, inside[-1].outputs):
        return None
    nothing: list[np.ndarray | None] = [None]
    before = next((c.with_upstream().upstream for c in inside[-2::-1] if alike(c.outputs, inside[-1].inputs)), nothing)
    return replace(inside[-1], upstream=before)


def _behind(calls: Calls, label: str) -> Iterator[ModuleCall]:
    """Calls of which each takes the output of the one before alone; those that pass it on are skipped."""
    call = calls[label]
    later = [c for c in calls.values() if c.start > call.start and c.inside == call.inside]
    for following in sorted(later, key=attrgetter("start")):
        if not _one_array(call.outputs, following.inputs):
            return
        if not _one_array(following.inputs, following.outputs):
            call = following
            yield call.with_upstream()


def _one_array(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    return len(first) == len(second) == 1 and alike(first, second)


def called_as_the_port_does(
    plain: Attempt, call: ModuleCall, port_call: ModuleCall, others: Sequence[tuple[ModuleCall, ModuleCall]]
) -> Attempt:
    """`others` are pairs of calls of these classes, with inputs of these shapes."""
    found = arguments(plain.question.call.inputs, call.inputs, port_call, [(a.inputs, b.inputs) for a, b in others])
    return replace(
        plain,
        port_call=replace(plain.port_call, args=found.args, kwargs=found.kwargs),
        ref_gradients=found.ref_gradients,
        port_gradients=found.port_gradients,
        built_differently="is called differently" if found.complete else OTHER_INPUTS,
        complete=found.complete,
        is_turned=found.are_turned,
    )


def with_opposite_masks(attempt: Attempt) -> Attempt:
    """A library's layer may be told what is kept, where the reference's is told what is hidden: no fault of its own."""
    call = attempt.port_call
    given = map_tensors((call.args, call.kwargs), is_array, lambda a: ~a if a.dtype.kind == "b" else a)
    port_call = replace(call, args=given[0], kwargs=given[1])
    return replace(attempt, port_call=port_call, built_differently="takes masks that say the opposite")


def paired_outputs(
    ref: Sequence[np.ndarray], port: Sequence[np.ndarray], needed: Sequence[bool], may_be_turned: bool = False
) -> Pairs:
    """Pair by place and shape, else by value; all `needed`. `port` has one at least."""
    pairs: dict[int, tuple[int, np.ndarray]] = {}
    for i, array in enumerate(ref):
        same_shape = [j for j, other in enumerate(port) if other.shape == array.shape]
        same_value = [j for j in same_shape if alike([array], [port[j]])]
        for j in (same_value or same_shape)[:1] or range(len(port)):
            is_plain = same_value or same_shape and not may_be_turned
            places = _places(port[j]) if is_plain else _places_of(array, port[j])
            if places is None and same_shape:
                places = _places(port[j])
            if places is not None:
                pairs[i] = j, places
                break
    used = bool(pairs)
    for i in range(len(ref)):
        is_needed = needed[i] if any(needed) and i < len(needed) else not used
        if i not in pairs and is_needed:  # the comparison says what differs
            j = min(i, len(port) - 1)
            pairs[i] = j, _places(port[j])
    return dict(sorted(pairs.items()))


def _places(array: np.ndarray) -> np.ndarray:
    return np.arange(array.size).reshape(array.shape)


def _places_of(ref: np.ndarray, port: np.ndarray) -> np.ndarray | None:
    if ref.size != port.size:
        return None
    if alike([ref.ravel()], [port.ravel()]):
        return _places(ref)
    axes = exchanged_axes(port, ref)
    return _places_by_value(ref, port) if axes is None else _places(port).transpose(axes)


def _places_by_value(ref: np.ndarray, port: np.ndarray) -> np.ndarray | None:
    """Where each value is: an image's patches may be a video's voxels there."""
    order, port_order = (np.argsort(array, axis=None) for array in (ref, port))
    if not alike([ref.ravel()[order]], [port.ravel()[port_order]], EXACT):
        return None
    places = np.empty(ref.size, int)
    places[order] = port_order
    return places.reshape(ref.shape)


def part_of(ref: Sequence[np.ndarray], port: Sequence[np.ndarray]) -> tuple[slice, ...] | None:
    """Where in the only output the port's has its values, if it is cut off at one end of axes; else None."""
    if (
        len(ref) != 1
        or len(port) != 1
        or not port[0].size
        or ref[0].ndim != port[0].ndim
        or ref[0].shape == port[0].shape
    ):
        return None
    ways = [[slice(n)] if n == m else [slice(n), slice(m - n, m)] for m, n in zip_strict(ref[0].shape, port[0].shape)]
    return next((cut for cut in product(*ways) if alike([ref[0][cut]], [port[0]])), None)


def port_upstream(
    pairs: Pairs, upstream: Sequence[np.ndarray | None], port: Sequence[np.ndarray]
) -> list[np.ndarray | None]:
    sent: list[np.ndarray | None] = [None] * len(port)
    for i, (j, places) in pairs.items():
        gradient = upstream[i] if i < len(upstream) else None
        if gradient is not None and gradient.size == port[j].size and sent[j] is None:
            sent[j] = given = np.empty(port[j].shape, gradient.dtype)
            np.put(given, places, gradient)
    return sent


@dataclass(frozen=True)
class IsolatedRun:
    attempt: Attempt
    rows: list[Row]
    ref: Items
    port: Items
    port_run: Run

    @property
    def kinds(self) -> set[str]:
        return {row.item.kind for row in self.rows if row.status == FAIL}

    @property
    def wrong_outputs(self) -> list[Row]:
        return [row for row in self.rows if row.status == FAIL and row.item.kind == "output"]

    @property
    def is_late(self) -> bool:
        return self.kinds == {"gradient"}

    @property
    def has_other_shape(self) -> bool:
        return any(row.worst is None for row in self.wrong_outputs)

    def narrowed(self, kinds: Collection[str]) -> IsolatedRun:
        return replace(self, rows=[row for row in self.rows if row.status != FAIL or row.item.kind in kinds])

    @property
    def passed(self) -> bool:
        return not self.kinds

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Errors last; the plainest first unless another is far nearer."""
        # Without all its inputs, an error says nothing.
        raised = bool(self.port_run.trace.error) and self.attempt.complete
        outputs = [row for row in self.rows if row.item.kind == "output"]
        if not outputs or any(row.status == FAIL and row.worst is None for row in outputs):
            return raised, True, 0.0
        distance = max(row.difference / max(row.scale, 1e-300) for row in outputs)
        return raised, False, distance if self.attempt.built_differently else distance / FAR


@dataclass
class IsolatedRuns:
    """Isolated runs in one mode, fed from the reference's `calls`."""

    ref: Model
    port: BackendModel
    names: NameMap
    inputs: Inputs
    train: bool
    calls: Calls
    known_port_calls: Calls | None = None  # of its run in float64

    @cached_property
    def port_calls(self) -> Calls:
        if self.known_port_calls is not None:
            return self.known_port_calls
        return self.port.run(self.inputs, "float64", self.train, calls=True).trace.calls

    @cached_property
    def pairs_of_kinds(self) -> Mapping[Hashable, Mapping[str, tuple[ModuleCall, ModuleCall]]]:
        """{both sides' classes and shapes of inputs: {label: both sides' calls}} of those that are paired."""
        found: defaultdict[Hashable, dict[str, tuple[ModuleCall, ModuleCall]]] = defaultdict(dict)
        for label, port_label in self.names.calls.items():
            if label in self.calls and port_label in self.port_calls:
                pair = self.calls[label], self.port_calls[port_label]
                found[self._kind(*pair)][label] = pair
        return found

    def _kind(self, *pair: ModuleCall) -> Hashable:
        types = (model.modules[call.name].type for model, call in zip((self.ref, self.port), pair))
        return *types, *(tuple(array.shape for array in call.inputs) for call in pair)

    def forget(self) -> None:
        """Drop what whole models gave, but for the calls."""
        if self.port_calls:
            self.ref.forget()
            self.port.forget()

    def ref_items(self, attempt: Attempt, **changes: Any) -> dict[Item, np.ndarray]:
        module = attempt.question.module
        run = _not_lacking(self.ref.ask(replace(attempt.question, **changes)))
        keys = _keys_in(module, {key: key for key in self.names.tensors})
        inputs = _input_gradients(run, attempt, attempt.ref_gradients)
        return _items(self.ref, run, dict(enumerate(run.output)), module, keys, inputs)

    def run(self, label: str, dtype: str, backward: bool, adjusted: bool = True, lenient: bool = False) -> IsolatedRun:
        """In "float64" or "float32": the first attempt that passes, else the nearest.

        A `lenient` run moves inputs by a little, away from where an operation has a kink, and cuts off what the port's
        output has not.
        """
        call = adjusted_call(self.ref, self.calls[label], dtype) if adjusted else self.calls[label].with_upstream()
        call = moved_call(call) if lenient else call
        best: IsolatedRun | None = None
        lacking: list[IsolatedRun] = []
        for attempt in self._attempts(label, Question(call, dtype, self.train, backward)):
            found = self._attempted(attempt, lenient)
            if found.port_run.trace.lack:
                lacking.append(found)
            # Another way to call it would not change buffers alone.
            elif found.passed or found.kinds == {"buffer"}:
                return found
            elif best is None or found.rank < best.rank:
                best = found
        return best or lacking[0]

    def in_float64(self, run: IsolatedRun) -> IsolatedRun:
        """The same, asked in float64."""
        return self._attempted(replace(run.attempt, question=replace(run.attempt.question, dtype="float64")))

    def _attempts(self, label: str, question: Question) -> Iterator[Attempt]:
        """The plainest first; the port runs for its calls only then."""
        mapped = self.names.calls
        port_name = module_of(mapped[label])
        plain = Attempt(question, replace(question.call, name="" if port_name == OUTPUT else port_name))
        if not question.module or mapped[label] not in self.port_calls:
            yield plain
            return
        call, port_call = self.calls[label], self.port_calls[mapped[label]]
        same_kind = self.pairs_of_kinds[self._kind(call, port_call)]
        own = called_as_the_port_does(plain, call, port_call, [same_kind[each] for each in same_kind if each != label])
        yield replace(plain, complete=own.complete)
        yield own
        if self.port.is_of_library(port_call.name) and any(array.dtype.kind == "b" for array in own.port_call.inputs):
            yield with_opposite_masks(own)
        ref, port = self.ref.modules, self.port.modules
        behind, last = neighbours(ref, self.calls, label, set(mapped))
        port_behind, port_last = neighbours(port, self.port_calls, mapped[label], set(mapped.values()))
        for first in (plain, own):
            for chain in behind:
                word = f"has the {types_of(ref, chain)} behind it inside"
                yield replace(first, question=followed(question, chain), built_differently=word)
            for chain in port_behind:
                word = f"leaves to a {types_of(port, chain)} behind it what the reference's does itself"
                yield replace(first, port_followed_by=names_of(chain), built_differently=word)
        for chain in last:
            word = f"leaves out the {types_of(ref, chain)} at the end, which the port has elsewhere"
            yield replace(plain, question=followed(question, chain), built_differently=word)
        for chain in port_last:
            word = f"has a {types_of(port, chain)} at the end, which the reference has elsewhere"
            yield replace(plain, port_followed_by=names_of(chain), built_differently=word)

    def _attempted(self, attempt: Attempt, lenient: bool = False) -> IsolatedRun:
        try:
            return self._compared(attempt, lenient)
        except MachineError as error:  # it ends this attempt alone
            row = Row(Item("output 0", "output", attempt.question.module), NOT_JUDGED, reason=str(error))
            return IsolatedRun(attempt, [row], {}, {}, Run(Trace(lack=True)))

    def _compared(self, attempt: Attempt, lenient: bool) -> IsolatedRun:
        call = attempt.question.call
        module, upstream = call.name, call.upstream
        dtype, fp64_ref = attempt.question.dtype, self.ref_items(attempt, dtype="float64")
        is_rounded = dtype == "float32" and all(array.dtype.kind in "fc" for array in fp64_ref.values())
        ref = {item: to_precision(array, dtype) for item, array in fp64_ref.items()}
        if dtype == "float32" and not is_rounded:  # whole numbers may be others there
            ref = self.ref_items(attempt)
        port_run = self._run_port(attempt, upstream)
        if port_run.trace.error:
            return self._raised(attempt, ref, port_run)
        outputs = [array for item, array in ref.items() if item.kind == "output"]
        cut = part_of(outputs, port_run.output) if lenient else None
        if cut:
            item = Item("output 0", "output", module)
            outputs, upstream = [outputs[0][cut]], [None if each is None else each[cut] for each in upstream]
            ref[item] = outputs[0]
            port_run = self._run_port(attempt, upstream) if attempt.question.backward else port_run
        same_form = [array.shape for array in outputs] == [array.shape for array in port_run.output]
        sent, pairs = upstream, None
        if module and port_run.output and (attempt.is_turned or not same_form):  # the model must keep its form
            needed = [gradient is not None for gradient in upstream]
            pairs = paired_outputs(outputs, port_run.output, needed, attempt.is_turned)
            if pairs:
                attempt = replace(attempt, built_differently=attempt.built_differently or OTHER_FORM)
            if attempt.question.backward:
                sent = port_upstream(pairs, upstream, port_run.output)
                port_run = self._run_port(attempt, sent)
            for i in set(range(len(outputs))) - set(pairs):
                del ref[Item(f"output {i}", "output", module)]

        def port_items(run: Run) -> dict[Item, np.ndarray]:
            given = dict(enumerate(run.output))
            if pairs is not None:
                given = {i: np.asarray(run.output[j].ravel()[places]) for i, (j, places) in pairs.items()}
            keys = _keys_in(attempt.port_call.name, self.names.tensors)
            inputs = _input_gradients(run, attempt, attempt.port_gradients)
            found = _items(self.ref, run, given, module, keys, inputs)
            return without_optional(found, ref, self.port)

        def again(dtype: str, perturbation: int = 0) -> Items:
            is_known = dtype == "float64" and not perturbation
            return fp64_ref if is_known else self.ref_items(attempt, dtype=dtype, perturbation=perturbation)

        def constants_moved() -> list[Distances]:
            found: list[Distances] = []
            if self.ref.float32_data:
                found.append(moved_distances(ref, self.ref_items(attempt, perturbation=CONSTANTS)))
            if self.port.float32_data:
                found.append(moved_distances(port, port_items(self._run_port(attempt, sent, CONSTANTS))))
            return found

        port = port_items(port_run)
        ruler = Ruler.measured(
            ref,
            dtype,
            again,
            is_rounded,
            rounded=constants_moved,
            input_scales={call.name: call.scale},
            upstream_scale=max((largest(array) for array in upstream if array is not None), default=0.0),
        )
        return IsolatedRun(attempt, ruler.compare(port).rows, ref, port, port_run)

    def _raised(self, attempt: Attempt, ref: Items, port_run: Run) -> IsolatedRun:
        """In the backward pass, if the forward pass agrees without it."""
        module, late = attempt.question.module, bool(port_run.output) and attempt.question.backward
        if late:
            forward = self._attempted(replace(attempt, question=replace(attempt.question, backward=False)))
            if not forward.passed:
                return forward
        item = Item("input 0", "gradient", module) if late else Item("output 0", "output", module)
        row = Row(item, FAIL, reason=f"the port's module raised {port_run.trace.error}")
        return IsolatedRun(attempt, [row], ref, {}, port_run)

    def _run_port(self, attempt: Attempt, upstream: list[np.ndarray | None], perturbation: int = 0) -> Run:
        call = replace(attempt.port_call, upstream=upstream)
        asked = replace(attempt.question, call=call, followed_by=attempt.port_followed_by, perturbation=perturbation)
        return _not_lacking(self.port.ask(asked))


def _not_lacking(run: Run) -> Run:
    if run.trace.lack:
        raise MachineError(run.trace.error)
    return run


def all_questions(ref: Model, calls: Calls, label: str, question: Question) -> Iterator[Question]:
    """All that `IsolatedRuns.run` may ask about one call, each way's float64 run first."""
    behind, last = neighbours(ref.modules, calls, label) if question.module else ([], [])
    for way in (question, *(followed(question, chain) for chain in (*behind, *last))):
        yield from (replace(way, dtype=dtype) for dtype in UNIT_ROUNDOFF)  # float64 first
        yield from (replace(way, perturbation=i) for i in range(1, RUNS + 1))
        if way.dtype == "float64" and ref.rounded_constants():
            yield replace(way, perturbation=CONSTANTS)


def without_optional(port: Items, ref: Items, model: Model) -> dict[Item, np.ndarray]:
    """What the port gave, without buffers that `ref` lacks.

    A part of a joined tensor has a gradient of zeros where the other side's, by itself, has none.
    """

    def may_be_zeros(item: Item) -> bool:
        return item.kind == "gradient" and (model.zeros_for_none or item.name in model.parts)

    def is_needed(item: Item) -> bool:
        is_zero = may_be_zeros(item) and not largest(port[item])
        return item in ref or not (item.kind == "buffer" or is_zero)  # a frozen parameter is one, too

    missing = (item for item in ref.keys() - port.keys() if item.name in model.parts and item.kind == "gradient")
    zeros = {item: np.zeros_like(ref[item]) for item in missing if not largest(ref[item])}
    return {item: array for item, array in port.items() if is_needed(item)} | zeros


def adjusted_call(ref: Model, call: ModuleCall, dtype: str) -> ModuleCall:
    """Inputs that show more: padding rows for an embedding, nothing at a kink; with drawn upstream gradients."""
    call = call.with_upstream()
    x = call.args[0] if call.args else None
    if not isinstance(x, np.ndarray):
        return call
    module = ref.modules[call.name]
    if module.kind == "Embedding":
        # Normalized it has another name; tied, its slot is elsewhere.
        rows, ids = max((s.shape[0] for s in module.slots.values() if not s.is_buffer), default=0), x.flatten()
        may_be_padding = [row for row in dict.fromkeys((0, 1, rows - 1)) if row < rows and row not in ids][: ids.size]
        ids[: len(may_be_padding)] = may_be_padding
        x = ids.reshape(x.shape)
    elif dtype == "float32":
        x = off_kinks(x, module.type)
    return replace(call, args=(x, *call.args[1:]))


def moved_call(call: ModuleCall) -> ModuleCall:
    """Its inputs of floats, each value by up to 1e-3 of the largest."""
    rng = np.random.default_rng(0)

    def nudged(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f" or not largest(array) < LARGE:
            return array
        return array + (rng.uniform(-1e-3, 1e-3, array.shape) * largest(array)).astype(array.dtype)

    args, kwargs = map_tensors((call.args, call.kwargs), is_array, nudged)
    return replace(call, args=args, kwargs=kwargs)


def _keys_in(module: str, own: Mapping[str, str]) -> dict[str, str]:
    """{key in `module`: reference's}; `own` is {reference's key: own}."""
    prefix = f"{module}." if module else ""
    return {key.removeprefix(prefix): ref_key for ref_key, key in own.items() if key.startswith(prefix)}


def _input_gradients(run: Run, attempt: Attempt, own: InputGradients | None) -> dict[Item, np.ndarray]:
    call, found = attempt.question.call, dict[Item, np.ndarray]()
    shapes = [array.shape for array in call.inputs] if own else call.float_shapes
    for i, array in enumerate(run.input_gradients):
        parts = {} if array is None else own.of(i, array) if own else {i: array}
        for place, part in parts.items():
            shape = shapes[place]
            gradient = projected(part.reshape(shape) if part.size == np.prod(shape) else part)  # or recorded so
            item = Item(f"input {place}", "gradient", call.name, projected=is_projected(shape))
            found[item] = found[item] + gradient if item in found else gradient
    return found


def _items(
    ref: Model, run: Run, outputs: Mapping[int, np.ndarray], module: str, keys: Mapping[str, str], inputs: Items
) -> dict[Item, np.ndarray]:
    """Either side's, by names of the reference, with the gradients of `inputs`."""
    of_tensors = {keys[key]: array for key, array in run.gradients.items() if key in keys}
    return {
        **{Item(f"output {i}", "output", module): array for i, array in outputs.items()},
        **{tensor_item(keys[key], "buffer"): array for key, array in run.buffers.items() if key in keys},
        **inputs,
        **ref.compared_gradients(of_tensors),
    }


def isolated_modules(
    runs: IsolatedRuns, dtype: str, is_asked: Callable[[str], bool]
) -> Iterator[tuple[str, IsolatedRun]]:
    """(label, run) of each module that `is_asked`, has an upstream gradient and runs alone, last first."""
    calls = runs.calls
    for label in sorted(runs.names.calls.keys() & calls.keys(), key=lambda label: -calls[label].start):
        if label not in runs.ref.not_alone and has_upstream(calls[label]) and is_asked(label):
            yield label, runs.run(label, dtype, backward=True)


def has_upstream(call: ModuleCall) -> bool:
    """Whether a gradient came back to an output of the call."""
    return any(bits is not None for bits in call.reached)
