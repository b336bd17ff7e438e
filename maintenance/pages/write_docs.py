"""Write the pages that are generated from docs/faq/, for which the snippets of every pair run and are measured.

  python maintenance/pages/write_docs.py            writes the FAQ, api_differences.md and guide_map.md of each language
  python maintenance/pages/write_docs.py --check    says which of them are not what a run gives

Exits with 1 if a question has no answer, a snippet fails, a pair is not as it is said to be, or a page is stale.
"""

import argparse

from maintenance import DOCS
from maintenance.pages.faq_catalogue import CatalogueError, measure
from maintenance.pages.faq_pages import catalogue_pages, coverage_pages, guide_pages, topic_pages
from maintenance.pages.faq_snippets import COMPAT, ENTRIES, run_snippets
from maintenance.pages.faq_sources import load_entries, load_sources
from maintenance.pages.generated import write_or_compare
from sturdyio.cli import ArgumentParser, HelpFormatter, run

NAME = "write_docs"


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=NAME, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    return parser


def main(args: argparse.Namespace) -> int:
    """Raises UserError for an entry that is not as it must be."""
    entries, sources = load_entries(ENTRIES), load_sources(ENTRIES.parent / "questions.yaml")
    answered = {name for entry in entries for name in entry.questions}
    if unanswered := [q.id for source in sources for q in source.questions if q.id not in answered]:
        print(f"no entry answers {', '.join(unanswered)}")
        return 1
    pages = {**topic_pages(entries, sources), **coverage_pages(entries, sources)}
    (guide,) = [source for source in sources if source.sections]
    pages |= guide_pages(entries, guide)

    pairs = [entry for entry in entries if entry.pair]
    runs = {name: {r.slug: r for r in run_snippets(pairs, name)} for name in ("torch", "paddle", COMPAT)}
    failed = [
        run for name, of_framework in runs.items() if name != COMPAT for run in of_framework.values() if run.error
    ]
    for run_ in failed:
        print(f"{run_.slug}, {run_.framework}: {run_.error.splitlines()[-1]}")
    if failed:
        return 1
    try:
        rows = [
            measure(entry, {name: of_framework[entry.slug] for name, of_framework in runs.items()}) for entry in pairs
        ]
    except CatalogueError as error:
        print(error)
        return 1
    pages |= catalogue_pages(rows)

    return write_or_compare(DOCS, pages, "docs", args.check)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), NAME)
