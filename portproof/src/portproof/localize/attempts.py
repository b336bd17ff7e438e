"""Ways to run a module of the port in place of the reference's, tried in turn.

The port's may be called differently, return another form, or include its neighbour:
`BatchNorm(act="relu")` is two modules of the reference. None is a fault.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from operator import attrgetter

import numpy as np

from portproof.arrays import largest
from portproof.backends.question import Question
from portproof.backends.slots import Module
from portproof.backends.trace import ModuleCall, is_array, map_tensors
from portproof.mapping.map_search import alike
from portproof.python39 import zip_strict

Calls = Mapping[str, ModuleCall]  # of one side, by label
Groups = Sequence[tuple[int, tuple[int, ...]]]  # per float input: (reference's input or -1, its shape)
Pairs = Mapping[int, tuple[int, np.ndarray]]  # {reference's output: (port's, flat places)}
LARGE = 1e4  # larger is a mask's -inf


@dataclass(frozen=True)
class Attempt:
    question: Question  # to the reference
    port_call: ModuleCall
    port_followed_by: str = ""  # as in `Question`
    ref_groups: Groups | None = None  # None: each input stands for itself
    port_groups: Groups | None = None
    built_differently: str = ""  # in words
    complete: bool = True  # the reference's inputs give all it takes


def followed(question: Question, neighbour: ModuleCall) -> Question:
    call = replace(question.call, upstream=list(neighbour.upstream))
    return replace(question, call=call, followed_by=neighbour.name)


def neighbours(
    modules: Mapping[str, Module], calls: Calls, label: str, mapped: Collection[str] = ()
) -> tuple[ModuleCall | None, ModuleCall | None]:
    """(the call behind `label`, the last inside), each if the other side may have it elsewhere."""

    def if_spare(call: ModuleCall | None) -> ModuleCall | None:
        is_spare = call and not modules[call.name].slots and call.label not in mapped
        return call if is_spare else None

    has_tensors = bool(modules[calls[label].name].slots)
    return if_spare(_behind(calls, label)), if_spare(_last_inside(calls, label) if has_tensors else None)


def _last_inside(calls: Calls, label: str) -> ModuleCall | None:
    """The last call inside, if the layer returns its output, with its input's gradient."""
    outputs = calls[label].outputs
    inside = sorted((c for c in calls.values() if c.inside == label), key=attrgetter("start"))
    if not inside or len(outputs) != 1 or len(inside[-1].inputs) != 1 or not alike(outputs, inside[-1].outputs):
        return None
    before = next((c.upstream for c in inside[-2::-1] if alike(c.outputs, inside[-1].inputs)), [None])
    return replace(inside[-1], upstream=before)


def _behind(calls: Calls, label: str) -> ModuleCall | None:
    """The call that takes this output alone; one that passes it on is skipped."""
    call = calls[label]
    later = [c for c in calls.values() if c.start > call.start and c.inside == call.inside]
    for following in sorted(later, key=attrgetter("start")):
        if not _one_array(call.outputs, following.inputs):
            return None
        if not _one_array(following.inputs, following.outputs):
            return following
    return None


def _one_array(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    return len(first) == len(second) == 1 and alike(first, second)


def called_as_the_port_does(plain: Attempt, call: ModuleCall, port_call: ModuleCall) -> Attempt:
    """The port's arguments with the reference's values, matched by value, else in order."""
    values, seen = plain.question.call.inputs, call.inputs
    arrays = port_call.inputs
    chosen: list[int | None] = []
    for array in arrays:
        fitting = [i for i, v in enumerate(values) if v.dtype.kind == array.dtype.kind and v.size == array.size]
        same_value = [i for i in fitting if alike([seen[i]], [array])]
        best = min(same_value or fitting, key=lambda i: (i in chosen, i), default=None)
        is_found = best is not None and (bool(same_value) or seen[best].shape == array.shape)
        chosen.append(best if is_found else None)  # a mask in another form, say
    matched = list(zip_strict(chosen, arrays))
    given = (array if i is None else values[i].reshape(array.shape) for i, array in matched)
    args, kwargs = map_tensors((port_call.args, port_call.kwargs), is_array, lambda _: next(given))
    used = {i for i in chosen if i is not None}
    floats = [i for i, value in enumerate(values) if value.dtype.kind in "fc"]
    unused = [i for i in floats if i not in used and not any(alike([seen[i]], [seen[j]]) for j in used)]
    complete = None not in chosen and all(not largest(values[i]) < LARGE for i in unused)
    first_equal = {i: next(j for j in floats if np.array_equal(values[i], values[j])) for i in floats}
    groups = {i: (first, values[i].shape) for i, first in first_equal.items()}
    return replace(
        plain,
        port_call=replace(plain.port_call, args=args, kwargs=kwargs),
        ref_groups=list(groups.values()),
        port_groups=[groups.get(i, (-1, array.shape)) for i, array in matched if array.dtype.kind in "fc"],
        built_differently="is called differently" if complete else "takes other inputs, so that it was not run alone",
        complete=complete,
    )


def paired_outputs(ref: Sequence[np.ndarray], port: Sequence[np.ndarray], needed: Sequence[bool]) -> Pairs:
    """Pair by place and shape, else by value; all `needed`. `port` has one at least."""
    pairs: dict[int, tuple[int, np.ndarray]] = {}
    for i, array in enumerate(ref):
        same_shape = [j for j, other in enumerate(port) if other.shape == array.shape]
        same_value = [j for j in same_shape if alike([array], [port[j]])]
        for j in (same_value or same_shape)[:1] or range(len(port)):
            places = _places(port[j]) if same_shape else _places_of(array, port[j])
            if places is not None:
                pairs[i] = j, places
                break
    used = bool(pairs)
    for i in range(len(ref)):
        is_needed = needed[i] if any(needed) and i < len(needed) else not used
        if i not in pairs and is_needed:  # the comparison says what differs
            j = min(i, len(port) - 1)
            pairs[i] = j, _places(port[j])
    return dict(sorted(pairs.items()))


def _places(array: np.ndarray) -> np.ndarray:
    return np.arange(array.size).reshape(array.shape)


def _places_of(ref: np.ndarray, port: np.ndarray) -> np.ndarray | None:
    if ref.size != port.size:
        return None
    if alike([ref.ravel()], [port.ravel()]):
        return _places(ref)
    for axes in permutations(range(port.ndim)) if ref.ndim == port.ndim <= 5 else ():
        moved = port.transpose(axes)
        if moved.shape == ref.shape and alike([ref], [moved]):
            return _places(port).transpose(axes)
    return None


def port_upstream(
    pairs: Pairs, upstream: Sequence[np.ndarray | None], port: Sequence[np.ndarray]
) -> list[np.ndarray | None]:
    sent: list[np.ndarray | None] = [None] * len(port)
    for i, (j, places) in pairs.items():
        if i < len(upstream) and upstream[i] is not None and upstream[i].size == port[j].size and sent[j] is None:
            sent[j] = np.empty(port[j].shape, upstream[i].dtype)
            np.put(sent[j], places, upstream[i])
    return sent
