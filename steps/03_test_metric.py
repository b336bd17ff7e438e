"""Step 03: top-1 and top-5 over the whole validation set.

Proves: both sides' evaluation, of weights and images that each reads from files itself, counts the same right answers,
over a last batch that is not full, with labels at every rank around the k of top-k, and with tied and NaN logits. Does
not prove: that the numbers are those of a trained model (probe weights know no classes; give --weights and --data-path
for that: weights for ImageNet's 1000 classes take any part of it whose folders are named by wnid).
Stands on: 01 (the logits), 02 (the images and labels).

  python steps/03_test_metric.py         ends in: PASS 03_test_metric: all ... items within their limits
"""

import argparse
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from mobilenetv3_common.wnids import WNIDS
from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import ModelRung, step_parser
from portproof.ladder import cases, evaluation, metric, run_rung

NAME = "03_test_metric"
BATCH_SIZE = 5  # leaves a partial batch of the 16 images
TOPK = [1, 2, 5, 7]
RESULTS = {"samples": "samples", "top1": "metric", "top5": "metric", "loss": "loss"}  # and the kind of each


def evaluate(package: Package, model: Any, batches: Iterable) -> dict[str, float]:
    criterion = package.module("train.criterion").build_criterion()
    return package.module("train.engine").evaluate(model, criterion, batches, package.device)


def correct_at(package: Package, logits: Any, labels: Any) -> list[int]:
    return package.module("train.metric").correct_at(logits, labels, topk=TOPK)


def loader_of(package: Package, data_path: str, num_classes: int | None):
    data = package.module("data")
    dataset = data.build_dataset(data_path, train=False, num_classes=num_classes)
    return data.build_loader(dataset, BATCH_SIZE, train=False)


def correct_by_sorting(logits: np.ndarray, labels: np.ndarray) -> list[int]:
    """The definition, slowly: classes sorted by logit, equal ones by number; a NaN logit is never right."""
    ranks = []
    for row, label in zip(logits, labels, strict=True):
        order = sorted(range(len(row)), key=lambda c: (-row[c], c))
        ranks.append(len(row) if np.isnan(row[label]) else order.index(label))
    return [sum(rank < k for rank in ranks) for k in TOPK]


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__, folders="val/")


def main(args: argparse.Namespace) -> ModelRung:
    step = ModelRung(NAME, args)
    packages = step.ref, step.port
    models = [step.from_file(package) for package in packages]
    num_classes = None  # probe weights know no classes, and what they are tested on may have any
    if args.weights and step.num_classes == len(WNIDS):
        num_classes = step.num_classes
    loaders = [loader_of(package, args.data_path, num_classes) for package in packages]
    bar = partial(tqdm, desc="logits", unit="batch", leave=False, disable=None)
    ref, port = zip(step.both(evaluate), models, loaders, strict=True)
    evaluation(ref, port, results=RESULTS, progress=bar, device=args.device, rung=step)
    metric(
        *step.both(correct_at),
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
