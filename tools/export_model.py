"""Export trained weights for engines: a folder with ONNX, PaddlePaddle's inference format and card.json.

  python tools/export_model.py --framework paddle --weights mobilenet_v3_small.pdparams --output exported
  python tools/export_model.py --framework torch --weights mobilenet_v3_small-047dcff4.pth --output exported --softmax

Layers that engines are slow at are replaced, and batch norm is folded in float64 into the convolution before it. Each
such change is proved by the kit on the spot, on these weights, in float64 and float32, and each written file is run in
its engine and compared with the model as trained. Either the whole folder appears or none; nothing is installed.

It holds model.onnx (any number of images), weights.safetensors (the weights as trained, for the engines that are the
framework itself), from PaddlePaddle also inference.json and inference.pdiparams, and card.json: the preprocessing, the
class names, the SHA-256 of every file, and what was replaced with the figures of its proof.

Exit status: 0 exported, 1 a replacement or a written file is not proved equal, 2 something must be fixed first.
"""

import argparse
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mobilenetv3_common.arguments import MODEL_NAMES, PIXELS, check_val_sizes
from mobilenetv3_common.classes import num_classes_of
from mobilenetv3_common.wnids import IMAGENET_CLASSES
from mobilenetv3_deploy.card import Card, new_folder, sha256_of, write_card
from mobilenetv3_deploy.engines import ONNX, WEIGHTS, float64_reference, lacks, load
from mobilenetv3_deploy.preprocessing import Preprocessing
from sturdyio.cli import ArgumentParser, Failed, HelpFormatter, UserError, one_line, positive_int, run

PROG = "export_model"
PACKAGES = {"paddle": "mobilenetv3_paddle", "torch": "mobilenetv3_ref"}
# What writes ONNX and checks it; the framework itself is in an extra of its name.
NEEDED = {"paddle": ("paddle2onnx", "onnx", "onnxruntime"), "torch": ("onnxscript", "onnx", "onnxruntime")}
CHECKED = ("onnxruntime", "paddle-inference")  # the engines that a written file is run in
BATCH_SIZES = (1, 3)  # that they are run with: the number of images is any


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    required = {"required": True, "default": argparse.SUPPRESS}
    add = parser.add_argument
    add("--framework", choices=tuple(PACKAGES), default="paddle", help="whose weights, and whose exporter")
    add("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0], help="which of the two sizes")
    add(
        "--weights",
        metavar="FILE",
        help="this framework's weights (.pdparams, or .pth and .pt), .safetensors with its names, or a checkpoint",
        **required,
    )
    add("--output", metavar="DIR", type=Path, help="folder to write, which must not be there yet", **required)
    add("--softmax", action="store_true", help="give probabilities, not logits")
    add("--opset", type=positive_int, default=18, metavar="N", help="of ONNX's operators")
    add("--no-fold", action="store_true", help="leave batch norm as it is")
    add("--val-crop-size", type=PIXELS, default=224, metavar="N", help="pixels")
    add("--val-resize-size", type=PIXELS, default=256, metavar="N", help="pixels of the shorter side before the crop")
    return parser


def package_of(framework: str) -> tuple[ModuleType, ModuleType]:
    """Its package's modules `models` and `export`; raises UserError when something that exporting needs is missing."""
    try:
        modules = tuple(import_module(f"{PACKAGES[framework]}.{name}") for name in ("models", "export"))
        import mobilenetv3_proof.replacement  # noqa: F401  the kit
    except ImportError as error:
        raise UserError(f"--framework {framework} cannot be proved ({error}): pip install -e '.[align]'") from error
    for name in NEEDED[framework]:
        if find_spec(name) is None:
            raise UserError(f"--framework {framework} needs {name} to export: pip install -e '.[deploy]'")
    return modules


def replaced(framework: str, model: Any, export: ModuleType, batch: np.ndarray, fold: bool) -> tuple[Any, list[str]]:
    """(the model for engines, a line for each kind of change); raises Failed for one that is not proved."""
    from mobilenetv3_proof.replacement import proof_line, replaced

    changes, lines = dict(export.REPLACEMENTS), []
    if fold:
        changes[export.FOLDING] = export.fold_batch_norm
    for what, replace in changes.items():
        model, names, verdict = replaced(framework, model, replace, batch)
        lines.append(proof_line(what, names, verdict))
        print(lines[-1])
    return model, lines


def write_onnx(framework: str, program: Path, output: Path, opset: int) -> None:
    """Run the exporter to ONNX in a process of its own; raises UserError where that ends without a file."""
    command = [sys.executable, "-m", f"{PACKAGES[framework]}.export", str(program), str(output), str(opset)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode or not output.is_file():
        lines = [line.strip() for line in (ended.stdout + ended.stderr).splitlines()]
        said = [line for line in lines if "opset" in line.lower()] or [line for line in lines if "Error" in line]
        raise UserError(
            f"the exporter to ONNX ended with status {ended.returncode} ({' '.join(said[-2:]) or 'no message'}): "
            f"choose another --opset than {opset}"
        )
    import onnx

    (written,) = (one.version for one in onnx.load(output).opset_import if one.domain == "")
    if written != opset:
        raise UserError(f"the exporter to ONNX can only write opset {written} here: choose that with --opset")


def weight_tensors(framework: str, model: Any, path: Path) -> dict[str, str]:
    """{weight tensor of the graph in `path`: the layer of `model` that has it}, by equal values: exporters rename."""
    import onnx

    from portproof.backends import backend

    layers = {}
    for name, array in backend(framework).arrays_of(model).parameters().items():
        for one in (array, array.T) if array.ndim == 2 else (array,):
            layers[one.shape, one.tobytes()] = name.rpartition(".")[0]
    graph = onnx.load(path).graph
    tensors = {one.name: one for one in graph.initializer}
    tensors |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    arrays = {name: onnx.numpy_helper.to_array(one) for name, one in tensors.items()}
    named = {name: layers.get((one.shape, one.tobytes())) for name, one in arrays.items() if one.ndim >= 2}
    return {name: layer for name, layer in named.items() if layer}


def check_files(folder: Path, card: Card, batch: np.ndarray) -> None:
    """Run what was written in its engines; raises Failed for one that is not the model as trained."""
    from portproof.compare import compare
    from portproof.compare.ruler import kernel_atol

    reference, own = float64_reference(folder), load(folder, card.framework).run
    for name in CHECKED:
        if lacks(name, card):
            continue
        try:
            engine = load(folder, name)
            given = {str(n): engine.run(batch[:n]) for n in BATCH_SIZES}
        except Exception as error:  # an engine raises its own types
            raise UserError(f"engine {name} does not run the exported model: {one_line(error)}") from error
        exact, rounded = ({str(n): side(batch[:n]) for n in BATCH_SIZES} for side in (reference, own))
        atol = kernel_atol(exact, rounded)
        verdict = compare({n: array.astype(np.float32) for n, array in exact.items()}, given, atol)
        worst = max(verdict.rows, key=lambda row: row.share)
        figures = worst.reason or f"max|d| {worst.difference:.1e} of at most {worst.atol:.1e}, {card.output}"
        if verdict.status:
            raise Failed(f"{name}, {worst.item} image(s): {figures}: not the model as trained")
        print(f"{name}: {figures}, against the model as trained in float64")


def main(args: argparse.Namespace) -> None:
    check_val_sizes(args)
    models, export = package_of(args.framework)
    arrays = models.read_weights(args.weights)
    classes, crop = num_classes_of(arrays), args.val_crop_size
    model = models.MODELS[args.model](num_classes=classes)
    models.load_state_dict(model, arrays, f"weights {args.weights}")
    model.eval()
    batch = np.random.default_rng(0).standard_normal((max(BATCH_SIZES), 3, crop, crop), np.float32)

    with new_folder(args.output) as folder:
        models.save_weights(model, folder / WEIGHTS)
        prepared, lines = replaced(args.framework, model, export, batch, not args.no_fold)
        program = export.save_program(export.with_softmax(prepared) if args.softmax else prepared, folder, crop)
        write_onnx(args.framework, program, folder / ONNX, args.opset)
        if args.framework == "torch":
            program.unlink()
        card = Card(
            framework=args.framework,
            model=args.model,
            num_classes=classes,
            output="probabilities" if args.softmax else "logits",
            preprocessing=Preprocessing(resize=args.val_resize_size, crop=crop),
            class_names=IMAGENET_CLASSES if classes == len(IMAGENET_CLASSES) else None,
            weights_sha256=sha256_of(args.weights),
            made_with={name: version(name) for name in NEEDED[args.framework]}
            | {args.framework: import_module(args.framework).__version__},
            replaced=lines,
            layers=weight_tensors(args.framework, prepared, folder / ONNX),
        )
        card = write_card(folder, card)
        check_files(folder, card, batch)
    size = sum((args.output / name).stat().st_size for name in card.files) / 1e6
    print(f"wrote {args.output}: {', '.join(card.files)}, card.json, {size:.1f} MB, {classes} classes, {card.output}")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
