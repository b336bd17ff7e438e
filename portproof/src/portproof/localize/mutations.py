"""Mutations of the reference: for each type of layer, what it would be with a known mistake in it."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from portproof.python39 import zip_strict

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
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
ROW_NORMS = (nn.LayerNorm, *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []))  # torch has had it since 2.4
NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, *ROW_NORMS, nn.GroupNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin)
RECURRENT = {  # {layer or cell: its gates, as their weights are stacked}
    **dict.fromkeys((nn.LSTM, nn.LSTMCell), "ifgo"),
    **dict.fromkeys((nn.GRU, nn.GRUCell), "rzn"),
    **dict.fromkeys((nn.RNN, nn.RNNCell), "h"),
}
UPSAMPLE_MODES = {3: ("nearest", "linear"), 4: ("nearest", "bilinear", "bicubic"), 5: ("nearest", "trilinear")}
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
    return with_tensors([name], change)


def with_tensors(names: Sequence[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    """The module with each of these tensors changed alike."""

    def mutation(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for name in names:
                tensor = getattr(module, name)
                tensor.copy_(change(tensor.clone()))
        return module

    return mutation


def around(change: Callable[[nn.Module, tuple], object]) -> Mutation:
    """In the module's place `change(module, its arguments)`."""

    def mutation(module: nn.Module) -> nn.Module:
        function = _Function(lambda *args: change(module, args))
        function.module = module
        return function

    return mutation


def _epsilon(module: nn.Module) -> str:
    """A norm's epsilon, in words."""
    return "the dtype's own" if module.eps is None else f"{module.eps:g}"


def _norm_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    for value in EPSILONS:
        if value != module.eps:
            yield f"epsilon is {value:g}, not {_epsilon(module)}", setting(eps=value)
    if isinstance(module, nn.GroupNorm):
        for groups in range(1, module.num_channels + 1):
            if module.num_channels % groups == 0 and groups != module.num_groups:
                yield f"it has {groups} groups, not {module.num_groups}", setting(num_groups=groups)
    if isinstance(module, ROW_NORMS):
        yield from _row_norm_mutations(module)
    if isinstance(module, BATCH_NORMS):
        mode = "its running statistics" if module.training else "the batch's own statistics"
        yield f"it normalizes with {mode}", lambda m: m.train(not m.training)
        yield "running mean and variance were not loaded (0 and 1)", lambda m: m.reset_running_stats() or m
        yield "running variance was not loaded (1)", with_tensor("running_var", torch.ones_like)
        yield "running mean was not loaded (0)", with_tensor("running_mean", torch.zeros_like)
        yield "its running variance is used as a standard deviation", with_tensor("running_var", lambda v: v**2)
    if module.weight is not None:
        yield "weight was not loaded (1)", with_tensor("weight", torch.ones_like)
    if module.weight is not None and getattr(module, "bias", None) is not None:
        yield "bias was not loaded (0)", with_tensor("bias", torch.zeros_like)
        yield "weight and bias were not loaded (1 and 0)", lambda m: m.reset_parameters() or m
        weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
        yield (
            "weight and bias are exchanged",
            lambda m: with_tensor("bias", lambda _: weight)(with_tensor("weight", lambda _: bias)(m)),
        )


def _row_norm_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    """A LayerNorm or RMSNorm that a port writes itself, in other formulas."""

    def normalized(module: nn.Module, x: torch.Tensor, centred: bool, unbiased: bool, outside: bool) -> torch.Tensor:
        dims = tuple(range(-len(module.normalized_shape), 0))
        centre = x.mean(dims, keepdim=True) if centred else torch.zeros_like(x)
        count = math.prod(module.normalized_shape) - unbiased
        variance = ((x - centre) ** 2).sum(dims, keepdim=True) / count
        epsilon = torch.finfo(x.dtype).eps if module.eps is None else module.eps
        scale = variance.sqrt() + epsilon if outside else (variance + epsilon).sqrt()
        y = (x - centre) / scale
        y = y if module.weight is None else y * module.weight
        return y if getattr(module, "bias", None) is None else y + module.bias

    is_centred = isinstance(module, nn.LayerNorm)
    own = {"centred": is_centred, "unbiased": False, "outside": False}
    for text, other in (
        ("its variance is sum / (n - 1), not sum / n", {"unbiased": True}),
        ("epsilon is added to the standard deviation, not to the variance", {"outside": True}),
        ("variance is sum / (n - 1) and epsilon is added to its root", {"unbiased": True, "outside": True}),
        (f"it {'does not subtract' if is_centred else 'subtracts'} the mean", {"centred": not is_centred}),
    ):
        options = own | other
        yield text, around(lambda module, args, options=options: normalized(module, args[0], **options))


def _transposed_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    dims = len(module.kernel_size)
    for name, values in (("padding", (0, 1, 2, 3)), ("output_padding", (0, 1)), ("stride", (1, 2)), ("dilation", (1,))):
        for value in values:
            if (value,) * dims != getattr(module, name):
                words = f"{name} is {value}, not {_short(getattr(module, name))}"
                yield words, setting(**{name: (value,) * dims})
    pairs = [(p, q) for p in (0, 1, 2) for q in (0, 1) if p != module.padding[0] and q != module.output_padding[0]]
    for padding, output_padding in pairs:  # what keeps the size: both changed
        words = f"padding is {padding}, not {_short(module.padding)}, and output_padding {output_padding}"
        yield words, setting(padding=(padding,) * dims, output_padding=(output_padding,) * dims)
    yield "the kernel is turned by 180 degrees", with_tensor("weight", lambda w: w.flip(tuple(range(2, w.dim()))))
    if module.in_channels == module.out_channels and module.groups == 1:
        words = "input and output channels of the weight are exchanged"
        yield words, with_tensor("weight", lambda w: w.transpose(0, 1))
    yield from _bias_mutations(module)


def _embedding_mutations(module: nn.Embedding, received: set[int]) -> Iterator[tuple[str, Mutation]]:
    own = module.padding_idx

    def without_row(row: int) -> Mutation:
        def zeroed(weight: torch.Tensor) -> torch.Tensor:
            weight[row] = 0.0
            return weight

        return lambda m: setting(padding_idx=row)(with_tensor("weight", zeroed)(m))

    if own is not None:
        yield f"it has no padding_idx: row {own} gets a gradient", setting(padding_idx=None)
    for row in sorted({0, 1, module.num_embeddings - 1} & received):  # of others nothing can be told
        if row != own:
            yield f"padding_idx is {row}, not {own}: that row gets no gradient", setting(padding_idx=row)
        yield f"padding_idx is {row}, and its row gives zeros, as Paddle's does", without_row(row)


def _softmax_mutations(module: nn.Module, ndim: int) -> Iterator[tuple[str, Mutation]]:
    for axis in range(ndim):
        if module.dim is None or axis != module.dim % ndim:
            yield f"it is over axis {axis}, not {module.dim}", setting(dim=axis)
    for other in SOFTMAXES:
        if not isinstance(module, other):
            yield f"it is {other.__name__}, not {type(module).__name__}", instead(lambda o=other: o(module.dim))
    yield "it is no activation", instead(nn.Identity)


def _upsample_mutations(module: nn.Upsample, ndim: int) -> Iterator[tuple[str, Mutation]]:
    for mode in UPSAMPLE_MODES.get(ndim, ()):
        for corners in (None,) if mode == "nearest" else (False, True):
            words = [f"mode is {mode}, not {module.mode}"] * (mode != module.mode)
            if corners is not None and corners != bool(module.align_corners):
                words.append(f"align_corners is {corners}, not {module.align_corners}")
            if words:
                yield "; ".join(words), setting(mode=mode, align_corners=corners)


def _attention_mutations(module: nn.MultiheadAttention, ndim: int) -> Iterator[tuple[str, Mutation]]:
    width, heads = module.embed_dim, module.num_heads
    if module.in_proj_weight is not None:
        names = ["in_proj_weight"] + ["in_proj_bias"] * (module.in_proj_bias is not None)
        for places, which in (
            ((1, 0, 2), "query and key"),
            ((0, 2, 1), "key and value"),
            ((2, 1, 0), "query and value"),
        ):
            words = f"the projections of {which} are exchanged"
            yield words, with_tensors(names, lambda t, places=places: _blocks_in_order(t, places))
        for factor, words in ((width / heads, "not divided by sqrt(head_dim)"),
                              (1 / heads, "divided by sqrt(embed_dim), not sqrt(head_dim)")):  # fmt: skip
            scaled = with_tensors(names, lambda t, f=factor: torch.cat([t[:width] * f**0.5, t[width:]]))
            yield f"the products of query and key are {words}", scaled
    if module.in_proj_bias is not None:
        yield "the biases of query, key and value are missing, or zero", with_tensor("in_proj_bias", torch.zeros_like)
        yield "the bias of out_proj is missing, or zero", lambda m: _bias_zeroed(m, m.out_proj)
    for other in range(1, width + 1):
        if width % other == 0 and other != heads:
            yield f"it has {other} heads, not {heads}", setting(num_heads=other, head_dim=width // other)
    yield from _batch_first_mutation(module, ndim)


def _bias_zeroed(module: nn.Module, child: nn.Module) -> nn.Module:
    with_tensor("bias", torch.zeros_like)(child)
    return module


def _batch_first_mutation(module: nn.Module, ndim: int) -> Iterator[tuple[str, Mutation]]:
    if ndim == 3:
        axes = ("(batch, time)", "(time, batch)")[:: 1 if module.batch_first else -1]
        yield f"axes 0 and 1 are taken for {axes[1]}, not {axes[0]}", setting(batch_first=not module.batch_first)


def _blocks_in_order(tensor: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Its rows in equal blocks, in another order."""
    blocks = tensor.chunk(len(places))
    return torch.cat([blocks[place] for place in places])


def _recurrent_mutations(module: nn.Module, gates: str, ndim: int) -> Iterator[tuple[str, Mutation]]:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    stacked = [name for name in names if name.startswith(("weight_ih", "weight_hh", "bias"))]
    for order in list(itertools.permutations(range(len(gates))))[1:]:
        # The port takes for its i-th gate what torch keeps at that place: torch's order of its weights is the inverse.
        named = ", ".join(gates[place] for place in order)
        inverse = [order.index(place) for place in range(len(gates))]
        words = f"its gates are in the order {named} (torch's is {', '.join(gates)})"
        yield words, with_tensors(stacked, lambda t, inverse=inverse: _blocks_in_order(t, inverse))
    if gates == "rzn":

        def negated(t: torch.Tensor) -> torch.Tensor:
            r, z, n = t.chunk(3)
            return torch.cat([r, -z, n])  # sigmoid(-x) is 1 - sigmoid(x)

        yield (
            "the update gate z keeps the new state: z * n + (1 - z) * h, not (1 - z) * n + z * h",
            with_tensors(stacked, negated),
        )
    for which in ("bias_ih", "bias_hh", "bias"):
        biases = [name for name in names if name.startswith(which)]
        if biases:
            words = "both biases are" if which == "bias" else f"{which} is"
            yield f"{words} missing, or zero", with_tensors(biases, torch.zeros_like)
    backward = [name for name in names if name.endswith("_reverse")]
    if backward:
        yield "its two directions are exchanged", lambda m: _exchanged(m, backward)
    if gates == "h":
        layer = isinstance(module, nn.RNNBase)
        own = module.mode if layer else module.nonlinearity
        other = "relu" if own.lower().endswith("tanh") else "tanh"
        options = {"mode": f"RNN_{other.upper()}"} if layer else {"nonlinearity": other}
        yield f"its activation is {other}, not {own.lower().removeprefix('rnn_')}", setting(**options)
    if isinstance(module, nn.RNNBase):
        yield from _batch_first_mutation(module, ndim)


def _exchanged(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """The module with each of these tensors and the one without "_reverse" exchanged."""
    with torch.no_grad():
        for name in names:
            one, other = getattr(module, name), getattr(module, name.removesuffix("_reverse"))
            before = one.clone()
            one.copy_(other)
            other.copy_(before)
    return module


def _dropout_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    yield (
        f"it gives {1 - module.p:g} times its input where nothing is dropped (Paddle's mode downscale_in_infer)",
        instead(lambda: _Function(lambda x: x * (1 - module.p))),
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
        for size, kernel, stride, dilation in zip_strict(
            reversed(x.shape[2:]), *(reversed(v) for v in (module.kernel_size, module.stride, module.dilation))
        ):
            total = max(0, (math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size)
            pads += [total // 2, total - total // 2]
        return module._conv_forward(nn.functional.pad(x, pads), module.weight, module.bias)

    bare = _Function(forward)
    bare.module = setting(padding=(0,) * len(module.kernel_size))(module)
    return bare


@dataclass(frozen=True)
class Fit:
    """A number in a module that can be fitted to what another gives."""

    mutation: Callable[[float], Mutation]  # of the number that is searched, such as a logarithm
    bounds: list[tuple[float, float]]  # of that number, near the usual one and wide
    text: Callable[[float], str]  # the mistake in words


def fits(module: nn.Module) -> Iterator[Fit]:
    """The numbers in the reference's module that are worth fitting where no known mistake is found."""
    if isinstance(module, NORMS):
        near = math.log10(module.eps or 1e-12)
        yield Fit(
            lambda x: setting(eps=10.0**x),
            [(near - width, near + width) for width in (0.01, 4.0)],
            lambda x: f"epsilon is {10.0**x:.6g}, not {_epsilon(module)}",
        )
    elif type(module).__name__ in nn.modules.activation.__all__ and not list(module.parameters()):
        kind = type(module).__name__
        for word, number, function, bounds in (
            ("leaky ReLU", "slope", lambda x, s: torch.where(x > 0, x, s * x), (-1.0, 1.0)),
            ("hard-sigmoid", "slope", lambda x, s: (s * x + 0.5).clamp(0, 1), (0.1, 0.4)),
            ("ELU", "alpha", nn.functional.elu, (0.0, 4.0)),
            ("softplus", "beta", nn.functional.softplus, (0.01, 10.0)),
        ):
            yield Fit(
                lambda s, function=function: instead(lambda: _Function(lambda x: function(x, s))),
                [bounds],
                lambda s, word=word, number=number: f"it is {word}, {number} {s:.6g}, not {_named(module, kind)}",
            )


def _named(module: nn.Module, kind: str) -> str:
    """An activation's class, with what tells it from others of that class."""
    own = {"LeakyReLU": "negative_slope", "ELU": "alpha", "Softplus": "beta", "GELU": "approximate"}.get(kind)
    return f"{kind}, {own} {getattr(module, own)}" if own else kind


def _pool_mutations(module: nn.Module) -> Iterator[tuple[str, Mutation]]:
    if isinstance(module, (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)):
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


def mutations(module: nn.Module, inputs: Sequence[np.ndarray] = ()) -> Iterator[tuple[str, Mutation]]:
    """(mistake in words, what makes it of the reference's module) for every mistake known of its type.

    `inputs` are what the module received.
    """
    ndim = inputs[0].ndim if inputs else 0
    gates = next((gates for layer, gates in RECURRENT.items() if isinstance(module, layer)), "")
    if isinstance(module, NORMS):
        yield from _norm_mutations(module)
    elif isinstance(module, CONVOLUTIONS):
        yield from _convolution_mutations(module)
    elif isinstance(module, nn.Linear):
        yield from _linear_mutations(module)
    elif isinstance(module, POOLS):
        yield from _pool_mutations(module)
    elif isinstance(module, TRANSPOSED):
        yield from _transposed_mutations(module)
    elif isinstance(module, nn.Embedding):
        yield from _embedding_mutations(module, set(inputs[0].flat) if inputs else set())
    elif isinstance(module, SOFTMAXES):
        yield from _softmax_mutations(module, ndim)
    elif isinstance(module, nn.Upsample):
        yield from _upsample_mutations(module, ndim)
    elif isinstance(module, nn.MultiheadAttention):
        yield from _attention_mutations(module, ndim)
    elif isinstance(module, nn.modules.dropout._DropoutNd):  # the base of all of them has no public name
        yield from _dropout_mutations(module)
    elif gates:
        yield from _recurrent_mutations(module, gates, ndim)
    elif not any(module.children()) and not list(module.parameters()):
        for name, factory in ACTIVATIONS.items():
            yield f"it is {name}, not {_named(module, type(module).__name__)}", instead(factory)
