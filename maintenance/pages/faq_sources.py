"""What the FAQ is made from, in docs/faq/: questions.yaml, the questions, entries/*.md, the answers with their code.

An entry is one file: a head of YAML, the question and the answer in each language, and a snippet for each framework.

    ---
    topic: layers
    questions: [guide/avg-pool]      # of questions.yaml; [] for a difference that only this port met
    status: holds                    # or changed, or elsewhere; of the answer that the source gave
    note: {en: ..., zh: ...}         # changed: since when and what; elsewhere: why it cannot be seen here
    pair:                            # optional: a row of the catalogue of differences
      torch: torch.nn.AvgPool2d
      paddle: paddle.nn.AvgPool2D
      arguments: exclusive=False     # what makes both the same, "" if nothing has to be done or nothing can be
    ---
    ## en: Why does `nn.AvgPool2D` differ?
    ...
    ## zh: 为什么 `nn.AvgPool2D` 不一致？
    ...
    ```python torch
    ...
    ```
    ```python paddle
    ...
    ```
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sturdyio.cli import UserError, existing_dir, existing_file

LANGUAGES = ("en", "zh")
FRAMEWORKS = ("torch", "paddle", "mindspore")
TOPICS = yaml.safe_load(Path(__file__).with_name("topics.yaml").read_text(encoding="utf-8"))
STATUSES = ("holds", "changed", "elsewhere")  # of the source's answer; "elsewhere": it takes what is not here


@dataclass(frozen=True)
class Pair:
    """Two calls that stand for each other, and the arguments that make them the same."""

    torch: str
    paddle: str
    arguments: str


@dataclass(frozen=True)
class Entry:
    """One question with its answer, and the code that proves it, by framework."""

    slug: str
    topic: str
    questions: tuple[str, ...]  # ids, SOURCE/NAME
    status: str
    note: dict[str, str]  # by language
    pair: Pair | None
    question: dict[str, str]  # by language
    answer: dict[str, str]  # by language
    snippets: dict[str, str]  # by framework


@dataclass(frozen=True)
class Question:
    """A question of a document that readers come from, in our words."""

    id: str
    text: dict[str, str]  # by language


@dataclass(frozen=True)
class Source:
    """A document that readers come from, its questions, and the sections that the tutorial covers."""

    name: str
    title: dict[str, str]  # by language
    url: str
    questions: list[Question]
    sections: list[tuple[str, dict[str, str], str]] = field(default_factory=list)  # number, title, chapter


def load_entries(folder: Path) -> list[Entry]:
    """All entries of `folder`, by name; raises UserError, which names the file, for one that is not as it must be."""
    return [parse_entry(path) for path in sorted(existing_dir(folder, "folder of entries").glob("*.md"))]


def parse_entry(path: Path) -> Entry:
    """The entry in `path`; raises UserError."""
    try:
        return _parse(path.stem, existing_file(path, "entry").read_text(encoding="utf-8"))
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise UserError(f"entry {path}: {' '.join(str(error).split())}") from error


def _parse(slug: str, text: str) -> Entry:
    parts = text.split("---\n", 2)
    if len(parts) != 3 or parts[0]:
        raise ValueError("it must begin with a head of YAML between two lines of ---")
    head: dict[str, Any] = yaml.safe_load(parts[1])
    unknown = set(head) - {"topic", "questions", "status", "note", "pair"}
    if unknown:
        raise ValueError(f"unknown in the head: {', '.join(sorted(unknown))}")
    if head["topic"] not in TOPICS or head["status"] not in STATUSES:
        raise ValueError(f"topic must be one of {', '.join(TOPICS)}; status one of {', '.join(STATUSES)}")
    note = head.get("note") or {}
    if (set(note) == set(LANGUAGES)) != (head["status"] != "holds"):
        raise ValueError("a note in both languages is for the statuses changed and elsewhere, and they need one")
    body, snippets = _take_snippets(parts[2])
    question, answer = {}, {}
    for language, section in re.findall(r"^## (\w\w): (.+?)(?=^## \w\w: |\Z)", body, re.MULTILINE | re.DOTALL):
        question[language], _, answer[language] = (part.strip() for part in section.partition("\n"))
    if set(question) != set(LANGUAGES) or not all(answer.values()):
        raise ValueError("it needs a question and an answer in each language: '## en: ...' and '## zh: ...'")
    pair = Pair(**head["pair"]) if head.get("pair") else None
    return Entry(slug, head["topic"], tuple(head["questions"]), head["status"], note, pair, question, answer, snippets)


def _take_snippets(body: str) -> tuple[str, dict[str, str]]:
    """The text without the frameworks' code, and that code."""
    block = re.compile(r"^```python (\w+)\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
    names = [name for name, _ in block.findall(body)]
    if not names or len(names) != len(set(names)) or set(names) - set(FRAMEWORKS):
        raise ValueError(f"it needs one block '```python NAME' or more, each NAME once, of {', '.join(FRAMEWORKS)}")
    return block.sub("", body), dict(block.findall(body))


def load_sources(path: Path) -> list[Source]:
    """The documents and questions of questions.yaml; raises UserError."""
    try:
        found = yaml.safe_load(existing_file(path, "questions").read_text(encoding="utf-8"))
        return [
            Source(
                name,
                source["title"],
                source["url"],
                [Question(f"{name}/{id_}", text) for id_, text in source["questions"].items()],
                [(str(number), title, chapter) for number, title, chapter in source.get("sections", [])],
            )
            for name, source in found.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"questions {path}: {error!r}") from error
