"""steps/run_all.py writes the report and the summary of a run, and leaves none of an earlier one that misleads."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from outcomes import Outcome, forward, strict, visit
from pages import ROOT

import mobilenetv3_paddle.data.presets
import mobilenetv3_ref.data.presets
from mobilenetv3_proof.step import step_parser
from portproof.compare import FAIL, PASS
from portproof.io.cli import UserError
from portproof.ladder import all_rungs
from portproof.report import pictures

SMALL = "mobilenet_v3_small"


@pytest.fixture
def run_all() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_run_all", ROOT / "steps" / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(run_all: ModuleType, folder: Path) -> int:
    return run_all.main(run_all.get_args_parser().parse_args(["--model", SMALL, "--output-dir", str(folder)]))


def give_rungs(run_all: ModuleType, monkeypatch, **mains) -> None:
    """Rungs of these names, each with this for its main."""
    modules = {
        name: SimpleNamespace(main=main, get_args_parser=lambda: step_parser("rung", ""))
        for name, main in mains.items()
    }
    monkeypatch.setattr(run_all, "RUNGS", tuple(modules))
    monkeypatch.setattr(all_rungs, "load_script", lambda path: modules[path.stem])


def raising(error: Exception) -> Callable:
    def main(_args):
        raise error

    return main


def test_real_rungs_are_reported(run_all, monkeypatch, tmp_path, capsys, browser):
    monkeypatch.setattr(run_all, "RUNGS", ("02_test_data", "03_test_metric"))
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
    give_rungs(run_all, monkeypatch, one=raising(ValueError("no such layer")), two=lambda _args: Outcome(forward({})))
    assert run(run_all, tmp_path) == FAIL
    one, two = strict(tmp_path / "summary.json")["rungs"]
    assert (one["status"], one["error"], two["status"]) == ("FAIL", "ValueError: no such layer", "PASS")
    assert "ValueError: no such layer" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL ladder"


def test_an_earlier_report_does_not_outlive_a_run_that_ends_early(run_all, monkeypatch, tmp_path):
    for name in ("report.html", "summary.json"):
        (tmp_path / name).write_text("PASS")
    give_rungs(run_all, monkeypatch, one=raising(UserError("the folder is gone")))
    with pytest.raises(UserError, match="the folder is gone"):
        run(run_all, tmp_path)
    assert not (tmp_path / "report.html").exists() and not (tmp_path / "summary.json").exists()


def test_a_report_that_cannot_be_written_is_a_user_error(run_all, monkeypatch, tmp_path, capsys):
    give_rungs(run_all, monkeypatch, one=lambda _args: Outcome(forward({})))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another with --output-dir"):
        run(run_all, tmp_path / "file")
    (tmp_path / "a" / "report.html").mkdir(parents=True)
    with pytest.raises(UserError, match="delete it or choose another --output-dir"):
        run(run_all, tmp_path / "a")
    capsys.readouterr()
    monkeypatch.setattr(all_rungs, "write_page", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="no report at .*division by zero"):
        run(run_all, tmp_path)
    assert "  PASS     one" in capsys.readouterr().out


@pytest.mark.parametrize("presets", [mobilenetv3_ref.data.presets, mobilenetv3_paddle.data.presets])
def test_pictures_are_shown_in_the_presets_colours(presets):
    np.testing.assert_array_equal(np.array([presets.MEAN, presets.STD]), [pictures.MEAN, pictures.STD])
