"""A trained model as engines want it, and written for them.

`python -m mobilenetv3_paddle.export PROGRAM OUTPUT OPSET` writes ONNX, in a process of its own that may abort.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from mobilenetv3_paddle.models.layers import AdaptiveAvgPool2D, Hardsigmoid
from mobilenetv3_paddle.models.mobilenet_v3 import Conv2dNormActivation

INPUT = "image"  # float32, (N, 3, crop, crop)


class NativeHardsigmoid(nn.Layer):
    """One operation instead of three, any shape.

    Paddle: its kernel, without the slope 0.1666667 of nn.Hardsigmoid.
    """

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Paddle: the nearest float32 to 1/6."""
        return F.hardsigmoid(x, slope=1 / 6)


def replace_layers(model: nn.Layer, kind: type, build: Callable[[], nn.Layer]) -> list[str]:
    """Put a new layer in the place of each `kind` -> their names.

    Paddle: PyTorch's own layers are fast as they are.
    """
    layers = dict(model.named_sublayers(include_self=True))
    names = [name for name, layer in layers.items() if type(layer) is kind]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(layers[parent], leaf, build())
    return names


def fold_batch_norm(model: nn.Layer) -> list[str]:
    """Fold every batch norm's eval mode into the convolution before it -> the names of these convolutions.

    They get a bias, and an Identity stands where the batch norm was. In float64; each weight is rounded once.
    """
    folded = []
    for name, block in model.named_sublayers(include_self=True):
        if not isinstance(block, Conv2dNormActivation):
            continue
        conv, norm = cast(nn.Conv2D, block[0]), cast(Any, block[1])
        tensors = (conv.weight, norm.weight, norm.bias, norm._mean, norm._variance)  # Paddle: its names
        weight, gamma, beta, mean, variance = (tensor.numpy().astype(np.float64) for tensor in tensors)
        factor = gamma / np.sqrt(variance + norm._epsilon)  # (C,)
        conv.bias = conv.create_parameter([len(factor)], dtype=conv.weight.dtype, is_bias=True)  # Paddle: zeros
        set_value(conv.weight, weight * factor[:, None, None, None])
        set_value(conv.bias, beta - mean * factor)
        block[1] = nn.Identity()  # type: ignore[index]  # Paddle: a number is a name, too
        folded.append(f"{name}.0")
    return folded


@paddle.no_grad()
def set_value(tensor: paddle.Tensor, array: np.ndarray) -> None:
    tensor.set_value(paddle.to_tensor(array, dtype=tensor.dtype))  # Paddle: wants the same type


# What changes a model in place and gives the names of the layers it changed, by what is to be said of it.
REPLACEMENTS: dict[str, Callable[[nn.Layer], list[str]]] = {
    # Paddle: two means are half of Paddle Inference's time
    "pool as two means -> AdaptiveAvgPool2D(1)": partial(
        replace_layers, kind=AdaptiveAvgPool2D, build=partial(nn.AdaptiveAvgPool2D, 1)
    ),
    "hard-sigmoid as relu6(x + 3) / 6 -> F.hardsigmoid(slope=1/6)": partial(
        replace_layers, kind=Hardsigmoid, build=NativeHardsigmoid
    ),
}
FOLDING = "batch norm folded in float64 into the convolution before it"


def with_softmax(model: nn.Layer) -> nn.Layer:
    """`model` with probabilities for logits."""
    return nn.Sequential(model, nn.Softmax(1))


def save_program(model: nn.Layer, folder: Path, crop: int) -> Path:
    """Write `model` as a graph for images (N, 3, crop, crop) to `folder` -> the graph's file."""
    shapes = [paddle.static.InputSpec([None, 3, crop, crop], "float32", INPUT)]  # Paddle: no sizes by example
    model.eval()  # Paddle: returns nothing
    # Paddle: its inference format, inference.json and inference.pdiparams
    paddle.jit.save(model, str(folder / "inference"), input_spec=shapes)
    return folder / "inference.json"


def write_onnx(program: Path, output: Path, opset: int) -> None:
    """The graph that `save_program` wrote, as ONNX of that opset, weights included.

    Paddle: by paddle2onnx, whose default optimizer calls pip, and which takes a higher opset where one is too low.
    """
    import paddle2onnx

    paddle2onnx.export(
        str(program),
        str(program.with_suffix(".pdiparams")),
        str(output),
        opset_version=opset,
        auto_upgrade_opset=False,
        optimize_tool="None",
    )


if __name__ == "__main__":
    write_onnx(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
