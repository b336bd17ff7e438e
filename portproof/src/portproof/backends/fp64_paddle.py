"""Float64 arithmetic for Paddle, where its kernels hold float32 constants.

A kernel's attributes (a slope, an epsilon) and some factors (1/N in the backward of a mean, weights of linear
interpolation) are float32 even for float64 tensors. That is 1e-9 to 1e-6 off, where two right answers agree to 1e-12,
and not the port's fault. So in a float64 comparison they are computed in float64. In float32 nothing is replaced.

What is replaced was measured to be off in a version that is supported; where another is exact, the replacement is too.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops as ops
from paddle.nn import functional as F

from portproof.backends.lent import patched


def elu(x: paddle.Tensor, alpha: float, width: float = 1.0) -> paddle.Tensor:
    """Its gradient at 0 is 1, as natively: that of two clipped parts would be added."""
    return paddle.where(x > 0, x, alpha * paddle.expm1(paddle.where(x > 0, paddle.zeros_like(x), x) / width))


ACTIVATIONS = {
    "hardsigmoid": lambda _, x, slope, offset: (x * slope + offset).clip(0.0, 1.0),
    "hardtanh": lambda _, x, low, high: paddle.where(
        x > low, paddle.where(x < high, x, paddle.full_like(x, high)), paddle.full_like(x, low)
    ),
    "elu": lambda _, x, alpha: elu(x, alpha),
    "celu": lambda _, x, alpha: elu(x, alpha, alpha),
    "selu": lambda _, x, scale, alpha: scale * elu(x, alpha),
    "leaky_relu": lambda _, x, slope: paddle.where(x < 0, x * slope, x),
    "softplus": lambda _, x, beta=1.0, threshold=20.0, name=None: paddle.where(
        x * beta > threshold, x, paddle.log1p(paddle.exp((x * beta).clip(max=threshold))) / beta
    ),
    "softshrink": lambda _, x, end: x - x.clip(-end, end),
    "thresholded_relu": lambda _, x, end, value=0.0: paddle.where(x > end, x, paddle.full_like(x, value)),
    "stanh": lambda _, x, inner, outer: outer * paddle.tanh(inner * x),
}


def rrelu(native: Callable, x: paddle.Tensor, lower: float, upper: float, is_test: bool) -> paddle.Tensor:
    return paddle.where(x > 0, x, x * ((lower + upper) / 2)) if is_test else native(x, lower, upper, is_test)


def _is_float32(number: object) -> bool:
    with np.errstate(over="ignore"):
        return isinstance(number, (int, float)) and float(np.float32(number)) == number


def operator(native: Callable, x: paddle.Tensor, other: object) -> paddle.Tensor:
    if isinstance(other, float) and not _is_float32(other):
        other = paddle.to_tensor(other, x.dtype)
    return native(x, other)


def power(native: Callable, x: paddle.Tensor, exponent: float, **rest: Any) -> paddle.Tensor:
    return native(x, exponent, **rest) if _is_float32(exponent) else x**exponent


def scale(
    native: Callable, x: paddle.Tensor, factor: float, bias: Any, bias_after_scale: bool, **rest: Any
) -> paddle.Tensor:
    if _is_float32(bias):
        return native(x, factor, bias, bias_after_scale, **rest)
    return x * factor + bias if bias_after_scale else (x + bias) * factor


def logit(native: Callable, x: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    inside = x.clip(epsilon, 1 - epsilon)
    return paddle.log(inside / (1 - inside)) if epsilon else native(x, epsilon)


def addmm(
    _: Callable, given: paddle.Tensor, x: paddle.Tensor, y: paddle.Tensor, beta: float, alpha: float, **rest: Any
) -> paddle.Tensor:
    return given * beta + paddle.matmul(x, y) * alpha


def huber_loss(_: Callable, x: paddle.Tensor, label: paddle.Tensor, delta: float) -> paddle.Tensor:
    inside = (x - label).clip(-delta, delta)
    return inside * (x - label - inside / 2)


def label_smooth(_: Callable, label: paddle.Tensor, prior: Any, epsilon: float) -> paddle.Tensor:
    added = paddle.full_like(label, epsilon / label.shape[-1]) if prior is None else prior * epsilon
    return label * (1 - epsilon) + added


def cross_entropy(native: Callable, x: paddle.Tensor, label: paddle.Tensor, *args: Any, **kwargs: Any) -> paddle.Tensor:
    """It smooths labels in float32, unless they are given one-hot in float64."""
    if kwargs.get("label_smoothing") and label.ndim == x.ndim - 1:
        label = F.one_hot(label, x.shape[-1]).astype(x.dtype)
    return native(x, label, *args, **kwargs)


def _float32_epsilon(epsilon: float) -> tuple[float, float]:
    """(the nearest float32, what the input is multiplied by for a norm with it to give the same).

    A norm of `factor * x` with `factor**2 * epsilon` is that of x with epsilon.
    """
    nearest = float(np.float32(epsilon))
    return nearest, math.sqrt(nearest / epsilon) if nearest else 1.0


def batch_norm(
    native: Callable,
    x: paddle.Tensor,
    mean: paddle.Tensor,
    variance: paddle.Tensor,
    weight: Any,
    bias: Any,
    is_test: bool,
    momentum: float,
    epsilon: float,
    *rest: Any,
) -> tuple:
    """With momentum 0 the kernel writes the batch's statistics as the running ones."""
    *_, use_global_stats, trainable_statistics = rest
    epsilon, factor = _float32_epsilon(epsilon)
    if use_global_stats or (is_test and not trainable_statistics):
        kept = mean * factor, variance * factor**2
        return native(x * factor, *kept, weight, bias, is_test, momentum, epsilon, *rest)
    batch_mean, batch_variance = paddle.zeros_like(mean), paddle.zeros_like(variance)
    outputs = native(x * factor, batch_mean, batch_variance, weight, bias, is_test, 0.0, epsilon, *rest)
    with paddle.no_grad():
        paddle.assign(momentum * mean + (1 - momentum) * batch_mean / factor, mean)
        paddle.assign(momentum * variance + (1 - momentum) * batch_variance / factor**2, variance)
    return outputs


def norm(native: Callable, x: paddle.Tensor, weight: Any, bias: Any, epsilon: float, *rest: Any) -> paddle.Tensor:
    epsilon, factor = _float32_epsilon(epsilon)
    return native(x * factor, weight, bias, epsilon, *rest)


def p_norm(
    native: Callable, x: paddle.Tensor, p: float, axis: int, epsilon: float, keepdim: bool, as_vector: bool
) -> paddle.Tensor:
    """The kernel's backward divides by the norm plus 1e-12, which shows in weight norm's."""
    if not 1 < p < math.inf or as_vector:
        return native(x, p, axis, epsilon, keepdim, as_vector)
    powers = (x * x if p == 2 else x.abs() ** p).sum(axis, keepdim=keepdim)
    is_zero = powers == 0  # where the gradient is 0
    norm = paddle.where(is_zero, powers + 1, powers)
    norm = paddle.sqrt(norm) if p == 2 else norm ** (1 / p)
    return paddle.where(is_zero, paddle.zeros_like(powers), norm)


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


def pool(native: Callable, x: paddle.Tensor, *args: Any) -> paddle.Tensor:
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


def interpolate(native: Callable, x: paddle.Tensor, *args: Any) -> paddle.Tensor:
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


NORMS = {"batch_norm": batch_norm, **dict.fromkeys(("layer_norm", "instance_norm", "group_norm"), norm)}
POOLS = {"pool2d": pool, "pool3d": pool}
INTERPOLATIONS = dict.fromkeys(("linear_interp", "bilinear_interp", "trilinear_interp", "bicubic_interp"), interpolate)
OTHERS = {"rrelu": rrelu, "pow": power, "scale": scale, "logit": logit, "addmm": addmm, "p_norm": p_norm}
OTHERS |= {"huber_loss": huber_loss, "label_smooth": label_smooth}
KERNELS = {**ACTIVATIONS, **NORMS, **POOLS, **INTERPOLATIONS, **OTHERS}
REPLACED: dict[tuple[Any, str], Any] = {(ops, name): exact for name, exact in KERNELS.items()}
REPLACED[F, "cross_entropy"] = cross_entropy
REPLACED |= {(paddle.Tensor, f"__{name}__"): operator for name in ("add", "radd", "sub", "rsub", "pow")}


def _guarded(native: Callable, exact: Callable) -> Callable:
    def call(x: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype != paddle.float64:
            return native(x, *args, **kwargs)
        return exact(native, x, *args, **kwargs)

    return call


def exact_constants() -> AbstractContextManager:
    """Exact float64 arithmetic in this context; may be nested."""
    return patched({place: _guarded(getattr(*place), exact) for place, exact in REPLACED.items()})
