"""What tells a model's tensors, whatever their names: their gradients when all of one shape hold the same values.

Two models of one function then give the same outputs, however their tensors of one shape are paired, and the gradient
of a tensor, which its place decides, says which it is. A tensor that is joined from several holds their values in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType

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
    model: BackendModel, inputs: Inputs, with_frozen: bool = False, folds: Mapping[Shape, Shape] = MappingProxyType({})
) -> Fingerprint | None:
    """Eval mode's, in float64; None if it does not run so. The weights stay, unless in pieces.

    `with_frozen` parameters, which may be frozen on one side alone, also of those. What has the shape of one of the
    `folds` counts as a matrix.
    """
    model.set_pieces({})
    slots, before, in_train = model.slots, model.arrays(), dict(model.in_train)
    constants = _constants(model, inputs)
    fillings = cache(lambda shape: filling(folds.get(squeezed(shape), shape)).reshape(shape).astype(np.float32))
    filled = {key: fillings(slot.shape) for key, slot in slots.items() if not slot.is_whole and key not in constants}
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
            gradients[slot.tensor] = along_axes(_real(gradient).reshape(folds.get(squeezed(slot.shape), slot.shape)))
            let_go(gradient)
    return Fingerprint([_sums(_real(output)) for output in run.output], gradients)


def folds_between(model: Model, other: Model) -> dict[Shape, Shape]:
    """{shape of the model's: the matrix as which the other side holds such tensors}, as (d, h, d / h) may be (d, d)."""
    shapes, theirs = (Counter(squeezed(slot.shape) for slot in tensors_of(each).values()) for each in (model, other))
    matrices = {shape for shape in theirs - shapes if len(shape) == 2}
    found = {}
    for shape in shapes - theirs:
        splits = [(prod(shape[:i]), prod(shape[i:])) for i in range(1, len(shape)) if len(shape) > 2]
        folded = [split for split in splits if matrices & {split, split[::-1]}]
        if len(folded) == 1:
            found[shape] = folded[0]
    return found


def _constants(model: BackendModel, inputs: Inputs) -> set[str]:
    """Buffers that the other side may lack, but for statistics, which a pass in train mode changes."""
    places = slots_of(model.modules).items()
    spare = {s.key for (name, leaf), s in places if is_optional(model.modules[name], leaf) and not is_statistic(s.key)}
    if not any(not model.slots[key].is_whole for key in spare):
        return spare
    before, after = model.arrays(), model.run(inputs, "float32", True).buffers
    return {key for key in spare if key not in after or same_bits(before[key], after[key])}


def filling(shape: Shape) -> np.ndarray:
    """The values of all tensors of this shape: equal for its transpose, and in turn for what is joined from such.

    A vector's are positive, since it may be a variance.
    """
    axes = squeezed(shape)
    if len(axes) < 2:
        return np.resize([0.8, 1.2], shape) if axes and axes[0] % 2 == 0 else np.full(shape, 1.1)
    size = min(axes[:2])
    square = np.random.default_rng([31, size]).normal(size=(size, size))
    square = (square + square.T) / np.sqrt(2 * size)
    found = square[np.ix_(np.arange(axes[0]) % size, np.arange(axes[1]) % size)]
    behind = np.random.default_rng([32, *axes[2:]]).normal(size=axes[2:]) / np.sqrt(max(1, prod(axes[2:])))
    return np.multiply.outer(found, behind).reshape(shape)


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
