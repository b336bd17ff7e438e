"""Step 01: the forward pass of every module, in eval and train mode, and the loading of weights files.

Proves: with the same weights and images, every module of the port gives what the reference's gives, and batch norm
keeps the same running statistics; and what the port loads from a file, its own or the reference's converted, is what
the file holds, to the last bit. Does not prove: how images are read (02), gradients and updates (05).
Stands on: nothing.

  python steps/01_test_forward.py        ends in: PASS 01_test_forward: all ... items within their limits
"""

import argparse
import runpy
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import ROOT, ModelRung, step_parser
from portproof.backends.probe import probe_images
from portproof.ladder import forward, run_rung, weights_file

NAME = "01_test_forward"
SHAPE = 3, 256, 160  # images, height, width: odd and not square, so a swapped axis cannot pass, nor a pool over 7 x 7


def load_weights(package: Package, model: Any, path: Path) -> None:
    package.module("models").load_weights(model, path)


def convert(model: str, path: Path, port_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "convert_weights.py"))
    flags = ["--from", "torch", "--to", "paddle", "--model", model, str(path), str(port_path)]
    with redirect_stdout(StringIO()):  # its table
        tool["main"](tool["get_args_parser"]().parse_args(flags))


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__, channels_last=True)


def main(args: argparse.Namespace) -> ModelRung:
    step = ModelRung(NAME, args)
    ref, port = step.models(args.channels_last)  # with the same weights, each loaded by its own package
    images = probe_images(np.random.default_rng([args.seed, 2]), *SHAPE)
    # Under probe weights every branch of every activation is reached; under others the log says which are not.
    forward(
        ref,
        port,
        [images],
        weights="own",
        mirrored=True,
        output="logits",
        device=args.device,
        all_branches=args.weights is None,
        rung=step,
    )
    converter = partial(convert, args.model)
    weights_file(ref, port, *step.both(load_weights), convert=converter, seed=args.seed, device=args.device, rung=step)
    return step.finish("forward")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
