"""Checkpoints: the whole state of a training run in one file, written whole or not at all."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mobilenetv3_ref.models.weights import load_pickle, load_state_dict, save_pickle, to_arrays
from reprod.recipe.cli import UserError, existing_file

SUFFIX = ".pth"


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler, epoch: int, args: dict[str, Any]
) -> None:
    """Write the state after `epoch` to `path`; raises UserError when it cannot be written."""
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": lr_scheduler.state_dict(),
        "epoch": epoch,
        "args": args,
    }
    save_pickle(content, path)


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler
) -> tuple[int, dict[str, Any]]:
    """Restore the state in `path` -> (epoch it was written after, flags of that run).

    Raises UserError when the file is missing, damaged, no checkpoint, or of another model.
    """
    content = load_pickle(existing_file(path, "checkpoint"))
    missing = {"model", "optimizer", "lr_scheduler", "epoch", "args"} - content.keys()
    if missing:
        raise UserError(f"checkpoint {path} lacks {', '.join(sorted(missing))}: for weights alone use --weights")
    load_state_dict(model, to_arrays(content["model"]), f"the weights in checkpoint {path}")
    optimizer.load_state_dict(content["optimizer"])
    lr_scheduler.load_state_dict(content["lr_scheduler"])
    return content["epoch"], content["args"]
