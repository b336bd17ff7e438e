"""Convert weights between two models, of either framework, by name or by a map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from portproof.backends import backend, backend_of_model
from portproof.backends.slots import Arrays, ModelArrays
from portproof.backends.trace import Inputs
from portproof.convert.rules import COUNT, Change, identity, transpose
from portproof.mapping.links import one_to_one, parse
from portproof.mapping.name_map import checked_map, pairs_by_name, propose
from portproof.mapping.pairing import spare
from sturdyio.cli import UserError


def convert_state_dict(
    arrays: Mapping[str, np.ndarray],
    source: Any,
    target: Any,
    given: Mapping[str, str] | None = None,
    what: str = "weights",
) -> Arrays:
    """Convert the state_dict `arrays` of the model `source` to one of `target`, bit for bit.

    No model is changed; each is a torch.nn.Module or a paddle.nn.Layer, with its own
    keys and layouts. `given` maps keys of `source` to keys of `target`, as a map's
    lines do; the default is equal PyTorch names. Without counterpart, a count of
    batches is left out or 0; a buffer of no library layer (a mask) is left out or
    stays as in `target`. Raises UserError, which names `what`, if anything else has
    no counterpart, is not finite, or does not fit by key, shape and dtype.
    """
    source_backend, target_backend = backend_of_model(source), backend_of_model(target)
    source_backend.load_arrays(source_backend.copied(source), arrays, what)
    of_source, of_target = source_backend.arrays_of(source), target_backend.arrays_of(target)
    if given is None:
        target_keys = {name: key for key, name in of_target.names.items()}
        given = {key: target_keys[name] for key, name in of_source.names.items() if name in target_keys}
    links = [parse(key, target_key) for key, target_key in given.items()]
    may_lack, may_keep = (_spare_keys(model) for model in (of_source, of_target))
    served = may_lack.union(*(link.ref for link in links))
    left = [key for key in of_source.slots if key not in served]
    if left:
        raise UserError(f"{what} cannot be converted: the other model has nothing for {left[0]}: map their names")
    result = target_backend.copied(target)
    converted: Arrays = {}
    own = target_backend.state_arrays(result)
    for link in links:
        if all(key in arrays for key in link.ref):
            for slot, port_slot in one_to_one(link, of_source.slots, of_target.slots):
                piece, key = slot.read(arrays[slot.tensor]), port_slot.tensor
                converted[key] = port_slot.written(converted.get(key, own[key].astype(piece.dtype)), piece)
    for key in may_keep - converted.keys():
        converted[key] = np.zeros((), np.int64) if key.rpartition(".")[2] == COUNT else own[key]
    target_backend.load_arrays(result, converted, "converted weights")
    return target_backend.state_arrays(result)


def key_map(
    ref: Any, port: Any, inputs: Inputs, given: Mapping[str, str] | None = None, seed: int = 0
) -> tuple[dict[str, str], str]:
    """Map PyTorch keys to PaddlePaddle keys -> ({reference's: port's}, what that rests on).

    Joined tensors share a line, as in a map; `given` is {reference's module: port's}.
    Nothing is run if all other names agree; else both run on `inputs` with probe
    weights of `seed`. Raises UserError if tensors differ or values leave it open.
    """
    ref_model, port_model = backend("torch").wrap(ref, "reference"), backend("paddle").wrap(port, "port")
    modules, lines = checked_map(given or {}, ref_model, port_model)
    pairs = None if lines else pairs_by_name(ref_model, port_model, modules)
    if pairs is not None:
        return {slot.tensor: port_slot.tensor for slot, port_slot in pairs}, "by name"
    from portproof.backends.probe import load_probe_weights

    run = ref_model.run(inputs, "float32", train=True)
    if run.trace.error:
        raise UserError(f"the reference cannot run on these inputs: it raised {run.trace.error}: check their shapes")
    load_probe_weights(ref_model, seed, inputs)
    name_map = propose(ref_model, port_model, inputs, given)
    for name, reason in name_map.problems.items():
        raise UserError(f"the two models do not have the same tensors: {name}: {reason}")
    if name_map.ambiguous or not name_map.confirmed:
        reason = name_map.ambiguous or name_map.how
        raise UserError(f"the map of names is not certain ({reason}): name modules in a file for --map")
    return name_map.keys, name_map.how


def changes(ref: Any, port: Any, keys: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """(layer, PyTorch's name, PaddlePaddle's name, change of layout) of all `keys`."""
    types, ref_slots = backend("torch").layers.types(ref), backend("torch").arrays_of(ref).slots
    slots = backend("paddle").arrays_of(port).slots
    layouts: dict[Change, str] = {identity: "same", transpose: "transposed"}
    for link in (parse(key, port_key) for key, port_key in keys.items()):
        layout = layouts.get(slots[link.port[0]].change, "reshaped")
        if link.is_join:
            layout = "joined" if len(link.ref) > 1 else "split"
        elif link.transposed or ref_slots[link.ref[0]].shape != slots[link.port[0]].shape:
            layout = "reshaped"
        names = []
        for tensors in (link.ref, link.port):
            leaf = tensors[0].rpartition(".")[2]
            names.append(f"{len(tensors)} x {leaf}" if len(tensors) > 1 else leaf)
        name, port_name = names
        yield types[ref_slots[link.ref[0]].key.rpartition(".")[0]], name, port_name, layout


def table(rows: Iterable[tuple[str, str, str, str]], first: str, second: str) -> str:
    """Count equal rows of `changes`; `first` and `second` are the frameworks."""
    counted = Counter(rows).items()
    width = max([11, *(len(layer) for (layer, *_), _ in counted)])
    lines = [f"{'count':>5}  {'layer':{width}}  {first:19}  {second:19}  layout"]
    for (layer, ref_name, port_name, layout), count in counted:
        lines.append(f"{count:>5}  {layer:{width}}  {ref_name:19}  {port_name:19}  {layout}")
    return "\n".join(lines)


def _spare_keys(model: ModelArrays) -> set[str]:
    return {slot.tensor for module in model.modules.values() for slot in spare(module).values()}
