"""The rungs of the training step and of the training loop.

`make_ref(model)` and `make_port(model)` return (step, optimizer) or (step, optimizer, schedule) for a model of their
framework:

    step        `step(*batch)` does one iteration on tensors: it clears the gradients, calls the model itself on
                positional arguments, goes backward, updates, and returns the loss. The gradients stay in the
                parameters. The model comes in eval mode: a step that trains in train mode has to set that.
    optimizer   its learning rate is recorded before each step
    schedule    steps after each iteration

Models are copied for each run, in its precision; dropout is off, and its probabilities are compared. Both have to hold
the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from portproof.arrays import largest_difference
from portproof.backends.model import BackendModel
from portproof.backends.question import perturbed
from portproof.backends.trace import CALLS, OUTPUT, OUTPUTS, UPSTREAM, ModuleCall, Trace, module_of, tracing
from portproof.compare import FAIL, PASS, Item, Items, Row, Verdict, placed, tensor_item
from portproof.compare.activations import KINKS, branch_flips
from portproof.compare.ruler import Distances, Ruler, distances
from portproof.ladder.pairs.pair import MODES, Pair
from portproof.ladder.pairs.whole import isolated_gradients, renamed
from portproof.ladder.rung import (
    QUIET,
    Ended,
    Rung,
    check_coefficients,
    equal_pair,
    needed,
    of_kinds,
    on_rung,
    say_location,
)
from portproof.localize.isolated import without_optional
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

Make = Callable[[Any], tuple]
Start = Callable[..., "Trained"]  # `Trained` of one side, but for dtype and what follows
Batch = Sequence[np.ndarray]
Arrays = dict[Item, np.ndarray]
LOSS, RATE, LOG = Item("loss", "loss"), Item("lr", "lr"), Item("log")
PRECISIONS = ("float64", "float32")
IN_FLOAT32 = ("loss", "lr", "buffer")  # judged in float32 through the whole network


class Trained:
    """A copy of one side's model, and what trains it; `keys` maps its names to the reference's."""

    def __init__(
        self,
        model: BackendModel,
        keys: Mapping[str, str],
        make: Make,
        dtype: str,
        rounded: Any = None,
        perturbation: int = 0,
    ) -> None:
        """`rounded`: a coefficient to be rounded to float32; `perturbation`: see `Question`."""
        self.keys = keys
        self.dtype = dtype
        self.rounded = rounded
        self.backend, self.role = model.backend, model.role
        self.is_ref = self.role == "reference"
        self.jitter = np.random.default_rng([perturbation, 2]) if perturbation else None
        self.model = model.copied("", dtype, train=False, perturbation=perturbation)
        with self.backend.runs.new_tensors(dtype):
            made = make(self.model)
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
            raise UserError(f"the {self.role}'s make function returns {made!r}, no (function, optimizer)")
        self.function, self.optimizer, self.schedule = (*made, None)[:3]
        self.arrays = self.backend.arrays_of(self.model)
        self.start = self.arrays.parameters()
        self.dropped: set[float] = set()  # with which probabilities dropout would drop
        self.hidden: set[float] = set()  # of dropout in kernels, which do not tell whether it is on
        self.called_in: bool | None = None  # the model's training flag when it was last called
        self.backend.runs.hook_before(self.model, self._before)
        self.trace = Trace()  # of the last iteration
        self.done = 0  # iterations of `after`

    @cached_property
    def norms(self) -> set[str]:
        """The model and its normalization layers, whose inputs set noise floors."""
        places = [key.rpartition(".") for key in self.keys]
        return {""} | {module for module, _, leaf in places if leaf == "running_mean"}

    @cached_property
    def activations(self) -> set[str]:
        return {name for name, type_ in self.backend.layers.types(self.model).items() if type_ in KINKS}

    def tensors(self, batch: Batch) -> tuple:
        if self.jitter is not None:
            batch = [perturbed(array, self.dtype, self.jitter) for array in batch]
        return tuple(self.backend.to_tensor(array, self.model) for array in batch)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        runs = self.backend.runs
        self.model.eval()
        for _, layer in self.backend.layers.named_modules(self.model):
            if p := runs.turn_off_dropout(layer):
                self.hidden.add(round(p, 12))
        with runs.new_tensors(self.dtype), runs.lent_dropout(self._note_dropout), runs.exact_constants():
            return self.function(*args, **kwargs)

    def _note_dropout(self, p: float, shape: Sequence[int]) -> None:
        """Note it and lend no mask."""
        if p:
            self.dropped.add(round(float(p), 12))  # 1 - 0.9 is not quite 0.1

    def _before(self, model: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if self.backend.framework.is_grad_enabled():  # no evaluation
            self.called_in = model.training

    @property
    def trains(self) -> bool:
        """Whether the last step ran its model in train mode; where it called a part alone, the mode that it left."""
        return self.model.training if self.called_in is None else self.called_in

    def iterate(
        self, batch: Batch, *, traced: Collection[str] | None = (), keeps: int = OUTPUTS, **kwargs: Any
    ) -> Arrays:
        """What an iteration leaves; `trace` is that of the modules `traced` (None: all)."""
        self.round_coefficient()
        rate = self.rate()
        with tracing(self.backend, self.model, keeps, traced) as self.trace:
            loss = self.run(*self.tensors(batch), **kwargs)
        if not self.backend.framework.is_tensor(loss) or self.backend.to_array(loss).size != 1:
            kind = type(loss).__name__
            raise UserError(f"the {self.role}'s step returns a {kind}, no loss: return a tensor of one number")
        # From output to input, as computed: the first that differs shows where the fault lies.
        gradients = dict(reversed(self._items("gradient", self.arrays.gradients()).items()))
        return {LOSS: self.backend.to_array(loss), **rate, **gradients, **self.state()}

    def after(self, i: int, batches: Sequence[Batch], **traced: Any) -> Arrays:
        """What the i-th iteration leaves; to be called in order."""
        while self.done <= i:
            self.items = self.iterate(batches[self.done], **traced)
            self.end_iteration()
            self.done += 1
        return self.items

    def coefficients(self) -> list[Any]:
        return self.backend.training.coefficients(self.optimizer)

    def round_coefficient(self) -> None:
        if self.rounded:
            self.backend.training.round_coefficient(self.optimizer, self.rounded)

    def end_iteration(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def rate(self) -> Arrays:
        return {RATE: np.array(self.backend.training.learning_rate(self.optimizer))}

    def state(self) -> Arrays:
        return self.parameters() | self._items("buffer", self.arrays.buffers())

    def parameters(self) -> Arrays:
        return self._items("parameter", self.arrays.parameters())

    def _items(self, kind: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
        return {tensor_item(self.keys[k], kind): array for k, array in arrays.items() if k in self.keys}

    def largest_update(self) -> float:
        now = self.arrays.parameters()
        return max((largest_difference(array, self.start[name]) for name, array in now.items()), default=0.0)

    def check_moved(self) -> None:
        """UserError if the reference never updates: a port that does not either would pass."""
        if self.is_ref and not self.largest_update():
            raise UserError("the reference's training moves no parameter: have it update them")


def starts(pair: Pair, make_ref: Make, make_port: Make) -> tuple[Start, Start]:
    assert isinstance(pair.ref, BackendModel)  # see `equal_pair`
    ref_keys = {key: key for key in pair.equal_tensors.values()}
    ref = partial(Trained, pair.ref, ref_keys, make_ref)
    return ref, partial(Trained, pair.port, pair.equal_tensors, make_port)


def _ruler(rung: Rung, fp64_ref: Items, again: Callable[..., Items], **options: Any) -> Ruler:
    again = partial(rung.of_ref, "training step", again)
    return Ruler.measured(fp64_ref, "float64", again, exact=[RATE], must_be_judged=[LOSS], **options)


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
    rung: Rung = QUIET,
) -> None:
    """Compare the sides' own training step, one iteration for each of `batches` (tuples of arrays for `step`).

    float64: loss, learning rate, and every gradient, parameter and buffer after each iteration. float32: the first
    iteration's loss and buffers, and the gradients of every layer's isolated run. A module at fault is located.
    `make_ref` and `make_port` are as in the module's docstring, `names` and `coefficients` as in `optimizer`. `train`
    is for train mode, else eval mode; `name` is what reports call them, `dtypes` the precisions that are compared.
    `clip_grad_norm` says to which norm they clip gradients; refused if none reaches it.
    """
    batches = _checked(batches)
    check_coefficients(coefficients)
    if not dtypes or not set(dtypes) <= set(PRECISIONS):
        raise UserError(f"dtypes {dtypes!r}: choose some of {PRECISIONS}")
    pair = equal_pair(rung, ref, port, names, device)
    sides = starts(pair, make_ref, make_port)
    steps = _Steps(rung, pair, *sides, batches, train, name, clip_grad_norm, coefficients)
    if "float64" in dtypes:
        steps.check_float64()
    if "float32" in dtypes:
        steps.check_float32()


@dataclass
class _Steps:
    rung: Rung
    pair: Pair
    start_ref: Start
    start_port: Start
    batches: list[Batch]
    train: bool
    name: str
    clip_grad_norm: float | None
    coefficients: str
    first_items: Arrays = field(default_factory=dict)  # of the reference's first iteration in float64
    first_trace: Trace = field(default_factory=Trace)  # of normalization layers and activations there
    call: ModuleCall | None = None  # of the model there

    @property
    def mode(self) -> str:
        return MODES[self.train]

    def _mode_rows(self, ref: Trained, port: Trained, **facts: Any) -> list[Row]:
        """A row that fails where the port is in another mode, or drops otherwise: dropout is off, no number tells."""
        reason, kinds = "", (ref.dropped ^ port.dropped) - ref.hidden - port.hidden
        if port.trains != self.train:
            reason = f"the port is trained in {MODES[port.trains]} mode, the reference in {self.mode} mode"
        elif kinds:
            own, wanted = (", ".join(f"{p:g}" for p in sorted(side.dropped)) or "none" for side in (port, ref))
            reason = f"dropout: p is {own} in the port, {wanted} in the reference"
        return [Row(Item("mode", "dropout", mode=self.mode, **facts), FAIL, reason=reason)] if reason else []

    def _title(self, what: str) -> str:
        return f"{self.mode} mode, {what}" + (f" of {self.name}" if self.name else "")

    def check_float64(self) -> None:
        """Compare iteration by iteration, so that only one is held at a time."""
        rung, first = self.rung, len(self.rung.verdicts)
        ref_run = rung.of_ref("make function", self.start_ref, "float64")
        port_run = needed(rung.of_port("make function", self.start_port, "float64"))
        coefficients = ref_run.coefficients() if self.coefficients == "float32" else []
        rerun = cache(self.start_ref)  # runs only as far as asked

        def again(i: int, dtype: str, **how: Any) -> Items:
            return rerun(dtype, **how).after(i, self.batches)

        def rounded(i: int, fp64_ref: Items) -> list[Distances]:
            return [distances(fp64_ref, again(i, "float64", rounded=each)) for each in coefficients]

        rows, norms = [], []
        curves: dict[Item, list] = {LOSS: [], RATE: []}  # of (reference's, port's)
        prefix = "/".join(filter(None, (self.mode, self.name)))
        for i in range(len(self.batches)):
            fp64_ref = self._after(i, ref_run)
            found = rung.of_port("training step", port_run.after, i, self.batches)
            if found is None:
                break
            scales = {"input_scales": ref_run.trace.input_scales, "update_scale": ref_run.largest_update()}
            ruler = _ruler(rung, fp64_ref, partial(again, i), rounded=partial(rounded, i, fp64_ref), **scales)
            port = without_optional(found, fp64_ref, self.pair.port)
            rows += self._mode_rows(ref_run, port_run, dtype="float64", iteration=i)
            rows += ruler.compare(port, mode=self.mode, dtype="float64", iteration=i).rows
            norms.append(np.sqrt(sum((array**2).sum() for array in of_kinds(fp64_ref, "gradient").values())))
            for item, curve in curves.items():
                rung.keep({f"{item}_{i}": fp64_ref[item]}, {f"{item}_{i}": found[item]}, f"{prefix}/")
                curve.append((fp64_ref[item].item(), found[item].item()))
        if rows:
            self._report(rows, curves)
        if any(verdict.status == FAIL for verdict in rung.verdicts[first:]):
            assert self.call is not None
            say_location(rung, self.pair.at(self.call), first)
        zeros = [row for row in rows if row.item.kind == "gradient" and row.status == PASS and row.atol >= row.scale]
        count = len({row.item.name for row in zeros})
        if count:
            rung.say(f"  {count} gradients are zero by structure: both sides' are below the rounding of the others")
        ref_run.check_moved()
        clip = self.clip_grad_norm
        if clip is not None and norms and max(norms) < 0.999 * clip:
            rung.refuse(f"gradients whose norm is {max(norms):.1e} at most are not clipped to {clip:g}")

    def _after(self, i: int, run: Trained) -> Arrays:
        traced: dict[str, Any] = {"traced": run.norms}
        if i == 0:
            traced = {"traced": run.norms | run.activations, "keeps": UPSTREAM}
        items = self.rung.of_ref("training step", run.after, i, self.batches, **traced)
        if i == 0:
            self.first_trace, self.call = run.trace, _model_call(run, self.train)
            self.first_items = of_kinds(items, *IN_FLOAT32)
        _check_can_judge(self.rung, items)
        return items

    def _report(self, rows: list[Row], curves: Mapping[Item, list]) -> None:
        for item, curve in curves.items():
            label = ", ".join(filter(None, (f"{self.mode} mode", self.name, str(item))))
            self.rung.curves[label] = tuple(np.transpose(curve))
        title = self._title(f"float64, {len(self.batches)} iterations")
        if self.clip_grad_norm is not None:
            title += f", gradients clipped to {self.clip_grad_norm:g}"
        self.rung.check(Verdict(title, rows), group=lambda item: f"iteration {item.iteration}")

    def check_float32(self) -> None:
        """Compare one iteration's loss and statistics, and every layer's gradients in isolated runs.

        Whole-network gradients cannot be judged in float32: one input of a ReLU that rounding puts on the other side of
        zero moves them by up to 3 percent on a faultless port. An isolated run, on the reference's input, has no
        such flips.
        """
        rung = self.rung
        first = len(self.rung.verdicts)
        batch = self.batches[0]
        options: dict[str, Any] = {}
        if self.call is None:  # float32 alone judges the loss
            options["must_be_judged"] = [LOSS]
            self._after(0, rung.of_ref("make function", self.start_ref, "float64"))

        def again(dtype: str, perturbation: int = 0) -> Items:
            if not perturbation:
                return self.first_items
            return self.start_ref(dtype, perturbation=perturbation).iterate(batch)

        ref_run = rung.of_ref("make function", self.start_ref, "float32")
        fp32_ref = rung.of_ref("training step", ref_run.iterate, batch, traced=None, keeps=UPSTREAM)
        port_run = rung.of_port("make function", self.start_port, "float32")
        found = None
        if port_run is not None:
            found = rung.of_port("training step", port_run.iterate, batch, traced=port_run.activations)
        assert self.call is not None
        pair = self.pair.at(self.call)
        if port_run is not None and found is not None:
            self._say_flips(ref_run.trace, renamed(port_run.trace.activation_inputs, pair.name_map.calls))
            ref, port = of_kinds(fp32_ref, *IN_FLOAT32), of_kinds(found, *IN_FLOAT32)
            scales = self.first_trace.input_scales
            ruler = Ruler.measured(ref, "float32", again, input_scales=scales, exact=[RATE], **options)
            title = self._title("float32, 1 iteration")
            port = without_optional(port, ref, self.pair.port)
            verdict = ruler.compare(port, title=title, mode=self.mode, dtype="float32")
            mode = self._mode_rows(ref_run, port_run, dtype="float32")
            rung.check(replace(verdict, rows=[*mode, *verdict.rows]))
        isolated = isolated_gradients(pair, self.train, ref_run.trace.calls)
        if not isolated.rows:
            isolated = replace(isolated, refusal="no gradient reaches a layer that both sides have")
        rung.check(isolated, group=lambda item: item.module.partition(".")[0] or "model")
        say_location(rung, pair, first)

    def _say_flips(self, trace: Trace, port_inputs: Mapping[str, np.ndarray]) -> None:
        fp64_inputs = self.first_trace.activation_inputs
        types = {label: self.pair.ref.modules[module_of(label)].type for label in fp64_inputs}
        port_inputs = {n: x for n, x in port_inputs.items() if n in fp64_inputs and fp64_inputs[n].shape == x.shape}
        for who, inputs in (("reference", trace.activation_inputs), ("port", port_inputs)):
            flips = branch_flips(fp64_inputs, inputs, types)
            where = f", at {', '.join(flips)}" if flips else ""
            count = sum(flips.values())
            self.rung.say(f"{self.mode} mode, float32: {count} branch flips of the {who} by rounding{where}")


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
    rung: Rung = QUIET,
) -> None:
    """Compare gradients added up over batches, of either side, with those of all as one batch; float64.

    In eval mode, because with fixed statistics every sample counts for itself. `step(*batch, accumulation=(i, n))` gets
    the i-th of n batches: the first clears the gradients, the last updates. The loss has to be a mean over samples,
    which lie along axis 0. All else is as in `backward`.
    """
    batches = _checked(batches)
    if len(batches) < 2:
        raise UserError("one batch has nothing to be added up with: give two or more")
    pair = equal_pair(rung, ref, port, names, device)
    start_ref, start_port = starts(pair, make_ref, make_port)

    def accumulated(start: Start, group: Sequence[Batch], dtype: str, perturbation: int = 0) -> Arrays:
        run = start(dtype, perturbation=perturbation)
        found: Items = {}
        seen: dict[str, Any] = {"traced": {""}, "keeps": CALLS} if run.is_ref else {}
        for place, batch in enumerate(group):
            found = run.iterate(batch, **seen, accumulation=(place, len(group)))
        if run.is_ref:
            _model_call(run, train=False)
        run.check_moved()
        return of_kinds(found, "gradient", "parameter")

    joined = [tuple(np.concatenate(arrays) for arrays in zip_strict(*batches))]
    fp64_ref = rung.of_ref("training step", accumulated, start_ref, joined, "float64")
    _check_can_judge(rung, fp64_ref)
    both = needed(rung.observe("training step", accumulated, start_ref, start_port, batches, "float64"))
    count, every = ("two", "both") if len(batches) == 2 else (len(batches), "all")
    for whose, found in zip_strict(("reference", "port"), both):
        title = f"the {whose}'s gradients of {count} batches added up, against the reference's of {every} as one"
        ruler = _ruler(rung, fp64_ref, partial(accumulated, start_ref, joined))
        rung.check(ruler.compare(without_optional(found, fp64_ref, pair.port), title=f"{title}, float64"))


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
    rung: Rung = QUIET,
) -> None:
    """Compare the training loop: its log, and the learning rate, parameters and buffers it leaves; float64.

    `make_ref(model)` and `make_port(model)` return (loop, optimizer) for a model in eval mode. `loop(batches, log)`
    trains on every batch, a list of tuples of tensors, and gives each line to `log`. What `ignore`, a regular
    expression, matches is cut from lines, such as times. All else is as in `backward`.
    """
    batches, pair = _checked(batches), equal_pair(rung, ref, port, names, device)
    start_ref, start_port = starts(pair, make_ref, make_port)

    def trained(start: Start, dtype: str, perturbation: int = 0) -> Arrays:
        run, lines = start(dtype, perturbation=perturbation), []
        run.run([run.tensors(batch) for batch in batches], lambda line: lines.append(re.sub(ignore, "", line)))
        run.check_moved()
        logged = {LOG: np.array(lines)} if lines else {}
        return {**logged, **run.rate(), **placed(run.state(), section="epoch")}

    fp64_ref, found = needed(rung.observe("training loop", trained, start_ref, start_port, "float64"))
    if _is_finite(rung, fp64_ref):
        ruler = _ruler(rung, fp64_ref, partial(trained, start_ref))
        title = title or f"one epoch, float64, {len(batches)} batches"
        rung.check(ruler.compare(without_optional(found, fp64_ref, pair.port), title=title))
    if LOG in fp64_ref:
        rung.say(f"  {fp64_ref[LOG][-1]}")


def _checked(batches: Sequence[Batch]) -> list[Batch]:
    batches = list(batches)
    if not batches or any(not isinstance(batch, (tuple, list)) or not batch for batch in batches):
        raise UserError("give one batch or more, each a tuple of the arrays that a step takes")
    batches = [tuple(np.asarray(array) for array in batch) for batch in batches]
    kinds = [[(array.ndim, array.dtype.kind) for array in batch] for batch in batches]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UserError(f"batch {i} has arrays of (dimensions, kind) {kind}, batch 0 of {kinds[0]}")
    return batches


def _is_finite(rung: Rung, fp64_ref: Items) -> bool:
    bad = [item for item, array in fp64_ref.items() if array.dtype.kind in "fc" and not np.isfinite(array).all()]
    if bad:
        rung.refuse(f"the reference itself gives NaN or infinity at {bad[0]}")
    return not bad


def _check_can_judge(rung: Rung, fp64_ref: Items) -> None:
    if not any(array.any() for array in of_kinds(fp64_ref, "gradient").values()):
        rung.refuse("the reference's step leaves no gradients: have it clear them at its beginning, not at its end")
        raise Ended
    if not _is_finite(rung, fp64_ref):
        raise Ended


def _model_call(run: Trained, train: bool) -> ModuleCall:
    call = run.trace.calls.get(OUTPUT)
    if call is None or call.kwargs or not call.args:
        raise UserError("the reference's step has to call its model itself, on positional arguments only")
    if run.model.training != train:
        raise UserError(f"the reference's step leaves its model in {MODES[run.model.training]} mode, but train={train}")
    return call
