"""mobilenetv3_deploy/engines.py: every engine gives the network's float64 outputs, and says what it lacks."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from exported_models import CLASSES, CROP, export, need, probe_weights

import mobilenetv3_paddle.models as port_models
import mobilenetv3_ref.models as ref_models
from mobilenetv3_deploy import engines
from mobilenetv3_deploy.card import Card, read_card, write_card
from mobilenetv3_deploy.engines import BEST, BEST_QUANTIZED, ENGINES, WEIGHTS, float64_reference, lacks, load
from mobilenetv3_deploy.preprocessing import Preprocessing
from portproof.compare.ruler import kernel_atol
from sturdyio.cli import UserError

MODELS = {"paddle": port_models, "torch": ref_models}
SUFFIXES = {"paddle": ".pdparams", "torch": ".pth"}
IMAGES = np.random.default_rng(1).standard_normal((4, 3, CROP, CROP), np.float32)
BATCHES = (IMAGES[:3], IMAGES[3:])  # the second call must not overwrite what the first gave


def write_weights_folder(folder: Path, framework: str, output: str = "logits", num_classes: int = CLASSES) -> Path:
    """A model's folder for the engines that are the framework itself, of the network of `probe_weights`."""
    folder.mkdir()
    models = MODELS[framework]
    model = models.mobilenet_v3_small(num_classes=num_classes)
    if num_classes == CLASSES:
        models.load_weights(model, probe_weights(folder.parent / f"probe{SUFFIXES[framework]}"))
    models.save_weights(model, folder / WEIGHTS)
    sizes = Preprocessing(resize=CROP, crop=CROP)
    write_card(folder, Card(framework, "mobilenet_v3_small", num_classes, output, sizes, None, "0" * 64))
    return folder


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Callable[[str, str], list[np.ndarray]]:
    """network(dtype, output) -> outputs of BATCHES by the reference, whose network all folders hold."""
    model = ref_models.mobilenet_v3_small(num_classes=CLASSES)
    ref_models.load_weights(model, probe_weights(tmp_path_factory.mktemp("network") / "probe.pth"))

    @cache
    def outputs(dtype: str, output: str) -> list[np.ndarray]:
        kind = getattr(torch, dtype)
        with torch.inference_mode():
            logits = [model.eval().to(kind)(torch.from_numpy(batch).to(kind)) for batch in BATCHES]
        return [(one.softmax(1) if output == "probabilities" else one).numpy() for one in logits]

    return outputs


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    need("deploy", "onnx", "onnxruntime", "paddle2onnx")
    return export("paddle", tmp_path_factory.mktemp("paddle"))


# --- what they compute


def limits_of(network, output: str) -> list[float]:
    """The kit's limits of float32: the rounding of sums, and K + 1 times the reference's own distance."""
    exact, rounded = (dict(enumerate(network(dtype, output))) for dtype in ("float64", "float32"))
    return list(kernel_atol(exact, rounded).values())


def assert_is_the_network(run: Callable[[np.ndarray], np.ndarray], network, output: str) -> None:
    """A limit of a thousandth or more of the largest output would prove nothing."""
    given = [run(batch) for batch in BATCHES]
    for array, exact, limit in zip(given, network("float64", output), limits_of(network, output), strict=True):
        assert (array.dtype, array.shape) == (np.float32, exact.shape)
        assert np.abs(array - exact).max() <= limit < 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in MODELS and name != "torch-compile"])
def test_a_graph_is_the_network(exported, network, name):
    need(ENGINES[name].extra, ENGINES[name].package)
    assert_is_the_network(load(exported, name).run, network, "logits")


@pytest.mark.parametrize("output", ["logits", "probabilities"])
@pytest.mark.parametrize("name", MODELS)
def test_a_framework_is_the_network(tmp_path, network, name, output):
    folder = write_weights_folder(tmp_path / "model", name, output)
    assert_is_the_network(load(folder, name).run, network, output)
    # Paddle's kernels keep constants in float32, so that not all of float64's digits are there. What is a thousandth of
    # the limit that is measured with it changes none of the limit's digits that are printed.
    reference = float64_reference(folder)
    for batch, exact, limit in zip(BATCHES, network("float64", output), limits_of(network, output), strict=True):
        given = reference(batch)
        assert given.dtype == np.float64
        assert np.abs(given - exact).max() <= limit / 1000


@pytest.mark.thorough("test_a_graph_is_the_network")
def test_a_compiled_model_is_the_network(tmp_path, network, monkeypatch):
    """But for what torch makes of the graph: its inductor's C++ takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    folder = write_weights_folder(tmp_path / "model", "torch")
    assert_is_the_network(load(folder, "torch-compile").run, network, "logits")


# --- batches


WRONG_BATCHES = {
    "no images": np.zeros((0, 3, CROP, CROP), np.float32),
    "one image alone": np.zeros((3, CROP, CROP), np.float32),
    "channels last": np.zeros((1, CROP, CROP, 3), np.float32),
    "another crop": np.zeros((1, 3, CROP + 1, CROP), np.float32),
    "float64": np.zeros((1, 3, CROP, CROP)),
    "bytes": np.zeros((1, 3, CROP, CROP), np.uint8),
}


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> Path:
    return write_weights_folder(tmp_path_factory.mktemp("eager") / "model", "torch")


@pytest.mark.parametrize("batch", WRONG_BATCHES.values(), ids=WRONG_BATCHES)
def test_another_batch_is_refused(eager, batch):
    with pytest.raises(ValueError) as refused:
        load(eager, "torch").run(batch)
    said = f"batch {batch.shape}, {batch.dtype}: (N, 3, {CROP}, {CROP}), float32 is expected"
    assert str(refused.value) == said


def test_a_batch_need_not_be_contiguous(eager, monkeypatch):
    engine, given = load(eager, "torch"), []
    monkeypatch.setattr(engine, "_run", given.append)
    channels_last = np.ascontiguousarray(IMAGES.transpose(0, 2, 3, 1))
    engine.run(channels_last.transpose(0, 3, 1, 2))
    assert given[0].flags.c_contiguous and np.array_equal(given[0], IMAGES)


# --- what is lacking


@pytest.fixture
def there(monkeypatch) -> Callable[..., None]:
    """there(*packages): these alone are installed, and no engine imports them."""
    for one in ENGINES.values():
        monkeypatch.setattr(one, "_load", lambda self, folder, threads: None)

    def set_packages(*packages: str) -> None:
        monkeypatch.setattr(engines, "find_spec", lambda name: True if name in packages else None)

    return set_packages


ALL_FILES = {file: "0" * 64 for one in ENGINES.values() for file in one.files}
FULL = Card("paddle", "mobilenet_v3_small", CLASSES, "logits", Preprocessing(), None, "0" * 64, ALL_FILES)


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_lacking_where_all_is_there(there, name):
    there(ENGINES[name].package)
    assert lacks(name, replace(FULL, framework=ENGINES[name].framework or "paddle")) == ""


@pytest.mark.parametrize("name", ENGINES)
def test_a_missing_package_is_named_with_its_extra(there, name):
    there()
    one = ENGINES[name]
    said = f"engine {name} needs {one.package}, which is not installed: pip install -e '.[{one.extra}]'"
    assert lacks(name, replace(FULL, framework=one.framework or "paddle")) == said


@pytest.mark.parametrize("name, file", [(name, file) for name, one in ENGINES.items() for file in one.files])
def test_a_file_that_the_folder_lacks_is_named(there, name, file):
    one = ENGINES[name]
    there(one.package)
    card = replace(FULL, framework=one.framework or "paddle", files={n: h for n, h in ALL_FILES.items() if n != file})
    assert lacks(name, card).startswith(f"engine {name} needs {file}, which the model's folder does not have: export")


@pytest.mark.parametrize("name", [name for name, one in ENGINES.items() if one.framework])
def test_the_other_frameworks_model_is_refused(there, name):
    own = ENGINES[name].framework
    there(ENGINES[name].package)
    said = lacks(name, replace(FULL, framework={"paddle": "torch", "torch": "paddle"}[own]))
    assert said.startswith(f"engine {name} runs models that were exported with --framework {own}: export")


def test_loading_refuses_what_is_lacking(eager, there):
    there("torch", "onnxruntime")
    with pytest.raises(UserError, match="engine 'abacus' is unknown: choose best or one of onnxruntime, .*, torch"):
        load(eager, "abacus")
    for name, said in (("onnxruntime", "needs model.onnx"), ("paddle", "--framework paddle"), ("best", "model.onnx")):
        with pytest.raises(UserError, match=said):
            load(eager, name)
    there()
    for refused in (lambda: load(eager, "torch"), lambda: float64_reference(eager)):
        with pytest.raises(UserError, match=r"engine torch needs torch, .*: pip install -e '\.\[torch\]'"):
            refused()


@pytest.mark.parametrize(
    "best, first, quantized",
    [(names, first, how) for names, how in ((BEST, None), (BEST_QUANTIZED, {})) for first in range(len(names))],
)
def test_best_is_the_first_that_is_there(tmp_path, there, best, first, quantized):
    for file in ALL_FILES:
        (tmp_path / file).write_text(file)
    write_card(tmp_path, replace(FULL, quantized=quantized))
    there(*(ENGINES[name].package for name in best[first:]))
    assert load(tmp_path).name == best[first]
    assert read_card(tmp_path) == load(tmp_path).card
    there()
    with pytest.raises(UserError, match=rf"engine {best[0]} needs {best[0]}, .*'\.\[{ENGINES[best[0]].extra}\]'"):
        load(tmp_path)
