"""Judge a PaddlePaddle port against a reference that `portproof record` has recorded. PyTorch is not needed.

  portproof judge --port paddle.vision.models:resnet18 resnet18.ref.safetensors

The port is run on the recorded inputs, with the recorded weights, in the recorded modes, and judged as `portproof
align` judges it: the same verdict, and the same place where it departs. Causes are not looked for, since they are tried
on the reference's own modules. Exit status: 0 aligned, 1 not, 2 could not tell.
"""

import argparse

from portproof.backends import backend
from portproof.commands.arguments import add_device_argument, add_factory_argument, add_map_argument, read_map
from portproof.io.cli import ArgumentParser, HelpFormatter
from portproof.io.progress import shown
from portproof.ladder.pairs.named import model_factory
from portproof.recording.file import Recording
from portproof.recording.judge import judge

PROG = "portproof judge"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("recording", metavar="FILE", help="what portproof record wrote")
    add_factory_argument(parser, "--port")
    add_map_argument(parser)
    add("--port-weights", metavar="FILE", help="the port's own weights, compared with those of record --weights")
    add_device_argument(parser, "the port runs")
    add("--mode", choices=("eval", "train", "both"), default="both", help="which of the recorded modes are judged")
    add("--precision", choices=("float64", "float32", "both"), default="both", help="which precisions are judged")
    add(
        "--leave-out",
        action="append",
        metavar="MODULE",
        help="module of the reference whose own values, and those of all in it, are not compared; may be repeated",
    )
    return parser


def main(args: argparse.Namespace) -> int:
    names = read_map(args.map)
    recording = Recording.load(args.recording)
    backend("paddle").device(args.device)
    port = model_factory(args.port, "--port")()
    if args.port_weights:
        backend("paddle").load_weights(port, args.port_weights, "port weights")
    modes = None if args.mode == "both" else (args.mode,)
    precisions = ("float64", "float32") if args.precision == "both" else (args.precision,)
    print(f"{args.port} against {args.recording}, {args.device}", flush=True)
    with shown(PROG):
        leave_out = args.leave_out or ()
        verdict = judge(port, recording, names, bool(args.port_weights), modes, precisions, leave_out, args.device)
    print(verdict, flush=True)
    return verdict.status
