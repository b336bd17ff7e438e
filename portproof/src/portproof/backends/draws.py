"""Random numbers that are lent to both sides of a pair. NumPy only.

The k-th draw of a kind and number of values is the same in every run, in any framework. What frameworks draw otherwise,
such as a choice of classes, is made of these.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from types import ModuleType
from typing import Any

import numpy as np

NORMAL, UNIFORM = KINDS = ("normal", "uniform")
STEPS = 2**23  # of uniform numbers, which are the middles


@dataclass(frozen=True)
class Draw:
    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.shape}"

    @property
    def key(self) -> tuple[int, int]:
        return KINDS.index(self.kind), math.prod(self.shape)

    def is_like(self, other: Draw) -> bool:
        """Whether the same numbers are in the same order: one shape only splits axes of the other."""
        ends, other_ends = (set(accumulate(each.shape, mul)) for each in (self, other))
        return self.key == other.key and (ends | {1} >= other_ends or other_ends | {1} >= ends)


@dataclass
class Draws:
    """Lends standard numbers, as float64 that float32 holds exactly, and notes what it lent."""

    seed: int
    made: list[Draw]  # a model's module that runs alone begins with those that were made before it
    mirrored: Collection[str] = ()  # kinds that give -x for x, or 1 - u for u, which are as likely

    def __call__(self, kind: str, shape: Sequence[int]) -> np.ndarray:
        draw = Draw(kind, tuple(map(int, shape)))
        rng = np.random.default_rng([self.seed, *draw.key, Counter(made.key for made in self.made)[draw.key]])
        self.made.append(draw)
        if kind == NORMAL:
            drawn = rng.standard_normal(draw.shape, np.float32).astype(np.float64)
            return -drawn if kind in self.mirrored else drawn
        drawn = (rng.integers(STEPS, size=draw.shape) + 0.5) / STEPS  # never 0 or 1
        return 1 - drawn if kind in self.mirrored else drawn

    def normal(self, shape: Sequence[int]) -> np.ndarray:
        return self(NORMAL, shape)

    def uniform(self, shape: Sequence[int]) -> np.ndarray:
        return self(UNIFORM, shape)

    def exponential(self, shape: Sequence[int]) -> np.ndarray:
        return -np.log(self.uniform(shape))

    def integers(self, low: int, high: int, shape: Sequence[int]) -> np.ndarray:
        """From `low` to `high` - 1, int64."""
        return np.floor(low + (high - low) * self.uniform(shape)).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        return np.argsort(self.uniform([count]))

    def chosen(self, weights: np.ndarray, count: int, replacement: bool) -> np.ndarray:
        """Indices into the last axis of `weights`, (..., n) -> (..., count), int64."""
        weights = weights.astype(np.float64)
        if count > 1 and not replacement:
            with np.errstate(divide="ignore"):  # what has no weight comes last
                times = self.exponential(weights.shape) / weights
            return np.argsort(times, axis=-1)[..., :count]
        ends = np.cumsum(weights, axis=-1)
        drawn = self.uniform([*weights.shape[:-1], count]) * ends[..., -1:]
        return (drawn[..., None] >= ends[..., None, :]).sum(-1)


def difference(ref: Sequence[Draw], port: Sequence[Draw]) -> tuple[str, str] | None:
    """The first draws of both sides, in words, that are not alike; None if all are.

    Only the order among draws of one kind and number of values counts.
    """
    for key in dict.fromkeys(draw.key for draw in (*ref, *port)):
        own, others = ([draw for draw in side if draw.key == key] for side in (ref, port))
        for i in range(max(len(own), len(others))):
            if i >= len(own) or i >= len(others) or not own[i].is_like(others[i]):
                return _word(own, i, ref), _word(others, i, port)
    return None


def _word(draws: Sequence[Draw], place: int, every: Sequence[Draw]) -> str:
    if place < len(draws):
        return str(draws[place])
    return ", ".join(dict.fromkeys(map(str, every))) if every and not draws else "no more" if every else "nothing"


def lent_to_python(draws: Draws) -> dict[tuple[ModuleType, str], Callable]:
    """{(module, function): what takes its numbers from `draws`} of NumPy's and Python's global generators.

    Those that are not replaced, such as `shuffle`, and generators of one's own draw as they do.
    """

    def filled(draw: Callable, low: Any, high: Any, size: Any) -> Any:
        shape = np.broadcast_shapes(np.shape(low), np.shape(high)) if size is None else size
        drawn = draw((shape,) if isinstance(shape, int) else shape)
        return drawn.item() if size is None and not drawn.ndim else drawn

    def uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return low + (high - low) * filled(draws.uniform, low, high, size)

    def normal(loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return loc + scale * filled(draws.normal, loc, scale, size)

    def randint(low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
        low, high = (0, low) if high is None else (low, high)
        return filled(partial(draws.integers, low, high), low, high, size)

    numpy: dict[str, Callable] = {"uniform": uniform, "normal": normal, "randint": randint}
    numpy |= dict.fromkeys(("random", "random_sample"), lambda size=None: uniform(size=size))
    numpy |= {"rand": lambda *shape: uniform(size=shape or None), "randn": lambda *shape: normal(size=shape or None)}
    numpy["standard_normal"] = lambda size=None: normal(size=size)
    python: dict[str, Callable] = {"random": uniform, "uniform": uniform, "randint": lambda a, b: randint(a, b + 1)}
    python |= dict.fromkeys(("gauss", "normalvariate"), normal)
    of_numpy: dict[tuple[ModuleType, str], Callable] = {(np.random, name): function for name, function in numpy.items()}
    return of_numpy | {(random, name): function for name, function in python.items()}
