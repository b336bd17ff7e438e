"""The cause that `align` names: usual mistakes of each type of layer, and outputs of any kind.

Plain ones, which `judge` names too, are in test_judge_causes.py.
"""

import copy
from itertools import chain

import numpy as np
import paddle
import pytest
import torch
from paddle.nn import functional as PF
from toy_pairs import Port, Ref, assert_aligned, assert_located, normal

from portproof.backends import backend
from portproof.backends.slots import describe
from portproof.compare import Item
from portproof.localize import layers
from portproof.localize.diagnosis import FaultyModule, diagnose, reproduces
from portproof.localize.mutations import MISTAKES, mutations
from portproof.python39 import zip_strict

T, P = torch.nn, paddle.nn
EVAL = {"modes": ("eval",)}
X, ROWS, IMAGES = normal(4, 6), normal(3, 5, 6), normal(2, 4, 6, 6)


class Layer(P.Layer):
    """A layer that a port writes itself: `forward(self, x)` over a weight and a bias, or over none."""

    def __init__(self, forward, width=0, bias=True):
        super().__init__()
        self.function = forward
        if width:
            self.weight = self.create_parameter([width])
        if width and bias:
            self.bias = self.create_parameter([width], is_bias=True)

    def forward(self, x):
        return self.function(self, x)


def own_norm(m, x):
    """With the unbiased standard deviation, as it is often written."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) * m.weight + m.bias


def rms(epsilon, centred=False):
    def forward(m, x):
        x = x - x.mean(-1, keepdim=True) if centred else x
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * m.weight

    return forward


LAYERS = {  # (the reference's layer, the port's, its input, phase, the cause)
    "an unusual epsilon": (T.LayerNorm(6), P.LayerNorm(6, 3e-5), X, "forward", "epsilon is 3e-05, not 1e-05"),
    "without bias": (
        T.LayerNorm(6, bias=False), P.LayerNorm(6, 1e-3, bias_attr=False), X, "forward", "epsilon is 0.001, not 1e-05"
    ),
    "the standard deviation": (
        T.LayerNorm(6), Layer(own_norm, 6), X, "forward", "variance is sum / (n - 1) and epsilon is added to its root"
    ),
    "RMSNorm's epsilon": (
        T.RMSNorm(6, eps=1e-6), Layer(rms(1e-5), 6, bias=False), X, "forward", "epsilon is 1e-05, not 1e-06"
    ),
    "RMSNorm with the mean": (
        T.RMSNorm(6, eps=1e-6), Layer(rms(1e-6, True), 6, bias=False), X, "forward", "it subtracts the mean"
    ),
    "GELU by tanh": (T.GELU("tanh"), P.GELU(), X, "forward", "it is GELU, not GELU, approximate tanh"),
    "LogSoftmax's axis": (T.LogSoftmax(1), P.LogSoftmax(-1), ROWS, "forward", "it is over axis 2, not 1"),
    "hard-sigmoid's slope": (
        T.Hardsigmoid(), Layer(lambda m, x: PF.hardsigmoid(x, 0.21, 0.5)), X, "forward",
        "it is hard-sigmoid, slope 0.21, not Hardsigmoid",
    ),
    "Upsample's mode": (
        T.Upsample(scale_factor=2), P.Upsample(scale_factor=2, mode="bilinear"), IMAGES, "forward",
        "mode is bilinear, not nearest",
    ),
    "align_corners": (
        T.Upsample(scale_factor=2, mode="bilinear"), P.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        IMAGES, "forward", "align_corners is True, not None",
    ),
    "output_padding": (
        T.ConvTranspose2d(4, 3, 3, 2, 1, 1), P.Conv2DTranspose(4, 3, 3, 2, 1, 0), IMAGES, "forward",
        "output_padding is 0, not 1",
    ),
    "the padding of a transposed convolution": (
        T.ConvTranspose2d(4, 3, 3, 2, 1), P.Conv2DTranspose(4, 3, 3, 2, 0), IMAGES, "forward", "padding is 0, not 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "port_layer", "x", "phase", "cause"), LAYERS.values(), ids=LAYERS)
def test_a_layer(layer, port_layer, x, phase, cause):
    """In front of it one without a fault."""
    first = (T.Conv2d(4, 4, 1), P.Conv2D(4, 4, 1)) if x.ndim == 4 else (T.Linear(6, 6), P.Linear(6, 6))
    code = lambda m, x: m.layer(m.first(x))  # noqa: E731
    ref, port = Ref(code, first=first[0], layer=layer), Port(code, first=first[1], layer=port_layer)
    assert_located(ref, port, x, at="layer", phase=phase, cause=cause, **EVAL)


IDS = np.array([[0, 3, 5, 9], [7, 0, 2, 9]])  # 1 is not among them, so of its row nothing can be told
EMBEDDINGS = {
    "no padding_idx": (
        T.Embedding(10, 6, padding_idx=0), {}, "backward", "it has no padding_idx: row 0 gets a gradient"
    ),
    "padding_idx": (T.Embedding(10, 6), {"padding_idx": 9}, "forward", "padding_idx is 9, and its row gives zeros"),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "options", "phase", "cause"), EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_an_embedding(layer, options, phase, cause):
    code = lambda m, ids: m.fc(m.embed(ids))  # noqa: E731
    ref = Ref(code, embed=layer, fc=T.Linear(6, 3))
    port = Port(code, embed=P.Embedding(10, 6, **options), fc=P.Linear(6, 3))
    verdict = assert_located(ref, port, IDS, at="embed", phase=phase, cause=cause, **EVAL)
    assert len(verdict.location.diagnosis) == 1


# Recurrence and attention: what Paddle's layer gives, with weights that are read otherwise.

OUTPUT = Item("output 0", "output")


def causes(module: T.Module, port_output: paddle.Tensor, *arrays: np.ndarray) -> list[str]:
    """The causes for which the reference's `module` would give the port's output."""

    def run(module):
        with torch.no_grad():
            output = module(*map(torch.from_numpy, arrays))
        return {OUTPUT: (output[0] if isinstance(output, tuple) else output).numpy()}

    ref, port = run(module), {OUTPUT: port_output.numpy()}
    mutated = [
        (text, lambda mutation=mutation: run(mutation(copy.deepcopy(module))))
        for text, mutation in mutations(module, arrays)
    ]
    return diagnose(FaultyModule(layer_of(module, *arrays, output=ref[OUTPUT]), ref, port, [OUTPUT], mutated=mutated))


def layer_of(module: T.Module, *arrays: np.ndarray, output: np.ndarray = X) -> layers.Layer:
    tensors = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    return layers.Layer(describe(backend("torch"), module)[""], module.training, tensors, list(arrays), output)


def in_order(*places):
    return lambda name, t: np.concatenate([np.split(t, len(places))[place] for place in places])


def without(which):
    return lambda name, t: t * 0 if name.startswith(which) else t


def update_gate_negated(name, t):
    r, z, n = np.split(t, 3)
    return np.concatenate([r, -z, n])


def same(name, t):
    return t


RECURRENT = {  # (layer, options of the port's, what it reads for a tensor, the cause)
    "LSTM, gates": ("LSTM", {}, in_order(0, 2, 1, 3), "its gates are in the order i, g, f, o (torch's is i, f, g, o)"),
    "GRU, gates": ("GRU", {}, in_order(1, 2, 0), "its gates are in the order n, r, z (torch's is r, z, n)"),
    "GRU, the update gate": ("GRU", {}, update_gate_negated, "z * n + (1 - z) * h, not (1 - z) * n + z * h"),
    "a bias": ("LSTM", {}, without("bias_hh"), "bias_hh is missing, or zero"),
    "both biases": ("GRU", {}, without("bias"), "both biases are missing, or zero"),
    "time first": ("GRU", {"time_major": True}, same, "axes 0 and 1 are taken for (time, batch), not (batch, time)"),
    "the activation": ("RNN", {"activation": "relu"}, same, "its activation is relu, not tanh"),
}


@pytest.mark.parametrize(("kind", "options", "change", "cause"), RECURRENT.values(), ids=RECURRENT)
def test_a_recurrent_layer(kind, options, change, cause):
    ref = getattr(T, kind)(6, 4, batch_first=True)
    port = getattr(P, kind.replace("RNN", "SimpleRNN"))(6, 4, **options)
    for name, tensor in ref.named_parameters():
        port.state_dict()[name].set_value(change(name, tensor.detach().numpy()))
    found = causes(ref, port(paddle.to_tensor(ROWS))[0], ROWS)
    assert len(found) == 1 and cause in found[0], found


ATTENTION = {  # (heads of the port's, {its projection: the reference's}, factor of the query's, without biases, cause)
    "query and key": (2, "kqv", 1.0, False, "the projections of query and key are exchanged"),
    "key and value": (2, "qvk", 1.0, False, "the projections of key and value are exchanged"),
    "heads": (4, "qkv", 1.0, False, "it has 4 heads, not 2"),
    "no scale": (2, "qkv", 4**0.5, False, "the products of query and key are not divided by sqrt(head_dim)"),
    "another scale": (2, "qkv", 2**-0.5, False, "divided by sqrt(embed_dim), not sqrt(head_dim)"),
    "no biases": (2, "qkv", 1.0, True, "the biases of query, key and value are missing, or zero"),
}


@pytest.mark.parametrize(("heads", "order", "factor", "unbiased", "cause"), ATTENTION.values(), ids=ATTENTION)
def test_attention(heads, order, factor, unbiased, cause):
    ref, port, x = T.MultiheadAttention(8, 2, batch_first=True), P.MultiHeadAttention(8, heads), normal(3, 5, 8)
    torch.nn.init.normal_(ref.in_proj_bias)
    weights = dict(zip_strict("qkv", np.split(ref.in_proj_weight.detach().numpy(), 3)))
    biases = dict(zip_strict("qkv", np.split(ref.in_proj_bias.detach().numpy(), 3)))
    for place, source in zip_strict("qkv", order):
        projection, scale = getattr(port, f"{place}_proj"), factor if place == "q" else 1.0
        projection.weight.set_value(np.ascontiguousarray(weights[source].T) * np.float32(scale))
        projection.bias.set_value(biases[source] * np.float32(scale) * (not unbiased))
    port.out_proj.weight.set_value(np.ascontiguousarray(ref.out_proj.weight.detach().numpy().T))
    port.out_proj.bias.set_value(ref.out_proj.bias.detach().numpy())
    port.eval()
    found = causes(ref, port(*[paddle.to_tensor(x)] * 3), x, x, x)
    assert len(found) == 1 and cause in found[0], found


# A batch norm whose tensors were not loaded, or not all of them.

UNLOADED = {  # (the port's that were loaded, the cause)
    "nothing": ((), "none of its tensors was loaded (weight 1, bias 0, mean 0, variance 1)"),
    "statistics alone": (("_mean", "_variance"), "weight and bias were not loaded (1 and 0)"),
    "weight and bias alone": (("weight", "bias"), "running mean and variance were not loaded (0 and 1)"),
}


@pytest.mark.parametrize(("loaded", "cause"), UNLOADED.values(), ids=UNLOADED)
def test_a_batch_norm_that_was_not_loaded(loaded, cause):
    ref, port = T.BatchNorm2d(4).eval(), P.BatchNorm2D(4)
    own = {"weight": ref.weight, "bias": ref.bias, "_mean": ref.running_mean, "_variance": ref.running_var}
    for name, tensor in own.items():
        torch.nn.init.uniform_(tensor, 0.5, 2.0)
        if name in loaded:
            port.state_dict()[name].set_value(tensor.detach().numpy())
    port.eval()
    assert causes(ref, port(paddle.to_tensor(IMAGES)), IMAGES) == [cause]


# What is frozen on one side.


def frozen_pair(*frozen: str) -> tuple[T.Module, P.Layer]:
    ref, port = T.Sequential(T.Conv2d(4, 3, 1), T.BatchNorm2d(3)), P.Sequential(P.Conv2D(4, 3, 1), P.BatchNorm2D(3))
    if "reference" in frozen:
        ref[1].requires_grad_(False)
    if "port" in frozen:
        port[1].weight.stop_gradient = port[1].bias.stop_gradient = True
    return ref, port


FROZEN = {
    "reference": "its parameters are frozen in the reference and not in the port (requires_grad)",
    "port": "its parameters are frozen in the port and not in the reference (stop_gradient)",
}


@pytest.mark.parametrize(("where", "cause"), FROZEN.items(), ids=FROZEN)
def test_a_norm_that_is_frozen_on_one_side(where, cause):
    verdict = assert_located(*frozen_pair(where), IMAGES, at="1", phase="backward", cause=cause)
    (statistics,) = verdict.location.also
    assert (statistics.name, statistics.phase) == ("1", "buffers")
    assert statistics.diagnosis == ["the running variance is the biased one, sum / n (torch's is sum / (n - 1))"]


def test_a_norm_that_is_frozen_on_both_sides():
    assert_aligned(*frozen_pair("reference", "port"), IMAGES, **EVAL)


# Outputs of any kind.

OUTPUTS = {  # (the reference's end, the port's, the cause)
    "1-D": (lambda y: y.relu().sum(1), lambda y: PF.relu6(y).sum(1), ""),
    "a scalar": (lambda y: (y * y).mean(), lambda y: y.abs().mean(), ""),
    "whole numbers": (lambda y: y.argmax(1), lambda y: y.argmin(1), ""),
    "booleans": (lambda y: y > 0, lambda y: y > 1, ""),
    "booleans, negated": (lambda y: y > 0, lambda y: y < 0, ""),
    "constant": (lambda y: y * 0 + 1, lambda y: y * 0 + 3, "it is 3 times the reference's, everywhere"),
    "zeros": (lambda y: y * 0, lambda y: y * 0 + 3, ""),
    "nothing": (lambda y: y[:, :2], lambda y: y[:, :0], ""),
    "complex": (torch.fft.fft, lambda y: paddle.fft.fft(y).conj(), ""),
    "complex, scaled": (
        torch.fft.fft, lambda y: paddle.fft.fft(y) * 2, "it is 2 times the reference's, everywhere"
    ),
    "another kind": (lambda y: y.argmax(1), lambda y: y.argmax(1).astype("int32"), ""),
}  # fmt: skip


def ends(end, port_end) -> tuple[Ref, Port]:
    return Ref(lambda m, x: end(m.a(x)), a=T.Linear(6, 16)), Port(lambda m, x: port_end(m.a(x)), a=P.Linear(6, 16))


@pytest.mark.parametrize(("end", "port_end", "cause"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_of_any_kind(end, port_end, cause):
    assert_located(*ends(end, port_end), X, at="", phase="forward", cause=cause, **EVAL)


ALIGNED = {
    "a scalar": (lambda y: (y * y).mean(), lambda y: (y * y).mean()),
    "complex": (torch.fft.fft, paddle.fft.fft),
    "booleans beside": (lambda y: (y, y > 0), lambda y: (y, y > 0)),
}


@pytest.mark.parametrize(("end", "port_end"), ALIGNED.values(), ids=ALIGNED)
def test_an_output_of_any_kind_of_a_right_port(end, port_end):
    assert_aligned(*ends(end, port_end), X, **EVAL)


def test_nothing_that_differs_has_no_cause():
    faulty = FaultyModule(layer_of(T.ReLU(), X), {OUTPUT: X}, {OUTPUT: X}, [])
    assert diagnose(faulty) == []
    assert not reproduces({}, faulty)


def fail() -> dict:
    raise RuntimeError("it does not run")


def test_a_mutation_that_raises_does_not_end_the_search():
    x = X[0]
    mutated = [("it raises", fail), ("it is the mutated one", lambda: {OUTPUT: 3 * x})]
    faulty = FaultyModule(layer_of(T.Conv2d(1, 1, 1), x), {OUTPUT: x}, {OUTPUT: 3 * x}, [OUTPUT], mutated=mutated)
    assert diagnose(faulty) == ["it is the mutated one"]


def test_what_raises_reproduces_nothing():
    class Strange(T.LayerNorm):
        """Only looks like the library's."""

        def __init__(self):
            super().__init__(6)
            del self.eps

    for module in (Strange(), T.LayerNorm(5), T.BatchNorm2d(3), T.Softmax(9), T.LSTM(6, 4), T.Embedding(3, 6)):
        layer = layer_of(module, ROWS, output=X)
        faulty = FaultyModule(layer, {OUTPUT: X}, {OUTPUT: 2 * X}, [OUTPUT], mutated=[("it raises", fail)])
        assert diagnose(faulty) == ["it is 2 times the reference's, everywhere"]


def test_which_layers_have_mistakes_that_need_the_reference():
    """NumPy's list, which knows no torch, is the list of the mutations; a lazy layer becomes another class."""
    known = tuple(chain.from_iterable(MISTAKES))
    found = {kind for kind, each in vars(T).items() if isinstance(each, type) and issubclass(each, known)}
    assert {kind for kind in found if not kind.startswith("Lazy")} == layers.NEED_THE_REFERENCE
