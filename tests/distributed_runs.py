"""What test_distributed.py starts under a launcher: runs of a training command, right ones and faulty ones.

    LAUNCHER distributed_runs.py PACKAGE RUNS.json FOLDER

RUNS.json is a list of {"name": ..., "flags": [...], "fault": ...}. Of each run every process writes
FOLDER/NAME_RANK.npz: the model before and after its buffers were made equal at the end, and the last evaluation.
"""

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np

from reprod.recipe.arguments import get_args_parser


def summed(build_criterion: Callable) -> Callable:
    """Gradients added up over the processes instead of averaged: twice the loss on two processes does the same."""

    def build(label_smoothing: float) -> Callable:
        criterion = build_criterion(label_smoothing)
        return lambda output, target: 2 * criterion(output, target)

    return build


def same_share(build_loader: Callable) -> Callable:
    """Every process trains on the share of the first."""
    return lambda *args, train, rank, **kwargs: build_loader(*args, train=train, rank=0 if train else rank, **kwargs)


FAULTS = {"summed": ("build_criterion", summed), "same share": ("build_loader", same_share)}


def recorded_run(training: ModuleType, flags: list[str], fault: str | None = None) -> dict[str, np.ndarray]:
    """Run the main module `training` of a package in this process -> what becomes the .npz file."""
    record = {}
    package = training.__name__.partition(".")[0]
    to_arrays = importlib.import_module(f"{package}.models.weights").to_arrays

    def keep(prefix: str, model) -> None:
        record.update({f"{prefix}/{key}": array for key, array in to_arrays(model.state_dict()).items()})

    def broadcast_buffers(model) -> None:
        keep("before", model)
        original_broadcast(model)
        keep("after", model)

    def evaluate(*args) -> dict[str, float]:
        metrics = original_evaluate(*args)
        record.update({key: np.float64(value) for key, value in metrics.items()})
        return metrics

    original_broadcast, original_evaluate = training.broadcast_buffers, training.evaluate
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(training, "broadcast_buffers", broadcast_buffers))
        stack.enter_context(mock.patch.object(training, "evaluate", evaluate))
        if fault:
            name, faulty = FAULTS[fault]
            stack.enter_context(mock.patch.object(training, name, faulty(getattr(training, name))))
        training.main(get_args_parser("train", "either").parse_args(flags))
    return record


def main(package: str, runs: str, folder: str) -> None:
    training = importlib.import_module(f"{package}.train.main")
    training.init_distributed(training.select_device("cpu"))
    rank = training.launched_rank()[0]
    # One group of processes for all runs: no framework promises that a second one can be made.
    with mock.patch.object(training, "init_distributed"), mock.patch.object(training, "shut_down"):
        for run in json.loads(Path(runs).read_text(encoding="utf-8")):
            record = recorded_run(training, run["flags"], run.get("fault"))
            np.savez(Path(folder) / f"{run['name']}_{rank}.npz", **record)
    training.shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
