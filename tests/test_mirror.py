"""The two packages are mirror images: what differs between two files of one name is spelling, or says why.

Spelling is the table below. Whatever else differs in the files of MIRRORED carries a `# Paddle:` comment on the port's
side, or lies in a class or function whose docstring has a line that begins `Paddle:`. In all other files, where
launchers and checkpoints really differ, classes, functions, parameters, flags and log lines are the same.
"""

import ast
import difflib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REF, PORT = ROOT / "mobilenetv3_ref", ROOT / "mobilenetv3_paddle"
MIRRORED = ("models/*.py", "data/*.py", "predict.py", "train/[!_]*.py")
LOOSE = ("train/checkpoint.py", "train/distributed.py", "train/main.py")  # of these: signatures and log lines

# What the reference writes -> what the port writes for the same thing.
SPELLING = [
    (r"\bmobilenetv3_ref\b", "mobilenetv3_paddle"),
    (r"\btorch\.device\b", "str"),  # Paddle names devices
    (r"\btorch\.autograd\.Function\b", "paddle.autograd.PyLayer"),
    (r"\btorch\.(?!nn\.utils\.clip_grad_norm_)", "paddle."),  # whose formula both document
    (r"\bnn\.Module\b", "nn.Layer"),
    (r"\bnn\.ModuleDict\b", "nn.LayerDict"),
    (r"\b(Conv|BatchNorm|AdaptiveAvgPool)2d\b", r"\g<1>2D"),
    (r"\beps=", "epsilon="),
    (r"\bbias=", "bias_attr="),
    (r"\.modules\(\)", ".sublayers()"),
    (r"\.named_modules\(\)", ".named_sublayers(include_self=True)"),
    (r"\bregister_forward_hook\b", "register_forward_post_hook"),
    (r"\.detach\(\)\.cpu\(\)\.numpy\(\)", ".numpy()"),
    (r"\btake_along_dim\b", "take_along_axis"),
    (r", device=logits\.device\b", ""),  # Paddle's device is a global setting
    # An image is an array until it is in a batch.
    (r"(Generator\], |Generator(?: \| None = None)?\) -> |tuple\[)Tensor(?=\]|:|, int)", r"\g<1>np.ndarray"),
    (r"\bzero_grad\(\)", "clear_grad()"),
    (r'\bparam_groups\[0\]\["lr"\]', "get_lr()"),
    (r"\bnn\.CrossEntropyLoss\(label_smoothing=label_smoothing\)", "CrossEntropyLoss(label_smoothing)"),
    (r'\(".pth", ".pt"\)', '(".pdparams",)'),
    (r"PyTorch's own", "PaddlePaddle's own"),
]
# Where a name that both sides import comes from; the first prefix that fits decides.
ORIGINS = {
    "mobilenetv3_ref": "mobilenetv3_paddle",
    "torch.optim.lr_scheduler": "paddle.optimizer.lr",
    "torch.optim": "paddle.optimizer",
    "torch.utils.data": "paddle.io",
    "torchvision": "paddle.vision",
    "torch": "paddle",
}
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)


def files(root: Path, *patterns: str) -> set[str]:
    """The files below `root` that fit a pattern, by their path in it."""
    return {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)}


ALL = sorted(files(REF, "**/*.py") & files(PORT, "**/*.py"))
STRICT = sorted(files(REF, *MIRRORED) & files(PORT, *MIRRORED) - set(LOOSE))


def spelled(source: str) -> str:
    """The reference's source as the port would spell it."""
    for pattern, replacement in SPELLING:
        source = re.sub(pattern, replacement, source)
    return source


def body(source: str) -> list[tuple[int, str]]:
    """(line number, line) without the imports that open the file: their order changes with the modules' names.

    What is imported shows where it is used; `imported` sees to the rest.
    """
    imports = [node for node in ast.parse(source).body if isinstance(node, IMPORTS)]
    skipped = {number for node in imports for number in range(node.lineno, node.end_lineno + 1)}
    if imports:  # and the blank lines between them
        skipped.update(
            number
            for number, line in enumerate(source.splitlines(), 1)
            if not line and imports[0].lineno < number < imports[-1].end_lineno
        )
    return [(number, line) for number, line in enumerate(source.splitlines(), 1) if number not in skipped]


def explained_definitions(source: str) -> list[ast.AST]:
    """The classes and functions whose docstring has a line that begins `Paddle:`."""
    definitions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DEFINITIONS)]
    return [node for node in definitions if re.search(r"^Paddle:", ast.get_docstring(node) or "", re.MULTILINE)]


def unexplained(ref: str, port: str) -> list[str]:
    """The hunks of a diff of the two sources, after spelling, for which the port gives no reason."""
    ref_lines, port_lines = body(spelled(ref)), body(port)
    explained = {n for node in explained_definitions(port) for n in range(node.lineno, node.end_lineno + 1)}
    matcher = difflib.SequenceMatcher(None, [t for _, t in ref_lines], [t for _, t in port_lines], autojunk=False)
    hunks = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        removed, added = ref_lines[i1:i2], port_lines[j1:j2]
        # A pure deletion is explained where its neighbours are.
        place = added or port_lines[max(j1 - 1, 0) : j1 + 1]
        bare = [text for number, text in place if number not in explained and (text or not added)]
        if bare and not any("# Paddle:" in text or text.strip().startswith("Paddle:") for text in bare if added):
            hunks.append("\n".join([*(f"- {text}" for _, text in removed), *(f"+ {text}" for _, text in added)]))
    return hunks


def imported(source: str) -> dict[str, str]:
    """{name bound by an import: where it comes from}, anywhere in the file."""
    names = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update({alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names})
    return names


def spelled_origin(origin: str) -> str:
    for ref, port in ORIGINS.items():
        if origin == ref or origin.startswith(ref + "."):
            return port + origin[len(ref) :]
    return origin


def differently_imported(ref: str, port: str) -> list[str]:
    """The names that both sides import, but not from the same place."""
    ref_names, port_names = imported(ref), imported(port)
    common = [name for name in ref_names if name in port_names]
    return [name for name in common if spelled_origin(ref_names[name]) != port_names[name]]


def parameters(node: ast.FunctionDef) -> str:
    """Names and defaults, without annotations."""
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def signatures(source: str) -> Iterator[tuple[str, str]]:
    """(qualified name, parameters) of every class, method and function in order, nested ones included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, DEFINITIONS):
                name = prefix + child.name
                yield name, "" if isinstance(child, ast.ClassDef) else parameters(child)
                yield from walk(child, name + ".")
            else:
                yield from walk(child, prefix)

    return walk(ast.parse(source), "")


def differing_signatures(ref: str, port: str) -> list[str]:
    """Classes, functions, and their parameters, that are not the same, or not in the same order.

    A run of functions that only the port has is in order if the first has a docstring that says why.
    """
    ref_list, port_list = list(signatures(spelled(ref))), list(signatures(port))
    explained = {node.name for node in explained_definitions(port)}
    matcher = difflib.SequenceMatcher(None, ref_list, port_list, autojunk=False)
    return [
        f"{ref_list[i1:i2]} -> {port_list[j1:j2]}"
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal" and not (tag == "insert" and port_list[j1][0] in explained)
    ]


def log_lines(source: str) -> list[str]:
    """What is logged or printed, as code."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sorted(ast.unparse(call) for call in calls if ast.unparse(call.func) in ("log", "print"))


def sources(name: str) -> tuple[str, str]:
    return (REF / name).read_text(encoding="utf-8"), (PORT / name).read_text(encoding="utf-8")


def test_both_have_the_same_files():
    assert files(REF, "**/*.py") == files(PORT, "**/*.py")
    assert set(LOOSE) <= set(ALL)
    assert {"models/mobilenet_v3.py", "data/presets.py", "train/metric.py"} <= set(STRICT)


@pytest.mark.parametrize("name", STRICT)
def test_every_difference_has_a_reason(name):
    assert unexplained(*sources(name)) == []


@pytest.mark.parametrize("name", ALL)
def test_names_come_from_the_same_place(name):
    assert differently_imported(*sources(name)) == []


@pytest.mark.parametrize("name", sorted(set(ALL) - set(STRICT)))
def test_signatures_and_log_lines_are_the_same(name):
    ref, port = sources(name)
    assert differing_signatures(ref, port) == []
    assert log_lines(spelled(ref)) == log_lines(port)


def test_flags_are_the_same(capsys, monkeypatch):
    """Names, types as far as they show, choices, defaults and help."""
    texts = []
    for package in (REF, PORT):
        command = importlib.import_module(f"{package.name}.train.main").command
        monkeypatch.setattr(sys, "argv", ["train", "--help"])
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 0
        texts.append(capsys.readouterr().out.split("\n\n", 1)[1].replace("PyTorch", "PaddlePaddle"))
    assert texts[0] == texts[1]
    assert "--data-path" in texts[0]


def test_every_spelling_is_used():
    """And none hides a difference that is no longer there."""
    text = "".join(sources(name)[0] for name in ALL)
    assert [pattern for pattern, _ in SPELLING if not re.search(pattern, text)] == []


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("models/mobilenet_v3.py", "  # Paddle: share of the OLD value", ""),
        ("models/mobilenet_v3.py", "1 if cnf.dilation > 1 else cnf.stride", "cnf.stride"),
        ("models/mobilenet_v3.py", "        self.reset_parameters()\n", ""),
        (
            "models/mobilenet_v3.py",
            "        return scale * x\n",
            "        scale = scale + 0\n        return scale * x\n",
        ),
        ("models/mobilenet_v3.py", '"""Draw the initial', '"""Draw initial'),
        ("models/layers.py", "    Paddle: the native layer's", "    The native layer's"),
        ("data/presets.py", "        if rng.random() < self.hflip_prob:\n            image = F.hflip(image)\n", ""),
        ("data/presets.py", "0.485, 0.456, 0.406", "0.406, 0.456, 0.485"),
        ("train/criterion.py", "\n\ndef build_criterion", "\n\ndef unused(): ...\n\n\ndef build_criterion"),
        ("train/metric.py", "behind = ", "ahead = "),
    ],
)
def test_an_unexplained_difference_is_reported(name, old, new):
    ref, port = sources(name)
    assert port.count(old) >= 1
    assert len(unexplained(ref, port.replace(old, new, 1))) == 1


def test_an_explained_difference_is_not_reported():
    ref = "x = 1\n\n\nclass A(nn.Module):\n    y = 2\n"
    assert unexplained(ref, "x = 2  # Paddle: counts from 2\n\n\nclass A(nn.Layer):\n    y = 2\n") == []
    assert (
        unexplained(ref, 'x = 1\n\n\nclass A(nn.Layer):\n    """A.\n\n    Paddle: three.\n    """\n\n    y = 3\n') == []
    )
    assert len(unexplained(ref, "x = 2\n\n\nclass A(nn.Layer):\n    y = 3  # Paddle: three\n")) == 1


@pytest.mark.parametrize(
    "ref, port, reported",
    [
        ("from torch.nn import functional as F", "import paddle.nn.functional as F", []),
        ("from torch.nn import functional as F", "from paddle.vision.transforms import functional as F", ["F"]),
        ("from .layers import BatchNorm2D", "from paddle.nn import BatchNorm2D", ["BatchNorm2D"]),
        ("from torch.utils.data import DataLoader", "from paddle.io import DataLoader", []),
        ("import pickle", "import numpy as np", []),
    ],
)
def test_a_name_from_elsewhere_is_reported(ref, port, reported):
    assert differently_imported(ref, port) == reported


@pytest.mark.parametrize(
    "port, count",
    [
        ("def f(a, b=1): ...\ndef g(): ...", 0),
        ("def f(b, a=1): ...\ndef g(): ...", 1),
        ("def f(a, b=2): ...\ndef g(): ...", 1),
        ("def f(a, b=1): ...", 1),
        ("def g(): ...\ndef f(a, b=1): ...", 2),
        ("def f(a, b=1): ...\ndef h(): ...\ndef g(): ...", 1),
        ('def f(a, b=1): ...\ndef h():\n    """H.\n\n    Paddle: needs it.\n    """\ndef i(): ...\ndef g(): ...', 0),
        ('def f(a, b=1): ...\ndef i(): ...\ndef h():\n    """H.\n\n    Paddle: needs it.\n    """\ndef g(): ...', 1),
    ],
)
def test_another_signature_is_reported(port, count):
    assert len(differing_signatures("def f(a, b=1): ...\ndef g(): ...", port)) == count


def frameworks_imported(source: str) -> set[str]:
    """The top-level names of all modules that a file imports, in functions too; and `reprod.align` if it does."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {"reprod.align" if name.startswith("reprod.align") else name.split(".")[0] for name in names}


@pytest.mark.parametrize(
    "folder, foreign",
    [
        (REF, {"paddle", "mobilenetv3_paddle", "reprod.align"}),
        (PORT, {"torch", "torchvision", "mobilenetv3_ref", "reprod.align"}),
        (
            ROOT / "reprod" / "recipe",
            {"torch", "torchvision", "paddle", "mobilenetv3_ref", "mobilenetv3_paddle", "reprod.align"},
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_nothing_foreign_is_imported(folder, foreign):
    found = {
        path.name: frameworks_imported(path.read_text(encoding="utf-8")) & foreign for path in folder.rglob("*.py")
    }
    assert len(found) > 5
    assert {name: names for name, names in found.items() if names} == {}


STANDALONE = """
import importlib, pkgutil, sys

package, zeros, *blocked = sys.argv[1:]
for name in blocked:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
modules = [package, *(m.name for m in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."))]
for name in modules:
    if not name.endswith("__main__"):
        importlib.import_module(name)
framework, function = zeros.split(".")
images = getattr(importlib.import_module(framework), function)([2, 3, 32, 32])
model = sys.modules[package + ".models"].mobilenet_v3_small(num_classes=5)
model.train()
print(len(modules), list(model(images).shape))
"""


@pytest.mark.parametrize(
    "package, zeros, blocked",
    [
        ("mobilenetv3_ref", "torch.zeros", ("paddle", "mobilenetv3_paddle")),
        ("mobilenetv3_paddle", "paddle.zeros", ("torch", "torchvision", "mobilenetv3_ref")),
    ],
)
def test_each_package_stands_alone(package, zeros, blocked, tmp_path):
    """Every module imports and a model runs without the other framework, the other package and the comparison."""
    blocked = (*blocked, "reprod.align", "reprod_log", "skimage", "sklearn")
    command = [sys.executable, "-c", STANDALONE, package, zeros, *blocked]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    count, shape = run.stdout.strip().splitlines()[-1].split(" ", 1)
    assert (int(count) >= len(ALL), shape) == (True, "[2, 5]")
