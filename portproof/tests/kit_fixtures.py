"""A plugin of pytest: what every test starts from, seeds, one thread, repeatable examples, and a browser."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis.configuration
import numpy as np
import paddle
import pytest
import torch

if TYPE_CHECKING:
    from playwright.sync_api import Browser

hypothesis.configuration.set_hypothesis_home_dir(Path(__file__).parent.parent / ".pytest_cache" / "hypothesis")
# The same examples on every run: a failure is the change's, not the day's.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
# The models here are small, and threads that wait for one another on a busy machine make seconds into minutes.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
paddle.set_device("cpu")  # where it would not be the default, with the GPU build


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
    from playwright.sync_api import sync_playwright
    from screens import CHROMIUM_FLAGS

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()
