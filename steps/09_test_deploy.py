"""Step 09: the exported port, in the engines that will run it.

Proves: tools/export_model.py writes the port so that each engine that is installed gives the reference's logits, for
one image and for several, the same ones twice; and from raw files on, preprocessed as the export says, the network's
input to the last bit, and the same five classes. Does not prove: which module of a wrong graph is at fault (`portproof
judge --onnx`), nor how fast an engine is (tools/infer.py --benchmark).
Stands on: 01 (the model), 02 (the images). Needs `pip install -e '.[deploy]'`.

  python steps/09_test_deploy.py         ends in: PASS 09_test_deploy: all ... items within their limits
"""

import argparse
import runpy
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np

from mobilenetv3_common.images import read_image
from mobilenetv3_deploy.engines import ENGINES, lacks, load
from mobilenetv3_deploy.preprocessing import preprocess
from mobilenetv3_proof.step import ROOT, ModelRung, step_parser
from portproof.backends.probe import probe_images
from portproof.ladder import deploy, run_rung

NAME = "09_test_deploy"
BATCH_SIZES = (1, 3)
SIZE = 224  # pixels
SLOW = ("torch-compile",)  # a minute for each batch size


def export(step: ModelRung, folder: Path) -> Path:
    """The port's weights, as its own package saves them, exported as a user would."""
    models, exported = step.port.module("models"), folder / "exported"
    _, port = step.models()
    weights = folder / f"weights{models.weights.SUFFIXES[0]}"
    models.save_weights(port, weights)
    tool = runpy.run_path(str(ROOT / "tools" / "export_model.py"))
    flags = ["--framework", "paddle", "--model", step.args.model, "--weights", str(weights), "--output", str(exported)]
    with redirect_stdout(StringIO()):  # what it proves by itself
        tool["main"](tool["get_args_parser"]().parse_args(flags))
    return exported


def get_args_parser() -> argparse.ArgumentParser:
    return step_parser(NAME, __doc__, "val/")


def main(args: argparse.Namespace) -> ModelRung:
    step = ModelRung(NAME, args)
    ref, _ = step.models()
    images = probe_images(np.random.default_rng([args.seed, 2]), max(BATCH_SIZES), SIZE, SIZE)
    batches = {f"{n} image{'s' * (n > 1)}": [images[:n]] for n in BATCH_SIZES}
    files = sorted(str(path.relative_to(args.data_path)) for path in Path(args.data_path, "val").glob("*/*"))
    transform = step.ref.module("data").ClassificationPresetEval(crop_size=SIZE)
    with tempfile.TemporaryDirectory() as folder:
        exported = export(step, Path(folder))
        card = load(exported).card
        names = [name for name in ENGINES if name not in SLOW and not lacks(name, card)]
        step.say(f"engines: {', '.join(names)}")
        deploy(
            ref,
            {name: load(exported, name).run for name in names},
            batches,
            files,
            (
                lambda file: np.asarray(transform(read_image(Path(args.data_path, file)))),
                lambda file: preprocess(read_image(Path(args.data_path, file)), card.preprocessing),
            ),
            rung=step,
        )
    return step.finish("deploy")


if __name__ == "__main__":
    run_rung(NAME, main, get_args_parser())
