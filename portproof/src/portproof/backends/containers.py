"""Lists, dicts and objects of a user's classes, read, filled and copied through no method of theirs.

Such a class may forbid a change, count it, or copy more than is asked for.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any

BUILT_IN = (OrderedDict, defaultdict, dict, list, object)  # an OrderedDict keeps its order beside the dict


def _built_in(value: Any) -> Any:
    return next(base for base in BUILT_IN if issubclass(type(value), base))


def contents(value: Any) -> list:
    """The items of a list, or the (key, value) pairs of a dict."""
    base = _built_in(value)
    return list.copy(value) if base is list else list(base.items(value))


def refill(value: Any, items: list) -> None:
    """Have `value` hold these items, as `contents` gives them, and nothing else."""
    base = _built_in(value)
    base.clear(value)
    if base is list:
        list.extend(value, items)
        return
    for key, item in items:
        base.__setitem__(value, key, item)


def put(value: Any, key: Any, item: Any) -> None:
    """Replace an item of a list or mapping, else an attribute."""
    base = _built_in(value)
    if base is not object:
        base.__setitem__(value, key, item)
    elif isinstance(value, Mapping):  # only its own methods tell what it holds
        value[key] = item  # type: ignore[index]
    else:
        vars(value)[key] = item  # a dataclass may be frozen


def shallow_copy(value: Any) -> Any:
    """Another object of the same class that holds the same objects."""
    base = _built_in(value)
    if base is object and isinstance(value, Mapping):
        return copy.copy(value)
    try:
        result = base.__new__(type(value))
    except TypeError:  # its class derives from another one that is written in C
        return copy.copy(value)
    if base is not object:
        refill(result, contents(value))
    if hasattr(value, "__dict__"):
        vars(result).update(vars(value))
    for each in type(value).__mro__:
        for member in vars(each).values():
            if isinstance(member, MemberDescriptorType):  # of __slots__; a defaultdict's factory
                with suppress(AttributeError, TypeError):  # it holds nothing, or is read-only
                    member.__set__(result, member.__get__(value))
    return result
