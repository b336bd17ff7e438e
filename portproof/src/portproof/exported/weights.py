"""The graph's constants and the recorded weights: whether they are the same, and in what one differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from portproof.compare.ruler import U
from portproof.exported.match import layouts
from portproof.exported.reference import Reference

ALIKE = 0.9  # correlation of sorted values: so alike are weights that were rounded or scaled, not other ones
FEWEST = 8  # values that tell anything


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


def changed_weights(
    constants: Mapping[str, np.ndarray], ref: Reference, modules: Sequence[str]
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """(in what tensors of these modules differ, the recorded values for the constants), all at once, then each."""
    owners = {key: array for key, array in ref.weights.items() if key.rpartition(".")[0] in modules}
    whole = {name: array for name, array in constants.items() if array.dtype == np.float64 and array.size > 1}
    exact = {name for name, array in whole.items() if any(_same(array, each) for each in owners.values())}
    found: list[tuple[str, str, np.ndarray]] = []
    for key, array in owners.items():
        if any(_same(each, array) for each in whole.values()):
            continue
        for name, own in whole.items():
            if own.size == array.size and name not in exact:
                for layout in layouts(array.shape, own.shape):
                    found.append(
                        (difference(key, own, layout.read(array)), name, layout.read(array).astype(np.float64))
                    )
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
    for key, array in owners.items():  # the numbers are all there, in another layout
        for name, own in whole.items():
            if array.ndim > 1 and own.size == array.size:
                for layout in layouts(array.shape, own.shape):
                    if not np.array_equal(layout.read(array), own):
                        yield f"{key} is transposed", {name: layout.read(array).astype(np.float64)}


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    return (
        first.size == second.size
        and fingerprint(first) == fingerprint(second)
        and any(np.array_equal(layout.read(first), second) for layout in layouts(first.shape, second.shape))
    )


def difference(key: str, own: np.ndarray, recorded: np.ndarray) -> str:
    """In what a constant differs from what was recorded, of one shape, in words."""
    if fingerprint(own) == fingerprint(recorded):
        for axis in range(own.ndim):
            rows, others = (
                sorted(map(bytes, np.moveaxis(each, axis, 0).astype(np.float32))) for each in (own, recorded)
            )
            if rows == others:
                return f"{key} has its {'rows' if axis == 0 else f'slices along axis {axis}'} in another order"
        return f"{key} has its values in another order, transposed perhaps"
    with np.errstate(over="ignore"):
        if np.array_equal(own, recorded.astype(np.float16).astype(np.float64)):
            return f"{key} is the recorded one rounded to float16"
    bits = np.ascontiguousarray(recorded, np.float32).view(np.uint32)
    if np.array_equal(own, ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)):
        return f"{key} is the recorded one rounded to bfloat16"
    norm = float((recorded.astype(np.float64) ** 2).sum())
    ratio = float((own * recorded).sum()) / norm if norm else 0.0
    if ratio and (np.abs(own - ratio * recorded) <= 2 * U * np.abs(own)).all():
        return f"{key} is the recorded one times {f'1 + {ratio - 1:.1g}' if abs(ratio - 1) < 1e-3 else f'{ratio:.6g}'}"
    return f"{key} has other values than the recorded one (stale)"


def lost_modules(constants: Mapping[str, np.ndarray], ref: Reference, folded: Mapping[str, str]) -> set[str]:
    """Modules of a folded graph with a tensor that it holds neither as recorded nor folded into another.

    Limits that allow for folding could hide that such a tensor was rounded.
    """
    kept = {name for words in folded.values() for name in words.split(" in ")}
    known = {fingerprint(array) for array in constants.values() if array.dtype == np.float64}
    lost = {key.rpartition(".")[0] for key, array in ref.weights.items() if fingerprint(array) not in known}
    return lost - kept if folded else set()
