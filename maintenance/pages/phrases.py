"""What programs say in English, in the words of another language, for the pages that are written in both."""

import re
from collections.abc import Mapping


def phrased(text: str, phrases: Mapping[str, str]) -> str:
    """`text` with each pattern of `phrases` that it has replaced, in their order; the rest is left as it is."""
    for pattern, replacement in phrases.items():
        text = re.sub(pattern, replacement, text)
    return text
