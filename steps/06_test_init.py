"""Rung 06: the initial weights, parameter by parameter.

Proves: every parameter of both sides is drawn from the distribution that torchvision's code means (fan-out Kaiming
normal for convolutions, N(0, 0.01) for linear weights) or is the constant that it sets; the draws follow the seed, and
are independent along every axis and of each other. Of the shared draw (--shared-init) it proves the same, and that
both sides hold the same bits, whatever was created or drawn before. Does not prove: that without --shared-init both
sides draw the same numbers (their generators differ).
Stands on: 01 (names and shapes). Of --weights only the number of classes is used.

  python steps/06_test_init.py           ends in: PASS 06_test_init: all ... items within their limits
"""

import argparse
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from mobilenetv3_common.seeds import derive_seed
from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import Step, step_parser
from portproof.compare import Item, compare, tensor_item
from portproof.compare.tolerances import exact_limits
from portproof.ladder.distribution import between, expectations, statistics
from portproof.ladder.rung import run_rung

NAME = "06_test_init"
# Each tensor is drawn until there are 1024 values of it, and at least twice; the smallest has 128. That is enough to
# see in any one tensor a deviation that is 25 % off (it is 29 % off without the gain of a ReLU), and a uniform or a
# normal that is cut off at two deviations; and in one of 50 000 values a deviation that is 2 % off.
VALUES, FEWEST_SEEDS, SEEDS = 1024, 2, 8

Arrays = dict[str, np.ndarray]  # by the reference's names


def initial(step: Step, package: Package, seed: int, shared: bool = False) -> Arrays:
    """What a model starts from; for the `shared` draw the framework's generators stay as they happen to be."""
    if not shared:
        package.module("device").seed_everything(seed)
    model = step.model(package, dropout=None)
    if shared:
        package.module("models").shared_init(model, seed)
    return package.backend.parameters(model) | package.backend.buffers(model)


def run_ref(step: Step, seed: int, shared: bool = False) -> Arrays:
    return initial(step, step.ref, seed, shared)


def run_paddle(step: Step, seed: int, shared: bool = False) -> Arrays:
    return initial(step, step.port, seed, shared)


def draw(side: Callable[[Step, int], Arrays], step: Step) -> Arrays:
    """Samples (seeds, *shape), of small tensors from more seeds."""
    kept: dict[str, list[np.ndarray]] = {}
    for number in range(SEEDS):
        for name, array in side(step, derive_seed(step.args.seed, number)).items():
            if number < max(FEWEST_SEEDS, math.ceil(VALUES / array.size)):
                kept.setdefault(name, []).append(array)
    return {name: np.stack(arrays) for name, arrays in kept.items()}


def exact_std(step: Step, name: str, shape: tuple[int, ...]) -> float | None:
    """The deviation of the normal distribution that the parameter is drawn from; None if it is not drawn."""
    module, _, leaf = name.rpartition(".")
    if leaf == "weight" and step.types[module] == "Conv2d":
        fan_out = shape[0] * math.prod(shape[2:])  # (C_out, C_in / groups, k, k): groups do not divide it
        return math.sqrt(2 / fan_out)
    return 0.01 if leaf == "weight" and step.types[module] == "Linear" else None


def constant(step: Step, name: str) -> float:
    """What a parameter or buffer that is not drawn is set to."""
    module, _, leaf = name.rpartition(".")
    return float(step.types[module] == "BatchNorm2d" and leaf in ("weight", "running_var"))


def expected(step: Step, name: str, sample: np.ndarray) -> tuple[Arrays, dict[str, float]]:
    """(what a right sample shows, how far it may be) for the parameter's distribution or constant."""
    std = exact_std(step, name, sample.shape[1:])
    if std is not None:
        return expectations(sample.shape, std)
    value = constant(step, name)
    return {f"all {value:g}": np.full_like(sample, value)}, {f"all {value:g}": 0.0}


def observed(step: Step, name: str, sample: np.ndarray, ref_sample: np.ndarray) -> Arrays:
    """What a sample shows; the reference's tells its name and shape."""
    std = exact_std(step, name, ref_sample.shape[1:])
    return statistics(sample, std) if std is not None else {f"all {constant(step, name):g}": sample}


def check_side(step: Step, who: str, side: Callable[[Step, int], Arrays], samples: Arrays, ref: Arrays) -> None:
    """One side's samples against the exact distributions and constants, and each draw against the others."""
    exact, limits = {}, {}
    found = {tensor_item(name, "structure"): sample for name, sample in samples.items() if name not in ref}
    for name, ref_sample in ref.items():
        items, allowed = expected(step, name, ref_sample)
        own = observed(step, name, samples[name], ref_sample) if name in samples else {}
        for all_items, new in ((exact, items), (limits, allowed), (found, own)):
            all_items.update({statistic(name, what): item for what, item in new.items()})

    drawn = {name: sample[0] for name, sample in samples.items() if sample[0].std() > 0}
    if not drawn:
        step.refuse(f"{who}: no parameter is drawn, each is a constant")
    again = side(step, derive_seed(step.args.seed, 0))
    exact |= {statistic(name, AGAIN): array for name, array in drawn.items()}
    found |= {statistic(name, AGAIN): again[name] for name in drawn}
    limits |= {statistic(name, AGAIN): 0.0 for name in drawn}
    others, limit = between(drawn) if len(drawn) > 1 else ({}, 0.0)
    exact |= {statistic(name, OTHERS): np.zeros_like(correlations) for name, correlations in others.items()}
    found |= {statistic(name, OTHERS): correlations for name, correlations in others.items()}
    limits |= {statistic(name, OTHERS): limit for name in others}

    order = list(dict.fromkeys(item.name for item in exact))
    exact = {item: exact[item] for item in sorted(exact, key=lambda item: order.index(item.name))}
    zeros = {item for item, array in exact.items() if not array.any()}
    title = f"{who}, against the exact distributions"
    step.check(compare(exact, found, limits, title=title, zeros=zeros), group=lambda item: item.name)


AGAIN, OTHERS = "same seed again", "other tensors"
KINDS = {AGAIN: "seed", OTHERS: "independence", "distinct": "independence"}


def statistic(tensor: str, what: str) -> Item:
    """The item of a statistic of a parameter or buffer."""
    kind = "independence" if what.startswith("correlation") else KINDS.get(what, "distribution")
    return Item(what, kind, tensor.rpartition(".")[0], section=tensor)


def check_shared(step: Step) -> None:
    """The shared draw: the reference's against the exact distributions, and the port's against the reference's."""
    ref, port = (draw(partial(side, shared=True), step) for side in (run_ref, run_paddle))
    check_side(step, "reference, shared draw", partial(run_ref, shared=True), ref, ref)
    ref, port = ({statistic(name, "shared draw"): sample for name, sample in side.items()} for side in (ref, port))
    title = "port, shared draw, against the reference's, bit for bit"
    step.check(compare(ref, port, exact_limits(ref), title=title), group=lambda item: item.name)


def summary(samples: Arrays) -> Arrays:
    """Mean and standard deviation of each parameter and buffer, for the result files."""
    return {f"{name}/{f.__name__}": np.array(f(sample)) for name, sample in samples.items() for f in (np.mean, np.std)}


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    ref = draw(run_ref, step)
    port = draw(run_paddle, step)
    check_side(step, "reference", run_ref, ref, ref)
    check_side(step, "port", run_paddle, port, ref)
    check_shared(step)
    return step.finish("init", summary(ref), summary(port))


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
