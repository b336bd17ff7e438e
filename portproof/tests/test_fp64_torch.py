"""PyTorch's float64 arithmetic, where it is replaced, is what is meant: here batch norm's, in train mode."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from portproof.backends.fp64_torch import ExactConstants
from portproof.compare.ruler import U64


def test_batch_norm_in_float64_is_exact():
    """In units of 2^-53 of the largest value: sums in pairs of blocks leave log2 of their length, 18, and some more.

    PyTorch's own adds one value after another, and is 116 off here.
    """
    rng = np.random.default_rng(0)
    x, weight, bias, upstream = (
        rng.normal(1, 2, (3, 2, 320, 400)),
        *rng.normal(size=(2, 2)),
        rng.normal(size=(3, 2, 320, 400)),
    )
    norm = torch.nn.BatchNorm2d(2, eps=1e-3, momentum=0.25).double()
    plain = copy.deepcopy(norm)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(weight))
        norm.bias.copy_(torch.tensor(bias))
    wide, w, b = x.astype(np.longdouble), *(array.astype(np.longdouble)[:, None, None] for array in (weight, bias))
    mean, count = wide.mean((0, 2, 3), keepdims=True), x[:, 0].size
    var = ((wide - mean) ** 2).mean((0, 2, 3), keepdims=True)
    expected = (wide - mean) / np.sqrt(var + np.longdouble(1e-3)) * w + b
    given = torch.tensor(x, requires_grad=True)
    with ExactConstants():
        output = norm(given)
    output.backward(torch.tensor(upstream))

    def error(got: torch.Tensor, exact: np.ndarray) -> float:
        return float(np.abs(got.detach().numpy() - exact).max() / np.abs(exact).max() / U64)

    assert error(output, expected) < 64
    assert error(norm.running_mean, 0.25 * mean.ravel()) < 64
    assert error(norm.running_var, 0.75 + 0.25 * var.ravel() * count / (count - 1)) < 64
    assert norm.num_batches_tracked == 1
    # the gradient, against that of the formula in PyTorch's own way
    again = torch.tensor(x, requires_grad=True)
    plain.load_state_dict(norm.state_dict())
    plain(again).backward(torch.tensor(upstream))
    torch.testing.assert_close(given.grad, again.grad, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad, rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(norm.bias.grad, plain.bias.grad, rtol=1e-11, atol=1e-9)


def test_batch_norm_on_one_value_is_refused_in_float64_too():
    with ExactConstants(), pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm2d(2).double()(torch.zeros(1, 2, 1, 1, dtype=torch.float64))


def test_batch_norm_in_eval_mode_and_in_float32_is_pytorchs_own():
    x = torch.tensor(np.random.default_rng(0).normal(size=(3, 2, 5, 4)))
    for dtype, train in ((torch.float64, False), (torch.float32, True)):
        norms = [torch.nn.BatchNorm2d(2, eps=2**-10).to(dtype).train(train) for _ in range(2)]
        with ExactConstants():
            ours = norms[0](x.to(dtype))
        assert torch.equal(ours, norms[1](x.to(dtype)))
        assert torch.equal(norms[0].running_var, norms[1].running_var)


@pytest.mark.parametrize("name", ["hardsigmoid", "hardswish", "celu"])
def test_an_activation_works_in_place_as_natively(name):
    function, given = getattr(torch.nn.functional, name), torch.linspace(-4, 4, 9, dtype=torch.float64)
    results = []
    for context in (nullcontext(), ExactConstants()):
        leaf = given.clone().requires_grad_()
        x = leaf * 1.0
        with context:
            y = function(x, inplace=True)
        assert torch.equal(x, y)
        y.sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
