"""The weights of one model as those of another, which may be of the other framework: by name, or by a map of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from portproof.backends import backend, backend_of_model
from portproof.backends.model import BackendModel, Slot
from portproof.backends.trace import Inputs
from portproof.convert.rules import COUNT, keep, transpose
from portproof.io.cli import UserError
from portproof.mapping.links import converted as converted_by
from portproof.mapping.links import parse
from portproof.mapping.name_map import checked_map, propose
from portproof.mapping.pairing import is_spare
from portproof.python39 import zip_strict

Arrays = dict[str, np.ndarray]


def convert_state_dict(
    arrays: Mapping[str, np.ndarray],
    source: Any,
    target: Any,
    names: Mapping[str, str] | None = None,
    what: str = "weights",
) -> Arrays:
    """The state_dict `arrays` of the model `source` as one of the model `target`, bit for bit; no model is changed.

    A model is a torch.nn.Module or a paddle.nn.Layer. `arrays` and the result are by the model's own keys and in its
    own layouts. `names` maps keys of `source` to keys of `target`, or several to one or one to several, as the lines
    of a map do; without it they are those of one name, as PyTorch names a layer's tensors. A count of batches is left
    out where `target` has none, and 0 where `source` has none; a buffer that is no library layer's (an index, a mask)
    is left out, and stays as `target` has it. Raises UserError, which calls the arrays `what`, unless they are finite
    and fit `source` by key, shape and dtype, every other tensor of either model has its counterpart in the other, and
    what comes out fits `target` as exactly.
    """
    source_backend, target_backend = backend_of_model(source), backend_of_model(target)
    source_backend.load_arrays(source_backend.copied(source), arrays, what)
    source_slots, target_slots = source_backend.named_slots(source), target_backend.named_slots(target)
    source_spare, target_spare = (
        {
            slot.tensor
            for module in side.describe(model).values()
            for leaf, slot in module.slots.items()
            if is_spare(module, leaf)
        }
        for side, model in ((source_backend, source), (target_backend, target))
    )
    if names is None:
        target_keys = {name: key for key, (name, _) in target_slots.items()}
        names = {key: target_keys[name] for key, (name, _) in source_slots.items() if name in target_keys}
    links = [parse(key, target_key) for key, target_key in names.items()]
    linked = {key for link in links for key in link.ref}
    left = [key for key in source_slots if key not in linked and key not in source_spare]
    if left:
        raise UserError(f"{what} cannot be converted: the other model has nothing for {left[0]}: map their names")
    result, converted = target_backend.copied(target), {}
    for link in links:
        if all(key in arrays for key in link.ref):
            in_torch_layout = [source_slots[key][1].change(arrays[key]) for key in link.ref]
            slots = [target_slots[key][1] for key in link.port]
            moved = converted_by(link, in_torch_layout, [slot.shape for slot in slots])
            converted |= {slot.tensor: slot.change(array) for slot, array in zip_strict(slots, moved)}
    own = target_backend.state_arrays(result)
    for key in target_spare - converted.keys():
        converted[key] = np.zeros((), np.int64) if _is_count(key) else own[key]
    target_backend.load_arrays(result, converted, "converted weights")
    return target_backend.state_arrays(result)


def key_map(
    ref: Any, port: Any, inputs: Inputs, given: Mapping[str, str] | None = None, seed: int = 0
) -> tuple[dict[str, str], str]:
    """({reference's key: port's key}, what that rests on) of a model in PyTorch and one in PaddlePaddle.

    A tensor that is several of the other side is a line for all of them, as in a map.

    Where all names agree, those of the modules in `given`, {reference's: port's}, aside, nothing is run. Else the map
    is proposed and confirmed with values: both models are run on `inputs`, with probe weights of `seed`. Raises
    UserError where the two do not have the same tensors, and where values do not settle the map everywhere.
    """
    ref_model, port_model = backend("torch").wrap(ref, "reference"), backend("paddle").wrap(port, "port")
    modules, lines = checked_map(given or {}, ref_model, port_model)
    ref_slots, port_slots = _slots(ref_model, {}), _slots(port_model, {port: name for name, port in modules.items()})
    if not lines and _shapes(ref_slots) == _shapes(port_slots):
        places = [place for place in ref_slots if place in port_slots]
        return {ref_slots[place].tensor: port_slots[place].tensor for place in places}, "by name"
    from portproof.backends.probe import load_probe_weights

    run = ref_model.run(inputs, "float32", train=True)
    if run.trace.error:
        raise UserError(f"the reference cannot run on these inputs: it raised {run.trace.error}: check their shapes")
    load_probe_weights(ref_model, seed, inputs)
    names = propose(ref_model, port_model, inputs, given)
    for name, reason in names.problems.items():
        raise UserError(f"the two models do not have the same tensors: {name}: {reason}")
    if names.ambiguous or not names.confirmed:
        reason = names.ambiguous or names.how
        raise UserError(f"the map of names is not certain ({reason}): name modules in a file for --map")
    return names.keys, names.how


def changes(ref: Any, port: Any, names: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """(layer, name in PyTorch, name in PaddlePaddle, what becomes of the layout) of every tensor that `names` maps."""
    types, ref_slots = backend("torch").layer_types(ref), backend("torch").named_slots(ref)
    slots = backend("paddle").named_slots(port)
    layouts = {keep: "same", transpose: "transposed"}
    for link in (parse(key, port_key) for key, port_key in names.items()):
        leaves = [
            f"{len(keys)} x {keys[0].rpartition('.')[2]}" if len(keys) > 1 else keys[0].rpartition(".")[2]
            for keys in (link.ref, link.port)
        ]
        layout = layouts.get(slots[link.port[0]][1].change, "reshaped")
        if len(link.ref) + len(link.port) > 2:
            layout = "joined" if len(link.ref) > 1 else "split"
        elif link.transposed or ref_slots[link.ref[0]][1].shape != slots[link.port[0]][1].shape:
            layout = "reshaped"
        yield types[ref_slots[link.ref[0]][1].key.rpartition(".")[0]], *leaves, layout


def table(rows: Iterable[tuple[str, str, str, str]], first: str, second: str) -> str:
    """How many there are of each row, as `changes` gives them; `first` and `second` are the two frameworks."""
    counted = Counter(rows).items()
    width = max([11, *(len(layer) for (layer, *_), _ in counted)])
    lines = [f"{'count':>5}  {'layer':{width}}  {first:19}  {second:19}  layout"]
    for (layer, ref_name, port_name, layout), count in counted:
        lines.append(f"{count:>5}  {layer:{width}}  {ref_name:19}  {port_name:19}  {layout}")
    return "\n".join(lines)


def _slots(model: BackendModel, renamed: Mapping[str, str]) -> dict[tuple[str, str], Slot]:
    """{(module, tensor in it): slot}, some modules `renamed`."""
    modules = model.modules.items()
    return {(renamed.get(name, name), leaf): slot for name, module in modules for leaf, slot in module.slots.items()}


def _shapes(slots: Mapping[tuple[str, str], Slot]) -> dict[tuple[str, str], tuple[int, ...]]:
    return {place: slot.shape for place, slot in slots.items() if not _is_count(place[1])}


def _is_count(name: str) -> bool:
    return name.rpartition(".")[2] == COUNT
