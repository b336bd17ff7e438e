"""From an image to the network's input, as an exported model's card says, without a framework."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side to `resize`, crop the centre to `crop` pixels, (value * scale - mean) / std per channel.

    Raises ValueError for what `preprocess` cannot do. The defaults are torchvision's evaluation preset.
    """

    resize: int = 256
    crop: int = 224
    interpolation: str = "bilinear"
    order: str = "RGB"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # of ImageNet's training images, RGB in [0, 1]
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize <= 2048:
            raise ValueError(f"resize {self.resize} and crop {self.crop} must be 1 <= crop <= resize <= 2048")
        if self.interpolation not in INTERPOLATIONS or self.order != "RGB" or self.scale != 1 / 255:
            raise ValueError("only bilinear interpolation, RGB and the scale 1/255 are known")
        if not len(self.mean) == len(self.std) == 3 or not min(self.std) > 0:
            raise ValueError("mean and std must be three numbers each, std above 0")


def preprocess(image: Image.Image, preprocessing: Preprocessing) -> np.ndarray:
    """An RGB image -> (3, crop, crop), float32, C order; the bits of both packages' ClassificationPresetEval."""
    width, height = image.size
    short, crop = preprocessing.resize, preprocessing.crop
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    if image.size != size:
        image = image.resize(size, INTERPOLATIONS[preprocessing.interpolation])
    left, top = (round((side - crop) / 2) for side in size)
    image = image.crop((left, top, left + crop, top + crop))
    # In C order, since what follows takes three times as long on a transposed view.
    array = np.asarray(image).transpose(2, 0, 1).astype(np.float32, order="C")
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return (array / np.float32(1 / preprocessing.scale) - mean) / std  # to multiply by 1/255 would round otherwise
