"""The page on the API shows every name that the kit exports, and all that is on it is there and says what it is."""

import inspect
import pydoc
import re
from pathlib import Path

import pytest

import portproof
from portproof import ladder

DOCS = Path(__file__).resolve().parents[1] / "docs"
SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_shows_every_exported_name(language):
    names = SHOWN.findall((DOCS / language / "api.md").read_text(encoding="utf-8"))
    shown = [pydoc.locate(name) for name in names]
    assert len(set(names)) == len(names)
    for package in (portproof, ladder):
        for name in package.__all__:
            assert any(getattr(package, name) is each for each in shown), f"{package.__name__}.{name} is not shown"
    assert [name for name, each in zip(names, shown, strict=True) if not inspect.getdoc(each)] == []
    assert {"portproof.pytest_plugin", "portproof.report.summary"} <= set(names)
