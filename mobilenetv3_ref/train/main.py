"""The training command: `python -m mobilenetv3_ref.train`, alone or under `torchrun`."""

import argparse
import math

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mobilenetv3_ref.data import build_dataset, build_loader, set_epoch
from mobilenetv3_ref.data.loader import DataLoader
from mobilenetv3_ref.device import seed_everything, select_device
from mobilenetv3_ref.models import MODELS, save_weights
from reprod.recipe.arguments import check_args, check_data, check_resumed, get_args_parser
from reprod.recipe.cli import UserError, output_dir, run
from reprod.recipe.log import evaluation_line
from reprod.recipe.seeds import derive_seed

from .checkpoint import SUFFIX, load_checkpoint, save_checkpoint
from .criterion import build_criterion
from .distributed import broadcast_buffers, data_parallel, init_distributed, launched_rank, log, shut_down
from .engine import evaluate, train_one_epoch
from .optimizer import build_optimizer

PROG = "python -m mobilenetv3_ref.train"


def main(args: argparse.Namespace) -> None:
    """Train from epoch 0 or from a checkpoint, evaluate and save after every epoch; or evaluate and stop.

    Writes OUTPUT_DIR/model_EPOCH (weights) and OUTPUT_DIR/checkpoint (the newest whole state). Raises UserError for
    what the user must mend.
    """
    check_args(args)
    rank, local_rank, world_size = launched_rank()
    device = select_device(args.device, local_rank)
    init_distributed(device)
    log(f"seed {args.seed}, {world_size} process(es), global batch size {world_size * args.batch_size}")
    train_loader, val_loader = build_loaders(args, rank, world_size)
    num_classes = len(val_loader.dataset.classes)
    seed_everything(args.seed)
    model = MODELS[args.model](weights=args.weights, num_classes=num_classes, dropout=args.dropout).to(device)
    criterion = build_criterion(args.label_smoothing)
    optimizer, lr_scheduler = build_optimizer(
        model,
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        lr_step_size=args.lr_step_size,
        lr_gamma=args.lr_gamma,
    )
    first_epoch = resume(args, model, optimizer, lr_scheduler) if args.resume else 0
    if train_loader is None:
        log(evaluation_line(None, evaluate(model, criterion, val_loader, device)))
        shut_down()
        return

    out = output_dir(args.output_dir)
    wrapped = data_parallel(model)
    for epoch in range(first_epoch, args.epochs):
        # Seeded by epoch, so that a resumed run draws the dropout that an unbroken one does.
        seed_everything(derive_seed(args.seed, epoch, rank))
        set_epoch(train_loader, epoch)
        train_one_epoch(
            wrapped, criterion, optimizer, train_loader, device, epoch, args.print_freq, args.freeze_norm, log
        )
        lr_scheduler.step()
        broadcast_buffers(model)
        metrics = evaluate(model, criterion, val_loader, device)
        if not math.isfinite(metrics["loss"]):
            raise UserError(f"the loss is {metrics['loss']} in the evaluation of epoch {epoch}: lower --lr")
        log(evaluation_line(epoch, metrics))
        if rank == 0:
            save_weights(model, out / f"model_{epoch}{SUFFIX}")
            save_checkpoint(out / f"checkpoint{SUFFIX}", model, optimizer, lr_scheduler, epoch, vars(args))
    shut_down()  # not in a `finally`: a process that fails must end at once, for the launcher to stop the others


def build_loaders(args: argparse.Namespace, rank: int, world_size: int) -> tuple[DataLoader | None, DataLoader]:
    """The loaders of training (None with --test-only) and validation; raises UserError for data that will not do."""
    share = {"seed": args.seed, "workers": args.workers, "rank": rank, "world_size": world_size}
    val_set = build_dataset(args.data_path, train=False, crop_size=args.val_crop_size, resize_size=args.val_resize_size)
    val_loader = build_loader(val_set, args.batch_size, train=False, **share)
    if args.test_only:
        return None, val_loader
    train_set = build_dataset(args.data_path, train=True, crop_size=args.train_crop_size, seed=args.seed)
    train_loader = build_loader(train_set, args.batch_size, train=True, **share)
    check_data(args, train_set.classes, val_set.classes, min(map(len, train_loader.batch_sampler)))
    return train_loader, val_loader


def resume(args: argparse.Namespace, model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler) -> int:
    """Restore the checkpoint --resume and return the epoch to begin with."""
    epoch, saved = load_checkpoint(args.resume, model, optimizer, lr_scheduler)
    if not args.test_only:
        check_resumed(args, saved, epoch + 1)
    log(f"resumed from {args.resume} at epoch {epoch + 1}")
    return epoch + 1


def command() -> None:
    """Parse the command line and train."""
    args = get_args_parser(PROG, "PyTorch").parse_args()
    run(lambda: main(args), PROG)
