"""What is asked of a model, as a value with a key, and the answers that are remembered. Imports no framework."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from portproof.arrays import in_rows
from portproof.backends.trace import Inputs, ModuleCall, Trace, as_call
from portproof.backends.values import digest_of, encode

PRECISIONS = {"float32": (np.float32, np.complex64), "float64": (np.float64, np.complex128)}
# What a run keeps beside outputs, buffers and gradients: each holds what the one before does.
OUTPUTS, CALLS, UPSTREAM = range(3)  # ...; the arguments of each module's call; the gradients that come back to it, too
BUDGET = 2**24  # bytes of answers that a model remembers, if nothing else is said; see `Memory`


def to_precision(array: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers of floating point, and complex ones, in "float32" or "float64"; others as they are; in C order."""
    real, complex_ = PRECISIONS[dtype]
    return in_rows(array, {"f": real, "c": complex_}.get(array.dtype.kind))


def perturbed(array: np.ndarray, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """The numbers of `dtype` next to those of `array`, larger or smaller as drawn; 0, and what is not finite, stays.

    So does what is not real. As whole numbers, the bits of neighbours are 1 apart.
    """
    if array.dtype.kind != "f":
        return array
    larger = rng.integers(0, 2, array.shape, np.int8)
    moved = array.astype(dtype, "C")
    moves = (moved != 0) & np.isfinite(moved)
    moved.view(f"i{moved.itemsize}")[...] += moves * (2 * larger - 1)
    return moved


@dataclass
class Run:
    """One forward pass, and one backward pass if it was asked for: an answer. All arrays have PyTorch's layout."""

    trace: Trace
    output: list[np.ndarray] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)  # by state_dict key; missing: it received none
    input_gradients: list[np.ndarray | None] = field(default_factory=list)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)  # after the pass, by state_dict key
    places: list[str] = field(default_factory=list)  # where each output was in what was returned

    def arrays(self) -> Iterator[np.ndarray]:
        """All arrays that it holds; one that is held twice comes twice."""
        yield from self.output
        yield from self.gradients.values()
        yield from (array for array in self.input_gradients if array is not None)
        yield from self.buffers.values()
        yield from self.trace.outputs.values()
        yield from self.trace.activation_inputs.values()
        for call in self.trace.calls.values():
            yield from (*call.inputs, *call.outputs)
            yield from (array for array in call.upstream if array is not None)

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays, each counted once."""
        return sum({id(array): array.nbytes for array in self.arrays()}.values())


@dataclass(frozen=True)
class Question:
    """One run of a model, or of a module of it, in one precision and mode; dropout is off in either mode."""

    call: ModuleCall  # the module by its name ("" is the model), its arguments, the gradients that are sent back
    dtype: str  # "float32" or "float64"
    train: bool
    backward: bool = False
    keeps: int = OUTPUTS
    followed_by: str = ""  # the module that is applied to what it returns; one that lies inside it is left out
    perturbation: int = 0  # the number of the draw that moves inputs and weights to the next number; 0: none does
    mutation: Callable[[Any], Any] | None = None  # what is made of the module before it is run

    @classmethod
    def of_model(
        cls,
        inputs: Inputs,
        dtype: str,
        train: bool,
        cotangent: Sequence[np.ndarray] | None = None,
        keeps: int = OUTPUTS,
        perturbation: int = 0,
    ) -> Question:
        """Of the whole model on `inputs`, backward from `cotangent`, an array an output, if that is given."""
        call = as_call(inputs)
        call.upstream = list(cotangent or ())
        return cls(call, dtype, train, cotangent is not None, keeps, perturbation=perturbation)

    @property
    def module(self) -> str:
        """The dotted name of the module that is run; "" is the model."""
        return self.call.name

    @property
    def leaves_out(self) -> bool:
        """Whether `followed_by` lies inside the module, and is left out."""
        return self.followed_by.startswith(f"{self.module}.")

    def key(self, switched_off: Collection[str]) -> str:
        """The same for two questions that differ in no more than what is sent back and kept.

        Arrays count by their values in the question's precision; `switched_off` are modules in eval mode.
        """
        given = [encode(list(self.call.args), self._digest), encode(dict(self.call.kwargs), self._digest)]
        off = sorted(switched_off) if self.train else []
        parts = [self.module, given, self.dtype, self.train, self.followed_by, off, self.perturbation]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def upstream_key(self) -> str:
        """The same for two questions that send the same back; "" for one without a backward pass."""
        if not self.backward:
            return ""
        return "/".join("-" if array is None else self._digest(array) for array in self.call.upstream)

    def only_asked(self, run: Run) -> Run:
        """`run`, which answers the question and may give more, without gradients that were not asked for."""
        return run if self.backward else replace(run, gradients={}, input_gradients=[])

    def _digest(self, array: np.ndarray) -> str:
        return digest_of(to_precision(array, self.dtype))


@dataclass(frozen=True)
class Answer:
    """A run, and what it was asked for beside the question's key."""

    run: Run
    upstream_key: str
    keeps: int

    def serves(self, question: Question, upstream_key: str) -> bool:
        """Whether it gives all that a question of the same key asks: a run that gives more serves one that asks less.

        `upstream_key` is the question's own.
        """
        return self.keeps >= question.keeps and (not question.backward or self.upstream_key == upstream_key)


class Memory:
    """The latest answers, within a budget of bytes; of one mode the latest two, in either precision, at any size."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self._answers: OrderedDict[tuple[str, str, int], Answer] = OrderedDict()
        self._train = False  # the mode of the latest answer

    def find(self, question: Question, key: str) -> Run | None:
        """A remembered answer; None if there is none that serves."""
        upstream_key = question.upstream_key()
        for place, answer in self._answers.items():
            if place[0] == key and answer.serves(question, upstream_key):
                self._answers.move_to_end(place)
                return answer.run
        return None

    def make_room(self, question: Question, key: str) -> None:
        """Forget what the answer that is about to be given replaces; of another mode all, unless that is little."""
        for place in [place for place in self._answers if place[0] == key and place[2] <= question.keeps]:
            del self._answers[place]
        if question.train != self._train:
            self.forget()
        self._train = question.train

    def keep(self, question: Question, key: str, run: Run) -> None:
        """Remember `run`, and forget the oldest answers that no longer fit."""
        answer = Answer(run, question.upstream_key(), question.keeps)
        self._answers[key, answer.upstream_key, answer.keeps] = answer
        while len(self) > 2 and self.size > self.budget:
            self._answers.popitem(last=False)

    @property
    def size(self) -> int:
        """The bytes of all answers."""
        return sum(answer.run.nbytes for answer in self._answers.values())

    def forget(self) -> None:
        """Forget all answers, unless that is little."""
        if self.size > self.budget:
            self.clear()

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()

    def __len__(self) -> int:
        return len(self._answers)
