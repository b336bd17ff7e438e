"""Checkpoints: the whole state of a training run in one file, written whole or not at all."""

from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from mobilenetv3_paddle.models.weights import load_pickle, load_state_dict, save_pickle, to_arrays
from reprod.recipe.cli import UserError, existing_file

SUFFIX = ".pdparams"


def optimizer_state(model: nn.Layer, optimizer: Optimizer) -> dict[str, np.ndarray]:
    """The optimizer's accumulators as {"features.0.0.weight/velocity_0": array}.

    Paddle: its own keys begin with generated names (conv2d_7.w_0) that another model built before would shift.
    """
    state = optimizer.state_dict()
    return {
        f"{name}/{key.removeprefix(parameter.name + '_')}": value.numpy()
        for name, parameter in model.named_parameters()
        for key, value in state.items()
        if key.startswith(parameter.name + "_")
    }


def load_optimizer_state(
    model: nn.Layer, optimizer: Optimizer, lr_scheduler: LRScheduler, state: dict[str, np.ndarray]
) -> None:
    """Restore what `optimizer_state` returned; the schedule stays as it is."""
    parameters = dict(model.named_parameters())
    split = [(*key.rsplit("/", 1), value) for key, value in state.items()]
    own_keys = {f"{parameters[name].name}_{kind}": value for name, kind, value in split}
    optimizer.set_state_dict({**own_keys, "LR_Scheduler": lr_scheduler.state_dict()})


def save_checkpoint(
    path: Path, model: nn.Layer, optimizer: Optimizer, lr_scheduler: LRScheduler, epoch: int, args: dict[str, Any]
) -> None:
    """Write the state after `epoch` to `path`; raises UserError when it cannot be written."""
    content = {
        "model": to_arrays(model.state_dict()),
        "optimizer": optimizer_state(model, optimizer),
        "lr_scheduler": lr_scheduler.state_dict(),
        "epoch": epoch,
        "args": args,
    }
    save_pickle(content, path)


def load_checkpoint(
    path: str | Path, model: nn.Layer, optimizer: Optimizer, lr_scheduler: LRScheduler
) -> tuple[int, dict[str, Any]]:
    """Restore the state in `path` -> (epoch it was written after, flags of that run).

    Raises UserError when the file is missing, damaged, no checkpoint, or of another model.
    """
    content = load_pickle(existing_file(path, "checkpoint"))
    missing = {"model", "optimizer", "lr_scheduler", "epoch", "args"} - content.keys()
    if missing:
        raise UserError(f"checkpoint {path} lacks {', '.join(sorted(missing))}: for weights alone use --weights")
    load_state_dict(model, content["model"], f"the weights in checkpoint {path}")
    lr_scheduler.set_state_dict(content["lr_scheduler"])
    load_optimizer_state(model, optimizer, lr_scheduler, content["optimizer"])
    return content["epoch"], content["args"]
