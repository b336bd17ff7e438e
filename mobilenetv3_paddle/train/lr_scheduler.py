"""Learning-rate schedules by epochs: step, cosine or exponential, each after a linear or constant warm-up.

As torchvision's references/classification/train.py builds them (torchvision 0.29.1).
"""

import math

from paddle.optimizer.lr import LRScheduler


class RecursiveLR(LRScheduler):
    """A schedule each of whose rates is computed from the one before it, `last_lr`, as PyTorch's are.

    Paddle: its own compute lr * gamma ** n and the like from the first rate, at 0.064 * 0.973 ** n up to 13
    units in the last place off.
    """

    def restart_lr(self) -> float:
        """The rate that this schedule begins with after a warm-up."""
        return self.base_lr


class StepLR(RecursiveLR):
    """The learning rate times `gamma` every `step_size` calls of `step()`.

    Paddle: see RecursiveLR.
    """

    def __init__(self, learning_rate: float, step_size: int, gamma: float) -> None:
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(learning_rate)

    def get_lr(self) -> float:
        due = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return self.last_lr * self.gamma if due else self.last_lr


class ExponentialLR(RecursiveLR):
    """The learning rate times `gamma` at every call of `step()`.

    Paddle: see RecursiveLR.
    """

    def __init__(self, learning_rate: float, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(learning_rate)

    def get_lr(self) -> float:
        return self.last_lr * self.gamma if self.last_epoch > 0 else self.last_lr


class CosineAnnealingLR(RecursiveLR):
    """Half a cosine from the learning rate down to `eta_min` over `T_max` calls of `step()`, and up again after them.

    Paddle: its CosineAnnealingDecay is the same without a warm-up; after one, PyTorch begins as in `restart_lr`.
    """

    def __init__(self, learning_rate: float, T_max: int, eta_min: float) -> None:
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(learning_rate)

    def restart_lr(self) -> float:
        return self.eta_min + (self.base_lr - self.eta_min)  # the closed form at 0, rounded twice

    def get_lr(self) -> float:
        if self.last_epoch == 0:
            return self.last_lr
        if (self.last_epoch - 1 - self.T_max) % (2 * self.T_max) == 0:  # from the lowest point, where a factor fails
            return self.last_lr + (self.base_lr - self.eta_min) * (1 - math.cos(math.pi / self.T_max)) / 2
        return (1 + math.cos(math.pi * self.last_epoch / self.T_max)) / (
            1 + math.cos(math.pi * (self.last_epoch - 1) / self.T_max)
        ) * (self.last_lr - self.eta_min) + self.eta_min


class ConstantLR(RecursiveLR):
    """The learning rate times `factor`, as long as a warm-up lasts.

    Paddle: has none.
    """

    def __init__(self, learning_rate: float, factor: float) -> None:
        self.factor = factor
        super().__init__(learning_rate)

    def get_lr(self) -> float:
        return self.last_lr * self.factor if self.last_epoch == 0 else self.last_lr


class LinearLR(RecursiveLR):
    """From `start_factor` times the learning rate up to all of it, by equal steps, in `total_iters` calls of `step()`.

    Paddle: its LinearLR gives the same rates; this one has the state that SequentialLR sets.
    """

    def __init__(self, learning_rate: float, start_factor: float, total_iters: int) -> None:
        self.start_factor = start_factor
        self.total_iters = total_iters
        super().__init__(learning_rate)

    def get_lr(self) -> float:
        if self.last_epoch == 0:
            return self.last_lr * self.start_factor
        rise = 1.0 - self.start_factor
        return self.last_lr * (1.0 + rise / (self.total_iters * self.start_factor + (self.last_epoch - 1) * rise))


class SequentialLR(LRScheduler):
    """The schedule `warmup` for `milestone` calls of `step()`, then `main` from its beginning.

    Paddle: has none. What the two would keep follows from this one's epoch and rate, which are its whole state.
    """

    def __init__(self, warmup: RecursiveLR, main: RecursiveLR, milestone: int) -> None:
        self.warmup = warmup
        self.main = main
        self.milestone = milestone
        super().__init__(main.base_lr)

    def get_lr(self) -> float:
        if self.last_epoch == self.milestone:
            return self.main.restart_lr()
        before = self.last_epoch < self.milestone
        active = self.warmup if before else self.main
        active.last_epoch = self.last_epoch if before else self.last_epoch - self.milestone
        active.last_lr = self.last_lr
        return active.get_lr()


def build_lr_scheduler(
    learning_rate: float,
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

    Paddle: a schedule is given the rate, where PyTorch's finds it in the optimizer.
    """
    if lr_scheduler == "steplr":
        main = StepLR(learning_rate, lr_step_size, lr_gamma)
    elif lr_scheduler == "cosineannealinglr":
        main = CosineAnnealingLR(learning_rate, epochs - lr_warmup_epochs, lr_min)
    elif lr_scheduler == "exponentiallr":
        main = ExponentialLR(learning_rate, lr_gamma)
    else:
        raise ValueError(f"lr_scheduler {lr_scheduler!r}: choose steplr, cosineannealinglr or exponentiallr")
    if lr_warmup_epochs == 0:
        return main
    if lr_warmup_method == "linear":
        warmup = LinearLR(learning_rate, lr_warmup_decay, total_iters=lr_warmup_epochs)
    elif lr_warmup_method == "constant":
        warmup = ConstantLR(learning_rate, lr_warmup_decay)
    else:
        raise ValueError(f"lr_warmup_method {lr_warmup_method!r}: choose constant or linear")
    return SequentialLR(warmup, main, lr_warmup_epochs)
