"""`align` on torchvision's models against paddle.vision's: aligned, or every true difference named and nothing else."""

from collections import Counter

import numpy as np
import paddle.vision.models
import pytest
import torchvision.models

from portproof import align
from portproof.compare import FAIL, PASS
from portproof.localize.locate import Location

IMAGES = np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype(np.float32)
DOWNSCALED = "it gives 0.5 times its input where nothing is dropped (Paddle's mode downscale_in_infer)"
BIASED = "the running variance is the biased one, sum / n (torch's is sum / (n - 1))"


def judged(name: str, modes: tuple[str, ...]):
    ref, port = getattr(torchvision.models, name)(weights=None), getattr(paddle.vision.models, name)()
    return align(ref, port, [IMAGES], modes=modes)


def faults(location: Location) -> dict[tuple[str, str, str], int]:
    """{(class, phase, causes): how many modules} of everything that was located."""
    found: dict[tuple[str, str, str], int] = {}
    for one in [location, *location.also]:
        key = one.type, one.phase, "; ".join(one.diagnosis)
        found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.thorough("test_squeezenet1_1_its_first_padding_and_its_dropout, test_mapping_pieces.py::test_a_right_port")
@pytest.mark.parametrize(
    ("name", "norms", "names"),
    [
        ("resnet18", 20, "by name"),
        ("mobilenet_v2", 52, "by name"),
        ("shufflenet_v2_x1_0", 56, "by order, type and shape"),
    ],
)
def test_aligned_but_for_running_variances(name, norms, names):
    verdict = judged(name, ("eval", "train"))
    assert f"{names}, confirmed by values everywhere" in verdict.notes[0]
    failed = [row.item for row in verdict.rows if row.status != PASS]
    assert Counter((item.mode, item.dtype, item.leaf) for item in failed) == {
        ("train", dtype, "running_var"): norms for dtype in ("float64", "float32")
    }
    assert faults(verdict.location) == {("BatchNorm2d", "buffers", BIASED): norms}


@pytest.mark.thorough("test_squeezenet1_1_its_first_padding_and_its_dropout, test_diagnosis.py::test_a_layer")
def test_mobilenet_v3_small_and_its_hard_sigmoid():
    """Its slope is the float32 number nearest to 0.1666667: 1e-7 off, which float64 shows and float32 does not."""
    verdict = judged("mobilenet_v3_small", ("eval", "train"))
    assert "by order, type and shape, confirmed by values everywhere" in verdict.notes[0]
    assert verdict.location.name == "features.1.block.1.scale_activation"
    slope = "it is hard-sigmoid with slope 0.1666667, Paddle's default, not Hardsigmoid"
    assert faults(verdict.location) == {("Hardsigmoid", "forward", slope): 9, ("BatchNorm2d", "buffers", BIASED): 34}
    assert {row.item.leaf for row in verdict.rows if row.status == FAIL and row.item.dtype == "float32"} == {
        "running_var"
    }


def test_squeezenet1_1_its_first_padding_and_its_dropout():
    verdict = judged("squeezenet1_1", ("eval",))
    assert verdict.location.name == "features.0"
    assert faults(verdict.location) == {
        ("Conv2d", "forward", "padding is 1, not 0"): 1,
        ("Dropout", "forward", DOWNSCALED): 1,
    }
