"""How a model of a framework is run: modes, contexts, random numbers, dropout, hooks."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from portproof.python39 import zip_strict

Forward = Callable[[], Sequence[tuple[Any, Any]]]  # it returns each output that has a gradient, with the gradient
Note = Callable[[bool], None]  # see `Runs.new_tensors`


class Runs(ABC):
    """What a run of a framework's models needs."""

    framework: ModuleType
    dtypes: Mapping[str, Any]  # its own names of "float32" and "float64"
    as_float64: Callable[[Note], AbstractContextManager]  # where what would be float32 is float64, see `new_tensors`
    dropouts: tuple[type, ...]  # layers that are nothing else
    holding_dropout: tuple[type, ...] = ()  # layers that hand its probability to a kernel

    def set_mode(self, module: Any, train: bool) -> None:
        """Have `module` and all in it run in train mode or in eval mode."""
        module.train() if train else module.eval()

    def grad_enabled(self, enabled: bool) -> AbstractContextManager:
        """In this context a forward pass keeps what a backward pass needs, or does not."""
        return self.framework.set_grad_enabled(enabled)

    def run_backward(self, forward: Forward, model: Any, inputs: Sequence[Any]) -> None:
        """Call `forward`, and go back from what it returns.

        What `inputs` and the parameters of `model` receive is their `grad` afterwards.
        """
        sent = forward()
        if sent:
            tensors, gradients = zip_strict(*sent)
            self.framework.autograd.backward(list(tensors), list(gradients))

    @abstractmethod
    def exact_constants(self) -> AbstractContextManager:
        """In this context float64 arithmetic has the constants that are meant; it may be nested."""

    def not_replaced(self) -> AbstractContextManager:
        """In this context no function of the framework is another, where it takes time to look: for code of our own."""
        return nullcontext()

    @contextmanager
    def new_tensors(self, dtype: str, note: Note | None = None) -> Iterator[None]:
        """In this context tensors that a model makes without naming a type have the precision `dtype`.

        With `note`, in "float64", also those that it wants as float32, by name or by a cast: to round in between would
        hide what is to be shown. `note` is called at each, with True if it is made of a float32 array, rounded already.
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
        """In this context the generators of random numbers start from `seed`; after it they are where they were."""
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
        """Where the generators are: two that differ say that random numbers were taken in between."""
        _, key, place, *_ = np.random.get_state()  # noqa: NPY002
        return self.next_random(), random.getstate()[1][-1], int(key[0]), place

    def next_random(self) -> Any:
        """The next number of the framework's own generator, which is not taken, or where that is."""
        state = self.framework.get_rng_state()
        number = self.framework.rand([1], dtype=self.dtypes["float64"]).item()
        self.framework.set_rng_state(state)
        return number

    @abstractmethod
    def without_dropout(self) -> AbstractContextManager:
        """In this context dropout that is called as a function gives back what it gets."""

    def turn_off_dropout(self, layer: Any) -> None:
        """The same for a layer that is dropout or has some inside, whatever mode its model is in."""
        if isinstance(layer, self.dropouts):
            self.set_mode(layer, False)
        elif isinstance(layer, self.holding_dropout):
            layer.dropout = 0.0

    def hook_before(self, module: Any, hook: Callable) -> Any:
        """Have `hook(module, args, kwargs)` called before each call of `module`, until the handle's remove()."""
        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def hook_after(self, module: Any, hook: Callable) -> Any:
        """Have `hook(module, args, kwargs, output)` called after each call of `module`, until the handle's remove().

        What it returns is the output from then on, unless it is None.
        """
        return module.register_forward_hook(hook, with_kwargs=True)
