"""Rungs made of verdicts on small arrays, and how a report of them is read: as a page, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser, Page
from screens import DESKTOP

from portproof.backends.trace import output_item
from portproof.compare import Item, Verdict, compare
from portproof.ladder.rung import Rung

MODULES = [f"features.{block}.{layer}" for block in range(6) for layer in range(3)]


class Outcome(Rung):
    """A rung that is given its verdicts instead of a pair to compare."""

    def __init__(self, *verdicts: Verdict, curves: dict | None = None, pictures: dict | None = None) -> None:
        super().__init__("outcome")
        self.curves, self.pictures = curves or {}, pictures or {}
        self.types = dict.fromkeys(MODULES, "BatchNorm2d")
        for verdict in verdicts:
            self.check(verdict)


def outputs(names: list[str] = MODULES) -> dict[Item, np.ndarray]:
    rng = np.random.default_rng(0)
    return {output_item(name, "logits"): rng.standard_normal((2, 3)) for name in names}


def forward(change: dict[str, np.ndarray | None], title: str = "eval mode, float64") -> Verdict:
    """All modules, of which the port has some changed, or, if None, not at all."""
    ref = outputs()
    port = {item: array + 1e-13 for item, array in ref.items()}
    port |= {output_item(name, "logits"): array for name, array in change.items()}
    port = {item: array for item, array in port.items() if array is not None}
    return compare(ref, port, dict.fromkeys(ref, 1e-12), title=title)


def visit(browser: Browser, path: Path, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Page:
    """The page, opened; a message of the console, an error, a dialog or any request but the page itself fails."""
    problems, requests = [], []
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri(), wait_until="load")
    assert problems == []
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    return page


def refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def strict(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
