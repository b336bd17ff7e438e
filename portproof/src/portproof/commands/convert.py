"""Convert the weights of any pair of models between PyTorch and PaddlePaddle, bit for bit.

  portproof convert --ref torchvision.models:resnet18 --port paddle.vision.models:resnet18 \\
      --from torch --to paddle resnet18.pth resnet18.pdparams

Both models are built by calling what is named. Layouts are converted by the type of the layer. Where the names of the
two differ, the map between them is proposed, and confirmed with values on inputs of --input's shape; --map fixes part
of it. Suffixes: .pth or .pt for PyTorch, .pdparams for PaddlePaddle, and .safetensors, which holds the names of the
framework it is from or to. A training checkpoint gives what it calls "model".

Nothing is written unless every weight of the input fits the model on its own side, by name, shape and type, is a
finite number, and fits the model of the other side after the conversion. A file that asks to run code is refused, and
one that has the start of its SHA-256 in its name, as torchvision's have, is checked against it. A batch norm's
num_batches_tracked is left out where the port has none, and 0 on the way back.
"""

import argparse

from portproof.backends import backend
from portproof.commands.arguments import PAIR, add_file_arguments, add_flags, check_files, load_models, read_map
from portproof.compare import DONE, exit_status
from portproof.mapping.conversion import changes, convert_state_dict, key_map, table
from portproof.mapping.links import inverse
from sturdyio.cli import ArgumentParser, HelpFormatter

PROG = "portproof convert"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add_file_arguments(parser, ("torch", "paddle"))
    add_flags(parser, *PAIR, "--seed")
    return parser


def main(args: argparse.Namespace) -> int:
    check_files(args)
    given = read_map(args.map)
    ref, port, inputs = load_models(args)
    arrays = backend(args.source).read_weights(args.input_file)
    names, how = key_map(ref, port, inputs, given, args.seed)
    source, target, keys = ref, port, names
    if args.source == "paddle":
        source, target, keys = port, ref, inverse(names)
    converted = convert_state_dict(arrays, source, target, keys, f"weights {args.input_file}")
    backend(args.target).write_weights(converted, args.output_file)
    print(f"map: {len(names)} tensors, {how}")
    print(table(changes(ref, port, names), "torch", "paddle"))
    print(f"wrote {args.output_file}: {len(converted)} tensors")
    return exit_status(DONE)
