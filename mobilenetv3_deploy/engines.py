"""Engines that run an exported model, behind one interface: `load(folder, "onnxruntime").run(batch)`.

Numbers of threads are of the whole process where the engine has it so: torch's, torch-compile's and paddle's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast

import numpy as np

from mobilenetv3_deploy.card import AGAIN, Card, read_card
from sturdyio.cli import UserError

ONNX = "model.onnx"
PADDLE_MODEL, PADDLE_WEIGHTS = "inference.json", "inference.pdiparams"
WEIGHTS = "weights.safetensors"


class Engine(ABC):
    """A loaded model. Not to be called from two threads at once."""

    name: str
    package: str  # to import
    extra: str  # of this project, that installs it
    files: tuple[str, ...]  # of the model's folder that it needs
    framework = ""  # from which the model must be exported; "": from any

    def __init__(self, folder: Path, card: Card, threads: int) -> None:
        self.card = card
        self._load(folder, threads)

    def run(self, batch: np.ndarray) -> np.ndarray:
        """(N, 3, crop, crop), float32 -> (N, num_classes), float32: what `card.output` says. Any N of at least 1.

        Raises ValueError for another shape or dtype.
        """
        crop = self.card.preprocessing.crop
        if batch.dtype != np.float32 or batch.ndim != 4 or not len(batch) or batch.shape[1:] != (3, crop, crop):
            raise ValueError(f"batch {batch.shape}, {batch.dtype}: (N, 3, {crop}, {crop}), float32 is expected")
        return self._run(np.ascontiguousarray(batch))

    @abstractmethod
    def _load(self, folder: Path, threads: int) -> None: ...

    @abstractmethod
    def _run(self, batch: np.ndarray) -> np.ndarray: ...


class OnnxRuntime(Engine):
    name, package, extra, files = "onnxruntime", "onnxruntime", "deploy", (ONNX,)

    def _load(self, folder: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors; it warns of every initializer that it removes
        self._session = onnxruntime.InferenceSession(folder / ONNX, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name

    def _run(self, batch: np.ndarray) -> np.ndarray:
        return self._session.run(None, {self._input: batch})[0]


class OpenVino(Engine):
    name, package, extra, files = "openvino", "openvino", "openvino", (ONNX,)

    def _load(self, folder: Path, threads: int) -> None:
        import openvino

        options = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",  # else bfloat16, on a processor that has it
        }
        self._model = openvino.Core().compile_model(str(folder / ONNX), "CPU", options)

    def _run(self, batch: np.ndarray) -> np.ndarray:
        return self._model(batch)[0].copy()  # of a buffer that the next call overwrites


class PaddleInference(Engine):
    name, package, extra = "paddle-inference", "paddle", "paddle"
    files, framework = (PADDLE_MODEL, PADDLE_WEIGHTS), "paddle"

    def _load(self, folder: Path, threads: int) -> None:
        from paddle import inference

        config = inference.Config(str(folder / PADDLE_MODEL), str(folder / PADDLE_WEIGHTS))
        config.disable_gpu()
        config.disable_glog_info()
        config.enable_mkldnn()
        config.set_cpu_math_library_num_threads(threads)
        self._predictor = inference.create_predictor(config)
        self._input = self._predictor.get_input_handle(self._predictor.get_input_names()[0])
        self._output = self._predictor.get_output_handle(self._predictor.get_output_names()[0])

    def _run(self, batch: np.ndarray) -> np.ndarray:
        self._input.reshape(batch.shape)
        self._input.copy_from_cpu(batch)
        self._predictor.run()
        return self._output.copy_to_cpu()


class PaddleEager(Engine):
    """The model as trained, as it was written."""

    name, package, extra, files, framework = "paddle", "paddle", "paddle", (WEIGHTS,), "paddle"
    dtype: Literal["float32", "float64"] = "float32"

    def _load(self, folder: Path, threads: int) -> None:
        import paddle

        from mobilenetv3_paddle.models import MODELS, load_weights

        paddle.base.core.set_num_threads(threads)
        self._model = MODELS[self.card.model](num_classes=self.card.num_classes)
        load_weights(self._model, folder / WEIGHTS)
        self._model.eval()

    def widen(self) -> None:
        """From now on compute in float64, and give that."""
        self.dtype = "float64"
        self._model.to(dtype=self.dtype)

    def _run(self, batch: np.ndarray) -> np.ndarray:
        import paddle
        from paddle.nn import functional as F

        with paddle.no_grad():
            logits = self._model(paddle.to_tensor(batch).astype(self.dtype))
            return (F.softmax(logits, 1) if self.card.output == "probabilities" else logits).numpy()


class TorchEager(Engine):
    """The model as trained, as it was written."""

    name, package, extra, files, framework = "torch", "torch", "torch", (WEIGHTS,), "torch"
    dtype = "float32"

    def _load(self, folder: Path, threads: int) -> None:
        import torch

        from mobilenetv3_ref.models import MODELS, load_weights

        torch.set_num_threads(threads)
        self._model: torch.nn.Module = MODELS[self.card.model](num_classes=self.card.num_classes)
        load_weights(self._model, folder / WEIGHTS)
        self._model.eval()

    def widen(self) -> None:
        """From now on compute in float64, and give that."""
        self.dtype = "float64"
        self._model.double()

    def _run(self, batch: np.ndarray) -> np.ndarray:
        import torch

        with torch.inference_mode():
            logits = self._model(torch.from_numpy(batch).to(getattr(torch, self.dtype)))
            return (logits.softmax(1) if self.card.output == "probabilities" else logits).numpy()


class TorchCompile(TorchEager):
    """`torch.compile`, which compiles at the first batch of 1 image and at the first of more: a minute each."""

    name = "torch-compile"

    def _load(self, folder: Path, threads: int) -> None:
        import torch

        super()._load(folder, threads)
        self._model = cast(torch.nn.Module, torch.compile(self._model, dynamic=True))


ENGINES: dict[str, type[Engine]] = {
    one.name: one for one in (OnnxRuntime, OpenVino, PaddleInference, PaddleEager, TorchEager, TorchCompile)
}
BEST = ("onnxruntime", "openvino", "paddle-inference")  # the fastest first, as measured
BEST_QUANTIZED = ("openvino", "onnxruntime")  # of a model in 8-bit integers


def lacks(name: str, card: Card) -> str:
    """What engine `name` needs to run the model of `card`, and the fix; "" if nothing."""
    engine = ENGINES[name]
    if engine.framework not in ("", card.framework):
        return f"engine {name} runs models that were exported with --framework {engine.framework}: {AGAIN}"
    missing = [file for file in engine.files if file not in card.files]
    if missing:
        return f"engine {name} needs {missing[0]}, which the model's folder does not have: {AGAIN}"
    if find_spec(engine.package) is None:
        return f"engine {name} needs {engine.package}, which is not installed: pip install -e '.[{engine.extra}]'"
    return ""


def load(folder: str | Path, engine: str = "best", threads: int = 1) -> Engine:
    """The model in `folder`, ready to run in `engine`, one of ENGINES, or "best": the first of BEST that is there,
    of BEST_QUANTIZED for a model that tools/quantize_model.py wrote.

    Raises UserError for a folder that `read_card` refuses, an unknown engine, and what `lacks` says.
    """
    if engine != "best" and engine not in ENGINES:
        raise UserError(f"engine {engine!r} is unknown: choose best or one of {', '.join(ENGINES)}")
    card = read_card(folder)
    best = BEST if card.quantized is None else BEST_QUANTIZED
    names = best if engine == "best" else (engine,)
    lacking = [lacks(name, card) for name in names]
    if all(lacking):
        raise UserError(lacking[0])
    name = names[lacking.index("")]
    return ENGINES[name](Path(folder), card, threads)


def float64_reference(folder: str | Path) -> Callable[[np.ndarray], np.ndarray]:
    """The model as trained in float64, with the framework that it was exported from: batch -> output, float64.

    Paddle's kernels keep constants in float32 also then: its outputs are good to 1e-9 of the largest, not to 1e-15.
    Raises UserError as `load` does.
    """
    card = read_card(folder)
    lacking = lacks(card.framework, card)
    if lacking:
        raise UserError(lacking)
    engine = ENGINES[card.framework](Path(folder), card, 1)
    assert isinstance(engine, PaddleEager | TorchEager)
    engine.widen()
    return engine.run
