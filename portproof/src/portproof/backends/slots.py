"""A model's tensors in PyTorch's terms (see convert/rules.py). Imports no framework."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from portproof.arrays import in_rows
from portproof.backends.containers import contents
from portproof.convert.rules import RULES, Change, identity, view

if TYPE_CHECKING:
    from portproof.backends.base import Backend

Array = np.ndarray
Arrays = dict[str, Array]
MaybeChange = Optional[Change]  # as Python 3.9 reads annotations at run time
Named = Iterable[tuple[str, Any]]  # (key in the model's own state_dict, tensor)


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer, or a piece of one, as PyTorch would store it."""

    key: str  # unique: its module's, a dot, PyTorch's name
    tensor: str  # key in the model's own state_dict
    shape: tuple[int, ...]
    change: Change  # of the whole tensor to PyTorch's layout; self-inverse
    trained: bool
    is_buffer: bool = False
    is_whole: bool = False  # integers or booleans
    is_complex: bool = False
    precision: str = "float32"  # in which the model holds it; of floats only
    view: MaybeChange = None  # takes the piece from a whole PyTorch tensor

    def read(self, own: np.ndarray) -> np.ndarray:
        """The piece in PyTorch's layout; may be a view."""
        whole = view(self.change, own)
        return self.view(whole).reshape(self.shape) if self.view else whole

    def written(self, own: np.ndarray, piece: np.ndarray) -> np.ndarray:
        """The model's own tensor `own` with this piece replaced; may share memory."""
        if not self.view:
            return view(self.change, piece)
        whole = np.array(self.change(own), order="C")
        part = self.view(whole)
        part[...] = piece.reshape(part.shape)
        return self.change(whole)


@dataclass(frozen=True)
class Module:
    name: str
    type: str
    kind: str  # PyTorch's name of its library layer, or ""
    slots: dict[str, Slot]  # by PyTorch's names in the module
    is_leaf: bool
    settings: dict[str, object]  # its public numbers, booleans, None and words; (n, n) becomes n


def describe(backend: Backend, model: Any) -> dict[str, Module]:
    """{dotted name: module} of all modules; of tied tensors only the first is listed."""
    named = dict(backend.layers.named_modules(model))
    ids = {id(module) for module in named.values()}
    saved = model.state_dict().keys()
    seen: set[int] = set()
    modules = {}
    for name, module in named.items():
        slots = dict(_own_slots(backend, module, f"{name}." if name else "", saved, seen))
        kind = backend.layers.kind(module)
        known = kind if kind in RULES or not slots else ""
        is_leaf = not any(id(child) in ids for child in backend.layers.children(module))
        modules[name] = Module(name, type(module).__name__, known, slots, is_leaf, _settings(module))
    return modules


def is_setting(value: object) -> bool:
    """Whether it is None, a boolean, a number or a line of text."""
    return value is None or type(value) in (bool, int, float) or type(value) is str and value.isprintable()


def _settings(module: Any) -> dict[str, object]:
    found = {}
    for key, value in vars(module).items():
        items = contents(value) if isinstance(value, list) else value if isinstance(value, tuple) else ()
        equal = all(map(is_setting, items)) and len(set(items)) == 1
        setting = items[0] if equal else value
        if is_setting(setting) and not key.startswith("_") and key != "training":
            found[key] = setting
    return found


def _own_slots(
    backend: Backend, module: Any, prefix: str, saved: Container[str], seen: set[int]
) -> Iterator[tuple[str, Slot]]:
    """(PyTorch's name, slot) of saved tensors not yet `seen`."""
    layouts = backend.layers.layouts(module)
    for is_buffer, tensors in enumerate(backend.layers.own_tensors(module)):
        for leaf, tensor in tensors:
            is_new = prefix + leaf in saved and id(tensor) not in seen and backend.has_values(tensor)
            seen.add(id(tensor))
            if not is_new:
                continue
            torch_leaf, change = layouts.get(leaf, (leaf, identity))
            key = prefix + (torch_leaf if "." in leaf else leaf)  # in the module: what follows the last dot
            shape = change(np.empty(tuple(tensor.shape), bool)).shape
            trained, is_whole = backend.requires_grad(tensor), not tensor.is_floating_point()
            dtype = str(tensor.dtype).lower().rpartition(".")[2]
            facts = bool(is_buffer), is_whole, "complex" in dtype, "float32" if is_whole else dtype
            yield torch_leaf, Slot(key, prefix + leaf, shape, change, trained, *facts)


def read_slots(backend: Backend, tensors: Named, slots: Mapping[str, Sequence[Slot]]) -> Iterator[tuple[Slot, Array]]:
    """(slot, array) of each piece of tensors in `slots`, in PyTorch's layout; may be views."""
    for key, tensor in tensors:
        if key in slots:
            own = backend.to_array(tensor, copy=False)
            for slot in slots[key]:
                yield slot, slot.read(own)


class ModelArrays:
    """Copies of a model's tensors and gradients as PyTorch has them, read at each call."""

    def __init__(self, backend: Backend, model: Any) -> None:
        self.backend, self.model = backend, model
        self.modules = describe(backend, model)
        self.slots: dict[str, Slot] = {}
        self.names: dict[str, str] = {}  # {state_dict key: PyTorch's name}
        for name, module in self.modules.items():
            for leaf, slot in module.slots.items():
                self.slots[slot.tensor] = slot
                self.names[slot.tensor] = f"{name}.{leaf}" if name else leaf

    def _read(self, tensors: Named) -> Arrays:
        found = read_slots(self.backend, tensors, {key: [slot] for key, slot in self.slots.items()})
        return {self.names[slot.tensor]: in_rows(array, copy=True) for slot, array in found}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.names[key]: slot.shape for key, slot in self.slots.items()}

    def parameters(self) -> Arrays:
        named = self.backend.layers.named_parameters(self.model)
        return self._read((key, tensor) for key, tensor in named if self.backend.requires_grad(tensor))

    def buffers(self) -> Arrays:
        """Untrained but saved: batch norm's running statistics and counts."""
        return self._read(self.backend.layers.named_buffers(self.model))

    def saved(self) -> Arrays:
        """All saved tensors: trained parameters, then buffers, then frozen parameters."""
        return self.parameters() | self.buffers() | self._read(self.model.state_dict().items())

    def gradients(self) -> Arrays:
        """The gradients of all parameters that received one."""
        named = self.backend.layers.named_parameters(self.model)
        found = ((key, getattr(tensor, "grad", None)) for key, tensor in named)
        return self._read((key, gradient) for key, gradient in found if gradient is not None)

    def set_gradients(self, gradients: Mapping[str, np.ndarray]) -> None:
        """Set the gradients of these parameters, as a backward pass would."""
        for key, parameter in self.backend.layers.named_parameters(self.model):
            name = self.names.get(key)
            if name is not None and name in gradients:
                own = self.slots[key].change(gradients[name])
                parameter.grad = self.backend.tensor(own, self.backend.device_of(parameter))

    def to_own(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """`arrays` by the model's own names and layouts; unknown ones as they are."""
        slots, own = {name: self.slots[key] for key, name in self.names.items()}, {}
        for name, array in arrays.items():
            slot = slots.get(name)
            own[slot.tensor if slot else name] = slot.change(array) if slot else array
        return own
