"""How fast engines are: measured in turns in one run, so that a busy or slow machine slows them all alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

RESAMPLES = 2000  # of the rounds; the interval's ends then vary by a fiftieth of its width
MOST_CALLS = 200  # in one turn


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    turn: float = 0.1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """{name: seconds of each call, (rounds, calls)}; each calls as often as fills `turn` seconds, at least once.

    Each is called twice before it counts. In every other round the order is reversed.
    """

    def seconds(run: Callable[[], Any]) -> float:
        start = clock()
        run()
        return clock() - start

    calls: dict[str, int] = {}
    found: dict[str, list[list[float]]] = {name: [] for name in runs}
    for name, run in runs.items():
        run()
        calls[name] = max(1, min(MOST_CALLS, int(turn / max(seconds(run), 1e-9))))
    for i in range(rounds):
        for name in list(runs)[:: 1 if i % 2 == 0 else -1]:
            found[name].append([seconds(runs[name]) for _ in range(calls[name])])
    return {name: np.array(every) for name, every in found.items()}


def ratio(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """(how many times as fast as theirs ours is, the ends of the 95 % interval), of seconds from `interleaved`.

    A round's ratio is that of the medians of its calls; what counts is the median of the rounds' ratios. The interval
    is the bootstrap's (Efron and Tibshirani, An Introduction to the Bootstrap, section 13.3), over the rounds.
    """
    ratios = np.median(theirs, 1) / np.median(ours, 1)
    drawn = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], 1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)
