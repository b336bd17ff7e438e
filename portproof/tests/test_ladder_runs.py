"""Whole training runs: the test is calibrated and has power, each kind of fault and mistake is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest
import torch

from portproof import ladder
from portproof.compare import FAIL, PASS, REFUSED, Item
from portproof.ladder.rung import Ended, Rung, RungVerdict
from portproof.ladder.rungs.fp64_runs import LOSS, growth_of, train_fp64
from portproof.ladder.rungs.runs import train
from portproof.ladder.statistics import trajectory
from portproof.python39 import zip_strict
from sturdyio.cli import UserError


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# The test of hypotheses


def verdicts(draw, rounds: int, seeds: int, runs: int, alpha: float, shift: float = 0.0) -> float:
    """The share of rounds in which a port, `shift` deviations off in one of five features, fails."""
    features = {f"f{i}": trajectory.Feature(lambda record, i=i: float(record["x"][i])) for i in range(5)}
    bad = 0
    for _ in range(rounds):
        centres = [100 * draw(5) for _ in range(seeds)]  # seeds differ by far more than runs of one seed
        ref = [[{"x": centre + draw(5)} for _ in range(runs)] for centre in centres]
        port = [{"x": centre + draw(5) + shift * np.eye(5)[0]} for centre in centres]
        bad += trajectory.judge(ref, port, features, "synthetic", alpha).status == FAIL
    return bad / rounds


@pytest.mark.parametrize(("seeds", "runs"), [(1, 8), (2, 4)])
def test_a_faultless_port_fails_as_often_as_alpha_says(seeds, runs, rng):
    """At alpha = 0.1, a rate that 600 rounds can show; Bonferroni's bound is nearly exact for independent features."""
    rate = verdicts(rng.standard_normal, 600, seeds, runs, alpha=0.1)
    assert 0.06 < rate < 0.14


def test_skewed_features_do_not_raise_the_rate_beyond_thrice_alpha(rng):
    assert verdicts(lambda n: rng.gumbel(size=n), 600, 1, 8, alpha=0.05) < 0.15


@pytest.mark.parametrize(("seeds", "runs", "shift"), [(1, 8, 14), (2, 4, 12)])
def test_a_shift_of_so_many_deviations_is_seen(seeds, runs, shift, rng):
    """At the rung's own alpha, in nine of ten runs; with a tenth of the shift in next to none."""
    assert verdicts(rng.standard_normal, 100, seeds, runs, trajectory.ALPHA, shift) > 0.9
    assert verdicts(rng.standard_normal, 100, seeds, runs, trajectory.ALPHA, shift / 10) < 0.1


def test_rounded_values_that_agree_by_chance_still_allow_one_step():
    same = np.full((1, 8), 0.98)
    assert trajectory.prediction_atol(same, 0.0, 1e-4) < 1e-12
    assert 1 / 355 < trajectory.prediction_atol(same, 1 / 355, 1e-4) < 4 / 355


def test_nan_fails(rng):
    features = {"f": trajectory.Feature(lambda record: float(record["x"]))}
    ref = [[{"x": value} for value in rng.normal(size=8)]]
    assert trajectory.judge(ref, [{"x": np.nan}], features, "nan").status == FAIL


def test_a_record_without_a_value_refuses_and_a_lacking_feature_fails(rng):
    features = {"f": trajectory.Feature(lambda record: float(record["x"]))}
    ref = [[{"x": value} for value in rng.normal(size=8)]]
    assert trajectory.judge([[{"x": np.nan}, *ref[0]]], [ref[0][0]], features, "ref").status == REFUSED
    [row] = trajectory.judge(ref, [{}], features, "port").rows
    assert row.status == FAIL and "does not have it" in row.reason


# float32


def toy(ref: str, port: str, rung: Rung | None = None, **kwargs: Any) -> RungVerdict:
    """`train` with two of the toy runs."""
    return train(
        f"toy_training_runs:{ref}", f"toy_training_runs:{port}", rung=rung, **{"seeds": (1, 2), "draws": 4} | kwargs
    )


def test_a_faultless_pair_passes_and_leaves_its_curves():
    rung = Rung("train", quiet=True)
    verdict = toy("ref", "port", rung, features=trajectory.FEATURES | trajectory.TOP1, top1=0.01)
    assert verdict.status == PASS
    # Neither batch norm nor mirrored images, so four of the features are left out, and one more of TOP1.
    assert len(verdict.rows) == 1 + 8 + 2
    text = str(verdict)
    assert "float32, 2 runs of the port among 8 of the reference" in text
    assert (
        "once in 8000 runs" in text
        and "no 'reestimated_eval' is returned (see portproof.ladder.statistics.trajectory): evaluation" in text
    )
    assert set(rung.curves) == {"seed 0, loss", "seed 0, lr", "seed 1, loss", "seed 1, lr"}
    ref, port = rung.curves["seed 1, loss"]
    assert ref.shape == (4, 3) and port.shape == (3,)
    assert all(list(file) == list(rung.curves) for file in rung.files)
    np.testing.assert_array_equal(rung.files[0]["seed 1, loss"], ref[0])


def test_options_reach_both_sides():
    with pytest.raises(UserError, match="same losses"):
        toy("ref", "port", options={"kept": 1.0})  # no mask, so the draws are the same
    assert "no such digits {'kept': 0.5}" in str(toy("ref", "raises", options={"kept": 0.5}))


@pytest.mark.thorough("one wrong value, one wrong record, one end", but="^(no_decay|odd_eval|raises)")
@pytest.mark.parametrize(
    ("port", "item", "reason"),
    [
        ("no_decay", "norm of kernels", ""),
        ("other_rate", "lr", ""),
        ("more_steps", "steps of a run", "reference 30, port 33"),
        ("diverged", "loss, first third", "not finite: reference 0, port 1"),
        ("no_eval", "evaluation loss", "the port does not have it"),
        ("odd_eval", "record of a run of the port", "its 'eval' has shape (), not (3,)"),
        ("no_losses", "record of a run of the port", "no 'losses' (steps,)"),
        ("raises", "training runs of the port", "ValueError: no such digits {}"),
        ("dies", "training runs of the port", "it ended with status 7"),
        ("exits_with_2", "training runs of the port", "SystemExit: 2"),
        ("leaves_with_0", "training runs of the port", "it ended with status 0 before all runs were done"),
    ],
)
def test_a_faulty_port_fails_and_is_named(port, item, reason):
    verdict = toy("ref", port)
    assert verdict.status == FAIL
    assert item in {row.name for row in verdict.rows if row.status == FAIL}
    assert any(reason in row.reason for row in verdict.rows if row.name == item)
    if port == "raises":
        assert "Traceback" in str(verdict)


@pytest.mark.parametrize("sides", [("ref", "{}"), ("{}", "port")], ids=["port", "reference"])
@pytest.mark.parametrize(
    ("run", "message"),
    [("is_killed", "its process was killed: is there enough memory"), ("without_space", "this machine lacks it")],
)
def test_what_the_machine_lacks_fails_no_side(sides, run, message):
    with pytest.raises(UserError, match=message):
        toy(*(side.format(run) for side in sides))


@pytest.mark.parametrize("sides", [("ref", "not_filled_in"), ("not_filled_in", "port")])
def test_a_run_that_waits_to_be_filled_in_is_no_fault(sides):
    with pytest.raises(UserError, match="^fill in port_run in training.py: train the port$"):
        toy(*sides)


@pytest.mark.parametrize(
    ("ref", "kwargs", "message"),
    [
        ("raises", {}, "reference 'toy_training_runs:raises' failed: ValueError: no such digits"),
        ("dies", {}, "it ended with status 7"),
        ("returns_list", {}, "returned list, not a dict"),
        ("returns_text", {}, "'lr' with dtype <U4"),
        ("no_losses", {}, "no 'losses'"),
        ("diverged", {}, "no finite numbers above 0"),
        ("odd_eval", {}, r"its 'eval' has shape \(\), not \(3,\)"),
        ("same_masks", {}, "let `draw` seed"),
        ("other_keys", {}, "different keys or shapes"),
        ("no_lr", {"top1": 0.5}, "top1=0.5, but the reference's record has no 'eval'"),
        ("ref", {"options": {"x": object()}}, "written as JSON"),
        ("ref", {"seeds": (1, 1)}, "seeds must differ"),
        ("ref", {"seeds": ()}, r"seeds \[\], draws 4"),
        ("ref", {"draws": 2}, "be 4 or more"),
        ("absent", {}, "reference 'toy_training_runs:absent': toy_training_runs has no absent"),
    ],
)
def test_a_mistake_is_named(ref, kwargs, message):
    with pytest.raises(UserError, match=message):
        toy(ref, "port" if ref != "no_lr" else "no_lr", **kwargs)


@pytest.mark.parametrize(
    ("port", "message"),
    [
        ("no_such_module:run", "port 'no_such_module:run': No module named"),
        ("toy_training_runs", "port 'toy_training_runs' is no PKG.MOD:NAME"),
        (len, "is no PKG.MOD:NAME"),
    ],
)
def test_a_pair_that_cannot_be_imported_is_named(port, message):
    with pytest.raises(UserError, match=message):
        train("toy_training_runs:ref", port)


def test_losses_alone_are_judged_and_nothing_is_refused():
    verdict = toy("no_lr", "no_lr", seeds=(3,), draws=6)
    assert [row.name for row in verdict.rows] == [*list(trajectory.FEATURES)[:3], "norm of vectors"]
    assert toy("ref", "port", features={}).status == FAIL or toy("ref", "port", features={}).refusal


def test_what_no_feature_takes_is_said():
    line = "not judged, since no feature takes it (give `features` that do): dice"
    assert line in str(toy("more", "more", seeds=(3,), draws=6))
    dice = {"dice": trajectory.Feature(lambda record: float(record["dice"].mean()))}
    assert line not in str(toy("more", "more", seeds=(3,), draws=6, features=trajectory.FEATURES | dice))


def test_top1_that_is_not_reached_fails():
    failed = [row.name for row in toy("ref", "port", top1=0.999).rows if row.status == FAIL]
    assert failed == ["reference, mean top-1", "port, mean top-1"]


# float64


RATE = 0.02
X, Y = (np.random.default_rng(5).normal(size=shape).astype(np.float32) for shape in ((12, 8, 6), (12, 8, 1)))


class Ref(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        return self.two(torch.sin(self.one(x - self.mean)))


class Port(paddle.nn.Layer):
    def __init__(self, share=0.1, name="one"):
        super().__init__()
        self.share, self.one_name, self.two = share, name, paddle.nn.Linear(5, 1)
        setattr(self, name, paddle.nn.Linear(6, 5))
        self.register_buffer("mean", paddle.zeros([6]))

    def forward(self, x):
        self.mean.set_value(self.mean * (1 - self.share) + x.mean(0) * self.share)
        return self.two(paddle.sin(getattr(self, self.one_name)(x - self.mean)))


def start() -> dict[str, np.ndarray]:
    """Initial weights (out, in) and biases of the two linear layers."""
    rng = np.random.default_rng(6)
    shapes = {"one.weight": (5, 6), "one.bias": (5,), "two.weight": (1, 5), "two.bias": (1,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def ref_run(batches: Callable, dtype=torch.float64, rate=RATE) -> tuple[torch.nn.Module, list[float]]:
    model, losses = Ref(), []
    model.load_state_dict({k: torch.from_numpy(a) for k, a in start().items()}, strict=False)
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for x, y in batches(list(zip_strict(X, Y)), model):
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def port_run(batches: Callable, rate=RATE, share=0.1, name="one", data: Sequence = X, dtype="float64"):
    model, losses = Port(share, name), []
    for layer, prefix in ((getattr(model, name), "one"), (model.two, "two")):
        layer.weight.set_value(start()[f"{prefix}.weight"].T)
        layer.bias.set_value(start()[f"{prefix}.bias"])
    model.to(dtype=dtype)
    optimizer = paddle.optimizer.SGD(rate, parameters=model.parameters())
    for batch in batches([{"x": paddle.to_tensor(x), "y": y} for x, y in zip(data, Y)], model):
        loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return model, losses


def with_(run: Callable, **kwargs: Any) -> Callable:
    return lambda batches: run(batches, **kwargs)


def untrained(batches: Callable) -> tuple[paddle.nn.Layer, list[float]]:
    return with_(port_run, rate=0.0)(batches)


def failing(batches: Callable) -> None:
    raise ValueError("no such digits")


def test_a_faultless_pair_stays_together_in_float64():
    verdict = train_fp64(ref_run, port_run, what="normal numbers")
    assert verdict.status == PASS and [row.item.kind for row in verdict.rows].count("parameter") == 4
    assert "train mode, float64, 12 steps of normal numbers" in str(verdict)
    assert "moved by one ulp before each step" in str(verdict)
    assert max(row.difference for row in verdict.rows) > 0  # two programs that round differently


def test_names_that_differ_are_given():
    port = with_(port_run, name="first")
    assert train_fp64(ref_run, port, names={"one": "first"}).status == PASS
    assert train_fp64(ref_run, port).first_failure.name == "parameter/one.weight"
    with pytest.raises(UserError, match="names has 'three'"):
        train_fp64(ref_run, port, names={"three": "first"})


@pytest.mark.parametrize(
    ("port", "item", "reason"),
    [
        (with_(port_run, rate=RATE * (1 + 1e-7)), "loss", ""),
        (with_(port_run, share=0.1 + 1e-9), "mean", ""),
        (with_(port_run, data=X[:-1]), "loss", "shape: reference (12,), port (11,)"),
        (with_(port_run, dtype="float32"), "parameter/one.weight", "dtype: reference float64, port float32"),
        (untrained, "training in float64", "no parameter has moved"),
        (failing, "training in float64", "the port raised ValueError: no such digits"),
        (lambda batches: (Port(), [1.0]), "training in float64", "takes no batch"),
    ],
)
def test_a_faulty_port_fails_in_float64(port, item, reason):
    verdict = train_fp64(ref_run, port)
    failed = {row.name: row.reason for row in verdict.rows if row.status == FAIL}
    assert verdict.status == FAIL and item in failed and reason in failed[item]


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (failing, "the reference's training in float64 raised ValueError: no such digits"),
        (lambda batches: (Ref(), [1.0]), "takes no batch"),
        (lambda batches: None, "the reference's training in float64 raised TypeError"),
        (with_(ref_run, rate=0.0), "after 12 losses no parameter has moved"),
        (with_(ref_run, dtype=torch.float32), "one.weight is float32: train its model in float64"),
    ],
)
def test_a_reference_that_cannot_be_compared_with_is_named(ref, message):
    with pytest.raises(UserError, match=message):
        train_fp64(ref, port_run)


@pytest.mark.parametrize(
    ("moved", "reason"),
    [({"one": np.ones(3)}, "gives other values in another run"), ({"loss": np.zeros(2)}, "nothing above its rounding")],
)
def test_runs_in_which_nothing_can_be_compared_are_refused(moved, reason):
    rung = Rung("train", quiet=True)
    items = {LOSS: moved.get("loss", np.ones(2))}
    with pytest.raises(Ended):
        growth_of(rung, items, items | {Item(name): array for name, array in moved.items() if name != "loss"})
    assert reason in rung.verdicts[0].refusal


def test_a_reference_that_magnifies_rounding_or_diverges_is_refused():
    assert "does not stay within" in str(train_fp64(with_(ref_run, rate=3.0), port_run))
    diverged = train_fp64(with_(ref_run, rate=1e200), port_run)
    assert diverged.status == REFUSED and "NaN or infinity" in diverged.refusal


def test_a_model_with_a_gru_becomes_float64():
    """Paddle's own way raises; whole numbers stay."""

    class Net(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.gru, self.norm = paddle.nn.GRU(3, 4), paddle.nn.BatchNorm1D(5)
            self.register_buffer("count", paddle.to_tensor([7]))

        def forward(self, x):
            return self.norm(self.gru(x)[0])

    with pytest.raises(RuntimeError):
        Net().to(dtype="float64")
    net = ladder.to_float64(Net())
    assert {str(parameter.dtype) for parameter in net.parameters()} == {"paddle.float64"}
    assert net.count.dtype == paddle.int64
    output = net(paddle.ones([2, 5, 3], "float64"))
    assert output.dtype == paddle.float64
    output.sum().backward()
    paddle.optimizer.SGD(0.1, parameters=net.parameters()).step()
    assert ladder.to_float64(torch.nn.GRU(3, 4)).weight_ih_l0.dtype == torch.float64
    with pytest.raises(UserError, match="is no model"):
        ladder.to_float64(3)
