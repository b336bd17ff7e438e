"""Where a port departs from its reference: the first module that does so on the reference's own inputs.

A difference in a network spreads to everything behind it (and, in the backward pass, to everything before it). So each
module is taken alone: both sides' get what the reference's received, and what they give is compared. A module that
differs then is at fault itself, one that does not was only fed wrong. Layers come before the blocks that hold them; a
block at fault whose layers are all right has its fault in its own code, between them.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from portproof.backends.model import BackendModel, Run
from portproof.backends.trace import Call, module_of
from portproof.compare import FAIL, Item, Items, Row, compare, tensor_item
from portproof.compare.activations import off_kinks
from portproof.compare.tolerances import UNITS, kernel_limits, largest, noise_floors, semantic_limits, with_floors
from portproof.localize.diagnosis import Alone, tested_causes
from portproof.mapping.names import NameMap, port_module


@dataclass(frozen=True)
class Location:
    """The place where a port departs from its reference."""

    name: str  # the reference's module; "" is the model itself
    type: str
    phase: str  # "structure", "weights", "forward", "buffers" or "backward"
    port_name: str = ""
    port_type: str = ""
    row: Row | None = None  # the comparison that proves it, of this module alone
    proof: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)  # those that were tested and found to explain it
    tree: list[str] = field(default_factory=list)
    also: list["Location"] = field(default_factory=list)  # further modules that are at fault themselves

    def lines(self) -> list[str]:
        """As it is printed: the place, the proof, the causes, the module tree with the place marked."""
        port = f", the port's {self.port_name or 'model'} ({self.port_type})" if self.port_type else ""
        lines = [f"located: {self.name or 'the model itself'} ({self.type}){port}: {self.phase}"]
        lines += [f"  {line}" for line in self.proof]
        lines += [f"  cause, tested: {cause}" for cause in self.causes]
        lines += [f"  {line}" for line in self.tree]
        return lines + [f"also at fault by itself: {line}" for line in _by_kind(self.also)]

    def summary(self) -> list[str]:
        """One line for each kind of fault: its first module, how many more, in what they differ, the causes."""
        return _by_kind([self, *self.also])


def _by_kind(locations: list[Location]) -> list[str]:
    """One line for each kind of fault, with the first module that has it."""
    groups = defaultdict(list)
    for one in locations:
        groups[one.type, one.phase, tuple(one.causes)].append(one.name)
    return [
        f"{names[0]} ({kind})"
        + (f" and {len(names) - 1} more of that kind" if len(names) > 1 else "")
        + f": {phase}{': ' if causes else ''}{'; '.join(causes)}"
        for (kind, phase, causes), names in groups.items()
    ]


def _items(run: Run, module: str, prefix: str, keys: dict[str, str]) -> dict[Item, np.ndarray]:
    """What the reference's `module` alone, or its counterpart, gave.

    `keys` are {its side's state_dict key: the reference's}, of which this module's begin with `prefix`.
    """
    inputs = enumerate(run.input_gradients)
    return {
        **{Item(f"output {i}", "output", module): array for i, array in enumerate(run.output)},
        **{tensor_item(keys[prefix + k], "buffer"): a for k, a in run.buffers.items() if prefix + k in keys},
        **{Item(f"input {i}", "gradient", module): array for i, array in inputs if array is not None},
        **{tensor_item(keys[prefix + k], "gradient"): a for k, a in run.gradients.items() if prefix + k in keys},
    }


@dataclass(frozen=True)
class Trial:
    """What one module alone gave on both sides, compared."""

    rows: list[Row]
    ref: Items
    port: Items
    run: Run  # the port's


class Bench:
    """Runs one module alone on both sides."""

    def __init__(self, ref: BackendModel, port: BackendModel, names: NameMap, train: bool) -> None:
        self.ref, self.port, self.names, self.train = ref, port, names, train
        self.keys = {key: key for key in names.tensors}, {other: one for one, other in names.tensors.items()}

    def ref_items(self, call: Call, dtype: str, backward: bool, change=None) -> dict[Item, np.ndarray]:
        """What the reference's module gives; with `change` what it gives then, see TorchModel.run_changed."""
        run_module = partial(self.ref.run_changed, change) if change else self.ref.run_module
        run = run_module(call.name, call, dtype, self.train, backward)
        return _items(run, call.name, f"{call.name}." if call.name else "", self.keys[0])

    def alone(self, label: str, call: Call, dtype: str, backward: bool) -> "Trial":
        """The module alone, in "float64" or "float32"; in float32 no input of an activation lies at a kink."""
        if dtype == "float32" and call.args and isinstance(call.args[0], np.ndarray):
            call = replace(call, args=(off_kinks(call.args[0], self.ref.modules[call.name].type), *call.args[1:]))
        fp64_ref, fp32_ref = (self.ref_items(call, d, backward) for d in ("float64", "float32"))
        name = port_module(self.names, label)
        run = self.port.run_module(name, call, dtype, self.train, backward)
        port = _items(run, call.name, f"{name}." if name else "", self.keys[1])
        if run.record.error:
            row = Row(
                Item("output 0", "output", call.name), FAIL, reason=f"the port's module raised {run.record.error}"
            )
            return Trial([row], fp64_ref, port, run)
        is_exact = dtype == "float64"
        reference = fp64_ref if is_exact else fp32_ref
        limits = (semantic_limits if is_exact else kernel_limits)(fp64_ref, fp32_ref)
        floors = noise_floors(fp64_ref, UNITS[dtype], {call.name: call.scale})
        limits, zeros = with_floors(limits, floors, fp64_ref)
        zeros |= {item for item, array in fp64_ref.items() if not largest(array)}
        # What is a parameter there and frozen here looks like a buffer; that it gets no gradient is the finding.
        port = {item: array for item, array in port.items() if item in reference or item.kind != "buffer"}
        return Trial(compare(reference, port, limits, zeros=zeros).rows, reference, port, run)


def forward_order(calls: dict[str, Call], names: NameMap) -> list[str]:
    """As they end: a block after its layers."""
    return [label for label in calls if label in names.calls]


def backward_order(calls: dict[str, Call], names: NameMap) -> list[str]:
    """The last begun first: a block after its layers again."""
    return sorted(forward_order(calls, names), key=lambda label: -calls[label].start)


def layers_alone(bench: Bench, calls: dict[str, Call], dtype: str) -> Iterator[tuple[str, list[Row]]]:
    """(label, rows) of every layer alone in the backward pass, a layer being a module without children."""
    for label in backward_order(calls, bench.names):
        if bench.ref.modules[calls[label].name].is_leaf and any_upstream(calls[label]):
            rows = bench.alone(label, calls[label], dtype, backward=True).rows
            yield label, [row for row in rows if row.item.kind == "gradient"]


def any_upstream(call: Call) -> bool:
    """Whether a gradient came back to what the call returned."""
    return any(gradient is not None for gradient in call.upstream)


def _in_mode(
    bench: Bench, inputs: Sequence[np.ndarray], cotangent: Sequence[np.ndarray] | None, dtype: str
) -> Iterator[Location]:
    """Every module that is at fault itself, forward first; of nested ones the innermost."""
    backward = cotangent is not None
    calls = bench.ref.run(inputs, "float64", bench.train, cotangent, calls=True).record.calls
    guilty: list[str] = []
    suspects: dict[str, Trial] = {}  # whose gradients differ, though not what they give

    def is_known(call: Call) -> bool:
        """Whether it, or a module inside it, has been found at fault."""
        prefix = f"{call.name}." if call.name else ""
        return any(name == call.name or name.startswith(prefix) for name in guilty)

    for label in forward_order(calls, bench.names):
        if not is_known(calls[label]):
            # In float32 only layers: within a block, a branch that flips by rounding moves gradients by a percent.
            is_judged = dtype == "float64" or bench.ref.modules[calls[label].name].is_leaf
            trial = bench.alone(label, calls[label], dtype, backward and is_judged and any_upstream(calls[label]))
            bad = [row for row in trial.rows if row.status == FAIL]
            if any(row.item.kind != "gradient" for row in bad):
                guilty.append(calls[label].name)
                yield _location(bench, label, calls[label], bad, trial, dtype, False)
            elif bad:
                suspects[label] = replace(trial, rows=bad)
    for label in backward_order(calls, bench.names):
        if label in suspects and not is_known(calls[label]):
            guilty.append(calls[label].name)
            yield _location(bench, label, calls[label], suspects[label].rows, suspects[label], dtype, True)


def locate(
    ref: BackendModel,
    port: BackendModel,
    names: NameMap,
    inputs: Sequence[np.ndarray],
    *,
    modes: Sequence[bool] = (False, True),
    cotangent: Sequence[np.ndarray] | None = None,
    dtype: str = "float64",
) -> Location | None:
    """The first module that is at fault itself; None: none is. Further ones are in the location's `also`.

    Looked for in each of `modes` (True: train), forward, then backward from `cotangent` (an array an output) if that is
    given, in the precision `dtype` in which a difference was seen. What does not fit by structure comes first, then
    tensors of other values, since without them nothing can be compared.
    """
    if names.problems:
        return _structural(ref, port, names)
    location = _unequal_weights(ref, port, names)
    if location:
        return location
    found: list[Location] = []
    for train in modes:
        bench = Bench(ref, port, names, train)
        known = {(location.name, location.phase) for location in found}
        found += [one for one in _in_mode(bench, inputs, cotangent, dtype) if (one.name, one.phase) not in known]
    return replace(found[0], also=found[1:]) if found else None


def _unequal_weights(ref: BackendModel, port: BackendModel, names: NameMap) -> Location | None:
    """The first tensor that is not the same on both sides."""
    ones, others = ref.arrays(), port.arrays()
    for key, port_key in names.tensors.items():
        one, other = ones[key], others[port_key]
        if not np.array_equal(one, other):
            name = key.rpartition(".")[0]
            module, mate = ref.modules[name], port.modules[names.modules[name]]
            item = tensor_item(key, "weights")
            row = compare({item: one}, {item: other.astype(one.dtype)}, {item: 0.0}).rows[0]
            causes = [text for text, array in _as_loaded(ones, key) if np.array_equal(array, other)]
            proof = [f"its {key.rpartition('.')[2]} is not the reference's: {key}", *_numbers(row)]
            return Location(name, module.type, "weights", mate.name, mate.type, row, proof, causes[:3], tree(ref, name))
    return None


def _as_loaded(arrays: dict[str, np.ndarray], key: str) -> Iterator[tuple[str, np.ndarray]]:
    """(cause, what the tensor would be then) for the usual mistakes of loading."""
    array = arrays[key]
    yield "it holds zeros: it was not loaded", np.zeros_like(array)
    yield "it holds ones: it was not loaded", np.ones_like(array)
    if array.ndim == 2:
        yield "it is not transposed (Paddle keeps a linear weight as in x out)", np.ascontiguousarray(array.T)
    if array.ndim == 4:
        yield "its kernels are turned by 180 degrees", array[:, :, ::-1, ::-1]
        yield "height and width of its kernels are exchanged", array.swapaxes(2, 3)
        yield "its input and output channels are exchanged", array.swapaxes(0, 1)
    if array.dtype.kind == "f":
        yield "it went through float16", array.astype(np.float16).astype(array.dtype)
    for other, value in arrays.items():
        if other != key and value.shape == array.shape:
            yield f"it holds the reference's {other}", value


def _location(
    bench: Bench, label: str, call: Call, bad: list[Row], trial: Trial, dtype: str, backward: bool
) -> Location:
    bad = [row for row in bad if (row.item.kind == "gradient") == backward]
    ref, port = bench.ref.modules[call.name], bench.port.modules[port_module(bench.names, label)]
    phase = "backward" if backward else "forward" if bad[0].item.kind == "output" else "buffers"
    where = f"{' and upstream gradients' * backward}, {'train' if bench.train else 'eval'} mode, {dtype}"
    proof = [f"alone, on the reference's own inputs{where}: {bad[0].name} differs", *_numbers(bad[0])]
    proof += [] if bad[0].reason or backward else _inside(bench, label, call, trial.run)
    alone = Alone(
        bench.ref.module(call.name),
        trial.ref,
        trial.port,
        [row.item for row in bad],
        call.inputs,
        _inner(bench, call),
        lambda change: bench.ref_items(call, dtype, backward, change),
    )
    causes = [] if trial.run.record.error else tested_causes(alone)
    return Location(call.name, ref.type, phase, port.name, port.type, bad[0], proof, causes, tree(bench.ref, call.name))


def _inner(bench: Bench, call: Call) -> dict[str, np.ndarray]:
    """What the modules inside a block give, on the reference's side."""
    if bench.ref.modules[call.name].is_leaf:
        return {}
    record = bench.ref.run_module(call.name, call, "float64", bench.train, backward=False).record
    return {name: array for name, array in record.outputs.items() if not name.startswith("output")}


def _numbers(row: Row) -> list[str]:
    if row.reason:
        return [row.reason]
    place = f" at {row.worst.index}" if row.worst.index else ""
    return [
        f"max|d| {row.difference:.1e}, limit {row.limit:.1e}, outside {row.worst.outside} of {row.worst.size}",
        f"worst{place}: reference {row.worst.ref!r}, port {row.worst.port!r}",
    ]


def _inside(bench: Bench, label: str, call: Call, run: Run) -> list[str]:
    """Of a block at fault whose layers are right: which of them is the first that the block feeds wrong."""
    ref = bench.ref.run_module(call.name, call, "float64", bench.train, backward=False)
    prefix, port_name = f"{call.name}." if call.name else "", port_module(bench.names, label)
    port_prefix = f"{port_name}." if port_name else ""
    mates = {port_prefix + c.name: c for c in run.record.calls.values() if c.name and c.number == 0}
    inner = [c for c in sorted(ref.record.calls.values(), key=lambda c: c.start) if c.name and c.number == 0]
    for inside in inner:
        full = prefix + inside.name
        if full not in bench.names.calls:
            continue
        mate = mates.get(module_of(bench.names.calls[full]))
        if mate is None:
            return [f"the port does not call {full} there"]
        if not _same(inside.inputs, mate.inputs):
            return [f"its own code feeds {full} otherwise, though all before it agrees"]
    return ["its layers agree and are fed alike: the difference is made behind the last of them"] if inner else []


def _same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and np.abs(a - b).max(initial=0) <= 1e-9 * max(largest(a), 1e-300)
        for a, b in zip(one, other, strict=True)
        if a.dtype.kind == "f"
    )


def _structural(ref: BackendModel, port: BackendModel, names: NameMap) -> Location:
    """The first tensor or module that does not fit, as the place of a structural difference."""
    item, reason = next(iter(names.problems.items()))
    name = item.removeprefix("port's ")
    side = ref if name == item else port
    owner = name if name in side.modules else name.rpartition(".")[0]
    where = owner if side is ref else _neighbour(owner, names)
    proof = [f"{item}: {reason}"]
    return Location(where, ref.modules[where].type, "structure", proof=proof, tree=tree(ref, where))


def _neighbour(port_name: str, names: NameMap) -> str:
    """The reference's block around what only the port has: what its nearest mapped neighbours have in common."""
    if port_name in names.modules.values():
        return next(one for one, other in names.modules.items() if other == port_name)
    while port_name:
        port_name = port_name.rpartition(".")[0]
        prefix = f"{port_name}." if port_name else ""
        beside = [one.split(".") for one, other in names.modules.items() if other.startswith(prefix)]
        if beside:
            shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*beside, strict=False))
            parts = [part for part, *_ in shared]
            return ".".join(parts[: len(beside[0]) - 1])  # a block, not the neighbour itself
    return ""


def tree(side: BackendModel, marked: str) -> list[str]:
    """The module tree around `marked`: its ancestors with all their children, the rest folded."""
    ancestors = {".".join(marked.split(".")[:n]) for n in range(len(marked.split(".")) + 1)} | {""}
    lines = []
    for name, module in side.modules.items():
        parent = name.rpartition(".")[0]
        if name and parent not in ancestors:
            continue
        if name and parent == marked and marked:
            continue
        depth = name.count(".") + 1 if name else 0
        mark = "   <--- HERE" if name == marked else ""
        lines.append(f"{'  ' * depth}{name.rpartition('.')[2] or 'model'} ({module.type}){mark}")
    return lines
