"""Step 08: several processes are one process, on both sides.

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
import shutil
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import LITE_DATA, ModelRung, step_parser
from portproof.ladder import dist, run_rung, strided_shares
from sturdyio.files import save_safetensors

NAME = "08_test_dist"
GLOBAL_BATCH = 6  # 16 images leave a partial batch of 4
# A rate that does not magnify rounding.
RECIPE = {"lr": 2**-12, "momentum": 0.875, "weight-decay": 2**-12, "lr-step-size": 1, "lr-gamma": 0.5, "dropout": 0}
SIZES = {"train-crop-size": 64, "val-crop-size": 64, "val-resize-size": 64, "workers": 0, "batch-size": GLOBAL_BATCH}
EPOCHS = 2
# Three processes have an even number of images each, whose pairs mixup then mixes as one process does.
EVERYTHING = (
    f"--epochs={EPOCHS} --sync-bn --mixup-alpha=0.25 --cutmix-alpha=1 --label-smoothing=0.125 --opt=rmsprop "
    "--gradient-accumulation-steps=2 --clip-grad-norm=1 --norm-weight-decay=0 "
    "--model-ema --model-ema-steps=1 --model-ema-decay=0.9375"
)
RUNS = {  # {name: (processes, images, flags)}
    "frozen": (2, "16 images", "--epochs=1 --freeze-norm"),
    "live": (2, "12 images", "--epochs=1 --model-ema --model-ema-steps=1"),
    "synchronized": (2, "12 images", "--epochs=1 --sync-bn"),
    "16 images": (2, "16 images", "--test-only"),
    "15 images": (2, "15 images", "--test-only"),
    "1 image": (2, "1 image", "--test-only"),
    "frozen, 12 images": (3, "12 images", "--epochs=1 --freeze-norm"),
    "everything": (3, "12 images", EVERYTHING),
}


def write_images(folder: Path) -> dict[str, Path]:
    """Data folders with some of lite_data's images: 12 to train on, of every class; 15, or one, to evaluate."""
    train, val = (sorted(path.relative_to(LITE_DATA) for path in LITE_DATA.glob(f"{k}/*/*")) for k in ("train", "val"))
    second = [path for before, path in pairwise(train) if before.parent == path.parent]
    twelve = [path for path in train if path not in second[2:]]
    folders = {"12 images": [*twelve, *val], "15 images": val[1:], "1 image": val[:1]}
    for name, paths in folders.items():
        for path in paths:
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(LITE_DATA / path, folder / name / path)
    return {"16 images": LITE_DATA, **{name: folder / name for name in folders}}


def make_runs(step: ModelRung, folder: Path) -> dict[int, dict[str, list[str]]]:
    """{number of processes: {name: flags}}."""
    images, weights = write_images(folder), {}
    for classes in (10, 1000):  # of lite_data, and of ImageNet, which the folder of one image is a part of
        weights[classes] = folder / f"{classes}_classes.safetensors"
        head = {k: np.resize(v, (classes, *v.shape[1:])) for k, v in step.arrays.items() if "classifier.3" in k}
        save_safetensors(step.arrays | head, weights[classes])
    settings = {"model": step.args.model, "seed": step.args.seed, **RECIPE, **SIZES}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    runs = {2: {}, 3: {}}
    for name, (processes, data, own) in RUNS.items():
        file = weights[1000 if data == "1 image" else 10]
        runs[processes][name] = [*flags, f"--data-path={images[data]}", f"--weights={file}", *own.split()]
    return runs


def order(seed: int, length: int, epoch: int) -> np.ndarray:
    """Of training, as BatchSampler's docstring has it."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def share(package: Package, seed: int, train: bool, epoch: int, rank: int, processes: int) -> list[int]:
    """The images of a process, from the package's own loader."""
    data = package.module("data")
    dataset, of_all = data.build_dataset(LITE_DATA, train=train, seed=seed), {"train": train, "seed": seed}
    loader = data.build_loader(dataset, GLOBAL_BATCH, **of_all, rank=rank, world_size=processes)
    data.set_epoch(loader, epoch)
    return [index for batch in loader.batch_sampler for index in batch]


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__)


def main(args: argparse.Namespace) -> ModelRung:
    step, seed = ModelRung(NAME, args), args.seed
    with tempfile.TemporaryDirectory() as folder:
        dist(
            "mobilenetv3_proof.recorder:ref",
            "mobilenetv3_proof.recorder:port",
            make_runs(step, Path(folder)),
            own_statistics=["live"],
            coefficients="float64",  # neither side rounds them
            shares=[strided_shares(partial(order, seed, 16), evaluated=16), *step.both(share, seed)],
            trained_on={"everything": {f"epoch {epoch}": order(seed, 12, epoch) for epoch in range(EPOCHS)}},
            rung=step,
        )
    return step.finish("dist")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
