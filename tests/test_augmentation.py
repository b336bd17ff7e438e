"""Training images and mixed batches are torchvision's to the last bit, for the same draws, on both sides."""

import copy
from collections.abc import Callable

import numpy as np
import paddle
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode, v2

import mobilenetv3_paddle.data
import mobilenetv3_ref.data
from mobilenetv3_common.draws import (
    IMAGENET_POLICY,
    MAGNITUDES,
    auto_augment_operations,
    batch_rng,
    item_rng,
    random_erasing_box,
    random_mix,
    random_resized_crop_box,
)
from mobilenetv3_common.images import read_image
from mobilenetv3_common.sampler import BatchSampler

SIDES = {
    "reference": (mobilenetv3_ref.data, torch.from_numpy),
    "port": (mobilenetv3_paddle.data, paddle.to_tensor),
}
EVERY_OPTION = {"auto_augment": "imagenet", "random_erase": 0.5, "crop_scale": 0.3, "hflip_prob": 0.4}
CROP_SIZE = 57


@pytest.fixture(params=SIDES.values(), ids=SIDES.keys())
def side(request) -> tuple:
    """(`data` package, array to tensor) of each framework."""
    return request.param


def torchvisions_preset(image: Image.Image, rng: np.random.Generator) -> tuple[Callable, set]:
    """(torchvision's ClassificationPresetTrain with EVERY_OPTION, its classes made to draw what `rng` draws; what).

    Source: references/classification/presets.py of torchvision 0.29.1.
    """
    crop = transforms.RandomResizedCrop(CROP_SIZE, (EVERY_OPTION["crop_scale"], 1.0))
    box = random_resized_crop_box(rng, image.height, image.width, crop.scale)
    crop.get_params = lambda *_: box
    flip = rng.random() < EVERY_OPTION["hflip_prob"]
    augment = transforms.AutoAugment(interpolation=InterpolationMode.BILINEAR)
    operations = auto_augment_operations(copy.deepcopy(rng))
    policy, drawn, signs = rng.integers(len(IMAGENET_POLICY)), rng.random(2), rng.integers(2, size=2)
    augment.get_params = lambda _: (policy, torch.tensor(drawn), torch.tensor(signs))
    erase = rng.random() < EVERY_OPTION["random_erase"]
    erasing = transforms.RandomErasing(float(erase))
    part = random_erasing_box(rng, CROP_SIZE, CROP_SIZE) if erase else None
    erasing.get_params = lambda *_, **_bounds: (*part, torch.zeros(1, 1, 1))
    steps = [
        crop,
        transforms.RandomHorizontalFlip(float(flip)),
        augment,
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float),
        transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        erasing,
    ]
    return transforms.Compose(steps), {("flip", flip), ("erase", erase), *operations}


def test_every_option_gives_torchvisions_pixels(side, data_path):
    """On every awkward image, until all that AutoAugment can do has been done, with both signs."""
    preset = side[0].ClassificationPresetTrain(crop_size=CROP_SIZE, **EVERY_OPTION)
    seen = set()
    for number, path in enumerate(sorted(data_path.rglob("*.*"))):
        if path.suffix == ".txt":
            continue
        image = read_image(path)
        for epoch in range(40):
            oracle, drawn = torchvisions_preset(image, item_rng(5, epoch, number))
            expected, got = oracle(image).numpy(), np.asarray(preset(image, item_rng(5, epoch, number)))
            np.testing.assert_array_equal(got, expected, err_msg=f"{path} {epoch} {drawn}", strict=True)
            seen |= drawn
    signed = {name: (-1, 1) if signed else (1,) for name, (_, signed) in MAGNITUDES.items()}
    every = {
        (name, sign * MAGNITUDES[name][0][bin_])
        for policy in IMAGENET_POLICY
        for name, _, bin_ in policy
        for sign in signed[name]
    }
    assert seen == {("flip", True), ("flip", False), ("erase", True), ("erase", False), *every}


def test_a_box_that_fits_nowhere_erases_nothing(side, monkeypatch):
    presets = mobilenetv3_ref.data.presets if side[0] is mobilenetv3_ref.data else mobilenetv3_paddle.data.presets
    monkeypatch.setattr(presets, "random_erasing_box", lambda *_: None)
    image = Image.new("RGB", (9, 9), (1, 2, 3))
    erased, plain = (
        np.asarray(side[0].ClassificationPresetTrain(crop_size=9, random_erase=p)(image, item_rng(0, 0, 0)))
        for p in (1.0, 0.0)
    )
    np.testing.assert_array_equal(erased, plain)


def test_options_that_are_off_draw_nothing(side):
    """A run without them draws what it drew before they were there: a crop and a flip."""
    image, rng, expected = Image.new("RGB", (30, 20)), item_rng(1, 2, 3), item_rng(1, 2, 3)
    side[0].ClassificationPresetTrain(crop_size=8)(image, rng)
    random_resized_crop_box(expected, 20, 30)
    expected.random()
    assert rng.bit_generator.state == expected.bit_generator.state


def test_another_policy_is_refused(side):
    with pytest.raises(ValueError, match="auto_augment must be 'imagenet' or None, not 'cifar10'"):
        side[0].ClassificationPresetTrain(auto_augment="cifar10")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(side, workers, data_path):
    data, _ = side
    dataset = data.build_dataset(data_path, train=True, crop_size=32, seed=4, **EVERY_OPTION)
    batches = []
    for count in (0, workers):
        loader = data.build_loader(dataset, 4, train=True, seed=4, workers=count)
        data.set_epoch(loader, 3)
        batches.append([[tensor.numpy() for tensor in batch] for batch in loader])
    assert len(batches[0]) == len(batches[1]) == 4
    for alone, worked in zip(*batches, strict=True):
        for one, other in zip(alone, worked, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_options_of_the_training_preset_leave_validation_alone(side, data_path):
    plain, augmented = (
        side[0].build_dataset(data_path, train=False, crop_size=32, resize_size=40, **options)
        for options in ({}, EVERY_OPTION)
    )
    assert vars(plain.transform) == vars(augmented.transform)


# Mixup and CutMix

MIXES = {
    "mixup": {"mixup_alpha": 0.2},
    "cutmix": {"cutmix_alpha": 1.0},
    "both": {"mixup_alpha": 0.8, "cutmix_alpha": 0.5},
}


def some_batch(rng: np.random.Generator, count: int, num_classes: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 3, 13, 21), float32, and labels (count,)."""
    return rng.normal(0, 2, (count, 3, 13, 21)).astype(np.float32), rng.integers(0, num_classes, count)


def mixed(
    side: tuple, alphas: dict, images: np.ndarray, labels: np.ndarray, epoch: int, batch: int
) -> list[np.ndarray]:
    data, to_tensor = side
    mix = data.build_mix(7, seed=3, **alphas)
    return [tensor.numpy() for tensor in mix(to_tensor(images), to_tensor(labels), epoch, batch)]


def torchvisions_pair(alphas: dict, images: np.ndarray, labels: np.ndarray, epoch: int, batch: int) -> list[np.ndarray]:
    """What torchvision's MixUp or CutMix, made to draw what we draw, makes of the first of two images."""
    mix = random_mix(
        batch_rng(3, epoch, batch), *images.shape[2:], alphas.get("mixup_alpha", 0.0), alphas.get("cutmix_alpha", 0.0)
    )
    if mix.box is None:
        oracle = v2.MixUp(num_classes=7)
        oracle.make_params = lambda _: {"lam": mix.share}
    else:
        oracle = v2.CutMix(num_classes=7)
        top, left, height, width = mix.box
        oracle.make_params = lambda _: {"box": (left, top, left + width, top + height), "lam_adjusted": mix.share}
    image, target = oracle(torch.from_numpy(images), torch.from_numpy(labels))
    return [image[0].numpy(), target[0].numpy()]


@pytest.mark.parametrize("alphas", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_mixed_batches_are_torchvisions(side, alphas, count, rng):
    """Image by image, since torchvision's partner is the one before and ours count // 2 further on."""
    for batch in range(20):
        images, labels = some_batch(rng, count)
        got_images, got_targets = mixed(side, alphas, images, labels, 1, batch)
        for i in range(count):
            pair = [i, (i + count // 2) % count]
            expected_image, expected_target = torchvisions_pair(alphas, images[pair], labels[pair], 1, batch)
            np.testing.assert_array_equal(got_images[i], expected_image, strict=True)
            np.testing.assert_array_equal(got_targets[i], expected_target, strict=True)


def shared(side: tuple, alphas: dict, dataset: tuple, batch_size: int, processes: int) -> dict[int, list[np.ndarray]]:
    """{place in the order of the epoch: [image, soft target]} of two epochs' batches, mixed by several processes."""
    images, labels = dataset
    found = {}
    for rank in range(processes):
        sampler = BatchSampler(
            len(images), batch_size // processes, shuffle=True, pad=True, seed=3, rank=rank, world_size=processes
        )
        for batch, indices in enumerate(sampler):
            image, target = mixed(side, alphas, images[indices], labels[indices], 0, batch)
            for place, i in enumerate(indices):
                found[i] = [image[place], target[place]]
    return found


def equal(one: dict[int, list[np.ndarray]], other: dict[int, list[np.ndarray]]) -> bool:
    assert one.keys() == other.keys()
    return all(np.array_equal(a, b) for i in one for a, b in zip(one[i], other[i], strict=True))


@pytest.mark.parametrize("alphas", MIXES.values(), ids=MIXES.keys())
def test_the_number_of_processes_changes_nothing(side, alphas, rng):
    """While each has an even number of images; 36 images are three batches of 12: of one process, two or three."""
    dataset = some_batch(rng, 36)
    alone = shared(side, alphas, dataset, 12, processes=1)
    for processes in (2, 3):
        assert equal(shared(side, alphas, dataset, 12, processes), alone)
    # 3 images a process: others are paired. The docstring of RandomMix says so.
    assert not equal(shared(side, alphas, dataset, 6, processes=2), shared(side, alphas, dataset, 6, processes=1))


@pytest.mark.parametrize("alphas", MIXES.values(), ids=MIXES.keys())
def test_seed_epoch_and_batch_draw_the_mix(side, alphas, rng):
    data, to_tensor = side
    images, labels = (to_tensor(array) for array in some_batch(rng, 6))
    results = [
        data.build_mix(7, seed=seed, **alphas)(images, labels, epoch, batch)[1].numpy().tobytes()
        for seed, epoch, batch in [(0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert results[0] == results[1] and len(set(results)) == 4


def test_no_mixing_is_none(side):
    assert side[0].build_mix(7) is None


def test_what_comes_in_is_left_alone(side, rng):
    data, to_tensor = side
    images, labels = some_batch(rng, 4)
    for alphas in MIXES.values():
        tensors = to_tensor(images.copy()), to_tensor(labels.copy())
        for batch in range(4):
            data.build_mix(7, **alphas)(*tensors, 0, batch)
        np.testing.assert_array_equal(tensors[0].numpy(), images)
        np.testing.assert_array_equal(tensors[1].numpy(), labels)
