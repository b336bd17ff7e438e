"""Match tensors of the port and the reference by equal values, without inputs."""

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
    """({port's name: reference's key}, comparison of what has no equal, or None).

    Names are PyTorch's; `modules` is {reference's: port's}. An equal tensor of the
    same name comes first.
    """
    names = port.backend.arrays_of(port.model).names
    left, port_left = ref.arrays(), {names[key]: array for key, array in port.arrays().items()}
    expected, pairs = {}, {}
    for key in left:
        module, dot, leaf = key.rpartition(".")
        expected[key] = (modules or {}).get(module, module) + dot + leaf
    for by_name in (True, False):
        for key, array in list(left.items()):
            candidates = [expected[key]] if by_name else list(port_left)
            equal = (name for name in candidates if name in port_left and np.array_equal(array, port_left[name]))
            name = next(equal, None)
            if name is not None:
                pairs[name] = key
                del left[key], port_left[name]
    left = {expected[key]: array for key, array in left.items()}
    # One side may lack them.
    one_sided = {name for name in left.keys() ^ port_left.keys() if name.rpartition(".")[2] == COUNT}
    items, port_items = (
        {tensor_item(name, "weights"): array for name, array in side.items() if name not in one_sided}
        for side in (left, port_left)
    )
    if not items and not port_items:
        return pairs, None
    return pairs, compare(items, port_items, exact_atol(items), title="weights, which have to be equal")
