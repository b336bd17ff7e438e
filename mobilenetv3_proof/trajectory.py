"""Whether a port's training runs are runs of the reference: a test of hypotheses on what the runs have in common.

Two float32 runs part within some twenty steps, whatever rounds differently, so step for step nothing can be compared.
But a run from the same initial weights on the same batches is one draw from a distribution, that of the dropout masks
and of rounding, and a faultless port draws from the same. The reference runs several times with masks of its own; the
port runs once for each seed. Each run is reduced to the numbers in FEATURES, and the port's must lie in the prediction
interval that the reference's runs give for one more run of their own:

    |mean over seeds of (port - mean of the reference's runs)| <= t * sqrt(s^2 (1 + 1/n) / seeds)

with n runs of the reference for each seed, s^2 the variance between runs of the same seed, pooled, and t the quantile
of Student's distribution with seeds * (n - 1) degrees of freedom at ALPHA / (2 * number of features) (Bonferroni). If
the features of the reference's runs are normal this fails a faultless port once in 1 / ALPHA runs, at most.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from mobilenetv3_proof.trajectory_worker import Recipe
from portproof.compare import Item, Verdict, compare
from portproof.ladder.workers import last_words, worker_environment

ALPHA = 1e-3
Record = Mapping[str, np.ndarray]  # see trajectory_worker.training_run


class Feature(NamedTuple):
    """A number that a run is reduced to; `resolution` is the step between the values that it can have."""

    value: Callable[[Record], float]
    resolution: Callable[[Record], float] = lambda record: 0.0


def _items(record: Record, prefix: str, keep: Callable[[np.ndarray], bool] = lambda array: True) -> dict:
    return {
        name.removeprefix(prefix): array.astype(np.float64)
        for name, array in record.items()
        if name.startswith(prefix) and keep(array)
    }


def _log_norm(arrays: Iterable[np.ndarray]) -> float:
    return 0.5 * math.log(sum(float((array**2).sum()) for array in arrays))


def _log_loss(third: int) -> Feature:
    return Feature(lambda record: float(np.log(np.array_split(record["losses"], 3)[third]).mean()))


def _kernels(record: Record) -> float:
    return _log_norm(_items(record, "parameters/", lambda array: array.ndim > 1).values())


def _scales(record: Record) -> float:
    return _log_norm(_items(record, "parameters/", lambda array: array.ndim == 1).values())


def _moved(record: Record) -> float:
    return _log_norm(_items(record, "moved/").values())


def _statistics(record: Record, leaf: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each batch norm (running, re-estimated) means or variances and the re-estimated variance, each (C,)."""
    running, again = _items(record, "running/"), _items(record, "reestimated/")
    return [
        (running[name], again[name], again[name.removesuffix(leaf) + "running_var"])
        for name in running
        if name.endswith(f".{leaf}")
    ]


def _mean_lag(record: Record) -> float:
    """log of the mean square distance of the means, in standard deviations of what they are the mean of."""
    lags = [np.mean((old - new) ** 2) / np.mean(var) for old, new, var in _statistics(record, "running_mean")]
    return math.log(np.mean(lags))


def _variance_lag(record: Record) -> float:
    """log of the ratio of the variances, averaged."""
    tiny = np.finfo(np.float32).tiny
    ratios = [
        np.log(np.maximum(old, tiny) / np.maximum(new, tiny)) for old, new, _ in _statistics(record, "running_var")
    ]
    return float(np.mean(np.concatenate(ratios)))


# Each is there because some mistake moves it and the chance of a run hardly does. Logarithms, since what is multiplied
# by chance is normal only as one.
FEATURES = {
    # How fast it learns, at first, in between and in the end: whatever is wrong in the gradients or the images.
    "loss, first third": _log_loss(0),
    "loss, second third": _log_loss(1),
    "loss, last third": _log_loss(2),
    # Weight decay acts on nothing else as directly: on kernels, whose gradients are orthogonal to them, and on batch
    # norm's weights and biases.
    "norm of kernels": Feature(_kernels),
    "norm of vectors": Feature(_scales),
    # The steps of the last epoch are as long as its learning rate.
    "length of the last epoch": Feature(_moved),
    # How far the running statistics lag behind those of the last weights: the momentum of batch norm.
    "lag of running means": Feature(_mean_lag),
    "lag of running variances": Feature(_variance_lag),
    # What it has learned, as evaluated with the running statistics, and without the lag.
    "evaluation loss": Feature(lambda record: math.log(record["eval"][0])),
    "evaluation loss, re-estimated": Feature(lambda record: math.log(record["reestimated_eval"][0])),
    # What flips teach: a network that never saw a mirrored image is lost on one.
    "mirrored to upright loss": Feature(
        lambda record: math.log(record["mirrored_eval"][0] / record["reestimated_eval"][0])
    ),
}


def _one_image(record: Record) -> float:
    return 1 / float(record["eval"][2])


TOP1 = {  # of runs that are long enough to have any
    "top-1": Feature(lambda record: float(record["eval"][1]), _one_image),
    "top-1, re-estimated": Feature(lambda record: float(record["reestimated_eval"][1]), _one_image),
}


def prediction_limit(ref: np.ndarray, resolution: float, alpha: float) -> float:
    """How far the mean of one more run a seed may be from the mean of `ref` (seeds, runs), with probability 1 - alpha.

    Values on a grid of `resolution` are rounded, which adds its square / 12 to their variance; without it runs that
    happen to agree would allow no difference at all.
    """
    seeds, runs = ref.shape
    freedom = seeds * (runs - 1)
    variance = ((ref - ref.mean(axis=1, keepdims=True)) ** 2).sum() / freedom + resolution**2 / 12
    return float(stats.t.isf(alpha / 2, freedom) * math.sqrt(variance * (1 + 1 / runs) / seeds))


def judge(
    ref: list[list[Record]], port: list[Record], features: Mapping[str, Feature], title: str, alpha: float = ALPHA
) -> Verdict:
    """The port's runs, one a seed, against the reference's, several of each seed, feature by feature."""
    expected, found, limits = {}, {}, {}
    for name, feature in features.items():
        item = Item(name, "trajectory", mode="train", dtype="float32")
        values = np.array([[feature.value(record) for record in records] for records in ref])
        expected[item] = values.mean()
        found[item] = np.mean([feature.value(record) for record in port])
        limits[item] = prediction_limit(values, feature.resolution(ref[0][0]), alpha / len(features))
    # A logarithm or a difference of 0 is a value as any other.
    return compare(expected, found, limits, title=title, zeros=set(expected))


@dataclass(frozen=True)
class RunFailed:
    """What a package's training runs ended in, in a line, and the last lines of their log."""

    reason: str
    log: str

    def __str__(self) -> str:
        return self.reason


def launch(
    folder: Path,
    data_path: Path,
    recipe: Recipe,
    runs: Mapping[str, Mapping[str, Mapping[str, int]]],
) -> dict[str, dict[str, Record] | RunFailed]:
    """{package: {name: record}} of `runs` {package: {name: {"seed": ..., "draw": ...}}}.

    A process with one thread for each package, side by side.
    """
    job = {"data_path": str(data_path.absolute()), "recipe": recipe.to_json(), "runs": runs}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    env = worker_environment()
    processes = {}
    with ExitStack() as stack:
        for package in runs:
            log = stack.enter_context((folder / f"{package}.log").open("wb"))
            command = [sys.executable, "-m", "mobilenetv3_proof.trajectory_worker", str(folder), package]
            # In `folder`, since Python looks for packages in the current one first.
            processes[package] = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(processes[package].wait)
            stack.callback(processes[package].kill)  # first: this is what happens to it when the other raises
        for process in processes.values():
            process.wait()
    return {
        package: _records(folder, package, runs[package], process.returncode) for package, process in processes.items()
    }


def _records(folder: Path, package: str, names: Iterable[str], status: int) -> dict[str, Record] | RunFailed:
    if status:
        words = last_words(folder / f"{package}.log")
        last = words.splitlines()[-1] if words else f"it ended with status {status}"
        return RunFailed(last, words)
    return {name: dict(np.load(folder / f"{package}.{name}.npz")) for name in names}
