"""Run an exported model in an engine, or compare all engines that are installed.

  python tools/infer.py --model exported --input cat.jpg dog.jpg              the five most probable classes of each
  python tools/infer.py --model exported --engine openvino --input cat.jpg
  python tools/infer.py --model exported --benchmark                          one table over all installed engines

The folder comes from tools/export_model.py. The table has, for each number of images: the largest difference of the
outputs from the model as trained in float64 (or, without its framework or weights, from the first engine), latency,
images a second, the ratio of that to ONNX Runtime with its 95 % interval over the rounds (of the first engine, without
ONNX Runtime), and the size of the engine's files. All engines run in turns. On a busy machine only the ratios mean
much.

An image gives one line: PATH: 281 tabby 0.9091, 282 tiger cat 0.0312.

Exit status: 0 done, 1 outputs of an engine differ by more than a thousandth and the model is not quantized, 2
something must be fixed first.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

from mobilenetv3_common.images import read_image
from mobilenetv3_common.predictions import Prediction, table_line, top_classes
from mobilenetv3_deploy.card import Card, read_card
from mobilenetv3_deploy.engines import ENGINES, Engine, float64_reference, lacks, load
from mobilenetv3_deploy.predict import Predictor
from mobilenetv3_deploy.speed import interleaved, ratio
from mobilenetv3_deploy.tables import print_table
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, run

PROG = "infer"
HEAD = ("engine", "images", "max|d|", "p50 ms", "p99 ms", "images/s", "ratio [95 %]", "MB")
# Of the largest output. Float32 rounding alone makes 1e-7 to 1e-5 of it; bfloat16 or a wrong graph more than this.
MOST_DIFFERENT = 1e-3


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", metavar="DIR", help="folder of an exported model", required=True, default=argparse.SUPPRESS)
    add("--engine", choices=("best", *ENGINES), default="best", help="best: the fastest that is installed")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--input", nargs="+", metavar="FILE", default=argparse.SUPPRESS, help="images")
    what.add_argument("--benchmark", action="store_true", help="compare all installed engines")
    add("--topk", type=positive_int, default=5, metavar="K", help="classes to show of each image")
    add("--threads", type=positive_int, default=1, help="of an engine")
    add("--batch-sizes", nargs="+", type=positive_int, default=[1, 32], metavar="N", help="images at once")
    add("--rounds", type=positive_int, default=15, help="how often every engine has its turn")
    return parser


def installed(card: Card, folder: str, threads: int) -> dict[str, Engine]:
    """Every engine that can run the model; the others are named on stderr. Raises UserError if there is none."""
    engines = {}
    for name in ENGINES:
        lacking = lacks(name, card)
        if lacking:
            print(f"{PROG}: left out: {lacking}", file=sys.stderr)
        else:
            engines[name] = load(folder, name, threads)
    if not engines:
        raise UserError("no engine is installed: pip install -e '.[deploy]'")
    return engines


def benchmark(folder: str, threads: int, batch_sizes: list[int], rounds: int) -> int:
    """Print the table -> the exit status."""
    card = read_card(folder)
    engines = installed(card, folder, threads)
    base = next(iter(engines))  # ONNX Runtime, where it is installed
    reference = engines[base].run if lacks(card.framework, card) else float64_reference(folder)
    shape = (3, card.preprocessing.crop, card.preprocessing.crop)
    sizes = {name: sum(Path(folder, file).stat().st_size for file in one.files) / 1e6 for name, one in engines.items()}
    rows, status = [], 0
    for n in batch_sizes:
        batch = np.random.default_rng(0).standard_normal((n, *shape), np.float32)
        expected = reference(batch)
        differences = {name: float(np.abs(one.run(batch) - expected).max()) for name, one in engines.items()}
        found = interleaved({name: partial(one.run, batch) for name, one in engines.items()}, rounds)
        for name, seconds in found.items():
            p50, p99 = np.quantile(seconds, (0.5, 0.99))
            times = "{:.3f} [{:.3f}, {:.3f}]".format(*ratio(seconds, found[base]))
            figures = (f"{differences[name]:.1e}", f"{p50 * 1e3:.2f}", f"{p99 * 1e3:.2f}", f"{n / p50:.1f}")
            rows.append((name, str(n), *figures, times, f"{sizes[name]:.1f}"))
        status |= card.quantized is None and not max(differences.values()) <= MOST_DIFFERENT * np.abs(expected).max()
    print_table(HEAD, rows)
    return status


def main(args: argparse.Namespace) -> int:
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read when a framework is imported
    if args.benchmark:
        return benchmark(args.model, args.threads, args.batch_sizes, args.rounds)
    predictor = Predictor(args.model, args.engine, args.threads)
    for path in args.input:
        (probabilities,) = predictor([read_image(path)])
        print(table_line(Prediction(path, top_classes(probabilities, args.topk, predictor.class_names))))
    return 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
