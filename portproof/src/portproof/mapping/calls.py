"""Which call of the port stands for which of the reference: layers by the map, all else by what flows through it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher

from portproof.backends.model import BackendModel, Run
from portproof.backends.trace import Call
from portproof.convert.rules import PADDLE_TYPES
from portproof.mapping.values import alike

EXACT = 1e-9  # of the largest value: two float64 runs closer than this are of one function, however it is put together

Labelled = list[tuple[str, Call]]  # in the order in which the calls began


def match_calls(
    ref: BackendModel, port: BackendModel, ref_run: Run, port_run: Run, modules: Mapping[str, str]
) -> dict[str, str]:
    """{reference's output: port's output}, in the reference's order of execution.

    Layers with tensors by `modules`; activations, pools and blocks by what they receive and give. What has no
    counterpart (a function on the other side, a block that ends elsewhere) is left out.
    """
    pairs = _Matcher(ref, port, ref_run, port_run, modules).match()
    return {label: pairs[label] for label in ref_run.record.calls if label in pairs}


class _Matcher:
    def __init__(
        self, ref: BackendModel, port: BackendModel, ref_run: Run, port_run: Run, modules: Mapping[str, str]
    ) -> None:
        self.ref, self.port, self.modules = ref, port, modules
        self.ref_calls, self.port_calls = (
            sorted(run.record.calls.items(), key=lambda item: item[1].start) for run in (ref_run, port_run)
        )
        self.by_name = all(one == other for one, other in modules.items())
        self.is_exact = bool(ref_run.output) and alike(ref_run.output, port_run.output, EXACT)
        self.pairs: dict[str, str] = {}
        self.types: dict[tuple[str, str], bool] = {}  # {two classes: whether they stand for each other here}

    def match(self) -> dict[str, str]:
        labels = {(call.name, call.number): label for label, call in self.port_calls}
        for label, call in self.ref_calls:
            mate = (self.modules.get(call.name), call.number)
            if mate in labels:
                self.pairs[label] = labels[mate]
        ref_groups = _following(self.ref, self.ref_calls, {label: label for label in self.pairs})
        port_groups = _following(self.port, self.port_calls, {other: one for one, other in self.pairs.items()})
        self._match_leaves(ref_groups, port_groups)
        self._match_blocks()
        return self.pairs | {"output": "output"}

    def _types(self, one: Call, other: Call) -> tuple[str, str]:
        port_type = self.port.modules[other.name].type
        return self.ref.modules[one.name].type, PADDLE_TYPES.get(port_type, port_type)

    def _fits(self, one: Call, other: Call) -> bool | None:
        """Whether two calls stand for each other; None: behind a fault what they receive does not tell."""
        if not alike(one.inputs, other.inputs):
            return False if self.is_exact else None
        if self.is_exact or alike(one.outputs, other.outputs):
            return alike(one.outputs, other.outputs)
        # One of them is at fault, or they end at different places: then the port has this value elsewhere.
        return not any(alike(one.outputs, side) for _, call in self.port_calls for side in (call.inputs, call.outputs))

    def _match_leaves(self, ref_groups: dict[str, Labelled], port_groups: dict[str, Labelled]) -> None:
        """By what they receive, among those that follow the same layer first; behind a fault by type and order."""
        taken = set()
        for anchor, ones in ref_groups.items():
            near = port_groups.get(anchor, [])
            rest = [item for other, items in port_groups.items() if other != anchor for item in items]
            for label, call in ones:
                fits = self._candidates(label, call, near, taken) or self._candidates(label, call, rest, taken)
                if fits:
                    self.pairs[label] = fits[0][0]
                    self.types[self._types(call, fits[0][1])] = True
                    taken.add(fits[0][0])
        for anchor, ones in ref_groups.items() if not self.is_exact else ():
            left = [item for item in ones if item[0] not in self.pairs]
            self.pairs.update(self._by_type(left, [x for x in port_groups.get(anchor, []) if x[0] not in taken]))

    def _candidates(self, label: str, call: Call, others: Labelled, taken: set[str]) -> Labelled:
        """Those that fit, likelier ones first: of the same name, of the same type."""
        found = [item for item in others if item[0] not in taken and self._fits(call, item[1])]
        same_type = lambda other: len(set(self._types(call, other))) == 1  # noqa: E731
        return sorted(found, key=lambda item: (self.by_name and item[0] != label, not same_type(item[1])))

    def _by_type(self, ones: Labelled, others: Labelled) -> dict[str, str]:
        if len(ones) == len(others):
            types = [self._types(one, other) for (_, one), (_, other) in zip(ones, others, strict=True)]
            if all(one == other or self.types.get((one, other)) for one, other in types):
                return {one: other for (one, _), (other, _) in zip(ones, others, strict=True)}
        ref_types = [self.ref.modules[call.name].type for _, call in ones]
        port_types = [PADDLE_TYPES.get(t, t) for t in (self.port.modules[call.name].type for _, call in others)]
        blocks = SequenceMatcher(None, ref_types, port_types, autojunk=False).get_matching_blocks()
        return {ones[i + n][0]: others[j + n][0] for i, j, size in blocks for n in range(size)}

    def _match_blocks(self) -> None:
        """By the layers that they contain, if they also begin and end at the same places."""
        undecided = []
        for label, call, other_label, other in self._same_contents():
            fits = self._fits(call, other)
            if fits is None:
                undecided.append((label, other_label, self._types(call, other)))
                continue
            types = self._types(call, other)
            self.types[types] = fits and self.types.get(types, True)
            if fits:
                self.pairs[label] = other_label
        for label, other_label, types in undecided:
            if self.types.get(types, self.by_name):
                self.pairs[label] = other_label

    def _same_contents(self) -> Iterator[tuple[str, Call, str, Call]]:
        """Blocks with the same layers in them, the outer ones first."""
        contents, groups = _contents(self.port), defaultdict(list)
        for label, call in self.port_calls:
            groups[contents.get(call.name), call.number].append((label, call))
        contents = _contents(self.ref, self.modules)
        counts = defaultdict(list)
        for label, call in self.ref_calls:
            counts[contents.get(call.name), call.number].append((label, call))
        for key, ones in counts.items():
            if key[0] and len(ones) == len(groups[key]):
                yield from ((*one, *other) for one, other in zip(ones, groups[key], strict=True))


def _following(side: BackendModel, calls: Labelled, anchors: Mapping[str, str]) -> dict[str, Labelled]:
    """{label of a layer's call: the calls of leaves without tensors that follow it, up to the next such layer}.

    `anchors` are {this side's label: the reference's}.
    """
    groups, current = defaultdict(list), ""
    for label, call in calls:
        module = side.modules[call.name]
        if label in anchors:
            current = anchors[label]
        elif module.is_leaf and not module.slots:
            groups[current].append((label, call))
    return groups


def _contents(side: BackendModel, names: Mapping[str, str] | None = None) -> dict[str, frozenset[str]]:
    """{block: the layers with tensors in it, or itself}, under the other side's names if `names` are given."""
    result = {}
    for block, module in side.modules.items():
        if block and not module.is_leaf and not module.slots:
            inside = [n for n, m in side.modules.items() if m.slots and n.startswith(f"{block}.")]
            result[block] = frozenset((names or {}).get(n, n) for n in inside or [block])
    return result
