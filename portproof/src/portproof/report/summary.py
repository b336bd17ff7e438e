"""A run of the ladder as data: its outcome, and `summary.json`, the same for machines.

`summary.json` (UTF-8, no NaN or Infinity literals) holds:

    schema        2; another number where a reader of this one would go wrong
    status        "PASS", "FAIL" or "REFUSED"; of the run here, of each rung, verdict and row below; a row's may also be
                  "NOT JUDGED"
    sentence      the outcome in words
    environment   {what: text}
    rungs         a list of {name, model, status, seconds, error, verdicts}; error: the exception of one that raised
    verdicts      a list of {title, status, refusal, notes, location, rows}; location: lines of text, or null
    rows          a list of {name, item, status, shape, difference, limit, scale, reason, widened_by, hidden,
                  worst}; widened_by, hidden: by what the limit was widened, and what could hide in it, see compare.Row
    item          what the row is of: {name, kind, module, mode, dtype, iteration, section}, see compare.Item
    worst         {index, reference, port, outside, size}, the place of the largest difference, or null

A number that was not measured is null, an infinite one "Infinity" or "-Infinity".
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from portproof.compare import FAIL, PASS, REFUSED, Item, Row, Verdict, joined
from portproof.io.records import save_text
from portproof.report.text import LAST_WORDS

SCHEMA = 2
# One or the other of a name's distributions is installed.
DISTRIBUTIONS = {
    "torch": ["torch"],
    "torchvision": ["torchvision"],
    "paddle": ["paddlepaddle", "paddlepaddle-gpu"],
    "numpy": ["numpy"],
    "pillow": ["pillow"],
    "reprod_log": ["reprod_log"],
}


def worst_status(statuses: Iterable[int]) -> int:
    """FAIL if any is FAIL, REFUSED if any is REFUSED or there is none, else PASS."""
    statuses = set(statuses) or {REFUSED}
    return FAIL if FAIL in statuses else max(statuses)


@dataclass
class Findings:
    """What a rung found: its verdicts, and what reports show beside them."""

    name: str
    verdicts: list[Verdict] = field(default_factory=list)
    groups: list[Callable[[Item], str]] = field(default_factory=list)  # the label of an item, for each verdict
    types: dict[str, str] = field(default_factory=dict)  # the reference's modules and their layer types, for hints
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # (reference, port): see plots.py
    pictures: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # tensors (3, H, W) that differ
    log: list[str] = field(default_factory=list)  # the lines that it printed

    @property
    def status(self) -> int:
        """That of all verdicts together; REFUSED if nothing was judged."""
        return joined(self.name, self.verdicts).status

    @property
    def counted(self) -> int:
        """How many items were judged."""
        return sum(verdict.counted for verdict in self.verdicts)


@dataclass(frozen=True)
class RungResult:
    """What became of one rung on one model; `rung` is None where it raised, and `error` says what, in one line."""

    name: str
    model: str
    seconds: float
    rung: Findings | None = None
    error: str = ""

    @property
    def status(self) -> int:
        return FAIL if self.rung is None else self.rung.status

    @property
    def verdicts(self) -> list[Verdict]:
        return [] if self.rung is None else self.rung.verdicts

    @property
    def first_bad(self) -> Verdict | None:
        """The first verdict with the rung's status, unless it passed or raised."""
        bad = (verdict for verdict in self.verdicts if verdict.status == self.status != PASS)
        return next(bad, None)


@dataclass(frozen=True)
class LadderResult:
    """All rungs of a run, in the order in which they ran."""

    rungs: list[RungResult]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """That of the worst rung; REFUSED if there is none."""
        return worst_status(rung.status for rung in self.rungs)

    @property
    def counted(self) -> int:
        """How many items were judged."""
        return sum(verdict.counted for rung in self.rungs for verdict in rung.verdicts)

    @property
    def first_bad(self) -> RungResult | None:
        """The first rung that failed, or was refused where none failed."""
        return next((rung for rung in self.rungs if rung.status == self.status != PASS), None)

    @property
    def sentence(self) -> str:
        """The outcome in words, without the status itself."""
        count = len(self.rungs)
        rung = self.first_bad
        if rung is None:
            return (
                f"All {self.counted:,} items of {count} rungs are within their limits." if count else "No rung was run."
            )
        bad = sum(other.status == self.status for other in self.rungs)
        where = f"{rung.name}, {rung.model}"
        if self.status == REFUSED:
            return f"{bad} of {count} rungs could not be judged; the first is {where}."
        row = None if rung.first_bad is None else rung.first_bad.first_failure
        what = f"first differs at {row.name}" if row else "raised an error"
        return f"{bad} of {count} rungs failed; the first, {where}, {what}."


def environment(args: argparse.Namespace, script: str) -> dict[str, str]:
    """What a run depends on, in words: the command with every flag of `args`, versions, machine, date."""
    flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in vars(args).items() if value is not None]
    return {
        "command": shlex.join(["python", script, *(word for pair in flags for word in pair)]),
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "seed": str(args.seed),
        "python": platform.python_version(),
        **{name: _version(candidates) for name, candidates in DISTRIBUTIONS.items()},
        "system": platform.platform(),
        "processor": f"{_processor()}, {os.cpu_count()} logical cores",
    }


def _version(distributions: list[str]) -> str:
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "not installed"


def _processor() -> str:
    """The processor's name; Python's own `platform.processor()` is empty on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _json_value(value: object) -> object:
    """`value` as strict JSON has it: no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _row_data(row: Row) -> dict[str, Any]:
    worst = row.worst and {
        "index": list(row.worst.index),
        "reference": _json_value(row.worst.ref),
        "port": _json_value(row.worst.port),
        "outside": row.worst.outside,
        "size": row.worst.size,
    }
    return {
        "name": row.name,
        "item": vars(row.item),
        "status": LAST_WORDS[row.status],
        "shape": list(row.shape),
        "difference": _json_value(row.difference),
        "limit": _json_value(row.atol),
        "scale": _json_value(row.scale),
        "reason": row.reason,
        "widened_by": row.widened_by,
        "hidden": row.hidden,
        "worst": worst,
    }


def _verdict_data(verdict: Verdict) -> dict[str, Any]:
    return {
        "title": verdict.title,
        "status": LAST_WORDS[verdict.status],
        "refusal": verdict.refusal,
        "notes": verdict.notes,
        "location": verdict.location and verdict.location.lines(),
        "rows": [_row_data(row) for row in verdict.rows],
    }


def summary(result: LadderResult) -> dict[str, Any]:
    """The content of `summary.json`, as the docstring of this module lays it out."""
    return {
        "schema": SCHEMA,
        "status": LAST_WORDS[result.status],
        "sentence": result.sentence,
        "environment": result.environment,
        "rungs": [
            {
                "name": rung.name,
                "model": rung.model,
                "status": LAST_WORDS[rung.status],
                "seconds": round(rung.seconds, 3),
                "error": rung.error,
                "verdicts": [_verdict_data(verdict) for verdict in rung.verdicts],
            }
            for rung in result.rungs
        ],
    }


def write_summary(result: LadderResult, path: Path) -> None:
    """Write `summary.json`, a line a row of a verdict; raises UserError when it cannot be written."""
    save_text(json.dumps(summary(result), allow_nan=False) + "\n", path)
