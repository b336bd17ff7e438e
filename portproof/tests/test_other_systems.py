"""The kit where there is no Linux."""

import subprocess
import sys

# What Windows lacks, taken away after the standard library has looked for it. No module but these may need a library
# that an extra installs.
WINDOWS = """
import asyncio, importlib, importlib.util, multiprocessing, os, pkgutil, signal, subprocess, sys, tempfile, pathlib
import matplotlib.pyplot, numpy, portproof, scipy.stats
NEEDED_BY = {
    "torch": ("portproof.backends.", "portproof.localize.mutations"),
    "paddle": ("portproof.backends.",),
    "mindspore": ("portproof.backends.",),
    "onnx": ("portproof.exported.",),
}
for name in ("fcntl", "resource", "grp", "pwd", "termios", "torch", "paddle", "mindspore"):
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
        may_need = module.name.startswith(NEEDED_BY.get(error.name, ()))
        if not may_need or importlib.util.find_spec(error.name):
            raise
"""


def test_every_module_is_imported():
    """But for those that need a library that is not installed."""
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "portproof.io.records" in done.stdout, done.stderr
