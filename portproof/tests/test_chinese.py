"""The report in Chinese: no sentence of a failure's page is left in English, and no cause that can be named."""

from __future__ import annotations

import html
import re
from typing import Any

import paddle
import pytest
import torch
from test_diagnosis import IMAGES, LAYERS, ROWS, layer_of
from toy_pairs import Port, Ref

from portproof import align
from portproof.compare import FAIL, PASS, REFUSED, Verdict
from portproof.localize.layers import mistakes
from portproof.localize.mutations import MISTAKES, mutations
from portproof.report.chinese import LINES, in_chinese
from portproof.report.page import render_page
from portproof.report.summary import Findings, LadderResult, RungResult
from portproof.report.text import section_of

T, P = torch.nn, paddle.nn
ENGLISH = re.compile(r"\b[a-z']+(?: [a-z']+){2,}\b")  # three words in a row


def page_of(verdict: Verdict) -> str:
    found = Findings("portproof align", [verdict], [section_of])
    result = RungResult("portproof align", "a_port:Net", 1.0, found)
    return render_page(LadderResult([result]), "zh")


def seen(page: str) -> list[str]:
    """Its lines as a reader sees them, with the title, without drawings."""
    page = re.sub(r"<(style|svg).*?</\1>", "", page, flags=re.DOTALL)
    return [line.strip() for line in html.unescape(re.sub(r"<[^>]+>", "\n", page)).splitlines() if line.strip()]


def in_english(verdict: Verdict) -> list[str]:
    """Lines of the page with English words that are no item's name and no code."""
    left = []
    for line in seen(page_of(verdict)):
        words = line
        for row in verdict.rows:
            words = words.replace(row.name, "")
        if ENGLISH.search(words) and "raise ValueError(" not in line:
            left.append(line)
    return left


def raising(m: Any, x: Any) -> Any:
    raise ValueError("nothing")


PAIRS = {  # (the children of the reference, the port's, the code of both, the port's code if another)
    "cause": ({"act": T.ReLU()}, {"act": P.ReLU6()}, lambda m, x: m.act(9 * x)),
    "statistics": ({"norm": T.BatchNorm2d(4)}, {"norm": P.BatchNorm2D(4, momentum=0.1)}, lambda m, x: m.norm(x)),
    "line": ({"act": T.ReLU()}, {"act": P.ReLU()}, lambda m, x: m.act(x) + x, lambda m, x: m.act(x) - x),
    "structure": ({"conv": T.Conv2d(4, 2, 1)}, {"conv": P.Conv2D(4, 3, 1)}, lambda m, x: m.conv(x)),
    "raised": ({"act": T.ReLU()}, {"act": P.ReLU()}, lambda m, x: m.act(x), raising),
    "dropout": ({"drop": T.Dropout(0.1)}, {"drop": P.Dropout(0.3)}, lambda m, x: m.drop(x)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_no_sentence_of_a_failure_is_left_in_english(pair):
    children, port_children, code, *other = PAIRS[pair]
    verdict = align(Ref(code, **children), Port(other[0] if other else code, **port_children), [IMAGES])
    assert verdict.status == FAIL and verdict.location is not None, str(verdict)
    lines = seen(page_of(verdict))
    assert lines[0] == "FAIL – portproof align, a_port:Net" and "全部步骤" not in lines
    assert in_english(verdict) == []
    assert ("相等" in lines) == (pair == "statistics")
    if pair == "cause":
        assert "验证过的原因：它是 ReLU6，而不是 ReLU" in lines
        assert any(line.startswith("定位到：act（ReLU），移植版的 act（ReLU6）：前向") for line in lines)


@pytest.mark.parametrize("accept", [[], ["*"]])
def test_what_passes_and_what_is_refused(accept):
    code, act = (lambda m, x: m.act(9 * x)), P.ReLU6() if accept else P.ReLU()
    verdict = align(Ref(code, act=T.ReLU()), Port(code, act=act), [IMAGES], accept=accept)
    assert verdict.status == (REFUSED if accept else PASS)
    assert in_english(verdict) == []


def test_every_cause_is_known():
    modules = [T.Conv2d(4, 4, 3, 2, 1), T.ConvTranspose2d(4, 4, 3, 2, 1), T.AvgPool2d(3, 2, 1), T.MaxPool2d(3, 2, 1)]
    modules += [T.Embedding(9, 4, padding_idx=3), T.Upsample(scale_factor=2), T.MultiheadAttention(6, 2), T.LSTM(6, 4)]
    modules += [T.GRU(6, 4, bidirectional=True), T.RNN(6, 4)]
    assert all(any(isinstance(module, kinds) for module in modules) for kinds in MISTAKES)
    words = {text for module in modules for text, _ in mutations(module, [ROWS])}
    norms = [T.BatchNorm2d(4), T.BatchNorm2d(4).eval(), T.GroupNorm(2, 4), T.InstanceNorm2d(4, affine=True)]
    plain = [T.LayerNorm(6), T.RMSNorm(6), T.Linear(6, 6), T.Softmax(-1), T.Dropout(), T.LeakyReLU(), T.GELU()]
    for module in norms + plain:
        x = IMAGES if module in norms else ROWS
        with torch.no_grad():
            output = module(torch.from_numpy(x)).numpy()
        words |= {text for text, _ in mistakes(layer_of(module, x, output=output))}
    words |= {case[-1] for case in LAYERS.values()}
    assert len(words) > 150
    assert [text for text in words if ENGLISH.search(in_chinese(text)) or in_chinese(text) == text] == []


def test_names_stay_as_they_are():
    """Those of modules that are words of the page, too; and every number is there."""
    assert in_chinese("located: limit (Linear), the port's loss (Linear): forward") == (
        "定位到：limit（Linear），移植版的 loss（Linear）：前向"
    )
    assert in_chinese("what nobody has said: 1") == "what nobody has said: 1"
    for english, chinese in LINES.items():
        filled = re.sub(r"\{\w*\}", "{}", english).format(*(f"name{i}" for i in range(9)))
        said = in_chinese(filled)
        assert all(said.count(f"name{i}") == 1 for i in range(english.count("{"))) or "{known}" in english, filled
        assert re.search(r"[一-鿿]", chinese) or not ENGLISH.search(english), english
