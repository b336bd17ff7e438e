"""Models, functions and inputs given as text, on a command line or in a script."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from portproof.backends.drawn import probe_images
from portproof.backends.trace import Inputs
from portproof.io.cli import PortError, resolve
from sturdyio.cli import MachineError, UserError, one_line, user_code
from sturdyio.files import load_npz

MOST_AXES, MOST_NUMBERS = 32, 2**28  # of an input that is drawn: NumPy 1 has no more axes, 2 GB in float64
DTYPES = ("", "float32", "int64", "int32", "bool")


def model_factory(text: str, what: str = "model", of_port: bool = False) -> Callable[[], Any]:
    """A factory of "PKG.MOD:NAME" or "PKG.MOD:NAME(KEYWORD=LITERAL, ...)".

    Call arguments come before these keywords. Raises UserError, naming it `what`, if it is missing; so does the factory
    if making the model raises. With `of_port`, exceptions of the port's own code are PortErrors.
    """
    named, kwargs = _parsed(text, what, of_port)

    def factory(*args: Any, **more: Any) -> Any:
        try:
            with user_code():
                return named(*args, **more, **kwargs)
        except MachineError:
            raise
        except Exception as error:
            kind = PortError if of_port and _takes(named, args, more | kwargs) else UserError
            raise kind(f"{what} {text!r}: making it raised {one_line(error)}") from error

    return factory


def named_function(text: str, what: str) -> Callable[..., Any]:
    """The function "PKG.MOD:NAME", with keywords if given; of a class, an object.

    Raises UserError as `model_factory` does.
    """
    named, kwargs = _parsed(text, what)
    return model_factory(text, what)() if isinstance(named, type) else functools.partial(named, **kwargs)


def _takes(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether it accepts these arguments; True if unknown (not written in Python)."""
    try:
        with suppress(ValueError):
            inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _parsed(text: str, what: str, of_port: bool = False) -> tuple[Callable[..., Any], dict[str, Any]]:
    module_name, _, call = text.partition(":")
    try:
        node = ast.parse(call, mode="eval").body
        kwargs: dict[str, Any] = {}
        if isinstance(node, ast.Call) and not node.args:
            kwargs = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in node.keywords}
            node = node.func
        if not isinstance(node, ast.Name) or "" in kwargs or not module_name:
            raise ValueError("it is none")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(f"{what} {text!r} is no PKG.MOD:FACTORY nor PKG.MOD:FACTORY(KEYWORD=VALUE, ...)") from error
    return resolve(f"{module_name}:{node.id}", what, of_port), kwargs


def draw_inputs(texts: Sequence[str], seed: int, what: str = "input") -> Inputs:
    """Random arrays of "SHAPE[:DTYPE[:HIGH]]", such as "2,3,224,224" or "2,16:int64:30522".

    NAME=SHAPE... is a keyword argument: the result is then a dict, with keys 0, 1, ... for positions. Image shapes give
    probe images, others normal numbers, float32. Integers are below HIGH (2) and include 0, HIGH - 1 and 1 if there is
    room. No row of booleans (last axis) is constant, unless it has one element. Raises UserError, naming it `what`, for
    other text.
    """
    rng = np.random.default_rng([seed, 9])
    drawn: dict[str | int, np.ndarray] = {}
    for text in texts:
        name, equals, shape = text.rpartition("=")
        if equals and not name.isidentifier():
            raise UserError(f"{what} {text!r}: {name!r} is no keyword: write NAME=SHAPE, or SHAPE")
        key = name if equals else sum(isinstance(key, int) for key in drawn)
        if key in drawn:
            raise UserError(f"{what} {text!r}: there are two of {name}: give it once")
        drawn[key] = _drawn(shape, rng, f"{what} {text!r}")
    return drawn if any(isinstance(key, str) for key in drawn) else list(drawn.values())


def _drawn(text: str, rng: np.random.Generator, what: str) -> np.ndarray:
    lengths, _, rest = text.partition(":")
    dtype, _, high = rest.partition(":")
    is_whole = dtype.startswith("int")
    try:
        shape, below = tuple(map(int, lengths.split(","))), int(high or 2)
        if min(*shape, below) < 1 or dtype not in DTYPES or high and not is_whole:
            raise ValueError
    except ValueError as error:
        raise UserError(f"{what} is no shape such as 2,3,224,224 or 2,16:int64:30522") from error
    if len(shape) > MOST_AXES or math.prod(shape) > MOST_NUMBERS:
        most = f"{MOST_AXES} axes or {MOST_NUMBERS} numbers"
        raise UserError(f"{what} has more than {most}: draw fewer, or give a file with --inputs")
    if is_whole and below > 2 ** (int(dtype[3:]) - 1):
        raise UserError(
            f"{what}: {dtype} has no numbers of {below - 1}: choose a HIGH of 2^{int(dtype[3:]) - 1} at most"
        )
    if is_whole:
        return _whole_numbers(shape, below, rng).astype(dtype)
    if dtype == "bool":
        return _booleans(shape, rng)
    if len(shape) == 4 and shape[1] == 3 and shape[2] % 16 == shape[3] % 16 == 0:
        return probe_images(rng, shape[0], *shape[2:])
    return rng.normal(size=shape).astype(np.float32)


def _whole_numbers(shape: tuple[int, ...], high: int, rng: np.random.Generator) -> np.ndarray:
    """Include values that are often special, such as padding or an end of text."""
    drawn = rng.integers(0, high, shape)
    special = list(dict.fromkeys((0, high - 1, min(1, high - 1))))[: drawn.size]
    drawn.flat[rng.permutation(drawn.size)[: len(special)]] = special
    return drawn


def _booleans(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """No constant rows: a mask that hides a whole row gives NaN in most models."""
    drawn = rng.random(shape) < 0.5
    rows = drawn.reshape(-1, shape[-1] if shape[-1] > 1 else drawn.size)
    for row in rows if rows.shape[1] > 1 else ():
        row[rng.permutation(len(row))[:2]] = True, False
    return drawn


def load_inputs(path: str | Path, what: str = "inputs") -> Inputs:
    """The arrays of a .npz file: 0, 1, ... or arr_0, arr_1, ... are positions, other names keywords.

    Raises UserError, naming it `what`, if it is missing, damaged or holds other things.
    """
    found: dict[str | int, np.ndarray] = {}
    for name, array in load_npz(path, what).items():
        place = re.fullmatch(r"(?:arr_)?(\d{1,9})", name)
        key = int(place[1]) if place else name
        if key in found:
            raise UserError(f"{what} {path} holds position {key} twice, as {key} and arr_{key}: write each once")
        found[key] = array
    if not found:
        raise UserError(f"{what} {path} holds no array: write it with np.savez")
    return found
