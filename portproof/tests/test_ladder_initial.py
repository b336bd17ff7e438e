"""`init` sees whatever initial weights can have wrong, on either side, and names it."""

import math
import re

import numpy as np
import paddle
import pytest
import torch

from portproof.compare import FAIL, PASS, REFUSED
from portproof.ladder.rung import Rung
from portproof.ladder.rungs.initial import Constant, Normal, Uniform, init
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

CLASSES = 40


class Ref(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 32, 3)
        self.norm = torch.nn.BatchNorm2d(32)
        self.fc = torch.nn.Linear(32, CLASSES)
        self.scale = torch.nn.Parameter(torch.full((2,), 0.1), requires_grad=False)
        torch.nn.init.kaiming_normal_(self.conv.weight, mode="fan_out")


class Port(paddle.nn.Layer):
    head = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.conv = paddle.nn.Conv2D(3, 32, 3)
        self.norm = paddle.nn.BatchNorm2D(32)
        bound, uniform = 1 / math.sqrt(32), paddle.nn.initializer.Uniform
        fc = paddle.nn.Linear(32, CLASSES, uniform(-bound, bound), uniform(-bound, bound))
        self.add_sublayer(self.head, fc)
        self.scale = self.create_parameter([2], default_initializer=paddle.nn.initializer.Constant(0.1))
        self.scale.stop_gradient = True
        paddle.nn.initializer.Normal(0, math.sqrt(2 / (32 * 9)))(self.conv.weight)
        bound = 1 / math.sqrt(27)
        uniform(-bound, bound)(self.conv.bias)


def ref(seed: int) -> Ref:
    torch.manual_seed(seed)
    return Ref()


def port(seed: int, change=lambda model: None, cls=Port) -> Port:
    paddle.seed(seed)
    model = cls()
    change(model)
    return model


def expected(name: str, shape: tuple[int, ...], layer: str):
    if name == "scale":
        return Constant(0.1)
    if layer == "BatchNorm2d":
        return Constant(float(name in ("norm.weight", "norm.running_var")))
    if name == "conv.weight":
        return Normal(math.sqrt(2 / (shape[0] * math.prod(shape[2:]))))
    return Uniform(1 / math.sqrt(27 if layer == "Conv2d" else 32))


def failed(verdict) -> list[str]:
    return [row.name for row in verdict.rows if row.status == FAIL]


def test_a_faultless_pair_passes_and_its_report_says_what_was_looked_at():
    rung = Rung("init", quiet=True)
    verdict = init(ref, port, expected, rung=rung)
    assert verdict.status == PASS, str(verdict)
    names = {row.name for row in verdict.rows}
    assert {"conv.weight/std", "fc.bias/quantiles", "scale/all 0.1", "norm.num_batches_tracked/all 0"} <= names
    assert {"conv.weight/other tensors", "fc.weight/same seed again", "fc.bias/correlation, seeds"} <= names
    assert "PASS init: all" in str(verdict) and "port, against the exact distributions" in str(verdict)
    mine, its = rung.files
    assert mine.keys() - its.keys() == {"norm.num_batches_tracked/mean", "norm.num_batches_tracked/std"}
    assert mine["fc.weight/std"] == pytest.approx(1 / math.sqrt(32 * 3), rel=0.05)
    assert mine["fc.weight/std"] != its["fc.weight/std"]


def test_draws_follow_the_seed_that_is_given():
    rungs = [Rung("init", quiet=True) for _ in range(3)]
    for rung, seed in zip_strict(rungs, (0, 0, 1)):
        init(ref, port, expected, seed=seed, rung=rung)
    first, again, other = (rung.files[1]["fc.weight/std"] for rung in rungs)
    assert first == again != other


def wrong_fan(model: Port) -> None:
    paddle.nn.initializer.Normal(0, math.sqrt(2 / 27))(model.conv.weight)


def set_to(name: str, array) -> object:
    """A change that gives a tensor the array that `array(shape)` makes."""

    def change(model: Port) -> None:
        tensor = model.state_dict()[name]
        tensor.set_value(np.asarray(array(tuple(tensor.shape)), np.float32))

    return change


def one_draw_for_two(model: Port) -> None:
    values = model.conv.weight.numpy().ravel()
    model.fc.weight.set_value(np.resize(values / values.max() / math.sqrt(32), (32, CLASSES)))


FAULTS = {
    "fan-in for fan-out": (wrong_fan, "conv.weight/std"),
    "normal for uniform": (
        lambda model: paddle.nn.initializer.Normal(0, 1 / math.sqrt(96))(model.fc.weight),
        "fc.weight/largest",
    ),
    "bias zero": (lambda model: paddle.nn.initializer.Constant(0)(model.fc.bias), "fc.bias/quantiles"),
    "norm weight zero": (lambda model: paddle.nn.initializer.Constant(0)(model.norm.weight), "norm.weight/all 1"),
    "buffer": (set_to("norm._variance", lambda shape: np.full(shape, 2)), "norm.running_var/all 1"),
    "frozen parameter": (set_to("scale", lambda shape: np.full(shape, 0.2)), "scale/all 0.1"),
    "not a number": (set_to("fc.bias", lambda shape: np.full(shape, np.nan)), "fc.bias/quantiles"),
    "seed not followed": (
        set_to("conv.weight", lambda shape: np.random.default_rng().normal(0, math.sqrt(2 / 288), shape)),
        "conv.weight/same seed again",
    ),
    "one draw for all seeds": (
        set_to("conv.weight", lambda shape: np.random.default_rng(0).normal(0, math.sqrt(2 / 288), shape)),
        "conv.weight/correlation, seeds",
    ),
    "one filter for all": (
        lambda model: model.conv.weight.set_value(model.conv.weight[:1].expand(model.conv.weight.shape)),
        "conv.weight/correlation, axis 0",
    ),
    "one draw for two tensors": (one_draw_for_two, "fc.weight/other tensors"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_port_is_named(name):
    change, item = FAULTS[name]
    verdict = init(ref, lambda seed: port(seed, change), expected)
    assert item in failed(verdict)
    tensor = item.partition("/")[0]
    if "other" not in item:
        assert {row.partition("/")[0] for row in failed(verdict)} == {tensor}


def test_a_fault_of_the_reference_is_named():
    def other(name: str, shape: tuple[int, ...], layer: str):
        return Normal(0.5) if name == "fc.weight" else expected(name, shape, layer)

    verdict = init(ref, port, other)
    assert "fc.weight/std" in failed(verdict)
    assert re.search(r"reference, against the exact distributions\n  FAIL", str(verdict))


def test_a_tensor_on_one_side_only_fails():
    class Renamed(Port):
        head = "classifier"

    verdict = init(ref, lambda seed: port(seed, cls=Renamed), expected)
    reasons = {row.name: row.reason for row in verdict.rows if row.status == FAIL}
    assert reasons["fc.weight/quantiles"] == "the port does not have it"
    assert reasons["structure/classifier.weight"] == "the reference does not have it"
    assert init(ref, lambda seed: port(seed, cls=Renamed), expected, names={"fc": "classifier"}).status == PASS


def test_a_tensor_of_another_shape_fails():
    def change(model: Port) -> None:
        model.fc = paddle.nn.Linear(32, CLASSES + 1)

    assert "fc.weight/quantiles" in failed(init(ref, lambda seed: port(seed, change), expected))


def test_nothing_drawn_proves_nothing():
    verdict = init(
        lambda seed: torch.nn.BatchNorm1d(4),
        lambda seed: paddle.nn.BatchNorm1D(4),
        lambda name, shape, layer: Constant(float(name in ("weight", "running_var"))),
    )
    assert verdict.status == REFUSED
    assert "no parameter is drawn" in verdict.refusal


def test_two_seeds_are_the_least_number_of_them():
    def tiny_ref(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Linear(2, 2)

    def tiny_port(seed: int) -> paddle.nn.Layer:
        paddle.seed(seed)
        return paddle.nn.Linear(2, 2)

    verdict = init(tiny_ref, tiny_port, lambda name, shape, layer: Uniform(1 / math.sqrt(2)), seeds=2)
    assert {"weight/quantiles", "bias/quantiles"} <= set(failed(verdict))  # of 256 models


# Both sides from one NumPy draw.


def shared_arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"weight": rng.normal(0, 0.1, (40, 32)).astype("f4"), "bias": np.zeros(40, "f4")}


def shared_ref(seed: int) -> torch.nn.Module:
    model = torch.nn.Linear(32, 40)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in shared_arrays(seed).items()})
    return model


def shared_port(seed: int, wrong=None) -> paddle.nn.Layer:
    model, arrays = paddle.nn.Linear(32, 40), shared_arrays(seed)
    if wrong:
        wrong(arrays)
    model.weight.set_value(np.ascontiguousarray(arrays["weight"].T))
    model.bias.set_value(arrays["bias"])
    return model


def shared_expected(name: str, shape: tuple[int, ...], layer: str):
    return Normal(0.1) if name == "weight" else Constant(0)


def test_one_draw_for_both_sides_is_compared_bit_for_bit():
    rung = Rung("init", quiet=True)
    verdict = init(shared_ref, shared_port, shared_expected, shared=True, rung=rung)
    assert verdict.status == PASS
    assert {"weight/shared draw", "bias/shared draw", "weight/std"} <= {row.name for row in verdict.rows}
    assert rung.files == ({}, {})

    def one_bit(arrays: dict) -> None:
        arrays["weight"][-1, -1] = np.nextafter(arrays["weight"][-1, -1], np.float32(1))

    verdict = init(shared_ref, lambda seed: shared_port(seed, one_bit), shared_expected, shared=True)
    assert failed(verdict) == ["weight/shared draw"]


def test_a_wrong_draw_is_seen_though_both_sides_have_it():
    verdict = init(
        shared_ref, shared_port, lambda name, *_: Normal(0.12) if name == "weight" else Constant(0), shared=True
    )
    assert "weight/std" in failed(verdict)
    assert "weight/shared draw" not in failed(verdict)


# What a caller or a port can get wrong.


def raising(seed: int):
    raise RuntimeError("no such layer")


def test_a_reference_that_raises_is_named():
    with pytest.raises(UserError, match="the reference's initial weights raised RuntimeError: no such layer"):
        init(raising, port, expected)


def test_a_port_that_raises_fails():
    verdict = init(ref, raising, expected)
    assert verdict.status == FAIL
    assert "the port raised RuntimeError: no such layer" in str(verdict)


def test_what_is_no_model_is_named():
    with pytest.raises(UserError, match=r"the reference's .* returned a dict, no torch\.nn\.Module"):
        init(lambda seed: {}, port, expected)
    assert "returned a Ref, no paddle.nn.Layer" in str(init(ref, ref, expected))


def test_expected_must_say_something_of_every_tensor():
    with pytest.raises(UserError, match=r"expected gives None for conv\.weight: return Normal, Uniform or Constant"):
        init(ref, port, lambda name, shape, layer: None)


@pytest.mark.parametrize("seeds", [0, 1])
def test_one_seed_shows_nothing(seeds):
    with pytest.raises(UserError, match="give 2 or more"):
        init(ref, port, expected, seeds=seeds)


def test_an_empty_tensor_is_named():
    with pytest.raises(UserError, match="weight is empty"):
        init(lambda seed: torch.nn.Linear(0, 3), port, expected)


# Without laws: against what the reference draws


def scaled(factor: float):
    def change(model: Port) -> None:
        model.fc.weight.set_value(model.fc.weight * factor)

    return change


def shifted(model: Port) -> None:
    model.fc.weight.set_value(model.fc.weight + 0.05)


def normal(model: Port) -> None:
    """Of the same deviation as the uniform one."""
    paddle.nn.initializer.Normal(0, 1 / math.sqrt(3 * 32))(model.fc.weight)


def repeated(model: Port) -> None:
    model.fc.weight.set_value(model.fc.weight[:, :1].expand([32, CLASSES]))


def other_constant(model: Port) -> None:
    model.norm.weight.set_value(paddle.full([32], 0.9))


def test_without_laws_a_faultless_pair_passes_under_any_seed():
    for seed in range(5):
        verdict = init(ref, port, seed=seed)
        assert verdict.status == PASS, str(verdict)
    assert "port, against what the reference draws" in str(verdict)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (scaled(1.2), "std of fc.weight"),
        (shifted, "mean of fc.weight"),
        (normal, "magnitude of fc.weight"),
        (repeated, "correlation, axis 0 of fc.weight"),
        (other_constant, "all 1 of norm.weight"),
    ],
)
def test_without_laws_a_fault_is_named(change, named):
    verdict = init(ref, lambda seed: port(seed, change))
    what, _, tensor = named.rpartition(" of ")
    assert verdict.status == FAIL and f"{tensor}/{what}" in [
        str(row.item) for row in verdict.rows if row.status == FAIL
    ]


def test_without_laws_a_gain_is_told():
    """The spread comes first, as that of a law does, and its factor says what is behind it."""
    verdict = init(ref, lambda seed: port(seed, scaled(math.sqrt(6))))
    assert "first difference: fc.weight/std" in str(verdict)
    assert "the port's number there is near the root of 6 times the reference's: kaiming_uniform_" in str(verdict)


def test_without_laws_a_computed_table_may_round():
    def with_table(model, array):
        if isinstance(model, torch.nn.Module):
            model.register_buffer("table", torch.tensor(array))
        else:
            model.register_buffer("table", paddle.to_tensor(array))
        return model

    table = np.linspace(0, 1, 50).astype(np.float32)
    for off, status in ((1e-7, PASS), (1e-4, FAIL)):  # of 50 rows 4.8e-5 is allowed
        verdict = init(
            lambda seed: with_table(ref(seed), table),
            lambda seed, off=off: with_table(port(seed), (table + np.float32(off)).astype(np.float32)),
        )
        assert verdict.status == status, str(verdict)


class Small(torch.nn.Module):
    def __init__(self, std: float) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(16, 3)
        torch.nn.init.normal_(self.fc.weight, std=std)
        torch.nn.init.zeros_(self.fc.bias)


class SmallPort(paddle.nn.Layer):
    def __init__(self, std: float) -> None:
        super().__init__()
        weight = paddle.nn.initializer.Normal(0, std)
        self.fc = paddle.nn.Linear(16, 3, weight, paddle.nn.initializer.Constant(0.0))


def small(std: float, port_std: float):
    def make_ref(seed: int) -> Small:
        torch.manual_seed(seed)
        return Small(std)

    def make_port(seed: int) -> SmallPort:
        paddle.seed(seed)
        return SmallPort(port_std)

    return make_ref, make_port


@pytest.mark.parametrize("law", [None, lambda name, shape, layer: Normal(0.02) if shape == (3, 16) else Constant(0.0)])
def test_small_tensors_are_drawn_until_their_std_can_be_judged(law):
    assert init(*small(0.02, 0.02), law).status == PASS
    for std in (0.04, 0.025, 0.016):
        wrong = init(*small(0.02, std), law)
        assert wrong.status == FAIL and "fc.weight/std" in failed(wrong)


def test_a_constant_that_the_port_draws_is_named_alone():
    """Its 32 values would take more models of the port, and its other constants be more than the reference's."""
    weight = paddle.nn.initializer.Normal(0, 0.02)
    uniform = paddle.nn.initializer.Uniform(-0.1, 0.1)

    def make_ref(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.LayerNorm(8))
        torch.nn.init.normal_(model[0].weight, std=0.02)
        torch.nn.init.zeros_(model[0].bias)
        return model

    def make_port(seed: int) -> paddle.nn.Layer:
        paddle.seed(seed)
        return paddle.nn.Sequential(paddle.nn.Linear(64, 32, weight, uniform), paddle.nn.LayerNorm(8))

    wrong = failed(init(make_ref, make_port))
    assert wrong and {name.rpartition("/")[0] for name in wrong} == {"0.bias"}


def test_a_tensor_that_is_drawn_too_seldom_is_not_judged(monkeypatch):
    from portproof.ladder.rungs import initial

    monkeypatch.setattr(initial, "MOST_MODELS", 10)
    verdict = init(*small(0.02, 0.04))
    assert verdict.status == REFUSED
    assert "fc.weight is not judged: 1568 of 2048 values are missing after 10 models or 120 s" in str(verdict)
    assert not any("fc.weight" in row.name for row in verdict.rows)
