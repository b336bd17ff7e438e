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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import paddle
import torch
from tqdm import tqdm

import mobilenetv3_paddle.train.criterion
import mobilenetv3_paddle.train.engine
import mobilenetv3_paddle.train.optimizer
import mobilenetv3_ref.train.criterion
import mobilenetv3_ref.train.engine
import mobilenetv3_ref.train.optimizer
from reprod.align import capture_paddle, capture_torch
from reprod.align.compare import Item, Verdict, compare, placed, tensor_item
from reprod.align.convert import torch_to_paddle
from reprod.align.gates import flipped
from reprod.align.limits import (
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
from reprod.align.pair import backward_alone
from reprod.align.probe import probe_images
from reprod.align.recording import Recording
from reprod.align.step import Step, run_step, step_parser
from reprod.recipe.cli import UserError

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
STATE = {c: (c.gradients, c.parameters, c.buffers) for c in (capture_torch, capture_paddle)}


def run_ref(step: Step, run: Run, batches: list, dtype: str, record: bool) -> Iterator[tuple[dict, Recording | None]]:
    """({item: array} after each iteration, recording of its forward pass if asked for) of the reference."""
    model = capture_torch.build(step.ref_model, step.arrays, dtype, step.torch_device)
    criterion = mobilenetv3_ref.train.criterion.build_criterion()
    optimizer, lr_scheduler = mobilenetv3_ref.train.optimizer.build_optimizer(model, opt=run.opt, **run.recipe)
    for images, labels in batches:
        model.eval()
        if run.train:
            mobilenetv3_ref.train.engine.set_train_mode(model)
        inputs = [capture_torch.to_tensor(array, model) for array in (images, labels)]
        lr = optimizer.param_groups[0]["lr"]
        with capture_torch.recording(model) if record else capture_torch.exact_constants() as recorded:
            loss, _ = mobilenetv3_ref.train.engine.train_step(
                model, criterion, optimizer, *inputs, clip_grad_norm=run.clip_grad_norm
            )
        lr_scheduler.step()
        yield (
            {
                LOSS: loss.detach().cpu().numpy(),
                RATE: np.array(lr),
                **state_items(*(read(model) for read in STATE[capture_torch])),
            },
            recorded,
        )


def run_paddle(
    step: Step, run: Run, batches: list, dtype: str, record: bool
) -> Iterator[tuple[dict, Recording | None]]:
    """The same of the port."""
    model = capture_paddle.build(step.paddle_model, step.arrays, dtype, step.paddle_device, step.types)
    criterion = mobilenetv3_paddle.train.criterion.build_criterion()
    optimizer, lr_scheduler = mobilenetv3_paddle.train.optimizer.build_optimizer(model, opt=run.opt, **run.recipe)
    for images, labels in batches:
        model.eval()
        if run.train:
            mobilenetv3_paddle.train.engine.set_train_mode(model)
        inputs = [capture_paddle.to_tensor(array, model) for array in (images, labels)]
        lr = optimizer.get_lr()
        with capture_paddle.recording(model) if record else capture_paddle.exact_constants() as recorded:
            loss, _ = mobilenetv3_paddle.train.engine.train_step(
                model, criterion, optimizer, *inputs, clip_grad_norm=run.clip_grad_norm
            )
        lr_scheduler.step()
        yield (
            {
                LOSS: loss.numpy(),
                RATE: np.array(lr),
                **state_items(*(read(model, step.types) for read in STATE[capture_paddle])),
            },
            recorded,
        )


def check_iterations(step: Step, run: Run, files: tuple[dict, dict]) -> None:
    """float64: all iterations, three runs side by side, so that only one iteration is held at a time."""
    mode = "train" if run.train else "eval"
    rng = np.random.default_rng([step.args.seed, 5])
    batches = [draw_batch(rng, step.num_classes) for _ in range(ITERATIONS)]
    runs = (
        run_ref(step, run, batches, "float64", record=True),  # what comes into each batch norm sets floors
        run_ref(step, run, batches, "float32", record=False),
        run_paddle(step, run, batches, "float64", record=False),
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
    shapes = {name: parameter.shape for name, parameter in step.ref_model().named_parameters()}
    drawn = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(ITERATIONS)]
    converted = [torch_to_paddle(gradients, step.types) for gradients in drawn]
    ref_start = capture_torch.build(step.ref_model, step.arrays, "float64", step.torch_device)
    port_start = capture_paddle.build(step.paddle_model, step.arrays, "float64", step.paddle_device, step.types)
    ref, port = {}, {}
    for opt, groups in OPTIMIZERS.items():
        recipe = {**OFFICIAL, **groups, "opt": opt}
        model = copy.deepcopy(ref_start)
        move(mobilenetv3_ref.train, model, recipe, lambda array: torch.tensor(array, device=step.torch_device), drawn)
        ref |= {tensor_item(k, "parameter", section=opt): a for k, a in capture_torch.parameters(model).items()}
        model = copy.deepcopy(port_start)
        move(mobilenetv3_paddle.train, model, recipe, paddle.to_tensor, converted)
        moved = capture_paddle.parameters(model, step.types)
        port |= {tensor_item(name, "parameter", section=opt): array for name, array in moved.items()}
    limits = {item: SEMANTIC_RTOL * largest(array) for item, array in ref.items()}
    title = f"parameters after {ITERATIONS} updates with drawn gradients at rate {OFFICIAL['lr']:g}, float64"
    step.check(compare(ref, port, limits, title=title), group=lambda item: item.section)


def move(side, model, recipe: dict, to_tensor: Callable, drawn: list[dict[str, np.ndarray]]) -> None:
    """Update `model` once with each of the `drawn` gradients, by parameter; the schedule steps after each."""
    optimizer, lr_scheduler = side.optimizer.build_optimizer(model, **recipe)
    for gradients in drawn:
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.grad = to_tensor(gradients[name])
        optimizer.step()
        lr_scheduler.step()


def check_accumulation(step: Step) -> None:
    """float64, eval mode: two batches whose gradients are added up, on either side, against both as one batch.

    With fixed statistics every image counts for itself, so that the mean over all of them is all there is to get wrong.
    """
    rng = np.random.default_rng([step.args.seed, 8])
    halves = [draw_batch(rng, step.num_classes) for _ in range(2)]
    joined = [tuple(np.concatenate(arrays) for arrays in zip(*halves, strict=True))]
    truth, ref = (accumulated(step, capture_torch, joined, dtype) for dtype in ("float64", "float32"))
    limits, zeros = with_floors(semantic_limits(truth, ref), noise_floors(truth, U64), truth)
    for word, capture in (("reference", capture_torch), ("port", capture_paddle)):
        title = f"the {word}'s gradients of two batches added up, against the reference's of both as one, float64"
        step.check(compare(truth, accumulated(step, capture, halves, "float64"), limits, title=title, zeros=zeros))


def accumulated(step: Step, capture, batches: list, dtype: str) -> dict[Item, np.ndarray]:
    """Gradients and parameters of one side after one update of the optimizer from all `batches`."""
    if capture is capture_torch:
        side, types = mobilenetv3_ref.train, ()
        model = capture.build(step.ref_model, step.arrays, dtype, step.torch_device)
    else:
        side, types = mobilenetv3_paddle.train, (step.types,)
        model = capture.build(step.paddle_model, step.arrays, dtype, step.paddle_device, *types)
    model.eval()
    criterion, (optimizer, _) = side.criterion.build_criterion(), side.optimizer.build_optimizer(model, **RECIPE)
    for i, batch in enumerate(batches):
        inputs = [capture.to_tensor(array, model) for array in batch]
        with capture.exact_constants():
            side.engine.train_step(model, criterion, optimizer, *inputs, accumulation=(i, len(batches)))
    return state_items(capture.gradients(model, *types), capture.parameters(model, *types), {})


def check_float32(step: Step, train: bool) -> None:
    """float32: one iteration's loss and statistics, and the gradients of every layer alone.

    Through the whole network gradients cannot be judged in float32: one input of a ReLU that rounding puts on the other
    side of zero moves them by up to 3 percent on a faultless port. Those that did are counted and named. A layer alone,
    on the reference's own input and upstream gradient, has none.
    """
    mode = "train" if train else "eval"
    images, labels = draw_batch(np.random.default_rng([step.args.seed, 6]), step.num_classes)
    (truth, record), (ref, ref_record), (port, port_record) = (
        next(side(step, Run("sgd", train), [(images, labels)], dtype, record=True))
        for side, dtype in ((run_ref, "float64"), (run_ref, "float32"), (run_paddle, "float32"))
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
    pair = step.pair([images], [step_gradient(record.outputs["logits"], labels)])
    step.check(backward_alone(pair, train), group=lambda item: item.module.partition(".")[0])


def step_gradient(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The criterion's gradient with respect to the logits (N, C)."""
    criterion = mobilenetv3_ref.train.criterion.build_criterion()
    return capture_torch.loss_and_gradient(criterion, logits, labels, "cpu")["gradient"]


def epoch_facts(
    side, capture, model, batches: list, device, freeze_norm: bool, get_lr: Callable, *types
) -> dict[Item, np.ndarray]:
    """What one side's `train_one_epoch` logs and leaves behind, started in the eval mode that an evaluation leaves."""
    criterion, (optimizer, _) = side.criterion.build_criterion(), side.optimizer.build_optimizer(model, **EPOCH_RECIPE)
    model.eval()
    lines = []
    tensors = [tuple(capture.to_tensor(array, model) for array in batch) for batch in batches]
    with capture.exact_constants():
        side.engine.train_one_epoch(
            model,
            criterion,
            optimizer,
            tensors,
            device,
            0,
            side.engine.Settings(print_freq=1, freeze_norm=freeze_norm),
            side.engine.Hooks(log=lines.append),
        )
    untimed = [re.sub(r"(cost|ips): [\d.]+", r"\1", line) for line in lines]
    return {
        LOG: np.array(untimed),
        RATE: np.array(get_lr(optimizer)),
        **placed(state_items({}, capture.parameters(model, *types), capture.buffers(model, *types)), section="epoch"),
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
    limits = semantic_limits(facts["float64"], facts["float32"]) | {RATE: 0.0}
    title = f"train_one_epoch, float64, 3 batches{', batch norm frozen' if freeze_norm else ''}"
    step.check(compare(facts["float64"], port, limits, title=title))
    step.say(f"  {facts['float64'][LOG][-1]}")


def learning_rates(side, model, load: Callable[[dict], object], zero, recipe: dict) -> np.ndarray:
    """How far SGD without momentum moves a parameter whose gradient is 1, in each of 600 epochs: what the rate is.

    `model` is a linear layer of one weight, float64, which `load` makes `zero` again before each step.
    """
    optimizer, lr_scheduler = side.optimizer.build_optimizer(
        model, **{**OFFICIAL, "momentum": 0.0, "weight_decay": 0.0, "epochs": EPOCHS, **recipe}
    )
    moves = []
    for _ in range(EPOCHS):
        load({"weight": zero})
        model.weight.grad = zero + 1
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
        zeros = torch.zeros(1, 1, dtype=torch.float64), paddle.zeros([1, 1], "float64")
        ref[Item(f"lr, {name}", "lr")] = learning_rates(
            mobilenetv3_ref.train, one, one.load_state_dict, zeros[0], recipe
        )
        port[Item(f"lr, {name}", "lr")] = learning_rates(
            mobilenetv3_paddle.train, other, other.set_state_dict, zeros[1], recipe
        )
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
    run_step(NAME, main, get_args_parser())
