"""Names that a package imports when they are used."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def on_use(package: str) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: a name of its `__all__` that it imports under TYPE_CHECKING is imported when used.

    So type checkers know the name, and no other table says where it is.
    """

    @cache
    def modules() -> dict[str, str]:
        source = inspect.getsource(sys.modules[package])
        blocks = [node.body for node in ast.parse(source).body if isinstance(node, ast.If)]
        imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}

    def imported(name: str) -> Any:
        if name not in sys.modules[package].__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules()[name]), name)

    return imported
