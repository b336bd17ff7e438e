"""`ladder.backward`, `accumulation` and `epoch` on a small pair whose tensors have other names on the two sides."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
import toy_pairs
from paddle.nn import functional as P
from torch.nn import functional as F
from toy_pairs import chaotic

from portproof.compare import FAIL, PASS, REFUSED, ruler
from portproof.ladder.pairs.pair import same_weights
from portproof.ladder.rung import Rung
from portproof.ladder.rungs.ready_made import plain_steps
from portproof.ladder.rungs.training_step import accumulation, backward, epoch
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

WIDTH, CLASSES = 6, 3


class Ref(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.act = torch.nn.Linear(4, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.ReLU()
        self.drop, self.head = torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.drop(self.act(self.norm(self.fc(x)))))


class Norm(paddle.nn.BatchNorm1D):
    """Paddle's, but that the running variance takes in the unbiased one, as PyTorch's does."""

    def forward(self, x):
        before, n = self._variance * self._momentum, len(x)
        y = super().forward(x)
        if self.training:
            self._variance.set_value(before + (self._variance - before) * n / (n - 1))
        return y


class Port(paddle.nn.Layer):
    norm = Norm

    def __init__(self):
        super().__init__()
        self.first, self.bn, self.relu = paddle.nn.Linear(4, WIDTH), self.norm(WIDTH), paddle.nn.ReLU()
        self.drop, self.last = paddle.nn.Dropout(0.5), paddle.nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.last(self.drop(self.relu(self.bn(self.first(x)))))


def pair(kind: type[Port] = Port) -> tuple[Ref, Port]:
    torch.manual_seed(0)
    ref, port = Ref(), kind()
    torch.nn.init.normal_(ref.norm.weight, 1.0)
    for one, other in ((ref.fc, port.first), (ref.norm, port.bn), (ref.head, port.last)):
        for leaf in ("weight", "bias"):
            getattr(other, leaf).set_value(getattr(one, leaf).detach().numpy().T)
    return ref, port


def batches(count: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(5, 4)).astype(np.float32), rng.integers(0, CLASSES, 5)) for _ in range(count)]


def ref_of(train: bool = True, clip: float | None = None):
    def make(model):
        rule = torch.optim.SGD(model.parameters(), 0.05)
        rate = torch.optim.lr_scheduler.StepLR(rule, 1, 0.5)

        def step(x, y, accumulation=(0, 1)):
            place, size = accumulation
            model.train(train)
            if place == 0:
                rule.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss / size).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if place == size - 1:
                rule.step()
            return loss

        return step, rule, rate

    return make


def port_of(train: bool = True, **wrong):
    """The port's, with a mistake named in `wrong`."""

    def make(model):
        rate = paddle.optimizer.lr.StepDecay(0.05 + wrong.get("lr", 0.0), 1, 0.5)
        rule = paddle.optimizer.SGD(rate, model.parameters())

        def step(x, y, accumulation=(0, 1)):
            place, size = accumulation
            model.train() if train and not wrong.get("eval") else model.eval()
            if place == 0 and not wrong.get("kept"):
                rule.clear_grad()
            loss = P.cross_entropy(model(x), y)
            if wrong.get("raises"):
                raise RuntimeError("no kernel")
            (loss if wrong.get("sum") else loss / size).backward()
            if place == size - 1:
                rule.step()
            return loss * wrong.get("loss", 1.0)

        return step, rule, rate

    return make


def test_equal_steps_pass_in_train_mode():
    rung = Rung("test", quiet=True)
    verdict = backward(*pair(), ref_of(), port_of(), batches(), name="sgd", rung=rung)
    assert verdict.status == PASS, str(verdict)
    assert "train mode, float64, 3 iterations of sgd" in verdict.log[0]
    kinds = {row.item.kind for row in verdict.rows if row.item.dtype == "float64"}
    assert kinds == {"loss", "lr", "gradient", "parameter", "buffer"}
    assert {row.item.dtype for row in verdict.rows} == {"float64", "float32"}
    alone = {row.item.section for row in verdict.rows if row.item.section}
    assert alone == {"fc", "norm", "act", "drop", "head"}
    assert list(rung.curves) == ["train mode, sgd, loss", "train mode, sgd, lr"]
    np.testing.assert_array_equal(rung.curves["train mode, sgd, lr"][1], [0.05, 0.025, 0.0125])
    assert [*rung.files[1]][:2] == ["train/sgd/loss_0", "train/sgd/lr_0"] and len(rung.files[0]) == 6


def test_the_reference_runs_in_float32_only_where_the_least_limit_does_not_pass(monkeypatch):
    made = []

    def make(model):
        made.append(next(model.parameters()).dtype)
        return ref_of()(model)

    how = {"dtypes": ["float64"], "coefficients": "float64"}
    assert backward(*pair(), make, port_of(), batches(), **how).status == PASS
    assert made == [torch.float64]
    monkeypatch.setattr(ruler, "SEMANTIC_RTOL", 1e-18)
    verdict = backward(*pair(), make, port_of(), batches(), **how)
    assert verdict.status == PASS, str(verdict)
    assert made == [torch.float64, torch.float64, torch.float32]


def test_equal_steps_pass_in_eval_mode_in_either_precision():
    for dtypes in (["float64"], ["float32"]):
        verdict = backward(*pair(), ref_of(False), port_of(False), batches(), train=False, dtypes=dtypes)
        assert verdict.status == PASS, str(verdict)
        assert {row.item.dtype for row in verdict.rows} == set(dtypes)


@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        ({"loss": 1.001}, "iteration 0/loss"),
        ({"lr": 1e-9}, "iteration 0/lr"),
        ({"kept": True}, "iteration 1/gradient/head.bias"),
        ({"eval": True}, "iteration 0/mode"),
    ],
)
def test_a_wrong_step_is_named_by_what_differs_first(wrong, first):
    verdict = backward(*pair(), ref_of(), port_of(**wrong), batches())
    assert verdict.status == FAIL and verdict.first_failure.name == first
    assert verdict.location is None and "not located" in str(verdict)


class RefPlain(torch.nn.Module):
    """Without batch norm, so that dropout alone tells the modes apart."""

    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.head = (
            torch.nn.Linear(4, WIDTH),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.fc(x))))


class PortPlain(paddle.nn.Layer):
    p, drops = 0.5, True

    def __init__(self):
        super().__init__()
        self.fc, self.head = paddle.nn.Linear(4, WIDTH), paddle.nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = paddle.tanh(self.fc(x))
        return self.head(P.dropout(x, self.p, training=self.training and self.drops))


class DropsLess(PortPlain):
    p = 0.25


class DropsNothing(PortPlain):
    drops = False


@pytest.mark.parametrize(
    ("kind", "train", "port_train", "reason"),
    [
        (PortPlain, True, True, ""),
        (PortPlain, False, False, ""),
        (PortPlain, True, False, "the port is trained in eval mode, the reference in train mode"),
        (PortPlain, False, True, "the port is trained in train mode, the reference in eval mode"),
        (DropsLess, True, True, "dropout: p is 0.25 in the port, 0.5 in the reference"),
        (DropsNothing, True, True, "dropout: p is none in the port, 0.5 in the reference"),
    ],
)
@pytest.mark.parametrize("dtypes", [["float64"], ["float32"]])
def test_the_mode_and_dropout_of_a_step_are_the_references(kind, train, port_train, reason, dtypes):
    """Dropout is off, so nothing else differs."""
    sides = same_weights(RefPlain(), kind(), [batches(1)[0][0]])
    verdict = backward(*sides, ref_of(train), port_of(port_train), batches(1), train=train, dtypes=dtypes)
    assert verdict.status == (FAIL if reason else PASS), str(verdict)
    assert not reason or reason in {row.reason for row in verdict.bad}


class Detached(Port):
    def forward(self, x):
        return self.last(self.drop(self.relu(self.bn(self.first(x).detach()))))


class BiasedVariance(Port):
    norm = paddle.nn.BatchNorm1D


def test_a_module_at_fault_is_located():
    verdict = backward(*pair(Detached), ref_of(), port_of(), batches())
    assert verdict.status == FAIL and verdict.first_failure.name.startswith("iteration 0/gradient/fc.")
    verdict = backward(*pair(BiasedVariance), ref_of(), port_of(), batches(), dtypes=["float32"])
    assert verdict.status == FAIL and verdict.location.name == "norm" and verdict.location.phase == "buffers"


def test_a_frozen_parameter_of_the_port_is_found_and_of_both_is_none():
    ref, port = pair()
    port.last.bias.stop_gradient = True
    verdict = backward(ref, port, ref_of(), port_of(), batches(), dtypes=["float64"])
    assert verdict.status == FAIL and verdict.first_failure.name == "iteration 0/gradient/head.bias"
    ref.head.bias.requires_grad = False
    assert backward(ref, port, ref_of(), port_of(), batches()).status == PASS


def test_whose_step_raises_is_said():
    verdict = backward(*pair(), ref_of(), port_of(raises=True), batches())
    assert verdict.status == FAIL and "the port raised RuntimeError: no kernel" in str(verdict)

    def raises(*args):
        raise RuntimeError("no kernel")

    for make in (raises, lambda model: (raises, torch.optim.SGD(model.parameters(), 0.1))):
        with pytest.raises(UserError, match="the reference's .* raised RuntimeError: no kernel"):
            backward(*pair(), make, port_of(), batches())
    assert backward(*pair(), ref_of(), raises, batches()).status == FAIL


def test_whose_schedule_raises_is_said():
    class Broken:
        def step(self):
            raise RuntimeError("no such rate")

    def broken(make):
        return lambda model: (*make(model)[:2], Broken())

    verdict = backward(*pair(), ref_of(), broken(port_of()), batches())
    assert verdict.status == FAIL and "the port raised RuntimeError: no such rate" in str(verdict)
    with pytest.raises(UserError, match="the reference's training step raised RuntimeError: no such rate"):
        backward(*pair(), broken(ref_of()), port_of(), batches())


def wrapped(around):
    """The reference's make function with its step replaced by `around(step, model, x, y)`."""

    def make(model):
        step, rule, _ = ref_of()(model)
        return lambda x, y: around(step, model, x, y), rule

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), 0.1), "the reference's make function returns SGD"),
        (ref_of(train=False), "leaves its model in eval mode, but train=True"),
        (wrapped(lambda step, model, x, y: step(x, y).item()), "the reference's step returns a float"),
        (wrapped(lambda step, model, x, y: step(x, y).expand(2)), "a tensor of one number"),
        (wrapped(lambda step, model, x, y: model.train().fc(x).mean()), "has to call its model itself"),
        (wrapped(lambda step, model, x, y: model.train()(x=x).mean()), "on positional arguments only"),
    ],
)
def test_a_reference_that_keeps_no_promise(make, message):
    with pytest.raises(UserError, match=message):
        backward(*pair(), make, port_of(), batches())


def test_what_proves_nothing_is_refused():
    def no_gradient(step, model, x, y):
        loss = step(x, y)
        model.zero_grad()
        return loss

    verdict = backward(*pair(), wrapped(no_gradient), port_of(), batches())
    assert verdict.status == REFUSED and "leaves no gradients" in str(verdict)
    nan = [(np.full((5, 4), np.nan, np.float32), np.zeros(5, np.int64))]
    verdict = backward(*pair(), ref_of(), port_of(), nan)
    assert verdict.status == REFUSED and "the reference itself gives NaN or infinity at loss" in str(verdict)
    clipped = backward(*pair(), ref_of(clip=1e3), port_of(), batches(), clip_grad_norm=1e3, dtypes=["float64"])
    assert clipped.status == REFUSED and "are not clipped to 1000" in str(clipped)

    def still(model):
        step, rule, rate = ref_of()(model)
        rule.step = lambda: None
        return step, rule

    with pytest.raises(UserError, match="the reference's training moves no parameter"):
        backward(*pair(), still, port_of(), batches())


def test_a_loss_that_no_precision_judges_is_refused():
    """9 sines leave no digit in float32."""
    ref = toy_pairs.Ref(chaotic(20.1, torch.sin, lambda m, x: m.line(x)), line=torch.nn.Linear(4, CLASSES))
    port = toy_pairs.Port(chaotic(20.1, paddle.sin, lambda m, x: m.line(x)), line=paddle.nn.Linear(4, CLASSES))
    sides = same_weights(ref, port, [batches(1)[0][0]])
    for dtypes, status in ((["float32"], REFUSED), (["float64", "float32"], FAIL)):
        verdict = backward(*sides, ref_of(False), port_of(False, loss=1.01), batches(1), train=False, dtypes=dtypes)
        assert verdict.status == status, str(verdict)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give one batch or more"),
        ([np.zeros((5, 4))], "each a tuple"),
        ([()], "each a tuple"),
        ([*batches(1), batches(1)[0][:1]], "batch 1 has arrays of"),
    ],
)
def test_batches_that_are_none(given, message):
    with pytest.raises(UserError, match=message):
        backward(*pair(), ref_of(), port_of(), given)


def test_unequal_weights_and_unknown_precisions():
    ref, port = pair()
    port.last.bias.set_value(port.last.bias + 1.0)
    verdict = backward(ref, port, ref_of(), port_of(), batches())
    assert verdict.status == FAIL and verdict.first_failure.item.kind == "weights"
    with pytest.raises(UserError, match="dtypes"):
        backward(*pair(), ref_of(), port_of(), batches(), dtypes=["float16"])


def test_accumulation():
    verdict = accumulation(*pair(), ref_of(False), port_of(False), batches(3))
    assert verdict.status == PASS, str(verdict)
    assert {row.item.kind for row in verdict.rows} == {"gradient", "parameter"} and len(verdict.rows) == 24
    verdict = accumulation(*pair(), ref_of(False), port_of(False, sum=True), batches(2))
    assert verdict.status == FAIL and verdict.first_failure.name == "gradient/head.bias"
    assert "the port's gradients of two batches added up, against the reference's of both as one" in str(verdict)
    with pytest.raises(UserError, match="give two or more"):
        accumulation(*pair(), ref_of(False), port_of(False), batches(1))
    with pytest.raises(UserError, match="leaves its model in train mode, but train=False"):
        accumulation(*pair(), ref_of(), port_of(), batches(2))


def test_a_reference_that_does_not_average_is_seen_too():
    def summed(model):
        step, rule, _ = ref_of(False)(model)
        return lambda x, y, accumulation: step(x, y, (accumulation[0], 1 if accumulation[0] else 1)), rule

    assert accumulation(*pair(), summed, port_of(False), batches(2)).status == FAIL


def looped(make, wrong: bool = False):
    def of(model):
        step, rule, _ = make(model)

        def loop(tensors, log):
            for i, batch in enumerate(tensors):
                loss = step(*batch)
                log(f"{i + wrong}: {float(loss):.4f}")

        return loop, rule

    return of


def test_epoch():
    verdict = epoch(*pair(), looped(ref_of()), looped(port_of()), batches())
    assert verdict.status == PASS, str(verdict)
    assert verdict.rows[0].name == "log" and verdict.rows[0].shape == (3,) and verdict.log[-1].startswith("  2: ")
    assert verdict.rows[2].name == "epoch/parameter/fc.weight"
    verdict = epoch(*pair(), looped(ref_of()), looped(port_of(), wrong=True), batches(), title="one loop")
    assert verdict.status == FAIL and verdict.first_failure.name == "log" and "one loop" in str(verdict)
    verdict = epoch(*pair(), looped(ref_of()), looped(port_of(eval=True)), batches())
    assert verdict.status == FAIL
    verdict = epoch(*pair(), looped(ref_of()), looped(port_of(raises=True)), batches())
    assert verdict.status == FAIL and "the port raised RuntimeError" in str(verdict)


def test_what_is_to_be_ignored_in_the_log_is_left_out():
    def timed(make, seconds):
        def of(model):
            loop, rule = looped(make)(model)
            return lambda tensors, log: loop(tensors, lambda line: log(f"{line} in {seconds} s")), rule

        return of

    both = timed(ref_of(), 1.5), timed(port_of(), 0.25)
    verdict = epoch(*pair(), *both, batches(), ignore=r" in [\d.]+ s")
    assert verdict.status == PASS and " s" not in verdict.log[-1]
    assert epoch(*pair(), *both, batches()).first_failure.name == "log"


# Steps of the usual form.

RNG = np.random.default_rng(4)
X, LABELS = RNG.normal(size=(8, 4)).astype(np.float32), RNG.integers(0, CLASSES, 8)
LOSSES = F.cross_entropy, P.cross_entropy
ADAMS = (lambda p: torch.optim.Adam(p, 0.01)), (lambda p: paddle.optimizer.Adam(0.01, parameters=p))


@pytest.mark.parametrize(("optimizers", "train"), [(None, True), (None, False), (ADAMS, False)])
def test_plain_steps(optimizers, train):
    makes = plain_steps(LOSSES, optimizers, train=train)
    verdict = backward(*same_weights(Ref(), Port(), [X]), *makes, [(X, LABELS)] * 3, train=train)
    assert verdict.status == PASS, str(verdict)
    names = {row.name for row in verdict.rows if row.item.dtype == "float64"}
    assert {f"iteration {i}/{what}" for i in range(3) for what in ("loss", "norm.running_var")} <= names


WRONG_STEPS = {
    "the criterion": ((LOSSES[0], lambda y, labels: 2 * P.cross_entropy(y, labels)), None, "loss"),
    "the rate": (LOSSES, (ADAMS[0], lambda p: paddle.optimizer.Adam(0.02, parameters=p)), "lr"),
    "the optimizer": (LOSSES, (ADAMS[0], lambda p: paddle.optimizer.SGD(0.01, parameters=p)), "parameter"),
}


@pytest.mark.parametrize(("criterion", "optimizers", "kind"), WRONG_STEPS.values(), ids=WRONG_STEPS)
@pytest.mark.parametrize("train", [False, True])
def test_plain_steps_that_differ(criterion, optimizers, kind, train):
    makes = plain_steps(criterion, optimizers, train=train)
    verdict = backward(*same_weights(Ref(), Port(), [X]), *makes, [(X, LABELS)] * 2, train=train, dtypes=("float64",))
    assert verdict.status == FAIL and verdict.first_failure.item.kind == kind, str(verdict)


def test_plain_steps_on_several_inputs():
    class Two(torch.nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    class PortTwo(paddle.nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    inputs = [X, RNG.normal(size=(8, 1)).astype(np.float32)]
    ref, port = same_weights(Two(4, CLASSES), PortTwo(4, CLASSES), inputs, weights="reference")
    verdict = backward(ref, port, *plain_steps(LOSSES, inputs=2), [(*inputs, LABELS)])
    assert verdict.status == PASS, str(verdict)


def test_a_plain_step_clears_the_gradients_of_the_last():
    still = (lambda p: torch.optim.SGD(p, 0.0)), (lambda p: paddle.optimizer.SGD(0.0, parameters=p))
    makes = plain_steps(LOSSES, still, train=False)
    for model, make, tensor in zip_strict((Ref(), Port()), makes, (torch.from_numpy, paddle.to_tensor)):
        step, _ = make(model)
        weight, found = next(iter(model.parameters())), []
        for _ in range(2):
            loss = step(tensor(X), tensor(LABELS))
            found.append(weight.grad.numpy().copy())
        assert np.array_equal(*found) and found[0].any() and float(loss) > 0
