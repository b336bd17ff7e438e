"""Which module and tensor of the port stands for which of the reference: by name, else by order, type and shape.

A proposal is only as good as what confirms it: weights are loaded through it and values are sent through both models
(see confirm.py). Where every layer receives and gives the same, the map is right; where values cannot tell, it is not
guessed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import combinations

import numpy as np

from portproof.backends.model import BackendModel, Module, Slot
from portproof.backends.trace import Trace, module_of
from portproof.io.cli import UserError
from portproof.mapping.calls import match_calls
from portproof.mapping.values import Trial

OPTIONAL = "num_batches_tracked"  # PaddlePaddle does not have it


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


def bearers(side: BackendModel, record: Trace) -> list[Module]:
    """The modules with tensors of their own, in the order of their first call; those never called follow."""
    called = dict.fromkeys(call.name for call in sorted(record.calls.values(), key=lambda call: call.start))
    names = [*called, *(name for name in side.modules if name not in called)]
    return [side.modules[name] for name in names if side.modules[name].slots]


def _shapes(module: Module) -> tuple:
    return tuple(sorted(slot.shape for leaf, slot in module.slots.items() if leaf != OPTIONAL))


def signature(module: Module) -> tuple:
    """What two modules must share to stand for each other: the kind of layer and the shapes of its tensors."""
    if not module.kind:
        return "", _shapes(module)
    shapes = {leaf: slot.shape for leaf, slot in module.slots.items() if leaf != OPTIONAL}
    return module.kind.rstrip("123d").replace("SyncBatchNorm", "BatchNorm"), tuple(sorted(shapes.items()))


def _in_turn(ref: Sequence[Module], port: Sequence[Module], sign: Callable[[Module], tuple]) -> dict[str, str]:
    """The n-th of a signature with the n-th, if both sides have as many of each; else nothing."""
    if Counter(map(sign, ref)) != Counter(map(sign, port)):
        return {}
    queues = defaultdict(list)
    for module in port:
        queues[sign(module)].append(module.name)
    return {module.name: queues[sign(module)].pop(0) for module in ref}


def _by_order(ref: Sequence[Module], port: Sequence[Module]) -> dict[str, str]:
    """Pairs of one signature, or at least of the same shapes, in turn; else where the sequences run alike."""
    pairs = _in_turn(ref, port, signature) or _in_turn(ref, port, _shapes)
    if pairs:
        return pairs
    matcher = SequenceMatcher(None, [signature(m) for m in ref], [signature(m) for m in port], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        same_layers = [m.kind for m in ref[i1:i2]] == [m.kind for m in port[j1:j2]]  # if of another size
        if tag == "equal" or tag == "replace" and same_layers:
            pairs.update({one.name: other.name for one, other in zip(ref[i1:i2], port[j1:j2], strict=True)})
    return pairs


def _completed(pairs: dict[str, str], ref: Sequence[Module], port: Sequence[Module]) -> dict[str, str]:
    """`pairs` and those of the modules left, by order; in the reference's order."""
    left = [m for m in ref if m.name not in pairs], [m for m in port if m.name not in pairs.values()]
    pairs = pairs | _by_order(*left)
    return {module.name: pairs[module.name] for module in ref if module.name in pairs}


def _leaf_pairs(one: Module, other: Module) -> dict[str, str]:
    """{tensor of a module: its counterpart in the other}: by name; in modules of one's own then by shape, in order."""
    pairs = {leaf: leaf for leaf in one.slots if leaf in other.slots}
    if one.kind and one.kind == other.kind:
        return pairs

    def fits(slot: Slot, mate: Slot, strictness: int) -> bool:
        return strictness == 0 or slot.shape == mate.shape and (strictness == 1 or slot.trained == mate.trained)

    for strictness in (2, 1, 0):
        for leaf, slot in one.slots.items():
            mates = [m for m in other.slots if m not in pairs.values() and fits(slot, other.slots[m], strictness)]
            if leaf not in pairs and mates and leaf != OPTIONAL:
                pairs[leaf] = mates[0]
    return pairs


def tensor_pairs(
    ref: BackendModel, port: BackendModel, modules: Mapping[str, str], chosen: Mapping[str, str] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """({reference's key: port's key}, {tensor or module: what does not fit}); `chosen` are pairs of keys to use."""
    tensors, problems = {}, {}
    for name, module in ref.modules.items():
        if module.slots and name not in modules:
            problems[name] = f"the port has no {module.type} for it"
    for name, module in port.modules.items():
        if module.slots and name not in modules.values():
            problems[f"port's {name}"] = f"the reference has no {module.type} for it"
    for ref_name, port_name in modules.items():
        one, other = ref.modules[ref_name], port.modules[port_name]
        leaves = _leaf_pairs(one, other)
        for leaf, slot in one.slots.items():
            mate = other.slots.get(leaves.get(leaf, ""))
            if mate is None and leaf != OPTIONAL:
                problems[slot.key] = f"the port's {port_name} does not have it"
            elif mate is not None and mate.shape != slot.shape:
                problems[slot.key] = f"shape: reference {slot.shape}, port {mate.shape}"
            elif mate is not None:
                tensors[slot.key] = mate.key
        for leaf, slot in other.slots.items():
            if leaf not in leaves.values() and leaf != OPTIONAL:
                problems[f"port's {slot.key}"] = f"the reference's {ref_name} does not have it"
    return tensors | dict(chosen or {}), problems


def _exchanges(
    ref: BackendModel, port: BackendModel, modules: Mapping[str, str], tensors: Mapping[str, str]
) -> list[dict[str, str]]:
    """Pairs of keys with two tensors of one module and shape exchanged, which no name tells apart."""
    result = []
    for name, mate in modules.items():
        one, other = ref.modules[name], port.modules[mate]
        loose = [slot for leaf, slot in one.slots.items() if leaf not in other.slots and not one.kind]
        for a, b in combinations(loose, 2):
            if a.shape == b.shape:
                result.append({a.key: tensors[b.key], b.key: tensors[a.key]})
    return result


def checked_map(given: Mapping[str, str], ref: BackendModel, port: BackendModel) -> dict[str, str]:
    """A user's map, {reference's module: port's module}; raises UserError for a name that a side does not have."""
    for name, mate in given.items():
        for what, side, wanted in (("reference", ref, name), ("port", port, mate)):
            if wanted not in side.modules or not side.modules[wanted].slots:
                raise UserError(f"the map names {wanted!r}, but the {what} has no module with weights of that name")
    if len(set(given.values())) < len(given):
        double = Counter(given.values()).most_common(1)[0][0]
        raise UserError(f"the map names the port's {double!r} twice: each module once")
    return dict(given)


def _pair_up(
    ref: BackendModel, port: BackendModel, trial: Trial, given: dict[str, str]
) -> tuple[dict[str, str], set[str], str]:
    """(pairs of modules, those that names fix, what they rest on).

    By name where most names are common, unless by order fewer tensors are left over: the numbers in a Sequential are
    names too, which one layer more or less moves.
    """
    ones, others = bearers(ref, trial.ref_run.record), bearers(port, trial.port_run.record)
    names, port_names = [m.name for m in ones], {m.name for m in others}
    common = {n: n for n in names if n in port_names and n not in given and n not in given.values()}
    by_order, order = _completed(given, ones, others), "by order, type and shape"
    if 2 * (len(common) + len(given)) <= max(len(names), len(port_names)):
        return by_order, set(given), order
    by_name = _completed(given | common, ones, others)
    if len(tensor_pairs(ref, port, by_order)[1]) < len(tensor_pairs(ref, port, by_name)[1]):
        return by_order, set(given), order
    rest = len(by_name) - len(common) - len(given)
    same_set = set(names) == port_names  # else a number may be the same by accident
    fixed = {name for name in common if same_set or not name.rpartition(".")[2].isdigit()}
    return by_name, fixed | set(given), f"by name, {rest} {order}" if rest else "by name"


def propose(
    ref: BackendModel, port: BackendModel, inputs: Sequence[np.ndarray], given: Mapping[str, str] | None = None
) -> NameMap:
    """The map between two models with the reference's weights, which the port is left with.

    `given` fixes some modules, {reference's name: port's name}. Raises UserError where it names what is not there.
    """
    chosen: dict[str, str] = {}
    trial = Trial(ref, port, inputs, signature, lambda modules: tensor_pairs(ref, port, modules, chosen)[0])
    modules, fixed, how = _pair_up(ref, port, trial, checked_map(given or {}, ref, port))
    tensors, problems = tensor_pairs(ref, port, modules)
    names = NameMap(modules, tensors, how=how, problems=problems)
    if not problems:
        found = trial.resolve(modules, fixed)
        tensors = tensor_pairs(ref, port, found.modules)[0]
        for exchange in _exchanges(ref, port, found.modules, tensors) if found.reached < found.total else ():
            before = dict(chosen)
            chosen.update(exchange)
            further = trial.resolve(found.modules, fixed)
            if further.reached > found.reached:
                found = further
            else:
                chosen = before
        names.modules, names.tensors = found.modules, tensor_pairs(ref, port, found.modules, chosen)[0]
        names.how += f", confirmed by values {found.extent}"
        names.ambiguous = trial.symmetric(found, fixed)
    port.load({other: trial.arrays[one] for one, other in names.tensors.items()})
    for train in (False, True):  # some modules run in one mode only
        runs = [side.run(inputs, "float64", train, calls=True) for side in (ref, port)]
        names.calls = match_calls(ref, port, *runs, names.modules) | names.calls
    return names


def same_names(ref: BackendModel, port: BackendModel, inputs: Sequence[np.ndarray]) -> NameMap | None:
    """The map of equal names, whose weights the port is left with; None unless both have the same names and shapes."""
    slots, port_slots = (
        {(name, leaf): slot for name, module in side.modules.items() for leaf, slot in module.slots.items()}
        for side in (ref, port)
    )
    if {place: slot.shape for place, slot in slots.items()} != {
        place: slot.shape for place, slot in port_slots.items()
    }:
        return None
    modules = {name: name for name, module in ref.modules.items() if module.slots}
    tensors = {slot.key: port_slots[place].key for place, slot in slots.items()}
    arrays = ref.arrays()
    port.load({port_key: arrays[key] for key, port_key in tensors.items()})
    calls = ref.run(inputs, "float32", train=False, calls=True).record.calls
    labels = {label: label for label, call in calls.items() if not call.name or call.name in port.modules}
    return NameMap(modules, tensors, labels, "by name")


def port_module(names: NameMap, label: str) -> str:
    """The port's module behind the reference's output `label`."""
    name = module_of(names.calls[label])
    return "" if name == "output" else name
