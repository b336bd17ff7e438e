"""The study of library pairs: its pages say the same in both languages, and in Chinese all of it is Chinese."""

import re
from pathlib import Path

import pytest
from markdown_pages import ROOT, assert_same_content

from maintenance.studies.library_pairs import WORDS, Judged, page

BIASED = "buffers: the running variance is the biased one, sum / n (torch's is sum / (n - 1))"
FOUND = {
    "resnet18": Judged(
        "102", "by name, confirmed by values everywhere", [False, True], [f"bn1 (BatchNorm2d): {BIASED}"]
    ),
    "vgg11_bn": Judged("54", "by order, type and shape, confirmed by values up to layer 1 of 26", [False, False]),
    "mobilenet_v2": Judged(how="no map was found"),
}
VERSIONS = {"torch": "2.1", "torchvision": "0.16", "paddle": "3.3"}


@pytest.fixture
def written(tmp_path) -> dict[str, Path]:
    paths = {language: tmp_path / language / "library_pairs.md" for language in WORDS}
    for language, path in paths.items():
        path.parent.mkdir()
        path.write_text(page(FOUND, language, VERSIONS), encoding="utf-8")
    return paths


def test_pages_say_what_was_found(written):
    english, chinese = (path.read_text(encoding="utf-8") for path in written.values())
    assert "| `resnet18` | 102 | by name, confirmed by values everywhere | aligned | differs |" in english
    assert "| `resnet18` | 102 | 按名字，处处由数值证实 | 已对齐 | 有差异 |" in chinese
    assert "| `mobilenet_v2` |  | no map was found |  |  |" in english
    assert f"## resnet18\n\n- bn1 (BatchNorm2d): {BIASED}\n\n## vgg11_bn\n\n- No difference was found.\n" in english
    assert_same_content(*map(str, written.values()))


def test_the_chinese_page_has_no_english_sentence():
    text = (ROOT / "docs" / "zh" / "library_pairs.md").read_text(encoding="utf-8")
    words = re.sub(r"```.*?```|<!--.*?-->|`[^`]*`", "", text, flags=re.DOTALL)
    assert not re.search(r"\b(?:is|the|of|and|it|by)\b", words)
