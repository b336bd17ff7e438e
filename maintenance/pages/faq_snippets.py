"""Runs the snippets of one framework, each as a script of its own, in one process that imports the framework once.

    python -m maintenance.pages.faq_snippets paddle docs/faq/entries OUTPUT_DIR [ENTRY ...]

prints one JSON object a line, as soon as a snippet has ended: its entry, its time, and the traceback if it raised.
Before each, what the framework keeps globally is put back, and the working folder is an empty one. The arrays that a
snippet leaves in `default` and `same` go to OUTPUT_DIR/ENTRY.FRAMEWORK.npz: what the two calls of a pair give as they
are, and with the arguments that make them the same.

`compat` in place of a framework runs PyTorch's snippets on Paddle, after `paddle.enable_compat()`, without assertions.
"""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maintenance import DOCS
from maintenance.pages.faq_sources import FRAMEWORKS, Entry, load_entries

ENTRIES = DOCS / "faq" / "entries"
RESULTS = ("default", "same")
COMPAT = "compat"
TIMEOUT = 600  # seconds for all snippets of a framework, which take about 60


@dataclass(frozen=True)
class Run:
    """How one snippet ended: `error` is its traceback, or that its process died; "" if every assertion held."""

    slug: str
    framework: str
    seconds: float
    error: str
    results: dict[str, np.ndarray]


def run_snippets(entries: Iterable[Entry], framework: str, folder: Path = ENTRIES) -> list[Run]:
    """Run the snippets of `framework` in a fresh process; a snippet that takes the process down is named.

    The entries are of `folder`, and sorted by name.
    """
    waiting = [entry.slug for entry in entries if _code(entry, framework)]
    if not waiting:
        return []
    runs = []
    # Files, since a process that a snippet leaves behind would hold a pipe open.
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", __name__, framework, str(folder), output, *waiting]
        with Path(output, "stdout").open("w") as out, Path(output, "stderr").open("w") as err:
            done = subprocess.run(command, stdout=out, stderr=err, timeout=TIMEOUT, check=False)
        for line in Path(output, "stdout").read_text().splitlines():
            said = json.loads(line)
            results = _read(output, said["entry"], framework)
            runs.append(Run(said["entry"], framework, said["seconds"], said["error"], results))
        last_words = Path(output, "stderr").read_text(errors="replace")[-2000:]
        for slug in waiting[len(runs) :]:
            error = f"the process ended with {done.returncode} before this: {last_words}"
            runs.append(Run(slug, framework, 0.0, error, {}))
    return runs


def _code(entry: Entry, framework: str) -> str | None:
    return entry.snippets.get("torch" if framework == COMPAT else framework)


def _read(output: str, slug: str, framework: str) -> dict[str, np.ndarray]:
    with np.load(Path(output) / f"{slug}.{framework}.npz", allow_pickle=False) as results:
        return dict(results)


def _reset(framework: str) -> None:
    """Put back what a snippet before this one may have changed for the whole process."""
    np.random.seed(0)  # noqa: NPY002  what a snippet may draw from
    if framework == "torch":
        import torch

        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.manual_seed(0)
    elif framework in ("paddle", COMPAT):
        import paddle

        if framework == COMPAT and "torch" not in sys.modules:
            paddle.enable_compat()
        paddle.disable_static()
        paddle.set_device("cpu")
        paddle.set_default_dtype("float32")
        paddle.seed(0)
    else:
        import mindspore

        with contextlib.suppress(SystemError, ImportError):  # NumPy 2: MindSpore 2.10.0 fails in its first operation
            mindspore.ops.add(mindspore.Tensor(0), 1)
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        mindspore.set_seed(0)


def _run_one(entry: Entry, framework: str, output: Path) -> str:
    """Run it, save its results, and return its traceback, "" if it raised nothing."""
    names, home = {"__name__": "__main__"}, Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        script = Path(folder, f"{framework}_snippet.py")
        script.write_text(_code(entry, framework), encoding="utf-8")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                if framework == COMPAT:  # its assertions say what PyTorch does; what follows the result may fail
                    exec(compile(script.read_text(encoding="utf-8"), script, "exec", optimize=1), names)
                else:
                    names = runpy.run_path(str(script), run_name="__main__")
            results = _results(names)
            error = ""
        except BaseException:  # SystemExit, too, must not end the run of the others
            error = traceback.format_exc()
            results = _results(names)
        finally:
            os.chdir(home)
    np.savez(output / f"{entry.slug}.{framework}.npz", **results)
    return error


def _results(names: Mapping[str, object]) -> dict[str, np.ndarray]:
    """What a snippet left in RESULTS, if they are numbers or text."""
    arrays = {name: np.asarray(names[name]) for name in RESULTS if name in names}
    return {name: array for name, array in arrays.items() if array.dtype != object}


def main(framework: str, folder: str, output: str, *slugs: str) -> None:
    """Run the snippets of the entries named, or of all."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    printer = os.fdopen(os.dup(1), "w")  # a snippet's processes may print to ours
    os.dup2(2, 1)
    for entry in load_entries(Path(folder)):
        if _code(entry, framework) and (not slugs or entry.slug in slugs):
            _reset(framework)
            start = time.perf_counter()
            error = _run_one(entry, framework, Path(output))
            said = {"entry": entry.slug, "seconds": round(time.perf_counter() - start, 3), "error": error}
            print(json.dumps(said), file=printer, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in (*FRAMEWORKS, COMPAT):
        frameworks = "|".join((*FRAMEWORKS, COMPAT))
        sys.exit(f"usage: python -m maintenance.pages.faq_snippets {frameworks} ENTRIES OUTPUT_DIR [ENTRY ...]")
    main(*sys.argv[1:])
