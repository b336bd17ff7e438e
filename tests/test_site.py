"""The tutorial as a site, built and looked at in a real browser, at the width of a desktop and of a phone."""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
import yaml
from browser import DESKTOP, PHONE, UNFOLD, fits_sideways, violations
from markdown_pages import ROOT, blocks, links, neutral
from playwright.sync_api import Browser, Page, expect

from maintenance.pages.site_hooks import SEARCH_WORDS, SEVERAL, description, repository

DOCS = ROOT / "docs"
FILES = [*DOCS.glob("*.md"), *(DOCS / "en").rglob("*.md"), *(DOCS / "zh").rglob("*.md")]
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in FILES)
ORIGIN = "https://github.com/owner/project"
SAMPLE = ["en/index", "zh/index", "en/01_forward", "zh/01_forward", "en/faq/index", "zh/faq/layers", "zh/fault_gallery"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The site, built with every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    own = {
        "NO_MKDOCS_2_WARNING": "1",  # Material's word on its own future
        # The checkout comes from somewhere: the header links there, and a page asks nobody about it.
        **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "remote.origin.url", "GIT_CONFIG_VALUE_0": ORIGIN},
    }
    environment = {**os.environ, **own}
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


class Tab:
    """A tab of the browser, for one page after the other."""

    def __init__(self, browser: Browser, site: str) -> None:
        self.page, self.site, self.problems = browser.new_page(), site, []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("requestfailed", lambda request: self.problems.append(request.url))
        own = (site, "data:")
        self.page.on("request", lambda request: request.url.startswith(own) or self.problems.append(request.url))

    def visit(self, name: str, size: tuple[int, int] = DESKTOP) -> Page:
        """The page, opened; a message of the console, an error, or a request to another host fails."""
        self.page.goto("about:blank")  # which ends what the page before was still loading
        self.problems.clear()
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        self.page.emulate_media(color_scheme="light", media="screen", reduced_motion="no-preference")
        response = self.page.goto(f"{self.site}/{name.removesuffix('index')}", wait_until="load")
        assert response.ok
        assert self.problems == []
        return self.page


@pytest.fixture(scope="module")
def visit(browser, site, folder) -> Iterator[Callable[..., Page]]:
    """`Tab.visit`, of a tab in which there is nothing to search: to index all of the site takes longer than a page."""
    tab = Tab(browser, site)
    index = json.loads((folder / "en" / "search" / "search_index.json").read_text(encoding="utf-8"))
    tab.page.route("**/search_index.json", lambda route: route.fulfill(json={**index, "docs": []}))
    yield tab.visit
    tab.page.close()


LONGEST = 10_000  # pixels that a reader may have to scroll
WIDE = "tables => tables.filter(table => table.scrollWidth > table.clientWidth).map(table => table.innerText)"
# One page of each kind: the others have the same parts, and all take ten minutes.
KINDS = ["index", "zh/01_forward", "en/faq/inference", "zh/faq/index", "en/commands", "zh/api", "en/fault_gallery"]
KINDS += ["zh/own_model", "en/deploy", "en/api_differences", "zh/records", "404.html"]


@pytest.mark.thorough(
    "one page of each kind, and the longest",
    but="en/(01_forward|network|faq/mind|api])|zh/(faq/tra|fault_gallery|project)",
)
@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_desktop_and_a_phone(visit, name):
    for size in (DESKTOP, PHONE) if name in KINDS else (PHONE,):  # what fits a phone mostly fits a desktop
        page = visit(name, size)
        assert page.evaluate("document.documentElement.scrollHeight") < LONGEST
        page.evaluate(UNFOLD)
        assert fits_sideways(page)
    assert page.locator(".md-typeset__scrollwrap").evaluate_all(WIDE) == []  # on the phone, which came last
    assert page.locator("article h1").count() == 1
    page.evaluate("document.querySelectorAll('article pre, article code').forEach(code => code.remove())")
    text = page.locator("article").inner_text()
    assert "`" not in text and "](" not in text  # Markdown that was not understood


@pytest.mark.parametrize("name", ["zh/records"])
def test_a_wide_table_is_cards_on_a_phone(visit, name):
    page = visit(name, PHONE)
    page.evaluate(UNFOLD)
    tables = page.locator("table[data-cards]")
    assert tables.count() == page.locator("article table:has(th:nth-child(3))").count() > 2
    for table in tables.all():
        assert table.evaluate("table => table.scrollWidth <= innerWidth")
        cells, heads = table.locator("tbody tr").first.locator("td"), table.locator("th").all_text_contents()
        labels = cells.evaluate_all("cells => cells.map(cell => getComputedStyle(cell, '::before').content)")
        assert labels == [f'"{head}"' for head in heads]
        beside = cells.evaluate_all("cells => cells.map(cell => parseFloat(getComputedStyle(cell).paddingLeft))")
        assert min(beside) > 100  # pixels, where the label is
        boxes = [cell.bounding_box() for cell in cells.all()]
        assert all(above["y"] + above["height"] <= below["y"] + 1 for above, below in pairwise(boxes))


@pytest.mark.thorough("some kinds", but="^(zh/01|en/api|404)")
@pytest.mark.parametrize("name", KINDS)
def test_axe_finds_nothing(visit, name):
    """In light on one screen and in dark on the other, by turns."""
    screens = (DESKTOP, PHONE) if KINDS.index(name) % 2 else (PHONE, DESKTOP)
    assert violations(visit(name), *screens) == []


PLACES = [
    "en/faq/layers/#is-adaptive_avg_pool2d-the-same",
    "zh/off_by_a_little/#statistics",  # folded on a phone alone
    "en/own_project/#backward",  # a place before the heading
    "en/api/#portproof.judge",
]


@pytest.mark.parametrize("scripted", [True, False], ids=["javascript", "plain"])
@pytest.mark.parametrize("place", PLACES)
def test_a_link_opens_what_is_folded(browser, site, place, scripted):
    size = {"width": PHONE[0], "height": PHONE[1]}
    context = browser.new_context(java_script_enabled=scripted, viewport=size)
    page = context.new_page()
    page.goto(f"{site}/{place}", wait_until="load")
    section = page.locator("details.fold").filter(has=page.locator(f'[id="{place.partition("#")[2]}"]'))
    assert section.get_attribute("open") is not None
    for part in (section.locator("summary"), section.locator("p:not(:has(a[id]))").first):
        expect(part).to_be_in_viewport()
    context.close()


def test_folded_sections_open_by_keyboard_and_all_are_printed(visit):
    page = visit("en/faq/layers")
    answers = page.locator("details.fold > div")
    assert answers.locator("visible=true").count() == 0 < answers.count()
    page.focus("details.fold summary")
    page.keyboard.press("Enter")
    assert answers.locator("visible=true").count() == 1
    page.emulate_media(media="print")
    assert answers.locator("visible=true").count() == answers.count()
    page.emulate_media(media="screen")
    assert answers.locator("visible=true").count() == 1


@pytest.mark.thorough("a page a language", but="en/01_forward|zh/faq/layers")
@pytest.mark.parametrize("name", SAMPLE)
def test_labels_are_in_the_pages_language(visit, name):
    page = visit(name)
    chinese = name.startswith("zh/")
    assert page.get_attribute("html", "lang") == ("zh" if chinese else "en")
    assert page.get_attribute("[data-md-component=search-query]", "placeholder") == ("搜索" if chinese else "Search")


@pytest.mark.thorough("one language", but="zh/02|layers")
@pytest.mark.parametrize("name", ["en/02_data", "zh/02_data", "en/faq/layers"])
def test_two_codes_are_side_by_side_on_a_laptop_and_stacked_on_a_phone(visit, name):
    page = visit(name)
    page.evaluate(UNFOLD)
    pair = page.locator(".codes").first
    assert [title.split(":")[0] for title in pair.locator(".filename").all_inner_texts()] == ["PyTorch", "PaddlePaddle"]
    first, second = (pair.locator(".highlight").nth(i).bounding_box() for i in (0, 1))
    assert first["x"] + first["width"] <= second["x"] and abs(first["y"] - second["y"]) < 5
    assert pair.locator("code").evaluate_all("codes => codes.every(code => code.scrollWidth <= code.clientWidth)")
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    first, second = (pair.locator(".highlight").nth(i).bounding_box() for i in (0, 1))
    assert first["y"] + first["height"] <= second["y"] and abs(first["x"] - second["x"]) < 5
    box = "pre.querySelector('{}').getBoundingClientRect()"
    beside = f"pres => pres.every(pre => {box.format('code')}.right <= {box.format('[data-md-type=copy]')}.left)"
    assert page.locator("pre").evaluate_all(beside)


def test_words_in_which_two_codes_differ_are_marked(visit):
    page = visit("en/01_forward")
    codes = page.locator(".codes").first.locator("code")
    marked = [codes.nth(i).locator("mark").all_inner_texts() for i in (0, 1)]
    assert marked == [["BatchNorm2d", "eps", "0.01"], ["BatchNorm2D", "epsilon", "0.99"]]
    shown = codes.nth(0).inner_text().strip()
    assert shown in (ROOT / "mobilenetv3_ref/models/mobilenet_v3.py").read_text()
    codes = visit("en/faq/layers").locator(".codes", has_text="use_global_stats").first.locator("code")  # it is folded
    for i, framework, layer in ((0, "torch", "BatchNorm1d"), (1, "paddle", "BatchNorm1D")):
        assert f"import {framework}" in codes.nth(i).text_content()
        marked = codes.nth(i).locator("mark").all_text_contents()
        assert layer in marked and framework not in marked


def test_codes_side_by_side_have_the_names_of_their_frameworks(folder):
    """A grid that is left as it is has codes that nobody named."""
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.html")]
    assert [text for text in texts if 'class="grid"' in text] == []
    assert sum(text.count('class="codes"') for text in texts) > 300  # two languages of some 150 answers, and chapters


def test_codes_side_by_side_are_of_one_answer():
    several = [codes[0] for path in FILES for codes in SEVERAL.finditer(path.read_text(encoding="utf-8"))]
    assert len(several) > 300 and [codes for codes in several if "\n## " in codes] == []


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://name:secret@example.org/owner/project.git", "https://example.org/owner/project"),
        ("git@example.org:owner/project.git", "https://example.org/owner/project"),
        ("ssh://git@example.org:22/owner/project", "https://example.org/owner/project"),
        ("http://example.org:8080/project.git", "http://example.org:8080/project"),
        ("/srv/project.git", ""),
        ("file:///srv/project.git", ""),
        ("", ""),
    ],
)
def test_repository_is_where_the_checkout_comes_from(origin, address):
    assert repository(origin) == address


FRONT = {"index": "en", "index_cn": "zh"}


CODES = ("shell", "diff", "text")  # of the front page


@pytest.mark.parametrize("name", FRONT)
def test_front_page_is_one_screen(visit, name):
    page = visit(name)
    parts = page.locator(f"article :is(h1, {', '.join(f'.language-{code}' for code in CODES)}, .cards li)")
    boxes = [part.bounding_box() for part in parts.all()]
    assert len(boxes) == 7  # the title, the commands, the diff, its report and three readers
    assert max(box["y"] + box["height"] for box in boxes) <= DESKTOP[1]
    assert page.locator(".cards li").evaluate_all("cards => cards.every(card => card.querySelector('a'))")
    page.click(f"article >> text={'中文' if name == 'index' else 'English'}")
    assert page.get_attribute("html", "lang") == ("zh" if name == "index" else "en")


@pytest.mark.thorough("one language", but="_cn")
@pytest.mark.parametrize("name", FRONT)
def test_front_page_leads_on(visit, site, folder, name):
    page = visit(name)
    links = page.eval_on_selector_all("article a", "links => links.map(link => link.getAttribute('href'))")
    addresses = [urljoin(page.url, link) for link in links]
    assert ORIGIN in addresses
    places = {urlsplit(address).path.strip("/") for address in addresses if address.startswith(site)}
    assert all((folder / place / "index.html").is_file() for place in places)
    assert len([place for place in places if place.startswith(FRONT[name])]) >= 12  # of the ladder, and the readers'
    assert f"git clone {ORIGIN} mobilenetv3" in page.locator("article .language-shell").text_content()
    assert page.locator("article svg.ladder a").count() == 9
    assert page.locator("article a img").count() == page.locator("article img[alt]").count() == 1
    page.click("article svg.ladder a >> nth=0")
    assert page.url.startswith(f"{site}/{FRONT[name]}/0")


ROUTES = {  # of the three readers: where they click, from the front page on
    "learns to port": ["/environment/", "/weights/", "/records/", "/network/", "/01_forward/", "/glossary/#module"],
    "ports a model": ["/own_model/", "/own_project/", "#backward"],
    "is 0.3 % off": ["/off_by_a_little/", "#statistics", "/faq/layers/#batch-norm-momentum"],
    "trains on cards": ["/train/", "/08_dist/"],
}


@pytest.mark.thorough("a screen a language", but="learns.*-index-phone|is.*-index_cn-laptop")
@pytest.mark.parametrize("size", [(1280, 800), PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("name", ["index", "index_cn"])
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_readers_get_where_they_want_by_links(visit, name, route, size):
    page = visit(name, size)
    language = "zh" if name == "index_cn" else "en"
    for target in route:
        page.locator(f":is(article, .md-footer) a[href*='{target.removeprefix('/')}']:visible").first.click()
        page.wait_for_url(re.compile(re.escape(target) + "$"))
        place = page.locator(f'[id="{target.partition("#")[2]}"]' if "#" in target else "article h1")
        seen = place.evaluate("e => e.getBoundingClientRect().top >= 0 && e.getBoundingClientRect().top < innerHeight")
        assert seen and f"/{language}/" in page.url


def test_front_page_shows_a_fault_and_the_report_of_its_run():
    """It is the run of the first chapter, whose commands the tests run."""
    shown = [block for block in blocks("docs/index.md") if block.kind == "code"]
    assert shown == [block for block in blocks("docs/index_cn.md") if block.kind == "code"]
    _, (wrong, right), report = (block.lines for block in shown)
    assert right.removeprefix("+ ") in (ROOT / "mobilenetv3_paddle/models/mobilenet_v3.py").read_text()
    faults = yaml.safe_load((ROOT / "maintenance/checks/faults.yaml").read_text())
    (fault,) = (fault for fault in faults if fault["name"] == "batch-norm momentum copied")
    faulty = (ROOT / "mobilenetv3_paddle" / fault["file"]).read_text().replace(fault["right"], fault["wrong"])
    assert wrong.removeprefix("- ") in faulty
    commands, printed = next(
        pair for pair in pairwise(blocks("docs/en/01_forward.md")) if fault["name"] in " ".join(pair[0].lines)
    )
    assert commands.detail == "shell" and printed.detail == "text"
    lines = iter(printed.lines)
    assert all(line in lines for line in report if line != "...")  # all of them, in this order


READ_FIRST = ["docs/index.md", "docs/index_cn.md", "portproof/README.md"]
READ_FIRST += [f"docs/{of}/{page}.md" for of in FRONT.values() for page in ("index", "own_project", "ship_recordings")]
READ_FIRST += ["docs/en/project.md", "docs/zh/project.md"]


@pytest.mark.parametrize("name", READ_FIRST)
def test_commands_and_api_are_linked_from_where_readers_begin(name):
    linked = {Path(link).name for link in links((ROOT / name).read_text(encoding="utf-8"))}
    assert {"commands.md", "api.md"} <= linked


def test_front_pages_say_the_same():
    english, chinese = blocks("docs/index.md"), blocks("docs/index_cn.md")
    assert [(block.kind, block.detail) for block in english] == [(block.kind, block.detail) for block in chinese]
    for one, other in zip(english, chinese, strict=True):
        texts = [neutral(block.cells[0][0]) for block in (one, other)]
        links_of_both = [[re.sub("^(en|zh)/", "", link) for link in links(text)] for text in texts]
        if links_of_both != [["index_cn.md"], ["index.md"]]:  # the switch
            assert sorted(links_of_both[0]) == sorted(links_of_both[1])


@pytest.mark.thorough("one language", but="en/")
@pytest.mark.parametrize(("name", "large"), [("en/network", "17 stages"), ("zh/network", "17 个阶段")])
def test_drawings_and_formulas_are_part_of_the_page(visit, name, large):
    """Text of a drawing is legible on a phone, in the page's language; a formula is MathML, which the browser sets."""
    page = visit(name)
    drawn = page.locator("article svg.drawn")
    assert drawn.count() == 5 and large in drawn.first.get_attribute("aria-label")
    said = " ".join(drawn.locator("text").all_text_contents())
    english = re.search("million|parameters|channels|convolution|residual|linear|input|resolution|pooled", said)
    assert (english is not None) == name.startswith("en/")
    boxes = [drawn.nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]  # both sizes beside one another
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    heights = "texts => texts.map(text => text.getBoundingClientRect().height)"
    assert min(drawn.locator("text").evaluate_all(heights)) >= 9
    right = "[svg, ...svg.querySelectorAll('text')].map(part => part.getBoundingClientRect().right)"
    edges = drawn.evaluate_all(f"svgs => svgs.map(svg => {right})")
    assert all(right <= of_svg + 1 for of_svg, *texts in edges for right in texts)
    formulas = page.locator("article math")
    assert formulas.count() > 15 and page.locator("article .formula math[display=block] mfrac").count() == 5
    assert all(box["width"] > 0 and box["height"] > 8 for box in (formula.bounding_box() for formula in formulas.all()))


def test_drawings_are_dark_on_a_dark_page(browser, site):
    inks = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(f"{site}/en/network/")
        drawn = page.locator("article svg.drawn").first
        fill = "part => getComputedStyle(part).fill"
        inks.append([drawn.locator(part).first.evaluate(fill) for part in (".bg", "text")])
        context.close()
    assert all(light != dark for light, dark in zip(*inks, strict=True))


def test_what_the_faq_is_written_from_is_no_page(folder):
    assert (folder / "en" / "faq").is_dir() and not (folder / "faq").exists()


def test_no_formula_is_left_as_it_was_typed(folder):
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.html")]
    texts = [re.sub("<(code|script)[ >].*?</\\1>", "", text, flags=re.DOTALL) for text in texts]
    assert [text for text in texts if re.search(r"\$|arithmatex|\\(text|frac|sum)\b", text)] == []
    assert [text for text in texts if re.search(r"images/(network|run)_", text)] == []


CATALOGUE = ["en/api_differences", "zh/api_differences"]


@pytest.mark.thorough("one language", but="zh/")
@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_is_seen_without_scrolling_sideways(visit, name):
    page = visit(name)
    right = "(cells) => Math.max(...cells.map((cell) => cell.getBoundingClientRect().left + cell.scrollWidth))"
    cells = page.locator(".catalogue td")
    article = page.locator("article").bounding_box()
    assert cells.evaluate_all(right) <= article["x"] + article["width"] + 1
    heads = page.locator(".catalogue").first.locator("th").all_inner_texts()
    assert page.locator(".catalogue td").first.inner_text() == "torch.nn.Conv2d"
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert cells.evaluate_all(right) <= PHONE[0]
    row = page.locator(".catalogue tr:has(strong)").first  # a pair that differs has all columns
    boxes = [cell.bounding_box() for cell in row.locator("td").all()]
    assert all(above["y"] + above["height"] <= below["y"] + 1 for above, below in pairwise(boxes))
    label = "cells => cells.map(cell => getComputedStyle(cell, '::before').content)"
    assert row.locator("td").evaluate_all(label) == [f'"{head}"' for head in heads]


@pytest.mark.thorough("one language", but="zh/")
@pytest.mark.parametrize("name", ["en/off_by_a_little", "zh/off_by_a_little"])
def test_mistakes_are_rows_on_a_laptop_and_cards_on_a_phone(visit, name):
    page = visit(name)
    assert fits_sideways(page)
    kinds = "parts => parts.map(part => part.className || part.localName)"
    assert page.locator("article > *").evaluate_all(kinds)[:4] == ["h1", "p", "p", "tree"]
    assert len(re.findall("[.。：:]", page.locator("article > p").nth(1).inner_text().replace("0.3", ""))) <= 2
    table = page.locator(".cases").nth(1)
    cells, heads = table.locator("td"), table.locator("th").all_inner_texts()
    boxes = [cells.nth(i).bounding_box() for i in range(3)]
    assert all(left["x"] + left["width"] <= right["x"] + 1 for left, right in pairwise(boxes))
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert fits_sideways(page)
    boxes = [cells.nth(i).bounding_box() for i in range(3)]
    assert all(above["y"] + above["height"] <= below["y"] + 1 for above, below in pairwise(boxes))
    assert [cells.nth(i).get_attribute("data-label") for i in range(3)] == heads
    leaves = page.locator(".tree a")
    leads = leaves.evaluate_all("links => links.map(link => link.getAttribute('href').slice(1))")
    parts = page.locator("article p > a[id]").evaluate_all("places => places.map(place => place.id)")
    assert leads == parts  # every part of the page is a leaf of the tree, in its order


@pytest.mark.thorough("one language", but="zh/")
@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_is_filtered(visit, name):
    page = visit(name)
    rows, differing = page.locator(".catalogue tbody tr"), page.locator(".catalogue tr:has(td:nth-child(3) strong)")
    shown = page.locator(".catalogue tbody tr:visible")
    total = rows.count()

    def count() -> int:
        assert shown.count() == int(page.locator(".filter output").inner_text().split()[0])
        return shown.count()

    assert count() == total > differing.count() > 40
    page.check(".filter input[type=checkbox]")
    assert count() == differing.count()
    page.fill(".filter input[type=search]", "batchnorm2d(")
    assert 0 < count() < 20
    assert all("BatchNorm2D(" in text for text in shown.all_inner_texts())
    topics = {row.locator("a").get_attribute("href").split("#")[0] for row in shown.all()}
    assert page.locator("article h2:visible").count() == len(topics) > 1
    page.select_option(".filter select", index=1)
    assert {row.locator("a").get_attribute("href").split("#")[0] for row in shown.all()} == {"../faq/layers/"}
    page.fill(".filter input[type=search]", "")
    page.uncheck(".filter input[type=checkbox]")
    assert "conv2d" in [row.locator("a").inner_text() for row in shown.all()]
    page.select_option(".filter select", index=0)
    assert count() == total


def test_catalogue_on_a_phone_shows_one_topic_and_all_that_is_asked_for(visit):
    page = visit(CATALOGUE[0], PHONE)
    shown, rows = page.locator(".catalogue tbody tr:visible"), page.locator(".catalogue").first.locator("tbody tr")
    assert shown.count() == rows.count()
    page.fill(".filter input[type=search]", "batchnorm2d(")
    assert shown.count() == int(page.locator(".filter output").inner_text().split()[0])


def test_catalogue_is_whole_without_javascript(browser, site):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/{CATALOGUE[0]}/")
    rows = page.locator(".catalogue tbody tr")
    assert rows.locator("visible=true").count() == rows.count() > 80
    assert page.locator(".filter").count() == 0
    context.close()


SEARCHED = yaml.safe_load(SEARCH_WORDS.read_text(encoding="utf-8"))
# What search_words.yaml does not name: the page that comes first by its own words.
UNNAMED = {
    "en": {
        **{"8 cards": "train", "1 card": "train", "top-1": "03_metric", "exit status 1": "environment"},
        **{"exit code 2": "environment", "600 epochs": "recipe", "learning rate": "faq/optimizers"},
        **{"label smoothing": "faq/losses", "RMSprop": "faq/optimizers", "hard-sigmoid": "network"},
        **{"momentum 0.99": "faq/layers", "torchrun": "08_dist", "MindSpore": "faq/mindspore"},
    },
    "zh": {
        **{"8 张卡": "train", "1 张卡": "train", "top-1": "03_metric", "退出码 1": "environment"},
        **{"学习率": "faq/optimizers", "标签平滑": "faq/losses", "断点续训": "recipe"},
        **{"数据增强": "faq/data", "滑动统计量": "off_by_a_little", "初始化": "06_init", "日志": "logging"},
        **{"环境安装": "environment", "RMSprop": "faq/optimizers", "hard-sigmoid": "network"},
    },
}


@pytest.mark.parametrize("language", SEARCHED)
def test_search_finds_first_what_answers(browser, site, language):
    """38 questions a language, each with its page; pages of the other language are not found."""
    page = Tab(browser, site).visit(f"{language}/index")
    page.click("[data-md-component=search-query]")
    pages = {words: place["page"] for words, place in SEARCHED[language].items()} | UNNAMED[language]
    assert len(pages) == 38
    for words, answer in pages.items():
        page.fill("[data-md-component=search-query]", "")
        page.keyboard.insert_text(words)
        page.keyboard.press("End")  # the page listens to keys
        address = f"{site}/{language}/{answer}/"
        first = page.locator(".md-search-result__link").first
        expect(first).to_have_attribute("href", re.compile(re.escape(address)), timeout=30_000)
        links = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
        assert all(link.startswith(f"{site}/{language}/") for link in links)
        assert "md-search__input" in page.evaluate("document.activeElement.className")
    assert page.locator(".md-search-result pre, .md-search-result .md-tags:visible").count() == 0
    page.close()


def test_search_tells_states_apart_whose_letters_are_digits(browser, folder):
    """Lunr makes one of two states with the same text, and words that only one of them had are not found any more."""
    page = browser.new_page()
    (searcher,) = folder.glob("assets/javascripts/workers/search.*.min.js")
    page.add_script_tag(path=searcher)
    text = "edges => Object.assign(new lunr.TokenSet(), { edges }).toString()"
    edges = [{"1": {"id": 2}, "3": {"id": 45}}, {"1": {"id": 2345}}]
    assert page.evaluate(text, edges[0]) != page.evaluate(text, edges[1])
    page.close()


def test_each_page_loads_the_index_of_its_language(folder):
    pages = folder.rglob("*.html")
    languages = {path: "zh" if path.relative_to(folder).parts[0] in ("zh", "index_cn") else "en" for path in pages}
    assert len(languages) == len(PAGES) + 1  # and the one that says that there is no such page
    for path, language in languages.items():
        (base,) = re.findall('"base": "(.*?)"', path.read_text(encoding="utf-8"))
        assert (path.parent / f"./{base}").resolve() == folder / language, path
    assert {path.parts[-3] for path in folder.rglob("search_index.json")} == {"en", "zh"}


@pytest.mark.thorough("one way and back", but="en/01_forward|zh/faq/layers")
@pytest.mark.parametrize("name", SAMPLE)
def test_each_page_leads_to_the_other_language(visit, site, name):
    page = visit(name)
    language = name[:2]
    other = {"en": "zh", "zh": "en"}[language]
    there = f"{site}/{other}{name[2:].removesuffix('/index')}"
    for selector in (f".md-header a[hreflang={other}]", f"head link[hreflang={other}]"):
        assert page.eval_on_selector(selector, "link => link.href").rstrip("/") == there
    page.click(f"article >> text={'English' if language == 'zh' else '中文'}")
    page.wait_for_load_state()
    assert page.url.rstrip("/") == there


@pytest.mark.thorough("one place a language", but="05_backward|zh/train")
@pytest.mark.parametrize("place", ["en/05_backward/#a-run-that-fails", "zh/train/#on-a-card", *PLACES])
def test_the_other_language_is_at_the_same_place(visit, site, place):
    name, _, anchor = place.partition("/#")
    other = {"en": "zh", "zh": "en"}[name[:2]]

    def arrives() -> None:
        page.wait_for_url(f"{site}/{other}{place[2:]}")
        expect(page.locator(f'[id="{anchor}"]')).to_be_in_viewport()

    page = visit(place)
    page.hover(".md-header .md-select")
    page.click(f".md-header a[hreflang={other}]")
    arrives()
    page = visit(name)
    page.evaluate("place => (location.hash = place)", anchor)  # as a link of the page does
    page.click(f"article a[hreflang={other}]")
    arrives()


def article(path: Path) -> str:
    return re.search("<article.*</article>", path.read_text(encoding="utf-8"), re.DOTALL)[0]


def test_all_places_are_the_same_in_both_languages(folder):
    pages = {folder / "index.html": folder / "index_cn" / "index.html"}
    pages |= {path: folder / "zh" / path.relative_to(folder / "en") for path in (folder / "en").rglob("index.html")}
    assert len(pages) == len(PAGES) / 2
    for pair in pages.items():
        english, chinese = (re.findall(r'\sid="([^"]+)"', article(path)) for path in pair)
        assert english == chinese != [], pair


class Description(HTMLParser):
    """What a page tells search engines of itself, in `.attributes`."""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str]]) -> None:
        if tag == "meta" and ("name", "description") in attributes:
            self.attributes = attributes


def test_each_page_has_a_description_of_its_own(folder):
    """It ends with a sentence or a word; that of a topic of the FAQ stands before the first question."""
    found = set()
    for name in PAGES:
        path = folder / name.removesuffix("index") / "index.html"
        parser = Description()
        parser.feed(path.read_text(encoding="utf-8"))
        assert parser.attributes == [("name", "description"), ("content", description(article(path)))], name
        said = parser.attributes[1][1]
        shown = article(path).partition("<h2")[0] if "/faq/" in name else article(path)
        _, words, rest = " ".join(unescape(re.sub("<.*?>", "", shown)).split()).partition(said.removesuffix("…"))
        assert 15 < len(words) <= 200 and (words[-1] in ".。" or not rest[:1].isalnum()), name
        found.add(said)
    assert len(found) == len(PAGES)


def test_a_reader_chooses_dark(visit):
    page = visit("en/01_forward")
    schemes = []
    for _ in range(3):
        schemes.append(page.get_attribute("body", "data-md-color-scheme"))
        page.click(".md-header__option label:visible")
    assert schemes == ["default", "default", "slate"]  # the system's, light, dark


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
