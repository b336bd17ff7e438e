"""The files of a comparison, in reprod_log's format: one `.npy` a side, arrays by name. Written without reprod_log.

`reprod_log.ReprodDiffHelper().load_info` reads them; `sturdyio.files.load_npy` does too, and runs nothing that hides in
one.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sturdyio.files import atomic_path


def save_record(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write `arrays` to `path` as reprod_log does, a dict of them; raises UserError when it cannot be written."""
    with atomic_path(path) as temporary:
        np.save(temporary, {name: np.asarray(array) for name, array in arrays.items()}, allow_pickle=True)


def save_text(text: str, path: Path) -> None:
    """Write `text` to `path`; raises UserError when it cannot be written."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
