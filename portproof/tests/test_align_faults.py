"""`align` on wrong ports, small and of any kind: the module that is at fault is named, and the cause if one can be."""

from collections.abc import Callable

import numpy as np
import paddle
import pytest
import torch
from paddle.nn import functional as PF
from toy_pairs import Port, Ref, assert_aligned, assert_located, normal

from portproof import align
from portproof.compare import FAIL
from portproof.localize.diagnosis import FaultyModule, reproduces

T, P = torch.nn, paddle.nn
IMAGES = normal(4, 3, 6, 6)
EVAL = {"modes": ("eval",)}


def network(m, x):
    return m.head(m.act(m.norm(m.conv(x))))


def ref_network(code: Callable = network, **children: T.Module) -> Ref:
    layers = {"conv": T.Conv2d(3, 4, 3, padding=1, bias=False), "norm": T.BatchNorm2d(4), "act": T.ReLU()}
    return Ref(code, **layers | {"head": T.Conv2d(4, 2, 1)} | children)


def port_network(code: Callable = network, **children: P.Layer) -> Port:
    layers = {"conv": P.Conv2D(3, 4, 3, padding=1, bias_attr=False), "norm": P.BatchNorm2D(4), "act": P.ReLU()}
    return Port(code, **layers | {"head": P.Conv2D(4, 2, 1)} | children)


def conv(**options) -> P.Conv2D:
    return P.Conv2D(3, 4, 3, bias_attr=False, **options)


def test_without_a_fault():
    assert_aligned(ref_network(), port_network(), IMAGES, **EVAL)


LAYERS = {  # (the port's child, its layer, the cause)
    "epsilon": ("norm", P.BatchNorm2D(4, epsilon=1e-3), "epsilon is 0.001, not 1e-05"),
    "an unusual epsilon": ("norm", P.BatchNorm2D(4, epsilon=2.5e-5), "epsilon is 2.5e-05, not 1e-05"),
    "ReLU6": ("act", P.ReLU6(), "it is ReLU6, not ReLU"),
    "GELU": ("act", P.GELU(), "it is GELU, not ReLU"),
    "leaky ReLU": ("act", P.LeakyReLU(0.1), "it is leaky ReLU, slope 0.1, not ReLU"),
    "padding": ("conv", conv(padding=0), "padding is 0, not 1"),
    "padding repeats": ("conv", conv(padding=1, padding_mode="replicate"), "padding repeats the image (replicate)"),
    "stride": ("conv", conv(padding=1, stride=2), "stride is 2, not 1"),
}


@pytest.mark.parametrize(("child", "layer", "cause"), LAYERS.values(), ids=LAYERS)
def test_a_wrong_layer(child, layer, cause):
    assert_located(
        ref_network(), port_network(**{child: layer}), IMAGES, at=child, phase="forward", cause=cause, **EVAL
    )


def test_momentum_the_other_way_round():
    port = port_network(norm=P.BatchNorm2D(4, momentum=0.1))
    cause = "momentum=0.1; write 0.9 (Paddle: weight of the OLD value)"
    assert_located(ref_network(), port, IMAGES, at="norm", phase="buffers", cause=cause)


def test_running_statistics_are_not_those_of_the_batch():
    """If they were, a training step would keep them with any momentum, and a wrong one would show in rounding alone."""
    port = port_network(norm=P.BatchNorm2D(4, momentum=0.8))
    cause = "the batch's weight in the running statistics is 0.2, not 0.1"
    verdict = assert_located(ref_network(), port, IMAGES, at="norm", phase="buffers", cause=cause)
    assert max(row.difference for row in verdict.rows if row.item.leaf == "running_var") > 1e-2


def test_what_is_faulty_in_both_modes_hides_nothing_that_is_so_in_one():
    """The block around both is not run again in train mode; what is inside is, in whatever way it is built."""

    def code(m, x):
        return m.head(m.block(x))

    def inner(m, x):
        return m.act(m.norm(m.conv(x)))

    layers = {"conv": T.Conv2d(3, 4, 3, padding=1, bias=False), "norm": T.BatchNorm2d(4), "act": T.ReLU()}
    port_layers = {"conv": P.Conv2D(3, 4, 3, padding=1, bias_attr=False), "norm": P.BatchNorm2D(4, 0.1)}
    ref = Ref(code, block=Ref(inner, **layers), head=T.Conv2d(4, 2, 1))
    port = Port(code, block=Port(inner, **port_layers, act=P.ReLU6()), head=P.Conv2D(4, 2, 1))
    location = align(ref, port, [IMAGES]).location
    found = {(each.name, each.phase) for each in (location, *location.also)}
    assert found == {("block.act", "forward"), ("block.norm", "buffers")}


def test_batch_statistics_in_eval_mode():
    port = port_network(norm=P.BatchNorm2D(4, use_global_stats=False))
    verdict = align(ref_network(), port, [IMAGES], **EVAL)
    assert verdict.status == FAIL and (verdict.location.name, verdict.location.phase) == ("norm", "forward")


def test_running_statistics_in_train_mode():
    port = port_network(norm=P.BatchNorm2D(4, use_global_stats=True))
    cause = "it normalizes with its running statistics"
    verdict = assert_located(ref_network(), port, IMAGES, at="norm", phase="forward", cause=cause)
    assert not any(row.status == FAIL and row.item.mode == "eval" for row in verdict.rows)


POOLS = {
    "the mean": (T.MaxPool2d(2), P.AvgPool2D(2), "it takes the mean, not the maximum"),
    "the maximum": (T.AvgPool2d(2), P.MaxPool2D(2), "it takes the maximum, not the mean"),
    "padding left out": (T.AvgPool2d(3, 2, 1), P.AvgPool2D(3, 2, 1), "(Paddle's exclusive is True)"),
    "stride": (T.MaxPool2d(2), P.MaxPool2D(2, 1), "stride is 1, not 2"),
    "ceil_mode": (T.MaxPool2d(3, 2), P.MaxPool2D(3, 2, ceil_mode=True), "ceil_mode is True"),
}


@pytest.mark.parametrize(("pool", "port_pool", "cause"), POOLS.values(), ids=POOLS)
def test_a_wrong_pool(pool, port_pool, cause):
    pair = ref_network(act=pool), port_network(act=port_pool)
    assert_located(*pair, IMAGES, at="act", phase="forward", cause=cause, **EVAL)


def test_a_row_of_an_embedding_that_should_stay():
    code = lambda m, ids: m.fc(m.embed(ids))  # noqa: E731
    ref = Ref(code, embed=T.Embedding(10, 6, padding_idx=0), fc=T.Linear(6, 3))
    port = Port(code, embed=P.Embedding(10, 6), fc=P.Linear(6, 3))
    cause = "it has no padding_idx: row 0 gets a gradient"
    assert_located(ref, port, np.arange(10).reshape(2, 5), at="embed", phase="backward", cause=cause)


# The model's own code.


def through(change: Callable) -> Callable:
    return lambda m, x: m.head(m.act(change(m.norm(m.conv(x)))))


def doubled_in_place(y):
    return y.scale_(2.0)


CODE = {  # (the port's code, the layer that it feeds otherwise)
    "an activation missing": (lambda m, x: m.head(m.norm(m.conv(x))), "head"),
    "another activation": (lambda m, x: m.head(PF.leaky_relu(m.norm(m.conv(x)), 0.3)), "head"),
    "two layers exchanged": (lambda m, x: m.head(m.norm(m.act(m.conv(x)))), "norm"),
    "a layer not called": (lambda m, x: m.head(m.act(m.norm(m.conv(x)) * 0 + m.conv(x))), "act"),
    "through float16": (through(lambda y: y.astype("float16").astype(y.dtype)), "act"),
    "through bfloat16": (through(lambda y: y.astype("bfloat16").astype(y.dtype)), "act"),
    "in place": (through(doubled_in_place), "act"),
    "its input in place": (lambda m, x: network(m, x.scale_(2.0)), "conv"),
    "NaN": (lambda m, x: m.head(paddle.log(m.norm(m.conv(x)))), "head"),
}


@pytest.mark.parametrize(("code", "fed"), CODE.values(), ids=CODE)
def test_code_between_the_layers(code, fed):
    verdict = assert_code_located(port_network(code))
    assert any(f"feeds {fed} otherwise" in line or "not finite" in line for line in verdict.location.proof)


def assert_code_located(port: Port):
    """The model itself is at fault, in the forward pass, whatever the cause is."""
    verdict = align(ref_network(), port, [IMAGES], **EVAL)
    assert verdict.status == FAIL
    assert (verdict.location.name, verdict.location.phase) == ("", "forward"), str(verdict)
    return verdict


def test_nan_is_nan_and_no_randomness():
    verdict = assert_code_located(port_network(CODE["NaN"][0]))
    assert "not finite: reference 0, port" in verdict.first_failure.reason


ENDS = {
    "two axes exchanged": (lambda y: y.transpose([0, 1, 3, 2]), "axes 2 and 3 are exchanged"),
    "twice as large": (lambda y: 2 * y, "it is 2 times the reference's, everywhere"),
    "flattened": (lambda y: y.flatten(1), ""),
}


@pytest.mark.parametrize(("change", "cause"), ENDS.values(), ids=ENDS)
def test_what_is_returned(change, cause):
    port = port_network(lambda m, x: change(network(m, x)))
    assert_located(ref_network(), port, IMAGES, at="", phase="forward", cause=cause, **EVAL)


def test_a_residual_connection_that_is_missing_in_one_block():
    def block(code):
        return Ref(code, conv=T.Conv2d(4, 4, 3, padding=1), act=T.ReLU())

    def port_block(code):
        return Port(code, conv=P.Conv2D(4, 4, 3, padding=1), act=P.ReLU())

    with_it, without = (lambda m, x: m.act(m.conv(x) + x)), (lambda m, x: m.act(m.conv(x)))
    ref = T.Sequential(block(with_it), block(with_it), T.Conv2d(4, 2, 1))
    right = P.Sequential(port_block(with_it), port_block(with_it), P.Conv2D(4, 2, 1))
    wrong = P.Sequential(port_block(with_it), port_block(without), P.Conv2D(4, 2, 1))
    assert_aligned(ref, right, normal(2, 4, 6, 6))
    verdict = align(ref, wrong, [normal(2, 4, 6, 6)])
    assert verdict.status == FAIL and (verdict.location.name, verdict.location.phase) == ("1", "forward")
    assert any("feeds 1.act otherwise" in line for line in verdict.location.proof)


def test_integers_and_later_calls_are_fed_otherwise_too():
    """An index that is off by one, and a layer whose second call gets something else."""
    ids = np.arange(8).reshape(2, 4)
    layers = {"embed": T.Embedding(10, 4), "fc": T.Linear(4, 4)}
    port_layers = {"embed": P.Embedding(10, 4), "fc": P.Linear(4, 4)}
    ref = Ref(lambda m, x: m.fc(m.fc(m.embed(x))), **layers)
    shifted = Port(lambda m, x: m.fc(m.fc(m.embed(x + 1))), **port_layers)
    halved = Port(lambda m, x: m.fc(m.fc(m.embed(x)) / 2), **port_layers)
    for port, fed in ((shifted, "embed"), (halved, "fc#2")):
        location = align(ref, port, [ids], **EVAL).location
        assert location.name == "" and any(f"feeds {fed} otherwise" in line for line in location.proof)


# Ports that raise.

RAISING = {
    "a layer": (port_network(conv=P.Conv2D(2, 4, 3, padding=1, bias_attr=False)), "conv", "structure"),
    "the code": (port_network(lambda m, x: m.head(m.missing(x))), "", "forward"),
    "the end": (port_network(lambda m, x: network(m, x).reshape([3, -1, 7])), "", "forward"),
}


@pytest.mark.parametrize(("port", "at", "phase"), RAISING.values(), ids=RAISING)
def test_a_port_that_raises(port, at, phase):
    verdict = assert_located(ref_network(), port, IMAGES, at=at, phase=phase, **EVAL)
    if phase == "forward":
        assert any("raised" in line for line in verdict.location.proof)
        assert any(row.name == "eval mode, float64/the port runs" and "it raised" in row.reason for row in verdict.rows)


def test_the_layer_that_raises_is_named():
    """Its weight fits, its groups do not."""
    ref = ref_network(conv=T.Conv2d(4, 4, 3, padding=1, groups=2, bias=False))
    port = port_network(conv=P.Conv2D(2, 4, 3, padding=1, bias_attr=False))
    verdict = assert_located(ref, port, normal(4, 4, 6, 6), at="conv", phase="forward", **EVAL)
    assert "the port's module raised ValueError" in " ".join(verdict.location.proof)


# The backward pass.


class HalfTheGradient(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


BACKWARD = {
    "detached": (through(lambda y: y.detach()), "the port sends no gradient through"),
    "scaled": (through(HalfTheGradient.apply), "it is 0.5 times the reference's, everywhere"),
}


@pytest.mark.parametrize(("code", "cause"), BACKWARD.values(), ids=BACKWARD)
def test_a_wrong_gradient(code, cause):
    verdict = assert_located(ref_network(), port_network(code), IMAGES, at="", phase="backward", cause=cause, **EVAL)
    assert not any(row.status == FAIL and row.item.kind == "output" for row in verdict.rows)


def test_a_frozen_parameter():
    port = port_network()
    port.conv.weight.stop_gradient = True
    cause = "weight is frozen in the port and not in the reference (stop_gradient)"
    assert_located(ref_network(), port, IMAGES, at="conv", phase="backward", cause=cause, **EVAL)


def test_a_parameter_that_is_detached_is_not_called_frozen():
    ref, port = (side(lambda m, x: m.scale * x) for side in (Ref, Port))
    ref.scale, port.scale = T.Parameter(torch.ones(3, 1, 1)), port.create_parameter([3, 1, 1])
    port.code = lambda m, x: m.scale.detach() * x
    cause = "the port sends no gradient to scale (detach, no_grad)"
    assert_located(ref, port, IMAGES, at="", phase="backward", cause=cause, **EVAL)


def test_nearly_nothing_is_no_multiple_of_the_reference_s():
    """A softmax over the wrong axis leaves little of the sum; no number is it everywhere."""
    rng = np.random.default_rng(0)
    nearly = paddle.to_tensor(0.02 + 0.0001 * rng.normal(size=(3, 6, 6)))
    ref, port = Ref(lambda m, x: 100 * x), Port(lambda m, x: 100 * x * nearly.astype(x.dtype))
    verdict = assert_located(ref, port, IMAGES, at="", phase="forward", **EVAL)
    assert not verdict.location.diagnosis and not any("raised" in line for line in verdict.location.proof)


def test_a_parameter_that_only_the_reference_freezes():
    ref = ref_network()
    ref.conv.weight.requires_grad = False
    cause = "weight is frozen in the reference and not in the port (requires_grad)"
    verdict = assert_located(ref, port_network(), IMAGES, at="conv", phase="backward", cause=cause, **EVAL)
    assert "the reference does not have it" in verdict.location.proof


# The port's own weights.


def loaded(change: Callable[[dict], None]) -> tuple[Ref, Port]:
    """A pair whose weights were moved by hand, as a port's author does it, with a mistake."""
    code, port_code = (lambda m, x: m.fc(network(m, x).mean((2, 3)))), (lambda m, x: m.fc(network(m, x).mean([2, 3])))
    ref, port = ref_network(code, fc=T.Linear(2, 2)), port_network(port_code, fc=P.Linear(2, 2))
    with torch.no_grad():
        for tensor in (ref.norm.weight, ref.norm.running_var):
            tensor.uniform_(0.5, 2)
        for tensor in (ref.norm.bias, ref.norm.running_mean):
            tensor.uniform_(-1, 1)
    names = {"norm.running_mean": "norm._mean", "norm.running_var": "norm._variance"}
    arrays = {names.get(k, k): v.numpy() for k, v in ref.state_dict().items() if "num_batches" not in k}
    arrays["fc.weight"] = arrays["fc.weight"].T
    change(arrays)
    port.set_state_dict({k: paddle.to_tensor(np.ascontiguousarray(v)) for k, v in arrays.items()})
    return ref, port


def exchanged(arrays: dict) -> None:
    arrays["norm.weight"], arrays["norm.bias"] = arrays["norm.bias"], arrays["norm.weight"]


WEIGHTS = {
    "not transposed": (
        lambda arrays: arrays.update({"fc.weight": arrays["fc.weight"].T}),
        "fc",
        "it is not transposed (Paddle keeps a linear weight as in x out)",
    ),
    "a variance not loaded": (lambda arrays: arrays.pop("norm._variance"), "norm", "it holds ones: it was not loaded"),
    "a kernel not loaded": (lambda arrays: arrays.pop("conv.weight"), "conv", ""),
    "through float16": (
        lambda arrays: arrays.update({"conv.weight": arrays["conv.weight"].astype("float16").astype("float32")}),
        "conv",
        "it went through float16",
    ),
    "weight and bias exchanged": (exchanged, "norm", "it holds the reference's norm.bias"),
    "a bias of zeros": (
        lambda arrays: arrays.update({"head.bias": arrays["head.bias"] * 0}),
        "head",
        "it holds zeros: it was not loaded",
    ),
}  # fmt: skip


def test_weights_moved_right():
    assert_aligned(*loaded(lambda arrays: None), IMAGES, weights="own", **EVAL)


@pytest.mark.parametrize("weights", ["probe", "reference"])
def test_weights_are_not_looked_at_unless_asked(weights):
    assert_aligned(*loaded(exchanged), IMAGES, weights=weights, **EVAL)


@pytest.mark.parametrize(("change", "at", "cause"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_moved_wrong(change, at, cause):
    pair = loaded(change)
    assert_located(*pair, IMAGES, at=at, phase="weights", cause=cause, weights="own", **EVAL)


def test_a_diagnosis_leaves_under_a_thousandth():
    ref, port = np.zeros(3), np.array([1.0, 1.0, 1.0])
    items = {"output 0": ref}, {"output 0": port}, ["output 0"]
    faulty = FaultyModule(None, *items)
    assert reproduces({"output 0": port + 9e-4}, faulty)
    assert not reproduces({"output 0": port + 2e-3}, faulty)
    assert not reproduces({"output 0": np.full(3, np.nan)}, faulty)
    assert not reproduces({}, faulty)
