"""Rung 02: the data, from the folder to the batch, for validation and training.

Proves: both sides list the same classes, files and labels, and every tensor of the validation and of the training
pipeline, plain and with AutoAugment, RandomErasing, mixup and CutMix, is equal to the last bit, without loader workers
and with two. Does not prove: that the draws are distributed as torchvision's (both sides take them from one source,
which the tests hold against torchvision).
Stands on: nothing.

  python steps/02_test_data.py           ends in: PASS 02_test_data: all ... items within their limits
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from mobilenetv3_common.draws import AUTO_AUGMENT_CASES, ImageDraws, batch_rng, image_draws, item_rng, random_mix
from mobilenetv3_common.images import read_image
from mobilenetv3_proof.step import LITE_DATA, Step, step_parser
from portproof.compare import PASS, Item
from portproof.ladder.rung import run_rung
from portproof.ladder.rungs.batches import by_sample, covering, data, facts, must_vary

NAME = "02_test_data"
BATCH_SIZE = 5  # leaves a partial batch of the 16 images
KEPT = 16  # images whose tensors go into the result files
EPOCHS = {"val": (0,), "train": (0, 1), "augmented": (0, 1)}  # of each pipeline
# All options of the training preset, none at its default.
OPTIONS = {"auto_augment": "imagenet", "random_erase": 0.5, "crop_scale": 0.25, "hflip_prob": 0.4}
DRAWN_IMAGES = 64  # of which draws are looked at
DRAWS = 30_000  # looked at for AutoAugment's rarest operation, which one image of 250 gets
MIXES = {"mixup": (0.2, 0), "cutmix": (0, 1.0), "mixup or cutmix": (0.8, 0.5)}  # alphas of mixup and CutMix
MIXED_BATCHES, MIXED_SIZE = 16, (96, 64)  # height and width are parts of images, for speed
HINTS = {  # what usually causes a difference
    "val": "resize filter or size, crop, channel order (BGR for RGB), mean and std, scaling by 255",
    "train": "crop box, flip, order of the random draws, interpolation, channel order, normalization",
    "augmented": "AutoAugment after the flip: both operations, signs, magnitudes, interpolation; erasing after "
    "normalization",
    "mix": "the draw's key (seed, epoch, batch), the partner, labels not mixed, CutMix's clipped box",
}


def listed(datasets: dict) -> dict[Item, object]:
    """What one side says of the two folders and its presets."""
    found = {}
    for split, dataset in datasets.items():
        if split != "augmented":
            paths, labels = zip(*dataset.samples, strict=True)
            found[Item(split, "files", section="length")] = len(dataset)
            found[Item(split, "files", section="classes")] = dataset.classes
            found[Item(split, "files", section="files")] = [os.path.relpath(path, dataset.root) for path in paths]
            found[Item(split, "label", section="labels")] = labels
        found |= {Item(f"{split} {name}", section="preset"): value for name, value in vars(dataset.transform).items()}
    return found


def file_name(dataset, index: int) -> str:
    """An image's."""
    return Path(dataset.samples[index][0]).name


def draws(dataset, count: int) -> Iterator[tuple[tuple[int, int], ImageDraws]]:
    """((epoch, index), what is drawn for the image) of the first images, epoch after epoch."""
    sizes = [read_image(path).size for path, _ in dataset.samples[:DRAWN_IMAGES]]
    for epoch, index in (divmod(number, len(sizes)) for number in range(count)):
        yield (epoch, index), image_draws(item_rng(dataset.seed, epoch, index), sizes[index], dataset.transform)


def augmented(dataset, chosen: list[tuple[int, int]]) -> Iterator[dict[Item, object]]:
    """One side's images (3, H, W) of these (epoch, index)."""
    for epoch, index in chosen:
        dataset.set_epoch(epoch)
        yield {Item(f"{file_name(dataset, index)} epoch {epoch}", "image", section="augmented"): dataset[index][0]}


def mixed(package, dataset, kind: str, seed: int) -> Iterator[dict[Item, object]]:
    """One side's batches after mixing: images (N, 3, H, W) and soft targets (N, C)."""
    mixup_alpha, cutmix_alpha = MIXES[kind]
    build = package.module("data").build_mix
    mix = build(len(dataset.classes), mixup_alpha=mixup_alpha, cutmix_alpha=cutmix_alpha, seed=seed)
    chosen = [int(i) for i in np.linspace(0, len(dataset) - 1, BATCH_SIZE)]  # of several classes
    images = np.stack([np.asarray(dataset[i][0])[:, : MIXED_SIZE[0], : MIXED_SIZE[1]] for i in chosen])
    labels = np.array([dataset.samples[i][1] for i in chosen])
    for batch in range(MIXED_BATCHES):
        image, target = mix(*(package.backend.tensor(array, package.device) for array in (images, labels)), 1, batch)
        where = {"kind": "mix", "section": kind}
        yield {Item(f"batch {batch} image", **where): image, Item(f"batch {batch} target", **where): target}


def check(step: Step, sides: list[tuple], seed: int) -> None:
    """All that the datasets, loaders and mixes make; `sides` are (package, its datasets)."""
    sets = sides[0][1]
    if len(sets["train"].classes) < 2:
        step.refuse("there is one class only, so labels prove nothing: use a folder with more")
    count = len(EPOCHS["train"]) * min(DRAWN_IMAGES, len(sets["train"]))
    plain, all_options = ([drawn for _, drawn in draws(sets[split], count)] for split in ("train", "augmented"))
    flags = {
        "flipped": [drawn.flipped for drawn in plain],
        "flipped, with all options": [drawn.flipped for drawn in all_options],
        "erased in part": [drawn.erased for drawn in all_options],
    }
    must_vary(flags, what="training draws", of="images", rung=step)

    for workers, split in product((0, 2), EPOCHS):
        loaders = []
        for package, own in sides:
            build = package.module("data").build_loader
            loaders.append(build(own[split], BATCH_SIZE, train=split != "val", workers=workers, seed=seed))
        for epoch in EPOCHS[split]:  # of the same loader
            for (package, _), loader in zip(sides, loaders, strict=True):
                package.module("data").set_epoch(loader, epoch)
            both = [by_sample(it.batch_sampler, it, partial(file_name, it.dataset), section=split) for it in loaders]
            title = f"{split} pipeline, epoch {epoch}, {workers} workers"
            data(*both, title=title, hints={"image": HINTS[split]}, rung=step)

    shown = ((at, drawn.operations) for at, drawn in draws(sets["augmented"], DRAWS))
    what = "operations and magnitudes"
    chosen = covering("AutoAugment", AUTO_AUGMENT_CASES, shown, what=what, of="images", rung=step)
    title = f"AutoAugment's {len({name for name, _ in AUTO_AUGMENT_CASES})} operations"
    both = [augmented(own["augmented"], chosen) for _, own in sides]
    data(*both, title=title, hints={"image": HINTS["augmented"]}, rung=step)

    for kind, alphas in MIXES.items():
        mixes = [random_mix(batch_rng(seed, 1, batch), *MIXED_SIZE, *alphas) for batch in range(MIXED_BATCHES)]
        kinds = [name for name, alpha in zip(("mixup", "CutMix"), alphas, strict=True) if alpha]
        shown = [(mix, ["CutMix" if mix.box else "mixup"] if 0.01 < mix.share < 0.99 else []) for mix in mixes]
        covering(kind, kinds, shown, what="kinds of mixing", of="batches", rung=step)
        both = [mixed(package, sets["train"], kind, seed) for package, _ in sides]
        data(*both, title=f"{kind} of {MIXED_BATCHES} batches", hints={"mix": HINTS["mix"]}, rung=step)


def kept(dataset) -> dict[str, np.ndarray]:
    """One side's first validation images and labels, for the result files."""
    found = {}
    for index in range(min(KEPT, len(dataset))):
        image, label = dataset[index]
        found |= {f"val/{file_name(dataset, index)}": image, f"val/{file_name(dataset, index)} label": label}
    return found


def get_args_parser() -> argparse.ArgumentParser:
    parser = step_parser(NAME, __doc__)
    parser.add_argument("--data-path", default=str(LITE_DATA), help="folder with train/ and val/, one folder a class")
    return parser


def main(args: argparse.Namespace) -> Step:
    step, sides = Step(NAME, args), []
    seed = args.seed + 1  # not 0, which both loaders have by default
    for package in (step.ref, step.port):
        build = package.module("data").build_dataset
        train, all_options = (build(args.data_path, train=True, seed=seed, **options) for options in ({}, OPTIONS))
        own = {"val": build(args.data_path, train=False), "train": train, "augmented": all_options}
        sides.append((package, own))
    title = f"classes, files, labels and presets of {args.data_path}"
    if facts(*(listed(own) for _, own in sides), title=title, rung=step).status == PASS:
        check(step, sides, seed)
        step.keep(*(kept(own["val"]) for _, own in sides))
    return step.finish("data")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
