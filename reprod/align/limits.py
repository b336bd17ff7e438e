"""How far apart two right answers may be: measured against the reference's float64 run, not chosen.

u is 2^-24, half a unit in the last place of float32; U64 is the same for float64, 2^-53.

float64, the semantic check. Both sides run the same formulas in float64 on the same arrays; what differs is the order
of additions. Correct ports of both models were seen 5e-15 to 5e-13 of a tensor's largest value apart; SEMANTIC_RTOL is
1e-12, and a constant kept in float32 (1/6, an epsilon) is 3e-9 at least and cannot hide below it. Where a network
magnifies rounding more than that, its float32 run shows how much: the same additions in float64 round 2^-29 as far, so
the limit is S times the reference's own float32 distance from the truth, times 2^-29, if that is the larger.

float32, the kernel check. The port may be K times as far from the truth (the float64 run) as the reference's own
float32 run is, plus C * u of the tensor's largest value for tensors where the reference happens to round luckily.
Since both float32 runs are compared with each other, the reference's own distance is added once more (triangle
inequality): |port - ref| <= (K + 1) |ref - truth| + C u max|truth|. Two faultless runs round independently, so their
largest errors are alike; `python tools/false_alarms.py` measures the K that faultless ports need. Gradients are judged
layer by layer, each on the reference's own input and upstream gradient: through a whole network, one activation that
rounding puts on the other side of a kink moves them by a percent, and no factor that allows for it is worth having.
"""

from collections.abc import Mapping

import numpy as np

SEMANTIC_RTOL = 1e-12
S = 8.0
K = 4.0
C = 16.0
U = 2.0**-24
U64 = 2.0**-53


def largest(array: np.ndarray) -> float:
    """max|array|, 0 for an empty array."""
    return float(np.abs(array).max()) if array.size else 0.0


def exact_limits(ref: Mapping[str, np.ndarray]) -> dict[str, float]:
    """0 for every item."""
    return dict.fromkeys(ref, 0.0)


def mean_floors(input_scales: Mapping[str, float], unit: float) -> dict[str, float]:
    """The rounding, in `unit`, of each batch norm's running mean: C of it, of the largest value that is averaged.

    A mean can cancel to zero by structure (behind a batch norm without bias, through a convolution); without a floor,
    rounding would be compared with rounding. `input_scales` are the largest values that came into each module.
    """
    return {f"{name}.running_mean": C * unit * scale for name, scale in input_scales.items()}


def semantic_limits(truth: Mapping[str, np.ndarray], ref: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Limits of the float64 check from the float64 run `truth` and the reference's float32 run `ref`.

    Whole numbers get 0.
    """
    return {
        name: max(SEMANTIC_RTOL * largest(array), S * U64 / U * largest(ref[name] - array))
        if array.dtype.kind == "f"
        else 0.0
        for name, array in truth.items()
    }


def kernel_limits(truth: Mapping[str, np.ndarray], ref: Mapping[str, np.ndarray], k: float = K) -> dict[str, float]:
    """Limits of the float32 check from the float64 run `truth` and the reference's float32 run `ref`."""
    return {
        name: (k + 1) * largest(ref[name] - truth[name]) + C * U * largest(truth[name])
        if truth[name].dtype.kind == "f"
        else 0.0
        for name in ref
    }


def with_floors(
    limits: Mapping[str, float], floors: Mapping[str, float], truth: Mapping[str, np.ndarray]
) -> tuple[dict[str, float], set[str]]:
    """(`limits` plus the floor of each item that has one, the names of those items that are zero by structure)."""
    raised = {name: limit + floors.get(name, 0.0) for name, limit in limits.items()}
    return raised, {name for name in raised if name in floors and largest(truth[name]) <= raised[name]}
