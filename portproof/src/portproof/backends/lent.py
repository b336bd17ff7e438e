"""A user's model lent for a run: its own objects, so that hooks and `stop_gradient` count, given back as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portproof.backends.base import Backend

Owned = tuple[str, Any]  # a parameter's or buffer's dotted name, and the tensor


def owned_tensors(backend: "Backend", module: Any) -> list[Owned]:
    """Every parameter and buffer in `module` that has values of its own, saved or not; tied ones once.

    One that its layer computes from others in every run, as weight norm does, has none.
    """
    found = {}
    for name, part in backend.layers.named_modules(module):
        prefix = f"{name}." if name else ""
        for leaf, tensor in chain(*backend.layers.own_tensors(part)):
            if backend.has_values(tensor) and backend.is_leaf(tensor):
                found.setdefault(id(tensor), (prefix + leaf, tensor))
    return list(found.values())


def taken_gradients(backend: "Backend", module: Any) -> Iterator[Owned]:
    """(name, gradient) of every parameter that has received one, and has none any more when the next is asked for."""
    for name, parameter in backend.layers.named_parameters(module):
        gradient = backend.taken_gradient(parameter)
        if gradient is not None:
            yield name, gradient


def _all_in(backend: "Backend", module: Any) -> Iterator[Any]:
    """`module` and all in it, those that only compute a parameter, too."""
    yield module
    for child in backend.layers.children(module):
        yield from _all_in(backend, child)


@contextmanager
def as_it_was(backend: "Backend", module: Any) -> Iterator[list[Any]]:
    """The tensors in `module`, see `owned_tensors`, to be given other values in this context.

    After it `module` and all in it have the attributes, values, precision and gradients of before.
    Values must not have been changed in place: `Backend.put` gives a tensor new ones, and keeps the old.
    """
    attributes = [(part, dict(vars(part))) for part in _all_in(backend, module)]
    # Of what an attribute holds, too: a list of kept activations, the dict of the buffers, ...
    held = {id(value): value for _, saved in attributes for value in saved.values() if isinstance(value, (dict, list))}
    copies = [(value, value.copy()) for value in held.values()]
    owned = [tensor for _, tensor in owned_tensors(backend, module)]
    values = [(tensor, backend.values(tensor), backend.taken_gradient(tensor)) for tensor in owned]
    try:
        yield owned
    finally:
        for part, saved in attributes:
            vars(part).clear()
            vars(part).update(saved)
        for value, copy in copies:
            value.clear()
            value.update(copy) if isinstance(value, dict) else value.extend(copy)
        for tensor, before, gradient in values:
            backend.taken_gradient(tensor)
            backend.put_back(tensor, before)
            if gradient is not None:
                tensor.grad = gradient
