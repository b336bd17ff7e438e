"""One epoch of training, one evaluation."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import paddle
from paddle import Tensor, nn
from paddle.optimizer import Optimizer

from mobilenetv3_common.log import TrainingLog
from mobilenetv3_paddle.data.loader import DataLoader
from mobilenetv3_paddle.data.mix import RandomMix
from sturdyio.cli import Stopped, UserError

from .amp import Amp
from .distributed import all_reduce_sum, unwrap
from .metric import correct_at
from .nonfinite import first_nonfinite

FULL_PRECISION = Amp()


@dataclass(frozen=True)
class Settings:
    """How an epoch is trained; the loader begins with `first_batch`, too."""

    print_freq: int = 10
    epochs: int | None = None
    first_batch: int = 0
    freeze_norm: bool = False
    mix: RandomMix | None = None
    amp: Amp = FULL_PRECISION
    clip_grad_norm: float | None = None
    accumulation_steps: int = 1


@dataclass(frozen=True)
class Hooks:
    """Whom an epoch tells what.

    `log` gets the lines of TrainingLog, `before_batch` the number of the batch that comes, `after_step` how many
    batches of the epoch the updated model has seen, `record` what the log has of the batch that a line ends with.
    """

    log: Callable[[str], None] = print
    before_batch: Callable[[int], None] = lambda batch: None
    after_step: Callable[[int], None] = lambda batches: None
    record: Callable[[int, dict[str, float]], None] = lambda batch, metrics: None


def set_train_mode(model: nn.Layer, freeze_norm: bool = False) -> None:
    """Train mode; with `freeze_norm`, batch norm stays in eval mode and uses its running statistics."""
    model.train()
    if freeze_norm:
        for m in model.sublayers():
            if isinstance(m, nn.BatchNorm2D):  # Paddle: the synchronized one here is one of them
                m.eval()


@paddle.no_grad()
def clip_gradients(model: nn.Layer, max_norm: float | None) -> float:
    """The 2-norm of all gradients as one vector, which is then scaled down to `max_norm` if it is longer.

    g <- g * min(1, max_norm / (norm + 1e-6))  (torch.nn.utils.clip_grad_norm_); None only measures.
    """
    # Paddle: its clip_grad_norm_ has this formula, too, but always rewrites the gradients.
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # Paddle: and its vector_norm takes 12 times as long as the square of it, for a norm that is 1e-4 off.
    norm = cast(float, paddle.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt().item())
    if max_norm is not None and norm + 1e-6 > max_norm:
        for gradient in gradients:
            gradient.scale_(max_norm / (norm + 1e-6))
    return norm


def train_step(
    model: nn.Layer,
    criterion: nn.Layer,
    optimizer: Optimizer,
    image: Tensor,
    target: Tensor,
    *,
    amp: Amp = FULL_PRECISION,
    clip_grad_norm: float | None = None,
    accumulation: tuple[int, int] = (0, 1),
) -> tuple[Tensor, Tensor]:
    """Forward, backward, update -> (loss, logits); the gradients stay in the parameters until the next step.

    `accumulation` is (place of this batch in its group, batches in the group): the first clears the gradients, each
    adds its share of the group's mean, and the last updates. Raises FloatingPointError instead of updating when a
    gradient is not finite; with float16 the scaler leaves that update out.
    """
    place, size = accumulation
    if place == 0:
        optimizer.clear_grad()
    last = place == size - 1
    # Several processes average their gradients once a group.
    with nullcontext() if last or not hasattr(model, "no_sync") else cast(Any, model).no_sync():
        output = amp.forward(model, image)
        loss = criterion(output, target)
        amp.scaler.scale(loss / size).backward()
    if last:
        amp.scaler.unscale_(optimizer)
        norm = clip_gradients(model, clip_grad_norm)
        if not math.isfinite(norm) and not amp.scales:
            raise FloatingPointError(f"the loss is {loss.item()}, the norm of its gradients {norm},")
        amp.scaler.step(optimizer)
        amp.scaler.update()
    return loss, output


def train_one_epoch(
    model: nn.Layer,
    criterion: nn.Layer,
    optimizer: Optimizer,
    data_loader: DataLoader,
    device: str,
    epoch: int,
    settings: Settings = Settings(),  # noqa: B008  it is frozen
    hooks: Hooks = Hooks(),  # noqa: B008
) -> None:
    """Train on every batch from `settings.first_batch` on.

    Raises UserError when the loss or a gradient is NaN or infinite, before that reaches the parameters.
    """
    set_train_mode(model, settings.freeze_norm)
    batches, first, size_of_group = len(data_loader), settings.first_batch, settings.accumulation_steps
    line = TrainingLog(epoch, batches, settings.print_freq, hooks.log, first_batch=first, epochs=settings.epochs)
    for batch_idx, batch in enumerate(data_loader, first):
        line.batch_read()
        image, label = (tensor.to(device) for tensor in batch)
        image, target = settings.mix(image, label, epoch, batch_idx) if settings.mix else (image, label)
        place = batch_idx % size_of_group
        size = min(size_of_group, batches - batch_idx + place)
        hooks.before_batch(batch_idx)
        try:
            loss, output = train_step(
                model,
                criterion,
                optimizer,
                image,
                target,
                amp=settings.amp,
                clip_grad_norm=settings.clip_grad_norm,
                accumulation=(place, size),
            )
            loss_value = cast(float, loss.item())
            if not math.isfinite(loss_value):
                raise FloatingPointError(f"the loss is {loss_value}")
        except FloatingPointError as error:
            hooks.before_batch(batch_idx)  # the same dropout again
            with settings.amp.autocast():
                where = first_nonfinite(unwrap(model), criterion, image, target)
            raise UserError(
                f"{error} at epoch {epoch}, iter {batch_idx}: {where}; lower --lr, check the data"
            ) from error
        lr = optimizer.get_lr()
        correct = correct_at(output.detach(), label, [1])[0]
        if line.batch_done(loss_value, lr, correct, len(label)):
            hooks.record(batch_idx, {"loss": loss_value, "lr": lr, "top1": correct / len(label)})
        if place == size - 1:
            hooks.after_step(batch_idx + 1)


@paddle.no_grad()
def evaluate(
    model: nn.Layer,
    criterion: nn.Layer,
    data_loader: DataLoader,
    device: str,
    stop: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """loss (mean), top1, top5 (shares, 0 to 1) and samples, over all processes; every image counts once.

    Raises Stopped before a batch once `stop()` says so, which all processes call equally often.
    """
    model.eval()
    loss_sum, samples, correct = 0.0, 0, [0, 0]
    for batch in data_loader:
        if stop and stop():
            raise Stopped
        image, target = (tensor.to(device) for tensor in batch)
        output = model(image)
        loss_sum += criterion(output, target).item() * len(target)
        samples += len(target)
        correct = [total + new for total, new in zip(correct, correct_at(output, target, [1, 5]), strict=True)]
    if stop and len(data_loader) < data_loader.batch_sampler.rounds and stop():  # others have one batch more
        raise Stopped
    loss_sum, top1, top5, count = all_reduce_sum([loss_sum, *correct, samples], device)
    return {"loss": loss_sum / count, "top1": top1 / count, "top5": top5 / count, "samples": count}
