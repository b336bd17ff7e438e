"""Bounds of a graph's operators that no input reaches: another bound in their place, or none, gives the same values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from portproof.exported.graph import Graph, Node, Values

Range = tuple[float, float]

ANY: Range = -np.inf, np.inf
LARGEST = 0.99 * float(np.finfo(np.float32).max)  # from here on a bound is none
FIXED = {
    **dict.fromkeys(("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu"), (0.0, np.inf)),
    "HardSwish": (-3.0, 3.0),
}
COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
BOUNDED = {*FIXED, *COMPARISONS, "Clip", "HardSigmoid", "Min", "Max"}


def unreached(graph: Graph, given: Values) -> list[str]:
    """Such as "Clip node_7, above 6", of floats, outside of inner graphs."""
    nodes = [node for node in graph.nodes if node.op.op_type in BOUNDED]
    read = {name for node in nodes for name in node.inputs}
    ranges: dict[str, Range] = {}
    for name, array in chain(graph.constants.items(), given.items(), graph.run(given) if nodes else ()):
        if name in read and array.size and array.dtype == np.float64:
            ranges[name] = float(array.min()), float(array.max())
    found = []
    for node in nodes:
        x, low, high = _bounded(node, ranges)
        smallest, largest = ranges.get(x, ANY)
        found += [f"{node.title}, below {low:g}"] if -LARGEST < low <= smallest else []
        found += [f"{node.title}, above {high:g}"] if largest <= high < LARGEST else []
    return found


def _bounded(node: Node, ranges: Mapping[str, Range]) -> tuple[str, float, float]:
    """(what the operator bounds, the least, the largest); infinite where it has no bound of one number."""
    op: Any = node.op  # its class does not declare its attributes
    kind, (x, *others) = op.op_type, node.inputs
    if kind in FIXED:
        return x, *FIXED[kind]
    if kind == "HardSigmoid":
        return x, -op.beta / op.alpha, (1 - op.beta) / op.alpha
    if kind == "Clip":
        first, second, *_ = *others, "", ""
        low, high = _number(first, ranges)[0], _number(second, ranges)[1]
        return x, getattr(op, "min", low), getattr(op, "max", high)  # attributes before opset 11
    if len(others) != 1:
        return x, *ANY
    bound = others[0]
    if _number(bound, ranges) == ANY:
        x, bound = bound, x
    low, high = _number(bound, ranges)
    return x, -np.inf if kind == "Min" else low, np.inf if kind == "Max" else high


def _number(name: str, ranges: Mapping[str, Range]) -> Range:
    """The number that the tensor holds, twice; ANY if it holds others, too."""
    low, high = ranges.get(name, ANY)
    return (low, high) if low == high else ANY
