"""Toy models of MindSpore's layers; as a program, MindSpore's part of test_mindspore.py.

    python toy_mindspore.py FOLDER

judges the models below against FOLDER/NAME.ref.safetensors, records one, and writes what it found to found.json.
"""

import json
import sys
from pathlib import Path

import portproof
from portproof.backends import backend
from sturdyio.cli import UserError

backend("mindspore")  # before the first operation
import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import nn, ops  # noqa: E402


class Gate(nn.Cell):
    """Squeeze and excitation."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(8, 4, 1, has_bias=True), nn.Conv2d(4, 8, 1, has_bias=True)
        self.relu, self.gate, self.fault = nn.ReLU(), nn.HSigmoid(), fault

    def construct(self, x):
        scale = self.gate(self.fc2(self.relu(self.fc1(x.mean((2, 3), True)))))
        return x * (ops.stop_gradient(scale) if self.fault == "no gradient" else scale * 1.0)


class Net(nn.Cell):
    """Convolutions, with grouped and strided ones, batch norm, and linear layers, one of them square."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        eps, momentum = 1e-5 if fault == "epsilon" else 1e-3, 0.01 if fault == "momentum" else 0.99
        conv = nn.Conv2d(3, 8, 3, 2, pad_mode="pad", padding=1)
        norm = nn.BatchNorm2d(8, eps=eps, momentum=momentum)
        act = nn.ReLU() if fault == "activation" else nn.HSwish()
        grouped = nn.Conv2d(8, 8, 3, pad_mode="same", group=4, dilation=1 if fault == "dilation" else 2)
        self.features = nn.SequentialCell(conv, norm, act, Gate(fault), grouped, nn.ReLU6())
        self.classifier = nn.SequentialCell(nn.Dense(8, 8), nn.HSwish(), nn.Dropout(p=0.2), nn.Dense(8, 5))

    def construct(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class Encoder(nn.Cell):
    """Embedding, layer norm, and numbers in its own code."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 6), nn.LayerNorm((6,), epsilon=1e-5)
        self.aux = nn.Dense(6, 3)
        self.act, self.last, self.scale = nn.GELU(approximate=bool(fault)), nn.Dense(6, 3), 0.1

    def construct(self, ids):
        x = self.norm(self.table(ids))
        x = self.last(self.act(x)) + (self.aux(x) if self.training else 0.0)
        return x * self.scale - 0.7


class Upsampled(nn.Cell):
    """A transposed convolution, which has no float64 kernel."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1, has_bias=True)
        self.up = nn.Conv2dTranspose(4, 2, 2, 2, pad_mode="pad", has_bias=True)
        self.act = nn.HSigmoid() if fault else nn.Sigmoid()

    def construct(self, x):
        return self.act(self.up(self.first(x)))


FAULTS = {
    Net: ("epsilon", "momentum", "activation", "no gradient", "dilation"),
    Encoder: ("tanh",),
    Upsampled: ("act",),
}


def main(folder: Path) -> None:
    found = {}
    for model, faults in FAULTS.items():
        recording = folder / f"{model.__name__}.ref.safetensors"
        for fault in ("", *faults):
            net = model(fault)
            before = {name: value.asnumpy().tobytes() for name, value in net.parameters_dict().items()}
            how = {}
            if fault and model is not Upsampled:  # in one precision and mode, which saves time
                how = {"precisions": ("float64",), "modes": ("train" if fault == "momentum" else "eval",)}
            verdict = portproof.judge(net, recording, **how)
            location = verdict.location and [verdict.location.name, verdict.location.phase]
            dtypes = sorted({row.item.dtype for row in verdict.rows})
            after = {name: value.asnumpy().tobytes() for name, value in net.parameters_dict().items()}
            found[f"{model.__name__} {fault}".strip()] = {
                "status": verdict.status,
                "location": location,
                "dtypes": dtypes,
                "notes": verdict.notes,
                "as it was": before == after and all(p.dtype == ms.float32 for p in net.get_parameters()),
            }
    try:
        portproof.judge(Upsampled(), folder / "Upsampled.ref.safetensors", precisions=("float64",))
    except UserError as error:
        found["refused"] = str(error)
    x = np.load(folder / "images.npy")
    for weights in ("probe", "reference"):
        portproof.record(Net(), [x], weights=weights).save(folder / f"own_{weights}.ref.safetensors")
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
