"""A map between two models confirmed by values: where every layer receives the same on both sides, it is right.

Layers of one type and shape may stand in another order on the port (branches). Which is which shows in what they
receive and, of those that receive the same, in what their outputs do further on: each choice is followed until values
part, then the last one is taken back. Where two choices explain all values, none is the right one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from portproof.backends.model import BackendModel, Module, Run
from portproof.backends.trace import Call

SAME = 1e-4  # of the largest value: far above rounding in float64, far below what another layer would give
TRIES = 60  # runs of the port without getting any further, after which the search ends


def alike(one: Sequence[np.ndarray], other: Sequence[np.ndarray], tolerance: float = SAME) -> bool:
    """Whether both hold the same: floats up to `tolerance` of each array's largest, whole numbers as far as both go."""
    floats = [[array for array in side if array.dtype.kind == "f"] for side in (one, other)]
    whole = [[array for array in side if array.dtype.kind != "f"] for side in (one, other)]
    with np.errstate(invalid="ignore"):  # infinity less infinity is no agreement
        return (
            len(floats[0]) == len(floats[1])
            and all(np.array_equal(a, b) for a, b in zip(*whole, strict=False))
            and all(
                a.shape == b.shape and np.abs(a - b).max(initial=0) <= tolerance * np.abs(a).max(initial=0)
                for a, b in zip(*floats, strict=True)
            )
        )


@dataclass
class Found:
    """A map, and how far values agree under it."""

    modules: dict[str, str]
    reached: int  # how many calls receive the same before the first that does not, the output counted as one more
    total: int
    options: list[tuple[dict[str, str], int]] = field(default_factory=list)  # other choices, and where they were met
    hint: str = ""

    @property
    def extent(self) -> str:
        """How far values confirm the map, in words."""
        if self.reached == self.total:
            return "everywhere"
        return f"up to layer {self.reached} of {self.total - 1}{self.hint}"


def _receives(run: Run, name: str, call: Call) -> bool:
    """Whether the port's module `name` receives in `run` what `call` did, in the same call of the two."""
    mates = (mate for mate in run.record.calls.values() if (mate.name, mate.number) == (name, call.number))
    return any(alike(call.inputs, mate.inputs) for mate in mates)


def _swapped(modules: dict[str, str], one: str, other: str) -> dict[str, str]:
    return modules | {one: modules[other], other: modules[one]}


class Trial:
    """Maps tried by loading weights through them and sending values through both models, in eval mode."""

    def __init__(
        self,
        ref: BackendModel,
        port: BackendModel,
        inputs: Sequence[np.ndarray],
        signature: Callable[[Module], Any],
        tensors: Callable[[Mapping[str, str]], Mapping[str, str]],
    ) -> None:
        """`signature` is what modules that may change places share; `tensors` gives a module map's state_dict keys."""
        self.ref, self.port, self.inputs, self.signature, self.tensors = ref, port, inputs, signature, tensors
        self.arrays = ref.arrays()
        self.ref_run = ref.run(inputs, "float64", train=False, calls=True)
        self.port_run = port.run(inputs, "float64", train=False, calls=True)

    def _run(self, modules: Mapping[str, str]) -> Run:
        self.port.load({other: self.arrays[one] for one, other in self.tensors(modules).items()})
        return self.port.run(self.inputs, "float64", train=False, calls=True)

    def _follow(self, modules: dict[str, str], start: int, fixed: set[str]) -> Found:
        """Settle each call from the `start`-th on by what the layers receive; all before it is settled."""
        calls = [call for call in self.ref_run.record.calls.values() if call.name in modules]
        calls.sort(key=lambda call: call.start)
        run, found = self._run(modules), Found(modules, start, len(calls) + 1)
        settled = {call.name for call in calls[:start]} | fixed
        for i, call in enumerate(calls[start:], start):
            others = [] if call.name in settled else self._others(call, found.modules, settled, run)
            if not _receives(run, found.modules[call.name], call):
                if not others:
                    return found
                found.modules = _swapped(found.modules, call.name, others.pop(0))
                run = self._run(found.modules)
            found.options += [(_swapped(found.modules, call.name, other), i + 1) for other in others]
            found.reached = i + 1
            settled.add(call.name)
        found.reached += alike(self.ref_run.output, run.output)
        return found

    def _others(self, call: Call, modules: Mapping[str, str], settled: set[str], run: Run) -> list[str]:
        """The modules that the called one may change places with: of its signature, and fed alike."""
        sign = self.signature(self.ref.modules[call.name])
        free = (name for name in modules if name != call.name and name not in settled)
        same = (name for name in free if self.signature(self.ref.modules[name]) == sign)
        return [name for name in same if _receives(run, modules[name], call)]

    def _search(self, modules: dict[str, str], start: int, fixed: set[str]) -> Found:
        """The map under which values agree furthest, the latest choices taken back first."""
        stack, best, tries = [(modules, start)], None, 0
        while stack and tries < TRIES:
            found = self._follow(*stack.pop(), fixed)
            stack += found.options
            tries += 1
            if best is None or found.reached > best.reached:
                best, tries = found, 0
            if best.reached == best.total:
                best.options = stack
                break
        return best

    def resolve(self, modules: dict[str, str], fixed: set[str]) -> Found:
        """The map, from the proposal `modules`, under which values agree furthest; `fixed` stay as they are."""
        found = self._search(modules, 0, fixed)
        if found.reached < found.total and fixed:
            free = self._search(modules, 0, set())
            moved = [name for name in fixed if free.modules[name] != modules[name]]
            if free.reached == free.total and moved:
                pairs = ", ".join(f"{name} for the port's {free.modules[name]}" for name in sorted(moved))
                found.hint = f" (they would agree everywhere with {pairs})"
        return found

    def symmetric(self, found: Found, fixed: set[str]) -> str:
        """Two layers that could change places without any value telling; "" if there are none, or values part."""
        for modules, start in found.options if found.reached == found.total else ():
            other = self._search(modules, start, fixed)
            if other.reached == other.total:
                one, two = [name for name in modules if modules[name] != found.modules[name]][:2]
                mates = found.modules[one], found.modules[two]
                return (
                    f"{one} and {two} may be the port's {mates[0]} and {mates[1]}, or the other way round:"
                    " values are the same; say which in a map"
                )
        return ""
