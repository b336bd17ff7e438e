"""The port computes what the reference computes: the whole model in float64, its own layers, loss, metric.

Oracles are PyTorch where it is the definition, and otherwise NumPy written out.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import paddle
import pytest
import torch

import mobilenetv3_paddle.models
import mobilenetv3_paddle.train.criterion
import mobilenetv3_paddle.train.metric
import mobilenetv3_ref.models
import mobilenetv3_ref.train.criterion
import mobilenetv3_ref.train.metric
from mobilenetv3_paddle.models.layers import AdaptiveAvgPool2D, BatchNorm2D, Hardsigmoid
from mobilenetv3_proof.package import PORT, REF, Package
from mobilenetv3_ref.models.mobilenet_v3 import InvertedResidual
from portproof.backends import Backend
from portproof.compare.ruler import U64

DTYPES = ("float32", "float64")
SIDES = {
    "reference": (mobilenetv3_ref.train, torch.from_numpy, lambda tensor: tensor.detach().numpy()),
    "port": (mobilenetv3_paddle.train, paddle.to_tensor, lambda tensor: tensor.numpy()),
}


@pytest.fixture(params=SIDES.values(), ids=SIDES.keys())
def side(request) -> tuple:
    """(`train` package, array to tensor, tensor to array) of each framework."""
    return request.param


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """max|got - expected| / max|expected|, of equal shapes and dtypes."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def ulps(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference in ulp of `expected`."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    return float((np.abs(got.astype(np.float64) - expected) / np.spacing(np.abs(expected))).max())


def one_pass(backend: Backend, model, images: np.ndarray, upstream: np.ndarray, train: bool) -> dict[str, np.ndarray]:
    """Logits, the gradient of the images, all gradients and the buffers afterwards, by the reference's names."""
    model.train() if train else model.eval()
    x = backend.to_tensor(images, model)
    x.requires_grad = True
    with backend.runs.exact_constants():
        logits = model(x)
    logits.backward(backend.to_tensor(upstream, model))
    results = {"logits": logits.detach().numpy(), "images": x.grad.numpy()}
    arrays = backend.arrays_of(model)
    return {**results, **arrays.gradients(), **arrays.buffers()}


def zero_by_structure(ref: torch.nn.Module) -> set[str]:
    """The biases of the projections' batch norms: in train mode the next batch norm removes what they add."""
    blocks = {name: m for name, m in ref.named_modules() if isinstance(m, InvertedResidual)}
    return {f"{name}.block.{len(m.block) - 1}.1.bias" for name, m in blocks.items()}


@pytest.mark.thorough("the small model, and the large one as it is", but="small|default-train")
def test_model_in_float64(arch, options, train, probe, images, rng):
    """To 1e-12 of each tensor's largest value; what is zero by structure, to the rounding of what cancels there."""
    if train:
        options = {**options, "dropout": 0.0}  # masks are each framework's own
    arrays = probe(arch, **options)
    packages = [Package(name) for name in (REF, PORT)]
    ref, port = (p.build(partial(p.module("models").MODELS[arch], **options), arrays, "float64") for p in packages)
    upstream = rng.normal(size=(len(images), options.get("num_classes", 1000)))
    expected, got = (
        one_pass(package.backend, model, images, upstream, train)
        for package, model in zip(packages, (ref, port), strict=True)
    )
    assert set(got) == set(expected) == {"logits", "images", *arrays}

    gradients = {name: np.abs(expected[name]).max() for name, _ in ref.named_parameters()}
    zeros = zero_by_structure(ref) if train else set()
    # Such a gradient is a sum of terms, some as large as the largest gradient, that cancel but for their rounding
    # (2^-53 each, 4.3 of them in the worst case seen).
    floor = 16 * U64 * max(gradients.values())
    assert zeros == {name for name, size in gradients.items() if size <= floor}
    for name, array in expected.items():
        limit = floor if name in zeros else 1e-12 * np.abs(array).max()
        assert np.abs(got[name] - array).max() <= limit, name


def torch_to_paddle_name(name: str) -> str:
    return {"running_mean": "_mean", "running_var": "_variance"}.get(name, name)


def batch_norms(dtype: str, channels: int, momentum: float, rng: np.random.Generator) -> tuple:
    """PyTorch's batch norm and the port's, of the same weights and running statistics, none at its default."""
    drawn = {
        "weight": rng.normal(size=channels),
        "bias": rng.normal(size=channels),
        "running_mean": rng.normal(size=channels),
        "running_var": rng.uniform(0.5, 2, channels),
    }
    arrays = {name: array.astype(dtype) for name, array in drawn.items()} | {"num_batches_tracked": np.array(5)}
    # Paddle holds epsilon in float32, so in float64 PyTorch must be told the same number.
    ref = torch.nn.BatchNorm2d(channels, eps=float(np.float32(1e-3)), momentum=momentum).to(getattr(torch, dtype))
    ref.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    paddle.set_default_dtype(dtype)
    try:
        port = BatchNorm2D(channels, epsilon=1e-3, momentum=1 - momentum)
    finally:
        paddle.set_default_dtype("float32")
    missing, unexpected = port.set_state_dict({torch_to_paddle_name(name): array for name, array in arrays.items()})
    assert not missing and not unexpected
    return ref, port


def values(rng: np.random.Generator, shape: tuple, dtype: str) -> np.ndarray:
    """Channels of different means and spreads."""
    per_channel = (1, shape[1], 1, 1)
    return (rng.normal(size=shape) * rng.uniform(0.5, 3, per_channel) + rng.normal(size=per_channel)).astype(dtype)


SHAPES = [(3, 5, 7, 4), (2, 5, 1, 1), (1, 2, 17, 11), (8, 16, 24, 24)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("momentum", [0.01, 0.1])
def test_batch_norm_statistics(dtype, shape, momentum, rng):
    """One ulp in float32, 1e-15 in float64; biased variance is off by 1 / n, seen at every shape."""
    ref, port = batch_norms(dtype, shape[1], momentum, rng)
    x = values(rng, shape, dtype)
    ref(torch.from_numpy(x))
    port(paddle.to_tensor(x))
    for got, expected in ((port._mean, ref.running_mean), (port._variance, ref.running_var)):
        if dtype == "float32":
            assert ulps(got.numpy(), expected.numpy()) <= 1
        else:
            assert relative(got.numpy(), expected.numpy()) <= 1e-15
    assert (port.num_batches_tracked.item(), port.num_batches_tracked.dtype) == (6, paddle.int64)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2:] != (1, 1)], ids=str)
def test_batch_norm_output_and_gradients(shape, train, rng):
    ref, port = batch_norms("float64", shape[1], 0.01, rng)
    x, upstream = values(rng, shape, "float64"), rng.normal(size=shape)
    ref_x, port_x = torch.tensor(x, requires_grad=True), paddle.to_tensor(x, stop_gradient=False)
    ref.train(train)
    port.train() if train else port.eval()
    ref_y, port_y = ref(ref_x), port(port_x)
    ref_y.backward(torch.from_numpy(upstream))
    port_y.backward(paddle.to_tensor(upstream))
    assert relative(port_y.numpy(), ref_y.detach().numpy()) <= 4e-15
    for got, expected in ((port_x, ref_x), (port.weight, ref.weight), (port.bias, ref.bias)):
        assert relative(got.grad.numpy(), expected.grad.numpy()) <= 1e-14


def test_batch_norm_in_eval_mode_leaves_its_statistics_alone(rng):
    _, port = batch_norms("float32", 5, 0.01, rng)
    before = {name: tensor.numpy().copy() for name, tensor in port.state_dict().items()}
    port.eval()
    port(paddle.to_tensor(values(rng, (3, 5, 7, 4), "float32")))
    for name, tensor in port.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name], err_msg=name, strict=True)


def test_batch_norm_momentum_is_the_share_of_the_old_value(rng):
    """Written out: mean 0 and variance 1 to begin with, so what is left of them shows."""
    x = values(rng, (3, 5, 7, 4), "float64")
    mean, variance = x.mean(axis=(0, 2, 3)), x.var(axis=(0, 2, 3), ddof=1)
    layer = BatchNorm2D(5, momentum=0.75)
    for _ in range(2):
        layer(paddle.to_tensor(x.astype("float32")))
    left = 0.75**2
    np.testing.assert_allclose(layer._mean.numpy(), (1 - left) * mean, rtol=1e-6)
    np.testing.assert_allclose(layer._variance.numpy(), left + (1 - left) * variance, rtol=1e-6)


def test_batch_norm_refuses_one_value_per_channel():
    layer = BatchNorm2D(5)
    with pytest.raises(ValueError, match=r"more than 1 value per channel when training, got \(1, 5, 1, 1\)"):
        layer(paddle.zeros([1, 5, 1, 1]))
    assert layer.num_batches_tracked.item() == 0
    layer.eval()
    layer(paddle.zeros([1, 5, 1, 1]))
    with pytest.raises(ValueError, match="more than 1 value per channel when training"):
        torch.nn.BatchNorm2d(5)(torch.zeros(1, 5, 1, 1))


@pytest.mark.parametrize("full_graph", [False, True])
def test_batch_norm_under_to_static(full_graph, rng):
    """Tracing must neither drop the update of the statistics nor freeze it to the first batch's."""
    _, eager = batch_norms("float32", 5, 0.01, rng)
    traced = BatchNorm2D(5, epsilon=1e-3, momentum=1 - 0.01)
    traced.set_state_dict(eager.state_dict())
    static = paddle.jit.to_static(traced, full_graph=full_graph)
    for batch in (3, 3, 2):
        x = values(rng, (batch, 5, 7, 4), "float32")
        gradients = []
        for layer in (eager, static):
            tensor = paddle.to_tensor(x, stop_gradient=False)
            layer(tensor).pow(3).sum().backward()
            gradients.append(tensor.grad.numpy())
        np.testing.assert_array_equal(gradients[1], gradients[0])
    for name, tensor in eager.state_dict().items():
        np.testing.assert_array_equal(traced.state_dict()[name].numpy(), tensor.numpy(), err_msg=name, strict=True)
    assert traced.num_batches_tracked.item() == 8


def test_pool_is_the_mean_of_each_channel(rng):
    """56 x 56 is the largest map that is pooled; its mean in float32 may be 4 ulp off."""
    x = rng.normal(1, 1, (2, 3, 56, 56))
    tensor = paddle.to_tensor(x.astype("float32"))
    expected = tensor.numpy().astype("float64").mean(axis=(2, 3), keepdims=True)
    assert relative(AdaptiveAvgPool2D(1)(tensor).numpy().astype("float64"), expected) <= 4 * 2.0**-24


def test_pool_gradient_is_exact_in_float64():
    """One share of 7 * 5 values, where a float32 constant would be 1e-8 off."""
    x = paddle.zeros([1, 1, 7, 5], dtype="float64")
    x.stop_gradient = False
    AdaptiveAvgPool2D(1)(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 1 / 35, rtol=4 * U64)


def test_pool_to_another_size_is_refused():
    with pytest.raises(ValueError, match="output_size 7: only global pooling"):
        AdaptiveAvgPool2D(7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hardsigmoid_on_and_beside_its_kinks(dtype):
    x = np.array([-np.inf, -4, -3.001, -3, -2.999, -1, 0, 1, 2.999, 3, 3.001, 4, np.inf], dtype)
    tensor = paddle.to_tensor(x, stop_gradient=False)
    y = Hardsigmoid()(tensor)
    y.sum().backward()
    inside = np.abs(x) < 3
    unit = np.finfo(dtype).eps
    np.testing.assert_allclose(y.numpy(), np.clip(x / 6 + 0.5, 0, 1), rtol=0, atol=unit)
    np.testing.assert_allclose(tensor.grad.numpy(), np.where(inside, 1 / 6, 0), rtol=unit)  # 0 on the kinks, as torch
    ref = torch.tensor(x, requires_grad=True)
    torch.nn.functional.hardsigmoid(ref).sum().backward()
    assert ((ref.grad.numpy() != 0) == inside).all()


def cross_entropy(logits: np.ndarray, target: np.ndarray, smoothing: float) -> tuple[float, np.ndarray]:
    """(loss, its gradient) for soft targets, which need not add up to 1, written out."""
    n, num_classes = logits.shape
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    target = target * (1 - smoothing) + smoothing / num_classes
    return -(target * log_p).sum() / n, (np.exp(log_p) * target.sum(axis=1, keepdims=True) - target) / n


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("spread", [1.0, 300.0])  # exp(300) overflows float32, and the loss exceeds 64
@pytest.mark.parametrize("dtype, rtol", [("float32", 4e-6), ("float64", 1e-14)])
def test_criterion(side, soft, smoothing, spread, dtype, rtol, rng):
    package, to_tensor, to_array = side
    logits = rng.normal(0, spread, (5, 7)).astype(dtype)
    labels = np.array([0, 6, 3, 3, 1])
    shares = rng.random((5, 7)).astype(dtype) if soft else np.eye(7)[labels]
    x = to_tensor(logits)
    x.requires_grad = True
    loss = package.criterion.build_criterion(smoothing)(x, to_tensor(shares if soft else labels))
    loss.backward()
    expected, gradient = cross_entropy(logits.astype("float64"), shares.astype("float64"), smoothing)
    assert loss.shape == () or list(loss.shape) == []
    np.testing.assert_allclose(to_array(loss), expected, rtol=rtol)
    np.testing.assert_allclose(to_array(x.grad), gradient, rtol=rtol, atol=rtol)


def test_criterion_refuses_a_label_out_of_range(side):
    package, to_tensor, _ = side
    criterion = package.criterion.build_criterion()
    for label in (-1, 3):
        with pytest.raises((ValueError, IndexError)):
            criterion(to_tensor(np.zeros((1, 3), np.float32)), to_tensor(np.array([label])))


def correct_by_definition(logits: np.ndarray, labels: np.ndarray, k: int) -> int:
    """Classes sorted by logit, NaN first as in `topk`, equal ones by number; a label whose logit is NaN is wrong."""
    count = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda c: (not math.isnan(row[c]), -row[c], c))
        count += label in order[:k] and not math.isnan(row[label])
    return count


def assert_counts(side: tuple, logits: np.ndarray, labels: np.ndarray, topk: list[int]) -> None:
    package, to_tensor, _ = side
    expected = [correct_by_definition(logits, labels, k) for k in topk]
    assert package.metric.correct_at(to_tensor(logits), to_tensor(labels), topk) == expected


TIES = [-np.inf, -1, -0.0, 0, 1, 2, np.inf]  # few values, so that most are tied


@pytest.mark.parametrize("num_classes", [5, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_metric(side, num_classes, dtype, rng):
    logits = rng.choice(np.array([*TIES, np.nan], dtype), (500, num_classes))
    logits[:50] = rng.normal(size=(50, num_classes))
    assert_counts(side, logits, rng.integers(0, num_classes, 500), [1, 2, 5, num_classes])


@pytest.mark.parametrize("num_classes", [1, 3])
def test_metric_with_fewer_classes_than_k(side, num_classes, rng):
    logits = rng.choice(np.array(TIES, "float32"), (500, num_classes))
    assert_counts(side, logits, rng.integers(0, num_classes, 500), [1, 5])


def test_metric_with_nan_and_fewer_classes_than_k(side):
    assert_counts(side, np.array([[0, np.nan, 1]], "float32"), np.array([1]), [1, 5])


def expected_std(name: str, shape: list[int]) -> float | None:
    """Standard deviation of the normal distribution that parameter `name` starts from; None if it is a constant."""
    if len(shape) == 4:  # gain sqrt(2), fan-out: output channels times kernel area
        return math.sqrt(2 / (shape[0] * shape[2] * shape[3]))
    return 0.01 if len(shape) == 2 else None


def ks_distance(sample: np.ndarray, std: float) -> tuple[float, float]:
    """Kolmogorov-Smirnov distance of the sample from N(0, std), and what it exceeds with probability 1e-6 at most.

    P(D > d) <= 2 exp(-2 n d^2) for every n (Massart 1990).
    """
    n = sample.size
    cdf = torch.special.ndtr(torch.from_numpy(np.sort(sample.ravel()).astype("float64") / std)).numpy()
    steps = np.arange(n + 1) / n
    return max(np.abs(cdf - steps[:-1]).max(), np.abs(cdf - steps[1:]).max()), math.sqrt(math.log(2 / 1e-6) / (2 * n))


def wrongly_distributed(model: paddle.nn.Layer) -> list[str]:
    """The parameters and buffers that do not look drawn from torchvision's initial distributions."""
    wrong = []
    for name, tensor in model.state_dict().items():
        std, array = expected_std(name, tensor.shape), tensor.numpy()
        if std is None:
            ones = name.endswith("_variance") or (name.endswith("weight") and array.ndim == 1)
            if not (array == float(ones)).all():
                wrong.append(name)
        else:
            distance, bound = ks_distance(array, std)
            if distance > bound:
                wrong.append(name)
    return wrong


def test_initial_weights_are_drawn_from_torchvisions_distributions(arch):
    model = mobilenetv3_paddle.models.MODELS[arch]()
    assert wrongly_distributed(model) == []
    first = {name: tensor.numpy().copy() for name, tensor in model.named_parameters()}
    model.reset_parameters()
    assert wrongly_distributed(model) == []
    again = [name for name, tensor in model.named_parameters() if np.array_equal(tensor.numpy(), first[name])]
    assert again == [name for name, array in first.items() if expected_std(name, array.shape) is None]


@pytest.mark.parametrize("package", [mobilenetv3_ref, mobilenetv3_paddle], ids=["reference", "port"])
@pytest.mark.parametrize("groups", [None, 8], ids=["batch_norm", "group_norm"])
def test_reset_reaches_every_parameter(package, groups):
    nn = torch.nn if package is mobilenetv3_ref else paddle.nn
    norm_layer = partial(nn.GroupNorm, groups) if groups else None
    model = package.models.mobilenet_v3_small(norm_layer=norm_layer)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for _, parameter in trained:
        nn.init.constant_(parameter, 7.0)
    model.reset_parameters()
    assert len(trained) == 142
    assert [name for name, p in trained if (p.detach().numpy() == 7.0).any()] == []


FAULTY_INIT: dict[str, Callable] = {
    "fan-in": lambda w: paddle.nn.init.kaiming_normal_(w, mode="fan_in"),
    "gain 1": lambda w: paddle.nn.init.kaiming_normal_(w, mode="fan_out", nonlinearity="linear"),
    "fan-out / groups": lambda w: paddle.nn.init.normal_(w, 0, math.sqrt(2 / (w.shape[2] * w.shape[3]))),
    "uniform": lambda w: paddle.nn.init.kaiming_uniform_(w, mode="fan_out"),
    "a constant": paddle.nn.init.zeros_,
}


@pytest.mark.parametrize("fault", FAULTY_INIT)
def test_that_test_sees_other_distributions(fault):
    """In every convolution large enough to tell (and no other parameter); depthwise ones for the fan of a group."""
    model = mobilenetv3_paddle.models.mobilenet_v3_small()
    depthwise = fault == "fan-out / groups"
    faulty = {
        name: w
        for name, w in model.named_parameters()
        if len(w.shape) == 4 and w.size >= 2000 and (w.shape[1] == 1) == depthwise
    }
    assert len(faulty) >= 5
    for w in faulty.values():
        FAULTY_INIT[fault](w)
    assert wrongly_distributed(model) == list(faulty)


def test_that_test_sees_other_constants():
    model = mobilenetv3_paddle.models.mobilenet_v3_small()
    changed = ["features.1.block.0.1.weight", "features.1.block.0.1._mean", "classifier.3.bias"]
    for name in changed:
        tensor = model.state_dict()[name]
        tensor.set_value(tensor + np.eye(1, tensor.size, 5)[0].astype("float32"))
    assert sorted(wrongly_distributed(model)) == sorted(changed)
