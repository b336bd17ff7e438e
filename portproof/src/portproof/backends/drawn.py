"""Random inputs, and weights for references not in PyTorch. Imports no framework."""

from collections.abc import Sequence

import numpy as np

from portproof.backends.model import BackendModel

NORMS = ("BatchNorm", "SyncBatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm")


def probe_images(rng: np.random.Generator, n: int, height: int, width: int) -> np.ndarray:
    """Random images, (n, 3, height, width), float32, of order 1; sizes are multiples of 16.

    Coarse patches plus noise, with a tint and contrast for each image: of white noise all pooled features are equal.
    """
    coarse = rng.normal(size=(n, 3, height // 16, width // 16)).repeat(16, axis=2).repeat(16, axis=3)
    noise = rng.normal(size=(n, 3, height, width))
    tint, contrast = rng.normal(size=(n, 3, 1, 1)), rng.uniform(0.5, 1.5, size=(n, 1, 1, 1))
    return ((0.7 * coarse + 0.6 * noise) * contrast + 0.5 * tint).astype(np.float32)


def even_filters(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Rows of equal norm: batch norm would magnify rounding in a nearly constant channel."""
    weight = rng.normal(size=shape)
    weight *= np.sqrt(2) / np.sqrt((weight**2).sum(axis=tuple(range(1, weight.ndim)), keepdims=True))
    return weight


def drawn_weights(model: BackendModel, seed: int) -> dict[str, np.ndarray]:
    """Random weights for `model.load` that keep activations of order 1.

    They depend on the layer type and, unlike `probe_weights` (probe.py), on no measured activations: on small inputs
    some branch of an activation may not be reached. No tensor is constant, and no two are equal.
    """
    rng, arrays = np.random.default_rng([seed, 1]), model.arrays()
    for module in model.modules.values():
        for leaf, slot in module.slots.items():
            if slot.is_whole:
                continue
            array: np.ndarray | float
            if leaf == "running_var" or leaf == "weight" and module.kind.startswith(NORMS):
                array = rng.uniform(0.5, 2, slot.shape)
            elif len(slot.shape) > 1:
                array = even_filters(rng, slot.shape)
            elif slot.shape:
                array = rng.permutation(np.linspace(-3, 3, slot.shape[0] + 2)[1:-1])
            else:
                array = rng.uniform(0.2, 0.8)
            arrays[slot.key] = np.asarray(array, np.float32)
    return arrays
