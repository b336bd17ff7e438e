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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mobilenetv3_proof.distributed import CouldNotStart, LaunchError, launch
from mobilenetv3_proof.distributed_worker import recorded_run
from mobilenetv3_proof.step import LITE_DATA, Step, step_parser
from portproof.compare import FAIL, Item, Row, Verdict, compare, placed
from portproof.compare.tolerances import U64, exact_limits, noise_floors, semantic_limits, with_floors
from portproof.io.cli import UserError, one_line
from portproof.io.files import save_safetensors
from portproof.ladder.rung import run_rung

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

# What usually causes a difference between several processes and one.
HINTS = {
    "gradient": "gradients added up instead of averaged over the processes, or not exchanged at all",
    "parameter": "a learning rate or batch size per process; a process that began with other weights",
    "buffer": "buffers not made equal before the model is evaluated and saved",
    "images": "rank or world_size not given to the sampler; set_epoch not called; shares padded for evaluation",
    **dict.fromkeys(("samples", "metric", "loss"), "counts not summed over the processes; shares that overlap"),
}

Record = dict[Item, np.ndarray]  # of one run, see mobilenetv3_proof.distributed_worker
Records = dict[str, Record]  # by run


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


def joined(records: Records) -> Record:
    """The records of several runs as one."""
    return {
        replace(item, section=f"{run}/{item.section}"): array
        for run, record in records.items()
        for item, array in record.items()
    }


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
) -> Records:
    """What one process does in each run but the live one, with the whole global batch."""
    records, common = {}, [f"--batch-size={GLOBAL_BATCH}", f"--output-dir={folder}"]
    for name, flags in runs.items():
        if name != "live":
            with one_thread(), contextlib.redirect_stdout(io.StringIO()):
                records[name] = recorded_run(package, [*flags, *common], dtype)
    return records


@dataclass
class Several:
    """What became of several processes of one side."""

    who: str
    count: int
    records: list[Records]  # of each process what it does in each run that all of them ended
    trouble: Verdict | None = None  # what to say of the others
    log: str = ""  # the last lines of the process that it went wrong in


def several_processes(step: Step, who: str, count: int, runs: Mapping[str, list[str]], folder: Path) -> Several:
    """What `count` processes do in each run, with an equal share of each global batch."""
    common = [f"--batch-size={GLOBAL_BATCH // count}", f"--output-dir={folder / 'out'}"]
    flags = {name: [*flags, *common] for name, flags in runs.items()}
    folder.mkdir()
    try:
        return Several(who, count, launch(SIDES[who], count, flags, folder))
    except LaunchError as error:
        title = f"{who}, {count} processes"
        if isinstance(error, CouldNotStart):
            return Several(who, count, [], Verdict(title, refusal=str(error)), error.log)
        trouble = Verdict(title, [Row(Item(title), FAIL, reason=str(error))])
        return Several(who, count, error.records, trouble, error.log)


def together(records: list[Records]) -> Record:
    """What processes do between them in all but the live run: images sorted, losses averaged, else the first's."""
    first, *others = (joined({run: record for run, record in each.items() if run != "live"}) for each in records)
    result = {item: array for item, array in first.items() if item.kind != "own buffer"}
    for item in result:
        own = [record[item] for record in (first, *others) if item in record]
        if item.kind == "images":
            result[item] = np.sort(np.concatenate(own))
        elif item.kind == "own loss":  # shares are equally large
            result[item] = np.mean(own, axis=0)
    return result


def share_item(split: str, processes: int, name: str) -> Item:
    return Item(name, "images", section=f"{split}, {processes} processes")


def documented_shares(seed: int, length: int) -> Record:
    """The images of each process one after another, as BatchSampler's docstring has them."""
    train, val = {}, {}
    for n in SHARES:
        for epoch in range(EPOCHS):
            order = np.random.default_rng([seed, epoch]).permutation(length)
            padded = np.resize(order, math.ceil(length / n) * n)
            train[share_item("train", n, f"epoch {epoch}")] = np.concatenate([padded[rank::n] for rank in range(n)])
        every = np.concatenate([np.arange(length)[rank::n] for rank in range(n)])
        val[share_item("val", n, "each image once")] = every
    return train | val


def shares_of(package: str, seed: int) -> Record:
    """The same of a package's own loaders."""
    data = importlib.import_module(f"{package}.data")
    shares = {}

    def add(item: Item, dataset, n: int, epoch: int, train: bool) -> None:
        indices = []
        for rank in range(n):
            loader = data.build_loader(dataset, GLOBAL_BATCH, train=train, seed=seed, rank=rank, world_size=n)
            data.set_epoch(loader, epoch)
            indices += [index for batch in loader.batch_sampler for index in batch]
        shares[item] = np.array(indices)

    train_set, val_set = (data.build_dataset(LITE_DATA, train=train, seed=seed) for train in (True, False))
    for n in SHARES:
        for epoch in range(EPOCHS):
            add(share_item("train", n, f"epoch {epoch}"), train_set, n, epoch, True)
        add(share_item("val", n, "each image once"), val_set, n, 0, False)
    return shares


def check_shares(step: Step, who: str, one: Records) -> None:
    """Which images each process of several gets, and which the training command really took, in their order."""
    length = len(list((LITE_DATA / "train").glob("*/*")))
    exact, found = documented_shares(step.args.seed, length), shares_of(SIDES[who], step.args.seed)
    for epoch in range(EPOCHS):
        item, section = Item(f"epoch {epoch}", "images", section="trained on"), f"epoch {epoch}"
        exact[item] = np.random.default_rng([step.args.seed, epoch]).permutation(12)
        taken = [a for i, a in one["everything"].items() if (i.section, i.kind) == (section, "images")]
        found[item] = np.concatenate(taken)
    title = f"{who}, the images of each process, against the documented"
    verdict = compare(exact, found, exact_limits(exact), title=title, hints=HINTS)
    step.check(verdict, group=lambda item: item.section.partition(",")[0])


def check_several(step: Step, one: Records, several: Several, judge: Callable) -> None:
    """Several processes against one, and against each other, where they must agree to the last bit."""
    if several.log:
        step.say(several.log)
    if several.records and several.records[0]:
        title = f"{several.who}, {several.count} processes (as the port) against one (as the reference), float64"
        alone = {run: record for run, record in one.items() if run in several.records[0]}
        step.check(judge(together([alone]), together(several.records), title=title), group=section_of)
        check_agreement(step, several)
    if several.trouble:
        step.check(several.trouble)


def check_agreement(step: Step, several: Several) -> None:
    """All processes end with the same bits; in the live run not because they had none that differed."""
    alone = ("images", "own loss", "own buffer", "gradient")
    first, *others = (
        {item: array for item, array in joined(record).items() if item.kind not in alone} for record in several.records
    )
    for rank, other in enumerate(others, 1):
        title = f"{several.who}, process {rank} of {several.count} (as the port) against process 0 (as the reference)"
        verdict = compare(first, other, exact_limits(first), title=title, hints=HINTS)
        step.check(verdict, group=section_of)
    own, another = (record.get("live", {}) for record in several.records[:2])
    statistics = [item for item in own if item.kind == "own buffer"]
    if statistics and not any((own[item] != another.get(item)).any() for item in statistics):
        step.refuse(f"{several.who}: batch norm's statistics were the same before they were made equal")


def section_of(item: Item) -> str:
    """The label that an item is shown under: its run and epoch."""
    return item.section


def limits_of(fp64_ref: Record, fp32_ref: Record) -> tuple[dict[Item, float], set[Item]]:
    """(limits, items that are zero by structure) from the reference's float64 and float32 runs of one process.

    Counts are exact.
    """
    limits, zeros = with_floors(semantic_limits(fp64_ref, fp32_ref), noise_floors(fp64_ref, U64), fp64_ref)
    return limits | {item: 0.0 for item in limits if item.kind in ("samples", "metric")}, zeros


def kept(one: Records, several: list[Several]) -> dict[str, np.ndarray]:
    """What goes into the result files: images, losses and evaluations, of one process and of several."""
    sides = {"one process": together([one])}
    sides |= {f"{each.count} processes": together(each.records) for each in several if each.records}
    return {
        f"{who}/{item.section}"
        + ("" if item.iteration is None else f", batch {item.iteration}/own")
        + f"/{item.name}": array
        for who, record in sides.items()
        for item, array in record.items()
        if item.kind not in ("gradient", "parameter", "buffer")
    }


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def alone(step: Step, runs: Mapping[str, list[str]], folder: Path) -> tuple[dict[str, Records], Callable]:
    """({side: what its one process does}, `compare` with the limits that follow), compared.

    Without the port where its training ends in an error.
    """
    ref = one_process(step, SIDES["reference"], runs, folder)
    low = one_process(step, SIDES["reference"], runs, folder, "float32")
    limits, zeros = limits_of(joined(ref), placed(joined(low), dtype="float64"))
    judge = partial(compare, limits=limits, zeros=zeros, hints=HINTS)
    title = "one process, the port against the reference, float64"
    try:
        port = one_process(step, SIDES["port"], runs, folder)
    except UserError as error:  # the reference could train on the same
        step.check(Verdict(title, [Row(Item("port, one process"), FAIL, reason=one_line(error))]))
        return {"reference": ref}, judge
    step.check(judge(joined(ref), joined(port), title=title), group=section_of)
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
    run_rung(NAME, main, get_args_parser())
