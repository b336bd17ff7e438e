"""Markdown pages block by block, and whether those of two languages say the same."""

import re
from collections import Counter
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Block(NamedTuple):
    """A heading, a paragraph, a table or a code block."""

    kind: str  # "heading", "text", "table" or "code"
    detail: str  # a heading's level, a code block's language
    lines: list[str]

    @property
    def cells(self) -> list[list[str]]:
        """A table's rows, of which the second is dashes; a paragraph or heading is one cell."""
        if self.kind == "table":
            return [[cell.strip() for cell in line.strip("|").split("|")] for line in self.lines]
        return [[" ".join(self.lines)]]


@cache
def blocks(name: str) -> list[Block]:
    """The blocks of a page of the project; comments, which nobody sees, are blocks too."""
    found, continues = [], False
    lines = iter((ROOT / name).read_text(encoding="utf-8").splitlines())
    for line in lines:
        kind = "table" if line.startswith("|") else "comment" if line.startswith("<!--") else "text"
        if line.startswith("```"):
            found.append(Block("code", line[3:], list(takewhile(lambda inner: inner != "```", lines))))
        elif heading := re.match("#+ ", line):
            found.append(Block("heading", heading[0], [line]))
        elif line and continues and found[-1].kind == kind:
            found[-1].lines.append(line)
        elif line:
            found.append(Block(kind, "", [line]))
        continues = line != ""
    return found


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def links(text: str) -> list[str]:
    return re.findall(r"(?<=\]\()[^)]+|(?<=<)http[^>]+", text)


def numbers(text: str) -> list[str]:
    """Those outside code and links, in order."""
    text = re.sub(r"`[^`]+`|\]\([^)]+\)|<[^>]+>", " ", text)
    return re.findall(r"(?<![A-Za-z\d.])\d+(?:\.\d+)*(?:e-?\d+)?", text)


def assert_same_content(english: str, chinese: str) -> None:
    """Same blocks in the same order, with the same code, names, links and numbers in each cell and paragraph.

    A link to a page of a language is to the same page of the other.
    """
    assert len(blocks(english)) == len(blocks(chinese)), (english, chinese)
    for one, other in zip(blocks(english), blocks(chinese), strict=True):
        assert (one.kind, one.detail) == (other.kind, other.detail), (one.lines, other.lines)
        if one.kind in ("code", "comment"):
            assert one.lines == other.lines
            continue
        for one_row, other_row in zip(one.cells, other.cells, strict=True):
            for one_cell, other_cell in zip(one_row, other_row, strict=True):
                for parts in (spans, links, numbers):
                    found, expected = parts(neutral(one_cell)), parts(neutral(other_cell))
                    assert Counter(found) == Counter(expected), (one_cell, other_cell)


def neutral(text: str) -> str:
    """The text with the names of the two languages' pages and pictures made one."""
    return re.sub(r"README_cn|_zh\.png|\.\./zh/|\.\./en/|docs/zh/|docs/en/", lambda match: PAGES[match[0]], text)


PAGES = {
    **{"README_cn": "README", "_zh.png": ".png"},
    **{"../zh/": "../L/", "../en/": "../L/", "docs/zh/": "docs/L/", "docs/en/": "docs/L/"},
}
