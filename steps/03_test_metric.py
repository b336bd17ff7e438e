"""Rung 03: top-1 and top-5 over the whole validation set.

Proves: both sides' evaluation counts the same right answers, over a last batch that is not full, with labels at every
rank around the k of top-k, and with tied and NaN logits. Does not prove: that the numbers are those of a trained model
(probe weights know no classes; give --weights and --data-path for that).
Stands on: 01 (the logits), 02 (the images and labels).

  python steps/03_test_metric.py         ends in: PASS 03_test_metric: all ... items within their limits
"""

import argparse
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from mobilenetv3_proof.package import Package
from mobilenetv3_proof.step import LITE_DATA, Step, step_parser
from portproof.compare import Item, compare
from portproof.compare.tolerances import C, U, kernel_limits
from portproof.ladder.rung import run_rung

NAME = "03_test_metric"
BATCH_SIZE = 5  # leaves a partial batch of the 16 images
RANKS = 8  # labels are put at ranks 0 to 7, so that an off-by-one in k changes a count
TOPK = [1, 2, 5, 7]


def logits_of(package: Package, model, loader) -> tuple[np.ndarray, np.ndarray]:
    """(logits (N, C), labels (N,)) of the validation set, through one side's own loader."""
    model.eval()
    logits, labels, backend = [], [], package.backend
    for image, label in tqdm(loader, "logits", unit="batch", leave=False, disable=None):
        logits.append(backend.to_array(model(backend.to_tensor(image.numpy(), model))))
        labels.append(label.numpy())
    return np.concatenate(logits), np.concatenate(labels)


def ranked_labels(logits: np.ndarray, margin: float) -> np.ndarray | None:
    """A label for each image: at rank 0, 1, ... 7, 0, ... of its logits, or the next `margin` off its neighbours.

    None if an image has no such rank.
    """
    order = np.argsort(-logits, axis=1, kind="stable")[:, : RANKS + 1]
    labels = []
    for i, (row, classes) in enumerate(zip(logits, order, strict=True)):
        gaps = -np.diff(row[classes], prepend=np.inf)
        clear = [r % RANKS for r in range(i, i + RANKS) if min(gaps[r % RANKS], gaps[r % RANKS + 1]) > margin]
        if not clear:
            return None
        labels.append(classes[clear[0]])
    return np.array(labels)


def relabelled(package: Package, model, loader, labels: np.ndarray) -> Iterator[tuple]:
    """The loader's batches with other labels."""
    start = 0
    for image, target in loader:
        yield image, package.backend.to_tensor(labels[start : start + len(target)], model)
        start += len(target)


METRICS = {"samples": "samples", "top1": "metric", "top5": "metric", "loss": "loss"}  # and the kind of each


def evaluation(package: Package, model, loader, labels: np.ndarray) -> dict[Item, np.ndarray]:
    """What one side's `evaluate` says of its own batches under `labels`."""
    criterion = package.module("train.criterion").build_criterion()
    model.train()  # as training leaves it: to evaluate in eval mode is `evaluate`'s own business
    batches = relabelled(package, model, loader, labels)
    metrics = package.module("train.engine").evaluate(model, criterion, batches, package.device)
    return {Item(key, kind): np.array(float(metrics[key])) for key, kind in METRICS.items()}


def tie_cases() -> tuple[np.ndarray, np.ndarray]:
    """Logits with ties at the edge of k, equal everywhere, NaN, infinite, so large that a sigmoid ties them; labels."""
    rows = [
        [3, 1, 3, 0, 2, 2, 2, 1],
        [0] * 8,
        [1, 2, 2, 2, 2, 2, 9, 9],
        [np.nan] * 8,
        [np.inf, 5, 4, 3, 2, 1, 0, -np.inf],
        list(range(100, 108)),
    ]
    logits = np.repeat(np.array(rows, np.float32), 8, axis=0)
    return logits, np.tile(np.arange(8), len(rows))


def correct_by_sorting(row: np.ndarray, label: int) -> list[bool]:
    """The definition, slowly: classes sorted by logit, equal ones by number; a NaN logit is never right."""
    order = sorted(range(len(row)), key=lambda c: (-row[c], c))
    rank = len(row) if np.isnan(row[label]) else order.index(label)
    return [rank < k for k in TOPK]


def check_ties(step: Step, ref_model, port_model) -> None:
    """One image at a time: over all labels, a wrong order of ties would give the same count."""
    logits, labels = tie_cases()
    item = Item(f"correct at {TOPK}, image by image", "metric", section="tie")
    exact = {item: np.array([correct_by_sorting(*case) for case in zip(logits, labels, strict=True)], int)}
    for package, model in ((step.ref, ref_model), (step.port, port_model)):
        x, y = (package.backend.to_tensor(array, model) for array in (logits, labels))
        correct_at = package.module("train.metric").correct_at
        counted = [correct_at(x[i : i + 1], y[i : i + 1], TOPK) for i in range(len(labels))]
        verdict = compare(exact, {item: np.array(counted, int)}, {item: 0.0}, title=f"ties and NaN, {package.role}")
        step.check(verdict, group=str)


def check_evaluation(
    step: Step, sides: tuple, truth: np.ndarray, ref_labels: np.ndarray, limit: float
) -> tuple[dict, dict]:
    """Both sides' `evaluate`, under labels that test every rank and under the folder's own."""
    ranked = ranked_labels(truth, 2 * limit)
    if ranked is None:
        step.refuse("an image's best logits are all within rounding of each other: choose another --seed")
        return {}, {}
    # Cross entropy moves at most twice as far as the logits do, in the largest one; plus its own rounding.
    loss_limit = 2 * limit + C * U * float(np.abs(truth).max())
    limits = {Item(key, kind): loss_limit if key == "loss" else 0.0 for key, kind in METRICS.items()}
    files = {}, {}
    for prefix, word, labels in (("ranked/", "ranked labels", ranked), ("", "the folder's labels", ref_labels)):
        ref, port = (evaluation(*side, labels) for side in sides)
        step.check(compare(ref, port, limits, title=f"evaluation, {word}"), group=str)
        top1, top5, samples = (ref[Item(key, METRICS[key])] for key in ("top1", "top5", "samples"))
        step.say(f"  top1 {top1:.4f}, top5 {top5:.4f} of {samples:.0f} images")
        for kept, found in zip(files, (ref, port), strict=True):
            kept.update({prefix + item.name: value for item, value in found.items()})
    return files


def get_args_parser() -> argparse.ArgumentParser:
    parser = step_parser(NAME, __doc__)
    parser.add_argument("--data-path", default=str(LITE_DATA), help="folder with val/, one folder a class")
    return parser


def main(args: argparse.Namespace) -> Step:
    step = Step(NAME, args)
    ref_model, port_model = (step.build(package, "float32") for package in (step.ref, step.port))
    ref_loader, port_loader = (
        data.build_loader(data.build_dataset(args.data_path, train=False), BATCH_SIZE, train=False)
        for data in (step.ref.module("data"), step.port.module("data"))
    )
    truth, _ = logits_of(step.ref, step.build(step.ref, "float64"), ref_loader)
    ref, ref_labels = logits_of(step.ref, ref_model, ref_loader)
    port, port_labels = logits_of(step.port, port_model, port_loader)
    step.check_signal({"logits": truth})

    logits, labels = Item("logits", "output"), Item("labels", "label")
    limits = kernel_limits({logits: truth}, {logits: ref}) | {labels: 0.0}
    ref_files, port_files = {logits: ref, labels: ref_labels}, {logits: port, labels: port_labels}
    if step.check(compare(ref_files, port_files, limits, title="the whole validation set, float32"), group=str):
        sides = (step.ref, ref_model, ref_loader), (step.port, port_model, port_loader)
        ref_counts, port_counts = check_evaluation(step, sides, truth, ref_labels, limits[logits])
        ref_files.update(ref_counts)
        port_files.update(port_counts)
        check_ties(step, ref_model, port_model)
    return step.finish("metric", ref_files, port_files)


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
