"""The record of a run in numbers: one JSON object a line, in the file that plots and averages are made from."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portproof.io.cli import UserError, existing_file
from portproof.io.files import atomic_path

NAME = "metrics.jsonl"


class MetricsLog:
    """Appends to the record `path`; each line is on its way to the disk when `write` returns.

    Opened for a run that begins with `epoch` after `step` optimizer steps: of an older record it keeps what such a run
    has behind it, all of the earlier epochs and of this one the training up to `step`. So a run that was killed and
    resumed leaves the same record as one that was not; times of day and speeds have no place in it for that reason.
    Raises UserError when an older record cannot be read or the file not be written.
    """

    def __init__(self, path: str | Path, *, epoch: int = 0, step: int = 0) -> None:
        self.path = Path(path)
        older = _whole_lines(self.path) if (epoch or step) and self.path.exists() else ()
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
        try:
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error}): free space or choose another folder") from error

    def close(self) -> None:
        self.file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records in `path`, without a last line that was cut off; raises UserError when it is no such file."""
    return [record for _, record in _whole_lines(existing_file(path, "record"))]


def _is_behind(record: dict[str, Any], epoch: int, step: int) -> bool:
    """Whether a run that goes on in `epoch` after `step` steps has the record behind it.

    An evaluation of this epoch is not, even after the last of its steps: the run will make it again.
    """
    return record["epoch"] < epoch or (record["kind"] == "train" and record["step"] <= step)


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, record) of each line that was written whole, as the last of a killed run may not have been."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"record {path} cannot be read ({error}): name a {NAME} of a training run") from error
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            return
        yield line, _record(line, f"record {path}, line {number},")


def _record(line: str, what: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} is no JSON ({error}): name a {NAME} of a training run") from error
    numbers = {**record} if isinstance(record, dict) else {}
    if not isinstance(numbers.pop("kind", None), str) or not all(
        type(numbers.get(name)) is int and 0 <= numbers[name] < 2**53 for name in ("epoch", "step")
    ):
        raise UserError(f"{what} lacks kind, epoch or step: name a {NAME} of a training run")
    if not all(value is None or type(value) in (int, float) and abs(value) < 1e300 for value in numbers.values()):
        raise UserError(f"{what} holds what is no number: name a {NAME} of a training run")
    return record
