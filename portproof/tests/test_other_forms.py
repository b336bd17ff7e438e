"""Ports whose parts have another form than the reference's: a right one passes, a fault has its place all the same."""

import argparse
from functools import partial

import numpy as np
import paddle
import pytest
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF
from toy_pairs import Port, Ref, assert_aligned, assert_located, assert_refused, normal

from portproof import align, judge, record
from portproof.commands.arguments import load_models
from portproof.compare import FAIL, PASS

T, P = torch.nn, paddle.nn
X = normal(5, 6)


# What a block is given: masks with other numbers, an axis that is longer.


def masked(m, x, hidden, places):
    scores = (x @ m.l(x).transpose(1, 2)).masked_fill(hidden[:, None] < 0, -1e9)
    return torch.softmax(scores, -1) @ x + places


def port_masked(fault, m, x, keep, places):
    scores = paddle.matmul(x, m.l(x) * (2 if fault else 1), transpose_y=True)
    return PF.softmax(paddle.where(keep.unsqueeze(1), scores, paddle.full_like(scores, -1e9))) @ x + places


def lent(m, x, keep, places):
    return m.head(m.block(x, (keep - 1.0) * 1e4, places.expand(len(x), -1, -1)))


@pytest.mark.parametrize("fault", [False, True])
def test_a_block_that_is_given_another_mask_and_a_shorter_axis(fault):
    ref = Ref(lent, block=Ref(masked, l=T.Linear(6, 6)), head=T.Linear(6, 3))
    block = Port(partial(port_masked, fault), l=P.Linear(6, 6))
    port = Port(lambda m, x, keep, places: m.head(m.block(x, keep > 0, places)), block=block, head=P.Linear(6, 3))
    inputs = normal(2, 4, 6), np.array([[1, 1, 1, 0], [1, 1, 0, 0]]), normal(1, 4, 6)
    if fault:
        assert_located(ref, port, *inputs, at="block", phase="forward")
    else:
        assert_aligned(ref, port, *inputs)


def test_a_mask_that_differs_is_the_callers_fault():
    ref = Ref(lent, block=Ref(masked, l=T.Linear(6, 6)), head=T.Linear(6, 3))
    block = Port(partial(port_masked, False), l=P.Linear(6, 6))
    code = lambda m, x, keep, places: m.head(m.block(x, keep.roll(1, 1) > 0, places))  # noqa: E731
    port = Port(code, block=block, head=P.Linear(6, 3))
    inputs = normal(2, 4, 6), np.array([[1, 1, 1, 0], [1, 1, 0, 0]]), normal(1, 4, 6)
    assert_located(ref, port, *inputs, at="", phase="forward")


# A batch norm that is written by hand, beside layers that are joined.


class Norm(P.Layer):
    def __init__(self, epsilon: float = 1e-5) -> None:
        super().__init__()
        ones, zeros = P.initializer.Constant(1.0), P.initializer.Constant(0.0)
        self.weight = self.create_parameter([8], default_initializer=ones)
        self.bias = self.create_parameter([8], default_initializer=zeros)
        self.register_buffer("running_mean", paddle.zeros([8]))
        self.register_buffer("running_var", paddle.ones([8]))
        self.epsilon = epsilon

    def forward(self, x):
        mean, variance = self.running_mean, self.running_var
        if self.training:
            mean, variance, n = x.mean(0), x.var(0, unbiased=False), len(x)
            with paddle.no_grad():
                self.running_mean.set_value(0.9 * self.running_mean + 0.1 * mean)
                self.running_var.set_value(0.9 * self.running_var + 0.1 * variance * (n / (n - 1)))
        return (x - mean) / paddle.sqrt(variance + self.epsilon) * self.weight + self.bias


class Block(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = T.Linear(8, 8), T.Linear(8, 8), T.Linear(8, 8)
        self.norm1, self.fc, self.norm2 = T.BatchNorm1d(8), T.Linear(8, 8), T.BatchNorm1d(8)
        self.scale = T.Parameter(torch.tensor(0.375), requires_grad=False)

    def forward(self, x):
        mixed = torch.tanh(self.scale * self.q(x) * self.k(x)) * self.v(x)
        x = self.norm1(x + mixed)
        return self.norm2(x + torch.relu(self.fc(x)))


class PortBlock(P.Layer):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.qkv, self.fc, self.fault = P.Linear(8, 24), P.Linear(8, 8), fault
        self.n1, self.n2 = Norm(), Norm(1e-3 if fault == "epsilon" else 1e-5)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, axis=-1)
        x = self.n1(x + paddle.tanh((0.5 if self.fault == "scale" else 0.375) * q * k) * v)
        return self.n2(x + PF.relu(self.fc(x)))


PLACES = {"": None, "epsilon": "blocks.1.norm2", "scale": "blocks.1", "before": ""}


@pytest.mark.parametrize("fault", PLACES)
def test_a_batch_norm_by_hand_and_a_number_that_one_side_holds(fault):
    """The scale is a frozen parameter of the reference, and a number in the port's code."""

    def code(m, x):
        x = (1.1 if fault == "before" and isinstance(m, Port) else 1) * x * m.gain
        for block in m.blocks:
            x = block(x)
        return m.head(x)

    ref = Ref(code, blocks=T.ModuleList(Block() for _ in range(2)), head=T.Linear(8, 3))
    port = Port(code, blocks=P.LayerList([PortBlock(), PortBlock(fault)]), head=P.Linear(8, 3))
    ref.gain, port.gain = T.Parameter(torch.tensor(1.5)), port.create_parameter([1])
    verdict = align(ref, port, [normal(6, 8)])
    if not fault:
        assert verdict.status == PASS, str(verdict)
        assert any("constants that only one side saves: blocks.0.scale; blocks.1.scale" in n for n in verdict.notes)
    else:
        location = verdict.location
        assert (location.name, location.phase) == (PLACES[fault], "forward"), str(verdict)


# A table under another name, in each of two blocks.


def table_of(factor=1.0):
    return np.sin(np.linspace(-1, 1, 36, dtype=np.float32)).reshape(6, 6) * np.float32(factor)


class Table(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection_matrix", torch.tensor(table_of()))

    def forward(self, x):
        return torch.tanh(x @ self.projection_matrix.t())


class Projected(P.Layer):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.q = P.Linear(6, 6, bias_attr=False)
        self.register_buffer("omega", paddle.to_tensor(table_of(factor)))

    def forward(self, x):
        return paddle.tanh(paddle.matmul(self.q(x), self.omega, transpose_y=True))


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_tables_under_another_name_are_compared_as_built_once_the_whole_proves_the_map(factor):
    def code(m, x):
        for each in m.layers:
            x = x + each["f"](each["q"](each["n"](x)))
        return m.head(x)

    def port_code(m, x):
        for norm, block in zip(m.norms, m.blocks):
            x = x + block(norm(x))
        return m.head(x)

    layers = ({"n": T.LayerNorm(6), "q": T.Linear(6, 6, bias=False), "f": Table()} for _ in range(2))
    ref = Ref(code, layers=T.ModuleList(map(T.ModuleDict, layers)), head=T.Linear(6, 3))
    norms, blocks = P.LayerList([P.LayerNorm(6), P.LayerNorm(6)]), P.LayerList([Projected(factor), Projected(1.0)])
    verdict = align(ref, Port(port_code, norms=norms, blocks=blocks, head=P.Linear(6, 3)), [X])
    assert verdict.status == (PASS if factor == 1 else FAIL), str(verdict)
    if factor != 1:
        assert (verdict.location.name, verdict.location.phase) == ("layers.0.f", "buffers as built")


# Blocks that are faulty, or lie behind a fault: what they give alone tells the partner of each.


class Inner(P.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.norm = P.Linear(6, 6), P.LayerNorm(6)

    def forward(self, x):
        return self.norm(PF.relu(self.l(x)))


class Outer(P.Layer):
    def __init__(self, adds: bool = True) -> None:
        super().__init__()
        self.inner, self.adds = Inner(), adds

    def forward(self, x):
        return self.inner(x) + x if self.adds else self.inner(x)


def residual(m, x):
    return m.norm(torch.relu(m.l(x))) + x


def in_turn(m, x):
    for block in m.blocks:
        x = block(x)
    return m.head(x)


@pytest.mark.parametrize("fault", ["", "in a block", "before the first"])
def test_a_block_with_one_container_more(fault):
    blocks = [Ref(residual, l=T.Linear(6, 6), norm=T.LayerNorm(6)) for _ in range(2)]
    ref = Ref(in_turn, blocks=T.ModuleList(blocks), head=T.Linear(6, 3))
    code = (lambda m, x: in_turn(m, 1.5 * x)) if fault == "before the first" else in_turn
    port = Port(code, blocks=P.LayerList([Outer(fault != "in a block"), Outer()]), head=P.Linear(6, 3))
    if not fault:
        assert_aligned(ref, port, X)
    elif fault == "in a block":
        assert_located(ref, port, X, at="blocks.0", phase="forward", cause="a residual connection is missing")
    else:
        assert_located(ref, port, X, at="", phase="forward")


def test_a_block_around_a_block_of_the_same_tensors():
    """Both might be the partner; the other instance of its class tells that it is the outer one."""

    def stem(pool, m, x):
        return pool(m.c(x))

    def port_stem(pool, m, x):
        return pool(m.inner(x))

    pools = [partial(each, kernel_size=2) for each in (TF.max_pool2d, PF.max_pool2d, PF.avg_pool2d)]
    code = lambda m, x: m.head((m.a(x) + m.b(x)).flatten(1))  # noqa: E731
    ref = Ref(code, **{name: Ref(partial(stem, pools[0]), c=T.Conv2d(3, 4, 1)) for name in "ab"}, head=T.Linear(16, 3))

    def side(pool):
        return Port(partial(port_stem, pool), inner=Port(lambda m, x: m.c(x), c=P.Conv2D(3, 4, 1)))

    port = Port(code, a=side(pools[1]), b=side(pools[2]), head=P.Linear(16, 3))
    assert_located(ref, port, normal(2, 3, 4, 4), at="b", phase="forward")


# Layers that are joined: their order is told by the block alone, and none is missing if the numbers add up.


def heads(m, x, state, cell):
    found, (state, cell) = m.rnn(x, (state, cell))
    scale = TF.softplus(m.scale(found[-1]))
    return m.mean(found[-1]), scale, state, cell


def port_heads(m, x, states):
    found, states = m.rnn(x, states)
    both = m.head(found[-1])
    return both[:, :1], PF.softplus(both[:, 1:]), states


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_order_of_joined_heads_behind_which_is_a_fault(factor):
    def code(m, x):
        zeros = torch.zeros(1, x.shape[1], 4, dtype=x.dtype)
        mean, scale, _, _ = m.net(x, zeros, zeros)
        return mean, scale, (mean / scale).sum()

    def port_code(m, x):
        zeros = paddle.zeros([1, x.shape[1], 4], x.dtype)
        mean, scale, _ = m.net(x, (zeros, zeros))
        return mean, scale, factor * (mean / scale).sum()

    ref = Ref(code, net=Ref(heads, rnn=T.LSTM(6, 4), mean=T.Linear(4, 1), scale=T.Linear(4, 1)))
    port = Port(port_code, net=Port(port_heads, rnn=P.LSTM(6, 4, time_major=True), head=P.Linear(4, 2)))
    if factor == 1:
        assert align(ref, port, [normal(3, 5, 6)]).status == PASS
    else:
        assert_located(ref, port, normal(3, 5, 6), at="", phase="forward")


@pytest.mark.parametrize("activation", [paddle.tanh, PF.relu])
def test_two_layers_for_one_whose_input_is_joined(activation):
    def code(m, a, b):
        a, b = a[:, :, None].repeat(1, 1, b.shape[1], 1), b[:, None].repeat(1, a.shape[1], 1, 1)
        return m.out(torch.tanh(m.both(torch.cat([a, b], -1))))

    def port_code(m, a, b):
        return m.out(activation(m.a(a).unsqueeze(2) + m.b(b).unsqueeze(1)))

    ref = Ref(code, both=T.Linear(12, 8), out=T.Linear(8, 5))
    port = Port(port_code, a=P.Linear(6, 8), b=P.Linear(6, 8, bias_attr=False), out=P.Linear(8, 5))
    inputs = normal(3, 4, 6), normal(3, 5, 6)
    if activation is paddle.tanh:
        assert align(ref, port, inputs).status == PASS
    else:
        assert_located(ref, port, *inputs, at="", phase="forward")


def test_what_is_packed_on_one_side_is_right_if_what_follows_is():
    lengths = np.array([5, 3, 2])

    def encode(m, x, n):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True)
        return m.out(torch.nn.utils.rnn.pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0])

    code = lambda m, x, n: m.head(torch.relu(m.encoder(x, n)))  # noqa: E731
    port_code = lambda m, x, n: m.head(PF.silu(m.out(m.rnn(x, sequence_length=n)[0])))  # noqa: E731
    ref = Ref(code, encoder=Ref(encode, rnn=T.LSTM(6, 4, batch_first=True), out=T.Linear(4, 4)), head=T.Linear(4, 3))
    port = Port(port_code, rnn=P.LSTM(6, 4), out=P.Linear(4, 4), head=P.Linear(4, 3))
    verdict = assert_located(ref, port, normal(3, 5, 6), lengths, at="", phase="forward")
    assert any("its own code feeds head otherwise" in line for line in verdict.location.proof)


def test_what_is_inside_a_layer_that_is_right_is_right():
    """What hides is another number here and there, and what it was added to passes from block to block."""

    def attend(m, x, hidden, bias):
        bias = x @ m.near(x).transpose(1, 2) + hidden if bias is None else bias
        return m.o(torch.softmax(m.q(x) @ x.transpose(1, 2) + bias, -1) @ x), bias

    def port_attend(m, x, hidden, bias):
        bias = paddle.matmul(x, m.near(x), transpose_y=True) + hidden if bias is None else bias
        return m.o(PF.softmax(paddle.matmul(m.q(x), x, transpose_y=True) + bias, -1) @ x), bias

    def block(m, x, hidden, bias):
        y, bias = m.attention(m.norm(x), hidden, bias)
        return x + y, bias

    def model(lowest, last, m, x, keep):
        bias = None
        for each in m.blocks:
            x, bias = each(x, (1.0 - keep.unsqueeze(1)) * lowest, bias)
        return last(m.head(x))

    def blocks(kind, nn, code, linears):
        inner = [kind(code, **{name: nn.Linear(6, 6) for name in names}) for names in linears]
        return [kind(block, attention=each, norm=nn.LayerNorm(6)) for each in inner]

    names = ("near", "q", "o"), ("q", "o")
    code = partial(model, torch.finfo(torch.float32).min, lambda y: y.sum(1))
    ref = Ref(code, blocks=T.ModuleList(blocks(Ref, T, attend, names)), head=T.Linear(6, 3))
    port_code = partial(model, -1e9, lambda y: y.mean(1))
    port = Port(port_code, blocks=P.LayerList(blocks(Port, P, port_attend, names)), head=P.Linear(6, 3))
    keep = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.float32)
    cause = "0.25 times the reference's"
    assert_located(ref, port, normal(2, 4, 6), keep, at="", phase="forward", cause=cause)


@pytest.mark.parametrize("fault", [False, True])
def test_what_a_caller_adds_does_not_hide_the_innermost_block(fault):
    """The port hands a table down that each block of the reference makes for itself."""

    def table(m, x):
        return torch.cos(torch.arange(6, dtype=x.dtype))

    def attend(m, x):
        return m.o(torch.tanh(m.q(x) * m.table(x)))

    def port_attend(m, x, cos):
        return m.o(paddle.tanh((m.q(x) + fault) * cos))

    attention = Ref(attend, table=Ref(table), q=T.Linear(6, 6), o=T.Linear(6, 6))
    block = Ref(lambda m, x: x + m.attention(m.norm(x)), attention=attention, norm=T.LayerNorm(6))
    ref = Ref(lambda m, x: m.head(m.block(x)), block=block, head=T.Linear(6, 3))
    port_attention = Port(port_attend, q=P.Linear(6, 6), o=P.Linear(6, 6))
    port_code = lambda m, x, cos: x + m.attn(m.norm(x), cos)  # noqa: E731
    port_block = Port(port_code, attn=port_attention, norm=P.LayerNorm(6))
    port_model = lambda m, x: m.head(m.block(x, paddle.cos(paddle.arange(6).astype(x.dtype))))  # noqa: E731
    port = Port(port_model, block=port_block, head=P.Linear(6, 3))
    if fault:
        verdict = assert_located(ref, port, X, at="block.attention", phase="forward")
        assert "gets what the reference's gets, and more" in str(verdict)
    else:
        assert_aligned(ref, port, X)


def shown(m, x, cos, hidden):
    scores = m.q(x * cos) @ x.transpose(1, 2) + hidden
    return m.o(torch.softmax(scores, -1) @ x)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_block_that_takes_half_a_table_and_makes_the_mask(fault, beside):
    """The reference's has each angle twice, `beside` each other or all behind all, and gets the mask from outside."""

    def port_shown(m, x, cos):
        n = x.shape[1]
        twice = paddle.stack([cos, cos], -1 if beside else -2).reshape([n, 6])
        scores = paddle.matmul(m.q(x * twice), x, transpose_y=True)
        scores = scores + paddle.triu(paddle.full([n, n], -1e30, x.dtype), 1)
        return m.o(PF.softmax(scores * (2 if fault else 1), -1) @ x)

    def code(m, x):
        angles = torch.arange(4, dtype=x.dtype)[:, None] * torch.arange(1, 4, dtype=x.dtype)
        hidden = torch.full((4, 4), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        return m.head(m.block(x, torch.stack([angles, angles], -1 if beside else -2).reshape(4, 6).cos(), hidden))

    def port_code(m, x):
        angles = paddle.arange(4).astype(x.dtype).unsqueeze(1) * paddle.arange(1, 4).astype(x.dtype)
        return m.head(m.block(x, angles.cos().unsqueeze(1)))

    ref = Ref(code, block=Ref(shown, q=T.Linear(6, 6), o=T.Linear(6, 6)), head=T.Linear(6, 3))
    port = Port(port_code, block=Port(port_shown, q=P.Linear(6, 6), o=P.Linear(6, 6)), head=P.Linear(6, 3))
    if fault:
        assert_located(ref, port, normal(2, 4, 6), at="block", phase="forward")
    else:
        assert_aligned(ref, port, normal(2, 4, 6))


@pytest.mark.parametrize("fault", [False, True])
def test_a_block_that_gets_the_mask_of_the_longest_sequence(fault):
    def port_shown(m, x, cos, hidden):  # its fault is small: below what tells another layer's values
        n = x.shape[1]
        scores = paddle.matmul(m.q(x * cos), x, transpose_y=True) + hidden[:n, :n]
        return m.o((PF.softmax(scores, -1) * (1.00001 if fault else 1)) @ x)

    def code(m, x):
        hidden = torch.full((4, 4), -torch.inf, dtype=x.dtype).triu(1)
        for block in m.blocks:
            x = block(x, torch.ones(6, dtype=x.dtype) / 2, hidden)
        return x

    def port_code(m, x):
        for block in m.blocks:
            x = block(x, paddle.ones([6], x.dtype) / 2, paddle.triu(paddle.full([9, 9], -np.inf, x.dtype), 1))
        return x

    ref = Ref(code, blocks=T.ModuleList([Ref(shown, q=T.Linear(6, 6), o=T.Linear(6, 6)) for _ in range(2)]))
    layers = [Port(port_shown, q=P.Linear(6, 6), o=P.Linear(6, 6)) for _ in range(2)]
    port = Port(port_code, blocks=P.LayerList(layers))
    if fault:
        assert_located(ref, port, normal(2, 4, 6), at="blocks.0", phase="forward")
    else:
        assert_aligned(ref, port, normal(2, 4, 6))


def test_the_same_values_in_another_form_are_not_blamed_for_a_fault_elsewhere():
    """Patches of images, and voxels of the video that they are of."""

    def patches(m, x):
        b, c, t, h, w = x.shape
        return m.c(x.transpose(1, 2).reshape(b * t, c, h, w)).flatten(2).transpose(1, 2)

    code = lambda m, x: m.head(m.norm(m.patches(x))).mean((0, 1))  # noqa: E731
    ref = Ref(code, patches=Ref(patches, c=T.Conv2d(3, 6, 4, 4)), norm=T.LayerNorm(6), head=T.Linear(6, 3))
    port_code = lambda m, x: m.head(m.norm(m.stem(x).transpose([0, 2, 3, 4, 1]))).mean([0, 1, 2, 3])  # noqa: E731
    norm = P.LayerNorm(6, epsilon=1e-3)
    port = Port(port_code, stem=P.Conv3D(3, 6, (1, 4, 4), (1, 4, 4)), norm=norm, head=P.Linear(6, 3))
    assert_located(ref, port, normal(2, 3, 2, 8, 8), at="norm", phase="forward", cause="epsilon is 0.001")


def test_values_of_another_shape_are_compared():
    """A convolution of single pixels stands for a linear layer."""
    code = lambda m, x: x * torch.sigmoid(m.l(x.mean((2, 3), keepdim=True)))  # noqa: E731
    port_code = lambda m, x: x * PF.sigmoid(m.l(x.mean([2, 3]))).unsqueeze([2, 3])  # noqa: E731
    pair = Ref(code, l=T.Conv2d(8, 8, 1)), Port(port_code, l=P.Linear(8, 8))
    verdict = assert_aligned(*pair, normal(4, 8, 5, 5))
    assert "eval mode, float64/l" in {row.name for row in verdict.rows}
    assert "gives other values" not in str(verdict)


def test_complex_numbers_on_one_side_are_refused():
    ref = Ref(lambda m, x: torch.view_as_real(x * m.w))
    ref.w = T.Parameter(torch.randn(6, dtype=torch.cfloat))

    def port_code(m, x):
        return x.unsqueeze(-1) * m.w

    port = Port(port_code)
    port.w = port.create_parameter([6, 2])
    assert_refused(ref, port, X, text="the reference holds complex numbers, such as w, and the port none")


def test_a_complex_table_is_no_sine_of_the_same_name():
    """The port's holds what two tables of the reference hold."""
    angles = np.outer(np.arange(5), 2.0 ** -np.arange(3))

    def code(m, x):
        real, imaginary = x[..., :3], x[..., 3:]
        both = real * m.cosine - imaginary * m.table, real * m.table + imaginary * m.cosine
        return m.head(torch.cat(both, -1))

    def port_code(m, x):
        turned = paddle.complex(x[..., :3], x[..., 3:]) * m.table.astype(
            "complex128" if x.dtype == paddle.float64 else "complex64"
        )
        return m.head(paddle.concat([turned.real(), turned.imag()], -1))

    ref, port = Ref(code, head=T.Linear(6, 3)), Port(port_code, head=P.Linear(6, 3))
    for name, table in (("cosine", np.cos(angles)), ("table", np.sin(angles))):
        ref.register_buffer(name, torch.tensor(table, dtype=torch.float32))
    port.register_buffer("table", paddle.to_tensor(np.exp(1j * angles), dtype="complex64"))
    verdict = align(ref, port, [normal(2, 5, 6)])
    assert verdict.status == PASS, str(verdict)


def test_commands_build_models_seeded():
    """Also weights that no probe draws."""
    flags = {"ref": "torch.nn:LSTM(input_size=4,hidden_size=3)", "port": "paddle.nn:LSTM(input_size=4,hidden_size=3)"}
    args = argparse.Namespace(**flags, input=["2,3,4"], seed=5)
    first, again, other = (load_models(argparse.Namespace(**{**vars(args), "seed": seed})) for seed in (5, 5, 6))
    for i, numpy in enumerate((lambda each: each.detach().numpy(), lambda each: each.numpy())):
        weights, same, others = ([numpy(each) for each in side[i].parameters()] for side in (first, again, other))
        assert all(map(np.array_equal, weights, same))
        assert not any(map(np.array_equal, weights, others))


def test_a_recording_gives_the_same():
    """What a block is given in another form, judged without the reference."""
    ref = Ref(lent, block=Ref(masked, l=T.Linear(6, 6)), head=T.Linear(6, 3))
    code = lambda m, x, keep, places: m.head(m.block(x, keep > 0, places))  # noqa: E731
    inputs = normal(2, 4, 6), np.array([[1, 1, 1, 0], [1, 1, 0, 0]]), normal(1, 4, 6)
    recording = record(ref, inputs)
    for fault in (False, True):
        port = Port(code, block=Port(partial(port_masked, fault), l=P.Linear(6, 6)), head=P.Linear(6, 3))
        verdict = judge(port, recording)
        assert verdict.status == (FAIL if fault else PASS), str(verdict)
        assert not fault or verdict.location.name == "block"


@pytest.mark.parametrize("made", ["outside", "inside"])
def test_a_second_block_gets_what_a_right_first_one_gets(made):
    """Distances in the reference, which the port says per head, or makes in the block."""

    def weighed(m, x, distances):
        return m.o(torch.softmax(m.q(x) @ x.transpose(1, 2) - distances, -1) @ x)

    def port_weighed(m, x, near=None):
        if near is None:
            places = paddle.arange(4).astype(x.dtype)
            near = paddle.exp(-(places.unsqueeze(1) - places).abs())
        scores = paddle.matmul(m.q(x), x, transpose_y=True) + paddle.log(near)
        return m.o(PF.softmax(scores * m.wrong, -1) @ x)

    def code(m, x):
        places = torch.arange(4, dtype=x.dtype)
        distances = (places[:, None] - places).abs()
        for block in m.blocks:
            x = block(x, distances)
        return x

    def port_code(m, x):
        places = paddle.arange(4).astype(x.dtype)
        near = paddle.exp(-(places.unsqueeze(1) - places).abs())
        for block in m.blocks:
            x = block(x, near) if made == "outside" else block(x)
        return x

    def port(*factors):
        layers = [Port(port_weighed, q=P.Linear(6, 6), o=P.Linear(6, 6)) for _ in factors]
        for layer, factor in zip(layers, factors):
            layer.wrong = factor
        return Port(port_code, blocks=P.LayerList(layers))

    ref = Ref(code, blocks=T.ModuleList([Ref(weighed, q=T.Linear(6, 6), o=T.Linear(6, 6)) for _ in range(2)]))
    assert_aligned(ref, port(1.0, 1.0), normal(2, 4, 6))
    assert_located(ref, port(1.0, 2.0), normal(2, 4, 6), at="blocks.1", phase="forward")


def test_rows_that_the_inputs_do_not_have_are_no_fault_beside_another():
    """Paddle's embedding gives zeros for the row of padding_idx, whatever it holds; tied, it holds something."""
    words = np.array([[1, 3, 2], [2, 4, 1]])

    def port(factor):
        def code(m, x):
            return paddle.matmul(m.mix(factor * m.words(x)), m.words.weight, transpose_y=True)

        return Port(code, words=P.Embedding(5, 6, padding_idx=0), mix=P.Linear(6, 6))

    layers = {"words": T.Embedding(5, 6, padding_idx=0), "mix": T.Linear(6, 6), "out": T.Linear(6, 5, bias=False)}
    ref = Ref(lambda m, x: m.out(m.mix(m.words(x))), **layers)
    ref.out.weight = ref.words.weight
    assert_aligned(ref, port(1.0), words)
    verdict = assert_located(ref, port(2.0), words, at="", phase="forward")
    assert not verdict.location.also, str(verdict)


class Scores(P.Layer):
    """Of a pointer: the last step of its scores is made here."""

    def __init__(self, fault):
        super().__init__()
        self.score, self.head, self.fault = Port(lambda m, x: m.line(x), line=P.Linear(6, 6)), P.Linear(6, 3), fault

    def forward(self, x):
        for _ in range(2):
            score = self.score(2 * x if self.fault == "before" else x)
            if self.fault != "left out":
                score = 3 * paddle.tanh(score)
            x = score + PF.sigmoid(x)
        return self.head(x)


@pytest.mark.parametrize("fault", ["", "before", "left out"])
def test_a_module_whose_last_step_is_made_outside(fault):
    """It is no fault beside another; a step that is left out is one."""

    def code(m, x):
        for _ in range(2):
            x = m.score(x) + torch.sigmoid(x)
        return m.head(x)

    score = Ref(lambda m, x: 3 * torch.tanh(m.line(x)), line=T.Linear(6, 6))
    ref = Ref(code, score=score, head=T.Linear(6, 3))
    if fault:
        at = "" if fault == "before" else "score"
        assert align(ref, Scores(fault), [normal(2, 4, 6)]).location.name == at
    else:
        assert_aligned(ref, Scores(fault), normal(2, 4, 6))


def test_a_layer_that_gets_a_table_rounded_to_float32_is_fed_alike():
    """The reference holds it, and the port makes it; the fault is behind."""

    def code(m, x):
        return m.head(torch.tanh(m.q(x) * m.mix(m.table.to(x.dtype))))

    def port(factor):
        def port_code(m, x):
            angles = paddle.arange(4).astype(x.dtype).unsqueeze(1) * paddle.arange(1, 7).astype(x.dtype)
            return m.head(paddle.tanh(factor * m.q(x) * m.mix(paddle.cos(angles))))

        return Port(port_code, q=P.Linear(6, 6), mix=P.Linear(6, 6), head=P.Linear(6, 3))

    ref = Ref(code, q=T.Linear(6, 6), mix=T.Linear(6, 6), head=T.Linear(6, 3))
    ref.register_buffer("table", (torch.arange(4.0)[:, None] * torch.arange(1.0, 7.0)).cos(), persistent=False)
    assert_aligned(ref, port(1.0), normal(2, 4, 6))
    verdict = assert_located(ref, port(1.5), normal(2, 4, 6), at="", phase="forward")
    assert any("its own code feeds head otherwise" in line for line in verdict.location.proof), str(verdict)


@pytest.mark.parametrize("fault", [False, True])
def test_tables_whose_names_are_exchanged(fault):
    """`m1` is the cosines on one side and the sines on the other; their values as built tell them."""

    def code(m, x):
        return m.head(m.q(x) * m.m1 + m.m2 * x)

    def port_code(m, x):
        return m.head(m.q(x) * m.m2 + m.m1 * x)

    angles = np.arange(4, dtype=np.float32)[:, None] * np.arange(1, 7, dtype=np.float32)
    ref, port = Ref(code, q=T.Linear(6, 6), head=T.Linear(6, 3)), Port(port_code, q=P.Linear(6, 6), head=P.Linear(6, 3))
    for name, port_name, table in (("m1", "m2", np.cos(angles)), ("m2", "m1", np.sin(angles))):
        ref.register_buffer(name, torch.from_numpy(table))
        port.register_buffer(port_name, paddle.to_tensor(table * (1.001 if fault and name == "m2" else 1)))
    if fault:
        assert align(ref, port, [normal(2, 4, 6)]).status == FAIL
    else:
        assert_aligned(ref, port, normal(2, 4, 6))


def test_two_frozen_tables_that_are_one_there():
    table = np.cos(np.arange(24, dtype=np.float32)).reshape(4, 6)

    def code(m, x):
        return m.head(m.q(x + m.first) + m.second)

    ref = Ref(code, q=T.Linear(6, 6), head=T.Linear(6, 3))
    ref.first, ref.second = (T.Parameter(torch.from_numpy(table), requires_grad=False) for _ in range(2))
    port = Port(lambda m, x: m.head(m.q(x + m.table) + m.table), q=P.Linear(6, 6), head=P.Linear(6, 3))
    port.register_buffer("table", paddle.to_tensor(table))
    assert_aligned(ref, port, normal(2, 4, 6))
