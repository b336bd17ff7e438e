"""Whole training runs of both sides: in float32 by a test of hypotheses, in float64 step for step."""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.base import Backend
from portproof.backends.trace import map_tensors
from portproof.compare import FAIL, Item, Row, Verdict, compare, placed, tensor_item
from portproof.compare.tolerances import SEMANTIC_RTOL, U64, largest, summed_floor, with_floors
from portproof.io.cli import UserError
from portproof.ladder.rung import Rung, on_rung
from portproof.ladder.trajectory import ALPHA, FEATURES, Feature, Record, judge, lacking
from portproof.ladder.workers import last_words, resolve, worker_environment

SIDES = ("reference", "port")
FEWEST = 4  # degrees of freedom of the test: with fewer a limit is more than 20 standard deviations
EVALUATIONS = {"eval": "running", "reestimated_eval": "re-estimated"}
CURVES = {"loss": "losses", "lr": "lr", "training top-1": "right", "top-1": "top1"}

# The growth of rounding is measured: a second run of the reference, in which every input and every parameter moves by
# one unit in the last place before each step. That is one rounding where a step has several hundred, which mostly
# cancel: a faultless port was seen 0.6 to 2.1 times as far from the reference. If GROWTH times it is more than
# TOGETHER, there is nothing that could be compared.
GROWTH = 16.0
TOGETHER = 1e-9
LOSS = Item("loss", "loss")


@contextmanager
def processor_time(rung: Rung, what: str) -> Iterator[None]:
    """Say how long it takes the processors, which on a busy machine is less than the clock says."""

    def used() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    before = used()
    yield
    rung.say(f"{what}: {used() - before:.0f} s of processor time")


# float32


class RunFailed(Exception):
    """One side's runs did not all end: why, in a line; the message is the end of their log."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(log)
        self.reason = reason


def launch(
    paths: Mapping[str, str],
    runs: Mapping[str, Mapping[str, Mapping[str, int]]],
    options: Mapping[str, Any],
    folder: Path,
) -> dict[str, dict[str, Record] | RunFailed]:
    """{side: {name: record}} of `runs` {side: {name: {"seed": ..., "draw": ...}}}, or what a side ended in.

    `paths` names each side's callable. A process with one thread for each, side by side; files go to `folder`.
    """
    processes = {}
    with ExitStack() as stack:
        for side, path in paths.items():
            job = {"run": path, "runs": runs[side], "options": options}
            (folder / f"{side}.json").write_text(json.dumps(job), encoding="utf-8")
            log = stack.enter_context((folder / f"{side}.log").open("wb"))
            command = [sys.executable, "-m", "portproof.ladder.run_worker", str(folder), side]
            # In `folder`, since Python looks for packages in the current one first.
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            processes[side] = subprocess.Popen(command, cwd=folder, env=worker_environment(), **streams)
            stack.callback(processes[side].wait)
            stack.callback(processes[side].kill)  # first: this is what happens to it when the other raises
        for process in processes.values():
            process.wait()
    return {side: _records(folder, side, runs[side], process.returncode) for side, process in processes.items()}


def _records(folder: Path, side: str, names: Mapping[str, Any], status: int) -> dict[str, Record] | RunFailed:
    if status:
        words = last_words(folder / f"{side}.log")
        return RunFailed(words.splitlines()[-1] if status == 1 and words else f"it ended with status {status}", words)
    return {name: dict(np.load(folder / f"{side}.{name}.npz", allow_pickle=False)) for name in names}


def _problem(record: Record) -> str:
    """What is wrong with the shapes of a record, "" if nothing."""
    losses = record.get("losses", np.empty(0))
    if losses.ndim != 1 or losses.size < 3 or losses.dtype.kind != "f":
        return "it has no 'losses' (steps,), floats of 3 steps or more"
    epochs = record.get("lr", record.get("top1", losses)).shape
    if len(epochs) != 1 or not epochs[0] or losses.size % epochs[0]:
        return f"its {losses.size} losses are no equal share for each of the epochs of 'lr' or 'top1', {epochs}"
    shapes = {"right": losses.shape, "top1": epochs, "eval": (3,), "reestimated_eval": (3,), "mirrored_eval": (3,)}
    wrong = [key for key, shape in shapes.items() if key in record and record[key].shape != shape]
    return f"its {wrong[0]!r} has shape {record[wrong[0]].shape}, not {shapes[wrong[0]]}" if wrong else ""


def _check_reference(ref: Sequence[Sequence[Record]]) -> None:
    """Raise UserError unless the reference's records can be judged by."""
    every = sum(map(list, ref), [])
    for record in every:
        if problem := _problem(record):
            raise UserError(f"the record of a run of the reference is not as documented: {problem}")
        if not (np.isfinite(record["losses"]) & (record["losses"] > 0)).all():
            raise UserError("a run of the reference has losses that are no finite numbers above 0: it must learn")
        if {k: a.shape for k, a in record.items()} != {k: a.shape for k, a in every[0].items()}:
            raise UserError("runs of the reference leave records of different keys or shapes: each must leave the same")
    for records in ref:
        if len({record["losses"].tobytes() for record in records}) < len(records):
            raise UserError(
                "runs of the reference with different draws have the same losses: let `draw` seed its random masks, or"
                " where it has none, move its initial weights by a unit in the last place"
            )


@on_rung
def train(
    ref: str,
    port: str,
    *,
    options: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (0,),
    draws: int = 8,
    features: Mapping[str, Feature] = FEATURES,
    alpha: float = ALPHA,
    top1: float | None = None,
    rung: Rung,
) -> None:
    """Whether whole float32 training runs of the port are runs of the reference, and how well both have learned.

    `ref` and `port` are import paths "pkg.mod:name" of callables `run(seed, draw, options) -> dict of arrays`: one run
    from the initial weights and on the batches of `seed`, with the `draw`-th series of random masks, and its record,
    see `trajectory`. Each side gets a process with one thread, side by side; `options`, what can be written as JSON,
    is handed on to both. The reference runs `draws` times for each of `seeds`, the port once.

    Learning rates must be equal. Of the `features` (`trajectory.FEATURES`, `TOP1`) those are judged whose keys the
    reference's records have, so that all together fail a faultless port with probability `alpha`. With `top1`, both
    sides must reach it on average at the end, with re-estimated statistics where there are any. Keeps curves for the
    report where records have "lr".

    Raises UserError for a pair that cannot be imported, a reference that fails, or one whose record is not as
    documented; a port with either fails the rung.
    """
    runs = _plan(seeds, draws)
    for path, side in zip((ref, port), SIDES, strict=True):
        resolve(path, side)
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise UserError(f"options cannot be written as JSON ({error}): they are handed to other processes") from error
    with processor_time(rung, "float32"), tempfile.TemporaryDirectory() as folder:
        done = launch(dict(zip(SIDES, (ref, port), strict=True)), runs, options or {}, Path(folder))
    for failed in (records for records in done.values() if isinstance(records, RunFailed)):
        rung.say(str(failed))
    of_ref, of_port = (done[side] for side in SIDES)
    if isinstance(of_ref, RunFailed):
        raise UserError(f"training runs of the reference {ref!r} failed: {of_ref.reason}") from of_ref
    if isinstance(of_port, RunFailed):
        _fail(rung, "training runs of the port", of_port.reason)
        return
    ref_records = [[of_ref[f"{i}.{k}"] for k in range(draws)] for i in range(len(seeds))]
    port_records = [of_port[f"{i}.0"] for i in range(len(seeds))]
    _check_reference(ref_records)
    for problem in filter(None, map(_problem, port_records)):
        _fail(rung, "record of a run of the port", problem)
        return
    _judge(rung, ref_records, port_records, features, alpha)
    _check_top1(rung, sum(ref_records, []), port_records, top1)
    _keep_curves(rung, ref_records, port_records)


def _plan(seeds: Sequence[int], draws: int) -> dict[str, dict[str, dict[str, int]]]:
    """The runs of each side by name; raises UserError where they are too few to tell anything."""
    if len(set(seeds)) < len(seeds) or len(seeds) * (draws - 1) < FEWEST:
        raise UserError(
            f"seeds {list(seeds)}, draws {draws}: seeds must differ, and seeds * (draws - 1) be {FEWEST} or more"
        )
    return {
        side: {f"{i}.{k}": {"seed": int(seed), "draw": k} for i, seed in enumerate(seeds) for k in range(count)}
        for side, count in zip(SIDES, (draws, 1), strict=True)
    }


def _fail(rung: Rung, what: str, reason: str) -> None:
    rung.check(Verdict(what, [Row(Item(what), FAIL, reason=reason)]), group=str)


def _judge(rung: Rung, ref: list, port: list, features: Mapping[str, Feature], alpha: float) -> None:
    """The learning rates and the test."""
    rate = Item("lr", "lr")
    rates = [{rate: records["lr"]} if "lr" in records else {} for records in (ref[0][0], port[0])]
    if rates[0]:
        rung.check(compare(*rates, {rate: 0.0}, title="learning rate of each epoch"), group=str)
    missing = {name: lacking(feature, sum(ref, [])) for name, feature in features.items()}
    judged = {name: feature for name, feature in features.items() if not missing[name]}
    steps = [record["losses"].size for record in (ref[0][0], port[0])]
    if steps[0] != steps[1]:
        _fail(rung, "steps of a run", "reference {}, port {}".format(*steps))
    title = f"float32, {len(port)} runs of the port among {len(port) * len(ref[0])} of the reference"
    rung.check(judge(ref, port, judged, title, alpha), group=str)
    rung.say(f"  each limit is what a faultless port exceeds once in {len(judged) / alpha:.0f} runs")
    for key in dict.fromkeys(filter(None, missing.values())):
        names = ", ".join(name for name, lack in missing.items() if lack == key)
        rung.say(f"  not judged, since the reference's record has no {key}: {names}")


def _check_top1(rung: Rung, ref: list, port: list, needed: float | None) -> None:
    """Say what every run has reached; the mean at the end must be `needed`."""
    reached = {}
    for who, records in zip(SIDES, (ref, port), strict=True):
        for what, statistics in EVALUATIONS.items():
            if all(what in record for record in records):
                top1 = np.array([record[what][1] for record in records])
                rung.say(f"  top-1 of the {who}, {statistics} statistics: {', '.join(f'{one:.2%}' for one in top1)}")
                reached[Item(f"{who}, mean top-1", "metric")] = top1.mean()
    if needed is None:
        return
    whole = {Item(f"{who}, mean top-1", "metric"): np.float64(1) for who in SIDES}
    if next(iter(whole)) not in reached:
        raise UserError(f"top1={needed}, but the reference's record has no 'eval' (loss, top-1, samples)")
    title = f"top-1 in eval mode (as the port) against 1 (as the reference), {needed:.0%} needed"
    rung.check(compare(whole, reached, dict.fromkeys(whole, 1 - needed), title=title), group=str)


def _keep_curves(rung: Rung, ref: list, port: list) -> None:
    """Each seed's curves by epoch, for the report; those of the reference's first run and the port's for the files."""
    for i, (records, record) in enumerate(zip(ref, port, strict=True)):
        sides = [*records, record]
        for what, key in CURVES.items():
            if all({key, "lr"} <= side.keys() for side in sides):
                *ours, theirs = (side[key].reshape(side["lr"].size, -1).mean(axis=1) for side in sides)
                rung.curves[f"seed {i}, {what}"] = np.array(ours), theirs
                rung.keep({f"seed {i}, {what}": ours[0]}, {f"seed {i}, {what}": theirs})


# float64


class Batches:
    """What a run takes its batches from, `batches(loader, model)`: the loader's, with floats in the model's precision.

    With `jitter` these floats, and all parameters of the model, move by one unit in the last place before each step.
    """

    def __init__(self, backend: Backend, jitter: np.random.Generator | None = None) -> None:
        self.backend, self.jitter = backend, jitter
        self.before: dict[str, np.ndarray] = {}  # the parameters before the first step

    def __call__(self, loader: Any, model: Any) -> "Epoch":
        return Epoch(self, loader, model)

    def moved(self, array: np.ndarray) -> np.ndarray:
        """Each value by one unit in the last place, up or down."""
        if self.jitter is None:
            return array
        return array * (1 + self.jitter.choice([-2 * U64, 2 * U64], array.shape))

    def given(self, tensor: Any, model: Any) -> Any:
        """What the model gets for one tensor or array of a batch."""
        array = tensor if isinstance(tensor, np.ndarray) else self.backend.to_array(tensor)
        if array.dtype.kind == "f":
            array = self.moved(array.astype(np.float64))
        return self.backend.to_tensor(array, model)


class Epoch:
    """The batches of a loader, once; see Batches."""

    def __init__(self, batches: Batches, loader: Any, model: Any) -> None:
        self.batches, self.loader, self.model = batches, loader, model

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches, framework = self.batches, self.batches.backend
        batches.before = batches.before or framework.parameters(self.model)
        for batch in self.loader:
            given = map_tensors(
                batch,
                lambda value: isinstance(value, np.ndarray) or framework.framework.is_tensor(value),
                lambda tensor: batches.given(tensor, self.model),
            )
            for parameter in self.model.parameters() if batches.jitter is not None else ():
                framework.set_value(parameter, batches.moved(framework.to_array(parameter)))
            yield given


def _fp64_run(
    framework: Backend, run: Callable[[Batches], tuple[Any, Sequence[float]]], jitter: np.random.Generator | None = None
) -> dict[Item, np.ndarray]:
    """The losses of all steps, and every parameter and buffer behind them; ValueError where nothing was trained."""
    batches = Batches(framework, jitter)
    with framework.exact_constants():
        model, losses = run(batches)
    after = framework.parameters(model)
    if not batches.before:
        raise ValueError("it takes no batch from `batches(loader, model)`")
    losses = np.array(losses, np.float64)
    if not losses.size or all(np.array_equal(after[name], array) for name, array in batches.before.items()):
        raise ValueError(f"after {losses.size} losses no parameter has moved")
    return {
        LOSS: losses,
        **{tensor_item(name, "parameter"): array for name, array in after.items()},
        **{tensor_item(name, "buffer"): array for name, array in framework.buffers(model).items()},
    }


@on_rung
def train_fp64(
    ref: Callable[[Batches], tuple[Any, Sequence[float]]],
    port: Callable[[Batches], tuple[Any, Sequence[float]]],
    *,
    names: Mapping[str, str] | None = None,
    what: str = "",
    seed: int = 0,
    rung: Rung,
) -> None:
    """Both sides' training in float64, step for step: every loss, and at the end every parameter and buffer.

    `ref` and `port` take `batches` and return (model, losses): the model, in float64 and without dropout, after a run
    whose batches are those of `batches(loader, model)`, and each step's loss as a float. A loader gives tensors or
    arrays in tuples, lists or dicts. Both begin with the same weights, and `ref` runs twice. `names` are the
    reference's modules and the port's, where they differ; `what` says what is trained on. The limit is GROWTH times
    how far the reference is from itself when all moves by one unit in the last place before each step.

    Raises UserError for a reference that raises, trains nothing, or is not in float64; a port that raises or trains
    nothing fails the rung. Refused if the reference magnifies rounding so that there is nothing to compare.
    """
    with processor_time(rung, "float64"):
        fp64_ref = rung.of_ref("training in float64", _fp64_run, backend("torch"), ref)
        floats = {item: array for item, array in fp64_ref.items() if array.dtype.kind == "f"}
        if unknown := set(names or {}) - {item.module for item in fp64_ref}:
            raise UserError(f"names has {min(unknown)!r}, and the reference has no module with weights of that name")
        for item, array in floats.items():
            if array.dtype != np.float64:
                raise UserError(f"the reference's {item} is {array.dtype}: train its model in float64")
        jitter = np.random.default_rng([seed, 7])
        moved = rung.of_ref("training in float64", _fp64_run, backend("torch"), ref, jitter)
        if not (rtol := _rtol(rung, fp64_ref, moved)):
            return
        port_items = rung.of_port("training in float64", _fp64_run, backend("paddle"), port)
        if port_items is None:
            return
        steps = fp64_ref[LOSS].size
        limits = {item: rtol * largest(array) if item in floats else 0.0 for item, array in fp64_ref.items()}
        limits, zeros = with_floors(limits, dict.fromkeys(floats, summed_floor(steps)), fp64_ref)
        there = {"mode": "train", "dtype": "float64"}
        back = {mate: name for name, mate in (names or {}).items()}
        port_items = {_renamed(item, back): array for item, array in port_items.items()}
        sides = (placed(side, **there) for side in (fp64_ref, port_items, limits))
        title = f"train mode, float64, {steps} steps" + f" of {what}" * bool(what)
        verdict = compare(*sides, title=title, zeros=placed(dict.fromkeys(zeros), **there))
        rung.check(verdict, group=lambda item: item.kind)


def _rtol(rung: Rung, fp64_ref: dict[Item, np.ndarray], moved: dict[Item, np.ndarray]) -> float:
    """The limit as a share of each item's largest value; 0, and the rung is refused, where nothing can be compared."""
    if not all(np.isfinite(array).all() for side in (fp64_ref, moved) for array in side.values()):
        rung.refuse("the reference's training in float64 gives NaN or infinity: lower its learning rate")
        return 0.0
    steps = fp64_ref[LOSS].size
    floor = summed_floor(steps)  # such as the gradient of a bias that the next batch norm removes
    scales = {item: largest(array) for item, array in fp64_ref.items() if largest(array) > floor}
    growths = {item: largest(moved[item] - fp64_ref[item]) / scale for item, scale in scales.items()}
    worst = max(growths, key=growths.get)
    rtol = max(SEMANTIC_RTOL, GROWTH * growths[worst])
    rung.say(
        f"float64: moved by one unit in the last place before each step, the reference is {growths[worst]:.1e} of the "
        f"largest value from itself after {steps} steps, at {worst}; {GROWTH:g} times that, {rtol:.1e}, is the limit"
    )
    if rtol > TOGETHER:
        rung.refuse(f"the reference does not stay within {TOGETHER / GROWTH:.0e} of itself over {steps} steps")
        return 0.0
    return rtol


def _renamed(item: Item, back: Mapping[str, str]) -> Item:
    """The port's item under the reference's name."""
    if item.module not in back:
        return item
    return tensor_item(".".join(filter(None, (back[item.module], item.leaf))), item.kind)
