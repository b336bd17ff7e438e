"""Which tensor of the port stands for which of the reference, where both hold the same weights: by name, then by value.

Needs no inputs, so that it serves where nothing is sent through the models.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from portproof.backends.model import BackendModel
from portproof.compare import Verdict, compare, tensor_item
from portproof.compare.ruler import exact_atol
from portproof.convert.rules import COUNT


def by_weights(
    ref: BackendModel, port: BackendModel, modules: Mapping[str, str] | None = None
) -> tuple[dict[str, str], Verdict | None]:
    """({port's name: reference's key}, what has no equal on the other side, or None).

    Names are PyTorch's, in the port's own modules. A tensor goes with the port's of the same name if it has the same
    values, else with the first one left that has them. `modules`, {reference's module: port's module}, comes first.
    """
    modules, names = modules or {}, port.backend.arrays_of(port.model).names
    ref_arrays = ref.arrays()
    port_arrays = {names[key]: array for key, array in port.arrays().items()}
    expected = {key: _renamed(key, modules) for key in ref_arrays}  # the port's names
    pairs = {}
    for key, name in expected.items():
        if name in port_arrays and np.array_equal(ref_arrays[key], port_arrays[name]):
            pairs[name] = key
    for key, array in ref_arrays.items():
        if key not in pairs.values():
            free = (name for name in port_arrays if name not in pairs)
            name = next((name for name in free if np.array_equal(array, port_arrays[name])), None)
            if name is not None:
                pairs[name] = key
    ref_left = {expected[key]: array for key, array in ref_arrays.items() if key not in pairs.values()}
    port_left = {name: array for name, array in port_arrays.items() if name not in pairs}
    left = [
        {tensor_item(k, "weights"): a for k, a in arrays.items() if not _is_optional(k, ref_left, port_left)}
        for arrays in (ref_left, port_left)
    ]
    if not any(left):
        return pairs, None
    return pairs, compare(*left, exact_atol(left[0]), title="weights, which have to be equal")


def _renamed(key: str, modules: Mapping[str, str]) -> str:
    module, dot, leaf = key.rpartition(".")
    return modules.get(module, module) + dot + leaf


def _is_optional(name: str, *sides: Mapping[str, np.ndarray]) -> bool:
    """Whether only one side has it, and may."""
    return name.rpartition(".")[2] == COUNT and not all(name in side for side in sides)
