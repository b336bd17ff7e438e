"""Initial weights that both frameworks start from, drawn with NumPy: `--shared-init`.

The distributions are those of torchvision 0.29.1, torchvision/models/mobilenetv3.py (`MobileNetV3.__init__`).
"""

import math
from collections.abc import Sequence

import numpy as np


def draw_initial(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """The parameter `name` of a MobileNetV3, float32; name and `shape` are PyTorch's.

    Convolutions, (C_out, C_in / groups, k, k), are normal with variance 2 / (C_out * k * k) (fan-out Kaiming for ReLU,
    arXiv:1502.01852), linear weights, (C_out, C_in), normal with deviation 0.01, batch-norm weights 1, biases 0.

    The draws are keyed by seed and name. So they depend neither on what was created before nor on other parameters.
    """
    if len(shape) == 1:
        return np.full(shape, name.endswith("weight"), np.float32)
    std = math.sqrt(2 / (shape[0] * math.prod(shape[2:]))) if len(shape) == 4 else 0.01
    rng = np.random.default_rng([seed, *name.encode()])
    return rng.normal(0, std, shape).astype(np.float32)
