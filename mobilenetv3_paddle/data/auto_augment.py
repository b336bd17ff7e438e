"""AutoAugment's operations on images (arXiv:1805.09501); mobilenetv3_common.draws draws which, and how far."""

import math
from collections.abc import Callable, Sequence

from paddle.vision.transforms import functional as F
from PIL import Image, ImageEnhance, ImageOps

# Paddle: paddle.vision has no AutoAugment, and of its operations the first four; the others are Pillow's, which
# torchvision calls too. All give torchvision's bits. Signs and units of the magnitudes are draws.MAGNITUDES'.
OPERATIONS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "ShearX": lambda image, slope: F.affine(
        image, 0.0, [0, 0], 1.0, [math.degrees(math.atan(slope)), 0.0], "bilinear", center=[0, 0]
    ),
    "Rotate": lambda image, degrees: F.rotate(image, degrees, "bilinear"),
    "Color": lambda image, change: F.adjust_saturation(image, 1.0 + change),
    "Contrast": lambda image, change: F.adjust_contrast(image, 1.0 + change),
    "Sharpness": lambda image, change: ImageEnhance.Sharpness(image).enhance(1.0 + change),
    "Posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "Solarize": ImageOps.solarize,  # type: ignore[dict-item]  # it compares with any number
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
    "Invert": lambda image, _: ImageOps.invert(image),
}


def apply_operations(image: Image.Image, operations: Sequence[tuple[str, float]]) -> Image.Image:
    """An RGB image after (operation, magnitude), one by one, as torchvision's AutoAugment; black comes in from outside.

    Interpolation is bilinear, which torchvision's training presets ask for.
    """
    for name, magnitude in operations:
        image = OPERATIONS[name](image, magnitude)  # Paddle: has no such function, see OPERATIONS
    return image
