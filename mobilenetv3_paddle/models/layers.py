"""The layers whose arithmetic the two frameworks do differently.

Paddle: its own layers, with PyTorch's arithmetic.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

__all__ = ["AdaptiveAvgPool2D", "BatchNorm2D", "Hardsigmoid"]


class AdaptiveAvgPool2D(nn.Layer):
    """Global average pooling, (N, C, H, W) -> (N, C, 1, 1); raises ValueError for any other output size.

    Paddle: the native pool adds naively (14.7 units in the last place off at 56 x 56; this mean is 2.0 off and PyTorch
    0.9), and its backward holds 1 / (H * W) as a float32 constant even in float64.
    """

    def __init__(self, output_size: int) -> None:
        super().__init__()
        if output_size != 1:  # Paddle: the means below do nothing else
            raise ValueError(f"output_size {output_size}: only global pooling, 1, is needed here")

    def forward(self, x: Tensor) -> Tensor:
        # Paddle: axis by axis, which rounds less; with keepdim the backward pass takes twice as long
        return x.mean(axis=3).mean(axis=2).unsqueeze([2, 3])


class BatchNorm2D(nn.BatchNorm2D):
    """Batch normalization with PyTorch's running statistics; momentum keeps Paddle's meaning.

    running = momentum * running + (1 - momentum) * batch, with batch variance sum((x - mean)^2) / (n - 1).
    Raises ValueError in train mode when there is one value per channel, as PyTorch does.

    Paddle: the native layer stores the biased variance, sum((x - mean)^2) / n, takes n = 1 without a word, and does not
    count its batches; the count (int64, scalar) is kept here so that weights go back to PyTorch as they came.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("num_batches_tracked", paddle.zeros([], dtype="int64"))  # Paddle: has none

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        n = x.shape[0] * x.shape[2] * x.shape[3]
        if n == 1:
            raise ValueError(f"batch norm needs more than 1 value per channel when training, got {tuple(x.shape)}")
        # Paddle: with momentum 0 the native kernel leaves the batch statistics in these two
        mean, variance = paddle.zeros_like(self._mean), paddle.zeros_like(self._variance)
        y = F.batch_norm(x, mean, variance, self.weight, self.bias, training=True, momentum=0.0, epsilon=self._epsilon)
        self.update_running_statistics(mean, variance * (n / (n - 1)))
        return y

    @paddle.no_grad()
    def update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """running = momentum * running + (1 - momentum) * batch.

        Paddle: does so in its kernel, with the biased variance.
        """
        paddle.assign(self.num_batches_tracked + 1, self.num_batches_tracked)
        new, old = 1 - self._momentum, self._momentum
        paddle.assign(old * self._mean + new * mean, self._mean)
        paddle.assign(old * self._variance + new * variance, self._variance)


class Hardsigmoid(nn.Layer):
    """relu6(x + 3) / 6, any shape (MobileNetV3, section 5.2).

    Paddle: the native layer's default slope is 0.1666667, 2e-7 off one sixth.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6  # Paddle: without a float32 slope
