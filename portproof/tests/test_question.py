"""What is remembered of a model's answers."""

from dataclasses import replace

import numpy as np
import paddle
import pytest
import torch

from portproof.arrays import Storage, largest, same_bits
from portproof.backends import backend
from portproof.backends.question import Memory, Question, Run, perturbed
from portproof.backends.trace import CALLS, OUTPUTS, UPSTREAM, Trace

X = [np.ones((2, 3), np.float32)]
FLOAT64 = Question.of_model(X, "float64", False, [np.ones(3)], CALLS)
FLOAT32, TRAIN = replace(FLOAT64, dtype="float32"), replace(FLOAT64, train=True)


def answer(memory: Memory, question: Question, size: int) -> None:
    key = question.key(())
    memory.make_room(question, key)
    memory.keep(question, key, Run(Trace(), [np.zeros(size, np.uint8)], gradients={"w": np.zeros(1)}))


def known(memory: Memory, *questions: Question) -> list[bool]:
    return [memory.find(question, question.key(())) is not None for question in questions]


def test_an_answer_serves_what_asks_for_less():
    memory = Memory()
    answer(memory, FLOAT64, 10)
    forward = Question.of_model(X, "float64", False)
    assert known(memory, FLOAT64, forward, replace(FLOAT64, keeps=OUTPUTS)) == [True, True, True]
    other_gradient = Question.of_model(X, "float64", False, [2 * np.ones(3)])
    moved = replace(FLOAT64, perturbation=1)
    assert not any(known(memory, replace(FLOAT64, keeps=UPSTREAM), other_gradient, moved, FLOAT32, TRAIN))
    assert forward.only_asked(memory.find(forward, forward.key(()))).gradients == {}


def test_one_mode_is_remembered_at_any_size_and_another_within_the_budget():
    memory = Memory(budget=100)
    answer(memory, FLOAT64, 1000)
    answer(memory, FLOAT32, 1000)
    assert known(memory, FLOAT64, FLOAT32) == [True, True]
    answer(memory, TRAIN, 10)
    assert known(memory, FLOAT64, FLOAT32, TRAIN) == [False, False, True]
    answer(memory, FLOAT64, 10)
    assert known(memory, FLOAT64, TRAIN) == [True, True]


def test_large_answers_are_let_go_and_small_ones_are_not():
    for size, stays in ((10, True), (1000, False)):
        memory = Memory(budget=100)
        answer(memory, FLOAT64, size)
        memory.forget()
        assert known(memory, FLOAT64) == [stays]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_perturbed_numbers_are_the_next_ones_up_or_down(dtype):
    values = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32).T
    values[0, :6] = 0, -0.0, np.inf, -np.inf, np.nan, np.finfo(np.float32).tiny
    moved, kept = perturbed(values, dtype, np.random.default_rng(1)), [0, 1, 2, 3, 4]
    own = values.astype(dtype)
    assert moved.dtype == dtype and moved.tobytes() == perturbed(values, dtype, np.random.default_rng(1)).tobytes()
    assert np.array_equal(moved[0, kept], own[0, kept], equal_nan=True)
    up, down = (moved == np.nextafter(own, way, dtype=dtype) for way in (np.inf, -np.inf))
    up[0, kept] = True
    assert (up | down).all() and 0.4 < np.mean(up) < 0.6


def test_what_is_no_float_is_not_perturbed():
    ids = np.arange(3)
    assert perturbed(ids, "float64", np.random.default_rng(0)) is ids


def test_large_arrays_are_stored_as_they_are_and_no_file_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    large = np.random.default_rng(0).normal(size=(400, 500))
    given = {"turned": large.T, "small": np.ones(3, np.float32), "in rows": large, "strided": large[:, ::2]}
    storage = Storage()
    found = {key: storage.copy(array) for key, array in given.items()}
    assert not list(tmp_path.iterdir())
    for key, array in given.items():
        assert same_bits(found[key], array) and largest(found[key]) == largest(array)
    assert not found["in rows"].flags.writeable and not found["turned"].flags.writeable


def test_a_perturbed_gelu_is_rounded_anew():
    """At -6 its sum 1 + erf has lost all but 7 digits, and stays as it is if its argument moves by an ulp."""
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.GELU(), torch.nn.GELU("tanh"))
    ref = backend("torch").wrap(model, "reference")
    x = np.array([-6.0, -1.0, 2.0], np.float32)
    outputs = []
    for perturbation in (0, 1):
        question = Question.of_model([x], "float64", False, keeps=CALLS, perturbation=perturbation)
        outputs.append(ref.ask(question).trace.calls["1"].outputs[0])
    distance = np.abs(outputs[0] - outputs[1]) / np.abs(outputs[0])
    assert 1e-12 < distance[0] < 1e-6 and (distance[1:] < 1e-14).all(), distance


FUNCTIONS = [
    torch.nn.GELU(),
    torch.nn.GELU("tanh"),
    torch.nn.Softplus(),
    torch.nn.Softplus(2.0, 5.0),
    torch.nn.LogSigmoid(),
    torch.nn.Mish(),
    torch.nn.ELU(),
    torch.nn.ELU(0.5),
    torch.nn.ELU(-0.5),
    torch.nn.ELU(inplace=True),
    torch.nn.CELU(0.5),
    torch.nn.CELU(-0.5),
    torch.nn.SELU(),
    torch.nn.Tanh(),
    torch.nn.Sigmoid(),
]


class Slopes(torch.nn.Module):
    """A function, its slopes, and theirs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_()
            y = self.function(x * 1)
            slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
            return y, slope, torch.autograd.grad(slope.sum(), x)[0]


@pytest.mark.parametrize("function", FUNCTIONS, ids=repr)
def test_a_perturbed_function_is_that_function(function):
    """Also near 0 and far away, and so are its slopes.

    A sum of 1 and exp(x) keeps 1e-16 of 1, and the exact function leaves out 2e-9 of itself above a threshold of 20.
    """
    ref = backend("torch").wrap(Slopes(function), "reference")
    x = np.array([1e-3, -1e-3, *np.linspace(-30, 30, 50), 80, -80], np.float32)
    exact, perturbed = (ref.ask(Question.of_model([x], "float64", False, perturbation=i)) for i in (0, 1))
    assert not exact.trace.error and not perturbed.trace.error
    for one, other in zip(exact.output, perturbed.output):
        assert np.allclose(one, other, rtol=1e-8, atol=1e-12), np.abs(one - other).max()


def test_a_perturbed_tanh_is_as_far_away_as_another_frameworks():
    """Its slope at 5 to 9 is up to 2e-4, and in float32 all rounding. Limits are K + 1 = 5 times a distance."""
    x = np.linspace(5, 9, 1000, dtype=np.float32)
    slope = 1 / np.cosh(x.astype(np.float64)) ** 2
    ref = backend("torch").wrap(Slopes(torch.tanh), "reference")
    runs = (ref.ask(Question.of_model([x], "float32", False, perturbation=i)).output[1] for i in range(1, 6))
    distances = [largest(run - slope) for run in runs]
    port_x = paddle.to_tensor(x, stop_gradient=False)
    paddle.tanh(port_x).sum().backward()
    distance = largest(port_x.grad.numpy() - slope)
    assert distance / 5 < max(distances) < distance * 5, (distance, distances)


def test_perturbed_sums_are_rounded_anew():
    """As if 10,000 numbers around 1 were added one after the other: off by 33 U, not by U, and the same in each run."""

    class Sums(torch.nn.Module):
        def forward(self, x):
            return x.mean(1), torch.sum(x, dim=1), (x > 1).sum(1)

    ref = backend("torch").wrap(Sums(), "reference")
    x = np.random.default_rng(0).normal(1, 0.1, (50, 10_000)).astype(np.float32)
    exact, *perturbed = (ref.ask(Question.of_model([x], "float64", False, perturbation=i)).output for i in (0, 1, 1, 2))
    assert all(same_bits(*pair) for pair in zip(*perturbed[:2])) and not same_bits(perturbed[0][0], perturbed[2][0])
    for one, other in zip(exact[:2], perturbed[0]):
        off = np.abs(one - other) / np.abs(one) / 2**-53
        assert 10 < np.sqrt((off**2).mean()) < 100, off
    assert np.array_equal(exact[2], perturbed[0][2])


def _norms():
    for affine in (True, False):
        yield torch.nn.BatchNorm2d(4, momentum=0.3, affine=affine)
        yield torch.nn.BatchNorm2d(4, affine=affine, track_running_stats=False)
        yield torch.nn.InstanceNorm2d(4, affine=affine)
        yield torch.nn.InstanceNorm2d(4, affine=affine, track_running_stats=True)
        yield torch.nn.GroupNorm(2, 4, affine=affine)
        yield torch.nn.LayerNorm([4, 5, 6], elementwise_affine=affine)


@pytest.mark.parametrize("model", _norms(), ids=repr)
def test_a_perturbed_norm_is_a_norm(model):
    """Both agree in all but rounding, and leave the same statistics."""
    x = np.random.default_rng(0).normal(3, 1, (4, 4, 5, 6)).astype(np.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    ref = backend("torch").wrap(model, "reference")
    for train in (True, False):
        exact, perturbed = (ref.ask(Question.of_model([x], "float64", train, perturbation=i)) for i in (0, 1))
        assert not perturbed.trace.error and exact.buffers.keys() == perturbed.buffers.keys()
        pairs = [
            (exact.output[0], perturbed.output[0]),
            *((exact.buffers[k], perturbed.buffers[k]) for k in exact.buffers),
        ]
        for one, other in pairs:
            assert largest(one - other) <= 1e-13 * largest(one)
        assert not same_bits(exact.output[0], perturbed.output[0])
        if train and "running_mean" in exact.buffers:
            assert largest(exact.buffers["running_mean"]) > 0.1
