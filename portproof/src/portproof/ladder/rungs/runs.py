"""Whole float32 training runs of both sides, judged by the test in trajectory.py."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from portproof.compare import Item
from portproof.ladder.rung import QUIET, Ended, Rung, on_rung, processor_time
from portproof.ladder.statistics.trajectory import ALPHA, FEATURES, KEYS, TOP1, Feature, Record, judge, lacking
from portproof.ladder.workers import Outcome, check_paths, launch_runs
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

FEWEST = 4  # degrees of freedom: with fewer a limit is more than 20 standard deviations
EVALUATIONS = {"eval": "running", "reestimated_eval": "re-estimated"}
CURVES = {"loss": "losses", "lr": "lr", "training top-1": "right", "top-1": "top1"}


def _problem(record: Record) -> str:
    texts = [name for name, array in record.items() if array.dtype.kind == "U"]
    if texts:
        return f"it has {texts[0]!r} with dtype {record[texts[0]].dtype}, not an array of numbers"
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
            same = "runs of the reference with different draws have the same losses"
            masks = "let `draw` seed its random masks, or where it has none, move its initial weights by one ulp"
            raise UserError(f"{same}: {masks}")


def calls_of(runs: Mapping[str, Sequence[tuple[int, int]]], options: Mapping[str, Any]) -> dict[str, dict]:
    """What `launch_runs` calls for {side: [(seed, draw), ...]}; the names are these pairs."""
    return {
        side: {(seed, draw): {"seed": seed, "draw": draw, "options": options} for seed, draw in pairs}
        for side, pairs in runs.items()
    }


def records_of(rung: Rung, done: Mapping[str, Outcome], ref: str) -> dict[str, dict[Any, Record]]:
    """{side: its records by name}; if the port has failed, the rung fails and ends.

    Raises UserError if the reference, called `ref`, has failed.
    """
    for outcome in done.values():
        if outcome.reason:
            rung.say(outcome.log)
    if reason := done["reference"].reason:
        raise UserError(f"training runs of the reference {ref!r} failed: {reason}")
    if reason := done["port"].reason:
        rung.fail("training runs of the port", reason)
        raise Ended
    return {side: outcome.records[0] for side, outcome in done.items()}


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
    rung: Rung = QUIET,
) -> None:
    """Test whether the port's whole float32 training runs are runs of the reference, and how well both learn.

    `ref` and `port` are import paths "pkg.mod:name" of callables `run(seed, draw, options) -> dict of arrays`: one run
    from the initial weights and on the batches of `seed`, with the `draw`-th series of random masks. See `trajectory`
    for the record. Each side gets a process with one thread, side by side. `options` are JSON. The reference runs
    `draws` times for each of `seeds`, the port once.

    Learning rates must be equal. Of the `features` (`trajectory.FEATURES`, `TOP1`) those are judged whose keys the
    reference's records have; together they fail a faultless port with probability `alpha`. With `top1` both sides must
    reach it on average at the end, with re-estimated statistics where there are any.

    Raises UserError where a run does, MachineError for what the machine lacks, and PortError for a module of the port
    that raises when imported.
    """
    if len(set(seeds)) < len(seeds) or len(seeds) * (draws - 1) < FEWEST:
        raise UserError(
            f"seeds {list(seeds)}, draws {draws}: seeds must differ, and seeds * (draws - 1) be {FEWEST} or more"
        )
    paths = {"reference": ref, "port": port}
    check_paths(paths, options)
    seeds = [int(seed) for seed in seeds]
    runs = {"reference": list(product(seeds, range(draws))), "port": [(seed, 0) for seed in seeds]}
    with processor_time(rung, "float32"), tempfile.TemporaryDirectory() as folder:
        done = launch_runs(paths, calls_of(runs, options or {}), Path(folder))
    of_ref, of_port = (list(records.values()) for records in records_of(rung, done, ref).values())
    by_seed = [of_ref[i : i + draws] for i in range(0, len(of_ref), draws)]
    _check_reference(by_seed)
    if problem := next(filter(None, map(_problem, of_port)), ""):
        rung.fail("record of a run of the port", problem)
        return
    _judge(rung, by_seed, of_port, features, alpha)
    _check_top1(rung, {"reference": of_ref, "port": of_port}, top1)
    _keep_curves(rung, by_seed, of_port)


def _judge(rung: Rung, ref: list, port: list, features: Mapping[str, Feature], alpha: float) -> None:
    both = ref[0][0], port[0]
    if "lr" in ref[0][0]:
        rates = [{Item("lr", "lr"): record["lr"]} if "lr" in record else {} for record in both]
        rung.compare(rates[0], rates[1], title="learning rate of each epoch")
    steps, port_steps = (record["losses"].size for record in both)
    if steps != port_steps:
        rung.fail("steps of a run", f"reference {steps}, port {port_steps}")
    missing = {name: lacking(feature, sum(ref, [])) for name, feature in features.items()}
    judged = {name: feature for name, feature in features.items() if not missing[name]}
    title = f"float32, {len(port)} runs of the port among {len(port) * len(ref[0])} of the reference"
    rung.check(judge(ref, port, judged, title, alpha), group=str)
    rung.say(f"  each limit is what a faultless port exceeds once in {len(judged) / alpha:.0f} runs")
    for key in dict.fromkeys(filter(None, missing.values())):
        names = ", ".join(name for name, lack in missing.items() if lack == key)
        rung.say(f"  not judged, since no {key!r} is returned (see portproof.ladder.statistics.trajectory): {names}")
    if features.keys() <= FEATURES.keys() | TOP1.keys():  # features of one's own may take any
        left = [key for key in dict.fromkeys([*ref[0][0], *port[0]]) if not KEYS.fullmatch(key)]
        if left:
            rung.say(f"  not judged, since no feature takes it (give `features` that do): {', '.join(left)}")


def _check_top1(rung: Rung, sides: Mapping[str, Sequence[Record]], needed: float | None) -> None:
    mean = {side: Item(f"{side}, mean top-1", "metric") for side in sides}
    reached = {}
    for side, (what, statistics) in product(sides, EVALUATIONS.items()):
        if all(what in record for record in sides[side]):
            top1 = [record[what][1] for record in sides[side]]
            rung.say(f"  top-1 of the {side}, {statistics} statistics: {', '.join(f'{one:.2%}' for one in top1)}")
            reached[mean[side]] = np.mean(top1)
    if needed is None:
        return
    if mean["reference"] not in reached:
        raise UserError(f"top1={needed}, but the reference's record has no 'eval' (loss, top-1, samples)")
    whole = dict.fromkeys(mean.values(), np.array(1.0))
    title = f"top-1 in eval mode (as the port) against 1 (as the reference), {needed:.0%} needed"
    rung.compare(whole, reached, dict.fromkeys(whole, 1 - needed), title=title)


def _keep_curves(rung: Rung, ref: list, port: list) -> None:
    for i, (records, record) in enumerate(zip_strict(ref, port)):
        sides = [*records, record]
        for what, key in CURVES.items():
            if all({key, "lr"} <= side.keys() for side in sides):
                *ours, theirs = (side[key].reshape(side["lr"].size, -1).mean(axis=1) for side in sides)
                rung.curves[f"seed {i}, {what}"] = np.array(ours), theirs
                rung.keep({f"seed {i}, {what}": ours[0]}, {f"seed {i}, {what}": theirs})
