"""Raw images, and what a reference's preprocessing makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sturdyio.cli import MachineError, UserError, one_line, user_code
from sturdyio.files import refusing

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


def read_images(folder: str | Path) -> list[np.ndarray]:
    """The images in a folder, by name: uint8, height x width x RGB; raises UserError if there are none."""
    from PIL import Image

    folder = Path(folder)
    files = sorted(file for file in folder.glob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"images {folder}: no file in it ends in {', '.join(SUFFIXES)}: name a folder of images")
    found = []
    for file in files:
        with refusing(file, "an image"):
            found.append(np.asarray(Image.open(file).convert("RGB")))
    return found


def prepared(
    images: Sequence[np.ndarray], preprocess: Callable[[Any], Any] | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(image, what `preprocess` makes of it as float32, without an axis for the batch) of each.

    Raises UserError if there is no `preprocess`, it raises, or an image is another array.
    """
    if bool(len(images)) != (preprocess is not None):
        raise UserError("images are recorded with what prepares them: give both images and preprocess")
    if preprocess is None:
        return []
    from PIL import Image

    found = []
    for i, image in enumerate(map(np.asarray, images)):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise UserError(f"image {i} is {image.dtype} {image.shape}: give uint8, height x width x 3")
        try:
            with user_code():
                ready = np.asarray(preprocess(Image.fromarray(image)), np.float32)
        except MachineError:
            raise
        except Exception as error:
            raise UserError(f"preprocess raised {one_line(error)} of image {i}") from error
        found.append((image, ready[0] if ready.ndim == 4 and len(ready) == 1 else ready))
    return found
