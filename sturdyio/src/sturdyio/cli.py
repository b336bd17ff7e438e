"""How every command ends: 0 done, 1 a check failed, 2 the user must fix something, 143 preempted."""

from __future__ import annotations

import argparse
import errno
import os
import re
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn


class UserError(Exception):
    """A mistake the user can fix; its one-line message names the thing and the fix."""


class MachineError(UserError):
    """What this machine lacks, such as memory: it says nothing of either side of a pair."""


class Failed(Exception):
    """A check that failed before anything could be compared: no mistake of the user's; one line says what."""


class Escaped(Exception):
    """What a user's code raised that is no Exception, such as SystemExit, in one line."""


class ParserExit(SystemExit):
    """The parser of a command has answered --help or --version, or has named a mistake in the flags."""


class Stopped(Exception):
    """Work that SIGTERM has ended early; the message says where it can go on."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults that say something, once, and keeps the line breaks of the description."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []) or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, but a mistake is one line here too, and a flag that is not spelled out is one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        raise ParserExit(status)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (all flags: --help)\n")


def run(main: Callable[[], int | None], prog: str, fault_of: str = "") -> NoReturn:
    """Exit with `main()`'s status (None is 0); a UserError is one line on stderr and status 2, a Failed FAIL and 1.

    Status 2 is also SystemExit and the like (code that is run cannot say for itself that all is well), a closed
    standard output, and with `fault_of` (whose fault that is) any other exception, after its traceback: Python's own
    status would be 1, a failed check.
    """
    try:
        _check_open_files()
        status = main() or 0
        sys.stdout.flush()
    except UserError as error:
        # From a loader's worker process it comes with the worker's traceback before it, and the type's name.
        message = re.split(rf"\n{re.escape(__name__)}\.\w+: ", str(error))[-1].rstrip()
        print(f"{prog}: error: {printable(message)}", file=sys.stderr)
        status = 2
    except Failed as error:
        print(f"FAIL {prog}: {error}", flush=True)
        status = 1
    except Stopped as stopped:
        print(f"{prog}: {stopped}", file=sys.stderr)
        status = 143  # 128 + SIGTERM, as the shell has it
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # the reader of our output (`| head`) has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except ParserExit:
        raise
    except BaseException as error:
        if _stdout_is_lost() or getattr(error, "errno", 0) == errno.EBADF:
            what = "standard output is closed or full: what was found cannot be printed"
            print(f"{prog}: error: {what}", file=sys.stderr)
        elif isinstance(error, Escaped) or not isinstance(error, Exception):
            print(f"{prog}: error: {one_line(error)} was raised before it was done", file=sys.stderr)
        elif is_lack(error):
            print(f"{prog}: error: {one_line(error)}: {LACK}", file=sys.stderr)
        elif isinstance(error, OSError) and isinstance(error.filename, (str, bytes)):
            name = printable(os.fsdecode(error.filename))
            print(f"{prog}: error: {name} {unusable(error)}", file=sys.stderr)
        elif fault_of:
            traceback.print_exc()
            print(f"{prog}: {one_line(error)}: this is a fault of {fault_of}: please report it", file=sys.stderr)
        else:
            raise
        status = 2
    sys.exit(status)


# Two loaders with two worker processes each have 42. With too few, workers die or hang, and clean-up itself raises.
FEWEST_FILES = 64


def _check_open_files() -> None:
    """Raise UserError where a process may open less than FEWEST_FILES files, and not raise that limit itself."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < FEWEST_FILES:
        if 0 <= most < FEWEST_FILES:
            raise UserError(f"only {most} files may be open at a time: allow more, with ulimit -n 1024")
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEWEST_FILES, most))


def _stdout_is_lost() -> bool:
    """Whether nothing can be printed any more; what waits is given up, or Python would end with status 120."""
    try:
        sys.stdout.flush()
    except (ValueError, OSError):
        with suppress(ValueError, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


LACKING = (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
LACK = "this machine lacks it: free some, and run it again"


def is_lack(error: BaseException) -> bool:
    """Whether it says that memory, disk or open files are used up."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in LACKING)


@contextmanager
def user_code() -> Iterator[None]:
    """For every call of code that is not ours: whatever it raises is an Exception, but for Ctrl-C.

    SystemExit and the like become Escaped, what the machine lacks a MachineError. A process that the code forked ends.
    """
    process = os.getpid()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if is_lack(error):
            raise MachineError(f"{one_line(error)}: {LACK}") from error
        raise
    except BaseException as error:
        raise Escaped(one_line(error)) from error
    finally:
        if os.getpid() != process:
            os._exit(2)


@contextmanager
def staying() -> Iterator[None]:
    """Keeps the current folder and sys.argv, so that paths of the command line stay what they name."""
    folder, words = Path.cwd(), list(sys.argv)
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv[:] = words


def one_line(error: BaseException) -> str:
    """An exception's type and the first telling line of its message (Paddle's begins with a stack)."""
    if isinstance(error, (Escaped, Failed)):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    telling = [line for line in lines if "Error" in line] or lines or [""]
    return f"{type(error).__name__}: {telling[0]}"


def printable(text: str) -> str:
    """`text` with escapes, such as \\n, for what cannot be printed or would begin another line."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _kind(path: Path, what: str) -> str:
    """What stands at `path`: "folder", "file", "empty file", "other", or "" for nothing.

    Raises UserError, which calls it `what`, if that cannot be known: for want of permissions, or for its name.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of a name with a null byte
        return ""
    except OSError as error:
        raise UserError(f"{what} {path} {unusable(error)}") from error
    if stat.S_ISDIR(status.st_mode):
        return "folder"
    if stat.S_ISREG(status.st_mode):
        return "file" if status.st_size else "empty file"
    return "other"


def unusable(error: OSError) -> str:
    """What is to be said of a file or folder behind its name: the reason, and the fix."""
    fix = "check its permissions" if isinstance(error, PermissionError) else "check the path"
    return f"cannot be used ({error.strerror}): {fix}"


def existing_file(path: str | Path, what: str) -> Path:
    """`path` if it is a non-empty file; raises UserError that calls it `what`."""
    path = Path(path)
    kind = _kind(path, what)
    problems = {
        "folder": "is a folder: name a file in it",
        "": "does not exist: check the path",
        "other": "is no regular file: name one",
        "empty file": "is empty: fetch or write it again",
    }
    if kind in problems:
        raise UserError(f"{what} {path} {problems[kind]}")
    return path


def existing_dir(path: str | Path, what: str) -> Path:
    """`path` if it is a folder; raises UserError that calls it `what`."""
    path = Path(path)
    kind = _kind(path, what)
    if kind != "folder":
        problem = "is not a folder" if kind else "does not exist"
        raise UserError(f"{what} {path} {problem}: check the path")
    return path


def output_dir(path: str | Path) -> Path:
    """`path`, created if missing; raises UserError when nothing can be written there."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        problem = f"output folder {path} cannot be written ({error.strerror})"
        raise UserError(f"{problem}: choose another with --output-dir") from error
    return path


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        if not low <= int(text) <= high:
            raise ValueError
        return int(text)

    parse.__name__ = f"whole number from {low} to {high}"  # argparse: "invalid whole number from 0 to 9 value: '10'"
    return parse


seed = whole_number(0, 2**32 - 1)  # which NumPy and both frameworks take


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


positive_int.__name__ = "whole number of at least 1"  # argparse: "invalid whole number of at least 1 value: '0'"
