"""docs/*/exported_faults.md has what the kit's tests ask for of each fault, and no other."""

import re

import pytest
from exported_models import need
from markdown_pages import ROOT

need("deploy", "onnx", "torch", "paddle")

from onnx_faults import CONVOLUTIONS, EXPORTERS, TABLE  # noqa: E402 - not before it is known that they are there

OF_NO_MODULE = {"en": "the model itself", "zh": "整个模型"}
NETWORK = {"en": ("convolutions", "transformer"), "zh": ("卷积网络", "transformer")}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_fault_is_a_row(language):
    page = (ROOT / "docs" / language / "exported_faults.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if len(row) == 4][2:]  # below the head
    kinds = {}
    for fault, (kind, network, place, said) in zip(TABLE, rows, strict=True):
        assert kinds.setdefault(fault.kind, kind) == kind and (language == "zh" or kind == fault.kind)
        assert network == NETWORK[language][fault.network != CONVOLUTIONS]
        assert place == (f"`{fault.place}`" if fault.place else OF_NO_MODULE[language])
        assert fault.cause in said
    assert len(set(kinds.values())) == len(kinds)
    counts = next(line for line in page.splitlines() if line.startswith("- "))
    assert re.findall(r"\d+", counts) == [str(n) for n in (len(TABLE), len(kinds), len(TABLE) * len(EXPORTERS))]
