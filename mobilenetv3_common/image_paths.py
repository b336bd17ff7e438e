"""Which images a command line means: files, folders, patterns, and lists on standard input."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from mobilenetv3_common.images import IMAGE_SUFFIXES
from sturdyio.cli import UserError, existing_file, unusable

STDIN = "-"


def find_images(folder: Path) -> list[Path]:
    """The images in `folder` and below, sorted; raises UserError when there are none or a folder cannot be read.

    Links to folders are followed after the folders themselves, and each folder is searched once, so that a link to
    one that it is in does not lead round for ever.
    """

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"folder {error.filename} {unusable(error)}") from error

    paths, seen, starts = [], set(), [folder]
    for start in starts:  # which grows
        for root, folders, names in os.walk(start, onerror=refuse):
            place = os.path.realpath(root)
            if place in seen:
                folders.clear()
                continue
            seen.add(place)
            starts += filter(Path.is_symlink, (Path(root, name) for name in sorted(folders)))
            paths += [Path(root, name) for name in names]
    paths.sort()
    images = [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        raise UserError(f"input folder {folder} holds no images ({', '.join(IMAGE_SUFFIXES)}): check the path")
    return images


def find_inputs(inputs: Sequence[str]) -> list[Path | str]:
    """The images that `inputs` name, in their order; "-" stays, for `read_list`.

    A file is taken whatever its name, a folder is searched by `find_images`, and what does not exist is a pattern as a
    shell has them, with ** for folders at any depth; its matches, sorted, are taken as if they had been named.
    Raises UserError for an input that stands for nothing.
    """
    found: list[Path | str] = []
    for name in inputs:
        if name == STDIN:
            found.append(STDIN)
        elif Path(name).is_dir():
            found += find_images(Path(name))
        elif os.path.lexists(name):
            found.append(Path(name))
        elif glob.has_magic(name):
            matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - Path's takes no absolute pattern
            if not matches:
                raise UserError(f"input {name} does not exist and matches no file: check the path")
            found += find_inputs(matches)
        else:
            found.append(existing_file(name, "input"))
    return found


def read_list(found: Sequence[Path | str], stdin: TextIO) -> Iterator[Path]:
    """The paths in `found`, and in the place of "-" those on `stdin`, one a line, each read when it is asked for."""
    for path in found:
        if path == STDIN:
            yield from (Path(line.rstrip("\n")) for line in stdin if line.strip())
        else:
            yield Path(path)
