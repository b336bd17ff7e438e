"""Which module call of the port stands for which of the reference: layers by the map, all else by their values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from portproof.backends.model import BackendModel, Run
from portproof.backends.trace import ModuleCall
from portproof.mapping.map_search import alike
from portproof.mapping.pairing import contents_of
from portproof.python39 import zip_strict

EXACT = 1e-9  # of the largest value: two float64 runs closer than this are of one function, however it is put together

Labelled = tuple[str, ModuleCall]


def _in_order(run: Run) -> list[Labelled]:
    """The calls as they began."""
    return sorted(run.trace.calls.items(), key=lambda item: item[1].start)


@dataclass
class CallMatcher:
    """One run of each model, and what is known of which layer of the port stands for which of the reference."""

    ref: BackendModel
    port: BackendModel
    ref_run: Run
    port_run: Run
    modules: Mapping[str, str]  # {reference's: port's}
    tensors: Mapping[str, str]  # {reference's: port's}, by which blocks are known

    def __post_init__(self) -> None:
        self.ref_calls, self.port_calls = _in_order(self.ref_run), _in_order(self.port_run)
        self.same_names = all(ref_name == port_name for ref_name, port_name in self.modules.items())
        self.same_output = bool(self.ref_run.output) and alike(self.ref_run.output, self.port_run.output, EXACT)
        self.pairs: dict[str, str] = {}
        self.type_fits: dict[tuple[str, str], bool] = {}  # {two classes: whether they stand for each other here}

    def match(self) -> dict[str, str]:
        """{reference's output: port's output}, in the reference's order of execution.

        Layers with tensors by `modules`; activations, pools and blocks by what they receive and give. What has no
        counterpart (a function on the other side, a block that ends elsewhere) is left out.
        """
        self.match_layers()
        self.match_leaves()
        self.match_blocks()
        pairs = self.pairs | {"output": "output"}
        return {label: pairs[label] for label in self.ref_run.trace.calls if label in pairs}

    def match_layers(self) -> None:
        """Layers with tensors: calls of each and of its counterpart that receive the same, the others in turn.

        A layer of the library of another kind (a linear layer for a 1x1 convolution) may have its output in another
        order or shape: only where its values tell is it compared.
        """
        port_calls, waiting = defaultdict(list), []
        for labelled in self.port_calls:
            port_calls[labelled[1].name].append(labelled)
        for label, call in self.ref_calls:
            calls = port_calls.get(self.modules.get(call.name, None), [])
            same = next((other for other in calls if alike(call.inputs, other[1].inputs)), None)
            if same:
                self._pair_layers(label, call, same)
                calls.remove(same)
            else:
                waiting.append((label, call, calls))
        for label, call, calls in waiting:
            if calls:
                self._pair_layers(label, call, calls.pop(0))

    def _pair_layers(self, label: str, call: ModuleCall, port: Labelled) -> None:
        kind, port_kind = self.ref.modules[call.name].kind, self.port.modules[port[1].name].kind
        shapes, port_shapes = ([array.shape for array in each.outputs] for each in (call, port[1]))
        may_be = not (kind and port_kind) or self._fits(call, port[1])
        if kind == port_kind or may_be and shapes == port_shapes:  # attention is not the first of its steps
            self.pairs[label] = port[0]

    def match_leaves(self) -> None:
        """Leaves without tensors: by what they receive, among those that follow the same layer first.

        Behind a fault, where that does not tell, by name where names are common, by type and order.
        """
        ref_groups = _leaves_behind_layers(self.ref, self.ref_calls, {label: label for label in self.pairs})
        back = {port_label: label for label, port_label in self.pairs.items()}
        port_groups = _leaves_behind_layers(self.port, self.port_calls, back)
        taken = set()
        for layer, leaves in ref_groups.items():
            near = port_groups.get(layer, [])
            far = [leaf for other, group in port_groups.items() if other != layer for leaf in group]
            for label, call in leaves:
                found = self._best_fit(label, call, near, taken) or self._best_fit(label, call, far, taken)
                if found:
                    port_label, port_call = found
                    self.pairs[label] = port_label
                    self.type_fits[self._types(call, port_call)] = True
                    taken.add(port_label)
        if self.same_output:
            return
        for layer, leaves in ref_groups.items():
            ref_left = [leaf for leaf in leaves if leaf[0] not in self.pairs]
            port_left = [leaf for leaf in port_groups.get(layer, []) if leaf[0] not in taken]
            common = {label for label, _ in ref_left} & {label for label, _ in port_left} if self.same_names else set()
            self.pairs.update({label: label for label in common})
            ref_left, port_left = ([leaf for leaf in left if leaf[0] not in common] for left in (ref_left, port_left))
            self.pairs.update(self._by_type(ref_left, port_left))

    def match_blocks(self) -> None:
        """Blocks: by the layers that they contain, if they also begin and end at the same places."""
        undecided = []
        for (label, call), (port_label, port_call) in self._blocks_of_same_layers():
            types, fits = self._types(call, port_call), self._fits(call, port_call)
            if fits is None:
                undecided.append((label, port_label, types))
                continue
            self.type_fits[types] = fits and self.type_fits.get(types, True)
            if fits:
                self.pairs[label] = port_label
        for label, port_label, types in undecided:
            if self.type_fits.get(types, self.same_names):
                self.pairs[label] = port_label

    def _types(self, call: ModuleCall, port_call: ModuleCall) -> tuple[str, str]:
        """The classes of the two modules, the port's by PyTorch's name."""
        port_type = self.port.modules[port_call.name].type
        return self.ref.modules[call.name].type, self.port.backend.layers.torch_type(port_type)

    def _fits(self, call: ModuleCall, port_call: ModuleCall) -> bool | None:
        """Whether two calls stand for each other; None: behind a fault what they receive does not tell."""
        if not alike(call.inputs, port_call.inputs):
            return False if self.same_output else None
        if len(call.outputs) != len(port_call.outputs):  # attention that gives its weights, too
            return False
        same_outputs = alike(call.outputs, port_call.outputs)
        if self.same_output or same_outputs:
            return same_outputs
        # One of them is at fault, or they end at different places: then the port has this value elsewhere.
        return not any(
            alike(call.outputs, arrays) for _, other in self.port_calls for arrays in (other.inputs, other.outputs)
        )

    def _best_fit(self, label: str, call: ModuleCall, leaves: list[Labelled], taken: set[str]) -> Labelled | None:
        """The first that fits, those of the same name before others, then those of the same type."""

        def rank(leaf: Labelled) -> tuple[bool, bool]:
            ref_type, port_type = self._types(call, leaf[1])
            return self.same_names and leaf[0] != label, ref_type != port_type

        fitting = [leaf for leaf in leaves if leaf[0] not in taken and self._fits(call, leaf[1])]
        return min(fitting, key=rank, default=None)

    def _by_type(self, ref_leaves: list[Labelled], port_leaves: list[Labelled]) -> dict[str, str]:
        """Pairs in turn, if the types fit each other; else where the sequences of types run alike."""
        if len(ref_leaves) == len(port_leaves):
            turns = list(zip_strict(ref_leaves, port_leaves))
            types = [self._types(call, port_call) for (_, call), (_, port_call) in turns]
            if all(pair[0] == pair[1] or self.type_fits.get(pair) for pair in types):
                return {label: port_label for (label, _), (port_label, _) in turns}
        ref_types = [self.ref.modules[call.name].type for _, call in ref_leaves]
        port_types = [self.port.modules[call.name].type for _, call in port_leaves]
        port_types = [self.port.backend.layers.torch_type(name) for name in port_types]
        pairs = {}
        for i, j, size in SequenceMatcher(None, ref_types, port_types, autojunk=False).get_matching_blocks():
            pairs |= {ref_leaves[i + n][0]: port_leaves[j + n][0] for n in range(size)}
        return pairs

    def _blocks_of_same_layers(self) -> Iterator[tuple[Labelled, Labelled]]:
        """Calls of blocks with the same layers in them, the outer ones first."""
        taken, port_taken = {*self.pairs}, {*self.pairs.values()}
        ref_keys, port_keys = {key: key for key in self.tensors}, {key: ref for ref, key in self.tensors.items()}
        ref_groups = _by_tensors_inside(self.ref, self.ref_calls, ref_keys, taken)
        port_groups = _by_tensors_inside(self.port, self.port_calls, port_keys, port_taken)
        for key, ref_group in ref_groups.items():
            port_group = port_groups.get(key, [])
            if len(ref_group) == len(port_group):
                yield from zip_strict(ref_group, port_group)


def _leaves_behind_layers(
    model: BackendModel, calls: list[Labelled], layers: Mapping[str, str]
) -> dict[str, list[Labelled]]:
    """{label of a layer's call: the calls of leaves without tensors that follow it, up to the next such layer}.

    `layers` are {this side's label: the reference's}.
    """
    groups, current = defaultdict(list), ""
    for label, call in calls:
        module = model.modules[call.name]
        if label in layers:
            current = layers[label]
        elif module.is_leaf and not module.slots:
            groups[current].append((label, call))
    return groups


def _by_tensors_inside(
    model: BackendModel, calls: list[Labelled], ref_keys: Mapping[str, str], taken: set[str]
) -> dict[tuple[frozenset[str], int], list[Labelled]]:
    """{(the tensors in a block, by the reference's keys, or the block's name; which call it is): the calls}.

    `ref_keys` are {this side's key: the reference's}; calls that are `taken` are left out.
    """
    groups, contents = defaultdict(list), contents_of(model, ref_keys)
    for label, call in calls:
        module = model.modules[call.name]
        if call.name and label not in taken and (module.slots or not module.is_leaf):  # a cell here is a block there
            groups[contents[call.name] or frozenset([call.name]), call.number].append((label, call))
    return groups
