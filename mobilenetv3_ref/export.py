"""A trained model as engines want it, and written for them.

`python -m mobilenetv3_ref.export PROGRAM OUTPUT OPSET` writes ONNX, in a process of its own that may abort.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from mobilenetv3_ref.models.mobilenet_v3 import Conv2dNormActivation

INPUT = "image"  # float32, (N, 3, crop, crop)


def fold_batch_norm(model: nn.Module) -> list[str]:
    """Fold every batch norm's eval mode into the convolution before it -> the names of these convolutions.

    They get a bias, and an Identity stands where the batch norm was. In float64; each weight is rounded once.
    """
    folded = []
    for name, block in model.named_modules():
        if not isinstance(block, Conv2dNormActivation):
            continue
        conv, norm = cast(nn.Conv2d, block[0]), cast(Any, block[1])
        tensors = (conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var)
        weight, gamma, beta, mean, variance = (tensor.detach().cpu().numpy().astype(np.float64) for tensor in tensors)
        factor = gamma / np.sqrt(variance + norm.eps)  # (C,)
        conv.bias = nn.Parameter(torch.zeros(len(factor), dtype=conv.weight.dtype))
        set_value(conv.weight, weight * factor[:, None, None, None])
        set_value(conv.bias, beta - mean * factor)
        block[1] = nn.Identity()
        folded.append(f"{name}.0")
    return folded


@torch.no_grad()
def set_value(tensor: torch.Tensor, array: np.ndarray) -> None:
    tensor.copy_(torch.from_numpy(array))


# What changes a model in place and gives the names of the layers it changed, by what is to be said of it.
REPLACEMENTS: dict[str, Callable[[nn.Module], list[str]]] = {}
FOLDING = "batch norm folded in float64 into the convolution before it"


def with_softmax(model: nn.Module) -> nn.Module:
    """`model` with probabilities for logits."""
    return nn.Sequential(model, nn.Softmax(1))


def save_program(model: nn.Module, folder: Path, crop: int) -> Path:
    """Write `model` as a graph for images (N, 3, crop, crop) to `folder` -> the graph's file."""
    shapes = ({0: torch.export.Dim("N")},)
    program = torch.export.export(model.eval(), (torch.zeros(2, 3, crop, crop),), dynamic_shapes=shapes)
    path = folder / "program.pt2"
    torch.export.save(program, path)
    return path


def write_onnx(program: Path, output: Path, opset: int) -> None:
    """The graph that `save_program` wrote, as ONNX of that opset, weights included."""
    loaded = torch.export.load(program)
    torch.onnx.export(loaded, (), output, input_names=[INPUT], opset_version=opset, external_data=False, dynamo=True)


if __name__ == "__main__":
    write_onnx(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
