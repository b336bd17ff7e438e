"""The rungs of optimizers and schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.backends.model import BackendModel
from portproof.compare import Item, Verdict
from portproof.compare.ruler import Distances, Ruler, distances
from portproof.ladder.rung import QUIET, Rung, check_coefficients, equal_pair, on_rung
from portproof.ladder.rungs.training_step import Start, Trained, starts
from sturdyio.cli import UserError

Make = Callable[..., Any]  # (model, **settings) -> optimizer, or (optimizer, schedule)
Drawn = Sequence[Mapping[str, np.ndarray]]  # the gradients of each update
Recipes = Mapping[str, Mapping[str, Any]]


def _made(make: Make, settings: Mapping[str, Any], model: Any) -> tuple[Callable[[], Any], Any, Any]:
    """(what updates, optimizer, schedule or None)."""
    made = make(model, **settings)
    optimizer, schedule = made if isinstance(made, tuple) else (made, None)
    return optimizer.step, optimizer, schedule


def _all(recipes: Recipes | None, settings: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {name: {**(settings or {}), **own} for name, own in (recipes or {"": {}}).items()}


@on_rung
def optimizer(
    ref: Any,
    port: Any,
    make_ref: Make,
    make_port: Make,
    *,
    settings: Mapping[str, Any] | None = None,
    recipes: Recipes | None = None,
    updates: int = 8,
    seed: int = 0,
    coefficients: str = "float32",
    names: Mapping[str, str] | None = None,
    device: str = "cpu",
    rung: Rung = QUIET,
) -> None:
    """Compare every parameter after some updates with the same drawn gradients, in float64.

    No network magnifies rounding: each parameter may be SEMANTIC_RTOL of its largest value off. `ref` and `port` are
    models with equal weights, of which copies are trained. `make_ref(model, **settings)` and `make_port` return an
    optimizer, or (optimizer, schedule); a schedule steps after each update. `recipes` is {name: settings}, each on top
    of `settings`; `names` {reference's module: port's}, where neither names nor weights tell. A formula that changes
    after more `updates` is not seen: momentum shows from the second on, RAdam's rectification from the sixth. With
    `coefficients` "float32" a parameter may also be as far off as rounding them so moves it: PaddlePaddle's own
    optimizers keep them in float32.
    """
    check_coefficients(coefficients)
    if updates < 1:
        raise UserError(f"updates {updates}: choose 1 or more")
    pair = equal_pair(rung, ref, port, names, device)
    rng = np.random.default_rng([seed, 9])
    assert isinstance(pair.ref, BackendModel)  # see `equal_pair`
    start = pair.ref.backend.arrays_of(pair.ref.model).parameters()
    drawn = [{name: rng.normal(size=array.shape) for name, array in start.items()} for _ in range(updates)]
    rows, rates = [], {}
    for name, every in _all(recipes, settings).items():
        sides = starts(pair, partial(_made, make_ref, every), partial(_made, make_port, every))
        both = rung.observe("optimizer", _updated, *sides, drawn)
        if both is None:
            continue
        (rate, of_ref), (_, of_port) = both
        rates[rate] = f"{rate:g}"
        if not of_ref.largest_update():
            rung.refuse(f"the reference's optimizer{name and f' {name}'} moves no parameter")
        rounded = partial(_rounded, rung, of_ref, sides[0], drawn) if coefficients == "float32" else None
        ruler = Ruler(of_ref.parameters(), rounded=rounded)
        rows += ruler.compare(of_port.parameters(), section=name).rows
    every_rate = " and ".join(rates.values())
    title = f"parameters after {updates} updates with drawn gradients at rate {every_rate}, float64"
    rung.check(Verdict(title, rows), group=lambda item: item.section or item.kind)


def _updated(start: Start, drawn: Drawn, rounded: tuple[str, int] | None = None) -> tuple[float, Trained]:
    run = start("float64", rounded)
    rate = run.backend.training.learning_rate(run.optimizer)
    with run.backend.runs.new_tensors("float64"):
        for gradients in drawn:
            run.arrays.set_gradients({k: gradients[key] for k, key in run.keys.items() if key in gradients})
            run.round_coefficient()
            run.function()
            run.end_iteration()
    return rate, run


def _rounded(rung: Rung, ref: Trained, start: Start, drawn: Drawn) -> list[Distances]:
    found: list[Distances] = []
    for coefficient in ref.coefficients():
        _, run = rung.of_ref("optimizer", _updated, start, drawn, coefficient)
        found.append(distances(ref.parameters(), run.parameters()))
    return found


@on_rung
def schedule(
    make_ref: Make,
    make_port: Make,
    *,
    steps: int,
    settings: Mapping[str, Any] | None = None,
    recipes: Recipes | None = None,
    device: str = "cpu",
    rung: Rung = QUIET,
) -> None:
    """Compare the learning rate at each step of a schedule, bit for bit: how far it moves a weight whose gradient is 1.

    So a schedule that was never attached to its optimizer shows. `make_ref(model, **settings)` and `make_port` return
    (optimizer, schedule) for a linear layer of one weight, float64: plain SGD, without momentum and weight decay.
    `settings` and `recipes` are as in `optimizer`.
    """
    if steps < 1:
        raise UserError(f"steps {steps}: choose 1 or more")
    ref: dict[Item, np.ndarray] = {}
    port: dict[Item, np.ndarray] = {}
    for name, every in _all(recipes, settings).items():
        item = Item(f"lr, {name}" if name else "lr", "lr")
        ref[item] = rung.of_ref("schedule", _moves, backend("torch"), device, make_ref, every, steps)
        if not ref[item].any():
            rung.refuse(f"the reference's optimizer never moves the weight: {item}")
        moves = rung.of_port("schedule", _moves, backend("paddle"), device, make_port, every, steps)
        port |= {} if moves is None else {item: moves}
    rung.compare(ref, port, title=f"learning rates of {steps} steps of the schedule")


def _moves(backend: Backend, device: str, make: Make, settings: Mapping[str, Any], steps: int) -> np.ndarray:
    model = backend.training.to_device(backend.framework.nn.Linear(1, 1), backend.device(device), "float64")
    _, optimizer, schedule = _made(make, settings, model)
    if schedule is None:
        raise UserError(f"the {backend.name} side has no schedule: return (optimizer, schedule)")
    device, moves = backend.device_of(model.weight), np.empty(steps)
    weight_gradient = backend.tensor(np.ones((1, 1)), device)
    bias_gradient = backend.tensor(np.zeros(1), device)
    for step in range(steps):
        backend.set_value(model.weight, np.zeros((1, 1)))
        model.weight.grad, model.bias.grad = weight_gradient, bias_gradient
        optimizer.step()
        schedule.step()
        moves[step] = -backend.to_array(model.weight).item()
    return moves
