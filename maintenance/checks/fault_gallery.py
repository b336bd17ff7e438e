"""Try the fault gallery: put each mistake of checks/faults.yaml into a copy of the port, and run the rungs.

  python maintenance/checks/fault_gallery.py                  rewrites docs/*/fault_gallery.md: what caught each
  python maintenance/checks/fault_gallery.py --check          says whether the docs are what a run gives
  python maintenance/checks/fault_gallery.py --only metric    tries one area, or one fault by name, and prints its rows

Exits with 1 if a fault is missed, or if another thing is named than the one that is wrong.
"""

import argparse
import difflib
import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from maintenance import DOCS
from maintenance.checks.gallery import AREAS, FAULTS, LOCATED_AREAS, Fault, Outcome, Run, load_faults, run_gallery
from portproof.io.records import save_text
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, run

NAME = "fault_gallery"

WORDS = {
    "en": {
        "head": """\
# The fault gallery

[中文](../zh/fault_gallery.md)

A check is worth what it catches. Each row is a mistake that people make when they port a model, put into a copy of the
port; the steps then ran on it from the first on, until one failed. Faults of exported graphs have [a page of their
own](exported_faults.md).

{totals}

- **Caught by** is {caught_by}.
- **Named** is what that step's report says first: the item that differs, or for a fault in the model or its weights
  the module in which it lies.
- **reprod_log** is the verdict of its `ReprodDiffHelper`, with the limit that its users take (`diff_method="mean"`,
  `diff_threshold=1e-6`), on the two files that the same step wrote: "always fails" where it also alarms on the
  correct port, so the alarm means nothing; "-" where the step stopped before all was recorded.

This page is generated from `maintenance/checks/faults.yaml` by `python maintenance/checks/fault_gallery.py`; the tests
try a sample.
""",
        "below": """\
the first step that fails. Earlier steps that import the edited file ran too when this page was
  made, and passed""",
        "alone": "the step that should fail and did. Earlier steps were not tried when this page was made",
        "columns": "| fault | edit | stands for | public issue | caught by | named | reprod_log |",
        "becomes": "{} becomes {}",
        "removed": "{} removed",
        "areas": {area: area.capitalize() for area in AREAS},
        "verdicts": {"": "-"},
        "totals": (
            "{faults} faults in {areas} areas",
            "{caught} caught",
            "{located} of the {locatable} in model and weights located at the right module",
            "reprod_log's check passes {passes} and fails {fails}; for {always} it also alarms on the correct port, so "
            "the alarm means nothing; {none} not recorded",
            "without a fault every step passes; reprod_log's check fails on the files of {failing}",
        ),
        "comma": ", ",
        "nowhere": "none",
    },
    "zh": {
        "head": """\
# 错误库

[English](../en/fault_gallery.md)

一项检查的价值，在于它能发现什么。每一行是移植模型时人们真实会犯的一个错误，写进移植版的一份副本；\
然后从第一个步骤开始依次运行，直到有一个步骤失败。第一列是错误的英文名，也就是命令中使用的名字。\
导出计算图的错误[另有一页](exported_faults.md)。

{totals}

- **发现它的步骤**：{caught_by}。
- **指出的位置**是该步骤的报告首先指出的内容：不同的比较项；如果错误在模型或权重里，则是它所在的模块。
- **reprod_log** 是它的 `ReprodDiffHelper` 按用户常用的阈值（`diff_method="mean"`、`diff_threshold=1e-6`），\
对该步骤写出的两个文件作出的结论：“总是失败”表示它对正确的移植版也报警，所以报警没有意义；\
“-”表示步骤在全部记录完成之前就停止了。

本页由 `python maintenance/checks/fault_gallery.py` 从 `maintenance/checks/faults.yaml` 生成；测试会试验其中一部分。
""",
        "below": "第一个失败的步骤。生成本页时，它之前所有导入了被改文件的步骤也运行过，并且通过",
        "alone": "应当失败并且确实失败的步骤。生成本页时没有试验它之前的步骤",
        "columns": "| 错误 | 改动 | 含义 | 公开的 issue | 发现它的步骤 | 指出的位置 | reprod_log |",
        "becomes": "{} 改为 {}",
        "removed": "删去 {}",
        "areas": {
            "model": "模型",
            "weights": "权重",
            "data": "数据",
            "metric": "评估指标",
            "loss": "损失函数",
            "optimizer": "优化器",
            "schedule": "学习率策略",
            "initialisation": "初始化",
            "training": "训练",
        },
        "verdicts": {"": "-", "passes": "通过", "fails": "失败", "always fails": "总是失败"},
        "totals": (
            "{faults} 个错误，分为 {areas} 类",
            "发现了 {caught} 个",
            "模型和权重的 {locatable} 个错误中，{located} 个定位到了正确的模块",
            "reprod_log 的检查通过 {passes} 个，失败 {fails} 个；另有 {always} 个，它对正确的移植版也报警，"
            "所以报警没有意义；{none} 个没有记录",
            "没有错误时每个步骤都通过；reprod_log 的检查在这些步骤的文件上失败：{failing}",
        ),
        "comma": "、",
        "nowhere": "没有",
    },
}


def totals(controls: dict[str, Run], outcomes: Sequence[Outcome], language: str) -> str:
    """The numbers that stand above the table."""
    words = WORDS[language]
    caught = [outcome for outcome in outcomes if not outcome.problem]
    verdicts = Counter(outcome.predecessor for outcome in outcomes)
    failing = (rung for rung, control in controls.items() if control.predecessor == "fails")
    numbers = {
        "faults": len(outcomes),
        "areas": len({outcome.fault.area for outcome in outcomes}),
        "caught": len(caught),
        "located": sum(outcome.fault.area in LOCATED_AREAS for outcome in caught),
        "locatable": sum(outcome.fault.area in LOCATED_AREAS for outcome in outcomes),
        "passes": verdicts["passes"],
        "fails": verdicts["fails"],
        "always": verdicts["always fails"],
        "none": verdicts[""],
        "failing": words["comma"].join(failing) or words["nowhere"],
    }
    return "\n".join(f"- {line.format(**numbers)}" for line in words["totals"])


def edit(fault: Fault, language: str = "en") -> str:
    """The edit in a few characters."""
    right, wrong = (" ".join(text.split()) for text in (fault.right, fault.wrong))
    if wrong in ("", "pass"):
        return WORDS[language]["removed"].format(code(right))
    return WORDS[language]["becomes"].format(code(right), code(wrong))


def code(text: str) -> str:
    """As code in a table's cell, shortened."""
    return f"`{textwrap.shorten(text, 70, placeholder=' ...')}`".replace("|", "\\|")


def row(outcome: Outcome, language: str = "en") -> str:
    fault, verdicts = outcome.fault, WORDS[language]["verdicts"]
    repository, _, number = fault.issue.partition("#")
    link = f"[{fault.issue}](https://github.com/{repository}/issues/{number})" if fault.issue else ""
    cells = [fault.name, edit(fault, language), fault.stands_for if language == "en" else fault.stands_for_zh, link]
    cells += [outcome.rung, code(outcome.named), verdicts.get(outcome.predecessor, outcome.predecessor)]
    return f"| {' | '.join(cells)} |"


def render(controls: dict[str, Run], outcomes: Sequence[Outcome], below: bool, language: str) -> str:
    """The page; `below` says whether the rungs below the one that should catch a fault were tried."""
    words = WORDS[language]
    caught_by = words["below" if below else "alone"]
    text = words["head"].format(totals=totals(controls, outcomes, language), caught_by=caught_by)
    for area, title in words["areas"].items():
        rows = [row(outcome, language) for outcome in outcomes if outcome.fault.area == area]
        if rows:
            text += "\n".join(["", f"## {title}", "", words["columns"], "| --- " * 7 + "|", *rows, ""])
    return text


def chosen(faults: Sequence[Fault], only: Sequence[str]) -> list[Fault]:
    """The faults of these areas or names; raises UserError for what is neither."""
    unknown = set(only) - {fault.area for fault in faults} - {fault.name for fault in faults}
    if unknown:
        raise UserError(f"--only {min(unknown)!r} is no area and no fault: areas are {', '.join(AREAS)}")
    return [fault for fault in faults if not only or fault.area in only or fault.name in only]


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=NAME, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing, and exit with 1 if the docs differ from this run")
    add("--only", nargs="+", default=[], metavar="AREA or NAME", help="try these, and print their rows")
    add("--quick", action="store_true", help="do not run the rungs below the one that should catch a fault")
    add("--jobs", type=positive_int, default=os.cpu_count(), help="rungs at a time, one core each")
    return parser


def main(args: argparse.Namespace) -> int:
    if args.check and args.only:
        raise UserError("--check compares the whole pages: leave out --only")
    faults = load_faults(FAULTS)
    rungs = {fault.rung for fault in faults}
    controls, outcomes = run_gallery(chosen(faults, args.only), rungs, args.jobs, below=not args.quick)
    pages = {f"{language}/{NAME}.md": render(controls, outcomes, not args.quick, language) for language in WORDS}
    wrong = [outcome for outcome in outcomes if outcome.problem]
    for outcome in wrong:
        print(f"{outcome.fault.name}: {outcome.problem}")
    if args.only or wrong:  # else the pages have them
        print(*[row(outcome) for outcome in outcomes], sep="\n")
    if wrong:
        print(f"FAIL {NAME}: {len(wrong)} of {len(outcomes)} faults are not caught as they should be")
        return 1
    return finish(pages, args)


def finish(pages: Mapping[str, str], args: argparse.Namespace) -> int:
    """Write the pages, or compare them."""
    stale = False
    for name, page in pages.items() if not args.only else ():
        path = DOCS / name
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not args.check:
            save_text(page, path)
        elif old != page:
            print("\n".join(difflib.unified_diff(old.splitlines(), page.splitlines(), name, "this run", lineterm="")))
            print(f"FAIL {NAME}: {path} is not what this run gives; run this without --check")
            stale = True
    if not stale:
        print(f"PASS {NAME}")
    return int(stale)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
