"""`judge --onnx`: faithful graphs of both exporters pass, each fault is noticed and named at its module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data, set_external_data
from onnx.reference import ReferenceEvaluator
from onnx_faults import CONVOLUTIONS, EXPORTERS, TABLE, THE_MODEL, TRANSFORMER, Editable, Exports, GraphFault, scaled
from PIL import Image
from toy_exports import Decoder, drawn, export_torch, images
from toy_pairs import Ref, chaotic, normal

import portproof
from portproof.commands import judge as judge_command
from portproof.commands import record as record_command
from portproof.compare import FAIL, NOT_JUDGED, PASS, REFUSED, exit_status
from portproof.exported import engine, preprocessing
from portproof.exported.causes import Causes
from portproof.exported.constants import snapped
from portproof.exported.graph import Graph, tensors_in
from portproof.exported.judge import judge as judge_graph
from portproof.exported.match import likeness
from portproof.exported.operators import OPERATORS, Conv
from portproof.exported.preprocessing import Preprocessing
from sturdyio.cli import UserError

NETWORKS = (CONVOLUTIONS, TRANSFORMER)
HOW = {
    "resize": 40,
    "crop": 32,
    "interpolation": "bilinear",
    "order": "RGB",
    "scale": 1 / 255,
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Exports:
    return Exports(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("exporter", [*EXPORTERS, "torch, folded"])
def test_a_faithful_graph_passes(exports, network, exporter):
    verdict = portproof.judge_onnx(exports.graph(network, exporter), exports.recording(network))
    assert verdict.status == PASS and verdict, str(verdict)
    assert verdict.location is None and exit_status(verdict) == 0
    absent = [row.item.module for row in verdict.not_judged]
    is_folded = (network, exporter) == (CONVOLUTIONS, "torch, folded")
    assert absent == (["stem", "block.conv", "block.project"] if is_folded else [])
    assert ("folded in float32, 3 times" in str(verdict)) == is_folded
    shares = {row.item.name: row.atol / row.scale for row in verdict.judged if row.item.dtype == "float64"}
    norms = ["bn", "block.bn", "block.bn2"] if is_folded else []  # limits are wide where a norm was folded, only there
    assert [name for name, share in shares.items() if share > 1.1e-12 * 10] == norms
    assert max(shares.values()) < 1e-6
    assert ("could hide in bn, block.bn, block.bn2\n" in str(verdict)) == is_folded
    assert [row.status for row in verdict.rows if row.item.section.startswith("ONNX Runtime, 3x")] == [PASS, PASS]


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: f"{fault.kind}, {fault.network}")
def test_each_fault_is_noticed_and_named_at_its_module(exports, fault, exporter):
    verdict = exports.judged(fault, exporter)
    assert verdict.status == FAIL and exit_status(verdict) == 1, str(verdict)
    if fault.place is None:
        assert verdict.location is None
        assert "Got invalid dimensions" in verdict.first_failure.reason
        return
    assert verdict.location.name == fault.place, str(verdict)
    assert fault.cause in "; ".join(verdict.location.diagnosis), str(verdict)
    assert fault.place != THE_MODEL or "behind its last module" in str(verdict), str(verdict)
    # a constant that layers share is at fault in each
    assert all(each.diagnosis == verdict.location.diagnosis for each in verdict.location.also), str(verdict)
    behind = [row for row in verdict.not_judged if "it follows from" in row.reason]
    assert not behind, str(verdict)  # all that follows is judged on the reference's own values


@pytest.mark.parametrize("absent", ["", "bias", "weight", "weight, bias"])
def test_batch_statistics_are_tried_with_the_tensors_that_a_norm_has(absent):
    rng = np.random.default_rng(0)
    x, drawn = rng.normal(size=(4, 3, 5)), {leaf: rng.normal(size=3) for leaf in ("running_mean", "weight", "bias")}
    held = {f"bn.{leaf}": array for leaf, array in drawn.items() if leaf not in absent}
    tried = SimpleNamespace(ref=SimpleNamespace(weights=held), module="bn", settings={"eps": 0.1}, _is=np.allclose)
    wanted = (x - x.mean((0, 2), keepdims=True)) / np.sqrt(x.var((0, 2), keepdims=True) + 0.1)
    wanted = wanted * held.get("bn.weight", np.ones(3))[:, None] + held.get("bn.bias", np.zeros(3))[:, None]
    assert list(Causes._of_batch(tried, x, wanted)) == ["batch norm takes the batch's statistics (train mode)"]
    assert not list(Causes._of_batch(tried, x, wanted + 0.1))


def test_the_table_has_the_kinds_that_were_asked_for():
    assert len(TABLE) >= 24 and len({fault.kind for fault in TABLE}) >= 12
    assert {fault.network for fault in TABLE} == set(NETWORKS)
    assert THE_MODEL in {fault.place for fault in TABLE}


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_faults_that_stack_are_both_named(exports, exporter):
    by_kind = {fault.kind: fault for fault in TABLE if fault.network == CONVOLUTIONS}

    def both(*kinds: str) -> GraphFault:
        def edit(g: Editable) -> None:
            for kind in kinds:
                by_kind[kind].edit(g)

        return GraphFault("both", CONVOLUTIONS, edit, "")

    far = exports.judged(both("weights in float16", "a constant rounded"), exporter).location
    assert [each.name for each in (far, *far.also)] == ["stem", "block.se.gate"]
    near = exports.judged(both("weights times 1 + 3e-7", "epsilon"), exporter).location  # one right behind the other
    assert [each.name for each in (near, *near.also)] == ["block.conv", "block.bn"]
    assert "epsilon is 1e-05, not 0.001" in near.also[0].diagnosis


def changed(path: Path, changes: Mapping[str, Callable[[np.ndarray], np.ndarray]], to: Path) -> Path:
    """The graph of PyTorch's exporter, which keeps names, with some weights changed, or numbers of some value."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        change = changes.get(tensor.name if array.size > 1 else f"{array.item():g}")
        if change:
            array = np.ascontiguousarray(change(array), np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array.reshape(tensor.dims), tensor.name))
    onnx.save(model, to)
    return to


CHANGES = {
    "is the recorded one times 1 + 3e-07": lambda w: w * np.float64(1 + 3e-7),
    "is the recorded one rounded to float16": lambda w: w.astype(np.float16),
    "is the recorded one rounded to bfloat16": lambda w: torch.from_numpy(w.copy()).bfloat16().float().numpy(),
    "has its rows in another order": lambda w: w[::-1],
    "has other values than the recorded one (stale)": lambda w: np.random.default_rng(1).normal(size=w.shape) * w.std(),
    "is off the recorded one by up to": lambda w: np.round(w, 6),
}


@pytest.mark.parametrize("said", CHANGES)
@pytest.mark.parametrize("key", ["head.weight", "block.se.fc1.weight", "block.conv.weight", "block.project.weight"])
def test_a_weight_in_a_folded_graph(exports, key, said):
    """It is named at its layer, by the recorded weight, or by that with the norm folded in."""
    where = exports.folder / "faulty folded.onnx"
    path = changed(exports.graph(CONVOLUTIONS, "torch, folded"), {key: CHANGES[said]}, where)
    verdict = portproof.judge_onnx(path, exports.recording(CONVOLUTIONS), engine=False)
    norm = {"block.conv.weight": "block.bn", "block.project.weight": "block.bn2"}.get(key)
    said = f"{key}, with {norm} folded in, {said}" if norm else f"{key} {said}"
    assert verdict.status == FAIL, str(verdict)
    rows = [row for row in verdict.bad if row.item.kind == "weights"]
    if "another order" in said or "stale" in said:
        assert not rows
    else:
        (row,) = rows
        assert row.item.name == key and row.reason.startswith(said) and verdict.first_failure is row
    if norm and ("3e-07" in said or "is off" in said):  # folding rounds as much: no value need show it
        return
    assert verdict.location.name == key.removesuffix(".weight") and not verdict.location.also, str(verdict)
    assert verdict.location.diagnosis[0].startswith(said)


def test_what_is_no_weight_in_a_folded_graph(exports):
    """A layer that is not folded is judged by limits that allow for nothing."""
    model = onnx.load(exports.graph(CONVOLUTIONS, "torch, folded"))
    editable = Editable(model, {})
    editable.set(editable.nodes("HardSigmoid")[0], "alpha", 1 / 6 + 2e-7)
    onnx.save(model, exports.folder / "faulty folded.onnx")
    verdict = portproof.judge_onnx(exports.folder / "faulty folded.onnx", exports.recording(CONVOLUTIONS))
    assert verdict.status == FAIL and verdict.location.name == "block.se.gate", str(verdict)
    assert verdict.location.diagnosis == ["alpha is 0.1666669, not 1/6"] and len(verdict.bad) == 1


@pytest.fixture(scope="module")
def decoder(exports) -> tuple[Path, portproof.recording.file.Recording]:
    """A graph of Decoder, with its norms folded."""
    model, path = drawn(Decoder()), exports.folder / "decoder.onnx"
    export_torch(model, CONVOLUTIONS, path, optimize=True)
    how = {"weights": "reference", "modes": ("eval",)}
    return path, portproof.record(model, [images(CONVOLUTIONS, 2)], **how)


def test_a_layout_is_told_by_what_is_alike():
    """Of square images that are nothing alike, the first."""
    for seed in range(9):
        wanted, other = np.random.default_rng(seed).normal(size=(2, 1, 3, 2, 2))
        for values, axes in ((other, None), (wanted.swapaxes(2, 3) + 0.1 * other.swapaxes(2, 3), (0, 1, 3, 2))):
            alike, layout = likeness(values, wanted)
            assert layout.axes == axes and (alike > 0.5) == (axes is not None)


def test_layers_that_fold_otherwise(decoder):
    """A transposed convolution and a linear layer, what is no recorded tensor, factors of a size, and code."""
    verdict = portproof.judge_onnx(*decoder)
    assert verdict.status == PASS, str(verdict)
    assert [row.item.module for row in verdict.not_judged if row.item.module] == ["stem", "up", "fc"]
    assert "folded in float32, 3 times, first bn in stem\n" in str(verdict)
    assert "none of the recorded tensors, taken for computed in float32: places\n" in str(verdict)
    assert "could hide in bn, bn2, act, norm, the code before act\n" in str(verdict)


@pytest.mark.parametrize(
    ("name", "change", "said", "rows"),
    [
        ("0.7", lambda w: w * (1 + 1e-5), "a constant is 0.700007, not 7/10", ["output, in its own code, before relu"]),
        ("places", lambda w: w * (1 + 3e-6), "", ["output, in its own code, before act"]),
        (
            "up.weight",
            lambda w: w * 1.1,
            "up.weight, with bn2 folded in, is the recorded one times 1.1",
            ["up", "output"],
        ),
        ("fc.bias", lambda w: w * 1.1, "fc.bias, with norm folded in, is the recorded one times 1.1", ["fc", "output"]),
    ],
)
def test_faults_in_layers_that_fold_otherwise(decoder, tmp_path, name, change, said, rows):
    path = changed(decoder[0], {name: change}, tmp_path / "a.onnx")
    verdict = portproof.judge_onnx(path, decoder[1], engine=False)
    assert verdict.status == FAIL and verdict.location.diagnosis == ([said] if said else []), str(verdict)
    assert verdict.location.name == ("" if "own code" in rows[0] else rows[0])
    assert [each.item.name for each in verdict.bad if each.item.kind == "output"] == rows


def test_other_weights_are_refused(exports, tmp_path):
    recording = portproof.record(exports.references[CONVOLUTIONS], [images(CONVOLUTIONS, 2)], modes=("eval",))
    with pytest.raises(UserError, match="the graph holds other weights than the recording: record with --weights"):
        portproof.judge_onnx(exports.graph(CONVOLUTIONS, "torch"), recording)
    with pytest.raises(UserError, match="lacks eval mode"):
        ref = exports.references[CONVOLUTIONS]
        train = portproof.record(ref, [images(CONVOLUTIONS, 2)], modes=("train",), weights="reference")
        portproof.judge_onnx(exports.graph(CONVOLUTIONS, "torch"), train)


def test_sizes_that_were_not_recorded_are_not_judged(exports):
    how = {"weights": "reference", "modes": ("eval",)}
    recording = portproof.record(exports.references[TRANSFORMER], [images(TRANSFORMER, 2)], **how)
    verdict = portproof.judge_onnx(exports.graph(TRANSFORMER, "torch"), recording)
    assert verdict.status == PASS
    assert [row.status for row in verdict.not_judged] == [NOT_JUDGED]
    assert verdict.not_judged[0].name == "ONNX Runtime/input x, axis 0: sizes other than 2"
    assert not portproof.judge_onnx(exports.graph(TRANSFORMER, "torch"), recording, engine=False).not_judged
    with pytest.raises(UserError, match="recorded in eval mode"):
        portproof.record(exports.references[TRANSFORMER], [images(TRANSFORMER, 2)], modes=("train",), also=[[]])


def test_an_input_that_does_not_fit(exports, tmp_path):
    model = onnx.load(exports.graph(TRANSFORMER, "torch"))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "a.onnx")
    verdict = portproof.judge_onnx(tmp_path / "a.onnx", exports.recording(TRANSFORMER))
    assert verdict.status == FAIL and verdict.first_failure.reason == "input x takes 1x5x6, not 2x5x6"


def test_an_engine_that_gives_other_values_or_other_bits(exports, monkeypatch):
    """What the graph means does not tell what an engine makes of it."""
    run, calls = engine.Engine.run, []

    def other(factor: Callable[[], float]) -> Callable:
        return lambda self, feeds: [array * np.float32(factor()) for array in run(self, feeds)]

    judged = (exports.graph(TRANSFORMER, "torch"), exports.recording(TRANSFORMER))
    monkeypatch.setattr(engine.Engine, "run", other(lambda: 1 + 1e-5))
    verdict = portproof.judge_onnx(*judged)
    assert verdict.status == FAIL and {row.name for row in verdict.bad} == {
        "ONNX Runtime, 2x5x6/output", "ONNX Runtime, 3x5x6/output"
    }  # fmt: skip
    monkeypatch.setattr(engine.Engine, "run", other(lambda: calls.append(1) or 1 + len(calls) % 2 * 2**-22))
    verdict = portproof.judge_onnx(*judged)
    assert {row.name for row in verdict.bad} >= {"ONNX Runtime, 2x5x6/the same each time"}


def test_an_engine_alone_proves_nothing_of_an_output_of_which_float32_keeps_no_digit(tmp_path):
    """9 sines of a multiple; the graph gives zeros."""
    ref = Ref(chaotic(20.1, torch.sin, lambda m, x: m.line(x)), line=torch.nn.Linear(6, 6))
    shape = [8, 6]
    given, found = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Sub", ["x", "x"], ["y"])], "zeros", [given], [found])
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[opset]), tmp_path / "zeros.onnx")
    recorded = portproof.record(ref, [normal(*shape)], weights="reference", modes=("eval",))
    assert judge_graph(tmp_path / "zeros.onnx", recorded.model(), meaning=False).status == REFUSED


# Files


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_external_data(exports, tmp_path, exporter):
    """Of torch's initializers, and of Paddle's nodes Constant, which hold its weights."""
    model, recording = onnx.load(exports.graph(CONVOLUTIONS, exporter)), exports.recording(CONVOLUTIONS)
    within = len(portproof.judge_onnx(exports.graph(CONVOLUTIONS, exporter), recording).judged)
    convert_model_to_external_data(model, location="weights.data", size_threshold=100, convert_attribute=True)
    onnx.save(model, tmp_path / "a.onnx")
    verdict = portproof.judge_onnx(tmp_path / "a.onnx", recording)
    assert verdict.status == PASS and len(verdict.judged) == within, str(verdict)
    for key, value, message in (
        ("location", "../weights.data", "reads '../weights.data', which is not in its folder"),
        ("location", "/etc/hostname", "reads '/etc/hostname', which is not in its folder"),
        ("location", "no.data", "data of graph .*b.onnx, .*no.data does not exist"),
        ("offset", "-4", "b.onnx refused: .* begins at -4"),
        ("offset", "many", "b.onnx refused"),
    ):
        other = onnx.load(tmp_path / "a.onnx", load_external_data=False)
        tensor = next(tensor for tensor in tensors_in(other) if tensor.external_data)
        next(each for each in tensor.external_data if each.key == key).value = value
        (tmp_path / "b.onnx").write_bytes(other.SerializeToString())
        with pytest.raises(UserError, match=message):
            portproof.judge_onnx(tmp_path / "b.onnx", recording)
    data = tmp_path / "weights.data"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(UserError, match="data of graph .*a.onnx, .*weights.data, ends early"):
        portproof.judge_onnx(tmp_path / "a.onnx", recording)
    data.unlink()
    with pytest.raises(UserError, match="data of graph .*a.onnx, .*weights.data does not exist"):
        portproof.judge_onnx(tmp_path / "a.onnx", recording)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_external_data_of_another_size(exports, tmp_path, exporter):
    model = onnx.load(exports.graph(TRANSFORMER, exporter))
    convert_model_to_external_data(model, location="weights.data", size_threshold=100, convert_attribute=True)
    onnx.save(model, tmp_path / "a.onnx")
    tensor = next(tensor for tensor in tensors_in(model) if tensor.external_data)
    tensor.dims[0] += 1
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match="a.onnx refused: cannot reshape"):
        portproof.judge_onnx(tmp_path / "a.onnx", exports.recording(TRANSFORMER))


def test_external_data_in_inner_graphs_and_functions(tmp_path):
    """y = (x + a) * b + c, of a constant in a branch, an initializer in it, and a constant in a function."""

    def constant(value: float, name: str) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.full(3, value, "f"), name))

    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [3])

    nodes = [constant(2, "a"), helper.make_node("Add", ["x", "a"], ["s"]), helper.make_node("Mul", ["s", "b"], ["t"])]
    branch = helper.make_graph(nodes, "branch", [], [info("t")], [numpy_helper.from_array(np.full(3, 5, "f"), "b")])
    nodes = [
        helper.make_node("Constant", [], ["on"], value=numpy_helper.from_array(np.array(True), "on")),
        helper.make_node("If", ["on"], ["m"], then_branch=branch, else_branch=branch),
        helper.make_node("AddC", ["m"], ["y"], domain="own"),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    function = [constant(7, "c"), helper.make_node("Add", ["z", "c"], ["w"])]
    functions = [helper.make_function("own", "AddC", ["z"], ["w"], function, opsets[:1])]
    graph = helper.make_graph(nodes, "g", [info("x")], [info("y")])
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9)
    tensors = [tensor for tensor in tensors_in(model) if tensor.dims]
    assert sorted({tensor.name for tensor in tensors}) == ["a", "b", "c"]
    for tensor in tensors:
        (tmp_path / f"{tensor.name}.data").write_bytes(tensor.raw_data)
        set_external_data(tensor, f"{tensor.name}.data")
        tensor.ClearField("raw_data")
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    graph = Graph(tmp_path / "a.onnx")
    assert list(dict(graph.run({"x": np.arange(3.0)}))["y"]) == [17, 22, 27]
    for name in "abc":
        (tmp_path / f"{name}.data").rename(tmp_path / "away")
        with pytest.raises(UserError, match=f"{name}.data does not exist"):
            Graph(tmp_path / "a.onnx")
        (tmp_path / "away").rename(tmp_path / f"{name}.data")


@pytest.mark.parametrize("content", [b"", b"no graph at all", b"\x08\x0a", bytes(range(256))], ids=len)
def test_what_is_no_graph(exports, tmp_path, content, monkeypatch, capsys):
    exports.recording(TRANSFORMER).save(tmp_path / "net.ref.safetensors")
    (tmp_path / "a.onnx").write_bytes(content)
    words = ["--onnx", str(tmp_path / "a.onnx"), str(tmp_path / "net.ref.safetensors")]
    with pytest.raises(UserError) as raised:
        judge_command.main(judge_command.get_args_parser().parse_args(words))
    assert "a.onnx" in str(raised.value) and "\n" not in str(raised.value)


def test_a_graph_over_two_gib(exports, tmp_path):
    with (tmp_path / "a.onnx").open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(UserError, match="over 2 GiB, which no protobuf holds: export it with external data"):
        portproof.judge_onnx(tmp_path / "a.onnx", exports.recording(TRANSFORMER))


def test_an_operator_without_a_reference(exports, tmp_path, capsys):
    """Engines write such graphs: they are refused, unless one asks for the engine alone."""
    model = onnx.load(exports.graph(TRANSFORMER, "torch"))
    weights = {key: tensor.numpy() for key, tensor in exports.references[TRANSFORMER].state_dict().items()}
    scaled("layers.0.attn.v.weight")(Editable(model, weights))  # by 3e-7, which no engine shows
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for node in model.graph.node:
        if node.op_type == "Gelu":
            node.domain = "com.microsoft"
            del node.attribute[:]
    path, recording = tmp_path / "a.onnx", tmp_path / "net.ref.safetensors"
    onnx.save(model, path)
    exports.recording(TRANSFORMER).save(recording)

    def judged(*flags: str) -> tuple[int, list[str]]:
        words = ["--onnx", str(path), str(recording), *flags]
        status = judge_command.main(judge_command.get_args_parser().parse_args(words))
        return status, capsys.readouterr().out.splitlines()

    for flags in ((), ("--engine", "none")):
        status, lines = judged(*flags)
        assert status == REFUSED and lines[-1].startswith("REFUSED judge: "), lines
        assert "onnx cannot evaluate the graph" in lines[-1] and "'Gelu' from domain 'com.microsoft'" in lines[-1]
        assert lines[-1].endswith("judge --engine-only tells what the engine makes of it")
    status, lines = judged("--engine-only")
    assert status == PASS and lines[-1].startswith("PASS judge: all 4 items"), lines
    assert lines[-1].endswith("what the graph means was not judged, the engine alone")
    for node in model.graph.node:
        if node.op_type == "Gelu":
            node.op_type = "QuickGelu"
    onnx.save(model, path)
    for flags in ((), ("--engine-only",)):  # what is wrong is worse than what is not known
        status, lines = judged(*flags)
        assert status == FAIL and "first ONNX Runtime, 2x5x6/output" in lines[-1], lines
    with pytest.raises(SystemExit):
        judged("--engine-only", "--engine", "none")


def test_an_operator_that_raises_in_onnxs_reference(exports, monkeypatch):
    def raising(*args, **kwargs):
        raise IndexError("out of range")

    monkeypatch.setattr(Conv, "_run", raising)
    verdict = portproof.judge_onnx(exports.graph(CONVOLUTIONS, "torch"), exports.recording(CONVOLUTIONS))
    assert verdict.status == REFUSED and exit_status(verdict) == 2
    assert "cannot evaluate the graph, Conv node_conv2d: IndexError: out of range:" in str(verdict)


# Numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(1 / 6, "1/6"), (1e-5, "1e-05"), (0.2, "0.2"), (0.5, ""), (3.0, ""), (6**-0.5, "sqrt(1/6)"), (2**0.5, "sqrt(2)"),
     ((2 / np.pi) ** 0.5, "sqrt(2/pi)"), (0.1666667, ""), (0.7390851332, ""), (float("inf"), ""), (-1 / 3, "-1/3")],
)  # fmt: skip
def test_what_a_float32_stands_for(value, text):
    number, words = snapped(float(np.float32(value)))
    assert words == text
    assert number == (value if text else float(np.float32(value)))


RESIZES = [
    (mode, transform, nearest)
    for mode in ("linear", "cubic", "nearest")
    for transform in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")
    for nearest in (("floor", "ceil", "round_prefer_floor", "round_prefer_ceil") if mode == "nearest" else ("floor",))
]


def evaluated(
    kind: str, shape: tuple[int, ...], tensors: dict[str, np.ndarray], fast: bool, **attributes
) -> np.ndarray:
    names = ["x", *tensors]
    node = helper.make_node(kind, ["" if name.startswith("_") else name for name in names], ["y"], **attributes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.DOUBLE, shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    for name, array in tensors.items():
        if not name.startswith("_"):
            graph.initializer.append(numpy_helper.from_array(array, name))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    evaluator = ReferenceEvaluator(model, new_ops=list(OPERATORS) if fast else None, optimized=False)
    return evaluator.run(None, {"x": np.random.default_rng(0).normal(size=shape)})[0]


@pytest.mark.parametrize(("mode", "transform", "nearest"), RESIZES)
def test_resize_is_onnxs(mode, transform, nearest):
    how = {"mode": mode, "coordinate_transformation_mode": transform, "nearest_mode": nearest}
    for scale in (np.array([1, 1, 2, 1.5], np.float32), np.array([1, 1, 0.75, 1], np.float32)):
        tensors = {"_roi": scale, "scales": scale}
        fast, slow = (evaluated("Resize", (1, 2, 4, 6), tensors, each, **how) for each in (True, False))
        assert fast.shape == slow.shape and np.abs(fast - slow).max() < 1e-12


@pytest.mark.parametrize(
    ("kind", "weight", "attributes"),
    [
        ("Conv", (6, 4, 3, 3), {"strides": [2, 1], "pads": [1, 0, 2, 1]}),
        ("Conv", (6, 2, 3, 2), {"group": 2, "dilations": [1, 2]}),
        ("Conv", (8, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ("Conv", (3, 4, 1, 1), {}),
        ("ConvTranspose", (4, 3, 3, 2), {"strides": [2, 3], "pads": [1, 0, 2, 1], "dilations": [1, 2]}),
        ("ConvTranspose", (4, 3, 2, 2), {"strides": [2, 2], "output_padding": [1, 0]}),
        ("ConvTranspose", (4, 3, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ("MaxPool", None, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("AveragePool", None, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("AveragePool", None, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
        ("AveragePool", None, {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}),
        ("Erf", None, {}),
        ("Sigmoid", None, {}),
        ("Gelu", None, {"approximate": "tanh"}),
        ("Gelu", None, {}),
        ("HardSwish", None, {}),
    ],
)
def test_operators_are_onnxs(kind, weight, attributes):
    tensors = {} if weight is None else {"w": np.random.default_rng(1).normal(size=weight)}
    fast, slow = (evaluated(kind, (2, 4, 7, 8), tensors, each, **attributes) for each in (True, False))
    # onnx's own Gelu and HardSwish are functions, whose constants are rounded to float32
    assert fast.shape == slow.shape and np.abs(fast - slow).max() < (1e-6 if kind in ("Gelu", "HardSwish") else 1e-12)


def test_transposed_convolutions_in_groups_are_torchs():
    """onnx has none."""
    how = {"stride": 2, "padding": (1, 0), "output_padding": (0, 1), "groups": 2}
    conv = torch.nn.ConvTranspose2d(4, 6, (3, 2), **how).double()
    x = np.random.default_rng(0).normal(size=(2, 4, 7, 8))
    tensors = {"w": conv.weight.detach().numpy(), "b": conv.bias.detach().numpy()}
    pads = {"strides": [2, 2], "pads": [1, 0, 1, 0], "output_padding": [0, 1], "group": 2}
    found = evaluated("ConvTranspose", x.shape, tensors, True, **pads)
    assert np.abs(found - conv(torch.from_numpy(x)).detach().numpy()).max() < 1e-12


def test_every_float32_in_the_graph_is_widened(exports):
    for network in NETWORKS:
        graph = Graph(exports.graph(network, "paddle"))
        given = graph.feeds({"x": images(network, 2)})
        assert {array.dtype for _, array in graph.run(given)} <= {np.dtype(np.float64), np.dtype(np.int64)}


# Bounds that no input reaches


def one_node(kind: str, *inputs: str, opset: int = 17, **attributes: float) -> onnx.ModelProto:
    """y = kind(inputs), of which "x" is 2 x 3 and others are numbers."""
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    numbers = [numpy_helper.from_array(np.array(name, np.float32), name) for name in inputs if name != "x"]
    nodes = [helper.make_node(kind, inputs, ["y"], name="n", **attributes)]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], numbers)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])


SMALL, LARGE = (np.array([[-4, 0.5, largest], [1, -1, 2]], np.float32) for largest in (2.2, 7))
RELU, RELU6, SAME = torch.nn.ReLU(), torch.nn.ReLU6(), torch.nn.Identity()
FIFTHS, ABOVE_9 = Ref(lambda m, x: (x / 5 + 0.5).clamp(0, 1)), Ref(lambda m, x: x > 9)
BRANCH, BOUND = "1 branch never entered", "1 bound of the graph never reached"


@pytest.mark.parametrize(
    ("graph", "ref", "inputs", "caveats", "bounds"),
    [
        (one_node("Clip", "x", "0", "6"), RELU6, LARGE, [], ""),
        (one_node("Clip", "x", "0", "6"), RELU6, SMALL, [BRANCH, BOUND], "Clip n, above 6"),
        (one_node("Clip", "x", "0", "5"), RELU6, SMALL, [BRANCH, BOUND], "Clip n, above 5"),
        (one_node("Relu", "x"), RELU6, SMALL, [BRANCH], ""),
        (one_node("Clip", "x", "0", "3e38"), RELU, SMALL, [BOUND], "Clip n, above 3e+38"),
        (one_node("Clip", "x", "0", "3.4e38"), RELU, SMALL, [], ""),  # the largest number bounds nothing
        (
            one_node("Clip", "x", opset=6, min=-9.0, max=9.0),
            SAME,
            SMALL,
            ["2 bounds of the graph never reached"],
            "Clip n, below -9; Clip n, above 9",
        ),
        (one_node("Relu", "x"), RELU, SMALL + 4, [BOUND], "Relu n, below 0"),
        (one_node("Min", "x", "9"), SAME, SMALL, [BOUND], "Min n, above 9"),
        (one_node("Max", "-9", "x"), SAME, SMALL, [BOUND], "Max n, below -9"),
        (one_node("HardSwish", "x"), torch.nn.Hardswish(), SMALL, [BRANCH, BOUND], "HardSwish n, above 3"),
        (one_node("HardSigmoid", "x"), FIFTHS, SMALL, [BRANCH, BOUND], "HardSigmoid n, above 2.5"),
        (one_node("Greater", "x", "9"), ABOVE_9, SMALL, [BOUND], "Greater n, above 9"),
    ],
)
def test_a_bound_that_no_input_reaches_stands_in_the_last_line(tmp_path, graph, ref, inputs, caveats, bounds):
    onnx.save(graph, tmp_path / "a.onnx")
    recording = portproof.record(ref, [inputs], weights="reference", modes=("eval",))
    verdict = portproof.judge_onnx(tmp_path / "a.onnx", recording, engine=False)
    assert verdict.status == PASS and verdict.caveats == caveats, str(verdict)
    assert "".join(note for note in verdict.notes if "bound of the graph" in note).endswith(bounds)


# What is done to images


def photos() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((60, 48), (50, 70))]


def prepare(image: Image.Image) -> torch.Tensor:
    """The reference's own, of HOW, written otherwise."""
    short, (width, height) = min(image.size), image.size
    sizes = 40 if width == short else int(40 * width / short), 40 if height == short else int(40 * height / short)
    image = image.resize(sizes, Image.Resampling.BILINEAR)
    left, top = round((image.width - 32) / 2), round((image.height - 32) / 2)
    array = torch.from_numpy(np.array(image.crop((left, top, left + 32, top + 32)))).permute(2, 0, 1).float() / 255
    return (array - torch.tensor(HOW["mean"]).view(3, 1, 1)) / torch.tensor(HOW["std"]).view(3, 1, 1)


@pytest.fixture(scope="module")
def with_images(exports) -> portproof.recording.file.Recording:
    how = {"weights": "reference", "modes": ("eval",), "images": photos(), "preprocess": prepare}
    return portproof.record(exports.references[TRANSFORMER], [images(TRANSFORMER, 2)], **how)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"mean": [0.5, 0.5, 0.5]}, "by mean: mean is (0.5, 0.5, 0.5), the reference's (0.485, 0.456, 0.406)"),
        ({"std": [0.5, 0.224, 0.225]}, "by std: std is (0.5, 0.224, 0.225), the reference's (0.229, 0.224, 0.225)"),
        ({"mean": [0, 0, 0], "std": [1, 1, 1]}, "by mean and std"),
        ({"order": "BGR"}, "by order: it is BGR, the reference's RGB"),
        ({"interpolation": "bicubic"}, "by interpolation: it is bicubic, the reference's bilinear"),
        ({"resize": 36}, "by resize: it is 36, the reference's 40"),
        ({"crop": 28}, "by crop: it is 28, the reference's 32"),
        ({"interpolation": "nearest", "resize": 36, "order": "BGR"}, "by none of"),
    ],
)
def test_what_is_done_to_images(exports, with_images, tmp_path, change, told):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"classes": [], "preprocessing": {**HOW, **change}}))
    judged = {"preprocessing": path, "engine": False}
    verdict = portproof.judge_onnx(exports.graph(TRANSFORMER, "torch"), with_images, **judged)
    assert verdict.status == (FAIL if change else PASS), str(verdict)
    assert {row.item.section for row in verdict.bad} == ({"preprocessing"} if change else set())
    assert told in str(verdict) and ("preprocessing differs" in str(verdict)) == bool(change)


def test_a_preprocessing_that_is_none(exports, with_images, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(HOW))
    assert Preprocessing.load(path).crop == 32  # bare, too
    for content in (
        "{",
        "[]",
        '{"resize": 3}',
        json.dumps({**HOW, "order": "GBR"}),
        json.dumps({**HOW, "std": [1, 1]}),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match="a.json refused"):
            Preprocessing.load(path)
    with pytest.raises(UserError, match="the recording holds no images: record with --images"):
        preprocessing.compare_preprocessing(path, exports.recording(TRANSFORMER).model())
    for wrong in (
        {"images": photos()},
        {"preprocess": prepare},
        {"images": [photos()[0][:, :, 0]], "preprocess": prepare},
    ):
        with pytest.raises(UserError):
            portproof.record(torch.nn.Linear(2, 2), [np.ones((1, 2))], **wrong)


# The command, without a framework

WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "paddle"):
            raise ImportError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())

from portproof.__main__ import main

main()
"""
MODULE = """
import torch

def network():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())

def prepare(image):
    import numpy as np
    return np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
"""


def test_the_commands(exports, tmp_path, monkeypatch):
    """`record` with further sizes and images, then `judge --onnx` where neither framework can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("a_net.py").write_text(MODULE)
    Path("photos").mkdir()
    Image.fromarray(photos()[0]).save("photos/a.png")
    import a_net

    torch.manual_seed(0)
    model = a_net.network().eval()
    torch.save(model.state_dict(), "net.pth")
    record = ["--ref", "a_net:network", "--weights", "net.pth", "--input", "2,3,16,16", "--also", "1,3,16,16"]
    record += ["--images", "photos", "--preprocess", "a_net:prepare", "--output", "net.ref.safetensors"]
    assert record_command.main(record_command.get_args_parser().parse_args(record)) == 0
    w, b = (model[0].weight.detach().numpy(), model[0].bias.detach().numpy())
    norm = [
        tensor.detach().numpy()
        for tensor in (model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var)
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "n0", "n1", "n2", "n3"], ["n"], epsilon=1e-5),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", None, None, None]) for name in "xy"]
    arrays = {"w": w, "b": b, **{f"n{i}": array for i, array in enumerate(norm)}}
    made = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], made)
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), "net.onnx")
    plain = {"resize": None, "crop": None, "scale": 1 / 255, "mean": [0, 0, 0], "std": [1, 1, 1]}
    Path("net.json").write_text(json.dumps({**HOW, **plain}))
    env = os.environ | {
        "PYTHONPATH": str(Path(portproof.__file__).parent.parent) + os.pathsep + os.environ.get("PYTHONPATH", "")
    }

    def judged(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", WITHOUT, "judge", "net.ref.safetensors", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    ended = judged("--onnx", "net.onnx", "--preprocessing", "net.json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("PASS judge: all ")
    assert "ONNX Runtime, 1x3x16x16/output" in ended.stdout and "preprocessing" in ended.stdout
    weights = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    editable = Editable(onnx.load("net.onnx"), weights)
    editable.set(editable.nodes("BatchNormalization")[0], "epsilon", 1e-3)
    onnx.save(editable.model, "faulty.onnx")
    ended = judged("--onnx", "faulty.onnx", "--engine", "none")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "located: 1 (BatchNorm2d): forward" in ended.stdout
    assert "cause, tested: epsilon is 0.001, not 1e-05" in ended.stdout
    refused = judged("--onnx", "net.json")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "net.json" in refused.stderr
    for words, message in (
        ((), "give one of --port"),
        (("--port", "a:b", "--preprocessing", "net.json"), "goes with --onnx"),
    ):
        refused = judged(*words)
        assert refused.returncode == 2 and message in refused.stderr and refused.stderr.count("\n") == 1
