"""Errors of missing libraries and user modules; generated projects import `run` from here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from sturdyio.cli import Failed, UserError, one_line, run, user_code

__all__ = ["naming_extra", "resolve", "run"]

# What each extra installs, by import name.
EXTRAS = {
    "torch": ("torch", "scipy", "yaml"),
    "paddle": ("paddle",),
    "ckpt": ("google",),
    "mindspore": ("mindspore",),
    "report": ("jinja2", "PIL"),
    "onnx": ("onnx", "onnxruntime", "PIL"),
}


@contextmanager
def naming_extra(extra: str = "") -> Iterator[None]:
    """Make a missing library a UserError that names the extra, if that is known."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        extra = extra or next((name for name, libraries in EXTRAS.items() if library in libraries), "")
        if not extra:
            raise
        raise UserError(f"{error}: run pip install 'portproof[{extra}]'") from error


class PortError(Failed):
    """The port's code raised before the port could run."""


def resolve(path: str, what: str, of_port: bool = False) -> Callable[..., Any]:
    """The callable "PKG.MOD:NAME"; raises UserError, which calls it `what`.

    If its module is code `of_port`, what the import raises is a PortError.
    """
    module_name, _, name = str(path).partition(":")
    if not module_name or not name.isidentifier():
        raise UserError(f"{what} {path!r} is no PKG.MOD:NAME")
    try:
        with naming_extra(), user_code():
            module = importlib.import_module(module_name)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        fix = "install it with pip, or put the folder that holds it into PYTHONPATH"
        raise UserError(f"{what} {path!r}: {error}: {fix}") from error
    except Exception as error:  # the user's module may raise anything
        kind = PortError if of_port else UserError
        raise kind(f"{what} {path!r}: importing {module_name} raised {one_line(error)}") from error
    if not callable(getattr(module, name, None)):
        known = [own for own, value in vars(module).items() if callable(value) and not own.startswith("_")]
        alike = get_close_matches(name, known, 1)
        hint = f": did you mean {alike[0]}?" if alike else ""
        raise UserError(f"{what} {path!r}: {module_name} has no {name} that can be called{hint}")
    return getattr(module, name)
