"""Which branches of activations are reached, and where two runs take different ones.

A comparison proves only branches that are reached: without an input above 6, ReLU and ReLU6 are the same.
"""

from collections.abc import Mapping

import numpy as np

# Where an activation, or one it is mistaken for (ReLU6), changes its formula.
BREAKPOINTS = {"ReLU": (0.0, 6.0), "Hardswish": (-3.0, 3.0), "Hardsigmoid": (-3.0, 3.0)}
# Where its own derivative jumps.
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


def dead_branches(activation_inputs: Mapping[str, np.ndarray], types: Mapping[str, str]) -> set[str]:
    """Branches that no input reaches: "features.1.block.0.2 (ReLU): nothing above 6"."""
    dead = set()
    for name, x in activation_inputs.items():
        low, high = BREAKPOINTS[types[name]]
        where = {
            f"below {low:g}": x < low,
            f"from {low:g} to {high:g}": (x > low) & (x < high),
            f"above {high:g}": x > high,
        }
        dead |= {f"{name} ({types[name]}): nothing {place}" for place, reached in where.items() if not reached.any()}
    return dead


def branch_flips(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], types: Mapping[str, str]
) -> dict[str, int]:
    """{activation: number of its inputs on different sides of a kink}, if not 0."""
    counts = {
        name: sum(int(((x > kink) != (second[name] > kink)).sum()) for kink in KINKS[types[name]])
        for name, x in first.items()
        if name in second  # a missing one fails in `compare`
    }
    return {name: count for name, count in counts.items() if count}
