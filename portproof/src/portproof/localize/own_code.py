"""Say at which lines of a faulty module's own code its values leave those of the reference's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from portproof.backends.own_code import Followed, Wrong
from portproof.backends.question import Question, Run
from portproof.backends.trace import CALLS, ModuleCall
from portproof.compare.ruler import HOPELESS
from portproof.localize.isolated import IsolatedRun, IsolatedRuns
from portproof.mapping.agreement import alike, alike_in_any_order, exchanged_axes, in_axes
from portproof.mapping.arguments import are_fed_alike, are_parts
from portproof.mapping.module_calls import EXACT

MOST = 10  # lines that are shown
ROUNDED = 1e-5  # of the largest value: U of a constant in float32, 6e-8, magnified up to 170 times

_Forms = tuple[list[np.ndarray], list[np.ndarray]]  # the reference's, the port's


class _Values:
    """Arrays, found again by shape and value."""

    def __init__(self, arrays: Iterable[np.ndarray], tolerance: float) -> None:
        self.tolerance = tolerance
        self.by_shape: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)
        for array in arrays:
            self.by_shape[array.shape].append(array)

    def hold(self, array: np.ndarray) -> bool:
        """A mask also as its opposite, which is as right."""
        forms = [array, ~array] if array.dtype.kind == "b" else [array]
        return any(
            _agree(other, form, self.tolerance) for other in self.by_shape.get(array.shape, ()) for form in forms
        )


def _agree(ref: np.ndarray, port: np.ndarray, tolerance: float) -> bool:
    """A mask may hold infinities."""
    if ref.dtype.kind not in "fc" or port.dtype.kind not in "fc":
        return ref.dtype.kind == port.dtype.kind and np.array_equal(ref, port)
    finite = np.isfinite(ref)
    if not np.array_equal(ref[~finite], port[~finite]):
        return False
    return alike([ref[finite]], [port[finite]], tolerance)


@dataclass(frozen=True)
class Places:
    """Of a module whose forward pass differs alone: in words, and the modules in it that are at fault, or ""."""

    lines: list[str] = field(default_factory=list)
    ref: str = ""
    port: str = ""


def places_in_code(runs: IsolatedRuns, run: IsolatedRun, inner: Run | None, values: Sequence[np.ndarray]) -> Places:
    """Which child is fed otherwise, and the lines at fault.

    `inner` is the reference's run with the calls in it, `values` what its own operations gave; both where they are
    known. Nothing is said of a module without code of its own.
    """
    question, port_call = run.attempt.question, run.attempt.port_call
    calls = sorted(inner.trace.calls.values(), key=lambda call: call.start) if inner else []
    outputs = inner.output if inner else [array for item, array in run.ref.items() if item.kind == "output"]
    tolerance = _tolerance(run)
    known = [*question.call.inputs, *outputs, *values]
    known += (array for call in calls for array in (*call.inputs, *call.outputs))
    asked = Question(port_call, "float64", runs.train, keeps=CALLS)
    port_run, followed = runs.port.follow(asked, _Values(known, tolerance).hold)
    if port_run.trace.error:
        error, statement = followed.raised or ("", None)
        return Places([f"raised at {statement}"] if error == port_run.trace.error else [])
    if alike(outputs, port_run.output, tolerance):
        return Places()  # only float32 differs
    own, port_own = prefix_of(question.module), prefix_of(port_call.name)
    inside = [call for call in calls if call.name and own + call.label in runs.names.calls]
    right: dict[str, str] = {}  # {call that is fed alike: the port's}
    right_within: set[str] = set()  # calls that are right, however they are fed, with all inside
    of_right: list[_Forms] = []  # what right calls get in another form
    more: tuple[str, Places] | None = None  # the innermost call that gets all that the reference's gets, and more
    port_calls = port_run.trace.calls

    def is_right_behind(call: ModuleCall, later: ModuleCall) -> bool:
        there = port_calls.get(runs.names.calls[own + later.label].removeprefix(port_own))
        return (
            later.start > call.start
            and _gets_only(later, call)
            and there is not None
            and _fed_alike(later, there, tolerance)
        )

    for call in inside:
        if more and more[0] not in _around(inner.trace.calls if inner else {}, call.label):
            return more[1]
        label = runs.names.calls[own + call.label].removeprefix(port_own)
        port_inner = port_calls.get(label)
        if port_inner is None:
            lines = [f"the port does not call {own + call.label} there", *_left_at(followed, followed.result)]
            return Places(lines)
        gives_alike = bool(call.outputs) and alike_in_any_order(call.outputs, port_inner.outputs, tolerance)
        of_right += [_in_other_form(call, port_inner, tolerance)] if gives_alike else []
        if _fed_alike(call, port_inner, tolerance):
            right[call.label] = label
            continue
        if call.inside in right_within or gives_alike or any(map(partial(is_right_behind, call), inside)):
            right_within.add(call.label)
            continue
        if _gets_all_of(port_inner, call, tolerance):
            word = f"{own + call.label} gets what the reference's gets, and more: it or that is at fault"
            more = call.label, Places([word], own + call.name, port_own + port_inner.name)
            continue
        if any(_are_equal(_in_other_form(call, port_inner, tolerance), forms) for forms in of_right):
            word = f"{own + call.label} gets what the reference's gets, in the form in which right calls get it"
            more = call.label, Places([word], own + call.name, port_own + port_inner.name)
            continue
        place = followed.calls.get(label)
        where = f" at {place[0].statement.place}" if place else ""
        fed = f"its own code feeds {own + call.label} otherwise{where}, though all before it agrees"
        left = [fed, *_left_at(followed, place)]
        if more:
            return replace(more[1], lines=[*more[1].lines, *left])
        port_known = [array for each in port_run.trace.calls.values() for array in (*each.inputs, *each.outputs)]
        around = _innermost(inner.trace.calls if inner else {}, call, _Values(port_known, tolerance), right)
        port_around = _innermost(port_run.trace.calls, port_inner, _Values(known, tolerance), right.values())
        return Places(left, (own + around).rstrip("."), (port_own + port_around).rstrip("."))
    if more:
        return more[1]
    found = _left_at(followed, followed.result)
    if inside:
        found.insert(
            0, "its layers are fed alike, and none is at fault: the difference is made behind the last of them"
        )
    return Places(found)


def _tolerance(run: IsolatedRun) -> float:
    """`EXACT`; more where constants are rounded to float32, by far less than the module differs by."""
    rows = [row for row in run.wrong_outputs if row.scale]
    if not any(row.widened_by == "rounded" for row in rows):
        return EXACT
    return max(EXACT, min(ROUNDED, *(row.difference / row.scale / HOPELESS for row in rows)))


def _innermost(calls: Mapping[str, ModuleCall], call: ModuleCall, other_side: _Values, right: Collection[str]) -> str:
    """The module of the innermost call around `call` in which the fault has to be; "" for none.

    It gets what the other side has, too, or one of the `right` calls, which are fed alike, is in it.
    """

    begun = {label for each in right for label in _around(calls, each)}
    name = ""
    for label in _around(calls, call.label):
        floats = (array for array in calls[label].inputs if array.dtype.kind in "fc")
        if label not in begun and not all(map(other_side.hold, floats)):
            break
        name = calls[label].name
    return name


def _around(calls: Mapping[str, ModuleCall], label: str) -> list[str]:
    """The calls of modules around this one, the outermost first."""
    inside = calls[label].inside if label in calls else ""
    return [*_around(calls, inside), inside] if inside in calls and calls[inside].name else []


def _gets_all_of(port_call: ModuleCall, call: ModuleCall, tolerance: float) -> bool:
    """Whether the port's call gets all that the reference's gets, and gives something else."""
    given = _Values(port_call.inputs, tolerance)

    def is_given(array: np.ndarray) -> bool:
        return given.hold(array) or any(_agree(array, cut, tolerance) for cut in _starts(port_call.inputs, array.shape))

    return all(map(is_given, call.inputs)) and not alike_in_any_order(call.outputs, port_call.outputs, tolerance)


def _in_other_form(call: ModuleCall, port_call: ModuleCall, tolerance: float) -> _Forms:
    """The inputs of each side that the other does not get, with its axes in any order."""

    def left(arrays: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [a for a in arrays if not any(alike([in_axes(a, exchanged_axes(a, b))], [b], tolerance) for b in others)]

    return left(call.inputs, port_call.inputs), left(port_call.inputs, call.inputs)


def _are_equal(forms: _Forms, others: _Forms) -> bool:
    """Whether there are some, and each side gets the same in both calls, such as a mask that all layers get."""
    return any(forms) and all(
        len(own) == len(other) and all(map(np.array_equal, own, other)) for own, other in zip(forms, others)
    )


def _starts(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """What is first along each axis, of this shape: of a mask for the longest sequence, say."""
    for array in arrays:
        cut = array[tuple(map(slice, shape))] if array.ndim == len(shape) else array
        if cut.shape == shape != array.shape:
            yield cut


def _gets_only(later: ModuleCall, call: ModuleCall) -> bool:
    """Whether a later call gets what this one gave, in any form: padded, say, which is packed here."""
    given = [array.ravel() for array in call.outputs if array.dtype.kind == "f"]
    floats = [array for array in later.inputs if array.dtype.kind == "f"]
    values = np.concatenate([*given, np.zeros(1)])
    return bool(given) and bool(floats) and all(np.isin(array, values).all() for array in floats)


def _fed_alike(call: ModuleCall, port_call: ModuleCall, tolerance: float) -> bool:
    """Also if it is called differently, or takes another form and makes the same of it.

    Such forms are time first, or one call of two batches that are joined in place of two.
    """
    values, port_values = _values(call), _values(port_call)
    return (
        are_fed_alike(call, port_call, tolerance)
        or all(alike_in_any_order(*pair, tolerance) for pair in zip(values, port_values))
        or all(are_parts(*pair, tolerance) for pair in zip(values, port_values))
        or all(are_parts(*pair, tolerance) for pair in zip(port_values, values))
    )


def _values(call: ModuleCall) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return call.inputs, call.outputs


def prefix_of(module: str) -> str:
    """Of what is in the module; "" for the model."""
    return f"{module}." if module else ""


def _left_at(followed: Followed, place: Wrong | None) -> list[str]:
    """The first line is where a value that is not the reference's comes of values that are."""
    if place is None:
        return []
    step, wrong = place
    if not wrong:
        known = "its value is one of the reference's or one that it holds, but not the one that belongs there"
        return [f"{known}, at {step.statement}"]
    blamed = followed.blamed(step, wrong)
    if not blamed:  # what the module was given has another form
        return []
    first, *behind = blamed
    found = [f"its values first leave the reference's at {first}"]
    if behind:
        found.append("or, if they have only another form there, in one of these lines behind it:")
        found += [f"  {statement}" for statement in behind[:MOST]]
    if len(behind) > MOST:
        found.append(f"  and {len(behind) - MOST} more, to {behind[-1].place}")
    return found
