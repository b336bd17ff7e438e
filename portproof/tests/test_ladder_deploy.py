"""Engines that run an exported port, against the reference; functions of a batch stand for them."""

import numpy as np
import pytest
import torch

from portproof.compare import FAIL, PASS
from portproof.ladder import deploy
from sturdyio.cli import UserError

F = torch.nn.functional
BATCHES = {f"batch {n}": [np.random.default_rng(n).normal(size=(n, 3, 8, 8)).astype(np.float32)] for n in (1, 3)}
EXAMPLES = [11, 12]


def reference():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Hardswish(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(288, 10)).eval()


@torch.no_grad()
def engine(batch):
    """The batch norm is folded into the convolution, in float64."""
    conv, norm, _, _, linear = reference().double()
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = (conv.weight * factor[:, None, None, None]).float()
    bias = ((conv.bias - norm.running_mean) * factor + norm.bias).float()
    hidden = F.hardswish(F.conv2d(torch.from_numpy(batch), weight, bias)).flatten(1)
    return F.linear(hidden, linear.weight.float(), linear.bias.float()).numpy()


def preprocess(example):
    return np.random.default_rng(example).normal(size=(3, 8, 8)).astype(np.float32)


def failed(verdict):
    return {str(row.item) for row in verdict.rows if row.status == FAIL}


def test_a_faultless_engine_passes():
    verdict = deploy(reference(), {"folded": engine}, BATCHES, EXAMPLES, (preprocess, preprocess))
    assert verdict.status == PASS, str(verdict)
    assert len(verdict.rows) == 3 * 3 + len(EXAMPLES)  # outputs, the same twice, classes; the examples' inputs
    assert 0 < next(row.atol for row in verdict.rows) < 1e-5


def drifting():
    """An engine whose second run of a batch differs in the last bits."""
    runs = iter(range(100))
    return lambda batch: engine(batch) * np.float32(1 + 1.2e-7 * (next(runs) % 2))


def exchanged(batch):
    return engine(batch)[:, [1, 0, *range(2, 10)]]


def of_one_sample(batch):
    if len(batch) != 1:
        raise ValueError("Got invalid dimensions for input: index: 0 Got: 3 Expected: 1")
    return engine(batch)


def not_a_number(batch):
    return engine(batch) * np.float32(np.nan)


@pytest.mark.parametrize(
    ("faulty", "where"),
    [
        (lambda batch: engine(batch) * np.float32(1.0001), "batch 1/output"),
        (lambda batch: engine(batch.astype(np.float16).astype(np.float32)), "batch 1/output"),
        (lambda batch: engine(batch).astype(np.float64) + 1e-4, "batch 3/output"),
        (exchanged, "top5"),
        (drifting(), "the same twice"),
        (of_one_sample, "batch 3"),
        (not_a_number, "output"),
        (lambda batch: engine(batch)[:, :9], "output"),
    ],
    ids=["scaled", "input in float16", "shifted", "classes", "drifting", "a fixed batch", "NaN", "a class less"],
)
def test_a_fault_of_an_engine_is_noticed(faulty, where):
    verdict = deploy(reference(), {"right": engine, "faulty": faulty}, BATCHES)
    assert verdict.status == FAIL
    assert any(where in name for name in failed(verdict)), failed(verdict)
    assert not any(name.startswith("right") for name in failed(verdict)), failed(verdict)


def test_every_output_of_a_model_is_compared():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = reference()

        def forward(self, x):
            return self.net(x), 2 * self.net(x)

    for factor, status in ((2, PASS), (0, FAIL)):
        verdict = deploy(
            Twice(), {"two": lambda batch, factor=factor: [engine(batch), factor * engine(batch)]}, BATCHES
        )
        assert verdict.status == status, str(verdict)
    assert failed(verdict) == {f"two, batch {n}/output[1]" for n in (1, 3)}
    assert deploy(Twice(), {"one": engine}, BATCHES).status == FAIL


@pytest.mark.parametrize(
    "faulty",
    [
        lambda each: preprocess(each)[::-1].copy(),
        lambda each: preprocess(each) / np.float32(1.001),
        lambda each: preprocess(each)[::-1].tolist(),
    ],
    ids=["BGR", "std", "a list"],
)
def test_another_preprocessing_is_noticed(faulty):
    verdict = deploy(reference(), {"folded": engine}, BATCHES, EXAMPLES, (preprocess, faulty))
    assert {str(each) for each in EXAMPLES} <= failed(verdict)
    assert any("examples" in name for name in failed(verdict))


def test_classes_may_change_places_only_within_the_limits():
    """Two classes equal up to float32 rounding."""
    ref = reference()
    with torch.no_grad():
        ref[4].weight[1], ref[4].bias[1] = ref[4].weight[0], ref[4].bias[0]

    def turned(batch):
        return ref(torch.from_numpy(batch)).detach().numpy()[:, [1, 0, *range(2, 10)]]

    assert deploy(ref, {"turned": turned}, BATCHES).status == PASS


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (({}, BATCHES), "nothing to compare"),
        (({"folded": engine}, {}), "nothing to compare"),
        (({"folded": engine}, BATCHES, EXAMPLES), "give both or none"),
        (({"folded": engine}, {"narrow": [np.ones((1, 2, 8, 8), np.float32)]}), "cannot run on batch narrow"),
    ],
)
def test_bad_arguments(arguments, named):
    with pytest.raises(UserError, match=named):
        deploy(reference(), *arguments)
