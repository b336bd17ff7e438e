"""A recorded reference: what `BackendModel` is to judging, answered from a recording."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portproof.backends import FRAMEWORKS
from portproof.backends.model import BackendModel, Module, Run, Slot, T
from portproof.backends.trace import Inputs, ModuleCall
from portproof.compare.tolerances import UNIT_ROUNDOFF
from portproof.convert.rules import keep
from portproof.io.cli import UserError
from portproof.ladder.pairs.pair import MODES
from portproof.recording.answers import Reader, query_key, text_of
from portproof.recording.values import decode, fetch


def written_modules(modules: Mapping[str, Module], torch_type: Callable[[str], str]) -> list[dict[str, Any]]:
    """The modules as JSON, with the names that PyTorch has for layers; `_module` is the inverse."""
    return [
        {
            "name": module.name,
            "type": torch_type(module.type),
            "kind": module.kind,
            "is_leaf": module.is_leaf,
            "slots": [
                [leaf, slot.key, slot.tensor, list(slot.shape), slot.trained, slot.is_buffer, slot.is_whole]
                for leaf, slot in module.slots.items()
            ],
        }
        for module in modules.values()
    ]


def _module(written: Mapping[str, Any]) -> Module:
    slots = {}
    for leaf, key, tensor, shape, *flags in written["slots"]:
        slots[text_of(leaf)] = Slot(text_of(key), text_of(tensor), tuple(map(int, shape)), keep, *map(bool, flags))
    return Module(*(text_of(written[name]) for name in ("name", "type", "kind")), slots, bool(written["is_leaf"]))


class NotRecorded(UserError):
    """The recording does not hold what is asked for."""


class RecordedModel(BackendModel):
    """A reference that answers from a recording's `header` and `arrays`. It gets no other weights and no other inputs.

    Raises ValueError, KeyError or TypeError for a header that does not hold together.
    """

    is_recorded = True

    def __init__(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        self.role, self.switched_off, self._moved = "reference", set(), 0
        self._arrays, self._reader, self._answers = arrays, Reader(arrays), dict(header["answers"])
        framework = next((name for name in FRAMEWORKS if name in header), "torch")
        self.made_with = {name: text_of(header[name]) for name in (framework, "numpy", "portproof")}
        self._whole = {module.name: module for module in map(_module, header["modules"])}
        self._values = {key: fetch(arrays, number) for key, number in header["tensors"].items()}
        self._constants = {text_of(key): fetch(arrays, number) for key, number in header["constants"].items()}
        self.inputs: Inputs = decode(header["inputs"], arrays)
        self.cotangent = [fetch(arrays, number) for number in header["cotangent"]]
        self.not_alone = {text_of(label): text_of(reason) for label, reason in header["not_alone"].items()}
        self.seed, self.weights, self.modes = int(header["seed"]), text_of(header["weights"]), tuple(header["modes"])
        self.split({})
        self._check()

    def _check(self) -> None:
        if not self.modes or not set(self.modes) <= set(MODES):
            raise ValueError("it holds no mode")
        if not isinstance(self.inputs, (list, dict)) or not self.cotangent:
            raise ValueError("it holds no inputs, or no gradient for the outputs")
        for name, module in self._whole.items():
            owners = [slot.key.rpartition(".")[0] for slot in module.slots.values()]
            if name.rpartition(".")[0] not in self._whole or set(owners) - {name}:
                raise ValueError(f"its module {name} is not in the model")
        for slot in self._slots.values():
            array = self._values[slot.tensor]
            if array.shape != slot.shape or (array.dtype.kind != "f") != slot.is_whole:
                raise ValueError(f"its {slot.key} is {array.dtype} {array.shape}, not as it says")
        for name, array in [*self._values.items(), *((f"cotangent {i}", a) for i, a in enumerate(self.cotangent))]:
            _check_finite(name, array)
        for mode in self.modes:
            for dtype in UNIT_ROUNDOFF:
                self.run(self.inputs, dtype, mode == "train")
        whole = {slot.key: slot.shape for slot in self._slots.values()}
        for key, written in self._answers.items():
            text_of(key)
            run = self._reader.run(written)
            name = text_of(written["name"])
            prefix = f"{name}." if name else ""
            for call in run.trace.calls.values():
                if (prefix + call.name if call.name else name) not in self._whole:
                    raise ValueError(f"its run calls {call.name}, which is no module")
            for tensor, array in (*run.gradients.items(), *run.buffers.items()):
                if whole.get(prefix + tensor) != array.shape:
                    raise ValueError(f"its run has a {prefix + tensor} of another shape, {array.shape}")
            if not prefix:
                for i, array in enumerate(run.output):
                    _check_finite(f"output {i}", array)

    def arrays(self) -> dict[str, np.ndarray]:
        """All parameters and buffers."""
        return {key: slot.read(self._values[slot.tensor]) for key, slot in self._slots.items()}

    def constants(self) -> dict[str, np.ndarray]:
        """The tensors of floating point that are no weights."""
        return dict(self._constants)

    def moved_runs(self, count: int, run: Callable[[], T]) -> list[T]:
        """Those of the whole model, if float32 loses values of it; the recording holds none of a module alone."""
        found = []
        try:
            for self._moved in range(1, count + 1):
                found.append(run())
        except NotRecorded:
            return []
        finally:
            self._moved = 0
        return found

    def run_module(
        self,
        name: str,
        call: ModuleCall,
        dtype: str,
        train: bool,
        backward: bool,
        calls: bool = True,
        then: str = "",
    ) -> Run:
        """What the recording has for `BackendModel.run_module`; raises NotRecorded for what it was not asked."""
        key = query_key(name, call, dtype, train, backward, then, self.switched_off, self._moved)
        written = self._answers.get(key)
        if written is None:
            what = f"what {name or 'the model'} gives in {MODES[train]} mode, {dtype}, on these inputs"
            raise NotRecorded(
                f"the recording, made by portproof {self.made_with['portproof']}, does not hold {what}: record it again"
            )
        run, prefix = self._reader.run(written), f"{name}." if name else ""
        tensors = {field: self._pieces_of(getattr(run, field), prefix) for field in ("gradients", "buffers")}
        return replace(run, **tensors)

    def _pieces_of(self, tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
        """The pieces of whole tensors; `prefix` is missing from the given keys and these."""
        owners = {slot.key: slot.tensor for module in self._whole.values() for slot in module.slots.values()}
        return {
            piece.key.removeprefix(prefix): piece.read(array)
            for key, array in tensors.items()
            for piece in self._pieces[owners[prefix + key]]
        }


def _check_finite(name: str, array: np.ndarray) -> None:
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise ValueError(f"its {name} holds NaN or infinity")


def not_alone_note(not_alone: Mapping[str, str]) -> list[str]:
    """What could not be run alone, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for label, reason in not_alone.items():
        reasons.setdefault(reason, []).append(label)
    return [f"not run alone, {reason}: {_some(labels)}" for reason, labels in reasons.items()]


def _some(labels: Collection[str]) -> str:
    labels = list(labels)
    return ", ".join(labels[:5]) + f" and {len(labels) - 5} more" * (len(labels) > 5)
