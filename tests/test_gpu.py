"""What only a card takes: training, mixed precision, several cards, the ladder, checks without TF32.

The tests marked gpu run where there are cards and GPU builds of the framework, and say elsewhere what is missing:

    sh shell/test.sh -m gpu -rs
"""

import csv
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import torch
from test_train import SIDES, SMALL, write_images

import mobilenetv3_paddle.models
import portproof
from mobilenetv3_common.metrics import NAME, read_metrics
from portproof.backends import backend
from sturdyio.cli import UserError

ROOT = Path(__file__).parents[1]
DEVICES = ("cpu", "gpu")
LAUNCHERS = {
    "torch": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "mobilenetv3_ref.train"],
    "paddle": [
        *("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "log"),
        *(sys.executable, "-m", "mobilenetv3_paddle.train"),
    ],
}


@pytest.fixture(params=SIDES.values(), ids=SIDES.keys())
def side(request) -> SimpleNamespace:
    """Each package in turn."""
    return request.param


def cards(framework) -> int:
    """How many cards the framework sees."""
    if framework is torch:
        return torch.cuda.device_count()
    return paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0


def need_cards(framework, count: int = 1) -> None:
    """Skip the test where the framework sees fewer."""
    if cards(framework) < count:
        build = "" if framework is torch or paddle.is_compiled_with_cuda() else ", and is a build for the CPU"
        pytest.skip(f"{framework.__name__} sees {cards(framework)} card(s), needs {count}{build}")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """12 training and 6 validation images in 3 classes."""
    return write_images(tmp_path_factory.mktemp("data"))


def run(*arguments: str | Path, folder: Path) -> str:
    """The output of Python with these arguments in `folder`, in a process of its own, which must end well."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained(side: SimpleNamespace, data: Path, folder: Path, *flags: str) -> list[float]:
    """The losses of an epoch of training and of its evaluation; with float32 sums and no draws."""
    settings = (*SMALL.split(), "--lr", "0.001", "--dropout", "0", "--print-freq", "1", "--shared-init")
    run(
        *("-m", f"{side.package.__name__}.train", *settings, "--data-path", data, "--output-dir", folder / "out"),
        *flags,
        folder=folder,
    )
    return [line["loss"] for line in read_metrics(folder / "out" / NAME) if "loss" in line]


@pytest.mark.gpu
def test_a_card_trains_as_the_cpu_does(side, data, tmp_path):
    """To a share that TF32's 10 bits leave, and what three steps make of it."""
    need_cards(side.framework)
    (tmp_path / "cpu").mkdir()
    on_cpu, on_card = trained(side, data, tmp_path / "cpu"), trained(side, data, tmp_path, "--device", "gpu")
    assert len(on_card) == len(on_cpu) == 3  # two log lines and the evaluation
    assert np.allclose(on_card, on_cpu, rtol=0.02, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_on_a_card(side, data, tmp_path, dtype):
    """With the scaler for float16: near what float32 gives, and not the same."""
    need_cards(side.framework)
    (tmp_path / "full").mkdir()
    full = trained(side, data, tmp_path / "full", "--device", "gpu")
    mixed = trained(side, data, tmp_path, "--device", "gpu", "--amp", dtype)
    assert mixed != full
    assert np.allclose(mixed, full, rtol=0.1, atol=0)


@pytest.mark.gpu
def test_two_cards_train_as_one_over_nccl(side, data, tmp_path):
    """Synchronized batch norm: two processes with two images each are one with four."""
    need_cards(side.framework, 2)
    (tmp_path / "one").mkdir()
    one = trained(side, data, tmp_path / "one", "--device", "gpu")
    flags = (*SMALL.split(), "--lr", "0.001", "--dropout", "0", "--print-freq", "1", "--shared-init", "--sync-bn")
    more = ("--batch-size", "2", "--device", "gpu", "--data-path", data, "--output-dir", "out")
    run(*LAUNCHERS[side.framework.__name__], *flags, *more, folder=tmp_path)
    two = [line["loss"] for line in read_metrics(tmp_path / "out" / NAME) if "loss" in line]
    assert np.allclose(two[-1], one[-1], rtol=0.02, atol=0)  # of the evaluation; each log line is one process's own


PRECISION = """
import sys
import numpy as np
from portproof.backends import backend
own = backend(sys.argv[1])
device = own.device("gpu")
rng = np.random.default_rng(0)
a, b, image, kernel = (rng.normal(size=size) for size in ((256, 512), (512, 256), (4, 64, 16, 16), (64, 64, 3, 3)))
def both(dtype):
    x, y, i, k = (own.tensor(array.astype(dtype), device) for array in (a, b, image, kernel))
    results = x @ y, own.framework.nn.functional.conv2d(i, k)
    return [own.to_array(result).astype("float64") for result in results]
print(*(np.abs(s - d).max() / np.abs(d).max() for s, d in zip(both("float32"), both("float64"))))
"""


@pytest.mark.gpu
def test_checks_on_a_card_have_no_tf32(side, tmp_path):
    """Its products have 2^-11; float32's sums of 576 terms stay below 1e-5 of the largest value."""
    need_cards(side.framework)
    errors = run("-c", PRECISION, side.framework.__name__, folder=tmp_path).split()[-2:]
    assert max(map(float, errors)) < 1e-5


@pytest.mark.gpu
def test_the_ladder_on_a_card(tmp_path):
    """The rungs that do not train; --device gpu takes both frameworks there."""
    for framework in (torch, paddle):
        need_cards(framework)
    rungs = ("01_test_forward", "02_test_data", "03_test_metric", "04_test_loss", "05_test_backward", "06_test_init")
    flags = ("--device", "gpu", "--model", "mobilenet_v3_small", "--output-dir", tmp_path)
    assert "PASS ladder" in run(ROOT / "steps" / "run_all.py", *flags, "--rungs", *rungs, folder=tmp_path)


RECORD = """
import sys
import numpy as np
import portproof
from mobilenetv3_ref.models import mobilenet_v3_small
images = np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype("float32")
portproof.record(mobilenet_v3_small(num_classes=10), [images], device="gpu").save(sys.argv[1])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("epsilon, status", [(1e-3, "PASS"), (2e-3, "FAIL")])
def test_a_recording_from_a_card_judges_a_port_on_the_cpu(tmp_path, epsilon, status):
    need_cards(torch)
    run("-c", RECORD, tmp_path / "net.ref.safetensors", folder=tmp_path)
    port = mobilenetv3_paddle.models.mobilenet_v3_small(num_classes=10)
    norms = [layer for layer in port.sublayers() if isinstance(layer, paddle.nn.BatchNorm2D)]
    norms[3]._epsilon = epsilon
    verdict = portproof.judge(port, tmp_path / "net.ref.safetensors")
    assert str(verdict).splitlines()[-1].startswith(status)
    assert status == "PASS" or "epsilon is 0.002, not 0.001" in str(verdict)


@pytest.mark.gpu
def test_predictions_on_a_card(side, tmp_path, monkeypatch):
    need_cards(side.framework)
    flags = ("--framework", side.framework.__name__, "--weights", tmp_path / "probe.pth", "--input", "lite_data/val")
    make = ROOT / "tools" / "make_probe_weights.py"
    run(make, "--model", "mobilenet_v3_small", "--seed", "0", tmp_path / "probe.pth", folder=ROOT)
    if side.framework is paddle:
        convert = ("--from", "torch", "--to", "paddle", "--model", "mobilenet_v3_small")
        run(
            ROOT / "tools" / "convert_weights.py",
            *convert,
            tmp_path / "probe.pth",
            tmp_path / "p.pdparams",
            folder=ROOT,
        )
        flags = (*flags[:3], tmp_path / "p.pdparams", *flags[4:])
    predict = ROOT / "tools" / "predict.py"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    flags = (*flags, "--format", "csv", "--device")
    on_cpu, on_card = (
        list(csv.DictReader(run(predict, *flags, device, folder=ROOT).splitlines())) for device in DEVICES
    )
    assert [(row["path"], row["class_id"]) for row in on_cpu] == [(row["path"], row["class_id"]) for row in on_card]
    of_cpu, of_card = ([float(row["probability"]) for row in rows] for rows in (on_cpu, on_card))
    assert np.allclose(of_cpu, of_card, rtol=1e-3, atol=0)  # TF32 would be up to 0.02 off; without it 4 digits agree


def test_a_process_takes_the_card_that_its_launcher_says(side, monkeypatch):
    """Of two that the framework would see, counted from those that CUDA_VISIBLE_DEVICES leaves."""
    chosen = []
    if side.framework is torch:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        variable, expected = "LOCAL_RANK", torch.device("cuda", 1)
    else:
        monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(paddle, "set_device", chosen.append)
        variable, expected = "FLAGS_selected_gpus", "gpu:1"
    monkeypatch.setenv(variable, "1")
    _, local_rank, _ = side.package.train.distributed.launched_rank()
    assert side.package.device.select_device("gpu", local_rank) == expected
    assert chosen == [1 if side.framework is torch else "gpu:1"]
    with pytest.raises(UserError, match="process 2 has no card; start 2 processes"):
        side.package.device.select_device("gpu", 2)


def test_checks_ask_the_libraries_for_no_tf32(side, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    backend(side.framework.__name__).device("cpu")
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
