"""The reference is torchvision's MobileNetV3, bit for bit: a faithful port of a wrong reference would prove nothing.

What both packages have in common with torchvision (image folders, presets, errors) is asked of both.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torchvision import datasets, transforms
from torchvision.models._utils import _make_divisible
from torchvision.transforms import functional as F

import mobilenetv3_paddle.data
import mobilenetv3_paddle.models.mobilenet_v3
import mobilenetv3_ref.data
import mobilenetv3_ref.models.mobilenet_v3
from mobilenetv3_common.draws import random_resized_crop_box
from mobilenetv3_common.images import read_image
from mobilenetv3_ref.models import MODELS

LITE_DATA = Path(__file__).parents[1] / "lite_data"
ORACLES = {
    "mobilenet_v3_large": torchvision.models.mobilenet_v3_large,
    "mobilenet_v3_small": torchvision.models.mobilenet_v3_small,
}
PARAMETERS = {"mobilenet_v3_large": 5_483_032, "mobilenet_v3_small": 2_542_856}


@pytest.fixture(params=[mobilenetv3_ref, mobilenetv3_paddle], ids=["reference", "port"])
def package(request):
    """Each of the two packages."""
    return request.param


def one_pass(model: nn.Module, images: np.ndarray, train: bool) -> dict[str, torch.Tensor]:
    """Everything that a forward and a backward pass leave behind."""
    model.train(train)
    x = torch.from_numpy(images).requires_grad_()
    torch.manual_seed(1)  # of the dropout mask
    logits = model(x)
    logits.backward(torch.from_numpy(np.random.default_rng(2).normal(size=logits.shape)).float())
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "gradient of x": x.grad, **gradients, **model.state_dict()}


def unequal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names whose tensors differ in a bit; a name on one side only is an error."""
    assert list(got) == list(expected)
    return [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)]


def test_parameter_counts(arch):
    assert sum(p.numel() for p in MODELS[arch]().parameters()) == PARAMETERS[arch]


def test_state_dict_is_torchvisions(arch, options):
    got, expected = (build(**options).state_dict() for build in (MODELS[arch], ORACLES[arch]))
    assert [(name, t.shape, t.dtype) for name, t in got.items()] == [
        (name, t.shape, t.dtype) for name, t in expected.items()
    ]


@pytest.mark.parametrize("norm_layer", [None, partial(nn.GroupNorm, 8)], ids=["batch_norm", "group_norm"])
def test_initial_weights_are_torchvisions(arch, norm_layer):
    models = []
    for build in (MODELS[arch], ORACLES[arch]):
        torch.manual_seed(3)
        models.append(build(norm_layer=norm_layer))
    assert unequal(models[0].state_dict(), models[1].state_dict()) == []


@pytest.mark.thorough("the small model", but="small")
def test_passes_are_torchvisions(arch, options, train, probe, images):
    """Logits, every gradient, and every buffer afterwards, to the last bit."""
    arrays = {name: torch.from_numpy(array.copy()) for name, array in probe(arch, **options).items()}
    ref, oracle = MODELS[arch](**options), ORACLES[arch](**options)
    ref.load_state_dict(arrays)
    oracle.load_state_dict(arrays)
    got, expected = one_pass(ref, images, train), one_pass(oracle, images, train)
    assert unequal(got, expected) == []
    assert expected["logits"].std(0).mean() > 0.1  # the images differ to it: the signal is alive
    moved = [name for name in arrays if not torch.equal(expected[name], arrays[name])]
    assert moved == [name for name, _ in oracle.named_buffers() if train]


@pytest.mark.parametrize("divisor", [8, 4, 1])
def test_make_divisible_is_torchvisions(package, divisor):
    for value in np.arange(1, 700, 0.25):
        assert package.models.mobilenet_v3.make_divisible(value, divisor) == _make_divisible(value, divisor)


def test_impossible_models_are_refused(package):
    module = package.models.mobilenet_v3
    setting, last_channel = module.mobilenet_v3_conf("mobilenet_v3_small")
    fields = vars(setting[0])
    with pytest.raises(ValueError, match="stride 3: .* 1 or 2"):
        module.MobileNetV3([module.InvertedResidualConfig(**{**fields, "stride": 3})], last_channel)
    with pytest.raises(ValueError, match="inverted_residual_setting is empty"):
        module.MobileNetV3([], last_channel)
    with pytest.raises(ValueError, match="unknown model 'resnet18': mobilenet_v3_large or mobilenet_v3_small"):
        module.mobilenet_v3_conf("resnet18")


def image_paths(data_path: Path) -> list[Path]:
    """The awkward images, and those that the project ships."""
    return [path for root in (data_path, LITE_DATA) for path in sorted(root.rglob("*/*.*")) if path.suffix != ".txt"]


def test_images_are_read_as_torchvision_does(data_path):
    paths = image_paths(data_path)
    assert len(paths) == 2 * 13 + 32
    for path in paths:
        ours, theirs = read_image(path), datasets.folder.default_loader(str(path))
        assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes()), path


@pytest.mark.parametrize("sizes", [{}, {"crop_size": 95, "resize_size": 96}, {"crop_size": 31, "resize_size": 31}])
def test_eval_preset_is_torchvisions(package, data_path, sizes):
    preset = package.data.presets.ClassificationPresetEval(**sizes)
    crop_size, resize_size = sizes.get("crop_size", 224), sizes.get("resize_size", 256)
    oracle = transforms.Compose(
        [
            transforms.Resize(resize_size),
            transforms.CenterCrop(crop_size),
            transforms.ToTensor(),
            transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    )
    for path in image_paths(data_path):
        image = read_image(path)
        np.testing.assert_array_equal(np.asarray(preset(image)), oracle(image).numpy(), err_msg=str(path), strict=True)


def test_eval_preset_refuses_a_crop_larger_than_the_image(package):
    with pytest.raises(ValueError, match="resize_size 223 is smaller than crop_size 224"):
        package.data.presets.ClassificationPresetEval(resize_size=223)


@pytest.mark.parametrize(
    "size, options, seen",
    [(224, {}, {False, True}), (47, {"crop_size": 47, "hflip_prob": 0.0}, {False}), (224, {"hflip_prob": 1.0}, {True})],
)
def test_train_preset_is_torchvisions_for_the_same_draws(package, data_path, size, options, seen):
    preset = package.data.presets.ClassificationPresetTrain(**options)
    hflip_prob, flips = options.get("hflip_prob", 0.5), set()
    for number, path in enumerate(image_paths(data_path)):
        image, draws = read_image(path), np.random.default_rng(number)
        box = random_resized_crop_box(draws, image.height, image.width)
        flip = draws.random() < hflip_prob
        flips.add(flip)
        oracle = transforms.Compose(
            [
                lambda image, box=box: F.resized_crop(image, *box, [size, size]),
                transforms.RandomHorizontalFlip(float(flip)),
                transforms.ToTensor(),
                transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
            ]
        )
        got = preset(image, np.random.default_rng(number))
        np.testing.assert_array_equal(np.asarray(got), oracle(image).numpy(), err_msg=str(path), strict=True)
    assert flips == seen


def test_image_folder_is_torchvisions(package, data_path):
    for root in (data_path / "train", LITE_DATA / "val"):
        preset = package.data.ClassificationPresetEval(crop_size=8, resize_size=9)
        ours, theirs = package.data.ImageFolder(root, preset), datasets.ImageFolder(root)
        assert (ours.classes, ours.class_to_idx, ours.samples) == (theirs.classes, theirs.class_to_idx, theirs.samples)
        assert len(ours) == len(theirs)
        for index, (image, label) in enumerate(theirs):
            got, got_label = ours[index]
            np.testing.assert_array_equal(np.asarray(got), np.asarray(preset(image)), strict=True)
            assert got_label == label
