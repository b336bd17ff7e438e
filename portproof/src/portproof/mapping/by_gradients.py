"""Pair tensors by their fingerprints, where names and calls do not tell them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from math import prod

import numpy as np
from scipy.optimize import linear_sum_assignment

from portproof.backends.model import Model
from portproof.convert.rules import COUNT
from portproof.mapping.fingerprint import Fingerprint
from portproof.mapping.links import Link, slots_of, squeezed, tensors_of
from portproof.mapping.pairing import (
    Option,
    Options,
    combined,
    contents_of,
    linked_keys,
    similarity,
    statistics,
    words_of,
)
from portproof.python39 import zip_strict

CLOSE = 1e-7  # of the largest: far above float64 rounding, far below what another place makes
ROUNDING = 1e-13  # of the largest gradient of all: what is smaller may be 0
NEVER = 1e3

Vectors = Sequence[np.ndarray]  # a tensor's, see `Fingerprint`


def units_by_gradients(
    ref: Model, port: Model, prints: Sequence[Fingerprint | None], links: Sequence[Link], weight: float
) -> tuple[Options | None, bool]:
    """(units of a map, whether gradients prove it); no units if tensors are left over, or if names contradict.

    Where outputs differ, a fault is between: those are paired whose gradients are most alike, with a `weight` of names.
    `links` are those of another map: where gradients are equal its pairs come first, and its constants stay.
    """
    own, ports = prints
    if own is None or ports is None or len(own.outputs) != len(ports.outputs):
        return None, False
    for model in (ref, port):
        model.set_pieces({})
    is_proved = all(np.allclose(one, other, CLOSE) for one, other in zip_strict(own.outputs, ports.outputs))
    pairing = _Pairing(ref, port, own.gradients, ports.gradients, links)
    found = pairing.equal() if is_proved else []
    is_proved &= not pairing.left and not pairing.port_left
    found += pairing.alike(weight)
    if pairing.left or pairing.port_left or is_against_names(ref, port, found):
        return None, False
    found += _same_leaves(ref, port, found)
    units = _units(ref, port, found)
    buffers = combined(statistics(units, ref.modules, port.modules, named=False))
    linked = linked_keys({**units, ((), ("buffers",)): buffers})
    constants = [link for link in links if not (linked[0] & set(link.ref) or linked[1] & set(link.port))]
    rest = (*units.pop(((), ()), [Option(())])[0].links, *constants)
    return {**units, ((), ()): [Option((*rest, *each.links)) for each in buffers]}, is_proved


class _Pairing:
    """Whole tensors first, then those that are joined of several."""

    def __init__(
        self, ref: Model, port: Model, own: Mapping[str, Vectors], ports: Mapping[str, Vectors], links: Sequence[Link]
    ) -> None:
        self.left, self.port_left = dict(own), dict(ports)
        self.shapes, self.port_shapes = (
            {key: squeezed(s.shape) for key, s in tensors_of(m).items()} for m in (ref, port)
        )
        self.joins = [link for link in links if link.is_join]
        self.pairs = {(link.ref, link.port) for link in links}
        self.of_layers = tuple(
            {slot.tensor for module in model.modules.values() if module.kind for slot in module.slots.values()}
            for model in (ref, port)
        )
        every = chain(own.values(), ports.values())
        self.largest = max((np.abs(vector).max(initial=0) for vectors in every for vector in vectors), default=0.0)

    def equal(self) -> list[Link]:
        """Of tensors whose gradients are equal."""
        found = self._whole()
        for turned in (False, True):
            left, port_left = (self.port_left, self.left) if turned else (self.left, self.port_left)
            shapes = self.port_shapes if turned else self.shapes
            for key in sorted(left, key=lambda key: -np.prod(shapes[key])):
                link = self._joined(key, left[key], port_left, turned)
                if link:
                    found.append(self._taken(link.turned if turned else link))
        return found

    def alike(self, weight: float) -> list[Link]:
        """Of the others: joined as in the other map, and where cosines, and names with a `weight`, agree best."""
        found = [
            self._taken(k) for k in self.joins if self.left.keys() >= {*k.ref} and self.port_left.keys() >= {*k.port}
        ]
        keys, port_keys = list(self.left), list(self.port_left)
        costs, turns = np.full((len(keys), len(port_keys)), NEVER), {}
        for i, j in product(range(len(keys)), range(len(port_keys))):
            vectors = self.left[keys[i]]
            for way, given in self._ways(keys[i], port_keys[j], self.port_left[port_keys[j]]):
                if list(map(len, vectors)) == list(map(len, given)):
                    cosine = np.mean(list(map(_cosine, vectors, given)))
                    is_new = ((keys[i],), (port_keys[j],)) not in self.pairs
                    cost = 1 - cosine + weight * (is_new + 1 - similarity(keys[i], port_keys[j]))
                    if cost < costs[i, j]:
                        costs[i, j], turns[i, j] = cost, way
        for place in zip(*linear_sum_assignment(costs)):
            if place in turns:
                found.append(self._taken(Link((keys[place[0]],), (port_keys[place[1]],), transposed=turns[place])))
        return found

    def _taken(self, link: Link) -> Link:
        for key in link.ref:
            del self.left[key]
        for key in link.port:
            del self.port_left[key]
        return link

    def _ways(self, key: str, port_key: str, port_vectors: Vectors) -> Iterator[tuple[bool, Vectors]]:
        """(whether transposed, the port's so): two library layers agree as they are."""
        yield False, port_vectors
        if len(port_vectors) > 1 and not (key in self.of_layers[0] and port_key in self.of_layers[1]):
            yield True, [*port_vectors[:-2], *port_vectors[:-3:-1]]

    def _whole(self) -> list[Link]:
        fits = []
        for key, vectors in self.left.items():
            for port_key, port_vectors in self.port_left.items():
                for way, given in self._ways(key, port_key, port_vectors):
                    if self._same(vectors, given):
                        is_new = ((key,), (port_key,)) not in self.pairs
                        fits.append((is_new, way, -similarity(key, port_key), key, port_key))
        found = []
        for _, way, _, key, port_key in sorted(fits):
            if key in self.left and port_key in self.port_left:
                found.append(self._taken(Link((key,), (port_key,), transposed=way)))
        return found

    def _joined(self, key: str, vectors: Vectors, others: Mapping[str, Vectors], turned: bool) -> Link | None:
        """A link of one to several of the other side, whose vectors follow each other along an axis."""
        for axis, vector in enumerate(vectors):
            parts: dict[str, bool] = {}  # {name: whether transposed}
            start = 0
            while start < len(vector):
                fits = []
                for other in others.keys() - parts.keys():
                    sides = (other, key) if turned else (key, other)
                    for way, given in self._ways(*sides, others[other]):
                        if len(given) == len(vectors):
                            stop = start + len(given[axis])
                            if self._same([vector[start:stop]], [given[axis]]):
                                fits.append((way, -similarity(key, other), other, stop))
                if not fits:
                    break
                parts[min(fits)[2]], start = min(fits)[0], min(fits)[3]
            of_layers = {way for part, way in parts.items() if part in self.of_layers[not turned]}
            if start == len(vector) and len(parts) > 1 and len(of_layers) < 2:  # layers are all used alike
                if all(parts.values()):
                    return Link((key,), tuple(parts), 1 - axis, transposed=True)
                return Link((key,), tuple(parts), axis, turned_parts=tuple(part for part in parts if parts[part]))
        return None

    def _same(self, vectors: Vectors, others: Vectors) -> bool:
        if [len(vector) for vector in vectors] != [len(vector) for vector in others]:
            return False
        for one, other in zip_strict(vectors, others):
            atol = CLOSE * np.abs(one).max(initial=0) + ROUNDING * self.largest
            if not (np.abs(one - other) <= atol).all():
                return False
        return True


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths > 0 else 0.0


def _same_leaves(ref: Model, port: Model, links: Sequence[Link]) -> list[Link]:
    """Of untrained tensors, between modules that hold paired tensors and whose untrained ones have the same names."""
    owners, port_owners = ({slot.tensor: name for (name, _), slot in slots_of(m.modules).items()} for m in (ref, port))
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
    owners, port_owners = ({slot.tensor: name for (name, _), slot in slots_of(m.modules).items()} for m in (ref, port))
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


def is_against_names(ref: Model, port: Model, links: Sequence[Link]) -> bool:
    """Whether a tensor is told to be another than the one of its size beside it that has its name, without a number.

    Or whether tensors with names that both sides have are exchanged among themselves.
    """
    places, port_places = map(_places, (ref, port))
    pairs = {link.ref[0]: link.port[0] for link in links if not link.is_join}
    named = {port_places[other]: places[key][1] for key, other in pairs.items()}  # what is told of each
    for key, other in pairs.items():
        words, (owner, port_words, size) = places[key][1], port_places[other]
        told = named.get((owner, words, size), words)
        if port_words != words != told and not re.search("[0-9]", " ".join(words)):
            return True
    after = {tuple(words_of(key)): tuple(words_of(other)) for key, other in pairs.items()}
    return any(_comes_back(name, after) for name in after)


def _comes_back(name: tuple[str, ...], after: Mapping[tuple[str, ...], tuple[str, ...]]) -> bool:
    """Whether the chain of what follows what leads from the name over others to itself."""
    now = after[name]
    for _ in after:
        if now == name or now not in after:
            break
        now = after[now]
    return now == name != after[name]


def _places(model: Model) -> dict[str, tuple[str, tuple[str, ...], int]]:
    """{tensor: (the block that it is in, by itself or in a layer; its name there, in words; size)}."""
    found = {}
    for (name, _), slot in slots_of(model.modules).items():
        owner = name.rpartition(".")[0] if model.modules[name].kind else name
        words = words_of(slot.tensor.removeprefix(f"{owner}." if owner else ""))
        found[slot.tensor] = owner, tuple(words), prod(slot.shape)
    return found
