"""Answers as JSON with their arrays in a store, and back: one table of fields for both directions.

What is read is believed no further than its form: `read` raises ValueError, KeyError or TypeError for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from portproof.backends.question import Run
from portproof.backends.slots import Module, Slot
from portproof.backends.trace import OUTPUT, ModuleCall, Trace, call_label
from portproof.backends.values import Store, decode, encode, fetch
from portproof.convert.rules import identity
from sturdyio.cli import printable
from sturdyio.files import most_memory

# How each field of a dataclass is written; a field that is not here is not.
ARRAYS, ARRAYS_OR_NONE, NAMED_ARRAYS, LABELLED_ARRAYS = "arrays", "arrays or none", "named arrays", "labelled arrays"
TEXT, NUMBER, TRUTH, TEXTS, NAMED_TEXTS, VALUE, SCALE, SCALES = (
    "text", "number", "truth", "texts", "named texts", "value", "scale", "scales"
)  # fmt: skip
NUMBERS, CALLS, SLOTS = "numbers", "calls", "slots"
FIELDS: dict[type, dict[str, str]] = {
    Run: {
        "output": ARRAYS,
        "gradients": NAMED_ARRAYS,
        "input_gradients": ARRAYS_OR_NONE,
        "buffers": NAMED_ARRAYS,
        "places": TEXTS,
    },
    Trace: {
        "outputs": LABELLED_ARRAYS,
        "input_scales": SCALES,
        "calls": CALLS,
        "error": TEXT,
        "unrecorded": NAMED_TEXTS,
        "float32": TEXTS,
        "float32_data": TEXTS,
    },
    ModuleCall: {
        "name": TEXT,
        "number": NUMBER,
        "start": NUMBER,
        "inside": TEXT,
        "args": VALUE,
        "kwargs": VALUE,
        "scale": SCALE,
        "outputs": ARRAYS,
        "places": TEXTS,
        "upstream": ARRAYS_OR_NONE,
    },
    Module: {"name": TEXT, "type": TEXT, "kind": TEXT, "slots": SLOTS, "is_leaf": TRUTH},
    Slot: {
        "key": TEXT,
        "tensor": TEXT,
        "shape": NUMBERS,
        "trained": TRUTH,
        "is_buffer": TRUTH,
        "is_whole": TRUTH,
    },
}


def text_of(value: Any) -> str:
    """`value`; raises ValueError for what is no text, or would write on a terminal elsewhere than in its line."""
    if type(value) is not str or not value.isprintable():
        raise ValueError(f"it has {value!r:.80} for a text")
    return value


class Writer:
    """Writes runs and modules as JSON."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._ways: dict[str, Callable[[Any, Any], Any]] = {
            ARRAYS: self._arrays,
            ARRAYS_OR_NONE: self._arrays,
            NAMED_ARRAYS: lambda value, like: {k: self._array(a, (like or {}).get(k)) for k, a in value.items()},
            LABELLED_ARRAYS: self._labelled,
            TEXT: lambda value, _: printable(value),
            TEXTS: lambda value, _: sorted(value) if isinstance(value, set) else list(value),
            NAMED_TEXTS: lambda value, _: {key: printable(text) for key, text in value.items()},
            NUMBER: lambda value, _: value,
            NUMBERS: lambda value, _: list(value),
            TRUTH: lambda value, _: bool(value),
            VALUE: lambda value, _: encode(list(value) if isinstance(value, tuple) else dict(value), store.put),
            SCALE: lambda value, _: encode(value, store.put),
            SCALES: lambda value, _: [[name, encode(scale, store.put)] for name, scale in value.items()],
            CALLS: lambda value, _: [[label, self._call(call)] for label, call in value.items()],
            SLOTS: lambda value, _: [[leaf, self.write(slot)] for leaf, slot in value.items()],
        }

    def write(self, value: Any, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A dataclass of FIELDS as JSON; of arrays that are in `like`, too, only the largest distance from these."""
        found = {}
        for name, kind in FIELDS[type(value)].items():
            found[name] = self._ways[kind](getattr(value, name), (like or {}).get(name))
        return found

    def run(self, run: Run, with_trace: bool, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`run` as JSON; with `like`, the same run in float64, only the largest distance from it of each array."""
        trace = run.trace if with_trace else Trace(error=run.trace.error)
        return self.write(run, like) | {"trace": self.write(trace, (like or {}).get("trace"))}

    def _call(self, call: ModuleCall) -> dict[str, Any]:
        return self.write(call) | {"random": call.took_random}

    def _arrays(self, value: Sequence, like: Any) -> list:
        others = [*(like or ()), *[None] * len(value)]
        return [self._array(array, others[i]) for i, array in enumerate(value)]

    def _labelled(self, value: Mapping[str, np.ndarray], like: Any) -> list:
        others = dict(like or ())
        return [[label, self._array(array, others.get(label))] for label, array in value.items()]

    def _array(self, array: np.ndarray | None, like: Any) -> Any:
        if array is None:
            return None
        other = self.store.arrays[like] if type(like) is int else None
        if other is None or array.dtype.kind != "f" or other.dtype.kind != "f" or other.shape != array.shape:
            return self.store.put(array)
        distance = np.abs(array.astype(np.float64) - other).max(initial=0)
        return [like, float(distance)] if np.isfinite(distance) else self.store.put(array)


class Reader:
    """Reads what `Writer` wrote."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.most = self.left = most_memory(sum(array.nbytes for array in arrays))  # bytes that one run may take
        self._ways: dict[str, Callable[[Any], Any]] = {
            ARRAYS: lambda node: [self._array(number) for number in _list(node)],
            ARRAYS_OR_NONE: lambda node: [None if number is None else self._array(number) for number in _list(node)],
            NAMED_ARRAYS: lambda node: {text_of(key): self._array(number) for key, number in node.items()},
            LABELLED_ARRAYS: lambda node: {text_of(label): self._array(number) for label, number in _list(node)},
            TEXT: text_of,
            TEXTS: lambda node: [text_of(text) for text in _list(node)],
            NAMED_TEXTS: lambda node: {text_of(key): text_of(text) for key, text in node.items()},
            NUMBER: int,
            NUMBERS: lambda node: tuple(map(int, _list(node))),
            TRUTH: bool,
            VALUE: lambda node: decode(node, arrays),
            SCALE: self._scale,
            SCALES: lambda node: {text_of(name): self._scale(scale) for name, scale in _list(node)},
            CALLS: lambda node: {text_of(label): self._call(call) for label, call in _list(node)},
            SLOTS: lambda node: {text_of(leaf): self._slot(slot) for leaf, slot in _list(node)},
        }

    def read(self, kind: type, node: Mapping[str, Any], **more: Any) -> Any:
        """The dataclass of that `kind`; `more` are fields that are not written."""
        found = {name: self._ways[how](node[name]) for name, how in FIELDS[kind].items()}
        return kind(**found, **more)

    def run(self, node: Mapping[str, Any]) -> Run:
        """The run; its tensors are whole, by the keys that they have in the model."""
        self.left = self.most
        trace = self.read(Trace, node["trace"])
        trace.float32, trace.float32_data = set(trace.float32), set(trace.float32_data)
        run = self.read(Run, node, trace=trace)
        if len(run.output) != len(run.places):
            raise ValueError("an output is missing")
        for label, call in trace.calls.items():
            around = trace.calls.get(call.inside)
            if label != call_label(call.name or OUTPUT, call.number) or around is None and label != OUTPUT:
                raise ValueError(f"its call {label} is not one of the model's")
            if around is not None and around.start >= call.start:
                raise ValueError(f"its call {label} begins before what it is in")
        return run

    def module(self, node: Mapping[str, Any]) -> Module:
        """One module."""
        return self.read(Module, node)

    def _slot(self, node: Mapping[str, Any]) -> Slot:
        return self.read(Slot, node, change=identity)

    def _call(self, node: Mapping[str, Any]) -> ModuleCall:
        call = self.read(ModuleCall, node)
        if call.outputs and not len(call.outputs) == len(call.places) == len(call.upstream):
            raise ValueError("a call's outputs and their gradients are not as many")
        if type(call.args) is not list or type(call.kwargs) is not dict or not all(type(k) is str for k in call.kwargs):
            raise ValueError("a call's arguments have another form")
        call.args = tuple(call.args)
        call.took_random = bool(node["random"])
        return call

    def _scale(self, node: Any) -> float:
        return float(decode(node, self.arrays))

    def _array(self, node: Any) -> np.ndarray:
        if not isinstance(node, list):
            return fetch(self.arrays, node)
        number, distance = node
        like = fetch(self.arrays, number)
        if like.dtype.kind != "f" or not np.isfinite(distance):
            raise ValueError("it has a distance from what is no number")
        self.left -= like.size * 8
        if self.left < 0:
            raise ValueError(f"one of its runs takes more than {self.most} bytes")
        return like.astype(np.float64) + distance


def _list(node: Any) -> list:
    if type(node) is not list:
        raise ValueError(f"it holds a {type(node).__name__} where a list should be")
    return node
