"""What a chapter's notebook needs in its kernel: an extension of IPython, which the first cell loads.

It sets the project's environment up, so that commands of `%%bash` find it, and defines the magic `%%program`. A
chapter's code of PyTorch is one program, that of PaddlePaddle another. `%%program torch` executes a cell in the process
of the first, `%%program paddle` in that of the second, `%%program torch paddle` in both. They are processes of the
project's environment, whatever the kernel itself runs in. One that has died or was interrupted begins anew.
"""

import json
import linecache
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

END = "\x04"  # stands after all that a cell prints, and before whether it raised
PROCESSES: dict[str, subprocess.Popen] = {}


def load_ipython_extension(ipython: Any) -> None:
    """Set up and define the magic; raises CalledProcessError where the set-up fails, which says why on stderr."""
    done = subprocess.run(["sh", "shell/setup.sh"], stdout=subprocess.PIPE, text=True, check=True)
    os.environ["PATH"] = os.pathsep.join([str(Path(done.stdout.strip()).parent), os.environ["PATH"]])
    ipython.register_magic_function(program, "cell")


def program(line: str, cell: str) -> None:
    """Execute the cell in the programs that the line names; raises RuntimeError where it raises."""
    for name in line.split():
        if name not in PROCESSES or PROCESSES[name].poll() is not None:
            PROCESSES[name] = subprocess.Popen(
                ["python", "-u", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        try:
            outcome = _execute(PROCESSES[name], cell)
        except KeyboardInterrupt:
            PROCESSES[name].kill()
            PROCESSES[name].wait()
            raise
        if outcome:
            raise RuntimeError(f"the program of {name} {outcome}")


def _execute(process: subprocess.Popen, code: str) -> str:
    """Print what the code prints; returns "" or what went wrong."""
    print(json.dumps(code), file=process.stdin, flush=True)
    for line in process.stdout or ():
        printed, end, outcome = line.partition(END)
        print(printed, end="", flush=True)
        if end:
            return outcome.strip()
    return f"has ended with exit status {process.wait()}"


def main() -> None:
    """Execute what stdin holds, a cell a line."""
    names = {"__name__": "__main__"}
    for number, line in enumerate(sys.stdin, start=1):
        code, title, outcome = json.loads(line), f"<cell {number}>", ""
        linecache.cache[title] = len(code), None, code.splitlines(keepends=True), title  # a traceback shows the lines
        try:
            exec(compile(code, title, "exec"), names)
        except BaseException:  # SystemExit, too, must not end the program
            traceback.print_exc()
            outcome = "has raised what is shown above"
        print(END + outcome, flush=True)


if __name__ == "__main__":
    main()
