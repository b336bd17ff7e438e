"""A real browser: how it is started, two sizes of its window, a page in it, and whether the page fits."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, Page

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP, PHONE = (1280, 720), (390, 844)


def fits_sideways(page: Page) -> bool:
    """Whether nothing has to be scrolled sideways but what scrolls by itself."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


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
