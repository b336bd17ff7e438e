"""The study of converted ports: a port goes as far as it can, each stop is its line, the pages say what is so."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from markdown_pages import assert_same_content, blocks

from maintenance.studies import converted_ports
from maintenance.studies.converted_ports import Library, Model, Outcome, Result, in_child, judged, page

SCRIPT = Path(converted_ports.__file__)
VERSIONS = {"torch": "1.0", "torchvision": "2.0", "timm": "3.0", "paddle": "4.0", "paconvert": "5.0"}
RESULTS = {
    "resnet18": Result(
        ["torch.fx.wrap('x')"],
        [(Outcome("build", ["TypeError: no, resnet.py: `y`"]), [("inplace=True", ""), ("a\n  b", "c")])],
        Outcome("differs", ["conv1 (Conv2d): forward: it is padded", "fc (Linear): weights"]),
    ),
    "cait": Result(end=Outcome("aligned")),
    "mlp_mixer": Result(end=Outcome("import", ["NameError: F"])),
}


@pytest.fixture
def written(tmp_path) -> dict[str, str]:
    """The paths of both languages' pages of RESULTS."""
    paths = {language: tmp_path / language / "converted_ports.md" for language in ("en", "zh")}
    for language, path in paths.items():
        path.parent.mkdir()
        path.write_text(page(RESULTS, language, VERSIONS), encoding="utf-8")
    return {language: str(path) for language, path in paths.items()}


def test_page_says_how_far_each_port_came(written):
    (table,) = (block for block in blocks(written["en"]) if block.kind == "table")
    assert table.cells[2:] == [
        ["`resnet18`", "cannot be built", "differs"],
        ["`cait`", "aligned", ""],
        ["`mlp_mixer`", "cannot be imported", ""],
    ]
    lines = [line for block in blocks(written["en"]) if block.kind == "text" for line in block.lines]
    assert "- not translated, marked: `torch.fx.wrap('x')`" in lines
    changes = "removed `inplace=True`, `a b` → `c`"
    assert f"- cannot be built: `TypeError: no, resnet.py: 'y'`; changed to go on: {changes}" in lines
    assert "- differs: `conv1 (Conv2d): forward: it is padded`" in lines
    assert "- differs: `fc (Linear): weights`" in lines
    assert "- aligned" in lines
    assert lines[-2:] == ["- removed `inplace=True`", "- `a b` → `c`"]


def test_both_languages_say_the_same(written):
    assert_same_content(written["en"], written["zh"])


REF = """
import torch
from torch import nn
from ..layers.block import Block
from ..texts import LABELS

torch.fx.wrap("len")

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.block = Block(width)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        return self.block(torch.relu(self.first(x)))
"""
BLOCK = """
from torch import nn

class Block(nn.LayerNorm):
    pass
"""
PORT = """
import paddle
from ..layers.block import Block
from ..texts import LABELS

>>>>>>torch.fx.wrap("len")

class Net(paddle.nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.first = paddle.nn.Linear(6, width)
        self.block = Block(width)
        self.pool = paddle.nn.MaxPool2d(2)

    def forward(self, x):
        return self.block(paddle.nn.functional.relu(self.first(x)))
"""
PORT_BLOCK = """
import paddle

class Block(paddle.nn.LayerNorm):
    pass
"""
POOL = (
    Outcome(
        "build",
        ["AttributeError: module 'paddle.nn' has no attribute 'MaxPool2d', net.py: self.pool = paddle.nn.MaxPool2d(2)"],
    ),
    [("paddle.nn.MaxPool2d", "paddle.nn.MaxPool2D")],
)
# Of the port's text: what becomes what; then how it ends, and how its line begins.
CASES = {
    "aligned": ("", "", "aligned", ""),
    "import": (
        "import paddle",
        "import paddle, nowhere",
        "import",
        "ModuleNotFoundError: No module named 'nowhere', net.py",
    ),
    "syntax": ("def forward(", "def forward((", "import", "SyntaxError: "),
    "build": ("Linear(6, width)", "Linear(6, width, bias=True)", "build", "TypeError: "),
    "run": (
        "return self.block",
        "return self.norm",
        "run",
        "AttributeError: 'Net' object has no attribute 'norm', net.py: ",
    ),
    "differs": ("Block(width)", "Block(width, 1e-3)", "differs", "block (Block"),
}


@pytest.mark.parametrize("case", CASES)
def test_port_goes_as_far_as_it_can(case, tmp_path, monkeypatch):
    wrong, right, stage, line = CASES[case]
    library = f"toy_{case}"  # a module is imported once
    source = tmp_path / "library" / library
    for name, text in {"models/net": REF, "layers/block": BLOCK, "texts": "LABELS = ['cat']"}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / f"{name}.py").write_text(text)
    monkeypatch.setitem(converted_ports.LIBRARIES, library, Library(("layers/*.py",)))
    monkeypatch.setitem(converted_ports.MODELS, "net", Model(f"{library}.models.net", "Net", {"width": 8}, "4,6"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def translate(given: Path, target: Path) -> None:
        assert sorted(path.name for path in given.rglob("*.py")) == ["block.py", "net.py"]
        for name, text in {"models/net": PORT.replace(wrong, right), "layers/block": PORT_BLOCK}.items():
            path = target / f"ported_{library}" / f"{name}.py"
            path.parent.mkdir(parents=True)
            path.write_text(text)

    port, marked = converted_ports.translated(library, source, ["models/net.py"], translate, tmp_path / "work")
    assert marked == {"models/net.py": ['torch.fx.wrap("len")'], "layers/block.py": []}

    monkeypatch.syspath_prepend(source.parent)
    monkeypatch.syspath_prepend(port)

    def attempt() -> Outcome:
        for name in [name for name in sys.modules if name.startswith(f"ported_{library}")]:
            del sys.modules[name]
        return converted_ports.child("net", port)

    result = judged(attempt, port, marked["models/net.py"])
    assert result.marked == ['torch.fx.wrap("len")']
    assert result.stops == ([] if stage == "import" or case == "build" else [POOL])
    assert result.end.stage == stage
    assert [text[: len(line)] for text in result.end.lines] == ([line] if line else [])
    assert str(tmp_path) not in "".join(result.end.lines)


def test_imports_come_from_the_port_or_the_library(tmp_path):
    for name in ("layers/block", "models/net", "models/_api"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").touch()
    text = "from ..layers import x\nfrom ._api import (\n    y)\nfrom ..utils import z\n"
    text += "from timm.data import d\nfrom os.path import join\n"
    own = partial(converted_ports.own_imports, text, "timm", tmp_path)
    assert own(tmp_path / "models" / "net.py").splitlines() == [
        "from ported_timm.layers import x",
        "from ported_timm.models._api import (",
        "    y)",
        "from timm.utils import z",
        "from timm.data import d",
        "from os.path import join",
    ]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("""print('a'); print('{"stage": "aligned", "lines": []}')""", Outcome("aligned")),
        ("import time; time.sleep(60)", Outcome("time", ["more than 2 s"])),
        ("import sys; sys.exit('no')", Outcome("refused", ["the process ended with 1: no"])),
        ("import os; os.abort()", Outcome("refused", ["the process ended with -6: no message"])),
    ],
)
def test_whatever_becomes_of_the_process_is_an_outcome(program, expected):
    assert in_child([sys.executable, "-c", program], 2) == expected


def test_child_imports_the_port_before_the_library(tmp_path):
    for name in ("port", "library"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage_of.py").write_text(f"NAME = {name!r}")
    program = """import json, stage_of; print(json.dumps({"stage": stage_of.NAME}))"""
    folders = [tmp_path / "port", tmp_path / "library"]
    assert in_child([sys.executable, "-c", program], 20, folders) == Outcome("port")


@pytest.mark.thorough("one mistake", but="timeout")
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--only", "resnet"], "invalid choice: 'resnet'"),
        (["--timeout", "0"], "argument --timeout"),
        (["--environment", str(SCRIPT)], "cannot be made"),
        ([], "paconvert==3.3.1 cannot be installed"),  # since pip may not look anywhere
    ],
)
def test_mistakes_are_one_line(flags, reason, tmp_path):
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), *flags]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert reason in ran.stderr
