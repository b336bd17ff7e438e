"""Which branches of operations a reference enters, and probe weights that enter more. PyTorch only.

A comparison proves only branches that a run enters: where no value reaches a clip's bound, any bound passes. Watched
are clamp and clip, the activations that are one, where, masked_fill, minimum and maximum, wherever an input or a
parameter decides. What constants decide, such as a causal mask, has no branch that another input could enter. A ReLU
passes 6 if that can be had, as no branch of its own: a ReLU6 in its place would not be told else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from portproof.backends.lent import owned_tensors, thawed
from portproof.backends.model import PASSES_SIX, SEED, BackendModel
from portproof.backends.trace import Inputs, as_call, is_array, map_tensors, tensors_in
from sturdyio.cli import user_code

Given = Mapping[str, Any]  # an operation's arguments, by name
Gaps = dict[str, torch.Tensor]  # {branch: values that are below 0 where it is entered}

# Arguments by place, of a function or a method.
ARGUMENTS = {
    **dict.fromkeys(("clamp", "clip"), ("input", "min", "max")),
    "clamp_min": ("input", "min"),
    "clamp_max": ("input", "max"),
    "hardtanh": ("input", "min_val", "max_val"),
    **dict.fromkeys(("relu", "relu6", "hardsigmoid", "hardswish"), ("input",)),
    **dict.fromkeys(("minimum", "maximum", "min", "max"), ("input", "other")),
    "masked_fill": ("input", "mask"),
    "where": ("condition", "input", "other"),
}
CONDITIONAL = {"where": "condition", "masked_fill": "mask"}
EXTREMES = ("minimum", "maximum", "min", "max")
# Bounds of those that have no arguments for them, or defaults.
BOUNDS = {"relu6": (0.0, 6.0), "hardsigmoid": (-3.0, 3.0), "hardswish": (-3.0, 3.0), "hardtanh": (-1.0, 1.0)}
LARGEST = 0.99 * torch.finfo(torch.float32).max  # from here on a bound is none
COMPARISONS = {"lt": 1, "le": 1, "less": 1, "less_equal": 1, "gt": -1, "ge": -1, "greater": -1, "greater_equal": -1}
READ_BY_PYTHON = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist")
ROUNDING = ("round", "floor", "ceil", "trunc", "fix")
# Of a tensor only the shape and type go into these.
LIKE = ("_like", "new_")

# A step moves parameters as little as brings one value to the nearest bound, and this share further.
BEYOND = 0.25
STEPS = 12  # each is one pass; what is not reached then is hardly ever reached
AT_ONCE = 16  # branches a step
SIGNAL = (1e-3, 1e6)  # what the model returns must stay within, or rounding would hide faults


def _name(func: Callable) -> str:
    """Its name, the same for a function, a method, an operator and what works in place."""
    name = getattr(func, "__name__", "")
    return name.strip("_") if name.startswith("__") else name.rstrip("_")


def _works_in_place(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or name.endswith("_") and not name.endswith("__")


def _difference(first: Any, second: Any) -> torch.Tensor:
    """`first` - `second`, of which one may be a number; of whole numbers and booleans as floats."""
    tensors = (each for each in (first, second) if isinstance(each, torch.Tensor))
    if not any(tensor.is_floating_point() for tensor in tensors):
        first = first.double() if isinstance(first, torch.Tensor) else float(first)
    return first - second


class Watch(TorchFunctionMode):
    """Notes what the model's operations enter while it runs, in `entered` and, with `keeps_gaps`, how far they miss."""

    def __init__(self, model: Any, keeps_gaps: bool = False) -> None:
        super().__init__()
        self.entered: dict[str, bool] = {}  # {"blocks.0: clamp, above 6": whether a value was there}
        self.gaps: dict[str, torch.Tensor] = {}  # {branch: how far the nearest value is from it}
        self.conditions: set[str] = set()  # modules in which Python reads a tensor's numbers
        self.keeps_gaps = keeps_gaps
        self.made: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []  # gaps of operations, and their results
        self.running: list[tuple[str, Counter[str]]] = []  # modules, with counts of their operations
        self.constants = WeakTensorKeyDictionary()
        self.saved = WeakTensorKeyDictionary()  # buffers, which another run may hold with other numbers
        self.compared = WeakTensorKeyDictionary()  # {condition: values that are below 0 where it is true}
        for tensor in model.state_dict(keep_vars=True).values():
            self.saved[tensor] = True
        for module in model.modules():
            for tensor in (*module._buffers.values(), *vars(module).values()):
                if isinstance(tensor, torch.Tensor):
                    self.constants[tensor] = True

    def enter_module(self, name: str) -> None:
        self.running.append((name, Counter()))

    def is_constant(self, value: Any) -> bool:
        return not isinstance(value, torch.Tensor) or value in self.constants

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        given = self._given(func, name, args, kwargs) if self.running else {}
        gaps = self._note(name, given) if given else {}
        result = func(*args, **kwargs)
        if gaps and self.keeps_gaps and isinstance(result, torch.Tensor) and result.requires_grad:
            self.made.append((gaps, result))
        if self.keeps_gaps and name in ROUNDING and isinstance(result, torch.Tensor):
            result = args[0] + (result - args[0]).detach()  # else no gradient says which way to move
        if self.running:
            self._follow(func, name, (*args, *kwargs.values()), result)
        return result

    def _given(self, func: Callable, name: str, args: tuple, kwargs: Given) -> Given:
        """What a watched operation gets, by name; nothing for others, and where constants alone decide."""
        names = ARGUMENTS.get(name, ())
        if name == "where" and func is not torch.where:  # the method's condition comes second
            names = ("input", "condition", "other")
        given = dict(zip(names, args)) | {key: kwargs[key] for key in names if key in kwargs}
        if name in CONDITIONAL:
            decides = [given.get(CONDITIONAL[name])] if len(given) == len(names) else []  # else where are the places
        elif name in EXTREMES:  # else of one tensor along an axis
            decides = list(given.values()) if isinstance(given.get("other"), torch.Tensor) else []
        else:
            decides = list(given.values())
        return {} if all(map(self.is_constant, decides)) else given

    def count_only(self, outputs: Sequence[torch.Tensor]) -> None:
        """Forget that a branch was entered where none of these outputs depends on what came of it."""
        weights = (torch.linspace(1, 2, output.numel()).to(output).reshape(output.shape) for output in outputs)
        total = cast("torch.Tensor", sum((output * weight).sum() for output, weight in zip(outputs, weights)))
        results = [result for _, result in self.made]
        gradients = torch.autograd.grad(total, results, retain_graph=True, allow_unused=True)
        counting = []
        for (gaps, _), gradient in zip(self.made, gradients):
            for place, gap in gaps.items():
                if gradient is not None and gradient.shape == gap.shape and gradient.any():
                    counting.append((place, gap[gradient != 0]))
        for place in {place for place, _ in counting}:
            self.entered[place] = False
        for place, gap in counting:
            self._enter(place, gap)

    def _note(self, name: str, given: Given) -> Gaps:
        module, counts = self.running[-1]
        counts[name] += 1
        again = f" {counts[name]}" if counts[name] > 1 else ""
        operation = f"{module or 'the model itself'}: {name}{again}"
        try:
            gaps = {f"{operation}, {branch}": gap for branch, gap in self._gaps(name, given).items()}
        except (RuntimeError, TypeError):  # of tensors that cannot be subtracted, such as sparse ones
            self.entered[operation] = False
            return {}
        for place, gap in gaps.items():
            self._enter(place, gap)
        return gaps

    def _enter(self, place: str, gap: torch.Tensor) -> None:
        nearest = gap.detach().amin().item() if gap.numel() else 0.0
        self.entered[place] = self.entered.get(place, False) or nearest < 0
        if self.keeps_gaps and gap.requires_grad and not self.entered[place]:
            self.gaps[place] = gap.amin()

    def _gaps(self, name: str, given: Given) -> Gaps:
        if name in EXTREMES:
            first, second = given["input"], given["other"]
            pairs = {"the first smaller": (first, second), "the second smaller": (second, first)}
            possible = {key: pair for key, pair in pairs.items() if not self._ruled_out(*pair)}
            return {branch: _difference(smaller, larger) for branch, (smaller, larger) in possible.items()}
        if name in CONDITIONAL:
            condition = given[CONDITIONAL[name]]
            below = self.compared.get(condition)
            if below is None or below.shape != condition.shape:
                below = 0.5 - condition.to(torch.float32)
            return {"true": below, "false": -below}
        x = given["input"]
        if name == "relu":  # inputs have both signs; a parameter, such as a scale, perhaps not
            signs = {"below 0": x, "above 0": -x} if isinstance(x, torch.nn.Parameter) else {}
            return {**signs, PASSES_SIX: 6.0 - x}
        low, high = BOUNDS.get(name, (None, None))
        low = given.get("min", given.get("min_val", low))
        high = given.get("max", given.get("max_val", high))
        found, below, above = {}, self._bounded(low), self._bounded(high)
        if below:
            found[f"below {below}"] = _difference(x, low)
        if above:
            found[f"above {above}"] = _difference(high, x)
        if found:
            outside = [-gap for gap in found.values()]
            found["between" if len(outside) > 1 else "not clipped"] = reduce(torch.maximum, outside)
        return found

    def _is_end(self, value: torch.Tensor, sign: int) -> bool:
        """Whether a constant is the largest number of its type, or with sign -1 the least."""
        return self.is_constant(value) and bool((value * sign >= LARGEST).all())

    def _ruled_out(self, smaller: torch.Tensor, larger: torch.Tensor) -> bool:
        return self._is_end(smaller, 1) or self._is_end(larger, -1)

    def _bounded(self, bound: Any) -> str:
        """A bound in words; "" for none, and for one that no number of its type passes."""
        if bound is None:
            return ""
        if isinstance(bound, torch.Tensor):
            if bound.numel() > 1 or bound not in self.constants:
                return "a tensor"
            bound = bound.item()
        return f"{bound:g}" if abs(bound) < LARGEST else ""

    def _follow(self, func: Callable, name: str, given: Sequence[Any], result: Any) -> None:
        """Note which results no input and no parameter has part in, and what conditions compare."""
        tensors = tensors_in(given, torch.is_tensor)
        constant = all(map(self.is_constant, tensors)) or any(part in name for part in LIKE)
        varies = not constant or any(tensor in self.saved for tensor in tensors)
        if getattr(func, "__name__", "") in READ_BY_PYTHON and varies:
            self.conditions.add(self.running[-1][0])
        if _works_in_place(func) and not constant:
            self.constants.pop(given[0], None)
        if constant:
            for each in tensors_in(result, torch.is_tensor):
                self.constants[each] = True
        elif self.keeps_gaps and name in COMPARISONS and isinstance(result, torch.Tensor):
            self.compared[result] = (given[0] - given[1]) * COMPARISONS[name]


@contextmanager
def watching(model: Any, keeps_gaps: bool = False) -> Iterator[Watch]:
    """Watch the model's passes in this context."""
    watch = Watch(model, keeps_gaps)

    def before(name: str) -> Callable:
        return lambda *_: watch.enter_module(name)

    def after(*_: Any) -> None:
        watch.running.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks += [module.register_forward_pre_hook(before(name)), module.register_forward_hook(after)]
    try:
        with watch:
            yield watch
    finally:
        for hook in hooks:
            hook.remove()


def reach_more(ref: BackendModel, inputs: Inputs, modes: Sequence[str], drawn: bool) -> Inputs:
    """Give the last of the modes other parameters, if more branches are entered with them -> the inputs.

    Of two modes the other keeps what it has, so that a branch which one value decides, such as a scale's maximum, is
    entered on both sides. Floats among `drawn` inputs may be changed, too, for all modes.
    """
    last, before, count = modes[-1], dict(ref.branches), len(ref.never_entered(modes, wished=True))
    train, only_in_train = last == "train", modes[-1] == "train" and len(modes) > 1
    elsewhere = {place for mode in modes[:-1] for place, is_entered in before[mode].items() if is_entered}
    kept, found = ref.arrays(train), reach(ref, inputs, train, elsewhere, drawn)
    if found is None:
        return inputs
    arrays, moved = found
    ref.load(arrays, only_in_train)
    for mode in modes if drawn else [last]:
        ref.run_watched(moved, mode == "train")
    if len(ref.never_entered(modes, wished=True)) < count:
        return moved
    ref.load(kept, only_in_train)  # in float32 it is otherwise
    ref.branches = before
    return inputs


def reach(
    ref: BackendModel,
    inputs: Inputs,
    train: bool,
    elsewhere: Collection[str] = (),
    drawn: bool = False,
    counting: bool = False,
) -> tuple[dict[str, np.ndarray], Inputs] | None:
    """(parameters by state_dict key, inputs) with which a run in this mode enters more branches; None if no step helps.

    It may leave those that are entered `elsewhere`. If `counting`, values on which no output depends do not enter. The
    nearest value is moved over each branch's bound by Newton's step of least norm, in float64.
    """
    with ref.lent("", "float64", train) as model, thawed(ref.backend, model):
        return _reach(ref, model, inputs, elsewhere, drawn, counting)


def _reach(
    ref: BackendModel, model: torch.nn.Module, inputs: Inputs, elsewhere: Collection[str], drawn: bool, counting: bool
) -> tuple[dict[str, np.ndarray], Inputs] | None:
    """`reach` with the parameters of `model`, which are moved."""
    runs, found, fewest = ref.backend.runs, None, 0
    owned = owned_tensors(ref.backend, model)
    parameters = {key: t for key, t in owned if isinstance(t, torch.nn.Parameter) and t.is_floating_point()}
    given = map_tensors(inputs, is_array, lambda array: ref.backend.tensor(array, ref.device, "float64", drawn))
    leaves = tensors_in(given, torch.is_tensor) if drawn else []
    movable = [*parameters.values(), *(leaf for leaf in leaves if leaf.is_floating_point())]
    for step in range(STEPS):
        with runs.seeded(SEED), runs.without_dropout(), runs.new_tensors("float64", lambda _: None):
            watch = _watched(model, map_tensors(given, torch.is_tensor, torch.clone), counting)
        if watch is None:
            break
        missing = [place for place, is_entered in watch.entered.items() if not is_entered and place not in elsewhere]
        if step and len(missing) < fewest:
            arrays = {key: ref.backend.to_array(tensor) for key, tensor in parameters.items()}
            found = arrays, map_tensors(given, torch.is_tensor, ref.backend.to_array)
        if not step or len(missing) < fewest:
            fewest = len(missing)
        if not _moved(movable, [watch.gaps[place] for place in missing if place in watch.gaps]):
            break
    return found


def _watched(model: Any, inputs: Inputs, counting: bool) -> Watch | None:
    """What a run enters; None if it raises, or its signal is lost."""
    call = as_call(inputs)
    try:
        with user_code(), watching(model, True) as watch:
            returned = tensors_in(model(*call.args, **call.kwargs), torch.is_tensor)
        outputs = [tensor for tensor in returned if tensor.requires_grad and tensor.is_floating_point()]
        if counting and outputs:
            watch.count_only(outputs)
    except Exception:  # whatever a user's code may raise when it is given other values
        return None
    return watch if all(map(_is_signal, returned)) else None


def _is_signal(output: torch.Tensor) -> bool:
    if not output.is_floating_point() or not output.numel():
        return True
    largest = output.detach().abs().max().item()
    return SIGNAL[0] <= largest <= SIGNAL[1]


def _moved(parameters: Sequence[torch.Tensor], gaps: Sequence[torch.Tensor]) -> bool:
    """Move the parameters so that each gap becomes negative; whether that could be tried."""
    moves = [torch.zeros_like(parameter) for parameter in parameters]
    for gap in gaps[:AT_ONCE]:
        gradients = torch.autograd.grad(gap, parameters, retain_graph=True, allow_unused=True)
        norm = sum(float((gradient**2).sum()) for gradient in gradients if gradient is not None)
        share = (1 + BEYOND) * (gap.item() + 1e-3) / norm if norm > 0 else 0.0
        if np.isfinite(share):
            for move, gradient in zip(moves, gradients):
                if gradient is not None:
                    move.sub_(gradient, alpha=share)
    with torch.no_grad():
        for parameter, move in zip(parameters, moves):
            parameter.add_(move)
    return any(bool(move.any()) for move in moves)
