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
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import paddle
import torch
from tqdm import tqdm

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import Step, step_parser
from portproof.backends.probe import probe_images
from portproof.backends.trace import Trace
from portproof.compare import Item, Verdict, compare, placed, tensor_item
from portproof.compare.activations import flipped
from portproof.compare.tolerances import (
    SEMANTIC_RTOL,
    U64,
    U,
    exact_limits,
    kernel_limits,
    largest,
    noise_floors,
    semantic_limits,
    with_floors,
)
from portproof.io.cli import UserError
from portproof.ladder.pair import backward_alone
from portproof.ladder.rung import run_rung

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


@dataclass(frozen=True)
class Run:
    """Some iterations of training, the same on both sides."""

    opt: str
    train: bool
    clip_grad_norm: float | None = None

    @property
    def recipe(self) -> dict[str, float]:
        return {**RECIPE, **OPTIMIZERS[self.opt]}

    @property
    def title(self) -> str:
        mode = "train" if self.train else "eval"
        clipped = "" if self.clip_grad_norm is None else f", gradients clipped to {self.clip_grad_norm:g}"
        return f"{mode} mode, float64, {ITERATIONS} iterations of {self.opt}{clipped}"


RUNS = (Run("rmsprop", True), Run("sgd", True, clip_grad_norm=1.0), Run("sgd_nesterov", False))
EPOCH_RECIPE = {**RECIPE, "lr": 0.002, "lr_step_size": 1}  # a rate that shows in the log, a schedule that would step
WARMUP = {"lr_warmup_epochs": 5, "lr_warmup_decay": 0.01}
SCHEDULES = {
    "official": {"lr_step_size": 2, "lr_gamma": 0.973},
    "simple": {"lr": 0.1, "lr_step_size": 30, "lr_gamma": 0.1},
    "step after a constant warm-up": {"lr_step_size": 2, "lr_gamma": 0.973, **WARMUP},
    "exponential": {"lr_scheduler": "exponentiallr", "lr_gamma": 0.973},
    "exponential after a linear warm-up": {
        "lr_scheduler": "exponentiallr",
        "lr_gamma": 0.973,
        "lr_warmup_method": "linear",
        **WARMUP,
    },
    "cosine": {"lr_scheduler": "cosineannealinglr", "lr_min": 1e-5},
    "cosine after a linear warm-up": {"lr_scheduler": "cosineannealinglr", "lr_warmup_method": "linear", **WARMUP},
}
EPOCHS = 600


def draw_batch(rng: np.random.Generator, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    return probe_images(rng, BATCH, HEIGHT, WIDTH), rng.integers(0, num_classes, BATCH)


def state_items(
    gradients: dict[str, np.ndarray], parameters: dict[str, np.ndarray], buffers: dict[str, np.ndarray]
) -> dict[Item, np.ndarray]:
    """Gradients from the output to the input, as they are computed: the first that differs is where the fault lies."""
    return {
        **{tensor_item(name, "gradient"): gradients[name] for name in reversed(gradients)},
        **{tensor_item(name, "parameter"): array for name, array in parameters.items()},
        **{tensor_item(name, "buffer"): array for name, array in buffers.items()},
    }


LOSS, RATE, LOG = Item("loss", "loss"), Item("lr", "lr"), Item("log")


def optimizer_of(package: Package, model, recipe: dict) -> tuple:
    """(optimizer, schedule) as the package builds them."""
    return package.module("train.optimizer").build_optimizer(model, **recipe)


def run_package(
    step: Step, package: Package, run: Run, batches: list, dtype: str, record: bool
) -> Iterator[tuple[dict, Trace | None]]:
    """({item: array} after each iteration, trace of its forward pass if asked for) of one side."""
    backend, engine, model = package.backend, package.module("train.engine"), step.build(package, dtype)
    criterion = package.module("train.criterion").build_criterion()
    optimizer, lr_scheduler = optimizer_of(package, model, {"opt": run.opt, **run.recipe})
    for images, labels in batches:
        model.eval()
        if run.train:
            engine.set_train_mode(model)
        inputs = [backend.to_tensor(array, model) for array in (images, labels)]
        lr = backend.learning_rate(optimizer)
        with backend.trace(model) if record else backend.exact_constants() as trace:
            loss, _ = engine.train_step(model, criterion, optimizer, *inputs, clip_grad_norm=run.clip_grad_norm)
        lr_scheduler.step()
        yield (
            {
                LOSS: backend.to_array(loss),
                RATE: np.array(lr),
                **state_items(backend.gradients(model), backend.parameters(model), backend.buffers(model)),
            },
            trace,
        )


def check_iterations(step: Step, run: Run, files: tuple[dict, dict]) -> None:
    """float64: all iterations, three runs side by side, so that only one iteration is held at a time."""
    mode = "train" if run.train else "eval"
    rng = np.random.default_rng([step.args.seed, 5])
    batches = [draw_batch(rng, step.num_classes) for _ in range(ITERATIONS)]
    runs = (
        run_package(step, step.ref, run, batches, "float64", record=True),  # what comes into batch norms sets floors
        run_package(step, step.ref, run, batches, "float32", record=False),
        run_package(step, step.port, run, batches, "float64", record=False),
    )
    rows, zeros, norms = [], set(), []
    curves = {item: ([], []) for item in (LOSS, RATE)}
    for i, ((truth, record), (ref, _), (port, _)) in enumerate(
        tqdm(zip(*runs, strict=True), run.title, ITERATIONS, leave=False, disable=None)
    ):
        there = {"mode": mode, "dtype": "float64", "iteration": i}
        limits, zeros = with_floors(
            semantic_limits(truth, ref) | {RATE: 0.0}, noise_floors(truth, U64, record.input_scales), truth
        )
        named = [placed(side, **there) for side in (truth, port, limits)]
        rows += compare(*named, zeros=placed(dict.fromkeys(zeros), **there)).rows
        norms.append(np.sqrt(sum((array**2).sum() for item, array in truth.items() if item.kind == "gradient")))
        for kept, side in zip(files, (truth, port), strict=True):
            kept.update({f"{mode}/{run.opt}/{item.name}_{i}": side[item] for item in (LOSS, RATE)})
        for item, (ref_curve, port_curve) in curves.items():
            ref_curve.append(truth[item].item())
            port_curve.append(port[item].item())
    named = {f"{mode} mode, {run.opt}, {item.name}": curve for item, curve in curves.items()}
    step.curves |= {name: (np.array(one), np.array(two)) for name, (one, two) in named.items()}
    step.check(Verdict(run.title, rows), group=lambda item: f"iteration {item.iteration}")
    step.locate([batches[0][0]], [rng.normal(size=(BATCH, step.num_classes))])
    count = sum(item.kind == "gradient" for item in zeros)
    step.say(f"  {count} gradients are zero by structure: both sides' are below the rounding of the others")
    if run.clip_grad_norm is not None and max(norms) < 0.999 * run.clip_grad_norm:
        step.refuse(f"gradients whose norm is {max(norms):.1e} at most are not clipped to {run.clip_grad_norm:g}")


def check_optimizers(step: Step) -> None:
    """float64, the official values: the same drawn gradients on both sides, so that no network magnifies rounding."""
    rng = np.random.default_rng([step.args.seed, 9])
    shapes = {name: parameter.shape for name, parameter in step.model(step.ref).named_parameters()}
    drawn = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(ITERATIONS)]
    ref, port = {}, {}
    for package, moved in ((step.ref, ref), (step.port, port)):
        start = step.build(package, "float64")
        for opt, groups in OPTIMIZERS.items():
            model = copy.deepcopy(start)
            move(package, model, {**OFFICIAL, **groups, "opt": opt}, drawn)
            found = package.backend.parameters(model)
            moved |= {tensor_item(name, "parameter", section=opt): array for name, array in found.items()}
    limits = {item: SEMANTIC_RTOL * largest(array) for item, array in ref.items()}
    title = f"parameters after {ITERATIONS} updates with drawn gradients at rate {OFFICIAL['lr']:g}, float64"
    step.check(compare(ref, port, limits, title=title), group=lambda item: item.section)


def move(package: Package, model, recipe: dict, drawn: list[dict[str, np.ndarray]]) -> None:
    """Update `model` once with each of the `drawn` gradients, by parameter; the schedule steps after each."""
    optimizer, lr_scheduler = optimizer_of(package, model, recipe)
    for gradients in drawn:
        package.backend.set_gradients(model, gradients)
        optimizer.step()
        lr_scheduler.step()


def check_accumulation(step: Step) -> None:
    """float64, eval mode: two batches whose gradients are added up, on either side, against both as one batch.

    With fixed statistics every image counts for itself, so that the mean over all of them is all there is to get wrong.
    """
    rng = np.random.default_rng([step.args.seed, 8])
    halves = [draw_batch(rng, step.num_classes) for _ in range(2)]
    joined = [tuple(np.concatenate(arrays) for arrays in zip(*halves, strict=True))]
    truth, ref = (accumulated(step, step.ref, joined, dtype) for dtype in ("float64", "float32"))
    limits, zeros = with_floors(semantic_limits(truth, ref), noise_floors(truth, U64), truth)
    for package in (step.ref, step.port):
        whose = f"the {package.role}'s gradients of two batches added up"
        title = f"{whose}, against the reference's of both as one, float64"
        step.check(compare(truth, accumulated(step, package, halves, "float64"), limits, title=title, zeros=zeros))


def accumulated(step: Step, package: Package, batches: list, dtype: str) -> dict[Item, np.ndarray]:
    """Gradients and parameters of one side after one update of the optimizer from all `batches`."""
    backend, model = package.backend, step.build(package, dtype)
    model.eval()
    criterion = package.module("train.criterion").build_criterion()
    optimizer, _ = optimizer_of(package, model, RECIPE)
    for i, batch in enumerate(batches):
        inputs = [backend.to_tensor(array, model) for array in batch]
        with backend.exact_constants():
            package.module("train.engine").train_step(
                model, criterion, optimizer, *inputs, accumulation=(i, len(batches))
            )
    return state_items(backend.gradients(model), backend.parameters(model), {})


def check_float32(step: Step, train: bool) -> None:
    """float32: one iteration's loss and statistics, and the gradients of every layer alone.

    Through the whole network gradients cannot be judged in float32: one input of a ReLU that rounding puts on the other
    side of zero moves them by up to 3 percent on a faultless port. Those that did are counted and named. A layer alone,
    on the reference's own input and upstream gradient, has none.
    """
    mode = "train" if train else "eval"
    images, labels = draw_batch(np.random.default_rng([step.args.seed, 6]), step.num_classes)
    (truth, record), (ref, ref_record), (port, port_record) = (
        next(run_package(step, package, Run("sgd", train), [(images, labels)], dtype, record=True))
        for package, dtype in ((step.ref, "float64"), (step.ref, "float32"), (step.port, "float32"))
    )
    for word, other in (("reference", ref_record), ("port", port_record)):
        flips = flipped(record.gate_inputs, other.gate_inputs, step.types)
        where = f", at {', '.join(flips)}" if flips else ""
        step.say(f"{mode} mode, float32: {sum(flips.values())} gates of the {word} flip under rounding{where}")
    ref, truth, port = (
        {item: array for item, array in side.items() if item.kind not in ("gradient", "parameter")}
        for side in (ref, truth, port)
    )
    limits = kernel_limits(truth, ref) | {RATE: 0.0}
    limits, zeros = with_floors(limits, noise_floors(truth, U, record.input_scales), truth)
    named = [placed(side, mode=mode, dtype="float32") for side in (ref, port, limits, dict.fromkeys(zeros))]
    step.check(compare(*named[:3], title=f"{mode} mode, float32, 1 iteration of SGD", zeros=named[3]))
    criterion, logits = step.ref.module("train.criterion").build_criterion(), record.outputs["logits"]
    gradient = step.ref.backend.loss_and_gradient(criterion, (logits, labels), step.ref.device)["gradient"]
    pair = step.pair([images], [gradient])
    step.check(backward_alone(pair, train), group=lambda item: item.module.partition(".")[0])


def epoch_facts(package: Package, model, batches: list, freeze_norm: bool) -> dict[Item, np.ndarray]:
    """What one side's `train_one_epoch` logs and leaves behind, started in the eval mode that an evaluation leaves."""
    backend, criterion = package.backend, package.module("train.criterion").build_criterion()
    optimizer, _ = optimizer_of(package, model, EPOCH_RECIPE)
    model.eval()
    lines = []
    tensors = [tuple(backend.to_tensor(array, model) for array in batch) for batch in batches]
    engine = package.module("train.engine")
    how = engine.Settings(print_freq=1, freeze_norm=freeze_norm), engine.Hooks(log=lines.append)
    with backend.exact_constants():
        engine.train_one_epoch(model, criterion, optimizer, tensors, package.device, 0, *how)
    untimed = [re.sub(r"(cost|ips): [\d.]+", r"\1", line) for line in lines]
    return {
        LOG: np.array(untimed),
        RATE: np.array(backend.learning_rate(optimizer)),
        **placed(state_items({}, backend.parameters(model), backend.buffers(model)), section="epoch"),
    }


def check_epoch(step: Step, freeze_norm: bool) -> None:
    """float64: the training loop itself, over three batches, some of whose labels the model has right."""
    rng = np.random.default_rng([step.args.seed, 7])
    batches = [draw_batch(rng, step.num_classes) for _ in range(3)]
    facts = {}
    for dtype in ("float64", "float32"):
        model = step.build(step.ref, dtype)
        if dtype == "float64":
            for images, labels in batches:
                trace = step.ref.backend.forward(copy.deepcopy(model), images, train=not freeze_norm)
                labels[::2] = trace.outputs["logits"][::2].argmax(axis=1)
        facts[dtype] = epoch_facts(step.ref, model, batches, freeze_norm)
    model = step.build(step.port, "float64")
    try:
        port = epoch_facts(step.port, model, batches, freeze_norm)
    except UserError as error:  # such as a loss that is NaN on the port's side only
        step.say(f"the port's train_one_epoch refused to go on: {error}")
        port = {}
    limits = semantic_limits(facts["float64"], facts["float32"]) | {RATE: 0.0}
    title = f"train_one_epoch, float64, 3 batches{', batch norm frozen' if freeze_norm else ''}"
    step.check(compare(facts["float64"], port, limits, title=title))
    step.say(f"  {facts['float64'][LOG][-1]}")


def learning_rates(package: Package, model, recipe: dict) -> np.ndarray:
    """How far SGD without momentum moves a parameter whose gradient is 1, in each of 600 epochs: what the rate is.

    `model` is a linear layer of one weight, float64, which is made 0 again before each step.
    """
    settings = {**OFFICIAL, "momentum": 0.0, "weight_decay": 0.0, "epochs": EPOCHS, **recipe}
    optimizer, lr_scheduler = optimizer_of(package, model, settings)
    moves = []
    for _ in range(EPOCHS):
        package.backend.set_value(model.weight, np.zeros((1, 1)))
        package.backend.set_gradients(model, {"weight": np.ones((1, 1))})
        optimizer.step()
        lr_scheduler.step()
        moves.append(-model.weight.item())
    return np.array(moves)


def check_schedules(step: Step) -> None:
    ref, port = {}, {}
    for name, recipe in SCHEDULES.items():
        one = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        other = paddle.nn.Linear(1, 1, bias_attr=False)
        other.to(dtype="float64")
        ref[Item(f"lr, {name}", "lr")] = learning_rates(step.ref, one, recipe)
        port[Item(f"lr, {name}", "lr")] = learning_rates(step.port, other, recipe)
    step.check(compare(ref, port, exact_limits(ref), title=f"learning rates of {EPOCHS} epochs"), group=str)


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    files = ({}, {})
    check_schedules(step)
    check_optimizers(step)
    for run in RUNS:
        check_iterations(step, run, files)
    check_accumulation(step)
    for train in (True, False):
        check_float32(step, train)
        check_epoch(step, freeze_norm=not train)
    return step.finish("losses", *files, log_stem="backward")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
