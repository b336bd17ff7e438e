"""maintenance/benchmarks/benchmark.py runs every part, and its ratios and bounds mean what they say."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
from markdown_pages import ROOT, assert_same_content

from maintenance.benchmarks import engines, proof_speed, speed
from maintenance.benchmarks.speed import Contest, Result, measure
from sturdyio.cli import UserError

SCRIPT = ROOT / "maintenance" / "benchmarks" / "benchmark.py"
SMALL = ["--model", "mobilenet_v3_small", "--batch-size", "2", "--image-size", "33", "--loader-images", "5"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The number of threads that the tool sets for its process does not outlive a test."""
    with mock.patch.dict(os.environ):
        yield


class Clock:
    """Time that passes only as `spend` says, on however busy a machine; `calls` are the times spent."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = []

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.calls.append(seconds)

    def contest(self, ours: float, theirs: float) -> Contest:
        """Of two sides that take so many seconds."""
        return Contest("train", "it", "them", lambda: self.spend(ours), lambda: self.spend(theirs), 0.98, 4)


@pytest.mark.parametrize(("ours", "theirs", "ratio"), [(0.25, 0.75, 3.0), (0.75, 0.25, 1 / 3)])
def test_above_one_ours_is_the_faster(ours, theirs, ratio):
    clock = Clock()
    result = measure(clock.contest(ours, theirs), 3, clock, 0.0)
    assert result.ratios == [ratio] * 3
    assert result.met == (ratio > 1)
    assert (result.ours, result.theirs) == (ours, theirs)


class SlowerClock(Clock):
    """Where each two runs after the first three take twice as long as the two before."""

    def spend(self, seconds: float) -> None:
        super().spend(seconds)
        self.now += seconds * (2.0 ** ((len(self.calls) - 4) // 2) - 1)


def test_a_drift_of_the_machine_leaves_the_ratio_alone():
    """Ours always takes 10 % longer than theirs."""
    clock = SlowerClock()
    assert measure(clock.contest(1.1, 1.0), 5, clock, 0.0).ratio == pytest.approx(1 / 1.1)
    assert clock.calls[3:7] == [1.0, 1.1, 1.1, 1.0]  # and who is first changes


def of_rounds(ratios: list[float]) -> Result:
    return Result("train", "it", "them", 1.0, 1.0, ratios, 0.98, 4)


@pytest.mark.parametrize(("rounds", "place"), [(1, 1), (5, 1), (6, 1), (13, 3), (20, 6), (100, 40)])
def test_the_interval_is_that_of_the_sign_test(rounds, place):
    """The places are those of the tables, such as Conover's, Practical Nonparametric Statistics, for 95 %."""
    ratios = [float(number) for number in range(1, rounds + 1)]
    assert of_rounds(ratios[::-1]).interval == (place, rounds + 1 - place)


def test_the_interval_holds_the_median_as_often_as_it_says():
    """Of ratios that are distributed as lopsidedly as those of times that something disturbs now and then."""
    rng, median = np.random.default_rng(0), np.log(2)
    intervals = [of_rounds(list(rng.exponential(size=13))).interval for _ in range(2000)]
    assert 0.96 < np.mean([low <= median <= high for low, high in intervals]) < 0.99  # 97.8 %: 3 of 13 is the next


def test_a_bound_is_missed_if_the_rounds_leave_no_doubt():
    assert of_rounds([0.95] * 10 + [0.99] * 3).met  # a median of 0.95, but the eleventh of thirteen is 0.99
    assert not of_rounds([0.95] * 11 + [0.99] * 2).met


def test_short_work_is_repeated():
    clock = Clock()
    measure(clock.contest(0.25, 0.25), 1, clock, 1.1)
    assert len(clock.calls) == 2 + 1 + 2 * 5  # once each, once to see how long it takes, and five fill 1.1 s


def test_cpu_time_is_not_spent_by_waiting():
    start = speed.cpu_time()
    time.sleep(0.1)
    waited = speed.cpu_time() - start
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert waited < 0.05
    assert speed.cpu_time() - start > waited + 0.01  # the child's


def test_bounds_decide_only_with_check(tool, tmp_path, monkeypatch, capsys):
    about = {"device": "d", "threads": 1, "batch_size": 2, "image_size": 3, "clock": "wall", "rounds": 1}
    about |= {"loader_images": 5, "proof_rounds": 3, "versions": {"torch": "2"}}
    monkeypatch.setattr(tool, "setting", lambda args: about)
    monkeypatch.setattr(tool, "DOCS", tmp_path)
    paths = {language: tmp_path / language / "benchmark.md" for language in ("en", "zh")}
    for path in paths.values():
        path.parent.mkdir()
    results = iter([])
    monkeypatch.setattr(tool, "contests", lambda args: iter([None, None]))
    monkeypatch.setattr(speed, "measure", lambda *_: next(results))
    fast = Result("train", "port, small", "paddle", 1.0, 1.0, [0.97, 0.975, 0.98], 0.98, 32)
    slow = Result("parts", "our RMSprop", "Paddle's", 0.004, 0.001, [0.25], 0.667, 0)

    def ended(*flags: str, found: list[Result]) -> int:
        nonlocal results
        results = iter(found)
        words = ["--only", "train", "parts", "--output-dir", str(tmp_path), *flags]
        return tool.main(tool.get_args_parser().parse_args(words))

    assert ended("--check", found=[fast, fast]) == 0
    assert not any(path.exists() for path in paths.values())
    assert ended(found=[fast, slow]) == 0
    assert ended("--check", "--write-docs", found=[fast, slow]) == 1
    assert capsys.readouterr().out.endswith("SLOW benchmark: 1 of 2 ratios miss their bounds\n")
    page = paths["en"].read_text(encoding="utf-8")
    assert "| port, small | `paddle` | 32.0 images/s | 32.0 images/s | 0.975 [0.970, 0.980] | 0.980 | yes |" in page
    assert "| our RMSprop | `Paddle's` | 4.00 ms | 1.00 ms | 0.250 [0.250, 0.250] | 0.667 | **no** |" in page
    row = "| 移植版，small | `paddle` | 32.0 张/秒 | 32.0 张/秒 | 0.975 [0.970, 0.980] | 0.980 | 是 |"
    assert row in paths["zh"].read_text(encoding="utf-8")
    assert_same_content(*map(str, paths.values()))
    assert [r["met"] for r in json.loads((tmp_path / "benchmark.json").read_text())["results"]] == [True, False]


@pytest.mark.thorough("test_a_slow_model_is_seen, test_bounds_decide_only_with_check")
def test_every_part_runs(tmp_path):
    words = ["--only", "loader", "forward", "train", "parts", "layout", "--rounds", "1", "--turn", "0"]
    command = [sys.executable, str(SCRIPT), *SMALL, *words, "--output-dir", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "benchmark.json").read_text())
    results = record["results"]
    assert [result["part"] for result in results] == [
        *["loader"] * 6, "forward", "train", *["parts"] * 3, *["layout"] * 2, "forward", "train", *["layout"] * 2
    ]  # fmt: skip
    assert all(result["ours"] > 0 and result["theirs"] > 0 for result in results)
    assert record["versions"].keys() == {"torch", "torchvision", "paddle"}
    assert f"{len(results)} ratios miss their bounds" in ran.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--data-path", "nowhere"], "data folder nowhere/train does not exist"),
        (["--device", "gpu", "--clock", "cpu"], "--clock cpu does not see what a card does"),
        (["--rounds", "0"], "argument --rounds"),
    ],
)
def test_mistakes_are_one_line(flags, reason, tmp_path):
    command = [sys.executable, str(SCRIPT), *flags]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert reason in ran.stderr


def test_the_fastest_engine_alone_has_a_bound():
    """0.9 of torchvision's speed is too little for the fastest, 0.4 enough for Paddle Inference."""
    seconds = {engines.THEIRS: 1.0, "onnxruntime": 1.0, engines.PADDLES: 2.5}
    for fastest, is_met in ((1.0, True), (1 / 0.9, False)):
        found = {name: np.full((6, 1), each) for name, each in (seconds | {"onnxruntime": fastest}).items()}
        rows = {row.name: row for row in engines.results(found, ["onnxruntime", engines.PADDLES], 1, 0.0)}
        assert {name for name, row in rows.items() if not row.met} == (set() if is_met else {"best: onnxruntime"})
        assert round(rows[engines.PADDLES].ratio, 2) == 0.4


def test_a_proof_is_compared_with_both(monkeypatch):
    """The figures of its processes, of which the second round's are twice as large."""
    calls = []

    def in_a_process(words: list[str]) -> tuple[str, float]:
        calls.append(words[-2:])
        scale = 1 + (len(calls) > 6)
        walls = {"align": 6.0, "align_float32": 4.0, "padiff": 2.0, "passes": 1.0, "padiff_again": 1.5}
        wall = walls.get(words[-2], 1.0)
        memory = 1.0 if words[-2] == "reference" else 3.0
        return f"a line\n{json.dumps({'wall': wall * scale, 'cpu': 9.0, 'memory': memory * scale})}\n", 7.0

    monkeypatch.setattr(proof_speed, "in_a_process", in_a_process)
    found = {(r.name.removeprefix("vgg16, "), r.theirs_name): r for r in proof_speed.proofs("vgg16", 2, "wall")}
    against_padiff = "padiff", "align_float32", "padiff_again", "passes"
    assert calls == [[work, "vgg16"] for work in ("align", "reference", *against_padiff)] * 2
    assert found["align's own passes in float32, time", "PaDiff"].met
    reference = "its reference's passes"
    assert {key: round(result.ratio, 3) for key, result in found.items()} == {
        ("align, memory", reference): 0.333,
        ("align's own passes in float32, time", "PaDiff"): 1.5,
        ("align in float32 alone, time", "PaDiff"): 0.5,
        ("align, time", "PaDiff"): 0.333,
        ("align, memory", "PaDiff"): 1.0,
    }
    whole, memory = found["align, time", "PaDiff"], found["align, memory", reference]
    assert (whole.ours, whole.theirs, whole.unit, whole.met) == (9.0, 3.0, "s", True)
    assert (memory.ours, memory.theirs, memory.unit, memory.met) == (4.5, 1.5, "GiB", False)


@pytest.mark.parametrize(("language", "second"), [("en", "s"), ("zh", "秒")])
def test_the_page_on_the_project_has_the_figures_of_the_page_on_speed(language, second):
    """Of both models what align takes, time before memory."""
    page = (ROOT / "docs" / language / "benchmark.md").read_text(encoding="utf-8")
    project = (ROOT / "docs" / language / "project.md").read_text(encoding="utf-8")
    (said,) = (text for text in project.split("\n\n") if "(benchmark.md)" in text)
    cell = rf"(\d+\.\d\d) ({second}|GiB)"
    for model in ("resnet18", "vgg16"):
        rows = [
            line for line in page.splitlines() if re.match(rf"\| {model}[,，] ?align[,，]", line) and "PaDiff" in line
        ]
        in_page = [re.search(cell, row)[0] for row in rows]
        assert len(in_page) == 2 and re.findall(cell, " ".join(said.split()).rpartition(model)[2])[:2] == [
            tuple(figure.split()) for figure in in_page
        ]


@pytest.mark.parametrize("is_equal", [True, False])
def test_padiff_compares_all_or_nothing_is_measured(monkeypatch, is_equal):
    """Without dropout, whose masks differ, and by tolerances at which two frameworks' float32 can agree."""
    import paddle
    import torch

    ref, port = torch.nn.Sequential(torch.nn.Dropout()), paddle.nn.Sequential(paddle.nn.Dropout())
    calls = []

    def auto_diff(port, ref, inputs, auto_weights, options):
        calls.append((ref.training, port.training, ref[0].training, port[0].training, options))
        return is_equal

    monkeypatch.setitem(sys.modules, "padiff", mock.Mock(auto_diff=auto_diff))
    x = np.zeros((1, 2), np.float32)
    if is_equal:
        proof_speed.padiff(ref, port, x)
        limits = {"rtol": 2**-4, "atol": 2**-20}
        assert calls == [(False, False, False, False, limits), (True, True, False, False, limits)]
    else:
        with pytest.raises(UserError, match="padiff==0.2.0 fails"):
            proof_speed.padiff(ref, port, x)


def test_without_padiff(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install padiff=="):
        proof_speed.check_padiff()


@pytest.mark.thorough("test_a_proof_is_compared_with_both")
def test_what_a_proof_costs():
    works = "align_float32", "reference", "passes"  # those that need no PaDiff; the whole of align takes twice as long
    printed = {work: proof_speed.in_a_process(["-m", proof_speed.__name__, work, "squeezenet1_1"]) for work in works}
    found = {work: json.loads(text.splitlines()[-1]) for work, (text, _) in printed.items()}
    for what in ("cpu", "memory"):
        assert found["align_float32"][what] > found["reference"][what] > 0
    assert 0 < found["passes"]["cpu"] < found["align_float32"]["cpu"]
    assert all(seconds > found[work]["wall"] for work, (_, seconds) in printed.items())


class Timed:
    """What a framework's model does; each call takes so long by the clock `now`."""

    now = 0.0

    def __init__(self, model, seconds: float) -> None:
        self.model, self.seconds = model, seconds

    def __call__(self, *args):
        Timed.now += self.seconds
        return self.model(*args)

    def __getattr__(self, name: str):
        return getattr(self.model, name)


def test_a_slow_model_is_seen(monkeypatch):
    """Ours takes longer than the library's, by a clock that no other process disturbs."""
    entrant = speed.Entrant(speed.REF, "cpu", 2, 33)
    for name, seconds in (("own", 1.1), ("theirs", 1.0)):
        build = getattr(entrant, name)
        monkeypatch.setattr(entrant, name, lambda arch, build=build, seconds=seconds: Timed(build(arch), seconds))
    for ran in speed.model_contests(entrant, ["mobilenet_v3_small"], [None]):
        result = measure(ran, 3, lambda: Timed.now, 0.0)
        assert result.ratio == pytest.approx(1 / 1.1) and not result.met
