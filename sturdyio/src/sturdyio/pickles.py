"""Pickles of arrays, containers and plain values, read without running what hides in them.

A pickle is a program for a small machine: it may call any function, and a few bytes of it may ask for work or memory
without end. The machine here knows the operations that such content needs, and calls only the stand-ins below. So its
work and its memory are bounded by the size of the file: a name or number of a dict is no container (a shared tuple of
tuples takes ages to hash), a call has few arguments, and all calls together are given no more than the file is long.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

OPERATIONS = 2**20  # more are no checkpoint: tensors take 25 each
GIVEN = 2**20  # that calls may be given beyond the file's size
LEAVES = (bool, int, float, str, type(None))
LONGEST_NUMBER = 2**512  # states of random generators have 128 bits
LONGEST_NAME = 64  # of a dtype or a device
MOST_AXES = 64  # as NumPy
MOST_ARGUMENTS = 16


def numbers_of_array(shape: tuple[int, ...], fortran: bool, dtype: np.dtype, data: bytes | Bytes) -> np.ndarray:
    """The array of numbers, exactly as many as `data` must hold."""
    if dtype.kind not in "biufc":
        raise ValueError(f"it holds an array of {dtype}")
    if min(shape, default=0) < 0:  # NumPy would take it for "as many as there are"
        raise ValueError(f"it holds an array of shape {shape}")
    content = data.text.encode("latin1") if isinstance(data, Bytes) else data
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C").copy(order="K")


def check_numbers(numbers: Any, what: str) -> None:
    """Raise ValueError unless `numbers` is a tuple of a few whole numbers."""
    if type(numbers) is not tuple or len(numbers) > MOST_AXES or not all(type(number) is int for number in numbers):
        raise ValueError(f"its {what} is no tuple of at most {MOST_AXES} whole numbers")


def check_name(name: Any, what: str) -> None:
    """Raise ValueError unless `name` is a short text."""
    if type(name) is not str or len(name) > LONGEST_NAME:
        raise ValueError(f"its {what} is no text of at most {LONGEST_NAME} letters")


class StandIn:
    """What a pickle gets in place of a callable; without a `__setstate__` it takes no state."""


class Bytes(StandIn):  # how protocol 2 writes them
    def __init__(self, text: str = "", encoding: str = "latin1") -> None:
        if type(text) is not str:
            raise ValueError("it makes bytes of what is no text")
        check_name(encoding, "codec")
        if encoding != "latin1":
            raise ValueError(f"it asks for the codec {encoding!r}")
        self.text = text

    def __len__(self) -> int:
        return len(self.text)


class Dtype(StandIn):
    def __init__(self, name: str, *_flags: bool) -> None:
        check_name(name, "dtype")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple) -> None:
        check_name(state[1], "order of bytes")
        self.dtype = self.dtype.newbyteorder(state[1])


class Array(StandIn):
    """What an array is made of, until it is known that all arrays fit into memory."""

    objects: list | None = None  # of an array of objects
    parts: tuple = ()  # of any other: what `numbers_of_array` takes

    def __init__(self, *_type_and_shape: Any) -> None:
        """As `numpy.ndarray` and `_reconstruct`, whose array is empty until `__setstate__` fills it."""

    def __setstate__(self, state: tuple) -> None:
        _version, shape, dtype, fortran, data = state
        if type(data) is list:
            self.objects = data
        else:
            self.fill(shape, fortran, dtype, data)

    def fill(self, shape: tuple[int, ...], fortran: bool, dtype: Dtype, data: bytes | Bytes) -> None:
        check_numbers(shape, "shape")
        if not isinstance(dtype, Dtype) or not isinstance(data, (bytes, bytearray, Bytes)):
            raise ValueError("it holds an array without a type or numbers")
        self.parts = shape, bool(fortran), dtype.dtype, data

    @property
    def nbytes(self) -> int:
        return len(self.parts[-1]) if self.parts else 0

    def build(self) -> Any:
        if not self.parts:
            raise ValueError("it holds an array of objects")
        return numbers_of_array(*self.parts)


class Scalar(Array):
    def __init__(self, dtype: Dtype, data: bytes | Bytes) -> None:
        self.fill((), False, dtype, data)

    def build(self) -> np.generic:
        return super().build()[()]


class Buffer(Array):  # how protocol 5 writes an array
    def __init__(self, data: bytes | Bytes, dtype: Dtype, shape: tuple[int, ...], order: str) -> None:
        check_name(order, "order of axes")
        self.fill(shape, order == "F", dtype, data)


class Dict(dict):
    """An OrderedDict or a Counter."""

    def __init__(self, items: dict | list | tuple = ()) -> None:
        pairs = list(items.items() if isinstance(items, dict) else items)
        for key, _ in pairs:
            check_key(key)
        super().__init__(pairs)


def _named(named: tuple[str, Array]) -> Array:
    """The tensor of a tuple of a name and a tensor, of paddle.save; plain tuples need no call."""
    _name, array = named
    if not isinstance(array, Array):
        raise ValueError("it names what is no tensor")
    return array


def check_key(key: Any) -> None:
    """Raise ValueError for what takes long to hash, or shares its hash with many others."""
    if type(key) not in LEAVES or type(key) is int and abs(key) >= 2**63:
        raise ValueError(f"it holds a dict with a {type(key).__name__} for a name")


STAND_INS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": Bytes,
    "builtins.bytes": Bytes,
    "builtins.tuple": _named,
    "collections.OrderedDict": Dict,
    "numpy.dtype": Dtype,
    "numpy.ndarray": Array,
    "numpy._core.multiarray._reconstruct": Array,
    "numpy._core.multiarray.scalar": Scalar,
    "numpy._core.numeric._frombuffer": Buffer,
}
SIZED = (str, bytes, bytearray, tuple, list, dict, Bytes)
# The operations, by pickletools' names. These put their own argument on the stack, those below a constant,
VALUES = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
VALUES |= {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
VALUES |= {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"}
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
# and these take so many values off, or all above the last mark.
TAKEN = {"POP": 1, "APPEND": 1, "BUILD": 1, "BINPERSID": 1, "SETITEM": 2, "REDUCE": 2, "STACK_GLOBAL": 2}
TAKEN |= {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MARKED = {"POP_MARK", "APPENDS", "SETITEMS", "TUPLE", "LIST", "DICT"}


def extend(owner: Any, items: list[Any]) -> None:
    if type(owner) is not list:
        raise ValueError("it appends to what is no list")
    owner.extend(items)


def set_items(owner: Any, items: list[Any]) -> dict:
    """`owner` with the values of `items`, which are name, value, name, value, ..."""
    if not isinstance(owner, dict) or len(items) % 2:
        raise ValueError("it names values in what is no dict")
    for key, value in zip(items[::2], items[1::2]):
        check_key(key)
        owner[key] = value
    return owner


def set_state(owner: Any, items: list[Any]) -> None:
    if not isinstance(owner, (StandIn, Dict)) or not hasattr(owner, "__setstate__"):
        raise ValueError("it sets attributes")
    owner.__setstate__(*items)


CHANGES = {"APPEND": extend, "APPENDS": extend, "SETITEM": set_items, "SETITEMS": set_items, "BUILD": set_state}


class Unpickler:
    """Reads one pickle after the other from `stream`; `size`: the bytes of the file."""

    stand_ins: dict[str, Callable[..., Any]] = STAND_INS

    def __init__(self, stream: io.BytesIO, size: int) -> None:
        self.stream, self.left = stream, GIVEN + size
        tuples: dict[str, Callable[[list], Any]] = dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), tuple)
        self.makes: dict[str, Callable[[list], Any]] = {
            **tuples,
            "LIST": list,
            "DICT": lambda items: set_items({}, items),
            "REDUCE": lambda items: self.call(*items),
            "STACK_GLOBAL": lambda items: self.find(*items),
            "BINPERSID": lambda items: self.persistent_load(*items),
        }

    def load(self) -> Any:
        """The pickle's value, with stand-ins; raises nearly any exception for one that is damaged or holds more."""
        self.stack: list[Any] = []
        self.marks: list[int] = []  # places in the stack
        self.memo: dict[int, Any] = {}
        for count, (operation, argument, _) in enumerate(pickletools.genops(self.stream)):  # which checks lengths
            name = operation.name
            if count == OPERATIONS:
                raise ValueError(f"it has more than {OPERATIONS} parts")
            if name in VALUES:
                if type(argument) is int and abs(argument) >= LONGEST_NUMBER:
                    raise ValueError("it holds a number of more than 512 bits")
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name]())
            elif name in TAKEN or name in MARKED:
                self._take(name)
            elif name not in ("PROTO", "FRAME", "STOP"):
                self._place(name, argument)
        return self.stack.pop()

    def persistent_load(self, pid: Any) -> Any:
        """What `pid` refers to, outside of the pickle."""
        raise ValueError("it refers to what is not in the file")

    def find(self, module: str, name: str) -> Any:
        """What the pickle gets for this name of a module."""
        if type(name) is not str or type(module) is not str:
            raise ValueError("it asks for what has no name")
        asked = f"{module}.{name}"
        known = asked.replace("numpy.core.", "numpy._core.").replace("__builtin__.", "builtins.")
        if known not in self.stand_ins:
            raise ValueError(f"the file asks to run {asked[:80]!r}")
        return self.stand_ins[known]

    def call(self, function: Any, arguments: Any) -> Any:
        """What a stand-in returns."""
        is_known = any(function is stand_in for stand_in in self.stand_ins.values())
        if not is_known or type(arguments) is not tuple or len(arguments) > MOST_ARGUMENTS:
            raise ValueError("it calls what is no function, or with too much")
        self.left -= sum(len(each) for each in arguments if isinstance(each, SIZED))
        if self.left < 0:
            raise ValueError("its calls are given more than the file holds")
        return function(*arguments)

    def _take(self, name: str) -> None:
        start = self.marks.pop() if name in MARKED else len(self.stack) - TAKEN[name]
        if start < 0:
            raise ValueError("its stack is empty")
        items = self.stack[start:]
        del self.stack[start:]
        if name in self.makes:
            self.stack.append(self.makes[name](items))
        elif name in CHANGES:
            CHANGES[name](self.stack[-1], items)

    def _place(self, name: str, argument: Any) -> None:
        if name == "MARK":
            self.marks.append(len(self.stack))
        elif name == "GLOBAL":
            self.stack.append(self.find(*argument.split(" ", 1)))
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[int(argument)])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        else:
            raise ValueError(f"it uses the operation {name}")
