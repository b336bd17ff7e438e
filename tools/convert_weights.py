"""Convert weights between PyTorch, PaddlePaddle and MindSpore, bit for bit; torchvision's official are PyTorch's.

  python tools/convert_weights.py --from torch --to paddle mobilenet_v3_small-047dcff4.pth mobilenet_v3_small.pdparams
  python tools/convert_weights.py --from paddle --to torch output/model_119.pdparams model_119.pth
  python tools/convert_weights.py --from torch --to mindspore mobilenet_v3_small.pth mobilenet_v3_small.ckpt

Suffixes: PyTorch's weights are .pth or .pt, PaddlePaddle's .pdparams, MindSpore's .ckpt, and any may be .safetensors,
which holds the names of the framework it is from or to. A training checkpoint of this project gives its model. The
number of classes is the file's. MindSpore itself is not needed.

Nothing is written unless every weight of the input fits the model on its own side, by name, shape and type, is a
finite number, and fits the model of the other side after the conversion. A file that asks to run code is refused, and
one that has the start of its SHA-256 in its name, as torchvision's have, is checked against it.

MindSpore's batch norm does not count its batches: num_batches_tracked, which training and inference with a momentum
never read, is left out on the way there, and is 0 on the way back. No other bit is lost on any way there and back.
"""

import argparse
import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

from mobilenetv3_common.arguments import MODEL_NAMES
from mobilenetv3_common.classes import check_state_dict, num_classes_of
from portproof.commands.arguments import add_file_arguments, check_files
from portproof.convert.rules import MINDSPORE_RULES, RULES, identity, mindspore_to_torch, torch_to_mindspore
from portproof.io.ckpt import load_ckpt, save_ckpt
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run
from sturdyio.files import load_safetensors, save_safetensors
from sturdyio.state_dict import check_hash

PROG = "convert_weights"
Arrays = dict[str, np.ndarray]
FRAMEWORKS = ("torch", "paddle", "mindspore")
PACKAGES = {"torch": "mobilenetv3_ref.models", "paddle": "mobilenetv3_paddle.models"}  # MindSpore has none here


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add_file_arguments(parser, FRAMEWORKS)
    parser.add_argument("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    return parser


def import_packages(frameworks: Iterable[str]) -> dict[str, ModuleType]:
    """The package of each of them that has one; raises UserError for a framework that is not installed."""
    try:
        return {name: importlib.import_module(PACKAGES[name]) for name in frameworks if name in PACKAGES}
    except ImportError as error:
        raise UserError(
            f"PyTorch and both sides' frameworks are needed ({error}): pip install -e '.[align]'"
        ) from error


def read(framework: str, path: Path) -> Arrays:
    from portproof.backends import backend

    if framework in PACKAGES:
        return backend(framework).read_weights(path)
    check_hash(path)
    return load_safetensors(path) if path.suffix == ".safetensors" else load_ckpt(path)


def write(framework: str, arrays: Arrays, path: Path) -> None:
    from portproof.backends import backend

    if framework in PACKAGES:
        backend(framework).write_weights(arrays, path)
    else:
        (save_safetensors if path.suffix == ".safetensors" else save_ckpt)(arrays, path)


def changes(
    torch_keys: Iterable[str], types: Mapping[str, str], first: str, second: str, target: str
) -> Iterator[tuple[str, str, str, str]]:
    """(layer, name in `first`, name in `second`, what becomes of the layout) of every tensor."""
    for key in torch_keys:
        module, _, leaf = key.rpartition(".")
        layer = types[module]
        rules = {"torch": {leaf: (leaf, identity)}, "paddle": RULES[layer], "mindspore": MINDSPORE_RULES[layer]}
        (name, change), (other, its_change) = (rules[side].get(leaf, ("-", identity)) for side in (first, second))
        layout = "same" if change is its_change else "transposed"
        if "-" in (name, other):  # no place there
            layout = "left out" if target == "mindspore" else "0"
        yield layer, name, other, layout


def main(args: argparse.Namespace) -> None:
    check_files(args)
    packages = import_packages(dict.fromkeys(("torch", args.source, args.target)))
    from portproof.backends import backend
    from portproof.mapping.conversion import convert_state_dict, table

    what = f"weights {args.input_file}, taken for {args.source}'s {args.model},"
    arrays = read(args.source, args.input_file)
    classes = num_classes_of(arrays)
    models = {name: package.MODELS[args.model](num_classes=classes) for name, package in packages.items()}
    ref = models["torch"]
    types = backend("torch").layers.types(ref)
    # MindSpore has no package here: its model is the reference's under MindSpore's names.
    mindspore = torch_to_mindspore(backend("torch").state_arrays(ref), types)
    if args.source == "mindspore":
        check_state_dict(arrays, mindspore, what)
        arrays = mindspore_to_torch(arrays, types)
    converted = convert_state_dict(arrays, models.get(args.source, ref), models.get(args.target, ref), what=what)
    if args.target == "mindspore":
        converted = torch_to_mindspore(converted, types)
        check_state_dict(converted, mindspore, "converted weights")
    write(args.target, converted, args.output_file)

    sides = sorted((args.source, args.target), key=FRAMEWORKS.index)
    print(table(changes(ref.state_dict(), types, *sides, args.target), *sides))
    print(f"wrote {args.output_file}: {len(converted)} tensors, {classes} classes")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
