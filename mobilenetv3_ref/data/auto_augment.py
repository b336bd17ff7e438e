"""AutoAugment's operations on images (arXiv:1805.09501); mobilenetv3_common.draws draws which, and how far."""

from collections.abc import Sequence

from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import _apply_op


def apply_operations(image: Image.Image, operations: Sequence[tuple[str, float]]) -> Image.Image:
    """An RGB image after (operation, magnitude), one by one, as torchvision's AutoAugment; black comes in from outside.

    Interpolation is bilinear, which torchvision's training presets ask for.
    """
    for name, magnitude in operations:
        image = _apply_op(image, name, magnitude, InterpolationMode.BILINEAR, fill=None)
    return image
