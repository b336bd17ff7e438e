"""How a module of the port may be run in place of the reference's: where one way differs, there may be another.

Two modules that stand for each other may be called differently (keywords of other names, a size for height and width),
return their values differently (more of them, in another order or shape), or reach further: `BatchNorm(act="relu")` is
two modules of the reference. None of that is a fault. So each attempt is a way to call the port's module, and on
either side the module behind it that is taken to belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import numpy as np

from portproof.backends.model import Model
from portproof.backends.trace import ModuleCall, call_label, map_tensors, tensors_at
from portproof.mapping.map_search import alike
from portproof.mapping.name_map import NameMap

Calls = Mapping[str, ModuleCall]
Groups = list[tuple[int, tuple[int, ...]]]  # of each input of floating point: the reference's that it is, and its shape
LARGE = 1e4  # what is larger is no value but a mask's -inf


@dataclass(frozen=True)
class Way:
    """One way to ask the reference's module: as it is, or with a module behind it that may belong to it."""

    followed_by: str = ""  # the module whose output is taken for its own; one that lies inside it is left out
    upstream: Sequence[np.ndarray | None] | None = None  # what comes back to that output; None: what the call received
    built_differently: str = ""  # what the port's module is then, in words

    def asked(self, call: ModuleCall) -> ModuleCall:
        """`call` with the gradients that come back to what is taken for its output."""
        return call if self.upstream is None else replace(call, upstream=list(self.upstream))


@dataclass(frozen=True)
class Attempt:
    """One way to run the port's module in place of the reference's."""

    port_call: ModuleCall  # with the arguments that it is given
    way: Way = Way()  # how the reference's module is asked
    port_followed_by: str = ""  # as in `Way`, of the port
    ref_groups: Groups | None = None
    port_groups: Groups | None = None
    built_differently: str = ""  # in what the port's module is built differently, in words
    complete: bool = True  # the port's module gets from the reference's inputs all that it takes


def ways(
    ref: Model, calls: Calls, label: str, has_counterpart: Callable[[str], bool] = lambda _: False
) -> Iterator[Way]:
    """The ways to ask the reference's module for `label` of `calls`: all that a judgement may ask, the plainest first.

    A module behind it for which `has_counterpart` holds does not belong to it.
    """
    yield Way()
    if not calls[label].name:
        return
    behind = follower(calls, label, has_counterpart)
    if behind is not None and not ref.modules[behind.name].slots:
        word = f"has the {ref.modules[behind.name].type} behind it inside"
        yield Way(behind.name, behind.upstream, word)
    last = last_inside(ref, calls, label)
    if last is not None and not has_counterpart(call_label(last.name, last.number)):
        word = f"leaves out the {ref.modules[last.name].type} at the end, which the port has elsewhere"
        yield Way(last.name, last.upstream, word)


def attempts(
    ref: Model,
    port: Model,
    names: NameMap,
    label: str,
    calls: Calls,
    received: ModuleCall,
    port_calls: Callable[[], Calls],
) -> Iterator[Attempt]:
    """The ways to run the port's module for `label` of `calls`, the plainest first.

    `received` is the call with the inputs that it is run on; `port_calls()` gives the port's own calls, for which it is
    run. So these are asked for only after the first attempt.
    """
    plain = Attempt(received)
    yield plain
    if not received.name or names.calls[label] not in port_calls():
        return
    port_label, port_labels = names.calls[label], set(names.calls.values())
    own = _called_as_the_port_does(calls[label], received, port_calls()[port_label])
    yield own
    _, *others = ways(ref, calls, label, lambda other: other in names.calls)
    behind = [way for way in others if not way.followed_by.startswith(f"{received.name}.")]
    inside = [way for way in others if way not in behind]
    port_behind = follower(port_calls(), port_label, lambda other: other in port_labels)
    for first in (plain, own):
        for way in behind:
            yield replace(first, way=way, built_differently=way.built_differently)
        if port_behind and not port.modules[port_behind.name].slots:
            word = f"leaves to a {port.modules[port_behind.name].type} behind it what the reference's does itself"
            yield replace(first, port_followed_by=port_behind.name, built_differently=word)
    for way in inside:
        yield replace(plain, way=way, built_differently=way.built_differently)
    last = last_inside(port, port_calls(), port_label)
    if last and call_label(last.name, last.number) not in port_labels:
        word = f"has a {port.modules[last.name].type} at the end, which the reference has elsewhere"
        yield replace(plain, port_followed_by=last.name, built_differently=word)


def last_inside(model: Model, calls: Calls, label: str) -> ModuleCall | None:
    """The activation with which a layer that has tensors of its own ends, with what comes back to what it received."""
    call = calls[label]
    inside = sorted((c for c in calls.values() if c.inside == label), key=lambda c: c.start)
    if not model.modules[call.name].slots or not inside or model.modules[inside[-1].name].slots:
        return None
    last = inside[-1]
    if len(call.outputs) != 1 or len(last.inputs) != 1 or not alike(call.outputs, last.outputs):
        return None
    before = next((c.upstream for c in inside[-2::-1] if alike(c.outputs, last.inputs)), [None])
    return replace(last, upstream=list(before))


def follower(calls: Calls, label: str, has_counterpart: Callable[[str], bool]) -> ModuleCall | None:
    """The call that takes what `label` returned, and that, if it has no counterpart on the other side.

    One that returns what it received (Identity, dropout) is passed over.
    """
    call = calls[label]
    later = [(c.start, other) for other, c in calls.items() if c.start > call.start and c.inside == call.inside]
    for _, other in sorted(later):
        following = calls[other]
        if len(call.outputs) != 1 or len(following.inputs) != 1 or not alike(call.outputs, following.inputs):
            return None
        if len(following.outputs) != 1 or not alike(following.inputs, following.outputs):
            return None if has_counterpart(other) else following
    return None


def _called_as_the_port_does(call: ModuleCall, received: ModuleCall, port_call: ModuleCall) -> Attempt:
    """The arguments of `port_call` with the values that the reference's module received, as far as these are there."""
    is_array = partial(_is, np.ndarray)
    values, seen = received.inputs, call.inputs
    floats = [i for i, array in enumerate(values) if array.dtype.kind in "fc"]
    used, chosen, complete = set(), {}, True
    for place, array in tensors_at((port_call.args, port_call.kwargs), is_array).items():
        fitting = [i for i, value in enumerate(values) if _could_be(value, array)]
        # By value where the two agree before it, else in order.
        ranked = sorted(fitting, key=lambda i: (not alike([seen[i]], [array]), i in used, i))
        if ranked and (seen[ranked[0]].shape == array.shape or alike([seen[ranked[0]]], [array])):
            chosen[place] = ranked[0]
            used.add(ranked[0])
        else:  # a mask, say, that is written differently: whether it is right its caller is asked
            complete = False
    unused = [i for i in floats if i not in used and not any(alike([seen[i]], [seen[j]]) for j in used)]
    complete &= all(_is_mask(values[i]) for i in unused)
    places = iter(tensors_at((port_call.args, port_call.kwargs), is_array).items())

    def replaced(array: np.ndarray) -> np.ndarray:
        place, _ = next(places)
        return values[chosen[place]].reshape(array.shape) if place in chosen else array

    args, kwargs = map_tensors((port_call.args, port_call.kwargs), is_array, replaced)
    group = {i: next(j for j in floats if _equal(values[i], values[j])) for i in floats}
    port_groups, given = [], tensors_at((port_call.args, port_call.kwargs), is_array)
    for place, array in given.items():
        if array.dtype.kind in "fc":
            i = group[chosen[place]] if place in chosen else -1
            port_groups.append((i, values[i].shape if place in chosen else array.shape))
    ref_groups = [(group[i], values[group[i]].shape) for i in floats]
    call = replace(received, args=args, kwargs=kwargs)
    word = "is called differently" if complete else "takes other inputs, so that it was not run alone"
    groups = {"ref_groups": ref_groups, "port_groups": port_groups}
    return Attempt(call, **groups, built_differently=word, complete=complete)


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind)


def _could_be(value: np.ndarray, array: np.ndarray) -> bool:
    return value.dtype.kind == array.dtype.kind and value.size == array.size


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and np.array_equal(first, second)


def _is_mask(array: np.ndarray) -> bool:
    return array.size > 0 and not np.abs(array).max() < LARGE


def paired_outputs(
    ref: Sequence[np.ndarray], port: Sequence[np.ndarray], needed: Sequence[bool]
) -> dict[int, tuple[int, Callable[[np.ndarray], np.ndarray]]]:
    """{output of the reference: (the port's that stands for it, how that gets the reference's shape)}.

    By place where shapes agree, else by value. One that is not `needed` may be missing, if any other is there.
    """
    pairs: dict[int, tuple[int, Callable]] = {}
    for i, array in enumerate(ref):
        same_shape = [j for j, other in enumerate(port) if other.shape == array.shape]
        same_value = [j for j in same_shape if alike([array], [port[j]])]
        if same_value or same_shape:
            pairs[i] = (same_value or same_shape)[0], lambda array: array
            continue
        for j, other in enumerate(port):
            shaped = _reshaping(array, other)
            if shaped is not None:
                pairs[i] = j, shaped
                break
    used = bool(pairs)
    for i, array in enumerate(ref):
        is_needed = needed[i] if any(needed) and i < len(needed) else not used
        if i not in pairs and is_needed and port:  # the difference is for the comparison to say
            pairs[i] = min(i, len(port) - 1), lambda array: array
    return dict(sorted(pairs.items()))


def _reshaping(ref: np.ndarray, port: np.ndarray) -> Callable[[np.ndarray], np.ndarray] | None:
    """What makes of `port` an array like `ref`: another shape, or other axes; None if nothing does."""
    if ref.size != port.size:
        return None
    if alike([ref.ravel()], [port.ravel()]):
        return lambda array: array.reshape(ref.shape)
    if ref.ndim == port.ndim <= 5:
        for axes in permutations(range(port.ndim)):
            moved = port.transpose(axes)
            if moved.shape == ref.shape and alike([ref], [moved]):
                return lambda array, axes=axes: array.transpose(axes)
    return None


def port_upstream(
    outputs: Mapping[int, tuple[int, Callable]], upstream: Sequence[np.ndarray | None], port: Sequence[np.ndarray]
) -> list[np.ndarray | None]:
    """The gradients for the port's outputs: those of the reference's that they stand for, in the port's shapes."""
    sent: list[np.ndarray | None] = [None] * len(port)
    for i, (j, shaped) in outputs.items():
        if i < len(upstream) and upstream[i] is not None and upstream[i].size == port[j].size and sent[j] is None:
            places = shaped(np.arange(port[j].size).reshape(port[j].shape)).ravel()
            flat = np.empty(port[j].size, upstream[i].dtype)
            flat[places] = upstream[i].ravel()
            sent[j] = flat.reshape(port[j].shape)
    return sent
