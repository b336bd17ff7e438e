"""Image files, read the same way for both frameworks."""

import io
import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from sturdyio.cli import UserError, printable
from sturdyio.files import read_file

# What torchvision's and paddle.vision's image folders take for images.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# What a file of such a name may be, and GIF, under whose name other sites' JPEGs often are. Pillow knows 40 formats
# more by what is in a file; some start a program, others take the memory that a file of a few bytes asks for.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
# Pillow's own limit, above which it only warns. Reading takes up to 16 bytes a pixel (measured; of a WebP, which may
# have 46 bytes for 9 million pixels), so 1.8 GB are enough beside the file itself.
MOST_PIXELS = 89_478_485
# Its warnings, of that limit and of damaged metadata, would be lines beside the one that refuses an image.
warnings.filterwarnings("ignore", module=r"PIL\.")


def read_image(path: str | Path) -> Image.Image:
    """The image in `path` as RGB; raises UserError when it is missing, truncated, too large or no image.

    EXIF orientation is not applied, as in torchvision's and paddle.vision's default loaders.
    """
    data = io.BytesIO(read_file(path, "image"))  # of a file itself Pillow allocates what a damaged length says
    try:
        with Image.open(data, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} are more than {MOST_PIXELS} pixels")
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        formats = ", ".join(FORMATS)
        raise UserError(f"image {path} is none of {formats} that Pillow knows: replace or remove it") from error
    except Exception as error:  # Pillow's parsers of damaged files raise nearly any type
        reason = printable(str(error) or type(error).__name__)
        raise UserError(f"image {path} cannot be read ({reason}): replace or remove it") from error
