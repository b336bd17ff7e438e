"""The random draws of the data pipeline, made once for both frameworks.

Every image's draws come from a generator keyed by (seed, epoch, index). So they depend neither on the framework nor on
the number of workers or processes, and an epoch can be drawn again.
"""

import math

import numpy as np


def item_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of image `index` in epoch `epoch`."""
    return np.random.default_rng([seed, epoch, index])


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
