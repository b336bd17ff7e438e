"""Search for the map with which every layer receives the same values on both sides.

Layers of one type and shape may be in another order (branches). Their inputs or later
values tell them apart: the search goes back where values part. If two choices fit all
values, neither is right.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from math import prod
from operator import attrgetter

import numpy as np

from portproof.arrays import largest, largest_difference
from portproof.backends.model import BackendModel, Model
from portproof.backends.question import Question, Run
from portproof.backends.slots import Module, Slot
from portproof.backends.trace import Inputs, ModuleCall
from portproof.compare.ruler import constant_atol
from portproof.convert.rules import COUNT
from portproof.mapping.agreement import alike, alike_in_any_order, exchanged_axes, in_axes
from portproof.mapping.arguments import arguments
from portproof.mapping.fingerprint import sent
from portproof.mapping.links import Link, apply, slots_of, squeezed
from portproof.mapping.module_calls import EXACT
from portproof.mapping.pairing import (
    Option,
    Options,
    Unit,
    contents_of,
    is_statistic,
    linked_keys,
    signature,
    unit_options,
)
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

TRIES_OF_BLOCK = 240  # choices of options per block
TRIES_ALONE = 500  # runs of single blocks in all
TRIES = 60  # port runs without progress
MOST_RUNS = 1000  # of the whole port
FELT = 1e3 * EXACT  # of the outputs: a tensor that moves them by more moves them by EXACT, too, if it is turned

Block = tuple[ModuleCall, str, set[Unit]]  # (reference's call, port's module, units inside)


def _block_of(keys: Sequence[str]) -> str:
    """The innermost module that holds all of these tensors."""
    return ".".join(os.path.commonprefix([key.split(".")[:-1] for key in keys]))


def _alike_if_moved(ref: np.ndarray, port: np.ndarray) -> bool:
    axes = exchanged_axes(ref, port)
    return axes is not None and alike([in_axes(ref, axes)], [port])


def _digits(array: np.ndarray) -> tuple[int, str, str]:
    """Equal for arrays that agree, whatever the order of axes."""
    return array.size, f"{array.sum():.6e}", f"{np.abs(array).sum():.6e}"


@dataclass
class FoundMap:
    modules: dict[str, str]
    reached: int  # calls in a row that are fed alike, then the output
    total: int
    untried: list[tuple[dict[str, str], int]] = field(default_factory=list)  # (other choice, next call)
    hint: str = ""
    ambiguous: str = ""  # a map against the names that would agree everywhere, and the one of the names
    chosen: dict[Unit, int] = field(default_factory=dict)  # options, if not the first

    @property
    def reach(self) -> str:
        if self.reached == self.total:
            return "everywhere"
        return f"up to layer {self.reached} of {self.total - 1}"

    @property
    def extent(self) -> str:
        return self.reach + self.hint


def _choices(group: Sequence[Unit], options: Options, chosen: Mapping[Unit, int], tries: int) -> list[dict[Unit, int]]:
    counts = [len(options[unit]) for unit in group]
    in_step = [unit for unit, count in zip_strict(group, counts) if count == counts[0]]
    now = {unit: chosen.get(unit, 0) for unit in group}
    every = chain(  # those that names allow come first
        [now],
        (now | {group[0]: i} for i in range(counts[0])),
        (now | dict.fromkeys(in_step, i) for i in range(counts[0]) if len(in_step) > 1),
        (dict(zip_strict(group, each)) for each in product(*map(range, counts))),
    )
    return sorted(islice(every, tries), key=lambda choice: bool(_against_names(choice, options)))


def _against_names(choice: Mapping[Unit, int], options: Options) -> list[Option]:
    chosen = [options[unit][i] for unit, i in choice.items()]
    return [option for option in chosen if not option.by_name]


def _without(modules: Mapping[str, Module], tensors: set[str]) -> dict[str, Module]:
    left = {}
    for name, module in modules.items():
        slots = {leaf: slot for leaf, slot in module.slots.items() if slot.tensor not in tensors}
        left[name] = replace(module, slots=slots)
    return left


def _with_plain_tables(modules: Mapping[str, Module], others: Mapping[str, Module]) -> dict[str, Module]:
    """Frozen embeddings count as modules of own classes if the other side has fewer of their size: it may hold a table.

    Sinusoids are such a table.
    """

    def is_table(module: Module) -> bool:
        return module.kind == "Embedding" and not any(slot.trained for slot in module.slots.values())

    def sizes(of: Mapping[str, Module]) -> Counter[tuple[int, ...]]:
        return Counter(s.shape for module in of.values() if module.kind == "Embedding" for s in module.slots.values())

    spare = sizes(modules) - sizes(others)
    return {
        name: replace(module, kind="")
        if is_table(module) and any(s.shape in spare for s in module.slots.values())
        else module
        for name, module in modules.items()
    }


def _with_own_constants(modules: Mapping[str, Module], others: Mapping[str, Module]) -> dict[str, Module]:
    """Frozen parameters of own classes count as buffers if the other side has fewer tensors of their size.

    It may hold such constants in its code, or one for several that are equal.
    """

    def is_constant(module: Module, slot: Slot) -> bool:
        return not (slot.trained or slot.is_buffer or module.kind)

    def sizes(of: Mapping[str, Module]) -> Counter[int]:
        return Counter(
            prod(slot.shape) for module in of.values() for leaf, slot in module.slots.items() if leaf != COUNT
        )

    surplus = sizes(modules) - sizes(others)

    def of_side(module: Module, slot: Slot) -> Slot:
        is_spare = is_constant(module, slot) and prod(slot.shape) in surplus
        return replace(slot, is_buffer=True) if is_spare else slot

    return {
        name: replace(module, slots={leaf: of_side(module, slot) for leaf, slot in module.slots.items()})
        for name, module in modules.items()
    }


def _opposite_masks(ref: Model, port: Model, linked: set[str], port_linked: set[str]) -> dict[str, str]:
    """{reference's: port's} saved masks of which one says what is hidden and the other what is kept."""

    def masks(model: Model, taken: set[str]) -> dict[str, np.ndarray]:
        arrays = model.arrays()
        found = {s.tensor: arrays[key] for key, s in model.slots.items() if s.is_buffer and s.tensor not in taken}
        return {
            key: a.astype(bool) for key, a in found.items() if a.size > 1 and a.any() and ((a == 0) | (a == 1)).all()
        }

    found: dict[str, str] = {}
    theirs = masks(port, port_linked)
    for key, mask in masks(ref, linked).items():
        opposite = (other for other, array in theirs.items() if np.array_equal(mask.squeeze(), ~array.squeeze()))
        free = next((other for other in opposite if other not in found.values()), None)
        if free is not None:
            found[key] = free
    return found


def _equal_tables(ref: Model, port: Model, linked: set[str], port_linked: set[str]) -> dict[str, str]:
    """{reference's: port's} saved tables of equal values, where the name of one is another table's there.

    One side may call its cosines as the other calls its sines.
    """

    def tables(model: Model, taken: set[str]) -> dict[str, np.ndarray]:
        arrays = model.arrays()
        own = [s for module in model.modules.values() if not module.kind for s in module.slots.values()]
        constants = [s for s in own if s.is_buffer and not (s.is_whole or is_statistic(s.key) or s.tensor in taken)]
        return {s.tensor: arrays[s.key] for s in constants if prod(s.shape) > 1}

    def leaf(key: str) -> str:
        return key.rpartition(".")[2]

    def are_equal(one: np.ndarray, other: np.ndarray) -> bool:
        return one.shape == other.shape and largest_difference(one, other) <= constant_atol(one)

    found: dict[str, str] = {}
    theirs = tables(port, port_linked)
    for key, array in tables(ref, linked).items():
        equal = [other for other, there in theirs.items() if are_equal(array, there) and other not in found.values()]
        names = {leaf(other) for other, there in theirs.items() if there.shape == array.shape} - set(map(leaf, equal))
        if equal and leaf(key) in names:
            found[key] = equal[0]
    return found


def against_the_names(named: str, told: str, what: str = "the names") -> str:
    """The two readings, as lines of a map: that of the names, say, and that of the values."""
    return (
        f"values agree everywhere only against {what}, with {told}: the port may name these layers"
        f" otherwise, or exchange them; say which in a map, with the lines {named} or {told}"
    )


def _swapped(modules: dict[str, str], name: str, other: str) -> dict[str, str]:
    return modules | {name: modules[other], other: modules[name]}


def _beside_their_siblings(modules: dict[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """With exchanges undone that part a layer from its siblings, on both sides, which are paired as `before`.

    A faulty port may feed one layer what another gets.
    """
    siblings: defaultdict[str, set[str]] = defaultdict(set)
    port_siblings: defaultdict[str, set[str]] = defaultdict(set)
    for name, port_name in modules.items():
        if port_name == before[name]:
            siblings[_block_of([name])].add(_block_of([port_name]))
            port_siblings[_block_of([port_name])].add(_block_of([name]))
    for name, port_name in list(modules.items()):
        around, port_around = _block_of([name]), _block_of([port_name])
        own, theirs = siblings[around], port_siblings[port_around]
        is_apart = len(own) == len(theirs) == 1 and port_around not in own and around not in theirs
        if is_apart and _block_of([before[name]]) in own:
            other = next(each for each in modules if modules[each] == before[name])
            modules = _swapped(modules, name, other)
    return modules


class MapSearch:
    """Tries maps in eval mode: weights are loaded through them, both models run."""

    def __init__(
        self, ref: Model, port: BackendModel, inputs: Inputs, given: Options, modules: Container[str] = ()
    ) -> None:
        """`given` are the user's lines of tensors, `modules` those of which the user has lines, too."""
        self.ref = ref
        self.port = port
        self.inputs = inputs
        self.of_user = modules
        ref.set_pieces({})
        port.set_pieces({})
        linked, port_linked = linked_keys(given)
        self.opposite = _opposite_masks(ref, port, linked, port_linked)
        linked |= self.opposite.keys()
        port_linked |= set(self.opposite.values())
        tables = _equal_tables(ref, port, linked, port_linked)
        self.given = given | {((a,), (b,)): [Option((Link((a,), (b,)),))] for a, b in tables.items()}
        linked |= tables.keys()
        port_linked |= set(tables.values())
        sides = _without(ref.modules, linked), _without(port.modules, port_linked)
        sides = _with_plain_tables(*sides), _with_plain_tables(*sides[::-1])
        self.ref_modules, self.port_modules = _with_own_constants(*sides), _with_own_constants(*sides[::-1])
        self.options: Options = {}
        self.joined: list[Unit] = []  # not one module to one
        self.fixed: set[str] = set()  # modules that stay
        self.chosen: dict[Unit, int] = {}
        self.ref_run = ref.run(inputs, "float64", train=False, calls=True)
        self.port_run = port.run(inputs, "float32", train=False, calls=True)
        self._runs_left = 0  # of single blocks
        self._runs = 0  # of the whole port
        self._hint = ""  # what would agree against the names
        self._last: tuple[list[Link], Run] | None = None

    @property
    def is_exhausted(self) -> bool:
        """Whether the port has run so often that the map is left as it is."""
        return self._runs >= MOST_RUNS

    def set_units(self, options: Options, fixed: set[str], chosen: Mapping[Unit, int]) -> dict[str, str]:
        """Search these -> {reference's module: port's} of one to one; `fixed` ones stay."""
        pairs = {unit: (unit[0][0], unit[1][0]) for unit in options if len(unit[0]) == len(unit[1]) == 1}
        self.joined = [*self.given, *(unit for unit in options if unit not in pairs)]
        self.options = self.given | options
        self.fixed = fixed
        self.chosen = dict(chosen)
        return dict(pairs.values())

    def options_by_unit(self, modules: Mapping[str, str]) -> Options:
        pairs = [((name,), (port_name,)) for name, port_name in modules.items()]
        for unit in pairs:
            if unit not in self.options:
                (name,), (port_name,) = unit
                self.options[unit], _ = unit_options([self.ref_modules[name]], [self.port_modules[port_name]])
        return {unit: self.options[unit] for unit in (*self.joined, *pairs)}

    def links(self, modules: Mapping[str, str]) -> list[Link]:
        options = self.options_by_unit(modules)
        chosen = [each[self.chosen.get(unit, 0)] for unit, each in options.items()]
        return list(chain.from_iterable(option.links for option in chosen))

    def load(self, modules: Mapping[str, str]) -> dict[str, str]:
        """Load the reference's weights into the port -> {reference's key: port's}."""
        tensors = apply(self.links(modules), self.ref, self.port)
        arrays = self.ref.arrays()
        self.port.load({port_key: arrays[key] for key, port_key in tensors.items()})
        return tensors

    def resolve(self, modules: dict[str, str]) -> FoundMap:
        found = self._search(modules, 0, self.fixed)
        if found.reached < found.total:
            together = _beside_their_siblings(found.modules, modules)
            found = found if together == found.modules else self._search(together, 0, set(together))
        same_outputs = set(self.ref_run.places) & set(self.port_run.places)
        if found.reached < found.total and self.fixed and same_outputs:  # else outputs are to be named first
            free = self._search(modules, 0, set())
            moved = [name for name in self.fixed if free.modules[name] != modules[name]]
            if free.reached == free.total and moved and not any(name in self.of_user for name in moved):
                readings = (found.modules, free.modules)
                lines = ["; ".join(f"{name}: {modules[name]}" for name in sorted(moved)) for modules in readings]
                found.ambiguous = against_the_names(*lines)
        return found

    def settle_options(self, found: FoundMap) -> FoundMap:
        """Try options in small blocks run alone, away from other mistakes; else in the model."""
        if found.reached == found.total:
            return found
        options = {unit: each for unit, each in self.options_by_unit(found.modules).items() if len(each) > 1}
        self._runs_left, self._hint = TRIES_ALONE, ""
        undecided: list[Unit] = []
        decided: set[Unit] = set()
        for unit in options:
            if unit in decided:
                continue
            blocks = self._blocks(unit, found.modules)
            block = next((block for block in blocks if self._run_block(*block[:2], found.modules)), None)
            if block is None:
                undecided.append(unit)
                continue
            group = [unit, *(other for other in options if other != unit and other in block[2] - decided)]
            if self._settle_block(block, group, options, found.modules):
                decided.update(group)
            elif not block[0].name:  # the whole model, in which modules may be exchanged, too
                undecided.append(unit)
        for unit in undecided:
            for i, option in enumerate(options[unit][:TRIES]):
                if i == 0 or not option.by_name:
                    continue
                before, self.chosen = self.chosen, self.chosen | {unit: i}
                further = self.resolve(found.modules)
                if further.reached > found.reached:
                    found = further
                else:
                    self.chosen = before
        found = max(found, self.resolve(found.modules), key=lambda each: each.reached)
        found.chosen = self.chosen
        if found.reached < found.total:
            found.hint = self._hint or found.hint
        return found

    def _settle_block(self, block: Block, group: list[Unit], options: Options, modules: Mapping[str, str]) -> bool:
        """Whether fitting options were chosen; those that names forbid are a hint."""
        call, port_name, _ = block
        most = TRIES_OF_BLOCK if call.name else TRIES
        for choice in _choices(group, options, self.chosen, most):
            if self._runs_left == 0:
                return False
            self._runs_left -= 1
            before, self.chosen = self.chosen, self.chosen | choice
            run = self._run_block(call, port_name, modules)
            # Attention may give its weights, too.
            output = run.output if run else []
            count = min(len(call.outputs), len(output))
            right = count > 0 and alike(call.outputs[:count], output[:count])
            against = _against_names(choice, options)
            if right and not against:
                return True
            self.chosen = before
            if right:
                lines = "; ".join(": ".join(link.line) for link in against[0].links)
                hint = f" (it would agree with {lines}: if that is meant against the names, say so in a map)"
                self._hint = self._hint or hint
                return False
        return False

    def _blocks(self, unit: Unit, modules: Mapping[str, str]) -> list[Block]:
        """Around the unit, with the same tensors on both sides; smallest first."""
        tensors = self.load(modules)
        contents = contents_of(self.ref, {key: key for key in tensors})
        port_contents = contents_of(self.port, {port_key: key for key, port_key in tensors.items()})
        called = {call.name for call in self.port_run.trace.calls.values()}
        pieces: defaultdict[str, set[str]] = defaultdict(set)  # of tensors
        keys: defaultdict[Unit, set[str]] = defaultdict(set)
        for slot in slots_of(self.ref.modules).values():
            pieces[slot.tensor].add(slot.key)
        for each, options in self.options_by_unit(modules).items():
            keys[each].update(*(pieces[tensor] for link in options[0].links for tensor in link.ref))
        found = []
        for call in self.ref_run.trace.calls.values():
            content = contents.get(call.name, frozenset())
            if call.number == 0 and content and keys[unit] <= content:
                inside = {other for other, wanted in keys.items() if wanted and wanted <= content}
                same = [name for name in port_contents if port_contents[name] == content and name in called]
                found += [(call, name, inside) for name in same]

        def order(block: Block) -> tuple[int, bool, int, int]:  # a layer may be a block there, but seldom is
            call, name, _ = block
            is_layer, port_is_layer = (
                bool(module.kind) for module in (self.ref.modules[call.name], self.port.modules[name])
            )
            return len(contents[call.name]), is_layer != port_is_layer, -call.start, -len(name)

        return sorted(found, key=order)

    def _run_block(self, call: ModuleCall, port_name: str, modules: Mapping[str, str]) -> Run | None:
        self.load(modules)
        port_call = next(each for each in self.port_run.trace.calls.values() if each.name == port_name)
        own = arguments(call.inputs, call.inputs, port_call)
        as_called = replace(port_call, args=own.args, kwargs=own.kwargs)
        ways = [call, replace(call, args=tuple(call.inputs), kwargs={}), *([as_called] if own.complete else [])]
        for given in ways:
            run = self.port.ask(Question(replace(given, name=port_name), "float64", train=False))
            if not run.trace.error and run.output:
                return run
        return None

    def ambiguity(self, found: FoundMap) -> str:
        """Two readings between which values cannot decide; "" if none."""
        readings = found.ambiguous
        if not readings and (found.reached == found.total or self.agreement(found.modules)[0]):
            readings = self._turned_square(found.modules) or self._joined_in_two_ways(found.modules)
        return readings

    def settle_exchanges(self, found: FoundMap) -> FoundMap:
        """Of readings between which eval mode cannot decide the one that agrees in train mode, too."""
        for modules, start in found.untried if found.reached == found.total else ():
            other = self._search(modules, start, self.fixed)
            if other.reached < other.total:
                continue
            agree, other_agrees = (self._agree_in_train_mode(each.modules) for each in (found, other))
            if agree == other_agrees:
                first, second = [name for name in modules if modules[name] != found.modules[name]][:2]
                found.ambiguous = (
                    f"{first} and {second} may be the port's {found.modules[first]} and {found.modules[second]},"
                    " or the other way round: values are the same; say which in a map"
                )
                return found
            if other_agrees:
                return other
        return found

    def _agree_in_train_mode(self, modules: Mapping[str, str]) -> bool:
        self.load(modules)
        self._last = None
        try:
            ref, port = (model.run(self.inputs, "float64", train=True) for model in (self.ref, self.port))
        except UserError:  # a recording of eval mode alone
            return True
        return alike(ref.output, port.output)

    def _turned_square(self, modules: Mapping[str, str]) -> str:
        """A square tensor of no library layer that agrees only transposed, if no other of such modules has to be."""
        own, ports = (
            {slot.tensor: (each[name], squeezed(slot.shape)) for (name, _), slot in slots_of(each).items()}
            for each in (self.ref_modules, self.port_modules)
        )
        squares, proved = {}, set()
        for link in self.links(modules):
            if link.transposed and not link.is_join and link.ref[0] in own and link.port[0] in ports:
                (module, shape), (port_module, port_shape) = own[link.ref[0]], ports[link.port[0]]
                types = module.type, port_module.type
                if shape != port_shape:
                    proved.add(types)
                elif not module.kind and not port_module.kind:
                    squares[types] = link.line
        for types, (left, right) in squares.items():
            if types not in proved:
                plain = right.partition(" (")[0]
                return (
                    f"values agree only with {left}, which is square, transposed: the port may store it so, or use it"
                    f" wrongly; say which in a map, with the line {left}: {plain} or {left}: {right}"
                )
        return ""

    def _joined_in_two_ways(self, modules: Mapping[str, str]) -> str:
        """Parts that are joined otherwise than those of the same names in another block of these classes.

        That is in another order, or transposed.
        """
        first: dict[tuple, tuple[Link, tuple[str, ...]]] = {}
        given, _ = linked_keys(self.given)
        for link in self.links(modules):
            if not link.is_join or given.issuperset(link.ref):
                continue
            is_ref = len(link.ref) > 1
            (joined,) = link.port if is_ref else link.ref
            of_parts, of_joined = (self.ref_modules, self.port_modules)[:: 1 if is_ref else -1]
            block, owner = _block_of(link.parts), joined.rpartition(".")[0]
            if owner in of_joined and of_joined[owner].kind:
                owner = owner.rpartition(".")[0]
            names = tuple(part.removeprefix(f"{block}.") for part in link.parts)
            if block not in of_parts or owner not in of_joined:
                continue
            types = of_parts[block].type, of_joined[owner].type, joined.removeprefix(f"{owner}.")
            other, order = first.setdefault((types, frozenset(names), link.heads, link.axis), (link, names))
            if (order, other.transposed) != (names, link.transposed):
                parts = tuple(f"{block}.{name}" for name in order)
                same = replace(link, ref=parts) if is_ref else replace(link, port=parts)
                same = replace(same, transposed=other.transposed)
                (one, one_there), (left, right), (same_left, same_right) = other.line, link.line, same.line
                return (
                    f"values agree only with {one} as {one_there}, and {left} as {right}, so in two ways in blocks of"
                    " one class: the port may store them so, or use them wrongly; say which in a map, with the line"
                    f" {left}: {right} or {same_left}: {same_right}"
                )
        return ""

    def _search(self, modules: dict[str, str], start: int, fixed: set[str]) -> FoundMap:
        stack = [(modules, start)]
        best = None
        tries = 0
        while stack and tries < TRIES and (best is None or not self.is_exhausted):
            found = self._settle_calls(*stack.pop(), fixed)
            stack += found.untried
            tries += 1
            if best is None or found.reached > best.reached:
                best, tries = found, 0
            if best.reached == best.total:
                best.untried = stack
                break
        assert best is not None
        return best

    def choose(self, modules: Mapping[str, str]) -> tuple[bool, int, float]:
        """Choose the options of joined units, one unit after the other, with which most agrees -> `agreement`."""
        best = self.agreement(modules)
        for unit in self.joined:
            for i in range(1, min(len(self.options[unit]), TRIES)):
                if best[0] or self.is_exhausted:
                    return best
                before, self.chosen = self.chosen, self.chosen | {unit: i}
                agreement = self.agreement(modules)
                if agreement[:2] > best[:2] or best[2] == -np.inf < agreement[2]:
                    best = agreement
                else:
                    self.chosen = before
        return best

    def reach(self, modules: dict[str, str], outputs_agree: bool) -> FoundMap:
        """How far values confirm these, without a try of others: everywhere if `outputs_agree` as told by gradients."""
        found = self._search(modules, 0, set(modules))
        found.reached = found.total if outputs_agree else found.reached
        found.chosen = dict(self.chosen)
        return found

    def agreement(self, modules: Mapping[str, str]) -> tuple[bool, int, float]:
        """(whether outputs agree, how many calls give what one of the port gives, minus the outputs' distance)."""
        run = self.run(modules)
        calls, port_calls = self.ref_run.trace.calls.values(), run.trace.calls.values()
        given = {_digits(array) for call in port_calls for array in call.outputs}
        count = sum(all(_digits(array) in given for array in call.outputs) for call in calls)
        pairs = zip(self.ref_run.output, run.output)
        distances = [
            largest_difference(*pair) / max(largest(pair[0]), 1e-300)
            for pair in pairs
            if pair[0].shape == pair[1].shape
        ]
        distance = float(np.max(distances, initial=0.0)) if distances else np.inf
        return alike(self.ref_run.output, run.output), count, -distance if distance >= 0 else -np.inf

    def tells_options(self, modules: Mapping[str, str]) -> bool:
        """Whether outputs depend on every tensor that may be stored in several ways: else values do not tell in which.

        They hardly do on an attention's queries, say, where its keys are alike or its softmax gives a single 1.
        """
        several = (each[0] for each in self.options_by_unit(modules).values() if len(each) > 1)
        keys = {key for option in several for link in option.links for key in link.ref}
        if not keys:
            return True
        outputs, cotangents = self.ref_run.output, self.ref.cotangents  # a recording has its own
        run = self.ref.run(self.inputs, "float64", False, cotangents[False] if cotangents else list(map(sent, outputs)))
        arrays, least = self.ref.arrays(), FELT * max(map(largest, outputs), default=0.0)
        felt = {
            slot.tensor
            for key, slot in self.ref.slots.items()
            if not slot.trained or key in run.gradients and largest(run.gradients[key]) * largest(arrays[key]) > least
        }
        return bool(run.trace.error) or keys <= felt

    def unconfirmed(self, found: FoundMap) -> list[str]:
        """Modules from the last that is fed alike on, whose own weights nothing behind it confirms."""
        calls = self._calls(found.modules)
        return list(dict.fromkeys(call.name for call in calls[max(found.reached - 1, 0) :]))

    def _calls(self, modules: Mapping[str, str]) -> list[ModuleCall]:
        calls = [call for call in self.ref_run.trace.calls.values() if call.name in modules]
        return sorted(calls, key=attrgetter("start"))

    def _settle_calls(self, modules: dict[str, str], start: int, fixed: set[str]) -> FoundMap:
        """From call `start` on; layers of one signature, fed alike, may be exchanged."""
        calls = self._calls(modules)
        port_run, found = self.run(modules), FoundMap(modules, start, len(calls) + 1)
        settled = {call.name for call in calls[:start]} | fixed
        for place, call in enumerate(calls[start:], start):
            own, swaps = signature(self.ref_modules[call.name]), []
            for name, port_name in found.modules.items() if call.name not in settled else ():
                is_free = name != call.name and name not in settled
                if is_free and signature(self.ref_modules[name]) == own and self._receives(port_run, port_name, call):
                    swaps.append(name)
            if not self._receives(port_run, found.modules[call.name], call):
                if not swaps:
                    return found
                found.modules = _swapped(found.modules, call.name, swaps.pop(0))
                port_run = self.run(found.modules)
            found.untried += [(_swapped(found.modules, call.name, other), place + 1) for other in swaps]
            found.reached = place + 1
            settled.add(call.name)
        found.reached += alike(self.ref_run.output, port_run.output)
        return found

    def run(self, modules: Mapping[str, str]) -> Run:
        links = self.links(modules)
        if self._last is None or self._last[0] != links:
            self.load(modules)
            self._last = links, self.port.run(self.inputs, "float64", train=False, calls=True)
            self._runs += 1
        return self._last[1]

    def _receives(self, port_run: Run, port_name: str, call: ModuleCall) -> bool:
        """In any call; another kind may receive it in any order (channels last)."""
        ref, port = self.ref_modules[call.name], self.port_modules[port_name]
        if bool(ref.kind) != bool(port.kind) or not call.name or not port_name:
            return True  # a custom module's steps are fed otherwise, and so is the whole model
        received = [c.inputs for c in port_run.trace.calls.values() if c.name == port_name]
        if not received:
            return True  # its weights are used, and it is not called
        if any(alike(call.inputs, inputs) for inputs in received):
            return True
        if signature(ref) == signature(port):  # perhaps the batch is elsewhere
            same_count = (inputs for inputs in received if len(inputs) == len(call.inputs) > 0)
            return any(all(map(_alike_if_moved, call.inputs, inputs)) for inputs in same_count)
        return any(alike_in_any_order(call.inputs, inputs) for inputs in received)
