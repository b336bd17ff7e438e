"""What every backend provides: devices, weights files, tensors. Imports no framework.

Abstract methods and attributes, here and in layers.py, runs.py and training.py, are what frameworks do differently.
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

# Suffixes of each framework's weights files; all take .safetensors too.
SUFFIXES = {"torch": (".pth", ".pt"), "paddle": (".pdparams",), "mindspore": (".ckpt",)}


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

        Whole or not at all. Raises UserError for another suffix, or if it cannot be written.
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
        """A deep copy, where computed tensors (weight norm's) are values: deepcopy refuses them."""
        memo = {}
        for _, layer in self.layers.named_modules(module):
            for value in [*vars(layer).values(), *vars(layer).get("_buffers", {}).values()]:
                if self.framework.is_tensor(value) and not self.is_leaf(value):
                    memo[id(value)] = value.detach().clone()
        return copy.deepcopy(module, memo)

    @cached_property
    def module_attributes(self) -> frozenset[str]:
        return frozenset(vars(self.module_class()))

    device_of: Callable[[Any], Any]  # the device argument for a tensor beside this one
    has_values: Callable[[Any], bool]  # false until the model's first run makes it
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

    @abstractmethod
    def set_value(self, tensor: Any, array: np.ndarray) -> None:
        """Copy `array`, of the same shape, into `tensor`, which keeps its precision."""

    def is_leaf(self, tensor: Any) -> bool:
        """Whether it is not computed from other tensors."""
        return tensor.is_leaf

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
