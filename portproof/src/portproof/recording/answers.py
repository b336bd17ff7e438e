"""What judging asks of a reference, as keys, and the runs that answer it, as JSON with their arrays in a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from portproof.backends.model import OUTPUT, Run, to_precision
from portproof.backends.trace import ModuleCall, Trace, call_label
from portproof.io.cli import printable
from portproof.io.files import most_memory
from portproof.recording.values import Store, decode, digest_of, encode, fetch


def query_key(
    name: str,
    call: ModuleCall,
    dtype: str,
    train: bool,
    backward: bool,
    then: str,
    switched_off: Collection[str],
    moved: int = 0,
) -> str:
    """What names a run of `BackendModel.run_module`: the same for arguments that are the same in that precision.

    `moved` is the number of one of `moved_runs`, from 1; 0 of any other run.
    """

    def digest(array: np.ndarray) -> str:
        return digest_of(to_precision(array, dtype))

    upstream = [None if array is None else digest(array) for array in call.upstream] if backward else None
    off = sorted(switched_off) if train else []
    given = [encode(list(call.args), digest), encode(dict(call.kwargs), digest)]
    text = json.dumps([name, given, upstream, dtype, train, then, off, *[moved] * bool(moved)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Writer:
    """Writes runs as JSON."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def run(self, run: Run, with_trace: bool, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`run` as JSON; with `like`, the same run in float64, only the largest distance from it of each array."""
        like = like or {}

        def arrays(name: str, values: Mapping[str, np.ndarray] | Sequence) -> Any:
            if isinstance(values, Mapping):
                other = like.get(name, {})
                return {key: self._array(value, other.get(key)) for key, value in values.items()}
            other = [*like.get(name, []), *[None] * len(values)]
            return [self._array(value, other[i]) for i, value in enumerate(values)]

        found = {name: arrays(name, getattr(run, name)) for name in ARRAYS}
        found |= {"places": run.places, "error": printable(run.trace.error)}
        return found | {"trace": self._trace(run.trace, like.get("trace", {}))} if with_trace else found

    def _array(self, array: np.ndarray | None, like: Any) -> Any:
        if array is None:
            return None
        other = self.store.arrays[like] if type(like) is int else None
        if other is None or array.dtype.kind != "f" or other.dtype.kind != "f" or other.shape != array.shape:
            return self.store.put(array)
        distance = np.abs(array.astype(np.float64) - other).max(initial=0)
        return [like, float(distance)] if np.isfinite(distance) else self.store.put(array)

    def _trace(self, trace: Trace, like: Mapping[str, Any]) -> dict[str, Any]:
        outputs = dict(like.get("outputs", []))
        return {
            "outputs": [[label, self._array(array, outputs.get(label))] for label, array in trace.outputs.items()],
            "scales": [[name, encode(scale, self.store.put)] for name, scale in trace.input_scales.items()],
            "unrecorded": {name: printable(reason) for name, reason in trace.unrecorded.items()},
            "float32": sorted(trace.float32),
            "float32_data": sorted(trace.float32_data),
            "calls": [[label, self._call(call)] for label, call in trace.calls.items()],
        }

    def _call(self, call: ModuleCall) -> dict[str, Any]:
        put = self.store.put
        return {
            "name": call.name,
            "number": call.number,
            "start": call.start,
            "inside": call.inside,
            "args": encode(list(call.args), put),
            "kwargs": encode(dict(call.kwargs), put),
            "scale": encode(call.scale, put),
            "outputs": [put(array) for array in call.outputs],
            "places": call.places,
            "upstream": [None if array is None else put(array) for array in call.upstream],
            "random": bool(call.random_after and call.random_after != call.random_before),
        }


ARRAYS = ("output", "gradients", "input_gradients", "buffers")  # the fields of a run that hold arrays


class Reader:
    """Reads what `Writer` wrote, and raises ValueError, KeyError or TypeError for anything else."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.most = self.left = most_memory(sum(array.nbytes for array in arrays))  # bytes that one run may take

    def run(self, written: Mapping[str, Any]) -> Run:
        """The run; its tensors are whole, by the keys that they have in the model."""
        self.left = self.most
        fields = {}
        for name in ARRAYS:
            values = written[name]
            if isinstance(values, dict) != (name in ("gradients", "buffers")):
                raise ValueError(f"its {name} have another form")
            fields[name] = (
                {key: self._array(value) for key, value in values.items()}
                if isinstance(values, dict)
                else [None if value is None else self._array(value) for value in values]
            )
        trace = self._trace(written["trace"]) if "trace" in written else Trace()
        trace.error = text_of(written["error"])
        if any(array is None for array in fields["output"]) or len(fields["output"]) != len(written["places"]):
            raise ValueError("an output is missing")
        return Run(trace, places=[text_of(place) for place in written["places"]], **fields)

    def _array(self, node: Any) -> np.ndarray:
        if isinstance(node, list):
            number, distance = node
            like = fetch(self.arrays, number)
            if like.dtype.kind != "f" or not np.isfinite(distance):
                raise ValueError("it has a distance from what is no number")
            self.left -= like.size * 8
            if self.left < 0:
                raise ValueError(f"one of its runs takes more than {self.most} bytes")
            return like.astype(np.float64) + distance
        return fetch(self.arrays, node)

    def _trace(self, written: Mapping[str, Any]) -> Trace:
        trace = Trace()
        trace.outputs = {text_of(label): self._array(number) for label, number in written["outputs"]}
        trace.input_scales = {name: float(decode(scale, self.arrays)) for name, scale in written["scales"]}
        trace.unrecorded = {text_of(name): text_of(reason) for name, reason in written["unrecorded"].items()}
        trace.float32, trace.float32_data = (set(map(text_of, written[key])) for key in ("float32", "float32_data"))
        trace.calls = {text_of(label): self._call(call) for label, call in written["calls"]}
        for label, call in trace.calls.items():
            around = trace.calls.get(call.inside)
            if label != call_label(call.name or OUTPUT, call.number) or around is None and label != OUTPUT:
                raise ValueError(f"its call {label} is not one of the model's")
            if around is not None and around.start >= call.start:
                raise ValueError(f"its call {label} begins before what it is in")
        return trace

    def _call(self, written: Mapping[str, Any]) -> ModuleCall:
        outputs = [self._array(number) for number in written["outputs"]]
        upstream = [None if number is None else self._array(number) for number in written["upstream"]]
        places = [text_of(place) for place in written["places"]]
        if outputs and not len(outputs) == len(places) == len(upstream):
            raise ValueError("a call's outputs and their gradients are not as many")
        args, kwargs = decode(written["args"], self.arrays), decode(written["kwargs"], self.arrays)
        if type(args) is not list or type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
            raise ValueError("a call's arguments have another form")
        name, inside = text_of(written["name"]), text_of(written["inside"])
        call = ModuleCall(name, int(written["number"]), int(written["start"]), inside, tuple(args), kwargs)
        call.scale = float(decode(written["scale"], self.arrays))
        call.outputs, call.places, call.upstream = outputs, places, upstream
        if written["random"]:
            call.random_before, call.random_after = (0,), (1,)
        return call


def text_of(value: Any) -> str:
    """`value`; raises ValueError for what is no text, or would write on a terminal elsewhere than in its line."""
    if type(value) is not str or not value.isprintable():
        raise ValueError(f"it has {value!r:.80} for a text")
    return value
