"""Branches of operations: which the reference enters, what is done to enter more, and what reports say of the rest."""

import paddle
import pytest
import torch
from toy_pairs import Port, Ref, assert_aligned, normal

from portproof import align, judge, ladder, record
from portproof.compare import FAIL, PASS

T, P, TF, PF = torch.nn, paddle.nn, torch.nn.functional, paddle.nn.functional
X = normal(4, 8)


def both(code, port_code, **scales):
    """Two linear layers, with `code(m, hidden)` between them; `scales` are parameters of one number."""

    def around(inner):
        return lambda m, x: m.b(inner(m, m.a(x)))

    ref = Ref(around(code), a=T.Linear(8, 8), b=T.Linear(8, 8))
    port = Port(around(port_code), a=P.Linear(8, 8), b=P.Linear(8, 8))
    for name, value in scales.items():
        setattr(ref, name, T.Parameter(torch.tensor(value)))
        setattr(port, name, port.create_parameter([]))
    return ref, port


# (reference, port, port with another constant, which probe weights did not reach before)
REACHED = {
    "a quantizer's levels": (
        lambda m, x: (x * 4).round().clamp(-64, 63) / 4,
        lambda m, x: (x * 4).round().clip(-64, 63) / 4,
        lambda m, x: (x * 4).round().clip(-64, 60) / 4,
    ),
    "a clip before exp": (
        lambda m, x: torch.exp(torch.clip(x, -10, 10)) / 100,
        lambda m, x: paddle.exp(paddle.clip(x, -10, 10)) / 100,
        lambda m, x: paddle.exp(paddle.clip(x, -10, 9)) / 100,
    ),
    "in place": (lambda m, x: x.clamp_(-9, 9), lambda m, x: x.clip(-9, 9), lambda m, x: x.clip(-8, 9)),
    "where": (
        lambda m, x: torch.where(x > 12, x * 2, x),
        lambda m, x: paddle.where(x > 12, x * 2, x),
        lambda m, x: paddle.where(x > 13, x * 2, x),
    ),
    "masked_fill": (
        lambda m, x: x.masked_fill(x < -14, 0.0),
        lambda m, x: paddle.where(x < -14, paddle.zeros_like(x), x),
        lambda m, x: x,
    ),
    "minimum": (
        lambda m, x: torch.minimum(x, torch.full_like(x, 30.0)),
        lambda m, x: paddle.minimum(x, paddle.full_like(x, 30.0)),
        lambda m, x: paddle.minimum(x, paddle.full_like(x, 31.0)),
    ),
    "maximum, as max": (
        lambda m, x: torch.max(x, torch.tensor(-20.0)),
        lambda m, x: paddle.maximum(x, paddle.to_tensor(-20.0, x.dtype)),
        lambda m, x: x,
    ),
    "relu6 of small numbers": (
        lambda m, x: TF.relu6(x * 0.1),
        lambda m, x: PF.relu6(x * 0.1),
        lambda m, x: PF.relu(x * 0.1),
    ),
}


@pytest.mark.parametrize(("code", "right", "wrong"), REACHED.values(), ids=REACHED)
def test_a_branch_far_from_all_values_is_entered(code, right, wrong):
    verdict = assert_aligned(*both(code, right), X)
    assert str(verdict).endswith("items within their limits")
    assert align(*both(code, wrong), [X]).status == FAIL


def test_a_relu_of_a_parameter_gets_both_signs():
    """Weights of a sum, which start at 1: a port that takes their absolute values is wrong."""

    def pair(positive):
        ref = Ref(lambda m, x: m.a(x) * TF.relu(m.w) / (TF.relu(m.w).sum() + 1e-3), a=T.Linear(8, 3))
        port = Port(lambda m, x: m.a(x) * positive(m.w) / (positive(m.w).sum() + 1e-3), a=P.Linear(8, 3))
        ref.w, port.w = T.Parameter(torch.ones(3)), port.create_parameter([3])
        return ref, port

    assert_aligned(*pair(PF.relu), X)
    assert align(*pair(paddle.abs), [X]).status == FAIL


class OwnNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, correction=0) + 1e-5
        ).sqrt() * self.weight + self.bias


def own_norm_then_relu(port_relu):
    port = Port(lambda m, x: port_relu(m.norm(x)), norm=paddle.nn.LayerNorm(6, epsilon=1e-5))
    return Ref(lambda m, x: m.relu(m.norm(x)), norm=OwnNorm(), relu=torch.nn.ReLU()), port


def relu_before_a_product(port_relu):
    """The next module is a sigmoid, but it does not receive what the layer gives."""

    def code(m, x):
        return m.gate(TF.relu(m.a(x)) @ m.b.weight.T)

    def port_code(m, x):
        return m.gate(port_relu(m.a(x)) @ m.b.weight)

    ref = Ref(code, a=torch.nn.Linear(6, 4), b=torch.nn.Linear(4, 6, bias=False), gate=torch.nn.Sigmoid())
    layers = paddle.nn.Linear(6, 4), paddle.nn.Linear(4, 6, bias_attr=False)
    return ref, Port(port_code, a=layers[0], b=layers[1], gate=paddle.nn.Sigmoid())


def relu_of_few_values(port_relu):
    """As in a squeeze: a raw matrix, and one value for each feature and sample."""

    def code(m, x):
        return m.out(TF.relu(x.mean(1) @ m.weight))

    def port_code(m, x):
        return m.out(port_relu(m.first(x.mean(1))))

    weight = torch.nn.Parameter(torch.randn(6, 3))
    port = Port(port_code, first=paddle.nn.Linear(6, 3, bias_attr=False), out=paddle.nn.Linear(3, 2))
    return Ref(code, weight=weight, out=torch.nn.Linear(3, 2)), port


@pytest.mark.parametrize(
    ("make", "shape"), [(own_norm_then_relu, (3, 6)), (relu_before_a_product, (3, 6)), (relu_of_few_values, (2, 9, 6))]
)
def test_what_goes_into_an_activation_passes_its_bounds(make, shape):
    """The reference's has none at 6; ReLU6 is the likely mistake."""
    inputs = normal(*shape)
    assert_aligned(*make(PF.relu), inputs)
    assert align(*make(PF.relu6), [inputs]).status == FAIL


def last_of_a_block(port_relu):
    """Only the last token counts, and to the block's own inputs each adds a position.

    With this seed a value passes 6 that belongs to another token.
    """
    torch.manual_seed(5)
    paddle.seed(5)

    def code(m, x):
        return m.out(m.block(x + m.position)[:, -1])

    blocks = (
        Ref(lambda m, x: m.b(TF.relu(m.a(x))), a=torch.nn.Linear(6, 5), b=torch.nn.Linear(5, 6)),
        Port(lambda m, x: m.b(port_relu(m.a(x))), a=paddle.nn.Linear(6, 5), b=paddle.nn.Linear(5, 6)),
    )
    ref = Ref(code, block=blocks[0], out=T.Linear(6, 3))
    port = Port(code, block=blocks[1], out=P.Linear(6, 3))
    ref.position, port.position = T.Parameter(torch.randn(4, 6)), port.create_parameter([4, 6])
    return ref, port


def test_values_on_which_no_output_depends_prove_no_branch():
    x = normal(2, 4, 6) / 20  # the positions decide
    assert_aligned(*last_of_a_block(PF.relu), x)
    verdict = align(*last_of_a_block(PF.relu6), [x])
    assert verdict.status == FAIL and verdict.location.name == "block"


def test_a_relu_that_does_not_pass_6_is_no_branch_that_is_missing():
    pair = (
        Ref(lambda m, x: TF.relu(m.a(x).tanh()), a=torch.nn.Linear(6, 4)),
        Port(lambda m, x: PF.relu(paddle.tanh(m.a(x))), a=paddle.nn.Linear(6, 4)),
    )
    assert not any("not proved" in note for note in assert_aligned(*pair, normal(3, 6)).notes)


def scaled(most, port_most):
    return both(
        lambda m, x: x * m.scale.exp().clamp(max=most),
        lambda m, x: x * m.scale.exp().clip(max=port_most),
        scale=2.6592,
    )


def test_a_logit_scales_maximum_is_passed_in_one_mode_and_not_in_the_other():
    """One number is on one side of its bound: train mode has another."""
    assert str(assert_aligned(*scaled(100.0, 100.0), X)).endswith("items within their limits")
    verdict = align(*scaled(100.0, 50.0), [X])
    assert verdict.status == FAIL and {row.item.mode for row in verdict.bad} == {"train"}
    one_mode = align(*scaled(100.0, 100.0), [X], modes=["eval"])
    assert str(one_mode).endswith("; 1 branch never entered")


@pytest.mark.parametrize("most", [100.0, 50.0])
def test_a_recording_has_both_modes_weights(most, tmp_path):
    record(scaled(100.0, most)[0], [X]).save(tmp_path / "net.safetensors")
    verdict = judge(scaled(100.0, most)[1], tmp_path / "net.safetensors")
    assert verdict.status == (PASS if most == 100.0 else FAIL)
    assert (
        str(verdict).splitlines()[-1].split(": ")[1]
        == str(align(*scaled(100.0, most), [X])).splitlines()[-1].split(": ")[1]
    )


def test_the_users_parameters_are_not_changed():
    ref, port = scaled(100.0, 100.0)
    before = {key: tensor.clone() for key, tensor in ref.state_dict().items()}
    align(ref, port, [X])
    assert all(torch.equal(tensor, before[key]) for key, tensor in ref.state_dict().items())
    assert ref.training and all(parameter.requires_grad for parameter in ref.parameters())


# (what the last line adds, what the note says)
NEVER = {
    "impossible": (
        lambda m, x: torch.sigmoid(x).clamp(0, 1),
        lambda m, x: PF.sigmoid(x).clip(0, 1),
        "; 2 branches never entered",
        "not proved, since no input enters it: the model itself: clamp, below 0; the model itself: clamp, above 1",
    ),
    "a norm's least": (
        lambda m, x: x / x.norm(dim=1, keepdim=True).clamp_min(1e-6),
        lambda m, x: x / x.norm(axis=1, keepdim=True).clip(min=1e-6),
        "; 1 branch never entered",
        "not proved, since no input enters it: the model itself: clamp_min, below 1e-06",
    ),
    "Python's if": (
        lambda m, x: x * 2 if x.sum() > 0 else x * 3,
        lambda m, x: x * 2 if x.sum() > 0 else x * 3,
        "",
        "branches that Python takes by a tensor's numbers (`if`, item()): not watched, in the model itself",
    ),
}


@pytest.mark.parametrize(("code", "port_code", "last", "note"), NEVER.values(), ids=NEVER)
def test_what_is_not_entered_is_said(code, port_code, last, note):
    verdict = assert_aligned(*both(code, port_code), X)
    assert str(verdict).endswith(f"items within their limits{last}") and note in verdict.notes


CONSTANT = {
    "a causal mask": (
        lambda m, x: torch.where(torch.ones(4, 8, dtype=torch.bool).tril(8), x, torch.zeros_like(x)),
        lambda m, x: x,
    ),
    "positions": (
        lambda m, x: x + torch.arange(8).clamp(max=99) * 0.1,
        lambda m, x: x + paddle.arange(8).astype(x.dtype) * 0.1,
    ),
    "the least number": (lambda m, x: torch.max(x, torch.tensor(torch.finfo(x.dtype).min)), lambda m, x: x),
    "no bound": (lambda m, x: x.clamp(-float("inf"), float("inf")), lambda m, x: x),
    "a zero-padded mask in a tensor that was made": (
        lambda m, x: x.masked_fill(torch.zeros_like(x) > 1, 0.0),
        lambda m, x: x,
    ),
}


@pytest.mark.parametrize(("code", "port_code"), CONSTANT.values(), ids=CONSTANT)
def test_what_constants_rule_out_does_not_count(code, port_code):
    assert str(assert_aligned(*both(code, port_code), X)).endswith("items within their limits")


def test_operations_on_whole_numbers_and_booleans():
    def code(m, x):
        low, first = (x > 1).int().clamp(0, 5), torch.minimum(x > 0, x > 1)
        return x + low + first

    def port_code(m, x):
        return x + (x > 1).astype(x.dtype) * 2

    verdict = assert_aligned(*both(code, port_code), X)
    assert str(verdict).endswith("; 3 branches never entered"), verdict.notes


def test_a_constant_that_an_input_is_written_into_counts():
    def code(m, x):
        mask = torch.zeros(4, 8)
        mask[:, :2] = x[:, :2]
        return torch.where(mask > 1e9, x * 2, x)

    assert str(align(*both(code, lambda m, x: x), [X])).endswith("; 1 branch never entered")


def test_inputs_are_moved_only_where_they_are_drawn():
    ref = Ref(lambda m, x: m.a(x.clamp(-10, 10)), a=T.Linear(8, 8))
    right, wrong = (Port(lambda m, x, most=most: m.a(x.clip(-10, most)), a=P.Linear(8, 8)) for most in (10, 9))
    assert str(align(ref, wrong, [X])).endswith("; 2 branches never entered")
    assert str(align(ref, right, [X], drawn=True)).endswith("items within their limits")
    assert align(ref, wrong, [X], drawn=True).status == FAIL


def test_a_rung_counts_them_too():
    verdict = ladder.forward(*both(*NEVER["impossible"][:2]), [X])
    assert str(verdict).endswith("items within their limits; 2 branches never entered")


def test_a_move_that_its_code_refuses_is_dropped():
    """A reference that raises for large values is judged with the weights that it had."""

    def code(m, x):
        if x.abs().max() > 40:
            raise ValueError("too large")
        return x.clamp(max=50)

    assert str(align(*both(code, lambda m, x: x.clip(max=50)), [X])).endswith("; 1 branch never entered")


def signs(eps: float, is_port: bool):
    """A norm of which only signs go on: with these weights nothing tells one epsilon from another."""
    if is_port:
        code = lambda m, x: m.head(paddle.sign(m.norm(m.fc(x))))  # noqa: E731
        return Port(code, fc=paddle.nn.Linear(6, 6), norm=paddle.nn.LayerNorm(6, eps), head=paddle.nn.Linear(6, 2))
    code = lambda m, x: m.head(torch.sign(m.norm(m.fc(x))))  # noqa: E731
    return Ref(code, fc=torch.nn.Linear(6, 6), norm=torch.nn.LayerNorm(6, eps), head=torch.nn.Linear(6, 2))


def test_a_module_on_whose_weights_no_output_depends_is_not_excused():
    assert_aligned(signs(1e-5, False), signs(1e-5, True), normal(4, 6))
    verdict = align(signs(1e-5, False), signs(1e-3, True), [normal(4, 6)])
    assert (verdict.status, verdict.location.name) == (FAIL, "norm"), str(verdict)
