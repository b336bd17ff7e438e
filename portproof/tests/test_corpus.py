"""`align` on the corpus: a faithful port is aligned, a bug is located where it is."""

import paddle
import pytest
import torch
from corpus import PAIRS

from portproof import align
from portproof.compare import FAIL, PASS, REFUSED, Verdict

FAITHFUL = [name for name, pair in PAIRS.items() if pair.faithful]
BUGS = [(name, bug) for name, pair in PAIRS.items() for bug in pair.bugs]
LATER = pytest.mark.thorough("the first bug of each pair stays; test_a_faithful_port")


def judged(name: str, bug: str = "") -> Verdict:
    pair = PAIRS[name]
    torch.manual_seed(0)
    paddle.seed(0)
    return align(pair.ref(), pair.port(bug), pair.inputs, modes=pair.modes)


@pytest.mark.parametrize("name", FAITHFUL)
def test_a_faithful_port(name):
    verdict = judged(name)
    assert verdict.location is None, str(verdict)
    assert verdict.status in ((PASS, REFUSED) if PAIRS[name].random else (PASS,)), str(verdict)


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        pytest.param(name, bug, marks=[] if bug == next(iter(PAIRS[name].bugs)) else LATER, id=f"{name}, {bug}")
        for name, bug in BUGS
    ],
)
def test_a_bug(name, bug):
    verdict, expected = judged(name, bug), PAIRS[name].bugs[bug]
    assert verdict.status == FAIL, str(verdict)
    assert verdict.location is not None, str(verdict)
    assert verdict.location.name in (expected.at, *expected.also), str(verdict)
    assert expected.cause.lower() in "; ".join(verdict.location.diagnosis).lower(), str(verdict)
