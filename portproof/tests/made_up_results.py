"""Results that no models gave, for the tests of reports: rungs of verdicts on small arrays; strict JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from portproof.backends.trace import output_item
from portproof.compare import Item, Verdict, compare
from portproof.ladder.rung import Rung

MODULES = [f"features.{block}.{layer}" for block in range(6) for layer in range(3)]


class Outcome(Rung):
    """A rung that is given its verdicts instead of a pair to compare."""

    def __init__(self, *verdicts: Verdict, curves: dict | None = None, pictures: dict | None = None) -> None:
        super().__init__("outcome")
        self.curves, self.pictures = curves or {}, pictures or {}
        self.types = dict.fromkeys(MODULES, "BatchNorm2d")
        for verdict in verdicts:
            self.check(verdict)


def outputs(names: list[str] = MODULES) -> dict[Item, np.ndarray]:
    rng = np.random.default_rng(0)
    return {output_item(name, "logits"): rng.standard_normal((2, 3)) for name in names}


def forward(change: dict[str, np.ndarray | None], title: str = "eval mode, float64") -> Verdict:
    """All modules, of which the port has some changed, or, if None, not at all."""
    ref = outputs()
    port = {item: array + 1e-13 for item, array in ref.items()}
    port |= {output_item(name, "logits"): array for name, array in change.items()}
    port = {item: array for item, array in port.items() if array is not None}
    return compare(ref, port, dict.fromkeys(ref, 1e-12), title=title)


def refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def strict(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
