"""Training in float64 with lent dropout masks: right pairs pass, and a dropout that is lost or other is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as PF
import pytest
import torch
import torch.nn.functional as TF
from paddle.nn.functional import dropout as paddle_dropout
from paddle.nn.functional import dropout2d as paddle_dropout2d
from torch.nn.functional import dropout as torch_dropout

from portproof.backends.masks import Masks
from portproof.compare import FAIL, PASS, REFUSED
from portproof.ladder.rungs.fp64_runs import train_fp64

EPOCHS, STEPS = 2, 4
X, Y = (np.random.default_rng(5).normal(size=(STEPS, 8, length)) for length in (6, 1))
WEIGHTS = [np.random.default_rng(6).normal(size=shape) for shape in ((8, 6), (8,), (1, 8), (1,))]
Use = Callable[[Any, Any], Any]  # (model, activations (8, 8)) -> activations


class Ref(torch.nn.Module):
    def __init__(self, use: Use, drop: torch.nn.Module):
        super().__init__()
        self.use, self.one, self.two, self.drop = use, torch.nn.Linear(6, 8), torch.nn.Linear(8, 1), drop

    def forward(self, x):
        return self.two(self.use(self, torch.tanh(self.one(x))))


class Port(paddle.nn.Layer):
    def __init__(self, use: Use, drop: paddle.nn.Layer):
        super().__init__()
        self.use, self.one, self.two, self.drop = use, paddle.nn.Linear(6, 8), paddle.nn.Linear(8, 1), drop

    def forward(self, x):
        return self.two(self.use(self, paddle.tanh(self.one(x))))


def apply(model: Any, x: Any) -> Any:
    return model.drop(x)


def to_train(model: Any, epoch: int) -> None:
    model.train()


def ref_run(use: Use = apply, drop: torch.nn.Module | None = None) -> Callable:
    def run(batches: Callable) -> tuple[torch.nn.Module, list[float]]:
        model, losses = Ref(use, drop or torch.nn.Identity()).double(), []
        for parameter, array in zip((*model.one.parameters(), *model.two.parameters()), WEIGHTS):
            parameter.data = torch.tensor(array)
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        for _ in range(EPOCHS):
            model.train()
            for x, y in batches(list(zip(X, Y)), model):
                loss = ((model(x) - y) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            model(x)
        return model, losses

    return run


def port_run(
    use: Use = apply,
    drop: paddle.nn.Layer | None = None,
    begin: Callable[[Any, int], Any] = to_train,
    evaluated: Callable[[Any], Any] = paddle.nn.Layer.eval,
) -> Callable:
    """`begin(model, epoch)` comes before an epoch, `evaluated(model)` before an evaluation."""

    def run(batches: Callable) -> tuple[paddle.nn.Layer, list[float]]:
        model, losses = Port(use, drop or paddle.nn.Identity()).to(dtype="float64"), []
        for parameter, array in zip((*model.one.parameters(), *model.two.parameters()), WEIGHTS):
            parameter.set_value(array.T)
        optimizer = paddle.optimizer.SGD(0.02, parameters=model.parameters())
        for epoch in range(EPOCHS):
            begin(model, epoch)
            for x, y in batches(list(zip(X, Y)), model):
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                losses.append(loss.item())
            evaluated(model)
            model(x)
        return model, losses

    return run


def torch_images(model: Ref, x: torch.Tensor) -> torch.Tensor:
    return model.drop(x.reshape(8, 4, 1, 2)).reshape(8, 8)


def paddle_images(model: Port, x: paddle.Tensor) -> paddle.Tensor:
    return model.drop(x.reshape([8, 4, 1, 2])).reshape([8, 8])


def channels_last(model: Port, x: paddle.Tensor) -> paddle.Tensor:
    images = x.reshape([8, 4, 1, 2]).transpose([0, 2, 3, 1])
    return model.drop(images).transpose([0, 3, 1, 2]).reshape([8, 8])


def torch_attention(model: Ref, x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(2, 2, 4, 4)
    return TF.scaled_dot_product_attention(x, x, x, dropout_p=0.3 * model.training).reshape(8, 8)


def torch_own_attention(model: Ref, x: torch.Tensor, need_weights: bool = True) -> torch.Tensor:
    """Whose functions are called inside another one; which, says `need_weights`."""
    x, one, zero = x.reshape(4, 4, 4), torch.eye(4).double(), torch.zeros(12).double()
    weights = torch.cat([one, one, one])
    settings = 4, 2, weights, zero, None, None, False, 0.3, one, zero[:4], model.training
    return TF.multi_head_attention_forward(x, x, x, *settings, need_weights=need_weights)[0].reshape(8, 8)


def paddle_attention(model: Port, x: paddle.Tensor) -> paddle.Tensor:
    x = x.reshape([2, 2, 4, 4])
    weights = PF.softmax(x @ x.transpose([0, 1, 3, 2]) / 2)
    return (PF.dropout(weights, 0.3, training=model.training) @ x).reshape([8, 8])


def paddle_own_attention(model: Port, x: paddle.Tensor, masks: Sequence[int] = (8, 4, 4)) -> paddle.Tensor:
    """Of 4 tokens in 4 sequences, the tokens first, with 2 heads of 2 values."""
    x = x.reshape([4, 8, 2]).transpose([1, 0, 2])
    weights = PF.softmax(x @ x.transpose([0, 2, 1]) / 2**0.5)
    weights = PF.dropout(weights.reshape(masks), 0.3, training=model.training).reshape([8, 4, 4])
    return (weights @ x).transpose([1, 0, 2]).reshape([8, 8])


def paddle_in_place(model: Port, x: paddle.Tensor) -> paddle.Tensor:
    return paddle._C_ops.dropout_(x, None, 0.3, not model.training, "upscale_in_train", 0, False)


RIGHT = {
    "layers": (ref_run(drop=torch.nn.Dropout(0.3)), port_run(drop=paddle.nn.Dropout(0.3))),
    "functions by name": (
        ref_run(lambda m, x: torch_dropout(x, 0.3, m.training)),
        port_run(lambda m, x: paddle_dropout(x, 0.3, training=m.training)),
    ),
    "PyTorch's own function": (
        ref_run(lambda m, x: torch.dropout(x, 0.3, m.training)),
        port_run(drop=paddle.nn.Dropout(0.3)),
    ),
    "of all": (ref_run(drop=torch.nn.Dropout(1.0)), port_run(drop=paddle.nn.Dropout(1.0))),
    "two": (
        ref_run(lambda m, x: TF.dropout(TF.dropout(x, 0.3, m.training), 0.1, m.training)),
        port_run(lambda m, x: PF.dropout(PF.dropout(x, 0.3, training=m.training), 0.1, training=m.training)),
    ),
    "channels": (ref_run(torch_images, torch.nn.Dropout2d(0.3)), port_run(paddle_images, paddle.nn.Dropout2D(0.3))),
    "channels last": (
        ref_run(torch_images, torch.nn.Dropout2d(0.3)),
        port_run(channels_last, paddle.nn.Dropout2D(0.3, data_format="NHWC")),
    ),
    "channels by name": (
        ref_run(torch_images, torch.nn.Dropout2d(0.3)),
        port_run(lambda m, x: paddle_dropout2d(x.reshape([8, 4, 1, 2]), 0.3, m.training).reshape([8, 8])),
    ),
    "one axis": (
        ref_run(lambda m, x: x * TF.dropout(torch.ones(8, 1, dtype=x.dtype), 0.3, m.training)),
        port_run(drop=paddle.nn.Dropout(0.3, axis=0)),
    ),
    "volumes": (
        ref_run(lambda m, x: TF.dropout3d(x.reshape(8, 2, 2, 2, 1), 0.3, m.training).reshape(8, 8)),
        port_run(lambda m, x: PF.dropout3d(x.reshape([8, 2, 2, 2, 1]), 0.3, m.training).reshape([8, 8])),
    ),
    "volumes of one sample": (
        ref_run(lambda m, x: TF.dropout3d(x.reshape(8, 2, 2, 2), 0.3, m.training).reshape(8, 8)),
        port_run(drop=paddle.nn.Dropout(0.3, axis=0)),
    ),
    "alpha": (ref_run(drop=torch.nn.AlphaDropout(0.3)), port_run(drop=paddle.nn.AlphaDropout(0.3))),
    "alpha, in place": (
        ref_run(lambda m, x: TF.alpha_dropout(x + 1, 0.3, m.training, inplace=True)),
        port_run(lambda m, x: m.drop(x + 1), paddle.nn.AlphaDropout(0.3)),
    ),
    "attention": (ref_run(torch_attention), port_run(paddle_attention)),
    "attention inside a function": (ref_run(torch_own_attention), port_run(paddle_own_attention)),
    "attention inside attention": (
        ref_run(lambda m, x: torch_own_attention(m, x, need_weights=False)),
        port_run(lambda m, x: paddle_own_attention(m, x, masks=(4, 2, 4, 4))),
    ),
}
if hasattr(paddle.nn, "FeatureAlphaDropout"):  # not in Paddle 2.6
    layers = torch.nn.FeatureAlphaDropout(0.3), paddle.nn.FeatureAlphaDropout(0.3)
    RIGHT["alpha of channels"] = ref_run(torch_images, layers[0]), port_run(paddle_images, layers[1])
if hasattr(paddle._C_ops, "dropout_"):
    in_place = ref_run(lambda m, x: TF.dropout(x + 1, 0.3, m.training, inplace=True))
    RIGHT["in place"] = in_place, port_run(lambda m, x: paddle_in_place(m, x + 1))


@pytest.mark.parametrize("way", RIGHT)
def test_a_right_pair_passes_with_the_same_masks(way):
    verdict = train_fp64(*RIGHT[way])
    assert verdict.status == PASS
    assert {"dropout calls of each step", "p of each dropout call"} <= {row.name for row in verdict.rows}


def test_without_dropout_nothing_is_said_of_it():
    verdict = train_fp64(ref_run(), port_run())
    assert verdict.status == PASS and "dropout" not in str(verdict)


def test_masks_differ_by_seed_step_and_call_and_not_by_layout():
    masks = Masks(3)
    masks.begin_step()
    first, second = masks(0.5, [8, 4, 1, 1]), masks(0.5, [8, 4, 1, 1])
    masks.begin_step()
    third = masks(0.5, [8, 4, 1, 1])
    again = Masks(3)
    again.begin_step()
    assert np.array_equal(first.reshape(8, 1, 1, 4), again(0.5, [8, 1, 1, 4])) and masks.steps[0] == 2 * again.steps[0]
    other = Masks(4)
    other.begin_step()
    assert not any(np.array_equal(first, mask) for mask in (second, third, other(0.5, [8, 4, 1, 1])))
    assert abs(Masks(0)(0.2, [10000]).mean() - 0.8) < 5 * 0.004  # five standard deviations


def set_p(p: float, since: int = 1) -> Callable:
    def begin(model: Port, epoch: int) -> None:
        model.train()
        model.drop.p = p if epoch >= since else model.drop.p

    return begin


@pytest.mark.parametrize(
    ("begin", "evaluated", "name", "reason"),
    [
        (lambda m, epoch: epoch or m.train(), paddle.nn.Layer.eval, "calls", "reference 1, port 0, from step 4 on"),
        (set_p(0.0), paddle.nn.Layer.eval, "calls", "reference 1, port 0, from step 4 on"),
        (set_p(0.0, since=0), paddle.nn.Layer.eval, "calls", "reference 1, port 0, from step 0 on"),
        (lambda m, epoch: m.train() if epoch else m.eval(), paddle.nn.Layer.eval, "calls", "port 0, first in step 0"),
        (to_train, paddle.nn.Layer.train, "calls", "reference 1, port 2, first in step 3"),
        (set_p(0.1), paddle.nn.Layer.eval, "p of each", "reference 0.2, port 0.1, from step 4 on"),
        (set_p(0.1, since=0), paddle.nn.Layer.eval, "p of each", "reference 0.2, port 0.1, from step 0 on"),
    ],
)
def test_a_dropout_that_is_lost_or_another_is_named_with_its_step(begin, evaluated, name, reason):
    port = port_run(drop=paddle.nn.Dropout(0.2), begin=begin, evaluated=evaluated)
    verdict = train_fp64(ref_run(drop=torch.nn.Dropout(0.2)), port)
    assert verdict.status == FAIL and "usual causes: layers that an evaluation" in str(verdict)
    assert name in verdict.first_failure.name and reason in verdict.first_failure.reason


def test_a_scale_at_another_time_shows_in_the_losses():
    port = port_run(drop=paddle.nn.Dropout(0.2, mode="downscale_in_infer"))
    verdict = train_fp64(ref_run(drop=torch.nn.Dropout(0.2)), port)
    assert verdict.status == FAIL and verdict.first_failure.name == "loss"


CHANNELS = ref_run(torch_images, torch.nn.Dropout2d(0.2))


def test_masks_of_other_shapes_are_not_lent_and_all_else_is_compared():
    verdict = train_fp64(CHANNELS, port_run(drop=paddle.nn.Dropout(0.2)))
    assert verdict.status == PASS
    shapes = "the masks of a step have shapes [(8, 4)] in the reference and [(8, 8)] in the port, not the same"
    assert f"{shapes}: both sides go on without dropout" in str(verdict)
    assert [row.name for row in verdict.rows][:2] == ["whether a step has dropout", "loss"]


def test_a_dropout_of_another_shape_that_is_lost_is_found():
    port = port_run(drop=paddle.nn.Dropout(0.2), begin=lambda m, epoch: epoch or m.train())
    verdict = train_fp64(CHANNELS, port)
    assert verdict.status == FAIL and verdict.first_failure.name == "whether a step has dropout"
    assert verdict.first_failure.reason == "reference 1, port 0, from step 4 on"


def test_a_reference_that_draws_masks_of_its_own_is_refused():
    own = ref_run(lambda m, x: x * (torch.rand(8, 8) > 0.2) / 0.8)
    assert train_fp64(own, port_run(drop=paddle.nn.Dropout(0.2))).status == REFUSED
