"""A fault in code between layers is named with its file, its line and the text there, at both doors."""

import inspect
import sys
from contextlib import suppress
from pathlib import Path
from typing import Optional

import numpy as np
import paddle
import pytest
import torch
from paddle.nn import functional as PF
from torch.nn import functional as F
from toy_pairs import Port, Ref, normal

from portproof import align, judge, record
from portproof.backends import own_code
from portproof.compare import FAIL

T, P = torch.nn, paddle.nn
X = normal(2, 5, 8)
FIRST = "its values first leave the reference's at "
ANOTHER = "its value is one of the reference's or one that it holds, but not the one that belongs there, at "
NAMES = ("q", "k", "v", "o")


class Attention(T.Module):
    """Two heads, with what is added to the input."""

    def __init__(self):
        super().__init__()
        for name in NAMES:
            setattr(self, name, T.Linear(8, 8))

    def forward(self, x):
        q, k, v = (layer(x).reshape(2, 5, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = F.softmax(q @ k.transpose(-1, -2) / 2, -1)
        return self.o((weights @ v).transpose(1, 2).reshape(2, 5, 8)) + x


def scores(q, k, fault):
    found = paddle.matmul(q, k, transpose_y=True)
    if fault == "scale":
        return found / 4
    return found / 2


class PortedAttention(P.Layer):
    """With functions of its own, softmax by hand, and one fault."""

    def __init__(self, fault=""):
        super().__init__()
        for name in NAMES:
            setattr(self, name, P.Linear(8, 8))
        self.fault = fault

    def heads(self, x):
        x = x.reshape([2, 5, 2, 4])
        if self.fault == "split":
            return x.reshape([2, 2, 5, 4])
        if self.fault == "raised in a function":
            x.reshape([9, -1, 7])
        return x.transpose([0, 2, 1, 3])

    def forward(self, x):
        q, k, v = [self.heads(layer(x)) for layer in (self.q, self.k, self.v)]
        raised = paddle.exp(scores(q, k, self.fault))
        if self.fault == "lines":
            raised = paddle.exp(
                1.01  # in a statement of several lines
                * scores(q, k, "")
            )
        weights = raised / raised.sum(-1, keepdim=True)
        mixed = paddle.matmul(weights, v)
        if self.fault == "loop":
            parts = []
            for i in range(2):
                parts.append(mixed[i] * (i + 1))
            mixed = paddle.stack(parts)
        mixed = mixed.transpose([0, 2, 1, 3]).reshape([2, 5, 8])
        if self.fault == "another":
            mixed = x
        found = self.o(mixed)
        if self.fault == "in place":
            found.scale_(2.0)
        if self.fault == "return":
            return found
        with suppress(ValueError):
            found.reshape([7, -1])
        if self.fault == "raised":
            found.reshape([3, -1, 7])
        return found + x


PLACES = {
    "scale": FIRST + "{}: return found / 4",
    "split": FIRST + "{}: return x.reshape([2, 2, 5, 4])",
    "lines": FIRST + '{}: raised = paddle.exp( 1.01 # in a statement of several lines * scores(q, k, "") )',
    "loop": FIRST + "{}: parts.append(mixed[i] * (i + 1))",
    "another": ANOTHER + "{}: found = self.o(mixed)",
    "in place": FIRST + "{}: found.scale_(2.0)",
    "return": ANOTHER + "{}: return found",
    "raised in a function": "raised at {}: x.reshape([9, -1, 7])",
    "raised": "raised at {}: found.reshape([3, -1, 7])",
}


def proof_of(verdict) -> list[str]:
    assert verdict.status == FAIL and verdict.location.phase == "forward", str(verdict)
    return verdict.location.proof


def place_of(text: str) -> str:
    """This file as the report names it, and the only line that begins with the text."""
    file = Path(__file__)
    lines = file.read_text(encoding="utf-8").splitlines()
    [number] = [i for i, line in enumerate(lines, 1) if line.strip() == text]
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{number}"


@pytest.mark.parametrize("fault", PLACES)
def test_the_line_is_named(fault):
    text = PLACES[fault].partition("{}: ")[2]
    place = place_of("raised = paddle.exp(" if fault == "lines" else text)
    proof = proof_of(align(Attention(), PortedAttention(fault), [X]))
    assert PLACES[fault].format(place) in proof, proof


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("own_code") / "attention.ref.safetensors"
    record(Attention(), [X]).save(path)
    return path


@pytest.mark.parametrize("fault", PLACES)
def test_a_recording_has_fewer_values_and_tells_the_line_among_others(fault, recording):
    text = PLACES[fault].partition("{}: ")[2]
    proof = proof_of(judge(PortedAttention(fault), recording))
    assert any(line.endswith(f": {text}") for line in proof), proof
    exact = PLACES[fault].partition("{}")[0]
    if fault in (
        "another",
        "in place",
        "return",
        "raised",
        "raised in a function",
    ):  # behind the last layer, or of values that are recorded
        assert any(line.startswith(exact) and line.endswith(text) for line in proof)


def located(pair: tuple, name: str, own_class: Optional[type]) -> None:
    """The report, its last line and the JSON name this class of the port's, and where it begins."""
    verdict = align(*pair, [X])
    location, last = verdict.location, str(verdict).splitlines()[-1]
    assert location.name == name, str(verdict)
    data = verdict.to_dict()["location"]
    if own_class is None:
        assert data["port_class"] == data["port_class_name"] == "" and "; in " not in last
        return
    place = own_code.place_of(inspect.getsourcefile(own_class), inspect.getsourcelines(own_class)[1])
    assert (data["port_class"], data["port_class_name"]) == (place, own_class.__name__)
    assert f"the port's {own_class.__name__} is in {place}" in location.lines()
    assert f"; in {own_class.__name__}, {place}; " in last


def test_where_the_ports_class_is():
    """The user's own: of a library's layer the nearest around it."""
    located((Attention(), PortedAttention(next(iter(PLACES)))), "", PortedAttention)
    pair = Ref(lambda m, x: m.act(x * 9), act=T.ReLU()), Port(lambda m, x: m.act(x * 9), act=P.ReLU6())
    located(pair, "act", Port)
    inside = T.Sequential(T.Sequential(T.ReLU())), P.Sequential(P.Sequential(P.ReLU6()))
    around = [side(lambda m, x: m.body(x * 9), body=body) for side, body in zip((Ref, Port), inside)]
    located(around, "body.0.0", Port)
    located((T.Sequential(T.ReLU()), P.Sequential(P.Silu())), "0", None)
    located((Ref(lambda m, x: m.l(x), l=T.Linear(8, 8)), Port(lambda m, x: m.l(x), l=P.Linear(8, 9))), "l", Port)


def test_the_line_of_the_call_that_is_fed_otherwise():
    proof = proof_of(align(Attention(), PortedAttention("scale"), [X]))
    place = place_of("found = self.o(mixed)")
    assert f"its own code feeds o otherwise at {place}, though all before it agrees" in proof


class Mixture(T.Module):
    """A head that gives probabilities, scales and means; the model returns them and what a loss makes of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = T.Linear(8, 4), T.Linear(8, 4)

    def forward(self, x):
        return F.softmax(self.a(x), -1), torch.exp(self.b(x))


class PortedMixture(P.Layer):
    """It gives logits and logarithms."""

    def __init__(self, fault=""):
        super().__init__()
        self.a, self.b, self.fault = P.Linear(8, 4), P.Linear(8, 4), fault

    def forward(self, x):
        return self.a(x), self.b(x) * (1.5 if self.fault == "inside" else 1.0)


@pytest.mark.parametrize(("fault", "place"), [("outside", ""), ("inside", "head")])
def test_a_difference_that_is_undone_outside_is_not_blamed(fault, place):
    """The outputs that are made of it agree; where one does not, what it is made of is at fault as before."""

    def ref_code(m, x):
        weights, scales = m.head(x)
        return weights, scales, (weights / scales).sum()

    def port_code(m, x):
        logits, logs = m.head(x)
        weights = PF.log_softmax(logits, -1)
        return (
            PF.softmax(logits, -1),
            paddle.exp(logs),
            paddle.exp(weights - logs * (0.5 if fault == "outside" else 1)).sum(),
        )

    verdict = align(Ref(ref_code, head=Mixture()), Port(port_code, head=PortedMixture(fault)), [X])
    assert verdict.status == FAIL and (verdict.location.name, verdict.location.also) == (place, []), str(verdict)
    assert align(
        Ref(lambda m, x: m.head(x)[0], head=Mixture()),
        Port(lambda m, x: PF.softmax(m.head(x)[0]), head=PortedMixture()),
        [X],
    )


def test_a_reference_that_refuses_the_ports_values():
    """The port's own code makes the reference's values of them, so these are no fault."""

    def ref_code(m, x):
        weights, scales = m.head(x)
        if weights.min() < 0:
            raise ValueError("these are no probabilities")
        return weights, scales, (weights / scales).sum()

    def port_code(m, x):
        logits, logs = m.head(x)
        weights = PF.softmax(logits, -1)
        return weights, paddle.exp(logs), 2 * (weights / paddle.exp(logs)).sum()

    verdict = align(Ref(ref_code, head=Mixture()), Port(port_code, head=PortedMixture()), [X])
    assert verdict.status == FAIL and verdict.location.name == "", str(verdict)
    assert "2 * (weights / paddle.exp(logs)).sum()" in str(verdict)


@pytest.mark.parametrize("is_joined_in_ref", [True, False])
def test_a_batch_in_two_calls_is_right_code(is_joined_in_ref):
    """One side runs the layer on both inputs at once; the fault is behind."""

    def code(cat, is_joined, factor):
        def run(m, x, y):
            a, b = m.l(cat([x, y])).chunk(2) if is_joined else (m.l(x), m.l(y))
            return factor * (a * b)

        return run

    ref = Ref(code(torch.cat, is_joined_in_ref, 1), l=T.Linear(8, 3))
    port = Port(code(paddle.concat, not is_joined_in_ref, 2), l=P.Linear(8, 3))
    proof = proof_of(align(ref, port, [X, normal(2, 5, 8)]))
    place = place_of("return factor * (a * b)")
    assert f"{FIRST}{place}: return factor * (a * b)" in proof, proof


def test_right_code_in_another_form_is_not_blamed():
    """Time first, softmax by hand and a mask of infinities, before the fault."""
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)

    def ref_code(m, x):
        y = torch.tanh(m.a(x))
        y = F.softmax(y + torch.tensor(mask), -1)
        return m.b(2 * y)

    def port_code(m, x):
        y = paddle.tanh(m.a(x.transpose([1, 0, 2])).transpose([1, 0, 2]))
        y = y + paddle.to_tensor(mask)
        y = paddle.exp(y) / paddle.exp(y).sum(-1, keepdim=True)
        z = 3 * y
        return m.b(z)

    ref = Ref(ref_code, a=T.Linear(8, 8), b=T.Linear(8, 8))
    proof = proof_of(align(ref, Port(port_code, a=P.Linear(8, 8), b=P.Linear(8, 8)), [normal(2, 8, 8)]))
    told = next(i for i, line in enumerate(proof) if line.startswith(FIRST))
    assert proof[told].endswith(": z = 3 * y") and len(proof) == told + 1
    assert any("feeds b otherwise" in line for line in proof)


def test_masked_values_are_the_references():
    """They hold infinities."""
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)

    def port_code(m, x):
        y = m.a(x) + paddle.to_tensor(mask)
        z = PF.softmax(2 * y)
        return m.b(z)

    ref = Ref(lambda m, x: m.b(F.softmax(m.a(x) + torch.tensor(mask), -1)), a=T.Linear(8, 8), b=T.Linear(8, 8))
    proof = proof_of(align(ref, Port(port_code, a=P.Linear(8, 8), b=P.Linear(8, 8)), [normal(2, 8, 8)]))
    assert proof[-1].startswith(FIRST) and proof[-1].endswith(": z = PF.softmax(2 * y)"), proof


class Raising(P.Layer):
    def forward(self, x):
        return x.reshape([5, -1, 9])


def test_an_exception_that_was_caught_is_not_the_one_that_ended_the_run():
    def port_code(m, x):
        with suppress(ValueError):
            x.reshape([7, -1])
        return m.b(m.a(x))

    proof = proof_of(
        align(Ref(lambda m, x: m.a(x), a=T.Linear(8, 8)), Port(port_code, a=P.Linear(8, 8), b=Raising()), [X])
    )
    assert any("the port's module raised ValueError" in line for line in proof)
    assert not any("raised at" in line for line in proof)


def test_a_layer_of_the_library_has_no_lines():
    ref = T.Sequential(T.Linear(8, 8), T.LayerNorm(8))
    port = P.Sequential(P.Linear(8, 8), P.LayerNorm(8, epsilon=1e-2))
    proof = proof_of(align(ref, port, [X]))
    assert not any(".py:" in line for line in proof)


def test_a_module_without_children_has_lines():
    class Scaled(P.Layer):
        def forward(self, x):
            y = PF.gelu(x)
            return 1.5 * y

    ref = T.Sequential(T.Linear(8, 8), T.GELU())
    verdict = align(ref, P.Sequential(P.Linear(8, 8), Scaled()), [X])
    assert verdict.location.name == "1"
    assert any(line.startswith(FIRST) and line.endswith("return 1.5 * y") for line in verdict.location.proof)


def test_code_without_a_file_is_not_followed():
    names = {}
    exec("def code(m, x):\n    return 2 * m.a(x)", names)
    proof = proof_of(align(Ref(lambda m, x: m.a(x), a=T.Linear(8, 8)), Port(names["code"], a=P.Linear(8, 8)), [X]))
    assert any("behind the last of them" in line for line in proof)
    assert not any("<string>" in line for line in proof)


def test_tracing_ends_with_the_run():
    before = sys.gettrace()
    align(Attention(), PortedAttention("raised"), [X])
    assert sys.gettrace() is before


def test_a_value_that_comes_in_another_way_is_followed_to_where_it_was_made():
    """Through tuples, names that are used again, and arguments of functions."""

    def passed(pair, factor=1):
        first, second = pair
        return first * factor, second

    def port_code(m, x):
        y = m.a(x)
        half = 0.5 * y
        pair = passed((half, y))
        y, _ = passed(pair)
        z = y
        return m.b(z)

    ref = Ref(lambda m, x: m.b(m.a(x)), a=T.Linear(8, 8), b=T.Linear(8, 8))
    proof = proof_of(align(ref, Port(port_code, a=P.Linear(8, 8), b=P.Linear(8, 8)), [X]))
    assert any(line.startswith(FIRST) and line.endswith(": half = 0.5 * y") for line in proof), proof
