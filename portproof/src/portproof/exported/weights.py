"""The graph's constants and the recorded weights: whether they are the same, and in what one differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from portproof.compare.ruler import U
from portproof.exported.match import layouts
from portproof.exported.reference import Reference

FEWEST = 8  # values that tell anything
NEAR = 2.0**-8  # of a tensor's norm: what rounding to bfloat16 moves, at most


@dataclass(frozen=True)
class Weight:
    """A tensor that a graph may hold: a recorded one, or what that becomes with the norm behind its layer."""

    key: str  # of the recorded tensor
    array: np.ndarray
    norm: str = ""  # that is folded into it
    rounding: np.ndarray | float = 0.0  # how far float32 may move each value, at most

    @property
    def module(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def modules(self) -> set[str]:
        """Those of whose tensors it is made."""
        return {self.module, self.norm or self.module}

    @property
    def words(self) -> str:
        return f"{self.key}, with {self.norm} folded in," if self.norm else self.key

    def is_held(self, constant: np.ndarray) -> bool:
        """Whether the constant is it, in some layout, but for rounding, which a common factor is not."""
        if constant.size != self.array.size:
            return False
        every = (layout.read(constant) for layout in layouts(constant.shape, self.array.shape))
        if not self.norm:
            return any(np.array_equal(each, self.array) for each in every)
        for off in (each - self.array for each in every):
            if (np.abs(off) <= 2 * self.rounding).all():
                return bool(abs((off * self.array).sum()) <= np.sum(self.rounding * np.abs(self.array)))
        return False


def recorded_weights(ref: Reference) -> list[Weight]:
    return [Weight(key, array) for key, array in ref.weights.items()]


def fingerprint(array: np.ndarray) -> tuple[int, int, int]:
    """The same for the same numbers in any order: their count, and sums of their bits as whole numbers."""
    bits = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32).astype(np.uint64)
    return len(bits), int(bits.sum(dtype=np.uint64)), int((bits * bits).sum(dtype=np.uint64))


def shares_weights(constants: Mapping[str, np.ndarray], ref: Reference) -> bool:
    """Whether any of the graph's constants is a recorded tensor, or one that was rounded, scaled or reordered."""
    recorded = {key: array for key, array in ref.weights.items() if np.ptp(array) > 0 and array.size >= FEWEST}
    if not recorded:
        return True
    floats = [array for array in constants.values() if array.dtype == np.float64 and array.size >= FEWEST]
    known = {fingerprint(array) for array in recorded.values()}
    if any(fingerprint(array) in known for array in floats):
        return True
    for array in recorded.values():
        for other in (other for other in floats if other.size == array.size and np.ptp(other) > 0):
            ordered = np.sort(array, None), np.sort(other, None)
            if np.abs(ordered[0] - ordered[1]).max() <= 1e-2 * np.abs(array).max():
                return True
    return False


def nearest(constant: np.ndarray, weights: Sequence[Weight]) -> tuple[Weight, np.ndarray] | None:
    """(the weight that the constant nearly is, that in its layout); None if there is none."""
    found, least, size = None, math.inf, float(np.linalg.norm(constant))
    for weight in weights:
        norm = float(np.linalg.norm(weight.array)) if weight.array.size == constant.size else 0.0
        for layout in layouts(weight.array.shape, constant.shape) if abs(size - norm) <= NEAR * norm else ():
            wanted = layout.read(weight.array)
            distance = float(np.linalg.norm(constant - wanted))
            if distance <= NEAR * norm and distance < least:
                found, least = (weight, wanted), distance
    return found


def changed_weights(
    constants: Mapping[str, np.ndarray], owners: Sequence[Weight]
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """(in what tensors differ from the `owners`, the right values for the constants), all at once, then each."""
    whole = {name: array for name, array in constants.items() if array.dtype == np.float64 and array.size > 1}
    held = {(name, owner.words) for name, own in whole.items() for owner in owners if owner.is_held(own)}
    found: list[tuple[str, str, np.ndarray]] = []
    for owner in owners:
        if any(owner.words == each for _, each in held):
            continue
        for name, own in whole.items():
            if own.size == owner.array.size and not any(name == each for each, _ in held):
                for layout in layouts(owner.array.shape, own.shape):
                    wanted = layout.read(owner.array)
                    found.append((difference(owner, own, wanted), name, wanted.astype(np.float64)))
    for i in (0, -1):  # each in its first layout, then each in its last: transposed
        by_name: dict[str, tuple[str, np.ndarray]] = {}
        for words, name, array in found[:: 1 if i == 0 else -1]:
            by_name.setdefault(name, (words, array))
        if len(by_name) > 1:
            yield (
                "; ".join(words for words, _ in by_name.values()),
                {name: array for name, (_, array) in by_name.items()},
            )
    for words, name, array in found:
        yield words, {name: array}
    for owner in owners:  # the numbers are all there, in another layout
        for name, own in whole.items():
            if owner.array.ndim > 1 and own.size == owner.array.size:
                for layout in layouts(owner.array.shape, own.shape):
                    wanted = layout.read(owner.array)
                    if (np.abs(own - wanted) > 2 * np.max(owner.rounding)).any():
                        yield f"{owner.words} is transposed", {name: wanted.astype(np.float64)}


def difference(weight: Weight, own: np.ndarray, wanted: np.ndarray) -> str:
    """In what a constant differs from the weight, which is `wanted` in its layout, in words."""
    key, limit = weight.words, 2 * np.max(weight.rounding)
    wide, distance = wanted.astype(np.float64), np.abs(own - wanted)
    if (distance > limit).any() and (np.abs(np.sort(own, None) - np.sort(wide, None)) <= limit).all():
        for axis in range(own.ndim):
            if (np.abs(_by_sum(own, axis) - _by_sum(wide, axis)) <= limit).all():
                return f"{key} has its {'rows' if axis == 0 else f'slices along axis {axis}'} in another order"
        return f"{key} has its values in another order, transposed perhaps"
    with np.errstate(over="ignore"):
        is_half = np.array_equal(own, own.astype(np.float16))
    if is_half and (distance <= 2.0**-11 * np.abs(wide) + 2.0**-25 + limit).all():
        return f"{key} is the recorded one rounded to float16"
    bits = np.ascontiguousarray(own, np.float32).view(np.uint32)
    if not (bits & 0xFFFF).any() and (distance <= 2.0**-8 * np.abs(wide) + limit).all():
        return f"{key} is the recorded one rounded to bfloat16"
    norm = float((wide**2).sum())
    ratio = float((own * wide).sum()) / norm if norm else 0.0
    if ratio and (np.abs(own - ratio * wide) <= 2 * U * np.abs(own) + limit).all():
        return f"{key} is the recorded one times {f'1 + {ratio - 1:.1g}' if abs(ratio - 1) < 1e-3 else f'{ratio:.6g}'}"
    if norm and float((distance**2).sum()) <= NEAR**2 * norm:
        return f"{key} is off the recorded one by up to {distance.max():.1g}, in {np.count_nonzero(distance)} values"
    return f"{key} has other values than the recorded one (stale)"


def _by_sum(array: np.ndarray, axis: int) -> np.ndarray:
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    return rows[np.argsort(rows.sum(1))]
