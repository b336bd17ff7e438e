"""What is done to an image before the graph gets it, as a JSON beside the graph says, on images that were recorded.

    {"resize": 256, "crop": 224, "interpolation": "bilinear", "order": "RGB", "scale": 0.00392156862745098,
     "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}

"resize" is the length of the shorter side, or [height, width]; it and "crop" may be null. Or a larger JSON that holds
this under "preprocessing".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.compare import FAIL, Item, Verdict, compare
from portproof.compare.ruler import C, U
from portproof.recording.file import RecordedModel
from sturdyio.cli import UserError
from sturdyio.files import read_file, refusing

if TYPE_CHECKING:
    from PIL import Image

SECTION = "preprocessing"
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos", "box", "hamming")
FIELDS = ("resize", "crop", "interpolation", "order", "scale", "mean", "std")
EXPECTED = f"a JSON of {', '.join(FIELDS)}, or one that holds it under {SECTION!r}"
FIX = "write it again"


@dataclass(frozen=True)
class Preprocessing:
    """Images to arrays; `mean` and `std` are in the channels' order."""

    resize: Any
    crop: int | None
    interpolation: str
    order: str
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def load(cls, path: str | Path) -> Preprocessing:
        """Raises UserError for another file."""
        data = read_file(path, SECTION)
        with refusing(f"{SECTION} {path}", EXPECTED, FIX):
            found = json.loads(data)
            found = found.get(SECTION, found)
            missing = [name for name in FIELDS if name not in found]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            made = cls(**{name: found[name] for name in FIELDS})
            made = replace(made, mean=tuple(map(float, made.mean)), std=tuple(map(float, made.std)))
            is_known = made.interpolation in INTERPOLATIONS and made.order in ("RGB", "BGR")
            if not is_known or len(made.mean) != 3 or len(made.std) != 3 or 0 in made.std:
                words = f"interpolation is one of {', '.join(INTERPOLATIONS)}, order RGB or BGR"
                raise ValueError(f"{words}, mean and std are 3 numbers each")
            return made

    def pixels(self, image: np.ndarray) -> np.ndarray:
        """float64, channels first, from uint8, height x width x RGB: before mean and std."""
        from PIL import Image

        picture = Image.fromarray(image)
        if self.resize is not None:
            picture = picture.resize(self._size(picture), getattr(Image.Resampling, self.interpolation.upper()))
        if self.crop is not None:
            left, top = (round((side - self.crop) / 2) for side in picture.size)
            picture = picture.crop((left, top, left + self.crop, top + self.crop))
        array = np.asarray(picture, np.float64).transpose(2, 0, 1) * self.scale
        return array[::-1] if self.order == "BGR" else array

    def _size(self, picture: Image.Image) -> tuple[int, int]:
        if isinstance(self.resize, list):
            return self.resize[1], self.resize[0]
        short = min(picture.size)
        width, height = (self.resize if side == short else int(self.resize * side / short) for side in picture.size)
        return width, height

    def array(self, image: np.ndarray) -> np.ndarray:
        mean, std = (np.reshape(each, (3, 1, 1)) for each in (self.mean, self.std))
        return ((self.pixels(image) - mean) / std).astype(np.float32)

    @property
    def atol(self) -> float:
        """Of float32: a pixel, at most 255 times the scale, and the mean are rounded, and divided by the deviation."""
        return C * U * max((255 * self.scale + abs(mean)) / abs(std) for mean, std in zip(self.mean, self.std))

    def agrees(self, image: np.ndarray, ready: np.ndarray) -> bool:
        found = self.array(image)
        return found.shape == ready.shape and bool(np.abs(found - ready).max() <= self.atol)


def compare_preprocessing(path: str | Path, model: RecordedModel) -> Verdict:
    """The arrays that the JSON's steps make of the recorded images against the reference's own."""
    if not model.images:
        raise UserError("the recording holds no images: record with --images FOLDER --preprocess PKG.MOD:FUNCTION")
    how = Preprocessing.load(path)
    items = [Item(f"image {i}", section=SECTION) for i in range(len(model.images))]
    ref = {item: ready for item, (_, ready) in zip(items, model.images)}
    port = {item: how.array(raw) for item, (raw, _) in zip(items, model.images)}
    verdict = compare(ref, port, dict.fromkeys(items, how.atol), title=SECTION)
    notes = []
    if verdict.status == FAIL:
        told = next(_explanations(how, model.images), "by none of mean, std, order, interpolation and size alone")
        notes.append(f"preprocessing differs, explained {told}")
    return replace(verdict, notes=notes)


def _explanations(how: Preprocessing, images: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[str]:
    """Which field explains the difference, in words, each tried on all images."""
    for field, value in _changes(how, images):
        other = replace(how, **{field: value})
        if all(other.agrees(raw, ready) for raw, ready in images):
            yield f"by {field}: it is {getattr(how, field)}, the reference's {value}"
        linear = _fitted(other, images)
        if linear and all(linear.agrees(raw, ready) for raw, ready in images):
            also = [name for name in ("mean", "std") if getattr(linear, name) != getattr(how, name)]
            fields = [field, *also] if value != getattr(how, field) else also
            listed = (f"{name} is {getattr(how, name)}, the reference's {getattr(linear, name)}" for name in fields)
            yield f"by {' and '.join(fields)}: {', '.join(listed)}"


def _changes(how: Preprocessing, images: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[str, Any]]:
    yield "order", "BGR" if how.order == "RGB" else "RGB"
    for name in INTERPOLATIONS:
        yield "interpolation", name
    height, width = images[0][1].shape[-2:]
    if height == width and how.crop != height:
        yield "crop", height
    shortest = min(height, width)
    for size in range(shortest, 2 * shortest):
        yield "resize", size
    yield "resize", [height, width]


def _fitted(how: Preprocessing, images: list[tuple[np.ndarray, np.ndarray]]) -> Preprocessing | None:
    """With the mean and deviation that fit best; None if no line does."""
    mean, std = [], []
    for channel in range(3):
        pixels = [how.pixels(raw) for raw, _ in images]
        if any(each.shape != ready.shape for each, (_, ready) in zip(pixels, images)):
            return None
        x = np.concatenate([each[channel].ravel() for each in pixels])
        y = np.concatenate([ready[channel].astype(np.float64).ravel() for _, ready in images])
        if np.ptp(x) == 0:
            return None
        slope, shift = np.polyfit(x, y, 1)
        if not slope or np.abs(slope * x + shift - y).max() > how.atol:
            return None
        mean.append(round(float(-shift / slope), 5))
        std.append(round(float(1 / slope), 5))
    return replace(how, mean=tuple(mean), std=tuple(std))
