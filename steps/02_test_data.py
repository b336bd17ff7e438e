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
from itertools import product, zip_longest
from pathlib import Path

import numpy as np
from tqdm import tqdm

import mobilenetv3_paddle.data
import mobilenetv3_ref.data
from mobilenetv3_common.draws import (
    IMAGENET_POLICY,
    MAGNITUDES,
    auto_augment_operations,
    batch_rng,
    item_rng,
    random_erasing_box,
    random_mix,
    random_resized_crop_box,
)
from mobilenetv3_common.images import read_image
from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import LITE_DATA, Step, step_parser
from portproof.compare import PASS, Item, Verdict, compare, joined
from portproof.compare.tolerances import exact_limits
from portproof.ladder.rung import run_rung

NAME = "02_test_data"
BATCH_SIZE = 5  # leaves a partial batch of the 16 images
EPOCHS = (0, 1)
KEPT = 16  # images whose tensors go into the result files
PICTURES = 4  # images that differ, for the report
# All options of the training preset, none at its default.
OPTIONS = {"auto_augment": "imagenet", "random_erase": 0.5, "crop_scale": 0.25, "hflip_prob": 0.4}
DRAWN_IMAGES = 64  # of which draws are looked at
DRAWS = 30_000  # looked at for AutoAugment's rarest operation, which one image of 250 gets
MIXES = {
    "mixup": {"mixup_alpha": 0.2},
    "cutmix": {"cutmix_alpha": 1.0},
    "mixup or cutmix": {"mixup_alpha": 0.8, "cutmix_alpha": 0.5},
}
# What usually causes a difference, by pipeline.
IMAGE_HINTS = {
    "val": "resize filter or size, crop, channel order (BGR for RGB), mean and std, scaling by 255",
    "train": "crop box, flip, order of the random draws, interpolation, channel order, normalization",
    "augmented": "AutoAugment after the flip: both operations, signs, magnitudes, interpolation; erasing after "
    "normalization",
}
MIX_HINT = "the draw's key (seed, epoch, batch), the partner, labels not mixed, CutMix's clipped box"
MIXED_BATCHES, MIXED_SIZE = 16, (96, 64)  # height and width are parts of images, for speed


def facts(data, data_path: str, seed: int) -> tuple[dict[Item, np.ndarray], dict]:
    """What one side says of the two folders and its presets, and its datasets."""
    datasets = {
        "val": data.build_dataset(data_path, train=False),
        "train": data.build_dataset(data_path, train=True, seed=seed),
        "augmented": data.build_dataset(data_path, train=True, seed=seed, **OPTIONS),
    }
    listed = {}
    for split, dataset in datasets.items():
        if split != "augmented":
            root = Path(data_path) / split
            paths, labels = zip(*dataset.samples, strict=True)
            listed[Item(split, "files", section="length")] = np.array(len(dataset))
            listed[Item(split, "files", section="classes")] = np.array(dataset.classes)
            listed[Item(split, "files", section="files")] = np.array([os.path.relpath(path, root) for path in paths])
            listed[Item(split, "label", section="labels")] = np.array(labels)
        for name, value in vars(dataset.transform).items():
            listed[Item(f"{split} {name}", section="preset")] = np.array("none" if value is None else value)
    return listed, datasets


def batches(loader, split: str) -> Iterator[dict[Item, np.ndarray]]:
    """One side's batches by image: a tensor (3, H, W) and a label (), in the order of its own sampler."""
    samples = loader.dataset.samples
    for number, (indices, (images, labels)) in enumerate(zip(loader.batch_sampler, loader, strict=False)):
        names = [Path(samples[i][0]).name for i in indices]
        yield {
            Item(f"order of batch {number}", "order", section=split): np.array(indices),
            Item(f"size of batch {number}", "order", section=split): np.array([len(images), len(labels)]),
            # a size that differs is an item of its own
            **{Item(n, "image", section=split): image for n, image in zip(names, images.numpy(), strict=False)},
            **{Item(f"{n} label", "label", section=split): y for n, y in zip(names, labels.numpy(), strict=False)},
        }


def keep_pictures(step: Step, verdict: Verdict, ref: dict, port: dict) -> None:
    """Keep the first few images that differ, both sides', for the report."""
    for row in verdict.rows:
        both = row.item in ref and row.item in port
        if row.status != PASS and len(row.shape) == 3 and both and len(step.pictures) < PICTURES:
            step.pictures.setdefault(row.name, (ref[row.item], port[row.item]))


def check_batches(step: Step, loaders: tuple, split: str, title: str, files: tuple[dict, dict]) -> Verdict:
    """Both loaders side by side, batch by batch; a batch that one of them lacks is missing there."""
    sides = zip_longest(*(batches(loader, split) for loader in loaders), fillvalue={})
    verdicts = []
    for ref, port in tqdm(sides, title, unit="batch", leave=False, disable=None):
        verdicts.append(compare(ref, port, exact_limits(ref), hints={"image": IMAGE_HINTS[split]}))
        keep_pictures(step, verdicts[-1], ref, port)
        for kept, batch in zip(files, (ref, port), strict=True):
            if split == "val" and len(kept) < 2 * KEPT:
                kept.update({item: array for item, array in batch.items() if item.kind != "order"})
    return joined(title, verdicts)


def check_pipelines(step: Step, datasets: dict, seed: int, files: tuple[dict, dict]) -> None:
    """Validation once and training for two epochs of the same loader, without workers and with two."""
    for workers, split in product((0, 2), ("val", "train", "augmented")):
        loaders = tuple(
            data.build_loader(sets[split], BATCH_SIZE, train=split != "val", workers=workers, seed=seed)
            for data, sets in datasets.items()
        )
        for epoch in EPOCHS if split != "val" else (0,):
            for data, loader in zip(datasets, loaders, strict=True):
                data.set_epoch(loader, epoch)
            title = f"{split} pipeline, epoch {epoch}, {workers} workers"
            verdict = check_batches(step, loaders, split, title, files)
            step.check(verdict)


def image_sizes(dataset) -> list[tuple[int, int]]:
    """(height, width) of the first images."""
    return [(image.height, image.width) for image in (read_image(path) for path, _ in dataset.samples[:DRAWN_IMAGES])]


def item_draws(dataset, size: tuple[int, int], epoch: int, index: int) -> tuple[bool, list[tuple[str, float]], bool]:
    """Whether image `index` of (height, width) is flipped, AutoAugment's operations, whether a part is erased."""
    preset, rng = dataset.transform, item_rng(dataset.seed, epoch, index)
    random_resized_crop_box(rng, *size, (preset.crop_scale, 1.0))
    flipped = rng.random() < preset.hflip_prob
    operations = auto_augment_operations(rng) if preset.auto_augment else []
    erased = rng.random() < preset.random_erase and bool(random_erasing_box(rng, preset.crop_size, preset.crop_size))
    return flipped, operations, erased


def check_draws(step: Step, dataset, augmented) -> None:
    """Refuse data on which a flip that does not flip, a missing erasing or one class for all could not be seen."""
    sizes = image_sizes(dataset)
    items = list(product(EPOCHS, enumerate(sizes)))
    for what, drawn in {
        "flipped": [item_draws(dataset, size, epoch, index)[0] for epoch, (index, size) in items],
        "flipped, with all options": [item_draws(augmented, size, epoch, index)[0] for epoch, (index, size) in items],
        "erased in part": [item_draws(augmented, size, epoch, index)[2] for epoch, (index, size) in items],
    }.items():
        step.say(f"training draws looked at: {len(drawn)}, of which {sum(drawn)} are {what}")
        if not 0 < sum(drawn) < len(drawn):
            step.refuse(f"no image, or every image, is {what}: use more images or another --seed")
    if len(dataset.classes) < 2:
        step.refuse("there is one class only, so labels prove nothing: use a folder with more")


def check_operations(step: Step, ref_set, port_set) -> None:
    """Compare images that show between them all that AutoAugment can draw; refuse if it never does."""
    every = {(operation, bin_) for policy in IMAGENET_POLICY for operation, _, bin_ in policy}
    signs = {operation: (1, -1) if signed else (1,) for operation, (_, signed) in MAGNITUDES.items()}
    unseen = {(name, sign * MAGNITUDES[name][0][bin_]) for name, bin_ in every for sign in signs[name]}
    sizes, ref, port, count = image_sizes(ref_set), {}, {}, len(unseen)
    for number in range(DRAWS):
        epoch, index = divmod(number, len(sizes))
        operations = set(item_draws(ref_set, sizes[index], epoch, index)[1])
        if operations & unseen:
            unseen -= operations
            item = Item(f"{Path(ref_set.samples[index][0]).name} epoch {epoch}", "image", section="augmented")
            for images, dataset in ((ref, ref_set), (port, port_set)):
                dataset.set_epoch(epoch)
                images[item] = np.asarray(dataset[index][0])
        if not unseen:
            break
    step.say(f"AutoAugment: {count - len(unseen)} of {count} operations and magnitudes drawn, in {len(ref)} images")
    if unseen:
        step.refuse(f"AutoAugment never draws {', '.join(sorted({name for name, _ in unseen}))}: use another --seed")
    title = f"AutoAugment's {len({name for name, _ in every})} operations"
    verdict = compare(ref, port, exact_limits(ref), title=title, hints={"image": IMAGE_HINTS["augmented"]})
    keep_pictures(step, verdict, ref, port)
    step.check(verdict)


def mixed(package: Package, kind: str, dataset, seed: int) -> dict[Item, np.ndarray]:
    """One side's batches after mixing: images (N, 3, H, W) and soft targets (N, C), by batch."""
    mix, backend = package.module("data").build_mix(len(dataset.classes), seed=seed, **MIXES[kind]), package.backend
    chosen = [int(i) for i in np.linspace(0, len(dataset) - 1, BATCH_SIZE)]  # of several classes
    images = np.stack([np.asarray(dataset[i][0])[:, : MIXED_SIZE[0], : MIXED_SIZE[1]] for i in chosen])
    labels = np.array([dataset.samples[i][1] for i in chosen])
    outputs = {}
    for batch in range(MIXED_BATCHES):
        image, target = mix(*(backend.tensor(array, package.device) for array in (images, labels)), 1, batch)
        outputs[Item(f"batch {batch} image", "mix", section=kind)] = backend.to_array(image)
        outputs[Item(f"batch {batch} target", "mix", section=kind)] = backend.to_array(target)
    return outputs


def check_mixes(step: Step, dataset, seed: int) -> None:
    """Mixup, CutMix and both on a few batches; refuse draws under which a side that does not mix could not be seen."""
    for kind, alphas in MIXES.items():
        mixes = [
            random_mix(
                batch_rng(seed, 1, batch), *MIXED_SIZE, alphas.get("mixup_alpha", 0), alphas.get("cutmix_alpha", 0)
            )
            for batch in range(MIXED_BATCHES)
        ]
        shares, boxes = [mix.share for mix in mixes], [mix for mix in mixes if mix.box]
        step.say(
            f"{kind}: {len(mixes)} batches drawn, {len(boxes)} of them CutMix, the median share {np.median(shares):.2f}"
        )
        if not any(0.01 < share < 0.99 for share in shares):
            step.refuse(f"{kind} leaves every batch as it is: use another --seed")
        if len(alphas) == 2 and len(boxes) in (0, len(mixes)):
            step.refuse(f"{kind} takes one of the two only: use another --seed")
        ref, port = (mixed(package, kind, dataset, seed) for package in (step.ref, step.port))
        title = f"{kind} of {MIXED_BATCHES} batches"
        step.check(compare(ref, port, exact_limits(ref), title=title, hints={"mix": MIX_HINT}))


def get_args_parser() -> argparse.ArgumentParser:
    parser = step_parser(NAME, __doc__)
    parser.add_argument("--data-path", default=str(LITE_DATA), help="folder with train/ and val/, one folder a class")
    return parser


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    seed = args.seed + 1  # not 0, which both loaders have by default
    ref_facts, ref_sets = facts(mobilenetv3_ref.data, args.data_path, seed)
    port_facts, port_sets = facts(mobilenetv3_paddle.data, args.data_path, seed)
    files = ({}, {})
    title = f"classes, files, labels and presets of {args.data_path}"
    if step.check(compare(ref_facts, port_facts, exact_limits(ref_facts), title=title), group=str):
        check_draws(step, ref_sets["train"], ref_sets["augmented"])
        check_pipelines(step, {mobilenetv3_ref.data: ref_sets, mobilenetv3_paddle.data: port_sets}, seed, files)
        check_operations(step, ref_sets["augmented"], port_sets["augmented"])
        check_mixes(step, ref_sets["train"], seed)
    for kept, listed in zip(files, (ref_facts, port_facts), strict=True):
        kept.update({item: array for item, array in listed.items() if array.dtype.kind != "U"})
    return step.finish("data", *files)


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
