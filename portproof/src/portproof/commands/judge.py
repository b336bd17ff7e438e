"""Judge a port, or an exported graph, against a reference that `portproof record` has recorded, without PyTorch.

  portproof judge --port paddle.vision.models:resnet18 resnet18.ref.safetensors

The port, one of PaddlePaddle or of MindSpore, is run on the recorded inputs, with the recorded weights, in the recorded
modes, and judged as `portproof align` judges it: the same verdict, and the same place where it departs. Causes that
take no PyTorch are tried: those of norms, activations, softmax, linear layers, statistics and axes.

  portproof judge --onnx resnet18.onnx resnet18.ref.safetensors

A graph, of any exporter, is judged without PaddlePaddle, too: evaluated in float64 with every module searched in it by
value, and run in ONNX Runtime at the recorded sizes. The recording holds the graph's weights: record --weights. With
--preprocessing a JSON of resize, crop, interpolation, order, scale, mean and std is judged on the recorded images. A
graph with operators that onnx cannot evaluate is refused; --engine-only judges what ONNX Runtime makes of it.

Exit status: 0 aligned, 1 not, 2 could not tell.
"""

import argparse

from portproof import judge
from portproof.backends import backend_imported, backend_of_side
from portproof.commands.arguments import JUDGED, add_flags, judging_options, read_map
from portproof.commands.outcome import Outcome, add_outcome_flags
from portproof.io.process import add_threads_flag, proving, shown
from portproof.ladder.pairs.named import model_factory
from portproof.ladder.pairs.whole import AlignVerdict
from portproof.recording.file import Recording
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, staying, user_code

PROG = "portproof judge"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("recording", metavar="FILE", help="what portproof record wrote")
    add_flags(parser, "--port", required=False, default=None)
    add("--onnx", metavar="MODEL.onnx", help="an exported graph instead of --port")
    add("--preprocessing", metavar="FILE.json", help="what is done to images before the graph; with --onnx")
    engine = parser.add_mutually_exclusive_group().add_argument
    engine("--engine", choices=("onnxruntime", "none"), default="onnxruntime", help="what runs the graph; with --onnx")
    engine("--engine-only", action="store_true", help="judge what the engine makes of the graph alone; with --onnx")
    add_flags(parser, "--map")
    add("--port-weights", metavar="FILE", help="the port's own weights, compared with those of record --weights")
    add_flags(parser, "--device", help="where the port runs")
    add_threads_flag(parser)
    add_flags(parser, *JUDGED)
    add_outcome_flags(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    if bool(args.port) == bool(args.onnx):
        raise UserError("give one of --port, a model, and --onnx, an exported graph")
    outcome = Outcome(args, PROG, args.port or args.onnx)
    verdict = _judge_graph(args, outcome) if args.onnx else _judge_port(args, outcome)
    outcome.add(verdict, verdict.report(args.verbose))
    return outcome.end()


def _judge_port(args: argparse.Namespace, outcome: Outcome) -> AlignVerdict:
    if args.preprocessing:
        raise UserError("--preprocessing goes with --onnx: a port's is judged by ladder.data")
    names = read_map(args.map)
    recording = Recording.load(args.recording)
    with staying():
        factory = model_factory(args.port, "--port", of_port=True)
        backend_imported("paddle").device(args.device)
        port = factory()
    if args.port_weights:
        backend_of_side(port, "paddle").load_weights(port, args.port_weights, "port weights")
    options = judging_options(args) | ({"modes": None} if args.mode == "both" else {})
    outcome.say(f"{args.port} against {args.recording}, {args.device}")
    options |= {"names": names, "own_weights": bool(args.port_weights), "device": args.device}
    options["factory"] = factory
    with shown(PROG), staying():
        return judge(port, recording, **options)


def _judge_graph(args: argparse.Namespace, outcome: Outcome) -> AlignVerdict:
    recording = Recording.load(args.recording)
    outcome.say(f"{args.onnx} against {args.recording}")
    from portproof.exported.judge import judge as judged

    with shown(PROG), user_code(), proving():
        engine = args.engine == "onnxruntime"
        return judged(args.onnx, recording.model(), args.preprocessing, engine, not args.engine_only)
