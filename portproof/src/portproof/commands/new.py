"""Write a project that proves a pair of your own: a folder with a script for each step.

  portproof new proof --ref my.net:Net --port my_port.net:Net --input 2,3,224,224

Steps that need no more than the two models run at once: 01 (forward), the gradients of 05, and 06 (initial weights).
The others say in one line what to fill in, and exit with 2 until then.
"""

import argparse
import json
import tempfile
from pathlib import Path
from string import Template

from portproof.commands.arguments import INPUT, PAIR, add_flags, load_models, read_map
from portproof.compare import DONE, exit_status
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError

PROG = "portproof new"
TEMPLATE = Path(__file__).parent / "project"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write; must be new or empty")
    add_flags(parser, *PAIR)
    parser.set_defaults(seed=0)
    return parser


def main(args: argparse.Namespace) -> int:
    folder = args.folder
    inputs = args.input or [INPUT]
    names = read_map(args.map)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: name another folder")
    load_models(args)
    values = {"ref": args.ref, "port": args.port, "inputs": json.dumps(inputs), "names": json.dumps(names)}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".portproof-") as temporary:
            whole = Path(temporary) / "project"
            for template in TEMPLATE.rglob("*.txt"):  # no Python before they are filled in
                path = whole / template.relative_to(TEMPLATE).with_suffix("")
                path.parent.mkdir(parents=True, exist_ok=True)
                text = Template(template.read_text(encoding="utf-8")).substitute(values)
                path.write_text(text, encoding="utf-8")
            whole.rename(folder)  # may replace an empty folder
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): name another folder") from error
    print(f"wrote {folder}; where {args.ref.partition(':')[0]} and {args.port.partition(':')[0]} can be imported, run:")
    print(f"  PYTHONPATH=. python {folder / 'steps' / 'run_all.py'}")
    return exit_status(DONE)
