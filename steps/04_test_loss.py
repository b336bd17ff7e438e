"""Step 04: the criterion and its gradient.

Proves: the loss and its gradient with respect to the logits, for labels and for soft targets as mixup makes them, with
and without label smoothing, on ordinary and on extreme logits, and on the model's own. Does not prove: the gradients
inside the model (05).
Stands on: 01 (the model's logits).

  python steps/04_test_loss.py           ends in: PASS 04_test_loss: all ... items within their limits
"""

import argparse

import numpy as np

from mobilenetv3_proof.step import ModelRung, step_parser
from portproof.backends.probe import probe_images
from portproof.ladder import cases, loss, run_rung

NAME = "04_test_loss"
BATCH = 7  # images
SMOOTHING = (0.0, 0.1)


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> ModelRung:
    step = ModelRung(NAME, args)
    rng = np.random.default_rng([args.seed, 4])
    images = probe_images(rng, BATCH, 96, 64)
    model = step.ref.backend.wrap(step.build(step.ref, "float32"), "reference", args.device)
    logits = model.run([images], "float32", train=False).output[0]
    step.check_signal({"model logits": logits})
    every = cases.losses(step.num_classes, rng, {"model": logits})  # repeated for as many rows as there are classes
    for smoothing in SMOOTHING:
        criteria = (side.module("train.criterion").build_criterion(smoothing) for side in (step.ref, step.port))
        inputs = {f"{name}, label smoothing {smoothing}": case for name, case in every.items()}
        labels = [name for name in inputs if "labels" in name]  # the files are 70 MB without soft targets
        loss(*criteria, inputs, keep=labels, device=args.device, rung=step)
    return step.finish("loss")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
