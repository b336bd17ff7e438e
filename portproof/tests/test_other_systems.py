"""The kit where there is no Linux."""

import subprocess
import sys

# What Windows lacks, taken away after the standard library has looked for it.
WINDOWS = """
import asyncio, importlib, multiprocessing, os, pkgutil, signal, subprocess, sys, tempfile, pathlib
import matplotlib.pyplot, numpy, portproof, scipy.stats
for name in ("fcntl", "resource", "grp", "pwd", "termios", "torch", "paddle", "mindspore"):
    sys.modules[name] = None
for name in ("fork", "killpg", "getpgid", "setsid", "uname", "sched_getaffinity", "getuid", "geteuid"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1"):
    delattr(signal, name)
for module in pkgutil.walk_packages(portproof.__path__, "portproof."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ImportError as error:
        if error.name not in ("torch", "paddle", "mindspore"):
            raise
    print(module.name)
"""


def test_every_module_is_imported():
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "portproof.io.records" in done.stdout, done.stderr
