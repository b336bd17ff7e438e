"""Judge any PaddlePaddle port against its PyTorch reference, and say at which module it departs.

  portproof align --ref torchvision.models:resnet18 --port paddle.vision.models:resnet18 --input 4,3,224,224

Both are built by calling what is named, get the same weights, made from --seed so that no fault hides, and are run
forward and backward, in eval and train mode, in float64 and float32. Where names differ the map between them is
proposed and checked with values. Exit status: 0 aligned, 1 not, 2 could not tell.

With --locate-only the whole is not judged. Each module is run alone on both sides, on what the reference's received:
forward, then backward, in eval and in train mode, in float64 and, if nothing departs there, in float32. Exit status:
0 no module departs, 1 one does, 2 could not tell.
"""

import argparse

from portproof import align
from portproof.commands.arguments import add_pair_arguments, load_pair, read_map
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError

PROG = "portproof align"
NOT_LOCATED = "not located: each module alone gives what the reference's gives"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--mode", choices=("eval", "train", "both"), default="both", help="which modes are judged")
    parser.add_argument("--locate-only", action="store_true", help="run each module alone without judging the whole")
    return parser


def main(args: argparse.Namespace) -> int:
    if args.locate_only and args.mode != "both":
        raise UserError("--locate-only looks in both modes: leave --mode out")
    names = read_map(args.map)
    ref, port, inputs, weights = load_pair(args)
    modes = ("eval", "train") if args.mode == "both" else (args.mode,)
    print(f"{args.port} against {args.ref}, {args.device}, seed {args.seed}, {weights} weights", flush=True)
    if args.locate_only:
        from portproof.ladder.pairs.whole import search

        location, how = search(ref, port, inputs, names, weights, args.seed, args.device)
        print(how, *(location.lines() if location else [NOT_LOCATED]), sep="\n")
        return 1 if location else 0
    verdict = align(ref, port, inputs, names=names, weights=weights, modes=modes, seed=args.seed, device=args.device)
    print(verdict)
    return verdict.status
