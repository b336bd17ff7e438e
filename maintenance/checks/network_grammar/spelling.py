"""How a tree is written in a framework, each thing as the side draws it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maintenance.checks.network_grammar.tree import Node, Tree

SYNONYMS = {
    "norm": "layer_norm",
    "first": "fc1",
    "second": "fc2",
    "q": "query",
    "k": "key",
    "v": "value",
    "out": "proj",
    "conv": "convolution",
    "weight": "kernel",
    "blocks": "layers",
    "head": "classifier",
}
BLOCKS: dict[str, Callable] = {}  # {kind: what writes it}


def block(*kinds: str) -> Callable[[Callable], Callable]:
    """A decorator: this function writes blocks of these kinds, or of its name."""

    def known(function: Callable) -> Callable:
        BLOCKS.update(dict.fromkeys(kinds or (function.__name__,), function))
        return function

    return known


class Side:
    """How a framework spells what differs."""

    def __init__(self, name: str) -> None:
        self.name, self.torch = name, name == "torch"
        self.base = "nn.Module" if self.torch else "nn.Layer"
        self.list = "nn.ModuleList" if self.torch else "nn.LayerList"
        self.d = "d" if self.torch else "D"  # as in Conv2d
        self.epsilon = "eps" if self.torch else "epsilon"
        self.no_bias = ", bias=False" if self.torch else ", bias_attr=False"
        self.concat = f"{name}.{'cat' if self.torch else 'concat'}"
        self.clip = f"{name}.{'clamp' if self.torch else 'clip'}"
        self.to_complex = "torch.view_as_complex" if self.torch else "paddle.as_complex"
        self.to_real = "torch.view_as_real" if self.torch else "paddle.as_real"
        names = ("running_mean", "running_var") if self.torch else ("_mean", "_variance")
        self.statistics = names

    def swap(self, x: str, a: int, b: int, rank: int) -> str:
        if self.torch:
            return f"{x}.transpose({a}, {b})"
        order = list(range(rank))
        order[a], order[b] = order[b], order[a]
        return f"{x}.transpose({order})"

    def parameter(self, shape: Sequence[int], start: str = "normal") -> str:
        if self.torch:
            return f"nn.Parameter(torch.{'randn' if start == 'normal' else start}({list(shape)}))"
        first = {"normal": "Normal(0.0, 1.0)", "ones": "Constant(1.0)", "zeros": "Constant(0.0)"}[start]
        return f"self.create_parameter({list(shape)}, default_initializer=nn.initializer.{first})"

    def constant(self, expression: str, dtype: str) -> str:
        if self.torch:
            return f"torch.tensor({expression}, dtype=torch.{dtype})"
        return f'paddle.to_tensor({expression}, dtype="{dtype}")'

    def stop(self, x: str) -> str:
        return f"{x}.detach()"

    def batch_norm_helper(self) -> str:
        store = "{0}.copy_({1})" if self.torch else "{0}.set_value({1})"
        mean = store.format("mean", "(1 - momentum) * mean + momentum * now")
        variance = store.format("variance", "(1 - momentum) * variance + momentum * spread * rest")
        return f"""
def batch_norm(x, mean, variance, weight, bias, training, epsilon, momentum=0.1, unbiased=True):
    axes = [i for i in range(x.ndim) if i != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    if training:
        now = x.mean(axes)
        spread = ((x - now.reshape(shape)) ** 2).mean(axes)
        count = math.prod(x.shape) // x.shape[1]
        rest = count / (count - 1) if unbiased else 1.0
        with {self.name}.no_grad():
            {mean}
            {variance}
        mean, variance = now, spread
    x = (x - mean.reshape(shape)) / {self.name}.sqrt(variance.reshape(shape) + epsilon)
    return x * weight.reshape(shape) + bias.reshape(shape)
"""

    def batch_norm_class(self) -> str:
        mean, variance = self.statistics
        return f'''
class BatchNorm({self.base}):
    def __init__(self, width, epsilon, momentum=0.1, unbiased=True):
        super().__init__()
        self.epsilon, self.momentum, self.unbiased = epsilon, momentum, unbiased
        self.weight = {self.parameter(["width"], "ones").replace("'", "")}
        self.bias = {self.parameter(["width"], "zeros").replace("'", "")}
        self.register_buffer("{mean}", {self.name}.zeros([width]))
        self.register_buffer("{variance}", {self.name}.ones([width]))

    def forward(self, x):
        how = self.training, self.epsilon, self.momentum, self.unbiased
        return batch_norm(x, self.{mean}, self.{variance}, self.weight, self.bias, *how)
'''


@dataclass(frozen=True)
class Held:
    """What a saved tensor is made of: canonical tensors (name, shape), one after the other on axis 0."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    turned: bool = False  # transposed

    def pack(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        array = np.concatenate([arrays[name] for name, _ in self.parts])
        return array.T if self.turned else array

    def unpack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        array = array.T if self.turned else array
        ends = np.cumsum([shape[0] for _, shape in self.parts])[:-1]
        return {name: part for (name, _), part in zip(self.parts, np.split(array, ends), strict=True)}


class Program:
    """A tree in one framework: its `source`, what its tensors hold, and where each site is computed."""

    def __init__(self, tree: Tree, side: str, ref: Program | None = None, fault: tuple[str, str] | None = None) -> None:
        self.tree, self.side, self.ref, self.chosen = tree, Side(side), ref, fault
        self.draws = random.Random(f"{tree.seed} {side}")
        self.departing = self.draws.choice((0.05, 0.15, 0.4))  # share of what is not spelled as in the reference
        self.spelled: dict[str, list[Any]] = defaultdict(list)
        self.kinds: set[str] = set()  # of what is spelled otherwise
        names = ("plain", "plain", "plain", "synonyms", "synonyms", "numbered")
        self.naming = self.drawn("names", self.draws.choice(names), names)
        self.reordered = self.drawn("reordered", self.draws.random() < 0.3, (False, True))
        first = tree.world != "images" and self.draws.random() < 0.2
        self.sequence_first = self.drawn("sequence first", first, (False, True))
        self.texts: list[str] = []  # of classes
        self.helpers: dict[str, str] = {}
        self.tensors: dict[str, Held] = {}
        self.places: dict[str, list[str]] = {"net": [""]}  # {site: modules in whose code it is}
        self.modules: dict[str, str] = {"net": ""}  # {site: its own module}
        self.faults: list[tuple[str, str]] = []
        self.fused: set[str] = set()
        self.raw: set[str] = set()  # sites of weights that are no layer's, so that a port may store them transposed
        self.source = self._written()

    def drawn(self, what: str, own: Any, options: Sequence[Any]) -> Any:
        """How something is spelled: as drawn, `own`, or mostly as the reference has it, if that is an option."""
        number = len(self.spelled[what])
        others = self.ref.spelled[what] if self.ref else []
        chosen, other = own, others[number] if number < len(others) else None
        departs = self.draws.random() < self.departing
        if self.ref and not departs and (other in options or False in options):
            chosen = other if other in options else False
        self.spelled[what].append(chosen)
        if self.ref and chosen != other and (chosen or other):
            self.kinds.add(f"{what}: {other} -> {chosen}" if isinstance(chosen, str) else what)
        return chosen

    def fault(self, site: str, kind: str) -> bool:
        """Whether this possible fault is the chosen one."""
        if self.side.torch:
            return False
        self.faults.append((site, kind))
        return self.chosen == (site, kind)

    def _written(self) -> str:
        names = self.tree.names
        swapped = len(names) > 1 and self.drawn("arguments swapped", self.draws.random() < 0.3, (False, True))
        names = names[::-1] if swapped else names
        scope = Scope(self, "net", "", names)
        results = BLOCKS["network"](scope, self.tree)
        self.texts.append(scope.text("Net", results))
        name = self.side.name
        head = f"import math\n\nimport numpy as np\nimport {name}\n"
        head += f"from {name} import nn\nfrom {name}.nn import functional as F\n"
        return "\n\n".join([head, *(text.strip() + "\n" for text in (*self.helpers.values(), *self.texts))])


class Scope:
    """A class that is being written."""

    def __init__(self, program: Program, site: str, path: str, arguments: Sequence[str]) -> None:
        self.program, self.site, self.path, self.arguments = program, site, path, arguments
        self.side, self.t, self.draws = program.side, program.side.name, program.draws
        self.init: list[str] = []
        self.code: list[str] = []
        self.names: set[str] = set(arguments)
        self.variables = 0
        self.tied = ""  # the embedding's weight
        self.last: list[str] = []  # of __init__

    def text(self, name: str, results: Sequence[str]) -> str:
        init = list(self.init)
        if self.program.reordered:
            random.Random(f"{self.program.tree.seed} {self.path}").shuffle(init)
        init += self.last
        start = ["def __init__(self):", "    super().__init__()", *(f"    {line}" for line in init), ""] if init else []
        code = [*self.code, f"return {', '.join(results)}"]
        lines = [*start, f"def forward(self, {', '.join(self.arguments)}):", *(f"    {line}" for line in code)]
        return "\n".join([f"class {name}({self.side.base}):", *(f"    {line}" if line else "" for line in lines)])

    def chance(self, share: float, kind: str) -> bool:
        return self.program.drawn(kind, self.draws.random() < share, (False, True))

    def pick(self, what: str, *options: str) -> str:
        return self.program.drawn(what, self.draws.choice(options), options)

    def fault(self, site: str, kind: str) -> bool:
        return self.program.fault(site, kind)

    def let(self, expression: str) -> str:
        self.variables += 1
        self.code.append(f"h{self.variables} = {expression}")
        return f"h{self.variables}"

    def let_all(self, count: int, expression: str) -> list[str]:
        first, self.variables = self.variables + 1, self.variables + count
        found = [f"h{i}" for i in range(first, self.variables + 1)]
        self.code.append(f"{', '.join(found)} = {expression}")
        return found

    def name(self, role: str) -> str:
        naming = self.program.naming
        base = SYNONYMS.get(role, f"{role}_part") if naming == "synonyms" else "m" if naming == "numbered" else role
        number, name = 0, f"{base}0" if naming == "numbered" else base
        while name in self.names:
            number += 1
            name = f"{base}{number}"
        self.names.add(name)
        return name

    def parameter(self, role: str, held: Held, start: str = "normal") -> str:
        """A raw one -> what it is called."""
        width = sum(part[0] for _, part in held.parts)
        shape = (width, *held.parts[0][1][1:])
        shape = shape[::-1] if held.turned else shape
        name = self.name(role)
        self.init.append(f"self.{name} = {self.side.parameter(shape, start)}")
        self.program.tensors[self.path + name] = held
        return f"self.{name}"

    def buffer(self, role: str, value: str, saved: bool, held: Held | None = None) -> str:
        name = self.name(role)
        self.init.append(f'self.register_buffer("{name}", {value}, {saved})')
        if held:
            self.program.tensors[self.path + name] = held
        return f"self.{name}"

    def registered(self, site: str, role: str, made: str, tensors: dict[str, Held], deeper: bool = False) -> str:
        """A layer of the framework -> what it is called."""
        name = self.name(role)
        self.init.append(f"self.{name} = {f'nn.Sequential({made})' if deeper else made}")
        path = self.path + name
        inner = f"{path}.0" if deeper else path
        self.program.tensors |= {f"{inner}.{key}": held for key, held in tensors.items()}
        self.program.places[site] = list(dict.fromkeys((inner, path)))
        return f"self.{name}"

    def layer(
        self, site: str, role: str, made: str, tensors: dict[str, Held], x: str, deeper: bool | None = None
    ) -> str:
        """A layer of the framework, called."""
        deeper = self.chance(0.1, "one level deeper") if deeper is None else deeper
        called = self.registered(site, role, made, tensors, deeper)
        self.program.modules[site] = called
        return self.let(f"{called}({x})")

    def here(self, site: str) -> None:
        """`site` is computed in this class."""
        self.program.places[site] = self.program.places[self.site]

    def own_class(self, node: Node, path: str, arguments: Sequence[str], outer: str = "") -> str:
        """Write a class for `node` -> its name; `outer` is the path of what it stands alone in."""
        program = self.program
        program.places[node.site], program.modules[node.site] = list(dict.fromkeys((path, outer or path))), path
        inner = Scope(program, node.site, f"{path}.", arguments)
        results = BLOCKS[node.kind](inner, node, *sorted(arguments, key=["x", "memory", "mask"].index))
        name = f"{node.kind.title().replace('_', '')}{len(program.texts)}"
        program.texts.append(inner.text(name, results))
        return name

    def call(self, node: Node, *inputs: str, times: int = 1, own: bool = False) -> list[str]:
        """`node` in a class of its `own`, or perhaps in this one -> its results."""
        if not own and self.chance(0.15, "inline"):
            self.here(node.site)
            return BLOCKS[node.kind](self, node, *inputs)
        arguments = ["x", *(name for name in ("memory", "mask") if takes(node, name))]
        swapped = len(arguments) > 1 and self.chance(0.4, "arguments swapped")
        deeper = len(arguments) == 1 and self.chance(0.15, "one level deeper")
        name = self.name(node.kind)
        path = self.path + name + (".0" if deeper else "")
        made = self.own_class(node, path, arguments[::-1] if swapped else arguments, self.path + name) + "()"
        self.init.append(f"self.{name} = {f'nn.Sequential({made})' if deeper else made}")
        count = 2 if node.kind == "quantizer" else 1
        for _ in range(times):
            given = [f"{k}={v}" for k, v in zip(arguments, inputs, strict=True)][::-1] if swapped else inputs
            inputs = self.let_all(count, f"self.{name}({', '.join(given)})")
        return list(inputs)

    def chain(self, nodes: Sequence[Node], x: str, inputs: Sequence[str]) -> tuple[list[str], list[str]]:
        """-> the output of each of the nodes, further results"""
        plain = len(nodes) > 1 and all(node.kind not in ("cross", "masked", "quantizer") for node in nodes)
        style = self.pick("blocks", "apart", "Sequential", "list") if plain else "apart"
        found, more = [], []
        if style == "apart":
            for node in nodes:
                given = [name for name in inputs if takes(node, name)]
                x, *rest = self.call(node, x, *given)
                found.append(x)
                more += rest
            return found, more
        name = self.name("blocks")
        made = [self.own_class(node, f"{self.path}{name}.{i}", ["x"]) + "()" for i, node in enumerate(nodes)]
        if style == "Sequential" and self.program.tree.head.kind != "layers":
            self.init.append(f"self.{name} = nn.Sequential({', '.join(made)})")
            return [self.let(f"self.{name}({x})")], []
        self.init.append(f"self.{name} = {self.side.list}([{', '.join(made)}])")
        for i in range(len(nodes)):
            x = self.let(f"self.{name}[{i}]({x})")
            found.append(x)
        return found, []


def takes(node: Node, name: str) -> bool:
    return {"memory": "cross", "mask": "masked"}.get(name) == node.kind


def vector(name: str, *shape: int) -> Held:
    return Held(((name, shape),))
