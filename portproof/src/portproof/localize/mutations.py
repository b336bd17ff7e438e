"""Mutations of the reference: layers with a known mistake, by type."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations, product
from operator import attrgetter

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from portproof.python39 import zip_strict

Mutation = Callable[[nn.Module], nn.Module]
Mistake = tuple[str, Mutation]  # (in words, its mutation)
Mistakes = Iterator[Mistake]
Arrays = Sequence[np.ndarray]  # the module's inputs

EPSILONS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 0.0)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
ROW_NORMS = (nn.LayerNorm, *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []))  # since torch 2.4
# These bases have no public names.
TRANSPOSED, DROPOUTS = nn.modules.conv._ConvTransposeNd, nn.modules.dropout._DropoutNd
SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin)
POOLS = ((nn.AvgPool2d, nn.MaxPool2d), (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d))  # (mean, maximum)
UPSAMPLE_MODES = {3: ("nearest", "linear"), 4: ("nearest", "bilinear", "bicubic"), 5: ("nearest", "trilinear")}


def _hard_sigmoid(x: torch.Tensor, slope: float) -> torch.Tensor:
    return (slope * x + 0.5).clamp(0, 1)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ReLU": F.relu,
    "ReLU6": F.relu6,
    "hard-swish": F.hardswish,
    "swish": F.silu,
    "GELU": F.gelu,
    "GELU, the tanh approximation": partial(F.gelu, approximate="tanh"),
    "hard-sigmoid": F.hardsigmoid,
    "hard-sigmoid with slope 0.2": partial(_hard_sigmoid, slope=0.2),
    "hard-sigmoid with slope 0.1666667, Paddle's default": partial(_hard_sigmoid, slope=0.1666667),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky ReLU, slope 0.01": F.leaky_relu,
    "leaky ReLU, slope 0.1": partial(F.leaky_relu, negative_slope=0.1),
    "leaky ReLU, slope 0.2": partial(F.leaky_relu, negative_slope=0.2),
    "ELU": F.elu,
    "Mish": F.mish,
    "softplus": F.softplus,
    "hard-tanh": F.hardtanh,
    "softmax over the last axis": partial(F.softmax, dim=-1),
    "softmax over axis 1": partial(F.softmax, dim=1),
}


def setting(**attributes) -> Mutation:
    def mutation(module: nn.Module) -> nn.Module:
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    return mutation


def with_tensors(change: Callable[[torch.Tensor], torch.Tensor], names: Iterable[str] = ("weight",)) -> Mutation:
    def mutation(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for name in names:
                tensor = attrgetter(name)(module)
                tensor.copy_(change(tensor.clone()))
        return module

    return mutation


def exchanging(pairs: Mapping[str, str]) -> Mutation:
    other = {**pairs, **{second: first for first, second in pairs.items()}}
    return lambda module: setting(**{name: getattr(module, other[name]) for name in other})(module)


def unloaded(*names: str) -> Mutation:
    def mutation(module: nn.Module) -> nn.Module:
        for name in names:
            initial = torch.ones_like if name in ("weight", "running_var") else torch.zeros_like
            with_tensors(initial, [name])(module)
        return module

    return mutation


def _blocks(tensor: torch.Tensor, places: Sequence[int], factors: Sequence[float] = ()) -> torch.Tensor:
    blocks = tensor.chunk(len(places))
    factors = factors or [1.0 for _ in places]
    return torch.cat([blocks[place] * factor for place, factor in zip_strict(places, factors)])


def _other_values(module: nn.Module, **values: Iterable[int]) -> Mistakes:
    for name, of_name in values.items():
        own = getattr(module, name)
        for value in of_name:
            other = (value,) * len(own) if isinstance(own, tuple) else value
            if other != own:
                yield f"{name} is {value}, not {_short(own)}", setting(**{name: other})


def _short(value: object) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(set(value)) == 1 else str(value)


def _other_epsilon(module: nn.Module, value: float) -> Mistake:
    own = "the dtype's own" if module.eps is None else f"{module.eps:g}"
    return f"epsilon is {value:g}, not {own}", setting(eps=value)


def _of_epsilon(module: nn.Module, inputs: Arrays) -> Mistakes:
    yield from (_other_epsilon(module, value) for value in EPSILONS if value != module.eps)


def _of_groups(module: nn.GroupNorm, inputs: Arrays) -> Mistakes:
    for groups in range(1, module.num_channels + 1):
        if module.num_channels % groups == 0 and groups != module.num_groups:
            yield f"it has {groups} groups, not {module.num_groups}", setting(num_groups=groups)


def _of_statistics(module: nn.Module, inputs: Arrays) -> Mistakes:
    mode = "its running statistics" if module.training else "the batch's own statistics"
    yield f"it normalizes with {mode}", lambda m: m.train(not m.training)
    yield "running mean and variance were not loaded (0 and 1)", unloaded("running_mean", "running_var")
    yield "running variance was not loaded (1)", unloaded("running_var")
    yield "running mean was not loaded (0)", unloaded("running_mean")
    yield "its running variance is used as a standard deviation", with_tensors(torch.square, ["running_var"])
    if module.weight is not None and not module.training:
        nothing = unloaded("running_mean", "running_var", "weight", "bias")
        yield "none of its tensors was loaded (weight 1, bias 0, mean 0, variance 1)", nothing


def _of_affine(module: nn.Module, inputs: Arrays) -> Mistakes:
    if module.weight is not None:
        yield "weight was not loaded (1)", unloaded("weight")
        if getattr(module, "bias", None) is not None:
            yield "bias was not loaded (0)", unloaded("bias")
            yield "weight and bias were not loaded (1 and 0)", unloaded("weight", "bias")
            yield "weight and bias are exchanged", exchanging({"weight": "bias"})


def _of_formula(module: nn.Module, inputs: Arrays) -> Mistakes:
    centred = isinstance(module, nn.LayerNorm)
    own = partial(_own_row_norm, centred=centred)
    yield "its variance is sum / (n - 1), not sum / n", partial(own, unbiased=True)
    yield "epsilon is added to the standard deviation, not to the variance", partial(own, outside=True)
    yield "variance is sum / (n - 1) and epsilon is added to its root", partial(own, unbiased=True, outside=True)
    yield f"it {'does not subtract' if centred else 'subtracts'} the mean", partial(own, centred=not centred)


def _own_row_norm(module: nn.Module, centred: bool, unbiased: bool = False, outside: bool = False) -> nn.Module:
    def forward(x: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(-len(module.normalized_shape), 0))
        x = x - x.mean(dims, keepdim=True) if centred else x
        variance = (x**2).sum(dims, keepdim=True) / (math.prod(module.normalized_shape) - unbiased)
        epsilon = torch.finfo(x.dtype).eps if module.eps is None else module.eps
        y = x / (variance.sqrt() + epsilon if outside else (variance + epsilon).sqrt())
        y = y if module.weight is None else y * module.weight
        return y if getattr(module, "bias", None) is None else y + module.bias

    return setting(forward=forward)(module)


def _of_bias_and_precision(module: nn.Module, inputs: Arrays) -> Mistakes:
    if module.bias is not None:
        yield "the bias is missing, or zero", unloaded("bias")
    yield "the weight went through float16", with_tensors(torch.Tensor.half)
    yield "the weight went through bfloat16", with_tensors(torch.Tensor.bfloat16)


def _of_kernel(module: nn.Module, inputs: Arrays) -> Mistakes:
    sizes = module.kernel_size
    if any(size > 1 for size in sizes):
        axes = tuple(range(2, 2 + len(sizes)))
        yield "the kernel is turned by 180 degrees", with_tensors(lambda weight: weight.flip(axes))
        if len(sizes) == 2 and sizes[0] == sizes[1]:
            yield "height and width of the kernel are exchanged", with_tensors(lambda weight: weight.mT)
    if module.in_channels == module.out_channels and module.groups == 1:
        exchanged = with_tensors(lambda weight: weight.transpose(0, 1))
        yield "input and output channels of the weight are exchanged", exchanged


def _convolution(module: nn.Module, inputs: Arrays) -> Mistakes:
    kernel = module.kernel_size
    usual = {0, 1, 2, 3, kernel[0] // 2, (kernel[0] - 1) // 2 * module.dilation[0]}
    yield from _other_values(module, padding=sorted(usual))
    for mode in ("reflect", "replicate", "circular"):
        pads = [pad for pad in reversed(module.padding) for _ in range(2)]
        padded = setting(padding_mode=mode, _reversed_padding_repeated_twice=pads)
        yield f"padding repeats the image ({mode}), not zeros", padded
    if any(stride > 1 for stride in module.stride):
        yield "padding is that of 'SAME': one more at the end than at the start", _padded_like_same
    yield from _other_values(module, stride=(1, 2), dilation=(1, 2))


def _padded_like_same(module: nn.Module) -> nn.Module:
    """Asymmetric padding, as "SAME" in TensorFlow and Paddle."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        pads = []
        axes = zip_strict(x.shape[2:], module.kernel_size, module.stride, module.dilation)
        for size, kernel, stride, dilation in reversed(list(axes)):
            total = max(0, (math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size)
            pads += [total // 2, total - total // 2]
        return module._conv_forward(F.pad(x, pads), module.weight, module.bias)

    return setting(forward=forward, padding=(0,) * len(module.kernel_size))(module)


def _transposed_convolution(module: nn.Module, inputs: Arrays) -> Mistakes:
    yield from _other_values(module, padding=(0, 1, 2, 3), output_padding=(0, 1), stride=(1, 2), dilation=(1,))
    axes = len(module.kernel_size)
    for padding, output_padding in product((0, 1, 2), (0, 1)):  # both changed: keeps the size
        if padding != module.padding[0] and output_padding != module.output_padding[0]:
            words = f"padding is {padding}, not {_short(module.padding)}, and output_padding {output_padding}"
            yield words, setting(padding=(padding,) * axes, output_padding=(output_padding,) * axes)


def _linear(module: nn.Linear, inputs: Arrays) -> Mistakes:
    if module.in_features == module.out_features:
        yield "the weight is not transposed (Paddle keeps it as in x out)", with_tensors(torch.t)


def _embedding(module: nn.Embedding, inputs: Arrays) -> Mistakes:
    own = module.padding_idx
    if own is not None:
        yield f"it has no padding_idx: row {own} gets a gradient", setting(padding_idx=None)
    received = set(inputs[0].flat) if inputs else set()
    for row in sorted({0, 1, module.num_embeddings - 1} & received):  # others do not show
        if row != own:
            yield f"padding_idx is {row}, not {own}: that row gets no gradient", setting(padding_idx=row)
        yield f"padding_idx is {row}, and its row gives zeros, as Paddle's does", partial(_padded_with_zeros, row=row)


def _padded_with_zeros(module: nn.Embedding, row: int) -> nn.Embedding:
    with torch.no_grad():
        module.weight[row] = 0
    return setting(padding_idx=row)(module)


def _softmax(module: nn.Module, inputs: Arrays) -> Mistakes:
    count = inputs[0].ndim if inputs else 0
    for axis in range(count):
        if module.dim is None or axis != module.dim % count:
            yield f"it is over axis {axis}, not {module.dim}", setting(dim=axis)
    for other in SOFTMAXES:
        if not isinstance(module, other):
            yield f"it is {other.__name__}, not {type(module).__name__}", setting(forward=other(module.dim).forward)
    yield "it is no activation", setting(forward=nn.Identity().forward)


def _upsample(module: nn.Upsample, inputs: Arrays) -> Mistakes:
    for mode in UPSAMPLE_MODES.get(inputs[0].ndim, ()) if inputs else ():
        for corners in (None,) if mode == "nearest" else (False, True):
            words = []
            if mode != module.mode:
                words.append(f"mode is {mode}, not {module.mode}")
            if corners is not None and corners != bool(module.align_corners):
                words.append(f"align_corners is {corners}, not {module.align_corners}")
            if words:
                yield "; ".join(words), setting(mode=mode, align_corners=corners)


def _of_axes(module: nn.Module, inputs: Arrays) -> Mistakes:
    if inputs and inputs[0].ndim == 3:
        orders = {True: "(batch, time)", False: "(time, batch)"}
        words = f"axes 0 and 1 are taken for {orders[not module.batch_first]}, not {orders[module.batch_first]}"
        yield words, setting(batch_first=not module.batch_first)


def _attention(module: nn.MultiheadAttention, inputs: Arrays) -> Mistakes:
    width, heads = module.embed_dim, module.num_heads
    names = [name for name in ("in_proj_weight", "in_proj_bias") if getattr(module, name) is not None]
    if module.in_proj_weight is not None:
        exchanges = {"query and key": (1, 0, 2), "key and value": (0, 2, 1), "query and value": (2, 1, 0)}
        for which, places in exchanges.items():
            exchanged = partial(_blocks, places=places)
            yield f"the projections of {which} are exchanged", with_tensors(exchanged, names)
        for square, words in (
            (width / heads, "not divided by sqrt(head_dim)"),
            (1 / heads, "divided by sqrt(embed_dim), not sqrt(head_dim)"),
        ):
            scaled = partial(_blocks, places=range(3), factors=(square**0.5, 1, 1))
            yield f"the products of query and key are {words}", with_tensors(scaled, names)
    if module.in_proj_bias is not None:
        yield "the biases of query, key and value are missing, or zero", unloaded("in_proj_bias")
        yield "the bias of out_proj is missing, or zero", unloaded("out_proj.bias")
    for other in range(1, width + 1):
        if width % other == 0 and other != heads:
            yield f"it has {other} heads, not {heads}", setting(num_heads=other, head_dim=width // other)


def _recurrent(module: nn.Module, inputs: Arrays, gates: str) -> Mistakes:
    """`gates` in the order of the stacked weights."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    stacked = [name for name in names if name.startswith(("weight_ih", "weight_hh", "bias"))]
    for order in list(permutations(range(len(gates))))[1:]:
        # The port's i-th gate is read from torch's i-th place: torch's weights move by the inverse.
        named = ", ".join(gates[place] for place in order)
        inverse = [order.index(place) for place in range(len(gates))]
        words = f"its gates are in the order {named} (torch's is {', '.join(gates)})"
        yield words, with_tensors(partial(_blocks, places=inverse), stacked)
    if gates == "rzn":
        # sigmoid(-x) is 1 - sigmoid(x).
        negated = partial(_blocks, places=range(3), factors=(1, -1, 1))
        words = "the update gate z keeps the new state: z * n + (1 - z) * h, not (1 - z) * n + z * h"
        yield words, with_tensors(negated, stacked)
    for which, words in (("bias_ih", "bias_ih is"), ("bias_hh", "bias_hh is"), ("bias", "both biases are")):
        biases = [name for name in names if name.startswith(which)]
        if biases:
            yield f"{words} missing, or zero", unloaded(*biases)
    backward = {name: name.removesuffix("_reverse") for name in names if name.endswith("_reverse")}
    if backward:
        yield "its two directions are exchanged", exchanging(backward)
    if gates == "h":
        is_layer = isinstance(module, nn.RNNBase)
        own = (module.mode if is_layer else module.nonlinearity).lower().removeprefix("rnn_")
        other = "relu" if own == "tanh" else "tanh"
        changed = setting(mode=f"RNN_{other.upper()}") if is_layer else setting(nonlinearity=other)
        yield f"its activation is {other}, not {own}", changed


def _dropout(module: nn.Module, inputs: Arrays) -> Mistakes:
    kept = 1 - module.p
    words = f"it gives {kept:g} times its input where nothing is dropped (Paddle's mode downscale_in_infer)"
    yield words, setting(forward=lambda x: x * kept)


def _pool(module: nn.Module, inputs: Arrays) -> Mistakes:
    if isinstance(module, nn.AvgPool2d):
        counts = not module.count_include_pad
        words = f"padding {'counts' if counts else 'does not count'} in the mean (Paddle's exclusive is {not counts})"
        yield words, setting(count_include_pad=counts)
    attributes = ("output_size", "kernel_size", "stride", "padding")
    where = [getattr(module, name) for name in attributes if hasattr(module, name)]
    for mean, maximum in POOLS:
        if isinstance(module, mean):
            yield "it takes the maximum, not the mean", setting(forward=maximum(*where).forward)
        elif isinstance(module, maximum):
            yield "it takes the mean, not the maximum", setting(forward=mean(*where).forward)
    if isinstance(module, POOLS[0]):
        yield f"ceil_mode is {not module.ceil_mode}", setting(ceil_mode=not module.ceil_mode)
        yield from _other_values(module, padding=(0, 1), stride=(1, 2, 3), kernel_size=(2, 3))


def _activation(module: nn.Module, inputs: Arrays) -> Mistakes:
    if not any(module.children()) and not list(module.parameters()):  # else it is no activation
        yield f"it is no activation, not {_named(module)}", setting(forward=nn.Identity().forward)
        for name, function in ACTIVATIONS.items():
            yield f"it is {name}, not {_named(module)}", setting(forward=function)


def _named(module: nn.Module) -> str:
    kind = type(module).__name__
    own = {"LeakyReLU": "negative_slope", "ELU": "alpha", "Softplus": "beta", "GELU": "approximate"}.get(kind)
    return f"{kind}, {own} {getattr(module, own)}" if own else kind


MISTAKES: dict[tuple, tuple[Callable[[nn.Module, Arrays], Mistakes], ...]] = {
    BATCH_NORMS: (_of_epsilon, _of_statistics, _of_affine),
    INSTANCE_NORMS: (_of_epsilon, _of_affine),
    ROW_NORMS: (_of_epsilon, _of_formula, _of_affine),
    (nn.GroupNorm,): (_of_epsilon, _of_groups, _of_affine),
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): (_convolution, _of_kernel, _of_bias_and_precision),
    (TRANSPOSED,): (_transposed_convolution, _of_kernel, _of_bias_and_precision),
    (nn.Linear,): (_linear, _of_bias_and_precision),
    (*POOLS[0], *POOLS[1]): (_pool,),
    (nn.Embedding,): (_embedding,),
    SOFTMAXES: (_softmax,),
    (nn.Upsample,): (_upsample,),
    (nn.MultiheadAttention,): (_attention, _of_axes),
    (DROPOUTS,): (_dropout,),
    (nn.LSTM, nn.LSTMCell): (partial(_recurrent, gates="ifgo"), _of_axes),
    (nn.GRU, nn.GRUCell): (partial(_recurrent, gates="rzn"), _of_axes),
    (nn.RNN, nn.RNNCell): (partial(_recurrent, gates="h"), _of_axes),
    (nn.Module,): (_activation,),
}


def mutations(module: nn.Module, inputs: Arrays = ()) -> Mistakes:
    """The known mistakes of its type; `inputs` are what it received."""
    for mistakes in next(known for types, known in MISTAKES.items() if isinstance(module, types)):
        yield from mistakes(module, inputs)


Tunable = tuple[tuple[float, float], Callable[[float], Mistake]]  # (bounds, mistake by number)

ACTIVATION_NUMBERS = (
    ("leaky ReLU, slope", lambda x, slope: torch.where(x > 0, x, slope * x), (-1.0, 1.0)),
    ("hard-sigmoid, slope", _hard_sigmoid, (0.1, 0.4)),
    ("ELU, alpha", F.elu, (0.0, 4.0)),
    ("softplus, beta", F.softplus, (0.01, 10.0)),
)


def tunable_numbers(module: nn.Module) -> Iterator[Tunable]:
    """Numbers worth fitting where no known mistake is found."""
    if isinstance(module, (*BATCH_NORMS, *INSTANCE_NORMS, *ROW_NORMS, nn.GroupNorm)):
        near = math.log10(module.eps or 1e-12)  # the number is its logarithm
        for width in (0.01, 4.0):
            yield (near - width, near + width), lambda logarithm: _other_epsilon(module, 10.0**logarithm)
    elif type(module).__name__ in nn.modules.activation.__all__ and not list(module.parameters()):
        for words, function, bounds in ACTIVATION_NUMBERS:
            yield bounds, partial(_other_activation, module, words, function)


def _other_activation(module: nn.Module, words: str, function: Callable, number: float) -> Mistake:
    return f"it is {words} {number:.6g}, not {_named(module)}", setting(forward=lambda x: function(x, number))
