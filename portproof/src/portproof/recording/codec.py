"""Answers as JSON and back, with arrays apart.

`read` raises ValueError, KeyError or TypeError for bad input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from portproof.arrays import Measured, largest_difference
from portproof.backends.draws import Draw
from portproof.backends.masks import Dropped
from portproof.backends.question import Run
from portproof.backends.slots import Module, Slot
from portproof.backends.trace import OUTPUT, MaybeArray, ModuleCall, Trace
from portproof.backends.values import Store, decode, encode, fetch
from portproof.convert.rules import identity
from portproof.ladder.pairs.as_built import AsBuilt
from portproof.mapping.fingerprint import Fingerprint
from sturdyio.cli import printable
from sturdyio.files import most_memory

# Fields that a recording leaves out.
UNWRITTEN = ("change", "view", "activation_inputs", "lack", "lacking", "running", "upstream")


def _forms(kind: type) -> dict[str, Any]:
    """The form of each field of a dataclass, as annotated; `object` is for `encode`."""
    return {name: form for name, form in get_type_hints(kind).items() if name not in UNWRITTEN}


FORMS = {kind: _forms(kind) for kind in (Slot, Module, Draw, Dropped, ModuleCall, Trace, Run, AsBuilt, Fingerprint)}
MAKERS = {Slot: partial(Slot, change=identity)}  # for an unwritten field without a default


def text_of(value: Any) -> str:
    """`value`, if it is one line of text; else raises ValueError."""
    if type(value) is not str or not value.isprintable():
        raise ValueError(f"it has {value!r:.80} for a text")
    return value


def write(form: Any, value: Any, store: Store, like: Any = None) -> Any:
    """`value` as JSON, arrays in `store`; for arrays in `like` only the distance."""
    kind, inside = get_origin(form), get_args(form)
    if form in FORMS:
        fields = FORMS[form].items()
        return {name: write(each, getattr(value, name), store, (like or {}).get(name)) for name, each in fields}
    if kind in (dict, Mapping):
        return {key: write(inside[1], item, store, (like or {}).get(key)) for key, item in value.items()}
    if kind in (list, tuple, set):
        others = dict(enumerate(like or ()))
        items = enumerate(sorted(value) if kind is set else value)
        return [write(inside[0], item, store, others.get(i)) for i, item in items]
    if form is str:
        return printable(value)
    if isinstance(value, np.ndarray) and form is not object:
        return _written_array(value, store, like)
    return encode(value, store.put)


def _written_array(array: np.ndarray, store: Store, like: Any) -> Any:
    distance = np.inf
    if type(like) is int and array.dtype.kind in "fc":
        other = store.arrays[like]
        if (other.dtype.kind, other.shape) == (array.dtype.kind, array.shape):
            distance = largest_difference(other, array)
    return [like, distance, str(array.dtype)] if np.isfinite(distance) else store.put(array)


def write_run(run: Run, store: Store, with_trace: bool, like: Any = None) -> dict[str, Any]:
    trace = run.trace if with_trace else Trace(error=run.trace.error)
    return write(Run, replace(run, trace=trace), store, like)


class Reader:
    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.most = self.left = most_memory(sum(array.nbytes for array in arrays))  # bytes for one run

    def read(self, form: Any, node: Any) -> Any:
        kind, inside = get_origin(form), get_args(form)
        if form in FORMS:
            fields = {name: self.read(each, node[name]) for name, each in FORMS[form].items()}
            return MAKERS.get(form, form)(**fields)
        if kind in (dict, Mapping):
            return {text_of(key): self.read(inside[1], item) for key, item in _checked(node, dict).items()}
        if kind in (list, tuple, set):
            return kind(self.read(inside[0], item) for item in _checked(node, list))
        if form is str:
            return text_of(node)
        if form is np.ndarray or form is MaybeArray and node is not None:
            return self._array(node)
        value = decode(node, self.arrays)
        return value if form in (object, MaybeArray) else _checked(value, form)

    def run(self, node: Any) -> Run:
        self.left = self.most
        run = self.read(Run, node)
        if len(run.output) != len(run.places):
            raise ValueError("an output is missing")
        calls = run.trace.calls
        for label, call in calls.items():
            around = calls.get(call.inside)
            if label != call.label or around is None and label != OUTPUT:
                raise ValueError(f"its call {label} is not one of the model's")
            if around is not None and around.start >= call.start:
                raise ValueError(f"its call {label} begins before what it is in")
            if call.outputs and not len(call.outputs) == len(call.places) == len(call.reached):
                raise ValueError("a call's outputs and their gradients are not as many")
            for output, bits in zip(call.outputs, call.reached):
                if bits is not None and (bits.dtype, bits.shape) != (np.uint8, (-(-output.size // 8),)):
                    raise ValueError("a call's output has another shape than its gradient")
        return run

    def _array(self, node: Any) -> np.ndarray:
        if not isinstance(node, list):
            return fetch(self.arrays, node)
        number, distance, dtype = node
        like = fetch(self.arrays, number)
        if like.dtype.kind not in "fc" or np.dtype(text_of(dtype)).kind != like.dtype.kind or not np.isfinite(distance):
            raise ValueError("it has a distance from what is no number")
        self.left -= like.nbytes
        if self.left < 0:
            raise ValueError(f"one of its runs takes more than {self.most} bytes")
        return Measured.beside(like, distance, np.dtype(dtype))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it holds a {type(value).__name__} where a {kind.__name__} should be")
    return value
