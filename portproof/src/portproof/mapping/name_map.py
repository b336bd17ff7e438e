"""Which module and tensor of the port stands for which of the reference: by name, else by order, type and shape.

A proposal is only as good as what confirms it: weights are loaded through it and values are sent through both models
(see map_search.py). Where every layer receives and gives the same, the map is right; where values cannot tell, it is
not guessed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from portproof.backends.model import BackendModel
from portproof.backends.trace import module_of
from portproof.io.cli import UserError
from portproof.mapping.map_search import MapSearch
from portproof.mapping.module_calls import match_calls
from portproof.mapping.pairing import complete_pairs, modules_with_tensors, tensor_pairs


@dataclass
class NameMap:
    """The reference's names to the port's."""

    modules: dict[str, str] = field(default_factory=dict)  # those that have tensors
    tensors: dict[str, str] = field(default_factory=dict)  # state_dict keys
    calls: dict[str, str] = field(default_factory=dict)  # outputs' names as traces have them, in execution order
    how: str = ""  # what the map rests on
    problems: dict[str, str] = field(default_factory=dict)  # {tensor or module: what does not fit}
    ambiguous: str = ""  # why no map was chosen

    @property
    def confirmed(self) -> bool:
        """Whether values confirm it everywhere."""
        return self.how.endswith("confirmed by values everywhere")


def propose(
    ref: BackendModel, port: BackendModel, inputs: Sequence[np.ndarray], given: Mapping[str, str] | None = None
) -> NameMap:
    """The map between two models with the reference's weights, which the port is left with.

    `given` fixes some modules, {reference's name: port's name}. Raises UserError where it names what is not there.
    """
    given = checked_map(given or {}, ref, port)
    search = MapSearch(ref, port, inputs)
    modules, fixed, how = _module_pairs(search, given)
    tensors, problems = tensor_pairs(ref, port, modules)
    names = NameMap(modules, tensors, how=how, problems=problems)
    if not problems:
        found = search.exchange_tensors(search.resolve(modules, fixed), fixed)
        names.modules, names.tensors = found.modules, search.tensors(found.modules)
        names.how += f", confirmed by values {found.extent}"
        names.ambiguous = search.ambiguity(found, fixed)
    port.load({port_key: search.arrays[key] for key, port_key in names.tensors.items()})
    for train in (False, True):  # some modules run in one mode only
        ref_run, port_run = (model.run(inputs, "float64", train, calls=True) for model in (ref, port))
        names.calls = match_calls(ref, port, ref_run, port_run, names.modules) | names.calls
    return names


def checked_map(given: Mapping[str, str], ref: BackendModel, port: BackendModel) -> dict[str, str]:
    """A user's map, {reference's module: port's module}; raises UserError for a name that a side does not have."""
    for ref_name, port_name in given.items():
        for model, name in ((ref, ref_name), (port, port_name)):
            if name not in model.modules or not model.modules[name].slots:
                raise UserError(f"the map names {name!r}, but the {model.role} has no module with weights of that name")
    if len(set(given.values())) < len(given):
        double = Counter(given.values()).most_common(1)[0][0]
        raise UserError(f"the map names the port's {double!r} twice: each module once")
    return dict(given)


def _module_pairs(search: MapSearch, given: dict[str, str]) -> tuple[dict[str, str], set[str], str]:
    """(pairs of modules, those that names fix, what they rest on).

    By name where most names are common, unless by order fewer tensors are left over: the numbers in a Sequential are
    names too, which one layer more or less moves.
    """
    ref_modules = modules_with_tensors(search.ref, search.ref_run.trace)
    port_modules = modules_with_tensors(search.port, search.port_run.trace)
    ref_names, port_names = [m.name for m in ref_modules], {m.name for m in port_modules}
    taken = {*given, *given.values()}
    common = {name: name for name in ref_names if name in port_names and name not in taken}
    by_order, order = complete_pairs(given, ref_modules, port_modules), "by order, type and shape"
    if 2 * (len(common) + len(given)) <= max(len(ref_names), len(port_names)):
        return by_order, set(given), order
    by_name = complete_pairs(given | common, ref_modules, port_modules)
    problems_by_order, problems_by_name = (
        tensor_pairs(search.ref, search.port, modules)[1] for modules in (by_order, by_name)
    )
    if len(problems_by_order) < len(problems_by_name):
        return by_order, set(given), order
    rest = len(by_name) - len(common) - len(given)
    all_common = set(ref_names) == port_names  # else a number may be the same by accident
    fixed = {name for name in common if all_common or not name.rpartition(".")[2].isdigit()}
    return by_name, fixed | set(given), f"by name, {rest} {order}" if rest else "by name"


def same_names(ref: BackendModel, port: BackendModel, inputs: Sequence[np.ndarray]) -> NameMap | None:
    """The map of equal names, whose weights the port is left with; None unless both have the same names and shapes."""
    ref_slots, port_slots = (
        {(name, leaf): slot for name, module in model.modules.items() for leaf, slot in module.slots.items()}
        for model in (ref, port)
    )
    ref_shapes, port_shapes = ({k: slot.shape for k, slot in slots.items()} for slots in (ref_slots, port_slots))
    if ref_shapes != port_shapes:
        return None
    modules = {name: name for name, module in ref.modules.items() if module.slots}
    tensors = {slot.key: port_slots[place].key for place, slot in ref_slots.items()}
    arrays = ref.arrays()
    port.load({port_key: arrays[key] for key, port_key in tensors.items()})
    calls = ref.run(inputs, "float32", train=False, calls=True).trace.calls
    labels = {label: label for label, call in calls.items() if not call.name or call.name in port.modules}
    return NameMap(modules, tensors, labels, "by name")


def port_module(names: NameMap, label: str) -> str:
    """The port's module behind the reference's output `label`."""
    name = module_of(names.calls[label])
    return "" if name == "output" else name
