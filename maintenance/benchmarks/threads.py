"""How long commands take with one thread and with one for each core, on an idle machine and beside busy processes.

  python -m maintenance.benchmarks.threads --rounds 3

All variants of a command run in turns; a figure is the median of its rounds, in seconds, imports included. Prints the
rows of the table in docs/en/commands.md. Needs a machine on which nothing else runs.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from tqdm import tqdm

from maintenance import ROOT
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, run

PROG = "threads"
ALIGN = "-m portproof align --ref torchvision.models:{0} --port paddle.vision.models:{0} --mode eval --input {1}"
COMMANDS = {
    "step 01": "steps/01_test_forward.py",
    "step 05": "steps/05_test_backward.py",
    "`align`, mobilenet_v3_small, 2,3,64,64": ALIGN.format("mobilenet_v3_small", "2,3,64,64"),
    "`align`, resnet18, 2,3,64,64": ALIGN.format("resnet18", "2,3,64,64"),
    "`align`, resnet50, 2,3,224,224": ALIGN.format("resnet50", "2,3,224,224"),
    "`align`, vgg16, 2,3,224,224": ALIGN.format("vgg16", "2,3,224,224"),
}
BUSY = 0, 1, 2


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=3, help="how often each is measured")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="commands whose title has one of these")
    return parser


def spin() -> None:
    while True:
        pass


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that compute all the time."""
    processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def seconds(command: str, threads: int) -> float:
    """Wall time; raises UserError if the command ends with another status than 0 or 1, which say that it has judged."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    words = [sys.executable, *command.split()]
    ended = subprocess.run(words, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise UserError(f"{command} ended with status {ended.returncode}: {ended.stderr.strip()[-500:]}")
    return time.perf_counter() - start


def main(args: argparse.Namespace) -> None:
    cores = len(os.sched_getaffinity(0))
    chosen = {title: command for title, command in COMMANDS.items() if any(word in title for word in args.only or [""])}
    variants = [(count, threads) for count in BUSY for threads in (1, cores)]
    times: dict[tuple[str, tuple[int, int]], list[float]] = {}
    with tqdm(total=len(chosen) * len(variants) * args.rounds, disable=None) as bar:
        for _ in range(args.rounds):
            for title, command in chosen.items():
                for count, threads in variants:
                    with busy(count):
                        times.setdefault((title, (count, threads)), []).append(seconds(command, threads))
                    bar.update()
    for title in chosen:
        figures = [f"{median(times[title, variant]):.1f}" for variant in variants]
        print(f"| {title} | {' | '.join(figures)} |")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
