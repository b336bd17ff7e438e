"""Paddle's kernels that draw random numbers, replaced by ones that take them from `Draws`.

Functions under any name call them. Those that are not replaced, such as `poisson`, and calls with a seed of their own
draw as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops as ops

from portproof.backends.draws import Draws
from portproof.backends.lent import patched

FLOATS = (paddle.float16, paddle.bfloat16, paddle.float32, paddle.float64)


def _tensor(array: np.ndarray, dtype: Any, place: Any) -> paddle.Tensor:
    return paddle.Tensor(np.asarray(array), place=place).astype(dtype)


def lent_draws(draws: Draws) -> AbstractContextManager:
    def gaussian(
        shape: Sequence[int], mean: float, std: float, seed: int, dtype: Any, place: Any, **_: Any
    ) -> paddle.Tensor:
        return _tensor(mean + std * draws.normal(shape), dtype, place)

    def uniform(
        shape: Sequence[int], dtype: Any, low: float, high: float, seed: int, place: Any, **_: Any
    ) -> paddle.Tensor:
        return _tensor(low + (high - low) * draws.uniform(shape), dtype, place)

    def put(x: paddle.Tensor, array: np.ndarray) -> paddle.Tensor:
        return paddle.assign(_tensor(array, x.dtype, x.place), x)

    def gaussian_inplace_(x: paddle.Tensor, mean: float, std: float, seed: int) -> paddle.Tensor:
        return put(x, mean + std * draws.normal(x.shape))

    def uniform_inplace_(x: paddle.Tensor, low: float, high: float, seed: int, *_: Any) -> paddle.Tensor:
        return put(x, low + (high - low) * draws.uniform(x.shape))

    def exponential_(x: paddle.Tensor, lam: float) -> paddle.Tensor:
        return put(x, draws.exponential(x.shape) / lam)

    def bernoulli(x: paddle.Tensor) -> paddle.Tensor:
        return _tensor(draws.uniform(x.shape) < x.detach().numpy(), x.dtype, x.place)

    def randint(low: int, high: int, shape: Sequence[int], dtype: Any, place: Any) -> paddle.Tensor:
        return _tensor(draws.integers(low, high, shape), dtype, place)

    def randperm(n: int, dtype: Any, place: Any, **_: Any) -> paddle.Tensor:
        return _tensor(draws.permutation(n), dtype, place)

    def multinomial(x: paddle.Tensor, count: Any, replacement: bool, **_: Any) -> paddle.Tensor:
        return _tensor(draws.chosen(x.detach().numpy(), int(count), replacement), paddle.int64, x.place)

    def gumbel_softmax(x: paddle.Tensor, temperature: float, hard: bool, axis: int) -> paddle.Tensor:
        noise = _tensor(-np.log(draws.exponential(x.shape)), x.dtype, x.place)
        soft = paddle.nn.functional.softmax((x + noise) / temperature, axis)
        if not hard:
            return soft
        largest = (soft == soft.max(axis, keepdim=True)).astype(x.dtype)
        return (largest - soft).detach() + soft

    makers = (gaussian, uniform, gaussian_inplace_, uniform_inplace_, exponential_, bernoulli, randint, randperm)
    lent = {each.__name__: each for each in (*makers, multinomial, gumbel_softmax)}
    return patched({(ops, name): _unless_own(getattr(ops, name), each) for name, each in lent.items()})


def _unless_own(native: Callable, lent: Callable) -> Callable:
    """`native` where a call has its own seed or output, or draws complex numbers."""
    at = {"gaussian": (3, 4), "uniform": (4, 1), "gaussian_inplace_": (3, None), "uniform_inplace_": (3, None)}
    seed, dtype = at.get(lent.__name__, (None, None))

    def call(*args: Any, **kwargs: Any) -> Any:
        own = seed is not None and args[seed] or dtype is not None and args[dtype] not in FLOATS
        return (native if own or kwargs.get("out") is not None else lent)(*args, **kwargs)

    return call
