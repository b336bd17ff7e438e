"""Pairs of modules and tensors by name, order, type and shape. They are proposals, which values have to confirm."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import islice, permutations, product
from math import prod

from portproof.backends.model import BackendModel, Module, Slot
from portproof.backends.trace import Trace
from portproof.convert.rules import RULES
from portproof.mapping.alignment import align
from portproof.mapping.links import Link, squeezed
from portproof.python39 import zip_strict

OPTIONAL = "num_batches_tracked"  # PaddlePaddle does not have it
MOST_OPTIONS = 240  # of one unit that are tried
MOST_EXCHANGED = 4  # tensors of one shape that are tried in every order

# What a pair of modules costs in an alignment; one left over costs 1000.
SAME_SHAPES, SAME_ELEMENTS, JOINED, SAME_TENSORS_IN_PART, SAME_KIND = 100, 200, 300, 500, 900
APART = 1000  # more, if other modules say that the blocks around the two do not belong together

Modules = Mapping[str, Module]


@dataclass(frozen=True)
class Option:
    """Links that may be right together."""

    links: tuple[Link, ...]
    by_name: bool = True  # names do not say otherwise


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


def is_spare(module: Module, leaf: str) -> bool:
    """Whether the other side may do without this tensor: a buffer that is no library layer's (an index, a mask)."""
    slot = module.slots[leaf]
    of_layer = leaf in RULES.get(module.kind, {}) or bool(module.kind) and leaf.endswith(("_u", "_v"))
    return leaf == OPTIONAL or slot.is_buffer and not of_layer


def needed(module: Module) -> dict[str, Slot]:
    """The tensors of a module that have to have their counterpart."""
    return {leaf: slot for leaf, slot in module.slots.items() if not is_spare(module, leaf)}


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


def _size(module: Module) -> int:
    return sum(prod(slot.shape) for slot in needed(module).values())


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
    return min(attempts, key=lambda units: _left_over(units, ref, port))


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


def _left_over(units: Iterable[Unit], ref: Sequence[Module], port: Sequence[Module]) -> int:
    """How many modules have no counterpart, or one that their tensors do not fit."""
    ref_modules, port_modules = ({module.name: module for module in side} for side in (ref, port))
    pairs = [unit for unit in units if unit.is_pair]
    wrong = sum(bool(_links_within(ref_modules[u.ref[0]], port_modules[u.port[0]])[1]) for u in pairs)
    return len(ref) + len(port) - sum(len(unit.ref) + len(unit.port) for unit in units) + wrong


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
        for ref_places, port_places in align(*parents, cost)
    ]
    taken = {name for unit in units for name in unit.ref}, {name for unit in units for name in unit.port}
    left = [[module for module in side if module.name not in names] for side, names in zip_strict((ref, port), taken)]
    return units + _gathered(*left)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _described(module: Module) -> tuple:
    """All that a cost depends on."""
    return module.kind, tuple((leaf, s.shape, s.trained, is_spare(module, leaf)) for leaf, s in module.slots.items())


def _pair_cost(ref: Module, port: Module, may_differ: bool) -> int | None:
    if signature(ref) == signature(port):
        return 0
    if _shapes(ref) == _shapes(port):
        return SAME_SHAPES
    if _size(ref) == _size(port) and not _links_within(ref, port)[1]:
        return SAME_ELEMENTS
    if not may_differ or ref.kind != port.kind:
        return None
    shapes = [{(leaf, slot.shape) for leaf, slot in needed(module).items()} for module in (ref, port)]
    return SAME_TENSORS_IN_PART if shapes[0] <= shapes[1] or shapes[1] <= shapes[0] else SAME_KIND


def _join_cost(ref: Sequence[Module], port: Sequence[Module]) -> int | None:
    if sum(map(_size, ref)) != sum(map(_size, port)):
        return None
    return JOINED if _links_of_join(ref, port) else None


def _gathered(ref: list[Module], port: list[Module]) -> list[Unit]:
    """One module for the first ones of one signature, wherever they stand, that its tensors are joined from."""
    units = []
    for ones, others, turned in ((ref, port, False), (port, ref, True)):
        for one in list(ones):
            groups = defaultdict(list)
            for other in others:
                groups[signature(other)].append(other)
            for group in groups.values():
                count, rest = divmod(_size(one), _size(group[0]))
                parts = group[:count]
                sides = (parts, [one]) if turned else ([one], parts)
                if not rest and 1 < count == len(parts) and _links_of_join(*sides):
                    units.append(Unit(*(tuple(module.name for module in side) for side in sides)))
                    ones.remove(one)
                    for part in parts:
                        others.remove(part)
                    break
    return units


# Tensors of modules that stand for each other


def fit_units(units: Iterable[Unit], ref: Modules, port: Modules) -> tuple[dict[str, str], list[Unit], list[str]]:
    """({tensor or module: what does not fit}, the units with their options, keys of spare buffers without counterpart).

    What is left of modules of one's own on both sides is fitted last, tensor by tensor, by shape.
    """
    units = list(units)
    problems: dict[str, str] = {}
    left: tuple[dict[str, tuple[Module, str]], dict[str, tuple[Module, str]]] = {}, {}
    reasons: dict[str, str] = {}
    missing = [
        [m for m in side.values() if m.slots and not any(m.name in names for names in taken)]
        for side, taken in ((ref, [u.ref for u in units]), (port, [u.port for u in units]))
    ]
    for i, modules in enumerate(missing):
        for module in modules:
            left[i].update({slot.tensor: (module, leaf) for leaf, slot in module.slots.items()})
    fitted = []
    for unit in units:
        sides = [ref[name] for name in unit.ref], [port[name] for name in unit.port]
        if unit.is_pair:
            factors, wrong = _links_within(sides[0][0], sides[1][0])
            reasons |= wrong
        else:
            factors = _links_of_join(*sides)
        options = _combined(factors)
        linked = [{key for link in options[0].links for key in getattr(link, side)} for side in ("ref", "port")]
        for i, modules in enumerate(sides):
            for module in modules:
                free = {s.tensor: (module, leaf) for leaf, s in module.slots.items() if s.tensor not in linked[i]}
                left[i].update(free)
        fitted.append(replace(unit, options=options))
    loose = _loose(left, reasons)
    if loose:
        fitted.append(Unit((), (), loose))
        for link in loose[0].links:
            for side, keys in zip_strict(left, (link.ref, link.port)):
                for key in keys:
                    side.pop(key)
    for i, modules in enumerate(missing):
        other, prefix = ("port", "") if i == 0 else ("reference", "port's ")
        for module in modules:
            lost = [key for key, (owner, leaf) in left[i].items() if owner is module and not is_spare(owner, leaf)]
            if lost and len(lost) == len(needed(module)):
                problems[prefix + module.name] = f"the {other} has no {module.type} for it"
                for key in lost:
                    left[i].pop(key)
    counterparts = {name: unit.port for unit in units for name in unit.ref}, {n: u.ref for u in units for n in u.port}
    for i, prefix in enumerate(("", "port's ")):
        for module, leaf in left[i].values():
            slot = module.slots[leaf]
            there = ", ".join(counterparts[i].get(module.name, ())) or "model"
            reason = reasons.get(prefix + slot.key, f"the {'reference' if i else 'port'}'s {there} does not have it")
            if reason and not is_spare(module, leaf):
                problems[prefix + slot.key] = reason
    spare = [
        prefix + module.slots[leaf].key
        for i, prefix in enumerate(("", "port's "))
        for module, leaf in left[i].values()
        if leaf != OPTIONAL and is_spare(module, leaf)
    ]
    return problems, fitted, spare


def _combined(factors: Sequence[Sequence[Option]]) -> list[Option]:
    """Every choice of one option of each factor, as one option; what names say first."""
    found = [
        Option(tuple(link for option in chosen for link in option.links), all(option.by_name for option in chosen))
        for chosen in islice(product(*factors), MOST_OPTIONS)
    ]
    return sorted(found, key=lambda option: not option.by_name)


def _links_within(ref: Module, port: Module) -> tuple[list[list[Option]], dict[str, str]]:
    """(factors of the options, {tensor: what does not fit}) of one module and its counterpart.

    Tensors of one name; in modules of one's own then those of one shape, of the same elements, of any shape.
    """
    same_layer = bool(ref.kind) and ref.kind == port.kind
    free = dict(ref.slots), dict(port.slots)
    factors: list[list[Option]] = []
    wrong: dict[str, str] = {}

    def mismatch(leaf: str, port_leaf: str) -> None:
        a, b = free[0].pop(leaf), free[1].pop(port_leaf)
        if not is_spare(ref, leaf) and not is_spare(port, port_leaf):
            wrong[a.key] = f"shape: reference {a.shape}, port {b.shape}"
            wrong[f"port's {b.key}"] = ""  # said of the reference's

    for leaf in [leaf for leaf in ref.slots if leaf in port.slots]:
        found = _whole(ref.slots[leaf], port.slots[leaf], same_layer)
        if found:
            factors.append(found)
            free[0].pop(leaf), free[1].pop(leaf)
        elif same_layer or is_spare(ref, leaf):
            mismatch(leaf, leaf)
    if same_layer:
        return factors, wrong
    spare = {leaf for leaf in ref.slots if is_spare(ref, leaf)}, {leaf for leaf in port.slots if is_spare(port, leaf)}
    factors += _by_shape(*free, lambda leaf, port_leaf: (leaf in spare[0]) == (port_leaf in spare[1]))
    rest = [{leaf: s for leaf, s in side.items() if leaf not in spares} for side, spares in zip_strict(free, spare)]
    factors += _joins_among(*rest)
    for leaf, port_leaf in zip(list(rest[0]), list(rest[1])):
        mismatch(leaf, port_leaf)
    return factors, wrong


def _whole(ref: Slot, port: Slot, same_layer: bool) -> list[Option]:
    """The ways in which one tensor may be the other."""
    if same_layer:
        return [Option((Link((ref.tensor,), (port.tensor,)),))] if squeezed(ref.shape) == squeezed(port.shape) else []
    ways = [Link((ref.tensor,), (port.tensor,), transposed=way) for way in (False, True)]
    shape, port_shape = squeezed(ref.shape), squeezed(port.shape)
    turned = len(shape) > 1 and shape[:-2] + shape[:-3:-1] == port_shape
    found = [Option((ways[0],))] * (shape == port_shape) + [Option((ways[1],))] * turned
    same_type = ref.is_whole == port.is_whole
    return found or [Option((way,)) for way in ways if same_type and way.fits([shape], [port_shape])]


def _by_shape(
    ref: dict[str, Slot], port: dict[str, Slot], may_be: Callable[[str, str], bool] = lambda a, b: True
) -> list[list[Option]]:
    """Factors of the tensors, by name, that are wholes of each other, which are taken out of both sides.

    The same shape comes before the same elements, and similar names before others; those of one shape are also tried
    in every other order.
    """

    def alike(a: str, b: str) -> bool:
        return ref[a].is_whole == port[b].is_whole and may_be(a, b)

    tests = [
        lambda a, b: ref[a].shape == port[b].shape and ref[a].trained == port[b].trained and alike(a, b),
        lambda a, b: ref[a].shape == port[b].shape and alike(a, b),
        lambda a, b: squeezed(ref[a].shape) == squeezed(port[b].shape) and alike(a, b),
        lambda a, b: not ref[a].is_buffer and bool(_whole(ref[a], port[b], False)) and alike(a, b),
    ]
    factors: list[list[Option]] = []
    for test in tests:
        fitting = [(-similarity(a, b), i, j, a, b) for i, a in enumerate(ref) for j, b in enumerate(port) if test(a, b)]
        groups = defaultdict(list)
        for *_, a, b in sorted(fitting):
            if a in ref and b in port:
                groups[squeezed(ref[a].shape), squeezed(port[b].shape)].append((ref.pop(a), port.pop(b)))
        for pairs in groups.values():
            if 1 < len(pairs) <= MOST_EXCHANGED:
                orders = permutations([b for _, b in pairs])
                every = [[_whole(a, b, False) for (a, _), b in zip_strict(pairs, order)] for order in orders]
                factors.append([option for chosen in every for option in _combined(chosen)])
            else:
                factors += [_whole(a, b, False) for a, b in pairs]
    return factors


def similarity(a: str, b: str) -> float:
    """How much two names have in common, 0 to 1."""
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def _loose(
    left: tuple[dict[str, tuple[Module, str]], dict[str, tuple[Module, str]]], reasons: Mapping[str, str]
) -> list[Option]:
    """Options of tensors that stand in other modules on the other side; of two, one is in a module of one's own."""
    sides = [
        {
            key: module.slots[leaf]
            for key, (module, leaf) in side.items()
            if not is_spare(module, leaf) and prefix + module.slots[leaf].key not in reasons
        }
        for side, prefix in zip_strict(left, ("", "port's "))
    ]
    own = [{key for key in side if not found[key][0].kind} for side, found in zip_strict(sides, left)]
    factors = _by_shape(*sides, lambda key, port_key: key in own[0] or port_key in own[1])
    factors += _joins_among({k: s for k, s in sides[0].items() if k in own[0]}, sides[1], turned=False)
    factors += _joins_among(sides[0], {k: s for k, s in sides[1].items() if k in own[1]}, turned=True)
    return _combined(factors) if factors else []


# Joined tensors


def join_options(ref: Sequence[Module], port: Sequence[Module]) -> list[Option]:
    """The ways in which one module's tensors are joined from several modules'; none if they do not join up."""
    factors = _links_of_join(ref, port)
    return _combined(factors) if factors else []


ROLES = {
    name: role
    for role, names in {"q": "q query wq", "k": "k key wk", "v": "v value wv"}.items()
    for name in names.split()
}


def _words(key: str) -> list[str]:
    return re.split(r"[._]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())


def _named_order(joined: str, parts: Sequence[str]) -> list[int] | None:
    """The order of the parts of a joined tensor, if names say it: query, key and value in a "qkv"."""
    words = _words(joined)
    in_proj = "in" in words and "proj" in words  # PyTorch's own attention
    order = next(
        (w for w in words if re.fullmatch("[qkv]{2,3}", w) and len(set(w)) == len(w)), "qkv" if in_proj else ""
    )
    roles = [next((ROLES[word] for word in reversed(_words(part)) if word in ROLES), "") for part in parts]
    return [roles.index(role) for role in order] if sorted(order) == sorted(roles) else None


def _joined_options(joins: Sequence[tuple[Slot, Sequence[Slot]]], joined_is_ref: bool) -> list[Option]:
    """The ways in which tensors are joined from parts, all in one order: each is (the joined one, its parts).

    Parts of equal shape are tried in every order, one after another, and head by head.
    """
    count = len(joins[0][1])
    named = _named_order(joins[0][0].tensor, [part.tensor for part in joins[0][1]])
    orders = list(permutations(range(count))) if count <= MOST_EXCHANGED else [tuple(range(count))]
    if named:
        orders.sort(key=lambda order: order != tuple(named))
    equal = all(len({part.shape for part in parts}) == 1 for _, parts in joins)
    width = min(max((n for n in squeezed(parts[0].shape)), default=1) for _, parts in joins)
    heads = [1, *(n for n in range(2, width + 1) if width % n == 0)] if equal else [1]
    found = []
    for head_count, order in product(heads, orders):
        ways = []
        for joined, parts in joins:
            turned = [parts[i] for i in order]
            keys = (joined.tensor,), tuple(part.tensor for part in turned)
            forms = (
                Link(*(keys if joined_is_ref else keys[::-1]), axis, head_count, transposed)
                for transposed in (False, True)[: 1 + (len(squeezed(joined.shape)) > 1)]
                for axis in range(max(1, len(squeezed(joined.shape))))
            )
            shapes = [joined.shape], [part.shape for part in turned]
            shapes = shapes if joined_is_ref else shapes[::-1]
            ways.append(
                [Option((link,), named is None or list(order) == named) for link in forms if link.fits(*shapes)]
            )
        found += _combined(ways)
    return sorted(found[:MOST_OPTIONS], key=lambda option: not option.by_name)


def _joins_among(ref: dict[str, Slot], port: dict[str, Slot], turned: bool | None = None) -> list[list[Option]]:
    """Factors of tensors of one side that are joined from several of one shape of the other; taken out of both.

    `turned`: only the port's may be joined, or only the reference's.
    """
    factors = []
    for ones, others, joined_is_ref in ((ref, port, True), (port, ref, False)):
        if turned is joined_is_ref:
            continue
        joins = defaultdict(list)
        for leaf, one in list(ones.items()):
            groups = defaultdict(list)
            for name, other in others.items():
                groups[other.shape].append(name)
            for shape, names in groups.items():
                count, rest = divmod(prod(one.shape), max(1, prod(shape)))
                parts = [others[name] for name in names[:count]]
                if not rest and 1 < count == len(parts) and _joined_options([(one, parts)], joined_is_ref):
                    joins[count].append((ones.pop(leaf), parts))
                    for name in names[:count]:
                        others.pop(name)
                    break
        factors += [_joined_options(each, joined_is_ref) for each in joins.values()]
    return factors


def _links_of_join(ref: Sequence[Module], port: Sequence[Module]) -> list[list[Option]]:
    """Factors of one module for several of the other side; nothing unless they cover all tensors that are needed.

    A tensor is joined from those that have one name in the several, or has its counterpart in one of them.
    """
    one, several, one_is_ref = (ref[0], port, True) if len(ref) == 1 else (port[0], ref, False)
    free, slots = needed(one), [needed(module) for module in several]
    if any(side.keys() != slots[0].keys() for side in slots) or not slots[0]:
        return []
    joins, factors = [], []
    single = {}
    for leaf in sorted(slots[0], key=lambda leaf: -prod(slots[0][leaf].shape)):
        parts = [side[leaf] for side in slots]
        fitting = [name for name in free if _joined_options([(free[name], parts)], one_is_ref)]
        name = max(fitting, key=lambda name: similarity(name, leaf), default=None)
        if name is not None:
            joins.append((free.pop(name), parts))
        else:
            single |= {part.tensor: part for part in parts}
    wholes = {slot.tensor: slot for slot in free.values()}
    if single or wholes:
        factors += _by_shape(*((wholes, single) if one_is_ref else (single, wholes)))
    if single or wholes:
        return []
    return ([_joined_options(joins, one_is_ref)] if joins else []) + factors
