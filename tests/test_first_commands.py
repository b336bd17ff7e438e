"""The commands that stand first, in README and on the site's front page: they work as they are typed."""

import os
import subprocess
import sysconfig
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from markdown_pages import blocks
from test_tutorial import copied_files

PAGES = ("README.md", "README_cn.md", "docs/index.md", "docs/index_cn.md")
OWN = ("portproof", "sturdyio", "mobilenetv3-reprod", "pip")


def commands(page: str) -> list[str]:
    """The first block of commands on a page."""
    return next(block.lines for block in blocks(page) if block.detail == "shell")


def test_every_first_page_has_the_same_commands():
    first, *others = map(commands, PAGES)
    assert first[0].startswith("git clone REPOSITORY ") and first[-1].endswith(" --mode eval")
    assert others == [first] * len(others)


def write_wheel(distribution: Distribution, folder: Path) -> None:
    """A wheel of an installed distribution, which asks for what that asks for and leads to its files by links."""
    name = distribution.name.replace("-", "_").replace(".", "_")
    info = f"{name}-{distribution.version}.dist-info"
    links = folder / "links" / name
    links.mkdir(parents=True)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        (links / top).symlink_to(Path(distribution.locate_file(top)))
    content = {
        f"{name}.pth": f"{links}\n",
        f"{info}/METADATA": distribution.read_text("METADATA"),
        f"{info}/entry_points.txt": distribution.read_text("entry_points.txt") or "",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{distribution.version}-py3-none-any.whl", "w") as wheel:
        for file, text in content.items():
            wheel.writestr(file, text)


@pytest.fixture
def wheels(tmp_path) -> Path:
    """What pip finds: every installed distribution but those of the project."""
    for distribution in distributions(path=[sysconfig.get_path("purelib")]):
        if distribution.name not in OWN:
            write_wheel(distribution, tmp_path / "wheels")
    return tmp_path / "wheels"


@pytest.mark.thorough("test_every_first_page_has_the_same_commands; test_the_command_is_installed has the kit's wheel")
def test_they_work_as_typed(tmp_path, wheels):
    """In an empty environment, where pip finds no index but wheels, and none of this project's."""
    repository = copied_files(tmp_path / "repository")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    script = "\n".join(commands(PAGES[0])).replace("REPOSITORY", str(repository))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    done = subprocess.run(
        ["sh", "-ec", script], cwd=tmp_path, env=kept | pip, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS align: ")
