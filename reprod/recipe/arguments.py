"""The flags of `python -m mobilenetv3_paddle.train` and `python -m mobilenetv3_ref.train`: the same, from one place.

Names and defaults follow torchvision's references/classification/train.py where it has the flag.
"""

import argparse
import math
from typing import Any

from reprod.recipe.cli import ArgumentParser, UserError, positive_int

MODEL_NAMES = ("mobilenet_v3_small", "mobilenet_v3_large")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults and keeps the line breaks of the description."""


def get_args_parser(prog: str, framework: str) -> argparse.ArgumentParser:
    """The parser of one side's training command; `framework` only names it in the help text."""
    parser = ArgumentParser(
        prog=prog, description=f"Train or evaluate MobileNetV3 with {framework}.", formatter_class=HelpFormatter
    )
    add = parser.add_argument_group("data").add_argument
    add("--data-path", required=True, help="folder with train/ and val/, each one folder a class (lite_data, say)")
    add("--workers", "-j", type=int, default=2, help="loader processes, per training process; 0: none")
    add("--train-crop-size", type=positive_int, default=224, help="pixels")
    add("--val-crop-size", type=positive_int, default=224, help="pixels")
    add("--val-resize-size", type=positive_int, default=256, help="pixels of the shorter side before the crop")

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    add("--weights", metavar="FILE", help="start from these weights (or test them)")
    add("--dropout", type=float, default=0.2, help="probability in the classifier")
    add(
        "--freeze-norm",
        action="store_true",
        help="batch norm in eval mode: training normalizes with the running statistics and leaves them alone",
    )

    add = parser.add_argument_group("optimization").add_argument
    add("--epochs", type=positive_int, default=120, help="in all, those before --resume included")
    add("--batch-size", "-b", type=positive_int, default=32, help="images per process")
    add("--lr", type=float, default=0.1, help="initial learning rate")
    add("--momentum", type=float, default=0.9, help="of SGD")
    add("--weight-decay", "--wd", type=float, default=1e-4, help="L2, added to the gradient")
    add("--lr-step-size", type=positive_int, default=30, help="epochs from one decay of the learning rate to the next")
    add("--lr-gamma", type=float, default=0.1, help="factor of each decay")
    add("--label-smoothing", type=float, default=0.0, help="share of the target spread over all classes")

    add = parser.add_argument_group("run").add_argument
    add("--device", choices=("cpu", "gpu"), default="cpu", help="gpu: one card a process")
    add("--output-dir", default="output", help="where checkpoints go")
    add("--print-freq", type=positive_int, default=10, help="batches from one log line to the next")
    add("--resume", metavar="FILE", help="go on from this checkpoint")
    add("--test-only", action="store_true", help="evaluate --weights or --resume and stop")
    add("--seed", type=int, default=0, help="of initial weights, order, augmentation and dropout")
    return parser


def check_val_sizes(args: argparse.Namespace) -> None:
    """Raise UserError when the resized image would be smaller than the crop."""
    if args.val_resize_size < args.val_crop_size:
        raise UserError(
            f"--val-resize-size {args.val_resize_size} is smaller than --val-crop-size {args.val_crop_size}: "
            "make it at least as large"
        )


def check_args(args: argparse.Namespace) -> None:
    """Raise UserError for values that argparse lets through but training cannot mean."""
    check_val_sizes(args)
    bounds = {
        "workers": (0, math.inf),
        "seed": (0, 2**32 - 1),
        "dropout": (0, 1),
        "lr": (0, math.inf),
        "momentum": (0, 1),
        "weight_decay": (0, math.inf),
        "lr_gamma": (0, math.inf),
        "label_smoothing": (0, 1),
    }
    for name, (low, high) in bounds.items():
        value = getattr(args, name)
        if not (low <= value <= high and math.isfinite(value)):
            raise UserError(f"{flag(name)} {value} is outside {low} to {high}: choose a value in it")
    if args.resume and args.weights:
        raise UserError("--resume and --weights both name the weights to start from: give one of them")
    if args.test_only and not (args.resume or args.weights):
        raise UserError("--test-only has nothing to test: name a file with --weights or --resume")


def check_resumed(args: argparse.Namespace, saved: dict[str, Any], first_epoch: int) -> None:
    """Raise UserError when the checkpoint, whose run had the flags `saved`, leaves nothing to do or contradicts `args`.

    The optimizer and its schedule come out of the checkpoint with their settings, so another setting would do nothing.
    """
    if first_epoch >= args.epochs:
        raise UserError(f"checkpoint {args.resume} already has {first_epoch} epochs: raise --epochs {args.epochs}")
    for name in ("lr", "momentum", "weight_decay", "lr_step_size", "lr_gamma"):
        if getattr(args, name) != saved[name]:
            raise UserError(
                f"{flag(name)} {getattr(args, name)}: checkpoint {args.resume} was trained with {saved[name]}; "
                "resume with the same, or start anew from it with --weights"
            )


def check_data(args: argparse.Namespace, train_classes: list[str], val_classes: list[str], smallest_batch: int) -> None:
    """Raise UserError when train/ and val/ differ in their classes, or batch norm cannot train on these batches."""
    alone = sorted(set(train_classes) ^ set(val_classes))
    if alone:
        folder = "train" if alone[0] in train_classes else "val"
        raise UserError(
            f"data folder {args.data_path}: {len(alone)} class folders are not in both train and val (first: "
            f"{alone[0]}, only in {folder}): give both the same"
        )
    if smallest_batch == 1 and args.train_crop_size <= 32 and not args.freeze_norm:  # 1 x 1 pixels after stride 32
        raise UserError(
            f"--train-crop-size {args.train_crop_size} and a batch of one image leave batch norm one value per "
            "channel: choose a larger crop, another --batch-size, or --freeze-norm"
        )


def flag(name: str) -> str:
    """The flag that is stored as `name`."""
    return f"--{name.replace('_', '-')}"
