"""Put one of the gallery's porting mistakes into a copy of the port, to see what the steps say of it.

  python tools/inject_fault.py --list                       the names of all
  python tools/inject_fault.py "flip missing" broken        writes broken/mobilenetv3_paddle/, with the mistake in it
  PYTHONPATH=broken python steps/02_test_data.py            runs a step on that copy

The port itself is not touched; delete the folder when you have seen enough.
"""

import argparse
from pathlib import Path

from maintenance import ROOT
from maintenance.checks.gallery import FAULTS, PORT, Fault, copy_port, load_faults
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, run

NAME = "inject_fault"


def find(name: str) -> Fault:
    """The fault of that name; raises UserError."""
    for fault in load_faults(FAULTS):
        if fault.name == name:
            return fault
    raise UserError(f"no fault is called {name!r}: --list names them all")


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=NAME, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--list", action="store_true", help="name all faults and the step that catches each")
    parser.add_argument("fault", nargs="?", help="its name, in quotes")
    parser.add_argument("folder", nargs="?", type=Path, help="where the copy goes; must not exist")
    return parser


def main(args: argparse.Namespace) -> int:
    """Raises UserError for a fault that is not there, and for a folder that is."""
    if args.list:
        for fault in load_faults(FAULTS):
            print(f"{fault.rung:<17} {fault.name}")
        return 0
    if args.folder is None:
        raise UserError("name a fault and a folder: --list names the faults")
    fault = find(args.fault)
    if args.folder.exists():
        raise UserError(f"{args.folder} exists: delete it, or name another folder")
    try:
        copy_port(args.folder, fault)
    except OSError as error:
        raise UserError(f"{args.folder} cannot be written ({error}): choose another folder") from error
    line = (ROOT / PORT / fault.file).read_text(encoding="utf-8").partition(fault.right)[0].count("\n") + 1
    print(fault.stands_for)
    print(f"{args.folder / PORT / fault.file}:{line}")
    for sign, text in (("-", fault.right), ("+", fault.wrong)):
        print("\n".join(f"{sign} {part}" for part in text.splitlines()))
    print(f"now run: PYTHONPATH={args.folder} python steps/{fault.rung}.py")
    return 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
