"""`portproof.record`: a reference asked all that judging a port may ask of it.

A port is compared with what the whole reference gives in each mode and precision, and each of its modules with what the
reference's gives alone, on the reference's own inputs and upstream gradients. What is asked follows from the reference
alone, so it can be answered before there is a port.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portproof import __version__
from portproof.backends import backend_of_side
from portproof.backends.drawn import drawn_weights
from portproof.backends.layers import Layers
from portproof.backends.model import BackendModel, Model
from portproof.backends.question import CALLS, OUTPUTS, UPSTREAM, Question, Run
from portproof.backends.slots import Module
from portproof.backends.trace import Inputs, ModuleCall, checked_inputs
from portproof.backends.values import Store, encode, is_written
from portproof.compare.ruler import RUNS, UNIT_ROUNDOFF
from portproof.ladder.pairs.pair import MODES, check_reference, drawn_cotangent
from portproof.ladder.pairs.randomness import switch_off_random
from portproof.localize.isolated import adjusted_call, all_questions, has_upstream
from portproof.recording.codec import Writer
from portproof.recording.file import Recording
from portproof.recording.model import answer_key
from sturdyio.cli import UserError

WEIGHTS = ("probe", "reference")
GRADIENTS = ("gradients", "input_gradients")  # fields of a run


class _Recorder(Model):
    """A model that keeps what it answers, each question once."""

    def __init__(self, model: BackendModel, store: Store) -> None:
        self.inner, self.role, self.modules, self.switched_off = model, model.role, model.modules, model.switched_off
        self.writer = Writer(store)
        self.answers: dict[str, dict[str, Any]] = {}
        self.only_distances: set[str] = set()  # the keys of answers of which no more is kept

    def ask(self, question: Question) -> Run:
        """As the model; of the whole model all that may be asked is kept, of a perturbed run only distances."""
        run = self.inner.ask(question)
        key = answer_key(question, self.switched_off)
        if key not in self.answers:
            fp64_ref = replace(question, dtype="float64", perturbation=0)
            like = self.answers.get(answer_key(fp64_ref, self.switched_off), {})
            if question.perturbation:
                like = self._any_like(question)
            elif not question.module:  # a block's float32 gradients only serve limits
                is_leaf = self.modules[question.module].is_leaf
                like = {} if is_leaf else {field: like[field] for field in GRADIENTS if field in like}
            with_trace = not question.module or question.keeps > OUTPUTS
            self.answers[key] = {"name": question.module} | self.writer.run(run, with_trace, like)
        return run

    def _any_like(self, question: Question) -> dict[str, Any]:
        """The kept answer in float64 to the same question, whatever else it keeps."""
        fp64_ref = replace(question, dtype="float64", perturbation=0)
        for keeps in (OUTPUTS, CALLS, UPSTREAM):
            known = self.answers.get(answer_key(replace(fp64_ref, keeps=keeps), self.switched_off))
            if known is not None:
                return known
        return {}

    def keep_alone(self, question: Question, in_full: bool) -> None:
        """Keep what a module gives alone; unless `in_full`, of a float32 run only how far it is from float64."""
        key = answer_key(question, self.switched_off)
        serves_a_limit = question.perturbation > 0 or question.dtype == "float32" and not in_full
        if key in self.answers and (serves_a_limit or key not in self.only_distances):
            return
        like = self._any_like(question) if serves_a_limit else None
        run = self.inner.ask(question)
        self.answers[key] = {"name": question.module} | self.writer.run(run, question.keeps > OUTPUTS, like)
        self.only_distances = self.only_distances | {key} if serves_a_limit else self.only_distances - {key}


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
        "modules": [_written(module, recorder.writer, framework.layers) for module in model.modules.values()],
        "tensors": {keys[key]: store.put(array) for key, array in model.arrays().items()},
        "constants": {key: store.put(array) for key, array in model.constants().items()},
    }
    own = store.nbytes
    cotangent = drawn_cotangent(model.run(inputs, "float32", False).output, seed)
    header["cotangent"] = [store.put(array) for array in cotangent]
    given = store.nbytes
    first = recorder.ask(Question.of_model(inputs, "float64", False, cotangent, UPSTREAM))
    tell_size(_about(model, first, store.nbytes - given, own, len(modes)))
    not_alone: dict[str, str] = {}
    questions = _Questions(recorder, inputs, cotangent, modules)
    for mode in header["modes"]:
        not_alone |= questions.ask_mode(mode == "train")
    if "eval" not in header["modes"]:  # the map is confirmed in eval mode
        questions.ask_whole(False)
    recording = Recording(header | {"answers": recorder.answers, "not_alone": not_alone}, store.arrays)
    try:
        recording.model()
    except ValueError as error:
        raise UserError(f"the reference cannot be recorded: {error}: give other inputs or modes") from error
    return recording


def _written(module: Module, writer: Writer, layers: Layers) -> dict[str, Any]:
    """The module as JSON, with the name that PyTorch has for a layer of the library."""
    return writer.write(replace(module, type=layers.torch_type(module.type)))


@dataclass(frozen=True)
class _Questions:
    """All that judging may ask of a reference, asked."""

    model: _Recorder
    inputs: Inputs
    cotangent: Sequence[np.ndarray]
    modules: Collection[str] | None  # those that are run alone, with all in them; None: all

    def ask_whole(self, train: bool) -> dict[str, Run]:
        """Ask for the whole model in one mode -> its runs, by precision."""
        runs = {}
        for dtype in UNIT_ROUNDOFF:
            question = Question.of_model(self.inputs, dtype, train, self.cotangent, UPSTREAM)
            runs[dtype] = self.model.ask(question)
        return runs

    def ask_mode(self, train: bool) -> dict[str, str]:
        """Ask all of one mode -> {label of a call: why its module was not run alone}."""
        model = self.model
        runs = self.ask_whole(train)  # with what is random, by which it is found
        if switch_off_random(model, Question.of_model(self.inputs, "float64", train, self.cotangent, UPSTREAM))[1]:
            return {}
        runs = self.ask_whole(train)
        check_reference(runs["float64"], train)
        if lacking := runs["float64"].trace.lacking:
            reason = f"{lacking} has no kernel in float64, on which limits rest"
            raise UserError(f"the reference cannot be recorded: {reason}")
        for dtype in UNIT_ROUNDOFF:
            for i in range(1, RUNS + 1):
                model.ask(Question.of_model(self.inputs, dtype, train, self.cotangent, perturbation=i))
        not_alone: dict[str, str] = {}
        for dtype, run in runs.items():
            for label, call in run.trace.calls.items():
                reason = _why_not(call, self.modules)
                if reason:
                    not_alone[label] = reason
                elif dtype == "float64":
                    self._ask_for_search(run.trace.calls, label, train)
                elif model.modules[call.name].is_leaf and has_upstream(call):
                    self._ask_for_gradients(run.trace.calls, label, train)
        return not_alone

    def _ask_for_search(self, calls: dict[str, ModuleCall], label: str, train: bool) -> None:
        """What the search for a fault asks of one call, in either precision; see `locate`."""
        call = calls[label]
        is_leaf = self.model.modules[call.name].is_leaf
        for dtype in UNIT_ROUNDOFF:
            received = adjusted_call(self.model, call, dtype)
            if not is_leaf:
                self.model.keep_alone(Question(received, "float64", train, keeps=CALLS), in_full=True)
            judged = has_upstream(call) and (dtype == "float64" or is_leaf)
            asked = Question(received, dtype, train, judged)
            for question in all_questions(self.model, calls, label, asked):
                self.model.keep_alone(question, in_full=dtype == "float32")

    def _ask_for_gradients(self, calls: dict[str, ModuleCall], label: str, train: bool) -> None:
        """What judging a layer's float32 gradients asks, and whether it differs in float64, too."""
        adjusted = adjusted_call(self.model, calls[label], "float32")
        for received, dtype in ((adjusted, "float32"), (calls[label], "float64")):
            asked = Question(received, dtype, train, backward=True)
            for question in all_questions(self.model, calls, label, asked):
                self.model.keep_alone(question, in_full=dtype == "float32")


def _why_not(call: ModuleCall, modules: Collection[str] | None) -> str:
    """Why a module is not run alone on what the call received; "" if it is."""
    if not is_written([list(call.args), call.kwargs]):
        return "since it was called with what no file can hold"
    inside = modules is None or not call.name or any(f"{call.name}.".startswith(f"{name}.") for name in modules)
    return "" if inside else "since the recording was told to leave them out"


def _about(model: BackendModel, run: Run, flow: int, own: int, modes: int) -> int:
    """The size that the file will have about, in bytes, from one float64 run.

    `flow` are the bytes of all that flows through it, `own` those of weights and inputs. Per mode: values and their
    gradients in both precisions, and of each layer alone its inputs' and outputs' and its weights' gradients.
    """
    leaves = [call for call in run.trace.calls.values() if model.modules[call.name].is_leaf]
    alone = sum(array.size for call in leaves for array in (*call.inputs, *call.outputs))
    return own + modes * (3 * flow + 12 * alone + 6 * own) + 1500 * len(run.trace.calls) * modes
