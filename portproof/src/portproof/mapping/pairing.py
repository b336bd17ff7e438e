"""Pairs of modules and tensors by name, order, type and shape. They are proposals, which values have to confirm."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import islice, permutations, product
from math import prod
from operator import attrgetter
from typing import TypeVar

from portproof.backends.model import BackendModel
from portproof.backends.slots import Module, Slot
from portproof.backends.trace import Trace
from portproof.convert.rules import COUNT, RULES
from portproof.mapping.alignment import align_sequences
from portproof.mapping.links import Link, exchanged, squeezed
from portproof.python39 import zip_strict

MOST_OPTIONS = 240  # of one unit that are tried
MOST_EXCHANGED = 4  # tensors of one shape that are tried in every order

# What a pair of modules costs in an alignment; one left over costs 1000.
SAME_SHAPES, SAME_ELEMENTS, JOINED, SAME_TENSORS_IN_PART, SAME_KIND = 100, 200, 300, 500, 900
APART = 1000  # more, if other modules say that the blocks around the two do not belong together

Modules = Mapping[str, Module]
T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """Links that may be right together."""

    links: tuple[Link, ...]
    by_name: bool = True  # names do not say otherwise

    @property
    def turned(self) -> Option:
        """The same from the port to the reference."""
        return replace(self, links=tuple(link.turned for link in self.links))


@dataclass
class Unit:
    """Modules whose tensors stand for each other, and the ways in which they may: one for one, or one for several."""

    ref: tuple[str, ...]
    port: tuple[str, ...]
    options: list[Option] = field(default_factory=lambda: [Option(())])

    @property
    def is_pair(self) -> bool:
        """Whether it is one module for one."""
        return len(self.ref) == len(self.port) == 1


# Modules and their tensors


def is_optional(module: Module, leaf: str) -> bool:
    """Whether the other side may do without this tensor: a buffer that is no library layer's (an index, a mask)."""
    slot = module.slots[leaf]
    of_layer = leaf in RULES.get(module.kind, {}) or bool(module.kind) and leaf.endswith(("_u", "_v"))
    return leaf == COUNT or slot.is_buffer and not of_layer


def needed(module: Module) -> dict[str, Slot]:
    """The tensors of a module that have to have their counterpart."""
    return {leaf: slot for leaf, slot in module.slots.items() if not is_optional(module, leaf)}


def spare(module: Module) -> dict[str, Slot]:
    """Those that the other side may do without."""
    return {leaf: slot for leaf, slot in module.slots.items() if is_optional(module, leaf)}


def modules_with_tensors(modules: Modules, trace: Trace) -> list[Module]:
    """The modules with tensors of their own, in the order of their first call.

    One that is never called follows the one before it in order of definition.
    """
    called = dict.fromkeys(call.name for call in sorted(trace.calls.values(), key=lambda call: call.start))
    names = [name for name in called if name in modules and modules[name].slots]
    before = None
    for name, module in modules.items():
        if module.slots and name not in called:
            names.insert(names.index(before) + 1 if before is not None else 0, name)
        before = name if module.slots else before
    return [modules[name] for name in names]


def _shapes(module: Module) -> tuple:
    return tuple(sorted(slot.shape for slot in needed(module).values()))


def _elements(module: Module) -> tuple:
    return tuple(sorted(squeezed(slot.shape) for slot in needed(module).values()))


def _elements_in(slot: Slot) -> int:
    return prod(slot.shape)


def _size(module: Module) -> int:
    return sum(map(_elements_in, needed(module).values()))


def signature(module: Module) -> tuple:
    """What two modules must share to stand for each other: the kind of layer and the shapes of its tensors."""
    if not module.kind:
        return "", _shapes(module)
    shapes = {leaf: slot.shape for leaf, slot in needed(module).items()}
    return module.kind.rstrip("123d").replace("SyncBatchNorm", "BatchNorm"), tuple(sorted(shapes.items()))


def contents_of(model: BackendModel, ref_keys: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """{module: the tensors in it and in what it holds}, by the reference's keys: {this side's: the reference's}."""
    found = defaultdict(set)
    for name, module in model.modules.items():
        keys = {ref_keys[slot.key] for slot in module.slots.values() if slot.key in ref_keys}
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            found[".".join(parts[:depth])] |= keys
    return {name: frozenset(keys) for name, keys in found.items()}


# Modules of one side for those of the other


def complete_pairs(pairs: dict[str, str], ref: Sequence[Module], port: Sequence[Module]) -> list[Unit]:
    """Units of the `pairs` of names and of the modules left, by order; in the reference's order."""
    ref_left = [module for module in ref if module.name not in pairs]
    port_left = [module for module in port if module.name not in pairs.values()]
    units = [Unit((name,), (port_name,)) for name, port_name in pairs.items()]
    for of_need in (True, False):  # what holds only spare buffers makes no difference to the order of the others
        sides = [[module for module in side if bool(needed(module)) == of_need] for side in (ref_left, port_left)]
        units += _by_order(*sides, pairs) if of_need else _spare_by_order(*sides)
    place = {module.name: i for i, module in enumerate(ref)}
    return sorted(units, key=lambda unit: place.get(unit.ref[0], -1))


def _by_order(ref: Sequence[Module], port: Sequence[Module], pairs: Mapping[str, str]) -> list[Unit]:
    """Those of one signature, of the same shapes, or at least of the same elements, in turn; else in an alignment.

    `pairs` are those of other modules, which say what blocks belong together.
    """
    for key in (signature, _shapes, _elements):
        units = _in_turn(ref, port, key)
        if units:
            return units
    attempts = [_aligned(ref, port, pairs, may_differ) for may_differ in (False, True)]
    return min(attempts, key=lambda units: count_unmatched(units, ref, port))


def _spare_by_order(ref: Sequence[Module], port: Sequence[Module]) -> list[Unit]:
    """Modules that hold nothing but spare buffers: of the same shapes in turn, else of one name."""
    units = _in_turn(ref, port, lambda module: tuple(sorted(slot.shape for slot in module.slots.values())))
    ports = {module.name for module in port}
    return units or [Unit((module.name,), (module.name,)) for module in ref if module.name in ports]


def _in_turn(ref: Sequence[Module], port: Sequence[Module], key: Callable[[Module], tuple]) -> list[Unit]:
    """The n-th of a key with the n-th, if both sides have as many of each; else nothing."""
    if Counter(map(key, ref)) != Counter(map(key, port)):
        return []
    queues = defaultdict(list)
    for module in port:
        queues[key(module)].append(module.name)
    return [Unit((module.name,), (queues[key(module)].pop(0),)) for module in ref]


def count_unmatched(units: Iterable[Unit], ref: Sequence[Module], port: Sequence[Module]) -> int:
    """How many modules have no counterpart, or one that their tensors do not fit."""
    ref_modules, port_modules = ({module.name: module for module in side} for side in (ref, port))
    count = len(ref) + len(port)
    for unit in units:
        count -= len(unit.ref) + len(unit.port)
        if unit.is_pair and pair_options(ref_modules[unit.ref[0]], port_modules[unit.port[0]])[1]:
            count += 1
    return count


def _aligned(ref: Sequence[Module], port: Sequence[Module], pairs: Mapping[str, str], may_differ: bool) -> list[Unit]:
    """Units of an alignment; then one of what is left over for the first that its tensors are joined from.

    With `may_differ` layers of one kind may stand for each other though their tensors do not fit.
    """
    costs: dict[tuple, int | None] = {}
    blocks = {(_parent(name), _parent(port_name)) for name, port_name in pairs.items()}
    settled = {block for block, _ in blocks}, {block for _, block in blocks}

    def cost(ref_places: tuple[int, ...], port_places: tuple[int, ...]) -> int | None:
        sides = [ref[i] for i in ref_places], [port[i] for i in port_places]
        key = tuple(tuple(map(_described, side)) for side in sides)
        if key not in costs:
            one_to_one = len(ref_places) == len(port_places)
            costs[key] = _pair_cost(*sides[0], *sides[1], may_differ) if one_to_one else _join_cost(*sides)
        around = _parent(sides[0][0].name), _parent(sides[1][0].name)
        apart = around not in blocks and (around[0] in settled[0] or around[1] in settled[1])
        return None if costs[key] is None else costs[key] + APART * apart

    parents = [[_parent(module.name) for module in side] for side in (ref, port)]
    units = [
        Unit(tuple(ref[i].name for i in ref_places), tuple(port[i].name for i in port_places))
        for ref_places, port_places in align_sequences(*parents, cost)
    ]
    return units + joins_of_leftovers(*_without(units, ref, port))


def _without(units: Iterable[Unit], ref: Iterable[Module], port: Iterable[Module]) -> tuple[list[Module], list[Module]]:
    """The modules that are in none of the units."""
    taken, port_taken = {name for unit in units for name in unit.ref}, {name for unit in units for name in unit.port}
    return [m for m in ref if m.name not in taken], [m for m in port if m.name not in port_taken]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _described(module: Module) -> tuple:
    """All that a cost depends on."""
    return module.kind, tuple((leaf, s.shape, s.trained, is_optional(module, leaf)) for leaf, s in module.slots.items())


def _pair_cost(ref: Module, port: Module, may_differ: bool) -> int | None:
    if signature(ref) == signature(port):
        return 0
    if _shapes(ref) == _shapes(port):
        return SAME_SHAPES
    if _size(ref) == _size(port) and not pair_options(ref, port)[1]:
        return SAME_ELEMENTS
    if not may_differ or ref.kind != port.kind:
        return None
    shapes = [{(leaf, slot.shape) for leaf, slot in needed(module).items()} for module in (ref, port)]
    return SAME_TENSORS_IN_PART if shapes[0] <= shapes[1] or shapes[1] <= shapes[0] else SAME_KIND


def _join_cost(ref: Sequence[Module], port: Sequence[Module]) -> int | None:
    if sum(map(_size, ref)) != sum(map(_size, port)):
        return None
    return JOINED if join_options(ref, port) else None


def joins_of_leftovers(ref: Sequence[Module], port: Sequence[Module]) -> list[Unit]:
    """One module for the first ones of one signature, wherever they stand, that its tensors are joined from."""
    joins = _joins(ref, port, signature, _size, lambda one, parts: join_options([one], parts))
    units = [Unit((one.name,), tuple(part.name for part in parts)) for one, parts in joins]
    ref, port = _without(units, ref, port)
    joins = _joins(port, ref, signature, _size, lambda one, parts: join_options(parts, [one]))
    return units + [Unit(tuple(part.name for part in parts), (one.name,)) for one, parts in joins]


def _joins(
    ones: Iterable[T],
    others: Iterable[T],
    key: Callable[[T], Hashable],
    size: Callable[[T], int],
    may_be: Callable[[T, list[T]], object],
) -> list[tuple[T, list[T]]]:
    """(one, the first of the others with one key that are as large together), where it `may_be`; each other once."""
    found, free = [], list(others)
    for one in ones:
        groups = defaultdict(list)
        for other in free:
            groups[key(other)].append(other)
        for group in groups.values():
            count, rest = divmod(size(one), max(1, size(group[0])))
            parts = group[:count]
            if not rest and 1 < count == len(parts) and may_be(one, parts):
                found.append((one, parts))
                free = [other for other in free if other not in parts]
                break
    return found


# Tensors of modules that stand for each other


def fit_units(units: Iterable[Unit], ref: Modules, port: Modules) -> tuple[dict[str, str], list[Unit], list[str]]:
    """({tensor or module: what does not fit}, the units with their options, keys of spare buffers without counterpart).

    What is left of modules of one's own on both sides is fitted last, tensor by tensor, by shape.
    """
    fitted: list[Unit] = []
    reasons: dict[str, str] = {}
    for unit in units:
        sides = [ref[name] for name in unit.ref], [port[name] for name in unit.port]
        if unit.is_pair:
            options, wrong = pair_options(sides[0][0], sides[1][0])
            reasons |= wrong
        else:
            options = join_options(*sides)
        fitted.append(replace(unit, options=options))
    linked, port_linked = linked_keys(unit.options[0] for unit in fitted)
    unowned = match_unowned_tensors(
        [(m, s) for m, s in _needed_without(ref, linked) if s.key not in reasons],
        [(m, s) for m, s in _needed_without(port, port_linked) if f"port's {s.key}" not in reasons],
    )
    if unowned:
        fitted.append(Unit((), (), unowned))
        linked, port_linked = linked_keys(unit.options[0] for unit in fitted)
    counterparts = {name: unit.port for unit in fitted for name in unit.ref}
    port_counterparts = {name: unit.ref for unit in fitted for name in unit.port}
    missing, wrong = _problems(ref, linked, counterparts, reasons, "", "port")
    port_missing, port_wrong = _problems(port, port_linked, port_counterparts, reasons, "port's ", "reference")
    return (
        missing | port_missing | wrong | port_wrong,
        fitted,
        _spare_keys(ref, linked, "") + _spare_keys(port, port_linked, "port's "),
    )


def _needed_without(modules: Modules, linked: set[str]) -> list[tuple[Module, Slot]]:
    """(module, tensor) of those that have to have their counterpart and are not linked, by state_dict key."""
    slots = ((module, slot) for module in modules.values() for slot in needed(module).values())
    return [(module, slot) for module, slot in slots if slot.tensor not in linked]


def _spare_keys(modules: Modules, linked: set[str], prefix: str) -> list[str]:
    """The keys of buffers that need no counterpart and have none."""
    slots = [(leaf, slot) for module in modules.values() for leaf, slot in spare(module).items()]
    return [prefix + slot.key for leaf, slot in slots if leaf != COUNT and slot.tensor not in linked]


def _problems(
    modules: Modules,
    linked: set[str],
    counterparts: Mapping[str, tuple[str, ...]],
    reasons: Mapping[str, str],
    prefix: str,
    other: str,
) -> tuple[dict[str, str], dict[str, str]]:
    """({module: what does not fit}, {tensor: what does not fit}) of tensors that have to be linked and are not.

    `counterparts` are {module: the `other` model's}, `reasons` what is known of tensors; all names get the `prefix`.
    """
    missing, wrong = {}, {}
    for module in modules.values():
        lost = [prefix + slot.key for slot in needed(module).values() if slot.tensor not in linked]
        there = ", ".join(counterparts.get(module.name, ()))
        if lost and not there and len(lost) == len(needed(module)):
            missing[prefix + module.name] = f"the {other} has no {module.type} for it"
        else:
            wrong |= {key: reasons.get(key, f"the {other}'s {there or 'model'} does not have it") for key in lost}
    return missing, {key: reason for key, reason in wrong.items() if reason}


def linked_keys(options: Iterable[Option]) -> tuple[set[str], set[str]]:
    """The state_dict keys of the reference's tensors and of the port's that the links of these options name."""
    links = [link for option in options for link in option.links]
    return {key for link in links for key in link.ref}, {key for link in links for key in link.port}


Slots = dict[str, Slot]
Factors = list[list[Option]]  # one option of each is chosen


def _unlinked(factors: Factors, ref: Slots, port: Slots) -> tuple[Slots, Slots]:
    """Both sides without the tensors that the factors link."""
    linked, port_linked = linked_keys(options[0] for options in factors)
    return (
        {name: slot for name, slot in ref.items() if slot.tensor not in linked},
        {name: slot for name, slot in port.items() if slot.tensor not in port_linked},
    )


def _combined(factors: Sequence[Sequence[Option]]) -> list[Option]:
    """Every choice of one option of each factor, as one option; what names say first."""
    found = [
        Option(tuple(link for option in chosen for link in option.links), all(option.by_name for option in chosen))
        for chosen in islice(product(*factors), MOST_OPTIONS)
    ]
    return sorted(found, key=lambda option: not option.by_name)


def pair_options(ref: Module, port: Module) -> tuple[list[Option], dict[str, str]]:
    """(options, {tensor: what does not fit}) of one module and its counterpart.

    Tensors of one name; in modules of one's own then those of one shape, of the same elements, of any shape.
    """
    same_layer = bool(ref.kind) and ref.kind == port.kind
    factors: Factors = []
    mismatches: list[tuple[str, str]] = []
    for leaf in [leaf for leaf in ref.slots if leaf in port.slots]:
        found = _whole(ref.slots[leaf], port.slots[leaf], same_layer)
        if found:
            factors.append(found)
        elif same_layer:
            mismatches.append((leaf, leaf))
    if not same_layer:
        for tensors in (needed, spare):
            factors += _by_shape(*_unlinked(factors, tensors(ref), tensors(port)))
        sides = _unlinked(factors, needed(ref), needed(port))
        factors += _tensor_joins(*sides, *sides)
        mismatches += zip(*_unlinked(factors, *sides))
    wrong = {}
    for leaf, port_leaf in mismatches:
        if not is_optional(ref, leaf) and not is_optional(port, port_leaf):
            slot, port_slot = ref.slots[leaf], port.slots[port_leaf]
            wrong[slot.key] = f"shape: reference {slot.shape}, port {port_slot.shape}"
            wrong[f"port's {port_slot.key}"] = ""  # said of the reference's
    return _combined(factors), wrong


def _whole(ref: Slot, port: Slot, same_layer: bool = False) -> list[Option]:
    """The ways in which one tensor may be the other."""
    plain, turned = (Link((ref.tensor,), (port.tensor,), transposed=way) for way in (False, True))
    shape, port_shape = squeezed(ref.shape), squeezed(port.shape)
    links = [plain] if shape == port_shape else []
    if not same_layer and len(shape) > 1 and exchanged(shape) == port_shape:
        links.append(turned)
    if not links and not same_layer and ref.is_whole == port.is_whole:
        links = [link for link in (plain, turned) if link.fits([shape], [port_shape])]
    return [Option((link,)) for link in links]


def _by_shape(ref: Slots, port: Slots, may_be: Callable[[str, str], bool] = lambda a, b: True) -> Factors:
    """Factors of the tensors, by name, that are wholes of each other.

    The same shape comes before the same elements, and similar names before others; those of one shape are also tried
    in every other order.
    """
    ref, port = dict(ref), dict(port)
    tests: list[Callable[[Slot, Slot], bool]] = [
        lambda a, b: a.shape == b.shape and a.trained == b.trained,
        lambda a, b: a.shape == b.shape,
        lambda a, b: squeezed(a.shape) == squeezed(b.shape),
        lambda a, b: not a.is_buffer and bool(_whole(a, b)),
    ]
    factors: Factors = []
    for test in tests:
        fitting = [
            (-similarity(a, b), i, j, a, b)
            for i, a in enumerate(ref)
            for j, b in enumerate(port)
            if ref[a].is_whole == port[b].is_whole and may_be(a, b) and test(ref[a], port[b])
        ]
        groups = defaultdict(list)
        for *_, a, b in sorted(fitting):
            if a in ref and b in port:
                groups[squeezed(ref[a].shape), squeezed(port[b].shape)].append((ref.pop(a), port.pop(b)))
        for pairs in groups.values():
            if 1 < len(pairs) <= MOST_EXCHANGED:
                factors.append(_in_every_order(pairs))
            else:
                factors += [_whole(a, b) for a, b in pairs]
    return factors


def _in_every_order(pairs: Sequence[tuple[Slot, Slot]]) -> list[Option]:
    """The ways in which the first tensors of the pairs may be the second, in any order; that of the pairs first."""
    options = []
    for order in permutations([b for _, b in pairs]):
        options += _combined([_whole(a, b) for (a, _), b in zip_strict(pairs, order)])
    return options


def similarity(a: str, b: str) -> float:
    """How much two names have in common, 0 to 1."""
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def match_unowned_tensors(ref: Iterable[tuple[Module, Slot]], port: Iterable[tuple[Module, Slot]]) -> list[Option]:
    """Options of tensors, each with its module, that stand in other modules on the other side.

    At least one of the two modules, or that of the joined tensor, is no layer of the library's.
    """
    slots, port_slots = ({slot.tensor: slot for _, slot in side} for side in (ref, port))
    own, port_own = ({slot.tensor: slot for module, slot in side if not module.kind} for side in (ref, port))
    factors = _by_shape(slots, port_slots, lambda key, port_key: key in own or port_key in port_own)
    left, own_left = _unlinked(factors, slots, port_slots), _unlinked(factors, own, port_own)
    factors += _tensor_joins(*left, *own_left)
    return _combined(factors) if factors else []


# Joined tensors: the joined ones stand for the reference's


ROLES = {"q": "q", "query": "q", "wq": "q", "k": "k", "key": "k", "wk": "k", "v": "v", "value": "v", "wv": "v"}


def _words(key: str) -> list[str]:
    return re.split(r"[._]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())


def _named_order(joined: str, parts: Sequence[str]) -> tuple[int, ...] | None:
    """The order of the parts of a joined tensor, if names say it: query, key and value in a "qkv"."""
    words = _words(joined)
    in_proj = "in" in words and "proj" in words  # PyTorch's own attention
    order = next(
        (w for w in words if re.fullmatch("[qkv]{2,3}", w) and len(set(w)) == len(w)), "qkv" if in_proj else ""
    )
    roles = [next((ROLES[word] for word in reversed(_words(part)) if word in ROLES), "") for part in parts]
    return tuple(roles.index(role) for role in order) if sorted(order) == sorted(roles) else None


def _joined_options(joins: Sequence[tuple[Slot, Sequence[Slot]]]) -> list[Option]:
    """The ways in which tensors are joined from parts, all in one order: each is (the joined one, its parts).

    Parts of equal shape are tried in every order, one after another, and head by head.
    """
    count = len(joins[0][1])
    named = _named_order(joins[0][0].tensor, [part.tensor for part in joins[0][1]])
    orders = list(permutations(range(count))) if count <= MOST_EXCHANGED else [tuple(range(count))]
    if named:
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
            links = _ways_to_join(joined, [parts[i] for i in order], head_count)
            ways.append([Option((link,), by_name) for link in links])
        found += _combined(ways)
    return sorted(found[:MOST_OPTIONS], key=lambda option: not option.by_name)


def _ways_to_join(joined: Slot, parts: Sequence[Slot], heads: int) -> list[Link]:
    """The links of a tensor with its parts in this order that add up: stored as it is or transposed, along any axis."""
    keys, shapes = tuple(part.tensor for part in parts), [part.shape for part in parts]
    axes = max(1, len(squeezed(joined.shape)))
    links = [
        Link((joined.tensor,), keys, axis, heads, transposed)
        for transposed in ((False, True) if axes > 1 else (False,))
        for axis in range(axes)
    ]
    return [link for link in links if link.fits([joined.shape], shapes)]


def _tensor_joins(ref: Slots, port: Slots, ref_ones: Slots, port_ones: Slots) -> Factors:
    """Factors of those of `ref_ones` and `port_ones` that are joined from several tensors of the other side."""
    factors = _joins_of_tensors(ref_ones, port)
    ref, port_ones = _unlinked(factors, ref, port_ones)
    return factors + [[option.turned for option in options] for options in _joins_of_tensors(port_ones, ref)]


def _joins_of_tensors(ones: Slots, others: Slots) -> Factors:
    """Factors of those that are joined from several of the others; from as many each, in one order."""
    joins = defaultdict(list)
    for one, parts in _joins(
        ones.values(), others.values(), attrgetter("shape"), _elements_in, lambda *join: _joined_options([join])
    ):
        joins[len(parts)].append((one, parts))
    return [_joined_options(each) for each in joins.values()]


def join_options(ref: Sequence[Module], port: Sequence[Module]) -> list[Option]:
    """The ways in which one module's tensors are joined from several modules'; none if they do not join up."""
    if len(ref) > 1:
        return [option.turned for option in join_options(port, ref)]
    factors = _join_factors(ref[0], port)
    return _combined(factors) if factors else []


def _join_factors(one: Module, several: Sequence[Module]) -> Factors:
    """Factors of one module for several; nothing unless they cover all tensors that are needed.

    A tensor is joined from those that have one name in the several, or has its counterpart in one of them.
    """
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
    factors = _by_shape(wholes, single)
    if any(_unlinked(factors, wholes, single)):
        return []
    return ([_joined_options(joins)] if joins else []) + factors
