"""What tells a model's tensors, whatever their names: their gradients when all of one shape hold the same values.

Two models of one function then give the same outputs, however their tensors of one shape are paired, and the gradient
of a tensor, which its place decides, says which it is. A tensor that is joined from several holds their values in turn.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from portproof.arrays import along_axes, let_go, same_bits
from portproof.backends.lent import thawed
from portproof.backends.model import BackendModel
from portproof.backends.trace import Inputs
from portproof.mapping.forms import Forms
from portproof.mapping.links import Shape, slots_of, squeezed
from portproof.mapping.pairing import is_optional, is_statistic

POWERS = 4  # of an output's numbers that are summed


@dataclass(frozen=True)
class Fingerprint:
    """Of one side. Axes of length 1 are left out."""

    outputs: list[np.ndarray]  # of each the sums of its numbers' powers, whatever the order of its axes
    gradients: dict[str, list[np.ndarray]]  # by state_dict key: along each axis, the others summed with fixed weights


def fingerprint(
    model: BackendModel, inputs: Inputs, with_frozen: bool = False, forms: Forms | None = None
) -> Fingerprint | None:
    """Eval mode's, in float64; None if it does not run so. The weights stay, unless in pieces.

    `with_frozen` parameters, which may be frozen on one side alone, also of those.
    """
    forms = forms or Forms()
    model.set_pieces({})
    slots, before, in_train = model.slots, model.arrays(), dict(model.in_train)
    constants = _constants(model, inputs)
    filled = {
        key: forms.filling(slot.shape) for key, slot in slots.items() if not slot.is_whole and key not in constants
    }
    as_given = {key: slot.read(model.held[slot.tensor]) for key, slot in slots.items() if key not in filled}
    model.load(filled | as_given)
    outputs = model.run(inputs, "float64", False).output
    with thawed(model.backend, model.model) if with_frozen else nullcontext():
        run = model.run(inputs, "float64", False, list(map(sent, outputs)))
    model.load(before)
    model.in_train.update(in_train)
    if run.trace.error or not run.output or not all(np.isfinite(array).all() for array in run.output):
        return None
    gradients = {}
    for key, slot in slots.items():
        if slot.trained or with_frozen and not (slot.is_buffer or slot.is_whole):
            gradient = run.gradients.get(key, np.zeros(slot.shape))
            gradients[slot.tensor] = along_axes(_real(gradient), forms.folds.get(squeezed(slot.shape), ()))
            let_go(gradient)
    return Fingerprint([_sums(_real(output)) for output in run.output], gradients)


def _constants(model: BackendModel, inputs: Inputs) -> set[str]:
    """Buffers that the other side may lack, but for statistics, which a pass in train mode changes."""
    places = slots_of(model.modules).items()
    spare = {s.key for (name, leaf), s in places if is_optional(model.modules[name], leaf) and not is_statistic(s.key)}
    if not any(not model.slots[key].is_whole for key in spare):
        return spare
    before, after = model.arrays(), model.run(inputs, "float32", True).buffers
    return {key for key in spare if key not in after or same_bits(before[key], after[key])}


def sizes_of_axes(shape: Shape) -> list[Shape]:
    """The shapes of what `along_axes` gives."""
    return [(n,) for n in squeezed(shape) or (1,)]


def sent(output: np.ndarray) -> np.ndarray:
    """What is sent back: of each number alone, so that the order of axes does not matter."""
    part = output / max(np.abs(output).max(initial=0), 1e-300)
    return 1 + part + part**2


def _real(array: np.ndarray) -> np.ndarray:
    """In float64, of any numbers; of complex ones both parts in one."""
    return (array.real + np.sqrt(2) * array.imag).astype(np.float64)


def _sums(output: np.ndarray) -> np.ndarray:
    return np.array([(output**power).sum() for power in range(1, POWERS + 1)])
