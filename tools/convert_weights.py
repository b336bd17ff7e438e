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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

from mobilenetv3_common.arguments import MODEL_NAMES
from mobilenetv3_common.classes import check_state_dict, num_classes_of
from portproof.convert.rules import (
    MINDSPORE_RULES,
    RULES,
    keep,
    mindspore_to_torch,
    paddle_to_torch,
    torch_to_mindspore,
    torch_to_paddle,
)
from portproof.io.ckpt import load_ckpt, save_ckpt
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, existing_file, run
from portproof.io.files import load_safetensors, save_safetensors
from portproof.io.state_dict import check_hash, hash_in_name

PROG = "convert_weights"
Arrays = dict[str, np.ndarray]
SUFFIXES = {
    "torch": (".pth", ".pt", ".safetensors"),
    "paddle": (".pdparams", ".safetensors"),
    "mindspore": (".ckpt", ".safetensors"),
}
PACKAGES = {"torch": "mobilenetv3_ref.models", "paddle": "mobilenetv3_paddle.models"}  # MindSpore has none here


def unchanged(arrays: Mapping[str, np.ndarray], types: Mapping[str, str]) -> Arrays:
    """PyTorch's side of the two tables."""
    return dict(arrays)


TO_TORCH: dict[str, Callable[..., Arrays]] = {
    "torch": unchanged,
    "paddle": paddle_to_torch,
    "mindspore": mindspore_to_torch,
}
FROM_TORCH: dict[str, Callable[..., Arrays]] = {
    "torch": unchanged,
    "paddle": torch_to_paddle,
    "mindspore": torch_to_mindspore,
}


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    required = {"choices": tuple(SUFFIXES), "required": True, "default": argparse.SUPPRESS}
    add = parser.add_argument
    add("input", metavar="INPUT", type=Path, help="weights or checkpoint to read")
    add("output", metavar="OUTPUT", type=Path, help="weights to write; a file of that name is replaced")
    add("--from", dest="source", help="framework that INPUT is from", **required)
    add("--to", dest="target", help="framework that OUTPUT is for: another one", **required)
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raise UserError for what can be seen without opening a file."""
    if args.source == args.target:
        raise UserError(f"--from and --to are both {args.source}: name the two frameworks")
    for path, flag, framework in ((args.input, "--from", args.source), (args.output, "--to", args.target)):
        if path.suffix not in SUFFIXES[framework]:
            raise UserError(
                f"{path} does not end as {framework}'s weights do, {', '.join(SUFFIXES[framework])}: check {flag}"
            )
    existing_file(args.input, "weights")
    if args.output.exists() and args.output.samefile(args.input):
        raise UserError(f"output {args.output} is the input: choose another name")
    if hash_in_name(args.output):  # the converted file will have another one, and would be refused as damaged
        raise UserError(
            f"output {args.output} would carry a wrong hash: choose a name without -{hash_in_name(args.output)}"
        )


def import_packages(frameworks: Iterable[str]) -> dict[str, ModuleType]:
    """The package of each of them that has one; raises UserError for a framework that is not installed."""
    try:
        return {name: importlib.import_module(PACKAGES[name]) for name in frameworks if name in PACKAGES}
    except ImportError as error:
        raise UserError(
            f"PyTorch and both sides' frameworks are needed ({error}): pip install -e '.[align]'"
        ) from error


def build(models: ModuleType, name: str, arrays: Arrays, what: str):
    """One side's model with `arrays` in it; raises UserError unless they fit exactly."""
    model = models.MODELS[name](num_classes=num_classes_of(arrays))
    models.load_state_dict(model, arrays, what)
    return model


def check_mindspore(ref: ModuleType, name: str, types: Mapping[str, str], arrays: Arrays, what: str) -> None:
    """As `build` for MindSpore, which has no package here: its model is the reference's under MindSpore's names."""
    own = ref.weights.to_arrays(ref.MODELS[name](num_classes=num_classes_of(arrays)).state_dict())
    check_state_dict(arrays, torch_to_mindspore(own, types), what)


def read_mindspore(path: Path) -> Arrays:
    check_hash(path)
    return load_safetensors(path) if path.suffix == ".safetensors" else load_ckpt(path)


def save_mindspore(arrays: Arrays, path: Path) -> None:
    (save_safetensors if path.suffix == ".safetensors" else save_ckpt)(arrays, path)


def table(torch_keys: Iterable[str], types: Mapping[str, str], source: str, target: str) -> str:
    """How many tensors of each kind of layer keep or change their name and layout."""
    first, second = sorted((source, target), key=list(SUFFIXES).index)
    lines = [f"{'count':>5}  {'layer':11}  {first:19}  {second:19}  layout"]
    modules = ((types[module], leaf) for module, _, leaf in (key.rpartition(".") for key in torch_keys))
    for (layer, leaf), count in Counter(modules).items():
        rules = {"torch": {leaf: (leaf, keep)}, "paddle": RULES[layer], "mindspore": MINDSPORE_RULES[layer]}
        (name, change), (other, its_change) = (rules[side].get(leaf, ("-", keep)) for side in (first, second))
        layout = "same" if change is its_change else "transposed"
        if "-" in (name, other):  # no place there
            layout = "left out" if target == "mindspore" else "0"
        lines.append(f"{count:>5}  {layer:11}  {name:19}  {other:19}  {layout}")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> None:
    check_args(args)
    packages = import_packages(dict.fromkeys(("torch", args.source, args.target)))
    from portproof.backends import backend

    ref, source, target = (packages.get(framework) for framework in ("torch", args.source, args.target))
    types = backend("torch").layer_types(ref.MODELS[args.model]())

    what = f"weights {args.input}, taken for {args.source}'s {args.model},"
    if source:
        arrays = source.read_weights(args.input)
        build(source, args.model, arrays, what)
    else:
        arrays = read_mindspore(args.input)
        check_mindspore(ref, args.model, types, arrays, what)

    torch_arrays = TO_TORCH[args.source](arrays, types)
    converted = FROM_TORCH[args.target](torch_arrays, types)
    if target:
        target.save_weights(build(target, args.model, converted, "converted weights"), args.output)
    else:
        check_mindspore(ref, args.model, types, converted, "converted weights")
        save_mindspore(converted, args.output)

    print(table(torch_arrays, types, args.source, args.target))
    print(f"wrote {args.output}: {len(converted)} tensors, {len(converted['classifier.3.bias'])} classes")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
