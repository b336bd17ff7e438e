"""Causes of a difference in one module, each tried: does the reference, so changed, give what the port gives?

A cause is reported only if it explains the difference: what is left of it is under a thousandth, for every item that
differs. So none is a guess; where none explains it, none is named.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import nn

LEFT = 1e-3  # of the difference: what an explanation may leave
Change = Callable[[nn.Module], nn.Module]
Items = dict[str, np.ndarray]

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


def setting(**attributes) -> Change:
    """The module with other attributes."""

    def change(module: nn.Module) -> nn.Module:
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    return change


def instead(factory: Callable[[], nn.Module]) -> Change:
    """Another module in its place."""
    return lambda module: factory()


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """The module with one of its tensors changed, as if it had been loaded wrong."""

    def changed(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            tensor = getattr(module, name)
            tensor.copy_(change(tensor.clone()))
        return module

    return changed


@dataclass(frozen=True)
class Alone:
    """One module run alone on both sides, in one precision."""

    module: nn.Module  # the reference's
    ref: Items  # what it gave
    port: Items  # what the port's gave
    bad: list[str]  # the items that differ
    inputs: list[np.ndarray]
    inner: Items  # what the modules inside it gave, by their names
    rerun: Callable[[Change], Items]  # the reference's module, changed, on the same


def explains(items: Mapping[str, np.ndarray], alone: Alone) -> bool:
    """Whether `items` are what the port gave, up to a thousandth of the difference, wherever the two sides differ."""
    for name in alone.bad:
        ref, port, found = alone.ref.get(name), alone.port.get(name), items.get(name)
        if found is None or port is None or found.shape != port.shape or not np.isfinite(found).all():
            return False
        difference = np.abs(ref - port).max() if ref is not None and ref.shape == port.shape else np.abs(port).max()
        if not np.abs(found - port).max() <= LEFT * difference:
            return False
    return True


def _norm_changes(module: nn.Module) -> Iterator[tuple[str, Change]]:
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


def _convolution_changes(module: nn.Module) -> Iterator[tuple[str, Change]]:
    kernel, dims = module.kernel_size, range(2, module.weight.dim())
    for padding in sorted({0, 1, 2, 3, kernel[0] // 2, (kernel[0] - 1) // 2 * module.dilation[0]}):
        if (padding,) * len(kernel) != module.padding:
            yield f"padding is {padding}, not {_short(module.padding)}", setting(padding=(padding,) * len(kernel))
    for mode in ("reflect", "replicate", "circular"):
        pads = [pad for pad in reversed(module.padding) for _ in range(2)]
        change = setting(padding_mode=mode, _reversed_padding_repeated_twice=pads)
        yield f"padding repeats the image ({mode}), not zeros", change
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
    yield from _bias_changes(module)


def _linear_changes(module: nn.Module) -> Iterator[tuple[str, Change]]:
    if module.in_features == module.out_features:
        yield "the weight is not transposed (Paddle keeps it as in x out)", with_tensor("weight", lambda w: w.T)
    yield from _bias_changes(module)


def _bias_changes(module: nn.Module) -> Iterator[tuple[str, Change]]:
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


def _pool_changes(module: nn.Module) -> Iterator[tuple[str, Change]]:
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


def changes(module: nn.Module) -> Iterator[tuple[str, Change]]:
    """(cause, the reference's module as it would be then) for every cause that its type can have."""
    if isinstance(module, NORMS):
        yield from _norm_changes(module)
    elif isinstance(module, CONVOLUTIONS):
        yield from _convolution_changes(module)
    elif isinstance(module, nn.Linear):
        yield from _linear_changes(module)
    elif isinstance(module, POOLS):
        yield from _pool_changes(module)
    elif not any(module.children()) and not any(module.parameters()):
        for name, factory in ACTIVATIONS.items():
            yield f"it is {name}, not {type(module).__name__}", instead(factory)


def _fitted_epsilon(alone: Alone) -> str:
    """The epsilon with which the reference gives what the port gives, if there is one."""
    name = alone.bad[0]

    def left(exponent: float) -> float:
        return float(np.abs(alone.rerun(setting(eps=10.0**exponent))[name] - alone.port[name]).max())

    near = math.log10(alone.module.eps or 1e-12)
    best = min((minimize_scalar(left, bounds=(near - w, near + w), method="bounded", options={"xatol": 1e-12})
                for w in (0.01, 4.0)), key=lambda found: found.fun)  # fmt: skip
    epsilon = 10.0**best.x
    if explains(alone.rerun(setting(eps=epsilon)), alone):
        return f"epsilon is {epsilon:.6g}, not {alone.module.eps:g}"
    return ""


def _statistics(alone: Alone) -> Iterator[tuple[str, Items]]:
    """(cause, buffers) for momenta taken otherwise and for the biased variance."""
    module, x = alone.module, alone.inputs[0]
    count = x.size // x.shape[1]
    means = [name for name in alone.ref if name.endswith(("running_mean", "running_var"))]
    before = {name: getattr(module, name.rpartition(".")[2]).double().numpy() for name in means}
    m = module.momentum
    if m is None:
        return
    batch = {name: (alone.ref[name] - (1 - m) * before[name]) / m for name in means}
    for momentum in (m, 1 - m, *MOMENTA):
        for biased in (False, True):
            share = {name: (count - 1) / count if biased and name.endswith("var") else 1.0 for name in means}
            found = {name: (1 - momentum) * before[name] + momentum * share[name] * batch[name] for name in means}
            words = ["the running variance is the biased one, sum / n (torch's is sum / (n - 1))"] * biased
            if momentum != m:
                meaning = " (Paddle's momentum is the share of the OLD value)" if momentum == 1 - m else ""
                words.append(f"the batch's share in the running statistics is {momentum:g}, not {m:g}{meaning}")
            if words:
                yield "; ".join(words), found
    yield "the running statistics are not updated", before


def _broadcast(operation: Callable, one: np.ndarray, other: np.ndarray, like: np.ndarray) -> np.ndarray:
    """`operation` on both where their shapes broadcast to that of `like`, else nothing that could explain anything."""
    try:
        result = operation(one, other)
    except ValueError:
        return np.empty(0)
    return result if result.shape == like.shape else np.empty(0)


def _relations(alone: Alone) -> Iterator[tuple[str, Items]]:
    """(cause, items) for outputs or gradients that are related as a whole: scaled, shifted, permuted, the input."""
    name = alone.bad[0]
    ref, port = alone.ref.get(name), alone.port.get(name)
    if ref is None or port is None:
        return
    rest = {other: alone.port[other] for other in alone.bad if other in alone.port}  # only the first is explained
    for i, x in enumerate(alone.inputs):
        if name.startswith("output") and x.dtype.kind == "f" and x.shape == port.shape:
            what = f"input {i}" if len(alone.inputs) > 1 else "its input"
            yield f"it returns {what} unchanged", rest | {name: x}
            if x.shape == ref.shape:
                yield f"it does not add {what} (a residual connection is missing)", rest | {name: ref - x}
                yield f"it adds {what} (a residual connection too many)", rest | {name: ref + x}
            for child, array in alone.inner.items() if name.startswith("output") else ():
                yield f"it adds {what} to what {child} gives", rest | {name: _broadcast(np.add, array, x, ref)}
                yield (
                    f"it multiplies {what} with what {child} gives",
                    rest | {name: _broadcast(np.multiply, array, x, ref)},
                )
    for child, array in alone.inner.items() if name.startswith("output") else ():
        yield f"it returns what {child} gives", rest | {name: array}
    if ref.ndim >= 2:
        for a in range(ref.ndim):
            yield f"axis {a} is reversed", rest | {name: np.flip(ref, a)}
            for b in range(a + 1, ref.ndim):
                if ref.shape[a] == ref.shape[b]:
                    yield f"axes {a} and {b} are exchanged", rest | {name: np.swapaxes(ref, a, b)}
    if ref.shape == port.shape and np.abs(ref).max() > 0:
        factor = float((ref * port).sum() / (ref * ref).sum())
        yield (
            f"it is {factor:.6g} times the reference's, everywhere",
            {other: factor * alone.ref[other] for other in alone.bad if other in alone.ref},
        )
        shift = float((port - ref).mean())
        yield f"it is the reference's plus {shift:.6g}, everywhere", rest | {name: ref + shift}
        for word, factory in ACTIVATIONS.items():
            if word != "no activation" and name.startswith("output"):
                with torch.no_grad():
                    after = factory()(torch.from_numpy(np.array(ref))).numpy()
                yield f"{word} is applied to what it returns", rest | {name: after}


def tested_causes(alone: Alone) -> list[str]:
    """The causes that explain what differs, in words; the plainest first."""
    found = []
    if all(name.startswith("buffer") for name in alone.bad):
        if isinstance(alone.module, BATCH_NORMS):
            found = [text for text, items in _statistics(alone) if explains(items, alone)]
        return found[:1]
    if all(name not in alone.port for name in alone.bad):
        return ["the port sends no gradient through (stop_gradient, detach, no_grad)"]
    for text, change in changes(alone.module):
        try:
            items = alone.rerun(change)
        except Exception:  # a change that does not fit these shapes explains nothing
            continue
        if explains(items, alone):
            found.append(text)
    if not found and isinstance(alone.module, NORMS):
        found = [text for text in [_fitted_epsilon(alone)] if text]
    if not found:
        found = [text for text, items in _relations(alone) if explains(items, alone)][:1]
    return found[:3]
