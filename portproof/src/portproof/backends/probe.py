"""Probe inputs and probe weights: a network in which no fault can hide.

With initial weights in eval mode the signal dies (logits around 1e-13); with default batch norm no ReLU output passes 6
and no hard-sigmoid saturates. Probe weights keep activations of order 1 and reach every branch of every activation:
batch norm gets random weights and biases, running statistics are measured on probe images, other biases are spread. For
given inputs, whose model may be small, normalizations are spread too, and each channel reaches several branches itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from portproof.backends import backend
from portproof.backends.branches import reach_more
from portproof.backends.drawn import even_filters, probe_images
from portproof.backends.lent import patched
from portproof.backends.model import LARGE, BackendModel
from portproof.backends.trace import Inputs, ModuleCall, as_call, is_array, map_tensors, tensors_in

# Range of a biased layer's mean outputs, by the next activation: well past its breakpoints.
SPREAD = {"ReLU": (-4.0, 9.0), "ReLU6": (-4.0, 9.0), "Hardsigmoid": (-5.0, 5.0), "Hardswish": (-6.0, 6.0)}
SPREAD_ELSE = (-3.0, 3.0)
NORM_WIDTH = 3.0
OWN_WIDTH = 8.0  # of a class of its own before an activation, whose scale of 1 was drawn from 0.2 to 0.8
FILTERS = 64  # drawn at a time, to save memory
WIDTH = 2.0  # spread of a channel's values, in any model
STALE = 0.25  # running statistics are off a batch's by up to this share
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _draw(model: nn.Module, rng: np.random.Generator) -> None:
    set_value = backend("torch").set_value
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            for filters in module.weight.split(FILTERS):
                set_value(filters, even_filters(rng, filters.shape))
        elif isinstance(module, NORMS) and module.weight is not None:
            weight = rng.uniform(0.5, 2, module.weight.shape)
            set_value(module.weight, weight)
            if module.bias is not None:
                set_value(module.bias, weight * rng.uniform(-0.5, 0.5, weight.shape))
        elif isinstance(module, nn.Embedding):  # its own are unseeded; its padding row stays
            rows = [i for i in range(module.num_embeddings) if i != module.padding_idx]
            drawn = rng.normal(size=(len(rows), module.embedding_dim))
            module.weight[rows] = torch.from_numpy(drawn).to(module.weight)
        else:  # a constant parameter would hide permuted elements; a frozen number is a constant of the formula
            for parameter in module.parameters(recurse=False):
                is_number = parameter.numel() == 1 and not parameter.requires_grad
                is_constant = parameter.is_floating_point() and (parameter == parameter.flatten()[0]).all()
                if is_constant and not is_number:
                    set_value(parameter, rng.uniform(0.2, 0.8, parameter.shape))


def _spread_hook(low: float, high: float, wide: bool, rng: np.random.Generator) -> Callable:
    """A pre-hook that scales a layer's outputs, with channel means from `low` to `high`.

    The values of a `wide` channel have spread WIDTH, so that it reaches a breakpoint from any mean, and no mean is
    `low` or `high`. Else their spread is 1.
    """
    done = set()

    def spread(module: nn.modules.conv._ConvNd | nn.Linear, inputs: tuple) -> None:
        if module in done:  # called twice in this pass
            return
        assert module.bias is not None
        module.bias.zero_()
        output = next(iter(tensors_in(module.forward(*inputs), torch.is_tensor)))
        unit = output.std() / (WIDTH if wide else 1.0) if output.numel() > 1 else 0.0
        if not unit > 0:  # constant input, an RNN's first state: wait
            return
        done.add(module)
        module.weight.div_(unit)
        # A vector has one value a channel; inputs may be without a batch.
        behind = 0 if isinstance(module, nn.Linear) else len(module.kernel_size)
        channels = (output / unit).movedim(output.dim() - 1 - behind, 0)
        means = channels.reshape(len(channels), -1).mean(1)
        targets = np.linspace(low, high, len(means))
        if wide:
            targets = np.linspace(low, high, len(means) + 2)[1:-1]
        module.bias.copy_(torch.from_numpy(rng.permutation(targets)).to(means) - means)

    return spread


def _next_class(model: nn.Module, call: ModuleCall) -> dict[nn.Module, str]:
    """{module without children: class of the module that receives its first output as it is, or ""}, in eval mode."""
    found: dict[nn.Module, str] = {}
    made: dict[int, tuple[nn.Module, Any]] = {}  # {id: (module, its output)}; kept, so that no id is used twice

    def before(module: nn.Module, inputs: tuple) -> None:
        for given in inputs:
            if id(given) in made:
                found[made[id(given)][0]] = type(module).__name__

    def after(module: nn.Module, _: tuple, output: Any) -> None:
        if module not in found:
            found[module] = ""
            made[id(output)] = module, output

    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [leaf.register_forward_pre_hook(before) for leaf in leaves]
    handles += [leaf.register_forward_hook(after) for leaf in leaves]
    model.eval()
    model(*call.args, **call.kwargs)
    for handle in handles:
        handle.remove()
    return found


def _spread(model: nn.Module, call: ModuleCall, wide: bool, rng: np.random.Generator) -> list[RemovableHandle]:
    """Hook biased layers, and norms if `wide`, to reach all branches of what follows."""
    handles = []
    for module, following in _next_class(model, call).items():
        if getattr(module, "bias", None) is None:
            continue
        is_other_activation = following in nn.modules.activation.__all__  # else perhaps a function
        usual = SPREAD["ReLU"] if wide and not is_other_activation else SPREAD_ELSE
        low, high = SPREAD.get(following, usual)
        if isinstance(module, CONVOLUTIONS) or wide and isinstance(module, TRANSPOSED):
            handles.append(module.register_forward_pre_hook(_spread_hook(low, high, wide, rng)))
        elif isinstance(module, NORMS) and wide:
            module.weight.mul_(NORM_WIDTH)
            module.bias.mul_(NORM_WIDTH)
        elif wide and following in SPREAD:  # a norm by hand, say
            for parameter in module.parameters(recurse=False):
                parameter.mul_(OWN_WIDTH)
    return handles


@torch.no_grad()
def probe_weights(
    model: nn.Module, seed: int, inputs: Inputs | None = None, train: bool = True
) -> dict[str, np.ndarray]:
    """A random state_dict for `model`, which keeps it and stays in train mode.

    Running statistics and activations are measured on `inputs`, by default 16 probe images of 96 x 64. Given inputs are
    those of the comparison: statistics that were theirs would stay the same in train mode with any momentum, so they
    are moved. Without `train`, for a model that fails in train mode on them, running statistics are random.
    """
    rng, torch_backend = np.random.default_rng([seed, 1]), backend("torch")
    _draw(model, rng)
    call = as_call([probe_images(rng, 16, 96, 64)] if inputs is None else inputs)
    device = next(chain(model.parameters(), model.buffers()), torch.empty(0)).device
    given = partial(torch_backend.tensor, device=device)
    call.args, call.kwargs = map_tensors((call.args, call.kwargs), is_array, given)
    handles = _spread(model, call, inputs is not None, rng)
    model.train(train)
    in_one_pass = {}  # momentum 1: the batch's statistics
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            in_one_pass[module, "momentum"] = 1.0
            if not train and module.running_var is not None:
                torch_backend.set_value(module.running_mean, rng.uniform(-0.5, 0.5, module.num_features))
                torch_backend.set_value(module.running_var, rng.uniform(0.5, 2, module.num_features))
    with patched(in_one_pass), torch_backend.runs.seeded(seed), torch_backend.runs.without_dropout():
        model(*call.args, **call.kwargs)
    for handle in handles:
        handle.remove()
    if train and inputs is not None:
        _move_statistics(model, rng)
    _undo_what_it_writes(model, call, seed)
    return torch_backend.state_arrays(model)


def _undo_what_it_writes(model: nn.Module, call: ModuleCall, seed: int) -> None:
    """Move parameters that the model's own forward pass changes, such as a masked kernel: a port has to, too.

    By a tenth of their mean size, if a pass in either mode changes that. Those of a large model are not tried.
    """
    parameters = [each for each in model.parameters() if each.is_floating_point() and each.numel()]
    if sum(parameter.numel() for parameter in parameters) > LARGE:
        return
    before = [parameter.clone() for parameter in parameters]
    shifts = [0.1 * parameter.abs().mean() for parameter in parameters]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for parameter, shift in zip(parameters, shifts):
        parameter.add_(shift)
    was_training = model.training
    for train in (False, True):
        model.train(train)
        with suppress(Exception), backend("torch").runs.seeded(seed):  # it may not run so, or with these numbers
            model(*call.args, **call.kwargs)
    model.train(was_training)
    drawn = torch.Generator().manual_seed(seed)
    for parameter, own, shift in zip(parameters, before, shifts):
        is_written = not torch.equal(parameter, own + shift)
        parameter.copy_(own)
        if is_written:  # a variance stays positive
            lowest = 0 if (own >= 0).all() else -1
            parameter.add_(shift * torch.empty(own.shape).uniform_(lowest, 1, generator=drawn).to(own))
    for name, buffer in model.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])


def _move_statistics(model: nn.Module, rng: np.random.Generator) -> None:
    """By up to STALE of a channel's deviation, and of its variance."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and module.running_var is not None:
            factors = rng.uniform(-STALE, STALE, (2, module.num_features))
            assert module.running_mean is not None
            shift, growth = (torch.from_numpy(row).to(module.running_var) for row in factors)
            module.running_mean.add_(shift * module.running_var.sqrt())
            module.running_var.mul_(1 + growth)


def load_probe_weights(
    ref: BackendModel, seed: int, inputs: Inputs, modes: Sequence[str] = (), drawn: bool = False
) -> Inputs:
    """Give the reference `probe_weights`, in train mode if it runs in that, which is tried.

    -> the inputs. In the last of the `modes` parameters get other values where more branches of operations are entered
    with them, and so do floats among `drawn` inputs.
    """
    train = "train" in modes or not ref.run(inputs, "float32", train=True).trace.error
    with ref.lent("", "float32", train) as model:
        arrays = probe_weights(model, seed, inputs, train)
    pairs = ((key, arrays.pop(key)) for key in ref.tensor_keys)
    ref.load(ref.kept(pairs))
    for mode in modes if any(ref.branches.values()) else ():
        ref.run_watched(inputs, mode == "train")
    if ref.never_entered(modes, wished=True):
        return reach_more(ref, inputs, modes, drawn)
    return inputs
