"""The random draws of the data pipeline, made once for both frameworks.

Every image's draws come from a generator keyed by (seed, epoch, index), every batch's from one keyed by (seed, epoch,
batch). So they depend neither on the framework nor on the number of workers or processes, and an epoch can be drawn
again. What is drawn is distributed as torchvision 0.29.1 draws it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mobilenetv3_common.images import read_image

# Behind a batch's seed. An item's key has an epoch there, and no epoch is as large.
BATCH_KEY = 2**32 - 1

# AutoAugment's policy for ImageNet: (operation, probability, bin of its magnitude), twice, for each sub-policy.
# Source: arXiv:1805.09501, table 9, as in torchvision 0.29.1, transforms/autoaugment.py, AutoAugment._get_policies.
IMAGENET_POLICY = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, 0), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, 0)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, 0)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, 0), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, 0)),
    (("Equalize", 0.0, 0), ("Equalize", 0.8, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, 0)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, 0)),
    (("Color", 0.4, 0), ("Equalize", 0.6, 0)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
)


def _bins(low: float, high: float) -> tuple[float, ...]:
    """Ten magnitudes with torch.linspace's float32 bits: from the nearer end on, in steps rounded to float32."""
    first, last = np.float32(low), np.float32(high)
    step = (last - first) / np.float32(9)
    return tuple(float(first + step * np.float32(i) if i < 5 else last - step * np.float32(9 - i)) for i in range(10))


# What the bins of an operation mean, and whether the sign of it is drawn: tan of the angle, degrees, change of the
# factor 1, bits kept, and the value from which on pixels are inverted. The other operations have no magnitude.
MAGNITUDES = {
    "ShearX": (_bins(0.0, 0.3), True),
    "Rotate": (_bins(0.0, 30.0), True),
    "Color": (_bins(0.0, 0.9), True),
    "Contrast": (_bins(0.0, 0.9), True),
    "Sharpness": (_bins(0.0, 0.9), True),
    "Posterize": (tuple(8 - round(i / (9 / 4)) for i in range(10)), False),
    "Solarize": (_bins(255.0, 0.0), False),
    "AutoContrast": ((0.0,), False),
    "Equalize": ((0.0,), False),
    "Invert": ((0.0,), False),
}

# All that AutoAugment can do to an image: (operation, signed magnitude).
AUTO_AUGMENT_CASES = frozenset(
    (operation, sign * MAGNITUDES[operation][0][magnitude_bin])
    for policy in IMAGENET_POLICY
    for operation, _, magnitude_bin in policy
    for sign in ((1, -1) if MAGNITUDES[operation][1] else (1,))
)


def item_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of image `index` in epoch `epoch`."""
    return np.random.default_rng([seed, epoch, index])


def batch_rng(seed: int, epoch: int, batch: int) -> np.random.Generator:
    """The generator of batch `batch` in epoch `epoch`, the same on every process."""
    return np.random.default_rng([seed, BATCH_KEY, epoch, batch])


def random_resized_crop_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[int, int, int, int]:
    """A random crop's (top, left, height, width) in pixels; distributed as torchvision `RandomResizedCrop.get_params`.

    `scale` bounds the share of the image's area, `ratio` the crop's width / height.
    """
    log_ratio = (math.log(ratio[0]), math.log(ratio[1]))
    for _ in range(10):
        crop_area = height * width * rng.uniform(*scale)
        aspect_ratio = math.exp(rng.uniform(*log_ratio))
        crop_width = round(math.sqrt(crop_area * aspect_ratio))
        crop_height = round(math.sqrt(crop_area / aspect_ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.integers(0, height - crop_height + 1))
            left = int(rng.integers(0, width - crop_width + 1))
            return top, left, crop_height, crop_width
    # No draw fitted: the largest central crop whose ratio is within bounds.
    crop_width = min(width, round(height * ratio[1]))
    crop_height = min(height, round(width / ratio[0]))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def auto_augment_operations(rng: np.random.Generator) -> list[tuple[str, float]]:
    """What AutoAugment does to an image: none, one or two of MAGNITUDES' operations, each with its signed magnitude.

    Distributed as torchvision `AutoAugment.get_params`: a sub-policy, and a probability and a sign for both of its
    operations, drawn whether or not they are used.
    """
    policy = IMAGENET_POLICY[rng.integers(len(IMAGENET_POLICY))]
    drawn, positive = rng.random(2), rng.integers(2, size=2)
    operations = []
    for i, (operation, probability, magnitude_bin) in enumerate(policy):
        if drawn[i] <= probability:
            magnitudes, signed = MAGNITUDES[operation]
            sign = -1 if signed and not positive[i] else 1
            operations.append((operation, sign * magnitudes[magnitude_bin]))
    return operations


def random_erasing_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    scale: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
) -> tuple[int, int, int, int] | None:
    """The erased (top, left, height, width), or None if no draw fits; as torchvision `RandomErasing.get_params`.

    `scale` bounds the share of the image's area, `ratio` the box's height / width.
    """
    log_ratio = (math.log(ratio[0]), math.log(ratio[1]))
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect_ratio = math.exp(rng.uniform(*log_ratio))
        box_height, box_width = round(math.sqrt(area * aspect_ratio)), round(math.sqrt(area / aspect_ratio))
        if box_height < height and box_width < width:
            top = int(rng.integers(0, height - box_height + 1))
            left = int(rng.integers(0, width - box_width + 1))
            return top, left, box_height, box_width
    return None


@dataclass(frozen=True)
class ImageDraws:
    """What the training preset does to an image beside cropping it."""

    flipped: bool
    operations: list[tuple[str, float]]  # AutoAugment's
    erased: bool


def image_draws(dataset: Any, epoch: int, index: int) -> ImageDraws:
    """The draws for an image of either package's training folder, in the order of its preset."""
    preset, rng = dataset.transform, item_rng(dataset.seed, epoch, index)
    width, height = _size(dataset.samples[index][0])
    random_resized_crop_box(rng, height, width, (preset.crop_scale, 1.0))
    flipped = rng.random() < preset.hflip_prob
    operations = auto_augment_operations(rng) if preset.auto_augment else []
    erased = rng.random() < preset.random_erase and bool(random_erasing_box(rng, preset.crop_size, preset.crop_size))
    return ImageDraws(flipped, operations, erased)


@functools.cache
def _size(path: str) -> tuple[int, int]:
    return read_image(path).size


@dataclass(frozen=True)
class Mix:
    """What a batch's images are mixed with their partners by."""

    share: float  # of the image itself in its target; the partner has the rest
    box: tuple[int, int, int, int] | None  # CutMix: (top, left, height, width) that the partner fills; None: mixup


def random_mix(
    rng: np.random.Generator, height: int, width: int, mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0
) -> Mix:
    """Mixup's (arXiv:1710.09412) or CutMix's (arXiv:1905.04899) draw for a batch; one of the two must be on, alpha > 0.

    Distributed as RandomMixup and RandomCutmix of torchvision's references/classification/transforms.py, with one of
    the two at random where both are on.
    """
    cutmix = cutmix_alpha > 0 and (mixup_alpha <= 0 or rng.random() < 0.5)
    alpha = cutmix_alpha if cutmix else mixup_alpha
    share = float(rng.beta(alpha, alpha))
    if not cutmix:
        return Mix(share, None)
    x, y = int(rng.integers(width)), int(rng.integers(height))
    half = 0.5 * math.sqrt(1 - share)
    half_width, half_height = int(half * width), int(half * height)
    left, right = max(x - half_width, 0), min(x + half_width, width)
    top, bottom = max(y - half_height, 0), min(y + half_height, height)
    box = (top, left, bottom - top, right - left)
    return Mix(1 - box[2] * box[3] / (width * height), box)
