"""A folder that one process at a time has: the second is refused with the first's name, unless that one is gone."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sturdyio import files, locks
from sturdyio.cli import UserError
from sturdyio.files import atomic_path
from sturdyio.locks import NAME, FolderLock, here

HOLD = "import sys, time\nfrom sturdyio.locks import FolderLock\nwith FolderLock(sys.argv[1]):\n"


@pytest.fixture
def quick(monkeypatch) -> None:
    """A second is a fiftieth."""
    monkeypatch.setattr(locks, "BEAT", locks.BEAT / 50)
    monkeypatch.setattr(locks, "PATIENCE", locks.PATIENCE / 50)


def elsewhere(monkeypatch) -> None:
    """From now on this is another machine, on which numbers of processes mean others."""
    monkeypatch.setattr(locks, "here", lambda: "another_1234")


def holder(folder: Path, then: str = "    print(flush=True), time.sleep(60)") -> subprocess.Popen:
    """A process that has the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD + then, str(folder)], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def left(folder: Path, **changes: str | int) -> str:
    """What the lock of this process says, but for `changes`; it lies there, and no process has it."""
    with FolderLock(folder) as lock:
        text = json.dumps(json.loads(lock.text) | changes)
    (folder / NAME).write_text(text)
    return text


def taken(folder: Path) -> bool:
    with FolderLock(folder):
        mine = json.loads((folder / NAME).read_text())
        assert (mine["pid"], mine["place"]) == (os.getpid(), here())
    return not list(folder.iterdir())


def test_the_second_is_refused_and_named_the_first(tmp_path):
    process = holder(tmp_path)
    try:
        since = json.loads((tmp_path / NAME).read_text())["since"]
        with pytest.raises(UserError) as caught, FolderLock(tmp_path):
            pass
        owner = f"process {process.pid} on {os.uname().nodename} since {since}"
        assert f"{tmp_path} is in use by {owner}: wait until that ends, or choose another" in str(caught.value)
    finally:
        process.kill()
        process.wait()
    assert taken(tmp_path)  # at once, since it is gone


def test_a_zombie_is_gone(tmp_path):
    process = holder(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    assert taken(tmp_path)
    process.wait()


def test_a_number_that_is_used_again_is_another_process(tmp_path):
    left(tmp_path, start="1")
    assert taken(tmp_path)


def test_an_error_releases_the_folder(tmp_path):
    with pytest.raises(KeyboardInterrupt), FolderLock(tmp_path):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_another_machines_process_is_looked_at(tmp_path, monkeypatch, quick):
    """Its number says nothing here; what it touches does."""
    said = []
    with FolderLock(tmp_path):
        elsewhere(monkeypatch)
        with pytest.raises(UserError, match=f"process {os.getpid()} on .* since "), FolderLock(tmp_path, said.append):
            pass
    assert len(said) == 1 and "waiting 0.6 s for a sign of life" in said[0]
    monkeypatch.undo()


@pytest.mark.parametrize("text", [None, "", "no lock", '{"pid": 1}', "[]"])
def test_a_lock_without_a_sign_of_life_is_taken_over(tmp_path, monkeypatch, quick, text):
    """Of another machine, or one whose process was killed before it had written it."""
    (tmp_path / NAME).write_text(left(tmp_path) if text is None else text)
    elsewhere(monkeypatch)
    begin = time.monotonic()
    with FolderLock(tmp_path, str):
        assert time.monotonic() - begin >= locks.PATIENCE


def test_who_stood_still_and_was_taken_over_is_told(tmp_path):
    with FolderLock(tmp_path) as lock:
        lock.check()
        text = left(tmp_path / "..", pid=1)
        (tmp_path / NAME).write_text(text)
        with pytest.raises(UserError, match="was taken over by process 1 on "):
            lock.check()
    assert (tmp_path / NAME).read_text() == text  # it is the other's


@pytest.mark.parametrize("again", range(5))
def test_of_several_that_find_a_lock_left_one_takes_it(tmp_path, again):
    left(tmp_path, start="1")
    barrier, ended = threading.Barrier(6), threading.Event()

    def attempt(_number: int) -> bool:
        barrier.wait()
        try:
            with FolderLock(tmp_path):
                ended.wait(10)
                return True
        except UserError:
            return False

    with ThreadPoolExecutor(6) as pool:
        tried = [pool.submit(attempt, number) for number in range(6)]
        while sum(each.done() for each in tried) < 5:
            time.sleep(0.01)
        ended.set()
        assert sum(each.result() for each in tried) == 1


def test_who_comes_too_late_gives_the_lock_back(tmp_path):
    """Another was faster to take it over, between the look at what was left and its removal."""
    before = left(tmp_path, start="1")
    with FolderLock(tmp_path) as first:
        FolderLock(tmp_path)._remove(before)
        assert (tmp_path / NAME).read_text() == first.text


def test_a_full_disk_leaves_no_empty_lock(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # files can be made, but not written
    try:
        with pytest.raises(UserError, match="cannot be written"), FolderLock(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match=f"{NAME} cannot be written"), FolderLock(tmp_path / "nowhere"):
        pass


# --- temporary files of a shared folder

KILLED = """import os, signal, sys
from sturdyio.files import atomic_path
with atomic_path(sys.argv[1]) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_while_writing(path: Path) -> Path:
    """What a process leaves that was killed while it wrote `path`."""
    child = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert child.returncode == -signal.SIGKILL
    [leftover] = (each for each in path.parent.iterdir() if each != path)
    return leftover


def write(path: Path) -> Path:
    with atomic_path(path) as temporary:
        temporary.write_text("whole")
    return temporary


def test_what_a_killed_process_left_is_removed(tmp_path):
    leftover = killed_while_writing(tmp_path / "a.txt")
    write(tmp_path / "b.txt")
    assert leftover.exists()
    write(tmp_path / "a.txt")
    assert not leftover.exists()


def test_what_another_machine_writes_is_left_alone(tmp_path, monkeypatch):
    """Its process may be alive, though none here has its number; after a day it writes no more."""
    leftover = killed_while_writing(tmp_path / "a.txt")
    monkeypatch.setattr(files, "here", lambda: "another_1234")
    monkeypatch.setattr(locks, "here", lambda: "another_1234")
    mine = write(tmp_path / "a.txt")
    assert mine.name != leftover.name and "another_1234" in mine.name
    assert leftover.read_text() == "half"
    os.utime(leftover, (0, time.time() - 25 * 60 * 60))
    write(tmp_path / "a.txt")
    assert not leftover.exists()


def test_what_is_named_by_somebody_else_is_left_alone(tmp_path):
    names = [".a.1.txt", ".a.tmp-.txt", f".a.tmp-{here()}-x-0.txt", f".a.tmp-{here()}-{os.getpid()}-0.txt"]
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    write(tmp_path / "a.txt")
    assert {path.name for path in tmp_path.iterdir()} == {*names, "a.txt"}


def refusing_folders(code: int) -> Callable[[int], None]:
    """An fsync of a file system that does not sync folders."""

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir():
            raise OSError(code, os.strerror(code))

    return fsync


@pytest.mark.parametrize("code", [errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_folder_that_cannot_be_synced_fails_no_write(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "fsync", refusing_folders(code))
    write(tmp_path / "a.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_disk_that_fails_is_an_error_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refusing_folders(errno.EIO))
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path / "a.txt")


# --- other systems

# What Windows lacks, taken away after the standard library has looked for it; fsync wants a file that is written to.
WINDOWS = """
import importlib, multiprocessing, os, pkgutil, signal, subprocess, sys, tempfile, pathlib
import numpy, sturdyio
for name in ("fcntl", "resource", "grp", "pwd", "termios", "torch", "paddle", "mindspore"):
    sys.modules[name] = None
for name in ("fork", "killpg", "getpgid", "setsid", "uname", "sched_getaffinity", "getuid", "geteuid"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1"):
    delattr(signal, name)
def kill(pid, number):
    sys.exit("os.kill would have ended a process")
def fsync(descriptor, sync=os.fsync):
    flags = open(f"/proc/self/fdinfo/{descriptor}").read().split()[3]
    if int(flags, 8) & os.O_ACCMODE == os.O_RDONLY:
        raise PermissionError(13, "Permission denied")
    sync(descriptor)
os.kill, os.fsync = kill, fsync
for module in pkgutil.walk_packages(sturdyio.__path__, "sturdyio."):
    importlib.import_module(module.name)
sys.platform = "win32"
from sturdyio import locks
from sturdyio.files import atomic_path
from sturdyio.cli import output_dir
locks.BEAT, locks.PATIENCE = 0.1, 0.6
folder = output_dir(sys.argv[1])
for _ in range(2):
    with locks.FolderLock(folder, str):
        with atomic_path(f"{folder}/a.txt") as temporary:
            temporary.write_bytes(b"whole")
        text = (folder / locks.NAME).read_text()
    (folder / locks.NAME).write_text(text)  # as one that was killed leaves it
print(sorted(os.listdir(folder)))
"""


def test_where_there_is_no_linux(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS, str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "['a.txt', 'run.lock']\n"), done.stderr
