"""Step 06: the initial weights, parameter by parameter.

Proves: every parameter of both sides is drawn from the distribution that torchvision's code means (fan-out Kaiming
normal for convolutions, N(0, 0.01) for linear weights) or is the constant that it sets; the draws follow the seed, and
are independent along every axis and of each other. Of the shared draw (--shared-init) it proves the same, and that
both sides hold the same bits, whatever was created or drawn before. Does not prove: that without --shared-init both
sides draw the same numbers (their generators differ).
Stands on: 01 (names and shapes). Of --weights only the number of classes is used.

  python steps/06_test_init.py           ends in: PASS 06_test_init: all ... items within their limits
"""

import argparse
import math
from typing import Any

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import ModelRung, step_parser
from portproof.ladder import Constant, Normal, init, run_rung

NAME = "06_test_init"


def initial(package: Package, step: ModelRung, seed: int) -> Any:
    """What a package's model starts from under a seed."""
    package.module("device").seed_everything(seed)
    return step.model(package, dropout=None)


def shared(package: Package, step: ModelRung, seed: int) -> Any:
    """The same with the shared draw, under which the framework's generators stay as they happen to be."""
    model = step.model(package, dropout=None)
    package.module("models").shared_init(model, seed)
    return model


def expected(name: str, shape: tuple[int, ...], layer: str) -> Normal | Constant:
    """What torchvision's code draws a parameter from, or sets it or a buffer to."""
    leaf = name.rpartition(".")[2]
    if (leaf, layer) == ("weight", "Conv2d"):
        fan_out = shape[0] * math.prod(shape[2:])  # (C_out, C_in / groups, k, k): groups do not divide it
        return Normal(math.sqrt(2 / fan_out))
    if (leaf, layer) == ("weight", "Linear"):
        return Normal(0.01)
    return Constant(float(layer == "BatchNorm2d" and leaf in ("weight", "running_var")))


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> ModelRung:
    step = ModelRung(NAME, args)
    init(*step.both(initial, step), expected, seed=args.seed, rung=step)
    init(*step.both(shared, step), expected, seed=args.seed, shared=True, rung=step)
    return step.finish("init")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
