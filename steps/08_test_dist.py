"""Rung 08: several processes are one process, on both sides.

Proves: started by its own launcher, each side's training command takes the documented share of the images in every
process; with batch norm frozen and without dropout two processes have the gradients, parameters and evaluation of one
on the same global batches; with batch norm in train mode they still end each epoch with the same parameters and
buffers; every image is evaluated once, also where a process gets fewer than another or none; and one process of the
port trains as one of the reference. All in float64. Does not prove: that batch norm in train mode gives what one
process gives (it cannot, each normalizes with its own share); what NCCL does between cards.
Stands on: 02 (the images), 05 (the training step). Runs on the CPU over gloo, whatever --device says.

  python steps/08_test_dist.py           ends in: PASS 08_test_dist: all ... items within their limits
"""

import argparse
import contextlib
import importlib
import io
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from reprod.align.compare import FAIL, Row, Verdict, compare
from reprod.align.distributed import CouldNotStart, LaunchError, launch
from reprod.align.distributed_worker import recorded_run
from reprod.align.limits import U64, C, exact_limits, largest, semantic_limits
from reprod.align.step import LITE_DATA, Step, run_step, step_parser
from reprod.recipe.files import save_safetensors

NAME = "08_test_dist"
SIDES = {"reference": "mobilenetv3_ref", "port": "mobilenetv3_paddle"}
PROCESSES = 2
GLOBAL_BATCH = 6  # 16 images leave a partial batch of 4
EPOCHS = 2
SHARES = (1, 2, 3, 5, 20)  # numbers of processes; with 20 some have no image to evaluate
# Numbers that float32 holds, as which Paddle's optimizers keep them; a rate that does not magnify rounding.
RECIPE = {"lr": 2**-12, "momentum": 0.875, "weight-decay": 2**-12, "lr-step-size": 1, "lr-gamma": 0.5, "dropout": 0}
SIZES = {"train-crop-size": 64, "val-crop-size": 64, "val-resize-size": 64, "workers": 0}
COUNTED = ("samples", "top1", "top5")

Record = dict[str, np.ndarray]  # RUN/ITEM, see reprod.align.distributed_worker


def validation_folders(folder: Path) -> dict[str, Path]:
    """Data folders with 16 images, with one fewer, and with a single one, in val/."""
    paths = sorted(path.relative_to(LITE_DATA) for path in (LITE_DATA / "val").glob("*/*"))
    folders = {f"{len(paths)} images": LITE_DATA}
    for name, kept in ((f"{len(paths) - 1} images", paths[1:]), ("1 image", paths[:1])):
        folders[name] = folder / name
        for path in kept:
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(LITE_DATA / path, folder / name / path)
    return folders


def make_runs(step: Step, folder: Path) -> dict[str, list[str]]:
    """{name: flags} of all runs, but for the batch size."""
    classes = len(list((LITE_DATA / "val").iterdir()))
    arrays = dict(step.arrays)
    for name in ("classifier.3.weight", "classifier.3.bias"):
        arrays[name] = np.resize(arrays[name], (classes, *arrays[name].shape[1:]))
    save_safetensors(arrays, folder / "weights.safetensors")
    settings = {"model": step.args.model, "seed": step.args.seed, "weights": folder / "weights.safetensors"}
    settings |= {"output-dir": folder / "out", **RECIPE, **SIZES}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    training = [*flags, f"--data-path={LITE_DATA}", f"--epochs={EPOCHS}"]
    evaluations = {
        name: [*flags, f"--data-path={path}", "--test-only"] for name, path in validation_folders(folder).items()
    }
    return {"frozen": [*training, "--freeze-norm"], "live": training, **evaluations}


def joined(records: Mapping[str, Record]) -> Record:
    """The records of several runs as one."""
    return {f"{run}/{item}": array for run, record in records.items() for item, array in record.items()}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As the launched processes have it; on a busy machine, threads that wait for each other take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_process(step: Step, package: str, runs: Mapping[str, list[str]], dtype: str = "float64") -> Record:
    """What one process does in each run but the live one, with the whole global batch."""
    records = {}
    for name, flags in runs.items():
        if name != "live":
            with one_thread(), contextlib.redirect_stdout(io.StringIO()):
                records[name] = recorded_run(package, [*flags, f"--batch-size={GLOBAL_BATCH}"], step.types, dtype)
    return joined(records)


def several_processes(step: Step, who: str, runs: Mapping[str, list[str]], folder: Path) -> tuple[list, Verdict | None]:
    """(of each process what it does in each run, what to say of the runs that they could not all do)."""
    flags = {name: [*flags, f"--batch-size={GLOBAL_BATCH // PROCESSES}"] for name, flags in runs.items()}
    folder.mkdir()
    try:
        return [joined(records) for records in launch(SIDES[who], PROCESSES, flags, step.types, folder)], None
    except LaunchError as error:
        step.say(error.log)
        title = f"{who}, {PROCESSES} processes"
        if isinstance(error, CouldNotStart):
            return [], Verdict(title, refusal=str(error))
        return [joined(records) for records in error.records], Verdict(title, [Row(title, FAIL, reason=str(error))])


def together(records: list[Record]) -> Record:
    """What processes do between them in all but the live run: images sorted, losses averaged, else the first's."""
    result = {name: array for name, array in records[0].items() if "/own/buffer/" not in name}
    for name in result:
        own = [record[name] for record in records if name in record]
        if name.endswith("/own/images"):
            result[name] = np.sort(np.concatenate(own))
        elif name.endswith("/own/loss"):  # shares are equally large
            result[name] = np.mean(own, axis=0)
    return {name: array for name, array in result.items() if not name.startswith("live/")}


def documented_shares(seed: int, length: int) -> Record:
    """The images of each process one after another, as BatchSampler's docstring has them."""
    train, val = {}, {}
    for n in SHARES:
        for epoch in range(EPOCHS):
            order = np.random.default_rng([seed, epoch]).permutation(length)
            padded = np.resize(order, math.ceil(length / n) * n)
            train[f"train, {n} processes/epoch {epoch}"] = np.concatenate([padded[rank::n] for rank in range(n)])
        val[f"val, {n} processes/each image once"] = np.concatenate([np.arange(length)[rank::n] for rank in range(n)])
    return train | val


def shares_of(package: str, seed: int) -> Record:
    """The same of a package's own loaders."""
    data = importlib.import_module(f"{package}.data")
    shares = {}

    def add(name: str, dataset, n: int, epoch: int, train: bool) -> None:
        indices = []
        for rank in range(n):
            loader = data.build_loader(dataset, GLOBAL_BATCH, train=train, seed=seed, rank=rank, world_size=n)
            data.set_epoch(loader, epoch)
            indices += [index for batch in loader.batch_sampler for index in batch]
        shares[name] = np.array(indices)

    train_set, val_set = (data.build_dataset(LITE_DATA, train=train, seed=seed) for train in (True, False))
    for n in SHARES:
        for epoch in range(EPOCHS):
            add(f"train, {n} processes/epoch {epoch}", train_set, n, epoch, True)
        add(f"val, {n} processes/each image once", val_set, n, 0, False)
    return shares


def check_shares(step: Step, who: str, one: Record) -> None:
    """Which images each process of several gets, and which the training command really took, in their order."""
    length = len(list((LITE_DATA / "train").glob("*/*")))
    exact, found = documented_shares(step.args.seed, length), shares_of(SIDES[who], step.args.seed)
    for epoch in range(EPOCHS):
        name, place = f"trained on/epoch {epoch}", f"frozen/epoch {epoch}, batch "
        exact[name] = np.random.default_rng([step.args.seed, epoch]).permutation(length)
        batches = [array for item, array in one.items() if item.startswith(place) and item.endswith("/own/images")]
        found[name] = np.concatenate(batches)
    title = f"{who}, the images of each process, against the documented"
    step.check(compare(exact, found, exact_limits(exact), title=title), group=lambda name: name.split(",")[0])


def check_several(step: Step, who: str, one: Record, several: list[Record], limits: Mapping[str, float]) -> None:
    """Several processes against one, and against each other, where they must agree to the last bit."""
    title = f"{who}, {PROCESSES} processes (as the port) against one (as the reference), float64"
    done = {name.split("/")[0] for name in several[0]}
    alone = {name: array for name, array in together([one]).items() if name.split("/")[0] in done}
    step.check(compare(alone, together(several), limits, title=title), group=epoch_of)
    first, *others = ({n: array for n, array in record.items() if "/own/" not in n} for record in several)
    for rank, other in enumerate(others, 1):
        title = f"{who}, process {rank} (as the port) against process 0 (as the reference)"
        step.check(compare(first, other, exact_limits(first), title=title), group=epoch_of)
    statistics = [name for name in several[0] if name.startswith("live/") and "/own/buffer/" in name]
    if statistics and not any((several[0][name] != several[1].get(name)).any() for name in statistics):
        step.refuse(f"{who}: batch norm's statistics were the same before they were made equal")


def epoch_of(name: str) -> str:
    """The label that an item is shown under: its run and epoch."""
    run, place, *_ = name.split("/")
    return f"{run}/{place.split(',')[0]}"


def limits_of(truth: Record, ref: Record) -> dict[str, float]:
    """From the reference's float64 and float32 runs of one process.

    A gradient is a sum of terms of any layer's size, and may not be closer than the rounding of the largest. Counts are
    exact.
    """
    limits = semantic_limits(truth, ref)
    largest_gradient: dict[str, float] = {}
    for name, array in truth.items():
        batch, grad, _ = name.partition("/grad/")
        if grad:
            largest_gradient[batch] = max(largest(array), largest_gradient.get(batch, 0.0))
    for name in limits:
        limits[name] += C * U64 * largest_gradient.get(name.partition("/grad/")[0], 0.0) * ("/grad/" in name)
    return limits | {name: 0.0 for name in limits if name.endswith(COUNTED)}


def kept(one: Record, several: list[Record]) -> Record:
    """What goes into the result files: images, losses and evaluations, of one process and of several."""
    sides = {"one process": together([one])}
    if several:
        sides[f"{PROCESSES} processes"] = together(several)
    return {
        f"{who}/{name}": array
        for who, record in sides.items()
        for name, array in record.items()
        if not any(kind in name for kind in ("/grad/", "/param/", "/buffer/"))
    }


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = make_runs(step, folder)
        one = {who: one_process(step, package, runs) for who, package in SIDES.items()}
        limits = limits_of(one["reference"], one_process(step, SIDES["reference"], runs, "float32"))
        title = "one process, the port against the reference, float64"
        step.check(compare(one["reference"], one["port"], limits, title=title), group=epoch_of)
        files = {}
        for who in SIDES:
            check_shares(step, who, one[who])
            several, trouble = several_processes(step, who, runs, folder / who)
            if several and several[0]:
                check_several(step, who, one[who], several, limits)
            if trouble:
                step.check(trouble)
            files[who] = kept(one[who], several)
    return step.finish("dist", files["reference"], files["port"])


if __name__ == "__main__":
    run_step(NAME, main, get_args_parser())
