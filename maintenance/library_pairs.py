"""Judge six models of paddle.vision against torchvision's, and write docs/*/library_pairs.md: where they differ.

  python maintenance/library_pairs.py                          all, a few minutes; vgg11_bn takes 9 GB of memory
  python maintenance/library_pairs.py --only squeezenet1_1     one, printed only

Nobody here wrote either side of these pairs. Exit status: 0 the pages were written (or printed), whatever they say.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from maintenance.phrases import phrased
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, run

PROG = "library_pairs"
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAIRS = {  # torchvision.models: paddle.vision.models
    "resnet18": "resnet18",
    "vgg11_bn": "vgg11(batch_norm=True)",
    "mobilenet_v2": "mobilenet_v2",
    "mobilenet_v3_small": "mobilenet_v3_small",
    "squeezenet1_1": "squeezenet1_1",
    "shufflenet_v2_x1_0": "shufflenet_v2_x1_0",
}
INPUT = "2,3,64,64"
SEED = 0

WORDS = {
    "en": {
        "head": """# Two libraries, one model?

[中文](../zh/library_pairs.md)

`paddle.vision.models` against `torchvision.models`, judged by `portproof` on inputs of {input}, seed {seed}, with
torch {torch}, torchvision {torchvision} and paddle {paddle}. Written by `python maintenance/library_pairs.py`, never \
typed.
Each pair got the same probe weights; the map between the names was proposed, and checked with values, by the program.

| model | tensors | map | eval mode | train mode |
| --- | --- | --- | --- | --- |
""",
        "tail": """
What this means for whoever moves weights between the libraries: where only running variances differ, the same weights
give the same predictions, but a variance measured in training comes out (n - 1) / n of torch's, n being the values per
channel. Any other difference changes what the model predicts.

See it yourself, for instance:
""",
        "differs": {True: "differs", False: "aligned"},
        "none": "No difference was found.",
        "phrases": {},
    },
    "zh": {
        "head": """# 两个库，同一个模型吗？

[English](../en/library_pairs.md)

`paddle.vision.models` 与 `torchvision.models` 相比，由 `portproof` 判断：输入 {input}，seed {seed}，\
torch {torch}、torchvision {torchvision}、paddle {paddle}。本页由 `python maintenance/library_pairs.py` \
生成，不是手写的。每一对模型用相同的探针权重；名字之间的对应关系由程序提出，并用数值核对。

| 模型 | 张量数 | 对应关系 | eval 模式 | train 模式 |
| --- | --- | --- | --- | --- |
""",
        "tail": """
对于在两个库之间迁移权重的人，这意味着：如果只有滑动方差不同，同样的权重给出同样的预测，\
但训练中统计出的方差是 torch 的 (n - 1) / n，n 是每个通道的数值个数。其他任何差异都会改变模型的预测。

可以自己运行来看，例如：
""",
        "differs": {True: "有差异", False: "已对齐"},
        "none": "没有发现差异。",
        "phrases": {
            r"^by name\b": "按名字",
            r"^by order, type and shape\b": "按顺序、类型和 shape",
            r", confirmed by values everywhere$": "，处处由数值证实",
            r", confirmed by values up to layer (\d+) of (\d+)$": r"，由数值证实到第 \1 层（共 \2 层）",
            r" and (\d+) more of that kind: ": r" 及另外 \1 个同样的模块: ",
            r": forward: ": "：前向：",
            r": backward: ": "：反向：",
            r": buffers: ": "：buffer：",
            r"the running variance is the biased one, (.*?) \(torch's is (.*)\)": (
                r"滑动方差是有偏的，即 \1（torch 的是 \2）"
            ),
            r"it is hard-sigmoid with slope (\S+), Paddle's default, not (\w+)": (
                r"它是斜率为 \1（Paddle 的默认值）的 hard-sigmoid，不是 \2"
            ),
            r"padding is (\S+), not (\S+)": r"padding 是 \1，不是 \2",
            r"it gives (\S+) times its input where nothing is dropped \(Paddle's mode (\w+)\)": (
                r"没有丢弃时它给出输入的 \1 倍（Paddle 的模式 \2）"
            ),
        },
    },
}

COMMAND = f"""
<!-- not run: the page is what it prints -->
```shell
python -m portproof align --input {INPUT} \\
    --ref torchvision.models:squeezenet1_1 --port paddle.vision.models:squeezenet1_1
```
"""


@dataclass(frozen=True)
class Judged:
    """What `align` said of a pair."""

    tensors: str = ""  # how many
    how: str = ""  # the map was found, or why there is no verdict
    differs: Sequence[bool] = ()  # in eval mode, in train mode; () if there is no verdict
    lines: Sequence[str] = ()  # what differs and where


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--only", choices=PAIRS, help="judge one pair and print its part")
    return parser


def judged(name: str) -> Judged:
    from portproof import align
    from portproof.compare import FAIL
    from portproof.ladder.pairs.named import draw_inputs, model_factory

    ref = model_factory(f"torchvision.models:{name}")()
    port = model_factory(f"paddle.vision.models:{PAIRS[name]}")()
    verdict = align(ref, port, draw_inputs([INPUT], SEED), seed=SEED)
    if verdict.refusal:
        return Judged(how=verdict.refusal)
    differs = [any(row.status == FAIL and row.item.mode == mode for row in verdict.rows) for mode in ("eval", "train")]
    tensors, _, how = verdict.notes[0].removeprefix("map: ").partition(", ")
    lines = verdict.location.summary() if verdict.location else []
    return Judged(tensors.removesuffix(" tensors"), how.partition(", ")[2], differs, lines)


def page(found: Mapping[str, Judged], language: str, versions: Mapping[str, str]) -> str:
    """docs/LANGUAGE/library_pairs.md; `versions` are those of the libraries by name."""
    words = WORDS[language]
    text = words["head"].format(input=INPUT, seed=SEED, **versions)
    for name, of_pair in found.items():
        modes = [words["differs"][mode] for mode in of_pair.differs] or ["", ""]
        cells = [f"`{name}`", of_pair.tensors, phrased(of_pair.how, words["phrases"]), *modes]
        text += f"| {' | '.join(cells)} |\n"
    for name, of_pair in found.items():
        lines = [phrased(line, words["phrases"]) for line in of_pair.lines] or [words["none"]]
        text += f"\n## {name}\n\n" + "".join(f"- {line}\n" for line in lines)
    return text + words["tail"] + COMMAND


def main(args: argparse.Namespace) -> None:
    try:
        import paddle
        import torch
        import torchvision

        from portproof.io.records import save_text
    except ImportError as error:
        raise UserError(f"both frameworks are needed ({error}): pip install -e '.[align]'") from error
    chosen = [args.only] if args.only else list(PAIRS)
    found = {name: judged(name) for name in tqdm(chosen, "pairs", disable=None)}
    versions = {module.__name__: module.__version__.partition("+")[0] for module in (torch, torchvision, paddle)}
    for language in WORDS:
        text = page(found, language, versions)
        if args.only:
            print(text)
        else:
            save_text(text, DOCS / language / "library_pairs.md")
            print(f"wrote docs/{language}/library_pairs.md")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
