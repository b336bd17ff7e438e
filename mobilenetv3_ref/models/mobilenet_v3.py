"""MobileNetV3, after "Searching for MobileNetV3" (Howard et al., ICCV 2019, arXiv:1905.02244).

Structure, defaults and state_dict keys are those of torchvision 0.29.1: torchvision/models/mobilenetv3.py and
torchvision/ops/misc.py. Its weights load here unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from .layers import AdaptiveAvgPool2d, BatchNorm2d, Hardsigmoid
from .weights import load_weights


def make_divisible(value: float, divisor: int = 8) -> int:
    """The multiple of `divisor` nearest to `value`, but never less than 90 % of it (torchvision `_make_divisible`)."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


@dataclass(frozen=True)
class InvertedResidualConfig:
    """One row of Table 1 or 2 of the paper; channel counts are already multiplied and rounded."""

    input_channels: int
    kernel: int
    expanded_channels: int
    out_channels: int
    use_se: bool
    activation: str  # "RE" (ReLU) or "HS" (hard-swish)
    stride: int
    dilation: int


class Conv2dNormActivation(nn.Sequential):
    """Convolution without bias, normalization, activation: (N, C, H, W) -> (N, C', H / stride, W / stride)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        norm_layer: Callable,
        activation_layer: Callable | None,
        kernel_size: int = 1,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        padding = (kernel_size - 1) // 2 * dilation
        layers = [
            nn.Conv2d(
                in_channels,
                out_channels,
                kernel_size,
                stride,
                padding,
                dilation=dilation,
                groups=groups,
                bias=False,
            ),
            norm_layer(out_channels),
        ]
        if activation_layer is not None:
            layers.append(activation_layer(inplace=True))
        super().__init__(*layers)


class SqueezeExcitation(nn.Module):
    """Squeeze-and-excite (arXiv:1709.01507, Fig. 1) with a hard-sigmoid gate (MobileNetV3, section 5.3)."""

    def __init__(self, input_channels: int, squeeze_channels: int) -> None:
        super().__init__()
        self.avgpool = AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(input_channels, squeeze_channels, 1)
        self.fc2 = nn.Conv2d(squeeze_channels, input_channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.avgpool(x)  # (N, C, 1, 1)
        scale = self.activation(self.fc1(scale))  # (N, squeeze_channels, 1, 1)
        scale = self.scale_activation(self.fc2(scale))  # (N, C, 1, 1), each in [0, 1]
        return scale * x


class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, squeeze-and-excite, project (Fig. 4): (N, C, H, W) -> (N, C', H', W').

    Raises ValueError when the stride is neither 1 nor 2.
    """

    def __init__(self, cnf: InvertedResidualConfig, norm_layer: Callable) -> None:
        super().__init__()
        if cnf.stride not in (1, 2):
            raise ValueError(f"stride {cnf.stride}: an inverted residual has stride 1 or 2")
        self.use_res_connect = cnf.stride == 1 and cnf.input_channels == cnf.out_channels
        activation_layer = nn.Hardswish if cnf.activation == "HS" else nn.ReLU

        layers: list[nn.Module] = []
        if cnf.expanded_channels != cnf.input_channels:  # expand
            layers.append(Conv2dNormActivation(cnf.input_channels, cnf.expanded_channels, norm_layer, activation_layer))
        layers.append(  # depthwise; a dilated block keeps its resolution
            Conv2dNormActivation(
                cnf.expanded_channels,
                cnf.expanded_channels,
                norm_layer,
                activation_layer,
                kernel_size=cnf.kernel,
                stride=1 if cnf.dilation > 1 else cnf.stride,
                dilation=cnf.dilation,
                groups=cnf.expanded_channels,
            )
        )
        if cnf.use_se:
            squeeze_channels = make_divisible(cnf.expanded_channels // 4)
            layers.append(SqueezeExcitation(cnf.expanded_channels, squeeze_channels))
        layers.append(Conv2dNormActivation(cnf.expanded_channels, cnf.out_channels, norm_layer, None))  # project
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result = self.block(x)
        if self.use_res_connect:
            result += x
        return result


class MobileNetV3(nn.Module):
    """Images (N, 3, H, W), float, normalized -> logits (N, num_classes).

    Raises ValueError when `inverted_residual_setting` is empty.
    """

    def __init__(
        self,
        inverted_residual_setting: Sequence[InvertedResidualConfig],
        last_channel: int,
        num_classes: int = 1000,
        block: Callable = InvertedResidual,
        norm_layer: Callable | None = None,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        if not inverted_residual_setting:
            raise ValueError("inverted_residual_setting is empty: give one InvertedResidualConfig a block")
        if norm_layer is None:
            norm_layer = partial(BatchNorm2d, eps=1e-3, momentum=0.01)

        first_channels = inverted_residual_setting[0].input_channels
        layers = [Conv2dNormActivation(3, first_channels, norm_layer, nn.Hardswish, kernel_size=3, stride=2)]
        layers += [block(cnf, norm_layer) for cnf in inverted_residual_setting]
        lastconv_input_channels = inverted_residual_setting[-1].out_channels
        lastconv_channels = 6 * lastconv_input_channels
        layers.append(Conv2dNormActivation(lastconv_input_channels, lastconv_channels, norm_layer, nn.Hardswish))

        self.features = nn.Sequential(*layers)
        self.avgpool = AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(lastconv_channels, last_channel),
            nn.Hardswish(),
            nn.Dropout(dropout),
            nn.Linear(last_channel, num_classes),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights anew, from torchvision's distributions."""
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out")
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
            elif isinstance(m, nn.BatchNorm2d | nn.GroupNorm):
                nn.init.ones_(m.weight)
                nn.init.zeros_(m.bias)
            elif isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, 0, 0.01)
                nn.init.zeros_(m.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)  # (N, lastconv_channels, H / 32, W / 32)
        x = self.avgpool(x).flatten(1)  # (N, lastconv_channels)
        return self.classifier(x)  # (N, num_classes)


def mobilenet_v3_conf(
    arch: str, width_mult: float = 1.0, reduced_tail: bool = False, dilated: bool = False
) -> tuple[list[InvertedResidualConfig], int]:
    """The blocks of Table 1 (large) or 2 (small) and the width of the last hidden layer.

    `reduced_tail` halves the channels after C4, `dilated` keeps C4 onwards at stride 16 (paper, section 6.4).
    Raises ValueError for an `arch` that is neither "mobilenet_v3_large" nor "mobilenet_v3_small".
    """
    tail = 2 if reduced_tail else 1
    dilation = 2 if dilated else 1

    def row(c_in: int, kernel: int, expanded: int, c_out: int, use_se: bool, activation: str, stride: int, dil: int):
        c_in, expanded, c_out = (make_divisible(c * width_mult) for c in (c_in, expanded, c_out))
        return InvertedResidualConfig(c_in, kernel, expanded, c_out, use_se, activation, stride, dil)

    if arch == "mobilenet_v3_large":
        setting = [
            row(16, 3, 16, 16, False, "RE", 1, 1),
            row(16, 3, 64, 24, False, "RE", 2, 1),  # C1
            row(24, 3, 72, 24, False, "RE", 1, 1),
            row(24, 5, 72, 40, True, "RE", 2, 1),  # C2
            row(40, 5, 120, 40, True, "RE", 1, 1),
            row(40, 5, 120, 40, True, "RE", 1, 1),
            row(40, 3, 240, 80, False, "HS", 2, 1),  # C3
            row(80, 3, 200, 80, False, "HS", 1, 1),
            row(80, 3, 184, 80, False, "HS", 1, 1),
            row(80, 3, 184, 80, False, "HS", 1, 1),
            row(80, 3, 480, 112, True, "HS", 1, 1),
            row(112, 3, 672, 112, True, "HS", 1, 1),
            row(112, 5, 672, 160 // tail, True, "HS", 2, dilation),  # C4
            row(160 // tail, 5, 960 // tail, 160 // tail, True, "HS", 1, dilation),
            row(160 // tail, 5, 960 // tail, 160 // tail, True, "HS", 1, dilation),
        ]
        last_channel = make_divisible(1280 // tail * width_mult)  # C5
    elif arch == "mobilenet_v3_small":
        setting = [
            row(16, 3, 16, 16, True, "RE", 2, 1),  # C1
            row(16, 3, 72, 24, False, "RE", 2, 1),  # C2
            row(24, 3, 88, 24, False, "RE", 1, 1),
            row(24, 5, 96, 40, True, "HS", 2, 1),  # C3
            row(40, 5, 240, 40, True, "HS", 1, 1),
            row(40, 5, 240, 40, True, "HS", 1, 1),
            row(40, 5, 120, 48, True, "HS", 1, 1),
            row(48, 5, 144, 48, True, "HS", 1, 1),
            row(48, 5, 288, 96 // tail, True, "HS", 2, dilation),  # C4
            row(96 // tail, 5, 576 // tail, 96 // tail, True, "HS", 1, dilation),
            row(96 // tail, 5, 576 // tail, 96 // tail, True, "HS", 1, dilation),
        ]
        last_channel = make_divisible(1024 // tail * width_mult)  # C5
    else:
        raise ValueError(f"unknown model {arch!r}: mobilenet_v3_large or mobilenet_v3_small")
    return setting, last_channel


def _mobilenet_v3(
    arch: str,
    weights: str | Path | None = None,
    width_mult: float = 1.0,
    reduced_tail: bool = False,
    dilated: bool = False,
    **kwargs,
) -> MobileNetV3:
    model = MobileNetV3(*mobilenet_v3_conf(arch, width_mult, reduced_tail, dilated), **kwargs)
    if weights is not None:
        load_weights(model, weights)
    return model


def mobilenet_v3_large(*, weights: str | Path | None = None, **kwargs) -> MobileNetV3:
    """MobileNetV3-Large, 5,483,032 parameters; `weights` is a file, the rest torchvision's keyword arguments.

    They are num_classes, width_mult, reduced_tail, dilated, dropout, norm_layer and block.
    """
    return _mobilenet_v3("mobilenet_v3_large", weights, **kwargs)


def mobilenet_v3_small(*, weights: str | Path | None = None, **kwargs) -> MobileNetV3:
    """MobileNetV3-Small, 2,542,856 parameters; `weights` is a file, the rest torchvision's keyword arguments.

    They are num_classes, width_mult, reduced_tail, dilated, dropout, norm_layer and block.
    """
    return _mobilenet_v3("mobilenet_v3_small", weights, **kwargs)
