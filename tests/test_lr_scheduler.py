"""The schedules of both sides: torchvision's recipe to the last bit, attached to the optimizer, resumed anywhere."""

import itertools
import math
import warnings

import numpy as np
import paddle
import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

import mobilenetv3_paddle.train.lr_scheduler
import mobilenetv3_paddle.train.optimizer
import mobilenetv3_ref.train.lr_scheduler
import mobilenetv3_ref.train.optimizer
from mobilenetv3_common.arguments import Schedule

EPOCHS = 600
KINDS = {
    "steplr": [{"lr_step_size": 2, "lr_gamma": 0.973}, {"lr_step_size": 30, "lr_gamma": 0.1}],
    "exponentiallr": [{"lr_gamma": 0.973}, {"lr_gamma": 1.01}],
    "cosineannealinglr": [{}, {"lr_min": 0.03}, {"lr_min": 1e-5}],
}
WARMUPS = [
    {},
    *(
        {"lr_warmup_epochs": epochs, "lr_warmup_method": method, "lr_warmup_decay": decay}
        for method, (epochs, decay) in itertools.product(("linear", "constant"), ((1, 0.5), (5, 0.01), (7, 1 / 3)))
    ),
]
RECIPES = [  # those of step 05 among them
    {"lr_scheduler": kind, **options, **warmup}
    for kind, each in KINDS.items()
    for options, warmup in itertools.product(each, WARMUPS)
]


def label(recipe: dict) -> str:
    return " ".join(str(value) for value in recipe.values())


def torchvisions(optimizer: torch.optim.Optimizer, recipe: dict) -> torch_schedules.LRScheduler:
    """What references/classification/train.py of torchvision builds, written again from its text."""
    epochs = recipe.get("epochs", EPOCHS)
    warmup_epochs, decay = recipe.get("lr_warmup_epochs", 0), recipe.get("lr_warmup_decay", 0.01)
    if recipe["lr_scheduler"] == "steplr":
        main = torch_schedules.StepLR(optimizer, step_size=recipe["lr_step_size"], gamma=recipe["lr_gamma"])
    elif recipe["lr_scheduler"] == "cosineannealinglr":
        main = torch_schedules.CosineAnnealingLR(
            optimizer, T_max=epochs - warmup_epochs, eta_min=recipe.get("lr_min", 0.0)
        )
    else:
        main = torch_schedules.ExponentialLR(optimizer, gamma=recipe["lr_gamma"])
    if not warmup_epochs:
        return main
    if recipe["lr_warmup_method"] == "linear":
        warmup = torch_schedules.LinearLR(optimizer, start_factor=decay, total_iters=warmup_epochs)
    else:
        warmup = torch_schedules.ConstantLR(optimizer, factor=decay, total_iters=warmup_epochs)
    return torch_schedules.SequentialLR(optimizer, schedulers=[warmup, main], milestones=[warmup_epochs])


def torch_sgd(lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr)


def rates(scheduler, get_lr, count: int = EPOCHS) -> list[float]:
    """The rate of each epoch."""
    result = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch minds a schedule that steps although the optimizer does not
        for _ in range(count):
            result.append(get_lr())
            scheduler.step()
    return result


def torch_rates(build, lr: float) -> list[float]:
    optimizer = torch_sgd(lr)
    return rates(build(optimizer), lambda: optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("recipe", RECIPES, ids=label)
@pytest.mark.parametrize("lr", [0.064, 0.1, 1 / 3])
def test_torchvisions_schedule_to_the_last_bit(recipe, lr):
    expected = torch_rates(lambda optimizer: torchvisions(optimizer, recipe), lr)
    build = mobilenetv3_ref.train.lr_scheduler.build_lr_scheduler
    assert torch_rates(lambda optimizer: build(optimizer, Schedule(epochs=EPOCHS, **recipe)), lr) == expected
    port = mobilenetv3_paddle.train.lr_scheduler.build_lr_scheduler(lr, Schedule(epochs=EPOCHS, **recipe))
    assert rates(port, port) == expected


@pytest.mark.parametrize("epochs", [1, 2, 3, 10])
def test_a_cosine_goes_up_again_after_its_end(epochs):
    """Where the recursion would divide by zero."""
    recipe = {"lr_scheduler": "cosineannealinglr", "lr_min": 1e-3, "epochs": epochs}
    expected = torch_rates(lambda optimizer: torchvisions(optimizer, recipe), 0.064)
    port = mobilenetv3_paddle.train.lr_scheduler.build_lr_scheduler(0.064, Schedule(**recipe))
    assert rates(port, port) == expected


def test_what_the_schedules_are():
    """By definition, so that torch is not the only witness."""

    def build(lr: float, **options):
        return mobilenetv3_paddle.train.lr_scheduler.build_lr_scheduler(lr, Schedule(**options))

    schedule = build(1.0, epochs=25, lr_scheduler="cosineannealinglr", lr_warmup_epochs=5, lr_warmup_decay=0.5)
    expected = [0.5] * 5 + [(1 + math.cos(math.pi * t / 20)) / 2 for t in range(21)]
    np.testing.assert_allclose(rates(schedule, schedule, 26), expected, atol=1e-15)
    linear = {"lr_warmup_epochs": 4, "lr_warmup_method": "linear", "lr_warmup_decay": 0.2}
    schedule = build(1.0, lr_scheduler="steplr", lr_step_size=2, lr_gamma=0.5, **linear)
    np.testing.assert_allclose(rates(schedule, schedule, 9), [0.2, 0.4, 0.6, 0.8, 1, 1, 0.5, 0.5, 0.25], rtol=1e-15)
    schedule = build(1.0, lr_scheduler="exponentiallr", lr_gamma=0.5, **linear)
    np.testing.assert_allclose(rates(schedule, schedule, 7), [0.2, 0.4, 0.6, 0.8, 1, 0.5, 0.25], rtol=1e-15)


@pytest.mark.parametrize("recipe", RECIPES, ids=label)
@pytest.mark.parametrize("epoch", [0, 1, 3, 4, 5, 6, 7, 8, 31])
def test_a_resumed_schedule_goes_on_as_the_unbroken_one(recipe, epoch):
    """From before, in and after the warm-up; the state is plain numbers."""
    build = mobilenetv3_paddle.train.lr_scheduler.build_lr_scheduler
    unbroken = build(0.064, Schedule(epochs=EPOCHS, **recipe))
    expected = rates(unbroken, unbroken, epoch + 40)[epoch:]
    broken = build(0.064, Schedule(epochs=EPOCHS, **recipe))
    for _ in range(epoch):
        broken.step()
    state = broken.state_dict()
    assert {type(value) for value in state.values()} <= {int, float}
    resumed = build(0.064, Schedule(epochs=EPOCHS, **recipe))
    resumed.set_state_dict(state)
    assert rates(resumed, resumed, 40) == expected


def moves(package, recipe: dict) -> list[float]:
    """How far a parameter whose gradient is 1 moves in each of 12 epochs, in float64, under SGD without momentum."""
    if package is mobilenetv3_ref:
        model, zero = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64), torch.zeros([1, 1])
    else:
        model, zero = paddle.nn.Linear(1, 1, bias_attr=False), paddle.zeros([1, 1], "float64")
        model.to(dtype="float64")
    load = model.load_state_dict if package is mobilenetv3_ref else model.set_state_dict
    build = package.train.optimizer.build_optimizer
    optimizer, schedule = build(model, lr=0.064, momentum=0.0, weight_decay=0.0, epochs=12, **recipe)
    result = []
    for _ in range(12):
        load({"weight": zero})
        model.weight.grad = None
        model.weight.sum().backward()
        optimizer.step()
        schedule.step()
        result.append(-model.weight.item())
    return result


@pytest.mark.parametrize("package", [mobilenetv3_ref, mobilenetv3_paddle], ids=["reference", "port"])
@pytest.mark.parametrize("recipe", RECIPES, ids=label)
def test_the_optimizer_moves_by_the_schedules_rate(package, recipe):
    oracle = torch_sgd(0.064)
    scheduler = torchvisions(oracle, {**recipe, "epochs": 12})
    assert moves(package, recipe) == rates(scheduler, lambda: oracle.param_groups[0]["lr"], 12)


@pytest.mark.parametrize("package", [mobilenetv3_ref, mobilenetv3_paddle], ids=["reference", "port"])
@pytest.mark.parametrize("wrong", [{"lr_scheduler": "cosine"}, {"lr_warmup_method": "slow", "lr_warmup_epochs": 1}])
def test_an_unknown_name_is_refused(package, wrong):
    first = torch_sgd(0.1) if package is mobilenetv3_ref else 0.1
    with pytest.raises(ValueError, match="choose"):
        package.train.lr_scheduler.build_lr_scheduler(first, Schedule(**wrong))
