"""Files: written whole or not at all, and read without running anything that hides in them.

`.pdparams` and reprod_log's `.npy` are pickles, and a pickle may call any function of any module. Read here
it finds only the stand-ins below, which build arrays and containers and nothing else. No array is allocated
before its bytes have been seen, so that a short file cannot claim a large one.
"""

from __future__ import annotations

import errno
import glob
import io
import json
import os
import pickle
import pickletools
import secrets
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.lib import format as npy_format

from portproof.io.cli import UserError, existing_file
from portproof.io.locks import here, is_gone

# How file systems that cannot make the names in a folder durable say so: what is written is in place all the same.
NO_FOLDER_SYNC = (errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EISDIR)
DAY = 24 * 60 * 60  # seconds


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` once all is on disk, and vanishes on any error."""
    path = Path(path)
    # In the same folder, since a rename is atomic only there; with the suffix, since numpy.save appends one; with the
    # machine's name, since another that shares the folder may have a process of this number.
    temporary = path.parent / f".{path.stem}.tmp-{here()}-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}"
    try:
        _remove_leftovers(path)
        if path.exists() and not path.is_file():  # a folder, or /dev/null, which a rename would replace
            raise UserError(f"{path} is not a regular file: choose another name to write to")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}): free space or choose another folder") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while they wrote `path` have left of it.

    Of another machine's processes nobody knows here whether they are alive, but not that they write for a day.
    """
    start = f".{path.stem}.tmp-"
    for leftover in path.parent.glob(f"{glob.escape(start)}*{path.suffix}"):
        place, _, pid = leftover.name.removeprefix(start).removesuffix(path.suffix).rpartition("-")[0].rpartition("-")
        with suppress(FileNotFoundError):  # another process was faster
            old = place != here() and time.time() - leftover.stat().st_mtime > DAY
            if pid.isdecimal() and (old or is_gone(place, int(pid))):
                leftover.unlink()


def load_pdparams(path: str | Path) -> dict[str, Any]:
    """What `paddle.save` wrote: arrays and plain values by name, nested as they were; tensors are arrays."""
    data = _read(path)
    with refusing(path, "a state dict or checkpoint written by paddle.save"):
        state = _plain(_unpickle(data), {})
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise ValueError("it holds no values by name")
        state.pop("StructuredToParameterName@@", None)  # Paddle's own table of generated names
        return state


def load_pth(path: str | Path, torch_load: Callable[..., Any]) -> dict[str, Any]:
    """What `torch.save` wrote, as `torch.load` reads it, which is given: tensors, containers and numbers, no code."""
    try:
        content = torch_load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines()[-1] if "weights_only" not in str(error) else "it holds code"
        raise UserError(f"{path} cannot be read ({reason}): fetch or write it again, tensors only") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, no dict: save a state_dict, not a module")
    return content


def load_npy(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a reprod_log file by name; a file of one plain array gives {"data": array}."""
    data = _read(path)
    with refusing(path, "arrays by name as reprod_log writes them, or one plain array"):
        stream = io.BytesIO(data)
        version = npy_format.read_magic(stream)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        if dtype.kind != "O" or shape != ():
            return {"data": _array(stream.read(), dtype, shape, fortran)}
        wrapper = _unpickle(stream.read())  # numpy.save makes an array of one object out of a dict
        record = _plain(wrapper.content[0], {})
        if type(record) is not dict or not all(
            type(name) is str and type(array) is np.ndarray for name, array in record.items()
        ):
            raise ValueError("it holds no arrays by name")
        return record


def load_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a `.safetensors` file by name, in the order of the names: the library's own is random."""
    return load_safetensors_with_metadata(path)[0]


def load_safetensors_with_metadata(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """`load_safetensors`, and the texts that the file holds beside its arrays, by name."""
    data = _read(path)
    with refusing(path, "a .safetensors file of types that NumPy has"):
        arrays = dict(sorted(safetensors.numpy.load(data).items()))
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # its length comes first
        return arrays, header.get("__metadata__") or {}


def save_safetensors(
    arrays: Mapping[str, np.ndarray], path: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `arrays`, whole or not at all; unlike a pickle such a file cannot carry code.

    The bytes are the same each time, with one text in `metadata` at most: the order of several is random.
    """
    # safetensors writes the memory behind an array as it lies, transposed or not.
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with atomic_path(path) as temporary:
        temporary.write_bytes(safetensors.numpy.save(contiguous, dict(metadata) if metadata else None))


def _sync(path: Path, flags: int = os.O_RDWR) -> None:  # Windows syncs nothing that is only read
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the file system can; what was renamed there is in place anyway."""
    try:
        _sync(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise


def _read(path: str | Path) -> bytes:
    try:
        return existing_file(path, "file").read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions") from error


@contextmanager
def refusing(path: str | Path, expected: str) -> Iterator[None]:
    """Whatever is raised in this context is a UserError that refuses `path`, and says what was `expected` of it."""
    try:
        yield
    except Exception as error:  # a damaged file makes pickle and the header parsers raise nearly any type
        text = textwrap.shorten(str(error) or type(error).__name__, 160)
        reason = "".join(letter if letter.isprintable() else "?" for letter in text)  # it may quote the file
        raise UserError(f"{path} refused: {reason}; expected {expected}: fetch or write it again") from error


def _array(data: bytes, dtype: np.dtype, shape: tuple[int, ...], fortran: bool) -> np.ndarray:
    """An array of numbers made of `data`, which must hold exactly that many."""
    if dtype.kind not in "biufc":
        raise ValueError(f"it holds an array of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C").copy(order="K")


class _StandIn:
    """What a pickle gets in place of a callable.

    A pickle may also set the attributes of whatever it got, except where that has a `__setstate__`.
    """

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it sets attributes")


class _Bytes(_StandIn):
    """For `_codecs.encode` and `bytes`: how protocol 2 writes bytes."""

    def __new__(cls, text: str = "", encoding: str = "latin1") -> bytes:
        if encoding != "latin1":
            raise ValueError(f"it asks for the codec {encoding!r}")
        return text.encode("latin1")


class _Dtype(_StandIn):
    def __init__(self, name: str, *_flags: bool) -> None:
        self.dtype = np.dtype(str(name))

    def __setstate__(self, state: tuple) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(_StandIn):
    """For `numpy.ndarray` and `_reconstruct`, which make an empty array for `__setstate__` to fill."""

    content: np.ndarray | np.generic | list | None = None  # a list: an array of objects

    def __init__(self, *_type_and_shape: Any) -> None: ...

    def __setstate__(self, state: tuple) -> None:
        _version, shape, dtype, fortran, data = state
        self.content = data if type(data) is list else _array(data, dtype.dtype, shape, fortran)


class _Scalar(_Array):
    def __init__(self, dtype: _Dtype, data: bytes) -> None:
        self.content = _array(data, dtype.dtype, (), False)[()]


class _Buffer(_Array):
    """For `_frombuffer`: how protocol 5 writes an array."""

    def __init__(self, data: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> None:
        self.content = _array(data, dtype.dtype, shape, order == "F")


class _Tensor(_Array):
    """For `tuple`: paddle.save calls it to write a tensor as (name, array); plain tuples need no call."""

    def __init__(self, named: tuple[str, _Array]) -> None:
        _name, array = named
        self.content = array.content


_LEAVES = (bool, int, float, str, type(None))
_STAND_INS = {
    "_codecs.encode": _Bytes,
    "builtins.bytes": _Bytes,
    "builtins.tuple": _Tensor,
    "collections.OrderedDict": dict,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray.scalar": _Scalar,
    "numpy._core.numeric._frombuffer": _Buffer,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        asked = f"{module}.{name}"
        known = asked.replace("numpy.core.", "numpy._core.").replace("__builtin__.", "builtins.")
        if known not in _STAND_INS:
            raise ValueError(f"the file asks to run {asked[:80]!r}")
        return _STAND_INS[known]


def _unpickle(data: bytes) -> Any:
    """What the pickle `data` holds, with stand-ins for its arrays."""
    for opcode, argument, position in pickletools.genops(data):  # raises where a length exceeds the data
        # pickle allocates as many slots as the highest number used, and real ones are counted up from 0.
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > position:
            raise ValueError(f"it numbers an object {argument}")
        if opcode.name.startswith("EXT"):  # a registered class, possibly cached and then past find_class
            raise ValueError("it uses a pickle extension")
    return _Unpickler(io.BytesIO(data)).load()


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """`value` with arrays for their stand-ins; `done` (by id) keeps shared parts shared, visited once."""
    if type(value) in _LEAVES:
        return value
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, _Array) and isinstance(value.content, (np.ndarray, np.generic)):
        plain = value.content
    elif isinstance(value, _Array):
        raise ValueError("it holds an array of objects")
    elif type(value) is dict and all(type(key) in _LEAVES for key in value):
        plain = {key: _plain(item, done) for key, item in value.items()}
    elif type(value) in (list, tuple):
        plain = type(value)([_plain(item, done) for item in value])
    else:
        raise ValueError(f"it holds a {type(value).__name__}")
    done[id(value)] = plain
    return plain
