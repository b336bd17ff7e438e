"""An ONNX graph, evaluated in float64 by onnx's reference: weights widened, short constants as they were meant."""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpFunction, OpRun

from portproof.exported.constants import snapped
from portproof.exported.operators import OPERATORS
from sturdyio.cli import UserError, one_line
from sturdyio.files import existing_file, refusing

MOST_BYTES = 2**31 - 1  # of what protobuf reads
EXPECTED = "a graph of ONNX operators"
FIX = "export the model again"
Values = Mapping[str, np.ndarray]


class NotEvaluated(Exception):
    """Onnx has no reference of an operator, such as one that an engine made by fusing others, or that raises."""


@dataclass(frozen=True)
class GraphInput:
    name: str
    sizes: tuple[int | str, ...]  # a name where any size is claimed
    dtype: np.dtype

    def problem(self, array: np.ndarray) -> str:
        """Why `array` does not fit; "" if it does."""
        fits = len(array.shape) == len(self.sizes) and all(
            type(size) is str or size == n for n, size in zip(array.shape, self.sizes)
        )
        wanted = "x".join(map(str, self.sizes))
        return "" if fits else f"input {self.name} takes {wanted}, not {'x'.join(map(str, array.shape))}"


@dataclass
class Node:
    """One operator; `run` takes and returns arrays in the order of its names."""

    op: OpRun
    inputs: list[str]
    outputs: list[str]
    hidden: list[str] = field(default_factory=list)  # tensors that its inner graphs read

    @property
    def title(self) -> str:
        return f"{self.op.op_type} {self.op.onnx_node.name or self.outputs[0]}"

    def changed(self, **attributes: Any) -> Node:
        op = copy.copy(self.op)
        for name, value in attributes.items():
            setattr(op, name, value)
        return Node(op, self.inputs, self.outputs, self.hidden)

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        context = {"context": values} if self.op.need_context() else {}
        try:
            with np.errstate(all="ignore"):
                results = self.op.run(*[values[name] if name else None for name in self.inputs], **context)
        except Exception as error:  # each operator raises its own
            raise NotEvaluated(f"{self.title}: {one_line(error).rstrip('.')}") from error
        return [widened(each) if isinstance(each, np.ndarray) else each for each in results]


class Graph:
    """The graph of a file; raises UserError as `read_model` does, and NotEvaluated, here or when it is run."""

    def __init__(self, path: str | Path) -> None:
        model = read_model(path)
        graph = model.graph
        self.snapped: dict[str, str] = {}  # {tensor or node and attribute: what its float32 stands for}
        self.constants: dict[str, np.ndarray] = {}  # float64 by name, of initializers and Constant nodes
        with refusing(path, EXPECTED, FIX):
            for tensor in graph.initializer:
                _read_external(path, tensor)
                self.constants[tensor.name] = widened(numpy_helper.to_array(tensor))
                tensor.ClearField("raw_data")
            self.outputs = [each.name for each in graph.output]
            del graph.initializer[:]
            for tensor in tensors_in(model):
                _read_external(path, tensor)
            if model.functions:
                from onnx.inliner import inline_local_functions

                model = inline_local_functions(model)
        try:
            evaluator = ReferenceEvaluator(model, new_ops=list(OPERATORS))  # type: ignore[arg-type]  # it takes classes
        except Exception as error:  # of an unknown operator it is any
            raise NotEvaluated(one_line(error).rstrip(".")) from error
        self.nodes: list[Node] = []
        for op in evaluator.rt_nodes_:
            self._widen(op)
            if op.op_type == "Constant":
                self.constants[op.output[0]] = op.run()[0]
            else:
                self.nodes.append(Node(op, list(op.input), list(op.output), _hidden(op)))

    def _widen(self, op: Any) -> None:
        """Attributes of an OpRun in float64, short ones as they were meant; so in inner graphs."""
        for name in op.attributes_names_:
            value = getattr(op, name)
            if isinstance(value, np.float32) and name == "momentum":  # of statistics, which are not updated
                setattr(op, name, float(value))
            elif isinstance(value, np.float32):
                setattr(op, name, self._snapped(f"{op.op_type} {op.onnx_node.name}, {name}", float(value)))
            elif isinstance(value, list) and value and isinstance(value[0], np.float32):
                setattr(op, name, [float(each) for each in value])
            elif isinstance(value, np.ndarray):
                setattr(op, name, self._snapped_array(op.output[0], widened(value)))
            elif isinstance(value, ReferenceEvaluator):
                self._widen_all(value)
            elif name in ("to", "dtype") and value == TensorProto.FLOAT:
                setattr(op, name, TensorProto.DOUBLE)
        if op.op_type == "Constant":
            op.cst = widened(np.asarray(getattr(op, "cst", 0.0)))
            if op.cst.dtype == np.float64:
                op.cst = self._snapped_array(op.output[0], op.cst)
            op.attributes_names_ = set()
            op._run = lambda: (op.cst,)
        if isinstance(op, OpFunction):
            self._widen_all(op.impl_)

    def _widen_all(self, evaluator: ReferenceEvaluator) -> None:
        evaluator.rt_inits_ = {name: widened(array) for name, array in evaluator.rt_inits_.items()}
        for op in evaluator.rt_nodes_:
            self._widen(op)

    def snap(self, recorded: Collection[float]) -> None:
        """Snap the `factors`, and single numbers among the constants, but those of one `recorded` tensor."""
        for name, array in self.constants.items():
            if array.dtype == np.float64 and name in self.factors:
                self.constants[name] = np.array([self._snapped(name, float(each)) for each in array])
            elif array.dtype == np.float64 and array.size == 1 and float(array.flat[0]) not in recorded:
                self.constants[name] = self._snapped_array(name, array)

    @cached_property
    def factors(self) -> set[str]:
        """Tensors that may be factors of a size."""
        resizing = (node for node in self.nodes if node.op.op_type in ("Resize", "Upsample"))
        return {name for node in resizing for name in node.inputs[1:]}

    def _snapped_array(self, name: str, array: np.ndarray) -> np.ndarray:
        if array.dtype != np.float64 or array.size != 1:
            return array
        return np.full_like(array, self._snapped(name, float(array.flat[0])))

    def _snapped(self, name: str, value: float) -> float:
        number, text = snapped(value)
        if text:
            self.snapped[name] = text
        return number

    def feeds(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: widened(array) for name, array in arrays.items()}

    def run(
        self,
        given: Values,
        replaced: Values | None = None,
        nodes: Sequence[int] | None = None,
        changed: Mapping[int, Node] | None = None,
        constants: Values | None = None,
        passed_on: Values | None = None,
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Run the nodes (default: all) -> (name, value) of each result, in order; values are let go when used up.

        `given`: inputs, and tensors that the `nodes` take from others. `replaced`: values in place of results, which
        are not computed. `passed_on`: values that the nodes behind get in place of results, which are.
        `changed`: nodes by number instead of the graph's own; `constants`: other values of some.
        """
        replaced = replaced or {}
        numbers = range(len(self.nodes)) if nodes is None else nodes
        last: dict[str, int] = {}
        for i in numbers:
            last |= dict.fromkeys((*self.nodes[i].inputs, *self.nodes[i].hidden), i)
        values = ChainMap[str, Any]({**given, **replaced}, constants or {}, self.constants)  # type: ignore[arg-type]
        for i in numbers:
            node = (changed or {}).get(i) or self.nodes[i]
            wanted = [name for name in node.outputs if name and name not in replaced]
            if wanted:
                for name, value in zip(node.outputs, node.run(values)):
                    if name in wanted:
                        values[name] = (passed_on or {}).get(name, value)
                        if isinstance(value, np.ndarray):
                            yield name, value
            for name in (*node.inputs, *node.hidden):
                if last.get(name) == i and name not in self.constants:
                    values.pop(name, None)

    def before(self, tensor: str, known: Collection[str]) -> list[int]:
        """The numbers of the nodes from which `tensor` follows, if `known` tensors are given."""
        makers = {name: i for i, node in enumerate(self.nodes) for name in node.outputs}
        found: set[int] = set()
        wanted = [tensor]
        while wanted:
            i = makers.get(wanted.pop())
            if i is not None and i not in found:
                found.add(i)
                wanted += [name for name in (*self.nodes[i].inputs, *self.nodes[i].hidden) if name not in known]
        return sorted(found)

    def behind(self, tensors: Collection[str]) -> set[str]:
        """These tensors and all that follow from them."""
        found = set(tensors)
        for node in self.nodes:
            if found.intersection((*node.inputs, *node.hidden)):
                found.update(node.outputs)
        return found - {""}


def widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def tensors_in(message: Message) -> Iterator[TensorProto]:
    """All of a model: initializers and constants, in inner graphs and functions, too."""
    if isinstance(message, TensorProto):
        yield message
        return
    for each_field, value in message.ListFields():
        if each_field.message_type is not None:
            for each in [value] if isinstance(value, Message) else value:
                yield from tensors_in(each)


def read_model(path: str | Path) -> onnx.ModelProto:
    """The model without its external data; raises UserError for what is none, or lacks data in its folder."""
    file = existing_file(path, "graph")
    if file.stat().st_size > MOST_BYTES:
        raise UserError(f"graph {path} is over 2 GiB, which no protobuf holds: export it with external data")
    with refusing(path, EXPECTED, FIX):
        model = onnx.load(str(file), load_external_data=False)
        if not model.graph.node or not model.opset_import:
            raise ValueError("it holds no operators")
    for tensor in tensors_in(model):
        _external(path, tensor)
    return model


def _external(path: str | Path, tensor: TensorProto) -> tuple[Path, int, int] | None:
    """(file, first byte, number of bytes) of its data in another file; None if it is in the graph."""
    if not uses_external_data(tensor):
        return None
    folder = Path(path).parent.resolve()
    with refusing(path, EXPECTED, FIX):
        info = ExternalDataInfo(tensor)
        file, start = (folder / info.location).resolve(), int(info.offset or 0)
        size = None if info.length is None else int(info.length)
        if start < 0 or (size or 0) < 0:
            raise ValueError(f"the data of {tensor.name} begins at {start} and has {size} bytes")
    if Path(info.location).is_absolute() or folder not in file.parents:
        raise UserError(f"graph {path} reads {info.location!r}, which is not in its folder: {FIX}")
    rest = existing_file(file, f"data of graph {path},").stat().st_size - start
    if rest < (size or 0):
        raise UserError(f"data of graph {path}, {file}, ends early: {FIX}, or copy all of its files")
    return file, start, rest if size is None else size


def _read_external(path: str | Path, tensor: TensorProto) -> None:
    """Put its data in, if that is in another file; raises any exception if it is not that of such a tensor."""
    found = _external(path, tensor)
    if found is None:
        return
    file, start, size = found
    with file.open("rb") as opened:
        opened.seek(start)
        tensor.raw_data = opened.read(size)
    del tensor.external_data[:]
    tensor.data_location = TensorProto.DEFAULT
    numpy_helper.to_array(tensor)


def graph_inputs(path: str | Path) -> list[GraphInput]:
    """What the graph of a file takes, without its weights; raises UserError as `read_model` does."""
    graph = read_model(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    with refusing(path, EXPECTED, FIX):
        return [_input(each) for each in graph.input if each.name not in weights]


def _input(value: onnx.ValueInfoProto) -> GraphInput:
    kind = value.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "any" for dim in kind.shape.dim]
    return GraphInput(value.name, tuple(sizes), onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _hidden(op: OpRun) -> list[str]:
    graphs = [each.g for each in op.onnx_node.attribute if each.type == AttributeProto.GRAPH]
    return [name for graph in graphs for name in OpRun.implicit_inputs(graph)]
