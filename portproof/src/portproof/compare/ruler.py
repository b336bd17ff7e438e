"""How far apart two correct results may be: limits are measured against the reference's float64 run, not chosen.

An ulp (unit in the last place) is the distance between neighbouring numbers. U, the unit roundoff, is half an ulp of 1
in float32, 2^-24; U64 is the same in float64, 2^-53. Limits are absolute tolerances (`atol`). Each item starts with the
least limit; while it fails by value it gets the next. A pass is shown as a share of the widest limit that items of its
check have needed (`Row.limit`): its rounding is no larger for a limit that happened to do. SCALE is the item's largest
value in the reference's float64 run, FLOOR the rounding of sums that may cancel (see `noise_floor`).

    float64, the semantic check
    step            the limit is                                        a relative change that could hide in it
    least           SEMANTIC_RTOL * SCALE, plus FLOOR if that is at     1e-12 of the item, plus at most 1e-6 of it
                    most MOST_HIDDEN * SCALE; where FLOOR is SCALE
                    at least, SEMANTIC_RTOL of the largest term
    float32         S * 2^-29 * its distance in the float32 run         8.9e-16 (S U64) of inputs and weights
    perturbed       S * its largest distance in RUNS perturbed runs     1.8e-15 (2 S U64) of inputs and weights
    rounded         the sum of its distances in runs with one of the    6.0e-8 (U) of each of these numbers
                    coefficients rounded to float32 on top; and S
                    times that in a run with float32 constants moved
    float32 data    (K + 1) * its distance in the float32 run           3.0e-7 ((K + 1) U) of inputs and weights
    its gradient    of a parameter: its gradient's limit, times         as in its gradient's limit
                    the largest change of any parameter over the
                    largest gradient

    float32, the kernel check
    least           C * U * SCALE, plus FLOOR
    float32         (K + 1) * its distance in the float32 run on top
    perturbed       the same with the largest distance in RUNS perturbed float32 runs; not of a criterion, which has no
                    weights and gets the same on both sides

A fault cannot hide in a widened limit: the reference itself moves that far when its inputs and weights change by the
share in the last column. Where that share is above MOST_HIDDEN, the item is not judged. Where the limit is not below
SCALE, zeros would pass: the item is not judged in that precision. In float64 what is more than HOPELESS times outside
such a limit fails all the same. In float32 no such share is known, so a pass needs a digit: what passes by a limit of
DIGIT * SCALE or more is not judged.

least: both sides run the same formulas in float64 on the same arrays; only the order of additions differs. Correct
ports of both models were 5e-15 to 5e-13 of a tensor's largest value apart. A constant kept in float32 (1/6, an epsilon)
is at least 3e-9 off and cannot hide below 1e-12. An item not above FLOOR in the reference is zero by structure: only
its terms have a size. A reference whose terms cancel by symmetry (2 samples in front of a batch norm) rounds less than
a port whose terms do not.

float32: the float32 run shows how much a network magnifies rounding; the same additions in float64 round 2^-29 as far.
The port may be K times as far from `fp64_ref` as that run. Two faultless runs round independently, so their largest
errors are alike; the K that faultless ports need was measured on random draws. Where two float32 runs are compared,
the reference's own distance is added once more (triangle inequality). A float32 run of a model is compared with
`fp64_ref`, rounded to float32, within the same limit.

perturbed: one float32 run may come out lucky, and where float32 loses a value its error tells too little of float64. So
the reference is run again with inputs and weights each moved to the next number, up or down at random. A layer's
rounding acts like weights some ulp off (backward error), and all rounding after the change is new. That of a GELU is
not: far below 0, where its sum 1 + erf is 1e-8 or less, that sum is rounded to U64 whatever its argument's last place
is. So a GELU of PyTorch is computed by another formula there, and so are softplus, ELU and their kin: other kernels add
1 to exp(x), or take it away. Nor is that of a tanh or a sigmoid: near 1 it stays as it is, and its slope 1 - y^2 is
rounding. So it is moved by 3 U of itself times a normal number (a tanh of PaddlePaddle's is off by up to 5.7 U,
PyTorch's by 1 U), and its slope is taken of that; S times that may hide in it. Nor is that of a sum of n numbers: moved
at random they move it by U / sqrt(n) of itself, and a framework that adds one after the other is off by U sqrt(n) / 3
(a mean of 108 numbers by 4 U in PaddlePaddle, by 0.7 U in PyTorch). So PyTorch's sums, means and the statistics of its
norms are moved by that much there; S times that may hide in a sum. LeViT's port, with 13 attention blocks and a batch
norm over 2 samples behind them, was at 0.3 to 2.2 times that distance. RUNS is 5, since one may come out lucky, too:
where one direction is magnified most, distances are the size of one normal number. It is less than 1/S of another in 1
of 13 draws; five are all that small in 1 of 13,000. A run is made only where the limit before it (float32 or perturbed)
is less than HOPELESS times short: a normal number is that much smaller than another in 1 of 1600 draws. A float32 run
that is more than LOST of SCALE away says nothing of that.

rounded: PaddlePaddle's optimizers keep their coefficients in float32. To first order their effects add up, so a port
that rounds any of them is no farther away than the sum; the second order is 2^-24 of that. One run with all of them
rounded would not do: effects may cancel in the reference and not in the port.

A constant that a side holds in float32, such as a table of cosines, and that the other computes as it runs, is rounded
on one side only. The side that holds it runs again in float64 with all such constants moved by what float32 may have
rounded of them; what is computed anew from weights in each run moves nothing. Signs are drawn, and may cancel where
those of the true rounding do not: hence S. A layer's fault could hide in such limits of a whole model, so where they
were needed each layer is judged alone, too.

float32 data: where a model makes a tensor of a float32 array, a float64 run holds rounded numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from portproof.arrays import largest, largest_difference, own_dtype
from portproof.compare import FAIL, NOT_JUDGED, PASS, REFUSED, Item, Items, Key, Row, Verdict, compare

SEMANTIC_RTOL = 1e-12
S = 8.0
K = 4.0
C = 16.0
RUNS = 5
U = 2.0**-24
U64 = 2.0**-53
UNIT_ROUNDOFF = {"float64": U64, "float32": U}
MOST_HIDDEN = 1e-6
DIGIT = 0.1  # of the largest value: a float32 limit below this keeps a digit
HOPELESS = 1e3  # times the limit: farther off, no perturbed run is made
LOST = 1e-5  # of the largest value: a float32 run farther away tells nothing
LARGEST_FLOAT32 = 2.0**127
OVERFLOWS = "float32 overflows"
MOST_ROUNDING = 1e-3  # of the largest value of a constant

Distances = Mapping[Item, float]


def exact_atol(ref: Iterable[Key]) -> dict[Key, float]:
    """{item: 0}."""
    return dict.fromkeys(ref, 0.0)


def constant_atol(array: np.ndarray) -> float:
    """The limit of a constant that either side may compute in float32; 0 for whole numbers and booleans.

    Tables that two libraries compute in float32 differ by an ulp or so. A table of n rows has arguments up to n,
    rounded to n * U, before a sine is taken of them. So n * U * C of its largest value is allowed, and at most
    MOST_ROUNDING of it: in a table of very many rows another formula could hide.
    """
    if array.dtype.kind not in "fc":
        return 0.0
    return min(C * U * max(array.shape, default=1), MOST_ROUNDING) * largest(array)


def is_rounded(array: np.ndarray) -> bool:
    """Whether float32 can have rounded it: a value has more than 12 bits, which is no small fraction."""
    if array.dtype not in (np.float32, np.complex64):
        return False
    mantissas, _ = np.frexp(array.ravel().view(np.float32))
    scaled = mantissas * 2**12
    return bool((np.isfinite(scaled) & (scaled != np.round(scaled))).any())


def moved_by_rounding(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A constant in float64, each value up or down by what float32 may have rounded of it (see `constant_atol`).

    By half of that at least, and no two alike: moves that are equal in a row would vanish with the row's mean.
    """
    step = U * max(array.shape, default=1) * largest(array)

    def moved(real: np.ndarray) -> np.ndarray:
        steps = step * rng.choice((-1.0, 1.0), real.shape) * rng.uniform(0.5, 1.0, real.shape)
        return np.asarray(real.astype(np.float64) + steps)

    return moved(array.real) + 1j * moved(array.imag) if array.dtype.kind == "c" else moved(array)


def noise_floor(
    fp64_ref: Items,
    unit: float,
    input_scales: Mapping[str, float] | None = None,
    upstream_scale: float = 0.0,
    update_scale: float = 0.0,
) -> dict[Item, float]:
    """The rounding of sums that can cancel to zero: C * `unit` (the unit roundoff) * the largest term.

    Without it, rounding would be compared with rounding.
    A gradient's largest term is the largest gradient of its section and iteration, or `upstream_scale`, the largest
    upstream gradient. (The next batch norm removes a bias's shift; a saturated activation's factor is 1 - y^2.)
    A running mean can cancel behind a batch norm without bias and a convolution: `input_scales` are the largest inputs
    of modules. Updates carry the rounding of gradients into parameters: `update_scale` is the largest change of any.
    """
    input_scales = input_scales or {}
    largest_gradient: dict[tuple, float] = {}
    for item, array in fp64_ref.items():
        if item.kind == "gradient":
            there = item.section, item.iteration
            largest_gradient[there] = max(largest(array), largest_gradient.get(there, upstream_scale))
    floor = {}
    for item in fp64_ref:
        if item.kind == "gradient":
            floor[item] = C * unit * largest_gradient[item.section, item.iteration]
        elif item.kind == "buffer" and item.leaf == "running_mean" and item.module in input_scales:
            floor[item] = C * unit * input_scales[item.module]
        elif item.kind == "parameter":
            floor[item] = SEMANTIC_RTOL * update_scale
    return floor


def summed_noise_floor(steps: int) -> float:
    """The rounding in float64 of `steps` updates of order 1 that cancel."""
    return C * U64 * steps


def distances(fp64_ref: Items, other: Items) -> dict[Item, float]:
    """{item: distance from the float64 run}; 0 for whole numbers.

    Left out: items of one run only, of another shape, or that overflow.
    """
    found = {
        item: largest_difference(other[item], array) if array.dtype.kind in "fc" else 0.0
        for item, array in fp64_ref.items()
        if item in other and other[item].shape == array.shape
    }
    return {item: distance for item, distance in found.items() if np.isfinite(distance)}


def _exact(array: np.ndarray, fp64_ref: np.ndarray) -> np.ndarray:
    """The float64 run's array in the dtype of another run's; whole numbers and the like are that run's own."""
    with np.errstate(over="ignore"):  # then float32 does not judge it
        return fp64_ref.astype(own_dtype(array)) if array.dtype.kind in "fc" else array


def moved_distances(fp64_run: Items, moved: Items) -> dict[Item, float]:
    """What float32 constants may move, from one run in which they are moved."""
    return {item: S * distance for item, distance in distances(fp64_run, moved).items()}


def kernel_atol(fp64_ref: Mapping[Any, np.ndarray], fp32_ref: Mapping[Any, np.ndarray]) -> dict[Any, float]:
    """{item of the float32 run: limit of the float32 check}; 0 for whole numbers."""
    errors = distances({item: fp64_ref[item] for item in fp32_ref}, fp32_ref)
    return {
        item: (K + 1) * error + C * U * largest(fp64_ref[item]) if fp64_ref[item].dtype.kind in "fc" else 0.0
        for item, error in errors.items()
    }


@dataclass(frozen=True)
class _Step:
    name: str
    limit: Callable[[Item], float]  # never lowers an item's limit
    hidden: float = 0.0  # a relative change; unknown in float32
    draw: int = 0  # the perturbed run it needs; 0: none
    finds_zeros: bool = False  # a sum not above this limit is zero by structure


@dataclass
class Ruler:
    """Limits from `ref`, the reference's run in `dtype`, and from more runs, made when needed."""

    ref: Items
    dtype: str = "float64"
    errors: Callable[[], Distances] | None = None  # float32 run from float64 run
    perturbed: Callable[[int], Distances | None] | None = None  # of run i, from 1; None: no run
    rounded: Callable[[], Sequence[Distances]] | None = None  # one coefficient rounded in each run
    has_float32_data: bool = False  # a model makes tensors of float32 arrays
    # For `noise_floor`; `floors` replace it.
    input_scales: Mapping[str, float] = field(default_factory=dict)
    upstream_scale: float = 0.0
    update_scale: float = 0.0
    floors: Distances | None = None
    exact: Collection[Item] = ()
    must_be_judged: Collection[Item] = ()  # else refused; never zero by structure
    decided: Collection[Item] = ()  # failed in another precision: no perturbed runs

    def __post_init__(self) -> None:
        # A function here that holds `self` would keep the reference's arrays until the next collection of garbage.
        self._errors, self._perturbed = cache(self.errors or dict), cache(self.perturbed or {}.get)
        self._rounded = cache(self.rounded or tuple)
        self._scales = {item: largest(array) for item, array in self.ref.items() if array.dtype.kind in "fc"}
        scales = self.input_scales, self.upstream_scale, self.update_scale
        self._floor = noise_floor(self.ref, UNIT_ROUNDOFF[self.dtype], *scales) if self.floors is None else self.floors

    @classmethod
    def measured(
        cls, ref: Items, dtype: str, again: Callable[..., Items], is_rounded: bool = False, **options: Any
    ) -> Ruler:
        """`again(dtype, perturbation=0)` runs the reference again and returns its items.

        Of a float32 run only the distances from the float64 run count, and its dtypes: the port is compared with the
        float64 run. Where `ref` is that already, rounded to float32, a float32 run is made only for a distance.
        """
        fp64_ref = ref if dtype == "float64" else again("float64")

        @cache
        def errors() -> Distances:
            is_own = dtype == "float32" and not is_rounded
            return distances(fp64_ref, ref if is_own else again("float32"))

        def perturbed(i: int) -> Distances:
            return distances(fp64_ref, again(dtype, perturbation=i))

        if dtype == "float32" and not is_rounded:
            ref = {item: _exact(array, fp64_ref[item]) if item in errors() else array for item, array in ref.items()}
        return cls(ref, dtype, **{"errors": errors, "perturbed": perturbed, **options})

    def compare(self, port: Items, *, title: str = "", hints: Mapping[str, str] | None = None, **facts: Any) -> Verdict:
        """The verdict on `port`, whose limits widen in steps; `facts` are fields of its items."""
        atol = {item: self._least(item) for item in self.ref}
        widest = dict(atol)
        zeros = {item for item in self.ref if self._is_zero(item)}
        found = {row.item: row for row in compare(self.ref, port, atol, expected_zero=zeros).rows}
        for step in self._steps(atol):
            failed = [item for item, row in found.items() if row.status == FAIL and row.worst and self._may_widen(item)]
            if step.draw:
                failed = [item for item in failed if self._is_worth(step.draw, found[item], atol[item])]
            if not failed:
                continue
            for item in filter(self._may_widen, self.ref):
                widest[item] = max(widest[item], step.limit(item))
            for item in failed:
                atol[item] = max(atol[item], step.limit(item))
                if step.finds_zeros and item in self._floor and self._scales[item] <= atol[item]:
                    zeros.add(item)
            ref_items, port_items = ({item: arrays[item] for item in failed} for arrays in (self.ref, port))
            again = compare(ref_items, port_items, atol, expected_zero=zeros)
            found |= {row.item: replace(row, widened_by=step.name, hidden=step.hidden) for row in again.rows}
        overflown = [item for item, row in found.items() if row.status == FAIL and self._may_overflow(item, port)]
        found |= {item: self._left_unjudged(found[item], OVERFLOWS) for item in overflown}
        judged = [row if row.item in zeros and row.status == PASS else self._judged(row) for row in found.values()]
        judged = [replace(row, widest=widest[row.item]) if row.status == PASS else row for row in judged]
        rows = [replace(row, item=replace(row.item, **facts)) for row in judged]
        return Verdict(title, rows, hints=hints or {})

    def _may_overflow(self, item: Item, port: Items) -> bool:
        """Whether the port's is not finite in float32 where the reference's own float32 run keeps no digit.

        Or where a value of that run has a square that overflows: its variance, say, in whatever order it is computed.
        """
        if self.dtype != "float32" or item not in port or item not in self._scales:
            return False
        is_near_end = max(self._scales.values()) >= LARGEST_FLOAT32**0.5
        keeps_digit = (K + 1) * self._error(item) < self._scales[item] and not is_near_end
        return not keeps_digit and port[item].shape == self.ref[item].shape and not np.isfinite(port[item]).all()

    def _is_worth(self, draw: int, row: Row, atol: float) -> bool:
        if row.item in self.decided:
            return False
        says_nothing = draw == 1 and not self._errors().get(row.item, np.inf) <= LOST * self._scales[row.item]
        return says_nothing or row.difference <= HOPELESS * atol

    def _may_widen(self, item: Item) -> bool:
        return item in self._scales and item not in self.exact

    def _is_zero(self, item: Item) -> bool:
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
        if self.dtype == "float32" and not self._scales.get(row.item, 0.0) < LARGEST_FLOAT32 / HOPELESS:
            return self._left_unjudged(row, OVERFLOWS)
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
        return self._left_unjudged(row, reason)

    def _left_unjudged(self, row: Row, reason: str) -> Row:
        status = REFUSED if row.item in self.must_be_judged else NOT_JUDGED
        return replace(row, status=status, reason=reason, worst=None)

    def _steps(self, limits: Distances) -> Iterator[_Step]:
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
        change = (self._perturbed(i) or {}).get(item, 0.0)
        return self._least(item) + (K + 1) * change if self.dtype == "float32" else S * change

    def _update_limit(self, limits: Distances, item: Item) -> float:
        gradient = replace(item, kind="gradient")
        if item.kind != "parameter" or gradient not in limits:
            return 0.0
        largest_gradient = max(scale for other, scale in self._scales.items() if other.kind == "gradient")
        return limits[gradient] * self.update_scale / largest_gradient

    def _error(self, item: Item) -> float:
        return self._errors().get(item, 0.0)
