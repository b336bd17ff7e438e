"""MobileNetV3 small of MindSpore's layers, judged against a recording of the reference's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mobilenetv3_ref.models
import portproof

ROOT = Path(__file__).parents[1]
MINDSPORE = os.environ.get("MINDSPORE_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    if sys.executable == MINDSPORE and importlib.util.find_spec("mindspore") is None:
        reason = "MindSpore is not installed: pip install -e '.[mindspore]', or name its Python in MINDSPORE_PYTHON"
        pytest.fail(reason) if os.environ.get("MINDSPORE_REQUIRED") else pytest.skip(reason)
    images = np.random.default_rng(0).normal(size=(8, 3, 32, 32)).astype(np.float32)
    path = tmp_path_factory.mktemp("recorded") / "small.ref.safetensors"
    portproof.record(mobilenetv3_ref.models.mobilenet_v3_small(num_classes=1000), [images]).save(path)
    return path


def judged(recording: Path, port: str, *flags: str) -> tuple[int, str]:
    paths = os.pathsep.join(map(str, (ROOT / "tests", ROOT / "portproof" / "src", ROOT / "sturdyio" / "src")))
    environment = os.environ | {"PYTHONPATH": paths}
    command = [MINDSPORE, "-W", "ignore", "-m", "portproof", "judge", "--port", f"mobilenetv3_mindspore:{port}", *flags]
    done = subprocess.run([*command, recording], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.thorough("few have MindSpore; the kit's test_judge_causes judges by recordings, too")
def test_the_port_is_aligned_in_both_precisions(recording):
    """In the mode that the test below does not judge."""
    status, told = judged(recording, "MobileNetV3Small", "--mode", "train", "--verbose")
    assert status == 0, told
    for what in ("float64/gradient", "float64/buffer", "float32/output"):
        assert f"ok      train mode, {what}" in told


@pytest.mark.thorough("few have MindSpore; the kit's test_judge_causes judges by recordings, too")
def test_one_fault_is_named_first(recording):
    status, told = judged(recording, "with_fault", "--mode", "eval", "--precision", "float64")
    assert status == 1, told
    place = "features.7.block.1.1 (BatchNorm2d), the port's features.7.block.1.1 (BatchNorm2d)"
    assert f"located: {place}: forward" in told
    assert "also at fault" not in told
