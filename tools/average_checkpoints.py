"""Average the weights of several checkpoints of one training run, as the official recipe does with its three best.

  python tools/average_checkpoints.py --framework torch average.pth output/model_597.pth output/model_599.pth
  python tools/average_checkpoints.py --framework paddle average.pdparams --best 3 output

Floating-point numbers are averaged in float64 and rounded once, whole numbers (counts of batches) rounded down, as
average_checkpoints in torchvision's references/classification does. The inputs are weight files or checkpoints of the
training command; the output is a weight file. Both frameworks give the same bits for the same weights.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mobilenetv3_common.metrics import NAME, read_metrics
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, existing_dir, positive_int, run
from sturdyio.files import save_safetensors

PROG = "average_checkpoints"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--framework", choices=("torch", "paddle"), required=True, help="whose files they are")
    add("output", metavar="OUT", type=Path, help="file to write, which must not exist yet")
    add("inputs", metavar="IN", type=Path, nargs="*", help="two files or more")
    add(
        "--best",
        metavar=("N", "DIR"),
        nargs=2,
        help="instead of IN: the N model_EPOCH files of the output folder DIR with the best top-1 accuracy",
    )
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raise UserError for an output that would be lost and for inputs that are none, one, or the same."""
    if bool(args.inputs) == bool(args.best):
        raise UserError("name the files to average, or --best N DIR: one of the two")
    if args.output.exists():
        raise UserError(f"output {args.output} exists already: give the file to write first, under a new name")
    if len(args.inputs) == 1:
        raise UserError(f"{args.inputs[0]} alone has no average: name two files or more after {args.output}")
    places = [path.resolve() for path in args.inputs]
    for number, path in enumerate(args.inputs):
        if places[number] in places[:number]:
            raise UserError(f"input {path} is given twice: name each file once")


def side(framework: str) -> tuple[ModuleType, Callable[[np.ndarray], Any]]:
    """(module that reads and writes the framework's weights, array to tensor)."""
    try:
        if framework == "torch":
            import torch

            import mobilenetv3_ref.models.weights as weights

            return weights, torch.from_numpy
        import paddle

        import mobilenetv3_paddle.models.weights as weights

        return weights, paddle.to_tensor
    except ImportError as error:
        raise UserError(f"--framework {framework} cannot be imported ({error}): pip install -e .") from error


def best_files(count: str, folder: str, suffix: str) -> list[Path]:
    """The model files of the `count` best evaluations that the record in `folder` has, best first.

    Of equal ones the later counts as better: it has trained longer.
    """
    try:
        wanted = positive_int(count)
    except ValueError as error:
        raise UserError(f"--best {count} is no whole number of at least 1: how many files to average?") from error
    record = read_metrics(existing_dir(folder, "output folder") / NAME)
    found = [(r["top1"], r["epoch"]) for r in record if r["kind"] == "eval" and r.get("top1") is not None]
    if len(found) < wanted:
        raise UserError(f"--best {wanted}: {Path(folder) / NAME} has {len(found)} evaluations: ask for fewer")
    best = sorted(found, reverse=True)[:wanted]
    for top1, epoch in best:
        print(f"epoch {epoch}: top1 {top1:.5f}")
    return [Path(folder) / f"model_{epoch}{suffix}" for _, epoch in best]


def average(states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The means of arrays of the same names, shapes and dtypes: of floats in float64, of integers rounded down."""
    means = {}
    for name, first in states[0].items():
        is_float = first.dtype.kind == "f"
        total = reduce(np.add, (state[name].astype(np.float64 if is_float else np.int64) for state in states))
        mean = total / len(states) if is_float else total // len(states)
        means[name] = np.asarray(mean).astype(first.dtype)  # of arrays without axes NumPy makes scalars
    return means


def check_alike(states: Sequence[Mapping[str, np.ndarray]], paths: Sequence[Path]) -> None:
    """Raise UserError, naming the first offender, unless all have the same names, shapes, dtypes, and finite values."""
    first = states[0]
    for state, path in zip(states, paths, strict=True):
        for name in [*first, *state]:
            if (name in first) != (name in state):
                having, lacking = (paths[0], path) if name in first else (path, paths[0])
                raise UserError(f"{having} has {name}, {lacking} has not: average files of one model")
            kinds = [f"{s[name].dtype} {s[name].shape}" for s in (first, state)]
            if kinds[0] != kinds[1]:
                raise UserError(f"{name} is {kinds[0]} in {paths[0]} and {kinds[1]} in {path}: average one model's")
            if not np.isfinite(state[name]).all():
                raise UserError(f"{path} holds NaN or Inf in {name}: leave it out")


def main(args: argparse.Namespace) -> None:
    check_args(args)
    weights, to_tensor = side(args.framework)
    if args.output.suffix not in (*weights.SUFFIXES, ".safetensors"):
        raise UserError(
            f"output {args.output} is not {', '.join(weights.SUFFIXES)} or .safetensors: choose one of these"
        )
    paths = best_files(*args.best, weights.SUFFIXES[0]) if args.best else args.inputs
    states = [weights.read_weights(path) for path in paths]
    check_alike(states, paths)
    means = average(states)
    if args.output.suffix == ".safetensors":
        save_safetensors(means, args.output)
    else:
        weights.save_pickle({name: to_tensor(array) for name, array in means.items()}, args.output)
    print(f"wrote {args.output}: {len(means)} tensors, the average of {len(paths)} files")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
