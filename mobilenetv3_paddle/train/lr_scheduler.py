"""Learning-rate schedules by epochs: step, cosine or exponential, each after a linear or constant warm-up.

As torchvision's references/classification/train.py builds them (torchvision 0.29.1).
"""

from paddle.optimizer import lr
from paddle.optimizer.lr import LRScheduler

from mobilenetv3_common.arguments import Schedule


class SequentialLR(LRScheduler):
    """The schedule `warmup` for `milestone` calls of `step()`, then `main` from its beginning.

    Paddle: has none. What the two would keep follows from this one's epoch and rate, which are its whole state.
    """

    def __init__(self, warmup: LRScheduler, main: LRScheduler, milestone: int) -> None:
        """Paddle: two schedules, where PyTorch's takes any number."""
        self.warmup = warmup
        self.main = main
        self.milestone = milestone
        super().__init__(main.base_lr)

    def get_lr(self) -> float:
        """Paddle: as PyTorch's, which begins `main` with `step(0)`: a cosine's closed form there is rounded twice."""
        if self.last_epoch == self.milestone:
            self.main.step(0)
            return self.main.last_lr
        before = self.last_epoch < self.milestone
        active = self.warmup if before else self.main
        active.last_epoch = self.last_epoch if before else self.last_epoch - self.milestone
        active.last_lr = self.last_lr
        return active.get_lr()


def build_lr_scheduler(learning_rate: float, schedule: Schedule) -> LRScheduler:  # Paddle: the rate, not its optimizer
    """The schedule `lr_scheduler` (steplr, cosineannealinglr or exponentiallr), after `lr_warmup_epochs` of warm-up.

    `step()` is called once an epoch. steplr: times `lr_gamma` every `lr_step_size` epochs; exponentiallr: every epoch;
    cosineannealinglr: half a cosine down to `lr_min`, over `epochs` less the warm-up. The warm-up begins with the rate
    times `lr_warmup_decay`; it stays there (constant) or rises to the whole rate (linear). Raises ValueError for
    another name.
    """
    if schedule.lr_scheduler == "steplr":
        # Paddle: its StepDecay and ExponentialDecay compute lr * gamma ** n from the first rate, at 0.064 * 0.973 ** n
        # up to 13 units in the last place off. This one multiplies epoch by epoch, as PyTorch's do.
        main: LRScheduler = lr.MultiplicativeDecay(
            learning_rate, lambda epoch: 1.0 if epoch % schedule.lr_step_size else schedule.lr_gamma
        )
    elif schedule.lr_scheduler == "cosineannealinglr":
        # Paddle: its name of CosineAnnealingLR
        main = lr.CosineAnnealingDecay(learning_rate, schedule.epochs - schedule.lr_warmup_epochs, schedule.lr_min)
    elif schedule.lr_scheduler == "exponentiallr":
        main = lr.MultiplicativeDecay(learning_rate, lambda epoch: schedule.lr_gamma)  # Paddle: as for steplr
    else:
        raise ValueError(f"lr_scheduler {schedule.lr_scheduler!r}: choose steplr, cosineannealinglr or exponentiallr")
    if schedule.lr_warmup_epochs == 0:
        return main
    if schedule.lr_warmup_method == "linear":
        # Paddle: the same two in another order
        warmup: LRScheduler = lr.LinearLR(learning_rate, schedule.lr_warmup_epochs, schedule.lr_warmup_decay)
    elif schedule.lr_warmup_method == "constant":
        # Paddle: has no ConstantLR
        warmup = lr.MultiplicativeDecay(learning_rate * schedule.lr_warmup_decay, lambda epoch: 1.0)
    else:
        raise ValueError(f"lr_warmup_method {schedule.lr_warmup_method!r}: choose constant or linear")
    return SequentialLR(warmup, main, schedule.lr_warmup_epochs)  # Paddle: see SequentialLR
