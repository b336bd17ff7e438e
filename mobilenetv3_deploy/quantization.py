"""8-bit integers by post-training quantization: ONNX Runtime's static quantizer, and what each layer costs.

What a layer reads gets 8 bits, one scale a tensor, from the smallest and largest value on the calibration images: as
signed numbers without a zero point, which engines are faster with, where that costs at most half a bit.
Weights get 7 bits signed, one scale an output channel: with 8, processors without VNNI saturate where they add two
products in 16 bits (ONNX Runtime, "Quantize ONNX models", on U8S8 and reduce_range). Only layers with weights are
quantized, and of them only what they read: what a layer gives goes through hard-swishes, products and pools, which cost
accuracy and time in integers, and gain no size. OpenVINO joins each layer with what follows it; ONNX Runtime computes
in integers only where outputs are quantized as well.
"""

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxslim
from onnxruntime.quantization import CalibrationDataReader, QuantType, create_calibrator
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

from sturdyio.cli import UserError

OPERATORS = ["Conv", "Gemm", "MatMul"]


@dataclass(frozen=True)
class LayerError:
    """What it costs to quantize a layer, in relative errors: with weights' scales per channel, and per tensor."""

    layer: str
    weights: tuple[float, float]  # of the weights themselves
    output: tuple[float, float]  # of the model's output, where no other layer is quantized


class Quantizer:
    """An exported graph, its layers, and the ranges of its activations.

    `names` are {weight tensor of the graph: module}, as a card has them, `batches` images to calibrate on, each (N, 3,
    crop, crop), float32.
    """

    def __init__(self, path: Path, names: Mapping[str, str], batches: Iterable[np.ndarray]) -> None:
        onnxruntime.set_default_logger_severity(3)  # errors; it warns of every constant that is not used
        with tempfile.TemporaryDirectory() as folder:
            prepared = Path(folder, "prepared.onnx")
            # It puts biases into the layers that they belong to, and leaves hard-swishes whole.
            self.graph = onnxslim.slim(onnx.load(path))
            onnx.save(self.graph, prepared)
            calibrator = create_calibrator(prepared, OPERATORS, str(Path(folder, "augmented.onnx")))
            calibrator.collect_data(_Reader(self.graph.graph.input[0].name, batches))
            self.ranges = calibrator.compute_data()
        weights = tensors(self.graph)
        nodes = [node for node in self.graph.graph.node if node.op_type in OPERATORS and node.input[1] in weights]
        # {layer: (node, weight tensor)}
        self.layers = {names.get(node.input[1], node.name): (node.name, node.input[1]) for node in nodes}

    def matching(self, names: Iterable[str]) -> list[str]:
        """The layers of these names, or in modules of these names; raises UserError for a name without any."""
        found: dict[str, None] = {}
        for name in names:
            matches = [layer for layer in self.layers if f"{layer}.".startswith(f"{name}.")]
            if not matches:
                raise UserError(f"layer {name} is not in the model, which has {', '.join(self.layers)}")
            found |= dict.fromkeys(matches)
        return list(found)

    def quantized(self, layers: Collection[str], per_channel: bool = True) -> onnx.ModelProto:
        """The graph with these layers quantized."""
        if not layers:  # the quantizer would take every layer
            return self.graph
        chosen = [self.layers[layer][0] for layer in layers]
        read = {node.input[0] for node in self.graph.graph.node if node.name in chosen}
        how = {"quant_type": QuantType.QInt8, "symmetric": True}
        signed = {name: [how] for name in read if _costs_at_most_half_a_bit(*self.ranges[name].range_value)}
        quantizer = QDQQuantizer(
            deepcopy(self.graph),
            per_channel=per_channel,
            reduce_range=True,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=self.ranges,
            nodes_to_quantize=chosen,
            nodes_to_exclude=[],
            op_types_to_quantize=OPERATORS,
            extra_options={"TensorQuantOverrides": signed, "OpTypesToExcludeOutputQuantization": OPERATORS},
        )
        quantizer.quantize_model()
        return quantizer.model.model

    def errors(self, batch: np.ndarray) -> Iterator[LayerError]:
        """Of each layer in turn, on (N, 3, crop, crop), float32."""
        exact, weights = outputs(self.graph, batch), tensors(self.graph)
        for layer, (_, name) in self.layers.items():
            graphs = [self.quantized([layer], per_channel) for per_channel in (True, False)]
            weights_channel, weights_tensor = (
                relative_error(dequantized(graph, name), weights[name]) for graph in graphs
            )
            output_channel, output_tensor = (relative_error(outputs(graph, batch), exact) for graph in graphs)
            yield LayerError(layer, (weights_channel, weights_tensor), (output_channel, output_tensor))


class _Reader(CalibrationDataReader):
    def __init__(self, name: str, batches: Iterable[np.ndarray]) -> None:
        self.feeds = ({name: batch} for batch in batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def _costs_at_most_half_a_bit(low: np.ndarray, high: np.ndarray) -> bool:
    """A scale that is symmetric about 0, for values from `low` to `high`."""
    return bool(2 * max(-low, high) <= 2**0.5 * (high - low))


def tensors(graph: onnx.ModelProto) -> dict[str, np.ndarray]:
    """{name: array} of the constants."""
    return {one.name: onnx.numpy_helper.to_array(one) for one in graph.graph.initializer}


def dequantized(graph: onnx.ModelProto, name: str) -> np.ndarray:
    """A weight tensor that was quantized, as the graph computes with it."""
    arrays = tensors(graph)
    (node,) = (
        one for one in graph.graph.node if one.op_type == "DequantizeLinear" and one.input[0] == f"{name}_quantized"
    )
    values, scale, zero = (arrays[given] for given in node.input)
    axis = next((one.i for one in node.attribute if one.name == "axis"), 1)
    shape = [-1 if i == axis and scale.ndim else 1 for i in range(values.ndim)]
    return (values.astype(np.float64) - zero.reshape(shape)) * scale.reshape(shape)


def outputs(graph: onnx.ModelProto, batch: np.ndarray) -> np.ndarray:
    """What the graph says: each operator by itself in ONNX Runtime, quantized ones on the values they stand for."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: batch})[0]


def relative_error(array: np.ndarray, exact: np.ndarray) -> float:
    """The root mean square of the difference, in those of `exact`."""
    return float(np.linalg.norm(array - exact) / np.linalg.norm(exact))
