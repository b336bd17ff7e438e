"""Mutations of the reference: for each type of layer, what it would be with a known mistake in it."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

Mutation = Callable[[nn.Module], nn.Module]

EPSILONS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 0.0)
MOMENTA = (0.1, 0.9, 0.01, 0.99, 0.001, 0.999, 0.05, 0.95, 0.03, 0.97)
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "no activation": nn.Identity,
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "hard-swish": nn.Hardswish,
    "swish": nn.SiLU,
    "GELU": nn.GELU,
    "GELU, the tanh approximation": lambda: nn.GELU("tanh"),
    "hard-sigmoid": nn.Hardsigmoid,
    "hard-sigmoid with slope 0.2": lambda: _Function(lambda x: (0.2 * x + 0.5).clamp(0, 1)),
    "hard-sigmoid with slope 0.1666667, Paddle's default": lambda: _Function(
        lambda x: (0.1666667 * x + 0.5).clamp(0, 1)
    ),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "leaky ReLU, slope 0.01": nn.LeakyReLU,
    "leaky ReLU, slope 0.1": lambda: nn.LeakyReLU(0.1),
    "leaky ReLU, slope 0.2": lambda: nn.LeakyReLU(0.2),
    "ELU": nn.ELU,
    "Mish": nn.Mish,
    "softplus": nn.Softplus,
    "hard-tanh": nn.Hardtanh,
    "softmax over the last axis": lambda: nn.Softmax(-1),
    "softmax over axis 1": lambda: nn.Softmax(1),
}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d)
BATCH_NORMS = NORMS[:3]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLS = (nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


class _Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def setting(**attributes) -> Mutation:
    """The module with other attributes."""

    def mutation(module: nn.Module) -> nn.Module:
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    return mutation


def instead(factory: Callable[[], nn.Module]) -> Mutation:
    """Another module in its place."""
    return lambda module: factory()


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    """The module with one of its tensors changed, as if it had been loaded wrong."""

    def mutation(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            tensor = getattr(module, name)
            tensor.copy_(change(tensor.clone()))
        return module

    return mutation


def _norm_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    for value in EPSILONS:
        if value != module.eps:
            yield f"epsilon is {value:g}, not {module.eps:g}", setting(eps=value)
    if isinstance(module, BATCH_NORMS):
        mode = "its running statistics" if module.training else "the batch's own statistics"
        yield f"it normalizes with {mode}", lambda m: m.train(not m.training)
        yield "running mean and variance were not loaded (0 and 1)", lambda m: m.reset_running_stats() or m
        yield "running variance was not loaded (1)", with_tensor("running_var", torch.ones_like)
        yield "running mean was not loaded (0)", with_tensor("running_mean", torch.zeros_like)
        yield "its running variance is used as a standard deviation", with_tensor("running_var", lambda v: v**2)
    if module.weight is not None:
        yield "weight was not loaded (1)", with_tensor("weight", torch.ones_like)
        yield "bias was not loaded (0)", with_tensor("bias", torch.zeros_like)
        yield "weight and bias were not loaded (1 and 0)", lambda m: m.reset_parameters() or m
        weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
        yield (
            "weight and bias are exchanged",
            lambda m: with_tensor("bias", lambda _: weight)(with_tensor("weight", lambda _: bias)(m)),
        )


def _convolution_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    kernel, dims = module.kernel_size, range(2, module.weight.dim())
    for padding in sorted({0, 1, 2, 3, kernel[0] // 2, (kernel[0] - 1) // 2 * module.dilation[0]}):
        if (padding,) * len(kernel) != module.padding:
            yield f"padding is {padding}, not {_short(module.padding)}", setting(padding=(padding,) * len(kernel))
    for mode in ("reflect", "replicate", "circular"):
        pads = [pad for pad in reversed(module.padding) for _ in range(2)]
        padded = setting(padding_mode=mode, _reversed_padding_repeated_twice=pads)
        yield f"padding repeats the image ({mode}), not zeros", padded
    if any(stride > 1 for stride in module.stride):
        yield "padding is that of 'SAME': one more at the end than at the start", _padded_like_same
    for stride in (1, 2):
        if (stride,) * len(kernel) != module.stride:
            yield f"stride is {stride}, not {_short(module.stride)}", setting(stride=(stride,) * len(kernel))
    for dilation in (1, 2):
        if (dilation,) * len(kernel) != module.dilation:
            yield f"dilation is {dilation}, not {_short(module.dilation)}", setting(dilation=(dilation,) * len(kernel))
    if any(size > 1 for size in kernel):
        yield (
            "the kernel is turned by 180 degrees (a convolution, not a correlation)",
            with_tensor("weight", lambda w: w.flip(tuple(dims))),
        )
        if len(kernel) == 2 and kernel[0] == kernel[1]:
            yield "height and width of the kernel are exchanged", with_tensor("weight", lambda w: w.transpose(2, 3))
    if module.in_channels == module.out_channels and module.groups == 1:
        yield (
            "input and output channels of the weight are exchanged",
            with_tensor("weight", lambda w: w.transpose(0, 1)),
        )
    yield from _bias_mutations(module)


def _linear_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    if module.in_features == module.out_features:
        yield "the weight is not transposed (Paddle keeps it as in x out)", with_tensor("weight", lambda w: w.T)
    yield from _bias_mutations(module)


def _bias_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    if module.bias is not None:
        yield "the bias is missing, or zero", with_tensor("bias", torch.zeros_like)
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        yield f"the weight went through {name}", with_tensor("weight", lambda w, d=dtype: w.to(d).to(w.dtype))


def _padded_like_same(module: nn.Module) -> nn.Module:
    """Asymmetric padding, as TensorFlow and Paddle's "SAME" have it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        pads = []
        for size, kernel, stride, dilation in zip(
            reversed(x.shape[2:]),
            *(reversed(v) for v in (module.kernel_size, module.stride, module.dilation)),
            strict=True,
        ):
            total = max(0, (math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size)
            pads += [total // 2, total - total // 2]
        return module._conv_forward(nn.functional.pad(x, pads), module.weight, module.bias)

    bare = _Function(forward)
    bare.module = setting(padding=(0,) * len(module.kernel_size))(module)
    return bare


def _pool_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    if isinstance(module, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d):
        other, word = (
            (nn.AdaptiveMaxPool2d, "the maximum, not the mean")
            if isinstance(module, nn.AdaptiveAvgPool2d)
            else (nn.AdaptiveAvgPool2d, "the mean, not the maximum")
        )
        yield f"it takes {word}", instead(lambda: other(module.output_size))
        return
    where = {"kernel_size": module.kernel_size, "stride": module.stride, "padding": module.padding}
    if isinstance(module, nn.AvgPool2d):
        flag = not module.count_include_pad
        yield (
            f"padding {'counts' if flag else 'does not count'} in the mean (Paddle's exclusive is {not flag})",
            setting(count_include_pad=flag),
        )
        yield "it takes the maximum, not the mean", instead(lambda: nn.MaxPool2d(**where))
    else:
        yield "it takes the mean, not the maximum", instead(lambda: nn.AvgPool2d(**where))
    yield f"ceil_mode is {not module.ceil_mode}", setting(ceil_mode=not module.ceil_mode)
    for name, values in (("padding", (0, 1)), ("stride", (1, 2, 3)), ("kernel_size", (2, 3))):
        for value in values:
            if value != getattr(module, name):
                yield f"{name} is {value}, not {_short(getattr(module, name))}", setting(**{name: value})


def _short(value) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(set(value)) == 1 else str(value)


def mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    """(mistake in words, what makes it of the reference's module) for every mistake known of its type."""
    if isinstance(module, NORMS):
        yield from _norm_mutations(module)
    elif isinstance(module, CONVOLUTIONS):
        yield from _convolution_mutations(module)
    elif isinstance(module, nn.Linear):
        yield from _linear_mutations(module)
    elif isinstance(module, POOLS):
        yield from _pool_mutations(module)
    elif not any(module.children()) and not list(module.parameters()):
        for name, factory in ACTIVATIONS.items():
            yield f"it is {name}, not {type(module).__name__}", instead(factory)
