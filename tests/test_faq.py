"""The FAQ runs: every snippet holds, every question has an entry, every pair differs as the catalogue says."""

import importlib.util
import math
import os
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from markdown_pages import ROOT, links, numbers, spans

from maintenance.pages.faq_catalogue import CatalogueError, difference, measure
from maintenance.pages.faq_pages import catalogue_pages, coverage_pages, guide_pages, topic_pages
from maintenance.pages.faq_snippets import COMPAT, ENTRIES, Run, run_snippets
from maintenance.pages.faq_sources import FRAMEWORKS, Entry, Pair, load_entries, load_sources, parse_entry
from sturdyio.cli import UserError

ALL = {entry.slug: entry for entry in load_entries(ENTRIES)}
# These take longer than all others together: most start processes of their own. And MindSpore is what few have.
SLOW = ("nccl-error", "trainers-exit", "data-errors", "cpu-threads", "ignored-labels", "num-workers")
LATER = pytest.mark.thorough("test_snippet_holds and test_pair_differs_as_said with the other entries")
SLUGS = {
    slug: pytest.param(slug, marks=LATER if slug in SLOW or "mindspore" in entry.snippets else [])
    for slug, entry in ALL.items()
}
SNIPPETS = [
    pytest.param(framework, slug, marks=SLUGS[slug].marks)
    for framework in FRAMEWORKS
    for slug in ALL
    if framework in ALL[slug].snippets
]
SOURCES = load_sources(ENTRIES.parent / "questions.yaml")


def needs_mindspore() -> None:
    """Skip where MindSpore is not installed; fail where it has to be."""
    if importlib.util.find_spec("mindspore") is None:
        message = "MindSpore is not installed: pip install -e '.[mindspore]'"
        pytest.fail(message) if os.environ.get("MINDSPORE_REQUIRED") else pytest.skip(message)


@pytest.fixture(scope="module")
def runs(request):
    """Runs a framework's snippets the first time one is asked for: those that this session tests, and no others."""
    items = [item for item in request.session.items if item.path == request.path and "runs" in item.fixturenames]
    entries = [ALL[slug] for slug in sorted({item.callspec.params["slug"] for item in items})]

    @cache
    def of(framework):
        if framework == "mindspore":
            needs_mindspore()
        return {run.slug: run for run in run_snippets(entries, framework)}

    return of


@pytest.mark.parametrize(("framework", "slug"), SNIPPETS)
def test_snippet_holds(runs, framework, slug):
    run = runs(framework)[slug]
    assert not run.error, run.error


@pytest.mark.parametrize("slug", [SLUGS[slug] for slug, entry in ALL.items() if entry.pair])
def test_pair_differs_as_said(runs, slug):
    row = measure(ALL[slug], {framework: runs(framework)[slug] for framework in ("torch", "paddle", COMPAT)})
    for name, text in catalogue_pages([row]).items():
        (expected,) = [line for line in text.splitlines() if f"[{slug}](" in line]
        (written,) = [line for line in page(name) if f"[{slug}](" in line]
        assert similar(expected, written)


def similar(expected: str, written: str) -> bool:
    """Whether two rows of the catalogue are the same, but for sizes: rounding is the processor's, up to a factor of 2.

    Sizes above 1e-5 of the largest value, which no rounding of float32 in a snippet reaches, may differ by 1 %.
    """
    if re.sub(SIZE, "", expected) != re.sub(SIZE, "", written):
        return False
    (size, largest), (other, other_largest) = (
        map(float, re.findall(SIZE, row)[-2:] or (0, 1)) for row in (expected, written)
    )
    is_rounding = max(size, other) <= 1e-5 * largest
    return math.isclose(size, other, rel_tol=0.5 if is_rounding else 0.01) and math.isclose(
        largest, other_largest, rel_tol=0.01
    )


NUMERAL = r"[\d.]+(?:e[+-]\d+)?"
SIZE = rf"(?<=\| ){NUMERAL}(?=(?:, largest value|，最大值) )|(?:(?<=largest value )|(?<=最大值 )){NUMERAL}"


@pytest.mark.parametrize(
    ("expected", "written", "same"),
    [
        ("| `a` | 1.5, largest value 2 |", "| `a` | 1.51, largest value 2 |", True),
        ("| `a` | 1.5, largest value 2 |", "| `a` | 1.6, largest value 2 |", False),
        ("| `a` | 1.5e-08, largest value 2 |", "| `a` | 2.5e-08, largest value 2 |", True),
        ("| `a` | 1.5e-08, largest value 2 |", "| `a` | 4e-08, largest value 2 |", False),
        ("| `a` | 0.015, largest value 5e+03 |", "| `a` | 0.012, largest value 5e+03 |", True),
        ("| `a` | 0.015, largest value 5e+02 |", "| `a` | 0.012, largest value 5e+02 |", False),
        ("| `a` | 1.5，最大值 2 |", "| `a` | 1.5，最大值 3 |", False),
        ("| `a(1)` | 1.5, largest value 2 |", "| `a(2)` | 1.5, largest value 2 |", False),
        ("| `a` | 1.5, largest value 2 |", "| `b` | 1.51, largest value 2 |", False),
        ("| `a` | shape (2, 1) against (1, 2) |", "| `a` | shape (2, 1) against (1, 3) |", False),
    ],
)
def test_rows_are_compared_by_words_and_sizes(expected, written, same):
    assert similar(expected, written) is same


def page(name: str) -> list[str]:
    return (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()


def test_pages_are_what_the_entries_say():
    entries = list(ALL.values())
    (guide,) = [source for source in SOURCES if source.sections]
    pages = {**topic_pages(entries, SOURCES), **coverage_pages(entries, SOURCES), **guide_pages(entries, guide)}
    for name, text in pages.items():
        assert page(name) == text.splitlines(), f"docs/{name} is stale: run 'python maintenance/pages/write_docs.py'"


@pytest.mark.parametrize(("language", "head"), [("en", "Original: "), ("zh", "原文：")])
def test_an_answer_names_the_documents_that_ask_and_links_those_with_an_address(language, head):
    pages = topic_pages(list(ALL.values()), SOURCES)
    for entry in ALL.values():
        _, _, after = pages[f"{language}/faq/{entry.topic}.md"].partition(f'<a id="{entry.slug}"></a>')
        lines = [line for line in after.partition("<a id=")[0].splitlines() if line.startswith(head)]
        asking = [source for source in SOURCES if any(q.id in entry.questions for q in source.questions)]
        assert len(lines) == bool(asking), entry.slug
        for source in asking:
            assert source.title[language] in lines[0]
            assert source.url in links(lines[0]) or not source.url


ORIGINAL = r"\b(?:answer|blog|guide|original|source|suggestion|advice|FAQ)s?\b|答[复案]|回答|博客|指南|原文|建议|来源"


@pytest.mark.parametrize("slug", [slug for slug, entry in ALL.items() if entry.note])
def test_a_note_that_speaks_of_the_original_quotes_or_links_it(slug):
    """So that it can be read without the original."""
    for note in ALL[slug].note.values():
        assert not re.search(ORIGINAL, note) or re.search(r'"[^"]+"|“[^”]+”', note) or links(note), note


@pytest.mark.parametrize("slug", ALL)
def test_both_languages_say_the_same(slug):
    entry = ALL[slug]
    texts = [(entry.question["en"], entry.question["zh"])]
    english, chinese = (entry.answer[language].split("\n\n") for language in ("en", "zh"))
    texts += zip(english, chinese, strict=True)
    if entry.note:
        texts.append((entry.note["en"], entry.note["zh"]))
    for one, other in texts:
        for parts in (spans, links, numbers):
            assert sorted(parts(one)) == sorted(parts(other)), (one, other)


def test_chapters_of_the_guide_exist():
    for source in SOURCES:
        for _, _, chapter in source.sections:
            assert (ROOT / "docs" / "en" / chapter).is_file(), chapter


def test_every_question_has_one_entry():
    asked = [question.id for source in SOURCES for question in source.questions]
    answered = [name for entry in ALL.values() for name in entry.questions]
    assert len(asked) == 104  # what the five documents ask
    assert sorted(answered) == sorted(asked)


ENTRY = """\
---
topic: layers
questions: []
status: holds
---
## en: Why?
Because.
## zh: 为什么？
因为。
```python torch
assert True
```
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("---\ntopic", "topic", "must begin with a head of YAML"),
        ("topic: layers", "topic: cooking", "topic must be one of"),
        ("status: holds", "status: maybe", "status one of"),
        ("status: holds", "status: changed", "a note in both languages"),
        ("status: holds", "status: holds\nauthor: me", "unknown in the head: author"),
        ("## zh: 为什么？\n因为。\n", "", "in each language"),
        ("Because.", "", "in each language"),
        ("python torch", "python numpy", "of torch, paddle, mindspore"),
        ("python torch", "python", "of torch, paddle, mindspore"),
        ("questions: []\n", "", "questions"),
        ("status: holds", "status: holds\npair: {torch: a}", "paddle"),
    ],
)
def test_an_entry_that_is_not_as_it_must_be_is_refused(tmp_path, old, new, message):
    path = tmp_path / "entry.md"
    path.write_text(ENTRY)
    assert parse_entry(path).answer == {"en": "Because.", "zh": "因为。"}
    path.write_text(ENTRY.replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        parse_entry(path)


def entry_of(**code: str) -> Entry:
    return Entry("made", "layers", (), "holds", {}, Pair("a", "b", ""), {}, {}, code)


# Snippets that fail, that leave something behind, and one that ends the process of all.
MADE = {
    "a": "assert 1 == 2, 'a claim'",
    "b": "default = [1, 2]",
    "c": "raise SystemExit(0)",
    "d": "import torch; torch.set_default_dtype(torch.float64); open('file', 'w').close(); left = 1",
    "e": "import os, torch; assert torch.zeros(1).dtype == torch.float32 and not os.path.exists('file'); assert left",
    "f": "import os; os._exit(3)",
    "g": "pass",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Run]:
    """How the snippets of MADE end, one after the other."""
    folder = tmp_path_factory.mktemp("entries")
    for name, text in MADE.items():
        (folder / f"{name}.md").write_text(ENTRY.replace("assert True", text))
    return {run.slug: run for run in run_snippets(load_entries(folder), "torch", folder)}


def test_a_snippet_that_fails_is_reported_and_the_others_run(made):
    assert "a claim" in made["a"].error
    assert not made["b"].error and made["b"].results["default"].tolist() == [1, 2]
    assert "SystemExit" in made["c"].error


def test_a_snippet_that_ends_the_process_is_named(made):
    assert "ended with 3" in made["f"].error and "ended with 3" in made["g"].error


def test_snippets_do_not_see_each_other(made):
    assert not made["d"].error
    assert "NameError: name 'left'" in made["e"].error


@pytest.mark.parametrize(
    ("ref", "port", "found"),
    [
        (np.float64([1, 2]), np.float64([1, 2 + 1e-13]), ""),
        (np.float64([1, 2]), np.float64([1, 2 + 1e-11]), "1e-11, largest value 2"),
        (np.float32([1]), np.float32([1 + 5e-7]), ""),
        (np.float32([1]), np.float32([1 + 2e-6]), "2.03e-06, largest value 1"),
        (np.int64([1]), np.int64([2]), "1, largest value 1"),
        (np.float64([np.nan]), np.float64([np.nan]), ""),
        (np.float64([np.nan]), np.float64([1]), "not a number against 1.0"),
        (np.zeros((2, 1)), np.zeros((1, 2)), "shape (2, 1) against (1, 2)"),
        (np.array("raises ValueError"), np.array("raises ValueError"), ""),
        (np.array("raises ValueError"), np.float64(3), "raises ValueError against 3.0"),
    ],
)
def test_differences_are_told(ref, port, found):
    assert difference(ref, port) == found


def measured(arguments, default, same, compat=None, error=""):
    """The row of a pair that gave `default`, and `same` with its arguments; `compat` under paddle.compat."""
    results = [{}, {}, {} if compat is None else {"default": np.asarray(compat)}]
    for name, values in (("default", default), ("same", same)):
        for side, value in enumerate(values or ()):
            results[side][name] = np.asarray(value)
    names = ("torch", "paddle", COMPAT)
    runs = {name: Run("made", name, 0.0, error, found) for name, found in zip(names, results, strict=True)}
    return measure(replace(entry_of(), pair=Pair("a", "b", arguments)), runs)


@pytest.mark.parametrize(
    ("arguments", "default", "same", "message"),
    [
        ("x=1", (1, 2), (1, 1), None),
        ("", (1, 1), None, None),
        ("", (1, 2), None, None),
        ("x=1", (1, 1), (1, 1), "no argument is needed"),
        ("x=1", (1, 2), (1, 2), "leaves a difference"),
        ("x=1", (1, 2), None, "must leave `same`"),
        ("", None, None, "must leave `default`"),
    ],
)
def test_a_pair_that_is_not_as_said_is_refused(arguments, default, same, message):
    if message is None:
        assert measured(arguments, default, same).same is (default[0] == default[1])
    else:
        with pytest.raises(CatalogueError, match=message):
            measured(arguments, default, same)


@pytest.mark.parametrize(
    ("default", "compat", "error", "closed"),
    [
        ((1, 1), 1, "", ""),
        ((1, 2), 1, "", "yes"),
        ((1, 2), 1, "Traceback:\nValueError: of what comes after", "yes"),
        ((1, 2), 2, "", "no"),
        ((1, 2), None, "Traceback:\nValueError: no", "no"),
        ((1, 2), None, "", "no"),
        ((1, 2), None, "Traceback:\nAttributeError: module 'paddle' has no attribute 'optim'", "no name"),
        ((1, 2), None, "Traceback:\nModuleNotFoundError: No module named 'paddle.optim'", "no name"),
    ],
)
def test_compat_closes_a_difference_or_not(default, compat, error, closed):
    assert measured("", default, None, compat, error).compat == closed


def test_compat_runs_the_code_of_torch_on_paddle(tmp_path):
    code = "import torch; assert 1 == 2; default = torch.nn.Linear(3, 2).weight.shape; torch.optim"
    (tmp_path / "a.md").write_text(ENTRY.replace("assert True", code))
    (run,) = run_snippets(load_entries(tmp_path), COMPAT, tmp_path)
    assert run.results["default"].tolist() == [2, 3] and "'paddle' has no attribute 'optim'" in run.error
