"""The rungs of optimizers and schedules: the same drawn gradients, the same epochs, on both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.compare import Item, compare, tensor_item
from portproof.compare.tolerances import SEMANTIC_RTOL, exact_atol, largest, with_coefficients
from portproof.io.cli import UserError
from portproof.ladder.pairs.sides import Sides, check_coefficients
from portproof.ladder.rung import Rung, on_rung
from portproof.python39 import zip_strict

Make = Callable[..., Any]  # (model, **settings) -> optimizer, or (optimizer, schedule)
Recipes = Mapping[str, Mapping[str, Any]]


def _made(make: Make, model: Any, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """(optimizer, schedule or None)."""
    made = make(model, **settings)
    return made if isinstance(made, tuple) else (made, None)


def _all(recipes: Recipes | None, settings: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """{name: all settings of the recipe}."""
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
    updates: int = 4,
    seed: int = 0,
    coefficients: str = "float32",
    names: Mapping[str, str] | None = None,
    device: str = "cpu",
    rung: Rung,
) -> None:
    """Every parameter after some updates with the same drawn gradients, float64: no network magnifies rounding.

    `ref` and `port` are models with equal weights, of which copies are trained. `make_ref(model, **settings)` and
    `make_port` return an optimizer of that model, or (optimizer, schedule); a schedule steps after each update.
    `recipes`, {name: settings}, are several settings at once, on top of `settings`. `names`, {reference's module:
    port's module}, says what neither names nor weights tell. Each parameter may be SEMANTIC_RTOL of its largest value
    off, and with `coefficients` "float32" as far as coefficients change it that are rounded so: PaddlePaddle's own
    optimizers keep them in float32. Raises UserError for what is no model, and for what the reference's side raises.
    """
    check_coefficients(coefficients)
    if updates < 1:
        raise UserError(f"updates {updates}: choose 1 or more")
    sides = Sides.of(rung, ref, port, names, device)
    if sides is None:
        return
    rng = np.random.default_rng([seed, 9])
    start = sides.ref.backend.parameters(sides.ref.model)
    drawn = [{name: rng.normal(size=array.shape) for name, array in start.items()} for _ in range(updates)]
    moved, rates, atol = ({}, {}), {}, {}
    for name, every in _all(recipes, settings).items():
        rate, found, optimizer_of_ref = rung.of_ref("optimizer", _updated, sides, 0, make_ref, every, drawn)
        own_atol = {key: SEMANTIC_RTOL * largest(array) for key, array in found.items()}
        if coefficients == "float32":
            names = sides.ref.backend.coefficients(optimizer_of_ref)
            runs = [_updated(sides, 0, make_ref, every, drawn, rounded=name)[1] for name in names]
            own_atol = with_coefficients(own_atol, found, runs)
        atol |= {tensor_item(key, "parameter", section=name): limit for key, limit in own_atol.items()}
        rates[rate] = f"{rate:g}"
        if all(np.array_equal(array, start[key]) for key, array in found.items()):
            rung.refuse(f"the reference's optimizer{name and f' {name}'} moves no parameter")
        _, port_found, _ = rung.of_port("optimizer", _updated, sides, 1, make_port, every, drawn) or (rate, {}, None)
        for side, arrays in zip_strict(moved, (found, port_found)):
            side.update({tensor_item(key, "parameter", section=name): array for key, array in arrays.items()})
    title = f"parameters after {updates} updates with drawn gradients at rate {' and '.join(rates.values())}, float64"
    rung.check(compare(*moved, atol, title=title), group=lambda item: item.section or item.kind)


def _updated(
    sides: Sides,
    i: int,
    make: Make,
    settings: Mapping[str, Any],
    drawn: Sequence[Mapping[str, np.ndarray]],
    rounded: tuple[str, int] | None = None,
) -> tuple[float, dict[str, np.ndarray], Any]:
    """(the first rate, parameters after an update with each of the `drawn` gradients), by the reference's keys.

    Then the optimizer. The reference may have one of its coefficients `rounded` to float32.
    """
    wrapped, keys = (sides.ref, sides.port)[i], sides.keys(i)
    model, backend = wrapped.copied("", "float64", train=True), wrapped.backend
    backend.keep_slots(model)
    with backend.new_tensors("float64"):
        optimizer, schedule = _made(make, model, settings)
        rate = backend.learning_rate(optimizer)
        for gradients in drawn:
            own = {name: gradients[key] for name, key in keys.items() if key in gradients}
            backend.set_gradients(model, own)
            if rounded:
                backend.round_coefficient(optimizer, rounded)
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return rate, {keys[name]: array for name, array in backend.parameters(model).items()}, optimizer


@on_rung
def schedule(
    make_ref: Make,
    make_port: Make,
    *,
    epochs: int,
    settings: Mapping[str, Any] | None = None,
    recipes: Recipes | None = None,
    device: str = "cpu",
    rung: Rung,
) -> None:
    """The learning rate of each epoch, bit for bit: how far it moves a weight whose gradient is 1.

    So a schedule that was never attached to its optimizer shows. `make_ref(model, **settings)` and `make_port` return
    (optimizer, schedule) for a linear layer of one weight, float64, which is made 0 before each step; the optimizer has
    to be plain SGD, without momentum and weight decay. `settings` and `recipes` are as in `optimizer`. Raises UserError
    for what the reference's side raises, and without a schedule.
    """
    if epochs < 1:
        raise UserError(f"epochs {epochs}: choose 1 or more")
    ref, port = {}, {}
    for name, every in _all(recipes, settings).items():
        item = Item(f"lr, {name}" if name else "lr", "lr")
        ref[item] = rung.of_ref("schedule", _moves, backend("torch"), device, make_ref, every, epochs)
        if not ref[item].any():
            rung.refuse(f"the reference's optimizer never moves the weight: {item}")
        moves = rung.of_port("schedule", _moves, backend("paddle"), device, make_port, every, epochs)
        port |= {} if moves is None else {item: moves}
    rung.check(compare(ref, port, exact_atol(ref), title=f"learning rates of {epochs} epochs"), group=str)


def _moves(backend: Backend, device: str, make: Make, settings: Mapping[str, Any], epochs: int) -> np.ndarray:
    """(epochs,): how far each step moves the weight."""
    model = backend.moved(backend.framework.nn.Linear(1, 1), backend.device(device), "float64")
    optimizer, schedule = _made(make, model, settings)
    if schedule is None:
        raise UserError(f"the {backend.name} side has no schedule: return (optimizer, schedule)")
    backend.keep_slots(model)
    moves = np.empty(epochs)
    for epoch in range(epochs):
        backend.set_value(model.weight, np.zeros((1, 1)))
        backend.set_gradients(model, {"weight": np.ones((1, 1)), "bias": np.zeros(1)})
        optimizer.step()
        schedule.step()
        moves[epoch] = -backend.to_array(model.weight).item()
    return moves
