"""Rung 08: several processes are one process, on both sides.

Proves: started by its own launcher, each side's training command takes the documented share of the images in every
process; two and three processes have the gradients, parameters, buffers and evaluation of one on the same global
batches, with batch norm frozen and with --sync-bn in train mode, there also with all the rest of the recipe on (mixup
and CutMix, accumulated and clipped gradients, RMSprop, averaged weights); without --sync-bn, where each normalizes with
its own share, they still end each epoch with the same parameters and buffers; every image is evaluated once, also where
a process gets fewer than another or none; and one process of the port trains as one of the reference. All in float64,
without dropout. Does not prove: what NCCL does between cards.
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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from reprod.align.compare import FAIL, Row, Verdict, compare
from reprod.align.distributed import CouldNotStart, LaunchError, launch
from reprod.align.distributed_worker import recorded_run
from reprod.align.limits import U64, C, exact_limits, largest, semantic_limits, with_floors
from reprod.align.report import one_line
from reprod.align.step import LITE_DATA, Step, run_step, step_parser
from reprod.recipe.cli import UserError
from reprod.recipe.files import save_safetensors

NAME = "08_test_dist"
SIDES = {"reference": "mobilenetv3_ref", "port": "mobilenetv3_paddle"}
GLOBAL_BATCH = 6  # 16 images leave a partial batch of 4
EPOCHS = 2
SHARES = (1, 2, 3, 5, 20)  # numbers of processes; with 20 some have no image to evaluate
# A rate that does not magnify rounding.
RECIPE = {"lr": 2**-12, "momentum": 0.875, "weight-decay": 2**-12, "lr-step-size": 1, "lr-gamma": 0.5, "dropout": 0}
SIZES = {"train-crop-size": 64, "val-crop-size": 64, "val-resize-size": 64, "workers": 0}
# Three processes have an even number of images each, whose pairs mixup then mixes as one process does.
EVERYTHING = (
    *("--sync-bn", "--mixup-alpha=0.25", "--cutmix-alpha=1", "--label-smoothing=0.125", "--opt=rmsprop"),
    *("--gradient-accumulation-steps=2", "--clip-grad-norm=1", "--norm-weight-decay=0"),
    *("--model-ema", "--model-ema-steps=1", "--model-ema-decay=0.9375"),
)
SETS = ("train", "val")
COUNTED = ("samples", "top1", "top5")

Record = dict[str, np.ndarray]  # RUN/ITEM, see reprod.align.distributed_worker


def folder_of(folder: Path, name: str, paths: list[Path]) -> Path:
    """A data folder with those images of lite_data alone."""
    for path in paths:
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(LITE_DATA / path, folder / name / path)
    return folder / name


def make_runs(step: Step, folder: Path) -> dict[int, dict[str, list[str]]]:
    """{number of processes: {name: flags}} of all runs, but for the batch size and the output folder."""
    train, val = (sorted(path.relative_to(LITE_DATA) for path in (LITE_DATA / name).glob("*/*")) for name in SETS)
    classes = sorted({path.parent.name for path in val})
    arrays = dict(step.arrays)
    for name in ("classifier.3.weight", "classifier.3.bias"):
        arrays[name] = np.resize(arrays[name], (len(classes), *arrays[name].shape[1:]))
    save_safetensors(arrays, folder / "weights.safetensors")
    settings = {"model": step.args.model, "seed": step.args.seed, "weights": folder / "weights.safetensors"}
    flags = [f"--{name}={value}" for name, value in (settings | RECIPE | SIZES).items()]

    first = {path.parent.name: path for path in reversed(train)}.values()
    second = [path for path in train if path not in first]
    twelve = folder_of(folder, "12 images to train on", [*first, *second[: 12 - len(classes)], *val])
    evaluated = {"16 images": LITE_DATA}
    evaluated |= {"15 images": folder_of(folder, "15 images", val[1:]), "1 image": folder_of(folder, "1", val[:1])}
    two = {
        "frozen": [*flags, f"--data-path={LITE_DATA}", "--epochs=1", "--freeze-norm"],
        "live": [*flags, f"--data-path={twelve}", "--epochs=1", "--model-ema", "--model-ema-steps=1"],
        "synchronized": [*flags, f"--data-path={twelve}", "--epochs=1", "--sync-bn"],
        **{name: [*flags, f"--data-path={path}", "--test-only"] for name, path in evaluated.items()},
    }
    three = {
        "frozen, 12 images": [*flags, f"--data-path={twelve}", "--epochs=1", "--freeze-norm"],
        "everything": [*flags, f"--data-path={twelve}", f"--epochs={EPOCHS}", *EVERYTHING],
    }
    return {2: two, 3: three}


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


def one_process(
    step: Step, package: str, runs: Mapping[str, list[str]], folder: Path, dtype: str = "float64"
) -> Record:
    """What one process does in each run but the live one, with the whole global batch."""
    records, common = {}, [f"--batch-size={GLOBAL_BATCH}", f"--output-dir={folder}"]
    for name, flags in runs.items():
        if name != "live":
            with one_thread(), contextlib.redirect_stdout(io.StringIO()):
                records[name] = recorded_run(package, [*flags, *common], dtype)
    return joined(records)


@dataclass
class Several:
    """What became of several processes of one side."""

    who: str
    count: int
    records: list[Record]  # of each process what it does in each run that all of them ended
    trouble: Verdict | None = None  # what to say of the others
    log: str = ""  # the last lines of the process that it went wrong in


def several_processes(step: Step, who: str, count: int, runs: Mapping[str, list[str]], folder: Path) -> Several:
    """What `count` processes do in each run, with an equal share of each global batch."""
    common = [f"--batch-size={GLOBAL_BATCH // count}", f"--output-dir={folder / 'out'}"]
    flags = {name: [*flags, *common] for name, flags in runs.items()}
    folder.mkdir()
    try:
        return Several(who, count, [joined(records) for records in launch(SIDES[who], count, flags, folder)])
    except LaunchError as error:
        title = f"{who}, {count} processes"
        if isinstance(error, CouldNotStart):
            return Several(who, count, [], Verdict(title, refusal=str(error)), error.log)
        trouble = Verdict(title, [Row(title, FAIL, reason=str(error))])
        return Several(who, count, [joined(records) for records in error.records], trouble, error.log)


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
        name, place = f"trained on/epoch {epoch}", f"everything/epoch {epoch}, batch "
        exact[name] = np.random.default_rng([step.args.seed, epoch]).permutation(12)
        batches = [array for item, array in one.items() if item.startswith(place) and item.endswith("/own/images")]
        found[name] = np.concatenate(batches)
    title = f"{who}, the images of each process, against the documented"
    step.check(compare(exact, found, exact_limits(exact), title=title), group=lambda name: name.split(",")[0])


def check_several(step: Step, one: Record, several: Several, judge: Callable) -> None:
    """Several processes against one, and against each other, where they must agree to the last bit."""
    if several.log:
        step.say(several.log)
    if several.records and several.records[0]:
        title = f"{several.who}, {several.count} processes (as the port) against one (as the reference), float64"
        done = {name.split("/")[0] for name in several.records[0]}
        alone = {name: array for name, array in together([one]).items() if name.split("/")[0] in done}
        step.check(judge(alone, together(several.records), title=title), group=epoch_of)
        check_agreement(step, several)
    if several.trouble:
        step.check(several.trouble)


def check_agreement(step: Step, several: Several) -> None:
    """All processes end with the same bits; in the live run not because they had none that differed."""
    first, *others = (
        {name: array for name, array in record.items() if "/own/" not in name and "/grad/" not in name}
        for record in several.records
    )
    for rank, other in enumerate(others, 1):
        title = f"{several.who}, process {rank} of {several.count} (as the port) against process 0 (as the reference)"
        step.check(compare(first, other, exact_limits(first), title=title), group=epoch_of)
    own, another = several.records[:2]
    statistics = [name for name in own if name.startswith("live/") and "/own/buffer/" in name]
    if statistics and not any((own[name] != another.get(name)).any() for name in statistics):
        step.refuse(f"{several.who}: batch norm's statistics were the same before they were made equal")


def epoch_of(name: str) -> str:
    """The label that an item is shown under: its run and epoch."""
    run, place, *_ = name.split("/")
    return f"{run}/{place.split(',')[0]}"


def limits_of(truth: Record, ref: Record) -> tuple[dict[str, float], set[str]]:
    """(limits, items that are zero by structure) from the reference's float64 and float32 runs of one process.

    A gradient is a sum of terms of any layer's size, and may not be closer than the rounding of the largest: that of a
    bias whose only way on is through a batch norm in train mode is nothing but rounding. Counts are exact.
    """
    largest_gradient: dict[str, float] = {}
    for name, array in truth.items():
        batch, grad, _ = name.partition("/grad/")
        if grad:
            largest_gradient[batch] = max(largest(array), largest_gradient.get(batch, 0.0))
    floors = {name: C * U64 * largest_gradient[name.partition("/grad/")[0]] for name in truth if "/grad/" in name}
    limits, zeros = with_floors(semantic_limits(truth, ref), floors, truth)
    return limits | {name: 0.0 for name in limits if name.endswith(COUNTED)}, zeros


def kept(one: Record, several: list[Several]) -> Record:
    """What goes into the result files: images, losses and evaluations, of one process and of several."""
    sides = {"one process": together([one])}
    sides |= {f"{each.count} processes": together(each.records) for each in several if each.records}
    return {
        f"{who}/{name}": array
        for who, record in sides.items()
        for name, array in record.items()
        if not any(kind in name for kind in ("/grad/", "/param/", "/buffer/"))
    }


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def alone(step: Step, runs: Mapping[str, list[str]], folder: Path) -> tuple[dict[str, Record], Callable]:
    """({side: what its one process does}, `compare` with the limits that follow), compared.

    Without the port where its training ends in an error.
    """
    ref = one_process(step, SIDES["reference"], runs, folder)
    limits, zeros = limits_of(ref, one_process(step, SIDES["reference"], runs, folder, "float32"))
    judge = partial(compare, limits=limits, zeros=zeros)
    title = "one process, the port against the reference, float64"
    try:
        port = one_process(step, SIDES["port"], runs, folder)
    except UserError as error:  # the reference could train on the same
        step.check(Verdict(title, [Row("port, one process", FAIL, reason=one_line(error))]))
        return {"reference": ref}, judge
    step.check(judge(ref, port, title=title), group=epoch_of)
    return {"reference": ref, "port": port}, judge


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max_workers=2) as pool:
        folder = Path(name)
        runs = make_runs(step, folder)
        launched = [
            pool.submit(several_processes, step, who, count, runs[count], folder / f"{who} {count}")
            for count in runs
            for who in SIDES
        ]
        one, judge = alone(
            step, {name: flags for some in runs.values() for name, flags in some.items()}, folder / "out"
        )
        several = [future.result() for future in launched]
    for who in one:
        check_shares(step, who, one[who])
        for each in several:
            if each.who == who:
                check_several(step, one[who], each, judge)
    files = {who: kept(one.get(who, {}), [each for each in several if each.who == who]) for who in SIDES}
    return step.finish("dist", files["reference"], files["port"])


if __name__ == "__main__":
    run_step(NAME, main, get_args_parser())
