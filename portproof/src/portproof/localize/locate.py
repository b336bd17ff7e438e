"""Find the first module of a port that is wrong on the reference's own inputs, and say where it is.

Modules run isolated (see isolated.py). A faulty block whose layers are right has its
fault in its own code.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.arrays import largest_difference
from portproof.backends.model import BackendModel, Model
from portproof.backends.question import Cotangents, Question, Run
from portproof.backends.trace import CALLS, OUTPUT, UPSTREAM, Inputs, ModuleCall, is_array, map_tensors
from portproof.compare import FAIL, Item, Items, Row, compare, tensor_item
from portproof.compare.accepted import NOTHING, Accepted
from portproof.localize.isolated import (
    AT_KINKS,
    MORE_VALUES,
    OTHER_FORM,
    OTHER_INPUTS,
    OTHER_ROWS,
    Attempt,
    IsolatedRun,
    IsolatedRuns,
    has_upstream,
)
from portproof.localize.own_code import Places, places_in_code, prefix_of
from portproof.mapping.agreement import alike, alike_in_any_order
from portproof.mapping.arguments import are_fed_alike
from portproof.mapping.module_calls import EXACT
from portproof.mapping.name_map import NameMap

if TYPE_CHECKING:
    from portproof.localize.layers import Layer

OTHER_VALUES = "gives other values, of which nothing comes"
BIASED = "the running variance is the biased one"
HOW_TO_GO_ON = (
    "PaddlePaddle's batch norm does so: take one that divides by n - 1, or accept it, --accept '*.running_var: REASON'"
)
KINDS = frozenset({"output", "gradient", "buffer"})  # of items in an isolated run


@dataclass(frozen=True)
class Location:
    name: str  # the reference's; "" is the model
    type: str
    phase: str  # "structure", "weights", "forward", "buffers", "backward", "dropout" or "buffers as built"
    port_name: str = ""
    port_type: str = ""
    row: Row | None = None  # the comparison that proves it
    proof: list[str] = field(default_factory=list)
    diagnosis: list[str] = field(default_factory=list)  # causes, in words
    tree: list[str] = field(default_factory=list)
    also: list[Location] = field(default_factory=list)  # further faults
    built_differently: Mapping[str, str] = field(default_factory=dict)  # {label: in what}
    own_class: tuple[str, str] = "", ""  # (name, file and line) of the port's, see `Model.own_class`

    def lines(self) -> list[str]:
        port = f", the port's {self.port_name or 'model'} ({self.port_type})" if self.port_type else ""
        lines = [f"located: {self.name or 'the model itself'} ({self.type}){port}: {self.phase}"]
        lines += [f"  {line}" for line in self.proof]
        lines += [f"  cause, tested: {text}" for text in self.diagnosis]
        lines += [f"  {HOW_TO_GO_ON}" for text in self.diagnosis if BIASED in text]
        lines += [f"  {line}" for line in self.tree]
        lines += ["the port's {} is in {}".format(*self.own_class)] if self.own_class[1] else []
        return lines + [f"also at fault by itself: {line}" for line in _by_kind(self.also)]

    def summary(self) -> list[str]:
        """One line per kind of fault, with its first module."""
        return _by_kind([self, *self.also])


def _by_kind(locations: Iterable[Location]) -> list[str]:
    groups = defaultdict(list)
    for location in locations:
        groups[location.type, location.phase, tuple(location.diagnosis)].append(location.name)
    lines = []
    for (layer, phase, diagnosis), names in groups.items():
        more = f" and {len(names) - 1} more of that kind" if len(names) > 1 else ""
        why = f": {'; '.join(diagnosis)}" if diagnosis else ""
        lines.append(f"{names[0] or 'the model itself'} ({layer}){more}: {phase}{why}")
    return lines


def module_tree(model: Model, marked: str) -> list[str]:
    """Its ancestors with all their children, the rest folded."""
    parts = marked.split(".")
    ancestors = {".".join(parts[:n]) for n in range(len(parts))}  # "" is the model itself
    lines = []
    for name, module in model.modules.items():
        parent, _, last = name.rpartition(".")
        if name and parent not in ancestors:
            continue
        depth = name.count(".") + 1 if name else 0
        mark = "   <--- HERE" if name == marked else ""
        lines.append(f"{'  ' * depth}{last or 'model'} ({module.type}){mark}")
    return lines


def locate(
    ref: Model,
    port: BackendModel,
    names: NameMap,
    inputs: Inputs,
    *,
    modes: Mapping[bool, Collection[str]] | None = None,
    cotangents: Cotangents | None = None,
    dtype: str = "float64",
    accepted: Accepted = NOTHING,
) -> Location | None:
    """The first module that is at fault itself, or None. Further ones are in its `also`.

    `modes` is {train mode: kinds of items known to differ in the model, if any};
    default: both. Each is searched forward, then backward from its `cotangents`, in
    the precision `dtype` of the difference; `accepted` buffers are no fault. Misfits and
    unequal weights come first: with them nothing can be compared.
    """
    location = _structural(ref, port, names) if names.problems else _unequal_weights(ref, port, names)
    if location:
        return location
    found: list[Location] = []
    built_differently: dict[str, str] = {}
    for train, kinds in ({False: (), True: ()} if modes is None else modes).items():
        cotangent = cotangents[train] if cotangents else None
        calls = ref.ask(Question.of_model(inputs, "float64", train, cotangent, UPSTREAM)).trace.calls
        known = {(one.name, one.phase) for one in found}
        faulty = [name for name, phase in known if phase == "forward"]
        runs = IsolatedRuns(ref, port, names, inputs, train, calls)
        search = _Search(runs, cotangents is not None, dtype, faulty, built_differently, accepted)
        found += [one for one in search.faults(kinds) if (one.name, one.phase) not in known]
        built_differently |= search.built_differently
    return replace(found[0], also=found[1:], built_differently=built_differently) if found else None


class _Search:
    """From the whole model inwards: what agrees alone holds no fault."""

    def __init__(
        self,
        runs: IsolatedRuns,
        backward: bool,
        dtype: str,
        faulty: Collection[str],
        different: Mapping[str, str],
        accepted: Accepted,
    ) -> None:
        """`faulty` names and `different` labels are another mode's; the faulty are not run again."""
        self.runs = runs
        self.backward, self.dtype = backward, dtype
        self.calls, self.mapped = runs.calls, runs.names.calls
        self.faulty, self.different, self.accepted = faulty, different, accepted
        self.built_differently: dict[str, str] = {}  # {label: in what}
        self.found: dict[str, IsolatedRun] = {}
        self.excused: dict[str, IsolatedRun] = {}  # at fault only if nothing else is
        self.partly: list[IsolatedRun] = []  # of blocks of which some outputs agree, and others differ
        modules = runs.ref.modules.values()
        self.with_buffers = [each.name for each in modules if any(slot.is_buffer for slot in each.slots.values())]
        self.inside: dict[str, list[str]] = defaultdict(list)  # by the mapped call around
        for label in self.calls:  # blocks come after their layers
            if label in self.mapped and label != OUTPUT:
                around = self.calls[label].inside
                while around != OUTPUT and around not in self.mapped:
                    around = self.calls[around].inside
                self.inside[around].append(label)

    def faults(self, differing: Collection[str]) -> list[Location]:
        """Every module at fault, forward first; `differing` kinds are known of the model."""
        if differing:
            if "output" in differing and len(self.calls[OUTPUT].outputs) > 1:
                self._note_partly(self._run(OUTPUT))
            self._search_around(OUTPUT, set(differing), KINDS)
        else:
            self._search(OUTPUT)
        whole = self.found.get(OUTPUT)
        if differing and len(self.found) == bool(whole) and (not whole or whole.is_late or whole.has_other_shape):
            is_late = "gradient" in differing if whole is None else whole.is_late
            excused = {label: run for label, run in self.excused.items() if run.is_late == is_late}
            self.found = excused or self.found
            self.built_differently = {k: word for k, word in self.built_differently.items() if k not in self.found}
        forward = [label for label in self.calls if label in self.found and not self.found[label].is_late]
        late = [label for label, run in self.found.items() if run.is_late]
        late.sort(key=lambda label: -self.calls[label].start)
        locations: dict[str, Location] = {}
        for label in (*forward, *late):
            name = self.calls[label].name
            if name not in locations:  # it may be called several times
                locations[name] = _location(self.runs, self.found.pop(label))
        return list(locations.values())

    def _search(self, label: str, kinds: Collection[str] = KINDS) -> bool:
        """Whether a forward fault was found at `label` or inside.

        Only `kinds` in which the block around differs count: the rest is no fault.
        """
        if self._holds_faulty(label):
            self._search_inside(label, KINDS)
            return True
        if label in self.runs.ref.not_alone:
            return self._search_inside(label, KINDS)
        if self.different.get(label) == OTHER_VALUES:
            kinds = {"buffer"}
        elif kinds == {"buffer"} and not self._has_buffers(label) and self._agrees(label):
            return False
        every = self._run(label, backward=kinds != {"buffer"})
        if (every.is_late or every.has_other_shape) and self._is_excused(label):
            self.built_differently[label] = AT_KINKS if every.is_late else MORE_VALUES
            self.excused[label] = every
            return False
        in_float64 = self.dtype == "float64"  # a recording knows no other run of what it gets
        if every.wrong_outputs and in_float64 and self._agrees(label) and self._run(label, adjusted=False).passed:
            self.built_differently[label] = OTHER_ROWS
            self.excused[label] = every
            return False
        if self._is_undone(label, every) or self._is_completed(label, every):
            self.built_differently[label] = OTHER_VALUES
            return False
        if every.wrong_outputs and self._agrees_if_fed_otherwise(label):
            self.built_differently[label] = OTHER_INPUTS
            return self._search_inside(label, KINDS)
        self._note_partly(every)
        run, word = every.narrowed(kinds), every.attempt.built_differently
        is_complete = every.attempt.complete
        if not is_complete:
            self.built_differently[label] = word or OTHER_INPUTS
        elif "output" not in run.kinds and (word or "output" in every.kinds):
            self.built_differently[label] = word or OTHER_VALUES
        # With a constant of float32 in it, limits are wide enough for a layer's fault.
        is_proved = not any(row.widened_by == "rounded" for row in run.rows)
        if run.passed and is_proved and self._judges_gradients(label):
            self._note_inside(label)
            return False
        if run.passed:
            return self._search_inside(label, KINDS)
        differing = run.kinds
        known = None if self.inside[label] else run
        del run, every  # frees its arrays
        if is_complete:
            return self._search_around(label, differing, kinds, known)
        return self._search_inside(label, differing)

    def _search_around(
        self, label: str, differing: set[str], kinds: Collection[str], run: IsolatedRun | None = None
    ) -> bool:
        """`_search` of a known difference; without `run` it is run again."""
        before = len(self.found)
        inside = self._search_inside(label, differing)
        # It may tell of a wrong value that stays inside.
        if differing == {"buffer"} and len(self.found) == before:
            inside = self._search_inside(label, KINDS)
        late = differing == {"gradient"}
        is_here = len(self.found) == before if late else not inside
        if is_here and not self._holds_faulty(label):
            run = run or self._run(label).narrowed(kinds)
            if not run.passed:  # its inputs may not be the model's
                self.found[label] = run
        return inside or not late

    def _judges_gradients(self, label: str) -> bool:
        """In float32 only of layers: a branch flip by rounding moves a block's by a percent."""
        return self.dtype == "float64" or self.runs.ref.modules[self.calls[label].name].is_leaf

    def _is_excused(self, label: str) -> bool:
        return not self.runs.ref.is_recorded and self._run(label, lenient=True).passed

    def _run(self, label: str, lenient: bool = False, backward: bool = True, adjusted: bool = True) -> IsolatedRun:
        backward = backward and self.backward and self._judges_gradients(label) and has_upstream(self.calls[label])
        run = self.runs.run(label, self.dtype, backward, adjusted, lenient)
        # An accepted buffer is no fault; an accepted output spreads, and is left out in the end.
        rows = [row for row in run.rows if row.item.kind != "buffer" or not self.accepted.covers("", row)]
        return replace(run, rows=rows)

    def _search_inside(self, label: str, kinds: Collection[str]) -> bool:
        if self.inside[label]:
            self.runs.forget()
        found = [self._search(other, kinds) for other in self.inside[label]]  # all of them
        return any(found)

    def _holds_faulty(self, label: str) -> bool:
        prefix = prefix_of(self.calls[label].name)
        return any(f"{other}.".startswith(prefix) for other in self.faulty)

    def _note_partly(self, run: IsolatedRun) -> None:
        agrees = {row.status != FAIL for row in run.rows if row.item.kind == "output"}
        self.partly += [run] if agrees == {False, True} else []

    def _is_undone(self, label: str, run: IsolatedRun) -> bool:
        """Whether code outside undoes what differs, such as logits that become probabilities there.

        That is so if the port's outputs in place of the reference's, each by itself, would change what agrees.
        """
        name, wrong = self.calls[label].name, run.wrong_outputs
        around = [block for block in self.partly if f"{name}.".startswith(prefix_of(block.attempt.question.module))]
        if not wrong or not around or run.has_other_shape or self.runs.ref.is_recorded:
            return False
        return all(
            any(self._would_change(block, label, row.item, run.port[row.item]) for block in around) for row in wrong
        )

    def _is_completed(self, label: str, run: IsolatedRun) -> bool:
        """Whether code around it in the port makes the reference's values of what it gives, such as a tanh of scores.

        That is so if they are among those of this code where the port's module is given what it takes.
        """
        port, port_call = self.runs.port, self._port_call(label)
        around = self.runs.port_calls.get(port_call.inside) if port_call else None
        if not run.wrong_outputs or self.dtype == "float32" or port_call is None or around is None or around.number:
            return False
        given, backend, calls = run.attempt.port_call, port.backend, 0
        inside = port_call.name.removeprefix(prefix_of(around.name))
        own = map_tensors((given.args, given.kwargs), is_array, lambda array: backend.tensor(array, port.device))
        left = []
        for row in run.wrong_outputs:
            array = run.ref[row.item]
            if any(alike_in_any_order([array], [each], EXACT) for each in given.inputs):
                return False  # what it takes may be known there for another reason
            own_array = run.port.get(row.item)  # none, if it raises
            # The order of axes or values is a fault, unless code outside puts it right.
            is_reordered = own_array is not None and alike_in_any_order([array], [own_array], EXACT)
            left.append(partial(alike if is_reordered else alike_in_any_order, [array], tolerance=EXACT))

        def give(_module: Any, _args: Any, _kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return own if calls == port_call.number + 1 else None

        def with_its_inputs(module: Any) -> Any:
            parts = dict(backend.layers.named_modules(module))
            if inside in parts:  # a module under two names has one of them, maybe outside of the block
                backend.runs.hook_before(parts[inside], give)
            return module

        def take(value: np.ndarray) -> bool:
            if calls == port_call.number + 1:  # behind this call, before the next one
                left[:] = [is_made for is_made in left if not is_made([value])]
            return True

        port.follow(Question(around, "float64", self.runs.train, mutation=with_its_inputs), take)
        return not left

    def _would_change(self, block: IsolatedRun, label: str, item: Item, array: np.ndarray) -> bool:
        """Whether what agrees of the block's outputs would not, with this array as the reference's output inside."""
        ref, question = self.runs.ref, block.attempt.question
        assert isinstance(ref, BackendModel)
        place, backend, calls = int(item.name.removeprefix("output ")), ref.backend, count()
        inside = self.calls[label].name.removeprefix(prefix_of(question.module))

        def put(_module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
            if next(calls) != self.calls[label].number:
                return output
            own = backend.tensor(array, ref.device)
            given = count()
            return map_tensors(output, backend.framework.is_tensor, lambda each: own if next(given) == place else each)

        def with_array(module: Any) -> Any:
            parts = dict(backend.layers.named_modules(module))
            if inside in parts:  # a module under two names has one of them, maybe outside of the block
                backend.runs.hook_after(parts[inside], put)
            return module

        changed = ref.ask(replace(question, backward=False, mutation=with_array)).output  # none, if it raises
        outputs = {Item(f"output {i}", "output", question.module): each for i, each in enumerate(changed)}
        right = [row for row in block.rows if row.status != FAIL and row.item in outputs]
        pairs = [(outputs[row.item], block.ref[row.item], row.atol) for row in right]
        return any(a.shape == b.shape and largest_difference(a, b) > atol for a, b, atol in pairs)

    def _has_buffers(self, label: str) -> bool:
        name = self.calls[label].name
        return any(f"{each}.".startswith(prefix_of(name)) for each in self.with_buffers)

    def _note_inside(self, label: str) -> None:
        call, port_call = self.calls[label], self._port_call(label)
        if port_call is None:
            return
        if [array.shape for array in call.outputs] != [array.shape for array in port_call.outputs]:
            self.built_differently.setdefault(label, OTHER_FORM)
        agrees = self._agrees(label)
        for other in self.inside[label]:
            if agrees and not self._agrees(other):
                self.built_differently.setdefault(other, OTHER_VALUES)
            self._note_inside(other)

    def _agrees(self, label: str) -> bool:
        port_call = self._port_call(label)
        return port_call is not None and alike(self.calls[label].outputs, port_call.outputs, EXACT)

    def _agrees_if_fed_otherwise(self, label: str) -> bool:
        """Whether it gives the reference's values in the port, which feeds it something else: what it takes, then."""
        port_call = self._port_call(label)
        return port_call is not None and self._agrees(label) and not are_fed_alike(self.calls[label], port_call)

    def _port_call(self, label: str) -> ModuleCall | None:
        return self.runs.port_calls.get(self.mapped[label])


def _location(runs: IsolatedRuns, run: IsolatedRun) -> Location:
    question, port_call = run.attempt.question, run.attempt.port_call
    name, backward = question.module, run.is_late
    failed = [row for row in run.rows if row.status == FAIL and (row.item.kind == "gradient") == backward]
    ref, port = runs.ref.modules[name], runs.port.modules[port_call.name]
    phase = {"output": "forward", "gradient": "backward", "buffer": "buffers"}[failed[0].item.kind]
    inner: Run | None = None
    values: list[np.ndarray] = []
    if phase == "forward" and not (ref.is_leaf and runs.ref.is_recorded) or not ref.is_leaf:
        call = runs.calls[question.call.label]
        inner, values = runs.ref.ask_with_values(Question(call, "float64", runs.train, keeps=CALLS))
    what = "inputs, drawn gradients sent back" if backward else "inputs"
    where = f"the reference's own {what}, {'train' if runs.train else 'eval'} mode, {question.dtype}"
    places = places_in_code(runs, run, inner, values) if phase == "forward" else Places()
    if phase == "buffers":  # the port may keep it in another module
        item = failed[0].item
        places = Places([], item.module, runs.names.tensors[item.name].rpartition(".")[0])
    narrowed = (places.ref or places.port) and (places.ref, places.port) != (name, port.name)
    which = "alone," if not narrowed else f"{name}, alone," if name else "the whole model,"
    proof = [f"{which} on {where}: {failed[0].name} differs", *numbers(failed[0]), *places.lines]
    if narrowed:
        name, ref, port = places.ref, runs.ref.modules[places.ref], runs.port.modules[places.port]
    if not ref.is_leaf:
        proof += [
            f"its {key} is {port.settings[key]!r}, the reference's {value!r}"
            for key, value in ref.settings.items()
            if key in port.settings and port.settings[key] != value
        ]
    if phase != "buffers" and question.backward:
        call = replace(port_call, upstream=question.call.upstream)
        proof += runs.port.wrong_gradients(replace(question, call=call, followed_by=run.attempt.port_followed_by))
    proof += _less_exact_in_float32(runs, run, failed[0])
    left = [other for other in runs.ref.not_alone if other.startswith(prefix_of(name))]
    if left:
        proof.append(f"not run alone, and what differs may begin there: {', '.join(left)}")
    diagnosis = []
    if not run.port_run.trace.error:
        from portproof.localize.diagnosis import FaultyModule, diagnose  # imports SciPy

        outputs = inner.trace.outputs.items() if inner and not ref.is_leaf else ()
        inner_outputs = {inside: array for inside, array in outputs if not inside.startswith("output")}
        layer, is_here = _layer(runs, run), isinstance(runs.ref, BackendModel) and runs.ref.backend.name == "torch"
        mutated = _mutated(runs, run.attempt, backward) if is_here else []
        differing = [row.item for row in failed]
        tensors, slots = runs.names.tensors, runs.port.slots
        frozen = [item for item in differing if item.name in tensors and not slots[tensors[item.name]].trained]
        diagnosis = diagnose(FaultyModule(layer, run.ref, run.port, differing, inner_outputs, mutated, frozen))
        if layer.needs_the_reference and not is_here and not diagnosis:
            proof.append(f"causes not tried: those of a {layer.kind} that need torch and the reference")
    tree = module_tree(runs.ref, name)
    on_port, own = (port.name, port.type), runs.port.own_class(port.name)
    return Location(name, ref.type, phase, *on_port, failed[0], proof, diagnosis, tree, own_class=own)


def _less_exact_in_float32(runs: IsolatedRuns, run: IsolatedRun, row: Row) -> list[str]:
    """In words, that a layer of the port's framework is far from its own float64, which is the reference's."""
    port, layer = runs.port, runs.port.modules[run.attempt.port_call.name]
    if run.attempt.question.dtype != "float32" or not port.is_of_library(layer.name) or run.port_run.trace.error:
        return []
    exact = runs.in_float64(run)
    if not exact.passed or row.item not in exact.port:
        return []
    distance = largest_difference(run.port[row.item], exact.port[row.item])
    if distance < row.difference / 2:
        return []
    where = f"{port.backend.name} {port.backend.framework.__version__}, {layer.type}"
    its = f"in float32 its {row.item.name} is {distance:.1e} off its own float64, which agrees with the reference's"
    return [f"the framework's operation differs ({where}): {its}"]


def _layer(runs: IsolatedRuns, run: IsolatedRun) -> Layer:
    from portproof.localize.layers import Layer

    question, modules, arrays = run.attempt.question, runs.ref.modules, runs.ref.arrays(runs.train)
    module = modules[question.module]
    tensors = {leaf: arrays[slot.key] for leaf, slot in module.slots.items()}
    output = run.ref.get(Item("output 0", "output", module.name))
    behind = tuple(modules[name].type for name in question.followed_by)
    return Layer(module, runs.train, tensors, question.call.inputs, output, behind)


def _mutated(runs: IsolatedRuns, attempt: Attempt, backward: bool) -> list[tuple[str, Callable[[], Items]]]:
    """Candidates of the reference's own module."""
    from portproof.localize.mutations import mutations  # imports torch

    call = attempt.question.call
    found: list[tuple[str, Callable[[], Items]]] = []
    assert isinstance(runs.ref, BackendModel)
    with suppress(Exception), runs.ref.lent(call.name, "float32", runs.train) as module:
        for text, mutation in mutations(module, call.inputs):
            found.append((text, partial(runs.ref_items, attempt, backward=backward, mutation=mutation)))
    return found


def numbers(row: Row) -> list[str]:
    if row.reason:
        return [row.reason]
    assert row.worst is not None
    return [
        f"max|d| {row.difference:.1e}, limit {row.atol:.1e}, outside {row.worst.outside} of {row.worst.size}",
        f"worst{row.place}: reference {row.worst.ref!r}, port {row.worst.port!r}",
    ]


def _structural(ref: Model, port: Model, names: NameMap) -> Location:
    item, reason = next(iter(names.problems.items()))
    name = item.removeprefix("port's ")
    model = ref if name == item else port
    module = name if name in model.modules else name.rpartition(".")[0]
    at_port = ("", "")
    if model is port:
        at_port = module, port.modules[module].type
        module = counterpart_or_block(module, names)
    tree = module_tree(ref, module)
    proof, own = [f"{item}: {reason}"], port.own_class(at_port[0])
    return Location(module, ref.modules[module].type, "structure", *at_port, proof=proof, tree=tree, own_class=own)


def counterpart_or_block(port_name: str, names: NameMap) -> str:
    """For a module that only the port has: the block that its neighbours share."""
    modules = {mapped: name for name, mapped in names.modules.items()}
    if port_name in modules:
        return modules[port_name]
    while port_name:
        port_name = port_name.rpartition(".")[0]
        beside = [name for mapped, name in modules.items() if mapped.startswith(prefix_of(port_name))]
        if beside:
            shared = os.path.commonprefix([name.split(".") for name in beside])
            return ".".join(shared[: beside[0].count(".")])  # not the neighbour itself
    return ""


def _unequal_weights(ref: Model, port: Model, names: NameMap) -> Location | None:
    ref_arrays, port_arrays = ref.arrays(), port.arrays()
    for key, port_key in names.tensors.items():
        ref_array, port_array = ref_arrays[key], port_arrays[port_key]
        if np.array_equal(ref_array, port_array):
            continue
        name, _, leaf = key.rpartition(".")
        module, counterpart = ref.modules[name], port.modules[port_key.rpartition(".")[0]]
        item = tensor_item(key, "weights")
        row = compare({item: ref_array}, {item: port_array.astype(ref_array.dtype)}, {item: 0.0}).rows[0]
        diagnosis = [text for text, array in _loading_mistakes(ref_arrays, key) if np.array_equal(array, port_array)]
        proof = [f"its {leaf} is not the reference's: {key}", *numbers(row)]
        on_port = counterpart.name, counterpart.type
        return Location(name, module.type, "weights", *on_port, row, proof, diagnosis[:3], module_tree(ref, name))
    return None


def _loading_mistakes(arrays: Mapping[str, np.ndarray], key: str) -> Iterator[tuple[str, np.ndarray]]:
    array = arrays[key]
    yield "it holds zeros: it was not loaded", np.zeros_like(array)
    yield "it holds ones: it was not loaded", np.ones_like(array)
    if array.ndim == 2:
        yield "it is not transposed (Paddle keeps a linear weight as in x out)", np.ascontiguousarray(array.T)
    if array.ndim == 4:
        yield "its kernels are turned by 180 degrees", array[:, :, ::-1, ::-1]
        yield "height and width of its kernels are exchanged", array.swapaxes(2, 3)
        yield "its input and output channels are exchanged", array.swapaxes(0, 1)
    if array.dtype.kind == "f":
        yield "it went through float16", array.astype(np.float16).astype(array.dtype)
    for other, value in arrays.items():
        if other != key and value.shape == array.shape:
            yield f"it holds the reference's {other}", value
