"""Record a reference, so that a port can be judged where PyTorch is not installed, or years later.

  portproof record --ref torchvision.models:resnet18 --input 2,3,64,64 --output resnet18.ref.safetensors
  portproof judge --port paddle.vision.models:resnet18 resnet18.ref.safetensors

An exported graph is judged by the weights that it has, at further sizes, and with what is done to images:

  portproof record --ref my.net:Net --weights net.pth --input 2,3,224,224 --also 1,3,224,224 --also 32,3,224,224
    --images photos --preprocess my.data:prepare --output net.ref.safetensors
  portproof judge --onnx net.onnx net.ref.safetensors

PaddlePaddle is not needed here. The file holds what judging asks of the reference: its structure, weights and inputs,
what it gives in each mode and precision, and what each of its modules gives alone, on its own inputs and upstream
gradients. About how large it will be is said first. The same --seed gives the same bytes. Exit status: 0 written, 2
not.
"""

import argparse
import re

from portproof.backends import backend_imported, backend_of_side
from portproof.commands.arguments import MODES, REPEATED, REQUIRED, add_flags, built, load_given_inputs
from portproof.compare import DONE, exit_status
from portproof.io.process import add_threads_flag, shown
from portproof.ladder.pairs.named import draw_inputs, model_factory, named_function
from portproof.ladder.pairs.pair import Options
from portproof.recording.file import check_name, megabytes
from portproof.recording.images import prepared, read_images
from portproof.recording.record import Recorder
from portproof.report.text import grouped
from sturdyio.cli import ArgumentParser, HelpFormatter, staying

PROG = "portproof record"
UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add_flags(parser, "--ref", "--input", "--seed", "--inputs")
    add("--weights", metavar="FILE", help="the reference's weights, instead of probe weights")
    add_flags(parser, "--device", help="where the reference runs")
    add_threads_flag(parser)
    add_flags(parser, "--mode", help="which modes are recorded")
    alone = "only these, and all in them, are recorded to be run alone"
    add("--modules", action="append", metavar="NAME", help=f"module of the reference: {alone}; may be repeated")
    further = "further inputs, drawn by the seed, at which a graph's outputs are judged in eval mode; of several"
    add("--also", help=f"{further} arguments the shapes are joined by ';' (repeatable)", metavar="SHAPE", **REPEATED)
    add("--images", metavar="FOLDER", help="images, on which a graph's preprocessing is judged; with --preprocess")
    add("--preprocess", metavar="PKG.MOD:FUNCTION", help="makes of a PIL image what the reference takes")
    add("--max-size", type=size, metavar="SIZE", help="write nothing that is larger, such as 100MB")
    add("--output", metavar="FILE", help="what to write, such as net.ref.safetensors", **REQUIRED)
    return parser


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|)", text)
    if not found or not float(found[1]):
        raise ValueError
    return int(float(found[1]) * UNITS[found[2]])


size.__name__ = "size such as 100MB"  # for argparse's error message


def main(args: argparse.Namespace) -> int:
    check_name(args.output)
    with staying():
        factory = model_factory(args.ref, "--ref")
        ref = built(factory, "torch", args.seed)
    inputs = load_given_inputs(args, (backend_imported("torch").name,))
    if args.weights:
        backend_of_side(ref, "torch").load_weights(ref, args.weights, "weights")
    weights = "reference" if args.weights else "probe"
    how = {"seed": args.seed, "device": args.device, "drawn": not args.inputs, "factories": (factory, None)}
    options = Options(weights=weights, modes=MODES[args.mode], **how)
    with shown(PROG), staying():
        also = [draw_inputs(text.split(";"), args.seed, "--also") for text in args.also]
        preprocess = named_function(args.preprocess, "--preprocess") if args.preprocess else None
        images = prepared(read_images(args.images) if args.images else [], preprocess)
        recorder = Recorder(ref, inputs, options, args.modules, also, images)
        about = megabytes(recorder.expected_size) + ("" if args.modules is None else ", less with --modules")
        print(f"{args.ref}, {weights} weights, seed {args.seed}: about {about}", flush=True)
        recording = recorder.recording()
    recording.save(args.output, args.max_size)
    notes = grouped("not run alone, ", recording.header["not_alone"])
    print(f"wrote {args.output}: {megabytes(recording.size)}", *notes, sep="\n")
    return exit_status(DONE)
