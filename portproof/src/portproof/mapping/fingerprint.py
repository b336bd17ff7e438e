"""What tells a model's tensors, whatever their names: their gradients when all of one shape hold the same values.

Two models of one function then give the same outputs, however their tensors of one shape are paired, and the gradient
of a tensor, which its place decides, says which it is. A tensor that is joined from several holds their values in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations, product
from math import gcd, prod

import numpy as np

from portproof.arrays import along_axes, let_go, same_bits
from portproof.backends.lent import thawed
from portproof.backends.model import BackendModel, Model
from portproof.backends.trace import Inputs
from portproof.mapping.links import Shape, slots_of, squeezed, tensors_of
from portproof.mapping.pairing import is_optional, is_statistic

POWERS = 4  # of an output's numbers that are summed


@dataclass(frozen=True)
class Fingerprint:
    """Of one side. Axes of length 1 are left out."""

    outputs: list[np.ndarray]  # of each the sums of its numbers' powers, whatever the order of its axes
    gradients: dict[str, list[np.ndarray]]  # by state_dict key: along each axis, the others summed with fixed weights


def fingerprint(
    model: BackendModel, inputs: Inputs, with_frozen: bool = False, forms: Forms | None = None
) -> Fingerprint | None:
    """Eval mode's, in float64; None if it does not run so. The weights stay, unless in pieces.

    `with_frozen` parameters, which may be frozen on one side alone, also of those.
    """
    forms = forms or Forms()
    model.set_pieces({})
    slots, before, in_train = model.slots, model.arrays(), dict(model.in_train)
    constants = _constants(model, inputs)
    filled = {
        key: forms.filling(slot.shape) for key, slot in slots.items() if not slot.is_whole and key not in constants
    }
    as_given = {key: slot.read(model.held[slot.tensor]) for key, slot in slots.items() if key not in filled}
    model.load(filled | as_given)
    outputs = model.run(inputs, "float64", False).output
    with thawed(model.backend, model.model) if with_frozen else nullcontext():
        run = model.run(inputs, "float64", False, list(map(_upstream, outputs)))
    model.load(before)
    model.in_train.update(in_train)
    if run.trace.error or not run.output or not all(np.isfinite(array).all() for array in run.output):
        return None
    gradients = {}
    for key, slot in slots.items():
        if slot.trained or with_frozen and not (slot.is_buffer or slot.is_whole):
            gradient = run.gradients.get(key, np.zeros(slot.shape))
            gradients[slot.tensor] = along_axes(_real(gradient), forms.folds.get(squeezed(slot.shape), ()))
            let_go(gradient)
    return Fingerprint([_sums(_real(output)) for output in run.output], gradients)


@dataclass(frozen=True)
class Forms:
    """In which forms a side's tensors are filled, so that the other side's are filled alike. Shapes are squeezed."""

    folds: Mapping[Shape, Shape] = field(default_factory=dict)  # {shape: the axes as which it counts}
    periods: Mapping[Shape, tuple[int, int]] = field(default_factory=dict)  # by sorted axes, see `filling`
    scale: float = 1.0  # of matrices
    _filled: dict[Shape, np.ndarray] = field(default_factory=dict, init=False)

    def filling(self, shape: Shape) -> np.ndarray:
        if shape not in self._filled:
            axes = self.folds.get(squeezed(shape), squeezed(shape))
            scale = self.scale if len(axes) > 1 else 1.0
            filled = scale * filling(axes, *self.periods.get(tuple(sorted(axes)), ()))
            self._filled[shape] = filled.reshape(shape).astype(np.float32)
        return self._filled[shape]


def forms_of(model: Model, other: Model) -> Iterator[tuple[Forms, Forms]]:
    """Those of both sides: what is joined of whole parts first, then what is joined of ever smaller groups.

    Such groups are the heads of queries, keys and values.
    """
    shapes = [[slot.shape for slot in tensors_of(each).values() if not slot.is_whole] for each in (model, other)]
    sides = [Counter(map(squeezed, each)) for each in shapes]
    counts = [Counter(tuple(sorted(shape)) for shape in side.elements()) for side in sides]
    left = [
        {shape for shape in side if tuple(sorted(shape)) in one - two}
        for side, one, two in zip(sides, counts, counts[::-1])
    ]
    rows = [Counter(shape for shape in each if len(shape) > 1 == shape[0]) for each in shapes]
    beside = {
        row: {s for s in (*sides[0], *sides[1]) if s[1:] == row[1:]}
        for row in (rows[0] - rows[1]) + (rows[1] - rows[0])
    }
    of_rows = {squeezed(row): row for row, matrices in beside.items() if matrices}
    whole = [_folds(*each) for each in ((left[0], left[1], sides[1]), (left[1], left[0], sides[0]))]
    stacks = [_stacks(left[i] - whole[i].keys() - {*whole[1 - i].values()}, counts[1 - i] - counts[i]) for i in (0, 1)]
    folds = [one | other | of_rows for one, other in zip(whole, stacks)]
    joined = {shape for row in of_rows.values() for shape in (row, *beside[row])}
    periods = _periods(*({fold.get(s, s) for s in each} | joined for fold, each in zip(folds, left)))
    seen: list[dict[Shape, tuple[int, int]]] = []
    for most in (0, 4, 2, 1):
        grouped = {shape: (gcd(period, most) if most else period, size) for shape, (period, size) in periods.items()}
        if grouped not in seen:
            seen.append(grouped)
            yield Forms(folds[0], grouped), Forms(folds[1], grouped)


def _folds(shapes: Collection[Shape], left: Collection[Shape], others: Collection[Shape]) -> dict[Shape, Shape]:
    """{shape: as the other side holds such tensors}, where that is clear, unless it may be joined of those `left`.

    (d, h, d / h) may be (d, d) there, and (h, d / h) a vector.
    """
    found = {}
    for shape in shapes:
        splits = [(prod(shape[:i]), prod(shape[i:])) for i in range(1, len(shape)) if len(shape) > 2]
        same = [axes for axes in (*splits, (prod(shape),)) if axes != shape and {axes, axes[::-1]} & {*others}]
        if len(same) == 1 and not any(_joined_lengths(shape, other) for other in left):
            (found[shape],) = same
    return found


def _stacks(shapes: Collection[Shape], spare: Counter[Shape]) -> dict[Shape, Shape]:
    """{shape: its parts' rows in turn} of (n, d, e), of which the other side has as many (d, e) to `spare`."""
    stacks = (shape for shape in shapes if len(shape) > 1 and spare[tuple(sorted(shape[1:]))] >= shape[0])
    return {shape: (shape[0] * shape[1], *shape[2:]) for shape in stacks}


def _periods(shapes: Collection[Shape], others: Collection[Shape]) -> dict[Shape, tuple[int, int]]:
    """{axes, sorted: (what divides the lengths of all of which one may be joined of others, their largest size)}."""
    found: dict[Shape, tuple[int, int]] = {}
    every = [(*pair, lengths) for pair in product(shapes, others) if (lengths := _joined_lengths(*pair))]
    plain = [pair for pair in every if pair[2] == _joined_lengths(*pair[:2], as_it_is=True)]
    told = {shape for *both, _ in plain for shape in both}
    pairs = [*plain, *(pair for pair in every if not told >= {*pair[:2]})]
    for _ in pairs:  # until it has gone all the way
        for one, other, lengths in pairs:
            axes = tuple(sorted(one)), tuple(sorted(other))
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


def _constants(model: BackendModel, inputs: Inputs) -> set[str]:
    """Buffers that the other side may lack, but for statistics, which a pass in train mode changes."""
    places = slots_of(model.modules).items()
    spare = {s.key for (name, leaf), s in places if is_optional(model.modules[name], leaf) and not is_statistic(s.key)}
    if not any(not model.slots[key].is_whole for key in spare):
        return spare
    before, after = model.arrays(), model.run(inputs, "float32", True).buffers
    return {key for key in spare if key not in after or same_bits(before[key], after[key])}


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


def sizes_of_axes(shape: Shape) -> list[Shape]:
    """The shapes of what `along_axes` gives."""
    return [(n,) for n in squeezed(shape) or (1,)]


def _upstream(output: np.ndarray) -> np.ndarray:
    """What is sent back: of each number alone, so that the order of axes does not matter."""
    part = output / max(np.abs(output).max(initial=0), 1e-300)
    return 1 + part + part**2


def _real(array: np.ndarray) -> np.ndarray:
    """In float64, of any numbers; of complex ones both parts in one."""
    return (array.real + np.sqrt(2) * array.imag).astype(np.float64)


def _sums(output: np.ndarray) -> np.ndarray:
    return np.array([(output**power).sum() for power in range(1, POWERS + 1)])
