"""Versions: an older framework is refused in one line, and what Python 3.9 lacks is as in later ones."""

import ast
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch

import portproof
from portproof.backends import backend
from portproof.python39 import zip_strict
from sturdyio.cli import UserError


@pytest.mark.parametrize(
    ("framework", "version", "numpy", "message"),
    [
        (torch, "2.0.1+cu117", "1.26.4", "torch 2.0.1.* is older than 2.1: run pip install --upgrade"),
        (paddle, "2.5.2", "1.26.4", "paddle 2.5.2 is older than 2.6: run pip install --upgrade"),
        (torch, "2.2.2", "2.0.2", "torch 2.2.2 is compiled for NumPy 1, not for 2.0.2: run pip install 'numpy<2'"),
        (torch, "2.3.0", "2.0.2", ""),
        (torch, "2.1.0", "1.26.4", ""),
        (torch, "2.10.0", "2.0.2", ""),
        (paddle, "2.6.2", "2.0.2", ""),
        (paddle, "0.0.0", "2.0.2", ""),
    ],
)
def test_a_version_that_does_not_work_is_refused(framework, version, numpy, message, monkeypatch):
    monkeypatch.setattr(framework, "__version__", version)
    monkeypatch.setattr(np, "__version__", numpy)
    new = backend.__wrapped__  # without the cache
    if message:
        with pytest.raises(UserError, match=message):
            new(framework.__name__)
    else:
        assert new(framework.__name__).framework is framework


def test_zip_strict_wants_equal_lengths():
    assert list(zip_strict("ab", [1, 2], iter((None, None)))) == [("a", 1, None), ("b", 2, None)]
    for shorter in (("ab", "c"), ("a", "bc"), ("", "a", "b")):
        with pytest.raises(ValueError, match="shorter|longer"):
            list(zip_strict(*shorter))


def test_no_class_is_joined_with_another_while_the_kit_runs():
    """`isinstance(x, int | str)` works from Python 3.10 on."""
    found = []
    for path in Path(portproof.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                found += [
                    f"{path.name}:{node.lineno}" for part in ast.walk(node.args[1]) if isinstance(part, ast.BitOr)
                ]
    assert not found
