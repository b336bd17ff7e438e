"""Float64 arithmetic for MindSpore, where its own is float32 or missing.

Convolution, batch norm and some activations have only float32 kernels. Python numbers become float32 beside float64
tensors, and layer norm computes in float32. None of that is the port's fault. So during a float64 comparison these
operations are composed of others. In float32 nothing is replaced: the kernels themselves are judged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import operations

from portproof.backends.lent import patched
from portproof.python39 import zip_strict

# Tensor methods that take a Python number.
OPERATORS = ("add", "sub", "mul", "truediv", "pow")
METHODS = [f"__{way}{name}__" for name in OPERATORS for way in ("", "r", "i")]
METHODS += ["add", "sub", "mul", "div", "pow"]

composed: set[str] = set()  # operations replaced so far that lack a float64 kernel


def _windows(operation: operations.Conv2D, axis: int, length: int, kernel: int) -> tuple[int, int, np.ndarray]:
    """Along one axis: (padding before, after, index of each element of each window)."""
    stride, dilation = operation.stride[axis - 2], operation.dilation[axis - 2]
    extent = (kernel - 1) * dilation + 1
    if operation.pad_mode == "pad":
        before, after = operation.padding[2 * axis : 2 * axis + 2]
    elif operation.pad_mode == "same":
        total = max((-(-length // stride) - 1) * stride + extent - length, 0)
        before, after = total // 2, total - total // 2
    else:
        before, after = 0, 0
    starts = np.arange(0, length + before + after - extent + 1, stride)
    return before, after, dilation * np.arange(kernel)[:, None] + starts


def conv2d(operation: operations.Conv2D, x: Tensor, weight: Tensor) -> Tensor:
    top, bottom, rows = _windows(operation, 0, x.shape[2], weight.shape[2])
    left, right, columns = _windows(operation, 1, x.shape[3], weight.shape[3])
    x = ops.pad(x, [left, right, top, bottom])
    n, groups = x.shape[0], operation.group
    places = rows[:, None, :, None] * x.shape[3] + columns[None, :, None, :]
    x = ops.gather(x.reshape(n, x.shape[1], -1), Tensor(places.reshape(-1).astype(np.int32)), 2)
    x = x.reshape(n, groups, -1, rows.shape[1] * columns.shape[1])
    y = ops.matmul(weight.reshape(1, groups, weight.shape[0] // groups, -1), x)
    return y.reshape(n, weight.shape[0], rows.shape[1], columns.shape[1])


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (x.ndim - 2))


def batch_norm(operation: operations.BatchNorm, x: Tensor, gamma: Tensor, beta: Tensor, *kept: Tensor) -> tuple:
    """MindSpore's momentum weighs the new batch; the running variance is unbiased."""
    axes = (0, *range(2, x.ndim))
    mean, variance = kept
    if operation.is_training:
        mean, count = x.mean(axes), x.size // x.shape[1]
        variance = ((x - _by_channel(mean, x)) ** 2).mean(axes)
        for tensor, new in zip_strict(kept, (mean, variance * (count / (count - 1)))):
            average = operation.momentum * new + (1 - operation.momentum) * tensor
            tensor.assign_value(Tensor(average.asnumpy()))
    scale = gamma / ops.sqrt(variance + operation.epsilon)
    y = (x - _by_channel(mean, x)) * _by_channel(scale, x) + _by_channel(beta, x)
    return y, mean, variance, mean, variance


def layer_norm(operation: operations.LayerNorm, x: Tensor, gamma: Tensor, beta: Tensor) -> tuple:
    axes = tuple(range(operation.begin_norm_axis % x.ndim, x.ndim))
    centred = x - x.mean(axes, keep_dims=True)
    variance = (centred * centred).mean(axes, keep_dims=True)
    inverse = 1 / ops.sqrt(variance + operation.epsilon)
    return centred * inverse * gamma + beta, x.mean(axes, keep_dims=True), inverse


REPLACED: dict[type, Callable] = {
    operations.Conv2D: conv2d,
    operations.BatchNorm: batch_norm,
    operations.LayerNorm: layer_norm,
    operations.ReLU6: lambda _, x: ops.relu(x) - ops.relu(x - 6),
    operations.PReLU: lambda _, x, weight: ops.relu(x) - _by_channel(weight, x) * ops.relu(-x),
}


def _guarded(native: Callable, exact: Callable) -> Callable:
    def call(operation: ops.Primitive, x: Tensor, *args: Tensor) -> Tensor | tuple:
        if x.dtype != ms.float64:
            return native(operation, x, *args)
        if exact is not layer_norm:
            composed.add(operation.name)
        return exact(operation, x, *args)

    return call


def _with_exact_numbers(native: Callable) -> Callable:
    def call(tensor: Tensor, other: object, *args: object, **kwargs: object) -> Tensor:
        if type(other) is float and tensor.dtype == ms.float64:
            other = Tensor(np.float64(other))
        return native(tensor, other, *args, **kwargs)

    return call


def exact_constants() -> AbstractContextManager:
    """Exact float64 arithmetic in this context; may be nested."""
    methods = [name for name in METHODS if hasattr(Tensor, name)]
    replaced = {(each, "__call__"): _guarded(each.__call__, exact) for each, exact in REPLACED.items()}
    return patched(replaced | {(Tensor, name): _with_exact_numbers(getattr(Tensor, name)) for name in methods})
