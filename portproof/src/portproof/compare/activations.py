"""Where two runs of activations take different branches."""

from collections.abc import Mapping

import numpy as np

# Where the derivative of an activation jumps.
KINKS = {"ReLU": (0.0,), "Hardswish": (-3.0, 3.0), "Hardsigmoid": (-3.0, 3.0)}

# A share of the kink. So near, a float32 kernel may take the other branch:
# relu6(x + 3) rounds x + 3 to 6 if x is within half an ulp of 6 of 3. This is four times that.
MARGIN = 8 * 2.0**-24


def off_kinks(x: np.ndarray, kind: str) -> np.ndarray:
    """`x` with all values within MARGIN of a kink of `kind` moved outwards to MARGIN.

    There rounding decides the branch, even on equal inputs. At 0 nothing is rounded, so nothing moves.
    """
    for kink in KINKS.get(kind, ()):
        margin = MARGIN * abs(kink)
        away = kink + np.where(x < kink, -margin, margin)
        x = np.where(np.abs(x - kink) < margin, away, x).astype(x.dtype)
    return x


def branch_flips(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], types: Mapping[str, str]
) -> dict[str, int]:
    """{call of an activation: number of its inputs on different sides of a kink}, if not 0; `types` are by call."""
    counts = {
        label: sum(int(((x > kink) != (second[label] > kink)).sum()) for kink in KINKS[types[label]])
        for label, x in first.items()
        if label in second  # a missing one fails in `compare`
    }
    return {label: count for label, count in counts.items() if count}
