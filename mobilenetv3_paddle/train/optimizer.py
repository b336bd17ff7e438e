"""SGD with momentum, and the step schedule that drives its learning rate."""

from paddle import nn
from paddle.optimizer import Momentum
from paddle.optimizer.lr import LRScheduler


class StepLR(LRScheduler):
    """The learning rate times `gamma` every `step_size` calls of `step()`.

    Paddle: `StepDecay` computes lr * gamma ** n, up to 4 units in the last place off torch's repeated product.
    """

    def __init__(self, learning_rate: float, step_size: int, gamma: float) -> None:
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(learning_rate)

    def get_lr(self) -> float:
        due = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return self.last_lr * self.gamma if due else self.last_lr


def build_optimizer(
    model: nn.Layer, *, lr: float, momentum: float, weight_decay: float, lr_step_size: int, lr_gamma: float
) -> tuple[Momentum, StepLR]:
    """SGD over all parameters, and its schedule: times `lr_gamma` every `lr_step_size` calls of `step()`.

    v <- momentum * v + (gradient + weight_decay * w);  w <- w - lr * v  (torch.optim.SGD).
    """
    lr_scheduler = StepLR(lr, lr_step_size, lr_gamma)  # Paddle: the schedule comes first, the optimizer holds it
    optimizer = Momentum(lr_scheduler, momentum, parameters=model.parameters(), weight_decay=weight_decay)
    return optimizer, lr_scheduler
