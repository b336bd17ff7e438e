"""maintenance/checks/other_processors.py: its settings change how sums are rounded, and what it says of a run is so."""

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "maintenance" / "checks" / "other_processors.py"
# A convolution and a product of matrices on each side, whose bits are all that is printed.
BITS = """
import hashlib, numpy as np, paddle, torch
x = np.random.default_rng(0).normal(size=(2, 64, 24, 24)).astype(np.float32)
w = np.random.default_rng(1).normal(size=(8, 64, 3, 3)).astype(np.float32)
results = [
    torch.nn.functional.conv2d(torch.tensor(x), torch.tensor(w)), torch.tensor(x).exp(),
    paddle.nn.functional.conv2d(paddle.to_tensor(x), paddle.to_tensor(w)),
    paddle.matmul(paddle.to_tensor(x), paddle.to_tensor(x), transpose_y=True),
]
print(*(hashlib.sha256(result.numpy().tobytes()).hexdigest()[:8] for result in results), torch.get_num_threads())
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("other_processors", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def other_processors(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.thorough("test_no_setting_keeps_what_another_sets, test_a_command_keeps_its_exit_status")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the settings choose instructions of x86")
def test_settings_change_the_bits_of_both_sides_or_the_threads(tool):
    env = tool.environment(None)  # this test itself may run under a setting
    commands = (
        [sys.executable, str(SCRIPT), "--setting", setting, "--", sys.executable, "-c", BITS]
        for setting in ("avx2", "sse", "threads")
    )
    avx2, sse, threads = (
        subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout.split()
        for command in commands
    )
    assert len(avx2) == len(sse) == 5
    assert sse[0] != avx2[0] or sse[1] != avx2[1]
    assert sse[2] != avx2[2] or sse[3] != avx2[3]
    assert (avx2[4], sse[4], threads[4]) == ("2", "1", "4")


def test_a_command_keeps_its_exit_status():
    assert other_processors("--setting", "avx2", "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--setting", "sse"], "--setting and a command belong together"),
        (["--", "true"], "--setting and a command belong together"),
        (["--setting", "sse", "--", "no-such-command"], "no-such-command cannot be run"),
        (["--setting", "arm", "--", "true"], "invalid choice: 'arm'"),
    ],
)
def test_a_mistake_is_one_line(flags, words):
    result = other_processors(*flags)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert words in result.stderr


def test_no_setting_keeps_what_another_sets(tool, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX512")
    assert "MKL_CBWR" not in tool.environment(None) and "MKL_CBWR" not in tool.environment("threads")
    assert tool.environment("sse")["MKL_CBWR"] == "COMPATIBLE"


def test_the_share_of_other_bits_is_that_of_the_values(tool):
    one = {"a": np.float32([1, 2, 3]), "b": np.float64([4]), "labels": np.array([1, 2]), "only here": np.float32([1])}
    other = {"a": np.float32([1, 2, 3.0000002]), "b": np.float64([4]), "labels": np.array([1, 3])}
    assert tool.other_bits(one, other) == 0.25


def test_the_worst_item_of_a_rung_is_named(tool):
    rows = [
        {"name": "exact", "difference": 0.0, "limit": 0.0},
        {"name": "near", "difference": 8e-13, "limit": 1e-12},
        {"name": "far", "difference": 1e-3, "limit": 1e-2},
        {"name": "missing", "difference": None, "limit": None},
        {"name": "not finite", "difference": "Infinity", "limit": 1e-12},
    ]
    rungs = [{"name": "01", "verdicts": [{"rows": rows[:2]}, {"rows": rows[2:]}]}, {"name": "02", "verdicts": []}]
    assert tool.worst_items({"rungs": rungs}) == {"01": (pytest.approx(0.8), "near")}
