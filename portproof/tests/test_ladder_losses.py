"""The kit's comparison of two criteria, on criteria of a few lines."""

import numpy as np
import paddle
import paddle.nn.functional as PF
import pytest
import torch
import torch.nn.functional as F

from portproof.backends import backend
from portproof.compare import FAIL, PASS, REFUSED
from portproof.ladder import cases
from portproof.ladder.rung import Rung
from portproof.ladder.rungs.metrics import loss
from sturdyio.cli import UserError

CLASSES = 11


def softmax_loss(logits, target, scale=1.0, smoothing=0.0):
    """Cross entropy, written out: Paddle's own cuts log-probabilities off at -64."""
    log_p = logits - logits.max(axis=1, keepdim=True).detach()
    log_p = log_p - log_p.exp().sum(axis=1, keepdim=True).log()
    soft = PF.one_hot(target, logits.shape[1]).astype(logits.dtype) if target.ndim == 1 else target
    return -scale * ((soft * (1 - smoothing) + smoothing / logits.shape[1]) * log_p).sum(axis=1).mean()


def failed(verdict):
    return verdict.first_failure.name, verdict.first_failure.item.dtype


def test_a_faultless_port_passes_on_labels_and_soft_targets_in_both_precisions():
    verdict = loss(F.cross_entropy, softmax_loss, num_classes=CLASSES)
    assert verdict.status == PASS
    assert len(verdict.rows) == 2 * 2 * 2 * 2  # logits, targets, precisions, loss and gradient
    assert str(verdict).endswith("PASS loss: all 16 items within their limits")
    assert "extreme logits, soft targets, float32" in str(verdict)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lambda x, y: softmax_loss(x, y, scale=1 + 1e-9), ("loss", "float64")),
        (lambda x, y: softmax_loss(x, y, smoothing=1e-9), ("loss", "float64")),
        (lambda x, y: PF.cross_entropy(x, y, soft_label=y.ndim == 2), ("gradient/logits", "float64")),  # cut off at -64
        (lambda x, y: softmax_loss(x, y).astype("float32"), ("loss", "float64")),
        (lambda x, y: softmax_loss(x, y) + (x - x.detach()).sum(), ("gradient/logits", "float64")),
        (lambda x, y: softmax_loss(x, y if y.ndim == 1 else y.argmax(1)), ("loss", "float64")),
        (lambda x, y: softmax_loss(x, y).reshape([1]), ("loss", "float64")),
    ],
)
def test_a_fault_is_caught(fault, named):
    verdict = loss(F.cross_entropy, fault, num_classes=CLASSES)
    assert verdict.status == FAIL
    assert failed(verdict) == named


def test_a_fault_in_float32_alone_is_caught():
    def rounded(x, y):
        return softmax_loss(x, y, scale=1 + 1e-4 * (x.dtype == paddle.float32))

    verdict = loss(F.cross_entropy, rounded, num_classes=CLASSES)
    assert {row.item.dtype for row in verdict.rows if row.status == FAIL} == {"float32"}


def test_an_overflow_shows_at_extreme_logits_only():
    def naive(x, y):
        log_p = (x.exp() / x.exp().sum(1, keepdim=True)).log()
        return -paddle.take_along_axis(log_p, y[:, None], 1).mean()

    both = {name: case for name, case in cases.losses(CLASSES).items() if "labels" in name}
    assert loss(F.cross_entropy, naive, {"drawn": both["drawn logits, labels"]}).status == PASS
    verdict = loss(F.cross_entropy, naive, {"extreme": both["extreme logits, labels"]})
    assert "not finite" in verdict.first_failure.reason


def test_a_loss_of_any_arrays(rng):
    """Of three, the first floating-point one gets the gradient."""
    weights, index = rng.random(6), rng.integers(0, 9, 6)
    arrays = {"weighted": (index, rng.normal(size=9), weights)}

    def ref(index, x, weights):
        return (weights * x[index] ** 2).sum()

    assert loss(ref, ref, arrays, wrt="x").status == PASS
    verdict = loss(ref, lambda i, x, w: (w.detach() * x[i] ** 2).sum() + x.mean() * 1e-6, arrays, wrt="x")
    assert failed(verdict) == ("loss", "float64")
    assert "gradient/x" in {row.name for row in verdict.rows}


def test_the_gradients_of_several_arrays_are_compared(rng):
    """A port that stops one of them, and whose others are right, passes with fewer names, and that is said."""
    arrays = {"two": (rng.normal(size=9), rng.normal(size=9))}
    ref = lambda x, y: (x * y**2).sum()  # noqa: E731
    stopped = lambda x, y: (x * y.detach() ** 2).sum() + 0.0 * y.sum()  # noqa: E731
    verdict = loss(ref, stopped, arrays, wrt="x")
    assert verdict.status == PASS
    assert "two: not compared: the gradients of 1 more arrays of floats, which `wrt` does not name" in str(verdict)
    assert "not compared" not in str(loss(ref, ref, arrays, wrt=("x", "y")))
    verdict = loss(ref, stopped, arrays, wrt=("x", "y"))
    assert (verdict.status, verdict.first_failure.name) == (FAIL, "gradient/y")
    with pytest.raises(
        UserError, match="'two' has 2 floating-point arrays, of which the gradients are to be compared: x, y, z"
    ):
        loss(ref, ref, arrays, wrt=("x", "y", "z"))


def test_a_module_runs_in_either_precision_and_stays_as_it_was(rng):
    weight = rng.uniform(0.5, 2, CLASSES).astype(np.float32)
    ref = torch.nn.CrossEntropyLoss(weight=torch.from_numpy(weight))

    class Weighted(paddle.nn.Layer):
        def __init__(self, weight):
            super().__init__()
            self.register_buffer("weight", paddle.to_tensor(weight))

        def forward(self, x, y):
            w = self.weight[y]
            picked = paddle.take_along_axis(PF.log_softmax(x, 1), y[:, None], 1)[:, 0]
            return -(w * picked).sum() / w.sum()

    given = {"drawn": cases.losses(CLASSES)["drawn logits, labels"]}
    port = Weighted(weight)
    assert loss(ref, port, given).status == PASS
    assert ref.weight.dtype == torch.float32
    assert port.weight.dtype == paddle.float32
    assert loss(ref, Weighted(weight[::-1].copy()), given).status == FAIL


def test_a_criterion_may_write_into_its_logits():
    def in_place(x, y):
        return F.cross_entropy(x.mul_(2), y)

    given = {"drawn": cases.losses(CLASSES)["drawn logits, labels"]}
    assert loss(in_place, lambda x, y: softmax_loss(2 * x, y), given).status == PASS


def test_float64_cases_are_rounded_to_float32_first(rng):
    given = {"one": (rng.normal(size=(4, CLASSES)), rng.integers(0, CLASSES, 4))}
    verdict = loss(F.cross_entropy, softmax_loss, given)
    assert [row.atol for row in verdict.rows if row.item.dtype == "float32"][1] < 1e-6


def test_a_reference_that_raises_is_the_users():
    def broken(x, y):
        raise KeyError("axis")

    with pytest.raises(UserError, match="the reference's criterion on drawn logits, labels, float64 raised KeyError"):
        loss(broken, softmax_loss, num_classes=CLASSES)


def test_a_port_that_raises_fails():
    def broken(x, y):
        raise KeyError("axis")

    verdict = loss(F.cross_entropy, broken, num_classes=CLASSES)
    assert verdict.status == FAIL
    assert verdict.first_failure.reason == "the port raised KeyError: 'axis'"
    assert len(verdict.rows) == 4  # a case each


def test_a_gradient_that_one_side_lacks():
    def on_integers(x, y):
        return (x.detach() * 2).sum().requires_grad_()

    with pytest.raises(UserError, match="gives logits no gradient, on drawn logits, labels"):
        loss(on_integers, softmax_loss, num_classes=CLASSES)

    def detached(x, y):
        value = softmax_loss(x.detach(), y)
        value.stop_gradient = False
        return value

    verdict = loss(F.cross_entropy, detached, num_classes=CLASSES)
    assert failed(verdict) == ("gradient/logits", "float64")
    assert verdict.first_failure.reason == "the port does not have it"


@pytest.mark.parametrize(
    ("ref", "reason"),
    [(lambda x, y: (x * np.inf).sum(), "NaN or infinity"), (lambda x, y: (x * 0).sum() + 1, "zero throughout")],
)
def test_what_proves_nothing_is_refused(ref, reason):
    verdict = loss(ref, ref, num_classes=CLASSES)
    assert verdict.status == REFUSED
    assert reason in verdict.refusal


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one case at least"),
        ([], "one case at least"),
        ({"a": np.ones(3)}, "'a' is a ndarray: give a tuple"),
        ({"a": ()}, "'a' is a tuple: give a tuple of one array or more"),
        (
            {"a": ([np.ones(3), np.ones(2)], np.ones(3))},
            "'a': .*: give a tuple of arrays, each as an argument of its own",
        ),
        ({"a": (np.arange(3),)}, "'a' has no floating-point array"),
        ({"a": (np.array(["x"]),)}, "'a' has an array"),
        ({"a": (np.empty((0, 3)), np.empty(0, int))}, "'a' has an array"),
    ],
)
def test_cases_that_are_none(given, message):
    with pytest.raises(UserError, match=message):
        loss(F.cross_entropy, softmax_loss, given)


def test_what_goes_to_the_files():
    rung, kept = Rung("04", quiet=True), ["drawn logits, labels", "extreme logits, labels"]
    loss(F.cross_entropy, softmax_loss, num_classes=CLASSES, keep=kept, rung=rung)
    names = [f"{kept[0]}, float64/", "", f"{kept[1]}, float64/", f"{kept[1]}, float32/"]
    assert list(rung.files[0]) == list(rung.files[1]) == [n + key for n in names for key in ("loss", "gradient")]
    assert rung.files[0]["gradient"].dtype == np.float32
    assert len(rung.verdicts) == 8


def test_the_default_cases_reach_what_they_should():
    found = cases.losses(CLASSES)
    extreme, labels = found["extreme logits, labels"]
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(extreme.astype(np.float32))).any()
    assert sorted(labels) == list(range(CLASSES))
    soft = found["drawn logits, soft targets"][1]
    np.testing.assert_allclose(soft.sum(1), 1)
    assert (np.count_nonzero(soft, axis=1) == 2).all()
    own = cases.losses(3, logits={"model": np.arange(6.0).reshape(2, 3)})["model logits, labels"][0]
    assert own.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_a_float64_loss_has_no_float32_constants():
    """Hard-sigmoid's backward holds 1/6 as float32 in PyTorch; Paddle's slope is a float32, too."""
    given = {"one": (np.linspace(-4.1, 4, 33),)}
    port = loss(lambda x: F.hardsigmoid(x).sum(), lambda x: PF.hardsigmoid(x, slope=1 / 6).sum(), given)
    assert port.status == PASS
    assert loss(lambda x: F.hardsigmoid(x).sum(), lambda x: PF.hardsigmoid(x).sum(), given).status == FAIL


def test_the_default_precision_is_the_cases(rng):
    """A tensor that the port makes without a dtype is float64 in the float64 run."""
    given = {"one": (rng.normal(size=(4, 3)),)}
    assert loss(lambda x: (x * 0.1).sum(), lambda x: (x * paddle.to_tensor(0.1)).sum(), given).status == PASS
    assert backend("paddle").framework.get_default_dtype() == "float32"
