"""Toy pairs: children by name and the code that calls them, in both frameworks; and what `align` must say of a pair."""

from collections.abc import Callable

import numpy as np
import paddle
import torch
from coded import Coded

from portproof import align
from portproof.compare import FAIL, PASS, REFUSED, Verdict


class Ref(Coded, torch.nn.Module):
    """In PyTorch."""


class Port(Coded, paddle.nn.Layer):
    """In PaddlePaddle."""


def normal(*shape: int) -> np.ndarray:
    """Normal numbers, float32, the same for the same shape."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def chaotic(factor: float, sin: Callable, start: Callable, sines: int = 9) -> Callable:
    """9 sines of 20 times the last magnify rounding 1e11 times: float32 keeps no digit, float64 some."""

    def code(m, x):
        x = start(m, x)
        for _ in range(sines):
            x = sin(factor * x)
        return x

    return code


def assert_aligned(ref: torch.nn.Module, port: paddle.nn.Layer, *inputs: np.ndarray, **options) -> Verdict:
    """A right port: every item judged, none outside, nothing located, the map confirmed by values."""
    verdict = align(ref, port, inputs, **options)
    assert verdict.status == PASS, str(verdict)
    assert verdict.location is None and not verdict.refusal
    assert "confirmed by values everywhere" in verdict.notes[0]
    for mode in options.get("modes", ("eval", "train")):
        for kind in ("float64/output", "float64/gradient/", "float32/output"):
            assert any(f"{mode} mode, {kind}" in row.name for row in verdict.rows), kind
    return verdict


def assert_located(
    ref: torch.nn.Module, port: paddle.nn.Layer, *inputs: np.ndarray, at: str, phase: str, cause: str = "", **options
) -> Verdict:
    """A wrong port: the module `at` and the phase are named, and the cause if one can be tested."""
    verdict = align(ref, port, inputs, **options)
    assert verdict.status == FAIL, str(verdict)
    assert verdict.location is not None, str(verdict)
    assert (verdict.location.name, verdict.location.phase) == (at, phase), str(verdict)
    assert cause in "; ".join(verdict.location.diagnosis), str(verdict)
    assert bool(cause) == bool(verdict.location.diagnosis), str(verdict)
    return verdict


def assert_refused(ref: torch.nn.Module, port: paddle.nn.Layer, *inputs: np.ndarray, text: str, **options) -> Verdict:
    """What cannot be told is not guessed."""
    verdict = align(ref, port, inputs, **options)
    assert verdict.status == REFUSED, str(verdict)
    assert text in verdict.refusal
    assert verdict.location is None
    return verdict
