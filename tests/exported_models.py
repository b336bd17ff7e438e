"""Exported folders for tests, and what tests need that is not in requirements.txt."""

import importlib.util
import os
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
CROP = 64  # pixels
CLASSES = 10
SIZES = ["--val-crop-size", str(CROP), "--val-resize-size", "72"]


def need(extra: str, *packages: str) -> None:
    """Skip the test, or the module, if a package of this extra is missing; fail if DEPLOY_REQUIRED=1, or so, is set."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        reason = f"needs {', '.join(missing)}: pip install -e '.[{extra}]'"
        if os.environ.get(f"{extra.upper()}_REQUIRED") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(tool: ModuleType, *flags: str | Path) -> int | None:
    return tool.main(tool.get_args_parser().parse_args([str(flag) for flag in flags]))


def probe_weights(path: Path) -> Path:
    call(load_tool("make_probe_weights"), "--num-classes", CLASSES, path)
    return path


def export(framework: str, folder: Path, *flags: str) -> Path:
    """`folder`/exported, of probe weights of the small model for CLASSES classes and images of CROP pixels."""
    weights = probe_weights(folder / {"paddle": "probe.pdparams", "torch": "probe.pth"}[framework])
    where = ("--framework", framework, "--weights", weights, "--output", folder / "exported")
    call(load_tool("export_model"), *where, *SIZES, *flags)
    return folder / "exported"
