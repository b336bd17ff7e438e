"""Training of both sides in float64, where rounding is not yet magnified: step for step, with the same dropout masks.

A step here begins with its batch and ends where the next one is taken, with what comes between, such as an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.backends.masks import Masks, no_masks
from portproof.backends.trace import map_tensors
from portproof.compare import PASS, Item, Items, Row, Verdict, compare, tensor_item
from portproof.compare.ruler import SEMANTIC_RTOL, U64, Distances, Ruler, S, largest, summed_noise_floor
from portproof.ladder.rung import QUIET, Ended, Rung, names_back, needed, on_rung, processor_time, reference_name
from sturdyio.cli import UserError

# A second run of the reference measures the growth of rounding: inputs and parameters move by one ulp before each step.
# A step has several hundred roundings, which mostly cancel: a faultless port was 0.6 to 2.1 times as far off. One run
# is enough, since each item gets the largest share of all. Beyond TOGETHER / S nothing can be compared.
TOGETHER = 1e-9
LOSS = Item("loss", "loss")
DROPOUT_CAUSES = "layers that an evaluation left in eval mode, or kept in train mode; another probability"
Run = Callable[["Batches"], "tuple[Any, Sequence[float]]"]  # (batches) -> (model, losses)


@dataclass
class Batches:
    """`batches(loader, model)`: the loader's, in float64; with `jitter` they and the parameters move."""

    backend: Backend
    jitter: np.random.Generator | None = None
    masks: Masks | None = None  # without them dropout is off
    before: dict[str, np.ndarray] = field(default_factory=dict)  # parameters before the first step

    def __call__(self, loader: Any, model: Any) -> Epoch:
        return Epoch(self, loader, model)

    def moved(self, array: np.ndarray) -> np.ndarray:
        """Each value by one ulp, up or down."""
        if self.jitter is None:
            return array
        return array * (1 + self.jitter.choice([-2 * U64, 2 * U64], array.shape))

    def move(self, model: Any) -> None:
        """Each parameter, in place, where these batches move."""
        for parameter in model.parameters() if self.jitter is not None else ():
            self.backend.set_value(parameter, self.moved(self.backend.to_array(parameter)))

    def given(self, tensor: Any, model: Any) -> Any:
        """A tensor or array as a tensor of the model's precision, moved."""
        array = tensor if isinstance(tensor, np.ndarray) else self.backend.to_array(tensor)
        if array.dtype.kind == "f":
            array = self.moved(array.astype(np.float64))
        return self.backend.to_tensor(array, model)


@dataclass
class Epoch:
    batches: Batches
    loader: Any
    model: Any

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches, backend = self.batches, self.batches.backend
        batches.before = batches.before or backend.arrays_of(self.model).parameters()

        def is_array(value: Any) -> bool:
            return isinstance(value, np.ndarray) or backend.framework.is_tensor(value)

        for batch in self.loader:
            if batches.masks is not None:
                batches.masks.begin_step()
            given = map_tensors(batch, is_array, lambda tensor: batches.given(tensor, self.model))
            batches.move(self.model)
            yield given


def _fp64_run(run: Run, batches: Batches, back: Mapping[str, str]) -> dict[Item, np.ndarray]:
    runs = batches.backend.runs
    with runs.exact_constants(), runs.lent_dropout(batches.masks or no_masks):
        model, returned = run(batches)
    arrays = batches.backend.arrays_of(model)
    after = arrays.parameters()
    if not batches.before:
        raise ValueError("it takes no batch from `batches(loader, model)`")
    losses = np.array(returned, np.float64)
    if not losses.size or all(np.array_equal(after[name], array) for name, array in batches.before.items()):
        raise ValueError(f"after {losses.size} losses no parameter has moved")
    found = {LOSS: losses}
    for kind, tensors in (("parameter", after), ("buffer", arrays.buffers())):
        found |= {tensor_item(reference_name(name, back), kind): array for name, array in tensors.items()}
    return found


@on_rung
def train_fp64(
    ref: Run,
    port: Run,
    *,
    names: Mapping[str, str] | None = None,
    what: str = "",
    seed: int = 0,
    rung: Rung = QUIET,
) -> None:
    """Compare training in float64, step for step: every loss, and the final parameters and buffers.

    `ref` and `port` take `batches` and return (model, losses): the model, in float64, after a run on
    `batches(loader, model)`, and each step's loss as a float. A loader gives tensors or arrays in tuples, lists or
    dicts. Both begin with the same weights. `names` is {reference's module: port's}, `what` says what is trained on.

    The frameworks' dropout functions, in layers too, get masks of `seed`: the same on both sides for the same call of
    the same step. How many calls each step has, and their probabilities, are compared as well: have the runs evaluate
    between the epochs as they do otherwise. Where both sides have dropout of other shapes from the first step on, it is
    off. What else is random has to be turned off, also the dropout between the layers of an RNN.

    The limit is S times how far the reference is from itself when moved by one ulp before each step, in a second run.
    Refused if that is too far to compare anything.
    """
    with processor_time(rung, "float64"), suppress(Ended):
        if not _compare(rung, ref, port, names or {}, what, seed, lend=True):
            _compare(rung, ref, port, names or {}, what, seed, lend=False)


def _compare(rung: Rung, ref: Run, port: Run, names: Mapping[str, str], what: str, seed: int, lend: bool) -> bool:
    """With lent masks or without dropout; False, and no loss is compared, if both sides cannot have one mask."""

    def run_of(side: Run, name: str, back: Mapping[str, str], moves: bool = False) -> tuple[Items, Masks | None]:
        jitter = np.random.default_rng([seed, 7]) if moves else None
        batches = Batches(backend(name), jitter, Masks(seed) if lend else None)
        return _fp64_run(side, batches, back), batches.masks

    what_runs = "training in float64"
    fp64_ref, ref_masks = rung.of_ref(what_runs, run_of, ref, "torch", {})
    check_fp64(fp64_ref, names)
    moved, _ = rung.of_ref(what_runs, run_of, ref, "torch", {}, moves=True)
    growth = growth_of(rung, fp64_ref, moved)
    port_items, port_masks = needed(rung.of_port(what_runs, run_of, port, "paddle", names_back(names)))
    if ref_masks and port_masks and not _compare_dropout(rung, ref_masks, port_masks):
        return False
    steps = fp64_ref[LOSS].size
    title = f"train mode, float64, {steps} steps" + (f" of {what}" if what else "")
    judge_fp64(rung, fp64_ref, port_items, growth, title)
    return True


def _compare_dropout(rung: Rung, ref: Masks, port: Masks) -> bool:
    """Compare the dropout calls of each step; False if shapes differ from the first step on."""
    sides = ref.steps, port.steps
    if not any(map(any, sides)):
        return True
    shapes = [[shape for _, shape in steps[0]] for steps in sides]
    alike = shapes[0] == shapes[1] or not all(shapes)  # a side with none has lost it
    counts = [np.array([len(calls) if alike else min(len(calls), 1) for calls in steps]) for steps in sides]
    name = "dropout calls of each step" if alike else "whether a step has dropout"
    rows = [_dropout_row(name, counts[0], counts[1], np.arange(counts[0].size))]
    if alike and rows[0].status == PASS:
        numbers = [np.array([p for calls in steps for p, _ in calls]) for steps in sides]
        steps_of_calls = np.arange(counts[0].size).repeat(counts[0])
        rows.append(_dropout_row("p of each dropout call", numbers[0], numbers[1], steps_of_calls))
    rung.check(Verdict("train mode, float64, dropout", rows, hints={"dropout": DROPOUT_CAUSES}), group=str)
    if not alike:
        what = "the masks of a step have shapes {} in the reference and {} in the port".format(*shapes)
        rung.say(f"float64: {what}, not the same: both sides go on without dropout")
    return alike


def _dropout_row(name: str, ref: np.ndarray, port: np.ndarray, steps: np.ndarray) -> Row:
    """Equal or not; `steps` has the step of each value."""
    item = Item(name, "dropout")
    row = compare({item: ref}, {item: port}, {item: 0.0}).rows[0]
    if row.worst is None:
        return row
    unequal = ref != port
    first = int(unequal.argmax())
    where = f"from step {steps[first]} on" if unequal[first:].all() else f"first in step {steps[first]}"
    return replace(row, worst=None, reason=f"reference {ref[first]:g}, port {port[first]:g}, {where}")


def _floats(items: Items) -> dict[Item, np.ndarray]:
    return {item: array for item, array in items.items() if array.dtype.kind == "f"}


def check_fp64(fp64_ref: Items, names: Mapping[str, str] | None = None) -> None:
    """Raise UserError for a reference that is not in float64, and for `names` that it does not have."""
    if unknown := set(names or {}) - {item.module for item in fp64_ref}:
        raise UserError(f"names has {min(unknown)!r}, and the reference has no module with weights of that name")
    for item, array in _floats(fp64_ref).items():
        if array.dtype != np.float64:
            raise UserError(f"the reference's {item} is {array.dtype}: train its model in float64")


def judge_fp64(
    rung: Rung, fp64_ref: Items, port: Items, growth: float, title: str, rounded: Sequence[Distances] = ()
) -> None:
    """Compare the two runs by what `growth_of` the reference says; `rounded` as the ruler's."""
    floats = _floats(fp64_ref)
    grown = {item: growth * largest(array) for item, array in floats.items()}
    floors = dict.fromkeys(floats, summed_noise_floor(fp64_ref[LOSS].size))
    ruler = Ruler(fp64_ref, perturbed=lambda _: grown, rounded=lambda: rounded, floors=floors, must_be_judged=[LOSS])
    rung.check(ruler.compare(port, title=title, mode="train", dtype="float64"), group=lambda item: item.kind)


def growth_of(rung: Rung, fp64_ref: Items, moved: Items) -> float:
    """How far the `moved` run is from the reference, as a share of an item's largest value; refused if too far."""
    fp64_ref, moved = _floats(fp64_ref), _floats(moved)
    if not all(np.isfinite(array).all() for array in chain(fp64_ref.values(), moved.values())):
        rung.refuse("the reference's training in float64 gives NaN or infinity: lower its learning rate")
        raise Ended
    steps = fp64_ref[LOSS].size
    floor = summed_noise_floor(steps)  # such as the gradient of a bias that the next batch norm removes
    scales = {item: largest(array) for item, array in fp64_ref.items() if largest(array) > floor}
    if not scales or {item: a.shape for item, a in moved.items()} != {item: a.shape for item, a in fp64_ref.items()}:
        what = "gives other values in another run" if scales else "gives nothing above its rounding"
        rung.refuse(f"the reference's training in float64 {what}: nothing can be compared")
        raise Ended
    growths = {item: largest(moved[item] - fp64_ref[item]) / scale for item, scale in scales.items()}
    worst, growth = max(growths.items(), key=itemgetter(1))
    rung.say(
        f"float64: moved by one ulp before each step, the reference is {growth:.1e} of the largest value from itself "
        f"after {steps} steps, at {worst}; {S:g} times that, {max(SEMANTIC_RTOL, S * growth):.1e}, is the limit"
    )
    if S * growth > TOGETHER:
        rung.refuse(f"the reference does not stay within {TOGETHER / S:.0e} of itself over {steps} steps")
        raise Ended
    return growth
