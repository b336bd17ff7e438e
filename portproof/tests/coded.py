"""A model of either framework from its children and the code that calls them. Imports none."""

from collections.abc import Callable
from typing import Any


class Coded:
    """A module that runs `code(self, *inputs)` over children given by name; derive from this and from a module."""

    def __init__(self, code: Callable, **children: Any) -> None:
        super().__init__()
        self.code = code
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *inputs, **keywords):
        return self.code(self, *inputs, **keywords)
