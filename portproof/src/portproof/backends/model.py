"""One model as a comparison sees it, whichever framework it is of: its modules, its tensors, its runs, as arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from portproof.arrays import in_rows
from portproof.backends.lent import as_it_was, owned_tensors
from portproof.backends.trace import Inputs, ModuleCall, Trace, as_call, is_array, map_tensors, tensors_at, tensors_in
from portproof.convert.rules import Change, view
from portproof.io.cli import UserError, one_line
from portproof.io.progress import count_pass

if TYPE_CHECKING:
    from portproof.backends.base import Backend

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer, or a piece of one, as PyTorch would store it."""

    key: str  # its unique name: its module's, a dot, what it is called there
    tensor: str  # the tensor's key in this model's own state_dict
    shape: tuple[int, ...]
    change: Change  # of the whole tensor's layout, between this model's own and PyTorch's; its own inverse
    trained: bool  # a gradient is computed for it
    is_buffer: bool = False
    is_whole: bool = False  # of whole numbers or truth values
    view: Callable[[np.ndarray], np.ndarray] | None = None  # of the whole tensor in PyTorch's layout: this piece's part

    def read(self, own: np.ndarray) -> np.ndarray:
        """The piece in PyTorch's layout, of the whole tensor in this model's own; not a copy where it need not be."""
        whole = view(self.change, own)
        return self.view(whole).reshape(self.shape) if self.view else whole

    def written(self, own: np.ndarray, piece: np.ndarray) -> np.ndarray:
        """The whole tensor in this model's own layout with this piece in it; `own` is what it was before.

        Not a copy where it need not be.
        """
        if not self.view:
            return view(self.change, piece)
        whole = np.array(self.change(own), order="C")
        part = self.view(whole)
        part[...] = piece.reshape(part.shape)
        return self.change(whole)


@dataclass(frozen=True)
class Module:
    """One module."""

    name: str
    type: str  # its class
    kind: str  # the library's layer that it is or derives from, by PyTorch's name; "" for none
    slots: dict[str, Slot]  # its own parameters and buffers, by PyTorch's name within the module
    is_leaf: bool


@dataclass
class Run:
    """One forward pass, and one backward pass if a cotangent was given. All arrays have PyTorch's layout."""

    trace: Trace
    output: list[np.ndarray] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)  # by state_dict key; missing: it received none
    input_gradients: list[np.ndarray | None] = field(default_factory=list)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)  # after the pass, by state_dict key
    places: list[str] = field(default_factory=list)  # where each output was in what was returned


OUTPUT = "output"  # the label of the model's own call in a trace
SEED = 0  # of the frameworks' generators in every run
PRECISIONS = {"float32": (np.float32, np.complex64), "float64": (np.float64, np.complex128)}


def moved_by_an_ulp(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The numbers of float64 next to those of `array`, larger or smaller as drawn; 0, and what is not real, stays."""
    if array.dtype.kind != "f":
        return array
    array = array.astype(np.float64)
    return np.nextafter(array, array * rng.choice([0.0, 2.0], array.shape))


def to_precision(array: np.ndarray, dtype: str, copy: bool = False) -> np.ndarray:
    """Numbers of floating point, and complex ones, in "float32" or "float64"; others as they are; in C order.

    With `copy` always a copy, and only one.
    """
    real, complex_ = PRECISIONS[dtype]
    return in_rows(array, {"f": real, "c": complex_}.get(array.dtype.kind), copy)


class BackendModel:
    """A user's model with weights of its own: every run is done on the user's objects, which are then as before.

    Weights are kept as arrays, by the model's own state_dict keys, in PyTorch's layout. Of tied tensors only the first
    has a place. So no run sees what another left, and hooks and `stop_gradient`, which a copy would lose, count.
    """

    modules: dict[str, Module]  # by dotted name, "" is the model
    zeros_for_none = False  # a parameter that nothing comes back to has a gradient of zeros
    is_recorded = False  # answers come from a recording, and the framework's own modules are not at hand
    not_alone: Mapping[str, str] = MappingProxyType({})  # {label of a call: why its module cannot be run alone}
    cotangent: Sequence[np.ndarray] | None = None  # the gradient that a recording was made with

    def __init__(self, backend: Backend, model: Any, role: str, device: str) -> None:
        """Raises UserError for what is no model of this framework, and for a device that it does not have."""
        if not isinstance(model, backend.module_class):
            raise UserError(f"the {role} is a {type(model).__name__}, no {backend.module_class_name}: give a model")
        self.backend, self.role, self.device = backend, role, backend.device(device)
        self.model = model
        self.output_names: dict[str, str] = {}  # {place in what it returns: the other side's, such as "[logits]"}
        self.switched_off: set[str] = set()  # modules that are random in train mode, and stay in eval mode
        self._parts = dict(backend.named_modules(model))
        owned = owned_tensors(backend, model)
        self._keys = {id(tensor): key for key, tensor in owned}
        self._values = {key: to_precision(backend.to_array(tensor), "float32") for key, tensor in owned}
        self._attributes: dict[tuple[str, str], np.ndarray] = {}  # what `set_constant` gave
        self._moves: np.random.Generator | None = None  # what draws them in `moved_runs`
        self._whole = backend.describe(model)
        self.split({})

    def split(self, pieces: Mapping[str, Sequence[Slot]]) -> None:
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

    def notes(self) -> list[str]:
        """What a reader should know of how it was run."""
        return []

    @property
    def tensor_keys(self) -> list[str]:
        """The state_dict keys of all parameters and buffers that have a place."""
        return list(self._pieces)

    def arrays(self) -> dict[str, np.ndarray]:
        """All parameters and buffers."""
        return {key: slot.read(self._values[slot.tensor]) for key, slot in self._slots.items()}

    def _in_torch_layout(self, tensors: Any, prefix: str, copy: bool) -> dict[str, np.ndarray]:
        """The pieces of those that have a place, by their keys; `prefix` is missing from the given keys and these."""
        return {
            slot.key.removeprefix(prefix): slot.read(array)
            for key, tensor in tensors
            if (slots := self._pieces.get(prefix + key))
            for array in [self.backend.to_array(tensor, copy)]
            for slot in slots
        }

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
                self._values[slot.tensor] = np.asarray(slot.written(before, array), before.dtype)  # never written into

    def constants(self) -> dict[str, np.ndarray]:
        """The tensors of floating point that are no weights: buffers that are not saved, tensors as attributes."""
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
        if key in self._values:
            self._values[key] = array.astype(np.float32)
        else:
            module, _, attribute = key.rpartition(".")
            self._attributes[module, attribute] = array.astype(np.float32)

    def moved_runs(self, count: int, run: Callable[[], T]) -> list[T]:
        """What `run` gives each time from inputs and weights that are an ulp of float64 off; for runs in float64."""
        found = []
        try:
            for seed in range(count):
                self._moves = np.random.default_rng(seed)
                found.append(run())
        finally:
            self._moves = None
        return found

    def run(
        self,
        inputs: Inputs,
        dtype: str,
        train: bool,
        cotangent: Sequence[np.ndarray] | None = None,
        calls: bool = False,
    ) -> Run:
        """Run the model on `inputs` in "float32" or "float64"; dropout is off in either mode.

        With `cotangent` (an array an output) the gradients of sum(output * cotangent) are taken too. What a model
        raises ends the trace and is in `trace.error`.
        """
        call = replace(as_call(inputs), upstream=list(cotangent or ()))
        return self.run_module("", call, dtype, train, cotangent is not None, calls)

    def run_module(
        self,
        name: str,
        call: ModuleCall,
        dtype: str,
        train: bool,
        backward: bool,
        calls: bool = True,
        then: str = "",
    ) -> Run:
        """Run only the module `name` on the arguments of `call`, backward from its upstream gradients.

        What the module `then`, if one is named, makes of its output is taken for its output. One that lies inside it
        is left out: it gives back what it receives. Only the whole model is traced without `calls`, too.
        """
        with self.lent(name, dtype, train) as module, self.lent_then(name, then, dtype, train) as behind:
            self.apply_then(module, name, then, behind)
            return self._run(module, replace(call, name=name), dtype, train, backward, calls)

    def lent_then(self, name: str, then: str, dtype: str, train: bool) -> AbstractContextManager:
        """`lent` for the module `then` that is run behind the module `name`; None for none, or one inside that."""
        return self.lent(then, dtype, train) if then and not then.startswith(f"{name}.") else nullcontext()

    def apply_then(self, module: Any, name: str, then: str, behind: Any) -> None:
        """Have `behind`, unless it is None, applied to what `module` returns, as long as that is lent.

        If it is None, `then` is left out of `module`, which is or stands for `name`.
        """
        if behind is not None:
            self.backend.hook_after(module, lambda _module, _args, _kwargs, output: behind(output))
        for part_name, part in self.backend.named_modules(module) if then and behind is None else ():
            if f"{name}.{part_name}" == then:
                self.backend.hook_after(part, lambda _module, args, kwargs, _output: (*args, *kwargs.values())[0])

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
                self.backend.set_mode(layer, train)
                outputs.append(self.backend.to_array(layer(self._tensors(x, "float32", False))))
        return tuple(outputs)

    @contextmanager
    def lent(self, name: str, dtype: str, train: bool) -> Iterator[Any]:
        """The module `name` ("": the model) with these weights in `dtype`, on the device, in that mode.

        Without dropout, unless a later `train()` turns its layers on again, see `Backend.without_dropout`. Afterwards
        it is as it was.
        """
        with self._with_weights(name, dtype) as module:
            self.backend.set_mode(module, train)
            for part_name, part in self._parts_of(name):
                self.backend.turn_off_dropout(part)
                if part_name in self.switched_off:
                    self.backend.set_mode(part, False)
            yield module

    @contextmanager
    def _with_weights(self, name: str, dtype: str) -> Iterator[Any]:
        backend, module = self.backend, self._parts[name]
        with as_it_was(backend, module):
            for _, tensor in owned_tensors(backend, module):
                key = self._keys.get(id(tensor))
                value = backend.to_array(tensor, copy=False) if key is None else self._values[key]
                if self._moves:
                    value = moved_by_an_ulp(value, self._moves)
                backend.put(tensor, value, dtype, self.device)
            for part_name, part in self._parts_of(name):
                self._lend_attributes(part_name, part, dtype)
            yield module

    def _parts_of(self, name: str) -> list[tuple[str, Any]]:
        """(dotted name, module) of the module `name` and of all in it."""
        prefix = f"{name}." if name else ""
        return [(part, module) for part, module in self._parts.items() if part == name or part.startswith(prefix)]

    def _lend_attributes(self, name: str, part: Any, dtype: str) -> None:
        """Give the tensors that a module has as attributes their precision, and leave the graphs of earlier runs."""

        def is_attribute(value: Any) -> bool:
            return self.backend.framework.is_tensor(value) and id(value) not in self._keys

        for attribute, value in list(vars(part).items()):
            if attribute not in self.backend.module_attributes and tensors_in(value, is_attribute):
                given = self._attributes.get((name, attribute))
                vars(part)[attribute] = map_tensors(
                    value,
                    is_attribute,
                    lambda t, given=given: self._tensors(self.backend.to_array(t) if given is None else given, dtype),
                )

    def copied(self, name: str, dtype: str, train: bool) -> Any:
        """A copy of the module `name` as `lent` has it, a model of the framework's own."""
        with self.lent(name, dtype, train) as module:
            return copy.deepcopy(module)

    def loaded_copy(self) -> Any:
        """A copy of the user's model, in its own mode, with these weights in float32."""
        with self._with_weights("", "float32") as module:
            return copy.deepcopy(module)

    def _tensors(self, value: Any, dtype: str, requires_grad: bool = False) -> Any:
        def tensor(array: np.ndarray) -> Any:
            return self.backend.tensor(to_precision(array, dtype), self.device, requires_grad=requires_grad)

        return map_tensors(value, is_array, tensor)

    def _run(self, model: Any, call: ModuleCall, dtype: str, train: bool, backward: bool, calls: bool) -> Run:
        """Run `model`, which is or stands for the module that `call` names, on what the call received."""
        count_pass()
        backend, is_tensor = self.backend, self.backend.framework.is_tensor
        given = call.args, call.kwargs
        if self._moves:
            given = map_tensors(given, is_array, lambda array: moved_by_an_ulp(array, self._moves))
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
            return self._sent_back(outputs, call.upstream, dtype) if backward else []

        with (
            backend.seeded(SEED),
            backend.without_dropout() if train else nullcontext(),  # in eval mode there should be none
            backend.grad_enabled(backward),
            backend.trace(model, OUTPUT, calls, modules=calls or not call.name) as trace,
            backend.new_tensors(dtype, trace.note_float32),
        ):
            run = Run(trace)
            try:
                backend.run_backward(forward, model, inputs) if backward else forward()
            except Exception as error:  # whatever a model may raise
                trace.error = one_line(error)
        received = (getattr(tensor, "grad", None) for tensor in inputs)
        run.input_gradients = [None if gradient is None else backend.to_array(gradient) for gradient in received]
        prefix = f"{call.name}." if call.name else ""
        run.gradients = self._in_torch_layout(backend.taken_gradients(model), prefix, copy=False)
        run.buffers = self._in_torch_layout(backend.named_buffers(model), prefix, copy=False)
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
