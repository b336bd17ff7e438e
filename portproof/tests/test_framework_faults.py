"""A framework's operation that is wrong is named, with a program that shows it; a port's fault is not laid on it."""

import re
import subprocess
import sys

import numpy as np
import paddle
import pytest
import torch
from paddle.nn import functional as PF
from toy_pairs import Port, Ref, normal

from portproof import align
from portproof.backends.gradients_paddle import _is_wrong, _slope, wrong_gradients
from portproof.backends.paddle_backend import BACKEND
from portproof.compare import FAIL

T, P = torch.nn, paddle.nn
BLAMED = "the framework's operation differs"
has_the_bugs = pytest.mark.skipif(paddle.__version__ != "3.3.1", reason="these bugs are those of Paddle 3.3.1")


def told(verdict) -> list[str]:
    """The lines of the place that speak of the framework."""
    assert verdict.status == FAIL and verdict.location is not None, str(verdict)
    proof = verdict.location.proof
    return next((proof[i : i + 6] for i, line in enumerate(proof) if line.startswith(BLAMED)), [])


def group_norm():
    ref = T.Sequential(T.Conv2d(3, 6, 3), T.GroupNorm(2, 6, affine=False))
    port = P.Sequential(P.Conv2D(3, 6, 3), P.GroupNorm(2, 6, weight_attr=False, bias_attr=False))
    return ref, port, normal(2, 3, 6, 6)


def coded(code, port_code, *shape):
    return Ref(code, a=T.Linear(4, 4)), Port(port_code, a=P.Linear(4, 4)), normal(*shape)


def gather():
    return coded(lambda m, x: m.a(x)[:, 1], lambda m, x: paddle.gather(m.a(x), paddle.to_tensor(1), axis=1), 2, 3, 4)


def matmul():
    return coded(
        lambda m, x: torch.matmul(x[:, None], m.a.weight.t().expand(5, 4, 4)),
        lambda m, x: paddle.matmul(x.unsqueeze(1), m.a.weight.expand([5, 4, 4])),
        *(2, 3, 4),
    )


def log_softmax():
    return coded(lambda m, x: torch.log_softmax(200 * m.a(x), -1), lambda m, x: PF.log_softmax(200 * m.a(x)), 3, 4)


def cross_entropy_with_softmax():
    labels = [0, 1, 3]
    return coded(
        lambda m, x: torch.nn.functional.cross_entropy(200 * m.a(x), torch.tensor(labels)),
        lambda m, x: PF.cross_entropy(200 * m.a(x), paddle.to_tensor(labels)),
        *(3, 4),
    )


def silu():
    """In float32 alone: NaN comes back of what is below -88."""
    ref, port, x = coded(*[lambda m, x: m.act(60 * m.a(x))] * 2, 3, 4)
    ref.act, port.act = T.SiLU(), P.Silu()
    return ref, port, x


@has_the_bugs
@pytest.mark.parametrize("pair", [group_norm, gather, matmul, log_softmax, cross_entropy_with_softmax, silu])
def test_a_wrong_operation_is_named_with_a_program_that_shows_it(pair):
    ref, port, x = pair()
    first, *program = told(align(ref, port, [x]))
    assert f"(paddle 3.3.1, {pair.__name__})" in first and len(program) == 5
    lines = "\n".join(line.removeprefix("    ") for line in program)
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    if "raises" in first:
        assert ended.returncode and "InvalidArgument" in ended.stderr
    else:
        own, slope = map(float, ended.stdout.split())
        assert np.isfinite(slope) and not abs(own - slope) <= 1e-3 * abs(slope)


class HalfPrecision(P.GroupNorm):
    def forward(self, x):
        return super().forward(x).astype("float16").astype(x.dtype) if x.dtype == paddle.float32 else super().forward(x)


@has_the_bugs
@pytest.mark.parametrize(
    ("layer", "mean", "is_told"), [(P.GroupNorm, 30, True), (HalfPrecision, 0, False), (P.GroupNorm, 0, None)]
)
def test_a_kernel_that_loses_digits_in_float32_is_named(layer, mean, is_told):
    """Paddle's takes the variance as the mean of squares less the square of the mean."""
    verdict = align(T.GroupNorm(2, 6), layer(2, 6), [normal(2, 6, 8, 8) + np.float32(mean)])
    if is_told is None:
        assert verdict.status != FAIL
        return
    lines = told(verdict)
    assert bool(lines) == is_told
    if lines:
        pattern = r".* \(paddle 3\.3\.1, GroupNorm\): in float32 its .* is (.*) off its own float64, which agrees .*"
        assert float(re.fullmatch(pattern, lines[0])[1]) > 1e-5


class Halved(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, sent):
        return sent


FAULTS = {
    "detached": lambda m, x: paddle.tanh(m.a(x)) + 2 * m.a(x).detach(),
    "a backward of its own": lambda m, x: paddle.tanh(m.a(x)) + Halved.apply(m.a(x)),
    "rounded": lambda m, x: paddle.tanh(m.a(x)) + 2 * m.a(x) + (x.round() - x).detach() - (x.round() - x),
    "its own code raises": lambda m, x: paddle.tanh(m.a(x)) + paddle.zeros([7]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_port_is_not_laid_on_the_framework(fault):
    ref, port, x = coded(lambda m, x: torch.tanh(m.a(x)) + 2 * m.a(x), FAULTS[fault], 3, 4)
    assert told(align(ref, port, [x])) == []


@pytest.mark.parametrize("seed", [3, 16])
def test_a_slope_that_is_rounding_shows_nothing(seed):
    """A norm removes the bias before it, whose slope is 0: what is measured is the rounding of large terms."""
    ref = Ref(
        lambda m, x: m.act(m.norm(m.conv(x))),
        **{"conv": T.Conv1d(1, 4, 3), "norm": T.InstanceNorm1d(4, affine=True), "act": T.PReLU(4)},
    )
    port = Port(
        lambda m, x: 1.001 * m.act(m.norm(m.conv(x))),
        **{"conv": P.Conv1D(1, 4, 3), "norm": P.InstanceNorm1D(4), "act": P.PReLU(4)},
    )
    x = np.random.default_rng(seed).normal(size=(2, 1, 64)).astype(np.float32)
    assert told(align(ref, port, [x], seed=seed)) == []


def test_a_kernel_that_draws_has_no_slope():
    """With other masks at the two ends a slope is anything: of 200 seeds 4 once showed one beyond all doubt."""
    x = paddle.to_tensor(np.random.default_rng(0).normal(size=(4, 4)), stop_gradient=False)
    sent = paddle.to_tensor(np.random.default_rng(1).normal(size=(4, 4)))
    for seed in range(200):
        paddle.seed(seed)
        assert wrong_gradients(lambda: (PF.dropout(x, 0.5) * sent).sum().backward()) == [], seed


def gru():
    """In float64; one of the kernel's arguments has no values."""
    with BACKEND.runs.new_tensors("float64"):
        return P.GRU(4, 3)


RIGHT = {  # kinks and steps at the very values, ties, draws, constants in float32
    "relu at 0": lambda x: PF.relu(x - x.detach()),
    "abs at 0": lambda x: paddle.abs(x - x.detach()),
    "max of equal ones": lambda x: paddle.max(x - x.detach(), axis=1),
    "max_pool of equal ones": lambda x: PF.max_pool1d((x - x.detach())[None], 2),
    "floor": lambda x: paddle.floor(x) + x,
    "clip at its bound": lambda x: paddle.clip(x - x.detach(), 0.0, 1.0),
    "dropout": lambda x: PF.dropout(x, 0.5),
    "gumbel": PF.gumbel_softmax,
    "hardswish": PF.hardswish,
    "softplus": PF.softplus,
    "selu": PF.selu,
    "interpolate": lambda x: PF.interpolate(x[None, None], [7, 5], mode="bilinear"),
    "cross_entropy": lambda x: PF.cross_entropy(x, paddle.to_tensor([0, 1, 3, 2])),
    "label without a gradient": lambda x: PF.cross_entropy(2 * x, PF.softmax(x), soft_label=True),
    "layer_norm": lambda x: PF.layer_norm(x, [4]),
    "sort": lambda x: paddle.sort(x - x.detach()),
    "GRU": lambda x: gru()(x[None])[0],
    "of a parameter": lambda x: paddle.matmul(x, paddle.to_tensor(np.eye(4), stop_gradient=False)),
}


def test_kinks_whose_bends_cancel_make_no_slope_sure():
    """Of relu at 0 the slope that is measured is half of what is sent back there; here the other bends back."""
    sent, along = np.array([1.0, -1.0]), np.array([1.0, -1.0])
    slope, unsure = _slope(lambda step: sent * np.maximum(step * along, 0), 0.0)
    assert slope == pytest.approx(1) and not _is_wrong(0.0, slope, unsure, True)
    slope, unsure = _slope(lambda step: sent * step * along, 0.0)
    assert slope == pytest.approx(2) and _is_wrong(0.0, slope, unsure, True)


@pytest.mark.parametrize("name", RIGHT)
def test_of_a_right_operation_nothing_is_said(name):
    x = paddle.to_tensor(np.random.default_rng(0).normal(size=(4, 4)), stop_gradient=False)

    def run():
        y = RIGHT[name](x)
        (y * paddle.to_tensor(np.random.default_rng(1).normal(size=y.shape))).sum().backward()

    assert wrong_gradients(run) == []
