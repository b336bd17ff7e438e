"""Rung 04: the criterion and its gradient.

Proves: the loss and its gradient with respect to the logits, for labels and for soft targets as mixup makes them, with
and without label smoothing, on ordinary and on extreme logits, and on the model's own. Does not prove: the gradients
inside the model (05).
Stands on: 01 (the model's logits).

  python steps/04_test_loss.py           ends in: PASS 04_test_loss: all ... items within their limits
"""

import argparse
from itertools import product

import numpy as np

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import Step, step_parser
from portproof.backends.probe import probe_images
from portproof.compare import Item, compare
from portproof.compare.tolerances import kernel_limits, semantic_limits
from portproof.ladder.rung import run_rung

NAME = "04_test_loss"
BATCH = 7  # images
SMOOTHING = (0.0, 0.1)
DTYPES = ("float64", "float32")


def loss_inputs(step: Step) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Logits (C, C), float64 values that float32 holds, and targets, each by what they are.

    The model's own logits are those of 7 images, repeated. The extreme ones overflow float32 in exp(), and their rows
    lie so far apart that one maximum for all would make others vanish. Labels (C,) are every class once; soft targets
    (C, C) are theirs mixed with others', in shares whose sum float32 rounds.
    """
    rng = np.random.default_rng([step.args.seed, 4])
    images, classes = probe_images(rng, BATCH, 96, 64), step.num_classes
    trace = step.ref.backend.forward(step.build(step.ref, "float32"), images, train=False)
    logits = {
        "model": np.resize(trace.outputs["logits"], (classes, classes)),
        "drawn": rng.normal(0, 3, (classes, classes)),
        "extreme": rng.normal(0, 60, (classes, classes)) + np.linspace(-500, 500, classes)[:, None],
    }
    labels = rng.permutation(classes)
    share, one_hot = rng.random((classes, 1)), np.eye(classes)[labels]
    soft = share * one_hot + (1 - share) * np.roll(one_hot, 1, 0)
    exact = {name: array.astype(np.float32).astype(np.float64) for name, array in {**logits, "soft": soft}.items()}
    return exact, {"labels": labels, "soft targets": exact.pop("soft")}


def in_precision(target: np.ndarray, dtype: str) -> np.ndarray:
    """Soft targets in the logits' precision; labels as they are."""
    return target.astype(dtype) if target.dtype.kind == "f" else target


def run_criterion(package: Package, logits: np.ndarray, target: np.ndarray, smoothing: float) -> dict[str, np.ndarray]:
    criterion = package.module("train.criterion").build_criterion(smoothing)
    return package.backend.loss_and_gradient(criterion, logits, target, package.device)


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    all_logits, targets = loss_inputs(step)
    step.check_signal({f"{name} logits": logits for name, logits in all_logits.items()})
    ref_files, port_files = {}, {}
    for smoothing, name, kind in product(SMOOTHING, all_logits, targets):
        inputs = {dtype: (all_logits[name].astype(dtype), in_precision(targets[kind], dtype)) for dtype in DTYPES}
        fp64_ref, fp32_ref = (run_criterion(step.ref, *inputs[dtype], smoothing) for dtype in DTYPES)
        for dtype, ref, limits_of in (("float64", fp64_ref, semantic_limits), ("float32", fp32_ref, kernel_limits)):
            port, limits = run_criterion(step.port, *inputs[dtype], smoothing), limits_of(fp64_ref, fp32_ref)
            title = f"{name} logits, {kind}, label smoothing {smoothing}, {dtype}"
            items = {"loss": Item("loss", "loss", dtype=dtype), "gradient": Item("logits", "gradient", dtype=dtype)}
            named = [{items[key]: value for key, value in side.items()} for side in (ref, port, limits)]
            step.check(compare(*named, title=title), group=str)
            prefix = "" if (name, smoothing, dtype) == ("model", 0.0, "float32") else f"{title}/"
            if kind == "labels":  # the files are 70 MB as it is
                ref_files.update({prefix + key: value for key, value in ref.items()})
                port_files.update({prefix + key: value for key, value in port.items()})
    return step.finish("loss", ref_files, port_files)


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
