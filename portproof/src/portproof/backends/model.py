"""A model of any framework as comparisons use it: modules, weights and runs, as arrays."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.arrays import Storage, is_projected, let_go, projected, same_bits
from portproof.backends.draws import Draws, lent_to_python
from portproof.backends.lent import as_it_was, owned_tensors, patched, taking_gradients
from portproof.backends.masks import Dropped
from portproof.backends.own_code import Followed, between_children, place_of_class
from portproof.backends.question import CONSTANTS, Cotangents, Memory, Question, Run, perturbed, to_precision
from portproof.backends.slots import Module, Named, Slot, describe, read_slots
from portproof.backends.trace import (
    CALLS,
    OUTPUT,
    OUTPUTS,
    Inputs,
    MaybeArray,
    Trace,
    is_array,
    map_tensors,
    plain_at,
    tensors_at,
    tracing,
)
from portproof.compare import Item, tensor_item
from portproof.compare.ruler import is_rounded, moved_by_rounding
from portproof.io.process import count_pass
from sturdyio.cli import MachineError, UserError, one_line, user_code

if TYPE_CHECKING:
    from portproof.backends.base import Backend
    from portproof.mapping.fingerprint import Fingerprint


SEED = 0  # of the random generators in every run
PASSES_SIX = "above 6, where a ReLU6 ends"  # a branch that only the other activation has
LARGE = 2**25  # weights: those of a larger model, and what its runs give, go to temporary files


class Model:
    """One side of a pair: its modules, weights and answers.

    Weights are arrays by state_dict key, in PyTorch's layout. Of tied tensors only the first is listed.
    """

    role: str  # "reference" or "port", for messages
    modules: dict[str, Module]  # by dotted name; "" is the model
    zeros_for_none = False  # unused parameters get gradients of zeros
    parts: Collection[str] = ()  # the reference's tensors that are, on either side, parts of joined ones
    is_recorded = False  # answers come from a recording
    not_alone: Mapping[str, str] = MappingProxyType({})  # {call: why it cannot be run alone}
    cotangents: Cotangents | None = None  # the recording's own
    fingerprint: Fingerprint | None = None  # the recording's own

    def __init__(self, role: str, modules: Mapping[str, Module], values: Mapping[str, np.ndarray]) -> None:
        """`values` are all parameters and buffers, saved or not, by state_dict key."""
        self.role = role
        self._whole = modules
        self._whole_slots = {slot.tensor: slot for module in modules.values() for slot in module.slots.values()}
        self._values = dict(values)
        self.in_train: dict[str, np.ndarray] = {}  # values of train mode, where they differ
        self.branches: dict[str, dict[str, bool]] = {}  # {mode: {branch: entered}}, see branches.py
        self.float32_data: Collection[str] = ()  # rounded constants that the other side does not hold
        self.is_watched = False  # whether a pass notes what it enters
        self.conditions: set[str] = set()  # modules in which Python decides by a tensor
        self.reassigned: set[str] = set()  # attributes, tensors or numbers, that a run changed
        self.switched_off: set[str] = set()  # random modules that stay in eval mode
        self.mirrored: Collection[str] = ()  # kinds of lent draws, see `Draws`
        self.passes: Counter[str] = Counter()  # counts of "whole" and "alone" runs
        self.set_pieces({})

    def set_pieces(self, pieces: Mapping[str, Sequence[Slot]]) -> None:
        """Split these tensors, by state_dict key, into pieces; all others are whole."""
        self.modules = {}
        self._slots: dict[str, Slot] = {}
        self._pieces: dict[str, list[Slot]] = {}
        for name, module in self._whole.items():
            slots: dict[str, Slot] = {}
            for leaf, slot in module.slots.items():
                parts = list(pieces.get(slot.tensor, ())) or [slot]
                slots |= {leaf + part.key.removeprefix(slot.key): part for part in parts}
                self._slots |= {part.key: part for part in parts}
                self._pieces[slot.tensor] = parts
            self.modules[name] = replace(module, slots=slots)

    @property
    def tensor_keys(self) -> list[str]:
        return list(self._pieces)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """All tensors, or the pieces of those that are split, by their keys."""
        return self._slots

    def arrays(self, train: bool = False) -> dict[str, np.ndarray]:
        """The weights of eval mode; with `train`, those of train mode, of which some may differ."""
        values = self._values_in(train)
        return {key: slot.read(values[slot.tensor]) for key, slot in self._slots.items()}

    def _values_in(self, train: bool) -> dict[str, np.ndarray]:
        return {**self._values, **self.in_train} if train and self.in_train else self._values

    def never_entered(self, modes: Iterable[str], wished: bool = False) -> list[str]:
        """Branches of operations that no run in these modes entered, on request also those `wished` for."""
        every = [self.branches.get(mode, {}) for mode in modes]
        entered = {place for branches in every for place, is_entered in branches.items() if is_entered}
        asked = (place for place in chain.from_iterable(every) if wished or not place.endswith(PASSES_SIX))
        return [place for place in dict.fromkeys(asked) if place not in entered]

    def compared_as(self, key: str) -> str:
        """The key under which the gradient of this tensor or piece is compared.

        Pieces of a large tensor are joined: a recording has no more of its gradient than what `projected` gives.
        """
        whole = self._whole_slots[self._slots[key].tensor]
        return whole.key if is_projected(whole.shape) else key

    def compared_gradients(self, gradients: Mapping[str, np.ndarray]) -> dict[Item, np.ndarray]:
        """Either side's gradients, by this model's keys, as they are compared: the large ones `projected`."""
        groups: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
        for key, array in gradients.items():
            groups[self.compared_as(key)][key] = array
        found = {}
        for name, parts in groups.items():
            key, array = next(iter(parts.items()))
            if name != key and array.shape == self._slots[key].shape:  # else a recorded one, of the whole
                array = self._joined(parts)
            is_large = is_projected(self._whole_slots[self._slots[key].tensor].shape)
            found[tensor_item(name, "gradient", projected=is_large)] = projected(array)
        return found

    def _joined(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """A tensor of its pieces, in PyTorch's layout; zeros for those that are missing."""
        slot, array = next((self._slots[key], array) for key, array in parts.items())
        whole = np.zeros(self._values[slot.tensor].shape, array.dtype)
        for key, array in parts.items():
            whole = self._slots[key].written(whole, array)
        return self._whole_slots[slot.tensor].read(whole)

    def has_weights_of(self, other: Model) -> bool:
        """Whether all weights are equal to those of `other`, bit for bit."""
        return self._values.keys() == other._values.keys() and all(
            same_bits(array, other._values[key]) for key, array in self._values.items()
        )

    def unsaved_constants(self) -> dict[str, np.ndarray]:
        """Floats and complex ones that are no weights, by state_dict key: unsaved buffers, tensor attributes, numbers.

        Of numbers those that were taken from float32 tensors.
        """
        raise NotImplementedError

    def constants(self) -> dict[str, np.ndarray]:
        """`unsaved_constants`, and saved buffers of no library layer."""
        custom = (module for module in self._whole.values() if not module.kind)
        saved = {slot.tensor for module in custom for slot in module.slots.values() if slot.is_buffer}
        found = {key: array for key, array in self._values.items() if key in saved and array.dtype.kind in "fc"}
        return self.unsaved_constants() | found

    def rounded_constants(self) -> dict[str, np.ndarray]:
        """`constants` that float32 has rounded."""
        return {key: array for key, array in self.constants().items() if is_rounded(array)}

    def ask(self, question: Question) -> Run:
        """Run the model, or the question's module. Exceptions are noted in `trace.error`."""
        raise NotImplementedError

    def ask_with_values(self, question: Question) -> tuple[Run, list[np.ndarray]]:
        """The answer, and results of operations in the module's own code, where they are known."""
        return self.ask(question), []

    def plan(self, questions: Iterable[Question]) -> None:
        """Announce questions, so that one run can answer several of them."""

    def forget(self) -> None:
        """Forget large answers."""

    def own_class(self, name: str) -> tuple[str, str]:
        """(name, file and line) of the nearest class around a module that is not the framework's; ("", "") for none."""
        return "", ""

    def run(
        self,
        inputs: Inputs,
        dtype: str,
        train: bool,
        cotangent: Sequence[MaybeArray] | None = None,
        calls: bool = False,
    ) -> Run:
        """`ask` the whole model; backward with `cotangent`, arguments with `calls`."""
        return self.ask(Question.of_model(inputs, dtype, train, cotangent, CALLS if calls else OUTPUTS))

    def run_watched(self, inputs: Inputs, train: bool) -> Run:
        """`run` in float32, which notes in `branches` and `conditions` what it enters, where that can be watched."""
        return self.run(inputs, "float32", train)

    def notes(self) -> list[str]:
        """Remarks for the report on how it was run."""
        return []


def values_of(backend: Backend, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(state_dict key, copy) of all parameters and buffers, saved or not, floats in float32."""
    for key, tensor in owned_tensors(backend, model):
        yield key, to_precision(backend.to_array(tensor), "float32")


class BackendModel(Model):
    """A user's model with weights of its own, run on the user's objects, which are restored.

    A copy would lose hooks and `stop_gradient`. Answers of the whole model are remembered, within a budget.
    """

    def __init__(self, backend: Backend, model: Any, role: str, device: str) -> None:
        """Raises UserError if it is no model of this framework, or for a missing device."""
        if not isinstance(model, backend.module_class):
            raise UserError(f"the {role} is a {type(model).__name__}, no {backend.module_class_name}: give a model")
        self.backend, self.device = backend, backend.device(device)
        self.model = model
        self.output_names: dict[str, str] = {}  # {place in its output: the other side's, such as "[logits]"}
        self.memory = Memory()
        self._planned: list[Question] = []
        self._remembered_pieces: dict[str, list[Slot]] = {}
        self._parts = dict(backend.layers.named_modules(model))
        self._hidden: list[Dropped] = []  # in kernels of the module that is lent
        self._inside: dict[str, list[tuple[str, Any]]] = defaultdict(list)  # {module: all in it and itself, by name}
        for name, part in self._parts.items():
            for around in {name, "", *(name[: dot.start()] for dot in re.finditer(r"\.", name))}:
                self._inside[around].append((name, part))
        owned = owned_tensors(backend, model)
        self._keys = {id(tensor): key for key, tensor in owned}
        buffers = [tensor for part in self._parts.values() for _, tensor in backend.layers.own_tensors(part)[1]]
        self._weights = {*self._keys, *(id(tensor) for tensor in buffers if not backend.is_sparse(tensor))}
        self._attributes: dict[str, np.ndarray] = {}  # constants in tensor attributes that were replaced
        self._with_tensors: dict[str, list[str]] = {}  # {module: attributes that hold tensors}
        self.is_large = sum(math.prod(tensor.shape) for _, tensor in owned) > LARGE
        super().__init__(role, describe(backend, model), self.kept(values_of(backend, model)))
        self.held = dict(self._values)  # as it was given

    def kept(self, arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """(key, array) pairs, those of a large model in temporary files."""
        storage = Storage(self.is_large)
        return {key: storage.keep(array) for key, array in arrays}

    def _in_torch_layout(self, tensors: Named, module: str) -> Iterator[tuple[str, np.ndarray]]:
        prefix = f"{module}." if module else ""
        named = ((prefix + key, tensor) for key, tensor in tensors)
        found = read_slots(self.backend, named, self._pieces)
        return ((slot.key.removeprefix(prefix), array) for slot, array in found)

    def load(self, arrays: Mapping[str, np.ndarray], train: bool = False) -> None:
        """Set weights, as `arrays()` gives them or whole by state_dict key; with `train`, those of train mode alone.

        Raises UserError for an unknown key or shape.
        """
        values = self.in_train if train else self._values
        if not train and self.in_train:
            self.in_train.clear()
            self.memory.clear()
        for key, array in arrays.items():
            slot = self._slots.get(key, self._whole_slots.get(key))
            if slot is None and key not in self._values:
                raise UserError(f"weights do not fit the {self.role}: it has no {key}")
            if slot is not None:
                if array.shape != slot.shape:
                    raise UserError(f"weights do not fit the {self.role}: {key} is {slot.shape}, not {array.shape}")
                before = values.get(slot.tensor, self._values[slot.tensor])
                after = np.asarray(slot.written(before, array), before.dtype)
                if not same_bits(before, after):
                    values[slot.tensor] = after  # arrays are never modified in place
                    self.memory.clear()

    @contextmanager
    def with_weights(self, arrays: Mapping[str, np.ndarray], train: bool = False) -> Iterator[None]:
        """`load` these weights in this context alone."""
        before = dict(self._values), dict(self.in_train)
        self.load(arrays, train)
        try:
            yield
        finally:
            self._values, self.in_train = before
            self.memory.clear()

    def unsaved_constants(self) -> dict[str, np.ndarray]:
        found = {key: array for key, array in self._values.items() if key not in self._pieces}
        for name, part in self._parts.items():
            for attribute, value in vars(part).items():
                key = _joined_name(name, attribute)
                if key in self.reassigned:
                    continue
                if self._is_rounded(name, value):
                    found[key] = self._attributes.get(key, np.asarray(value, np.float32))
                elif self.backend.framework.is_tensor(value):
                    found[key] = self._attributes.get(key, self.backend.to_array(value))
        return {key: array for key, array in found.items() if array.dtype.kind in "fc"}

    def set_constant(self, key: str, array: np.ndarray) -> None:
        """Replace one of `constants`; the shape stays."""
        self.memory.clear()
        array = array.astype(np.complex64 if array.dtype.kind == "c" else np.float32)
        held = self._values if key in self._values else self._attributes
        held[key] = array

    def plan(self, questions: Iterable[Question]) -> None:
        self._planned = list(questions)

    def run_watched(self, inputs: Inputs, train: bool) -> Run:
        self.memory.clear()  # a remembered answer is not watched
        with self.backend.runs.watching(self.model) as watch:
            run = super().run_watched(inputs, train)
        if watch is not None:
            self.branches["train" if train else "eval"] = watch.entered
            self.conditions |= watch.conditions
            self.is_watched = True
        return run

    def forget(self) -> None:
        self.memory.forget()

    def ask(self, question: Question) -> Run:
        if question.module or question.mutation or question.perturbation:  # asked only once
            return self._answer(question)
        if self._pieces != self._remembered_pieces:
            self.memory.clear()
            self._remembered_pieces = self._pieces
        key = question.key(self.switched_off)
        run = self.memory.find(question, key)
        if run is None:
            asked = self._planned_for(question, key)
            self.memory.make_room(asked, key)
            run = self._answer(asked)
            self.memory.keep(asked, key, run)
        return question.only_asked(run)

    def _planned_for(self, question: Question, key: str) -> Question:
        """The planned question that covers this one (removed from the plan), else this one."""
        for i, planned in enumerate(self._planned):
            if planned.key(self.switched_off) == key and question.served_by(planned.upstream_key(), planned.keeps):
                del self._planned[i]
                return planned
        return question

    def _answer(self, question: Question, watch_random: bool = False) -> Run:
        """Run it; if it keeps calls and took random numbers, run again to see where."""
        self.passes["alone" if question.module else "whole"] += 1
        how = question.dtype, question.train, question.perturbation
        with ExitStack() as lending:
            module = lending.enter_context(self.lent(question.module, *how))
            if question.mutation:
                module = question.mutation(module)
            if question.leaves_out:
                left_out = self._parts[question.followed_by[0]]
                self.backend.runs.hook_after(left_out, lambda _, args, kwargs, _output: (*args, *kwargs.values())[0])
            elif question.followed_by:
                behind = [lending.enter_context(self.lent(name, *how)) for name in question.followed_by]
                self.backend.runs.hook_after(
                    module, lambda _, _args, _kwargs, output: reduce(lambda given, each: each(given), behind, output)
                )
            run = self._run(module, question, watch_random)
        whole = run.trace.calls.get(OUTPUT)
        if whole is not None and whole.took_random and not watch_random:
            return self._answer(question, watch_random=True)
        return run

    def ask_with_values(self, question: Question) -> tuple[Run, list[np.ndarray]]:
        values: list[np.ndarray] = []
        module = self._parts[question.module]
        with (
            self.backend.runs.noting_results(lambda tensor: values.append(self.backend.to_array(tensor))) as switch,
            between_children(self.backend, module, switch, lambda _label, _given: None),
        ):
            return self._answer(question), values

    def follow(self, question: Question, is_known: Callable[[np.ndarray], bool]) -> tuple[Run, Followed]:
        """The answer, and which statements of the module's own code made what is not known."""
        module = self._parts[question.module]
        followed = Followed(self.backend, module, is_known)
        with followed.following(module):
            return self._answer(question), followed

    def wrong_gradients(self, question: Question) -> list[str]:
        """In words, an operation of the framework whose backward is wrong in this run (see `Runs`)."""
        return self.backend.runs.wrong_gradients(lambda: self._answer(question))

    def own_class(self, name: str) -> tuple[str, str]:
        module = self._parts[name]
        if place := place_of_class(type(module), self.backend.layers.library):
            return type(module).__name__, place
        return self.own_class(name.rpartition(".")[0]) if name else ("", "")

    def is_of_library(self, name: str) -> bool:
        """Whether the module's class is the framework's."""
        return type(self._parts[name]).__module__.startswith(self.backend.layers.library)

    def dropout_probability(self, name: str) -> float:
        """The probability of a dropout layer; 0 for other layers."""
        return self.backend.runs.dropout_probability(self._parts[name])

    def run_dropout(self, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Outputs for `x` (float32) with dropout on: eval mode, then train mode twice."""
        outputs = []
        with self.backend.runs.seeded(SEED), self.lent(name, "float32", train=False) as layer:
            for train in (False, True, True):
                self.backend.runs.set_mode(layer, train)
                outputs.append(self.backend.to_array(layer(self._tensors(x, "float32", False))))
        return outputs[0], outputs[1], outputs[2]

    @contextmanager
    def lent(self, name: str, dtype: str, train: bool, perturbation: int = 0) -> Iterator[Any]:
        """The module `name` ("": the model) with these weights, `dtype` and mode; restored afterwards.

        Dropout in a layer's kernel is off; other dropout is on in train mode. `perturbation` is as in `Question`.
        """
        with self._with_weights(name, dtype, train, perturbation) as module:
            self.backend.runs.set_mode(module, train)
            self._hidden = []
            for part_name, part in self._inside[name]:
                if p := self.backend.runs.turn_off_dropout(part):
                    self._hidden.append(Dropped(part_name, p, 0))
                if part_name in self.switched_off:
                    self.backend.runs.set_mode(part, False)
            yield module

    @contextmanager
    def _with_weights(self, name: str, dtype: str, train: bool, perturbation: int = 0) -> Iterator[Any]:
        backend, module, values = self.backend, self._parts[name], self._values_in(train)
        rng = np.random.default_rng([perturbation, 0]) if perturbation > 0 else None
        draws, held = np.random.default_rng(0), self.rounded_constants() if perturbation == CONSTANTS else {}
        moved = {key: moved_by_rounding(held[key], draws) for key in self.float32_data if key in held}
        with as_it_was(backend, module) as owned:
            for tensor in owned:
                key = self._keys.get(id(tensor))
                value = backend.to_array(tensor, copy=False) if key is None else moved.get(key, values[key])
                if rng is not None:
                    value = perturbed(value, dtype, rng)
                backend.put(tensor, value, dtype, self.device)
                let_go(value)
            for part_name, part in self._inside[name]:
                self._lend_attributes(part_name, part, dtype, moved)
            before = self._own_attributes(name)
            yield module
            after = self._own_attributes(name)
            self.reassigned |= {key for key in before | after if self._differs(before.get(key), after.get(key))}

    def _own_attributes(self, name: str) -> dict[str, Any]:
        """{dotted name: value} of what the modules in `name` hold beside what every module has."""
        found: dict[str, Any] = {}
        for part_name, part in self._inside[name]:
            own = {key: value for key, value in vars(part).items() if key not in self.backend.module_attributes}
            found |= {_joined_name(part_name, key): value for key, value in own.items()}
        return found

    def _differs(self, before: Any, after: Any) -> bool:
        """Whether tensors or numbers differ: tensors if they are others, whatever they hold."""
        if before is after:
            return False
        if tensors_at((before, after), self.backend.framework.is_tensor):
            return True
        return isinstance(after, (int, float)) and before != after

    def _lend_attributes(self, name: str, part: Any, dtype: str, moved: Mapping[str, np.ndarray]) -> None:
        """Convert tensor attributes and sparse buffers to `dtype` and detach them; they are looked up once.

        Numbers of float32 tensors are moved with them.
        """
        if name not in self._with_tensors:
            own = {key: value for key, value in vars(part).items() if key not in self.backend.module_attributes}
            own["_buffers"] = vars(part).get("_buffers")
            self._with_tensors[name] = [
                key
                for key, value in own.items()
                if self._is_rounded(name, value) or tensors_at(value, self._is_attribute)
            ]
        for attribute in self._with_tensors[name]:
            key, value = _joined_name(name, attribute), vars(part)[attribute]
            if key in moved or key in self._attributes:
                array = moved[key] if key in moved else self._attributes[key]
                value = array.item() if _is_float32(value) else self._tensors(array, dtype)
            else:
                value = map_tensors(value, self._is_attribute, lambda t: self._attribute_in(t, dtype))
            vars(part)[attribute] = value

    def _is_rounded(self, name: str, value: Any) -> bool:
        """Whether it may be a number of a float32 tensor; a setting of a library layer, such as epsilon, is none."""
        return not self.is_of_library(name) and _is_float32(value)

    def _attribute_in(self, tensor: Any, dtype: str) -> Any:
        values = self._tensors(self.backend.to_array(tensor), dtype)
        return self.backend.as_sparse_as(tensor, values) if self.backend.is_sparse(tensor) else values

    def _is_attribute(self, value: Any) -> bool:
        """Whether it is a tensor that is no weight; of buffers only sparse ones are none."""
        return self.backend.framework.is_tensor(value) and id(value) not in self._weights

    def copied(self, name: str, dtype: str, train: bool, perturbation: int = 0) -> Any:
        """A copy of the module `name`, set up as `lent` does."""
        with self.lent(name, dtype, train, perturbation) as module:
            return self.backend.copied(module)

    def loaded_copy(self) -> Any:
        """A copy of the user's model, in its own mode, with these weights in float32."""
        with self._with_weights("", "float32", train=False) as module:
            return self.backend.copied(module)

    def _tensors(self, value: Any, dtype: str, requires_grad: bool = False) -> Any:
        def tensor(array: np.ndarray) -> Any:
            return self.backend.tensor(to_precision(array, dtype), self.device, requires_grad=requires_grad)

        return map_tensors(value, is_array, tensor)

    def _run(self, model: Any, question: Question, watch_random: bool = False) -> Run:
        count_pass()
        backend, is_tensor = self.backend, self.backend.framework.is_tensor
        call = question.call
        dtype = question.dtype
        backward = question.backward
        given, upstream = (call.args, call.kwargs), call.upstream
        only = None if question.keeps > OUTPUTS or not call.name else ()
        if question.perturbation > 0:
            rng = np.random.default_rng([question.perturbation, 1])
            given, upstream = map_tensors((given, upstream), is_array, lambda array: perturbed(array, dtype, rng))
        storage = Storage(self.is_large)
        gradients: dict[str, np.ndarray] = {}
        leaves = self._tensors(given, dtype, backward)
        inputs = [t for t in tensors_at(leaves, is_tensor).values() if t.is_floating_point()]

        def forward() -> list[tuple[Any, Any]]:
            # A leaf that needs a gradient cannot be changed in place.
            args, kwargs = map_tensors(leaves, is_tensor, lambda t: backend.fresh(t) if backend.requires_grad(t) else t)
            output = model(*args, **kwargs)
            returned = tensors_at(output, is_tensor)
            if not call.name:
                returned = self._by_output_names(returned, trace)
                plain = plain_at(output, is_tensor)
                run.plain = {self.output_names.get(place, place): value for place, value in plain.items()}
            run.places, outputs = list(returned), list(returned.values())
            run.output = [backend.to_array(tensor) for tensor in outputs]
            in_forward.extend((len(trace.draws), len(trace.dropped)))
            return self._sent_back(outputs, upstream, dtype) if backward else []

        def take(name: str, gradient: Any) -> None:
            for key, array in self._in_torch_layout([(name, gradient)], call.name):
                gradients[key] = storage.keep(np.asarray(gradients[key] + array) if key in gradients else array)

        Storage.let_go()
        with (
            taking_gradients(backend, model, take) if backward else nullcontext(),
            backend.runs.seeded(SEED),
            backend.runs.grad_enabled(backward),
            tracing(backend, model, question.keeps, only, watch_random, storage.copy) as trace,
            backend.runs.lent_draws(draws := Draws(SEED, trace.draws, self.mirrored)),
            patched(lent_to_python(draws)),
            backend.runs.lent_dropout(trace.note_dropout) if question.train else nullcontext(),  # eval mode has none
            backend.runs.new_tensors(dtype, trace.note_float32),
            backend.runs.rounding_anew(question.perturbation) if question.perturbation > 0 else nullcontext(),
        ):
            run = Run(trace)
            in_forward: list[int] = []
            trace.draws += call.draws_before
            try:
                with user_code():
                    backend.runs.run_backward(forward, model, inputs) if backward else forward()
            except Exception as error:
                trace.lack = isinstance(error, MachineError)
                if trace.lack and not (call.name or question.mutation):
                    raise
                trace.error = str(error) if trace.lack else one_line(error)
        if in_forward:
            del trace.dropped[in_forward[1] :]  # of what backward runs again
        trace.dropped += self._hidden if question.train else []
        if in_forward and len(trace.draws) > in_forward[0] and OUTPUT in trace.calls:
            trace.calls[OUTPUT].took_random = True  # run again by backward, with other numbers
        received = (getattr(tensor, "grad", None) for tensor in inputs)
        run.input_gradients = [None if gradient is None else backend.to_array(gradient) for gradient in received]
        keys = (key.removeprefix(f"{call.name}.") for key in self._slots)  # they came in another order
        run.gradients = {key: gradients[key] for key in keys if key in gradients}
        run.buffers = dict(self._in_torch_layout(backend.layers.named_buffers(model), call.name))
        return run

    def _by_output_names(self, returned: Mapping[str, Any], trace: Trace) -> dict[str, Any]:
        """The outputs by the other side's places and order; in the trace too."""
        for place, name in self.output_names.items():
            if OUTPUT + place in trace.outputs:
                trace.outputs[OUTPUT + name] = trace.outputs.pop(OUTPUT + place)
        named = {self.output_names.get(place, place): tensor for place, tensor in returned.items()}
        return dict(sorted(named.items()))

    def _sent_back(self, outputs: list, upstream: list, dtype: str) -> list[tuple[Any, Any]]:
        """(output, gradient) pairs; gradients of a tensor returned twice are added."""
        sent: dict[int, tuple[Any, np.ndarray]] = {}
        for tensor, gradient in zip(outputs, upstream):
            fits = gradient is not None and gradient.shape == tuple(tensor.shape)
            if fits and self.backend.requires_grad(tensor):
                before = sent.get(id(tensor), (tensor, 0.0))[1]
                sent[id(tensor)] = tensor, before + gradient
        return [(tensor, self._tensors(np.asarray(gradient), dtype)) for tensor, gradient in sent.values()]


def _is_float32(value: Any) -> bool:
    """Whether it is a number that float32 holds, as those are that are taken from its tensors, and hardly others."""
    with np.errstate(over="ignore"):
        return isinstance(value, (float, np.float32)) and float(np.float32(value)) == value != round(value)


def _joined_name(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute
