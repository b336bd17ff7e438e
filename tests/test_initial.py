"""Where training starts: the shared draw, and weights for another number of classes, on both sides."""

import numpy as np
import pytest

import mobilenetv3_paddle.models
import mobilenetv3_ref.models
from portproof.backends import backend
from portproof.convert.rules import torch_to_paddle
from sturdyio.cli import UserError

LAST = ["classifier.3.weight", "classifier.3.bias"]


@pytest.fixture(params=[mobilenetv3_ref.models, mobilenetv3_paddle.models], ids=["reference", "port"])
def models(request):
    """The models of each package."""
    return request.param


def arrays_of(models, model) -> dict[str, np.ndarray]:
    return models.weights.to_arrays(model.state_dict())


def unequal(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    assert got.keys() == expected.keys()
    return [name for name, array in expected.items() if not np.array_equal(got[name], array)]


@pytest.mark.thorough("the small model", but="small")
def test_both_sides_start_from_the_same_bits(arch, options):
    """After whatever was created before, and with the order in memory that saving needs."""
    ref, port = (models.MODELS[arch](**options) for models in (mobilenetv3_ref.models, mobilenetv3_paddle.models))
    mobilenetv3_ref.models.shared_init(ref, 5)
    mobilenetv3_paddle.models.shared_init(port, 5)
    expected = torch_to_paddle(arrays_of(mobilenetv3_ref.models, ref), backend("torch").layers.types(ref))
    assert unequal(arrays_of(mobilenetv3_paddle.models, port), expected) == []


def test_other_parameters_change_no_draw(models):
    """Those of another number of classes, here: what has the same name and shape has the same values."""
    first, second = (models.mobilenet_v3_small(num_classes=n) for n in (3, 4))
    models.shared_init(first, 5)
    models.shared_init(second, 5)
    assert unequal(arrays_of(models, first), arrays_of(models, second)) == LAST


@pytest.fixture(scope="module", params=["native", ".safetensors"])
def suffix(request) -> str:
    return request.param


@pytest.fixture
def saved(models, suffix, tmp_path):
    """(path, arrays) of weights for 7 classes."""
    path = tmp_path / f"weights{models.weights.SUFFIXES[0] if suffix == 'native' else suffix}"
    model = models.mobilenet_v3_small(num_classes=7)
    models.save_weights(model, path)
    return path, arrays_of(models, model)


def test_another_number_of_classes_keeps_the_last_layers_draw(models, saved):
    path, arrays = saved
    model = models.mobilenet_v3_small(num_classes=5)
    own = arrays_of(models, model)
    assert models.load_finetune(model, path) == LAST
    assert unequal(arrays_of(models, model), arrays | {name: own[name] for name in LAST}) == []


def test_the_same_number_of_classes_loads_all(models, saved):
    path, arrays = saved
    model = models.mobilenet_v3_small(num_classes=7)
    assert models.load_finetune(model, path) == []
    assert unequal(arrays_of(models, model), arrays) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda arrays: arrays.pop("classifier.3.bias"), "1 missing (first: classifier.3.bias)"),
        (lambda arrays: arrays.pop("classifier.3.weight"), "1 missing (first: classifier.3.weight)"),
        (lambda arrays: arrays.pop("features.0.0.weight"), "1 missing (first: features.0.0.weight)"),
        (lambda arrays: arrays.update(extra=np.zeros(1, np.float32)), "1 unexpected (first: extra)"),
        (
            lambda arrays: arrays.update({"classifier.3.weight": np.zeros((7, 9), np.float32)}),
            "2 of another shape (first: classifier.3.weight (7, 9) for",
        ),
        (lambda arrays: arrays.update({"classifier.0.bias": np.zeros(9, np.float32)}), "1 of another shape"),
        (lambda arrays: arrays["features.0.0.weight"].fill(np.nan), "hold NaN or Inf in features.0.0.weight"),
    ],
)
def test_whatever_else_does_not_fit_is_named(models, damage, reason, tmp_path):
    arrays = arrays_of(models, models.mobilenet_v3_small(num_classes=7))
    damage(arrays)
    mobilenetv3_ref.models.weights.save_safetensors(arrays, path := tmp_path / "damaged.safetensors")
    model = models.mobilenet_v3_small(num_classes=5)
    before = arrays_of(models, model)
    with pytest.raises(UserError) as error:
        models.load_finetune(model, path)
    assert reason in str(error.value)
    assert str(path) in str(error.value)
    assert unequal(arrays_of(models, model), before) == []


def test_weights_for_other_classes_name_the_flag(models, saved):
    path, _ = saved
    with pytest.raises(UserError, match="for another number of classes train on from them with --finetune"):
        models.load_weights(models.mobilenet_v3_small(num_classes=5), path)
    with pytest.raises(UserError, match="check --model"):
        models.load_weights(models.mobilenet_v3_large(num_classes=7), path)
