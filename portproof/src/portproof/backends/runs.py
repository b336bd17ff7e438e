"""How models are run: modes, contexts, random numbers, dropout, hooks."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from portproof.python39 import zip_strict

Forward = Callable[[], Sequence[tuple[Any, Any]]]  # returns (output, gradient) pairs
Note = Callable[[bool], None]  # see `Runs.new_tensors`


class Runs(ABC):
    framework: ModuleType
    dtypes: Mapping[str, Any]  # its "float32" and "float64"
    as_float64: Callable[[Note], AbstractContextManager]  # turns float32 into float64, see `new_tensors`
    dropouts: tuple[type, ...]  # layers that are only dropout
    holding_dropout: tuple[type, ...] = ()  # layers that pass a probability to a kernel

    def set_mode(self, module: Any, train: bool) -> None:
        """Set train mode or eval mode in all of `module`."""
        module.train() if train else module.eval()

    def grad_enabled(self, enabled: bool) -> AbstractContextManager:
        """Whether forward passes in this context keep what backward needs."""
        return self.framework.set_grad_enabled(enabled)

    def run_backward(self, forward: Forward, model: Any, inputs: Sequence[Any]) -> None:
        """Call `forward` and go back: `inputs` and parameters then have their `grad`."""
        sent = forward()
        if sent:
            tensors, gradients = zip_strict(*sent)
            self.framework.autograd.backward(list(tensors), list(gradients))

    @abstractmethod
    def exact_constants(self) -> AbstractContextManager:
        """Exact float64 arithmetic in this context; may be nested."""

    def not_replaced(self) -> AbstractContextManager:
        """Undo slow replacements of functions in this context, for code of our own."""
        return nullcontext()

    @contextmanager
    def new_tensors(self, dtype: str, note: Note | None = None) -> Iterator[None]:
        """Tensors made without a type have the precision `dtype` in this context.

        With `note`, in "float64", also those requested as float32, by name or by a cast: rounding in between would hide
        differences. `note` is called at each, with True if it comes from a float32 array, already rounded.
        """
        before = self.framework.get_default_dtype()
        self.framework.set_default_dtype(self.dtypes[dtype])
        try:
            with self.as_float64(note) if note and dtype == "float64" else nullcontext():
                yield
        finally:
            self.framework.set_default_dtype(before)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed all random generators in this context, and restore them afterwards."""
        before = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            with self.seeded_framework(seed):
                yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002

    @abstractmethod
    def seeded_framework(self, seed: int) -> AbstractContextManager:
        """`seeded` for the framework's own generator."""

    def random_state(self) -> tuple:
        """The state of all generators, to see whether random numbers were taken."""
        _, key, place, *_ = np.random.get_state()  # noqa: NPY002
        return self.next_random(), random.getstate()[1][-1], int(key[0]), place

    def next_random(self) -> Any:
        """The next number of the framework's generator, not taken, or its state."""
        state = self.framework.get_rng_state()
        number = self.framework.rand([1], dtype=self.dtypes["float64"]).item()
        self.framework.set_rng_state(state)
        return number

    @abstractmethod
    def without_dropout(self) -> AbstractContextManager:
        """Dropout functions do nothing in this context."""

    def turn_off_dropout(self, layer: Any) -> None:
        """Turn off a dropout layer, or the dropout inside a layer, in any mode."""
        if isinstance(layer, self.dropouts):
            self.set_mode(layer, False)
        elif isinstance(layer, self.holding_dropout):
            layer.dropout = 0.0

    def hook_before(self, module: Any, hook: Callable) -> Any:
        """Call `hook(module, args, kwargs)` before each call, until remove()."""
        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def hook_after(self, module: Any, hook: Callable) -> Any:
        """Call `hook(module, args, kwargs, output)` after each call, until remove().

        Its result, unless None, replaces the output.
        """
        return module.register_forward_hook(hook, with_kwargs=True)
