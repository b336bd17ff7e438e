"""Batch normalization over the joined batch of all processes, on CPU as well as on cards."""

import torch
import torch.distributed as dist
from torch import Tensor

from .layers import BatchNorm2d


class AllReduceSum(torch.autograd.Function):
    """A tensor summed over the processes; the loss of every process depends on it, so its gradient is summed too."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


def channel_sums(x: Tensor) -> Tensor:
    """(N, C, H, W) -> (C,), axis by axis, because one long sum rounds more."""
    return x.sum(3).sum(2).sum(0)


class SyncBatchNorm2d(BatchNorm2d):
    """BatchNorm2d whose train mode normalizes (N, C, H, W) by the statistics of all processes' images together.

    A process may have more images than another. Outside a group of processes, and in eval mode, it is BatchNorm2d.
    Parameters and buffers, their names and the rule for the running statistics are the same.
    """

    momentum: float
    num_batches_tracked: Tensor
    running_mean: Tensor
    running_var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        wide = x.to(self.weight.dtype)  # (N, C, H, W); statistics of half precision are no use
        own = torch.full([1], wide[:, 0].numel(), dtype=wide.dtype, device=wide.device)
        total = AllReduceSum.apply(torch.cat([channel_sums(wide), own]))
        n = total[-1].detach()  # values per channel
        mean = total[:-1] / n  # (C,)
        centred = wide - mean[:, None, None]
        variance = AllReduceSum.apply(channel_sums(centred * centred)) / n  # (C,)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        self.update_running_statistics(mean, variance * (n / (n - 1)))
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """running = (1 - momentum) * running + momentum * batch, with the unbiased variance."""
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)
