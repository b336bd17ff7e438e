"""Fixtures of several test files: the model options, probe arrays made once, a folder of awkward images.

Seeds and the browser are those of the kit's tests: portproof/tests/pytest_setup.py, a plugin of pytest.
"""

import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mobilenetv3_ref.models
from portproof.backends.probe import probe_images, probe_weights

# Two processes take the files from the top. A fault in the port shows in the first of these soonest; then come those
# that take longest, so that neither process ends minutes after the other.
FIRST = [
    *("test_faults.py", "test_port.py", "test_optimizer.py", "test_distributed.py"),
    *("test_tutorial.py", "test_new.py", "test_nothing_lost.py", "test_init_step.py", "test_train.py"),
    *("test_train_shell.py", "test_faq.py", "test_train_step.py", "test_two_nodes.py", "test_site.py"),
    *("test_record.py", "test_corpus.py", "test_judge_onnx.py", "test_report.py", "test_ladder_processes.py"),
    *("test_ladder_resume.py", "test_ladder_runs.py", "test_draws.py", "test_convert_weights.py"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of FIRST, and then the others as they were."""
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


OPTIONS = {
    "default": {},
    "width_mult": {"width_mult": 0.75},
    "reduced_tail": {"reduced_tail": True},
    "dilated": {"dilated": True},
    "num_classes": {"num_classes": 7, "dropout": 0.5},
}


@pytest.fixture(params=sorted(mobilenetv3_ref.models.MODELS))
def arch(request) -> str:
    """Each of the two models."""
    return request.param


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS.keys())
def options(request) -> dict:
    """Keyword arguments of the model, all of them in turn."""
    return request.param


@pytest.fixture(params=[False, True], ids=["eval", "train"])
def train(request) -> bool:
    """Eval mode and train mode."""
    return request.param


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    """(3, 3, 96, 64), float32: an odd batch, not square, its sides no equal powers of two."""
    return probe_images(np.random.default_rng(1), 3, 96, 64)


@pytest.fixture(scope="session")
def probe() -> Callable[..., dict[str, np.ndarray]]:
    """`probe(arch, **options)`: probe weights of that model as a PyTorch state_dict of arrays; do not write to them."""

    @cache
    def weights(arch: str, items: tuple) -> dict[str, np.ndarray]:
        return probe_weights(mobilenetv3_ref.models.MODELS[arch](**dict(items)), seed=0)

    return lambda arch, **options: weights(arch, tuple(sorted(options.items())))


def _write_images(folder: Path, rng: np.random.Generator) -> None:
    """Images with what a reader or a transform can stumble over, in classes whose order is not that of numbers."""

    def noise(width: int, height: int) -> Image.Image:
        coarse = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)  # JPEG keeps some of it
        return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)

    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    content = {
        "n2/17x11.png": (noise(17, 11), {}),
        "n2/11x17.JPEG": (noise(11, 17), {}),
        "n2/pixel.png": (noise(1, 1), {}),
        "n2/deeper/300x200.jpg": (noise(300, 200), {}),
        "n10/wide.jpg": (noise(100, 20), {}),
        "n10/tall.webp": (noise(20, 100), {"lossless": True}),
        "n10/turned.jpeg": (noise(33, 50), {"exif": exif}),
        "n10/transparent.png": (noise(30, 41).convert("RGBA"), {}),
        "N1/gray.JPG": (noise(40, 31).convert("L"), {}),
        "N1/gray_alpha.png": (noise(40, 31).convert("LA"), {}),
        "N1/cmyk.jpg": (noise(61, 45).convert("CMYK"), {}),
        "N1/palette.png": (noise(29, 37).quantize(16), {"transparency": 3}),
        "N1/16bit.png": (Image.fromarray(rng.integers(0, 2**16, (37, 29), np.uint16)), {}),
    }
    for name, (image, how) in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, **how)
    (folder / "n2" / "notes.txt").write_text("no image")


@pytest.fixture(scope="session")
def data_path(tmp_path_factory) -> Path:
    """A folder with train/ and val/, each 13 small images in 3 classes, every one awkward in its own way."""
    root = tmp_path_factory.mktemp("images")
    for seed, split in enumerate(("train", "val")):
        _write_images(root / split, np.random.default_rng(seed))
    return root


@pytest.fixture(scope="session")
def comma_locale(tmp_path_factory) -> dict[str, str]:
    """Environment variables of a user who writes 0.1 as 0,1; {} where glibc's sources of such a locale are missing."""
    folder = tmp_path_factory.mktemp("locale")
    variables = {"LOCPATH": str(folder), "LC_ALL": "de_DE.UTF-8"}
    commands = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(folder / "de_DE.UTF-8")], ["locale", "decimal_point"]
    try:
        for command in commands:
            done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return variables if done.stdout == ",\n" else {}
