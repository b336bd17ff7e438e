"""All rungs of a ladder, one after another or in two processes side by side, and the report of the run.

A rung has passed only if its result is there. Two at once are forked, from a process that has imported what they need
but computed nothing yet: a fork lacks the threads of its libraries, and would wait for them for ever.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from portproof.backends import backend
from portproof.compare import exit_status
from portproof.io.cli import PortError
from portproof.io.process import proving, signal_when_parent_ends
from portproof.ladder.rung import Rung
from portproof.ladder.workers import KILLED
from portproof.python39 import zip_strict
from portproof.report.summary import Findings, LadderResult, LeftOut, RungResult, write_summary
from portproof.report.text import LAST_WORDS
from sturdyio.cli import UserError, one_line, output_dir, staying, user_code

LANES = 2
PAUSE = 0.05  # seconds between two looks at a rung's output
Rungs = Sequence[Callable[[], RungResult]]


@dataclass(frozen=True)
class Planned:
    """A step to run: its script, its flags, and the name of its model, "" if there is only one."""

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
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            checks = module.main(module.get_args_parser().parse_args(planned.flags))
    except UserError as mistake:
        if not refused_by_mistake:
            raise
        checks = Rung(name)
        checks.refuse(str(mistake))
    except PortError as raised:
        error = str(raised)
        print(f"FAIL {name}: {error}", flush=True)
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


def can_run_in_lanes() -> bool:
    """Whether rungs can run side by side."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) >= LANES  # elsewhere libraries outlive no fork


def _sendable(result: RungResult) -> RungResult:
    """The result without functions, which cannot be pickled."""
    rung = result.rung
    if rung is None:
        return result
    groups = []
    for verdict, group in zip_strict(rung.verdicts, rung.groups):
        groups.append({row.item: group(row.item) for row in verdict.rows}.__getitem__)
    sent = Findings(rung.name, rung.verdicts, groups, rung.types, rung.curves, rung.pictures, rung.log)
    return replace(result, rung=sent)


def _lane(rungs: Rungs, order: Sequence[int], folder: Path, parent: int) -> None:
    """Run each rung that no other lane has taken; write N.by, N.out, N.err, and last N.result."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a rung ends its own processes
    signal_when_parent_ends(signal.SIGTERM)
    for number in order:
        if os.getppid() != parent:
            return
        try:
            with (folder / f"{number}.by").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            continue
        for descriptor, name in ((1, "out"), (2, "err")):
            with (folder / f"{number}.{name}").open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        sys.stdout, sys.stderr = (open(i, "w", encoding="utf-8", closefd=False) for i in (1, 2))  # noqa: SIM115
        try:
            result: RungResult | UserError = _sendable(rungs[number]())
        except UserError as mistake:
            result = mistake
        sys.stdout.flush()
        sys.stderr.flush()
        part = folder / f"{number}.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(folder / f"{number}.result")


def side_by_side(
    rungs: Rungs, order: Sequence[int], count: int = LANES, method: str = "fork"
) -> Iterator[RungResult | str]:
    """Yield each rung's result, or why it died, and print its output; a rung's UserError is raised.

    They begin in `order`, `count` at a time; `method` is how multiprocessing starts processes.
    """
    context = multiprocessing.get_context(method)
    lanes = []
    with tempfile.TemporaryDirectory() as name:

        def begin() -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            arguments = rungs, order, Path(name), os.getpid()
            lanes.append(context.Process(target=_lane, args=arguments))  # type: ignore[attr-defined] # every context has it
            lanes[-1].start()

        try:
            for _ in range(min(count, len(rungs))):
                begin()
            for number in range(len(rungs)):
                yield _followed(Path(name), number, lanes, begin)
        finally:
            started = [lane for lane in lanes if lane.pid is not None]
            for lane in started:
                lane.join(0.5)  # a terminal has interrupted it too: not twice
                if lane.is_alive():
                    lane.terminate()
            for lane in started:
                lane.join(10)
                if lane.is_alive():
                    lane.kill()
                    lane.join()


def _followed(folder: Path, number: int, lanes: list, begin: Callable[[], None]) -> RungResult | str:
    printed, most = {"out": 0, "err": 0}, len(lanes) + LANES
    while True:
        ended = [lane for lane in lanes if not lane.is_alive()]
        done = folder / f"{number}.result"
        is_done = done.is_file()
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            text = _bytes_of(folder / f"{number}.{name}")[printed[name] :]
            whole = len(text) if is_done else text.rfind(b"\n") + 1  # cuts no character
            printed[name] += whole
            stream.write(text[:whole].decode("utf-8", "replace"))
            stream.flush()
        if is_done:
            result = pickle.loads(done.read_bytes())  # our own process wrote it
            if isinstance(result, UserError):
                raise result
            return result
        taker = _bytes_of(folder / f"{number}.by")
        for lane in ended:
            if taker == str(lane.pid).encode():
                status = lane.exitcode
                how = f"by signal {-status}" if status < 0 else f"with status {status}"
                return KILLED if status == -signal.SIGKILL else f"its process ended {how}, and left no result"
        if len(ended) == most:
            return "no process could be started for it"
        if len(ended) == len(lanes):
            begin()
        time.sleep(PAUSE)


def _bytes_of(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _results(rungs: Sequence[Planned], refused_by_mistake: bool, in_lanes: bool) -> Iterator[RungResult]:
    calls = [partial(run_planned, planned, refused_by_mistake) for planned in rungs]
    if in_lanes:
        for name in ("torch", "paddle"):  # here once for both lanes
            backend(name)
        importlib.import_module("torch._dynamo")  # by PyTorch's optimizers at first use
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
    language: str = "en",
    left_out: Sequence[LeftOut] = (),
) -> int:
    """Run the steps, print a table, write report.html and summary.json to `folder`; return the exit status.

    Steps run in other processes: call this under `if __name__ == "__main__":` only. `environment` is that of
    `report.summary.environment`, `refused_by_mistake` as in `run_planned`; `in_lanes` runs two at a time; `language` is
    the page's, "en" or "zh"; `left_out`: the steps that are not run, for the page. Raises UserError for a folder that
    cannot be written.
    """
    page, summary = (_cleared(output_dir(folder) / name) for name in ("report.html", "summary.json"))
    rungs, results = list(rungs), []
    for result in _results(rungs, refused_by_mistake, in_lanes):
        results.append(result)
        print(flush=True)
    ladder = LadderResult(results, environment | backend("torch").about(device), left_out)
    name_width = max([17, *(len(rung.name) for rung in results)])
    model_width = max([0, *(len(rung.model) + 1 for rung in results)])
    for rung in results:
        columns = f"{rung.name:<{name_width}} {rung.model:<{model_width}} {rung.seconds:5.1f} s"
        print(f"  {LAST_WORDS[rung.status]:<8} {columns}")
    try:
        write_summary(ladder, summary)
        from portproof.report.page import write_page

        write_page(ladder, page, language)
    except UserError:
        raise
    except Exception as error:  # the verdicts that were just printed stand
        what = f"no report at {page} ({one_line(error)})"
        raise UserError(f"{what}: the verdicts are above and in the logs") from error
    print(f"results and logs: {folder}")
    print(f"report: {page}")
    print(f"{LAST_WORDS[ladder.status]} ladder")
    return exit_status(ladder)
