"""Large arrays, processed in parts that fit a cache, without full copies."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import product
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from portproof.python39 import zip_strict

TILE = 256  # rows and columns: two float64 tiles fit a cache
PART = 2 * TILE**2  # elements that fit a cache
MOST_WHOLE = 1024  # elements of a gradient that is compared whole
STORED = 2**20  # bytes: smaller arrays stay in memory
PIECE = 2**28  # bytes of a temporary file, unless one array is larger
ALIGNED = 2**12  # bytes


def tiles(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    for i, j in product(range(0, shape[0], TILE), range(0, shape[1], TILE)):
        yield slice(i, i + TILE), slice(j, j + TILE)


def in_rows(array: np.ndarray, dtype: npt.DTypeLike | None = None, copy: bool = False) -> np.ndarray:
    """The array in C order and `dtype` (default: its own); copied only if needed, or on request.

    A matrix is copied in tiles: otherwise a transposed one misses the cache at every element.
    """
    dtype = np.dtype(dtype or array.dtype)
    if array.flags.c_contiguous or array.ndim != 2:
        return array.astype(dtype, "C", copy=copy)
    result = np.empty(array.shape, dtype)
    for tile in tiles(array.shape):
        result[tile] = array[tile]
    return result


class Storage:
    """Copies arrays; with `in_files` large ones are read-only, in temporary files, each gone with the last in it.

    They take memory only while they are read: `let_go`, and the functions here, let it go again.
    """

    _mapped: ClassVar[WeakSet[mmap.mmap]] = WeakSet()  # of all that are

    def __init__(self, in_files: bool = True) -> None:
        self.in_files = in_files
        self._file: Any = None
        self._map: mmap.mmap | None = None
        self._end = 0  # of what is written

    def keep(self, array: np.ndarray) -> np.ndarray:
        """A copy with `in_files`, else `array`."""
        return self.copy(array) if self.in_files else array

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A copy of `array`."""
        if not self.in_files or array.nbytes < STORED:
            return array.copy()
        is_turned = array.flags.f_contiguous and not array.flags.c_contiguous
        in_order = np.ascontiguousarray(array.T if is_turned else array)
        if self._map is None or self._end + in_order.nbytes > len(self._map):
            self._file, self._end = tempfile.TemporaryFile(), 0  # noqa: SIM115 it is open as long as this is
            self._file.truncate(max(PIECE, in_order.nbytes))
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            self._mapped.add(self._map)
        self._file.seek(self._end)
        self._file.write(in_order.data)
        self._file.flush()
        found = np.ndarray(in_order.shape, in_order.dtype, self._map, self._end)
        self._end += -(-in_order.nbytes // ALIGNED) * ALIGNED
        return found.T if is_turned else found

    @classmethod
    def is_used(cls) -> bool:
        """Whether any array is in a file."""
        return bool(cls._mapped)

    @classmethod
    def let_go(cls) -> None:
        """Let go of the memory in which arrays were read."""
        for mapped in cls._mapped if hasattr(mmap.mmap, "madvise") else ():
            mapped.madvise(mmap.MADV_DONTNEED)


def let_go(array: np.ndarray) -> None:
    """Let go of the memory in which an array of a `Storage` was read."""
    base: object = array if Storage.is_used() else None
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)


def largest(array: np.ndarray) -> float:
    """max|array|; 0 if empty."""
    if not array.size:
        return 0.0
    if array.dtype.kind == "c":
        return float(np.abs(array.astype(np.complex128, copy=False)).max())
    found = max(abs(float(array.max())), abs(float(array.min())))  # no copy; NaN stays NaN
    let_go(array)
    return found


def largest_difference(first: np.ndarray, second: np.ndarray) -> float:
    """max|first - second| of floats or complex numbers, in float64 or complex128.

    NaN, or the same infinity on both sides, gives NaN.
    """
    if first.size <= PART:
        wide = np.float64 if first.dtype.kind == second.dtype.kind == "f" else np.complex128
        with np.errstate(over="ignore", invalid="ignore"):  # infinity is valid
            return largest(np.asarray(np.subtract(first, second, dtype=wide)))
    if first.ndim == 2:
        parts: Iterable = tiles(first.shape)
    elif first.flags.c_contiguous and second.flags.c_contiguous:
        first, second = first.ravel(), second.ravel()
        parts = (slice(i, i + PART) for i in range(0, first.size, PART))
    else:
        return float(np.max([largest_difference(*rows) for rows in zip_strict(first, second)]))
    found = float(np.max([largest_difference(first[part], second[part]) for part in parts]))
    let_go(first)
    let_go(second)
    return found


class Measured(np.ndarray):
    """Stands for an array of the dtype `own` of which only the largest distance from a float64 array is known.

    It is that array with the distance added to each value, so that each part of it is as far away, too.
    """

    own: np.dtype | None = None

    def __array_finalize__(self, array: Any) -> None:
        self.own = getattr(array, "own", None)

    @classmethod
    def beside(cls, array: np.ndarray, distance: float, own: np.dtype) -> Measured:
        found = np.asarray(array + distance).view(cls)
        found.own = own
        return found


def own_dtype(array: np.ndarray) -> np.dtype:
    """The dtype of what the array stands for (see `Measured`)."""
    return getattr(array, "own", None) or array.dtype


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers between -1 and 1 in float64, the same for a name in every version of NumPy.

    NumPy promises that of a bit generator's raw numbers alone, not of distributions.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    return (np.asarray(raw >> np.uint64(11)) * 2.0**-52 - 1).reshape(shape)


@cache
def _direction(length: int) -> np.ndarray:
    vector = drawn(f"along an axis of {length}", (length,))
    return vector / np.linalg.norm(vector)


@lru_cache(maxsize=256)
def _weights(lengths: tuple[int, ...]) -> np.ndarray:
    """Of each element of an array of these lengths, in C order: the product of its axes' directions."""
    found = np.ones(1)
    for n in lengths:
        found = np.multiply.outer(found, _direction(n)).reshape(-1)
    return found


def along_axes(array: np.ndarray, axes: tuple[int, ...] = ()) -> list[np.ndarray]:
    """A vector along each axis longer than 1, the others summed with weights of norm 1, which length alone decides.

    So a transposed array gives the same vectors in another order. It may count as one of other `axes`.
    """
    axes = axes or tuple(n for n in array.shape if n != 1) or (1,)
    array = in_rows(array, np.result_type(array, np.float64))  # once: products would do it each time
    found: list[np.ndarray] = []
    for i, n in enumerate(axes):
        array = array.reshape(n, -1)
        found.append(array @ _weights(axes[i + 1 :]))
        array = _direction(n) @ array
    return found


def is_projected(shape: tuple[int, ...]) -> bool:
    """Whether `projected` changes an array of this shape."""
    return int(np.prod(shape)) > MOST_WHOLE and sum(n != 1 for n in shape) > 1


def projected(array: np.ndarray) -> np.ndarray:
    """A large array's vectors `along_axes`, one behind the other, in its dtype; else the array itself.

    Their limits follow as those of elements do. Weights have norm 1, so what is independent in each element keeps its
    size: n errors that are added grow by sqrt(n), and each was multiplied by 1 / sqrt(n). The array's own values do the
    same, so the ratio of both, which limits are about, stays; an error that all elements share does not grow, either.

    What could hide: a difference in one element of n, or few, comes out sqrt(n) smaller. In float64, where limits are
    1e-12 of the largest value, it is seen from sqrt(n) * 1e-12 on: 1e-9 in a million. Besides only what the weights
    cancel along every axis, such as what changes its sign whenever two of three equally long axes are exchanged.
    """
    if not is_projected(array.shape):
        return array
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite fails later
        found = np.concatenate(along_axes(array)).astype(array.dtype)
    let_go(array)
    return found


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Same dtype, shape and bits (-0.0 is not 0.0, NaN is NaN); False above 8 bytes an element."""
    size = first.dtype.itemsize
    if first.dtype != second.dtype or first.shape != second.shape or size > 8:
        return False
    first, second = first.view(f"u{size}"), second.view(f"u{size}")
    same = not first.size or bool(first.flat[-1] == second.flat[-1] and (first == second).all())
    let_go(first)
    let_go(second)
    return same
