"""The files of a comparison, in reprod_log's format, without it: one `.npy` a side, a dict of arrays by name.

`reprod_log.ReprodDiffHelper().load_info` and `sturdyio.files.load_npy` read them.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sturdyio.files import atomic_path


def save_record(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write `arrays` to `path` as reprod_log does; raises UserError when it cannot be written."""
    with atomic_path(path) as temporary:
        np.save(temporary, {name: np.asarray(array) for name, array in arrays.items()}, allow_pickle=True)


def save_text(text: str, path: Path) -> None:
    """Write `text` to `path`; raises UserError when it cannot be written."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
