"""A grammar of small networks: one seed's tree is written as two programs, in PyTorch and PaddlePaddle.

A tree says what is computed. How it is spelled each side draws for itself: modules or functions, fused or apart, names,
order of definition, containers, layouts. A fault is one change of what the port computes, at a known place.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BATCH, TIME, WORDS, PIXELS = 3, 5, 11, 6

# {name: (PyTorch's module, PaddlePaddle's, PyTorch's function, PaddlePaddle's, a wrong one)}
ACTIVATIONS = {
    "relu": ("ReLU()", "ReLU()", "F.relu({})", "F.relu({})", "F.relu6({})"),
    "gelu": ("GELU()", "GELU()", "F.gelu({})", "F.gelu({})", "F.gelu({}, approximate=True)"),
    "silu": ("SiLU()", "Silu()", "F.silu({})", "F.silu({})", "F.hardswish({})"),
    "tanh": ("Tanh()", "Tanh()", "torch.tanh({})", "paddle.tanh({})", "F.hardtanh({})"),
    "leaky": ("LeakyReLU(0.1)", "LeakyReLU(0.1)", "F.leaky_relu({}, 0.1)", "F.leaky_relu({}, 0.1)", "F.leaky_relu({})"),
    "softplus": ("Softplus()", "Softplus()", "F.softplus({})", "F.softplus({})", "F.softplus({}, beta=2)"),
    "sigmoid": ("Sigmoid()", "Sigmoid()", "torch.sigmoid({})", "F.sigmoid({})", "F.hardsigmoid({})"),
}
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
SEQUENCE_KINDS = (
    "mlp attention gated low_rank branches recurrent transformer straight_through scales clip shift spectral "
    "convolution detached repeated"
).split()
TOP_KINDS = [*SEQUENCE_KINDS, "cross", "masked", "sampling", "quantizer"]
IMAGE_KINDS = ("conv", "squeeze", "image_branches", "conv")
HEADS = ("pool", "all", "last", "layers", "tied")


@dataclass
class Node:
    """What is computed at a `site`, a path in the tree."""

    kind: str
    site: str
    width: int
    options: dict[str, Any] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    def __str__(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        lines = [f"{self.site}: {self.kind} of {self.width}{f' ({options})' if options else ''}"]
        return "\n  ".join([*lines, *(line for child in self.children for line in str(child).splitlines())])


@dataclass
class Tree:
    seed: int
    world: str  # "words", "vectors" or "images"
    stem: Node
    blocks: list[Node]
    head: Node

    @property
    def nodes(self) -> list[Node]:
        return [self.stem, *self.blocks, self.head]

    @property
    def kinds(self) -> set[str]:
        found, waiting = {self.world}, list(self.nodes)
        while waiting:
            node = waiting.pop()
            found |= {node.kind, *(f"{name} {value}" for name, value in node.options.items())}
            waiting += node.children
        return found

    @property
    def names(self) -> list[str]:
        """Of the network's inputs."""
        kinds = self.kinds
        return ["x", *(["memory"] if "cross" in kinds else []), *(["mask"] if "masked" in kinds else [])]

    @property
    def random(self) -> bool:
        return "sampling" in self.kinds

    @property
    def rounded(self) -> bool:
        """Whether tables in float32 are part of it."""
        return bool(self.kinds & {"rotary True", "position table"})

    def inputs(self, number: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.seed, 20, number])
        width = self.blocks[-1].width
        mask = rng.integers(0, 2, (BATCH, TIME)).astype(bool)
        mask[:, 0], mask[0, 1] = True, False
        x = {
            "words": lambda: rng.integers(0, WORDS, (BATCH, TIME)),
            "vectors": lambda: rng.normal(size=(BATCH, TIME, 3)).astype(np.float32),
            "images": lambda: rng.normal(size=(BATCH, 3, PIXELS, PIXELS)).astype(np.float32),
        }[self.world]()
        memory = rng.normal(size=(BATCH, 4, width)).astype(np.float32)
        return {name: {"x": x, "memory": memory, "mask": mask}[name] for name in self.names}

    def __str__(self) -> str:
        return "\n".join([f"{self.world}, inputs {', '.join(self.names)}", *map(str, self.nodes)])


def grown_tree(seed: int) -> Tree:
    draws = random.Random(f"{seed} tree")
    world = draws.choice(("words", "vectors", "vectors", "images"))
    width = draws.choice((4, 6, 8))
    stem = Node(f"{world}_stem", "net.stem", width)
    if world == "words":
        stem.options = {"position": draws.choice(("none", "learned", "table")), "spectral": draws.random() < 0.15}
    blocks = [
        grown_node(draws, f"net.{i}", width, IMAGE_KINDS) for i in range(world == "images" and draws.choice((1, 2)))
    ]
    if world == "images":
        blocks.append(Node("tokens", f"net.{len(blocks)}", width, {"pool": draws.random() < 0.5}))
    kinds = [kind for kind in TOP_KINDS if world != "images" or kind not in ("cross", "masked")]
    count = draws.choice((0, 1)) if world == "images" else draws.choice((1, 1, 2))
    for i in range(count):
        blocks.append(grown_node(draws, f"net.{len(blocks)}", width, kinds if i == count - 1 else SEQUENCE_KINDS))
    heads = [head for head in HEADS if (head != "tied" or world == "words") and (head != "layers" or world != "images")]
    if stem.options.get("spectral"):
        heads.remove("tied")
    head = Node(draws.choice(heads), "net.head", width, {"norm": draws.choice(("layer", "none"))})
    return Tree(seed, world, stem, blocks, head)


def grown_node(draws: random.Random, site: str, width: int, kinds: Sequence[str], depth: int = 0) -> Node:
    kind = draws.choice([k for k in kinds if not depth or k not in ("branches", "image_branches", "repeated")])
    node = Node(kind, site, width)
    yes = draws.random() < 0.5
    activation, epsilon = draws.choice(list(ACTIVATIONS)), draws.choice((1e-5, 1e-6, 1e-4))
    norm = {"norm": draws.choice(("layer", "rms", "none")), "epsilon": epsilon}
    image_norm = {"norm": draws.choice(("batch", "batch", "group", "none")), "epsilon": epsilon}
    if kind == "mlp":
        node.options = {**norm, "activation": activation, "residual": yes}
    elif kind in ("attention", "cross", "masked"):
        rotary = kind == "attention" and draws.random() < 0.4
        node.options = {**norm, "heads": width // 2 if yes else 1, "rotary": rotary, "residual": draws.random() < 0.7}
        node.options["causal"] = kind == "attention" and draws.random() < 0.3
    elif kind == "transformer":
        node.options = {"first": yes, "activation": draws.choice(("relu", "gelu"))}
    elif kind == "recurrent":
        node.options = {"cell": draws.choice(("GRU", "LSTM")), "residual": yes}
    elif kind in ("branches", "image_branches"):
        inner = IMAGE_KINDS if kind == "image_branches" else SEQUENCE_KINDS
        node.options = {"join": draws.choice(("concat", "sum", "product"))}
        node.children = [grown_node(draws, f"{site}.{i}", width, inner, depth + 1) for i in range(2)]
    elif kind == "repeated":
        node.children = [grown_node(draws, f"{site}.0", width, SEQUENCE_KINDS, depth + 1)]
    elif kind == "straight_through":
        node.options = {"residual": yes}
    elif kind == "gated":
        node.options = {"gate": draws.choice(("sigmoid", "silu", "gelu"))}
    elif kind == "detached":
        node.options = {"what": draws.choice(("branch", "gate"))}
    elif kind in ("conv", "convolution"):
        node.options = {**image_norm, "activation": activation, "residual": yes, "size": draws.choice((1, 3))}
        node.options["biased"] = draws.random() < 0.3
    return node


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
        return {name: part for (name, _), part in zip(self.parts, np.split(array, ends))}


class Program:
    """A tree in one framework: its `source`, what its tensors hold, and where each site is computed."""

    def __init__(self, tree: Tree, side: str, ref: Program | None = None, fault: tuple[str, str] | None = None) -> None:
        self.tree, self.side, self.ref, self.chosen = tree, Side(side), ref, fault
        self.draws = random.Random(f"{tree.seed} {side}")
        self.departing = self.draws.choice((0.03, 0.1, 0.3))  # share of what is not spelled as in the reference
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
        results = network(scope, self.tree)
        self.texts.append(scope.text("Net", results))
        name = self.side.name
        head = f"import math\n\nimport numpy as np\nimport {name}\nfrom {name} import nn\nfrom {name}.nn import functional as F\n"
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
            self.draws.shuffle(init)
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

    def parameter(self, role: str, held: Held, shape: Sequence[int] | None = None, start: str = "normal") -> str:
        """A raw one -> what it is called; `shape` where it is not the canonical one, with the same order."""
        if shape is None:
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
        results = BODIES[node.kind](inner, node, *sorted(arguments, key=["x", "memory", "mask"].index))
        name = f"{node.kind.title().replace('_', '')}{len(program.texts)}"
        program.texts.append(inner.text(name, results))
        return name

    def call(self, node: Node, *inputs: str, times: int = 1, own: bool = False) -> list[str]:
        """`node` in a class of its `own`, or perhaps in this one -> its results."""
        if not own and self.chance(0.15, "inline"):
            self.here(node.site)
            return BODIES[node.kind](self, node, *inputs)
        arguments = ["x", *(name for name in ("memory", "mask") if takes(node, name))]
        swapped = len(arguments) > 1 and self.chance(0.4, "arguments swapped")
        deeper = len(arguments) == 1 and self.chance(0.15, "one level deeper")
        name = self.name(node.kind)
        path = self.path + name + (".0" if deeper else "")
        made = self.own_class(node, path, arguments[::-1] if swapped else arguments, self.path + name) + "()"
        self.init.append(f"self.{name} = {f'nn.Sequential({made})' if deeper else made}")
        count = 2 if node.kind == "quantizer" else 1
        for _ in range(times):
            given = [f"{k}={v}" for k, v in zip(arguments, inputs)][::-1] if swapped else inputs
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


# Layers


def dense(
    s: Scope, site: str, role: str, x: str, n_in: int, n_out: int, parts: Sequence[str] = (), bias: bool = True
) -> str:
    """A linear layer; with `parts` (sites) several in one."""
    leaf = f"{site}.{role}"
    parts = parts or (leaf,)
    style = s.pick("linear", "module", "module", "module", "raw", "weights")
    turned, deeper = s.chance(0.5, "turned"), s.chance(0.1, "one level deeper")
    unused = bias and s.fault(leaf, "bias unused")
    stopped = s.fault(leaf, "weight without gradient")
    transposed = n_in == n_out and len(parts) == 1 and style != "raw" and s.fault(leaf, "weight transposed")
    weight = tuple((f"{part}.weight", (n_out, n_in)) for part in parts)
    vectors = Held(tuple((f"{part}.bias", (n_out,)) for part in parts))
    s.here(leaf)
    if style == "raw":
        w = s.parameter(f"{role}_weight", Held(weight, turned))
        b = s.parameter(f"{role}_bias", vectors) if bias else ""
    else:
        turned = not s.side.torch
        made = f"nn.Linear({n_in}, {n_out * len(parts)}{'' if bias else s.side.no_bias})"
        tensors = {"weight": Held(weight, turned), **({"bias": vectors} if bias else {})}
        if style == "module" and not (unused or stopped or transposed):
            result = s.layer(leaf, role, made, tensors, x, deeper)
            for part in parts:
                s.program.places.setdefault(part, s.program.places[leaf])
            return result
        called = s.registered(leaf, role, made, tensors, deeper) + ("[0]" if deeper else "")
        w, b = f"{called}.weight", f"{called}.bias" if bias else ""
    for part in parts:
        s.program.places.setdefault(part, s.program.places[leaf])
    w = s.side.stop(w) if stopped else w
    product = f"{x} @ {w}" if turned != transposed else f"{x} @ {w}.T"
    return s.let(product if unused or not b else f"{product} + {b}")


def activate(s: Scope, site: str, kind: str, x: str, role: str = "act") -> str:
    leaf, spelled = f"{site}.{role}", ACTIVATIONS[kind]
    s.here(leaf)
    style, deeper = s.pick("activation", "module", "function"), s.chance(0.1, "one level deeper")
    if s.fault(leaf, "activation"):
        if style == "module":
            s.name(role)  # so that others keep theirs
        return s.let(spelled[4].format(x))
    if style == "module":
        return s.layer(leaf, role, f"nn.{spelled[0 if s.side.torch else 1]}", {}, x, deeper)
    return s.let(spelled[2 if s.side.torch else 3].format(x))


def normalize(s: Scope, site: str, options: dict[str, Any], x: str, width: int, rank: int, role: str = "norm") -> str:
    kind, epsilon, leaf = options["norm"], options.get("epsilon", 1e-5), f"{site}.{role}"
    if kind == "none":
        return x
    s.here(leaf)
    epsilon = epsilon * 2 if s.fault(leaf, "epsilon") else epsilon
    if kind == "batch":
        return batch_normalize(s, leaf, options, x, width, rank, epsilon)
    tensors = {"weight": vector(f"{leaf}.weight", width)}
    if kind != "rms":
        tensors["bias"] = vector(f"{leaf}.bias", width)
    style = s.pick(f"{kind} norm", "library", "raw")
    has_class = kind != "rms" or s.side.torch
    if style == "library" and has_class:
        name = {"layer": "LayerNorm", "group": "GroupNorm", "rms": "RMSNorm"}[kind]
        size = f"2, {width}" if kind == "group" else width
        return s.layer(leaf, role, f"nn.{name}({size}, {s.side.epsilon}={epsilon})", tensors, x)
    wrong_axis = kind == "layer" and s.fault(leaf, "axis")
    w = s.parameter(f"{role}_weight", tensors["weight"], start="ones")
    b = s.parameter(f"{role}_bias", tensors["bias"], start="zeros") if kind != "rms" else ""
    if kind == "rms":
        return s.let(f"{x} / {s.t}.sqrt(({x} ** 2).mean(-1, keepdim=True) + {epsilon}) * {w}")
    if kind == "layer":
        axis = 1 if wrong_axis else -1
        centered = s.let(f"{x} - {x}.mean({axis}, keepdim=True)")
        return s.let(f"{centered} / {s.t}.sqrt(({centered} ** 2).mean({axis}, keepdim=True) + {epsilon}) * {w} + {b}")
    groups = s.let(f"{x}.reshape([{x}.shape[0], 2, -1])")
    centered = s.let(f"{groups} - {groups}.mean(-1, keepdim=True)")
    scaled = s.let(f"{centered} / {s.t}.sqrt(({centered} ** 2).mean(-1, keepdim=True) + {epsilon})")
    shape = [1, width] + [1] * (rank - 2)
    return s.let(f"{scaled}.reshape({x}.shape) * {w}.reshape({shape}) + {b}.reshape({shape})")


def batch_normalize(s: Scope, leaf: str, options: dict[str, Any], x: str, width: int, rank: int, epsilon: float) -> str:
    names = ("weight", "bias", *s.side.statistics)
    canonical = ("weight", "bias", "mean", "variance")
    tensors = {name: vector(f"{leaf}.{other}", width) for name, other in zip(names, canonical)}
    biased = options.get("biased", False)
    library = s.side.torch != biased  # PaddlePaddle's keeps the biased variance
    style = s.pick("batch norm", "library" if library else "class", "class", "raw")
    momentum = 0.2 if s.fault(leaf, "momentum") else 0.1
    if style == "library":
        momentum = momentum if s.side.torch else 1 - momentum
        made = f"nn.BatchNorm{rank - 2}{s.side.d}({width}, {s.side.epsilon}={epsilon}, momentum={momentum})"
        return s.layer(leaf, "norm", made, tensors, x)
    s.program.helpers["batch_norm"] = s.side.batch_norm_helper()
    how = f"{epsilon}, {momentum}, {not biased}"
    if style == "class":
        s.program.helpers["BatchNorm"] = s.side.batch_norm_class()
        return s.layer(leaf, "norm", f"BatchNorm({width}, {how})", tensors, x)
    w = s.parameter("scale", tensors["weight"], start="ones")
    b = s.parameter("offset", tensors["bias"], start="zeros")
    mean = s.buffer("mean", f"{s.t}.zeros([{width}])", True, tensors[names[2]])
    variance = s.buffer("variance", f"{s.t}.ones([{width}])", True, tensors[names[3]])
    return s.let(f"batch_norm({x}, {mean}, {variance}, {w}, {b}, self.training, {how})")


def convolve(s: Scope, site: str, x: str, n_in: int, n_out: int, size: int, axes: int, role: str = "conv") -> str:
    leaf, padding = f"{site}.{role}", size // 2
    s.here(leaf)
    style, deeper = s.pick("convolution", "module", "module", "bias apart", "raw"), s.chance(0.1, "one level deeper")
    unused = s.fault(leaf, "bias unused")
    wrong = padding > 0 and s.fault(leaf, "padding")
    if wrong and style == "raw":
        x, padding = s.let(f"F.pad({x}, {[0, 2 * padding] * axes})"), 0
    weight = vector(f"{leaf}.weight", n_out, n_in, *[size] * axes)
    bias = vector(f"{leaf}.bias", n_out)
    rest = ", padding_mode='circular'" if wrong else ""
    name = f"nn.Conv{axes}{s.side.d}({n_in}, {n_out}, {size}, padding={padding}{rest}"
    if style == "module" and not unused:
        return s.layer(leaf, role, f"{name})", {"weight": weight, "bias": bias}, x, deeper)
    if style == "module":
        called = s.registered(leaf, role, f"{name})", {"weight": weight, "bias": bias}, deeper) + "[0]" * deeper
        return s.let(f"F.conv{axes}d({x}, {called}.weight, None, padding={padding})")
    if style == "raw":
        w = s.parameter("conv_weight", weight)
        b = s.parameter("conv_bias", bias)
        return s.let(f"F.conv{axes}d({x}, {w}, {'None' if unused else b}, padding={padding})")
    y = s.layer(leaf, role, f"{name}{s.side.no_bias})", {"weight": weight}, x, deeper)
    del s.program.modules[leaf]
    b = s.parameter("conv_bias", bias)
    return y if unused else s.let(f"{y} + {b}.reshape({[1, n_out] + [1] * axes})")


def with_residual(s: Scope, node: Node, x: str, y: str) -> list[str]:
    if not node.options.get("residual"):
        return [y]
    if s.fault(node.site, "residual dropped"):
        return [y]
    factor = "0.5 * " if s.fault(node.site, "constant") else ""
    return [s.let(f"{x} + {factor}{y}")]


def batch_first(s: Scope, x: str) -> str:
    return s.let(s.side.swap(x, 0, 1, 3)) if s.program.sequence_first else x


# Blocks of sequences


def mlp(s: Scope, node: Node, x: str) -> list[str]:
    stopped = s.fault(node.site, "input of the branch without gradient")
    y = normalize(s, node.site, node.options, s.side.stop(x) if stopped else x, node.width, 3)
    y = dense(s, node.site, "first", y, node.width, node.width + 2)
    y = activate(s, node.site, node.options["activation"], y)
    return with_residual(s, node, x, dense(s, node.site, "second", y, node.width + 2, node.width))


def attention(s: Scope, node: Node, x: str, other: str = "") -> list[str]:
    start = x
    y = normalize(s, node.site, node.options, x, node.width, 3)
    memory, mask = (other, "") if node.kind == "cross" else (y, other)
    y = attend(s, node, y, memory, mask, node.options["heads"], outside_is_first=node.kind == "cross")
    return with_residual(s, node, start, y)


def attend(s: Scope, node: Node, x: str, memory: str, mask: str, heads: int, outside_is_first: bool = False) -> str:
    """`outside_is_first`: the memory has batches first in any layout."""
    site, width, name = node.site, node.width, s.t
    size = width // heads
    alone = memory == x
    x = batch_first(s, x)
    memory = x if alone else memory if outside_is_first else batch_first(s, memory)
    fused = alone and s.pick("attention", "fused", "apart") == "fused"
    if fused:
        s.program.fused.add(site)
        y = dense(s, site, "qkv", x, width, width, [f"{site}.{part}" for part in "qkv"])
        q, k, v = s.let_all(3, f"{y}.chunk(3, -1)")
        both = s.program.ref is not None and site in s.program.ref.fused
        if both and s.fault(site, "q and k exchanged"):
            q, k = k, q
    else:
        q, k, v = (dense(s, site, part, x if part == "q" else memory, width, width) for part in "qkv")
    in_parts = f".reshape([{BATCH}, -1, {heads}, {size}])"
    q, k, v = (s.let(s.side.swap(part + in_parts, 1, 2, 4)) for part in (q, k, v))
    if node.options.get("rotary"):
        q, k = rotate(s, node, q, k, size)
    scale = f" * {size} ** -0.5" if s.chance(0.5, "power") else f" / math.sqrt({size})"
    scale = "" if s.fault(site, "scale missing") else scale
    scores = s.let(f"{q} @ {s.side.swap(k, 2, 3, 4)}{scale}")
    low = s.pick("hidden", "-1e9", "float('-inf')")
    if node.options.get("causal"):
        diagonal = 1 + s.fault(site, "mask off by one")
        triangle = f"np.triu(np.ones([{TIME}, {TIME}]), {diagonal})"
        made = s.side.constant(triangle, "bool")
        hidden = (
            s.buffer("causal", made, s.chance(0.3, "saved"))
            if s.pick("table", "buffer", "forward") == "buffer"
            else made
        )
        scores = s.let(f"{scores}.masked_fill({hidden}, {low})")
    if mask:
        kept = "" if s.fault(site, "mask inverted") else "~"
        if s.pick("mask", "fill", "where") == "fill":
            scores = s.let(f"{scores}.masked_fill({kept}{mask}[:, None, None, :], {low})")
        else:
            kept = "" if kept else "~"
            scores = s.let(f"{name}.where({kept}{mask}[:, None, None, :], {scores}, {name}.full_like({scores}, -1e9))")
    axis = -2 if s.fault(site, "axis of softmax") else -1
    y = s.let(f"F.softmax({scores}, {axis}) @ {v}")
    merged = y if heads > 1 and s.fault(site, "heads merged in the wrong order") else s.side.swap(y, 1, 2, 4)
    y = s.let(f"{merged}.reshape([{BATCH}, -1, {width}])")
    return batch_first(s, dense(s, site, "out", y, width, width))


def rotate(s: Scope, node: Node, q: str, k: str, size: int) -> list[str]:
    base = "1000.0" if s.fault(node.site, "rotary base") else "10000.0"
    form = s.pick("rotary", "complex", "cosine")
    where = s.pick("table", "saved buffer", "unsaved buffer", "forward")
    angles = f"np.outer(np.arange({TIME}), {base} ** (-np.arange(0, {size}, 2) / {size}))"
    only_q = s.fault(node.site, "rotary on q alone")

    def table(function: str) -> str:
        if where == "forward" and s.side.torch:
            return s.let(f"torch.tensor(np.{function}({angles}), dtype={q}.dtype)")
        if where == "forward":
            return s.let(f"paddle.to_tensor(np.{function}({angles})).astype({q}.dtype)")
        return s.buffer(function, s.side.constant(f"np.{function}({angles})", "float32"), where == "saved buffer")

    def turned(x: str) -> str:
        if form == "complex":
            pairs = s.let(f"{s.side.to_complex}({x}.reshape([*{x}.shape[:-1], -1, 2]))")
            return s.let(f"{s.side.to_real}({pairs} * {waves}).flatten(-2)")
        a, b = s.let_all(2, f"{x}[..., 0::2], {x}[..., 1::2]")
        parts = f"{a} * {cos} - {b} * {sin}, {a} * {sin} + {b} * {cos}"
        return s.let(f"{s.t}.stack([{parts}], -1).flatten(-2)")

    if form == "complex" and where != "forward":
        waves = s.buffer("waves", s.side.constant(f"np.exp(1j * {angles})", "complex64"), where == "saved buffer")
    else:
        cos, sin = table("cos"), table("sin")
        waves = s.let(f"{s.t}.complex({cos}, {sin})") if form == "complex" else ""
    return [turned(q), k if only_q else turned(k)]


def gated(s: Scope, node: Node, x: str) -> list[str]:
    gate, site, width = node.options["gate"], node.site, node.width
    style = s.pick("gate", "fused", "apart", "glu" if gate == "sigmoid" else "fused")
    if style == "apart":
        value = dense(s, site, "value", x, width, width)
        other = dense(s, site, "gate", x, width, width)
    else:
        s.program.fused.add(site)
        both = dense(s, site, "both", x, width, width, [f"{site}.value", f"{site}.gate"])
        if style == "glu":
            return [s.let(f"F.glu({both}, -1)")]
        value, other = s.let_all(2, f"{both}.chunk(2, -1)")
        if s.program.ref and site in s.program.ref.fused and s.fault(site, "value and gate exchanged"):
            value, other = other, value
    stopped = s.fault(site, "gate without gradient")
    other = activate(s, site, gate, other)
    return [s.let(f"{value} * {s.side.stop(other) if stopped else other}")]


def low_rank(s: Scope, node: Node, x: str) -> list[str]:
    """Two equal matrices beside the layer's own."""
    y = dense(s, node.site, "base", x, node.width, node.width)
    z = dense(s, node.site, "a", x, node.width, node.width, bias=False)
    z = dense(s, node.site, "b", z, node.width, node.width, bias=False)
    scale = 0.4 if s.fault(node.site, "constant") else 0.5
    return [s.let(f"{y} + {scale} * {z}")]


def branches(s: Scope, node: Node, x: str) -> list[str]:
    a, b = (s.call(child, x)[0] for child in node.children)
    if s.fault(node.site, "branch without gradient"):
        b = s.side.stop(b)
    if node.options["join"] == "sum":
        return [s.let(f"{a} + 2.0 * {b}")]
    if node.options["join"] == "product":
        return [s.let(f"{a} * {s.t}.tanh({b})")]
    axis = -1 if node.kind == "branches" else 1
    parts = [x, a, b]
    if s.fault(node.site, "order of concat"):
        parts = [a, x, b]
    y = s.let(f"{s.side.concat}([{', '.join(parts)}], {axis})")
    if node.kind == "branches":
        return [dense(s, node.site, "join", y, 3 * node.width, node.width)]
    return [convolve(s, node.site, y, 3 * node.width, node.width, 1, 2, "join")]


def recurrent(s: Scope, node: Node, x: str) -> list[str]:
    cell, width, site = node.options["cell"], node.width, node.site
    gates = width * (3 if cell == "GRU" else 4)
    style = s.pick("recurrent", "library", "library", "by hand")
    shapes = {"weight_ih": (gates, width), "weight_hh": (gates, width), "bias_ih": (gates,), "bias_hh": (gates,)}
    leaf = f"{site}.cell"
    s.here(leaf)
    held = {f"{name}_l0": vector(f"{leaf}.{name}", *shape) for name, shape in shapes.items()}
    if style == "library":
        natural = s.program.sequence_first == s.chance(
            0.7, "batch first"
        )  # whether time is second for the library, too
        time_first = s.program.sequence_first if natural else not s.program.sequence_first
        word = f"batch_first={not time_first}" if s.side.torch else f"time_major={time_first}"
        given = s.let(s.side.swap(x, 0, 1, 3)) if time_first != s.program.sequence_first else x
        reverse = s.fault(site, "time reversed")
        given = s.let(f"{given}.flip([{1 - time_first}])") if reverse else given
        called = s.registered(leaf, "rnn", f"nn.{cell}({width}, {width}, {word})", held)
        s.program.modules[leaf] = called
        y = s.let(f"{called}({given})[0]")
        y = s.let(s.side.swap(y, 0, 1, 3)) if time_first != s.program.sequence_first else y
        return with_residual(s, node, x, y)
    wi, wh, bi, bh = (s.parameter(name[:-3], each) for name, each in held.items())
    given = batch_first(s, x)
    unused = s.fault(site, "bias unused")
    s.code += [f"state = cell = {s.t}.zeros_like({given}[:, 0])", "states = []", f"for t in range({TIME}):"]
    add = [f"a = {given}[:, t] @ {wi}.T + {bi}", f"b = state @ {wh}.T" + ("" if unused else f" + {bh}")]
    sigmoid = f"{s.t}.sigmoid" if s.side.torch else "F.sigmoid"
    if cell == "GRU":
        add += ["ra, za, na = a.chunk(3, -1)", "rb, zb, nb = b.chunk(3, -1)", f"z = {sigmoid}(za + zb)"]
        inside = f"{s.t}.tanh(na + {sigmoid}(ra + rb) * nb)"
        mixed = f"z * {inside} + (1 - z) * state" if s.fault(site, "update gate inverted") else ""
        add += [f"state = {mixed or f'(1 - z) * {inside} + z * state'}"]
    else:
        add += ["i, f, g, o = (a + b).chunk(4, -1)"]
        tanh = "" if s.fault(site, "tanh of the state missing") else f"{s.t}.tanh"
        add += [f"cell = {sigmoid}(f) * cell + {sigmoid}(i) * {s.t}.tanh(g)", f"state = {sigmoid}(o) * {tanh}(cell)"]
    s.code += [f"    {line}" for line in (*add, "states.append(state)")]
    return with_residual(s, node, x, batch_first(s, s.let(f"{s.t}.stack(states, 1)")))


def transformer(s: Scope, node: Node, x: str) -> list[str]:
    site, width, first, act = node.site, node.width, node.options["first"], node.options["activation"]
    hidden, heads = width + 2, 2
    style = s.pick("transformer", "library", "by hand")
    s.here(f"{site}.layer")
    if style == "library":
        wrong = s.fault(f"{site}.layer", "norm first" if not first else "norm last")
        how = f"{width}, {heads}, {hidden}, dropout=0.0, activation='{act}'"
        order = "norm_first" if s.side.torch else "normalize_before"
        given = x if s.side.torch else batch_first(s, x)
        rest = f", batch_first={not s.program.sequence_first}" if s.side.torch else ""
        made = f"nn.TransformerEncoderLayer({how}, {order}={first != wrong}{rest})"
        y = s.layer(f"{site}.layer", "layer", made, library_tensors(s, site, width, hidden), given)
        inside, parts = s.program.places[f"{site}.layer"], ("norm1", "norm2", "first", "second")
        names = ("norm1", "norm2", "linear1", "linear2")
        s.program.places |= {f"{site}.{part}": [f"{inside[0]}.{name}"] for part, name in zip(parts, names)}
        s.program.places[site] = [*s.program.places[site], *inside, f"{inside[0]}.self_attn"]
        return [y if s.side.torch else batch_first(s, y)]

    def attended(x: str) -> str:
        return attend(s, node, x, x, "", heads)

    def fed(x: str) -> str:
        y = dense(s, site, "first", x, width, hidden)
        return dense(s, site, "second", activate(s, site, act, y), hidden, width)

    dropped = not first and s.fault(site, "residual dropped")
    for number, part in (("norm1", attended), ("norm2", fed)):
        if first:
            x = s.let(f"{x} + {part(normalize(s, site, {'norm': 'layer'}, x, width, 3, number))}")
        else:
            y = part(x)
            y = y if dropped and number == "norm2" else s.let(f"{x} + {y}")
            x = normalize(s, site, {"norm": "layer"}, y, width, 3, number)
    return [x]


def library_tensors(s: Scope, site: str, width: int, hidden: int) -> dict[str, Held]:
    turned, found = not s.side.torch, {}

    def linear(key: str, role: str, n_in: int, n_out: int) -> None:
        found[f"{key}.weight"] = Held(((f"{site}.{role}.weight", (n_out, n_in)),), turned)
        found[f"{key}.bias"] = vector(f"{site}.{role}.bias", n_out)

    if s.side.torch:
        found["self_attn.in_proj_weight"] = Held(tuple((f"{site}.{part}.weight", (width, width)) for part in "qkv"))
        found["self_attn.in_proj_bias"] = Held(tuple((f"{site}.{part}.bias", (width,)) for part in "qkv"))
    else:
        for part in "qkv":
            linear(f"self_attn.{part}_proj", part, width, width)
    linear("self_attn.out_proj", "out", width, width)
    linear("linear1", "first", width, hidden)
    linear("linear2", "second", hidden, width)
    for norm in ("norm1", "norm2"):
        found[f"{norm}.weight"] = vector(f"{site}.{norm}.weight", width)
        found[f"{norm}.bias"] = vector(f"{site}.{norm}.bias", width)
    return found


def straight_through(s: Scope, node: Node, x: str) -> list[str]:
    y = dense(s, node.site, "first", x, node.width, node.width)
    hard, style = f"{s.t}.sign({y})", s.pick("straight-through", "difference", "sum")
    if s.fault(node.site, "straight-through missing"):
        y = s.let(hard)
    elif style == "difference":
        y = s.let(f"{y} + {s.side.stop(f'({hard} - {y})')}")
    else:
        y = s.let(f"{s.side.stop(hard)} + ({y} - {s.side.stop(y)})")
    y = dense(s, node.site, "second", y, node.width, node.width)
    return with_residual(s, node, x, y)


def scales(s: Scope, node: Node, x: str) -> list[str]:
    """Raw parameters of equal shapes, in a list or apart."""
    held = [vector(f"{node.site}.{i}.scale", node.width) for i in range(3)]
    if s.pick("parameters", "list", "apart") == "list":
        name = s.name("scales")
        s.init.append(f"self.{name} = nn.ParameterList([{s.side.parameter([node.width])} for _ in range(3)])")
        s.program.tensors |= {f"{s.path}{name}.{i}": each for i, each in enumerate(held)}
        called = [f"self.{name}[{i}]" for i in range(3)]
    else:
        called = [s.parameter(f"scale_{i}", each) for i, each in enumerate(held)]
    again = s.fault(node.site, "the first parameter used twice")
    for i, parameter in enumerate(called):
        parameter = called[0] if again and i == 1 else parameter
        x = s.let(f"{x} * {parameter} + {s.t}.tanh({x})")
    return [x]


def clip(s: Scope, node: Node, x: str) -> list[str]:
    y = dense(s, node.site, "first", x, node.width, node.width)
    high = 1.1 if s.fault(node.site, "constant") else 1.0
    style = s.pick("clip", "clip", "where", "minimum")
    if style == "clip":
        return [s.let(f"{s.side.clip}({y}, -1.0, {high})")]
    if style == "where":
        y = s.let(f"{s.t}.where({y} > {high}, {s.t}.full_like({y}, {high}), {y})")
        return [s.let(f"{s.t}.where({y} < -1.0, {s.t}.full_like({y}, -1.0), {y})")]
    y = s.let(f"{s.t}.minimum({y}, {s.t}.full_like({y}, {high}))")
    return [s.let(f"{s.t}.maximum({y}, {s.t}.full_like({y}, -1.0))")]


def shift(s: Scope, node: Node, x: str) -> list[str]:
    axis = 0 if s.program.sequence_first else 1
    first = 2 if s.fault(node.site, "slice off by one") else 1
    dots = ":, " * axis
    if s.pick("shift", "slices", "roll") == "slices":
        moved = s.let(f"{s.side.concat}([{x}[{dots}{first}:], {x}[{dots}:{first}]], {axis})")
    else:
        moved = s.let(f"{s.t}.roll({x}, {-first}, {axis})")
    return [s.let(f"{x} + {dense(s, node.site, 'first', moved, node.width, node.width)}")]


def spectral(s: Scope, node: Node, x: str) -> list[str]:
    leaf, width = f"{node.site}.first", node.width
    s.here(leaf)
    made = f"nn.utils.spectral_norm(nn.Linear({width}, {width + 1}))"
    parts = ((f"{leaf}.weight", (width + 1, width)),)
    tensors = {"weight_orig": Held(parts, not s.side.torch), "bias": vector(f"{leaf}.bias", width + 1)}
    tensors |= {"weight_u": vector(f"{leaf}.unit_u", width + 1), "weight_v": vector(f"{leaf}.unit_v", width)}
    y = s.layer(leaf, "first", made, tensors, x)
    return [dense(s, node.site, "second", y, width + 1, width)]


def convolution(s: Scope, node: Node, x: str) -> list[str]:
    """Over time."""
    y = s.let(s.side.swap(batch_first(s, x), 1, 2, 3))
    y = convolve(s, node.site, y, node.width, node.width, node.options["size"], 1)
    y = normalize(s, node.site, node.options, y, node.width, 3)
    y = activate(s, node.site, node.options["activation"], y)
    return with_residual(s, node, x, batch_first(s, s.let(s.side.swap(y, 1, 2, 3))))


def detached(s: Scope, node: Node, x: str) -> list[str]:
    missing = s.fault(node.site, "detach missing")
    wrong = s.fault(node.site, "detach in the wrong place")
    y = dense(s, node.site, "first", x, node.width, node.width)
    if node.options["what"] == "gate":
        y = activate(s, node.site, "sigmoid", y)
    kept = y if missing or wrong else s.side.stop(y)
    x = s.side.stop(x) if wrong else x
    return [s.let(f"{x} * {kept}" if node.options["what"] == "gate" else f"{x} + 0.5 * {kept}")]


def repeated(s: Scope, node: Node, x: str) -> list[str]:
    return s.call(node.children[0], x, times=1 if s.fault(node.site, "called once") else 2, own=True)


def sampling(s: Scope, node: Node, x: str) -> list[str]:
    """Random in train mode alone."""
    mean = dense(s, node.site, "mean", x, node.width, node.width)
    log = dense(s, node.site, "log", x, node.width, node.width)
    factor = 1.0 if s.fault(node.site, "constant") else 0.5
    y = s.let(f"{mean}")
    spread = f"{s.t}.exp({factor} * {log})"
    s.code += ["if self.training:", f"    {y} = {mean} + {s.t}.randn_like({mean}) * {spread}"]
    return [s.let(f"{y} + 0.1 * {spread}")]


def quantizer(s: Scope, node: Node, x: str) -> list[str]:
    """The nearest row of a book, straight through, with its loss."""
    book = s.parameter("book", vector(f"{node.site}.book", 7, node.width))
    y = dense(s, node.site, "first", x, node.width, node.width)
    if s.pick("distance", "difference", "expanded") == "difference":
        distances = s.let(f"(({y}[:, :, None] - {book}) ** 2).sum(-1)")
    else:
        distances = s.let(f"({y} ** 2).sum(-1, keepdim=True) - 2 * {y} @ {book}.T + ({book} ** 2).sum(-1)")
    nearest = s.let(f"{book}[{distances}.argmin(-1)]")
    stop, share = s.side.stop, 0.5 if s.fault(node.site, "constant") else 0.25
    pair = (y, nearest) if not s.fault(node.site, "detach in the wrong place") else (nearest, y)
    loss = s.let(f"(({stop(pair[0])} - {pair[1]}) ** 2).mean() + {share} * (({pair[0]} - {stop(pair[1])}) ** 2).mean()")
    if s.fault(node.site, "straight-through missing"):
        return [s.let(f"{nearest} * 1.0"), loss]
    return [s.let(f"{y} + {stop(f'({nearest} - {y})')}"), loss]


# Blocks of images


def conv(s: Scope, node: Node, x: str) -> list[str]:
    y = convolve(s, node.site, x, node.width, node.width, node.options["size"], 2)
    y = normalize(s, node.site, node.options, y, node.width, 4)
    return with_residual(s, node, x, activate(s, node.site, node.options["activation"], y))


def squeeze(s: Scope, node: Node, x: str) -> list[str]:
    style = s.pick("pool", "mean", "adaptive")
    if s.fault(node.site, "sum for mean"):
        y = s.let(f"{x}.sum([2, 3])")
    elif style == "mean":
        y = s.let(f"{x}.mean([2, 3])")
    else:
        y = s.let(f"F.adaptive_avg_pool2d({x}, 1).flatten(1)")
    y = activate(s, node.site, "relu", dense(s, node.site, "first", y, node.width, 4))
    y = activate(s, node.site, "sigmoid", dense(s, node.site, "second", y, 4, node.width), "gate")
    return [s.let(f"{x} * {y}[:, :, None, None]")]


def tokens(s: Scope, node: Node, x: str) -> list[str]:
    if node.options["pool"]:
        style = s.pick("average", "function", "reshape")
        if s.fault(node.site, "maximum for mean"):
            x = s.let(f"F.max_pool2d({x}, 2)")
        elif style == "function":
            x = s.let(f"F.avg_pool2d({x}, 2)")
        else:
            half = PIXELS // 2
            x = s.let(f"{x}.reshape([{BATCH}, {node.width}, {half}, 2, {half}, 2]).mean([3, 5])")
    # as many as sequences have
    x = s.let(f"{x}.flatten(2)[:, :, {int(s.fault(node.site, 'slice off by one'))}:][:, :, :{TIME}]")
    return [s.let(s.side.swap(x, 1, 2, 3))]


BODIES = {
    **{function.__name__: function for function in (mlp, attention, gated, low_rank, branches, recurrent, transformer)},
    **{function.__name__: function for function in (straight_through, scales, clip, shift, spectral, convolution)},
    **{function.__name__: function for function in (detached, repeated, sampling, quantizer, conv, squeeze, tokens)},
    "cross": attention,
    "masked": attention,
    "image_branches": branches,
}


# The whole


def stem(s: Scope, tree: Tree) -> str:
    node, width = tree.stem, tree.stem.width
    if tree.world == "vectors":
        return dense(s, "net", "stem", "x", 3, width)
    if tree.world == "images":
        return convolve(s, "net", "x", 3, width, 3, 2, "stem")
    leaf = "net.stem"
    s.here(leaf)
    weight = vector(f"{leaf}.weight", WORDS, width)
    style = "module" if node.options["spectral"] else s.pick("embedding", "module", "module", "raw")
    if node.options["spectral"]:
        tensors = {"weight_orig": weight, "weight_u": vector(f"{leaf}.unit_u", WORDS)}
        tensors["weight_v"] = vector(f"{leaf}.unit_v", width)
        made = f"nn.utils.spectral_norm(nn.Embedding({WORDS}, {width}))"
        x = s.layer(leaf, "embed", made, tensors, "x")
    elif style == "module":
        x = s.layer(leaf, "embed", f"nn.Embedding({WORDS}, {width})", {"weight": weight}, "x")
        called = s.code[-1].split(" = ")[1][: -len("(x)")]
        s.tied = f"{called}[0].weight" if s.program.places[leaf][0].endswith(".0") else f"{called}.weight"
    else:
        s.tied = s.parameter("embedding", weight)
        x = s.let(f"F.embedding(x, {s.tied})" if s.chance(0.5, "function for rows") else f"{s.tied}[x]")
    if node.options["position"] == "learned":
        table = s.parameter("position", vector("net.position", 1, TIME, width))
        x = s.let(f"{x} + {table}")
    elif node.options["position"] == "table":
        angles = f"np.outer(np.arange({TIME}), 100.0 ** (-np.arange({width}) / {width}))"
        made = s.side.constant(f"np.sin({angles})", "float32")
        where = s.pick("table", "saved buffer", "unsaved buffer", "forward")
        table = made if where == "forward" else s.buffer("position", made, where == "saved buffer")
        factor = "0.5 * " if s.fault("net", "constant") else ""
        x = s.let(f"{x} + {factor}{table}")
    return x


def network(s: Scope, tree: Tree) -> list[str]:
    head, width = tree.head, tree.head.width
    x = batch_first(s, stem(s, tree))
    features, losses = s.chain(tree.blocks, x, tree.names)
    features = [batch_first(s, x) for x in (features if head.kind == "layers" else features[-1:])]
    x = features[-1]
    if head.kind == "layers":
        return [*heads(s, features, width), *losses]
    x = normalize(s, "net", head.options, x, width, 3, "norm")
    if head.kind == "tied":
        scale = "0.5" if not s.fault("net", "scale missing") else "1.0"
        if s.side.torch and s.pick("tied", "layer", "weight") == "layer":
            name = s.name("head")
            s.init.append(f"self.{name} = nn.Linear({width}, {WORDS}, bias=False)")
            s.last.append(f"self.{name}.weight = {s.tied}")
            s.program.tensors[f"{name}.weight"] = vector("net.stem.weight", WORDS, width)
            return [s.let(f"{scale} * self.{name}({x})"), *losses]
        return [s.let(f"{scale} * {x} @ {s.tied}.T"), *losses]
    if head.kind == "pool":
        x = pooled(s, "net", x)
    elif head.kind == "last":
        last = -2 if s.fault("net", "slice off by one") else -1
        x = s.let(f"{x}[:, {last}]")
    return [dense(s, "net", "head", x, width, 3), *losses]


def pooled(s: Scope, site: str, x: str) -> str:
    style = s.pick("pool", "mean", "sum")
    if s.fault(site, "sum for mean"):
        return s.let(f"{x}.sum(1)")
    if style == "mean":
        return s.let(f"{x}.mean(1)")
    return s.let(f"{x}.sum(1) / {TIME}")


def heads(s: Scope, features: Sequence[str], width: int) -> list[str]:
    """One for each block's output, in a list or apart."""
    if s.pick("heads", "list", "apart") == "apart":
        return [dense(s, f"net.heads{i}", "head", x, width, 3) for i, x in enumerate(features)]
    name, turned = s.name("heads"), not s.side.torch
    s.init.append(f"self.{name} = {s.side.list}([nn.Linear({width}, 3) for _ in range({len(features)})])")
    for i in range(len(features)):
        leaf, path = f"net.heads{i}.head", f"{name}.{i}"
        s.program.places[leaf], s.program.modules[leaf] = [path], path
        s.program.tensors[f"{path}.weight"] = Held(((f"{leaf}.weight", (3, width)),), turned)
        s.program.tensors[f"{path}.bias"] = vector(f"{leaf}.bias", 3)
    shift = s.fault("net", "heads in the wrong order") if len(features) > 1 else False
    features = features[::-1] if shift else features
    return [s.let(f"self.{name}[{i}]({x})") for i, x in enumerate(features)]


@dataclass
class Pair:
    """Of a seed: the reference, its faithful port, and one with a `fault` (site, kind)."""

    tree: Tree
    ref: Program
    port: Program
    faulty: Program
    fault: tuple[str, str]

    @property
    def kinds(self) -> set[str]:
        return self.tree.kinds | self.port.kinds

    @property
    def right_places(self) -> list[str]:
        """The reference's modules that may be named: the site's own, and those around up to one that both have."""
        site, found = self.fault[0], []
        while site:
            found += self.ref.places.get(site, [])
            if site in self.ref.modules and site in self.faulty.modules:
                break
            site = site.rpartition(".")[0]
        return list(dict.fromkeys(found))


def grown_pair(seed: int) -> Pair:
    tree = grown_tree(seed)
    ref = Program(tree, "torch")
    port = Program(tree, "paddle", ref)
    kinds = sorted({kind for _, kind in port.faults})
    draws = random.Random(f"{seed} fault")
    kind = draws.choice(kinds)  # each kind as often as another
    fault = draws.choice([each for each in port.faults if each[1] == kind])
    return Pair(tree, ref, port, Program(tree, "paddle", ref, fault), fault)
