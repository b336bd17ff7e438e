"""The two packages are mirror images: what differs between two files of one name is spelling, or says why.

Spelling is the table below. Whatever else differs has a reason of its own on the port's side, see `unexplained`.
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
TITLES = "__init__.py"  # which says which of the two it is
OTHER_CLASSES = ("models/sync_batch_norm.py", "train/lr_scheduler.py")  # one side inherits what the other defines

# What the reference writes -> what the port writes for the same thing.
SPELLING = [
    (r"\bmobilenetv3_ref\b", "mobilenetv3_paddle"),
    (r"\btorch\.device\b", "str"),  # Paddle names devices
    (r"\btorch\.autograd\.Function\b", "paddle.autograd.PyLayer"),
    (r"\btorch\.cat\b", "paddle.concat"),
    (r"\btorch\.manual_seed\b", "paddle.seed"),
    (r"\btorch\.cuda\b", "paddle.device.cuda"),
    (r"\btorch\.tensor\((\w+), dtype=torch\.float64, device=", r'paddle.to_tensor(\1, dtype="float64", place='),
    (r"\btorch\.(?!nn\.utils\.clip_grad_norm_)", "paddle."),  # whose formula both document
    (r"\bnn\.Module\b", "nn.Layer"),
    (r"\bnn\.ModuleDict\b", "nn.LayerDict"),
    (r"\b(Conv|BatchNorm|SyncBatchNorm|AdaptiveAvgPool)2d\b", r"\g<1>2D"),
    (r"\beps=", "epsilon="),
    (r"\bself\.eps\b", "self._epsilon"),
    (r"\bbias=", "bias_attr="),
    (r"\.modules\(\)", ".sublayers()"),
    (r"\.named_modules\(\)", ".named_sublayers(include_self=True)"),
    (r"\bregister_forward_hook\b", "register_forward_post_hook"),
    (r"\.detach\(\)\.cpu\(\)\.numpy\(\)", ".numpy()"),
    (r"\btake_along_dim\b", "take_along_axis"),
    (r"\bfind_classes\b", "_find_classes"),
    (r", device=(logits|wide)\.device\b", ""),  # Paddle's device is a global setting
    # An image is an array until it is in a batch.
    (r"(Generator\], |Generator(?: \| None = None)?\) -> |tuple\[)Tensor(?=\]|:|, int)", r"\g<1>np.ndarray"),
    (r"\bzero_grad\(\)", "clear_grad()"),
    (r'\bparam_groups\[0\]\["lr"\]', "get_lr()"),
    (r"\bnn\.CrossEntropyLoss\(label_smoothing=label_smoothing\)", "CrossEntropyLoss(label_smoothing)"),
    (r'\(".pth", ".pt"\)', '(".pdparams",)'),
    (r'= ".pth"', '= ".pdparams"'),
    (r"\blr_scheduler\.load_state_dict\b", "lr_scheduler.set_state_dict"),
    (r"PyTorch's (own|generators)", r"PaddlePaddle's \1"),
    (r'"PyTorch"', '"PaddlePaddle"'),
    (r"\btorchrun\b", "paddle.distributed.launch"),
    (r"\btensorboard( --logdir|\")", r"visualdl\1"),
    (r"\bTensorBoard (?!or)", "VisualDL "),
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


def explained(node: ast.AST) -> bool:
    """Whether its docstring has a line that begins `Paddle:`."""
    return bool(re.search(r"^Paddle:", ast.get_docstring(node) or "", re.MULTILINE))


def definitions(source: str) -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, node) of every class, method and function in order, nested ones included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, DEFINITIONS):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(ast.parse(source), "")


def unexplained(ref: str, port: str) -> list[str]:
    """The hunks of a diff of the two sources, after spelling, for which the port gives no reason.

    A hunk needs one for each class, method, function and statement beside these that it has lines of: a `# Paddle:`
    comment or a docstring's `Paddle:` among the hunk's lines of it. A class's methods are no lines of the class, and a
    comment above belongs to what follows. Where the reference lacks a definition, its docstring is for every hunk.
    """
    ref_lines, port_lines = body(spelled(ref)), body(port)
    of_ref = {name for name, _ in definitions(spelled(ref))}
    owner, own, end = {}, set(), 0
    for node in ast.parse(port).body:
        owner.update(dict.fromkeys(range(end + 1, node.end_lineno + 1), getattr(node, "name", node.lineno)))
        end = node.end_lineno
    for name, node in definitions(port):  # inner ones come later
        owner.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), name))
        if name not in of_ref and explained(node):
            own.add(name)
    matcher = difflib.SequenceMatcher(None, [t for _, t in ref_lines], [t for _, t in port_lines], autojunk=False)
    hunks = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        removed, added = ref_lines[i1:i2], port_lines[j1:j2]
        parts = {}
        for number, text in added:
            if text:
                parts.setdefault(owner.get(number), []).append(text)
        with_reason = {
            name
            for name, texts in parts.items()
            if any("# Paddle:" in text or re.match(r'\s*(""")?Paddle:', text) for text in texts)
        }
        if not parts or parts.keys() - with_reason - own:
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


def signatures(source: str) -> list[tuple[str, str]]:
    """(qualified name, parameters) of every class, method and function in order, nested ones included."""
    return [(name, "" if isinstance(node, ast.ClassDef) else parameters(node)) for name, node in definitions(source)]


def differing_signatures(ref: str, port: str) -> list[str]:
    """Classes, functions, and their parameters, that are not the same, or not in the same order.

    A run of functions that only the port has is in order if the first has a docstring that says why.
    """
    ref_list, port_list = signatures(spelled(ref)), signatures(port)
    with_reason = {name for name, node in definitions(port) if explained(node)}
    matcher = difflib.SequenceMatcher(None, ref_list, port_list, autojunk=False)
    return [
        f"{ref_list[i1:i2]} -> {port_list[j1:j2]}"
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal" and not (tag == "insert" and port_list[j1][0] in with_reason)
    ]


def log_lines(source: str) -> list[str]:
    """What is logged or printed, as code."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sorted(ast.unparse(call) for call in calls if ast.unparse(call.func) in ("log", "print"))


def sources(name: str) -> tuple[str, str]:
    return (REF / name).read_text(encoding="utf-8"), (PORT / name).read_text(encoding="utf-8")


def test_both_have_the_same_files():
    assert files(REF, "**/*.py") == files(PORT, "**/*.py")
    assert {TITLES, *OTHER_CLASSES} < set(ALL)


@pytest.mark.parametrize("name", sorted({*ALL} - {TITLES}))
def test_every_difference_has_a_reason(name):
    assert unexplained(*sources(name)) == []


@pytest.mark.parametrize("name", ALL)
def test_names_come_from_the_same_place(name):
    assert differently_imported(*sources(name)) == []


@pytest.mark.parametrize("name", sorted({*ALL} - {*OTHER_CLASSES}))
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
        ("train/optimizer.py", '        """Paddle: `step` calls it for each parameter."""\n', ""),
        ("train/optimizer.py", "# Paddle: its names of the base classes\n", ""),
        ("train/optimizer.py", "# Paddle: takes the rate first", ""),
        ("train/checkpoint.py", "  # Paddle: as for the model", ""),
        ("train/distributed.py", "    # Paddle: sends buffers here and", "    # It sends buffers here and"),
        ("device.py", "  # Paddle: global flags, for which a build for the CPU raises ValueError", ""),
        ("train/main.py", "    init_distributed(device)\n", ""),
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
    "lines, count",
    [
        ((), 1),  # the reason of the class is for its own lines
        (('        """Paddle: one."""',), 0),
        (("        # Paddle: one",), 0),
        (('        """One.', "", "        Paddle: one.", '        """'), 0),
        (('        """One, unlike Paddle: two."""',), 1),
    ],
)
def test_a_class_does_not_explain_its_methods(lines, count):
    head = ["class A:", '    """A.', "", "    Paddle: has none.", '    """', "", "    x = 1", ""]
    assert len(unexplained("", "\n".join([*head, "    def f(self):", *lines, "        return 1"]))) == count


def test_a_function_of_both_sides_needs_a_reason_for_each_difference():
    ref = "def f():\n    a = 1\n    b = 2\n    return a + b\n"
    head = 'def f():\n    """F.\n\n    Paddle: another a.\n    """\n'
    assert unexplained(ref, f"{head}    a = 2\n    b = 2\n    return a + b\n") == []
    [hunk] = unexplained(ref, f"{head}    a = 2\n    b = 2\n    return a - b\n")
    assert hunk == "-     return a + b\n+     return a - b"


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
    """The top-level names of all modules that a file imports, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize(
    "folder, foreign",
    [
        (REF, {"paddle", "mobilenetv3_paddle", "portproof"}),
        (PORT, {"torch", "torchvision", "mobilenetv3_ref", "portproof"}),
        (
            ROOT / "mobilenetv3_common",
            {"torch", "torchvision", "paddle", "mobilenetv3_ref", "mobilenetv3_paddle", "portproof"},
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


@pytest.mark.thorough("the port", but="paddle.zeros")
@pytest.mark.parametrize(
    "package, zeros, blocked",
    [
        ("mobilenetv3_ref", "torch.zeros", ("paddle", "mobilenetv3_paddle")),
        ("mobilenetv3_paddle", "paddle.zeros", ("torch", "torchvision", "mobilenetv3_ref")),
    ],
)
def test_each_package_stands_alone(package, zeros, blocked, tmp_path):
    """Every module imports and a model runs without the other framework, the other package and the kit."""
    blocked = (*blocked, "portproof", "reprod_log", "skimage", "sklearn")
    command = [sys.executable, "-c", STANDALONE, package, zeros, *blocked]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    count, shape = run.stdout.strip().splitlines()[-1].split(" ", 1)
    assert (int(count) >= len(ALL), shape) == (True, "[2, 5]")
