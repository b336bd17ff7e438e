"""Batch norm that an exporter folded into the layer before it, in float32: which weights, and what that may move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np

from portproof.arrays import largest, largest_difference
from portproof.compare.ruler import S, U
from portproof.exported.graph import Graph
from portproof.exported.match import layouts
from portproof.exported.reference import Reference

RUNS = 3
ROUNDINGS = 4  # of a folded weight: variance + epsilon, its root, the quotient, the product


def folded(graph: Graph, ref: Reference) -> dict[str, str]:
    """{constant of the graph: the recorded layer and norm of which float32 makes it}."""
    found = {}
    for layer, norm, weight, bias, terms in _products(ref):
        words = f"{norm} in {layer}"
        for name, array in graph.constants.items():
            if array.dtype != np.float64 or name in found:
                continue
            if (
                array.size == weight.size
                and _is_near(array, weight, np.abs(weight))
                or array.size == bias.size
                and _is_near(array, bias, terms)
            ):
                found[name] = words
    return found


def _products(ref: Reference) -> Iterator[tuple[str, str, np.ndarray, np.ndarray, np.ndarray]]:
    """(layer, norm, weight, bias, size of the bias's terms) of each layer with a norm of statistics right behind it."""
    for label, users in ref.users.items():
        layer = ref.calls[label].name
        weight = ref.weights.get(f"{layer}.weight")
        if weight is None or weight.ndim < 2:
            continue
        for user in users:
            norm = ref.calls[user].name
            tensors = {leaf: ref.weights.get(f"{norm}.{leaf}") for leaf in ("running_mean", "running_var")}
            mean, var = (None if each is None else each.astype(np.float64) for each in tensors.values())
            if mean is None or var is None or len(mean) != len(weight):
                continue
            settings = ref.model.modules[norm].settings
            epsilon = cast(float, settings.get("eps", settings.get("epsilon", 1e-5)))
            factor = ref.weights.get(f"{norm}.weight", np.ones(len(mean))) / np.sqrt(var + epsilon)
            shift = ref.weights.get(f"{norm}.bias", np.zeros(len(mean))).astype(np.float64)
            own = ref.weights.get(f"{layer}.bias", np.zeros(len(mean))).astype(np.float64)
            product = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
            yield (
                layer,
                norm,
                product,
                shift + (own - mean) * factor,
                np.abs(shift) + (abs(own) + abs(mean)) * abs(factor),
            )


def _is_near(array: np.ndarray, wanted: np.ndarray, terms: np.ndarray) -> bool:
    """Whether it is that up to float32's rounding of as large terms, in some layout."""
    for layout in layouts(array.shape, wanted.shape):
        if (np.abs(layout.read(array) - wanted) <= 2 * ROUNDINGS * U * terms + 1e-45).all():
            return True
    return False


def moved_by_folding(graph: Graph, given: Mapping[str, np.ndarray], names: Mapping[str, str]) -> dict[str, float]:
    """{tensor: how far the rounding of the folded constants may have moved it}.

    RUNS times each is moved by U of itself, up or down at random; what that changes, S times, is the limit: folding
    rounds ROUNDINGS times by U at most, and another draw of signs may change twice as much.
    """
    rng, moved = np.random.default_rng(0), dict[str, float]()
    for _ in range(RUNS if names else 0):
        changed = {}
        for name in names:
            array = graph.constants[name]
            step = U * (np.abs(array) if array.ndim > 1 else largest(array))
            changed[name] = array + step * rng.choice((-1.0, 1.0), array.shape)
        for (name, exact), (_, other) in zip(graph.run(given), graph.run(given, constants=changed)):
            if exact.dtype.kind == "f" and exact.size:
                moved[name] = max(moved.get(name, 0.0), S * largest_difference(exact, other))
    return {name: distance for name, distance in moved.items() if distance > 0}
