"""A real browser's windows: how it is started, two sizes, and whether a page fits."""

from playwright.sync_api import Page

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
