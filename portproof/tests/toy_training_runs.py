"""Toys for `ladder.train`: runs of two sides, without a framework: a linear model with dropout on its inputs."""

import errno
import os
import signal
from collections.abc import Mapping

import numpy as np

from portproof.ladder import to_fill_in

STEPS, EPOCHS = 30, 3


def run(
    seed: int, draw: int, options: Mapping[str, float], decay: float = 0.1, last_rate: float = 0.025, steps: int = STEPS
) -> dict:
    """One run with all keys that a linear model has."""
    data, masks = np.random.default_rng(seed), np.random.default_rng([seed, draw])
    x = data.normal(size=(steps, 16, 8)).astype(np.float32)
    y = x @ np.arange(8, dtype=np.float32) + 3
    w, b, losses, rates = np.zeros((1, 8), np.float32), np.zeros(1, np.float32), [], [0.1, 0.05, last_rate]
    for step in range(steps):
        rate = rates[step * EPOCHS // steps]
        if step == steps - steps // EPOCHS:
            before = w.copy()
        given = x[step] * (masks.random((16, 8)) < options.get("kept", 0.9))
        error = given @ w[0] + b - y[step]
        losses.append((error**2).mean())
        w = w - np.float32(rate) * (error @ given / 16 + decay * w)
        b = b - np.float32(rate) * error.mean()
    error = x[0] @ w[0] + b - y[0]
    return {
        "losses": np.array(losses),
        "lr": rates,
        "parameters/w": w,
        "parameters/b": b,
        "moved/w": w - before,
        "eval": ((error**2).mean(), 1 / (1 + (error**2).mean()), 16),
    }


def ref(seed, draw, options):
    return run(seed, draw, options)


def port(seed, draw, options):
    """With masks of its own."""
    return run(seed, draw + 1000, options)


# Faulty ports


def no_decay(seed, draw, options):
    return run(seed, draw + 1000, options, decay=0.0)


def other_rate(seed, draw, options):
    return run(seed, draw + 1000, options, last_rate=0.02500001)


def more_steps(seed, draw, options):
    return run(seed, draw + 1000, options, steps=STEPS + EPOCHS)


def diverged(seed, draw, options):
    return port(seed, draw, options) | {"losses": np.full(STEPS, np.nan)}


def no_eval(seed, draw, options):
    return {key: array for key, array in port(seed, draw, options).items() if key != "eval"}


def odd_eval(seed, draw, options):
    return port(seed, draw, options) | {"eval": 0.5}


# What either side may do wrong


def raises(seed, draw, options):
    raise ValueError(f"no such digits {options}")


def dies(seed, draw, options):
    os._exit(7)


def leaves_with_0(seed, draw, options):
    os._exit(0)


def is_killed(seed, draw, options):
    os.kill(os.getpid(), signal.SIGKILL)


def without_space(seed, draw, options):
    raise OSError(errno.ENOSPC, "No space left on device")


def returns_list(seed, draw, options):
    return [1.0, 2.0]


def returns_text(seed, draw, options):
    return run(seed, draw, options) | {"lr": ["fast"]}


def no_losses(seed, draw, options):
    return {"eval": (1.0, 1.0, 1.0)}


def same_masks(seed, draw, options):
    return run(seed, 0, options)


def no_lr(seed, draw, options):
    record = run(seed, draw, options)
    return {"losses": record["losses"], "parameters/b": record["parameters/b"]}


def other_keys(seed, draw, options):
    return run(seed, draw, options) | {f"parameters/{draw}": np.ones(1)}


def more(seed, draw, options):
    return no_lr(seed, draw, options) | {"dice": np.ones(3)}


def exits_with_2(seed, draw, options):
    raise SystemExit(2)


def not_filled_in(seed, draw, options):
    raise to_fill_in("port_run", "training.py", "train the port")
