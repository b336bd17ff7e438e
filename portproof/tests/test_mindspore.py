"""Models of MindSpore as port and as reference: judged against what PyTorch recorded, and recorded for PaddlePaddle.

MindSpore runs in a process of its own, with the interpreter MINDSPORE_PYTHON or this one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch

import portproof
from portproof.compare import FAIL, PASS

pytestmark = pytest.mark.thorough("few have MindSpore; test_judge_causes judges by recordings, too")
MINDSPORE = os.environ.get("MINDSPORE_PYTHON", sys.executable)
TESTS = Path(__file__).parent


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Conv2d(8, 4, 1), torch.nn.Conv2d(4, 8, 1)
        self.relu, self.gate = torch.nn.ReLU(), torch.nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.fc2(self.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        norm = nn.BatchNorm2d(8, eps=1e-3, momentum=0.01)
        grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4, bias=False)
        layers = nn.Conv2d(3, 8, 3, 2, 1, bias=False), norm, nn.Hardswish(), Gate(), grouped, nn.ReLU6()
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(11, 6), torch.nn.LayerNorm(6)
        self.act, self.last, self.aux = torch.nn.GELU(), torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        return (self.last(self.act(x)) + (self.aux(x) if self.training else 0)) * 0.1 - 0.7


class Upsampled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.act = (
            torch.nn.Conv2d(3, 4, 1),
            torch.nn.ConvTranspose2d(4, 2, 2, 2),
            torch.nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.up(self.first(x)))


class Hardsigmoid(paddle.nn.Layer):
    """Paddle's own layer has a slope of 0.1666667."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.hardsigmoid(x, slope=1 / 6)


class PaddleGate(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = paddle.nn.Conv2D(8, 4, 1), paddle.nn.Conv2D(4, 8, 1)
        self.relu, self.gate = paddle.nn.ReLU(), Hardsigmoid()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * self.gate(self.fc2(self.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


class PaddleNet(paddle.nn.Layer):
    def __init__(self, epsilon: float = 1e-3) -> None:
        super().__init__()
        nn = paddle.nn
        conv = nn.Conv2D(3, 8, 3, 2, 1, bias_attr=False)
        grouped = nn.Conv2D(8, 8, 3, padding=2, dilation=2, groups=4, bias_attr=False)
        norm = nn.BatchNorm2D(8, momentum=0.99, epsilon=epsilon)
        self.features = nn.Sequential(conv, norm, nn.Hardswish(), PaddleGate(), grouped, nn.ReLU6())
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What toy_mindspore.py left: found.json, and recordings of MindSpore's Net."""
    if sys.executable == MINDSPORE and importlib.util.find_spec("mindspore") is None:
        reason = "MindSpore is not installed: pip install mindspore, or name its Python in MINDSPORE_PYTHON"
        pytest.fail(reason) if os.environ.get("MINDSPORE_REQUIRED") else pytest.skip(reason)
    folder, rng = tmp_path_factory.mktemp("mindspore"), np.random.default_rng(0)
    images, ids = rng.normal(size=(4, 3, 12, 10)).astype(np.float32), rng.integers(0, 11, (4, 5))
    np.save(folder / "images.npy", images)
    torch.manual_seed(0)
    for model, x in ((Net, images), (Encoder, ids), (Upsampled, images)):
        portproof.record(model(), [x]).save(folder / f"{model.__name__}.ref.safetensors")
    run_mindspore(TESTS / "toy_mindspore.py", folder)
    return folder


def run_mindspore(*args: object, status: int = 0) -> str:
    paths = [str(TESTS), str(Path(portproof.__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [MINDSPORE, "-W", "ignore", *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(folder) -> dict:
    return json.loads((folder / "found.json").read_text())


def test_faithful_ports_are_aligned_in_both_precisions(found):
    for name in ("Net", "Encoder"):
        assert found[name]["status"] == PASS, found[name]
        assert {"float32", "float64"} <= set(found[name]["dtypes"])
    told = "in the float64 run composed of other operations"
    assert any(note.startswith(told) and "BatchNorm, Conv2D, ReLU6" in note for note in found["Net"]["notes"])
    assert all(each["as it was"] for name, each in found.items() if name != "refused")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Net epsilon", ["features.1", "forward"]),
        ("Net momentum", ["features.1", "buffers"]),
        ("Net activation", ["features.2", "forward"]),
        ("Net no gradient", ["features.3", "backward"]),
        ("Net dilation", ["features.4", "forward"]),
        ("Encoder tanh", ["act", "forward"]),
        ("Upsampled act", ["act", "forward"]),
    ],
)
def test_one_fault_is_located(found, name, place):
    assert (found[name]["status"], found[name]["location"]) == (FAIL, place)


def test_what_has_no_float64_kernel_is_judged_in_float32_alone_and_that_is_said(found):
    assert found["Upsampled"]["status"] == PASS, found["Upsampled"]
    assert "float64" not in found["Upsampled"]["dtypes"]
    for mode in ("eval", "train"):
        told = f"no kernel in float64 for Conv2DTranspose: {mode} mode was not run in float64"
        assert any(told in note for note in found["Upsampled"]["notes"])
    assert "judge the port in float32" in found["refused"]


def test_with_which_probability_dropout_drops(folder):
    """Its layers are told what to drop, or what to keep."""
    layers = "nn.Dropout(p=0.1), nn.Dropout(0.9), nn.Dropout2d(0.1), nn.ReLU()"
    code = (
        "from mindspore import nn; from portproof.backends.mindspore_backend import BACKEND; "
        f"print([BACKEND.runs.dropout_probability(layer) for layer in ({layers})])"
    )
    assert run_mindspore("-c", code).splitlines()[-1] == "[0.1, 0.1, 0.1, 0.0]"


def test_what_dropout_would_drop_is_noted(folder):
    """By values and by channels, in layers and functions; the input stays."""
    code = (
        "from portproof.backends.mindspore_backend import BACKEND; from mindspore import Tensor, nn, ops; "
        "import numpy as np; x = Tensor(np.ones((2, 3, 4, 5), np.float32)); noted = []; "
        "calls = nn.Dropout(p=0.1).set_train(), nn.Dropout2d(0.2).set_train(), lambda x: ops.dropout(x, 0.3)\n"
        "with BACKEND.runs.lent_dropout(lambda p, shape: noted.append((round(p, 6), tuple(shape)))): "
        "same = [bool((call(x) == x).all()) for call in calls]\n"
        "print(same, noted)"
    )
    whole = "(2, 3, 4, 5)"
    noted = f"[(0.1, {whole}), (0.2, (2, 3)), (0.3, {whole})]"
    assert run_mindspore("-c", code).splitlines()[-1] == f"[True, True, True] {noted}"


@pytest.mark.parametrize("weights", ["probe", "reference"])
def test_what_mindspore_recorded_paddle_is_judged_by(folder, weights):
    recording = folder / f"own_{weights}.ref.safetensors"
    judged = portproof.judge(PaddleNet(), recording, modes=("eval",))
    assert judged.status == PASS, judged
    assert judged.notes[0].startswith("recorded with mindspore 2.")
    assert any("not watched, the reference is not in PyTorch" in note for note in judged.notes)
    judged = portproof.judge(PaddleNet(epsilon=1e-5), recording, modes=("eval",))
    assert (judged.status, judged.location.name) == (FAIL, "features.1")
    judged = portproof.judge(PaddleNet(), recording, modes=("train",))
    assert [row.name for row in judged.rows if row.status == FAIL and row.item.kind != "buffer"] == []
    assert (judged.location.name, judged.location.phase) == ("features.1", "buffers")  # Paddle's variance is biased


def test_the_commands(folder):
    """Without PyTorch's module imported: `record` draws the inputs and the weights."""
    path = folder / "command.ref.safetensors"
    record = ("-m", "portproof", "record", "--ref", "toy_mindspore:Net", "--input", "2,3,16,16", "--mode", "eval")
    assert "wrote" in run_mindspore(*record, "--output", path)
    assert portproof.judge(PaddleNet(), path).status == PASS
    judge = ("-m", "portproof", "judge", "--mode", "eval")
    assert "PASS judge" in run_mindspore(*judge, "--port", "toy_mindspore:Net", path)
    told = run_mindspore(*judge, "--port", "toy_mindspore:Net(fault='activation')", path, status=1)
    assert "located: features.2 (Hardswish), the port's features.2 (ReLU)" in told
