"""Several processes do what one does, on both sides.

Each side is a callable `run(options, dtype) -> {Item: array}`: a training or evaluation run in this process, in
`dtype`, and what it recorded. The process is alone or one of several, as the launcher's environment variables tell.
An item's kind says how several processes are compared with one:

    images          the indices it trains on: together those of one process, in any order
    own loss        the mean loss of its share: averaged over the processes that of one
    own buffer      before buffers are made equal: may differ; in `own_statistics` runs it has to
    own lines       how many log lines it prints: as many as the same process of the reference
    gradient        averaged over the processes, on process 0 at least: that of one
    samples, metric counts: exactly those of one, and equal on all processes
    parameter, buffer, loss, any other
                    those of one within the limits, and bit-equal on all processes
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.compare import Item
from portproof.compare.ruler import Distances, Ruler, distances
from portproof.io.cli import resolve
from portproof.ladder.rung import FRAMEWORKS, QUIET, Rung, check_coefficients, names_back, on_rung, reference_name
from portproof.ladder.workers import Outcome, Record, launch, record_of
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

TIMEOUT = 300.0  # seconds; two processes of a small model take 10 on idle cores
SHARES = (1, 2, 3, 5, 20)  # processes; of 20 some have nothing of a small evaluation set
EPOCHS = 2  # whose shares are compared
OF_ONE_PROCESS = ("images", "own loss", "own buffer", "own lines", "gradient")  # may differ
OF_TENSORS = ("gradient", "parameter", "buffer")
KEPT = ("images", "own loss", "samples", "metric", "loss")  # in the result files

HINTS = {
    "gradient": "gradients added up instead of averaged over the processes, or not exchanged at all",
    "parameter": "a learning rate or batch size per process; a process that began with other weights",
    "buffer": "buffers not made equal before the model is evaluated and saved",
    "images": "rank or world_size not given to the sampler; set_epoch not called; shares padded for evaluation",
    "own lines": "the log printed by every process, or by another than process 0",
    **dict.fromkeys(("samples", "metric", "loss"), "counts not summed over the processes; shares that overlap"),
}

SHOWN: dict[str, Any] = {"group": attrgetter("section"), "hints": HINTS}

Runs = Mapping[str, Any]  # {name: options}
Share = Callable[[bool, int, int, int], Any]  # (train, epoch, rank, world_size) -> ordered indices


@dataclass
class Processes(Outcome):
    who: str = ""
    back: Mapping[str, str] = field(default_factory=dict)  # as in `reference_name`
    own_statistics: Collection[str] = ()  # runs in which several are not one

    @property
    def title(self) -> str:
        return f"{self.who}, {len(self.records)} processes"

    @property
    def like_one(self) -> list[str]:
        return [run for run in self.records[0] if run not in self.own_statistics]

    def each(self, runs: Collection[str]) -> list[Record]:
        """Each process's records of these runs as one; all items are called float64."""
        found: list[Record] = []
        for records in self.records:
            found.append({})
            for run in runs:
                for item, array in records[run].items():
                    section = f"{run}/{item.section}" if item.section else run
                    found[-1][replace(self._of_reference(item), section=section, dtype="float64")] = array
        return found

    def _of_reference(self, item: Item) -> Item:
        """The item by the reference's names."""
        if item.kind not in OF_TENSORS:
            return item
        module = self.back.get(item.module, item.module)
        return replace(item, name=reference_name(item.name, self.back), module=module)

    def together(self, runs: Collection[str]) -> Record:
        """Their joint record, to be compared with one process by the module's table."""
        every = self.each(runs)
        result = {}
        for item in every[0]:
            own = [record[item] for record in every if item in record]
            if item.kind == "images":
                result[item] = np.sort(np.concatenate(own, axis=None))
            elif item.kind == "own loss" and len({array.shape for array in own}) == 1:
                result[item] = np.mean(own, axis=0)
            elif item.kind not in ("own buffer", "own lines"):
                result[item] = own[0]
        return result


def one_process(
    who: str, run: Callable, runs: Runs, dtype: str = "float64", back: Mapping[str, str] | None = None
) -> Processes:
    """What this process records alone: silent, and with one thread, as the launched ones."""
    before = backend(FRAMEWORKS[who]).training.set_threads(1)
    try:
        with redirect_stdout(io.StringIO()):
            return Processes(
                [{name: record_of(run, options, dtype) for name, options in runs.items()}], who=who, back=back or {}
            )
    finally:
        backend(FRAMEWORKS[who]).training.set_threads(before)


def compare_with_one(
    rung: Rung, one: Record, found: Record, title: str, errors: Distances, rounded: Sequence[Distances] = ()
) -> None:
    exact = [item for item in one if item.kind in ("samples", "metric")]
    ruler = Ruler(one, errors=lambda: errors, rounded=lambda: rounded, exact=exact)
    rung.check(ruler.compare(found, title=f"{title}, float64", hints=HINTS), SHOWN["group"])


def check_one(
    rung: Rung, callables: Mapping[str, Callable], runs: Runs, coefficients: str, back: Mapping[str, str]
) -> tuple[dict[str, Processes], Distances]:
    """Compare one process of both sides -> ({side: it}, errors of the reference's float32 run)."""
    ref, port = callables.values()
    what = "run in one process"
    one_ref = rung.of_ref(what, one_process, "reference", ref, runs)
    rounded = rung.of_ref(what, one_process, "reference", ref, runs, "float32")
    [fp64_ref], [fp32_ref] = one_ref.each(runs), rounded.each(runs)
    for name, record in one_ref.records[0].items():
        if not record:
            rung.refuse(f"the reference recorded nothing of the run {name!r}")
    for item in fp64_ref.keys() | fp32_ref.keys():
        if not (item in fp64_ref and item in fp32_ref and fp64_ref[item].shape == fp32_ref[item].shape):
            raise UserError(f"the reference records {item} otherwise in float32 than in float64: record the same")
    errors = distances(fp64_ref, fp32_ref)
    one_port = rung.of_port("port, one process", one_process, "port", port, runs, "float64", back)
    one_port = one_port or Processes([{}], who="port")
    if one_port.records[0]:
        title = "one process, the port against the reference"
        extra = [errors] if coefficients == "float32" else []
        compare_with_one(rung, fp64_ref, one_port.each(runs)[0], title, errors, extra)
    return {"reference": one_ref, "port": one_port}, errors


def strided_shares(order: Callable[[int], Any], *, evaluated: int) -> Share:
    """The shares that most samplers document: process r of n takes every n-th sample from the r-th on.

    In training the indices `order(epoch)` are lengthened by their own beginning until all get as many, as in torch's
    DistributedSampler. In evaluation each of the `evaluated` samples comes once, in order.
    """

    def share(train: bool, epoch: int, rank: int, processes: int) -> np.ndarray:
        every = np.asarray(order(epoch)) if train else np.arange(evaluated)
        equal = -(-len(every) // processes) * processes
        return (np.resize(every, equal) if train else every)[rank::processes]

    return share


def shares_of(share: Share) -> Record:
    shares = {}
    for train, n in product((True, False), SHARES):
        for epoch in range(EPOCHS if train else 1):
            name = f"epoch {epoch}" if train else "each image once"
            item = Item(name, "images", section=f"{'train' if train else 'val'}, {n} processes")
            shares[item] = np.concatenate([np.asarray(share(train, epoch, rank, n), int) for rank in range(n)])
    return shares


def check_shares(rung: Rung, one: Processes, documented: Record, own: Record, trained_on: Mapping) -> None:
    exact, found = dict(documented), dict(own)
    for run, sections in trained_on.items():
        for section, indices in sections.items():
            item = Item(section, "images", section="trained on")
            record = one.records[0][run]
            taken = [a for i, a in record.items() if (i.section, i.kind) == (section, "images")]
            exact[item], found[item] = np.asarray(indices), np.concatenate(taken or [np.empty(0, int)])
    title = f"{one.who}, the images of each process, against the documented"
    rung.compare(exact, found, title=title, group=lambda item: item.section.partition(",")[0], hints=HINTS)


def check_several(rung: Rung, one: Processes, several: Processes, errors: Distances) -> None:
    if several.log:
        rung.say(several.log)
    if runs := several.like_one:
        title = f"{several.title} (as the port) against one (as the reference)"
        compare_with_one(rung, one.together(runs), several.together(runs), title, errors)
    if several.records[0]:
        check_agreement(rung, several)
    if several.is_machines:
        rung.refuse(several.reason, several.title)
    elif several.reason and several.who == "reference":
        raise UserError(f"the {several.title}: {several.reason}")
    elif several.reason:
        rung.fail(several.title, several.reason)


def check_agreement(rung: Rung, several: Processes) -> None:
    """All processes end with the same bits; in `own_statistics` their buffers differed before."""
    shared = []
    for record in several.each(several.records[0]):
        shared.append({item: array for item, array in record.items() if item.kind not in OF_ONE_PROCESS})
    for rank, other in enumerate(shared[1:], 1):
        title = f"{several.who}, process {rank} of {len(shared)} (as the port) against process 0 (as the reference)"
        rung.compare(shared[0], other, title=title, **SHOWN)
    for run in [run for run in several.own_statistics if run in several.records[0]]:
        own, another = (record[run] for record in several.records[:2])
        statistics = [item for item in own if item.kind == "own buffer"]
        if not any(item not in another or (own[item] != another[item]).any() for item in statistics):
            rung.refuse(f"{several.title}: no buffer of {run!r} differed between them before they were made equal")


def check_lines(rung: Rung, ref: Processes, port: Processes) -> None:
    runs = [run for run in ref.records[0] if run in port.records[0]]
    lines = []
    for several in (ref, port):
        records = several.each(runs)
        items = [item for item in dict.fromkeys(chain(*records)) if item.kind == "own lines"]
        lines.append({i: np.concatenate([np.ravel(record.get(i, 0)) for record in records]) for i in items})
    if any(lines):
        title = f"{len(ref.records)} processes, the log lines of each, the port against the reference"
        rung.compare(lines[0], lines[1], title=title, **SHOWN)


def kept(every: Sequence[Processes]) -> dict[str, np.ndarray]:
    files = {}
    for processes in every:
        count = len(processes.records)
        who = f"{count} processes" if count > 1 else "one process"
        for item, array in processes.together(processes.like_one).items():
            if item.kind in KEPT:
                batch = "" if item.iteration is None else f", batch {item.iteration}/own"
                files[f"{who}/{item.section}{batch}/{item.name}"] = array
    return files


def checked_runs(runs: Mapping[int, Runs], own_statistics: Collection[str], trained_on: Mapping) -> dict[int, Runs]:
    try:
        runs = {count: json.loads(json.dumps(dict(some))) for count, some in runs.items()}
    except TypeError as error:
        raise UserError(f"the options of the runs are no JSON: {error}") from error
    if not runs or not all(count > 1 and some for count, some in runs.items()):
        raise UserError("runs must be {number of processes, 2 or more: {name: options}}, none of them empty")
    names = [name for some in runs.values() for name in some]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two runs are called {twice[0]!r}: each number of processes has runs of its own")
    if unknown := ({*own_statistics, *trained_on} - set(names)) | (set(own_statistics) & set(trained_on)):
        raise UserError(f"{min(unknown)!r} must be one of the runs, and not in own_statistics and trained_on at once")
    return runs


@on_rung
def dist(
    ref: str,
    port: str,
    runs: Mapping[int, Runs],
    *,
    own_statistics: Collection[str] = (),
    shares: Sequence[Share] = (),
    trained_on: Mapping[str, Mapping[str, Any]] | None = None,
    names: Mapping[str, str] | None = None,
    coefficients: str = "float32",
    timeout: float = TIMEOUT,
    rung: Rung = QUIET,
) -> None:
    """Compare several processes of each side with one, and one of the port with one of the reference.

    `ref` and `port` are import paths "PKG.MOD:NAME" of callables as in the module's docstring. Each framework's own
    launcher starts processes on this machine, which execute their runs in turn; a callable joins the others by
    `workers.join_group`, or is written with `data_parallel_step`. `runs` is {number of processes: {name: options}};
    options are JSON. All is float64; limits come from a float32 run of the reference's one process.

    `own_statistics` names runs in which each process normalizes with its own share: they are compared with each other
    only, and must have had an "own buffer" that differed. `shares` are three functions (train, epoch, rank, world_size)
    -> ordered indices: documented (see `strided_shares`), the reference's, the port's; called for 1, 2, 3, 5 and 20
    processes. In evaluation each image comes once. `trained_on`, {run: {section: indices}}, is what one process trains
    on, in order. `names` is {reference's module: port's}, for gradients, parameters and buffers. With `coefficients`
    "float32" one process of the port may be as far off as the reference's float32 run: PaddlePaddle's own optimizers
    keep them so.

    Refused: processes that cannot come together, and inputs that prove nothing. A port's process that takes more than
    `timeout` seconds fails. PortError: a module of the port that raises when imported.
    """
    check_coefficients(coefficients)
    trained_on = trained_on or {}
    runs = checked_runs(runs, own_statistics, trained_on)
    paths = {"reference": ref, "port": port}
    callables = {who: resolve(path, f"the {who}", who == "port") for who, path in paths.items()}
    alone = {name: it for some in runs.values() for name, it in some.items() if name not in own_statistics}
    if not alone:
        raise UserError("all runs are in own_statistics: name one in which several processes are one")
    if len(shares) not in (0, 3):
        raise UserError("shares must be three functions: documented, of the reference, of the port")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max_workers=2) as pool:
        launched: dict[str, list[Future[Outcome]]] = {"reference": [], "port": []}
        for (count, some), who in product(runs.items(), paths):
            folder = Path(name) / f"{who} {count}"
            folder.mkdir()
            launched[who].append(pool.submit(launch, FRAMEWORKS[who], paths[who], count, some, folder, timeout))
        one, errors = check_one(rung, callables, alone, coefficients, names_back(names))
        several = {}
        for who, futures in launched.items():
            own: dict[str, Any] = {"who": who, "back": names_back(names, who), "own_statistics": own_statistics}
            several[who] = [Processes(**vars(future.result()), **own) for future in futures]
    documented = shares_of(shares[0]) if shares else {}
    taken = rung.observe("share of the images", shares_of, *shares[1:]) if shares else ({}, {})
    for i, who in enumerate(one):
        if not one[who].records[0]:
            continue
        if taken and (shares or trained_on):
            check_shares(rung, one[who], documented, taken[i], trained_on)
        for each in several[who]:
            check_several(rung, one[who], each, errors)
    for ref_processes, port_processes in zip_strict(*several.values()):
        check_lines(rung, ref_processes, port_processes)
    of_ref, of_port = (kept([one[who], *several[who]]) for who in one)
    rung.keep(of_ref, of_port)
