"""Known mistakes in layers that NumPy can compute, from what a module received. Imports no framework.

Formulas are in float64 and PyTorch's terms. A mistake gives arrays by their names in the module: "output 0", and
running statistics where they differ too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
from scipy.special import expit, log_softmax, ndtr, softmax

from portproof.arrays import largest_difference
from portproof.backends.slots import Module

Array = np.ndarray
Mistake = tuple[str, Callable[[], Mapping[str, Array]]]  # (in words, makes its arrays)
Mistakes = Iterator[Mistake]

OUTPUT = "output 0"
EPSILONS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 0.0)
BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
INSTANCE_NORMS = ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")
ROW_NORMS = ("LayerNorm", "RMSNorm")
NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, *ROW_NORMS, "GroupNorm")
DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
POOLS = ("AvgPool2d", "MaxPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d")
RECURRENT = ("LSTM", "LSTMCell", "GRU", "GRUCell", "RNN", "RNNCell")
UPSAMPLES = ("Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d")
NEED_THE_REFERENCE = frozenset({*CONVOLUTIONS, *POOLS, *RECURRENT, *UPSAMPLES, "Embedding", "MultiheadAttention"})


def _tanh_gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _hard_sigmoid(x: Array, slope: float) -> Array:
    return np.clip(slope * x + 0.5, 0, 1)


def _leaky_relu(x: Array, slope: float) -> Array:
    return np.where(x > 0, x, slope * x)


def _elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _softplus(x: Array, beta: float) -> Array:
    return np.logaddexp(0, beta * x) / beta


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "hard-swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "swish": lambda x: x * expit(x),
    "GELU": lambda x: x * ndtr(x),
    "GELU, the tanh approximation": _tanh_gelu,
    "hard-sigmoid": partial(_hard_sigmoid, slope=1 / 6),
    "hard-sigmoid with slope 0.2": partial(_hard_sigmoid, slope=0.2),
    "hard-sigmoid with slope 0.1666667, Paddle's default": partial(_hard_sigmoid, slope=0.1666667),
    "sigmoid": expit,
    "tanh": np.tanh,
    "leaky ReLU, slope 0.01": partial(_leaky_relu, slope=0.01),
    "leaky ReLU, slope 0.1": partial(_leaky_relu, slope=0.1),
    "leaky ReLU, slope 0.2": partial(_leaky_relu, slope=0.2),
    "ELU": partial(_elu, alpha=1.0),
    "Mish": lambda x: x * np.tanh(_softplus(x, 1.0)),
    "softplus": partial(_softplus, beta=1.0),
    "hard-tanh": lambda x: np.clip(x, -1, 1),
    "softmax over the last axis": partial(softmax, axis=-1),
    "softmax over axis 1": partial(softmax, axis=1),
}
ACTIVATION_NUMBERS = (
    ("leaky ReLU, slope", _leaky_relu, (-1.0, 1.0)),
    ("hard-sigmoid, slope", _hard_sigmoid, (0.1, 0.4)),
    ("ELU, alpha", _elu, (0.0, 4.0)),
    ("softplus, beta", _softplus, (0.01, 10.0)),
)
SOFTMAXES = {
    "Softmax": softmax,
    "LogSoftmax": log_softmax,
    "Softmin": lambda x, axis: softmax(-x, axis=axis),
}
# What a layer with its activation inside may have there, by layer.
FUSED = {
    "ReLU": "ReLU",
    "ReLU6": "ReLU6",
    "Hardswish": "hard-swish",
    "Hardsigmoid": "hard-sigmoid",
    "SiLU": "swish",
    "GELU": "GELU",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}


def _as_bfloat16(array: Array) -> Array:
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)  # ties to even


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "the weight went through float16": lambda array: array.astype(np.float16),
    "the weight went through bfloat16": _as_bfloat16,
}


@dataclass(frozen=True)
class Layer:
    """A module of the reference, with what it received and returned first."""

    module: Module
    train: bool
    tensors: Mapping[str, Array]  # by PyTorch's names in it
    inputs: list[Array]
    output: Array | None = None
    followed_by: tuple[str, ...] = ()  # types of the modules applied to the output

    @property
    def kind(self) -> str:
        return self.module.kind or self.module.type

    @property
    def settings(self) -> dict[str, Any]:
        return self.module.settings

    @cached_property
    def x(self) -> Array:
        return self.inputs[0].astype(np.float64)

    def tensor(self, name: str) -> Array | None:
        return self.tensors[name].astype(np.float64) if name in self.tensors else None

    @property
    def is_plain(self) -> bool:
        """Whether it can be an activation: alone and without parameters."""
        has_parameters = not all(slot.is_buffer for slot in self.module.slots.values())
        return self.module.is_leaf and not has_parameters and not self.needs_the_reference

    @property
    def needs_the_reference(self) -> bool:
        """Whether it has further known mistakes, in mutations.py, which only the reference itself can compute."""
        return self.kind in NEED_THE_REFERENCE

    @property
    def named(self) -> str:
        own = {"LeakyReLU": "negative_slope", "ELU": "alpha", "Softplus": "beta", "GELU": "approximate"}.get(self.kind)
        return f"{self.module.type}, {own} {self.settings[own]}" if own else self.module.type

    def giving(self, words: str, function: Callable[..., Array], *args: Any) -> Mistake:
        """The mistake of returning `function(*args)`; what follows is applied to that."""

        def make() -> dict[str, Array]:
            return {OUTPUT: self.finished(function(*args))}

        return words, make

    def finished(self, output: Array) -> Array:
        return reduce(lambda given, each: ACTIVATIONS[FUSED[each]](given), self.followed_by, output)


@dataclass(frozen=True)
class Norm:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, with tensors that fit x."""

    layer: Layer
    shape: tuple[int, ...]  # of x, with channels in groups
    axes: tuple[int, ...]  # of that shape: the mean is over these
    tensor_axes: tuple[int, ...]  # of x: those of the weight
    epsilon: float
    weight: Array | None
    bias: Array | None
    running: tuple[Array, Array] | None = None  # mean and variance, taken instead
    centred: bool = True
    unbiased: bool = False
    outside: bool = False  # epsilon is added to the root

    def __call__(self) -> Array:
        x = self.layer.x.reshape(self.shape)
        if self.running:
            mean, variance = map(self._fitting, self.running)
            x = x - mean
        else:
            x = x - x.mean(self.axes, keepdims=True) if self.centred else x
            count = math.prod(x.shape[axis] for axis in self.axes)
            variance = (x**2).sum(self.axes, keepdims=True) / (count - self.unbiased)
        root = np.sqrt(variance) + self.epsilon if self.outside else np.sqrt(variance + self.epsilon)
        y = (x / root).reshape(self.layer.x.shape)
        y = y if self.weight is None else y * self._fitting(self.weight)
        return y if self.bias is None else y + self._fitting(self.bias)

    def _fitting(self, tensor: Array) -> Array:
        shape = [1] * self.layer.x.ndim
        for axis in self.tensor_axes:
            shape[axis] = self.layer.x.shape[axis]
        return tensor.reshape(shape)

    def difference(self) -> float:
        """From what the reference returned, with what follows."""
        assert self.layer.output is not None
        return largest_difference(self.layer.finished(self()), self.layer.output)

    def mistake(self, words: str, **changes: Any) -> Mistake:
        return self.layer.giving(words, replace(self, **changes))

    def other_epsilon(self, value: float) -> Mistake:
        own = self.layer.settings["eps"]
        named = "the dtype's own" if own is None else f"{own:g}"
        return self.mistake(f"epsilon is {value:g}, not {named}", epsilon=value)


def _norm(layer: Layer) -> Norm:
    """The norm as the reference has it, with an activation behind or inside if that gives what the reference gave."""
    norms = [_norm_of(replace(layer, followed_by=each)) for each in ((), *((each,) for each in FUSED))]
    return min(norms, key=Norm.difference)


def _norm_of(layer: Layer) -> Norm:
    shape, axes = layer.x.shape, tuple(range(2, layer.x.ndim))
    epsilon = layer.settings["eps"]
    own = np.finfo(layer.inputs[0].dtype).eps if epsilon is None else epsilon
    norm = Norm(layer, shape, axes, (1,), float(own), layer.tensor("weight"), layer.tensor("bias"))
    if layer.kind == "GroupNorm":
        groups = layer.settings["num_groups"]
        return replace(norm, shape=_in_groups(shape, groups), axes=tuple(range(2, len(shape) + 1)))
    if layer.kind in ROW_NORMS:
        return _row_norm(replace(norm, centred=layer.kind == "LayerNorm"))
    if layer.kind in BATCH_NORMS:
        norm = replace(norm, axes=(0, *axes))
    mean, variance = layer.tensor("running_mean"), layer.tensor("running_var")
    return norm if layer.train or mean is None or variance is None else replace(norm, running=(mean, variance))


def _in_groups(shape: tuple[int, ...], groups: int) -> tuple[int, ...]:
    return (shape[0], groups, shape[1] // groups, *shape[2:])


def _row_norm(norm: Norm) -> Norm:
    """Over the last axes, or over axis 1 in a class derived from it: whichever gives what the reference gave."""
    layer, shape = norm.layer, norm.shape
    ways = [tuple(range(n, len(shape))) for n in range(1, len(shape))] + [(1,)]
    own = layer.tensors.get("weight")
    fitting = [axes for axes in ways if own is None or own.size == math.prod(shape[axis] for axis in axes)]
    norms = [replace(norm, axes=axes, tensor_axes=axes) for axes in fitting]
    return min(norms, key=Norm.difference)


def _epsilons(norm: Norm) -> Mistakes:
    yield from (norm.other_epsilon(value) for value in EPSILONS if value != norm.epsilon)


def _affine(norm: Norm) -> Mistakes:
    if norm.weight is None:
        return
    ones = np.ones_like(norm.weight)
    yield norm.mistake("weight was not loaded (1)", weight=ones)
    if norm.bias is not None:
        zeros = np.zeros_like(norm.bias)
        yield norm.mistake("bias was not loaded (0)", bias=zeros)
        yield norm.mistake("weight and bias were not loaded (1 and 0)", weight=ones, bias=zeros)
        yield norm.mistake("weight and bias are exchanged", weight=norm.bias, bias=norm.weight)


def _batch_norm(layer: Layer) -> Mistakes:
    norm = _norm(layer)
    yield from _epsilons(norm)
    mean, variance = layer.tensor("running_mean"), layer.tensor("running_var")
    if mean is not None and variance is not None and layer.train:
        words, make = norm.mistake("it normalizes with its running statistics", running=(mean, variance))
        yield words, lambda: {**layer.tensors, **make()}
    elif norm.running:
        mean, variance = norm.running
        yield norm.mistake("it normalizes with the batch's own statistics", running=None)
        zeros, ones = np.zeros_like(mean), np.ones_like(variance)
        yield norm.mistake("running mean and variance were not loaded (0 and 1)", running=(zeros, ones))
        yield norm.mistake("running variance was not loaded (1)", running=(mean, ones))
        yield norm.mistake("running mean was not loaded (0)", running=(zeros, variance))
        yield norm.mistake("its running variance is used as a standard deviation", running=(mean, variance**2))
        if norm.weight is not None:
            words = "none of its tensors was loaded (weight 1, bias 0, mean 0, variance 1)"
            yield norm.mistake(words, running=(zeros, ones), weight=None, bias=None)
    yield from _affine(norm)


def _instance_norm(layer: Layer) -> Mistakes:
    norm = _norm(layer)
    yield from _epsilons(norm)
    yield from _affine(norm)


def _group_norm(layer: Layer) -> Mistakes:
    norm = _norm(layer)
    yield from _epsilons(norm)
    own, channels = layer.settings["num_groups"], layer.x.shape[1]
    for groups in range(1, channels + 1):
        if channels % groups == 0 and groups != own:
            words = f"it has {groups} groups, not {own}"
            yield norm.mistake(words, shape=_in_groups(layer.x.shape, groups))
    yield from _affine(norm)


def _layer_norm(layer: Layer) -> Mistakes:
    norm = _norm(layer)
    yield from _epsilons(norm)
    yield norm.mistake("its variance is sum / (n - 1), not sum / n", unbiased=True)
    yield norm.mistake("epsilon is added to the standard deviation, not to the variance", outside=True)
    words = "variance is sum / (n - 1) and epsilon is added to its root"
    yield norm.mistake(words, unbiased=True, outside=True)
    words = "it does not subtract the mean" if norm.centred else "it subtracts the mean"
    yield norm.mistake(words, centred=not norm.centred)
    yield from _affine(norm)


def _linear(layer: Layer) -> Mistakes:
    weight, bias = layer.tensor("weight"), layer.tensor("bias")
    assert weight is not None

    def output(weight: Array) -> Array:
        return layer.x @ weight.T + (0 if bias is None else bias)

    if weight.shape[0] == weight.shape[1]:
        yield layer.giving("the weight is not transposed (Paddle keeps it as in x out)", output, weight.T)
    yield from _without_bias(layer)
    for words, change in ROUNDINGS.items():
        yield layer.giving(words, output, change(weight).astype(np.float64))


def _without_bias(layer: Layer) -> Mistakes:
    bias = layer.tensor("bias")
    if bias is not None and not layer.followed_by:
        behind = 0 if layer.kind == "Linear" else int(layer.kind[-2])  # axes behind the channels
        yield layer.giving("the bias is missing, or zero", np.subtract, layer.output, bias.reshape(-1, *[1] * behind))


def _softmax(layer: Layer) -> Mistakes:
    own, count = layer.settings["dim"], layer.x.ndim
    for axis in range(count):
        if own is None or axis != own % count:
            yield layer.giving(f"it is over axis {axis}, not {own}", SOFTMAXES[layer.kind], layer.x, axis)
    for other, function in SOFTMAXES.items():
        if other != layer.kind and own is not None:
            yield layer.giving(f"it is {other}, not {layer.kind}", function, layer.x, own)
    yield layer.giving("it is no activation", np.asarray, layer.x)


def _dropout(layer: Layer) -> Mistakes:
    kept = 1 - layer.settings["p"]
    words = f"it gives {kept:g} times its input where nothing is dropped (Paddle's mode downscale_in_infer)"
    yield layer.giving(words, np.multiply, layer.x, kept)


def _activation(layer: Layer) -> Mistakes:
    yield layer.giving(f"it is no activation, not {layer.named}", np.asarray, layer.x)
    for name, function in ACTIVATIONS.items():
        yield layer.giving(f"it is {name}, not {layer.named}", function, layer.x)


MISTAKES: dict[str, Callable[[Layer], Mistakes]] = {
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **dict.fromkeys(INSTANCE_NORMS, _instance_norm),
    **dict.fromkeys(ROW_NORMS, _layer_norm),
    "GroupNorm": _group_norm,
    "Linear": _linear,
    **dict.fromkeys(CONVOLUTIONS, _without_bias),
    **dict.fromkeys(SOFTMAXES, _softmax),
    **dict.fromkeys(DROPOUTS, _dropout),
}


def mistakes(layer: Layer) -> Mistakes:
    """The known mistakes of its type that NumPy can compute, plainest first."""
    known = MISTAKES.get(layer.kind, _activation if layer.is_plain else None)
    yield from known(layer) if known else ()


Tunable = tuple[tuple[float, float], Callable[[float], Mistake]]  # (bounds, mistake by number)


def tunable_numbers(layer: Layer) -> Iterator[Tunable]:
    """Numbers worth fitting where no known mistake is found."""
    if layer.kind in NORMS:
        norm = _norm(layer)
        near = math.log10(norm.epsilon or 1e-12)  # the number is its logarithm
        for width in (0.01, 4.0):
            yield (near - width, near + width), lambda logarithm: norm.other_epsilon(10.0**logarithm)
    elif layer.kind not in MISTAKES and layer.is_plain and layer.module.kind:
        for words, function, bounds in ACTIVATION_NUMBERS:
            yield bounds, partial(_other_activation, layer, words, function)


def _other_activation(layer: Layer, words: str, function: Callable, number: float) -> Mistake:
    return layer.giving(f"it is {words} {number:.6g}, not {layer.named}", function, layer.x, number)
