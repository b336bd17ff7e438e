"""Where training starts: each initial parameter against the distribution or the constant that it should come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.compare import Item, compare, tensor_item
from portproof.compare.tolerances import exact_atol
from portproof.io.cli import UserError
from portproof.ladder.rung import Rung, on_rung
from portproof.ladder.statistics.distribution import Constant, Law, Normal, Uniform, between, law_like

__all__ = ["Constant", "Normal", "Uniform", "init"]

# Each tensor is drawn until there are 1024 values of it, and at least twice. That is enough to see in any one tensor a
# deviation that is 25 % off (it is 29 % off without the gain of a ReLU), and a uniform or a normal that is cut off at
# two deviations; and in one of 50 000 values a deviation that is 2 % off.
VALUES, FEWEST_SEEDS = 1024, 2
AGAIN, OTHERS, SHARED = "same seed again", "other tensors", "shared draw"
KINDS = {AGAIN: "seed", OTHERS: "independence", "distinct": "independence"}
COUNT = "num_batches_tracked"  # PaddlePaddle does not have it

Arrays = dict[str, np.ndarray]  # by the reference's names


def _item(tensor: str, what: str) -> Item:
    """The item of a statistic of a parameter or buffer."""
    kind = "independence" if what.startswith("correlation") else KINDS.get(what, "distribution")
    return Item(what, kind, tensor.rpartition(".")[0], section=tensor)


def _drawn_once(build: Callable[[int], Any], backend: Backend, back: Mapping[str, str], seed: int) -> Arrays:
    """A new model's parameters and buffers; `back` maps its modules to the reference's."""
    model = build(seed)
    if not isinstance(model, backend.module_class):
        raise TypeError(f"it returned a {type(model).__name__}, no {backend.module_class_name}")
    split = ((*name.rpartition("."), array) for name, array in backend.arrays(model).items())
    return {back.get(module, module) + dot + leaf: array for module, dot, leaf, array in split}


def _sampled(draw: Callable[[int], Arrays], seeds: Sequence[int]) -> tuple[Arrays, Arrays]:
    """(samples (seeds, *shape), of small tensors from more seeds; what the first seed gives when it is used again)."""
    kept: dict[str, list[np.ndarray]] = {}
    for number, seed in enumerate(seeds):
        for name, array in draw(seed).items():
            if not array.size:
                raise ValueError(f"{name} is empty")
            if number < max(FEWEST_SEEDS, math.ceil(VALUES / array.size)):
                kept.setdefault(name, []).append(array)
    return {name: np.stack(arrays) for name, arrays in kept.items()}, draw(seeds[0])


def _laws(expected: Callable[..., Law], ref: Arrays, types: Mapping[str, str]) -> dict[str, Law]:
    """What `expected` says of each tensor of the reference; raises UserError where that is no law."""
    laws = {}
    for name, sample in ref.items():
        laws[name] = expected(name, sample.shape[1:], types.get(name.rpartition(".")[0], ""))
        if not isinstance(laws[name], Law):
            raise UserError(f"expected gives {laws[name]!r} for {name}: return Normal, Uniform or Constant")
    return laws


def _check_side(
    rung: Rung, against: str, who: str, side: tuple[Arrays, Arrays], ref: Arrays, laws: Mapping[str, Law]
) -> None:
    """One side's samples against their laws, and each draw against the others; `ref` tells shapes and dtypes."""
    samples, again = side
    drawn = {name: sample[0] for name, sample in samples.items() if name in laws and sample[0].std() > 0}
    if not drawn:
        rung.refuse(f"{who}: no parameter is drawn, each is a constant")
    others, others_atol = between({name: laws[name].deviates(sample) for name, sample in drawn.items()})
    exact, found, atol = {}, {}, {}
    for name, law in laws.items():
        right, allowed = law.expectations(ref[name].shape, ref[name].dtype)
        shown = law.statistics(samples[name]) if name in samples else {}
        if name in drawn:
            right[AGAIN], shown[AGAIN], allowed[AGAIN] = drawn[name], again.get(name, np.empty(0)), 0.0
        if name in others:
            right[OTHERS], shown[OTHERS], allowed[OTHERS] = np.zeros_like(others[name]), others[name], others_atol
        exact |= {_item(name, what): array for what, array in right.items()}
        found |= {_item(name, what): array for what, array in shown.items()}
        atol |= {_item(name, what): limit for what, limit in allowed.items()}
    found |= {tensor_item(name, "structure"): sample for name, sample in samples.items() if name not in laws}
    order = [*dict.fromkeys(item.name for item in exact if item.name not in (AGAIN, OTHERS)), AGAIN, OTHERS]
    exact = {item: exact[item] for item in sorted(exact, key=lambda item: order.index(item.name))}
    expected_zero = {item for item, array in exact.items() if not array.any()}
    title = f"{who}, against {against}"
    rung.check(compare(exact, found, atol, title=title, expected_zero=expected_zero), group=lambda item: item.name)


def _summary(samples: Arrays) -> Arrays:
    """Mean and standard deviation of each parameter and buffer, for the result files."""
    return {f"{name}/{f.__name__}": np.array(f(sample)) for name, sample in samples.items() for f in (np.mean, np.std)}


@on_rung
def init(
    ref: Callable[[int], Any],
    port: Callable[[int], Any],
    expected: Callable[[str, tuple[int, ...], str], Law] | None = None,
    *,
    seed: int = 0,
    seeds: int = 8,
    shared: bool = False,
    names: Mapping[str, str] | None = None,
    rung: Rung,
) -> None:
    """Judge initial weights: every parameter and buffer of both sides against what it should be drawn from.

    `ref(seed)` and `port(seed)` seed their framework and return a new torch.nn.Module or paddle.nn.Layer. They are
    called with `seeds` seeds made from `seed`; the smaller a tensor, the more of them it takes to show something.
    `expected(name, shape, layer_type)` says what a tensor of the reference should be: `Normal(std)`, `Uniform(bound)`
    or `Constant(value)`; the name is the state_dict's, and the type the class of the module that holds it. Without it
    both are held against what the reference draws under as many seeds more, which shows less: a std that is 20 % off in
    1024 values. `names` maps modules whose names differ, {reference's: port's}.

    Checked are the distribution of each tensor, that it follows the seed, that its values are independent along each
    axis and of other tensors. The generators of two frameworks differ, so that values do not agree; `shared` says that
    they should, to the last bit, as where both are drawn with NumPy: then the reference is held against the laws, and
    the port against the reference. Mean and deviation of each tensor go to the result files, unless `shared`.

    Raises UserError for a reference that raises or returns no model, for `expected` that says nothing of a tensor, and
    for fewer than 2 seeds. A port that raises or returns no model fails the rung.
    """
    if seeds < FEWEST_SEEDS:
        raise UserError(f"seeds={seeds}: give {FEWEST_SEEDS} or more, or nothing shows that draws follow the seed")
    torch, paddle = backend("torch"), backend("paddle")
    back = {port_name: name for name, port_name in (names or {}).items()}
    drawn = [int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) for number in range(2 * seeds)]
    every, more = drawn[:seeds], drawn[seeds:]
    types: dict[str, str] = {}

    def build(seed: int) -> Any:
        model = ref(seed)
        if isinstance(model, torch.module_class):
            types.update(torch.layer_types(model))
        return model

    what = "initial weights"
    ref_side = rung.of_ref(what, _sampled, lambda seed: _drawn_once(build, torch, {}, seed), every)
    port_side = rung.of_port(what, _sampled, lambda seed: _drawn_once(port, paddle, back, seed), every)
    if expected is None:
        again, _ = rung.of_ref(what, _sampled, lambda seed: _drawn_once(build, torch, {}, seed), more)
        laws, against = {name: law_like(sample) for name, sample in again.items()}, "what the reference draws"
    else:
        laws, against = _laws(expected, ref_side[0], types), "the exact distributions"
    ref_samples = ref_side[0]
    check = partial(_check_side, rung, against)
    check(f"reference, {SHARED}" if shared else "reference", ref_side, ref_samples, laws)
    if port_side is None:
        return
    counts = {name for name in ref_samples if name.endswith(COUNT) and name not in port_side[0]}
    ref_samples = {name: sample for name, sample in ref_samples.items() if name not in counts}
    if shared:
        both = [{_item(name, SHARED): sample for name, sample in side.items()} for side in (ref_samples, port_side[0])]
        title = f"port, {SHARED}, against the reference's, bit for bit"
        rung.check(compare(*both, exact_atol(both[0]), title=title), group=lambda item: item.name)
    else:
        check("port", port_side, ref_samples, {name: laws[name] for name in ref_samples})
        rung.keep(_summary(ref_side[0]), _summary(port_side[0]))
