"""How far apart two right answers may be: measured against the reference's float64 run, not chosen.

An ulp (unit in the last place) is the distance between two neighbouring numbers. U, the unit roundoff, is half an ulp
of 1 in float32, 2^-24; U64 is the same in float64, 2^-53. An item's limit is an absolute tolerance, its `atol`. Each
item starts from the least limit. One that fails by value gets the next, until it passes or there is none left; what a
step needs is computed when the first item asks for it. SCALE is the item's largest value in the reference's float64
run, FLOOR the rounding of sums that may cancel (see `noise_floor`).

    float64, the semantic check
    step            the limit is                                        a relative change that could hide in it
    least           SEMANTIC_RTOL * SCALE, plus FLOOR if that is at     1e-12 of the item, plus at most 1e-6 of it
                    most MOST_HIDDEN * SCALE; where FLOOR is SCALE
                    at least, SEMANTIC_RTOL of the largest term
    float32         S * 2^-29 * its distance in the float32 run         8.9e-16 (S U64) of inputs and weights
    perturbed       S * its largest distance in RUNS perturbed runs     1.8e-15 (2 S U64) of inputs and weights
    rounded         the sum of its distances in runs with one of the    6.0e-8 (U) of each of these numbers
                    coefficients rounded to float32 on top
    float32 data    (K + 1) * its distance in the float32 run           3.0e-7 ((K + 1) U) of inputs and weights
    its gradient    of a parameter: its gradient's limit, times         as in its gradient's limit
                    the largest change of any parameter over the
                    largest gradient

    float32, the kernel check
    least           C * U * SCALE, plus FLOOR
    float32         (K + 1) * its distance in the float32 run on top
    perturbed       the same with the largest distance in RUNS perturbed float32 runs; not of a criterion, which has no
                    weights and gets the same on both sides

A fault cannot hide in a widened limit, because the reference itself moves as far as the limit when its inputs and
weights change by the share in the last column. Where that share is above MOST_HIDDEN the item is not judged. Where the
limit is not below SCALE zeros would pass: no digit is left, and the item is not judged in that precision; in float64
what is more than HOPELESS times outside such a limit has failed all the same. In float32, of which no such share is
known, a pass needs a digit: where the limit is not below DIGIT * SCALE, what is within it is not judged.

least: both sides run the same formulas in float64 on the same arrays; what differs is the order of additions. Correct
ports of both models were seen 5e-15 to 5e-13 of a tensor's largest value apart, and a constant kept in float32 (1/6, an
epsilon) is 3e-9 at least and cannot hide below 1e-12. What is not above FLOOR in the reference is zero by structure,
and has no size of its own: its terms have, and a reference whose terms cancel by symmetry (2 samples in front of a
batch norm) rounds less than a port whose terms do not.

float32: where a network magnifies rounding, its float32 run shows how much: the same additions in float64 round 2^-29
as far. The port may be K times as far from `fp64_ref` as the reference's own float32 run is, and in float32 both are
compared with each other, so the reference's own distance is added once more (triangle inequality). Two faultless runs
round independently, so their largest errors are alike; the K that faultless ports need was measured on random draws.

perturbed: one float32 run may come out lucky, and where float32 loses a value altogether its error says too little of
float64. So the reference is run again from inputs and weights that are each moved to the next number, up or down as
drawn. A layer's rounding does to its output what weights some ulp off would have done (backward error), and all
rounding behind what was moved falls out anew. LeViT's port, with 13 attention blocks and a batch norm over 2 samples
behind them, was at 0.3 to 2.2 times that distance. RUNS is 5, since one may come out lucky, too: where one direction is
magnified above all others, distances are the size of one normal number. Such a number is less than 1/S of another in 1
of 13 draws; five are all that small in 1 of 13,000. A run is asked for only where the limit before it, of the float32
run or of another perturbed run, is less than HOPELESS times short: a normal number is that much smaller than another in
1 of 1600 draws. The float32 run says nothing of that where it is more than LOST of SCALE away.

rounded: PaddlePaddle's optimizers keep their coefficients in float32. To first order the effects of several add up, so
a port that rounds any of them is no farther away than the sum. Rounding all at once would not do: their effects may
cancel in the reference and not in the port. What is of second order is 2^-24 of that.

float32 data: where code of a model makes a tensor of an array in float32, a float64 run holds numbers that are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from portproof.arrays import largest, largest_difference

from .comparison import compare
from .verdict import FAIL, NOT_JUDGED, PASS, REFUSED, Item, Items, Row, Verdict

SEMANTIC_RTOL = 1e-12
S = 8.0
K = 4.0
C = 16.0
RUNS = 5
U = 2.0**-24
U64 = 2.0**-53
UNIT_ROUNDOFF = {"float64": U64, "float32": U}
MOST_HIDDEN = 1e-6
DIGIT = 0.1  # of an item's largest value: a limit of float32 that is not below that leaves no digit to agree in
HOPELESS = 1e3  # times its limit: for what is farther off no further perturbed run is asked for
LOST = 1e-5  # of an item's largest value: a float32 run that is farther away may have lost what it should measure
LARGEST_FLOAT32 = 2.0**127

Distances = Mapping[Item, float]


def exact_atol(ref: Iterable[Item]) -> dict[Item, float]:
    """0 for every item."""
    return dict.fromkeys(ref, 0.0)


def noise_floor(
    fp64_ref: Items,
    unit: float,
    input_scales: Mapping[str, float] | None = None,
    upstream_scale: float = 0.0,
    update_scale: float = 0.0,
) -> dict[Item, float]:
    """The rounding of sums that can cancel to zero by structure: C times the unit roundoff `unit`, of the largest term.

    A gradient is a sum of terms of any layer's size (that of a bias whose shift the next batch norm removes, say): of
    the largest gradient of the same pass, which section and iteration tell, or `upstream_scale`, the largest value that
    was sent back (what a saturated activation makes of it is 1 - y^2 times that). A running mean can cancel behind a
    batch norm without bias, through a convolution: `input_scales` are the largest values that came into each module. An
    update carries the rounding of gradients into parameters: `update_scale` is the largest change of any parameter,
    which belongs to the largest gradient. Without a noise floor, rounding would be compared with rounding.
    """
    largest_gradient: dict[tuple, float] = {}
    for item, array in fp64_ref.items():
        if item.kind == "gradient":
            there = item.section, item.iteration
            largest_gradient[there] = max(largest(array), largest_gradient.get(there, upstream_scale))
    floor = {}
    for item in fp64_ref:
        if item.kind == "gradient":
            floor[item] = C * unit * largest_gradient[item.section, item.iteration]
        elif item.kind == "buffer" and item.leaf == "running_mean" and item.module in (input_scales or {}):
            floor[item] = C * unit * input_scales[item.module]
        elif item.kind == "parameter":
            floor[item] = SEMANTIC_RTOL * update_scale
    return floor


def summed_noise_floor(steps: int) -> float:
    """The rounding in float64, C times U64, of what `steps` updates of order 1 add up to, where they cancel."""
    return C * U64 * steps


def distances(fp64_ref: Items, other: Items) -> dict[Item, float]:
    """How far another run of the reference is from its float64 run in each item of both; 0 of whole numbers.

    An item of another shape, or in which the other run overflows, is left out.
    """
    found = {
        item: largest_difference(other[item], array) if array.dtype.kind in "fc" else 0.0
        for item, array in fp64_ref.items()
        if item in other and other[item].shape == array.shape
    }
    return {item: distance for item, distance in found.items() if np.isfinite(distance)}


def kernel_atol(fp64_ref: Mapping[Any, np.ndarray], fp32_ref: Mapping[Any, np.ndarray]) -> dict[Any, float]:
    """The limits of the float32 check, of the items of the reference's float32 run; whole numbers get 0."""
    errors = distances({item: fp64_ref[item] for item in fp32_ref}, fp32_ref)
    return {
        item: (K + 1) * error + C * U * largest(fp64_ref[item]) if fp64_ref[item].dtype.kind in "fc" else 0.0
        for item, error in errors.items()
    }


@dataclass(frozen=True)
class _Step:
    """One step in which limits widen."""

    name: str
    limit: Callable[[Item], float]  # of an item; the limit before stays if it is larger
    hidden: float = 0.0  # the relative change that could hide in it; of float32 nothing is claimed
    draw: int = 0  # the number of the perturbed run that it needs; 0: it needs none
    finds_zeros: bool = False  # a sum that may cancel, and is not above this limit, is zero by structure


@dataclass
class Ruler:
    """How far each item of a port may be from `ref`, the reference's run in the precision `dtype`.

    `errors`, `perturbed` and `rounded` run the reference again; each is called once for each run, when it is needed.
    """

    ref: Items
    dtype: str = "float64"
    errors: Callable[[], Distances] | None = None  # of the float32 run from the float64 run
    perturbed: Callable[[int], Distances | None] | None = None  # of the i-th perturbed run, from 1; None: there is none
    rounded: Callable[[], Sequence[Distances]] | None = None  # of float64 runs with one coefficient rounded in each
    has_float32_data: bool = False  # code of either side makes tensors of float32 arrays
    # What `noise_floor` takes, and other floors than it gives:
    input_scales: Mapping[str, float] = field(default_factory=dict)
    upstream_scale: float = 0.0
    update_scale: float = 0.0
    floors: Distances | None = None
    exact: Collection[Item] = ()  # have to be equal
    must_be_judged: Collection[Item] = ()  # are refused where they cannot be judged, and may not be zero
    decided: Collection[Item] = ()  # in another precision, which has shown a fault: no perturbed run is asked for them

    def __post_init__(self) -> None:
        self._errors = cache(self.errors or dict)
        self._perturbations = cache(lambda i: self.perturbed(i) or {})
        self._rounded = cache(lambda: tuple(self.rounded()))  # which may be set later
        # The largest value of every item of floats or complex numbers.
        self._scales = {item: largest(array) for item, array in self.ref.items() if array.dtype.kind in "fc"}
        scales = self.input_scales, self.upstream_scale, self.update_scale
        self._floor = noise_floor(self.ref, UNIT_ROUNDOFF[self.dtype], *scales) if self.floors is None else self.floors

    @classmethod
    def measured(cls, ref: Items, dtype: str, again: Callable[..., Items], **options: Any) -> Ruler:
        """The ruler of a reference that can be run again: `again(dtype, perturbation=0)` is what it gives then."""

        @cache
        def fp64_ref() -> Items:
            return ref if dtype == "float64" else again("float64")

        def errors() -> Distances:
            return distances(fp64_ref(), ref if dtype == "float32" else again("float32"))

        def perturbed(i: int) -> Distances:
            return distances(fp64_ref(), again(dtype, perturbation=i))

        return cls(ref, dtype, **{"errors": errors, "perturbed": perturbed, **options})

    def compare(self, port: Items, *, title: str = "", hints: Mapping[str, str] | None = None, **facts: Any) -> Verdict:
        """The verdict on `port`, each item by the first limit that it passes; `facts` become fields of the items."""
        atol = {item: self._least(item) for item in self.ref}
        zeros = {item for item in self.ref if self._is_zero(item)}
        found = {row.item: row for row in compare(self.ref, port, atol, expected_zero=zeros).rows}
        for step in self._steps(atol):
            failed = [item for item, row in found.items() if row.status == FAIL and row.worst and self._may_widen(item)]
            if step.draw:
                failed = [item for item in failed if self._is_worth(step.draw, found[item], atol[item])]
            if not failed:
                continue
            for item in failed:
                atol[item] = max(atol[item], step.limit(item))
                if step.finds_zeros and item in self._floor and self._scales[item] <= atol[item]:
                    zeros.add(item)
            ref_items, port_items = ({item: arrays[item] for item in failed} for arrays in (self.ref, port))
            again = compare(ref_items, port_items, atol, expected_zero=zeros)
            found |= {row.item: replace(row, widened_by=step.name, hidden=step.hidden) for row in again.rows}
        judged = [row if row.item in zeros and row.status == PASS else self._judged(row) for row in found.values()]
        rows = [replace(row, item=replace(row.item, **facts)) for row in judged]
        return Verdict(title, rows, hints=hints or {})

    def _is_worth(self, draw: int, row: Row, atol: float) -> bool:
        """Whether a perturbed run could explain an item that failed."""
        if row.item in self.decided:
            return False
        says_nothing = draw == 1 and not self._errors().get(row.item, np.inf) <= LOST * self._scales[row.item]
        return says_nothing or row.difference <= HOPELESS * atol

    def _may_widen(self, item: Item) -> bool:
        return item in self._scales and item not in self.exact

    def _is_zero(self, item: Item) -> bool:
        """Whether it is zero by structure, or throughout."""
        is_small = item in self._scales and self._scales[item] <= self._floor.get(item, 0.0)
        return is_small and item not in self.must_be_judged

    def _least(self, item: Item) -> float:
        if not self._may_widen(item):
            return 0.0
        scale, floor = self._scales[item], self._floor.get(item, 0.0)
        if self.dtype == "float32":
            return C * U * scale + floor
        if self._is_zero(item):
            return SEMANTIC_RTOL / (C * U64) * floor
        return SEMANTIC_RTOL * scale + (floor if floor <= MOST_HIDDEN * scale else 0.0)

    def _judged(self, row: Row) -> Row:
        """The row, not judged if its limit proves nothing."""
        if self.dtype == "float32" and not self._scales.get(row.item, 0.0) < LARGEST_FLOAT32 / HOPELESS:
            return replace(row, status=NOT_JUDGED, reason="float32 overflows", worst=None)
        if not row.atol > 0:
            return row
        is_noise = row.widened_by in ("perturbed", "rounded") and row.difference <= HOPELESS * row.atol
        is_lost = row.atol >= row.scale and (row.status != FAIL or self.dtype == "float32" or is_noise)
        is_vague = self.dtype == "float32" and row.status == PASS and row.atol >= DIGIT * row.scale
        if is_lost or is_vague:
            reason = f"{self.dtype} keeps no digit: its limit {row.atol:.1e}, its largest value {row.scale:.1e}"
        elif row.status == PASS and row.hidden > MOST_HIDDEN:
            reason = f"a relative change of {row.hidden:.1e} could hide in its limit"
        else:
            return row
        status = REFUSED if row.item in self.must_be_judged else NOT_JUDGED
        return replace(row, status=status, reason=reason, worst=None)

    def _steps(self, limits: Distances) -> Iterator[_Step]:
        """In their order; `limits` are those of now."""
        is_float32 = self.dtype == "float32"
        if self.errors is not None and is_float32:
            yield _Step("float32", lambda item: limits[item] + (K + 1) * self._error(item))
        elif self.errors is not None:
            yield _Step("float32", lambda item: S * U64 / U * self._error(item), S * U64, finds_zeros=True)
        for i in range(1, RUNS + 1) if self.perturbed is not None else ():
            yield _Step("perturbed", partial(self._perturbed_limit, i), 0.0 if is_float32 else 2 * S * U64, draw=i)
        if is_float32:
            return
        if self.rounded is not None:
            yield _Step("rounded", lambda item: limits[item] + sum(run.get(item, 0.0) for run in self._rounded()), U)
        if self.has_float32_data and self.errors is not None:
            yield _Step("float32 data", lambda item: (K + 1) * self._error(item), (K + 1) * U)
        if self.update_scale:
            yield _Step("its gradient", partial(self._update_limit, limits), 2 * S * U64)

    def _perturbed_limit(self, i: int, item: Item) -> float:
        change = self._perturbations(i).get(item, 0.0)
        return self._least(item) + (K + 1) * change if self.dtype == "float32" else S * change

    def _update_limit(self, limits: Distances, item: Item) -> float:
        """An update carries into a parameter what its gradient may be off."""
        gradient = replace(item, kind="gradient")
        if item.kind != "parameter" or gradient not in limits:
            return 0.0
        largest_gradient = max(scale for other, scale in self._scales.items() if other.kind == "gradient")
        return limits[gradient] * self.update_scale / largest_gradient

    def _error(self, item: Item) -> float:
        return self._errors().get(item, 0.0)
