"""The training command: `python -m mobilenetv3_ref.train`, alone or under `torchrun`."""

import argparse

import torch
from torch import nn

from mobilenetv3_common.arguments import augmentation_options, check_data, optimizer_options, parse_args
from mobilenetv3_common.classes import num_classes_of
from mobilenetv3_common.log import evaluation_line
from mobilenetv3_common.preemption import stop_request
from mobilenetv3_ref.data import ImageFolder, build_dataset, build_loader
from mobilenetv3_ref.data.loader import DataLoader
from mobilenetv3_ref.device import seed_everything, select_device
from mobilenetv3_ref.models import MODELS, load_finetune, read_weights, shared_init
from sturdyio.cli import run

from .amp import Amp
from .checkpoint import TrainingState
from .criterion import build_criterion
from .distributed import convert_sync_batchnorm, init_distributed, launched_rank, log, shut_down
from .ema import ModelEma, ema_decay
from .engine import evaluate
from .optimizer import build_optimizer
from .trainer import Trainer

PROG = "python -m mobilenetv3_ref.train"


def main(args: argparse.Namespace) -> None:
    """Train from the beginning or from a checkpoint, evaluate and save after every epoch; or evaluate and stop.

    Writes to OUTPUT_DIR model_EPOCH (weights), model_ema_EPOCH (averaged ones), checkpoint (the newest whole state) and
    metrics.jsonl. Raises UserError for what the user must mend, Stopped once SIGTERM has come and all is saved.
    """
    rank, local_rank, world_size = launched_rank()
    device = select_device(args.device, local_rank)
    init_distributed(device)
    log(f"seed {args.seed}, {world_size} process(es), global batch size {world_size * args.batch_size}")
    criterion = build_criterion(args.label_smoothing)
    if args.test_only:
        num_classes = num_classes_of(read_weights(args.resume or args.weights))
        model = build_model(args, num_classes).to(device)
        _, val_loader = build_loaders(args, rank, world_size, num_classes)
        log(evaluation_line(None, evaluate(model, criterion, val_loader, device)))
    else:
        train_loader, val_loader = build_loaders(args, rank, world_size)
        assert train_loader is not None
        model = build_model(args, len(val_loader.dataset.classes)).to(device)
        if args.sync_bn:
            model = convert_sync_batchnorm(model)
        optimizer, lr_scheduler = build_optimizer(model, **optimizer_options(args))
        state = TrainingState(model, optimizer, lr_scheduler, Amp(args.amp, device), build_ema(args, model, world_size))
        with stop_request() as stop:
            Trainer(args, state, criterion, train_loader, val_loader, device, stop).train()
    shut_down()  # not in a `finally`: a process that fails must end at once, for the launcher to stop the others


def build_loaders(
    args: argparse.Namespace, rank: int, world_size: int, num_classes: int | None = None
) -> tuple[DataLoader | None, DataLoader]:
    """The loaders of training (None with --test-only) and validation; raises UserError for data that will not do.

    `num_classes` is that of the weights to test, with --test-only: the validation labels are theirs.
    """
    share = {"seed": args.seed, "workers": args.workers, "rank": rank, "world_size": world_size}
    sizes = {"crop_size": args.val_crop_size, "resize_size": args.val_resize_size}
    val_set = build_dataset(args.data_path, train=False, num_classes=num_classes, **sizes)
    log_empty_folders(val_set)
    val_loader = build_loader(val_set, args.batch_size, train=False, **share)
    if args.test_only:
        return None, val_loader
    train_set = build_dataset(
        args.data_path, train=True, crop_size=args.train_crop_size, seed=args.seed, **augmentation_options(args)
    )
    log_empty_folders(train_set)
    train_loader = build_loader(train_set, args.batch_size, train=True, **share)
    check_data(args, train_set.classes, val_set.classes, min(map(len, train_loader.batch_sampler)))
    return train_loader, val_loader


def log_empty_folders(dataset: ImageFolder) -> None:
    """Say how many class folders have no images, which may be where the classes are ImageNet's 1000."""
    empty = len(dataset.classes) - len(set(dataset.targets))
    if empty:
        log(f"data folder {dataset.root}: {empty} of {len(dataset.classes)} class folders have no images")


def build_model(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """The model with the weights to start from or to test; raises UserError for weights that do not fit."""
    seed_everything(args.seed)
    weights = args.resume if args.test_only and args.resume else args.weights
    model = MODELS[args.model](weights=weights, num_classes=num_classes, dropout=args.dropout)
    if args.shared_init and not weights:
        shared_init(model, args.seed)
    if args.finetune:
        fresh = load_finetune(model, args.finetune)
        log(f"finetuning {args.finetune}; from their initial draw: {', '.join(fresh) or 'none'}")
    if args.channels_last:
        model.to(memory_format=torch.channels_last)  # its convolutions give the same layout, whatever they get
    return model


def build_ema(args: argparse.Namespace, model: nn.Module, world_size: int) -> ModelEma | None:
    """The average of the model's weights, if --model-ema asks for it."""
    if not args.model_ema:
        return None
    images = args.batch_size * args.gradient_accumulation_steps
    return ModelEma(model, ema_decay(args.model_ema_decay, world_size, images, args.model_ema_steps, args.epochs))


def command() -> None:
    """Parse the command line and train."""
    run(lambda: main(parse_args(PROG, "PyTorch")), PROG)
