"""Maps in which names decide before shapes and order do; and constants that only one side holds."""

import numpy as np
import paddle
import pytest
import torch
from toy_pairs import Port, Ref, assert_aligned, normal

import portproof
from portproof import align
from portproof.compare import FAIL, PASS
from portproof.mapping import name_map
from portproof.mapping.pairing import _name_other_parts

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


def batch_norm_in_a_block():
    """Its statistics are buffers of the block in the port, and of a library's layer in the reference."""

    def normalized(m, x):
        if m.training:
            now, spread = x.mean(0), x.var(0, unbiased=False)
            m.mean.set_value(0.9 * m.mean + 0.1 * now)
            m.variance.set_value(0.9 * m.variance + 0.1 * spread * len(x) / (len(x) - 1))
        else:
            now, spread = m.mean, m.variance
        return m.fc((x - now) / paddle.sqrt(spread + 1e-5) * m.scale + m.shift)

    ref = Ref(lambda m, x: m.fc(m.bn(x)), bn=T.BatchNorm1d(D), fc=T.Linear(D, D))
    port = Port(normalized, fc=P.Linear(D, D), scale=port_raw(D), shift=port_raw(D))
    port.register_buffer("variance", paddle.ones([D]))
    port.register_buffer("mean", paddle.zeros([D]))
    return ref, port, normal(8, D)


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


def joined_though_the_last_was_defined_first():
    """The output's matrix is raw there, and a layer that is not called here: by order k, v and it are three."""

    def code(m, x):
        q, k = m.q(x), m.k(x)
        return torch.softmax(q @ k.transpose(1, 2), -1) @ m.v(x) @ m.out.weight.T + m.out.bias

    def port_code(m, x):
        q, k, v = m.qkv(x).chunk(3, axis=-1)
        return PF.softmax(q @ k.transpose([0, 2, 1]), -1) @ v @ m.out_weight.T + m.out_bias

    ref = Ref(code, q=T.Linear(D, D), v=T.Linear(D, D), out=T.Linear(D, D), k=T.Linear(D, D))
    port = Port(port_code, out_bias=port_raw(D), qkv=P.Linear(D, 3 * D), out_weight=port_raw(D, D))
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


def names_that_mean_something_else():
    """What `m2` is differs; the proposal by name gets further than the one by order, with options of its own."""

    def code(m, x):
        return x + F.linear(torch.sigmoid(m.m1(m.m0(x))), m.m2.weight, m.m2.bias)

    def port_block_code(m, x):
        x = x / paddle.sqrt((x**2).mean(-1, keepdim=True) + 2.0**-10) * m.m0
        return PF.sigmoid(x @ m.m1.weight + m.m1.bias) @ m.m2.weight + m.m2.bias

    def port_code(m, x):
        x = x @ m.m0.T + m.m1
        x = x + m.m2(x)
        x = x - x.mean(-1, keepdim=True)
        return m.m5(x / paddle.sqrt((x**2).mean(-1, keepdim=True) + 2.0**-10) * m.m3 + m.m4)

    block = Ref(code, m0=T.RMSNorm(D, eps=2.0**-10), m1=T.Linear(D, 8), m2=T.Linear(8, D))
    layers = {"m0": T.Sequential(T.Linear(3, D)), "m1": T.Sequential(block)}
    ref = Ref(lambda m, x: m.m3(m.m2(m.m1(m.m0(x)))), **layers, m2=T.LayerNorm(D, eps=2.0**-10), m3=T.Linear(D, 3))
    port_block = Port(port_block_code, m0=port_raw(D), m1=P.Linear(D, 8), m2=P.Linear(8, D))
    port_layers = {"m0": port_raw(D, 3), "m1": port_raw(D), "m2": P.Sequential(port_block), "m3": port_raw(D)}
    return ref, Port(port_code, **port_layers, m4=port_raw(D), m5=P.Linear(D, 3)), normal(4, 3)


PAIRS = (
    heads_behind_each_block,
    factors_of_low_rank,
    three_joined_and_one_that_is_left,
    joined_though_the_last_was_defined_first,
    joined_without_their_biases,
    batch_norm_in_a_block,
    an_own_batch_norm,
    a_norm_as_raw_parameters,
    vectors_that_are_numbered_otherwise,
    an_embedding_that_is_normed,
    names_that_mean_something_else,
)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_map_without_a_line_by_hand(pair):
    assert_aligned(*pair())


@pytest.mark.parametrize("scale", [0.5, 0.25])
def test_heads_in_lists_are_joined_by_the_list(scale, monkeypatch):
    """All layers have one shape, and are called in turn; values are shared by the heads, and gradients tell nothing."""
    monkeypatch.setattr(name_map, "fingerprint", lambda *_: None)

    def ref_code(m, x):
        v, found = m.v(x), []
        for q, k in zip(m.q, m.k):
            found.append(F.softmax(q(x) @ k(x).mT * 0.5, -1) @ v)
        return m.o(torch.stack(found).mean(0))

    def port_code(m, x):
        q, k = (layer(x).reshape([2, 5, 4, 3]).transpose([0, 2, 1, 3]) for layer in (m.query, m.key))
        return m.o((PF.softmax(q @ k.mT * scale, -1) @ m.value(x).unsqueeze(1)).mean(1))

    heads = {name: T.ModuleList([T.Linear(D, 3) for _ in range(4)]) for name in "qk"}
    ref = Ref(ref_code, v=T.Linear(D, 3), **heads, o=T.Linear(3, 2))
    joined = {name: P.Linear(D, 12) for name in ("query", "key")}
    port = Port(port_code, **joined, value=P.Linear(D, 3), o=P.Linear(3, 2))
    verdict = align(ref, port, [normal(2, 5, D)])
    assert verdict.status == (PASS if scale == 0.5 else FAIL), str(verdict)
    assert {link.ref[0].partition(".")[0]: link.port[0] for link in verdict.names.links if link.is_join} == {
        "q": "query.bias",
        "k": "key.bias",
    }, verdict.names.keys


def test_parts_are_told_by_name_behind_a_fault():
    ref, port, x = joined_though_the_last_was_defined_first()
    right = port.code
    port.code = lambda m, x: PF.layer_norm(right(m, x), [D]) * x
    names = align(ref, port, [x]).names.keys
    assert names["q.weight, k.weight, v.weight"] == "qkv.weight", names


@pytest.mark.parametrize(
    ("joined", "parts", "every", "others"),
    [
        ("qkv", "kvo", "qkvo", True),
        ("qkv", "qkv", "qkvo", False),
        ("qkv", "qko", "qko", False),  # its v may be named o
        ("both", "kv", "qkv", False),
        ("qkv", ["qkv"], ["qkv"], False),
    ],
)
def test_parts_that_are_others_by_name(joined, parts, every, others):
    sides = [f"a.{joined}"], [f"a.{name}" for name in parts]
    for each in (sides, sides[::-1]):
        assert _name_other_parts(*each, [f"a.{name}" for name in every]) is others


def test_a_layer_that_one_side_wraps_has_its_name():
    """Even behind a fault, where no value says which is which."""

    def code(m, x):
        x = m.norm1(m.block.norm1(x) * 2.0)
        return m.out(m.norm2(x))

    def port_code(m, x):
        x = m.norm1(m.block[0].norm1(x) * 2.5)
        return m.out(m.norm2[0](x))

    block = Ref(None, norm1=T.LayerNorm(D))
    layers = {"out": T.Linear(D, 2), "norm2": T.LayerNorm(D), "norm1": T.LayerNorm(D)}
    port_block = P.Sequential(Port(None, norm1=P.LayerNorm(D)))
    port_layers = {"norm1": P.LayerNorm(D), "out": P.Linear(D, 2), "norm2": P.Sequential(P.LayerNorm(D))}
    verdict = align(Ref(code, block=block, **layers), Port(port_code, block=port_block, **port_layers), [normal(4, D)])
    assert verdict.status == FAIL and "by name, confirmed" in verdict.notes[0], str(verdict)
    assert verdict.names.modules == {
        "block.norm1": "block.0.norm1", "norm1": "norm1", "norm2": "norm2.0", "out": "out"
    }  # fmt: skip


def test_blocks_in_each_other_are_paired_by_their_class():
    """All hold the same tensors, one side has one more, and each is called twice."""

    def nested(lib, side, inner):
        clip, twice = (type(name, (side,), {}) for name in ("Clip", "Twice"))
        return twice(lambda m, x: m.clip(m.clip(x)), clip=clip(inner, first=lib.Linear(D, D)))

    def wrong(m, x):
        return paddle.tanh(x @ m.first.weight.T + m.first.bias)

    wrapped = T.Sequential(nested(T, Ref, lambda m, x: torch.tanh(m.first(x))))
    ref = Ref(lambda m, x: m.out(m.twice(x)), twice=wrapped, out=T.Linear(D, 2))
    port = Port(lambda m, x: m.out(m.twice(x)), twice=nested(P, Port, wrong), out=P.Linear(D, 2))
    verdict = align(ref, port, [normal(4, D)])
    assert verdict.status == FAIL and verdict.location.name.startswith("twice.0.clip"), str(verdict)


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
    said = [note for note in verdict.notes if "held in float32 by one side only" in note]
    assert bool(said) is not held and all(note.endswith(": table") for note in said)


def test_another_table_is_found():
    ref, port = with_table(held=False, factor=1 + 1e-5)
    assert align(ref, port, [normal(2, 5, D)]).status == FAIL


def test_the_table_hides_no_fault_elsewhere():
    """An epsilon that is 1e-7 off moves the norm's output by no more than float32's rounding does."""
    ref, port = with_table(held=False)
    norm, other = (P.LayerNorm(3, epsilon=epsilon) for epsilon in (1e-3, 1e-3 + 1e-7))
    for layer, status in ((norm, PASS), (other, FAIL)):
        whole = Ref(lambda m, x: (m.a(x), m.b(x[..., :3])), a=ref, b=T.LayerNorm(3, eps=1e-3))
        port_whole = Port(lambda m, x: (m.a(x), m.b(x[..., :3])), a=port, b=layer)
        assert align(whole, port_whole, [normal(2, 5, D)]).status == status


@pytest.mark.parametrize("saved", [True, False])
def test_a_table_that_one_side_alone_saves_widens_no_limit(saved):
    """Then an epsilon in code between layers, which no layer alone shows, cannot hide in its rounding."""
    table = np.cos(angles())

    def code(m, x):
        h = x * m.table
        return m.o((h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=False) + 1e-5) ** 0.5)

    for epsilon, status in ((1e-5, PASS), (1.1e-5, FAIL)):

        def port_code(m, x, epsilon=epsilon):
            h = x * m.table
            centered = h - h.mean(-1, keepdim=True)
            return m.o(centered / (h.var(-1, keepdim=True, unbiased=False) + epsilon) ** 0.5)

        ref, port = Ref(code, o=T.Linear(D, 3)), Port(port_code, o=P.Linear(D, 3))
        ref.register_buffer("table", torch.from_numpy(table), persistent=saved)
        port.register_buffer("table", paddle.to_tensor(table), persistable=not saved)
        verdict = align(ref, port, [normal(2, 5, D)])
        assert verdict.status == status, str(verdict)
        assert not any("held in float32" in note for note in verdict.notes)


def test_where_a_table_widens_limits_layers_are_judged_alone():
    """A norm behind it: of the whole model its epsilon moves less than the table's rounding does."""
    for epsilon, status in ((1e-5, PASS), (1e-5 + 2e-8, FAIL)):
        ref, port = with_table(held=False)
        ref.o, port.o = (
            T.Sequential(T.LayerNorm(D), T.Linear(D, 3)),
            P.Sequential(P.LayerNorm(D, epsilon=epsilon), P.Linear(D, 3)),
        )
        verdict = align(ref, port, [normal(2, 5, D)])
        assert verdict.status == status, str(verdict)
        assert status == PASS or verdict.location.name == "o.0"


def test_what_each_run_computes_anew_is_no_constant():
    """Spectral norm keeps its weight as an attribute; so does a module that keeps its last output."""

    def code(m, x):
        m.kept = m.b(m.a(x))
        return m.kept

    epsilons = ((1e-5, PASS), (1.1e-5, FAIL))
    for epsilon, status in epsilons:
        ref = Ref(code, a=T.utils.spectral_norm(T.Linear(D, D)), b=T.LayerNorm(D, eps=1e-5))
        port = Port(code, a=P.utils.spectral_norm(P.Linear(D, D)), b=P.LayerNorm(D, epsilon=epsilon))
        verdict = align(ref, port, [normal(4, D)])
        assert verdict.status == status, str(verdict)
        assert not any("held in float32" in note for note in verdict.notes)


CARRIED = "changed by the {}'s own runs, and what a later call makes of it is not compared: "


def hidden_state(m, x):
    m.state = m.a(x) if m.state is None else m.a(x) + m.state
    return m.state


def counted(m, x):
    m.state = (m.state or 0) + 1
    return m.a(x) / m.state


def kept_as_it_was(m, x):
    m.state = 3 if m.state is None else m.state
    m.size = x.shape[-1:]
    return m.a(x)


@pytest.mark.parametrize(
    ("code", "state", "note"),
    [(hidden_state, None, "state"), (counted, None, "state"), (counted, 0, "state"), (kept_as_it_was, 3, "")],
)
def test_a_note_names_an_attribute_that_a_run_changes(code, state, note):
    """A call that finds what the last one left is not run: each run begins with the model as it was given."""
    ref, port = Ref(code, a=T.Linear(D, D), state=state), Port(lambda m, x: m.a(x), a=P.Linear(D, D))
    verdict = align(ref, port, [normal(4, D)])
    assert verdict.status == PASS, str(verdict)
    said = [each for each in verdict.notes if "what a later call" in each]
    assert said == ([CARRIED.format("reference") + note] if note else []) and ref.state == state


@pytest.mark.parametrize("held", [True, False])
def test_a_recording_gives_the_same_verdict(held, tmp_path):
    ref, port = with_table(held)
    portproof.record(ref, [normal(2, 5, D)]).save(tmp_path / "net.ref.safetensors")
    verdict = portproof.judge(port, tmp_path / "net.ref.safetensors")
    assert verdict.status == PASS, str(verdict)
    ref, port = with_table(held=False, factor=1 + 1e-5)
    assert portproof.judge(port, tmp_path / "net.ref.safetensors").status == FAIL
