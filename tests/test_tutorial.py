"""The tutorial is true: its commands run, in order, in a copy of the project, and print what the page shows.

How outputs are compared is said on the tutorial's first page. What a page quotes from the code is in the code.
The chapters that run a rung without and with a fault are tests/test_faults.py's, where these runs serve other tests,
too; of them 04 also runs here, as it is typed.
"""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest
import yaml
from exported_models import need
from markdown_pages import ROOT, Block, assert_same_content, blocks
from run_page_code import FRAMEWORKS, program

from maintenance.pages.notebooks import status

LANGUAGES = ROOT / "docs"
ENGLISH = sorted(path.relative_to(ROOT).as_posix() for path in (LANGUAGES / "en").rglob("*.md"))
COMMANDS = {
    name: [line for block in blocks(name) if block.detail == "shell" for line in block.lines] for name in ENGLISH
}
FAULTY = [name for name, lines in COMMANDS.items() if any("tools/inject_fault.py" in line for line in lines)]
CHAPTERS = [name for name, lines in COMMANDS.items() if lines and (name not in FAULTY or "04_" in name)]
MEASURED = 0.01  # the relative difference of two numbers that are measured
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
# How a sum is rounded depends on the processor, its vector instructions and the number of threads. With it go the size
# of what is only rounding; which item of a group is nearest its limit, and all that is said of that one; the place of a
# largest difference, and the two values there; and every limit above 0, which rests on how the reference rounds.
ROUNDING = [
    (re.compile(r"^(  ok .*max\|d\| )\S+(.*)"), r"\1D\2"),
    (re.compile(r"^(  \w+ .*\d items? +max\|d\| )\S+( +limit \S+).*"), r"\1D\2"),
    (re.compile(r"(limit )(?!0\.0e\+00)[\d.e+-]+"), r"\1L"),
    (re.compile(r"(worst at )\(.*?\)(: reference )\S+(, port )[^,]+"), r"\1P\2V\3V"),
]
# How many numbers are outside of a limit, and how many items: measured like the limit.
COUNT = re.compile(r"(?<=outside )\d+|\d+(?= of \d+ (?:items|gradients|parameters))")
TIME = re.compile(r"\d+(?:\.\d+)?(?= (?:s|sec|min|images/sec)\b)|(?<=eta: )[\d:]+")


def copied_project(copy: Path) -> Path:
    """A copy of the project with an environment of its own, in which the installed packages are this one's."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    venv.create(copy / ".venv", symlinks=True)
    (site,) = (copy / ".venv").glob("lib/python*/site-packages")
    (installed,) = (Path(path) for path in sys.path if path.endswith("site-packages"))
    own = [copy, copy / "sturdyio" / "src", copy / "portproof" / "src"]
    (site / "project.pth").write_text("\n".join(map(str, [*own, installed])) + "\n")
    # What shell/setup.sh leaves when all is installed.
    files = "requirements.txt sturdyio/pyproject.toml portproof/pyproject.toml pyproject.toml"
    state = f'cd "{copy}" && {{ .venv/bin/python -V && echo "{copy}" && cat {files}; }} | cksum'
    stamp = subprocess.run(["sh", "-c", state], capture_output=True, text=True, check=True).stdout
    (copy / ".venv" / "setup.stamp").write_text(stamp)
    return copy


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copied_project(tmp_path / "project")


def environment(project: Path) -> dict[str, str]:
    path = os.pathsep.join([str(project / ".venv" / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    rest = {name: value for name, value in os.environ.items() if name not in ("VENV", "PYTHONPATH")}
    # Without the filter Paddle would speak of a compiler cache that it does not find.
    own = {"PATH": path, "LC_ALL": "C.UTF-8", "PYTHONWARNINGS": "ignore::UserWarning"}
    return rest | own


# What Paddle says where OMP_NUM_THREADS asks for more threads than one, as some of the tests' own settings do.
OF_THREADS = ("WARNING: OMP_NUM_THREADS set to", "PLEASE USE OMP_NUM_THREADS WISELY.")


@pytest.mark.thorough(
    "test_the_tutorial_shows_what_the_rung_says; of 07 and 08 test_the_float64_half_passes and "
    "the kit's test_right_runs_pass; what else is typed: test_readme, test_align_command"
)
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_commands_print_what_the_page_shows(chapter, project):
    if "/deploy" in chapter:
        need("deploy", "onnx", "onnxruntime", "paddle2onnx")
    run_page(project, chapter, "shell")


SCRIPTED = [name for name in ENGLISH if any(block.detail == "bash" for block in blocks(name))]


@pytest.mark.thorough("test_code_of_the_page_holds; test_train_dist_trains starts processes as chapter 08 does")
@pytest.mark.parametrize("chapter", SCRIPTED)
def test_scripts_print_what_the_page_shows(chapter, tmp_path):
    """Scripts that a page writes and that need nothing of the project: those of blocks that say `bash`."""
    run_page(tmp_path, chapter, "bash")


def test_a_workflow_runs_what_the_page_runs():
    page = "docs/en/ship_recordings.md"
    (workflow,) = (block for block in blocks(page) if block.detail == "yaml")
    (*_, install, test, artifact) = yaml.safe_load("\n".join(workflow.lines))["jobs"]["proof"]["steps"]
    assert install["run"].startswith("pip install ") and test["run"] in COMMANDS[page]
    assert artifact["with"]["path"] in test["run"]


def run_page(project: Path, chapter: str, language: str) -> None:
    page = blocks(chapter)
    for number, block in enumerate(page):
        comment = page[number - 1].lines[0] if page[number - 1].kind == "comment" else ""
        if written := re.fullmatch(r"<!-- write: (\S+) -->", comment):
            (project / written[1]).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
        elif filled := re.fullmatch(r"<!-- fill in: (\S+) -->", comment):
            fill_in(project / filled[1], block.lines)
        elif block.detail == language and not comment.startswith("<!-- not run: "):
            follows = page[number + 1] if number + 1 < len(page) else Block("", "", [])
            run_block(project, block.lines, follows.lines if follows.detail == "text" else None)


def fill_in(script: Path, lines: list[str]) -> None:
    """Put the lines in the place of the script's functions and constants that have the names they define."""
    text = script.read_text(encoding="utf-8").splitlines()
    given = {name for node in ast.parse("\n".join(lines)).body for name in defined(node)}
    old = [node for node in ast.parse("\n".join(text)).body if not is_import(node) and given & defined(node)]
    assert old, f"{script} has none of {sorted(given)}"
    for node in reversed(old):
        text[node.lineno - 1 : node.end_lineno] = lines if node is old[0] else []
    script.write_text("\n".join(text) + "\n", encoding="utf-8")


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement of a module gives a value."""
    if is_import(node):
        return {alias.asname or alias.name for alias in node.names}
    targets = getattr(node, "targets", [])
    return {ast.unparse(target) for target in targets} | {getattr(node, "name", "")} - {""}


def run_block(project: Path, commands: list[str], shown: list[str] | None) -> None:
    """Run the commands as a reader types them; the last one's exit status is what its output says."""
    done = subprocess.run(
        ["bash", "-c", "\n".join(commands)],
        cwd=project,
        env=environment(project),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    lines = (line.split("\r")[-1] for line in done.stdout.splitlines())
    printed = "\n".join(line for line in lines if not line.startswith(OF_THREADS))
    expected = status(shown or [])
    assert done.returncode == expected, f"{commands} ended with {done.returncode}, not {expected}:\n{printed[-6000:]}"
    if shown is not None:
        problem = mismatch(shown, printed.splitlines())
        assert not problem, f"{commands}: {problem}\n{printed[-6000:]}"


def mismatch(shown: list[str], printed: list[str]) -> str:
    """What of the shown lines is not among the printed ones, in order; "" if all are."""
    position, gap = 0, False
    for line in shown:
        if line == "...":
            gap = True
            continue
        ends = range(position, len(printed)) if gap else range(position, min(position + 1, len(printed)))
        found = next((i for i in ends if same_line(line, printed[i])), None)
        if found is None:
            return (
                f"line {line!r} is not printed{' from here on' if gap else ' here'}: {printed[position : position + 3]}"
            )
        position, gap = found + 1, False
    return "" if gap or position == len(printed) else f"more is printed than shown: {printed[position : position + 3]}"


def same_line(shown: str, printed: str) -> bool:
    """Whether a printed line is the shown one; a shown line may break off with ` ...`."""
    if shown.endswith(" ..."):
        shown = shown.removesuffix(" ...")
        return same_line(shown, printed[: len(shown)])
    one, other = (without_rounding(TIME.sub("T", line)) for line in (shown, printed))
    if [" ".join(part.split()) for part in NUMBER.split(one)] != [
        " ".join(part.split()) for part in NUMBER.split(other)
    ]:
        return False
    counts = {match.start() for match in COUNT.finditer(one)}
    pairs = zip(NUMBER.finditer(one), NUMBER.finditer(other), strict=True)
    return all(same_number(a[0], b[0], a.start() in counts) for a, b in pairs)


def without_rounding(line: str) -> str:
    for pattern, kept in ROUNDING:
        line = pattern.sub(kept, line)
    return line


def same_number(shown: str, printed: str, is_count: bool) -> bool:
    if shown == printed or (re.fullmatch(r"-?\d+", shown) and not is_count):
        return shown == printed
    return math.isclose(float(shown), float(printed), rel_tol=MEASURED)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (["a 1", "..."], ["a 1", "b", "c"], True),
        (["a 1"], ["a 1", "b"], False),
        (["...", "c"], ["a", "b", "c"], True),
        (["a", "c"], ["a", "b", "c"], False),
        (["a 1"], ["a 2"], False),
        (["a 1.00"], ["a 1.001"], True),
        (["a 1.00"], ["a 1.02"], False),
        # what is only rounding, and the item of a group that is nearest its limit
        (
            ["  ok x 3 items max|d| 1.0e-15 limit 1.0e-12 at y"],
            ["  ok x 3 items max|d| 0.0e+00 limit 3.0e-15 at z"],
            True,
        ),
        (
            ["  ok x 3 items max|d| 1.0e-15 limit 1.0e-12 at y"],
            ["  ok x 4 items max|d| 1.0e-15 limit 1.0e-12 at y"],
            False,
        ),
        (
            ["  ok x 3 items max|d| 1.0e-15 limit 1.0e-12 at y"],
            ["  FAIL x 3 items max|d| 1.0e-15 limit 1.0e-12 at y"],
            False,
        ),
        (
            ["  ok x 3 items max|d| 1.0e-15 limit 1.0e-12 at y"],
            ["  ok w 3 items max|d| 1.0e-15 limit 1.0e-12 at y"],
            False,
        ),
        (
            ["  FAIL x 2 of 3 items max|d| 1.0e-05 limit 1.0e-12 outside 9/9 (100.0%) at y"],
            ["  FAIL x 2 of 3 items max|d| 7.0e-01 limit 2.0e-10 outside 4/8 (50.0%) at z"],
            True,
        ),
        (
            ["  FAIL x 2 of 3 items max|d| 1.0e-05 limit 1.0e-12 outside 9/9 (100.0%) at y"],
            ["  FAIL x 1 of 3 items max|d| 1.0e-05 limit 1.0e-12 outside 9/9 (100.0%) at y"],
            False,
        ),
        # one item: what a fault makes of it, and a derived limit, 0
        (["  ok x 3x3 max|d| 1.0e-15 limit 1.0e-12"], ["  ok x 3x3 max|d| 2.0e-15 limit 9.0e-10"], True),
        (["  ok x 3x3 max|d| 1.0e-15 limit 1.0e-12"], ["  ok x 3x4 max|d| 1.0e-15 limit 1.0e-12"], False),
        (["  ok x 3x3 max|d| 0.0e+00 limit 0.0e+00"], ["  ok x 3x3 max|d| 0.0e+00 limit 1.0e-12"], False),
        (["  ok x 3x3 max|d| 1.0e-15 limit 1.0e-12"], ["  ok x 3x3 max|d| 0.0e+00 limit 0.0e+00"], False),
        (["  FAIL x 3x3 max|d| 1.0e-05 limit 1.0e-12"], ["  FAIL x 3x3 max|d| 1.0e-05 limit 2.0e-15"], True),
        (["  FAIL x 3x3 max|d| 1.0e-05 limit 1.0e-12"], ["  FAIL x 3x3 max|d| 2.0e-05 limit 1.0e-12"], False),
        (
            ["first difference: x: max|d| 1.0e-05 limit 1.0e-12"],
            ["first difference: x: max|d| 1.0e-05 limit 2.0e-12"],
            True,
        ),
        (
            ["first difference: x: max|d| 1.0e-05 limit 1.0e-12"],
            ["first difference: y: max|d| 1.0e-05 limit 1.0e-12"],
            False,
        ),
        (
            ["  max|d| 1.0e-05, limit 1.0e-12, outside 16 of 16"],
            ["  max|d| 1.0e-05, limit 3.0e-12, outside 16 of 16"],
            True,
        ),
        (
            ["  max|d| 1.0e-05, limit 1.0e-12, outside 16 of 16"],
            ["  max|d| 1.0e-05, limit 1.0e-12, outside 15 of 16"],
            False,
        ),
        (
            ["  max|d| 1.0e-05, limit 1.0e-12, outside 200 of 999"],
            ["  max|d| 1.0e-05, limit 1.0e-12, outside 201 of 999"],
            True,
        ),
        (
            ["  max|d| 1.0e-05, limit 1.0e-12, outside 200 of 999"],
            ["  max|d| 1.0e-05, limit 1.0e-12, outside 200 of 998"],
            False,
        ),
        (
            ["  worst at (1, 2): reference 1.5, port -2e-05, 4.5e-04 of the largest value"],
            ["  worst at (3, 0): reference 7.5, port 1.25, 4.5e-04 of the largest value"],
            True,
        ),
        (
            ["  worst at (1, 2): reference 1.5, port -2e-05, 4.5e-04 of the largest value"],
            ["  worst at (1, 2): reference 1.5, port -2e-05, 4.5e-03 of the largest value"],
            False,
        ),
        (["  worst: reference 16.0, port 15.0"], ["  worst: reference 16.0, port 14.0"], False),
        (["FAIL x: 125 of 999 items outside, first y"], ["FAIL x: 126 of 999 items outside, first y"], True),
        (["FAIL x: 125 of 999 items outside, first y"], ["FAIL x: 127 of 999 items outside, first y"], False),
        (["FAIL x: 125 of 999 items outside, first y"], ["FAIL x: 125 of 999 items outside, first z"], False),
        (["PASS x: all 999 items"], ["PASS x: all 998 items"], False),
        (["took 3.1 s"], ["took 99.0 s"], True),
        (["error: this ..."], ["error: this and that"], True),
    ],
)
def test_outputs_are_compared_as_the_first_page_says(shown, printed, same):
    assert (mismatch(shown, printed) == "") is same


QUOTES = [
    (name, comment.lines[0].split()[2], block)
    for name in ENGLISH
    for comment, block in zip(blocks(name), blocks(name)[1:], strict=False)
    if comment.kind == "comment" and comment.lines[0].startswith("<!-- from: ")
]


@pytest.mark.parametrize(("chapter", "source", "block"), QUOTES, ids=[f"{name}-{source}" for name, source, _ in QUOTES])
def test_code_is_quoted_from_the_source(chapter, source, block):
    lines = textwrap.dedent("\n".join(block.lines)).splitlines()
    code = (ROOT / source).read_text(encoding="utf-8").splitlines()
    windows = (code[i : i + len(lines)] for i in range(len(code) - len(lines) + 1))
    assert any(textwrap.dedent("\n".join(window)).splitlines() == lines for window in windows)


# The FAQ's code has tests of its own.
CODE = [name for name in ENGLISH if "/faq/" not in name and any(program(name, framework) for framework in FRAMEWORKS)]


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory) -> dict[tuple[str, str], str]:
    """The traceback of each framework's program of each page that this session tests, by page and framework."""
    wanted = {item.callspec.params.get("coded") for item in request.session.items if hasattr(item, "callspec")}
    folder, found = tmp_path_factory.mktemp("code"), {}
    for framework in FRAMEWORKS:
        pages = [name for name in CODE if name in wanted and program(name, framework)]
        command = [sys.executable, str(ROOT / "tests" / "run_page_code.py"), framework, str(folder), *pages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        died = f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
        found |= {(name, framework): died for name in pages}
        said = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {(line["page"], framework): line["error"] for line in said}
    return found


@pytest.mark.parametrize("coded", CODE)
def test_code_of_the_page_holds(errors, coded):
    """What it asserts is so; the program of the port finds what the reference's has written."""
    for framework in FRAMEWORKS:
        assert not errors.get((coded, framework)), errors[coded, framework]


def test_comments_are_known():
    """A misspelt one would leave a command out."""
    for name in ENGLISH:
        for block in blocks(name):
            if block.kind == "comment":
                assert re.fullmatch(
                    r"<!-- (?:(?:write|fill in|from): \S+|run: both|not run: \S.*) -->", " ".join(block.lines)
                ), name


@pytest.mark.parametrize("english", ENGLISH)
def test_both_languages_say_the_same(english):
    assert_same_content(english, english.replace("docs/en/", "docs/zh/"))


def test_no_line_breaks_within_chinese():
    """They would be shown as blanks between the words."""
    for path in sorted((LANGUAGES / "zh").rglob("*.md")):
        for block in blocks(path.relative_to(ROOT).as_posix()):
            if block.kind == "text" and not block.lines[0].startswith(":::"):
                assert all(re.match(r"\s*(?:[-*]|\d+\.) ", line) for line in block.lines[1:]), (path, block.lines)


def test_no_page_is_in_one_language_only():
    chinese = sorted(path.relative_to(LANGUAGES / "zh").as_posix() for path in (LANGUAGES / "zh").rglob("*.md"))
    assert [name.removeprefix("docs/en/") for name in ENGLISH] == chinese
