"""One process of three: a batch norm layer, synchronized, on this process's share of a batch. Writes FOLDER/RANK.npz.

LAUNCHER sync_batch_norm_worker.py PACKAGE FOLDER
"""

import importlib
import sys
from pathlib import Path

import numpy as np

SHARES = (3, 1, 2)  # images
EPSILON = 2.0**-10  # which float32 holds, as Paddle's kernels do
WEIGHT, BIAS = (0.5, -2.0, 3.0), (1.0, -1.0, 0.25)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """(images, the loss's gradient for what the layer makes of them), (6, 3, 5, 6), float64."""
    rng = np.random.default_rng(0)
    return rng.normal(2, 3, (sum(SHARES), 3, 5, 6)), rng.normal(0, 1, (sum(SHARES), 3, 5, 6))


def torch_layer():
    import torch
    from torch import nn

    torch.set_num_threads(1)
    return nn.BatchNorm2d(3, eps=EPSILON, momentum=0.25, dtype=torch.float64), torch.tensor


def paddle_layer():
    import paddle

    from mobilenetv3_paddle.models.layers import BatchNorm2D

    paddle.set_default_dtype("float64")
    return BatchNorm2D(3, epsilon=EPSILON, momentum=0.75), paddle.to_tensor


def main(package: str, folder: Path) -> None:
    distributed = importlib.import_module(f"{package}.train.distributed")
    device = importlib.import_module(f"{package}.device").select_device("cpu")
    distributed.init_distributed(device)
    rank, _, _ = distributed.launched_rank()
    layer, to_tensor = (torch_layer if package == "mobilenetv3_ref" else paddle_layer)()
    for parameter, value in zip((layer.weight, layer.bias), (WEIGHT, BIAS), strict=True):
        parameter.data = to_tensor(np.array(value))
    start = sum(SHARES[:rank])
    images, cotangent = (to_tensor(array[start : start + SHARES[rank]]) for array in batch())

    layer.eval()
    plain = layer(images).detach().numpy()
    names = list(layer.state_dict())
    layer = distributed.convert_sync_batchnorm(layer)
    assert list(layer.state_dict()) == names
    evaluated = layer(images).detach().numpy()

    layer.train()
    images.stop_gradient, images.requires_grad = False, True  # the one's word for it and the other's
    y = layer(images)
    (y * cotangent).sum().backward()
    buffers = [tensor.numpy() for name, tensor in layer.state_dict().items() if name not in ("weight", "bias")]
    found = {"y": y.detach(), "dx": images.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}
    found |= dict(zip(("running_mean", "running_var", "num_batches_tracked"), buffers, strict=True))
    found |= {"eval": evaluated, "eval, plain": plain}
    np.savez(folder / f"{rank}.npz", **{name: np.asarray(array) for name, array in found.items()})
    distributed.shut_down()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
