"""Python programs in processes forked from one that has imported the frameworks, which takes seconds."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PRELOADED = ["torch", "torchvision", "paddle", "scipy.stats"]
TIMEOUT = 300  # seconds


def python(*arguments: str | Path, env: Mapping[str, str]) -> subprocess.CompletedProcess:
    """What `python SCRIPT ...` or `python -m MODULE ...` does with these variables."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()
    command = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        child = context.Process(
            target=_child, args=(command, dict(env), str(Path.cwd()), said, multiprocessing.get_start_method())
        )
        child.start()
        child.join(TIMEOUT)
        if child.is_alive():
            child.kill()
            raise subprocess.TimeoutExpired(command, TIMEOUT)
        return subprocess.CompletedProcess(command, child.exitcode, *(path.read_text() for path in said))


def is_running(pid: str) -> bool:
    """Whether it is there, and not a process that has ended and that nobody has collected."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def _child(command: list[str], env: dict[str, str], cwd: str, said: list[Path], start_method: str) -> None:
    for descriptor, path in enumerate(said, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    multiprocessing.set_start_method(start_method, force=True)  # its own processes start as they do elsewhere
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]  # which pytest has put there
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    sys.path[:0] = [cwd if is_module else os.path.dirname(sys.argv[0]), *filter(None, paths)]  # noqa: PTH120
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        with suppress(ValueError, OSError):  # where the program has closed it
            sys.stdout.flush()
