"""How much of a process that only decodes and predicts the service keeps: requests a second, latency, memory.

  python -m maintenance.benchmarks.service --model exported/port [--reference exported/ref]

Both answer the same JPEGs of about 20 KB, in turns of `--seconds` each: one process that decodes, preprocesses and runs
the engine on whole batches, and tools/serve.py under 32 clients, each with one request at a time. What counts is the
ratio of the two, its median over `--rounds`; a busy machine changes it less than either. The clients compute on the
same machine. Memory is what the service's own processes hold after these turns, and after --requests more.

Exit status: 0 the ratio may reach --least, 1 all of its interval lies below, 2 something must be fixed first.
"""

import argparse
import asyncio
import io
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np

from maintenance import ROOT
from maintenance.benchmarks.speed import Result
from mobilenetv3_common.images import decode_image, read_image
from mobilenetv3_deploy.predict import Predictor
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, run

PROG = "service"
CLIENTS, BATCH = 32, 32
KILOBYTES = 20  # of an upload


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="the port's exported model")
    add("--reference", metavar="DIR", help="the reference's, which both then run as well")
    add("--engine", default="best", metavar="NAME", help="of both")
    add("--seconds", type=positive_int, default=5, metavar="N", help="of a turn")
    add("--rounds", type=positive_int, default=7, metavar="N", help="turns of each")
    add(
        "--requests",
        type=positive_int,
        default=10_000,
        metavar="N",
        help="at least so many more before memory is read again",
    )
    add("--least", type=float, default=0.8, metavar="X", help="the ratio that is asked")
    add("--port", type=positive_int, default=8000, metavar="N", help="of the service")
    return parser


def uploads() -> list[bytes]:
    """The images of lite_data/val, as JPEGs of about KILOBYTES."""
    made = []
    for path in sorted((ROOT / "lite_data" / "val").rglob("*.JPEG")):
        image = read_image(path)
        for quality in range(95, 5, -5):
            data = io.BytesIO()
            image.save(data, "JPEG", quality=quality)
            if data.tell() <= KILOBYTES * 1000:
                break
        made.append(data.getvalue())
    return made


def alone(predictors: Sequence[Predictor], images: Sequence[bytes], seconds: float) -> float:
    """Images a second of this process, in batches of BATCH."""
    source, done, start = itertools.cycle(images), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = [decode_image(data, "image") for data in itertools.islice(source, BATCH)]
        for predictor in predictors:
            predictor(batch)
        done += BATCH
    return done / (time.perf_counter() - start)


async def under_load(url: str, images: Sequence[bytes], seconds: float, latencies: list[float]) -> float:
    """Answers a second that CLIENTS clients get; adds the seconds of each to `latencies`.

    Raises aiohttp.ClientResponseError for a refusal.
    """
    end, before = time.perf_counter() + seconds, len(latencies)

    async def client(first: int) -> None:
        async with aiohttp.ClientSession(url, raise_for_status=True) as one:
            for data in itertools.islice(itertools.cycle(images), first, None):
                start = time.perf_counter()
                if start > end:
                    return
                async with one.post("/predict", data=data, headers={"Content-Type": "image/jpeg"}) as response:
                    await response.read()
                latencies.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return (len(latencies) - before) / (time.perf_counter() - start)


def memory(process: int) -> dict[str, int]:
    """Kilobytes that are not shared, of the service's process and of all below it, by what they are called."""
    found: dict[str, int] = {}
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        parents[int(path.parent.name)] = int(fields[1])
    family = {process}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    for pid in family:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        private = sum(map(int, re.findall(r"^Private_\w+: +(\d+) kB", rollup, re.MULTILINE)))
        name = Path(words[0].decode(errors="replace")).name
        found[name] = found.get(name, 0) + private
    return found


def start_service(args: argparse.Namespace) -> subprocess.Popen:
    """tools/serve.py, ready; raises UserError if it ends instead."""
    flags = ["--model", args.model, "--engine", args.engine, "--port", str(args.port)]
    flags += ["--reference", args.reference] if args.reference else []
    flags += ["--metrics-port", str(args.port + 1)]
    process = subprocess.Popen([sys.executable, ROOT / "tools" / "serve.py", *flags], stdout=subprocess.PIPE, text=True)
    if not process.stdout.readline():
        raise UserError("the service did not start: see its message above")
    return process


def main(args: argparse.Namespace) -> int:
    images = uploads()
    predictors = [Predictor(folder, args.engine) for folder in (args.model, args.reference) if folder]
    service, url = start_service(args), f"http://127.0.0.1:{args.port}"
    latencies: list[float] = []
    try:
        asyncio.run(under_load(url, images, args.seconds, latencies))  # the first requests also warm it up
        latencies.clear()
        ours, theirs = [], []
        for _ in range(args.rounds):
            theirs.append(alone(predictors, images, args.seconds))
            ours.append(asyncio.run(under_load(url, images, args.seconds, latencies)))
        first, more = memory(service.pid), []
        while len(more) < args.requests:
            asyncio.run(under_load(url, images, args.seconds, more))
        last = memory(service.pid)
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait()
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    name = f"service, {CLIENTS} clients"
    result = Result("service", name, "one process", np.median(ours), np.median(theirs), ratios, args.least, 0)
    low, high = result.interval
    print(f"{name}: {result.ours:.1f} requests/s; one process, batches of {BATCH}: {result.theirs:.1f} images/s")
    print(f"ratio {result.ratio:.2f} ({low:.2f} to {high:.2f}) of {len(ratios)} rounds, at least {args.least} is asked")
    p50, p99 = np.percentile(latencies, [50, 99])
    print(f"latency p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, of {len(latencies)} requests")
    print(f"private memory after these, and after {len(more)} requests more, MB:")
    for process in sorted(last, key=last.get, reverse=True):
        print(f"  {process:<34} {first.get(process, 0) / 1000:>8.1f} {last[process] / 1000:>8.1f}")
    print(f"  {'all':<34} {sum(first.values()) / 1000:>8.1f} {sum(last.values()) / 1000:>8.1f}")
    return 0 if result.met else 1


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
