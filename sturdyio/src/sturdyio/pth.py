"""PyTorch's files, `.pth`, read without torch.load.

torch.load(weights_only=True) runs no code either. But it calls constructors with what the file says, so that a few
hundred bytes take gigabytes, and it raises any type for a damaged file. Here the pickle finds stand-ins, and every
tensor is checked against the bytes that are there before it is made (see files.py).

    zip      NAME/data.pkl, a pickle; NAME/data/KEY, the memory of one or several tensors; NAME/byteorder
    legacy   pickles: a magic number, a version, the machine, the content, the keys; then the memory of each key:
             its number of elements in 8 bytes, and the elements
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sturdyio.cli import UserError
from sturdyio.files import plain, read_file, refusing, unzip
from sturdyio.pickles import STAND_INS, Array, Dict, StandIn, Unpickler, check_name, check_numbers

if TYPE_CHECKING:
    import torch

MAGIC = 0x1950A86A20F9469CFC6C  # of the legacy form, and its version
VERSION = 1001
HIGHEST_FIRST = "it is of a machine that writes the highest byte first"
STORAGES = {  # PyTorch's names for memory, and the dtype of its elements
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
    "UntypedStorage": "uint8",
}
DTYPES = {name: name for name in (*STORAGES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")}


def load_pth(path: str | Path) -> dict[str, Any]:
    """What `torch.save` wrote: tensors on the CPU, containers and plain values by name, nested and shared as they were.

    Raises UserError for a file that is damaged, holds code or no dict, or takes more than `files.most_memory`.
    """
    import torch  # noqa: F401 - where it is missing the file is not to blame

    data = read_file(path)
    with refusing(path, "tensors and plain values by name, written by torch.save"):
        content = plain((_zipped if data.startswith(b"PK\x03\x04") else _legacy)(data), len(data))
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, no dict: save a state_dict, not a module")
    return content


def _zipped(data: bytes) -> Any:
    files = unzip(data)
    names = [name for name in files if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(names) != 1:
        raise ValueError("it is a zip archive, but not of torch.save")
    folder = names[0].removesuffix("data.pkl")
    if files.get(f"{folder}byteorder", b"little") != b"little":
        raise ValueError(HIGHEST_FIRST)
    start = f"{folder}data/"
    memory: dict[str, bytearray | torch.Tensor] = {
        name.removeprefix(start): content for name, content in files.items() if name.startswith(start)
    }
    return _Unpickler(io.BytesIO(files[names[0]]), len(data), memory).load()


def _legacy(data: bytes) -> Any:
    stream = io.BytesIO(data)
    unpickler = _Unpickler(stream, len(data), {})
    for value in (MAGIC, VERSION):
        found = unpickler.load()
        if type(found) is not int or found != value:
            raise ValueError("it does not begin as what torch.save writes does")
    if unpickler.load()["little_endian"] is not True:
        raise ValueError(HIGHEST_FIRST)
    content = unpickler.load()
    for key in unpickler.load():
        check_name(key, "memory's name")
        storage = unpickler.storages[key]
        if int.from_bytes(stream.read(8), "little") * storage.dtype.itemsize != storage.nbytes:
            raise ValueError(f"the memory {key} is of another size than its tensors say")
        unpickler.memory[key] = bytearray(stream.read(storage.nbytes))
    return content


class _Dict(Dict):  # without attributes, such as the version of a state_dict
    def __setstate__(self, state: Any) -> None: ...


def _device(kind: str, *number: int) -> str:
    check_name(kind, "device")
    check_numbers(number, "device's number")
    return ":".join(map(str, (kind, *number)))


def _size(numbers: tuple) -> tuple:
    check_numbers(numbers, "size")
    return numbers


class _Kind(StandIn):  # of memory, or a dtype
    def __init__(self, name: str) -> None:
        import torch

        self.dtype: torch.dtype = getattr(torch, name)


class _Storage(StandIn):
    def __init__(self, dtype: torch.dtype, key: str, numel: int, memory: dict[str, bytearray | torch.Tensor]) -> None:
        check_name(key, "memory's name")
        check_numbers((numel,), "number of elements")
        if numel < 0:
            raise ValueError(f"its memory {key} has {numel} elements")
        self.dtype, self.key, self.memory = dtype, key, memory
        self.nbytes = numel * dtype.itemsize

    def content(self) -> torch.Tensor:
        import torch

        found = self.memory.get(self.key, b"")
        if len(found) != self.nbytes:
            raise ValueError(f"the memory {self.key} is missing, or of another size than its tensors say")
        if not isinstance(found, torch.Tensor):
            found = torch.frombuffer(found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
            self.memory[self.key] = found
        return found


class _Tensor(Array):
    def __init__(self, storage: _Storage, offset: int, size: tuple, stride: tuple, *rest: Any) -> None:
        for numbers in (size, stride, (offset,)):
            check_numbers(numbers, "tensor's place")
        numbers, metadata = (*size, *stride, offset), list(rest[2:])  # after requires_grad and hooks
        kind = metadata.pop(0) if metadata and type(metadata[0]) is _Kind else storage
        if any(metadata) or len(size) != len(stride) or not all(0 <= n < 2**48 for n in numbers):
            raise ValueError("it holds a tensor that is no plain one")
        self.storage, self.dtype, self.place = storage, kind.dtype, (size, stride, offset)

    @property
    def nbytes(self) -> int:
        return math.prod(self.place[0]) * self.dtype.itemsize

    def build(self) -> torch.Tensor:
        return self.storage.content().view(self.dtype).as_strided(*self.place)


def _parameter(tensor: _Tensor, *_requires_grad_and_hooks: Any) -> _Tensor:
    return tensor


class _Unpickler(Unpickler):
    stand_ins = {
        **STAND_INS,
        "collections.Counter": _Dict,
        "collections.OrderedDict": _Dict,
        "torch.Size": _size,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_tensor": _Tensor,
        "torch._utils._rebuild_tensor_v2": _Tensor,
        "torch._utils._rebuild_tensor_v3": _Tensor,
        "torch.device": _device,
    }

    def __init__(self, stream: io.BytesIO, size: int, memory: dict[str, bytearray | torch.Tensor]) -> None:
        super().__init__(stream, size)
        self.memory = memory  # by key; of the legacy form it follows the pickle
        self.storages: dict[str, _Storage] = {}

    def find(self, module: str, name: str) -> Any:
        known = STORAGES if name.endswith("Storage") else DTYPES
        if module in ("torch", "torch.cuda", "torch.storage") and name in known:
            return _Kind(known[name])
        return super().find(module, name)

    def persistent_load(self, pid: tuple) -> _Storage:
        if type(pid) is not tuple or not 5 <= len(pid) <= 6:
            raise ValueError("it refers to what is no memory of a tensor")
        word, kind, key, _location, numel, *views = pid
        if word != "storage" or type(kind) is not _Kind or any(view is not None for view in views):
            raise ValueError("it holds what is no tensor")
        storage = _Storage(kind.dtype, key, numel, self.memory)
        self.storages.setdefault(key, storage)
        return storage
