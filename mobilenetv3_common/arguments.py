"""The flags of `python -m mobilenetv3_paddle.train` and `python -m mobilenetv3_ref.train`: the same, from one place.

Names and defaults follow torchvision's references/classification/train.py where it has the flag.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, seed, whole_number

PIXELS = whole_number(1, 2048)  # of a side: of more no activations fit into memory
MODEL_NAMES = ("mobilenet_v3_small", "mobilenet_v3_large")
NO_CHANNELS_LAST = "--channels-last: PaddlePaddle is slower with it (docs/en/benchmark.md); leave it out"


def get_args_parser(prog: str, framework: str) -> argparse.ArgumentParser:
    """The parser of one side's training command; `framework` only names it in the help text."""
    parser = ArgumentParser(
        prog=prog, description=f"Train or evaluate MobileNetV3 with {framework}.", formatter_class=HelpFormatter
    )
    add = parser.add_argument_group("data").add_argument
    add("--data-path", required=True, help="folder with train/ and val/, each one folder a class (lite_data, say)")
    add("--workers", "-j", type=int, default=2, help="loader processes, per training process; 0: none")
    add("--train-crop-size", type=PIXELS, default=224, help="pixels")
    add("--val-crop-size", type=PIXELS, default=224, help="pixels")
    add("--val-resize-size", type=PIXELS, default=256, help="pixels of the shorter side before the crop")
    add("--train-crop-scale", type=float, default=0.08, help="smallest share of an image that a training crop has")
    add("--hflip-prob", type=float, default=0.5, help="probability that a training image is flipped")
    add("--auto-augment", choices=("imagenet",), help="AutoAugment's policy for training images")
    add("--random-erase", type=float, default=0.0, help="probability that a part of a training image is erased")
    add("--mixup-alpha", type=float, default=0.0, help="of mixup's Beta distribution; 0: no mixup")
    add("--cutmix-alpha", type=float, default=0.0, help="of CutMix's; with both, each batch takes one of the two")

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    add("--weights", metavar="FILE", help="start from these weights (or test them)")
    add("--finetune", metavar="FILE", help="start from weights whose number of classes may be another")
    add("--shared-init", action="store_true", help="initial weights from a draw that is the same in both frameworks")
    add("--dropout", type=float, default=0.2, help="probability in the classifier")
    add(
        "--freeze-norm",
        action="store_true",
        help="batch norm in eval mode: training normalizes with the running statistics and leaves them alone",
    )
    add("--sync-bn", action="store_true", help="batch norm over the batches of all processes as one")
    add("--model-ema", action="store_true", help="evaluate and save the moving average of the weights as well")
    add("--model-ema-steps", type=positive_int, default=32, help="optimizer steps from one averaging to the next")
    add("--model-ema-decay", type=float, default=0.99998, help="share of the old average, for 1 image a step")

    add = parser.add_argument_group("optimization").add_argument
    add("--epochs", type=positive_int, default=120, help="in all, those before --resume included")
    add("--batch-size", "-b", type=positive_int, default=32, help="images per process")
    add("--gradient-accumulation-steps", type=positive_int, default=1, help="batches to one step of the optimizer")
    add("--opt", choices=("sgd", "sgd_nesterov", "rmsprop", "adamw"), default="sgd", help="the optimizer")
    add("--lr", type=float, default=0.1, help="initial learning rate")
    add("--momentum", type=float, default=0.9, help="of SGD and RMSprop")
    add("--weight-decay", "--wd", type=float, default=1e-4, help="L2, added to the gradient; decoupled in AdamW")
    add("--norm-weight-decay", type=float, help="of normalization layers (without the flag: as --weight-decay)")
    add("--bias-weight-decay", type=float, help="of biases (without the flag: as --weight-decay)")
    add("--clip-grad-norm", type=float, help="largest norm of all gradients together")
    add("--lr-scheduler", choices=("steplr", "cosineannealinglr", "exponentiallr"), default="steplr", help="by epochs")
    add("--lr-step-size", type=positive_int, default=30, help="epochs from one decay of steplr to the next")
    add("--lr-gamma", type=float, default=0.1, help="factor of each decay of steplr or exponentiallr")
    add("--lr-min", type=float, default=0.0, help="where cosineannealinglr ends")
    add("--lr-warmup-epochs", type=int, default=0, help="epochs before the schedule begins")
    add("--lr-warmup-method", choices=("constant", "linear"), default="constant", help="a low rate, or a rising one")
    add("--lr-warmup-decay", type=float, default=0.01, help="share of --lr that the warm-up begins with")
    add("--label-smoothing", type=float, default=0.0, help="share of the target spread over all classes")
    add("--amp", choices=("float16", "bfloat16"), help="mixed precision (float16 on cards only)")
    add("--channels-last", action="store_true", help="images in memory as (N, H, W, C): faster, with PyTorch only")

    add = parser.add_argument_group("run").add_argument
    add("--device", choices=("cpu", "gpu"), default="cpu", help="gpu: one card a process")
    add("--output-dir", default="output", help="where checkpoints go")
    add("--print-freq", type=positive_int, default=10, help="batches from one log line to the next")
    add("--checkpoint-freq", type=int, default=0, help="optimizer steps between checkpoints; 0: one an epoch")
    add("--event-log", action="store_true", help="write curves for VisualDL (paddle) or TensorBoard (torch), too")
    add("--resume", metavar="FILE", help="go on from this checkpoint")
    add("--test-only", action="store_true", help="evaluate --weights or --resume on val/ and stop")
    add("--seed", type=seed, default=0, help="of initial weights, order, augmentation and dropout")
    return parser


def check_val_sizes(args: argparse.Namespace) -> None:
    """Raise UserError when the resized image would be smaller than the crop."""
    if args.val_resize_size < args.val_crop_size:
        raise UserError(
            f"--val-resize-size {args.val_resize_size} is smaller than --val-crop-size {args.val_crop_size}: "
            "make it at least as large"
        )


# Flags whose change would leave a resumed run what it is, or that say where things are.
FREE_AT_RESUME = {
    *("data_path", "workers", "val_crop_size", "val_resize_size", "weights", "finetune", "shared_init", "device"),
    *("output_dir", "print_freq", "checkpoint_freq", "event_log", "resume", "test_only"),
}


def parse_args(prog: str, framework: str, flags: Sequence[str] | None = None) -> argparse.Namespace:
    """The `flags`, or those of the command line; raises UserError for values that training cannot mean.

    All that flags alone can have wrong is found here.
    """
    args = get_args_parser(prog, framework).parse_args(flags)
    check_args(args, framework)
    return args


def check_args(args: argparse.Namespace, framework: str) -> None:
    """Raise UserError for values that argparse lets through but training cannot mean."""
    check_val_sizes(args)
    share, unbounded = (0, 1), (0, math.inf)
    bounds = {
        **dict.fromkeys(("workers", "checkpoint_freq", "lr_warmup_epochs", "mixup_alpha", "cutmix_alpha"), unbounded),
        **dict.fromkeys(("lr", "lr_min", "lr_gamma", "weight_decay"), unbounded),
        **dict.fromkeys(("norm_weight_decay", "bias_weight_decay", "clip_grad_norm"), unbounded),
        **dict.fromkeys(("dropout", "hflip_prob", "random_erase", "train_crop_scale", "label_smoothing"), share),
        **dict.fromkeys(("momentum", "model_ema_decay", "lr_warmup_decay"), share),
    }
    for name, (low, high) in bounds.items():
        value = getattr(args, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise UserError(f"{flag(name)} {value} is outside {low} to {high}: choose a value in it")
    if args.lr_warmup_epochs >= args.epochs:
        raise UserError(
            f"--lr-warmup-epochs {args.lr_warmup_epochs} leaves none of --epochs {args.epochs} for the schedule: "
            "make it smaller"
        )
    if args.opt == "sgd_nesterov" and args.momentum == 0:
        raise UserError("--opt sgd_nesterov without --momentum is --opt sgd: choose that, or a momentum above 0")
    if args.lr_warmup_epochs and args.lr_warmup_method == "linear" and args.lr_warmup_decay == 0:
        raise UserError("--lr-warmup-decay 0 has nothing to rise from: choose a share above 0 for a linear warm-up")
    if args.amp == "float16" and args.device == "cpu":
        raise UserError("--amp float16 needs --device gpu: on the CPU use bfloat16")
    if args.amp and args.device == "cpu" and framework == "PaddlePaddle":  # its autocast and scaler do nothing there
        raise UserError(f"--amp {args.amp}: PaddlePaddle has no mixed precision on the CPU; use --device gpu")
    if args.channels_last and framework == "PaddlePaddle":
        raise UserError(NO_CHANNELS_LAST)
    starts = [flag(name) for name in ("weights", "finetune", "resume") if getattr(args, name)]
    if len(starts) > 1:
        raise UserError(f"{' and '.join(starts)} both name the weights to start from: give one of them")
    if args.test_only and not (args.resume or args.weights):
        raise UserError("--test-only has nothing to test: name a file with --weights or --resume")


def check_resumed(args: argparse.Namespace, saved: dict[str, Any], world_size: int, data: dict[str, int | str]) -> None:
    """Raise UserError when the checkpoint with the content `saved` leaves nothing to do, or is of another run.

    What is resumed ends as if it had never been interrupted, so all that shapes the run must be as it was, also the
    training images `data`, see `describe_images`; epochs may be added where nothing depends on their number.
    """
    if saved["epoch"] >= args.epochs:
        raise UserError(f"checkpoint {args.resume} already has {saved['epoch']} epochs: raise --epochs {args.epochs}")
    if world_size != saved["world_size"]:
        raise UserError(
            f"{world_size} process(es): checkpoint {args.resume} was trained with {saved['world_size']}, whose batches "
            "were others; resume with as many, or start anew from it with --weights"
        )
    if data != saved["data"]:
        here, there = (f"{each['images']} images in {each['classes']} classes" for each in (data, saved["data"]))
        raise UserError(
            f"data folder {args.data_path} has {here} to train on: checkpoint {args.resume} was trained on {there}"
            f"{' with other names' if here == there else ''}, and an epoch of both would take some images twice; "
            "resume with the same, or start anew from it with --weights"
        )
    free = FREE_AT_RESUME if args.lr_scheduler == "cosineannealinglr" or args.model_ema else {*FREE_AT_RESUME, "epochs"}
    defaults = vars(get_args_parser("", "").parse_args(["--data-path="]))  # what runs had before there was a flag
    for name, value in vars(args).items():
        before = saved["args"].get(name, defaults[name])
        if name not in free and value != before:
            raise UserError(
                f"{flag(name)} {value}: checkpoint {args.resume} was trained with {before}; "
                "resume with the same, or start anew from it with --weights"
            )


@dataclass(frozen=True)
class Schedule:
    """The flags that say how the learning rate changes, under their own names."""

    epochs: int = 1
    lr_scheduler: str = "steplr"
    lr_step_size: int = 30
    lr_gamma: float = 0.1
    lr_min: float = 0.0
    lr_warmup_epochs: int = 0
    lr_warmup_method: str = "constant"
    lr_warmup_decay: float = 0.01


def optimizer_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `build_optimizer`."""
    names = (
        *("opt", "lr", "momentum", "weight_decay", "norm_weight_decay", "bias_weight_decay", "epochs", "lr_scheduler"),
        *("lr_step_size", "lr_gamma", "lr_min", "lr_warmup_epochs", "lr_warmup_method", "lr_warmup_decay"),
    )
    return {name: getattr(args, name) for name in names}


def augmentation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `build_dataset` that only training has."""
    return {
        "auto_augment": args.auto_augment,
        "random_erase": args.random_erase,
        "crop_scale": args.train_crop_scale,
        "hflip_prob": args.hflip_prob,
    }


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
