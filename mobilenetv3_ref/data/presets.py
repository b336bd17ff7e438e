"""From a PIL image to the network's input: torchvision's classification presets for training and evaluation.

Source: torchvision 0.29.1 references/classification/presets.py, with bilinear interpolation and the PIL backend.
"""

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as F

from mobilenetv3_common.draws import auto_augment_operations, random_erasing_box, random_resized_crop_box

from .auto_augment import apply_operations

MEAN = [0.485, 0.456, 0.406]  # of ImageNet's training images, RGB in [0, 1]
STD = [0.229, 0.224, 0.225]


def normalize_image(image: Image.Image) -> Tensor:
    """An RGB image -> (3, H, W), float32, (value / 255 - MEAN) / STD."""
    return F.normalize(F.to_tensor(image), MEAN, STD)


class ClassificationPresetTrain:
    """RandomResizedCrop, horizontal flip, AutoAugment, normalization, RandomErasing with zeros.

    RGB image -> (3, crop_size, crop_size), float32. `auto_augment` is "imagenet" or None, `random_erase` a probability,
    `crop_scale` the smallest share of the image's area that is cropped. Raises ValueError for another policy.
    """

    def __init__(
        self,
        *,
        crop_size: int = 224,
        hflip_prob: float = 0.5,
        auto_augment: str | None = None,
        random_erase: float = 0.0,
        crop_scale: float = 0.08,
    ) -> None:
        if auto_augment not in (None, "imagenet"):
            raise ValueError(f"auto_augment must be 'imagenet' or None, not {auto_augment!r}")
        self.crop_size = crop_size
        self.hflip_prob = hflip_prob
        self.auto_augment = auto_augment
        self.random_erase = random_erase
        self.crop_scale = crop_scale

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Tensor:
        box = random_resized_crop_box(rng, image.height, image.width, (self.crop_scale, 1.0))
        image = F.resize(F.crop(image, *box), [self.crop_size, self.crop_size])
        if rng.random() < self.hflip_prob:
            image = F.hflip(image)
        if self.auto_augment is not None:
            image = apply_operations(image, auto_augment_operations(rng))
        normalized = normalize_image(image)
        if self.random_erase > 0 and rng.random() < self.random_erase:
            erased = random_erasing_box(rng, self.crop_size, self.crop_size)
            if erased is not None:
                top, left, height, width = erased
                normalized[:, top : top + height, left : left + width] = 0  # the mean
        return normalized


class ClassificationPresetEval:
    """Resize the shorter side, crop the centre, normalize: RGB image -> (3, crop_size, crop_size), float32.

    Raises ValueError when the resized image would be smaller than the crop.
    """

    def __init__(self, *, crop_size: int = 224, resize_size: int = 256) -> None:
        if resize_size < crop_size:
            raise ValueError(f"resize_size {resize_size} is smaller than crop_size {crop_size}")
        self.crop_size = crop_size
        self.resize_size = resize_size

    def __call__(self, image: Image.Image, rng: np.random.Generator | None = None) -> Tensor:
        image = F.center_crop(F.resize(image, self.resize_size), self.crop_size)
        return normalize_image(image)
