"""What a command shows while it computes."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

_listeners: list[Callable[[], object]] = []


def count_pass() -> None:
    """Call this for each pass through a model."""
    for listener in _listeners:
        listener()


@contextmanager
def shown(title: str) -> Iterator[None]:
    """Show each warning once, and a tqdm bar of passes if stderr is a terminal."""
    seen = set()
    with warnings.catch_warnings(), ExitStack() as ending:
        show = warnings.showwarning

        def show_once(message: Any, category: type, *where: Any, **more: Any) -> None:
            if (str(message), category) not in seen:
                seen.add((str(message), category))
                show(message, category, *where, **more)

        warnings.showwarning = show_once
        if sys.stderr.isatty() and find_spec("tqdm"):
            from tqdm import tqdm

            bar = ending.enter_context(tqdm(desc=title, unit=" passes", leave=False))
            _listeners.append(bar.update)
            ending.callback(_listeners.remove, bar.update)
        yield
