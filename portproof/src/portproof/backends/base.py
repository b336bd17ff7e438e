"""What every backend provides: layers, runs, training, weights files, tensors. Imports no framework.

Abstract methods and attributes are what frameworks do differently.
"""

from __future__ import annotations

import copy
import io
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from portproof.backends.draws import Draws
from portproof.backends.masks import Keep, no_masks
from portproof.backends.model import BackendModel
from portproof.backends.question import to_precision
from portproof.backends.slots import Arrays, ModelArrays, Named
from portproof.convert.rules import Change
from portproof.python39 import zip_strict
from sturdyio.cli import UserError
from sturdyio.files import atomic_path, save_safetensors
from sturdyio.state_dict import check_state_dict, read_state_dict

# Suffixes of each framework's weights files; all take .safetensors too.
SUFFIXES = {"torch": (".pth", ".pt"), "paddle": (".pdparams",), "mindspore": (".ckpt",)}

Tensors = list[tuple[str, Any]]  # (name, tensor)
Forward = Callable[[], Sequence[tuple[Any, Any]]]  # returns (output, gradient) pairs
Note = Callable[[bool], None]  # see `Runs.new_tensors`


class Layers(ABC):
    """What a model is made of: its modules and its framework's layers, by PyTorch's names."""

    library: str  # prefix of its layers' Python modules
    containers: tuple[type, ...]  # its classes that are no layers
    sequential: type  # returns its last child's output
    forward = "forward"
    torch_types: ClassVar[Mapping[str, str]]  # {its class: PyTorch's name}, where they differ

    @abstractmethod
    def named_modules(self, model: Any, /) -> Named:
        """(dotted name, module) of each once, the model first; none that computes a parameter."""

    def children(self, module: Any) -> Iterable[Any]:
        return module.children()

    def types(self, model: Any) -> dict[str, str]:
        """{dotted name: class name} of every module."""
        return {name: type(module).__name__ for name, module in self.named_modules(model)}

    def is_container(self, module: Any) -> bool:
        """Whether it just returns its last child's output."""
        computed_by = getattr(type(module), self.forward)
        return isinstance(module, self.sequential) and computed_by is getattr(self.sequential, self.forward)

    def kind(self, module: Any) -> str:
        """PyTorch's name of the library layer that `module` is or derives from, or ""."""
        for base in type(module).__mro__:
            if base.__module__.startswith(self.library) and base not in self.containers:
                return self.torch_type(base.__name__)
        return ""

    def torch_type(self, layer: str) -> str:
        return self.torch_types.get(layer, layer)

    @abstractmethod
    def layouts(self, module: Any) -> Mapping[str, tuple[str, Change]]:
        """{tensor: (PyTorch's name, layout change)} where a layer differs from PyTorch."""

    def own_tensors(self, module: Any) -> tuple[Tensors, Tensors]:
        """(parameters, buffers) that the module itself holds, by their names in it."""
        return list(module.named_parameters("", False)), list(module.named_buffers("", False))

    def named_parameters(self, model: Any) -> Named:
        """(state_dict key, tensor) of the parameters."""
        return model.named_parameters()

    @abstractmethod
    def named_buffers(self, model: Any, /) -> Named:
        """(state_dict key, tensor) of the buffers."""


class Runs(ABC):
    """How models are run: modes, contexts, random numbers, dropout, hooks."""

    framework: ModuleType
    dtypes: ClassVar[Mapping[str, Any]]  # its "float32" and "float64"
    exact_constants: Callable[[], AbstractContextManager]  # exact float64 arithmetic; may be nested
    lent_dropout: Callable[[Keep], AbstractContextManager]  # active dropout functions keep what `Keep` says
    one_random: Callable[[], float]  # takes a number from its own generator
    as_float64: Callable[[Note], AbstractContextManager]  # turns float32 into float64, see `new_tensors`
    dropouts: tuple[type[Any], ...]  # layers that are only dropout
    holding_dropout: tuple[type[Any], ...] = ()  # layers of several layers that pass a probability to one kernel
    hooks_parameters = True  # whether a backward pass calls hooks of parameters

    def set_mode(self, module: Any, train: bool) -> None:
        """Set train mode or eval mode in all of `module`."""
        module.train() if train else module.eval()

    def grad_enabled(self, enabled: bool) -> AbstractContextManager:
        """Whether forward passes in this context keep what backward needs."""
        return self.framework.set_grad_enabled(enabled)

    def run_backward(self, forward: Forward, model: Any, inputs: Sequence[Any]) -> None:
        """Call `forward` and go back: `inputs` and parameters then have their `grad`."""
        sent = forward()
        if sent:
            tensors, gradients = zip_strict(*sent)
            self.framework.autograd.backward(list(tensors), list(gradients))

    def wrong_gradients(self, run: Callable[[], Any]) -> list[str]:
        """In words, an operation in `run` whose backward is not the gradient of its own forward, where proven."""
        return []

    def noting_results(self, note: Callable[[Any], None]) -> AbstractContextManager[Callable[[bool], Any]]:
        """Call `note(tensor)` with what operations return, where that can be watched.

        Only while the function that this gives was last called with True.
        """
        return nullcontext(lambda _: None)

    def watching(self, model: Any) -> AbstractContextManager:
        """Note which branches the model's passes enter (see branches.py); None where that cannot be watched."""
        return nullcontext()

    def not_replaced(self) -> AbstractContextManager:
        """Undo slow replacements of functions in this context, for code of our own."""
        return nullcontext()

    @contextmanager
    def new_tensors(self, dtype: str, note: Note | None = None) -> Iterator[None]:
        """Tensors made without a type have the precision `dtype` in this context.

        With `note`, in "float64", also those requested as float32, by name or by a cast: rounding in between would hide
        differences. `note` is called at each, with True if it comes from a float32 array, already rounded.
        """
        before = self.framework.get_default_dtype()
        self.framework.set_default_dtype(self.dtypes[dtype])
        try:
            with self.as_float64(note) if note and dtype == "float64" else nullcontext():
                yield
        finally:
            self.framework.set_default_dtype(before)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed all random generators in this context, and restore them afterwards."""
        before = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            with self.seeded_framework(seed):
                yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002

    @abstractmethod
    def seeded_framework(self, seed: int) -> AbstractContextManager:
        """`seeded` for the framework's own generator."""

    def random_state(self) -> tuple:
        """The state of all generators, to see whether random numbers were taken."""
        _, key, place, *_ = np.random.get_state()  # noqa: NPY002
        return self.next_random(), random.getstate()[1][-1], int(key[0]), place

    def next_random(self) -> Any:
        """The next number of the framework's generator, not taken, or its state."""
        state = self.framework.get_rng_state()
        number = self.one_random()
        self.framework.set_rng_state(state)
        return number

    def lent_draws(self, draws: Draws) -> AbstractContextManager:
        """The framework's drawing functions take their numbers from `draws`, where that is known."""
        return nullcontext()

    def rounding_anew(self, seed: int) -> AbstractContextManager:
        """Functions that lose digits inside are computed by other formulas, and sums are rounded anew, where known."""
        return nullcontext()

    def without_dropout(self) -> AbstractContextManager:
        """Dropout functions do nothing in this context."""
        return self.lent_dropout(no_masks)

    def dropout_probability(self, layer: Any) -> float:
        """The probability with which a dropout layer drops; 0 for other layers."""
        return float(layer.p) if isinstance(layer, self.dropouts) else 0.0

    def turn_off_dropout(self, layer: Any) -> float:
        """Turn off what `lent_dropout` does not reach: dropout inside of a layer's kernel -> its probability."""
        if not isinstance(layer, self.holding_dropout):
            return 0.0
        p, layer.dropout = layer.dropout, 0.0
        return float(p) if layer.num_layers > 1 else 0.0

    def hook_before(self, module: Any, hook: Callable) -> Any:
        """Call `hook(module, args, kwargs)` before each call, until remove().

        Its result, unless None, replaces (args, kwargs).
        """
        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def hook_after(self, module: Any, hook: Callable) -> Any:
        """Call `hook(module, args, kwargs, output)` after each call, until remove().

        Its result, unless None, replaces the output.
        """
        return module.register_forward_hook(hook, with_kwargs=True)


class Training(ABC):
    """What the ladder needs for training: precision, threads, optimizers."""

    sgd: Callable[[list, float], Any]  # plain stochastic gradient descent: parameters and a rate
    learning_rate: Callable[[Any], float]  # of an optimizer's next step
    clear_gradients: Callable[[Any], None]  # of an optimizer's parameters, in the framework's default way
    coefficients: Callable[[Any], list[tuple[str, int]]]  # of an optimizer; PyTorch only, as the next
    round_coefficient: Callable[[Any, tuple[str, int]], None]
    join: Callable[[], Any]  # the other processes, over gloo
    leave: Callable[[], Any]
    data_parallel: Callable[[Any], Any]  # the model, so that backward averages gradients over the processes

    @abstractmethod
    def to_device(self, module: Any, device: Any, dtype: str) -> Any:
        """Move `module` in place; its floats become "float32" or "float64"."""

    @abstractmethod
    def optimizer_state(self, optimizer: Any, model: Any) -> dict[str, Any]:
        """Its tensors and values in dicts and lists, by the names of the model's parameters."""

    def set_threads(self, count: int) -> int:
        """Use `count` threads, where that can be set -> the number before."""
        return count  # PaddlePaddle reads OMP_NUM_THREADS at import


def without_tf32() -> None:
    """Turn off TF32: its 11-bit products would hide the differences that are compared."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # read when CUDA libraries are first used


class Backend(ABC):
    name: str
    framework: ModuleType
    module_class: type
    module_class_name: str
    model_class: type[BackendModel] = BackendModel
    layers: Layers
    runs: Runs
    training: Training  # MindSpore has none: no training here

    @abstractmethod
    def device(self, name: str) -> Any:
        """Choose "cpu" or "gpu" for all that follows; raises UserError if it is missing."""

    load_file: Callable[[Path], dict[str, Any]]  # reads a weights file of its own kind
    loaded: type = np.ndarray  # type of the tensors it returns

    def read_weights(self, path: str | Path) -> Arrays:
        """Read a state_dict from one of the framework's files or a .safetensors file.

        Names and layouts are the framework's own. No code in the file is run. Raises UserError if it cannot be read.
        """
        to_arrays = dict if self.loaded is np.ndarray else self.arrays_in
        return read_state_dict(path, SUFFIXES[self.name], self.load_file, self.loaded, to_arrays)

    def write_weights(self, arrays: Mapping[str, np.ndarray], path: str | Path) -> None:
        """Write a file that `read_weights` reads; the suffix chooses the format.

        Either the whole file appears or none. Raises UserError for another suffix, or if it cannot be written.
        """
        path = Path(path)
        if path.suffix == ".safetensors":
            save_safetensors(arrays, path)
            return
        if path.suffix not in SUFFIXES[self.name]:
            suffixes = ", ".join(SUFFIXES[self.name])
            raise UserError(f"weights {path} are not {suffixes} or .safetensors: choose one of these suffixes")
        with atomic_path(path) as temporary:
            buffer = io.BytesIO()  # PyTorch raises RuntimeError on a full disk
            self.framework.save({key: self.tensor(array) for key, array in arrays.items()}, buffer)
            temporary.write_bytes(buffer.getbuffer())

    def load_arrays(self, model: Any, arrays: Mapping[str, np.ndarray], what: str) -> None:
        """Copy `arrays`, by the framework's own names, into `model`.

        Raises UserError unless all keys, shapes and dtypes fit. Of tied tensors one is enough; two must be equal.
        """
        state, slots = model.state_dict(), self.arrays_of(model).slots
        expected = {key: self.to_array(tensor) for key, tensor in state.items() if key in arrays or key in slots}
        check_state_dict(arrays, expected, what)
        for key, array in arrays.items():
            self.set_value(state[key], array)
        for key, array in arrays.items():
            if self.to_array(state[key]).tobytes() != array.tobytes():
                raise UserError(f"{what} have two values for {key}, which this model uses under two names")

    def load_weights(self, model: Any, path: str | Path, what: str) -> None:
        """`load_arrays` from a file that `read_weights` reads."""
        self.load_arrays(model, self.read_weights(path), f"{what} {path}")

    def state_arrays(self, model: Any) -> Arrays:
        """A copy of the state_dict as arrays, in the framework's own names and layouts."""
        return self.arrays_in(model.state_dict())

    def arrays_in(self, tensors: Mapping[str, Any]) -> Arrays:
        return {key: self.to_array(tensor) for key, tensor in tensors.items()}

    def arrays_of(self, model: Any) -> ModelArrays:
        """The tensors of `model` by PyTorch's names, in its layout."""
        return ModelArrays(self, model)

    def wrap(self, model: Any, role: str, device: str = "cpu") -> BackendModel:
        """A copy of `model` to run; messages call it "the `role`"."""
        return self.model_class(self, model, role, device)

    def copied(self, module: Any) -> Any:
        """A deep copy, but of what deepcopy refuses.

        Computed tensors (weight norm's) are values. An attribute that cannot be copied, such as a lock, is shared.
        """
        memo, attributes = {}, []
        for _, layer in self.layers.named_modules(module):
            attributes += [value for key, value in vars(layer).items() if key not in self.module_attributes]
            for value in [*vars(layer).values(), *vars(layer).get("_buffers", {}).values()]:
                if self.framework.is_tensor(value) and not self.is_leaf(value):
                    memo[id(value)] = value.detach().clone()
        with suppress(Exception):
            return copy.deepcopy(module, dict(memo))
        for value in attributes:
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # whatever its class raises
                memo[id(value)] = value
        return copy.deepcopy(module, memo)

    @cached_property
    def module_attributes(self) -> frozenset[str]:
        return frozenset(vars(self.module_class()))

    about: Callable[[str], dict[str, str]]  # {"device" and "threads": in words}; PyTorch only
    device_of: Callable[[Any], Any]  # the device argument for a tensor beside this one
    has_values: Callable[[Any], bool]  # that `put` replaces: not a sparse one's, nor before a first run makes them
    values: Callable[[Any], Any]  # its values, not copied, for `put_back`

    @abstractmethod
    def tensor(self, array: np.ndarray, device: Any = None, dtype: Any = None, requires_grad: bool = False) -> Any:
        """A copy of `array`, floats and complex parts in `dtype`; only floats can need a gradient."""

    def to_tensor(self, array: np.ndarray, model: Any) -> Any:
        """`array` on the model's device; floats in the model's precision."""
        parameter = next(iter(model.parameters()))
        return self.tensor(array, self.device_of(parameter), parameter.dtype)

    @abstractmethod
    def to_array(self, tensor: Any, copy: bool = True) -> np.ndarray:
        """The tensor as an array; without `copy` it may share memory."""

    def requires_grad(self, tensor: Any) -> bool:
        return tensor.requires_grad

    def set_requires_grad(self, tensor: Any, value: bool) -> None:
        tensor.requires_grad = value

    @abstractmethod
    def set_value(self, tensor: Any, array: np.ndarray) -> None:
        """Copy `array`, of the same shape, into `tensor`, which keeps its precision."""

    def is_leaf(self, tensor: Any) -> bool:
        """Whether it is not computed from other tensors."""
        return tensor.is_leaf

    def is_sparse(self, tensor: Any) -> bool:
        return False

    def as_sparse_as(self, tensor: Any, values: Any) -> Any:
        """Dense `values`, stored as the sparse `tensor` is."""
        raise NotImplementedError

    def fresh(self, tensor: Any) -> Any:
        """A copy that lets its gradient flow through."""
        return tensor.clone()

    def put(self, tensor: Any, array: np.ndarray, dtype: str, device: Any) -> None:
        """Give `tensor` a copy of `array` in `dtype`; its old values are not overwritten."""
        self.put_back(tensor, self.tensor(to_precision(array, dtype), device))

    @abstractmethod
    def put_back(self, tensor: Any, values: Any) -> None:
        """Restore what `values` returned for `tensor`."""

    def taken_gradient(self, tensor: Any) -> Any:
        """Remove the gradient of `tensor` and return it, or None."""
        gradient, tensor.grad = getattr(tensor, "grad", None), None
        return gradient
