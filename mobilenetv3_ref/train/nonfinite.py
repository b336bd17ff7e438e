"""Where NaN or infinity comes from: the first module that gives it without having received it."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mobilenetv3_ref.models.layers import BatchNorm2d
from mobilenetv3_ref.models.sync_batch_norm import SyncBatchNorm2d

STATISTICS = ("running_mean", "running_var")
CRITERION = "criterion"
NOT_FOUND = (
    "this batch alone, run again, gives finite values everywhere: "
    "another process's batch, an earlier one of its group, or mixed precision"
)


@dataclass
class Call:
    """One call of a module: what it received and gave, forward and backward."""

    module: nn.Module
    name: str
    input_finite: bool
    largest_input: float
    output_gradient_finite: bool = True
    input_gradient_finite: bool = True


def first_nonfinite(model: nn.Module, criterion: nn.Module, image: Tensor, target: Tensor) -> str:
    """Run the batch that gave NaN or infinity again -> one line that says where it began.

    In this order: the batch itself; a parameter; in forward order a module, the criterion last, whose output is not
    finite though its inputs are; in backward order one whose gradients are not finite though that of its output is.
    Modules within a module come before it. `model` is the one that is not wrapped for several processes, in the mode
    in which it trained. Neither it nor its gradients change, nor does this process wait for others: it works on a
    copy, whose batch norm takes this process's batch alone. What is random is drawn anew: seed dropout as it was.
    """
    for what, tensor in (("images", image), ("targets", target)):
        if not is_finite(tensor):
            return f"the batch itself: {describe(tensor)} of its {what}"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_finite(parameter):
            return f"parameter {name}, before this batch: {describe(parameter)}"
    watched = copy.deepcopy(nn.ModuleDict({"model": model, CRITERION: criterion}))
    for m in watched.modules():
        if isinstance(m, SyncBatchNorm2d | nn.SyncBatchNorm):
            m.__class__ = cast(Any, BatchNorm2d)
    calls, culprits = watch(watched)
    with torch.enable_grad():
        loss = watched[CRITERION](watched["model"](image), target)
        if culprits:
            return culprits[0]
        loss.backward()
    for call in reversed(calls):  # an order in which a backward pass can go, inner modules before outer ones
        wrong = [] if call.input_gradient_finite else ["input"]
        wrong += [name for name, p in own_parameters(call.module) if p.grad is not None and not is_finite(p.grad)]
        if call.output_gradient_finite and wrong:
            return f"backward, {call.name}: its output's gradient is finite, that of its {wrong[0]} is not"
    return NOT_FOUND


def watch(model: nn.Module) -> tuple[list[Call], list[str]]:
    """Hooks on every module -> (its calls, in the order they begin; what is wrong forward, innermost first)."""
    calls: list[Call] = []
    running: list[Call] = []
    culprits: list[str] = []

    def before(module: nn.Module, args: tuple) -> tuple:
        inputs = [tensor for tensor in tensors_in(args) if tensor.is_floating_point()]
        largest = max(
            (cast(float, tensor.detach().abs().max().item()) for tensor in inputs if tensor.numel()), default=0.0
        )
        call = Call(module, names[module], all(map(is_finite, inputs)), largest)
        calls.append(call)
        running.append(call)

        def own(value: Any) -> Any:  # a copy, because the gradient of what others use too is that of all uses
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            value = value.clone()
            value.register_hook(lambda gradient: note(call, "input_gradient_finite", gradient))
            return value

        return tuple(own(value) for value in args)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        call = running.pop()
        for tensor in tensors_in(output):
            if call.input_finite and not is_finite(tensor):
                culprits.append(f"forward, {call.name}: {reason(call, tensor)}")
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: note(call, "output_gradient_finite", gradient))

    names = {}
    for path, module in model.named_modules():
        if module is model:
            continue
        name = path.removeprefix("model").removeprefix(".") or "the model itself"
        names[module] = f"{name} ({type(module).__name__})"
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    return calls, culprits


def note(call: Call, what: str, gradient: Tensor) -> None:
    """Remember in `call` whether the gradient is finite."""
    setattr(call, what, getattr(call, what) and is_finite(gradient))


def reason(call: Call, output: Tensor) -> str:
    """Its own statistic or frozen parameter that is not finite, or else what it received and what it gave."""
    for name, tensor in own_state(call.module):
        if not is_finite(tensor):
            return f"{describe(tensor)} of its {name}"
    return f"{describe(output)} of its output, out of finite inputs of at most {call.largest_input:.1e}"


def own_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, parameter) of the module itself, without those of modules within it."""
    return [(name, parameter) for name, parameter in module.named_parameters() if "." not in name]


def own_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, tensor) of the module itself that it computes with: no running statistics in train mode."""
    unused = STATISTICS if module.training else ()
    return [(name, tensor) for name, tensor in module.state_dict().items() if "." not in name and name not in unused]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's arguments or output: itself, or in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return bool(torch.isfinite(tensor.detach()).all())


def describe(tensor: Tensor) -> str:
    """How many values are not finite."""
    return f"NaN or infinity in {int((~torch.isfinite(tensor.detach())).sum())} of {int(tensor.numel())} values"
