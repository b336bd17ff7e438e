"""One model as a comparison sees it, whichever framework it is of: its modules, its tensors, its runs, as arrays."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.backends.trace import ModuleCall, Trace, map_tensors, tensors_in
from portproof.convert.rules import Change
from portproof.io.cli import UserError, one_line

if TYPE_CHECKING:
    from portproof.backends.base import Backend


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
        """The piece in PyTorch's layout, of the whole tensor in this model's own."""
        whole = self.change(own)
        return self.view(whole).reshape(self.shape) if self.view else whole

    def written(self, own: np.ndarray, piece: np.ndarray) -> np.ndarray:
        """The whole tensor in this model's own layout with this piece in it; `own` is what it was before."""
        if not self.view:
            return self.change(piece)
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


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


class BackendModel:
    """A model in float32; every run is done on a copy, so that none sees what another left.

    Arrays are by the model's own state_dict keys, in PyTorch's layout. Of tied tensors only the first has a place.
    """

    modules: dict[str, Module]  # by dotted name, "" is the model

    def __init__(self, backend: "Backend", model: Any, role: str, device: str) -> None:
        """Raises UserError for what is no model of this framework, and for a device that it does not have."""
        if not isinstance(model, backend.module_class):
            raise UserError(f"the {role} is a {type(model).__name__}, no {backend.module_class_name}: give a model")
        self.backend, self.role, self.device = backend, role, backend.device(device)
        self.model = backend.copied(model).float()
        self._whole = backend.describe(self.model)
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

    def arrays(self) -> dict[str, np.ndarray]:
        """All parameters and buffers."""
        return self._in_torch_layout(self.model.state_dict().items())

    def _in_torch_layout(self, tensors: Any, prefix: str = "") -> dict[str, np.ndarray]:
        """The pieces of those that have a place, by their keys; `prefix` is missing from the given keys and these."""
        return {
            slot.key.removeprefix(prefix): slot.read(self.backend.to_array(tensor))
            for key, tensor in tensors
            for slot in self._pieces.get(prefix + key, ())
        }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put `arrays` (as `arrays()` gives them) into the model; raises UserError for a key or shape that is not.

        A tensor may also be given whole, by its state_dict key.
        """
        state = self.model.state_dict()
        whole = {slot.tensor: slot for module in self._whole.values() for slot in module.slots.values()}
        for key, array in arrays.items():
            slot = self._slots.get(key, whole.get(key))
            if slot is None and key not in state:
                raise UserError(f"weights do not fit the {self.role}: it has no {key}")
            if slot is not None:
                if array.shape != slot.shape:
                    raise UserError(f"weights do not fit the {self.role}: {key} is {slot.shape}, not {array.shape}")
                own = slot.written(self.backend.to_array(state[slot.tensor]), array)
                self.backend.set_value(state[slot.tensor], own)

    def run(
        self,
        inputs: Sequence[np.ndarray],
        dtype: str,
        train: bool,
        cotangent: Sequence[np.ndarray] | None = None,
        calls: bool = False,
    ) -> Run:
        """Run the model on `inputs` in "float32" or "float64"; dropout is off in either mode.

        With `cotangent` (an array an output) the gradients of sum(output * cotangent) are taken too. What a model
        raises ends the trace and is in `trace.error`.
        """
        call = ModuleCall("", 0, args=tuple(inputs), upstream=list(cotangent or ()))
        return self._run(self.copied("", dtype, train), call, dtype, train, cotangent is not None, calls)

    def run_module(self, name: str, call: ModuleCall, dtype: str, train: bool, backward: bool) -> Run:
        """Run only the module `name` on the arguments of `call`, backward from its upstream gradients."""
        call = replace(call, name=name)
        return self._run(self.copied(name, dtype, train), call, dtype, train, backward, calls=True)

    def dropout_probability(self, name: str) -> float:
        """Of the dropout layer `name`; 0 for a layer of another kind."""
        return float(getattr(self.backend.submodule(self.model, name), "p", 0.0))

    def run_dropout(self, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the layer `name` makes of `x` (float32) with its dropout on: in eval mode, and twice in train mode."""
        layer = self.backend.moved(
            self.backend.copied(self.backend.submodule(self.model, name)), self.device, "float32"
        )
        outputs = []
        for train in (False, True, True):
            layer.train() if train else layer.eval()
            outputs.append(self.backend.to_array(layer(self._tensors(x, "float32", False))))
        return tuple(outputs)

    def copied(self, name: str, dtype: str, train: bool) -> Any:
        """A copy of the module `name` ("": the model), a model of the framework's own, on the device; without dropout.

        A later `train()` turns dropout layers on again, see `Backend.without_dropout`.
        """
        module = self.backend.copied(self.backend.submodule(self.model, name))
        module = self.backend.moved(module, self.device, dtype)
        module.train() if train else module.eval()
        for _, layer in self.backend.named_modules(module):
            self.backend.turn_off_dropout(layer)
        return module

    def _tensors(self, value: Any, dtype: str, requires_grad: bool) -> Any:
        return map_tensors(value, _is_array, lambda a: self.backend.tensor(a, self.device, dtype, requires_grad))

    def _run(self, model: Any, call: ModuleCall, dtype: str, train: bool, backward: bool, calls: bool) -> Run:
        """Run `model`, which is or stands for the module that `call` names, on what the call received."""
        backend, is_tensor = self.backend, self.backend.framework.is_tensor
        args, kwargs = self._tensors((call.args, call.kwargs), dtype, backward)
        # An operation in place may not change a leaf that needs a gradient.
        given = map_tensors((args, kwargs), is_tensor, lambda t: t.clone() if backend.requires_grad(t) else t)
        with (
            backend.new_tensors(dtype),
            backend.without_dropout() if train else nullcontext(),  # in eval mode there should be none
            backend.framework.set_grad_enabled(backward),
            backend.trace(model, "output", calls) as trace,
        ):
            run = Run(trace)
            try:
                outputs = tensors_in(model(*given[0], **given[1]), is_tensor)
                run.output = [backend.to_array(tensor) for tensor in outputs]
                if backward:
                    self._backward(outputs, call.upstream, dtype)
            except Exception as error:  # whatever a model may raise
                trace.error = one_line(error)
        inputs = [t for t in tensors_in((args, kwargs), is_tensor) if t.is_floating_point()]
        run.input_gradients = [None if t.grad is None else backend.to_array(t.grad) for t in inputs]
        prefix = f"{call.name}." if call.name else ""
        run.gradients = self._in_torch_layout(backend.named_gradients(model), prefix)
        run.buffers = self._in_torch_layout(backend.named_buffers(model), prefix)
        return run

    def _backward(self, outputs: list, upstream: list, dtype: str) -> None:
        tensors, gradients = [], []
        for tensor, gradient in zip(outputs, upstream, strict=False):
            if gradient is not None and gradient.shape == tuple(tensor.shape) and self.backend.requires_grad(tensor):
                tensors.append(tensor)
                gradients.append(self._tensors(gradient, dtype, False))
        if tensors:
            self.backend.framework.autograd.backward(tensors, gradients)
