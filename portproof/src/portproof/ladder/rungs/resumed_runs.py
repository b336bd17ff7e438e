"""Runs that are saved and go on in a new process, against runs in one go: see trainers.py for what both sides are.

On each side both have to be equal bit for bit, in all that trainers.py lists. A random state alone decides nothing:
where nothing else differs, it is left out, and so are Python's and NumPy's where the run does not seed them. Between
the sides, in float64, losses, learning rates, parameters, buffers and what `state()` returns, random states aside, are
compared within limits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from portproof.compare import FAIL, Item, Items, Row, Verdict, compare, placed, tensor_item
from portproof.compare.ruler import distances, exact_atol
from portproof.ladder.pairs.pair import MODES
from portproof.ladder.rung import (
    FRAMEWORKS,
    QUIET,
    Ended,
    Rung,
    check_coefficients,
    names_back,
    on_rung,
    processor_time,
    reference_name,
)
from portproof.ladder.rungs.fp64_runs import check_fp64, growth_of, judge_fp64
from portproof.ladder.rungs.runs import records_of
from portproof.ladder.rungs.trainers import AT_EACH_STEP, KINDS, MODES_OF_STEPS
from portproof.ladder.workers import check_paths, launch_runs
from portproof.report.text import section_of
from sturdyio.cli import UserError

RESTORED = ("schedule", "optimizer", "parameter", "buffer")  # which training changes and a file has to hold
HINTS = {
    "sampler": "the epoch begun anew; batches that were drawn already drawn again",
    "mode": "the model left in eval mode, where training does not set train mode itself",
    "random": "the generators' states not saved and restored, nor seeded by where the run is",
    "schedule": "the schedule's state not saved, or not loaded",
    "lr": "the schedule begun anew",
    "optimizer": "the optimizer's state (momentum, step counts) not saved, or not loaded",
    "parameter": "weights left out of the file, or saved in another precision",
    "buffer": "buffers left out of the file",
    "loss": "something that is not compared: a scaler, an average of weights, a generator of its own",
}
SEED, LOADED = "before saving", "after loading"  # sections: two runs of one seed; no step yet
RUN = "portproof.ladder.rungs.trainers:part_of_run"


class _Stages(dict):
    """{stage: its items}, causes first, from a record of trainers.py; `back` as in `reference_name`."""

    def __init__(self, record: Mapping[str, np.ndarray], back: Mapping[str, str]) -> None:
        super().__init__()
        for path, array in record.items():
            stage, _, key = path.partition("/")
            kind, _, name = key.partition("/")
            is_tensor = kind in ("parameter", "buffer")
            item = tensor_item(reference_name(name, back), kind) if is_tensor else Item(key, kind)
            self.setdefault(stage, {})[item] = array
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

    @property
    def kinds_as_new(self) -> set[str]:
        """Those in which what was saved is what a new run has."""
        rows = _rows(self.saved_state, self.resumed["new"])
        return {row.item.kind for row in rows} - {row.item.kind for row in rows if row.status == FAIL}

    def verdict(self, title: str) -> Verdict:
        """If it fails it begins with what differs right after loading, of the kinds that differ in the end, too.

        Else a random state that differs is left out: it has had no effect.
        """
        saved, whole = self.saved["end"], self.whole["end"]
        at_each_step = [item for item in whole if item.kind in AT_EACH_STEP and item in saved]
        before = {item: whole[item][: len(saved[item])] for item in at_each_step}
        after = whole | {item: whole[item][len(saved[item]) :] for item in at_each_step}
        found = _rows(before, {item: saved[item] for item in at_each_step}, section=SEED, kind="seed")
        # Python's and NumPy's begin otherwise in each process if the run does not seed them.
        own = [Item(f"random/{name}", "random") for name in ("Python", "NumPy")]
        unseeded = [item for item in own if self.saved["new"][item] != self.resumed["new"][item]]
        end = [row for row in _rows(after, self.resumed["end"]) if row.item not in unseeded]
        # A generator that is seeded by where the run is need not be restored by loading.
        failed = {row.item.kind for row in end if row.status == FAIL and row.item.kind != "random"}
        if failed:
            rows = _rows(self.saved_state, self.resumed["loaded"], section=LOADED)
            found += [row for row in rows if row.status == FAIL and row.item.kind in failed]
        else:
            end = [row for row in end if row.status != FAIL]
        return Verdict(title, [*found, *end], hints=HINTS)


def _calls(
    who: str, trainer: str, run: Mapping[str, Any], steps: int, file: str, coefficients: str
) -> tuple[dict, dict]:
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
        saving |= {"exact": call("float64", steps), "moved": call("float64", steps, again="moved")}
        saving |= {"rounded": call("float64", steps, again="rounded")} if coefficients == "float32" else {}
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
    coefficients: str = "float32",
    rung: Rung = QUIET,
) -> None:
    """Compare a run of `steps` batches in one go with one saved after half of them, and resumed in a new process.

    `ref` and `port` are import paths "pkg.mod:name" of callables as trainers.py describes them; `options` are JSON. On
    each side both runs must be equal bit for bit; in float64 the port's resumed run must be the reference's run in one
    go, within the limits of `train_fp64`; with `coefficients` "float32" its optimizer may round them to that, as
    PaddlePaddle's own do. `names` is {reference's module: port's}. Choose `steps` so that the file is written within an
    epoch but the first, and the resumed run reaches the next.

    Refused: a reference whose resumed run is not its run in one go. Raises UserError, MachineError and PortError as
    `train` does.
    """
    if steps < 2:
        raise UserError(f"steps {steps}: 2 or more, of which the second half is resumed")
    check_coefficients(coefficients)
    paths = {"reference": ref, "port": port}
    check_paths(paths, options)
    half = steps // 2
    found: dict[str, dict[str, _Stages]] = {who: {} for who in paths}
    with processor_time(rung, "resumed runs"), tempfile.TemporaryDirectory() as name:
        run = {"seed": int(seed), "options": options or {}}
        calls = {who: _calls(who, path, run, steps, str(Path(name, who)), coefficients) for who, path in paths.items()}
        for part in range(2):
            folder = Path(name, f"part {part}")
            folder.mkdir()
            done = launch_runs(dict.fromkeys(paths, RUN), {who: both[part] for who, both in calls.items()}, folder)
            for who, records in records_of(rung, done, ref).items():
                found[who] |= {run: _Stages(record, names_back(names, who)) for run, record in records.items()}
    of_ref, of_port = (_Side(who, *(found[who][run] for run in ("saved", "resumed", "whole"))) for who in paths)
    _judge(rung, of_ref, of_port, half, steps)
    exact, moved = (found["reference"][run]["end"] for run in ("exact", "moved"))
    saved, port_items = (found["port"][run]["end"] for run in ("exact saved", "exact resumed"))
    _compare_modes(rung, [exact], [saved, port_items])
    at_each_step = [item for item in saved if item.kind in AT_EACH_STEP and item in port_items]
    port_items = port_items | {item: np.concatenate([saved[item], port_items[item]]) for item in at_each_step}
    check_fp64(exact)
    growth = growth_of(rung, exact, moved)
    title = f"train mode, float64, {steps} steps, the port resumed after {half}, the reference in one go"
    rounded = [distances(exact, run) for run in found["reference"].get("rounded", {}).values()]
    judge_fp64(rung, exact, port_items, growth, title, rounded)


def _compare_modes(rung: Rung, ref: Sequence[dict], port: Sequence[dict]) -> None:
    """Fail where the port trains in another mode; `ref` and `port` are the parts of a run, which lose their modes."""
    item = Item(MODES_OF_STEPS, "mode")
    ref_modes, port_modes = (np.concatenate([part.pop(item) for part in parts]) for parts in (ref, port))
    for step, (of_ref, of_port) in enumerate(zip(ref_modes, port_modes)):
        if of_ref != of_port:
            words = f"reference {MODES[int(of_ref)]}, port {MODES[int(of_port)]}, first in step {step}"
            rung.fail("mode of the model", words)
            return


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
    if unchanged := [kind for kind in RESTORED if kind in ref.kinds_as_new]:
        rung.say(
            f"  not shown, since a new run has the same after {half} steps: {', '.join(unchanged)}; take more steps"
        )
    rung.check(port.verdict(title.format("port", half, steps)), section_of)
    # PyTorch's optimizers have a state even where nothing is kept from step to step.
    for kind in kinds["reference"] - kinds["port"] - {"optimizer"}:
        rung.fail(f"{kind} of the port's trainer", "it has none of this kind, and the reference's has")
