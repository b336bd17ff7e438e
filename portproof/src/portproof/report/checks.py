"""What one rung found, as the reports show it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from portproof.compare import FAIL, REFUSED, Item, Verdict


@dataclass
class Checks:
    """The verdicts of one rung, and what is shown beside them."""

    name: str
    verdicts: list[Verdict] = field(default_factory=list)
    groups: list[Callable[[Item], str]] = field(default_factory=list)  # the label of an item, for each verdict
    types: dict[str, str] = field(default_factory=dict)  # the reference's modules and their layer types, for hints
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # (reference, port): see plots.py
    pictures: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # tensors (3, H, W) that differ

    @property
    def status(self) -> int:
        """FAIL if any verdict failed, REFUSED if any was refused or there is none, else PASS."""
        statuses = {verdict.status for verdict in self.verdicts} or {REFUSED}
        return FAIL if FAIL in statuses else max(statuses)
