"""What programs say, for the pages that are written in both languages: in the other's words, or as code."""

import re
from collections.abc import Mapping


def phrased(text: str, phrases: Mapping[str, str]) -> str:
    """`text` with each pattern of `phrases` that it has replaced, in their order; the rest is left as it is."""
    for pattern, replacement in phrases.items():
        text = re.sub(pattern, replacement, text)
    return text


def code(text: str, most: int | None = None) -> str:
    """In Markdown, in one line of at most so many characters; the text's own backticks are made quotes."""
    return f"`{' '.join(text.replace('`', chr(39)).split())[:most]}`"
