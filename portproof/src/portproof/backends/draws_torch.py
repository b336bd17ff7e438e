"""PyTorch's functions that draw random numbers, replaced by ones that take them from `Draws`.

Those that are not replaced, such as `torch.poisson`, and a generator of the model's own draw as they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from portproof.backends.draws import Draws

FACTORIES = {"rand": "uniform", "randn": "normal", "rand_like": "uniform", "randn_like": "normal"}


def _filled(out: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return out.copy_(torch.as_tensor(array))


def _lend(draws: Draws) -> dict[tuple[Any, str], Callable]:
    def factory(name: str) -> Callable:
        make = torch.empty_like if name.endswith("_like") else torch.empty

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = make(*args, **kwargs)
            return _filled(out, draws(FACTORIES[name], out.shape))

        return call

    def normal(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> torch.Tensor:
        if size is None:
            given = [each for each in (mean, std) if isinstance(each, torch.Tensor)]
            size = torch.broadcast_shapes(*(each.shape for each in given))
            kwargs = {"dtype": given[0].dtype, "device": given[0].device} | kwargs
        with torch.no_grad():
            return mean + std * _filled(torch.empty(size, **kwargs), draws.normal(size))

    def randint(
        *args: Any, low: int = 0, high: Any = None, size: Any = None, dtype: torch.dtype = torch.int64, **kwargs: Any
    ) -> torch.Tensor:
        *bounds, size = args if size is None else (*args, size)
        low, high = (low, *bounds, high)[:2] if len(bounds) < 2 else bounds
        return _filled(torch.empty(size, dtype=dtype, **kwargs), draws.integers(low, high, size))

    def randperm(n: int, dtype: torch.dtype = torch.int64, **kwargs: Any) -> torch.Tensor:
        return _filled(torch.empty(n, dtype=dtype, **kwargs), draws.permutation(n))

    def below(p: Any, like: torch.Tensor) -> torch.Tensor:
        drawn = torch.as_tensor(draws.uniform(like.shape)).to(like.device)
        return drawn < (p.detach() if isinstance(p, torch.Tensor) else p)

    def bernoulli(input: torch.Tensor, p: Any = None) -> torch.Tensor:
        return below(input if p is None else p, input).to(input.dtype)

    def multinomial(input: torch.Tensor, num_samples: int, replacement: bool = False) -> torch.Tensor:
        weights = input.detach().cpu().numpy()
        return torch.as_tensor(draws.chosen(weights, num_samples, replacement)).to(input.device)

    # The gradient of what is overwritten is 0, as it is natively.
    def bernoulli_(self: torch.Tensor, p: Any = 0.5) -> torch.Tensor:
        return self.copy_(below(p, self))

    def normal_(self: torch.Tensor, mean: Any = 0.0, std: Any = 1.0) -> torch.Tensor:
        return self.copy_(torch.as_tensor(mean + std * draws.normal(self.shape)))

    def uniform_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        low, high = (*args, kwargs.get("from", 0.0), kwargs.get("to", 1.0))[:2] if len(args) != 1 else (args[0], 1.0)
        high = kwargs.get("to", high)
        return self.copy_(torch.as_tensor(low + (high - low) * draws.uniform(self.shape)))

    def exponential_(self: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
        return self.copy_(torch.as_tensor(draws.exponential(self.shape) / lambd))

    functions = (normal, randint, randperm, bernoulli, multinomial)
    methods = (bernoulli, multinomial, bernoulli_, normal_, uniform_, exponential_)
    return {
        **{(torch, name): factory(name) for name in FACTORIES},
        **{(torch, each.__name__): each for each in functions},
        **{(torch.Tensor, each.__name__): each for each in methods},
    }


def _unless_own(native: Callable, lent: Callable) -> Callable:
    def call(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is not None:
            return native(*args, generator=generator, **kwargs)
        return lent(*args, **kwargs)

    return call


def replaced(draws: Draws) -> dict[tuple[Any, str], tuple[Callable, Callable]]:
    """{(owner, name): (the native function, what takes its numbers from `draws`)}."""
    lent = _lend(draws)
    return {place: (getattr(*place), _unless_own(getattr(*place), each)) for place, each in lent.items()}
