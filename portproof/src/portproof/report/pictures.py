"""Input images that differ, as PNG data URIs."""

import base64
import io
from dataclasses import dataclass

import matplotlib
import numpy as np
from PIL import Image

MEAN = np.array([0.485, 0.456, 0.406])  # of both sides' presets
STD = np.array([0.229, 0.224, 0.225])
COLORMAP = "viridis"  # readable with any colour vision


@dataclass(frozen=True)
class Picture:
    """An image and its text; uri is "" if it cannot be shown."""

    title: str
    uri: str
    text: str


def _data_uri(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, format="png")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _is_image(array: np.ndarray) -> bool:
    return array.ndim == 3 and array.size > 0 and array.dtype.kind in "iuf"


def _side(title: str, array: np.ndarray) -> Picture:
    """(3, H, W), or (H, W, 3) by mistake, without the normalization."""
    shape = "x".join(map(str, array.shape))
    if not _is_image(array) or 3 not in (array.shape[0], array.shape[2]):
        return Picture(title, "", f"no picture: {array.dtype}, {shape}")
    colours = array.astype(np.float64)
    if array.shape[0] == 3:
        colours = colours.transpose(1, 2, 0)
    text = f"{shape}, values {colours.min():.4g} to {colours.max():.4g}"
    if array.dtype.kind == "f":
        colours = (colours * STD + MEAN) * 255
    pixels = np.clip(np.nan_to_num(colours, nan=0.0), 0, 255).round().astype(np.uint8)
    return Picture(title, _data_uri(Image.fromarray(pixels)), text)


def _difference(ref: np.ndarray, port: np.ndarray) -> Picture:
    """The largest of each pixel's channels; brighter is larger."""
    title = "difference"
    if not (_is_image(ref) and _is_image(port) and ref.shape == port.shape):
        return Picture(title, "", f"no picture: {ref.dtype} {ref.shape} and {port.dtype} {port.shape}")
    error = np.abs(ref.astype(np.float64) - port.astype(np.float64)).max(axis=0)
    finite = error[np.isfinite(error)]
    largest = float(finite.max(initial=0))
    share = np.nan_to_num(error / largest if largest > 0 else error, nan=1.0, posinf=1.0)
    image = Image.fromarray((np.clip(share, 0, 1) * 255).round().astype(np.uint8), "L").convert("P")
    colours = matplotlib.colormaps[COLORMAP](np.arange(256), bytes=True)[:, :3]
    image.putpalette(colours.tobytes())
    bad = int((error != 0).sum())
    return Picture(title, _data_uri(image), f"{bad} of {error.size} pixels differ, by up to {largest:.4g}")


def picture_row(ref: np.ndarray, port: np.ndarray) -> list[Picture]:
    """Both images and their difference; any shape and dtype."""
    return [_side("reference", ref), _side("port", port), _difference(ref, port)]
