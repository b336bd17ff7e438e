"""Float64 arithmetic for PyTorch, with exact constants.

The backwards of hard-sigmoid and CELU hold 1/6 and 1/alpha as float32, 3e-8 off, and on a GPU hard-swish does, too.
Native batch norm in train mode sums value by value: 126 ulp off over 1920 float64 values, which a deep network
magnifies to 2e-12. Here it sums in blocks.
(Float32 tensors it sums in float64, without error.) In float32 nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def _applied(function: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor, inplace: bool) -> torch.Tensor:
    return input.copy_(function(input.clone())) if inplace else function(input)


def _hardsigmoid(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return _applied(lambda x: F.relu6(x + 3) / 6, input, inplace)


def _hardswish(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return _applied(lambda x: x * F.relu6(x + 3) / 6, input, inplace)


def _celu(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:
    def function(x: torch.Tensor) -> torch.Tensor:  # its gradient at 0 is 1
        return torch.where(x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0.0, x) / alpha))

    return _applied(function, input, inplace)


def _batch_norm(
    input: torch.Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    count = input.numel() // input.size(1)
    if not training or count < 2:  # the native one refuses this
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    axes = [axis for axis in range(input.dim()) if axis != 1]
    mean = input.mean(axes, keepdim=True)  # sums in blocks
    centered = input - mean
    var = (centered * centered).mean(axes, keepdim=True)
    with torch.no_grad():
        for running, batch in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
            if running is not None:
                running.copy_((1 - momentum) * running + momentum * batch.flatten())
    output, shape = centered / torch.sqrt(var + eps), [-1, *[1] * (input.dim() - 2)]
    output = output if weight is None else output * weight.reshape(shape)
    return output if bias is None else output + bias.reshape(shape)


EXACT: dict[Callable, Callable] = {
    F.hardsigmoid: _hardsigmoid,
    F.hardswish: _hardswish,
    F.celu: _celu,
    F.batch_norm: _batch_norm,
}


class ExactConstants(TorchFunctionMode):
    """Exact float64 arithmetic in this context; may be nested."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else kwargs.get("input")
        if func in EXACT and first.dtype == torch.float64:
            return EXACT[func](*args, **kwargs)
        return func(*args, **kwargs)
