"""Rung 01: the forward pass of every module, in eval and train mode.

Proves: with the same weights and images, every module of the port gives what the reference's gives, and batch norm
keeps the same running statistics. Does not prove: how images are read (02), gradients and updates (05).
Stands on: nothing.

  python steps/01_test_forward.py        ends in: PASS 01_test_forward: all ... items within their limits
"""

import argparse

import numpy as np

from mobilenetv3_proof.step import ModelRung, step_parser
from portproof.backends.probe import probe_images
from portproof.ladder import forward, run_rung

NAME = "01_test_forward"
SHAPE = 3, 256, 160  # images, height, width: odd and not square, so a swapped axis cannot pass, nor a pool over 7 x 7


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> ModelRung:
    step = ModelRung(NAME, args)
    ref, port = step.models()  # with the same weights, each loaded by its own package
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
    return step.finish("forward")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
