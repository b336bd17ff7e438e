"""What all frameworks' backends have in common: devices, weights files, tensors.

What a framework spells or does in its own way is an abstract method or attribute here and in the parts (layers.py,
runs.py, training.py), and its subclass says why. Imports no framework.
"""

from __future__ import annotations

import copy
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from portproof.backends.layers import Layers
from portproof.backends.model import BackendModel
from portproof.backends.question import to_precision
from portproof.backends.runs import Runs
from portproof.backends.slots import Arrays, ModelArrays
from portproof.backends.training import Training
from sturdyio.cli import UserError
from sturdyio.files import atomic_path, save_safetensors
from sturdyio.state_dict import check_state_dict, read_state_dict

# How each framework's own files of weights end; any of them may be .safetensors instead.
SUFFIXES = {"torch": (".pth", ".pt"), "paddle": (".pdparams",), "mindspore": (".ckpt",)}


def without_tf32() -> None:
    """Have the CUDA libraries keep all bits of float32: TF32's products, of 11 bits, would drown what is compared."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # which each reads when it is first used


class Backend(ABC):
    """One framework: its devices, weights files and tensors; its layers, runs and training are parts of their own."""

    name: str
    framework: ModuleType
    module_class: type  # what every model and module is
    module_class_name: str
    model_class: type[BackendModel] = BackendModel
    layers: Layers
    runs: Runs
    training: Training  # MindSpore's has none: it is not trained here

    # Models

    @abstractmethod
    def device(self, name: str) -> Any:
        """The framework's own device for "cpu" or "gpu", chosen for what follows; raises UserError if it has none."""

    load_file: Callable[[Path], dict[str, Any]]  # reads one of its own files of weights
    loaded: type = np.ndarray  # what it gives for a tensor

    def read_weights(self, path: str | Path) -> Arrays:
        """The state_dict in a file of the framework's own kind or .safetensors; raises UserError as it says why not.

        Names and layouts are the framework's own. Nothing that hides in the file is run.
        """
        to_arrays = dict if self.loaded is np.ndarray else self.arrays_in
        return read_state_dict(path, SUFFIXES[self.name], self.load_file, self.loaded, to_arrays)

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
        state, slots = model.state_dict(), self.arrays_of(model).slots
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
        return self.arrays_in(model.state_dict())

    def arrays_in(self, tensors: Mapping[str, Any]) -> Arrays:
        """Copies of these tensors."""
        return {key: self.to_array(tensor) for key, tensor in tensors.items()}

    def arrays_of(self, model: Any) -> ModelArrays:
        """What reads and writes the tensors of `model` by PyTorch's names and in its layout."""
        return ModelArrays(self, model)

    def wrap(self, model: Any, role: str, device: str = "cpu") -> BackendModel:
        """A copy of `model` to be run, see `BackendModel`; messages call it "the `role`"."""
        return self.model_class(self, model, role, device)

    def copied(self, module: Any) -> Any:
        """A deep copy of `module`.

        What a layer has computed and keeps (weight norm does), which deepcopy refuses, is copied as a value.
        """
        memo = {}
        for _, layer in self.layers.named_modules(module):
            for value in [*vars(layer).values(), *vars(layer).get("_buffers", {}).values()]:
                if self.framework.is_tensor(value) and not self.is_leaf(value):
                    memo[id(value)] = value.detach().clone()
        return copy.deepcopy(module, memo)

    @cached_property
    def module_attributes(self) -> frozenset[str]:
        """What every module has as attributes."""
        return frozenset(vars(self.module_class()))

    # Tensors

    device_of: Callable[[Any], Any]  # what a tensor takes for another to lie where this one does
    has_values: Callable[[Any], bool]  # whether a tensor is not one that the first run of its model makes
    values: Callable[[Any], Any]  # what `put_back` gives back to a tensor after a `put`: its values, not copied

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

    def requires_grad(self, tensor: Any) -> bool:
        """Whether a gradient is computed for it."""
        return tensor.requires_grad

    @abstractmethod
    def set_value(self, tensor: Any, array: np.ndarray) -> None:
        """Copy `array`, of the same shape, into `tensor`, in the tensor's own precision."""

    def is_leaf(self, tensor: Any) -> bool:
        """Whether it has values of its own, and is not computed from other tensors."""
        return tensor.is_leaf

    def fresh(self, tensor: Any) -> Any:
        """A copy of `tensor` that its gradient flows through."""
        return tensor.clone()

    def put(self, tensor: Any, array: np.ndarray, dtype: str, device: Any) -> None:
        """Give `tensor`, a parameter or buffer, a copy of `array`; old values stay as they are.

        Numbers of floating point are then in `dtype`, "float32" or "float64".
        """
        self.put_back(tensor, self.tensor(to_precision(array, dtype), device))

    @abstractmethod
    def put_back(self, tensor: Any, values: Any) -> None:
        """Give `tensor` what `values` returned for it."""

    def taken_gradient(self, tensor: Any) -> Any:
        """The gradient of `tensor`, which then has none; None for none."""
        gradient, tensor.grad = getattr(tensor, "grad", None), None
        return gradient
