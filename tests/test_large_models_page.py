"""Memory follows the law of docs/*/large_models.md, and the page is what the program writes of its figures."""

import pytest
from markdown_pages import ROOT, assert_same_content

from maintenance.benchmarks.large_models_page import LAW, MODELS, WORDS, law, measured, page

FOUND = {"status": 0, "weights": 1.0, "largest": 0.125, "saved": 0.25, "memory": 6.5, "seconds": 90.0, "cpu": 120.0}
ABOUT = {"machine": "x86_64", "cores": 2, "libraries": {"torch": "2.1", "paddle": "3.3"}}


def test_pages_say_what_was_found(tmp_path):
    paths = {language: tmp_path / f"{language}.md" for language in WORDS}
    for language, path in paths.items():
        path.write_text(page({"decoder, 4 layers of 512": FOUND}, ABOUT, language), encoding="utf-8")
    assert_same_content(*map(str, paths.values()))
    row = f"268.4 | 1.00 | 0.12 | 0.25 | 6.50 | {law(FOUND):.2f} | 1.5 | 2.0 |"
    assert f"| decoder, 4 layers of 512 | {row}" in paths["en"].read_text(encoding="utf-8")
    assert f"| decoder，4 层，宽 512 | {row}" in paths["zh"].read_text(encoding="utf-8")


@pytest.mark.parametrize("language", WORDS)
def test_the_page_keeps_the_law(language):
    """No model takes more than the law says, and the decoder of 0.4 billion weights at most 8.9 GiB and 20 minutes."""
    text = (ROOT / "docs" / language / "large_models.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line][2:]
    assert len(rows) == len(MODELS)
    for _, _, *cells in rows:
        *sizes, memory, limit, minutes, computing = map(float, cells)
        assert abs(law(dict(zip(LAW, sizes, strict=True))) - limit) < 0.1  # the cells are rounded
        assert memory <= min(limit, 8.9) and min(minutes, computing) < 20
    assert f"{' + '.join(f'{factor} * {name}' for name, factor in LAW.items())} + " in text


@pytest.mark.thorough("test_no_more_than_two_gradients_are_held, test_the_page_keeps_the_law")
def test_memory_follows_the_law():
    """Of three sizes that differ only in layers, where freed memory goes back: another copy of the weights is seen."""
    words = "decoder", "--width", "1024", "--words", "8000", "--returning"
    for layers in ("2", "4", "8"):
        found = measured((*words, "--layers", layers))
        assert found["status"] == 0
        assert found["memory"] <= law(found, kept=0), found
    assert found["memory"] + found["weights"] > law(found, kept=0), "the law would not see another copy"
