"""The tutorial as a site, built and looked at in a real browser, at the width of a desktop and of a phone."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT
from playwright.sync_api import Browser, Page
from screens import DESKTOP, PHONE, fits_sideways

PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md"))
SAMPLE = ["en/index", "zh/index", "en/01_forward", "zh/01_forward", "en/faq/index", "zh/faq/layers", "fault_gallery"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The site, built with every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
    }  # Material's word on its own future
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="session")
def site(folder) -> Iterator[str]:
    """Its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """It logs no request."""

    def log_message(self, *args) -> None:
        pass


def visit(browser: Browser, site: str, name: str, size: tuple[int, int] = DESKTOP) -> Page:
    """The page, opened; a message of the console, an error, or a request to another host fails."""
    problems = []
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(request.url))
    page.on("request", lambda request: request.url.startswith((site, "data:")) or problems.append(request.url))
    response = page.goto(f"{site}/{name.removesuffix('index')}", wait_until="load")
    assert response.ok
    assert problems == []
    return page


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_desktop_and_a_phone(browser, site, name):
    page = visit(browser, site, name)
    for width, height in (DESKTOP, PHONE):
        page.set_viewport_size({"width": width, "height": height})
        assert fits_sideways(page)
    assert page.locator("article h1").count() == 1
    page.evaluate("document.querySelectorAll('article pre, article code').forEach(code => code.remove())")
    text = page.locator("article").inner_text()
    assert "`" not in text and "](" not in text  # Markdown that was not understood
    page.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_labels_are_in_the_pages_language(browser, site, name):
    page = visit(browser, site, name)
    chinese = name.startswith("zh/")
    assert page.get_attribute("html", "lang") == ("zh" if chinese else "en")
    assert page.get_attribute("[data-md-component=search-query]", "placeholder") == ("搜索" if chinese else "Search")
    page.close()


def test_two_codes_are_side_by_side_where_there_is_room(browser, site):
    wide = (1920, 1080)

    def boxes(size):
        page = visit(browser, site, "en/02_data", size)
        first, second = (page.locator(".grid pre").nth(i).bounding_box() for i in (0, 1))
        page.close()
        return first, second

    first, second = boxes(wide)
    assert first["x"] + first["width"] <= second["x"] and abs(first["y"] - second["y"]) < 20
    first, second = boxes(PHONE)
    assert first["y"] + first["height"] <= second["y"] and abs(first["x"] - second["x"]) < 5


@pytest.mark.parametrize(
    ("name", "words", "found"),
    [("en/index", "momentum", "/en/"), ("zh/index", "动量", "/zh/"), ("zh/index", "学习率", "/zh/")],
)
def test_search_finds_pages_of_the_language(browser, site, name, words, found):
    page = visit(browser, site, name)
    page.click("[data-md-component=search-query]")
    page.keyboard.insert_text(words)
    page.keyboard.press("End")  # the page listens to keys
    page.wait_for_selector(".md-search-result__link", timeout=20_000)
    addresses = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    assert any(found in address for address in addresses)
    page.close()


@pytest.mark.parametrize("name", [name for name in SAMPLE if "/" in name])
def test_each_page_leads_to_the_other_language(browser, site, name):
    page = visit(browser, site, name)
    language = name[:2]
    page.click(f"article >> text={'English' if language == 'zh' else '中文'}")
    page.wait_for_load_state()
    other = {"en": "zh", "zh": "en"}[language]
    assert page.url.partition("#")[0].rstrip("/") == f"{site}/{other}{name[2:].removesuffix('/index')}"
    page.close()


def test_places_that_pages_link_to_exist(site, folder):
    """mkdocs --strict looks at pages, not at places in them."""
    pages = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    ids = {path: set(re.findall(r'\sid="([^"]+)"', text)) for path, text in pages.items()}
    linked = 0
    for path, text in pages.items():
        for address, place in re.findall(r'<a href="([^"#:]*)#([^"]+)"', text):
            target = (path.parent / address / ("" if address.endswith(".html") else "index.html")).resolve()
            assert place in ids[target if address else path], (path, address, place)
            linked += 1
    assert linked > 500  # the table of questions and that of differences, in both languages
