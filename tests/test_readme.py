"""The READMEs: what they name exists, what they show is what the programs say, and both say the same.

Measured differences are not measured again, which would take a run of all steps, but are held against their limits.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest
from markdown_pages import ROOT, Block, assert_same_content, blocks, links, spans
from test_faults import FAULTS, QUICK, SAMPLE, TUTORIALS

from mobilenetv3_common import arguments
from mobilenetv3_ref.models import MODELS
from portproof.__main__ import COMMANDS
from portproof.backends import backend
from portproof.backends.trace import output_item
from portproof.compare import FAIL, PASS, Item, Row, Verdict, Worst, tensor_item
from portproof.localize.locate import Location
from portproof.report.text import first_difference

ENGLISH, CHINESE = "README.md", "README_cn.md"
PROJECT = "docs/en/project.md"  # where the README goes on

# What the text leaves out of a path: it speaks of the port's files, of an image folder's, of scripts.
BASES = ("", "docs/en", "mobilenetv3_paddle", "mobilenetv3_paddle/models", "lite_data", "shell")
# Not in the repository: the project's commands write it, or the reader fetches it.
ELSEWHERE = {
    "/proc/driver/nvidia",
    "/dev/nvidia0",
    "result/log/*_diff.log",
    "result/report.html",
    "result/summary.json",
    "site/",
    "checkpoint.pdparams",
    "model_EPOCH.pdparams",
    "mobilenet_v3_small-047dcff4.pth",
    "mobilenet_v3_large-8738ca79.pth",
}
# What a shell script passes its flags on to.
BEHIND = {
    "shell/run_steps.sh": "python steps/run_all.py",
    "shell/train.sh": "python -m mobilenetv3_paddle.train --data-path lite_data",
    "shell/train_dist.sh": "python -m mobilenetv3_paddle.train --data-path lite_data",
    "shell/train_official.sh": "python -m mobilenetv3_paddle.train",
    "shell/train_simple.sh": "python -m mobilenetv3_paddle.train",
    "shell/test.sh": None,  # pytest
}
PIP_FLAGS = {"--index-url"}
RENAMED = ["before", "now"]


def all_blocks() -> list[Block]:
    """Those of the README and of the page on which it goes on."""
    return [*blocks(ENGLISH), *blocks(PROJECT)]


def prose() -> str:
    """All English text but the code blocks, whose content `code` gives, and the table of names that are no more."""
    shown = [block for block in all_blocks() if block.kind != "code" and block.cells[0] != RENAMED]
    return "\n".join(" ".join(block.lines) for block in shown)


def code(beginning: str) -> list[list[str]]:
    """The lines of the code blocks that hold a line with this beginning."""
    found = [block.lines for block in all_blocks() if block.kind == "code"]
    found = [lines for lines in found if any(line.startswith(beginning) for line in lines)]
    assert found, f"no code block has a line that begins {beginning!r}"
    return found


def table(first_cell: str) -> list[list[str]]:
    """The rows of the table whose first row's first cell begins so, without the two lines of its head."""
    tables = [block.cells[2:] for block in all_blocks() if block.kind == "table"]
    return next(rows for rows in tables if rows[0][0].startswith(first_cell))


def commands() -> list[str]:
    """Every command of the project's own, in the order of the text."""
    shell = [line for block in all_blocks() if block.detail == "shell" for line in block.lines]
    return [line for line in shell + spans(prose()) if line.startswith(("python ", "sh "))]


@cache
def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"readme_{Path(path).stem}", ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where a dataclass looks for it
    spec.loader.exec_module(module)
    return module


def portproof_command(name: str) -> ModuleType:
    assert name in COMMANDS
    return importlib.import_module(f"portproof.commands.{name}")


def options(*paths: str) -> set[str]:
    """The flags of these scripts."""
    return {flag for path in paths for flag in script(path).get_args_parser()._option_string_actions}


def test_both_languages_say_the_same():
    """Same blocks in the same order, with the same code, names, links and numbers in each cell and paragraph."""
    assert_same_content(ENGLISH, CHINESE)


@pytest.mark.parametrize("readme", [ENGLISH, CHINESE])
def test_the_readme_is_two_screens(readme):
    """Of 50 lines at 120 characters, pictures aside."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100


def test_each_links_to_the_other():
    assert f"[中文版]({CHINESE})" in blocks(ENGLISH)[1].lines[-1]
    assert f"[English]({ENGLISH})" in blocks(CHINESE)[1].lines[-1]


def test_what_is_named_exists():
    """Files, folders, modules, and what a path names behind a colon."""
    path = r"([\w.*-]*/[\w./*-]*|[\w.-]+\.(?:py|sh|md|txt|pth|pdparams))(?::(\w+))?"
    module = r"(mobilenetv3_\w+(?:\.\w+)*)()"
    named = [link for link in links(prose()) if not link.startswith("http")] + spans(prose())
    found = [match for name in named if (match := re.fullmatch(path, name) or re.fullmatch(module, name))]
    assert {match[1] for match in found} > ELSEWHERE, "ELSEWHERE lists what the text no longer names"
    for match in found:
        if match[1] in ELSEWHERE:
            continue
        relative = match[1] if match.re.pattern == path else match[1].replace(".", "/")
        places = [ROOT / base / relative for base in BASES if (ROOT / base / relative).exists()]
        assert places, f"{match[0]} does not exist"
        if match[2]:
            assert re.search(rf"^(class|def) {match[2]}\b", places[0].read_text(encoding="utf-8"), re.M), match[0]


def test_renamed_things_have_their_new_names_only():
    tables = [block.cells for block in blocks("CHANGELOG.md") if block.kind == "table"]
    (rows,) = [cells[2:] for cells in tables if cells[0] == RENAMED]
    before, now = (" ".join(row[column] for row in rows) for column in (0, 1))
    scripts = re.findall(r"`python (tools/\w+\.py)`", before)
    assert len(scripts) > 5
    for path in scripts:
        assert not (ROOT / path).exists()
        if path.removeprefix("tools/") not in ("locate.py", "compare_records.py"):
            assert len(list((ROOT / "maintenance").glob(f"*/{Path(path).name}"))) == 1
    assert not (ROOT / "reprod").exists()
    assert all(name in COMMANDS for name in re.findall(r"`portproof (\w+)", now))
    for name in re.findall(r"`(portproof(?:\.\w+)?|mobilenetv3_common|maintenance\.pages)`", now):
        importlib.import_module(name)
    flags = {flag for name in COMMANDS for flag in portproof_command(name).get_args_parser()._option_string_actions}
    assert set(re.findall(r"--[\w-]+", now)) - flags == {"--truth"}


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_run_scripts_that_know_their_flags(command):
    words = shlex.split(command)
    if words[0] == "sh":
        assert (ROOT / words[1]).is_file()
        if BEHIND[words[1]] is None:
            assert words[2:] in ([], ["--all"], ["-m", "gpu", "-rs"])
            return
        words = shlex.split(BEHIND[words[1]]) + words[2:]
    if words[1:3] == ["-m", "portproof"]:
        if not words[3:]:
            return
        parser, words = portproof_command(words[3]).get_args_parser(), words[4:]
    elif words[1] == "-m":
        assert (ROOT / words[2].replace(".", "/") / "__main__.py").is_file()
        main = importlib.import_module(f"{words[2]}.__main__")
        own = getattr(main, "get_args_parser", lambda: arguments.get_args_parser(words[2], "PaddlePaddle"))
        parser, words = own(), words[3:]
    else:
        parser, words = script(words[1]).get_args_parser(), words[2:]
    try:
        parser.parse_args(words)
    except SystemExit as stop:  # --help ends with 0, a mistake with 2
        assert stop.code == 0


def test_flags_and_variables_are_known():
    steps = options("steps/run_all.py", *(f"steps/{name}.py" for name in script("steps/run_all.py").RUNGS))
    train = set(arguments.get_args_parser("train", "")._option_string_actions)
    tools = [f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")]
    known = steps | train | PIP_FLAGS | options(*tools, "maintenance/benchmarks/benchmark.py")
    known |= {flag for name in COMMANDS for flag in portproof_command(name).get_args_parser()._option_string_actions}
    known.add("--all")  # the tests'
    flags = {word for span in spans(prose()) for word in span.split() if word.startswith("--")}
    assert flags and not flags - known
    listed = next(block for block in all_blocks() if "Flags:" in block.cells[0][0])
    assert {span.partition(" ")[0] for span in spans(listed.cells[0][0]) if span.startswith("--")} == steps - {"-h"}

    shell = "".join(path.read_text() for path in (ROOT / "shell").glob("*.sh"))
    variables = re.findall(r"`([A-Z]+)=", prose())
    assert variables and not [name for name in variables if f"${{{name}:-" not in shell]


def test_diff_is_the_diff():
    if shutil.which("diff") is None:
        pytest.skip("this machine has no diff command")
    ((prompt, *shown),) = code("$ diff ")
    command = prompt.removeprefix("$ ").split()
    real = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert shown == real.splitlines()
    counts = {len((ROOT / path).read_text().splitlines()) for path in command[1:]}
    assert counts == {int(re.search(r"of (\d+) lines", prose())[1])}


def test_failing_reports_are_as_the_program_prints_them():
    """The first failing item is taken out of each report and reported again: layout, layer type and causes."""
    types = backend("torch").layers.types(MODELS["mobilenet_v3_small"]())
    reports = code("first difference: ")
    assert len(reports) == 2
    for lines in reports:
        name, limit = re.search(r"difference: (\S+?)(?: \(\w+\))?: .* limit (\S+)", lines[0]).groups()
        outside, size = map(int, re.search(r"outside (\d+)/(\d+)", lines[0]).groups())
        place = r"at \((.*?),?\): reference (\S+), port (\S+), (\S+) of the largest value"
        index, ref, port, share = re.search(place, lines[1]).groups()
        worst = Worst(tuple(map(int, index.split(","))), float(ref), float(port), outside, size)
        difference = abs(worst.ref - worst.port)
        item = output_item(name, "logits") if name in types else tensor_item(name, "buffer")
        row = Row(item, FAIL, (), difference, float(limit), difference / float(share), worst=worst)
        before = [Row(Item(""), PASS)] * int(re.search(r"before it agree \((\d+)\)", lines[2])[1])
        assert lines[:4] == first_difference(Verdict("", [*before, row]), types)
        if lines[4:]:
            assert lines[4] == "..." and re.fullmatch(rf"FAIL \w+: {name} \(.* items outside their limits", lines[-1])


def test_locations_are_as_the_program_prints_them():
    """Each is taken apart and put together again; that the faults are located there is the business of other tests."""
    shown = [line for lines in code("located: ") for line in lines]
    starts = [i for i, line in enumerate(shown) if line.startswith("located: ")]
    assert len(starts) == 2
    head = r"located: (\S+) \((\w+)\), the port's (\S+) \((\w+)\): (\w+)"
    for start in starts:
        name, kind, port_name, port_kind, phase = re.fullmatch(head, shown[start]).groups()
        inner = [line[2:] for line in takewhile(lambda line: line.startswith("  "), shown[start + 1 :])]
        causes = [line.removeprefix("cause, tested: ") for line in inner if line.startswith("cause, tested: ")]
        proof = [line for line in inner if not line.startswith("cause, tested: ")]
        location = Location(name, kind, phase, port_name, port_kind, proof=proof, diagnosis=causes)
        assert location.lines() == shown[start : start + 1 + len(inner)]
    also = re.search(
        r"also at fault by itself: (\S+) \((\w+)\) and (\d+) more of that kind: (\w+): (.*)", "\n".join(shown)
    )
    name, kind, more, phase, cause = also.groups()
    others = [Location(name, kind, phase, diagnosis=[cause])] * (int(more) + 1)
    assert Location("", "", "", also=others).lines()[-1] == also[0]


def test_ladder_is_that_of_run_all():
    run_all = script("steps/run_all.py")
    ((*rows, results, report, last),) = code("PASS ladder")
    small, large = arguments.MODEL_NAMES
    rungs = [(name, small) for name in run_all.RUNGS]
    rungs += [(name, large) for name in run_all.RUNGS if name not in run_all.ONCE]
    for row, (name, model) in zip(rows, rungs, strict=True):
        assert row == f"  {'PASS':<8} {name:<17} {model:<19} {float(row.split()[-2]):5.1f} s"
    assert re.fullmatch("results and logs: /.*/result", results) and last == "PASS ladder"
    assert re.fullmatch("report: /.*/result/report.html", report)

    steps = table("`python steps/")
    assert [row[0] for row in steps] == [f"`python steps/{name}.py`" for name in run_all.RUNGS]
    assert [row[-1] for row in steps] == [f"`PASS {name}: ...`" for name in run_all.RUNGS]


def test_versions_are_the_pinned_ones():
    text = " ".join(" ".join((ROOT / name).read_text(encoding="utf-8") for name in (ENGLISH, PROJECT)).split())
    names = "torch|torchvision|paddlepaddle"
    pinned = set(re.findall(rf"^({names})==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M))
    assert set(re.findall(rf"\b({names})(?:-gpu)?(?: |==)(\d+\.\d+\.\d+)", text.lower())) == pinned

    project = (ROOT / "pyproject.toml").read_text()
    low, high = map(int, re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project).groups())
    assert f"Python 3.{low} to 3.{high - 1}" in text


def test_counts_are_those_of_the_code():
    def said(pattern: str) -> set[str]:
        return set(re.findall(pattern, prose()))

    setup, train = ((ROOT / "shell" / name).read_text() for name in ("setup.sh", "train_common.sh"))
    assert said(r"(\d+) of the (\d+) porting faults") == {(str(len(QUICK)), str(len(FAULTS)))}
    assert said(r"(\d+) of the faults") == {str(len(SAMPLE) + len(TUTORIALS))}
    assert said(r"(\d+) iterations of RMSprop") == {str(script("steps/05_test_backward.py").ITERATIONS)}
    assert said(r"fetches (\d+ GB)") == set(re.findall(r"(\d+ GB) to download", setup))
    assert said(r"installs (\d+ GB)") == set(re.findall(r"(\d+ GB) on disk", setup))
    assert said(r"train on `lite_data/` for (\d+) epochs") == set(re.findall(r"--epochs (\d+)", train))
    (photographs,) = said(r"(\d+ \+ \d+) photographs")
    assert photographs == " + ".join(str(len(list((ROOT / "lite_data" / s).glob("*/*")))) for s in ("train", "val"))


def test_measured_differences_are_within_their_limits():
    limit, below = None, []
    for _, small, large, text in table("logits"):
        if text != "the same":
            number = re.match(r"(\d\S*?)(?:[:,]|$)", text)
            limit = float(number[1]) if number else None
        if limit is not None:
            below += [float(small) <= limit, float(large) <= limit]
    assert len(below) == 8 and all(below)


def test_weights_and_predictions_are_made_as_shown(tmp_path, monkeypatch, capsys):
    """The commands of both sections, one after the other, from a folder that holds lite_data alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lite_data").symlink_to(ROOT / "lite_data")
    printed = {}
    made = ("make_probe_weights", "convert_weights", "predict")
    for command in [
        command for command in commands() if command.startswith(tuple(f"python tools/{m}.py" for m in made))
    ]:
        path, *words = shlex.split(command)[1:]
        assert not script(path).main(script(path).get_args_parser().parse_args(words))
        printed[command] = capsys.readouterr().out.splitlines()

    ((image, lines),) = [(command.split()[-1], lines) for command, lines in printed.items() if ".JPEG" in command]
    assert f"`{lines[-1]}`" in prose()
    class_id, probability = re.fullmatch(r"class_id: (\d+), prob: (\S+)", lines[-1]).groups()
    (other,) = [line for lines in printed.values() for line in lines if line.startswith(f"{image}: ")]
    assert re.match(rf"{image}: {class_id} [^,]* {probability},", other)


@pytest.mark.thorough("test_each_package_stands_alone")
def test_the_port_can_be_shipped_alone(tmp_path):
    """What the text keeps, and nothing else, trains and predicts where neither torch nor the reference is."""
    (said,) = [block.cells[0][0] for block in all_blocks() if "ship it alone" in block.cells[0][0]]
    kept = [name for name in spans(said) if "/" in name or "." in name]
    listed = subprocess.run(["git", "ls-files", *kept], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {name.split("/")[0] for name in kept}
    # and whatever of the project is not kept, installed or not
    foreign = ["torch", "torchvision", "reprod_log", "portproof"]
    foreign += [path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()]
    blocked = [name for name in foreign if not (tmp_path / name).is_dir()]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n")
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}:{tmp_path / 'sturdyio' / 'src'}"}
    data = str(ROOT / "lite_data")
    train = ["-m", "mobilenetv3_paddle.train", "--data-path", data, "--epochs", "1", "--batch-size", "8"]
    predict = [
        "tools/predict.py",
        "--framework",
        "paddle",
        "--weights",
        "out/model_0.pdparams",
        "--input",
        f"{data}/val",
    ]
    for words in (["-c", "import sturdyio; print(sturdyio.__file__)"], [*train, "--output-dir", "out"], predict):
        command = [sys.executable, "-W", "ignore", *words]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert words[0] != "-c" or done.stdout.startswith(str(tmp_path))


def test_the_difference_between_two_libraries_is_found_as_shown(capsys):
    (command,) = [command for command in commands() if "--locate-only" in command]
    align = portproof_command("align")
    assert align.main(align.get_args_parser().parse_args(shlex.split(command)[4:])) == 1
    printed = capsys.readouterr().out.splitlines()
    (shown,) = [lines for lines in code("located: ") if lines[0].startswith("located: ")]
    assert shown == printed[printed.index(shown[0]) :][: len(shown)]
