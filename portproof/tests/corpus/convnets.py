"""Image classifiers."""

import paddle
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF

from corpus.common import EVAL, Bug, Pair, normal

T, P = torch.nn, paddle.nn


# ResNet: batch norm, strides, a projection; evaluated.


class RefBasic(T.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = T.Conv2d(inputs, outputs, 3, stride, 1, bias=False), T.BatchNorm2d(outputs)
        self.conv2, self.bn2 = T.Conv2d(outputs, outputs, 3, 1, 1, bias=False), T.BatchNorm2d(outputs)
        self.relu, self.down = T.ReLU(inplace=True), None
        if stride > 1:
            self.down = T.Sequential(T.Conv2d(inputs, outputs, 1, stride, bias=False), T.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.down is None else self.down(x)))


class RefResNet(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = T.Conv2d(3, 6, 3, 2, 1), T.MaxPool2d(3, 2, 1)
        self.layers = T.Sequential(RefBasic(6, 6, 1), RefBasic(6, 6, 1), RefBasic(6, 8, 2))
        self.fc = T.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.layers(self.pool(self.stem(x))).mean((2, 3)))


class PortBasic(P.Layer):
    def __init__(self, inputs: int, outputs: int, stride: int, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.conv1, self.bn1 = P.Conv2D(inputs, outputs, 3, stride, 1, bias_attr=False), P.BatchNorm2D(outputs)
        own = False if bug == "the batch's statistics" else None
        self.conv2 = P.Conv2D(outputs, outputs, 3, 1, 1, bias_attr=False)
        self.bn2 = P.BatchNorm2D(outputs, use_global_stats=own)
        self.relu, self.down = P.ReLU(), None
        if stride > 1:
            self.down = P.Sequential(P.Conv2D(inputs, outputs, 1, stride, bias_attr=False), P.BatchNorm2D(outputs))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv1(y) if self.bug == "a layer used twice" else self.conv2(y))
        if self.bug == "no residual":
            return self.relu(y)
        return self.relu(y + (x if self.down is None else self.down(x)))


class PortResNet(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.stem = P.Conv2D(3, 6, 3, 2, "SAME" if bug == "padding of SAME" else 1)
        self.pool = P.MaxPool2D(3, 2, 1)
        self.layers = P.Sequential(PortBasic(6, 6, 1), PortBasic(6, 6, 1, bug), PortBasic(6, 8, 2))
        self.fc = P.Linear(8, 4, bias_attr=False if bug == "no bias" else None)

    def forward(self, x):
        return self.fc(self.layers(self.pool(self.stem(x))).mean([2, 3]))


# ConvNeXt: the port stays channels-first, with 1x1 convolutions for linear layers.


class RefConvNeXtBlock(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dwconv, self.norm = T.Conv2d(8, 8, 3, padding=1, groups=8), T.LayerNorm(8, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = T.Linear(8, 16), T.GELU(), T.Linear(16, 8)
        self.gamma = T.Parameter(0.1 * torch.ones(8))

    def forward(self, x):
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class RefConvNeXt(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = T.Conv2d(3, 8, 2, 2), T.Sequential(RefConvNeXtBlock(), RefConvNeXtBlock())
        self.head = T.Linear(8, 3)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean([-2, -1]))


class PortChannelNorm(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        ones, zeros = P.initializer.Constant(1.0), P.initializer.Constant(0.0)
        self.weight = self.create_parameter([8], default_initializer=ones)
        self.bias = self.create_parameter([8], default_initializer=zeros)
        self.eps = 1e-3 if bug == "epsilon of the norm by hand" else 1e-6

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        y = (x - mean) / paddle.sqrt((x - mean).pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight.reshape([1, -1, 1, 1]) * y + self.bias.reshape([1, -1, 1, 1])


class PortConvNeXtBlock(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        groups = 1 if bug == "not depthwise" else 8
        self.bug, self.dwconv, self.norm = bug, P.Conv2D(8, 8, 3, padding=1, groups=groups), PortChannelNorm(bug)
        self.pwconv1, self.act, self.pwconv2 = P.Conv2D(8, 16, 1), P.GELU(), P.Conv2D(16, 8, 1)
        self.gamma = self.create_parameter([8], default_initializer=P.initializer.Constant(0.1))

    def forward(self, x):
        y = self.dwconv(x)
        short = y if self.bug == "shortcut from behind the convolution" else x
        return short + self.gamma.reshape([1, -1, 1, 1]) * self.pwconv2(self.act(self.pwconv1(self.norm(y))))


class PortConvNeXt(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.stem, self.blocks = P.Conv2D(3, 8, 2, 2), P.Sequential(PortConvNeXtBlock(), PortConvNeXtBlock(bug))
        self.head = P.Linear(8, 3)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean([-2, -1]))


# Stochastic depth: random in train mode on both sides.


class RefDepth(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = T.Conv2d(3, 6, 3, padding=1), T.Conv2d(6, 6, 3, padding=1)
        from torchvision.ops import StochasticDepth  # of all models here only this one needs torchvision

        self.drop, self.head = StochasticDepth(0.2, "row"), T.Linear(6, 3)

    def forward(self, x):
        x = self.conv1(x)
        return self.head((x + self.drop(torch.tanh(self.conv2(x)))).mean((2, 3)))


class PortDropPath(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug

    def forward(self, x):
        if not self.training:
            return x * 0.8 if self.bug == "drop path scales in eval" else x
        keep = paddle.floor(0.8 + paddle.rand([x.shape[0], 1, 1, 1])).astype(x.dtype)
        return x / 0.8 * keep


class PortDepth(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.conv1, self.conv2 = P.Conv2D(3, 6, 3, padding=1), P.Conv2D(6, 6, 3, padding=1)
        self.drop, self.head = PortDropPath(bug), P.Linear(6, 3)

    def forward(self, x):
        x = self.conv1(x)
        return self.head((x + self.drop(paddle.tanh(self.conv2(x)))).mean([2, 3]))


# Squeeze and excitation: Linear here, 1x1 convolutions there.


class RefSE(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.fc1, self.fc2 = T.AdaptiveAvgPool2d(1), T.Linear(8, 4), T.Linear(4, 8)

    def forward(self, x):
        s = torch.sigmoid(self.fc2(TF.relu(self.fc1(self.pool(x).flatten(1)))))
        return x * s.view(*s.shape, 1, 1)


class RefSENet(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.se, self.fc = T.Conv2d(3, 8, 3, 2), RefSE(), T.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.se(self.conv(x)).mean((2, 3)))


class PortSE(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.pool = P.AdaptiveMaxPool2D(1) if bug == "maximum for the mean" else P.AdaptiveAvgPool2D(1)
        self.bug, self.fc1, self.fc2 = bug, P.Conv2D(8, 4, 1), P.Conv2D(4, 8, 1)

    def forward(self, x):
        y = self.fc1(self.pool(x))
        y = self.fc2(y if self.bug == "ReLU missing between" else PF.relu(y))
        return x * PF.sigmoid(y)


class PortSENet(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.conv, self.se, self.fc = P.Conv2D(3, 8, 3, 2), PortSE(bug), P.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.se(self.conv(x)).mean([2, 3]))


# GhostNet: half of the channels are made of the other half.


class RefGhost(T.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.primary, self.cheap = T.Conv2d(inputs, 4, 1), T.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x):
        first = TF.relu(self.primary(x))
        return torch.cat([first, TF.relu(self.cheap(first))], 1)


class RefGhostNet(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ghost1, self.ghost2, self.head = RefGhost(3), RefGhost(8), T.Conv2d(8, 3, 1)

    def forward(self, x):
        return self.head(self.ghost2(self.ghost1(x))).flatten(1)


class PortGhost(P.Layer):
    def __init__(self, inputs: int, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.primary, self.cheap = P.Conv2D(inputs, 4, 1), P.Conv2D(4, 4, 3, padding=1, groups=4)

    def forward(self, x):
        first = PF.relu(self.primary(x))
        both = [first, PF.relu(self.cheap(first))]
        return paddle.concat(both[::-1] if self.bug == "concatenated the other way" else both, axis=1)


class PortGhostNet(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.ghost1, self.ghost2, self.head = PortGhost(3, bug), PortGhost(8), P.Conv2D(8, 3, 1)

    def forward(self, x):
        return self.head(self.ghost2(self.ghost1(x))).flatten(1)


# ShuffleNet: two branches and a shuffle of channels; the port's batch norm is Paddle's old one, with its activation.


def shuffled(x: torch.Tensor, groups: int) -> torch.Tensor:
    b, c, h, w = x.shape
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).reshape(b, c, h, w)


def port_shuffled(x: paddle.Tensor, groups: int) -> paddle.Tensor:
    b, c, h, w = x.shape
    return x.reshape([b, groups, c // groups, h, w]).transpose([0, 2, 1, 3, 4]).reshape([b, c, h, w])


class RefShuffleUnit(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pw, self.bn1, self.relu = T.Conv2d(4, 4, 1, bias=False), T.BatchNorm2d(4), T.ReLU()
        self.dw, self.bn2 = T.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), T.BatchNorm2d(4)

    def forward(self, x):
        kept, y = x.chunk(2, 1)
        return shuffled(torch.cat([kept, self.bn2(self.dw(self.relu(self.bn1(self.pw(y)))))], 1), 2)


class RefShuffleNet(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.units = T.Conv2d(3, 8, 3, 2), T.Sequential(RefShuffleUnit(), RefShuffleUnit())
        self.head = T.Conv2d(8, 3, 1)

    def forward(self, x):
        return self.head(self.units(self.stem(x)))


class PortShuffleUnit(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.groups = 4 if bug == "shuffled in other groups" else 2
        self.pw, self.bn1 = P.Conv2D(4, 4, 1, bias_attr=False), P.BatchNorm(4, act="relu")
        self.dw = P.Conv2D(4, 4, 3, padding=1, groups=4, bias_attr=False)
        self.bn2 = P.BatchNorm(4, epsilon=1e-3) if bug == "epsilon of the batch norm" else P.BatchNorm(4)

    def forward(self, x):
        kept, y = x.chunk(2, axis=1)
        return port_shuffled(paddle.concat([kept, self.bn2(self.dw(self.bn1(self.pw(y))))], axis=1), self.groups)


class PortShuffleNet(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.stem, self.units = P.Conv2D(3, 8, 3, 2), P.Sequential(PortShuffleUnit(), PortShuffleUnit(bug))
        self.head = P.Conv2D(8, 3, 1)

    def forward(self, x):
        return self.head(self.units(self.stem(x)))


# Depthwise separable, nested here and flat there; functions for layers, other names.


class RefNested(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = T.Sequential(
            T.Sequential(T.Conv2d(3, 6, 3, padding=1, groups=3), T.Conv2d(6, 8, 1), T.ReLU()),
            T.Identity(),
            T.MaxPool2d(3, 2),
            T.Sequential(T.Conv2d(8, 8, 3, groups=8), T.Conv2d(8, 4, 1)),
        )
        self.classifier = T.Sequential(T.ReLU(), T.AdaptiveAvgPool2d(1), T.Flatten(), T.Linear(4, 3))

    def forward(self, x):
        return self.classifier(self.features(x))


class PortFlat(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.output = bug, P.Linear(4, 3)
        self.dw2, self.pw2 = P.Conv2D(8, 8, 3, groups=8), P.Conv2D(8, 4, 1)
        self.dw1, self.pw1 = P.Conv2D(3, 6, 3, padding=1, groups=3), P.Conv2D(6, 8, 1)
        self.pool = P.MaxPool2D(3, 2, ceil_mode=bug == "ceil_mode")

    def forward(self, x):
        x = self.pool(PF.relu(self.pw1(self.dw1(x))))
        return self.output(PF.relu(self.pw2(self.dw2(x))).mean([2, 3]))


# DenseNet: concatenation, and an average over borders.


class RefDense(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.conv1, self.conv2 = (T.Conv2d(c, 4, 3, padding=1) for c in (3, 4, 8))
        self.norm, self.pool, self.fc = T.GroupNorm(4, 12), T.AvgPool2d(3, 2, 1), T.Linear(12, 3)

    def forward(self, x):
        a = self.conv0(x)
        b = self.conv1(TF.leaky_relu(a, 0.1))
        c = self.conv2(TF.leaky_relu(torch.cat([a, b], 1), 0.1))
        return self.fc(self.pool(torch.relu(self.norm(torch.cat([a, b, c], 1)))).amax((2, 3)))


class PortDense(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.conv0, self.conv1, self.conv2 = (P.Conv2D(c, 4, 3, padding=1) for c in (3, 4, 8))
        self.norm = P.GroupNorm(2 if bug == "groups of the norm" else 4, 12)
        self.pool = P.AvgPool2D(3, 2, 1, exclusive=bug == "padding not counted")
        self.fc = P.Linear(12, 3)

    def forward(self, x):
        slope = 0.01 if self.bug == "default slope" else 0.1
        a = self.conv0(x)
        b = self.conv1(PF.leaky_relu(a, 0.1))
        c = self.conv2(PF.leaky_relu(paddle.concat([a, b], axis=1), slope))
        return self.fc(self.pool(PF.relu(self.norm(paddle.concat([a, b, c], axis=1)))).amax([2, 3]))


# A frozen backbone, and batch norm as it trains.


class RefFrozen(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = T.Sequential(T.Conv2d(3, 6, 3), T.BatchNorm2d(6), T.ReLU(), T.Conv2d(6, 6, 3))
        self.head = T.Linear(6, 3)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))


class PortFrozen(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.backbone = P.Sequential(P.Conv2D(3, 6, 3), P.BatchNorm2D(6), P.ReLU(), P.Conv2D(6, 6, 3))
        self.head = P.Linear(6, 3)
        for parameter in self.backbone.parameters():
            parameter.stop_gradient = True
        if bug == "the norm not frozen":
            self.backbone[1].weight.stop_gradient = self.backbone[1].bias.stop_gradient = False

    def forward(self, x):
        return self.head(self.backbone(x).mean([2, 3]))


class RefTrained(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = T.Conv2d(3, 4, 3), T.BatchNorm2d(4), T.Linear(4, 2)

    def forward(self, x):
        return self.fc(TF.silu(self.norm(self.conv(x))).mean((2, 3)))


class PortTrained(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        momentum = 0.1 if bug == "momentum of the other framework" else 0.9
        self.conv, self.norm, self.fc = P.Conv2D(3, 4, 3), P.BatchNorm2D(4, momentum=momentum), P.Linear(4, 2)

    def forward(self, x):
        return self.fc(PF.silu(self.norm(self.conv(x))).mean([2, 3]))


SMALL = normal(2, 3, 8, 8)
PAIRS = {
    "resnet": Pair(
        RefResNet,
        PortResNet,
        [normal(4, 3, 16, 16)],
        {
            "a layer used twice": Bug("layers.1"),
            "no residual": Bug("layers.1"),
            "the batch's statistics": Bug("layers.1.bn2"),
            "padding of SAME": Bug("stem", "SAME"),
            "no bias": Bug("fc"),
        },
        modes=EVAL,
    ),
    "convnext": Pair(
        RefConvNeXt,
        PortConvNeXt,
        [SMALL],
        {
            "epsilon of the norm by hand": Bug("blocks.1.norm", also=("blocks.1",)),
            "shortcut from behind the convolution": Bug("blocks.1"),
            "not depthwise": Bug("blocks.1.dwconv"),
        },
    ),
    "stochastic depth": Pair(
        RefDepth, PortDepth, [normal(4, 3, 6, 6)], {"drop path scales in eval": Bug("drop")}, random=True
    ),
    "squeeze and excitation": Pair(
        RefSENet,
        PortSENet,
        [SMALL],
        {"maximum for the mean": Bug("se.pool", "maximum"), "ReLU missing between": Bug("se")},
    ),
    "ghostnet": Pair(RefGhostNet, PortGhostNet, [SMALL], {"concatenated the other way": Bug("ghost1")}),
    "shufflenet": Pair(
        RefShuffleNet,
        PortShuffleNet,
        [normal(4, 3, 9, 9)],
        {"shuffled in other groups": Bug("units.1"), "epsilon of the batch norm": Bug("units.1.bn2", "epsilon")},
        modes=EVAL,
    ),
    "nested": Pair(RefNested, PortFlat, [normal(2, 3, 10, 10)], {"ceil_mode": Bug("features.2", "ceil_mode")}),
    "densenet": Pair(
        RefDense,
        PortDense,
        [SMALL],
        {
            "groups of the norm": Bug("norm"),
            "padding not counted": Bug("pool", "padding"),
            "default slope": Bug(""),
        },
    ),
    "frozen backbone": Pair(RefFrozen, PortFrozen, [SMALL], {"the norm not frozen": Bug("backbone.1")}, modes=EVAL),
    "batch norm in training": Pair(
        RefTrained,
        PortTrained,
        [SMALL],
        {
            "the biased variance": Bug("norm", "biased"),
            "momentum of the other framework": Bug("norm", "momentum"),
        },
        faithful=False,
    ),
}
