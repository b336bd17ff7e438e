"""Where a graph departs from the reference: the first module whose output it lacks, then those behind it.

What is at fault is given the reference's own values, so that all behind it runs on right inputs, judged by itself.
Where float32 rounded constants, what matched is given them, too: a tensor is moved by its own layer's constants alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from portproof.arrays import largest, largest_difference
from portproof.backends.trace import OUTPUT
from portproof.exported.folding import measured
from portproof.exported.graph import Graph, Values
from portproof.exported.match import Layout, Match, Matcher, fitting, likeness
from portproof.exported.reference import Reference
from portproof.exported.weights import NEAR

MOST_TRIED = 12  # tensors that may be the output of the module at fault
MOST_FAULTS = 8
ALIKE = 0.5  # a tensor that is more alike than this is the module's output, with a fault


@dataclass
class Fault:
    """A call whose output the graph does not have."""

    call: str
    wanted: np.ndarray
    atol: float
    tensor: str = ""  # that has other values; "" if none was found
    values: np.ndarray | None = None  # the tensor's, in the reference's layout
    layout: Layout | None = None
    alike: float = 0.0  # how much these are what they should be, at most 1
    words: str = ""  # more about the place


@dataclass(frozen=True)
class Found:
    """A run of the graph: what it matched, and its outputs."""

    matches: Mapping[int, Match]  # by the id of the reference's array
    outputs: Mapping[str, np.ndarray]
    moved: Mapping[str, float]  # {tensor: how far the constants that float32 rounded may have moved it}
    is_right: bool  # the outputs are the reference's


@dataclass
class Search:
    graph: Graph
    ref: Reference
    given: Mapping[str, np.ndarray]
    rounded: Sequence[str] = ()  # constants that float32 may have rounded, see folding.py
    lost: Collection[str] = ()  # modules of a folded graph whose tensors it holds neither as they are nor folded
    replaced: dict[str, np.ndarray] = field(default_factory=dict)
    passed_on: dict[str, np.ndarray] = field(default_factory=dict)  # see `judge_alone`
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.moved: dict[str, float] = {}  # as in `Found`, of the last run that measured it
        self.first = self.run({}, measured(self.graph, self.given, self.rounded, self.moved))
        self.matches: dict[int, Match] = dict(self.first.matches)

    @cached_property
    def wanted(self) -> dict[int, tuple[np.ndarray, float]]:
        """{id: (array, limit)} of what calls gave and received; what code between modules gave has the widest share."""
        found = {id(each.array): (each.array, each.atol) for each in self.ref.outputs}
        shares = [each.atol / (largest(each.array) or 1.0) for each in self.ref.outputs]
        for call in self.ref.calls.values():
            for array in call.inputs:
                if array.dtype.kind == "f" and array.size:
                    found.setdefault(id(array), (array, max(shares, default=0.0) * largest(array)))
        return found

    def run(self, replaced: Values, results: Iterable[tuple[str, np.ndarray]] | None = None) -> Found:
        """`results`: of a run of the graph that gives more than that."""
        matcher = Matcher(self.wanted, self.moved)
        for name, array in {**self.given, **self.graph.constants, **replaced}.items():
            matcher.see(name, array)
        outputs = {name: replaced[name] for name in self.graph.outputs if name in replaced}
        for name, array in results or self.graph.run(self.given, replaced):
            matcher.see(name, array)
            if name in self.graph.outputs:
                outputs[name] = array
        return Found(matcher.found, outputs, self.moved, self._is_right(outputs))

    def _is_right(self, outputs: Mapping[str, np.ndarray]) -> bool:
        ref = self.ref.run.output
        if len(ref) != len(self.graph.outputs):
            return False
        for name, array, atol in zip(self.graph.outputs, ref, self.ref.atol_of_outputs):
            own = outputs.get(name)
            if own is None or own.shape != array.shape:
                return False
            if not largest_difference(own, array) <= atol + self.moved.get(name, 0.0):
                return False
        return True

    def is_matched(self, call: str) -> bool:
        outputs = [each for each in self.ref.outputs if each.call == call]
        return bool(outputs) and all(id(each.array) in self.matches for each in outputs)

    def excused(self) -> set[str]:
        """Calls whose outputs are in the graph, or that one proves that is: it encloses or follows from them."""
        good = {label for label in self.ref.calls if self.is_matched(label)}
        found = good | {fault.call for fault in self.faults}
        for label in sorted(self.ref.calls, key=lambda label: -self.ref.calls[label].start):
            if self.ref.calls[label].name in self.lost:
                continue
            if good.intersection(self.ref.enclosing(label)) or found.intersection(self.ref.users[label]):
                found.add(label)
        return found

    def locate(self) -> None:
        """Find the `faults`."""
        now = self.first
        while len(self.faults) < MOST_FAULTS:
            excused = self.excused()
            lost = (each for each in self.ref.outputs if self.ref.calls[each.call].name in self.lost)
            among = lost if now.is_right else self.ref.outputs
            suspect = next((each for each in among if each.call not in excused), None)
            if suspect is None and now.is_right:
                return
            if suspect is None:
                self._blame_the_model(now)
                return
            fault = self._fault(suspect.call)
            self.faults.append(fault)
            found = self._corrected(fault)
            if found is None:
                return
            self.matches |= {key: match for key, match in found.matches.items() if key not in self.matches}
            now = found

    def judge_alone(self) -> None:
        """Compute what matched, or nearly did, of the reference's own values; what then is off is a fault, too."""
        if not self.rounded:
            return
        certain = self._certain({**self.matches, **self._nearly()})
        self.passed_on = {each.tensor: each.layout.written(self.wanted[key][0]) for key, each in certain.items()}
        self.passed_on |= self.replaced
        self.moved = {}
        keys, outputs, off = defaultdict(list), {}, dict[int, np.ndarray]()
        for key, match in certain.items():
            if match.tensor not in self.replaced:
                keys[match.tensor].append(key)
        for name, array in measured(self.graph, self.given, self.rounded, self.moved, self.passed_on):
            for key in keys.get(name, ()):
                wanted, atol = self.wanted[key]
                own, limit = certain[key].layout.read(array), atol + self.moved.get(name, 0.0)
                difference = largest_difference(own, wanted)
                if difference > limit:
                    off[key], difference = own, 0.0  # what is behind it gets the reference's
                self.matches[key] = replace(certain[key], difference=difference, atol=limit)
            if name in self.graph.outputs:
                outputs[name] = array
        alone = Found(self.matches, outputs, self.moved, self._is_right(outputs))
        if not self.faults:
            self.first = alone
        self.faults += self._faults_of(off)
        if not self.faults and not alone.is_right:
            self._blame_the_model(alone)

    def _faults_of(self, off: Mapping[int, np.ndarray]) -> Iterable[Fault]:
        """One for each tensor: at the call that gives it, else in the code that gives it to a call."""
        found: dict[str, Fault] = {}
        for each in self.ref.outputs:
            if id(each.array) in off:
                found.setdefault(self.matches[id(each.array)].tensor, Fault(each.call, each.array, each.atol))
        for label, call in self.ref.calls.items():
            for array in call.inputs:
                if id(array) in off:
                    found.setdefault(self.matches[id(array)].tensor, self._before(label, array))
        for tensor, fault in found.items():
            key = id(fault.wanted)
            fault.tensor, fault.values, fault.layout = tensor, off[key], self.matches[key].layout
        return found.values()

    def _nearly(self) -> Mapping[int, Match]:
        """Of arrays that did not match, the tensors that are nearly they."""
        wanted = {key: (array, NEAR * largest(array)) for key, (array, _) in self.wanted.items()}
        matcher = Matcher({key: each for key, each in wanted.items() if key not in self.matches})
        for name, array in self.graph.run(self.given, self.replaced):
            matcher.see(name, array)
        return matcher.found

    def _certain(self, matches: Mapping[int, Match]) -> dict[int, Match]:
        """Those of whose array the reference has no other like it, within the match's limit."""
        ends = {key: (array.min(), array.max(), array.size) for key, (array, _) in self.wanted.items()}
        found = {}
        for key, match in matches.items():
            array, atol = self.wanted[key]
            alike = (
                fitting(self.wanted[other][0], array, match.atol)
                for other, end in ends.items()
                if end[2] == array.size and max(abs(end[0] - ends[key][0]), abs(end[1] - ends[key][1])) <= match.atol
            )
            if all(fit is None or fit[0] <= atol for fit in alike):
                found[key] = match
        return found

    def _blame_the_model(self, now: Found) -> None:
        """No module is at fault, and an output differs."""
        for name, array, atol in zip(self.graph.outputs, self.ref.run.output, self.ref.atol_of_outputs):
            own = now.outputs.get(name)
            if (
                own is not None
                and own.size == array.size
                and largest_difference(own.reshape(array.shape), array) > atol
            ):
                own = own.reshape(array.shape)
                self.faults.append(Fault(OUTPUT, array, atol, name, own, words="behind its last module"))
                return

    def _fault(self, label: str) -> Fault:
        """At the call, or in the code of the one around it if the graph lacks what that gives to the call."""
        call = self.ref.calls[label]
        makers = {id(array) for each in self.ref.calls.values() for array in each.outputs}
        for array in call.inputs:
            if id(array) in self.wanted and id(array) not in self.matches and id(array) not in makers:
                return self._before(label, array)
        output = next(each for each in self.ref.outputs if each.call == label and id(each.array) not in self.matches)
        return Fault(label, output.array, output.atol)

    def _before(self, label: str, array: np.ndarray) -> Fault:
        """In the code that gives `array` to the call."""
        words = f"in its own code, before {label}"
        return Fault(self.ref.calls[label].inside, array, self.wanted[id(array)][1], words=words)

    def _corrected(self, fault: Fault) -> Found | None:
        """The run with the reference's values in place of the fault's, if more is right then; None if nothing is.

        Where folding left the module without an output of its own, those that follow from it are tried.
        """
        tried = [fault]
        for label in self._followers(fault.call) if not fault.words else ():
            tried += [Fault(label, each.array, each.atol) for each in self.ref.outputs if each.call == label]
        for each in tried:
            for alike, tensor, layout, values in self._candidates(fault.call, each.wanted):
                if not each.tensor:
                    each.tensor, each.values, each.layout, each.alike = tensor, values, layout, alike
                found = self.run({**self.replaced, tensor: layout.written(each.wanted)})
                if found.is_right or any(key not in self.matches and key != id(each.wanted) for key in found.matches):
                    each.tensor, each.values = tensor, values
                    self.replaced[tensor] = layout.written(each.wanted)
                    self._settle(fault, each)
                    return found
        return None

    def _settle(self, fault: Fault, corrected: Fault) -> None:
        """Only the values of `corrected`, which follows from the fault, made what is behind it right."""
        if corrected is fault:
            return
        has_own = not self.moved and fault.alike > ALIKE
        if fault.layout and has_own:  # the fault's own values alone did not: here is another
            self.faults.append(corrected)
            self.replaced[fault.tensor] = fault.layout.written(fault.wanted)
        else:
            fault.wanted, fault.atol = corrected.wanted, corrected.atol
            fault.tensor, fault.values = corrected.tensor, corrected.values
            fault.words = f"in the graph one with {corrected.call}"

    def _followers(self, label: str) -> Iterator[str]:
        """Calls that get its output, those that get theirs, then those around it."""
        for _ in range(3):
            users = [each for each in self.ref.users.get(label, ()) if not self.is_matched(each)]
            if len(users) != 1:
                break
            label = users[0]
            yield label
        yield from self.ref.enclosing(label) if label in self.ref.calls and label != OUTPUT else ()

    def _candidates(self, label: str, wanted: np.ndarray) -> list[tuple[float, str, Layout, np.ndarray]]:
        """(how alike, tensor, layout, values in that) of those behind the call's inputs, the most alike first."""
        inputs = self.ref.calls[label].inputs if label in self.ref.calls else []
        known = {self.matches[id(array)].tensor for array in inputs if id(array) in self.matches}
        behind = self.graph.behind(known) - known if known else None
        found = []
        for name, values in self.graph.run(self.given, self.replaced):
            if values.size == wanted.size and (behind is None or name in behind):
                alike = likeness(values, wanted)
                if alike:
                    found.append((alike[0], name, alike[1], alike[1].read(values)))
        return sorted(found, key=lambda each: -each[0])[:MOST_TRIED]
