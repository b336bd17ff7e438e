"""Proves that a PaddlePaddle port of a PyTorch model is exact, and says where and why it is not.

portproof COMMAND [flags]      or: python -m portproof COMMAND [flags]; `portproof COMMAND --help` lists the flags
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import NoReturn

from portproof import __version__
from portproof.io.cli import naming_extra
from portproof.io.process import run_in_child, use_threads
from sturdyio.cli import ArgumentParser

PROG = "portproof"
# A module of portproof.commands each, with get_args_parser() and main(args).
COMMANDS = {
    "align": "judge a port against its reference, and say at which module it departs",
    "compare": "compare two result files that anybody wrote",
    "record": "record a reference, so that a port can be judged where PyTorch is not at hand",
    "judge": "judge a port against a recorded reference",
    "convert": "convert weights from one of a pair's frameworks to the other",
    "new": "write a project that proves a pair of your own, a script for each step",
}


def get_args_parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:9} {line}" for name, line in COMMANDS.items())
    parser = ArgumentParser(
        prog=PROG,
        description=f"{__doc__}\ncommands:\n{listed}",
        usage="%(prog)s [--help] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="what to do, see above")
    return parser


def main() -> NoReturn:
    """The command `portproof`. The current folder is imported from, as with `python -m portproof`."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    name = get_args_parser().parse_args(sys.argv[1:2]).command

    def start() -> int:
        with naming_extra():
            command = importlib.import_module(f"portproof.commands.{name}")
            args = command.get_args_parser().parse_args(sys.argv[2:])
            use_threads(getattr(args, "threads", None))
            return command.main(args)

    run_in_child(start, f"{PROG} {name}", fault_of=f"{PROG}, not of what it was given")


if __name__ == "__main__":
    main()
