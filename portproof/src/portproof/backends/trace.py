"""A model's run as arrays: every module call, recorded by hooks. For all frameworks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np

from portproof.arrays import drawn, largest, same_bits
from portproof.backends.containers import contents, put, shallow_copy
from portproof.backends.draws import Draw
from portproof.backends.masks import Dropped
from portproof.compare import Item
from portproof.compare.activations import KINKS
from portproof.python39 import zip_strict
from sturdyio.cli import MachineError, UserError, one_line, user_code

if TYPE_CHECKING:
    from portproof.backends.base import Backend

# A model's inputs: positional arguments, or {keyword: argument}, where integer keys are positions.
# An argument is an array, nested tuples, lists and dicts of arrays, None, text or a plain number.
Inputs = Union[Sequence[Any], Mapping[Union[str, int], Any]]

MaybeArray = Optional[np.ndarray]  # as Python 3.9 reads annotations at run time

OUTPUT = "output"  # the model's own call in a trace
# What a run keeps beside outputs, buffers and gradients; each includes the one before:
OUTPUTS, CALLS, UPSTREAM = range(3)  # nothing; arguments of calls; to which outputs of calls gradients come back
RECENT = 12  # arrays; a shortcut may take its block's input 9 layers later
PLAIN = (type(None), bool, int, float, complex, str, list, tuple, dict)  # possible outputs without a tensor


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def items_in(value: Any, is_tensor: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    """(key, item) in a tuple, list, mapping, dataclass, or object with tensors."""
    if isinstance(value, Mapping):
        items = contents(value) if isinstance(value, dict) else value.items()
        return sorted(items, key=lambda item: str(item[0]))
    if isinstance(value, tuple):
        return list(enumerate(tuple.__iter__(value)))
    if isinstance(value, list):
        return list(enumerate(contents(value)))
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return []
    attributes = list(vars(value).items())
    return attributes if is_dataclass(value) or any(is_tensor(item) for _, item in attributes) else []


def map_tensors(value: Any, is_tensor: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """A copy of `value`, of the same classes, with `change` applied to all tensors."""
    if is_tensor(value):
        new = change(value)
        return np.asarray(new) if isinstance(new, np.generic) else new  # NumPy gives a number for an array without axes
    items = items_in(value, is_tensor)
    changed = [(key, map_tensors(item, is_tensor, change)) for key, item in items]
    if all(new is old for (_, new), (_, old) in zip_strict(changed, items)):
        return value
    if isinstance(value, tuple):
        arrays = [item for _, item in changed]
        # A class derived from a named tuple may take other arguments.
        return tuple.__new__(type(value), arrays) if hasattr(value, "_fields") else type(value)(arrays)
    result = shallow_copy(value)
    for key, item in changed:
        put(result, key, item)
    return result


def tensors_at(value: Any, is_tensor: Callable[[Any], bool], place: str = "") -> dict[str, Any]:
    """{place: tensor}, sorted: [1] in a sequence, [key] in others; "" is `value`."""
    if is_tensor(value):
        return {place: value}
    found: dict[str, Any] = {}
    for key, item in items_in(value, is_tensor):
        found |= tensors_at(item, is_tensor, f"{place}[{key}]")
    return found


def plain_at(value: Any, is_tensor: Callable[[Any], bool], place: str = "") -> dict[str, Any]:
    """{place: what is no tensor} as in `tensors_at`: numbers, booleans, text, NumPy arrays (of text as lists).

    Those that an object, other than a dataclass, has beside its tensors are no part of the output.
    """
    if isinstance(value, np.ndarray):
        return {place: value.copy() if value.dtype.kind in "biufc" else value.tolist()}
    if isinstance(value, np.generic):
        return {place: value.item()}
    if isinstance(value, (bool, int, float, complex, str)):
        return {place: value}
    found: dict[str, Any] = {}
    if isinstance(value, (Mapping, tuple, list)) or is_dataclass(value):
        for key, item in items_in(value, is_tensor):
            found |= plain_at(item, is_tensor, f"{place}[{key}]")
    return found


def tensors_in(value: Any, is_tensor: Callable[[Any], bool]) -> list:
    """Every tensor in `value`, in the order of `tensors_at`."""
    return list(tensors_at(value, is_tensor).values())


@dataclass
class ModuleCall:
    name: str  # dotted name; "" is the model
    number: int  # 0 for the module's first call
    start: int = 0  # number of calls begun before it
    inside: str = ""  # label of the calling module's call
    args: tuple[object, ...] = ()  # positional, tensors as arrays
    kwargs: dict[str, object] = field(default_factory=dict)
    scale: float = 0.0  # largest input value
    outputs: list[np.ndarray] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # where they were in the return value
    reached: list[MaybeArray] = field(default_factory=list)  # bits: where not 0 came back to an output
    upstream: list[MaybeArray] = field(default_factory=list)  # in a question: what is sent back to each output
    took_random: bool = False  # numbers that were not lent
    draws: int = 0  # lent in it
    draws_before: tuple[Draw, ...] = ()  # lent in the run before it, if any in it

    @property
    def label(self) -> str:
        """As outputs are named: NAME, NAME#2, NAME#3, ..."""
        name = self.name or OUTPUT
        return name if self.number == 0 else f"{name}#{self.number + 1}"

    @property
    def inputs(self) -> list[np.ndarray]:
        return tensors_in((self.args, self.kwargs), is_array)

    @property
    def float_shapes(self) -> list[tuple[int, ...]]:
        """Of the inputs that may have a gradient."""
        return [array.shape for array in self.inputs if array.dtype.kind == "f"]

    def with_upstream(self) -> ModuleCall:
        """With a gradient drawn for each output to which one came back.

        A backward pass is linear in what is sent back, so this tells what the true gradient tells. It is 0 where that
        is: behind an activation that the other side counts to the module, say.
        """
        sent = zip_strict(self.outputs, self.reached)
        drawn_ones = [
            None
            if bits is None
            else np.asarray(drawn_gradient(f"{self.label} {i}", output) * unpacked(bits, output.shape))
            for i, (output, bits) in enumerate(sent)
        ]
        return replace(self, upstream=drawn_ones)


def unpacked(bits: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.unpackbits(bits, count=int(np.prod(shape))).reshape(shape)


def drawn_gradient(name: str, output: np.ndarray) -> np.ndarray:
    """Of the output's shape, see `drawn`; complex for a complex one."""
    real = drawn(name, output.shape)
    return np.asarray(real + 1j * drawn(f"{name}, imaginary", output.shape)) if output.dtype.kind == "c" else real


def as_call(inputs: Inputs) -> ModuleCall:
    if not isinstance(inputs, Mapping):
        return ModuleCall("", 0, args=tuple(inputs))
    args = tuple(inputs[place] for place in sorted(key for key in inputs if isinstance(key, int)))
    kwargs = {key: value for key, value in inputs.items() if isinstance(key, str)}
    return ModuleCall("", 0, args=args, kwargs=kwargs)


def checked_inputs(inputs: Inputs) -> Inputs:
    """Inputs as both models start from them: float32, complex64, arrays for lists of numbers.

    Raises UserError for what no model is run on.
    """
    if is_array(inputs) or isinstance(inputs, (str, bytes)) or not isinstance(inputs, (Sequence, Mapping)):
        what = f"one array {inputs.shape}" if isinstance(inputs, np.ndarray) else f"a {type(inputs).__name__}"
        raise UserError(f"the inputs are {what}: give a list of arrays, or a dict of them by keyword")
    if isinstance(inputs, Mapping):
        places = sorted(key for key in inputs if isinstance(key, int))
        if places != list(range(len(places))) or not all(isinstance(key, (str, int)) for key in inputs):
            raise UserError(f"the inputs have the keys {list(inputs)}: give keywords, and 0, 1, ... for positions")
        return {key: _checked(value, repr(key)) for key, value in inputs.items()}
    return [_checked(value, str(i)) for i, value in enumerate(inputs)]


def _checked(value: Any, name: str) -> Any:
    if value is None or isinstance(value, (str, bool, int, float, complex)) and not isinstance(value, np.generic):
        return value
    if isinstance(value, Mapping):
        return {key: _checked(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not _is_numbers(value):
        items = [_checked(item, f"{name}[{i}]") for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise UserError(f"input {name} is a {type(value).__name__} of {array.dtype}: give arrays of numbers")
    return array.astype({"f": np.float32, "c": np.complex64}.get(array.dtype.kind, array.dtype))


def _is_numbers(value: Any) -> bool:
    """Whether nested sequences hold plain numbers, at least one, and nothing else."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_numbers, value))
    return isinstance(value, (bool, int, float, complex))


@dataclass
class Trace:
    """One forward pass.

    Outputs are named NAME, from the second call on NAME#2; of several, NAME[1] or NAME[key].
    """

    outputs: dict[str, np.ndarray] = field(default_factory=dict)  # in execution order
    activation_inputs: dict[str, np.ndarray] = field(default_factory=dict)  # of activation calls, by label
    input_scales: dict[str, float] = field(default_factory=dict)
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    error: str = ""  # exception that ended the pass
    lack: bool = False  # whether it says what the machine lacks: then it ends the run of a module alone, and no more
    lacking: str = ""  # operation without float64 kernel: the run was float32
    unrecorded: dict[str, str] = field(default_factory=dict)  # {module: exception while it was recorded}
    float32: set[str] = field(default_factory=set)  # modules that asked for float32 in float64 runs
    float32_data: set[str] = field(default_factory=set)  # modules that made tensors of float32 arrays there
    running: list[ModuleCall] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)  # random numbers lent
    dropped: list[Dropped] = field(default_factory=list)  # what dropout would have done

    def note_dropout(self, p: float, shape: Sequence[int]) -> None:
        """Note it and lend no mask."""
        name = self.running[-1].name if self.running else ""
        self.dropped.append(Dropped(name, round(float(p), 12), math.prod(map(int, shape))))  # 1 - 0.9 is not quite 0.1

    def note_float32(self, is_data: bool) -> None:
        """Note the module that asked for float32, or brought it in as data."""
        noted = self.float32_data if is_data else self.float32
        noted.add(self.running[-1].name if self.running else "")

    def add(self, call: ModuleCall, is_activation: bool, keep_call: bool) -> None:
        label, many = call.label, len(call.outputs) > 1
        named = zip_strict(call.places, call.outputs)
        self.outputs.update({label + place if many else label: array for place, array in named})
        self.input_scales[call.name] = max(call.scale, self.input_scales.get(call.name, 0.0))
        if is_activation:
            self.activation_inputs[label] = call.inputs[0]
        if keep_call:
            self.calls[label] = call


def output_item(label: str, whole: str) -> Item:
    """The item of an output; the model's own is called `whole`."""
    module = module_of(label)
    if module in (OUTPUT, whole):
        return Item(whole + label.removeprefix(module), "output")
    return Item(label, "output", module)


def output_items(outputs: Sequence[np.ndarray]) -> dict[Item, np.ndarray]:
    """A model's outputs in their order: "output", or "output[0]", "output[1]", ... of several."""
    many = len(outputs) > 1
    return {Item(f"{OUTPUT}[{i}]" if many else OUTPUT, "output"): array for i, array in enumerate(outputs)}


def module_of(label: str) -> str:
    """The module of an output's name, without #2 and [1]."""
    return label.partition("#")[0].partition("[")[0]


@contextmanager
def tracing(
    backend: Backend,
    model: Any,
    keeps: int = OUTPUTS,
    only: Collection[str] | None = None,
    watch_random: bool = False,
    copied: Callable[[np.ndarray], np.ndarray] = np.ndarray.copy,
) -> Iterator[Trace]:
    """Trace forward passes of `model` in this context, float64 with exact constants.

    The model's own output is called OUTPUT. `only` names the modules to trace. Random numbers are
    noted for the model's own call; with `watch_random` for all. `copied` copies arrays.
    """
    tracer = _Tracer(backend, keeps, watch_random, copied)
    handles = []
    for name, module in backend.layers.named_modules(model):
        usual = name == "" or not backend.layers.is_container(module)
        if usual if only is None else name in only:
            handles += tracer.attach(name, module)
    try:
        with backend.runs.exact_constants():
            yield tracer.trace
    finally:
        for handle in handles:
            handle.remove()
        tracer.close()


class _Tracer:
    def __init__(
        self, backend: Backend, keeps: int, watch_random: bool, copied: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self.backend, self.copied = backend, copied
        self.keep_calls = keeps >= CALLS
        self.notes_reached = keeps >= UPSTREAM
        self.watch_random = watch_random
        self.is_tensor = backend.framework.is_tensor
        self.trace = Trace()
        self.running = self.trace.running
        self.random_states: list[tuple | None] = []  # of the generators at each start, if noted
        self.counts: dict[str, int] = {}
        self.recent: deque[np.ndarray] = deque(maxlen=RECENT)

    def array(self, tensor: Any) -> np.ndarray:
        """A copy of `tensor`, or a recent array with the same bits, such as the layer's input."""
        seen = self.backend.to_array(tensor, copy=False)
        for array in self.recent:
            if same_bits(array, seen):
                return array
        self.recent.append(self.copied(seen))
        return self.recent[-1]

    def attach(self, name: str, module: Any) -> list[Any]:
        is_activation = type(module).__name__ in KINKS

        def before(module: Any, args: tuple, kwargs: dict) -> None:
            self.begin(name, args, kwargs, self.keep_calls or is_activation)

        def after(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
            self.end(output, is_activation)

        runs = self.backend.runs
        return [runs.hook_before(module, before), runs.hook_after(module, after)]

    def begin(self, name: str, args: tuple, kwargs: dict, keep_arguments: bool) -> None:
        number = self.counts.get(name, 0)
        inside = self.running[-1].label if self.running else ""
        call = ModuleCall(name, number, start=sum(self.counts.values()), inside=inside)
        self.counts[name] = number + 1
        self.running.append(call)
        call.draws = len(self.trace.draws)
        noted = self.keep_calls and (self.watch_random or not name)
        self.random_states.append(self.backend.runs.random_state() if noted else None)
        with self.recording(call):
            call.scale = self.scale((args, kwargs))
            if keep_arguments:
                call.args, call.kwargs = map_tensors((args, kwargs), self.is_tensor, self.array)

    def end(self, output: Any, is_activation: bool) -> None:
        call = self.running.pop()
        self.note_random(call)
        before, call.draws = call.draws, len(self.trace.draws) - call.draws
        call.draws_before = tuple(self.trace.draws[:before]) if call.draws else ()
        with self.recording(call):
            tensors = tensors_at(output, self.is_tensor)
            if not tensors and not isinstance(output, PLAIN):
                self.trace.unrecorded[call.name] = f"it returns a {type(output).__name__}, in which no tensor is found"
            call.outputs = [self.array(tensor) for tensor in tensors.values()]
            call.places, call.reached = list(tensors), [None] * len(tensors)
            self.trace.add(call, is_activation, self.keep_calls)
            if self.notes_reached:
                for i, tensor in enumerate(tensors.values()):
                    if self.backend.requires_grad(tensor):
                        self.note_reached(call, i, tensor)

    def note_random(self, call: ModuleCall) -> None:
        """Note whether random numbers were taken since the latest running call began."""
        before = self.random_states.pop()
        call.took_random = before is not None and before != self.backend.runs.random_state()

    @contextmanager
    def recording(self, call: ModuleCall) -> Iterator[None]:
        """Note exceptions of recording, so that the model's run goes on."""
        try:
            with user_code(), self.backend.runs.not_replaced():
                yield
        except MachineError:
            raise
        except Exception as error:
            self.trace.unrecorded[call.name] = one_line(error)

    def note_reached(self, call: ModuleCall, i: int, tensor: Any) -> None:
        """Have the later backward pass note in `call` where it came to output `tensor`."""

        def hook(gradient: Any) -> None:
            call.reached[i] = np.packbits(self.backend.to_array(gradient, copy=False) != 0)

        tensor.register_hook(hook)

    def scale(self, value: Any) -> float:
        floats = [t for t in tensors_in(value, self.is_tensor) if t.is_floating_point() and 0 not in t.shape]
        return max((largest(self.backend.to_array(tensor, copy=False)) for tensor in floats), default=0.0)

    def close(self) -> None:
        """End the calls that were running when the model raised, innermost first."""
        for call in reversed(self.running if self.keep_calls else ()):
            self.note_random(call)
            self.trace.calls[call.label] = call
