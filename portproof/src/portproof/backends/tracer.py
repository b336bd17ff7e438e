"""Traces a running model by hooks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from portproof.arrays import largest, same_bits
from portproof.backends.question import CALLS, OUTPUTS, UPSTREAM
from portproof.backends.trace import ModuleCall, Trace, map_tensors, tensors_at, tensors_in
from portproof.compare.activations import BREAKPOINTS
from sturdyio.cli import MachineError, one_line, user_code

if TYPE_CHECKING:
    from portproof.backends.base import Backend

RECENT = 12  # arrays; a shortcut may take its block's input 9 layers later
PLAIN = (type(None), bool, int, float, complex, str, list, tuple, dict)  # possible outputs without a tensor


@contextmanager
def tracing(
    backend: Backend,
    model: Any,
    keeps: int = OUTPUTS,
    modules: bool = True,
    only: Collection[str] | None = None,
    watch_random: bool = False,
) -> Iterator[Trace]:
    """Trace forward passes of `model` in this context, float64 with exact constants.

    The model's own output is called OUTPUT. For `keeps` see question.py. Without `modules` nothing is traced; `only`
    names those to trace. Random numbers are noted for the model's own call; with `watch_random` for all.
    """
    tracer = _Tracer(backend, keeps, watch_random)
    handles = [
        handle
        for name, module in (backend.layers.named_modules(model) if modules else ())
        if (name in only if only is not None else name == "" or not backend.layers.is_container(module))
        for handle in tracer.attach(name, module)
    ]
    try:
        with backend.runs.exact_constants():
            yield tracer.trace
    finally:
        for handle in handles:
            handle.remove()
        tracer.close()


class _Tracer:
    def __init__(self, backend: Backend, keeps: int, watch_random: bool) -> None:
        self.backend, self.keep_calls, self.keep_upstreams = backend, keeps >= CALLS, keeps >= UPSTREAM
        self.watch_random = watch_random
        self.is_tensor = backend.framework.is_tensor
        self.trace = Trace()
        self.running = self.trace.running
        self.random_states: list[tuple | None] = []  # of the generators at each start, if noted
        self.counts: dict[str, int] = {}
        self.recent: deque[np.ndarray] = deque(maxlen=RECENT)

    def array(self, tensor: Any) -> np.ndarray:
        """A copy of `tensor`, or a recent array with the same bits, such as the layer's input."""
        seen = self.backend.to_array(tensor, copy=False)
        for array in self.recent:
            if same_bits(array, seen):
                return array
        self.recent.append(self.backend.to_array(tensor))
        return self.recent[-1]

    def attach(self, name: str, module: Any) -> list[Any]:
        is_activation = type(module).__name__ in BREAKPOINTS

        def before(module: Any, args: tuple, kwargs: dict) -> None:
            self.begin(name, args, kwargs, self.keep_calls or is_activation)

        def after(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
            self.end(output, is_activation)

        return [self.backend.runs.hook_before(module, before), self.backend.runs.hook_after(module, after)]

    def begin(self, name: str, args: tuple, kwargs: dict, keep_arguments: bool) -> None:
        number = self.counts.get(name, 0)
        inside = self.running[-1].label if self.running else ""
        call = ModuleCall(name, number, start=sum(self.counts.values()), inside=inside)
        self.counts[name] = number + 1
        self.running.append(call)
        noted = self.keep_calls and (self.watch_random or not name)
        self.random_states.append(self.backend.runs.random_state() if noted else None)
        with self.recording(call):
            call.scale = self.scale((args, kwargs))
            if keep_arguments:
                call.args, call.kwargs = map_tensors((args, kwargs), self.is_tensor, self.array)

    def end(self, output: Any, is_activation: bool) -> None:
        call = self.running.pop()
        self.note_random(call)
        with self.recording(call):
            tensors = tensors_at(output, self.is_tensor)
            if not tensors and not isinstance(output, PLAIN):
                self.trace.unrecorded[call.name] = f"it returns a {type(output).__name__}, in which no tensor is found"
            call.outputs = [self.array(tensor) for tensor in tensors.values()]
            call.places, call.upstream = list(tensors), [None] * len(tensors)
            self.trace.add(call, is_activation, self.keep_calls)
            if self.keep_upstreams:
                for i, tensor in enumerate(tensors.values()):
                    if self.backend.requires_grad(tensor):
                        self.keep_upstream(call, i, tensor)

    def note_random(self, call: ModuleCall) -> None:
        """Note whether random numbers were taken since the latest running call began."""
        before = self.random_states.pop()
        call.took_random = before is not None and before != self.backend.runs.random_state()

    @contextmanager
    def recording(self, call: ModuleCall) -> Iterator[None]:
        """Note exceptions of recording, so that the model's run goes on."""
        try:
            with user_code(), self.backend.runs.not_replaced():
                yield
        except MachineError:
            raise
        except Exception as error:
            self.trace.unrecorded[call.name] = one_line(error)

    def keep_upstream(self, call: ModuleCall, i: int, tensor: Any) -> None:
        """Have the later backward pass write the gradient of output `tensor` into `call`."""

        def hook(gradient: Any) -> None:
            call.upstream[i] = self.array(gradient)

        tensor.register_hook(hook)

    def scale(self, value: Any) -> float:
        floats = [t for t in tensors_in(value, self.is_tensor) if t.is_floating_point() and 0 not in t.shape]
        return max((largest(self.backend.to_array(tensor, copy=False)) for tensor in floats), default=0.0)

    def close(self) -> None:
        """End the calls that were running when the model raised, innermost first."""
        for call in reversed(self.running if self.keep_calls else ()):
            self.note_random(call)
            self.trace.calls[call.label] = call
