"""A map between two models confirmed by values: where every layer receives the same on both sides, it is right.

Layers of one type and shape may stand in another order on the port (branches). Which is which shows in what they
receive and, of those that receive the same, in what their outputs do further on: each choice is followed until values
part, then the last one is taken back. Where two choices explain all values, none is the right one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from portproof.backends.model import BackendModel, Run
from portproof.backends.trace import ModuleCall
from portproof.mapping.pairing import exchanges, signature, tensor_pairs

SAME = 1e-4  # of the largest value: far above rounding in float64, far below what another layer would give
TRIES = 60  # runs of the port without getting any further, after which the search ends


def alike(ref: Sequence[np.ndarray], port: Sequence[np.ndarray], tolerance: float = SAME) -> bool:
    """Whether both hold the same: floats up to `tolerance` of each array's largest, whole numbers as far as both go."""
    ref_floats, port_floats = ([a for a in arrays if a.dtype.kind in "fc"] for arrays in (ref, port))
    ref_whole, port_whole = ([a for a in arrays if a.dtype.kind not in "fc"] for arrays in (ref, port))
    return (
        len(ref_floats) == len(port_floats)
        and all(np.array_equal(r, p) for r, p in zip(ref_whole, port_whole, strict=False))
        and all(_close(r, p, tolerance) for r, p in zip(ref_floats, port_floats, strict=True))
    )


def _close(ref: np.ndarray, port: np.ndarray, tolerance: float) -> bool:
    if ref.size != port.size:
        return False
    ref, port = ref.ravel(), port.ravel()  # (B, H, W, C) on one side may be (B, H * W, C) on the other
    with np.errstate(invalid="ignore"):  # infinity less infinity is no agreement
        return np.abs(ref - port).max(initial=0) <= tolerance * np.abs(ref).max(initial=0)


@dataclass
class FoundMap:
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


def _receives(port_run: Run, port_name: str, call: ModuleCall) -> bool:
    """Whether the port's module received in `port_run` what `call` did, in any of its calls."""
    calls = (port_call for port_call in port_run.trace.calls.values() if port_call.name == port_name)
    return any(alike(call.inputs, port_call.inputs) for port_call in calls)


def _swapped(modules: dict[str, str], name: str, other: str) -> dict[str, str]:
    return modules | {name: modules[other], other: modules[name]}


class MapSearch:
    """Maps tried by loading weights through them and sending values through both models, in eval mode."""

    def __init__(self, ref: BackendModel, port: BackendModel, inputs: Sequence[np.ndarray]) -> None:
        self.ref, self.port, self.inputs = ref, port, inputs
        self.exchanged: dict[str, str] = {}  # {reference's key: port's key} that differ from those proposed
        self.arrays = ref.arrays()
        self.ref_run = ref.run(inputs, "float64", train=False, calls=True)
        self.port_run = port.run(inputs, "float64", train=False, calls=True)

    def tensors(self, modules: Mapping[str, str]) -> dict[str, str]:
        """{reference's key: port's key} under a map of modules."""
        return tensor_pairs(self.ref, self.port, modules)[0] | self.exchanged

    def resolve(self, modules: dict[str, str], fixed: set[str]) -> FoundMap:
        """The map, from the proposal `modules`, under which values agree furthest; `fixed` stay as they are."""
        found = self._search(modules, 0, fixed)
        if found.reached < found.total and fixed:
            free = self._search(modules, 0, set())
            moved = [name for name in fixed if free.modules[name] != modules[name]]
            if free.reached == free.total and moved:
                pairs = ", ".join(f"{name} for the port's {free.modules[name]}" for name in sorted(moved))
                found.hint = f" (they would agree everywhere with {pairs})"
        return found

    def exchange_tensors(self, found: FoundMap, fixed: set[str]) -> FoundMap:
        """`found`, or what agrees further with tensors exchanged that no name tells apart."""
        if found.reached == found.total:
            return found
        for exchange in exchanges(self.ref, self.port, found.modules):
            before = self.exchanged
            self.exchanged = before | exchange
            further = self.resolve(found.modules, fixed)
            if further.reached > found.reached:
                found = further
            else:
                self.exchanged = before
        return found

    def ambiguity(self, found: FoundMap, fixed: set[str]) -> str:
        """Two layers that could change places without any value telling; "" if there are none, or values part."""
        for modules, start in found.options if found.reached == found.total else ():
            other = self._search(modules, start, fixed)
            if other.reached == other.total:
                first, second = [name for name in modules if modules[name] != found.modules[name]][:2]
                return (
                    f"{first} and {second} may be the port's {found.modules[first]} and {found.modules[second]},"
                    " or the other way round: values are the same; say which in a map"
                )
        return ""

    def _search(self, modules: dict[str, str], start: int, fixed: set[str]) -> FoundMap:
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

    def _follow(self, modules: dict[str, str], start: int, fixed: set[str]) -> FoundMap:
        """Settle each call from the `start`-th on by what the layers receive; all before it is settled."""
        calls = [call for call in self.ref_run.trace.calls.values() if call.name in modules]
        calls.sort(key=lambda call: call.start)
        port_run, found = self._run(modules), FoundMap(modules, start, len(calls) + 1)
        settled = {call.name for call in calls[:start]} | fixed
        for place, call in enumerate(calls[start:], start):
            swaps = [] if call.name in settled else self._possible_swaps(call, found.modules, settled, port_run)
            if not _receives(port_run, found.modules[call.name], call):
                if not swaps:
                    return found
                found.modules = _swapped(found.modules, call.name, swaps.pop(0))
                port_run = self._run(found.modules)
            found.options += [(_swapped(found.modules, call.name, other), place + 1) for other in swaps]
            found.reached = place + 1
            settled.add(call.name)
        found.reached += alike(self.ref_run.output, port_run.output)
        return found

    def _run(self, modules: Mapping[str, str]) -> Run:
        self.port.load({port_key: self.arrays[key] for key, port_key in self.tensors(modules).items()})
        return self.port.run(self.inputs, "float64", train=False, calls=True)

    def _possible_swaps(
        self, call: ModuleCall, modules: Mapping[str, str], settled: set[str], port_run: Run
    ) -> list[str]:
        """The modules that the called one may change places with: of its signature, and fed alike on the port."""
        wanted = signature(self.ref.modules[call.name])
        return [
            name
            for name, port_name in modules.items()
            if name != call.name and name not in settled
            if signature(self.ref.modules[name]) == wanted and _receives(port_run, port_name, call)
        ]
