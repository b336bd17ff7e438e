"""What a model holds once its side's own code has loaded a weights file, against what the file holds."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import SUFFIXES
from portproof.compare import Item, compare, placed, tensor_item
from portproof.compare.ruler import exact_atol
from portproof.convert.rules import COUNT
from portproof.ladder.rung import QUIET, Rung, names_back, needed, on_rung, reference_name
from sturdyio.cli import UserError

FILES = 2  # of each side: the first alone cannot show a loader that keeps what it read first
BY_SECTION = attrgetter("section")
HINT = "the loader reads nothing, keeps what it read before, skips a key that does not fit, or changes a layout"

Arrays = Mapping[str, np.ndarray]
Load = Callable[[Any, Path], Any]
Write = Callable[[Path, Arrays], Any]
Convert = Callable[[Path, Path], Any]


def _unlike(earlier: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """An array that is none of `earlier`, of their shape and dtype; a single boolean only differs from the last."""
    last = earlier[-1]
    if last.dtype.kind == "b" and last.size == 1:
        return ~last
    drawn: np.ndarray
    while True:
        if last.dtype.kind in "biu":
            drawn = rng.integers(0, 2 if last.dtype.kind == "b" else 100, last.shape)
        elif (last > 0).all():  # a variance must stay so
            drawn = rng.uniform(0.5, 1.5, last.shape)
        else:
            drawn = rng.uniform(-1.0, 1.0, last.shape)
        drawn = np.asarray(drawn, last.dtype)
        if not any(np.array_equal(drawn, array) for array in earlier):
            return drawn


class _Side:
    def __init__(self, role: str, model: Any, load: Load, write: Write | None, seed: int, device: str) -> None:
        self.role, self.load, self.write = role, load, write
        self.backend = backend("torch" if role == "reference" else "paddle")
        if not isinstance(model, self.backend.module_class):
            raise UserError(
                f"the {role} is a {type(model).__name__}, no {self.backend.module_class_name}: give a model"
            )
        place, self.suffix = self.backend.device(device), SUFFIXES[self.backend.name][0]
        self.model = self.backend.training.to_device(self.backend.copied(model), place, "float32")
        self.tensors = copy.deepcopy(self.model.state_dict())  # for the files; tied ones stay tied
        self.states = [self.backend.arrays_in(self.tensors)]  # that the model has had
        self.rng = np.random.default_rng([seed, 9 if role == "reference" else 10])

    def new_file(self, folder: Path) -> tuple[Path, Arrays]:
        """(a file of drawn values, these by the side's own names)."""
        for name, tensor in self.tensors.items():
            if self.states[0][name].size:  # another empty array is no other
                self.backend.set_value(tensor, _unlike([state[name] for state in self.states], self.rng))
        arrays = self.backend.arrays_in(self.tensors)
        path = folder / f"{self.role}_{len(self.states)}{self.suffix}"
        self.states.append(arrays)
        if self.write:
            path = self.write(path, arrays) or path
        else:
            self.backend.framework.save(self.tensors, str(path))
        return Path(path), arrays

    def loaded(self, path: Path) -> Arrays:
        """What the model holds behind the side's own load of `path`, by the side's own names."""
        returned = self.load(self.model, path)
        if isinstance(returned, self.backend.module_class):
            self.model = returned
        return self.backend.state_arrays(self.model)

    def by_reference_names(self, names: Mapping[str, str]) -> Arrays:
        """What the model holds; `names` is {reference's module: the side's}."""
        back = names_back(names)
        held = self.backend.arrays_of(self.model).saved()
        return {reference_name(name, back): array for name, array in held.items()}

    def converted(self, convert: Convert, source: Path, names: Mapping[str, str]) -> Arrays:
        """What the model holds of the reference's file `source`, by the reference's names."""
        path = source.with_name(f"converted{self.suffix}")
        convert(source, path)
        self.loaded(path)
        return self.by_reference_names(names)


@on_rung
def weights_file(
    ref: Any,
    port: Any,
    load_ref: Load,
    load_port: Load,
    *,
    write_ref: Write | None = None,
    write_port: Write | None = None,
    convert: Convert | None = None,
    names: Mapping[str, str] | None = None,
    seed: int = 0,
    device: str = "cpu",
    rung: Rung = QUIET,
) -> None:
    """Compare what each side's own code loads from a file with what the file holds, bit for bit.

    `load_ref(model, path)` and `load_port(model, path)` load a file of their side into a model of it, or return
    another model that has loaded it. Each gets two files, one after the other, and a copy of its model. All that its
    state_dict has is drawn by `seed` for each file, unlike all that the model held before; what was positive
    throughout, such as a variance, stays so. The reference has to hold what its own files do, or UserError is raised.

    A file is a state_dict written by `torch.save` (.pth) or `paddle.save` (.pdparams). For another kind of file give
    `write_ref` or `write_port`: functions (path, arrays) that write NumPy arrays, by the state_dict's names and in its
    layouts, and return the path if it is another. With `convert(ref_path, port_path)`, which makes the port's file out
    of the reference's, the port loads a converted file, too. `names` is {reference's module: port's}, where they
    differ.
    """
    of_ref = _Side("reference", ref, load_ref, write_ref, seed, device)
    of_port = _Side("port", port, load_port, write_port, seed, device)
    expected: dict[Item, np.ndarray] = {}
    found: dict[Item, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, FILES + 1):
            ref_path = _check_reference(rung, of_ref, Path(folder))
            path, arrays = of_port.new_file(Path(folder))
            held = needed(rung.of_port("loading function", of_port.loaded, path))
            expected |= _items(arrays, f"file {number}")
            found |= _items(held, f"file {number}")
        if convert:
            held = needed(rung.of_port("converted file", of_port.converted, convert, ref_path, names or {}))
            arrays = of_ref.by_reference_names({})
            arrays = {name: array for name, array in arrays.items() if name in held or not name.endswith(COUNT)}
            expected |= _items(arrays, "converted")
            found |= _items(held, "converted")
    rung.compare(expected, found, title="weights files, bit for bit", group=BY_SECTION, hints={"weights": HINT})


def _items(arrays: Arrays, section: str) -> dict[Item, np.ndarray]:
    return placed({tensor_item(name, "weights"): a for name, a in arrays.items() if a.size}, section=section)


def _check_reference(rung: Rung, side: _Side, folder: Path) -> Path:
    """A new file that the reference loads; UserError if it does not hold what the file does."""
    path, arrays = side.new_file(folder)
    expected, held = _items(arrays, ""), _items(rung.of_ref("loading function", side.loaded, path), "")
    row = compare(expected, held, exact_atol(expected)).first_failure
    if row is not None:
        what = f"the reference's loading function leaves another {row.item.name} than its file {path.name} has"
        raise UserError(f"{what}: give the function by which the reference loads its weights")
    return path
