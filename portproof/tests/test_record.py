"""`record` and `judge`: the same verdict and place as `align`, in two environments, from a file that is checked."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from corpus import PAIRS
from safetensors.numpy import load_file, save_file
from toy_pairs import Port as PortOf
from toy_pairs import Ref as RefOf
from toy_pairs import chaotic
from toy_sources import PORT, REF

import portproof
from portproof.arrays import drawn, projected
from portproof.backends.question import Run
from portproof.backends.trace import Trace
from portproof.backends.values import Store, Unwritten, decode, digest_of, encode, is_written
from portproof.commands import judge as judge_command
from portproof.commands import record as record_command
from portproof.compare import FAIL, PASS, Verdict
from portproof.ladder.pairs.pair import Options
from portproof.localize.locate import Location
from portproof.recording import file
from portproof.recording.codec import Reader, write_run
from portproof.recording.file import Recording
from portproof.recording.record import PER_CALL, Recorder
from sturdyio import cli
from sturdyio.cli import UserError

NOT_TRIED = "causes not tried: those of a "
CASES = [
    ("vit", ""),
    ("vit", "position frozen"),
    ("cross attention", "mask turned round"),
    ("library encoder", "pre-norm"),
    ("resnet", "padding of SAME"),
    ("stochastic depth", ""),
    ("stochastic depth", "drop path scales in eval"),
    ("batch norm in training", "momentum of the other framework"),
    ("bilstm", ""),
    ("lstm cell", "the cell for the state"),
    ("packed", "lengths not used"),
    ("gpt", "not tied"),
    ("dataclass", ""),
    ("detector", "the worst for the best"),
    ("tasks", "another alpha"),
    ("spectral", "another norm of the inverse"),
    ("textcnn", "no padding index"),
    ("rounding", "no straight-through gradient"),
]


def places(location: Location | None) -> list[tuple[str, str]]:
    return [(each.name, each.phase) for each in (location, *location.also)] if location else []


def assert_same(aligned: Verdict, judged: Verdict) -> None:
    assert judged.status == aligned.status, f"{aligned}\n{judged}"
    assert [(row.name, row.status) for row in judged.rows] == [(row.name, row.status) for row in aligned.rows]
    assert [row.atol for row in judged.rows] == pytest.approx([row.atol for row in aligned.rows], nan_ok=True, rel=1e-6)
    assert places(judged.location) == places(aligned.location)
    assert set(aligned.notes) <= set(judged.notes)


@pytest.mark.thorough("the smallest pairs", but="^(batch|lstm|dataclass|rounding|spectral)")
@pytest.mark.parametrize(("name", "bug"), CASES, ids=[f"{name}, {bug}" for name, bug in CASES])
def test_the_same_verdict_and_place(name, bug, tmp_path):
    pair = PAIRS[name]
    ref, port = pair.ref(), pair.port(bug)
    portproof.record(ref, pair.inputs, modes=pair.modes).save(tmp_path / "a.safetensors")
    judged = portproof.judge(port, tmp_path / "a.safetensors")
    aligned = portproof.align(ref, port, pair.inputs, modes=pair.modes)
    assert_same(aligned, judged)
    assert judged.title == "judge" and judged.notes[0].startswith("recorded with torch ")
    if judged.location:
        tried = not any(line.startswith(NOT_TRIED) for line in judged.location.proof)
        assert judged.location.diagnosis == (aligned.location.diagnosis if tried else [])


def test_rounding_that_float32_does_not_show_is_recorded(tmp_path):
    torch.manual_seed(0)
    ref = RefOf(chaotic(20.1, torch.sin, lambda m, x: m.linear(x)), linear=torch.nn.Linear(32, 32))
    inputs = [np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)]
    portproof.record(ref, inputs, modes=("eval",)).save(tmp_path / "a.safetensors")
    for factor, status in ((20.1, PASS), (20.1 + 1e-8, FAIL)):
        port = PortOf(chaotic(factor, paddle.sin, lambda m, x: m.linear(x)), linear=paddle.nn.Linear(32, 32))
        options = {"modes": ("eval",), "precisions": ("float64",)}
        judged = portproof.judge(port, tmp_path / "a.safetensors", **options)
        assert judged.status == status, str(judged)
        assert_same(portproof.align(ref, port, inputs, **options), judged)


class Ref(torch.nn.Module):
    """A block of two layers, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU())
        self.last, self.act = torch.nn.Linear(6, 3), torch.nn.Hardswish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.last(self.block(x)))


class Port(paddle.nn.Layer):
    """The same, whichever activation it has in the block."""

    def __init__(self, activation: str = "ReLU") -> None:
        super().__init__()
        self.block = paddle.nn.Sequential(paddle.nn.Linear(5, 6), getattr(paddle.nn, activation)())
        self.last, self.act = paddle.nn.Linear(6, 3), paddle.nn.Hardswish()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.act(self.last(self.block(x)))


INPUTS = [np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)]


@pytest.fixture
def path(tmp_path) -> Path:
    """A recording of Ref."""
    portproof.record(Ref(), INPUTS).save(tmp_path / "net.ref.safetensors")
    return tmp_path / "net.ref.safetensors"


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_one_mode_and_one_precision(path, precision):
    port, options = Port("ReLU6"), {"modes": ("eval",), "precisions": (precision,)}
    judged = portproof.judge(port, path, **options)
    assert_same(portproof.align(Ref(), port, INPUTS, **options), judged)
    assert judged.location.name == "block.1"


class Fused(paddle.nn.Linear):
    """A layer with the activation behind it inside."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.relu(super().forward(x))


def test_an_activation_that_is_inside_the_layer_before_it(path):
    """The reference's layer has to have been run with its activation behind it."""
    port = Port()
    port.block, port.act = paddle.nn.Sequential(Fused(5, 6)), paddle.nn.Swish()
    judged = portproof.judge(port, path)
    assert_same(portproof.align(Ref(), port, INPUTS), judged)
    assert judged.status == FAIL and places(judged.location) == [("act", "forward")]
    assert "built differently, no fault: has the ReLU behind it inside: block.0 (Linear)" in judged.notes


class Cut(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., 1:]


class CutInside(paddle.nn.Linear):
    """A layer with two of the reference's modules behind it inside."""

    def __init__(self, slope: float) -> None:
        super().__init__(5, 7)
        self.slope = slope

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.leaky_relu(super().forward(x)[..., 1:], self.slope)


@pytest.mark.parametrize("slope", [0.25, 0.5])
def test_two_modules_that_are_inside_the_layer_before_them(slope):
    """Something else is wrong; the layer is blamed only if it is."""
    nn = torch.nn
    ref = nn.Sequential(nn.Sequential(nn.Linear(5, 7), Cut(), nn.LeakyReLU(0.25)), nn.Linear(6, 3), nn.Hardswish())
    port = paddle.nn.Sequential(CutInside(slope), paddle.nn.Linear(6, 3), paddle.nn.Swish())
    judged = portproof.judge(port, portproof.record(ref, INPUTS))
    assert_same(portproof.align(ref, port, INPUTS), judged)
    assert places(judged.location) == [("2" if slope == 0.25 else "0.0", "forward")]
    note = "built differently, no fault: has the Cut, LeakyReLU behind it inside: 0.0 (Linear)"
    assert (note in judged.notes) == (slope == 0.25)


@pytest.mark.parametrize("wrong", [False, True])
def test_values_at_a_kink(wrong):
    """A layer is run alone on values that are moved off its kinks."""
    x = INPUTS[0].copy()
    x[0], x[1] = 3.0, np.nextafter(np.float32(-3), np.float32(0))
    ref = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Hardswish())
    port = paddle.nn.Sequential(paddle.nn.Identity(), paddle.nn.Swish() if wrong else paddle.nn.Hardswish())
    for precision in ("float64", "float32"):
        judged = portproof.judge(port, portproof.record(ref, [x]), precisions=(precision,))
        assert_same(portproof.align(ref, port, [x], precisions=(precision,)), judged)
        assert judged.status == (FAIL if wrong else PASS)


def test_a_recording_may_stay_in_memory():
    assert portproof.judge(Port(), portproof.record(Ref(), INPUTS)).status == PASS


def test_a_map_and_what_is_left_out(path):
    with pytest.raises(UserError, match="the map names 'no'"):
        portproof.judge(Port(), path, names={"no": "last"})
    judged = portproof.judge(Port("ReLU6"), path, leave_out=["block"])
    assert "left out, not compared: block" in "\n".join(judged.notes)


def test_own_weights(path, tmp_path):
    ref, port = Ref(), Port()
    portproof.load_reference_weights(ref, port, INPUTS)
    recording = portproof.record(ref, INPUTS, weights="reference")
    assert portproof.judge(port, recording, own_weights=True).status == PASS
    port.last.bias.set_value(port.last.bias + 1)
    assert portproof.judge(port, recording).status == PASS
    judged = portproof.judge(port, recording, own_weights=True)
    assert places(judged.location) == [("last", "weights")]
    with pytest.raises(UserError, match="record the reference's"):
        portproof.judge(port, path, own_weights=True)


def test_modes_that_were_not_recorded():
    recording = portproof.record(Ref(), INPUTS, modes=("eval",))
    assert portproof.judge(Port(), recording).status == PASS
    misfit = Port()
    misfit.last = paddle.nn.Linear(6, 4)
    assert places(portproof.judge(misfit, recording).location) == [("last", "structure")]
    with pytest.raises(UserError, match="recorded in eval mode"):
        portproof.judge(Port(), recording, modes=("train",))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weights": "own"}, "choose one of probe, reference"),
        ({"modes": ("both",)}, "choose some of eval, train"),
        ({"modules": ["blok"]}, "modules names 'blok'"),
        ({"inputs": INPUTS[0]}, "one array"),
        ({"inputs": [INPUTS[0][:, :3]]}, "the reference cannot run"),
        ({"inputs": [INPUTS[0] * np.nan]}, "NaN"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded(wrong, message):
    with pytest.raises(UserError, match=message):
        portproof.record(Ref(), **{"inputs": INPUTS, **wrong})


def test_the_reference_is_as_it_was():
    ref = Ref()
    before = {key: tensor.clone() for key, tensor in ref.state_dict().items()}
    portproof.record(ref, INPUTS)
    assert all(torch.equal(tensor, before[key]) for key, tensor in ref.state_dict().items()) and ref.training


# The size


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 256))


def convolutions(*widths: int) -> list[torch.nn.Module]:
    layers = []
    for n, m in zip(widths, widths[1:]):
        layers += [torch.nn.Conv2d(n, m, 3, padding=1), torch.nn.BatchNorm2d(m), torch.nn.ReLU()]
    return layers


def mixed() -> torch.nn.Module:
    head = torch.nn.Linear(32 * 8 * 8, 128)
    return torch.nn.Sequential(*convolutions(3, 32, 32), torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), head)


SIZED = {
    "weights": (wide, (4, 64)),
    "activations": (lambda: torch.nn.Sequential(torch.nn.BatchNorm2d(3), *convolutions(3, 16)), (8, 3, 48, 48)),
    "mixed": (mixed, (2, 3, 32, 32)),
}


@pytest.mark.thorough("what its weights make large", but="weights")
@pytest.mark.parametrize("heavy", SIZED)
def test_the_size_of_a_recording(heavy):
    """Three times the weights and twice a float64 pass's outputs, beside the inputs and `PER_CALL`."""
    make, shape = SIZED[heavy]
    torch.manual_seed(0)
    ref, inputs = make(), [np.random.default_rng(0).normal(size=shape).astype(np.float32)]
    recorder = Recorder(ref, inputs, Options(), None)
    recording = recorder.recording()
    calls = recorder.ask(recorder._whole_question("float64", False)).trace.calls.values()
    weights = sum(tensor.nbytes for tensor in ref.state_dict().values())
    outputs = sum(array.nbytes for call in calls for array in call.outputs)
    given = 3 * inputs[0].nbytes  # in float32 and in float64
    law = 3 * weights + 2 * outputs + given + 2 * PER_CALL * len(calls)
    assert recording.size <= law
    assert recording.size == pytest.approx(recorder.expected_size, rel=0.15)
    reference = recording.model()
    for train in (False, True):  # every output stays
        kept = reference.run(inputs, "float64", train).trace.outputs
        exact = recorder.model.run(inputs, "float64", train).trace.outputs
        assert kept.keys() == exact.keys() and all(map(np.array_equal, kept.values(), exact.values()))


def test_drawn_numbers_are_those_of_every_numpy():
    """What is drawn when a reference is recorded is drawn again when a port is judged."""
    assert drawn("a name", (2,)).tolist() == [-0.3263949392121597, -0.46467252167926487]
    assert np.abs(drawn("another", (1000,))).max() < 1 and abs(drawn("another", (1000,)).mean()) < 0.1


def test_a_projection_keeps_the_size_of_values_and_of_errors(rng):
    """So the limits of elements are those of projections; what they share grows no more."""
    values, errors = rng.normal(size=(64, 32, 3, 3)), 1e-9 * rng.normal(size=(64, 32, 3, 3))
    found = projected(values)
    assert found.shape == (64 + 32 + 3 + 3,) and projected(found) is found
    assert found.std() == pytest.approx(1, rel=0.2)
    assert (projected(values + errors) - found).std() == pytest.approx(1e-9, rel=0.2)
    assert np.abs(projected(values + 1e-9) - found).max() < 1e-8
    one = values.copy()
    one[5, 7, 1, 1] += 1  # comes out about sqrt(18432) smaller
    assert 1e-4 < np.abs(projected(one) - found).max() < 1
    assert projected(values[:1, :, :1]) is not found and projected(np.zeros((1, 5000))).shape == (1, 5000)
    assert not np.array_equal(projected(values.transpose(0, 1, 3, 2)), found)


class Joined(torch.nn.Module):
    """Queries and keys of one large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys = self.both(x).chunk(2, -1)
        return torch.tanh(queries) * keys


class Apart(paddle.nn.Layer):
    """The same of two, one of which has `times` its gradient."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.queries, self.keys, self.times = paddle.nn.Linear(32, 32), paddle.nn.Linear(32, 32), times

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        weight = self.times * self.keys.weight + (1 - self.times) * self.keys.weight.detach()
        keys = paddle.nn.functional.linear(x, weight, self.keys.bias)
        return paddle.tanh(self.queries(x)) * keys


@pytest.mark.parametrize(("times", "status"), [(1.0, PASS), (1.0 + 1e-6, FAIL)])
def test_a_large_gradient_is_compared_as_a_whole_by_its_projections(times, status):
    """Also where the port has it in parts, which no recording could be cut into."""
    inputs = [np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)]
    names = {"both": "queries, keys"}
    ref = Joined()
    aligned = portproof.align(ref, Apart(times), inputs, names=names)
    assert_same(aligned, portproof.judge(Apart(times), portproof.record(ref, inputs), names=names))
    assert aligned.status == status
    failed = [row for row in aligned.rows if row.status == FAIL and row.item.dtype == "float64"]
    assert {row.item.name for row in failed} == ({"both.weight"} if status == FAIL else set())
    assert all(row.shape == (64 + 32,) and row.place.startswith(" in projection ") for row in failed)


# What is run alone


def test_modules_bound_the_size(path):
    recording = portproof.record(Ref(), INPUTS, modules=["block"])
    assert recording.size < 0.9 * Recording.load(path).size
    found = portproof.judge(Port("ReLU6"), recording)
    assert places(found.location) == [("block.1", "forward")]
    note = "not run alone, since the recording was told to leave them out: last, act"
    assert note in found.notes


def test_a_fault_in_what_is_not_run_alone_is_its_callers():
    found = portproof.judge(Port("ReLU6"), portproof.record(Ref(), INPUTS, modules=["last"]))
    assert found.status == FAIL and places(found.location) == [("", "forward")]
    assert "not run alone, and what differs may begin there: block.0, block.1, act" in found.location.proof


class Shape:
    """A class of the model's own that holds an array."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Opened(torch.nn.Module):
    def forward(self, given: Shape) -> torch.Tensor:
        return given.x.relu()


class OpenedPort(paddle.nn.Layer):
    def forward(self, given: Shape) -> paddle.Tensor:
        return paddle.nn.functional.relu(given.x)


class Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.opened = torch.nn.Linear(5, 5), Opened()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.opened(Shape(self.first(x)))


class WrappedPort(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.opened = paddle.nn.Linear(5, 5), OpenedPort()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.opened(Shape(self.first(x)))


def test_arguments_that_no_file_can_hold_are_said(tmp_path):
    portproof.record(Wrapped(), INPUTS).save(tmp_path / "a.safetensors")
    judged = portproof.judge(WrappedPort(), tmp_path / "a.safetensors")
    assert judged.status == PASS
    assert "not run alone, since it was called with what no file can hold: opened" in judged.notes


# The file


def test_the_bytes_follow_from_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(name))
        portproof.record(Ref(), INPUTS, seed=seed).save(tmp_path / f"{name}.safetensors")
    first, same, other = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "abc")
    assert first == same != other


def test_an_array_is_stored_once(path):
    arrays = load_file(path)
    assert len({array.tobytes() + str(array.dtype).encode() + bytes(array.shape) for array in arrays.values()}) == len(
        arrays
    )
    assert abs(path.stat().st_size - Recording.load(path).size) < 0.1 * path.stat().st_size


def test_a_limit_refuses_before_anything_is_written(tmp_path):
    recording = portproof.record(Ref(), INPUTS)
    with pytest.raises(UserError, match=r"would take 0\.\d+ MB, more than 0\.01 MB"):
        recording.save(tmp_path / "a.safetensors", max_size=10_000)
    with pytest.raises(UserError, match=r"does not end in \.safetensors"):
        recording.save(tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1.5,
        float("inf"),
        1 - 2j,
        "text",
        slice(1, None, 2),
        [1, (2, {"a": None, 3: ()})],
        Point(1, [2]),
        np.arange(6).reshape(2, 3),
        np.array(1 + 2j, np.complex64),
        np.zeros((0, 2), np.float16),
        {"mask": np.array([True, False])},
    ],
    ids=str,
)
def test_values_come_back_as_they_were(value):
    store = Store()
    back = decode(json.loads(json.dumps(encode(value, store.put), allow_nan=False)), store.arrays)
    np.testing.assert_equal(back, value)
    assert type(back) is type(value) or type(back)._fields == value._fields
    assert is_written(value)


@pytest.mark.parametrize("number", [-1, 1, 10**30, True, 0.0, "0", None])
def test_a_number_that_no_array_has(number):
    with pytest.raises(ValueError, match="an array"):
        decode({"array": number}, [np.ones(1)])


def test_what_serves_a_limit_keeps_its_distance(rng):
    """Also in each part of it, which may be compared by itself."""
    exact = rng.normal(size=(4, 5))
    near = exact + 1e-6 * rng.normal(size=(4, 5))
    store = Store()
    reader = Reader(store.arrays)
    wide = write_run(Run(Trace(), [exact], {"weight": exact}, [None, exact], places=[""]), store, with_trace=False)
    run = Run(Trace(), [near], {"weight": near}, [None, near], places=[""])
    back = reader.run(write_run(run, store, with_trace=False, like=wide))
    assert len(store.arrays) == 1
    for found in (back.output[0], back.gradients["weight"], back.input_gradients[1]):
        assert np.abs(found - exact).max() == pytest.approx(np.abs(near - exact).max())
        assert (np.abs(found - exact) >= 0.999 * np.abs(near - exact)).all()


def test_what_has_no_form_keeps_its_arrays():
    store = Store()
    back = decode(encode([Shape(np.ones(2)), Shape(np.zeros(2))], store.put), store.arrays)
    assert all(isinstance(each, Unwritten) and each.type == "Shape" for each in back)
    assert not is_written([Shape(np.ones(2))]) and is_written({'"object":': '"object":'})


def rewritten(path: Path, change: Callable[[dict], object], arrays: dict | None = None) -> None:
    """The file with its header changed, and with digests that say so."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = json.loads(stream.read(length))["__metadata__"][file.NAME]
    header = json.loads(text.partition("\n")[2])
    change(header)
    save_text(path, json.dumps(header), load_file(path) if arrays is None else arrays)


def save_text(path: Path, body: str, arrays: dict, version: object = file.VERSION) -> None:
    digest = hashlib.blake2b(f"{version}\n{body}".encode(), digest_size=16).hexdigest()
    save_file(arrays, path, {file.NAME: f"{version} {digest}\n{body}"})


def refusal(path: Path) -> str:
    """Why the file is refused, in one line that names it."""
    with pytest.raises(UserError) as refused:
        portproof.judge(Port(), path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kept", [0, 5, 100, 5000, -1])
def test_a_truncated_file(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    assert any(word in refusal(path) for word in ("empty", "refused"))


def test_a_file_that_is_none(path):
    assert "does not exist" in refusal(path.parent / "none.safetensors")
    path.write_bytes(b"PK\x03\x04 no such format" * 50)
    assert "refused" in refusal(path)
    save_file({"a": np.ones(3)}, path)
    assert "is no recording, but another .safetensors file: write it with portproof record" in refusal(path)


def test_a_changed_byte(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert "an array is damaged" in refusal(path)
    content[-3] ^= 1
    place = content.index(b'\\"seed\\":0') + len(b'\\"seed\\":')
    content[place : place + 1] = b"7"
    path.write_bytes(content)
    assert "its header is damaged" in refusal(path)


def test_a_newer_format(path):
    now = file.VERSION
    save_text(path, "{}", {"a": np.ones(1)}, version=now + 1)
    assert f"is of a newer portproof (format {now + 1}, not {now}): update portproof" in refusal(path)
    save_text(path, "{}", {"a": np.ones(1)}, version=4)
    older = f"is of an older portproof (format 4, not {now}): record the reference again with portproof record"
    assert older in refusal(path)
    save_text(path, "{}", {"a": np.ones(1)}, version="x")
    assert "refused" in refusal(path)


def first_answer(header: dict) -> dict:
    return next(iter(header["answers"].values()))[0]


def nested(depth: int) -> dict:
    return {"list": [nested(depth - 1)]} if depth else {"list": []}


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.clear(),
        lambda header: header.pop("modules"),
        lambda header: header.update(modes=[]),
        lambda header: header.update(modes=["eval", "\x1b[2J"]),
        lambda header: header.update(seed="0" * 6000),
        lambda header: header.update(seed=None),
        lambda header: header["made_with"].pop("portproof"),
        lambda header: header.update(inputs=nested(400)),
        lambda header: header.update(inputs={"array": 10**9}),
        lambda header: header.update(inputs={"list": [{"array": -1}]}),
        lambda header: header.update(inputs={"list": [{"array": True}]}),
        lambda header: header.update(inputs={"list": [{"tuple": [], "named": ["import os", "a"]}]}),
        lambda header: header.update(arrays=header["arrays"][:-1]),
        lambda header: header.update(arrays=[[name, "float16"] for name, _ in header["arrays"]]),
        lambda header: header["modules"][1].update(name="\x1b]0;title\x07"),
        lambda header: header["modules"].pop(0),
        lambda header: header.update(modules=header["modules"] * 3),
        lambda header: header["modules"][-1].update(name="no.such.parent"),
        lambda header: header["modules"][-1].update(settings={"eps": "\x1b[2J"}),
        lambda header: header["modules"][-1].update(settings={"eps": {"list": []}}),
        lambda header: header["modules"][2]["slots"]["weight"].update(shape=[99, 99]),
        lambda header: header["modules"][2]["slots"]["weight"].update(key="elsewhere.weight"),
        lambda header: header["tensors"].update(dict.fromkeys(header["tensors"], 0)),
        lambda header: header["tensors"].clear(),
        lambda header: header["answers"].clear(),
        lambda header: header.pop("fingerprint"),
        lambda header: header["fingerprint"][0].update(outputs=header["fingerprint"][0]["gradients"]["last.bias"]),
        lambda header: header["fingerprint"][0]["gradients"].update({"nowhere.bias": []}),
        lambda header: header["fingerprint"][0]["gradients"].update({"last.bias": []}),
        lambda header: first_answer(header).update(output=[None]),
        lambda header: first_answer(header).update(output=[[0, float("1e999"), "float32"]]),
        lambda header: first_answer(header).update(output=[[0, 1.0, "int64"]]),
        lambda header: first_answer(header).update(output=[[0, 1.0, "no dtype"]]),
        lambda header: first_answer(header).update(gradients=[0]),
        lambda header: first_answer(header)["trace"]["calls"]["block.0"].update(inside="block.1"),
        lambda header: first_answer(header)["trace"]["calls"]["block.0"].update(name="nowhere"),
        lambda header: first_answer(header)["trace"]["calls"]["block.0"].update(took_random=[0, 1.0]),
        lambda header: first_answer(header)["trace"]["calls"]["block.0"].update(scale="large"),
        lambda header: first_answer(header).update(keeps="2"),
        lambda header: first_answer(header).update(upstream=None),
    ],
)
def test_a_hostile_header(path, change):
    rewritten(path, change)
    assert len(refusal(path)) < 500


def test_inputs_without_end_are_refused_before_anything_is_asked(path):
    rewritten(path, lambda header: header.update(inputs={"list": [{"array": 0}] * 500_000}))
    assert "it holds more than 1000 inputs" in refusal(path)


def test_another_seed_asks_for_what_is_not_recorded(path):
    """The gradient that is sent back to the outputs is drawn from it, not kept."""
    rewritten(path, lambda header: header.update(seed=5))
    with pytest.raises(UserError, match="does not hold what the model gives in eval mode"):
        portproof.judge(Port(), path)


def test_a_header_nested_too_deep(path):
    save_text(path, "[" * 200_000, load_file(path))
    assert "refused" in refusal(path)


def test_numbers_that_are_none(path):
    arrays = load_file(path)
    nan = np.full((3,), np.nan, np.float32)
    arrays[digest_of(nan)] = nan

    def change(header: dict) -> None:
        header["arrays"].append([digest_of(nan), "float32"])
        header["tensors"]["last.bias"] = len(header["arrays"]) - 1

    rewritten(path, change, arrays)
    assert "its last.bias holds NaN or infinity" in refusal(path)


# The commands, and one framework at a time

MODELS = {"a_ref": REF, "a_port": PORT}
WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == BLOCKED:
            raise ImportError(f"{BLOCKED} is blocked", name=BLOCKED)

BLOCKED = sys.argv.pop(1)
sys.meta_path.insert(0, Blocked())

from portproof.__main__ import main

main()
"""


@dataclass
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with the two models in it."""
    for name, text in MODELS.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in MODELS:
        sys.modules.pop(name, None)


@pytest.fixture
def run(folder, capsys) -> Callable[..., Ended]:
    """run(command, words) -> how it ended, in this process."""

    def run(command, *words: str) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.run(lambda: command.main(command.get_args_parser().parse_args(words)), command.PROG)
        return Ended(ended.value.code, *capsys.readouterr())

    return run


RECORD = ("--ref", "a_ref:Ref", "--input", "4,5", "--output", "net.ref.safetensors")
JUDGE = ("net.ref.safetensors", "--port", "a_port:Port")


def test_the_two_commands(run, folder):
    recorded = run(record_command, *RECORD)
    assert recorded.returncode == 0, recorded.stderr
    about, wrote = recorded.stdout.strip().splitlines()
    assert about.startswith("a_ref:Ref, probe weights, seed 0: about 0.1") and about.endswith(" MB")
    assert wrote.startswith("wrote net.ref.safetensors: 0.1")
    judged = run(judge_command, *JUDGE)
    assert judged.returncode == 0, judged.stderr
    assert judged.stdout.strip().splitlines()[-1].startswith("PASS judge: all ")
    located = run(judge_command, *JUDGE[:-1], "a_port:Port(activation='ReLU6')", "--mode", "eval")
    assert located.returncode == 1
    assert "located: act (ReLU), the port's act (ReLU6): forward" in located.stdout
    assert "cause, tested: it is ReLU6, not ReLU" in located.stdout and NOT_TRIED not in located.stdout


def test_flags_of_record(run, folder):
    larger = run(record_command, *RECORD, "--max-size", "2kB")
    assert larger.returncode == 2 and "more than 0.00 MB" in larger.stderr
    assert not (folder / "net.ref.safetensors").exists()
    bounded = run(record_command, *RECORD, "--modules", "act", "--mode", "eval", "--max-size", "2MB")
    assert bounded.returncode == 0, bounded.stderr
    assert "not run alone, since the recording was told to leave them out: first, last" in bounded.stdout
    refused = run(judge_command, *JUDGE, "--mode", "train")
    assert refused.returncode == 2 and "recorded in eval mode" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-size", "much"), "invalid size such as 100MB value: 'much'"),
        (("--modules", "none"), "modules names 'none'"),
        (("--output", "net.pth"), "does not end in .safetensors"),
        (("--seed", "-1"), "invalid whole number from 0 to 4294967295 value: '-1'"),
    ],
    ids=str,
)
def test_mistakes_of_record(run, words, message):
    ended = run(record_command, *RECORD, *words)
    assert ended.returncode == 2 and message in ended.stderr and ended.stderr.count("\n") == 1


def test_weights_of_both(run, folder):
    rng = np.random.default_rng(0)
    shapes = {"first.weight": (6, 5), "first.bias": (6,), "last.weight": (3, 6), "last.bias": (3,)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(arrays, folder / "ref.safetensors")
    arrays["last.bias"][1] += 1
    port = {name.replace("first", "one").replace("last", "two"): array.T.copy() for name, array in arrays.items()}
    save_file(port, folder / "port.safetensors")
    assert run(record_command, *RECORD, "--weights", "ref.safetensors").returncode == 0
    assert run(judge_command, *JUDGE).returncode == 0
    own = run(judge_command, *JUDGE, "--port-weights", "port.safetensors")
    assert own.returncode == 1 and "located: last (Linear), the port's two (Linear): weights" in own.stdout


@pytest.mark.thorough("test_the_same_verdict_and_place")
def test_each_needs_one_framework_alone(folder):
    def without(framework: str, *words: str) -> Ended:
        source = str(Path(portproof.__file__).parent.parent)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([source, str(folder)])}
        command = [sys.executable, "-c", WITHOUT, framework, *words]
        ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    recorded = without("paddle", "record", *RECORD)
    assert recorded.returncode == 0, recorded.stderr
    judged = without("torch", "judge", *JUDGE)
    assert judged.returncode == 0, judged.stderr
    assert "PASS judge: all " in judged.stdout
    located = without("torch", "judge", *JUDGE[:-1], "a_port:Port(activation='ReLU6')")
    assert located.returncode == 1, located.stderr
    assert "located: act (ReLU), the port's act (ReLU6): forward" in located.stdout


def test_a_run_of_ever_more_copies_is_refused():
    """Distances take a few bytes in the file, and an array each in memory."""
    arrays = [np.zeros(2**17)]  # 1 MB
    empty = write_run(Run(Trace()), Store(), with_trace=False)
    run = {**empty, "output": [[0, 1.0, "float64"]], "places": [""]}
    assert len(Reader(arrays).run(run).output) == 1
    with pytest.raises(ValueError, match="takes more than"):
        Reader(arrays).run({**run, "input_gradients": [[0, 1.0, "float64"]] * 400})
