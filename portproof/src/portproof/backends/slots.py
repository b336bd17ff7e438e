"""Where each parameter and buffer of a model has its place in PyTorch's terms: by which name and in which layout.

The layers of the model itself tell how they are converted (see convert/rules.py). Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.arrays import in_rows
from portproof.convert.rules import RULES, Change, identity, view

if TYPE_CHECKING:
    from portproof.backends.base import Backend

Array = np.ndarray
Arrays = dict[str, Array]
Named = Iterable[tuple[str, Any]]  # tensors by their keys in the model's own state_dict


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


def describe(backend: Backend, model: Any) -> dict[str, Module]:
    """{dotted name: what it is} of every module; of tied tensors the first is listed, the others left out."""
    named = dict(backend.layers.named_modules(model))
    ids = {id(module) for module in named.values()}
    saved, seen, modules = model.state_dict().keys(), set(), {}
    for name, module in named.items():
        slots = dict(_own_slots(backend, module, f"{name}." if name else "", saved, seen))
        kind = backend.layers.kind(module)
        known = kind if kind in RULES or not slots else ""
        is_leaf = not any(id(child) in ids for child in backend.layers.children(module))
        modules[name] = Module(name, type(module).__name__, known, slots, is_leaf)
    return modules


def _own_slots(
    backend: Backend, module: Any, prefix: str, saved: Container[str], seen: set[int]
) -> Iterator[tuple[str, Slot]]:
    """(PyTorch's name within the module, slot) of its own tensors that are saved, but those `seen`; now all are."""
    layouts = backend.layers.layouts(module)
    for is_buffer, tensors in enumerate(backend.layers.own_tensors(module)):
        for leaf, tensor in tensors:
            is_new = prefix + leaf in saved and id(tensor) not in seen
            seen.add(id(tensor))
            if not is_new:
                continue
            torch_leaf, change = layouts.get(leaf, (leaf, identity))
            key = prefix + (torch_leaf if "." in leaf else leaf)  # what follows the last dot is in the module
            shape = change(np.empty(tuple(tensor.shape), bool)).shape
            trained, is_whole = backend.requires_grad(tensor), not tensor.is_floating_point()
            yield torch_leaf, Slot(key, prefix + leaf, shape, change, trained, bool(is_buffer), is_whole)


def read_slots(backend: Backend, tensors: Named, slots: Mapping[str, Sequence[Slot]]) -> Iterator[tuple[Slot, Array]]:
    """(slot, array) of each piece of these tensors, as PyTorch would store it; not a copy where it need not be.

    `slots` are the pieces of each tensor, by state_dict key; a tensor that is not among them is left out.
    """
    for key, tensor in tensors:
        if key in slots:
            own = backend.to_array(tensor, copy=False)
            for slot in slots[key]:
                yield slot, slot.read(own)


class ModelArrays:
    """The parameters, buffers and gradients of one model as arrays, copies, by PyTorch's names and in its layout.

    The structure of the model is read when this is made, its values at each call.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self.backend, self.model = backend, model
        self.modules = describe(backend, model)
        self.slots: dict[str, Slot] = {}  # by state_dict key
        self.names: dict[str, str] = {}  # {state_dict key: PyTorch's}
        for name, module in self.modules.items():
            for leaf, slot in module.slots.items():
                self.slots[slot.tensor] = slot
                self.names[slot.tensor] = f"{name}.{leaf}" if name else leaf

    def _read(self, tensors: Named) -> Arrays:
        found = read_slots(self.backend, tensors, {key: [slot] for key, slot in self.slots.items()})
        return {self.names[slot.tensor]: in_rows(array, copy=True) for slot, array in found}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all parameters and buffers."""
        return {self.names[key]: slot.shape for key, slot in self.slots.items()}

    def parameters(self) -> Arrays:
        """All trained parameters."""
        named = self.backend.layers.named_parameters(self.model)
        return self._read((key, tensor) for key, tensor in named if self.backend.requires_grad(tensor))

    def buffers(self) -> Arrays:
        """What is saved and not trained: batch norm's running statistics and counts."""
        return self._read(self.backend.layers.named_buffers(self.model))

    def saved(self) -> Arrays:
        """All that is saved: trained parameters, then buffers, then parameters that are frozen."""
        return self.parameters() | self.buffers() | self._read(self.model.state_dict().items())

    def gradients(self) -> Arrays:
        """The gradients of all parameters; one that received none is missing."""
        named = self.backend.layers.named_parameters(self.model)
        found = ((key, getattr(tensor, "grad", None)) for key, tensor in named)
        return self._read((key, gradient) for key, gradient in found if gradient is not None)

    def set_gradients(self, gradients: Mapping[str, np.ndarray]) -> None:
        """Give each parameter that `gradients` names its array, as if a backward pass had."""
        for key, parameter in self.backend.layers.named_parameters(self.model):
            name = self.names.get(key)
            if name in gradients:
                own = self.slots[key].change(gradients[name])
                parameter.grad = self.backend.tensor(own, self.backend.device_of(parameter))

    def to_own(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """`arrays`, by PyTorch's names, by the model's own and in its layouts; what it does not have stays as it is."""
        slots, own = {name: self.slots[key] for key, name in self.names.items()}, {}
        for name, array in arrays.items():
            slot = slots.get(name)
            own[slot.tensor if slot else name] = slot.change(array) if slot else array
        return own
