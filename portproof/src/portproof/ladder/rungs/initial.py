"""Initial parameters, each against its distribution or constant."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.compare import Item, tensor_item
from portproof.convert.rules import COUNT
from portproof.ladder.rung import QUIET, Rung, names_back, needed, on_rung, reference_name
from portproof.ladder.statistics.distribution import Constant, Law, Normal, Statistic, Uniform, between, law_like
from sturdyio.cli import UserError

__all__ = ["Constant", "Normal", "Uniform", "init"]

# So many values show a std that is off by a factor of 1.25 in 99 of 100 runs (without the gain of a ReLU it is 1.41),
# and a uniform or a normal cut off at two stds. Where two samples are compared, each has its own error.
VALUES, VALUES_OF_TWO = 1024, 2048
FEWEST_SEEDS = 2
MOST_MODELS, MOST_SECONDS = 2048, 120  # that are made of a side, and spent on that
AGAIN, OTHERS, SHARED = "same seed again", "other tensors", "shared draw"
BY_NAME = attrgetter("name")
OWN = AGAIN, OTHERS  # compare a side's draws with each other
KINDS = {AGAIN: "seed", OTHERS: "independence", "distinct": "independence"}

Arrays = dict[str, np.ndarray]  # by the reference's names


def _item(tensor: str, what: str) -> Item:
    kind = "independence" if what.startswith("correlation") else KINDS.get(what, "distribution")
    return Item(what, kind, tensor.rpartition(".")[0], section=tensor)


def _drawn_once(model: Any, backend: Backend, back: Mapping[str, str]) -> Arrays:
    if not isinstance(model, backend.module_class):
        raise TypeError(f"it returned a {type(model).__name__}, no {backend.module_class_name}")
    found = {}
    for name, array in backend.arrays_of(model).saved().items():
        if not array.size:
            raise ValueError(f"{name} is empty")
        found[reference_name(name, back)] = array
    return found


class Drawn(NamedTuple):
    samples: Arrays  # (seeds, *shape); small tensors get more seeds
    again: Arrays  # the first seed once more
    lacking: dict[str, int]  # how many values are missing, of tensors that were drawn too seldom
    models: int


def _sampled(draw: Callable[[int], Arrays], seeds: Sequence[int], least: int, values: int) -> Drawn:
    """Draw under `least` seeds, and under more until each tensor that follows the seed has so many `values`."""
    kept: dict[str, list[np.ndarray]] = {}
    follow: set[str] = set()  # the others are constants
    lacking: dict[str, int] = {}
    end = time.monotonic() + MOST_SECONDS
    made = 0
    while made < least or lacking and made < len(seeds) and time.monotonic() < end:
        for name, array in draw(seeds[made]).items():
            arrays = kept.setdefault(name, [])
            if made < max(FEWEST_SEEDS, math.ceil(values / array.size)):
                arrays.append(array)
            if not np.array_equal(array, arrays[0]):
                follow.add(name)
        made += 1
        counts = {name: len(kept[name]) * kept[name][0].size for name in follow}
        lacking = {name: values - count for name, count in counts.items() if count < values}
    return Drawn({name: np.stack(arrays) for name, arrays in kept.items()}, draw(seeds[0]), lacking, made)


def _laws(expected: Callable[..., Law], ref: Arrays, types: Mapping[str, str]) -> dict[str, Law]:
    laws = {}
    for name, sample in ref.items():
        laws[name] = expected(name, sample.shape[1:], types.get(name.rpartition(".")[0], ""))
        if not isinstance(laws[name], Law):
            raise UserError(f"expected gives {laws[name]!r} for {name}: return Normal, Uniform or Constant")
    return laws


def _shown(rung: Rung, who: str, samples: Arrays, again: Arrays, laws: Mapping[str, Law]) -> dict[Item, Statistic]:
    drawn = {name: sample[0] for name, sample in samples.items() if name in laws and sample[0].std() > 0}
    if not drawn:
        rung.refuse(f"{who}: no parameter is drawn, each is a constant")
    others, others_atol = between({name: laws[name].deviates(sample) for name, sample in drawn.items()})
    shown = {}
    for name, sample in samples.items():
        if name not in laws:
            shown[tensor_item(name, "structure")] = Statistic(sample, np.empty(0), 0.0)
            continue
        own = laws[name].statistics(sample)
        if name in drawn:
            own[AGAIN] = Statistic(again.get(name, np.empty(0)), drawn[name], 0.0)
        if name in others:
            own[OTHERS] = Statistic(others[name], np.zeros_like(others[name]), others_atol)
        shown |= {_item(name, what): statistic for what, statistic in own.items()}
    return shown


def _check_side(rung: Rung, title: str, right: Mapping[Item, Statistic], shown: Mapping[Item, Statistic]) -> None:
    wanted = {item: statistic for item, statistic in right.items() if item.name not in OWN}
    order = [*dict.fromkeys(item.name for item in wanted), *OWN]
    wanted |= {item: statistic for item, statistic in shown.items() if item.name in OWN}
    exact = {
        item: np.asarray(wanted[item].expected) for item in sorted(wanted, key=lambda item: order.index(item.name))
    }
    found = {item: np.asarray(statistic.found) for item, statistic in shown.items()}
    atol = {item: statistic.atol for item, statistic in wanted.items()}
    expected_zero = {item for item, array in exact.items() if not np.any(array)}
    rung.compare(exact, found, atol, title=title, group=BY_NAME, expected_zero=expected_zero)


def _summary(samples: Arrays) -> Arrays:
    found = {}
    for name, sample in samples.items():
        found[f"{name}/mean"] = sample.mean()
        found[f"{name}/std"] = sample.std()
    return found


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
    rung: Rung = QUIET,
) -> None:
    """Compare every initial parameter and buffer of both sides with what it should be drawn from.

    `ref(seed)` and `port(seed)` seed their framework and return a new torch.nn.Module or paddle.nn.Layer. They are
    called with `seeds` seeds made from `seed`, and with more until each tensor has 1024 values; fewer than 2 raise
    UserError. A tensor that has fewer after 2048 models or two minutes is not judged, and the step is refused.
    `expected(name, shape, layer_type)` gives `Normal(std)`, `Uniform(bound)` or `Constant(value)`, by the name in the
    reference's state_dict and the class of its module. Without it both are compared with what the reference draws under
    other seeds, with 2048 values each. `names` is {reference's module: port's}, where they differ.

    Checked are each tensor's distribution, that it follows the seed, and that its values are independent along each
    axis and of other tensors. With `shared`, as where NumPy draws for both, the port's values must be the reference's
    bit for bit. Otherwise each tensor's mean and std go to the result files.
    """
    if seeds < FEWEST_SEEDS:
        raise UserError(f"seeds={seeds}: give {FEWEST_SEEDS} or more, or nothing shows that draws follow the seed")
    most = max(MOST_MODELS, seeds)
    drawn = [int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) for number in range(2 * most)]
    values = VALUES_OF_TWO if expected is None else VALUES
    types: dict[str, str] = {}

    def draw_ref(seed: int) -> Arrays:
        model = ref(seed)
        arrays = _drawn_once(model, backend("torch"), {})
        types.update(backend("torch").layers.types(model))
        return arrays

    def draw_port(seed: int) -> Arrays:
        return _drawn_once(port(seed), backend("paddle"), names_back(names))

    what = "initial weights"
    of_ref = rung.of_ref(what, _sampled, draw_ref, drawn[:most], seeds, values)
    # As many models as the reference's: samples are compared that have as many values.
    of_port = needed(rung.of_port(what, _sampled, draw_port, drawn[: of_ref.models], of_ref.models, values))
    lacking = dict(of_ref.lacking)
    if expected is None:
        more = rung.of_ref(what, _sampled, draw_ref, drawn[most : most + of_ref.models], of_ref.models, values)
        lacking |= more.lacking
        laws = {name: law_like(sample) for name, sample in more.samples.items() if name not in lacking}
        against = "what the reference draws"
    else:
        laws, against = _laws(expected, of_ref.samples, types), "the exact distributions"
    ref_samples, port_samples = (
        {name: sample for name, sample in side.samples.items() if name not in lacking} for side in (of_ref, of_port)
    )
    who = f"reference, {SHARED}" if shared else "reference"
    right = _shown(rung, who, ref_samples, of_ref.again, laws)
    _check_side(rung, f"{who}, against {against}", right, right)
    counts = {name for name in ref_samples if name.endswith(COUNT) and name not in port_samples}
    if shared:
        ref_draws = {_item(name, SHARED): sample for name, sample in ref_samples.items() if name not in counts}
        port_draws = {_item(name, SHARED): sample for name, sample in port_samples.items()}
        title = f"port, {SHARED}, against the reference's, bit for bit"
        rung.compare(ref_draws, port_draws, title=title, group=BY_NAME)
    else:
        right = {item: statistic for item, statistic in right.items() if item.section not in counts}
        shown = _shown(rung, "port", port_samples, of_port.again, laws)
        _check_side(rung, f"port, against {against}", right, shown)
        rung.keep(_summary(ref_samples), _summary(port_samples))
    for name, count in lacking.items():
        after = f"after {MOST_MODELS} models or {MOST_SECONDS} s"
        rung.refuse(f"{name} is not judged: {count} of {values} values are missing {after}", what)
