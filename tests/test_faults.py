"""The rungs must fail: porting faults, each put into a scratch copy of the port, and the item that has to be named."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("mobilenetv3_paddle", "mobilenetv3_ref", "reprod", "steps", "lite_data")


@dataclass(frozen=True)
class Fault:
    name: str
    rung: str
    file: str  # in mobilenetv3_paddle/
    right: str
    wrong: str
    first: str  # a pattern for the first failing item


FAULTS = [
    Fault("epsilon", "01_test_forward", "models/mobilenet_v3.py", "epsilon=1e-3", "epsilon=1e-5", r"features\.0\.1"),
    Fault(
        "small epsilon",
        "01_test_forward",
        "models/mobilenet_v3.py",
        "epsilon=1e-3",
        "epsilon=1.0001e-3",
        r"features\.0\.1",
    ),
    Fault(
        "activation", "01_test_forward", "models/mobilenet_v3.py", "nn.Hardswish(),", "nn.Swish(),", r"classifier\.1"
    ),
    Fault(
        "hard-sigmoid slope",
        "01_test_forward",
        "models/layers.py",
        "F.relu6(x + 3) / 6",
        "F.hardsigmoid(x)",
        r"features\.1\.block\.1\.scale_activation",
    ),
    Fault(
        "a pretrained tensor",
        "01_test_forward",
        "models/weights.py",
        "model.set_state_dict(dict(arrays))",
        "model.set_state_dict({k: v if k != 'features.3.block.1.0.weight' else v * v.dtype.type(1.0001)"
        " for k, v in arrays.items()})",
        r"features\.3\.block\.1\.0",
    ),
    Fault(
        "momentum",
        "01_test_forward",
        "models/mobilenet_v3.py",
        "momentum=0.99",
        "momentum=0.01",
        r"features\.0\.1\.running_mean",
    ),
    Fault(
        "biased variance", "01_test_forward", "models/layers.py", " * (n / (n - 1))", "", r"features\.0\.1\.running_var"
    ),
    Fault(
        "a layer",
        "01_test_forward",
        "models/mobilenet_v3.py",
        "40, 5, 240, 40, True",
        "40, 5, 240, 40, False",
        "shape/",
    ),
    Fault(
        "resize filter",
        "02_test_data",
        "data/presets.py",
        "F.resize(image, self.resize_size)",
        "F.resize(image, self.resize_size, 'nearest')",
        r"val/n\d+_\w+\.JPEG",
    ),
    Fault("channel order", "02_test_data", "data/presets.py", "transpose(2, 0, 1)", "transpose(2, 0, 1)[::-1]", "val/"),
    Fault("flip", "02_test_data", "data/presets.py", "image = F.hflip(image)", "pass", r"train/n\d+_\w+\.JPEG"),
    Fault("a label", "02_test_data", "data/dataset.py", "), target", "), target + (index == 3)", r"val/.*JPEG label"),
    Fault("top-k", "03_test_metric", "train/engine.py", "target, [1, 5]", "target, [1, 4]", "top5"),
    Fault(
        "last batch",
        "03_test_metric",
        "train/engine.py",
        "    for batch in data_loader:",
        "    for batch in list(data_loader)[:-1]:",
        "top1|top5|samples",
    ),
    Fault("smoothing", "04_test_loss", "train/criterion.py", "/ num_classes", "/ (num_classes - 1)", "loss"),
    Fault(
        "schedule",
        "05_test_backward",
        "train/optimizer.py",
        "self.last_epoch % self.step_size",
        "(self.last_epoch + 1) % self.step_size",
        "lr, official",
    ),
    Fault(
        "weight decay",
        "05_test_backward",
        "train/optimizer.py",
        "weight_decay=weight_decay",
        "weight_decay=0.0",
        r"iteration 0/param/",
    ),
    Fault(
        "gradients kept",
        "05_test_backward",
        "train/engine.py",
        "    optimizer.clear_grad()\n",
        "",
        r"iteration 1/grad/",
    ),
]


def run_with(fault: Fault, folder: Path) -> subprocess.CompletedProcess:
    """The fault's rung, in a copy of the project that has the fault."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "mobilenetv3_paddle" / fault.file
    code = path.read_text(encoding="utf-8")
    assert fault.right in code, f"{fault.name}: the port no longer says {fault.right!r}"
    path.write_text(code.replace(fault.right, fault.wrong, 1), encoding="utf-8")
    command = [sys.executable, f"steps/{fault.rung}.py", "--output-dir", "out"]
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """Every selected fault's run, two at a time."""
    chosen = [item.callspec.params["fault"] for item in request.session.items if "results" in item.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_with, fault, tmp_path_factory.mktemp("scratch")) for fault in chosen]
        return {fault.name: run.result() for fault, run in zip(chosen, runs, strict=True)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_rung_fails_and_names_the_fault(results, fault):
    result = results[fault.name]
    assert result.returncode == 1, result.stdout[-2000:] + result.stderr[-2000:]
    last = result.stdout.splitlines()[-1]
    assert last.startswith(f"FAIL {fault.rung}: ")
    assert re.search(f"first ({fault.first})", last), last
    assert "first difference: " in result.stdout and "usual causes: " in result.stdout


def test_without_a_fault_every_rung_passes(tmp_path):
    command = [sys.executable, str(ROOT / "steps" / "run_all.py"), "--output-dir", str(tmp_path), "--seed", "1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "PASS ladder"
    for folder in (tmp_path, tmp_path / "mobilenet_v3_large"):
        for stem in ("forward", "data", "metric", "loss", "losses"):
            for side in ("ref", "paddle"):
                assert (folder / f"{stem}_{side}.npy").stat().st_size > 0
        for stem in ("forward", "data", "metric", "loss", "backward"):
            assert "PASS" in (folder / "log" / f"{stem}_diff.log").read_text()
