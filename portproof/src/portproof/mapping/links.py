"""Which elements of the port's tensors stand for which of the reference's: whole tensors, or one joined from several.

A link is what a line of a map says. Both sides are made one to one by it: a tensor that is several of the other side
is read and written in pieces (see `Slot`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from portproof.backends.model import BackendModel, Module, Slot
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

Shape = tuple[int, ...]
View = Callable[[np.ndarray], np.ndarray]
FORM = "write NAME: NAME, or NAME: NAME, NAME, ... with (axis 1), (heads 4) or (transposed) behind it if need be"


@dataclass(frozen=True)
class Link:
    """Tensors of the reference and of the port, by state_dict key, with the same elements; one side has one tensor.

    Where the other has several, they are joined along the `axis` of the one; with several `heads` its axis holds, for
    each head in turn, that head's part of each. One that is `transposed` has its last two axes exchanged. Two whole
    tensors need not have as many axes: (C, H, W) `transposed` is (H * W, C). Axes are those of PyTorch's layout; axes
    of length 1 do not count.
    """

    ref: tuple[str, ...]
    port: tuple[str, ...]
    axis: int = 0
    heads: int = 1
    transposed: bool = False

    @property
    def line(self) -> tuple[str, str]:
        """The two sides of its line in a map."""
        words = []
        if self.axis:
            words.append(f"axis {self.axis}")
        if self.heads > 1:
            words.append(f"heads {self.heads}")
        if self.transposed:
            words.append("transposed")
        behind = f" ({', '.join(words)})" if words else ""
        return ", ".join(self.ref), ", ".join(self.port) + behind

    @property
    def is_join(self) -> bool:
        """Whether one side has several tensors."""
        return len(self.ref) + len(self.port) > 2

    @property
    def parts(self) -> tuple[str, ...]:
        """The keys of the side that has several tensors."""
        return self.port if len(self.ref) == 1 else self.ref

    @property
    def turned(self) -> Link:
        """The same from the port to the reference."""
        return replace(self, ref=self.port, port=self.ref)

    def views(self, ref: Sequence[Shape], port: Sequence[Shape]) -> list[tuple[str, View]]:
        """(what follows its name, view) of each piece of the joined tensor, or of one for one; shapes are PyTorch's.

        Raises UserError where the tensors do not hold as many elements, or do not join up.
        """
        joined, parts = (ref[0], port) if len(ref) == 1 else (port[0], ref)
        if len(parts) == 1:
            view = self._view_of_whole(squeezed(joined), squeezed(parts[0]))
            found, fits = [("[:]", view)], view is not None
        else:
            found, fits = self._pieces(self._turn(np.empty(joined, bool)).shape, parts)
        if not fits:
            sizes = ["; ".join(" x ".join(map(str, shape)) or "1" for shape in side) for side in (ref, port)]
            left, right = self.line
            raise UserError(
                f"the map's {left}: {right} does not add up: {sizes[0]} against {sizes[1]}: check its names"
            )
        return found

    def fits(self, ref: Sequence[Shape], port: Sequence[Shape]) -> bool:
        """Whether tensors of these shapes can be linked so."""
        try:
            return bool(self.views(ref, port))
        except UserError:
            return False

    def _turn(self, whole: np.ndarray) -> np.ndarray:
        whole = whole.reshape(squeezed(whole.shape))
        return whole.swapaxes(-1, -2) if self.transposed and whole.ndim > 1 else whole

    def _view_of_whole(self, whole: Shape, other: Shape) -> View | None:
        """The view of one tensor that holds the other's elements in their order; None where they do not fit."""
        if not self.transposed or len(whole) < 2 > len(other):
            return self._turn if prod(whole) == prod(other) else None
        for shape in (whole, exchanged(other)):  # whichever has fewer axes
            if _covers(shape, whole) and _covers(exchanged(shape), other):
                return lambda array: array.reshape(shape).swapaxes(-1, -2)
        return None

    def _pieces(self, shape: Shape, parts: Sequence[Shape]) -> tuple[list[tuple[str, View]], bool]:
        """(name and view of each part of the joined tensor, which has this shape; whether these are all of it)."""
        if self.axis >= len(shape) or shape[self.axis] % self.heads or not prod(shape):
            return [], False
        group, start, found, fits = shape[self.axis] // self.heads, 0, [], True
        for part in parts:
            stop = start + prod(part) * group // prod(shape)
            piece = shape[: self.axis] + (self.heads * (stop - start),) + shape[self.axis + 1 :]
            fits = fits and squeezed(piece) == squeezed(part)
            found.append(self._piece(start, stop, group))
            start = stop
        return found, fits and start == group

    def _piece(self, start: int, stop: int, group: int) -> tuple[str, View]:
        def view(whole: np.ndarray) -> np.ndarray:
            turned = self._turn(whole)
            before, after = turned.shape[: self.axis], turned.shape[self.axis + 1 :]
            grouped = turned.reshape(*before, self.heads, group, *after)
            return grouped[(slice(None),) * (self.axis + 1) + (slice(start, stop),)]

        each = f" of each {group}" if self.heads > 1 else ""
        return f"[{':, ' * self.axis}{start}:{stop}{each}]", view


def exchanged(shape: Shape) -> Shape:
    """`shape` with its last two axes exchanged."""
    return shape[:-2] + shape[:-3:-1]


def _covers(shape: Shape, other: Shape) -> bool:
    """Whether each axis of `shape` is one of `other`, or several in turn."""
    ends, other_ends = ([prod(each[:i]) for i in range(len(each) + 1)] for each in (shape, other))
    return len(shape) > 1 and ends[-1] == other_ends[-1] and set(ends) <= set(other_ends)


def squeezed(shape: Shape) -> Shape:
    """`shape` without axes of length 1."""
    return tuple(n for n in shape if n != 1)


def parse(left: str, right: str) -> Link:
    """The link that a line of a map says; raises UserError for a line that says none."""
    text = re.fullmatch(r"([^()]*?)\s*(?:\(([^()]*)\))?", right.strip())
    sides = [tuple(name.strip() for name in side.split(",")) for side in (left, text[1] if text else "")]
    options: dict[str, int | bool] = {}
    for word in filter(None, (word.strip() for word in (text and text[2] or "").split(","))):
        option = re.fullmatch(r"(axis|heads) (\d+)|(transposed)", word)
        if option is None:
            raise UserError(f"the map says {word!r} of {left}: {FORM}")
        options |= {"transposed": True} if option[3] else {option[1]: int(option[2])}
    both_many, zero_heads = all(len(side) > 1 for side in sides), options.get("heads") == 0
    if text is None or zero_heads or both_many or any("" in side for side in sides if len(side) > 1):
        raise UserError(f"the map's line {left}: {right} has several names on both sides or is unclear: {FORM}")
    return Link(*sides, **options)


def slots_of(modules: Mapping[str, Module]) -> dict[tuple[str, str], Slot]:
    """{(module, tensor in it): slot}."""
    return {(name, leaf): slot for name, module in modules.items() for leaf, slot in module.slots.items()}


def apply(links: Iterable[Link], ref: BackendModel, port: BackendModel) -> dict[str, str]:
    """{reference's key: port's key} of the tensors, or of their pieces, that the links make one to one on the models.

    Both models read and write their tensors in these pieces from now on. Raises UserError for a link that cannot be.
    """
    ref.set_pieces({})
    port.set_pieces({})
    slots = [{slot.tensor: slot for slot in slots_of(model.modules).values()} for model in (ref, port)]
    pieces: tuple[dict[str, list[Slot]], dict[str, list[Slot]]] = {}, {}
    pairs: dict[str, dict[str, str]] = {}
    for link in links:
        sides = [[slots[i][key] for key in keys] for i, keys in enumerate((link.ref, link.port))]
        shapes = [[slot.shape for slot in side] for side in sides]
        if shapes[0] == shapes[1] and not link.transposed:
            pairs[link.ref[0]] = {sides[0][0].key: sides[1][0].key}
            continue
        joined = 0 if len(sides[0]) == 1 < len(sides[1]) else 1  # of two whole tensors the port's is read anew
        views = link.turned.views(*shapes[::-1]) if joined else link.views(*shapes)
        whole, parts = sides[joined][0], sides[1 - joined]
        cut = [
            replace(whole, key=whole.key + label, shape=part.shape, view=view)
            for part, (label, view) in zip_strict(parts, views)
        ]
        pieces[joined][whole.tensor] = cut
        both = (cut, parts) if joined == 0 else (parts, cut)
        for a, b in zip_strict(*both):
            pairs.setdefault(a.tensor, {})[a.key] = b.key
    ref.set_pieces(pieces[0])
    port.set_pieces(pieces[1])
    return {key: port_key for tensor in slots[0] for key, port_key in pairs.get(tensor, {}).items()}


def converted(link: Link, arrays: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
    """The port's arrays, of `shapes`, with the elements of the reference's `arrays`; all are in PyTorch's layout."""
    views = link.views([array.shape for array in arrays], shapes)
    if len(arrays) == 1:
        return [view(arrays[0]).reshape(shape) for (_, view), shape in zip_strict(views, shapes)]
    whole = np.empty(shapes[0], arrays[0].dtype)
    for (_, view), array in zip_strict(views, arrays):
        part = view(whole)
        part[...] = array.reshape(part.shape)
    return [whole]


def inverse(lines: Mapping[str, str]) -> dict[str, str]:
    """A map's lines for tensors the other way round."""
    return dict(parse(left, right).turned.line for left, right in lines.items())
