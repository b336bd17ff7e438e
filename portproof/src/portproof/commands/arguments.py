"""The flags that name a pair of models, their inputs, weights and files, and how the two are loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portproof.backends import backend
from portproof.backends.base import SUFFIXES
from portproof.backends.trace import Inputs
from portproof.ladder.pairs.named import draw_inputs, load_inputs, model_factory
from sturdyio.cli import UserError, existing_file, staying
from sturdyio.files import read_file, refusing
from sturdyio.state_dict import hash_in_name

INPUT = "2,3,224,224"
MOST_MAP = 2_000_000  # bytes: some 20,000 lines

FACTORIES = {
    "--ref": "what makes the reference, such as torchvision.models:vgg11 or my.net:Net(width=2)",
    "--port": "what makes the port, such as 'paddle.vision.models:vgg11(batch_norm=True)'",
}


def add_factory_argument(parser: argparse.ArgumentParser, flag: str) -> None:
    """--ref or --port."""
    factory = {"metavar": "PKG.MOD:FACTORY", "required": True, "default": argparse.SUPPRESS}
    parser.add_argument(flag, help=FACTORIES[flag], **factory)


def add_map_argument(parser: argparse.ArgumentParser) -> None:
    """--map."""
    text = "YAML: the reference's modules or tensors: the port's, where names do not say it"
    parser.add_argument("--map", metavar="FILE", help=text)


def add_input_argument(parser: argparse.ArgumentParser) -> None:
    """--input."""
    parser.add_argument(
        "--input",
        action="append",
        metavar="[NAME=]SHAPE[:DTYPE[:HIGH]]",
        help="shape of an input, such as 2,3,224,224, or 2,16:int64:30522 for whole numbers below 30522, or"
        " mask=2,16:bool for the keyword argument mask; DTYPE is float32, int64, int32 or bool; once for each argument"
        f" (default: {INPUT})",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--ref, --port, --map, --input."""
    add_factory_argument(parser, "--ref")
    add_factory_argument(parser, "--port")
    add_map_argument(parser)
    add_input_argument(parser)


def add_judging_arguments(parser: argparse.ArgumentParser) -> None:
    """--mode, --precision, --leave-out, --match: what is judged. `judging_options` reads them."""
    add = parser.add_argument
    add("--mode", choices=("eval", "train", "both"), default="both", help="which modes are judged")
    add("--precision", choices=("float64", "float32", "both"), default="both", help="which precisions are judged")
    add(
        "--leave-out",
        action="append",
        default=[],
        metavar="MODULE",
        help="module of the reference whose own values, and those of all in it, are not compared (repeatable)",
    )
    add(
        "--match",
        action="append",
        default=[],
        metavar="REF=PORT",
        help="the reference's output of this key, attribute or number is the port's of that (repeatable)",
    )


def judging_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `portproof.align` that these flags stand for; raises UserError for a --match that is none."""
    for text in args.match:
        if "=" not in text:
            raise UserError(f"--match {text!r} is no REF=PORT, such as logits=out")
    return {
        "modes": ("eval", "train") if args.mode == "both" else (args.mode,),
        "precisions": ("float64", "float32") if args.precision == "both" else (args.precision,),
        "leave_out": args.leave_out,
        "outputs": {name: port_name for name, _, port_name in (text.partition("=") for text in args.match)},
    }


def add_seed_argument(parser: argparse.ArgumentParser) -> None:
    """--seed."""
    parser.add_argument("--seed", type=int, default=0, help="of inputs and probe weights, 0 or more")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """--ref, --port, --map, --input, --inputs, --seed, --weights, --port-weights, --device."""
    add_model_arguments(parser)
    add_seed_argument(parser)
    add_inputs_argument(parser)
    add = parser.add_argument
    add("--weights", metavar="FILE", help="the reference's weights, for both sides, instead of probe weights")
    add("--port-weights", metavar="FILE", help="the port's own .pdparams or .safetensors, compared with --weights too")
    add_device_argument(parser, "both sides run")


def add_device_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """--device."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help=f"where {what}")


def add_inputs_argument(parser: argparse.ArgumentParser) -> None:
    """--inputs."""
    parser.add_argument(
        "--inputs",
        metavar="FILE.npz",
        help="the inputs themselves instead of --input: 0, 1, ... or arr_0, arr_1, ... are the positional arguments,"
        " other names keywords",
    )


def add_file_arguments(parser: argparse.ArgumentParser, frameworks: Sequence[str]) -> None:
    """INPUT, OUTPUT, and --from and --to, which name two of the `frameworks`."""
    required = {"choices": frameworks, "required": True, "default": argparse.SUPPRESS}
    add = parser.add_argument
    add("input_file", metavar="INPUT", type=Path, help="weights or checkpoint to read")
    add("output_file", metavar="OUTPUT", type=Path, help="weights to write; a file of that name is replaced")
    add("--from", dest="source", help="framework that INPUT is from", **required)
    add("--to", dest="target", help="framework that OUTPUT is for: another one", **required)


def check_files(args: argparse.Namespace) -> None:
    """Raise UserError for what is wrong with `add_file_arguments`' and can be seen without opening a file."""
    source, target = args.input_file, args.output_file
    if args.source == args.target:
        raise UserError(f"--from and --to are both {args.source}: name the two frameworks")
    for path, flag, framework in ((source, "--from", args.source), (target, "--to", args.target)):
        suffixes = (*SUFFIXES[framework], ".safetensors")
        if path.suffix not in suffixes:
            raise UserError(f"{path} does not end as {framework}'s weights do, {', '.join(suffixes)}: check {flag}")
    existing_file(source, "weights")
    if target.exists() and target.samefile(source):
        raise UserError(f"output {target} is the input: choose another name")
    if hash_in_name(target):  # the converted file will have another one, and would be refused as damaged
        raise UserError(f"output {target} would carry a wrong hash: choose a name without -{hash_in_name(target)}")


def read_map(path: str | None) -> dict[str, str]:
    """The names in a YAML file, {reference's: port's}; raises UserError for anything else.

    A line names modules, or tensors by state_dict key; several, by commas or as a list, are joined into the one.
    """
    if path is None:
        return {}
    import yaml

    data = read_file(path, "map")
    with refusing(f"map {path}", "YAML", "write lines NAME: NAME"):
        if len(data) > MOST_MAP:
            raise ValueError(f"it has more than {MOST_MAP} bytes")
        content = yaml.load(data.decode(), yaml.BaseLoader)  # which makes no number of a name
    given = content if isinstance(content, dict) else {None: None}
    lines = {key: ", ".join(value) if _are_texts(value) else value for key, value in given.items()}
    if not _are_texts([*lines, *lines.values()]):
        raise UserError(f"map {path} holds no lines NAME: NAME: the reference's module or tensor, then the port's")
    return lines


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def load_models(args: argparse.Namespace, judged: bool = False) -> tuple[Any, Any, Inputs]:
    """(reference, port, inputs) as `add_model_arguments`' and `add_seed_argument`'s flags say.

    What the code of a port that is `judged` raises is a PortError.
    """
    inputs = load_given_inputs(args, ("torch", "paddle"))
    with staying():
        return model_factory(args.ref, "--ref")(), model_factory(args.port, "--port", judged)(), inputs


def load_given_inputs(args: argparse.Namespace, frameworks: Sequence[str]) -> Inputs:
    """The inputs that --input or --inputs, and --seed say; raises UserError too where a framework has no --device."""
    file = getattr(args, "inputs", None)
    if file and args.input:
        raise UserError("--inputs are the inputs themselves, --input their shapes: give one of the two")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} is negative: choose 0 or more")
    for name in frameworks:
        backend(name).device(getattr(args, "device", "cpu"))
    return load_inputs(file, "--inputs") if file else draw_inputs(args.input or [INPUT], args.seed, "--input")


def load_pair(args: argparse.Namespace) -> tuple[Any, Any, Inputs, str]:
    """(reference, port, inputs, what weights they are judged with) as the flags say, with their weights."""
    if args.port_weights and not args.weights:
        raise UserError("--port-weights are compared with --weights: give both")
    ref, port, inputs = load_models(args, judged=True)
    if args.weights:
        backend("torch").load_weights(ref, args.weights, "weights")
    if args.port_weights:
        backend("paddle").load_weights(port, args.port_weights, "port weights")
    return ref, port, inputs, "own" if args.port_weights else "reference" if args.weights else "probe"
