"""Write lite_data/: 16 + 16 small images in ImageNet's folder layout, so that everything runs out of the box.

The standard set is cut out of photographs that scikit-image and scikit-learn ship, and holds one of each
oddity that a reader of ImageNet meets; lite_data/README.md lists sources, licences and oddities.
With `--imagenet`, the set is a random sample of a real ImageNet tree instead, files copied unchanged.
"""

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image
from tqdm import tqdm

from mobilenetv3_common.images import IMAGE_SUFFIXES
from sturdyio.cli import ArgumentParser, UserError, existing_dir, output_dir, positive_int, run, seed

SPLITS = ("train", "val")
JPEG_QUALITY = 87

PHOTOGRAPHS = {  # name: (package that ships it, file in the package)
    "astronaut": ("skimage", "data/astronaut.png"),
    "brick": ("skimage", "data/brick.png"),
    "camera": ("skimage", "data/camera.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
}


class Picture(NamedTuple):
    """One image of the standard set: a box of a photograph, scaled to a size, stored in a form."""

    split: str
    wnid: str
    photograph: str
    number: int
    box: tuple[int, int, int, int]  # left, upper, right, lower
    size: tuple[int, int]  # width, height, as a person sees it
    form: str = "jpeg"  # jpeg (grey if the photograph is), cmyk, png or exif6

    @property
    def path(self) -> Path:
        return Path(self.split, self.wnid, f"{self.wnid}_{self.photograph}_{self.number}.JPEG")


PICTURES = (
    # tabby
    Picture("train", "n02123045", "chelsea", 0, (0, 0, 451, 300), (375, 249)),
    Picture("train", "n02123045", "chelsea", 1, (60, 0, 300, 240), (161, 161)),
    Picture("val", "n02123045", "chelsea", 2, (110, 20, 451, 276), (341, 256)),
    Picture("val", "n02123045", "chelsea", 3, (130, 30, 400, 255), (150, 125), "png"),
    # missile
    Picture("train", "n03773504", "rocket", 0, (120, 60, 520, 427), (400, 367)),
    Picture("train", "n03773504", "rocket", 1, (200, 27, 440, 427), (225, 375), "exif6"),
    Picture("val", "n03773504", "rocket", 2, (150, 100, 640, 427), (375, 250)),
    Picture("val", "n03773504", "rocket", 3, (286, 70, 356, 420), (70, 350)),
    # palace
    Picture("train", "n03877845", "china", 0, (40, 0, 400, 400), (360, 400)),
    Picture("train", "n03877845", "china", 1, (60, 0, 360, 200), (240, 160), "cmyk"),
    Picture("val", "n03877845", "china", 2, (0, 0, 640, 427), (400, 267)),
    Picture("val", "n03877845", "china", 3, (80, 140, 380, 410), (300, 270)),
    # space shuttle
    Picture("train", "n04266014", "astronaut", 0, (340, 0, 512, 290), (172, 290)),
    Picture("val", "n04266014", "astronaut", 1, (350, 60, 500, 290), (150, 230)),
    # stone wall
    Picture("train", "n04326547", "brick", 0, (0, 0, 400, 300), (400, 300)),
    Picture("val", "n04326547", "brick", 1, (112, 212, 512, 512), (333, 250)),
    # tile roof
    Picture("train", "n04435653", "china", 4, (80, 20, 330, 150), (250, 130)),
    Picture("val", "n04435653", "china", 5, (70, 225, 350, 345), (280, 120)),
    # tripod
    Picture("train", "n04485082", "camera", 0, (150, 60, 512, 512), (320, 400)),
    Picture("train", "n04485082", "camera", 1, (200, 250, 420, 512), (220, 262)),
    Picture("val", "n04485082", "camera", 2, (0, 0, 512, 512), (384, 384)),
    Picture("val", "n04485082", "camera", 3, (210, 110, 410, 510), (199, 398)),
    # espresso
    Picture("train", "n07920052", "coffee", 0, (60, 0, 500, 400), (352, 320)),
    Picture("train", "n07920052", "coffee", 1, (150, 0, 450, 300), (150, 150), "png"),
    Picture("val", "n07920052", "coffee", 2, (0, 0, 600, 400), (400, 267)),
    Picture("val", "n07920052", "coffee", 3, (150, 0, 450, 400), (300, 400), "exif6"),
    # lakeside
    Picture("train", "n09332890", "china", 6, (370, 205, 640, 259), (270, 54)),
    Picture("val", "n09332890", "china", 7, (360, 60, 640, 427), (280, 367)),
    # daisy
    Picture("train", "n11939491", "flower", 0, (0, 0, 640, 427), (400, 267)),
    Picture("train", "n11939491", "flower", 1, (130, 60, 430, 410), (300, 350)),
    Picture("val", "n11939491", "flower", 2, (150, 70, 470, 380), (224, 217), "cmyk"),
    Picture("val", "n11939491", "flower", 3, (250, 130, 440, 330), (190, 200)),
)


def photograph(name: str) -> Image.Image:
    """The photograph `name`, out of the installed package that ships it."""
    package, file = PHOTOGRAPHS[name]
    spec = find_spec(package)
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    if path is None or not path.is_file():
        raise UserError(f"photograph {package}/{file} is not installed: pip install -r requirements.txt")
    return Image.open(path)


def to_cmyk(image: Image.Image) -> Image.Image:
    """`image` separated as for print: `convert("CMYK")` would leave the black channel empty."""
    ink = 255 - np.asarray(image, dtype=np.float64)
    black = ink.min(axis=2, keepdims=True)
    colors = (ink - black) * 255 / np.maximum(255 - black, 1)
    separated = np.concatenate([colors, black], axis=2).round().astype(np.uint8)
    return Image.frombytes("CMYK", image.size, separated.tobytes())


def save_picture(picture: Picture, path: Path) -> None:
    """Cut `picture` out of its photograph and store it in its form."""
    with photograph(picture.photograph) as source:
        image = source.resize(picture.size, Image.Resampling.LANCZOS, box=picture.box)
    if picture.form == "png":
        image.save(path, "PNG")
    elif picture.form == "cmyk":
        to_cmyk(image).save(path, "JPEG", quality=JPEG_QUALITY)
    elif picture.form == "exif6":  # as from a camera held upright: a viewer turns it clockwise by 90 degrees
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(path, "JPEG", quality=JPEG_QUALITY, exif=exif)
    else:
        image.save(path, "JPEG", quality=JPEG_QUALITY)


def class_folders(root: Path, split: str) -> list[str]:
    """The class names in `root`/`split`, sorted; raises UserError unless there are some."""
    folder = root / split
    if not folder.is_dir():
        raise UserError(f"{root} has no folder {split}: name the one that holds ImageNet's train/ and val/")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise UserError(
            f"{folder} is not sorted into class folders: move each image into {split}/<wnid>/ (for val, "
            "valprep.sh of https://github.com/soumith/imagenetloader.torch does it)"
        )
    return names


def shared_classes(root: Path) -> list[str]:
    """The class names of an ImageNet tree, the same in train and val."""
    train, val = (class_folders(root, split) for split in SPLITS)
    if train != val:
        odd = min(set(train) ^ set(val))
        where, missing = ("train", "val") if odd in train else ("val", "train")
        raise UserError(f"class {odd} is in {root / where} but not in {root / missing}: complete the tree")
    return train


def draw_images(root: Path, classes: int | str, per_class: int, seed: int) -> list[Path]:
    """Paths below `root` of `per_class` random images from each split of `classes` random classes."""
    names = shared_classes(root)
    count = len(names) if classes == "all" else classes
    if count > len(names):
        raise UserError(f"--classes {count} is more than the {len(names)} classes in {root}: ask for fewer")
    rng = random.Random(seed)
    drawn = []
    wnids = sorted(rng.sample(names, count))
    for folder in (root / split / wnid for split in SPLITS for wnid in wnids):
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        if len(images) < per_class:
            raise UserError(f"{folder} has {len(images)} images: ask for fewer than {per_class} (--per-class)")
        drawn += sorted(rng.sample(images, per_class))
    return [path.relative_to(root) for path in drawn]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` if the block succeeds and vanishes if it does not."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"output folder {target} exists and is not empty: remove it or name another")
    target = target.resolve()
    with tempfile.TemporaryDirectory(prefix=".prepare-lite-data-", dir=output_dir(target.parent)) as scratch:
        folder = Path(scratch, "filling")  # not `scratch` itself, whose mode keeps other users out
        folder.mkdir()
        yield folder
        folder.rename(target)


def write_standard_set(target: Path) -> int:
    """Write the committed set to `target`; returns the number of images."""
    with new_folder(target) as folder:
        for picture in PICTURES:
            (folder / picture.path).parent.mkdir(parents=True, exist_ok=True)
            save_picture(picture, folder / picture.path)
    return len(PICTURES)


def copy_images(images: list[Path], root: Path, target: Path) -> int:
    """Copy `images`, paths below `root`, to the same paths below `target`; returns their number."""
    with new_folder(target) as folder:
        for image in tqdm(images, desc="copying", unit="image"):
            (folder / image).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / image, folder / image)
    return len(images)


def class_count(text: str) -> int | str:
    """An argparse type: a whole number of at least 1, or the word all."""
    return text if text == "all" else positive_int(text)


class_count.__name__ = "whole number of at least 1, or 'all',"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="prepare_lite_data",
        description="Write a small image set in ImageNet's layout, train/<wnid>/* and val/<wnid>/*: "
        "the standard set of 16 + 16 images (see lite_data/README.md), the same on every call, or, with "
        "--imagenet, a random sample of a real ImageNet tree.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        required=True,
        default=argparse.SUPPRESS,
        help="folder to write; must be new or empty",
    )
    sample = parser.add_argument_group("sampling a real ImageNet tree")
    sample.add_argument(
        "--imagenet",
        type=Path,
        metavar="DIR",
        help="tree with DIR/train/<wnid>/* and DIR/val/<wnid>/*; files are copied unchanged",
    )
    sample.add_argument(
        "--classes", type=class_count, default=8, metavar="K", help="number of classes to draw, or 'all'"
    )
    sample.add_argument(
        "--per-class",
        type=positive_int,
        default=2,
        metavar="N",
        help="images to draw from each class, in train and again in val",
    )
    sample.add_argument("--seed", type=seed, default=0, help="seed of the draw")
    return parser


def refuse_idle_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a sampling flag that nothing would obey, since no tree is sampled."""
    parser = get_args_parser()
    for name in ("classes", "per_class", "seed"):
        if getattr(args, name) != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} only acts together with --imagenet: name the ImageNet folder")


def main(args: argparse.Namespace) -> None:
    try:
        if args.imagenet is None:
            refuse_idle_flags(args)
            count = write_standard_set(args.output_dir)
        else:
            root = existing_dir(args.imagenet, "ImageNet folder")
            print(f"drawing from {root} with seed {args.seed}")
            images = draw_images(root, args.classes, args.per_class, args.seed)
            count = copy_images(images, root, args.output_dir)
    except OSError as error:  # no permission, no space
        raise UserError(f"nothing was written to {args.output_dir}: {error}") from error
    print(f"wrote {count // 2} + {count // 2} images to {args.output_dir}")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), "prepare_lite_data")
