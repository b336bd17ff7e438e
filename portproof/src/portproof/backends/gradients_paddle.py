"""Paddle's kernels whose backward is not the gradient of their own forward.

Each kernel that a run goes back through is called alone, on the same values: its gradient along a direction has to be
the slope of its own forward, which needs no formula. So what is found is the framework's, and not the port's, fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops as ops

from portproof.arrays import largest
from portproof.backends.lent import patched

STEP = 1e-5
FINER = 8.0  # times, of a second step
OF_A_MASK = 1e4  # values from here on are no size for a step
FAR = 1e-3  # of the slope; a kernel's constants in float32 are less off
ROUNDING = 1e-9  # of a slope, as a share of its terms' summed sizes: 2**-52 / STEP is 2e-11, 45 times for long sums
# Values for the program, the first that show it.
DRAWN = ("normal(size=shape)", "uniform(0.1, 1, shape)", "normal(0, 100, shape)")


@dataclass
class _Call:
    name: str
    native: Callable
    args: list
    kwargs: dict[str, Any]
    upstream: dict[int, np.ndarray] = field(default_factory=dict)  # by place among the outputs

    @property
    def places(self) -> list[int]:
        """Of arguments that have a gradient."""
        return [i for i, arg in enumerate(self.args) if _needs_gradient(arg)]

    def note(self, output: int, sent: paddle.Tensor | None) -> None:
        if sent is not None:
            self.upstream[output] = sent.numpy()

    def wrong(self, place: int) -> str:
        """In words, what is wrong with the kernel's gradient along a direction; "" unless that is certain.

        In float32, whose slopes are too inexact, only what is not finite is.
        """
        x = self.args[place].numpy()
        along = np.random.default_rng(0).normal(size=x.shape) * (largest(x[np.abs(x) < OF_A_MASK]) or 1)

        def terms(step: float, given: paddle.Tensor | None = None) -> list[paddle.Tensor]:
            args = list(map(_kept, self.args))  # with the gradients that the run asks for: a kernel may rest on that
            args[place] = paddle.to_tensor(x + step * along) if given is None else given
            outputs = _outputs(self.native(*args, **self.kwargs))
            return [outputs[i] * paddle.to_tensor(sent) for i, sent in self.upstream.items()]

        own, at_x = paddle.to_tensor(x, stop_gradient=False), terms(0)
        # The rounding of a sum, whose terms may cancel one another.
        rounding = ROUNDING * sum(float(term.abs().sum()) for term in at_x)
        if abs(_total(terms(0)).item() - _total(at_x).item()) > rounding:  # it draws: no slope is measured
            return ""
        slope, unsure = _slope(lambda step: np.concatenate([each.numpy().ravel() for each in terms(step)]), rounding)
        told = f"where its own forward's slope is {slope:.6g}"
        try:
            _total(terms(0, own)).backward()
        except Exception:  # what a kernel raises
            return f"raises, {told}" if np.isfinite(slope) else ""
        if own.grad is None:  # not made to have one
            return ""
        found = float((own.grad.numpy() * along).sum())
        is_wrong = _is_wrong(found, slope, unsure, x.dtype == np.float64)
        return f"gives {found:.6g} along a direction, {told}" if is_wrong else ""

    def program(self, place: int) -> list[str]:
        """Five lines that show it; none if none do."""
        shapes, given, needed = [self.args[place].shape] * 2, [], [0]
        for i, arg in enumerate(self.args):
            if i == place:
                given.append("x")
            elif isinstance(arg, paddle.Tensor) and arg.is_floating_point():
                given.append(f"a[{len(shapes)}]")
                needed += [len(shapes)] * _needs_gradient(arg)
                shapes.append(arg.shape)
            else:
                given.append(f"paddle.to_tensor({arg.tolist()})" if isinstance(arg, paddle.Tensor) else repr(arg))
        given += [f"{key}={value!r}" for key, value in self.kwargs.items()]
        output, sent = next(iter(self.upstream.items()))
        several = isinstance(self.native(*self.args, **self.kwargs), (tuple, list))
        made = f"paddle._C_ops.{self.name}({', '.join(given)})" + (f"[{output}]" if several else "")
        shapes, dtype = [*map(tuple, shapes), sent.shape], str(self.args[place].numpy().dtype)
        for drawn in DRAWN:
            numbers = f"np.random.default_rng(i).{drawn}.astype({dtype!r}), stop_gradient=i not in {needed}"
            lines = [
                "import numpy as np, paddle",
                f"a = [paddle.to_tensor({numbers}) for i, shape in enumerate({shapes})]",
                f"x, f = a[0], lambda x: ({made} * a[-1]).sum()",
                f"slope = (f(a[0] + {STEP} * a[1]) - f(a[0] - {STEP} * a[1])).item() / {2 * STEP}",
                "f(x).backward(); print((x.grad * a[1]).sum().item(), slope)",
            ]
            if _shows(lines):
                return lines
        return []


def _shows(lines: list[str]) -> bool:
    """Whether the program's backward raises, or gives another number than its slope."""
    names: dict[str, Any] = {}
    try:
        exec("\n".join(lines[:4]), names)
    except Exception:  # an argument that cannot be written
        return False
    f, x, along = names["f"], names["a"][0], names["a"][1]
    slope, unsure = _slope(lambda step: f(x + step * along).numpy(), ROUNDING * abs(f(x).item()))
    try:
        names["f"](names["x"]).backward()
    except Exception:  # what a kernel raises
        return bool(np.isfinite(slope))
    return _is_wrong((x.grad * along).sum().item(), slope, unsure, x.dtype == paddle.float64)


def _slope(terms: Callable[[float], np.ndarray], rounding: float) -> tuple[float, float]:
    """(the slope of a sum as a function of a step, how far off it may be: at kinks, where terms curve or are cut off).

    What kinks make of several terms may cancel, so each counts. A step that is `FINER` times smaller has as many times
    the rounding.
    """
    before, middle, after = map(terms, (-STEP, 0, STEP))
    slopes = (after - before) / (2 * STEP)
    finer = (terms(STEP / FINER) - terms(-STEP / FINER)) / (2 * STEP / FINER)
    bends = np.abs(after - 2 * middle + before).sum() / STEP
    return float(slopes.sum()), float(10 * bends + 10 * np.abs(finer - slopes).sum() + FINER * rounding)


def _is_wrong(found: float, slope: float, unsure: float, is_float64: bool) -> bool:
    if not np.isfinite(slope):
        return False
    is_far = abs(found - slope) > max(FAR * max(abs(found), abs(slope)), unsure)
    return not np.isfinite(found) or is_far and is_float64


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, paddle.Tensor) and value.is_floating_point() and not value.stop_gradient


def _kept(value: Any) -> Any:
    """A copy of a tensor: parameters get their old values back after the run."""
    if not isinstance(value, paddle.Tensor) or not value._is_initialized():  # a recurrent kernel's dropout state
        return value
    copy = value.detach().clone()
    copy.stop_gradient = value.stop_gradient
    return copy


def _total(terms: list[paddle.Tensor]) -> paddle.Tensor:
    first, *others = (term.sum() for term in terms)
    return sum(others, first)


def _outputs(result: Any) -> list:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _recorded(name: str, calls: list[_Call]) -> Callable:
    native = getattr(ops, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        result = native(*args, **kwargs)
        if any(map(_needs_gradient, args)):
            call = _Call(name, native, [_kept(arg) for arg in args], kwargs)
            calls.append(call)
            for i, output in enumerate(_outputs(result)):
                if _needs_gradient(output):
                    output.register_hook(partial(call.note, i))
        return result

    return record


def _names() -> Iterator[str]:
    """Kernels that do not work in place."""
    return (name for name, each in vars(ops).items() if callable(each) and not name.startswith("_") and name[-1] != "_")


def wrong_gradients(run: Callable[[], Any]) -> list[str]:
    """What is wrong with the first such kernel that `run` calls, and a program that shows it.

    Nothing where it is not proven.
    """
    calls: list[_Call] = []
    with patched({(ops, name): _recorded(name, calls) for name in _names()}):
        run()
    for call in calls:
        for place in call.places if call.upstream else ():
            told = ""
            # What a kernel raises when it is called alone; a mask's infinities.
            with suppress(Exception), np.errstate(all="ignore"):
                told = call.wrong(place)
            if told:
                where, program = f"paddle {paddle.__version__}, {call.name}", call.program(place)
                words = f"the framework's operation differs ({where}): its backward {told}"
                return [words, *(f"    {line}" for line in program)]
    return []
