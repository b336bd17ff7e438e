"""steps/run_all.py writes the report and the summary of a run, and leaves none of an earlier one that misleads."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from browser import visit
from made_up_results import strict
from markdown_pages import ROOT

import mobilenetv3_paddle.data.presets
import mobilenetv3_ref.data.presets
from portproof.compare import FAIL, PASS
from portproof.report import plots
from sturdyio.cli import UserError

SMALL = "mobilenet_v3_small"


@pytest.fixture
def run_all() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_run_all", ROOT / "steps" / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(run_all: ModuleType, folder: Path) -> int:
    return run_all.main(run_all.get_args_parser().parse_args(["--model", SMALL, "--output-dir", str(folder)]))


RUNG = """
from argparse import ArgumentParser
from made_up_results import Outcome, forward
from sturdyio.cli import UserError

def get_args_parser():
    parser = ArgumentParser()
    for flag in ("--model", "--device", "--seed", "--output-dir"):
        parser.add_argument(flag)
    return parser

def main(args):
    {main}
"""
PASSES = "return Outcome(forward({}))"


def give_rungs(run_all: ModuleType, monkeypatch, folder: Path, **mains: str) -> None:
    """Rungs of these names, each with this line for its main, as scripts in a folder in this one."""
    (folder / "scripts").mkdir()
    for name, main in mains.items():
        (folder / "scripts" / f"{name}.py").write_text(RUNG.format(main=main), encoding="utf-8")
    monkeypatch.setattr(run_all, "RUNGS", tuple(mains))
    monkeypatch.setattr(run_all, "__file__", str(folder / "scripts" / "run_all.py"))


def test_real_rungs_are_reported(run_all, monkeypatch, tmp_path, capsys, browser):
    monkeypatch.setattr(run_all, "RUNGS", ("03_test_metric", "04_test_loss"))
    assert run(run_all, tmp_path) == PASS
    assert capsys.readouterr().out.splitlines()[-2:] == [f"report: {tmp_path / 'report.html'}", "PASS ladder"]
    data = strict(tmp_path / "summary.json")
    assert [told["status"] for told in data["rungs"]] == ["PASS", "PASS"]
    assert data["environment"]["device"] == "cpu" and data["environment"]["threads"].startswith("torch ")
    page = visit(browser, tmp_path / "report.html")
    assert page.inner_text("h1").startswith("PASS")
    assert page.locator("#rungs tbody tr").count() == 2
    page.close()


def test_a_rung_that_raises_is_reported_and_the_next_one_runs(run_all, monkeypatch, tmp_path, capsys):
    give_rungs(run_all, monkeypatch, tmp_path, one='raise ValueError("no such layer")', two=PASSES)
    assert run(run_all, tmp_path) == FAIL
    one, two = strict(tmp_path / "summary.json")["rungs"]
    assert (one["status"], one["error"], two["status"]) == ("FAIL", "ValueError: no such layer", "PASS")
    assert "ValueError: no such layer" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL ladder"


def test_an_earlier_report_does_not_outlive_a_run_that_ends_early(run_all, monkeypatch, tmp_path):
    for name in ("report.html", "summary.json"):
        (tmp_path / name).write_text("PASS")
    give_rungs(run_all, monkeypatch, tmp_path, one='raise UserError("the folder is gone")')
    with pytest.raises(UserError, match="the folder is gone"):
        run(run_all, tmp_path)
    assert not (tmp_path / "report.html").exists() and not (tmp_path / "summary.json").exists()


def test_a_report_that_cannot_be_written_is_a_user_error(run_all, monkeypatch, tmp_path, capsys):
    give_rungs(run_all, monkeypatch, tmp_path, one=PASSES)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another with --output-dir"):
        run(run_all, tmp_path / "file")
    (tmp_path / "a" / "report.html").mkdir(parents=True)
    with pytest.raises(UserError, match="delete it or choose another --output-dir"):
        run(run_all, tmp_path / "a")
    capsys.readouterr()
    monkeypatch.setattr("portproof.report.page.write_page", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="no report at .*division by zero"):
        run(run_all, tmp_path)
    assert "  PASS     one" in capsys.readouterr().out


@pytest.mark.parametrize("presets", [mobilenetv3_ref.data.presets, mobilenetv3_paddle.data.presets])
def test_pictures_are_shown_in_the_presets_colours(presets):
    np.testing.assert_array_equal(np.array([presets.MEAN, presets.STD]), [plots.MEAN, plots.STD])
