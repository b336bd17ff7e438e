"""Tables for a terminal."""

from collections.abc import Sequence


def print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """The first column is of names, at the left; the others at the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print(row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]), sep="  ")
