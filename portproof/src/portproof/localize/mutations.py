"""Mutations of the reference: layers with a known mistake, by type, that NumPy alone cannot compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations, product
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd  # these bases have no public names

from portproof.localize.layers import ROUNDINGS
from portproof.python39 import zip_strict

Mutation = Callable[[Any], nn.Module]  # of a module of its type
Mistake = tuple[str, Mutation]  # (in words, its mutation)
Mistakes = Iterator[Mistake]
Arrays = Sequence[np.ndarray]  # the module's inputs

POOLS = ((nn.AvgPool2d, nn.MaxPool2d), (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d))  # (mean, maximum)
UPSAMPLE_MODES = {3: ("nearest", "linear"), 4: ("nearest", "bilinear", "bicubic"), 5: ("nearest", "trilinear")}


def setting(**attributes: Any) -> Mutation:
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


def zeroed(*names: str) -> Mutation:
    return with_tensors(torch.zeros_like, names)


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


def _of_precision(module: nn.Module, inputs: Arrays) -> Mistakes:
    for words, change in ROUNDINGS.items():

        def rounded(weight: torch.Tensor, change: Callable = change) -> torch.Tensor:
            return torch.from_numpy(change(weight.numpy(force=True))).to(weight.device)

        yield words, with_tensors(rounded)


def _of_kernel(module: _ConvNd, inputs: Arrays) -> Mistakes:
    sizes = module.kernel_size
    if any(size > 1 for size in sizes):
        axes = tuple(range(2, 2 + len(sizes)))
        yield "the kernel is turned by 180 degrees", with_tensors(lambda weight: weight.flip(axes))
        if len(sizes) == 2 and sizes[0] == sizes[1]:
            yield "height and width of the kernel are exchanged", with_tensors(lambda weight: weight.mT)
    if module.in_channels == module.out_channels and module.groups == 1:
        exchanged = with_tensors(lambda weight: weight.transpose(0, 1))
        yield "input and output channels of the weight are exchanged", exchanged


def _convolution(module: _ConvNd, inputs: Arrays) -> Mistakes:
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


def _padded_like_same(module: _ConvNd) -> nn.Module:
    """Asymmetric padding, as "SAME" in TensorFlow and Paddle."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        pads = []
        axes = zip_strict(x.shape[2:], module.kernel_size, module.stride, module.dilation)
        for size, kernel, stride, dilation in reversed(list(axes)):
            total = max(0, (math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size)
            pads += [total // 2, total - total // 2]
        return module._conv_forward(F.pad(x, pads), module.weight, module.bias)

    return setting(forward=forward, padding=(0,) * len(module.kernel_size))(module)


def _transposed_convolution(module: _ConvTransposeNd, inputs: Arrays) -> Mistakes:
    yield from _other_values(module, padding=(0, 1, 2, 3), output_padding=(0, 1), stride=(1, 2), dilation=(1,))
    axes = len(module.kernel_size)
    for padding, output_padding in product((0, 1, 2), (0, 1)):  # both changed: keeps the size
        if padding != module.padding[0] and output_padding != module.output_padding[0]:
            words = f"padding is {padding}, not {_short(module.padding)}, and output_padding {output_padding}"
            yield words, setting(padding=(padding,) * axes, output_padding=(output_padding,) * axes)


def _embedding(module: nn.Embedding, inputs: Arrays) -> Mistakes:
    own = module.padding_idx
    if own is not None:
        yield f"it has no padding_idx: row {own} gets a gradient", setting(padding_idx=None)
    received = set(inputs[0].flat) if inputs else set()
    for row in sorted({0, 1, module.num_embeddings - 1} & received):  # others do not show
        if row != own:
            yield f"padding_idx is {row}, not {own}: that row gets no gradient", setting(padding_idx=row)
        yield f"padding_idx is {row}, and its row gives zeros, as Paddle's does", partial(_padded_with_zeros, row=row)


def _padded_with_zeros(module: nn.Embedding, row: int) -> nn.Module:
    with torch.no_grad():
        module.weight[row] = 0
    return setting(padding_idx=row)(module)


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


def _of_axes(module: nn.MultiheadAttention | nn.RNNBase, inputs: Arrays) -> Mistakes:
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
        yield "the biases of query, key and value are missing, or zero", zeroed("in_proj_bias")
        yield "the bias of out_proj is missing, or zero", zeroed("out_proj.bias")
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
            yield f"{words} missing, or zero", zeroed(*biases)
    backward = {name: name.removesuffix("_reverse") for name in names if name.endswith("_reverse")}
    if backward:
        yield "its two directions are exchanged", exchanging(backward)
    if gates == "h":
        is_layer = isinstance(module, nn.RNNBase)
        own = getattr(module, "mode" if is_layer else "nonlinearity").lower().removeprefix("rnn_")
        other = "relu" if own == "tanh" else "tanh"
        changed = setting(mode=f"RNN_{other.upper()}") if is_layer else setting(nonlinearity=other)
        yield f"its activation is {other}, not {own}", changed


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


MISTAKES: dict[tuple, tuple[Callable[[Any, Arrays], Mistakes], ...]] = {
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): (_convolution, _of_kernel, _of_precision),
    (_ConvTransposeNd,): (_transposed_convolution, _of_kernel, _of_precision),
    (*POOLS[0], *POOLS[1]): (_pool,),
    (nn.Embedding,): (_embedding,),
    (nn.Upsample,): (_upsample,),
    (nn.MultiheadAttention,): (_attention, _of_axes),
    (nn.LSTM, nn.LSTMCell): (partial(_recurrent, gates="ifgo"), _of_axes),
    (nn.GRU, nn.GRUCell): (partial(_recurrent, gates="rzn"), _of_axes),
    (nn.RNN, nn.RNNCell): (partial(_recurrent, gates="h"), _of_axes),
}


def mutations(module: nn.Module, inputs: Arrays = ()) -> Mistakes:
    """The known mistakes of its type; `inputs` are what it received."""
    for mistakes in next((known for types, known in MISTAKES.items() if isinstance(module, types)), ()):
        yield from mistakes(module, inputs)
