"""Measure how exact PyTorch's and PaddlePaddle's float64 operations are, and write the table that the kit is tested by.

  python portproof/tests/write_float64_constants.py          some seconds

Each operation with a constant is run in float64, forward and backward, and compared with its formula. The table says of
each version how far an operation is off, and which constants are float32 if that is why; the same with what portproof
replaces in float64; and which replacements the version needs. The rows of the installed versions are written anew, the
others stay. --device gpu measures the operations of a card, in a row of their own. For another version, install it into
a folder of its own (pip install --no-deps --target) and put that into PYTHONPATH. Exit status: 0;
portproof/tests/test_float64_constants.py compares.
"""

import argparse
import json
from pathlib import Path

from float64_operations import TABLE, Framework, load, row

from portproof.io.records import save_text
from sturdyio.cli import ArgumentParser, HelpFormatter, run

PROG = "write_float64_constants"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table; by default the tests'")
    parser.add_argument("--only", nargs="+", choices=("torch", "paddle"), default=("torch", "paddle"), metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where the operations run")
    return parser


def version_key(name: str) -> tuple:
    framework, version, *device = name.split()
    return framework, [int(part) for part in version.split(".")], device


def main(args: argparse.Namespace) -> int:
    table = load()
    for framework in (Framework(name, args.device) for name in args.only):
        found = table[framework.version] = row(framework)
        print(f"{framework.version}: {len(found['as it is'])} results are not exact", end=", ")
        print(f"{len(found['with replacements'])} with the {len(found['needed'])} replacements that it needs:")
        for what, said in found["with replacements"].items():
            print(f"  {what}: {said}")
    table = {name: table[name] for name in sorted(table, key=version_key)}
    save_text(json.dumps(table, indent=1) + "\n", args.output or TABLE)
    return 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
