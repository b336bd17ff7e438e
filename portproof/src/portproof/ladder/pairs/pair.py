"""Two models as a pair: the map between them and their inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np

from portproof.arrays import largest
from portproof.backends import backend_of_side
from portproof.backends.model import BackendModel, Model
from portproof.backends.question import Cotangents, Question, Run
from portproof.backends.trace import (
    CALLS,
    OUTPUT,
    OUTPUTS,
    UPSTREAM,
    Inputs,
    ModuleCall,
    checked_inputs,
    drawn_gradient,
    is_array,
    map_tensors,
    module_of,
    tensors_in,
)
from portproof.compare.ruler import UNIT_ROUNDOFF, constant_atol, is_rounded
from portproof.ladder.pairs.as_built import Factory
from portproof.mapping.name_map import NameMap, match_calls, propose, same_names
from sturdyio.cli import UserError

WEIGHTS = ("probe", "reference", "own")
MODES = ("eval", "train")
MOVES = 4  # of inputs along an axis
SCALE = 4.0  # of inputs that are floats: values pass bounds that they only came near


@dataclass(frozen=True)
class Options:
    """Arguments of `portproof.align` and of the ladder; raises UserError for unknown ones."""

    names: Mapping[str, str] | None = None
    weights: str = "probe"
    modes: Sequence[str] = MODES
    precisions: Sequence[str] = tuple(UNIT_ROUNDOFF)
    leave_out: Sequence[str] = ()
    outputs: Mapping[str, str] | None = None
    seed: int = 0
    device: str = "cpu"
    backward: bool = True  # from a cotangent of `seed`
    mirrored: bool = False  # use equal names if names and shapes agree
    factories: tuple[Factory, Factory] = (None, None)  # what makes each side anew, if known
    output: str = OUTPUT
    drawn: bool = False  # whether floats in the inputs may be changed, to enter more branches

    def __post_init__(self) -> None:
        for what, known in (("modes", MODES), ("precisions", UNIT_ROUNDOFF)):
            given = getattr(self, what)
            if not given or not set(given) <= set(known):
                raise UserError(f"{what} {given!r}: choose some of {', '.join(known)}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed {self.seed}: choose one from 0 to 4294967295")
        if self.weights not in WEIGHTS:
            raise UserError(f"weights {self.weights!r}: choose one of {', '.join(WEIGHTS)}")


class PairOptions(TypedDict, total=False):
    """What the functions of the ladder take of `Options`."""

    names: Mapping[str, str] | None
    weights: str
    precisions: Sequence[str]
    leave_out: Sequence[str]
    outputs: Mapping[str, str] | None
    seed: int
    device: str
    mirrored: bool
    factories: tuple[Factory, Factory]
    output: str
    drawn: bool


@dataclass
class Pair:
    ref: Model
    port: BackendModel
    found_map: NameMap | None = None  # see `name_map`; None until found, see `at`
    whole_map: NameMap | None = None  # with what is left out
    inputs: Inputs = ()
    cotangents: Cotangents | None = None  # what is sent back
    output: str = OUTPUT
    strict: bool = False  # differences inside the model are failures
    notes: list[str] = field(default_factory=list)  # for the report, with repeats
    built_differently: dict[str, str] = field(default_factory=dict)  # {module: how}, no fault
    modes: Sequence[str] = MODES  # in which it is run
    precisions: Sequence[str] = tuple(UNIT_ROUNDOFF)
    given: Mapping[str, str] | None = None  # {reference's module: port's}, from the user
    equal_tensors: dict[str, str] = field(default_factory=dict)  # {port's name: reference's key}, see `by_weights`
    never_entered: list[str] = field(default_factory=list)  # branches of the reference's operations
    left_out: tuple[str, ...] = ()  # how names in what is left out begin
    matched: set[bool] = field(default_factory=set)  # modes with mapped calls (True: train)

    @property
    def name_map(self) -> NameMap:
        """What is compared."""
        assert self.found_map is not None
        return self.found_map

    @classmethod
    def prepared(cls, ref: Any, port: Any, inputs: Inputs, options: Options) -> Pair:
        """A pair ready to run; `ref` may be a recorded model.

        Raises UserError for no model, inputs that the reference fails on, or an unknown module to leave out.
        """
        inputs = checked_inputs(inputs)
        if isinstance(ref, Model):
            ref_model: Model = ref
        else:
            ref_model = backend_of_side(ref, "torch").wrap(ref, "reference", options.device)
            import scipy  # noqa: F401  fail now if missing, not at the diagnosis
        port_model = backend_of_side(port, "paddle").wrap(port, "port", options.device)
        own = port_model.arrays() if options.weights == "own" else {}
        outputs = (options.outputs or {}).items()
        port_model.output_names = {_place(theirs): _place(name) for name, theirs in outputs}
        trains = [train for train in (False, True) if MODES[train] in options.modes]
        modes = [MODES[train] for train in trains]
        returned: dict[bool, list[np.ndarray]] = {}
        for train in trains:
            run = ref_model.run_watched(inputs, train)
            check_reference(run, train, inputs)
            _check_named(options.outputs or {}, run)
            returned[train] = run.output
        if options.weights == "probe":
            from portproof.backends.probe import load_probe_weights

            assert isinstance(ref_model, BackendModel)
            inputs = load_probe_weights(ref_model, options.seed, inputs, modes, options.drawn)
        pair = cls(ref_model, port_model, inputs=inputs, output=options.output, given=options.names)
        pair.never_entered = ref_model.never_entered(modes)
        pair.modes = modes
        pair.precisions = [dtype for dtype in UNIT_ROUNDOFF if dtype in options.precisions]
        if options.backward:
            pair.cotangents = ref_model.cotangents or drawn_cotangents(returned, options.seed)
        for model in (ref_model, port_model):
            model.plan(pair.question(model, dtype, train) for dtype in UNIT_ROUNDOFF for train in trains)
        pair._find_map(options.mirrored)
        if ref_model.in_train and not pair.name_map.problems and not pair.name_map.ambiguous:
            arrays = ref_model.arrays(train=True)
            port_model.load({theirs: arrays[key] for key, theirs in pair.name_map.tensors.items()}, train=True)
        pair.strict = options.mirrored and pair.matched == {False, True}
        if options.weights == "own":
            pair.match_calls(trains)
            port_model.load(own)
        pair._take_constants()
        pair._leave_out(options.leave_out)
        return pair

    def at(self, call: ModuleCall) -> Pair:
        """The pair on the inputs of the reference's `call`, with drawn upstream gradients."""
        inputs = [array.astype(np.float32) if array.dtype.kind == "f" else array for array in call.inputs]
        there = replace(self, inputs=inputs, cotangents=dict.fromkeys((False, True), call.with_upstream().upstream))
        if self.found_map is None:
            there._find_map(mirrored=not self.given)
            self.found_map = there.found_map
        return there

    def _find_map(self, mirrored: bool) -> None:
        """With `mirrored` map equal names, where both sides have them; else propose a map."""
        found = same_names(self.ref, self.port, self.inputs) if mirrored else None
        self.found_map = found or propose(self.ref, self.port, self.inputs, self.given)
        self.matched.update((False, True) if found else (False,))
        slots, port_slots, mapped = self.ref.slots, self.port.slots, self.found_map.tensors.items()
        self.port.parts = {key for key, theirs in mapped if slots[key].view or port_slots[theirs].view}

    def match_calls(self, modes: Sequence[bool]) -> None:
        """Map the module calls of these modes; the weights must be equal."""
        for train in set(modes) - self.matched:
            match_calls(self.name_map, self.ref, self.port, self.inputs, train)
            self.matched.add(train)

    def _leave_out(self, names: Sequence[str]) -> None:
        """Leave modules and tensors of the reference out of a copy of the map."""
        self.whole_map = self.name_map
        names = [names] if isinstance(names, str) else names
        for name in names:
            if not name or name not in self.ref.modules and name not in self.ref.slots:
                raise UserError(f"leave_out names {name!r}, but the reference has no module and no tensor of that name")
        if names:
            self.match_calls((False, True))
        kept: dict[str, Any] = {}
        self.left_out = prefixes = tuple(f"{name}." for name in names)
        for what in ("calls", "tensors", "problems"):
            every = getattr(self.name_map, what).items()
            kept[what] = {key: value for key, value in every if not f"{module_of(key)}.".startswith(prefixes)}
        if OUTPUT in self.name_map.calls:  # the model's own, whatever a module is called
            kept["calls"][OUTPUT] = OUTPUT
        self.found_map = replace(self.name_map, **kept)
        tensors, calls = (len(getattr(self.whole_map, what)) - len(kept[what]) for what in ("tensors", "calls"))
        if names:
            self.notes.append(f"left out, not compared: {', '.join(names)} ({tensors} tensors, {calls} outputs)")

    def question(self, model: Model, dtype: str, train: bool, perturbation: int = 0) -> Question:
        """The question for a whole model.

        In float32 only the reference goes backward: layers are judged alone.
        """
        goes_back = model is self.ref or dtype == "float64"
        cotangent = self.cotangents[train] if self.cotangents and goes_back else None
        keeps = UPSTREAM if model is self.ref else CALLS
        keeps = OUTPUTS if perturbation or dtype == "float32" else keeps
        return Question.of_model(self.inputs, dtype, train, cotangent, keeps, perturbation)

    def mirror(self, kinds: Collection[str]) -> None:
        """Lend the port draws of these kinds mirrored (see `Draws`)."""
        if self.port.mirrored != kinds:
            self.port.mirrored = kinds
            self.port.memory.clear()

    def ask(self, model: Model, dtype: str, train: bool, perturbation: int = 0) -> Run:
        return model.ask(self.question(model, dtype, train, perturbation))

    def _take_constants(self) -> None:
        """Copy constants of the reference to the port, where they agree up to float32 rounding (see `constant_atol`).

        That is no fault, but far more than float64 errors. A rounded constant that only one side holds, such as a table
        that the other computes as it runs, is noted in `float32_data`.
        """
        slots, port_slots = self.ref.slots, self.port.slots
        mapped = {slots[key].tensor: port_slots[theirs].tensor for key, theirs in self.name_map.tensors.items()}
        ref = {key: array for key, array in self.ref.constants().items() if key not in mapped}
        theirs = set(mapped.values())
        port = {key: array for key, array in self.port.constants().items() if key not in theirs}
        taken, matched = [], set()
        for key, array in port.items():
            limit = constant_atol(array)
            near = (name for name, other in ref.items() if other.size == array.size)
            for name in sorted(near, key=lambda name: name != key):
                value = ref[name].reshape(array.shape)
                difference = largest(value.astype(np.complex128) - array)
                if difference <= limit:
                    matched |= {(self.ref, name), (self.port, key)}
                    if difference > 0:
                        self.port.set_constant(key, value)
                        taken.append(f"{key} (by {difference:.1e})")
                    break
        for model, held in ((self.ref, ref), (self.port, port)) if not self.strict else ():
            model.float32_data = [key for key in held if is_rounded(held[key]) and (model, key) not in matched]
        if taken:
            what = "float32 constants of the port that are the reference's up to rounding"
            self.notes.append(f"{what}, and taken from it: {taken}")


def switch_off_random(model: Model, question: Question) -> tuple[Run, str | None]:
    """Put layers that take random numbers in train mode, other than lent ones, into eval mode.

    -> (the answer, with calls; the module that stays random, or None). Only layers without tensors and children, such
    as DropPath, can be switched; they are then in `model.switched_off`. Plain dropout is off anyway. Comparing two runs
    would not do: with few samples masks are often equal.
    """
    while True:
        run = model.ask(question)
        random = [call for call in run.trace.calls.values() if call.took_random]
        if not random:
            return run, None
        module = model.modules[max(random, key=lambda call: call.start).name]  # the innermost
        if not question.train or module.name in model.switched_off:
            return run, module.name
        if module.slots or not module.is_leaf:  # more in it depends on the mode
            return run, module.name
        model.switched_off.add(module.name)


def switch_off_drawing(model: Model, run: Run) -> None:
    """Put layers without tensors and children that were lent random numbers into eval mode."""
    names = {call.name for call in run.trace.calls.values() if call.draws} - model.switched_off
    model.switched_off |= {name for name in names if model.modules[name].is_leaf and not model.modules[name].slots}


def other_inputs(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """(how they differ, inputs): floats SCALE times as large, then rolled along an axis, in turn.

    Rolled, a place gets what others had: not along the first axis, which is the batch, up to MOVES times along others.
    Whole numbers and booleans stay as they are: a model may rest on their values and places, as a loss on its labels.
    """
    arrays = tensors_in(inputs, is_array)
    floats = [i for i, array in enumerate(arrays) if array.dtype.kind in "fc"]
    if not floats:
        return
    which = f"input {', '.join(map(str, floats))}"
    scaled = map_tensors(inputs, is_array, lambda a: a * a.dtype.type(SCALE) if a.dtype.kind in "fc" else a)
    yield f"floats {SCALE:g} times as large, {which}", scaled
    sizes = [arrays[i].shape for i in floats]
    for axis in range(1, max(map(len, sizes), default=0)):
        size = max(shape[axis] for shape in sizes if len(shape) > axis)
        for shift in sorted({size * i // (MOVES + 1) for i in range(1, MOVES + 1)} - {0}):

            def rolled(array: np.ndarray, axis: int = axis, shift: int = shift) -> np.ndarray:
                return np.roll(array, shift, axis) if array.dtype.kind in "fc" and array.ndim > axis else array

            yield f"floats rolled by {shift} along axis {axis}, {which}", map_tensors(inputs, is_array, rolled)


def drawn_cotangents(returned: Mapping[bool, Sequence[np.ndarray]], seed: int) -> Cotangents:
    """Gradients between -1 and 1 for each output, complex for complex ones.

    A mode of which no outputs are known has those of the other.
    """
    drawn = {
        train: [drawn_gradient(f"seed {seed}, output {i}", output) for i, output in enumerate(outputs)]
        for train, outputs in returned.items()
    }
    return {train: drawn.get(train, next(iter(drawn.values()))) for train in (False, True)}


def same_weights(
    ref: Any,
    port: Any,
    inputs: Inputs,
    *,
    names: Mapping[str, str] | None = None,
    weights: str = "probe",
    seed: int = 0,
) -> tuple[Any, Any]:
    """Copies of both models with the same weights, for the ladder's functions.

    `names` as in `portproof.align`; `weights`: "probe" weights of the seed, or the "reference"'s own. Raises UserError
    as that does, and if the port lacks a tensor.
    """
    pair = Pair.prepared(ref, port, inputs, Options(names, weights, seed=seed))
    if pair.name_map.ambiguous:
        raise UserError(f"the map is ambiguous: {pair.name_map.ambiguous}")
    for name, reason in pair.name_map.problems.items():
        raise UserError(f"{name}: {reason}: step 01 has to pass first")
    assert isinstance(pair.ref, BackendModel)
    return pair.ref.loaded_copy(), pair.port.loaded_copy()


def _place(key: str) -> str:
    return f"[{key}]" if key else ""


def _check_named(outputs: Iterable[str], run: Run) -> None:
    """Raise UserError unless the reference's run has outputs of these names."""
    for name in outputs:
        if not any(place.startswith(_place(name)) for place in run.places):
            places = ", ".join(place.strip("[]") for place in run.places if place) or "one, without a name"
            raise UserError(f"outputs (--match) name {name!r}, but the reference's are {places}: name one of these")


def check_reference(run: Run, train: bool, inputs: Inputs) -> None:
    """Raise UserError unless the reference's run of these inputs gave something to compare."""
    if run.trace.error:
        what = f"the reference cannot run on these inputs in {MODES[train]} mode: it raised {run.trace.error}"
        shapes = ", ".join("x".join(map(str, array.shape)) or "scalar" for array in tensors_in(inputs, is_array))
        advice = f"give inputs (--input) of other shapes than {shapes}" if shapes else "give inputs"
        if "unexpected keyword argument" in run.trace.error:
            advice = "call each array as an argument of its forward, or 0, 1, ... in their order (--inputs)"
        raise UserError(f"{what}: {advice}" + "; batch norm needs 2 samples at least" * train)
    if not run.output:
        raise UserError("the reference returns no tensor: wrap it in a module that does")
