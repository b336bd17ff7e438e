"""Map the reference's modules and tensors to the port's by name, order, type and shape, or by equal weights.

Values confirm a map (see map_search.py); where they cannot, nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np

from portproof.backends.model import BackendModel, Model
from portproof.backends.slots import Module, Slot
from portproof.backends.trace import Inputs
from portproof.compare import Verdict, compare, tensor_item
from portproof.compare.ruler import SEMANTIC_RTOL, exact_atol
from portproof.convert.rules import COUNT
from portproof.mapping.by_gradients import ByGradients, against_names, in_order, joins_against_names
from portproof.mapping.fingerprint import fingerprint
from portproof.mapping.forms import Forms, forms_of
from portproof.mapping.links import Link, one_to_one, owners_of, parse, slots_of, squeezed, tensors_of
from portproof.mapping.map_search import TRIES, FoundMap, MapSearch, against_the_names
from portproof.mapping.module_calls import EXACT, CallMatcher
from portproof.mapping.pairing import (
    Option,
    Options,
    complete_pairs,
    fit_units,
    left_over,
    linked_keys,
    modules_with_tensors,
    unit_options,
)
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

UNCONFIRMED = "the map is confirmed by no values, since tensors do not fit"
WEIGHTS_OF_NAMES = 0.05, 1.0  # beside cosines of gradients
MOST_LINES = 5  # that a report shows
SMALLER = 0.25  # of the usual weights: with those a sigmoid may be so flat that nothing has a gradient


@dataclass
class NameMap:
    """Maps the reference's names to the port's."""

    modules: dict[str, str] = field(default_factory=dict)  # with tensors
    tensors: dict[str, str] = field(default_factory=dict)  # keys of slots or pieces
    calls: dict[str, str] = field(default_factory=dict)  # trace labels, in execution order
    how: str = ""  # what the map rests on
    problems: dict[str, str] = field(default_factory=dict)  # {tensor or module: misfit}
    ambiguous: str = ""  # why no map was chosen
    links: list[Link] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)  # of a complete map, see `map_text`
    notes: list[str] = field(default_factory=list)  # what is not compared
    doubt: list[str] = field(default_factory=list)  # how far it is confirmed, if not everywhere; lines that decide
    unsure: dict[str, str] = field(default_factory=dict)  # {module that values do not confirm: what its pair rests on}

    @property
    def keys(self) -> dict[str, str]:
        """By state_dict key, as lines of a map."""
        return dict(link.line for link in self.links)

    @property
    def confirmed(self) -> bool:
        return self.how.endswith("confirmed by values everywhere")


def propose(ref: Model, port: BackendModel, inputs: Inputs, given: Mapping[str, str] | None = None) -> NameMap:
    """Propose the map; the port is left with the reference's weights.

    Joined tensors become pieces. `given` has a map's lines; raises UserError if they
    do not fit. Calls are eval mode's.
    """
    modules, lines = checked_map(given or {}, ref, port)
    search = MapSearch(ref, port, inputs, lines, modules)
    best: tuple[FoundMap, Proposal] | None = None
    for proposal in _proposals(search, modules):
        pairs = search.set_units(proposal.options, proposal.fixed, {})
        name_map = NameMap(pairs, how=proposal.how, problems=proposal.problems)
        name_map.unsure = _rests_on(pairs, proposal.fixed)
        unsettled = _unsettled(pairs, proposal.fixed)
        name_map.doubt = [UNCONFIRMED, *unsettled] if unsettled else []
        if proposal.problems:
            break
        found = search.resolve(pairs)
        if best is None or found.reached > best[0].reached:
            best = search.settle_options(found), proposal
        if best[0].reached == best[0].total:
            break
    if best:  # not always the last
        proposal = best[1]
    search.set_units(proposal.options, proposal.fixed, best[0].chosen if best else {})
    found_modules = best[0].modules if best else pairs
    is_sure = bool(best and best[0].reached == best[0].total and search.agreement(found_modules)[2] >= -EXACT)
    if not (is_sure and search.tells_options(found_modules) or best and proposal.by_name_alone):
        best = _by_gradients(search, found_modules, modules, bool(name_map.problems), is_sure) or best
    if best is None:
        search.set_units(proposal.options, proposal.fixed, {})
    if best:
        found, proposal = best
        search.set_units(proposal.options, proposal.fixed, found.chosen)
        found = search.settle_exchanges(found)
        name_map = NameMap(found.modules, how=f"{proposal.how}, confirmed by values {found.extent}")
        name_map.ambiguous = search.ambiguity(found)
        if name_map.confirmed:
            name_map.ambiguous = name_map.ambiguous or _two_readings(search, search.links(found.modules), modules)
        else:
            unconfirmed = {name: found.modules[name] for name in search.unconfirmed(found)}
            name_map.unsure = _rests_on(unconfirmed, proposal.fixed)
            unsettled = _unsettled(unconfirmed, proposal.fixed)
            beyond = "" if unsettled else ", and by name beyond"
            name_map.doubt = [f"the map is confirmed {found.reach}{beyond}", *unsettled]
    if name_map.problems:
        name_map.ambiguous = _complex_on_one_side(ref, port)
    modules = name_map.modules
    name_map.tensors, name_map.links = search.load(modules), search.links(modules)
    name_map.lines = _lines(modules, name_map.links, ref, port)
    name_map.notes = _notes(name_map.links, proposal.spare, search.opposite, ref, port)
    name_map.calls = CallMatcher(ref, port, search.ref_run, search.run(modules), modules, name_map.tensors).match()
    return name_map


def _complex_on_one_side(ref: Model, port: Model) -> str:
    """Why the sides cannot be mapped, if one holds complex numbers where the other may hold pairs of real ones."""
    sides = [(m.role, [key for key, array in m.arrays().items() if array.dtype.kind == "c"]) for m in (ref, port)]
    (role, keys), (other, other_keys) = sorted(sides, key=lambda side: not side[1])
    if not keys or other_keys:
        return ""
    return (
        f"the {role} holds complex numbers, such as {keys[0]}, and the {other} none: hold them alike, complex on both"
        " sides, or as real numbers of shape (..., 2)"
    )


def _rests_on(modules: Iterable[str], fixed: Container[str]) -> dict[str, str]:
    return {name: f"by {'name' if name in fixed else 'order, type and shape'} alone" for name in modules}


def _unsettled(modules: Mapping[str, str], fixed: Container[str]) -> list[str]:
    """The pairs that neither names nor the user settle, as lines of a map behind a word on them; or none."""
    open_pairs = {name: port_name for name, port_name in modules.items() if name not in fixed}
    lines = [f"  {name}: {port_name}" for name, port_name in open_pairs.items() if name and port_name]
    more = [f"  and {len(lines) - MOST_LINES} more, see --print-map"] if len(lines) > MOST_LINES else []
    word = "the map may be at fault where it is not confirmed: put these lines, as they should be, in a file for --map"
    return [word, *lines[:MOST_LINES], *more] if lines else []


def match_calls(
    name_map: NameMap, ref: Model, port: BackendModel, inputs: Inputs, train: bool, is_faulty: bool = False
) -> None:
    """Add another mode's calls: some modules run in one only. Weights are equal.

    Of a port that `is_faulty` though its outputs agree on these inputs, blocks that differ inside are paired, too.
    """
    ref_run, port_run = (model.run(inputs, "float64", train, calls=True) for model in (ref, port))
    matcher = CallMatcher(ref, port, ref_run, port_run, name_map.modules, name_map.tensors, train)
    matcher.same_output &= not is_faulty
    name_map.calls = matcher.match() | name_map.calls


def checked_map(given: Mapping[str, str], ref: Model, port: BackendModel) -> tuple[dict[str, str], Options]:
    """A user's map -> (modules, options of other lines); UserError: it does not fit."""
    modules: dict[str, str] = {}
    options: Options = {}
    taken: Counter[tuple[str, str]] = Counter()
    tensors, port_tensors = tensors_of(ref), tensors_of(port)
    for left, right in given.items():
        line = parse(left, right)
        are_tensors = _are_tensors(ref, tensors, line.ref) | _are_tensors(port, port_tensors, line.port)
        taken.update([(ref.role, name) for name in line.ref] + [(port.role, name) for name in line.port])
        if len(are_tensors) > 1:
            raise UserError(f"the map's {left}: {right} names a module and a tensor: name modules, or tensors")
        if True in are_tensors:
            one_to_one(line, tensors, port_tensors)  # may raise
            options[line.ref, line.port] = [Option((line,))]
        elif (line.ref, line.port) == ((left,), (right,)):
            modules[left] = right
        else:
            options[line.ref, line.port] = [_given_join(line, ref, port)]
    for (role, name), count in taken.items():
        if count > 1:
            raise UserError(f"the map names the {role}'s {name!r} twice: each module or tensor once")
    return modules, options


def _are_tensors(model: Model, tensors: Mapping[str, Slot], names: Sequence[str]) -> set[bool]:
    for name in names:
        if name not in tensors and (name not in model.modules or not model.modules[name].slots):
            what = "no module with weights of that name, and no tensor"
            raise UserError(f"the map names {name!r}, but the {model.role} has {what}")
    return {name in tensors for name in names}


def _given_join(line: Link, ref: Model, port: BackendModel) -> Option:
    sides = [ref.modules[name] for name in line.ref], [port.modules[name] for name in line.port]
    for option in unit_options(*sides)[0]:
        joins = [link for link in option.links if link.is_join]
        in_order = all(tuple(key.rpartition(".")[0] for key in link.parts) == line.parts for link in joins)
        same_form = all((link.heads, link.transposed) == (line.heads, line.transposed) for link in joins)
        if in_order and same_form and any(link.axis == line.axis for link in joins):
            return option
    left, right = line.line
    raise UserError(f"the map's {left}: {right} does not add up: their tensors do not join: name the tensors instead")


def _notes(
    links: Sequence[Link], spare: Sequence[str], opposite: Mapping[str, str], ref: Model, port: BackendModel
) -> list[str]:
    viewed = {slot.tensor for model in (ref, port) for slot in slots_of(model.modules).values() if slot.view}
    other_form = [": ".join(link.line) for link in links if {*link.ref, *link.port} & viewed]
    notes = []
    masks = [f"{key}: {other}" for key, other in opposite.items()]
    for what, items in (
        ("in another form there", other_form),
        ("masks that say the opposite there", masks),
        ("left out, constants that only one side saves", spare),
    ):
        more = f" and {len(items) - 3} more" if len(items) > 3 else ""
        if items:
            notes.append(f"{what}: {'; '.join(items[:3])}{more}")
    return notes


def map_text(name_map: NameMap) -> str:
    """The map as YAML for `--map`: modules, then tensors where needed; comments say which values do not confirm."""
    import yaml

    lines = []
    for name, there in name_map.lines.items():
        line = yaml.safe_dump({name: there}, allow_unicode=True, width=1000).rstrip("\n")
        lines.append(f"{line}  # {name_map.unsure[name]}" if name in name_map.unsure else line)
    return "\n".join([*lines, ""])


def _lines(modules: Mapping[str, str], links: Sequence[Link], ref: Model, port: BackendModel) -> dict[str, str]:
    places, port_places = ({s.tensor: place for place, s in slots_of(m.modules).items()} for m in (ref, port))
    lines = {name: port_name for name, port_name in modules.items() if name or port_name}
    for link in links:
        (name, leaf), (port_name, port_leaf) = places[link.ref[0]], port_places[link.port[0]]
        follows = modules.get(name) == port_name and leaf == port_leaf and not link.transposed
        if not follows or link.is_join:
            left, right = link.line
            lines[left] = right
    return lines


@dataclass
class Proposal:
    problems: dict[str, str]
    options: Options
    spare: list[str]  # buffers without counterpart
    fixed: set[str]  # by name or by the user
    how: str

    @property
    def by_name_alone(self) -> bool:
        """Whether names leave no choice."""
        return all(
            a and a == b and self.fixed.issuperset(a) and len(ways) == 1 for (a, b), ways in self.options.items()
        )


def _proposals(search: MapSearch, given: dict[str, str]) -> Iterator[Proposal]:
    """By name first, unless order leaves fewer over: a new layer renumbers a Sequential."""
    ref_modules = modules_with_tensors(search.ref_modules, search.ref_run.trace)
    port_modules = modules_with_tensors(search.port_modules, search.port_run.trace)
    ref_names, port_names = (
        _without_wrappers(*side) for side in ((search.ref, ref_modules), (search.port, port_modules))
    )
    given_names, given_ports = {ref_names[name] for name in given if name in ref_names}, set(given.values())
    ports = {plain: name for name, plain in port_names.items() if name not in given_ports and plain not in given_names}
    common = {name: ports[plain] for name, plain in ref_names.items() if name not in given and plain in ports}

    def proposal(pairs: dict[str, str], fixed: set[str], how: str) -> Proposal:
        units = complete_pairs(pairs, ref_modules, port_modules)
        rest = len(units) - len(pairs)
        how = f"{how}, {rest} {order}" if how and rest else how or order
        return Proposal(*fit_units(units, search.ref_modules, search.port_modules), fixed, how)

    order = "by order, type and shape"
    by_order = proposal(given, set(given), "")
    if not common:
        yield by_order
        return
    all_common = set(ref_names.values()) == set(port_names.values())  # else equal numbers may be accidental
    fixed = {name for name in common if all_common or not name.rpartition(".")[2].isdigit()}
    by_name = proposal(given | common, fixed | set(given), "by name")
    few_names = 2 * (len(common) + len(given)) <= max(len(ref_names), len(port_names))
    more = len(by_name.problems) - len(by_order.problems)
    order_first = more > 0 or few_names and more == 0
    if order_first:
        yield by_order
    if not order_first or few_names and not by_name.problems:
        yield by_name


def _without_wrappers(model: Model, modules: Sequence[Module]) -> dict[str, str]:
    """{module's name: the same without parts that name an only child of what holds no tensor, if no other has that}.

    One side may wrap a layer, in a Sequential say.
    """
    children = Counter(name.rpartition(".")[0] for name in model.modules if name)
    wrappers = {name for name, count in children.items() if name and count == 1 and not model.modules[name].slots}

    def plain(name: str) -> str:
        parent, dot, last = name.rpartition(".")
        return plain(parent) if parent in wrappers else (plain(parent) if dot else "") + dot + last

    found = {module.name: plain(module.name) for module in modules}
    counts = Counter(found.values())
    return {name: shorter if counts[shorter] == 1 else name for name, shorter in found.items()}


@dataclass
class _Try:
    """A map that gradients tell, as far as it is right."""

    agreement: tuple[bool, int, float]  # see `MapSearch`
    links: list[Link]
    result: tuple[FoundMap, Proposal] | None = None


def _by_gradients(
    search: MapSearch, modules: Mapping[str, str], given: Mapping[str, str], has_misfits: bool, is_sure: bool
) -> tuple[FoundMap, Proposal] | None:
    """What gradients tell, if more values agree with it than with `modules`, or these have misfits and it is sure.

    `given` are the user's. Where all values agree with `modules`, `is_sure`, only what equal gradients tell counts.
    """
    best: _Try | None = None
    for with_frozen in dict.fromkeys([False, _is_frozen_on_one_side(search)]):
        found = _by_those_gradients(search, modules, given, with_frozen, has_misfits, is_sure)
        if found and (best is None or found.agreement > best.agreement):
            best = found
        if best and best.agreement[0]:
            break
    return best.result if best else None


def _is_frozen_on_one_side(search: MapSearch) -> bool:
    shapes = (
        Counter(squeezed(slot.shape) for slot in model.slots.values() if not (slot.trained or slot.is_buffer))
        for model in (search.ref, search.port)
    )
    return len({tuple(sorted(each.items())) for each in shapes}) > 1


def _by_those_gradients(
    search: MapSearch,
    modules: Mapping[str, str],
    given: Mapping[str, str],
    with_frozen: bool,
    has_misfits: bool,
    is_sure: bool,
) -> _Try | None:
    best, links = _Try(search.agreement(modules), []), search.links(modules)
    told = _told(search, links, given, with_frozen)
    if told is None:
        return None
    equal = told.equal()
    alike = () if is_sure else map(told.alike, WEIGHTS_OF_NAMES)
    firsts = filter(None, chain([equal], alike))
    nearest: _Try | None = None  # of what gradients tell
    for way, is_equal in ((way, first is equal) for first in firsts for way in islice(told.ways(first), TRIES)):
        tried = _tried_in_order(search, told, way, is_equal)
        if tried and (nearest is None or tried.agreement > nearest.agreement):
            nearest = tried
        if tried and (tried.agreement > best.agreement or is_equal and (tried.agreement[0] or has_misfits)):
            best, has_misfits = tried, False
        if best.agreement[0] and (not is_sure or best.agreement[2] >= -SEMANTIC_RTOL) or search.is_exhausted:
            return best
    others, tries = told.exchanges(nearest.links if nearest else []), 0
    while nearest and not (nearest.agreement[0] or search.is_exhausted) and tries < TRIES:
        exchanged = next(others, None)
        if exchanged is None:
            break
        tried, tries = _tried_in_order(search, told, exchanged, False), tries + 1
        if tried and tried.agreement[:2] > nearest.agreement[:2]:
            nearest, others, tries = tried, told.exchanges(exchanged), 0
    return nearest if nearest and nearest.agreement[:2] > best.agreement[:2] else best


def _told(search: MapSearch, links: Sequence[Link], given: Mapping[str, str], with_frozen: bool) -> ByGradients | None:
    """The first fillings with which outputs agree, smaller if gradients do not tell all, else the first.

    None if a side does not run with them.
    """
    models = search.ref, search.port
    for model in models:
        model.set_pieces({})

    def told_by(forms: tuple[Forms, Forms]) -> ByGradients | None:
        own, ports = (
            fingerprint(m, search.inputs, with_frozen, form) if isinstance(m, BackendModel) else m.fingerprint
            for m, form in zip_strict(models, forms)
        )
        return ByGradients(*models, (own, ports), links, given, search.given) if own and ports else None

    first: ByGradients | None = None
    is_free = all(isinstance(model, BackendModel) for model in models)  # a recording has filled its own already
    for forms in forms_of(*models) if is_free else [(Forms(), Forms())]:
        told = told_by(forms)
        first = first or told
        if told and told.outputs_agree:
            if not is_free or told.equal() and not told.is_flat:
                return told
            one, other = (replace(form, scale=SMALLER) for form in forms)
            return told_by((one, other)) or told
    return first


def _tried_in_order(search: MapSearch, told: ByGradients, links: list[Link], is_proved: bool) -> _Try | None:
    """With tensors that have no names in the order of both sides; against it where more values agree.

    What agrees everywhere only so may be a fault, an exchange: the user has to say.
    """
    ordered = in_order(search.ref, search.port, links, linked_keys(search.given))
    if ordered == links:
        return _tried(search, told, links, is_proved)
    by_order, as_told = _tried(search, told, ordered, False), _tried(search, told, links, is_proved)
    if as_told is None or by_order and by_order.agreement[:2] >= as_told.agreement[:2]:
        return by_order
    if as_told.result and as_told.agreement[0]:
        moved = [(one.line, other.line) for one, other in zip_strict(ordered, links) if one != other]
        lines = ["; ".join(": ".join(line) for line in side) for side in zip(*moved)]
        what = "the order in which both sides hold them"
        as_told.result[0].ambiguous = against_the_names(lines[0], lines[1], what)
    return as_told


def _tried(search: MapSearch, told: ByGradients, links: list[Link], is_proved: bool) -> _Try | None:
    """None if the links leave tensors over or do not fit, or names or the user contradict."""
    if not links or not told.fit(links) or not told.are_as_given(links) or joins_against_names(links):
        return None
    if not is_proved and against_names(search.ref, search.port, links):
        return None
    options = told.units(links)
    problems, spare = left_over(options, search.ref_modules, search.port_modules)
    if problems:
        return None
    pairs = search.set_units(options, set(), {})
    agreement = search.choose(pairs)
    found = search.reach(pairs, is_proved and agreement[0])
    return _Try(agreement, links, (found, Proposal({}, options, spare, set(), "by gradients")))


def _two_readings(search: MapSearch, links: Sequence[Link], given: Mapping[str, str]) -> str:
    """Both readings of a map that values confirm against names that both sides have, where the user's lines say none.

    `given` are those of modules.
    """
    owners, port_owners = owners_of(search.ref), owners_of(search.port)
    keys, port_keys = linked_keys(search.given)
    keys |= {key for key, name in owners.items() if name in given}
    port_keys |= {key for key, name in port_owners.items() if name in given.values()}
    readings = [
        (named.line, link.line)
        for link, named in against_names(search.ref, search.port, links)
        if not (keys & {*link.ref} or port_keys & {*link.port, *named.port})
    ]
    lines = ("; ".join(": ".join(line) for line in side) for side in zip(*readings))
    return against_the_names(*lines) if readings else ""


def same_names(ref: Model, port: BackendModel, inputs: Inputs) -> NameMap | None:
    """The map of equal names, port loaded; None unless names and shapes agree."""
    pairs = pairs_by_name(ref, port)
    if pairs is None or any(slot.shape != port_slot.shape for slot, port_slot in pairs):
        return None
    # Counts may be missing.
    if not len(pairs) == len(tensors_of(ref)) == len(tensors_of(port)):
        return None
    modules = {name: name for name, module in ref.modules.items() if module.slots}
    tensors = {slot.key: port_slot.key for slot, port_slot in pairs}
    links = [Link((slot.tensor,), (port_slot.tensor,)) for slot, port_slot in pairs]
    arrays = ref.arrays()
    port.load({port_key: arrays[key] for key, port_key in tensors.items()})
    calls = ref.run(inputs, "float32", train=False, calls=True).trace.calls
    labels = {label: label for label, call in calls.items() if not call.name or call.name in port.modules}
    return NameMap(modules, tensors, labels, "by name", links=links, lines=dict(modules))


def pairs_by_name(
    ref: Model, port: BackendModel, modules: Mapping[str, str] | None = None
) -> list[tuple[Slot, Slot]] | None:
    """By name, but for `modules`; None unless names and shapes agree (counts aside)."""
    ref_names = {port_name: name for name, port_name in (modules or {}).items()}
    slots, port_slots = slots_of(ref.modules), {}
    for (name, leaf), slot in slots_of(port.modules).items():
        port_slots[ref_names.get(name, name), leaf] = slot
    shapes = {place: slot.shape for place, slot in slots.items() if place[1] != COUNT}
    port_shapes = {place: slot.shape for place, slot in port_slots.items() if place[1] != COUNT}
    if shapes != port_shapes:
        return None
    return [(slot, port_slots[place]) for place, slot in slots.items() if place in port_slots]


def by_weights(
    ref: Model, port: BackendModel, modules: Mapping[str, str] | None = None
) -> tuple[dict[str, str], Verdict | None]:
    """({port's name: reference's key}, comparison of what has no equal, or None).

    Names are PyTorch's; `modules` is {reference's: port's}. An equal tensor of the
    same name comes first.
    """
    names = port.backend.arrays_of(port.model).names
    left, port_left = ref.arrays(), {names[key]: array for key, array in port.arrays().items()}
    expected, pairs = {}, {}
    for key in left:
        module, dot, leaf = key.rpartition(".")
        expected[key] = (modules or {}).get(module, module) + dot + leaf
    for by_name in (True, False):
        for key, array in list(left.items()):
            candidates = [expected[key]] if by_name else list(port_left)
            equal = (name for name in candidates if name in port_left and np.array_equal(array, port_left[name]))
            name = next(equal, None)
            if name is not None:
                pairs[name] = key
                del left[key], port_left[name]
    left = {expected[key]: array for key, array in left.items()}
    # One side may lack them.
    one_sided = {name for name in left.keys() ^ port_left.keys() if name.rpartition(".")[2] == COUNT}
    items, port_items = (
        {tensor_item(name, "weights"): array for name, array in side.items() if name not in one_sided}
        for side in (left, port_left)
    )
    if not items and not port_items:
        return pairs, None
    return pairs, compare(items, port_items, exact_atol(items), title="weights, which have to be equal")
