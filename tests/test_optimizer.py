"""The optimizers of both sides: torch.optim's formulas over 1000 steps, parameter groups, clipping, state, and
which batches an update is the mean of."""

import copy
import functools

import numpy as np
import paddle
import pytest
import torch

import mobilenetv3_paddle.models
import mobilenetv3_paddle.train.criterion
import mobilenetv3_paddle.train.engine
import mobilenetv3_paddle.train.optimizer
import mobilenetv3_ref.models
import mobilenetv3_ref.train.criterion
import mobilenetv3_ref.train.engine
import mobilenetv3_ref.train.optimizer
from mobilenetv3_paddle.train.optimizer import load_optimizer_state, optimizer_state
from portproof.compare.ruler import SEMANTIC_RTOL, C, K, U, largest
from sturdyio.cli import UserError
from sturdyio.files import load_pdparams

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "sgd_nesterov": functools.partial(torch.optim.SGD, nesterov=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, alpha=0.9, eps=0.0316),
    "adamw": torch.optim.AdamW,
}
SETTINGS = {
    "official": {"lr": 0.064, "momentum": 0.9, "weight_decay": 1e-5},
    "no decay": {"lr": 0.064, "momentum": 0.9, "weight_decay": 0.0},
    "much decay": {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.3},
    "no momentum": {"lr": 0.05, "momentum": 0.0, "weight_decay": 1e-4},
}
SHAPES = {"w": (3, 2), "v": (7,), "u": (1,)}
# Nesterov's momentum of 0 is refused by torch.
CASES = [(opt, name) for opt in OPTIMIZERS for name in SETTINGS if (opt, name) != ("sgd_nesterov", "no momentum")]


class TorchSide:
    """A model of bare parameters, and gradients put into it."""

    package = mobilenetv3_ref

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.model = torch.nn.ParameterDict({name: torch.tensor(value) for name, value in values.items()})

    def set_gradients(self, gradients: dict[str, np.ndarray]) -> None:
        for name, parameter in self.model.items():
            parameter.grad = torch.tensor(gradients[name]) if name in gradients else None

    def values(self) -> dict[str, np.ndarray]:
        return {name: parameter.detach().numpy().copy() for name, parameter in self.model.items()}


class PaddleSide:
    """The same of the port."""

    package = mobilenetv3_paddle

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.model = paddle.nn.Layer()
        for name, value in values.items():
            self.model.add_parameter(name, self.model.create_parameter(value.shape, dtype=str(value.dtype)))
            getattr(self.model, name).set_value(value)

    def set_gradients(self, gradients: dict[str, np.ndarray]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = paddle.to_tensor(gradients[name]) if name in gradients else None

    def values(self) -> dict[str, np.ndarray]:
        return {name: parameter.numpy().copy() for name, parameter in self.model.named_parameters()}


BOTH = pytest.mark.parametrize("kind", [TorchSide, PaddleSide], ids=["reference", "port"])


def built(side: TorchSide | PaddleSide, opt: str, setting: dict, **schedule) -> tuple:
    return side.package.train.optimizer.build_optimizer(side.model, opt=opt, **setting, **schedule)


def torchs(side: TorchSide, opt: str, setting: dict) -> torch.optim.Optimizer:
    """torch.optim's own, as references/classification/train.py of torchvision builds it."""
    setting = {name: value for name, value in setting.items() if opt != "adamw" or name != "momentum"}
    return OPTIMIZERS[opt](side.model.parameters(), **setting)


def problem(dtype: str, steps: int, absent: float = 0.0) -> tuple[dict, dict, list[dict]]:
    """(first values, curvatures, noise of each step): noisy gradients of a bowl, some missing with chance `absent`."""
    rng = np.random.default_rng(5)
    start = {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    curvature = {name: np.exp(rng.normal(size=shape)).astype(dtype) for name, shape in SHAPES.items()}
    noise = [
        {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items() if rng.random() >= absent}
        for _ in range(steps)
    ]
    return start, curvature, noise


def path(side: TorchSide | PaddleSide, optimizer, curvature: dict, noise: list[dict]) -> np.ndarray:
    """All values after each step, (steps, number of values)."""
    result = []
    for drawn in noise:
        values = side.values()
        side.set_gradients({name: curvature[name] * values[name] + drawn[name] for name in drawn})
        optimizer.step()
        values = side.values()
        result.append(np.concatenate([values[name].ravel() for name in SHAPES]))
    return np.array(result)


@functools.cache
def oracle_path(opt: str, setting: str, dtype: str, steps: int, absent: float = 0.0) -> np.ndarray:
    start, *rest = problem(dtype, steps, absent)
    side = TorchSide(start)
    return path(side, torchs(side, opt, SETTINGS[setting]), *rest)


def built_path(kind: type, opt: str, setting: str, dtype: str, steps: int, absent: float = 0.0) -> np.ndarray:
    start, *rest = problem(dtype, steps, absent)
    side = kind(start)
    return path(side, built(side, opt, SETTINGS[setting])[0], *rest)


@pytest.mark.thorough("two settings", but="official|no momentum")
@BOTH
@pytest.mark.parametrize("opt, setting", CASES)
def test_a_thousand_steps_in_float64(kind, opt, setting):
    expected = oracle_path(opt, setting, "float64", 1000)
    difference = largest(built_path(kind, opt, setting, "float64", 1000) - expected)
    assert difference <= SEMANTIC_RTOL * largest(expected)


@pytest.mark.thorough("test_a_thousand_steps_in_float64")
@pytest.mark.parametrize("opt, setting", CASES)
def test_a_thousand_steps_in_float32(opt, setting):
    """As far from `fp64_ref` as torch's own float32, times the factor that two faultless kernels need."""
    fp64_ref = oracle_path(opt, setting, "float64", 1000)
    allowed = K * largest(oracle_path(opt, setting, "float32", 1000) - fp64_ref) + C * U * largest(fp64_ref)
    assert largest(built_path(PaddleSide, opt, setting, "float32", 1000) - fp64_ref) <= allowed


@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_a_parameter_without_gradient_waits(opt):
    """Its accumulators, too; and Adam's corrections count its own steps."""
    expected = oracle_path(opt, "official", "float64", 50, absent=0.4)
    got = built_path(PaddleSide, opt, "official", "float64", 50, absent=0.4)
    assert largest(got - expected) <= SEMANTIC_RTOL * largest(expected)
    still = (expected[1:] == expected[:-1]).mean()
    assert 0.2 < still < 0.6  # or nothing was missing


@pytest.mark.parametrize("opt", OPTIMIZERS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_leaves_the_gradient_as_it_was(opt, weight_decay):
    start, _, (gradients, *_) = problem("float32", 1)
    side = PaddleSide(start)
    optimizer, _ = built(side, opt, {"lr": 0.1, "weight_decay": weight_decay})
    side.set_gradients(gradients)
    optimizer.step()
    for name, parameter in side.model.named_parameters():
        np.testing.assert_array_equal(parameter.grad.numpy(), gradients[name])


@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_a_step_whose_gradients_overflowed_is_left_out(opt):
    """What paddle.amp.GradScaler sets when float16 gradients overflow."""
    start, _, noise = problem("float32", 2)
    side = PaddleSide(start)
    optimizer, _ = built(side, opt, SETTINGS["official"])
    side.set_gradients(noise[0])
    optimizer._set_auxiliary_var("found_inf", paddle.to_tensor([True]))
    optimizer.step()
    assert all(np.array_equal(value, start[name]) for name, value in side.values().items())
    optimizer._set_auxiliary_var("found_inf", paddle.to_tensor([False]))
    optimizer.step()
    assert not any(np.array_equal(value, start[name]) for name, value in side.values().items())


DECAYS = [(None, None), (0.0, None), (None, 0.0), (0.0, 3e-5), (2e-5, 0.0)]


def expected_decays(model: torch.nn.Module, norm: float | None, bias: float | None) -> dict[str, float]:
    """{parameter: weight decay} by torchvision's rule: a bias first, then normalization, then the rest."""
    norms = {name for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)}
    result = {}
    for name, _ in model.named_parameters():
        module, _, last = name.rpartition(".")
        among = bias if last == "bias" and bias is not None else norm if module in norms else None
        result[name] = 1e-5 if among is None else among
    return result


@pytest.mark.parametrize("norm, bias", DECAYS)
def test_parameter_groups(norm, bias):
    models = [package.models.mobilenet_v3_small() for package in (mobilenetv3_ref, mobilenetv3_paddle)]
    expected = expected_decays(models[0], norm, bias)
    assert len(expected) == 142
    for package, model in zip((mobilenetv3_ref, mobilenetv3_paddle), models, strict=True):
        groups = package.train.optimizer.parameter_groups(model, 1e-5, norm, bias)
        decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(decays) == 142
        named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in decays}
        assert {name: decays[id(parameter)] for name, parameter in named.items()} == expected


@BOTH
@pytest.mark.parametrize("opt", ["sgd", "adamw"])
@pytest.mark.parametrize("norm, bias", DECAYS)
def test_each_group_decays_by_its_own(kind, opt, norm, bias):
    """With gradients of zero the first step changes w by -lr * decay * w alone (with SGD, and AdamW)."""
    if kind is TorchSide:
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)).double()
    else:
        model = paddle.nn.Sequential(paddle.nn.Conv2D(1, 2, 3), paddle.nn.BatchNorm2D(2))
        model.to(dtype="float64")
    decays = {"norm_weight_decay": norm, "bias_weight_decay": bias}
    optimizer, _ = kind.package.train.optimizer.build_optimizer(model, opt=opt, lr=0.5, weight_decay=1e-5, **decays)
    trained = {f"{i}.{name}": getattr(model[i], name) for i in range(2) for name in ("weight", "bias")}
    before = {}
    for name, parameter in trained.items():
        zero, one = parameter * 0, parameter.detach() * 0 + 1
        parameter.copy_(one, True) if kind is PaddleSide else parameter.data.copy_(one)
        parameter.grad = zero.detach()
        before[name] = parameter.detach().numpy().copy()
    optimizer.step()
    for name, parameter in trained.items():
        decay = bias if name.endswith("bias") and bias is not None else norm if name.startswith("1") else None
        expected = before[name] * (1 - 0.5 * (1e-5 if decay is None else decay))
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-15)


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 100.0])
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-15), ("float32", 4 * U)])
def test_clipping_is_torchs(max_norm, dtype, rtol):
    start, _, (gradients, *_) = problem(dtype, 1)
    sides = TorchSide(start), PaddleSide(start)
    for side, clip in zip(sides, (torch.nn.utils.clip_grad_norm_, paddle.nn.utils.clip_grad_norm_), strict=True):
        side.set_gradients(gradients)
        clip(side.model.parameters(), max_norm)
    norm = np.sqrt(sum((gradient.astype("float64") ** 2).sum() for gradient in gradients.values()))
    for name, parameter in sides[1].model.named_parameters():
        np.testing.assert_allclose(parameter.grad.numpy(), sides[0].model[name].grad.numpy(), rtol=rtol)
        expected = gradients[name] * min(1.0, max_norm / (norm + 1e-6))
        np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=rtol)


SCHEDULE = {"lr_scheduler": "cosineannealinglr", "epochs": 9, "lr_warmup_epochs": 4, "lr_warmup_method": "linear"}


def steps_in_the_warmup(side: TorchSide | PaddleSide, optimizer, schedule, first: int, last: int) -> None:
    """Steps `first` to `last`, an epoch each; the parameter `u` has its first gradient in step 2."""
    _, curvature, noise = problem("float32", last)
    for i in range(first, last):
        drawn = {name: noise[i][name] for name in noise[i] if name != "u" or i >= 2}
        path(side, optimizer, curvature, [drawn])
        schedule.step()


def port_run(opt: str) -> tuple:
    side = PaddleSide(problem("float32", 0)[0])
    return side, *built(side, opt, SETTINGS["official"], **SCHEDULE)


@pytest.mark.parametrize("opt", OPTIMIZERS)
@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_resumed_run_goes_on_as_the_unbroken_one(opt, after, tmp_path):
    """Through a .pdopt file, after other layers were created, to the last bit; all accumulators are in it."""
    unbroken = port_run(opt)
    steps_in_the_warmup(*unbroken, 0, 8)
    broken = port_run(opt)
    steps_in_the_warmup(*broken, 0, after)
    side, optimizer, schedule = broken
    paddle.save(optimizer_state(side.model, optimizer), str(tmp_path / "state.pdopt"))
    state = load_pdparams(tmp_path / "state.pdopt")
    updated = {"w", "v"} | ({"u"} if after > 2 else set())
    assert {key.split("/")[0] for key in state} == updated
    paddle.nn.Linear(3, 3)
    resumed = port_run(opt)
    resumed[0].model.set_state_dict(side.model.state_dict())
    resumed[2].set_state_dict(schedule.state_dict())
    load_optimizer_state(resumed[0].model, resumed[1], state)
    steps_in_the_warmup(*resumed, after, 8)
    assert resumed[1].get_lr() == unbroken[1].get_lr()
    for name, value in resumed[0].values().items():
        np.testing.assert_array_equal(value, unbroken[0].values()[name])
    finals = [optimizer_state(run[0].model, run[1]) for run in (resumed, unbroken)]
    assert finals[0].keys() == finals[1].keys()
    assert all(np.array_equal(finals[0][key], finals[1][key]) for key in finals[0])


@pytest.mark.parametrize("opt", OPTIMIZERS)
@pytest.mark.parametrize("after", [1, 3, 5])
def test_the_reference_resumes_from_a_file_of_tensors_only(opt, after, tmp_path):
    def run() -> tuple:
        side = TorchSide(problem("float32", 0)[0])
        return side, *built(side, opt, SETTINGS["official"], **SCHEDULE)

    unbroken, broken, resumed = run(), run(), run()
    steps_in_the_warmup(*unbroken, 0, 8)
    steps_in_the_warmup(*broken, 0, after)
    torch.save([part.state_dict() for part in (broken[0].model, *broken[1:])], tmp_path / "state.pth")
    states = torch.load(tmp_path / "state.pth", weights_only=True)
    for part, state in zip((resumed[0].model, *resumed[1:]), states, strict=True):
        part.load_state_dict(state)
    steps_in_the_warmup(*resumed, after, 8)
    for name, value in resumed[0].values().items():
        np.testing.assert_array_equal(value, unbroken[0].values()[name])


def test_state_is_a_copy_and_replaces_what_was_there():
    side, optimizer, schedule = port_run("rmsprop")
    steps_in_the_warmup(side, optimizer, schedule, 0, 1)
    state = optimizer_state(side.model, optimizer)
    kept = copy.deepcopy(state)
    steps_in_the_warmup(side, optimizer, schedule, 1, 4)
    assert all(np.array_equal(state[key], kept[key]) for key in kept)
    load_optimizer_state(side.model, optimizer, state)
    again = optimizer_state(side.model, optimizer)
    assert again.keys() == kept.keys()
    assert all(np.array_equal(again[key], kept[key]) for key in kept)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda state: state.pop("w/momentum_buffer"), "w/momentum_buffer"),
        (lambda state: state.update({"w/velocity": state.pop("w/square_avg")}), "w/square_avg"),
        (lambda state: state.update({"x/square_avg": state["w/square_avg"]}), "x/square_avg"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, named):
    side, optimizer, schedule = port_run("rmsprop")
    steps_in_the_warmup(side, optimizer, schedule, 0, 1)
    state = optimizer_state(side.model, optimizer)
    change(state)
    with pytest.raises(UserError, match=named):
        load_optimizer_state(side.model, optimizer, state)


def called_otherwise(self, block, param_and_grad):
    """Paddle's Adam in a version whose kernel takes no `moment2_max`, and its SGD's that takes no master weight.

    Given one, either would crash Python.
    """
    paddle._C_ops.adam_(param_and_grad[0], param_and_grad[1], lr, moment1, moment2, beta1_pow_acc)  # noqa: F821
    paddle._C_ops.sgd_(param_and_grad[0], lr, param_and_grad[1])  # noqa: F821


def not_called(self, block, param_and_grad):
    """And in one that has another kernel."""


@pytest.mark.parametrize("version", [called_otherwise, not_called])
@pytest.mark.parametrize(("kernel", "user"), [("adam_", paddle.optimizer.Adam), ("sgd_", paddle.optimizer.SGD)])
@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_another_version_of_the_kernel_is_refused(opt, kernel, user, version, monkeypatch):
    """Where it is used, before it is."""
    monkeypatch.setattr(user, "_append_optimize_op", version)
    monkeypatch.setattr(paddle._C_ops, kernel, lambda *args: pytest.fail("it was called"))
    side = PaddleSide(problem("float32", 0)[0])
    if opt.startswith("sgd") and kernel == "adam_":
        built(side, opt, SETTINGS["official"])
        return
    with pytest.raises(UserError, match=rf"^PaddlePaddle {paddle.__version__} .* {kernel} .* paddlepaddle==3\.3\.1$"):
        built(side, opt, SETTINGS["official"])


@BOTH
def test_an_unknown_optimizer_is_refused(kind):
    with pytest.raises(ValueError, match="choose sgd"):
        built(kind(problem("float32", 0)[0]), "adam", SETTINGS["official"])


def linear(kind: type, weight: np.ndarray) -> tuple:
    """(a linear layer of `kind` without a bias, float64; its tensors of arrays): `weight` is (out, in)."""
    if kind is TorchSide:
        layer, tensor = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.float64), torch.tensor
        layer.load_state_dict({"weight": torch.tensor(weight)})
    else:
        layer, tensor = paddle.nn.Linear(*weight.shape[::-1], bias_attr=False).to(dtype="float64"), paddle.to_tensor
        layer.weight.set_value(weight.T)
    return layer, tensor


@BOTH
@pytest.mark.parametrize(("count", "steps"), [(3, 2), (5, 3), (2, 4), (4, 2), (2, 1)])
def test_an_update_is_the_mean_of_its_group_of_batches_full_or_not(kind, count, steps):
    """By hand: for cross entropy the gradient of the logits is (probabilities - one-hot) / N.

    Five updates of a few additions each, of numbers below 4: 1e-13 is 100 times their rounding in float64.
    """
    rng, lr = np.random.default_rng(3), 0.5
    weight = rng.normal(size=(3, 4))
    batches = [(rng.normal(size=(5, 4)), rng.integers(0, 3, 5)) for _ in range(count)]
    layer, tensor = linear(kind, weight)
    engine, criterion = kind.package.train.engine, kind.package.train.criterion.build_criterion()
    optimizer, _ = kind.package.train.optimizer.build_optimizer(layer, lr=lr, momentum=0.0, weight_decay=0.0)
    settings, hooks = engine.Settings(accumulation_steps=steps), engine.Hooks(log=lambda line: None)
    tensors = [(tensor(image), tensor(label)) for image, label in batches]
    engine.train_one_epoch(layer, criterion, optimizer, tensors, "cpu", 0, settings, hooks)

    for start in range(0, count, steps):
        gradients = []
        for image, label in batches[start : start + steps]:
            exponentials = np.exp(image @ weight.T)
            probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
            gradients.append((probabilities - np.eye(3)[label]).T @ image / len(image))
        weight = weight - lr * np.mean(gradients, axis=0)
    found = layer.weight.detach().numpy()
    np.testing.assert_allclose(found if kind is TorchSide else found.T, weight, rtol=0, atol=1e-13)
