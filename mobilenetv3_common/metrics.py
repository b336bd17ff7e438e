"""The record of a run in numbers: one JSON object a line, in the file that plots and averages are made from."""

import itertools
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from sturdyio.cli import UserError, existing_file
from sturdyio.files import atomic_path

NAME = "metrics.jsonl"
FIX = "fix that line, or move the file away: a new one then begins with what is trained from here on"


class MetricsLog:
    """Appends to the record `path`; each line is on its way to the disk when `write` returns, and there after `sync`.

    Opened for a run that begins with `epoch` after `step` optimizer steps: of an older record it keeps what such a run
    has behind it, all of the earlier epochs and of this one the training up to `step`. So a run that was killed and
    resumed leaves the same record as one that was not; times of day and speeds have no place in it for that reason.
    A run from the beginning has nothing behind it: an older record is another run's, and gets the name `aside`.
    Raises UserError when an older record cannot be read or the file not be written.
    """

    def __init__(self, path: str | Path, *, epoch: int = 0, step: int = 0) -> None:
        self.path = Path(path)
        self.aside = None if epoch or step else _set_aside(self.path)
        older = _whole_lines(self.path, FIX) if self.path.exists() else ()
        kept = [line for line, record in older if _is_behind(record, epoch, step)]
        with atomic_path(self.path) as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, kind: str, *, epoch: int, step: int, **values: float) -> None:
        """Append {kind, epoch, step, **values}: `kind` is train, eval or eval_ema, `step` counts the whole run's.

        A value that is NaN or infinite becomes null, since JSON has neither.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"kind": kind, "epoch": epoch, "step": step, **finite}
        with self._writing():
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()

    def sync(self) -> None:
        """Return when what was written is on the disk, where a power cut leaves it."""
        with self._writing():
            os.fsync(self.file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error}): free space or choose another folder") from error

    def close(self) -> None:
        self.file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records in `path`, without a last line that was cut off; raises UserError when it is no such file."""
    return [record for _, record in _whole_lines(existing_file(path, "record"), f"name a {NAME} of a training run")]


def _is_behind(record: dict[str, Any], epoch: int, step: int) -> bool:
    """Whether a run that goes on in `epoch` after `step` steps has the record behind it.

    An evaluation of this epoch is not, even after the last of its steps: the run will make it again.
    """
    return record["epoch"] < epoch or (record["kind"] == "train" and record["step"] <= step)


def _set_aside(path: Path) -> Path | None:
    """Give a record the name of the second of its last line, which no other file has -> that name, if there is one."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    date = datetime.fromtimestamp(path.stat().st_mtime).astimezone().strftime("%Y%m%d-%H%M%S")
    names = (path.with_stem(f"{path.stem}.{date}{number or ''}") for number in itertools.count(0, -1))
    aside = next(name for name in names if not name.exists())
    try:
        return path.rename(aside)
    except OSError as error:
        raise UserError(f"{path} cannot be set aside ({error}): choose another folder") from error


def _whole_lines(path: Path, fix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, record) of each line that was written whole; a UserError ends in `fix`.

    The last of a killed run may not have been, and after a power cut what was written last may be zeros, in that line
    or more: all of it is beyond the last checkpoint, with which the record is synced.
    """
    try:
        *whole, _torn = path.read_bytes().split(b"\n")
        lines = [line.decode("utf-8") for line in whole]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"record {path} cannot be read ({error}): {fix}") from error
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            return
        yield f"{line}\n", _record(line, f"record {path}, line {number},", fix)


def _record(line: str, what: str, fix: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} is no JSON ({error}): {fix}") from error
    numbers = {**record} if isinstance(record, dict) else {}
    if not isinstance(numbers.pop("kind", None), str) or not all(
        type(numbers.get(name)) is int and 0 <= numbers[name] < 2**53 for name in ("epoch", "step")
    ):
        raise UserError(f"{what} lacks kind, epoch or step: {fix}")
    if not all(value is None or type(value) in (int, float) and abs(value) < 1e300 for value in numbers.values()):
        raise UserError(f"{what} holds what is no number: {fix}")
    return record
