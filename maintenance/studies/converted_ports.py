"""Judge ports that a program wrote, and write docs/*/converted_ports.md: what PaConvert got wrong in ten models.

  python maintenance/studies/converted_ports.py                        all ten, in a quarter of an hour on two cores
  python maintenance/studies/converted_ports.py --only resnet18        one, its part of the page printed only

PaConvert translates PyTorch source to PaddlePaddle. It gets an environment of its own in a cache folder, into which
timm's source goes too, so the first run needs PyPI. Each port is imported, built, run and judged in a child process.
Where it stops, the page says so, and what is listed in MENDS is changed in it as by hand, so that it can go on.
Nothing that PaConvert wrote is kept. Exit status: 0 the pages were written (or the part printed), whatever they say.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
import venv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from maintenance import DOCS
from maintenance.checks.versions import last_line, ran
from maintenance.pages.phrases import code
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, one_line, positive_int, run

PROG = "converted_ports"
PACONVERT, TIMM = "3.3.1", "1.0.31"
SEED = 0
MARK = ">>>>>>"  # PaConvert puts it before a line that it cannot translate; Python cannot read it


@dataclass(frozen=True)
class Library:
    """Which of a library's files become the port. All else that they import stays the library's own."""

    layers: tuple[str, ...]  # patterns of files with layers, translated beside the models' own
    copied: tuple[str, ...] = ()  # taken as they are


LIBRARIES = {
    # A second model of one name cannot be registered, so the port has a register of its own.
    "torchvision": Library(("ops/misc.py", "ops/stochastic_depth.py"), ("models/_api.py",)),
    "timm": Library(("layers/*.py",)),
}
# Without it PaConvert writes names such as timm.layers.Mlp and imports no timm.
OPTIONS = ["--exclude_packages", ",".join(LIBRARIES)]


@dataclass(frozen=True)
class Model:
    """A model of a library, small enough to be judged in a minute."""

    module: str
    factory: str
    arguments: Mapping[str, Any]
    input: str = "2,3,64,64"

    @property
    def library(self) -> str:
        return self.module.partition(".")[0]

    @property
    def file(self) -> str:
        """In the library's folder."""
        return self.module.partition(".")[2].replace(".", "/") + ".py"

    @property
    def call(self) -> str:
        return f"{self.factory}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def torchvision(file: str, factory: str, **arguments: Any) -> Model:
    return Model(f"torchvision.models.{file}", factory, {**arguments, "num_classes": 10})


def timm(file: str, factory: str, **arguments: Any) -> Model:
    return Model(f"timm.models.{file}", factory, {**arguments, "num_classes": 10})


VIT = {"image_size": 64, "patch_size": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
SWIN = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
MIXER = {"img_size": 64, "patch_size": 16, "num_blocks": 2, "embed_dim": 64}
CAIT = {"img_size": 64, "patch_size": 16, "embed_dim": 64, "depth": 2, "num_heads": 4}
MODELS = {
    "resnet18": torchvision("resnet", "resnet18"),
    "densenet121": torchvision("densenet", "densenet121"),
    "googlenet": torchvision("googlenet", "googlenet", init_weights=False),
    "mobilenet_v3_small": torchvision("mobilenetv3", "mobilenet_v3_small"),
    "shufflenet_v2_x0_5": torchvision("shufflenetv2", "shufflenet_v2_x0_5"),
    "convnext_tiny": torchvision("convnext", "convnext_tiny"),
    "vision_transformer": torchvision("vision_transformer", "VisionTransformer", **VIT),
    "swin_transformer": torchvision("swin_transformer", "SwinTransformer", **SWIN),
    "mlp_mixer": timm("mlp_mixer", "MlpMixer", **MIXER),
    "cait": timm("cait", "Cait", **CAIT),
}


@dataclass(frozen=True)
class Mend:
    """What is changed in a port that has stopped, so that it can go on."""

    error: str  # pattern of the line that says why it stopped
    wrong: str  # pattern of the port's source
    right: str


def renamed(wrong: str, right: str) -> Mend:
    """For a name that this Paddle does not have."""
    return Mend(rf"no attribute '{wrong.rpartition('.')[2]}'", rf"\b{re.escape(wrong)}\b", right)


def imported(name: str) -> Mend:
    """For a module that a file uses and does not import."""
    used = rf"(?m)\A(?![\s\S]*^import {name}$)(?=[\s\S]*\b{name}\b)"
    return Mend(f"name '{name}' is not defined", used, f"import {name}\n")


# In this order; only a mend whose error has stopped the model is made, in all files of that model's port.
MENDS = (
    renamed("paddle.nn.MaxPool2d", "paddle.nn.MaxPool2D"),
    renamed("paddle._assert", "torch._assert"),
    Mend("unexpected keyword argument 'inplace'", r"inplace=\w+(?=\))", ""),
    Mend("unexpected keyword argument 'inplace'", r'{"inplace": inplace}', "{}"),
    Mend("unexpected keyword argument 'eps'", r"(paddle\.nn\.BatchNorm2D, )eps=", r"\1epsilon="),
    Mend("no attribute 'normalized_shape'", r"self\.normalized_shape", "self._normalized_shape"),
    Mend("'LayerNorm.*no attribute 'eps'", r"self\.bias, self\.eps\b", "self.bias, self._epsilon"),
    Mend("'Conv2D' object has no attribute", r"(self\.conv\w+)\.(in_channels|kernel_size)", r"\1._\2"),
    Mend(r"has no attribute 'shape'.*\.div_", r"\.div_\((\w+)\)", r".scale_(1.0 / \1)"),
    Mend(r"has no attribute 'shape'.*\.mul_", r"\.mul_\(std\b", ".scale_(std"),
    Mend(r"has no attribute 'shape'.*\.add_", r"\.add_\(mean\)", ".scale_(1.0, mean)"),
    # What was to be imported is gone, so what is made in its stead is needed.
    Mend("^ImportError: cannot import name", r"(?m)^try:\n    pass\nexcept ImportError:", "if True:"),
    imported("torch"),
    imported("paddle"),
    Mend("^SyntaxError.* or {}", r"\*\*(\w+ or {})", r"**(\1)"),
    Mend("name 'F' is not defined", r"(?<![\w.])F\.(?=\w)", "paddle.nn.functional."),
    Mend("name 'nn' is not defined", r"(?<![\w.])nn\.(?=\w)", "paddle.nn."),
)


@dataclass(frozen=True)
class Outcome:
    """How far a port got: `stage` is "import", "build", "run" or "time" where it stopped, else what `align` said."""

    stage: str  # or "aligned", "differs", "refused"
    lines: list[str] = field(default_factory=list)  # the exception; what differs, and where


@dataclass(frozen=True)
class Result:
    """All that is known of one model's port."""

    marked: list[str] = field(default_factory=list)  # lines of the model's own file that PaConvert did not translate
    stops: list[tuple[Outcome, list[tuple[str, str]]]] = field(default_factory=list)  # with what was changed, each time
    end: Outcome | None = None


WORDS = {
    "en": {
        "switch": "[中文](../zh/converted_ports.md)",
        "title": "Ports that a program wrote",
        "intro": "What [PaConvert](https://github.com/PaddlePaddle/PaConvert) {paconvert} got wrong in {count} models "
        "of torchvision {torchvision} and timm {timm}: its output, with only the edits listed below. Judged by "
        "`portproof.align` with torch {torch} and paddle {paddle}, on inputs of `{input}` and with probe weights. "
        "PaConvert says that it writes for Paddle's development version; some names it writes are not in this one. "
        "Generated by `python maintenance/studies/converted_ports.py`; do not edit.",
        "head": "| model | as it was translated | after the changes |",
        "import": "cannot be imported",
        "build": "cannot be built",
        "run": "does not run",
        "time": "does not end",
        "aligned": "aligned",
        "differs": "differs",
        "refused": "cannot be judged",
        "hand": "What was done by hand",
        "before": "Before a port was first imported:",
        "steps": (
            f"PaConvert runs with `{' '.join(OPTIONS)}`: else it writes `timm.layers.Mlp` and imports no `timm`.",
            "A library's register of models, tables of labels and weights, preprocessing and logging are no part of a "
            "model. Files of these are not translated: the port imports the library's own. Translated are the file of "
            "the model and files with layers: {layers}. Unchanged: {copied}.",
            f"PaConvert puts `{MARK}` before a line that it cannot translate, which Python cannot read. The mark is "
            "taken away, the line stays as PaConvert left it, and its file imports `torch`.",
        ),
        "after": "Where a port had stopped, and only there, in all its files:",
        "marked": "not translated, marked",
        "changed": "; changed to go on",
        "colon": ": ",
        "comma": ", ",
        "added": "added",
        "removed": "removed",
    },
    "zh": {
        "switch": "[English](../en/converted_ports.md)",
        "title": "自动转换工具生成的移植版",
        "intro": "[PaConvert](https://github.com/PaddlePaddle/PaConvert) {paconvert} 翻译了 torchvision {torchvision} "
        "和 timm {timm} 的 {count} 个模型，本页列出其中的错误。被判断的是它的输出，只做了下文列出的改动。判断由 "
        "`portproof.align` 完成，使用 torch {torch} 和 paddle {paddle}、形状为 `{input}` 的输入以及探针权重。"
        "PaConvert 说明它面向飞桨的开发版，"
        "它写出的一些名称在这个版本里还没有。本页由 "
        "`python maintenance/studies/converted_ports.py` 生成，请勿手工修改。",
        "head": "| 模型 | 翻译后的原样 | 修改之后 |",
        "import": "无法导入",
        "build": "无法创建",
        "run": "无法运行",
        "time": "没有结束",
        "aligned": "已对齐",
        "differs": "有差异",
        "refused": "无法判断",
        "hand": "手工做了什么",
        "before": "第一次导入之前：",
        "steps": (
            f"PaConvert 运行时带有 `{' '.join(OPTIONS)}`；不带时它会写出 `timm.layers.Mlp`，却不导入 `timm`。",
            "模型注册表、标签和权重的表、预处理和日志不属于模型。这些文件不翻译，移植版直接导入原库的。翻译的是模型所在的文件和"
            "各层所在的文件：{layers}。原样复制的是：{copied}。",
            f"PaConvert 在不能翻译的行前加上 `{MARK}`，Python 读不了这样的行。这里去掉这个标记，行的内容保持 PaConvert "
            "写的样子，所在文件导入 `torch`。",
        ),
        "after": "移植版停下来时才做，改动它的所有文件：",
        "marked": "没有翻译、加了标记的行",
        "changed": "；为了继续而改动",
        "colon": "：",
        "comma": "、",
        "added": "加上",
        "removed": "删去",
    },
}


def get_args_parser() -> argparse.ArgumentParser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--only", choices=MODELS, help="judge one port and print its part")
    add("--environment", type=Path, default=cache / PROG, metavar="FOLDER", help="PaConvert's, made if missing")
    add("--timeout", type=positive_int, default=900, metavar="SECONDS", help="of one attempt to judge a port")
    add("--child", nargs=2, help=argparse.SUPPRESS)  # MODEL, the folder of its port
    return parser


# --- PaConvert and its sources


def prepared(cache: Path) -> Path:
    """The environment in `cache` that has PaConvert, and timm in sources/. Raises UserError where it cannot be made."""
    folder = cache / f"paconvert-{PACONVERT}-timm-{TIMM}"
    if (folder / "complete").is_file():
        return folder
    try:
        venv.create(folder, with_pip=True, clear=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise UserError(f"environment {folder} cannot be made ({one_line(error)}): choose --environment") from error
    sources = ["--no-deps", "--target", str(folder / "sources")]
    for arguments in ([f"paconvert=={PACONVERT}"], [*sources, f"timm=={TIMM}"]):
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments]
        done = ran(command)
        if done.returncode:
            raise UserError(f"{arguments[-1]} cannot be installed ({last_line(done)}): check that PyPI can be reached")
    (folder / "complete").touch()
    return folder


def paconvert(environment: Path) -> Callable[[Path, Path], None]:
    """What translates a folder into another with PaConvert; raises UserError where it ends with an error."""

    def translate(source: Path, target: Path) -> None:
        command = [environment / "bin" / "paconvert", "-i", source, "-o", target, "--log_dir", target.parent / "log"]
        command += OPTIONS
        done = ran(command)
        if done.returncode or not target.is_dir():
            raise UserError(f"PaConvert failed on {source} ({last_line(done)}): the library may be too new for it")

    return translate


def package(library: str) -> str:
    """The name of the port's package."""
    return f"ported_{library}"


def translated(
    library: str, folder: Path, files: Iterable[str], translate: Callable[[Path, Path], None], work: Path
) -> tuple[Path, dict[str, list[str]]]:
    """(the folder to import the port of `library` from, {file: lines that were not translated}).

    `folder` is the library's own, `files` are the models'. All is written below `work`.
    """
    parts = LIBRARIES[library]
    layers = [path.relative_to(folder).as_posix() for pattern in parts.layers for path in sorted(folder.glob(pattern))]
    source, target = work / "source", work / "port"
    for name in (*layers, *files):
        copy_file(folder / name, source / package(library) / name)
    translate(source, target)
    for name in parts.copied:
        copy_file(folder / name, target / package(library) / name)
    root, marked = target / package(library), {}
    for path in sorted(target.rglob("*.py")):
        text, lines = unmarked(path.read_text(encoding="utf-8"))
        path.write_text(own_imports(text, library, root, path), encoding="utf-8")
        if path.is_relative_to(root):
            marked[path.relative_to(root).as_posix()] = lines
    for folder in {root, *(path.parent for path in root.rglob("*.py"))}:
        (folder / "__init__.py").touch()
    return target, marked


def copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def unmarked(text: str) -> tuple[str, list[str]]:
    """(the text without PaConvert's marks, the lines that had one); with one it imports torch, which they may use."""
    lines = [line.removeprefix(MARK).strip() for line in text.splitlines() if line.startswith(MARK)]
    text = re.sub(f"(?m)^{MARK}", "", text)
    return ("import torch\n" if lines else "") + text, lines


def own_imports(text: str, library: str, root: Path, path: Path) -> str:
    """The text of `path` with what the port in `root` does not have imported from the library, and the rest from it."""
    parents = path.relative_to(root).parent.parts if path.is_relative_to(root) else ()

    def replaced(found: re.Match) -> str:
        start, dots, rest = found.groups()
        if dots:
            rest = ".".join((*parents[: len(parents) + 1 - len(dots)], *filter(None, [rest])))
        else:
            rest = rest.removeprefix(f"{library}.")
        place = root / rest.replace(".", "/")
        home = package(library) if place.with_suffix(".py").is_file() or any(place.glob("*.py")) else library
        return f"{start}from {home}.{rest} import "

    return re.sub(rf"(?m)^(\s*)from (?:(\.+)|(?={library}\.))([\w.]*) import ", replaced, text)


# --- one port


def attempted(
    ref: Callable[[], Any], module: str, port_of: Callable[[Any], Any], inputs: Sequence[Any], folder: Path
) -> Outcome:
    """Import, build, run and judge the port; `folder` is that of its source. `port_of(module)` makes the model."""
    import paddle

    from portproof import align

    stage = "import"
    try:
        imported = importlib.import_module(module)
        stage = "build"
        port = port_of(imported)
        stage = "run"
        for mode in ("eval", "train"):
            getattr(port, mode)()
            port(*(paddle.to_tensor(array) for array in inputs))
        port = port_of(imported)  # running it in train mode has changed its statistics
    except Exception as error:  # whatever the port may raise
        return Outcome(stage, [f"{one_line(error)}{place_of(error, folder)}".replace(f"{folder}/", "")])
    try:
        verdict = align(ref(), port, inputs, seed=SEED)
    except UserError as error:
        return Outcome("refused", [str(error)])
    if verdict.status == 0:
        return Outcome("aligned")
    if verdict.location:
        return Outcome("differs", verdict.location.summary())
    row = verdict.first_failure
    return Outcome("differs" if verdict.status == 1 else "refused", [verdict.refusal or f"{row.name}: {row.reason}"])


def place_of(error: Exception, folder: Path) -> str:
    """Where in the port the exception came from, as text to be put behind it; "" if not in a file of `folder`."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_relative_to(folder):
        return f", {Path(error.filename).name}: {(error.text or '').strip()}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    return f", {Path(frames[-1].filename).name}: {frames[-1].line}" if frames else ""


def child(name: str, folder: Path) -> Outcome:
    """What a child process says of the port in `folder`, from where it can import, as it can its library."""
    from portproof.ladder.pairs.named import draw_inputs

    model = MODELS[name]
    module = f"{package(model.library)}.{model.module.partition('.')[2]}"
    reference = importlib.import_module(model.module)
    return attempted(
        lambda: getattr(reference, model.factory)(**model.arguments),
        module,
        lambda imported: getattr(imported, model.factory)(**model.arguments),
        draw_inputs([model.input], SEED),
        folder,
    )


def in_child(command: Sequence[str], timeout: int, folders: Sequence[Path] = ()) -> Outcome:
    """What the last line that `command` prints says, in a process that can import from `folders`."""
    places = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Outcome("time", [f"more than {timeout} s"])
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Outcome("refused", [f"the process ended with {done.returncode}: {why}"])
    return Outcome(**json.loads(last))


def mended(outcome: Outcome, folder: Path) -> list[tuple[str, str]]:
    """Change what stopped the port in `folder`, in all its files -> (what it was, what it became), none if unknown."""
    changes: dict[tuple[str, str], None] = {}
    for mend in MENDS:
        if not re.search(mend.error, outcome.lines[0]):
            continue
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found = {match[0]: match.expand(mend.right) for match in re.finditer(mend.wrong, text)}
            if not found:
                continue
            changes |= dict.fromkeys(found.items())
            text = re.sub(mend.wrong, mend.right, text)
            needs = re.search(r"\btorch\.", mend.right) and not re.match("import torch\n", text)
            path.write_text(("import torch\n" if needs else "") + text, encoding="utf-8")
    return list(changes)


def judged(attempt: Callable[[], Outcome], folder: Path, marked: Sequence[str]) -> Result:
    """Attempt the port in `folder` until it is judged, or stops at what no mend helps against."""
    stops = []
    while (outcome := attempt()).stage in ("import", "build", "run"):
        changes = mended(outcome, folder)
        if not changes:
            break
        stops.append((outcome, changes))
    return Result(list(marked), stops, outcome)


# --- the pages


def page(results: Mapping[str, Result], language: str, versions: Mapping[str, str]) -> str:
    """The page; `versions` are those of the libraries by name."""
    words, facts = WORDS[language], {**versions, "count": len(results), "input": MODELS["resnet18"].input}
    table = [words["head"], "| --- | --- | --- |", *(row(name, result, words) for name, result in results.items())]
    parts = [f"# {words['title']}", words["switch"], words["intro"].format(**facts), "\n".join(table)]
    for name, result in results.items():
        parts += section(name, result, words)
    files = {
        kind: words["comma"].join(f"`{name}/{file}`" for name in LIBRARIES for file in getattr(LIBRARIES[name], kind))
        for kind in ("layers", "copied")
    }
    steps = [f"- {step.format(**files)}" for step in words["steps"]]
    parts += [f"## {words['hand']}", words["before"], "\n".join(steps)]
    if changes := dict.fromkeys(change for result in results.values() for _, made in result.stops for change in made):
        parts += [words["after"], "\n".join(f"- {changed(*change, words)}" for change in changes)]
    return "\n\n".join(parts) + "\n"


def row(name: str, result: Result, words: Mapping[str, Any]) -> str:
    """The model's row of the table: what came first, and what in the end if anything was changed."""
    first = result.stops[0][0] if result.stops else result.end
    last = words[result.end.stage] if result.stops else ""
    cells = (f"`{name}`", words[first.stage], last)
    return f"| {' | '.join(cells)} |"


def section(name: str, result: Result, words: Mapping[str, Any]) -> list[str]:
    """The model's part of the page: its call, and every step with what was said."""
    model, lines, colon = MODELS[name], [], words["colon"]
    if result.marked:
        lines.append(f"- {words['marked']}{colon}{words['comma'].join(map(code, result.marked))}")
    for outcome, changes in result.stops:
        made = words["comma"].join(changed(*change, words) for change in changes)
        lines.append(f"- {words[outcome.stage]}{colon}{code(outcome.lines[0])}{words['changed']}{colon}{made}")
    lines += [f"- {words[result.end.stage]}{colon}{code(line)}" for line in result.end.lines]
    if not result.end.lines:
        lines.append(f"- {words[result.end.stage]}")
    return [f"## {name}", f"`{model.module}`{colon}`{model.call}`", "\n".join(lines)]


def changed(wrong: str, right: str, words: Mapping[str, Any]) -> str:
    """What a mend changed, of which either may be nothing."""
    if wrong and right:
        return f"{code(wrong)} → {code(right)}"
    return f"{words['removed' if wrong else 'added']} {code(wrong or right)}"


def main(args: argparse.Namespace) -> None:
    if args.child:
        name, folder = args.child
        print(json.dumps(asdict(child(name, Path(folder)))))
        return
    missing = [name for name in ("torch", "torchvision", "paddle") if find_spec(name) is None]
    if missing:
        raise UserError(f"both frameworks are needed ({missing[0]} is not installed): pip install -e '.[align]'")
    from portproof.io.records import save_text

    environment = prepared(args.environment)
    chosen = {args.only: MODELS[args.only]} if args.only else MODELS
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        homes = {"torchvision": Path(find_spec("torchvision").origin).parents[1], "timm": environment / "sources"}
        ports = {}
        for library in dict.fromkeys(model.library for model in chosen.values()):
            files = [model.file for model in chosen.values() if model.library == library]
            source = homes[library] / library
            ports[library] = translated(library, source, files, paconvert(environment), work / library)
        for name, model in tqdm(chosen.items(), "ports", disable=None):
            port, marked = ports[model.library]
            own = shutil.copytree(port, work / name)
            # Without bytecode: of a file that was changed within a second it would be the old one's.
            command = [sys.executable, "-B", __file__, "--child", name, str(own)]
            attempt = partial(in_child, command, args.timeout, [own, environment / "sources"])
            results[name] = judged(attempt, own, marked.get(model.file, ()))
    if args.only:
        print("\n\n".join(section(args.only, results[args.only], WORDS["en"])))
        return
    from importlib.metadata import version

    versions = {name: version(name).partition("+")[0] for name in ("torch", "torchvision")}
    versions |= {"paddle": version("paddlepaddle"), "paconvert": PACONVERT, "timm": TIMM}
    for language in WORDS:
        save_text(page(results, language, versions), DOCS / language / "converted_ports.md")
        print(f"wrote docs/{language}/converted_ports.md")


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
