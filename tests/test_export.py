"""tools/export_model.py: what is written, that each replacement is proved, and what is refused."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from exported_models import CLASSES, CROP, SIZES, call, export, load_tool, need, probe_weights
from paddle import nn

import mobilenetv3_paddle.export as port_export
import mobilenetv3_paddle.models as port_models
import mobilenetv3_ref.export as ref_export
import mobilenetv3_ref.models as ref_models
from mobilenetv3_deploy.card import read_card, sha256_of, write_card
from mobilenetv3_deploy.preprocessing import Preprocessing
from mobilenetv3_paddle.models.layers import AdaptiveAvgPool2D, Hardsigmoid
from mobilenetv3_proof.replacement import proof_line, replaced
from sturdyio.cli import Failed, UserError

need("deploy", "onnx", "onnxruntime", "paddle2onnx")
import onnx  # noqa: E402  after the check that it is there

tool = load_tool("export_model")
BATCH = np.random.default_rng(1).standard_normal((2, 3, CROP, CROP), np.float32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    return export("paddle", tmp_path_factory.mktemp("paddle"))


@pytest.fixture(scope="module")
def port(exported):
    model = port_models.mobilenet_v3_small(num_classes=CLASSES)
    port_models.load_weights(model, exported / "weights.safetensors")
    model.eval()
    return model


def operators(folder: Path) -> list[str]:
    return [node.op_type for node in onnx.load(folder / "model.onnx").graph.node]


# --- what is written


def test_the_folder_is_complete(exported):
    card = read_card(exported)
    assert sorted(path.name for path in exported.iterdir()) == ["card.json", *sorted(card.files)]
    assert [*card.files] == ["inference.json", "inference.pdiparams", "model.onnx", "weights.safetensors"]
    assert (card.framework, card.model, card.num_classes, card.output) == (
        *("paddle", "mobilenet_v3_small", CLASSES, "logits"),
    )
    assert card.preprocessing == Preprocessing(resize=72, crop=CROP)
    assert card.weights_sha256 == sha256_of(exported.parent / "probe.pdparams")
    assert {"paddle", "paddle2onnx", "onnx"} <= card.made_with.keys()
    assert [line.split(": ")[1].split(",")[0] for line in card.replaced] == ["10 layers", "9 layers", "34 layers"]
    assert json.loads((exported / "card.json").read_text())["format"] == 2


def test_layers_are_replaced_and_batch_norm_is_folded(exported):
    found = operators(exported)
    assert (found.count("GlobalAveragePool"), found.count("HardSigmoid"), found.count("Conv")) == (10, 9, 52)
    assert not {"BatchNormalization", "ReduceMean", "Clip", "Softmax"} & {*found}
    model = onnx.load(exported / "model.onnx")
    assert [one.version for one in model.opset_import] == [18]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param  # any number of images


@pytest.mark.thorough("test_the_folder_is_complete, test_the_reference_is_folded")
def test_the_reference_is_exported(tmp_path):
    need("deploy", "onnxscript")
    folder = export("torch", tmp_path, "--softmax")
    card = read_card(folder)
    assert [*card.files] == ["model.onnx", "weights.safetensors"]
    assert (card.framework, card.output, len(card.replaced)) == ("torch", "probabilities", 1)
    assert operators(folder).count("Conv") == 52 and "Softmax" in operators(folder)


# --- replacements are proved


def test_a_folded_model_has_no_batch_norm_and_the_trained_one_is_left_alone(port):
    before = port(port_export.paddle.to_tensor(BATCH)).numpy()
    model, names, verdict = replaced("paddle", port, port_export.fold_batch_norm, BATCH)
    assert verdict and len(names) == 34
    assert not any(isinstance(layer, nn.BatchNorm2D) for layer in model.sublayers())
    assert np.array_equal(port(port_export.paddle.to_tensor(BATCH)).numpy(), before)


def test_the_reference_is_folded(tmp_path):
    model = ref_models.mobilenet_v3_small(num_classes=CLASSES)
    ref_models.load_weights(model, probe_weights(tmp_path / "probe.pth"))
    _, names, verdict = replaced("torch", model.eval(), ref_export.fold_batch_norm, BATCH)
    assert verdict and len(names) == 34
    assert "34 layers, equal in 128 outputs in float64" in proof_line("folded", names, verdict)


class Roof(nn.Layer):
    """Right but above 4, which pooled and convolved values of a network may never reach."""

    def forward(self, x):
        return port_export.NativeHardsigmoid()(x) - (x - 4).clip(min=0)


def folded_with_epsilon(model, change: float) -> list[str]:
    for layer in model.sublayers():
        if isinstance(layer, nn.BatchNorm2D):
            layer._epsilon *= change
    return port_export.fold_batch_norm(model)


WRONG = {
    "a slope of 0.1666667": partial(port_export.replace_layers, kind=Hardsigmoid, build=nn.Hardsigmoid),
    "another branch": partial(port_export.replace_layers, kind=Hardsigmoid, build=Roof),
    "the largest": partial(port_export.replace_layers, kind=AdaptiveAvgPool2D, build=partial(nn.AdaptiveMaxPool2D, 1)),
    "epsilon": partial(folded_with_epsilon, change=1 + 1e-6),
}


@pytest.mark.parametrize("replace", WRONG.values(), ids=WRONG)
def test_a_wrong_replacement_is_not_proved(port, replace):
    _, names, verdict = replaced("paddle", port, replace, BATCH)
    with pytest.raises(Failed, match="it: not proved equal at .* in float64: max"):
        proof_line("it", names, verdict)


def test_nothing_is_written_where_a_replacement_is_wrong(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(port_export, "REPLACEMENTS", {"slope": WRONG["a slope of 0.1666667"]})
    with pytest.raises(Failed, match="slope: not proved equal"):
        call(tool, "--weights", exported.parent / "probe.pdparams", "--output", tmp_path / "out", *SIZES)
    assert not any(tmp_path.iterdir())


def test_a_written_file_that_differs_is_found(exported, tmp_path):
    folder = Path(shutil.copytree(exported, tmp_path / "other"))
    model = onnx.load(folder / "model.onnx")
    constants = (node.attribute[0].t for node in model.graph.node if node.op_type == "Constant")
    (weights,) = (one for one in (*model.graph.initializer, *constants) if list(one.dims) == [1024, CLASSES])
    changed = onnx.numpy_helper.to_array(weights) * np.float32(1.001)
    weights.CopyFrom(onnx.numpy_helper.from_array(changed, weights.name))
    onnx.save(model, folder / "model.onnx")
    card, batch = write_card(folder, read_card(exported)), np.concatenate([BATCH, BATCH])
    with pytest.raises(Failed, match="onnxruntime, . image.*not the model as trained"):
        tool.check_files(folder, card, batch)
    tool.check_files(exported, read_card(exported), batch)


# --- mistakes


@pytest.mark.parametrize("opset, said", [(6, "opset_version to 7"), (99, "between 7 and 21")])
def test_an_exporter_that_aborts_is_one_line(exported, tmp_path, opset, said):
    with pytest.raises(UserError, match=f"{said}.*choose another --opset than {opset}") as refused:
        tool.write_onnx("paddle", exported / "inference.json", tmp_path / "model.onnx", opset)
    assert "\n" not in str(refused.value)
    assert not any(tmp_path.iterdir())


def test_another_opset_than_asked_for_is_refused(exported, tmp_path, monkeypatch):
    def write(*_args, **_kwargs):
        shutil.copy(exported / "model.onnx", tmp_path / "model.onnx")
        return tool.subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(tool.subprocess, "run", write)
    with pytest.raises(UserError, match="only write opset 18 here"):
        tool.write_onnx("torch", tmp_path, tmp_path / "model.onnx", 17)


def test_an_output_that_is_there_is_kept(exported, tmp_path):
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(UserError, match="already there"):
        call(tool, "--weights", exported.parent / "probe.pdparams", "--output", tmp_path, *SIZES)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(tool, "find_spec", lambda name: None if name == "paddle2onnx" else True)
    with pytest.raises(UserError, match=r"needs paddle2onnx to export: pip install -e '\.\[deploy\]'"):
        tool.package_of("paddle")


def damaged(change):
    def damage(folder: Path) -> None:
        content = json.loads((folder / "card.json").read_text())
        change(content)
        (folder / "card.json").write_text(json.dumps(content))

    return damage


DAMAGE = {
    "a changed file": (lambda folder: (folder / "model.onnx").write_bytes(b"x"), "model.onnx is not the one"),
    "a missing file": (lambda folder: (folder / "model.onnx").unlink(), "model.onnx does not exist"),
    "no card": (lambda folder: (folder / "card.json").unlink(), "card.json does not exist"),
    "no JSON": (lambda folder: (folder / "card.json").write_text("{"), "card.json refused"),
    "no object": (lambda folder: (folder / "card.json").write_text("[]"), "card.json refused"),
    "another format": (damaged(lambda card: card.update(format=1)), "its format is 1, not 2"),
    "a file elsewhere": (damaged(lambda card: card["files"].update({"../x": ""})), "no name of a file"),
    "BGR": (damaged(lambda card: card["preprocessing"].update(order="BGR")), "only bilinear interpolation, RGB"),
    "a crop too large": (damaged(lambda card: card["preprocessing"].update(crop=300)), "crop <= resize"),
    "names": (damaged(lambda card: card.update(class_names=["cat"])), "1 class_names for 10 classes"),
}


@pytest.mark.parametrize("damage, said", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_refused(exported, tmp_path, damage, said):
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    damage(folder)
    with pytest.raises(UserError, match=said) as refused:
        read_card(folder)
    assert "\n" not in str(refused.value)
