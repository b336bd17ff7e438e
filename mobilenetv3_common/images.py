"""Image files, read the same way for both frameworks."""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
MOST_ASPECT = 100  # the longer side by the shorter
# A progressive JPEG is decoded once a scan: 341 KB with 200 scans took 80 s. libjpeg writes 10 scans for colour.
MOST_SCANS = 64
# Pillow reads them one by one before it knows the size: 10 MB of empty ones took it 8 s. Photographs have less than
# 100, and 16 more for each megabyte of metadata, since a segment holds 64 KB at most.
MOST_SEGMENTS = 1024
JPEG_START = b"\xff\xd8\xff"
MARKER = re.compile(rb"\xff[\x02-\xcf\xda-\xfe]")  # of those that a segment follows
# Its warnings, of that limit and of damaged metadata, would be lines beside the one that refuses an image.
warnings.filterwarnings("ignore", module=r"PIL\.")


def read_image(path: str | Path, say: Callable[[str], None] | None = None) -> Image.Image:
    """The image in `path` as RGB; raises UserError when it is missing, truncated, too large or no image.

    `say` is told what conversion to 8 bits a channel cuts off.
    EXIF orientation is not applied, as in torchvision's and paddle.vision's default loaders.
    """
    return decode_image(read_file(path, "image"), f"image {path}", say)


def decode_image(
    data: bytes, what: str, say: Callable[[str], None] | None = None, most_pixels: int = MOST_PIXELS
) -> Image.Image:
    """`read_image` of the bytes that a file holds; messages call it `what`."""
    with _opened(data, what, most_pixels) as (image, _):
        if say and image.mode.startswith(("I", "F")):
            say(f"{what} has more than 8 bits a channel: what is above 255 becomes white, as in torchvision")
        return image.convert("RGB")


def decoding_work(data: bytes, what: str, most_pixels: int = MOST_PIXELS) -> int:
    """Pixels times scans of an image, which the time to decode it grows with; its bytes if these are more.

    Nothing is decoded. Raises UserError as `decode_image` does, for what shows before.
    """
    with _opened(data, what, most_pixels) as (image, scans):
        return max(image.width * image.height * scans, len(data))


@contextmanager
def _opened(data: bytes, what: str, most_pixels: int) -> Iterator[tuple[Image.Image, int]]:
    """(the image, of which only the header is read, its scans); what is raised in this context refuses it."""
    try:
        scans = jpeg_scans(data) if data.startswith(JPEG_START) else 1
        if scans > MOST_SCANS:
            raise ValueError(f"it has {scans} scans, more than {MOST_SCANS}")
        # Of bytes: of a file itself Pillow allocates what a damaged length says.
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > most_pixels:
                raise ValueError(f"{image.width} x {image.height} are more than {most_pixels} pixels")
            if max(image.size) > MOST_ASPECT * min(image.size):  # resized, it would take gigabytes
                raise ValueError(f"{image.width} x {image.height}: one side is over {MOST_ASPECT} times the other")
            yield image, scans
    except UserError:
        raise
    except UnidentifiedImageError as error:
        formats = ", ".join(FORMATS)
        raise UserError(f"{what} is none of {formats} that Pillow knows: replace or remove it") from error
    except Exception as error:  # Pillow's parsers of damaged files raise nearly any type
        reason = printable(str(error) or type(error).__name__)
        raise UserError(f"{what} cannot be read ({reason}): replace or remove it") from error


def jpeg_scans(data: bytes) -> int:
    """How many scans a JPEG has: its segments that begin with the marker SOS (ITU-T T.81, B.1.1).

    Raises ValueError for more segments than MOST_SEGMENTS.
    """
    scans, place = 0, 2
    for _ in range(MOST_SEGMENTS):
        marker = MARKER.search(data, place)
        if marker is None:
            return scans
        scans += marker[0] == b"\xff\xda"
        length = data[marker.end() : marker.end() + 2]  # of the segment, these two bytes included
        place = marker.end() + max(2, int.from_bytes(length, "big"))
    raise ValueError(f"it has more than {MOST_SEGMENTS} segments")
