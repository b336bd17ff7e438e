"""A recording, and the model that answers from it.

It is a `.safetensors` file: arrays named by digest, and a text about them.

    VERSION DIGEST
    {"made_with": ..., "modules": [...], "answers": {...}, "arrays": [[DIGEST, DTYPE], ...]}

Numbers in the text are indices of that list of arrays. No code in the file is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from portproof.arrays import is_projected
from portproof.backends.model import Model
from portproof.backends.question import Cotangents, Question, Run
from portproof.backends.slots import Module, is_setting
from portproof.backends.trace import Inputs, is_array, tensors_in
from portproof.backends.values import COMPLEX, KINDS, decode, digest_of
from portproof.compare.ruler import UNIT_ROUNDOFF
from portproof.ladder.pairs.as_built import AsBuilt
from portproof.ladder.pairs.pair import MODES, drawn_cotangents
from portproof.mapping.fingerprint import POWERS, Fingerprint, sizes_of_axes
from portproof.recording.codec import Reader
from portproof.report.text import grouped
from sturdyio.cli import UserError
from sturdyio.files import load_safetensors_with_metadata, refusing, save_safetensors

NAME = "portproof.recording"
VERSION = 12
MOST_INPUTS = 1000  # each is part of every question
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
        """Write it; either the whole file appears or none. Equal recordings have equal bytes.

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


class RecordedModel(Model):
    """A reference that answers from a recording.

    Raises ValueError, KeyError or TypeError for an inconsistent header.
    """

    is_recorded = True
    cotangents: Cotangents

    def __init__(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        self._reader = Reader(arrays)
        read = self._reader.read
        self.made_with = read(dict[str, str], header["made_with"])
        self.version = self.made_with["portproof"]
        listed = read(list[Module], header["modules"])
        modules = {module.name: module for module in listed}
        if len(modules) != len(listed):
            raise ValueError("it holds a module twice")
        super().__init__("reference", modules, read(dict[str, np.ndarray], header["tensors"]))
        self._constants = read(dict[str, np.ndarray], header["constants"])
        self.inputs: Inputs = decode(header["inputs"], arrays)
        self.also: list[Inputs] = [decode(each, arrays) for each in header["also"]]  # further ones, of eval mode
        self.images = [(read(np.ndarray, raw), read(np.ndarray, ready)) for raw, ready in header["images"]]
        self.not_alone = read(dict[str, str], header["not_alone"])
        self.seed, self.weights = read(int, header["seed"]), read(str, header["weights"])
        self.modes = read(tuple[str, ...], header["modes"])
        self.in_train = read(dict[str, np.ndarray], header["in_train"])
        self.branches = read(dict[str, dict[str, bool]], header["branches"])
        self.conditions = set(read(list[str], header["conditions"]))
        self.is_watched = read(bool, header["is_watched"])
        self.as_built = read(AsBuilt, header["as_built"])
        self.fingerprint = next(iter(read(list[Fingerprint], header["fingerprint"])), None)
        self._answers = dict(header["answers"])  # {question's key: answers as written}
        self._check()

    def _check(self) -> None:
        if not self.modes or not set(self.modes) <= set(MODES):
            raise ValueError("it holds no mode")
        if not all(isinstance(inputs, (list, dict)) for inputs in (self.inputs, *self.also)):
            raise ValueError("it holds no inputs")
        if len(tensors_in(self.inputs, is_array)) > MOST_INPUTS:
            raise ValueError(f"it holds more than {MOST_INPUTS} inputs")
        for name, module in self._whole.items():
            owners = {slot.key.rpartition(".")[0] for slot in module.slots.values()}
            if name.rpartition(".")[0] not in self._whole or owners - {name}:
                raise ValueError(f"its module {name} is not in the model")
            if not all(map(is_setting, module.settings.values())):
                raise ValueError(f"its module {name} has a setting that is no number and no line of text")
        for slot in self._slots.values():
            array = self._values[slot.tensor]
            if array.shape != slot.shape or (array.dtype.kind != "f") != slot.is_whole:
                raise ValueError(f"its {slot.key} is {array.dtype} {array.shape}, not as it says")
        for name, array in self.in_train.items():
            if name not in self._values or self._values[name].shape != array.shape or array.dtype.kind != "f":
                raise ValueError(f"its {name} of train mode does not fit the model")
        for name, array in (*self._values.items(), *self.in_train.items()):
            _check_finite(name, array)
        shapes = {slot.tensor: slot.shape for slot in self._slots.values()}
        for key, array in self.as_built.constants.items():
            if array.shape != shapes.get(key):
                raise ValueError(f"its {key} as built is {array.shape}, not as it says")
        if self.fingerprint:
            _check_fingerprint(self.fingerprint, shapes)
        for mode in self.modes:
            for dtype in UNIT_ROUNDOFF:
                self.run(self.inputs, dtype, mode == "train")
        for inputs in self.also:
            for dtype in UNIT_ROUNDOFF:
                self.ask(Question.of_model(inputs, dtype, train=False))
        for raw, ready in self.images:
            if (raw.dtype, raw.ndim, raw.shape[-1]) != (np.uint8, 3, 3) or ready.dtype != np.float32:
                raise ValueError(
                    "it holds an image that is no uint8, height x width x 3, or is not prepared as float32"
                )
        trains = [mode == "train" for mode in self.modes]
        returned = {train: self.run(self.inputs, "float64", train).output for train in trains}
        self.cotangents = drawn_cotangents(returned, self.seed)
        for answer in chain.from_iterable(self._answers.values()):
            self._check_answer(answer)

    def _check_answer(self, answer: Mapping[str, Any]) -> None:
        run, name = self._reader.run(answer), self._reader.read(str, answer["module"])
        self._reader.read(str, answer["upstream"])
        self._reader.read(int, answer["keeps"])
        prefix = f"{name}." if name else ""
        shapes = {slot.key: slot.shape for slot in self._slots.values()}
        for call in run.trace.calls.values():
            if (prefix + call.name if call.name else name) not in self._whole:
                raise ValueError(f"its run calls {call.name}, which is no module")
        kept = {key: _kept_shape(shape) for key, shape in shapes.items()}
        for known, tensors in ((kept, run.gradients), (shapes, run.buffers)):
            for tensor, array in tensors.items():
                if known.get(prefix + tensor) != array.shape:
                    raise ValueError(f"its run has a {prefix + tensor} of another shape, {array.shape}")
        for i, array in enumerate(run.output if not prefix and answer["upstream"] else ()):
            _check_finite(f"output {i}", array)

    def unsaved_constants(self) -> dict[str, np.ndarray]:
        return dict(self._constants)

    def ask(self, question: Question) -> Run:
        """The recorded answer; raises UserError if it was not recorded."""
        for answer in self._answers.get(question.key(self.switched_off), ()):
            if question.served_by(answer["upstream"], answer["keeps"]):
                run = question.only_asked(self._reader.run(answer))
                gradients = self._pieces_of(run.gradients, question.module)
                buffers = self._pieces_of(run.buffers, question.module)
                return replace(run, gradients=gradients, buffers=buffers)
        recording = f"the recording, made by portproof {self.version},"
        what = f"what {question.module or 'the model'} gives in {MODES[question.train]} mode, {question.dtype},"
        raise UserError(f"{recording} does not hold {what} on these inputs: record it again")

    def _pieces_of(self, tensors: Mapping[str, np.ndarray], module: str) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        prefix = f"{module}." if module else ""
        owners = {slot.key: slot for slot in self._whole_slots.values()}
        for key, array in tensors.items():
            slot = owners[prefix + key]
            for piece in self._pieces[slot.tensor]:
                is_whole = array.shape == slot.shape  # else it is projected
                found[piece.key.removeprefix(prefix)] = piece.read(array) if is_whole else array
        return found

    def notes(self) -> list[str]:
        made_with = ", ".join(f"{name} {version}" for name, version in self.made_with.items())
        how = f"{self.weights} weights, seed {self.seed}, {' and '.join(self.modes)} mode"
        return [f"recorded with {made_with}: {how}", *grouped("not run alone, ", self.not_alone)]


def _kept_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the gradient of a tensor of this shape."""
    return (sum(map(sum, sizes_of_axes(shape))),) if is_projected(shape) else shape


def _check_fingerprint(found: Fingerprint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for key, vectors in found.gradients.items():
        if key not in shapes or [vector.shape for vector in vectors] != sizes_of_axes(shapes[key]):
            raise ValueError(f"its fingerprint of {key} does not fit the model")
    if any(array.shape != (POWERS,) for array in found.outputs):
        raise ValueError("its fingerprint has other outputs")
    for array in (*found.outputs, *chain.from_iterable(found.gradients.values())):
        if array.dtype.kind not in "fc":
            raise ValueError(f"its fingerprint is {array.dtype}")
        _check_finite("fingerprint", array)


def _check_finite(name: str, array: np.ndarray) -> None:
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise ValueError(f"its {name} holds NaN or infinity")
