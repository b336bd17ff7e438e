"""Kill a training command at random moments until it has been killed often enough; started by test_nothing_lost.py.

    python tests/killed_runs.py PACKAGE KILLS SEED FOLDER FLAG...

Every run is a fork of this process, which has imported what takes long. FOLDER/unbroken is a run that is left alone;
in FOLDER/killed_N a run is killed with SIGKILL and resumed until it ends, then the next one begins. Prints how many
times it killed, and ends with an error if a run that was not killed did.
"""

import argparse
import importlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from mobilenetv3_common.arguments import get_args_parser
from sturdyio.cli import run


def start(package: str, flags: list[str], folder: Path) -> int:
    """The process id of a training run in `folder`, which goes on from its checkpoint if it has one."""
    checkpoints = sorted(folder.glob("checkpoint.*"))
    flags = [*flags, f"--output-dir={folder}", *(f"--resume={path}" for path in checkpoints)]
    training = importlib.import_module(f"{package}.train.main")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run(lambda: training.main(get_args_parser("train", "either").parse_args(flags)), "train")
        except SystemExit as ended:
            status = ended.code
        finally:
            os._exit(status)
    return pid


def wait(pid: int, seconds: float) -> bool:
    """Whether the run ended well within `seconds`; else it is killed. Exits if it ended by itself and not well."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status:
                sys.exit(f"a run ended with status {os.waitstatus_to_exitcode(status)}")
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def is_done(package: str, folder: Path) -> bool:
    """Whether the run was killed after its last checkpoint, so that nothing is left to resume."""
    checkpoint = importlib.import_module(f"{package}.train.checkpoint")
    saved = [checkpoint.read_checkpoint(path) for path in folder.glob("checkpoint.*")]
    return any(content["epoch"] == content["args"]["epochs"] for content in saved)


def main(args: argparse.Namespace) -> None:
    moments = random.Random(args.seed)
    begin = time.monotonic()
    wait(start(args.package, args.flags, args.folder / "unbroken"), 600)
    length = time.monotonic() - begin
    kills, number = 0, 0
    while kills < args.kills:
        begin = time.monotonic()
        folder = args.folder / f"killed_{number}"
        ended = wait(start(args.package, args.flags, folder), moments.uniform(0, length))
        kills += not ended
        number += ended or is_done(args.package, folder)
        if ended:  # in less time than it takes from the beginning
            length = max(time.monotonic() - begin, 0.8 * length)
    wait(start(args.package, args.flags, args.folder / f"killed_{number}"), 600)
    print(f"killed {kills} times, {number + 1} runs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("kills", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    main(parser.parse_args())
