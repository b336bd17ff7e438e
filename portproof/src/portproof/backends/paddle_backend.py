"""PaddlePaddle's backend (see base.py)."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from types import ModuleType
from typing import Any, ClassVar, cast

import numpy as np
import paddle
from paddle import _C_ops as ops
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.functional import common
from paddle.nn.utils.spectral_norm_hook import SpectralNorm
from paddle.nn.utils.weight_norm_hook import WeightNorm

from portproof.backends import draws_paddle, fp64_paddle, gradients_paddle
from portproof.backends.base import Backend, Layers, Note, Runs, Training, without_tf32
from portproof.backends.lent import patched
from portproof.backends.masks import Keep, alpha_scaled, scaled
from portproof.backends.slots import Named
from portproof.convert.rules import PADDLE_TO_TORCH, PADDLE_TYPES, Change, Rules, identity
from sturdyio.cli import UserError
from sturdyio.files import load_pdparams

DROPOUT, UNIFORM = common.dropout, ops.uniform
DTYPE = type(paddle.float32)
DLPACK = hasattr(paddle.Tensor, "__dlpack__")  # sharing memory with NumPy; not in Paddle 2.6
# Operations that make tensors, or change their precision.
MAKERS = (
    *("cast", "full", "full_", "full_like", "full_with_tensor", "arange", "linspace", "logspace", "eye", "one_hot"),
    *("empty", "empty_like", "assign_value", "assign_value_", "uniform", "gaussian", "truncated_gaussian_random"),
)


def _keywords_of_calls() -> list[dict[str, Any]] | None:
    """Keyword arguments of the running calls: up to 3.0 Paddle's hooks do not get them."""
    if "with_kwargs" in inspect.signature(nn.Layer.register_forward_post_hook).parameters:
        return None
    running, native = [], nn.Layer.__call__

    def call(layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        running.append(kwargs)
        try:
            return native(layer, *args, **kwargs)
        finally:
            running.pop()

    nn.Layer.__call__ = call  # type: ignore[method-assign,assignment]  # its own is kept in `native`
    return running


KEYWORDS = _keywords_of_calls()

# Paddle says this of every batch norm in train mode; it is no word on the port.
ALWAYS_SAID = "When training, we now always track global mean and variance."


class _Warnings(ModuleType):
    """Python's `warnings` for the module of Paddle's norms, without ALWAYS_SAID."""

    def __init__(self) -> None:
        super().__init__("warnings")
        vars(self).update(vars(warnings), warn=self._warn)

    @staticmethod
    def _warn(message: Any, category: Any = None, stacklevel: int = 1, **more: Any) -> None:
        if message != ALWAYS_SAID:
            warnings.warn(message, category, stacklevel + 1, **more)


QUIET_NORMS = {(nn.layer.norm, "warnings"): _Warnings()}


def _times(x: paddle.Tensor, scale: tuple[np.ndarray, np.ndarray]) -> paddle.Tensor:
    factor, summand = (BACKEND.tensor(array, x.place, x.dtype) for array in scale)
    return x * factor + summand


def _lent_dropout(keep: Keep) -> AbstractContextManager:
    """Replace the kernels, which functions under any name call, and what has none: dropout by axes, alpha dropout."""

    def kernel(name: str) -> Callable:
        native = getattr(ops, name)

        def call(x: paddle.Tensor, seed: Any, p: float, is_test: bool, mode: str, *rest: Any) -> paddle.Tensor:
            kept = None if is_test or p == 0 else keep(p, x.shape)
            if kept is None:
                return native(x, seed, p, True, mode, *rest)
            factor, _ = scaled(kept, p if mode == "upscale_in_train" else 0.0)
            factor = BACKEND.tensor(factor, x.place, x.dtype)
            return x.multiply_(factor) if name == "dropout_" else x * factor

        return call

    def by_axes(*args: Any, **kwargs: Any) -> paddle.Tensor:
        if "input" in kwargs:
            kwargs["x"] = kwargs.pop("input")
        bound = inspect.signature(DROPOUT).bind(*args, **kwargs)
        bound.apply_defaults()
        x, p, axis, training, mode = itemgetter("x", "p", "axis", "training", "mode")(bound.arguments)
        if axis is None or not training or p == 0:
            return DROPOUT(*args, **kwargs)
        axes = [axis] if isinstance(axis, int) else axis
        kept = keep(p, [length if i in axes else 1 for i, length in enumerate(x.shape)])
        if kept is None:
            bound.arguments["training"] = False
            return DROPOUT(**bound.arguments)
        return _times(x, scaled(kept, p if mode == "upscale_in_train" else 0.0))

    def alpha(channels: bool) -> Callable:
        def call(x: paddle.Tensor, p: float = 0.5, training: bool = True, name: str | None = None) -> paddle.Tensor:
            shape = [*x.shape[:2], *[1] * (x.ndim - 2)] if channels else x.shape
            kept = keep(p, shape) if training and p else None
            return x if kept is None else _times(x, alpha_scaled(kept, p))

        return call

    kernels = {(ops, name): kernel(name) for name in ("dropout", "dropout_") if hasattr(ops, name)}
    functions = {(common, "dropout"): by_axes, (F, "dropout"): by_axes, (F, "alpha_dropout"): alpha(False)}
    if hasattr(F, "feature_alpha_dropout"):  # Paddle 2.6 has neither this nor dropout_
        functions[F, "feature_alpha_dropout"] = alpha(True)
    return patched(kernels | functions)


def _as_float64(note: Note) -> AbstractContextManager:
    def wide(native: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            named = any(map(_is_float32, (*args, *kwargs.values())))
            given = [paddle.float64 if _is_float32(value) else value for value in args]
            kwargs = {key: paddle.float64 if _is_float32(value) else value for key, value in kwargs.items()}
            result = native(*given, **kwargs)
            # An array in float32 is rounded already; one_hot's whole numbers are not.
            made = isinstance(result, paddle.Tensor) and result.dtype == paddle.float32
            if named or made:
                note(made and not named and native is to_tensor)
            return native_cast(result, paddle.float64) if made else result

        return call

    native_cast, to_tensor = ops.cast, paddle.to_tensor
    replaced = {(ops, name): wide(getattr(ops, name)) for name in MAKERS if hasattr(ops, name)}
    return patched(replaced | {(paddle, "to_tensor"): wide(to_tensor)})


def _is_float32(value: Any) -> bool:
    if isinstance(value, str):
        return value == "float32"
    return isinstance(value, DTYPE) and value == paddle.float32


def _folded(shape: Sequence[int]) -> Change:
    """Reshape what Paddle keeps flat; its own inverse."""
    return lambda array: array.reshape(-1 if array.ndim > 1 else tuple(shape))


def _of_norm(module: nn.Layer, hook: WeightNorm | SpectralNorm, name: str, change: Change) -> Rules:
    """Rules for weight_norm or spectral_norm of the parameter `name` (PyTorch's)."""
    if isinstance(hook, SpectralNorm):
        changes = {"orig": change, "u": identity, "v": identity}
        return {f"{hook.name}_{leaf}": (f"{name}_{leaf}", own) for leaf, own in changes.items()}
    length, direction = getattr(module, f"{hook.name}_g"), getattr(module, f"{hook.name}_v")
    folded: Change = identity
    if length.ndim and direction.ndim > 1:  # PyTorch keeps the other axes
        shape = [length.shape[0] if axis == hook.dim else 1 for axis in range(direction.ndim)]
        folded = _folded(change(np.empty(shape, bool)).shape)
    return {f"{hook.name}_g": (f"{name}_g", folded), f"{hook.name}_v": (f"{name}_v", change)}


class PaddleLayers(Layers):
    library, sequential = "paddle.nn.layer.", nn.Sequential
    containers = (nn.Layer, nn.Sequential, nn.LayerList)
    torch_types = PADDLE_TYPES
    named_modules = methodcaller("named_sublayers", include_self=True)

    def layouts(self, module: nn.Layer) -> Mapping[str, tuple[str, Change]]:
        kind = self.kind(module)
        rules = PADDLE_TO_TORCH.get(kind, {})
        if kind == "LayerNorm" and len(module._normalized_shape) > 1:  # flat in Paddle
            return {leaf: (name, _folded(module._normalized_shape)) for leaf, (name, _) in rules.items()}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                rules = rules | _of_norm(module, hook, *rules.get(hook.name, (hook.name, identity)))
        return rules

    def named_buffers(self, model: nn.Layer) -> Named:
        # Batch norm's statistics are parameters without a gradient.
        return ((name, tensor) for name, tensor in model.state_dict().items() if tensor.stop_gradient)


class PaddleRuns(Runs):
    framework, exact_constants = paddle, staticmethod(fp64_paddle.exact_constants)
    dtypes: ClassVar = {"float32": "float32", "float64": "float64"}
    lent_dropout, as_float64 = staticmethod(_lent_dropout), staticmethod(_as_float64)
    lent_draws = staticmethod(draws_paddle.lent_draws)
    wrong_gradients = staticmethod(gradients_paddle.wrong_gradients)
    dropouts = (nn.Dropout, nn.Dropout2D, nn.Dropout3D, nn.AlphaDropout, getattr(nn, "FeatureAlphaDropout", nn.Dropout))
    holding_dropout = (nn.layer.rnn.RNNBase,)

    def one_random(self) -> float:
        place = paddle.framework._current_expected_place()
        return cast("float", UNIFORM([1], paddle.float64, 0.0, 1.0, 0, place).item())

    @contextmanager
    def new_tensors(self, dtype: str, note: Note | None = None) -> Iterator[None]:
        with super().new_tensors(dtype, note), patched(QUIET_NORMS):
            yield

    @contextmanager
    def seeded_framework(self, seed: int) -> Iterator[None]:
        before = paddle.get_rng_state()
        paddle.seed(seed)
        try:
            yield
        finally:
            paddle.set_rng_state(before)

    def turn_off_dropout(self, layer: nn.Layer) -> float:
        if isinstance(layer, self.holding_dropout):
            layer.train()  # the eval kernel keeps nothing for backward; without dropout both agree
        return super().turn_off_dropout(layer)

    def hook_before(self, module: nn.Layer, hook: Callable) -> Any:
        if KEYWORDS is None:
            return module.register_forward_pre_hook(hook, with_kwargs=True)

        def before(layer: nn.Layer, args: tuple) -> tuple | None:
            changed = hook(layer, args, KEYWORDS[-1])
            return changed and changed[0]  # keywords cannot be replaced

        return module.register_forward_pre_hook(before)  # type: ignore[arg-type]  # stub: one tensor, not all arguments

    def hook_after(self, module: nn.Layer, hook: Callable) -> Any:
        if KEYWORDS is None:
            return module.register_forward_post_hook(hook, with_kwargs=True)
        return module.register_forward_post_hook(lambda layer, args, out: hook(layer, args, KEYWORDS[-1], out))


class PaddleTraining(Training):
    learning_rate, clear_gradients = methodcaller("get_lr"), methodcaller("clear_grad")
    leave, data_parallel = staticmethod(paddle.distributed.destroy_process_group), paddle.DataParallel

    def join(self) -> None:
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"  # read by the next line; NCCL on a machine with cards
        paddle.distributed.init_parallel_env()

    def to_device(self, module: nn.Layer, device: str, dtype: str) -> nn.Layer:
        """Not Layer.double(): Paddle 3.0 lacks it, and it converts integers too."""
        if dtype == "float64":
            for layer in module.sublayers(include_self=True):
                layer._dtype = "float64"  # for parameters still to be made
                for _, tensor in chain(*BACKEND.layers.own_tensors(layer)):
                    if tensor.is_floating_point():
                        BACKEND.put(tensor, BACKEND.to_array(tensor), dtype, device)
        return module

    def optimizer_state(self, optimizer: paddle.optimizer.Optimizer, model: nn.Layer) -> dict[str, Any]:
        """Without its schedule. Keys are a parameter's generated name, the state's, and a count that says nothing."""
        names = {parameter.name: name for name, parameter in model.named_parameters()}
        found: dict[str, Any] = {}
        for key, value in optimizer.state_dict().items():
            own = max((name for name in names if key.startswith(f"{name}_")), key=len, default="")
            if own:
                found.setdefault(names[own], {})[re.sub(r"_\d+$", "", key[len(own) + 1 :])] = value
            else:
                found[key] = value
        found.pop("LR_Scheduler", None)
        return found

    def sgd(self, parameters: list, rate: float) -> paddle.optimizer.Optimizer:
        return paddle.optimizer.SGD(rate, parameters)


class PaddleBackend(Backend):
    name, framework = "paddle", paddle
    module_class, module_class_name = nn.Layer, "paddle.nn.Layer"
    layers, runs, training = PaddleLayers(), PaddleRuns(), PaddleTraining()
    load_file = staticmethod(load_pdparams)
    device_of = attrgetter("place")

    def device(self, name: str) -> str:
        device = "gpu:0" if name == "gpu" else name
        if name == "gpu" and not (paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count()):
            remedy = "use --device cpu or install paddlepaddle-gpu"
            raise UserError(f"--device gpu: this PaddlePaddle sees no card; {remedy}")
        without_tf32()
        paddle.set_device(device)  # a global setting
        return device

    def tensor(self, array: np.ndarray, device: Any = None, dtype: Any = None, requires_grad: bool = False) -> Any:
        kind = array.dtype.kind
        if kind == "c" and dtype is not None:
            dtype = "complex128" if str(dtype).endswith("64") else "complex64"
        elif kind != "f":
            dtype = None
        return paddle.to_tensor(array, dtype, device, stop_gradient=kind != "f" or not requires_grad)

    def to_array(self, tensor: paddle.Tensor, copy: bool = True) -> np.ndarray:
        shape = tuple(tensor.shape)
        if min(shape, default=0) < 0 or not tensor._is_initialized() and 0 not in shape:  # reading would crash
            raise ValueError(f"a tensor of shape {shape} has no values")
        tensor = tensor.detach()
        if tensor.is_sparse():
            tensor = tensor.to_dense()
        if tensor.dtype == paddle.bfloat16:  # NumPy has no bfloat16
            tensor = tensor.astype("float32")
        if not copy and tensor.place.is_cpu_place() and DLPACK:
            return np.from_dlpack(tensor)
        return tensor.numpy()  # always a copy

    def has_values(self, tensor: paddle.Tensor) -> bool:
        return tensor._is_initialized() and not tensor.is_sparse()

    def is_sparse(self, tensor: paddle.Tensor) -> bool:
        return tensor.is_sparse()

    def as_sparse_as(self, tensor: paddle.Tensor, values: paddle.Tensor) -> paddle.Tensor:
        return values.to_sparse_csr() if tensor.is_sparse_csr() else values.to_sparse_coo(values.ndim)

    def requires_grad(self, tensor: paddle.Tensor) -> bool:
        return not tensor.stop_gradient

    def set_requires_grad(self, tensor: paddle.Tensor, value: bool) -> None:
        tensor.stop_gradient = not value

    def set_value(self, tensor: paddle.Tensor, array: np.ndarray) -> None:
        tensor.set_value(paddle.to_tensor(array).astype(tensor.dtype))

    def values(self, tensor: paddle.Tensor) -> paddle.Tensor:
        values = paddle.empty([])  # detach() would see later changes
        values.get_tensor()._share_data_with(tensor.get_tensor())
        return values

    def put(self, tensor: paddle.Tensor, array: np.ndarray, dtype: str, device: str) -> None:
        # A cast by Paddle saves copies; read-only memory is not shared.
        if array.dtype == np.float32 and dtype == "float64" and device == "cpu" and array.flags.writeable and DLPACK:
            self.put_back(tensor, paddle.utils.dlpack.from_dlpack(array).astype("float64"))
        else:
            super().put(tensor, array, dtype, device)

    def put_back(self, tensor: paddle.Tensor, values: paddle.Tensor) -> None:
        # set_value() keeps the precision; a new tensor has no hooks.
        tensor.get_tensor()._share_data_with(values.get_tensor())

    def taken_gradient(self, tensor: paddle.Tensor) -> paddle.Tensor | None:
        gradient = tensor.grad
        if gradient is not None:
            gradient = self.values(gradient)  # tensor.grad is cleared with the tensor's own
            try:
                tensor.grad = None
            except ValueError:  # Paddle 2.6 can only clear it, for all holders
                gradient = gradient.clone()
                tensor.clear_gradient(False)
        return gradient


BACKEND = PaddleBackend()
