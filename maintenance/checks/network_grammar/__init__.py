"""A grammar of small networks: one seed's tree is written as two programs, in PyTorch and PaddlePaddle.

A tree says what is computed (tree.py). Each side draws for itself how it is spelled (spelling.py, layers.py,
blocks.py): modules or functions, fused or apart, names, order of definition, containers, layouts. A fault is one change
of what the port computes, at a known place.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from maintenance.checks.network_grammar import blocks  # noqa: F401 - registers what writes them
from maintenance.checks.network_grammar.spelling import Program
from maintenance.checks.network_grammar.tree import Tree, grown_tree


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
        (site, kind), found = self.fault, []
        norm = f"{site}.norm"
        if kind == "input of the branch without gradient" and norm not in self.faulty.modules:
            found += self.ref.places.get(norm, [])  # by hand in the port, in one line with it
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
