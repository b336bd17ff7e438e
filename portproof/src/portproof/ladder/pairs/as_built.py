"""Saved buffers and frozen parameters as each side was built: the tables, masks and index arrays that nothing changes.

The reference's are loaded over the port's before the models run, so no output shows a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional, cast

import numpy as np

from portproof.arrays import same_bits
from portproof.backends.model import BackendModel, Model, values_of
from portproof.backends.trace import Inputs
from portproof.backends.values import digest_of
from portproof.compare import Item, Verdict, compare, placed, tensor_item
from portproof.compare.ruler import constant_atol
from portproof.convert.rules import COUNT
from portproof.mapping.pairing import is_optional
from portproof.report.text import grouped
from sturdyio.cli import UserError

if TYPE_CHECKING:
    from portproof.ladder.pairs.pair import Pair
    from portproof.recording.file import RecordedModel

Factory = Optional[Callable[[], Any]]

TITLE = "buffers as built"
MOST_SHOWN = 5
SEEDS = 1, 2  # under which each factory makes a model
MASKED = -1e4  # a mask's minus infinity may be -inf, -1e9 or -1e4: e^-1e4 is 0, in float64 too
STATISTICS = "a pass in train mode changes them"  # or may: of a library layer
DRAWN = "the seed changes them"
FROZEN = "a frozen parameter may be drawn at random, or loaded, which only factories (see portproof.align) can tell"
LOADED = "the reference was given with weights of its own"
OTHER_NAME = "they have another name there, and the map is not confirmed"
OTHER_TYPE = "they have another type there"
ADVICE = "such a buffer may also be drawn at random, or loaded: only factories (see portproof.align) can tell"


@dataclass(frozen=True)
class AsBuilt:
    """One side's saved buffers and frozen tables, by state_dict key."""

    constants: Mapping[str, np.ndarray] = field(default_factory=dict)  # in the model's own layout
    others: Mapping[str, str] = field(default_factory=dict)  # {key: why it is not known to be a constant}
    rebuilt: bool = False  # whether a factory has shown what the seed changes


def as_built(
    model: BackendModel,
    inputs: Inputs,
    factory: Factory = None,
    keys: Collection[str] | None = None,
    loaded: bool = False,
) -> AsBuilt:
    """Tell the constants among saved buffers: neither a pass in train mode nor another seed changes them.

    `keys`: those that are asked for; default: all. Without a `factory` they are taken as the model was given, and what
    the seed changes is not known; a model that was then `loaded` with weights has no known constant. Raises UserError
    if the factory makes another model.
    """
    slots = list(model.slots.values())
    own: set[str] = set()
    if keys is None:
        keys = _untrained(model)
        # Of library layers: also spectral norm's vectors, which a pass leaves as they are once they have converged.
        for module in model.modules.values():
            its = (slot for leaf, slot in module.slots.items() if leaf == COUNT or not is_optional(module, leaf))
            own.update(slot.tensor for slot in its if slot.is_buffer)
    keys = [key for key in model.tensor_keys if key in keys and key in model.held]
    if loaded and factory is None:
        return AsBuilt(others=dict.fromkeys(keys, LOADED))
    if own.issuperset(keys):
        return AsBuilt(others=dict.fromkeys(keys, STATISTICS))
    run = model.run(inputs, "float32", train=True)
    if run.trace.error:
        return AsBuilt(others=dict.fromkeys(keys, f"the {model.role} does not run in train mode, which would tell"))
    before, after = model.arrays(), run.buffers
    changed = own | {s.tensor for s in slots if s.key in after and not same_bits(before[s.key], after[s.key])}
    others = {key: STATISTICS for key in keys if key in changed}
    if factory is None:
        others |= {slot.tensor: FROZEN for slot in slots if slot.tensor in keys and not slot.is_buffer}
    left = [key for key in keys if key not in others]
    held = model.held
    if left and factory:
        (held, digests), (again, other_digests) = (_built(model, factory, seed, left) for seed in SEEDS)
        trained = [slot.tensor for slot in slots if slot.trained and slot.tensor in digests]
        if trained and all(digests[key] == other_digests[key] for key in trained):
            others |= dict.fromkeys(left, f"each {model.role} that is made has the same weights, loaded perhaps")
        others |= {key: DRAWN for key in left if key not in others and not same_bits(held[key], again[key])}
    return AsBuilt({key: held[key] for key in left if key not in others}, others, factory is not None)


def _untrained(model: Model) -> set[str]:
    """Saved buffers, and frozen parameters of own classes and of embeddings: sinusoids may be in either."""
    modules = [module for module in model.modules.values() if module.kind in ("", "Embedding")]
    frozen = {slot.tensor for module in modules for slot in module.slots.values() if not slot.trained}
    return frozen | {slot.tensor for slot in model.slots.values() if slot.is_buffer}


def _built(
    model: BackendModel, factory: Callable[[], Any], seed: int, keys: Collection[str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What the factory makes under this seed, by state_dict key: these arrays, and digests of all others."""
    with model.backend.runs.seeded(seed):
        built = factory()
    if not isinstance(built, model.backend.module_class):
        raise UserError(f"the {model.role}'s factory makes a {type(built).__name__}, no model: give what makes it")
    found, digests, shapes = {}, {}, {}
    for key, array in values_of(model.backend, built):
        shapes[key] = array.shape
        if key in keys:
            found[key] = array
        else:
            digests[key] = digest_of(array)
    for key, array in model.held.items():
        if shapes.get(key) != array.shape:
            raise UserError(f"the {model.role}'s factory makes another model, without this {key}: give what makes it")
    return found, digests


def compare_as_built(
    pair: Pair, factories: tuple[Factory, Factory], weights: str, map_is_proved: bool = False
) -> Verdict | None:
    """Compare the constants that the map pairs, each as its side held it; None if there are none.

    What is not compared goes to the pair's notes. `weights` as in `Options`; "own" ones are compared bit for bit.
    Tensors of other names are compared if values confirm the map, or the whole has proved it.
    """
    ref, port = pair.ref, pair.port
    if weights == "own":
        return None
    if isinstance(ref, BackendModel):
        of_ref = as_built(ref, pair.inputs, factories[0], loaded=weights == "reference")
    else:
        of_ref = cast("RecordedModel", ref).as_built
    slots, port_slots = ref.slots, port.slots
    untrained = _untrained(ref)
    mapped = {key: port_slots[other] for key, other in pair.name_map.tensors.items() if slots[key].tensor in untrained}
    asked = {slot.tensor for key, slot in mapped.items() if slots[key].tensor in of_ref.constants}
    of_port = as_built(port, pair.inputs, factories[1], asked)
    is_sure = map_is_proved or pair.name_map.confirmed
    others: dict[str, str] = {}
    sides: list[dict[Item, np.ndarray]] = [{}, {}]
    for key, port_slot in mapped.items():
        slot, reason = slots[key], ""
        for built, tensor in ((of_ref, slot.tensor), (of_port, port_slot.tensor)):
            reason = reason or built.others.get(tensor, "")
        if not is_sure and slot.key.rpartition(".")[2] != port_slot.key.rpartition(".")[2]:
            reason = reason or OTHER_NAME
        if not reason and slot.tensor in of_ref.constants and port_slot.tensor in of_port.constants:
            arrays = slot.read(of_ref.constants[slot.tensor]), port_slot.read(of_port.constants[port_slot.tensor])
            found = _of_one_type(*arrays)
            reason = "" if found else OTHER_TYPE
            for side, array in zip(sides, found or ()):
                if array.size:
                    side[tensor_item(key, "buffer")] = array
        if reason:
            others[key] = reason
    pair.notes += grouped("not compared as built, since ", others)
    if not sides[0]:
        return None
    ref_side, port_side = (placed(side, section=TITLE) for side in sides)
    limits = {item: constant_atol(array) for item, array in ref_side.items()}
    verdict = compare(ref_side, port_side, limits, title=TITLE)
    differing = [(row, row.worst) for row in verdict.bad if row.worst]
    for row, worst in differing[:MOST_SHOWN]:
        pair.notes.append(f"{row.name}{row.place}: reference {worst.ref!r}, port {worst.port!r}")
    if differing and not (of_ref.rebuilt and of_port.rebuilt):
        pair.notes.append(f"{TITLE}: {ADVICE}")
    return verdict


def _of_one_type(ref: np.ndarray, port: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Both in one type, without what is not finite on both sides; None: values of two types that differ.

    A mask of zeros and large negative numbers becomes one of whole numbers.
    """
    kinds = {ref.dtype.kind, port.dtype.kind}
    if kinds <= set("biu"):
        return ref.astype(np.int64), port.astype(np.int64)
    if not kinds <= set("fc") and not np.array_equal(ref, port):
        return None
    if "c" not in kinds and all(((array == 0) | (array <= MASKED)).all() for array in (ref, port)):
        return (ref <= MASKED).astype(np.int64), (port <= MASKED).astype(np.int64)
    dtype = np.complex128 if "c" in kinds else np.float64
    ref, port = ref.astype(dtype), port.astype(dtype)
    same = ((ref == port) | np.isnan(ref) & np.isnan(port)) & ~np.isfinite(ref)
    return np.where(same, 0, ref), np.where(same, 0, port)
