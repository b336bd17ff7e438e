"""Ports with one fault in their child `layer`, by name; `main` judges them where only PaddlePaddle is."""

import json
import sys
from pathlib import Path

import paddle
from coded import Coded
from paddle import nn
from paddle.nn import functional as F


class Port(Coded, nn.Layer):
    """In PaddlePaddle."""


class RMSNorm(nn.Layer):
    """With another epsilon than PyTorch's."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([6])

    def forward(self, x):
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


class Fused(nn.BatchNorm2D):
    """With another epsilon, and with the activation behind it inside."""

    def __init__(self):
        super().__init__(4, epsilon=1e-3)

    def forward(self, x):
        return F.relu(super().forward(x))


class NormOverChannels(nn.LayerNorm):
    """With another epsilon."""

    def __init__(self):
        super().__init__(4, epsilon=1e-3)

    def forward(self, x):
        return super().forward(x.transpose([0, 2, 3, 1])).transpose([0, 3, 1, 2])


class NotTransposed(nn.Linear):
    """Reads its weight as PyTorch does."""

    def forward(self, x):
        return F.linear(x, self.weight.T, self.bias)


class WithoutBias(nn.Conv2D):
    """Has a bias and does not add it."""

    def forward(self, x):
        return F.conv2d(x, self.weight) + 0 * self.bias.reshape([1, -1, 1, 1])


def own_batch_norm(momentum=0.9, unbiased=True):
    """`BatchNorm2D` with PyTorch's running variance."""

    class Own(nn.BatchNorm2D):
        def forward(self, x):
            mean, variance = x.mean([0, 2, 3]), x.var([0, 2, 3], unbiased=False)
            if not self.training:
                return F.batch_norm(x, self._mean, self._variance, self.weight, self.bias, False)
            count = x.size // x.shape[1]
            kept = variance * (count / (count - 1) if unbiased else 1.0)
            with paddle.no_grad():
                self._mean.set_value(momentum * self._mean + (1 - momentum) * mean)
                self._variance.set_value(momentum * self._variance + (1 - momentum) * kept)
            shape = [1, -1, 1, 1]
            y = (x - mean.reshape(shape)) / paddle.sqrt(variance.reshape(shape) + 1e-5)
            return y * self.weight.reshape(shape) + self.bias.reshape(shape)

    return Own(4)


def block(code):
    """`code(m, x)` over what two layers make of its input."""
    return Port(code, a=nn.Linear(6, 6), b=nn.Linear(6, 6))


def body(m, x):
    return F.tanh(m.b(m.a(x)))


LAYERS = {
    "batch norm, epsilon": lambda: nn.BatchNorm2D(4, epsilon=1e-3),
    "layer norm, epsilon": lambda: nn.LayerNorm(6, epsilon=1e-6),
    "layer norm over channels": NormOverChannels,
    "batch norm with its activation": Fused,
    "group norm, epsilon": lambda: nn.GroupNorm(2, 4, epsilon=1e-3),
    "group norm, groups": lambda: nn.GroupNorm(4, 4),
    "instance norm, epsilon": lambda: nn.InstanceNorm2D(4, epsilon=2.5e-5),
    "RMS norm, epsilon": RMSNorm,
    "momentum's convention": lambda: own_batch_norm(momentum=0.1),
    "momentum": lambda: own_batch_norm(momentum=0.97),
    "biased variance": lambda: own_batch_norm(unbiased=False),
    "statistics not updated": lambda: own_batch_norm(momentum=1.0),
    "leaky ReLU's slope": lambda: nn.LeakyReLU(0.15),
    "ReLU6": nn.ReLU6,
    "hard-sigmoid": nn.Hardsigmoid,
    "GELU": lambda: nn.GELU(approximate=True),
    "ELU's alpha": lambda: nn.ELU(0.7),
    "softmax's axis": lambda: nn.Softmax(1),
    "a logarithm": lambda: nn.LogSoftmax(-1),
    "dropout that scales later": lambda: nn.Dropout(0.25, mode="downscale_in_infer"),
    "a weight not transposed": lambda: NotTransposed(6, 6),
    "no bias": lambda: WithoutBias(4, 4, 1),
    "axes exchanged": lambda: block(lambda m, x: body(m, x).transpose([1, 0, 2])),
    "an axis reversed": lambda: block(lambda m, x: body(m, x).flip(1)),
    "its input": lambda: block(lambda m, x: x + 0 * body(m, x)),
    "a residual missing": lambda: block(body),
    "a residual too many": lambda: block(lambda m, x: x + body(m, x)),
    "a factor": lambda: block(lambda m, x: 2 * body(m, x)),
    "a shift": lambda: block(lambda m, x: body(m, x) + 0.25),
    "an activation": lambda: block(lambda m, x: F.silu(body(m, x))),
    "padding": lambda: nn.Conv2D(4, 4, 3, padding=0),
    "a setting of the block": lambda: block(lambda m, x: body(m, x) ** 2),
}


def port(name: str) -> Port:
    """Its `layer` behind a layer without a fault."""
    layer = LAYERS[name]()
    images = isinstance(layer, (nn.BatchNorm2D, NormOverChannels, nn.GroupNorm, nn.InstanceNorm2D, nn.Conv2D))
    first = nn.Conv2D(4, 4, 1) if images else nn.Linear(6, 6)
    return Port(lambda m, x: m.layer(m.first(x)), first=first, layer=layer)


class Blocked:
    """Finds no torch."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked", name="torch")


def main(folder: Path) -> None:
    sys.meta_path.insert(0, Blocked())
    import portproof

    found = {}
    for name in LAYERS:
        verdict = portproof.judge(port(name), folder / f"{name}.safetensors")
        assert verdict.location, f"{name}: {verdict}"
        found[name] = verdict.location.name, verdict.location.diagnosis, verdict.location.proof
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
