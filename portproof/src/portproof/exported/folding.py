"""Constants that an exporter made of weights, in float32: of which, and what that may move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from portproof.arrays import largest, largest_difference
from portproof.compare.ruler import S, U
from portproof.exported.constants import is_rounded
from portproof.exported.graph import Graph, Values
from portproof.exported.reference import Reference
from portproof.exported.weights import Weight, fingerprint, nearest, recorded_weights

RUNS = 3
ROUNDINGS = 4  # of a folded weight: variance + epsilon, its root, the quotient, the product
MORE_ROUNDINGS = 7  # of a folded bias: its factor's, bias - mean, the product, the sum
TINIEST = 1e-45  # of what float32 holds


@dataclass(frozen=True)
class Origins:
    """What the graph's constants of floats are."""

    folded: dict[str, Weight]
    altered: dict[str, tuple[Weight, np.ndarray]]  # nearly such a weight, and that in the constant's layout
    others: list[str]  # no recorded tensor: float32 may have rounded them
    lost: set[str]  # modules of a folded graph with a tensor that it holds neither as recorded nor folded

    @classmethod
    def of(cls, graph: Graph, ref: Reference) -> Origins:
        floats = {name: array for name, array in graph.constants.items() if array.dtype == np.float64 and array.size}
        marks = {name: fingerprint(array) for name, array in floats.items()}
        weights, held = [*recorded_weights(ref), *folded_weights(ref)], set[str]()
        whole: dict[str, Weight] = {}
        for weight in weights:
            mark = fingerprint(weight.array)
            for name, array in floats.items():
                if (weight.norm or marks[name] == mark) and weight.is_held(array):
                    whole.setdefault(name, weight)
                    held.add(weight.words)
        folded = {name: weight for name, weight in whole.items() if weight.norm}
        left = [weight for weight in weights if weight.words not in held]
        near = {name: nearest(array, left) for name, array in floats.items() if name not in whole and array.size > 1}
        altered = {name: found for name, found in near.items() if found is not None}
        taken = {*whole, *altered, *graph.factors, *graph.snapped}
        others = [name for name, array in floats.items() if name not in taken and is_rounded(array)]
        lost = {module for weight in left if not weight.norm for module in weight.modules}
        lost -= {module for weight in folded.values() for module in weight.modules}
        return cls(folded, altered, others if folded else [], lost if folded else set())

    @property
    def rounded(self) -> list[str]:
        """Constants that float32 may have rounded."""
        return [*self.folded, *self.others]


def folded_weights(ref: Reference) -> Iterator[Weight]:
    """Of each layer with a norm of statistics right behind it."""
    for label, users in ref.users.items():
        layer = ref.calls[label].name
        weight = ref.weights.get(f"{layer}.weight")
        if weight is None or weight.ndim < 2:
            continue
        for user in users:
            norm = ref.calls[user].name
            tensors = {leaf: ref.weights.get(f"{norm}.{leaf}") for leaf in ("running_mean", "running_var")}
            mean, var = (None if each is None else each.astype(np.float64) for each in tensors.values())
            axis = 1 if "Transpose" in ref.model.modules[layer].type else 0  # of the output channels
            if mean is None or var is None or len(mean) != weight.shape[axis]:
                continue
            settings = ref.model.modules[norm].settings
            epsilon = cast(float, settings.get("eps", settings.get("epsilon", 1e-5)))
            factor = ref.weights.get(f"{norm}.weight", np.ones(len(mean))) / np.sqrt(var + epsilon)
            shift = ref.weights.get(f"{norm}.bias", np.zeros(len(mean))).astype(np.float64)
            own = ref.weights.get(f"{layer}.bias", np.zeros(len(mean))).astype(np.float64)
            scaled = weight * np.expand_dims(factor, [i for i in range(weight.ndim) if i != axis])
            yield Weight(f"{layer}.weight", scaled, norm, ROUNDINGS * U * np.abs(scaled) + TINIEST)
            terms = np.abs(shift) + (abs(own) + abs(mean)) * abs(factor)
            yield Weight(f"{layer}.bias", shift + (own - mean) * factor, norm, MORE_ROUNDINGS * U * terms + TINIEST)


class Moved(Mapping[str, np.ndarray]):
    """Constants, each moved by U of itself, up or down at random; drawn when they are read, to keep none in memory."""

    def __init__(self, constants: Values, names: Collection[str], seed: int) -> None:
        self.constants, self.seed = constants, seed
        self.numbers = {name: i for i, name in enumerate(names)}

    def __getitem__(self, name: str) -> np.ndarray:
        rng, array = np.random.default_rng((self.seed, self.numbers[name])), self.constants[name]
        step = U * (np.abs(array) if array.ndim > 1 else largest(array))
        return array + step * rng.choice((-1.0, 1.0), array.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def measured(
    graph: Graph, given: Values, names: Collection[str], moved: dict[str, float], passed_on: Values | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Run the graph, as `Graph.run` does, and set in `moved` how far the rounding of `names` may move each tensor.

    Beside it RUNS times each of these constants is moved; what that changes, S times, is the limit: folding rounds
    ROUNDINGS times by U at most, and another draw of signs may change twice as much.
    """
    others = [Moved(graph.constants, names, seed) for seed in range(RUNS if names else 0)]
    runs = [graph.run(given, constants=each, passed_on=passed_on) for each in (None, *others)]
    for (name, exact), *rest in zip(*runs):
        if exact.dtype.kind == "f" and exact.size and rest:
            distance = S * max(largest_difference(exact, other) for _, other in rest)
            if distance > 0:
                moved[name] = distance
        yield name, exact
