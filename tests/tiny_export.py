"""An exported model that is made in no time: from the mean colour of an image to the logits of ImageNet's classes."""

from pathlib import Path

import numpy as np

from mobilenetv3_common.wnids import IMAGENET_CLASSES
from mobilenetv3_deploy.card import Card, write_card
from mobilenetv3_deploy.engines import ONNX
from mobilenetv3_deploy.preprocessing import Preprocessing


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
