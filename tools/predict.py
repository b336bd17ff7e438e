"""Say what one image, or every image in a folder, shows: the most probable ImageNet classes.

  python tools/predict.py --weights mobilenet_v3_small.pdparams --input cat.jpg
  python tools/predict.py --framework torch --weights mobilenet_v3_small-047dcff4.pth --input lite_data/val

Weights come from training, from tools/convert_weights.py or, to try things out, from tools/make_probe_weights.py.

An image gives one line a class, then its best class as "class_id: 281, prob: 0.9091". A folder, searched with all its
subfolders for the files that ImageFolder takes for images, gives one line an image in sorted order; images that cannot
be read are named on stderr and skipped. If the model has ImageNet's 1000 classes, their names are shown, and top-1 of
the images in folders named by wnid, such as n02123045.

Exit status: 0 every image was predicted, 1 some in the folder were skipped, 2 something must be fixed first.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import numpy as np
from PIL import Image
from tqdm import tqdm

from mobilenetv3_common.arguments import MODEL_NAMES, PIXELS, check_val_sizes
from mobilenetv3_common.images import IMAGE_SUFFIXES, read_image
from mobilenetv3_common.wnids import IMAGENET_LABELS
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, existing_file, positive_int, printable, run, unusable

PROG = "predict"
MODULES = {"paddle": "mobilenetv3_paddle.predict", "torch": "mobilenetv3_ref.predict"}


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    required = {"required": True, "default": argparse.SUPPRESS}
    add = parser.add_argument
    add("--framework", choices=tuple(MODULES), default="paddle", help="which package predicts; only this is imported")
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    add(
        "--weights",
        metavar="FILE",
        help="this framework's weights (.pdparams, or .pth and .pt), .safetensors with its names, or a checkpoint",
        **required,
    )
    add("--input", metavar="PATH", type=Path, help="an image, or a folder of images", **required)
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where the model runs")
    add("--topk", type=int, default=5, metavar="K", help="classes to show of each image, the most probable first")
    add(
        "--batch-size",
        "-b",
        type=positive_int,
        default=32,
        metavar="N",
        help="images that go through the model at once",
    )
    add("--val-crop-size", type=PIXELS, default=224, metavar="N", help="pixels")
    add(
        "--val-resize-size",
        type=PIXELS,
        default=256,
        metavar="N",
        help="pixels of the shorter side before the crop",
    )
    return parser


def build_predictor(args: argparse.Namespace):
    """The chosen package's Predictor; raises UserError when its framework is missing or a flag does not fit it."""
    check_val_sizes(args)
    try:
        module = import_module(MODULES[args.framework])
    except ImportError as error:
        raise UserError(
            f"--framework {args.framework} cannot be imported ({error}): pip install -e '.[{args.framework}]'"
        ) from error
    predictor = module.Predictor(
        args.model, args.weights, args.device, crop_size=args.val_crop_size, resize_size=args.val_resize_size
    )
    if not 1 <= args.topk <= predictor.num_classes:
        raise UserError(f"--topk {args.topk} is outside 1 to {predictor.num_classes}, the number of classes")
    return predictor


def find_images(folder: Path) -> list[Path]:
    """The images in `folder` and below, sorted; raises UserError when there are none or a folder cannot be read.

    Links to folders are followed after the folders themselves, and each folder is searched once, so that a link to
    one that it is in does not lead round for ever.
    """

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"folder {error.filename} {unusable(error)}") from error

    paths, seen, starts = [], set(), [folder]
    for start in starts:  # which grows
        for root, folders, names in os.walk(start, onerror=refuse):
            place = os.path.realpath(root)
            if place in seen:
                folders.clear()
                continue
            seen.add(place)
            starts += filter(Path.is_symlink, (Path(root, name) for name in sorted(folders)))
            paths += [Path(root, name) for name in names]
    paths.sort()
    images = [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        raise UserError(f"input folder {folder} holds no images ({', '.join(IMAGE_SUFFIXES)}): check the path")
    return images


def top_classes(probabilities: np.ndarray, k: int) -> list[tuple[int, float]]:
    """(class id, probability) of the `k` most probable classes; of equal ones the lower id comes first."""
    return [(int(i), float(probabilities[i])) for i in np.argsort(-probabilities, kind="stable")[:k]]


def predict_image(predictor, image: Image.Image, k: int) -> None:
    """Print the `k` best classes of `image`, one a line, and the best again in the short form."""
    best = top_classes(predictor([image])[0], k)
    for class_id, probability in best:
        name = predictor.class_names[class_id] if predictor.class_names else ""
        print(f"{class_id:>6}  {probability:.4f}  {name}".rstrip())
    print("class_id: {}, prob: {:.4f}".format(*best[0]))


def image_line(path: Path, best: Sequence[tuple[int, float]], names: Sequence[str] | None) -> str:
    """PATH: 281 tabby 0.9091, 282 tiger cat 0.0312"""
    return f"{printable(str(path))}: " + ", ".join(
        f"{i} {names[i]} {p:.4f}" if names else f"{i} {p:.4f}" for i, p in best
    )


def read_images(paths: Sequence[Path], found: list[Path], progress: tqdm) -> Iterator[Image.Image]:
    """Each image that can be read, one at a time; its path is added to `found`, and the others are named on stderr."""

    def say(text: str) -> None:
        progress.write(f"{PROG}: {printable(text)}", file=sys.stderr)

    for path in paths:
        try:
            image = read_image(path, say)
        except UserError as error:
            say(f"skipped: {error}")
        else:
            found.append(path)
            yield image


def predict_folder(predictor, paths: Sequence[Path], k: int, batch_size: int) -> int:
    """Print the `k` best classes of each image, one image a line, and top-1 of those that lie in folders named by wnid.

    Returns the number of images that cannot be read.
    """
    predicted = labelled = right = 0
    with tqdm(total=len(paths), unit="image", disable=None) as progress:  # None: only on a terminal
        for start in range(0, len(paths), batch_size):
            batch = paths[start : start + batch_size]
            found: list[Path] = []
            rows = predictor(read_images(batch, found, progress))
            for path, probabilities in zip(found, rows, strict=True):
                best = top_classes(probabilities, k)
                progress.write(image_line(path, best, predictor.class_names))
                label = IMAGENET_LABELS.get(path.absolute().parent.name) if predictor.class_names else None
                labelled += label is not None
                right += label == best[0][0]
            predicted += len(found)
            progress.update(len(batch))
    if labelled:
        print(f"top1: {right / labelled:.5f}, of {labelled} images in folders named by wnid")
    return len(paths) - predicted


def main(args: argparse.Namespace) -> int:
    sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text at all
    if not args.input.is_dir():
        image = read_image(existing_file(args.input, "input"), lambda text: print(f"{PROG}: {text}", file=sys.stderr))
        predict_image(build_predictor(args), image, args.topk)
        return 0
    paths = find_images(args.input)
    skipped = predict_folder(build_predictor(args), paths, args.topk, args.batch_size)
    print(f"predicted {len(paths) - skipped} of {len(paths)} images, skipped {skipped}")
    return 1 if skipped else 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
