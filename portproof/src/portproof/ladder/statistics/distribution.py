"""Whether values are independent draws from the distribution that they should come from, or the constant.

Each item but one is a statistic whose law for such draws is known exactly, not only for large samples, and its limit is
what a right sample exceeds with probability P at most:

    std           of a normal distribution, root mean square: n rms^2 / std^2 is chi-squared with n degrees of freedom
    mean          of a normal distribution: normal with deviation std / sqrt(n)
    quantiles     the exact distribution at the sorted values, against (i + 1/2) / n: the Kolmogorov-Smirnov test, with
                  P(D > d) <= 2 exp(-2 n d^2) for every n (Massart 1990)
    largest       of a normal distribution: P(max|x| <= t) is (2 Phi(t / std) - 1)^n; at the largest value this is
                  uniform over (0, 1), and is given as the normal deviate of that probability: -13 for 1000 values that
                  are uniform or cut off at two deviations. Of a uniform one: P(max|x| <= t) is (t / bound)^n
    correlation   r of m disjoint pairs: r^2 is Beta(1/2, (m - 1) / 2). The pairs are neighbours along one axis, so that
                  values which repeat along it give 1; axis 0 of a sample is the seed
    others        the same for the first values of two tensors: generators seeded alike give 1
    distinct      the share of different values, which one repeat of each would halve. Among right draws some fall on
                  one float32 by chance: 0.02 of the 2.6 million of the largest tensor

Correlations are those of normal deviates: of uniform values, of the normal deviates that are as rare.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from portproof.python39 import zip_strict

# Two sides of 142 tensors make about 3000 such items, so a faultless port is called faulty once in 30 000 runs; and as
# draws follow the seed, a seed that passes passes again.
P = 1e-8
DISTINCT = 0.25
MANY = 1000  # values from which a mean is normal as far out as P: so simulated, at 5 deviations and less
FEWEST_PAIRS = 3  # of fewer every correlation may be 1
FEWEST_VALUES = 64  # of a tensor that is compared with others

Statistics = dict[str, np.ndarray]


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """That of pairs whose means are known to be 0; NaN where there is nothing but zeros."""
    with np.errstate(invalid="ignore"):
        return float(np.vdot(a, b) / np.sqrt(np.vdot(a, a) * np.vdot(b, b)))


def _deviate_of_largest(magnitude: float, n: int) -> float:
    """The standard normal deviate that is as rare as a largest magnitude, in deviations, of `n` normal values."""
    return float(special.ndtri_exp(n * np.log1p(-special.erfc(magnitude / math.sqrt(2)))))


def correlation_atol(pairs: int, p: float) -> float:
    """What |r| of this many independent pairs exceeds with probability `p`."""
    return math.sqrt(special.betainccinv(0.5, (pairs - 1) / 2, p))


def _halves(sample: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the second of each pair of neighbours along `axis`."""
    even = sample.shape[axis] // 2 * 2
    moved = np.moveaxis(sample, axis, 0)
    return moved[:even:2], moved[1:even:2]


def _paired_axes(shape: Sequence[int]) -> list[tuple[str, int, int]]:
    """(name, axis, number of pairs of neighbours) of each axis that has enough of them."""
    names = ["seeds", *(f"axis {i}" for i in range(len(shape) - 1))]
    pairs = [shape[axis] // 2 * math.prod(shape) // shape[axis] for axis in range(len(shape))]
    return [found for found in zip_strict(names, range(len(shape)), pairs) if found[2] >= FEWEST_PAIRS]


class Law(ABC):
    """What the values of a tensor should be.

    A sample is (seeds, *shape): the tensor under several seeds.
    """

    @abstractmethod
    def statistics(self, sample: np.ndarray) -> Statistics:
        """What `sample` shows, by item."""

    @abstractmethod
    def expectations(self, shape: Sequence[int], dtype: np.dtype) -> tuple[Statistics, dict[str, float]]:
        """(what `statistics` should be for a sample of this shape and dtype, how far those of right ones may be)."""

    def deviates(self, sample: np.ndarray) -> np.ndarray:
        """Values that are normal around 0, in float64, if those of the sample are right."""
        return sample.astype(np.float64)


@dataclass(frozen=True)
class Constant(Law):
    """Every value is `value`: a number, or an array of the tensor's shape; within `atol`."""

    value: float | np.ndarray
    atol: float = 0.0

    @property
    def name(self) -> str:
        return f"all {self.value:g}" if np.ndim(self.value) == 0 else "constant"

    def statistics(self, sample: np.ndarray) -> Statistics:
        return {self.name: sample}

    def expectations(self, shape: Sequence[int], dtype: np.dtype) -> tuple[Statistics, dict[str, float]]:
        return {self.name: np.full(shape, self.value, dtype)}, {self.name: self.atol}


class _Drawn(Law):
    """Independent values of one distribution around 0."""

    @abstractmethod
    def cdf(self, values: np.ndarray) -> np.ndarray:
        """P(x <= value), float64."""

    @abstractmethod
    def _largest(self, ordered: np.ndarray) -> float:
        """What tells how large the largest magnitude of sorted values is."""

    @abstractmethod
    def _largest_expected(self, n: int) -> tuple[float, float]:
        """(what it should be, limit) for n values."""

    def _moments(self, ordered: np.ndarray) -> Statistics:
        """Those of which the laws are known for this distribution."""
        return {}

    def _moments_expected(self, n: int) -> dict[str, tuple[float, float]]:
        """{item: (what it should be, limit)} of the same."""
        return {}

    def statistics(self, sample: np.ndarray) -> Statistics:
        ordered, deviates = np.sort(sample.astype(np.float64), axis=None), self.deviates(sample)
        items = self._moments(ordered) | {
            "quantiles": self.cdf(ordered),
            "largest": np.array(self._largest(ordered)),
            "distinct": np.array((1 + np.count_nonzero(np.diff(ordered))) / ordered.size),
        }
        for name, axis, _ in _paired_axes(sample.shape):
            items[f"correlation, {name}"] = np.array(_correlation(*_halves(deviates, axis)))
        return items

    def expectations(self, shape: Sequence[int], dtype: np.dtype) -> tuple[Statistics, dict[str, float]]:
        n = math.prod(shape)
        items = self._moments_expected(n) | {
            "quantiles": ((np.arange(n) + 0.5) / n, math.sqrt(math.log(2 / P) / (2 * n)) - 0.5 / n),
            "largest": self._largest_expected(n),
            "distinct": (1.0, DISTINCT),
        }
        for name, _, pairs in _paired_axes(shape):
            items[f"correlation, {name}"] = 0.0, correlation_atol(pairs, P)
        exact = {name: np.asarray(item, np.float64) for name, (item, _) in items.items()}
        return exact, {name: limit for name, (_, limit) in items.items()}


@dataclass(frozen=True)
class Normal(_Drawn):
    """N(0, std), not cut off."""

    std: float

    def cdf(self, values: np.ndarray) -> np.ndarray:
        return special.ndtr(values / self.std)

    def _largest(self, ordered: np.ndarray) -> float:
        return _deviate_of_largest(max(-ordered[0], ordered[-1]) / self.std, ordered.size)

    def _largest_expected(self, n: int) -> tuple[float, float]:
        return 0.0, -special.ndtri(P / 2)

    def _moments(self, ordered: np.ndarray) -> Statistics:
        return {"std": np.sqrt(np.mean(ordered**2)), "mean": ordered.mean()}

    def _moments_expected(self, n: int) -> dict[str, tuple[float, float]]:
        inverses = special.gammaincinv, special.gammainccinv
        lowest, highest = (self.std * math.sqrt(2 * inverse(n / 2, P / 2) / n) for inverse in inverses)
        return {
            "std": (self.std, max(self.std - lowest, highest - self.std)),
            "mean": (0.0, -special.ndtri(P / 2) * self.std / math.sqrt(n)),
        }


@dataclass(frozen=True)
class Uniform(_Drawn):
    """Uniform over (-bound, bound)."""

    bound: float

    def cdf(self, values: np.ndarray) -> np.ndarray:
        return np.clip((values / self.bound + 1) / 2, 0, 1)

    def deviates(self, sample: np.ndarray) -> np.ndarray:
        return special.ndtri(np.clip(self.cdf(sample.astype(np.float64)), 2**-25, 1 - 2**-25))  # float32 draws give 0

    def _largest(self, ordered: np.ndarray) -> float:
        return max(-ordered[0], ordered[-1])

    def _largest_expected(self, n: int) -> tuple[float, float]:
        return self.bound, -self.bound * math.expm1(math.log(P) / n)


@dataclass(frozen=True)
class Like(Law):
    """Independent values of the distribution that `sample` (seeds, *shape) was drawn from, whatever it is.

    The statistics are differences of two samples of n values each, 0 if they are alike:

        quantiles   the largest distance between their distributions: the two-sample Kolmogorov-Smirnov test, with
                    P(D > d) <= e exp(-n d^2) for samples of equal size (Wei and Dudley 2012, theorem 1)
        mean, std   the std as a ratio, and the mean in parts of the std
        magnitude   the mean of |x - mean| / std, which tells a uniform distribution from a normal one (Geary 1935)

    All but the first are normal for MANY values and more; their deviations follow from their influence functions over
    the sample. Of fewer values only the quantiles are compared.
    """

    sample: np.ndarray

    def deviates(self, sample: np.ndarray) -> np.ndarray:
        ordered = np.sort(self.sample, axis=None)
        below, up_to = (np.searchsorted(ordered, sample, side) for side in ("left", "right"))
        return special.ndtri((below + up_to + 1) / (2 * ordered.size + 2))

    def statistics(self, sample: np.ndarray) -> Statistics:
        distance = stats.ks_2samp(sample.ravel(), self.sample.ravel(), method="asymp").statistic
        items, deviates = {"quantiles": np.array(distance)}, self.deviates(sample)
        if self.sample.size >= MANY:
            (mean, std, magnitude), (own_mean, own_std, own_magnitude) = map(_moments, (sample, self.sample))
            items["mean"] = (mean - own_mean) / own_std
            items |= {"std": std / own_std - 1, "magnitude": magnitude - own_magnitude}
        for name, axis, _ in _paired_axes(sample.shape):
            items[f"correlation, {name}"] = np.array(_correlation(*_halves(deviates, axis)))
        return items

    def expectations(self, shape: Sequence[int], dtype: np.dtype) -> tuple[Statistics, dict[str, float]]:
        n, atol = self.sample.size, {}
        atol["quantiles"] = math.sqrt((1 - math.log(P)) / n)
        if n >= MANY:
            mean, std, magnitude = _moments(self.sample)
            u = (self.sample.astype(np.float64) - mean) / std
            influences = {"mean": u, "std": (u**2 - 1) / 2}
            influences["magnitude"] = np.abs(u) - magnitude * (u**2 + 1) / 2 - np.sign(u).mean() * u
            for name, influence in influences.items():
                atol[name] = -special.ndtri(P / 2) * math.sqrt(2 * (influence**2).mean() / n)
        atol |= {f"correlation, {name}": correlation_atol(pairs, P) for name, _, pairs in _paired_axes(shape)}
        return {name: np.zeros(()) for name in atol}, atol


def _moments(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean, std, mean magnitude in parts of the std), float64."""
    values = sample.astype(np.float64)
    mean, std = values.mean(), values.std()
    return mean, std, np.abs(values - mean).mean() / std


def law_like(sample: np.ndarray) -> Law:
    """What a sample (seeds, *shape) was drawn from: the same each time is a constant, anything else `Like`.

    A table of numbers that are not all equal was computed, which may round differently: by 4 ulp of the largest.
    """
    if (sample == sample[0]).all():
        first = sample[0]
        uniform = (first == first.flat[0]).all()
        return Constant(float(first.flat[0])) if uniform else Constant(first, 4 * 2.0**-23 * np.abs(first).max())
    return Like(sample)


def between(samples: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
    """({name: the correlations of a sample's beginning with that of each other}, their limit), one seed of each.

    Those of few values are left out. A matrix is read along its rows and along its columns, since the frameworks lay it
    out differently.
    """
    samples = {name: sample for name, sample in samples.items() if sample.size >= FEWEST_VALUES}
    if len(samples) < 2:
        return {}, 0.0
    length = min(sample.size for sample in samples.values())
    beginnings = [
        (name, sample.ravel(order)[:length].astype(np.float64))
        for name, sample in samples.items()
        for order in ("CF" if sample.ndim == 2 else "C")
    ]
    names = np.array([name for name, _ in beginnings])
    values = np.array([beginning for _, beginning in beginnings])
    with np.errstate(invalid="ignore"):
        values /= np.sqrt((values**2).sum(axis=1, keepdims=True))
    matrix = values @ values.T
    found = {name: matrix[names == name][:, names != name].ravel() for name in samples}
    return found, correlation_atol(length, P / max(map(len, found.values())))
