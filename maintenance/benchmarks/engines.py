"""How fast the port's exported model is in each engine, against torchvision's own model in ONNX Runtime.

  python -m maintenance.benchmarks.engines --model exported                     the size is that of the folder's card
  python -m maintenance.benchmarks.engines --model exported --int8 quantized    also the same model, quantized
  python -m maintenance.benchmarks.engines --model exported --profile           also where Paddle Inference's time goes

The folders come from tools/export_model.py. Torchvision's model has random weights; torch.onnx.export(dynamo=True)
writes it, and it runs in the same session options. All engines run in turns in one process, with one thread each, on 1
image and on 32. A ratio is ours / theirs in images a second, with the 95 % interval of its median over the rounds. A
bound is missed if all of the interval lies below it. Only the fastest engine has one: how fast Paddle Inference is, its
convolutions decide, which no export changes. The largest difference of the outputs from the model as trained in float64
stands beside each, with the limit that it must keep in float32.

A quantized model is compared with the same engine in float32, and the fastest engine also with the fastest. The fastest
has a bound, which counts only on a processor with VNNI, the instructions that engines multiply int8 with; elsewhere the
ratio is only reported. The bound of the size of model.onnx counts everywhere.

Exit status: 0 all bounds may be reached, 1 one is missed or a limit is not kept, 2 something must be fixed first.
"""

import argparse
import io
import json
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mobilenetv3_deploy.card import Card, read_card, write_card
from mobilenetv3_deploy.engines import ENGINES, ONNX, Engine, float64_reference, load
from mobilenetv3_deploy.speed import interleaved
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run, whole_number

if TYPE_CHECKING:  # it imports the frameworks, which read the number of threads when they are imported
    from maintenance.benchmarks.speed import Result

PROG = "engines"
QUANTIZED = ("onnxruntime", "openvino")
PADDLES = "paddle-inference"
COMPARED = (*QUANTIZED, PADDLES)
INT8 = "int8 in "  # before the engine
THEIRS = "torchvision in onnxruntime"
BEST = "best"
BATCH_SIZES = (1, 32)
BEST_BOUND = 0.95  # the least ratio of the fastest engine
INT8_BOUNDS = {("mobilenet_v3_large", 1): 1.4, ("mobilenet_v3_large", 32): 1.4, ("mobilenet_v3_small", 1): 1.2}
LARGEST_SHARE = 0.35  # of the size of model.onnx in float32
VNNI = {"avx512_vnni", "avx_vnni"}
PROFILED = 20  # runs


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, default=argparse.SUPPRESS, help="the port's exported model")
    add("--int8", metavar="DIR", help="the same model, quantized")
    add("--engines", nargs="+", choices=tuple(ENGINES), default=list(COMPARED), help="that run --model")
    add("--rounds", type=whole_number(15, 10_000), default=15, metavar="N", help="how often each has its turn")
    add("--turn", type=float, default=0.1, metavar="SECONDS", help="what takes less is run several times in a round")
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu: computing time, on a busy machine")
    add("--profile", action="store_true", help="show where Paddle Inference's time goes")
    return parser


def torchvisions(card: Card, folder: Path) -> Engine:
    """Torchvision's model of that size, with random weights, written to `folder`, in ONNX Runtime."""
    import torch
    import torchvision

    model = torchvision.models.get_model(card.model, num_classes=card.num_classes).eval()
    images = (torch.zeros(2, 3, card.preprocessing.crop, card.preprocessing.crop),)
    how = {"dynamic_shapes": ({0: torch.export.Dim("N")},), "external_data": False, "verbose": False}
    logging.disable(logging.INFO)  # the exporter's steps, which are printed once Paddle is imported
    torch.onnx.export(model, images, folder / ONNX, dynamo=True, **how)
    write_card(folder, replace(card, framework="torch", output="logits"))
    return load(folder, "onnxruntime")


def quantized(folder: str, card: Card) -> dict[str, Engine]:
    """The engines that run the quantized model; raises UserError where it is not the model of `card`."""
    own = read_card(folder)
    what = ("model", "num_classes", "output", "preprocessing")
    for name in what:
        if getattr(own, name) != getattr(card, name):
            said = f"its {name} is {getattr(own, name)}, that of --model {getattr(card, name)}"
            raise UserError(f"--int8 {folder} is no quantized --model ({said}): quantize that")
    return {f"{INT8}{name}": load(folder, name) for name in QUANTIZED}


def has_vnni() -> bool:
    """Whether the processor has instructions to multiply int8, as Linux says."""
    path = Path("/proc/cpuinfo")
    return path.exists() and not VNNI.isdisjoint(path.read_text(encoding="ascii", errors="replace").split())


def compared(found: Mapping[str, np.ndarray], ours: str, theirs: str, images: int, bound: float, name: str) -> "Result":
    """One of `found`, seconds from `interleaved`, against another, and what it is to be called."""
    from maintenance.benchmarks.speed import Result

    own, other = (np.median(found[each], 1) for each in (ours, theirs))  # (rounds,)
    return Result(PROG, name, theirs, np.median(own), np.median(other), (other / own).tolist(), bound, images)


def fastest(found: Mapping[str, np.ndarray], names: Iterable[str]) -> str:
    """By the ratio to THEIRS, round by round: what slows all of a round changes it less than the seconds."""
    return min(names, key=lambda name: np.median(np.median(found[name], 1) / np.median(found[THEIRS], 1)))


def results(found: Mapping[str, np.ndarray], names: Iterable[str], images: int, int8_bound: float) -> list["Result"]:
    """What is compared with `images` at once: engines `names` with THEIRS, and int8 with float32 where it was run."""
    lines = [compared(found, name, THEIRS, images, 0.0, name) for name in names]
    best = fastest(found, names)
    lines.append(compared(found, best, THEIRS, images, BEST_BOUND, f"{BEST}: {best}"))
    if int8 := [name for name in found if name.startswith(INT8)]:
        best_int8 = fastest(found, int8)
        for name in int8:
            if (float32 := name.removeprefix(INT8)) in found:
                lines.append(compared(found, name, float32, images, int8_bound if name == best_int8 else 0.0, name))
        lines.append(compared(found, best_int8, best, images, 0.0, f"{BEST}: {best_int8}"))
    return lines


def line(one: "Result") -> str:
    low, high = one.interval
    own, other = (f"{one.images / seconds:.1f}" for seconds in (one.ours, one.theirs))
    bound = f", at least {one.bound} is asked" if one.bound else ""
    who = f"{'ok' if one.met else 'SLOW':<4} {one.images:>2} {one.name:<26} {own:>8} images/s"
    return f"{who}  {one.theirs_name:<26} {other:>8} images/s  ratio {one.ratio:.3f} [{low:.3f}, {high:.3f}]{bound}"


def print_profile(engine: Engine, batch: np.ndarray) -> None:
    """A line for each kind of operation, by the framework's profiler, the longest first."""
    from paddle import profiler

    with tempfile.TemporaryDirectory() as folder:
        trace = profiler.export_chrome_tracing(folder)
        cpu = [profiler.ProfilerTarget.CPU]
        with redirect_stdout(io.StringIO()), profiler.Profiler(targets=cpu, on_trace_ready=trace):
            for _ in range(PROFILED):
                engine.run(batch)
        (path,) = Path(folder).iterdir()
        events = json.loads(path.read_bytes())["traceEvents"]
    times = defaultdict(list)
    for event in events:
        if event.get("cat") == "Operator":
            times[event["name"].partition("[")[0]].append(event["dur"] / 1000)  # microseconds
    whole = sum(map(sum, times.values()))
    print(f"{PADDLES}, batch {len(batch)}, mean of {PROFILED} runs:\n{'ms':>9} {'share':>6} {'calls':>6}  operation")
    for name, spent in sorted(times.items(), key=lambda one: -sum(one[1])):
        calls = len(spent) // PROFILED
        print(f"{sum(spent) / PROFILED:>9.3f} {sum(spent) / whole:>6.1%} {calls:>6}  {name}")


def main(args: argparse.Namespace) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a framework is imported
    card = read_card(args.model)
    engines = {name: load(args.model, name) for name in args.engines}
    int8 = quantized(args.int8, card) if args.int8 else {}
    exact, rounded = float64_reference(args.model), load(args.model, card.framework).run
    from maintenance.benchmarks.speed import CLOCKS
    from portproof.compare.ruler import kernel_atol

    shape = (3, card.preprocessing.crop, card.preprocessing.crop)
    batches = {n: np.random.default_rng(0).standard_normal((n, *shape), np.float32) for n in BATCH_SIZES}
    expected = {n: exact(batch) for n, batch in batches.items()}
    limits = kernel_atol(expected, {n: rounded(batch) for n, batch in batches.items()})
    with tempfile.TemporaryDirectory() as folder:
        theirs = torchvisions(card, Path(folder))
    bound_counts = has_vnni()
    print(f"{card.model}, {shape[1]} pixels, 1 thread, {args.rounds} rounds, {args.clock} time")
    missed = 0
    for n, batch in batches.items():
        for name, engine in (engines | int8).items():
            difference = np.abs(engine.run(batch) - expected[n]).max()
            kept = name in int8 or difference <= limits[n]
            missed += not kept
            limit = "" if name in int8 else f" of at most {limits[n]:.1e}"
            print(f"{'ok' if kept else 'FAR':<4} {n:>2} {name:<26} max|d| {difference:.1e}{limit}, {card.output}")
        runs = {name: partial(one.run, batch) for name, one in {THEIRS: theirs, **engines, **int8}.items()}
        found = interleaved(runs, args.rounds, args.turn, CLOCKS[args.clock])
        for one in results(found, args.engines, n, INT8_BOUNDS.get((card.model, n), 0.0) * bound_counts):
            missed += not one.met
            print(line(one))
    if int8:
        share = np.divide(*(Path(folder, ONNX).stat().st_size for folder in (args.int8, args.model)))
        missed += not share <= LARGEST_SHARE
        print(f"{'ok' if share <= LARGEST_SHARE else 'BIG':<4} size of {ONNX}: {share:.3f} of it in float32, ", end="")
        print(f"at most {LARGEST_SHARE} is asked{'' if bound_counts else '; no VNNI: speed in int8 is only reported'}")
    if args.profile:
        for batch in batches.values():
            print_profile(engines.get(PADDLES) or load(args.model, PADDLES), batch)
    return int(missed > 0)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
