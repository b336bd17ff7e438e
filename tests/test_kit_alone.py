"""The kit and sturdyio without the rest of the project: their wheels, built from a copy, prove and convert any pair."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from portproof.io.records import save_record

ROOT = Path(__file__).resolve().parents[1]
BLOCK = ROOT / "tests" / "kit_alone"  # in PYTHONPATH: nothing of the project but the kit and sturdyio is to be had
PACKAGES = ("portproof", "sturdyio")
PAIR = """
import paddle
import torch


class Ref(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 5)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))).mean((2, 3)))


class Port(paddle.nn.Layer):
    def __init__(self, epsilon=1e-5):
        super().__init__()
        self.one, self.two = paddle.nn.Conv2D(3, 4, 3), paddle.nn.BatchNorm2D(4, epsilon=epsilon)
        self.three = paddle.nn.Linear(4, 5)

    def forward(self, x):
        return self.three(paddle.nn.functional.relu(self.two(self.one(x))).mean((2, 3)))
"""
REPORT = """
from pathlib import Path
import numpy as np
from portproof.compare import compare
from portproof.ladder.rung import Rung
from portproof.report.page import write_page
from portproof.report.summary import LadderResult, RungResult
rung = Rung("forward", quiet=True)
rung.check(compare({"logits": np.ones(3)}, {"logits": np.ones(3)}, {"logits": 0.0}))
write_page(LadderResult([RungResult("forward", "net", 1.0, rung)]), Path("report.html"))
"""
MODELS = ("--ref", "a_pair:Ref", "--input", "4,3,8,8", "--port")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that holds the kit and sturdyio as their wheels install them."""
    root = tmp_path_factory.mktemp("kit")
    ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", ".pytest_cache", "tests")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=ignored)
    sources = [root / package for package in PACKAGES]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wheels, target = root / "wheels", root / "installed"
    for command in (
        ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", wheels, *sources],
        ["install", "--no-deps", "--no-index", "--find-links", wheels, "--target", target, *PACKAGES],
    ):
        done = subprocess.run([*pip, *command], cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for source in sources:
        shutil.rmtree(source)  # what is imported is not the sources
    return target


@pytest.fixture
def python(installed, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """python(*words) -> how an interpreter ended that finds the kit in `installed`, in a folder with the pair."""
    (tmp_path / "a_pair.py").write_text(PAIR, encoding="utf-8")
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(BLOCK), str(installed)])}

    def python(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-W", "ignore", *words]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

    return python


@pytest.mark.thorough("test_the_command_is_installed runs what the wheel has")
def test_it_is_the_wheels_and_nothing_else_of_the_project(python, installed):
    for package in PACKAGES:
        assert python("-c", f"import {package}; print({package}.__file__)").stdout.startswith(str(installed))
    for package in sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()):
        assert "ModuleNotFoundError" in python("-c", f"import {package}").stderr, package


@pytest.mark.thorough("test_the_command_is_installed, the kit's test_as_a_command")
def test_a_pair_is_proved_and_a_fault_located(python):
    result = python("-m", "portproof", "align", *MODELS, "a_pair:Port")
    # Paddle's running variance is the biased one, whoever ports.
    assert result.returncode == 1 and "located: norm (BatchNorm2d)" in result.stdout, result.stderr
    result = python("-m", "portproof", "align", *MODELS, "a_pair:Port", "--mode", "eval")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("PASS align: all ")
    result = python("-m", "portproof", "align", *MODELS, "a_pair:Port(epsilon=1e-3)", "--locate-only")
    assert result.returncode == 1 and "cause, tested: epsilon is 0.001, not 1e-05" in result.stdout, result.stderr


def test_the_wheels_have_the_licence_and_say_that_they_are_typed(installed):
    for package in PACKAGES:
        (metadata,) = installed.glob(f"{package}-*.dist-info")
        assert "\nLicense-Expression: Apache-2.0\n" in (metadata / "METADATA").read_text(encoding="utf-8")
        assert (metadata / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
        assert (installed / package / "py.typed").is_file()


def test_the_command_is_installed(python, installed):
    result = python(str(installed / "bin" / "portproof"), "--help")
    assert result.returncode == 0 and "\n  align " in result.stdout, result.stderr


def test_two_result_files_are_compared(python, tmp_path):
    arrays = {"logits": np.ones((2, 3), np.float32)}
    for name, factor in (("ref", 1), ("port", 1), ("wrong", 2)):
        save_record({key: factor * array for key, array in arrays.items()}, tmp_path / f"{name}.npy")
    for port, status in (("port.npy", 0), ("wrong.npy", 1)):
        result = python("-m", "portproof", "compare", "ref.npy", port, "--rtol", "1e-6")
        assert result.returncode == status, result.stderr


@pytest.mark.thorough("test_two_result_files_are_compared, the kit's test_convert.py")
def test_weights_are_converted_and_are_the_ports(python):
    saved = python("-c", "import a_pair, torch; torch.save(a_pair.Ref().state_dict(), 'a.pth')")
    assert saved.returncode == 0, saved.stderr
    files = ("--from", "torch", "--to", "paddle", "a.pth", "b.pdparams")
    result = python("-m", "portproof", "convert", *MODELS, "a_pair:Port", *files)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "wrote b.pdparams: 8 tensors"
    flags = ("--weights", "a.pth", "--port-weights", "b.pdparams", "--mode", "eval")
    result = python("-m", "portproof", "align", *MODELS, "a_pair:Port", *flags)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.thorough("test_two_result_files_are_compared, the kit's test_page_renders")
def test_the_report_is_written(python, tmp_path):
    result = python("-c", REPORT)
    assert result.returncode == 0, result.stderr
    assert "<h1" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("package", "above", "least"), [("portproof", (), 50), ("sturdyio", ("portproof",), 5)])
def test_neither_names_what_is_above_it(package, above, least):
    paths = [path for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".j2", ".toml", ".md", ".typed")]
    assert len(paths) > least
    for path in paths:
        text = path.read_text(encoding="utf-8")
        found = [word for word in ("mobilenetv3", "MobileNetV3", "lite_data", "parents[", *above) if word in text]
        assert not found, f"{path}: {found}"


def test_the_kits_wheel_asks_for_the_other(installed):
    needs = [line for path in installed.glob("portproof-*/METADATA") for line in path.read_text().splitlines()]
    assert "Requires-Dist: sturdyio==0.1.0" in needs
