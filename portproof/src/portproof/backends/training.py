"""What the ladder needs for training: precision, threads, optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Training(ABC):
    @abstractmethod
    def to_device(self, module: Any, device: Any, dtype: str) -> Any:
        """Move `module` in place; its floats become "float32" or "float64"."""

    def set_threads(self, count: int) -> int:
        """Use `count` threads, where that can be set -> the number before."""
        return count  # PaddlePaddle reads OMP_NUM_THREADS at import

    @abstractmethod
    def learning_rate(self, optimizer: Any) -> float:
        """The rate of its next step."""

    @abstractmethod
    def sgd(self, parameters: list, rate: float) -> Any:
        """Plain stochastic gradient descent."""

    @abstractmethod
    def clear_gradients(self, optimizer: Any) -> None:
        """Clear its parameters' gradients, in the framework's default way."""
