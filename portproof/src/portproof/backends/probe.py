"""Probe inputs and probe weights, from a seed: a network in which no fault can hide.

With a network's initial weights in eval mode the signal dies on its way (logits around 1e-13), and with batch-norm
parameters at their defaults no ReLU output passes 6 and no hard-sigmoid saturates. Probe weights keep every layer's
activations of order 1 and reach every branch of every activation: batch-norm weights and biases are drawn off their
defaults, running statistics are measured on probe images, and layers with a bias get biases spread over all branches.
Where the inputs are given, of a model that may be small, normalizations are spread too, and each channel is wide enough
to reach several branches itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from portproof.backends import backend
from portproof.backends.drawn import probe_images
from portproof.backends.model import BackendModel
from portproof.backends.trace import Inputs, ModuleCall, as_call, is_array, map_tensors, tensors_in

# Range of a biased layer's mean outputs, by the activation that is called next: well past its breakpoints.
SPREAD = {"ReLU": (-4.0, 9.0), "ReLU6": (-4.0, 9.0), "Hardsigmoid": (-5.0, 5.0), "Hardswish": (-6.0, 6.0)}
SPREAD_ELSE = (-3.0, 3.0)
NORM_WIDTH = 3.0
FILTERS = 64  # drawn at a time, which takes less memory than all at once
WIDTH = 2.0  # of a channel's own values around their mean, in a model of any kind
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _draw(model: nn.Module, rng: np.random.Generator) -> None:
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            # Every filter of one length, no channel nearly constant: batch norm would magnify its rounding errors.
            for filters in module.weight.split(FILTERS):
                weight = rng.normal(size=filters.shape)
                weight *= np.sqrt(2) / np.sqrt((weight**2).sum(axis=tuple(range(1, weight.ndim)), keepdims=True))
                filters.copy_(torch.from_numpy(weight))
        elif isinstance(module, (*BATCH_NORMS, *OTHER_NORMS)) and module.weight is not None:
            weight = rng.uniform(0.5, 2, module.weight.shape)
            module.weight.copy_(torch.from_numpy(weight))
            if module.bias is not None:
                module.bias.copy_(torch.from_numpy(weight * rng.uniform(-0.5, 0.5, weight.shape)))
        elif isinstance(module, nn.Embedding):  # whose own are drawn without a seed; the row that pads stays as it is
            rows = [i for i in range(module.num_embeddings) if i != module.padding_idx]
            module.weight[rows] = torch.from_numpy(rng.normal(size=(len(rows), module.embedding_dim))).to(module.weight)
        else:  # a parameter of one value throughout says little: all its elements could change places
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point() and (parameter == parameter.flatten()[0]).all():
                    parameter.copy_(torch.from_numpy(rng.uniform(0.2, 0.8, parameter.shape)))


def _wide(low: float, high: float, n: int) -> np.ndarray:
    """`n` means from `low` to `high`, neither end included: with WIDTH around it each reaches a breakpoint."""
    return np.linspace(low, high, n + 2)[1:-1]


def _spread_hook(means_of: Callable[[int], np.ndarray], width: float, rng: np.random.Generator) -> Callable:
    """A pre-hook that scales a layer's outputs to the size `width` and gives its channels the means of `means_of`."""

    done = set()

    def spread(module: nn.Module, inputs: tuple) -> None:
        if module in done:  # called again in the same pass
            return
        done.add(module)
        module.bias.zero_()
        output = next(iter(tensors_in(module.forward(*inputs), torch.is_tensor)))
        unit = output.std() / width if output.numel() > 1 else 0.0
        if not unit > 0:  # its input is constant, an RNN's first state: wait for the next call
            done.discard(module)
            return
        module.weight.div_(unit)
        channels = output.dim() - 1 if isinstance(module, nn.Linear) else 1
        means = (output / unit).mean([d for d in range(output.dim()) if d != channels])
        targets = torch.from_numpy(rng.permutation(means_of(len(means)))).to(means.dtype)
        module.bias.copy_(targets - means)

    return spread


def _spread(model: nn.Module, called_next: dict[str, str], rng: np.random.Generator) -> list[RemovableHandle]:
    """Have all that has a bias reach every branch of what follows it, whichever model it is; of norms at once."""
    handles = []
    for name, module in model.named_modules():
        if getattr(module, "bias", None) is None or name not in called_next:
            continue
        is_other_activation = called_next[name] in nn.modules.activation.__all__  # else it may be a function
        low, high = SPREAD.get(called_next[name], SPREAD_ELSE if is_other_activation else SPREAD["ReLU"])
        means_of = functools.partial(_wide, low, high)
        if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
            handles.append(module.register_forward_pre_hook(_spread_hook(means_of, WIDTH, rng)))
        elif isinstance(module, (*BATCH_NORMS, *OTHER_NORMS)):
            module.weight.mul_(NORM_WIDTH)
            module.bias.mul_(NORM_WIDTH)
    return handles


def _called_next(model: nn.Module, call: ModuleCall) -> dict[str, str]:
    """{module without children: the class of the one that is called after its first call}."""
    called, handles, before = [], [], [(module, module.training) for module in model.modules()]
    model.eval()
    for name, module in model.named_modules():
        if not any(module.children()):
            note = lambda module, _, name=name: called.append((name, type(module).__name__))  # noqa: E731
            handles.append(module.register_forward_pre_hook(note))
    model(*call.args, **call.kwargs)
    for handle in handles:
        handle.remove()
    for module, training in before:
        module.training = training
    pairs = list(zip(called, [*called[1:], ("", "")]))
    return {name: next_type for (name, _), (_, next_type) in reversed(pairs)}


@torch.no_grad()
def probe_weights(
    model: nn.Module, seed: int, inputs: Inputs | None = None, train: bool = True
) -> dict[str, np.ndarray]:
    """A state_dict for `model` as arrays; `model` itself is left with it, in train mode.

    `inputs` are what running statistics and activations are measured on; without them 16 probe images of 96 x 64.
    Where the model does not run on them in train mode, with `train` false, running statistics are drawn.
    """
    rng = np.random.default_rng([seed, 1])
    _draw(model, rng)
    call = as_call([probe_images(rng, 16, 96, 64)] if inputs is None else inputs)
    call.args, call.kwargs = map_tensors((call.args, call.kwargs), is_array, lambda a: torch.from_numpy(np.array(a)))
    called_next, momenta = _called_next(model, call), {}
    handles = [] if inputs is None else _spread(model, called_next, rng)
    model.train(train)
    for name, module in model.named_modules():
        if inputs is None and isinstance(module, CONVOLUTIONS) and module.bias is not None and name in called_next:
            means_of = functools.partial(np.linspace, *SPREAD.get(called_next[name], SPREAD_ELSE))
            handles.append(module.register_forward_pre_hook(_spread_hook(means_of, 1.0, rng)))
        elif isinstance(module, BATCH_NORMS):
            momenta[module], module.momentum = module.momentum, 1.0  # the running statistics become the batch's
            if not train and module.running_var is not None:
                module.running_mean.copy_(torch.from_numpy(rng.uniform(-0.5, 0.5, module.num_features)))
                module.running_var.copy_(torch.from_numpy(rng.uniform(0.5, 2, module.num_features)))
        elif isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # its mask would not come from the seed
    torch_backend = backend("torch")
    with torch_backend.runs.seeded(seed), torch_backend.runs.without_dropout():
        model(*call.args, **call.kwargs)
    for handle in handles:
        handle.remove()
    for module, momentum in momenta.items():
        module.momentum = momentum
    return {name: torch_backend.to_array(tensor) for name, tensor in model.state_dict().items()}


def load_probe_weights(ref: BackendModel, seed: int, inputs: Inputs, runs_in_train: bool = False) -> None:
    """Give the reference `probe_weights` of `seed`, measured on `inputs`: in train mode, if it runs in that on them.

    That is tried, unless it is known that it `runs_in_train`.
    """
    train = runs_in_train or not ref.run(inputs, "float32", train=True).trace.error
    with ref.lent("", "float32", train) as model:
        arrays = probe_weights(model, seed, inputs, train)
    ref.load({key: arrays[key] for key in ref.tensor_keys})
