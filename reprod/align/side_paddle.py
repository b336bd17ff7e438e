"""A PaddlePaddle model as a side of a comparison (see side.py)."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops as ops
from paddle import nn
from paddle.nn.functional import common

from reprod.recipe.cli import UserError

from .capture_paddle import recording, to_array
from .convert import PADDLE_TYPES, RULES, Change, keep, rules_of_port
from .recording import Call, map_tensors, tensors_in
from .report import one_line
from .side import Module, Run, Slot

DROPOUTS = (nn.Dropout, nn.Dropout2D, nn.Dropout3D, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _kind(module: nn.Layer) -> str:
    """The nearest class of paddle.nn that `module` derives from; "" if that is nn.Layer itself or a container."""
    for base in type(module).__mro__:
        if base.__module__.startswith("paddle.nn.layer.") and base not in (nn.Layer, nn.Sequential, nn.LayerList):
            return PADDLE_TYPES.get(base.__name__, base.__name__)
    return ""


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


@contextmanager
def _default_dtype(dtype: str) -> Iterator[None]:
    """Tensors that a model makes without saying of what type are of this one."""
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)


@contextmanager
def _without_dropout() -> Iterator[None]:
    """Dropout that is called as a function, also inside other layers, is as in eval mode."""

    def off(native: Callable) -> Callable:
        return lambda x, seed, p, is_test, *rest: native(x, seed, p, True, *rest)

    def off_along_axes(*args, **kwargs) -> paddle.Tensor:
        return natives[common, "dropout"](*args, **kwargs | {"training": False})

    natives = {(at, name): getattr(at, name) for at, name in ((ops, "dropout"), (ops, "dropout_"), (common, "dropout"))}
    ops.dropout, ops.dropout_ = off(ops.dropout), off(ops.dropout_)
    common.dropout = off_along_axes  # what dropout2d and dropout3d call
    try:
        yield
    finally:
        for (at, name), native in natives.items():
            setattr(at, name, native)


def _folded(shape: Sequence[int]) -> Change:
    """A LayerNorm's weight over several axes, which Paddle keeps flat; its own inverse."""
    return lambda array: array.reshape(-1 if array.ndim > 1 else tuple(shape))


def _double(module: nn.Layer) -> None:
    """To float64; Layer.double() makes floats of whole numbers too, such as counts and indices."""
    owned = ((layer, *item) for layer in module.sublayers(include_self=True) for item in layer.named_buffers("", False))
    whole = [(layer, name, tensor.clone()) for layer, name, tensor in owned if not tensor.is_floating_point()]
    module.double()
    for layer, name, tensor in whole:
        setattr(layer, name, tensor)


class PaddleSide:
    """Raises UserError for anything but a paddle.nn.Layer."""

    def __init__(self, model: nn.Layer, device: str = "cpu") -> None:
        if not isinstance(model, nn.Layer):
            raise UserError(f"the port is a {type(model).__name__}, no paddle.nn.Layer: give a model")
        paddle.set_device(device)
        self.model = copy.deepcopy(model).float()
        self.modules, seen = {}, set()
        for name, module in self.model.named_sublayers(include_self=True):
            self.modules[name] = self._describe(name, module, seen)
        self._slots = {slot.key: slot for module in self.modules.values() for slot in module.slots.values()}
        self._layers = dict(self.model.named_sublayers(include_self=True))

    def _describe(self, name: str, module: nn.Layer, seen: set[int]) -> Module:
        prefix, kind = f"{name}." if name else "", _kind(module)
        rules, slots = rules_of_port(kind), {}
        own = [*module.named_parameters(include_sublayers=False), *module.named_buffers(include_sublayers=False)]
        saved = self.model.state_dict().keys()
        for leaf, tensor in own:
            if id(tensor) not in seen and prefix + leaf in saved:  # a recurrent layer's cells hold its own tensors
                torch_leaf, change = rules.get(leaf, (leaf, keep))
                if kind == "LayerNorm" and len(module._normalized_shape) > 1:
                    change = _folded(module._normalized_shape)
                shape = change(to_array(tensor)).shape
                slots[torch_leaf] = Slot(prefix + leaf, shape, change, not tensor.stop_gradient)
                seen.add(id(tensor))
        is_leaf = next(module.children(), None) is None
        return Module(name, type(module).__name__, kind if kind in RULES or not slots else "", slots, is_leaf)

    def _torch_layout(self, arrays: Mapping[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
        slots = self._slots
        return {key: slots[prefix + key].change(array) for key, array in arrays.items() if prefix + key in slots}

    def arrays(self) -> dict[str, np.ndarray]:
        return self._torch_layout({key: to_array(tensor) for key, tensor in self.model.state_dict().items()})

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        state = self.model.state_dict()
        for key, array in self._torch_layout(arrays).items():
            if tuple(state[key].shape) != array.shape:
                raise UserError(f"weights do not fit the port: {key} is {tuple(state[key].shape)}, not {array.shape}")
            state[key].set_value(paddle.to_tensor(array).astype(state[key].dtype))

    def _copy(self, module: nn.Layer, dtype: str, train: bool) -> nn.Layer:
        module = copy.deepcopy(module)
        if dtype == "float64":
            _double(module)
        module.train() if train else module.eval()
        for child in module.sublayers(include_self=True):
            if isinstance(child, DROPOUTS):
                child.eval()
            elif isinstance(child, nn.layer.rnn.RNNBase):
                child.dropout = 0.0
                child.train()  # in eval mode its kernel keeps nothing for a backward pass; without dropout they are one
        return module

    def _tensors(self, value: Any, dtype: str, needs_grad: bool) -> Any:
        def convert(array: np.ndarray) -> paddle.Tensor:
            if array.dtype.kind != "f":
                return paddle.to_tensor(array)
            return paddle.to_tensor(array, dtype=dtype, stop_gradient=not needs_grad)

        return map_tensors(value, _is_array, convert)

    def _run(
        self, model: nn.Layer, prefix: str, call: Call, dtype: str, train: bool, backward: bool, calls: bool
    ) -> Run:
        args, kwargs = self._tensors((call.args, call.kwargs), dtype, backward)
        # An operation in place may not change a leaf that needs a gradient.
        given = map_tensors((args, kwargs), paddle.is_tensor, lambda t: t if t.stop_gradient else t.clone())
        with (
            _default_dtype(dtype),
            _without_dropout() if train else nullcontext(),  # in eval mode there should be none
            paddle.set_grad_enabled(backward),
            recording(model, "output", calls) as record,
        ):
            run = Run(record)
            try:
                outputs = tensors_in(model(*given[0], **given[1]), paddle.is_tensor)
                run.output = [to_array(tensor) for tensor in outputs]
                if backward:
                    self._backward(outputs, call.upstream, dtype)
            except Exception as error:  # whatever a model may raise
                record.error = one_line(error)
        inputs = [t for t in tensors_in((args, kwargs), paddle.is_tensor) if t.is_floating_point()]
        run.input_gradients = [None if t.grad is None else to_array(t.grad) for t in inputs]
        gradients = {name: to_array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        buffers = {name: to_array(tensor) for name, tensor in model.state_dict().items() if tensor.stop_gradient}
        run.gradients, run.buffers = self._torch_layout(gradients, prefix), self._torch_layout(buffers, prefix)
        return run

    def _backward(self, outputs: list[paddle.Tensor], upstream: list, dtype: str) -> None:
        pairs = [
            (t, g)
            for t, g in zip(outputs, upstream, strict=False)
            if g is not None and g.shape == tuple(t.shape) and not t.stop_gradient
        ]
        if pairs:
            paddle.autograd.backward([t for t, _ in pairs], [self._tensors(g, dtype, False) for _, g in pairs])

    def run(
        self,
        inputs: Sequence[np.ndarray],
        dtype: str,
        train: bool,
        cotangent: Sequence[np.ndarray] | None = None,
        calls: bool = False,
    ) -> Run:
        call = Call("", 0, args=tuple(inputs), upstream=list(cotangent or ()))
        return self._run(self._copy(self.model, dtype, train), "", call, dtype, train, cotangent is not None, calls)

    def run_module(self, name: str, call: Call, dtype: str, train: bool, backward: bool) -> Run:
        prefix = f"{name}." if name else ""
        return self._run(self._copy(self._layers[name], dtype, train), prefix, call, dtype, train, backward, calls=True)
