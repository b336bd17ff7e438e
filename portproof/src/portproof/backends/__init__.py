"""The frameworks, one backend each: only these build, run, trace and read models.

`backend("torch")` gives one. base.py says what a backend does. slots.py, trace.py and model.py are the same for all of
them. Importing this package imports no framework.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from portproof.backends.base import Backend
from portproof.io.cli import naming_extra
from sturdyio.cli import UserError

FRAMEWORKS = ("torch", "paddle", "mindspore")
OLDEST = {"torch": (2, 1), "paddle": (2, 6), "mindspore": (2, 10)}  # as pyproject.toml has it


@cache
def backend(name: str) -> Backend:
    """Import the backend of "torch", "paddle" or "mindspore".

    Raises UserError if it is not installed, too old, or compiled for another version of NumPy.
    """
    with naming_extra(name):
        _check_version(importlib.import_module(name))
        return importlib.import_module(f".{name}_backend", __name__).BACKEND


def _check_version(framework: ModuleType) -> None:
    name, version = framework.__name__, framework.__version__
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if (0, 0) < found < OLDEST[name]:  # development builds may be 0.0.0
        oldest = ".".join(map(str, OLDEST[name]))
        raise UserError(f"{name} {version} is older than {oldest}: run pip install --upgrade 'portproof[{name}]'")
    if name == "torch" and found < (2, 3) and int(np.__version__.partition(".")[0]) > 1:
        raise UserError(f"torch {version} is compiled for NumPy 1, not for {np.__version__}: run pip install 'numpy<2'")


def backend_of_tensor(value: Any) -> Backend | None:
    """The backend whose tensor `value` is, or None. Imports no framework."""
    loaded = (backend(name) for name in FRAMEWORKS if name in sys.modules)
    return next((found for found in loaded if found.framework.is_tensor(value)), None)


def backend_of_model(model: Any) -> Backend:
    """The backend of the framework of `model`; raises UserError if it is no model."""
    for base in type(model).__mro__:
        name = base.__module__.partition(".")[0]
        if name in FRAMEWORKS and isinstance(model, backend(name).module_class):
            return backend(name)
    raise UserError(f"a {type(model).__name__} is no model: give a torch.nn.Module or a paddle.nn.Layer")


def backend_of_side(model: Any, usual: str) -> Backend:
    """The backend for one side of a pair: MindSpore's for its models, else that of `usual`."""
    mindspore = sys.modules.get("mindspore")
    return backend("mindspore" if mindspore and isinstance(model, mindspore.nn.Cell) else usual)


def backend_imported(usual: str) -> Backend:
    """MindSpore's backend if only MindSpore has been imported, else that of `usual`."""
    return backend("mindspore" if "mindspore" in sys.modules and usual not in sys.modules else usual)
