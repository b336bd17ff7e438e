"""`ladder.optimizer` and `ladder.schedule` on a small pair."""

from functools import partial

import paddle
import pytest
import torch

from portproof.compare import FAIL, PASS, REFUSED
from portproof.ladder.rungs.optimizers import optimizer, schedule
from sturdyio.cli import UserError


def pair(**port_names: str) -> tuple[torch.nn.Module, paddle.nn.Layer]:
    """Two linear layers and a batch norm on both sides, with equal weights; the port's may have other names."""
    torch.manual_seed(0)
    ref, port = torch.nn.Module(), paddle.nn.Layer()
    ref.fc, ref.norm, ref.head = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    layers = {"fc": paddle.nn.Linear(3, 4), "norm": paddle.nn.BatchNorm1D(4), "head": paddle.nn.Linear(4, 2)}
    for name, layer in layers.items():
        setattr(port, port_names.get(name, name), layer)
        for leaf in ("weight", "bias"):
            array = getattr(getattr(ref, name), leaf).detach().numpy()
            getattr(layer, leaf).set_value(array.T)
    return ref, port


def ref_sgd(model, lr=0.1, momentum=0.0, decay=0.0):
    return torch.optim.SGD(model.parameters(), lr, momentum, weight_decay=decay)


def port_sgd(model, lr=0.1, momentum=0.0, decay=0.0):
    kind = paddle.optimizer.Momentum if momentum else paddle.optimizer.SGD
    options = {"momentum": momentum} if momentum else {}
    return kind(lr, parameters=model.parameters(), weight_decay=decay or None, **options)


PLAIN = {"plain": {}, "faster": {"lr": 0.5}}


@pytest.mark.parametrize("port_names", [{}, {"fc": "first", "head": "last", "norm": "bn"}])
def test_equal_rules_pass_whatever_tensors_are_called(port_names):
    verdict = optimizer(*pair(**port_names), ref_sgd, port_sgd, recipes=PLAIN)
    assert verdict.status == PASS, str(verdict)
    assert [row.name for row in verdict.rows[:2]] == ["plain/parameter/fc.weight", "plain/parameter/fc.bias"]
    assert len(verdict.rows) == 12 and "at rate 0.1 and 0.5, float64" in str(verdict)


def test_without_recipes_there_is_one():
    verdict = optimizer(*pair(), ref_sgd, port_sgd, updates=1)
    assert verdict.status == PASS and len(verdict.rows) == 6


def test_settings_are_those_of_every_recipe_unless_it_has_its_own():
    seen = []

    def make(model, **settings):
        seen.append(settings)
        return port_sgd(model, **settings)

    verdict = optimizer(*pair(), ref_sgd, make, settings={"lr": 0.2, "momentum": 0.5}, recipes=PLAIN, updates=1)
    assert verdict.status == PASS and "at rate 0.2 and 0.5, float64" in str(verdict)
    assert seen == [{"lr": 0.2, "momentum": 0.5}, {"lr": 0.5, "momentum": 0.5}]
    seen.clear()
    assert optimizer(*pair(), ref_sgd, make, settings={"lr": 0.2}, updates=1).status == PASS
    assert seen == [{"lr": 0.2}]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: port_sgd(model, lr=0.1001),
        lambda model: port_sgd(model, momentum=0.5),
        lambda model: port_sgd(model, decay=1e-4),
        lambda model: paddle.optimizer.SGD(0.1, model.fc.parameters()),
    ],
)
def test_another_rule_fails(make):
    verdict = optimizer(*pair(), ref_sgd, make)
    assert verdict.status == FAIL and verdict.first_failure.item.kind == "parameter"


class NeverRectified:
    """RAdam as it is in its first five updates, for ever."""

    def __init__(self, model, lr):
        self.parameters = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        self.lr, self.done = lr, 0
        self.moments = [paddle.zeros_like(parameter) for parameter in self.parameters]

    def get_lr(self):
        return self.lr

    @paddle.no_grad()
    def step(self):
        self.done += 1
        for i, parameter in enumerate(self.parameters):
            self.moments[i] = 0.9 * self.moments[i] + 0.1 * parameter.grad
            parameter.set_value(parameter - self.lr / (1 - 0.9**self.done) * self.moments[i])


def test_a_formula_that_changes_at_the_sixth_update_is_compared():
    both = lambda model: torch.optim.RAdam(model.parameters(), 0.01), lambda model: NeverRectified(model, 0.01)
    assert optimizer(*pair(), *both).status == FAIL
    assert optimizer(*pair(), *both, updates=5).status == PASS


def test_a_schedule_steps_after_each_update():
    assert optimizer(*pair(), ref_step, port_step).status == PASS
    assert optimizer(*pair(), ref_step, lambda model: port_step(model, every=4)).status == FAIL
    assert optimizer(*pair(), ref_step, lambda model: port_step(model)[0]).status == FAIL


def test_unequal_weights_are_named_before_anything_is_updated():
    ref, port = pair()
    port.head.bias.set_value(port.head.bias + 1e-3)
    verdict = optimizer(ref, port, ref_sgd, port_sgd)
    assert verdict.status == FAIL and [row.name for row in verdict.rows] == ["weights/head.bias"]


def test_a_tensor_that_one_side_lacks_is_named():
    ref, port = pair()
    ref.extra = torch.nn.Linear(1, 1)
    verdict = optimizer(ref, port, ref_sgd, port_sgd)
    assert verdict.status == FAIL and verdict.first_failure.name == "weights/extra.weight"
    ref, port = pair()
    port.extra = paddle.nn.Linear(1, 1)
    assert "the reference does not have it" in str(optimizer(ref, port, ref_sgd, port_sgd))


def test_names_tell_apart_what_weights_do_not():
    def model(base, linear, norm, first, second):
        made = base()
        made.fc = linear(2, 2)
        setattr(made, first, norm(2))
        setattr(made, second, norm(2))
        return made

    ref = model(torch.nn.Module, torch.nn.Linear, torch.nn.BatchNorm1d, "a", "b")
    port = model(paddle.nn.Layer, paddle.nn.Linear, paddle.nn.BatchNorm1D, "x", "y")
    for leaf in ("weight", "bias"):
        getattr(port.fc, leaf).set_value(getattr(ref.fc, leaf).detach().numpy().T)

    def ref_of(made):
        return torch.optim.SGD([made.fc.weight, made.a.weight], 0.1)

    def port_of(made):
        return paddle.optimizer.SGD(0.1, [made.fc.weight, made.y.weight])

    assert optimizer(ref, port, ref_of, port_of).status == FAIL
    assert optimizer(ref, port, ref_of, port_of, names={"a": "y", "b": "x"}).status == PASS


def raises(model, **settings):
    raise RuntimeError("no such rule")


def test_whose_function_raises_is_said():
    with pytest.raises(UserError, match="the reference's optimizer raised RuntimeError: no such rule"):
        optimizer(*pair(), raises, port_sgd)
    verdict = optimizer(*pair(), ref_sgd, raises)
    assert verdict.status == FAIL and "the port raised RuntimeError: no such rule" in str(verdict)


def test_what_proves_nothing_is_refused():
    assert optimizer(*pair(), lambda m: ref_sgd(m, lr=0.0), lambda m: port_sgd(m, lr=0.0)).status == REFUSED
    with pytest.raises(UserError, match="updates 0"):
        optimizer(*pair(), ref_sgd, port_sgd, updates=0)
    with pytest.raises(UserError, match="the reference is a Linear, no torch.nn.Module"):
        optimizer(pair()[1].fc, pair()[1], ref_sgd, port_sgd)


def ref_step(model, lr=0.1, every=3):
    rule = ref_sgd(model, lr)
    return rule, torch.optim.lr_scheduler.StepLR(rule, every, 0.5)


def port_step(model, lr=0.1, every=3):
    rate = paddle.optimizer.lr.StepDecay(lr, every, 0.5)
    return port_sgd(model, rate), rate


def test_equal_schedules_are_equal_bit_for_bit():
    verdict = schedule(ref_step, port_step, steps=20, recipes={"slow": {}, "quick": {"every": 2}})
    assert verdict.status == PASS and "learning rates of 20 steps of the schedule" in str(verdict), str(verdict)
    assert [row.name for row in verdict.rows] == ["lr, slow", "lr, quick"] and verdict.rows[0].shape == (20,)
    assert [row.name for row in schedule(ref_step, port_step, steps=2).rows] == ["lr"]
    fixed = partial(ref_step, every=5)
    assert schedule(fixed, port_step, steps=20, settings={"every": 5}).status == PASS
    assert schedule(fixed, port_step, steps=20).status == FAIL


def test_a_rate_that_falls_elsewhere_or_never_fails():
    assert schedule(ref_step, lambda model: port_step(model, every=4), steps=5).status == FAIL

    def detached(model):
        return port_sgd(model, 0.1), paddle.optimizer.lr.StepDecay(0.1, 3, 0.5)

    assert schedule(ref_step, detached, steps=5).status == FAIL


def test_a_power_is_no_product_of_factors():
    def ref(model):
        rule = ref_sgd(model, 0.064)
        return rule, torch.optim.lr_scheduler.ExponentialLR(rule, 0.973)

    def port(model):
        rate = paddle.optimizer.lr.ExponentialDecay(0.064, 0.973)
        return port_sgd(model, rate), rate

    verdict = schedule(ref, port, steps=100)
    assert verdict.status == FAIL and verdict.rows[0].difference < 1e-16


def test_schedules_that_cannot_be_judged():
    with pytest.raises(UserError, match="the torch side has no schedule"):
        schedule(ref_sgd, port_step, steps=3)
    with pytest.raises(UserError, match="the reference's schedule raised RuntimeError"):
        schedule(raises, port_step, steps=3)
    with pytest.raises(UserError, match="steps 0"):
        schedule(ref_step, port_step, steps=0)
    assert schedule(ref_step, raises, steps=3).status == FAIL
    zero = schedule(lambda model: ref_step(model, 0.0), lambda model: port_step(model, 0.0), steps=3)
    assert zero.status == REFUSED


# Coefficients that Paddle's own optimizers keep in float32


def ref_adamw(model, lr=0.1):
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.1)


def port_adamw(model, lr=0.1):
    return paddle.optimizer.AdamW(lr, parameters=model.parameters(), weight_decay=0.1)


def test_float32_coefficients_are_allowed_for_unless_they_must_not_be():
    assert optimizer(*pair(), ref_adamw, port_adamw).status == PASS
    assert optimizer(*pair(), ref_adamw, port_adamw, coefficients="float64").status == FAIL


@pytest.mark.parametrize("lr", [0.125, 1e-3])
def test_coefficients_are_allowed_for_one_by_one(lr):
    """At 1e-3 the rounding of the rate and that of the momentum cancel in part where both are rounded."""
    verdict = optimizer(*pair(), lambda m: ref_sgd(m, lr, 0.9, 1e-3), lambda m: port_sgd(m, lr, 0.9, 1e-3), updates=8)
    assert verdict.status == PASS, str(verdict)


def test_no_more_than_the_rounding_of_coefficients_is_allowed():
    verdict = optimizer(*pair(), ref_adamw, lambda model: port_adamw(model, lr=0.1 * (1 + 2e-6)))
    assert verdict.status == FAIL, str(verdict)


def test_coefficients_are_of_a_precision():
    with pytest.raises(UserError, match="coefficients 'float16': choose one of float64, float32"):
        optimizer(*pair(), ref_adamw, port_adamw, coefficients="float16")
