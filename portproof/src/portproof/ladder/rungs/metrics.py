"""Criteria and metrics on ordinary and awkward cases, and evaluations over a whole loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from portproof.backends import backend, backend_of_tensor
from portproof.backends.base import Backend
from portproof.backends.question import perturbed
from portproof.backends.trace import map_tensors
from portproof.compare import Item, Items
from portproof.compare.ruler import UNIT_ROUNDOFF, C, Ruler, U, kernel_atol, largest
from portproof.ladder.cases import Case, batches, in_precision, losses, metrics, prepared, ranked_labels
from portproof.ladder.rung import QUIET, Rung, needed, on_rung
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

KINDS = {"b": np.int64, "i": np.int64, "u": np.int64, "f": np.float64}
Numbers = dict[str, np.ndarray]
Evaluated = tuple[Callable[..., Any], Any, Iterable]  # (evaluate, model, loader)
LOGITS, LABELS = Item("logits", "output"), Item("labels", "label")
MOST_KEPT = 2**28  # bytes of images


@on_rung
def loss(
    ref_criterion: Callable[..., Any],
    port_criterion: Callable[..., Any],
    cases: Mapping[str, Sequence[np.ndarray]] | None = None,
    *,
    num_classes: int = 100,
    seed: int = 0,
    wrt: str | Sequence[str] = "logits",
    keep: Collection[str] | None = None,
    device: str = "cpu",
    rung: Rung = QUIET,
) -> None:
    """Compare two criteria: functions of a case's tensors that return a scalar tensor of their framework.

    `cases` is {name: (logits, target)}, or any number of arrays; by default `cases.losses(num_classes, seed)`. Floats
    are rounded to float32, and given in float64 (semantic limits) and float32 (kernel limits). Gradients are those of
    the first arrays of floats, as many as `wrt` has names for; a line says where a case has more. A module is copied in
    the same precision. Cases in `keep` (None: all) go to the result files, the first one's float32 arrays as "loss" and
    "gradient" (further ones as "gradient/NAME"), others under "CASE, DTYPE/".

    Refused if a reference's loss or gradient is not finite, or a gradient zero.
    """
    gradients = [Item(name, "gradient") for name in ([wrt] if isinstance(wrt, str) else wrt)]
    keys = {Item("loss", "loss"): "loss", **{item: str(item) for item in gradients}, gradients[0]: "gradient"}
    sides = []
    for framework, criterion in ((backend("torch"), ref_criterion), (backend("paddle"), port_criterion)):
        sides.append(partial(_loss_and_gradients, framework, criterion, framework.device(device), gradients))
    for name, case in prepared(losses(num_classes, seed) if cases is None else cases).items():
        floats = sum(array.dtype.kind == "f" for array in case)
        if floats < len(gradients):
            names = ", ".join(item.name for item in gradients)
            has = f"{floats} floating-point arrays" if floats else "no floating-point array"
            raise UserError(f"case {name!r} has {has}, of which the gradients are to be compared: {names}")
        more = floats - len(gradients)
        if more and cases is not None:
            rung.say(
                f"  {name}: not compared: the gradients of {more} more arrays of floats, which `wrt` does not name"
            )
        for dtype in UNIT_ROUNDOFF:
            title = f"{name}, {dtype}"
            both = rung.observe(f"criterion on {title}", lambda side, *args: side(*args), *sides, case, dtype)
            if both is None:
                break
            ref, port = both
            if lacking := [item.name for item in gradients if item not in ref]:
                raise UserError(
                    f"the reference's criterion gives {lacking[0]} no gradient, on {name}: it must depend on them"
                )
            if not all(np.isfinite(array).all() for array in ref.values()):
                rung.refuse(f"{name}: the reference itself gives NaN or infinity")
                break
            if not all(ref[item].any() for item in gradients):
                rung.refuse(f"{name}: the reference's gradient is zero throughout")
                break
            again = partial(rung.of_ref, f"criterion on {name}", sides[0], case)
            # There are no weights: in float32 one run tells how the reference rounds.
            options = {"perturbed": None} if dtype == "float32" else {"must_be_judged": list(ref)}
            ruler = Ruler.measured(ref, dtype, again, **options)
            rung.check(ruler.compare(port, title=title, dtype=dtype), group=str)
            if keep is None or name in keep:
                is_first = dtype == "float32" and "loss" not in rung.files[0]
                named = [{keys[item]: array for item, array in each.items()} for each in both]
                rung.keep(named[0], named[1], "" if is_first else f"{title}/")


def _loss_and_gradients(
    backend: Backend,
    criterion: Callable[..., Any],
    device: Any,
    gradients: Sequence[Item],
    case: Case,
    dtype: str,
    perturbation: int = 0,
) -> Items:
    arrays = in_precision(case, dtype)
    if perturbation:
        rng = np.random.default_rng(perturbation)
        arrays = tuple(perturbed(array, dtype, rng) for array in arrays)
    if isinstance(criterion, backend.module_class):  # its class weights need that precision
        criterion = backend.training.to_device(copy.deepcopy(criterion), device, dtype)
    places = [i for i, array in enumerate(arrays) if array.dtype.kind == "f"][: len(gradients)]
    leaves = [backend.tensor(array, device, requires_grad=i in places) for i, array in enumerate(arrays)]
    # An operation in place may not change a leaf that needs a gradient.
    given = [leaf.clone() if i in places else leaf for i, leaf in enumerate(leaves)]
    with backend.runs.new_tensors(dtype), backend.runs.exact_constants():
        loss = criterion(*given)
        loss.backward()
    found = {Item("loss", "loss"): loss, **{item: leaves[i].grad for item, i in zip_strict(gradients, places)}}
    return {item: backend.to_array(tensor) for item, tensor in found.items() if tensor is not None}


def _array(value: Any) -> np.ndarray:
    tensors = backend_of_tensor(value)
    return tensors.to_array(value) if tensors else np.asarray(value)


def _numbers(returned: Any, name: str) -> Numbers:
    returned = map_tensors(returned, lambda value: backend_of_tensor(value) is not None, _array)
    named = returned if isinstance(returned, Mapping) else {name: returned}
    arrays = {str(key): np.asarray(value) for key, value in named.items()}
    for key, array in arrays.items():
        if array.dtype.kind not in KINDS:
            raise TypeError(f"{key} is {array.dtype}: a metric is a number, an array or a dict of such")
    return {key: array.astype(KINDS[array.dtype.kind]) for key, array in arrays.items()}


def _over(section: str, suffix: str, size: int | None, function: Callable[..., Numbers], case: Case) -> Items:
    found: dict[str, list[np.ndarray]] = {}
    for batch in batches(case, size):
        for key, array in function(*batch).items():
            found.setdefault(key, []).append(array)
    stacked = {}
    for key, arrays in found.items():
        if size is None:
            stacked[key] = arrays[0]
        elif len({array.shape for array in arrays}) == 1:
            stacked[key] = np.stack(arrays)
        else:
            stacked |= {f"{key}, batch {i}": array for i, array in enumerate(arrays)}
    return {Item(f"{key}{suffix}", "metric", section=section): array for key, array in stacked.items()}


def _on_tensors(backend: Backend, function: Callable[..., Any], name: str, device: str) -> Callable[..., Numbers]:
    place = backend.device(device)

    def on_arrays(*arrays: np.ndarray) -> Numbers:
        tensors = [backend.tensor(array, place) for array in arrays]
        return _numbers(function(*tensors), name)

    return on_arrays


def _check(rung: Rung, expected: Items, found: Items, atol: Mapping[Item, float], title: str) -> None:
    """Compare in one dtype; NaN and infinity, which have no difference, as words."""
    expected, found = dict(expected), dict(found)
    atol = dict(atol)
    for item in [item for item in expected if item in found]:
        ref, port = expected[item], found[item]
        if ref.dtype != port.dtype:  # a count may be a float on one side
            ref, port = ref.astype(np.float64), port.astype(np.float64)
        finite = np.isfinite(ref)
        if ref.shape == port.shape and not finite.all():
            where = replace(item, name=f"{item.name}, where not finite")
            for items, array in ((expected, ref), (found, port)):
                items[where] = np.where(np.isfinite(array), "finite", array.astype(str))
            atol[where] = 0.0
            ref, port = np.where(finite, ref, 0.0), np.where(finite, port, 0.0)
        expected[item], found[item] = ref, port
    rung.compare(expected, found, atol, title=title)


def _atol(fp64_ref: Items, fp32_ref: Items) -> dict[Item, float]:
    high, low = {}, {}
    for item, fp32 in fp32_ref.items():
        fp64 = fp64_ref.get(item)
        if fp64 is not None and fp64.shape == fp32.shape:
            finite = np.isfinite(fp64) & np.isfinite(fp32)
            high[item], low[item] = np.where(finite, fp64, 0), np.where(finite, fp32, 0)
    return kernel_atol(high, low)


@on_rung
def metric(
    ref_metric: Callable[..., Any],
    port_metric: Callable[..., Any],
    cases: Mapping[str, Sequence[np.ndarray]] | None = None,
    *,
    exact: Callable[..., Any] | None = None,
    batch_sizes: Sequence[int | None] = (None, 5, 1),
    name: str = "metric",
    title: str = "metric",
    seed: int = 0,
    device: str = "cpu",
    rung: Rung = QUIET,
) -> None:
    """Compare two metrics: functions of (outputs, targets), tensors of their own framework.

    Each returns a number, an array or a dict of such, as tensors or not. `cases` is {name: (outputs, targets)}, or any
    number of arrays; by default `cases.metrics(seed)`. Each is given whole (None) and in batches of `batch_sizes`: one
    sample shows what many hide. Items are called `name`, or by the dict's keys.

    Whole numbers, booleans, NaN and infinity must be equal, floats within the kernel limit. With `exact`, a function of
    NumPy arrays that gives the right answer, both sides are compared with that.
    """
    ref_numbers = _on_tensors(backend("torch"), ref_metric, name, device)
    port_numbers = _on_tensors(backend("paddle"), port_metric, name, device)
    answer = exact and (lambda *arrays: _numbers(exact(*arrays), name))
    fp64_ref: dict[Item, np.ndarray] = {}
    right: dict[Item, np.ndarray] = {}
    ref: dict[Item, np.ndarray] = {}
    port: dict[Item, np.ndarray] = {}
    every = prepared(metrics(seed) if cases is None else cases)
    for (case_name, case), size in product(every.items(), batch_sizes):
        suffix = "" if size is None or len(batch_sizes) == 1 else f", batches of {size}"
        over, where = partial(_over, case_name, suffix, size), f"on {case_name}{suffix}"
        fp64_ref |= rung.of_ref(f"metric {where}", over, ref_numbers, in_precision(case, "float64"))
        of_ref, of_port = needed(rung.observe(f"metric {where}", over, ref_numbers, port_numbers, case))
        ref |= of_ref
        port |= of_port
        if exact:
            right |= rung.of_ref(f"right answer `exact` {where}", over, answer, case)
    values = np.concatenate([array.astype(np.float64).ravel() for array in ref.values()] or [np.empty(0)])
    if values.size > 1 and np.unique(values).size == 1:
        rung.refuse(f"the reference's metric is {values[0]} on every case: give cases on which it differs")
    atol = _atol(fp64_ref, ref)
    if exact:
        _check(rung, right, ref, atol, f"{title}, reference")
        _check(rung, right, port, atol, f"{title}, port")
    else:
        _check(rung, ref, port, atol, title)
    rung.keep(ref, port)


class _Batches:
    """A loader of copies, since an evaluation may change them; read once if below MOST_KEPT."""

    def __init__(self, loader: Iterable) -> None:
        self.loader: Any = loader  # which may have a length and other attributes
        self.kept: list[tuple] | None = None
        self.labels: Any = None  # a tensor (N,), in place of its own

    def __iter__(self) -> Iterator[tuple]:
        is_first, start = self.kept is None, 0
        batches, size = [], 0
        for images, target in self.loader if self.kept is None else self.kept:
            if is_first:
                size += _array(images).nbytes
            if is_first and size < MOST_KEPT:
                batches.append(copy.deepcopy((images, target)))
            end = start + len(target)
            yield copy.deepcopy((images, target if self.labels is None else self.labels[start:end]))
            start = end
        if is_first and size < MOST_KEPT:
            self.kept = batches

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@dataclass
class _Side:
    backend: Backend
    device: Any
    evaluate: Callable[..., Any]
    model: Any
    loader: _Batches
    progress: Callable[[Iterable], Iterable]

    def outputs(self, dtype: str) -> tuple[Items, set[int]]:
        """(logits (N, C) in eval mode and labels (N,); sizes of the batches)."""
        model = self.backend.training.to_device(copy.deepcopy(self.model), self.device, dtype)
        model.eval()
        runs = self.backend.runs
        logits, labels = [], []
        for images, target in self.progress(self.loader):
            x = self.backend.tensor(_array(images), self.device, dtype)
            with self.backend.framework.no_grad(), runs.new_tensors(dtype), runs.exact_constants():
                logits.append(self.backend.to_array(model(x)))
            labels.append(_array(target))
        if not logits:
            raise UserError(f"the loader of the {self.backend.name} side has no batches: check the data")
        return {LOGITS: np.concatenate(logits), LABELS: np.concatenate(labels)}, set(map(len, labels))

    def results(self, labels: np.ndarray) -> Numbers:
        model = copy.deepcopy(self.model)
        model.train()
        self.loader.labels = self.backend.tensor(labels, self.device)
        found = _numbers(self.evaluate(model, self.loader), "metric")
        return {name: array.astype(np.float64) for name, array in found.items()}


@on_rung
def evaluation(
    ref: Evaluated,
    port: Evaluated,
    *more: Any,
    results: Mapping[str, str] | None = None,
    gain: float = 2.0,
    device: str = "cpu",
    progress: Callable[[Iterable], Iterable] = iter,
    rung: Rung = QUIET,
) -> None:
    """Compare two evaluations of a classifier over a whole loader: (evaluate, model, loader) of each side.

    `evaluate(model, batches)` returns a number or {name: number}. Both models have the same weights and map images to
    logits (N, C). A loader gives batches (images, labels (N,)), as often as it is iterated: an iterator raises
    UserError. Let its last batch not be full. First logits (float32, kernel limits) and labels are compared. Then both
    evaluations run on a copy of the model in train mode, as training leaves it: with `cases.ranked_labels`, at every
    rank around the k of top-k, and with the loader's own labels.

    `results` is {name: kind}, in the report's order; by default all of the reference's, those with "loss" in the name
    last, of the kind "loss". A loss may differ by `gain` times the limit of the logits, plus its own rounding: cross
    entropy moves at most twice as far as a logit. All else must be equal. `progress` wraps a loader while logits are
    computed, as tqdm does. Refused if an image's best logits are within rounding of each other.
    """
    if more or not len(ref) == len(port) == 3:
        raise UserError("evaluation takes ref and port, each (evaluate, model, loader) of that side")
    sides = []
    for role, framework, side in (("reference", backend("torch"), ref), ("port", backend("paddle"), port)):
        evaluate, model, loader = side
        if isinstance(loader, Iterator):
            kind = type(loader).__name__
            raise UserError(f"the {role}'s loader is a {kind}, read only once: give a loader or a list")
        sides.append(_Side(framework, framework.device(device), evaluate, model, _Batches(loader), progress))
    fp64_ref, sizes = rung.of_ref("model in float64", sides[0].outputs, "float64")
    (fp32_ref, _), (fp32_port, _) = needed(rung.observe("model", _Side.outputs, *sides, "float32"))
    logits, labels = fp32_ref[LOGITS], fp32_ref[LABELS]
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or labels.dtype.kind not in "iu":
        shapes = f"outputs {logits.shape}, labels {labels.shape} of {labels.dtype}"
        raise UserError(f"the reference has {shapes}: an evaluation needs logits (N, C) and whole-number labels (N,)")
    rung.check_signal({"logits": fp64_ref[LOGITS]})
    atol = kernel_atol(fp64_ref, fp32_ref)
    if not rung.compare(fp32_ref, fp32_port, atol, title="the whole validation set, float32", keep=""):
        return
    ranked = ranked_labels(fp64_ref[LOGITS], 2 * atol[LOGITS])
    if ranked is None:
        rung.refuse("an image's best logits are all within rounding of each other: choose other weights or images")
        return
    if len(sizes) == 1:
        rung.say("  all batches are of one size: an average of averages would not show")
    loss_atol = gain * atol[LOGITS] + C * U * largest(fp64_ref[LOGITS])
    ranked = ranked.astype(labels.dtype)
    for prefix, word, given in (("ranked/", "ranked labels", ranked), ("", "the loader's labels", labels)):
        of_ref, of_port = needed(rung.observe("evaluation", _Side.results, *sides, given))
        kinds = dict(results or _kinds(of_ref))
        if not set(kinds) <= set(of_ref):
            unknown = min(set(kinds) - set(of_ref))
            raise UserError(f"the reference's evaluation returns {', '.join(of_ref)}: no {unknown}")
        ref_items = _named(of_ref, kinds)
        atol = {item: loss_atol if item.kind == "loss" else 0.0 for item in ref_items}
        rung.compare(ref_items, _named(of_port, kinds), atol, title=f"evaluation, {word}", keep=prefix)
        numbers = {k: of_ref[k] for k, kind in kinds.items() if kind == "metric" and of_ref[k].ndim == 0}
        shares = [f"{k} {float(number):.4f}" for k, number in numbers.items()]
        rung.say(f"  {', '.join(shares)} of {len(labels)} images")


def _named(results: Numbers, kinds: Mapping[str, str]) -> dict[Item, np.ndarray]:
    return {Item(name, kind): results[name] for name, kind in kinds.items() if name in results}


def _kinds(ref: Numbers) -> dict[str, str]:
    of_loss = [name for name in ref if "loss" in name.lower()]
    return {name: "metric" for name in ref if name not in of_loss} | dict.fromkeys(of_loss, "loss")
