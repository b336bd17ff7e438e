"""Maps in which names decide before shapes and order do; and constants that only one side holds."""

import numpy as np
import paddle
import pytest
import torch
from toy_pairs import Port, Ref, assert_aligned, normal

from portproof import align
from portproof.compare import FAIL

T, P = torch.nn, paddle.nn
F, PF = T.functional, P.functional
D = 6


def raw(*shape: int) -> T.Parameter:
    return T.Parameter(torch.randn(shape))


def port_raw(*shape: int) -> paddle.Tensor:
    return P.Layer().create_parameter(list(shape), default_initializer=P.initializer.Normal())


def heads_behind_each_block():
    def code(m, x):
        found = []
        for block in (m.a, m.b):
            x = torch.tanh(block(x))
            found.append(m.cls(x))
        return tuple(found)

    def port_code(m, x):
        every = []
        for block in (m.first, m.second):
            x = paddle.tanh(block(x))
            every.append(x)
        return tuple(map(m.head, every))

    ref = Ref(code, a=T.Linear(D, D), b=T.Linear(D, D), cls=T.Linear(D, 3))
    return ref, Port(port_code, head=P.Linear(D, 3), first=P.Linear(D, D), second=P.Linear(D, D)), normal(4, D)


def factors_of_low_rank():
    """Each factor has the shape of the other transposed."""
    ref = Ref(lambda m, x: m.o(x @ m.lora_A.T @ m.lora_B.T), lora_A=raw(2, D), lora_B=raw(D, 2), o=T.Linear(D, 3))
    port = Port(lambda m, x: m.o(x @ m.A @ m.B), A=port_raw(D, 2), B=port_raw(2, D), o=P.Linear(D, 3))
    return ref, port, normal(4, D)


def three_joined_and_one_that_is_left():
    """Of q, k, v and o, which are alike, o has a counterpart of its name."""

    def code(m, x):
        q, k = m.q(x), m.k(x)
        return m.o(torch.softmax(q @ k.transpose(1, 2), -1) @ m.v(x))

    def port_code(m, x):
        q, k, v = m.qkv(x).chunk(3, axis=-1)
        return m.o(PF.softmax(q @ k.transpose([0, 2, 1]), -1) @ v)

    ref = Ref(code, **{name: T.Linear(D, D, bias=False) for name in "qkvo"})
    port = Port(port_code, qkv=P.Linear(D, 3 * D, bias_attr=False), o=P.Linear(D, D, bias_attr=False))
    return ref, port, normal(2, 3, D)


def joined_without_their_biases():
    def code(m, x):
        bias = torch.cat([m.q_bias, torch.zeros_like(m.v_bias), m.v_bias])
        q, k, v = F.linear(x, m.qkv.weight, bias).chunk(3, -1)
        return m.proj(torch.softmax(q @ k.transpose(1, 2), -1) @ v)

    def port_code(m, x):
        return m.proj(PF.softmax(m.q(x) @ m.k(x).transpose([0, 2, 1]), -1) @ m.v(x))

    ref = Ref(code, qkv=T.Linear(D, 3 * D, bias=False), q_bias=raw(D), v_bias=raw(D), proj=T.Linear(D, D))
    layers = {"q": P.Linear(D, D), "k": P.Linear(D, D, bias_attr=False), "v": P.Linear(D, D), "proj": P.Linear(D, D)}
    return ref, Port(port_code, **layers), normal(2, 3, D)


class OwnNorm(P.Layer):
    """A batch norm whose buffers have the library's names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", paddle.zeros([D]))
        self.register_buffer("running_var", paddle.ones([D]))

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var, n = x.mean([0]), x.var([0], unbiased=False), x.shape[0]
            with paddle.no_grad():
                self.running_mean.set_value(0.9 * self.running_mean + 0.1 * mean)
                self.running_var.set_value(0.9 * self.running_var + 0.1 * var * n / (n - 1))
        return (x - mean) / paddle.sqrt(var + 2.0**-10)


def an_own_batch_norm():
    norm = T.BatchNorm1d(D, affine=False, eps=2.0**-10)
    ref = Ref(lambda m, x: m.o(m.norm(m.a(x))), a=T.Linear(D, D), norm=norm, o=T.Linear(D, 3))
    port = Port(lambda m, x: m.out(m.bn(m.first(x))), first=P.Linear(D, D), bn=OwnNorm(), out=P.Linear(D, 3))
    return ref, port, normal(8, D)


def a_norm_as_raw_parameters():
    """Another norm of the same shapes stands before it."""
    norm = T.BatchNorm1d(D, track_running_stats=False, eps=2.0**-10)
    ref = Ref(lambda m, x: m.o(m.bn(m.ln(x))), ln=T.LayerNorm(D), bn=norm, o=T.Linear(D, 3))

    def port_code(m, x):
        x = m.norm(x)
        x = (x - x.mean([0])) / paddle.sqrt(x.var([0], unbiased=False) + 2.0**-10)
        return m.out(x * m.w + m.b)

    port = Port(port_code, w=port_raw(D), b=port_raw(D), norm=P.LayerNorm(D), out=P.Linear(D, 3))
    return ref, port, normal(8, D)


def vectors_that_are_numbered_otherwise():
    """A layer's input is a parameter without a batch; z.0 is z1 there."""
    codes = T.ParameterList([raw(4), raw(4)])
    ref = Ref(lambda m, x: torch.tanh(x * m.a(m.z[0])) * m.b(m.z[1]), z=codes, a=T.Linear(4, D), b=T.Linear(4, D))
    port = Port(
        lambda m, x: paddle.tanh(x * m.c(m.z1)) * m.d(m.z2),
        **{"z1": port_raw(4), "z2": port_raw(4), "c": P.Linear(4, D), "d": P.Linear(4, D)},
    )
    return ref, port, normal(5, D)


def an_embedding_that_is_normed():
    ref = Ref(lambda m, x: m.emb(x), emb=T.utils.spectral_norm(T.Embedding(7, D)))
    port = Port(lambda m, x: m.emb(x), emb=P.utils.spectral_norm(P.Embedding(7, D)))
    return ref, port, np.arange(6).reshape(2, 3) % 4


PAIRS = (
    heads_behind_each_block,
    factors_of_low_rank,
    three_joined_and_one_that_is_left,
    joined_without_their_biases,
    an_own_batch_norm,
    a_norm_as_raw_parameters,
    vectors_that_are_numbered_otherwise,
    an_embedding_that_is_normed,
)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_map_without_a_line_by_hand(pair):
    assert_aligned(*pair())


def angles() -> np.ndarray:
    return np.outer(np.arange(5, dtype=np.float32), np.float32(10000) ** (-np.arange(D, dtype=np.float32) / D))


def with_table(held: bool = True, factor: float = 1.0) -> tuple[Ref, Port]:
    """The reference holds a table in float32; the port, if it does not hold one, computes it as it runs."""
    ref = Ref(lambda m, x: m.o(x * m.table), o=T.Linear(D, 3))
    ref.table = torch.polar(torch.ones(5, D), torch.from_numpy(angles())).real.clone()

    def port_code(m, x):
        rates = 10000 ** (-paddle.arange(D, dtype=x.dtype) / D)
        places = paddle.arange(5, dtype=x.dtype)
        table = m.table if held else paddle.cos(factor * paddle.outer(places, rates))
        return m.o(x * table)

    port = Port(port_code, o=P.Linear(D, 3))
    if held:
        port.table = paddle.to_tensor(np.cos(angles()))
    return ref, port


@pytest.mark.parametrize("held", [True, False])
def test_a_table_in_float32_on_one_side(held):
    verdict = assert_aligned(*with_table(held), normal(2, 5, D))
    assert any("float32 data come in at table" in note for note in verdict.notes) is not held


def test_another_table_is_found():
    ref, port = with_table(held=False, factor=1 + 1e-5)
    assert align(ref, port, [normal(2, 5, D)]).status == FAIL


class Rounded(torch.nn.Module):
    def forward(self, x):
        return (x.clamp(0, 2).round() - x.clamp(0, 2)).detach() + x.clamp(0, 2)


class PortRounded(paddle.nn.Layer):
    def forward(self, x):
        y = x.clip(0, 2)
        return (y.round() - y).detach() + y


@pytest.mark.parametrize(("scale", "at"), [(1.0, ""), (2.0, "o")])
def test_a_gradient_that_only_a_kink_has_is_no_place_if_another_is_at_fault(scale, at):
    """Values of 0 are at an end of the clip, where one framework sends a gradient and the other none."""
    ref = Ref(lambda m, x: m.o(m.r(torch.relu(m.a(x)))), a=T.Linear(D, D), r=Rounded(), o=T.Linear(D, 3))

    class Scaled(P.Linear):
        def forward(self, x):
            return super().forward(x) * scale

    port = Port(lambda m, x: m.o(m.r(PF.relu(m.a(x)))), a=P.Linear(D, D), r=PortRounded(), o=Scaled(D, 3))
    verdict = align(ref, port, [normal(8, D)])
    assert verdict.status == (FAIL if at else 0), str(verdict)
    assert (verdict.location.name if at else "") == at


def batch_elsewhere(wrong: bool = False):
    """Attention with the sequence first, and with the batch first; a mask and its opposite."""

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = T.Linear(D, D), T.Linear(D, D)

        def forward(self, x, hidden):  # (time, batch, D)
            q = self.q(x)
            scores = torch.einsum("tbd,sbd->bts", q, x).masked_fill(hidden[:, None], -1e9)
            return self.o(torch.einsum("bts,sbd->tbd", torch.softmax(scores, -1), x))

    class PortInner(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.out = P.Linear(D, D), P.Linear(D, D)

        def forward(self, x, seen):  # (batch, time, D)
            scores = self.query(x) @ x.transpose([0, 2, 1]) * (0.5 if wrong else 1.0)
            scores = paddle.where(seen.unsqueeze(1), scores, paddle.full_like(scores, -1e9))
            return self.out(PF.softmax(scores, -1) @ x)

    def code(m, x, hidden):
        return m.last(m.inner(m.first(x).transpose(0, 1), hidden))

    def port_code(m, x, hidden):
        return m.c(m.b(m.a(x), ~hidden)).transpose([1, 0, 2])

    ref = Ref(code, first=T.Linear(D, D), inner=Inner(), last=T.Linear(D, 3))
    port = Port(port_code, a=P.Linear(D, D), b=PortInner(), c=P.Linear(D, 3))
    return ref, port, normal(3, 5, D), np.arange(15).reshape(3, 5) % 4 == 3


def test_a_block_with_the_batch_elsewhere():
    assert_aligned(*batch_elsewhere())
    ref, port, *inputs = batch_elsewhere(wrong=True)
    assert align(ref, port, inputs).location.name == "inner"


def test_a_wrong_buffer_as_built_has_a_place():
    ref, port = (
        kind(lambda m, x: m.o(x * m.table), o=layer) for kind, layer in ((Ref, T.Linear(D, 3)), (Port, P.Linear(D, 3)))
    )
    ref.register_buffer("table", torch.arange(1.0, D + 1))
    port.register_buffer("table", paddle.arange(0.0, D))
    verdict = align(ref, port, [normal(4, D)])
    assert verdict.status == FAIL and verdict.location.phase == "buffers as built"
