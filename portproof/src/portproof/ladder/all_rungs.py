"""All rungs of a ladder, one after another or two at a time, and the report of the run."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from portproof.backends import backend
from portproof.compare import exit_status
from portproof.io.process import proving
from portproof.ladder.rung import Rung
from portproof.ladder.side_by_side import side_by_side
from portproof.python39 import zip_strict
from portproof.report.summary import LadderResult, RungResult, write_summary
from portproof.report.text import LAST_WORDS
from sturdyio.cli import UserError, one_line, output_dir, staying, user_code


@dataclass(frozen=True)
class Planned:
    """A rung to run: its script, the flags that it gets, and the name of the model that it is run for, "" if one.

    Where rungs run side by side, the first begins first, and then of each model those that are long.
    """

    script: Path
    flags: Sequence[str]
    model: str = ""
    is_long: bool = False


def run_planned(planned: Planned, refused_by_mistake: bool = False) -> RungResult:
    """One rung; a port that raises fails it, and the next ones still run.

    Raises UserError for a user's mistake; with `refused_by_mistake` the rung is refused instead, as one is that waits
    to be filled in.
    """
    name, start = planned.script.stem, time.perf_counter()
    checks, error = None, ""
    try:
        with staying(), user_code(), proving():
            # Its name begins with a digit, so `import` cannot.
            spec = importlib.util.spec_from_file_location(f"step_{name}", planned.script)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            checks = module.main(module.get_args_parser().parse_args(planned.flags))
    except UserError as mistake:
        if not refused_by_mistake:
            raise
        checks = Rung(name)
        checks.refuse(str(mistake))
    except Exception as raised:
        traceback.print_exc()
        error = one_line(raised)
        print(f"FAIL {name}: it raised {error}", flush=True)
    return RungResult(name, planned.model, time.perf_counter() - start, checks, error)


def clear_reports(folder: str | Path) -> tuple[Path, Path]:
    """The paths of page and summary, at which nothing lies: what an earlier run wrote must not pass for this one's."""
    paths = output_dir(folder) / "report.html", Path(folder) / "summary.json"
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be replaced ({error.strerror}): delete it or choose another --output-dir"
        ) from error
    return paths


def _results(rungs: Sequence[Planned], refused_by_mistake: bool, in_lanes: bool) -> Iterator[RungResult]:
    """What `run_planned` gives of each in a process of its own, or with two of them at a time."""
    calls = [partial(run_planned, planned, refused_by_mistake) for planned in rungs]
    if in_lanes:
        importlib.import_module("torch._dynamo")  # PyTorch's optimizers do at their first use: here once for both lanes
        gc.freeze()  # what has been imported is not looked through for garbage again, nor copied for that
        models = list(dict.fromkeys(planned.model for planned in rungs))
        places = [(i > 0, models.index(planned.model), not planned.is_long, i) for i, planned in enumerate(rungs)]
        found = side_by_side(calls, [i for *_, i in sorted(places)])
    else:
        found = side_by_side(calls, range(len(rungs)), 1, "spawn")
    for planned, result in zip_strict(rungs, found):
        if isinstance(result, RungResult):
            yield result
        else:
            print(f"FAIL {planned.script.stem}: {result}", flush=True)
            yield RungResult(planned.script.stem, planned.model, 0.0, error=result)


def _write_reports(result: LadderResult, paths: tuple[Path, Path]) -> None:
    """Write page and summary; whatever goes wrong is a UserError, since the verdict that was just printed stands."""
    page_path, summary_path = paths
    try:
        write_summary(result, summary_path)
        from portproof.report.page import write_page

        write_page(result, page_path)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"no report at {page_path} ({one_line(error)}): the verdicts are above and in the logs"
        ) from error


def run_all(
    rungs: Iterable[Planned],
    folder: str | Path,
    environment: dict[str, str],
    device: str = "cpu",
    refused_by_mistake: bool = False,
    in_lanes: bool = False,
) -> int:
    """Run the rungs, write FOLDER/report.html and FOLDER/summary.json, print a table -> the ladder's exit status.

    They run in another process, and one has passed only if that leaves its result: what ends the process is no pass. So
    call this under `if __name__ == "__main__":` only. `environment` is what the run depends on, in words, as
    `report.summary.environment` has it; `refused_by_mistake` is `run_planned`'s; `in_lanes` runs rungs side by side,
    see side_by_side.py. Raises UserError for a folder that cannot be written.
    """
    paths = clear_reports(folder)
    rungs, results = list(rungs), []
    for result in _results(rungs, refused_by_mistake, in_lanes):
        results.append(result)
        print(flush=True)
        with suppress(Exception):  # its plots, while others run; without them the page draws, and says what is wrong
            from portproof.report.plots import plots_of  # not before the first rung: it imports libraries

            results[-1] = replace(result, plots=plots_of(result.rung, f"r{len(results)}"))
    result = LadderResult(results, environment | backend("torch").about(device))
    name_width = max([17, *(len(rung.name) for rung in results)])
    model_width = max([0, *(len(rung.model) + 1 for rung in results)])
    for rung in results:
        columns = f"{rung.name:<{name_width}} {rung.model:<{model_width}} {rung.seconds:5.1f} s"
        print(f"  {LAST_WORDS[rung.status]:<8} {columns}")
    _write_reports(result, paths)
    print(f"results and logs: {folder}")
    print(f"report: {paths[0]}")
    print(f"{LAST_WORDS[result.status]} ladder")
    return exit_status(result)
