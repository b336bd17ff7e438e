"""The rungs of the training step and of the training loop, on both sides.

`make_ref(model)` and `make_port(model)` return (step, optimizer) or (step, optimizer, schedule) for a model of their
framework:

    step        `step(*batch)` does a whole iteration on tensors of its framework: it clears the gradients, runs the
                model itself, on positional arguments, goes backward, updates, and returns the loss. The gradients stay
                in the parameters. It begins in the eval mode that an evaluation leaves: to train in train mode, it has
                to call what its side calls for that.
    optimizer   whose learning rate is recorded, before each step
    schedule    steps after each iteration, if there is one

Models are copied for each run, in its precision; dropout is off. Both have to hold the same weights. Every function
raises UserError for what is no model or no batch, and for what the reference's side raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from portproof.backends.trace import ModuleCall, Trace
from portproof.compare import FAIL, PASS, Item, Items, Verdict, compare, placed, tensor_item
from portproof.compare.activations import BREAKPOINTS, branch_flips
from portproof.compare.tolerances import (
    U64,
    U,
    kernel_atol,
    least_limits,
    noise_floor,
    semantic_atol,
    with_coefficients,
    with_noise_floor,
)
from portproof.io.cli import UserError
from portproof.ladder.pairs.pair import MODES, OUTPUT, Pair, isolated_gradients, renamed
from portproof.ladder.pairs.sides import Sides, check_coefficients, say_location
from portproof.ladder.rung import Rung, on_rung
from portproof.mapping.name_map import propose, same_names
from portproof.python39 import zip_strict

Make = Callable[[Any], tuple]
Batch = Sequence[np.ndarray]
LOSS, RATE, LOG = Item("loss", "loss"), Item("lr", "lr"), Item("log")
PRECISIONS = ("float64", "float32")


class _Trained:
    """A copy of one side's model, and what trains it."""

    def __init__(self, sides: Sides, i: int, make: Make, dtype: str, rounded: Any = None) -> None:
        """`rounded`: which of the reference's coefficients is rounded to float32."""
        model, self.keys, self.dtype = (sides.ref, sides.port)[i], sides.keys(i), dtype
        self.backend, self.whose = model.backend, f"the {model.role}'s"
        self.model = model.copied("", dtype, train=False)
        with self.backend.new_tensors(dtype):
            made = make(self.model)
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
            raise UserError(f"{self.whose} make function returns {made!r}, no (function, optimizer)")
        self.function, self.optimizer, self.schedule = (*made, None)[:3]
        self.backend.keep_slots(self.model)
        self.start, self.rounded = self.backend.parameters(self.model), rounded

    @cached_property
    def norms(self) -> set[str]:
        """The model itself, and its modules that keep running statistics: what comes into them sets noise floors."""
        return {""} | {item.module for key in self.keys if (item := tensor_item(key, "buffer")).leaf == "running_mean"}

    @cached_property
    def activations(self) -> set[str]:
        """Its modules that have breakpoints."""
        return {name for name, type_ in self.backend.layer_types(self.model).items() if type_ in BREAKPOINTS}

    def tensors(self, batch: Batch) -> tuple:
        return tuple(self.backend.to_tensor(array, self.model) for array in batch)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the user's function returns, called in eval mode, without dropout."""
        self.model.eval()
        for _, layer in self.backend.named_modules(self.model):
            self.backend.turn_off_dropout(layer)
        backend = self.backend
        with backend.new_tensors(self.dtype), backend.without_dropout(), backend.exact_constants():
            return self.function(*args, **kwargs)

    def iterate(
        self, batch: Batch, *, traced: Collection[str] | None = (), calls: bool = False, **kwargs: Any
    ) -> tuple[dict[Item, np.ndarray], Trace | None]:
        """({item: array} after one iteration, the trace of those modules that are to be `traced`, None: of all)."""
        if self.rounded:
            self.backend.round_coefficient(self.optimizer, self.rounded)
        rate = self.rate()
        with self.backend.trace(self.model, OUTPUT, calls, traced != (), only=traced) as trace:
            loss = self.run(*self.tensors(batch), **kwargs)
        if not self.backend.framework.is_tensor(loss) or self.backend.to_array(loss).size != 1:
            raise UserError(
                f"{self.whose} step returns a {type(loss).__name__}, no loss: return a tensor of one number"
            )
        return {LOSS: self.backend.to_array(loss), **rate, **self.gradients(), **self.state()}, trace

    def end_iteration(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def rate(self) -> dict[Item, np.ndarray]:
        return {RATE: np.array(self.backend.learning_rate(self.optimizer))}

    def gradients(self) -> dict[Item, np.ndarray]:
        """From the output to the input, as they are computed: the first that differs is where the fault lies."""
        return dict(reversed(self._items("gradient", self.backend.gradients(self.model)).items()))

    def state(self) -> dict[Item, np.ndarray]:
        """Parameters and buffers."""
        parameters, buffers = self.backend.parameters(self.model), self.backend.buffers(self.model)
        return self._items("parameter", parameters) | self._items("buffer", buffers)

    def _items(self, kind: str, arrays: Mapping[str, np.ndarray]) -> dict[Item, np.ndarray]:
        return {tensor_item(self.keys[k], kind): array for k, array in arrays.items() if k in self.keys}

    def check_moved(self) -> None:
        """Raises UserError if all parameters are what they were: a port that never updates would pass."""
        if all(np.array_equal(a, self.start[k]) for k, a in self.backend.parameters(self.model).items()):
            raise UserError(f"{self.whose} training moves no parameter: have it update them")


class _Rerun:
    """Another run of the reference, which goes only as far as it is asked for."""

    def __init__(self, sides: Sides, make: Make, batches: Sequence[Batch], dtype: str, rounded: Any = None) -> None:
        self.start = partial(_Trained, sides, 0, make, dtype, rounded)
        self.batches, self.done = batches, 0

    def after(self, i: int) -> dict[Item, np.ndarray]:
        """What the i-th iteration leaves; to be asked for in their order."""
        if not self.done:
            self.run = self.start()
        while self.done <= i:
            if self.done:
                self.run.end_iteration()
            self.items, _ = self.run.iterate(self.batches[self.done])
            self.done += 1
        return self.items


def _judged(
    fp64_ref: Items, port: Items, floor: Items, limits: Callable[[], dict], exact: Mapping[Item, float], **facts: Any
) -> tuple[Verdict, set[Item]]:
    """(`_compare` by the least limits that `limits()` may give; what is zero by structure).

    Only if not all pass by those they are compared by `limits()`, for which the reference has to run again.
    """
    for limits_of in (partial(least_limits, fp64_ref), limits):
        atol, expected_zero = with_noise_floor(limits_of() | exact, floor, fp64_ref)
        verdict = _compare(fp64_ref, port, atol, expected_zero, **facts)
        if verdict.status == PASS:
            break
    return verdict, expected_zero


@on_rung
def backward(
    ref: Any,
    port: Any,
    make_ref: Make,
    make_port: Make,
    batches: Sequence[Batch],
    *,
    train: bool = True,
    name: str = "",
    dtypes: Sequence[str] = PRECISIONS,
    clip_grad_norm: float | None = None,
    coefficients: str = "float32",
    names: Mapping[str, str] | None = None,
    device: str = "cpu",
    rung: Rung,
) -> None:
    """The side's own training step, an iteration for each of `batches` (tuples of arrays that `step` takes).

    float64: loss, learning rate, every gradient by name, every parameter and every buffer after each iteration.
    float32: the first iteration's loss and buffers, and the gradients of every layer's isolated run. If something
    differs, the module at fault is located. See the module's text for `make_ref` and `make_port`; `train` says in which
    mode they train, `name` what reports call them, `clip_grad_norm` to which norm they clip gradients (refused if none
    reaches it), `coefficients` and `names` are as in `optimizer`.
    """
    batches, sides = _checked(batches), Sides.of(rung, ref, port, names, device)
    check_coefficients(coefficients)
    if not dtypes or not set(dtypes) <= set(PRECISIONS):
        raise UserError(f"dtypes {dtypes!r}: choose some of {PRECISIONS}")
    if sides is None:
        return
    makes, begun = (make_ref, make_port), None
    if "float64" in dtypes:
        begun = _check_iterations(rung, sides, makes, batches, train, name, clip_grad_norm, coefficients)
    if "float32" in dtypes:
        fp64_run = None if begun else rung.of_ref("make function", _Trained, sides, 0, makes[0], "float64")
        begun = begun or _begun(rung, fp64_run, batches[0], train)
        if begun:
            _check_float32(rung, sides, makes, batches[0], train, name, begun)


@dataclass(frozen=True)
class _Begun:
    """The reference's first iteration in float64."""

    items: dict[Item, np.ndarray]
    trace: Trace  # of what normalization layers and activations receive
    call: ModuleCall  # of the model


def _begun(rung: Rung, run: _Trained, batch: Batch, train: bool) -> _Begun | None:
    """None, and the rung refuses, where nothing can be judged by it."""
    items, trace = rung.of_ref("training step", run.iterate, batch, traced=run.norms | run.activations, calls=True)
    call = _model_call(run, trace, train)
    return _Begun(items, trace, call) if _can_judge(rung, items) else None


def _check_iterations(
    rung: Rung,
    sides: Sides,
    makes: tuple[Make, Make],
    batches: list[Batch],
    train: bool,
    name: str,
    clip_grad_norm: float | None,
    coefficients: str,
) -> _Begun | None:
    """float64: the runs side by side, so that only one iteration is held at a time.

    Returns the reference's first, without gradients and parameters; None of a port that cannot be trained, and of a
    reference by which nothing can be judged.
    """
    mode, of_name, prefix = MODES[train], f" of {name}" * bool(name), "/".join((MODES[train], *[name] * bool(name), ""))
    clipped = "" if clip_grad_norm is None else f", gradients clipped to {clip_grad_norm:g}"
    title = f"{mode} mode, float64, {len(batches)} iterations{of_name}{clipped}"
    fp64_run = rung.of_ref("make function", _Trained, sides, 0, makes[0], "float64")
    fp32_ref = _Rerun(sides, makes[0], batches, "float32")
    rounded = []
    if coefficients == "float32":
        names = fp64_run.backend.coefficients(fp64_run.optimizer)
        rounded = [_Rerun(sides, makes[0], batches, "float64", rounded=name) for name in names]
    port_run = rung.of_port("make function", _Trained, sides, 1, makes[1], "float64")
    if port_run is None:
        return None
    rows, expected_zero, norms, begun, first = [], set(), [], None, len(rung.verdicts)
    curves = {LOSS: ([], []), RATE: ([], [])}

    def limits(fp64_ref: Items, i: int) -> dict[Item, float]:
        atol = semantic_atol(fp64_ref, rung.of_ref("training step", fp32_ref.after, i))
        return with_coefficients(atol, fp64_ref, [run.after(i) for run in rounded])

    for i, batch in enumerate(batches):
        if begun is None:
            begun = _begun(rung, fp64_run, batch, train)
            if begun is None:
                return None
            fp64_ref, trace = begun.items, begun.trace
            begun = replace(begun, items=_only_loss_and_buffers(fp64_ref))
        else:
            fp64_ref, trace = rung.of_ref("training step", fp64_run.iterate, batch, traced=fp64_run.norms)
            if not _can_judge(rung, fp64_ref):
                return None
        found, _ = rung.of_port("training step", port_run.iterate, batch) or (None, None)
        if found is None:
            break
        floor, there = (
            noise_floor(fp64_ref, U64, trace.input_scales),
            {"mode": mode, "dtype": "float64", "iteration": i},
        )
        verdict, expected_zero = _judged(fp64_ref, found, floor, partial(limits, fp64_ref, i), {RATE: 0.0}, **there)
        rows += verdict.rows
        norms.append(np.sqrt(sum((array**2).sum() for item, array in fp64_ref.items() if item.kind == "gradient")))
        rung.keep(*({f"{item}_{i}": side[item] for item in (LOSS, RATE)} for side in (fp64_ref, found)), prefix=prefix)
        for item, both in curves.items():
            for curve, side in zip_strict(both, (fp64_ref, found)):
                curve.append(side[item].item())
        for run in (fp64_run, port_run):
            run.end_iteration()
    if rows:
        named = {", ".join(filter(None, (f"{mode} mode", name, str(item)))): both for item, both in curves.items()}
        rung.curves |= {label: (np.array(ref), np.array(port)) for label, (ref, port) in named.items()}
        rung.check(Verdict(title, rows), group=lambda item: f"iteration {item.iteration}")
    _locate(rung, sides, begun.call, first)
    count = sum(item.kind == "gradient" for item in expected_zero)
    rung.say(f"  {count} gradients are zero by structure: both sides' are below the rounding of the others")
    fp64_run.check_moved()
    if clip_grad_norm is not None and norms and max(norms) < 0.999 * clip_grad_norm:
        rung.refuse(f"gradients whose norm is {max(norms):.1e} at most are not clipped to {clip_grad_norm:g}")
    return begun


def _check_float32(
    rung: Rung, sides: Sides, makes: tuple[Make, Make], batch: Batch, train: bool, name: str, begun: _Begun
) -> None:
    """float32: one iteration's loss and statistics, and the gradients of every layer in an isolated run.

    Through the whole network gradients cannot be judged in float32: one input of a ReLU that rounding puts on the other
    side of zero moves them by up to 3 percent on a faultless port. Those that did are counted and named. A layer's
    isolated run, on the reference's own input and upstream gradient, has none.
    """
    mode, trace = MODES[train], begun.trace
    fp32_run = rung.of_ref("make function", _Trained, sides, 0, makes[0], "float32")
    fp32_ref, fp32_trace = rung.of_ref("training step", fp32_run.iterate, batch, traced=None, calls=True)
    first = len(rung.verdicts)
    port_run = rung.of_port("make function", _Trained, sides, 1, makes[1], "float32")
    ran = port_run and rung.of_port("training step", port_run.iterate, batch, traced=port_run.activations)
    pair = _pair(sides, begun.call)
    if ran is not None:
        found, port_trace = ran
        fp64_inputs = trace.activation_inputs
        port_inputs = renamed(port_trace.activation_inputs, pair.names.calls)
        port_inputs = {name: x for name, x in port_inputs.items() if np.shape(fp64_inputs.get(name)) == x.shape}
        for who, inputs in (("reference", fp32_trace.activation_inputs), ("port", port_inputs)):
            flips = branch_flips(fp64_inputs, inputs, rung.types)
            where = f", at {', '.join(flips)}" if flips else ""
            rung.say(f"{mode} mode, float32: {sum(flips.values())} branch flips of the {who} by rounding{where}")
        fp64_ref, fp32_ref, found = map(_only_loss_and_buffers, (begun.items, fp32_ref, found))
        atol = kernel_atol(fp64_ref, fp32_ref) | {RATE: 0.0}
        atol, expected_zero = with_noise_floor(atol, noise_floor(fp64_ref, U, trace.input_scales), fp64_ref)
        title = f"{mode} mode, float32, 1 iteration{f' of {name}' * bool(name)}"
        rung.check(_compare(fp32_ref, found, atol, expected_zero, title=title, mode=mode, dtype="float32"))
    isolated = isolated_gradients(pair, train, fp32_trace.calls)
    if not isolated.rows:
        isolated = replace(isolated, refusal="no gradient reaches a layer that both sides have")
    rung.check(isolated, group=lambda item: item.module.partition(".")[0] or "model")
    _locate(rung, sides, begun.call, first)


@on_rung
def accumulation(
    ref: Any,
    port: Any,
    make_ref: Make,
    make_port: Make,
    batches: Sequence[Batch],
    *,
    names: Mapping[str, str] | None = None,
    device: str = "cpu",
    rung: Rung,
) -> None:
    """Gradients of several batches added up, on either side, against those of all as one batch; float64, eval mode.

    `step(*batch, accumulation=(i, n))` gets the i-th of a group of n batches: the first clears the gradients, the last
    updates. The loss has to be a mean over samples, which lie along axis 0: with fixed statistics every sample counts
    for itself, so that the mean over all of them is all there is to get wrong. All else is as in `backward`.
    """
    batches, sides = _checked(batches), Sides.of(rung, ref, port, names, device)
    if len(batches) < 2:
        raise UserError("one batch has nothing to be added up with: give two or more")
    if sides is None:
        return

    def accumulated(i: int, make: Make, group: list[Batch], dtype: str) -> dict[Item, np.ndarray]:
        run = _Trained(sides, i, make, dtype)
        for place, batch in enumerate(group):
            seen = {"traced": {""}, "calls": True} if i == 0 and place == 0 else {}
            found, trace = run.iterate(batch, **seen, accumulation=(place, len(group)))
            if seen:
                _model_call(run, trace, False)
        if i == 0:
            run.check_moved()
        return {item: array for item, array in found.items() if item.kind in ("gradient", "parameter")}

    joined = [tuple(np.concatenate(arrays) for arrays in zip_strict(*batches))]
    fp64_ref = rung.of_ref("training step", accumulated, 0, make_ref, joined, "float64")
    if not _can_judge(rung, fp64_ref):
        return
    limits = cache(
        lambda: semantic_atol(fp64_ref, rung.of_ref("training step", accumulated, 0, make_ref, joined, "float32"))
    )
    count, every = ("two", "both") if len(batches) == 2 else (len(batches), "all")
    for whose, guard, make in (("reference", rung.of_ref, make_ref), ("port", rung.of_port, make_port)):
        found = guard("training step", accumulated, int(whose == "port"), make, batches, "float64")
        title = f"the {whose}'s gradients of {count} batches added up, against the reference's of {every} as one"
        if found is not None:
            floor = noise_floor(fp64_ref, U64)
            rung.check(_judged(fp64_ref, found, floor, limits, {}, title=f"{title}, float64")[0])


@on_rung
def epoch(
    ref: Any,
    port: Any,
    make_ref: Make,
    make_port: Make,
    batches: Sequence[Batch],
    *,
    title: str = "",
    ignore: str = "",
    names: Mapping[str, str] | None = None,
    device: str = "cpu",
    rung: Rung,
) -> None:
    """The training loop itself: what it logs, and the learning rate, parameters and buffers that it leaves; float64.

    `make_ref(model)` and `make_port(model)` return (loop, optimizer) for a model in eval mode: `loop(batches, log)`
    trains on every batch, a list of tuples of tensors, and gives `log` each of its lines. What `ignore`, a regular
    expression, matches in a line is left out, such as times. All else is as in `backward`.
    """
    batches, sides = _checked(batches), Sides.of(rung, ref, port, names, device)
    if sides is None:
        return

    def facts(i: int, make: Make, dtype: str) -> dict[Item, np.ndarray]:
        run, lines = _Trained(sides, i, make, dtype), []
        run.run([run.tensors(batch) for batch in batches], lambda line: lines.append(re.sub(ignore, "", line)))
        if i == 0:
            run.check_moved()
        logged = {LOG: np.array(lines)} if lines else {}
        return {**logged, **run.rate(), **placed(run.state(), section="epoch")}

    fp64_ref = rung.of_ref("training loop", facts, 0, make_ref, "float64")
    found = rung.of_port("training loop", facts, 1, make_port, "float64")
    if found is not None and _is_finite(rung, fp64_ref):
        title = title or f"one epoch, float64, {len(batches)} batches"

        def limits() -> dict[Item, float]:
            return semantic_atol(fp64_ref, rung.of_ref("training loop", facts, 0, make_ref, "float32"))

        rung.check(_judged(fp64_ref, found, {}, limits, {RATE: 0.0}, title=title)[0])
    if LOG in fp64_ref:
        rung.say(f"  {fp64_ref[LOG][-1]}")


def _checked(batches: Sequence[Batch]) -> list[Batch]:
    """The batches as tuples of arrays; raises UserError for none, and where one is not like the first."""
    batches = list(batches)
    if not batches or any(not isinstance(batch, (tuple, list)) or not batch for batch in batches):
        raise UserError("give one batch or more, each a tuple of the arrays that a step takes")
    batches = [tuple(np.asarray(array) for array in batch) for batch in batches]
    kinds = [[(array.ndim, array.dtype.kind) for array in batch] for batch in batches]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UserError(f"batch {i} has arrays of (dimensions, kind) {kind}, batch 0 of {kinds[0]}")
    return batches


def _only_loss_and_buffers(items: Items) -> dict[Item, np.ndarray]:
    """What is judged in float32 through the whole network: the learning rate, too."""
    return {item: array for item, array in items.items() if item.kind not in ("gradient", "parameter")}


def _compare(ref: Items, port: Items, atol: Mapping, expected_zero: Any, title: str = "", **facts: Any) -> Verdict:
    """`compare`, with what both computed placed there.

    What is a parameter in the reference and frozen in the port looks like a buffer; that it gets no gradient is the
    finding.
    """
    port = {item: array for item, array in port.items() if item in ref or item.kind != "buffer"}
    sides = (placed(side, **facts) for side in (ref, port, atol, dict.fromkeys(expected_zero)))
    ref, port, atol, expected_zero = sides
    return compare(ref, port, atol, title=title, expected_zero=expected_zero)


def _is_finite(rung: Rung, fp64_ref: Items) -> bool:
    """Whether all that the reference gives is finite; else the rung refuses."""
    bad = [item for item, array in fp64_ref.items() if array.dtype.kind in "fc" and not np.isfinite(array).all()]
    if bad:
        rung.refuse(f"the reference itself gives NaN or infinity at {bad[0]}")
    return not bad


def _can_judge(rung: Rung, fp64_ref: Items) -> bool:
    """Whether the reference leaves gradients, and all it gives is finite; else the rung refuses."""
    has_gradients = any(item.kind == "gradient" and array.any() for item, array in fp64_ref.items())
    if not has_gradients:
        rung.refuse("the reference's step leaves no gradients: have it clear them at its beginning, not at its end")
    return has_gradients and _is_finite(rung, fp64_ref)


def _model_call(run: _Trained, trace: Trace, train: bool) -> ModuleCall:
    """The reference's first call of its model in a step; raises UserError if it was called otherwise than promised."""
    call = trace.calls.get(OUTPUT)
    if call is None or call.kwargs or not call.args:
        raise UserError("the reference's step has to call its model itself, on positional arguments only")
    if run.model.training != train:
        raise UserError(f"the reference's step leaves its model in {MODES[run.model.training]} mode, but train={train}")
    return call


def _pair(sides: Sides, call: ModuleCall) -> Pair:
    """Both models on what the reference's received in `call`, with the gradient that came back to it."""
    inputs = [array.astype(np.float32) if array.dtype.kind == "f" else array for array in call.inputs]
    names = None if sides.modules else same_names(sides.ref, sides.port, inputs)
    return Pair(
        sides.ref, sides.port, names or propose(sides.ref, sides.port, inputs, sides.modules), inputs, call.upstream
    )


def _locate(rung: Rung, sides: Sides, call: ModuleCall, first: int) -> None:
    """If a verdict from the `first` on has failed, say at which module the port departs."""
    if any(verdict.status == FAIL for verdict in rung.verdicts[first:]):
        say_location(rung, _pair(sides, call), first)
