"""Rung 05: gradients, optimizer, schedule and batch-norm statistics, over many iterations.

Proves: over 12 iterations of SGD with momentum and weight decay, in train and in eval mode, the loss, the learning
rate, every gradient by name, every parameter and every batch-norm buffer agree after each iteration; the schedule gives
the same learning rates for 600 epochs; and every layer's gradients agree in float32. Does not prove: that float32 runs
stay together (none do for long, not even one framework's with itself).
Stands on: 01 (forward), 04 (loss).

  python steps/05_test_backward.py       ends in: PASS 05_test_backward: all ... items within their limits
"""

import argparse
import copy
import re
from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm

import mobilenetv3_paddle.train.criterion
import mobilenetv3_paddle.train.engine
import mobilenetv3_paddle.train.optimizer
import mobilenetv3_ref.train.criterion
import mobilenetv3_ref.train.engine
import mobilenetv3_ref.train.optimizer
from reprod.align import capture_paddle, capture_torch
from reprod.align.compare import Verdict, compare
from reprod.align.gates import flipped
from reprod.align.limits import (
    U64,
    C,
    U,
    exact_limits,
    kernel_limits,
    largest,
    mean_floors,
    semantic_limits,
    with_floors,
)
from reprod.align.pair import backward_alone
from reprod.align.probe import probe_images
from reprod.align.recording import Recording
from reprod.align.step import Step, run_step, step_parser
from reprod.recipe.cli import UserError

NAME = "05_test_backward"
ITERATIONS = 12
BATCH, HEIGHT, WIDTH = 5, 96, 64  # small, so that few activations lie near a kink; no power of two in any mean
# A small rate, so that rounding is not magnified from one iteration to the next; the schedule steps twice. Paddle's
# Momentum holds momentum and weight decay as float32, so both are numbers that float32 holds, and no usual defaults.
RECIPE = {"lr": 0.0005, "momentum": 0.875, "weight_decay": 2**-12, "lr_step_size": 5, "lr_gamma": 0.5}
EPOCH_RECIPE = {**RECIPE, "lr": 0.002, "lr_step_size": 1}  # a rate that shows in the log, a schedule that would step
SCHEDULES = {"official": (0.064, 2, 0.973), "simple": (0.1, 30, 0.1)}


def draw_batch(rng: np.random.Generator, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    return probe_images(rng, BATCH, HEIGHT, WIDTH), rng.integers(0, num_classes, BATCH)


def backwards(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """From the output to the input, as they are computed: the first that differs is where the fault lies."""
    return {f"grad/{name}": gradients[name] for name in reversed(gradients)}


def run_ref(step: Step, batches: list, dtype: str, train: bool) -> Iterator[tuple[dict, Recording]]:
    """({item: array} after each iteration, recording of its forward pass) of the reference."""
    model = capture_torch.build(step.ref_model, step.arrays, dtype, step.torch_device)
    criterion = mobilenetv3_ref.train.criterion.build_criterion()
    optimizer, lr_scheduler = mobilenetv3_ref.train.optimizer.build_optimizer(model, **RECIPE)
    for images, labels in batches:
        model.eval()
        if train:
            mobilenetv3_ref.train.engine.set_train_mode(model)
        inputs = [capture_torch.to_tensor(array, model) for array in (images, labels)]
        lr = optimizer.param_groups[0]["lr"]
        with capture_torch.recording(model) as record:
            loss, _ = mobilenetv3_ref.train.engine.train_step(model, criterion, optimizer, *inputs)
        lr_scheduler.step()
        yield (
            {
                "loss": loss.detach().cpu().numpy(),
                "lr": np.array(lr),
                **backwards(capture_torch.gradients(model)),
                **{f"param/{name}": array for name, array in capture_torch.parameters(model).items()},
                **{f"buffer/{name}": array for name, array in capture_torch.buffers(model).items()},
            },
            record,
        )


def run_paddle(step: Step, batches: list, dtype: str, train: bool) -> Iterator[tuple[dict, Recording]]:
    """The same of the port."""
    model = capture_paddle.build(step.paddle_model, step.arrays, dtype, step.paddle_device, step.types)
    criterion = mobilenetv3_paddle.train.criterion.build_criterion()
    optimizer, lr_scheduler = mobilenetv3_paddle.train.optimizer.build_optimizer(model, **RECIPE)
    for images, labels in batches:
        model.eval()
        if train:
            mobilenetv3_paddle.train.engine.set_train_mode(model)
        inputs = [capture_paddle.to_tensor(array, model) for array in (images, labels)]
        lr = optimizer.get_lr()
        with capture_paddle.recording(model) as record:
            loss, _ = mobilenetv3_paddle.train.engine.train_step(model, criterion, optimizer, *inputs)
        lr_scheduler.step()
        yield (
            {
                "loss": loss.numpy(),
                "lr": np.array(lr),
                **backwards(capture_paddle.gradients(model, step.types)),
                **{f"param/{name}": array for name, array in capture_paddle.parameters(model, step.types).items()},
                **{f"buffer/{name}": array for name, array in capture_paddle.buffers(model, step.types).items()},
            },
            record,
        )


def floors(items: dict[str, np.ndarray], input_scales: dict[str, float], unit: float) -> dict[str, float]:
    """The rounding, in `unit`, of what can cancel to zero by structure: gradients and running means.

    Such a gradient is a sum of terms of any layer's size: that of a bias whose shift the next batch norm removes, say.
    """
    found = [largest(array) for name, array in items.items() if name.startswith("grad/")]
    gradient = C * unit * max(found, default=0.0)
    means = {f"buffer/{name}": floor for name, floor in mean_floors(input_scales, unit).items()}
    return dict.fromkeys([name for name in items if name.startswith("grad/")], gradient) | means


def check_iterations(step: Step, train: bool, files: tuple[dict, dict]) -> None:
    """float64: all iterations, three runs side by side, so that only one iteration is held at a time."""
    mode = "train" if train else "eval"
    rng = np.random.default_rng([step.args.seed, 5])
    batches = [draw_batch(rng, step.num_classes) for _ in range(ITERATIONS)]
    runs = (
        run_ref(step, batches, "float64", train),
        run_ref(step, batches, "float32", train),
        run_paddle(step, batches, "float64", train),
    )
    rows, zeros = [], set()
    curves = {name: ([], []) for name in ("loss", "lr")}
    for i, ((truth, record), (ref, _), (port, _)) in enumerate(
        tqdm(zip(*runs, strict=True), f"{mode} mode", ITERATIONS, leave=False, disable=None)
    ):
        limits, zeros = with_floors(
            semantic_limits(truth, ref) | {"lr": 0.0}, floors(truth, record.input_scales, U64), truth
        )
        named = [{f"iteration {i}/{name}": value for name, value in side.items()} for side in (truth, port, limits)]
        rows += compare(*named, zeros={f"iteration {i}/{name}" for name in zeros}).rows
        for kept, side in zip(files, (truth, port), strict=True):
            kept.update({f"{mode}/{name}_{i}": side[name] for name in ("loss", "lr")})
        for name, (ref_curve, port_curve) in curves.items():
            ref_curve.append(truth[name].item())
            port_curve.append(port[name].item())
    step.curves |= {f"{mode} mode, {k}": (np.array(one), np.array(other)) for k, (one, other) in curves.items()}
    title = f"{mode} mode, float64, {ITERATIONS} iterations of SGD"
    step.check(Verdict(title, rows), group=lambda name: name.split("/")[0])
    step.locate([batches[0][0]], [rng.normal(size=(BATCH, step.num_classes))])
    count = sum(name.startswith("grad/") for name in zeros)
    step.say(f"  {count} gradients are zero by structure: both sides' are below the rounding of the others")


def check_float32(step: Step, train: bool) -> None:
    """float32: one iteration's loss and statistics, and the gradients of every layer alone.

    Through the whole network gradients cannot be judged in float32: one input of a ReLU that rounding puts on the other
    side of zero moves them by up to 3 percent on a faultless port. Those that did are counted and named. A layer alone,
    on the reference's own input and upstream gradient, has none.
    """
    mode = "train" if train else "eval"
    images, labels = draw_batch(np.random.default_rng([step.args.seed, 6]), step.num_classes)
    (truth, record), (ref, ref_record), (port, port_record) = (
        next(side(step, [(images, labels)], dtype, train))
        for side, dtype in ((run_ref, "float64"), (run_ref, "float32"), (run_paddle, "float32"))
    )
    for word, other in (("reference", ref_record), ("port", port_record)):
        flips = flipped(record.gate_inputs, other.gate_inputs, step.types)
        where = f", at {', '.join(flips)}" if flips else ""
        step.say(f"{mode} mode, float32: {sum(flips.values())} gates of the {word} flip under rounding{where}")
    judged = [name for name in ref if not name.startswith(("grad/", "param/"))]
    ref, truth, port = ({name: side[name] for name in judged if name in side} for side in (ref, truth, port))
    limits = kernel_limits(truth, ref) | {"lr": 0.0}
    limits, zeros = with_floors(limits, floors(truth, record.input_scales, U), truth)
    step.check(compare(ref, port, limits, title=f"{mode} mode, float32, 1 iteration of SGD", zeros=zeros))
    pair = step.pair([images], [step_gradient(record.outputs["logits"], labels)])
    step.check(backward_alone(pair, train), group=lambda name: name.split("/")[1].split(".")[0])


def step_gradient(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The criterion's gradient with respect to the logits (N, C)."""
    criterion = mobilenetv3_ref.train.criterion.build_criterion()
    return capture_torch.loss_and_gradient(criterion, logits, labels, "cpu")["gradient"]


def epoch_facts(
    side, capture, model, batches: list, device, freeze_norm: bool, get_lr: Callable, *types
) -> dict[str, np.ndarray]:
    """What one side's `train_one_epoch` logs and leaves behind, started in the eval mode that an evaluation leaves."""
    criterion, (optimizer, _) = side.criterion.build_criterion(), side.optimizer.build_optimizer(model, **EPOCH_RECIPE)
    model.eval()
    lines = []
    tensors = [tuple(capture.to_tensor(array, model) for array in batch) for batch in batches]
    with capture.exact_constants():
        side.engine.train_one_epoch(
            model, criterion, optimizer, tensors, device, 0, print_freq=1, freeze_norm=freeze_norm, log=lines.append
        )
    untimed = [re.sub(r"(cost|ips): [\d.]+", r"\1", line) for line in lines]
    arrays = {**capture.parameters(model, *types), **capture.buffers(model, *types)}
    return {
        "log": np.array(untimed),
        "lr": np.array(get_lr(optimizer)),
        **{f"epoch/{name}": array for name, array in arrays.items()},
    }


def check_epoch(step: Step, freeze_norm: bool) -> None:
    """float64: the training loop itself, over three batches, some of whose labels the model has right."""
    rng = np.random.default_rng([step.args.seed, 7])
    batches = [draw_batch(rng, step.num_classes) for _ in range(3)]
    facts = {}
    for dtype in ("float64", "float32"):
        model = capture_torch.build(step.ref_model, step.arrays, dtype, step.torch_device)
        if dtype == "float64":
            for images, labels in batches:
                logits = capture_torch.run_forward(copy.deepcopy(model), images, train=not freeze_norm).outputs[
                    "logits"
                ]
                labels[::2] = logits[::2].argmax(axis=1)
        side = (mobilenetv3_ref.train, capture_torch, model, batches, step.torch_device, freeze_norm)
        facts[dtype] = epoch_facts(*side, lambda optimizer: optimizer.param_groups[0]["lr"])
    model = capture_paddle.build(step.paddle_model, step.arrays, "float64", step.paddle_device, step.types)
    side = (mobilenetv3_paddle.train, capture_paddle, model, batches, step.paddle_device, freeze_norm)
    try:
        port = epoch_facts(*side, lambda optimizer: optimizer.get_lr(), step.types)
    except UserError as error:  # such as a loss that is NaN on the port's side only
        step.say(f"the port's train_one_epoch refused to go on: {error}")
        port = {}
    limits = semantic_limits(facts["float64"], facts["float32"]) | {"lr": 0.0}
    title = f"train_one_epoch, float64, 3 batches{', batch norm frozen' if freeze_norm else ''}"
    step.check(compare(facts["float64"], port, limits, title=title))
    step.say(f"  {facts['float64']['log'][-1]}")


def learning_rates(optimizer, lr_scheduler, get_lr) -> np.ndarray:
    """The learning rate of each of 600 epochs, as the optimizer has it."""
    rates = []
    for _ in range(600):
        rates.append(get_lr())
        optimizer.step()
        lr_scheduler.step()
    return np.array(rates)


def check_schedules(step: Step) -> None:
    ref, port = {}, {}
    for name, (lr, step_size, gamma) in SCHEDULES.items():
        recipe = {**RECIPE, "lr": lr, "lr_step_size": step_size, "lr_gamma": gamma}
        one = mobilenetv3_ref.train.optimizer.build_optimizer(step.ref_model(), **recipe)
        other = mobilenetv3_paddle.train.optimizer.build_optimizer(step.paddle_model(), **recipe)
        ref[f"lr, {name}"] = learning_rates(*one, lambda optimizer=one[0]: optimizer.param_groups[0]["lr"])
        port[f"lr, {name}"] = learning_rates(*other, other[0].get_lr)
    step.check(compare(ref, port, exact_limits(ref), title="learning rates of 600 epochs"), group=str)


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    files = ({}, {})
    check_schedules(step)
    for train in (True, False):
        check_iterations(step, train, files)
        check_float32(step, train)
        check_epoch(step, freeze_norm=not train)
    return step.finish("losses", *files, log_stem="backward")


if __name__ == "__main__":
    run_step(NAME, main, get_args_parser())
