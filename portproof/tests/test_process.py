"""The process that judges, and the process while models are run."""

import gc
import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from forked_python import is_running

from portproof.io.process import proving

# The pages that the system clears for ten blocks of 64 MiB, one after the other.
FAULTS = """
import json, resource
import numpy as np
from portproof.io.process import proving

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.frombuffer(bytearray(2**26), np.uint8)[::4096].sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

outside = faults()
with proving():
    faults()
    inside = faults()
print(json.dumps([outside, inside, faults()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told what to keep")
def test_memory_that_is_let_go_is_kept_in_the_context_and_given_back_after_it():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    outside, inside, after = json.loads(done.stdout)
    assert inside < 0.3 * outside and after > 0.7 * outside


def test_objects_are_no_garbage_in_the_context_and_are_collected_after_it():
    before = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), proving():
        assert gc.get_freeze_count() > before
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


# It says its process and what it reads, and waits.
WAITS = """
import os, signal, sys, time
from portproof.io.process import run_in_child

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with & ignores it

def main():
    print(os.getpid(), sys.stdin.readline(), flush=True)
    time.sleep(60)

run_in_child(main, "it")
"""


@pytest.mark.parametrize(
    ("sent", "said", "status"),
    [
        (signal.SIGINT, "it: interrupted\n", 130),
        (signal.SIGTERM, "it: error: its process was ended by signal 15\n", 143),
        (signal.SIGKILL, "", -9),
    ],
)
def test_a_signal_to_the_command_ends_the_process_that_judges(sent, said, status):
    command = [sys.executable, "-c", WAITS]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **streams, text=True, start_new_session=True) as process:
        process.stdin.write("read\n")
        process.stdin.flush()
        child, read = process.stdout.readline().split()
        assert read == "read" and int(child) != process.pid
        process.send_signal(sent)
        assert process.communicate(timeout=20)[1] == said and process.returncode == status
    end = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_at_a_terminal_it_reads_what_is_typed_and_is_interrupted_once():
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", WAITS])
    os.write(terminal, b"typed\n")
    said = b""
    while b" typed" not in said:
        said += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert os.read(terminal, 1000).replace(b"^C", b"").strip() == b"it: interrupted"
    os.close(terminal)
