"""A recorded reference: a model whose answers come from a recording."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from portproof.backends.model import Model
from portproof.backends.question import Answer, Question, Run
from portproof.backends.slots import Module
from portproof.backends.trace import Inputs
from portproof.backends.values import decode
from portproof.compare.ruler import UNIT_ROUNDOFF
from portproof.ladder.pairs.pair import MODES
from portproof.recording.codec import Reader
from portproof.report.text import grouped
from sturdyio.cli import UserError


class RecordedModel(Model):
    """A reference that answers from a recording.

    Raises ValueError, KeyError or TypeError for an inconsistent header.
    """

    is_recorded = True

    def __init__(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        self._reader = Reader(arrays)
        read = self._reader.read
        self.passes: Counter[str] = Counter()
        self.made_with = read(dict[str, str], header["made_with"])
        self.version = self.made_with["portproof"]
        modules = {module.name: module for module in read(list[Module], header["modules"])}
        super().__init__("reference", modules, read(dict[str, np.ndarray], header["tensors"]))
        self._constants = read(dict[str, np.ndarray], header["constants"])
        self.inputs: Inputs = decode(header["inputs"], arrays)
        self.cotangent = read(list[np.ndarray], header["cotangent"])
        self.not_alone = read(dict[str, str], header["not_alone"])
        self.seed, self.weights = read(int, header["seed"]), read(str, header["weights"])
        self.modes = read(tuple[str, ...], header["modes"])
        self._answers = dict(header["answers"])  # {question's key: answers as written}
        self._check()

    def _check(self) -> None:
        if not self.modes or not set(self.modes) <= set(MODES):
            raise ValueError("it holds no mode")
        if not isinstance(self.inputs, (list, dict)) or not self.cotangent:
            raise ValueError("it holds no inputs, or no gradient for the outputs")
        for name, module in self._whole.items():
            owners = {slot.key.rpartition(".")[0] for slot in module.slots.values()}
            if name.rpartition(".")[0] not in self._whole or owners - {name}:
                raise ValueError(f"its module {name} is not in the model")
        for slot in self._slots.values():
            array = self._values[slot.tensor]
            if array.shape != slot.shape or (array.dtype.kind != "f") != slot.is_whole:
                raise ValueError(f"its {slot.key} is {array.dtype} {array.shape}, not as it says")
        for name, array in self._values.items():
            _check_finite(name, array)
        for i, array in enumerate(self.cotangent):
            _check_finite(f"cotangent {i}", array)
        for mode in self.modes:
            for dtype in UNIT_ROUNDOFF:
                self.run(self.inputs, dtype, mode == "train")
        for answer in chain.from_iterable(self._answers.values()):
            self._check_answer(answer)

    def _check_answer(self, answer: Mapping[str, Any]) -> None:
        run, name = self._reader.run(answer), self._reader.read(str, answer["module"])
        self._reader.read(str, answer["upstream"])
        self._reader.read(int, answer["keeps"])
        prefix = f"{name}." if name else ""
        shapes = {slot.key: slot.shape for slot in self._slots.values()}
        for call in run.trace.calls.values():
            if (prefix + call.name if call.name else name) not in self._whole:
                raise ValueError(f"its run calls {call.name}, which is no module")
        for tensor, array in (*run.gradients.items(), *run.buffers.items()):
            if shapes.get(prefix + tensor) != array.shape:
                raise ValueError(f"its run has a {prefix + tensor} of another shape, {array.shape}")
        for i, array in enumerate(run.output if not prefix else ()):
            _check_finite(f"output {i}", array)

    def constants(self) -> dict[str, np.ndarray]:
        return dict(self._constants)

    def ask(self, question: Question) -> Run:
        """The recorded answer; raises UserError if it was not recorded."""
        for answer in self._answers.get(question.key(self.switched_off), ()):
            if Answer(None, answer["upstream"], answer["keeps"]).serves(question, question.upstream_key()):
                run = question.only_asked(self._reader.run(answer))
                gradients = self._pieces_of(run.gradients, question.module)
                return replace(run, gradients=gradients, buffers=self._pieces_of(run.buffers, question.module))
        recording = f"the recording, made by portproof {self.version},"
        what = f"what {question.module or 'the model'} gives in {MODES[question.train]} mode, {question.dtype},"
        raise UserError(f"{recording} does not hold {what} on these inputs: record it again")

    def _pieces_of(self, tensors: Mapping[str, np.ndarray], module: str) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        prefix = f"{module}." if module else ""
        owners = {slot.key: slot.tensor for each in self._whole.values() for slot in each.slots.values()}
        for key, array in tensors.items():
            for piece in self._pieces[owners[prefix + key]]:
                found[piece.key.removeprefix(prefix)] = piece.read(array)
        return found

    def notes(self) -> list[str]:
        made_with = ", ".join(f"{name} {version}" for name, version in self.made_with.items())
        how = f"{self.weights} weights, seed {self.seed}, {' and '.join(self.modes)} mode"
        return [f"recorded with {made_with}: {how}", *grouped("not run alone, ", self.not_alone)]


def _check_finite(name: str, array: np.ndarray) -> None:
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise ValueError(f"its {name} holds NaN or infinity")
