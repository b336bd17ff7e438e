"""A plugin of pytest: what every test starts from, seeds, one thread, repeatable examples, a browser; and two tiers.

Tests marked `thorough` run with --all only. The marker says what guards their corner without it, and names a test
unless a part of the marked test itself stays: `but` is a pattern of the parameters with which it always runs.

    @pytest.mark.thorough("test_one_fault_is_located runs one of them")
    @pytest.mark.thorough("in one dtype", but="float64")
"""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.configuration

# Of the programs that tests start, too. The models here are small, and threads that wait for one another on a busy
# machine make seconds into minutes. Both frameworks and NumPy's BLAS read it when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import paddle
import pytest
import torch

pytest_plugins = ["pytester"]  # for test_tiers.py

if TYPE_CHECKING:
    from playwright.sync_api import Browser

hypothesis.configuration.set_hypothesis_home_dir(Path(__file__).parent.parent / ".pytest_cache" / "hypothesis")
# The same examples on every run: a failure is the change's, not the day's.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
paddle.set_device("cpu")  # where it would not be the default, with the GPU build


MARKER = "thorough(guard, but=''): runs with --all only, but for the parameters that match `but`; `guard` is what stays"
LEFT_OUT = pytest.StashKey[int]()
MEMORY = 4 * 2**30  # bytes that a process of tests may take, with those that it starts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests that are marked thorough, too: everything")


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # -n auto, where pytest-xdist is installed, before its own count
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many processes as cores; fewer of little memory."""
    return max(1, min(os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MEMORY))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.stash[LEFT_OUT] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all leave out what is thorough."""
    out = [item for item in items if is_thorough(item)]
    if out and not config.getoption("--all"):
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]
        config.stash[LEFT_OUT] = len(out)


def pytest_collection_finish() -> None:
    """What imports and the collection leave lives to the end: garbage collections need not look at it again."""
    gc.collect()
    gc.freeze()


def is_thorough(item: pytest.Item) -> bool:
    """Whether it runs with --all only."""

    def holds(guard: str, but: str = "") -> bool:
        return not (but and re.search(but, item.name.partition("[")[2]))

    return any(holds(*marker.args, **marker.kwargs) for marker in item.iter_markers("thorough"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist tells the one that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process leaves out the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash[LEFT_OUT]:
        terminalreporter.line(f"{count} thorough tests were left out: --all runs them, too")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same state of every global generator."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  what libraries may draw from; the project itself does not
    torch.manual_seed(0)
    paddle.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of the test's own."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium with a profile of its own; Playwright's own download is never used."""
    chromium = shutil.which("chromium")
    if chromium is None:
        message = "there is no chromium: on Debian or Ubuntu run 'apt install chromium'"
        pytest.fail(message) if os.environ.get("CHROMIUM_REQUIRED") else pytest.skip(message)
    from browser import CHROMIUM_FLAGS
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()
