"""The rungs must fail: each fault of the gallery is caught by its rung, which names what is wrong, and the docs say so.

Here a sample is tried, on the rung that should catch it; `python maintenance/checks/fault_gallery.py` tries all, and
those below it. The tutorial's faults are of the sample: what the rungs print, without and with them, is what its pages
show.
"""

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from markdown_pages import blocks, spans
from test_tutorial import mismatch

from maintenance.checks import gallery
from maintenance.checks.gallery import AREAS, load_faults
from portproof.compare import FAIL, PASS
from sturdyio.cli import UserError

ROOT = Path(__file__).resolve().parents[1]
FAULTS = load_faults(gallery.FAULTS)
LANGUAGES = ("en", "zh")
DOCS = {
    language: (ROOT / "docs" / language / "fault_gallery.md").read_text(encoding="utf-8").splitlines()
    for language in LANGUAGES
}
BY_AREA = [[fault for fault in FAULTS if fault.area == area] for area in AREAS]
NAMED = {fault.name: fault for fault in FAULTS}
INJECT = re.compile(r'python tools/inject_fault.py "(.*)" (broken/\d\d)')
PAGES = sorted((ROOT / "docs" / "en").glob("0*.md"))
TUTORIALS = {NAMED[name]: path for path in PAGES for name, _ in INJECT.findall(path.read_text(encoding="utf-8"))}
# Rungs 07 and 08 take minutes: their pages' commands run once, in test_tutorial.py, as they are typed.
SHORT = [fault for fault in TUTORIALS if fault.rung < "07"]
QUICK = ("batch-norm momentum copied", "the framework's own RMSProp")
ALL_AREAS = pytest.mark.thorough("test_the_tutorial_shows_what_the_rung_says has faults of rungs 01 and 05")
IN_TUTORIAL = {fault.area for fault in TUTORIALS}
# With the tutorial's at least one of each area.
SAMPLE = [faults[0] for faults in BY_AREA if faults[0].area not in IN_TUTORIAL]


VALID = {
    "name": "a fault",
    "area": "model",
    "stands_for": "A mistake.",
    "stands_for_zh": "一个错误。",
    "issue": "",
    "rung": "01_test_forward",
    "file": "models/mobilenet_v3.py",
    "right": "epsilon=1e-3",
    "wrong": "epsilon=1e-5",
    "expected": r"features\.0\.1",
}


def load_tool(path: str = "maintenance/checks/fault_gallery.py") -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tried(request) -> tuple[dict[str, gallery.Run], dict[str, gallery.Outcome]]:
    """Runs without a fault, by rung, and with each of the selected ones; raises where one without does not pass."""
    items = [item for item in request.session.items if item.path == request.path and "tried" in item.fixturenames]
    chosen = [item.callspec.params["fault"] for item in items]
    controls, found = gallery.run_gallery(chosen, {fault.rung for fault in chosen}, jobs=2, below=False)
    return controls, {outcome.fault.name: outcome for outcome in found}


def assert_caught(outcome: gallery.Outcome) -> None:
    assert not outcome.problem
    assert outcome.rung == outcome.fault.rung
    for language in LANGUAGES:
        assert load_tool().row(outcome, language) in DOCS[language], "run maintenance/checks/fault_gallery.py"


@pytest.mark.timeout(1200)  # they all run before the first of these
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault.name in QUICK else ALL_AREAS, id=fault.name) for fault in SHORT]
)
def test_the_tutorial_shows_what_the_rung_says(tried, fault, tmp_path, monkeypatch, capsys):
    """Of the port, and of the port with the page's fault, which the page puts there with tools/inject_fault.py."""
    controls, outcomes = tried
    assert_caught(outcomes[fault.name])
    page = blocks(TUTORIALS[fault].relative_to(ROOT).as_posix())
    shell = [
        (block.lines, shown.lines) for block, shown in zip(page, page[1:], strict=False) if block.detail == "shell"
    ]
    (right, passes), (wrong, fails) = shell
    name, folder = INJECT.fullmatch(wrong[0]).groups()
    command = " ".join(["python", f"steps/{fault.rung}.py", *gallery.FLAGS.get(fault.rung, [])])
    assert (right, wrong[1:], name) == ([command], [f"PYTHONPATH={folder} {command}"], fault.name)

    assert mismatch(passes, controls[fault.rung].output.splitlines()) == ""
    monkeypatch.chdir(tmp_path)
    tool = load_tool("tools/inject_fault.py")
    assert tool.main(tool.get_args_parser().parse_args([name, folder])) == 0
    assert mismatch(fails, [*capsys.readouterr().out.splitlines(), *outcomes[name].output.splitlines()]) == ""


@ALL_AREAS
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.name)
def test_the_rung_fails_and_names_the_fault(tried, fault):
    """With the tutorial's one of each area; `maintenance/checks/fault_gallery.py --check` tries all, in 25 minutes."""
    assert_caught(tried[1][fault.name])


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_docs_list_the_whole_gallery(language):
    heads = ("| fault ", "| 错误 ", "| ---")
    shown = [line for line in DOCS[language] if line.startswith("| ") and not line.startswith(heads)]
    tool = load_tool()
    said = {"en": lambda f: f.stands_for, "zh": lambda f: f.stands_for_zh}[language]
    begun = [f"| {f.name} | {tool.edit(f, language)} | {said(f)} |" for faults in BY_AREA for f in faults]
    assert len(shown) == len(begun) and all(map(str.startswith, shown, begun))


def test_the_docs_count_the_whole_gallery():
    """In English; tests/test_tutorial.py compares the numbers of both languages."""
    count, located = len(FAULTS), sum(fault.area in gallery.LOCATED_AREAS for fault in FAULTS)
    assert f"- {count} faults in {len(AREAS)} areas" in DOCS["en"] and f"- {count} caught" in DOCS["en"]
    assert f"- {located} of the {located} in model and weights located at the right module" in DOCS["en"]


def test_the_pages_are_what_the_program_writes():
    """The rows of both are read from the English page, which a run of the whole gallery has written."""
    tool, cells = load_tool(), [re.split(r" \| ", line.strip("| ")) for line in DOCS["en"] if line.startswith("| ")]
    rows = {row[0]: row for row in cells if row[0] in NAMED}
    outcomes = [
        gallery.Outcome(NAMED[name], row[-3], row[-2].strip("`"), row[-1].replace("-", ""), "")
        for name, row in rows.items()
    ]
    (failing,) = (line.partition(" on the files of ")[2] for line in DOCS["en"] if " on the files of " in line)
    controls = {rung: gallery.Run(PASS, "", predecessor="fails") for rung in failing.split(", ")}
    for language in LANGUAGES:
        page = tool.render(controls, outcomes, below=True, language=language)
        assert page.splitlines() == DOCS[language]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_on_small_gaps_quotes_the_gallery(language):
    """Each row of its tables: the fault, the rung that catches it, and what that names."""
    page = blocks(f"docs/{language}/off_by_a_little.md")
    quoted = [row for block in page if block.kind == "table" for row in block.cells[2:]]
    gallery_rows = [re.split(r" \| ", line.strip("| ")) for line in DOCS[language] if line.startswith("| ")]
    said = {row[0]: (row[-3], row[-2].strip("`")) for row in gallery_rows}
    assert len(quoted) > 40
    for mistake, names, _ in quoted:
        assert tuple(spans(names)) == said[spans(mistake)[0]], mistake


def test_check_names_the_page_that_is_stale(tmp_path, monkeypatch, capsys):
    tool = load_tool()
    monkeypatch.setattr(tool, "DOCS", tmp_path)
    pages = {"en/page.md": "right\n", "zh/page.md": "对\n"}
    for language in LANGUAGES:
        (tmp_path / language).mkdir()
    write, only, check = (tool.get_args_parser().parse_args(flags) for flags in ([], ["--only", "loss"], ["--check"]))
    assert tool.finish(pages, only) == 0 and not (tmp_path / "en" / "page.md").exists()
    assert tool.finish(pages, write) == tool.finish(pages, check) == 0
    (tmp_path / "zh" / "page.md").write_text("错\n", encoding="utf-8")
    assert tool.finish(pages, check) == 1
    printed = capsys.readouterr().out
    assert f"FAIL fault_gallery: {tmp_path / 'zh' / 'page.md'} is not what this run gives" in printed
    assert "-错" in printed and "+对" in printed and "en/page.md" not in printed


def test_the_gallery_is_wide():
    assert len(FAULTS) >= 50
    for area in AREAS:
        assert sum(fault.area == area for fault in FAULTS) >= 4, area


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"area": "modle"}, "no such area: 'modle'"),
        ({"rung": "09_test_nothing"}, "no such rung"),
        ({"file": "models/alexnet.py"}, "the port has no file"),
        ({"right": "epsilon=2e-3"}, "0 times, not once"),
        ({"right": "nn.Conv2D"}, "times, not once"),
        ({"wrong": "epsilon=1e-3"}, "right and wrong are the same"),
        ({"expected": "features.("}, "expected is no pattern"),
        ({"issue": "PaddlePaddle/Paddle"}, "must be OWNER/REPOSITORY#NUMBER"),
        ({"stands_for": " "}, "stands_for is empty"),
        ({"wrong": 1e-5}, "wrong must be text, not 1e-05"),
        ({"first": "features.0.1"}, "its fields must be name, area"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_definition_that_is_not_right_is_named(tmp_path, change, message):
    path = tmp_path / "faults.yaml"
    path.write_text(yaml.safe_dump([VALID | change]), encoding="utf-8")
    with pytest.raises(UserError, match="fault 'a fault' in ") as error:
        load_faults(path)
    assert message in str(error.value)


def test_two_faults_of_one_name_are_refused(tmp_path):
    path = tmp_path / "faults.yaml"
    path.write_text(yaml.safe_dump([VALID, VALID]), encoding="utf-8")
    with pytest.raises(UserError, match="another has the same name"):
        load_faults(path)


@pytest.mark.parametrize("text", ["name: a fault", "- [", "- a fault"])
def test_a_file_that_holds_no_faults_is_refused(tmp_path, text):
    path = tmp_path / "faults.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"faults\.yaml"):
        load_faults(path)


@pytest.mark.thorough("test_a_fault_named_otherwise_is_a_problem")
def test_a_fault_that_changes_nothing_is_missed():
    fault = gallery.Fault(**VALID | {"wrong": "epsilon=0.001"})
    (outcome,) = gallery.run_gallery([fault], {fault.rung}, jobs=2)[1]
    assert outcome.problem == "missed: every rung passes"


def test_a_fault_named_otherwise_is_a_problem():
    fault, passed = gallery.Fault(**VALID), gallery.Run(PASS, "")
    failed = gallery.Run(FAIL, "", item="features.0.0", located="features.0.1")
    assert gallery.judge(fault, fault.rung, failed, passed).problem == ""
    otherwise = gallery.judge(replace(fault, expected=r"classifier\.0"), fault.rung, failed, passed)
    assert "which does not match" in otherwise.problem
    assert "not by 01_test_forward" in gallery.judge(fault, "02_test_data", failed, passed).problem


@pytest.mark.thorough("test_the_tutorial_shows_what_the_rung_says runs them on the small model")
@pytest.mark.timeout(1500)  # 2 minutes of one core, which other tests share
def test_without_a_fault_every_rung_passes(tmp_path):
    """On the large model, as a command; not 02, which has no model, 07 and 08, and 06, which test_init_step.py runs."""
    rungs = [path.stem for path in sorted((ROOT / "steps").glob("0[13-5]*.py"))]
    command = ["sh", str(ROOT / "shell" / "run_steps.sh"), "--output-dir", str(tmp_path), "--seed", "1"]
    command += ["--model", "mobilenet_v3_large", "--rungs", *rungs]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "PASS ladder"
    out = tmp_path / "mobilenet_v3_large"
    for stem in ("forward", "metric", "loss", "losses"):
        for side in ("ref", "paddle"):
            assert (out / f"{stem}_{side}.npy").stat().st_size > 0
    for stem in ("forward", "metric", "loss", "backward"):
        assert "PASS" in (out / "log" / f"{stem}_diff.log").read_text()
