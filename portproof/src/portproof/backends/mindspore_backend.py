"""MindSpore's backend, on the CPU (see base.py). PaddlePaddle cannot share its process."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from operator import methodcaller
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import operations

from portproof.backends import fp64_mindspore
from portproof.backends.base import Backend, Forward, Layers, Note, Runs, Tensors
from portproof.backends.lent import patched
from portproof.backends.masks import Keep
from portproof.backends.model import BackendModel
from portproof.backends.question import Question, Run
from portproof.backends.slots import Named
from portproof.convert.rules import MINDSPORE_TO_TORCH, MINDSPORE_TYPES, Change
from portproof.io.ckpt import load_ckpt
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

with suppress(SystemError, ImportError):  # 2.10.0, built for NumPy 1, fails at once with NumPy 2
    ops.add(Tensor(1.0), 1)

random_seed = importlib.import_module("mindspore.common.seed")  # a function has this name too
DROPOUTS = operations.Dropout, operations.Dropout2D, operations.Dropout3D
# What it raises if an operation has no float64 kernel.
NO_KERNEL = re.compile(r"For primitive\[(\w+)\].*\bFloat64|Kernel select failed|Create kernelmod")


class _NothingSent(Exception):
    """No output has a gradient."""


class MindSporeModel(BackendModel):
    """A MindSpore model; runs in float32, with a note, where a float64 kernel is missing."""

    zeros_for_none = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # {(module, those behind it, backward): operation without a kernel}
        self.lacking: dict[tuple[str, tuple[str, ...], bool], str] = {}

    def notes(self) -> list[str]:
        if self.lacking or not fp64_mindspore.composed:
            return []
        names = ", ".join(sorted(fp64_mindspore.composed))
        told = "in the float64 run composed of other operations, without a kernel of their own there"
        return [f"{told} (that is judged in float32): {names}"]

    def _answer(self, question: Question, watch_random: bool = False) -> Run:
        key = question.module, question.followed_by, question.backward
        if question.dtype == "float64" and key not in self.lacking:
            run = super()._answer(question, watch_random)
            found = NO_KERNEL.search(run.trace.error)
            if not found:
                return run
            self.lacking[key] = found[1] or "an operation"
        run = super()._answer(replace(question, dtype="float32"), watch_random)
        run.trace.lacking = self.lacking[key] if question.dtype == "float64" else ""
        return run


class MindSporeLayers(Layers):
    library, sequential = "mindspore.nn.layer.", nn.SequentialCell
    containers = (nn.Cell, nn.SequentialCell, nn.CellList)
    forward = "construct"
    torch_types = MINDSPORE_TYPES
    named_modules = methodcaller("cells_and_names")

    def children(self, module: nn.Cell) -> Iterable[nn.Cell]:
        return [cell for cell in module.cells() if cell is not None]

    def layouts(self, module: nn.Cell) -> Mapping[str, tuple[str, Change]]:
        return MINDSPORE_TO_TORCH.get(self.kind(module), {})

    def own_tensors(self, module: nn.Cell) -> tuple[Tensors, Tensors]:
        """Batch norm's statistics are parameters without a gradient."""
        own = list(module.parameters_and_names(expand=False))
        trained = [(name, tensor) for name, tensor in own if not name.startswith("moving_")]
        frozen = [(name, tensor) for name, tensor in own if name.startswith("moving_")]
        return trained, frozen + [(name, tensor) for name, tensor in module._buffers.items() if tensor is not None]

    def named_parameters(self, model: nn.Cell) -> Named:
        return ((name, parameter) for name, parameter in model.parameters_and_names() if parameter.requires_grad)

    def named_buffers(self, model: nn.Cell) -> Named:
        return ((name, tensor) for name, tensor in model.state_dict().items() if not BACKEND.requires_grad(tensor))


class MindSporeRuns(Runs):
    framework, exact_constants, hooks_parameters = ms, staticmethod(fp64_mindspore.exact_constants), False
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

    def set_mode(self, module: nn.Cell, train: bool) -> None:
        module.set_train(train)

    def dropout_probability(self, layer: nn.Cell) -> float:
        """Of layers that are told what to keep, too."""
        if not isinstance(layer, self.dropouts):
            return 0.0
        p = getattr(layer, "p", None)
        return float(round(1 - layer.keep_prob, 12) if p is None else p)  # 1 - 0.9 is not quite 0.1

    def grad_enabled(self, enabled: bool) -> AbstractContextManager:
        return nullcontext()  # `run_backward` alone keeps anything

    def run_backward(self, forward: Forward, model: nn.Cell, inputs: Sequence[Tensor]) -> None:
        """MindSpore has no backward(): it differentiates a function by its parameters."""
        leaves = [*inputs, *model.trainable_params()]

        def total() -> Tensor:
            sent = [(output * gradient).sum() for output, gradient in forward()]
            if not sent:  # differentiating a constant crashes the process
                raise _NothingSent
            return sum(sent[1:], sent[0])

        with suppress(_NothingSent):
            _, gradients = ms.value_and_grad(total, None, leaves)()
            for leaf, gradient in zip_strict(leaves, gradients):
                leaf.grad = gradient

    @contextmanager
    def new_tensors(self, dtype: str, note: Note | None = None) -> Iterator[None]:
        yield

    def seeded_framework(self, seed: int) -> AbstractContextManager:
        """Unlike ms.set_seed, leave other generators alone."""
        return patched({(random_seed, "_GLOBAL_SEED"): seed, (random_seed, "_KERNEL_SEED"): {}})

    def next_random(self) -> tuple:
        return tuple(random_seed._KERNEL_SEED.items())

    def lent_dropout(self, keep: Keep) -> AbstractContextManager:
        """Of primitives, which layers and functions call; a mask is never lent, since nothing is trained here."""

        def call(primitive: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            channels = not isinstance(primitive, operations.Dropout)
            assert keep(1 - primitive.keep_prob, x.shape[:2] if channels else x.shape) is None
            return x, ops.ones_like(x)

        return patched({(each, "__call__"): call for each in DROPOUTS})


class MindSporeBackend(Backend):
    name, framework = "mindspore", ms
    module_class, module_class_name = nn.Cell, "mindspore.nn.Cell"
    model_class = MindSporeModel
    layers, runs = MindSporeLayers(), MindSporeRuns()
    load_file = staticmethod(load_ckpt)

    def device(self, name: str) -> str:
        if name != "cpu":
            raise UserError(f"--device {name}: MindSpore is judged on the CPU: use --device cpu")
        if ms.get_context("device_target") != "CPU":
            ms.set_device("CPU")  # a global setting
        ms.set_context(mode=ms.PYNATIVE_MODE)  # a graph calls no hooks
        return "CPU"

    def tensor(self, array: np.ndarray, device: Any = None, dtype: Any = None, requires_grad: bool = False) -> Any:
        if dtype is not None and array.dtype.kind == "f":
            array = array.astype(str(dtype).lower())
        tensor = Tensor(np.array(array))
        if not requires_grad or array.dtype.kind != "f":
            return tensor
        return Parameter(tensor, "input")  # only parameters can require a gradient

    def to_array(self, tensor: Tensor, copy: bool = True) -> np.ndarray:
        tensor = tensor.float() if tensor.dtype == ms.bfloat16 else tensor  # NumPy has no bfloat16
        return tensor.asnumpy().copy() if copy else tensor.asnumpy()

    def device_of(self, tensor: Tensor) -> str:
        return "CPU"

    def requires_grad(self, tensor: Tensor) -> bool:
        return tensor.requires_grad if isinstance(tensor, Parameter) else tensor._requires_grad

    def set_value(self, tensor: Tensor, array: np.ndarray) -> None:
        tensor.assign_value(Tensor(array.astype(self.to_array(tensor).dtype)))

    def is_leaf(self, tensor: Tensor) -> bool:
        return isinstance(tensor, Parameter) or not tensor._requires_grad

    def fresh(self, tensor: Tensor) -> Tensor:
        return ops.deepcopy(tensor)  # a parameter's clone() is a parameter

    def has_values(self, tensor: Tensor) -> bool:
        return not tensor.has_init

    def values(self, tensor: Tensor) -> Tensor:
        return Tensor(self.to_array(tensor))

    def put_back(self, tensor: Tensor, values: Tensor) -> None:
        tensor.set_dtype(values.dtype)  # else operations use the old type
        tensor.assign_value(values)


BACKEND = MindSporeBackend()
