"""Questions to a model, with keys, and a memory of answers. Imports no framework."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from portproof.arrays import in_rows
from portproof.backends.trace import OUTPUTS, Inputs, MaybeArray, ModuleCall, Trace, as_call
from portproof.backends.values import digest_of, encode

Cotangents = Mapping[bool, Sequence[MaybeArray]]  # {train mode: what is sent back to each output}

PRECISIONS = {"float32": (np.float32, np.complex64), "float64": (np.float64, np.complex128)}
BUDGET = 2**24  # default size of a model's `Memory`, in bytes


def to_precision(array: np.ndarray, dtype: str) -> np.ndarray:
    """Floats and complex numbers in "float32" or "float64", others unchanged; in C order."""
    real, complex_ = PRECISIONS[dtype]
    return in_rows(array, {"f": real, "c": complex_}.get(array.dtype.kind))


CONSTANTS = -1  # as a perturbation: float32 constants alone are moved, by their rounding


def perturbed(array: np.ndarray, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Move each number to its neighbour in `dtype`, up or down at random.

    Zeros, infinities, NaNs and what is no float stay. Bits of neighbours, as integers, differ by 1.
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
    """An answer: a forward pass and, if asked for, a backward pass, in PyTorch's layout."""

    trace: Trace
    output: list[np.ndarray] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)  # by state_dict key; missing if none received
    input_gradients: list[MaybeArray] = field(default_factory=list)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)  # after the pass, by state_dict key
    places: list[str] = field(default_factory=list)  # of each output in what was returned
    plain: dict[str, object] = field(default_factory=dict)  # {place: what is no tensor}, see `trace.plain_at`

    def arrays(self) -> Iterator[np.ndarray]:
        yield from self.output
        yield from self.gradients.values()
        yield from (array for array in self.input_gradients if array is not None)
        yield from self.buffers.values()
        yield from self.trace.outputs.values()
        yield from self.trace.activation_inputs.values()
        for call in self.trace.calls.values():
            yield from (*call.inputs, *call.outputs)

    @property
    def nbytes(self) -> int:
        return sum({id(array): array.nbytes for array in self.arrays()}.values())


@dataclass(frozen=True)
class Question:
    """One run of a model or module, in one precision and mode, without dropout."""

    call: ModuleCall  # module, arguments and gradients sent back
    dtype: str  # "float32" or "float64"
    train: bool
    backward: bool = False
    keeps: int = OUTPUTS
    followed_by: tuple[str, ...] = ()  # modules applied to the output; left out if inside
    perturbation: int = 0  # number of the random draw; 0: none; CONSTANTS
    mutation: Callable[[Any], Any] | None = None  # changes the module before the run

    @classmethod
    def of_model(
        cls,
        inputs: Inputs,
        dtype: str,
        train: bool,
        cotangent: Sequence[MaybeArray] | None = None,
        keeps: int = OUTPUTS,
        perturbation: int = 0,
    ) -> Question:
        """Ask the whole model on `inputs`; a `cotangent` has an array for each output."""
        call = as_call(inputs)
        call.upstream = list(cotangent or ())
        return cls(call, dtype, train, cotangent is not None, keeps, perturbation=perturbation)

    @property
    def module(self) -> str:
        return self.call.name

    @property
    def leaves_out(self) -> bool:
        return any(name.startswith(f"{self.module}.") for name in self.followed_by)

    def key(self, switched_off: Collection[str]) -> str:
        """A key of all but what is sent back and kept; arrays count by value in its precision."""
        given = [encode(list(self.call.args), self._digest), encode(dict(self.call.kwargs), self._digest)]
        off = sorted(switched_off) if self.train else []
        parts = [self.module, given, self.dtype, self.train, self.followed_by, off, self.perturbation]
        parts += map(str, self.call.draws_before)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def upstream_key(self) -> str:
        """A key of what is sent back; "" without a backward pass."""
        if not self.backward:
            return ""
        return "/".join("-" if array is None else self._digest(array) for array in self.call.upstream)

    def served_by(self, upstream_key: str, keeps: int) -> bool:
        """Whether an answer of the same key, with that sent back and kept, gives all that is asked."""
        return keeps >= self.keeps and (not self.backward or upstream_key == self.upstream_key())

    def only_asked(self, run: Run) -> Run:
        """`run` without gradients that were not asked for."""
        return run if self.backward else replace(run, gradients={}, input_gradients=[])

    def _digest(self, array: np.ndarray) -> str:
        return digest_of(to_precision(array, self.dtype))


class Memory:
    """The latest answers within a budget; two of one mode are kept at any size."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self._answers: OrderedDict[tuple[str, str, int], Run] = OrderedDict()  # by key, upstream_key, keeps
        self._train = False

    def find(self, question: Question, key: str) -> Run | None:
        for place, run in self._answers.items():
            late_error = bool(run.trace.error and place[1]) and not question.backward
            if place[0] == key and question.served_by(*place[1:]) and not late_error:
                self._answers.move_to_end(place)
                return run
        return None

    def make_room(self, question: Question, key: str) -> None:
        """Forget what the next answer replaces; large answers of the other mode too."""
        for place in [place for place in self._answers if place[0] == key and place[2] <= question.keeps]:
            del self._answers[place]
        if question.train != self._train:
            self.forget()
        self._train = question.train

    def keep(self, question: Question, key: str, run: Run) -> None:
        self._answers[key, question.upstream_key(), question.keeps] = run
        while len(self) > 2 and self.size > self.budget:
            self._answers.popitem(last=False)

    @property
    def size(self) -> int:
        return sum(run.nbytes for run in self._answers.values())

    def forget(self) -> None:
        if self.size > self.budget:
            self.clear()

    def clear(self) -> None:
        self._answers.clear()

    def __len__(self) -> int:
        return len(self._answers)
