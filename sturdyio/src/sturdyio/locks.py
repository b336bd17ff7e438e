"""Whose a file or a folder is: a process of this machine or of another that shares the folder.

A process number alone does not say so: machines have the same ones, and so have the containers of one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from sturdyio.cli import UserError

NAME = "run.lock"
BEAT = 5.0  # seconds from one sign of life to the next
PATIENCE = 30.0  # seconds without one after which a process of another machine is gone


def here() -> str:
    """The place in which a process number names one process: the machine, on Linux its boot and the container, too."""
    host = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40]
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:  # not Linux
        return host
    return f"{host}_{hashlib.sha256(system.encode()).hexdigest()[:8]}"


def start_of(pid: int) -> str | None:
    """When the process `pid` of this machine began, as the system counts; None: it is gone, "": no way to know."""
    if sys.platform != "win32":  # elsewhere os.kill would end it
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return None
        except PermissionError:  # another user's, which is there
            pass
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):  # not Linux
        return ""
    return None if state == "Z" else fields[18]  # proc(5): starttime, the 22nd of all


def is_gone(place: str, pid: int) -> bool:
    """Whether the process `pid` of `place`, see `here`, has certainly ended."""
    return place == here() and start_of(pid) is None


class FolderLock:
    """Keeps a folder for this process, as a context, against others of this machine and of those that share the folder.

    FOLDER/run.lock says who has it, and is touched every BEAT seconds. It is taken over at once if its process ran here
    and is gone, else when nobody has touched it for PATIENCE seconds, about which `say` gets a line. Raises UserError,
    which names the process that has the folder.
    """

    def __init__(self, folder: str | Path, say: Callable[[str], None] = print) -> None:
        self.path = Path(folder) / NAME
        self.say = say
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "place": here()}
        self.text = json.dumps({**owner, "start": start_of(os.getpid())})
        self.ended = threading.Event()

    def __enter__(self) -> FolderLock:
        while not _create(self.path, self.text):
            _, text = _sign_of_life(self.path)
            if not text and not self.path.exists():  # it has just been released
                continue
            if not self._is_left(text):
                use = f"output folder {self.path.parent} is in use by {_owner(text)}"
                raise UserError(f"{use}: wait until that ends, or choose another with --output-dir")
            self._remove(text)
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.ended.set()
        if self._is_ours():
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise UserError if another process has taken the folder over, since this one stood still for so long."""
        _, text = _sign_of_life(self.path)
        if text not in ("", self.text):
            taken = f"output folder {self.path.parent} was taken over by {_owner(text)}"
            still = f"since this run stood still for more than {PATIENCE:g} s"
            raise UserError(f"{taken}, {still}: go on with one of the two")

    def _is_ours(self) -> bool:
        return _sign_of_life(self.path)[1] == self.text

    def _is_left(self, text: str) -> bool:
        owner = _parse(text)
        if owner and owner["place"] == here() and sys.platform != "win32":
            start = start_of(owner["pid"])
            return start is None or bool(start and owner["start"] and start != owner["start"])  # a number used again
        self.say(f"{self.path} is of {_owner(text)}: waiting {PATIENCE:g} s for a sign of life")
        return _is_silent(self.path)

    def _remove(self, text: str) -> None:
        """Remove the lock, if it still has this text; one process at a time, or a second would remove a new lock."""
        turn = self.path.with_name(f".{NAME}.turn")
        while not _create(turn, ""):
            if _is_silent(turn):  # it is of one that was killed in between
                turn.unlink(missing_ok=True)
        try:
            if _sign_of_life(self.path)[1] == text:
                self.path.unlink(missing_ok=True)
        finally:
            turn.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self.ended.wait(BEAT):
            with suppress(OSError):
                if self._is_ours():
                    os.utime(self.path)


def _create(path: Path, text: str) -> bool:
    """Whether the file was not there, and now is, with this text."""
    is_there = False
    try:
        with path.open("x", encoding="utf-8") as file:
            is_there = True
            file.write(text)
    except FileExistsError:
        return False
    except OSError as error:
        if is_there:  # an empty lock would keep the next one waiting
            path.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({error}): free space or choose another folder") from error
    return True


def _is_silent(path: Path) -> bool:
    """Whether the file lies there for PATIENCE seconds, and nobody touches it."""
    before, end = _sign_of_life(path), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(BEAT / 50)
        if _sign_of_life(path) != before or not path.exists():
            return False
    return True


def _sign_of_life(path: Path) -> tuple[int, str]:
    """(when a lock was last touched, what it says), (-1, "") if it cannot be read; one being written says ""."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:  # a network file system else answers from memory
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except OSError:
        return -1, ""


def _parse(text: str) -> dict | None:
    try:
        owner = json.loads(text)
        texts = [owner[key] for key in ("host", "since", "place", "start")]
        sound = all(type(each) is str and each.isprintable() for each in texts) and type(owner["pid"]) is int
        return owner if sound and owner["pid"] > 0 else None
    except (ValueError, KeyError, TypeError):
        return None


def _owner(text: str) -> str:
    owner = _parse(text)
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}" if owner else "an unknown process"
