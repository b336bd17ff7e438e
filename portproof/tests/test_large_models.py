"""Large models: gradients are taken away as they come, and what lies in files is what would be in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
import torch
from paddle.distributed.fleet.utils import recompute
from torch.utils.checkpoint import checkpoint

import portproof
from portproof import arrays
from portproof.backends import backend
from portproof.backends import model as models
from portproof.backends.lent import taking_gradients
from portproof.compare import FAIL, PASS

WIDTH, LAYERS = 4, 5
X = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)


class InTurn:
    """Runs its layers one behind the other, and the first once more."""

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = self.run(layer, x)
        return x


class Ref(InTurn, torch.nn.Module):
    """Layers in a row, the first of which comes again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def run(self, layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return layer(x).tanh()


class Checkpointed(Ref):
    """Goes back through each layer by a backward pass of its own."""

    def run(self, layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().run, layer, x, use_reentrant=True)


class Port(InTurn, paddle.nn.Layer):
    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        self.layers, self.slope = paddle.nn.LayerList(paddle.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), slope

    def run(self, layer: paddle.nn.Linear, x: paddle.Tensor) -> paddle.Tensor:
        return (self.slope * layer(x)).tanh()


class Recomputed(Port):
    def run(self, layer: paddle.nn.Linear, x: paddle.Tensor) -> paddle.Tensor:
        return recompute(super().run, layer, x, use_reentrant=True)


@pytest.mark.parametrize(("name", "make"), [("torch", Ref), ("paddle", Port)])
def test_no_more_than_two_gradients_are_held(name, make):
    framework, model = backend(name), make()
    parameters, found, held = list(model.parameters()), {}, []

    def take(key: str, gradient: Any) -> None:
        held.append(sum(each.grad is not None for each in parameters))
        found[key] = framework.to_array(gradient)

    with taking_gradients(framework, model, take):
        model(framework.tensor(X)).sum().backward()
    assert max(held) <= 1  # beside the one that is taken
    assert len(found) == len(held) == 2 * LAYERS
    model(framework.tensor(X)).sum().backward()  # no hook is left
    expected = {key: framework.to_array(each.grad) for key, each in framework.layers.named_parameters(model)}
    assert {key: array.tobytes() for key, array in found.items()} == {k: a.tobytes() for k, a in expected.items()}


@pytest.mark.parametrize(("name", "plain", "nested"), [("torch", Ref, Checkpointed), ("paddle", Port, Recomputed)])
def test_gradients_of_several_backward_passes_are_added(name, plain, nested):
    framework, cotangent = backend(name), [np.ones(X.shape)]
    models = [make() for make in (plain, nested)]
    models[1].set_state_dict(models[0].state_dict()) if name == "paddle" else models[1].load_state_dict(
        models[0].state_dict()
    )
    one, other = (framework.wrap(model, "reference").run([X], "float64", True, cotangent) for model in models)
    assert not other.trace.error and list(one.gradients) == list(other.gradients)
    for key, array in one.gradients.items():
        np.testing.assert_allclose(other.gradients[key], array, rtol=1e-13)  # the sum of two, in another order


@pytest.mark.parametrize("slope", [1.0, 1.5])
def test_what_lies_in_files_changes_no_row(slope, monkeypatch):
    def rows() -> list:
        torch.manual_seed(0)
        paddle.seed(0)
        verdict = portproof.align(Ref(), Port(slope), [X])
        assert verdict.status == (PASS if slope == 1 else FAIL)
        return [repr(row) for row in verdict.rows], verdict.location and verdict.location.lines()

    before, storages = rows(), []
    monkeypatch.setattr(models, "LARGE", 0)
    monkeypatch.setattr(arrays, "STORED", 1)
    monkeypatch.setattr(
        arrays.tempfile,
        "TemporaryFile",
        lambda own=arrays.tempfile.TemporaryFile: storages.append(own()) or storages[-1],
    )
    assert rows() == before and storages


def test_a_model_keeps_its_layout_in_memory():
    """One whose channels come last runs with the kernels of that layout, in both precisions."""
    conv = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    contiguous = []
    conv.register_forward_hook(lambda layer, args, output: contiguous.append(output.is_contiguous()))
    model = backend("torch").wrap(conv, "reference", "cpu")
    for dtype in ("float32", "float64"):
        model.run([np.ones((2, 2, 8, 8), np.float32)], dtype, train=False)
    assert contiguous and not any(contiguous)
