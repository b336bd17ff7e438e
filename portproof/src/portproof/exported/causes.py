"""Why the graph gives other values than a module: each cause is tried on the nodes between that module's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.special import log_softmax, softmax

from portproof.backends.trace import OUTPUT
from portproof.compare.ruler import HOPELESS
from portproof.exported.folding import folded_weights
from portproof.exported.graph import Node
from portproof.exported.match import fitting
from portproof.exported.place import Fault, Search
from portproof.exported.weights import Weight, changed_weights, recorded_weights
from portproof.localize import layers

Change = tuple[str, dict[int, Node], dict[str, np.ndarray]]  # words, nodes, constants

LIKE_LAYERS = (
    *("ReLU", "ReLU6", "hard-swish", "swish", "sigmoid", "hard-sigmoid", "hard-sigmoid with slope 0.2"),
    *("GELU", "GELU, the tanh approximation", "tanh", "ELU", "softplus"),
)
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the identity": lambda x: x,
    **{name: layers.ACTIVATIONS[name] for name in LIKE_LAYERS},
    "leaky ReLU": layers.ACTIVATIONS["leaky ReLU, slope 0.01"],
    "mish": layers.ACTIVATIONS["Mish"],
}
ON_TOP: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": lambda x: softmax(x, -1),
    "softmax over axis 1": lambda x: softmax(x, 1) if x.ndim > 1 else x,
    "log-softmax": lambda x: log_softmax(x, -1),
    **ACTIVATIONS,
}
COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")
MODES = ("linear", "nearest", "cubic")
NEAREST = ("round_prefer_floor", "floor", "ceil", "round_prefer_ceil")
ROUNDED = 0.02  # how far a rounded constant is off, at most, as a share of it


class Causes:
    def __init__(self, search: Search, fault: Fault) -> None:
        self.graph, self.ref, self.fault = search.graph, search.ref, fault
        self.atol = fault.atol + search.moved.get(fault.tensor, 0.0)
        replaced = {name: array for name, array in search.replaced.items() if name != fault.tensor}
        behind = self.graph.behind([fault.tensor])
        known = {match.tensor for match in search.matches.values()} | {*replaced, *search.given}
        self.numbers = self.graph.before(fault.tensor, known - behind - set(self.graph.constants))
        made = {name for i in self.numbers for name in self.graph.nodes[i].outputs}
        read = {name for i in self.numbers for name in (*self.graph.nodes[i].inputs, *self.graph.nodes[i].hidden)}
        values = {**search.given, **replaced}
        run = self.graph.run(search.given, replaced, passed_on=search.passed_on)
        values |= {name: search.passed_on.get(name, array) for name, array in run if name in read - made}
        self.given = {name: values[name] for name in read - made if name in values}
        self.constants = {name: self.graph.constants[name] for name in read if name in self.graph.constants}
        self.module = self.ref.calls[fault.call].name if fault.call in self.ref.calls else ""
        self.settings = self.ref.model.modules[self.module].settings

    @property
    def nodes(self) -> list[str]:
        return [self.graph.nodes[i].title for i in self.numbers]

    def named(self) -> list[str]:
        """The first cause that explains all of the difference, in words; none if no cause does."""
        told = next(self._of_values(), "")
        for words, nodes, constants in self._changes() if not told else ():
            if self._explains(nodes, constants):
                return [words]
        return [told] if told else []

    def weights(self) -> str:
        """In what the module's tensors differ from the recorded ones, if that explains it; "" otherwise."""
        for words, constants in changed_weights(self.constants, self._owners()):
            if self._explains({}, constants):
                return words
        return ""

    def _owners(self) -> list[Weight]:
        """What the nodes may hold: tensors of the module, and of those in it."""
        prefix = f"{self.module}." if self.module else ""
        modules = {name for name in self.ref.model.modules if name == self.module or name.startswith(prefix)}
        every = [*recorded_weights(self.ref), *folded_weights(self.ref)]
        return [weight for weight in every if weight.modules & modules]

    def _explains(self, nodes: Mapping[int, Node], constants: Mapping[str, np.ndarray]) -> bool:
        try:
            run = self.graph.run(self.given, nodes=self.numbers, changed=nodes, constants=constants)
            found = next(array for name, array in run if name == self.fault.tensor)
        except Exception:  # of an operator that cannot take this
            return False
        return bool(found.size) and fitting(found, self.fault.wanted, self.atol) is not None

    def _is(self, first: np.ndarray, second: np.ndarray) -> bool:
        if first.shape != second.shape:
            return False
        return bool(np.abs(first - second).max() <= self.atol)

    def _of_values(self) -> Iterator[str]:
        """Causes that the values show by themselves."""
        values, wanted, call = self.fault.values, self.fault.wanted, self.ref.calls.get(self.fault.call)
        if values is None or call is None:
            return
        inputs = [array for array in call.inputs if array.shape == wanted.shape and array.dtype.kind == "f"]
        kind = self.ref.type_of(self.fault.call)
        with np.errstate(all="ignore"):
            yield from self._dropped(np.zeros_like(wanted))
            for array in self._added(wanted.shape):
                if self._is(values + array, wanted):
                    yield "it does not add its input (a residual connection is missing)"
                if self._is(values - array, wanted):
                    yield "it adds its input (a residual connection too many)"
                yield from self._dropped(array)
            for array in inputs:
                for name, function in ACTIVATIONS.items():
                    if self._is(function(array), values):
                        yield (
                            "it returns its input unchanged"
                            if function(array) is array
                            else f"it is {name}, not {kind}"
                        )
                yield from self._of_batch(array, values)
            for name, function in ON_TOP.items():
                once = function(wanted)
                if once is not wanted and self._is(once, values):
                    yield f"{name} is applied to what it returns"
                elif once is not wanted and self._is(function(once), values):
                    yield f"{name} is applied to what it returns, twice"
            for name, function in list(ON_TOP.items())[:3]:
                if self._is(function(values), wanted):
                    yield f"{name} is missing"

    def _added(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        """What the call, and calls in it, received of that shape, without repeats: a residual connection adds it."""
        inner = [label for label in self.ref.calls if self.fault.call in self.ref.enclosing(label)]
        arrays = [array for label in (self.fault.call, *inner) for array in self.ref.calls[label].inputs]
        return list({id(array): array for array in arrays if array.shape == shape and array.dtype.kind == "f"}.values())

    def _dropped(self, added: np.ndarray) -> Iterator[str]:
        """Dropout, on what is then `added` to."""
        values, wanted = self.fault.values - added, self.fault.wanted - added
        live = np.abs(wanted) > HOPELESS * self.atol
        dropped, ratio = np.abs(values[live]) <= self.atol, values[live] / wanted[live]
        kept = ratio[~dropped]
        if dropped.any() and kept.size and kept[0] > 1 and np.ptp(kept) <= kept[0] / HOPELESS:
            yield f"dropout is on: {dropped.mean():.0%} of the values are 0, the others times {kept[0]:.4g}"

    def _of_batch(self, x: np.ndarray, values: np.ndarray) -> Iterator[str]:
        names = (f"{self.module}.{leaf}" for leaf in ("running_mean", "weight", "bias"))
        mean, weight, bias = map(self.ref.weights.get, names)
        if mean is None or x.ndim < 2:
            return
        axes, shape = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        epsilon = self.settings.get("eps", self.settings.get("epsilon", 1e-5))
        y = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)
        y = y if weight is None else y * weight.reshape(shape)
        y = y if bias is None else y + bias.reshape(shape)
        if self._is(y, values):
            yield "batch norm takes the batch's statistics (train mode)"

    def _changes(self) -> Iterator[Change]:
        for i in self.numbers:
            node = self.graph.nodes[i]
            if node.op.op_type == "Resize":
                yield from self._resized(i, node)
            for name in sorted(node.op.attributes_names_):
                value = getattr(node.op, name)
                if isinstance(value, float):
                    for words, other in self._numbers(value):
                        yield f"{name} is {value:.7g}, not {words}", {i: node.changed(**{name: other})}, {}
        for name, array in self.constants.items():
            if array.size == 1 and array.dtype == np.float64:
                value = float(array.flat[0])
                for words, other in self._numbers(value):
                    what = "epsilon" if value and words in self._small() else "a constant"
                    yield f"{what} is {value:.7g}, not {words}", {}, {name: np.full_like(array, other)}

    def _small(self) -> list[str]:
        return [f"{value:g}" for value in self.settings.values() if isinstance(value, float) and 0 < value < 0.1]

    def _numbers(self, value: float) -> Iterator[tuple[str, float]]:
        """(in words, number) that may have been meant by `value`: the module's settings, then short numbers near it."""
        for setting in self.settings.values():
            if isinstance(setting, float) and setting != value:
                yield f"{setting:g}", setting
        if not value or not math.isfinite(value):
            return
        sign = math.copysign(1.0, value)
        for most in range(2, 17):
            plain, square = (Fraction(each).limit_denominator(most) for each in (value, value * value))
            for words, number in ((str(plain), float(plain)), (f"sqrt({square})", sign * math.sqrt(square))):
                if number != value and abs(number - value) <= ROUNDED * abs(value):
                    yield words, number

    def _resized(self, i: int, node: Node) -> Iterator[Change]:
        op: Any = node.op  # its class does not declare its attributes
        now = {"mode": op.mode, "coordinate_transformation_mode": op.coordinate_transformation_mode}
        for mode in MODES:
            for transform in COORDINATES:
                for nearest in NEAREST if mode == "nearest" else NEAREST[:1]:
                    how: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": transform}
                    was = ", ".join(str(now[key]) for key in how if now[key] != how[key]) or op.nearest_mode
                    is_to_be = ", ".join(str(value) for key, value in how.items() if now[key] != value) or nearest
                    yield f"it resizes with {was}, not {is_to_be}", {i: node.changed(**how, nearest_mode=nearest)}, {}


def causes_of(search: Search, fault: Fault) -> tuple[str, list[str], list[str]]:
    """(phase, causes in words, the nodes between) of a fault."""
    if not fault.tensor:
        return "forward", [], []
    causes = Causes(search, fault)
    if fault.call != OUTPUT and (words := causes.weights()):
        return "weights", [words], causes.nodes
    return "forward", causes.named(), causes.nodes
