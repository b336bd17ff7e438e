"""How every command ends: 0 done, 1 a check failed, 2 the user must fix something, 143 preempted."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


class UserError(Exception):
    """A mistake the user can fix; its one-line message names the thing and the fix."""


# What each of the kit's extras installs, by the names that are imported.
EXTRAS = {
    "torch": ("torch", "scipy", "yaml"),
    "paddle": ("paddle",),
    "ckpt": ("google",),
    "mindspore": ("mindspore",),
    "report": ("jinja2", "matplotlib"),
}


class Stopped(Exception):
    """Work that ended early because SIGTERM asked it to; the message says where it can go on."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults and keeps the line breaks of the description."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, but a mistake is one line here too, and a flag that is not spelled out is one."""

    def __init__(self, **kwargs) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (all flags: --help)\n")


def run(main: Callable[[], int | None], prog: str, fault_of: str = "") -> NoReturn:
    """Exit with `main()`'s status (None is 0); a UserError is one line on stderr and status 2.

    So is whatever else is raised if `fault_of` says whose fault that is, with the traceback before it: Python's own
    status would be 1, and say that a check has failed.
    """
    try:
        status = main() or 0
        sys.stdout.flush()
    except UserError as error:
        # From a loader's worker process it comes with the worker's traceback before it, and the type's name.
        message = str(error).rstrip().splitlines()[-1].removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")
        print(f"{prog}: error: {message}", file=sys.stderr)
        status = 2
    except Stopped as stopped:
        print(f"{prog}: {stopped}", file=sys.stderr)
        status = 143  # 128 + SIGTERM, as the shell has it
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # the reader of our output (`| head`) has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except Exception as error:
        if not fault_of:
            raise
        traceback.print_exc()
        print(f"{prog}: {one_line(error)}: this is a fault of {fault_of}: please report it", file=sys.stderr)
        status = 2
    sys.exit(status)


@contextmanager
def naming_extra(extra: str = "") -> Iterator[None]:
    """A library that is missing in this context is a UserError that names the extra, if `extra` or EXTRAS knows it."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        extra = extra or next((name for name, libraries in EXTRAS.items() if library in libraries), "")
        if not extra:
            raise
        raise UserError(f"{error}: run pip install 'portproof[{extra}]'") from error


def one_line(error: Exception) -> str:
    """An exception's type and the first line of its message that says something (Paddle's begins with a stack)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    telling = [line for line in lines if "Error" in line] or lines or [""]
    return f"{type(error).__name__}: {telling[0]}"


def printable(text: str) -> str:
    """`text` with a question mark for what cannot be printed, or would begin another line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def existing_file(path: str | Path, what: str) -> Path:
    """`path` if it is a non-empty file; raises UserError that calls it `what`."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{what} {path} is a folder: name a file in it")
    if not path.is_file():
        raise UserError(f"{what} {path} does not exist: check the path")
    if path.stat().st_size == 0:
        raise UserError(f"{what} {path} is empty: fetch or write it again")
    return path


def existing_dir(path: str | Path, what: str) -> Path:
    """`path` if it is a folder; raises UserError that calls it `what`."""
    path = Path(path)
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
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
        raise UserError(
            f"output folder {path} cannot be written ({error.strerror}): choose another with --output-dir"
        ) from error
    return path


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive_int.__name__ = "whole number of at least 1"  # argparse: "invalid whole number of at least 1 value: '0'"


def resolve(path: str, what: str) -> Callable[..., Any]:
    """What "PKG.MOD:NAME" names; raises UserError, which calls it `what`, if it is not there or cannot be called."""
    module_name, _, name = str(path).partition(":")
    if not module_name or not name.isidentifier():
        raise UserError(f"{what} {path!r} is no PKG.MOD:NAME")
    try:
        with naming_extra():
            module = importlib.import_module(module_name)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(f"{what} {path!r}: {error}: put the folder that holds it into PYTHONPATH") from error
    except Exception as error:  # whatever a module of the user's may raise
        raise UserError(f"{what} {path!r}: importing {module_name} raised {one_line(error)}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"{what} {path!r}: {module_name} has no {name} that can be called")
    return getattr(module, name)
