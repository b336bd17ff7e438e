"""What the rungs' scripts share: their flags, their weights, and how they print, write and end."""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mobilenetv3_common.arguments import MODEL_NAMES
from mobilenetv3_common.classes import num_classes_of
from portproof.backends.probe import probe_weights
from portproof.convert.rules import paddle_to_torch
from portproof.ladder.rung import Rung, rung_parser
from sturdyio.cli import output_dir
from sturdyio.files import atomic_path

from .package import PORT, REF, Package

ROOT = Path(__file__).resolve().parents[1]
LITE_DATA = ROOT / "lite_data"


def step_parser(prog: str, description: str, folders: str = "") -> argparse.ArgumentParser:
    """The flags that all rungs have; --data-path, too, for a rung that reads these `folders` there."""
    parser = rung_parser(prog, description, ROOT / "result")
    parser.add_argument("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="weights for both sides (.pth, .safetensors, .pdparams) instead of probe weights",
    )
    if folders:
        parser.add_argument("--data-path", default=str(LITE_DATA), help=f"folder with {folders}, one folder a class")
    return parser


@cache  # the rungs of one process have the same
def own_probe_weights(package: Package, model: str, seed: int) -> dict[str, np.ndarray]:
    """Of the package's `model`, by its own names; nobody writes into them."""
    return probe_weights(package.module("models").MODELS[model](), seed)


@cache
def layer_types(package: Package, model: str) -> dict[str, str]:
    """{dotted name: class name} of every module of the package's `model`."""
    return package.backend.layers.types(package.module("models").MODELS[model]())


class ModelRung(Rung):
    """A rung of this project's own ladder: the two packages, and the weights that both get."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        """Raises UserError for a device that is not there, weights that do not fit, or an unwritable folder."""
        super().__init__(name)
        self.args, self.out = args, output_dir(args.output_dir)
        self.ref, self.port = Package(REF, args.device), Package(PORT, args.device)
        versions = [f"{p.backend.name} {p.backend.framework.__version__} ({p.role})" for p in (self.ref, self.port)]
        weights = args.weights or "probe weights"
        self.say(f"{name}: {args.model}, {' and '.join(versions)}, {args.device}, seed {args.seed}, {weights}")
        self.arrays = self._weights()
        self.num_classes = num_classes_of(self.arrays)
        self.types = layer_types(self.ref, args.model)

    def _weights(self) -> dict[str, np.ndarray]:
        models = self.ref.module("models")
        if self.args.weights is None:
            return own_probe_weights(self.ref, self.args.model, self.args.seed)
        build, path = models.MODELS[self.args.model], Path(self.args.weights)
        if path.suffix == ".pdparams":
            types = layer_types(self.ref, self.args.model)
            arrays = paddle_to_torch(self.port.module("models").read_weights(path), types)
        else:
            arrays = models.read_weights(path)
        models.load_state_dict(build(num_classes=num_classes_of(arrays)), arrays, f"weights {path}")
        return arrays

    def _kwargs(self, dropout: float | None) -> dict[str, float]:
        """What differs from the models' defaults, and only that: so the defaults are compared too."""
        kwargs = {} if dropout is None else {"dropout": dropout}
        return kwargs if self.num_classes == 1000 else {**kwargs, "num_classes": self.num_classes}

    def model(self, package: Package, dropout: float | None = 0.0) -> Any:
        """A package's model with its own initial weights and the right number of classes; None: default dropout."""
        return package.module("models").MODELS[self.args.model](**self._kwargs(dropout))

    def models(self) -> tuple[Any, Any]:
        """Both models with the rung's weights, as each package's own code loads them.

        A port that they do not fit keeps its initial ones: the comparison of the structure says why.
        """
        ref, port = (self.model(package, dropout=None) for package in (self.ref, self.port))
        self.ref.load(ref, self.arrays)
        if self.ref.backend.arrays_of(ref).shapes() == self.port.backend.arrays_of(port).shapes():
            self.port.load(port, self.arrays)
        return ref, port

    def both(self, function: Callable, *args: Any, **kwargs: Any) -> list[Callable]:
        """`function` of the reference and of the port: it gets the package first, then these arguments."""
        return [partial(function, package, *args, **kwargs) for package in (self.ref, self.port)]

    def build(self, package: Package, dtype: str) -> Any:
        """A package's model with the rung's weights, in "float32" or "float64", without dropout."""
        return package.build(partial(self.model, package), self.arrays, dtype)

    def from_file(self, package: Package) -> Any:
        """`build` in "float32", by way of a file: as the package's training command builds a model with --weights."""
        build, kwargs = package.module("models").MODELS[self.args.model], self._kwargs(0.0)
        arrays = package.backend.arrays_of(build(**kwargs)).to_own(self.arrays)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"weights{package.module('models').weights.SUFFIXES[0]}"
            package.backend.write_weights(arrays, path)
            model = build(weights=path, **kwargs)
        return package.backend.training.to_device(model, package.device, "float32")

    def finish(self, stem: str, log_stem: str = "") -> "ModelRung":
        """Write the guide's files with reprod_log, see `Rung.write`; the rung itself."""
        self.write(self.out, stem, log_stem, save_with_reprod_log)
        return self


def save_with_reprod_log(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write `arrays` to `path`; raises UserError when it cannot be written."""
    from reprod_log import ReprodLogger  # imports both frameworks, which read --threads when they are

    logger = ReprodLogger()
    for name, array in arrays.items():
        logger.add(name, array)
    with atomic_path(path) as temporary:
        logger.save(str(temporary))
