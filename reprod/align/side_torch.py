"""A PyTorch model as a side of a comparison (see side.py)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from reprod.recipe.cli import UserError

from .capture_torch import recording, to_array
from .convert import RULES, keep
from .recording import Call, map_tensors, tensors_in
from .report import one_line
from .side import Module, Run, Slot

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


def without_dropout() -> AbstractContextManager:
    """In this context dropout that is called as a function gives back what it gets."""
    return _NoDropout()


def _kind(module: nn.Module) -> str:
    """The nearest class of torch.nn that `module` derives from; "" if that is nn.Module itself or a container."""
    for base in type(module).__mro__:
        if base.__module__.startswith("torch.nn.modules.") and base not in (nn.Module, nn.Sequential, nn.ModuleList):
            return base.__name__.removeprefix("NonDynamicallyQuantizable")
    return ""


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


class TorchSide:
    """Raises UserError for anything but a torch.nn.Module."""

    def __init__(self, model: nn.Module, device: str | torch.device = "cpu") -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"the reference is a {type(model).__name__}, no torch.nn.Module: give a model")
        self.model, self.device = copy.deepcopy(model).float(), "cuda" if device == "gpu" else device
        seen: set[torch.Tensor] = set()
        self.modules = {name: self._describe(name, module, seen) for name, module in self.model.named_modules()}

    def _describe(self, name: str, module: nn.Module, seen: set[torch.Tensor]) -> Module:
        prefix, kind = f"{name}." if name else "", _kind(module)
        own = {leaf: (tensor, True) for leaf, tensor in module.named_parameters(recurse=False)}
        own |= {leaf: (tensor, False) for leaf, tensor in module.named_buffers(recurse=False)}
        saved = self.model.state_dict().keys()
        slots = {
            leaf: Slot(prefix + leaf, tuple(tensor.shape), keep, trained and tensor.requires_grad)
            for leaf, (tensor, trained) in own.items()
            if prefix + leaf in saved and tensor not in seen  # of tied weights the first is the tensor
        }
        seen.update(tensor for tensor, _ in own.values())
        return Module(
            name, type(module).__name__, kind if kind in RULES or not slots else "", slots, not any(module.children())
        )

    def arrays(self) -> dict[str, np.ndarray]:
        return {key: to_array(tensor) for key, tensor in self.model.state_dict().items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        state = {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}
        try:
            missing, unexpected = self.model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise UserError(f"weights do not fit the reference: {one_line(error)}") from error
        if unexpected:
            raise UserError(f"weights do not fit the reference: it has no {unexpected[0]}")

    def _copy(self, module: nn.Module, dtype: str, train: bool) -> nn.Module:
        module = copy.deepcopy(module).to(self.device)
        module = module.double() if dtype == "float64" else module
        module.train(train)
        for child in module.modules():
            if isinstance(child, DROPOUTS):
                child.eval()
            elif isinstance(child, nn.RNNBase | nn.MultiheadAttention):
                child.dropout = 0.0
        return module

    def _tensors(self, value: Any, dtype: str, needs_grad: bool) -> Any:
        def convert(array: np.ndarray) -> torch.Tensor:
            tensor = torch.from_numpy(np.array(array)).to(self.device)
            if not tensor.is_floating_point():
                return tensor
            return tensor.to(getattr(torch, dtype)).requires_grad_(needs_grad)

        return map_tensors(value, _is_array, convert)

    def _run(self, model: nn.Module, call: Call, dtype: str, backward: bool, calls: bool) -> Run:
        args, kwargs = self._tensors((call.args, call.kwargs), dtype, backward)
        # An operation in place may not change a leaf that needs a gradient.
        given = map_tensors((args, kwargs), torch.is_tensor, lambda t: t.clone() if t.requires_grad else t)
        dropout = without_dropout() if model.training else nullcontext()  # in eval mode there should be none
        with recording(model, "output", calls) as record, dropout, torch.set_grad_enabled(backward):
            run = Run(record)
            try:
                outputs = tensors_in(model(*given[0], **given[1]), torch.is_tensor)
                run.output = [to_array(tensor) for tensor in outputs]
                if backward:
                    self._backward(outputs, call.upstream, dtype)
            except Exception as error:  # whatever a model may raise
                record.error = one_line(error)
        inputs = [t for t in tensors_in((args, kwargs), torch.is_tensor) if t.is_floating_point()]
        run.input_gradients = [None if t.grad is None else to_array(t.grad) for t in inputs]
        run.gradients = {name: to_array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        saved = model.state_dict().keys()
        run.buffers = {name: to_array(tensor) for name, tensor in model.named_buffers() if name in saved}
        return run

    def _backward(self, outputs: list[torch.Tensor], upstream: list, dtype: str) -> None:
        pairs = [
            (t, g)
            for t, g in zip(outputs, upstream, strict=False)
            if g is not None and g.shape == tuple(t.shape) and t.requires_grad
        ]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [self._tensors(g, dtype, False) for _, g in pairs])

    def run(
        self,
        inputs: Sequence[np.ndarray],
        dtype: str,
        train: bool,
        cotangent: Sequence[np.ndarray] | None = None,
        calls: bool = False,
    ) -> Run:
        call = Call("", 0, args=tuple(inputs), upstream=list(cotangent or ()))
        return self._run(self._copy(self.model, dtype, train), call, dtype, cotangent is not None, calls)

    def run_module(self, name: str, call: Call, dtype: str, train: bool, backward: bool, change=None) -> Run:
        """`change`, if given, is applied to the copy of the module first, and the module that it returns is run."""
        module = self._copy(self.model.get_submodule(name), dtype, train)
        module = module if change is None else change(module)
        return self._run(module, call, dtype, backward, calls=True)
