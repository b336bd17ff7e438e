"""What the kit's tests share."""

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of the test's own."""
    return np.random.default_rng(0)
