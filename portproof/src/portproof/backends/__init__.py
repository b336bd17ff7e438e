"""One backend a framework: nothing else builds, runs, traces or reads a model. `backend("torch")` is the door.

`base.py` and `model.py` hold what is made of a framework's operations, once for all of them; `torch_backend.py` and
`paddle_backend.py` what a framework does in its own way; `fp64_torch.py` and `fp64_paddle.py` its float64 arithmetic
without float32 constants. Importing this package imports no framework.
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
from portproof.io.cli import UserError, naming_extra

FRAMEWORKS = ("torch", "paddle")
OLDEST = {"torch": (2, 1), "paddle": (2, 6)}  # as pyproject.toml has it


@cache
def backend(name: str) -> Backend:
    """The backend of "torch" or "paddle", which is imported now.

    Raises UserError where it is not installed, is too old, or was compiled for another NumPy than there is.
    """
    with naming_extra(name):
        _check_version(importlib.import_module(name))
        return importlib.import_module(f".{name}_backend", __name__).BACKEND


def _check_version(framework: ModuleType) -> None:
    name, version = framework.__name__, framework.__version__
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if (0, 0) < found < OLDEST[name]:  # a build of the development version may be 0.0.0
        oldest = ".".join(map(str, OLDEST[name]))
        raise UserError(f"{name} {version} is older than {oldest}: run pip install --upgrade 'portproof[{name}]'")
    if name == "torch" and found < (2, 3) and int(np.__version__.partition(".")[0]) > 1:
        raise UserError(f"torch {version} is compiled for NumPy 1, not for {np.__version__}: run pip install 'numpy<2'")


def backend_of_tensor(value: Any) -> Backend | None:
    """The backend whose tensor `value` is; None for what is no tensor. It imports no framework."""
    loaded = (backend(name) for name in FRAMEWORKS if name in sys.modules)
    return next((found for found in loaded if found.framework.is_tensor(value)), None)


def backend_of_model(model: Any) -> Backend:
    """The backend of the framework that `model` is of; raises UserError for what is no model."""
    for base in type(model).__mro__:
        name = base.__module__.partition(".")[0]
        if name in FRAMEWORKS and isinstance(model, backend(name).module_class):
            return backend(name)
    raise UserError(f"a {type(model).__name__} is no model: give a torch.nn.Module or a paddle.nn.Layer")
