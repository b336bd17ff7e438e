"""The flags of `python -m mobilenetv3_paddle.train` and `python -m mobilenetv3_ref.train`: the same, from one place.

Names and defaults follow torchvision's references/classification/train.py where it has the flag.
"""

import argparse

from reprod.recipe.cli import UserError, positive_int

MODEL_NAMES = ("mobilenet_v3_small", "mobilenet_v3_large")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults and keeps the line breaks of the description."""


def get_args_parser(prog: str, framework: str) -> argparse.ArgumentParser:
    """The parser of one side's training command; `framework` only names it in the help text."""
    parser = argparse.ArgumentParser(
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
    add("--epochs", type=int, default=120, help="the number of the last epoch, counted from 0, plus one")
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
    add("--test-only", action="store_true", help="evaluate and stop")
    add("--seed", type=int, default=0, help="of initial weights, order, augmentation and dropout")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raise UserError for values that argparse lets through but training cannot mean."""
    if args.val_resize_size < args.val_crop_size:
        raise UserError(
            f"--val-resize-size {args.val_resize_size} is smaller than --val-crop-size {args.val_crop_size}: "
            "make it at least as large"
        )
    bounds = {
        "workers": (0, float("inf")),
        "epochs": (0, float("inf")),
        "seed": (0, 2**32 - 1),
        "dropout": (0, 1),
        "lr": (0, float("inf")),
        "momentum": (0, 1),
        "weight_decay": (0, float("inf")),
        "lr_gamma": (0, float("inf")),
        "label_smoothing": (0, 1),
    }
    for name, (low, high) in bounds.items():
        value = getattr(args, name)
        if not low <= value <= high:
            raise UserError(f"--{name.replace('_', '-')} {value} is outside {low} to {high}: choose a value in it")
