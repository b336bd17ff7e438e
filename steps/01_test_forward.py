"""Rung 01: the forward pass of every module, in eval and train mode.

Proves: with the same weights and images, every module of the port gives what the reference's gives, and batch norm
keeps the same running statistics. Does not prove: how images are read (02), gradients and updates (05).
Stands on: nothing.

  python steps/01_test_forward.py        ends in: PASS 01_test_forward: all ... items within their limits
"""

import argparse

import numpy as np

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import Step, step_parser
from portproof.backends.probe import probe_images
from portproof.backends.trace import Trace, output_item
from portproof.compare import Item, compare, placed, tensor_item
from portproof.compare.activations import dead_branches
from portproof.compare.tolerances import (
    UNITS,
    U,
    exact_limits,
    kernel_limits,
    noise_floors,
    semantic_limits,
    with_floors,
)
from portproof.ladder.rung import run_rung

NAME = "01_test_forward"
BATCH, HEIGHT, WIDTH = 3, 256, 160  # odd and not square, so a swapped axis cannot pass, nor a pool over 7 x 7
DROPOUT, DROPOUT_SHAPE = "classifier.2", (256, 256)


def run_ref(step: Step, images: np.ndarray, dtype: str, train: bool) -> Trace:
    return step.ref.backend.forward(step.build(step.ref, dtype), images, train)


def run_paddle(step: Step, images: np.ndarray, dtype: str, train: bool) -> Trace:
    return step.port.backend.forward(step.build(step.port, dtype), images, train, may_raise=True)


def check_structure(step: Step) -> bool:
    """Every parameter and buffer by name and shape, before any of them is loaded."""
    all_shapes = (p.backend.shapes(step.model(p, dropout=None)) for p in (step.ref, step.port))
    ref, port = (
        {
            tensor_item(name, "structure"): np.array("x".join(map(str, shape)) or "scalar")
            for name, shape in shapes.items()
        }
        for shapes in all_shapes
    )
    return step.check(compare(ref, port, exact_limits(ref), title="parameters and buffers, by shape"))


def dropout_facts(step: Step, package: Package) -> dict[Item, np.ndarray]:
    """What a dropout layer does to ones: nothing in eval mode; in train mode 0 or 1 / (1 - p), anew at each call."""
    backend, model = package.backend, step.model(package, dropout=None)
    module, ones = backend.submodule(model, DROPOUT), backend.to_tensor(np.ones(DROPOUT_SHAPE, np.float32), model)
    module.eval()
    kept = backend.to_array(module(ones))
    module.train()
    dropped, again = backend.to_array(module(ones)), backend.to_array(module(ones))
    facts = {
        "eval": kept,
        "train values": np.unique(dropped),
        "train share": np.array((dropped != 0).mean()),
        "another mask each time": np.array(bool((dropped != again).any())),
        **{f"train share of axis {axis}": (dropped != 0).mean(axis=axis) for axis in (0, 1)},
    }
    return {dropout_item(name): array for name, array in facts.items()}


def dropout_item(name: str) -> Item:
    return Item(name, "dropout", DROPOUT, section=DROPOUT)


def check_dropout(step: Step) -> None:
    """The masks are each framework's own, so what is compared is their distribution; p is each model's default."""
    ref, port = (dropout_facts(step, package) for package in (step.ref, step.port))

    def deviation(count: int) -> float:  # of the difference between two binomial shares, p = 0.2
        return np.sqrt(2 * 0.2 * 0.8 / count)

    limits = {"eval": 0.0, "another mask each time": 0.0, "train values": 4 * U}
    limits["train share"] = 6 * deviation(np.prod(DROPOUT_SHAPE))
    limits |= {f"train share of axis {axis}": 6 * deviation(DROPOUT_SHAPE[axis]) for axis in (0, 1)}
    limits = {dropout_item(name): limit for name, limit in limits.items()}
    step.check(compare(ref, port, limits, title="dropout on ones"), group=str)


def check_single(step: Step, image: np.ndarray) -> None:
    """One image alone, in eval mode: an axis of length 1 must not vanish."""
    item = Item("logits", "output", mode="eval", dtype="float64")
    fp64_ref, fp32_ref = (
        {item: run_ref(step, image, d, train=False).outputs["logits"]} for d in ("float64", "float32")
    )
    port = run_paddle(step, image, "float64", train=False).outputs
    port = {item: port["logits"]} if "logits" in port else {}
    limits = semantic_limits(fp64_ref, fp32_ref)
    step.check(compare(fp64_ref, port, limits, title="eval mode, float64, one image"))
    step.locate([image])


def items_of(trace: Trace, mode: str, dtype: str) -> dict[Item, np.ndarray]:
    """Every module's output and, in train mode, batch norm's statistics after it."""
    there = {"mode": mode, "dtype": dtype}
    outputs = {output_item(label, "logits"): array for label, array in trace.outputs.items()}
    buffers = {tensor_item(name, "buffer"): array for name, array in trace.buffers.items()}
    return placed(outputs | buffers, **there)


def check_mode(step: Step, images: np.ndarray, train: bool, files: tuple[dict, dict]) -> set[str]:
    """Every module in eval or train mode, in float64 and in float32 -> the branches of activations never reached."""
    mode = "train" if train else "eval"
    truth, ref = run_ref(step, images, "float64", train), run_ref(step, images, "float32", train)
    step.check_signal(truth.outputs)
    for dtype, reference in (("float64", truth), ("float32", ref)):
        recorded = run_paddle(step, images, dtype, train)
        if recorded.error:
            step.say(f"the port raised {recorded.error}")
        fp64_ref, fp32_ref, port = (items_of(trace, mode, dtype) for trace in (truth, ref, recorded))
        limits = (semantic_limits if dtype == "float64" else kernel_limits)(fp64_ref, fp32_ref)
        limits, zeros = with_floors(limits, noise_floors(fp64_ref, UNITS[dtype], truth.input_scales), fp64_ref)
        compared = fp64_ref if dtype == "float64" else fp32_ref
        step.check(compare(compared, port, limits, title=f"{mode} mode, {dtype}", zeros=zeros))
        prefix = "" if (mode, dtype) == ("eval", "float32") else f"{mode}/{dtype}/"
        for kept, trace in zip(files, (reference, recorded), strict=True):
            blocks = {k: v for k, v in trace.outputs.items() if k == "logits" or k.count(".") == 1}
            kept.update({prefix + name: array for name, array in blocks.items()})
    return dead_branches(truth.gate_inputs, step.types)


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    images = probe_images(np.random.default_rng([args.seed, 2]), BATCH, HEIGHT, WIDTH)
    files = {"input": images}, {"input": images}
    if not check_structure(step):
        step.locate([images])
    else:
        dead = check_mode(step, images, False, files) & check_mode(step, images, True, files)
        step.locate([images])
        check_single(step, images[:1])
        check_dropout(step)
        step.say(f"branches of activations that no input reached in either mode: {len(dead)}")
        for branch in sorted(dead):
            step.say(f"  not proved: {branch}")
        if dead and args.weights is None:
            step.refuse(f"{len(dead)} branches are never taken, so they may be wrong: choose another --seed")
    return step.finish("forward", *files)


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
