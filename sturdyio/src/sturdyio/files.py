"""Files: written so that either the whole file appears or none, and read without running what hides in them.

`.pdparams` and reprod_log's `.npy` are pickles, see pickles.py. No array is allocated before its bytes have been seen,
and it is known that all together take no more than `most_memory`.
"""

from __future__ import annotations

import errno
import glob
import io
import json
import os
import secrets
import sys
import textwrap
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.lib import format as npy_format

from sturdyio.cli import UserError, existing_file, printable, unusable
from sturdyio.locks import here, is_gone
from sturdyio.pickles import LEAVES, Array, Unpickler, numbers_of_array

# How file systems that cannot make the names in a folder durable say so: what is written is in place all the same.
NO_FOLDER_SYNC = (errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EISDIR)
DAY = 24 * 60 * 60  # seconds
Arrays = Mapping[str, np.ndarray]


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` once all is on disk, and vanishes on any error."""
    path = Path(path)
    # A rename is atomic only in the same folder, numpy.save appends a suffix if there is none, and another machine that
    # shares the folder may have a process of this number.
    temporary = path.parent / f".{path.stem}.tmp-{here()}-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}"
    try:
        _remove_leftovers(path)
        if path.exists() and not path.is_file():  # a folder, or /dev/null, which a rename would replace
            raise UserError(f"{path} is not a regular file: choose another name to write to")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}): free space or choose another folder") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _remove_leftovers(path: Path) -> None:
    """Remove what killed writers of `path` have left; of another machine's nobody knows, but none writes for a day."""
    start = f".{path.stem}.tmp-"
    for leftover in path.parent.glob(f"{glob.escape(start)}*{path.suffix}"):
        place, _, pid = leftover.name.removeprefix(start).removesuffix(path.suffix).rpartition("-")[0].rpartition("-")
        with suppress(FileNotFoundError):  # another process was faster
            old = place != here() and time.time() - leftover.stat().st_mtime > DAY
            if pid.isdecimal() and (old or is_gone(place, int(pid))):
                leftover.unlink()


def load_pdparams(path: str | Path) -> dict[str, Any]:
    """What `paddle.save` wrote: arrays and plain values by name, nested as they were; tensors are arrays."""
    data = read_file(path)
    with refusing(path, "a state dict or checkpoint written by paddle.save"):
        state = plain(Unpickler(io.BytesIO(data), len(data)).load(), len(data))
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise ValueError("it holds no values by name")
        state.pop("StructuredToParameterName@@", None)  # Paddle's own table of generated names
        return state


def load_npy(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a reprod_log file by name, of numbers too; a file of one plain array gives {"data": array}."""
    data = read_file(path)
    with refusing(path, "arrays by name as reprod_log writes them, or one plain array"):
        stream = io.BytesIO(data)
        shape, fortran, dtype = _npy_header(stream)
        if dtype.kind != "O" or shape != ():
            return {"data": numbers_of_array(shape, fortran, dtype, stream.read())}
        wrapper = Unpickler(stream, len(data)).load()  # numpy.save makes an array of one object out of a dict
        record = plain(wrapper.objects[0], len(data))
        if type(record) is not dict:
            raise ValueError("it holds no arrays by name")
        arrays = {}
        for name, value in record.items():
            array = np.asarray(value) if isinstance(value, (bool, int, float, np.generic)) else value
            if type(name) is not str or type(array) is not np.ndarray or array.dtype.kind == "O":
                raise ValueError("it holds no arrays by name")
            arrays[name] = array
        return arrays


def load_npz(path: str | Path, what: str = "file") -> dict[str, np.ndarray]:
    """The arrays by name that `numpy.savez` or `numpy.savez_compressed` wrote to the file, which is called `what`."""
    data = read_file(path, what)
    arrays = {}
    with refusing(f"{what} {path}", "arrays as numpy.savez writes them"):
        contents = unzip(data)
        check_unique([name.removesuffix(".npy") for name in contents])
        for name, content in contents.items():
            stream = io.BytesIO(content)
            arrays[name.removesuffix(".npy")] = numbers_of_array(*_npy_header(stream), stream.read())
    return arrays


def load_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a `.safetensors` file by name, in the order of the names: the library's own is random."""
    return load_safetensors_with_metadata(path)[0]


def load_safetensors_with_metadata(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """`load_safetensors`, and the texts beside the arrays, by name."""
    data = read_file(path)
    with refusing(path, "a .safetensors file of types that NumPy has"):
        arrays = dict(sorted(safetensors.numpy.load(data).items()))
        length = int.from_bytes(data[:8], "little")  # of the header, which follows
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique)  # the library keeps the last of two
        return arrays, header.get("__metadata__") or {}


def save_safetensors(arrays: Arrays, path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write `arrays`; either the whole file appears or none. With several texts in `metadata` their order is random."""
    # safetensors writes the memory behind an array as it lies, transposed or not.
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with atomic_path(path) as temporary:
        temporary.write_bytes(safetensors.numpy.save(contiguous, metadata))


def _sync(path: Path) -> None:
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows syncs nothing that is only read
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in NO_FOLDER_SYNC:
            raise


def read_file(path: str | Path, what: str = "file") -> bytes:
    """All of a file, which a UserError calls `what`.

    Raises UserError when it is missing, empty, larger than the memory of this machine, or cannot be read.
    """
    path = existing_file(path, what)
    try:
        size = path.stat().st_size
        if size > physical_memory():
            raise UserError(
                f"{what} {path} has {size} bytes, more than this machine's memory: check that it is the right file"
            )
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{what} {path} {unusable(error)}") from error


def physical_memory() -> float:
    """The bytes of memory that this machine has; infinity on Windows, where Python cannot tell."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else float("inf")


@contextmanager
def refusing(path: str | Path, expected: str, fix: str = "fetch or write it again") -> Iterator[None]:
    """Whatever is raised in this context is a UserError that refuses `path`, and says what was `expected` of it.

    For the parsing of a file alone: damaged ones make parsers raise nearly any type, and warn.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        reason = printable(textwrap.shorten(str(error).strip() or type(error).__name__, 160))  # it may quote the file
        raise UserError(f"{path} refused: {reason}; expected {expected}: {fix}") from error


def most_memory(size: int) -> int:
    """The bytes that the content of a file of `size` bytes may take; tensors that share memory count each."""
    return 8 * size + 2**28  # a quarter of a gigabyte more is not worth a refusal


def check_unique(names: list[str]) -> None:
    """Raise ValueError for a name that comes twice: nobody can say which of the two is meant."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"it holds {twice[0]!r} twice")


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    check_unique([name for name, _ in items])
    return dict(items)


def unzip(data: bytes) -> dict[str, bytearray]:
    """The files in a zip archive, by name; raises nearly any exception where it is damaged or claims too much."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        claimed = sum(info.file_size for info in archive.infolist())
        if claimed > most_memory(len(data)):
            raise ValueError(f"it unpacks to {claimed} bytes, more than {most_memory(len(data))}")
        check_unique(archive.namelist())
        for info in archive.infolist():
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # of others zipfile sets no limit
                raise ValueError(f"{info.filename} is compressed in another way than deflated")
            if info.CRC == 0:  # torch.save can be told to leave the sums out
                info.CRC = None  # type: ignore[assignment]  # zipfile takes it for no sum
            with archive.open(info) as file:
                content = found[info.filename] = bytearray(file.read(info.file_size))
            if len(content) != info.file_size:
                raise ValueError(f"{info.filename} ends early")
    return found


def _npy_header(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether it is in Fortran's order, dtype) of the .npy in `stream`, which then is at its content."""
    version = npy_format.read_magic(stream)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    return read(stream)


def plain(value: Any, size: int) -> Any:
    """`value`, of a file of `size` bytes, with arrays for their stand-ins; shared parts stay shared."""
    claimed = _claimed(value, {})
    if claimed > most_memory(size):
        raise ValueError(f"its content takes {claimed} bytes, more than {most_memory(size)}")
    return _plain(value, {})


def _claimed(value: Any, done: dict[int, int]) -> int:
    """The bytes of a copy of `value` in which nothing is shared; `done` (by id) has each part visited once."""
    if id(value) not in done:
        if isinstance(value, Array):
            parts = value.nbytes
        elif isinstance(value, dict):
            parts = sum(_claimed(item, done) for item in (*value, *value.values()))
        elif isinstance(value, (list, tuple)):
            parts = sum(_claimed(item, done) for item in value)
        else:
            parts = sys.getsizeof(value)
        done[id(value)] = parts + 64
    return done[id(value)]


def _plain(value: Any, done: dict[int, Any]) -> Any:
    if type(value) in LEAVES:
        return value
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Array):
        made = value.build()
    elif isinstance(value, dict) and all(type(key) in LEAVES for key in value):
        made = {key: _plain(item, done) for key, item in value.items()}
    elif type(value) in (list, tuple):
        made = type(value)([_plain(item, done) for item in value])
    else:
        raise ValueError(f"it holds a {type(value).__name__}")
    done[id(value)] = made
    return made
