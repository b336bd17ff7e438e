"""What a model of a framework is made of: its modules, and what its library's layers are called in PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from portproof.backends.slots import Named
from portproof.convert.rules import Change

Tensors = list[tuple[str, Any]]  # by name


class Layers(ABC):
    """The modules of a framework's models, and its library of layers."""

    library: str  # what the names of the modules that hold its layers begin with
    containers: tuple[type, ...]  # classes of the library that are no layers
    sequential: type  # the one whose output is only its last child's
    forward = "forward"  # the method that computes a module's output
    torch_types: Mapping[str, str]  # {class of the library: PyTorch's name, where that is another}

    @abstractmethod
    def named_modules(self, model: Any) -> Named:
        """(dotted name, module) of each module once, the model itself, "", first; none that computes a parameter."""

    def children(self, module: Any) -> Iterable[Any]:
        """The modules that `module` holds itself."""
        return module.children()

    def types(self, model: Any) -> dict[str, str]:
        """{dotted name: class name} of every module."""
        return {name: type(module).__name__ for name, module in self.named_modules(model)}

    def is_container(self, module: Any) -> bool:
        """Whether its output is only its last child's."""
        computed_by = getattr(type(module), self.forward)
        return isinstance(module, self.sequential) and computed_by is getattr(self.sequential, self.forward)

    def kind(self, module: Any) -> str:
        """The library's layer that `module` is or derives from, by PyTorch's name; "" for a module of one's own."""
        for base in type(module).__mro__:
            if base.__module__.startswith(self.library) and base not in self.containers:
                return self.torch_type(base.__name__)
        return ""

    def torch_type(self, layer: str) -> str:
        """PyTorch's name of the library's class `layer`."""
        return self.torch_types.get(layer, layer)

    @abstractmethod
    def layouts(self, module: Any) -> Mapping[str, tuple[str, Change]]:
        """{tensor of a layer: (PyTorch's name, change of layout)}; what is not in it is as in PyTorch."""

    def own_tensors(self, module: Any) -> tuple[Tensors, Tensors]:
        """(parameters, buffers) of the module itself, each as (name below the module, tensor)."""
        return list(module.named_parameters("", False)), list(module.named_buffers("", False))

    def named_parameters(self, model: Any) -> Named:
        """(state_dict key, tensor) of what may have a gradient."""
        return model.named_parameters()

    @abstractmethod
    def named_buffers(self, model: Any) -> Named:
        """(state_dict key, tensor) of what is not trained."""
