"""Rung 07: a real training run, from the first batch to the last evaluation, on scikit-learn's handwritten digits.

Proves: in float64, where rounding is not yet magnified, both sides' own loaders and training loops stay together over
60 steps of 3 epochs, in every loss and at the end in every parameter and buffer; in float32, with dropout, the port's
whole runs are runs of the reference, by a test that fails a faultless port once in a thousand runs of this rung; and
both sides learn: 98 % top-1 in eval mode, once batch norm's statistics are re-estimated with the final weights, which
the running ones with momentum 0.01 lag behind for thousands of steps. Does not prove: that float32 runs stay together
step for step (none do), or that ImageNet is learned. With --short one run of the port is judged, of 75 steps, too few
to learn the digits: top-1 needs to be 30 % then, and is none of the test's features. The test and its rate of false
alarms are the same.
Stands on: 01 to 06. Runs on the CPU whatever --device says, and from initial weights whatever --weights says.

  python steps/07_test_train.py --short  ends in: PASS 07_test_train: all ... items within their limits
"""

import argparse
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mobilenetv3_common.digits import write_digits
from mobilenetv3_common.seeds import derive_seed
from mobilenetv3_proof import trajectory
from mobilenetv3_proof.package import PORT, REF
from mobilenetv3_proof.step import Step, step_parser
from mobilenetv3_proof.trajectory_worker import Recipe, Trainee, Watched
from portproof.compare import FAIL, Item, Row, Verdict, compare, placed, tensor_item
from portproof.compare.tolerances import SEMANTIC_RTOL, U64, largest, summed_floor, with_floors
from portproof.ladder.rung import run_rung

NAME = "07_test_train"

# float64. At this rate rounding grows a thousandfold in 60 steps, at five times the rate a millionfold.
EXACT = {"epochs": 3, "batch_size": 6, "lr": 0.01, "momentum": 0.875, "weight_decay": 2**-10, "lr_gamma": 0.5}
EXACT_PER_CLASS = 12  # 20 batches an epoch
# The growth of rounding is measured: a second run of the reference, in which every pixel and every parameter moves by
# one unit in the last place before each step. That is one rounding where a step has several hundred, which mostly
# cancel: the port was seen 0.6 to 2.1 times as far from the reference. If GROWTH times it is more than TOGETHER, there
# is nothing that could be compared.
GROWTH = 16.0
TOGETHER = 1e-9


@dataclass(frozen=True)
class Plan:
    """The float32 runs: of the reference `draws` for each seed, of the port one."""

    recipe: dict[str, float]
    seeds: int
    draws: int
    train_per_class: int | None
    val_per_class: int | None
    top1: float  # that both sides must have on average, with re-estimated statistics


# Mirrored digits are hard to tell apart: of runs that must learn them only a few see them so.
LEARNS = {"epochs": 16, "batch_size": 32, "lr": 0.1, "lr_gamma": 0.73, "crop_scale": 0.9, "hflip_prob": 0.2}
FULL = Plan(LEARNS, seeds=2, draws=4, train_per_class=None, val_per_class=None, top1=0.98)
SHORT = Plan({"epochs": 5}, seeds=1, draws=8, train_per_class=24, val_per_class=8, top1=0.3)


class Exact:
    """A training loader's batches in float64; with `jitter`, of (image, label) after all moved by one unit."""

    def __init__(self, loader: Any, trainee: Trainee, model: Any, jitter: np.random.Generator | None) -> None:
        self.loader, self.trainee, self.model, self.jitter = loader, trainee, model, jitter

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for image, label in self.loader:
            array = image.numpy().astype(np.float64)
            if self.jitter is not None:
                array = self.moved(array)
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.copy_(torch.from_numpy(self.moved(parameter.numpy())))
            yield self.trainee.backend.to_tensor(array, self.model), label

    def moved(self, array: np.ndarray) -> np.ndarray:
        """Each value by one unit in the last place, up or down."""
        return array * (1 + self.jitter.choice([-2 * U64, 2 * U64], array.shape))


LOSS = Item("loss", "loss")


def exact_run(
    step: Step, trainee: Trainee, arrays: dict, data_path: Path, jitter: np.random.Generator | None = None
) -> dict:
    """The losses of all steps, and every parameter and buffer behind them, in float64."""
    recipe = Recipe(step.args.model, **EXACT)
    factory = partial(trainee.models.MODELS[recipe.model], num_classes=10, dropout=0.0)
    backend, model = trainee.backend, trainee.build(factory, arrays, "float64")
    optimizer, lr_scheduler = trainee.build_optimizer(model, recipe)
    watched = Watched(backend, trainee.criterion.build_criterion())
    loader, _ = trainee.loaders(str(data_path), recipe, step.args.seed)
    with backend.exact_constants():
        for epoch in range(recipe.epochs):
            trainee.data.set_epoch(loader, epoch)
            batches = Exact(loader, trainee, model, jitter)
            silent = trainee.engine.Hooks(log=lambda line: None)
            trainee.engine.train_one_epoch(model, watched, optimizer, batches, trainee.device, epoch, hooks=silent)
            lr_scheduler.step()
    return {
        LOSS: np.array(watched.losses),
        **{tensor_item(name, "parameter"): array for name, array in backend.parameters(model).items()},
        **{tensor_item(name, "buffer"): array for name, array in backend.buffers(model).items()},
    }


def check_exact(step: Step, trainees: dict[str, Trainee], data_path: Path) -> None:
    """float64: both sides together to the last step."""
    ref = trainees[REF]
    model = ref.models.MODELS[step.args.model](num_classes=10)
    ref.models.shared_init(model, step.args.seed)
    arrays = ref.backend.parameters(model) | ref.backend.buffers(model)
    truth = exact_run(step, ref, arrays, data_path)
    moved = exact_run(step, ref, arrays, data_path, np.random.default_rng([step.args.seed, 7]))
    steps = truth[LOSS].size
    floor = summed_floor(steps)  # such as the gradient of a bias that the next batch norm removes
    scales = {item: largest(array) for item, array in truth.items() if largest(array) > floor}
    growths = {item: largest(moved[item] - truth[item]) / scale for item, scale in scales.items()}
    worst = max(growths, key=growths.get)
    rtol = max(SEMANTIC_RTOL, GROWTH * growths[worst])
    step.say(
        f"float64: moved by one unit in the last place before each step, the reference is {growths[worst]:.1e} of the "
        f"largest value from itself after {steps} steps, at {worst}; {GROWTH:g} times that, {rtol:.1e}, is the limit"
    )
    if rtol > TOGETHER:
        step.refuse(f"the reference does not stay within {TOGETHER / GROWTH:.0e} of itself over {steps} steps")
        return
    limits = {item: rtol * largest(a) if a.dtype.kind == "f" else 0.0 for item, a in truth.items()}
    floats = {item: floor for item, array in truth.items() if array.dtype.kind == "f"}
    limits, zeros = with_floors(limits, floats, truth)
    port = exact_run(step, trainees[PORT], arrays, data_path)
    title = f"train mode, float64, {steps} steps of SGD on digits"
    there = {"mode": "train", "dtype": "float64"}
    truth, port, limits, zeros = (placed(side, **there) for side in (truth, port, limits, dict.fromkeys(zeros)))
    step.check(compare(truth, port, limits, title=title, zeros=zeros), group=lambda item: item.kind)


@contextmanager
def cpu_time(step: Step, what: str) -> Iterator[None]:
    """Say how long it takes the processors, which on a busy machine is less than the clock says."""

    def used() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    before = used()
    yield
    step.say(f"{what}: {used() - before:.0f} s of processor time")


def train(step: Step, plan: Plan, data_path: Path) -> tuple[list, list] | None:
    """([[the reference's records of a seed]], [the port's record of a seed]); None if there are none."""
    recipe = Recipe(step.args.model, **plan.recipe)
    seeds = [derive_seed(step.args.seed, 7, number) for number in range(plan.seeds)]
    runs = {
        REF: {f"{i}.{k}": {"seed": seed, "draw": k} for i, seed in enumerate(seeds) for k in range(plan.draws)},
        PORT: {f"{i}": {"seed": seed, "draw": 0} for i, seed in enumerate(seeds)},
    }
    with tempfile.TemporaryDirectory() as folder:
        done = trajectory.launch(Path(folder), data_path, recipe, runs)
    for package, records in done.items():
        if isinstance(records, trajectory.RunFailed):
            step.say(records.log)
            title = f"training runs of {package}"
            failed = Verdict(title, [Row(Item(title), FAIL, reason=str(records))])
            step.check(failed if package == PORT else Verdict(title, refusal=str(records)))
    if any(isinstance(records, trajectory.RunFailed) for records in done.values()):
        return None
    ref = [[done[REF][f"{i}.{k}"] for k in range(plan.draws)] for i in range(plan.seeds)]
    return ref, [done[PORT][f"{i}"] for i in range(plan.seeds)]


def check_runs(step: Step, plan: Plan, ref: list, port: list) -> None:
    """float32: the learning rates, the test, and that both sides have learned."""
    rate = Item("lr", "lr")
    rates = {rate: ref[0][0]["lr"]}, {rate: port[0]["lr"]}
    step.check(compare(*rates, {rate: 0.0}, title="learning rate of each epoch"), group=str)
    features = trajectory.FEATURES | (trajectory.TOP1 if plan is FULL else {})
    title = f"float32, {plan.seeds} runs of the port among {plan.seeds * plan.draws} of the reference"
    verdict = trajectory.judge(ref, port, features, title)
    step.check(verdict, group=str)
    step.say(f"  each limit is what a faultless port exceeds once in {len(features) / trajectory.ALPHA:.0f} runs")
    reached = {}
    for who, records in (("reference", sum(ref, [])), ("port", port)):
        for what, statistics in (("eval", "running"), ("reestimated_eval", "re-estimated")):
            top1 = np.array([record[what][1] for record in records])
            step.say(f"  top-1 of the {who}, {statistics} statistics: {', '.join(f'{value:.2%}' for value in top1)}")
        reached[Item(f"{who}, mean top-1", "metric")] = top1.mean()
    whole = dict.fromkeys(reached, np.float64(1))
    title = f"top-1 in eval mode (as the port) against 1 (as the reference), {plan.top1:.0%} needed"
    step.check(compare(whole, reached, dict.fromkeys(reached, 1 - plan.top1), title=title), group=str)


def draw_curves(step: Step, plan: Plan, ref: list, port: list) -> tuple[dict, dict]:
    """Keep the curves of each seed for the report; (those of the reference's first run, the port's)."""
    kept: tuple[dict, dict] = ({}, {})
    for i, (records, record) in enumerate(zip(ref, port, strict=True)):
        sides = [by_epoch(one) for one in (*records, record)]
        for what in CURVES:
            name = f"seed {i}, {what}"
            step.curves[name] = np.array([side[what] for side in sides[:-1]]), sides[-1][what]
            for side, array in zip(kept, (sides[0][what], sides[-1][what]), strict=True):
                side[name] = array
    return kept


CURVES = ("loss", "lr", "training top-1", "top-1")


def by_epoch(record: trajectory.Record) -> dict[str, np.ndarray]:
    """Each curve's value at each epoch, (epochs,)."""
    losses, right = (record[name].reshape(len(record["lr"]), -1).mean(axis=1) for name in ("losses", "right"))
    return dict(zip(CURVES, (losses, record["lr"], right, record["top1"]), strict=True))


def get_args_parser() -> argparse.ArgumentParser:
    parser = step_parser(NAME, __doc__)
    parser.add_argument("--short", action="store_true", help="a minute's version of all of it, on one core")
    return parser


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    plan = SHORT if args.short else FULL
    trainees = {package: Trainee(package) for package in (REF, PORT)}

    def digits(*per_class: int | None) -> Path:
        folder = step.out / "digits" / "_".join(map(str, per_class))
        write_digits(folder, *per_class)
        return folder

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors as small, more threads only wait for each other
    try:
        with cpu_time(step, "float64"):
            check_exact(step, trainees, digits(EXACT_PER_CLASS, 1))
    finally:
        torch.set_num_threads(threads)
    with cpu_time(step, "float32"):
        runs = train(step, plan, digits(plan.train_per_class, plan.val_per_class))
    files: tuple[dict, dict] = ({}, {})
    if runs:
        check_runs(step, plan, *runs)
        files = draw_curves(step, plan, *runs)
    return step.finish("train", *files, log_stem="train")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
