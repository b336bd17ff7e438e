"""Two metrics, on awkward cases; and two evaluations, over a whole loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.backends.trace import map_tensors
from portproof.compare import Item, Items, compare
from portproof.compare.tolerances import C, U, kernel_atol, largest
from portproof.io.cli import UserError
from portproof.ladder.cases import Case, batches, in_precision, metrics, prepared, ranked_labels
from portproof.ladder.rung import Rung, on_rung

KINDS = {"b": np.int64, "i": np.int64, "u": np.int64, "f": np.float64}
Numbers = dict[str, np.ndarray]
MOST_KEPT = 2**28  # bytes of images; of a whole validation set that is little


def _numbers(returned: Any, name: str, backend: Backend | None = None) -> Numbers:
    """{name: int64 or float64} of what a metric returned; raises TypeError for what is no number."""
    if backend:
        returned = map_tensors(returned, backend.framework.is_tensor, backend.to_array)
    named = returned if isinstance(returned, Mapping) else {name: returned}
    arrays = {str(key): np.asarray(value) for key, value in named.items()}
    for key, array in arrays.items():
        if array.dtype.kind not in KINDS:
            raise TypeError(f"{key} is {array.dtype}: a metric is a number, an array or a dict of such")
    return {key: array.astype(KINDS[array.dtype.kind]) for key, array in arrays.items()}


def _over(function: Callable[..., Numbers], case: Case, size: int | None) -> Numbers:
    """What `function` gives for each batch of `size`, stacked; under names of their own where shapes differ."""
    found = [function(*batch) for batch in batches(case, size)]
    stacked = {}
    for key in dict.fromkeys(key for numbers in found for key in numbers):
        arrays = [numbers[key] for numbers in found if key in numbers]
        if size is None:
            stacked[key] = arrays[0]
        elif len({array.shape for array in arrays}) == 1:
            stacked[key] = np.stack(arrays)
        else:
            stacked |= {f"{key}, batch {i}": array for i, array in enumerate(arrays)}
    return stacked


def _on_tensors(backend: Backend, function: Callable[..., Any], name: str, device: str) -> Callable[..., Numbers]:
    """`function` of that framework's tensors as one of arrays."""
    place = backend.device(device)
    return lambda *arrays: _numbers(function(*(backend.tensor(array, place) for array in arrays)), name, backend)


def _comparable(expected: Items, found: Items) -> tuple[Items, Items]:
    """Both with one dtype an item, and with NaN and infinity of the expected as items of words.

    The difference of two infinities is no number, so `compare` fails them; here they are the right answer.
    """
    expected, found = dict(expected), dict(found)
    for item in [item for item in expected if item in found]:
        ref, port = expected[item], found[item]
        if ref.dtype != port.dtype:  # a count may be a whole number on one side and a float on the other
            ref, port = ref.astype(np.float64), port.astype(np.float64)
        finite = np.isfinite(ref)
        if ref.shape == port.shape and not finite.all():
            for items, array in ((expected, ref), (found, port)):
                words = np.where(np.isfinite(array), "finite", array.astype(str))
                items[replace(item, name=f"{item.name}, where not finite")] = words
            ref, port = np.where(finite, ref, 0.0), np.where(finite, port, 0.0)
        expected[item], found[item] = ref, port
    return expected, found


def _atol(fp64_ref: Items, fp32_ref: Items) -> dict[Item, float]:
    """0 for whole numbers, the kernel limits for floats, over what is finite in both precisions."""
    both = {}, {}
    for item, fp32 in fp32_ref.items():
        fp64 = fp64_ref.get(item)
        if fp64 is not None and fp64.shape == fp32.shape:
            finite = np.isfinite(fp64) & np.isfinite(fp32)
            both[0][item], both[1][item] = np.where(finite, fp64, 0), np.where(finite, fp32, 0)
    return kernel_atol(*both)


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
    rung: Rung,
) -> None:
    """Compare two metrics: callables of (outputs, targets), tensors of their own framework.

    Each returns a number, an array or a dict of such, as tensors or not. `cases` are {name: (outputs, targets)}, or
    any other number of arrays; by default `cases.metrics(seed)`: ties, NaN, infinite and huge logits (N, 8), int64
    labels (N,). Each case is given whole (None) or cut into batches of each of `batch_sizes`, the last of which may be
    smaller: what a metric of many samples hides, one of a single sample shows. Items are called `name`, or by the
    dict's keys.

    Whole numbers and booleans must be equal, floats within the kernel limit; NaN and infinity of the reference must be
    the port's, too. With `exact`, a function of NumPy arrays that returns the right answer, both sides are judged
    against that; without it the port is judged against the reference.

    Raises UserError for cases that are none, and for a reference or an `exact` that raises.
    """
    ref_numbers = _on_tensors(backend("torch"), ref_metric, name, device)
    port_numbers = _on_tensors(backend("paddle"), port_metric, name, device)
    fp64_ref, ref, port, right = {}, {}, {}, {}
    for case_name, case in prepared(metrics(seed) if cases is None else cases).items():
        for size in batch_sizes:
            suffix = "" if size is None or len(batch_sizes) == 1 else f", batches of {size}"
            place = partial(_placed, case_name, suffix)
            what = f"metric, on {case_name}{suffix},"
            ref |= place(rung.of_ref(what, _over, ref_numbers, case, size))
            fp64_ref |= place(rung.of_ref(what, _over, ref_numbers, in_precision(case, "float64"), size))
            found = rung.of_port(what.rstrip(","), _over, port_numbers, case, size)
            if found is None:
                return
            port |= place(found)
            if exact:
                answer = lambda *arrays: _numbers(exact(*arrays), name)  # noqa: E731
                right |= place(rung.of_ref(f"right answer `exact`, on {case_name}{suffix},", _over, answer, case, size))
    values = np.concatenate([array.astype(np.float64).ravel() for array in ref.values()] or [np.empty(0)])
    if values.size > 1 and np.unique(values).size == 1:
        rung.refuse(f"the reference's metric is {values[0]} on every case: give cases on which it differs")
    atol = _atol(fp64_ref, ref)
    judged = [(right, ref, f"{title}, reference"), (right, port, f"{title}, port")] if exact else [(ref, port, title)]
    for *both, heading in judged:
        expected, found = _comparable(*both)
        words = {item: 0.0 for item, array in expected.items() if array.dtype.kind == "U"}
        rung.check(compare(expected, found, atol | words, title=heading), group=str)
    rung.keep(ref, port)


def _placed(section: str, suffix: str, found: Numbers) -> dict[Item, np.ndarray]:
    return {Item(f"{key}{suffix}", "metric", section=section): array for key, array in found.items()}


@dataclass
class _Relabelled:
    """A loader's batches with other labels; all else of it is the loader's."""

    loader: Iterable
    labels: np.ndarray
    tensor: Callable[[np.ndarray], Any]

    def __iter__(self) -> Iterator[tuple]:
        start = 0
        for images, target in self.loader:
            yield images, self.tensor(self.labels[start : start + len(target)])
            start += len(target)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class _ReadOnce:
    """A loader that is read once if its images take less than MOST_KEPT; all else of it is the loader's.

    What it gives is a copy, for an evaluation may change its images in place.
    """

    def __init__(self, loader: Iterable, to_array: Callable[[Any], np.ndarray]) -> None:
        self.loader, self.to_array = loader, to_array
        self.batches: list[tuple] | None = None

    def __iter__(self) -> Iterator[tuple]:
        if self.batches is not None:
            yield from map(copy.deepcopy, self.batches)
            return
        batches, size = [], 0
        for images, target in self.loader:
            size += self.to_array(images).nbytes
            if size < MOST_KEPT:
                batches.append(copy.deepcopy((images, target)))
            yield images, target
        self.batches = batches if size < MOST_KEPT else None

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@dataclass
class _Side:
    """One side's evaluation, its model and its loader."""

    backend: Backend
    device: Any
    evaluate: Callable[..., Any]
    model: Any
    loader: Iterable
    progress: Callable[[Iterable], Iterable]

    def __post_init__(self) -> None:
        self.loader = _ReadOnce(self.loader, self._array)

    def _array(self, value: Any) -> np.ndarray:
        return self.backend.to_array(value) if self.backend.framework.is_tensor(value) else np.asarray(value)

    def outputs(self, dtype: str) -> tuple[np.ndarray, np.ndarray, set[int]]:
        """(logits (N, C), labels (N,), sizes of the batches) of the loader, by a copy of the model in eval mode."""
        model = self.backend.moved(copy.deepcopy(self.model), self.device, dtype)
        model.eval()
        logits, labels = [], []
        for images, target in self.progress(self.loader):
            x = self.backend.tensor(self._array(images), self.device, dtype)
            with self.backend.framework.no_grad(), self.backend.new_tensors(dtype), self.backend.exact_constants():
                logits.append(self.backend.to_array(model(x)))
            labels.append(self._array(target))
        if not logits:
            raise UserError(f"the loader of the {self.backend.name} side has no batches: check the data")
        return np.concatenate(logits), np.concatenate(labels), set(map(len, labels))

    def results(self, labels: np.ndarray) -> Numbers:
        """What `evaluate` says of the loader's images and `labels`, with a copy of the model as training leaves it."""
        model = copy.deepcopy(self.model)
        model.train()
        batches = _Relabelled(self.loader, labels, lambda array: self.backend.tensor(array, self.device))
        found = _numbers(self.evaluate(model, batches), "metric", self.backend)
        return {name: array.astype(np.float64) for name, array in found.items()}


@on_rung
def evaluation(
    ref_evaluate: Callable[..., Any],
    port_evaluate: Callable[..., Any],
    ref_model: Any,
    port_model: Any,
    ref_loader: Iterable,
    port_loader: Iterable,
    *,
    results: Mapping[str, str] | None = None,
    gain: float = 2.0,
    device: str = "cpu",
    progress: Callable[[Iterable], Iterable] = iter,
    rung: Rung,
) -> None:
    """Compare two evaluations of a classifier over a whole loader.

    `ref_evaluate(model, batches)` and the port's return a number or {name: number}. Both models have the same weights
    and map images to logits (N, C). The loaders give batches (images, labels (N,)), as often as they are iterated; the
    last one should not be full. First the logits and labels are compared: float32, kernel limits, labels equal. Then
    both evaluations run, on a copy of the model in train mode, as training leaves it: to evaluate in eval mode is their
    own business. They get the loader's images, at first with labels at every rank around the k of top-k
    (`cases.ranked_labels`), then with its own.

    `results` are {what is compared, in this order: its kind}, by default all that the reference returns, those whose
    name has "loss" in it last, as of the kind "loss". A loss may differ by `gain` times the limit of the logits, plus
    its own rounding: cross entropy moves at most twice as far as the logits do, in the largest one. All else must be
    equal. `progress` wraps a loader while the logits are computed, as tqdm does.

    Raises UserError for a reference that raises, for no batches, and for loaders that are iterators. Inputs on which
    the rank of no label is beyond rounding are refused.
    """
    for role, loader in (("reference", ref_loader), ("port", port_loader)):
        if isinstance(loader, Iterator):
            raise UserError(
                f"the {role}'s loader is a {type(loader).__name__}, read only once: give a loader or a list"
            )
    torch, paddle = backend("torch"), backend("paddle")
    ref_side = _Side(torch, torch.device(device), ref_evaluate, ref_model, ref_loader, progress)
    port_side = _Side(paddle, paddle.device(device), port_evaluate, port_model, port_loader, progress)
    fp64_ref, _, _ = rung.of_ref("model, in float64,", ref_side.outputs, "float64")
    ref_logits, ref_labels, sizes = rung.of_ref("model", ref_side.outputs, "float32")
    found = rung.of_port("model", port_side.outputs, "float32")
    if found is None:
        return
    if ref_logits.ndim != 2 or ref_labels.shape != ref_logits.shape[:1] or ref_labels.dtype.kind not in "iu":
        shapes = f"outputs {ref_logits.shape}, labels {ref_labels.shape} of {ref_labels.dtype}"
        raise UserError(f"the reference has {shapes}: an evaluation needs logits (N, C) and whole-number labels (N,)")
    rung.check_signal({"logits": fp64_ref})
    logits, labels = Item("logits", "output"), Item("labels", "label")
    atol = kernel_atol({logits: fp64_ref}, {logits: ref_logits}) | {labels: 0.0}
    ref, port = {logits: ref_logits, labels: ref_labels}, {logits: found[0], labels: found[1]}
    rung.keep(ref, port)
    if not rung.check(compare(ref, port, atol, title="the whole validation set, float32"), group=str):
        return
    limit = atol[logits]
    ranked = ranked_labels(fp64_ref, 2 * limit)
    if ranked is None:
        rung.refuse("an image's best logits are all within rounding of each other: choose other weights or images")
        return
    if len(sizes) == 1:
        rung.say("  all batches are of one size: an average of averages would not show")
    loss_atol = gain * limit + C * U * largest(fp64_ref)
    ranked = ranked.astype(ref_labels.dtype)
    for prefix, word, given in (("ranked/", "ranked labels", ranked), ("", "the loader's labels", ref_labels)):
        ref = rung.of_ref("evaluation", ref_side.results, given)
        port = rung.of_port("evaluation", port_side.results, given)
        if port is None:
            return
        kinds = dict(results or _kinds(ref))
        if not set(kinds) <= set(ref):
            raise UserError(f"the reference's evaluation returns {', '.join(ref)}: no {min(set(kinds) - set(ref))}")
        named = [{Item(k, kinds[k]): side[k] for k in kinds if k in side} for side in (ref, port)]
        atol = {item: loss_atol if item.kind == "loss" else 0.0 for item in named[0]}
        rung.check(compare(*named, atol, title=f"evaluation, {word}"), group=str)
        shares = [f"{k} {float(ref[k]):.4f}" for k, kind in kinds.items() if kind == "metric" and ref[k].ndim == 0]
        rung.say(f"  {', '.join(shares)} of {len(ref_labels)} images")
        rung.keep(*named, prefix)


def _kinds(ref: Numbers) -> dict[str, str]:
    losses = [name for name in ref if "loss" in name.lower()]
    return {name: "metric" for name in ref if name not in losses} | dict.fromkeys(losses, "loss")
