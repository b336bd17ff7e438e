"""The catalogue of differences between the two frameworks' calls, measured by the snippets of the entries."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from maintenance.pages.faq_snippets import COMPAT, Run
from maintenance.pages.faq_sources import Entry

# Of the largest value: 9000 roundings of float64, 2^-53 each, and 16 of float32's, 2^-24. A snippet that compares in
# float32 has some ten operations; one that adds up more, or takes many steps, compares in float64.
LIMITS = {"float64": 1e-12, "float32": 1e-6}


class CatalogueError(Exception):
    """What an entry says of its pair is not what its snippets found; the message says what is."""


@dataclass(frozen=True)
class Row:
    """A pair as it was measured: `same` by default or not, and the `size` of the difference where it is not.

    `compat` says whether PyTorch's code gives PyTorch's result on Paddle after `paddle.enable_compat()`: "yes", "no",
    or "no name" if it names what is not there. It is "" where there is no difference.
    """

    entry: Entry
    same: bool
    size: str
    compat: str


def difference(ref: np.ndarray, port: np.ndarray) -> str:
    """How `port` differs from `ref`, in a few words; "" if it does not, beyond rounding."""
    if ref.dtype.kind == "U" or port.dtype.kind == "U":
        return "" if ref.tolist() == port.tolist() else f"{_short(ref)} against {_short(port)}"
    if ref.shape != port.shape:
        return f"shape {ref.shape} against {port.shape}"
    if ref.size == 0 or np.array_equal(ref, port, equal_nan=ref.dtype.kind == "f"):
        return ""
    if np.isnan(ref).any() or np.isnan(port).any():
        return f"{_short(ref)} against {_short(port)}"
    distance, largest = np.abs(ref.astype(np.float64) - port).max(), np.abs(ref).max()
    if distance <= largest * LIMITS.get(max(ref.dtype.name, port.dtype.name, key=lambda n: LIMITS.get(n, 0)), 0):
        return ""
    return f"{distance:.3g}, largest value {largest:.3g}"


def _short(value: np.ndarray) -> str:
    """A text or one number as it is; NaN by its name."""
    if value.dtype.kind != "U" and np.isnan(value).any():
        return "not a number"
    return str(value.item()) if value.size == 1 else f"values of shape {value.shape}"


def measure(entry: Entry, runs: Mapping[str, Run]) -> Row:
    """The row of `entry`, whose snippets have run; raises CatalogueError."""
    ref, port = (runs[framework].results for framework in ("torch", "paddle"))
    if "default" not in ref or "default" not in port:
        raise CatalogueError(f"{entry.slug}: both snippets must leave `default`, what each call gives as it is")
    size = difference(ref["default"], port["default"])
    if entry.pair.arguments:
        if not size:
            raise CatalogueError(f"{entry.slug}: `default` is the same on both sides, so no argument is needed")
        if "same" not in ref or "same" not in port:
            raise CatalogueError(f"{entry.slug}: both snippets must leave `same`, made so by {entry.pair.arguments}")
        if left := difference(ref["same"], port["same"]):
            raise CatalogueError(f"{entry.slug}: {entry.pair.arguments} leaves a difference: {left}")
    return Row(entry, not size, size, size and _closed(ref["default"], runs[COMPAT]))


def _closed(ref: np.ndarray, run: Run) -> str:
    """Whether the run under `paddle.enable_compat()` gives `ref`."""
    if "default" in run.results:
        return "no" if difference(ref, run.results["default"]) else "yes"
    last = run.error.strip().rpartition("\n")[2]
    return "no name" if last.startswith(("AttributeError", "ImportError", "ModuleNotFoundError")) else "no"
