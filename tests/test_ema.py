"""Averaged weights: bit for bit what torch's AveragedModel makes of them with torchvision's function, on both sides."""

import numpy as np
import paddle
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import mobilenetv3_paddle.models
import mobilenetv3_paddle.train.ema
import mobilenetv3_ref.models
import mobilenetv3_ref.train.ema
from portproof.backends import backend
from portproof.convert.rules import paddle_to_torch, torch_to_paddle
from sturdyio.cli import UserError

DECAYS = (0.9, 0.99890816, 0.0, 1.0)
SIDES = {"reference": mobilenetv3_ref, "port": mobilenetv3_paddle}


@pytest.fixture(params=SIDES.values(), ids=SIDES.keys())
def side(request):
    """Each package in turn."""
    return request.param


def build(package, dtype: str = "float32"):
    """The small model, narrow; counts of batches are int64 in either dtype."""
    framework = torch if package is mobilenetv3_ref else paddle
    before = framework.get_default_dtype()
    framework.set_default_dtype(getattr(framework, dtype))
    try:
        return package.models.MODELS["mobilenet_v3_small"](num_classes=3, width_mult=0.25, reduced_tail=True)
    finally:
        framework.set_default_dtype(before)


def drawn_weights(rng: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
    """Weights of any size and sign, zeros of both signs among them; counts of batches up to 2^26, past float32's."""
    arrays = {}
    for name, tensor in build(mobilenetv3_ref, dtype).state_dict().items():
        if name.endswith("num_batches_tracked"):
            arrays[name] = np.array(rng.integers(0, 2**26))
        else:
            size = 10.0 ** rng.integers(-30, 5, tuple(tensor.shape))
            sign = rng.choice([1.0, -1.0, 0.0, -0.0], tuple(tensor.shape), p=[0.45, 0.45, 0.05, 0.05])
            arrays[name] = (rng.uniform(1, 10, tuple(tensor.shape)) * size * sign).astype(dtype)
    return arrays


def load(model, arrays: dict[str, np.ndarray], types: dict[str, str]) -> None:
    """Give either side's model the reference's arrays."""
    if isinstance(model, torch.nn.Module):
        model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    else:
        mobilenetv3_paddle.models.load_state_dict(model, torch_to_paddle(arrays, types))


def torch_arrays(package, state: dict, types: dict[str, str]) -> dict[str, np.ndarray]:
    """A state as arrays under the reference's names."""
    arrays = package.models.weights.to_arrays(state)
    return arrays if package is mobilenetv3_ref else paddle_to_torch(arrays, types)


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].dtype, got[name].tobytes()) == (array.dtype, array.tobytes()), name


@pytest.mark.thorough("in float32", but="float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("decay", DECAYS)
def test_same_bits_as_torchs_own_average(side, decay, dtype, rng):
    """Floats and integers; through the copy at the first update and after a reset."""
    model, ema = build(side, dtype), None
    oracle_model = build(mobilenetv3_ref, dtype)
    types = backend("torch").layers.types(oracle_model)
    oracle = AveragedModel(
        oracle_model, avg_fn=lambda average, value, _: decay * average + (1 - decay) * value, use_buffers=True
    )
    ema = side.train.ema.ModelEma(model, decay)
    for update in range(5):
        weights = drawn_weights(rng, dtype)
        load(oracle_model, weights, types)
        load(model, weights, types)
        oracle.update_parameters(oracle_model)
        ema.update(model)
        expected = {name: tensor.numpy() for name, tensor in oracle.module.state_dict().items()}
        assert_same_bits(torch_arrays(side, ema.module.state_dict(), types), expected)
        assert_same_bits(torch_arrays(side, model.state_dict(), types), weights)  # which the average leaves alone
        assert ema.n_averaged == oracle.n_averaged.item()
        if update == 2:
            oracle.n_averaged.fill_(0)
            ema.reset()


def test_by_hand(side):
    model = build(side)
    parameter = model.state_dict()["classifier.3.bias"]
    ema = side.train.ema.ModelEma(model, 0.75)
    averages = []
    for value in (8.0, 4.0, 0.0):
        with (torch if side is mobilenetv3_ref else paddle).no_grad():
            parameter.fill_(value)
        ema.update(model)
        averages.append(float(ema.module.state_dict()["classifier.3.bias"][0]))
    assert averages == [8.0, 7.0, 5.25]


def test_state_is_the_models_own_and_a_count(side):
    model = build(side)
    ema = side.train.ema.ModelEma(model, 0.9)
    ema.update(model)
    ema.update(model)
    state = side.models.weights.to_arrays(ema.state_dict())
    assert list(state) == [*model.state_dict(), "n_averaged"]
    assert (state["n_averaged"].dtype, state["n_averaged"].shape, int(state["n_averaged"])) == (np.int64, (), 2)


@pytest.mark.parametrize("reset", [False, True])
def test_resumed_is_as_unbroken(side, reset, rng):
    types = backend("torch").layers.types(build(mobilenetv3_ref))
    model = build(side)
    unbroken = side.train.ema.ModelEma(model, 0.9)
    for _ in range(2):
        load(model, drawn_weights(rng, "float32"), types)
        unbroken.update(model)
    if reset:
        unbroken.reset()
    resumed = side.train.ema.ModelEma(build(side), 0.9)
    resumed.load_state_dict(side.models.weights.to_arrays(unbroken.state_dict()))
    for _ in range(2):
        load(model, drawn_weights(rng, "float32"), types)
        for ema in (unbroken, resumed):
            ema.update(model)
    expected, got = (side.models.weights.to_arrays(ema.state_dict()) for ema in (unbroken, resumed))
    assert_same_bits(got, expected)


def test_refuses_what_does_not_fit(side):
    ema = side.train.ema.ModelEma(build(side), 0.9)
    state = side.models.weights.to_arrays(ema.state_dict())
    with pytest.raises(UserError, match="lack n_averaged"):
        ema.load_state_dict({name: array for name, array in state.items() if name != "n_averaged"})
    with pytest.raises(UserError, match="the average does not.*1 missing"):
        ema.load_state_dict(
            {name: array for name, array in state.items() if name != "classifier.3.bias"}, "the average does not,"
        )
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="decay"):
            side.train.ema.ModelEma(build(side), decay)


def test_decay_is_adjusted_as_torchvision_does(side):
    ema_decay = side.train.ema.ema_decay
    for decay, world_size, batch_size, steps, epochs in [
        (0.99998, 8, 128, 32, 600),
        (0.9, 1, 3, 1, 7),
        (1.0, 2, 5, 3, 1),
    ]:
        # train.py: adjust, alpha and decay, line by line
        adjust = world_size * batch_size * steps / epochs
        alpha = 1.0 - decay
        alpha = min(1.0, alpha * adjust)
        assert ema_decay(decay, world_size, batch_size, steps, epochs) == 1.0 - alpha
    # (1 - 0.99998) * 8 * 128 * 32 / 600 = 1.0922666...e-3
    assert ema_decay(0.99998, 8, 128, 32, 600) == pytest.approx(1 - 1.0922666666e-3, abs=1e-12)
    assert ema_decay(0.99998, 8, 128, 32, 1) == pytest.approx(1 - 0.65536, abs=1e-12)
    assert ema_decay(0.99, 8, 128, 32, 1) == 0.0  # never below: each update copies
