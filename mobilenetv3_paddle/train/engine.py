"""One epoch of training, one evaluation."""

import math
from collections.abc import Callable

import paddle
from paddle import Tensor, nn
from paddle.optimizer import Optimizer

from mobilenetv3_paddle.data.loader import DataLoader
from reprod.recipe.cli import UserError
from reprod.recipe.log import TrainingLog

from .distributed import all_reduce_sum
from .metric import correct_at


def set_train_mode(model: nn.Layer, freeze_norm: bool = False) -> None:
    """Train mode; with `freeze_norm`, batch norm stays in eval mode and uses its running statistics."""
    model.train()
    if freeze_norm:
        for m in model.sublayers():
            if isinstance(m, nn.BatchNorm2D):
                m.eval()


def train_step(
    model: nn.Layer, criterion: nn.Layer, optimizer: Optimizer, image: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Forward, backward, update -> (loss, logits); the gradients stay in the parameters until the next step."""
    optimizer.clear_grad()
    output = model(image)
    loss = criterion(output, target)
    loss.backward()
    optimizer.step()
    return loss, output


def train_one_epoch(
    model: nn.Layer,
    criterion: nn.Layer,
    optimizer: Optimizer,
    data_loader: DataLoader,
    device: str,
    epoch: int,
    print_freq: int,
    freeze_norm: bool = False,
    log: Callable[[str], None] = print,
) -> None:
    """Train on every batch, logging as TrainingLog says; raises UserError when the loss is NaN or infinite."""
    set_train_mode(model, freeze_norm)
    line = TrainingLog(epoch, len(data_loader), print_freq, log)
    for batch_idx, batch in enumerate(data_loader):
        line.batch_read()
        image, target = (tensor.to(device) for tensor in batch)
        loss, output = train_step(model, criterion, optimizer, image, target)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            raise UserError(f"the loss is {loss_value} at epoch {epoch}, iter {batch_idx}: lower --lr, check the data")
        lr = optimizer.get_lr()
        line.batch_done(loss_value, lr, correct_at(output.detach(), target, [1])[0], len(target))


@paddle.no_grad()
def evaluate(model: nn.Layer, criterion: nn.Layer, data_loader: DataLoader, device: str) -> dict[str, float]:
    """loss (mean), top1, top5 (shares, 0 to 1) and samples, over all processes; every image counts once."""
    model.eval()
    loss_sum, samples, correct = 0.0, 0, [0, 0]
    for batch in data_loader:
        image, target = (tensor.to(device) for tensor in batch)
        output = model(image)
        loss_sum += criterion(output, target).item() * len(target)
        samples += len(target)
        correct = [total + new for total, new in zip(correct, correct_at(output, target, [1, 5]), strict=True)]
    loss_sum, top1, top5, samples = all_reduce_sum([loss_sum, *correct, samples], device)
    return {"loss": loss_sum / samples, "top1": top1 / samples, "top5": top5 / samples, "samples": samples}
