"""A recording is a `.safetensors` file: arrays named by digest, and a text about them.

    VERSION DIGEST
    {"made_with": ..., "modules": [...], "answers": {...}, "arrays": [[DIGEST, DTYPE], ...]}

Numbers in the text are indices of that list of arrays. No code in the file is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from portproof.backends.values import COMPLEX, KINDS, digest_of
from portproof.recording.model import RecordedModel
from sturdyio.cli import UserError
from sturdyio.files import load_safetensors_with_metadata, refusing, save_safetensors

NAME = "portproof.recording"
VERSION = 3
MOST_TEXT = 64_000_000  # safetensors reads headers up to 100 MB
WHAT = "what portproof record wrote"


@dataclass(frozen=True)
class Recording:
    """A reference's answers to all that judging a port asks."""

    header: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]  # by digest

    @property
    def size(self) -> int:
        """The size of its file in bytes, about."""
        return sum(array.nbytes + 100 for array in self.arrays.values()) + len(json.dumps(self._text))

    def model(self) -> RecordedModel:
        """The reference, as judging takes it."""
        return RecordedModel(self.header, list(self.arrays.values()))

    @cached_property
    def _text(self) -> str:
        table = [[digest, str(array.dtype)] for digest, array in self.arrays.items()]
        return sealed(json.dumps({**self.header, "arrays": table}, separators=(",", ":"), allow_nan=False))

    def save(self, path: str | Path, max_size: int | None = None) -> None:
        """Write it, whole or not at all; equal recordings have equal bytes.

        Raises UserError if that takes more than `max_size` bytes, or it cannot be written.
        """
        check_name(path)
        if max_size is not None and self.size > max_size:
            sizes = f"{megabytes(self.size)}, more than {megabytes(max_size)}"
            fix = "allow more, record fewer modules to be run alone, or give smaller inputs"
            raise UserError(f"recording {path} would take {sizes}: {fix}")
        if len(self._text) > MOST_TEXT:
            size = megabytes(len(self._text))
            raise UserError(f"recording {path} lists too many runs ({size} of text): record fewer modules alone")
        stored = dict(self.arrays)
        for digest, array in self.arrays.items():
            if real := COMPLEX.get(str(array.dtype)):  # as pairs: the format lacks the type
                stored[digest] = array.reshape(*array.shape, 1).view(real)
        save_safetensors(stored, path, {NAME: self._text})

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read what `save` wrote; raises UserError for other or changed files."""
        stored, metadata = load_safetensors_with_metadata(path)
        if NAME not in metadata:
            raise UserError(f"{path} is no recording, but another .safetensors file: write it with portproof record")
        first, _, body = metadata[NAME].partition("\n")
        with refusing(path, WHAT):
            found = int(first.partition(" ")[0])
        if found != VERSION:
            older = "an older", "record the reference again with portproof record"
            age, fix = ("a newer", "update portproof") if found > VERSION else older
            raise UserError(f"{path} is of {age} portproof (format {found}, not {VERSION}): {fix}")
        with refusing(path, WHAT):
            if metadata[NAME] != sealed(body):
                raise ValueError("its header is damaged")
            header = json.loads(body)
            recording = cls(header, _arrays(header.pop("arrays"), stored))
            recording.model()
        return recording


def check_name(path: str | Path) -> None:
    """Raise UserError unless a recording can be written there."""
    if not str(path).endswith(".safetensors"):
        raise UserError(f"recording {path} does not end in .safetensors: choose a name that does")


def _arrays(table: Sequence[Sequence[str]], stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of `table`; raises ValueError unless the file has exactly these."""
    found = {}
    for name, dtype in table:
        if name not in stored:
            raise ValueError("an array is missing")
        array = stored[name]
        if dtype in COMPLEX:
            array = array.view(dtype).reshape(array.shape[:-1])
        if str(array.dtype) != dtype or array.dtype.kind not in KINDS or digest_of(array) != name:
            raise ValueError("an array is damaged")
        found[name] = array
    if len(found) != len(stored):
        raise ValueError("it holds other arrays")
    return found


def sealed(body: str) -> str:
    """The JSON of a file after its version and a digest of both."""
    digest = hashlib.blake2b(f"{VERSION}\n{body}".encode(), digest_size=16).hexdigest()
    return f"{VERSION} {digest}\n{body}"


def megabytes(size: int) -> str:
    """A size in bytes as "12 MB", "1.2 MB" or "0.12 MB"."""
    digits = (size < 10_000_000) + (size < 1_000_000)
    return f"{size / 1e6:.{digits}f} MB"
