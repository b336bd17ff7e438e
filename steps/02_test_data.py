"""Rung 02: the data, from the folder to the batch, for validation and training.

Proves: both sides list the same classes, files and labels, and every tensor of the validation and of the training
pipeline is equal to the last bit, without loader workers and with two. Does not prove: that the draws of crops and
flips are distributed as torchvision's (both sides take them from one source, which the tests hold against torchvision).
Stands on: nothing.

  python steps/02_test_data.py           ends in: PASS 02_test_data: all ... items within their limits
"""

import argparse
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
from tqdm import tqdm

import mobilenetv3_paddle.data
import mobilenetv3_ref.data
from reprod.align.compare import PASS, Verdict, compare, joined
from reprod.align.limits import exact_limits
from reprod.align.step import LITE_DATA, Step, run_step, step_parser
from reprod.recipe.draws import item_rng, random_resized_crop_box
from reprod.recipe.images import read_image

NAME = "02_test_data"
BATCH_SIZE = 5  # leaves a partial batch of the 16 images
EPOCHS = (0, 1)
KEPT = 16  # images whose tensors go into the result files
PICTURES = 4  # images that differ, for the report


def facts(data, data_path: str, seed: int) -> tuple[dict[str, np.ndarray], dict]:
    """What one side says of the two folders and its presets, and its datasets."""
    datasets = {
        "val": data.build_dataset(data_path, train=False),
        "train": data.build_dataset(data_path, train=True, seed=seed),
    }
    listed = {}
    for split, dataset in datasets.items():
        root = Path(data_path) / split
        listed[f"length/{split}"] = np.array(len(dataset))
        listed[f"classes/{split}"] = np.array(dataset.classes)
        listed[f"files/{split}"] = np.array([os.path.relpath(path, root) for path, _ in dataset.samples])
        listed[f"labels/{split}"] = np.array([label for _, label in dataset.samples])
        for name, value in vars(dataset.transform).items():
            listed[f"preset/{split} {name}"] = np.array("none" if value is None else value)
    return listed, datasets


def batches(loader, split: str) -> Iterator[dict[str, np.ndarray]]:
    """One side's batches as {"SPLIT/FILE": (3, H, W), "SPLIT/FILE label": ()}, in the order of its own sampler."""
    samples = loader.dataset.samples
    for number, (indices, (images, labels)) in enumerate(zip(loader.batch_sampler, loader, strict=False)):
        names = [f"{split}/{Path(samples[i][0]).name}" for i in indices]
        yield {
            f"{split}/order of batch {number}": np.array(indices),
            f"{split}/size of batch {number}": np.array([len(images), len(labels)]),
            **dict(zip(names, images.numpy(), strict=False)),  # a size that differs is an item of its own
            **{f"{name} label": label for name, label in zip(names, labels.numpy(), strict=False)},
        }


def keep_pictures(step: Step, verdict: Verdict, ref: dict, port: dict) -> None:
    """Keep the first few images that differ, both sides', for the report."""
    for row in verdict.rows:
        both = row.name in ref and row.name in port
        if row.status != PASS and len(row.shape) == 3 and both and len(step.pictures) < PICTURES:
            step.pictures.setdefault(row.name, (ref[row.name], port[row.name]))


def check_batches(step: Step, loaders: tuple, split: str, title: str, files: tuple[dict, dict]) -> Verdict:
    """Both loaders side by side, batch by batch; a batch that one of them lacks is missing there."""
    sides = zip_longest(*(batches(loader, split) for loader in loaders), fillvalue={})
    verdicts = []
    for ref, port in tqdm(sides, title, unit="batch", leave=False, disable=None):
        verdicts.append(compare(ref, port, exact_limits(ref)))
        keep_pictures(step, verdicts[-1], ref, port)
        for kept, batch in zip(files, (ref, port), strict=True):
            if split == "val" and len(kept) < 2 * KEPT:
                kept.update({name: array for name, array in batch.items() if " of batch " not in name})
    return joined(title, verdicts)


def check_pipelines(step: Step, datasets: dict, seed: int, files: tuple[dict, dict]) -> None:
    """Validation once and training for two epochs of the same loader, without workers and with two."""
    for workers in (0, 2):
        for split, epochs in (("val", (0,)), ("train", EPOCHS)):
            loaders = tuple(
                data.build_loader(sets[split], BATCH_SIZE, train=split == "train", workers=workers, seed=seed)
                for data, sets in datasets.items()
            )
            for epoch in epochs:
                for data, loader in zip(datasets, loaders, strict=True):
                    data.set_epoch(loader, epoch)
                title = f"{split} pipeline, epoch {epoch}, {workers} workers"
                verdict = check_batches(step, loaders, split, title, files)
                step.check(verdict, group=lambda name: name.split("/")[0])


def check_draws(step: Step, dataset, seed: int) -> None:
    """Refuse data on which a flip that does not flip, or one class for all, could not be seen."""
    flips = []
    for index, (path, _) in enumerate(dataset.samples[:64]):
        image = read_image(path)
        for epoch in EPOCHS:
            rng = item_rng(seed, epoch, index)
            random_resized_crop_box(rng, image.height, image.width)
            flips.append(rng.random() < dataset.transform.hflip_prob)
    step.say(f"training draws looked at: {len(flips)}, of which {sum(flips)} flip the image")
    if not 0 < sum(flips) < len(flips):
        step.refuse("no image, or every image, is flipped: use more images or another --seed")
    if len(dataset.classes) < 2:
        step.refuse("there is one class only, so labels prove nothing: use a folder with more")


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
        check_draws(step, ref_sets["train"], seed)
        check_pipelines(step, {mobilenetv3_ref.data: ref_sets, mobilenetv3_paddle.data: port_sets}, seed, files)
    for kept, listed in zip(files, (ref_facts, port_facts), strict=True):
        kept.update({name: array for name, array in listed.items() if array.dtype.kind != "U"})
    return step.finish("data", *files)


if __name__ == "__main__":
    run_step(NAME, main, get_args_parser())
