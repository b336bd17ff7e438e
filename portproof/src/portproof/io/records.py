"""The files of a comparison, in reprod_log's format: one `.npy` a side, arrays by name."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from reprod_log import ReprodLogger

from portproof.io.files import atomic_path


def save_record(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write `arrays` to `path` as reprod_log does; raises UserError when it cannot be written."""
    logger = ReprodLogger()
    for name, array in arrays.items():
        logger.add(name, np.asarray(array))
    with atomic_path(path) as temporary:
        logger.save(str(temporary))


def save_text(text: str, path: Path) -> None:
    """Write `text` to `path`; raises UserError when it cannot be written."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
