"""An exported model that is made in no time: from the mean colour of an image to the logits of ImageNet's classes."""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mobilenetv3_common.wnids import IMAGENET_CLASSES
from mobilenetv3_deploy.card import Card, write_card
from mobilenetv3_deploy.engines import ONNX
from mobilenetv3_deploy.preprocessing import Preprocessing


def require(extra: str, *packages: str) -> None:
    """Skip the module where one of `packages` is missing; fail if DEPLOY_REQUIRED is set."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        message = f"{', '.join(missing)} missing: pip install -e '.[{extra}]'"
        pytest.fail(message) if os.environ.get("DEPLOY_REQUIRED") else pytest.skip(message, allow_module_level=True)


def write_tiny_export(folder: Path, seed: int, output: str = "logits", **preprocessing: int) -> Path:
    """Write it, with weights from `seed`; `output` is what the card claims of what are logits."""
    from onnx import TensorProto, helper, numpy_helper, save

    folder.mkdir()
    weights = np.random.default_rng(seed).normal(size=(3, 1000)).astype(np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
    ]
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, "H", "W"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 1000])]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save(model, folder / ONNX)
    sizes = Preprocessing(**preprocessing)
    write_card(folder, Card("paddle", "mobilenet_v3_small", 1000, output, sizes, IMAGENET_CLASSES, "0" * 64))
    return folder
