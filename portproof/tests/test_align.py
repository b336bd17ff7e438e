"""`align` on right ports: every layer, several inputs and outputs, both modes; and pairs that two libraries ship."""

import numpy as np
import paddle
import pytest
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF
from toy_pairs import Port, Ref, assert_aligned, assert_located, assert_refused, normal

from portproof import align, load_reference_weights
from portproof.backends import backend
from portproof.backends.probe import probe_weights
from portproof.compare import FAIL, PASS, REFUSED
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

T, P = torch.nn, paddle.nn
TorchSeq, PaddleSeq = T.Sequential, P.Sequential
IDS = np.random.default_rng(0).integers(0, 10, (2, 5))

LAYERS = {  # (reference, port, shape of the input)
    "Conv1d": (T.Conv1d(3, 4, 3, padding=1), P.Conv1D(3, 4, 3, padding=1), (2, 3, 8)),
    "Conv2d": (T.Conv2d(4, 6, 3, 2, 1, groups=2), P.Conv2D(4, 6, 3, 2, 1, groups=2), (2, 4, 8, 7)),
    "dilated Conv2d": (T.Conv2d(3, 4, 3, dilation=2), P.Conv2D(3, 4, 3, dilation=2), (2, 3, 8, 8)),
    "Conv3d": (T.Conv3d(3, 4, 3), P.Conv3D(3, 4, 3), (2, 3, 5, 5, 5)),
    "ConvTranspose1d": (T.ConvTranspose1d(3, 4, 3, 2), P.Conv1DTranspose(3, 4, 3, 2), (2, 3, 5)),
    "ConvTranspose2d": (T.ConvTranspose2d(3, 4, 3, 2, 1, 1), P.Conv2DTranspose(3, 4, 3, 2, 1, 1), (2, 3, 5, 5)),
    "Linear, square": (T.Linear(6, 6), P.Linear(6, 6), (4, 6)),
    "LayerNorm": (T.LayerNorm(6), P.LayerNorm(6), (4, 5, 6)),
    "LayerNorm over two axes": (T.LayerNorm((5, 6)), P.LayerNorm((5, 6)), (4, 5, 6)),
    "LayerNorm without bias": (T.LayerNorm(6, bias=False), P.LayerNorm(6, bias_attr=False), (4, 6)),
    "GroupNorm": (T.GroupNorm(2, 6), P.GroupNorm(2, 6), (4, 6, 5, 5)),
    "InstanceNorm2d": (T.InstanceNorm2d(6, affine=True), P.InstanceNorm2D(6), (4, 6, 5, 5)),
    "PReLU": (T.PReLU(), P.PReLU(), (4, 6)),
    "PReLU by channel": (T.PReLU(6), P.PReLU(6), (4, 6, 3, 3)),
    "Hardswish": (T.Hardswish(), P.Hardswish(), (16, 6)),
    "GELU": (T.GELU(), P.GELU(), (16, 6)),
    "GELU by tanh": (T.GELU("tanh"), P.GELU(True), (16, 6)),
    "ELU": (T.ELU(), P.ELU(), (16, 6)),
    "SELU": (T.SELU(), P.SELU(), (16, 6)),
    "SiLU": (T.SiLU(), P.Swish(), (16, 6)),
    "Softmax": (T.Softmax(-1), P.Softmax(-1), (4, 6)),
    "AvgPool2d": (T.AvgPool2d(3, 2, 1), P.AvgPool2D(3, 2, 1, exclusive=False), (2, 3, 7, 7)),
    "AvgPool2d without padding": (T.AvgPool2d(3, 2, 1, count_include_pad=False), P.AvgPool2D(3, 2, 1), (2, 3, 7, 7)),
    "AvgPool2d, ceil": (T.AvgPool2d(3, 2, ceil_mode=True), P.AvgPool2D(3, 2, ceil_mode=True), (2, 3, 8, 8)),
    "AvgPool3d": (T.AvgPool3d(3, 2), P.AvgPool3D(3, 2), (2, 3, 7, 7, 7)),
    "MaxPool2d": (T.MaxPool2d(3, 2, 1), P.MaxPool2D(3, 2, 1), (2, 3, 7, 7)),
    "AdaptiveAvgPool2d": (T.AdaptiveAvgPool2d((3, 2)), P.AdaptiveAvgPool2D((3, 2)), (2, 3, 7, 7)),
    "Upsample, nearest": (T.Upsample(scale_factor=2), P.Upsample(scale_factor=2), (2, 3, 5, 5)),
    "Upsample, bilinear": (T.Upsample((9, 13), mode="bilinear"), P.Upsample((9, 13), mode="bilinear"), (2, 3, 5, 7)),
    "Upsample, bicubic": (T.Upsample((9, 13), mode="bicubic"), P.Upsample((9, 13), mode="bicubic"), (2, 3, 5, 7)),
    "Upsample, corners": (
        T.Upsample(scale_factor=1.7, mode="bilinear", align_corners=True),
        P.Upsample(scale_factor=1.7, mode="bilinear", align_corners=True),
        (2, 3, 5, 7),
    ),
    "Dropout": (T.Dropout(0.5), P.Dropout(0.5), (4, 6)),
    "Flatten": (T.Flatten(), P.Flatten(), (4, 2, 3)),
}


@pytest.mark.parametrize(("layer", "port_layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_layer(layer, port_layer, shape):
    """In front of it a layer that can be wrong, so that what it sends back is judged too."""
    ones = {2: (T.Linear, P.Linear), 3: (T.Conv1d, P.Conv1D), 4: (T.Conv2d, P.Conv2D), 5: (T.Conv3d, P.Conv3D)}
    first, port_first = (factory(shape[1], shape[1], *[1] * (len(shape) > 2)) for factory in ones[len(shape)])
    assert_aligned(TorchSeq(first, layer), PaddleSeq(port_first, port_layer), normal(*shape))


SHARP = {  # norms of small inputs, of which epsilon decides
    "LayerNorm": (T.LayerNorm((6, 5, 5), 1e-3), P.LayerNorm((6, 5, 5), 1e-3)),
    "GroupNorm": (T.GroupNorm(2, 6, 1e-3), P.GroupNorm(2, 6, 1e-3)),
    "InstanceNorm2d": (T.InstanceNorm2d(6, 1e-3, affine=True), P.InstanceNorm2D(6, 1e-3)),
    "BatchNorm2d": (T.BatchNorm2d(6, 1e-3), P.BatchNorm2D(6, epsilon=1e-3)),
}


@pytest.mark.parametrize("name", SHARP)
def test_a_norm_with_an_epsilon_that_float32_rounds(name):
    """And an epsilon that is off by that rounding is no right one."""
    layer, port_layer = SHARP[name]
    ref = Ref(lambda m, x: m.norm(m.conv(x) / 64), conv=T.Conv2d(6, 6, 1), norm=layer)
    port = Port(lambda m, x: m.norm(m.conv(x) / 64), conv=P.Conv2D(6, 6, 1), norm=port_layer)
    assert_aligned(ref, port, normal(4, 6, 5, 5), modes=("eval",))
    layer.eps = float(np.float32(1e-3))
    assert align(ref, port, [normal(4, 6, 5, 5)], modes=("eval",)).status == FAIL


BATCH_NORMS = {
    "BatchNorm1d": (T.BatchNorm1d(6), P.BatchNorm1D(6), (4, 6)),
    "BatchNorm1d in time": (T.BatchNorm1d(6), P.BatchNorm1D(6), (4, 6, 5)),
    "BatchNorm2d": (T.BatchNorm2d(6), P.BatchNorm2D(6), (4, 6, 5, 5)),
    "BatchNorm3d": (T.BatchNorm3d(6), P.BatchNorm3D(6), (4, 6, 3, 3, 3)),
}


@pytest.mark.parametrize(("layer", "port_layer", "shape"), BATCH_NORMS.values(), ids=BATCH_NORMS)
def test_batch_norm_is_right_in_eval_mode_and_paddles_variance_is_named_in_train_mode(layer, port_layer, shape):
    assert_aligned(layer, port_layer, normal(*shape), modes=("eval",))
    cause = "the running variance is the biased one, sum / n"
    verdict = assert_located(layer, port_layer, normal(*shape), at="", phase="buffers", cause=cause)
    failed = {row.name for row in verdict.rows if row.status == FAIL}
    assert failed == {"train mode, float64/running_var", "train mode, float32/running_var"}


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("way", ["one way", "both ways", "two layers with dropout"])
def test_a_recurrent_layer(kind, way):
    options = {"one way": {}, "both ways": {"bidirectional": True}}.get(way, {"num_layers": 2, "dropout": 0.5})
    port_options = {"direction": "bidirect"} if way == "both ways" else options
    width = 16 if way == "both ways" else 8
    port_kind = getattr(P, kind.replace("RNN", "SimpleRNN"))
    ref = Ref(
        lambda m, x: m.fc(m.rnn(x)[0]), rnn=getattr(T, kind)(6, 8, batch_first=True, **options), fc=T.Linear(width, 3)
    )
    port = Port(lambda m, x: m.fc(m.rnn(x)[0]), rnn=port_kind(6, 8, **port_options), fc=P.Linear(width, 3))
    assert_aligned(ref, port, normal(2, 5, 6))


def layers() -> tuple[dict, dict]:
    return {"a": T.Linear(5, 6), "o": T.Linear(6, 3)}, {"a": P.Linear(5, 6), "o": P.Linear(6, 3)}


# Inputs and outputs.


def both(code, port_code=None) -> tuple[Ref, Port]:
    ref, port = layers()
    return Ref(code, **ref), Port(port_code or code, **port)


def test_two_inputs():
    code = lambda m, x, y: m.o(m.a(x) * m.b(y))  # noqa: E731
    ref, port = layers()
    pair = Ref(code, **ref, b=T.Linear(4, 6)), Port(code, **port, b=P.Linear(4, 6))
    verdict = assert_aligned(*pair, normal(4, 5), normal(4, 4))
    names = {row.name for row in verdict.rows}
    assert {f"eval mode, float64/gradient/input {i}" for i in (0, 1)} <= names


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_whole_numbers_into_an_embedding(dtype):
    code = lambda m, ids, x: m.o(m.embed(ids).mean(1) * m.a(x))  # noqa: E731
    ref, port = layers()
    pair = Ref(code, **ref, embed=T.Embedding(10, 6)), Port(code, **port, embed=P.Embedding(10, 6))
    assert_aligned(*pair, IDS.astype(dtype), normal(2, 5))


def test_two_embeddings_of_one_size_are_told_apart_by_their_indices():
    ref = Ref(lambda m, i, j: m.one(i) - m.two(j).tanh(), one=T.Embedding(10, 6), two=T.Embedding(10, 6))

    def turned(m, i, j):
        later = m.b(j)
        return m.a(i) - later.tanh()

    port = Port(turned, b=P.Embedding(10, 6), a=P.Embedding(10, 6))
    assert_aligned(ref, port, IDS, IDS[::-1].copy())


def test_a_mask_of_booleans():
    mask = np.random.default_rng(1).random((4, 6)) > 0.5
    pair = both(
        lambda m, x, mask: m.o(m.a(x).masked_fill(mask, 0.0)),
        lambda m, x, mask: m.o(paddle.where(mask, paddle.zeros([1]), m.a(x))),
    )
    assert_aligned(*pair, normal(4, 5), mask)


MASK = np.array([[True, False, True, True, False]] * 4)


def masked(m, x, mask=None, more=None, scale=1.0):
    return m.o(m.a(x * (0.5 if mask is None else mask) + (more["one"][0] if more else 0.0)) * scale)


def masked_port(m, x, mask=None, more=None, scale=1.0):
    mask = mask if mask is None else mask.astype(x.dtype)
    return m.o(m.a(x * (0.5 if mask is None else mask) + (more["one"][0] if more else 0.0)) * scale)


KEYWORDS = {
    "a keyword": {"x": normal(4, 5), "mask": MASK},
    "positions and keywords": {0: normal(4, 5), 1: MASK},
    "nested": {"x": normal(4, 5), "more": {"one": [normal(1, 5)]}},
    "numbers and nothing": {"x": normal(4, 5), "mask": None, "scale": 3.0},
    "a list of numbers": {"x": [[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 1.0, -4.0, 2.0]]},
}


@pytest.mark.parametrize("inputs", KEYWORDS.values(), ids=KEYWORDS)
def test_inputs_by_keyword(inputs):
    ref, port = layers()
    pair = Ref(masked, **ref), Port(masked_port, **port)
    verdict = align(*pair, inputs)
    assert verdict.status == PASS and "confirmed by values everywhere" in verdict.notes[0], str(verdict)
    wrong = Port(lambda m, x, **more: masked_port(m, x * (1 + 0.1 * len(more)), **more), **layers()[1])
    assert align(pair[0], wrong, inputs).status == (FAIL if len(inputs) > 1 else PASS)


def test_positions_are_not_keywords():
    ref, port = layers()
    pair = Ref(lambda m, x, mask: m.o(m.a(x) * mask), **ref), Port(lambda m, y, z: m.o(m.a(y) * z), **port)
    assert align(*pair, {0: normal(4, 5), 1: normal(4, 1)}).status == PASS
    verdict = align(*pair, {"x": normal(4, 5), "mask": normal(4, 1)}, modes=("eval",))
    assert verdict.status == FAIL and "unexpected keyword argument" in str(verdict)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_inputs(dtype):
    x = (normal(4, 5) + 1j * normal(5, 4).T).astype(dtype)
    pair = both(lambda m, x: m.o(m.a(x.real * x.imag)), lambda m, x: m.o(m.a(x.real() * x.imag())))
    assert_aligned(*pair, x)
    verdict = align(pair[0], both(lambda m, x: m.o(m.a(x.real() * -x.imag())))[1], [x])
    assert verdict.status == FAIL


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (normal(4, 5), r"the inputs are one array \(4, 5\): give a list of arrays"),
        ("4,5", "the inputs are a str"),
        ({1: normal(4, 5)}, r"the inputs have the keys \[1\]"),
        ([np.array(["a"])], "input 0 is a ndarray of <U1"),
        ({"x": [object()]}, r"input 'x'\[0\] is a object of object"),
    ],
)
def test_inputs_that_are_none(inputs, message):
    with pytest.raises(UserError, match=message):
        align(*both(lambda m, x: m.o(m.a(x))), inputs)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_inputs_of_any_float_type(dtype):
    assert_aligned(*both(lambda m, x: m.o(m.a(x))), normal(4, 5).astype(dtype))


OUTPUTS = {
    "a tuple": lambda m, x: (m.a(x), m.o(m.a(x))),
    "a dict": lambda m, x: {"one": m.a(x), "two": m.o(m.a(x))},
    "nested": lambda m, x: [m.a(x), {"one": (m.o(m.a(x)),)}],
    "one without a gradient": lambda m, x: (m.o(m.a(x)), m.a(x).detach()),
    "one of whole numbers": lambda m, x: (m.o(m.a(x)), m.a(x).argmax(1)),
}


@pytest.mark.parametrize("code", OUTPUTS.values(), ids=OUTPUTS)
def test_several_outputs(code):
    verdict = assert_aligned(*both(code), normal(4, 5))
    assert sum(row.name.startswith("eval mode, float64/output[") for row in verdict.rows) == 2


def test_a_dict_in_another_order_is_the_same():
    pair = both(OUTPUTS["a dict"], lambda m, x: {"two": m.o(m.a(x)), "one": m.a(x)})
    assert_aligned(*pair, normal(4, 5))


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x: {"one": m.a(x), "three": m.o(m.a(x))},
        lambda m, x: {"one": m.o(m.a(x)), "two": m.a(x)},
        lambda m, x: m.a(x),
    ],
    ids=["another key", "exchanged", "only one"],
)
def test_outputs_that_do_not_fit(code):
    verdict = align(*both(OUTPUTS["a dict"], code), [normal(4, 5)])
    assert verdict.status == FAIL
    assert verdict.first_failure.name.startswith("eval mode, float64/output[")


# State of one's own.


class Table(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gain = T.Linear(5, 6), T.Parameter(torch.ones(6))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.table.mul_(0.5)
            self.steps.add_(1)
        return self.fc(x) * self.gain + self.table


class PortTable(P.Layer):
    def __init__(self, updates: bool = True) -> None:
        super().__init__()
        self.updates = updates
        self.fc, self.gain = P.Linear(5, 6), self.create_parameter([6])
        self.register_buffer("table", paddle.arange(6).astype("float32"))
        self.register_buffer("steps", paddle.zeros([], "int64"))

    def forward(self, x):
        if self.training and self.updates:
            self.table.set_value(self.table * 0.5)
            self.steps.set_value(self.steps + 1)
        return self.fc(x) * self.gain + self.table


def test_parameters_and_buffers_of_ones_own():
    verdict = assert_aligned(Table(), PortTable(), normal(4, 5))
    assert {"train mode, float64/steps", "train mode, float64/gradient/gain"} <= {r.name for r in verdict.rows}


def test_a_buffer_that_is_not_updated():
    verdict = assert_located(Table(), PortTable(updates=False), normal(4, 5), at="", phase="forward")
    failed = {row.name for row in verdict.rows if row.status == FAIL}
    assert {"train mode, float64/table", "train mode, float64/steps"} <= failed
    assert not any(name.startswith("eval mode") for name in failed)


def test_frozen_on_both_sides():
    ref, port = both(lambda m, x: m.o(m.a(x)))
    ref.a.weight.requires_grad, port.a.weight.stop_gradient = False, True
    verdict = align(ref, port, [normal(4, 5)])
    assert verdict.status == PASS, str(verdict)


# Randomness.

DROPOUTS = {
    "layers": (lambda m, x: m.o(m.drop(m.a(x))),) * 2,
    "functions": (
        lambda m, x: m.o(TF.dropout(m.a(x), 0.5, m.training)),
        lambda m, x: m.o(PF.dropout(m.a(x), 0.5, training=m.training)),
    ),
    "a layer here, a function there": (
        lambda m, x: m.o(m.drop(m.a(x))), lambda m, x: m.o(PF.dropout(m.a(x), 0.5, training=m.training))
    ),
    "of channels": (
        lambda m, x: m.o(TF.dropout2d(m.a(x)[..., None, None], 0.5, m.training)[..., 0, 0]),
        lambda m, x: m.o(PF.dropout2d(m.a(x)[..., None, None], 0.5, m.training)[..., 0, 0]),
    ),
    "alpha": (
        lambda m, x: m.o(TF.alpha_dropout(m.a(x), 0.5, m.training)),
        lambda m, x: m.o(PF.alpha_dropout(m.a(x), 0.5, m.training)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "port_code"), DROPOUTS.values(), ids=DROPOUTS)
def test_dropout_is_off_in_train_mode(code, port_code):
    ref, port = layers()
    assert_aligned(Ref(code, **ref, drop=T.Dropout(0.5)), Port(port_code, **port, drop=P.Dropout(0.5)), normal(4, 5))


def test_dropout_that_is_left_on_in_eval_mode_is_a_fault():
    verdict = align(*both(lambda m, x: m.o(m.a(x)), lambda m, x: m.o(PF.dropout(m.a(x), 0.5))), [normal(4, 5)])
    assert verdict.status == FAIL and verdict.first_failure.name == "eval mode/the same each time"
    reason = "the port gives another result each time it runs in eval mode, random numbers are taken by its own code"
    assert verdict.first_failure.reason == f"{reason}: is dropout on?"


def test_dropout_that_scales_in_eval_mode_is_named():
    ref, port = layers()
    code = lambda m, x: m.o(m.drop(m.a(x)))  # noqa: E731
    pair = Ref(code, **ref, drop=T.Dropout(0.5)), Port(code, **port, drop=P.Dropout(0.5, mode="downscale_in_infer"))
    assert_located(*pair, normal(4, 5), at="drop", phase="forward", cause="it gives 0.5 times its input")


def noisy(m, x):
    return m.o(m.a(x) + (torch.poisson(torch.ones(6, dtype=x.dtype)) if m.training else 0.0))


def noisy_port(m, x):
    return m.o(m.a(x) + (paddle.poisson(paddle.ones([6], x.dtype)) if m.training else 0.0))


@pytest.mark.parametrize(
    ("code", "what"), [(noisy, "reference"), (lambda m, x: m.o(m.a(x)), "port")], ids=["both", "the port"]
)
def test_what_is_random_in_train_mode_is_refused_there_and_judged_in_eval_mode(code, what):
    pair = both(code, noisy_port)
    assert_refused(*pair, normal(4, 5), text=f"the {what} gives another result each time it runs in train mode")
    assert_aligned(*pair, normal(4, 5), modes=("eval",))


class Noise(T.Module):
    """Takes random numbers that are not lent in train mode."""

    def forward(self, x):
        return x * (torch.poisson(torch.ones(len(x), 1, dtype=x.dtype)) + 0.5) if self.training else x


def test_what_takes_random_numbers_is_named_and_statistics_are_those_of_one_pass():
    model = backend("torch").wrap(TorchSeq(T.Linear(5, 6), T.BatchNorm1d(6), Noise()), "reference")
    calm = backend("torch").wrap(TorchSeq(T.Linear(5, 6), T.BatchNorm1d(6), T.Identity()), "reference")
    calm.load(model.arrays())
    runs = [each.run([normal(4, 5)], "float64", train=True, calls=True) for each in (model, calm)]
    assert [name for name, call in runs[0].trace.calls.items() if call.took_random] == ["2", "output"]
    assert not any(call.took_random for call in runs[1].trace.calls.values())
    for key, array in runs[1].buffers.items():
        assert np.array_equal(runs[0].buffers[key], array)


# What cannot be judged.


def test_nan_in_the_reference_is_refused():
    pair = both(lambda m, x: torch.log(-m.a(x).abs()), lambda m, x: paddle.log(-m.a(x).abs()))
    verdict = align(*pair, [normal(4, 5)])
    assert verdict.status == REFUSED and "the reference itself gives NaN or infinity at output" in verdict.refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((normal(4, 7),), "the reference cannot run on these inputs in eval mode: it raised RuntimeError"),
        ((normal(4, 5), normal(4, 5)), "the reference cannot run on these inputs in eval mode: it raised TypeError"),
    ],
)
def test_inputs_that_do_not_fit_the_reference(arguments, message):
    with pytest.raises(UserError, match=message):
        align(*both(lambda m, x: m.o(m.a(x))), arguments)


@pytest.mark.parametrize(("activation", "most"), [("Tanh", 11), ("Hardswish", 13)])
def test_nothing_is_run_twice(activation, most):
    """Six layers: each side once a mode and precision; before the map is known the reference's forward passes, too.

    Where it has operations with branches, these are run with the probe weights once more, to see what is entered.
    """
    activations = getattr(T, activation)(), getattr(P, activation)()
    layers = T.Conv2d(3, 4, 3), T.LayerNorm(4), activations[0], T.AvgPool2d(2), T.Flatten(), T.Linear(16, 3)
    port_layers = P.Conv2D(3, 4, 3), P.LayerNorm(4), activations[1], P.AvgPool2D(2), P.Flatten(), P.Linear(16, 3)
    verdict = assert_aligned(TorchSeq(*layers), PaddleSeq(*port_layers), normal(4, 3, 6, 6))
    whole, _, alone = verdict.passes.removeprefix("runs: ").partition(" of whole models, ")
    assert int(whole) <= most and int(alone.split()[0]) <= 36


def test_buffers_are_searched_where_they_are():
    """Of six layers the two batch norms fail: the search runs these and the whole alone, not the others once more."""
    layers = T.Conv2d(3, 4, 3), T.BatchNorm2d(4), T.Tanh(), T.Conv2d(4, 4, 3), T.BatchNorm2d(4), T.Tanh()
    port_layers = P.Conv2D(3, 4, 3), P.BatchNorm2D(4), P.Tanh(), P.Conv2D(4, 4, 3), P.BatchNorm2D(4), P.Tanh()
    verdict = align(TorchSeq(*layers), PaddleSeq(*port_layers), [normal(4, 3, 9, 9)])
    assert [place.name for place in (verdict.location, *verdict.location.also)] == ["1", "4"]
    assert int(verdict.passes.rpartition(" models, ")[2].split()[0]) <= 42


def test_one_sample_where_batch_norm_trains():
    pair = TorchSeq(T.Linear(5, 6), T.BatchNorm1d(6)), PaddleSeq(P.Linear(5, 6), P.BatchNorm1D(6))
    with pytest.raises(UserError, match="in train mode.*batch norm needs 2 samples at least"):
        align(*pair, [normal(1, 5)])


@pytest.mark.parametrize("options", [{"weights": "none"}, {"modes": ()}, {"modes": ("test",)}])
def test_options_that_are_none(options):
    with pytest.raises(UserError, match="choose (one of probe, reference, own|some of eval, train)"):
        align(*both(lambda m, x: m.o(m.a(x))), [normal(4, 5)], **options)


@pytest.mark.parametrize("precisions", [(), ("float16",), "float64"])
def test_precisions_that_are_none(precisions):
    with pytest.raises(UserError, match="choose some of float64, float32"):
        align(*both(lambda m, x: m.o(m.a(x))), [normal(4, 5)], precisions=precisions)


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_one_precision(precision):
    ref, port = both(lambda m, x: m.o(m.a(x)), lambda m, x: m.o(m.a(x) * 1.001))
    verdict = align(ref, port, [normal(4, 5)], precisions=(precision,))
    judged = {row.item.dtype for row in verdict.rows if row.item.kind != "structure"}
    assert judged == {precision} and verdict.status == FAIL and verdict.location.name == ""
    kinds = {row.item.kind for row in verdict.rows if "isolated" not in row.name} - {"structure"}
    assert kinds == ({"output", "gradient"} if precision == "float64" else {"output"})
    assert ("gradients in code between layers not compared" in verdict.caveats) == (precision == "float32")


def blocks(*frozen: str) -> tuple[Ref, Port]:
    """Two blocks; in those named the port trains no weight."""
    code, inner = (lambda m, x: m.o(m.two(m.one(m.a(x))))), (lambda m, x: m.act(m.fc(x)))
    ref, port = layers()
    for name in ("one", "two"):
        ref[name] = Ref(inner, fc=T.Linear(6, 6), act=T.Tanh())
        port[name] = Port(inner, fc=P.Linear(6, 6), act=P.Tanh())
        port[name].fc.weight.stop_gradient = name in frozen
    return Ref(code, **ref), Port(code, **port)


def test_modules_that_are_left_out():
    x = [normal(4, 5)]
    assert align(*blocks("two"), x).location.name == "two.fc"
    for name, count in (("two", "2 tensors, 3 outputs"), ("two.fc", "2 tensors, 1 outputs")):
        verdict = align(*blocks("two"), x, leave_out=[name])
        assert verdict.status == PASS and verdict.location is None, str(verdict)
        assert verdict.notes[1] == f"left out, not compared: {name} ({count})"
        assert not any(row.item.module.startswith(name) for row in verdict.rows)
        assert any(row.item.module == "one.fc" for row in verdict.rows)
        assert "two.fc.weight" in verdict.names.tensors
    assert align(*blocks("one", "two"), x, leave_out=["two"]).location.name == "one.fc"
    for name in ("three", ""):
        with pytest.raises(UserError, match=f"leave_out names '{name}', but the reference has no module"):
            align(*blocks(), x, leave_out=[name])


def test_tensors_that_are_left_out():
    """A statistic that the port updates otherwise on purpose: all else of its layer is still compared."""
    ref = Ref(lambda m, x: m.bn(m.fc(x)), fc=T.Linear(5, 4), bn=T.BatchNorm1d(4))
    port = Port(lambda m, x: m.bn(m.fc(x)), fc=P.Linear(5, 4), bn=P.BatchNorm1D(4))  # its variance is biased
    x = [normal(6, 5)]
    assert {row.item.leaf for row in align(ref, port, x).bad} == {"running_var"}
    verdict = align(ref, port, x, leave_out=["bn.running_var"])
    assert verdict.status == PASS, str(verdict)
    assert "left out, not compared: bn.running_var (1 tensors, 0 outputs)" in verdict.notes
    assert {"running_mean", "weight"} <= {row.item.leaf for row in verdict.rows if row.item.module == "bn"}
    port.bn._momentum = 0.5
    assert align(ref, port, x, leave_out=["bn.running_var"]).status == FAIL


def test_the_references_weights_in_the_port():
    code = lambda m, x: m.o(m.a(x).tanh())  # noqa: E731
    ref, (first, last) = Ref(code, **layers()[0]), layers()[1].values()
    port = Port(lambda m, x: m.second(m.first(x).tanh()), first=first, second=last)
    x = normal(4, 5)
    assert align(ref, port, [x], weights="own", modes=("eval",)).status == FAIL
    keys = load_reference_weights(ref, port, [x])
    assert keys["a.weight"] == "first.weight" and len(keys) == 4
    assert np.array_equal(first.weight.numpy(), ref.a.weight.detach().numpy().T)
    assert_aligned(ref, port, x, weights="own")
    other = Port(code, **layers()[1] | {"o": P.Linear(6, 4)})
    before = other.a.weight.numpy()
    with pytest.raises(UserError, match="o"):
        load_reference_weights(ref, other, [x])
    assert np.array_equal(before, other.a.weight.numpy())


def test_what_is_no_model():
    ref, port = both(lambda m, x: m.o(m.a(x)))
    with pytest.raises(UserError, match="the reference is a Port, no torch.nn.Module"):
        align(port, port, [normal(4, 5)])
    with pytest.raises(UserError, match="the port is a Ref, no paddle.nn.Layer"):
        align(ref, ref, [normal(4, 5)])


def test_neither_model_is_changed():
    ref, port = both(lambda m, x: m.o(m.a(x)))
    before = [tensor.clone() for tensor in ref.parameters()], [tensor.clone() for tensor in port.parameters()]
    assert_aligned(ref, port, normal(4, 5))
    assert all(torch.equal(one, other) for one, other in zip_strict(before[0], ref.parameters()))
    assert all(bool((one == other).all()) for one, other in zip_strict(before[1], port.parameters()))
    assert ref.training and port.training and all(p.grad is None for p in [*ref.parameters(), *port.parameters()])


def test_gradients_that_were_there_are_there_afterwards():
    ref, port = both(lambda m, x: m.o(m.a(x)))
    x = normal(4, 5)
    ref(torch.from_numpy(x)).sum().backward()
    port(paddle.to_tensor(x)).sum().backward()
    before = [[p.grad.numpy().copy() for p in model.parameters()] for model in (ref, port)]
    assert_aligned(ref, port, x)
    for model, gradients in zip_strict((ref, port), before):
        assert all(np.array_equal(p.grad.numpy(), kept) for p, kept in zip_strict(model.parameters(), gradients))


def test_probe_weights_of_an_embedding_come_from_the_seed_alone():
    first, again = (probe_weights(TorchSeq(T.Embedding(10, 4, 3), T.Linear(4, 2)), 0, [IDS]) for _ in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not first["0.weight"][3].any()  # the row that pads


def test_what_goes_on_unchanged_is_kept_once():
    """One array of what a layer returns, and what comes into the next; another where that was changed in between."""
    first, relu = T.Linear(3, 4), T.ReLU(inplace=True)
    model = backend("torch").wrap(T.Sequential(first, relu, T.Linear(4, 2)), "reference", "cpu")
    calls = model.run([normal(5, 3)], "float64", train=False, calls=True).trace.calls
    assert calls["1"].args[0] is calls["0"].outputs[0]
    assert calls["2"].args[0] is calls["1"].outputs[0] and calls["output"].outputs[0] is calls["2"].outputs[0]
    assert calls["1"].outputs[0].min() == 0 > calls["0"].outputs[0].min()
