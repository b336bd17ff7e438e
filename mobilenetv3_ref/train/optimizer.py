"""SGD with momentum, and the step schedule that drives its learning rate."""

from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR


def build_optimizer(
    model: nn.Module, *, lr: float, momentum: float, weight_decay: float, lr_step_size: int, lr_gamma: float
) -> tuple[SGD, StepLR]:
    """SGD over all parameters, and its schedule: times `lr_gamma` every `lr_step_size` calls of `step()`.

    v <- momentum * v + (gradient + weight_decay * w);  w <- w - lr * v  (torch.optim.SGD).
    """
    optimizer = SGD(model.parameters(), lr, momentum=momentum, weight_decay=weight_decay)
    lr_scheduler = StepLR(optimizer, lr_step_size, lr_gamma)
    return optimizer, lr_scheduler
