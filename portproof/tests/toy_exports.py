"""Two small networks in both frameworks, and what exports them to ONNX: convolutions with all that goes with them
(batch norm, hard-swish, squeeze-excitation, a skip connection, a resize), and attention."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import torch

F, P = torch.nn, paddle.nn
WIDTH, TOKENS = 12, 5


class Gate(F.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.pool, self.fc1, self.relu = F.AdaptiveAvgPool2d(1), F.Conv2d(n, 4, 1), F.ReLU()
        self.fc2, self.gate = F.Conv2d(4, n, 1), F.Hardsigmoid()

    def forward(self, x):
        return x * self.gate(self.fc2(self.relu(self.fc1(self.pool(x)))))


class PortHardsigmoid(P.Layer):
    def forward(self, x):
        return P.functional.hardsigmoid(x, slope=1 / 6)


class PortGate(P.Layer):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.pool, self.fc1, self.relu = P.AdaptiveAvgPool2D(1), P.Conv2D(n, 4, 1), P.ReLU()
        self.fc2, self.gate = P.Conv2D(4, n, 1), PortHardsigmoid()

    def forward(self, x):
        return x * self.gate(self.fc2(self.relu(self.fc1(self.pool(x)))))


class Block(F.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv, self.bn = F.Conv2d(n, n, 3, padding=1, groups=n, bias=False), F.BatchNorm2d(n, eps=1e-3)
        self.act, self.se = F.Hardswish(), Gate(n)
        self.project, self.bn2 = F.Conv2d(n, n, 1, bias=False), F.BatchNorm2d(n, eps=1e-3)

    def forward(self, x):
        return x + self.bn2(self.project(self.se(self.act(self.bn(self.conv(x))))))


class PortBlock(P.Layer):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv = P.Conv2D(n, n, 3, padding=1, groups=n, bias_attr=False)
        self.bn, self.act, self.se = P.BatchNorm2D(n, epsilon=1e-3), P.Hardswish(), PortGate(n)
        self.project, self.bn2 = P.Conv2D(n, n, 1, bias_attr=False), P.BatchNorm2D(n, epsilon=1e-3)

    def forward(self, x):
        return x + self.bn2(self.project(self.se(self.act(self.bn(self.conv(x))))))


class Up(F.Module):
    def forward(self, x):
        return F.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class PortUp(P.Layer):
    def forward(self, x):
        size = [2 * x.shape[2], 2 * x.shape[3]]
        return P.functional.interpolate(x, size=size, mode="bilinear", align_corners=False)


class Convolutions(F.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = F.Conv2d(3, 8, 3, stride=2, padding=1), F.BatchNorm2d(8, eps=1e-3)
        self.act, self.block, self.up = F.Hardswish(), Block(8), Up()
        self.drop, self.head = F.Dropout(0.2), F.Linear(8, 5)

    def forward(self, x):
        x = self.up(self.block(self.act(self.bn(self.stem(x)))))
        return self.head(self.drop(x.mean((2, 3))))


class PortConvolutions(P.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = P.Conv2D(3, 8, 3, stride=2, padding=1), P.BatchNorm2D(8, epsilon=1e-3)
        self.act, self.block, self.up = P.Hardswish(), PortBlock(8), PortUp()
        self.drop, self.head = P.Dropout(0.2), P.Linear(8, 5)

    def forward(self, x):
        x = self.up(self.block(self.act(self.bn(self.stem(x)))))
        return self.head(self.drop(x.mean([2, 3])))


class Attention(F.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (F.Linear(n, n) for _ in range(4))
        self.softmax = F.Softmax(-1)

    def forward(self, x):
        q, k, v = (f(x).reshape(-1, TOKENS, 2, WIDTH // 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = self.softmax(q @ k.transpose(-1, -2) * (WIDTH // 2) ** -0.5)
        return self.o((weights @ v).transpose(1, 2).reshape(-1, TOKENS, WIDTH))


class PortAttention(P.Layer):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (P.Linear(n, n) for _ in range(4))
        self.softmax = P.Softmax(-1)

    def heads(self, x):
        return x.reshape([-1, TOKENS, 2, WIDTH // 2]).transpose([0, 2, 1, 3])

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        weights = self.softmax(q @ k.transpose([0, 1, 3, 2]) * (WIDTH // 2) ** -0.5)
        return self.o((weights @ v).transpose([0, 2, 1, 3]).reshape([-1, TOKENS, WIDTH]))


class Layer(F.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = F.LayerNorm(n, eps=1e-6), Attention(n), F.LayerNorm(n, eps=1e-6)
        self.fc1, self.act, self.fc2, self.drop = F.Linear(n, 2 * n), F.GELU(), F.Linear(2 * n, n), F.Dropout(0.1)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm2(x)))))


class PortLayer(P.Layer):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm1, self.attn = P.LayerNorm(n, epsilon=1e-6), PortAttention(n)
        self.norm2, self.drop = P.LayerNorm(n, epsilon=1e-6), P.Dropout(0.1)
        self.fc1, self.act, self.fc2 = P.Linear(n, 2 * n), P.GELU(), P.Linear(2 * n, n)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm2(x)))))


class Transformer(F.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = F.Linear(6, WIDTH), F.Sequential(Layer(WIDTH), Layer(WIDTH))
        self.norm, self.head = F.LayerNorm(WIDTH, eps=1e-6), F.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.embed(x)))[:, 0])


class PortTransformer(P.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = P.Linear(6, WIDTH), P.Sequential(PortLayer(WIDTH), PortLayer(WIDTH))
        self.norm, self.head = P.LayerNorm(WIDTH, epsilon=1e-6), P.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.embed(x)))[:, 0])


class Decoder(F.Module):
    """What folds otherwise than Convolutions, for inputs as it takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.relu = F.Conv2d(3, 4, 7), F.BatchNorm2d(4), F.ReLU()
        self.larger = F.Upsample(scale_factor=1.2)  # 10 to 12 pixels; by the float32 of that it reads others
        self.up, self.bn2, self.act = F.ConvTranspose2d(4, 6, 4, stride=2, padding=1), F.BatchNorm2d(6), F.Hardswish()
        self.small, self.pool = F.Conv2d(6, 6, 1), F.AdaptiveAvgPool2d(1)
        self.fc, self.norm, self.head = F.Linear(6, 9), F.BatchNorm1d(9), F.Linear(9, 3)
        self.register_buffer("places", torch.rand(6, 24, 24), persistent=False)
        self.scale = F.Parameter(torch.full((6, 1, 1), 1e-7))

    def forward(self, x):
        x = self.relu(self.bn(self.stem(x)) * 0.7)
        x = self.act(self.bn2(self.up(self.larger(x))) + self.places)
        x = x + self.scale * self.small(x)  # what `act` gives and `pool` gets are alike in float32
        return self.head(self.norm(self.fc(self.pool(x).flatten(1))))


NETWORKS: dict[str, tuple[Callable, Callable, tuple[int, ...]]] = {
    "convolutions": (Convolutions, PortConvolutions, (3, 16, 16)),
    "transformer": (Transformer, PortTransformer, (TOKENS, 6)),
}


def reference(network: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return drawn(NETWORKS[network][0]())


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    """With statistics that are drawn, and no weights that hide a fault."""
    for module in model.modules():
        if isinstance(module, (F.BatchNorm1d, F.BatchNorm2d)):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
        if isinstance(module, (F.BatchNorm1d, F.BatchNorm2d, F.LayerNorm)):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_()
    return model.eval()


def images(network: str, count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, *NETWORKS[network][2])).astype(np.float32)


def export_torch(model: torch.nn.Module, network: str, path: Path, optimize: bool = False) -> None:
    """By PyTorch's exporter, any batch; what it optimizes folds batch norm in float32."""
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        how = {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},), "optimize": optimize}
        x = torch.from_numpy(images(network, 2))
        torch.onnx.export(model.eval(), (x,), str(path), verbose=False, external_data=False, **how)


def export_paddle(model: paddle.nn.Layer, network: str, path: Path) -> None:
    """By paddle2onnx from Paddle's inference format, any batch."""
    import paddle2onnx

    prefix = str(path.with_suffix(""))
    spec = paddle.static.InputSpec([None, *NETWORKS[network][2]], "float32", "x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.eval()
        paddle.jit.save(model, prefix, input_spec=[spec])
        files = f"{prefix}.json", f"{prefix}.pdiparams"
        paddle2onnx.export(*files, str(path), opset_version=17, optimize_tool="None", verbose=False)
