"""Which tensor of the graph is which output of the reference: by value, in any layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from portproof.arrays import largest_difference

ABOUT = 1.5  # times as far
MOST_AXES = 5  # of a layout that is searched: 120 orders


@dataclass(frozen=True)
class Layout:
    """How a tensor's values come to the shape of the reference's: in an order of axes, or as they follow each other."""

    own: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None

    def read(self, own: np.ndarray) -> np.ndarray:
        return own.reshape(self.shape) if self.axes is None else own.transpose(self.axes)

    def written(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.own) if self.axes is None else array.transpose(np.argsort(self.axes))


@dataclass(frozen=True)
class Match:
    tensor: str
    layout: Layout
    difference: float
    atol: float


def layouts(own: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Layout]:
    """All in which an array of one shape may have the other; both have as many elements."""
    yield Layout(own, shape)
    if 1 < len(own) <= MOST_AXES and len(own) == len(shape):
        for axes in permutations(range(len(own))):
            if axes != tuple(range(len(own))) and tuple(own[i] for i in axes) == shape:
                yield Layout(own, shape, axes)


def fitting(array: np.ndarray, wanted: np.ndarray, atol: float) -> tuple[float, Layout] | None:
    """(how far `array` is from `wanted`, the layout in which that is at most `atol`); None if there is none."""
    if array.size != wanted.size or array.dtype.kind != wanted.dtype.kind:
        return None
    lows, highs = abs(array.min() - wanted.min()), abs(array.max() - wanted.max())
    if not (lows <= atol and highs <= atol):  # these are the same in any order
        return None
    for layout in layouts(array.shape, wanted.shape):
        difference = largest_difference(layout.read(array), wanted)
        if difference <= atol:
            return difference, layout
    return None


@dataclass
class Matcher:
    """Searches arrays of the reference, given as {its id: (array, limit)}, among the tensors that it is shown."""

    wanted: Mapping[int, tuple[np.ndarray, float]]
    moved: Mapping[str, float] = field(default_factory=dict)  # {tensor: what folding may have moved it}
    found: dict[int, Match] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_size: dict[int, list[int]] = defaultdict(list)
        for key, (array, _) in self.wanted.items():
            self._by_size[array.size].append(key)

    def see(self, tensor: str, values: np.ndarray) -> None:
        for key in self._by_size.get(values.size, ()):
            array, atol = self.wanted[key]
            atol += self.moved.get(tensor, 0.0)
            fit = fitting(values, array, atol)
            if fit is not None:  # of several the first: what is made of it may be nearly the same
                self.found.setdefault(key, Match(tensor, fit[1], fit[0], atol))


def likeness(values: np.ndarray, wanted: np.ndarray) -> tuple[float, Layout] | None:
    """(how alike two arrays of one size are, at most 1, the layout in which they are); None for what is not finite.

    Of layouts that say about as much, the first: those of arrays that are nothing alike differ by chance.
    """
    if values.size != wanted.size or values.dtype.kind != "f" or not np.isfinite(values).all():
        return None
    scale = float(np.linalg.norm(wanted)) or 1.0
    every = [(float(np.linalg.norm(each.read(values) - wanted)), each) for each in layouts(values.shape, wanted.shape)]
    least = min(distance for distance, _ in every)
    distance, first = next(each for each in every if each[0] <= ABOUT * least)
    return 1 - distance / scale, first
