"""Several processes of a package's training command, started by its framework's launcher, and what they recorded."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mobilenetv3_proof.distributed_worker import ENDED, JOINING
from mobilenetv3_proof.package import PORT
from portproof.compare import Item

WORKER = "mobilenetv3_proof.distributed_worker"
TIMEOUT = 300  # seconds; two processes of a small model take 10 on idle cores
Record = dict[Item, np.ndarray]


class LaunchError(Exception):
    """Processes that did not all end well: why, in one line, the last lines of the log that says so, what they left."""

    def __init__(self, reason: str, log: str = "", records: Sequence[dict[str, Record]] = ()) -> None:
        telling = [line for line in log.splitlines() if "Error" in line] or log.splitlines()
        super().__init__(f"{reason}: {telling[-1].strip()}" if telling else reason)
        self.log = log
        self.records = list(records)  # of every process those runs that all of them ended


class CouldNotStart(LaunchError):
    """They never came together on this machine, so nothing was compared."""


class Died(LaunchError):
    """They came together, and then one ended with an error, or all waited for ever."""


def command(package: str, world_size: int, folder: Path) -> list[str]:
    """The launcher's command line; either launcher chooses a free port itself."""
    count, log = ("--nproc_per_node", str(world_size)), ("--log_dir", str(folder / "launcher"))
    if package == PORT:
        # It knows no -m, but starts any program.
        launcher = ["paddle.distributed.launch", *count, *log, *one_card(world_size), sys.executable]
    else:
        launcher = ["torch.distributed.run", "--standalone", *count, *log]
    return [sys.executable, "-m", *launcher, "-m", WORKER, str(folder)]


def one_card(world_size: int) -> list[str]:
    """Flags for Paddle's launcher, which wants a card for every process where it sees any, also on the CPU.

    They name the first card for all of them; none of them uses it.
    """
    import paddle

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and paddle.device.cuda.device_count() == 0:
        return []
    first = "0" if visible is None else visible.split(",")[0]
    return ["--devices", ",".join([first] * world_size)]


def last_words(path: Path, count: int = 40) -> str:
    """The last lines of a log, "" if there is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return "\n".join(text.rstrip().splitlines()[-count:])


def _records(folder: Path, world_size: int, names: Iterable[str]) -> list[dict[str, Record]]:
    """Of every process the records of those runs that all of them ended."""
    paths = {name: [folder / f"{rank}.{name}.npz" for rank in range(world_size)] for name in names}
    ended = [name for name, files in paths.items() if all(path.is_file() for path in files)]
    return [{name: _read(paths[name][rank]) for name in ended} for rank in range(world_size)]


def _read(path: Path) -> Record:
    """What a process wrote: arrays by the fields of their items."""
    with np.load(path) as arrays:
        return {Item(**json.loads(key)): array for key, array in arrays.items()}


def _explain(folder: Path, world_size: int, ended: str, records: list[dict[str, Record]]) -> LaunchError:
    """What went wrong, with the last lines of the process that it went wrong in."""
    stages = [last_words(folder / f"{rank}.stage") for rank in range(world_size)]
    if "" in stages:
        return CouldNotStart(f"the launcher {ended} before all processes ran", last_words(folder / "launcher.log"))
    logs = {rank: last_words(folder / f"{rank}.log") for rank in range(world_size)}
    raised = [rank for rank, log in logs.items() if "Traceback" in log]
    # Where several raised, the others lost the first, whose log is older.
    rank = min(raised or logs, key=lambda rank: (folder / f"{rank}.log").stat().st_mtime)
    kind = CouldNotStart if stages[rank] == JOINING else Died
    return kind(f"process {rank} of {world_size} {ended}", logs[rank], records)


def worker_environment() -> dict[str, str]:
    """Of processes that run in another folder and share the cores: they import the packages that this one does."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    absolute = os.pathsep.join(str(Path(path).absolute()) for path in paths if path)
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": absolute}


def _run(arguments: list[str], folder: Path) -> str:
    """Run a launcher to its end -> how it ended; no process is left behind."""
    env = worker_environment()
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (folder / "launcher.log").open("wb") as log:
        process = subprocess.Popen(arguments, cwd=folder, env=env, stdout=log, start_new_session=True, **streams)
    try:
        process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT} s"
    finally:
        process.stdin.close()  # the launcher gave its processes sessions of their own; they end when this closes
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "ended with an error"


def launch(package: str, world_size: int, runs: Mapping[str, Sequence[str]], folder: Path) -> list[dict[str, Record]]:
    """Of every process {name of the run: its record}; `runs` are flags of the training command by name.

    Files go to the empty folder `folder`. Raises CouldNotStart or Died.
    """
    job = {"package": package, "runs": {name: list(flags) for name, flags in runs.items()}}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    ended = _run(command(package, world_size, folder), folder)
    records = _records(folder, world_size, runs)
    if {last_words(folder / f"{rank}.stage") for rank in range(world_size)} != {ENDED}:
        raise _explain(folder, world_size, ended, records)
    return records
