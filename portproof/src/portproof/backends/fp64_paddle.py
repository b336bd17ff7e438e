"""Paddle's float64 arithmetic without the float32 constants that some of its kernels keep inside.

A kernel's attribute (a slope, a momentum) and some factors (1/N in the backward of a mean, the weights of a linear
interpolation) are float32 even where the tensors are float64: 1e-9 to 1e-6 off, far more than the 1e-12 to which two
right answers agree. That is the framework's affair and not the port's. So while a comparison runs in float64, these
operations, wherever a layer or a function of Paddle calls them, are done with the same numbers in float64. In float32
nothing is replaced.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import paddle
from paddle import _C_ops as ops

from portproof.backends.patched import patched
from portproof.python39 import zip_strict


def hardsigmoid(native: Callable, x: paddle.Tensor, slope: float, offset: float) -> paddle.Tensor:
    return (x * slope + offset).clip(0.0, 1.0)


def hardtanh(native: Callable, x: paddle.Tensor, low: float, high: float) -> paddle.Tensor:
    return x.clip(low, high)


def elu(native: Callable, x: paddle.Tensor, alpha: float) -> paddle.Tensor:
    return x.clip(min=0.0) + alpha * paddle.expm1(x.clip(max=0.0))


def celu(native: Callable, x: paddle.Tensor, alpha: float) -> paddle.Tensor:
    return x.clip(min=0.0) + alpha * paddle.expm1(x.clip(max=0.0) / alpha)


def selu(native: Callable, x: paddle.Tensor, scale: float, alpha: float) -> paddle.Tensor:
    return scale * elu(native, x, alpha)


def batch_norm(native: Callable, x, mean, variance, weight, bias, is_test, momentum, *rest) -> tuple:
    """With momentum 0 the kernel leaves the batch's own statistics in what it is given for the running ones."""
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
    """The backward of the kernel divides by the norm plus 1e-12; in weight norm's that is seen."""
    if p != 2.0 or as_vector:
        return native(x, p, axis, epsilon, keepdim, as_vector)
    squares = (x * x).sum(axis, keepdim=keepdim)
    is_zero = squares == 0  # there the gradient is 0
    return paddle.where(is_zero, paddle.zeros_like(squares), paddle.sqrt(paddle.where(is_zero, squares + 1, squares)))


def _spans(length: int, count: int, size: int, stride: int, pad: int, exclusive: bool) -> np.ndarray:
    """How many values each of `count` windows holds along one axis; with its padding unless `exclusive`."""
    start = np.arange(count) * stride - pad
    if exclusive:
        return np.minimum(start + size, length) - np.maximum(start, 0)
    return np.minimum(start + size, length + pad) - start


def _adaptive_spans(length: int, count: int) -> np.ndarray:
    return np.array([-(-(i + 1) * length // count) - i * length // count for i in range(count)])


def _window_sizes(x: paddle.Tensor, y: paddle.Tensor, args: tuple) -> np.ndarray:
    """How many values each window's mean is over, as a factor that broadcasts with the output."""
    size, stride, padding, _, exclusive, layout, _, _, adaptive, algorithm = args
    first = 2 if layout.startswith("NC") else 1
    lengths, counts = (tensor.shape[first : first + len(size)] for tensor in (x, y))
    if adaptive:
        spans = [_adaptive_spans(length, count) for length, count in zip_strict(lengths, counts)]
    else:
        pads = padding[:: len(padding) // len(size)]  # of a pair the kernel takes the first for both ends
        if algorithm == "SAME":
            totals = [(n - 1) * s + k - m for m, n, k, s in zip_strict(lengths, counts, size, stride)]
            pads = [max(total, 0) // 2 for total in totals]
        columns = zip_strict(lengths, counts, size, stride, pads)
        spans = [_spans(*column, exclusive) for column in columns]
    sizes = functools.reduce(np.multiply.outer, [np.maximum(span, 1) for span in spans])  # a window may lie outside
    return sizes if first == 2 else sizes[..., None]


def pool(native: Callable, x: paddle.Tensor, *args) -> paddle.Tensor:
    """The forward is exact; the gradient is multiplied by what the kernel's float32 1/N lacks."""
    y = native(x, *args)
    if args[6] != "avg":
        return y
    count = _window_sizes(x, y, args)
    lacking = paddle.to_tensor((1 / count) / (1 / count).astype(np.float32).astype(np.float64))
    return y * lacking - (y * (lacking - 1)).detach()


def _taps(position: np.ndarray, cubic: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """(index of the first sample used, the weights of it and of those after it) for each place between samples."""
    low = np.floor(position)
    t = position - low
    if not cubic:
        return low.astype(int), [1 - t, t]
    a = -0.75
    near, far = (lambda d: ((a + 2) * d - (a + 3)) * d**2 + 1), (lambda d: ((d - 5) * d + 8) * a * d - 4 * a)
    return low.astype(int) - 1, [far(1 + t), near(t), near(1 - t), far(2 - t)]


def _interpolation(length: int, count: int, scale: float, cubic: bool, corners: bool, mode: int) -> np.ndarray:
    """(count, length): the weights with which `count` samples are taken from `length`."""
    if corners:
        position = np.arange(count) * ((length - 1) / (count - 1) if count > 1 else 0.0)
    else:
        ratio = 1 / scale if scale > 0 else length / count
        position = (np.arange(count) + 0.5) * ratio - 0.5 if cubic or mode == 0 else np.arange(count) * ratio
        position = position if cubic else np.maximum(position, 0)
    first, weights = _taps(position, cubic)
    matrix = np.zeros((count, length))
    for i, weight in enumerate(weights):
        np.add.at(matrix, (np.arange(count), np.clip(first + i, 0, length - 1)), weight)
    return matrix


def interpolate(native: Callable, x: paddle.Tensor, *args) -> paddle.Tensor:
    """One axis after the other; the kernel computes places and weights in float32."""
    layout, scales, method, corners, mode = args[3], args[7], args[8], args[9], args[10]
    with paddle.no_grad():
        counts = native(x, *args).shape
    first = 2 if layout.startswith("NC") else 1
    for axis in range(first, first + x.ndim - 2):
        scale = scales[axis - first] if scales else 0.0
        matrix = _interpolation(x.shape[axis], counts[axis], scale, method == "bicubic", corners, mode)
        x = paddle.moveaxis(paddle.matmul(paddle.moveaxis(x, axis, -1), paddle.to_tensor(matrix.T)), -1, axis)
    return x


REPLACED = {f.__name__: f for f in (hardsigmoid, hardtanh, elu, celu, selu, batch_norm, p_norm)}
REPLACED |= dict.fromkeys(("pool2d", "pool3d"), pool)
REPLACED |= dict.fromkeys(("linear_interp", "bilinear_interp", "trilinear_interp", "bicubic_interp"), interpolate)


def _guarded(native: Callable, exact: Callable) -> Callable:
    def call(x, *args, **kwargs):
        if x.dtype != paddle.float64:
            return native(x, *args, **kwargs)
        return exact(native, x, *args, **kwargs)

    return call


def exact_constants() -> AbstractContextManager:
    """In this context Paddle's operations on float64 tensors hold no float32 constant; it may be nested."""
    return patched({(ops, name): _guarded(getattr(ops, name), exact) for name, exact in REPLACED.items()})
