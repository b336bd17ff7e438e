"""MindSpore's checkpoint files, `.ckpt`, read and written without MindSpore.

A file is messages of protocol buffers one after the other, each a Checkpoint of MindSpore's checkpoint.proto:

    Checkpoint   1: Value, repeated
    Value        1: tag, the parameter's name    2: TensorProto
    TensorProto  1: dims, repeated    2: tensor_type, as "Float32"    3: tensor_content, bytes; little-endian

It holds no code. But MindSpore 2.10.0 does not compare dims with the length of tensor_content: a tensor that is too
short is filled up, one that is too long is written past the end of its memory. Read here, both are refused. Nor can
MindSpore be imported after PaddlePaddle in one process: each brings a oneDNN of its own under one name.
"""

import math
import textwrap
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from reprod.recipe.cli import UserError, existing_file
from reprod.recipe.files import atomic_path

TYPES = {
    **{f"Float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    **{f"Int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UInt{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    "Bool": "?",
}
NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}

VARINT, BYTES = 0, 2  # the two encodings that checkpoint.proto uses
CRC = b"crc_num"  # with save_checkpoint(crc_check=True) the file ends in this and ten bytes: the CRC-32 of all before


def load_ckpt(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a `.ckpt` by name; raises UserError when it is damaged or holds anything but plain arrays."""
    try:
        data = existing_file(path, "file").read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    try:
        return _arrays(_checked(data))
    except ValueError as error:
        text = "".join(letter if letter.isprintable() else "?" for letter in str(error))  # it may quote the file
        reason = textwrap.shorten(text, 160)
        raise UserError(
            f"{path} refused: {reason}; expected plain arrays as mindspore.save_checkpoint writes them: "
            "save the network alone, neither encrypted nor with its optimizer"
        ) from error


def save_ckpt(arrays: Mapping[str, np.ndarray], path: str | Path) -> None:
    """Write `arrays`, whole or not at all; mindspore.load_checkpoint reads the file."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"".join(_value(name, array) for name, array in arrays.items()))


def _checked(data: bytes) -> bytes:
    """The messages, without the sum that may follow them."""
    if data[-len(CRC) - 10 : -10] != CRC:
        return data
    messages = data[: -len(CRC) - 10]
    if zlib.crc32(messages) != int.from_bytes(data[-10:], "big"):
        raise ValueError("its bytes are not those that its CRC-32 was taken of")
    return messages


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    parts: dict[str, tuple[tuple[int, ...], str, list[bytes]]] = {}  # by name: dims, type, content in slices
    last = ""
    for value in _all(_fields(data), 1):
        fields = list(_fields(value))
        name = _text(_one(fields, 1))
        tensor = list(_fields(_one(fields, 2)))
        dims, type_name = tuple(_all(tensor, 1, VARINT)), _text(_one(tensor, 2))
        if name in parts and (name != last or parts[name][:2] != (dims, type_name)):
            raise ValueError(f"it holds {name} twice")
        parts.setdefault(name, (dims, type_name, []))[2].append(_one(tensor, 3))  # above 512 MB it is in slices
        last = name
    if not parts:
        raise ValueError("it holds no parameters")
    return {
        name: _array(name, dims, type_name, b"".join(content)) for name, (dims, type_name, content) in parts.items()
    }


def _array(name: str, dims: tuple[int, ...], type_name: str, content: bytes) -> np.ndarray:
    if type_name not in TYPES:
        raise ValueError(f"{name} is of the type {type_name}, which NumPy has not")
    dtype = np.dtype(TYPES[type_name])
    if math.prod(dims) * dtype.itemsize != len(content):
        raise ValueError(f"{name} has {len(content)} bytes for the shape {dims} of {type_name}")
    return np.frombuffer(content, dtype).reshape(dims).copy()


def _value(name: str, array: np.ndarray) -> bytes:
    """The message of one parameter."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # NumPy: ascontiguousarray makes a number one-dimensional
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    dims = b"".join(_varint(1 << 3 | VARINT) + _varint(size) for size in array.shape)
    tensor = dims + _bytes(2, NAMES[little.dtype].encode()) + _bytes(3, little.tobytes())
    return _bytes(1, _bytes(1, name.encode()) + _bytes(2, tensor))


def _bytes(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """The number at `start`, and where it ends."""
    value = 0
    for i in range(10):  # 64 bits at most
        if start + i >= len(data):
            raise ValueError("it ends early")
        value |= (data[start + i] & 0x7F) << 7 * i
        if data[start + i] <= 0x7F:
            return value, start + i + 1
    raise ValueError("it is no checkpoint of MindSpore")


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(number, encoding, value) of every field of a message."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        value, position = _read_varint(data, position)
        if key & 7 == BYTES:
            start, position = position, position + value
            if position > len(data):
                raise ValueError("it ends early")
            value = data[start:position]
        elif key & 7 != VARINT:
            raise ValueError("it is no checkpoint of MindSpore")
        yield key >> 3, key & 7, value


def _all(fields, number: int, encoding: int = BYTES) -> Iterator:
    """The values of the fields `number`, each of which must be of that encoding."""
    for found, its, value in fields:
        if found == number:
            if its != encoding:
                raise ValueError("it is no checkpoint of MindSpore")
            yield value


def _one(fields, number: int) -> bytes:
    values = list(_all(fields, number))
    if len(values) != 1:
        raise ValueError("it is no checkpoint of plain arrays")
    return values[0]


def _text(data: bytes) -> str:
    return data.decode()  # UnicodeDecodeError is a ValueError
