"""What all frameworks' backends have in common: how a model is read as arrays, traced, and run once.

What a framework spells or does in its own way is an abstract method or attribute here, and its subclass says why.
Where nothing else is said, arrays are by PyTorch's names and in its layout, whichever framework computed them: the
layers of the model itself tell how they are converted (see convert.py). Imports no framework.
"""

from __future__ import annotations

import copy
import io
import os
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from portproof.arrays import same_bits
from portproof.backends.model import BackendModel, Module, Slot
from portproof.backends.trace import ModuleCall, Trace, call_label, map_tensors, tensors_at, tensors_in
from portproof.compare.activations import BREAKPOINTS
from portproof.convert.rules import RULES, Change, keep
from portproof.io.cli import UserError, one_line
from portproof.io.files import atomic_path, save_safetensors
from portproof.io.state_dict import SUFFIXES, check_state_dict
from portproof.python39 import zip_strict

Arrays = dict[str, np.ndarray]
RECENT = 12  # arrays of a trace: what came into a residual block may come into its shortcut, 9 layers later
PLAIN = (type(None), bool, int, float, complex, str, list, tuple, dict)  # what a module may return without a tensor


def without_tf32() -> None:
    """Have the CUDA libraries keep all bits of float32: TF32's products, of 11 bits, would drown what is compared."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # which each reads when it is first used


class Backend(ABC):
    """One framework: what its models, tensors, optimizers and contexts are called, and what is done with them."""

    name: str
    framework: ModuleType
    module_class: type  # what every model and module is
    module_class_name: str
    containers: tuple[type, ...]  # classes of the library that are no layers
    library: str  # what the names of the modules that hold its layers begin with
    model_class: type[BackendModel] = BackendModel

    # Models

    @abstractmethod
    def device(self, name: str) -> Any:
        """The framework's own device for "cpu" or "gpu", chosen for what follows; raises UserError if it has none."""

    @abstractmethod
    def read_weights(self, path: str | Path) -> Arrays:
        """The state_dict in a file of the framework's own kind or .safetensors; raises UserError as it says why not.

        Names and layouts are the framework's own. Nothing that hides in the file is run.
        """

    def write_weights(self, arrays: Mapping[str, np.ndarray], path: str | Path) -> None:
        """Write `arrays`, by the framework's own names and layouts, as what `read_weights` reads.

        The suffix says how. Whole or not at all; raises UserError for another suffix or when it cannot be written.
        """
        path = Path(path)
        if path.suffix == ".safetensors":
            save_safetensors(arrays, path)
            return
        if path.suffix not in SUFFIXES[self.name]:
            suffixes = ", ".join(SUFFIXES[self.name])
            raise UserError(f"weights {path} are not {suffixes} or .safetensors: choose one of these suffixes")
        with atomic_path(path) as temporary:
            buffer = io.BytesIO()  # a full disk would be a RuntimeError of PyTorch
            self.framework.save({key: self.tensor(array) for key, array in arrays.items()}, buffer)
            temporary.write_bytes(buffer.getbuffer())

    def load_arrays(self, model: Any, arrays: Mapping[str, np.ndarray], what: str) -> None:
        """Copy `arrays`, by the framework's own names, into `model`; UserError unless every key, shape and dtype fits.

        Of a tensor that the model uses twice one name is enough, and two must not have different values.
        """
        state, slots = model.state_dict(), self.named_slots(model)
        expected = {key: self.to_array(tensor) for key, tensor in state.items() if key in arrays or key in slots}
        check_state_dict(arrays, expected, what)
        for key, array in arrays.items():
            self.set_value(state[key], array)
        for key, array in arrays.items():
            if self.to_array(state[key]).tobytes() != array.tobytes():
                raise UserError(f"{what} have two values for {key}, which this model uses under two names")

    def load_weights(self, model: Any, path: str | Path, what: str) -> None:
        """Copy what `read_weights` gives into `model`, as `load_arrays` does."""
        self.load_arrays(model, self.read_weights(path), f"{what} {path}")

    def state_arrays(self, model: Any) -> Arrays:
        """Copies of the tensors of its state_dict, by the framework's own names and in its own layouts."""
        return {key: self.to_array(tensor) for key, tensor in model.state_dict().items()}

    def wrap(self, model: Any, role: str, device: str = "cpu") -> BackendModel:
        """A copy of `model` to be run, see `BackendModel`; messages call it "the `role`"."""
        return self.model_class(self, model, role, device)

    def copied(self, module: Any) -> Any:
        """A deep copy of `module`.

        What a layer has computed from its parameters and kept as an attribute (weight norm does), which deepcopy
        refuses, is copied as a value.
        """
        kept = (
            value
            for _, layer in self.named_modules(module)
            for value in [*vars(layer).values(), *vars(layer).get("_buffers", {}).values()]
        )
        computed = (value for value in kept if self.framework.is_tensor(value) and not self.is_leaf(value))
        return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in computed})

    @abstractmethod
    def named_modules(self, model: Any) -> Iterable[tuple[str, Any]]:
        """(dotted name, module) of each module once, the model itself, "", first; none that computes a parameter."""

    def submodule(self, model: Any, name: str) -> Any:
        """The module of that dotted name; raises KeyError if there is none."""
        return dict(self.named_modules(model))[name]

    def children(self, module: Any) -> Iterable[Any]:
        """The modules that `module` holds itself."""
        return module.children()

    def layer_types(self, model: Any) -> dict[str, str]:
        """{dotted name: class name} of every module."""
        return {name: type(module).__name__ for name, module in self.named_modules(model)}

    def is_container(self, module: Any) -> bool:
        """Whether its output is only its last child's."""
        sequential = self.framework.nn.Sequential
        return isinstance(module, sequential) and type(module).forward is sequential.forward

    def kind(self, module: Any) -> str:
        """The library's layer that `module` is or derives from, by PyTorch's name; "" for a module of one's own."""
        for base in type(module).__mro__:
            if base.__module__.startswith(self.library) and base not in self.containers:
                return self.torch_type(base.__name__)
        return ""

    @abstractmethod
    def torch_type(self, layer: str) -> str:
        """PyTorch's name of the library's class `layer`."""

    @abstractmethod
    def layouts(self, module: Any) -> Mapping[str, tuple[str, Change]]:
        """{tensor of a layer: (PyTorch's name, change of layout)}; what is not in it is as in PyTorch."""

    def own_tensors(self, module: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """(parameters, buffers) of the module itself, each as (name below the module, tensor)."""
        return list(module.named_parameters("", False)), list(module.named_buffers("", False))

    def describe(self, model: Any) -> dict[str, Module]:
        """{dotted name: what it is} of every module; of tied tensors the first is listed, the others left out."""
        saved, seen, modules, named = model.state_dict().keys(), set(), {}, list(self.named_modules(model))
        ids = {id(module) for _, module in named}
        for name, module in named:
            prefix, kind, layouts, slots = f"{name}." if name else "", self.kind(module), self.layouts(module), {}
            for is_buffer, tensors in enumerate(self.own_tensors(module)):
                for leaf, tensor in tensors:
                    if prefix + leaf in saved and id(tensor) not in seen:
                        torch_leaf, change = layouts.get(leaf, (leaf, keep))
                        key = prefix + (
                            torch_leaf if "." in leaf else leaf
                        )  # what follows the last dot is in the module
                        shape = change(np.empty(tuple(tensor.shape), bool)).shape
                        trained = self.requires_grad(tensor)
                        is_whole = not tensor.is_floating_point()
                        slots[torch_leaf] = Slot(key, prefix + leaf, shape, change, trained, bool(is_buffer), is_whole)
                    seen.add(id(tensor))
            known = kind if kind in RULES or not slots else ""
            modules[name] = Module(
                name, type(module).__name__, known, slots, not any(id(child) in ids for child in self.children(module))
            )
        return modules

    # Tensors

    @abstractmethod
    def tensor(self, array: np.ndarray, device: Any = None, dtype: Any = None, requires_grad: bool = False) -> Any:
        """A copy of `array`; of floating point it is of `dtype`, if that is given, and may require a gradient.

        Complex numbers are of the complex type that has this precision, and require none.
        """

    def to_tensor(self, array: np.ndarray, model: Any) -> Any:
        """`array` on the model's device, in the model's precision if it is floating point."""
        parameter = next(iter(model.parameters()))
        return self.tensor(array, self.device_of(parameter), parameter.dtype)

    @abstractmethod
    def to_array(self, tensor: Any, copy: bool = True) -> np.ndarray:
        """A copy of `tensor`, which a later operation in place cannot change; not `copy`: it may be the same memory."""

    @abstractmethod
    def device_of(self, tensor: Any) -> Any:
        """What `tensor` takes for another to lie where this one does."""

    @abstractmethod
    def requires_grad(self, tensor: Any) -> bool:
        """Whether a gradient is computed for it."""

    @abstractmethod
    def set_value(self, tensor: Any, array: np.ndarray) -> None:
        """Copy `array`, of the same shape, into `tensor`, in the tensor's own precision."""

    def is_leaf(self, tensor: Any) -> bool:
        """Whether it has values of its own, and is not computed from other tensors."""
        return tensor.is_leaf

    def fresh(self, tensor: Any) -> Any:
        """A copy of `tensor` that its gradient flows through."""
        return tensor.clone()

    def largest(self, tensor: Any) -> float:
        """The largest size among its values, which are of floating point."""
        return float(tensor.detach().abs().max())

    @abstractmethod
    def has_values(self, tensor: Any) -> bool:
        """Whether it is not one that the first run of its model makes."""

    @abstractmethod
    def values(self, tensor: Any) -> Any:
        """What `put_back` gives back to `tensor` after a `put`: its values, which are not copied."""

    @abstractmethod
    def put(self, tensor: Any, array: np.ndarray, dtype: str, device: Any) -> None:
        """Give `tensor`, a parameter or buffer, a copy of `array`; old values stay as they are.

        Numbers of floating point are then in `dtype`, "float32" or "float64".
        """

    @abstractmethod
    def put_back(self, tensor: Any, values: Any) -> None:
        """Give `tensor` what `values` returned for it."""

    def taken_gradient(self, tensor: Any) -> Any:
        """The gradient of `tensor`, which then has none; None for none."""
        gradient, tensor.grad = getattr(tensor, "grad", None), None
        return gradient

    # Reading a model

    def keep_slots(self, model: Any) -> None:
        """Read the structure of `model` now, once: its `named_slots` stay what they are, as long as it lives."""
        self._kept_slots[model] = self.named_slots(model)

    @cached_property
    def _kept_slots(self) -> WeakKeyDictionary:
        return WeakKeyDictionary()

    def named_slots(self, model: Any) -> dict[str, tuple[str, Slot]]:
        """{state_dict key: (PyTorch's key, slot)} of all parameters and buffers."""
        return self._kept_slots.get(model) or {
            slot.tensor: (f"{name}.{leaf}" if name else leaf, slot)
            for name, module in self.describe(model).items()
            for leaf, slot in module.slots.items()
        }

    def _arrays(self, model: Any, tensors: Iterable[tuple[str, Any]]) -> Arrays:
        slots = self.named_slots(model)
        found = ((*slots[key], tensor) for key, tensor in tensors if key in slots)
        return {name: slot.change(self.to_array(tensor)) for name, slot, tensor in found}

    def own_arrays(self, model: Any, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """`arrays`, by PyTorch's names and in its layout, by the model's own; what it does not have stays as it is."""
        slots, own = dict(self.named_slots(model).values()), {}
        for name, array in arrays.items():
            if name in slots:
                own[slots[name].tensor] = slots[name].change(array)
            else:
                own[name] = array
        return own

    def shapes(self, model: Any) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all parameters and buffers."""
        slots = self.named_slots(model)
        return {slots[key][0]: slots[key][1].shape for key in model.state_dict() if key in slots}

    def parameters(self, model: Any) -> Arrays:
        """All trained parameters."""
        return self._arrays(model, ((name, p) for name, p in model.named_parameters() if self.requires_grad(p)))

    def buffers(self, model: Any) -> Arrays:
        """What is saved and not trained: batch norm's running statistics and counts."""
        return self._arrays(model, self.named_buffers(model))

    def arrays(self, model: Any) -> Arrays:
        """All that is saved: trained parameters, then buffers, then parameters that are frozen."""
        saved = self._arrays(model, model.state_dict().items())
        return self.parameters(model) | self.buffers(model) | saved

    def gradients(self, model: Any) -> Arrays:
        """The gradients of all trained parameters; one that received none is missing."""
        return self._arrays(model, self.named_gradients(model))

    def set_gradients(self, model: Any, gradients: Mapping[str, np.ndarray]) -> None:
        """Give each parameter that `gradients` names its array, as if a backward pass had."""
        slots = self.named_slots(model)
        for key, parameter in model.named_parameters():
            if key in slots and slots[key][0] in gradients:
                name, slot = slots[key]
                parameter.grad = self.tensor(slot.change(gradients[name]), self.device_of(parameter))

    @abstractmethod
    def named_buffers(self, model: Any) -> Iterable[tuple[str, Any]]:
        """(state_dict key, tensor) of what is not trained."""

    def named_parameters(self, model: Any) -> Iterable[tuple[str, Any]]:
        """(state_dict key, tensor) of what may have a gradient."""
        return model.named_parameters()

    def named_gradients(self, model: Any) -> Iterator[tuple[str, Any]]:
        """(state_dict key, gradient) of every parameter that has received one."""
        found = ((name, getattr(p, "grad", None)) for name, p in self.named_parameters(model))
        return ((name, gradient) for name, gradient in found if gradient is not None)

    def taken_gradients(self, model: Any) -> Iterator[tuple[str, Any]]:
        """`named_gradients`; a parameter has none any more when the next is asked for."""
        for name, parameter in self.named_parameters(model):
            gradient = self.taken_gradient(parameter)
            if gradient is not None:
                yield name, gradient

    # Running a model

    def set_mode(self, module: Any, train: bool) -> None:
        """Have `module` and all in it run in train mode or in eval mode."""
        module.train() if train else module.eval()

    def grad_enabled(self, enabled: bool) -> AbstractContextManager:
        """In this context a forward pass keeps what a backward pass needs, or does not."""
        return self.framework.set_grad_enabled(enabled)

    def run_backward(self, forward: Callable[[], Sequence[tuple[Any, Any]]], model: Any, inputs: Sequence[Any]) -> None:
        """Call `forward`, and go back from the (output, its gradient) that it returns.

        What `inputs` and the parameters of `model` receive is their `grad` afterwards.
        """
        sent = forward()
        if sent:
            tensors, gradients = zip_strict(*sent)
            self.framework.autograd.backward(list(tensors), list(gradients))

    @abstractmethod
    def exact_constants(self) -> AbstractContextManager:
        """In this context float64 arithmetic has the constants that are meant; it may be nested."""

    @abstractmethod
    def new_tensors(self, dtype: str, note: Callable[[bool], None] | None = None) -> AbstractContextManager:
        """In this context tensors that a model makes have the precision `dtype`.

        Those of which it does not say of what type they are. With `note`, in "float64", also those that it wants as
        float32, by name or by a cast: to round in between would hide what a float64 run is to show. `note` is called at
        each of these, with True where it is made of an array in float32, which is rounded already.
        """

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """In this context the generators of random numbers start from `seed`; after it they are where they were."""
        before = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            with self.seeded_framework(seed):
                yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002

    def random_state(self) -> tuple:
        """Where the generators are: two that differ say that random numbers were taken in between."""
        _, key, place, *_ = np.random.get_state()  # noqa: NPY002
        return self.next_random(), random.getstate()[1][-1], int(key[0]), place

    @abstractmethod
    def seeded_framework(self, seed: int) -> AbstractContextManager:
        """`seeded` for the framework's own generator."""

    @abstractmethod
    def next_random(self) -> Any:
        """The next number of the framework's own generator, which is not taken, or where that is."""

    @cached_property
    def module_attributes(self) -> frozenset[str]:
        """What every module has as attributes."""
        return frozenset(vars(self.module_class()))

    @abstractmethod
    def without_dropout(self) -> AbstractContextManager:
        """In this context dropout that is called as a function gives back what it gets."""

    @abstractmethod
    def turn_off_dropout(self, layer: Any) -> None:
        """The same for a layer that is dropout or has some inside, whatever mode its model is in."""

    @abstractmethod
    def hook_before(self, module: Any, hook: Callable[[Any, tuple, dict], Any]) -> Any:
        """Have `hook(module, args, kwargs)` called before each call of `module`, until the handle's remove()."""

    @abstractmethod
    def hook_after(self, module: Any, hook: Callable[[Any, tuple, dict, Any], Any]) -> Any:
        """Have `hook(module, args, kwargs, output)` called after each call of `module`, until the handle's remove().

        What it returns is the output from then on, unless it is None.
        """

    @contextmanager
    def trace(
        self,
        model: Any,
        whole: str = "logits",
        calls: bool = False,
        modules: bool = True,
        only: Collection[str] | None = None,
    ) -> Iterator[Trace]:
        """Trace every forward pass of `model` in this context, in float64 with exact constants.

        The whole model's output is called `whole`. With `calls` the arguments of every call are kept too, and after a
        backward pass in this context the loss's gradients for what it returned. Without `modules` nothing is traced,
        and with `only` no other modules than these.
        """
        tracer = _Tracer(self, whole, calls)
        handles = [
            handle
            for name, module in (self.named_modules(model) if modules else ())
            if (name in only if only is not None else name == "" or not self.is_container(module))
            for handle in tracer.attach(name, module)
        ]
        try:
            with self.exact_constants():
                yield tracer.trace
        finally:
            for handle in handles:
                handle.remove()
            tracer.close()

    def forward(self, model: Any, images: np.ndarray, train: bool, may_raise: bool = False) -> Trace:
        """One forward pass of `images` (N, 3, H, W); in train mode with the buffers after it.

        A model that `may_raise` is traced up to there, so that the first module without an output is the one that did,
        and the trace has the `error`; else what it raises is raised.
        """
        self.set_mode(model, train)
        with self.grad_enabled(False), self.trace(model) as trace:
            try:
                model(self.to_tensor(images, model))
            except Exception as error:  # whatever a wrong port may raise
                if not may_raise:
                    raise
                trace.error = one_line(error)
        if train and not trace.error:
            trace.buffers = self.buffers(model)
        return trace


class TrainingBackend(Backend):
    """What the ladder's rungs need beside: models that are built in a precision, losses, optimizers."""

    @abstractmethod
    def build(
        self,
        factory: Callable[[], Any],
        arrays: Mapping[str, np.ndarray],
        dtype: str,
        device: Any,
        load: Callable[[Any, Arrays], object],
    ) -> Any:
        """`factory()` with `arrays` in "float32" or "float64", as `load(model, arrays)` puts them there.

        `load` gets the framework's own names and layouts, and raises what it will for arrays that do not fit.
        """

    @abstractmethod
    def moved(self, module: Any, device: Any, dtype: str) -> Any:
        """`module`, changed in place, on that device, its floats in "float32" or "float64"."""

    @abstractmethod
    def set_threads(self, count: int) -> int:
        """Compute with `count` threads from now on, where the framework can be told -> how many it were before."""

    def loss_and_gradient(self, criterion: Any, arrays: Sequence[np.ndarray], device: Any) -> Arrays:
        """The criterion's "loss" of `arrays`, and its "gradient" with respect to the first floating-point one.

        Computed in the precision of that array, by a copy of a criterion that is a module; the gradient is missing
        where there is none.
        """
        place = next(i for i, array in enumerate(arrays) if array.dtype.kind == "f")
        dtype = str(arrays[place].dtype)
        if isinstance(criterion, self.module_class):  # its class weights must be of that precision, too
            criterion = self.moved(copy.deepcopy(criterion), device, dtype)
        leaves = [self.tensor(array, device, requires_grad=i == place) for i, array in enumerate(arrays)]
        # An operation in place may not change a leaf that needs a gradient.
        given = [leaf.clone() if i == place else leaf for i, leaf in enumerate(leaves)]
        with self.new_tensors(dtype), self.exact_constants():
            loss = criterion(*given)
            loss.backward()
        found = {"loss": loss, "gradient": leaves[place].grad}
        return {name: self.to_array(tensor) for name, tensor in found.items() if tensor is not None}

    @abstractmethod
    def learning_rate(self, optimizer: Any) -> float:
        """The rate of its next step."""

    @abstractmethod
    def sgd(self, parameters: list, rate: float) -> Any:
        """Plain stochastic gradient descent."""

    @abstractmethod
    def clear_gradients(self, optimizer: Any) -> None:
        """Forget the gradients of what it trains, in the framework's own default way."""

    @abstractmethod
    def set_norm_share(self, model: Any, share: float) -> None:
        """Set the share of the new batch in every batch norm's running statistics."""

    @abstractmethod
    def round_epsilons(self, model: Any) -> None:
        """Give layers that `exact_constants` does not see into the float32 epsilon that their kernels have."""


class _Tracer:
    """The hooks that write one trace."""

    def __init__(self, backend: Backend, whole: str, keep_calls: bool) -> None:
        self.backend, self.whole, self.keep_calls = backend, whole, keep_calls
        self.is_tensor = backend.framework.is_tensor
        self.trace = Trace()
        self.running = self.trace.running
        self.counts: dict[str, int] = {}
        self.recent: deque[np.ndarray] = deque(maxlen=RECENT)

    def array(self, tensor: Any) -> np.ndarray:
        """A copy of `tensor`: one that was just made, if its bits are the same.

        What a layer returns comes into the next one, and is what the block around it returns.
        """
        seen = self.backend.to_array(tensor, copy=False)
        for array in self.recent:
            if same_bits(array, seen):
                return array
        self.recent.append(self.backend.to_array(tensor))
        return self.recent[-1]

    def attach(self, name: str, module: Any) -> list[Any]:
        """The handles of the hooks before and after each call of `module`."""
        is_activation = type(module).__name__ in BREAKPOINTS

        def before(module: Any, args: tuple, kwargs: dict) -> None:
            self.begin(name, args, kwargs, self.keep_calls or is_activation)

        def after(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
            self.end(output, is_activation)

        return [
            self.backend.hook_before(module, before),
            self.backend.hook_after(module, after),
        ]

    def begin(self, name: str, args: tuple, kwargs: dict, keep_arguments: bool) -> None:
        number = self.counts.get(name, 0)
        inside = call_label(self.running[-1].name or self.whole, self.running[-1].number) if self.running else ""
        call = ModuleCall(name, number, start=sum(self.counts.values()), inside=inside)
        self.counts[name] = number + 1
        self.running.append(call)
        with self.recording(call):
            call.scale = self.scale((args, kwargs))
            if keep_arguments:
                call.args, call.kwargs = map_tensors((args, kwargs), self.is_tensor, self.array)
            if self.keep_calls:
                call.random_before = self.backend.random_state()

    def end(self, output: Any, is_activation: bool) -> None:
        call = self.running.pop()
        with self.recording(call):
            tensors = tensors_at(output, self.is_tensor)
            if not tensors and not isinstance(output, PLAIN):
                self.trace.unrecorded[call.name] = f"it returns a {type(output).__name__}, in which no tensor is found"
            call.outputs = [self.array(tensor) for tensor in tensors.values()]
            call.places, call.upstream = list(tensors), [None] * len(tensors)
            self.trace.add(call, is_activation, self.whole, self.keep_calls)
            if self.keep_calls:
                call.random_after = self.backend.random_state()
                for i, tensor in enumerate(tensors.values()):
                    if self.backend.requires_grad(tensor):
                        self.keep_upstream(call, i, tensor)

    @contextmanager
    def recording(self, call: ModuleCall) -> Iterator[None]:
        """What cannot be recorded must not end the model's own run, and is said."""
        try:
            yield
        except Exception as error:
            self.trace.unrecorded[call.name] = one_line(error)

    def keep_upstream(self, call: ModuleCall, i: int, tensor: Any) -> None:
        def hook(gradient: Any) -> None:
            call.upstream[i] = self.array(gradient)

        tensor.register_hook(hook)

    def scale(self, value: Any) -> float:
        """The largest value among the tensors in it."""
        floats = [t for t in tensors_in(value, self.is_tensor) if t.is_floating_point() and 0 not in t.shape]
        return max(map(self.backend.largest, floats), default=0.0)

    def close(self) -> None:
        """Take in what was running when the model raised, the innermost first."""
        for call in reversed(self.running if self.keep_calls else ()):
            self.trace.calls[call_label(call.name or self.whole, call.number)] = call
