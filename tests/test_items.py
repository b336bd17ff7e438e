"""What the kit says of items, and how it converts weights, for every layer of this project's models."""

import numpy as np
import pytest

import mobilenetv3_paddle.models
from mobilenetv3_ref.models import MODELS
from portproof.backends import backend
from portproof.backends.trace import output_item
from portproof.convert.rules import paddle_to_torch, torch_to_paddle
from portproof.report.text import usual_causes


def test_causes_are_known_for_every_module():
    types = backend("torch").layers.types(MODELS["mobilenet_v3_small"]())
    recorded = [name for name, kind in types.items() if name and kind != "Sequential"]
    assert [name for name in recorded if not usual_causes(output_item(name, "logits"), types, {})] == []


@pytest.mark.parametrize("arch", sorted(MODELS))
def test_weights_go_to_the_port_and_back(arch, probe):
    """To exactly its keys and shapes, in its order, and back to the same bits."""
    arrays, types = probe(arch), backend("torch").layers.types(MODELS[arch]())
    converted = torch_to_paddle(arrays, types)
    port = mobilenetv3_paddle.models.MODELS[arch]().state_dict()
    assert {name: list(array.shape) for name, array in converted.items()} == {n: list(t.shape) for n, t in port.items()}
    back = paddle_to_torch(converted, types)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name, strict=True)
