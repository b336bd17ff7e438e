"""Result files in reprod_log's format, which its `load_info` reads: an `.npy` of {name: array}."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sturdyio.files import atomic_path


def save_record(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write as reprod_log does; raises UserError if that fails."""
    with atomic_path(path) as temporary:
        np.save(temporary, np.array({name: np.asarray(array) for name, array in arrays.items()}), allow_pickle=True)


def save_text(text: str, path: Path) -> None:
    """Write as UTF-8; raises UserError if that fails."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
