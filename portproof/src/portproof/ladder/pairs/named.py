"""Models, functions and inputs that are named by text, on a command line or in a script."""

from __future__ import annotations

import ast
import functools
import inspect
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

DTYPES = ("", "float32", "int64", "int32", "bool")


def model_factory(text: str, what: str = "model", of_port: bool = False) -> Callable[[], Any]:
    """What makes the model "PKG.MOD:NAME" or "PKG.MOD:NAME(KEYWORD=LITERAL, ...)", anew at each call.

    What it is called with comes before these keywords. Raises UserError, which calls it `what`, if it is not there; so
    does the factory where making the model raises. What the port's own code raises (`of_port`) is a PortError.
    """
    named, kwargs = _parsed(text, what, of_port)

    def factory(*args: Any, **more: Any) -> Any:
        try:
            with user_code():
                return named(*args, **more, **kwargs)
        except MachineError:
            raise
        except Exception as error:  # whatever a factory of the user's may raise
            kind = PortError if of_port and _takes(named, args, more | kwargs) else UserError
            raise kind(f"{what} {text!r}: making it raised {one_line(error)}") from error

    return factory


def named_function(text: str, what: str) -> Callable[..., Any]:
    """The function "PKG.MOD:NAME", its keywords set where the text gives some; of a class an object of it.

    Raises UserError, which calls it `what`, as `model_factory` does.
    """
    named, kwargs = _parsed(text, what)
    return model_factory(text, what)() if isinstance(named, type) else functools.partial(named, **kwargs)


def _takes(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether it can be called so; of one that is not written in Python that cannot be told."""
    try:
        with suppress(ValueError):
            inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _parsed(text: str, what: str, of_port: bool = False) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What "PKG.MOD:NAME(KEYWORD=LITERAL, ...)" names, and the keywords."""
    module_name, _, call = text.partition(":")
    try:
        node = ast.parse(call, mode="eval").body
        kwargs = {}
        if isinstance(node, ast.Call) and not node.args:
            kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            node = node.func
        if not isinstance(node, ast.Name) or None in kwargs or not module_name:
            raise ValueError("it is none")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{what} {text!r} is no PKG.MOD:FACTORY nor PKG.MOD:FACTORY(KEYWORD=VALUE, ...)") from error
    return resolve(f"{module_name}:{node.id}", what, of_port), kwargs


def draw_inputs(texts: Sequence[str], seed: int, what: str = "input") -> Inputs:
    """An array for each of `texts`, "SHAPE[:DTYPE[:HIGH]]" such as "2,3,224,224" or "2,16:int64:30522".

    NAME=SHAPE... is a keyword argument: with one of them it is a dict, in which 0, 1, ... are the positions of the
    others. Probe images where the shape is that of images, else normal numbers, float32. Whole numbers are below HIGH
    (2), and 0, HIGH - 1 and 1 are among them where there is room. No row of booleans (last axis) has one value alone,
    unless it has one element. Raises UserError, which calls it `what`, for text that is none.
    """
    rng, drawn = np.random.default_rng([seed, 9]), {}
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
    """The array of SHAPE[:DTYPE[:HIGH]]."""
    lengths, _, rest = text.partition(":")
    dtype, _, high = rest.partition(":")
    is_whole = dtype.startswith("int")
    try:
        shape, below = tuple(map(int, lengths.split(","))), int(high or 2)
        if min(*shape, below) < 1 or dtype not in DTYPES or high and not is_whole:
            raise ValueError
    except ValueError as error:
        raise UserError(f"{what} is no shape such as 2,3,224,224 or 2,16:int64:30522") from error
    if is_whole:
        return _whole_numbers(shape, below, rng).astype(dtype)
    if dtype == "bool":
        return _booleans(shape, rng)
    if len(shape) == 4 and shape[1] == 3 and shape[2] % 16 == shape[3] % 16 == 0:
        return probe_images(rng, shape[0], *shape[2:])
    return rng.normal(size=shape).astype(np.float32)


def _whole_numbers(shape: tuple[int, ...], high: int, rng: np.random.Generator) -> np.ndarray:
    """What is often special, such as a padding index or an end of text, is among them."""
    drawn = rng.integers(0, high, shape)
    special = list(dict.fromkeys((0, high - 1, min(1, high - 1))))[: drawn.size]
    drawn.flat[rng.permutation(drawn.size)[: len(special)]] = special
    return drawn


def _booleans(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A mask that hides a whole row makes most models give NaN."""
    drawn = rng.random(shape) < 0.5
    rows = drawn.reshape(-1, shape[-1] if shape[-1] > 1 else drawn.size)
    for row in rows if rows.shape[1] > 1 else ():
        row[rng.permutation(len(row))[:2]] = True, False
    return drawn


def load_inputs(path: str | Path, what: str = "inputs") -> Inputs:
    """The arrays in a .npz file: 0, 1, ... or arr_0, arr_1, ... are positional arguments, other names keywords.

    Raises UserError, which calls it `what`, for a file that is missing, damaged or holds anything but arrays.
    """
    found: dict[str | int, np.ndarray] = {}
    for name, array in load_npz(path, what).items():
        place = re.fullmatch(r"(?:arr_)?(\d{1,9})", name)
        found[int(place[1]) if place else name] = array
    if not found:
        raise UserError(f"{what} {path} holds no array: write it with np.savez")
    return found
