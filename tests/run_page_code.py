"""Runs the code of pages, all of a framework in one process: python tests/run_page_code.py torch FOLDER PAGE ...

A page's blocks under `**PyTorch**` are one program, in the order of the page; so are those under `**PaddlePaddle**`.
What stands under `<!-- run: both -->` is in both. A program runs in FOLDER/PAGE, beside `lite_data` and what the same
page's program of the framework before has written there. Prints one JSON object a line: the page, and the traceback,
"" if nothing was raised.
"""

import contextlib
import io
import json
import linecache
import os
import sys
import traceback
from itertools import pairwise
from pathlib import Path

from markdown_pages import ROOT, blocks

FRAMEWORKS = {"torch": "**PyTorch**", "paddle": "**PaddlePaddle**"}  # in this order: the reference runs first


def program(page: str, framework: str) -> str:
    """The page's code for the framework; "" if it has none."""
    wanted = ([FRAMEWORKS[framework]], ["<!-- run: both -->"])
    named = ((name, block) for name, block in pairwise(blocks(page)) if name.lines in wanted and block.kind == "code")
    return "\n\n".join("\n".join(block.lines) for _, block in named)


def run(page: str, framework: str, folder: Path) -> str:
    """Run it and return its traceback, "" if it raised nothing."""
    home = folder / page.replace("/", "-")
    home.mkdir(exist_ok=True)
    if not (home / "lite_data").exists():
        (home / "lite_data").symlink_to(ROOT / "lite_data")
    os.chdir(home)
    code, title = program(page, framework), f"{page} ({framework})"
    linecache.cache[title] = len(code), None, code.splitlines(keepends=True), title  # a traceback shows the lines
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, title, "exec"), {"__name__": "__main__"})
    except BaseException:  # SystemExit, too, must not end the run of the others
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # as for a reader, who stands in the project's folder
    printer = os.fdopen(os.dup(1), "w")  # what a framework prints itself goes to stderr
    os.dup2(2, 1)
    for name in sys.argv[3:]:
        print(json.dumps({"page": name, "error": run(name, sys.argv[1], Path(sys.argv[2]))}), file=printer, flush=True)
