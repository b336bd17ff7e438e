"""What functions of the ladder need that start processes: their environment, and what they said last."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from portproof.ladder.rung import Rung


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
