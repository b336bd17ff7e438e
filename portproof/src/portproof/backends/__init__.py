"""One backend a framework: nothing else builds, runs, traces or reads a model. `backend("torch")` is the door.

`base.py` says what a framework's tensors and weights files are asked, `layers.py` its models' structure, `runs.py` a
run, `training.py` training; `torch_backend.py`, `paddle_backend.py` and `mindspore_backend.py` answer, each in its own
way, with the exact float64 arithmetic of `fp64_torch.py`, `fp64_paddle.py` and `fp64_mindspore.py`. On these stand,
once for all frameworks, `slots.py` (a model's tensors by PyTorch's names), `tracer.py` (what flows through it) and
`model.py` (its runs). Importing this package imports no framework.
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
    """The backend of "torch", "paddle" or "mindspore", which is imported now.

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


def backend_of_side(model: Any, usual: str) -> Backend:
    """The backend for one side of a pair: MindSpore's for its models, else that of `usual`."""
    mindspore = sys.modules.get("mindspore")
    return backend("mindspore" if mindspore and isinstance(model, mindspore.nn.Cell) else usual)


def backend_imported(usual: str) -> Backend:
    """The backend of `usual`, unless MindSpore has been imported and that has not."""
    return backend("mindspore" if "mindspore" in sys.modules and usual not in sys.modules else usual)
