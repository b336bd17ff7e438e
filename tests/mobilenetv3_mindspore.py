"""MobileNetV3 small of MindSpore's layers; as a program, MindSpore's part of test_convert_mindspore.py.

    python mobilenetv3_mindspore.py FOLDER

reads small.ckpt and small.safetensors, images.npy, and for each layer LAYER.ckpt and LAYER.npy; writes what it read
and computed to results.npz, and checkpoints of its own: own.ckpt, sum.ckpt, types.ckpt, own.safetensors.
"""

import contextlib
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

with contextlib.suppress(SystemError, ImportError):  # NumPy 2: MindSpore 2.10.0 fails in its first operation only
    ops.add(Tensor(1.0), 1)

ROWS = [  # Table 2 of the paper: kernel, expanded, out, squeeze-and-excite, activation, stride
    (3, 16, 16, True, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 2),
    (3, 88, 24, False, nn.ReLU, 1),
    (5, 96, 40, True, nn.HSwish, 2),
    (5, 240, 40, True, nn.HSwish, 1),
    (5, 240, 40, True, nn.HSwish, 1),
    (5, 120, 48, True, nn.HSwish, 1),
    (5, 144, 48, True, nn.HSwish, 1),
    (5, 288, 96, True, nn.HSwish, 2),
    (5, 576, 96, True, nn.HSwish, 1),
    (5, 576, 96, True, nn.HSwish, 1),
]


def conv_norm(in_channels: int, out: int, activation=None, kernel: int = 1, stride: int = 1, group: int = 1) -> nn.Cell:
    conv = nn.Conv2d(in_channels, out, kernel, stride, pad_mode="pad", padding=kernel // 2, group=group)
    # MindSpore: momentum is the share of the old average, 1 - PyTorch's
    layers = [conv, nn.BatchNorm2d(out, eps=1e-3, momentum=0.99)]
    return nn.SequentialCell(*layers, *([activation()] if activation else []))


class SqueezeExcitation(nn.Cell):
    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = (channels // 4 + 4) // 8 * 8
        squeezed = max(8, squeezed + 8 * (squeezed < 0.9 * (channels // 4)))
        self.fc1 = nn.Conv2d(channels, squeezed, 1, has_bias=True)
        self.fc2 = nn.Conv2d(squeezed, channels, 1, has_bias=True)
        self.relu, self.gate = nn.ReLU(), nn.HSigmoid()

    def construct(self, x):
        return x * self.gate(self.fc2(self.relu(self.fc1(x.mean((2, 3), True)))))


class InvertedResidual(nn.Cell):
    def __init__(self, channels: int, row: tuple) -> None:
        super().__init__()
        kernel, expanded, out, use_se, activation, stride = row
        layers = [conv_norm(channels, expanded, activation)] if expanded != channels else []
        layers.append(conv_norm(expanded, expanded, activation, kernel, stride, group=expanded))
        layers += [SqueezeExcitation(expanded)] if use_se else []
        self.block = nn.SequentialCell(*layers, conv_norm(expanded, out))
        self.residual = stride == 1 and channels == out

    def construct(self, x):
        return self.block(x) + x if self.residual else self.block(x)


class MobileNetV3Small(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        channels = [16, *(row[2] for row in ROWS)]
        blocks = [InvertedResidual(*args) for args in zip(channels, ROWS, strict=False)]
        stem, head = conv_norm(3, 16, nn.HSwish, 3, 2), conv_norm(96, 576, nn.HSwish)
        self.features = nn.SequentialCell(stem, *blocks, head)
        self.classifier = nn.SequentialCell(nn.Dense(576, 1024), nn.HSwish(), nn.Dropout(p=0.2), nn.Dense(1024, 1000))

    def construct(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def with_fault() -> nn.Cell:
    """MobileNetV3 small with a wrong epsilon in its seventh block."""
    net = MobileNetV3Small()
    net.features[7].block[1][1] = nn.BatchNorm2d(120, eps=1e-5, momentum=0.99)
    return net


LAYERS = {  # the types of the table that MobileNetV3 lacks
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "LayerNorm": lambda: nn.LayerNorm((6,), epsilon=1e-5),
    "GroupNorm": lambda: nn.GroupNorm(3, 6),
    "Embedding": lambda: nn.Embedding(5, 4),
}


def load(net: nn.Cell, parameters: dict) -> nn.Cell:
    assert ms.load_param_into_net(net, parameters, strict_load=True) == ([], [])
    return net.set_train(False)


def main(folder: Path) -> None:
    read = ms.load_checkpoint(str(folder / "small.ckpt"))
    results = {f"read {name}": parameter.asnumpy() for name, parameter in read.items()}
    net = load(MobileNetV3Small(), ms.load_checkpoint(str(folder / "small.safetensors"), format="safetensors"))
    results |= {f"safetensors {name}": value.asnumpy() for name, value in net.parameters_dict().items()}
    net = load(MobileNetV3Small(), read)
    results["logits"] = net(Tensor(np.load(folder / "images.npy"))).asnumpy()

    for name, build in LAYERS.items():
        wrapped = nn.SequentialCell(build())  # its parameters are named 0.gamma and so on
        load(wrapped, ms.load_checkpoint(str(folder / f"{name}.ckpt")))
        results[name] = wrapped(Tensor(np.load(folder / f"{name}.npy"))).asnumpy()

    ms.save_checkpoint(net, str(folder / "own.ckpt"))
    ms.save_checkpoint(net, str(folder / "sum.ckpt"), crc_check=True)
    ms.save_checkpoint(net, str(folder / "own.safetensors"), format="safetensors")
    types = [np.dtype(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")]
    arrays = {dtype.name: np.arange(6).reshape(1, 2, 3).astype(dtype) for dtype in types}
    arrays["number"] = np.float32(0.1)
    ms.save_checkpoint([{"name": n, "data": Tensor(a)} for n, a in arrays.items()], str(folder / "types.ckpt"))
    np.savez(folder / "results.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
