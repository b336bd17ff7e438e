"""With what tensors are filled, so that both sides hold the same values where one joins, stacks or reshapes them.

All tensors of one shape hold the same, and what is joined of several holds theirs in turn (see fingerprint.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from math import gcd, prod

import numpy as np

from portproof.backends.model import Model
from portproof.mapping.links import Shape, squeezed, tensors_of

GROUPS = (0, 4, 2, 1)  # what periods have to divide; 0: nothing


def filling(axes: Shape, period: int = 0, size: int = 0) -> np.ndarray:
    """The values of all tensors of these axes: equal in any order of axes, and in turn for what is joined from such.

    A vector's are positive, since it may be a variance. They come again after each `period`, which divides the lengths
    of all that may be joined; `size` is the largest `_size` of those.
    """
    if len(axes) < 2:
        is_even = axes and (period or axes[0]) % 2 == 0
        return np.resize([0.8, 1.2], axes) if is_even else np.full(axes, 1.1)
    scale = period**0.5 / size if period else _size(axes) ** -0.5  # equal inputs add up
    period = period or sorted(axes)[-2]
    square = np.random.default_rng([31, period]).normal(size=(period, period)) if period > 1 else np.ones((1, 1))
    square = (square + square.T) / np.sqrt(2)
    places = [place % period for place in np.indices(axes, sparse=True)]
    pairs = list(combinations(places, 2))
    return sum(square[one, other] for one, other in pairs) / np.sqrt(len(pairs)) * scale


def _size(axes: Shape) -> int:
    """How many numbers lead to one along the longest axis."""
    return prod(axes) // max(axes, default=1)


@dataclass(frozen=True)
class Forms:
    """In which forms a side's tensors are filled. Shapes are squeezed."""

    folds: Mapping[Shape, Shape] = field(default_factory=dict)  # {shape: the axes as which it counts}
    periods: Mapping[Shape, tuple[int, int]] = field(default_factory=dict)  # by sorted axes, see `filling`
    scale: float = 1.0  # of matrices
    _filled: dict[Shape, np.ndarray] = field(default_factory=dict, init=False)

    def filling(self, shape: Shape) -> np.ndarray:
        if shape not in self._filled:
            axes = self.folds.get(squeezed(shape), squeezed(shape))
            scale = self.scale if len(axes) > 1 else 1.0
            filled = scale * filling(axes, *self.periods.get(_sorted(axes), ()))
            self._filled[shape] = filled.reshape(shape).astype(np.float32)
        return self._filled[shape]


def forms_of(model: Model, other: Model) -> Iterator[tuple[Forms, Forms]]:
    """Those of both sides: for what is joined of whole parts first, then for parts in ever smaller groups.

    Such groups are the heads of queries, keys and values.
    """
    sides = [_Side(each) for each in (model, other)]
    for one, two in (sides, sides[::-1]):
        one.fold(two)
    rows = _rows(*sides)
    folds = [side.whole | side.stacks(sides[1 - i]) | rows.folds for i, side in enumerate(sides)]
    shapes = [{fold.get(shape, shape) for shape in side.left} | rows.joined for fold, side in zip(folds, sides)]
    periods, seen = _periods(*shapes), list[dict[Shape, tuple[int, int]]]()
    for most in GROUPS:
        grouped = {axes: (gcd(period, most) if most else period, size) for axes, (period, size) in periods.items()}
        if grouped not in seen:
            seen.append(grouped)
            yield Forms(folds[0], grouped), Forms(folds[1], grouped)


class _Side:
    """The shapes of one side's tensors of floats, and what the other side holds otherwise."""

    def __init__(self, model: Model) -> None:
        self.shapes = [slot.shape for slot in tensors_of(model).values() if not slot.is_whole]
        self.squeezed = set(map(squeezed, self.shapes))
        self.counts = Counter(_sorted(squeezed(shape)) for shape in self.shapes)
        self.left: set[Shape] = set()  # of which the other side has fewer, in any order of axes
        self.whole: dict[Shape, Shape] = {}  # {shape: as the other side holds the same tensor}

    def fold(self, other: _Side) -> None:
        """(d, h, d / h) may be (d, d) there, and (h, d / h) a vector, unless it may be joined of what the other has."""
        self.left = {shape for shape in self.squeezed if _sorted(shape) in self.counts - other.counts}
        spare = {shape for shape in other.squeezed if _sorted(shape) in other.counts - self.counts}
        for shape in self.left:
            splits = [(prod(shape[:i]), prod(shape[i:])) for i in range(1, len(shape)) if len(shape) > 2]
            forms = (*splits, (prod(shape),))
            same = [axes for axes in forms if axes != shape and {axes, axes[::-1]} & other.squeezed]
            if len(same) == 1 and not any(_joined_lengths(shape, each) for each in spare):
                (self.whole[shape],) = same

    def stacks(self, other: _Side) -> dict[Shape, Shape]:
        """{shape: its parts' rows in turn} of (n, d, e), of which the other side has as many (d, e) to spare."""
        spare = other.counts - self.counts
        open_ones = self.left - self.whole.keys() - {*other.whole.values()}
        stacks = (shape for shape in open_ones if len(shape) > 1 and spare[_sorted(shape[1:])] >= shape[0])
        return {shape: (shape[0] * shape[1], *shape[2:]) for shape in stacks}


@dataclass(frozen=True)
class _Rows:
    """Matrices of one row, which one side has more of: a layer with one output, say, joined with others there."""

    folds: dict[Shape, Shape]
    joined: set[Shape]  # they and what may be joined of them


def _rows(one: _Side, other: _Side) -> _Rows:
    counts = [Counter(shape for shape in side.shapes if len(shape) > 1 == shape[0]) for side in (one, other)]
    every = one.squeezed | other.squeezed
    found = _Rows({}, set())
    for row in (counts[0] - counts[1]) + (counts[1] - counts[0]):
        beside = {shape for shape in every if shape[1:] == row[1:]}
        if beside:
            found.folds[squeezed(row)] = row
            found.joined.update({row, *beside})
    return found


def _periods(shapes: Collection[Shape], others: Collection[Shape]) -> dict[Shape, tuple[int, int]]:
    """{axes, sorted: (what divides the lengths of all of which one may be joined of others, their largest size)}."""
    every = [(*pair, lengths) for pair in product(shapes, others) if (lengths := _joined_lengths(*pair))]
    plain = [pair for pair in every if pair[2] == _joined_lengths(*pair[:2], as_it_is=True)]
    told = {shape for *both, _ in plain for shape in both}
    pairs = [*plain, *(pair for pair in every if not told >= {*pair[:2]})]
    found: dict[Shape, tuple[int, int]] = {}
    for _ in pairs:  # until it has gone all the way
        for one, other, lengths in pairs:
            axes = _sorted(one), _sorted(other)
            before = [found.get(each, (0, _size(each))) for each in axes]
            period = gcd(*lengths, *(period for period, _ in before))
            found |= dict.fromkeys(axes, (period, max(size for _, size in before)))
    return found


def _joined_lengths(shape: Shape, other: Shape, as_it_is: bool = False) -> tuple[int, int] | None:
    """Those of the only axis along which they differ, one of their first two; None if there is none.

    Axes may be in another order, unless it has to be joined `as_it_is`.
    """
    if len(shape) == len(other) and shape != other:
        order = list if as_it_is else sorted
        for i, j in product(range(min(len(shape), 2)), repeat=2):
            rests = order(shape[:i] + shape[i + 1 :]), order(other[:j] + other[j + 1 :])
            if shape[i] != other[j] and rests[0] == rests[1] and (i == j or not as_it_is):
                return shape[i], other[j]
    is_number = {len(shape), len(other)} == {0, 1}
    return ((*shape, 1)[0], (*other, 1)[0]) if is_number else None


def _sorted(shape: Shape) -> Shape:
    return tuple(sorted(shape))
