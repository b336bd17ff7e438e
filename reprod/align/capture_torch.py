"""The reference's side of a comparison: builds a model in a precision and records what flows through it, as arrays."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from mobilenetv3_ref.models.weights import to_arrays

from .exact_torch import exact_constants
from .gates import BENDS
from .recording import Call, Recording, call_label, map_tensors, tensors_at, tensors_in


def build(
    factory: Callable[[], nn.Module], arrays: Mapping[str, np.ndarray], dtype: str, device: torch.device
) -> nn.Module:
    """`factory()` with the weights `arrays`, in "float32" or "float64"."""
    model = factory()
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    if dtype == "float64":
        model = copy.deepcopy(model).double()
    return model.to(device)


def layer_types(model: nn.Module) -> dict[str, str]:
    """{dotted name: class name} of every module."""
    return {name: type(module).__name__ for name, module in model.named_modules()}


def is_container(module: nn.Module) -> bool:
    """Whether its output is only its last child's."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """A copy of `tensor`, which a later operation in place cannot change."""
    return tensor.detach().cpu().numpy().copy()


def _arrays(value: Any) -> Any:
    return map_tensors(value, torch.is_tensor, to_array)


def _scale(value: Any) -> float:
    floats = [tensor for tensor in tensors_in(value, torch.is_tensor) if tensor.is_floating_point() and tensor.numel()]
    return max((float(tensor.detach().abs().max()) for tensor in floats), default=0.0)


@contextmanager
def recording(model: nn.Module, whole: str = "logits", calls: bool = False) -> Iterator[Recording]:
    """Record every forward pass of `model` in this context, in float64 with exact constants.

    The whole model's output is called `whole`. With `calls` the arguments of every call are kept too, and after a
    backward pass in this context the loss's gradients for what it returned.
    """
    record, handles, running, counts = Recording(), [], [], {}

    def before(name: str, is_gate: bool) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            call = Call(name, counts.get(name, 0), start=sum(counts.values()), scale=_scale((args, kwargs)))
            if calls or is_gate:
                call.args, call.kwargs = _arrays(args), _arrays(kwargs)
            counts[name] = call.number + 1
            running.append(call)

        return hook

    def after(is_gate: bool) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            call, tensors = running.pop(), tensors_at(output, torch.is_tensor)
            call.places, call.outputs = list(tensors), [to_array(tensor) for tensor in tensors.values()]
            call.upstream = [None] * len(tensors)
            record.add(call, is_gate, whole, calls)
            for i, tensor in enumerate(tensors.values() if calls else ()):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient, i=i: call.upstream.__setitem__(i, to_array(gradient)))

        return hook

    for name, module in model.named_modules():
        if name == "" or not is_container(module):
            is_gate = type(module).__name__ in BENDS
            handles.append(module.register_forward_pre_hook(before(name, is_gate), with_kwargs=True))
            handles.append(module.register_forward_hook(after(is_gate), with_kwargs=True))
    try:
        with exact_constants():
            yield record
    finally:
        for handle in handles:
            handle.remove()
        for call in reversed(running if calls else ()):  # what was running when the model raised, the innermost first
            record.calls[call_label(call.name or whole, call.number)] = call


def to_tensor(array: np.ndarray, model: nn.Module) -> torch.Tensor:
    """`array` on the model's device, in the model's precision if it is floating point."""
    parameter = next(model.parameters())
    tensor = torch.from_numpy(np.array(array))
    return tensor.to(parameter.device, parameter.dtype if tensor.is_floating_point() else None)


@torch.no_grad()
def run_forward(model: nn.Module, images: np.ndarray, train: bool) -> Recording:
    """One forward pass of `images` (N, 3, H, W); in train mode with the batch-norm buffers after it."""
    model.train(train)
    with recording(model) as record:
        model(to_tensor(images, model))
    if train:
        record.buffers = buffers(model)
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
