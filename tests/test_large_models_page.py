"""Memory follows the law of docs/*/large_models.md, and the page is what the program writes of its figures."""

import pytest
from markdown_pages import ROOT, assert_same_content

from maintenance.benchmarks.large_models_page import LAW, MODELS, WORDS, law, measured, page

FOUND = {"status": 0, "weights": 1.0, "largest": 0.125, "saved": 0.25, "memory": 6.5, "seconds": 90.0, "cpu": 120.0}
ABOUT = {"machine": "x86_64", "cores": 2, "libraries": {"torch": "2.1", "paddle": "3.3"}}


def test_pages_say_what_was_found(tmp_path):
    paths = {language: tmp_path / f"{language}.md" for language in WORDS}
    for language, path in paths.items():
        path.write_text(page({"decoder of 4 layers": {**FOUND, "runs": 12}}, ABOUT, language), encoding="utf-8")
    assert_same_content(*map(str, paths.values()))
    row = f"268.4 | 1.00 | 0.12 | 0.25 | 6.50 | {law(FOUND):.2f} | 1.5 | 2.0 | 12 |"
    assert f"| decoder of 4 layers | {row}" in paths["en"].read_text(encoding="utf-8")
    assert f"| 4 层的 decoder | {row}" in paths["zh"].read_text(encoding="utf-8")


def test_the_pages_are_the_programs():
    """All but the figures; none is above the law's, and the largest model's is within the bound that was set."""
    for language in WORDS:
        text = (ROOT / "docs" / language / "large_models.md").read_text(encoding="utf-8")
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line][2:]
        assert len(rows) == len(MODELS)
        for _, _, weights, *sizes, memory, limit, minutes, _, _ in rows:
            by_law = law(dict(zip(LAW, map(float, (weights, *sizes)), strict=True)))
            assert abs(by_law - float(limit)) < 0.1 and float(memory) <= float(limit) and float(minutes) < 20
        assert text.partition("## ")[2] == page({}, ABOUT, language).partition("## ")[2]


@pytest.mark.thorough("test_no_more_than_two_gradients_are_held, test_the_pages_are_the_programs")
def test_memory_follows_the_law():
    """Of three sizes that differ only in layers: what is kept needlessly grows with them."""
    layers = 4, 16, 28
    sizes = [measured(("decoder", "--layers", str(count), "--width", "512")) for count in layers]
    assert not any(size["status"] for size in sizes)
    assert all(size["memory"] <= law(size) for size in sizes)
