"""A map that values confirm only in part: the last line says so, unless the whole proves it."""

import paddle
import pytest
import torch
from toy_pairs import Port, Ref, normal

from portproof import align
from portproof.commands import align as command
from portproof.compare import FAIL, PASS, REFUSED
from portproof.mapping import name_map

X = normal(4, 5)
F, PF = torch.nn.functional, paddle.nn.functional
UP_TO = "the map is confirmed up to layer 1 of 2"
SETTLE = "the map may be at fault where it is not confirmed: put these lines, as they should be, in a file for --map"


@pytest.fixture(autouse=True)
def no_gradients(monkeypatch, request):
    """As of a reference whose gradients tell nothing."""
    if "gradients" not in request.node.name:
        monkeypatch.setattr(name_map, "fingerprint", lambda *_: None)


def ref():
    return Ref(lambda m, x: m.b(2 * F.relu(m.a(x))), a=torch.nn.Linear(5, 5), b=torch.nn.Linear(5, 5, bias=False))


def port(between=1.0, behind=2.0, names=("c", "d")):
    """The factor 2 behind the last layer is as right as before it."""

    def code(m, x):
        first, second = (getattr(m, name) for name in names)
        return second(between * PF.relu(first(x))) * behind

    layers = paddle.nn.Linear(5, 5), paddle.nn.Linear(5, 5, bias_attr=False)
    return Port(code, **dict(zip(names, layers)))


def last(verdict):
    return str(verdict).splitlines()[-1]


def test_a_whole_that_passes_proves_the_rest():
    verdict = align(ref(), port(), [X])
    assert verdict.status == PASS and "confirmed by values up to layer 1 of 2" in verdict.notes[0], str(verdict)
    assert "the rest of the map is proved by the whole: outputs and all gradients agree in float64" in verdict.notes
    assert UP_TO not in last(verdict)


@pytest.mark.parametrize("options", [{"precisions": ("float32",)}, {"leave_out": ("a",)}])
def test_a_pass_that_does_not_prove_it(options):
    verdict = align(ref(), port(), [X], **options)
    assert verdict.status == PASS and last(verdict).endswith(f"; {UP_TO}"), str(verdict)
    assert SETTLE not in str(verdict)


def test_gradients_tell_what_calls_do_not():
    verdict = align(ref(), port(), [X])
    assert verdict.status == PASS and "by gradients, confirmed by values everywhere" in verdict.notes[0], str(verdict)


def test_a_map_confirmed_everywhere_needs_no_word():
    verdict = align(ref(), port(2.0, 1.0), [X])
    assert verdict.status == PASS and "the map is confirmed" not in str(verdict)


def test_a_failure_names_the_lines_that_decide():
    verdict = align(ref(), port(2.1, 1.0), [X])
    assert verdict.status == FAIL and last(verdict).endswith(f"; {UP_TO}"), str(verdict)
    assert "\n".join([SETTLE, "  a: c", "  b: d", last(verdict)]) in str(verdict)


def test_names_settle_it_too():
    verdict = align(ref(), port(2.1, 1.0, ("a", "b")), [X])
    assert verdict.status == FAIL and last(verdict).endswith(f"; {UP_TO}, and by name beyond"), str(verdict)
    verdict = align(ref(), port(2.1, 1.0), [X], names={"a": "c", "b": "d"})
    assert verdict.status == FAIL and last(verdict).endswith(f"; {UP_TO}, and by name beyond"), str(verdict)
    assert SETTLE not in str(verdict)


def test_tensors_that_do_not_fit():
    wide = Port(lambda m, x: m.d(m.c(x)), c=paddle.nn.Linear(5, 5), d=paddle.nn.Linear(5, 6, bias_attr=False))
    verdict = align(ref(), wide, [X])
    assert verdict.status == FAIL, str(verdict)
    assert last(verdict).endswith("; the map is confirmed by no values, since tensors do not fit")


def test_what_is_written_says_it(tmp_path, capsys):
    verdict = align(ref(), port(2.1, 1.0), [X])
    command.save_map(verdict.names, str(tmp_path / "names.yaml"), verdict.doubt)
    assert capsys.readouterr().out.endswith(f": 2 lines; {UP_TO}\n")


@pytest.mark.parametrize(
    ("names", "given", "rests_on"),
    [
        (("c", "d"), None, "order, type and shape"),
        (("a", "b"), None, "name"),
        (("c", "d"), {"a": "c", "b": "d"}, "name"),
    ],
)
def test_each_line_says_what_it_rests_on(names, given, rests_on):
    """The first layer is fed alike; no value behind it confirms its weights, nor the second's."""
    found = align(ref(), port(2.1, 1.0, names), [X], names=given).names
    lines = [f"{name}: {there}" for name, there in zip("ab", names)]
    assert name_map.map_text(found).splitlines() == [f"{line}  # by {rests_on} alone" for line in lines]
    assert command.map_lines(found)[1:3] == [f"  {line}, by {rests_on} alone" for line in lines]
    sure = align(ref(), port(2.0, 1.0, names), [X], names=given).names
    assert name_map.map_text(sure).splitlines() == lines and command.map_lines(sure)[1:3] == [
        f"  {line}" for line in lines
    ]


def blocks(swapped):
    """Two gated blocks; the port joins both layers, and may take the halves the other way round in the second."""

    def ref_code(m, x):
        return x + torch.tanh(m.value(x)) * torch.sigmoid(m.gate(x))

    def port_code(m, x):
        value, gate = m.both(x).chunk(2, -1)[:: -1 if m.swapped else 1]
        return x + paddle.tanh(value) * PF.sigmoid(gate)

    layers = [{"value": torch.nn.Linear(5, 5), "gate": torch.nn.Linear(5, 5)} for _ in range(2)]
    ref = torch.nn.Sequential(*(Ref(ref_code, **each) for each in layers))
    port = paddle.nn.Sequential(*(Port(port_code, both=paddle.nn.Linear(5, 10)) for _ in range(2)))
    for block, is_swapped in zip(port, (False, swapped)):
        block.swapped = is_swapped
    return ref, port


def test_two_orders_in_blocks_of_one_class_are_no_pass_until_the_map_says_so():
    assert align(*blocks(swapped=False), [X]).status == PASS
    verdict = align(*blocks(swapped=True), [X])
    assert verdict.status == REFUSED and "in two ways in blocks of one class" in verdict.refusal, str(verdict)
    *_, both = verdict.refusal.rpartition("with the line ")
    one, other = (line.rsplit(": ", 1) for line in both.split(" or "))
    assert {one[0], other[0]} == {"1.gate.weight, 1.value.weight", "1.value.weight, 1.gate.weight"}
    for (left, right), status in ((one, PASS), (other, FAIL)):
        biases = {left.replace("weight", "bias"): right.replace("weight", "bias")}
        verdict = align(*blocks(swapped=True), [X], names={left: right, **biases})
        assert verdict.status == status, str(verdict)
    assert verdict.location.name == "1"


def mixers(turned):
    """Two blocks with a complex weight as one tensor; the port has its parts, and may turn those of the second."""

    def ref_code(m, x):
        return x + torch.tanh(x @ m.w[0]) * (x @ m.w[1])

    def port_code(m, x):
        re, im = (each.T if m.turned else each for each in (m.re, m.im))
        return x + paddle.tanh(x @ re) * (x @ im)

    ref = torch.nn.Sequential(Ref(ref_code), Ref(ref_code))
    port = paddle.nn.Sequential(Port(port_code), Port(port_code))
    for block, own, is_turned in zip(ref, port, (False, turned)):
        block.w = torch.nn.Parameter(torch.randn(2, 5, 5))
        own.re, own.im, own.turned = own.create_parameter([5, 5]), own.create_parameter([5, 5]), is_turned
    return ref, port


def test_parts_that_are_transposed_in_one_of_two_blocks_are_no_pass():
    assert align(*mixers(False), [X]).status == PASS
    verdict = align(*mixers(True), [X])
    assert verdict.status == REFUSED and "in two ways in blocks of one class" in verdict.refusal, str(verdict)
    *_, both = verdict.refusal.rpartition("with the line ")
    for line, status in zip(both.split(" or "), (PASS, FAIL)):
        left, right = line.rsplit(": ", 1)
        assert align(*mixers(True), [X], names={left: right}).status == status, line


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_square_that_agrees_transposed_alone_is_no_pass_where_values_confirm_in_part(is_turned):
    """The factor is at another place, so that the second layer is fed otherwise."""
    ref = Ref(lambda m, x: m.b(2 * F.relu(m.a(x))) @ m.u, a=torch.nn.Linear(5, 5), b=torch.nn.Linear(5, 5, bias=False))
    ref.u = torch.nn.Parameter(torch.randn(5, 5))
    layers = {"c": paddle.nn.Linear(5, 5), "d": paddle.nn.Linear(5, 5, bias_attr=False)}
    port = Port(lambda m, x: 2 * m.d(PF.relu(m.c(x))) @ (m.att.T if is_turned else m.att), **layers)
    port.att = port.create_parameter([5, 5])
    verdict = align(ref, port, [X])
    assert verdict.status == (REFUSED if is_turned else PASS), str(verdict)
    assert ("u, which is square, transposed" in str(verdict)) == is_turned
