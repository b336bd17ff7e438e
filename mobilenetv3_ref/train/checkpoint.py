"""Checkpoints: the whole state of a training run in one file; either the whole file appears or none."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mobilenetv3_common.digest import digest
from mobilenetv3_ref.models.weights import load_pickle, load_state_dict, save_pickle, to_arrays
from sturdyio.cli import UserError, existing_file

from .amp import Amp
from .ema import ModelEma

SUFFIX = ".pth"
KEYS = {"model", "optimizer", "lr_scheduler", "scaler", "ema", "epoch", "batch", "world_size", "data", "args", "digest"}


@dataclass
class TrainingState:
    """What changes while a run goes on; random draws do not belong to it, since they are keyed by where it is."""

    model: nn.Module
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    amp: Amp
    ema: ModelEma | None


def save_checkpoint(
    path: Path,
    state: TrainingState,
    *,
    epoch: int,
    batch: int,
    world_size: int,
    data: dict[str, int | str],
    args: dict[str, Any],
) -> None:
    """Write `state`, with which the run goes on at `batch` of `epoch`; raises UserError when it cannot be written.

    One file, so that model and optimizer cannot be of different steps. `args` are the flags of the run, `data` what
    `describe_images` says of its training images.
    """
    content = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "lr_scheduler": state.lr_scheduler.state_dict(),
        "scaler": state.amp.scaler.state_dict(),
        "ema": state.ema.state_dict() if state.ema else None,
        "epoch": epoch,
        "batch": batch,
        "world_size": world_size,
        "data": data,
        "args": args,
    }
    save_pickle({**content, "digest": digest(content)}, path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint; raises UserError when the file is missing, damaged or no checkpoint."""
    content = load_pickle(existing_file(path, "checkpoint"))
    missing = KEYS - content.keys()
    if missing:
        raise UserError(f"checkpoint {path} lacks {', '.join(sorted(missing))}: for weights alone use --weights")
    if content.pop("digest") != digest(content):
        fix = "resume from another if one was kept, else start anew"
        raise UserError(f"checkpoint {path} is damaged, its digest does not fit: {fix}")
    return content


def restore(state: TrainingState, content: dict[str, Any], path: str | Path) -> None:
    """Bring `state` to what the checkpoint `path` holds; raises UserError when that is of another model."""
    load_state_dict(state.model, to_arrays(content["model"]), f"the weights in checkpoint {path}")
    state.optimizer.load_state_dict(content["optimizer"])
    state.lr_scheduler.load_state_dict(content["lr_scheduler"])
    # torch: it wonders where the optimizer's steps are when the checkpoint lies between an epoch's last and its end
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    state.amp.scaler.load_state_dict(content["scaler"])
    if state.ema:
        state.ema.load_state_dict(to_arrays(content["ema"]), f"the averaged weights in checkpoint {path}")
