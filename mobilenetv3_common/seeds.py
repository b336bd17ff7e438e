"""Seeds for everything that is drawn by a framework itself: initial weights and dropout."""

import numpy as np


def derive_seed(*parts: int) -> int:
    """One 32-bit seed for the tuple (seed, epoch, rank, ...); other tuples give unrelated streams."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
