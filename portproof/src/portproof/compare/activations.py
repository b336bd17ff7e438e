"""The branches of activations: which ones an input reaches, and where two runs took different ones.

A ReLU no input of which exceeds 6 cannot be told from a ReLU6, nor a hard-swish from a swish where nothing is below -3:
a comparison proves only the branches that its inputs reach. Framework-neutral: known by class name.
"""

from collections.abc import Mapping

import numpy as np

# Where each activation, or one it is commonly taken for, changes its formula (x > 6 tells ReLU from ReLU6).
BREAKPOINTS = {"ReLU": (0.0, 6.0), "Hardswish": (-3.0, 3.0), "Hardsigmoid": (-3.0, 3.0)}
# The breakpoints at which its own derivative jumps.
KINKS = {"ReLU": (0.0,), "Hardswish": (-3.0, 3.0), "Hardsigmoid": (-3.0, 3.0)}


# How near a kink, as a share of it, a float32 kernel may take the other branch: relu6(x + 3) rounds x + 3 to 6 where x
# is less than half an ulp of 6 from 3. 8 * 2^-24 is four times that.
MARGIN = 8 * 2.0**-24


def off_kinks(x: np.ndarray, kind: str) -> np.ndarray:
    """`x`, in which what lies within MARGIN of a kink of the activation `kind` is moved to that distance, outwards.

    There the derivative jumps, and which branch is taken is rounding, also where both sides receive the same. At 0
    nothing is rounded, and nothing moved.
    """
    for kink in KINKS.get(kind, ()):
        margin = MARGIN * abs(kink)
        away = kink + np.where(x < kink, -margin, margin)
        x = np.where(np.abs(x - kink) < margin, away, x).astype(x.dtype)
    return x


def dead_branches(activation_inputs: Mapping[str, np.ndarray], types: Mapping[str, str]) -> set[str]:
    """The branches that no input reaches, as "features.1.block.0.2 (ReLU): nothing above 6"."""
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
    """{activation: how many of its inputs two runs have on different sides of a kink}, where there are any."""
    counts = {
        name: sum(int(((x > kink) != (second[name] > kink)).sum()) for kink in KINKS[types[name]])
        for name, x in first.items()
        if name in second  # an activation that one model lacks is the comparison's business
    }
    return {name: count for name, count in counts.items() if count}
