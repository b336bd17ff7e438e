"""Float64 arithmetic for Paddle, where its kernels hold float32 constants.

A kernel's attributes (a slope, a momentum) and some factors (1/N in the backward of a mean, weights of linear
interpolation) are float32 even for float64 tensors. That is 1e-9 to 1e-6 off, where two right answers agree to 1e-12,
and not the port's fault. So in a float64 comparison they are computed in float64. In float32 nothing is replaced.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import paddle
from paddle import _C_ops as ops

from portproof.backends.lent import patched

ACTIVATIONS = {
    "hardsigmoid": lambda _, x, slope, offset: (x * slope + offset).clip(0.0, 1.0),
    "hardtanh": lambda _, x, low, high: x.clip(low, high),
    "elu": lambda _, x, alpha: x.clip(min=0.0) + alpha * paddle.expm1(x.clip(max=0.0)),
    "celu": lambda _, x, alpha: x.clip(min=0.0) + alpha * paddle.expm1(x.clip(max=0.0) / alpha),
    "selu": lambda _, x, scale, alpha: scale * (x.clip(min=0.0) + alpha * paddle.expm1(x.clip(max=0.0))),
}


def batch_norm(native: Callable, x, mean, variance, weight, bias, is_test, momentum, *rest) -> tuple:
    """With momentum 0 the kernel writes the batch's statistics as the running ones."""
    *_, use_global_stats, trainable_statistics = rest
    if use_global_stats or (is_test and not trainable_statistics):
        return native(x, mean, variance, weight, bias, is_test, momentum, *rest)
    batch_mean, batch_variance = paddle.zeros_like(mean), paddle.zeros_like(variance)
    outputs = native(x, batch_mean, batch_variance, weight, bias, is_test, 0.0, *rest)
    with paddle.no_grad():
        paddle.assign(momentum * mean + (1 - momentum) * batch_mean, mean)
        paddle.assign(momentum * variance + (1 - momentum) * batch_variance, variance)
    return outputs


def p_norm(native: Callable, x, p, axis, epsilon, keepdim, as_vector) -> paddle.Tensor:
    """The kernel's backward divides by the norm plus 1e-12, which shows in weight norm's."""
    if p != 2.0 or as_vector:
        return native(x, p, axis, epsilon, keepdim, as_vector)
    squares = (x * x).sum(axis, keepdim=keepdim)
    is_zero = squares == 0  # where the gradient is 0
    norm = paddle.sqrt(paddle.where(is_zero, squares + 1, squares))
    return paddle.where(is_zero, paddle.zeros_like(squares), norm)


def _window_sizes(x: paddle.Tensor, y: paddle.Tensor, args: tuple) -> np.ndarray:
    """The number of values in each window, shaped to broadcast with the output."""
    size, strides, padding, _, exclusive, layout, _, _, adaptive, algorithm = args
    first = 2 if layout.startswith("NC") else 1
    pads = padding[:: len(padding) // len(size)]  # the kernel uses a pair's first for both ends
    sizes = np.ones(())
    for axis, extent in enumerate(size):
        length = x.shape[first + axis]
        count = y.shape[first + axis]
        stride = strides[axis]
        window = np.arange(count)
        if adaptive:
            start, end = window * length // count, -(-(window + 1) * length // count)
        else:
            pad = max((count - 1) * stride + extent - length, 0) // 2 if algorithm == "SAME" else pads[axis]
            start = window * stride - pad
            end = np.minimum(start + extent, length + pad)
        if exclusive:
            start, end = np.maximum(start, 0), np.minimum(end, length)
        sizes = np.multiply.outer(sizes, np.maximum(end - start, 1))  # a window may be all padding
    return sizes if first == 2 else sizes[..., None]


def pool(native: Callable, x: paddle.Tensor, *args) -> paddle.Tensor:
    """The forward is exact; the gradient is corrected for the kernel's float32 1/N."""
    y = native(x, *args)
    if args[6] != "avg":
        return y
    count = _window_sizes(x, y, args)
    lacking = paddle.to_tensor((1 / count) / (1 / count).astype(np.float32).astype(np.float64))
    return y * lacking - (y * (lacking - 1)).detach()


def _cubic(distance: np.ndarray) -> np.ndarray:
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * a * distance - 4 * a
    return np.where(distance <= 1, near, far)


def _interpolation(length: int, count: int, scale: float, cubic: bool, corners: bool, mode: int) -> np.ndarray:
    """(count, length): the weights that interpolate `count` samples from `length`."""
    places = np.arange(count)
    if corners:
        position = places * ((length - 1) / (count - 1) if count > 1 else 0.0)
    else:
        ratio = 1 / scale if scale > 0 else length / count
        position = (places + 0.5) * ratio - 0.5 if cubic or mode == 0 else places * ratio
        position = position if cubic else np.maximum(position, 0)
    low = np.floor(position).astype(int)
    t = position - low
    weights = {i: _cubic(abs(t - i)) for i in (-1, 0, 1, 2)} if cubic else {0: 1 - t, 1: t}
    matrix = np.zeros((count, length))
    for i, weight in weights.items():
        np.add.at(matrix, (places, np.clip(low + i, 0, length - 1)), weight)
    return matrix


def interpolate(native: Callable, x: paddle.Tensor, *args) -> paddle.Tensor:
    """Axis by axis; the kernel computes positions and weights in float32."""
    layout = args[3]
    scales = args[7]
    method = args[8]
    corners = args[9]
    mode = args[10]
    with paddle.no_grad():
        counts = native(x, *args).shape
    first = 2 if layout.startswith("NC") else 1
    for axis in range(first, first + x.ndim - 2):
        scale = scales[axis - first] if scales else 0.0
        matrix = _interpolation(x.shape[axis], counts[axis], scale, method == "bicubic", corners, mode)
        samples = paddle.matmul(paddle.moveaxis(x, axis, -1), paddle.to_tensor(matrix.T))
        x = paddle.moveaxis(samples, -1, axis)
    return x


REPLACED = {**ACTIVATIONS, "batch_norm": batch_norm, "p_norm": p_norm, "pool2d": pool, "pool3d": pool}
REPLACED |= {f"{way}linear_interp": interpolate for way in ("", "bi", "tri")} | {"bicubic_interp": interpolate}


def _guarded(native: Callable, exact: Callable) -> Callable:
    def call(x, *args, **kwargs):
        if x.dtype != paddle.float64:
            return native(x, *args, **kwargs)
        return exact(native, x, *args, **kwargs)

    return call


def exact_constants() -> AbstractContextManager:
    """Exact float64 arithmetic in this context; may be nested."""
    return patched({(ops, name): _guarded(getattr(ops, name), exact) for name, exact in REPLACED.items()})
