"""What PaddlePaddle spells or does in its own way (see base.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops as ops
from paddle import nn
from paddle.nn.functional import common
from paddle.nn.utils.spectral_norm_hook import SpectralNorm
from paddle.nn.utils.weight_norm_hook import WeightNorm

from portproof.arrays import in_rows
from portproof.backends import fp64_paddle
from portproof.backends.base import SUFFIXES, Backend, without_tf32
from portproof.backends.layers import Layers
from portproof.backends.patched import patched
from portproof.backends.question import to_precision
from portproof.backends.runs import Runs
from portproof.backends.slots import Arrays
from portproof.backends.training import Training
from portproof.convert.rules import PADDLE_TO_TORCH, PADDLE_TYPES, Change, Rules, identity
from sturdyio.cli import UserError
from sturdyio.files import load_pdparams
from sturdyio.state_dict import read_state_dict

DTYPE = type(paddle.float32)
DLPACK = hasattr(paddle.Tensor, "__dlpack__")  # memory can be shared with NumPy; Paddle 2.6 cannot
# The operations that make tensors, or give them another precision.
MAKERS = ("cast", "full", "full_", "full_like", "full_with_tensor", "arange", "linspace", "logspace", "eye", "one_hot")
MAKERS += ("empty", "empty_like", "assign_value", "assign_value_", "uniform", "gaussian", "truncated_gaussian_random")
DROPOUTS = (nn.Dropout, nn.Dropout2D, nn.Dropout3D, nn.AlphaDropout, getattr(nn, "FeatureAlphaDropout", nn.Dropout))


def _keywords_of_calls() -> list[dict[str, Any]] | None:
    """The keyword arguments of the calls that are running; for Paddle up to 3.0, whose hooks do not get them."""
    if "with_kwargs" in inspect.signature(nn.Layer.register_forward_post_hook).parameters:
        return None
    running, native = [], nn.Layer.__call__

    def call(layer: nn.Layer, *args, **kwargs) -> Any:
        running.append(kwargs)
        try:
            return native(layer, *args, **kwargs)
        finally:
            running.pop()

    nn.Layer.__call__ = call
    return running


KEYWORDS = _keywords_of_calls()


def _without_dropout() -> AbstractContextManager:
    """Dropout that is called as a function, also inside other layers, is as in eval mode."""

    def off(native: Callable) -> Callable:
        return lambda x, seed, p, is_test, *rest: native(x, seed, p, True, *rest)

    names = [name for name in ("dropout", "dropout_") if hasattr(ops, name)]  # Paddle 2.6 has no dropout_
    replaced = {(ops, name): off(getattr(ops, name)) for name in names}
    return patched(replaced | {(common, "dropout"): partial(common.dropout, training=False)})  # dropout2d's and 3d's


def _as_float64(note: Callable[[bool], None]) -> AbstractContextManager:
    """What would be float32 is float64."""

    def wide(native: Callable) -> Callable:
        def call(*args, **kwargs) -> Any:
            named = any(map(_is_float32, (*args, *kwargs.values())))
            args = [paddle.float64 if _is_float32(value) else value for value in args]
            kwargs = {key: paddle.float64 if _is_float32(value) else value for key, value in kwargs.items()}
            result = native(*args, **kwargs)
            # Of an array in float32 it is rounded; what one_hot gives, whole numbers, is not.
            made = _is_float32_tensor(result)
            if named or made:
                note(made and not named and native is to_tensor)
            return cast(result, paddle.float64) if made else result

        return call

    cast, to_tensor = ops.cast, paddle.to_tensor
    replaced = {(ops, name): wide(getattr(ops, name)) for name in MAKERS if hasattr(ops, name)}
    return patched(replaced | {(paddle, "to_tensor"): wide(to_tensor)})


def _is_float32(value: Any) -> bool:
    return value == "float32" if isinstance(value, str) else isinstance(value, DTYPE) and value == paddle.float32


def _is_float32_tensor(value: Any) -> bool:
    return isinstance(value, paddle.Tensor) and value.dtype == paddle.float32


def _folded(shape: Sequence[int]) -> Change:
    """A tensor of this shape that Paddle keeps flat; its own inverse."""
    return lambda array: array.reshape(-1 if array.ndim > 1 else tuple(shape))


def _of_norm(module: nn.Layer, hook: WeightNorm | SpectralNorm, name: str, change: Change) -> Rules:
    """The rules of what weight_norm or spectral_norm makes of a parameter, which is `name` in PyTorch."""
    if isinstance(hook, SpectralNorm):
        return {
            f"{hook.name}_{leaf}": (f"{name}_{leaf}", change if leaf == "orig" else identity)
            for leaf in ["orig", "u", "v"]
        }
    length, direction = getattr(module, f"{hook.name}_g"), getattr(module, f"{hook.name}_v")
    shape = [1] * direction.ndim
    if length.ndim:  # PyTorch keeps the other axes
        shape[hook.dim] = length.shape[0]
        shape = change(np.empty(shape, bool)).shape
    folded = _folded(shape) if length.ndim and len(shape) > 1 else identity
    return {f"{hook.name}_g": (f"{name}_g", folded), f"{hook.name}_v": (f"{name}_v", change)}


class PaddleLayers(Layers):
    containers = (nn.Layer, nn.Sequential, nn.LayerList)
    library, sequential = "paddle.nn.layer.", nn.Sequential

    def named_modules(self, model: nn.Layer) -> Iterable[tuple[str, nn.Layer]]:
        return model.named_sublayers(include_self=True)

    def torch_type(self, layer: str) -> str:
        return PADDLE_TYPES.get(layer, layer)

    def layouts(self, module: nn.Layer) -> Mapping[str, tuple[str, Change]]:
        kind = self.kind(module)
        rules = PADDLE_TO_TORCH.get(kind, {})
        if kind == "LayerNorm" and len(module._normalized_shape) > 1:  # a weight over several axes is flat
            return {leaf: (name, _folded(module._normalized_shape)) for leaf, (name, _) in rules.items()}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                rules = rules | _of_norm(module, hook, *rules.get(hook.name, (hook.name, identity)))
        return rules

    def named_buffers(self, model: nn.Layer) -> Iterable[tuple[str, paddle.Tensor]]:
        # Batch norm's statistics are parameters without a gradient, and in no named_buffers().
        return ((name, tensor) for name, tensor in model.state_dict().items() if tensor.stop_gradient)


class PaddleRuns(Runs):
    framework, exact_constants = paddle, staticmethod(fp64_paddle.exact_constants)
    without_dropout = staticmethod(_without_dropout)

    @contextmanager
    def new_tensors(self, dtype: str, note: Callable[[bool], None] | None = None) -> Iterator[None]:
        before = paddle.get_default_dtype()
        paddle.set_default_dtype(dtype)
        try:
            with _as_float64(note) if note and dtype == "float64" else nullcontext():
                yield
        finally:
            paddle.set_default_dtype(before)

    @contextmanager
    def seeded_framework(self, seed: int) -> Iterator[None]:
        before = paddle.get_rng_state()
        paddle.seed(seed)
        try:
            yield
        finally:
            paddle.set_rng_state(before)

    def next_random(self) -> float:
        before = paddle.get_rng_state()
        number = paddle.rand([1], "float64").item()
        paddle.set_rng_state(before)
        return number

    def turn_off_dropout(self, layer: nn.Layer) -> None:
        if isinstance(layer, DROPOUTS):
            layer.eval()
        elif isinstance(layer, nn.layer.rnn.RNNBase):
            layer.dropout = 0.0
            layer.train()  # in eval mode its kernel keeps nothing for a backward pass; without dropout they are one

    def hook_before(self, module: nn.Layer, hook: Callable[[Any, tuple, dict], Any]) -> Any:
        if KEYWORDS is None:
            return module.register_forward_pre_hook(hook, with_kwargs=True)
        return module.register_forward_pre_hook(lambda layer, args: hook(layer, args, KEYWORDS[-1]))

    def hook_after(self, module: nn.Layer, hook: Callable[[Any, tuple, dict, Any], Any]) -> Any:
        if KEYWORDS is None:
            return module.register_forward_post_hook(hook, with_kwargs=True)
        return module.register_forward_post_hook(lambda layer, args, out: hook(layer, args, KEYWORDS[-1], out))


class PaddleTraining(Training):
    def to_device(self, module: nn.Layer, device: str, dtype: str) -> nn.Layer:
        """Not by Layer.double(), which Paddle 3.0 has not, and which makes floats of counts and indices too."""
        if dtype == "float64":
            for layer in module.sublayers(include_self=True):
                layer._dtype = dtype  # of the parameters that it may yet make
                for _, tensor in chain(layer.named_parameters("", False), layer.named_buffers("", False)):
                    if tensor.is_floating_point():
                        BACKEND.put(tensor, BACKEND.to_array(tensor), dtype, device)
        return module

    def set_threads(self, count: int) -> int:
        """Paddle cannot: it takes OMP_NUM_THREADS as it is when it is imported."""
        return count

    def learning_rate(self, optimizer: paddle.optimizer.Optimizer) -> float:
        return optimizer.get_lr()

    def sgd(self, parameters: list, rate: float) -> paddle.optimizer.Optimizer:
        return paddle.optimizer.SGD(rate, parameters)

    def clear_gradients(self, optimizer: paddle.optimizer.Optimizer) -> None:
        optimizer.clear_grad()


class PaddleBackend(Backend):
    """PaddlePaddle."""

    name, framework = "paddle", paddle
    module_class, module_class_name = nn.Layer, "paddle.nn.Layer"
    layers, runs, training = PaddleLayers(), PaddleRuns(), PaddleTraining()

    def device(self, name: str) -> str:
        device = "gpu:0" if name == "gpu" else name
        if name == "gpu" and not (paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count()):
            raise UserError(
                "--device gpu: this PaddlePaddle sees no card; use --device cpu or install paddlepaddle-gpu"
            )
        without_tf32()
        paddle.set_device(device)  # a global setting
        return device

    def read_weights(self, path: str | Path) -> Arrays:
        return read_state_dict(path, SUFFIXES[self.name], load_pdparams, np.ndarray, dict)  # tensors are read as arrays

    def tensor(self, array: np.ndarray, device: Any = None, dtype: Any = None, requires_grad: bool = False) -> Any:
        if array.dtype.kind == "c" and dtype is not None:
            dtype = "complex128" if str(dtype).endswith("64") else "complex64"
            return paddle.to_tensor(array, dtype, device)
        if array.dtype.kind != "f":
            return paddle.to_tensor(array, place=device)
        return paddle.to_tensor(array, dtype, device, stop_gradient=not requires_grad)

    def to_array(self, tensor: paddle.Tensor, copy: bool = True) -> np.ndarray:
        shape = tuple(tensor.shape)
        if min(shape, default=0) < 0 or not tensor._is_initialized() and 0 not in shape:  # to read it ends the process
            raise ValueError(f"a tensor of shape {shape} has no values")
        tensor = tensor.detach()
        if tensor.is_sparse():
            tensor = tensor.to_dense()
        if tensor.dtype == paddle.bfloat16:  # which NumPy does not have
            tensor = tensor.astype("float32")
        if not copy and tensor.place.is_cpu_place() and DLPACK:
            return np.from_dlpack(tensor)
        return tensor.numpy()  # always a copy

    def device_of(self, tensor: paddle.Tensor) -> Any:
        return tensor.place

    def requires_grad(self, tensor: paddle.Tensor) -> bool:
        return not tensor.stop_gradient

    def set_value(self, tensor: paddle.Tensor, array: np.ndarray) -> None:
        tensor.set_value(paddle.to_tensor(array).astype(tensor.dtype))

    def has_values(self, tensor: paddle.Tensor) -> bool:
        return tensor._is_initialized()

    def values(self, tensor: paddle.Tensor) -> paddle.Tensor:
        values = paddle.empty([])  # detach() would follow what the tensor is given later
        values.get_tensor()._share_data_with(tensor.get_tensor())
        return values

    def put(self, tensor: paddle.Tensor, array: np.ndarray, dtype: str, device: str) -> None:
        # A cast of Paddle's spares copies; memory that may not be written into is not shared.
        if array.dtype == np.float32 and dtype == "float64" and device == "cpu" and array.flags.writeable and DLPACK:
            values = paddle.utils.dlpack.from_dlpack(array).astype(dtype)
        elif array.dtype.kind == "f":
            values = paddle.to_tensor(in_rows(array), place=device).astype(dtype)
        else:
            values = paddle.to_tensor(to_precision(array, dtype), place=device)
        self.put_back(tensor, values)

    def put_back(self, tensor: paddle.Tensor, values: paddle.Tensor) -> None:
        # set_value() would keep the precision, and a new tensor would have no hooks.
        tensor.get_tensor()._share_data_with(values.get_tensor())

    def taken_gradient(self, tensor: paddle.Tensor) -> paddle.Tensor | None:
        gradient = tensor.grad
        if gradient is not None:
            gradient = self.values(gradient)  # what tensor.grad gives is emptied with the tensor's own
            try:
                tensor.grad = None
            except ValueError:  # Paddle 2.6 can only empty it, wherever else it is held
                gradient = gradient.clone()
                tensor.clear_gradient(False)
        return gradient


BACKEND = PaddleBackend()
