"""Every command, started in a child process of its own: what it says on stderr, and its exit status."""

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import paddle  # noqa: F401 - here and below: a child that drops its rights may not be able to import any more
import torch  # noqa: F401
import yaml  # noqa: F401

import mobilenetv3_ref.train.main
import portproof.backends.probe
import portproof.commands.align
import portproof.commands.compare
import portproof.commands.judge
import portproof.commands.new
import portproof.ladder  # noqa: F401
from mobilenetv3_common.arguments import get_args_parser, parse_args
from sturdyio.cli import run

ROOT = Path(__file__).parents[1]
NOBODY = 65534
PAIR = ("--ref", "torch.nn:ReLU", "--port", "paddle.nn:ReLU", "--input", "2,3")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(name: str) -> ModuleType:
    return importlib.import_module(f"portproof.commands.{name.split()[1]}")


def started(name: str, flags: tuple[str, ...]) -> Callable[[], None]:
    """What runs a command as its own process would; it raises SystemExit."""
    if name == "train":
        module = mobilenetv3_ref.train.main
        return lambda: run(lambda: module.main(parse_args("train", "PyTorch", flags)), "train")
    module = command(name) if name.startswith("portproof ") else tool(name)
    return lambda: run(lambda: module.main(module.get_args_parser().parse_args(flags)), name.strip(), "portproof")


def commands(path: str) -> dict[str, tuple[str, ...]]:
    """Flags of each command that reads or writes, in all of which `path` is the first that it uses."""
    return {
        "predict": ("--weights", f"{path}/a.pdparams", "--input", f"{path}/cat.jpg"),
        "train": ("--data-path", path, "--output-dir", path),
        "convert_weights": (f"{path}/a.pth", "out.pdparams", "--from", "torch", "--to", "paddle"),
        "average_checkpoints": ("--framework", "torch", "average.pth", f"{path}/a.pth", f"{path}/b.pth"),
        "plot_curves": ("curves.png", path),
        "make_probe_weights": (f"{path}/probe.pth",),
        "portproof align": (*PAIR, "--map", f"{path}/map.yaml"),
        "portproof align ": (*PAIR, "--weights", f"{path}/a.pth"),
        "portproof judge": (f"{path}/a.safetensors", "--port", "paddle.nn:ReLU"),
        "portproof compare": (f"{path}/a.npy", f"{path}/b.npy", "--rtol", "0.1"),
        "portproof new": (path, *PAIR),
    }


NAMES = list(commands(""))


def lines_in(folder: Path, start: Callable[[], None], as_nobody: bool) -> tuple[int, list[str]]:
    """(exit status, lines on stderr) of a child that starts it in `folder`, as a user who owns nothing if told to."""
    said = folder / "stderr.txt"
    with said.open("w") as file:
        child = os.fork()
        if child == 0:
            status = 99
            try:
                os.chdir(folder)
                if as_nobody and os.getuid() == 0:
                    os.setgroups([])
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                sys.stderr = file
                start()
            except SystemExit as ended:
                status = ended.code
            finally:
                file.flush()
                os._exit(status if isinstance(status, int) else 98)
        _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), said.read_text().splitlines()


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command's flags."""
    if name == "train":
        return get_args_parser("train", "PyTorch")
    if name.startswith("portproof "):
        return command(name).get_args_parser()
    return tool(name).get_args_parser()
