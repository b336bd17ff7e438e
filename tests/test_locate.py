"""The locator: faults put into a port through Paddle's own interface, and the module and the cause it has to name."""

from collections.abc import Callable

import numpy as np
import paddle
import pytest
from paddle import nn

import mobilenetv3_paddle.models
import mobilenetv3_ref.models
from portproof.backends import backend
from portproof.backends.probe import probe_images, probe_weights
from portproof.localize.locate import Location, locate, module_tree
from portproof.mapping.name_map import propose

OPTIONS = {"width_mult": 0.35, "num_classes": 10, "dropout": 0.0}


def found(breaking: Callable[[nn.Layer], None], *, dtype: str = "float64", own: bool = False) -> Location | None:
    """What `locate` says of a small port that `breaking` has been at; `own`: it breaks weights, which are kept."""
    ref = mobilenetv3_ref.models.mobilenet_v3_small(**OPTIONS)
    port = mobilenetv3_paddle.models.mobilenet_v3_small(**OPTIONS)
    images = probe_images(np.random.default_rng(3), 2, 64, 96)
    probe_weights(ref, 0, [images])
    breaking(port)
    ref_model, port_model = backend("torch").wrap(ref, "reference"), backend("paddle").wrap(port, "port")
    names = propose(ref_model, port_model, [images])
    if own:
        port = port_model.loaded_copy()
        breaking(port)
        port_model = backend("paddle").wrap(port, "port")
    cotangents = dict.fromkeys((False, True), [np.random.default_rng(4).normal(size=(2, 10))])
    return locate(ref_model, port_model, names, [images], cotangents=cotangents, dtype=dtype)


def layer(port: nn.Layer, name: str) -> nn.Layer:
    return dict(port.named_sublayers())[name]


def attribute(name: str, key: str, value: object) -> Callable[[nn.Layer], None]:
    return lambda port: setattr(layer(port, name), key, value)


def replaced(name: str, factory: Callable[[nn.Layer], nn.Layer]) -> Callable[[nn.Layer], None]:
    def breaking(port: nn.Layer) -> None:
        parent, _, child = name.rpartition(".")
        setattr(layer(port, parent), child, factory(layer(port, name)))

    return breaking


def output(name: str, change: Callable) -> Callable[[nn.Layer], None]:
    return lambda port: layer(port, name).register_forward_post_hook(lambda layer, inputs, y: change(y))


def tensor(name: str, leaf: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[nn.Layer], None]:
    def breaking(port: nn.Layer) -> None:
        parameter = getattr(layer(port, name), leaf)
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(change(parameter.numpy()))))

    return breaking


def frozen(port: nn.Layer) -> None:
    layer(port, "features.2.block.0.0").weight.stop_gradient = True


def half_precision(y: paddle.Tensor) -> paddle.Tensor:
    return y.astype("float16").astype(y.dtype)


def other_conv(**kwargs) -> Callable[[nn.Layer], nn.Layer]:
    def factory(old: nn.Layer) -> nn.Layer:
        channels = old.weight.shape[0]
        return nn.Conv2D(channels, channels, 5, groups=channels, bias_attr=False, **kwargs)

    return factory


FAULTS = {
    "epsilon": (attribute("features.0.1", "_epsilon", 1e-5), "features.0.1", "forward", "epsilon is 1e-05, not 0.001"),
    "small epsilon": (
        attribute("features.3.block.1.1", "_epsilon", 1.0001e-3),
        "features.3.block.1.1",
        "forward",
        "epsilon is 0.0010001, not 0.001",
    ),
    "momentum": (
        attribute("features.2.block.0.1", "_momentum", 0.01),
        "features.2.block.0.1",
        "buffers",
        "momentum=0.01; write 0.99 (Paddle: weight of the OLD value)",
    ),
    "biased variance": (
        replaced("features.4.block.0.1", lambda old: nn.BatchNorm2D(old.weight.shape[0], 0.99, 1e-3)),
        "features.4.block.0.1",
        "buffers",
        "the running variance is the biased one, sum / n (torch's is sum / (n - 1))",
    ),
    "swish": (
        replaced("features.0.2", lambda old: nn.Swish()),
        "features.0.2",
        "forward",
        "it is swish, not Hardswish",
    ),
    "ReLU6": (
        replaced("features.2.block.0.2", lambda old: nn.ReLU6()),
        "features.2.block.0.2",
        "forward",
        "it is ReLU6, not ReLU",
    ),
    "slope": (
        replaced("features.1.block.1.scale_activation", lambda old: nn.Hardsigmoid()),
        "features.1.block.1.scale_activation",
        "forward",
        "it is hard-sigmoid with slope 0.1666667, Paddle's default, not Hardsigmoid",
    ),
    "maximum": (
        replaced("features.1.block.1.avgpool", lambda old: nn.AdaptiveMaxPool2D(1)),
        "features.1.block.1.avgpool",
        "forward",
        "it takes the maximum, not the mean",
    ),
    "padding": (
        replaced("features.5.block.1.0", other_conv(padding=1)),
        "features.5.block.1.0",
        "forward",
        "padding is 1, not 2",
    ),
    "reflected padding": (
        replaced("features.5.block.1.0", other_conv(padding=2, padding_mode="reflect")),
        "features.5.block.1.0",
        "forward",
        "padding repeats the image (reflect), not zeros",
    ),
    "SAME": (
        replaced("features.4.block.1.0", other_conv(padding="SAME", stride=2)),
        "features.4.block.1.0",
        "forward",
        "padding is that of 'SAME': one more at the end than at the start",
    ),
    "residual": (
        attribute("features.3", "use_res_connect", False),
        "features.3",
        "forward",
        "it does not add its input (a residual connection is missing)",
    ),
    "scaled": (
        output("features.6", lambda y: 1.01 * y),
        "features.6",
        "forward",
        "it is 1.01 times the reference's, everywhere",
    ),
    "NaN": (output("classifier.0", lambda y: y * float("nan")), "classifier.0", "forward", None),
    "no gradient": (
        output("features.4", lambda y: y.detach()),
        "features.4",
        "backward",
        "the port sends no gradient through (stop_gradient, detach, no_grad)",
    ),
    "frozen": (
        frozen,
        "features.2.block.0.0",
        "backward",
        "weight is frozen in the port and not in the reference (stop_gradient)",
    ),
}


@pytest.mark.thorough(
    "one of them; the kit's test_align_faults.py and test_diagnosis.py try more causes, in each phase",
    but=r"^epsilon\]",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_module_and_the_cause_are_named(fault):
    breaking, name, phase, cause = FAULTS[fault]
    location = found(breaking)
    assert (location.name, location.phase) == (name, phase), location.lines()
    assert location.diagnosis == ([cause] if cause else []), location.diagnosis
    assert location.lines()[0].startswith(f"located: {name} (")
    assert sum("<--- HERE" in line for line in location.tree) == 1
    assert not [other for other in location.also if other.name != name]  # what it spreads to is not at fault


WEIGHTS = {
    "float16": (
        tensor("features.4.block.0.1", "weight", lambda w: w.astype(np.float16).astype(np.float32)),
        "features.4.block.0.1",
        "it went through float16",
    ),
    "not loaded": (
        tensor("features.0.1", "_variance", np.ones_like),
        "features.0.1",
        "it holds ones: it was not loaded",
    ),
    "exchanged axes": (
        tensor("features.5.block.1.0", "weight", lambda w: w.swapaxes(2, 3)),
        "features.5.block.1.0",
        "height and width of its kernels are exchanged",
    ),
    "one value": (
        tensor("classifier.3", "bias", lambda b: b + np.eye(10, dtype=np.float32)[3] * 1e-6),
        "classifier.3",
        None,
    ),
}


@pytest.mark.thorough("one of them; the kit's test_diagnosis.py", but="^not loaded")
@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_wrong_tensor_is_named(fault):
    breaking, name, cause = WEIGHTS[fault]
    location = found(breaking, own=True)
    assert (location.name, location.phase) == (name, "weights")
    assert location.diagnosis == ([cause] if cause else [])


@pytest.mark.thorough("test_the_module_and_the_cause_are_named in float64")
def test_what_only_float32_shows_is_found_in_float32():
    """A cast to float16 and back is seen in both; of the two only the one asked for is reported."""
    location = found(output("features.7", half_precision), dtype="float32")
    assert location.name == "features.7" and "float32" in location.proof[0]


@pytest.mark.thorough("test_a_wrong_tensor_is_named, the kit's test_a_faithful_port")
def test_a_right_port_is_not_located():
    assert found(lambda port: None) is None
    assert found(lambda port: None, dtype="float32") is None


@pytest.mark.thorough("test_the_module_and_the_cause_are_named sees that one is not two")
def test_two_faults_are_both_named():
    def breaking(port: nn.Layer) -> None:
        attribute("features.7.block.0.1", "_epsilon", 1e-5)(port)
        attribute("features.3", "use_res_connect", False)(port)

    location = found(breaking)
    assert location.name == "features.3"
    assert [other.name for other in location.also] == ["features.7.block.0.1"]
    assert location.lines()[-1] == (
        "also at fault by itself: features.7.block.0.1 (BatchNorm2d): forward: epsilon is 1e-05, not 0.001"
    )


def test_the_tree_shows_the_way_to_the_place():
    model = backend("torch").wrap(mobilenetv3_ref.models.mobilenet_v3_small(**OPTIONS), "reference")
    lines = module_tree(model, "features.1.block.1.fc1")
    assert lines[0] == "model (MobileNetV3)"
    assert "          fc1 (Conv2d)   <--- HERE" in lines
    assert len([line for line in lines if line.startswith("    ") and line[4] != " "]) == 13
