"""Batch normalization over the joined batch of all processes, on CPU as well as on cards."""

import paddle
import paddle.distributed as dist
from paddle import Tensor

from .layers import BatchNorm2D


class AllReduceSum(paddle.autograd.PyLayer):
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


class SyncBatchNorm2D(BatchNorm2D):
    """BatchNorm2D whose train mode normalizes (N, C, H, W) by the statistics of all processes' images together.

    A process may have more images than another. Outside a group of processes, and in eval mode, it is BatchNorm2D.
    Parameters and buffers, their names and the rule for the running statistics are the same.

    Paddle: nn.SyncBatchNorm has no CPU kernel and keeps the biased variance.
    """

    weight: Tensor  # Paddle: its own may be None
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        wide = x.to(self.weight.dtype)  # (N, C, H, W); statistics of half precision are no use
        own = paddle.full([1], wide[:, 0].numel(), dtype=wide.dtype)
        total = AllReduceSum.apply(paddle.concat([channel_sums(wide), own]))
        n = total[-1].detach()  # values per channel
        mean = total[:-1] / n  # (C,)
        centred = wide - mean[:, None, None]
        variance = AllReduceSum.apply(channel_sums(centred * centred)) / n  # (C,)
        scale = self.weight * paddle.rsqrt(variance + self._epsilon)
        self.update_running_statistics(mean, variance * (n / (n - 1)))
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)

    # Paddle: BatchNorm2D here has an `update_running_statistics`, too
