"""One model as a comparison sees it, whichever framework it is of: its modules, its tensors, its runs, as arrays."""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.arrays import same_bits
from portproof.backends.lent import as_it_was, owned_tensors, taken_gradients
from portproof.backends.question import CALLS, OUTPUTS, Answer, Memory, Question, Run, perturbed, to_precision
from portproof.backends.slots import Module, Named, Slot, describe, read_slots
from portproof.backends.trace import OUTPUT, Inputs, Trace, is_array, map_tensors, tensors_at, tensors_in
from portproof.backends.tracer import tracing
from portproof.io.progress import count_pass
from sturdyio.cli import MachineError, UserError, one_line, user_code

if TYPE_CHECKING:
    from portproof.backends.base import Backend


SEED = 0  # of the frameworks' generators in every run


class Model:
    """One side of a pair, as a comparison sees it: its modules, its weights, and what it answers when it is asked.

    Weights are kept as arrays, by the model's own state_dict keys, in PyTorch's layout. Of tied tensors only the first
    has a place.
    """

    role: str  # "reference" or "port", for messages
    modules: dict[str, Module]  # by dotted name, "" is the model
    zeros_for_none = False  # a parameter that nothing comes back to has a gradient of zeros
    is_recorded = False  # answers come from a recording, and the framework's own modules are not at hand
    not_alone: Mapping[str, str] = MappingProxyType({})  # {label of a call: why its module cannot be run alone}
    cotangent: Sequence[np.ndarray] | None = None  # the gradient that a recording was made with

    def __init__(self, role: str, modules: Mapping[str, Module], values: Mapping[str, np.ndarray]) -> None:
        """`values` are all tensors that have values of their own, by state_dict key, saved or not."""
        self.role, self._whole, self._values = role, modules, dict(values)
        self.switched_off: set[str] = set()  # modules that are random in train mode, and stay in eval mode
        self.set_pieces({})

    def set_pieces(self, pieces: Mapping[str, Sequence[Slot]]) -> None:
        """Read and write these tensors, by state_dict key, as these pieces from now on, and all others whole."""
        self.modules, self._slots, self._pieces = {}, {}, {}
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
        """The state_dict keys of all parameters and buffers that have a place."""
        return list(self._pieces)

    def arrays(self) -> dict[str, np.ndarray]:
        """All parameters and buffers."""
        return {key: slot.read(self._values[slot.tensor]) for key, slot in self._slots.items()}

    def has_weights_of(self, other: Model) -> bool:
        """Whether all parameters and buffers are those of `other`, bit for bit."""
        return self._values.keys() == other._values.keys() and all(
            same_bits(array, other._values[key]) for key, array in self._values.items()
        )

    def constants(self) -> dict[str, np.ndarray]:
        """The tensors of floating point that are no weights: buffers that are not saved, tensors as attributes."""
        raise NotImplementedError

    def ask(self, question: Question) -> Run:
        """What the model, or the module that is asked for, gives. What it raises is in the run's `trace.error`."""
        raise NotImplementedError

    def plan(self, questions: Iterable[Question]) -> None:
        """Tell what will be asked: the first question that asks less of the same is then answered with all of it."""

    def forget(self) -> None:
        """Forget large answers, which are not asked for soon."""

    def run(
        self,
        inputs: Inputs,
        dtype: str,
        train: bool,
        cotangent: Sequence[np.ndarray] | None = None,
        calls: bool = False,
    ) -> Run:
        """`ask` of the whole model; with `cotangent` backward, too, with `calls` the arguments of calls are kept."""
        return self.ask(Question.of_model(inputs, dtype, train, cotangent, CALLS if calls else OUTPUTS))

    def notes(self) -> list[str]:
        """What a reader should know of how it was run."""
        return []


class BackendModel(Model):
    """A user's model with weights of its own: every run is done on the user's objects, which are then as before.

    So no run sees what another left, and hooks and `stop_gradient`, which a copy would lose, count. Answers of the
    whole model are remembered, within a budget.
    """

    def __init__(self, backend: Backend, model: Any, role: str, device: str) -> None:
        """Raises UserError for what is no model of this framework, and for a device that it does not have."""
        if not isinstance(model, backend.module_class):
            raise UserError(f"the {role} is a {type(model).__name__}, no {backend.module_class_name}: give a model")
        self.backend, self.device = backend, backend.device(device)
        self.model = model
        self.output_names: dict[str, str] = {}  # {place in what it returns: the other side's, such as "[logits]"}
        self.memory = Memory()
        self.passes: Counter[str] = Counter()  # runs so far, of the "whole" model and of modules "alone"
        self._planned: list[Question] = []
        self._remembered_pieces: dict[str, list[Slot]] = {}  # those that remembered answers have
        self._parts = dict(backend.layers.named_modules(model))
        self._inside: dict[str, list[tuple[str, Any]]] = defaultdict(list)  # {module: itself and all in it, by name}
        for name, part in self._parts.items():
            for around in {name, "", *(name[: dot.start()] for dot in re.finditer(r"\.", name))}:
                self._inside[around].append((name, part))
        owned = owned_tensors(backend, model)
        self._keys = {id(tensor): key for key, tensor in owned}
        self._attributes: dict[tuple[str, str], np.ndarray] = {}  # what `set_constant` gave
        self._with_tensors: dict[str, list[str]] = {}  # {module: its attributes that are or hold tensors}
        values = {key: to_precision(backend.to_array(tensor), "float32") for key, tensor in owned}
        super().__init__(role, describe(backend, model), values)

    def _in_torch_layout(self, tensors: Named, module: str) -> dict[str, np.ndarray]:
        """The pieces of those `tensors` of `module` that have a place; keys are without the module's name."""
        prefix = f"{module}." if module else ""
        named = ((prefix + key, tensor) for key, tensor in tensors)
        found = read_slots(self.backend, named, self._pieces)
        return {slot.key.removeprefix(prefix): array for slot, array in found}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put `arrays` (as `arrays()` gives them) into the model; raises UserError for a key or shape that is not.

        A tensor may also be given whole, by its state_dict key.
        """
        whole = {slot.tensor: slot for module in self._whole.values() for slot in module.slots.values()}
        for key, array in arrays.items():
            slot = self._slots.get(key, whole.get(key))
            if slot is None and key not in self._values:
                raise UserError(f"weights do not fit the {self.role}: it has no {key}")
            if slot is not None:
                if array.shape != slot.shape:
                    raise UserError(f"weights do not fit the {self.role}: {key} is {slot.shape}, not {array.shape}")
                before = self._values[slot.tensor]
                after = np.asarray(slot.written(before, array), before.dtype)
                if not same_bits(before, after):
                    self._values[slot.tensor] = after  # arrays are never written into
                    self.memory.clear()

    def constants(self) -> dict[str, np.ndarray]:
        unsaved = {key: array for key, array in self._values.items() if key not in self._pieces}
        found = unsaved | {
            f"{name}.{attribute}".lstrip("."): self._attributes.get((name, attribute), self.backend.to_array(value))
            for name, part in self._parts.items()
            for attribute, value in vars(part).items()
            if self.backend.framework.is_tensor(value)
        }
        return {key: array for key, array in found.items() if array.dtype.kind == "f"}

    def set_constant(self, key: str, array: np.ndarray) -> None:
        """Give one of `constants` another value of its shape."""
        self.memory.clear()
        if key in self._values:
            self._values[key] = array.astype(np.float32)
        else:
            module, _, attribute = key.rpartition(".")
            self._attributes[module, attribute] = array.astype(np.float32)

    def plan(self, questions: Iterable[Question]) -> None:
        self._planned = list(questions)

    def forget(self) -> None:
        self.memory.forget()

    def ask(self, question: Question) -> Run:
        if question.module or question.mutation or question.perturbation:  # asked once each
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
        """The planned question that asks all of this one, and is then planned no more; else this one."""
        for planned in self._planned:
            answer = Answer(Run(Trace()), planned.upstream_key(), planned.keeps)
            if planned.key(self.switched_off) == key and answer.serves(question, question.upstream_key()):
                self._planned.remove(planned)
                return planned
        return question

    def _answer(self, question: Question, watch_random: bool = False) -> Run:
        """Run what is asked for; once more, to see where, if it keeps calls and took random numbers."""
        self.passes["alone" if question.module else "whole"] += 1
        how = question.dtype, question.train, question.perturbation
        with ExitStack() as lending:
            module = lending.enter_context(self.lent(question.module, *how))
            if question.mutation:
                module = question.mutation(module)
            if question.leaves_out:
                left_out = self._parts[question.followed_by]
                self.backend.runs.hook_after(left_out, lambda _, args, kwargs, _output: (*args, *kwargs.values())[0])
            elif question.followed_by:
                follower = lending.enter_context(self.lent(question.followed_by, *how))
                self.backend.runs.hook_after(module, lambda _, _args, _kwargs, output: follower(output))
            run = self._run(module, question, watch_random)
        whole = run.trace.calls.get(OUTPUT)
        if whole is not None and whole.took_random and not watch_random:
            return self._answer(question, watch_random=True)
        return run

    def settings(self, name: str) -> dict[str, Any]:
        """The public attributes of the module `name` that are plain numbers, truth values or text; (n, n) is n."""
        found = {}
        for key, value in vars(self._parts[name]).items():
            equal = isinstance(value, (tuple, list)) and len(set(map(str, value))) == 1
            setting = value[0] if equal else value
            if isinstance(setting, (bool, int, float, str)) and not key.startswith("_") and key != "training":
                found[key] = setting
        return found

    def dropout_probability(self, name: str) -> float:
        """Of the dropout layer `name`; 0 for a layer of another kind."""
        return float(getattr(self._parts[name], "p", 0.0))

    def run_dropout(self, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the layer `name` makes of `x` (float32) with its dropout on: in eval mode, and twice in train mode."""
        outputs = []
        with self.lent(name, "float32", train=False) as layer:
            for train in (False, True, True):
                self.backend.runs.set_mode(layer, train)
                outputs.append(self.backend.to_array(layer(self._tensors(x, "float32", False))))
        return tuple(outputs)

    @contextmanager
    def lent(self, name: str, dtype: str, train: bool, perturbation: int = 0) -> Iterator[Any]:
        """The module `name` ("": the model) with these weights in `dtype`, on the device, in that mode.

        Without dropout, unless a later `train()` turns its layers on again, see `Backend.without_dropout`. Afterwards
        it is as it was. `perturbation` is that of a `Question`.
        """
        with self._with_weights(name, dtype, perturbation) as module:
            self.backend.runs.set_mode(module, train)
            for part_name, part in self._inside[name]:
                self.backend.runs.turn_off_dropout(part)
                if part_name in self.switched_off:
                    self.backend.runs.set_mode(part, False)
            yield module

    @contextmanager
    def _with_weights(self, name: str, dtype: str, perturbation: int = 0) -> Iterator[Any]:
        backend, module = self.backend, self._parts[name]
        rng = np.random.default_rng([perturbation, 0]) if perturbation else None
        with as_it_was(backend, module) as owned:
            for tensor in owned:
                key = self._keys.get(id(tensor))
                value = backend.to_array(tensor, copy=False) if key is None else self._values[key]
                if rng is not None:
                    value = perturbed(value, dtype, rng)
                backend.put(tensor, value, dtype, self.device)
            for part_name, part in self._inside[name]:
                self._lend_attributes(part_name, part, dtype)
            yield module

    def _lend_attributes(self, name: str, part: Any, dtype: str) -> None:
        """Give the tensors that a module has as attributes their precision, and leave the graphs of earlier runs.

        Which attributes these are is found once: after each run a module has those that it had before.
        """
        if name not in self._with_tensors:
            own = [key for key in vars(part) if key not in self.backend.module_attributes]
            self._with_tensors[name] = [key for key in own if tensors_in(vars(part)[key], self._is_attribute)]
        for attribute in self._with_tensors[name]:
            given = self._attributes.get((name, attribute))
            vars(part)[attribute] = map_tensors(
                vars(part)[attribute],
                self._is_attribute,
                lambda t, given=given: self._tensors(self.backend.to_array(t) if given is None else given, dtype),
            )

    def _is_attribute(self, value: Any) -> bool:
        """Whether it is a tensor, and no parameter or buffer."""
        return self.backend.framework.is_tensor(value) and id(value) not in self._keys

    def copied(self, name: str, dtype: str, train: bool, perturbation: int = 0) -> Any:
        """A copy of the module `name` as `lent` has it, a model of the framework's own."""
        with self.lent(name, dtype, train, perturbation) as module:
            return copy.deepcopy(module)

    def loaded_copy(self) -> Any:
        """A copy of the user's model, in its own mode, with these weights in float32."""
        with self._with_weights("", "float32") as module:
            return copy.deepcopy(module)

    def _tensors(self, value: Any, dtype: str, requires_grad: bool = False) -> Any:
        def tensor(array: np.ndarray) -> Any:
            return self.backend.tensor(to_precision(array, dtype), self.device, requires_grad=requires_grad)

        return map_tensors(value, is_array, tensor)

    def _run(self, model: Any, question: Question, watch_random: bool = False) -> Run:
        """Run `model`, which is or stands for the module that is asked for; with `watch_random` see `tracing`."""
        count_pass()
        backend, is_tensor = self.backend, self.backend.framework.is_tensor
        call, dtype, backward = question.call, question.dtype, question.backward
        given, upstream = (call.args, call.kwargs), call.upstream
        is_traced = question.keeps > OUTPUTS or not call.name
        if question.perturbation:
            rng = np.random.default_rng([question.perturbation, 1])
            given, upstream = map_tensors((given, upstream), is_array, lambda array: perturbed(array, dtype, rng))
        leaves = self._tensors(given, dtype, backward)
        inputs = [t for t in tensors_in(leaves, is_tensor) if t.is_floating_point()]

        def forward() -> list[tuple[Any, Any]]:
            # An operation in place may not change a leaf that needs a gradient.
            args, kwargs = map_tensors(leaves, is_tensor, lambda t: backend.fresh(t) if backend.requires_grad(t) else t)
            returned = tensors_at(model(*args, **kwargs), is_tensor)
            if not call.name:
                returned = self._by_output_names(returned, trace)
            run.places, outputs = list(returned), list(returned.values())
            run.output = [backend.to_array(tensor) for tensor in outputs]
            return self._sent_back(outputs, upstream, dtype) if backward else []

        with (
            backend.runs.seeded(SEED),
            backend.runs.without_dropout() if question.train else nullcontext(),  # in eval mode there should be none
            backend.runs.grad_enabled(backward),
            tracing(backend, model, question.keeps, is_traced, watch_random=watch_random) as trace,
            backend.runs.new_tensors(dtype, trace.note_float32),
        ):
            run = Run(trace)
            try:
                with user_code():
                    backend.runs.run_backward(forward, model, inputs) if backward else forward()
            except MachineError:
                raise
            except Exception as error:  # whatever a model may raise
                trace.error = one_line(error)
        received = (getattr(tensor, "grad", None) for tensor in inputs)
        run.input_gradients = [None if gradient is None else backend.to_array(gradient) for gradient in received]
        run.gradients = self._in_torch_layout(taken_gradients(backend, model), call.name)
        run.buffers = self._in_torch_layout(backend.layers.named_buffers(model), call.name)
        return run

    def _by_output_names(self, returned: Mapping[str, Any], trace: Trace) -> dict[str, Any]:
        """What the whole model returned, by the other side's places and in their order, in the trace, too."""
        for place, name in self.output_names.items():
            if OUTPUT + place in trace.outputs:
                trace.outputs[OUTPUT + name] = trace.outputs.pop(OUTPUT + place)
        return dict(sorted((self.output_names.get(place, place), tensor) for place, tensor in returned.items()))

    def _sent_back(self, outputs: list, upstream: list, dtype: str) -> list[tuple[Any, Any]]:
        """(output, gradient) of every output that has one; of a tensor that is returned twice they are added."""
        sent: dict[int, tuple[Any, np.ndarray]] = {}
        for tensor, gradient in zip(outputs, upstream):
            if gradient is not None and gradient.shape == tuple(tensor.shape) and self.backend.requires_grad(tensor):
                before = sent.get(id(tensor), (tensor, 0.0))[1]
                sent[id(tensor)] = tensor, before + gradient
        return [(tensor, self._tensors(np.asarray(gradient), dtype)) for tensor, gradient in sent.values()]
