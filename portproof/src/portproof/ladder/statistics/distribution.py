"""Whether values are independent draws from the distribution that they should come from, or the constant.

Each item but one is a statistic whose law for such draws is known exactly, not only for large samples. A right sample
exceeds its limit with probability P at most:

    std           of a normal distribution, root mean square: n rms^2 / std^2 is chi-squared with n degrees of freedom
    mean          of a normal distribution: normal with deviation std / sqrt(n)
    quantiles     the exact distribution at the sorted values, against (i + 1/2) / n: the Kolmogorov-Smirnov test, with
                  P(D > d) <= 2 exp(-2 n d^2) for every n (Massart 1990)
    largest       of a normal distribution: P(max|x| <= t) is (2 Phi(t / std) - 1)^n, at the largest value uniform over
                  (0, 1), and given as the normal deviate of that: -13 for 1000 values that are uniform or cut off at
                  two deviations. Of a uniform one: P(max|x| <= t) is (t / bound)^n
    correlation   r of m disjoint pairs: r^2 is Beta(1/2, (m - 1) / 2). The pairs are neighbours along one axis: values
                  that repeat along it give 1. Axis 0 of a sample is the seed
    others        the same for the first values of two tensors: generators seeded alike give 1
    distinct      the share of different values, which one repeat of each would halve. Among right draws some fall on
                  one float32 by chance: 0.02 of the 2.6 million of the largest tensor

Correlations are those of normal deviates; uniform values become the normal deviates that are as rare.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from portproof.compare.ruler import constant_atol

# Two sides of 142 tensors make about 3000 items: a faultless port fails once in 30 000 runs. A passing seed stays so.
P = 1e-8
DEVIATIONS = -special.ndtri(P / 2)  # what |N(0, 1)| exceeds with probability P
DISTINCT = 0.25
MANY = 1000  # values whose mean is normal as far out as P: simulated, at 5 deviations and less
FEWEST_PAIRS = 3  # of fewer every correlation may be 1
FEWEST_VALUES = 64  # of a tensor that is compared with others


class Statistic(NamedTuple):
    """What a sample shows, what is right, and how far a right sample's may be off."""

    found: ArrayLike
    expected: ArrayLike
    atol: float


Statistics = dict[str, Statistic]  # by item


def correlation_atol(pairs: int, p: float) -> float:
    """What |r| of this many independent pairs exceeds with probability `p`."""
    return math.sqrt(special.betainccinv(0.5, (pairs - 1) / 2, p))


def _correlations(deviates: np.ndarray) -> Statistics:
    found = {}
    for axis, length in enumerate(deviates.shape):
        pairs = length // 2 * (deviates.size // length)
        if pairs >= FEWEST_PAIRS:
            along = np.moveaxis(deviates, axis, 0)[: length // 2 * 2]
            a, b = along[::2], along[1::2]
            with np.errstate(invalid="ignore"):
                correlation = float(np.vdot(a, b) / np.sqrt(np.vdot(a, a) * np.vdot(b, b)))
            name = f"correlation, axis {axis - 1}" if axis else "correlation, seeds"
            found[name] = Statistic(correlation, 0.0, correlation_atol(pairs, P))
    return found


class Law(ABC):
    """What the values of a tensor should be; a sample is (seeds, *shape)."""

    @abstractmethod
    def statistics(self, sample: np.ndarray) -> Statistics:
        """What `sample` shows, and what one of its shape and dtype should show."""

    def deviates(self, sample: np.ndarray) -> np.ndarray:
        """Float64 values that are normal around 0 if the sample is right."""
        return sample.astype(np.float64)


@dataclass(frozen=True)
class Constant(Law):
    """Every value is `value`, a number or an array of the tensor's shape, within `atol`."""

    value: float | np.ndarray
    atol: float = 0.0

    def statistics(self, sample: np.ndarray) -> Statistics:
        name = f"all {self.value:g}" if np.ndim(self.value) == 0 else "constant"
        expected = np.resize(self.value, sample.shape).astype(sample.dtype)
        return {name: Statistic(sample, expected, self.atol)}


def _independence(ordered: np.ndarray, deviates: np.ndarray) -> Statistics:
    distinct = (1 + np.count_nonzero(np.diff(ordered))) / ordered.size
    return {"distinct": Statistic(distinct, 1.0, DISTINCT)} | _correlations(deviates)


def _quantiles(probabilities: np.ndarray) -> Statistic:
    n = probabilities.size
    return Statistic(probabilities, (np.arange(n) + 0.5) / n, math.sqrt(math.log(2 / P) / (2 * n)) - 0.5 / n)


@dataclass(frozen=True)
class Normal(Law):
    """N(0, std), not cut off."""

    std: float

    def statistics(self, sample: np.ndarray) -> Statistics:
        ordered = np.sort(sample.astype(np.float64), axis=None)
        n = ordered.size
        lowest = self.std * math.sqrt(2 * special.gammaincinv(n / 2, P / 2) / n)
        highest = self.std * math.sqrt(2 * special.gammainccinv(n / 2, P / 2) / n)
        std_atol = max(self.std - lowest, highest - self.std)
        magnitude = max(-ordered[0], ordered[-1]) / self.std  # in deviations
        log_rarity = n * np.log1p(-special.erfc(magnitude / math.sqrt(2)))
        own = {
            "std": Statistic(np.sqrt(np.mean(ordered**2)), self.std, std_atol),
            "mean": Statistic(ordered.mean(), 0.0, DEVIATIONS * self.std / math.sqrt(n)),
            "quantiles": _quantiles(special.ndtr(ordered / self.std)),
            "largest": Statistic(float(special.ndtri_exp(log_rarity)), 0.0, DEVIATIONS),
        }
        return own | _independence(ordered, self.deviates(sample))


@dataclass(frozen=True)
class Uniform(Law):
    """Uniform over (-bound, bound)."""

    bound: float

    def _probabilities(self, values: np.ndarray) -> np.ndarray:
        return np.clip((values / self.bound + 1) / 2, 0, 1)

    def deviates(self, sample: np.ndarray) -> np.ndarray:
        probabilities = self._probabilities(sample.astype(np.float64))
        return special.ndtri(np.clip(probabilities, 2**-25, 1 - 2**-25))  # float32 draws give 0

    def statistics(self, sample: np.ndarray) -> Statistics:
        ordered = np.sort(sample.astype(np.float64), axis=None)
        atol = -self.bound * math.expm1(math.log(P) / ordered.size)
        largest = Statistic(max(-ordered[0], ordered[-1]), self.bound, atol)
        own = {"quantiles": _quantiles(self._probabilities(ordered)), "largest": largest}
        return own | _independence(ordered, self.deviates(sample))


@dataclass(frozen=True)
class Like(Law):
    """Independent values of the distribution that `sample` (seeds, *shape) was drawn from, whatever it is.

    The statistics compare two samples of n values each:

        std, mean   the ratio of the stds, and the difference of the means in parts of the std
        magnitude   the mean of |x - mean| / std, which tells uniform from normal (Geary 1935)
        quantiles   the largest distance between their distributions: the two-sample Kolmogorov-Smirnov test, with
                    P(D > d) <= e exp(-n d^2) for samples of equal size (Wei and Dudley 2012, theorem 1)

    All but the last are normal for MANY values and more, with deviations by their influence functions over the sample.
    Of fewer values, which are a constant's, only the quantiles are compared.
    """

    sample: np.ndarray

    def deviates(self, sample: np.ndarray) -> np.ndarray:
        ordered = np.sort(self.sample, axis=None)
        below, up_to = (np.searchsorted(ordered, sample, side) for side in ("left", "right"))
        return special.ndtri((below + up_to + 1) / (2 * ordered.size + 2))

    def statistics(self, sample: np.ndarray) -> Statistics:
        n = self.sample.size
        distance = stats.ks_2samp(sample.ravel(), self.sample.ravel(), method="asymp").statistic
        items = {}
        if n >= MANY:
            own, own_std, own_magnitude = _moments(self.sample)
            mean, std, magnitude = _moments(sample)
            u = (self.sample.astype(np.float64) - own) / own_std
            bend = np.abs(u) - own_magnitude * (u**2 + 1) / 2 - np.sign(u).mean() * u
            found: dict[str, tuple[Any, Any, np.ndarray]] = {  # what is right, and the influence function of each
                "std": (std / own_std, 1.0, (u**2 - 1) / 2),
                "mean": ((mean - own) / own_std, 0.0, u),
                "magnitude": (magnitude, own_magnitude, bend),
            }
            for name, (value, expected, influence) in found.items():
                atol = DEVIATIONS * math.sqrt(2 * (influence**2).mean() / n)
                items[name] = Statistic(value, expected, atol)
        items["quantiles"] = Statistic(distance, 0.0, math.sqrt((1 - math.log(P)) / n))
        return items | _correlations(self.deviates(sample))


def _moments(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = sample.astype(np.float64)
    mean, std = values.mean(), values.std()
    return mean, std, np.abs(values - mean).mean() / std


def law_like(sample: np.ndarray) -> Law:
    """`Like`, or a constant if all seeds agree; numbers that were computed may be rounded otherwise."""
    first = sample[0]
    if not (sample == first).all():
        return Like(sample)
    if (first == first.flat[0]).all():
        return Constant(float(first.flat[0]))
    return Constant(first, constant_atol(first))


def between(samples: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
    """({name: correlations of its beginning with the others'}, their limit), one seed of each.

    Small samples are left out. A matrix is read by rows and by columns: the frameworks lay it out differently.
    """
    samples = {name: sample for name, sample in samples.items() if sample.size >= FEWEST_VALUES}
    if len(samples) < 2:
        return {}, 0.0
    length = min(sample.size for sample in samples.values())
    names, values = [], []
    for name, sample in samples.items():
        for view in (sample, sample.T) if sample.ndim == 2 else (sample,):
            names.append(name)
            values.append(view.ravel()[:length].astype(np.float64))
    rows, matrix = np.array(names), np.array(values)
    with np.errstate(invalid="ignore"):
        matrix /= np.sqrt((matrix**2).sum(axis=1, keepdims=True))
    products = matrix @ matrix.T
    found = {name: products[rows == name][:, rows != name].ravel() for name in samples}
    return found, correlation_atol(length, P / max(map(len, found.values())))
