"""How exact a framework's float64 operations are that have a constant, against their formulas in NumPy.

Each operation is run on few values, forward and backward. The formula runs in NumPy's longest type, and its gradient is
a complex step: f(x + ih) is f(x) + ihf'(x) for an h so small that its square vanishes. A result further off than LIMIT
is told from the same formula with a constant rounded to float32. No constant here is a float32 number, unless it is
built in. Inputs are such that each one matters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from portproof.compare.ruler import U64

# In units of the largest value. Some 30 values are added and 20 operations done, each off by 2^-53 at most; what
# cancels may double that. A constant in float32 is off by 2^-30 or more of its own value.
LIMIT = 128 * U64
STEP = 1e-30
REAL, COMPLEX = np.longdouble, np.clongdouble
SAME = object()  # PaddlePaddle's call is PyTorch's
MISSING = "missing"  # in this version
TABLE = Path(__file__).with_name("float64_constants.json")


# --- of complex numbers with a tiny imaginary part


def above(x: np.ndarray, low: float) -> np.ndarray:
    return np.where(x.real > low, x, low)


def below(x: np.ndarray, high: float) -> np.ndarray:
    return np.where(x.real < high, x, high)


def size(x: np.ndarray) -> np.ndarray:
    return np.where(x.real < 0, -x, x)


def erf(x: np.ndarray) -> np.ndarray:
    real = np.vectorize(math.erf)(x.real.astype(float))
    return real + 1j * x.imag * 2 / np.sqrt(REAL(np.pi)) * np.exp(-(x.real**2))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


# --- the formulas that are long


def normalized(*axes: int) -> Callable:
    def formula(x: np.ndarray, eps: float) -> np.ndarray:
        x = x - x.mean(axes, keepdims=True)
        return x / np.sqrt((x * x).mean(axes, keepdims=True) + eps)

    return formula


def statistics(x: np.ndarray, share: float, correction: float) -> np.ndarray:
    """Batch norm's, of which the new values are a share; before, they were 0 and 1."""
    mean = x.mean((0, 2))
    var = ((x - mean[:, None]) ** 2).sum((0, 2)) / (8 - correction)
    return np.concatenate([share * mean, (1 - share) + share * var])


def local_response(x: np.ndarray, alpha: float, beta: float, k: float) -> np.ndarray:
    squares = np.pad(x * x, [(0, 0), (1, 1), (0, 0)])
    return x / (k + alpha * (squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]) / 3) ** beta


def norm(x: np.ndarray, p: float = 2.0) -> np.ndarray:
    return (size(x) ** p).sum(-1) ** (1 / REAL(p))


def resized(kind: str) -> Callable:
    """From 3 values to 5 along every axis but two; the ratio is 3/5."""

    def formula(x: np.ndarray, ratio: float) -> np.ndarray:
        place = (np.arange(5) + REAL(0.5)) * ratio - REAL(0.5)
        place = place if kind == "cubic" else np.maximum(place, 0)
        if kind == "nearest":
            place = np.floor(np.arange(5) * ratio + 1e-9)
        matrix = np.zeros((5, 3), REAL)
        for shift in (-1, 0, 1, 2):
            at = np.floor(place) + shift
            d, a = abs(place - at), REAL(-0.75)
            near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((d - 5) * d + 8) * a * d - 4 * a
            weight = np.where(d <= 1, near, far) if kind == "cubic" else np.maximum(1 - d, 0)
            np.add.at(matrix, (np.arange(5), np.clip(at, 0, 2).astype(int)), weight)
        for axis in range(2, x.ndim):
            x = np.moveaxis(np.moveaxis(x, axis, -1) @ matrix.T, -1, axis)
        return x

    return formula


def windows(x: np.ndarray, axes: tuple) -> np.ndarray:
    """Sums of windows of 3, one step apart, along each axis."""
    for axis in axes:
        x = np.moveaxis(x, axis, -1)
        x = np.moveaxis(x[..., :-2] + x[..., 1:-1] + x[..., 2:], -1, axis)
    return x


def halves(x: np.ndarray, axis: int) -> np.ndarray:
    """Sums of the first and the last 3 of 5 values."""
    x = np.moveaxis(x, axis, -1)
    return np.moveaxis(np.stack([x[..., :3].sum(-1), x[..., 2:].sum(-1)], -1), -1, axis)


def smooth_entropy(x: np.ndarray, eps: float) -> np.ndarray:
    """The class of each of the two rows is its number."""
    logs = np.log(softmax(x[:, 0]))
    return -((1 - eps) * logs[[0, 1], [0, 1]] + eps * logs.mean(-1)).mean()


def triplets(x: np.ndarray, margin: float, eps: float) -> np.ndarray:
    return above(norm(x[:, 0] - x[:, 1] + eps) - norm(x[:, 0] - x[:, 2] + eps) + margin, 0).mean()


def attention(x: np.ndarray, scale: float) -> np.ndarray:
    return softmax(x @ np.swapaxes(x, -1, -2) * scale) @ x


@dataclass(frozen=True)
class Operation:
    """A formula of an array and constants, and each framework's call, of (it, a tensor, constants), if it has one."""

    formula: Callable
    torch: Callable | None
    constants: tuple[float, ...] = ()
    paddle: Any = SAME
    shape: tuple[int, ...] = (2, 3, 4)
    scale: float = 1.0


class Framework:
    """A framework's own module as `own`, its functional one as `nn`, and what is replaced in it."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name, self.own, self.device = name, import_module(name), device
        self.nn = self.own.nn.functional
        if name == "torch":
            self.tensor = partial(self.own.tensor, device="cuda" if device == "gpu" else device)
        else:
            self.own.set_device(device)
            self.tensor = self.own.to_tensor
        self.zeros, self.ones = self.tensor(np.zeros(3)), self.tensor(np.ones(3))
        fp64 = import_module(f"portproof.backends.fp64_{name}")
        self.replaced = fp64.EXACT if name == "torch" else fp64.REPLACED
        self.exact = fp64.ExactConstants if name == "torch" else fp64.exact_constants

    @property
    def version(self) -> str:
        """With the device, if it is no CPU."""
        where = "" if self.device == "cpu" else f" {self.device}"
        return f"{self.name} {self.own.__version__.partition('+')[0]}{where}"

    def title(self, what: Any) -> str:
        """Of a key of `replaced`."""
        return what.__name__ if self.name == "torch" else what[1]

    def run(self, call: Callable, x: np.ndarray, constants: tuple) -> dict[str, np.ndarray]:
        given, torch = self.tensor(x), self.name == "torch"
        setattr(given, *(("requires_grad", True) if torch else ("stop_gradient", False)))
        (self.own.manual_seed if torch else self.own.seed)(0)
        output = call(self, given, *constants)
        found = {"forward": output.detach().cpu().numpy()}
        if output.requires_grad if torch else not output.stop_gradient:
            (output * self.tensor(weights(found["forward"].shape))).sum().backward()
            found["backward"] = given.grad.cpu().numpy()
        return found


def running(f: Any, x: Any, momentum: float) -> Any:
    """The running statistics after batch norm in train mode."""
    mean, var = f.zeros.clone(), f.ones.clone()
    f.nn.batch_norm(x.detach(), mean, var, f.ones, f.zeros, True, momentum, 2.0**-10)
    return f.own.concat([mean, var])


def kept(f: Any, x: Any, p: float) -> Any:
    """What dropout keeps, and what it drops as if it were kept."""
    y = f.nn.dropout(x, p, training=True)
    return f.own.where(y == 0, x / (1 - p), y)


def full(f: Any, *shape_and_value: Any) -> Any:
    return f.tensor(np.full(*shape_and_value))


def of(name: str) -> Callable:
    """The functional of that name, given the tensor and the constants."""
    return lambda f, x, *constants: getattr(f.nn, name)(x, *constants)


def own(name: str) -> Callable:
    return lambda f, x, *constants: getattr(f.own, name)(x, *constants)


def resize(mode: str) -> Callable:
    def call(f: Any, x: Any, _: float) -> Any:
        layout = {} if f.name == "torch" else {"data_format": {3: "NCW", 4: "NCHW", 5: "NCDHW"}[x.ndim]}
        return f.nn.interpolate(x, size=[5] * (x.ndim - 2), mode=mode, **layout)

    return call


EPS, SMALL = 1e-5, 3e-3  # the inputs of a norm are the size of the root of its epsilon
SIXTH, THIRD = 1 / 6, 1 / 3
SELU = (1.0507009873554804934193349852946, 1.6732632423543772848170429916717)
OPERATIONS = {
    "batch_norm, train": Operation(
        normalized(0, 2),
        lambda f, x, eps: f.nn.batch_norm(x, f.zeros.clone(), f.ones.clone(), f.ones, f.zeros, True, 0.1, eps),
        (EPS,),
        scale=SMALL,
    ),
    "batch_norm, eval": Operation(
        lambda x, eps: (x - REAL(EPS)) / np.sqrt(REAL(EPS) + eps),
        lambda f, x, eps: f.nn.batch_norm(x, f.ones * EPS, f.ones * EPS, f.ones, f.zeros, False, 0.1, eps),
        (EPS,),
        scale=SMALL,
    ),
    "batch_norm, statistics, torch": Operation(lambda x, share: statistics(x, share, 1), running, (0.1,), None),
    "batch_norm, statistics, paddle": Operation(lambda x, old: statistics(x, 1 - old, 0), None, (0.9,), paddle=running),
    "layer_norm": Operation(
        normalized(1, 2), lambda f, x, eps: f.nn.layer_norm(x, [3, 4], None, None, eps), (EPS,), scale=SMALL
    ),
    "group_norm": Operation(
        normalized(1, 2),
        lambda f, x, eps: f.nn.group_norm(x, 1, None, None, eps),
        (EPS,),
        paddle=lambda f, x, eps: f.own._C_ops.group_norm(x, f.ones, f.zeros, eps, 1, "NCHW"),
        scale=SMALL,
    ),
    "instance_norm": Operation(normalized(2), lambda f, x, eps: f.nn.instance_norm(x, eps=eps), (EPS,), scale=SMALL),
    "rms_norm": Operation(
        lambda x, eps: x / np.sqrt((x * x).mean(-1, keepdims=True) + eps),
        lambda f, x, eps: f.nn.rms_norm(x, [4], None, eps),
        (EPS,),
        scale=SMALL,
    ),
    "local_response_norm": Operation(
        local_response, lambda f, x, *c: f.nn.local_response_norm(x, 3, *c), (0.3, 0.7, 1.1)
    ),
    "normalize": Operation(
        lambda x, eps: x / above(norm(x), eps)[..., None],
        lambda f, x, eps: f.nn.normalize(x, 2.0, -1, eps),
        (0.3,),
        scale=0.15,
    ),
    "cosine_similarity, torch": Operation(
        lambda x, eps: (x[0] * x[1]).sum(-1) / above(norm(x[0]), eps) / above(norm(x[1]), eps),
        lambda f, x, eps: f.nn.cosine_similarity(*x.detach(), -1, eps),  # its gradient takes no notice of epsilon
        (2.1,),
        None,
    ),
    "cosine_similarity, paddle": Operation(
        lambda x, eps: (x[0] * x[1]).sum(-1) / above(norm(x[0]) * norm(x[1]), eps),
        None,
        (9.1,),
        paddle=lambda f, x, eps: f.nn.cosine_similarity(x[0], x[1], -1, eps),
    ),
    "pairwise_distance": Operation(
        lambda x, eps: norm(x[0] - x[1] + eps), lambda f, x, eps: f.nn.pairwise_distance(x[0], x[1], 2.0, eps), (0.1,)
    ),
    "norm": Operation(norm, lambda f, x: f.own.linalg.norm(x, 2.0, -1)),
    "norm, p": Operation(norm, lambda f, x, p: f.own.linalg.norm(x, p, -1), (2.3,)),
    # activations
    "hardsigmoid": Operation(
        lambda x, c: below(above(x * c + REAL(0.5), 0), 1),
        lambda f, x, _: f.nn.hardsigmoid(x),
        (SIXTH,),
        paddle=lambda f, x, c: f.nn.hardsigmoid(x, slope=c),
        scale=3.0,
    ),
    "hardswish": Operation(
        lambda x, c: x * below(above(x + 3, 0), 6) * c, lambda f, x, _: f.nn.hardswish(x), (SIXTH,), scale=3.0
    ),
    "hardtanh": Operation(lambda x, low, high: below(above(x, low), high), of("hardtanh"), (-0.3, 0.7)),
    "relu6": Operation(lambda x: below(above(x, 0), 6), of("relu6"), scale=5.0),
    "elu": Operation(lambda x, a: above(x, 0) + a * np.expm1(below(x, 0)), of("elu"), (0.7,)),
    "celu": Operation(
        lambda x, a, c: above(x, 0) + a * np.expm1(below(x, 0) * c), lambda f, x, a, _: f.nn.celu(x, a), (0.7, 1 / 0.7)
    ),
    "selu": Operation(
        lambda x, s, a: s * (above(x, 0) + a * np.expm1(below(x, 0))), lambda f, x, *_: f.nn.selu(x), SELU
    ),
    "gelu": Operation(lambda x: x / 2 * (1 + erf(x / np.sqrt(REAL(2)))), of("gelu")),
    "gelu, tanh": Operation(
        lambda x, c, root: x / 2 * (1 + np.tanh(root * (x + c * x**3))),
        lambda f, x, *_: f.nn.gelu(x, approximate="tanh" if f.name == "torch" else True),
        (0.044715, math.sqrt(2 / math.pi)),
    ),
    "leaky_relu": Operation(lambda x, a: above(x, 0) + a * below(x, 0), of("leaky_relu"), (0.1,)),
    "softplus": Operation(
        lambda x, b: np.where((x * b).real > 1.5, x, softplus(x * b) / b),
        lambda f, x, b: f.nn.softplus(x, b, 1.5),
        (1.3,),
    ),
    "softshrink": Operation(lambda x, a: above(x, a) - a + below(x, -a) + a, of("softshrink"), (0.3,)),
    "hardshrink": Operation(lambda x: np.where(abs(x.real) > 0.5, x, 0), lambda f, x: f.nn.hardshrink(x, 0.5)),
    "tanhshrink": Operation(lambda x: x - np.tanh(x), of("tanhshrink")),
    "mish": Operation(lambda x: x * np.tanh(softplus(x)), of("mish")),
    "silu": Operation(lambda x: x * sigmoid(x), of("silu")),
    "swish": Operation(lambda x: x * sigmoid(x), None, paddle=of("swish")),
    "thresholded_relu": Operation(
        lambda x, v: np.where(x.real > 0.5, x, v),
        lambda f, x, v: f.nn.threshold(x, 0.5, v),
        (0.1,),
        paddle=lambda f, x, v: f.nn.thresholded_relu(x, 0.5, value=v),
    ),
    "prelu": Operation(lambda x, a: above(x, 0) + a * below(x, 0), lambda f, x, a: f.nn.prelu(x, f.ones * a), (0.1,)),
    "rrelu, eval": Operation(
        lambda x, a, b: above(x, 0) + (a + b) / 2 * below(x, 0),
        lambda f, x, a, b: f.nn.rrelu(x, a, b, training=False),
        (0.1, 0.3),
    ),
    "log_sigmoid": Operation(lambda x: -softplus(-x), of("logsigmoid"), paddle=of("log_sigmoid")),
    "softsign": Operation(lambda x: x / (1 + size(x)), of("softsign")),
    "stanh": Operation(lambda x, a, b: b * np.tanh(a * x), None, (0.67, 1.7159), paddle=own("stanh")),
    "softmax": Operation(lambda x, t: softmax(x / t), lambda f, x, t: f.nn.softmax(x / t, -1), (0.7,)),
    "log_softmax": Operation(lambda x: np.log(softmax(x)), lambda f, x: f.nn.log_softmax(x, -1)),
    "dropout": Operation(lambda x, p: x / (1 - p), kept, (0.3,)),
    "attention": Operation(
        attention,
        lambda f, x, _: f.nn.scaled_dot_product_attention(x, x, x),
        (3**-0.5,),
        paddle=lambda f, x, _: f.nn.scaled_dot_product_attention(*[x.transpose([0, 2, 1, 3])] * 3).transpose(
            [0, 2, 1, 3]
        ),
        shape=(1, 2, 4, 3),
    ),
    # averages
    "mean": Operation(lambda x, c: x.sum() * c, lambda f, x, _: x.mean(), (1 / 24,)),
    "mean, of an axis": Operation(lambda x, c: x.sum(1) * c, lambda f, x, _: x.mean(1), (THIRD,)),
    "var": Operation(lambda x, c: ((x - x.mean()) ** 2).sum() * c, lambda f, x, _: x.var(), (1 / 23,)),
    "std": Operation(lambda x, c: np.sqrt(((x - x.mean()) ** 2).sum() * c), lambda f, x, _: x.std(), (1 / 23,)),
    "avg_pool1d": Operation(lambda x, c: windows(x, (2,)) * c, lambda f, x, _: f.nn.avg_pool1d(x, 3, 1), (THIRD,)),
    "avg_pool2d": Operation(
        lambda x, c: windows(x, (2, 3)) * c, lambda f, x, _: f.nn.avg_pool2d(x, 3, 1), (1 / 9,), shape=(1, 2, 4, 4)
    ),
    "avg_pool3d": Operation(
        lambda x, c: windows(x, (2, 3, 4)) * c,
        lambda f, x, _: f.nn.avg_pool3d(x, 3, 1),
        (1 / 27,),
        shape=(1, 1, 3, 3, 4),
    ),
    "adaptive_avg_pool1d": Operation(
        lambda x, c: halves(x, 2) * c, lambda f, x, _: f.nn.adaptive_avg_pool1d(x, 2), (THIRD,), shape=(2, 2, 5)
    ),
    "adaptive_avg_pool2d": Operation(
        lambda x, c: halves(halves(x, 2), 3) * c,
        lambda f, x, _: f.nn.adaptive_avg_pool2d(x, 2),
        (1 / 9,),
        shape=(1, 1, 5, 5),
    ),
    "adaptive_avg_pool3d": Operation(
        lambda x, c: x.sum((2, 3, 4), keepdims=True) * c,
        lambda f, x, _: f.nn.adaptive_avg_pool3d(x, 1),
        (1 / 27,),
        shape=(1, 1, 3, 3, 3),
    ),
    "lp_pool1d": Operation(
        lambda x, p: windows(size(x) ** p, (2,)) ** (1 / REAL(p)),
        lambda f, x, p: f.nn.lp_pool1d(f.own.abs(x), p, 3, 1),
        (2.3,),
    ),
    "interpolate, linear": Operation(resized("linear"), resize("linear"), (0.6,), shape=(2, 2, 3)),
    "interpolate, bilinear": Operation(resized("linear"), resize("bilinear"), (0.6,), shape=(1, 2, 3, 3)),
    "interpolate, trilinear": Operation(resized("linear"), resize("trilinear"), (0.6,), shape=(1, 1, 3, 3, 3)),
    "interpolate, bicubic": Operation(resized("cubic"), resize("bicubic"), (0.6,), shape=(1, 2, 3, 3)),
    "interpolate, nearest": Operation(
        lambda x: resized("nearest")(x, 0.6), lambda f, x: resize("nearest")(f, x, 0), shape=(1, 2, 3, 3)
    ),
    # losses, of the values against 0.1 or against each other
    "smooth_l1_loss": Operation(
        lambda x, b: np.where(abs(x.real) < b, x * x / 2 / b, size(x) - b / 2).mean(),
        lambda f, x, b: f.nn.smooth_l1_loss(x, x.detach() * 0, beta=b),
        (0.7,),
        paddle=lambda f, x, b: f.nn.smooth_l1_loss(x, x.detach() * 0, delta=b, is_huber=False),
    ),
    "huber_loss": Operation(
        lambda x, d: np.where(abs(x.real) < d, x * x / 2, d * (size(x) - d / 2)).mean(),
        lambda f, x, d: f.nn.huber_loss(x, x.detach() * 0, delta=d),
        (0.7,),
        paddle=lambda f, x, d: f.nn.smooth_l1_loss(x, x.detach() * 0, delta=d),
    ),
    "mse_loss": Operation(lambda x, c: (x * x).sum() * c, lambda f, x, _: f.nn.mse_loss(x, x.detach() * 0), (1 / 24,)),
    "l1_loss": Operation(lambda x, c: size(x).sum() * c, lambda f, x, _: f.nn.l1_loss(x, x.detach() * 0), (1 / 24,)),
    "cross_entropy, label_smoothing": Operation(
        smooth_entropy,
        lambda f, x, eps: f.nn.cross_entropy(x[:, 0], f.tensor(np.arange(2)), label_smoothing=eps),
        (0.1,),
    ),
    "label_smooth": Operation(
        lambda x, eps: (1 - eps) * x + eps / 4, None, (0.1,), paddle=lambda f, x, eps: f.nn.label_smooth(x, None, eps)
    ),
    "bce_with_logits": Operation(
        lambda x, w: w * softplus(-x).mean(),
        lambda f, x, w: f.nn.binary_cross_entropy_with_logits(x, x.detach() * 0 + 1, pos_weight=full(f, 4, w)),
        (1.3,),
    ),
    "binary_cross_entropy": Operation(
        lambda x: -(np.log(sigmoid(x)) + np.log(sigmoid(-x))).mean() / 2,
        lambda f, x: f.nn.binary_cross_entropy(f.nn.sigmoid(x), x.detach() * 0 + 0.5),
    ),
    "kl_div": Operation(
        lambda x, t: t * (np.log(REAL(t)) - x),
        lambda f, x, t: f.nn.kl_div(x, full(f, x.shape, t), reduction="none"),
        (0.3,),
    ),
    "soft_margin_loss": Operation(
        lambda x: softplus(-x).mean(), lambda f, x: f.nn.soft_margin_loss(x, x.detach() * 0 + 1)
    ),
    "margin_ranking_loss": Operation(
        lambda x, m: above(x[1] - x[0] + m, 0).mean(),
        lambda f, x, m: f.nn.margin_ranking_loss(x[0], x[1], x[0].detach() * 0 + 1, m),
        (0.3,),
    ),
    "hinge_embedding_loss": Operation(
        lambda x, m: above(m - x, 0).mean(),
        lambda f, x, m: f.nn.hinge_embedding_loss(x, x.detach() * 0 - 1, m),
        (0.3,),
    ),
    "triplet_margin_loss": Operation(
        triplets,
        lambda f, x, m, eps: f.nn.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2], m, 2.0, eps),
        (3.3, 0.1),
    ),
    "multi_margin_loss": Operation(
        lambda x, m: sum(above(m - x[i, 0, i] + np.delete(x[i, 0], i), 0).sum() for i in (0, 1)) / 8,
        lambda f, x, m: f.nn.multi_margin_loss(x[:, 0], f.tensor(np.arange(2)), 1, m),
        (0.7,),
    ),
    "gaussian_nll_loss": Operation(
        lambda x, eps: (np.log(REAL(eps)) + x * x / eps).mean() / 2,
        lambda f, x, eps: f.nn.gaussian_nll_loss(x, x.detach() * 0, x.detach() * 0, eps=eps),
        (0.1,),
        paddle=lambda f, x, eps: f.nn.gaussian_nll_loss(x, x.detach() * 0, x.detach() * 0, epsilon=eps),
    ),
    "log_loss": Operation(
        lambda x, eps: -np.log(sigmoid(x) + eps) / 2 - np.log(1 - sigmoid(x) + eps) / 2,
        None,
        (0.1,),
        paddle=lambda f, x, eps: f.nn.log_loss(
            f.nn.sigmoid(x).reshape([-1, 1]), f.tensor(np.full((24, 1), 0.5)), eps
        ).reshape(x.shape),
    ),
    "sigmoid_focal_loss": Operation(
        lambda x, a, g: a * sigmoid(-x) ** g * softplus(-x),
        None,
        (0.3, 2.3),
        paddle=lambda f, x, a, g: f.nn.sigmoid_focal_loss(x, x.detach() * 0 + 1, None, a, g, "none"),
    ),
    # numbers
    "x * c": Operation(lambda x, c: x * c, lambda f, x, c: x * c, (0.1,)),
    "x / c": Operation(lambda x, c: x / c, lambda f, x, c: x / c, (0.1,)),
    "c / x": Operation(lambda x, c: c / x, lambda f, x, c: c / x, (0.1,)),
    "x + c": Operation(lambda x, c: x + c, lambda f, x, c: x + c, (0.1,)),
    "x - c": Operation(lambda x, c: x - c, lambda f, x, c: x - c, (0.1,)),
    "c + x": Operation(lambda x, c: c + x, lambda f, x, c: c + x, (0.1,)),
    "c - x": Operation(lambda x, c: c - x, lambda f, x, c: c - x, (0.1,)),
    "x ** c": Operation(lambda x, c: size(x) ** c, lambda f, x, c: f.own.abs(x) ** c, (2.3,)),
    "c ** x": Operation(lambda x, c: REAL(c) ** x, lambda f, x, c: c**x, (2.3,)),
    "pow": Operation(lambda x, c: size(x) ** c, lambda f, x, c: f.own.pow(f.own.abs(x), c), (0.3,)),
    "clip": Operation(lambda x, low, high: below(above(x, low), high), own("clip"), (-0.3, 0.7)),
    "scale": Operation(lambda x, a, b: a * x + b, None, (0.3, 0.1), paddle=own("scale")),
    "lerp": Operation(lambda x, c: x[0] + c * (x[1] - x[0]), lambda f, x, c: f.own.lerp(x[0], x[1], c), (0.3,)),
    "addmm": Operation(
        lambda x, a, b: b * x[0, :, :3] + a * (x[0] @ x[1].T),
        lambda f, x, a, b: f.own.addmm(x[0, :, :3], x[0], x[1].T, beta=b, alpha=a),
        (0.3, 0.7),
    ),
    "logit": Operation(
        lambda x, eps: np.log(below(above(x, eps), 1 - eps) / (1 - below(above(x, eps), 1 - eps))), own("logit"), (0.3,)
    ),
    "full": Operation(
        lambda x, c: np.full(3, REAL(c)), lambda f, x, c: f.own.full([3], c, dtype=f.own.float64), (0.1,)
    ),
    "full_like": Operation(lambda x, c: np.full(x.shape, REAL(c)), own("full_like"), (0.1,)),
    "linspace": Operation(
        lambda x, a, b: a + (REAL(b) - a) * np.arange(7) / 6,
        lambda f, x, a, b: f.own.linspace(a, b, 7, dtype=f.own.float64),
        (0.1, 0.7),
    ),
    "arange": Operation(
        lambda x, a, b: a + REAL(b) * np.arange(7),
        lambda f, x, a, b: f.own.arange(a, a + 6.5 * b, b, dtype=f.own.float64),
        (0.1, 0.3),
    ),
}


def drawn(shape: tuple[int, ...]) -> np.ndarray:
    """From 0.2 to 2, of either sign: none is near a place where a formula bends, such as 0."""
    rng = np.random.default_rng([len(shape), *shape])
    return rng.uniform(0.2, 2.0, shape) * rng.choice([-1, 1], shape)


def weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([7, *shape]).uniform(0.5, 1.5, shape)


@cache
def expected(operation: Operation, constants: tuple) -> dict[str, np.ndarray]:
    """Forward and backward by the formula; no gradient is zeros."""
    x = (drawn(operation.shape) * operation.scale).astype(COMPLEX)
    constants = tuple(map(REAL, constants))
    forward = np.asarray(operation.formula(x, *constants)).real
    upstream = weights(forward.shape)
    gradient = np.zeros(x.shape, REAL)
    for place in np.ndindex(*x.shape):
        moved = x.copy()
        moved[place] += 1j * STEP
        gradient[place] = (np.asarray(operation.formula(moved, *constants)).imag * upstream).sum() / STEP
    return {"forward": forward, "backward": gradient}


def distance(got: np.ndarray, exact: np.ndarray) -> float:
    """In units of the largest value; a gradient of zeros counts as of 1."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    return float(np.abs(got - exact).max() / (np.abs(exact).max() or 1))


def rounded(constants: tuple) -> Iterator[tuple[str, tuple]]:
    """(some of the constants in words, all of them with these in float32)."""
    for count in range(1, len(constants) + 1):
        for some in combinations(range(len(constants)), count):
            values = (float(np.float32(c)) if i in some else c for i, c in enumerate(constants))
            yield " and ".join(f"{constants[i]:.6g}" for i in some), tuple(values)


def measured(framework: Framework, operation: Operation) -> dict[str, str]:
    """{forward or backward: how far off, and the constant that is in float32, if that is why}; {} where it is exact."""
    call = operation.torch if framework.name == "torch" or operation.paddle is SAME else operation.paddle
    if call is None:
        return {}
    try:
        got = framework.run(call, drawn(operation.shape) * operation.scale, operation.constants)
    except (AttributeError, TypeError, RuntimeError):
        return {"forward": MISSING}
    exact, found = expected(operation, operation.constants), {}
    for way, values in got.items():
        off = distance(values, exact[way])
        if not off <= LIMIT:
            names = "".join(
                f" {some} in float32"
                for some, constants in rounded(operation.constants)
                if distance(values, expected(operation, constants)[way]) <= LIMIT
            )
            found[way] = f"{off:.0e}{names}"
    return found


def all_measured(framework: Framework) -> dict[str, str]:
    """{operation, forward or backward: how far off} of what is not exact."""
    found = {name: measured(framework, operation) for name, operation in OPERATIONS.items()}
    return {f"{name}, {way}": said for name, ways in found.items() for way, said in ways.items()}


def row(framework: Framework) -> dict[str, Any]:
    """Of the version that is installed: what is off as it is, what with the replacements, and which of them it needs.

    A replacement is needed if without it, the others in place, something else is off.
    """
    as_it_is = all_measured(framework)
    with framework.exact():
        left = all_measured(framework)
    needed = []
    for what, exact in list(framework.replaced.items()):
        del framework.replaced[what]
        try:
            with framework.exact():
                if all_measured(framework) != left:
                    needed.append(framework.title(what))
        finally:
            framework.replaced[what] = exact
    return {"as it is": as_it_is, "with replacements": left, "needed": sorted(needed)}


def load() -> dict[str, dict]:
    """{a framework and its version: its row}"""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
