"""How fast the port and the reference are, against the libraries' own models, optimizers and loaders.

  python maintenance/benchmark.py                        all of it on the CPU, in a quarter of an hour
  python maintenance/benchmark.py --device gpu           on a card, in float32 and in mixed precision
  python maintenance/benchmark.py --clock cpu            computing time instead of time passed, on a busy machine

Both sides of each comparison run in turns in this one process. A ratio above 1 means that ours is the faster; each has
a least value that it must reach. Writes OUTPUT_DIR/benchmark.json. Exit status: 0; with --check 1 if a ratio is below
its bound.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mobilenetv3_common.arguments import MODEL_NAMES
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, existing_dir, output_dir, positive_int, run
from portproof.io.files import atomic_path

if TYPE_CHECKING:  # it imports the frameworks, which read the number of threads when they are imported
    from maintenance.speed import Contest, Result

PROG = "benchmark"
ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "benchmark.md"
PARTS = {
    "loader": "Reading a training set of {loader_images} images: the port's loader against the reference's",
    "forward": "Forward passes in eval mode, against the libraries' models",
    "train": "Steps of training (our model, loss and step against the library's model and loss, the same RMSprop)",
    "parts": "Training the port with its own parts, against Paddle's in the same model",
}
HEAD = """# Speed

{setting}. Written by `python maintenance/benchmark.py --write-docs`, never typed.
Both sides of a row ran in turns in one process; figures are medians of {rounds} rounds. The ratio is ours / theirs in
work per time: above 1 ours is the faster, and it must not be below its bound.
"""
COLUMNS = "| what | against | ours | theirs | ratio | bound | met |\n" + "| --- " * 7 + "|\n"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    add("--model", nargs="+", choices=MODEL_NAMES, default=list(MODEL_NAMES), help="sizes to run")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where the models run")
    add("--batch-size", "-b", type=positive_int, default=32, help="images in a batch")
    add("--image-size", type=positive_int, default=224, help="pixels")
    add("--data-path", default=str(ROOT / "lite_data"), help="folder with train/, which the loaders read")
    add("--loader-images", type=positive_int, default=256, help="a pass of a loader; the folder's are repeated")
    add("--rounds", type=positive_int, default=13, help="how often both sides run")
    add("--turn", type=float, default=0.2, metavar="SECONDS", help="what takes less is run several times in a round")
    add("--threads", type=positive_int, default=1, help="of each framework")
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu: computing time, of no use with --device gpu")
    add("--output-dir", default=str(ROOT / "result"), help="where benchmark.json is written")
    add("--write-docs", action="store_true", help="write docs/benchmark.md too")
    add("--check", action="store_true", help="exit with 1 if a ratio is below its bound")
    return parser


def contests(args: argparse.Namespace) -> Iterator["Contest"]:
    """What --only names; loaders come first, before the frameworks have threads that a worker would lack."""
    from maintenance import speed

    if "loader" in args.only:
        yield from speed.loader_contests(args.data_path, args.loader_images, args.batch_size, args.image_size)
    amps = (None, "float16") if args.device == "gpu" else (None,)
    for package in (speed.PORT, speed.REF) if set(args.only) - {"loader"} else ():
        entrant = speed.Entrant(package, args.device, args.batch_size, args.image_size)
        yield from (c for c in speed.model_contests(entrant, args.model, amps) if c.part in args.only)
        if package == speed.PORT and "parts" in args.only:
            yield from speed.layer_contests(entrant, args.model[0])


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """On what the figures were taken."""
    import paddle
    import torch
    import torchvision

    device = torch.cuda.get_device_name() if args.device == "gpu" else platform.machine()
    names = ("batch_size", "image_size", "loader_images", "rounds", "threads", "clock")
    versions = {module.__name__: module.__version__ for module in (torch, torchvision, paddle)}
    return {"device": f"{device}, {os.cpu_count()} cores", **{k: getattr(args, k) for k in names}, "versions": versions}


def amount(seconds: float, images: int) -> str:
    return f"{images / seconds:.1f} images/s" if images else f"{seconds * 1000:.2f} ms"


def cells(result: "Result") -> list[str]:
    amounts = [amount(seconds, result.images) for seconds in (result.ours, result.theirs)]
    figures = [f"{number:.3f}" for number in (result.ratio, result.bound)]
    return [result.name, f"`{result.theirs_name}`", *amounts, *figures, "yes" if result.met else "**no**"]


def page(results: list["Result"], about: dict[str, Any]) -> str:
    """docs/benchmark.md."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    text = HEAD.format(
        setting=f"{about['device']}, {about['threads']} thread(s), batches of {about['batch_size']} at "
        f"{about['image_size']} pixels, {about['clock']} time, {versions}",
        rounds=about["rounds"],
    )
    for part, title in PARTS.items():
        rows = [f"| {' | '.join(cells(result))} |" for result in results if result.part == part]
        if rows:
            text += f"\n## {title.format(**about)}\n\n{COLUMNS}" + "\n".join(rows) + "\n"
    return text


def write(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


def main(args: argparse.Namespace) -> int:
    existing_dir(Path(args.data_path) / "train", "data folder")
    if args.device == "gpu" and args.clock == "cpu":
        raise UserError("--clock cpu does not see what a card does: leave it out")
    out = output_dir(args.output_dir)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    from maintenance import speed

    results = []
    for contest in tqdm(contests(args), "comparisons", disable=None):
        results.append(result := speed.measure(contest, args.rounds, speed.CLOCKS[args.clock], args.turn))
        name, against, ours, theirs, ratio, bound, _ = cells(result)
        mark = "ok  " if result.met else "SLOW"
        tqdm.write(f"{mark} {result.part:8} {name:55} {ours:>15} {against:>27} {theirs:>15}  {ratio} (bound {bound})")
    about = setting(args)
    write(
        out / "benchmark.json",
        json.dumps({**about, "results": [asdict(r) | {"met": r.met} for r in results]}, indent=1),
    )
    if args.write_docs:
        write(DOCUMENT, page(results, about))
    slow = [result for result in results if not result.met]
    print(f"{'SLOW' if slow else 'PASS'} {PROG}: {len(slow)} of {len(results)} ratios below their bounds")
    return int(args.check and bool(slow))


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
