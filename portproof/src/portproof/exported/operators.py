"""Operators in float64 that onnx's reference computes slowly, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_conv_transpose import ConvTranspose as SlowConvTranspose
from onnx.reference.ops.op_resize import Resize as SlowResize
from scipy.special import erf, expit

from portproof.localize.layers import ACTIVATIONS

Sizes = Sequence[int]
Attributes = Mapping[str, Any]


def _pads(auto: str | None, pads: Sizes | None, sizes: Sizes, spans: Sizes, strides: Sizes) -> list[tuple[int, int]]:
    """(before, after) of each axis; `spans` are dilated kernels."""
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        sums = [max((-(-n // s) - 1) * s + span - n, 0) for n, span, s in zip(sizes, spans, strides)]
        return [(n // 2, n - n // 2) if auto == "SAME_UPPER" else (n - n // 2, n // 2) for n in sums]
    pads = pads or [0] * 2 * len(sizes)
    return list(zip(pads[: len(sizes)], pads[len(sizes) :]))


def _windows(x: np.ndarray, kernel: Sizes, how: Attributes, fill: float = 0.0) -> tuple[np.ndarray, list]:
    """(a view: batch, channels, places ..., kernel ...; what is padded before and after each axis).

    Places that `ceil_mode` adds at the end are not among the latter.
    """
    strides, dilations = _steps(kernel, how)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    padding, widths = _pads(how.get("auto_pad"), how.get("pads"), x.shape[2:], spans, strides), [(0, 0), (0, 0)]
    for n, (before, after), span, stride in zip(x.shape[2:], padding, spans, strides):
        room = n + before + after - span
        count = -(-room // stride) if how.get("ceil_mode") else room // stride
        if how.get("ceil_mode") and count * stride >= n + before:  # a window must begin inside
            count -= 1
        widths.append((before, after + max(count * stride - room, 0)))
    view = np.pad(x, widths, constant_values=fill)
    view = np.lib.stride_tricks.sliding_window_view(view, spans, tuple(range(2, x.ndim)))
    steps = [slice(None, None, n) for n in (*strides, *dilations)]
    return view[(slice(None), slice(None), *steps)], padding


def _steps(kernel: Sizes, how: Attributes) -> tuple[Sizes, Sizes]:
    """(strides, dilations) of each axis."""
    ones = [1] * len(kernel)
    return how.get("strides") or ones, how.get("dilations") or ones


class Conv(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, group: int = 1, **how: Any) -> tuple:
        axes = x.ndim - 2
        windows, _ = _windows(x, w.shape[2:], how)
        if w.shape[1] == 1:
            y = self._depthwise(windows, w)
        else:
            channels, out, kernel_axes = w.shape[1], len(w) // group, tuple(range(2 + axes, 2 + 2 * axes))
            y = np.empty((len(x), len(w), *windows.shape[2 : 2 + axes]), np.result_type(x, w))
            for i in range(len(x)):  # one image at a time: the product copies its windows
                for g in range(group):
                    part = windows[i : i + 1, g * channels : (g + 1) * channels]
                    weights = w[g * out : (g + 1) * out]
                    product = np.tensordot(weights, part, ((*range(1, w.ndim),), (1, *kernel_axes)))
                    y[i, g * out : (g + 1) * out] = product[:, 0]
        return (y if b is None else y + b.reshape(-1, *[1] * axes),)

    @staticmethod
    def _depthwise(windows: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Each channel of `windows` is that of as many filters; summed without a copy of all windows."""
        many, axes = len(w) // windows.shape[1], w.ndim - 2
        y = np.zeros((len(windows), len(w), *windows.shape[2 : 2 + axes]), np.result_type(windows, w))
        for place in np.ndindex(*w.shape[2:]):
            each = windows[(..., *place)]
            y += np.repeat(each, many, 1) * w[(slice(None), 0, *place)].reshape(-1, *[1] * axes)
        return y


class ConvTranspose(SlowConvTranspose):
    """Each value adds its kernel to the output; what names the output's size is left to onnx."""

    op_domain = ""

    def _run(  # type: ignore[override]  # onnx names the attributes
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, **how: Any
    ) -> tuple:
        if how.get("output_shape") or how.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER"):
            return super()._run(x, w, b, **how)
        group, sizes, kernel, ones = how.get("group", 1), x.shape[2:], w.shape[2:], [1] * (x.ndim - 2)
        strides, dilations = _steps(kernel, how)
        pads, more = how.get("pads") or [0] * 2 * len(ones), how.get("output_padding") or [0] * len(ones)
        spans = [(n - 1) * s + 1 for n, s in zip(sizes, strides)]
        whole = [n + (k - 1) * d + o for n, k, d, o in zip(spans, kernel, dilations, more)]
        flat = x.reshape(len(x), group, len(w) // group, -1)
        weights = w.reshape(group, len(w) // group, *w.shape[1:]).swapaxes(1, 2)
        y = np.zeros((len(x), group * w.shape[1], *whole), np.result_type(x, w))
        for place in np.ndindex(*kernel):
            there = [slice(p * d, p * d + n, s) for p, d, n, s in zip(place, dilations, spans, strides)]
            y[(slice(None), slice(None), *there)] += (weights[(..., *place)] @ flat).reshape(len(x), -1, *sizes)
        kept = [slice(first, n - last) for first, n, last in zip(pads, whole, pads[len(ones) :])]
        y = y[(slice(None), slice(None), *kept)]
        return (y if b is None else y + b.reshape(-1, *ones),)


class MaxPool(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, kernel_shape: Sizes, **how: Any) -> tuple:
        windows, _ = _windows(x, kernel_shape, how, -np.inf)
        return (windows.max(tuple(range(x.ndim, windows.ndim))),)


class AveragePool(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, kernel_shape: Sizes, **how: Any) -> tuple:
        windows, padding = _windows(x, kernel_shape, how)
        axes = tuple(range(x.ndim, windows.ndim))
        counted = np.ones((1, 1, *x.shape[2:]))
        if how.get("count_include_pad"):
            counted = np.pad(counted, [(0, 0), (0, 0), *padding], constant_values=1.0)
            how |= {"auto_pad": None, "pads": None}
        return (windows.sum(axes) / _windows(counted, kernel_shape, how)[0].sum(axes),)


class Gelu(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple:
        return (ACTIVATIONS["GELU, the tanh approximation" if approximate == "tanh" else "GELU"](x),)


def _by_element(name: str, function: Callable[[np.ndarray], np.ndarray]) -> type[OpRun]:
    """The operator of this name, of one input and no attributes."""
    return type(name, (OpRun,), {"op_domain": "", "_run": lambda _, x: (function(x),)})


class Resize(SlowResize):
    """By a matrix for each axis; what resizes otherwise (antialias, a region) is left to onnx."""

    op_domain = ""

    def _run(  # type: ignore[override]  # onnx names them
        self, x: np.ndarray, roi: Any = None, scales: Any = None, sizes: Any = None, **how: Any
    ) -> tuple:
        mode = how["mode"]
        is_usual = how.get("keep_aspect_ratio_policy") in (None, "stretch")
        if how.get("antialias") or not is_usual or "crop" in how["coordinate_transformation_mode"]:
            return super()._run(x, roi, scales, sizes, **how)
        axes = how.get("axes") or range(x.ndim)
        has_scales = scales is not None and scales.size > 0
        for i, axis in enumerate(axes):
            n = x.shape[axis]
            size = int(math.floor(n * float(scales[i]))) if has_scales else int(sizes[i])
            scale = float(scales[i]) if has_scales else size / n
            if size != n or scale != 1:
                x = np.moveaxis(np.moveaxis(x, axis, -1) @ resizing(n, size, scale, mode, how).T, -1, axis)
        return (x,)


def resizing(n: int, size: int, scale: float, mode: str, how: dict[str, Any]) -> np.ndarray:
    """The matrix, `size` by `n`, that resizes an axis."""
    places = np.arange(size, dtype=np.float64)
    transform = how["coordinate_transformation_mode"]
    length = scale * n
    if transform == "align_corners":
        x = places * (n - 1) / (length - 1) if length != 1 else np.zeros(size)
    elif transform == "asymmetric":
        x = places / scale
    elif transform == "pytorch_half_pixel" and length == 1:
        x = np.full(size, -0.5)
    else:
        shift = n / 2 * (1 - size / length) if transform == "half_pixel_symmetric" else 0.0
        x = shift + (places + 0.5) / scale - 0.5
    floor = np.floor(x)
    ratio = x - floor
    if mode == "nearest":
        up = {
            "round_prefer_floor": ratio > 0.5,
            "round_prefer_ceil": ratio >= 0.5,
            "floor": np.zeros(size, bool),
            "ceil": ratio > 0,
        }[how.get("nearest_mode") or "round_prefer_floor"]
        taps = [(0, (~up).astype(float)), (1, up.astype(float))]
    elif mode == "linear":
        taps = [(0, 1 - ratio), (1, ratio)]
    else:
        taps = [(i, _cubic(np.abs(ratio - i), how["cubic_coeff_a"])) for i in range(-1, 3)]
    matrix, rows = np.zeros((size, n)), np.arange(size)
    for i, weight in taps:
        index = floor.astype(int) + i
        if how.get("exclude_outside"):
            inside = (index >= 0) & (index < n)
            np.add.at(matrix, (rows[inside], index[inside]), weight[inside])
        else:
            np.add.at(matrix, (rows, np.clip(index, 0, n - 1)), weight)
    return matrix / matrix.sum(1, keepdims=True) if how.get("exclude_outside") else matrix


def _cubic(d: np.ndarray, a: float) -> np.ndarray:
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    return np.where(d <= 1, near, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a)


BY_ELEMENT = {"Erf": erf, "Sigmoid": expit, "HardSwish": ACTIVATIONS["hard-swish"]}
OPERATORS = [
    Conv,
    ConvTranspose,
    MaxPool,
    AveragePool,
    Gelu,
    Resize,
    *map(_by_element, BY_ELEMENT, BY_ELEMENT.values()),
]
