"""What functions of the ladder need that start processes: what these import and call, and what they said last."""

import importlib
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from portproof.io.cli import UserError, one_line
from portproof.ladder.rung import Rung


def resolve(path: str, what: str) -> Callable[..., Any]:
    """What "PKG.MOD:NAME" names; raises UserError, which calls it `what`, if it is not there or cannot be called."""
    module_name, _, name = str(path).partition(":")
    if not module_name or not name.isidentifier():
        raise UserError(f"{what} {path!r} is no PKG.MOD:NAME")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"{what} {path!r}: {error}: put the folder that holds it into PYTHONPATH") from error
    except Exception as error:  # whatever a module of the user's may raise
        raise UserError(f"{what} {path!r}: importing {module_name} raised {one_line(error)}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"{what} {path!r}: {module_name} has no {name} that can be called")
    return getattr(module, name)


def worker_environment() -> dict[str, str]:
    """Of processes that run in another folder and share the cores: they import the modules that this one does."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    absolute = dict.fromkeys(str(Path(path).absolute()) for path in [*given, *sys.path])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(absolute)}


def last_words(path: Path, count: int = 40) -> str:
    """The last lines of a log, "" if there is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return "\n".join(text.rstrip().splitlines()[-count:])


@contextmanager
def processor_time(rung: Rung, what: str) -> Iterator[None]:
    """Say how long it takes the processors, which on a busy machine is less than the clock says."""

    def used() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    before = used()
    yield
    rung.say(f"{what}: {used() - before:.0f} s of processor time")
