"""Rung 02: the data, from the folder to the batch, for validation and training.

Proves: both sides list the same classes, files and labels, and every tensor of the validation and of the training
pipeline is equal to the last bit, without loader workers and with two. Does not prove: that the draws of crops and
flips are distributed as torchvision's (both sides take them from one source, which the tests hold against torchvision).
Stands on: nothing.

  python steps/02_test_data.py           ends in: PASS 02_test_data: all ... items within their limits
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

import mobilenetv3_paddle.data
import mobilenetv3_ref.data
from reprod.align.compare import Verdict, compare, joined
from reprod.align.limits import exact_limits
from reprod.align.step import LITE_DATA, Step, step_parser
from reprod.recipe.cli import run
from reprod.recipe.draws import item_rng, random_resized_crop_box
from reprod.recipe.images import read_image

NAME = "02_test_data"
BATCH_SIZE = 5  # leaves a partial batch of the 16 images
EPOCHS = (0, 1)
KEPT = 16  # images whose tensors go into the result files


def facts(data, data_path: str, seed: int) -> tuple[dict[str, np.ndarray], dict]:
    """What one side says of the two folders, and its datasets."""
    datasets = {
        "val": data.build_dataset(data_path, train=False),
        "train": data.build_dataset(data_path, train=True, seed=seed),
    }
    listed = {}
    for split, dataset in datasets.items():
        root = Path(data_path) / split
        listed[f"length/{split}"] = np.array(len(dataset))
        listed[f"classes/{split}"] = np.array(dataset.classes)
        listed[f"files/{split}"] = np.array([str(Path(path).relative_to(root)) for path, _ in dataset.samples])
        listed[f"labels/{split}"] = np.array([label for _, label in dataset.samples])
    return listed, datasets


def batches(data, dataset, split: str, epoch: int, workers: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """One side's batches as {"SPLIT/FILE": (3, H, W), "SPLIT/FILE label": ()}, in the order of its own sampler."""
    loader = data.build_loader(dataset, BATCH_SIZE, train=split == "train", workers=workers, seed=seed)
    data.set_epoch(loader, epoch)
    for number, (indices, (images, labels)) in enumerate(zip(loader.batch_sampler, loader, strict=True)):
        names = [f"{split}/{Path(dataset.samples[i][0]).name}" for i in indices]
        yield {
            f"{split}/order of batch {number}": np.array(indices),
            **dict(zip(names, images.numpy(), strict=True)),
            **{f"{name} label": label for name, label in zip(names, labels.numpy(), strict=True)},
        }


def check_batches(
    step: Step, datasets: dict, split: str, epoch: int, workers: int, files: tuple[dict, dict]
) -> Verdict:
    """Both loaders side by side, batch by batch."""
    title = f"{split} pipeline, epoch {epoch}, {workers} workers"
    sides = [
        batches(data, datasets[data][split], split, epoch, workers, step.args.seed)
        for data in (mobilenetv3_ref.data, mobilenetv3_paddle.data)
    ]
    verdicts = []
    for ref, port in tqdm(zip(*sides, strict=True), title, unit="batch", leave=False, disable=None):
        verdicts.append(compare(ref, port, exact_limits(ref)))
        for kept, batch in zip(files, (ref, port), strict=True):
            if split == "val" and len(kept) < 2 * KEPT:
                kept.update({name: array for name, array in batch.items() if "order of" not in name})
    return joined(title, verdicts)


def check_draws(step: Step, dataset) -> None:
    """Refuse data on which a flip that does not flip, or one class for all, could not be seen."""
    flips = []
    for index, (path, _) in enumerate(dataset.samples[:64]):
        image = read_image(path)
        for epoch in EPOCHS:
            rng = item_rng(step.args.seed, epoch, index)
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


def main(args: argparse.Namespace) -> int:
    step = Step(NAME, args)
    ref_facts, ref_sets = facts(mobilenetv3_ref.data, args.data_path, args.seed)
    port_facts, port_sets = facts(mobilenetv3_paddle.data, args.data_path, args.seed)
    datasets = {mobilenetv3_ref.data: ref_sets, mobilenetv3_paddle.data: port_sets}
    files = ({}, {})
    title = f"classes, files and labels of {args.data_path}"
    if step.check(compare(ref_facts, port_facts, exact_limits(ref_facts), title=title), group=str):
        check_draws(step, ref_sets["train"])
        for workers in (0, 2):
            for split, epochs in (("val", (0,)), ("train", EPOCHS)):
                for epoch in epochs:
                    verdict = check_batches(step, datasets, split, epoch, workers, files)
                    step.check(verdict, group=lambda name: name.split("/")[0])
    for kept, listed in zip(files, (ref_facts, port_facts), strict=True):
        kept.update({name: array for name, array in listed.items() if array.dtype.kind != "U"})
    return step.finish("data", *files)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
