"""The fields that `portproof.report.summary` documents are those of the files that it writes."""

from __future__ import annotations

import re
from typing import Any

import paddle
import pytest
import torch
from made_up_results import strict
from toy_pairs import Port, Ref, normal

import portproof
from portproof.ladder import Rung, forward
from portproof.report import summary
from portproof.report.summary import LadderResult, RungResult, write_summary, write_verdicts

NESTED = ("location", "rows", "item", "worst")


def documented() -> dict[str, set[str]]:
    """{the name of an object: its keys}; "" is the file itself."""
    entries = re.findall(r"^    (\w+) +(.*(?:\n {18}.*)*)", summary.__doc__, re.MULTILINE)
    keys = {name: re.search(r"\{([\w,\s]+)\}", text) for name, text in entries}
    found = {name: set(re.split(r",\s+", match[1])) for name, match in keys.items() if match}
    return found | {"": {name for name, _ in entries if name not in NESTED}}


DOCUMENTED = documented()


def check_verdict(data: dict[str, Any]) -> None:
    assert set(data) == DOCUMENTED["verdicts"]
    locations = [data["location"]] if data["location"] else []
    for location in locations:
        assert set(location) == DOCUMENTED["location"]
        locations += location["also"]
    for row in data["rows"]:
        assert set(row) == DOCUMENTED["rows"] and set(row["item"]) == DOCUMENTED["item"]
        assert row["worst"] is None or set(row["worst"]) == DOCUMENTED["worst"]


def pair(activation: Any) -> tuple[Any, Any]:
    children = {"norm": paddle.nn.BatchNorm1D(5), "act": activation()}
    ref = Ref(lambda m, x: m.act(m.norm(x)), norm=torch.nn.BatchNorm1d(5), act=torch.nn.ReLU())
    return ref, Port(lambda m, x: m.act(m.norm(x)), **children)


KNOWN = ["norm.running_var: known"]
RUNS = {  # name: the port's activation, what is accepted, and the status
    "PASS": (paddle.nn.ReLU, KNOWN, {"modes": ["eval"]}),
    "FAIL": (paddle.nn.ReLU6, [], {}),
    "REFUSED": (paddle.nn.ReLU6, ["*"], {}),
    "accepted": (paddle.nn.ReLU, KNOWN, {}),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_documented_keys_are_those_of_the_files(run, tmp_path):
    activation, accept, options = RUNS[run]
    inputs = [20 * normal(6, 5)]
    verdict = portproof.align(*pair(activation), inputs, accept=accept, **options)
    rung = Rung("01_test_forward", quiet=True, accept=accept)
    forward(*pair(activation), inputs, rung=rung, **options)
    write_verdicts([verdict], "portproof align", {}, tmp_path / "align.json")
    write_summary(LadderResult([RungResult(rung.name, "net", 1.0, rung)]), tmp_path / "summary.json")
    of_align, of_ladder = strict(tmp_path / "align.json"), strict(tmp_path / "summary.json")
    assert set(of_align) | {"rungs", "left_out"} == set(of_ladder) | {"verdicts"} == DOCUMENTED[""]
    (told,) = of_ladder["rungs"]
    assert set(told) == DOCUMENTED["rungs"]
    for data in (*of_align["verdicts"], *told["verdicts"]):
        check_verdict(data)
    rows = [row for data in of_align["verdicts"] for row in data["rows"]]
    assert of_align["status"] == told["status"] == ("PASS" if run == "accepted" else run)
    assert (of_align["verdicts"][0]["location"] is not None) == (run == "FAIL")
    assert any(row["worst"] for row in rows) == (run != "PASS")
    assert any(row["reason"].startswith("accepted") for row in rows) == (run in ("REFUSED", "accepted"))
