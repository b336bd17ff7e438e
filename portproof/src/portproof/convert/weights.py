"""The weights of one model as those of another, which may be of the other framework: by name, or by a map of names."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from portproof.backends import backend, backend_of_model
from portproof.backends.model import BackendModel, Slot
from portproof.convert.rules import COUNT, keep, transpose
from portproof.io.cli import UserError
from portproof.mapping.names import checked_map

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
    own layouts. `names` maps keys of `source` to keys of `target`; without it they are those of one name, as PyTorch
    names a layer's tensors. A count of batches is left out where `target` has none, and 0 where `source` has none.
    Raises UserError, which calls the arrays `what`, unless they are finite and fit `source` by key, shape and dtype,
    every tensor of either model has its mate in the other, and what comes out fits `target` as exactly.
    """
    one, other = backend_of_model(source), backend_of_model(target)
    one.load_arrays(copy.deepcopy(source), arrays, what)
    slots, mates = one.named_slots(source), other.named_slots(target)
    if names is None:
        keys = {name: key for key, (name, _) in mates.items()}
        names = {key: keys[name] for key, (name, _) in slots.items() if name in keys}
    left = [key for key, (name, _) in slots.items() if key not in names and not _is_count(name)]
    if left:
        raise UserError(f"{what} cannot be converted: the other model has nothing for {left[0]}: map their names")
    converted = {
        mate: mates[mate][1].change(slots[key][1].change(arrays[key])) for key, mate in names.items() if key in arrays
    }
    counts = (key for key, (name, _) in mates.items() if key not in converted and _is_count(name))
    converted |= {key: np.zeros((), np.int64) for key in counts}
    result = copy.deepcopy(target)
    other.load_arrays(result, converted, "converted weights")
    return other.state_arrays(result)


def key_map(
    ref: Any, port: Any, inputs: Sequence[np.ndarray], given: Mapping[str, str] | None = None, seed: int = 0
) -> tuple[dict[str, str], str]:
    """({reference's key: port's key}, what that rests on) of a model in PyTorch and one in PaddlePaddle.

    Where all names agree, those of the modules in `given`, {reference's: port's}, aside, nothing is run. Else the map
    is proposed and confirmed with values: both models are run on `inputs`, with probe weights of `seed`. Raises
    UserError where the two do not have the same tensors, and where values do not settle the map everywhere.
    """
    ref_model, port_model = backend("torch").wrap(ref, "reference"), backend("paddle").wrap(port, "port")
    back = {mate: name for name, mate in checked_map(given or {}, ref_model, port_model).items()}
    ones, others = _places(ref_model, {}), _places(port_model, back)
    shapes = [{place: slot.shape for place, slot in side.items() if not _is_count(place[1])} for side in (ones, others)]
    if shapes[0] == shapes[1]:
        return {slot.key: others[place].key for place, slot in ones.items() if place in others}, "by name"
    from portproof.ladder.pair import prepare

    names = prepare(ref, port, inputs, given, "probe", seed, "cpu")[0].names
    for name, reason in names.problems.items():
        raise UserError(f"the two models do not have the same tensors: {name}: {reason}")
    if names.ambiguous or not names.confirmed:
        reason = names.ambiguous or names.how
        raise UserError(f"the map of names is not certain ({reason}): name modules in a file for --map")
    return names.tensors, names.how


def changes(ref: Any, port: Any, names: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """(layer, name in PyTorch, name in PaddlePaddle, what becomes of the layout) of every tensor that `names` maps."""
    types = backend("torch").layer_types(ref)
    slots = backend("paddle").named_slots(port)
    layouts = {keep: "same", transpose: "transposed"}
    for key, mate in names.items():
        module, _, leaf = key.rpartition(".")
        yield types[module], leaf, mate.rpartition(".")[2], layouts.get(slots[mate][1].change, "reshaped")


def table(rows: Iterable[tuple[str, str, str, str]], first: str, second: str) -> str:
    """How many there are of each row, as `changes` gives them; `first` and `second` are the two frameworks."""
    counted = Counter(rows).items()
    width = max([11, *(len(layer) for (layer, *_), _ in counted)])
    lines = [f"{'count':>5}  {'layer':{width}}  {first:19}  {second:19}  layout"]
    for (layer, name, other, layout), count in counted:
        lines.append(f"{count:>5}  {layer:{width}}  {name:19}  {other:19}  {layout}")
    return "\n".join(lines)


def _places(model: BackendModel, renamed: Mapping[str, str]) -> dict[tuple[str, str], Slot]:
    """{(module, tensor in it): slot}, some modules `renamed`."""
    modules = model.modules.items()
    return {(renamed.get(name, name), leaf): slot for name, module in modules for leaf, slot in module.slots.items()}


def _is_count(name: str) -> bool:
    return name.rpartition(".")[2] == COUNT
