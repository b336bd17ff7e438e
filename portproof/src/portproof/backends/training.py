"""What the ladder's rungs need of a framework that trains: precision in place, threads, optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Training(ABC):
    """What training needs."""

    @abstractmethod
    def to_device(self, module: Any, device: Any, dtype: str) -> Any:
        """`module`, changed in place, on that device, its floats in "float32" or "float64"."""

    def set_threads(self, count: int) -> int:
        """Compute with `count` threads from now on, where the framework can be told -> how many it were before."""
        return count  # PaddlePaddle takes OMP_NUM_THREADS as it is when it is imported

    @abstractmethod
    def learning_rate(self, optimizer: Any) -> float:
        """The rate of its next step."""

    @abstractmethod
    def sgd(self, parameters: list, rate: float) -> Any:
        """Plain stochastic gradient descent."""

    @abstractmethod
    def clear_gradients(self, optimizer: Any) -> None:
        """Forget the gradients of what it trains, in the framework's own default way."""
