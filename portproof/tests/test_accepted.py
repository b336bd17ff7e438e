"""Differences that a user accepts: neither passed nor failed, within a limit, and said."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
import toy_pairs

import portproof
from portproof import align, ladder
from portproof.compare import FAIL, NOT_JUDGED, PASS, REFUSED, Item, Verdict, compare
from portproof.compare.accepted import Accepted
from portproof.ladder.pairs.pair import MODES
from portproof.report.text import last_line, section_of, table
from sturdyio.cli import UserError

REF = {"a.weight": np.array([1.0, 2.0]), "b.weight": np.array([1.0]), "c": np.array([1.0]), "d[0]": np.array([4.0])}
PORT = {"a.weight": np.array([1.0, 2.5]), "b.weight": np.array([1.25]), "c": np.array([1.0]), "d[0]": np.array([5.0])}


def judged(accepted: Accepted, **other: np.ndarray) -> Verdict:
    ref = {Item(name, "buffer"): array for name, array in REF.items()}
    port = {Item(name, "buffer"): other.get(name, array) for name, array in PORT.items()}
    return accepted.apply(compare(ref, port, dict.fromkeys(ref, 1e-6)))


@pytest.mark.parametrize(
    ("texts", "statuses", "note"),
    [
        (["a.weight"], "AFPF", "accepted 'a.weight': 1 items, largest difference 5.0e-01"),
        (["*.weight"], "AAPF", "accepted '*.weight': 2 items, largest difference 5.0e-01"),
        (["*.weight <= 0.3: why"], "FAPF", "accepted '*.weight <= 0.3: why': 1 items, largest difference 2.5e-01"),
        (["*.weight<=0.1"], "FFPF", "accept '*.weight<=0.1': what it names is beyond what is accepted"),
        (["c"], "FFPF", "accept 'c': what it names agrees"),
        (["e"], "FFPF", "accept 'e': no item has this name"),
        (["d[0]", "a.weight"], "AFPA", "accepted 'd[0]': 1 items, largest difference 1.0e+00"),
    ],
)
def test_by_name_pattern_and_limit(texts, statuses, note):
    accepted = Accepted(texts)
    verdict = judged(accepted)
    letters = {"A": NOT_JUDGED, "F": FAIL, "P": PASS}
    assert [row.status for row in verdict.rows] == [letters[letter] for letter in statuses]
    assert accepted.notes()[0] == note
    assert (len(verdict.accepted), verdict.not_judged) == (statuses.count("A"), [])


def test_the_report_counts_them_apart():
    verdict = judged(Accepted(["*.weight: known", "d[0]"]))
    assert last_line("x", verdict) == "PASS x: all 1 items within their limits; 3 accepted"
    (line,) = table(verdict.rows, section_of)
    assert line.startswith("  ok ") and line.endswith("; 3 accepted")
    assert verdict.rows[0].reason == "accepted: known" and verdict.rows[3].reason == "accepted"
    some = last_line("x", judged(Accepted(["d[0]"])))
    assert some == "FAIL x: 2 of 3 items outside their limits; 1 accepted, first a.weight"


def test_where_nothing_else_is_left_it_is_refused():
    array = np.array([1.0])
    verdict = Accepted(["*"]).apply(compare({"a": array}, {"a": array + 1}, {"a": 0.1}))
    assert verdict.status == REFUSED and verdict.counted == 0
    assert last_line("x", verdict) == "REFUSED x: all 1 items are accepted"


@pytest.mark.parametrize("accept", [["*"], ["*<=1e9: known"]])
def test_where_every_output_of_a_mode_is_accepted_it_is_refused(accept, tmp_path):
    """At both doors, though structure and a layer agree."""
    portproof.record(Ref(), INPUTS, drawn=True).save(tmp_path / "net.ref.safetensors")
    for verdict in (
        portproof.align(Ref(), Port(WrongReLU), INPUTS, drawn=True, accept=accept),
        portproof.judge(Port(WrongReLU), tmp_path / "net.ref.safetensors", accept=accept),
    ):
        assert verdict.status == REFUSED and verdict.counted > 8, str(verdict)
        said = "every output of the model in eval mode is accepted: nothing is proved of it"
        assert str(verdict).splitlines()[-1] == f"REFUSED {verdict.title}: {said}"
        assert verdict.to_dict()["sentence"] == f"REFUSED {verdict.title}: {said}"


def test_one_output_that_agrees_in_each_mode_is_enough():
    outputs = [Item("output", "output", mode=mode, dtype=dtype) for mode in MODES for dtype in ("float64", "float32")]
    ref = {item: np.array([1.0]) for item in outputs}
    port = {item: np.array([1.0 if item.dtype == "float32" else 2.0]) for item in outputs}
    verdict = Accepted(["*"]).apply(compare(ref, port, dict.fromkeys(ref, 0.1)))
    assert last_line("x", verdict) == "PASS x: all 2 items within their limits; 2 accepted"
    port[outputs[-1]] += 1.0
    verdict = Accepted(["*"]).apply(compare(ref, port, dict.fromkeys(ref, 0.1)))
    assert verdict.status == REFUSED and "in train mode" in last_line("x", verdict)


def test_only_a_difference_in_value_is_accepted():
    for other in (np.ones(3), np.array([1.0, np.nan])):
        assert judged(Accepted(["*"]), **{"a.weight": other}).rows[0].status == FAIL


@pytest.mark.parametrize("text", ["", ":", "<=1", "a<=b", "a<=0", "a<=-1", "a<=nan", "a<=1 2"])
def test_another_form_is_refused(text):
    with pytest.raises(UserError, match="write NAME, NAME<=LIMIT"):
        Accepted([text])


class Ref(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.head = torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.act(self.norm(x)))


class Port(paddle.nn.Layer):
    """Its running variance is Paddle's biased one."""

    def __init__(self, activation: type = paddle.nn.ReLU) -> None:
        super().__init__()
        self.norm, self.act, self.head = paddle.nn.BatchNorm1D(5), activation(), paddle.nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.act(self.norm(x)))


class WrongReLU(paddle.nn.Layer):
    def forward(self, x):
        return paddle.nn.functional.relu(x) + 1


INPUTS = [np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)]
KNOWN = "norm.running_var<=1: Paddle divides by n"


def test_a_known_difference_of_a_pair(tmp_path):
    """At both doors. Nothing is located, and the rest is proved."""
    assert portproof.align(Ref(), Port(), INPUTS, drawn=True).status == FAIL
    portproof.record(Ref(), INPUTS, drawn=True).save(tmp_path / "net.ref.safetensors")
    for verdict in (
        portproof.align(Ref(), Port(), INPUTS, drawn=True, accept=[KNOWN]),
        portproof.judge(Port(), tmp_path / "net.ref.safetensors", accept=[KNOWN]),
    ):
        assert verdict.status == PASS and verdict.location is None, str(verdict)
        assert [row.item.name for row in verdict.accepted] == ["norm.running_var"] * 2
        assert str(verdict).endswith("within their limits; 2 accepted")
        assert f"accepted {KNOWN!r}: 2 items" in str(verdict)


def test_a_step_accepts_as_align_does(tmp_path):
    for function in (ladder.forward, ladder.gradients):
        assert function(Ref(), Port(), INPUTS).status == FAIL
        rung = ladder.Rung("step", quiet=True, accept=[KNOWN, "*.bias: of another step", "none"])
        verdict = function(Ref(), Port(), INPUTS, rung=rung)
        assert verdict.status == PASS and verdict.location is None, str(verdict)
        assert {row.item.name for row in verdict.accepted} == {"norm.running_var"}
        rung.write(tmp_path, "step")
        assert rung.log[-3:] == [
            f"accepted {KNOWN!r}: 2 items, largest difference {max(row.difference for row in verdict.accepted):.1e}",
            "accept '*.bias: of another step': what it names agrees",
            f"PASS step: all {verdict.counted} items within their limits; 2 accepted",
        ]


def test_unequal_weights_are_not_accepted():
    """Nothing of the step would run."""
    steps = ladder.plain_steps((torch.nn.functional.mse_loss, paddle.nn.functional.mse_loss))
    batches = [(INPUTS[0], np.zeros((6, 3), np.float32))]
    rung = ladder.Rung("step", quiet=True, accept=["*"])
    verdict = ladder.backward(Ref(), Port(), *steps, batches, rung=rung)
    assert verdict.status == FAIL and {row.item.kind for row in verdict.bad} == {"weights"}, str(verdict)


def test_another_fault_is_located_and_not_the_known_one():
    verdict = portproof.align(Ref(), Port(paddle.nn.Silu), INPUTS, drawn=True, accept=["norm.running_*"])
    assert verdict.status == FAIL and verdict.location.name == "act"
    assert not [other for other in verdict.location.also if other.name == "norm"]


def test_of_two_alike_the_one_that_is_not_accepted_is_located():
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Ref(), torch.nn.BatchNorm1d(3)

        def forward(self, x):
            return self.last(self.first(x))

    class PortTwice(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Port(), paddle.nn.BatchNorm1D(3)

        def forward(self, x):
            return self.last(self.first(x))

    accept = ["first.norm.running_var"]
    for verdict in (
        portproof.align(Twice(), PortTwice(), INPUTS, drawn=True, accept=accept),
        ladder.forward(Twice(), PortTwice(), INPUTS, rung=ladder.Rung("step", quiet=True, accept=accept)),
    ):
        assert verdict.status == FAIL and (verdict.location.name, verdict.location.also) == ("last", []), str(verdict)


def test_above_its_limit_it_is_located():
    small = portproof.align(Ref(), Port(), INPUTS, drawn=True, accept=["norm.running_var<=1e-9"])
    assert small.status == FAIL and small.location.name == "norm"


def test_an_accepted_variance_does_not_hide_the_place_of_another_fault():
    """A factor in the train mode of a block that holds a batch norm of Paddle's, and moves the mean of another."""

    def code(factor):
        return lambda m, x: m.norm(m.conv(x)) * (factor if m.training else 1)

    blocks = [toy_pairs.Ref(code(1), conv=torch.nn.Conv2d(3, 3, 1), norm=torch.nn.BatchNorm2d(3)) for _ in range(2)]
    ports = [
        toy_pairs.Port(code(f), conv=paddle.nn.Conv2D(3, 3, 1), norm=paddle.nn.BatchNorm2D(3)) for f in (1.0, 1.25)
    ]
    pair = (
        toy_pairs.Ref(lambda m, x: m.c(m.b(m.a(x))), a=blocks[0], b=blocks[1], c=torch.nn.BatchNorm2d(3)),
        toy_pairs.Port(lambda m, x: m.c(m.b(m.a(x))), a=ports[0], b=ports[1], c=paddle.nn.BatchNorm2D(3)),
    )
    verdict = align(*pair, [toy_pairs.normal(4, 3, 5, 5)], accept=["*.running_var"])
    assert verdict.status == FAIL and (verdict.location.name, verdict.location.phase) == ("b", "forward"), str(verdict)
