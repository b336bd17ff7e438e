"""What a model is made of: its modules and its framework's layers, by PyTorch's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from portproof.backends.slots import Named
from portproof.convert.rules import Change

Tensors = list[tuple[str, Any]]  # (name, tensor)


class Layers(ABC):
    library: str  # prefix of its layers' Python modules
    containers: tuple[type, ...]  # its classes that are no layers
    sequential: type  # returns its last child's output
    forward = "forward"
    torch_types: Mapping[str, str]  # {its class: PyTorch's name}, where they differ

    @abstractmethod
    def named_modules(self, model: Any) -> Named:
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
    def named_buffers(self, model: Any) -> Named:
        """(state_dict key, tensor) of the buffers."""
