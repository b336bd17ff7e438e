"""Whether a port's training runs are runs of the reference: a test of hypotheses on what the runs have in common.

Two float32 runs part within some twenty steps, whatever rounds differently, so they cannot be compared step for step.
But a run from the same initial weights on the same batches is one draw from a distribution: of the random masks (such
as dropout) and of rounding. A faultless port draws from the same. The reference runs several times for each seed, the
port once. Each run is reduced to the numbers in FEATURES, and the port's must lie in the prediction interval that the
reference's runs give for one more run:

    |mean over seeds of (port - mean of the reference's runs)| <= t * sqrt(s^2 (1 + 1/n) / seeds)

with n runs of the reference for each seed, s^2 the variance between runs of the same seed, pooled, and t the quantile
of Student's distribution with seeds * (n - 1) degrees of freedom at ALPHA / (2 * number of features) (Bonferroni). If
the features of the reference's runs are normal this fails a faultless port once in 1 / ALPHA runs, at most.

A run leaves a record, arrays by these keys, of which only the losses are needed:

    losses           each step's mean loss, above 0, (steps,); right: each step's share of right answers, (steps,)
    lr, top1         each epoch's learning rate, and top-1 in eval mode behind it, (epochs,)
    parameters/NAME  at the end; moved/NAME: what the last epoch has changed
    running/NAME     batch norm's statistics, NAME.running_mean and NAME.running_var, at the end; reestimated/NAME:
                     averaged over one more epoch's batches, with the final weights
    eval, reestimated_eval, mirrored_eval
                     (loss, top-1, samples) of the validation data: with running statistics, with re-estimated ones,
                     and with these and every image mirrored
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats

from portproof.compare import Item, Verdict, compare

ALPHA = 1e-3
KEYS = re.compile(r"losses|right|lr|top1|(parameters|moved|running|reestimated)/.+|(reestimated_|mirrored_)?eval")
Record = Mapping[str, np.ndarray]
Number = TypeVar("Number", float, np.ndarray)


class Feature(NamedTuple):
    """A number that a run is reduced to."""

    value: Callable[[Record], float]  # raises KeyError for a record that lacks what it takes
    resolution: Callable[[Record], float] = lambda record: 0.0  # the step between possible values


def _log(values: Number) -> Number:
    """-inf or NaN, which no comparison passes, where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


def _items(record: Record, prefix: str, dims: int | None = None) -> dict[str, np.ndarray]:
    """{NAME: array} of all PREFIX + NAME, or of vectors (`dims` 1) or kernels (2)."""
    found = {}
    for name, array in record.items():
        if name.startswith(prefix) and dims in (None, min(array.ndim, 2)):
            found[name.removeprefix(prefix)] = array.astype(np.float64)
    if not found:
        raise KeyError(f"{prefix}NAME")
    return found


def _log_norm(record: Record, prefix: str, dims: int | None = None) -> float:
    arrays = _items(record, prefix, dims).values()
    return 0.5 * _log(sum(float((array**2).sum()) for array in arrays))


def _log_loss(record: Record, third: int) -> float:
    return float(_log(np.array_split(record["losses"], 3)[third]).mean())


def _statistics(record: Record, leaf: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(running, re-estimated, re-estimated variance) of each batch norm, each (C,)."""
    running, again = _items(record, "running/"), _items(record, "reestimated/")
    names = [name for name in running if name.endswith(f".{leaf}")]
    if not names:
        raise KeyError(f"running/NAME.{leaf}")
    return [(running[name], again[name], again[name.removesuffix(leaf) + "running_var"]) for name in names]


def _mean_lag(record: Record) -> float:
    means = _statistics(record, "running_mean")
    return _log(float(np.mean([np.mean((old - new) ** 2) / np.mean(variance) for old, new, variance in means])))


def _variance_lag(record: Record) -> float:
    tiny, variances = np.finfo(np.float32).tiny, _statistics(record, "running_var")
    ratios = [np.log(np.maximum(old, tiny) / np.maximum(new, tiny)) for old, new, _ in variances]
    return float(np.mean(np.concatenate(ratios)))


def _top1(key: str) -> Feature:
    return Feature(lambda record: float(record[key][1]), lambda record: 1 / float(record["eval"][2]))


# Mistakes move them, chance hardly does. Logarithms: factors of chance are normal only as these.
FEATURES = {
    # Speed of learning: any fault in gradients or images.
    "loss, first third": Feature(lambda record: _log_loss(record, 0)),
    "loss, second third": Feature(lambda record: _log_loss(record, 1)),
    "loss, last third": Feature(lambda record: _log_loss(record, 2)),
    # Weight decay: on kernels, whose gradients are orthogonal to them, and on batch norm's weights and biases.
    "norm of kernels": Feature(lambda record: _log_norm(record, "parameters/", 2)),
    "norm of vectors": Feature(lambda record: _log_norm(record, "parameters/", 1)),
    # The steps of the last epoch are as long as its learning rate.
    "length of the last epoch": Feature(lambda record: _log_norm(record, "moved/")),
    # The momentum of batch norm: how far statistics lag behind the last weights'.
    "lag of running means": Feature(_mean_lag),
    "lag of running variances": Feature(_variance_lag),
    "evaluation loss": Feature(lambda record: _log(record["eval"][0])),
    "evaluation loss, re-estimated": Feature(lambda record: _log(record["reestimated_eval"][0])),
    # Flips: a network that never saw a mirrored image is lost on one.
    "mirrored to upright loss": Feature(
        lambda record: _log(record["mirrored_eval"][0]) - _log(record["reestimated_eval"][0])
    ),
}
# Of runs that are long enough to have any.
TOP1 = {"top-1": _top1("eval"), "top-1, re-estimated": _top1("reestimated_eval")}


def prediction_atol(ref: np.ndarray, resolution: float, alpha: float) -> float:
    """How far one more run a seed may be from `ref` (seeds, runs), on average, with probability 1 - alpha.

    Values on a grid of `resolution` are rounded, which adds its square / 12 to the variance; else runs that happen to
    agree would allow no difference at all.
    """
    seeds, runs = ref.shape
    freedom = seeds * (runs - 1)
    variance = ((ref - ref.mean(axis=1, keepdims=True)) ** 2).sum() / freedom + resolution**2 / 12
    return float(stats.t.isf(alpha / 2, freedom) * math.sqrt(variance * (1 + 1 / runs) / seeds))


def lacking(feature: Feature, records: Iterable[Record]) -> str:
    """A key that the feature takes and a record lacks, or ""."""
    try:
        for record in records:
            feature.value(record)
    except KeyError as error:
        return str(error.args[0])
    return ""


def judge(
    ref: Sequence[Sequence[Record]],
    port: Sequence[Record],
    features: Mapping[str, Feature],
    title: str,
    alpha: float = ALPHA,
) -> Verdict:
    """The port's runs, one a seed, against the reference's, several a seed, by each feature.

    Refused if one is not finite in the reference's runs. A feature that a port's record lacks fails.
    """
    expected = {}
    found = {}
    atol = {}
    for name, feature in features.items():
        item = Item(name, "trajectory", mode="train", dtype="float32")
        values = np.array([[feature.value(record) for record in records] for records in ref])
        if not np.isfinite(values).all():
            return Verdict(title, refusal=f"the reference's own runs have no finite value of: {name}")
        expected[item] = np.asarray(values.mean())
        atol[item] = prediction_atol(values, feature.resolution(ref[0][0]), alpha / len(features))
        if not lacking(feature, port):
            found[item] = np.asarray(np.mean([feature.value(record) for record in port]))
    # A logarithm or difference of 0 is a value as any other.
    return compare(expected, found, atol, title=title, expected_zero=set(expected))
