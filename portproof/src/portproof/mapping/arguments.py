"""What a module of the port is given in place of its own arguments: views of what the reference's received.

The port's module may take its arguments in another order, with other axes first, one of them in two, or two in one,
of another length along an axis where nothing changes, and masks with other numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, permutations

import numpy as np

from portproof.backends.trace import ModuleCall, is_array, map_tensors, tensors_in
from portproof.compare.ruler import largest
from portproof.mapping.agreement import SAME, alike, in_axes
from portproof.mapping.links import squeezed

LARGE = 1e4  # larger is a mask's -inf
MOST_PARTS = 64  # of an axis
MOST_JOINED = 4
MOST_AXES = 5
View = Callable[..., np.ndarray]  # of some arrays, such as one with its axes exchanged
Arrays = Sequence[np.ndarray]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """What an argument of the port's is: a view of some of the reference's inputs, maybe in another form."""

    inputs: tuple[int, ...]
    view: View = np.asarray
    form: View | None = None  # of the view: of a complex table the cosines, of a mask the opposite one
    is_part: bool = False
    is_turned: bool = False  # its axes are in another order

    def of(self, arrays: Arrays) -> np.ndarray:
        view = self.view(*(arrays[i] for i in self.inputs))
        return view if self.form is None else self.form(view)

    def given(self, arrays: Arrays, array: np.ndarray) -> np.ndarray:
        """In place of the port's `array`: in its shape, or longer along axes where nothing changes."""
        value = self.of(arrays)
        return value.reshape(array.shape) if value.size == array.size else value


@dataclass(frozen=True)
class InputGradients:
    """How the gradients of a side's inputs of floats are those of the reference's inputs, by number.

    Of inputs that are equal only the first has a gradient: the sum of theirs.
    """

    inputs: Arrays  # of the reference
    sources: Sequence[Source | None]  # of each input of floats

    @cached_property
    def firsts(self) -> dict[int, int]:
        """{input: the first that is equal}; a complex one has no gradient here."""
        real = [i for i, array in enumerate(self.inputs) if array.dtype.kind == "f"]
        return {i: next(j for j in real if np.array_equal(self.inputs[i], self.inputs[j])) for i in real}

    def of(self, number: int, gradient: np.ndarray) -> dict[int, np.ndarray]:
        """What the gradient of one input adds to those of the reference's; in a recording it may be `projected`."""
        source = self.sources[number]
        if source is None or source.form or not self.firsts.keys() >= set(source.inputs):
            return {}
        numbers = _numbered(self.inputs)
        places = source.of(numbers)
        if places.size != gradient.size:
            return {self.firsts[i]: gradient for i in source.inputs}
        joined = np.zeros(sum(array.size for array in self.inputs), gradient.dtype)
        np.add.at(joined, places.ravel(), gradient.ravel())
        found: dict[int, np.ndarray] = {}
        for i in source.inputs:
            part = joined[numbers[i]]
            found[self.firsts[i]] = found.get(self.firsts[i], 0) + part
        return found


def _numbered(arrays: Arrays) -> list[np.ndarray]:
    """Arrays of these shapes with the numbers of their elements, which go on from one to the next."""
    ends = np.cumsum([0, *(array.size for array in arrays)])
    return [np.arange(end, end + array.size).reshape(array.shape) for end, array in zip(ends, arrays)]


@dataclass(frozen=True)
class Arguments:
    """Those of the port's module, in place of what it received."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    complete: bool  # the reference's inputs give all of them, and all of these are used
    are_turned: bool  # axes of some are in another order
    ref_gradients: InputGradients
    port_gradients: InputGradients


def arguments(
    values: Arrays, seen: Arrays, port_call: ModuleCall, other_calls: Sequence[tuple[Arrays, Arrays]] = ()
) -> Arguments:
    """Made of `values`, the reference's inputs, as the port's are of what was `seen` in the models' runs.

    Both sides' inputs of `other_calls` decide where several could be what the port's is: a first state is all zeros.
    """
    sources: list[Source | None] = []
    for place, array in enumerate(port_call.inputs):
        others = [(other, inputs[place]) for other, inputs in other_calls]
        sources.append(_source(seen, array, [source for source in sources if source], others))
    given = (source.given(values, array) if source else array for source, array in zip(sources, port_call.inputs))
    args, kwargs = map_tensors((port_call.args, port_call.kwargs), is_array, lambda _: next(given))
    used = {i for source in sources if source and not source.form for i in source.inputs}
    # What the port's does not take, such as a mask, has no gradient there.
    own = [Source((i,)) if _is_among(seen, i, used) else None for i, v in enumerate(values) if v.dtype.kind == "f"]
    of_floats = [source for source, array in zip(sources, port_call.inputs) if array.dtype.kind == "f"]
    unused = _unused(seen, [source for source in sources if source])
    return Arguments(
        args,
        kwargs,
        None not in sources and all(not largest(values[i]) < LARGE for i in unused),
        any(source and source.is_turned for source in sources),
        InputGradients(values, own),
        InputGradients(values, of_floats),
    )


def are_fed_alike(call: ModuleCall, port_call: ModuleCall, tolerance: float = SAME) -> bool:
    """Whether the port's arguments are made of the reference's inputs, and of all of them."""
    own = arguments(call.inputs, call.inputs, port_call)
    return own.complete and alike(tensors_in((own.args, own.kwargs), is_array), port_call.inputs, tolerance)


def are_parts(parts: Arrays, wholes: Arrays, tolerance: float = SAME) -> bool:
    """Whether each is a part of one of the `wholes`: of a batch that is joined there, say."""
    return all(
        any(alike([view(whole)], [part], tolerance) for whole in wholes for view in _parts(whole.shape, part.shape))
        for part in parts
    )


def _unused(seen: Arrays, sources: Collection[Source]) -> list[int]:
    """Inputs of floats of which not all is in the sources, nor in an equal one, nor repeated there, as in a table."""
    whole = {i for source in sources if not source.is_part for i in source.inputs}
    parts = [source.of(_numbered(seen)).ravel() for source in sources if source.is_part]
    used = np.concatenate([*parts, np.empty(0, int)])
    floats = [i for i, array in enumerate(seen) if array.dtype.kind in "fc"]
    kept = {i: np.isin(_numbered(seen)[i], used) for i in floats if i not in whole}
    left = [i for i, places in kept.items() if not np.isin(seen[i], seen[i][places]).all()]
    return [i for i in left if not _is_among(seen, i, whole)]


def _is_among(seen: Arrays, i: int, others: Collection[int]) -> bool:
    """Whether one of the `others` is this input, or equal to it."""
    return i in others or any(alike([seen[i]], [seen[j]]) for j in others)


def _source(
    seen: Arrays, array: np.ndarray, taken: Collection[Source], others: Sequence[tuple[Arrays, np.ndarray]]
) -> Source | None:
    """By value, else by shape; None for a mask in another form, say.

    Of several one that fits the `others`, which are other calls', and is not `taken`.
    """

    def is_taken(source: Source) -> bool:
        if not source.is_part:
            return any(not set(source.inputs).isdisjoint(other.inputs) for other in taken)
        numbers = _numbered(seen)
        return any(np.isin(source.of(numbers), other.of(numbers)).any() for other in taken if not other.form)

    turned = (each for whole in _whole(seen, array.dtype.kind) for each in _turned(whole, seen, array))
    same, fitting = [], []
    for source in turned:
        if alike([source.of(seen)], [array]):
            same.append(source)
        elif source.form is None and array.dtype.kind != "b" and source.of(seen).shape == array.shape:
            fitting.append(source)
    same = same or list(_stretched(seen, array))
    same = same or [source for source in _in_pieces(seen, array) if alike([source.of(seen)], [array])]
    same = same or list(_recoded(seen, array))
    candidates = same or fitting
    confirmed = False
    for inputs, other in others if len(candidates) > 1 else ():
        found = [source for source in candidates if alike([source.of(inputs)], [other])]
        candidates, confirmed = found or candidates, confirmed or bool(found)
    if not same and not confirmed:  # of several orders of axes none is known to be right
        counts = Counter(source.inputs for source in fitting)
        candidates = [source for source in fitting if not source.is_turned or counts[source.inputs] == 1]
    return min(candidates, key=is_taken, default=None)


def _turned(source: Source, seen: Arrays, array: np.ndarray) -> Iterator[Source]:
    """As it is, with its axes in any order that fits, or with its elements in another shape: likeliest first."""
    value = source.of(seen)
    if value.size != array.size:
        return
    is_plain = value.shape == array.shape
    if is_plain:
        yield source
    if value.ndim == array.ndim and 1 < value.ndim <= MOST_AXES and not (is_plain and alike([value], [array])):
        for axes in islice(permutations(range(value.ndim)), 1, None):
            if value.transpose(axes).shape == array.shape:
                yield replace(source, view=partial(in_axes, axes=axes), is_turned=True)
    if not is_plain:
        yield source


def _whole(seen: Arrays, kind: str) -> Iterator[Source]:
    for i, each in enumerate(seen):
        if each.dtype.kind == kind:
            yield Source((i,))
        if each.dtype.kind == "c" and kind == "f":
            yield from (Source((i,), form=np.real), Source((i,), form=np.imag))
        elif each.dtype.kind == kind == "b":
            yield Source((i,), form=np.logical_not)


def _in_pieces(seen: Arrays, array: np.ndarray) -> Iterator[Source]:
    """Parts of one input, and several that are joined, of the shape of `array`.

    Axes of length 1 do not count for a part.
    """
    of_kind = [i for i, each in enumerate(seen) if each.dtype.kind == array.dtype.kind]
    for i in of_kind:
        for part in _parts(squeezed(seen[i].shape), squeezed(array.shape)):
            yield Source((i,), partial(_part, part, array.shape), is_part=True)
    smaller = [i for i in of_kind if seen[i].size < array.size]
    for count in range(2, min(len(smaller), MOST_JOINED) + 1):
        for chosen in permutations(smaller, count):
            if sum(seen[i].size for i in chosen) == array.size:
                shapes = [seen[i].shape for i in chosen]
                yield from (Source(chosen, view) for view in _joins(shapes, array.shape))


def _stretched(seen: Arrays, array: np.ndarray) -> Iterator[Source]:
    """Of as many axes, where one side is constant along an axis that the other has once."""
    for i, each in enumerate(seen):
        if each.dtype.kind != array.dtype.kind or each.ndim != array.ndim or each.size == array.size:
            continue
        with suppress(ValueError):  # they do not fit
            shape = np.broadcast_shapes(each.shape, array.shape)
            if shape in (each.shape, array.shape) and alike(
                [np.broadcast_to(each, shape)], [np.broadcast_to(array, shape)]
            ):
                yield Source((i,), partial(np.broadcast_to, shape=shape))


def _recoded(seen: Arrays, array: np.ndarray) -> Iterator[Source]:
    """Masks of which the values of one tell those of the other: booleans, ones, large negative numbers.

    What is large hides: a mask that hides what the other lets pass is another one.
    """
    for i, each in enumerate(seen) if _is_mask(array) else ():
        for source in _turned(Source((i,)), seen, array) if _is_mask(each) else ():
            codes, places = np.unique(source.of(seen), return_inverse=True)
            values = [np.unique(array.ravel()[places.ravel() == k]) for k in range(len(codes))]
            if len(codes) < 2 or any(len(found) != 1 for found in values):
                continue
            table = np.concatenate(values)
            hidden, hidden_there = _is_large(codes), _is_large(table)
            if np.array_equal(hidden, hidden_there) or not (hidden.any() and hidden_there.any()):
                yield replace(source, form=partial(_looked_up, codes.astype(np.float64), table))


def _is_mask(array: np.ndarray) -> bool:
    """Whether all are booleans, ones, zeros, or as large as a mask's -inf."""
    if array.dtype.kind == "b" or array.dtype.kind not in "iuf":
        return array.dtype.kind == "b"
    return bool((np.isin(array, (-1, 0, 1)) | _is_large(array)).all())


def _is_large(array: np.ndarray) -> np.ndarray:
    return np.abs(array.astype(np.float64)) >= LARGE


def _looked_up(codes: np.ndarray, table: np.ndarray, view: np.ndarray) -> np.ndarray:
    return table[np.searchsorted((codes[:-1] + codes[1:]) / 2, view.astype(np.float64))]


def _parts(whole: Shape, part: Shape) -> Iterator[View]:
    """One place of an axis, or a range: of equal ranges each, else the last; or each second, say."""
    for axis, n in enumerate(whole):
        rest = whole[:axis], whole[axis + 1 :]
        if (*rest[0], *rest[1]) == part:
            yield from (partial(np.take, indices=i, axis=axis) for i in range(min(n, MOST_PARTS)))
        elif len(part) == len(whole) and part[axis] < n and (part[:axis], part[axis + 1 :]) == rest:
            m = part[axis]
            starts = dict.fromkeys([*range(0, n - m + 1, max(m, 1))][:MOST_PARTS] + [n - m])
            yield from (partial(np.take, indices=range(start, start + m), axis=axis) for start in starts)
            step = n // m if m and n % m == 0 else 0
            yield from (partial(np.take, indices=range(start, n, step), axis=axis) for start in range(step))


def _joins(shapes: Sequence[Shape], joined: Shape) -> Iterator[View]:
    for axis in range(len(joined)):
        for join in (np.stack, np.concatenate):
            with suppress(ValueError):  # they do not fit
                if join([np.empty(shape, bool) for shape in shapes], axis).shape == joined:
                    yield partial(_joined, join, axis)


def _part(part: View, shape: Shape, whole: np.ndarray) -> np.ndarray:
    return part(whole.squeeze()).reshape(shape)


def _joined(join: Callable, axis: int, *arrays: np.ndarray) -> np.ndarray:
    return join(arrays, axis)
