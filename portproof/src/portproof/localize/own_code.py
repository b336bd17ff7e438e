"""Say at which lines of a faulty module's own code its values leave those of the reference's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from portproof.backends.own_code import Followed, Wrong
from portproof.backends.question import Question, Run
from portproof.backends.trace import CALLS, ModuleCall
from portproof.localize.isolated import IsolatedRun, IsolatedRuns
from portproof.mapping.map_search import alike, alike_in_any_order
from portproof.mapping.module_calls import EXACT

MOST = 10  # lines that are shown


class _Values:
    """Arrays, found again by shape and value."""

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        self.by_shape: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)
        for array in arrays:
            self.by_shape[array.shape].append(array)

    def hold(self, array: np.ndarray) -> bool:
        return any(_agree(other, array) for other in self.by_shape.get(array.shape, ()))


def _agree(ref: np.ndarray, port: np.ndarray) -> bool:
    """Within `EXACT`; a mask may hold infinities."""
    if ref.dtype.kind not in "fc" or port.dtype.kind not in "fc":
        return ref.dtype.kind == port.dtype.kind and np.array_equal(ref, port)
    finite = np.isfinite(ref)
    if not np.array_equal(ref[~finite], port[~finite]):
        return False
    return alike([ref[finite]], [port[finite]], EXACT)


def places_in_code(runs: IsolatedRuns, run: IsolatedRun, inner: Run | None, values: Sequence[np.ndarray]) -> list[str]:
    """In words, of a module whose forward pass differs alone: which child is fed otherwise, and the lines at fault.

    `inner` is the reference's run with the calls in it, `values` what its own operations gave; both where they are
    known. Nothing is said of a module without code of its own.
    """
    question, port_call = run.attempt.question, run.attempt.port_call
    calls = sorted(inner.trace.calls.values(), key=lambda call: call.start) if inner else []
    outputs = inner.output if inner else [array for item, array in run.ref.items() if item.kind == "output"]
    known = [*question.call.inputs, *outputs, *values]
    known += (array for call in calls for array in (*call.inputs, *call.outputs))
    asked = Question(port_call, "float64", runs.train, keeps=CALLS)
    port_run, followed = runs.port.follow(asked, _Values(known).hold)
    if port_run.trace.error:
        error, statement = followed.raised or ("", None)
        return [f"raised at {statement}"] if error == port_run.trace.error else []
    if alike(outputs, port_run.output, EXACT):
        return []  # only float32 differs
    own = prefix_of(question.module)
    inside = [call for call in calls if call.name and own + call.label in runs.names.calls]
    for call in inside:
        label = runs.names.calls[own + call.label].removeprefix(prefix_of(port_call.name))
        port_inner = port_run.trace.calls.get(label)
        if port_inner is None:
            return [f"the port does not call {own + call.label} there", *_left_at(followed, followed.result)]
        if not _fed_alike(call, port_inner):
            place = followed.calls.get(label)
            where = f" at {place[0].statement.place}" if place else ""
            fed = f"its own code feeds {own + call.label} otherwise{where}, though all before it agrees"
            return [fed, *_left_at(followed, place)]
    found = _left_at(followed, followed.result)
    if inside:
        found.insert(0, "its layers agree and are fed alike: the difference is made behind the last of them")
    return found


def _fed_alike(call: ModuleCall, port_call: ModuleCall) -> bool:
    """Also if it takes another form, such as time first, and makes the same of it."""
    if len(call.inputs) == len(port_call.inputs) and alike(call.inputs, port_call.inputs, EXACT):
        return True
    return all(alike_in_any_order(*pair, EXACT) for pair in zip(_values(call), _values(port_call)))


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
        return [f"its value is one of the reference's, but not the one that belongs there, at {step.statement}"]
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
