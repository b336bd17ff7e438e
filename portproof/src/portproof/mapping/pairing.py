"""Pair modules and tensors by name, order, type and shape, for values to confirm."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import chain, combinations, filterfalse, islice, permutations, product
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import TypeVar

from portproof.backends.model import Model
from portproof.backends.slots import Module, Slot
from portproof.backends.trace import Trace
from portproof.convert.rules import COUNT, RULES
from portproof.mapping.alignment import align_sequences
from portproof.mapping.links import Link, exchanged, squeezed

MOST_OPTIONS = 240  # tried per unit
MOST_EXCHANGED = 4  # of one shape, tried in every order

# Costs of a pair, see alignment.SKIP
SAME_SHAPES = 100
SAME_ELEMENTS = 200
JOINED = 300
SAME_TENSORS_IN_PART = 500
SAME_KIND = 900
STATISTICS = ("mean", "var")  # last words of names
APART = 1000  # added if their parents do not match
OTHER_NAME = 10  # added if their last names differ


@dataclass(frozen=True)
class Option:
    links: tuple[Link, ...]
    by_name: bool = True  # names allow it

    @property
    def turned(self) -> Option:
        return replace(self, links=tuple(link.turned for link in self.links))


Modules = Mapping[str, Module]
Slots = dict[str, Slot]  # by name
Factors = list[list[Option]]  # one option of each is chosen
Layers = tuple[AbstractSet[str], AbstractSet[str]]  # each side's, of library layers
Names = tuple[str, ...]
Unit = tuple[Names, Names]  # matched modules: one to one or several
Options = dict[Unit, list[Option]]  # ways to link a unit

T = TypeVar("T", Module, Slot)


def is_optional(module: Module, leaf: str) -> bool:
    """Whether the other side may lack it: a buffer of no library layer (an index, a mask)."""
    slot = module.slots[leaf]
    of_layer = leaf in RULES.get(module.kind, {}) or bool(module.kind) and leaf.endswith(("_u", "_v"))
    return leaf == COUNT or slot.is_buffer and not of_layer


def needed(module: Module) -> Slots:
    return {leaf: slot for leaf, slot in module.slots.items() if not is_optional(module, leaf)}


def spare(module: Module) -> Slots:
    return {leaf: slot for leaf, slot in module.slots.items() if is_optional(module, leaf)}


def modules_with_tensors(modules: Modules, trace: Trace) -> list[Module]:
    """In the order of their first call; uncalled ones follow the one defined before."""
    called = dict.fromkeys(call.name for call in sorted(trace.calls.values(), key=attrgetter("start")))
    names = [name for name in called if name in modules and modules[name].slots]
    place = 0  # behind the one before
    for name, module in modules.items():
        if module.slots:
            if name not in called:
                names.insert(place, name)
            place = names.index(name) + 1
    return [modules[name] for name in names]


def _shapes(module: Module, tensors: Callable[[Module], Slots] = needed) -> tuple:
    return tuple(sorted(slot.shape for slot in tensors(module).values()))


def _buffers(module: Module) -> tuple:
    return tuple(sorted(slot.shape for leaf, slot in module.slots.items() if leaf != COUNT))


def _elements(module: Module) -> tuple:
    return tuple(sorted(map(squeezed, _shapes(module))))


def _size(of: Module | Slot) -> int:
    slots = needed(of).values() if isinstance(of, Module) else [of]
    return sum(prod(slot.shape) for slot in slots)


def signature(module: Module) -> tuple:
    """What two modules must share to be paired."""
    if not module.kind:
        return "", _shapes(module)
    shapes = {leaf: slot.shape for leaf, slot in needed(module).items()}
    return module.kind.rstrip("123d").replace("SyncBatchNorm", "BatchNorm"), tuple(sorted(shapes.items()))


def contents_of(model: Model, ref_keys: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """{module: tensors in it and below}; `ref_keys` is {own: reference's}."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, module in model.modules.items():
        keys = {ref_keys[slot.key] for slot in module.slots.values() if slot.key in ref_keys}
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            found[".".join(parts[:depth])] |= keys
    return {name: frozenset(keys) for name, keys in found.items()}


def complete_pairs(pairs: dict[str, str], ref: Sequence[Module], port: Sequence[Module]) -> list[Unit]:
    """The named `pairs`, the rest by order; spare buffers by shape or name."""
    units: list[Unit] = [((name,), (port_name,)) for name, port_name in pairs.items()]
    ref_left, port_left = _without(units, 0, ref), _without(units, 1, port)
    units += _by_order(list(filter(needed, ref_left)), list(filter(needed, port_left)), pairs)
    ref_left, port_left = (
        [module for module in _without(units, side, modules) if all(slot.is_buffer for slot in needed(module).values())]
        for side, modules in enumerate((ref, port))
    )
    statistics = _in_turn(ref_left, port_left, _buffers)
    if statistics:
        units += statistics
        ref_left = port_left = []
    spare_ones, port_spare = list(filterfalse(needed, ref_left)), _by_name(filterfalse(needed, port_left))
    in_turn = _in_turn(spare_ones, list(port_spare.values()), partial(_shapes, tensors=spare))
    units += in_turn or [((module.name,), (module.name,)) for module in spare_ones if module.name in port_spare]
    place = {module.name: i for i, module in enumerate(ref)}
    return sorted(units, key=lambda unit: place.get(unit[0][0], -1))


def _by_order(ref: Sequence[Module], port: Sequence[Module], pairs: Mapping[str, str]) -> list[Unit]:
    for key in (signature, _shapes, _elements):
        units = _in_turn(ref, port, key)
        if units:
            return units
    ref_modules, port_modules = _by_name(ref), _by_name(port)

    def unmatched(units: Sequence[Unit]) -> tuple[int, int]:
        """Tensors without counterpart; then modules."""
        misfits, _, _ = fit_units(units, ref_modules, port_modules)
        count = len(ref) + len(port)
        for names, port_names in units:
            wrong = unit_options(_at(ref_modules, names), _at(port_modules, port_names))[1]
            count += bool(wrong) - len(names) - len(port_names)
        return len(misfits), count

    return min((_aligned(ref, port, pairs, may_differ) for may_differ in (False, True)), key=unmatched)


def _in_turn(ref: Sequence[Module], port: Sequence[Module], key: Callable[[Module], tuple]) -> list[Unit]:
    if Counter(map(key, ref)) != Counter(map(key, port)):
        return []
    units: list[Unit] = []
    for same in (signature, key):  # layers of one kind first
        queues = defaultdict(list)
        for module in _without(units, 1, port):
            queues[same(module)].append(module.name)
        left = _without(units, 0, ref)
        units += [((module.name,), (queues[same(module)].pop(0),)) for module in left if queues[same(module)]]
    return units


def _at(modules: Modules, names: Names) -> list[Module]:
    return [modules[name] for name in names]


def _aligned(
    ref: Sequence[Module], port: Sequence[Module], pairs: Mapping[str, str], tensors_may_differ: bool
) -> list[Unit]:
    costs: dict[tuple, int | None] = {}
    names, port_names = list(_by_name(ref)), list(_by_name(port))
    blocks = {(_parent(name), _parent(port_name)) for name, port_name in pairs.items()}
    settled = {block for block, _ in blocks}, {block for _, block in blocks}

    def described(module: Module) -> tuple:  # all that a cost depends on
        slots = tuple((leaf, s.shape, s.trained, is_optional(module, leaf)) for leaf, s in module.slots.items())
        return module.kind, slots

    def cost(ref_places: slice, port_places: slice) -> int | None:
        sides = ref[ref_places], port[port_places]
        own, theirs = ([module.name for module in side] for side in sides)
        if _name_other_parts(own, theirs, (*names, *port_names)) or _are_of_lists(own) or _are_of_lists(theirs):
            return None
        key = tuple(map(described, sides[0])), tuple(map(described, sides[1]))
        if key not in costs:
            costs[key] = _cost(*sides, tensors_may_differ)
        alone = costs[key]
        around = _parent(sides[0][0].name), _parent(sides[1][0].name)
        apart = around not in blocks and (around[0] in settled[0] or around[1] in settled[1])
        renamed = {_last(module.name) for side in sides for module in side if len(side) == 1}
        return None if alone is None else alone + APART * apart + OTHER_NAME * (len(renamed) > 1)

    aligned = align_sequences(list(map(_owner, ref)), list(map(_owner, port)), cost)
    units = [(tuple(names[places]), tuple(port_names[port_places])) for places, port_places in aligned]
    ref_left, port_left = _by_name(_without(units, 0, ref)), _by_name(_without(units, 1, port))
    for name, module in list(ref_left.items()):  # called at another place, such as a head behind each block
        alike = [other for other in port_left if signature(port_left[other]) == signature(module)]
        if alike:
            other = max(alike, key=partial(similarity, name))
            units.append(((ref_left.pop(name).name,), (port_left.pop(other).name,)))

    def may_be(one: Module, parts: list[Module], _: bool) -> bool:
        return bool(join_options(one, parts))

    for turned, one, parts in _take_joins(ref_left, port_left, signature, may_be):
        joined = (one.name,), tuple(_by_name(parts))
        units.append(joined[::-1] if turned else joined)
    return units


def _without(units: Iterable[Unit], side: int, modules: Iterable[Module]) -> list[Module]:
    taken = set(chain.from_iterable(unit[side] for unit in units))
    return [module for module in modules if module.name not in taken]


def _by_name(modules: Iterable[Module]) -> dict[str, Module]:
    return {module.name: module for module in modules}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _owner(module: Module) -> str:
    return _parent(module.name) if module.is_leaf else module.name  # of tensors beside a block's layers


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _cost(ref: Sequence[Module], port: Sequence[Module], may_differ: bool) -> int | None:
    same_size = sum(map(_size, ref)) == sum(map(_size, port))
    if len(ref) != len(port):
        return JOINED if same_size and unit_options(ref, port)[0] else None
    (one,), (other,) = ref, port
    if signature(one) == signature(other):
        return 0
    is_own_norm = bool(one.kind) != bool(other.kind) and _buffers(one) == _buffers(other)
    if is_own_norm or _shapes(one) == _shapes(other):
        return SAME_SHAPES
    if same_size and not unit_options(ref, port)[1]:
        return SAME_ELEMENTS
    if not may_differ or one.kind != other.kind:
        return None
    shapes, other_shapes = ({(leaf, slot.shape) for leaf, slot in needed(each).items()} for each in (one, other))
    return SAME_TENSORS_IN_PART if shapes <= other_shapes or other_shapes <= shapes else SAME_KIND


def _take_joins(
    ref: dict[str, T], port: dict[str, T], key: Callable[[T], Hashable], may_be: Callable[[T, list[T], bool], bool]
) -> list[tuple[bool, T, list[T]]]:
    """(whether `one` is the port's, `one`, its parts of equal `key`), taken out."""
    found = []
    for turned, ones, others in ((False, ref, port), (True, port, ref)):
        for name, one in list(ones.items()):
            groups = defaultdict(list)
            for other_name, other in others.items():
                groups[key(other)].append(other_name)
            for group in groups.values():
                count, rest = divmod(_size(one), max(1, _size(others[group[0]])))
                chosen = _siblings(name, group, count)
                parts = [others[part] for part in chosen]
                if not rest and 1 < count == len(parts) and may_be(one, parts, turned):
                    found.append((turned, ones.pop(name), [others.pop(part) for part in chosen]))
                    break
    return found


def _siblings(name: str, group: Sequence[str], count: int) -> Sequence[str]:
    """Those that are all of a list, such as the heads of q, whose name is most like this one; else the first."""
    lists = defaultdict(list)
    for part in group:
        lists[_parent(part)].append(part)
    every = [parts for parts in lists.values() if len(parts) == count and all(_last(part).isdigit() for part in parts)]
    return max(every, key=lambda parts: similarity(name, _parent(parts[0])), default=group[:count])


def _are_of_lists(names: Sequence[str]) -> bool:
    """Whether some are of a list, and others are not of that."""
    return len(set(map(_parent, names))) > 1 and any(_last(name).isdigit() for name in names)


def fit_units(units: Iterable[Unit], ref: Modules, port: Modules) -> tuple[dict[str, str], Options, list[str]]:
    """({tensor or module: misfit}, options, spare buffers left out)."""
    options: Options = {}
    reasons: dict[str, str] = {}
    for unit in units:
        options[unit], misfits = unit_options(_at(ref, unit[0]), _at(port, unit[1]))
        reasons |= misfits
    linked, port_linked = linked_keys(options)
    left, layers = _left_over(ref, linked, reasons, "")
    port_left, port_layers = _left_over(port, port_linked, reasons, "port's ")
    factors = _by_shape(left, port_left, (layers, port_layers))
    factors += _tensor_joins(left, port_left, (layers, port_layers))
    if sum(map(_size, left.values())) == sum(map(_size, port_left.values())):  # nothing is missing
        joins = _tensor_joins(left, port_left)
        factors += [*joins, *_by_shape(left, port_left)] if joins else []
    factors += statistics({**options, ((), ()): combined(factors)}, ref, port)
    factors += _constants({**options, ((), ()): combined(factors)}, ref, port)
    if factors:
        options[(), ()] = combined(factors)
    of_layers, port_of_layers = _of_layers(ref), _of_layers(port)

    def turns_layers(link: Link) -> bool:  # both are known to be stored alike
        return link.transposed and bool(of_layers & {*link.ref} and port_of_layers & {*link.port})

    for unit, every in options.items():
        options[unit] = [each for each in every if not any(map(turns_layers, each.links))] or every
    missing, left_out = left_over(options, ref, port, reasons)
    return missing, options, left_out


def _of_layers(modules: Modules) -> set[str]:
    return {slot.tensor for module in modules.values() if module.kind for slot in module.slots.values()}


def left_over(
    options: Options, ref: Modules, port: Modules, reasons: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, str], list[str]]:
    """({tensor or module that no first option links: why}, spare buffers left out)."""
    missing: dict[str, str] = {}
    wrong: dict[str, str] = {}
    left_out: list[str] = []
    for side, modules in enumerate((ref, port)):
        prefix, other = ("port's ", "reference") if side else ("", "port")
        linked = linked_keys(options)[side]
        counterparts: dict[str, str] = {}
        for unit in options:
            counterparts |= dict.fromkeys(unit[side], ", ".join(unit[1 - side]))
        for module in modules.values():
            lost = [prefix + slot.key for slot in needed(module).values() if slot.tensor not in linked]
            there = counterparts.get(module.name, "")
            if lost and not there and len(lost) == len(needed(module)):
                missing[prefix + module.name] = f"the {other} has no {module.type} for it"
            else:
                wrong |= {key: reasons.get(key, f"the {other}'s {there or 'model'} does not have it") for key in lost}
            unused = [slot.key for leaf, slot in spare(module).items() if leaf != COUNT and slot.tensor not in linked]
            left_out += [prefix + key for key in unused]
    return missing | {key: reason for key, reason in wrong.items() if reason}, left_out


def statistics(options: Options, ref: Modules, port: Modules, named: bool = True) -> Factors:
    """Pair buffers of a batch norm that is a module on one side with those that the other side's block holds.

    Those of two own modules must be `named` as statistics: the others may be constants that one side alone has.
    """
    linked, places = linked_keys(options), [_places(modules) for modules in (ref, port)]
    tensors = {pair for each in options.values() for link in each[0].links for pair in product(link.ref, link.port)}
    factors: Factors = []
    for name, port_name in dict.fromkeys((places[0][a], places[1][b]) for a, b in sorted(tensors)):
        sides = (name, ref, linked[0]), (port_name, port, linked[1])
        needed_ones, spare_ones = ([_buffers_left(*side, of) for side in sides] for of in (needed, spare))
        factors += _by_shape(needed_ones[0], spare_ones[1])
        factors += _by_shape(spare_ones[0], needed_ones[1])
        left, port_left = ({k: s for k, s in each.items() if is_statistic(k) or not named} for each in spare_ones)
        factors += _by_shape(left, port_left)
        for link in chain.from_iterable(each[0].links for each in factors):
            linked[0].update(link.ref)
            linked[1].update(link.port)
    return factors


def _constants(options: Options, ref: Modules, port: Modules) -> Factors:
    """Pair buffers of own classes by name, where one on each side bears it, and frozen parameters with buffers."""

    def left(modules: Modules, linked: set[str], of: Callable[[Module], Slots]) -> Slots:
        own = (name for name, module in modules.items() if not module.kind)
        return {key: slot for name in own for key, slot in _buffers_left(name, modules, linked, of).items()}

    sides = tuple(zip((ref, port), linked_keys(options)))
    (frozen, port_frozen), (buffers, port_buffers) = ([left(*side, of) for side in sides] for of in (needed, spare))
    factors = [*_by_shape(frozen, port_buffers), *_by_shape(buffers, port_frozen)]
    for key, slot in buffers.items():
        named = [[other for other in side if _end_alike(key, other)] for side in (buffers, port_buffers)]
        is_mask = slot.is_whole and prod(slot.shape) > 1  # or an index, whose meaning may be another there
        if [len(each) for each in named] == [1, 1] and not is_mask and slot.shape == port_buffers[named[1][0]].shape:
            ways = whole(slot, port_buffers[named[1][0]], same_layer=True)
            factors += [ways] if ways else []
    return factors


def is_statistic(key: str) -> bool:
    return words_of(key)[-1] in STATISTICS


def _places(modules: Modules) -> dict[str, str]:
    return {slot.tensor: name for name, module in modules.items() for slot in module.slots.values()}


def _buffers_left(name: str, modules: Modules, linked: set[str], of: Callable[[Module], Slots]) -> Slots:
    return {s.tensor: s for s in of(modules[name]).values() if not s.trained and s.tensor not in linked}


def _left_over(modules: Modules, linked: set[str], reasons: Container[str], prefix: str) -> tuple[Slots, set[str]]:
    slots: Slots = {}
    of_layers: set[str] = set()
    for module in modules.values():
        left = [s for s in needed(module).values() if s.tensor not in linked and prefix + s.key not in reasons]
        slots |= {slot.tensor: slot for slot in left}
        of_layers.update(slot.tensor for slot in left if module.kind)
    return slots, of_layers


def linked_keys(options: Options) -> tuple[set[str], set[str]]:
    linked: set[str] = set()
    port_linked: set[str] = set()
    for each in options.values():
        for link in each[0].links:
            linked.update(link.ref)
            port_linked.update(link.port)
    return linked, port_linked


def combined(factors: Sequence[Sequence[Option]]) -> list[Option]:
    found = []
    for chosen in islice(product(*factors), MOST_OPTIONS):
        links = chain.from_iterable(option.links for option in chosen)
        found.append(Option(tuple(links), all(option.by_name for option in chosen)))
    return sorted(found, key=lambda option: not option.by_name)


def unit_options(ref: Sequence[Module], port: Sequence[Module]) -> tuple[list[Option], dict[str, str]]:
    """(options, {tensor: what does not fit})."""
    if len(ref) > 1:
        return [option.turned for option in join_options(port[0], ref)], {}
    return (join_options(ref[0], port), {}) if len(port) > 1 else _pair_options(ref[0], port[0])


def _pair_options(ref: Module, port: Module) -> tuple[list[Option], dict[str, str]]:
    """By name; in custom modules also by shape, and joined."""
    same_layer = bool(ref.kind) and ref.kind == port.kind
    named = {leaf: whole(slot, port.slots[leaf], same_layer) for leaf, slot in ref.slots.items() if leaf in port.slots}
    factors = [options for options in named.values() if options]

    def left(slots: Slots) -> Slots:
        return {leaf: slot for leaf, slot in slots.items() if not named.get(leaf)}

    mismatches = [(leaf, leaf) for leaf, options in named.items() if same_layer and not options]
    if not same_layer:
        sides, spares = (left(needed(ref)), left(needed(port))), (left(spare(ref)), left(spare(port)))
        factors += _by_shape(*sides)
        factors += _tensor_joins(*sides)
        factors += _unequal_joins(*sides)
        # The statistics of a library's batch norm may be those of an own class.
        for pair in ((sides[0], spares[1]), (spares[0], sides[1]), spares):
            factors += _by_shape(*pair)
        mismatches = list(zip(*sides))
    wrong = {}
    for leaf, port_leaf in mismatches:
        if not is_optional(ref, leaf) and not is_optional(port, port_leaf):
            slot, port_slot = ref.slots[leaf], port.slots[port_leaf]
            wrong[slot.key] = f"shape: reference {slot.shape}, port {port_slot.shape}"
            wrong[f"port's {port_slot.key}"] = ""  # the reference's says it
    return combined(factors), wrong


def whole(ref: Slot, port: Slot, same_layer: bool = False) -> list[Option]:
    """The ways to pair two tensors: as they are, transposed; none if they do not fit."""
    plain, turned = (Link((ref.tensor,), (port.tensor,), transposed=way) for way in (False, True))
    shape, port_shape = squeezed(ref.shape), squeezed(port.shape)
    if ref.is_complex != port.is_complex:  # pairs of real numbers, or a cosine, have another meaning
        return []
    links = [plain] if shape == port_shape else []
    if not same_layer and len(shape) > 1 and exchanged(shape) == port_shape:
        links.append(turned)
    if not links and not same_layer and ref.is_whole == port.is_whole:
        links = [link for link in (plain, turned) if link.views([shape], [port_shape])]
    return [Option((link,)) for link in links]


def _by_shape(ref: Slots, port: Slots, of_layers: Layers = (frozenset(), frozenset())) -> Factors:
    """Take out pairs: those whose names end in the same word first, then same shape; no two of library layers.

    Where there are several of one size all orders are options, for values to choose; some are against the names.
    """
    fitting = []
    for a, b in product(ref, port):
        difference = _difference(ref[a], port[b])
        if difference is not None and not (a in of_layers[0] and b in of_layers[1]):
            fitting.append((not _end_alike(a, b), difference, -similarity(a, b), a, b))
    groups = defaultdict(list)
    for ends_differ, _, _, a, b in sorted(fitting, key=lambda each: each[:3]):
        if a in ref and b in port:
            groups[_size(ref[a]), ref[a].is_buffer].append((ref.pop(a), port.pop(b), not ends_differ))
    factors: Factors = []
    for pairs in groups.values():
        if len(pairs) > MOST_EXCHANGED:
            factors += [whole(one, other) for one, other, _ in pairs]
            continue
        every: list[Option] = []
        for order in permutations(pairs):
            links = [whole(one, other) for (one, _, _), (_, other, _) in zip(pairs, order)]
            by_name = all(now is pair for pair, now in zip(pairs, order) if pair[2])
            every += [replace(option, by_name=by_name) for option in combined(links)]
        factors.append(sorted(every, key=lambda option: not option.by_name))
    return factors


def _end_alike(a: str, b: str) -> bool:
    return words_of(a)[-1] == words_of(b)[-1]


def _difference(ref: Slot, port: Slot) -> int | None:
    if (ref.is_whole, ref.is_complex) != (port.is_whole, port.is_complex):
        return None
    if squeezed(ref.shape) != squeezed(port.shape):
        return 3 if not ref.is_buffer and whole(ref, port) else None
    return 2 if ref.shape != port.shape else int(ref.trained != port.trained)


def similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


ROLES = {"q": "q", "query": "q", "wq": "q", "k": "k", "key": "k", "wk": "k", "v": "v", "value": "v", "wv": "v"}


def words_of(key: str) -> list[str]:
    words = re.split(r"[._]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
    return ["var" if word == "variance" else word for word in words]


def named_order(joined: str, parts: Sequence[str]) -> tuple[int, ...] | None:
    order, roles = _roles(joined, parts)
    return tuple(map(roles.index, order)) if sorted(order) == sorted(roles) else None


def _name_other_parts(names: Sequence[str], port_names: Sequence[str], every: Iterable[str]) -> bool:
    """Whether one is joined of several by its name, such as qkv, and these are k, v, out, where `every` has q, too."""
    (joined, *_), parts = sorted((names, port_names), key=len)
    order, roles = _roles(joined, parts) if len(parts) > 1 else ("", [])
    beside = [name for name in every if _parent(name) == _parent(parts[0])]
    missing = set(order) - set(roles)
    return set() < missing < set(order) and missing <= set(_roles("", beside)[1])


def _roles(joined: str, parts: Sequence[str]) -> tuple[str, list[str]]:
    """(the roles that the name of the joined says, in order, those of its parts)."""
    words = words_of(joined)
    in_proj = "in" in words and "proj" in words  # PyTorch's own attention
    orders = [word for word in words if re.fullmatch("[qkv]{2,3}", word) and len(set(word)) == len(word)]
    said = [[ROLES[word] for word in words_of(part) if word in ROLES] for part in parts]
    return next(iter(orders), "qkv" if in_proj else ""), [each[-1] if each else "" for each in said]


def _joined_options(joins: Sequence[tuple[Slot, Sequence[Slot]]]) -> list[Option]:
    """All in one order; parts of equal shape in every order, whole and head by head."""
    count = len(joins[0][1])
    named = named_order(joins[0][0].tensor, [part.tensor for part in joins[0][1]])
    orders = list(permutations(range(count))) if count <= MOST_EXCHANGED else [tuple(range(count))]
    orders.sort(key=lambda order: order != named)
    heads = [1]
    if all(len({part.shape for part in parts}) == 1 for _, parts in joins):
        width = min(max(squeezed(parts[0].shape), default=1) for _, parts in joins)
        heads += [n for n in range(2, width + 1) if width % n == 0]
    found = []
    for head_count, order in product(heads, orders):
        by_name = named is None or order == named
        ways = []
        for joined, parts in joins:
            ordered = [parts[i] for i in order]
            ways.append([Option((link,), by_name) for link in _ways_to_join(joined, ordered, head_count)])
        found += combined(ways)
    return sorted(found[:MOST_OPTIONS], key=lambda option: not option.by_name)


def _ways_to_join(joined: Slot, parts: Sequence[Slot], heads: int) -> list[Link]:
    if any(part.is_whole != joined.is_whole for part in parts):
        return []
    keys, shapes = tuple(part.tensor for part in parts), [part.shape for part in parts]
    axes = max(1, len(squeezed(joined.shape)))
    ways = product((False, True) if axes > 1 else (False,), range(axes))
    links = [Link((joined.tensor,), keys, axis, heads, transposed) for transposed, axis in ways]
    return [link for link in links if link.views([joined.shape], shapes)]


def _tensor_joins(ref: Slots, port: Slots, of_layers: Layers = (frozenset(), frozenset())) -> Factors:
    def may_be(one: Slot, parts: list[Slot], turned: bool) -> bool:
        keys = [part.tensor for part in parts]
        of_layers_alone = one.tensor in of_layers[turned] and of_layers[not turned] >= set(keys)
        # Those of two library layers need names that say so.
        return (not of_layers_alone or bool(named_order(one.tensor, keys))) and bool(_joined_options([(one, parts)]))

    joins = defaultdict(list)
    for turned, one, parts in _take_joins(ref, port, attrgetter("shape"), may_be):
        joins[turned, len(parts)].append((one, parts))  # all in one order
    factors: Factors = []
    for (turned, _), each in joins.items():
        options = _joined_options(each)
        factors.append([option.turned for option in options] if turned else options)
    return factors


def _unequal_joins(ref: Slots, port: Slots) -> Factors:
    """Of two parts that are as large only together, such as a class token and the tokens of the features."""
    factors: Factors = []
    for is_turned, ones, others in ((False, ref, port), (True, port, ref)):
        for name, one in list(ones.items()):
            for pair in combinations(others, 2):
                parts = [others[part] for part in pair]
                options = _joined_options([(one, parts)]) if sum(map(_size, parts)) == _size(one) else []
                if options:
                    factors.append([option.turned for option in options] if is_turned else options)
                    del ones[name], others[pair[0]], others[pair[1]]
                    break
    return factors


def join_options(one: Module, several: Sequence[Module]) -> list[Option]:
    free, slots = needed(one), [needed(module) for module in several]
    if any(side.keys() != slots[0].keys() for side in slots) or not slots[0]:
        return []
    joins: list[tuple[Slot, list[Slot]]] = []
    single: Slots = {}
    for leaf in sorted(slots[0], key=lambda leaf: -prod(slots[0][leaf].shape)):
        parts = [side[leaf] for side in slots]
        fitting = [name for name in free if _joined_options([(free[name], parts)])]
        if fitting:
            joins.append((free.pop(max(fitting, key=lambda name: similarity(name, leaf))), parts))
        else:
            single |= {part.tensor: part for part in parts}
    wholes = {slot.tensor: slot for slot in free.values()}
    factors = [_joined_options(joins)] if joins else []
    factors += _by_shape(wholes, single)
    return [] if wholes or single else combined(factors)
