"""Functions of a framework replaced for as long as a context lasts. Imports no framework."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(replaced: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """In this context each of these attributes, (module or class, name), is what is given for it; it may be nested."""
    before = {(owner, name): vars(owner)[name] for owner, name in replaced if name in vars(owner)}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name in replaced:
            if (owner, name) in before:
                setattr(owner, name, before[owner, name])
            else:  # a class has inherited it
                delattr(owner, name)
