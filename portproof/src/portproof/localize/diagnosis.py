"""The diagnosis of one faulty module: which mutation of the reference's gives what the port's gives?

A mutation is named only if it reproduces the port: what is left of the difference is under a thousandth, for every item
that differs. So none is a guess; where none reproduces it, none is named.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from portproof.compare import Item, Items
from portproof.localize.mutations import ACTIVATIONS, BATCH_NORMS, MOMENTA, NORMS, Mutation, mutations, setting

RESIDUE = 1e-3  # of the difference: what a mutation may leave


@dataclass(frozen=True)
class FaultyModule:
    """A module that differs in an isolated run, in one precision."""

    module: nn.Module  # the reference's
    ref: Items  # what it gave
    port: Items  # what the port's gave
    differing: list[Item]
    inputs: list[np.ndarray]
    inner_outputs: dict[str, np.ndarray]  # of the modules inside it, by their names, on the reference's side
    run_mutated: Callable[[Mutation], Items]  # what a mutation of it gives on the same inputs


def reproduces(items: Items, faulty: FaultyModule) -> bool:
    """Whether `items` are what the port gave, up to a thousandth of the difference, wherever the two sides differ."""
    for item in faulty.differing:
        ref, port, found = faulty.ref.get(item), faulty.port.get(item), items.get(item)
        if found is None or port is None or found.shape != port.shape or not np.isfinite(found).all():
            return False
        difference = np.abs(ref - port).max() if ref is not None and ref.shape == port.shape else np.abs(port).max()
        if not np.abs(found - port).max() <= RESIDUE * difference:
            return False
    return True


def _fitted_epsilon(faulty: FaultyModule) -> str:
    """The epsilon with which the reference gives what the port gives, if there is one."""
    item = faulty.differing[0]

    def left(exponent: float) -> float:
        return float(np.abs(faulty.run_mutated(setting(eps=10.0**exponent))[item] - faulty.port[item]).max())

    near = math.log10(faulty.module.eps or 1e-12)
    best = min((minimize_scalar(left, bounds=(near - w, near + w), method="bounded", options={"xatol": 1e-12})
                for w in (0.01, 4.0)), key=lambda found: found.fun)  # fmt: skip
    epsilon = 10.0**best.x
    if reproduces(faulty.run_mutated(setting(eps=epsilon)), faulty):
        return f"epsilon is {epsilon:.6g}, not {faulty.module.eps:g}"
    return ""


def _statistics(faulty: FaultyModule) -> Iterator[tuple[str, Items]]:
    """(mistake in words, buffers) for momenta taken otherwise and for the biased variance."""
    module, x = faulty.module, faulty.inputs[0]
    count = x.size // x.shape[1]
    means = [item for item in faulty.ref if item.leaf in ("running_mean", "running_var")]
    before = {item: getattr(module, item.leaf).double().numpy() for item in means}
    m = module.momentum
    if m is None:
        return
    batch = {item: (faulty.ref[item] - (1 - m) * before[item]) / m for item in means}
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


def _broadcast(operation: Callable, a: np.ndarray, b: np.ndarray, like: np.ndarray) -> np.ndarray:
    """`operation` on both where their shapes broadcast to that of `like`, else what reproduces nothing."""
    try:
        result = operation(a, b)
    except ValueError:
        return np.empty(0)
    return result if result.shape == like.shape else np.empty(0)


def _of_inputs(faulty: FaultyModule, ref: np.ndarray, port: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(mistake in words, output) for an input that is returned, added or left out, or joined with an inner output."""
    for i, x in enumerate(faulty.inputs):
        if x.dtype.kind != "f" or x.shape != port.shape:
            continue
        what = f"input {i}" if len(faulty.inputs) > 1 else "its input"
        yield f"it returns {what} unchanged", x
        if x.shape == ref.shape:
            yield f"it does not add {what} (a residual connection is missing)", ref - x
            yield f"it adds {what} (a residual connection too many)", ref + x
        for child, array in faulty.inner_outputs.items():
            yield f"it adds {what} to what {child} gives", _broadcast(np.add, array, x, ref)
            yield f"it multiplies {what} with what {child} gives", _broadcast(np.multiply, array, x, ref)


def _of_axes(ref: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(mistake in words, array) for axes that are reversed or exchanged."""
    for a in range(ref.ndim) if ref.ndim >= 2 else ():
        yield f"axis {a} is reversed", np.flip(ref, a)
        for b in range(a + 1, ref.ndim):
            if ref.shape[a] == ref.shape[b]:
                yield f"axes {a} and {b} are exchanged", np.swapaxes(ref, a, b)


def _activated(ref: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(mistake in words, output) for an activation too many."""
    for word, factory in ACTIVATIONS.items():
        if word != "no activation":
            with torch.no_grad():
                yield f"{word} is applied to what it returns", factory()(torch.from_numpy(np.array(ref))).numpy()


def _relations(faulty: FaultyModule) -> Iterator[tuple[str, dict[Item, np.ndarray]]]:
    """(mistake in words, items) for a first item that is a function of the reference's; the others are taken as given.

    Only a common factor has to reproduce all that differ.
    """
    item = faulty.differing[0]
    ref, port = faulty.ref.get(item), faulty.port.get(item)
    if ref is None or port is None:
        return
    given = {other: faulty.port[other] for other in faulty.differing if other in faulty.port}
    is_comparable = ref.shape == port.shape and np.abs(ref).max() > 0
    if item.kind == "output":
        for text, array in _of_inputs(faulty, ref, port):
            yield text, given | {item: array}
        for child, array in faulty.inner_outputs.items():
            yield f"it returns what {child} gives", given | {item: array}
    for text, array in _of_axes(ref):
        yield text, given | {item: array}
    if is_comparable:
        factor, shift = float((ref * port).sum() / (ref * ref).sum()), float((port - ref).mean())
        scaled = {other: factor * faulty.ref[other] for other in faulty.differing if other in faulty.ref}
        yield f"it is {factor:.6g} times the reference's, everywhere", scaled
        yield f"it is the reference's plus {shift:.6g}, everywhere", given | {item: ref + shift}
    if is_comparable and item.kind == "output":
        for text, array in _activated(ref):
            yield text, given | {item: array}


def diagnose(faulty: FaultyModule) -> list[str]:
    """The mistakes that reproduce what differs, in words; the plainest first."""
    found = []
    if all(item.kind == "buffer" for item in faulty.differing):
        if isinstance(faulty.module, BATCH_NORMS):
            found = [text for text, items in _statistics(faulty) if reproduces(items, faulty)]
        return found[:1]
    if all(item.kind == "gradient" and item not in faulty.port for item in faulty.differing):
        return ["the port sends no gradient through (stop_gradient, detach, no_grad)"]
    for text, mutation in mutations(faulty.module):
        try:
            items = faulty.run_mutated(mutation)
        except Exception:  # a mutation that does not fit these shapes reproduces nothing
            continue
        if reproduces(items, faulty):
            found.append(text)
    if not found and isinstance(faulty.module, NORMS):
        found = [text for text in [_fitted_epsilon(faulty)] if text]
    if not found:
        found = [text for text, items in _relations(faulty) if reproduces(items, faulty)][:1]
    return found[:3]
