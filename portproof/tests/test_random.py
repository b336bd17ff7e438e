"""Random models: draws are lent to both sides, and what differs beside them is found."""

import random

import numpy as np
import paddle
import pytest
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF
from toy_pairs import Port, Ref, assert_aligned, assert_located, assert_refused, normal

import portproof
from portproof import align
from portproof.backends import backend
from portproof.backends.draws import Draw, Draws, difference
from portproof.backends.question import Question
from portproof.backends.trace import UPSTREAM
from portproof.compare import FAIL, PASS

T, P = torch.nn, paddle.nn
PT, PP = torch.distributions, paddle.distribution
RATES = [[0.1, 0.9, 0.5], [0.7, 0.2, 0.6]]
BOTH = {  # the same numbers in both frameworks: (PyTorch's, Paddle's)
    "rand": (lambda x: torch.rand(2, 3, dtype=x.dtype), lambda x: paddle.rand([2, 3], x.dtype)),
    "randn": (lambda x: torch.randn((2, 3), dtype=x.dtype), lambda x: paddle.randn([2, 3], x.dtype)),
    "rand_like": (torch.rand_like, lambda x: paddle.rand(x.shape, x.dtype)),
    "randn_like": (torch.randn_like, lambda x: paddle.standard_normal(x.shape, x.dtype)),
    "normal of tensors": (lambda x: torch.normal(x, 2 * x.abs()), lambda x: paddle.normal(x, 2 * x.abs())),
    "normal of numbers": (lambda x: torch.normal(1.0, 2.0, (2, 3)), lambda x: paddle.normal(1.0, 2.0, [2, 3])),
    "uniform": (lambda x: x.clone().uniform_(-2, 3), lambda x: paddle.uniform([2, 3], x.dtype, -2.0, 3.0)),
    "uniform_": (lambda x: x.clone().uniform_(), lambda x: x.clone().uniform_(0.0, 1.0)),
    "normal_": (lambda x: x.clone().normal_(1, 2), lambda x: x.clone().normal_(1.0, 2.0)),
    "exponential_": (lambda x: x.clone().exponential_(2), lambda x: x.clone().exponential_(2.0)),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), lambda x: paddle.bernoulli(PF.sigmoid(x))),
    "bernoulli, method": (lambda x: x.sigmoid().bernoulli(), lambda x: paddle.bernoulli(PF.sigmoid(x))),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.3), lambda x: x.clone().bernoulli_(0.3)),
    "randint": (lambda x: torch.randint(3, 9, (2, 3)), lambda x: paddle.randint(3, 9, [2, 3])),
    "randint from 0": (lambda x: torch.randint(9, (2, 3)), lambda x: paddle.randint(9, shape=[2, 3])),
    "randperm": (lambda x: torch.randperm(9), lambda x: paddle.randperm(9)),
    "multinomial": (
        lambda x: torch.multinomial(x.exp(), 5, replacement=True),
        lambda x: paddle.multinomial(x.exp(), 5, replacement=True),
    ),
    "multinomial without replacement": (
        lambda x: torch.multinomial(x.exp(), 2),
        lambda x: paddle.multinomial(x.exp(), 2),
    ),
    "gumbel_softmax": (lambda x: TF.gumbel_softmax(x, 0.7), lambda x: PF.gumbel_softmax(x, 0.7)),
    "hard gumbel_softmax": (lambda x: TF.gumbel_softmax(x, hard=True), lambda x: PF.gumbel_softmax(x, hard=True)),
    "Normal": (lambda x: PT.Normal(x, 2.0).rsample(), lambda x: PP.Normal(x, paddle.full_like(x, 2.0)).rsample()),
    "Uniform": (lambda x: PT.Uniform(x, x + 2).sample(), lambda x: PP.Uniform(x, x + 2).sample()),
    "Bernoulli": (lambda x: PT.Bernoulli(x.sigmoid()).sample(), lambda x: PP.Bernoulli(PF.sigmoid(x)).sample()),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", BOTH)
def test_both_frameworks_draw_the_same(name, dtype):
    given, found, made = np.array(RATES, dtype), [], []
    for which, draw in zip(("torch", "paddle"), BOTH[name]):
        own = backend(which)
        x = own.tensor(given)
        made.append([])
        with own.runs.new_tensors(dtype), own.runs.lent_draws(Draws(3, made[-1])):
            before = own.runs.random_state()
            found += [own.to_array(draw(x)), own.to_array(draw(x))]
            assert own.runs.random_state() == before, "its own generator was used"
    assert made[0] and difference(*made) is None
    tolerance = {"float32": 1e-6, "float64": 1e-14}[dtype]
    for ref, port in zip(found[:2], found[2:]):
        np.testing.assert_allclose(port, ref, tolerance, tolerance)
        assert ref.dtype == port.dtype
    assert not np.array_equal(found[0], found[1]) or found[0].dtype.kind == "i" or set(found[0].flat) <= {0.0, 1.0}


def test_what_is_lent_has_the_distribution_of_what_it_replaces():
    draws = Draws(0, [])
    many = draws.normal([100_000])
    assert abs(many.mean()) < 0.02 and abs(many.std() - 1) < 0.02
    many = draws.uniform([100_000])
    assert many.min() > 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.01
    assert np.array_equal(many, np.float32(many))
    assert abs(draws.exponential([100_000]).mean() - 1) < 0.02
    counts = np.bincount(draws.chosen(np.array([1.0, 0.0, 3.0]), 100_000, True)) / 100_000
    np.testing.assert_allclose(counts, [0.25, 0, 0.75], atol=0.01)
    first = draws.chosen(np.tile([1.0, 0.0, 3.0], (20_000, 1)), 2, False)
    np.testing.assert_allclose((first[:, 0] == 2).mean(), 0.75, atol=0.02)
    assert not (first == 1).any()


def test_a_generator_and_a_seed_of_its_own_are_left_alone():
    own, made = backend("torch").runs, []
    alone = torch.rand(3, generator=torch.Generator().manual_seed(5))
    with own.lent_draws(Draws(0, made)):
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), alone)
        paddle_runs = backend("paddle").runs
        with paddle_runs.lent_draws(Draws(0, made)):
            first, second = (paddle.uniform([3], seed=7).numpy() for _ in range(2))
    assert np.array_equal(first, second) and not made
    assert torch.rand is own.framework.rand and "uniform_" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    ("ref", "port", "alike"),
    [
        ((4, 1, 1), (4,), True),
        ((2, 3, 4), (6, 4), True),
        ((24,), (2, 3, 4), True),
        ((), (1,), True),
        ((2, 3, 4), (2, 4, 3), False),
        ((4, 20), (20, 4), False),
        ((4,), (5,), False),
    ],
)
def test_which_shapes_hold_the_same_numbers_in_the_same_order(ref, port, alike):
    assert Draw("normal", ref).is_like(Draw("normal", port)) == alike
    assert (difference([Draw("normal", ref)], [Draw("normal", port)]) is None) == alike


# Whole pairs.


def layers(inputs=5, hidden=6):
    ref = {"a": T.Linear(inputs, 2 * hidden), "o": T.Linear(hidden, 3)}
    return ref, {"a": P.Linear(inputs, 2 * hidden), "o": P.Linear(hidden, 3)}


def vae(m, x):
    mu, log_var = m.a(x).chunk(2, 1)
    z = mu + torch.randn_like(mu) * torch.exp(log_var / 2) if m.training else mu
    return m.o(z), mu, log_var


def port_vae(noise):
    def code(m, x):
        mu, log_var = m.a(x).chunk(2, axis=1)
        return m.o(noise(m, mu, log_var)), mu, log_var

    return code


def right(m, mu, log_var):
    return mu + paddle.randn(mu.shape, mu.dtype) * paddle.exp(log_var / 2) if m.training else mu


FAULTS = {
    "the variance": lambda m, mu, s: mu + paddle.randn(mu.shape, mu.dtype) * s.exp() if m.training else mu,
    "times the mean": lambda m, mu, s: (
        mu * (1 + paddle.randn(mu.shape, mu.dtype) * (s / 2).exp()) if m.training else mu
    ),
    "noise of the log": lambda m, mu, s: mu + paddle.randn(mu.shape, mu.dtype) * s / 2 if m.training else mu,
}


def vae_pair(noise):
    ref, port = layers()
    return Ref(vae, **ref), Port(port_vae(noise), **port)


def test_a_reparameterized_model_is_judged():
    verdict = assert_aligned(*vae_pair(right), normal(4, 5))
    assert "random numbers are lent to both sides in train mode: normal (4, 6)" in str(verdict)
    assert any(row.item.mode == "train" and row.item.kind == "gradient" for row in verdict.rows)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_reparameterized_model_is_found(fault):
    assert_located(*vae_pair(FAULTS[fault]), normal(4, 5), at="", phase="forward")


def test_noise_in_eval_mode_is_a_fault():
    noise = lambda m, mu, s: mu + paddle.randn(mu.shape, mu.dtype) * (s / 2).exp()  # noqa: E731
    verdict = align(*vae_pair(noise), [normal(4, 5)])
    assert verdict.status == FAIL
    assert "the port gives another result each time it runs in eval mode, random numbers are taken by" in str(verdict)


def test_noise_in_eval_mode_of_both_sides_is_judged():
    ref, port = layers(5, 3)
    code = lambda m, x: m.o(m.a(x)[:, :3] + torch.randn(len(x), 3, dtype=x.dtype))  # noqa: E731
    port_code = lambda m, x: m.o(m.a(x)[:, :3] + paddle.randn([len(x), 3], x.dtype))  # noqa: E731
    assert_aligned(Ref(code, **ref), Port(port_code, **port), normal(4, 5))


def test_noise_with_the_other_sign_is_as_likely():
    noise = lambda m, mu, s: mu - paddle.randn(mu.shape, mu.dtype) * (s / 2).exp() if m.training else mu  # noqa: E731
    assert "where the port uses -x for x, as likely" in str(assert_aligned(*vae_pair(noise), normal(4, 5)))


UNLIKE = {
    "other kind": (lambda m, mu, s: mu + paddle.rand(mu.shape, mu.dtype) * s, "normal (4, 6), the port uniform (4, 6)"),
    "other shape": (
        lambda m, mu, s: mu + paddle.randn(mu.shape[::-1], mu.dtype).t() * s,
        "normal (4, 6), the port normal (6, 4)",
    ),
    "one more": (
        lambda m, mu, s: mu + paddle.randn(mu.shape, mu.dtype) * paddle.randn(mu.shape, mu.dtype),
        "no more, the port normal (4, 6)",
    ),
}


@pytest.mark.parametrize("which", UNLIKE)
def test_sides_that_draw_differently_are_refused(which):
    noise, words = UNLIKE[which]
    pair = vae_pair(lambda m, mu, s: noise(m, mu, s) if m.training else mu)
    text = "the sides draw differently in train mode: the reference " + words
    assert_refused(*pair, normal(4, 5), text=text)
    assert_aligned(*pair, normal(4, 5), modes=("eval",))


def test_a_side_that_draws_nothing_is_at_fault():
    verdict = assert_located(*vae_pair(lambda m, mu, s: mu), normal(4, 5), at="", phase="dropout")
    assert "the reference draws normal (4, 6) in its own code, the port nothing" in str(verdict)
    port = P.Sequential(P.Linear(5, 6), PortDrop(), P.Linear(6, 3))
    verdict = assert_located(T.Sequential(T.Linear(5, 6), T.Linear(6, 3)), port, normal(8, 5), at="", phase="dropout")
    assert "the port draws uniform (8, 1, 1) in 1, the reference nothing" in str(verdict)


def test_a_stochastic_depth_that_the_port_lacks_is_at_fault():
    port = P.Sequential(P.Linear(5, 6), P.Identity(), P.Linear(6, 3))
    verdict = assert_located(drops()[0], port, normal(8, 5), at="1", phase="dropout")
    assert "the reference draws uniform (8, 1) in 1, the port nothing" in str(verdict)
    assert_aligned(drops()[0], port, normal(8, 5), modes=("eval",))


def test_draws_of_one_side_that_do_not_show_are_no_fault():
    """Such as a stochastic depth that drops nothing."""
    ref, port = layers(5, 3)
    code = lambda m, x: m.o(m.a(x)[:, :3] + 0 * torch.rand(len(x), 3, dtype=x.dtype))  # noqa: E731
    pair = Ref(code, **ref), Port(lambda m, x: m.o(m.a(x)[:, :3]), **port)
    assert_refused(*pair, normal(4, 5), text="the reference uniform (4, 3), the port nothing")


def test_what_is_not_lent_is_refused_with_advice():
    ref, port = layers(5, 3)
    code = lambda m, x: m.o(m.a(x)[:, :3] * torch.poisson(torch.ones(len(x), 3)))  # noqa: E731
    port_code = lambda m, x: m.o(m.a(x)[:, :3] * paddle.poisson(paddle.ones([len(x), 3])))  # noqa: E731
    text = "draw with rand, randn, normal or bernoulli, which are lent to both sides, or judge the other mode"
    assert_refused(Ref(code, **ref), Port(port_code, **port), normal(4, 5), text=text)


# Stochastic depth: a layer without tensors.


class Drop(T.Module):
    def forward(self, x):
        return x * (torch.rand(len(x), 1, dtype=x.dtype) < 0.6) / 0.6 if self.training else x


class PortDrop(P.Layer):
    def __init__(self, scale=0.6, by=None):
        super().__init__()
        self.scale, self.by = scale, by or (lambda x: paddle.floor(0.6 + paddle.rand([len(x), 1, 1], x.dtype))[:, :, 0])

    def forward(self, x):
        return x * self.by(x) / self.scale if self.training else x


def drops(**options):
    ref = T.Sequential(T.Linear(5, 6), Drop(), T.Linear(6, 3))
    return ref, P.Sequential(P.Linear(5, 6), PortDrop(**options), P.Linear(6, 3))


def test_a_drop_path_is_judged_also_where_the_port_keeps_the_larger_numbers():
    verdict = assert_aligned(*drops(), normal(8, 5))
    assert "uniform (8, 1), where the port uses 1 - u for u, as likely" in str(verdict)
    assert "run as in eval mode" not in str(verdict)


def test_a_drop_path_that_does_not_scale_is_found_alone():
    by = lambda x: (paddle.rand([len(x), 1], x.dtype) < 0.6).astype(x.dtype)  # noqa: E731
    assert_aligned(*drops(by=by), normal(8, 5))
    assert_located(*drops(by=by, scale=1.0), normal(8, 5), at="1", phase="forward", cause="0.6 times")


def test_a_drop_path_that_draws_otherwise_is_switched_off():
    by = lambda x: (paddle.randn([len(x), 1], x.dtype) < 0.2533).astype(x.dtype)  # noqa: E731
    verdict = assert_aligned(*drops(by=by), normal(8, 5))
    assert "random in train mode, and run as in eval mode: the port's 1" in str(verdict)


def test_a_module_alone_draws_what_it_drew_in_the_model():
    class Noise(T.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model = backend("torch").wrap(T.Sequential(Noise(), Noise()), "reference")
    run = model.run([normal(4, 5)], "float64", train=True, calls=True)
    for label in ("0", "1"):
        call = run.trace.calls[label]
        alone = model.ask(Question(call, "float64", True))
        assert np.array_equal(alone.output[0], call.outputs[0])
    assert run.trace.calls["1"].draws_before == (Draw("normal", (4, 5)),)


def test_a_recorded_module_that_is_called_twice_alike_keeps_both_draws():
    class Noise(T.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    ref = Ref(lambda m, x: m.o(m.noise(x) + m.noise(x)), o=T.Linear(5, 5), noise=Noise())
    inputs = [normal(4, 5)]
    recorded = portproof.record(ref, inputs).model()
    run = recorded.ask(Question.of_model(recorded.inputs, "float64", True, recorded.cotangents[True], UPSTREAM))
    for label in ("noise", "noise#2"):
        call = run.trace.calls[label]
        alone = recorded.ask(Question(call.with_upstream(), "float64", True, True))
        assert np.array_equal(alone.output[0], call.outputs[0])


def test_a_random_model_is_recorded_and_judged(tmp_path):
    path = tmp_path / "vae.safetensors"
    portproof.record(vae_pair(right)[0], [normal(4, 5)]).save(path)
    for noise, status in ((right, PASS), (FAULTS["the variance"], FAIL)):
        verdict = portproof.judge(vae_pair(noise)[1], path)
        assert verdict.status == status, str(verdict)
        assert "random numbers are lent to both sides in train mode: normal (4, 6)" in str(verdict)


def test_what_is_computed_again_by_backward_is_refused():
    from torch.utils.checkpoint import checkpoint

    inner = lambda x: torch.sin(x) * torch.rand(len(x), 3, dtype=x.dtype)  # noqa: E731
    ref, port = layers(5, 3)
    code = lambda m, x: m.o(checkpoint(inner, m.a(x)[:, :3], use_reentrant=False))  # noqa: E731
    port_code = lambda m, x: m.o(paddle.sin(m.a(x)[:, :3]) * paddle.rand([len(x), 3], x.dtype))  # noqa: E731
    text = "the reference gives another result each time it runs in eval mode"
    assert_refused(Ref(code, **ref), Port(port_code, **port), normal(4, 5), text=text)


# Single numbers, and NumPy's and Python's generators.


def layer_dropped(factory):
    def code(m, x):
        kept = float(factory.rand([])) + np.random.uniform(0, 2) + random.random() + np.random.randn(3)[1]  # noqa: NPY002
        kept += random.gauss(1, 2) + np.random.randint(5) + random.randint(1, 3) + np.random.normal(1, [2, 3]).sum()  # noqa: NPY002
        return m.a(x) * kept if m.training else m.a(x)

    return code


def test_single_numbers_of_all_generators_are_lent():
    pair = Ref(layer_dropped(torch), a=T.Linear(4, 3)), Port(layer_dropped(paddle), a=P.Linear(4, 3))
    verdict = assert_aligned(*pair, normal(2, 4))
    assert "lent to both sides in train mode: uniform (), normal (3,), normal (), normal (2,)" in str(verdict)


def test_a_number_that_only_the_port_draws():
    ref = Ref(lambda m, x: m.a(x), a=T.Linear(4, 3))
    port = Port(lambda m, x: m.a(x) * random.random(), a=P.Linear(4, 3))
    verdict = align(ref, port, [normal(2, 4)])
    assert verdict.status == FAIL
    assert "the port gives another result each time it runs in eval mode" in str(verdict)


@pytest.mark.parametrize("name", ["normal_", "uniform_", "exponential_", "bernoulli_"])
def test_in_place_draws_of_a_tensor_without_axes(name):
    for own in (torch.zeros([], dtype=torch.float64), paddle.zeros([], "float64")):
        which = backend("torch" if isinstance(own, torch.Tensor) else "paddle")
        with which.runs.lent_draws(Draws(0, [])):
            assert getattr(own, name)().shape == own.shape


def test_dropout_of_a_tensor_without_axes():
    keep = lambda p, shape: np.random.default_rng(0).random(shape) >= p  # noqa: E731
    for which, drop in ((torch, TF.dropout), (paddle, PF.dropout)):
        with backend(which.__name__).runs.lent_dropout(keep):
            assert drop(which.ones([]), 0.5).item() == 2.0
