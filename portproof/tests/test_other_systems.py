"""The kit where there is no Linux."""

import subprocess
import sys

import pytest

# What Windows lacks, taken away after the standard library has looked for it, and the libraries of extras, but for one
# that is named. Only the modules that are listed may need them.
WINDOWS = """
import asyncio, importlib, multiprocessing, os, pkgutil, signal, subprocess, sys, tempfile, pathlib
import numpy, portproof, scipy.stats
NEEDED_BY = {
    "torch": ("portproof.backends.", "portproof.localize.mutations"),
    "paddle": ("portproof.backends.",),
    "mindspore": ("portproof.backends.",),
    "onnx": ("portproof.exported.",),
}
missing = set(NEEDED_BY) - set(sys.argv[1:])
for name in ("fcntl", "resource", "grp", "pwd", "termios", *missing):
    sys.modules[name] = None
for name in ("fork", "killpg", "getpgid", "setsid", "uname", "sched_getaffinity", "getuid", "geteuid"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1"):
    delattr(signal, name)
for module in pkgutil.walk_packages(portproof.__path__, "portproof."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        print(module.name)
    except ImportError as error:
        library = error.name.partition(".")[0]
        if library not in missing or not module.name.startswith(NEEDED_BY[library]):
            raise
"""


@pytest.mark.parametrize("library", ["", "onnx"])
def test_every_module_is_imported(library):
    """But for those that need a library that is missing; without a library all are."""
    if library:
        pytest.importorskip(library)
    command = [sys.executable, "-c", WINDOWS, library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("portproof.exported.graph" in done.stdout.split()) == (library == "onnx")
