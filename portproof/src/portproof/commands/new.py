"""Write a project that proves a pair of your own: a folder with a script for each rung of the ladder.

  portproof new proof --ref my.net:Net --port my_port.net:Net --input 2,3,224,224

Rungs that need no more than the two models run at once: 01 (forward), the gradients of 05, and 06 (initial weights).
The others say in one line what to fill in, and exit with 2 until then.
"""

import argparse
from pathlib import Path

from portproof.io.cli import ArgumentParser, HelpFormatter, UserError

NAME = "new"


def get_args_parser(prog: str = "portproof new") -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=prog, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write; must be new or empty")
    return parser


def main(args: argparse.Namespace) -> int:
    """Raises UserError for a folder that is not empty, and for a pair that cannot be imported or made."""
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        raise UserError(f"{args.folder} exists and is not empty: name another folder")
    inputs = args.input or ["2,3,224,224"]
    check_pair(args.ref, args.port, inputs)
    write_project(args.folder, args.ref, args.port, inputs)
    print(f"wrote {args.folder}: run python {args.folder / 'steps' / 'run_all.py'}")
    return 0
