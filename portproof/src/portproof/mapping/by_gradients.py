"""Pair tensors by their fingerprints, where names and calls do not tell them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from math import prod

import numpy as np

from portproof.backends.model import Model
from portproof.convert.rules import COUNT
from portproof.mapping.fingerprint import Fingerprint
from portproof.mapping.links import Link, owners_of, slots_of, squeezed, tensors_of
from portproof.mapping.pairing import (
    Option,
    Options,
    combined,
    contents_of,
    linked_keys,
    named_order,
    similarity,
    statistics,
    whole,
    words_of,
)
from portproof.python39 import zip_strict

CLOSE = 1e-7  # of outputs: far above float64 rounding, far below what another function makes
NEVER = 1e3  # apart: what does not fit
ROUNDING = 1e-13  # of the length of all gradients: what is smaller may be 0
SMALLEST = 1e-9  # relative distance of gradients: still above float64 rounding
TIE = 1e-3  # what names weigh between equal gradients, and the other map's pairs
EQUAL = 1 - 7 / 9 + TIE  # apart: a distance of 1e-7, see `_apart`
SYNONYMS = {"gamma": "weight", "scale": "weight", "beta": "bias", "shift": "bias", "offset": "bias"}

Vectors = Sequence[np.ndarray]  # a tensor's, see `Fingerprint`
Left = dict[str, Vectors]
Words = tuple[str, ...]
_Exchange = tuple[float, tuple[Link, ...], tuple[Link, ...]]  # (what more these are apart, links, exchanged ones)


class ByGradients:
    """Pairs of tensors that gradients tell.

    Where outputs agree, those are paired whose gradients are equal, whole or joined of several. Where outputs differ, a
    fault is between: those are paired whose gradients are least apart.
    """

    def __init__(
        self,
        ref: Model,
        port: Model,
        prints: Sequence[Fingerprint],
        links: Sequence[Link],
        given: Mapping[str, str],
        lines: Options,
    ) -> None:
        """`links` are those of another map: where gradients do not tell, its pairs come first; its constants stay.

        The user's are `given`, {reference's module: port's}, and the `lines` of tensors.
        """
        self.ref, self.port, self.others, self.given, self.lines = ref, port, links, given, lines
        own, ports = prints
        self.outputs_agree = len(own.outputs) == len(ports.outputs) and all(
            np.allclose(one, other, CLOSE) for one, other in zip_strict(own.outputs, ports.outputs)
        )
        scale = _scale(own.gradients)
        port_scale = scale if self.outputs_agree else _scale(ports.gradients)  # a fault may scale them all
        self.vectors: Left = {key: [v / scale for v in vectors] for key, vectors in own.gradients.items()}
        self.port_vectors: Left = {key: [v / port_scale for v in vectors] for key, vectors in ports.gradients.items()}
        self.pairs = {(link.ref, link.port) for link in links}
        self.known: dict[tuple[str, str], _Pair | None] = {}
        self.owners = owners_of(ref), owners_of(port)
        self.shapes, self.port_shapes = (
            {key: squeezed(slot.shape) for key, slot in tensors_of(model).items()} for model in (ref, port)
        )
        self.blocks = [{key: block for key, (block, _, _) in _places(model).items()} for model in (ref, port)]
        self.of_layers = tuple(
            {slot.tensor for module in model.modules.values() if module.kind for slot in module.slots.values()}
            for model in (ref, port)
        )

    @property
    def is_flat(self) -> bool:
        """Whether most tensors have no gradient, as behind a sigmoid of large numbers."""
        return sum(_length(vectors) <= ROUNDING for vectors in self.vectors.values()) > len(self.vectors) / 2

    def equal(self) -> list[Link] | None:
        """Links of all tensors, by equal gradients; None if that leaves some, or if outputs differ."""
        if not self.outputs_agree:
            return None
        sides = self.vectors, self.port_vectors
        told, port_told = ({key: v for key, v in side.items() if _length(v) > ROUNDING} for side in sides)
        left, port_left = (
            {key: v for key, v in side.items() if key not in own} for side, own in zip(sides, (told, port_told))
        )
        found = self._whole(told, port_told, TIE, EQUAL)
        left, port_left = told | left, port_told | port_left
        found += self._joins(left, port_left, EQUAL)
        found += self._whole(left, port_left, TIE, EQUAL)  # those without a gradient, unless they are parts
        return None if left or port_left else found

    def alike(self, weight: float) -> list[Link] | None:
        """Links of all tensors, by gradients and, with this weight, names; None if that leaves some."""
        named = {key for key in self._fitting_names() if not re.search("[0-9]", key)}  # equal numbers may be accidental
        left, port_left = (
            {key: vectors for key, vectors in side.items() if key not in named}
            for side in (self.vectors, self.port_vectors)
        )
        found = self._joins(left, port_left, NEVER, weight)
        for side, vectors in ((left, self.vectors), (port_left, self.port_vectors)):
            side |= {key: vectors[key] for key in named}
        found += self._whole(left, port_left, weight, NEVER)
        return None if left or port_left else found

    def ways(self, links: Sequence[Link]) -> Iterator[list[Link]]:
        """The links, then those with square matrices turned, in turn, whose gradients are 0 and do not tell the way."""
        turned = {link: replace(link, transposed=not link.transposed) for link in links if self._may_be_turned(link)}
        for count in range(len(turned) + 1):
            for some in combinations(turned, count):
                yield [turned[link] if link in some else link for link in links]

    def exchanges(self, links: Sequence[Link]) -> Iterator[list[Link]]:
        """The links with two tensors or modules exchanged, those first that gradients forbid least.

        They are of two pairs, or one is a part of a join.
        """
        found = [*self._exchanged_wholes(links), *self._exchanged_parts(links)]
        for _, old, new in sorted(found, key=lambda each: each[0]):
            yield from self.ways([*(link for link in links if link not in old), *new])

    def _exchanged_wholes(self, links: Sequence[Link]) -> Iterator[_Exchange]:
        """Of modules, then of single tensors."""
        modules: defaultdict[tuple[str, str], list[Link]] = defaultdict(list)
        for link in sorted(links, key=lambda link: link.ref):
            if not link.is_join:
                modules[self.owners[0][link.ref[0]], self.owners[1][link.port[0]]].append(link)
        singles = ((link,) for link in links if not link.is_join)
        groups: defaultdict[tuple, list[tuple[Link, ...]]] = defaultdict(list)
        for bundle in (*(tuple(each) for each in modules.values() if len(each) > 1), *singles):
            groups[tuple(_form(self.vectors[link.ref[0]]) for link in bundle)].append(bundle)
        for one, other in chain.from_iterable(combinations(group, 2) for group in groups.values()):
            both, turned_round = (*one, *other), (*other, *one)
            now = [self._pair(link.ref[0], then.port[0]) for link, then in zip_strict(both, turned_round)]
            before = [self._pair(link.ref[0], link.port[0]) for link in both]
            pairs = list(filter(None, now))
            if len(pairs) == len(both):
                apart = sum(pair.apart for pair in pairs) - sum(pair.apart for pair in before if pair)
                yield apart, both, tuple(pair.link for pair in pairs)

    def _exchanged_parts(self, links: Sequence[Link]) -> Iterator[_Exchange]:
        """A part of the first of two is exchanged."""
        groups: defaultdict[tuple, list[_Place]] = defaultdict(list)
        for side, (vectors, shapes) in enumerate(((self.vectors, self.shapes), (self.port_vectors, self.port_shapes))):
            for link in links:
                if link.is_join and (link.transposed or link.heads > 1):
                    continue
                if {*link.ref} <= self.vectors.keys() and {*link.port} <= self.port_vectors.keys():
                    for place in self._places(link, side):
                        groups[side, tuple(_sizes(vectors[place.key])), shapes[place.key]].append(place)
        for (side, *_), group in groups.items():
            own = [(self.vectors, self.port_vectors)[side][place.key] for place in group]
            now = [place.apart(vectors) for place, vectors in zip_strict(group, own)]
            for (i, one), (j, other) in product(enumerate(group), repeat=2):
                if one.is_part and one.link is not other.link:
                    apart = one.apart(own[j]) + other.apart(own[i]) - now[i] - now[j]
                    exchanged = one.filled(side, other.key), other.filled(side, one.key)
                    yield apart, (one.link, other.link), exchanged

    def _places(self, link: Link, side: int) -> Iterator[_Place]:
        """Of the link's tensors on the reference's side, 0, or the port's; none of a tensor that is joined."""
        keys, (key, *more) = (link.ref, link.port)[side], (link.port, link.ref)[side]
        own, others = (self.vectors, self.port_vectors)[side], (self.port_vectors, self.vectors)[side][key]
        start = 0
        for part in keys if not more else ():
            is_turned = link.transposed or part in link.turned_parts
            if link.is_join:
                stop = start + len((_turned(own[part]) if is_turned else own[part])[link.axis])
                yield _Place(link, part, {link.axis: others[link.axis][start:stop]}, is_turned, True)
                start = stop
            else:
                yield _Place(link, part, dict(enumerate(others)), is_turned, False)

    def _may_be_turned(self, link: Link) -> bool:
        if link.is_join:
            return False
        (key,), (port_key,) = link.ref, link.port
        vectors, ports = self.vectors[key], self.port_vectors[port_key]
        is_square = len(vectors) > 1 and len(vectors[-1]) == len(vectors[-2])
        return is_square and len(self._ways(key, port_key)) > 1 and max(map(_length, (vectors, ports))) <= ROUNDING

    def units(self, links: Sequence[Link]) -> Options:
        """The units of a map with these links, and with those of what has no gradient, without the user's lines."""
        every = [*links, *_same_leaves(self.ref, self.port, links)]
        lines = linked_keys(self.lines)
        units = _units(self.ref, self.port, [k for k in every if not (lines[0] & {*k.ref} or lines[1] & {*k.port})])
        buffers = combined(statistics({**units, **self.lines}, self.ref.modules, self.port.modules, named=False))
        linked = linked_keys({**units, **self.lines, ((), ("buffers",)): buffers})
        constants = [link for link in self.others if not (linked[0] & {*link.ref} or linked[1] & {*link.port})]
        rest = (*units.pop(((), ()), [Option(())])[0].links, *constants)
        return {**units, ((), ()): [Option((*rest, *each.links)) for each in buffers]}

    def fit(self, links: Sequence[Link]) -> bool:
        """Whether shapes add up, of which some count as others."""
        sides = (
            ([self.shapes[key] for key in link.ref], [self.port_shapes[key] for key in link.port]) for link in links
        )
        return all(link.views(*shapes) for link, shapes in zip_strict(links, sides))

    def are_as_given(self, links: Sequence[Link]) -> bool:
        """Whether they pair the tensors of the user's modules as these are paired."""
        owners, port_owners = owners_of(self.ref), owners_of(self.port)
        pairs = {(owners[a], port_owners[b]) for link in links for a, b in product(link.ref, link.port)}
        back = {port_name: name for name, port_name in self.given.items()}
        return all(self.given.get(name, other) == other and back.get(other, name) == name for name, other in pairs)

    def _ways(self, key: str, port_key: str) -> tuple[bool, ...]:
        """Whether one may be the other's transpose: two library layers agree as they are."""
        are_layers = key in self.of_layers[0] and port_key in self.of_layers[1]
        return (False,) if len(self.vectors[key]) < 2 or are_layers else (False, True)

    def _pair(self, key: str, port_key: str) -> _Pair | None:
        """The better way to pair two; None if they do not fit."""
        if (key, port_key) not in self.known:
            vectors, ports = self.vectors[key], self.port_vectors[port_key]
            ways = [(way, _turned(ports) if way else ports) for way in self._ways(key, port_key)]
            found = [(_apart(vectors, given), way) for way, given in ways if _sizes(given) == _sizes(vectors)]
            apart, way = min(found, default=(NEVER, False))
            link = Link((key,), (port_key,), transposed=way)
            apart += TIE * ((link.ref, link.port) not in self.pairs)
            self.known[key, port_key] = _Pair(link, apart, 1 - similarity(key, port_key)) if found else None
        return self.known[key, port_key]

    def _whole(self, left: Left, port_left: Left, weight: float, most: float) -> list[Link]:
        """Of one to one, with the least sum of what they are apart, and names with this weight."""
        from scipy.optimize import linear_sum_assignment  # slow to import, and seldom needed

        groups: dict[tuple[int, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for side, vectors in enumerate((left, port_left)):
            for key in vectors:
                groups[_form(vectors[key])][side].append(key)
        found = []
        for keys, port_keys in groups.values():
            pairs = [[self._pair(key, port_key) for port_key in port_keys] for key in keys]
            fits = [[pair if pair and pair.apart <= most else None for pair in row] for row in pairs]
            costs = [[pair.apart + weight * pair.other_name if pair else NEVER for pair in row] for row in fits]
            for i, j in zip_strict(*linear_sum_assignment(np.array(costs).reshape(len(keys), len(port_keys)))):
                if fits[i][j]:
                    found.append(fits[i][j].link)
                    del left[keys[i]], port_left[port_keys[j]]
        return found

    def _fitting_names(self) -> set[str]:
        """Of tensors of both sides that have one form."""
        common = self.vectors.keys() & self.port_vectors.keys()
        return {key for key in common if _form(self.vectors[key]) == _form(self.port_vectors[key])}

    def _joins(self, left: Left, port_left: Left, most: float, weight: float = 0.0) -> list[Link]:
        """Of what no equal one is left for, or of tensors of which there are more of a shape than on the other side."""
        found = []
        for turned in (False, True):
            ones, others = (port_left, left) if turned else (left, port_left)
            spare = Counter(map(_form, ones.values()))
            spare.subtract(Counter(map(_form, others.values()) if most > EQUAL else ()))
            for key in sorted(ones, key=lambda key: -_size(ones[key])):
                if spare[_form(ones[key])] <= 0:
                    continue
                block, blocks = self.blocks[turned][key], self.blocks[not turned]
                beside = {other: vectors for other, vectors in others.items() if weight and blocks[other] == block}
                pools = filter(None, (beside, others))  # names count: first those of the block of its name
                links = (self._joined(key, pool, turned, most, weight) for pool in pools)
                link = next(filter(None, links), None)
                if link:
                    spare[_form(ones[key])] -= 1
                    del ones[key]
                    for part in link.port:
                        del others[part]
                    found.append(link.turned if turned else link)
        return found

    def _joined(self, key: str, others: Left, turned: bool, most: float, weight: float) -> Link | None:
        """A link of one to several of the other side, whose vectors follow each other along an axis."""
        vectors = (self.port_vectors if turned else self.vectors)[key]
        best: tuple[float, int, int, dict[str, bool]] | None = None
        for axis, vector in enumerate(vectors):
            for heads in _divisors(len(vector)) if most == EQUAL else [1]:
                found = self._in_turn(key, others, turned, axis, heads, most, weight)
                if found and (best is None or found[0] < best[0]):
                    best = (found[0], axis, heads, found[1])  # layers are all used alike
                if found:
                    break
        if best is None:
            return None
        _, axis, heads, parts = best
        shapes, other_shapes = (self.port_shapes, self.shapes) if turned else (self.shapes, self.port_shapes)
        if all(parts.values()):
            axis = axis if len(shapes[key]) > len(vectors) else 1 - axis
            link = Link((key,), tuple(parts), axis, heads, transposed=True)
        else:
            turned_parts = tuple(part for part in parts if parts[part])
            link = Link((key,), tuple(parts), axis, heads, turned_parts=turned_parts)
        return link if link.views([shapes[key]], [other_shapes[part] for part in parts]) else None  # folded, it may not

    def _in_turn(
        self, key: str, others: Left, turned: bool, axis: int, heads: int, most: float, weight: float
    ) -> tuple[float, dict[str, bool]] | None:
        """(what they are apart, {name: whether transposed}) of those whose vectors are in turn this one's, per head."""
        vectors = (self.port_vectors if turned else self.vectors)[key]
        groups, sizes = vectors[axis].reshape(heads, -1), _sizes_beside(vectors, axis)
        blocks, shapes = self.blocks[not turned], self.shapes if turned else self.port_shapes
        length = groups.shape[1]
        parts: dict[str, bool] = {}
        start, total = 0, 0.0
        fitting = {other for other in others if squeezed(tuple(_sizes(others[other]))) == shapes[other]}
        while start < length:
            candidates = []
            for other in fitting - parts.keys():
                for way in self._ways(other, key) if turned else self._ways(key, other):
                    given = _turned(others[other]) if way else others[other]
                    fits = len(given) == len(vectors) and _sizes_beside(given, axis) == sizes
                    count, rest = divmod(len(given[axis]), heads) if fits else (0, 0)
                    stop = start + count
                    if count and not rest and stop <= length and (start, stop) != (0, length):
                        apart = _apart([groups[:, start:stop].reshape(-1)], [given[axis]])
                        other_name = 1 - similarity(key, other)
                        is_elsewhere = any(blocks[part] != blocks[other] for part in parts)
                        candidates.append((apart + weight * other_name, is_elsewhere, way, other_name, other, stop))
            apart, _, way, _, other, stop = min(candidates, default=(NEVER, False, False, 0.0, "", 0))
            if not candidates or apart > most:
                return None
            parts[other], start, total = way, stop, total + apart
        of_layers = {way for part, way in parts.items() if part in self.of_layers[not turned]}
        return None if len(of_layers) > 1 else (total, parts)


@dataclass(frozen=True)
class _Place:
    """Where a link has the tensor `key`, and the vectors that the other side has there, by axis."""

    link: Link
    key: str
    found: Mapping[int, np.ndarray]
    is_turned: bool
    is_part: bool

    def apart(self, vectors: Vectors) -> float:
        given = _turned(vectors) if self.is_turned else vectors
        return _apart(list(self.found.values()), [given[axis] for axis in self.found])

    def filled(self, side: int, key: str) -> Link:
        """The link with another tensor there."""
        ref, port, turned = (
            tuple(key if each == self.key else each for each in keys)
            for keys in (self.link.ref, self.link.port, self.link.turned_parts)
        )
        return replace(
            self.link,
            ref=ref if side == 0 else self.link.ref,
            port=port if side else self.link.port,
            turned_parts=turned,
        )


@dataclass(frozen=True)
class _Pair:
    link: Link
    apart: float  # see `_apart`
    other_name: float  # 0: the same


def _scale(gradients: Mapping[str, Vectors]) -> float:
    """The length of all: of vectors, since those of a joined matrix are not those of its parts together."""
    own = [vectors for vectors in gradients.values() if len(vectors) == 1]
    return _length(chain.from_iterable(own or gradients.values())) or 1.0


def _form(vectors: Vectors) -> tuple[int, ...]:
    return tuple(sorted(_sizes(vectors)))


def _size(vectors: Vectors) -> int:
    return prod(_sizes(vectors))


def _divisors(length: int) -> list[int]:
    return [n for n in range(1, length) if length % n == 0]


def _sizes(vectors: Vectors) -> list[int]:
    return list(map(len, vectors))


def _sizes_beside(vectors: Vectors, axis: int) -> list[int]:
    """Of the other axes."""
    return _sizes([*vectors[:axis], *vectors[axis + 1 :]])


def _turned(vectors: Vectors) -> Vectors:
    """Of the transposed tensor."""
    return [*vectors[:-2], *vectors[:-3:-1]]


def _length(vectors: Iterable[np.ndarray]) -> float:
    return float(np.sqrt(sum(float(vector @ vector) for vector in vectors)))


def _apart(vectors: Vectors, others: Vectors) -> float:
    """From 0 for a relative distance of SMALLEST to 1 for one of 1, by orders of magnitude."""
    longest = max(_length(vectors), _length(others))
    distance = max(_length(one - other for one, other in zip_strict(vectors, others)) - ROUNDING, 0.0)
    relative = min(max(distance / max(longest, ROUNDING), SMALLEST), 1.0)
    return 1 - float(np.log10(relative) / np.log10(SMALLEST))


def _same_leaves(ref: Model, port: Model, links: Sequence[Link]) -> list[Link]:
    """Of untrained tensors, between modules that hold paired tensors and whose untrained ones have the same names."""
    owners, port_owners = owners_of(ref), owners_of(port)
    found: dict[str, Link] = {}
    for name, port_name in dict.fromkeys((owners[link.ref[0]], port_owners[link.port[0]]) for link in links):
        left, port_left = (
            {leaf: s for leaf, s in module.slots.items() if not s.trained and leaf != COUNT}
            for module in (ref.modules[name], port.modules[port_name])
        )
        if {k: squeezed(s.shape) for k, s in left.items()} == {k: squeezed(s.shape) for k, s in port_left.items()}:
            for leaf, slot in left.items():
                found.setdefault(slot.tensor, Link((slot.tensor,), (port_left[leaf].tensor,)))
    ports = {link.port: link for link in found.values()}
    return list(ports.values())


def _units(ref: Model, port: Model, links: Sequence[Link]) -> Options:
    """Modules that hold the same tensors as a unit each; the other tensors as one."""
    owners, port_owners = owners_of(ref), owners_of(port)
    ref_keys = {link.port[0]: link.ref[0] for link in links if not link.is_join}
    contents, port_contents = contents_of(ref, {key: key for key in ref_keys.values()}), contents_of(port, ref_keys)
    ways = defaultdict(list)
    for link in links:
        names = {owners[key] for key in link.ref}, {port_owners[key] for key in link.port}
        ways[tuple(sorted(names[0])), tuple(sorted(names[1]))].append(link)
    counts, port_counts = (Counter(chain.from_iterable(unit[side] for unit in ways)) for side in (0, 1))
    units: Options = {}
    for unit, its in ways.items():
        is_one = len(unit[0]) == len(unit[1]) == counts[unit[0][0]] == port_counts[unit[1][0]] == 1
        place = unit if is_one and contents[unit[0][0]] == port_contents[unit[1][0]] else ((), ())
        units[place] = [Option((*units.get(place, [Option(())])[0].links, *its))]
    return units


def joins_against_names(links: Sequence[Link]) -> bool:
    """Whether parts are joined in another order than their names say."""
    joins = (sorted((link.ref, link.port), key=len) for link in links if link.is_join)
    return any(named_order(one, parts) not in (None, tuple(range(len(parts)))) for (one, *_), parts in joins)


def against_names(ref: Model, port: Model, links: Sequence[Link]) -> list[tuple[Link, Link]]:
    """Links against names that both sides have, each with the one that the names say.

    A tensor is another than the one of its size beside it that has its name, without a number; or tensors of a block
    are exchanged among their own names.
    """
    places, port_places = _places(ref), _places(port)
    keys = {place: key for key, place in port_places.items()}
    told = {link.ref[0]: port_places[link.port[0]] for link in links if not link.is_join}
    named = {place: places[key][1] for key, place in told.items()}
    after: dict[tuple[str, str], dict[Words, Words]] = defaultdict(dict)  # by the blocks that they are in
    for key, (owner, port_words, _) in told.items():
        around, words, _ = places[key]
        if not any(re.fullmatch("[a-z]?[0-9]+", word) for word in words):  # such as m1
            after[around, owner][words] = port_words
    found = []
    for key, (owner, port_words, size) in told.items():
        around, words, _ = places[key]
        is_other = port_words != words != named.get((owner, words, size), words)
        is_exchanged = words in after[around, owner] and _comes_back(words, after[around, owner])
        if is_exchanged or is_other and not re.search("[0-9]", " ".join(words)):
            found.append(key)
    tensors, port_tensors = tensors_of(ref), tensors_of(port)
    of_links = {link.ref[0]: link for link in links}
    pairs = []
    for key in found:
        link, other = of_links[key], keys[told[key][0], places[key][1], told[key][2]]
        by_name = whole(tensors[key], port_tensors[other])
        pairs += [(link, option.links[0]) for option in by_name[-1 if link.transposed else 0 :][:1]]
    return pairs


def in_order(
    ref: Model, port: Model, links: Sequence[Link], given: tuple[Container[str], Container[str]] = ((), ())
) -> list[Link]:
    """With raw tensors of one shape and module, on either side, in the order of both, where no name says another.

    Those that the user has `given` on either side stay.
    """
    places, port_places = (
        {s.tensor: (name, s.shape, number) for number, ((name, _), s) in enumerate(slots_of(model.modules).items())}
        for model in (ref, port)
    )
    groups = defaultdict(list)
    for link in links:
        if not (link.is_join or link.ref[0] in given[0] or link.port[0] in given[1]):
            (name, shape, _), (port_name, _, _) = places[link.ref[0]], port_places[link.port[0]]
            leaf, port_leaf = link.ref[0].rpartition(".")[2], link.port[0].rpartition(".")[2]
            are_raw = not (ref.modules[name].kind or port.modules[port_name].kind)
            if are_raw and not _meanings(leaf) & _meanings(port_leaf) and not re.search("[0-9]", leaf + port_leaf):
                groups[name, port_name, shape].append(link)
    moved = {}
    for group in groups.values():
        ports = sorted((link.port for link in group), key=lambda keys: port_places[keys[0]][2])
        for link, keys in zip_strict(sorted(group, key=lambda link: places[link.ref[0]][2]), ports):
            moved[link.ref] = replace(link, port=keys)
    return [moved.get(link.ref, link) for link in links]


def _meanings(leaf: str) -> set[str]:
    return {SYNONYMS.get(word, word) for word in words_of(leaf)}


def _comes_back(name: Words, after: Mapping[Words, Words]) -> bool:
    """Whether the chain of what follows what leads from the name over others to itself."""
    now = after[name]
    for _ in after:
        if now == name or now not in after:
            break
        now = after[now]
    return now == name != after[name]


def _places(model: Model) -> dict[str, tuple[str, Words, int]]:
    """{tensor: (the block that it is in, by itself or in a layer; its name there, in words; size)}."""
    found = {}
    for (name, _), slot in slots_of(model.modules).items():
        owner = name.rpartition(".")[0] if model.modules[name].kind else name
        words = words_of(slot.tensor.removeprefix(f"{owner}." if owner else ""))
        found[slot.tensor] = owner, tuple(words), prod(slot.shape)
    return found
