"""Step 05: gradients, optimizers, schedules and batch-norm statistics, over several iterations.

Proves: every optimizer moves every parameter alike at the official settings, with weight decay by kind of parameter;
over 3 iterations of training, in train and in eval mode, with RMSprop and SGD, the loss, the learning rate, every
gradient by name (clipped, too), every parameter and every batch-norm buffer agree after each iteration; gradients added
up over two batches are those of both as one, and an epoch whose last group of batches is not full ends alike; every
schedule moves a parameter by the same rates for 600 epochs; and every layer's gradients agree in float32. Does not
prove: that float32 runs stay together (none do for long).
Stands on: 01 (forward), 04 (loss).

  python steps/05_test_backward.py       ends in: PASS 05_test_backward: all ... items within their limits
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import ModelRung, step_parser
from portproof.backends.probe import probe_images
from portproof.ladder import accumulation, backward, epoch, optimizer, run_rung, schedule

NAME = "05_test_backward"
ITERATIONS = 3  # of each run: momentum has a past, and the rate has fallen
BATCH, HEIGHT, WIDTH = 3, 64, 48  # small, so that few activations lie near a kink; no power of two in any mean
# The official recipe, but that the rate falls every other iteration, where it does every other epoch.
OFFICIAL = {"lr": 0.064, "momentum": 0.9, "weight_decay": 1e-5, "lr_step_size": 2, "lr_gamma": 0.973}
RECIPE = {**OFFICIAL, "lr": 0.0005}  # through the whole network: a rate at which iterations do not magnify rounding
EPOCH_RECIPE = {**OFFICIAL, "lr": 0.002, "lr_step_size": 1}  # a rate that shows in the log, a schedule that would step
OPTIMIZERS = {
    "sgd": {"opt": "sgd"},
    "sgd_nesterov": {"opt": "sgd_nesterov", "bias_weight_decay": 0.0},
    "rmsprop": {"opt": "rmsprop", "norm_weight_decay": 0.0},
    "adamw": {"opt": "adamw", "norm_weight_decay": 0.1, "bias_weight_decay": 0.0},
}
RUNS = (
    {"name": "rmsprop", "train": True},
    {"name": "sgd_nesterov", "train": False, "clip_grad_norm": 1.0},
)
LOOPS = (
    ("5 batches, gradients of 3 added up", 5, {"accumulation_steps": 3}),  # the last two are a group of their own
    ("2 batches, batch norm frozen", 2, {"freeze_norm": True}),
)
EPOCHS = 600
PLAIN = {**OFFICIAL, "momentum": 0.0, "weight_decay": 0.0, "epochs": EPOCHS}  # SGD whose steps show the schedule
EXPONENTIAL, COSINE = {"lr_scheduler": "exponentiallr"}, {"lr_scheduler": "cosineannealinglr"}
CONSTANT = {"lr_warmup_epochs": 5, "lr_warmup_decay": 0.01}
LINEAR = {**CONSTANT, "lr_warmup_method": "linear"}
SCHEDULES = {
    "official": {},
    "simple": {"lr": 0.1, "lr_step_size": 30, "lr_gamma": 0.1},
    "step after a constant warm-up": CONSTANT,
    "exponential": EXPONENTIAL,
    "exponential after a linear warm-up": {**EXPONENTIAL, **LINEAR},
    "cosine": {**COSINE, "lr_min": 1e-5},
    "cosine after a linear warm-up": {**COSINE, **LINEAR},
}
TIMES = r": [\d.]+(?= sec| images)"  # in the log's lines


def draw_batches(step: ModelRung, stream: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng([step.args.seed, stream])
    return [(probe_images(rng, BATCH, HEIGHT, WIDTH), rng.integers(0, step.num_classes, BATCH)) for _ in range(count)]


def build_optimizer(package: Package, model: Any, **recipe: Any) -> tuple:
    return package.module("train.optimizer").build_optimizer(model, **recipe)


def training_step(package: Package, model: Any, name: str, train: bool, **clip: float) -> tuple:
    engine, criterion = package.module("train.engine"), package.module("train.criterion").build_criterion()
    optimizer, lr_scheduler = build_optimizer(package, model, **RECIPE, **OPTIMIZERS[name])

    def step(images: Any, labels: Any, accumulation: tuple[int, int] = (0, 1)) -> Any:
        if train:
            engine.set_train_mode(model)
        return engine.train_step(model, criterion, optimizer, images, labels, accumulation=accumulation, **clip)[0]

    return step, optimizer, lr_scheduler


def training_loop(package: Package, model: Any, **how: Any) -> tuple:
    engine, criterion = package.module("train.engine"), package.module("train.criterion").build_criterion()
    optimizer, _ = build_optimizer(package, model, **EPOCH_RECIPE)

    def loop(batches: list[tuple], log: Callable[[str], None]) -> None:
        settings, hooks = engine.Settings(print_freq=1, **how), engine.Hooks(log)
        engine.train_one_epoch(model, criterion, optimizer, batches, package.device, 0, settings, hooks)

    return loop, optimizer


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__, channels_last=True)


def main(args: argparse.Namespace) -> ModelRung:
    step = ModelRung(NAME, args)
    models, builders, device = step.models(args.channels_last), step.both(build_optimizer), args.device
    schedule(*builders, steps=EPOCHS, settings=PLAIN, recipes=SCHEDULES, device=device, rung=step)
    optimizer(
        *models,
        *builders,
        settings=OFFICIAL,
        recipes=OPTIMIZERS,
        updates=ITERATIONS,
        seed=args.seed,
        coefficients="float64",  # neither side rounds them
        device=device,
        rung=step,
    )
    for run in RUNS:
        makes, batches = step.both(training_step, **run), draw_batches(step, 5, ITERATIONS)
        backward(*models, *makes, batches, **run, coefficients="float64", device=device, rung=step)
    makes = step.both(training_step, name="sgd", train=False)
    accumulation(*models, *makes, draw_batches(step, 8, 2), device=device, rung=step)
    for title, count, how in LOOPS:
        model = step.ref.backend.wrap(step.build(step.ref, "float64"), "reference", args.device)
        for images, labels in (batches := draw_batches(step, 7, count)):  # half right, so that the log has an accuracy
            logits = model.run([images], "float64", train="freeze_norm" not in how).output[0]
            labels[::2] = logits[::2].argmax(axis=1)
        options = {"title": f"train_one_epoch, float64, {title}", "ignore": TIMES, "device": device}
        epoch(*models, *step.both(training_loop, **how), batches, **options, rung=step)
    return step.finish("losses", log_stem="backward")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
