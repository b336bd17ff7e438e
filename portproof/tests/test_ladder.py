"""`portproof.ladder`: what it offers, and its functions for whole models."""

import subprocess
import sys

import numpy as np
import paddle
import pytest
import torch
import toy_pairs

from portproof import ladder
from portproof.compare import FAIL, PASS, REFUSED
from portproof.ladder.rung import needed, on_rung, reference_name
from sturdyio.cli import UserError


class Ref(torch.nn.Module):
    def __init__(self, norm: type = torch.nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(5, 6), norm(6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Port(paddle.nn.Layer):
    def __init__(self, outputs: int = 3, cut: bool = False, norm: type = paddle.nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.norm = paddle.nn.Linear(5, 6), norm(6)
        self.last, self.cut = paddle.nn.Linear(6, outputs), cut

    def forward(self, x):
        x = self.first(x)
        x = paddle.tanh(self.norm(x.detach() if self.cut else x))
        return self.last(x)


@pytest.fixture
def inputs(rng) -> list[np.ndarray]:
    return [rng.normal(size=(8, 5))]


def test_its_import_brings_no_framework():
    code = "import sys, portproof.ladder; sys.exit(bool({'torch', 'paddle', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_name_is_there_and_shown_to_those_who_look():
    assert {"cases", "forward", "Rung", "join_group"} <= set(dir(ladder)) == set(ladder.__all__)
    assert all(hasattr(ladder, name) for name in ladder.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ladder.nothing


@pytest.mark.parametrize("function", [ladder.forward, ladder.gradients])
def test_a_faultless_pair_passes(function, inputs):
    verdict = function(Ref(), Port(), inputs)
    assert verdict.status == PASS, str(verdict)


def test_gradients_are_compared_in_both_modes_and_precisions(inputs):
    rung = ladder.Rung("gradients", quiet=True)
    rows = [row.item for row in ladder.gradients(Ref(), Port(), inputs, rung=rung).rows if row.item.kind == "gradient"]
    assert {(item.mode, item.dtype) for item in rows} == {
        (m, d) for m in ("eval", "train") for d in ("float64", "float32")
    }
    assert "train/gradient/first.weight" in rung.files[0] and rung.files[0].keys() == rung.files[1].keys()


def test_a_gradient_that_is_cut_is_located(inputs):
    assert ladder.forward(Ref(), Port(cut=True), inputs).status == PASS
    verdict = ladder.gradients(Ref(), Port(cut=True), inputs)
    assert verdict.status == FAIL and "gradient/first.weight" in {str(row.item) for row in verdict.rows if row.status}


def test_gradients_that_nothing_has_are_refused(inputs):
    class Frozen(Ref):
        def forward(self, x):
            return super().forward(x.detach())

    class FrozenPort(Port):
        def forward(self, x):
            return super().forward(x.detach())

    port = FrozenPort()
    for parameter in port.parameters():
        parameter.stop_gradient = True
    verdict = ladder.gradients(Frozen().requires_grad_(False), port, inputs)
    assert verdict.status == REFUSED and "no gradients" in str(verdict)


def test_a_structure_that_differs_fails_and_nothing_is_run(inputs):
    for function in (ladder.forward, ladder.gradients):
        verdict = function(Ref(), Port(outputs=4), inputs)
        assert verdict.status == FAIL and {row.item.kind for row in verdict.rows} == {"structure"}


def test_statistics_are_part_of_the_forward_pass(inputs):
    """Paddle keeps the biased variance."""
    verdict = ladder.forward(Ref(torch.nn.BatchNorm1d), Port(norm=paddle.nn.BatchNorm1D), inputs)
    assert verdict.status == FAIL and verdict.location.name == "norm"


def test_same_weights_leaves_both_with_the_same_and_the_originals_alone(inputs):
    ref, port = Ref(), Port()
    before = ref.first.weight.detach().numpy().copy()
    same_ref, same_port = ladder.same_weights(ref, port, inputs, seed=3)
    assert np.array_equal(same_ref.first.weight.detach().numpy(), same_port.first.weight.numpy().T)
    assert np.array_equal(ref.first.weight.detach().numpy(), before)
    assert ladder.forward(same_ref, same_port, inputs, weights="own").status == PASS


def test_same_weights_needs_a_counterpart_of_every_tensor(inputs):
    with pytest.raises(UserError, match="step 01 has to pass first"):
        ladder.same_weights(Ref(), Port(outputs=4), inputs)


def test_inputs_are_drawn_by_shape_and_type():
    floats, whole, images = ladder.draw_inputs(["2,3", "4,5:int32:7", "2,3,32,16"], seed=1)
    assert floats.shape == (2, 3) and floats.dtype == np.float32
    assert whole.shape == (4, 5) and whole.dtype == np.int32 and whole.max() < 7
    assert images.shape == (2, 3, 32, 16)
    with pytest.raises(UserError, match="input '2;3' is no shape"):
        ladder.draw_inputs(["2;3"], seed=1)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_special_is_drawn(seed):
    """A padding index, an end of text; and no mask that hides everything, or nothing."""
    whole, few, mask, column = ladder.draw_inputs(["3,4:int64:1000", "2:int64:50", "50,3:bool", "4,1:bool"], seed)
    assert {0, 1, 999} <= set(whole.flat) and len(set(whole.flat)) > 4
    assert set(few) == {0, 49}
    assert mask.dtype == bool and mask.any(axis=1).all() and not mask.all(axis=1).any() and len(set(mask.sum(1))) == 2
    assert column.any() and not column.all()


def test_inputs_by_keyword_are_drawn():
    drawn = ladder.draw_inputs(["2,3", "mask=2,3:bool", "2:int64:9"], seed=0)
    assert list(drawn) == [0, "mask", 1] and drawn["mask"].dtype == bool and drawn[1].shape == (2,)
    for texts in (["a=2", "a=3"], ["1=2,3"], ["=2"], ["2,3:bool:4"], ["2:float32:4"]):
        with pytest.raises(UserError, match="input '"):
            ladder.draw_inputs(texts, seed=0)


class RefDrop(torch.nn.Module):
    def forward(self, x):
        return x * torch.bernoulli(torch.full_like(x[:, :1], 0.9)) / 0.9 if self.training else x


class PortDrop(paddle.nn.Layer):
    def forward(self, x):
        return x * paddle.bernoulli(paddle.full_like(x[:, :1], 0.9)) / 0.9 if self.training else x


@pytest.mark.parametrize("function", [ladder.forward, ladder.gradients])
def test_random_numbers_are_lent_and_said(inputs, function):
    ref = torch.nn.Sequential(torch.nn.Linear(5, 6), RefDrop(), torch.nn.Linear(6, 3))
    port = paddle.nn.Sequential(paddle.nn.Linear(5, 6), PortDrop(), paddle.nn.Linear(6, 3))
    verdict = function(ref, port, inputs)
    assert verdict.status == PASS, str(verdict)
    assert "random numbers are lent to both sides in train mode: uniform (8, 1)" in verdict.log


def test_forward_of_keyword_arguments(inputs):
    verdict = ladder.forward(Ref(), Port(), {"x": inputs[0]})
    assert verdict.status == PASS and any("one sample" in line for line in verdict.log)


def coded(ref_code, port_code):
    """A linear layer and a ReLU, and what each side does with them."""
    ref = toy_pairs.Ref(ref_code, line=torch.nn.Linear(5, 5), act=torch.nn.ReLU())
    return ref, toy_pairs.Port(port_code, line=paddle.nn.Linear(5, 5), act=paddle.nn.ReLU())


def test_an_activation_may_be_called_twice(inputs):
    def code(m, x):
        return m.act(m.line(m.act(m.line(x))))

    def training(optimizer, clear):
        def make(model):
            rule = optimizer(model)

            def step(x):
                clear(rule)
                loss = model(x).mean()
                loss.backward()
                rule.step()
                return loss

            return step, rule

        return make

    pair = coded(code, code)
    assert ladder.forward(*pair, inputs).status == PASS
    make_ref = training(lambda m: torch.optim.SGD(m.parameters(), 0.1), torch.optim.SGD.zero_grad)
    make_port = training(lambda m: paddle.optimizer.SGD(0.1, m.parameters()), paddle.optimizer.SGD.clear_grad)
    batches = [(inputs[0],)]
    verdict = ladder.backward(*ladder.same_weights(*pair, inputs), make_ref, make_port, batches, train=False)
    assert verdict.status == PASS, str(verdict)


def test_branches_that_are_never_entered_are_refused_on_request(inputs):
    pair = coded(lambda m, x: m.line(x).clamp(max=1e9), lambda m, x: m.line(x))
    verdict = ladder.forward(*pair, inputs)
    assert verdict.status == PASS and str(verdict).endswith("; 1 branch never entered")
    refused = ladder.forward(*pair, inputs, all_branches=True)
    assert refused.status == REFUSED and "clamp, above 1e+09: choose another --seed" in refused.refusal


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x, w: (m.line(x * w), m.line(x).mean(1, keepdim=True).squeeze()),
        lambda m, x, w: (m.line(x * w).squeeze(), m.line(x).mean(1)),
    ],
    ids=["the second output", "the first"],
)
def test_an_axis_that_vanishes_with_one_sample_fails(code, inputs):
    """Of whichever output, and beside an input without an axis of samples."""
    pair = coded(lambda m, x, w: (m.line(x * w), m.line(x).mean(1)), code)
    verdict = ladder.forward(*pair, [*inputs, inputs[0][0]])
    assert verdict.status == FAIL and {row.reason for row in verdict.bad} <= {
        "shape: reference (1,), port ()", "shape: reference (1, 5), port (5,)"
    }  # fmt: skip


def needs_two(m, x):
    if len(x) < 2:
        raise ValueError("two samples at least")
    return m.line(x)


def test_a_port_that_cannot_run_one_sample_fails_with_what_it_raised(inputs):
    verdict = ladder.forward(*coded(lambda m, x: m.line(x), needs_two), inputs)
    assert verdict.status == FAIL
    assert any("raised ValueError: two samples at least" in row.reason for row in verdict.bad), str(verdict)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (needs_two, "raised ValueError: two samples at least"),
        (lambda m, x: m.line(x) / (x - x.mean(0)).abs().mean(), "gives NaN or infinity"),
    ],
)
def test_one_sample_that_the_reference_cannot_run_is_said_not_to_be_compared(code, why, inputs):
    verdict = ladder.forward(*coded(code, code), inputs)
    assert verdict.status == PASS, str(verdict)
    assert f"eval mode, one sample: not compared, since the reference {why}" in verdict.log
    assert str(verdict).endswith("; one sample alone not compared")


def test_a_factory_makes_a_new_model_each_time():
    make = ladder.model_factory("torch.nn:Linear(in_features=2, out_features=3)")
    assert make() is not make() and make().out_features == 3
    with pytest.raises(UserError, match="is no PKG.MOD:FACTORY"):
        ladder.model_factory("torch.nn:Linear(2)")


def test_what_has_to_be_filled_in_is_named_whichever_side_it_is():
    rung = ladder.Rung("half", quiet=True)

    def missing():
        raise ladder.to_fill_in("missing", "file.py", "write it")

    for guard in (rung.of_ref, rung.of_port):
        with pytest.raises(UserError, match="fill in missing in file.py: write it"):
            guard("part", missing)
    assert not rung.verdicts


def test_one_function_observes_both_sides():
    rung = ladder.Rung("half", quiet=True)
    assert rung.observe("quotient", divmod, 7, 9, 2) == ((3, 1), (4, 1)) and not rung.verdicts
    assert rung.observe("nothing", lambda side: None, 1, 2) == (None, None)
    with pytest.raises(UserError, match="the reference's quotient raised TypeError"):
        rung.observe("quotient", divmod, "", 9, 2)
    assert rung.observe("quotient", divmod, 7, "", 2) is None
    assert [row.name for row in rung.verdicts[0].rows] == ["quotient"] and rung.status == FAIL


def test_a_function_of_the_ladder_ends_where_nothing_more_can_be_judged():
    @on_rung
    def quotient(port, rung):
        assert needed(rung.observe("quotient", divmod, 7, port, 2)) == ((3, 1), (4, 1))
        rung.refuse("it goes on")

    assert quotient(9).refusal == "it goes on"
    verdict = quotient("")
    assert verdict.status == FAIL and [row.name for row in verdict.rows] == ["quotient"] and not verdict.refusal


def test_a_tensor_of_the_port_has_the_references_name():
    back = {"encoder": "body", "model": "", "": "head"}
    names = [reference_name(name, back) for name in ("encoder.weight", "model.bias", "scale", "other.weight")]
    assert names == ["body.weight", "bias", "head.scale", "other.weight"]


def test_a_rung_compares_and_keeps_at_once():
    rung = ladder.Rung("half", quiet=True)
    ref, port = {"a": np.array([1.0, 2.0])}, {"a": np.array([1.0, 2.5])}
    assert rung.compare(ref, port, {"a": 0.5}, title="close", keep="first/")
    assert not rung.compare(ref, port, title="equal")
    assert [verdict.title for verdict in rung.verdicts] == ["close", "equal"]
    assert [list(file) for file in rung.files] == [["first/a"], ["first/a"]]
