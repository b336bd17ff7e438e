"""Awkward inputs of the ladder's functions, on which ports differ first. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Union

import numpy as np

from portproof.python39 import zip_strict
from sturdyio.cli import UserError

Case = tuple[np.ndarray, ...]  # arguments of a criterion or a metric
Seed = Union[int, Sequence[int], np.random.Generator]

RANKS = 8  # of labels, 0 to 7: an off-by-one in top-k changes a count
SPECIAL_LOGITS: dict[str, Sequence[Sequence[float]]] = {
    "ties": [[3, 1, 3, 0, 2, 2, 2, 1], [0] * 8, [1, 2, 2, 2, 2, 2, 9, 9]],
    "NaN": [[np.nan] * 8],
    "infinite": [[np.inf, 5, 4, 3, 2, 1, 0, -np.inf]],
    "huge": [list(range(100, 108))],  # so large that a sigmoid ties them
}


def losses(num_classes: int = 100, seed: Seed = 0, logits: Mapping[str, np.ndarray] | None = None) -> dict[str, Case]:
    """{description: (logits (C, C), target)} for C classes; own `logits` (N, C) are repeated to (C, C).

    Drawn logits are N(0, 3). Extreme ones overflow float32 in exp(), and some rows vanish if one maximum is taken of
    all. Labels (C,), int64, are every class once; soft targets (C, C) mix each with another class.
    """
    rng, square = np.random.default_rng(seed), (num_classes, num_classes)
    all_logits = {name: np.resize(array, square) for name, array in (logits or {}).items()}
    all_logits["drawn"] = rng.normal(0, 3, square)
    all_logits["extreme"] = rng.normal(0, 60, square) + np.linspace(-500, 500, num_classes)[:, None]
    labels = rng.permutation(num_classes)
    share, one_hot = rng.random((num_classes, 1)), np.eye(num_classes)[labels]
    targets = {"labels": labels, "soft targets": share * one_hot + (1 - share) * np.roll(one_hot, 1, 0)}
    return {f"{name} logits, {kind}": (all_logits[name], targets[kind]) for name, kind in product(all_logits, targets)}


def _with_every_label(rows: Sequence[Sequence[float]]) -> Case:
    logits = np.array(rows, np.float32)
    return np.repeat(logits, logits.shape[1], axis=0), np.tile(np.arange(logits.shape[1]), len(logits))


def ties() -> Case:
    """(logits (48, 8), labels (48,)): ties at the edge of k, equal, NaN, infinite and huge logits."""
    return _with_every_label([row for rows in SPECIAL_LOGITS.values() for row in rows])


def metrics(seed: Seed = 0) -> dict[str, Case]:
    """{description: (logits (N, 8), labels (N,))}: those of `ties` apart, one NaN among numbers, drawn ones."""
    rng = np.random.default_rng(seed)
    every = {name: _with_every_label(rows) for name, rows in SPECIAL_LOGITS.items()}
    every["one NaN"] = _with_every_label([[1, np.nan, 3, 0, 2, 5, 4, -1]])
    every["drawn"] = rng.normal(0, 3, (23, 8)), rng.integers(0, 8, 23)
    return every


def ranked_labels(logits: np.ndarray, margin: float) -> np.ndarray | None:
    """Labels (N,), int64, for `logits` (N, C): the class at rank 0, 1, ... 7, 0, ... of each row.

    A label's logit is more than `margin` off its neighbours', so rounding cannot change its rank; else the next rank
    is taken. None if a row has no such rank.
    """
    ranks = min(RANKS, logits.shape[1])
    order = np.argsort(-logits, axis=1, kind="stable")[:, : ranks + 1]
    labels = []
    for i, (row, classes) in enumerate(zip_strict(logits, order)):
        gaps = -np.diff(row[classes], prepend=np.inf, append=-np.inf)
        clear = [r % ranks for r in range(i, i + ranks) if min(gaps[r % ranks], gaps[r % ranks + 1]) > margin]
        if not clear:
            return None
        labels.append(classes[clear[0]])
    return np.array(labels)


def prepared(cases: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Case]:
    """The cases as arrays, floats in float32; UserError for what is no case."""
    if not isinstance(cases, Mapping) or not cases:
        raise UserError(f"cases: {{name: tuple of arrays}} with one case at least, not {cases!r}")
    found = {}
    for name, arrays in cases.items():
        if not isinstance(arrays, (tuple, list)) or not arrays:
            raise UserError(f"case {name!r} is a {type(arrays).__name__}: give a tuple of one array or more")
        try:
            found[name] = tuple(np.asarray(array) for array in arrays)
        except ValueError as error:  # a list of arrays of several shapes
            raise UserError(
                f"case {name!r}: {error}: give a tuple of arrays, each as an argument of its own"
            ) from error
        for array in found[name]:
            if array.dtype.kind not in "biuf" or array.size == 0:
                raise UserError(f"case {name!r} has an array {array.shape} of {array.dtype}: give numbers")
    with np.errstate(over="ignore"):
        return {name: in_precision(arrays, "float32") for name, arrays in found.items()}


def in_precision(case: Case, dtype: str) -> Case:
    return tuple(array.astype(dtype) if array.dtype.kind == "f" else array for array in case)


def batches(case: Case, size: int | None) -> list[Case]:
    """The case in batches of `size` along axis 0, or whole (None); UserError if it cannot be cut."""
    if size is None:
        return [case]
    lengths = {array.shape[0] if array.ndim else None for array in case}
    if len(lengths) > 1 or None in lengths or size < 1:
        shapes = [array.shape for array in case]
        raise UserError(f"arrays {shapes} cannot be cut into batches of {size}: give other batch_sizes")
    return [tuple(array[i : i + size] for array in case) for i in range(0, len(case[0]), size)]
