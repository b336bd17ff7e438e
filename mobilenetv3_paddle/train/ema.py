"""The exponential moving average of a model's weights, which is evaluated beside the model itself.

As ExponentialMovingAverage and its use in torchvision's references/classification (utils.py, train.py).
"""

import copy
from collections.abc import Mapping

import numpy as np
import paddle
from paddle import Tensor, nn

from mobilenetv3_paddle.models.weights import load_state_dict
from sturdyio.cli import UserError

COUNT = "n_averaged"


def ema_decay(decay: float, world_size: int, batch_size: int, steps: int, epochs: int) -> float:
    """The decay of one update, where `decay` is that of an update after one image of a run of one epoch.

    An average reaches back the same share of the run then, however many updates the run has; `steps` optimizer steps
    lie between two updates, `batch_size` counts the images of one process.
    """
    return 1.0 - min(1.0, (1.0 - decay) * (world_size * batch_size * steps / epochs))


class ModelEma:
    """A copy of `model`, `.module`, in which every parameter and buffer is the average of those it was updated with.

    averaged <- decay * averaged + (1 - decay) * value; the first update copies. Integers (counts of batches) are
    averaged in the default dtype and cut off, as PyTorch does. Raises ValueError for a decay outside 0 to 1.
    """

    def __init__(self, model: nn.Layer, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay {decay} is outside 0 to 1")
        self.module = copy.deepcopy(model)
        self.decay = decay
        self.n_averaged = 0

    @paddle.no_grad()
    def update(self, model: nn.Layer) -> None:
        """Average `model`, of the same layers, in."""
        values = model.state_dict().values()
        for averaged, value in zip(self.module.state_dict().values(), values, strict=True):
            # Paddle: its stub says that it takes nothing
            averaged.copy_(self._mean(averaged, value) if self.n_averaged else value)  # type: ignore[call-arg]
        self.n_averaged += 1

    def _mean(self, averaged: Tensor, value: Tensor) -> Tensor:
        """PyTorch's result bit for bit.

        Paddle: a product with a Python number is `scale`, which adds 0 and so turns -0.0 into 0.0; and assigning
        floats to a Tensor of integers makes it one of floats.
        """
        dtype = averaged.dtype if averaged.is_floating_point() else paddle.get_default_dtype()
        old, new = (paddle.to_tensor(share, dtype) for share in (self.decay, 1 - self.decay))
        return (old * averaged.astype(dtype) + new * value.astype(dtype)).astype(averaged.dtype)

    def reset(self) -> None:
        """Let the next update copy again: after every update of the warm-up epochs, whose weights count for nothing."""
        self.n_averaged = 0

    def state_dict(self) -> dict[str, Tensor]:
        """The averages under the model's own names, and the number of updates, `n_averaged` (int64, scalar)."""
        return {**self.module.state_dict(), COUNT: paddle.full([], self.n_averaged, dtype=paddle.int64)}

    def load_state_dict(self, arrays: Mapping[str, np.ndarray], what: str = "averaged weights") -> None:
        """Restore what `state_dict` returned, as arrays; raises UserError unless all of it fits the model."""
        if COUNT not in arrays:
            raise UserError(f"{what} lack {COUNT}, the number of updates: resume from a run with --model-ema")
        averages = {name: array for name, array in arrays.items() if name != COUNT}
        load_state_dict(self.module, averages, what)
        self.n_averaged = int(arrays[COUNT])
