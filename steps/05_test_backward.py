"""Rung 05: gradients, optimizers, schedules and batch-norm statistics, over several iterations.

Proves: every optimizer moves every parameter alike at the official settings, with weight decay of its own for biases
and normalization layers; over 4 iterations of training, in train and in eval mode, with RMSprop and SGD, the loss, the
learning rate, every gradient by name (clipped, too), every parameter and every batch-norm buffer agree after each
iteration; gradients added up over two batches are those of both as one; every schedule moves a parameter by the same
rates for 600 epochs; and every layer's gradients agree in float32. Does not prove: that float32 runs stay together
(none do for long, not even one framework's with itself).
Stands on: 01 (forward), 04 (loss).

  python steps/05_test_backward.py       ends in: PASS 05_test_backward: all ... items within their limits
"""

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import Step, step_parser
from portproof.backends.probe import probe_images
from portproof.ladder.rung import run_rung
from portproof.ladder.rungs.optimizers import optimizer, schedule
from portproof.ladder.rungs.training_step import accumulation, backward, epoch

NAME = "05_test_backward"
ITERATIONS = 4  # of each run: momentum has a past, and the rate has fallen
BATCH, HEIGHT, WIDTH = 5, 96, 64  # small, so that few activations lie near a kink; no power of two in any mean
# The official recipe, but that the rate falls every other iteration, where it does every other epoch.
OFFICIAL = {"lr": 0.064, "momentum": 0.9, "weight_decay": 1e-5, "lr_step_size": 2, "lr_gamma": 0.973}
# Through the whole network at a small rate, so that rounding is not magnified from one iteration to the next.
RECIPE = {**OFFICIAL, "lr": 0.0005}
OPTIMIZERS = {
    "sgd": {},
    "sgd_nesterov": {"bias_weight_decay": 0.0},
    "rmsprop": {"norm_weight_decay": 0.0},
    "adamw": {"norm_weight_decay": 0.1, "bias_weight_decay": 0.0},
}
# (optimizer, train mode, norm to which gradients are clipped)
RUNS = (("rmsprop", True, None), ("sgd", True, 1.0), ("sgd_nesterov", False, None))
EPOCH_RECIPE = {**RECIPE, "lr": 0.002, "lr_step_size": 1}  # a rate that shows in the log, a schedule that would step
STEP, EXPONENTIAL = {"lr_step_size": 2, "lr_gamma": 0.973}, {"lr_scheduler": "exponentiallr", "lr_gamma": 0.973}
COSINE = {"lr_scheduler": "cosineannealinglr"}
CONSTANT = {"lr_warmup_epochs": 5, "lr_warmup_decay": 0.01}
LINEAR = {**CONSTANT, "lr_warmup_method": "linear"}
SCHEDULES = {
    "official": STEP,
    "simple": {"lr": 0.1, "lr_step_size": 30, "lr_gamma": 0.1},
    "step after a constant warm-up": {**STEP, **CONSTANT},
    "exponential": EXPONENTIAL,
    "exponential after a linear warm-up": {**EXPONENTIAL, **LINEAR},
    "cosine": {**COSINE, "lr_min": 1e-5},
    "cosine after a linear warm-up": {**COSINE, **LINEAR},
}
EPOCHS = 600


def draw_batches(step: Step, stream: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng([step.args.seed, stream])
    return [(probe_images(rng, BATCH, HEIGHT, WIDTH), rng.integers(0, step.num_classes, BATCH)) for _ in range(count)]


def partly_right(step: Step, batches: list, train: bool) -> list:
    """`batches`, in which the model has every other label right, so that the log's accuracy is not 0."""
    for images, labels in batches:
        trace = step.ref.backend.forward(step.build(step.ref, "float64"), images, train)
        labels[::2] = trace.outputs["logits"][::2].argmax(axis=1)
    return batches


def built(package: Package, model: Any, recipe: dict) -> tuple:
    """(engine, criterion, optimizer, schedule) of the package."""
    criterion = package.module("train.criterion").build_criterion()
    optimizer, lr_scheduler = package.module("train.optimizer").build_optimizer(model, **recipe)
    return package.module("train.engine"), criterion, optimizer, lr_scheduler


def training_step(package: Package, opt: str, train: bool, clip_grad_norm: float | None, model: Any) -> tuple:
    recipe = {**RECIPE, **OPTIMIZERS[opt], "opt": opt}
    engine, criterion, optimizer, lr_scheduler = built(package, model, recipe)

    def step(images: Any, labels: Any, accumulation: tuple[int, int] = (0, 1)) -> Any:
        if train:
            engine.set_train_mode(model)
        how = {"clip_grad_norm": clip_grad_norm, "accumulation": accumulation}
        return engine.train_step(model, criterion, optimizer, images, labels, **how)[0]

    return step, optimizer, lr_scheduler


def training_loop(package: Package, freeze_norm: bool, model: Any) -> tuple:
    engine, criterion, optimizer, _ = built(package, model, EPOCH_RECIPE)

    def loop(batches: list[tuple], log: Callable[[str], None]) -> None:
        hooks = engine.Hooks(log=lambda line: log(re.sub(r"(cost|ips): [\d.]+", r"\1", line)))  # without times
        how = engine.Settings(print_freq=1, freeze_norm=freeze_norm), hooks
        engine.train_one_epoch(model, criterion, optimizer, batches, package.device, 0, *how)

    return loop, optimizer


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    models, where = step.models(), {"device": args.device, "rung": step}

    def both(function: Callable, *args: Any) -> list[Callable]:
        return [partial(function, package, *args) for package in (step.ref, step.port)]

    builders = [package.module("train.optimizer").build_optimizer for package in (step.ref, step.port)]
    plain = {**OFFICIAL, "momentum": 0.0, "weight_decay": 0.0, "epochs": EPOCHS}
    schedule(*builders, epochs=EPOCHS, recipes={name: plain | recipe for name, recipe in SCHEDULES.items()}, **where)
    recipes = {opt: {**OFFICIAL, **groups, "opt": opt} for opt, groups in OPTIMIZERS.items()}
    exact = {"coefficients": "float64"}  # neither side rounds them
    optimizer(*models, *builders, recipes=recipes, updates=ITERATIONS, seed=args.seed, **exact, **where)
    for opt, train, clip in RUNS:
        how = {"train": train, "name": opt, "clip_grad_norm": clip, "dtypes": ["float64"], **exact}
        backward(*models, *both(training_step, opt, train, clip), draw_batches(step, 5, ITERATIONS), **how, **where)
    accumulation(*models, *both(training_step, "sgd", False, None), draw_batches(step, 8, 2), **where)
    for train in (True, False):
        how = {"train": train, "name": "sgd", "dtypes": ["float32"]}
        backward(*models, *both(training_step, "sgd", train, None), draw_batches(step, 6, 1), **how, **where)
        title = f"train_one_epoch, float64, 3 batches{'' if train else ', batch norm frozen'}"
        batches = partly_right(step, draw_batches(step, 7, 3), train)
        epoch(*models, *both(training_loop, not train), batches, title=title, **where)
    return step.finish("losses", log_stem="backward")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
