"""maintenance/benchmark.py runs every part, and its ratios and bounds mean what they say."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from maintenance import speed
from maintenance.speed import Contest, Result, measure

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "maintenance" / "benchmark.py"
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


def contest(ours: float, theirs: float, bound: float = 0.98, images: int = 4) -> Contest:
    """Of two sides that take so many seconds."""
    return Contest("train", "it", "them", lambda: time.sleep(ours), lambda: time.sleep(theirs), bound, images)


@pytest.mark.parametrize(("ours", "theirs", "ratio"), [(0.02, 0.06, 3.0), (0.06, 0.02, 1 / 3)])
def test_above_one_ours_is_the_faster(ours, theirs, ratio):
    result = measure(contest(ours, theirs), 3, time.perf_counter, 0.0)
    assert result.ratio == pytest.approx(ratio, rel=0.3)
    assert result.met == (ratio > 1)
    assert (result.ours, result.theirs) == (pytest.approx(ours, rel=0.3), pytest.approx(theirs, rel=0.3))


def test_a_drift_of_the_machine_leaves_the_ratio_alone():
    """Each round takes twice as long as the last, and ours always 10 % longer than theirs."""
    now, calls = 0.0, []

    def takes(share: float) -> None:
        nonlocal now
        calls.append(share)
        now += share * 2.0 ** ((len(calls) - 4) // 2)

    ran = Contest("train", "it", "them", lambda: takes(1.1), lambda: takes(1.0), 0.98)
    assert measure(ran, 5, lambda: now, 0.0).ratio == pytest.approx(1 / 1.1)
    assert calls[3:7] == [1.0, 1.1, 1.1, 1.0]  # and who is first changes


def test_short_work_is_repeated():
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        time.sleep(0.01)

    measure(Contest("parts", "it", "them", tick, tick, 1.0), 1, time.perf_counter, 0.2)
    assert count >= 2 + 1 + 2 * 2


def test_cpu_time_is_not_spent_by_waiting():
    start = speed.cpu_time()
    time.sleep(0.1)
    waited = speed.cpu_time() - start
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert waited < 0.05
    assert speed.cpu_time() - start > waited + 0.01  # the child's


def test_bounds_decide_only_with_check(tool, tmp_path, monkeypatch, capsys):
    about = {"device": "d", "threads": 1, "batch_size": 2, "image_size": 3, "clock": "wall", "rounds": 1}
    monkeypatch.setattr(tool, "setting", lambda args: about | {"loader_images": 5, "versions": {"torch": "2"}})
    monkeypatch.setattr(tool, "DOCUMENT", tmp_path / "benchmark.md")
    results = iter([])
    monkeypatch.setattr(tool, "contests", lambda args: iter([None, None]))
    monkeypatch.setattr(speed, "measure", lambda *_: next(results))
    fast = Result("train", "port, small", "paddle", 1.0, 1.0, 0.98, 0.98, 32)
    slow = Result("parts", "our RMSprop", "Paddle's", 0.004, 0.001, 0.25, 0.667, 0)

    def ended(*flags: str, found: list[Result]) -> int:
        nonlocal results
        results = iter(found)
        return tool.main(tool.get_args_parser().parse_args(["--output-dir", str(tmp_path), *flags]))

    assert ended("--check", found=[fast, fast]) == 0
    assert not (tmp_path / "benchmark.md").exists()
    assert ended(found=[fast, slow]) == 0
    assert ended("--check", "--write-docs", found=[fast, slow]) == 1
    assert capsys.readouterr().out.endswith("SLOW benchmark: 1 of 2 ratios below their bounds\n")
    page = (tmp_path / "benchmark.md").read_text()
    assert "| port, small | `paddle` | 32.0 images/s | 32.0 images/s | 0.980 | 0.980 | yes |" in page
    assert "| our RMSprop | `Paddle's` | 4.00 ms | 1.00 ms | 0.250 | 0.667 | **no** |" in page
    assert [r["met"] for r in json.loads((tmp_path / "benchmark.json").read_text())["results"]] == [True, False]


@pytest.mark.thorough("test_a_slow_model_is_seen, test_bounds_decide_only_with_check")
def test_every_part_runs(tmp_path):
    command = [sys.executable, str(SCRIPT), *SMALL, "--rounds", "1", "--turn", "0", "--output-dir", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "benchmark.json").read_text())
    results = record["results"]
    assert [result["part"] for result in results] == [
        *["loader"] * 6, "forward", "train", *["parts"] * 3, "forward", "train"
    ]  # fmt: skip
    assert all(result["ours"] > 0 and result["theirs"] > 0 for result in results)
    assert record["versions"].keys() == {"torch", "torchvision", "paddle"}
    assert f"{len(results)} ratios below their bounds" in ran.stdout.splitlines()[-1]


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
