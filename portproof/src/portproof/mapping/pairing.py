"""Pairs of modules and tensors by name, order, type and shape. They are proposals, which values have to confirm."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations

from portproof.backends.model import BackendModel, Module
from portproof.backends.trace import Trace

OPTIONAL = "num_batches_tracked"  # PaddlePaddle does not have it


def modules_with_tensors(model: BackendModel, trace: Trace) -> list[Module]:
    """The modules with tensors of their own, in the order of their first call; those never called follow."""
    called = dict.fromkeys(call.name for call in sorted(trace.calls.values(), key=lambda call: call.start))
    names = [*called, *(name for name in model.modules if name not in called)]
    return [model.modules[name] for name in names if model.modules[name].slots]


def _shapes(module: Module) -> tuple:
    return tuple(sorted(slot.shape for leaf, slot in module.slots.items() if leaf != OPTIONAL))


def signature(module: Module) -> tuple:
    """What two modules must share to stand for each other: the kind of layer and the shapes of its tensors."""
    if not module.kind:
        return "", _shapes(module)
    shapes = {leaf: slot.shape for leaf, slot in module.slots.items() if leaf != OPTIONAL}
    return module.kind.rstrip("123d").replace("SyncBatchNorm", "BatchNorm"), tuple(sorted(shapes.items()))


def complete_pairs(pairs: dict[str, str], ref: Sequence[Module], port: Sequence[Module]) -> dict[str, str]:
    """`pairs` of names and those of the modules left, by order; in the reference's order."""
    ref_left = [module for module in ref if module.name not in pairs]
    port_left = [module for module in port if module.name not in pairs.values()]
    pairs = pairs | _by_order(ref_left, port_left)
    return {module.name: pairs[module.name] for module in ref if module.name in pairs}


def _by_order(ref: Sequence[Module], port: Sequence[Module]) -> dict[str, str]:
    """Pairs of one signature, or at least of the same shapes, in turn; else where the sequences run alike."""
    pairs = _in_turn(ref, port, signature) or _in_turn(ref, port, _shapes)
    if pairs:
        return pairs
    matcher = SequenceMatcher(None, [signature(m) for m in ref], [signature(m) for m in port], autojunk=False)
    for tag, ref_start, ref_end, port_start, port_end in matcher.get_opcodes():
        ref_run, port_run = ref[ref_start:ref_end], port[port_start:port_end]
        same_layers = [m.kind for m in ref_run] == [m.kind for m in port_run]  # if of another size
        if tag == "equal" or tag == "replace" and same_layers:
            pairs.update({r.name: p.name for r, p in zip(ref_run, port_run, strict=True)})
    return pairs


def _in_turn(ref: Sequence[Module], port: Sequence[Module], key: Callable[[Module], tuple]) -> dict[str, str]:
    """The n-th of a key with the n-th, if both sides have as many of each; else nothing."""
    if Counter(map(key, ref)) != Counter(map(key, port)):
        return {}
    queues = defaultdict(list)
    for module in port:
        queues[key(module)].append(module.name)
    return {module.name: queues[key(module)].pop(0) for module in ref}


def tensor_pairs(
    ref: BackendModel, port: BackendModel, modules: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """({reference's key: port's key}, {tensor or module: what does not fit}) of a map of modules."""
    tensors, problems = {}, {}
    for name, module in ref.modules.items():
        if module.slots and name not in modules:
            problems[name] = f"the port has no {module.type} for it"
    for name, module in port.modules.items():
        if module.slots and name not in modules.values():
            problems[f"port's {name}"] = f"the reference has no {module.type} for it"
    for ref_name, port_name in modules.items():
        ref_slots, port_slots = ref.modules[ref_name].slots, port.modules[port_name].slots
        leaves = _leaf_pairs(ref.modules[ref_name], port.modules[port_name])
        for leaf, slot in ref_slots.items():
            port_slot = port_slots.get(leaves.get(leaf, ""))
            if port_slot is None and leaf != OPTIONAL:
                problems[slot.key] = f"the port's {port_name} does not have it"
            elif port_slot is not None and port_slot.shape != slot.shape:
                problems[slot.key] = f"shape: reference {slot.shape}, port {port_slot.shape}"
            elif port_slot is not None:
                tensors[slot.key] = port_slot.key
        for leaf, slot in port_slots.items():
            if leaf not in leaves.values() and leaf != OPTIONAL:
                problems[f"port's {slot.key}"] = f"the reference's {ref_name} does not have it"
    return tensors, problems


def _leaf_pairs(ref: Module, port: Module) -> dict[str, str]:
    """{tensor of a module: its counterpart}: by name; in modules of one's own then by shape, in order."""
    pairs = {leaf: leaf for leaf in ref.slots if leaf in port.slots}
    if ref.kind and ref.kind == port.kind:
        return pairs
    same_shape = lambda a, b: a.shape == b.shape  # noqa: E731
    for fits in (lambda a, b: same_shape(a, b) and a.trained == b.trained, same_shape, lambda a, b: True):
        for leaf, slot in ref.slots.items():
            if leaf in pairs or leaf == OPTIONAL:
                continue
            free = [name for name in port.slots if name not in pairs.values() and fits(slot, port.slots[name])]
            if free:
                pairs[leaf] = free[0]
    return pairs


def exchanges(ref: BackendModel, port: BackendModel, modules: Mapping[str, str]) -> list[dict[str, str]]:
    """Pairs of keys with two tensors of one module and shape exchanged, which no name tells apart."""
    tensors, result = tensor_pairs(ref, port, modules)[0], []
    for ref_name, port_name in modules.items():
        module, counterpart = ref.modules[ref_name], port.modules[port_name]
        unnamed = [slot for leaf, slot in module.slots.items() if leaf not in counterpart.slots and not module.kind]
        for a, b in combinations(unnamed, 2):
            if a.shape == b.shape:
                result.append({a.key: tensors[b.key], b.key: tensors[a.key]})
    return result
