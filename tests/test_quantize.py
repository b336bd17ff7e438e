"""tools/quantize_model.py: what is quantized, what each layer is said to cost, and what is refused."""

from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from exported_models import CLASSES, CROP, call, export, load_tool, need

from mobilenetv3_common.digits import write_digits
from mobilenetv3_deploy.card import read_card
from mobilenetv3_deploy.engines import load
from mobilenetv3_proof.package import PORT, REF
from mobilenetv3_proof.training import Recipe, Trainee, reestimate
from sturdyio.cli import Failed, UserError

need("deploy", "onnx", "onnxruntime", "onnxslim", "paddle2onnx")
import onnx  # noqa: E402  after the check that it is there

from mobilenetv3_deploy import quantization  # noqa: E402

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "lite_data" / "train"
BATCH = np.random.default_rng(1).standard_normal((2, 3, CROP, CROP), np.float32)
tool = load_tool("quantize_model")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    return export("paddle", tmp_path_factory.mktemp("paddle"))


@pytest.fixture
def quantize(exported, tmp_path, monkeypatch):
    """quantize(*flags) -> the folder that is written, of 4 calibration images, with a table of two layers."""
    errors = quantization.Quantizer.errors
    monkeypatch.setattr(quantization.Quantizer, "errors", lambda self, batch: islice(errors(self, batch), 2))

    def quantize(*flags: str | Path, images: Path = IMAGES, model: Path = exported) -> Path:
        output = tmp_path / "int8"
        call(tool, "--model", model, "--images", images, "--output", output, "--count", 4, *flags)
        return output

    return quantize


def quantizer_of(folder: Path) -> quantization.Quantizer:
    batches = np.random.default_rng(0).standard_normal((2, 1, 3, CROP, CROP), np.float32)
    return quantization.Quantizer(folder / "model.onnx", read_card(folder).layers, batches)


@pytest.fixture(scope="module")
def quantizer(exported) -> quantization.Quantizer:
    return quantizer_of(exported)


@pytest.fixture(scope="module")
def errors(quantizer) -> dict[str, quantization.LayerError]:
    return {one.layer: one for one in quantizer.errors(BATCH)}


def layers_of(package: str) -> list[str]:
    """The convolutions and linear layers of the small model."""
    trainee = Trainee(package)
    named = trainee.backend.layers.named_modules(trainee.models.mobilenet_v3_small(num_classes=CLASSES))
    return sorted(name for name, layer in named if type(layer).__name__ in ("Conv2d", "Conv2D", "Linear"))


@pytest.mark.thorough("the port", but="paddle")
@pytest.mark.parametrize(("framework", "package"), [("paddle", PORT), ("torch", REF)])
def test_every_layer_is_quantized_under_its_modules_name(exported, tmp_path, framework, package):
    quantizer = quantizer_of(exported if framework == "paddle" else export(framework, tmp_path, "--softmax"))
    assert sorted(quantizer.layers) == layers_of(package)
    stored = quantization.tensors(quantizer.quantized([*quantizer.layers]))
    weights = [tensor for _, tensor in quantizer.layers.values()]
    assert all(stored[f"{name}_quantized"].dtype == np.int8 and name not in stored for name in weights)


def test_the_folder_is_an_exported_model_for_both_engines(exported, quantize, capsys):
    folder = quantize()
    card, source = read_card(folder), read_card(exported)
    assert [*card.files] == ["model.onnx"]
    assert (card.quantized, source.quantized) == ({"images": 4, "seed": 0, "float32": []}, None)
    assert (card.preprocessing, card.framework, card.output) == (source.preprocessing, source.framework, "logits")
    assert (folder / "model.onnx").stat().st_size < 0.35 * (exported / "model.onnx").stat().st_size
    said = capsys.readouterr().out
    assert "4 images" in said and "seed 0" in said and "all 54 layers" in said
    assert "\nonnxruntime: " in said and "--keep-float " in said


def test_the_weights_errors_are_those_of_7_bits(quantizer, errors):
    weights = quantization.tensors(quantizer.graph)
    channels = {"classifier.0": 1024, "classifier.3": CLASSES}
    for layer, error in errors.items():
        weight = weights[quantizer.layers[layer][1]].astype(np.float64)
        axis = weight.shape.index(channels.get(layer, len(weight)))
        others = tuple(i for i in range(weight.ndim) if i != axis)
        for axes, found in zip((others, None), error.weights, strict=True):
            scale = np.abs(weight).max(axes, keepdims=True) / 64  # whole numbers from -64 to 64
            expected = quantization.relative_error(np.round(weight / scale) * scale, weight)
            assert found == pytest.approx(expected, rel=1e-3), layer  # values between two steps may fall either way


def test_the_outputs_error_is_of_this_layer_alone(quantizer, errors):
    layer = "features.4.block.1.0"
    graph = quantizer.quantized([layer])
    node = quantizer.layers[layer][0]
    (activation,) = {one.input[0] for one in quantizer.graph.graph.node if one.name == node}
    operators = [one.op_type for one in graph.graph.node]
    assert operators.count("QuantizeLinear") == 1  # what goes in
    assert any(one.op_type == "QuantizeLinear" and one.input[0] == activation for one in graph.graph.node)
    exact = quantization.outputs(quantizer.graph, BATCH)
    expected = quantization.relative_error(quantization.outputs(graph, BATCH), exact)
    assert 0 < errors[layer].output[0] == expected


def test_what_a_layer_reads_is_signed_where_that_costs_at_most_half_a_bit(quantizer):
    graph = quantizer.quantized([*quantizer.layers])
    arrays, found = quantization.tensors(graph), set()
    for node in graph.graph.node:
        if node.op_type == "QuantizeLinear":
            low, high = quantizer.ranges[node.input[0]].range_value
            lost = np.log2(2 * max(abs(low), abs(high)) / (high - low))  # bits, of a scale that is symmetric about 0
            zero = arrays[node.input[2]]
            assert zero.dtype == (np.int8 if lost <= 0.5 else np.uint8), node.input[0]
            assert zero == 0 or zero.dtype == np.uint8
            found.add(zero.dtype)
    assert len(found) == 2


def test_what_the_graph_says_is_the_model_where_nothing_is_quantized(exported, quantizer):
    exact = load(exported, "onnxruntime").run(BATCH)
    # The same float32 operators, joined in other ways: 54 layers deep, some rounding each.
    assert quantization.relative_error(quantization.outputs(quantizer.quantized([]), BATCH), exact) < 1e-5


def test_layers_that_are_kept_stay_as_they_are(exported, quantize, quantizer, capsys):
    folder = quantize("--keep-float", "classifier", "features.0.0")
    kept = ["classifier.0", "classifier.3", "features.0.0"]
    assert read_card(folder).quantized["float32"] == kept
    stored, before = (quantization.tensors(graph) for graph in (onnx.load(folder / "model.onnx"), quantizer.graph))
    for layer, (_, name) in quantizer.layers.items():
        if layer in kept:
            np.testing.assert_array_equal(stored[name], before[name])
        else:
            assert name not in stored
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[-1] for line in lines}
    assert (rows["features.0.0"], rows["features.1.block.0.0"]) == ("float32", "int8")
    assert any("--keep-float classifier.0 classifier.3 features.0.0 features.1" in line for line in lines)


@pytest.mark.thorough("test_every_layer_is_quantized_under_its_modules_name")
def test_one_seed_gives_one_file(quantize, tmp_path):
    first = (quantize() / "model.onnx").read_bytes()
    (tmp_path / "int8").rename(tmp_path / "before")
    assert (quantize() / "model.onnx").read_bytes() == first
    (tmp_path / "int8").rename(tmp_path / "again")
    assert (quantize("--seed", "1") / "model.onnx").read_bytes() != first


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_an_engine_that_computes_something_else_fails(quantize, tmp_path, monkeypatch, name):
    if name == "openvino":
        need("openvino", "openvino")

    def wrong(folder, engine):
        loaded = load(folder, engine)
        if engine == name:
            monkeypatch.setattr(loaded, "_run", lambda batch, run=loaded._run: np.minimum(run(batch), 0))  # saturated
        return loaded

    monkeypatch.setattr(tool, "load", wrong)
    with pytest.raises(Failed, match=f"{name}: .* computes something else"):
        quantize()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_quantized_is_refused(exported, quantize, tmp_path, monkeypatch):
    refused = partial(pytest.raises, UserError)
    with refused(match="layer features.99 is not in the model, which has .*features.0.0, "):
        quantize("--keep-float", "features.99")
    with refused(match="layer features.1.block.0.0.weight is not in the model"):
        quantize("--keep-float", "features.1.block.0.0.weight")
    with refused(match="--keep-float names every layer"):
        quantize("--keep-float", "features", "classifier")
    with refused(match="holds no images"):
        quantize(images=tmp_path)
    with refused(match="image folder .*missing does not exist"):
        quantize(images=tmp_path / "missing")
    with refused(match="validation folder .*missing does not exist"):
        quantize("--val", tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
    folder = quantize()
    with refused(match="already there"):
        quantize()
    folder.rename(tmp_path / "quantized")
    with refused(match="is quantized already"):
        quantize(model=tmp_path / "quantized")
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    with refused(match=r"pip install -e '\.\[deploy\]'"):
        quantize()


@pytest.mark.thorough("test_every_layer_is_quantized_under_its_modules_name, which trains nothing")
def test_top1_on_digits_stays_within_a_point(tmp_path, capsys):
    write_digits(tmp_path / "digits")
    trainee, recipe = (
        Trainee(REF),
        Recipe(str(tmp_path / "digits"), "mobilenet_v3_small", epochs=4, batch_size=32, lr=0.1),
    )
    model = trainee.models.mobilenet_v3_small(num_classes=10)
    trainee.models.shared_init(model, 0)
    optimizer, lr_scheduler = trainee.build_optimizer(model, recipe)
    criterion, (loader, _) = trainee.criterion.build_criterion(), trainee.loaders(recipe, 0)
    for epoch in range(recipe.epochs):
        trainee.data.set_epoch(loader, epoch)
        trainee.train_epoch(model, criterion, optimizer, loader, epoch)
        lr_scheduler.step()
    reestimate(trainee, model, loader)
    trainee.models.save_weights(model, tmp_path / "digits.safetensors")
    sizes = ("--val-crop-size", recipe.size, "--val-resize-size", recipe.size)
    where = ("--framework", "torch", "--weights", tmp_path / "digits.safetensors", "--output", tmp_path / "float32")
    call(load_tool("export_model"), *where, *sizes)
    folders = ("--images", tmp_path / "digits" / "train", "--val", tmp_path / "digits" / "val")
    call(tool, "--model", tmp_path / "float32", "--output", tmp_path / "int8", *folders)
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert words[:4] == ["top-1", "on", "355", "images:"]
    quantized, exact = float(words[4]), float(words[7])
    assert exact > 50, "it has learned too little to lose anything"
    assert quantized >= exact - 1
