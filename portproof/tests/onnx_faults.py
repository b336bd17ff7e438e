"""Faults of exported graphs, put into the ONNX file, by what `portproof judge --onnx` has to say of each.

`python tests/onnx_faults.py` prints what it says of all, as rows of a Markdown table.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from toy_exports import NETWORKS, export_paddle, export_torch, images, reference

import portproof
from portproof.compare import FAIL, Verdict
from portproof.recording.file import Recording

EXPORTERS = ("torch", "paddle")
THE_MODEL = ""  # as a place: no module of it


@dataclass
class Editable:
    """A graph whose tensors are found by the reference's values."""

    model: onnx.ModelProto
    weights: Mapping[str, np.ndarray]
    makers: dict[str, NodeProto] = field(init=False)

    def __post_init__(self) -> None:
        self.makers = {name: node for node in self.graph.node for name in node.output}

    @property
    def graph(self) -> onnx.GraphProto:
        return self.model.graph

    def nodes(self, kind: str) -> list[NodeProto]:
        return [node for node in self.graph.node if node.op_type == kind]

    def tensors(self) -> Iterator[tuple[str, TensorProto]]:
        yield from ((tensor.name, tensor) for tensor in self.graph.initializer)
        for node in self.nodes("Constant"):
            yield from ((node.output[0], each.t) for each in node.attribute if each.name == "value")

    def constant(self, key: str) -> tuple[str, TensorProto]:
        """(name, tensor) of a weight, in whichever layout."""
        wanted = self.weights[key]
        for name, tensor in self.tensors():
            array = numpy_helper.to_array(tensor)
            if array.size == wanted.size and array.dtype == np.float32:
                same = array.shape == wanted.shape and np.array_equal(array, wanted)
                orders = permutations(range(array.ndim)) if array.ndim == wanted.ndim else ()
                if same or any(np.array_equal(array.transpose(axes), wanted) for axes in orders):
                    return name, tensor
        raise KeyError(key)

    def change(self, key: str, changed: Callable[[np.ndarray], np.ndarray]) -> None:
        tensor = self.constant(key)[1]
        array = np.ascontiguousarray(changed(numpy_helper.to_array(tensor)).astype(np.float32))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    def reader(self, key: str) -> NodeProto:
        """The node that uses a weight, perhaps transposed or under another name."""
        names = {self.constant(key)[0]}
        for node in self.graph.node:
            if names.intersection(node.input):
                if node.op_type not in ("Identity", "Transpose", "Reshape"):
                    return node
                names.update(node.output)
        raise KeyError(key)

    def set(self, node: NodeProto, name: str, value: object) -> None:
        kept = [each for each in node.attribute if each.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    def put_behind(self, tensor: str, kind: str, *inputs: str, **attributes: object) -> None:
        """Another node between a tensor and what reads it; the graph's outputs keep their names."""
        inner = f"{tensor}.{len(self.graph.node)}"
        for node in self.graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == tensor else name for name in names]
        made = helper.make_node(kind, [inner, *inputs], [tensor], **attributes)
        place = next(i for i, node in enumerate(self.graph.node) if inner in node.output)
        for node in self.graph.node[place + 1 :]:
            node.input[:] = [tensor if name == inner else name for name in node.input]
        self.graph.node.insert(place + 1, made)

    def residuals(self) -> list[NodeProto]:
        """The additions of two tensors that are no weights."""
        fixed = {name for name, _ in self.tensors()}
        for node in self.graph.node:
            if fixed.issuperset(node.input) and node.input:
                fixed.update(node.output)
        return [node for node in self.nodes("Add") if not fixed.intersection(node.input)]


def stale(key: str) -> Callable[[Editable], None]:
    return lambda g: g.change(key, lambda w: np.random.default_rng(1).normal(size=w.shape) * w.std())


def permuted(key: str) -> Callable[[Editable], None]:
    return lambda g: g.change(key, lambda w: w[::-1])


def float16(key: str) -> Callable[[Editable], None]:
    return lambda g: g.change(key, lambda w: w.astype(np.float16))


def scaled(key: str) -> Callable[[Editable], None]:
    return lambda g: g.change(key, lambda w: w * np.float64(1 + 3e-7))


def transposed(key: str) -> Callable[[Editable], None]:
    return lambda g: g.change(key, lambda w: w.swapaxes(0, 1))


def epsilon(key: str) -> Callable[[Editable], None]:
    return lambda g: g.set(g.reader(key), "epsilon", 1e-5)


def in_train_mode(key: str) -> Callable[[Editable], None]:
    return lambda g: g.set(g.reader(key), "training_mode", 1)


def another_activation(*kinds: str) -> Callable[[Editable], None]:
    """The first node of the first of these kinds that there is computes another function."""

    def edit(g: Editable) -> None:
        node = next(node for kind in kinds for node in g.nodes(kind))
        node.op_type = "Tanh" if node.op_type == "Erf" else "Relu"
        del node.attribute[:]

    return edit


def softmax(times: int) -> Callable[[Editable], None]:
    def edit(g: Editable) -> None:
        for _ in range(times):
            g.put_behind(g.graph.output[0].name, "Softmax", axis=-1)

    return edit


def dropout(key: str) -> Callable[[Editable], None]:
    def edit(g: Editable) -> None:
        g.graph.initializer.extend(
            [numpy_helper.from_array(np.array(0.4, np.float32), "ratio"), numpy_helper.from_array(np.array(True), "on")]
        )
        g.put_behind(g.reader(key).output[0], "Dropout", "ratio", "on", seed=0)

    return edit


def fixed_batch(g: Editable) -> None:
    g.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2


def other_resize(g: Editable) -> None:
    g.set(g.nodes("Resize")[0], "coordinate_transformation_mode", "asymmetric")


def rounded_slope(g: Editable) -> None:
    g.set(g.nodes("HardSigmoid")[0], "alpha", 0.1667)


def rounded_scale(g: Editable) -> None:
    """1 / sqrt(6), or its root on both factors, as exporters write it."""
    for _, tensor in g.tensors():
        array = numpy_helper.to_array(tensor)
        if array.size == 1 and array.dtype == np.float32 and abs(float(array.flat[0]) - 6**-0.5) < 1e-6:
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(array, 0.4082), tensor.name))
            return
    raise KeyError("the scale of attention")


def without_skip(number: int) -> Callable[[Editable], None]:
    def edit(g: Editable) -> None:
        node = g.residuals()[number]
        order = [name for each in g.graph.node for name in each.output]
        branch = max(node.input, key=lambda name: order.index(name) if name in order else -1)
        node.op_type, node.input[:] = "Identity", [branch]

    return edit


@dataclass(frozen=True)
class GraphFault:
    kind: str
    network: str
    edit: Callable[[Editable], None]
    place: str | None  # a module of the reference; None: no module has it
    cause: str = ""  # what the report says, or a part of it


CONVOLUTIONS, TRANSFORMER = NETWORKS
TABLE = [
    GraphFault("weights stale", CONVOLUTIONS, stale("block.project.weight"), "block.project", "(stale)"),
    GraphFault("weights permuted", CONVOLUTIONS, permuted("block.se.fc1.weight"), "block.se.fc1", "in another order"),
    GraphFault("weights in float16", CONVOLUTIONS, float16("stem.weight"), "stem", "rounded to float16"),
    GraphFault("weights times 1 + 3e-7", CONVOLUTIONS, scaled("block.conv.weight"), "block.conv", "times 1 + 3e-07"),
    GraphFault("weights transposed", CONVOLUTIONS, transposed("block.project.weight"), "block.project", "transposed"),
    GraphFault("epsilon", CONVOLUTIONS, epsilon("block.bn.weight"), "block.bn", "epsilon is 1e-05, not 0.001"),
    GraphFault("another activation", CONVOLUTIONS, another_activation("HardSwish"), "act", "it is ReLU, not Hardswish"),
    GraphFault("softmax appended", CONVOLUTIONS, softmax(1), THE_MODEL, "softmax is applied to what it returns"),
    GraphFault("softmax twice", CONVOLUTIONS, softmax(2), THE_MODEL, "softmax is applied to what it returns, twice"),
    GraphFault("batch norm in train mode", CONVOLUTIONS, in_train_mode("block.bn2.weight"), "block.bn2", "train mode"),
    GraphFault("a fixed batch", CONVOLUTIONS, fixed_batch, None),
    GraphFault("resize of another opset", CONVOLUTIONS, other_resize, "up", "asymmetric, not half_pixel"),
    GraphFault("a constant rounded", CONVOLUTIONS, rounded_slope, "block.se.gate", "alpha is 0.1667, not 1/6"),
    GraphFault("a skip dropped", CONVOLUTIONS, without_skip(0), "block", "a residual connection is missing"),
    GraphFault("weights stale", TRANSFORMER, stale("layers.0.fc1.weight"), "layers.0.fc1", "(stale)"),
    GraphFault("weights permuted", TRANSFORMER, permuted("layers.1.attn.q.weight"), "layers.1.attn.q", "another order"),
    GraphFault("weights in float16", TRANSFORMER, float16("embed.weight"), "embed", "rounded to float16"),
    GraphFault("weights times 1 + 3e-7", TRANSFORMER, scaled("layers.0.attn.v.weight"), "layers.0.attn.v", "1 + 3e-07"),
    GraphFault(
        "weights transposed", TRANSFORMER, transposed("layers.0.attn.o.weight"), "layers.0.attn.o", "transposed"
    ),
    GraphFault(
        "epsilon", TRANSFORMER, epsilon("layers.1.norm2.weight"), "layers.1.norm2", "epsilon is 1e-05, not 1e-06"
    ),
    GraphFault("another activation", TRANSFORMER, another_activation("Gelu", "Erf"), "layers.0.act"),
    GraphFault("softmax appended", TRANSFORMER, softmax(1), THE_MODEL, "softmax is applied to what it returns"),
    GraphFault("dropout in train mode", TRANSFORMER, dropout("layers.1.fc2.bias"), "layers.1", "dropout is on"),
    GraphFault("a fixed batch", TRANSFORMER, fixed_batch, None),
    GraphFault("a constant rounded", TRANSFORMER, rounded_scale, "layers.0.attn", "0.4082, not sqrt(1/6)"),
    GraphFault("a skip dropped", TRANSFORMER, without_skip(3), "layers.1", "a residual connection is missing"),
]


class Exports:
    """The networks' graphs of both exporters and their recordings, made when asked for, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references = {name: reference(name) for name in NETWORKS}
        self.recordings: dict[str, Recording] = {}

    def recording(self, network: str) -> Recording:
        """With the networks' own weights, at batch 2 and 3."""
        if network not in self.recordings:
            how = {"weights": "reference", "modes": ("eval",), "also": [[images(network, 3)]]}
            self.recordings[network] = portproof.record(self.references[network], [images(network, 2)], **how)
        return self.recordings[network]

    def graph(self, network: str, exporter: str) -> Path:
        """`exporter`: "torch", "torch, folded" or "paddle"."""
        path = self.folder / f"{network}, {exporter}.onnx"
        if not path.exists():
            ref, make_port = self.references[network], NETWORKS[network][1]
            if exporter == "paddle":
                port = make_port()
                portproof.load_reference_weights(ref, port, [images(network, 2)])
                export_paddle(port, network, path)
            else:
                export_torch(ref, network, path, optimize=exporter == "torch, folded")
        return path

    def faulty(self, fault: GraphFault, exporter: str) -> Path:
        """The graph with the fault in it."""
        model = onnx.load(self.graph(fault.network, exporter))
        weights = {key: tensor.numpy() for key, tensor in self.references[fault.network].state_dict().items()}
        fault.edit(Editable(model, weights))
        path = self.folder / "faulty.onnx"
        onnx.save(model, path)
        return path

    def judged(self, fault: GraphFault, exporter: str) -> Verdict:
        return portproof.judge_onnx(self.faulty(fault, exporter), self.recording(fault.network))


def row(fault: GraphFault, exporter: str, verdict: Verdict) -> str:
    """Of a table: fault, network, exporter, the place that is named, and what is said of it."""
    at = verdict.location
    said = "; ".join(at.diagnosis) if at else str(verdict.first_failure.reason or verdict.first_failure.item)
    place = f"`{at.name}`" if at and at.name else "the model itself"
    cells = (fault.kind, fault.network, exporter, place, said)
    return f"| {' | '.join(cells)} |" if verdict.status == FAIL else f"NOT NOTICED: {fault.kind}, {exporter}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        exports = Exports(Path(folder))
        for fault in TABLE:
            for exporter in EXPORTERS:
                print(row(fault, exporter, exports.judged(fault, exporter)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
