"""Probe inputs and probe weights, from a seed: a network in which no fault can hide.

With a network's initial weights in eval mode the signal dies on its way (logits around 1e-13), and with batch-norm
parameters at their defaults no ReLU output passes 6 and no squeeze gate saturates. Probe weights keep every layer's
activations of order 1 and reach every branch of every activation: batch-norm weights and biases are drawn off their
defaults, running statistics are measured on probe images, and layers with a bias get biases spread over all branches.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from mobilenetv3_ref.models.weights import to_arrays

# Range of a biased layer's mean outputs, by the activation behind it: well past its bends on both sides.
SPREAD = {"fc1": (-4.0, 9.0), "fc2": (-5.0, 5.0), "classifier.0": (-6.0, 6.0), "classifier.3": (-3.0, 3.0)}


def probe_images(rng: np.random.Generator, n: int, height: int, width: int) -> np.ndarray:
    """(n, 3, height, width), float32, of order 1: coarse patches plus noise, each image with its own tint and contrast.

    White noise alone would give every image the same pooled features. Heights and widths are multiples of 16.
    """
    coarse = rng.normal(size=(n, 3, height // 16, width // 16)).repeat(16, axis=2).repeat(16, axis=3)
    noise = rng.normal(size=(n, 3, height, width))
    tint, contrast = rng.normal(size=(n, 3, 1, 1)), rng.uniform(0.5, 1.5, size=(n, 1, 1, 1))
    return ((0.7 * coarse + 0.6 * noise) * contrast + 0.5 * tint).astype(np.float32)


def _draw(model: nn.Module, rng: np.random.Generator) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = rng.normal(size=module.weight.shape)
            # Every filter of one length, no channel nearly constant: batch norm would magnify its rounding errors.
            weight *= np.sqrt(2) / np.sqrt((weight**2).sum(axis=tuple(range(1, weight.ndim)), keepdims=True))
            module.weight.copy_(torch.from_numpy(weight))
        elif isinstance(module, nn.BatchNorm2d):
            weight = rng.uniform(0.5, 2, module.weight.shape)
            module.weight.copy_(torch.from_numpy(weight))
            module.bias.copy_(torch.from_numpy(weight * rng.uniform(-0.5, 0.5, weight.shape)))


def _spread_hook(low: float, high: float, rng: np.random.Generator) -> Callable:
    """A pre-hook that scales a layer's outputs to unit size and spreads its channels' means from `low` to `high`."""

    def spread(module, inputs) -> None:
        module.bias.zero_()
        output = module.forward(inputs[0])
        module.weight.div_(output.std())
        means = (output / output.std()).mean([d for d in range(output.dim()) if d != 1])
        targets = torch.from_numpy(rng.permutation(np.linspace(low, high, len(means)))).to(means.dtype)
        module.bias.copy_(targets - means)

    return spread


@torch.no_grad()
def probe_weights(model: nn.Module, seed: int) -> dict[str, np.ndarray]:
    """A state_dict for `model`, a MobileNetV3 of `mobilenetv3_ref`, as arrays; `model` itself is left with it."""
    rng = np.random.default_rng([seed, 1])
    _draw(model, rng)
    handles = []
    for name, module in model.named_modules():
        key = next((key for key in SPREAD if name.endswith(key)), None)
        if key:
            handles.append(module.register_forward_pre_hook(_spread_hook(*SPREAD[key], rng)))
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum, momentum = 1.0, module.momentum  # the running statistics become the batch's
        elif isinstance(module, nn.Dropout):
            module.eval()  # its mask would not come from the seed
    model(torch.from_numpy(probe_images(rng, 16, 96, 64)))
    for handle in handles:
        handle.remove()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    return to_arrays(model.state_dict())
