"""The reference's side of a comparison: builds a model in a precision and records what flows through it, as arrays."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mobilenetv3_ref.models.weights import to_arrays

from .gates import BENDS


@dataclass
class Recording:
    """By module name, in execution order: every module's output, every gate's input, the largest value that came in."""

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    gate_inputs: dict[str, np.ndarray] = field(default_factory=dict)
    input_scales: dict[str, float] = field(default_factory=dict)
    error: str = ""  # what the forward pass raised; the recording ends there


class ExactHardsigmoid(nn.Module):
    """relu6(x + 3) / 6: the native backward holds 1/6 as a float32 constant, 3e-8 off, even in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu6(x + 3) / 6


def build(
    factory: Callable[[], nn.Module], arrays: Mapping[str, np.ndarray], dtype: str, device: torch.device
) -> nn.Module:
    """`factory()` with the weights `arrays`, in "float32" or as the "float64" truth.

    The truth takes two constants as a float32 run has them, or as they are meant: batch norm's epsilon is the float32
    nearest to it (4.7e-8 off, the value that both frameworks' float32 kernels use; Paddle's float64 kernel too), and
    hard-sigmoid's slope is one sixth.
    """
    model = factory()
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    if dtype == "float64":
        model = copy.deepcopy(model).double()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = float(np.float32(module.eps))
            for name, child in module.named_children():
                if isinstance(child, nn.Hardsigmoid):
                    setattr(module, name, ExactHardsigmoid())
    return model.to(device)


def layer_types(model: nn.Module) -> dict[str, str]:
    """{dotted name: class name} of every module."""
    return {name: type(module).__name__.removeprefix("Exact") for name, module in model.named_modules()}


def is_container(module: nn.Module) -> bool:
    """Whether its output is only its last child's."""
    return isinstance(module, nn.Sequential)


@contextmanager
def recording(model: nn.Module) -> Iterator[Recording]:
    """Record every forward pass of `model` in this context; the whole model's output is called "logits"."""
    record, handles = Recording(), []

    def hook(name: str, is_gate: bool) -> Callable:
        def store(module, inputs, output) -> None:
            record.outputs[name or "logits"] = output.detach().cpu().numpy().copy()
            record.input_scales[name] = float(inputs[0].detach().abs().max())
            if is_gate:
                record.gate_inputs[name] = inputs[0].detach().cpu().numpy().copy()

        return store

    types = layer_types(model)
    for name, module in model.named_modules():
        if not is_container(module):
            handles.append(module.register_forward_hook(hook(name, types[name] in BENDS)))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def to_tensor(array: np.ndarray, model: nn.Module) -> torch.Tensor:
    """`array` on the model's device, in the model's precision if it is floating point."""
    parameter = next(model.parameters())
    tensor = torch.from_numpy(np.array(array))
    return tensor.to(parameter.device, parameter.dtype if tensor.is_floating_point() else None)


@torch.no_grad()
def run_forward(model: nn.Module, images: np.ndarray, train: bool) -> Recording:
    """One forward pass of `images` (N, 3, H, W); in train mode the outputs end with the batch-norm buffers after it."""
    model.train(train)
    with recording(model) as record:
        model(to_tensor(images, model))
    if train:
        record.outputs.update(buffers(model))
    return record


def buffers(model: nn.Module) -> dict[str, np.ndarray]:
    """Batch norm's running statistics and counts."""
    return to_arrays(dict(model.named_buffers()))


def parameters(model: nn.Module) -> dict[str, np.ndarray]:
    """All trained parameters."""
    return to_arrays(dict(model.named_parameters()))


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    """The gradients of all trained parameters; one that received none is missing."""
    return to_arrays({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def loss_and_gradient(
    criterion: nn.Module, logits: np.ndarray, labels: np.ndarray, device: torch.device
) -> dict[str, np.ndarray]:
    """The criterion's loss, and its gradient with respect to the logits (N, C), in their precision."""
    x = torch.tensor(logits, device=device, requires_grad=True)
    loss = criterion(x, torch.tensor(labels, device=device))
    loss.backward()
    return {"loss": loss.detach().cpu().numpy(), "gradient": x.grad.cpu().numpy()}
