"""Learning-rate schedules by epochs: step, cosine or exponential, each after a linear or constant warm-up.

As torchvision's references/classification/train.py builds them (torchvision 0.29.1).
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

from mobilenetv3_common.arguments import Schedule


def build_lr_scheduler(optimizer: Optimizer, schedule: Schedule) -> LRScheduler:
    """The schedule `lr_scheduler` (steplr, cosineannealinglr or exponentiallr), after `lr_warmup_epochs` of warm-up.

    `step()` is called once an epoch. steplr: times `lr_gamma` every `lr_step_size` epochs; exponentiallr: every epoch;
    cosineannealinglr: half a cosine down to `lr_min`, over `epochs` less the warm-up. The warm-up begins with the rate
    times `lr_warmup_decay`; it stays there (constant) or rises to the whole rate (linear). Raises ValueError for
    another name.
    """
    if schedule.lr_scheduler == "steplr":
        main: LRScheduler = StepLR(optimizer, schedule.lr_step_size, schedule.lr_gamma)
    elif schedule.lr_scheduler == "cosineannealinglr":
        main = CosineAnnealingLR(optimizer, schedule.epochs - schedule.lr_warmup_epochs, schedule.lr_min)
    elif schedule.lr_scheduler == "exponentiallr":
        main = ExponentialLR(optimizer, schedule.lr_gamma)
    else:
        raise ValueError(f"lr_scheduler {schedule.lr_scheduler!r}: choose steplr, cosineannealinglr or exponentiallr")
    if schedule.lr_warmup_epochs == 0:
        return main
    if schedule.lr_warmup_method == "linear":
        warmup: LRScheduler = LinearLR(optimizer, schedule.lr_warmup_decay, total_iters=schedule.lr_warmup_epochs)
    elif schedule.lr_warmup_method == "constant":
        warmup = ConstantLR(optimizer, schedule.lr_warmup_decay, total_iters=schedule.lr_warmup_epochs)
    else:
        raise ValueError(f"lr_warmup_method {schedule.lr_warmup_method!r}: choose constant or linear")
    return SequentialLR(optimizer, [warmup, main], [schedule.lr_warmup_epochs])
