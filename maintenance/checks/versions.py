"""Try portproof with versions of Python, NumPy, PyTorch and PaddlePaddle, and write docs/*/versions.md: what works.

  python maintenance/checks/versions.py                          all combinations, some hours and 6 GB at a time
  python maintenance/checks/versions.py --only oldest newest     these two; the others stay as they were
  python maintenance/checks/versions.py --list                   which there are, and which interpreters are found

Each combination gets an environment of its own in a throwaway folder, with uv if it is installed, else with venv and
pip: the frameworks from PyPI, the two wheels, and what the chosen tests need. Nothing that was fetched is kept unless
UV_CACHE_DIR says where. The tests run outside the project, in two processes. What has no interpreter here is checked
without being run: its sources are compiled by the oldest interpreter that is found. Results are kept in
OUTPUT/versions.json, from which the pages are written. Exit status: 0, or 1 where a test failed or one of --only could
not be run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maintenance import DOCS, ROOT
from maintenance.benchmarks.speed import cpu_time
from maintenance.pages.phrases import code
from portproof.io.records import save_text
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, output_dir, positive_int, run

PROG = "versions"
PACKAGES = ("sturdyio", "portproof")
LONGEST = 160  # characters of a message on the page


@dataclass(frozen=True)
class Combination:
    """Versions that are installed together."""

    python: str
    torch: str
    paddle: str
    numpy: str = ">=2"  # what pip is asked for


NUMPY_1 = "<2"
COMBINATIONS = {
    "oldest": Combination("3.9", "2.1.0", "2.6.2", NUMPY_1),
    "newest": Combination("3.13", "2.15.0", "3.3.1"),
    "paddle 3.0": Combination("3.12", "2.15.0", "3.0.0"),
    "paddle 3.1": Combination("3.12", "2.15.0", "3.1.1"),
    "paddle 3.2": Combination("3.12", "2.15.0", "3.2.2"),
    "paddle 2.6": Combination("3.12", "2.15.0", "2.6.2"),
    "torch 2.1": Combination("3.11", "2.1.2", "3.3.1", NUMPY_1),
    "torch 2.3": Combination("3.10", "2.3.1", "3.3.1"),
    "torch 2.13": Combination("3.11", "2.13.0", "3.3.1"),
    "torch 2.8": Combination("3.9", "2.8.0", "3.3.1"),
    "torch 2.5": Combination("3.12", "2.5.1", "3.3.1"),
    "torch 2.10": Combination("3.13", "2.10.0", "3.3.1"),
    "torch 2.2": Combination("3.10", "2.2.2", "3.3.1", NUMPY_1),
    "torch 2.4": Combination("3.11", "2.4.1", "3.3.1"),
    "torch 2.6": Combination("3.9", "2.6.0", "3.3.1"),
    "torch 2.7": Combination("3.10", "2.7.1", "3.3.1"),
    "torch 2.9": Combination("3.12", "2.9.1", "3.3.1"),
    "torch 2.11": Combination("3.13", "2.11.0", "3.3.1"),
    "torch 2.12": Combination("3.12", "2.12.1", "3.3.1"),
    "torch 2.14": Combination("3.13", "2.14.1", "3.3.1"),
}
FILES = ("mapping", "align", "align_kinds", "convert", "fp64_torch", "float64_constants", "versions")
# Of the corpus, these are judged by `align`, and recorded and judged from the file.
CORPUS = (
    "vit, position frozen",
    "library encoder, pre-norm",
    "resnet, padding of SAME",
    "batch norm in training, momentum of the other framework",
    "bilstm, ",
    "gpt, not tied",
    "dataclass, ",
    "textcnn, no padding index",
)
# Arguments of pytest in the folder of the kit's tests, and what these need beside the extras `torch` and `paddle`.
PLAIN = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
BROWSER = ["playwright", "axe-playwright-python"]
CORPUS_TESTS = [f"tests/test_record.py::test_the_same_verdict_and_place[{name}]" for name in CORPUS]
TESTS = {
    "quick": (["tests/test_mapping.py", "tests/test_versions.py", *CORPUS_TESTS[:4]], PLAIN),
    "core": ([*(f"tests/test_{name}.py" for name in FILES), *CORPUS_TESTS], PLAIN),
    "all": (
        ["tests", "../sturdyio/tests"],
        [*PLAIN, "torchvision", "reprod_log", "jinja2", *BROWSER, "tqdm", "protobuf"],
    ),
}


@dataclass(frozen=True)
class Result:
    """What became of one combination."""

    tests: str  # which of TESTS
    installed: dict[str, str] = field(default_factory=dict)  # {what: version}; empty: it could not be installed
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)  # "TEST: what it said"
    seconds: int = 0  # of the tests, on one core
    why: str = ""  # the installer's last line, where it could not be installed


WORDS = {
    "en": {
        "switch": "[中文](../zh/versions.md)",
        "title": "Versions",
        "intro": "The versions that portproof was tried with. A row is an environment of its own, with the wheels of "
        "the kit and of `sturdyio`, and without anything else of this project; in it a selection of their tests ran. "
        "`core` judges layers of every kind, finds maps, converts weights, records and judges recordings; `quick` is "
        "its part with maps and recordings; `all` are all tests. Seconds are those of one core. Generated by "
        "`python maintenance/checks/versions.py`; do not edit.",
        "head": "| Python | PyTorch | PaddlePaddle | NumPy | tests | passed | failed | skipped | seconds |",
        "failed": "What failed",
        "refused": "Could not be installed",
        "not run": "Not run",
        "static": "These were not run. What was checked of them: Python {oldest} compiles all sources and tests of the "
        "kit; CI's ruff finds nothing in them that is newer than its `target-version`.",
        "limits": "What a version cannot do",
        "lines": (
            "Older than PyTorch 2.1 or PaddlePaddle 2.6: refused, in one line.",
            "PyTorch 2.1 and 2.2 are compiled for NumPy 1. With NumPy 2 they are refused, in one line: "
            "`pip install 'numpy<2'`.",
            "PaddlePaddle 2.6 cannot take a gradient away, only empty it: after `portproof.align` a parameter has the "
            "gradient that it had, but whoever else holds that tensor holds an empty one.",
            "In PaddlePaddle 2.6 and 3.0 the gradient of `paddle.gather` with `axis=1` is wrong, in any precision. A "
            "port that calls it fails, rightly; with `paddle.index_select` it passes.",
        ),
    },
    "zh": {
        "switch": "[English](../en/versions.md)",
        "title": "版本",
        "intro": "portproof 试过的版本。每一行是一个独立的环境：装有工具包和 `sturdyio` 的 wheel，"
        "没有本项目的其他任何内容，在其中运行它们的测试的一个子集。"
        "`core` 判断各种层、查找映射、转换权重、录制并按录制判断；"
        "`quick` 是其中映射和录制的部分；`all` 是全部测试。秒数按单核计。"
        "由 `python maintenance/checks/versions.py` 生成，请勿手工修改。",
        "head": "| Python | PyTorch | PaddlePaddle | NumPy | 测试 | 通过 | 失败 | 跳过 | 秒 |",
        "failed": "失败的测试",
        "refused": "无法安装",
        "not run": "没有运行",
        "static": "以下组合没有运行，只检查了：Python {oldest} 能编译工具包的全部源码和测试，"
        "CI 中的 ruff 没有发现比其 `target-version` 更新的语法。",
        "limits": "某个版本做不到的事",
        "lines": (
            "早于 PyTorch 2.1 或 PaddlePaddle 2.6 的版本：用一行信息拒绝。",
            "PyTorch 2.1 和 2.2 是为 NumPy 1 编译的，与 NumPy 2 一起时用一行信息拒绝：`pip install 'numpy<2'`。",
            "PaddlePaddle 2.6 不能取走梯度，只能清空：`portproof.align` 之后参数的梯度和之前一样，"
            "但在别处持有该张量的，得到的是空张量。",
            "PaddlePaddle 2.6 和 3.0 中 `paddle.gather`（`axis=1`）的梯度是错的，任何精度都如此。"
            "调用它的移植版会失败，这是对的；换成 `paddle.index_select` 就通过。",
        ),
    },
}


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=COMBINATIONS, metavar="NAME", help="these, which must be run; see --list")
    add("--list", action="store_true", help="print the combinations and their interpreters")
    add("--tests", choices=TESTS, default="core", help="which of the kit's tests run")
    add("--output", type=Path, default=DOCS, metavar="FOLDER", help="of the results and the pages")
    add("--timeout", type=positive_int, default=1800, metavar="SECONDS", help="of one combination's tests")
    return parser


def find_interpreters(versions: Iterable[str]) -> dict[str, str]:
    """{version such as 3.9: its interpreter}, as far as it is in PATH or one of pyenv's."""
    root, found = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"), {}
    for version in versions:
        own = sorted(root.glob(f"versions/{version}.*/bin/python"))
        for candidate in (shutil.which(f"python{version}"), *map(str, reversed(own))):
            if candidate and (own_path := path_of(candidate, version)):  # pyenv leaves names that run nothing
                found[version] = own_path
                break
    return found


def path_of(interpreter: str, version: str) -> str:
    """Where it really lies; "" if it does not run, or is of another version."""
    code = f"import sys, venv; print(sys.executable if '%d.%d' % sys.version_info[:2] == '{version}' else '')"
    return ran([interpreter, "-c", code]).stdout.strip()


def ran(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess:
    """How a program of another environment ended."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden} | {"OMP_NUM_THREADS": "1"}
    variables["PIP_CONSTRAINT"] = os.devnull  # the versions are those asked for, whatever pip is configured to allow
    if "UV_CACHE_DIR" not in variables:
        variables["UV_NO_CACHE"] = "1"
    words = list(map(str, command))
    return subprocess.run(words, env=variables, capture_output=True, text=True, check=False, **options)


def last_line(done: subprocess.CompletedProcess) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), (lines or ["no message"])[-1])


def copied_kit(work: Path) -> tuple[dict[str, Path], Path]:
    """({package: its wheel}, the folder of the kit's tests and their settings), in `work`; sturdyio's lie beside."""
    built = ("build", "*.egg-info", "__pycache__", ".pytest_cache")
    wheels = {}
    for package in PACKAGES:
        source, tests = work / "source" / package, work / "tests" / package
        shutil.copytree(ROOT / package, source, ignore=shutil.ignore_patterns("tests", *built))
        shutil.copytree(ROOT / package / "tests", tests / "tests", ignore=shutil.ignore_patterns(*built))
        shutil.copyfile(ROOT / package / "pyproject.toml", tests / "pyproject.toml")
        done = ran([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work, source])
        found = list(work.glob(f"{package}-*.whl"))
        if done.returncode or not found:
            raise UserError(f"{package}'s wheel cannot be built ({last_line(done)}): check that PyPI can be reached")
        wheels[package] = found[0]
    return wheels, work / "tests" / "portproof"


def install(
    combination: Combination, interpreter: str, wheels: Mapping[str, Path], needs: Sequence[str], folder: Path
) -> str:
    """Make the environment -> its interpreter; raises RuntimeError with what the installer said."""
    python, uv = folder / "bin" / "python", shutil.which("uv")
    wanted = [f"torch=={combination.torch}", f"paddlepaddle=={combination.paddle}", f"numpy{combination.numpy}"]
    wanted += [f"sturdyio @ {wheels['sturdyio'].as_uri()}", f"portproof[torch,paddle] @ {wheels['portproof'].as_uri()}"]
    wanted += needs
    if uv:
        make, add = [uv, "venv", "-p", interpreter, folder], [uv, "pip", "install", "-p", python]
    else:
        make, add = [interpreter, "-m", "venv", folder], [python, "-m", "pip", "install", "--no-cache-dir"]
    for command in (make, [*add, *wanted]):
        done = ran(command)
        if done.returncode:
            raise RuntimeError(last_line(done))
    return str(python)


def tried(
    combination: Combination,
    interpreter: str,
    wheels: Mapping[str, Path],
    kit: Path,
    tests: str,
    timeout: int,
    work: Path,
) -> Result:
    """Install the combination in `work`, which is left without it, and run the tests."""
    selection, needs = TESTS[tests]
    folder, report = work / "environment", work / "report.xml"
    report.unlink(missing_ok=True)
    try:
        python = install(combination, interpreter, wheels, needs, folder)
        command = [python, "-W", "ignore", "-m", "pytest", "-c", "pyproject.toml", "--all", "-n", "2"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        before = cpu_time()
        done = ran([*command, *selection], cwd=kit, timeout=timeout)
        seconds, installed = round(cpu_time() - before), versions_in(python)
    except RuntimeError as error:
        return Result(tests, why=str(error))
    except subprocess.TimeoutExpired:
        return Result(tests, versions_in(python), failed=[f"the tests: they did not end within {timeout} s"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not report.is_file():
        return Result(tests, installed, failed=[f"the tests: {last_line(done)}"], seconds=seconds)
    passed, skipped, failed = counted(report)
    return Result(tests, installed, passed, skipped, failed, seconds)


def versions_in(python: str) -> dict[str, str]:
    """The versions that an environment has."""
    code = (
        "import json, platform; from importlib.metadata import version;"
        "print(json.dumps({'python': platform.python_version()}"
        " | {name: version(name) for name in ('torch', 'paddlepaddle', 'numpy')}))"
    )
    return json.loads(ran([python, "-c", code]).stdout)


def counted(report: Path) -> tuple[int, int, list[str]]:
    """(how many passed, how many were skipped, "TEST: what it said" of what failed) in pytest's report."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        if problem is not None:
            said = (problem.get("message") or "").strip().splitlines() or ["no message"]
            failed.append(f"{case.get('classname')}::{case.get('name')}: {said[0]}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


def compiled(interpreter: str, work: Path) -> None:
    """Compile the kit's sources and tests; raises UserError for what `interpreter` cannot read."""
    done = ran([interpreter, "-m", "compileall", "-q", "-f", work / "source", work / "tests"])
    if done.returncode:
        raise UserError(f"{interpreter} cannot compile the kit: {last_line(done)}")


# --- the pages


def page(results: Mapping[str, Result], language: str, oldest: str) -> str:
    """The page; `oldest` is the version of the interpreter that compiled all sources."""
    words = WORDS[language]
    run_ones = {name: result for name, result in results.items() if result.installed}
    rows = [row(run_ones[name]) for name in ordered(run_ones)]
    table = [words["head"], "| --- " * 9 + "|", *rows]
    parts = [f"# {words['title']}", words["switch"], words["intro"], "\n".join(table)]
    parts += [f"## {words['limits']}", "\n".join(f"- {line}" for line in words["lines"])]
    failures = [
        f"- {title(COMBINATIONS[name])}: {code(line, LONGEST)}" for name, r in run_ones.items() for line in r.failed
    ]
    refused = [
        f"- {title(COMBINATIONS[name])}: {code(result.why, LONGEST)}" for name, result in results.items() if result.why
    ]
    left = [f"- {title(COMBINATIONS[name])}" for name in ordered(COMBINATIONS) if name not in results]
    for heading, lines in (("failed", failures), ("refused", refused)):
        if lines:
            parts += [f"## {words[heading]}", "\n".join(lines)]
    if left:
        parts += [f"## {words['not run']}", words["static"].format(oldest=oldest), "\n".join(left)]
    return "\n\n".join(parts) + "\n"


def ordered(names: Iterable[str]) -> list[str]:
    """From the oldest PyTorch to the newest, then by PaddlePaddle."""

    def key(name: str) -> tuple:
        versions = (COMBINATIONS[name].torch, COMBINATIONS[name].paddle)
        return tuple([int(part) for part in version.split(".")] for version in versions)

    return sorted(names, key=key)


def row(result: Result) -> str:
    versions = [result.installed[name].partition("+")[0] for name in ("python", "torch", "paddlepaddle", "numpy")]
    counts = (f"`{result.tests}`", result.passed, len(result.failed), result.skipped, result.seconds)
    return f"| {' | '.join([*versions, *map(str, counts)])} |"


def title(combination: Combination) -> str:
    """Its versions in words, the same in every language."""
    names = (f"Python {combination.python}", f"PyTorch {combination.torch}", f"PaddlePaddle {combination.paddle}")
    return ", ".join((*names, f"`numpy{combination.numpy}`"))


def load_results(path: Path) -> dict[str, Result]:
    """The results that were stored, of the combinations that there still are."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {name: Result(**result) for name, result in stored.items() if name in COMBINATIONS}


def main(args: argparse.Namespace) -> int:
    interpreters = find_interpreters(sorted({each.python for each in COMBINATIONS.values()}, key=lambda v: int(v[2:])))
    if args.list:
        for name, each in COMBINATIONS.items():
            print(f"{name:12} {title(each)}: {interpreters.get(each.python, 'no such interpreter')}")
        return 0
    if not interpreters:
        raise UserError("no Python interpreter was found: install python3.9 to python3.13, with pyenv for one")
    output = output_dir(args.output)
    path, failed = output / "versions.json", False
    results = load_results(path)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        wheels, kit = copied_kit(work)
        oldest = next(iter(interpreters))
        compiled(interpreters[oldest], work)
        for name in args.only or COMBINATIONS:
            each = COMBINATIONS[name]
            if each.python not in interpreters:
                print(f"{name}: not run: no Python {each.python} was found")
                failed = failed or bool(args.only)
                continue
            result = tried(each, interpreters[each.python], wheels, kit, args.tests, args.timeout, work)
            print(f"{name}: {result.why or row(result)}", *result.failed, sep="\n  ", flush=True)
            failed = failed or bool(result.failed or result.why)
            results = load_results(path) | {name: result}
            save_text(json.dumps({n: asdict(r) for n, r in results.items()}, indent=1) + "\n", path)
        for language in WORDS:
            output_dir(output / language)
            save_text(page(results, language, oldest), output / language / "versions.md")
    return int(failed)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
