"""scikit-learn's handwritten digits as an image folder: real images that a CPU learns in minutes."""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from sturdyio.cli import UserError, output_dir

EVERY = 5  # one image of so many of each class is for validation


def _split(labels: np.ndarray, train_per_class: int | None, val_per_class: int | None) -> dict[Path, int]:
    """{path below the folder: index of the image}: the same on every call."""
    images: dict[Path, int] = {}
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        in_val = np.arange(len(of_class)) % EVERY == EVERY - 1
        for split, indices, count in (
            ("train", of_class[~in_val], train_per_class),
            ("val", of_class[in_val], val_per_class),
        ):
            if count is not None and count > len(indices):
                raise UserError(f"class {label} has {len(indices)} images for {split}, not {count}: ask for fewer")
            images |= {Path(split, str(label), f"{index:04}.png"): int(index) for index in indices[:count]}
    return images


def write_digits(
    folder: str | Path, train_per_class: int | None = None, val_per_class: int | None = None
) -> tuple[int, int]:
    """Write FOLDER/{train,val}/{0..9}/NNNN.png, grey, 8 x 8 -> (images in train/, images in val/).

    NNNN is the image's number in sklearn.datasets.load_digits. Every fifth of each class is in val/; where a number is
    given, only the first so many of each class are written. A folder that holds just these is left as it is. Raises
    UserError for one that holds anything else, or where scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(f"scikit-learn has the digits and is missing ({error}): pip install scikit-learn") from error
    digits, folder = load_digits(), Path(folder)
    images = _split(digits.target, train_per_class, val_per_class)
    train, val = (sum(path.parts[0] == split for path in images) for split in ("train", "val"))
    if _holds(folder, images):
        return train, val
    try:
        with tempfile.TemporaryDirectory(prefix=".digits-", dir=output_dir(folder.absolute().parent)) as scratch:
            filling = Path(scratch, "filling")  # not `scratch` itself, whose mode keeps other users out
            for path, index in images.items():
                (filling / path).parent.mkdir(parents=True, exist_ok=True)
                gray = np.round(digits.images[index] * (255 / 16)).astype(np.uint8)  # they are whole numbers, 0 to 16
                Image.fromarray(gray).save(filling / path)
            if not _holds(folder, images):  # another process may have been faster
                filling.rename(folder)
    except OSError as error:
        raise UserError(f"the digits cannot be written to {folder} ({error}): name another folder") from error
    return train, val


def _holds(folder: Path, images: dict[Path, int]) -> bool:
    """Whether all is there already; raises UserError when something else is."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    if not folder.is_dir() or found != set(images):
        raise UserError(f"{folder} exists and is not this set of digits: remove it or name another folder")
    return True
