"""The training command: `python -m mobilenetv3_ref.train`, alone or under `torchrun`."""

import argparse

from mobilenetv3_ref.data import build_dataset, build_loader, set_epoch
from mobilenetv3_ref.device import seed_everything, select_device
from mobilenetv3_ref.models import MODELS, save_weights
from reprod.recipe.arguments import check_args, get_args_parser
from reprod.recipe.cli import UserError, output_dir, run
from reprod.recipe.log import evaluation_line
from reprod.recipe.seeds import derive_seed

from .checkpoint import SUFFIX, load_checkpoint, save_checkpoint
from .criterion import build_criterion
from .distributed import broadcast_buffers, data_parallel, init_distributed, launched_rank, shut_down
from .engine import evaluate, train_one_epoch
from .optimizer import build_optimizer

PROG = "python -m mobilenetv3_ref.train"


def main(args: argparse.Namespace) -> None:
    """Train from epoch 0 or from a checkpoint, evaluate and save after every epoch; or evaluate and stop.

    Writes OUTPUT_DIR/checkpoint (the newest whole state) and OUTPUT_DIR/model_EPOCH (weights). Raises UserError for
    what the user must mend.
    """
    check_args(args)
    rank, local_rank, world_size = launched_rank()
    device = select_device(args.device, local_rank)
    init_distributed(device)
    try:
        train(args, device, rank, world_size)
    finally:
        shut_down()


def train(args: argparse.Namespace, device, rank: int, world_size: int) -> None:
    """`main` on the device and in the group of processes that it has prepared."""

    def log(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    log(f"seed {args.seed}, {world_size} process(es), global batch size {world_size * args.batch_size}")
    share = {"seed": args.seed, "workers": args.workers, "rank": rank, "world_size": world_size}
    val_set = build_dataset(args.data_path, train=False, crop_size=args.val_crop_size, resize_size=args.val_resize_size)
    val_loader = build_loader(val_set, args.batch_size, train=False, **share)
    seed_everything(args.seed)
    model = MODELS[args.model](weights=args.weights, num_classes=len(val_set.classes), dropout=args.dropout).to(device)
    criterion = build_criterion(args.label_smoothing)
    optimizer, lr_scheduler = build_optimizer(
        model,
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        lr_step_size=args.lr_step_size,
        lr_gamma=args.lr_gamma,
    )
    first_epoch = 0
    if args.resume:
        first_epoch = load_checkpoint(args.resume, model, optimizer, lr_scheduler)[0] + 1
        log(f"resumed from {args.resume} at epoch {first_epoch}")
    if args.test_only:
        log(evaluation_line(None, evaluate(model, criterion, val_loader, device)))
        return

    out = output_dir(args.output_dir)
    train_set = build_dataset(args.data_path, train=True, crop_size=args.train_crop_size, seed=args.seed)
    if train_set.classes != val_set.classes:
        raise UserError(f"{args.data_path}: train and val hold different class folders: make them the same")
    train_loader = build_loader(train_set, args.batch_size, train=True, **share)
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
        log(evaluation_line(epoch, evaluate(model, criterion, val_loader, device)))
        if rank == 0:
            save_checkpoint(out / f"checkpoint{SUFFIX}", model, optimizer, lr_scheduler, epoch, vars(args))
            save_weights(model, out / f"model_{epoch}{SUFFIX}")


def command() -> None:
    """Parse the command line and train."""
    args = get_args_parser(PROG, "PyTorch").parse_args()
    run(lambda: main(args), PROG)
