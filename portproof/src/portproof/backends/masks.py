"""Dropout masks that are lent to both sides. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

# (probability, shape of the mask) -> where values are kept; None: dropout does nothing
Keep = Callable[[float, Sequence[int]], Optional[np.ndarray]]
Call = tuple[float, tuple[int, ...]]  # (probability, shape of the mask without axes of 1)
SATURATED = -1.7580993408473766  # SELU's value far below zero, which alpha dropout puts in


@dataclass(frozen=True)
class Dropped:
    """An active call of dropout in a run, in which it does nothing."""

    name: str  # of the module that calls it
    p: float
    size: int  # how many numbers decide what is dropped; 0: inside a layer of the library, which does not tell


def no_masks(p: float, shape: Sequence[int]) -> None:
    """Lends none."""


@dataclass
class Masks:
    """Lends the same mask to the same call of the same step, in any framework and layout, and keeps who took one."""

    seed: int
    steps: list[list[Call]] = field(default_factory=list)  # the calls of each
    before: list[Call] = field(default_factory=list)  # before the first step

    def begin_step(self) -> None:
        self.steps.append([])

    def __call__(self, p: float, shape: Sequence[int]) -> np.ndarray:
        calls = self.steps[-1] if self.steps else self.before
        rng = np.random.default_rng([self.seed, 8, len(self.steps), len(calls)])
        calls.append((float(p), tuple(length for length in shape if length != 1)))
        return rng.random(tuple(shape)) >= p


def scaled(kept: np.ndarray, p: float) -> tuple[np.ndarray, np.ndarray]:
    """(factor, 0) by which dropout with this mask multiplies; the mean stays."""
    return kept / (1 - p) if p < 1 else np.zeros(kept.shape), np.zeros(())


def alpha_scaled(kept: np.ndarray, p: float) -> tuple[np.ndarray, np.ndarray]:
    """(factor, summand) of alpha dropout with this mask: mean 0 and variance 1 stay."""
    if p == 1:
        return np.zeros(kept.shape), np.zeros(())
    a = ((1 - p) * (1 + p * SATURATED**2)) ** -0.5
    return a * kept, a * SATURATED * (~kept - p)
