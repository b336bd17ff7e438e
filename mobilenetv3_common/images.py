"""Image files, read the same way for both frameworks."""

from pathlib import Path

from PIL import Image, UnidentifiedImageError

from portproof.io.cli import UserError

# What torchvision's and paddle.vision's image folders take for images.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def read_image(path: str | Path) -> Image.Image:
    """The image in `path` as RGB; raises UserError when it is missing, truncated or no image.

    EXIF orientation is not applied, as in torchvision's and paddle.vision's default loaders.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise UserError(f"image {path} is no image that Pillow knows: replace or remove it") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"image {path} cannot be read ({reason}): replace or remove it") from error
