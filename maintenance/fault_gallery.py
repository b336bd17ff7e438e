"""Try the fault gallery: put each mistake of maintenance/faults.yaml into a copy of the port, and run the rungs.

  python maintenance/fault_gallery.py                  rewrites docs/fault_gallery.md, which lists what caught each
  python maintenance/fault_gallery.py --check          says whether the docs are what a run gives
  python maintenance/fault_gallery.py --only metric    tries one area, or one fault by name, and prints its rows

Exits with 1 if a fault is missed, or if another thing is named than the one that is wrong.
"""

import argparse
import difflib
import os
import textwrap
from collections import Counter
from collections.abc import Sequence

from maintenance.gallery import AREAS, LOCATED_AREAS, ROOT, Fault, Outcome, Run, load_faults, run_gallery
from portproof.io.cli import ArgumentParser, HelpFormatter, UserError, positive_int, run
from portproof.io.files import atomic_path

NAME = "fault_gallery"
FAULTS = ROOT / "maintenance" / "faults.yaml"
DOCS = ROOT / "docs" / "fault_gallery.md"

HEAD = """\
# The fault gallery

A check is worth what it catches. Each row is a mistake that people make when they port a model, put into a copy of the
port; the rungs of the ladder then ran on it from the lowest up, until one failed.

{totals}

- **Caught by** is {caught_by}.
- **Named** is what that rung's report says first: the item that differs, or for a fault in the model or its weights
  the module in which it lies.
- **reprod_log** is the verdict of its `ReprodDiffHelper`, with the limit that its users take (`diff_method="mean"`,
  `diff_threshold=1e-6`), on the two files that the same rung wrote: "always fails" where it also fails on what that
  rung writes without a fault, so that its alarm says nothing; "-" where the rung stopped before all was recorded.

This page is generated from `maintenance/faults.yaml` by `python maintenance/fault_gallery.py`; the tests try a sample.
"""
BELOW = """\
the lowest rung that fails. Those below it that import the edited file ran too when this page was
  made, and passed"""
ALONE = "the rung that should fail and did. Those below it were not tried when this page was made"
COLUMNS = "| fault | edit | stands for | public issue | caught by | named | reprod_log |\n" + "| --- " * 7 + "|\n"


def totals(controls: dict[str, Run], outcomes: Sequence[Outcome]) -> str:
    """The numbers that stand above the table."""
    caught = [outcome for outcome in outcomes if not outcome.problem]
    located = [outcome for outcome in caught if outcome.fault.area in LOCATED_AREAS]
    of_those = sum(outcome.fault.area in LOCATED_AREAS for outcome in outcomes)
    verdicts = Counter(outcome.predecessor for outcome in outcomes)
    areas = len({outcome.fault.area for outcome in outcomes})
    failing = ", ".join(rung for rung, control in controls.items() if control.predecessor == "fails")
    lines = [
        f"{len(outcomes)} faults in {areas} areas",
        f"{len(caught)} caught",
        f"{len(located)} of the {of_those} in model and weights located at the right module",
        f"{verdicts['passes']} that reprod_log's check passes, {verdicts['fails']} that it fails, "
        f"{verdicts['always fails']} that it fails as it fails the port without a fault, {verdicts['']} not recorded",
        f"without a fault every rung passes; reprod_log's check fails on the files of {failing or 'none'}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def edit(fault: Fault) -> str:
    """The edit in a few characters."""
    right, wrong = (" ".join(text.split()) for text in (fault.right, fault.wrong))
    return f"{code(right)} becomes {code(wrong)}" if wrong not in ("", "pass") else f"{code(right)} removed"


def code(text: str) -> str:
    """As code in a table's cell, shortened."""
    return f"`{textwrap.shorten(text, 70, placeholder=' ...')}`".replace("|", "\\|")


def row(outcome: Outcome) -> str:
    fault = outcome.fault
    repository, _, number = fault.issue.partition("#")
    link = f"[{fault.issue}](https://github.com/{repository}/issues/{number})" if fault.issue else ""
    cells = [fault.name, edit(fault), fault.stands_for, link]
    cells += [outcome.rung, code(outcome.named), outcome.predecessor or "-"]
    return f"| {' | '.join(cells)} |"


def render(controls: dict[str, Run], outcomes: Sequence[Outcome], below: bool) -> str:
    """The page; `below` says whether the rungs below the one that should catch a fault were tried."""
    text = HEAD.format(totals=totals(controls, outcomes), caught_by=BELOW if below else ALONE)
    for area in AREAS:
        rows = [row(outcome) for outcome in outcomes if outcome.fault.area == area]
        if rows:
            text += f"\n## {area.capitalize()}\n\n{COLUMNS}" + "\n".join(rows) + "\n"
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
        raise UserError("--check compares the whole page: leave out --only")
    faults = load_faults(FAULTS)
    rungs = {fault.rung for fault in faults}
    controls, outcomes = run_gallery(chosen(faults, args.only), rungs, args.jobs, below=not args.quick)
    page = render(controls, outcomes, below=not args.quick)
    wrong = [outcome for outcome in outcomes if outcome.problem]
    for outcome in wrong:
        print(f"{outcome.fault.name}: {outcome.problem}")
    if args.only or wrong:  # else the page has them
        print(*[row(outcome) for outcome in outcomes], sep="\n")
    if wrong:
        print(f"FAIL {NAME}: {len(wrong)} of {len(outcomes)} faults are not caught as they should be")
        return 1
    return finish(page, args)


def finish(page: str, args: argparse.Namespace) -> int:
    """Write the page, or compare it."""
    if args.check:
        old = DOCS.read_text(encoding="utf-8") if DOCS.is_file() else ""
        if old != page:
            print("\n".join(difflib.unified_diff(old.splitlines(), page.splitlines(), "docs", "this run", lineterm="")))
            print(f"FAIL {NAME}: {DOCS} is not what this run gives; python maintenance/fault_gallery.py rewrites it")
            return 1
    elif not args.only:
        with atomic_path(DOCS) as temporary:
            temporary.write_text(page, encoding="utf-8")
    print(f"PASS {NAME}")
    return 0


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
