"""Nested values as JSON, arrays apart. What has no JSON form is marked, never pickled."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from portproof.backends.trace import is_array, items_in

KINDS = "biufc"  # dtype kinds that can be stored
COMPLEX = {"complex64": "float32", "complex128": "float64"}  # stored as pairs of floats
Put = Callable[[np.ndarray], Any]


class Unwritten(list):
    """The contents of an object that a file cannot hold, in order."""

    type = ""


def digest_of(array: np.ndarray) -> str:
    """A digest of type, shape and bits."""
    digest = hashlib.blake2b(f"{array.dtype} {array.shape} ".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class Store:
    """Numbered arrays without repeats."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.digests: dict[str, int] = {}

    def put(self, array: np.ndarray) -> int:
        """Store `array` and return its number; raises ValueError for other kinds."""
        if array.dtype.kind not in KINDS or array.dtype.itemsize > np.dtype(np.complex128).itemsize:
            raise ValueError(f"an array of {array.dtype}")
        array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        digest = digest_of(array)
        if digest not in self.digests:
            self.digests[digest] = len(self.arrays)
            self.arrays.append(array)
        return self.digests[digest]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def fetch(arrays: Sequence[np.ndarray], number: Any) -> np.ndarray:
    """The array of that number; raises ValueError if there is none."""
    if type(number) is not int or not 0 <= number < len(arrays):
        raise ValueError(f"it names an array {number!r} that it does not hold")
    return arrays[number]


def encode(value: Any, put: Put) -> Any:
    """`value` as JSON, with what `put` returns for each array.

    An object without a JSON form becomes an `Unwritten` of its values.
    """
    if is_array(value):
        return {"array": put(value)}
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if value is None or kind in (bool, int, str) or kind is float and math.isfinite(value):
        return value
    if kind in (float, complex):
        return {kind.__name__: repr(value)}
    if kind in (dict, OrderedDict) and all(key is None or type(key) in (bool, int, str) for key in value):
        return {"dict": [[key, encode(item, put)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [encode(part, put) for part in (value.start, value.stop, value.step)]}
    items = [encode(item, put) for _, item in items_in(value, is_array)]
    if kind is list:
        return {"list": items}
    if isinstance(value, tuple) and (hasattr(value, "_fields") or not getattr(value, "__dict__", None)):
        return {"tuple": items, "named": _names(value)}
    return {"object": value.type if isinstance(value, Unwritten) else kind.__name__, "items": items}


def _names(value: tuple) -> list[str]:
    names = [type(value).__name__, *getattr(value, "_fields", ())]
    try:
        namedtuple(names[0], names[1:])
    except (TypeError, ValueError):  # another kind of class with `_fields`
        return []
    return names if value and len(names) == 1 + len(value) else []


def decode(node: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The inverse of `encode`; raises ValueError, TypeError or KeyError for bad input."""
    if node is None or type(node) in (bool, int, float, str):
        return node
    if type(node) is not dict:
        raise ValueError(f"it holds a {type(node).__name__} where a value should be")
    if "array" in node:
        return fetch(arrays, node["array"])
    if "float" in node:
        return float(node["float"])
    if "complex" in node:
        return complex(node["complex"])
    if "slice" in node:
        return slice(*(decode(part, arrays) for part in node["slice"]))
    if "list" in node:
        return [decode(item, arrays) for item in node["list"]]
    if "dict" in node:
        return {key: decode(item, arrays) for key, item in node["dict"]}
    if "tuple" in node:
        items = [decode(item, arrays) for item in node["tuple"]]
        if node["named"]:
            return namedtuple(node["named"][0], node["named"][1:])(*items)
        return tuple(items)
    found = Unwritten(decode(item, arrays) for item in node["items"])
    found.type = str(node["object"])
    return found


def is_written(value: Any) -> bool:
    """Whether `encode` keeps all of it."""
    return '"object":' not in json.dumps(encode(value, lambda _: 0), separators=(",", ":"))
