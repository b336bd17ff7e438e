"""Judge six models of paddle.vision against torchvision's, and write docs/library_pairs.md: where the libraries differ.

  python maintenance/library_pairs.py                          all, a few minutes; vgg11_bn takes 9 GB of memory
  python maintenance/library_pairs.py --only squeezenet1_1     one, printed only

Nobody here wrote either side of these pairs. Exit status: 0 the document was written (or printed), whatever it says.
"""

import argparse
from pathlib import Path

from tqdm import tqdm

from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, run

PROG = "library_pairs"
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "library_pairs.md"
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

HEAD = """# Two libraries, one model?

`paddle.vision.models` against `torchvision.models`, judged by `portproof` on inputs of {input}, seed {seed}, with
torch {torch}, torchvision {torchvision} and paddle {paddle}. Written by
`python maintenance/library_pairs.py`, never typed.
Each pair got the same probe weights; the map between the names was proposed, and checked with values, by the program.

| model | tensors | map | eval mode | train mode |
| --- | --- | --- | --- | --- |
"""
TAIL = """
What this means for whoever moves weights between the libraries: where only running variances differ, the same weights
give the same predictions, but a variance measured in training comes out (n - 1) / n of torch's, n being the values per
channel. Any other difference changes what the model predicts.

See it yourself, for instance:

```shell
python -m portproof align --input {input} \\
    --ref torchvision.models:squeezenet1_1 --port paddle.vision.models:squeezenet1_1
```
"""


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--only", choices=PAIRS, help="judge one pair and print its part")
    return parser


def judged(name: str) -> tuple[str, list[str]]:
    """(the pair's row of the table, what differs and where, one line each)."""
    from portproof import align
    from portproof.compare import FAIL
    from portproof.ladder.pairs.named import draw_inputs, model_factory

    ref = model_factory(f"torchvision.models:{name}")()
    port = model_factory(f"paddle.vision.models:{PAIRS[name]}")()
    verdict = align(ref, port, draw_inputs([INPUT], SEED), seed=SEED)
    if verdict.refusal:
        return f"| `{name}` | | {verdict.refusal} | | |", []
    failed = {
        mode: any(row.status == FAIL and row.item.mode == mode for row in verdict.rows) for mode in ("eval", "train")
    }
    words = ["differs" if failed[mode] else "aligned" for mode in ("eval", "train")]
    tensors, _, how = verdict.notes[0].removeprefix("map: ").partition(", ")
    how = how.partition(", ")[2]
    row = f"| `{name}` | {tensors.removesuffix(' tensors')} | {how} | {' | '.join(words)} |"
    return row, verdict.location.summary() if verdict.location else []


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
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "paddle": paddle.__version__}
    text = HEAD.format(input=INPUT, seed=SEED, **{k: v.partition("+")[0] for k, v in versions.items()})
    text += "".join(f"{row}\n" for row, _ in found.values())
    for name, (_, lines) in found.items():
        text += f"\n## {name}\n\n" + "".join(f"- {line}\n" for line in lines or ["No difference was found."])
    text += TAIL.format(input=INPUT)
    if args.only:
        print(text)
    else:
        save_text(text, DOCUMENT)
        print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
