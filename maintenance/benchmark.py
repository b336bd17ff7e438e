"""How fast the port and the reference are, against the libraries' own models, optimizers and loaders.

  python maintenance/benchmark.py                        all of it on the CPU, in half an hour; needs PaDiff
  python maintenance/benchmark.py --only forward train   these parts
  python maintenance/benchmark.py --device gpu           on a card, in float32 and in mixed precision
  python maintenance/benchmark.py --clock cpu            computing time instead of time passed, on a busy machine

Both sides of each comparison run in turns, in this one process; those of a proof in processes of their own. A ratio
above 1 means that ours is the faster; each has a least value that it must reach, and misses it if the rounds leave no
doubt: if all of the 95 % interval of their median is below it. Writes OUTPUT_DIR/benchmark.json. Exit status: 0; with
--check 1 if a ratio misses its bound.
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

from maintenance.phrases import phrased
from mobilenetv3_common.arguments import MODEL_NAMES
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, existing_dir, output_dir, positive_int, run
from portproof.io.files import atomic_path

if TYPE_CHECKING:  # it imports the frameworks, which read the number of threads when they are imported
    from maintenance.speed import Contest, Result

PROG = "benchmark"
ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PARTS = ("loader", "forward", "train", "parts", "proof")
WORDS = {
    "en": {
        "head": """# Speed

[中文](../zh/benchmark.md)

{device}, {threads} thread(s), batches of {batch_size} at {image_size} pixels, {clock} time, {libraries}. Written by \
`python maintenance/benchmark.py --write-docs`, never typed.
Both sides of a row ran in turns in one process; figures are medians of {rounds} rounds. The ratio is ours / theirs in
work per time: above 1 ours is the faster. In brackets is where its median lies with 95 % confidence, by the order of
the rounds' ratios; of fewer than 6 rounds the smallest and the largest. A bound is missed if all of that is below it.
""",
        "loader": "Reading a training set of {loader_images} images: the port's loader against the reference's",
        "forward": "Forward passes in eval mode, against the libraries' models",
        "train": "Steps of training (our model, loss and step against the library's model and loss, the same RMSprop)",
        "parts": "Training the port with its own parts, against Paddle's in the same model",
        "proof": "What a proof costs: the ladder with its imports; portproof's align without them, on two libraries' "
        "models, 2 images of 64 pixels, {proof_rounds} round(s), each run in a process of its own",
        "columns": "| what | against | ours | theirs | ratio [95 %] | bound | met |",
        "comma": ", ",
        "met": {True: "yes", False: "**no**"},
        "phrases": {},
    },
    "zh": {
        "head": """# 速度

[English](../en/benchmark.md)

{device}，{threads} 个线程，batch size {batch_size}，图像 {image_size} 像素，{clock}，{libraries}。\
本页由 `python maintenance/benchmark.py --write-docs` 生成，不是手写的。\
每一行的两边在同一个进程里轮流运行；数值是 {rounds} 轮的中位数。\
比值是单位时间内我们的工作量除以对方的：大于 1 表示我们更快。\
方括号里是比值中位数的 95% 置信区间，由各轮比值的次序统计量得出；不足 6 轮时是最小值和最大值。\
整个区间都低于下限，才算没有达到。
""",
        "loader": "读取 {loader_images} 张图像的训练集：移植版与参考代码的 DataLoader 相比",
        "forward": "eval 模式的前向，与两个库的模型相比",
        "train": "训练的一步（我们的模型、损失函数和步骤，与库的模型和损失函数相比，RMSprop 相同）",
        "parts": "移植版用自己的部件训练，与同一个模型里用 Paddle 的部件相比",
        "proof": "一次证明的开销：验证阶梯，含 import；portproof 的 align，不含 import，用于两个库的模型，"
        "2 张 64 像素的图像，{proof_rounds} 轮，每次运行各用一个进程",
        "columns": "| 内容 | 对比 | 我们的 | 对方的 | 比值 [95 %] | 下限 | 达到 |",
        "comma": "、",
        "met": {True: "是", False: "**否**"},
        "phrases": {
            r"^port, ": "移植版，",
            r"^reference, ": "参考代码，",
            r"plain augmentation, ": "普通数据增强，",
            r"official augmentation, ": "官方数据增强，",
            r"(\d+) workers$": r"\1 个子进程",
            r"^step with our batch norm, ": "用我们的 batch norm 训练一步，",
            r"^step with our RMSprop, ": "用我们的 RMSprop 训练一步，",
            r"^update by our RMSprop, ": "我们的 RMSprop 更新一次，",
            r", (float\d+)$": r"，\1",
            r", (\d+) cores$": r"，\1 个核",
            r" images/s$": " 张/秒",
            r" ms$": " 毫秒",
            r"^(\d[\d.]*) s$": r"\1 秒",
            r"^rungs 01 to 05": "第 01 到 05 步",
            r", align in float32 alone": "，只用 float32 的 align",
            r", align's own passes in float32": "，align 自己的 float32 前向与反向",
            r", align\b": "，align",
            r", memory$": "，内存",
            r", time$": "，时间",
            r"^wall$": "按经过的时间计",
            r"^cpu$": "按 CPU 计算时间计",
        },
    },
}


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    add("--model", nargs="+", choices=MODEL_NAMES, default=list(MODEL_NAMES), help="sizes to run")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where the models run")
    add("--batch-size", "-b", type=positive_int, default=32, help="images in a batch")
    add("--image-size", type=positive_int, default=224, help="pixels")
    add("--data-path", default=str(ROOT / "lite_data"), help="folder with train/, which the loaders read")
    add("--loader-images", type=positive_int, default=256, help="a pass of a loader; the folder's are repeated")
    add("--rounds", type=positive_int, default=13, help="how often both sides run")
    add("--proof-rounds", type=positive_int, default=3, help="the same of the part proof, which takes minutes a round")
    add("--turn", type=float, default=0.2, metavar="SECONDS", help="what takes less is run several times in a round")
    add("--threads", type=positive_int, default=1, help="of each framework")
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu: computing time, of no use with --device gpu")
    add("--output-dir", default=str(ROOT / "result"), help="where benchmark.json is written")
    add("--write-docs", action="store_true", help="write docs/*/benchmark.md too")
    add("--check", action="store_true", help="exit with 1 if a ratio misses its bound")
    return parser


def contests(args: argparse.Namespace) -> Iterator["Contest"]:
    """What --only names; loaders come first, before the frameworks have threads that a worker would lack."""
    from maintenance import speed

    if "loader" in args.only:
        yield from speed.loader_contests(args.data_path, args.loader_images, args.batch_size, args.image_size)
    amps = (None, "float16") if args.device == "gpu" else (None,)
    for package in (speed.PORT, speed.REF) if set(args.only) - {"loader", "proof"} else ():
        entrant = speed.Entrant(package, args.device, args.batch_size, args.image_size)
        yield from (c for c in speed.model_contests(entrant, args.model, amps) if c.part in args.only)
        if package == speed.PORT and "parts" in args.only:
            yield from speed.layer_contests(entrant, args.model[0])


def measured(args: argparse.Namespace) -> Iterator["Result"]:
    """What `contests` gives in turns, then the proofs."""
    from maintenance import proof_speed, speed

    for contest in contests(args):
        yield speed.measure(contest, args.rounds, speed.CLOCKS[args.clock], args.turn)
    if "proof" in args.only:
        yield from proof_speed.results(args.proof_rounds, args.clock)


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """On what the figures were taken."""
    import paddle
    import torch
    import torchvision

    device = torch.cuda.get_device_name() if args.device == "gpu" else platform.machine()
    names = ("batch_size", "image_size", "loader_images", "rounds", "proof_rounds", "threads", "clock")
    versions = {module.__name__: module.__version__ for module in (torch, torchvision, paddle)}
    return {"device": f"{device}, {os.cpu_count()} cores", **{k: getattr(args, k) for k in names}, "versions": versions}


def amount(figure: float, images: int, unit: str) -> str:
    """Seconds as images a second, or as milliseconds below a second."""
    if images:
        return f"{images / figure:.1f} images/s"
    return f"{figure:.2f} {unit}" if unit != "s" or figure >= 1 else f"{figure * 1000:.2f} ms"


def cells(result: "Result", language: str = "en") -> list[str]:
    words = WORDS[language]
    amounts = [amount(figure, result.images, result.unit) for figure in (result.ours, result.theirs)]
    low, high = result.interval
    figures = [f"{result.ratio:.3f} [{low:.3f}, {high:.3f}]", f"{result.bound:.3f}"]
    name, *amounts = (phrased(text, words["phrases"]) for text in (result.name, *amounts))
    return [name, f"`{result.theirs_name}`", *amounts, *figures, words["met"][result.met]]


def page(results: list["Result"], about: dict[str, Any], language: str) -> str:
    """docs/LANGUAGE/benchmark.md."""
    words = WORDS[language]
    own = {key: phrased(about[key], words["phrases"]) for key in ("device", "clock")}
    own["libraries"] = words["comma"].join(f"{name} {version}" for name, version in about["versions"].items())
    text = words["head"].format(**{**about, **own})
    for part in PARTS:
        rows = [f"| {' | '.join(cells(result, language))} |" for result in results if result.part == part]
        if rows:
            title = words[part].format(**about)
            text += "\n".join(["", f"## {title}", "", words["columns"], "| --- " * 7 + "|", *rows, ""])
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
    from maintenance import proof_speed

    if "proof" in args.only:
        proof_speed.check_padiff()

    results = []
    for result in tqdm(measured(args), "comparisons", disable=None):
        results.append(result)
        name, against, ours, theirs, ratio, bound, _ = cells(result)
        mark = "ok  " if result.met else "SLOW"
        tqdm.write(f"{mark} {result.part:8} {name:55} {ours:>15} {against:>27} {theirs:>15}  {ratio}  bound {bound}")
    about = setting(args)
    write(
        out / "benchmark.json",
        json.dumps({**about, "results": [asdict(r) | {"ratio": r.ratio, "met": r.met} for r in results]}, indent=1),
    )
    if args.write_docs:
        for language in WORDS:
            write(DOCS / language / "benchmark.md", page(results, about, language))
    slow = [result for result in results if not result.met]
    print(f"{'SLOW' if slow else 'PASS'} {PROG}: {len(slow)} of {len(results)} ratios miss their bounds")
    return int(args.check and bool(slow))


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
