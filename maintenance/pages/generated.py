"""Files that a program writes: written anew, or compared with what is there."""

from collections.abc import Mapping
from pathlib import Path

from portproof.io.records import save_text


def write_or_compare(folder: Path, texts: Mapping[str, str], shown: str, check: bool) -> int:
    """Write those of {name in `folder`: text} that have changed and print their names, behind `shown`; the status is 0.

    With `check` print which are stale, and write nothing; the status is 1 if any is.
    """
    written = {name: (folder / name).read_text(encoding="utf-8") for name in texts if (folder / name).is_file()}
    stale = [name for name, text in texts.items() if written.get(name) != text]
    for name in stale:
        print(f"{'stale' if check else 'wrote'}: {shown}/{name}")
        if not check:
            save_text(texts[name], folder / name)
    return int(check and bool(stale))
