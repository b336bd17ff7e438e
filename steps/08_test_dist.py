"""Rung 08: several processes are one process, on both sides.

Proves: started by its own launcher, each side's training command takes the documented share of the images in every
process; two and three processes have the gradients, parameters, buffers and evaluation of one on the same global
batches, with batch norm frozen and with --sync-bn in train mode, there also with all the rest of the recipe on (mixup
and CutMix, accumulated and clipped gradients, RMSprop, averaged weights); without --sync-bn, where each normalizes with
its own share, they still end each epoch with the same parameters and buffers; every image is evaluated once, also where
a process gets fewer than another or none; the same layers are in train mode, and the same process prints the log, as
in the reference; and one process of the port trains as one of the reference. All in float64, without dropout. Does not
prove: what NCCL does between cards.
Stands on: 02 (the images), 05 (the training step). Runs on the CPU over gloo, whatever --device says.

  python steps/08_test_dist.py           ends in: PASS 08_test_dist: all ... items within their limits
"""

import argparse
import math
import shutil
import tempfile
from pathlib import Path

import numpy as np

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import LITE_DATA, Step, step_parser
from portproof.io.files import save_safetensors
from portproof.ladder.rung import run_rung
from portproof.ladder.rungs.processes import EPOCHS, dist

NAME = "08_test_dist"
GLOBAL_BATCH = 6  # 16 images leave a partial batch of 4
# A rate that does not magnify rounding.
RECIPE = {"lr": 2**-12, "momentum": 0.875, "weight-decay": 2**-12, "lr-step-size": 1, "lr-gamma": 0.5, "dropout": 0}
SIZES = {"train-crop-size": 64, "val-crop-size": 64, "val-resize-size": 64, "workers": 0, "batch-size": GLOBAL_BATCH}
# Three processes have an even number of images each, whose pairs mixup then mixes as one process does.
EVERYTHING = (
    *("--sync-bn", "--mixup-alpha=0.25", "--cutmix-alpha=1", "--label-smoothing=0.125", "--opt=rmsprop"),
    *("--gradient-accumulation-steps=2", "--clip-grad-norm=1", "--norm-weight-decay=0"),
    *("--model-ema", "--model-ema-steps=1", "--model-ema-decay=0.9375"),
)


def images_of(split: str) -> list[Path]:
    return sorted(path.relative_to(LITE_DATA) for path in (LITE_DATA / split).glob("*/*"))


def folder_of(folder: Path, name: str, paths: list[Path]) -> Path:
    """A data folder with those images of lite_data alone."""
    for path in paths:
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(LITE_DATA / path, folder / name / path)
    return folder / name


def make_runs(step: Step, folder: Path) -> dict[int, dict[str, list[str]]]:
    """{number of processes: {name: flags}} of all runs."""
    train, val = images_of("train"), images_of("val")
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


def order(seed: int, epoch: int, length: int) -> np.ndarray:
    """Of training, as BatchSampler's docstring has it."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    length = len(images_of("train"))

    def documented(train: bool, epoch: int, rank: int, processes: int) -> np.ndarray:
        """The images of a process, as BatchSampler's docstring has them."""
        every = np.arange(len(images_of("val")))
        if train:
            every = np.resize(order(args.seed, epoch, length), math.ceil(length / processes) * processes)
        return every[rank::processes]

    def share_of(package: Package):
        """The same of a package's own loaders."""
        data = package.module("data")

        def share(train: bool, epoch: int, rank: int, processes: int) -> list[int]:
            dataset = data.build_dataset(LITE_DATA, train=train, seed=args.seed)
            of_all = {"train": train, "seed": args.seed}
            loader = data.build_loader(dataset, GLOBAL_BATCH, **of_all, rank=rank, world_size=processes)
            data.set_epoch(loader, epoch)
            return [index for batch in loader.batch_sampler for index in batch]

        return share

    with tempfile.TemporaryDirectory() as folder:
        dist(
            "mobilenetv3_proof.recorder:ref",
            "mobilenetv3_proof.recorder:port",
            make_runs(step, Path(folder)),
            own_statistics=["live"],
            coefficients="float64",  # neither side rounds them
            shares=[documented, share_of(step.ref), share_of(step.port)],
            trained_on={"everything": {f"epoch {epoch}": order(args.seed, epoch, 12) for epoch in range(EPOCHS)}},
            rung=step,
        )
    return step.finish("dist")


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
