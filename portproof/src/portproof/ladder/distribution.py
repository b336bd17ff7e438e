"""Whether values are independent draws from the normal distribution that they should come from.

Each item but one is a statistic whose law for such draws is known exactly, not only for large samples, and its limit is
what a right sample exceeds with probability P at most:

    std           root mean square: n rms^2 / std^2 is chi-squared with n degrees of freedom
    mean          normal with deviation std / sqrt(n)
    quantiles     the exact distribution at the sorted values, against (i + 1/2) / n: the Kolmogorov-Smirnov test, with
                  P(D > d) <= 2 exp(-2 n d^2) for every n (Massart 1990)
    largest       P(max|x| <= t) is (2 Phi(t / std) - 1)^n; at the largest value this is uniform over (0, 1), and is
                  given as the normal deviate of that probability: -13 for 1000 values that are uniform or cut off at
                  two deviations
    correlation   r of m disjoint pairs: r^2 is Beta(1/2, (m - 1) / 2). The pairs are neighbours along one axis, so that
                  values which repeat along it give 1; axis 0 of a sample is the seed
    others        the same for the first values of two tensors: generators seeded alike give 1
    distinct      the share of different values, which one repeat of each would halve. Among right draws some fall on
                  one float32 by chance: 0.02 of the 2.6 million of the largest tensor
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

# Both sides of both models and the shared draw make about 3000 such items, so a faultless port is called faulty once in
# 30 000 runs; and as draws follow the seed, a seed that passes passes again.
P = 1e-8
DISTINCT = 0.25


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """That of pairs whose means are known to be 0; NaN where there is nothing but zeros."""
    with np.errstate(invalid="ignore"):
        return float(np.vdot(a, b) / np.sqrt(np.vdot(a, a) * np.vdot(b, b)))


def _deviate_of_largest(magnitude: float, n: int) -> float:
    """The standard normal deviate that is as rare as a largest magnitude, in deviations, of `n` normal values."""
    return float(special.ndtri_exp(n * np.log1p(-special.erfc(magnitude / math.sqrt(2)))))


def correlation_limit(pairs: int, p: float) -> float:
    """What |r| of this many independent pairs exceeds with probability `p`."""
    return math.sqrt(special.betainccinv(0.5, (pairs - 1) / 2, p))


def _halves(sample: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the second of each pair of neighbours along `axis`."""
    even = sample.shape[axis] // 2 * 2
    moved = np.moveaxis(sample, axis, 0)
    return moved[:even:2], moved[1:even:2]


def _paired_axes(sample: np.ndarray) -> list[tuple[str, int]]:
    names = ["seeds", *(f"axis {i}" for i in range(sample.ndim - 1))]
    return [(name, axis) for axis, name in enumerate(names) if sample.shape[axis] > 1]


def statistics(sample: np.ndarray, std: float) -> dict[str, np.ndarray]:
    """The items above of `sample` (seeds, *shape), which should be drawn from N(0, std); float64."""
    sample = sample.astype(np.float64)
    ordered = np.sort(sample, axis=None)
    items = {
        "std": np.sqrt(np.mean(ordered**2)),
        "mean": ordered.mean(),
        "quantiles": special.ndtr(ordered / std),
        "largest": np.array(_deviate_of_largest(max(-ordered[0], ordered[-1]) / std, ordered.size)),
        "distinct": np.array((1 + np.count_nonzero(np.diff(ordered))) / ordered.size),
    }
    pairs = {f"correlation, {name}": _correlation(*_halves(sample, axis)) for name, axis in _paired_axes(sample)}
    return items | {name: np.array(r) for name, r in pairs.items()}


def expectations(shape: Sequence[int], std: float) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(what `statistics` are for N(0, std), how far those of right draws may be) for a sample (seeds, *shape)."""
    n = math.prod(shape)
    blank = np.empty(shape, np.bool_)
    pairs = {f"correlation, {name}": _halves(blank, axis)[0].size for name, axis in _paired_axes(blank)}
    items = {"std": std, "mean": 0.0, "quantiles": (np.arange(n) + 0.5) / n, "largest": 0.0, "distinct": 1.0}
    items |= dict.fromkeys(pairs, 0.0)
    lowest, highest = (
        std * math.sqrt(2 * inverse(n / 2, P / 2) / n) for inverse in (special.gammaincinv, special.gammainccinv)
    )
    limits = {
        "std": max(std - lowest, highest - std),
        "mean": -special.ndtri(P / 2) * std / math.sqrt(n),
        "quantiles": math.sqrt(math.log(2 / P) / (2 * n)) - 0.5 / n,
        "largest": -special.ndtri(P / 2),
        "distinct": DISTINCT,
        **{name: correlation_limit(count, P) for name, count in pairs.items()},
    }
    return {name: np.asarray(item, np.float64) for name, item in items.items()}, limits


def between(samples: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
    """({name: the correlations of a sample's beginning with that of each other}, their limit), one seed of each.

    There must be two or more. A matrix is read along its rows and along its columns, since the frameworks lay it out
    differently.
    """
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
    return found, correlation_limit(length, P / max(map(len, found.values())))
