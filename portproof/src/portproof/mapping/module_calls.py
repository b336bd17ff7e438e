"""Match module calls of the port and the reference: layers by the map, else by values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import chain, product
from operator import attrgetter

from portproof.backends.model import BackendModel, Model, Run
from portproof.backends.question import Question
from portproof.backends.trace import OUTPUT, ModuleCall
from portproof.mapping.agreement import alike, alike_in_any_order
from portproof.mapping.arguments import are_fed_alike, arguments
from portproof.mapping.pairing import contents_of
from portproof.python39 import zip_strict

EXACT = 1e-9  # of the largest value: closer float64 runs are of one function

Calls = Sequence[ModuleCall]


@dataclass
class CallMatcher:
    """Matches the calls of one run of each model."""

    ref: Model
    port: BackendModel
    ref_run: Run
    port_run: Run
    modules: Mapping[str, str]  # {reference's: port's}
    tensors: Mapping[str, str]
    train: bool = False

    def __post_init__(self) -> None:
        traces = self.ref_run.trace, self.port_run.trace
        self.ref_calls, self.port_calls = (sorted(t.calls.values(), key=attrgetter("start")) for t in traces)
        self.same_names = all(ref_name == port_name for ref_name, port_name in self.modules.items())
        self.same_output = bool(self.ref_run.output) and alike(self.ref_run.output, self.port_run.output, EXACT)
        self.pairs: dict[str, str] = {}  # {reference's output: port's}
        ref_keys, port_keys = {key: key for key in self.tensors}, {key: ref for ref, key in self.tensors.items()}
        self.contents, self.port_contents = contents_of(self.ref, ref_keys), contents_of(self.port, port_keys)
        self.type_fits: dict[tuple[str, str], bool] = {}  # {(reference's, port's) class: match}
        self.proved: dict[tuple[str, str], bool] = {}  # {calls of both sides: give the same}

    def match(self) -> dict[str, str]:
        """{reference's output: port's} of all that match, in execution order."""
        self._match_layers()
        self._match_wrappers()
        self._match_leaves()
        self._match_blocks()
        pairs = self.pairs | {OUTPUT: OUTPUT}
        return {label: pairs[label] for label in self.ref_run.trace.calls if label in pairs}

    def _match_layers(self) -> None:
        port_calls: defaultdict[str, list[ModuleCall]] = defaultdict(list)
        waiting = []
        for call in self.port_calls:
            port_calls[call.name].append(call)
        for call in self.ref_calls:
            there = self.modules.get(call.name)
            calls = [] if there is None else port_calls.get(there, [])
            same = next((place for place, other in enumerate(calls) if alike(call.inputs, other.inputs)), None)
            if same is None:
                waiting.append((call, calls))
            else:
                self._pair_layers(call, calls.pop(same))
        for call, calls in waiting:
            if calls:
                self._pair_layers(call, calls.pop(0))

    def _pair_layers(self, call: ModuleCall, port_call: ModuleCall) -> None:
        """Of the same tensors. Two kinds (linear, 1x1 convolution) must agree in shape and values."""
        if self.contents[call.name] != self.port_contents[port_call.name]:
            return  # a bias that is added outside
        kind, port_kind = self.ref.modules[call.name].kind, self.port.modules[port_call.name].kind
        same_shapes = [array.shape for array in call.outputs] == [array.shape for array in port_call.outputs]
        both = kind and port_kind  # a class for a layer may hold more
        if kind == port_kind or both and same_shapes and self._fits(call, port_call):
            self.pairs[call.label] = port_call.label

    def _match_wrappers(self) -> None:
        """Pair a layer of a derived class with the port's wrapper around a plain layer, which masks its weight, say.

        That is so where the wrapper gives its values, and of all others of these classes.
        """
        ref_calls, port_calls = self.ref_run.trace.calls, self.port_run.trace.calls
        around: dict[str, ModuleCall] = {}
        for label, port_label in self.pairs.items():
            call, port_call = ref_calls[label], port_calls[port_label]
            module, wrapper = self.ref.modules[call.name], port_calls.get(port_call.inside)
            is_derived = bool(module.kind) and module.type != module.kind == self._port_type(port_call)
            if is_derived and wrapper and self.contents[call.name] == self.port_contents[wrapper.name]:
                around[label] = wrapper
        types = {label: self._types(ref_calls[label], wrapper) for label, wrapper in around.items()}
        proved = {types[label] for label in around if alike(ref_calls[label].outputs, around[label].outputs)}
        self.pairs |= {label: around[label].label for label in around if types[label] in proved}

    def _match_leaves(self) -> None:
        """By values, first behind the same layer; behind a fault by name or type."""
        ref_groups = _leaves_behind_layers(self.ref, self.ref_calls, {label: label for label in self.pairs})
        back = {port_label: label for label, port_label in self.pairs.items()}
        port_groups = _leaves_behind_layers(self.port, self.port_calls, back)
        taken: set[str] = set()
        for layer, calls in ref_groups.items():
            near = port_groups.get(layer, [])
            far = [call for other, group in port_groups.items() if other != layer for call in group]
            for call in calls:
                found = self._best_fit(call, near, taken) or self._best_fit(call, far, taken)
                if found:
                    self.pairs[call.label] = found.label
                    self.type_fits[self._types(call, found)] = True
                    taken.add(found.label)
        if self.same_output:
            return
        for layer, calls in ref_groups.items():
            left = {call.label: call for call in calls if call.label not in self.pairs}
            port_left = {call.label: call for call in port_groups.get(layer, []) if call.label not in taken}
            for label in list(left):
                if self.same_names and label in port_left:
                    self.pairs[label] = label
                    del left[label], port_left[label]
            self._pair_by_type(list(left.values()), list(port_left.values()))

    def _match_blocks(self) -> None:
        ref_groups = _by_tensors_inside(self.ref, self.ref_calls, self.contents, self.pairs)
        port_groups = _by_tensors_inside(self.port, self.port_calls, self.port_contents, set(self.pairs.values()))
        undecided = []
        groups = [(calls, port_groups.get(key, [])) for key, calls in ref_groups.items()]
        every = chain.from_iterable(product(*group) for group in groups)
        proved = {self._types(*pair) for pair in every if self._is_proved(*pair)}
        self.type_fits |= dict.fromkeys(proved, True)
        for calls, port_calls in groups:
            pairs: Iterable[tuple[ModuleCall, ModuleCall]]
            if len(calls) == len(port_calls):
                pairs = list(zip_strict(calls, port_calls))
            else:  # a block and a layer in it have the same tensors inside
                pairs = self._only_ones(calls, port_calls)
            for call, port_call in pairs:
                types = self._types(call, port_call)
                fits = types in proved and not self.same_output or self._fits(call, port_call)
                if fits is None:
                    undecided.append((call, port_call))
                    continue
                self.type_fits[types] = fits and self.type_fits.get(types, True)
                if fits:
                    self.pairs[call.label] = port_call.label
        for call, port_call in undecided:
            fits = self.type_fits.get(self._types(call, port_call), self.same_names)
            if fits or self._is_proved(call, port_call):
                self.pairs[call.label] = port_call.label

    def _is_proved(self, call: ModuleCall, port_call: ModuleCall) -> bool:
        """Whether they give the same: in the models, or the port's alone on the reference's inputs behind a fault."""
        key = call.label, port_call.label
        if key not in self.proved:
            self.proved[key] = _agree(call, port_call) or not self.same_output and self._agree_alone(call, port_call)
        return self.proved[key]

    def _agree_alone(self, call: ModuleCall, port_call: ModuleCall) -> bool:
        own = arguments(call.inputs, call.inputs, port_call)
        given = replace(port_call, args=own.args, kwargs=own.kwargs)
        output = self.port.ask(Question(given, "float64", self.train)).output if own.complete else []
        return bool(output) and alike_in_any_order(call.outputs, output[: len(call.outputs)])

    def _only_ones(self, calls: Calls, port_calls: Calls) -> Iterator[tuple[ModuleCall, ModuleCall]]:
        """The only one with these values, then of a class that fits, then that may be faulty, then of a class."""
        left, port_left = list(calls), list(port_calls)

        def are_own(call: ModuleCall, other: ModuleCall) -> bool:
            return not (self.ref.modules[call.name].kind or self.port.modules[other.name].kind)

        def are_namesakes(call: ModuleCall, other: ModuleCall) -> bool:
            types = self._types(call, other)
            return are_own(call, other) and types[0] == types[1]

        def is_known(call: ModuleCall, other: ModuleCall) -> bool:
            return self.type_fits.get(self._types(call, other), False)

        def has_this_shape(call: ModuleCall, other: ModuleCall) -> bool:
            same_shapes = [array.shape for array in call.outputs] == [array.shape for array in other.outputs]
            return same_shapes and bool(self._fits(call, other))

        for may_be in (self._is_proved, are_namesakes, is_known, has_this_shape, self._fits, are_own):
            for call in list(left):
                fitting = [other for other in port_left if may_be(call, other)]
                if len(fitting) == 1:
                    yield call, fitting[0]
                    left.remove(call)
                    port_left.remove(fitting[0])

    def _types(self, call: ModuleCall, port_call: ModuleCall) -> tuple[str, str]:
        return self.ref.modules[call.name].type, self._port_type(port_call)

    def _port_type(self, call: ModuleCall) -> str:
        return self.port.backend.layers.torch_type(self.port.modules[call.name].type)

    def _fits(self, call: ModuleCall, port_call: ModuleCall) -> bool | None:
        """None: undecided, behind a fault."""
        outputs, port_outputs = call.outputs, port_call.outputs
        if not (alike_in_any_order(call.inputs, port_call.inputs) or are_fed_alike(call, port_call)):
            if self.same_output or not _share_input(call, port_call):
                return False if self.same_output else None
            count = min(len(outputs), len(port_outputs))
            outputs, port_outputs = outputs[:count], port_outputs[:count]
        # Attention may give its weights, too.
        if len(outputs) != len(port_outputs):
            return False
        if self.same_output or alike_in_any_order(outputs, port_outputs):
            return alike_in_any_order(outputs, port_outputs)
        # A fault, or they end at different places: then the port has this value elsewhere.
        found = [arrays for other in self.port_calls for arrays in (other.inputs, other.outputs)]
        return not any(alike_in_any_order(outputs, arrays) for arrays in found)

    def _best_fit(self, call: ModuleCall, port_calls: Calls, taken: Container[str]) -> ModuleCall | None:
        def rank(other: ModuleCall) -> tuple[bool, bool]:  # the same name, then the same type
            ref_type, port_type = self._types(call, other)
            return self.same_names and other.label != call.label, ref_type != port_type

        fitting = [other for other in port_calls if other.label not in taken and self._fits(call, other)]
        return min(fitting, key=rank, default=None)

    def _pair_by_type(self, calls: Calls, port_calls: Calls) -> None:
        pairs = list(zip(calls, port_calls))
        all_types = [self._types(*pair) for pair in pairs]
        in_turn = all(types[0] == types[1] or self.type_fits.get(types) for types in all_types)
        if len(calls) != len(port_calls) or not in_turn:
            ref_types = [self.ref.modules[call.name].type for call in calls]
            matcher = SequenceMatcher(None, ref_types, list(map(self._port_type, port_calls)), autojunk=False)
            pairs = []
            for i, j, size in matcher.get_matching_blocks():
                pairs += zip_strict(calls[i : i + size], port_calls[j : j + size])
        self.pairs.update((call.label, port_call.label) for call, port_call in pairs)


def _agree(call: ModuleCall, port_call: ModuleCall) -> bool:
    return alike_in_any_order(call.outputs, port_call.outputs)


def _share_input(call: ModuleCall, port_call: ModuleCall) -> bool:
    """Whether both receive one array of floats, beside others that differ."""
    pairs = product(call.inputs, port_call.inputs)
    return any(a.dtype.kind == "f" and a.size > 1 and alike_in_any_order([a], [b]) for a, b in pairs)


def _leaves_behind_layers(model: Model, calls: Calls, layers: Mapping[str, str]) -> dict[str, list[ModuleCall]]:
    """{layer: leaves behind it}; `layers` is {own label: reference's}."""
    groups, current = defaultdict(list), ""
    for call in calls:
        module = model.modules[call.name]
        if call.label in layers:
            current = layers[call.label]
        elif module.is_leaf and not module.slots:
            groups[current].append(call)
    return groups


def _by_tensors_inside(
    model: Model, calls: Calls, contents: Mapping[str, frozenset[str]], taken: Container[str]
) -> dict[tuple[frozenset[str], int], list[ModuleCall]]:
    """{(tensors inside, or the block's name; call number): calls}."""
    groups = defaultdict(list)
    for call in calls:
        module = model.modules[call.name]
        is_block = module.slots or not module.is_leaf  # a cell here is a block there
        if call.name and is_block and call.label not in taken:
            groups[contents[call.name] or frozenset([call.name]), call.number].append(call)
    return groups
