"""The grammar of random networks: faithful pairs are so, each kind is made, and a fault of the kit is seen."""

import pytest

from maintenance.checks.network_grammar import grown_pair
from maintenance.checks.random_networks import align_quietly, fault_by, judged_seed, self_check, totals
from portproof.backends import fp64_paddle

KINDS = ("turned", "sequence first", "batch norm: library -> class", "linear: module -> raw", "one level deeper")


@pytest.mark.parametrize("seed", range(12))
def test_a_faithful_pair_is_faithful(seed):
    assert self_check(seed) == ""


def test_a_fault_differs():
    """But for faults that a run does not show; most do."""
    assert sum(fault_by(grown_pair(seed), runs=1) > 1e-6 for seed in range(8)) >= 6


def test_each_kind_is_grown():
    kinds = set().union(*(grown_pair(seed).kinds for seed in range(300)))
    assert set(KINDS) <= kinds


def test_a_fault_of_the_kit_is_a_false_alarm(monkeypatch):
    """PaddlePaddle's constants stay in float32, such as a norm's epsilon."""
    assert align_quietly(grown_pair(1), grown_pair(1).port).status == 0
    monkeypatch.setattr(fp64_paddle, "REPLACED", {})
    every = [judged_seed(seed) for seed in range(1, 7)]
    assert "false alarm" in {each["faithful"] for each in every} and not totals(every)[1]
