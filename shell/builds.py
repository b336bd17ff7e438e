"""Which builds of the frameworks an environment gets: the arguments of the pip commands that come first, a line each.

    python shell/builds.py requirements.txt OUT CUDA

CUDA is cu126 or the like, cpu, or empty: then the builds stay what they are, whatever the versions. Writes the
requirements of those builds to OUT, to be installed after the commands. A CUDA build of PaddlePaddle is a distribution
of its own, paddlepaddle-gpu, whose files are those of paddlepaddle; one of PyTorch has a local version, such as
2.14.1+cu126.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TORCH_INDEX = "https://download.pytorch.org/whl/{}"
PADDLE_INDEX = "https://www.paddlepaddle.org.cn/packages/stable/{}/"
PADDLE = ("paddlepaddle", "paddlepaddle-gpu")


def installed(name: str) -> str:
    """The version of a distribution, or "" where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def torch_lines(lines: list[str], build: str) -> list[str]:
    """The requirements with PyTorch's own in this build, which its index has."""
    labelled = [re.sub(r"^(torch|torchvision)==([^\s;]+)", rf"\g<0>+{build}", line) for line in lines]
    return lines if labelled == lines else [f"--extra-index-url {TORCH_INDEX.format(build)}", *labelled]


def paddle_commands(pinned: str, wanted: str, build: str, fresh: bool) -> list[str]:
    """How to come from what is installed to the distribution `wanted`, anew if `fresh`.

    Two of one name must never lie over each other: uninstalling either would leave half of the other. The CUDA build is
    installed apart, and before PyTorch: both pin the CUDA libraries, so one resolution fails, and PyTorch refuses
    older ones than its own.
    """
    present = [name for name in PADDLE if installed(name)]
    stale = present != [wanted] or fresh
    commands = [f"uninstall -y {' '.join(present)}"] if present and stale else []
    if wanted == PADDLE[1] and (stale or installed(wanted) != pinned):
        index = f" --extra-index-url {PADDLE_INDEX.format(build)}" if build.startswith("cu") else ""
        commands.append(f"install {wanted}=={pinned}{index}")
    return commands


def main(source: str, target: str, cuda: str) -> None:
    lines = Path(source).read_text().splitlines()
    found = re.fullmatch(r"cpu|cu\d+|rocm[\d.]+|xpu", installed("torch").partition("+")[2])
    there = found[0] if found else ""
    build = cuda or there
    on_gpu = cuda != "cpu" if cuda else bool(installed(PADDLE[1]))
    pins = [match[1] for line in lines if (match := re.match(rf"{PADDLE[0]}==([^\s;]+)", line))]
    for pinned in pins:
        fresh = on_gpu and bool(cuda) and cuda != there
        for command in paddle_commands(pinned, PADDLE[on_gpu], build, fresh):
            print(command)
    if on_gpu:
        lines = [line for line in lines if not line.startswith(f"{PADDLE[0]}==")]
    Path(target).write_text("\n".join([*(torch_lines(lines, build) if build else lines), ""]))


if __name__ == "__main__":
    main(*sys.argv[1:])
