"""Rung 03: top-1 and top-5 over the whole validation set.

Proves: both sides' evaluation counts the same right answers, over a last batch that is not full, with labels at every
rank around the k of top-k, and with tied and NaN logits. Does not prove: that the numbers are those of a trained model
(probe weights know no classes; give --weights and --data-path for that).
Stands on: 01 (the logits), 02 (the images and labels).

  python steps/03_test_metric.py         ends in: PASS 03_test_metric: all ... items within their limits
"""

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
from tqdm import tqdm

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import LITE_DATA, Step, step_parser
from portproof.ladder import cases
from portproof.ladder.rung import run_rung
from portproof.ladder.rungs.metrics import evaluation, metric

NAME = "03_test_metric"
BATCH_SIZE = 5  # leaves a partial batch of the 16 images
TOPK = [1, 2, 5, 7]
RESULTS = {"samples": "samples", "top1": "metric", "top5": "metric", "loss": "loss"}  # and the kind of each


def evaluate_of(package: Package) -> Callable:
    evaluate, criterion = package.module("train.engine").evaluate, package.module("train.criterion").build_criterion()
    return lambda model, batches: evaluate(model, criterion, batches, package.device)


def loader_of(package: Package, data_path: str):
    data = package.module("data")
    return data.build_loader(data.build_dataset(data_path, train=False), BATCH_SIZE, train=False)


def correct_by_sorting(logits: np.ndarray, labels: np.ndarray) -> list[int]:
    """The definition, slowly: classes sorted by logit, equal ones by number; a NaN logit is never right."""
    ranks = []
    for row, label in zip(logits, labels, strict=True):
        order = sorted(range(len(row)), key=lambda c: (-row[c], c))
        ranks.append(len(row) if np.isnan(row[label]) else order.index(label))
    return [sum(rank < k for rank in ranks) for k in TOPK]


def get_args_parser() -> argparse.ArgumentParser:
    parser = step_parser(NAME, __doc__)
    parser.add_argument("--data-path", default=str(LITE_DATA), help="folder with val/, one folder a class")
    return parser


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    packages = step.ref, step.port
    models = [step.build(package, "float32") for package in packages]
    loaders = [loader_of(package, args.data_path) for package in packages]
    bar = partial(tqdm, desc="logits", unit="batch", leave=False, disable=None)
    evaluates = map(evaluate_of, packages)
    evaluation(*evaluates, *models, *loaders, results=RESULTS, device=args.device, progress=bar, rung=step)
    metric(
        *(partial(package.module("train.metric").correct_at, topk=TOPK) for package in packages),
        {"tie": cases.ties()},
        exact=correct_by_sorting,
        batch_sizes=[1],  # over all labels, a wrong order of ties would give the same count
        name=f"correct at {TOPK}, image by image",
        title="ties and NaN",
        device=args.device,
        rung=step,
    )
    return step.finish("metric")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
