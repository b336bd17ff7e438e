"""Which module and tensor of the port stands for which of the reference: by name, else by order, type and shape.

A proposal is only as good as what confirms it. Weights are loaded through it and values are sent through both models:
where every layer receives and gives the same, the map is right. Where layers of one type and shape stand side by side
in another order (branches), swapping them is tried. Where two maps explain the values equally well, none is chosen.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import combinations

import numpy as np

from reprod.recipe.cli import UserError

from .convert import PADDLE_TYPES
from .recording import Call, Recording, module_of
from .side import Module, Run, Side

SAME = 1e-4  # of the largest value: far above rounding in float64, far below what another layer would give
TRIES = 60  # swaps, each two runs
SILENT = ("Identity", "Flatten", "Dropout")  # modules that one side may leave out
OPTIONAL = "num_batches_tracked"  # PaddlePaddle does not have it


@dataclass
class NameMap:
    """The reference's names to the port's."""

    modules: dict[str, str] = field(default_factory=dict)  # those that have tensors
    tensors: dict[str, str] = field(default_factory=dict)  # state_dict keys
    calls: dict[str, str] = field(default_factory=dict)  # outputs' names as recordings have them, in execution order
    how: str = ""  # what the map rests on
    problems: dict[str, str] = field(default_factory=dict)  # {tensor or module: what does not fit}
    ambiguous: str = ""  # why no map was chosen


def bearers(side: Side, record: Recording) -> list[Module]:
    """The modules with tensors of their own, in the order of their first call; those never called follow."""
    called = dict.fromkeys(call.name for call in sorted(record.calls.values(), key=lambda call: call.start))
    names = [*called, *(name for name in side.modules if name not in called)]
    return [side.modules[name] for name in names if side.modules[name].slots]


def signature(module: Module) -> tuple:
    """What two modules must share to stand for each other: the kind of layer and the shapes of its tensors."""
    shapes = {leaf: slot.shape for leaf, slot in module.slots.items() if leaf != OPTIONAL}
    kind = module.kind.rstrip("123d").replace("SyncBatchNorm", "BatchNorm")
    return kind, tuple(sorted(shapes.items())) if module.kind else tuple(shapes.values())


def _by_order(ref: Sequence[Module], port: Sequence[Module]) -> dict[str, str]:
    """Pairs of one signature: the n-th with the n-th if there are as many, else where the sequences run alike."""
    ref_signs, port_signs = [signature(m) for m in ref], [signature(m) for m in port]
    pairs = {}
    if Counter(ref_signs) == Counter(port_signs):
        queues = defaultdict(list)
        for module, sign in zip(port, port_signs, strict=True):
            queues[sign].append(module.name)
        return {module.name: queues[sign].pop(0) for module, sign in zip(ref, ref_signs, strict=True)}
    matcher = SequenceMatcher(None, ref_signs, port_signs, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        gap = zip(ref[i1:i2], port[j1:j2], strict=False)
        if tag == "equal":
            pairs.update({one.name: other.name for one, other in gap})
        elif tag == "replace" and [m.kind for m in ref[i1:i2]] == [m.kind for m in port[j1:j2]]:
            pairs.update({one.name: other.name for one, other in gap})  # the same layers, of another size
    return pairs


def _pair_up(ref: Sequence[Module], port: Sequence[Module], given: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """(pairs of modules, what they rest on)."""
    names, port_names = [m.name for m in ref], {m.name for m in port}
    common = [name for name in names if name in port_names]
    if 2 * len(common) > max(len(names), len(port_names)):
        pairs, how = {name: name for name in common}, "by name"
    else:
        pairs, how = {}, "by order, type and shape"
    pairs = {one: other for one, other in pairs.items() if one not in given and other not in given.values()} | dict(
        given
    )
    left = [m for m in ref if m.name not in pairs], [m for m in port if m.name not in pairs.values()]
    more = _by_order(*left)
    if pairs and more and how == "by name":
        how += f", {len(more)} by order, type and shape"
    return {name: {**pairs, **more}[name] for name in names if name in pairs or name in more}, how


def _tensor_pairs(ref: Side, port: Side, modules: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """({reference's key: port's key}, {tensor or module: what does not fit})."""
    tensors, problems = {}, {}
    for name, module in ref.modules.items():
        if module.slots and name not in modules:
            problems[name] = f"the port has no {module.type} for it"
    for name, module in port.modules.items():
        if module.slots and name not in modules.values():
            problems[f"port's {name}"] = f"the reference has no {module.type} for it"
    for ref_name, port_name in modules.items():
        one, other = ref.modules[ref_name].slots, port.modules[port_name].slots
        leaves = dict(zip(one, one, strict=True))
        if not ref.modules[ref_name].kind and set(one) != set(other) and len(one) == len(other):
            leaves = dict(zip(one, other, strict=True))  # a module of one's own: its tensors in order
        for leaf, slot in one.items():
            mate = other.get(leaves[leaf])
            if mate is None and leaf != OPTIONAL:
                problems[slot.key] = f"the port's {port_name} does not have it"
            elif mate is not None and mate.shape != slot.shape:
                problems[slot.key] = f"shape: reference {slot.shape}, port {mate.shape}"
            elif mate is not None:
                tensors[slot.key] = mate.key
        for leaf, slot in other.items():
            if leaf not in leaves.values() and leaf != OPTIONAL:
                problems[f"port's {slot.key}"] = f"the reference's {ref_name} does not have it"
    return tensors, problems


def _alike(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    floats = [[array for array in side if array.dtype.kind == "f"] for side in (one, other)]
    return len(floats[0]) == len(floats[1]) and all(
        a.shape == b.shape and np.abs(a - b).max(initial=0) <= SAME * np.abs(a).max(initial=0)
        for a, b in zip(*floats, strict=True)
    )


def _agreeing(ref: Run, port: Run, modules: Mapping[str, str]) -> int:
    """How many calls of mapped layers, in the reference's order, receive the same before the first that does not."""
    calls = sorted((c for c in ref.record.calls.values() if c.name in modules), key=lambda call: call.start)
    mates = {(c.name, c.number): c for c in port.record.calls.values()}
    for i, call in enumerate(calls):
        mate = mates.get((modules[call.name], call.number))
        if mate is None or not _alike(call.inputs, mate.inputs):
            return i
    return len(calls) + _alike(ref.output, port.output)


class _Trial:
    """Maps tried by loading weights through them and sending values through both models."""

    def __init__(self, ref: Side, port: Side, inputs: Sequence[np.ndarray]) -> None:
        self.ref, self.port, self.inputs = ref, port, inputs
        self.arrays = ref.arrays()
        self.ref_run = ref.run(inputs, "float64", train=False, calls=True)

    def agreeing(self, modules: dict[str, str]) -> int:
        tensors, _ = _tensor_pairs(self.ref, self.port, modules)
        self.port.load({other: self.arrays[one] for one, other in tensors.items()})
        run = self.port.run(self.inputs, "float64", train=False, calls=True)
        return _agreeing(self.ref_run, run, modules)

    def full(self, modules: dict[str, str]) -> int:
        """What `agreeing` gives if nothing differs."""
        return sum(call.name in modules for call in self.ref_run.record.calls.values()) + 1

    def swaps(self, modules: dict[str, str], reached: int) -> Iterator[tuple[str, str]]:
        """Pairs of modules whose swap could let values agree further than the first `reached` calls.

        They are of one signature, and either receive the same (branches) or one of them is where values part.
        """
        calls = [call for call in self.ref_run.record.calls.values() if call.name in modules]
        calls.sort(key=lambda call: call.start)
        parting = calls[reached].name if reached < len(calls) else ""
        for one, other in combinations([call for call in calls if call.number == 0], 2):
            same_kind = signature(self.ref.modules[one.name]) == signature(self.ref.modules[other.name])
            if same_kind and (parting in (one.name, other.name) or _alike(one.inputs, other.inputs)):
                yield one.name, other.name


def _swapped(modules: dict[str, str], one: str, other: str) -> dict[str, str]:
    return modules | {one: modules[other], other: modules[one]}


def _resolve(trial: _Trial, modules: dict[str, str]) -> tuple[dict[str, str], int]:
    """Swap layers of one signature as long as that lets values agree further -> (modules, how far they agree)."""
    reached, tries = trial.agreeing(modules), 0
    while reached < trial.full(modules) and tries < TRIES:
        for one, other in trial.swaps(modules, reached):
            tries += 1
            if tries > TRIES:
                break
            further = trial.agreeing(_swapped(modules, one, other))
            if further > reached:
                modules, reached = _swapped(modules, one, other), further
                break
        else:
            break
    return modules, reached


def _symmetric(trial: _Trial, modules: dict[str, str], reached: int) -> str:
    """Two layers that receive the same and could be swapped without any value telling; "" if there are none."""
    for one, other in trial.swaps(modules, reached):
        by_name = one == modules[one] and other == modules[other]
        if not by_name and trial.agreeing(_swapped(modules, one, other)) >= reached:
            return (
                f"{one} and {other} may be the port's {modules[one]} and {modules[other]}, or the other way round:"
                " values are the same; say which in a map"
            )
    return ""


def checked_map(given: Mapping[str, str], ref: Side, port: Side) -> dict[str, str]:
    """A user's map, {reference's module: port's module}; raises UserError for a name that a side does not have."""
    for name, mate in given.items():
        for what, side, wanted in (("reference", ref, name), ("port", port, mate)):
            if wanted not in side.modules or not side.modules[wanted].slots:
                raise UserError(f"the map names {wanted!r}, but the {what} has no module with weights of that name")
    if len(set(given.values())) < len(given):
        double = Counter(given.values()).most_common(1)[0][0]
        raise UserError(f"the map names the port's {double!r} twice: each module once")
    return dict(given)


def propose(ref: Side, port: Side, inputs: Sequence[np.ndarray], given: Mapping[str, str] | None = None) -> NameMap:
    """The map between two models with the reference's weights, which the port is left with.

    `given` fixes some modules, {reference's name: port's name}. Raises UserError where it names what is not there.
    """
    trial = _Trial(ref, port, inputs)
    port_record = port.run(inputs, "float64", train=False, calls=True).record
    given = checked_map(given or {}, ref, port)
    modules, how = _pair_up(bearers(ref, trial.ref_run.record), bearers(port, port_record), given)
    tensors, problems = _tensor_pairs(ref, port, modules)
    names = NameMap(modules, tensors, how=how, problems=problems)
    if not problems:
        modules, reached = _resolve(trial, modules)
        names.modules, names.tensors = modules, _tensor_pairs(ref, port, modules)[0]
        total = trial.full(modules)
        if reached == total:
            names.how += ", confirmed by values everywhere"
            names.ambiguous = _symmetric(trial, modules, reached)
        else:
            names.how += f", confirmed by values up to layer {reached} of {total - 1}"
    port.load({other: trial.arrays[one] for one, other in names.tensors.items()})
    ref_calls, port_calls = trial.ref_run.record, port.run(inputs, "float64", train=False, calls=True).record
    names.calls = match_calls(ref, port, ref_calls, port_calls, names.modules)
    return names


def _following(side: Side, record: Recording, anchors: Mapping[tuple, str]) -> dict[str, list[Call]]:
    """{label of a layer's call: the calls of leaves without tensors that follow it, up to the next such layer}."""
    groups, current = defaultdict(list), ""
    for label, call in sorted(record.calls.items(), key=lambda item: item[1].start):
        if (call.name, call.number) in anchors:
            current = anchors[call.name, call.number]
        elif side.modules[call.name].is_leaf and not side.modules[call.name].type.startswith(SILENT):
            groups[current].append((label, call))
    return groups


def match_calls(
    ref: Side, port: Side, ref_record: Recording, port_record: Recording, modules: Mapping[str, str]
) -> dict[str, str]:
    """{reference's output: port's output}, in the reference's order of execution.

    Layers with tensors by `modules`; between them activations and pools in order, or by type where their numbers
    differ; blocks by the layers that they contain. What has no counterpart (a function on the other side) is left out.
    """
    port_labels = {(call.name, call.number): label for label, call in port_record.calls.items()}
    ref_anchors, port_anchors, pairs = {}, {}, {}
    for label, call in ref_record.calls.items():
        mate = (modules.get(call.name), call.number)
        if mate in port_labels:
            pairs[label] = port_labels[mate]
            ref_anchors[call.name, call.number] = port_anchors[mate] = label
    groups = _following(ref, ref_record, ref_anchors), _following(port, port_record, port_anchors)
    for anchor in groups[0]:
        pairs.update(_leaf_pairs(ref, port, groups[0][anchor], groups[1].get(anchor, [])))
    pairs.update(_block_pairs(ref, port, ref_record, port_labels, modules))
    if all(one == other for one, other in modules.items()):
        pairs.update({label: label for label in ref_record.calls if label in port_record.calls})
    pairs["output"] = "output"
    return {label: pairs[label] for label in ref_record.calls if label in pairs}


def _leaf_pairs(ref: Side, port: Side, ones: list, others: list) -> dict[str, str]:
    if len(ones) == len(others):
        return {one: other for (one, _), (other, _) in zip(ones, others, strict=True)}
    types = [ref.modules[call.name].type for _, call in ones]
    port_types = [PADDLE_TYPES.get(t, t) for t in (port.modules[call.name].type for _, call in others)]
    blocks = SequenceMatcher(None, types, port_types, autojunk=False).get_matching_blocks()
    return {ones[i + n][0]: others[j + n][0] for i, j, size in blocks for n in range(size)}


def _contents(side: Side, names: Mapping[str, str] | None = None) -> dict[str, frozenset[str]]:
    """{block: the layers with tensors in it}, under the other side's names if `names` are given."""
    result = {}
    for block, module in side.modules.items():
        if block and not module.is_leaf:
            inside = [n for n, m in side.modules.items() if m.slots and n.startswith(f"{block}.")]
            result[block] = frozenset((names or {}).get(n, n) for n in inside)
    return result


def _block_pairs(
    ref: Side, port: Side, ref_record: Recording, port_labels: Mapping[tuple, str], modules: Mapping[str, str]
) -> dict[str, str]:
    groups = defaultdict(list)
    for block, inside in _contents(port).items():
        if (block, 0) in port_labels:
            groups[inside].append(block)
    pairs, found = {}, _contents(ref, modules)
    counts = Counter(found[c.name] for c in ref_record.calls.values() if c.name in found and c.number == 0)
    for label, call in sorted(ref_record.calls.items(), key=lambda item: item[1].start):
        inside = found.get(call.name)
        if inside and call.number == 0 and counts[inside] == len(groups[inside]):
            pairs[label] = port_labels[groups[inside].pop(0), 0]
            counts[inside] -= 1
    return pairs


def port_module(names: NameMap, label: str) -> str:
    """The port's module behind the reference's output `label`."""
    name = module_of(names.calls[label])
    return "" if name == "output" else name
