"""Tensors that are not one to one: joined, split, transposed, reshaped, normed, left out; found, written, converted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import paddle
import pytest
import torch
import yaml
from test_convert import assert_same_bits, bits
from toy_pairs import Port, Ref, assert_aligned, normal

from portproof import align
from portproof.backends import backend
from portproof.backends.model import BackendModel
from portproof.backends.probe import probe_weights
from portproof.commands.arguments import read_map
from portproof.compare import FAIL, PASS
from portproof.mapping.conversion import changes, convert_state_dict, key_map
from portproof.mapping.links import Link, inverse, parse
from portproof.mapping.name_map import NameMap, map_text, propose
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

T, P = torch.nn, paddle.nn
WIDTH, HEADS = 8, 2


def attention(q, k, v):
    b, n, c = q.shape
    q, k, v = (t.reshape(b, n, HEADS, c // HEADS).transpose(1, 2) for t in (q, k, v))
    weights = torch.softmax(q @ k.transpose(2, 3) / (c // HEADS) ** 0.5, -1)
    return (weights @ v).transpose(1, 2).reshape(b, n, c)


def port_attention(q, k, v):
    b, n, c = q.shape
    q, k, v = (t.reshape([b, n, HEADS, c // HEADS]).transpose([0, 2, 1, 3]) for t in (q, k, v))
    weights = P.functional.softmax(q @ k.transpose([0, 1, 3, 2]) / (c // HEADS) ** 0.5)
    return (weights @ v).transpose([0, 2, 1, 3]).reshape([b, n, c])


def parts(y, layout: str, count: int = 3) -> list:
    """The parts of what a joined layer gives: one after another, head by head, or feature by feature."""
    b, n, width = y.shape
    sizes = {
        "one by one": ([b, n, count, -1], 2),
        "head by head": ([b, n, HEADS, count, -1], 3),
        "feature by feature": ([b, n, width // count, count], 3),
    }
    shape, axis = sizes[layout]
    return [part.reshape([b, n, -1]) for part in y.reshape(shape).unbind(axis)]


def fused(order: str = "qkv", layout: str = "one by one", name: str = "qkv") -> Ref:
    def code(m, x):
        found = dict(zip_strict(order, parts(getattr(m, name)(x), layout)))
        return m.proj(attention(*(found[role] for role in "qkv")))

    return Ref(code, **{name: T.Linear(WIDTH, 3 * WIDTH)}, proj=T.Linear(WIDTH, WIDTH))


def port_fused(order: str = "qkv", layout: str = "one by one") -> Port:
    def code(m, x):
        found = dict(zip_strict(order, parts(m.qkv(x), layout)))
        return m.proj(port_attention(*(found[role] for role in "qkv")))

    return Port(code, qkv=P.Linear(WIDTH, 3 * WIDTH), proj=P.Linear(WIDTH, WIDTH))


def separate() -> Ref:
    layers = {name: T.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "proj")}
    return Ref(lambda m, x: m.proj(attention(m.q(x), m.k(x), m.v(x))), **layers)


def port_separate(names: tuple[str, ...] = ("q", "k", "v"), used: tuple[str, ...] = ()) -> Port:
    """`used` are the layers that give query, key and value."""

    def code(m, x):
        return m.proj(port_attention(*(getattr(m, name)(x) for name in used or names)))

    return Port(code, **{name: P.Linear(WIDTH, WIDTH) for name in (*names, "proj")})


class Encoder(T.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = T.TransformerEncoderLayer(WIDTH, HEADS, 12, batch_first=True)
        self.encoder, self.head = T.TransformerEncoder(layer, 2), T.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


class PortEncoder(P.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = P.TransformerEncoder(P.TransformerEncoderLayer(WIDTH, HEADS, 12), 2)
        self.head = P.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


class Scale(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = T.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.gamma * x


class Block(T.Module):
    """Scales that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ls1, self.fc, self.ls2 = fused(), Scale(), T.Linear(WIDTH, WIDTH), Scale()

    def forward(self, x):
        x = x + self.ls1(self.attn(x))
        return x + self.ls2(torch.tanh(self.fc(x)))


class PortBlock(P.Layer):
    """Scales that are the block's, registered in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.fc = port_separate(), P.Linear(WIDTH, WIDTH)
        self.gain_b, self.gain_a = self.create_parameter([WIDTH]), self.create_parameter([WIDTH])

    def forward(self, x):
        x = x + self.gain_a * self.attn(x)
        return x + self.gain_b * paddle.tanh(self.fc(x))


class Own(T.Module):
    """`code(self, x)` over parameters of its own."""

    def __init__(self, code: Callable, children: dict | None = None, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.code = code
        for name, shape in shapes.items():
            setattr(self, name, T.Parameter(torch.randn(shape) / 2))
        for name, child in (children or {}).items():
            setattr(self, name, child)

    def forward(self, x):
        return self.code(self, x)


class PortOwn(P.Layer):
    """`Own` in PaddlePaddle."""

    def __init__(self, code: Callable, children: dict | None = None, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.code = code
        for name, shape in shapes.items():
            setattr(self, name, self.create_parameter(shape))
        for name, child in (children or {}).items():
            setattr(self, name, child)

    def forward(self, x):
        return self.code(self, x)


def normed_attention(m, q, k, v):
    return m.proj(attention(m.q_norm(q), m.k_norm(k), v))


def port_mha() -> Port:
    return Port(lambda m, x: m.attn(x, x, x), attn=P.MultiHeadAttention(WIDTH, HEADS))


def mha() -> Ref:
    return Ref(lambda m, x: m.attn(x, x, x)[0], attn=T.MultiheadAttention(WIDTH, HEADS, batch_first=True))


def three(name: str, leaf: str, names: str = "q k v") -> str:
    return ", ".join(f"{name}{part}.{leaf}" for part in names.split())


PROJ = "q_proj k_proj v_proj"
X, IMAGE = normal(2, 5, WIDTH), normal(2, 3, 6, 6)
RIGHT = {  # reference, port, inputs, one line of the map
    "attention of the library": (mha, port_mha, (X,), ("attn.in_proj_weight", three("attn.", "weight", PROJ))),
    "attention of the library, and one's own": (mha, port_separate, (X,), ("attn.in_proj_bias", three("", "bias"))),
    "attention of the library, and one's own joined": (mha, port_fused, (X,), ("attn.in_proj_weight", "qkv.weight")),
    "attention with other widths": (
        lambda: Ref(
            lambda m, x, k, v: m.a(x, k, v)[0], a=T.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=5, batch_first=True)
        ),
        lambda: Port(lambda m, x, k, v: m.a(x, k, v), a=P.MultiHeadAttention(WIDTH, HEADS, kdim=6, vdim=5)),
        (X, normal(2, 7, 6), normal(2, 7, 5)),
        ("a.k_proj_weight", "a.k_proj.weight"),
    ),
    "encoder": (
        Encoder, PortEncoder, (X,),
        ("encoder.layers.1.self_attn.in_proj_bias", three("encoder.layers.1.self_attn.", "bias", PROJ)),
    ),
    "decoder": (
        lambda: T.TransformerDecoderLayer(WIDTH, HEADS, 12, batch_first=True),
        lambda: P.TransformerDecoderLayer(WIDTH, HEADS, 12),
        (X, normal(2, 7, WIDTH)),
        ("multihead_attn.in_proj_weight", three("cross_attn.", "weight", PROJ)),
    ),
    "joined here": (fused, port_separate, (X,), ("qkv.weight", three("", "weight"))),
    "joined there": (separate, port_fused, (X,), (three("", "bias"), "qkv.bias")),
    "head by head": (
        lambda: fused(layout="head by head"), port_separate, (X,),
        ("qkv.weight", three("", "weight") + f" (heads {HEADS})"),
    ),
    "head by head there": (
        separate, lambda: port_fused(layout="head by head"), (X,), (three("", "bias"), f"qkv.bias (heads {HEADS})")
    ),
    "feature by feature": (
        lambda: fused(layout="feature by feature"), port_separate, (X,),
        ("qkv.bias", three("", "bias") + f" (heads {WIDTH})"),
    ),
    "in an order that no name says": (
        lambda: fused("vkq", name="mixed"), port_separate, (X,), ("mixed.weight", three("", "weight", "v k q"))
    ),
    "in an order, under other names": (
        lambda: fused("kvq", name="mixed"), lambda: port_separate(("a", "b", "c")), (X,),
        ("mixed.weight", three("", "weight", "b c a")),
    ),
    "of two sizes": (
        fused,
        lambda: Port(
            lambda m, x: m.proj(port_attention(m.q(x), *parts(m.kv(x), "one by one", 2))),
            q=P.Linear(WIDTH, WIDTH), kv=P.Linear(WIDTH, 2 * WIDTH), proj=P.Linear(WIDTH, WIDTH),
        ),
        (X,),
        ("qkv.weight", "q.weight, kv.weight"),
    ),
    "called in another order": (
        lambda: Ref(
            lambda m, x: m.proj((lambda k, v: attention(m.q(x), k, v))(*parts(m.kv(x), "one by one", 2))),
            q=T.Linear(WIDTH, WIDTH), kv=T.Linear(WIDTH, 2 * WIDTH), proj=T.Linear(WIDTH, WIDTH),
        ),
        port_separate,
        (X,),
        ("kv.weight", three("", "weight", "k v")),
    ),
    "with norms between": (
        lambda: Ref(
            lambda m, x: normed_attention(m, *parts(m.qkv(x), "one by one")),
            qkv=T.Linear(WIDTH, 3 * WIDTH), proj=T.Linear(WIDTH, WIDTH),
            q_norm=T.LayerNorm(WIDTH), k_norm=T.LayerNorm(WIDTH),
        ),
        lambda: Port(
            lambda m, x: m.proj(port_attention(m.q_norm(m.q(x)), m.k_norm(m.k(x)), m.v(x))),
            q_norm=P.LayerNorm(WIDTH), k_norm=P.LayerNorm(WIDTH),
            **{name: P.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "proj")},
        ),
        (X,),
        ("qkv.weight", three("", "weight")),
    ),
    "blocks with scales": (
        lambda: T.Sequential(Block(), Block(), T.Linear(WIDTH, 3)),
        lambda: P.Sequential(PortBlock(), PortBlock(), P.Linear(WIDTH, 3)),
        (X,),
        ("1.ls1.gamma", "1.gain_a"),
    ),
    "joined 1x1 convolution": (
        lambda: Ref(
            lambda m, x: (lambda q, k, v: m.o(torch.relu(q) * torch.tanh(k) + v))(*m.qkv(x).chunk(3, 1)),
            qkv=T.Conv2d(3, 12, 1), o=T.Conv2d(4, 2, 1),
        ),
        lambda: Port(
            lambda m, x: m.o(P.functional.relu(m.q(x)) * paddle.tanh(m.k(x)) + m.v(x)),
            o=P.Conv2D(4, 2, 1), **{name: P.Conv2D(3, 4, 1) for name in ("q", "k", "v")},
        ),
        (IMAGE,),
        ("qkv.weight", three("", "weight")),
    ),
    "joined linear layers of two sizes": (
        lambda: Ref(
            lambda m, x: m.o(torch.cat([m.a(x), m.b(x)], -1)),
            a=T.Linear(WIDTH, 3), b=T.Linear(WIDTH, 5), o=T.Linear(8, 2),
        ),
        lambda: Port(lambda m, x: m.o(m.ab(x)), ab=P.Linear(WIDTH, 8), o=P.Linear(8, 2)),
        (X,),
        ("a.weight, b.weight", "ab.weight"),
    ),
    "linear layers for 1x1 convolutions": (
        lambda: Ref(
            lambda m, x: x * m.up(torch.relu(m.down(x.mean((2, 3), keepdim=True)))),
            down=T.Conv2d(3, 2, 1), up=T.Conv2d(2, 3, 1),
        ),
        lambda: Port(
            lambda m, x: x * m.fc2(P.functional.relu(m.fc1(x.mean([2, 3])))).unsqueeze([2, 3]),
            fc1=P.Linear(3, 2), fc2=P.Linear(2, 3),
        ),
        (IMAGE,),
        ("down.weight", "fc1.weight"),
    ),
    "linear layer for a convolution of patches": (
        lambda: Ref(lambda m, x: m.o(m.p(x).flatten(2).transpose(1, 2)), p=T.Conv2d(3, 8, 2, 2), o=T.Linear(8, 3)),
        lambda: Port(
            lambda m, x: m.o(m.p(P.functional.unfold(x, 2, 2).transpose([0, 2, 1]))),
            p=P.Linear(12, 8), o=P.Linear(8, 3),
        ),
        (IMAGE,),
        None,
    ),
    "stored transposed": (
        lambda: Own(lambda m, x: m.o(torch.tanh(x @ m.w)), {"o": T.Linear(6, 3)}, w=(WIDTH, 6)),
        lambda: PortOwn(lambda m, x: m.o(paddle.tanh(x @ m.w.t())), {"o": P.Linear(6, 3)}, w=(6, WIDTH)),
        (X,),
        ("w", "w (transposed)"),
    ),
    "square, stored transposed": (
        lambda: Own(lambda m, x: m.o(torch.tanh(x @ m.w)), {"o": T.Linear(WIDTH, 3)}, w=(WIDTH, WIDTH)),
        lambda: PortOwn(lambda m, x: m.o(paddle.tanh(x @ m.w.t())), {"o": P.Linear(WIDTH, 3)}, w=(WIDTH, WIDTH)),
        (X,),
        ("w", "w (transposed)"),
    ),
    "positions of an image, stored as tokens": (
        lambda: Own(lambda m, x: m.o((x + m.pos).flatten(2).transpose(1, 2)), {"o": T.Linear(3, 4)}, pos=(1, 3, 6, 6)),
        lambda: PortOwn(
            lambda m, x: m.o(x.flatten(2).transpose([0, 2, 1]) + m.pos), {"o": P.Linear(3, 4)}, pos=(1, 36, 3)
        ),
        (IMAGE,),
        ("pos", "pos (transposed)"),
    ),
    "positions of tokens, stored as an image": (
        lambda: Own(lambda m, x: m.o(x.flatten(2).transpose(1, 2) + m.pos), {"o": T.Linear(3, 4)}, pos=(1, 36, 3)),
        lambda: PortOwn(
            lambda m, x: m.o((x + m.pos).flatten(2).transpose([0, 2, 1])), {"o": P.Linear(3, 4)}, pos=(1, 3, 6, 6)
        ),
        (IMAGE,),
        ("pos", "pos (transposed)"),
    ),
    "a layer for parameters": (
        lambda: Own(lambda m, x: m.o(torch.tanh(x @ m.w + m.b)), {"o": T.Linear(6, 3)}, w=(WIDTH, 6), b=(6,)),
        lambda: Port(lambda m, x: m.o(paddle.tanh(m.inner(x))), inner=P.Linear(WIDTH, 6), o=P.Linear(6, 3)),
        (X,),
        ("w", "inner.weight (transposed)"),
    ),
    "stacked experts": (
        lambda: Own(
            lambda m, x: m.o(sum(torch.tanh(x @ m.w[i]) * (i + 1) for i in range(3))),
            {"o": T.Linear(6, 2)}, w=(3, WIDTH, 6),
        ),
        lambda: PortOwn(
            lambda m, x: m.o(sum(paddle.tanh(e(x)) * (i + 1) for i, e in enumerate(m.experts))),
            {"experts": P.LayerList([P.Linear(WIDTH, 6, bias_attr=False) for _ in range(3)]), "o": P.Linear(6, 2)},
        ),
        (X,),
        ("w", "experts.0.weight, experts.1.weight, experts.2.weight (transposed)"),
    ),
    "other axes": (
        lambda: Own(lambda m, x: x * m.g, g=(1, 1, WIDTH)),
        lambda: PortOwn(lambda m, x: x * m.g, g=(WIDTH,)),
        (X,),
        None,
    ),
}  # fmt: skip


def mapped(
    ref: T.Module, port: P.Layer, *inputs: np.ndarray, given: dict | None = None
) -> tuple[NameMap, BackendModel]:
    """(the map under probe weights, the reference)."""
    ref_model, port_model = backend("torch").wrap(ref, "reference"), backend("paddle").wrap(port, "port")
    ref_model.load(probe_weights(ref_model.model, 0, inputs))
    return propose(ref_model, port_model, inputs, given), ref_model


@pytest.fixture(autouse=True)
def seeds():
    torch.manual_seed(0)
    paddle.seed(0)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_port(kind):
    make_ref, make_port, inputs, line = RIGHT[kind]
    if kind == "square, stored transposed":  # or used so by mistake
        verdict = align(make_ref(), make_port(), list(inputs))
        assert "with the line w: w or w: w (transposed)" in verdict.refusal
        assert align(make_ref(), make_port(), list(inputs), names={"w": "w"}).status == FAIL
        assert align(make_ref(), make_port(), list(inputs), names=dict([line])).status == PASS
        return
    verdict = assert_aligned(make_ref(), make_port(), *inputs)
    names, _ = mapped(make_ref(), make_port(), *inputs)
    if line:
        assert line in names.keys.items()
    several = [link for link in names.links if len(link.ref) + len(link.port) > 2 or link.transposed]
    assert bool(several) <= any("in another form there: " in note for note in verdict.notes)


@pytest.mark.parametrize(
    "kind", ["attention of the library", "head by head there", "blocks with scales", "stacked experts"]
)
def test_a_map_is_read_as_it_is_written(kind, tmp_path):
    make_ref, make_port, inputs, _ = RIGHT[kind]
    names, _ = mapped(make_ref(), make_port(), *inputs)
    path = tmp_path / "map.yaml"
    path.write_text(map_text(names), encoding="utf-8")
    again, _ = mapped(make_ref(), make_port(), *inputs, given=read_map(str(path)))
    assert (again.tensors, again.modules, again.lines) == (names.tensors, names.modules, names.lines)
    assert again.confirmed and map_text(again) == map_text(names)


@pytest.mark.parametrize("kind", RIGHT)
def test_weights_there_and_back(kind):
    make_ref, make_port, inputs, _ = RIGHT[kind]
    ref, port = make_ref(), make_port()
    arrays, (names, _) = bits(ref), key_map(ref, port, inputs)
    there = convert_state_dict(arrays, ref, port, names)
    assert there.keys() == port.state_dict().keys()
    assert_same_bits(convert_state_dict(there, port, ref, inverse(names)), arrays)
    assert len(list(changes(ref, port, names))) == len(names)


def test_converted_weights_are_those_that_give_the_same():
    ref, port = fused(layout="head by head"), port_separate()
    names, how = key_map(ref, port, [X])
    assert "confirmed by values everywhere" in how
    arrays = convert_state_dict(backend("torch").state_arrays(ref), ref, port, names)
    port.set_state_dict({key: paddle.to_tensor(array) for key, array in arrays.items()})
    with torch.no_grad():
        expected = ref(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(port(paddle.to_tensor(X)).numpy(), expected, rtol=1e-5, atol=1e-6)
    rows = [("Linear", "weight", "3 x weight", "split"), ("Linear", "bias", "3 x bias", "split")]
    assert list(changes(ref, port, names))[:2] == rows


# Ports that are wrong.


def test_names_say_which_is_the_query():
    for ref in (mha(), fused()):
        verdict = align(ref, port_separate(used=("k", "q", "v")), [X])
        assert verdict.status == FAIL and verdict.location.name == ""
        assert "k.weight, q.weight, v.weight" in verdict.notes[0]  # that is what would agree


WRONG = {
    "joined in another order": (fused, lambda: port_fused("kqv")),
    "attention of the library, joined in another order": (mha, lambda: port_fused("kqv")),
    "joined head by head": (fused, lambda: port_fused(layout="head by head")),
    "key used twice": (fused, lambda: port_separate(used=("q", "k", "k"))),
    "under other names, one used twice": (
        lambda: fused("kvq", name="mixed"), lambda: port_separate(("a", "b", "c"), ("a", "b", "b"))
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make_ref", "make_port"), WRONG.values(), ids=WRONG)
def test_a_wrong_port(make_ref, make_port):
    verdict = align(make_ref(), make_port(), [X])
    assert verdict.status == FAIL
    assert (verdict.location.name, verdict.location.phase) == ("", "forward")


def test_a_fault_before_and_one_behind_do_not_mix_up_what_lies_between():
    """Each block is settled by itself, though all that it receives is wrong on the port."""

    def blocks(act, port_act) -> tuple[T.Module, P.Layer]:
        return (
            T.Sequential(T.Linear(4, WIDTH), act, Block(), Block()),
            P.Sequential(P.Linear(4, WIDTH), port_act, PortBlock(), PortBlock()),
        )

    names, _ = mapped(*blocks(T.Tanh(), P.Sigmoid()), normal(2, 5, 4))
    right, _ = mapped(*blocks(T.Tanh(), P.Tanh()), normal(2, 5, 4))
    assert right.confirmed and not names.confirmed
    assert names.tensors == right.tensors
    verdict = align(*blocks(T.Tanh(), P.Sigmoid()), [normal(2, 5, 4)])
    assert verdict.status == FAIL and verdict.location.name == "1"


# Maps by hand.


def test_weights_of_ones_own_are_compared_in_pieces():
    """Converted ones agree, a changed one is found where it is."""
    for make_ref, make_port, _, _ in (RIGHT["head by head"], RIGHT["joined there"], RIGHT["a layer for parameters"]):
        ref, port = make_ref(), make_port()
        arrays = convert_state_dict(backend("torch").state_arrays(ref), ref, port, key_map(ref, port, [X])[0])
        backend("paddle").load_arrays(port, arrays, "weights")
        assert_aligned(ref, port, X, weights="own")
        key = min(key for key in arrays if key not in ("proj.weight", "proj.bias", "o.weight", "o.bias"))
        arrays[key][0] += 1
        backend("paddle").load_arrays(port, arrays, "weights")
        verdict = align(ref, port, [X], weights="own")
        assert verdict.status == FAIL and verdict.location.phase == "weights"
        names, _ = mapped(ref, port, X)
        piece = verdict.location.row.name.removeprefix("weights/")
        assert names.tensors[piece].partition("[")[0] == key


def test_a_map_by_hand_settles_the_order():
    """Modules, tensors, and both together; against what the names say."""
    maps = [
        {"qkv": "k, q, v"},
        {"qkv.weight": "k.weight, q.weight, v.weight", "qkv.bias": "k.bias, q.bias, v.bias"},
        {"proj": "proj", "qkv": "k, q, v"},
    ]
    for names in maps:
        assert_aligned(fused(), port_separate(used=("k", "q", "v")), X, names=names)
    assert align(fused(), port_separate(), [X], names=maps[0]).status == FAIL


def test_a_map_by_hand_of_modules_head_by_head():
    names = {"qkv": "q, k, v (heads 2)"}
    assert_aligned(fused(layout="head by head"), port_separate(), X, names=names)
    assert align(fused(), port_separate(), [X], names=names).status == FAIL


REFUSED = {
    "too many": ({"qkv.weight": "q.weight, k.weight, v.weight, proj.weight"}, "does not add up: 24 x 8 against 8 x 8;"),
    "too few": ({"qkv.weight": "q.weight, k.weight"}, "does not add up: 24 x 8 against 8 x 8; 8 x 8: "),
    "another size": ({"qkv.weight": "q.weight"}, "does not add up: 24 x 8 against 8 x 8: "),
    "modules": ({"qkv": "q, k"}, "does not add up: their tensors do not join"),
    "an axis that is not there": ({"qkv.bias": "q.bias, k.bias, v.bias (axis 1)"}, "does not add up"),
    "heads that do not divide": ({"qkv": "q, k, v (heads 3)"}, "does not add up"),
    "no heads": ({"qkv": "q, k, v (heads 0)"}, "is unclear"),
    "an unknown word": ({"qkv": "q, k, v (turned)"}, "the map says 'turned' of qkv"),
    "many to many": ({"qkv, proj": "q, k"}, "several names on both sides"),
    "a module and a tensor": ({"qkv": "q.weight, k, v"}, "names a module and a tensor"),
    "a tensor that is not there": ({"qkv.weight": "q.weight, k.weight, w.weight"}, "'w.weight', but the port has no"),
    "twice": ({"qkv.weight": "q.weight, k.weight, k.weight"}, "the port's 'k.weight' twice"),
}  # fmt: skip


@pytest.mark.parametrize(("names", "message"), REFUSED.values(), ids=REFUSED)
def test_a_map_that_cannot_be(names, message):
    with pytest.raises(UserError) as error:
        align(fused(), port_separate(), [X], names=names)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_lines_of_a_map(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text("0.10: [q.0, k.0]\na.w: b.w (axis 1, heads 4, transposed)\n'': model\n", encoding="utf-8")
    lines = read_map(str(path))
    assert lines == {"0.10": "q.0, k.0", "a.w": "b.w (axis 1, heads 4, transposed)", "": "model"}
    link = parse("a.w", lines["a.w"])
    assert link == Link(("a.w",), ("b.w",), 1, 4, True)
    assert link.line == ("a.w", lines["a.w"]) and parse(*link.turned.line).turned == link
    assert yaml.safe_load(map_text(NameMap(lines=lines))) == lines


# Layers whose weights are computed.

TU, PU = T.utils, P.utils
NORMED = {
    "weight norm": (TU.weight_norm, PU.weight_norm, T.Conv1d(4, 6, 3), P.Conv1D(4, 6, 3), (2, 4, 9), {}),
    "weight norm, parametrized": (
        TU.parametrizations.weight_norm, PU.weight_norm, T.Conv2d(3, 4, 3), P.Conv2D(3, 4, 3), (2, 3, 6, 6), {}
    ),
    "of a linear layer": (
        TU.weight_norm, lambda layer: PU.weight_norm(layer, dim=1), T.Linear(6, 4), P.Linear(6, 4), (3, 6), {}
    ),
    "of a linear layer, over its inputs": (
        lambda layer: TU.weight_norm(layer, dim=1), PU.weight_norm, T.Linear(6, 4), P.Linear(6, 4), (3, 6), {}
    ),
    "spectral norm": (TU.spectral_norm, PU.spectral_norm, T.Linear(6, 4), P.Linear(6, 4), (3, 6), {}),
    "spectral norm, parametrized": (  # in train mode PyTorch takes the two vectors in the other order
        TU.parametrizations.spectral_norm, PU.spectral_norm, T.Conv2d(3, 4, 3), P.Conv2D(3, 4, 3), (2, 3, 6, 6),
        {"modes": ("eval",)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NORMED)
def test_a_normed_layer(kind):
    norm, port_norm, layer, port_layer, shape, options = NORMED[kind]
    ref = T.Sequential(norm(backend("torch").copied(layer)), T.Tanh())
    port = P.Sequential(port_norm(backend("paddle").copied(port_layer)), P.Tanh())
    assert_aligned(ref, port, normal(*shape), **options)
    arrays = bits(ref)
    there = convert_state_dict(arrays, ref, port)
    assert there.keys() == port.state_dict().keys()
    assert_same_bits(convert_state_dict(there, port, ref), arrays)


def test_the_norm_of_small_weights_has_an_exact_backward():
    layer = T.Linear(6, 4)
    with torch.no_grad():
        layer.weight.mul_(0.01)
    assert_aligned(
        T.Sequential(TU.weight_norm(layer)), P.Sequential(PU.weight_norm(P.Linear(6, 4), dim=1)), normal(3, 6)
    )


def test_a_norm_over_another_axis_is_named():
    ref = T.Sequential(TU.parametrizations.weight_norm(T.Linear(6, 4)))
    verdict = align(ref, P.Sequential(PU.weight_norm(P.Linear(6, 4))), [normal(3, 6)])
    assert verdict.status == FAIL and verdict.location.phase == "structure"
    assert verdict.location.proof == ["0.weight_g: shape: reference (4, 1), port (1, 6)"]


# Buffers that one side saves.


def picked(saved: bool, port_saved: bool, port_places: tuple[int, ...] = (3, 0, 4, 1)) -> tuple[Ref, Port]:
    ref = Ref(lambda m, x: m.fc(x[:, m.picked]) * m.factor, fc=T.Linear(4, 3))
    port = Port(lambda m, x: m.fc(paddle.gather(x, m.places, axis=1)) * 2.0, fc=P.Linear(4, 3))
    ref.register_buffer("picked", torch.tensor([3, 0, 4, 1]), persistent=saved)
    ref.register_buffer("factor", torch.tensor([2.0, 2.0, 2.0]), persistent=saved)
    port.register_buffer("places", paddle.to_tensor(port_places), persistable=port_saved)
    return ref, port


@pytest.mark.parametrize(
    ("saved", "port_saved", "left_out"), [(True, False, "factor; picked"), (False, True, "port's places")]
)
def test_a_buffer_that_one_side_saves(saved, port_saved, left_out):
    verdict = assert_aligned(*picked(saved, port_saved), normal(3, 5))
    assert verdict.notes[-1].startswith("left out, constants that only one side saves: ")
    assert sorted(verdict.notes[-1].partition(": ")[2].split("; ")) == left_out.split("; ")
    assert align(*picked(saved, port_saved, (3, 0, 4, 2)), [normal(3, 5)]).status == FAIL
    ref, port = picked(saved, port_saved)
    there = convert_state_dict(backend("torch").state_arrays(ref), ref, port)
    assert there.keys() == port.state_dict().keys()


def test_a_buffer_that_both_save_under_other_names_is_loaded():
    verdict = align(*picked(True, True, (0, 0, 0, 0)), [normal(3, 5)])
    assert [row.name for row in verdict.bad] == ["buffers as built/picked"]  # the port's own, not what it ran with


def test_statistics_that_one_side_lacks_are_no_such_buffer():
    ref = T.Sequential(T.Conv2d(3, 4, 3), T.BatchNorm2d(4))
    port = P.Sequential(P.Conv2D(3, 4, 3), P.GroupNorm(4, 4))
    verdict = align(ref, port, [IMAGE], modes=("eval",))
    assert verdict.status == FAIL and verdict.location.phase == "structure"


# What differs in structure is what is named.


class Layer(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.fc = T.LayerNorm(WIDTH), fused(), T.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = T.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc(self.attn(self.norm(x)))))


class PortLayer(P.Layer):
    def __init__(self, norm: bool = True, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm, self.attn = P.LayerNorm(WIDTH) if norm else P.Identity(), port_separate()
        self.fc, self.fc2 = P.Linear(WIDTH, width), P.Linear(width, WIDTH)

    def forward(self, x):
        return x + self.fc2(paddle.tanh(self.fc(self.attn(self.norm(x)))))


OF_FOUR = {
    "a block less": ([{}, {}, {}], {f"3.{name}" for name in ("norm", "attn.qkv", "attn.proj", "fc", "fc2")}),
    "a norm less": ([{}, {"norm": False}, {}, {}], {"1.norm"}),
    "another width": ([{}, {}, {"width": 12}, {}], {"2.fc.weight", "2.fc.bias", "2.fc2.weight"}),
    "a block more": (
        [{}] * 5, {f"port's 4.{name}" for name in ("norm", "attn.q", "attn.k", "attn.v", "attn.proj", "fc", "fc2")}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "named"), OF_FOUR.values(), ids=OF_FOUR)
def test_what_differs_among_joined_layers(layers, named):
    ref = T.Sequential(*(Layer() for _ in range(4)))
    names, _ = mapped(ref, P.Sequential(*(PortLayer(**options) for options in layers)), X)
    assert names.problems.keys() == named


def test_a_projection_too_many():
    def conv(kernel: int) -> T.Module:
        return T.Sequential(T.Conv2d(4, 4, kernel, padding=kernel // 2, bias=False), T.BatchNorm2d(4))

    def port_conv(kernel: int) -> P.Layer:
        layer = P.Conv2D(4, 4, kernel, padding=kernel // 2, bias_attr=False)
        return P.Sequential(layer, P.BatchNorm2D(4))

    for kernel in (1, 3):
        ref = Ref(lambda m, x: m.c(x + m.b(m.a(x))), a=conv(3), b=conv(3), c=T.Sequential(conv(3), conv(3)))
        port = Port(
            lambda m, x: m.last(m.short(x) + m.second(m.first(x))),
            first=port_conv(3), second=port_conv(3), short=port_conv(kernel),
            last=P.Sequential(port_conv(3), port_conv(3)),
        )  # fmt: skip
        names, _ = mapped(ref, port, normal(2, 4, 6, 6))
        assert len(names.problems) == 2
        if kernel == 1:
            assert list(names.problems) == ["port's short.0", "port's short.1"]
