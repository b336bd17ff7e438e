"""Convert weights from PyTorch to PaddlePaddle or back, bit for bit; torchvision's official weights are PyTorch's.

  python tools/convert_weights.py --from torch --to paddle mobilenet_v3_small-047dcff4.pth mobilenet_v3_small.pdparams
  python tools/convert_weights.py --from paddle --to torch output/model_119.pdparams model_119.pth

Suffixes: PyTorch's weights are .pth or .pt, PaddlePaddle's .pdparams, and either may be .safetensors, which holds the
names of the framework it is from or to. A training checkpoint gives its model. The number of classes is the file's.

Nothing is written unless every weight of the input fits the model on its own side, by name, shape and type, is a
finite number, and fits the model of the other side after the conversion. A file that asks to run code is refused, and
one that has the start of its SHA-256 in its name, as torchvision's have, is checked against it.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

from reprod.align.convert import RULES, keep, paddle_to_torch, torch_to_paddle
from reprod.recipe.arguments import MODEL_NAMES, HelpFormatter
from reprod.recipe.cli import ArgumentParser, UserError, existing_file, run
from reprod.recipe.state_dict import hash_in_name, num_classes_of

PROG = "convert_weights"
SUFFIXES = {"torch": (".pth", ".pt", ".safetensors"), "paddle": (".pdparams", ".safetensors")}


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    required = {"choices": tuple(SUFFIXES), "required": True, "default": argparse.SUPPRESS}
    add = parser.add_argument
    add("input", metavar="INPUT", type=Path, help="weights or checkpoint to read")
    add("output", metavar="OUTPUT", type=Path, help="weights to write; a file of that name is replaced")
    add("--from", dest="source", help="framework that INPUT is from", **required)
    add("--to", dest="target", help="framework that OUTPUT is for: the other one", **required)
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


def build(models: ModuleType, name: str, arrays: Mapping[str, np.ndarray], what: str):
    """One side's model with `arrays` in it; raises UserError unless they fit exactly."""
    model = models.MODELS[name](num_classes=num_classes_of(arrays))
    models.load_state_dict(model, arrays, what)
    return model


def table(torch_keys: Iterable[str], types: Mapping[str, str]) -> str:
    """How many tensors of each kind of layer keep or change their name and layout."""
    modules = ((types[module], leaf) for module, _, leaf in (key.rpartition(".") for key in torch_keys))
    lines = [f"{'count':>5}  {'layer':11}  {'torch':19}  {'paddle':19}  layout"]
    for (layer, leaf), count in Counter(modules).items():
        name, change = RULES[layer][leaf]
        lines.append(f"{count:>5}  {layer:11}  {leaf:19}  {name:19}  {'same' if change is keep else 'transposed'}")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> None:
    check_args(args)
    try:
        import mobilenetv3_paddle.models
        import mobilenetv3_ref.models
        from reprod.align.capture_torch import layer_types
    except ImportError as error:
        raise UserError(f"both frameworks are needed ({error}): pip install -e '.[align]'") from error

    models = {"torch": mobilenetv3_ref.models, "paddle": mobilenetv3_paddle.models}
    arrays = models[args.source].read_weights(args.input)
    build(models[args.source], args.model, arrays, f"weights {args.input}, taken for {args.source}'s {args.model},")
    types = layer_types(mobilenetv3_ref.models.MODELS[args.model]())
    converted = (torch_to_paddle if args.source == "torch" else paddle_to_torch)(arrays, types)
    model = build(models[args.target], args.model, converted, "converted weights")
    models[args.target].save_weights(model, args.output)
    print(table(arrays if args.source == "torch" else converted, types))
    print(f"wrote {args.output}: {len(converted)} tensors, {len(converted['classifier.3.bias'])} classes")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
