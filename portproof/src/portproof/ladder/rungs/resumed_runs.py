"""Runs that are saved and go on in a new process, against runs in one go.

Each side is a callable `trainer(seed, options, dtype)`, called with these keywords. It returns an object with

    model, optimizer    which are read through the kit's backend
    schedule            if there is one, with state_dict()
    train(steps)        trains on so many batches, from where it is, and returns the loss of each; called once
    save(path)          writes all of it to this file
    load(path)          brings a new object to where the saved one was
    state()             if there is more to compare: {"KIND/NAME": array or number}, of the kinds below

All that is drawn comes from `seed`. With `dtype` "float32" the run is as it is, with its dropout; with "float64" model
and losses are in float64, and there is no dropout. The kit casts what the model is called with.

    sampler     digests of what the model is called with, at each step
    random      states of the generators: the framework's, Python's, NumPy's
    mode        the training flag of each module
    schedule    the state of `schedule`
    lr          the learning rate at each step
    optimizer   the state of `optimizer`
    parameter, buffer
    loss        of each step

The run in one go and the resumed one have to be equal bit for bit in all of these, on each side. A random state alone
decides nothing: where nothing else differs, it is left out. Between the sides, in float64, losses, learning rates,
parameters, buffers and what `state()` returns, random states aside, are compared within limits.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.trace import map_tensors, tensors_at
from portproof.compare import FAIL, Item, Items, Row, Verdict, compare, placed, tensor_item
from portproof.compare.ruler import exact_atol
from portproof.io.cli import resolve
from portproof.ladder.rung import Ended, Rung, on_rung, processor_time, reference_name
from portproof.ladder.rungs.batches import arrays_at
from portproof.ladder.rungs.fp64_runs import Batches, check_fp64, growth_of, judge_fp64
from portproof.ladder.rungs.runs import records_of
from portproof.ladder.workers import check_paths, launch_runs
from portproof.report.text import section_of
from sturdyio.cli import UserError

# Causes before what they change, so that the first difference is a cause.
KINDS = ("sampler", "random", "mode", "schedule", "lr", "optimizer", "parameter", "buffer", "loss")
AT_EACH_STEP = ("sampler", "lr", "loss")
RESTORED = ("schedule", "optimizer", "parameter", "buffer")  # which training changes and a file has to hold
HINTS = {
    "sampler": "the epoch begun anew; batches that were drawn already drawn again",
    "random": "the generators' states not saved and restored, nor seeded by where the run is",
    "mode": "the model left in eval mode, where training does not set train mode itself",
    "schedule": "the schedule's state not saved, or not loaded",
    "lr": "the schedule begun anew",
    "optimizer": "the optimizer's state (momentum, step counts) not saved, or not loaded",
    "parameter": "weights left out of the file, or saved in another precision",
    "buffer": "buffers left out of the file",
    "loss": "something that is not compared: a scaler, an average of weights, a generator of its own",
}
SEED, LOADED = "before saving", "after loading"  # sections: two runs of one seed; no step yet
RUN = "portproof.ladder.rungs.resumed_runs:part_of_run"
FRAMEWORKS = {"reference": "torch", "port": "paddle"}


def _digest(arrays: Iterable[np.ndarray]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


@dataclass
class _Watched:
    """A trainer's model, optimizer and schedule, and what the model was called with at each step."""

    trainer: Any
    batches: Batches
    exact: bool  # in float64
    called_with: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        own, model = self.batches.backend, self.trainer.model
        if not isinstance(model, own.module_class):
            raise TypeError(f"its `model` is a {type(model).__name__}, no {own.module_class_name}")
        own.runs.hook_before(model, self._before)

    def _before(self, model: Any, args: tuple, kwargs: Mapping[str, Any]) -> tuple | None:
        own = self.batches.backend
        is_tensor = own.framework.is_tensor
        if own.framework.is_grad_enabled():  # no evaluation
            tensors = tensors_at((args, kwargs), is_tensor)
            self.called_with.append(_digest(map(own.to_array, tensors.values())))
            self.rates.append(own.training.learning_rate(self.trainer.optimizer))
            self.batches.move(model)
        if not self.exact:
            return None
        return map_tensors((args, kwargs), is_tensor, partial(self.batches.given, model=model))

    def train(self, steps: int) -> dict[str, Any]:
        """The items of each step."""
        losses = np.asarray(self.trainer.train(steps), np.float64)
        if losses.shape != (steps,):
            raise ValueError(f"train({steps}) returned losses of shape {losses.shape}, not ({steps},)")
        if not self.rates:
            raise ValueError("train() never calls its `model`")
        digests = {} if self.exact else {"sampler/model inputs": self.called_with}
        return digests | {"lr": np.array(self.rates), "loss": losses}

    def state(self) -> dict[str, Any]:
        """What is there at this moment; in float64 only what both sides have."""
        arrays = self.batches.backend.arrays_of(self.trainer.model)
        found = {} if self.exact else self._of_framework()
        found |= {f"parameter/{name}": array for name, array in arrays.parameters().items()}
        found |= {f"buffer/{name}": array for name, array in arrays.buffers().items()}
        for key, array in self.trainer.state().items() if hasattr(self.trainer, "state") else ():
            kind = key.partition("/")[0]
            if kind not in KINDS:
                raise ValueError(f"state() has {key!r}, whose kind is none of {', '.join(KINDS)}")
            if kind != "random" or not self.exact:
                found[key] = np.atleast_1d(array) if kind in AT_EACH_STEP else array
        return found

    def _of_framework(self) -> dict[str, Any]:
        trainer, own = self.trainer, self.batches.backend
        found = {
            "random/framework": own.runs.next_random(),
            "random/Python": _digest([np.array(repr(random.getstate()))]),
            "random/NumPy": _digest(map(np.asarray, np.random.get_state())),  # noqa: NPY002
        }
        found |= {f"mode/{name or 'model'}": one.training for name, one in own.layers.named_modules(trainer.model)}
        if hasattr(trainer, "schedule"):
            found |= arrays_at(trainer.schedule.state_dict(), "schedule/")
        for name, state in own.training.optimizer_state(trainer.optimizer, trainer.model).items():
            found |= arrays_at(state, f"optimizer/{name}")
        return found


def part_of_run(
    trainer: str,
    framework: str,
    made_with: Mapping[str, Any],
    steps: int,
    loaded_from: str = "",
    saved_to: str = "",
    moved: bool = False,
) -> dict[str, Any]:
    """What a process does: train, perhaps from a file, perhaps to one -> {STAGE/KIND/NAME: array}.

    `made_with` are the trainer's arguments. Stages are "new", "loaded" and "end".
    """
    own, exact = backend(framework), made_with["dtype"] == "float64"
    jitter = np.random.default_rng([made_with["seed"], 7]) if moved else None
    stages = {}
    with own.runs.exact_constants() if exact else nullcontext():
        watched = _Watched(resolve(trainer, "the trainer")(**made_with), Batches(own, jitter), exact)
        stages["new"] = watched.state()
        if loaded_from:
            watched.trainer.load(loaded_from)
            stages["loaded"] = watched.state()
        at_each_step = watched.train(steps)
        stages["end"] = at_each_step | watched.state()
        if saved_to:
            watched.trainer.save(saved_to)
    return {
        f"{stage}/{key}": array for stage, arrays in stages.items() for key, array in arrays.items() if np.size(array)
    }


class _Stages(dict):
    """{stage: its items}, causes first, from a record of `part_of_run`; `back` as in `reference_name`."""

    def __init__(self, record: Mapping[str, np.ndarray], back: Mapping[str, str]) -> None:
        super().__init__(new={}, loaded={}, end={})
        for path, array in record.items():
            stage, _, key = path.partition("/")
            kind, _, name = key.partition("/")
            is_tensor = kind in ("parameter", "buffer")
            item = tensor_item(reference_name(name, back), kind) if is_tensor else Item(key, kind)
            self[stage][item] = array
        for stage, items in self.items():
            self[stage] = dict(sorted(items.items(), key=lambda pair: KINDS.index(pair[0].kind)))


def _rows(ref: Items, port: Items, **facts: str) -> list[Row]:
    """Bit for bit; `facts` are fields of the items."""
    ref, port = placed(ref, **facts), placed(port, **facts)
    return compare(ref, port, exact_atol(ref)).rows


@dataclass(frozen=True)
class _Side:
    """The float32 runs of a side: saved half-way, resumed from there, in one go."""

    who: str
    saved: _Stages
    resumed: _Stages
    whole: _Stages

    @property
    def saved_state(self) -> dict[Item, np.ndarray]:
        return {item: array for item, array in self.saved["end"].items() if item.kind not in AT_EACH_STEP}

    def kinds_kept(self, stage: str) -> set[str]:
        """Those in which the resumed run, "new" or "loaded", is what was saved."""
        rows = _rows(self.saved_state, self.resumed[stage])
        return {row.item.kind for row in rows} - {row.item.kind for row in rows if row.status == FAIL}

    def verdict(self, title: str, restored: Collection[str] = KINDS) -> Verdict:
        """If it fails it begins with what differs after loading, in the kinds `restored`.

        Else a random state that differs is left out: it has had no effect.
        """
        saved, whole = self.saved["end"], self.whole["end"]
        at_each_step = [item for item in whole if item.kind in AT_EACH_STEP and item in saved]
        before = {item: whole[item][: len(saved[item])] for item in at_each_step}
        after = whole | {item: whole[item][len(saved[item]) :] for item in at_each_step}
        found = _rows(before, {item: saved[item] for item in at_each_step}, section=SEED, kind="seed")
        end = _rows(after, self.resumed["end"])
        if any(row.status == FAIL and row.item.kind != "random" for row in end):
            rows = _rows(self.saved_state, self.resumed["loaded"], section=LOADED)
            found += [row for row in rows if row.status == FAIL and row.item.kind in restored]
        else:
            end = [row for row in end if row.status != FAIL]
        return Verdict(title, [*found, *end], hints=HINTS)


def _calls(who: str, trainer: str, run: Mapping[str, Any], steps: int, file: str) -> tuple[dict, dict]:
    """What a process calls that saves, and then one that resumes; `run` has all arguments but `dtype`."""
    half = steps // 2

    def call(dtype: str, steps: int, **more: Any) -> dict[str, Any]:
        own = {"trainer": trainer, "framework": FRAMEWORKS[who], "made_with": {**run, "dtype": dtype}}
        return {**own, "steps": steps, **more}

    saving = {"saved": call("float32", half, saved_to=f"{file}_float32")}
    resuming = {"resumed": call("float32", steps - half, loaded_from=f"{file}_float32")}
    if who == "port":
        # In both processes the second: PaddlePaddle's files hold names that are counted on from model to model.
        saving["exact saved"] = call("float64", half, saved_to=f"{file}_float64")
        resuming["exact resumed"] = call("float64", steps - half, loaded_from=f"{file}_float64")
    else:
        saving |= {"exact": call("float64", steps), "moved": call("float64", steps, moved=True)}
    return {**saving, "whole": call("float32", steps)}, resuming


@on_rung
def resume(
    ref: str,
    port: str,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    steps: int = 8,
    names: Mapping[str, str] | None = None,
    rung: Rung,
) -> None:
    """Compare a run of `steps` batches in one go with one saved after half of them, and resumed in a new process.

    `ref` and `port` are import paths "pkg.mod:name" of callables as in the module's docstring; `options` are JSON. On
    each side both runs must be equal bit for bit; in float64 the port's resumed run must be the reference's run in one
    go, within the limits of `train_fp64`. `names` is {reference's module: port's}. Choose `steps` so that the file is
    written in the middle of an epoch but the first, and the resumed run reaches the next.

    Refused: a reference whose resumed run is not its run in one go. Raises UserError, MachineError and PortError as
    `train` does.
    """
    if steps < 2:
        raise UserError(f"steps {steps}: 2 or more, of which the second half is resumed")
    paths = {"reference": ref, "port": port}
    check_paths(paths, options)
    back = {port_name: name for name, port_name in (names or {}).items()}
    half, found = steps // 2, {who: {} for who in paths}
    with processor_time(rung, "resumed runs"), tempfile.TemporaryDirectory() as name:
        run = {"seed": int(seed), "options": options or {}}
        calls = {who: _calls(who, path, run, steps, str(Path(name, who))) for who, path in paths.items()}
        for part in range(2):
            folder = Path(name, f"part {part}")
            folder.mkdir()
            done = launch_runs(dict.fromkeys(paths, RUN), {who: both[part] for who, both in calls.items()}, folder)
            for who, records in records_of(rung, done, ref).items():
                names_back = back if who == "port" else {}
                found[who] |= {run: _Stages(record, names_back) for run, record in records.items()}
    sides = [_Side(who, *(found[who][run] for run in ("saved", "resumed", "whole"))) for who in paths]
    _judge(rung, *sides, half, steps)
    exact, moved = (found["reference"][run]["end"] for run in ("exact", "moved"))
    saved, port_items = (found["port"][run]["end"] for run in ("exact saved", "exact resumed"))
    at_each_step = [item for item in saved if item.kind in AT_EACH_STEP and item in port_items]
    port_items = port_items | {item: np.concatenate([saved[item], port_items[item]]) for item in at_each_step}
    check_fp64(exact, names)
    growth = growth_of(rung, exact, moved)
    title = f"train mode, float64, {steps} steps, the port resumed after {half}, the reference in one go"
    judge_fp64(rung, exact, port_items, growth, title)


def _judge(rung: Rung, ref: _Side, port: _Side, half: int, steps: int) -> None:
    """Bit for bit, each side for itself."""
    parameters = [item for item in ref.whole["end"] if item.kind == "parameter"]
    if all(np.array_equal(ref.whole["end"][item], ref.saved["end"].get(item)) for item in parameters):
        raise UserError(f"the last {steps - half} steps of the reference move no parameter: it must train")
    title = "{}, resumed after {} of {} steps (as the port) against its run in one go (as the reference), float32"
    of_ref = ref.verdict(title.format("reference", half, steps))
    if row := next((row for row in of_ref.rows if row.status == FAIL), None):
        cause = HINTS.get(row.item.kind, "draws that do not come from `seed`, or operations that are not deterministic")
        values = row.reason or f"max|d| {row.difference:.1e}"
        rung.refuse(
            f"the reference is not itself again, first {row.name} ({values}); usual causes: {cause}", of_ref.title
        )
        raise Ended
    rung.check(of_ref, section_of)
    kinds = {side.who: {item.kind for item in side.whole["end"]} for side in (ref, port)}
    if lacking := [kind for kind in KINDS if kind not in kinds["reference"]]:
        rung.say(f"  not compared, since the reference has none: {', '.join(lacking)}")
    if unchanged := [kind for kind in RESTORED if kind in ref.kinds_kept("new")]:
        rung.say(
            f"  not shown, since a new run has the same after {half} steps: {', '.join(unchanged)}; take more steps"
        )
    rung.check(port.verdict(title.format("port", half, steps), ref.kinds_kept("loaded")), section_of)
    # PyTorch's optimizers have a state even where nothing is kept from step to step.
    for kind in kinds["reference"] - kinds["port"] - {"optimizer"}:
        rung.fail(f"{kind} of the port's trainer", "it has none of this kind, and the reference's has")
