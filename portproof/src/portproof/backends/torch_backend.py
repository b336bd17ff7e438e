"""PyTorch's backend (see base.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from portproof.backends import draws_torch, fp64_torch
from portproof.backends.base import Backend, Layers, Note, Runs, Tensors, Training, without_tf32
from portproof.backends.branches import watching
from portproof.backends.draws import Draws
from portproof.backends.lent import patched
from portproof.backends.masks import Keep, alpha_scaled, scaled
from portproof.backends.slots import Named
from portproof.backends.trace import tensors_in
from portproof.convert.rules import Change, identity
from sturdyio.cli import UserError
from sturdyio.pth import load_pth

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DROPOUTS: set[Callable] = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
    *(torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_),
}
ATTENTION, RAND = F.scaled_dot_product_attention, torch.rand
EXACT = 40.0  # above it, log(1 + exp(x)) is x in float64
UNBATCHED = {"dropout1d": 2, "dropout3d": 4}  # dimensions of an input without a batch


def _lent(native: Callable, keep: Keep) -> Callable:
    name, alpha = native.__name__.rstrip("_"), "alpha" in native.__name__
    in_place = native.__name__.endswith("_")

    def call(
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = not alpha,
        inplace: bool = in_place,
        train: bool | None = None,
    ) -> torch.Tensor:
        training = training if train is None else train
        whole = input.dim() if name in ("dropout", "alpha_dropout") else 2 - (input.dim() == UNBATCHED.get(name))
        shape = (*input.shape[:whole], *[1] * (input.dim() - whole))  # 1: the whole channel
        kept = keep(p, shape) if training and p else None
        if kept is None:
            return input
        scale = alpha_scaled if alpha else scaled
        factor, summand = (torch.as_tensor(array).to(input) for array in scale(kept, p))
        return input.mul_(factor).add_(summand) if inplace else input * factor + summand

    return call


def _lent_attention(keep: Keep) -> Callable:
    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> torch.Tensor:
        kept = keep(dropout_p, (*query.shape[:-1], key.shape[-2])) if dropout_p else None
        if kept is None:
            return ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **rest)
        one = torch.eye(key.shape[-2]).to(value).expand(*value.shape[:-1], -1)
        weights = ATTENTION(query, key, one, attn_mask, 0.0, is_causal, **rest)
        if rest.get("enable_gqa"):
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        factor, _ = scaled(kept, dropout_p)
        return (weights * torch.from_numpy(factor).to(value)) @ value

    return call


class _Replaced(TorchFunctionMode):
    def __init__(self, replaced: Mapping[Callable, Callable]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.replaced.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def _lent_dropout(keep: Keep) -> Iterator[None]:
    """A mode sees functions under any name, but not those inside others, such as attention's."""
    replaced: dict[Callable, Callable] = {native: _lent(native, keep) for native in DROPOUTS}
    replaced[ATTENTION] = _lent_attention(keep)
    inside = {(F, native.__name__): lent for native, lent in replaced.items() if native.__module__ == F.__name__}
    with patched(inside | {(F, ATTENTION.__name__): replaced[ATTENTION]}), _Replaced(replaced):
        yield


@contextmanager
def _lent_draws(draws: Draws) -> Iterator[None]:
    """As in `_lent_dropout`: patched for functions inside others, a mode for those under any name."""
    places = draws_torch.replaced(draws)
    with patched({place: lent for place, (_, lent) in places.items()}), _Replaced(dict(places.values())):
        yield


def _gelu_anew(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Without a sum that cancels: 1 + erf(t) is erfc(-t), and 1 + tanh(t) is 2 * sigmoid(2 * t)."""
    if approximate == "none":
        return input * torch.special.erfc(input * -(0.5**0.5)) / 2
    return input * torch.sigmoid((8 / torch.pi) ** 0.5 * (input + 0.044715 * input**3))


def _softplus_anew(input: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    scaled = beta * input
    return torch.where(scaled > threshold, input, torch.log(1 + torch.exp(scaled.clamp(max=threshold))) / beta)


def _logsigmoid_anew(input: torch.Tensor) -> torch.Tensor:
    return -_softplus_anew(-input, threshold=EXACT)


def _mish_anew(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return F.mish(input, True) if inplace else input * torch.tanh(_softplus_anew(input, threshold=EXACT))


def _elu_anew(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:
    return F.elu(input, alpha, inplace) if inplace or alpha <= 0 else _elu_by_output(input, 1.0, alpha, 1.0)


def _celu_anew(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:
    return F.celu(input, alpha, inplace) if inplace or alpha <= 0 else _elu_by_output(input, 1.0, alpha, alpha)


def _selu_anew(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717  # torch.selu's documentation
    return F.selu(input, True) if inplace else _elu_by_output(input, scale, alpha, 1.0)


def _elu_by_output(input: torch.Tensor, scale: float, alpha: float, over: float) -> torch.Tensor:
    """`scale` times the input above 0, else times alpha * (exp(input / over) - 1)."""
    return _ByOutput.apply(
        input,
        lambda x: scale * torch.where(x > 0, x, alpha * (torch.exp(x.clamp(max=0) / over) - 1)),
        lambda y: torch.where(y > 0, scale, (y + scale * alpha) / over),
    )


class _ByOutput(torch.autograd.Function):
    """A function whose slope is computed from its output, as kernels do: where that is rounded, so is the slope."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: torch.Tensor, function: Callable, slope: Callable) -> torch.Tensor:
        return function(input)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.slope = inputs[2]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient * ctx.slope(*ctx.saved_tensors), None, None


class _Anew:
    """Functions that round otherwise than PyTorch's, deterministic under a seed.

    A framework may add a sum's n numbers one after the other. Each partial sum is rounded by up to U of itself, so that
    one of numbers around m is off by U sqrt(n) / 3 of itself: sqrt(sum of (k m U)^2 / 3 for k up to n) / (n m).

    PaddlePaddle's float32 tanh is off by up to 5.7 U and, near 1, by much the same wherever its arguments are alike;
    PyTorch's by 1 U. Its slope, 1 - tanh^2, has lost all digits but those.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def replaced(self) -> dict[Callable, Callable]:
        anew: dict[Callable, Callable] = {
            F.gelu: _gelu_anew,
            F.softplus: _softplus_anew,
            F.logsigmoid: _logsigmoid_anew,
            F.mish: _mish_anew,
            F.elu: _elu_anew,
            F.celu: _celu_anew,
            F.selu: _selu_anew,
        }
        for native in (torch.mean, torch.Tensor.mean, torch.sum, torch.Tensor.sum):
            anew[native] = partial(self.summed, native)
        for name, slope in {"tanh": lambda y: 1 - y * y, "sigmoid": lambda y: y * (1 - y)}.items():
            for native in (getattr(torch, name), getattr(torch.Tensor, name)):
                anew[native] = partial(self.saturated, native, slope)
        for norm in (self.batch_norm, self.instance_norm, self.group_norm, self.layer_norm):
            anew[getattr(F, norm.__name__)] = norm
        return anew

    def saturated(self, native: Callable, slope: Callable, input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """A function of -1 or 0 to 1, all of its values moved alike."""
        if kwargs or not input.is_floating_point():
            return native(input, **kwargs)
        moved = torch.randn([], generator=self.generator, dtype=torch.float64).item()
        factor = 1 + 1.5 * torch.finfo(input.dtype).eps * moved  # 3 U
        return _ByOutput.apply(input, lambda x: (native(x) * factor).clamp(-1, 1), slope)

    def summed(self, native: Callable, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = native(input, *args, **kwargs)
        if not (result.is_floating_point() or result.is_complex()) or not result.numel():
            return result
        off = torch.finfo(result.dtype).eps / 2 * (input.numel() / result.numel()) ** 0.5 / 3
        moved = torch.randn(result.shape, generator=self.generator, dtype=torch.float64)
        return result * (1 + off * moved).to(result)

    def normed(self, input: torch.Tensor, axes: Sequence[int], eps: float) -> tuple[torch.Tensor, ...]:
        """(the input less its mean, over its standard deviation; mean; biased variance), of these axes."""
        mean = self.summed(torch.mean, input, list(axes), keepdim=True)
        variance = self.summed(torch.mean, (input - mean) ** 2, list(axes), keepdim=True)
        return (input - mean) * torch.rsqrt(variance + eps), mean, variance

    def batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        normed, mean, variance = self.normed(input, [0, *range(2, input.dim())], eps)
        count = input.numel() // mean.numel()
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, variance * count / max(count - 1, 1))):
                if running is not None:
                    running.lerp_(now.flatten().to(running), momentum)
        return _scaled(normed, weight, bias)

    def instance_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None = None,
        running_var: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not use_input_stats or running_mean is not None:
            return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        return _scaled(self.normed(input, range(2, input.dim()), eps)[0], weight, bias)

    def group_norm(
        self,
        input: torch.Tensor,
        num_groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        groups = input.reshape(input.shape[0], num_groups, -1)
        return _scaled(self.normed(groups, [2], eps)[0].reshape(input.shape), weight, bias)

    def layer_norm(
        self,
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        normed = self.normed(input, range(-len(normalized_shape), 0), eps)[0]
        normed = normed if weight is None else normed * weight
        return normed if bias is None else normed + bias


def _scaled(normed: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """By channel."""
    shape = [-1, *[1] * (normed.dim() - 2)]
    normed = normed if weight is None else normed * weight.view(shape)
    return normed if bias is None else normed + bias.view(shape)


class _AsFloat64(TorchFunctionMode):
    def __init__(self, note: Note) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        named = func is torch.Tensor.float or any(value is torch.float32 for value in (*args, *kwargs.values()))
        if named:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        made = isinstance(result, torch.Tensor) and result.dtype == torch.float32
        if named or made:
            self.note(made and not named)
        return result.double() if made else result


class _Noting(TorchFunctionMode):
    """See `Runs.noting_results`."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.note, self.is_on = note, False

    def __enter__(self) -> Callable[[bool], None]:
        super().__enter__()
        return partial(setattr, self, "is_on")

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on:
            with torch._C.DisableTorchFunction():
                for tensor in tensors_in(result, torch.is_tensor):
                    self.note(tensor)
        return result


class TorchLayers(Layers):
    library, sequential = "torch.nn.modules.", nn.Sequential
    containers = (nn.Module, nn.Sequential, nn.ModuleList)
    torch_types: ClassVar = {"NonDynamicallyQuantizableLinear": "Linear"}  # inside attention
    named_buffers = methodcaller("named_buffers")

    def named_modules(self, model: nn.Module) -> Named:
        named = list(model.named_modules())
        inside = tuple(f"{name}.parametrizations.".lstrip(".") for name, module in named if is_parametrized(module))
        return [(name, module) for name, module in named if not f"{name}.".startswith(inside)]

    def layouts(self, module: nn.Module) -> Mapping[str, tuple[str, Change]]:
        """Only weight_norm and spectral_norm parametrizations are renamed."""
        found: dict[str, tuple[str, Change]] = {}
        every = cast("Mapping[str, nn.ModuleList]", module.parametrizations) if is_parametrized(module) else {}
        for name, steps in every.items():
            types, at = {type(step).__name__ for step in steps}, f"parametrizations.{name}"
            if "_WeightNorm" in types:
                names = {"original0": f"{name}_g", "original1": f"{name}_v"}
            elif "_SpectralNorm" in types:
                names = {"original": f"{name}_orig", "0._u": f"{name}_u", "0._v": f"{name}_v"}
            else:
                names = {leaf: f"{at}.{leaf}".replace(".", "_") for leaf in steps.state_dict()} | {"original": name}
            found |= {f"{at}.{leaf}": (torch_name, identity) for leaf, torch_name in names.items()}
        return found

    def own_tensors(self, module: nn.Module) -> tuple[Tensors, Tensors]:
        parameters, buffers = super().own_tensors(module)
        if is_parametrized(module):
            computing = module.get_submodule("parametrizations")
            parameters += computing.named_parameters("parametrizations")
            buffers += computing.named_buffers("parametrizations")
        return parameters, buffers


class TorchRuns(Runs):
    framework, dtypes = torch, DTYPES
    exact_constants, not_replaced = fp64_torch.ExactConstants, torch._C.DisableTorchFunction
    lent_dropout, lent_draws, as_float64 = staticmethod(_lent_dropout), staticmethod(_lent_draws), _AsFloat64
    watching, noting_results = staticmethod(watching), _Noting
    dropouts = (nn.modules.dropout._DropoutNd,)  # the base class of all has no public name
    holding_dropout = (nn.RNNBase,)

    def one_random(self) -> float:
        with torch._C.DisableTorchFunction():
            return RAND(1, dtype=torch.float64).item()

    def rounding_anew(self, seed: int) -> _Replaced:
        return _Replaced(_Anew(seed).replaced())

    @contextmanager
    def seeded_framework(self, seed: int) -> Iterator[None]:
        cards = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(cards):
            # Without CUDA in use, torch.manual_seed() would queue a call and a traceback each time.
            torch.default_generator.manual_seed(seed)
            if cards:
                torch.cuda.manual_seed_all(seed)
            yield


class TorchTraining(Training):
    sgd, clear_gradients = torch.optim.SGD, methodcaller("zero_grad")
    leave, data_parallel = staticmethod(torch.distributed.destroy_process_group), DistributedDataParallel

    def join(self) -> None:
        torch.distributed.init_process_group("gloo")

    def to_device(self, module: nn.Module, device: torch.device, dtype: str) -> nn.Module:
        return module.to(device).double() if dtype == "float64" else module.to(device)

    def set_threads(self, count: int) -> int:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        return before

    def learning_rate(self, optimizer: torch.optim.Optimizer) -> float:
        return optimizer.param_groups[0]["lr"]

    def optimizer_state(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = {names.get(id(key), f"parameter {i}"): state for i, (key, state) in enumerate(optimizer.state.items())}
        for i, group in enumerate(optimizer.param_groups):
            found[f"group {i}"] = {key: value for key, value in group.items() if key != "params"}
        return found

    def coefficients(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, int]]:
        """(group key, place in a tuple) of rate, momentum, decay, ...; PyTorch only."""
        found: dict[tuple[str, int], None] = {}
        for group in optimizer.param_groups:
            for key, value in group.items():
                values = value if isinstance(value, tuple) else (value,)
                if key != "initial_lr":
                    found |= {(key, place): None for place, one in enumerate(values) if isinstance(one, float)}
        return list(found)

    def round_coefficient(self, optimizer: torch.optim.Optimizer, coefficient: tuple[str, int]) -> None:
        """Round one of `coefficients` to float32, as PaddlePaddle's optimizers do."""
        key, place = coefficient
        for group in optimizer.param_groups:
            value = group.get(key)
            if isinstance(value, tuple):
                group[key] = tuple(float(np.float32(x)) if i == place else x for i, x in enumerate(value))
            elif isinstance(value, float):
                group[key] = float(np.float32(value))


class TorchBackend(Backend):
    name, framework = "torch", torch
    module_class, module_class_name = nn.Module, "torch.nn.Module"
    layers, runs, training = TorchLayers(), TorchRuns(), TorchTraining()
    load_file = staticmethod(load_pth)
    loaded = torch.Tensor
    device_of, values = attrgetter("device"), attrgetter("data")

    def device(self, name: str) -> torch.device:
        if name == "gpu" and not torch.cuda.is_available():
            remedy = "use --device cpu or install a build for CUDA"
            raise UserError(f"--device gpu: this PyTorch sees no card; {remedy}")
        without_tf32()
        return torch.device("cuda", 0) if name == "gpu" else torch.device("cpu")

    def about(self, device: str) -> dict[str, str]:
        """PyTorch's device name, if `device` is "gpu", and its number of threads."""
        card = f"gpu, {torch.cuda.get_device_name()}" if device == "gpu" else device
        threads = f"torch {torch.get_num_threads()}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
        return {"device": card, "threads": threads}

    def tensor(self, array: np.ndarray, device: Any = None, dtype: Any = None, requires_grad: bool = False) -> Any:
        tensor = torch.from_numpy(np.array(array)).to(device)
        if tensor.is_complex() and dtype is not None:
            return tensor.to(DTYPES.get(dtype, dtype).to_complex())
        if not tensor.is_floating_point():  # integers cannot require a gradient
            return tensor
        return tensor.to(DTYPES.get(dtype, dtype)).requires_grad_(requires_grad)

    def to_array(self, tensor: torch.Tensor, copy: bool = True) -> np.ndarray:
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.dtype is torch.bfloat16:  # NumPy has no bfloat16
            tensor = tensor.float()
        array = tensor.numpy(force=True)  # also from a GPU, or with a gradient
        return array.copy() if copy else array

    def set_value(self, tensor: torch.Tensor, array: np.ndarray) -> None:
        with torch.no_grad():  # PyTorch refuses to write into a parameter otherwise
            tensor.copy_(torch.from_numpy(np.array(array)))

    def has_values(self, tensor: torch.Tensor) -> bool:
        return not nn.parameter.is_lazy(tensor) and not self.is_sparse(tensor)

    def is_sparse(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is not torch.strided

    def as_sparse_as(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.to_sparse(layout=tensor.layout)

    def put(self, tensor: torch.Tensor, array: np.ndarray, dtype: str, device: torch.device) -> None:
        # One copy, the cast, into the tensor's own layout in memory; read-only memory is not shared.
        if array.dtype.kind == "f" and array.flags.c_contiguous and array.flags.writeable:
            values = torch.empty_like(tensor, dtype=DTYPES[dtype], device=device, layout=torch.strided)
            self.put_back(tensor, values.copy_(torch.from_numpy(array)))
        else:
            super().put(tensor, array, dtype, device)

    def put_back(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        tensor.data = values


BACKEND = TorchBackend()
