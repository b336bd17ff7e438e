"""What goes into a model: batches, and facts about the data."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from portproof.arrays import largest
from portproof.backends import backend_of_tensor
from portproof.compare import FAIL, PASS, Item, Row, Verdict, compare, joined
from portproof.compare.ruler import exact_atol
from portproof.ladder.rung import QUIET, Rung, on_rung
from portproof.python39 import zip_strict

ROUNDED = 8 * 2.0**-23  # of the largest value: some roundings, of which a batch goes through few
PICTURES = 4  # differing images in the report
END = object()
Draw = TypeVar("Draw")
Arrays = dict[Item, np.ndarray]
Batch = tuple[Arrays, str]  # and how it is nested
MakeLoader = Callable[[int], tuple[Iterable[Any], Callable[[int], Any]]]  # (workers) -> (loader, set_epoch)


def to_array(value: Any, place: str) -> np.ndarray:
    """An array of a tensor or of what NumPy takes, "none" for None; TypeError for the rest."""
    tensors = backend_of_tensor(value)
    array = tensors.to_array(value) if tensors else np.asarray("none" if value is None else value)
    if array.dtype.kind not in "biufU":
        raise TypeError(f"{place or 'it'} is a {type(value).__name__}, which is no array, tensor, number or string")
    return array


def _arrays(values: Mapping[Any, Any]) -> dict[Any, np.ndarray]:
    return {key: to_array(value, str(key)) for key, value in values.items()}


def arrays_at(value: Any, place: str) -> dict[str, np.ndarray]:
    """{place: array}: [1] in a tuple or list, [key] in a dict; TypeError as `to_array`."""
    if not isinstance(value, (Mapping, tuple, list)):
        return {place: to_array(value, place)}
    found: dict[str, np.ndarray] = {}
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        found |= arrays_at(part, f"{place}[{key}]")
    return found


def _structure(value: Any) -> str:
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        parts = [f"{key}: {_structure(part)}" for key, part in items]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_structure, value))})"
    return "array"


def _read(batches: Iterator[Any], number: int) -> Batch | None:
    batch = next(batches, END)
    if batch is END:
        return None
    if isinstance(batch, Mapping) and batch and all(isinstance(key, Item) for key in batch):
        return _arrays(batch), "items"
    found = arrays_at(batch, f"batch {number}")
    return {Item(name, "batch", section="batches"): array for name, array in found.items()}, _structure(batch)


def _compare(number: int, ref: Batch | None, port: Batch | None) -> Verdict:
    whole = Item(f"batch {number}", "batch", section="batches")
    if ref is None or port is None:
        side, longer = ("port", ref) if port is None else ("reference", port)
        assert longer is not None
        reason = f"the {side} has no batch {number}: its batches end before the other side's"
        lost = longer[0] or {whole: np.empty(0)}
        return Verdict("", [Row(item, FAIL, array.shape, reason=reason) for item, array in lost.items()])
    (ref_arrays, structure), (port_arrays, port_structure) = ref, port
    if structure != port_structure:
        reason = f"structure: reference {structure}, port {port_structure}"
        return Verdict("", [Row(replace(whole, kind="structure"), FAIL, reason=reason)])
    return compare(ref_arrays, port_arrays, exact_atol(ref_arrays))


def _keep(rung: Rung, left: dict[str, int], verdict: Verdict, ref: Arrays, port: Arrays) -> None:
    for item in ref:
        if left.get(item.kind, 0):
            left[item.kind] -= 1
            rung.keep({item: ref[item]}, {item: port[item]} if item in port else {})
    for row in verdict.rows:
        if row.status == PASS or row.item not in ref or row.item not in port:
            continue
        mine, its = ref[row.item], port[row.item]
        pairs = {row.name: (mine, its)} if mine.ndim == 3 else {}
        if mine.ndim == 4 and mine.shape == its.shape and mine.shape[1] == 3:
            differing = np.flatnonzero((mine != its).any(axis=(1, 2, 3)))
            pairs = {f"{row.name}[{number}]": (mine[number], its[number]) for number in differing}
        for name, (one, other) in pairs.items():
            if len(rung.pictures) < PICTURES:
                rung.pictures.setdefault(name, (one.copy(), other.copy()))


def _progress(title: str, quiet: bool) -> Iterator[int]:
    try:
        from tqdm import tqdm
    except ImportError:
        return itertools.count()
    return iter(tqdm(itertools.count(), title, unit="batch", leave=False, disable=quiet or None))


@on_rung
def data(
    ref_batches: Iterable[Any],
    port_batches: Iterable[Any],
    *,
    title: str = "batches",
    hints: Mapping[str, str] | None = None,
    keep: Mapping[str, int] | None = None,
    rung: Rung = QUIET,
) -> None:
    """Compare two iterables of batches bit for bit, shape and dtype included.

    A batch is an array or tensor (PyTorch, PaddlePaddle, NumPy), or nested tuples, lists and dicts of these; tuple and
    list are one. Its items are called "batch 3[0]" or "batch 3[image]", of kind "batch"; a mapping {Item: array} brings
    its own. `hints` is {kind: usual cause of a difference}, `keep` {kind: how many go into the result files}. It ends
    with the first batch that one side lacks: cut endless ones with itertools.islice. One batch a side is held.
    """
    verdicts: list[Verdict] = []
    left, rounded = dict(keep or {}), 0
    iterators = rung.observe("batches", iter, ref_batches, port_batches)
    for number in _progress(title, rung.quiet) if iterators else ():
        assert iterators is not None
        both = rung.observe(f"batch {number}", _read, *iterators, number)
        if both is None or not any(both):
            break
        verdicts.append(_compare(number, *both))
        ref, port = both
        if ref is None or port is None:
            break
        _keep(rung, left, verdicts[-1], ref[0], port[0])
        floats = {item: array for item, array in ref[0].items() if array.dtype.kind == "f"}
        failed = [row for row in verdicts[-1].rows if row.status == FAIL and row.item in floats]
        rounded += sum(row.difference <= ROUNDED * largest(floats[row.item]) for row in failed)
    rung.check(joined(title, [Verdict("", hints=hints or {}), *verdicts]))
    if rounded:
        told = "differ by no more than float32 rounds: they may be computed in another order, or by another library"
        rung.say(f"  {rounded} items {told}; let both sides call one function, or compare what goes into it")


@on_rung
def facts(
    ref: Mapping[Item | str, Any], port: Mapping[Item | str, Any], *, title: str = "facts", rung: Rung = QUIET
) -> None:
    """Compare facts such as classes, files or options: all must be equal.

    Values are numbers, strings, None, lists of these, arrays or tensors. Numbers go to the result files.
    """
    both = rung.observe(title, _arrays, ref, port)
    if both:
        rung.compare(*both, title=title, keep="")


def image_folder(dataset: Any, name: str) -> dict[Item, Any]:
    """Length, classes, files and labels of an image folder, for `facts`; items are called `name`.

    `dataset` is an ImageFolder or DatasetFolder of torchvision or paddle.vision, or has `root`, `classes` and
    `samples`, a list of (path, label).
    """
    files, labels = zip_strict(*dataset.samples)
    return {
        Item(name, "files", section="length"): len(dataset),
        Item(name, "files", section="classes"): dataset.classes,
        Item(name, "files", section="files"): [os.path.relpath(path, dataset.root) for path in files],
        Item(name, "label", section="labels"): labels,
    }


def _name_of(dataset: Any, index: int) -> str:
    samples = getattr(dataset, "samples", None)
    return Path(samples[index][0]).name if samples else f"sample {index}"


def _sample_item(name: str, kinds: Sequence[str], i: int, section: str) -> Item:
    return Item(f"{name} {kinds[i]}" if i else name, kinds[i], section=section)


def by_sample(
    loader: Any, *, kinds: Sequence[str] = ("image", "label"), section: str = ""
) -> Iterator[dict[Item, Any]]:
    """The batches of either framework's DataLoader, by sample, with each batch's order and size, for `data`.

    Items are called NAME for the first of `kinds`, "NAME kind" for the others: the file's name, or "sample INDEX".
    """
    for number, (indices, tensors) in enumerate(zip(loader.batch_sampler, loader)):
        items = {
            Item(f"order of batch {number}", "order", section=section): indices,
            Item(f"size of batch {number}", "order", section=section): [len(tensor) for tensor in tensors],
        }
        for i, tensor in enumerate(tensors[: len(kinds)]):
            for index, sample in zip(indices, tensor):  # the size is an item of its own
                items[_sample_item(_name_of(loader.dataset, index), kinds, i, section)] = sample
        yield items


@on_rung
def loaders(
    make_ref: MakeLoader,
    make_port: MakeLoader,
    *,
    name: str = "",
    epochs: Sequence[int] = (0, 1),
    workers: Sequence[int] = (0, 2),
    kinds: Sequence[str] = ("image", "label"),
    hints: Mapping[str, str] | None = None,
    keep: Mapping[str, int] | None = None,
    rung: Rung = QUIET,
) -> None:
    """Compare the samples of two DataLoaders in several epochs, without worker processes and with two.

    `make_ref(workers)` and `make_port` return (DataLoader, set_epoch); `set_epoch(epoch)` is called before each epoch.
    `name` is the pipeline's, such as "val", `kinds` as in `by_sample`, `hints` and `keep` as in `data`.
    """
    for count in workers:
        made = rung.observe("make function", _loader, make_ref, make_port, count)
        if made is None:
            continue
        for epoch in epochs:
            rung.observe("set_epoch", lambda made, epoch: made[1](epoch), *made, epoch)
            both = (by_sample(loader, kinds=kinds, section=name) for loader, _ in made)
            title = f"{name} pipeline, epoch {epoch}, {count} workers".strip()
            data(*both, title=title, hints=hints, keep=keep, rung=rung)


def _loader(make: MakeLoader, workers: int) -> tuple[Any, Callable[[int], Any]]:
    made = make(workers)
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[1]):
        raise TypeError(f"it returns {type(made).__name__}, no (loader, set_epoch)")
    return made


def single_samples(
    dataset: Any, chosen: Iterable[tuple[int, int]], *, kinds: Sequence[str] = ("image", "label"), section: str = ""
) -> Iterator[dict[Item, Any]]:
    """Samples for `data`, chosen by (epoch, index), such as those that show a rare augmentation.

    `dataset.set_epoch(epoch)` must choose what is drawn. Names are as in `by_sample`, with "epoch E" behind them.
    """
    for epoch, index in chosen:
        dataset.set_epoch(epoch)
        name, sample = f"{_name_of(dataset, index)} epoch {epoch}", dataset[index]
        yield {_sample_item(name, kinds, i, section): sample[i] for i in range(len(kinds))}


def must_vary(drawn: Mapping[str, Sequence[bool]], *, what: str = "draws", of: str = "inputs", rung: Rung) -> None:
    """Refuse if none or all of the draws have a property: its effect could not be seen.

    `drawn` is {property: for each draw, whether it has it}. `what` names the draws, `of` what they are made for.
    """
    for name, flags in drawn.items():
        rung.say(f"{what} looked at: {len(flags)}, of which {sum(flags)} are {name}")
        if not 0 < sum(flags) < len(flags):
            rung.refuse(f"none of the {of}, or all of them, are {name}: use more {of} or another seed")


def covering(
    title: str,
    cases: Iterable[Any],
    draws: Iterable[tuple[Draw, Iterable[Any]]],
    *,
    what: str = "cases",
    of: str = "inputs",
    rung: Rung,
) -> list[Draw]:
    """The first draws that show all `cases` between them; refuse if a case is never shown.

    `draws` are (draw, its cases), read only as far as needed. `what` names the cases, `of` what is drawn for.
    """
    unseen, chosen = set(cases), []
    count = len(unseen)
    for draw, shown in draws:
        if not unseen.isdisjoint(shown):
            unseen.difference_update(shown)
            chosen.append(draw)
        if not unseen:
            break
    rung.say(f"{title}: {count - len(unseen)} of {count} {what} drawn, in {len(chosen)} {of}")
    if unseen:
        rung.refuse(f"{title} never draws {', '.join(sorted(map(str, unseen)))}: use another seed")
    return chosen
