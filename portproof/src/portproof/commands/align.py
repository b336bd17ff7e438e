"""Judge any PaddlePaddle port against its PyTorch reference, and say at which module it departs.

  python -m portproof --ref torchvision.models:resnet18 --port paddle.vision.models:resnet18 --input 4,3,224,224

Both are built by calling what is named, get the same weights, made from --seed so that no fault hides, and are run
forward and backward, in eval and train mode, in float64 and float32. Where names differ the map between them is
proposed and checked with values. Exit status: 0 aligned, 1 not, 2 could not tell.
"""

import argparse

from portproof import align
from portproof.commands.arguments import add_pair_arguments, load_pair, read_map
from portproof.io.cli import ArgumentParser, HelpFormatter, run

PROG = "portproof"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=f"python -m {PROG}", description=__doc__, formatter_class=HelpFormatter)
    add_pair_arguments(parser, required=True)
    parser.add_argument("--mode", choices=("eval", "train", "both"), default="both", help="which modes are judged")
    return parser


def main(args: argparse.Namespace) -> int:
    names = read_map(args.map)
    ref, port, inputs, weights = load_pair(args)
    modes = ("eval", "train") if args.mode == "both" else (args.mode,)
    print(f"{args.port} against {args.ref}, {args.device}, seed {args.seed}, {weights} weights", flush=True)
    verdict = align(ref, port, inputs, names=names, weights=weights, modes=modes, seed=args.seed, device=args.device)
    print(verdict)
    return verdict.status


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
