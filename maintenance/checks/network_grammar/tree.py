"""What a network computes, grown from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BATCH, TIME, WORDS, PIXELS = 3, 5, 11, 6

ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "leaky", "softplus", "sigmoid")
SEQUENCE_KINDS = (
    *("mlp", "attention", "gated", "low_rank", "branches", "recurrent", "transformer", "straight_through"),
    *("scales", "clip", "shift", "spectral", "convolution", "detached", "repeated"),
)
TOP_KINDS = (*SEQUENCE_KINDS, "cross", "masked", "sampling", "quantizer")
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
    activation, epsilon = draws.choice(ACTIVATIONS), draws.choice((1e-5, 1e-6, 1e-4))
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
