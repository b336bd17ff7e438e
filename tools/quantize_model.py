"""Quantize an exported model to 8-bit integers, and show what each layer costs.

  python tools/quantize_model.py --model exported --images imagenet/train --output exported_int8
  python tools/quantize_model.py --model exported --images imagenet/train --output mixed --keep-float classifier.3

--images is a folder of images as the network will see them, for the ranges of the activations; a hundred of them, drawn
by --seed, are enough. Nothing is trained. The folder that is written is an exported model like the other: predict,
infer and serve take it. It is made for OpenVINO; ONNX Runtime gives the same answers, but is slower than in float32.

A row for each layer: the error of its weights, and that of the output if this layer alone is quantized; each with one
scale per output channel, which is what is written, and with one per tensor. Errors are root mean squares, in percent
of the exact values' own. The layers that cost most come last. What --keep-float names, a layer or all in a module,
stays in float32. With --val, a folder of one folder a class, the last line is the top-1 of both models.

Exit status: 0 written, 1 an engine does not compute what was quantized, 2 something must be fixed first.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mobilenetv3_common.image_paths import find_images
from mobilenetv3_common.images import read_image
from mobilenetv3_common.wnids import class_folders
from mobilenetv3_deploy.card import new_folder, read_card, write_card
from mobilenetv3_deploy.engines import ONNX, lacks, load
from mobilenetv3_deploy.predict import Predictor
from mobilenetv3_deploy.preprocessing import Preprocessing, preprocess
from mobilenetv3_deploy.tables import print_table
from sturdyio.cli import ArgumentParser, Failed, HelpFormatter, UserError, existing_dir, positive_int, run, whole_number

PROG = "quantize_model"
ENGINES = ("onnxruntime", "openvino")  # that run what is written
BATCH = 32
WORST = 3  # layers to name
HEAD = ("layer", "weights, per channel", "per tensor", "output, per channel", "per tensor", "written in")
# Times the error of the graph. An engine that joins operators rounds at other places: each of the two is as far from
# the exact output as roundings of these sizes make it, and that varies. Saturated sums were 9 times as far.
MOST_OF_ENGINE = 2.0


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    required = {"required": True, "default": argparse.SUPPRESS}
    add = parser.add_argument
    add("--model", metavar="DIR", help="folder of an exported model", **required)
    add("--images", metavar="DIR", help="folder of images to calibrate on", **required)
    add("--output", metavar="DIR", type=Path, help="folder to write, which must not be there yet", **required)
    add("--keep-float", nargs="+", metavar="LAYER", default=[], help="layers and modules that are not quantized")
    add("--count", type=positive_int, default=100, metavar="N", help="images to calibrate on, at most")
    add("--seed", type=whole_number(0, 2**32 - 1), default=0, metavar="N", help="of the draw of these images")
    add("--val", metavar="DIR", help="folder of one folder a class, to measure top-1 on")
    return parser


def drawn(folder: str, count: int, seed: int) -> list[Path]:
    """At most `count` of the images in `folder`."""
    paths = find_images(existing_dir(folder, "image folder"))
    return [paths[i] for i in np.random.default_rng(seed).permutation(len(paths))[:count]]


def read_batch(paths: Sequence[Path], preprocessing: Preprocessing) -> np.ndarray:
    """(N, 3, crop, crop), float32."""
    return np.stack([preprocess(read_image(path), preprocessing) for path in paths])


def batches(paths: Sequence[Path], preprocessing: Preprocessing) -> Iterator[np.ndarray]:
    """One image each: what an image needs is then what calibrating needs, and the ranges are the same."""
    for path in tqdm(paths, "calibrating", unit="image", disable=None, leave=False):
        yield read_batch([path], preprocessing)


def labelled_images(folder: str, num_classes: int) -> list[tuple[Path, int]]:
    """Every image in the class folders of `folder`, with its label."""
    names, labels = class_folders(existing_dir(folder, "validation folder"), num_classes)
    return [(path, labels[name]) for name in names for path in find_images(Path(folder, name))]


def top1(model: Path | str, engine: str, images: Sequence[tuple[Path, int]]) -> float:
    """The share of right answers, in percent."""
    predictor, right = Predictor(model, engine), 0
    for start in tqdm(range(0, len(images), BATCH), f"top-1 of {model}", unit="batch", disable=None, leave=False):
        paths, labels = zip(*images[start : start + BATCH], strict=True)
        right += int((predictor(map(read_image, paths)).argmax(1) == np.array(labels)).sum())
    return 100 * right / len(images)


def show_layers(errors: Iterable[Any], kept: Sequence[str]) -> None:
    """A row for each `LayerError`, the worst last, and the flag that would keep these in float32."""
    ordered = sorted(errors, key=lambda error: error.output[0])
    rows = []
    for error in ordered:
        figures = (f"{100 * value:.2f}" for value in (*error.weights, *error.output))
        rows.append((error.layer, *figures, "float32" if error.layer in kept else "int8"))
    print_table(HEAD, rows)
    worst = [error.layer for error in reversed(ordered) if error.layer not in kept][:WORST]
    print(f"these cost most: --keep-float {' '.join([*kept, *worst])} would leave them in float32")


def check_engines(folder: Path, batch: np.ndarray, exact: np.ndarray, error: float) -> None:
    """Run what was written in its engines; raises Failed for one that is further off than the graph's `error` lets."""
    from mobilenetv3_deploy.quantization import relative_error

    card = read_card(folder)
    for name in ENGINES:
        if lacks(name, card):
            continue
        found = relative_error(load(folder, name).run(batch), exact)
        if not found <= MOST_OF_ENGINE * error:
            raise Failed(
                f"{name}: {100 * found:.2f} % off the model in float32, of which quantizing explains "
                f"{100 * error:.2f} %: the engine computes something else than was written"
            )
        print(f"{name}: {100 * found:.2f} %")


def main(args: argparse.Namespace) -> None:
    for package in ("onnx", "onnxruntime", "onnxslim"):
        if find_spec(package) is None:
            raise UserError(f"quantizing needs {package}, which is not installed: pip install -e '.[deploy]'")
    from mobilenetv3_deploy.quantization import Quantizer, outputs, relative_error

    card = read_card(args.model)
    if card.quantized is not None:
        raise UserError(f"model {args.model} is quantized already: give the one that it was made of")
    images = labelled_images(args.val, card.num_classes) if args.val else []
    paths = drawn(args.images, args.count, args.seed)
    with new_folder(args.output) as folder:
        print(f"calibrating on {len(paths)} images of {args.images}, drawn with seed {args.seed}")
        quantizer = Quantizer(Path(args.model, ONNX), card.layers, batches(paths, card.preprocessing))
        kept = quantizer.matching(args.keep_float)
        chosen = [layer for layer in quantizer.layers if layer not in kept]
        if not chosen:
            raise UserError("--keep-float names every layer, and nothing is left to quantize: name fewer")
        batch = read_batch(paths[:BATCH], card.preprocessing)
        exact = outputs(quantizer.graph, batch)
        if not np.isfinite(exact).all():
            raise UserError(f"model {args.model} gives NaN or Inf: export it from before training diverged")
        every = tqdm(quantizer.errors(batch), "layers", len(quantizer.layers), unit="layer", disable=None, leave=False)
        show_layers(every, kept)

        graph = quantizer.quantized(chosen)
        (folder / ONNX).write_bytes(graph.SerializeToString())
        settings = {"images": len(paths), "seed": args.seed, "float32": kept}
        write_card(folder, replace(card, layers={}, quantized=settings))
        quantized = outputs(graph, batch)
        error, agree = relative_error(quantized, exact), int((quantized.argmax(1) == exact.argmax(1)).sum())
        print(f"all {len(chosen)} layers: {100 * error:.2f} % off, the same class for {agree} of {len(batch)} images")
        check_engines(folder, batch, exact, error)
    sizes = [Path(model, ONNX).stat().st_size / 1e6 for model in (args.model, args.output)]
    print(f"wrote {args.output}: {ONNX} {sizes[1]:.1f} MB, {sizes[1] / sizes[0]:.2f} of {sizes[0]:.1f} MB")
    if images:
        before, after = (top1(model, "onnxruntime", images) for model in (args.model, args.output))
        print(f"top-1 on {len(images)} images: {after:.2f} %, float32 {before:.2f} %")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
