"""Weight files: read without running code, loaded all or not at all; either the whole file appears or none."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from mobilenetv3_common.classes import check_state_dict, keep_last_layer
from sturdyio.cli import UserError
from sturdyio.files import atomic_path, load_pdparams, save_safetensors
from sturdyio.state_dict import read_state_dict

SUFFIXES = (".pdparams",)


def to_arrays(state_dict: Mapping[str, paddle.Tensor]) -> dict[str, np.ndarray]:
    """A state_dict's tensors as NumPy arrays (copies)."""
    return {key: value.numpy().copy() for key, value in state_dict.items()}


def load_pickle(path: Path) -> dict[str, Any]:
    """The dict that `save_pickle` or `paddle.save` wrote to `path`.

    Raises UserError when it is damaged, no dict, or holds anything but tensors, containers and numbers.
    """
    return load_pdparams(path)  # Paddle: paddle.load unpickles whatever it is given


def save_pickle(content: dict[str, Any], path: Path) -> None:
    """Write `content` to `path`; either the whole file appears or none. Raises UserError when it cannot be written."""
    with atomic_path(path) as temporary:
        buffer = io.BytesIO()  # a full disk would be a RuntimeError of PyTorch
        paddle.save(content, buffer)
        temporary.write_bytes(buffer.getbuffer())


def read_weights(path: str | Path) -> dict[str, np.ndarray]:
    """The state_dict in `path`, as arrays; the model's if it is a checkpoint of a training run.

    Raises UserError when the file is missing, damaged, of another kind, or holds anything but arrays.
    """
    return read_state_dict(path, SUFFIXES, load_pickle, np.ndarray, dict)  # Paddle: tensors are read as arrays


def load_state_dict(model: nn.Layer, arrays: Mapping[str, np.ndarray], what: str = "weights") -> None:
    """Copy `arrays` into `model`; raises UserError unless every key, shape and dtype is the model's own."""
    check_state_dict(arrays, to_arrays(model.state_dict()), what)
    model.set_state_dict(dict[str, Any](arrays))  # Paddle: returns the keys that do not fit, and raises nothing


def load_weights(model: nn.Layer, path: str | Path) -> None:
    """Load the weight file `path` into `model`; raises UserError as `read_weights` and `load_state_dict` do."""
    load_state_dict(model, read_weights(path), f"weights {path}")


def load_finetune(model: nn.Layer, path: str | Path) -> list[str]:
    """Load `path` to train on from it, and return the names that keep their initial draw instead.

    These are the last layer's if the weights are for another number of classes, else none. Raises UserError as
    `load_weights` does for whatever else does not fit.
    """
    arrays, kept = keep_last_layer(read_weights(path), to_arrays(model.state_dict()))
    load_state_dict(model, arrays, f"weights {path}")
    return kept


def save_weights(model: nn.Layer, path: str | Path) -> None:
    """Write the model's state_dict; the suffix says how: .safetensors, or PaddlePaddle's own.

    Raises UserError for another suffix or when nothing can be written.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        save_safetensors(to_arrays(model.state_dict()), path)
    elif path.suffix in SUFFIXES:
        save_pickle(model.state_dict(), path)
    else:
        raise UserError(f"weights {path} are not {', '.join(SUFFIXES)} or .safetensors: choose one of these suffixes")
