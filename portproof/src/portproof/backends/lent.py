"""What is changed for a while and restored: a user's model, a framework's functions."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portproof.backends.base import Backend

Owned = tuple[str, Any]  # (dotted name, parameter or buffer)


def owned_tensors(backend: "Backend", module: Any) -> list[Owned]:
    """Every parameter and buffer, saved or not; tied ones once.

    Not those that a layer computes in every run, as weight norm does.
    """
    found = {}
    for name, part in backend.layers.named_modules(module):
        prefix = f"{name}." if name else ""
        for leaf, tensor in chain(*backend.layers.own_tensors(part)):
            if backend.has_values(tensor) and backend.is_leaf(tensor):
                found.setdefault(id(tensor), (prefix + leaf, tensor))
    return list(found.values())


def taken_gradients(backend: "Backend", module: Any) -> Iterator[Owned]:
    """Yield (name, gradient) of each parameter that has one, and remove the gradient."""
    for name, parameter in backend.layers.named_parameters(module):
        gradient = backend.taken_gradient(parameter)
        if gradient is not None:
            yield name, gradient


def _all_in(backend: "Backend", module: Any) -> Iterator[Any]:
    """All modules, and also those that only compute a parameter."""
    yield module
    for child in backend.layers.children(module):
        yield from _all_in(backend, child)


@contextmanager
def as_it_was(backend: "Backend", module: Any) -> Iterator[list[Any]]:
    """In this context the yielded tensors (`owned_tensors`) may be given other values.

    Afterwards all is restored. Use `Backend.put`, which keeps the old values, and not operations in place.
    """
    attributes = [(part, dict(vars(part))) for part in _all_in(backend, module)]
    # Copies of lists and dicts too, such as kept activations and buffers.
    held = {}
    for _, saved in attributes:
        held |= {id(value): value for value in saved.values() if isinstance(value, (dict, list))}
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


@contextmanager
def patched(replaced: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace each attribute, (module or class, name), in this context; may be nested."""
    before = {(owner, name): vars(owner)[name] for owner, name in replaced if name in vars(owner)}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name in replaced:
            if (owner, name) in before:
                setattr(owner, name, before[owner, name])
            else:  # it was inherited
                delattr(owner, name)
