"""Replace functions of a framework for a while. Imports no framework."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


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
