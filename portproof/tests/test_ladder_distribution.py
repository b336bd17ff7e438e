"""Right samples stay within their limits as often as P says, and wrong ones of 1024 values do not."""

import numpy as np
import pytest
from scipy import special

from portproof.compare import FAIL, PASS, Verdict, compare
from portproof.ladder.statistics import distribution
from portproof.ladder.statistics.distribution import Constant, Law, Normal, Uniform

LAWS = {"normal": (Normal(0.3), lambda rng, shape: rng.normal(0, 0.3, shape))}
LAWS["uniform"] = (Uniform(0.3), lambda rng, shape: rng.uniform(-0.3, 0.3, shape))
SHAPES = [(8, 8, 16, 1, 1), (2, 48, 64), (10, 16, 3, 3, 3), (3, 5000)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def judged(law: Law, sample: np.ndarray) -> Verdict:
    statistics = law.statistics(sample)
    found, exact, limits = ({name: one[i] for name, one in statistics.items()} for i in range(3))
    return compare(exact, found, limits, expected_zero={name for name, item in exact.items() if not np.any(item)})


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_samples_leave_the_limits_as_often_as_p_says(law, shape, rng, monkeypatch):
    """At P = 0.05, a rate that 600 samples can show; quantiles rarer, since their bound is one for every n."""
    monkeypatch.setattr(distribution, "P", 0.05)
    monkeypatch.setattr(distribution, "DEVIATIONS", -special.ndtri(0.05 / 2))
    law, draw = LAWS[law]
    outside = {}
    for _ in range(600):
        for row in judged(law, draw(rng, shape).astype(np.float32)).rows:
            outside[row.name] = outside.get(row.name, 0) + (row.status != PASS)
    assert outside.pop("distinct") == 0
    for name, count in outside.items():
        assert 600 * 0.05 / 3 < count < 600 * 0.05 * 2, f"{name}: {count}"


NORMAL_FAULTS = [
    ("std", lambda rng, shape: rng.normal(0, 0.375, shape)),
    ("std", lambda rng, shape: rng.normal(0, 0.225, shape)),
    ("mean", lambda rng, shape: rng.normal(0.09, 0.3, shape)),
    ("quantiles", lambda rng, shape: rng.choice([-0.3, 0.3], shape)),
    ("largest", lambda rng, shape: rng.uniform(-0.3 * 3**0.5, 0.3 * 3**0.5, shape)),
    ("largest", lambda rng, shape: np.resize([x for x in rng.normal(0, 0.3, 1300) if abs(x) < 0.6], shape)),
    ("largest", lambda rng, shape: rng.standard_t(3, shape) * 0.3),
    ("distinct", lambda rng, shape: rng.normal(0, 0.3, (*shape[:-1], 1)).repeat(shape[-1], -1)),
    ("correlation, seeds", lambda rng, shape: rng.normal(0, 0.3, shape[1:])[None].repeat(shape[0], 0)),
    ("correlation, axis 1", lambda rng, shape: rng.normal(0, 0.3, (*shape[:2], 1)).repeat(shape[2], 2)),
]
UNIFORM_FAULTS = [
    ("largest", lambda rng, shape: rng.uniform(-0.375, 0.375, shape)),
    ("largest", lambda rng, shape: rng.uniform(-0.285, 0.285, shape)),
    ("quantiles", lambda rng, shape: rng.uniform(-0.15, 0.3, shape)),
    ("quantiles", lambda rng, shape: np.clip(rng.normal(0, 0.1, shape), -0.3, 0.3)),
    ("distinct", lambda rng, shape: rng.uniform(-0.3, 0.3, (*shape[:-1], 1)).repeat(shape[-1], -1)),
    ("correlation, seeds", lambda rng, shape: rng.uniform(-0.3, 0.3, shape[1:])[None].repeat(shape[0], 0)),
    ("correlation, axis 0", lambda rng, shape: rng.uniform(-0.3, 0.3, (2, 1, 32)).repeat(shape[1], 1)),
]


@pytest.mark.parametrize(
    ("law", "name", "draw"),
    [*((Normal(0.3), *fault) for fault in NORMAL_FAULTS), *((Uniform(0.3), *fault) for fault in UNIFORM_FAULTS)],
)
def test_what_1024_values_show(law, name, draw, rng):
    """The least that the rung promises to see in any one tensor."""
    shape = (2, 16, 32)
    for _ in range(50):
        statistic = law.statistics(draw(rng, shape))[name]
        assert np.abs(statistic.found - statistic.expected).max() > statistic.atol


def test_a_uniform_draws_lower_end_is_a_value_as_any_other():
    sample = np.random.default_rng(0).uniform(-0.3, 0.3, (2, 512)).astype(np.float32)
    sample[0, 0] = -0.3
    assert judged(Uniform(0.3), sample).status == PASS


@pytest.mark.parametrize(("value", "name"), [(0.1, "all 0.1"), (np.arange(3), "constant")])
def test_a_constant_is_of_the_tensors_dtype(value, name):
    sample = np.full((2, 3), value, np.float32)
    right = judged(Constant(value), sample)
    assert [row.name for row in right.rows] == [name] and right.status == PASS
    assert judged(Constant(value), np.nextafter(sample, np.float32(9))).status == FAIL


def test_beginnings_are_compared_in_both_layouts(rng):
    draws = rng.normal(0, 1, 600)
    samples = {
        "conv": draws[:300].reshape(3, 100, 1, 1) * 0.1,
        "linear": np.ascontiguousarray(draws.reshape(20, 30).T) * 0.01,  # as Paddle's, under the reference's name
        "alone": rng.normal(0, 1, (10, 50)),
        "few": draws[:8],
    }
    found, limit = distribution.between(samples)
    largest = {name: np.abs(array).max() for name, array in found.items()}
    assert largest["conv"] == pytest.approx(1) and largest["linear"] == pytest.approx(1)
    assert largest["alone"] < limit < 0.5
    assert "few" not in found
    assert distribution.between({"conv": samples["conv"]}) == ({}, 0.0)
