"""A real browser: how it is started, two sizes of its window, a page in it, whether the page fits and what axe says.

axe finds what keeps a page from those who see, hear or click differently: low contrast, parts without a name.
"""

from __future__ import annotations

from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
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
UNFOLD = "document.querySelectorAll('details').forEach(details => details.open = true)"
# Code is thousands of words in a dozen colours, a table many rows of the same parts: one of each kind stays.
ONE_OF_EACH = """
const seen = new Set();
for (const part of document.querySelectorAll("pre span, tbody tr")) {
  const kind = [part, ...part.querySelectorAll("*")].map((element) => `${element.tagName} ${element.className}`).join();
  seen.has(kind) ? part.remove() : seen.add(kind);
}
"""


def fits_sideways(page: Page) -> bool:
    """Whether nothing has to be scrolled sideways but what scrolls by itself."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def violations(page: Page, light: tuple[int, int] = DESKTOP, dark: tuple[int, int] = PHONE) -> list[str]:
    """What axe finds on the page, light at one size and dark at another; all that is folded is opened first."""
    page.evaluate(UNFOLD)
    page.evaluate(ONE_OF_EACH)
    found = []
    for scheme, (width, height) in {"light": light, "dark": dark}.items():
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # or colours would be on their way
        found += [
            f"{scheme}, {width}: {violation['id']}, {node['failureSummary']} {node['html']}"
            for violation in Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
            for node in violation["nodes"]
        ]
    return found


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
