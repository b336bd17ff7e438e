"""A recorded reference: a model whose answers come from a recording."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portproof.backends import FRAMEWORKS
from portproof.backends.model import Model
from portproof.backends.question import Answer, Question, Run
from portproof.backends.trace import Inputs
from portproof.backends.values import decode, fetch
from portproof.compare.ruler import UNIT_ROUNDOFF
from portproof.ladder.pairs.pair import MODES
from portproof.recording.codec import Reader, text_of
from sturdyio.cli import UserError


class NotRecorded(UserError):
    """The recording does not hold what is asked for."""


def answer_key(question: Question, switched_off: Collection[str]) -> str:
    """What an answer is filed under: the question's key, what was sent back, and what was kept."""
    return " ".join([question.key(switched_off), question.upstream_key() or "-", str(question.keeps)])


class RecordedModel(Model):
    """A reference that answers from a recording's `header` and `arrays`. It gets no other weights and no other inputs.

    Raises ValueError, KeyError or TypeError for a header that does not hold together.
    """

    is_recorded = True

    def __init__(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        self._reader, self._answers = Reader(arrays), dict(header["answers"])
        self.passes: Counter[str] = Counter()
        framework = next((name for name in FRAMEWORKS if name in header), "torch")
        self.made_with = {name: text_of(header[name]) for name in (framework, "numpy", "portproof")}
        modules = {module.name: module for module in map(self._reader.module, header["modules"])}
        super().__init__("reference", modules, {k: fetch(arrays, number) for k, number in header["tensors"].items()})
        self._constants = {text_of(key): fetch(arrays, number) for key, number in header["constants"].items()}
        self.inputs: Inputs = decode(header["inputs"], arrays)
        self.cotangent = [fetch(arrays, number) for number in header["cotangent"]]
        self.not_alone = {text_of(label): text_of(reason) for label, reason in header["not_alone"].items()}
        self.seed, self.weights, self.modes = int(header["seed"]), text_of(header["weights"]), tuple(header["modes"])
        self._filed: dict[str, list[tuple[str, int, str]]] = {}  # {question's key: (upstream, keeps, answer's key)}
        for answer in self._answers:
            key, upstream, keeps = text_of(answer).split(" ")
            self._filed.setdefault(key, []).append(("" if upstream == "-" else upstream, int(keeps), answer))
        self._check()

    def _check(self) -> None:
        if not self.modes or not set(self.modes) <= set(MODES):
            raise ValueError("it holds no mode")
        if not isinstance(self.inputs, (list, dict)) or not self.cotangent:
            raise ValueError("it holds no inputs, or no gradient for the outputs")
        for name, module in self._whole.items():
            owners = [slot.key.rpartition(".")[0] for slot in module.slots.values()]
            if name.rpartition(".")[0] not in self._whole or set(owners) - {name}:
                raise ValueError(f"its module {name} is not in the model")
        for slot in self._slots.values():
            array = self._values[slot.tensor]
            if array.shape != slot.shape or (array.dtype.kind != "f") != slot.is_whole:
                raise ValueError(f"its {slot.key} is {array.dtype} {array.shape}, not as it says")
        for name, array in [*self._values.items(), *((f"cotangent {i}", a) for i, a in enumerate(self.cotangent))]:
            _check_finite(name, array)
        for mode in self.modes:
            for dtype in UNIT_ROUNDOFF:
                self.run(self.inputs, dtype, mode == "train")
        for written in self._answers.values():
            self._check_answer(written)

    def _check_answer(self, written: Mapping[str, Any]) -> None:
        run, name = self._reader.run(written), text_of(written["name"])
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
        """What the recording has for it; raises NotRecorded for what it was not asked."""
        upstream = question.upstream_key()
        for filed_upstream, keeps, key in self._filed.get(question.key(self.switched_off), ()):
            if Answer(None, filed_upstream, keeps).serves(question, upstream):
                run = question.only_asked(self._reader.run(self._answers[key]))
                tensors = {
                    field: self._pieces_of(getattr(run, field), question.module) for field in ("gradients", "buffers")
                }
                return replace(run, **tensors)
        mode, on = MODES[question.train], "on these inputs"
        what = f"what {question.module or 'the model'} gives in {mode} mode, {question.dtype}, {on}"
        raise NotRecorded(
            f"the recording, made by portproof {self.made_with['portproof']}, does not hold {what}: record it again"
        )

    def _pieces_of(self, tensors: Mapping[str, np.ndarray], module: str) -> dict[str, np.ndarray]:
        """The pieces of whole tensors of `module`; keys are without the module's name on both sides."""
        prefix, found = f"{module}." if module else "", {}
        owners = {slot.key: slot.tensor for each in self._whole.values() for slot in each.slots.values()}
        for key, array in tensors.items():
            for piece in self._pieces[owners[prefix + key]]:
                found[piece.key.removeprefix(prefix)] = piece.read(array)
        return found


def _check_finite(name: str, array: np.ndarray) -> None:
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise ValueError(f"its {name} holds NaN or infinity")


def not_alone_note(not_alone: Mapping[str, str]) -> list[str]:
    """What could not be run alone, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for label, reason in not_alone.items():
        reasons.setdefault(reason, []).append(label)
    return [f"not run alone, {reason}: {_some(labels)}" for reason, labels in reasons.items()]


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 5} more" if len(labels) > 5 else ""
    return ", ".join(labels[:5]) + more
