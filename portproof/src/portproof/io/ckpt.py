"""MindSpore's `.ckpt` files, read and written without MindSpore.

A file is a sequence of Checkpoint messages of MindSpore's checkpoint.proto, without code. MindSpore 2.10.0 does not
compare dims with the length of tensor_content: too long content is written past the end of its memory. Here it is
refused. MindSpore cannot be imported after PaddlePaddle in one process: both bring a oneDNN of the same name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from sturdyio.files import atomic_path, read_file, refusing

TYPES = {
    **{f"Float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    **{f"Int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UInt{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    "Bool": "?",
}
NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}

CRC = b"crc_num"  # with crc_check=True: then ten bytes, the CRC-32 of all before

# MindSpore's checkpoint.proto, which it does not install. tag: the parameter's name; tensor_content: little-endian.
SCHEMA = """
name: "portproof/checkpoint.proto"  package: "portproof"  syntax: "proto2"
message_type {
  name: "TensorProto"
  field { name: "dims" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
  field { name: "tensor_type" number: 2 label: LABEL_REQUIRED type: TYPE_STRING }
  field { name: "tensor_content" number: 3 label: LABEL_REQUIRED type: TYPE_BYTES }
}
message_type {
  name: "Value"
  field { name: "tag" number: 1 label: LABEL_REQUIRED type: TYPE_STRING }
  field { name: "tensor" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".portproof.TensorProto" }
}
message_type {
  name: "Checkpoint"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".portproof.Value" }
}
"""
_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(SCHEMA, descriptor_pb2.FileDescriptorProto()))
Checkpoint = message_factory.GetMessageClass(_pool.FindMessageTypeByName("portproof.Checkpoint"))


def load_ckpt(path: str | Path) -> dict[str, np.ndarray]:
    """{name: array}; raises UserError if it is damaged or holds anything else."""
    data = read_file(path)
    expected = "plain arrays as mindspore.save_checkpoint writes them"
    with refusing(path, expected, "save the network alone, neither encrypted nor with its optimizer"):
        return _arrays(data)


def save_ckpt(arrays: Mapping[str, np.ndarray], path: str | Path) -> None:
    """Write for mindspore.load_checkpoint; either the whole file appears or none."""
    with atomic_path(path) as temporary:
        checkpoint = Checkpoint()
        for name, array in arrays.items():
            little = np.asarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
            value = checkpoint.value.add(tag=name)
            value.tensor.dims.extend(array.shape)
            value.tensor.tensor_type = NAMES[little.dtype]
            value.tensor.tensor_content = little.tobytes()
        temporary.write_bytes(checkpoint.SerializeToString())


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    if data[-len(CRC) - 10 : -10] == CRC:
        data, crc = data[: -len(CRC) - 10], data[-10:]
        if zlib.crc32(data) != int.from_bytes(crc, "big"):
            raise ValueError("its bytes are not those that its CRC-32 was taken of")
    try:
        checkpoint = Checkpoint.FromString(data)
    except DecodeError as error:
        raise ValueError(f"it ends early, or is no checkpoint of MindSpore ({error})") from error
    for value in checkpoint.value:
        if not isinstance(value.tag, str):  # bytes: not UTF-8
            raise ValueError(f"the name {value.tag!r} is no text")
        if not value.HasField("tensor"):
            raise ValueError(f"{value.tag or 'a parameter without a name'} is no plain array")
    arrays: dict[str, np.ndarray] = {}
    parameters = groupby(checkpoint.value, lambda v: (v.tag, tuple(v.tensor.dims), v.tensor.tensor_type))
    for (name, dims, type_name), slices in parameters:
        if name in arrays:
            raise ValueError(f"it holds {name} twice")
        if type_name not in TYPES:
            raise ValueError(f"{name} is of the type {type_name}, which NumPy has not")
        content = b"".join(value.tensor.tensor_content for value in slices)  # several above 512 MB
        dtype = np.dtype(TYPES[type_name])
        if math.prod(dims) * dtype.itemsize != len(content):
            raise ValueError(f"{name} has {len(content)} bytes for the shape {dims} of {type_name}")
        arrays[name] = np.frombuffer(content, dtype).reshape(dims).copy()
    if not arrays:
        raise ValueError("it holds no parameters")
    return arrays
