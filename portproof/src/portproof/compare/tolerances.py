"""How far apart two right answers may be: measured against the reference's float64 run, not chosen.

An ulp (unit in the last place) is the distance between two neighbouring numbers. U, the unit roundoff, is half an ulp
of 1 in float32, 2^-24; U64 is the same in float64, 2^-53. "The limit" of an item is an absolute tolerance, its `atol`.

float64, the semantic check. Both sides run the same formulas in float64 on the same arrays; what differs is the order
of additions. Correct ports of both models were seen 5e-15 to 5e-13 of a tensor's largest value apart; SEMANTIC_RTOL is
1e-12, and a constant kept in float32 (1/6, an epsilon) is 3e-9 at least and cannot hide below it. Where a network
magnifies rounding more than that, its float32 run shows how much: the same additions in float64 round 2^-29 as far, so
the limit is S times the reference's own float32 distance from `fp64_ref`, times 2^-29, if that is the larger. Where
that run would be made for nothing else, it is made only if SEMANTIC_RTOL alone does not pass.

That proportion ends where float32 loses values altogether: an error is then about as large as the value, however much
larger rounding would make it, and 2^-29 of it says too little of float64. In LeViT with its 13 attention blocks, and a
batch norm over 2 samples behind them, faultless gradients in float64 were up to 343 times 2^-29 of the float32 errors
apart where these exceed LOST of the value, up to 20 times where they exceed 0.1 of it, and 2.4 times elsewhere. If any
value is lost so, the rounding of float64 is measured itself: the reference is run in float64 again, from inputs and
weights that are each moved to the next number of float64, up or down as drawn. A layer's rounding does to its output
what weights some ulp off would have done (backward error), and all rounding behind what was moved falls out anew; the
limit is S times the largest distance of MOVED such runs from `fp64_ref`, if that is the larger. The same LeViT's port
was at 0.3 to 2.2 times that distance, in either mode. MOVED is 3, since one run may come out lucky: where one direction
is magnified above all others, distances are the size of one normal number, and one of them is less than 1/S of
another in 1 of 13 draws, three of them all in 1 of 630.

float32, the kernel check. The port may be K times as far from `fp64_ref`, the reference's float64 run, as the
reference's own float32 run is, plus C * U of the tensor's largest value where the reference happens to round luckily.
Since both float32 runs are compared with each other, the reference's own distance is added once more (triangle
inequality): |port - ref| <= (K + 1) |ref - fp64_ref| + C U max|fp64_ref|. Two faultless runs round independently, so
their largest errors are alike; the K that faultless ports need was measured on random draws of them. Gradients are
judged layer by layer, each on the reference's own input and upstream gradient: through a whole network, one activation
on the other side of a kink by rounding moves them by a percent, and no factor that allows for it is worth having.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from portproof.arrays import largest, largest_difference

from .verdict import Item, Items

K_ = TypeVar("K_", Item, str)

SEMANTIC_RTOL = 1e-12
S = 8.0
K = 4.0
C = 16.0
LOST = 0.5
MOVED = 3
U = 2.0**-24
U64 = 2.0**-53
UNIT_ROUNDOFF = {"float64": U64, "float32": U}


def exact_atol(ref: Iterable[K_]) -> dict[K_, float]:
    """0 for every item."""
    return dict.fromkeys(ref, 0.0)


def noise_floor(fp64_ref: Items, unit: float, input_scales: Mapping[str, float] | None = None) -> dict[Item, float]:
    """The rounding of sums that can cancel to zero by structure: C times the unit roundoff `unit`, of the largest term.

    A gradient is a sum of terms of any layer's size (that of a bias whose shift the next batch norm removes, say): of
    the largest gradient of the same pass, which section and iteration tell. A running mean can cancel behind a batch
    norm without bias, through a convolution: `input_scales` are the largest values that came into each module. Without
    a noise floor, rounding would be compared with rounding.
    """
    largest_gradient: dict[tuple, float] = {}
    for item, array in fp64_ref.items():
        if item.kind == "gradient":
            there = item.section, item.iteration
            largest_gradient[there] = max(largest(array), largest_gradient.get(there, 0.0))
    floor = {}
    for item in fp64_ref:
        if item.kind == "gradient":
            floor[item] = C * unit * largest_gradient[item.section, item.iteration]
        elif item.kind == "buffer" and item.leaf == "running_mean" and item.module in (input_scales or {}):
            floor[item] = C * unit * input_scales[item.module]
    return floor


def summed_noise_floor(steps: int) -> float:
    """The rounding in float64, C times U64, of what `steps` updates of order 1 add up to, where they cancel."""
    return C * U64 * steps


def distances(fp64_ref: Mapping[K_, np.ndarray], other: Mapping[K_, np.ndarray]) -> dict[K_, float]:
    """How far another run of the reference is from its float64 run, in each of its items; 0 of whole numbers.

    Of its float32 run these are the errors that limits rest on.
    """
    return {
        item: largest_difference(other[item], array) if array.dtype.kind in "fc" else 0.0
        for item, array in fp64_ref.items()
    }


def semantic_limits(fp64_ref: Mapping[K_, np.ndarray], errors: Mapping[K_, float]) -> dict[K_, float]:
    """Limits of the float64 check from the reference's float64 run and the errors of its float32 run, see `distances`.

    Whole numbers get 0.
    """
    return {
        item: max(SEMANTIC_RTOL * largest(array), S * U64 / U * errors[item]) if array.dtype.kind in "fc" else 0.0
        for item, array in fp64_ref.items()
    }


def least_limits(fp64_ref: Mapping[K_, np.ndarray]) -> dict[K_, float]:
    """The least that `semantic_limits` may give: what passes with these needs no run in float32."""
    return semantic_limits(fp64_ref, dict.fromkeys(fp64_ref, 0.0))


def semantic_atol(fp64_ref: Mapping[K_, np.ndarray], fp32_ref: Mapping[K_, np.ndarray]) -> dict[K_, float]:
    """`semantic_limits` from the reference's float64 run and its own float32 run."""
    return semantic_limits(fp64_ref, distances(fp64_ref, fp32_ref))


def lost_in_float32(
    fp64_ref: Mapping[K_, np.ndarray], errors: Mapping[K_, float], expected_zero: Collection[K_]
) -> bool:
    """Whether the float32 error of any item that is not zero by structure is more than LOST of its size."""
    return any(errors[item] > LOST * largest(array) for item, array in fp64_ref.items() if item not in expected_zero)


def with_moved(atol: Mapping[K_, float], moved: Sequence[Mapping[K_, float]]) -> dict[K_, float]:
    """Limits that allow for the rounding of float64 where float32 does not tell how large it is.

    `moved` are the `distances` of float64 runs of the reference from inputs and weights that are an ulp off. What is
    zero by structure has to be known before: where float64 loses a value, too, its limit exceeds it.
    """
    return {item: max([limit, *(S * run.get(item, 0.0) for run in moved)]) for item, limit in atol.items()}


def with_coefficients(
    atol: Mapping[K_, float], ref: Mapping[K_, np.ndarray], rounded: Sequence[Mapping[K_, np.ndarray]]
) -> dict[K_, float]:
    """Limits that allow for coefficients of an optimizer which are rounded to float32 on one side.

    `rounded` are runs of the reference with one of them rounded in each. To first order the effects of several add up,
    so whichever the port rounds, it is no farther away than the sum of their sizes; what is of second order is 2^-24 of
    that. Rounding all at once would not do: their effects may cancel in the reference and not in the port.
    """
    return {item: limit + sum(largest(ref[item] - run[item]) for run in rounded) for item, limit in atol.items()}


def kernel_limits(fp64_ref: Mapping[K_, np.ndarray], errors: Mapping[K_, float]) -> dict[K_, float]:
    """Limits of the float32 check from the reference's float64 run and the errors of its float32 run, see `distances`.

    Whole numbers get 0.
    """
    return {
        item: (K + 1) * errors[item] + C * U * largest(array) if array.dtype.kind in "fc" else 0.0
        for item, array in fp64_ref.items()
    }


def kernel_atol(fp64_ref: Mapping[K_, np.ndarray], fp32_ref: Mapping[K_, np.ndarray]) -> dict[K_, float]:
    """`kernel_limits` of the items of the reference's own float32 run, from that and its float64 run."""
    fp64_ref = {item: fp64_ref[item] for item in fp32_ref}
    return kernel_limits(fp64_ref, distances(fp64_ref, fp32_ref))


def with_noise_floor(
    atol: Mapping[K_, float], floor: Mapping[K_, float], fp64_ref: Mapping[K_, np.ndarray]
) -> tuple[dict[K_, float], set[K_]]:
    """(`atol` plus the floor of each item that has one, those items that are zero by structure)."""
    raised = {item: limit + floor.get(item, 0.0) for item, limit in atol.items()}
    return raised, {item for item in raised if item in floor and largest(fp64_ref[item]) <= raised[item]}
