"""Say what images show: the most probable classes of one, of every one in a folder, or of ten thousand in a list.

  python tools/predict.py --weights mobilenet_v3_small.pdparams --input cat.jpg
  python tools/predict.py --framework torch --weights mobilenet_v3_small-047dcff4.pth --input lite_data/val
  python tools/predict.py --exported exported/port --engine onnxruntime --input 'photos/**/*.jpg' --format csv
  find photos -name '*.jpg' | python tools/predict.py --weights w.pdparams --input - --format jsonl > found.jsonl

Weights come from training, from tools/convert_weights.py or, to try things out, from tools/make_probe_weights.py; an
exported model, which no framework is needed for, from tools/export_model.py.

An image gives one line a class, then its best class as "class_id: 281, prob: 0.9091". Several images give one line
each: those of a folder, searched with all its subfolders for the files that ImageFolder takes for images, and the
matches of a pattern in sorted order. Images that cannot be read are named on stderr and skipped. If the model has
ImageNet's 1000 classes, their names are shown, and top-1 of the images in folders named by wnid, such as n02123045.
JSON lines and CSV have standard output to themselves: the counts at the end go to stderr.

Exit status: 0 every image was predicted, 1 some of several were skipped, 2 something must be fixed first.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TextIO

from PIL import Image
from tqdm import tqdm

from mobilenetv3_common.arguments import MODEL_NAMES, PIXELS, check_val_sizes, flag
from mobilenetv3_common.contact_sheet import ContactSheet
from mobilenetv3_common.image_paths import STDIN, find_inputs, read_list
from mobilenetv3_common.images import read_image
from mobilenetv3_common.predictions import CSV_HEADER, FORMATS, Prediction, top_classes
from mobilenetv3_common.wnids import IMAGENET_CLASSES, IMAGENET_LABELS
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, existing_file, positive_int, printable, run

PROG = "predict"
MODULES = {"paddle": "mobilenetv3_paddle.predict", "torch": "mobilenetv3_ref.predict"}
OF_A_FRAMEWORK = ("framework", "model", "device", "val_crop_size", "val_resize_size", "channels_last")  # not of exports


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    absent = {"default": argparse.SUPPRESS}
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--weights",
        metavar="FILE",
        help="this framework's weights (.pdparams, or .pth and .pt), .safetensors with its names, or a checkpoint",
    )
    source.add_argument("--exported", metavar="DIR", help="an exported model, which has its own preprocessing")
    add = parser.add_argument
    add("--engine", metavar="NAME", help="what runs the exported model; best: the fastest that is installed")
    add("--framework", choices=tuple(MODULES), default="paddle", help="which package predicts; only this is imported")
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    add(
        "--input",
        metavar="PATH",
        nargs="+",
        required=True,
        help="images, folders of images, quoted patterns such as 'photos/**/*.jpg', or - for a list of images on "
        "standard input, one a line",
        **absent,
    )
    add("--format", choices=tuple(FORMATS), default="table", help="of what is printed; jsonl: a JSON object a line")
    add("--visualize", metavar="PNG", type=Path, help="also draw the images, the first 100, with their classes")
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
    add("--channels-last", action="store_true", help="as in training, with --framework torch only")
    return parser


def build_predictor(args: argparse.Namespace):
    """The Predictor that the flags choose; raises UserError when its package is missing or a flag does not fit it."""
    predictor = exported_predictor(args) if args.exported else framework_predictor(args)
    if not 1 <= args.topk <= predictor.num_classes:
        raise UserError(f"--topk {args.topk} is outside 1 to {predictor.num_classes}, the number of classes")
    return predictor


def exported_predictor(args: argparse.Namespace):
    """An exported model's, in its engine."""
    default = get_args_parser().get_default
    for name in OF_A_FRAMEWORK:
        if getattr(args, name) != default(name):
            raise UserError(f"{flag(name)} is of --weights: the model in --exported {args.exported} has its own")
    from mobilenetv3_deploy.predict import Predictor

    return Predictor(args.exported, args.engine or "best")


def framework_predictor(args: argparse.Namespace):
    """The chosen framework's package's."""
    if args.engine:
        raise UserError(f"--engine {args.engine} runs exported models: name one with --exported in place of --weights")
    check_val_sizes(args)
    try:
        module = import_module(MODULES[args.framework])
    except ImportError as error:
        raise UserError(
            f"--framework {args.framework} cannot be imported ({error}): pip install -e '.[{args.framework}]'"
        ) from error
    sizes = {"crop_size": args.val_crop_size, "resize_size": args.val_resize_size}
    return module.Predictor(args.model, args.weights, args.device, **sizes, channels_last=args.channels_last)


def check_writable(path: Path) -> None:
    """Raise UserError now rather than after the last image if `path` cannot be written."""
    if path.suffix.lower() != ".png":
        raise UserError(f"--visualize {path} is drawn as PNG: end its name in .png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"--visualize {path} cannot be written ({error.strerror}): choose another folder") from error


def print_image(prediction: Prediction) -> None:
    """One line a class, and the best again in the short form."""
    for score in prediction.top:
        print(f"{score.class_id:>6}  {score.probability:.4f}  {score.name}".rstrip())
    best = prediction.top[0]
    print(f"class_id: {best.class_id}, prob: {best.probability:.4f}")


@dataclass
class Counts:
    """Of several images."""

    predicted: int = 0
    skipped: int = 0
    labelled: int = 0  # by a wnid
    right: int = 0  # of these

    def add(self, prediction: Prediction, imagenet: bool) -> None:
        """Count `prediction`; a label is known of ImageNet's classes alone."""
        self.predicted += 1
        label = IMAGENET_LABELS.get(Path(prediction.path).absolute().parent.name) if imagenet else None
        self.labelled += label is not None
        self.right += label == prediction.top[0].class_id

    def show(self, file: TextIO) -> None:
        """Two lines, the first only where images are labelled."""
        if self.labelled:
            top1 = self.right / self.labelled
            print(f"top1: {top1:.5f}, of {self.labelled} images in folders named by wnid", file=file)
        images = self.predicted + self.skipped
        print(f"predicted {self.predicted} of {images} images, skipped {self.skipped}", file=file)


def batches(paths: Iterator[Path], size: int) -> Iterator[list[Path]]:
    """Lists of `size` of `paths`, the last one shorter."""
    while batch := list(islice(paths, size)):
        yield batch


def read_images(paths: Iterable[Path], found: list[Path], sheet: ContactSheet, progress: tqdm) -> Iterator[Image.Image]:
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
            sheet.add_image(image)
            yield image


def predict_images(predictor, args: argparse.Namespace, inputs: Sequence[Path | str], sheet: ContactSheet) -> Counts:
    """Print what is said of each image that `inputs` name; no two images are held together, but a batch is."""
    counts, form = Counts(), FORMATS[args.format]
    imagenet = predictor.class_names == IMAGENET_CLASSES
    total = None if STDIN in inputs else len(inputs)
    with tqdm(total=total, unit="image", disable=None) as progress:  # None: only on a terminal
        for paths in batches(read_list(inputs, sys.stdin), args.batch_size):
            found: list[Path] = []
            rows = predictor(read_images(paths, found, sheet, progress))
            for path, probabilities in zip(found, rows, strict=True):
                prediction = Prediction(str(path), top_classes(probabilities, args.topk, predictor.class_names))
                progress.write(form(prediction))
                sheet.add_prediction(prediction)
                counts.add(prediction, imagenet)
            counts.skipped += len(paths) - len(found)
            progress.update(len(paths))
    return counts


def predict_several(predictor, args: argparse.Namespace, inputs: Sequence[Path | str], sheet: ContactSheet) -> int:
    """`predict_images`, and its counts in words; returns how many images were skipped."""
    counts = predict_images(predictor, args, inputs, sheet)
    if not counts.predicted + counts.skipped:
        raise UserError("standard input names no images: write one path a line")
    counts.show(sys.stdout if args.format == "table" else sys.stderr)
    return counts.skipped


def predict_one(predictor, args: argparse.Namespace, image: Image.Image, sheet: ContactSheet) -> int:
    """Print what is said of the only image; as a table it has a line a class. Returns 0: it was not skipped."""
    prediction = Prediction(args.input[0], top_classes(predictor([image])[0], args.topk, predictor.class_names))
    sheet.add_image(image)
    sheet.add_prediction(prediction)
    if args.format == "table":
        print_image(prediction)
    else:
        print(FORMATS[args.format](prediction))
    return 0


def main(args: argparse.Namespace) -> int:
    sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text at all
    inputs = find_inputs(args.input)
    if STDIN in inputs:
        if sys.stdin is None:
            raise UserError("--input -: standard input is closed")
        sys.stdin.reconfigure(errors="surrogateescape")
    if args.visualize:
        check_writable(args.visualize)
    image = None
    if inputs == [Path(args.input[0])]:  # one image, by its name: a mistake in it is told before the model is loaded
        image = read_image(existing_file(inputs[0], "input"), lambda text: print(f"{PROG}: {text}", file=sys.stderr))
    predictor = build_predictor(args)
    sheet = ContactSheet(most=100 if args.visualize else 0)
    if args.format == "csv":
        print(CSV_HEADER)
    skipped = predict_one(predictor, args, image, sheet) if image else predict_several(predictor, args, inputs, sheet)
    if args.visualize:
        sheet.save(args.visualize)
    return 1 if skipped else 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
