"""Toys for `ladder.dist`: a linear model, trained by one step alone or by several processes, in each framework.

The port has the mistake `options["fault"]`, if there is one.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from portproof.compare import Item
from portproof.ladder.workers import join_group

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(8, 3)), RNG.normal(size=8)
ORDER = np.array([6, 1, 4, 7, 0, 3, 2, 5])


def train(place: tuple[int, int], exchanges: Sequence[Callable], options: Mapping, fault: str, dtype: str) -> dict:
    """One step as process `place` (rank, n); `exchanges` add arrays up, and give that of process 0."""
    (rank, n), (all_reduce, broadcast) = place, exchanges
    if fault == "dies" and rank == n - 1:
        raise RuntimeError("lost")
    share = ORDER[0 if fault == "same share" else rank :: n]
    x, y = X[share].astype(dtype), Y[share].astype(dtype)
    error = x @ np.ones(3, dtype) - y
    gradient = all_reduce(2 * x.T @ error / len(share)) / (1 if fault == "gradients summed" else n)
    weight = 1 - 0.125 * gradient
    if fault == "weights of one process" and rank:
        weight = weight * 1.5
    lines = 3 * (rank == 0 or fault == "every process logs")
    if fault == "the last process logs":
        lines = 3 * (rank == n - 1)
    record = {
        Item("images", "images", section="epoch 0"): share,
        Item("loss", "own loss", section="epoch 0"): np.mean(error**2),
        Item("w", "gradient", section="epoch 0"): gradient,
        Item("w", "parameter", section="epoch 0"): weight,
        Item("lines", "own lines", section="epoch 0"): np.array(lines),
        Item("samples", "samples", section="epoch 0"): len(share) if fault == "one share" else all_reduce(len(share)),
    }
    if options.get("statistics"):
        mean = np.zeros(3) if options["statistics"] == "equal" else x.mean(0)
        record[Item("mean", "own buffer", section="epoch 0")] = mean
        record[Item("mean", "buffer", section="epoch 0")] = mean if fault == "own buffers" else broadcast(mean)
    return record


def exchanged(exchange: Callable, to_tensor: Callable, n: int) -> Callable:
    """What an exchange in place between `n` processes makes of an array; of one process nothing."""

    def through(array: Any) -> np.ndarray:
        tensor = to_tensor(np.asarray(array))
        if n > 1:
            exchange(tensor)
        return tensor.numpy()

    return through


def ref(options: Mapping, dtype: str) -> dict[Item, Any]:
    import torch
    import torch.distributed as dist

    rank, n = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    join_group(lambda: n > 1 and dist.init_process_group("gloo"), dist.destroy_process_group)
    fault = options.get("fault of the reference", "")
    exchanges = [exchanged(each, torch.tensor, n) for each in (dist.all_reduce, partial(dist.broadcast, src=0))]
    return train((rank, n), exchanges, options, fault, dtype)


def port(options: Mapping, dtype: str) -> dict[Item, Any]:
    import paddle
    import paddle.distributed as dist

    rank, n = int(os.environ.get("PADDLE_TRAINER_ID", "0")), int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))

    def join() -> None:
        if n > 1:
            paddle.set_device("cpu")
            os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
            dist.init_parallel_env()

    join_group(join, dist.destroy_process_group)
    fault = options.get("fault", "")
    exchanges = [exchanged(each, paddle.to_tensor, n) for each in (dist.all_reduce, partial(dist.broadcast, src=0))]
    return train((rank, n), exchanges, options, fault, dtype)


def renamed(options: Mapping, dtype: str) -> dict[Item, Any]:
    """The port, whose model is a child of another."""
    found = port(options, dtype)
    return {
        replace(item, name="net.w", module="net") if item.name == "w" else item: array for item, array in found.items()
    }


def empty(options: Mapping, dtype: str) -> dict:
    return {}


def one_number(options: Mapping, dtype: str) -> dict:
    return {"loss": np.array(1.25, dtype)}


def no_dict(options: Mapping, dtype: str) -> list:
    return [1.0]


def no_array(options: Mapping, dtype: str) -> dict:
    return {"loss": object()}


def raises(options: Mapping, dtype: str) -> dict:
    raise ZeroDivisionError("no steps")


def waits(options: Mapping, dtype: str) -> dict:
    time.sleep(600)
    return {}


def other_in_float32(options: Mapping, dtype: str) -> dict:
    return {"loss" if dtype == "float64" else "mean loss": np.array(1.25, dtype)}


NOT_CALLABLE = 5
