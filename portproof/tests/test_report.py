"""The report of a run, looked at in a real browser, and its summary, read by a strict parser.

The runs are made of verdicts that `compare` gave on small arrays, so that every kind of failure takes no time.
"""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from browser import DESKTOP, PHONE, fits_sideways, violations, visit
from made_up_results import MODULES, Outcome, forward, outputs, strict
from PIL import Image
from playwright.sync_api import Browser, Page

from portproof.backends.trace import output_item
from portproof.compare import FAIL, NOT_JUDGED, PASS, REFUSED, Item, Row, Verdict, compare, tensor_item
from portproof.localize.locate import Location
from portproof.python39 import zip_strict
from portproof.report.chinese import CHINESE
from portproof.report.page import render_page, worst_share, write_page
from portproof.report.plots import CROSS, CURVES, MEAN, STD, STYLES, Picture, depth_rows, picture_row, shares
from portproof.report.summary import (
    LIBRARIES,
    SCHEMA,
    LadderResult,
    LeftOut,
    RungResult,
    environment,
    write_summary,
)
from portproof.report.text import CAUSES, LAST_WORDS, WORDS, first_difference, last_line
from sturdyio.cli import UserError

SMALL = "resnet18"
HOSTILE = "<script>alert(1)</script>&amp;\"'$x^$\udcff"


def located() -> Verdict:
    """A failure of which it was found where it begins."""
    location = Location(
        "features.2.1",
        "BatchNorm2d",
        "forward",
        "features.2.1",
        "BatchNorm2D",
        proof=["alone, fed the reference's input: <max|d| 1.0e-03>"],
        diagnosis=["epsilon is 1e-05, not 0.001"],
        tree=[f"features.{i}" + ("  <--- here" if i == 2 else "") for i in range(40)],
    )
    return replace(forward({"features.2.1": BAD + 1e-3}), location=location, notes=["a note & more"])


def backward(wrong_from: int) -> Verdict:
    """Four iterations, of which the gradients are off from `wrong_from` on."""
    tensors = [tensor_item(f"{name}.weight", "gradient") for name in MODULES]
    items = [replace(item, iteration=i) for i in range(4) for item in (Item("loss", "loss"), *tensors)]
    rng = np.random.default_rng(0)
    ref = {item: rng.standard_normal((2, 3)) for item in items}
    port = {
        item: array + (1e-6 if item.kind == "gradient" and item.iteration >= wrong_from else 1e-13)
        for item, array in ref.items()
    }
    return compare(ref, port, dict.fromkeys(ref, 1e-12), title="train mode, float64, 4 iterations")


def normalized(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 -> (3, H, W) float32, as the presets do it."""
    return ((pixels / 255 - MEAN) / STD).transpose(2, 0, 1).astype(np.float32)


def photographs() -> tuple[np.ndarray, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    other = pixels.copy()
    other[3, 4] = 255 - other[3, 4]
    return normalized(pixels), normalized(other)


def data_outcome() -> Outcome:
    ref, port = photographs()
    item = Item("n02123045_cat.JPEG", "image", section="val")
    verdict = compare({item: ref}, {item: port}, {item: 0.0}, title="val pipeline, epoch 0, 0 workers")
    return Outcome(verdict, pictures={str(item): (ref, port)})


def hostile_outcome() -> Outcome:
    ref = {replace(item, name=f"{HOSTILE}{item.name}"): array for item, array in outputs().items()}
    port = {name: array + 1 for name, array in ref.items()}
    image = np.zeros((3, 8, 8), np.float32)
    return Outcome(
        compare(ref, port, dict.fromkeys(ref, 1e-12), title=HOSTILE),
        Verdict("refused", refusal=HOSTILE),
        curves={HOSTILE: (np.zeros(3), np.ones(3))},
        pictures={HOSTILE: (image, image + 1)},
    )


def good() -> list[RungResult]:
    """Two rungs that pass."""
    curves = {"train mode, loss": (np.arange(4.0), np.arange(4.0)), "train mode, lr": (np.ones(4), np.ones(4))}
    return [
        RungResult("01_test_forward", SMALL, 1.0, Outcome(forward({}))),
        RungResult("05_test_backward", SMALL, 2.0, Outcome(backward(wrong_from=4), curves=curves)),
    ]


def ladder(bad: RungResult) -> LadderResult:
    """A run whose second rung is `bad`."""
    first, last = good()
    return LadderResult([first, bad, last], {"date": "today", "device": "cpu", "seed": "0", "command": "python x"})


def rung(outcome: Outcome | None, error: str = "") -> RungResult:
    return RungResult("02_test_data", SMALL, 3.25, outcome, error)


BAD = outputs()[output_item("features.2.1", "logits")]
# name: the run, its status, what the item that is shown first is called, how many plots and pictures there are
CASES = {
    "pass": (lambda: LadderResult(good()), PASS, None, 5, 0),
    "value": (lambda: ladder(rung(Outcome(forward({"features.2.1": BAD + 1e-3})))), FAIL, "features.2.1", 6, 0),
    "located": (lambda: ladder(rung(Outcome(located()))), FAIL, "features.2.1", 6, 0),
    "missing": (lambda: ladder(rung(Outcome(forward({"features.2.1": None})))), FAIL, "features.2.1", 6, 0),
    "nan": (lambda: ladder(rung(Outcome(forward({"features.2.1": BAD * np.nan})))), FAIL, "features.2.1", 6, 0),
    "gradient": (lambda: ladder(rung(Outcome(backward(2)))), FAIL, f"iteration 2/gradient/{MODULES[0]}.weight", 7, 0),
    "data": (lambda: ladder(rung(data_outcome())), FAIL, "val/n02123045_cat.JPEG", 5, 3),
    "raised": (lambda: ladder(rung(None, "ValueError: no such layer")), FAIL, "ValueError: no such layer", 5, 0),
    "refused": (
        lambda: ladder(rung(Outcome(compare({"a": np.zeros(3)}, {"a": np.zeros(3)}, {"a": 1e-3}, title="zeros")))),
        REFUSED,
        "a",
        5,
        0,
    ),
    "hostile": (lambda: ladder(rung(hostile_outcome())), FAIL, HOSTILE.replace("\udcff", "\\udcff"), 7, 3),
}


@pytest.fixture(scope="session", params=CASES)
def case(request, tmp_path_factory) -> SimpleNamespace:
    """Each run in turn, with what is expected of its page, which lies at `path`."""
    make, status, first, plots, images = CASES[request.param]
    result, path = make(), tmp_path_factory.mktemp("report") / "report.html"
    write_page(result, path)
    return SimpleNamespace(
        result=result, path=path, status=status, word=LAST_WORDS[status], first=first, plots=plots, images=images
    )


def show(browser: Browser, result: LadderResult, folder: Path) -> Page:
    write_page(result, folder / "report.html")
    return visit(browser, folder / "report.html")


@pytest.mark.thorough("each case on a desktop, one on a phone", but="desktop|value")
@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_page_renders(browser, case, size, scheme):
    page = visit(browser, case.path, size, scheme)
    assert page.title().startswith(case.word)
    heading = page.inner_text("h1")
    assert heading.startswith(case.word)
    assert case.result.sentence.encode("utf-8", "backslashreplace").decode() in heading

    widths = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(widths) == case.images and all(widths)
    plots = page.locator("figure.plot > svg")
    assert plots.count() == case.plots
    for plot in plots.all():
        assert plot.bounding_box()["width"] > 300
        assert plot.locator("path").count() > 2 and plot.locator("text").count() > 3
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(ids) == len(set(ids))

    assert fits_sideways(page)
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert fits_sideways(page)
    assert page.evaluate("document.scripts.length") == 0
    page.close()


@pytest.mark.thorough("one case, light on a desktop, dark on a phone", but="located-desktop")
@pytest.mark.parametrize(("light", "dark"), [(DESKTOP, PHONE), (PHONE, DESKTOP)], ids=["desktop", "phone"])
def test_axe_finds_nothing(browser, case, light, dark):
    page = visit(browser, case.path)
    assert violations(page, light, dark) == []
    page.close()


def test_what_failed_first_is_seen_without_scrolling(browser, case):
    page = visit(browser, case.path)
    item = page.locator("#first-item")
    assert item.count() == (case.status != PASS)
    if case.status == PASS:
        return
    assert item.inner_text().startswith(case.first)
    for element in (item, page.locator("#first")):
        box = element.bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= DESKTOP[1]
        assert box["x"] >= 0 and box["x"] + box["width"] <= DESKTOP[0]
    page.close()


def test_what_failed_first_is_told_in_full(browser, tmp_path):
    result = CASES["value"][0]()
    page = show(browser, result, tmp_path)
    terms, texts = page.locator("#first dt").all_inner_texts(), page.locator("#first dd").all_inner_texts()
    facts = dict(zip_strict(terms, texts))
    row = result.rungs[1].verdicts[0].first_failure
    assert facts["Step"] == f"02_test_data, {SMALL}"
    assert facts["Check"] == "eval mode, float64"
    assert facts["Item"] == "features.2.1 (BatchNorm2d), 2x3"
    assert float(facts[f"Reference at {row.worst.index}"]) == row.worst.ref
    assert float(facts[f"Port at {row.worst.index}"]) == row.worst.port
    assert facts["Difference"].startswith("1.000e-03, limit 1.000e-12: 1.0e+09 times the limit, ")
    assert facts["Over the limit"] == "6 of 6 values (100.0%)"
    assert facts["Agreed before"] == "01_test_forward; no checks of this step; 7 of 7 items of this check agree"
    assert facts["Usual causes"].startswith("epsilon;")
    page.locator("#first a").click()
    assert page.locator("#rung-2").bounding_box()["y"] < DESKTOP[1]
    page.close()


def test_what_was_not_measured_is_not_told(browser, tmp_path):
    page = show(browser, CASES["missing"][0](), tmp_path)
    facts = dict(zip_strict(page.locator("#first dt").all_inner_texts(), page.locator("#first dd").all_inner_texts()))
    assert facts["Reason"] == "the port does not have it" and "Difference" not in facts
    page.close()


def test_location_and_notes_are_shown(browser, tmp_path):
    result = CASES["located"][0]()
    page = show(browser, result, tmp_path)
    lines = result.rungs[1].verdicts[0].location.lines()
    assert len(lines) > 40 and "\n".join(lines) in page.inner_text("#first")
    assert "\n".join(lines) in page.inner_text("#rung-2 details.check > pre")
    assert "a note & more" in page.inner_text("#rung-2")
    page.close()


def english() -> set[str]:
    """All texts that the page gives to `_`, and the usual causes."""
    folder = resources.files("portproof.report")
    source = "".join((folder / name).read_text() for name in ("templates/report.html.j2", "plots.py", "summary.py"))
    drawn = {"iteration", "item, in the order of execution", "gradient, from the output to the input"}
    drawn |= {"largest difference", "largest difference / limit", "running statistics", "epoch", "value"}
    drawn |= {"{} of both sides at each iteration", "{} of both sides at each epoch"}
    drawn |= {"{} of {} checks of this step agree", "{} of {} items of this check agree"}
    drawn |= {"no checks of this step", "no items of this check"}
    drawn |= {"Status", "Item", "Items", "Size", "Shape", "Difference", "Limit", "Share", "Worst item"}
    drawn |= {"Difference and limit of each item, in order", "Largest share of the limit at each iteration"}
    literal = set(re.findall(r'\b_\(\s*"([^"]+)"\s*\)', source))
    assert len(literal) > 50
    names = {name for name in CURVES.values() if name != "loss"} | set(STYLES)
    return literal | drawn | set(CAUSES.values()) | names


def test_the_page_is_in_chinese_on_request(browser, tmp_path):
    result = CASES["value"][0]()
    write_page(result, tmp_path / "report.html", "zh")
    page = visit(browser, tmp_path / "report.html")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    terms = page.locator("#first dt").all_inner_texts()
    assert terms[:3] == ["步骤", "检查", "比较项"] and "常见原因" in terms
    assert page.inner_text("h1").endswith(result.said(CHINESE.__getitem__))
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    drawn = page.locator("figure.plot svg text").all_text_contents()
    assert {"迭代", "最大差异", "最大差异 / 阈值", "loss 值", "学习率"} <= set(drawn), drawn
    headings = page.locator("th[scope=col], #first dt, h2[id$=title]:not([id^=rung-]), h3, .key li").all_inner_texts()
    assert len(headings) > 20 and all(re.search("[\u4e00-\u9fff]", text) for text in headings), headings
    assert fits_sideways(page)
    page.close()


def test_every_text_of_the_page_has_its_chinese():
    assert english() == set(CHINESE)
    for text, chinese in CHINESE.items():  # no number is lost
        assert text.count("{") == chinese.count("{"), text
        assert not re.search(r"[,;:!?]|\((?!n - 1|weight)", re.sub(r"{[^}]*}", "", chinese)), chinese


def test_a_long_run_lists_what_tells_most(tmp_path):
    """A page of many checks stays small: each lists what differs, and then what is nearest to its limit.

    These are as many as all steps have of a model of 230 modules and statistics.
    """
    items = [output_item(f"features.{i}", "logits") for i in range(230)]
    ref = {item: np.full(3, float(i)) for i, item in enumerate(items, 1)}
    port = {item: array + 1e-13 * (i + 1) for i, (item, array) in enumerate(ref.items())}
    port[items[7]] = ref[items[7]] + 1
    few = {item: ref[item] for item in items[:12]}
    verdicts = [compare(ref, port, dict.fromkeys(ref, 1e-9), title=f"check {i}") for i in range(36)]
    verdicts += [compare(few, few, dict.fromkeys(few, 0.0), title=f"equal {i}") for i in range(120)]
    outcome = Outcome(*verdicts)
    outcome.groups = [lambda item: item.name[:-1]] * len(verdicts)
    path = tmp_path / "report.html"
    write_page(LadderResult([rung(outcome)]), path)
    html = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 400_000
    assert "22 of 230 items: what differs, then what is nearest to its limit" in html
    listed = re.findall("<th>([^<]*)<td>3<td>", html.partition("22 of 230 items")[2])[:22]
    assert listed == [str(items[7]), *(str(item) for item in items[:208:-1])]


def test_what_was_not_run_is_listed_with_the_reason(browser, tmp_path):
    left_out = [LeftOut("09_test_deploy", SMALL, "it needs onnx: pip install -e '.[deploy]'")]
    result = LadderResult(good(), left_out=left_out)
    page = show(browser, result, tmp_path)
    assert page.inner_text("header p") == "portproof"
    last = page.locator("#rungs tbody tr").last.inner_text().split("\t")
    assert last == ["–", "09_test_deploy", SMALL, f"not run: {left_out[0].reason}"]
    page.close()
    assert "未运行：需要 onnx：pip install" in render_page(result, "zh")
    write_summary(result, tmp_path / "summary.json")
    assert strict(tmp_path / "summary.json")["left_out"] == [vars(left_out[0])]


def test_every_item_is_in_a_table_and_failing_groups_come_first(browser, tmp_path):
    result = CASES["value"][0]()
    page = show(browser, result, tmp_path)
    for place, ran in enumerate(result.rungs, 1):
        shown = page.locator(f"#rung-{place} details details table tbody tr")
        (verdict,) = ran.verdicts
        assert shown.count() == len(verdict.rows)
        cells = page.evaluate(
            "place => [...document.querySelectorAll(`#rung-${place} details details tbody tr`)]"
            ".map(row => [row.cells[0].textContent, row.cells[1].textContent])",
            place,
        )
        assert cells == [[WORDS[row.status], row.name] for row in verdict.rows]
    visible = page.locator("#rung-2 details.check > div tbody tr")
    assert visible.first.is_visible()
    firsts = [row.split("\t")[:2] for row in visible.all_inner_texts()]
    assert firsts[0] == ["FAIL", "features.2"] and [word for word, _ in firsts[1:]] == ["ok"] * 5
    assert page.locator("#rung-1 tbody tr").first.is_hidden()
    page.close()


def test_rungs_are_listed_and_link_to_their_sections(browser, tmp_path):
    result = CASES["raised"][0]()
    page = show(browser, result, tmp_path)
    rows = [row.split("\t") for row in page.locator("#rungs tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["PASS", "FAIL", "PASS"]
    assert rows[1] == ["FAIL", "02_test_data", SMALL, "0", "–", "3.2"]
    assert rows[0][3:5] == [str(len(MODULES)), "0.1"]
    for place, link in enumerate(page.locator("#rungs a").all(), 1):
        assert link.get_attribute("href") == f"#rung-{place}"
        assert page.locator(f"#rung-{place} h2").inner_text().startswith(link.inner_text())
    page.close()


def test_page_names_nothing_outside_itself(case):
    html = case.path.read_text(encoding="utf-8")
    names = re.findall(r"(?:src|href|action|data|poster|srcset)\s*=\s*[\"']?([^\"'\s>]*)", html)
    names += re.findall(r"url\(\s*[\"']?([^\"')]*)", html)
    assert names and all(name.startswith(("#", "data:")) for name in names)
    assert "@import" not in html and "<script" not in html and '<link rel="stylesheet' not in html


def test_failing_items_are_marked_in_the_plots():
    def marks(outcome: Outcome) -> int:
        html = render_page(LadderResult([rung(outcome)]))
        return sum(path.count(CROSS) for path in re.findall(r'<path d="([^"]*)" stroke="var\(--fail\)"', html))

    assert marks(Outcome(forward({}))) == 0
    assert marks(Outcome(forward({"features.2.1": BAD + 1, "features.0.0": None}))) == 2
    assert marks(Outcome(backward(4))) == 0
    # the gradients of iteration 0 and, of each iteration, the worst
    assert marks(Outcome(backward(0))) == len(MODULES) + 4
    assert marks(Outcome(backward(3))) == 1


def test_what_is_not_judged_counts_as_no_failure():
    verdict = backward(0)
    rows = [replace(row, status=NOT_JUDGED) if row.status == FAIL else row for row in verdict.rows]
    html = render_page(LadderResult([rung(Outcome(replace(verdict, rows=rows)))]))
    assert "over the limit at" not in html and CROSS not in html
    assert f"<td>{len(MODULES)} items<td" in html and f"{len(MODULES)} of {len(MODULES)} items" not in html


def test_rows_drawn_along_the_network():
    counter = tensor_item("a.count", "buffer")
    rows = [
        Row(output_item("features.0", "logits"), PASS, atol=1.0),
        Row(Item("a/b"), PASS, atol=1.0),
        Row(counter, PASS, atol=0.0),
    ]
    assert depth_rows(rows) == rows[:1]
    assert depth_rows([Row(counter, FAIL, atol=0.0)]) == [Row(counter, FAIL, atol=0.0)]
    gradients = [Row(gradient("a", i), PASS, atol=1.0) for i in range(2)]
    assert depth_rows([*rows, *gradients]) == gradients[:1]


def gradient(name: str, iteration: int | None) -> Item:
    return Item(name, "gradient", iteration=iteration)


def test_shares_of_each_iteration():
    rows = [
        Row(gradient("a", 0), PASS, difference=1.0, atol=4.0),
        Row(gradient("b", 0), PASS, difference=1.0, atol=2.0),
        Row(gradient("a", 2), FAIL, reason="not finite"),
        Row(Item("lr", "lr", iteration=1), PASS, difference=0.0, atol=0.0),
        Row(gradient("a", None), PASS, difference=1.0, atol=2.0),
    ]
    (curve,) = shares(rows).values()
    np.testing.assert_array_equal(curve, [0.5, np.nan, np.inf])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "numbers",
    [
        (np.inf, 1e-12),
        (1e308, 5e-324),
        (5e-324, 1e308),
        (0.0, 1e-12),
        (np.nan, np.nan),
        (1.0, 0.0),
        (1.0, np.inf),
    ],
)
def test_odd_numbers_break_nothing(numbers):
    difference, limit = numbers
    items = [item for i in range(9) for item in (output_item(f"m{i}", "logits"), gradient("a", i))]
    rows = [Row(item, FAIL, (), difference, limit) for item in items]
    curves = {"a, loss": (np.full(3, difference), np.full(2, limit)), "nothing": (np.empty(0), np.empty(0))}
    render_page(LadderResult([rung(Outcome(Verdict("odd", rows), curves=curves))]))


def test_worst_share():
    exact, unequal = Row(Item("a"), PASS, (), 0.0, 0.0), Row(Item("b"), FAIL, (), 1.0, 0.0)
    assert worst_share([]) == "–"
    assert worst_share([Verdict("", [exact])]) == "equal"
    assert worst_share([Verdict("", [exact, unequal])]) == "unequal"
    assert worst_share([Verdict("", [exact]), Verdict("", [Row(Item("c"), PASS, (), 1.0, 4.0)])]) == "0.25"
    assert worst_share([Verdict("", [exact, Row(Item("d"), FAIL, reason="missing")])]) == "–"


def decoded(picture: Picture) -> np.ndarray:
    head, _, data = picture.uri.partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.array(image.convert("RGB"))


def test_pictures_are_the_images():
    pixels = np.random.default_rng(1).integers(0, 256, (9, 7, 3), np.uint8)
    ref = normalized(pixels)
    port = ref.copy()
    port[1, 2, 3] += 0.5
    shown = picture_row(ref, port)
    np.testing.assert_array_equal(decoded(shown[0]), pixels)
    changed = (decoded(shown[1]) != pixels).any(axis=2)
    brightness = decoded(shown[2]).astype(int).sum(axis=2)
    expected = np.zeros((9, 7), bool)
    expected[2, 3] = True
    np.testing.assert_array_equal(changed, expected)
    np.testing.assert_array_equal(brightness == brightness.max(), expected)
    assert shown[2].text == "1 of 63 pixels differ, by up to 0.5"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "port",
    [
        np.zeros((8, 6, 3), np.float32),
        np.zeros((3, 4, 4), np.float32),
        np.zeros((3, 0, 6), np.float32),
        np.full((3, 8, 6), np.nan, np.float32),
        np.full((3, 8, 6), np.inf, np.float32),
        np.zeros((3, 8, 6), np.uint8),
        np.zeros((3, 8, 6), bool),
        np.array("text"),
        np.zeros(()),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}-{array.flat[:1]}",
)
def test_pictures_of_any_tensor(port):
    assert [picture.title for picture in picture_row(np.zeros((3, 8, 6), np.float32), port)] == [
        "reference",
        "port",
        "difference",
    ]


def test_summary_says_what_the_verdicts_say(tmp_path, case):
    write_summary(case.result, tmp_path / "summary.json")
    data = strict(tmp_path / "summary.json")
    assert (data["schema"], data["status"], data["sentence"]) == (SCHEMA, case.word, case.result.sentence)
    assert data["environment"] == case.result.environment
    for ran, told in zip_strict(case.result.rungs, data["rungs"]):
        assert (told["name"], told["model"], told["seconds"], told["error"]) == (
            ran.name,
            ran.model,
            ran.seconds,
            ran.error,
        )
        assert told["status"] == LAST_WORDS[ran.status]
        for verdict, content in zip_strict(ran.verdicts, told["verdicts"]):
            assert content == json.loads(json.dumps(verdict.to_dict()))
            assert content["notes"] == verdict.notes and content["sentence"] == last_line(verdict.title, verdict)
            if location := verdict.location:
                found = content["location"]
                assert (found["module"], found["phase"], found["port_type"]) == (
                    "features.2.1",
                    "forward",
                    "BatchNorm2D",
                )
                assert (found["causes"], found["lines"]) == (location.diagnosis, location.lines())
            else:
                assert content["location"] is None
            assert (content["title"], content["refusal"]) == (verdict.title, verdict.refusal)
            assert content["status"] == LAST_WORDS[verdict.status]
            for row, fields in zip_strict(verdict.rows, content["rows"]):
                assert (fields["name"], fields["status"], fields["reason"], fields["shape"]) == (
                    row.name,
                    LAST_WORDS[row.status],
                    row.reason,
                    list(row.shape),
                )
                assert (fields["widened_by"], fields["hidden"]) == (row.widened_by, row.hidden)
                for key, number in {"difference": row.difference, "limit": row.atol, "scale": row.scale}.items():
                    value = float("nan") if fields[key] is None else fields[key]
                    np.testing.assert_equal(value, number)
                if row.worst:
                    assert fields["worst"] == {
                        "index": list(row.worst.index),
                        "reference": row.worst.ref,
                        "port": row.worst.port,
                        "outside": row.worst.outside,
                        "size": row.worst.size,
                    }
                else:
                    assert fields["worst"] is None


def test_summary_of_what_json_has_no_number_for(tmp_path):
    array = np.array([1.7e308])
    verdict = compare({"a": array}, {"a": -array}, {"a": 1e-12})
    write_summary(LadderResult([rung(Outcome(verdict))]), tmp_path / "summary.json")
    (row,) = strict(tmp_path / "summary.json")["rungs"][0]["verdicts"][0]["rows"]
    assert (row["difference"], row["status"]) == ("Infinity", "FAIL")


def test_a_complex_number_is_text(tmp_path):
    verdict = compare({"a": np.array([1 + 2j])}, {"a": np.array([1 + 3j])}, {"a": 0.1})
    write_summary(LadderResult([rung(Outcome(verdict))]), tmp_path / "summary.json")
    worst = strict(tmp_path / "summary.json")["rungs"][0]["verdicts"][0]["rows"][0]["worst"]
    assert (worst["reference"], worst["port"]) == ("(1+2j)", "(1+3j)")


def test_sentence():
    assert LadderResult(good()).sentence == "All 94 items of 2 steps are within their limits."
    assert LadderResult([]).sentence == "No step was run." and LadderResult([]).status == REFUSED
    assert LadderResult([CASES[name][0]().rungs[1] for name in ("refused", "value")]).status == FAIL
    value = CASES["value"][0]().sentence
    assert value == f"1 of 3 steps failed; the first, 02_test_data, {SMALL}, first differs at features.2.1."
    assert CASES["raised"][0]().sentence == f"1 of 3 steps failed; the first, 02_test_data, {SMALL}, raised an error."
    refused = CASES["refused"][0]().sentence
    assert refused == f"1 of 3 steps could not be judged; the first is 02_test_data, {SMALL}."
    one = LadderResult([rung(Outcome(located()))])
    assert one.title == f"02_test_data, {SMALL}" and LadderResult(good()).title == ""
    assert f"FAIL {one.sentence}" == last_line(one.rungs[0].rung.name, located())
    assert "located" not in one.sentence and "epsilon is 1e-05, not 0.001" in one.sentence


@pytest.mark.parametrize(
    ("kind", "ref", "port", "said"),
    [
        ("loss", 0.7, 5.6, "the port's number there is exactly 8 times the reference's: a sum for a mean"),
        ("gradient", -1.5, -0.5, "the reference's number there is exactly 3 times the port's: a sum for a mean"),
        ("loss", 0.7, 0.7 * 8.001, ""),
        ("loss", 0.7, -1.4, ""),
        ("metric", 0.25, 0.5, ""),  # an accuracy of few images is often twice another
        ("loss", 0.7, float("nan"), ""),
        (
            "distribution",
            0.1,
            0.2449,
            "near the root of 6 times the reference's: kaiming_uniform_ without",
        ),
        ("output", 0.1, 0.2449, ""),
    ],
)
def test_a_factor_between_two_numbers_is_told(kind, ref, port, said):
    item = Item("it", kind)
    verdict = compare({item: np.array([ref])}, {item: np.array([port])}, {item: 1e-9})
    lines = first_difference(verdict, {})
    assert said in lines[-1] if said else not any(" times " in line for line in lines)


def test_environment_names_command_and_versions():
    args = SimpleNamespace(model=SMALL, seed=3, weights=None, output_dir="a b")
    found = environment(args, "ladder.py")
    assert found["command"] == f"python ladder.py --model {SMALL} --seed 3 --output-dir 'a b'"
    versions = [found[name] for name in ("python", *LIBRARIES)]
    assert all(re.match(r"\d+\.\d+", version) for version in versions), versions
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]", found["date"])


def test_colours_can_be_told_apart():
    """Contrast by the Web Content Accessibility Guidelines 2.1, section 1.4.3: 4.5 for text, in light and in dark."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    css = (resources.files("portproof.report") / "templates" / "report.html.j2").read_text()
    palettes = [dict(re.findall(r"--(\w+): (#\w+);", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)]
    assert len(palettes) == 2
    for palette in palettes:
        for name in ("ink", "muted", "data", "pass", "fail", "refused"):
            for ground in ("card", "paper"):
                assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
        for name in ("pass", "fail", "refused"):
            assert contrast(palette["on"], palette[name]) >= 4.5, name


def test_folder_that_vanishes_during_the_run_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (write_page, write_summary):
        with pytest.raises(UserError, match="cannot be written"):
            write(LadderResult(good()), tmp_path / "file" / "report.html")
