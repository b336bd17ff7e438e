"""From a PIL image to the network's input: torchvision's classification presets for training and evaluation.

Source: torchvision 0.29.1 references/classification/presets.py, with bilinear interpolation and the PIL backend.
"""

import numpy as np
from paddle.vision.transforms import functional as F
from PIL import Image

from reprod.recipe.draws import random_resized_crop_box

MEAN = [0.485, 0.456, 0.406]  # of ImageNet's training images, RGB in [0, 1]
STD = [0.229, 0.224, 0.225]


def normalize_image(image: Image.Image) -> np.ndarray:
    """An RGB image -> (3, H, W), float32, (value / 255 - MEAN) / STD.

    Paddle: an array and NumPy's arithmetic, with the same bits. A Tensor that a loader worker sends can be gone before
    it is read (the loader then raises "File descriptor ... open failed" or hangs); an array cannot.
    """
    array = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255)
    mean, std = (np.array(values, dtype=np.float32).reshape(3, 1, 1) for values in (MEAN, STD))
    return (array - mean) / std


class ClassificationPresetTrain:
    """RandomResizedCrop, horizontal flip, normalization: RGB image -> (3, crop_size, crop_size), float32."""

    def __init__(self, *, crop_size: int = 224, hflip_prob: float = 0.5) -> None:
        self.crop_size = crop_size
        self.hflip_prob = hflip_prob

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        box = random_resized_crop_box(rng, image.height, image.width)
        image = F.resize(F.crop(image, *box), [self.crop_size, self.crop_size])
        if rng.random() < self.hflip_prob:
            image = F.hflip(image)
        return normalize_image(image)


class ClassificationPresetEval:
    """Resize the shorter side, crop the centre, normalize: RGB image -> (3, crop_size, crop_size), float32.

    Raises ValueError when the resized image would be smaller than the crop.
    """

    def __init__(self, *, crop_size: int = 224, resize_size: int = 256) -> None:
        if resize_size < crop_size:
            raise ValueError(f"resize_size {resize_size} is smaller than crop_size {crop_size}")
        self.crop_size = crop_size
        self.resize_size = resize_size

    def __call__(self, image: Image.Image, rng: np.random.Generator | None = None) -> np.ndarray:
        image = F.center_crop(F.resize(image, self.resize_size), self.crop_size)
        return normalize_image(image)
