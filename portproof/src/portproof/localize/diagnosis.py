"""Causes of a difference in one module, each tried: does the reference, so changed, give what the port gives?

A cause is reported only if it explains the difference: what is left of it is under a thousandth, for every item that
differs. So none is a guess; where none explains it, none is named.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from portproof.compare import Item, Items
from portproof.localize.mutations import ACTIVATIONS, BATCH_NORMS, MOMENTA, NORMS, Change, changes, setting

LEFT = 1e-3  # of the difference: what an explanation may leave


@dataclass(frozen=True)
class Alone:
    """One module run alone on both sides, in one precision."""

    module: nn.Module  # the reference's
    ref: Items  # what it gave
    port: Items  # what the port's gave
    bad: list[Item]  # those that differ
    inputs: list[np.ndarray]
    inner: dict[str, np.ndarray]  # what the modules inside it gave, by their names
    rerun: Callable[[Change], Items]  # the reference's module, changed, on the same


def explains(items: Items, alone: Alone) -> bool:
    """Whether `items` are what the port gave, up to a thousandth of the difference, wherever the two sides differ."""
    for item in alone.bad:
        ref, port, found = alone.ref.get(item), alone.port.get(item), items.get(item)
        if found is None or port is None or found.shape != port.shape or not np.isfinite(found).all():
            return False
        difference = np.abs(ref - port).max() if ref is not None and ref.shape == port.shape else np.abs(port).max()
        if not np.abs(found - port).max() <= LEFT * difference:
            return False
    return True


def _fitted_epsilon(alone: Alone) -> str:
    """The epsilon with which the reference gives what the port gives, if there is one."""
    item = alone.bad[0]

    def left(exponent: float) -> float:
        return float(np.abs(alone.rerun(setting(eps=10.0**exponent))[item] - alone.port[item]).max())

    near = math.log10(alone.module.eps or 1e-12)
    best = min((minimize_scalar(left, bounds=(near - w, near + w), method="bounded", options={"xatol": 1e-12})
                for w in (0.01, 4.0)), key=lambda found: found.fun)  # fmt: skip
    epsilon = 10.0**best.x
    if explains(alone.rerun(setting(eps=epsilon)), alone):
        return f"epsilon is {epsilon:.6g}, not {alone.module.eps:g}"
    return ""


def _statistics(alone: Alone) -> Iterator[tuple[str, Items]]:
    """(cause, buffers) for momenta taken otherwise and for the biased variance."""
    module, x = alone.module, alone.inputs[0]
    count = x.size // x.shape[1]
    means = [item for item in alone.ref if item.leaf in ("running_mean", "running_var")]
    before = {item: getattr(module, item.leaf).double().numpy() for item in means}
    m = module.momentum
    if m is None:
        return
    batch = {item: (alone.ref[item] - (1 - m) * before[item]) / m for item in means}
    for momentum in (m, 1 - m, *MOMENTA):
        for biased in (False, True):
            share = {item: (count - 1) / count if biased and item.leaf == "running_var" else 1.0 for item in means}
            found = {item: (1 - momentum) * before[item] + momentum * share[item] * batch[item] for item in means}
            words = ["the running variance is the biased one, sum / n (torch's is sum / (n - 1))"] * biased
            if momentum != m:
                meaning = " (Paddle's momentum is the share of the OLD value)" if momentum == 1 - m else ""
                words.append(f"the batch's share in the running statistics is {momentum:g}, not {m:g}{meaning}")
            if words:
                yield "; ".join(words), found
    yield "the running statistics are not updated", before


def _broadcast(operation: Callable, one: np.ndarray, other: np.ndarray, like: np.ndarray) -> np.ndarray:
    """`operation` on both where their shapes broadcast to that of `like`, else nothing that could explain anything."""
    try:
        result = operation(one, other)
    except ValueError:
        return np.empty(0)
    return result if result.shape == like.shape else np.empty(0)


def _of_inputs(alone: Alone, ref: np.ndarray, port: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(cause, output) for an input that is returned, added or left out, alone or with what a module inside gives."""
    for i, x in enumerate(alone.inputs):
        if x.dtype.kind != "f" or x.shape != port.shape:
            continue
        what = f"input {i}" if len(alone.inputs) > 1 else "its input"
        yield f"it returns {what} unchanged", x
        if x.shape == ref.shape:
            yield f"it does not add {what} (a residual connection is missing)", ref - x
            yield f"it adds {what} (a residual connection too many)", ref + x
        for child, array in alone.inner.items():
            yield f"it adds {what} to what {child} gives", _broadcast(np.add, array, x, ref)
            yield f"it multiplies {what} with what {child} gives", _broadcast(np.multiply, array, x, ref)


def _of_axes(ref: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(cause, array) for axes that are reversed or exchanged."""
    for a in range(ref.ndim) if ref.ndim >= 2 else ():
        yield f"axis {a} is reversed", np.flip(ref, a)
        for b in range(a + 1, ref.ndim):
            if ref.shape[a] == ref.shape[b]:
                yield f"axes {a} and {b} are exchanged", np.swapaxes(ref, a, b)


def _activated(ref: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(cause, output) for an activation too many."""
    for word, factory in ACTIVATIONS.items():
        if word != "no activation":
            with torch.no_grad():
                yield f"{word} is applied to what it returns", factory()(torch.from_numpy(np.array(ref))).numpy()


def _relations(alone: Alone) -> Iterator[tuple[str, dict[Item, np.ndarray]]]:
    """(cause, items) for a first item that is related to the reference's as a whole; the others are taken as given.

    Only a common factor has to explain all that differ.
    """
    item = alone.bad[0]
    ref, port = alone.ref.get(item), alone.port.get(item)
    if ref is None or port is None:
        return
    is_output, is_alike = item.kind == "output", ref.shape == port.shape and np.abs(ref).max() > 0
    given = {other: alone.port[other] for other in alone.bad if other in alone.port}
    if is_output:
        yield from ((text, given | {item: array}) for text, array in _of_inputs(alone, ref, port))
        yield from ((f"it returns what {child} gives", given | {item: array}) for child, array in alone.inner.items())
    yield from ((text, given | {item: array}) for text, array in _of_axes(ref))
    if is_alike:
        factor, shift = float((ref * port).sum() / (ref * ref).sum()), float((port - ref).mean())
        scaled = {other: factor * alone.ref[other] for other in alone.bad if other in alone.ref}
        yield f"it is {factor:.6g} times the reference's, everywhere", scaled
        yield f"it is the reference's plus {shift:.6g}, everywhere", given | {item: ref + shift}
    if is_alike and is_output:
        yield from ((text, given | {item: array}) for text, array in _activated(ref))


def tested_causes(alone: Alone) -> list[str]:
    """The causes that explain what differs, in words; the plainest first."""
    found = []
    if all(item.kind == "buffer" for item in alone.bad):
        if isinstance(alone.module, BATCH_NORMS):
            found = [text for text, items in _statistics(alone) if explains(items, alone)]
        return found[:1]
    if all(item.kind == "gradient" and item not in alone.port for item in alone.bad):
        return ["the port sends no gradient through (stop_gradient, detach, no_grad)"]
    for text, change in changes(alone.module):
        try:
            items = alone.rerun(change)
        except Exception:  # a change that does not fit these shapes explains nothing
            continue
        if explains(items, alone):
            found.append(text)
    if not found and isinstance(alone.module, NORMS):
        found = [text for text in [_fitted_epsilon(alone)] if text]
    if not found:
        found = [text for text, items in _relations(alone) if explains(items, alone)][:1]
    return found[:3]
