"""What PyTorch spells or does in its own way (see base.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from portproof.backends import fp64_torch
from portproof.backends.base import SUFFIXES, Backend, without_tf32
from portproof.backends.layers import Layers
from portproof.backends.question import to_precision
from portproof.backends.runs import Runs
from portproof.backends.slots import Arrays
from portproof.backends.training import Training
from portproof.convert.rules import Change, identity
from sturdyio.cli import UserError
from sturdyio.pth import load_pth
from sturdyio.state_dict import read_state_dict

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DROPOUTS = (nn.modules.dropout._DropoutNd,)  # the base of all of them has no public name
DROPOUT_FUNCTIONS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
}


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUT_FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _AsFloat64(TorchFunctionMode):
    """What would be float32 is float64."""

    def __init__(self, note: Callable[[bool], None]) -> None:
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


class TorchLayers(Layers):
    containers = (nn.Module, nn.Sequential, nn.ModuleList)
    library, sequential = "torch.nn.modules.", nn.Sequential

    def named_modules(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        inside = set()
        for name, module in model.named_modules():
            if is_parametrized(module):
                inside.add(f"{name}.parametrizations" if name else "parametrizations")
            if not any(name == other or name.startswith(f"{other}.") for other in inside):
                yield name, module

    def torch_type(self, layer: str) -> str:
        return layer.removeprefix("NonDynamicallyQuantizable")  # a Linear, which attention has inside

    def layouts(self, module: nn.Module) -> Mapping[str, tuple[str, Change]]:
        """They are PyTorch's own; of parametrizations the names are those of weight_norm and spectral_norm."""
        if not is_parametrized(module):
            return {}
        found = {}
        for name, steps in module.parametrizations.items():
            types, at = {type(step).__name__ for step in steps}, f"parametrizations.{name}"
            if "_WeightNorm" in types:
                found |= {f"{at}.original0": (f"{name}_g", identity), f"{at}.original1": (f"{name}_v", identity)}
            elif "_SpectralNorm" in types:
                leaves = {"original": "orig", "0._u": "u", "0._v": "v"}
                found |= {f"{at}.{leaf}": (f"{name}_{known}", identity) for leaf, known in leaves.items()}
            else:
                found[f"{at}.original"] = name, identity
                inside = [f"{at}.{leaf}" for leaf in steps.state_dict() if leaf != "original"]
                found |= {leaf: (leaf.replace(".", "_"), identity) for leaf in inside}
        return found

    def own_tensors(self, module: nn.Module) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """A layer's parametrizations hold tensors of its own."""
        own = super().own_tensors(module)
        if not is_parametrized(module):
            return own
        inside = module.parametrizations
        found = inside.named_parameters("parametrizations"), inside.named_buffers("parametrizations")
        return own[0] + list(found[0]), own[1] + list(found[1])

    def named_buffers(self, model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        return model.named_buffers()


class TorchRuns(Runs):
    framework, exact_constants = torch, staticmethod(fp64_torch.exact_constants)

    def not_replaced(self) -> AbstractContextManager:
        return torch._C.DisableTorchFunction()

    @contextmanager
    def new_tensors(self, dtype: str, note: Callable[[bool], None] | None = None) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[dtype])
        try:
            with _AsFloat64(note) if note and dtype == "float64" else nullcontext():
                yield
        finally:
            torch.set_default_dtype(before)

    @contextmanager
    def seeded_framework(self, seed: int) -> Iterator[None]:
        cards = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(cards):
            # Before a card is used, torch.manual_seed() would queue a call for it, with a traceback, each time.
            torch.default_generator.manual_seed(seed)
            if cards:
                torch.cuda.manual_seed_all(seed)
            yield

    def next_random(self) -> float:
        state = torch.get_rng_state()
        number = torch.rand(1, dtype=torch.float64).item()
        torch.set_rng_state(state)
        return number

    def without_dropout(self) -> AbstractContextManager:
        return _NoDropout()

    def turn_off_dropout(self, layer: nn.Module) -> None:
        if isinstance(layer, DROPOUTS):
            layer.eval()
        elif isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):  # they hand the number to a kernel
            layer.dropout = 0.0


class TorchTraining(Training):
    def to_device(self, module: nn.Module, device: torch.device, dtype: str) -> nn.Module:
        module = module.to(device)
        return module.double() if dtype == "float64" else module

    def set_threads(self, count: int) -> int:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        return before

    def learning_rate(self, optimizer: torch.optim.Optimizer) -> float:
        return optimizer.param_groups[0]["lr"]

    def coefficients(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, int]]:
        """What the optimizer computes with: (key of its groups, place in a tuple) of its rate, momentum, decay, ...

        No other framework has this.
        """
        floats = {
            (key, place): None
            for group in optimizer.param_groups
            for key, value in group.items()
            for place, one in enumerate(value if isinstance(value, tuple) else (value,))
            if isinstance(one, float) and key != "initial_lr"
        }
        return list(floats)

    def round_coefficient(self, optimizer: torch.optim.Optimizer, coefficient: tuple[str, int]) -> None:
        """Round one of `coefficients` to float32, in which PaddlePaddle's own optimizers keep them."""
        key, place = coefficient
        for group in optimizer.param_groups:
            value = group.get(key)
            if isinstance(value, tuple):
                group[key] = tuple(float(np.float32(x)) if i == place else x for i, x in enumerate(value))
            elif isinstance(value, float):
                group[key] = float(np.float32(value))

    def sgd(self, parameters: list, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, rate)

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()


class TorchBackend(Backend):
    """PyTorch."""

    name, framework = "torch", torch
    module_class, module_class_name = nn.Module, "torch.nn.Module"
    layers, runs, training = TorchLayers(), TorchRuns(), TorchTraining()

    def device(self, name: str) -> torch.device:
        if name == "gpu" and not torch.cuda.is_available():
            raise UserError(
                "--device gpu: this PyTorch sees no card; use --device cpu or install the CUDA build (README)"
            )
        without_tf32()
        return torch.device("cuda", 0) if name == "gpu" else torch.device("cpu")

    def about(self, device: str) -> dict[str, str]:
        """What PyTorch knows of the machine, in words: the card, if `device` is "gpu", and the number of threads."""
        card = f"gpu, {torch.cuda.get_device_name()}" if device == "gpu" else device
        threads = f"torch {torch.get_num_threads()}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
        return {"device": card, "threads": threads}

    def read_weights(self, path: str | Path) -> Arrays:
        def to_arrays(state_dict: Mapping[str, torch.Tensor]) -> Arrays:
            return {key: self.to_array(tensor) for key, tensor in state_dict.items()}

        return read_state_dict(path, SUFFIXES[self.name], load_pth, torch.Tensor, to_arrays)

    def tensor(self, array: np.ndarray, device: Any = None, dtype: Any = None, requires_grad: bool = False) -> Any:
        tensor = torch.from_numpy(np.array(array)).to(device)
        if tensor.is_complex() and dtype is not None:
            return tensor.to(DTYPES.get(dtype, dtype).to_complex())
        if not tensor.is_floating_point():  # PyTorch refuses a gradient for whole numbers
            return tensor
        return tensor.to(DTYPES.get(dtype, dtype)).requires_grad_(requires_grad)

    def to_array(self, tensor: torch.Tensor, copy: bool = True) -> np.ndarray:
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.dtype is torch.bfloat16:  # which NumPy does not have
            tensor = tensor.float()
        array = tensor.numpy(force=True)  # of what lies on a card, and of what needs a gradient, too
        return array.copy() if copy else array

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return tensor.device

    def requires_grad(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad

    def set_value(self, tensor: torch.Tensor, array: np.ndarray) -> None:
        with torch.no_grad():  # PyTorch refuses to write into a parameter otherwise
            tensor.copy_(torch.from_numpy(np.array(array)))

    def has_values(self, tensor: torch.Tensor) -> bool:
        return not nn.parameter.is_lazy(tensor)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    def put(self, tensor: torch.Tensor, array: np.ndarray, dtype: str, device: torch.device) -> None:
        tensor.data = torch.from_numpy(to_precision(array, dtype, copy=True)).to(device)

    def put_back(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        tensor.data = values


BACKEND = TorchBackend()
