"""Step 02: the data, from the folder to the batch, for validation and training.

Proves: both sides list the same classes, files and labels, and every tensor of the validation and of the training
pipeline, plain and with AutoAugment, RandomErasing, mixup and CutMix, is equal to the last bit, without loader workers
and with two. Does not prove: that the draws are distributed as torchvision's (both sides take them from one source,
which the tests hold against torchvision).
Stands on: nothing.

  python steps/02_test_data.py           ends in: PASS 02_test_data: all ... items within their limits
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from mobilenetv3_common.draws import AUTO_AUGMENT_CASES, batch_rng, image_draws, random_mix
from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import ModelRung, step_parser
from portproof.compare import PASS, Item
from portproof.ladder import covering, data, facts, image_folder, loaders, must_vary, run_rung, single_samples

NAME = "02_test_data"
BATCH_SIZE = 5  # leaves a partial batch of the 16 images
# All options of the training preset, none at its default.
OPTIONS = {"auto_augment": "imagenet", "random_erase": 0.5, "crop_scale": 0.25, "hflip_prob": 0.4}
PIPELINES = {"val": {"train": False}, "train": {"train": True}, "augmented": {"train": True, **OPTIONS}}
EPOCHS = {"val": [0], "train": [0, 1], "augmented": [0, 1]}  # that are looked at
KEEP = {"val": {"image": 16, "label": 16}}  # for the result files
DRAWN_IMAGES = 64  # of which draws are looked at
DRAWS = 30_000  # looked at for AutoAugment's rarest operation, which one image of 250 gets
MIXES = {"mixup": {"mixup_alpha": 0.2}, "cutmix": {"cutmix_alpha": 1.0}}
MIXES |= {"mixup or cutmix": {"mixup_alpha": 0.8, "cutmix_alpha": 0.5}}
MIXED_BATCHES, MIXED_SIZE = 16, (96, 64)  # height and width are parts of images, for speed
HINTS = {  # what usually causes a difference
    "val": "resize filter or size, crop, channel order (BGR for RGB), mean and std, scaling by 255",
    "train": "crop box, flip, order of the random draws, interpolation, channel order, normalization",
    "augmented": "AutoAugment after the flip: operations, signs, magnitudes, interpolation; erasing after normalizing",
    "mix": "the draw's key (seed, epoch, batch), the partner, labels not mixed, CutMix's clipped box",
}


class Side:
    """One package's image folders, and what it makes of them."""

    def __init__(self, package: Package, data_path: str, seed: int) -> None:
        self.package, self.data, self.seed = package, package.module("data"), seed
        self.sets = {k: self.data.build_dataset(data_path, seed=seed, **options) for k, options in PIPELINES.items()}

    def facts(self) -> dict[Item, object]:
        found = {}
        for name, dataset in self.sets.items():
            found |= image_folder(dataset, name) if name != "augmented" else {}
            found |= {Item(f"{name} {key}", section="preset"): value for key, value in vars(dataset.transform).items()}
        return found

    def loader(self, name: str, workers: int) -> tuple:
        train = name != "val"
        loader = self.data.build_loader(self.sets[name], BATCH_SIZE, train=train, workers=workers, seed=self.seed)
        return loader, partial(self.data.set_epoch, loader)

    def mixed(self, name: str, arrays: Sequence[np.ndarray]) -> Iterator[dict[Item, object]]:
        """What becomes of images (N, 3, H, W) and labels (N,) in each batch: mixed images, and soft targets (N, C)."""
        mix = self.data.build_mix(len(self.sets["train"].classes), **MIXES[name], seed=self.seed)
        for batch in range(MIXED_BATCHES):
            tensors = [self.package.backend.tensor(array, self.package.device) for array in arrays]
            items = (Item(f"batch {batch} {what}", "mix", section=name) for what in ("image", "target"))
            yield dict(zip(items, mix(*tensors, 1, batch), strict=True))


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__, folders="train/ and val/")


def main(args: argparse.Namespace) -> ModelRung:
    step = ModelRung(NAME, args)
    seed = args.seed + 1  # not 0, which both loaders have by default
    ref, port = (Side(package, args.data_path, seed) for package in (step.ref, step.port))
    title = f"classes, files, labels and presets of {args.data_path}"
    if facts(ref.facts(), port.facts(), title=title, rung=step).status != PASS:
        return step.finish("data")
    if len(ref.sets["train"].classes) < 2:
        step.refuse("there is one class only, so labels prove nothing: use a folder with more")

    images = range(min(DRAWN_IMAGES, len(ref.sets["train"])))
    drawn = {k: [image_draws(ref.sets[k], *at) for at in product(EPOCHS[k], images)] for k in ("train", "augmented")}
    vary = {"flipped": [it.flipped for it in drawn["train"]]}
    vary["flipped, with all options"] = [it.flipped for it in drawn["augmented"]]
    vary["erased in part"] = [it.erased for it in drawn["augmented"]]
    must_vary(vary, what="training draws", of="images", rung=step)
    for name in PIPELINES:
        both = (partial(side.loader, name) for side in (ref, port))
        loaders(*both, name=name, epochs=EPOCHS[name], hints={"image": HINTS[name]}, keep=KEEP.get(name), rung=step)

    draws = (divmod(number, len(images)) for number in range(DRAWS))
    shown = ((at, image_draws(ref.sets["augmented"], *at).operations) for at in draws)
    found = covering("AutoAugment", AUTO_AUGMENT_CASES, shown, what="operations and magnitudes", of="images", rung=step)
    title = f"AutoAugment's {len({name for name, _ in AUTO_AUGMENT_CASES})} operations"
    both = (single_samples(s.sets["augmented"], found, kinds=["image"], section="augmented") for s in (ref, port))
    data(*both, title=title, hints={"image": HINTS["augmented"]}, rung=step)

    train, (height, width) = ref.sets["train"], MIXED_SIZE
    chosen = [train[int(i)] for i in np.linspace(0, len(train) - 1, BATCH_SIZE)]  # of several classes
    images = np.stack([np.asarray(image)[:, :height, :width] for image, _ in chosen])
    same = images, np.array([label for _, label in chosen])
    for name, alphas in MIXES.items():
        mixes = [random_mix(batch_rng(ref.seed, 1, batch), *MIXED_SIZE, **alphas) for batch in range(MIXED_BATCHES)]
        kinds = [alpha.removesuffix("_alpha") for alpha in alphas]
        shown = [(mix, ["cutmix" if mix.box else "mixup"] if 0.01 < mix.share < 0.99 else []) for mix in mixes]
        covering(name, kinds, shown, what="kinds of mixing", of="batches", rung=step)
        title, hints = f"{name} of {MIXED_BATCHES} batches", {"mix": HINTS["mix"]}
        data(ref.mixed(name, same), port.mixed(name, same), title=title, hints=hints, rung=step)
    return step.finish("data")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
