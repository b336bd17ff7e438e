"""`portproof.record`: a reference asked all that judging a port may ask of it.

A port is compared with what the whole reference gives in each mode and precision, and each of its modules with what the
reference's gives alone, on the reference's own inputs and upstream gradients. What is asked follows from the reference
alone, so it can be answered before there is a port.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portproof import __version__
from portproof.backends import backend_of_side
from portproof.backends.drawn import drawn_weights
from portproof.backends.model import BackendModel, Run, T
from portproof.backends.trace import Inputs, ModuleCall, checked_inputs
from portproof.compare.tolerances import MOVED, UNIT_ROUNDOFF, distances, lost_in_float32
from portproof.io.cli import UserError
from portproof.ladder.pairs.pair import MODES, check_reference, drawn_cotangent
from portproof.ladder.pairs.randomness import switch_off_random
from portproof.localize.attempts import follower, last_inside
from portproof.localize.isolated import adjusted_call, has_upstream
from portproof.recording.answers import Writer, query_key
from portproof.recording.file import Recording
from portproof.recording.model import written_modules
from portproof.recording.values import Store, encode, is_written

WEIGHTS = ("probe", "reference")
GRADIENTS = ("gradients", "input_gradients")  # fields of a run


class _Recorder(BackendModel):
    """A model that keeps what it answers, each question once."""

    def __init__(self, model: BackendModel, store: Store) -> None:
        self.inner, self.role, self.modules, self.switched_off = model, model.role, model.modules, model.switched_off
        self.writer = Writer(store)
        self.answers: dict[str, dict[str, Any]] = {}
        self.whole: dict[str, Run] = {}  # runs of the whole model, by key
        self.moved = 0  # the number of the one of `moved_runs` that is asked for

    def run_module(
        self,
        name: str,
        call: ModuleCall,
        dtype: str,
        train: bool,
        backward: bool,
        calls: bool = True,
        then: str = "",
    ) -> Run:
        """As `BackendModel`, of the whole model: always with its calls, and the same run each time it is asked."""
        key = query_key(name, call, dtype, train, backward, then, self.switched_off, self.moved)
        if key not in self.whole:
            run = self.inner.run_module(name, call, dtype, train, backward, not self.moved, then)
            like = self.answers.get(self._key(name, call, "float64", train, backward, then), {})
            if not self.moved:  # a block's float32 gradients only serve limits
                like = {} if self.modules[name].is_leaf else {field: like.get(field, {}) for field in GRADIENTS}
            self.answers[key] = {"name": name} | self.writer.run(run, with_trace=True, like=like)
            self.whole[key] = run
        return self.whole[key]

    def moved_runs(self, count: int, run: Callable[[], T]) -> list[T]:
        """As `BackendModel`; of each run only how far it is from the one in float64 is kept."""

        def asked() -> T:
            self.moved += 1
            return run()

        try:
            return self.inner.moved_runs(count, asked)
        finally:
            self.moved = 0

    def ask(
        self,
        call: ModuleCall,
        dtype: str,
        train: bool,
        backward: bool,
        then: str = "",
        *,
        with_trace: bool = False,
        like_float64: bool = False,
    ) -> None:
        """Keep what the called module gives alone; with `like_float64` only how far it is from that run."""
        key = self._key(call.name, call, dtype, train, backward, then)
        if key not in self.answers:
            run = self.inner.run_module(call.name, call, dtype, train, backward, with_trace, then)
            like = self.answers[self._key(call.name, call, "float64", train, backward, then)] if like_float64 else None
            self.answers[key] = {"name": call.name} | self.writer.run(run, with_trace, like)

    def _key(self, name: str, call: ModuleCall, dtype: str, train: bool, backward: bool, then: str) -> str:
        return query_key(name, call, dtype, train, backward, then, self.switched_off)


def record(
    ref: Any,
    inputs: Inputs,
    weights: str,
    modes: Sequence[str],
    modules: Collection[str] | None,
    seed: int,
    device: str,
    tell_size: Callable[[int], object] = lambda _: None,
) -> Recording:
    """What `portproof.record` does; `tell_size` gets the size that the file will have about, as soon as it is known."""
    if weights not in WEIGHTS:
        raise UserError(f"weights {weights!r}: choose one of {', '.join(WEIGHTS)}")
    if not modes or not set(modes) <= set(MODES):
        raise UserError(f"modes {modes!r}: choose some of {', '.join(MODES)}")
    inputs = checked_inputs(inputs)
    inputs = dict(inputs) if hasattr(inputs, "keys") else list(inputs)
    if not is_written(inputs):
        raise UserError("the inputs hold what no file can: give arrays, nested tuples, lists and dicts, text, numbers")
    framework = backend_of_side(ref, "torch")
    model = framework.wrap(ref, "reference", device)
    for name in modules or ():
        if name not in model.modules:
            raise UserError(f"modules names {name!r}, but the reference has no module of that name in it")
    for mode in modes:
        check_reference(model.run(inputs, "float32", mode == "train"), mode == "train")
    if weights == "probe" and framework.name == "torch":
        from portproof.backends.probe import load_probe_weights

        load_probe_weights(model, seed, inputs, runs_in_train="train" in modes)
    elif weights == "probe":
        model.load(drawn_weights(model, seed))
    keys = {slot.key: slot.tensor for module in model.modules.values() for slot in module.slots.values()}
    store = Store()
    recorder = _Recorder(model, store)
    header: dict[str, Any] = {
        "portproof": __version__,
        framework.name: str(framework.framework.__version__),
        "numpy": np.__version__,
        "seed": seed,
        "weights": weights,
        "modes": [mode for mode in MODES if mode in modes],
        "inputs": encode(inputs, store.put),
        "modules": written_modules(model.modules, framework.torch_type),
        "tensors": {keys[key]: store.put(array) for key, array in model.arrays().items()},
        "constants": {key: store.put(array) for key, array in model.constants().items()},
    }
    own = store.nbytes
    first = recorder.run(inputs, "float64", False, calls=True)
    tell_size(_about(model, first, store.nbytes - own, own, len(modes)))
    cotangent = drawn_cotangent(recorder.run(inputs, "float32", False).output, seed)
    header["cotangent"] = [store.put(array) for array in cotangent]
    trains = [mode == "train" for mode in header["modes"]]
    for train in trains:
        for dtype in UNIT_ROUNDOFF:
            recorder.run(inputs, dtype, train, calls=True)
    not_alone: dict[str, str] = {}
    for train in trains:
        if switch_off_random(recorder, inputs, train)[1] is None:
            not_alone |= _record_mode(recorder, inputs, train, cotangent, modules)
    recording = Recording(header | {"answers": recorder.answers, "not_alone": not_alone}, store.arrays)
    try:
        recording.model()
    except ValueError as error:
        raise UserError(f"the reference cannot be recorded: {error}: give other inputs or modes") from error
    return recording


def _record_mode(
    model: _Recorder, inputs: Inputs, train: bool, cotangent: Sequence[np.ndarray], modules: Collection[str] | None
) -> dict[str, str]:
    """Ask all of one mode -> {label of a call: why its module was not run alone}."""
    runs = {dtype: model.run(inputs, dtype, train, cotangent, calls=True) for dtype in UNIT_ROUNDOFF}
    check_reference(runs["float64"], train)
    if lacking := runs["float64"].trace.lacking:
        raise UserError(f"the reference cannot be recorded: {lacking} has no kernel in float64, on which limits rest")
    fp64_ref, fp32_ref = (_values(run) for run in runs.values())
    if lost_in_float32(fp64_ref, distances(fp64_ref, fp32_ref), ()):  # what is zero by structure does so, too
        model.moved_runs(MOVED, lambda: model.run(inputs, "float64", train, cotangent))
    not_alone: dict[str, str] = {}
    for dtype, run in runs.items():
        calls = run.trace.calls
        for label, call in calls.items():
            reason = _why_not(call, modules)
            if reason:
                not_alone[label] = reason
            elif dtype == "float64":
                _ask_for_search(model, calls, label, train)
            elif model.modules[call.name].is_leaf and has_upstream(call):
                for received in (adjusted_call(model, call, dtype), call):
                    _ask_ways(model, calls, label, received, train, True, full=True)
    return not_alone


def _values(run: Run) -> dict[str, np.ndarray]:
    """All that a run of the whole model is judged by."""
    inputs = {f"input {i}": array for i, array in enumerate(run.input_gradients) if array is not None}
    gradients = {f"gradient {key}": array for key, array in run.gradients.items()}
    return {**run.trace.outputs, **run.buffers, **gradients, **inputs}


def _why_not(call: ModuleCall, modules: Collection[str] | None) -> str:
    """Why a module is not run alone on what the call received; "" if it is."""
    if not is_written([list(call.args), call.kwargs]):
        return "since it was called with what no file can hold"
    inside = modules is None or not call.name or any(f"{call.name}.".startswith(f"{name}.") for name in modules)
    return "" if inside else "since the recording was told to leave them out"


def _ask_for_search(model: _Recorder, calls: dict[str, ModuleCall], label: str, train: bool) -> None:
    """What the search for a fault asks of one call, in float32 and in float64; see `locate`."""
    call = calls[label]
    is_leaf, backward = model.modules[call.name].is_leaf, has_upstream(call)
    for dtype in ("float32", "float64"):
        received = adjusted_call(model, call, dtype)
        if not is_leaf:
            model.ask(received, "float64", train, False, with_trace=True)
        judged = backward and (dtype == "float64" or is_leaf)
        _ask_ways(model, calls, label, received, train, judged, full=dtype == "float32")


def _ask_ways(
    model: _Recorder,
    calls: dict[str, ModuleCall],
    label: str,
    received: ModuleCall,
    train: bool,
    backward: bool,
    full: bool,
) -> None:
    """A module alone, and with what follows it; in float32, unless in `full`, only how far that is from float64."""
    for call, then in _ways(model, calls, label, received):
        model.ask(call, "float64", train, backward, then)
        model.ask(call, "float32", train, backward, then, like_float64=not full)


def _ways(
    model: BackendModel, calls: dict[str, ModuleCall], label: str, received: ModuleCall
) -> Iterator[tuple[ModuleCall, str]]:
    """(the call, the module behind, or left out) of the ways to run the reference's module, see attempts.py."""
    yield received, ""
    behind = follower(calls, label, lambda _: False) if received.name else None
    if behind is not None and not model.modules[behind.name].slots:
        yield replace(received, upstream=list(behind.upstream)), behind.name
    last = last_inside(model, calls, label) if received.name else None
    if last is not None:
        yield replace(received, upstream=list(last.upstream)), last.name


def _about(model: BackendModel, run: Run, flow: int, own: int, modes: int) -> int:
    """The size that the file will have about, in bytes, from one float64 run.

    `flow` are the bytes of all that flows through it, `own` those of weights and inputs. Per mode: values and their
    gradients in both precisions, and of each layer alone its inputs' and outputs' and its weights' gradients.
    """
    leaves = [call for call in run.trace.calls.values() if model.modules[call.name].is_leaf]
    alone = sum(array.size for call in leaves for array in (*call.inputs, *call.outputs))
    return own + modes * (3 * flow + 12 * alone + 6 * own) + 1500 * len(run.trace.calls) * modes
