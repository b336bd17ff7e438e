"""Causes of a difference in one module, each tried: does the reference, so changed, give what the port gives?

A cause is reported only if it explains the difference: what is left of it is under a thousandth, for every item that
differs. So none is a guess; where none explains it, none is named.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from .hypotheses import ACTIVATIONS, BATCH_NORMS, MOMENTA, NORMS, Change, changes, setting

LEFT = 1e-3  # of the difference: what an explanation may leave
Items = dict[str, np.ndarray]


@dataclass(frozen=True)
class Alone:
    """One module run alone on both sides, in one precision."""

    module: nn.Module  # the reference's
    ref: Items  # what it gave
    port: Items  # what the port's gave
    bad: list[str]  # the items that differ
    inputs: list[np.ndarray]
    inner: Items  # what the modules inside it gave, by their names
    rerun: Callable[[Change], Items]  # the reference's module, changed, on the same


def explains(items: Mapping[str, np.ndarray], alone: Alone) -> bool:
    """Whether `items` are what the port gave, up to a thousandth of the difference, wherever the two sides differ."""
    for name in alone.bad:
        ref, port, found = alone.ref.get(name), alone.port.get(name), items.get(name)
        if found is None or port is None or found.shape != port.shape or not np.isfinite(found).all():
            return False
        difference = np.abs(ref - port).max() if ref is not None and ref.shape == port.shape else np.abs(port).max()
        if not np.abs(found - port).max() <= LEFT * difference:
            return False
    return True


def _fitted_epsilon(alone: Alone) -> str:
    """The epsilon with which the reference gives what the port gives, if there is one."""
    name = alone.bad[0]

    def left(exponent: float) -> float:
        return float(np.abs(alone.rerun(setting(eps=10.0**exponent))[name] - alone.port[name]).max())

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
    means = [name for name in alone.ref if name.endswith(("running_mean", "running_var"))]
    before = {name: getattr(module, name.removeprefix("buffer ").rpartition(".")[2]).double().numpy() for name in means}
    m = module.momentum
    if m is None:
        return
    batch = {name: (alone.ref[name] - (1 - m) * before[name]) / m for name in means}
    for momentum in (m, 1 - m, *MOMENTA):
        for biased in (False, True):
            share = {name: (count - 1) / count if biased and name.endswith("var") else 1.0 for name in means}
            found = {name: (1 - momentum) * before[name] + momentum * share[name] * batch[name] for name in means}
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


def _relations(alone: Alone) -> Iterator[tuple[str, Items]]:
    """(cause, items) for outputs or gradients that are related as a whole: scaled, shifted, permuted, the input."""
    name = alone.bad[0]
    ref, port = alone.ref.get(name), alone.port.get(name)
    if ref is None or port is None:
        return
    rest = {other: alone.port[other] for other in alone.bad if other in alone.port}  # only the first is explained
    for i, x in enumerate(alone.inputs):
        if name.startswith("output") and x.dtype.kind == "f" and x.shape == port.shape:
            what = f"input {i}" if len(alone.inputs) > 1 else "its input"
            yield f"it returns {what} unchanged", rest | {name: x}
            if x.shape == ref.shape:
                yield f"it does not add {what} (a residual connection is missing)", rest | {name: ref - x}
                yield f"it adds {what} (a residual connection too many)", rest | {name: ref + x}
            for child, array in alone.inner.items() if name.startswith("output") else ():
                yield f"it adds {what} to what {child} gives", rest | {name: _broadcast(np.add, array, x, ref)}
                yield (
                    f"it multiplies {what} with what {child} gives",
                    rest | {name: _broadcast(np.multiply, array, x, ref)},
                )
    for child, array in alone.inner.items() if name.startswith("output") else ():
        yield f"it returns what {child} gives", rest | {name: array}
    if ref.ndim >= 2:
        for a in range(ref.ndim):
            yield f"axis {a} is reversed", rest | {name: np.flip(ref, a)}
            for b in range(a + 1, ref.ndim):
                if ref.shape[a] == ref.shape[b]:
                    yield f"axes {a} and {b} are exchanged", rest | {name: np.swapaxes(ref, a, b)}
    if ref.shape == port.shape and np.abs(ref).max() > 0:
        factor = float((ref * port).sum() / (ref * ref).sum())
        yield (
            f"it is {factor:.6g} times the reference's, everywhere",
            {other: factor * alone.ref[other] for other in alone.bad if other in alone.ref},
        )
        shift = float((port - ref).mean())
        yield f"it is the reference's plus {shift:.6g}, everywhere", rest | {name: ref + shift}
        for word, factory in ACTIVATIONS.items():
            if word != "no activation" and name.startswith("output"):
                with torch.no_grad():
                    after = factory()(torch.from_numpy(np.array(ref))).numpy()
                yield f"{word} is applied to what it returns", rest | {name: after}


def tested_causes(alone: Alone) -> list[str]:
    """The causes that explain what differs, in words; the plainest first."""
    found = []
    if all(name.startswith("buffer") for name in alone.bad):
        if isinstance(alone.module, BATCH_NORMS):
            found = [text for text, items in _statistics(alone) if explains(items, alone)]
        return found[:1]
    if all(name.startswith("gradient") and name not in alone.port for name in alone.bad):
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
