"""Links between tensors of the two models: one to one, or one joined from several.

A joined tensor is read and written in pieces (see `Slot`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from portproof.backends.model import Model, Module, Slot
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

Shape = tuple[int, ...]
View = Callable[[np.ndarray], np.ndarray]
FORM = (
    "write NAME: NAME, or NAME: NAME, NAME, ... with (axis 1), (heads 4), (transposed) or, of one, (NAME transposed)"
    " behind it if need be"
)


@dataclass(frozen=True)
class Link:
    """Tensors with the same elements, by state_dict key; one side has one tensor.

    Several are joined along its `axis`, whole or head by head. `transposed` exchanges
    the last two axes; (C, H, W) may become (H * W, C); so do the `turned_parts`. Axes
    are PyTorch's, without those of length 1.
    """

    ref: tuple[str, ...]
    port: tuple[str, ...]
    axis: int = 0
    heads: int = 1
    transposed: bool = False
    turned_parts: tuple[str, ...] = ()

    @property
    def line(self) -> tuple[str, str]:
        said = {f"axis {self.axis}": self.axis, f"heads {self.heads}": self.heads > 1, "transposed": self.transposed}
        said |= {f"{part} transposed": True for part in self.turned_parts}
        words = ", ".join(word for word, is_said in said.items() if is_said)
        return ", ".join(self.ref), ", ".join(self.port) + (f" ({words})" if words else "")

    @property
    def is_join(self) -> bool:
        return len(self.ref) + len(self.port) > 2

    @property
    def parts(self) -> tuple[str, ...]:
        return self.port if len(self.ref) == 1 else self.ref

    @property
    def turned(self) -> Link:
        return replace(self, ref=self.port, port=self.ref)

    def views(self, ref: Sequence[Shape], port: Sequence[Shape]) -> list[tuple[str, View]] | None:
        """(suffix, view) of each piece of the joined tensor, else of the port's; None: no fit."""
        joined, parts = (ref[0], port) if len(port) > 1 else (port[0], ref)
        if len(parts) == 1:
            view = self._view_of_whole(squeezed(joined), squeezed(parts[0]))
            return [("[:]", view)] if view else None
        shape = self._turn(np.empty(joined, bool)).shape
        if self.axis >= len(shape) or shape[self.axis] % self.heads or not prod(shape):
            return None
        group = shape[self.axis] // self.heads
        start = 0
        found = []
        for name, part in zip_strict(self.parts, parts):
            stop = start + prod(part) * group // prod(shape)
            piece = shape[: self.axis] + (self.heads * (stop - start),) + shape[self.axis + 1 :]
            is_turned = name in self.turned_parts
            if squeezed(piece) != (exchanged(squeezed(part)) if is_turned else squeezed(part)):
                return None
            found.append(self._piece(start, stop, group, is_turned))
            start = stop
        return found if start == group else None

    def _turn(self, whole: np.ndarray) -> np.ndarray:
        whole = whole.reshape(squeezed(whole.shape))
        return whole.swapaxes(-1, -2) if self.transposed and whole.ndim > 1 else whole

    def _view_of_whole(self, whole: Shape, other: Shape) -> View | None:
        if not self.transposed or len(whole) < 2 > len(other):
            return self._turn if prod(whole) == prod(other) else None
        for shape in (whole, exchanged(other)):  # whichever has fewer axes
            if _covers(shape, whole) and _covers(exchanged(shape), other):
                return lambda array: array.reshape(shape).swapaxes(-1, -2)
        return None

    def _piece(self, start: int, stop: int, group: int, is_turned: bool) -> tuple[str, View]:
        def view(whole: np.ndarray) -> np.ndarray:
            turned = self._turn(whole)
            before, after = turned.shape[: self.axis], turned.shape[self.axis + 1 :]
            grouped = turned.reshape(*before, self.heads, group, *after)
            piece = grouped[(slice(None),) * (self.axis + 1) + (slice(start, stop),)]
            return piece.reshape(*before, -1, *after).swapaxes(-1, -2) if is_turned else piece

        each = f" of each {group}" if self.heads > 1 else ""
        return f"[{':, ' * self.axis}{start}:{stop}{each}]", view


def _sizes(shapes: Iterable[Shape]) -> str:
    return "; ".join(" x ".join(map(str, shape)) or "1" for shape in shapes)


def exchanged(shape: Shape) -> Shape:
    return shape[:-2] + shape[:-3:-1]


def _covers(shape: Shape, other: Shape) -> bool:
    """Whether each axis of `shape` is one or several of `other`."""
    ends, other_ends = np.cumprod((1, *shape)), np.cumprod((1, *other))
    return len(shape) > 1 and ends[-1] == other_ends[-1] and set(ends) <= set(other_ends)


def squeezed(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def parse(left: str, right: str) -> Link:
    """Parse a line of a map; raises UserError if it is unclear."""
    text = re.fullmatch(r"([^()]*?)\s*(?:\(([^()]*)\))?", right.strip())
    names, words = text.groups() if text else ("", None)
    ref, port = _listed(left), _listed(names)
    options: dict[str, Any] = {}
    turned_parts: list[str] = []
    for word in filter(None, _listed(words or "")):
        option = re.fullmatch(r"(axis|heads) (\d+)|(?:(.+) )?transposed", word)
        turned_part = option and option[3]
        if option is None or turned_part and turned_part not in max(ref, port, key=len):
            raise UserError(f"the map says {word!r} of {left}: {FORM}")
        if turned_part:
            turned_parts.append(turned_part)
        else:
            options |= {option[1]: int(option[2])} if option[1] else {"transposed": True}
    both_many = len(ref) > 1 and len(port) > 1
    nameless = any(len(side) > 1 and "" in side for side in (ref, port))
    if text is None or options.get("heads") == 0 or both_many or nameless:
        raise UserError(f"the map's line {left}: {right} has several names on both sides or is unclear: {FORM}")
    return Link(ref, port, turned_parts=tuple(turned_parts), **options)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(","))


def slots_of(modules: Mapping[str, Module]) -> dict[tuple[str, str], Slot]:
    """By (module, name in it)."""
    return {(name, leaf): slot for name, module in modules.items() for leaf, slot in module.slots.items()}


def owners_of(model: Model) -> dict[str, str]:
    """{state_dict key: the module that has it}."""
    return {slot.tensor: name for (name, _), slot in slots_of(model.modules).items()}


def tensors_of(model: Model) -> dict[str, Slot]:
    """By state_dict key."""
    return {slot.tensor: slot for slot in slots_of(model.modules).values()}


def one_to_one(link: Link, ref: Mapping[str, Slot], port: Mapping[str, Slot]) -> list[tuple[Slot, Slot]]:
    """(reference's, port's) tensors or pieces; raises UserError if they do not fit."""
    slots, port_slots = [ref[key] for key in link.ref], [port[key] for key in link.port]
    shapes, port_shapes = [slot.shape for slot in slots], [slot.shape for slot in port_slots]
    if link.transposed or shapes != port_shapes:
        views = link.views(shapes, port_shapes)
        if views is None:
            sizes = f"{_sizes(shapes)} against {_sizes(port_shapes)}"
            raise UserError(f"the map's {': '.join(link.line)} does not add up: {sizes}: check its names")
        whole, parts = (slots, port_shapes) if len(port_slots) > 1 else (port_slots, shapes)
        whole[:] = [
            replace(whole[0], key=whole[0].key + label, shape=shape, view=view)
            for shape, (label, view) in zip_strict(parts, views)
        ]
    return list(zip_strict(slots, port_slots))


def apply(links: Iterable[Link], ref: Model, port: Model) -> dict[str, str]:
    """Set the links' pieces on both models -> {reference's key: port's key}."""
    ref.set_pieces({})
    port.set_pieces({})
    tensors, port_tensors = tensors_of(ref), tensors_of(port)
    pieces, port_pieces = defaultdict(list), defaultdict(list)
    pairs: dict[str, list[tuple[str, str]]] = {key: [] for key in tensors}
    for link in links:
        for slot, port_slot in one_to_one(link, tensors, port_tensors):
            pieces[slot.tensor].append(slot)
            port_pieces[port_slot.tensor].append(port_slot)
            pairs[slot.tensor].append((slot.key, port_slot.key))
    ref.set_pieces(pieces)
    port.set_pieces(port_pieces)
    return dict(chain.from_iterable(pairs.values()))


def inverse(lines: Mapping[str, str]) -> dict[str, str]:
    """The lines of a map of tensors, reversed."""
    return dict(parse(left, right).turned.line for left, right in lines.items())
