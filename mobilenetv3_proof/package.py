"""This project's two packages by their names: their own functions, and the backend that their models are of."""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from portproof.backends import backend

REF, PORT = "mobilenetv3_ref", "mobilenetv3_paddle"


class Package:
    """One of the two, on a device; raises UserError where its framework does not have that."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name = name
        self.role = "port" if name == PORT else "reference"
        self.backend = backend("paddle" if name == PORT else "torch")
        self.device = self.backend.device(device)

    def module(self, name: str) -> ModuleType:
        """The package's module of that name, such as "train.engine"."""
        return importlib.import_module(f"{self.name}.{name}")

    def build(self, factory: Callable[[], Any], arrays: Mapping[str, np.ndarray], dtype: str) -> Any:
        """`factory()` with `arrays`, by the reference's names, in "float32" or "float64"; UserError as in `load`."""
        model = factory()
        self.load(model, arrays)
        return self.backend.training.to_device(model, self.device, dtype)

    def load(self, model: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """Have the package load `arrays`, by the reference's names, into `model`; raises UserError as it does."""
        self.module("models").load_state_dict(model, self.backend.arrays_of(model).to_own(arrays))
