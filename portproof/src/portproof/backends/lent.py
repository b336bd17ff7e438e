"""What is changed for a while and restored: a user's model, a framework's functions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from portproof.backends.containers import contents, refill

if TYPE_CHECKING:
    from portproof.backends.base import Backend

Owned = tuple[str, Any]  # (dotted name, parameter or buffer)


def owned_tensors(backend: "Backend", module: Any) -> list[Owned]:
    """Every parameter and buffer, saved or not; tied ones once.

    Not those that a layer computes in every run, as weight norm does.
    """
    found: dict[int, Owned] = {}
    for name, part in backend.layers.named_modules(module):
        prefix = f"{name}." if name else ""
        for leaf, tensor in chain(*backend.layers.own_tensors(part)):
            if backend.has_values(tensor) and backend.is_leaf(tensor):
                found.setdefault(id(tensor), (prefix + leaf, tensor))
    return list(found.values())


@contextmanager
def taking_gradients(backend: "Backend", module: Any, take: Callable[[str, Any], None]) -> Iterator[None]:
    """Remove each parameter's gradient when that of another has come, else at the end: only two are held at once.

    `take` gets its name and the gradient; several times, to be added, if several backward passes reach the parameter.
    """
    named = dict(backend.layers.named_parameters(module))
    come: dict[str, Any] = {}  # the parameter whose gradient was the last to come

    def take_those(parameters: Mapping[str, Any]) -> None:
        for name, parameter in parameters.items():
            gradient = backend.taken_gradient(parameter)
            if gradient is not None:
                take(name, gradient)

    def note(name: str, _gradient: Any) -> None:  # which `named[name]` gets after this
        with backend.runs.not_replaced():
            take_those(come)
        come.clear()
        come[name] = named[name]

    hooks = [
        each.register_hook(partial(note, name))
        for name, each in named.items()
        if backend.runs.hooks_parameters and backend.has_values(each) and backend.requires_grad(each)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        take_those(named)


@contextmanager
def thawed(backend: "Backend", module: Any) -> Iterator[None]:
    """Have frozen parameters receive gradients in this context."""
    named = [each for _, each in backend.layers.named_parameters(module) if backend.has_values(each)]
    frozen = [each for each in named if each.is_floating_point() and not backend.requires_grad(each)]
    for each in frozen:
        backend.set_requires_grad(each, True)
    try:
        yield
    finally:
        for each in frozen:
            backend.set_requires_grad(each, False)


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
    held: dict[int, dict | list] = {}
    for _, saved in attributes:
        held |= {id(value): value for value in saved.values() if isinstance(value, (dict, list))}
    copies = [(value, contents(value)) for value in held.values()]
    owned = [tensor for _, tensor in owned_tensors(backend, module)]
    values = [(tensor, backend.values(tensor), backend.taken_gradient(tensor)) for tensor in owned]
    try:
        yield owned
    finally:
        for part, saved in attributes:
            vars(part).clear()
            vars(part).update(saved)
        for value, copy in copies:
            refill(value, copy)
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
