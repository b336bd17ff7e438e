"""What a proof of one pair costs, in a process of its own: time and peak memory, both above its imports.

  python -m maintenance.benchmarks.proof_speed align resnet18

The pair is torchvision's model and paddle.vision's of that name, on 2 images of 64 pixels. The work is one of

    reference      the reference's own forward and backward passes in float64, in eval and in train mode
    padiff         PaDiff's auto_diff, once a mode; needs `pip install padiff==0.2.0`, which may write into the folder
                   that it runs in
    align_float32  `portproof align` in float32 alone
    align          all of it
    passes         the part of align that PaDiff has, too: each side forward and backward in float32, once a mode, and
                   every output and gradient compared; the map is made before
    padiff_again   PaDiff beside it, on models that have run for the map, too

Prints one line of JSON: the work's seconds of "wall" and "cpu" time, and "memory" in GiB.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from maintenance import ROOT
from maintenance.benchmarks.speed import CLOCKS, Result, cpu_time, in_kilobytes
from sturdyio.cli import UserError

PART = "proof"
SHAPE = 2, 3, 64, 64
AGAINST_PADIFF = "resnet18", "mobilenet_v3_small", "vgg16"
AGAINST_REFERENCE = "vgg16", "alexnet", "wide_resnet50_2", "mobilenet_v3_large"
PADIFF = "padiff==0.2.0"
LIMIT = 2**-4  # of `passes`, of an item's largest value: branch flips move gradients by 3 %; failures take long to tell
# Of the means that PaDiff compares: as LIMIT, and of those that are nearly 0 sixteen roundings of values of order 1.
# By its own defaults (1e-7, 0) it fails at the first convolution, and compares no gradient.
PADIFF_LIMITS = {"rtol": LIMIT, "atol": 2**-20}
THEIRS = {"reference": "its reference's passes", "padiff": "PaDiff", "padiff_again": "PaDiff"}
OURS = {"align": "align", "align_float32": "align in float32 alone", "passes": "align's own passes in float32"}
# {(ours, theirs, what): {model, or "" for the others: the least ratio}}. Memory: at most 2.5 times the reference's own
# passes, where the first run of two frameworks does not outweigh the model. PaDiff runs each side once a mode in
# float32, which align does no slower. A proof needs besides: the map, the float64 runs, and each layer alone, for where
# a fault lies and that no other layer has one. Of small models most of that is the Python between the kernels. Of vgg16
# the float64 runs decide: 2.7 times PaDiff where Paddle's MKL computes with AVX2 or more, 4.0 and 4.6 times on an AMD
# EPYC, where it computes with SSE (3.5 there with MKL_DEBUG_CPU_TYPE=5). The ratio of its float32 part went from
# 0.28 to 0.46 in seven rounds of three runs, median 0.35: its bound is 3/4 of that.
BOUNDS: dict[tuple[str, str, str], dict[str, float]] = {
    ("align", "reference", "memory"): {"": 1 / 2.5, "wide_resnet50_2": 1 / 2.8, "mobilenet_v3_large": 1 / 3.5},
    ("passes", "padiff_again", "time"): {"": 1.0},
    ("align_float32", "padiff", "time"): {"": 1 / 6, "vgg16": 1 / 3.8},
    ("align", "padiff", "time"): {"": 1 / 9, "vgg16": 1 / 5},
    ("align", "padiff", "memory"): {"": 1 / 1.4},
}


def reference(ref: Any, port: Any, x: np.ndarray) -> None:
    """The reference's passes in float64, on its own."""
    import torch

    ref.double()
    for train in (False, True):
        ref.train(train)
        ref.zero_grad()
        output = ref(torch.from_numpy(x).double())
        output.sum().backward()


def padiff(ref: Any, port: Any, x: np.ndarray) -> None:
    """PaDiff's whole comparison, in both modes, without dropout, as in `passes`; raises UserError where it fails."""
    import paddle
    import torch
    from padiff import auto_diff

    for train in (False, True):
        (ref.train if train else ref.eval)()
        (port.train if train else port.eval)()
        for parts, dropout in ((ref.modules(), torch.nn.Dropout), (port.sublayers(), paddle.nn.Dropout)):
            for part in parts:
                if isinstance(part, dropout):
                    part.eval()
        inputs = {"x": paddle.to_tensor(x)}, {"x": torch.from_numpy(x)}
        if not auto_diff(port, ref, inputs, auto_weights=True, options=dict(PADIFF_LIMITS)):
            raise UserError(f"{PADIFF} fails, so what it takes is not all of its comparison: see what it prints above")


def align(ref: Any, port: Any, x: np.ndarray, **options: Any) -> None:
    """`portproof.align`."""
    import portproof

    portproof.align(ref, port, [x], **options)


def align_float32(ref: Any, port: Any, x: np.ndarray) -> None:
    align(ref, port, x, precisions=("float32",))


def paired(ref: Any, port: Any, x: np.ndarray) -> Any:
    """The pair as align makes it: with equal weights, the map between the two, and a gradient to send back."""
    from portproof.ladder.pairs.pair import Options, Pair

    return Pair.prepared(ref, port, [x], Options())


def passes(pair: Any) -> None:
    """Both sides in float32, and the comparison of all that they give."""
    from portproof.compare import compare
    from portproof.compare.ruler import largest
    from portproof.ladder.pairs.whole import items

    for train in (False, True):
        runs = [model.run(pair.inputs, "float32", train, pair.cotangents[train]) for model in (pair.ref, pair.port)]
        ref, port = (items(pair, run, is_port) for run, is_port in zip(runs, (False, True), strict=True))
        compare(ref, port, {item: LIMIT * largest(array) for item, array in ref.items()}, title="float32")


def padiff_again(pair: Any) -> None:
    padiff(pair.ref.model, pair.port.model, *pair.inputs)


WORKS: dict[str, Callable] = {work.__name__: work for work in (reference, padiff, align_float32, align)}
WORKS_ON_PAIRS: dict[str, Callable] = {work.__name__: work for work in (passes, padiff_again)}


def peak() -> float:
    """The most memory that this process has held, in GiB. `ru_maxrss` would start at that of the process before."""
    return in_kilobytes("VmHWM") / 2**20


def measured(work: str, model: str) -> dict[str, float]:
    """Do the work in this process."""
    import paddle
    import torch
    import torchvision

    import portproof.backends.probe
    import portproof.ladder.pairs.whole
    import portproof.localize.diagnosis  # noqa: F401  what the first call would import

    if work.startswith("padiff"):
        import padiff  # noqa: F401

    torch.manual_seed(0)
    paddle.seed(0)
    before = peak()
    ref = getattr(torchvision.models, model)(weights=None)
    port = None if work == "reference" else getattr(paddle.vision.models, model)()
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    given = (paired(ref, port, x),) if work in WORKS_ON_PAIRS else (ref, port, x)
    wall, cpu = time.perf_counter(), cpu_time()
    (WORKS | WORKS_ON_PAIRS)[work](*given)
    return {"wall": time.perf_counter() - wall, "cpu": cpu_time() - cpu, "memory": peak() - before}


def in_a_process(words: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> tuple[str, float]:
    """(what Python with these words prints, the seconds that it takes), in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with tempfile.TemporaryDirectory() as folder:
        start = clock()
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        seconds = clock() - start
    if done.returncode:
        raise UserError(f"python {' '.join(words)} ends with {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout, seconds


def proofs(model: str, rounds: int, clock: str) -> Iterator[Result]:
    """What align takes of time and memory, beside what the reference's own passes and PaDiff do."""
    with_padiff = ["padiff", "align_float32", "padiff_again", "passes"] if model in AGAINST_PADIFF else []
    others = ["reference"] * (model in AGAINST_REFERENCE) + with_padiff
    runs = []
    for _ in range(rounds):
        printed = {work: in_a_process(["-m", __spec__.name, work, model])[0] for work in ("align", *others)}
        runs.append({work: json.loads(text.splitlines()[-1]) for work, text in printed.items()})
    for (ours, theirs, what), bounds in BOUNDS.items():
        if {ours, theirs} <= set(runs[0]):
            key, unit = (what, "GiB") if what == "memory" else (clock, "s")
            pairs = [(run[ours][key], run[theirs][key]) for run in runs]
            yield result(f"{model}, {OURS[ours]}, {what}", THEIRS[theirs], pairs, bounds.get(model, bounds[""]), unit)


def ladder(rounds: int, clock: str) -> Result:
    """Rungs 01 to 05 of the small model, beside the imports of what they use."""
    rungs = sorted(path.stem for path in (ROOT / "steps").glob("0[1-5]_*.py"))
    words = [str(ROOT / "steps" / "run_all.py"), "--model", "mobilenet_v3_small", "--output-dir", "out", "--rungs"]
    commands = [*words, *rungs], ["-c", "import torch, torchvision, paddle, portproof.ladder, portproof.backends.probe"]
    pairs = [tuple(in_a_process(command, CLOCKS[clock])[1] for command in commands) for _ in range(rounds)]
    return result("steps 01 to 05, mobilenet_v3_small, time", "imports", pairs, 1 / 3.5, "s")


def result(name: str, theirs: str, pairs: Sequence[tuple[float, float]], bound: float, unit: str) -> Result:
    """Of the rounds' (ours, theirs)."""
    figures = [median(side) for side in zip(*pairs, strict=True)]
    return Result(PART, name, theirs, *figures, [b / a for a, b in pairs], bound, 0, unit)


def check_padiff() -> None:
    """Raises UserError where PaDiff is not installed."""
    if importlib.util.find_spec("padiff") is None:
        raise UserError(f"the part {PART} compares with PaDiff: pip install {PADIFF}, or choose parts with --only")


def results(rounds: int, clock: str) -> Iterator[Result]:
    """Each work in a fresh process, in turns, `rounds` times; ratios are theirs / ours, medians of the rounds."""
    yield ladder(rounds, clock)
    for model in dict.fromkeys((*AGAINST_PADIFF, *AGAINST_REFERENCE)):
        yield from proofs(model, rounds, clock)


if __name__ == "__main__":
    print(json.dumps(measured(*sys.argv[1:])))
