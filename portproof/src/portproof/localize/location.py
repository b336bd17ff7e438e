"""The place where a port departs from its reference, and how it is printed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from portproof.backends.model import BackendModel
from portproof.compare import Row


@dataclass(frozen=True)
class Location:
    name: str  # the reference's; "" is the model
    type: str
    phase: str  # "structure", "weights", "forward", "buffers" or "backward"
    port_name: str = ""
    port_type: str = ""
    row: Row | None = None  # the comparison that proves it
    proof: list[str] = field(default_factory=list)
    diagnosis: list[str] = field(default_factory=list)  # causes, in words
    tree: list[str] = field(default_factory=list)
    also: list[Location] = field(default_factory=list)  # further faults
    built_differently: Mapping[str, str] = field(default_factory=dict)  # {label: in what}

    def lines(self) -> list[str]:
        port = f", the port's {self.port_name or 'model'} ({self.port_type})" if self.port_type else ""
        lines = [f"located: {self.name or 'the model itself'} ({self.type}){port}: {self.phase}"]
        lines += [f"  {line}" for line in self.proof]
        lines += [f"  cause, tested: {text}" for text in self.diagnosis]
        lines += [f"  {line}" for line in self.tree]
        return lines + [f"also at fault by itself: {line}" for line in _by_kind(self.also)]

    def summary(self) -> list[str]:
        """One line per kind of fault, with its first module."""
        return _by_kind([self, *self.also])


def _by_kind(locations: Iterable[Location]) -> list[str]:
    groups = defaultdict(list)
    for location in locations:
        groups[location.type, location.phase, tuple(location.diagnosis)].append(location.name)
    lines = []
    for (layer, phase, diagnosis), names in groups.items():
        more = f" and {len(names) - 1} more of that kind" if len(names) > 1 else ""
        why = f": {'; '.join(diagnosis)}" if diagnosis else ""
        lines.append(f"{names[0]} ({layer}){more}: {phase}{why}")
    return lines


def module_tree(model: BackendModel, marked: str) -> list[str]:
    """Its ancestors with all their children, the rest folded."""
    parts = marked.split(".")
    ancestors = {".".join(parts[:n]) for n in range(len(parts))}  # "" is the model itself
    lines = []
    for name, module in model.modules.items():
        parent, _, last = name.rpartition(".")
        if name and parent not in ancestors:
            continue
        depth = name.count(".") + 1 if name else 0
        mark = "   <--- HERE" if name == marked else ""
        lines.append(f"{'  ' * depth}{last or 'model'} ({module.type}){mark}")
    return lines
