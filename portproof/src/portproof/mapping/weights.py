"""Which tensor of the port stands for which of the reference, where both hold the same weights: by name, then by value.

Needs no inputs, so that it serves where nothing is sent through the models.
"""

from collections.abc import Mapping

import numpy as np

from portproof.backends.model import BackendModel
from portproof.compare import Verdict, compare, tensor_item
from portproof.compare.tolerances import exact_limits
from portproof.mapping.names import OPTIONAL


def by_weights(
    ref: BackendModel, port: BackendModel, modules: Mapping[str, str] | None = None
) -> tuple[dict[str, str], Verdict | None]:
    """({port's name: reference's key}, what has no equal on the other side, or None).

    Names are PyTorch's, in the port's own modules. A tensor goes with the port's of the same name if it has the same
    values, else with the first one left that has them. `modules`, {reference's module: port's module}, comes first.
    """
    modules, slots = modules or {}, port.backend.named_slots(port.model)
    ones, others = ref.arrays(), {slots[key][0]: array for key, array in port.arrays().items()}
    named = {key: _renamed(key, modules) for key in ones}
    pairs = {name: key for key, name in named.items() if name in others and np.array_equal(ones[key], others[name])}
    for key, one in ones.items():
        if key not in pairs.values():
            equal = (name for name, other in others.items() if name not in pairs and np.array_equal(one, other))
            name = next(equal, None)
            pairs |= {} if name is None else {name: key}
    ref_left = {named[key]: one for key, one in ones.items() if key not in pairs.values()}
    port_left = {name: other for name, other in others.items() if name not in pairs}
    left = [
        {
            tensor_item(name, "weights"): array
            for name, array in side.items()
            if not _is_optional(name, ref_left, port_left)
        }
        for side in (ref_left, port_left)
    ]
    if not any(left):
        return pairs, None
    return pairs, compare(*left, exact_limits(left[0]), title="weights, which have to be equal")


def _renamed(key: str, modules: Mapping[str, str]) -> str:
    module, dot, leaf = key.rpartition(".")
    return modules.get(module, module) + dot + leaf


def _is_optional(name: str, *sides: Mapping[str, np.ndarray]) -> bool:
    """Whether only one side has it, and may."""
    return name.rpartition(".")[2] == OPTIONAL and not all(name in side for side in sides)
