"""Judge a port against a reference that `portproof record` has recorded. PyTorch is not needed.

  portproof judge --port paddle.vision.models:resnet18 resnet18.ref.safetensors

The port, one of PaddlePaddle or of MindSpore, is run on the recorded inputs, with the recorded weights, in the recorded
modes, and judged as `portproof align` judges it: the same verdict, and the same place where it departs. Causes that
take no PyTorch are tried: those of norms, activations, softmax, linear layers, statistics and axes. Exit status: 0
aligned, 1 not, 2 could not tell.
"""

import argparse

from portproof import judge
from portproof.backends import backend_imported, backend_of_side
from portproof.commands.arguments import JUDGED, add_flags, judging_options, read_map
from portproof.compare import exit_status
from portproof.io.process import shown
from portproof.ladder.pairs.named import model_factory
from portproof.recording.file import Recording
from sturdyio.cli import ArgumentParser, HelpFormatter, staying

PROG = "portproof judge"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("recording", metavar="FILE", help="what portproof record wrote")
    add_flags(parser, "--port", "--map")
    add("--port-weights", metavar="FILE", help="the port's own weights, compared with those of record --weights")
    add_flags(parser, "--device", help="where the port runs")
    add_flags(parser, *JUDGED)
    return parser


def main(args: argparse.Namespace) -> int:
    names = read_map(args.map)
    recording = Recording.load(args.recording)
    with staying():
        factory = model_factory(args.port, "--port", of_port=True)
        backend_imported("paddle").device(args.device)
        port = factory()
    if args.port_weights:
        backend_of_side(port, "paddle").load_weights(port, args.port_weights, "port weights")
    options = judging_options(args) | ({"modes": None} if args.mode == "both" else {})
    print(f"{args.port} against {args.recording}, {args.device}", flush=True)
    options |= {"names": names, "own_weights": bool(args.port_weights), "device": args.device}
    options["factory"] = factory
    with shown(PROG), staying():
        verdict = judge(port, recording, **options)
    print(verdict, flush=True)
    return exit_status(verdict)
