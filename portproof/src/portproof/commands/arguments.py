"""Flags that several commands share, and how models and inputs are loaded."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from portproof.backends import backend, backend_imported
from portproof.backends.base import SUFFIXES
from portproof.backends.trace import Inputs
from portproof.ladder.pairs.named import draw_inputs, load_inputs, model_factory
from sturdyio.cli import UserError, existing_file, seed, staying
from sturdyio.files import read_file, refusing
from sturdyio.state_dict import hash_in_name

INPUT = "2,3,224,224"
MOST_MAP = 2_000_000  # bytes, about 20,000 lines
MODES = {"eval": ("eval",), "train": ("train",), "both": ("eval", "train")}
PRECISIONS = {"float64": ("float64",), "float32": ("float32",), "both": ("float64", "float32")}

REQUIRED: dict[str, Any] = {"required": True, "default": argparse.SUPPRESS}
REPEATED: dict[str, Any] = {"action": "append", "default": []}
FACTORY = {"metavar": "PKG.MOD:FACTORY", **REQUIRED}
FLAGS: dict[str, dict[str, Any]] = {
    "--ref": {"help": "what makes the reference, such as torchvision.models:vgg11 or my.net:Net(width=2)", **FACTORY},
    "--port": {"help": "what makes the port, such as 'paddle.vision.models:vgg11(batch_norm=True)'", **FACTORY},
    "--map": {
        "metavar": "FILE",
        "help": "YAML: the reference's modules or tensors: the port's, where names do not say it",
    },
    "--input": {
        "action": "append",
        "metavar": "[NAME=]SHAPE[:DTYPE[:HIGH]]",
        "help": "shape of an input, such as 2,3,224,224, or 2,16:int64:30522 for whole numbers below 30522, or"
        " mask=2,16:bool for the keyword argument mask; DTYPE is float32, int64, int32 or bool; once for each argument"
        f" (default: {INPUT})",
    },
    "--inputs": {
        "metavar": "FILE.npz",
        "help": "the inputs themselves instead of --input: 0, 1, ... or arr_0, arr_1, ... are the positional arguments,"
        " other names keywords",
    },
    "--seed": {"type": seed, "default": 0, "help": "of inputs, of the models' making and of probe weights"},
    "--device": {"choices": ("cpu", "gpu"), "default": "cpu", "help": "where both sides run"},
    "--mode": {"choices": MODES, "default": "both", "help": "which modes are judged"},
    "--precision": {"choices": PRECISIONS, "default": "both", "help": "which precisions are judged"},
    "--leave-out": {
        "help": "module of the reference whose own values, and those of all in it, or tensor whose, are not compared"
        " (repeatable)",
        "metavar": "NAME",
        **REPEATED,
    },
    "--accept": {
        "help": "a known difference, by an item's name or a pattern such as '*.running_var': neither passed nor failed,"
        " as long as it is at most LIMIT (repeatable)",
        "metavar": "NAME[<=LIMIT][: REASON]",
        **REPEATED,
    },
    "--match": {
        "help": "the reference's output of this key, attribute or number is the port's of that (repeatable)",
        "metavar": "REF=PORT",
        **REPEATED,
    },
}
PAIR = ("--ref", "--port", "--map", "--input")
JUDGED = ("--mode", "--precision", "--leave-out", "--accept", "--match")


def add_flags(parser: argparse.ArgumentParser, *names: str, **changed: Any) -> None:
    """Add these FLAGS, with `changed` keywords."""
    for name in names:
        parser.add_argument(name, **{**FLAGS[name], **changed})


def judging_options(args: argparse.Namespace) -> dict[str, Any]:
    """JUDGED as keywords of `portproof.align`; raises UserError for a bad --match."""
    outputs = {}
    for text in args.match:
        name, equals, port_name = text.partition("=")
        if not equals:
            raise UserError(f"--match {text!r} is no REF=PORT, such as logits=out")
        outputs[name] = port_name
    precisions = PRECISIONS[args.precision]
    given = {"leave_out": args.leave_out, "accept": args.accept}
    return {"modes": MODES[args.mode], "precisions": precisions, "outputs": outputs, **given}


def add_file_arguments(parser: argparse.ArgumentParser, frameworks: Sequence[str]) -> None:
    """INPUT, OUTPUT, --from and --to (two of `frameworks`)."""
    framework: dict[str, Any] = {"choices": frameworks, **REQUIRED}
    add = parser.add_argument
    add("input_file", metavar="INPUT", type=Path, help="weights or checkpoint to read")
    add("output_file", metavar="OUTPUT", type=Path, help="weights to write; a file of that name is replaced")
    add("--from", dest="source", help="framework that INPUT is from", **framework)
    add("--to", dest="target", help="framework that OUTPUT is for: another one", **framework)


def check_files(args: argparse.Namespace) -> None:
    """Raise UserError for wrong file names."""
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
    if hash_in_name(target):  # it would be refused as damaged
        raise UserError(f"output {target} would carry a wrong hash: choose a name without -{hash_in_name(target)}")


def read_map(path: str | None) -> dict[str, str]:
    """{reference's name: port's} of a YAML file, lists joined by ", "; raises UserError."""
    if path is None:
        return {}
    import yaml

    data = read_file(path, "map")
    with refusing(f"map {path}", "YAML", "write lines NAME: NAME"):
        if len(data) > MOST_MAP:
            raise ValueError(f"it has more than {MOST_MAP} bytes")
        content = yaml.compose(data.decode(), yaml.BaseLoader)  # names stay text, not numbers
    lines: dict[str, str] = {}
    pairs: list[tuple[Any, Any]] = content.value if isinstance(content, yaml.MappingNode) else [(None, None)]
    for key, value in pairs:
        names = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(node, yaml.ScalarNode) for node in (key, *names)):
            raise UserError(f"map {path} holds no lines NAME: NAME: the reference's module or tensor, then the port's")
        if key.value in lines:
            raise UserError(f"map {path} names {key.value!r} twice: leave one of the two lines out")
        if sum(len(node.value) for node in names) > MOST_MAP:  # of aliases of one text
            raise UserError(f"map {path} names more than {MOST_MAP} bytes for {key.value!r}: write each name once")
        lines[key.value] = ", ".join(node.value for node in names)
    return lines


def load_models(args: argparse.Namespace, judged: bool = False) -> tuple[Any, Any, Inputs]:
    """(reference, port, inputs). If the port is `judged`, what its code raises is a PortError."""
    inputs = load_given_inputs(args, ("torch", "paddle"))
    with staying():
        ref, port = model_factory(args.ref, "--ref"), model_factory(args.port, "--port", judged)
        return built(ref, "torch", args.seed), built(port, "paddle", args.seed), inputs


def built(factory: Callable[[], Any], usual: str, seed: int) -> Any:
    """What it makes, seeded: some weights stay as they are made, such as an RNN's. Its framework is `usual`."""
    with backend_imported(usual).runs.seeded(seed):
        return factory()


def load_given_inputs(args: argparse.Namespace, frameworks: Sequence[str]) -> Inputs:
    """Of --input or --inputs. Raises UserError, also if a framework lacks the --device."""
    file = getattr(args, "inputs", None)
    if file and args.input:
        raise UserError("--inputs are the inputs themselves, --input their shapes: give one of the two")
    for name in frameworks:
        backend(name).device(getattr(args, "device", "cpu"))
    return load_inputs(file, "--inputs") if file else draw_inputs(args.input or [INPUT], args.seed, "--input")
