"""Dropout is off in all runs of `align`: what it would drop is compared."""

from __future__ import annotations

import paddle
import pytest
import torch
from paddle.nn import functional as PF
from toy_pairs import Port, Ref, normal

import portproof
from portproof import align, ladder
from portproof.compare import FAIL, PASS


def in_layers(p: float, ports: float | None = None):
    """(a pair in which a dropout layer has p on one side and another on the other, an input)"""
    code = lambda m, x: m.drop(m.fc(x))  # noqa: E731
    port_drop = paddle.nn.Dropout(p if ports is None else ports)
    ref = Ref(code, fc=torch.nn.Linear(4, 3), drop=torch.nn.Dropout(p))
    return ref, Port(code, fc=paddle.nn.Linear(4, 3), drop=port_drop), normal(2, 4)


def in_a_function():
    """A layer there."""
    ref, _, x = in_layers(0.1)
    port = Port(lambda m, x: PF.dropout(m.fc(x), 0.1, training=m.training), fc=paddle.nn.Linear(4, 3))
    return ref, port, x


def left_out():
    ref, _, x = in_layers(0.1)
    return ref, Port(lambda m, x: m.fc(x), fc=paddle.nn.Linear(4, 3)), x


def added():
    _, port, x = in_layers(0.1)
    return Ref(lambda m, x: m.fc(x), fc=torch.nn.Linear(4, 3)), port, x


def of_channels(port_class: type = paddle.nn.Dropout):
    ref = Ref(lambda m, x: m.drop(m.conv(x)), conv=torch.nn.Conv2d(3, 2, 1), drop=torch.nn.Dropout2d(0.1))
    port = Port(lambda m, x: m.drop(m.conv(x)), conv=paddle.nn.Conv2D(3, 2, 1), drop=port_class(0.1))
    return ref, port, normal(2, 3, 4, 5)


def joined(joining: type):
    """Two calls are one on that side; another behind them has the size of that one."""
    sides = []
    for side, nn, cat in ((Ref, torch.nn, torch.cat), (Port, paddle.nn, paddle.concat)):

        def code(m, x, cat=cat):
            a, b = m.a(x), m.b(x)
            both = m.drop(cat([a, b], 1)) if m.is_joined else cat([m.drop(each) for each in (a, b)], 1)
            return m.drop(m.c(both))

        layers = {"a": nn.Linear(4, 3), "b": nn.Linear(4, 5), "c": nn.Linear(8, 8), "drop": nn.Dropout(0.2)}
        sides.append(side(code, is_joined=side is joining, **layers))
    return *sides, normal(2, 4)


def in_attention(p: float = 0.1):
    """The reference passes p to a function."""
    ref = Ref(
        lambda m, x: m.attention(x, x, x, need_weights=False)[0],
        attention=torch.nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True),
    )
    attention = paddle.nn.MultiHeadAttention(4, 2, dropout=p)
    return ref, Port(lambda m, x: m.attention(x, x, x), attention=attention), normal(2, 3, 4)


def in_a_kernel(p: float = 0.1, behind: float | None = None):
    """Between the layers of an RNN, which does not tell how many numbers decide; `behind` with a layer, too."""
    sides = []
    for side, nn, own in ((Ref, torch.nn, 0.1), (Port, paddle.nn, p)):
        form = {"batch_first": True} if side is Ref else {}
        layers = {"rnn": nn.GRU(4, 3, num_layers=2, dropout=own, **form), "drop": nn.Dropout(0.0)}
        if side is Port and behind is not None:
            layers["drop"] = nn.Dropout(behind)
        sides.append(side(lambda m, x: m.drop(m.rnn(x)[0]), **layers))
    return *sides, normal(2, 3, 4)


DROPPED = {
    "another p": (lambda: in_layers(0.1, 0.3), "train mode/drop/dropout: p is 0.3 in the port's drop, not 0.1"),
    "the same p": (lambda: in_layers(0.1), ""),
    "a function for a layer": (in_a_function, ""),
    "left out": (left_out, "drop/dropout: the port does not drop here, the reference does, with p 0.1"),
    "added": (added, "drop/dropout: the port's drop drops with p 0.1, the reference does not"),
    "values for channels": (of_channels, "the port's drop drops by 80 numbers, not 4: whole channels, or single"),
    "channels": (lambda: of_channels(paddle.nn.Dropout2D), ""),
    "joined there": (lambda: joined(Port), ""),
    "joined here": (lambda: joined(Ref), ""),
    "attention": (in_attention, ""),
    "another p in attention": (lambda: in_attention(0.2), "p is 0.2 in the port's attention, not 0.1"),
    "an RNN": (in_a_kernel, ""),
    "another p in an RNN": (lambda: in_a_kernel(0.2), "p is 0.2 in the port's rnn, not 0.1"),
}


PLACES = {  # the reference's and the port's, if not drop
    "left out": ("drop", ""),
    "added": ("", "drop"),
    "another p in attention": ("attention", "attention"),
    "another p in an RNN": ("rnn", "rnn"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_what_dropout_would_drop_is_compared(name):
    made, told = DROPPED[name]
    ref, port, x = made()
    verdict = align(ref, port, [x])
    assert verdict.status == (FAIL if told else PASS), str(verdict)
    assert told in str(verdict) and bool(told) == ("dropout" in str(verdict))
    if told:
        place = verdict.location
        assert (place.phase, place.name, place.port_name) == ("dropout", *PLACES.get(name, ("drop", "drop")))


@pytest.mark.parametrize("made", [left_out, of_channels])
def test_rung_01_compares_it_too(made):
    told = str(ladder.forward(*made()[:2], made()[2:]))
    assert "drop/dropout" in told and "located: drop (" in told


def test_the_log_of_rung_01_is_the_same_twice():
    """What a layer drops of ones, too."""
    ref, port, x = in_layers(0.1)
    first, second = (ladder.forward(ref, port, [x]).log for _ in range(2))
    assert first == second
    assert "train share" in str(first)


def test_dropout_in_a_kernel_is_not_compared_with_that_outside_of_it():
    ref, port, x = in_a_kernel(0.0, behind=0.1)
    verdict = align(ref, port, [x])
    assert verdict.status == PASS, str(verdict)
    assert "dropout is off, and not compared, since a kernel does it inside of rnn (p 0.1)" in str(verdict)


@pytest.mark.parametrize("options", [{"leave_out": ["drop"]}, {"accept": ["drop/dropout: known"]}])
def test_a_known_difference(options):
    ref, port, x = left_out()
    verdict = align(ref, port, [x], **options)
    assert verdict.status == PASS, str(verdict)
    assert ("dropout is not compared, since some of it is left out" in str(verdict)) == ("leave_out" in options)


def test_a_recording_has_what_dropout_would_drop(tmp_path):
    ref, port, x = left_out()
    portproof.record(ref, [x]).save(tmp_path / "net.ref.safetensors")
    verdict = portproof.judge(port, tmp_path / "net.ref.safetensors")
    assert verdict.status == FAIL, str(verdict)
    assert "the port does not drop here" in str(verdict)


OTHER_PLACE = "dropout here drops other values than the port's, so it is in another place: "
OTHER_KIND = "dropout is alpha dropout on one side only, which is not compared: "
ADDED, DROPPED_BEHIND = (lambda m, x: x + m.drop(m.fc(x))), (lambda m, x: m.drop(x + m.fc(x)))
TWICE = lambda m, x: m.drop(m.fc(m.drop(x)))  # noqa: E731


@pytest.mark.parametrize(
    ("code", "port_code", "port_class", "note"),
    [
        (ADDED, ADDED, paddle.nn.Dropout, ""),
        (ADDED, DROPPED_BEHIND, paddle.nn.Dropout, OTHER_PLACE + "drop"),
        (ADDED, ADDED, paddle.nn.AlphaDropout, OTHER_KIND + "drop"),
        (TWICE, TWICE, paddle.nn.Dropout, ""),
        (TWICE, lambda m, x: m.fc(m.drop(m.drop(x))), paddle.nn.Dropout, OTHER_PLACE + "drop#2"),
    ],
)
def test_a_note_names_dropout_of_other_values_or_of_another_kind(code, port_code, port_class, note):
    """Of layers; recorded, too."""
    ref = Ref(code, fc=torch.nn.Linear(4, 4), drop=torch.nn.Dropout(0.3))
    port = Port(port_code, fc=paddle.nn.Linear(4, 4), drop=port_class(0.3))
    x = [normal(2, 4)]
    for verdict in (align(ref, port, x), portproof.judge(port, portproof.record(ref, x))):
        assert verdict.status == PASS, str(verdict)
        assert [each for each in verdict.notes if each.startswith("dropout")] == ([note] if note else [])
