"""What first_nonfinite blames, on both sides alike, for NaN and infinity put in on purpose at a known place."""

import re

import numpy as np
import paddle
import pytest
import torch

import mobilenetv3_paddle.models.sync_batch_norm
import mobilenetv3_paddle.train.criterion
import mobilenetv3_paddle.train.distributed
import mobilenetv3_paddle.train.nonfinite
import mobilenetv3_ref.models.sync_batch_norm
import mobilenetv3_ref.train.criterion
import mobilenetv3_ref.train.distributed
import mobilenetv3_ref.train.nonfinite
from portproof.backends import backend
from portproof.backends.probe import probe_images
from portproof.convert.rules import torch_to_paddle

SIDES = {"reference": mobilenetv3_ref, "port": mobilenetv3_paddle}
SMALL = "mobilenet_v3_small"
TYPES = backend("torch").layers.types(mobilenetv3_ref.models.MODELS[SMALL](num_classes=3))
IMAGES = probe_images(np.random.default_rng(1), 3, 64, 32)
LABELS = np.array([0, 2, 1])


@pytest.fixture(params=SIDES.values(), ids=SIDES.keys())
def side(request):
    """Each package in turn."""
    return request.param


def framework(side):
    return torch if side is mobilenetv3_ref else paddle


def tensor(side, array: np.ndarray):
    return torch.from_numpy(array) if side is mobilenetv3_ref else paddle.to_tensor(array)


def build(side, arrays: dict[str, np.ndarray], train: bool = True):
    """The small model with the reference's `arrays`, without dropout."""
    model = side.models.MODELS[SMALL](num_classes=3, dropout=0.0)
    if side is mobilenetv3_ref:
        model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    else:
        model.set_state_dict(torch_to_paddle(arrays, TYPES))
    model.train() if train else model.eval()
    return model


def blamed(side, model, criterion=None, image=IMAGES, target=LABELS) -> str:
    criterion = criterion or side.train.criterion.build_criterion()
    line = side.train.nonfinite.first_nonfinite(model, criterion, tensor(side, image), tensor(side, target))
    assert "\n" not in line
    return line.replace("2D", "2d")  # the only difference between the two


@pytest.fixture
def weights(probe):
    """weights(values, factors): probe weights whose first number is the value given, all of them times the factor."""

    def changed(values: dict[str, float] | None = None, factors: dict[str, float] | None = None):
        arrays = {name: np.array(array) for name, array in probe(SMALL, num_classes=3, dropout=0.0).items()}
        for name, value in (values or {}).items():
            arrays[name].reshape(-1)[0] = value
        for name, factor in (factors or {}).items():
            arrays[name] *= np.float32(factor)
        return arrays

    return changed


# --- the network itself


@pytest.mark.parametrize(
    "name, size",
    [
        ("features.0.0.weight", 432),
        ("features.3.block.1.1.bias", 88),
        ("features.5.block.2.fc2.bias", 240),
        ("features.7.block.1.0.weight", 3000),  # over nothing but padding, where PaddlePaddle leaves it out
        ("classifier.3.weight", 3072),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_parameter(side, name, size, value, weights):
    """Of two bad ones the first; NaN and infinity in either mode."""
    arrays = weights({name: value, "classifier.3.bias": value})
    line = blamed(side, build(side, arrays, train=value != np.inf))
    assert line == f"parameter {name}, before this batch: NaN or infinity in 1 of {size} values"


def test_a_frozen_parameter(side, weights):
    """It is no news, but what the layer's output comes from."""
    model = build(side, weights({"features.4.block.0.0.weight": np.nan}))
    for parameter in model.features.parameters():
        parameter.requires_grad = False
    line = blamed(side, model)
    assert line == "forward, features.4.block.0.0 (Conv2d): NaN or infinity in 1 of 2304 values of its weight"


@pytest.mark.parametrize("train", [True, False])
def test_running_statistics_are_blamed_where_they_are_used(side, train, weights):
    """Every step with NaN leaves it in them, and the next in train mode does not use it."""
    line = blamed(side, build(side, weights({"features.2.block.0.1.running_var": np.nan}), train))
    if train:
        assert line == side.train.nonfinite.NOT_FOUND
    else:
        own = "running_var" if side is mobilenetv3_ref else "_variance"
        assert line == f"forward, features.2.block.0.1 (BatchNorm2d): NaN or infinity in 1 of 72 values of its {own}"


def test_running_statistics_do_not_explain_an_overflow_in_train_mode(side, weights):
    arrays = weights({"features.0.1.weight": 3.3e38, "features.0.1.running_var": np.nan})
    line = blamed(side, build(side, arrays))
    assert re.match(
        r"forward, features\.0\.1 \(BatchNorm2d\): NaN or infinity in \d+ of \d+ values of its output,", line
    )


@pytest.mark.parametrize(
    "name, place",
    [
        ("features.2.block.1.0.weight", r"features\.2\.block\.1\.0 \(Conv2d\)"),
        ("classifier.0.weight", r"classifier\.0 \(Linear\)"),
    ],
)
def test_an_overflow(side, name, place, weights):
    line = blamed(side, build(side, weights(factors={name: 1e38})))
    found = re.fullmatch(rf"forward, {place}: NaN or infinity in (\d+) of \d+ values of its output, (.*)", line)
    assert found, line
    assert int(found[1]) > 0
    assert re.fullmatch(r"out of finite inputs of at most \d\.\de\+0[01]", found[2])


def test_an_overflow_in_the_criterion(side, weights):
    """Logits of 3e38 and -3e38 are finite, and their difference is not."""
    arrays = weights(factors={"classifier.3.weight": 0.0})
    arrays["classifier.3.bias"] = np.float32([3e38, -3e38, 0])
    line = blamed(side, build(side, arrays))
    assert re.match(r"forward, criterion \(CrossEntropyLoss\): .* of its output, out of finite inputs", line), line


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_batch(side, value, weights):
    image = IMAGES.copy()
    image[1, 2, 3, 4:6] = value
    model = build(side, weights({"features.0.0.weight": np.nan}))  # the batch is judged before it
    assert (
        blamed(side, model, image=image)
        == f"the batch itself: NaN or infinity in 2 of {image.size} values of its images"
    )
    soft = np.eye(3, dtype=np.float32)
    soft[0, 0] = value
    assert blamed(side, model, target=soft) == "the batch itself: NaN or infinity in 1 of 9 values of its targets"


def test_nothing_to_blame(side, weights):
    assert blamed(side, build(side, weights())).startswith(
        "this batch alone, run again, gives finite values everywhere"
    )


def state_of(model) -> dict[str, bytes]:
    state = {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}
    gradients = {f"grad/{name}": p.grad.numpy().tobytes() for name, p in model.named_parameters() if p.grad is not None}
    return {**state, **gradients}


@pytest.mark.parametrize("bad", [{}, {"features.3.block.1.1.bias": np.nan}])
def test_nothing_changes(side, bad, weights):
    """Neither weights, statistics and gradients nor mode and hooks, of model and criterion, and no random state."""
    model, criterion = build(side, weights(bad)), side.train.criterion.build_criterion(0.1)
    criterion(model(tensor(side, IMAGES)), tensor(side, LABELS)).backward()
    before = state_of(model)
    assert sum(name.startswith("grad/") for name in before) == 142
    blamed(side, model, criterion)
    assert state_of(model) == before
    assert model.training
    modules = [*model.modules(), criterion] if side is mobilenetv3_ref else [*model.sublayers(), model, criterion]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_post_hooks")
    assert [m for m in modules for name in hooks if getattr(m, name, None)] == []


def test_batch_norm_over_all_processes_waits_for_none(side, weights, monkeypatch):
    """The process that found NaN may be the only one that looks for it."""
    arrays = weights(factors={"classifier.0.weight": 1e38})
    model = side.train.distributed.convert_sync_batchnorm(build(side, arrays))
    name = "SyncBatchNorm2d" if side is mobilenetv3_ref else "SyncBatchNorm2D"
    layer = getattr(side.models.sync_batch_norm, name)
    assert any(isinstance(m, layer) for m in (model.modules if side is mobilenetv3_ref else model.sublayers)())
    monkeypatch.setattr(layer, "forward", lambda self, x: pytest.fail("it would wait for the others"))
    assert blamed(side, model).startswith("forward, classifier.0 (Linear): ")


# --- networks with a fault of their own


def parts(side) -> tuple:
    """Of either framework: the class of modules, a linear layer of one number, root, square, a product as criterion."""
    nn = framework(side).nn
    base = nn.Module if side is mobilenetv3_ref else nn.Layer

    class Root(base):
        def forward(self, x):
            return x.sqrt()  # at 0 it is finite and its slope is not

    class Square(base):
        def forward(self, x):
            return x * x

    class Product(base):
        def forward(self, output, target):
            return (output * target).sum()

    def linear(value: float):
        layer = nn.Linear(2, 2)
        with framework(side).no_grad():
            layer.weight.fill_(value)
            layer.bias.fill_(0.0)
        return layer

    return base, linear, Root, Square, Product


POINT = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def test_an_infinite_slope(side):
    """Whose infinity reaches every layer before it, and the block around it."""
    _, linear, root, square, product = parts(side)
    sequential = framework(side).nn.Sequential
    model = sequential(linear(0.0), square(), sequential(root(), linear(1.0)))
    line = blamed(side, model, product(), POINT, np.ones((2, 2), np.float32))
    assert line == "backward, 2.0 (Root): its output's gradient is finite, that of its input is not"


def test_a_gradient_of_two_uses(side):
    """A branch is not blamed for what another makes of the same tensor."""
    base, linear, root, _, product = parts(side)

    class Branches(base):
        def __init__(self):
            super().__init__()
            self.stem, self.straight, self.bent, self.after = linear(0.0), linear(1.0), root(), linear(1.0)

        def forward(self, x):
            x = self.stem(x)
            bent = self.bent(x)
            return self.after(bent + self.straight(x))

    line = blamed(side, Branches(), product(), POINT, np.ones((2, 2), np.float32))
    assert line == "backward, bent (Root): its output's gradient is finite, that of its input is not"


def test_a_parameters_gradient(side):
    """An input of 1e30 and a gradient of 1e30 are finite, and their product is not."""
    _, linear, _, _, product = parts(side)
    model = framework(side).nn.Sequential(linear(1e-30), linear(1e-5))
    line = blamed(side, model, product(), POINT * np.float32(1e30), np.full((2, 2), 1e30, np.float32))
    assert line == "backward, 0 (Linear): its output's gradient is finite, that of its weight is not"


def test_the_slope_of_the_criterion(side):
    base, linear, _, _, _ = parts(side)

    class RootLoss(base):
        def forward(self, output, target):
            return ((output - target) * (output - target)).sum().sqrt()

    line = blamed(side, linear(1.0), RootLoss(), POINT, np.array([[3.0, 3.0], [7.0, 7.0]], np.float32))
    assert line == "backward, criterion (RootLoss): its output's gradient is finite, that of its input is not"


@pytest.mark.parametrize("nested", [False, True])
def test_a_modules_own_code(side, nested):
    """Between its parts, all of which are right."""
    base, linear, _, _, product = parts(side)

    class Block(base):
        def __init__(self):
            super().__init__()
            self.inner, self.last = linear(1.0), linear(0.0)

        def forward(self, x):
            return self.last(self.inner(x) * 1e30 * 1e30)

    model = framework(side).nn.Sequential(linear(1.0), Block()) if nested else Block()
    line = blamed(side, model, product(), POINT, np.ones((2, 2), np.float32))
    assert line.startswith("forward, 1 (Block): " if nested else "forward, the model itself (Block): "), line


def test_an_infinite_slope_in_a_modules_own_code(side):
    """The part before it receives infinity, the part after it gives none."""
    base, linear, _, _, product = parts(side)

    class Block(base):
        def __init__(self):
            super().__init__()
            self.inner, self.last = linear(0.0), linear(1.0)

        def forward(self, x):
            return self.last(self.inner(x).sqrt())

    model = framework(side).nn.Sequential(linear(1.0), Block())
    line = blamed(side, model, product(), POINT, np.ones((2, 2), np.float32))
    assert line == "backward, 1 (Block): its output's gradient is finite, that of its input is not"


def test_a_module_called_twice(side):
    """Only the second call overflows."""
    base, linear, _, square, product = parts(side)

    class Twice(base):
        def __init__(self):
            super().__init__()
            self.stem, self.square = linear(1.0), square()

        def forward(self, x):
            return self.square(self.square(self.stem(x)) * 1e10)

    line = blamed(side, Twice(), product(), POINT * np.float32(1e6), np.ones((2, 2), np.float32))
    assert re.fullmatch(r"forward, square \(Square\): .* of at most 4\.9e\+23", line), line
