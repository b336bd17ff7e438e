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


def build_lr_scheduler(
    optimizer: Optimizer,
    *,
    epochs: int = 1,
    lr_scheduler: str = "steplr",
    lr_step_size: int = 30,
    lr_gamma: float = 0.1,
    lr_min: float = 0.0,
    lr_warmup_epochs: int = 0,
    lr_warmup_method: str = "constant",
    lr_warmup_decay: float = 0.01,
) -> LRScheduler:
    """The schedule `lr_scheduler` (steplr, cosineannealinglr or exponentiallr), after `lr_warmup_epochs` of warm-up.

    `step()` is called once an epoch. steplr: times `lr_gamma` every `lr_step_size` epochs; exponentiallr: every epoch;
    cosineannealinglr: half a cosine down to `lr_min`, over `epochs` less the warm-up. The warm-up begins with the rate
    times `lr_warmup_decay`; it stays there (constant) or rises to the whole rate (linear). Raises ValueError for
    another name.
    """
    if lr_scheduler == "steplr":
        main = StepLR(optimizer, lr_step_size, lr_gamma)
    elif lr_scheduler == "cosineannealinglr":
        main = CosineAnnealingLR(optimizer, epochs - lr_warmup_epochs, lr_min)
    elif lr_scheduler == "exponentiallr":
        main = ExponentialLR(optimizer, lr_gamma)
    else:
        raise ValueError(f"lr_scheduler {lr_scheduler!r}: choose steplr, cosineannealinglr or exponentiallr")
    if lr_warmup_epochs == 0:
        return main
    if lr_warmup_method == "linear":
        warmup = LinearLR(optimizer, lr_warmup_decay, total_iters=lr_warmup_epochs)
    elif lr_warmup_method == "constant":
        warmup = ConstantLR(optimizer, lr_warmup_decay, total_iters=lr_warmup_epochs)
    else:
        raise ValueError(f"lr_warmup_method {lr_warmup_method!r}: choose constant or linear")
    return SequentialLR(optimizer, [warmup, main], [lr_warmup_epochs])
