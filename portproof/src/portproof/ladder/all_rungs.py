"""All rungs of a ladder, and the report of the run."""

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
    """A rung to run: its script, its flags, and the name of its model, "" if there is only one."""

    script: Path
    flags: Sequence[str]
    model: str = ""
    is_long: bool = False  # in lanes it starts before its model's short ones


def run_planned(planned: Planned, refused_by_mistake: bool = False) -> RungResult:
    """Run one rung; a port that raises fails it, and with `refused_by_mistake` a UserError refuses it."""
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


def _cleared(path: Path) -> Path:
    """Delete what an earlier run left there: it must not pass for this run's."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        what = f"{path} cannot be replaced ({error.strerror})"
        raise UserError(f"{what}: delete it or choose another --output-dir") from error
    return path


def _results(rungs: Sequence[Planned], refused_by_mistake: bool, in_lanes: bool) -> Iterator[RungResult]:
    calls = [partial(run_planned, planned, refused_by_mistake) for planned in rungs]
    if in_lanes:
        # PyTorch's optimizers import this at first use: here once for both lanes.
        importlib.import_module("torch._dynamo")
        gc.freeze()  # lanes neither scan nor copy what is imported
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


def run_all(
    rungs: Iterable[Planned],
    folder: str | Path,
    environment: dict[str, str],
    device: str = "cpu",
    refused_by_mistake: bool = False,
    in_lanes: bool = False,
) -> int:
    """Run the rungs, print a table, write report.html and summary.json to `folder`; return the exit status.

    Rungs run in other processes: call this under `if __name__ == "__main__":` only. `environment` is that of
    `report.summary.environment`, `refused_by_mistake` as in `run_planned`; `in_lanes` runs two at a time. Raises
    UserError for a folder that cannot be written.
    """
    page, summary = (_cleared(output_dir(folder) / name) for name in ("report.html", "summary.json"))
    rungs, results = list(rungs), []
    for result in _results(rungs, refused_by_mistake, in_lanes):
        results.append(result)
        print(flush=True)
        with suppress(Exception):  # else the page draws them, and says what is wrong
            from portproof.report.plots import plots_of  # not before the first rung: it imports libraries

            results[-1] = replace(result, plots=plots_of(result.rung, f"r{len(results)}"))
    result = LadderResult(results, environment | backend("torch").about(device))
    name_width = max([17, *(len(rung.name) for rung in results)])
    model_width = max([0, *(len(rung.model) + 1 for rung in results)])
    for rung in results:
        columns = f"{rung.name:<{name_width}} {rung.model:<{model_width}} {rung.seconds:5.1f} s"
        print(f"  {LAST_WORDS[rung.status]:<8} {columns}")
    try:
        write_summary(result, summary)
        from portproof.report.page import write_page

        write_page(result, page)
    except UserError:
        raise
    except Exception as error:  # the verdicts that were just printed stand
        what = f"no report at {page} ({one_line(error)})"
        raise UserError(f"{what}: the verdicts are above and in the logs") from error
    print(f"results and logs: {folder}")
    print(f"report: {page}")
    print(f"{LAST_WORDS[result.status]} ladder")
    return exit_status(result)
