"""Paddle's float64 arithmetic without the float32 constants that some of its kernels keep inside.

A kernel's attribute (a slope, a momentum) and some factors (1/N in the backward of a mean) are float32 even where the
tensors are float64: 1e-9 to 6e-8 off, far more than the 1e-12 to which two right answers agree. That is the framework's
affair and not the port's. So while a comparison runs in float64, these operations, wherever a layer or a function of
Paddle calls them, are done with the same numbers in float64. In float32 nothing is replaced.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import paddle
from paddle import _C_ops as ops


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
    if is_test:
        return native(x, mean, variance, weight, bias, is_test, momentum, *rest)
    batch_mean, batch_variance = paddle.zeros_like(mean), paddle.zeros_like(variance)
    outputs = native(x, batch_mean, batch_variance, weight, bias, is_test, 0.0, *rest)
    with paddle.no_grad():
        paddle.assign(momentum * mean + (1 - momentum) * batch_mean, mean)
        paddle.assign(momentum * variance + (1 - momentum) * batch_variance, variance)
    return outputs


def _window_sizes(native: Callable, x: paddle.Tensor, args: tuple) -> np.ndarray | None:
    """How many values each window's mean is over, as a factor that broadcasts with the output; None: not known."""
    size, stride, padding, ceil_mode, exclusive, layout, _, _, adaptive, algorithm = args
    if layout != "NCHW" or ceil_mode:
        return None
    size = [int(n) for n in size]
    if adaptive:
        spans = []
        for length, count in zip(x.shape[2:], size, strict=True):
            edges = [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]
            spans.append(np.array([end - start for start, end in edges]))
        return spans[0][:, None] * spans[1]
    if not exclusive:
        return np.array(math.prod(size))
    inside = native(
        paddle.ones_like(x[:1, :1]), size, stride, padding, False, False, layout, "avg", False, False, algorithm
    )
    return np.round(inside.numpy() * math.prod(size))


def pool2d(native: Callable, x: paddle.Tensor, *args) -> paddle.Tensor:
    """The forward is exact; the gradient is multiplied by what the kernel's float32 1/N lacks."""
    y = native(x, *args)
    count = _window_sizes(native, x, args) if args[6] == "avg" else None
    if count is None:
        return y
    lacking = paddle.to_tensor((1 / count) / (1 / count).astype(np.float32).astype(np.float64))
    return y * lacking - (y * (lacking - 1)).detach()


REPLACED = {f.__name__: f for f in (hardsigmoid, hardtanh, elu, celu, selu, batch_norm, pool2d)}


def _guarded(native: Callable, exact: Callable) -> Callable:
    def call(x, *args, **kwargs):
        if x.dtype != paddle.float64:
            return native(x, *args, **kwargs)
        return exact(native, x, *args, **kwargs)

    return call


@contextmanager
def exact_constants() -> Iterator[None]:
    """In this context Paddle's operations on float64 tensors hold no float32 constant; it may be nested."""
    natives = {name: getattr(ops, name) for name in REPLACED}
    for name, exact in REPLACED.items():
        setattr(ops, name, _guarded(natives[name], exact))
    try:
        yield
    finally:
        for name, native in natives.items():
            setattr(ops, name, native)
