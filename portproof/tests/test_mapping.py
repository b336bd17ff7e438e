"""The map between two models nobody here wrote: proposed by name or by order, settled by values, or refused."""

from functools import partial

import numpy as np
import paddle
import pytest
import torch
import yaml
from toy_pairs import Port, Ref, assert_aligned, assert_located, assert_refused, normal

from portproof import align, judge, record
from portproof.compare import FAIL, PASS, REFUSED
from portproof.mapping.map_search import _beside_their_siblings
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

TL, PL = torch.nn.Linear, paddle.nn.Linear
TorchSeq, PaddleSeq = torch.nn.Sequential, paddle.nn.Sequential
TReLU, PReLU = torch.nn.ReLU, paddle.nn.ReLU


def chain(model, x):
    return model.c(model.relu(model.b(model.a(x))))


def renamed_chain(model, x):
    return model.w(model.act(model.v(model.u(x))))


def ref_chain(width: int = 6) -> Ref:
    return Ref(chain, a=TL(5, 6), b=TL(6, width), relu=TReLU(), c=TL(width, 3))


ORDERS = {
    "the same": lambda: Port(chain, a=PL(5, 6), b=PL(6, 6), relu=PReLU(), c=PL(6, 3)),
    "different everywhere": lambda: Port(renamed_chain, u=PL(5, 6), v=PL(6, 6), act=PReLU(), w=PL(6, 3)),
    "different in part": lambda: Port(
        lambda m, x: m.c(m.relu(m.other(m.a(x)))), a=PL(5, 6), other=PL(6, 6), relu=PReLU(), c=PL(6, 3)
    ),
    "in another order of registration": lambda: Port(chain, c=PL(6, 3), relu=PReLU(), b=PL(6, 6), a=PL(5, 6)),
    "different and in another order": lambda: Port(renamed_chain, w=PL(6, 3), act=PReLU(), v=PL(6, 6), u=PL(5, 6)),
    "with a function for the activation": lambda: Port(
        lambda m, x: m.c(paddle.nn.functional.relu(m.b(m.a(x)))), a=PL(5, 6), b=PL(6, 6), c=PL(6, 3)
    ),
    "in a Sequential": lambda: PaddleSeq(PL(5, 6), PL(6, 6), PReLU(), PL(6, 3)),
    "in nested ones": lambda: PaddleSeq(PaddleSeq(PL(5, 6), PaddleSeq(PL(6, 6), PReLU())), PL(6, 3)),
}


@pytest.mark.parametrize("port", ORDERS.values(), ids=ORDERS)
def test_names_may_be(port):
    assert_aligned(ref_chain(), port(), normal(4, 5))


def test_equal_layers_registered_in_another_order_are_told_apart():
    ref = Ref(chain, a=TL(6, 6), b=TL(6, 6), relu=TReLU(), c=TL(6, 6))
    assert_aligned(ref, Port(renamed_chain, w=PL(6, 6), v=PL(6, 6), act=PReLU(), u=PL(6, 6)), normal(4, 6))


def test_a_function_on_the_reference_side():
    ref = Ref(lambda m, x: m.c(torch.relu(m.b(m.a(x)))), a=TL(5, 6), b=TL(6, 6), c=TL(6, 3))
    assert_aligned(ref, ORDERS["the same"](), normal(4, 5))


def test_an_activation_is_not_compared_with_a_pool():
    """Each side has one of the two as a module and the other as a function."""
    conv, port_conv = torch.nn.Conv2d, paddle.nn.Conv2D
    ref = Ref(
        lambda m, x: m.o(torch.nn.functional.max_pool2d(m.relu(m.c(x)), 2)),
        c=conv(3, 4, 3), relu=TReLU(), o=conv(4, 2, 1),
    )  # fmt: skip
    port = Port(
        lambda m, x: m.p(m.pool(paddle.nn.functional.relu(m.d(x)))),
        d=port_conv(3, 4, 3), pool=paddle.nn.MaxPool2D(2), p=port_conv(4, 2, 1),
    )  # fmt: skip
    assert_aligned(ref, port, normal(2, 3, 8, 8))


def test_blocks_that_end_elsewhere_are_not_compared():
    """The reference's block holds the activation, the port's does not: the models are the same."""
    block = lambda a, b: Ref(lambda m, x: torch.relu(m.fc(x)), fc=TL(a, b))  # noqa: E731
    port_block = lambda a, b: Port(lambda m, x: m.fc(x), fc=PL(a, b))  # noqa: E731
    ref = Ref(lambda m, x: m.two(m.one(x)), one=block(5, 6), two=block(6, 3))
    relu = paddle.nn.functional.relu
    for names in (("one", "two"), ("head", "tail")):
        children = dict(zip_strict(names, (port_block(5, 6), port_block(6, 3))))
        port = Port(lambda m, x, n=names: relu(getattr(m, n[1])(relu(getattr(m, n[0])(x)))), **children)
        assert_aligned(ref, port, normal(4, 5))


def test_one_module_that_is_called_twice():
    ref = Ref(lambda m, x: m.c(m.relu(m.b(m.relu(m.b(m.a(x)))))), a=TL(5, 6), b=TL(6, 6), relu=TReLU(), c=TL(6, 3))
    port = Port(lambda m, x: m.w(m.r(m.v(m.r(m.v(m.u(x)))))), u=PL(5, 6), v=PL(6, 6), r=PReLU(), w=PL(6, 3))
    verdict = assert_aligned(ref, port, normal(4, 5))
    assert "eval mode, float64/b#2" in {row.name for row in verdict.rows}


def test_one_activation_here_and_two_there():
    ref = Ref(lambda m, x: m.c(m.relu(m.b(m.relu(m.a(x))))), a=TL(5, 6), b=TL(6, 6), relu=TReLU(), c=TL(6, 3))
    port = PaddleSeq(PL(5, 6), PReLU(), PL(6, 6), PReLU(), PL(6, 3))
    verdict = assert_aligned(ref, port, normal(4, 5))
    assert {"eval mode, float64/relu", "eval mode, float64/relu#2"} <= {r.name for r in verdict.rows}


def test_tied_weights_are_one():
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(10, 6), TL(6, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    port = Port(lambda m, ids: paddle.matmul(m.e(ids), m.e.weight, transpose_y=True), e=paddle.nn.Embedding(10, 6))
    assert_aligned(Tied(), port, np.arange(10).reshape(2, 5))


class Tokens(torch.nn.Module):
    """Parameters of its own, two of them of one shape."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"cls": (1, 1, 6), "pos": (1, 5, 6), "gain": (6,), "shift": (6,)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))
        self.fc = TL(6, 6)

    def forward(self, x):
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.fc(x) * self.gain + self.shift


class PortTokens(paddle.nn.Layer):
    """Registered in another order, and named otherwise."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"pos_embed": (1, 5, 6), "token": (1, 1, 6), "offset": (6,), "factor": (6,)}
        for name, shape in shapes.items():
            setattr(self, name, self.create_parameter(shape))
        self.linear = PL(6, 6)

    def forward(self, x):
        x = paddle.concat([self.token.expand([len(x), -1, -1]), x], 1) + self.pos_embed
        return self.linear(x) * self.factor + self.offset


def test_parameters_of_ones_own_under_other_names():
    assert_aligned(Tokens(), PortTokens(), normal(2, 4, 6))


# Branches: layers of one type and shape, fed the same, that the port calls in another order.


def difference(model, x):
    return model.o(model.a(x) - model.b(x))


def difference_turned(model, x):
    later = model.v(x)
    return model.out(model.u(x) - later)


def test_branches_in_another_order():
    ref = Ref(difference, a=TL(5, 6), b=TL(5, 6), o=TL(6, 3))
    assert_aligned(ref, Port(difference_turned, v=PL(5, 6), u=PL(5, 6), out=PL(6, 3)), normal(4, 5))


def test_deep_branches_in_another_order():
    def two_branches(m, x):
        return m.o(m.a3(m.a2(m.a1(x)).tanh()).tanh() - m.b3(m.b2(m.b1(x)).tanh()).tanh())

    def turned(m, x):
        later = m.q3(m.q2(m.q1(x)).tanh()).tanh()
        return m.out(m.p3(m.p2(m.p1(x)).tanh()).tanh() - later)

    layers = {"1": (5, 6), "2": (6, 6), "3": (6, 6)}
    ref = Ref(two_branches, **{f"{k}{n}": TL(*size) for k in "ab" for n, size in layers.items()}, o=TL(6, 2))
    port = Port(turned, **{f"{k}{n}": PL(*size) for k in "pq" for n, size in layers.items()}, out=PL(6, 2))
    assert_aligned(ref, port, normal(4, 5))


def test_three_branches_of_blocks_in_another_order():
    def block():
        return TorchSeq(torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4), TReLU())

    def port_block():
        return PaddleSeq(paddle.nn.Conv2D(3, 4, 3, bias_attr=False), paddle.nn.BatchNorm2D(4), PReLU())

    def turned(m, x):
        third, second, first = m.w(x), m.v(x), m.u(x)
        return m.out(paddle.concat([first, second, third], 1))

    ref = Ref(
        lambda m, x: m.o(torch.cat([m.a(x), m.b(x), m.c(x)], 1)),
        a=block(), b=block(), c=block(), o=torch.nn.Conv2d(12, 2, 1),
    )  # fmt: skip
    port = Port(turned, u=port_block(), v=port_block(), w=port_block(), out=paddle.nn.Conv2D(12, 2, 1))
    assert_aligned(ref, port, normal(2, 3, 6, 6), modes=("eval",))


def attention(model, x):
    weights = torch.softmax(model.q(x) @ model.k(x).transpose(1, 2) / 8**0.5, -1)
    return model.o(weights @ model.v(x))


def test_query_key_and_value_in_another_order():
    def port_attention(m, x):
        value, key, query = m.to_v(x), m.to_k(x), m.to_q(x)
        return m.out(paddle.nn.functional.softmax(query @ key.transpose([0, 2, 1]) / 8**0.5, -1) @ value)

    ref = Ref(attention, q=TL(8, 8), k=TL(8, 8), v=TL(8, 8), o=TL(8, 8))
    port = Port(port_attention, out=PL(8, 8), to_v=PL(8, 8), to_k=PL(8, 8), to_q=PL(8, 8))
    assert_aligned(ref, port, normal(2, 5, 8))


# Symmetric branches: no value tells them apart.


def total(model, x):
    return model.o(model.a(x) + model.b(x))


def renamed_total(model, x):
    return model.out(model.u(x) + model.v(x))


def symmetric() -> tuple[Ref, Port]:
    ref = Ref(total, a=TL(5, 6), b=TL(5, 6), o=TL(6, 3))
    return ref, Port(renamed_total, u=PL(5, 6), v=PL(5, 6), out=PL(6, 3))


def test_symmetric_branches_are_refused():
    text = "a and b may be the port's u and v, or the other way round: values are the same; say which in a map"
    assert_refused(*symmetric(), normal(4, 5), text=text)


def test_symmetric_branches_of_several_layers_are_refused():
    ref = Ref(
        lambda m, x: m.o(m.a2(m.a1(x)) + m.b2(m.b1(x))),
        a1=TL(5, 6), a2=TL(6, 6), b1=TL(5, 6), b2=TL(6, 6), o=TL(6, 2),
    )  # fmt: skip
    port = Port(
        lambda m, x: m.out(m.p2(m.p1(x)) + m.q2(m.q1(x))),
        p1=PL(5, 6), p2=PL(6, 6), q1=PL(5, 6), q2=PL(6, 6), out=PL(6, 2),
    )  # fmt: skip
    assert_refused(ref, port, normal(4, 5), text="a1 and b1 may be the port's p1 and q1")


@pytest.mark.parametrize("names", [{"a": "u", "b": "v"}, {"a": "v"}], ids=["both", "one"])
def test_a_map_settles_symmetric_branches(names):
    assert_aligned(*symmetric(), normal(4, 5), names=names)


def test_equal_names_settle_symmetric_branches():
    ref, _ = symmetric()
    assert_aligned(ref, Port(total, b=PL(5, 6), a=PL(5, 6), o=PL(6, 3)), normal(4, 5))


def test_a_layer_of_which_the_weights_alone_are_used_is_not_exchanged_for_one_that_is_called():
    """Both get the same, and the port never calls the first."""
    one = Ref(lambda m, x: m.fc2(torch.relu(m.fc1(x))), fc1=TL(4, 4), fc2=TL(4, 4))
    two = Ref(lambda m, x: torch.relu(m.fc1(x)) @ m.fc2.weight.T + m.fc2.bias, fc1=TL(4, 4), fc2=TL(4, 4))

    def gated(m, x):
        x = x @ m.w.T
        return m.end(torch.cat([x, x * torch.sigmoid(m.one(x)), x * torch.sigmoid(m.two(x))], 1))

    def port_gated(m, x):
        x = x @ m.matrix
        two = relu(m.first(x)) @ m.second.weight + m.second.bias
        return m.last(paddle.concat([x, x * sigmoid(m.squeeze(x)), x * sigmoid(two)], 1))

    ref = Ref(gated, one=one, two=two, end=TL(12, 4))
    relu, sigmoid = paddle.nn.functional.relu, paddle.nn.functional.sigmoid
    by_hand = lambda m, x: m.second(relu(x @ m.first.weight + m.first.bias))  # noqa: E731
    inner = Port(by_hand, first=PL(4, 4), second=PL(4, 4))
    port = Port(port_gated, squeeze=inner, first=PL(4, 4), second=PL(4, 4), last=PL(12, 4))
    ref.w, port.matrix = torch.nn.Parameter(torch.randn(4, 4)), port.create_parameter([4, 4])
    names = {"w": "matrix (transposed)"}
    assert_aligned(ref, port, normal(5, 4), names=names)


@pytest.mark.parametrize("names", ["uv", "vu"])
def test_train_mode_settles_branches_that_are_symmetric_in_eval_mode(names):
    """A second head, for distillation, whose mean with the first is the output in eval mode."""

    def two_heads(first, second, m, x):
        one, other = getattr(m, first)(x), getattr(m, second)(x)
        return (one, other) if m.training else (one + other) / 2

    ref = Ref(partial(two_heads, "a", "b"), a=TL(5, 6), b=TL(5, 6))
    port = Port(partial(two_heads, *names), u=PL(5, 6), v=PL(5, 6))
    verdict = assert_aligned(ref, port, normal(4, 5))
    assert verdict.names.modules == dict(zip("ab", names))
    recorded = record(ref, [normal(4, 5)], modes=["eval"])
    assert judge(port, recorded).status == REFUSED


# Structure.


def port_of(*sizes: tuple[int, int], **options) -> PaddleSeq:
    layers = [layer for size in sizes for layer in (PL(*size, **options), PReLU())]
    return PaddleSeq(*layers[:-1])


def ref_of(*sizes: tuple[int, int], **options) -> TorchSeq:
    layers = [layer for size in sizes for layer in (TL(*size, **options), TReLU())]
    return TorchSeq(*layers[:-1])


STRUCTURES = {
    "a layer missing": (ref_of((5, 6), (6, 6), (6, 3)), port_of((5, 6), (6, 3)), "2", "the port has no Linear for it"),
    "a layer too many": (
        ref_of((5, 6), (6, 3)), port_of((5, 6), (6, 6), (6, 3)), "", "port's 2: the reference has no Linear for it"
    ),
    "a layer of another size": (
        ref_of((5, 6), (6, 3)), port_of((5, 7), (7, 3)), "0", "0.weight: shape: reference (6, 5), port (7, 5)"
    ),
    "of another size, under other names": (
        ref_chain(8),
        Port(renamed_chain, u=PL(5, 6), v=PL(6, 7), act=PReLU(), w=PL(7, 3)),
        "b",
        "b.weight: shape: reference (8, 6), port (7, 6)",
    ),
    "no bias": (ref_of((5, 6)), port_of((5, 6), bias_attr=False), "0", "0.bias: the port's 0 does not have it"),
    "a bias": (
        ref_of((5, 6), bias=False), port_of((5, 6)), "0", "port's 0.bias: the reference's 0 does not have it"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ref", "port", "at", "proof"), STRUCTURES.values(), ids=STRUCTURES)
def test_what_does_not_fit_is_named(ref, port, at, proof):
    verdict = assert_located(ref, port, normal(4, 5), at=at, phase="structure")
    assert proof in verdict.location.proof[0]


def test_layers_that_have_each_others_names_have_two_readings():
    """Loaded by name, as anyone would, this port computes something else; by values it is right."""
    ref = Ref(lambda m, x: m.b(m.a(x).tanh()), a=TL(6, 6), b=TL(6, 6))
    port = Port(lambda m, x: m.a(m.b(x).tanh()), a=PL(6, 6), b=PL(6, 6))
    verdict = align(ref, port, [normal(4, 6)])
    assert verdict.status == REFUSED and "with the lines a: a; b: b or a: b; b: a" in verdict.refusal
    assert align(ref, port, [normal(4, 6)], names={"a": "a", "b": "b"}).status == FAIL
    assert align(ref, port, [normal(4, 6)], names={"a": "b", "b": "a"}).status == PASS


# Maps that cannot be.


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"nothing": "u"}, "the map names 'nothing', but the reference has no module with weights of that name"),
        ({"a": "nothing"}, "the map names 'nothing', but the port has no module with weights of that name"),
        ({"a": "u", "b": "u"}, "the map names the port's 'u' twice"),
    ],
)
def test_a_map_that_names_what_is_not_there(names, message):
    with pytest.raises(UserError) as error:
        align(*symmetric(), [normal(4, 5)], names=names)
    assert message in str(error.value)


def test_a_map_is_read_from_yaml(tmp_path):
    from portproof.commands.arguments import read_map

    path = tmp_path / "map.yaml"
    path.write_text(yaml.safe_dump({"a": "u", 0: 1}), encoding="utf-8")
    assert read_map(str(path)) == {"a": "u", "0": "1"}
    assert read_map(None) == {}


BEFORE = {f"{block}.{leaf}": f"{port_block}.{leaf}" for block, port_block in ("ax", "by") for leaf in ("norm", "fc")}


@pytest.mark.parametrize(
    ("exchanged", "is_undone"),
    [
        (("norm",), True),
        (("norm", "fc"), False),  # whole blocks, such as branches
        ((), False),
    ],
)
def test_an_exchange_that_parts_a_layer_from_its_siblings_is_undone(exchanged, is_undone):
    """On both sides; values of a faulty port may speak for it."""
    modules = (
        BEFORE | {f"a.{leaf}": f"y.{leaf}" for leaf in exchanged} | {f"b.{leaf}": f"x.{leaf}" for leaf in exchanged}
    )
    assert _beside_their_siblings(modules, BEFORE) == (BEFORE if is_undone else modules)


def test_an_exchange_within_a_list_is_kept():
    before = {"layers.0": "blocks.0", "layers.1": "blocks.1", "head": "fc"}
    modules = before | {"layers.0": "blocks.1", "layers.1": "blocks.0"}
    assert _beside_their_siblings(modules, before) == modules
