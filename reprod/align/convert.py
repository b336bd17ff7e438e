"""Weights from one framework to the other, by layer type, from one table; no bit is lost either way."""

from collections.abc import Callable, Mapping

import numpy as np

from reprod.recipe.cli import UserError


def keep(array: np.ndarray) -> np.ndarray:
    """The same array: both frameworks store it alike."""
    return array


def transpose(array: np.ndarray) -> np.ndarray:
    """(out_features, in_features) <-> (in_features, out_features)."""
    return np.ascontiguousarray(array.T)


# layer type -> {name in PyTorch: (name in PaddlePaddle, change of layout, which is its own inverse)}
RULES: dict[str, dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]] = {
    "Conv2d": {"weight": ("weight", keep), "bias": ("bias", keep)},
    "Linear": {"weight": ("weight", transpose), "bias": ("bias", keep)},
    "BatchNorm2d": {
        "weight": ("weight", keep),
        "bias": ("bias", keep),
        "running_mean": ("_mean", keep),
        "running_var": ("_variance", keep),
        "num_batches_tracked": ("num_batches_tracked", keep),
    },
}


def _renamed(arrays: Mapping[str, np.ndarray], layer_types: Mapping[str, str], inverse: bool) -> dict[str, np.ndarray]:
    result = {}
    for key, array in arrays.items():
        module, _, leaf = key.rpartition(".")
        rules = RULES.get(layer_types.get(module, ""), {})
        if inverse:
            rules = {paddle_name: (torch_name, change) for torch_name, (paddle_name, change) in rules.items()}
        if leaf not in rules:
            layer = layer_types.get(module, "no layer of this model")
            raise UserError(f"no rule converts {key} ({layer}): is it a weight of this model? check --model and --from")
        name, change = rules[leaf]
        result[f"{module}.{name}"] = change(array)
    return result


def torch_to_paddle(arrays: Mapping[str, np.ndarray], types: Mapping[str, str]) -> dict[str, np.ndarray]:
    """A PyTorch state_dict's arrays under PaddlePaddle's names and layouts; `types` maps modules to PyTorch's types.

    Raises UserError for a key that no rule covers.
    """
    return _renamed(arrays, types, inverse=False)


def paddle_to_torch(arrays: Mapping[str, np.ndarray], types: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The inverse of `torch_to_paddle`, bit for bit."""
    return _renamed(arrays, types, inverse=True)
