"""Diagnose a faulty module: which mutation of the reference's gives what the port's gives?

A mutation is named only if it leaves under a thousandth of every item's difference. Imports no framework.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from portproof.arrays import largest, largest_difference
from portproof.compare import Item, Items
from portproof.localize.layers import ACTIVATIONS, BATCH_NORMS, Layer, Mistake, mistakes, tunable_numbers

RESIDUE = 1e-3  # of the difference, at most

Candidate = tuple[str, Callable[[], Items]]  # (mistake, makes its items)


@dataclass(frozen=True)
class FaultyModule:
    """What differs in an isolated run, in one precision."""

    layer: Layer  # the reference's, which received the inputs
    ref: Items
    port: Items
    differing: list[Item]
    inner_outputs: Mapping[str, np.ndarray] = field(default_factory=dict)  # of the modules inside
    mutated: Iterable[Candidate] = ()  # that only the reference itself can compute
    frozen: Collection[Item] = ()  # gradients of what is frozen in the port


def reproduces(items: Items, faulty: FaultyModule) -> bool:
    """Whether they are the port's, to a thousandth of the difference."""
    for item in faulty.differing:
        ref = faulty.ref.get(item)
        port = faulty.port.get(item)
        found = items.get(item)
        if found is None or port is None or found.shape != port.shape or not np.isfinite(found).all():
            return False
        like = ref if ref is not None and ref.shape == port.shape else np.zeros_like(port)
        difference = largest_difference(like, port)  # 0 if only dtypes differ
        if difference == 0 or not largest_difference(found, port) <= RESIDUE * difference:
            return False
    return bool(faulty.differing)


def _reproducing(candidates: Iterable[Candidate], faulty: FaultyModule) -> Iterator[str]:
    for text, make in candidates:
        with suppress(Exception):  # it may not fit these arrays
            if reproduces(make(), faulty):
                yield text


def _candidate(mistake: Mistake, faulty: FaultyModule) -> Candidate:
    text, make = mistake

    def items() -> Items:
        arrays = make()
        return {item: arrays[item.leaf] for item in faulty.differing if item.kind != "gradient" and item.leaf in arrays}

    return text, items


def _mutated(faulty: FaultyModule) -> Iterator[Candidate]:
    with suppress(Exception):  # it may only look like the library's
        for mistake in mistakes(faulty.layer):
            yield _candidate(mistake, faulty)
    yield from faulty.mutated


def _fitted(faulty: FaultyModule) -> Iterator[Candidate]:
    """A number fitted to the port's values; to one element any would fit."""
    item = faulty.differing[0]
    port = faulty.port.get(item)
    if port is None or port.size < 2 or item.kind == "gradient":
        return

    def distance(number: float, mistake: Callable[[float], Mistake]) -> float:
        _, make = _candidate(mistake(number), faulty)
        found = make().get(item)
        return largest_difference(found, port) if found is not None and found.shape == port.shape else np.inf

    for bounds, mistake in tunable_numbers(faulty.layer):
        fit = minimize_scalar(distance, bounds=bounds, args=(mistake,), method="bounded", options={"xatol": 1e-12})
        yield _candidate(mistake(fit.x), faulty)


def _statistics(faulty: FaultyModule) -> Iterator[Candidate]:
    layer = faulty.layer
    m, x = layer.settings["momentum"], layer.inputs[0]
    if m is None:
        return
    count = x.size // x.shape[1]
    means = [item for item in faulty.ref if item.leaf in ("running_mean", "running_var")]
    before = {item: layer.tensors[item.leaf].astype(np.float64) for item in means}
    batch = {item: (faulty.ref[item] - (1 - m) * before[item]) / m for item in means}
    fitted = [_share(faulty.port[item], before[item], batch[item]) for item in means if item.leaf == "running_mean"]
    yield "the running statistics are not updated", partial(dict, before)
    for momentum, biased in product((m, 1 - m, *fitted), (False, True)):
        words = []
        share = dict.fromkeys(means, 1.0)
        if biased:
            words.append("the running variance is the biased one, sum / n (torch's is sum / (n - 1))")
            share |= {item: (count - 1) / count for item in means if item.leaf == "running_var"}
        if momentum != m and momentum == 1 - m:
            words.append(f"momentum={m:g}; write {momentum:g} (Paddle: weight of the OLD value)")
        elif momentum != m:
            words.append(f"the batch's weight in the running statistics is {momentum:g}, not {m:g}")
        found = {item: (1 - momentum) * before[item] + momentum * share[item] * batch[item] for item in means}
        if words:
            yield "; ".join(words), partial(dict, found)


def _share(mixed: np.ndarray, old: np.ndarray, new: np.ndarray) -> float:
    """Of `new` in the mixture of both, by least squares, to six digits."""
    span = (new - old).ravel()
    return float(f"{np.dot((mixed - old).ravel(), span) / max(np.dot(span, span), np.finfo(float).tiny):.6g}")


Change = tuple[str, Callable[[], npt.ArrayLike]]  # (mistake, makes its array)


def _of_arrays(faulty: FaultyModule, ref: np.ndarray, port: np.ndarray) -> Iterator[Change]:
    inputs = faulty.layer.inputs
    for i, x in enumerate(inputs):
        if x.dtype.kind not in "fc" or x.shape != port.shape:
            continue
        what = f"input {i}" if len(inputs) > 1 else "its input"
        yield f"it returns {what} unchanged", partial(np.asarray, x)
        if x.shape == ref.shape:
            yield f"it does not add {what} (a residual connection is missing)", partial(np.subtract, ref, x)
            yield f"it adds {what} (a residual connection too many)", partial(np.add, ref, x)
        for child, array in faulty.inner_outputs.items():
            yield f"it adds {what} to what {child} gives", partial(np.add, array, x)
            yield f"it multiplies {what} with what {child} gives", partial(np.multiply, array, x)
    for child, array in faulty.inner_outputs.items():
        yield f"it returns what {child} gives", partial(np.asarray, array)


def _of_axes(ref: np.ndarray) -> Iterator[Change]:
    for a in range(ref.ndim) if ref.ndim >= 2 else ():
        yield f"axis {a} is reversed", partial(np.flip, ref, a)
        for b in range(a + 1, ref.ndim):
            if ref.shape[a] == ref.shape[b]:
                yield f"axes {a} and {b} are exchanged", partial(np.swapaxes, ref, a, b)


def _relations(faulty: FaultyModule) -> Iterator[Candidate]:
    """Functions of the first item; the others as given, but for a factor."""
    item = faulty.differing[0]
    ref, port = faulty.ref.get(item), faulty.port.get(item)
    if ref is None or port is None:
        return
    given = {other: faulty.port[other] for other in faulty.differing if other in faulty.port}

    def changed(make: Callable[[], npt.ArrayLike]) -> Items:
        return given | {item: np.asarray(make())}

    is_output = item.kind == "output"
    is_comparable = ref.shape == port.shape and bool(ref.any())
    for text, make in (*(_of_arrays(faulty, ref, port) if is_output else ()), *_of_axes(ref)):
        yield text, partial(changed, make)
    # For one element there always is such a number.
    if is_comparable and ref.size > 1 and ref.dtype.kind != "b":
        factor = _proportion(ref, port)
        shift = (port - ref).mean().item()
        scaled = {other: faulty.ref[other] for other in faulty.differing if other in faulty.ref}
        if largest_difference(factor * ref, port) <= RESIDUE * largest(port):  # near 0 any factor is near
            yield (
                f"it is {factor:.6g} times the reference's, everywhere",
                lambda: {other: factor * array for other, array in scaled.items()},
            )
        yield f"it is the reference's plus {shift:.6g}, everywhere", partial(changed, partial(np.add, ref, shift))
    if is_comparable and is_output:
        for word, function in ACTIVATIONS.items():
            yield f"{word} is applied to what it returns", partial(changed, partial(function, ref))


def _proportion(ref: np.ndarray, port: np.ndarray) -> float | complex:
    ref, port = (array.astype(np.complex128).ravel() for array in (ref, port))
    factor = (np.vdot(ref, port) / np.vdot(ref, ref)).item()
    return factor.real if abs(factor.imag) <= 1e-9 * abs(factor) else factor


def _without_gradients(faulty: FaultyModule) -> tuple[list[str], FaultyModule]:
    """(gradients on one side only, in words; what differs besides)."""
    own = {name for name, slot in faulty.layer.module.slots.items() if not slot.is_buffer}
    gradients = [item for item in faulty.differing if item.kind == "gradient"]
    missing = [item for item in gradients if item not in faulty.port]
    unexpected = [item for item in gradients if item not in faulty.ref and item.leaf in own]
    found = []
    if missing and all(item.leaf in own for item in missing):
        frozen = [item for item in missing if item in faulty.frozen]
        cut_off = ", ".join(item.leaf for item in missing if item not in frozen)
        if frozen:
            found.append(f"{_whose(frozen, own)} frozen in the port and not in the reference (stop_gradient)")
        if cut_off:
            found.append(f"the port sends no gradient to {cut_off} (detach, no_grad)")
    elif missing:
        found.append("the port sends no gradient through (stop_gradient, detach, no_grad)")
    if unexpected:
        found.append(f"{_whose(unexpected, own)} frozen in the reference and not in the port (requires_grad)")
    rest = [item for item in faulty.differing if item not in missing and item not in unexpected]
    return found, replace(faulty, differing=rest)


def _whose(items: list[Item], own: set[str]) -> str:
    if len(items) == len(own) > 1:
        return "its parameters are"
    return f"{', '.join(item.leaf for item in items)} {'are' if len(items) > 1 else 'is'}"


def diagnose(faulty: FaultyModule) -> list[str]:
    """Mistakes that reproduce what differs, plainest first. Raises nothing."""
    found: list[str] = []
    # It may only look like the library's module: anything may raise.
    with suppress(Exception), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found, rest = _without_gradients(faulty)
        found += _causes(rest) if rest.differing else []
    return found


def _causes(faulty: FaultyModule) -> list[str]:
    statistics = [item for item in faulty.differing if item.kind == "buffer"]
    values = [item for item in faulty.differing if item.kind != "buffer"]
    if not values:
        is_norm = faulty.layer.kind in BATCH_NORMS
        return [*_reproducing(_statistics(faulty), faulty)][:1] if is_norm else []
    found: list[str] = []
    for candidates, most in ((_mutated, 3), (_fitted, 1), (_relations, 1)):
        with suppress(Exception):
            # This keeps those before an error.
            found.extend(_reproducing(candidates(faulty), faulty))
        if found:
            return found[:most]
    if statistics:  # there may be two causes
        return [text for each in (values, statistics) for text in _causes(replace(faulty, differing=each))]
    return []
