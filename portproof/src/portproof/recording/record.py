"""`portproof.record`: ask a reference all that judging any port may ask.

That is the whole model in each mode and precision, and each module alone, on the inputs that it received. So no port is
needed yet. Only float64 runs are kept; of others their distances from these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portproof import __version__
from portproof.arrays import projected
from portproof.backends import backend_of_side
from portproof.backends.drawn import drawn_weights
from portproof.backends.model import Model
from portproof.backends.question import CONSTANTS, Cotangents, Question, Run
from portproof.backends.slots import Module
from portproof.backends.trace import CALLS, OUTPUTS, UPSTREAM, Inputs, ModuleCall, checked_inputs
from portproof.backends.values import Store, encode, is_written
from portproof.compare.ruler import RUNS, UNIT_ROUNDOFF
from portproof.ladder.pairs.as_built import AsBuilt, as_built
from portproof.ladder.pairs.pair import (
    MODES,
    Options,
    check_reference,
    drawn_cotangents,
    other_inputs,
    switch_off_random,
)
from portproof.localize.isolated import adjusted_call, all_questions, has_upstream
from portproof.mapping.fingerprint import Fingerprint, fingerprint
from portproof.python39 import zip_strict
from portproof.recording.codec import write, write_run
from portproof.recording.file import Recording
from sturdyio.cli import MachineError, UserError

PER_CALL = 12_000  # bytes that a mode takes for each call beside its arrays: distances, projections, text


class Recorder(Model):
    cotangents: Cotangents

    def __init__(
        self,
        ref: Any,
        inputs: Inputs,
        options: Options,
        alone: Collection[str] | None,
        also: Sequence[Inputs] = (),
        images: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    ) -> None:
        """The arguments are those of `portproof.record`, `images` (raw, prepared); raises UserError as it does."""
        self.inputs, self.alone, self.also = checked_inputs(inputs), alone, list(map(checked_inputs, also))
        if self.also and "eval" not in options.modes:
            raise UserError("further inputs (also) are recorded in eval mode: record that")
        if not is_written([self.inputs, *self.also]):
            fix = "give arrays, nested tuples, lists and dicts, text, numbers"
            raise UserError(f"the inputs hold what no file can: {fix}")
        framework = backend_of_side(ref, "torch")
        self.model = framework.wrap(ref, "reference", options.device)
        self.modules, self.switched_off = self.model.modules, self.model.switched_off
        for name in alone or ():
            if name not in self.modules:
                raise UserError(f"modules names {name!r}, but the reference has no module of that name in it")
        for mode in options.modes:
            check_reference(self.model.run_watched(self.inputs, mode == "train"), mode == "train", self.inputs)
        built = as_built(self.model, self.inputs, options.factories[0], loaded=options.weights == "reference")
        if options.weights == "probe" and framework.name == "torch":
            from portproof.backends.probe import load_probe_weights

            modes = [mode for mode in MODES if mode in options.modes]
            self.inputs = load_probe_weights(self.model, options.seed, self.inputs, modes, options.drawn)
        elif options.weights == "probe":
            self.model.load(drawn_weights(self.model, options.seed))
        self.store = Store()
        marks = fingerprint(self.model, self.inputs)
        self.answers: dict[str, list[dict[str, Any]]] = {}  # as JSON, by the question's key
        put = self.store.put
        whole = {slot.tensor: slot for slot in self.model.slots.values()}
        keys = {slot.key: slot.tensor for slot in whole.values()}
        constants = {key: whole[key].read(array) for key, array in built.constants.items()}
        # Library layers have PyTorch's names.
        named = [replace(each, type=framework.layers.torch_type(each.type)) for each in self.modules.values()]
        self.header: dict[str, Any] = {
            "made_with": {
                framework.name: str(framework.framework.__version__),
                "NumPy": np.__version__,
                "portproof": __version__,
            },
            "seed": options.seed,
            "weights": options.weights,
            "modes": [mode for mode in MODES if mode in options.modes],
            "inputs": encode(self.inputs, put),
            "also": [encode(each, put) for each in self.also],
            "images": [[put(raw), put(ready)] for raw, ready in images],
            "modules": write(list[Module], named, self.store),
            "tensors": {keys[key]: put(array) for key, array in self.model.arrays().items()},
            "in_train": {key: put(array) for key, array in self.model.in_train.items()},
            "branches": self.model.branches,
            "fingerprint": write(list[Fingerprint], [] if marks is None else [marks], self.store),
            "conditions": sorted(self.model.conditions),
            "is_watched": self.model.is_watched,
            "constants": {key: put(array) for key, array in self.model.unsaved_constants().items()},
            "as_built": write(AsBuilt, replace(built, constants=constants), self.store),
        }
        own = self.store.nbytes  # of weights and inputs
        self.model.float32_data = self.model.rounded_constants().keys()
        trains = [mode == "train" for mode in self.header["modes"]]
        returned = {train: self.model.run(self.inputs, "float32", train).output for train in trains}
        self.cotangents = drawn_cotangents(returned, options.seed)
        run = self.ask(self._whole_question("float64", False))
        flow = self.store.nbytes - own  # of all arrays in its calls
        self.expected_size = own + len(self.header["modes"]) * (flow + PER_CALL * len(run.trace.calls))

    def rounded_constants(self) -> dict[str, np.ndarray]:
        return self.model.rounded_constants()

    def recording(self) -> Recording:
        """Ask all; raises UserError if the answers could judge no port."""
        not_alone: dict[str, str] = {}
        for mode in self.header["modes"]:
            not_alone |= self._ask_mode(mode == "train")
        if "eval" not in self.header["modes"]:  # the map is confirmed in eval mode
            self._ask_whole(False)
        for inputs in self.also:
            self._ask_also(inputs)
        header = self.header | {"answers": self.answers, "not_alone": not_alone}
        recording = Recording(header, dict(zip_strict(self.store.digests, self.store.arrays)))
        try:
            recording.model()
        except ValueError as error:
            raise UserError(f"the reference cannot be recorded: {error}: give other inputs or modes") from error
        return recording

    def _ask_mode(self, train: bool) -> dict[str, str]:
        """Ask all of one mode -> {call: why its module was not run alone}."""
        self._ask_whole(train)  # finds what is random
        if switch_off_random(self, self._whole_question("float64", train))[1]:
            return {}
        runs = self._ask_whole(train)
        check_reference(runs["float64"], train, self.inputs)
        if lacking := runs["float64"].trace.lacking:
            problem = f"{lacking} has no kernel in float64, on which limits rest"
            raise UserError(f"the reference cannot be recorded: {problem}")
        for dtype in UNIT_ROUNDOFF:
            for i in range(1, RUNS + 1):
                self.ask(replace(self._whole_question(dtype, train), keeps=OUTPUTS, perturbation=i))
        if self.model.rounded_constants():
            self.ask(replace(self._whole_question("float64", train), keeps=OUTPUTS, perturbation=CONSTANTS))
        for _, inputs in other_inputs(self.inputs):
            question = Question.of_model(inputs, "float64", train)
            run = self.model.ask(question)
            self._write(question, replace(run, output=list(map(projected, run.output))), False)
        not_alone: dict[str, str] = {}
        calls = runs["float64"].trace.calls
        for label, call in calls.items():
            reason = self._why_not(call)
            if reason:
                not_alone[label] = reason
            else:
                self._ask_alone(calls, label, train)
        return not_alone

    def _ask_also(self, inputs: Inputs) -> None:
        """What a graph's outputs are judged by at another size: float64, and float32's distances from it."""
        check_reference(self.model.ask(Question.of_model(inputs, "float64", train=False)), False, inputs)
        self._keep(Question.of_model(inputs, "float64", train=False), False)
        for i in range(RUNS + 1):
            self._keep(Question.of_model(inputs, "float32", train=False, perturbation=i), False)

    def _whole_question(self, dtype: str, train: bool) -> Question:
        keeps = UPSTREAM if dtype == "float64" else OUTPUTS
        return Question.of_model(self.inputs, dtype, train, self.cotangents[train], keeps)

    def _ask_whole(self, train: bool) -> dict[str, Run]:
        return {dtype: self.ask(self._whole_question(dtype, train)) for dtype in UNIT_ROUNDOFF}

    def _why_not(self, call: ModuleCall) -> str:
        """Why the call's module is not run alone; "" if it is."""
        if not is_written([list(call.args), call.kwargs]):
            return "since it was called with what no file can hold"
        if self.alone is None or not call.name:
            return ""
        if any(f"{call.name}.".startswith(f"{name}.") for name in self.alone):
            return ""
        return "since the recording was told to leave them out"

    def _ask_alone(self, calls: Mapping[str, ModuleCall], label: str, train: bool) -> None:
        """Ask all that judging asks about one call, see `IsolatedRuns`."""
        call = calls[label]
        is_leaf = self.modules[call.name].is_leaf
        if not is_leaf:
            self._keep(Question(call, "float64", train, keeps=CALLS), True)
        adjusted = [(dtype, adjusted_call(self, call, dtype)) for dtype in UNIT_ROUNDOFF]
        for dtype, received in (("float64", call.with_upstream()), *adjusted):
            judged = has_upstream(call) and (dtype == "float64" or is_leaf)
            asked = Question(received, dtype, train, judged)
            for question in all_questions(self, calls, label, asked):
                self._keep(question, False)

    def ask(self, question: Question) -> Run:
        """Ask the model, and keep answers of the whole."""
        self._keep(question, True)
        return self.model.ask(question)

    def _keep(self, question: Question, with_trace: bool) -> None:
        """Keep the answer, if none serves; of what is not the plain float64 run only the distance from that."""
        if self._kept(question) is not None:
            return
        is_plain = question.dtype == "float64" and not question.perturbation
        exact = None if is_plain else self._kept(replace(question, dtype="float64", perturbation=0))
        run = self.model.ask(question)
        if run.trace.lack:
            raise MachineError(run.trace.error)
        gradients = {key: projected(array) for key, array in run.gradients.items()}
        received = [None if array is None else projected(array) for array in run.input_gradients]
        run = replace(run, gradients=gradients, input_gradients=received)
        self._write(question, run, with_trace, exact)

    def _write(self, question: Question, run: Run, with_trace: bool, exact: dict[str, Any] | None = None) -> None:
        answer = write_run(run, self.store, with_trace, exact)
        answer |= {"upstream": question.upstream_key(), "keeps": question.keeps, "module": question.module}
        self.answers.setdefault(question.key(self.switched_off), []).append(answer)

    def _kept(self, question: Question) -> dict[str, Any] | None:
        answers = self.answers.get(question.key(self.switched_off), ())
        return next((each for each in answers if question.served_by(each["upstream"], each["keeps"])), None)
