"""What the files of the corpus share: what a pair and a bug are, and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import paddle
import torch


@dataclass(frozen=True)
class Bug:
    """What `align` has to say of a port with one bug."""

    at: str  # the reference's module at which the bug is; "" is the model itself
    cause: str = ""  # a word of the tested cause, where one can be expected
    also: tuple[str, ...] = ()  # other names that are right as well, where it is a matter of taste


@dataclass(frozen=True)
class Pair:
    """A reference and a port, which is faithful if it is built with `bug=""`."""

    ref: Callable[[], torch.nn.Module]
    port: Callable[[str], paddle.nn.Layer]
    inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray]
    bugs: Mapping[str, Bug] = field(default_factory=dict)  # by the name with which `port` is called
    modes: tuple[str, ...] = ("eval", "train")
    faithful: bool = True  # False: Paddle's own layer differs, whatever the port's author does
    random: bool = False  # in train mode, on both sides: it may be refused there


EVAL = ("eval",)  # of models with batch norm: Paddle's running variance is the biased one


def normal(*shape: int) -> np.ndarray:
    """Normal numbers, float32, the same for the same shape."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def ids(count: int, *shape: int) -> np.ndarray:
    """Whole numbers below `count`, int64; the first is 0."""
    numbers = np.random.default_rng((count, *shape)).integers(0, count, shape)
    numbers.flat[0] = 0
    return numbers


def padded(lengths: Sequence[int], size: int) -> np.ndarray:
    """(len(lengths), size), bool: True where a sequence has ended."""
    return np.arange(size) >= np.array(lengths)[:, None]
