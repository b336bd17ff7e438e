"""`align` on kinds of port that are right and constructed otherwise, and on bugs that such a port can hide."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from faulty_ports import own_batch_norm
from paddle.nn import functional as PF
from torch.nn import functional as TF
from torch.nn.utils.rnn import pack_padded_sequence
from toy_pairs import Port, Ref, chaotic, normal

from portproof import align, judge, record
from portproof.backends.question import Question
from portproof.backends.trace import ModuleCall
from portproof.compare import FAIL, PASS, REFUSED, Verdict
from portproof.compare.ruler import moved_by_rounding
from portproof.ladder.pairs.pair import drawn_cotangents, other_inputs
from portproof.localize.isolated import Attempt, moved_call, with_opposite_masks

T, P = torch.nn, paddle.nn
EVAL = {"modes": ("eval",)}


def _seed() -> None:
    torch.manual_seed(0)
    paddle.seed(0)


_seed()  # of the models that are made below, by import
fixed = pytest.fixture(autouse=True)(_seed)


def assert_passes(ref: T.Module, port: P.Layer, *inputs: np.ndarray, noted: str = "", **options) -> Verdict:
    """Aligned, nothing located, and a note has the word `noted`."""
    verdict = align(ref, port, list(inputs), **options)
    assert verdict.status == PASS, str(verdict)
    assert verdict.location is None, str(verdict)
    assert noted in "\n".join(verdict.notes), verdict.notes
    return verdict


def assert_fails(ref: T.Module, port: P.Layer, *inputs: np.ndarray, at: str, cause: str = "", **options) -> Verdict:
    """Not aligned; `at` is located first, with the word `cause` in the diagnosis."""
    verdict = align(ref, port, list(inputs), **options)
    assert verdict.status == FAIL, str(verdict)
    assert verdict.location is not None, str(verdict)
    assert verdict.location.name == at, str(verdict)
    assert cause in "; ".join(verdict.location.diagnosis), str(verdict)
    return verdict


def compared(verdict: Verdict) -> set[str]:
    """The reference's modules of which an output was compared."""
    return {row.item.module for row in verdict.rows if row.item.kind == "output"}


# Blocks that are called otherwise.


def scaled(m, x, height):
    return x + torch.tanh(m.fc(m.norm(x))) / height


def port_scaled(m, x, height):
    return x + paddle.tanh(m.fc(m.norm(x))) / height


def stage() -> dict:
    return {"norm": T.LayerNorm(6), "fc": T.Linear(6, 6)}


def port_stage() -> dict:
    return {"norm": P.LayerNorm(6), "fc": P.Linear(6, 6)}


def test_a_block_that_takes_height_and_width_for_a_size():
    """Nor is it the block that a fault behind it is located at."""
    block = Ref(lambda m, x, height, width: scaled(m, x, height), **stage())
    ref = Ref(
        lambda m, x: m.out(m.block(m.inp(x).flatten(1, 2), *x.shape[1:3])),
        inp=T.Linear(3, 6),
        block=block,
        out=T.LayerNorm(6),
    )

    def port(eps: float) -> Port:
        block = Port(lambda m, x, size: port_scaled(m, x, size[0]), **port_stage())
        code = lambda m, x: m.out(m.block(m.inp(x).flatten(1, 2), x.shape[1:3]))  # noqa: E731
        return Port(code, inp=P.Linear(3, 6), block=block, out=P.LayerNorm(6, eps))

    verdict = assert_passes(ref, port(1e-5), normal(2, 4, 3, 3))
    assert {"inp", "block.norm", "block.fc"} <= compared(verdict)
    assert_fails(ref, port(1e-3), normal(2, 4, 3, 3), at="out", cause="epsilon")


def test_a_block_that_returns_an_image_for_tokens():
    ref = Ref(
        lambda m, x: m.out(m.block(m.inp(x))),
        inp=T.Linear(3, 6),
        block=Ref(lambda m, x: scaled(m, x, 2), **stage()),
        out=T.Linear(6, 2),
    )
    port = Port(
        lambda m, x: m.out(m.block(m.inp(x)).reshape([2, 4, 3, 6])),
        inp=P.Linear(3, 6),
        block=Port(lambda m, x: port_scaled(m, x.flatten(1, 2), 2), **port_stage()),
        out=P.Linear(6, 2),
    )
    assert_passes(ref, port, normal(2, 4, 3, 3))


@pytest.mark.parametrize("detached", [False, True])
def test_a_block_that_is_called_with_the_batch_elsewhere(detached):
    """What it gives is compared, and it is run alone: the fault is not the code around it."""
    block = Ref(lambda m, x: m.value(x) * torch.sigmoid(m.gate(x)), value=T.Linear(6, 6), gate=T.Linear(6, 6))

    def product(m, x):
        gate = PF.sigmoid(m.gate(x))
        return m.value(x) * (gate.detach() if detached else gate)

    port_block = Port(product, value=P.Linear(6, 6), gate=P.Linear(6, 6))
    ref = Ref(
        lambda m, x: m.out(m.block(m.inp(x).transpose(0, 1)).transpose(0, 1)),
        inp=T.Linear(3, 6), block=block, out=T.Linear(6, 2),
    )  # fmt: skip
    port = Port(lambda m, x: m.out(m.block(m.inp(x))), inp=P.Linear(3, 6), block=port_block, out=P.Linear(6, 2))
    if detached:
        verdict = assert_fails(ref, port, normal(2, 4, 3), at="block", cause="detach")
        assert {row.item.kind for row in verdict.rows if row.status == FAIL} == {"gradient"}, str(verdict)
    else:
        verdict = assert_passes(ref, port, normal(2, 4, 3), noted="returns its values in another form: block")
    assert "block" in compared(verdict)


def gated(m, x, value, gate):
    return x + m.value(value) * torch.sigmoid(m.gate(gate))


def port_gated(m, x, value, gate, shift=0.0, detach=False):
    gate = PF.sigmoid(m.gate(gate))
    return x + m.value(value) * (gate.detach() if detach else gate) + shift


@pytest.mark.parametrize(("axis", "is_stack"), [(-1, False), (1, False), (0, True)])
@pytest.mark.parametrize("is_ref", [False, True])
@pytest.mark.parametrize("bug", [{}, {"shift": 0.1}, {"detach": True}])
def test_a_block_that_takes_two_arguments_in_one(axis, is_stack, is_ref, bug):
    """The block is run alone: it is at fault, forward or backward, and not the code around it."""
    layers = {"value": T.Linear(6, 6), "gate": T.Linear(6, 6)}
    port_layers = {"value": P.Linear(6, 6), "gate": P.Linear(6, 6)}

    def split(y, framework):
        return framework.unbind(y, axis) if is_stack else framework.chunk(y, 2, axis)

    def joined(*parts, framework):
        return framework.stack(parts, axis) if is_stack else framework.concat(parts, axis)

    two, port_two = Ref(gated, **layers), Port(lambda *given: port_gated(*given, **bug), **port_layers)
    one = Ref(lambda m, x, y: gated(m, x, *split(y, torch)), **layers)
    port_one = Port(lambda m, x, y: port_gated(m, x, *split(y, paddle), **bug), **port_layers)

    def calls_two(m, x):
        return m.out(m.block(x, m.a(x), m.b(x)))

    def calls_one(m, x, framework):
        return m.out(m.block(x, joined(m.a(x), m.b(x), framework=framework)))

    around = {"a": T.Linear(6, 6), "b": T.Linear(6, 6), "out": T.Linear(6, 2)}
    port_around = {"a": P.Linear(6, 6), "b": P.Linear(6, 6), "out": P.Linear(6, 2)}
    if is_ref:
        ref = Ref(lambda m, x: calls_one(m, x, torch), block=one, **around)
        port = Port(calls_two, block=port_two, **port_around)
    else:
        ref = Ref(calls_two, block=two, **around)
        port = Port(lambda m, x: calls_one(m, x, paddle), block=port_one, **port_around)
    if bug:
        verdict = assert_fails(ref, port, normal(2, 4, 6), at="block")
        assert verdict.location.phase == ("forward" if "shift" in bug else "backward"), str(verdict)
        assert not verdict.location.also, str(verdict)
    else:
        assert_passes(ref, port, normal(2, 4, 6))


@pytest.mark.parametrize("bug", ["", "block", "around"])
def test_two_states_in_one_argument_that_are_zeros_in_the_first_call(bug):
    """The later calls tell which is which, and along which axis: the batch is as large as the pair."""

    def code(m, x):
        w = total = torch.zeros(2, 6)
        for step in x.unbind(1):
            w = m.block(step, torch.stack([w, total], 1))
            total = total + w
        return m.out(total)

    def port_code(m, x):
        w = total = paddle.zeros([2, 6], x.dtype)
        for step in x.unbind(1):
            w = m.block(step, w, total)
            total = total + (w.detach() if bug == "around" else w)
        return m.out(total)

    def step(m, x, w, total):
        return torch.tanh(m.fc(x) + w - 0.5 * total)

    def port_step(m, x, w, total):
        return paddle.tanh(m.fc(x) + w - 0.5 * (total.detach() if bug == "block" else total))

    ref = Ref(code, block=Ref(lambda m, x, both: step(m, x, *both.unbind(1)), fc=T.Linear(4, 6)), out=T.Linear(6, 2))
    port = Port(port_code, block=Port(port_step, fc=P.Linear(4, 6)), out=P.Linear(6, 2))
    if bug:
        verdict = assert_fails(ref, port, normal(2, 3, 4), at="block" if bug == "block" else "")
        assert verdict.location.phase == "backward" and not verdict.location.also, str(verdict)
    else:
        assert_passes(ref, port, normal(2, 3, 4))


def test_the_place_is_the_innermost_block_though_blocks_have_no_partner():
    """Two of the port's units are one block of the reference; the activation between layers is wrong."""
    ref_block = Ref(
        lambda m, x: [x := x + b(TF.relu(a(TF.relu(x)))) for a, b in ((m.a1, m.b1), (m.a2, m.b2))][-1],
        a1=T.Linear(6, 6), b1=T.Linear(6, 6), a2=T.Linear(6, 6), b2=T.Linear(6, 6),
    )  # fmt: skip

    def unit(slope):
        code = lambda m, x: x + m.b(PF.leaky_relu(m.a(PF.relu(x)), slope))  # noqa: E731
        return Port(code, a=P.Linear(6, 6), b=P.Linear(6, 6))

    ref = Ref(lambda m, x: m.out(m.block(m.inp(x))), inp=T.Linear(3, 6), block=ref_block, out=T.Linear(6, 2))
    port = P.Sequential(P.Linear(3, 6), P.Sequential(unit(0.0), unit(0.1)), P.Linear(6, 2))
    assert_fails(ref, port, normal(4, 3), at="block")
    assert align(ref, port, [normal(4, 3)]).location.port_name == "1.1"


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_a_block_that_gets_what_the_reference_s_holds_itself_is_at_fault_by_itself(shift):
    """The reference's block reads its memory from an attribute, which the port gives it."""

    def ref_code(m, x):
        m.block.memory = m.a(x)
        return m.out(m.block(x))

    block = Ref(lambda m, x: torch.sigmoid(m.fc(x)) * m.memory, fc=T.Linear(6, 6))
    port_block = Port(lambda m, x, memory: PF.sigmoid(m.fc(x) + shift) * memory, fc=P.Linear(6, 6))
    ref = Ref(ref_code, a=T.Linear(6, 6), block=block, out=T.Linear(6, 2))
    port = Port(lambda m, x: m.out(m.block(x, m.a(x))), a=P.Linear(6, 6), block=port_block, out=P.Linear(6, 2))
    if shift:
        assert_fails(ref, port, normal(4, 6), at="block")
    else:
        assert_passes(ref, port, normal(4, 6))


@pytest.mark.parametrize("changes", [True, False])
def test_a_buffer_that_training_changes_and_that_the_port_keeps_elsewhere(changes):
    """In the model itself; a pass in train mode moves it towards the mean."""

    def averaged(m, x):
        if m.training:
            with torch.no_grad():
                m.average.mul_(0.9).add_(0.1 * x.mean())
        return torch.tanh(m.fc(x))

    def port_code(m, x):
        if m.training and changes:
            with paddle.no_grad():
                m.average.set_value(0.9 * m.average + 0.1 * x.mean())
        return m.out(paddle.tanh(m.fc(x)))

    block = Ref(averaged, fc=T.Linear(6, 6))
    block.register_buffer("average", torch.zeros(1))
    ref = Ref(lambda m, x: m.out(m.block(x)), block=block, out=T.Linear(6, 2))
    port = Port(port_code, fc=P.Linear(6, 6), out=P.Linear(6, 2))
    port.register_buffer("average", paddle.zeros([1]))
    if changes:
        assert_passes(ref, port, normal(4, 6))
    else:
        assert_fails(ref, port, normal(4, 6), at="block")


def test_masks_of_one_name_that_mean_the_opposite():
    """In the model itself in the port, where it says what is kept."""
    hidden = np.array([False, True, False, False, True, True])
    block = Ref(lambda m, x: m.fc(x.masked_fill(m.mask, 0.0)), fc=T.Linear(6, 6))
    block.register_buffer("mask", torch.tensor(hidden))
    ref = Ref(lambda m, x: m.out(m.block(x)), block=block, out=T.Linear(6, 2))
    port = Port(lambda m, x: m.out(m.fc(x * m.mask.astype(x.dtype))), fc=P.Linear(6, 6), out=P.Linear(6, 2))
    port.register_buffer("mask", paddle.to_tensor(~hidden))
    assert_passes(ref, port, normal(4, 6), noted="masks that say the opposite there: block.mask: mask")


def test_a_buffer_that_training_changes_and_that_the_port_has_not():
    def counted(m, x):
        if m.training:
            m.seen.add_(len(x))
        return m.fc(x)

    ref, port = Ref(counted, fc=T.Linear(6, 2)), Port(lambda m, x: m.fc(x), fc=P.Linear(6, 2))
    ref.register_buffer("seen", torch.zeros(()))
    verdict = assert_passes(ref, port, normal(4, 6), noted="a pass in train mode changes it")
    assert "1 buffer not compared" in verdict.caveats


def test_python_that_decides_by_a_saved_number_is_said():
    """The first pass makes the scale; none here is the first, so that was not judged."""

    def scaled_once(m, x):
        if m.made.item() == 0:
            m.scale.data.copy_(1 / x.std())
            m.made.fill_(1)
        return m.scale * m.fc(x)

    ref, port = Ref(scaled_once, fc=T.Linear(6, 2)), Port(lambda m, x: m.scale * m.fc(x), fc=P.Linear(6, 2))
    ref.scale, port.scale = T.Parameter(torch.ones(1)), port.create_parameter([1])
    ref.register_buffer("made", torch.tensor(1))
    verdict = align(ref, port, [normal(4, 6)])
    assert any("branches that Python takes" in note for note in verdict.notes), str(verdict)


def test_tensors_of_one_class_that_are_joined_of_two_of_other_sizes():
    """A class token before the tokens of five numbers."""
    ref = Ref(lambda m, x: m.out((torch.cat([torch.ones_like(x[:, :1]), x], 1)[..., None] * m.weight).tanh()[:, 0]))
    ref.weight, ref.out = T.Parameter(torch.randn(6, 4)), T.Linear(4, 2)
    port = Port(
        lambda m, x: m.out(
            paddle.tanh(paddle.concat([m.token.expand([3, 1, 4]), x.unsqueeze(-1) * m.scales], axis=1))[:, 0]
        ),
        out=P.Linear(4, 2),
    )
    port.token, port.scales = port.create_parameter([1, 4]), port.create_parameter([5, 4])
    assert_passes(ref, port, normal(3, 5))


def test_parameters_that_the_port_freezes_do_not_mislead_the_map():
    """No name agrees, and norms of two classes make the order tell too little: gradients do."""

    def channels_first(m, x):
        return m.weight[:, None] * TF.layer_norm(x.mT, (6,)).mT + m.bias[:, None]

    def own_norm():
        norm = Ref(channels_first)
        norm.weight, norm.bias = T.Parameter(torch.ones(6)), T.Parameter(torch.zeros(6))
        return norm

    def block(m, x):
        return x + m.scale * m.fc(m.norm(x))

    def ref_block():
        made = Ref(block, norm=T.LayerNorm(6), fc=T.Linear(6, 6))
        made.scale = T.Parameter(torch.full((6,), 0.1))
        return made

    def port_block(frozen):
        made = Port(lambda m, x: x + m.gamma * m.mix(m.ln(x)), ln=P.LayerNorm(6), mix=P.Linear(6, 6))
        made.gamma = made.create_parameter([6])
        made.gamma.stop_gradient = frozen
        return made

    ref = Ref(
        lambda m, x: m.out(m.last(m.b(m.second(m.a(m.first(x).mT).mT).mT)).mean(1)),
        first=own_norm(), a=ref_block(), second=own_norm(), b=ref_block(), last=T.LayerNorm(6), out=T.Linear(6, 2),
    )  # fmt: skip

    def port(frozen):
        net = P.Sequential(P.LayerNorm(6), port_block(False), P.LayerNorm(6), port_block(frozen))
        return Port(lambda m, x: m.fc(m.ln(m.net(x.transpose([0, 2, 1]))).mean(1)), net=net, ln=P.LayerNorm(6),
                    fc=P.Linear(6, 2))  # fmt: skip

    assert_passes(ref, port(False), normal(3, 6, 5))
    assert_fails(ref, port(True), normal(3, 6, 5), at="b", cause="scale is frozen in the port")


class Masked(T.Conv2d):
    """As of PixelCNN: it masks its weight itself, in place."""

    def forward(self, x):
        self.weight.data[:, :, 1, 1:] = 0
        self.weight.data[:, :, 2:] = 0
        return super().forward(x)


@pytest.mark.parametrize("bug", ["", "mask", "behind"])
def test_a_reference_that_writes_into_its_own_weights(bug):
    """Its masked weights are not what the port starts with: else a port without a mask would pass."""

    def masked(m, x):
        mask = paddle.ones_like(m.conv.weight)
        if bug != "mask":
            mask[:, :, 1, 1:], mask[:, :, 2:] = 0.0, 0.0
        m.conv.weight.set_value(m.conv.weight * mask)
        return m.conv(x)

    def code(m, x):
        return m.out(TF.relu(m.bn(m.masked(x))))

    ref = Ref(code, masked=Masked(3, 4, 3, padding=1), bn=T.BatchNorm2d(4), out=T.Conv2d(4, 2, 1))
    port = Port(
        lambda m, x: m.out(PF.relu(m.bn(m.masked(x)))),
        masked=Port(masked, conv=P.Conv2D(3, 4, 3, padding=1)),
        bn=P.BatchNorm2D(4, epsilon=1e-3 if bug == "behind" else 1e-5),
        out=P.Conv2D(4, 2, 1),
    )
    how = {"accept": ["*.running_var"]}
    if bug:
        assert_fails(ref, port, normal(2, 3, 6, 6), at="bn" if bug == "behind" else "masked", **how)
    else:
        assert_passes(ref, port, normal(2, 3, 6, 6), **how)


@pytest.mark.parametrize("bug", ["", "not"])
def test_a_reference_that_writes_into_its_own_weights_when_it_trains(bug):
    """A critic's are clipped; statistics by hand stay those of a variance."""

    def code(m, x):
        if m.training:
            with torch.no_grad():
                m.fc.weight.clamp_(-0.125, 0.125)
                m.var.mul_(0.9).add_(0.1 * x.var(0))
        return m.fc(x / m.var.sqrt())

    def port_code(m, x):
        if m.training:
            if not bug:
                m.fc.weight.set_value(m.fc.weight.clip(-0.125, 0.125))
            with paddle.no_grad():
                m.var.set_value(0.9 * m.var + 0.1 * x.var(0))
        return m.fc(x / m.var.sqrt())

    ref = Ref(code, fc=T.Linear(6, 3, bias=False))
    port = Port(port_code, fc=P.Linear(6, 3, bias_attr=False))
    ref.var = T.Parameter(torch.tensor([1e-3, 1e-3, 1e-3, 2.0, 2.0, 2.0]), requires_grad=False)
    port.var = port.create_parameter([6])
    port.var.set_value(ref.var.numpy())
    port.var.stop_gradient = True
    if bug:
        assert_fails(ref, port, normal(8, 6), at="")
    else:
        assert_passes(ref, port, normal(8, 6))


def test_an_error_in_the_backward_pass_is_the_block_s_that_raises_it():
    """Paddle's matmul cannot take its own broadcast back; the forward pass agrees."""

    def scores(m, x):
        return torch.matmul(m.weight, x[:, None, :, :, None]).squeeze(-1).sum((1, 3))

    def port_scores(m, x):
        return paddle.matmul(m.weight, x.unsqueeze([1, 4])).squeeze(-1).sum([1, 3])

    block, port_block = Ref(scores), Port(port_scores)
    block.weight = T.Parameter(torch.randn(3, 5, 6, 8))
    port_block.weight = port_block.create_parameter([3, 5, 6, 8])
    ref = Ref(lambda m, x: m.out(m.block(x)), block=block, out=T.Linear(5, 2))
    port = Port(lambda m, x: m.out(m.block(x)), block=port_block, out=P.Linear(5, 2))
    verdict = assert_fails(ref, port, normal(2, 5, 8), at="block")
    assert verdict.location.phase == "backward"
    assert any("the framework's operation differs" in line for line in verdict.location.proof), str(verdict)


@pytest.mark.parametrize("bug", ["", "forward", "backward"])
def test_a_layer_in_another_layout_is_told_by_its_inputs_where_shapes_do_not_tell(bug):
    """12 places and 12 channels."""
    ref = Ref(
        lambda m, x: m.out(TF.gelu(m.mix(m.inp(x).transpose(1, 2))).transpose(1, 2)),
        inp=Ref(lambda m, x: m.fc(x).tanh(), fc=T.Linear(3, 6)), mix=T.Conv1d(6, 12, 1), out=T.Linear(12, 2),
    )  # fmt: skip

    def port_inp(m, x):
        y = paddle.tanh(m.fc(x))
        return y + 1e-6 if bug == "forward" else 0.5 * y + 0.5 * y.detach() if bug else y

    inp = Port(port_inp, fc=P.Linear(3, 6))
    port = Port(lambda m, x: m.out(PF.gelu(m.mix(m.inp(x)))), inp=inp, mix=P.Linear(6, 12), out=P.Linear(12, 2))
    if not bug:
        assert_passes(ref, port, normal(2, 12, 3))
        return
    verdict = assert_fails(ref, port, normal(2, 12, 3), at="inp")
    assert verdict.location.phase == bug and not verdict.location.also, str(verdict)
    assert "mix" not in {row.item.module for row in verdict.rows if row.status == FAIL and bug == "backward"}


@pytest.mark.parametrize("frozen_there", [True, False])
def test_a_constant_that_is_a_frozen_parameter_on_one_side(frozen_there):
    """Of a block that only one side has."""
    edges = np.linspace(-1, 1, 5, dtype=np.float32)
    block = Ref(lambda m, x: m.fc((x[..., None] > m.edges).to(x.dtype).sum(-1) * x), fc=T.Linear(6, 6))
    if frozen_there:
        block.register_buffer("edges", torch.tensor(edges))
    else:
        block.edges = T.Parameter(torch.tensor(edges), requires_grad=False)
    ref = Ref(lambda m, x: m.out(m.block(x)), block=block, out=T.Linear(6, 2))
    port = Port(
        lambda m, x: m.out(m.fc((x.unsqueeze(-1) > m.bins).astype(x.dtype).sum(-1) * x)),
        fc=P.Linear(6, 6), out=P.Linear(6, 2),
    )  # fmt: skip
    if frozen_there:
        port.bins = port.create_parameter([5], paddle.ParamAttr(trainable=False))
        port.bins.set_value(edges)
    else:
        port.register_buffer("bins", paddle.to_tensor(edges))
    assert_passes(ref, port, normal(3, 6))


def last_of(more: Any) -> tuple[Ref, Port]:
    """Of what the block gives only the last place counts; the port's block adds `more(x)`."""

    def code(m, x):
        return m.out(m.block(x)[:, -1])

    block = Ref(lambda m, x: m.b(torch.relu(m.a(x))), a=T.Linear(6, 6), b=T.Linear(6, 6))
    port_block = Port(lambda m, x: m.b(PF.relu(m.a(x)) + more(x)), a=P.Linear(6, 6), b=P.Linear(6, 6))
    return Ref(code, block=block, out=T.Linear(6, 2)), Port(code, block=port_block, out=P.Linear(6, 2))


def test_what_differs_inside_may_count_on_other_inputs(tmp_path):
    """The last place alone has negative inputs, for which the port is right: rolled, others come last."""
    x = np.abs(normal(2, 5, 6))
    x[:, -1] *= -1
    wrong = last_of(PF.relu)
    verdict = assert_fails(*wrong, x, at="block", **EVAL)
    assert any("differ on others" in note for note in verdict.notes), str(verdict)
    path = tmp_path / "last.ref.safetensors"
    record(wrong[0], [x], **EVAL).save(path)
    recorded = judge(wrong[1], path)
    assert recorded.status == FAIL and recorded.location.name == "block", str(recorded)
    before_the_last = last_of(lambda x: paddle.concat([x[:, :-1], 0 * x[:, -1:]], axis=1))
    assert_passes(*before_the_last, x, noted="of which nothing comes", **EVAL)


def test_a_call_without_a_partner_is_tried_on_larger_inputs(tmp_path):
    """What passes 6 here does not reach the output; where it is four times as large, it does."""
    x = np.array([[1.0, 2.0, 0.5, 1.2], [0.3, 1.1, 1.4, 0.9]], np.float32)

    def code(m, x):
        return m.out(m.act(x * m.factors)[:, :2])

    def pair(activation: paddle.nn.Layer) -> tuple[Ref, Port]:
        ref, port = Ref(code, act=T.ReLU(), out=T.Linear(2, 2)), Port(code, act=activation, out=P.Linear(2, 2))
        ref.factors, port.factors = (module.tensor([1.0, 1.0, 8.0, 9.0]) for module in (torch, paddle))
        return ref, port

    wrong = pair(P.ReLU6())
    verdict = assert_fails(*wrong, x, at="act", **EVAL)
    assert "the outputs agree on these inputs, and differ on others: floats 4 times as large, input 0" in verdict.notes
    path = tmp_path / "act.ref.safetensors"
    record(wrong[0], [x], **EVAL).save(path)
    recorded = judge(wrong[1], path)
    assert recorded.status == FAIL and recorded.location.name == "act", str(recorded)
    assert_passes(*pair(P.ReLU()), x, **EVAL)


def test_a_module_that_is_shared_and_called_in_another_order():
    def heads(m, a, b, c):
        return torch.cat([m.head(torch.relu(m.inp(x))) for x in (a, b, c)], 1)

    def port_heads(m, a, b, c):
        found = [m.head(PF.relu(m.inp(x))) for x in (c, b, a)]
        return paddle.concat(found[::-1], axis=1)

    ref = Ref(heads, inp=T.Linear(5, 6), head=T.Linear(6, 2))
    port = Port(port_heads, inp=P.Linear(5, 6), head=P.Linear(6, 2))
    assert_passes(ref, port, normal(2, 8, 5), normal(2, 4, 5), normal(2, 2, 5))
    alike = normal(2, 4, 5), normal(3, 4, 5)[:2], normal(4, 4, 5)[:2]  # of one shape, values alone tell them apart
    assert_passes(ref, port, *alike)


def test_keywords_that_the_port_names_otherwise():
    def block(eps: float) -> Port:
        code = lambda m, x, mask: m.norm(x + m.fc(x) * mask)  # noqa: E731
        return Port(code, fc=P.Linear(6, 6), norm=P.LayerNorm(6, eps))

    class Block(T.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = T.Linear(6, 6), T.LayerNorm(6)

        def forward(self, hidden_states, attention_mask=None):
            return self.norm(hidden_states + self.fc(hidden_states) * attention_mask)

    class Model(T.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = T.ModuleList([Block(), Block()])

        def forward(self, x, mask):
            for block in self.blocks:
                x = block(hidden_states=x, attention_mask=mask)
            return x

    def port(eps: float) -> Port:
        blocks = P.LayerList([block(1e-5), block(eps)])
        return Port(lambda m, x, mask: m.blocks[1](m.blocks[0](x, mask), mask), blocks=blocks)

    inputs = normal(2, 5, 6), abs(normal(2, 5, 1))
    assert_passes(Model(), port(1e-5), *inputs)
    verdict = assert_fails(Model(), port(1e-3), *inputs, at="blocks.1.norm", cause="epsilon is 0.001, not 1e-05")
    assert not any(location.name.startswith("blocks.0") for location in verdict.location.also)


# Constants in float32, and a port that names float32.


def decays(m, x):
    return m.fc(x * torch.sin(torch.arange(7.0) * 1.7))


def port_decays(m, x):
    return m.fc(x * paddle.sin(paddle.arange(7, dtype="float32") * 1.7).astype(x.dtype))


def root_mean_square(m, x):
    y = m.fc(x).float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def port_root_mean_square(m, x):
    y = m.fc(x).astype("float32")
    return (y / paddle.sqrt(y.square().mean(-1, keepdim=True) + 1e-6)).astype(x.dtype)


FLOAT32 = {
    "a table": (decays, port_decays),
    "a norm": (root_mean_square, port_root_mean_square),
    "a mask": (
        lambda m, x: m.fc(x) * (x.mean(-1, keepdim=True) > 0).to(x.dtype),
        lambda m, x: m.fc(x) * (x.mean(-1, keepdim=True) > 0).astype("float32"),
    ),
    "one-hot": (
        lambda m, x: m.fc(x) + TF.one_hot(x.argmax(-1), 7).to(x.dtype)[..., :3],
        lambda m, x: (m.fc(x) + PF.one_hot(x.argmax(-1), 7)[..., :3]).astype("float32"),
    ),
    "zeros": (
        lambda m, x: torch.cat([m.fc(x), x.new_zeros(len(x), 1)], 1),
        lambda m, x: paddle.concat([m.fc(x), paddle.zeros([x.shape[0], 1], dtype="float32")], axis=1),
    ),
}


@pytest.mark.parametrize(("code", "port_code"), FLOAT32.values(), ids=FLOAT32)
def test_float32_on_purpose(code, port_code):
    assert_passes(Ref(code, fc=T.Linear(7, 3)), Port(port_code, fc=P.Linear(7, 3)), normal(4, 7))


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_reference_that_makes_its_state_in_the_default_dtype(kind):
    def run(m, x):
        h = torch.zeros(1, x.shape[0], 6)
        return m.rnn(x, (h, torch.zeros_like(h)) if kind == "LSTM" else h)[0]

    def port_run(m, x):
        h = paddle.zeros([1, x.shape[0], 6])
        return m.rnn(x, (h, paddle.zeros_like(h)) if kind == "LSTM" else h)[0]

    ref, port = Ref(run, rnn=getattr(T, kind)(4, 6, batch_first=True)), Port(port_run, rnn=getattr(P, kind)(4, 6))
    assert_passes(ref, port, normal(3, 5, 4))


# Frozen on one side.


def test_a_norm_that_only_the_reference_freezes():
    pairs = (T.GroupNorm(2, 6), P.GroupNorm(2, 6)), (T.BatchNorm2d(6), P.BatchNorm2D(6))
    for norm, port_norm in pairs:
        ref = T.Sequential(T.Conv2d(3, 6, 3), norm.requires_grad_(False), T.Tanh())
        port = P.Sequential(P.Conv2D(3, 6, 3), port_norm, P.Tanh())
        assert_fails(ref, port, normal(4, 3, 7, 7), at="1")


def test_a_padding_index_that_is_missing():
    ref = Ref(lambda m, ids: m.fc(m.words(ids).mean(1)), words=T.Embedding(40, 6, padding_idx=1), fc=T.Linear(6, 3))
    port = Port(lambda m, ids: m.fc(m.words(ids).mean(1)), words=P.Embedding(40, 6), fc=P.Linear(6, 3))
    right = Port(lambda m, ids: m.fc(m.words(ids).mean(1)), words=P.Embedding(40, 6, padding_idx=1), fc=P.Linear(6, 3))
    without = 2 + np.arange(20).reshape(4, 5)
    for ids in (without, np.where(without < 8, 1, without)):
        assert_passes(ref, right, ids)
        assert_fails(ref, port, ids, at="words")


# Attention.


def separate(m, x):
    q, k, v = m.q(x), m.k(x), m.v(x)
    return m.out(PF.softmax(q @ k.transpose([0, 2, 1]) * 8**-0.5) @ v)


def fused(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out((q @ k.transpose(1, 2) * 8**-0.5).softmax(-1) @ v)


def port_fused(m, x):
    q, k, v = m.qkv(x).chunk(3, axis=-1)
    return m.out(PF.softmax(q @ k.transpose([0, 2, 1]) * 8**-0.5) @ v)


def linears(*names: str) -> dict:
    return {name: P.Linear(8, 8) for name in names}


def port_attention() -> Port:
    return Port(lambda m, x, y: m.out(m.attn(x, y, y)), attn=P.MultiHeadAttention(8, 2), out=P.Linear(8, 3))


ATTENTION = {
    "MultiheadAttention": (
        Ref(
            lambda m, x, y: m.out(m.attn(x, y, y)[0]),
            attn=T.MultiheadAttention(8, 2, batch_first=True),
            out=T.Linear(8, 3),
        ),
        port_attention(),
        (normal(2, 4, 8), normal(2, 5, 8)),
        "attn",
    ),
    "alone": (
        Ref(lambda m, x, y: m.attn(x, y, y, need_weights=False)[0], attn=T.MultiheadAttention(8, 2, batch_first=True)),
        Port(lambda m, x, y: m.attn(x, y, y), attn=P.MultiHeadAttention(8, 2)),
        (normal(2, 4, 8), normal(2, 5, 8)),
        "attn",
    ),
    "encoder layer": (
        T.TransformerEncoderLayer(8, 2, 12, batch_first=True),
        P.TransformerEncoderLayer(8, 2, 12),
        (normal(2, 4, 8),),
        "self_attn",
    ),
    "fused": (
        Ref(fused, qkv=T.Linear(8, 24), out=T.Linear(8, 8)),
        Port(separate, **linears("q", "k", "v", "out")),
        (normal(2, 4, 8),),
        "qkv",
    ),
    "fused there": (
        Ref(
            lambda m, x: m.out((m.q(x) @ m.k(x).transpose(1, 2) * 8**-0.5).softmax(-1) @ m.v(x)),
            **{name: T.Linear(8, 8) for name in ("q", "k", "v", "out")},
        ),
        Port(
            port_fused,
            qkv=P.Linear(8, 24),
            out=P.Linear(8, 8),
        ),
        (normal(2, 4, 8),),
        "qkv",
    ),
}


@pytest.mark.parametrize(("ref", "port", "inputs", "noted"), ATTENTION.values(), ids=ATTENTION)
def test_attention(ref, port, inputs, noted):
    assert_passes(ref, port, *inputs, noted=noted)


# Layers in another form.


def test_linear_for_a_convolution_and_the_other_way_round():
    def port_code(m, x):
        return m.excite(paddle.tanh(m.squeeze(x.transpose([0, 2, 3, 1])))).transpose([0, 3, 1, 2])

    def turned(m, x):
        return m.excite(paddle.tanh(m.squeeze(x.unsqueeze([2, 3])))).flatten(1)

    code = lambda m, x: m.excite(torch.tanh(m.squeeze(x)))  # noqa: E731
    ref = Ref(code, squeeze=T.Conv2d(6, 4, 1), excite=T.Conv2d(4, 3, 1, bias=False))
    port = Port(port_code, squeeze=P.Linear(6, 4), excite=P.Linear(4, 3, bias_attr=False))
    assert_passes(ref, port, normal(2, 6, 3, 3), noted="squeeze")
    ref = Ref(code, squeeze=T.Linear(6, 4), excite=T.Linear(4, 3))
    port = Port(turned, squeeze=P.Conv2D(6, 4, 1), excite=P.Conv2D(4, 3, 1))
    assert_passes(ref, port, normal(4, 6), noted="squeeze")


def test_an_activation_that_is_part_of_the_norm():
    def port(eps: float) -> Port:
        return Port(lambda m, x: m.out(m.bn(m.conv(x))), conv=P.Conv2D(3, 6, 3), bn=norm(eps), out=P.Conv2D(6, 2, 1))

    def norm(eps: float) -> P.BatchNorm:
        return P.BatchNorm(6, act="relu", epsilon=eps)

    ref = Ref(
        lambda m, x: m.out(m.relu(m.bn(m.conv(x)))),
        conv=T.Conv2d(3, 6, 3),
        bn=T.BatchNorm2d(6),
        relu=T.ReLU(),
        out=T.Conv2d(6, 2, 1),
    )
    assert_passes(ref, port(1e-5), normal(2, 3, 8, 8), noted="bn", **EVAL)
    assert_fails(ref, port(1e-3), normal(2, 3, 8, 8), at="bn", cause="epsilon is 0.001, not 1e-05", **EVAL)


class NormAct(T.BatchNorm2d):
    """A norm that ends with its activation, as timm's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = T.Identity(), T.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


def with_norm(norm: T.Module, code, **more: T.Module) -> Ref:
    return Ref(code, conv=T.Conv2d(3, 6, 3, bias=False), bn=norm, **more, out=T.Conv2d(6, 2, 1))


def port_with_norm(norm: P.Layer, code) -> Port:
    return Port(code, conv=P.Conv2D(3, 6, 3, bias_attr=False), bn=norm, out=P.Conv2D(6, 2, 1))


ACTIVATED = {
    "inside, and a function of the port": (
        lambda: with_norm(NormAct(6), lambda m, x: m.out(m.bn(m.conv(x)))),
        lambda eps: port_with_norm(P.BatchNorm2D(6, epsilon=eps), lambda m, x: m.out(PF.silu(m.bn(m.conv(x))))),
    ),
    "behind what returns its input, and inside the port's": (
        lambda: with_norm(
            T.BatchNorm2d(6), lambda m, x: m.out(m.relu(m.drop(m.bn(m.conv(x))))), drop=T.Identity(), relu=T.ReLU()
        ),
        lambda eps: port_with_norm(P.BatchNorm(6, act="relu", epsilon=eps), lambda m, x: m.out(m.bn(m.conv(x)))),
    ),
}


@pytest.mark.parametrize(("ref", "port"), ACTIVATED.values(), ids=ACTIVATED.keys())
def test_an_activation_that_only_one_side_counts_to_the_norm(ref, port):
    assert_passes(ref(), port(1e-5), normal(2, 3, 8, 8), noted="bn", **EVAL)
    for modes in ("eval", "train"):
        assert_fails(
            ref(), port(1e-3), normal(2, 3, 8, 8), at="bn", cause="epsilon is 0.001, not 1e-05", modes=(modes,)
        )


def test_settings_of_a_block_at_fault_that_differ_are_said():
    ref = Ref(lambda m, x: m.block(x), block=Ref(lambda m, x: m.fc(torch.roll(x, m.shift, 1)), fc=T.Linear(6, 6)))
    port = Port(lambda m, x: m.block(x), block=Port(lambda m, x: m.fc(paddle.roll(x, m.shift, 1)), fc=P.Linear(6, 6)))
    ref.block.shift, port.block.shift = (2,), 3
    verdict = assert_fails(ref, port, normal(2, 6), at="block", **EVAL)
    assert "its shift is 3, the reference's 2" in verdict.location.proof


def test_what_does_not_leave_a_block_that_differs_in_a_statistic_alone():
    """Paddle's running variance; that the activation is inside the norm is not blamed for it."""
    ref = with_norm(T.BatchNorm2d(6), lambda m, x: m.out(TF.relu(m.bn(m.conv(x)))))
    port = port_with_norm(P.BatchNorm(6, act="relu"), lambda m, x: m.out(m.bn(m.conv(x))))
    verdict = assert_fails(ref, port, normal(2, 3, 8, 8), at="bn", cause="the running variance is the biased one")
    assert [(one.phase, one.also) for one in [verdict.location]] == [("buffers", [])]
    assert {row.item.name for row in verdict.rows if row.status == FAIL} == {"bn.running_var"}


@pytest.mark.parametrize("saved_here", [True, False])
def test_a_buffer_that_one_side_saves(saved_here):
    places = [3, 0, 4, 1]
    ref = Ref(lambda m, x: m.fc(x[:, m.picked]), fc=T.Linear(4, 3))
    ref.register_buffer("picked", torch.tensor(places), persistent=saved_here)
    port = Port(lambda m, x: m.fc(paddle.index_select(x, m.picked, axis=1)), fc=P.Linear(4, 3))
    port.register_buffer("picked", paddle.to_tensor(places), persistable=not saved_here)
    assert_passes(ref, port, normal(3, 5), noted="picked")


TU, PU = T.utils, P.utils
NORMED = {
    "weight norm": (lambda: TU.weight_norm(T.Conv2d(3, 4, 3)), lambda: PU.weight_norm(P.Conv2D(3, 4, 3)), (2, 3, 6, 6)),
    "weight norm, parametrized": (
        lambda: TU.parametrizations.weight_norm(T.Conv2d(3, 4, 3)),
        lambda: PU.weight_norm(P.Conv2D(3, 4, 3)),
        (2, 3, 6, 6),
    ),
    "weight norm of a linear layer": (
        lambda: TU.weight_norm(T.Linear(6, 4)),
        lambda: PU.weight_norm(P.Linear(6, 4), dim=1),
        (3, 6),
    ),
    "spectral norm": (lambda: TU.spectral_norm(T.Linear(6, 4)), lambda: PU.spectral_norm(P.Linear(6, 4)), (3, 6)),
    "spectral norm, parametrized": (
        lambda: TU.parametrizations.spectral_norm(T.Conv2d(3, 4, 3)),
        lambda: PU.spectral_norm(P.Conv2D(3, 4, 3)),
        (2, 3, 6, 6),
    ),
}


@pytest.mark.parametrize(("layer", "port_layer", "shape"), NORMED.values(), ids=NORMED)
def test_weights_that_are_normed(layer, port_layer, shape):
    """Evaluated: how often the vectors of a spectral norm are moved on is the framework's own."""
    assert_passes(T.Sequential(layer(), T.Tanh()), P.Sequential(port_layer(), P.Tanh()), normal(*shape), **EVAL)


# What a model may return.

UNUSUAL = {
    "one axis": (lambda y: y.sigmoid().sum(1), lambda y: PF.tanh(y).sum(1)),
    "a number": (lambda y: y.abs().mean(), lambda y: (y**2).mean()),
    "whole numbers": (lambda y: y.argmax(1), lambda y: y.argmin(1)),
    "complex numbers": (torch.fft.fft, lambda y: 2 * paddle.fft.fft(y) * y[:, :1]),
}


@pytest.mark.parametrize(("end", "port_end"), UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_output_that_differs(end, port_end):
    ref = Ref(lambda m, x: end(m.fc(x)), fc=T.Linear(5, 7))
    assert_fails(ref, Port(lambda m, x: port_end(m.fc(x)), fc=P.Linear(5, 7)), normal(3, 5), at="")


@dataclass
class Found:
    boxes: Any
    scores: Any = None


def test_dataclasses():
    def code(m, x):
        found = m.inner(x)
        return Found(m.refine(found.boxes), found.scores)

    def port(shift: float) -> Port:
        inner = Port(lambda m, x: Found(m.box(x), m.score(x) + shift), box=P.Linear(6, 4), score=P.Linear(6, 2))
        return Port(code, inner=inner, refine=P.Linear(4, 4))

    inner = Ref(lambda m, x: Found(m.box(x), m.score(x)), box=T.Linear(6, 4), score=T.Linear(6, 2))
    ref = Ref(code, inner=inner, refine=T.Linear(4, 4))
    assert "inner" in compared(assert_passes(ref, port(0.0), normal(3, 6)))
    assert_fails(ref, port(0.1), normal(3, 6), at="inner")


# Recurrence.


def looped(m, x):
    x, h = m.pre(x), torch.zeros(x.shape[0], 6)
    c = h
    for t in range(x.shape[1]):
        if isinstance(m.cell, T.LSTMCell):
            h, c = m.cell(x[:, t], (h, c))
        else:
            h = m.cell(x[:, t], h)
    return m.out(h)


def port_looped(m, x):
    x, h = m.pre(x), paddle.zeros([x.shape[0], 6])
    c = h
    for t in range(x.shape[1]):
        if isinstance(m.cell, P.LSTMCell):
            _, (h, c) = m.cell(x[:, t], (h, c))
        else:
            _, h = m.cell(x[:, t], h)
    return m.out(h)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell"])
def test_cells(kind):
    def port(eps: float) -> Port:
        pre = P.Sequential(P.Linear(4, 5), P.LayerNorm(5, eps))
        return Port(port_looped, pre=pre, cell=getattr(P, kind)(5, 6), out=P.Linear(6, 2))

    pre = T.Sequential(T.Linear(4, 5), T.LayerNorm(5))
    ref = Ref(looped, pre=pre, cell=getattr(T, kind)(5, 6), out=T.Linear(6, 2))
    assert_passes(ref, port(1e-5), normal(3, 4, 4))
    assert_fails(ref, port(1e-3), normal(3, 4, 4), at="pre.1", cause="epsilon")


def test_packed_sequences():
    def packed(m, x, lengths):
        y = m.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]
        return m.fc(torch.tanh(m.mid(y[-1])))

    def port(known: bool) -> Port:
        def code(m, x, lengths):
            y = m.rnn(x, sequence_length=lengths if known else None)[1]
            return m.fc(paddle.tanh(m.mid(y[-1])))

        return Port(code, rnn=P.GRU(4, 6), mid=P.Linear(6, 6), fc=P.Linear(6, 2))

    ref = Ref(packed, rnn=T.GRU(4, 6, batch_first=True), mid=T.Linear(6, 6), fc=T.Linear(6, 2))
    inputs = normal(3, 6, 4), np.array([4, 6, 2])
    assert {"rnn", "mid", "fc"} <= compared(assert_passes(ref, port(True), *inputs))
    assert_fails(ref, port(False), *inputs, at="")


# Weights that the probe finds for layers it can measure little of.


@pytest.mark.parametrize("weights", ["probe", "reference"])
def test_a_recurrence_by_hand_from_a_zero_state(weights):
    def code(m, x):
        h = x.new_zeros(x.shape[0], 5)
        for step in x.unbind(1):
            h = torch.sigmoid(m.hidden(h) + m.inp(step))
        return m.out(h)

    def port_code(m, x):
        h = paddle.zeros([x.shape[0], 5])
        for step in x.unbind(1):
            h = PF.sigmoid(m.hidden(h) + m.inp(step))
        return m.out(h)

    ref = Ref(code, inp=T.Linear(4, 5), hidden=T.Linear(5, 5), out=T.Linear(5, 2))
    port = Port(port_code, inp=P.Linear(4, 5), hidden=P.Linear(5, 5), out=P.Linear(5, 2))
    assert_passes(ref, port, normal(3, 4, 4), weights=weights)


def test_a_layer_of_one_number():
    assert_passes(T.Linear(6, 1), P.Linear(6, 1), normal(1, 6))


def test_raw_parameters_behind_a_fault():
    def block(m, x):
        return x + m.s2 * torch.sigmoid(m.b(x + m.s1 * m.a(x)))

    def port_block(m, x):
        return x + m.scale_b * PF.sigmoid(m.b(x + m.scale_a * m.a(x)))

    def port(late: bool) -> Port:
        inner = Port(port_block)
        for name in ("scale_b", "scale_a"):
            setattr(inner, name, inner.create_parameter([6], default_initializer=P.initializer.Constant(1.0)))
        inner.a, inner.b = P.Linear(6, 6), P.Linear(6, 6)
        code = (lambda m, x: m.block(m.inp(x)) + m.place) if late else (lambda m, x: m.block(m.inp(x) + m.place))
        whole = Port(code, inp=P.Linear(4, 6), block=inner)
        whole.place = whole.create_parameter([5, 6])
        return whole

    def scale() -> T.Parameter:
        return T.Parameter(torch.ones(6))

    inner = Ref(block, a=T.Linear(6, 6), s1=scale(), b=T.Linear(6, 6), s2=scale())
    ref = Ref(
        lambda m, x: m.block(m.inp(x) + m.place), inp=T.Linear(4, 6), place=T.Parameter(torch.randn(5, 6)), block=inner
    )
    assert_passes(ref, port(late=False), normal(2, 5, 4))
    assert_fails(ref, port(late=True), normal(2, 5, 4), at="")


# Randomness, and modes.


def test_what_is_dropped_by_sample_is_judged_the_same_each_time():
    def drop(m, x):
        if not m.training:
            return m.b(m.a(x))
        keep = torch.empty(x.shape[0], 1).bernoulli_(0.9).to(x.dtype)
        return m.b(m.a(x) * keep / 0.9)

    def port_drop(m, x):
        if not m.training:
            return m.b(m.a(x))
        keep = paddle.bernoulli(paddle.full([x.shape[0], 1], 0.9)).astype(x.dtype)
        return m.b(m.a(x) * keep / 0.9)

    found = set()
    for _ in range(8):
        ref, port = Ref(drop, a=T.Linear(4, 5), b=T.Linear(5, 3)), Port(port_drop, a=P.Linear(4, 5), b=P.Linear(5, 3))
        found.add(align(ref, port, [normal(2, 4)]).status)
    assert len(found) == 1 and FAIL not in found


def test_a_mode_that_is_not_asked_for_need_not_run():
    layers = T.Linear(5, 4), T.BatchNorm1d(4), T.Tanh()
    port_layers = P.Linear(5, 4), P.BatchNorm1D(4), P.Tanh()
    assert_passes(T.Sequential(*layers), P.Sequential(*port_layers), normal(1, 5), **EVAL)

    def auxiliary(m, x):
        y = m.conv(x)
        return (m.head(y.mean((2, 3))), m.aux(y)) if m.training else m.head(y.mean((2, 3)))

    ref = Ref(auxiliary, conv=T.Conv2d(3, 4, 3), head=T.Linear(4, 2), aux=T.Conv2d(4, 2, 9))
    port = Port(auxiliary, conv=P.Conv2D(3, 4, 3), head=P.Linear(4, 2), aux=P.Conv2D(4, 2, 9))
    assert_passes(ref, port, normal(2, 3, 6, 6), **EVAL)


# Structure.


def test_a_projection_too_many_is_named():
    def unit(inputs: int, outputs: int, size: int) -> T.Module:
        return T.Sequential(T.Conv2d(inputs, outputs, size, padding=size // 2, bias=False), T.GroupNorm(2, outputs))

    def port_unit(inputs: int, outputs: int, size: int) -> P.Layer:
        conv = P.Conv2D(inputs, outputs, size, padding=size // 2, bias_attr=False)
        return P.Sequential(conv, P.GroupNorm(2, outputs))

    ref = Ref(
        lambda m, x: m.tail(m.start(x) + m.two(torch.relu(m.one(m.start(x))))),
        start=unit(3, 6, 3),
        one=unit(6, 6, 3),
        two=unit(6, 6, 3),
        tail=T.Sequential(unit(6, 6, 3), unit(6, 6, 3)),
    )
    port = Port(
        lambda m, x: m.end(m.shortcut(m.stem(x)) + m.conv2(PF.relu(m.conv1(m.stem(x))))),
        stem=port_unit(3, 6, 3),
        conv1=port_unit(6, 6, 3),
        conv2=port_unit(6, 6, 3),
        shortcut=port_unit(6, 6, 1),
        end=P.Sequential(port_unit(6, 6, 3), port_unit(6, 6, 3)),
    )
    verdict = align(ref, port, [normal(2, 3, 6, 6)])
    assert verdict.status == FAIL
    failed = [row.name for row in verdict.rows if row.status == FAIL]
    assert failed and all("shortcut" in name for name in failed), failed


def test_outputs_under_other_keys_are_asked_for():
    def code(first: str, second: str):
        return lambda m, x: {first: m.a(x), second: m.b(x)}

    ref = Ref(code("boxes", "scores"), a=T.Linear(4, 3), b=T.Linear(4, 3))
    port = Port(code("y", "x"), a=P.Linear(4, 3), b=P.Linear(4, 3))
    verdict = align(ref, port, [normal(4, 4)])
    assert verdict.status == REFUSED
    assert "the reference returns boxes, scores and the port x, y: say which is which" in verdict.refusal
    assert align(ref, port, [normal(4, 4)], outputs={"boxes": "y", "scores": "x"}).status == PASS
    exchanged = {"boxes": "x", "scores": "y"}
    verdict = align(ref, port, [normal(4, 4)], outputs=exchanged)
    assert verdict.status == REFUSED and "with the lines a: a; b: b or a: b; b: a" in verdict.refusal
    verdict = align(ref, port, [normal(4, 4)], outputs=exchanged, names={"a": "a", "b": "b"})
    assert verdict.status == FAIL and verdict.location.name == ""


TABLE = np.sin(np.arange(20, dtype=np.float32) * np.float32(0.7)).reshape(4, 5)


def table_of(ulps: int) -> np.ndarray:
    return (TABLE.view(np.int32) + ulps).view(np.float32)


def test_float32_data_in_the_code_are_judged_with_the_limits_of_float32():
    ref = Ref(lambda m, x: m.a(x + torch.from_numpy(TABLE)), a=T.Linear(5, 3))

    def port(table: np.ndarray) -> Port:
        return Port(lambda m, x: m.a(x + paddle.to_tensor(table)), a=P.Linear(5, 3))

    assert_passes(ref, port(table_of(1)), normal(4, 5), noted="float32 data come in at the model itself")
    assert_fails(ref, port(TABLE + np.float32(1e-3)), normal(4, 5), at="")


def test_infinities_between_modules_are_left_out():
    class RefScores(T.Linear):
        def forward(self, x):
            return (super().forward(x) @ x.mT).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)

    class PortScores(P.Linear):
        def forward(self, x):
            hidden = paddle.triu(paddle.ones([5, 5]), 1).astype("bool")
            return (super().forward(x) @ x.transpose([0, 2, 1])).masked_fill(hidden, -float("inf"))

    ref = Ref(lambda m, x: m.scores(x).softmax(-1) @ x, scores=RefScores(3, 3))
    port = Port(lambda m, x: PF.softmax(m.scores(x), -1) @ x, scores=PortScores(3, 3))
    assert_passes(ref, port, normal(2, 5, 3), noted="not finite, a mask perhaps: scores")


def test_what_is_not_recorded_is_said():
    class Box:
        __slots__ = ("value",)

        def __init__(self, value: Any) -> None:
            self.value = value

    ref = Ref(
        lambda m, x: m.b(m.boxed(x).value), boxed=Ref(lambda m, x: Box(m.a(x)), a=T.Linear(4, 3)), b=T.Linear(3, 2)
    )
    port = Port(
        lambda m, x: m.b(m.boxed(x).value), boxed=Port(lambda m, x: Box(m.a(x)), a=P.Linear(4, 3)), b=P.Linear(3, 2)
    )
    noted = "not recorded of the reference: boxed: it returns a Box, in which no tensor is found"
    assert_passes(ref, port, normal(4, 4), noted=noted)


@pytest.mark.parametrize("rows", [8, 40_000])
def test_a_table_of_another_formula_is_not_taken(rows):
    """Also where it has so many rows that the rounding of its arguments alone would allow for it."""
    table = np.sin(np.arange(rows, dtype=np.float32) * np.float32(0.1))

    class RefTable(T.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.from_numpy(table), persistent=False)
            self.a = T.Linear(8, 3)

        def forward(self, x):
            return self.a(x + self.table[-8:])

    class PortTable(P.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", paddle.to_tensor(table * np.float32(1.01)), persistable=False)
            self.a = P.Linear(8, 3)

        def forward(self, x):
            return self.a(x + self.table[-8:])

    assert_fails(RefTable(), PortTable(), normal(4, 8), at="")


def through_weights(m, x):
    return m.linear(x)


def without_weights(m, x):
    return x @ x.T


@pytest.mark.parametrize("start", [through_weights, without_weights])
def test_rounding_that_float32_does_not_show_is_measured_in_float64(start):
    layers, ports = ({"linear": lib.Linear(32, 32)} for lib in (T, P))

    def port(factor: float) -> Port:
        return Port(chaotic(factor, paddle.sin, start), **ports)

    ref, options = Ref(chaotic(20.1, torch.sin, start), **layers), {"precisions": ("float64",), **EVAL}
    verdict = assert_passes(ref, port(20.1), normal(64, 32), **options)
    widened = [row for row in verdict.rows if row.widened_by == "perturbed"]
    assert {row.item.kind for row in widened} >= {"output"} and all(0 < row.hidden < 1e-14 for row in widened)
    assert_fails(ref, port(20.1 + 1e-8), normal(64, 32), at="", **options)


class OwnNorm(P.Layer):
    """Over all but the batch, written by hand."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (self.create_parameter([4, 16, 16], is_bias=zero) for zero in (False, True))

    def forward(self, x):
        x = x - x.mean([1, 2, 3], keepdim=True)
        return x / paddle.sqrt((x**2).mean([1, 2, 3], keepdim=True) + 1e-5) * self.weight + self.bias


@pytest.mark.parametrize("norms", [(T.BatchNorm2d(4), own_batch_norm()), (T.LayerNorm([4, 16, 16]), OwnNorm())])
def test_means_that_are_added_up_one_number_after_the_other(norms):
    """Paddle's over several axes are; of 1,024 numbers around 10 they are off by some 10 units roundoff."""
    ref = Ref(lambda m, x: m.last(m.norm(x).mean((2, 3))), norm=norms[0], last=T.Linear(4, 3))
    port = Port(lambda m, x: m.last(m.norm(x).mean([2, 3])), norm=norms[1], last=P.Linear(4, 3))
    assert_passes(ref, port, normal(4, 4, 16, 16) + np.float32(10))


def test_a_block_whose_rounding_float32_does_not_show_is_not_blamed_for_a_fault_elsewhere():
    block = Ref(chaotic(20.1, torch.sin, through_weights), linear=T.Linear(32, 32))
    port_block = Port(chaotic(20.1, paddle.sin, through_weights), linear=P.Linear(32, 32))
    ref = Ref(lambda m, x: (m.block(x), m.norm(x)), block=block, norm=T.LayerNorm(32))
    port = Port(lambda m, x: (m.block(x), m.norm(x)), block=port_block, norm=P.LayerNorm(32, epsilon=1e-3))
    verdict = assert_fails(
        ref, port, normal(64, 32), at="norm", cause="epsilon is 0.001", precisions=("float64",), **EVAL
    )
    assert not verdict.location.also


def test_outputs_of_train_mode_alone_are_sent_back():
    """An auxiliary head, which train mode has: what comes back from it is judged, too."""

    def code(is_cut, m, x):
        y = m.a(x)
        return (m.o(y), m.aux(y.detach() if is_cut else y)) if m.training else m.o(y)

    for is_cut in (False, True):
        ref = Ref(partial(code, False), a=T.Linear(5, 6), aux=T.Linear(6, 3), o=T.Linear(6, 4))
        port = Port(partial(code, is_cut), a=P.Linear(5, 6), aux=P.Linear(6, 3), o=P.Linear(6, 4))
        recorded = record(ref, [normal(4, 5)])
        for verdict in (align(ref, port, [normal(4, 5)]), judge(port, recorded)):
            assert verdict.status == (FAIL if is_cut else PASS), str(verdict)
            assert "train mode, float64/gradient/aux.weight" in {row.name for row in verdict.rows}
            assert not is_cut or (verdict.location.name, verdict.location.phase) == ("", "backward")


@pytest.mark.parametrize("epsilon", [1e-6, 1e-5])
def test_a_table_in_float32_hides_no_fault_of_a_block(epsilon):
    """The port holds a table in float32, so limits of the whole are wide; a block alone has it not."""

    class Block(T.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = T.Linear(6, 6)

        def forward(self, x):
            return x + self.l(TF.layer_norm(x, (6,), eps=1e-6))

    class PortBlock(P.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.l = P.Linear(6, 6)

        def forward(self, x):
            return x + self.l(PF.layer_norm(x, [6], epsilon=epsilon))

    def code(m, t):
        angles = t[:, None] * 1000.0 * torch.exp(-torch.arange(3, dtype=t.dtype))
        return m.o(m.block(m.a(torch.cat([angles.cos(), angles.sin()], -1))))

    def port_code(m, t):
        angles = t.unsqueeze(1) * 1000.0 * m.table.astype(t.dtype)
        return m.o(m.block(m.a(paddle.concat([angles.cos(), angles.sin()], -1))))

    ref = Ref(code, a=T.Linear(6, 6), block=Block(), o=T.Linear(6, 3))
    port = Port(port_code, a=P.Linear(6, 6), block=PortBlock(), o=P.Linear(6, 3))
    port.register_buffer("table", paddle.exp(-paddle.arange(3).astype("float32")), persistable=False)
    verdict = align(ref, port, [normal(4)])
    assert verdict.status == (PASS if epsilon == 1e-6 else FAIL), str(verdict)
    assert epsilon == 1e-6 or verdict.location.name == "block"


@pytest.mark.parametrize(("name", "low", "high"), [("elu", -1e-3, 1e-3), ("selu", -1e-3, 1e-3), ("mish", -20, -12)])
def test_a_function_whose_kernel_loses_digits(name, low, high):
    """PaddlePaddle's takes 1 from exp(x), or adds 1 to it: of 1e-3 it keeps 4 digits of 7."""
    x = np.random.default_rng(0).uniform(low, high, (8, 16)).astype(np.float32)
    block = Ref(lambda m, x: getattr(TF, name)(m.weight * x), weight=T.Parameter(torch.ones(16)))
    port_block = Port(lambda m, x: getattr(PF, name)(m.weight * x), weight=paddle.create_parameter([16], "float32"))
    assert_passes(Ref(lambda m, x: m.block(x), block=block), Port(lambda m, x: m.block(x), block=port_block), x)


@pytest.mark.parametrize("extra", [0.0, 40.0])
def test_a_tie_on_other_inputs_is_a_note(extra):
    """Rolled, two values are the largest: the port takes the last of them, 2 places away. 8 times as much is no tie."""
    x = normal(2, 5, 6)
    x[:, [1, 3], 3] = 4.0

    def code(m, x):
        return m.out(m.block(x)[:, -1]) + x[:, :, :1].argmax(1)

    def port_code(m, x):
        scores = x[:, :, 0]
        place = 4 - scores.flip(1).argmax(1, keepdim=True)
        count = (scores == scores.max(1, keepdim=True)).astype(x.dtype).sum(1, keepdim=True)
        return m.out(m.block(x)[:, -1]) + place.astype(x.dtype) + extra * (count - 1)

    ref, port = last_of(lambda x: paddle.concat([x[:, :-1], 0 * x[:, -1:]], axis=1))
    ref.code, port.code = code, port_code
    if not extra:
        noted = "the outputs differ on other inputs (floats rolled by 3 along axis 2, input 0), where a last digit"
        assert_passes(ref, port, x, noted=noted, **EVAL)
    else:
        verdict = assert_fails(ref, port, x, at="block", **EVAL)
        assert any("differ on others: floats rolled by 3 along axis 2, input 0" in note for note in verdict.notes)


def test_only_floats_are_changed_in_other_inputs():
    given = {"x": normal(2, 6), "labels": np.arange(12).reshape(2, 6), "mask": np.arange(12).reshape(2, 6) % 3 > 0}
    others = [inputs for _, inputs in other_inputs(given)]
    assert len(others) == 5 and all(not np.array_equal(each["x"], given["x"]) for each in others)
    assert all(each[name] is given[name] for each in others for name in ("labels", "mask"))
    assert not list(other_inputs([given["labels"], np.float32(2).astype(int)]))


def test_arithmetic_on_arrays_without_axes_gives_arrays():
    scalar, truth = np.asarray(2.0, np.float32), np.asarray(True)
    call = ModuleCall("", 0, args=(scalar, truth), outputs=[scalar], reached=[np.packbits([True])])
    changed = [inputs for _, inputs in other_inputs([scalar])][0]
    attempt = Attempt(Question(call, "float64", False), call)
    found = [*changed, *moved_call(call).args, *with_opposite_masks(attempt).port_call.args]
    found += call.with_upstream().upstream
    found += [moved_by_rounding(scalar, np.random.default_rng(0)), *drawn_cotangents({True: [scalar + 1j]}, 0)[True]]
    assert all(isinstance(array, np.ndarray) for array in found), found


def test_a_block_that_gets_a_tensor_without_axes_is_run_again():
    """Its gradient differs there, which a run with moved inputs tells from one at a kink."""
    block = Ref(lambda m, x, size: m.a(x) * size, a=T.Linear(4, 4))
    port_block = Port(lambda m, x, size: m.a(x) * size.detach(), a=P.Linear(4, 4))
    ref = Ref(lambda m, x: m.out(m.block(x, x.mean())), block=block, out=T.Linear(4, 2))
    port = Port(lambda m, x: m.out(m.block(x, x.mean())), block=port_block, out=P.Linear(4, 2))
    verdict = assert_fails(ref, port, normal(3, 4), at="block")
    assert verdict.location.phase == "backward"


# What a trial lacks.


def lacking(is_lacking: Any) -> Any:
    """A layer that needs more memory than there is for some inputs, or where it runs alone."""

    def code(m, x):
        if is_lacking(m, x):
            raise MemoryError("of a kernel")
        return x * m.weight

    return code


def test_what_the_machine_lacks_for_a_module_alone_ends_that_run_alone():
    def port_code(m, x):
        m.act.is_inside = True
        found = m.out(m.act(x))
        m.act.is_inside = False
        return found

    alone = lacking(lambda m, x: not m.is_inside)
    act = Ref(lambda m, x: x * m.weight, weight=T.Parameter(torch.ones(4)))
    port_act = Port(alone, weight=paddle.create_parameter([4], "float32"), is_inside=False)
    ref = Ref(lambda m, x: m.out(m.act(x)), act=act, out=T.Linear(4, 2))
    port = Port(port_code, act=port_act, out=P.Linear(4, 2))
    assert_passes(ref, port, normal(3, 4), noted="not run alone in float32: act: MemoryError: of a kernel")


def test_what_the_machine_lacks_for_other_inputs_ends_that_trial_alone():
    ref, port = last_of(lambda x: paddle.concat([x[:, :-1], 0 * x[:, -1:]], axis=1))
    x, inner = normal(2, 5, 6), ref.code

    def code(m, given):
        if float(given.max()) > 2 * x.max():
            raise MemoryError("of a kernel")
        return inner(m, given)

    ref.code = code
    assert_passes(ref, port, x, noted="of which nothing comes", **EVAL)


# Numbers that were taken from float32 tensors.


@pytest.mark.parametrize(("off", "is_right"), [(0, True), (5e-7, False)])
def test_a_number_of_a_float32_tensor_may_be_exact_on_the_other_side(off, is_right):
    """It is rounded by up to 6e-8 of itself, and 8 times that is allowed, as for a table."""
    ref = Ref(lambda m, x: TF.softplus(m.a(x)) - m.shift, a=T.Linear(4, 3), shift=torch.log(torch.tensor(2.0)).item())
    port = Port(lambda m, x: PF.softplus(m.a(x)) - m.shift, a=P.Linear(4, 3), shift=float(np.log(2)) + off)
    verdict = align(ref, port, [normal(3, 4)])
    assert verdict.status == (PASS if is_right else FAIL), str(verdict)
    assert "held in float32 by one side only, and limits allow for its rounding: shift" in verdict.notes
    ref.shift = float(np.log(2)) + 3e-9  # no number of float32: then nothing is allowed
    assert align(ref, port, [normal(3, 4)]).status == FAIL


# A part of a joined tensor of which nothing comes.


@pytest.mark.parametrize("is_ref", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_part_of_a_joined_tensor_without_a_gradient(is_ref, is_cut):
    """Zeros on one side and none on the other are alike; a gradient and none are not."""

    def apart(m, x):
        m.b(x)
        linear = TF.linear if isinstance(m, Ref) else PF.linear
        return m.o(linear(x, m.a.weight.detach(), m.a.bias.detach()) if is_cut else m.a(x))

    def joined(m, x):
        return m.o(m.ab(x)[:, :3])

    def children(module: Any) -> tuple[dict, dict]:
        own = {"o": module.Linear(3, 2)}
        return {"a": module.Linear(4, 3), "b": module.Linear(4, 3), **own}, {"ab": module.Linear(4, 6), **own}

    (ref_apart, ref_joined), (port_apart, port_joined) = children(T), children(P)
    pair = (Ref(apart, **ref_apart), Port(joined, **port_joined))
    pair = pair if is_ref else (Ref(joined, **ref_joined), Port(apart, **port_apart))
    assert align(*pair, [normal(3, 4)]).status == (FAIL if is_cut else PASS)


# Outputs that are no tensors, and tensors of another precision.


def returning(linear: type, beside: Any) -> Any:
    """A linear layer that also returns what `beside` makes of its output."""

    class Both(linear):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "beside": beside(y)}

    return Both(5, 5)


@pytest.mark.parametrize(
    ("beside", "same", "other"),
    [
        (lambda y: "cat", lambda y: "cat", lambda y: "dog"),
        (lambda y: True, lambda y: np.bool_(True), lambda y: False),
        (len, lambda y: y.shape[0], lambda y: y.shape[1]),
        (lambda y: y.sum().item(), lambda y: float(y.sum()), lambda y: float(y.sum()) * 1.001),
        (lambda y: y.detach().numpy().argmax(1), lambda y: y.numpy().argmax(1), lambda y: y.numpy().argmin(1)),
        (lambda y: np.array(["a", "b"]), lambda y: np.array(["a", "b"]), lambda y: np.array(["a", "c"])),
        (lambda y: [y, 1.5], lambda y: [y, 1.5], lambda y: [y]),
    ],
)
def test_outputs_that_are_no_tensors_are_compared(beside, same, other, tmp_path):
    x = normal(4, 5)
    record(returning(T.Linear, beside), [x], modes=["eval"]).save(tmp_path / "it.ref.safetensors")
    assert judge(returning(P.Linear, same), tmp_path / "it.ref.safetensors").status == PASS
    verdict = align(returning(T.Linear, beside), returning(P.Linear, other), [x], **EVAL)
    assert verdict.status == FAIL and verdict.first_failure.name.startswith("eval mode, float64/output[beside]")


def test_weights_of_another_precision_fail():
    x = normal(4, 5)
    assert_passes(T.Linear(5, 3).double(), P.Linear(5, 3).to(dtype="float64"), x, **EVAL)
    verdict = align(T.Linear(5, 3), P.Linear(5, 3).to(dtype="float64"), [x], **EVAL)
    assert verdict.status == FAIL and verdict.first_failure.reason == "dtype: reference float32, port float64"
