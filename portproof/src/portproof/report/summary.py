"""The outcome of a run as data: `summary.json` of a ladder, and what `--json` of a command writes.

Both (UTF-8, no NaN or Infinity literals) hold:

    schema        3; another number where a reader of this one would go wrong
    status        "PASS", "FAIL" or "REFUSED", also of each step, verdict and row; of a row also
                  "NOT JUDGED"
    sentence      the outcome in words, also of each verdict
    environment   {what: text}
    rungs         of a ladder: a list of {name, model, status, seconds, error, verdicts}, one a step;
                  error: the exception, or ""
    left_out      of a ladder: a list of {name, model, reason}, one a step that was not run
    verdicts      a list of {title, status, sentence, refusal, notes, caveats, location, rows}
    location      null, or {module, type, port_module, port_type, port_class, port_class_name, phase,
                  causes, lines, also}, where the failure begins: module is the reference's, "" the
                  model itself; port_class is file:line of the nearest class of yours around the port's
                  module, "" if there is none; phase is "structure", "weights", "forward", "buffers",
                  "backward", "dropout" or "buffers as built"; lines are those of the report; also is a list of
                  further locations
    rows          a list of {name, item, status, shape, difference, limit, scale, reason, widened_by,
                  hidden, widest, worst}, see compare.Row; of what is accepted the reason begins with "accepted"
    item          {name, kind, module, mode, dtype, iteration, section, projected}, see compare.Item;
                  projected: of a large array weighted sums along its axes are compared, and worst is
                  among these
    worst         {index, reference, port, outside, size}, the place of the largest difference, or null

NaN is null, infinity "Infinity" or "-Infinity", a complex number text such as "(1+2j)".
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.compare import FAIL, PASS, REFUSED, Item, Row, Verdict, Worst, joined
from portproof.io.records import save_text
from portproof.report.text import LAST_WORDS, last_line

if TYPE_CHECKING:
    from portproof.localize.locate import Location

SCHEMA = 3
LIBRARIES = ("torch", "torchvision", "paddle", "numpy", "pillow", "reprod_log")

Sides = tuple[np.ndarray, np.ndarray]  # (reference, port)


@dataclass
class Findings:
    """A rung's verdicts, and what reports show beside them."""

    name: str
    verdicts: list[Verdict] = field(default_factory=list)
    groups: list[Callable[[Item], str]] = field(default_factory=list)  # label each verdict's items
    types: dict[str, str] = field(default_factory=dict)  # {module: layer type}
    curves: dict[str, Sides] = field(default_factory=dict)
    pictures: dict[str, Sides] = field(default_factory=dict)  # (3, H, W), only where they differ
    log: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """REFUSED if nothing was judged."""
        return joined(self.name, self.verdicts).status

    @property
    def counted(self) -> int:
        return joined(self.name, self.verdicts).counted


@dataclass(frozen=True)
class RungResult:
    """One rung on one model; `rung` is None if it raised `error`."""

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
        """The first verdict with the rung's status; None if it passed or raised."""
        return next((verdict for verdict in self.verdicts if verdict.status == self.status != PASS), None)


@dataclass(frozen=True)
class LeftOut:
    """A step that was not run."""

    name: str
    model: str
    reason: str


@dataclass(frozen=True)
class LadderResult:
    rungs: list[RungResult]
    environment: dict[str, str] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()

    @property
    def status(self) -> int:
        """The worst rung's; REFUSED without rungs."""
        statuses = {rung.status for rung in self.rungs} or {REFUSED}
        return FAIL if FAIL in statuses else max(statuses)

    @property
    def counted(self) -> int:
        return sum(verdict.counted for rung in self.rungs for verdict in rung.verdicts)

    @property
    def first_bad(self) -> RungResult | None:
        """The first failed rung, or else the first refused one."""
        return next((rung for rung in self.rungs if rung.status == self.status != PASS), None)

    @property
    def title(self) -> str:
        """Of a single step its name and model; "" of several."""
        return f"{self.rungs[0].name}, {self.rungs[0].model}" if len(self.rungs) == 1 else ""

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        return self.said(str)

    def said(self, _: Callable[[str], str]) -> str:
        """`sentence` in another language; of one step it is the last line of its report."""
        if len(self.rungs) == 1 and (rung := self.rungs[0].rung):
            return _(last_line(rung.name, joined(rung.name, rung.verdicts)).partition(" ")[2])
        if not self.rungs:
            return _("No step was run.")
        count, first = len(self.rungs), self.first_bad
        if first is None:
            return _("All {:,} items of {} steps are within their limits.").format(self.counted, count)
        bad = sum(rung.status == self.status for rung in self.rungs)
        where = bad, count, first.name, first.model
        if self.status == REFUSED:
            return _("{} of {} steps could not be judged; the first is {}, {}.").format(*where)
        row = None if first.first_bad is None else first.first_bad.first_failure
        if row is None:
            return _("{} of {} steps failed; the first, {}, {}, raised an error.").format(*where)
        return _("{} of {} steps failed; the first, {}, {}, first differs at {}.").format(*where, row.name)


def environment(args: argparse.Namespace, script: str) -> dict[str, str]:
    """The command with all flags, and the seed; versions, machine and date, as text."""
    command = ["python", script]
    for name, value in vars(args).items():
        if value is None or value is False:
            continue
        command.append(f"--{name.replace('_', '-')}")
        if value is not True:
            command += map(str, value if isinstance(value, (list, tuple)) else [value])
    return {"command": shlex.join(command), "seed": str(args.seed), **versions()}


def versions() -> dict[str, str]:
    """Versions, machine and date, as text."""
    return {
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "system": platform.platform(),
        "processor": f"{_processor()}, {os.cpu_count()} logical cores",
    }


def _version(library: str) -> str:
    for name in ("paddlepaddle", "paddlepaddle-gpu") if library == "paddle" else (library,):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "not installed"


def _processor() -> str:
    """`platform.processor()` is empty on most Linux systems."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name.*?:(.*)", text, re.M):
            return found[1].strip()
    return platform.processor() or platform.machine()


KEYS = {"atol": "limit", "ref": "reference"}


def _json_value(value: object) -> object:
    """Strict JSON: no NaN, infinity or complex numbers."""
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _fields(of: Row | Worst) -> dict[str, Any]:
    return {KEYS.get(name, name): _json_value(value) for name, value in vars(of).items()}


def _row_data(row: Row) -> dict[str, Any]:
    data = {"name": row.name, **_fields(row), "item": vars(row.item), "status": LAST_WORDS[row.status]}
    worst = data.pop("worst")
    return data | {"worst": worst and _fields(worst)}


def _location_data(location: Location) -> dict[str, Any]:
    return {
        "module": location.name,
        "type": location.type,
        "port_module": location.port_name,
        "port_type": location.port_type,
        "port_class": location.own_class[1],
        "port_class_name": location.own_class[0],
        "phase": location.phase,
        "causes": location.diagnosis,
        "lines": location.lines(),
        "also": [_location_data(other) for other in location.also],
    }


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """One of `verdicts`."""
    return {
        "title": verdict.title,
        "status": LAST_WORDS[verdict.status],
        "sentence": last_line(verdict.title, verdict),
        "refusal": verdict.refusal,
        "notes": verdict.notes,
        "caveats": verdict.caveats,
        "location": verdict.location and _location_data(verdict.location),
        "rows": [_row_data(row) for row in verdict.rows],
    }


def write_summary(result: LadderResult, path: Path) -> None:
    """Write `summary.json`; raises UserError if that fails."""
    rungs = [
        {
            "name": rung.name,
            "model": rung.model,
            "status": LAST_WORDS[rung.status],
            "seconds": round(rung.seconds, 3),
            "error": rung.error,
            "verdicts": [verdict_data(verdict) for verdict in rung.verdicts],
        }
        for rung in result.rungs
    ]
    data = {"rungs": rungs, "left_out": [vars(step) for step in result.left_out]}
    _write(result.status, result.sentence, result.environment, data, path)


def write_verdicts(verdicts: Sequence[Verdict], title: str, environment: Mapping[str, str], path: Path) -> None:
    """Write those of one command; raises UserError if that fails."""
    every = verdicts[0] if len(verdicts) == 1 else joined(title, verdicts)
    data = {"verdicts": [verdict_data(verdict) for verdict in verdicts]}
    _write(every.status, last_line(every.title, every), environment, data, path)


def _write(status: int, sentence: str, environment: Mapping[str, str], data: Mapping[str, Any], path: Path) -> None:
    whole = {"schema": SCHEMA, "status": LAST_WORDS[status], "sentence": sentence, "environment": environment, **data}
    save_text(json.dumps(whole, allow_nan=False) + "\n", path)
