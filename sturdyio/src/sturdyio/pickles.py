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

    def __init__(self, items: dict | list = ()) -> None:
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


STAND_INS = {
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
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
VALUES = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING"})
VALUES |= {"BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
VALUES |= {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}


class Unpickler:
    """Reads one pickle after the other from `stream`; `size`: the bytes of the file."""

    stand_ins: dict[str, Callable[..., Any]] = STAND_INS

    def __init__(self, stream: io.BytesIO, size: int) -> None:
        self.stream, self.left = stream, GIVEN + size

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
            elif name in MACHINE:
                MACHINE[name](self, argument)
            elif name not in ("PROTO", "FRAME", "STOP"):
                raise ValueError(f"it uses the operation {name}")
        return self.stack.pop()

    def persistent_load(self, pid: Any) -> Any:
        """What `pid` refers to, outside of the pickle."""
        raise ValueError("it refers to what is not in the file")

    def find(self, module: str, name: str) -> Any:
        """What the pickle gets for this name of a module."""
        asked = f"{module}.{name}"
        known = asked.replace("numpy.core.", "numpy._core.").replace("__builtin__.", "builtins.")
        if known not in self.stand_ins:
            raise ValueError(f"the file asks to run {asked[:80]!r}")
        return self.stand_ins[known]

    # The operations; what they are given is None but for those that read a number or a name.

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def marked(self) -> list[Any]:
        """What lies on the stack above the last mark, taken off."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop(self, _: Any) -> None:
        self.stack.pop()

    def pop_mark(self, _: Any) -> None:
        self.marked()

    def duplicate(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def get(self, number: Any) -> None:
        self.stack.append(self.memo[int(number)])

    def put(self, number: Any) -> None:
        self.memo[int(number)] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def make_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self.marked()))

    def tuple1(self, _: Any) -> None:
        self.stack[-1:] = [(self.stack[-1],)]

    def tuple2(self, _: Any) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def tuple3(self, _: Any) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def make_list(self, _: Any) -> None:
        self.stack.append(self.marked())

    def append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def appends(self, _: Any) -> None:
        self._extend(self.marked())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("it appends to what is no list")
        self.stack[-1].extend(items)

    def make_dict(self, _: Any) -> None:
        items = self.marked()
        self.stack.append({})
        self._set(items)

    def set_item(self, _: Any) -> None:
        value = self.stack.pop()
        self._set([self.stack.pop(), value])

    def set_items(self, _: Any) -> None:
        self._set(self.marked())

    def _set(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise ValueError("it names values in what is no dict")
        for key, value in zip(items[::2], items[1::2]):
            check_key(key)
            self.stack[-1][key] = value

    def named(self, place: str) -> None:
        module, _, name = place.partition(" ")
        self.stack.append(self.find(module, name))

    def named_on_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("it asks for what has no name")
        self.stack.append(self.find(module, name))

    def refer(self, _: Any) -> None:
        self.stack.append(self.persistent_load(self.stack.pop()))

    def call(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        is_known = any(function is stand_in for stand_in in self.stand_ins.values())
        if not is_known or type(arguments) is not tuple or len(arguments) > MOST_ARGUMENTS:
            raise ValueError("it calls what is no function, or with too much")
        self.left -= sum(len(argument) for argument in arguments if isinstance(argument, SIZED))
        if self.left < 0:
            raise ValueError("its calls are given more than the file holds")
        self.stack.append(function(*arguments))

    def set_state(self, _: Any) -> None:
        state, owner = self.stack.pop(), self.stack[-1]
        if not isinstance(owner, (StandIn, Dict)) or not hasattr(owner, "__setstate__"):
            raise ValueError("it sets attributes")
        owner.__setstate__(state)


SIZED = (str, bytes, bytearray, tuple, list, dict, Bytes)
MACHINE: dict[str, Callable[[Unpickler, Any], None]] = {
    "MARK": Unpickler.mark,
    "POP": Unpickler.pop,
    "POP_MARK": Unpickler.pop_mark,
    "DUP": Unpickler.duplicate,
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Unpickler.get),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), Unpickler.put),
    "MEMOIZE": Unpickler.memoize,
    "TUPLE": Unpickler.make_tuple,
    "TUPLE1": Unpickler.tuple1,
    "TUPLE2": Unpickler.tuple2,
    "TUPLE3": Unpickler.tuple3,
    "LIST": Unpickler.make_list,
    "APPEND": Unpickler.append,
    "APPENDS": Unpickler.appends,
    "DICT": Unpickler.make_dict,
    "SETITEM": Unpickler.set_item,
    "SETITEMS": Unpickler.set_items,
    "GLOBAL": Unpickler.named,
    "STACK_GLOBAL": Unpickler.named_on_stack,
    "BINPERSID": Unpickler.refer,
    "REDUCE": Unpickler.call,
    "BUILD": Unpickler.set_state,
}
