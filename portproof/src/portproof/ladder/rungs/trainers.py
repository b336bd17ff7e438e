"""What a training run of each side is that can be saved and resumed, and what a process does with it.

It is a callable `trainer(seed, options, dtype)`, called with these keywords. It returns an object with

    model, optimizer    which are read through the kit's backend
    schedule            if there is one, with state_dict()
    train(steps)        trains on so many batches, from where it is, and returns the loss of each; called once
    save(path)          writes all of it to this file
    load(path)          brings a new object to where the saved one was
    state()             if there is more to compare: {"KIND/NAME": array or number}, of the kinds below; of those of
                        each step all since it was made or loaded, a row a step

All that is drawn comes from `seed`. With `dtype` "float32" the run is as it is, with its dropout; with "float64" model
and losses are in float64, and there is no dropout. The kit casts what the model is called with.

    sampler     digests of what the model is called with, at each step
    mode        the training flag of each module; in float64 that of the model at each step
    random      states of the generators: the framework's, Python's, NumPy's
    schedule    the state of `schedule`
    lr          the learning rate at each step
    optimizer   the state of `optimizer`
    parameter, buffer
    loss        of each step
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from portproof.backends import backend
from portproof.backends.trace import map_tensors, tensors_at
from portproof.io.cli import resolve
from portproof.ladder.rungs.batches import arrays_at
from portproof.ladder.rungs.fp64_runs import Batches

# Causes before what they change, so that the first difference is a cause.
KINDS = ("sampler", "mode", "random", "schedule", "lr", "optimizer", "parameter", "buffer", "loss")
AT_EACH_STEP = ("sampler", "lr", "loss")
MODES_OF_STEPS = "mode/at each step"


def _digest(arrays: Iterable[np.ndarray]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


@dataclass
class _Watched:
    """A trainer's model, optimizer and schedule, and what the model was called with at each step."""

    trainer: Any
    batches: Batches
    exact: bool  # in float64
    rounded: Any = None  # a coefficient of the optimizer to be rounded to float32
    called_with: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    modes: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        own, model = self.batches.backend, self.trainer.model
        if not isinstance(model, own.module_class):
            raise TypeError(f"its `model` is a {type(model).__name__}, no {own.module_class_name}")
        own.runs.hook_before(model, self._before)

    def _before(self, model: Any, args: tuple, kwargs: Mapping[str, Any]) -> tuple | None:
        own = self.batches.backend
        is_tensor = own.framework.is_tensor
        if own.framework.is_grad_enabled():  # no evaluation
            tensors = tensors_at((args, kwargs), is_tensor)
            self.called_with.append(_digest(map(own.to_array, tensors.values())))
            self.modes.append(model.training)
            self.rates.append(own.training.learning_rate(self.trainer.optimizer))
            self.batches.move(model)
            if self.rounded is not None:  # anew at each step, for a schedule sets it again
                own.training.round_coefficient(self.trainer.optimizer, self.rounded)
        if not self.exact:
            return None
        return map_tensors((args, kwargs), is_tensor, partial(self.batches.given, model=model))

    def train(self, steps: int) -> dict[str, Any]:
        """The items of each step."""
        losses = np.asarray(self.trainer.train(steps), np.float64)
        if losses.shape != (steps,):
            raise ValueError(f"train({steps}) returned losses of shape {losses.shape}, not ({steps},)")
        if not self.rates:
            raise ValueError("train() never calls its `model`")
        own = {MODES_OF_STEPS: self.modes} if self.exact else {"sampler/model inputs": self.called_with}
        return {**own, "lr": np.array(self.rates), "loss": losses}

    def state(self) -> dict[str, Any]:
        """What is there at this moment; in float64 only what both sides have."""
        arrays = self.batches.backend.arrays_of(self.trainer.model)
        found = {} if self.exact else self._of_framework()
        found |= {f"parameter/{name}": array for name, array in arrays.parameters().items()}
        found |= {f"buffer/{name}": array for name, array in arrays.buffers().items()}
        for key, array in self.trainer.state().items() if hasattr(self.trainer, "state") else ():
            kind = key.partition("/")[0]
            if kind not in KINDS:
                raise ValueError(f"state() has {key!r}, whose kind is none of {', '.join(KINDS)}")
            if kind != "random" or not self.exact:
                found[key] = np.atleast_1d(array) if kind in AT_EACH_STEP else array
        return found

    def _of_framework(self) -> dict[str, Any]:
        trainer, own = self.trainer, self.batches.backend
        found = {
            "random/framework": own.runs.next_random(),
            "random/Python": _digest([np.array(repr(random.getstate()))]),
            "random/NumPy": _digest(map(np.asarray, np.random.get_state())),  # noqa: NPY002
        }
        found |= {f"mode/{name or 'model'}": one.training for name, one in own.layers.named_modules(trainer.model)}
        if hasattr(trainer, "schedule"):
            found |= arrays_at(trainer.schedule.state_dict(), "schedule/")
        for name, state in own.training.optimizer_state(trainer.optimizer, trainer.model).items():
            found |= arrays_at(state, f"optimizer/{name}")
        return found


def _rounded_runs(trainer: str, framework: str, made_with: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """One run in float64 for each coefficient of a PyTorch optimizer, rounded to float32 -> {NUMBER/KIND/NAME: array}.

    Arguments as in `part_of_run`.
    """
    own, make = backend(framework), resolve(trainer, "the trainer")
    found: dict[str, Any] = {}
    with own.runs.exact_constants():
        for number, coefficient in enumerate(own.training.coefficients(make(**made_with).optimizer)):
            watched = _Watched(make(**made_with), Batches(own), True, coefficient)
            end = watched.train(steps) | watched.state()
            found |= {f"{number}/{key}": array for key, array in end.items() if np.size(array)}
    return found


def part_of_run(
    trainer: str,
    framework: str,
    made_with: Mapping[str, Any],
    steps: int,
    loaded_from: str = "",
    saved_to: str = "",
    again: str = "",
) -> dict[str, Any]:
    """What a process does: train, perhaps from a file, perhaps to one -> {STAGE/KIND/NAME: array}.

    `made_with` are the trainer's arguments. Stages are "new", "loaded" and "end". With `again` the reference runs
    again in float64, "moved" by one ulp before each step, or once for each coefficient, "rounded".
    """
    if again == "rounded":
        return _rounded_runs(trainer, framework, made_with, steps)
    own, exact = backend(framework), made_with["dtype"] == "float64"
    jitter = np.random.default_rng([made_with["seed"], 7]) if again else None
    stages = {}
    with own.runs.exact_constants() if exact else nullcontext():
        watched = _Watched(resolve(trainer, "the trainer")(**made_with), Batches(own, jitter), exact)
        stages["new"] = watched.state()
        if loaded_from:
            watched.trainer.load(loaded_from)
            stages["loaded"] = watched.state()
        at_each_step = watched.train(steps)
        stages["end"] = at_each_step | watched.state()
        if saved_to:
            watched.trainer.save(saved_to)
    return {
        f"{stage}/{key}": array for stage, arrays in stages.items() for key, array in arrays.items() if np.size(array)
    }
