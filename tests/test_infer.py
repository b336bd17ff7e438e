"""tools/infer.py: prints what tools/predict.py prints, and compares the engines that are installed."""

import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from exported_models import load_tool, need
from PIL import Image
from test_engines import write_weights_folder
from tiny_export import write_tiny_export

from mobilenetv3_deploy import engines
from mobilenetv3_deploy.card import read_card, write_card
from sturdyio.cli import run

need("deploy", "onnx", "onnxruntime")
infer, predict = load_tool("infer"), load_tool("predict")
COLOURS = {"blue": (20, 40, 220), "red": (230, 20, 10)}
SMALL = {"resize": 32, "crop": 32}  # pixels
FEW = ("--batch-sizes", "1", "3", "--rounds", "2")
HEAD = ["engine", "images", "max|d|", "p50 ms", "p99 ms", "images/s", "ratio [95 %]", "MB"]


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The number of threads that the tool sets for its process does not outlive a test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    return write_tiny_export(tmp_path_factory.mktemp("exported") / "model", 0, **SMALL)


@pytest.fixture
def photos(tmp_path) -> list[Path]:
    paths = [tmp_path / f"{name}.png" for name in COLOURS]
    for path, colour in zip(paths, COLOURS.values(), strict=True):
        Image.new("RGB", (60, 40), colour).save(path)
    return paths


@pytest.fixture
def command(capsys) -> Callable[..., tuple[int, list[str], list[str]]]:
    """command(*flags, tool=infer) -> exit status, lines on stdout, lines on stderr."""

    def run_command(*flags: str | Path, tool=infer) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(lambda: tool.main(tool.get_args_parser().parse_args([str(flag) for flag in flags])), tool.PROG)
        out, err = capsys.readouterr()
        return ended.value.code, out.splitlines(), err.splitlines()

    return run_command


# --- images


def test_it_prints_what_predict_prints(command, exported, photos):
    flags = ("--input", *photos, "--topk", 3)
    status, out, err = command("--model", exported, *flags)
    assert (status, len(out), err) == (0, 2, [])
    for path, line in zip(photos, out, strict=True):
        assert re.fullmatch(rf"{re.escape(str(path))}: (\d+ [^,]+ [01]\.\d{{4}}(, )?){{3}}", line)
    _, predicted, _ = command("--exported", exported, *flags, tool=predict)
    assert out == predicted[:-1]  # without how many


def test_another_engine_predicts_the_same(command, exported, photos):
    need("openvino", "openvino")
    runs = [command("--model", exported, "--engine", name, "--input", *photos) for name in ("onnxruntime", "openvino")]
    assert runs[0] == runs[1] and len(runs[0][1]) == 2


# --- the table


def table(lines: list[str]) -> list[dict[str, str]]:
    """Its rows; no cell has two spaces."""
    head, *rows = (re.split(r" {2,}", line) for line in lines)
    assert head == HEAD
    return [dict(zip(HEAD, row, strict=True)) for row in rows]


def assert_is_sensible(rows: list[dict[str, str]], base: str) -> None:
    for row in rows:
        p50, p99, speed = (float(row[name]) for name in ("p50 ms", "p99 ms", "images/s"))
        assert 0 <= p50 <= p99
        # p50 is rounded to two digits and the speed to one, to half a unit of the last.
        assert abs(int(row["images"]) * 1e3 / speed - p50) <= 0.005 + p50 * 0.05 / speed + 1e-9
        ratio, low, high = map(float, re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", row["ratio [95 %]"]).groups())
        assert 0 <= low <= ratio <= high
        if row["engine"] == base:
            assert low == ratio == high == 1


def test_the_table_has_all_installed_engines(command, exported):
    status, out, err = command("--model", exported, "--benchmark", *FEW)
    rows, names = table(out), ["onnxruntime", *(["openvino"] if find_spec("openvino") else [])]
    assert status == 0
    assert [(row["engine"], row["images"]) for row in rows] == [(name, n) for n in ("1", "3") for name in names]
    assert_is_sensible(rows, "onnxruntime")
    assert rows[0]["max|d|"] == "0.0e+00"  # without the framework's file the first engine is what all are compared with
    assert {row["MB"] for row in rows} == {f"{(exported / 'model.onnx').stat().st_size / 1e6:.1f}"}
    left_out = [name for name in infer.ENGINES if name not in names]
    assert [re.match(r"infer: left out: engine (\S+) (needs|runs) ", line)[1] for line in err] == left_out


def test_the_table_is_against_the_trained_model_in_float64(command, tmp_path):
    folder = write_weights_folder(tmp_path / "model", "paddle")
    status, out, _ = command("--model", folder, "--benchmark", *FEW)
    rows = table(out)
    assert (status, [row["engine"] for row in rows]) == (0, ["paddle", "paddle"])
    assert_is_sensible(rows, "paddle")
    assert all(0 < float(row["max|d|"]) < 1e-3 for row in rows)


def test_an_engine_that_computes_something_else_is_status_1(command, tmp_path):
    """What the card calls model.onnx is no MobileNetV3."""
    folder = write_weights_folder(tmp_path / "weights", "paddle", num_classes=1000)
    other = write_tiny_export(tmp_path / "model", 0, **SMALL)
    (folder / "weights.safetensors").rename(other / "weights.safetensors")
    write_card(other, read_card(other))
    status, out, _ = command("--model", other, "--benchmark", "--batch-sizes", "1", "--rounds", "1")
    different = {row["engine"]: float(row["max|d|"]) for row in table(out)}
    assert status == 1
    assert different.pop("paddle") < 1e-3 < min(different.values())


def test_a_number_that_is_none_is_status_1(command, exported, monkeypatch):
    broken = infer.ENGINES["onnxruntime"]
    monkeypatch.setattr(broken, "_run", lambda self, batch: np.full((len(batch), 1000), np.nan, np.float32))
    assert command("--model", exported, "--benchmark", "--batch-sizes", "1", "--rounds", "1")[0] == 1


# --- mistakes

MISTAKES = {
    "no model": (["--input", "blue.png"], "--model"),
    "nothing to do": (["--model", "model"], "one of the arguments --input --benchmark is required"),
    "both": (["--model", "model", "--benchmark", "--input", "blue.png"], "not allowed with argument"),
    "engine": (["--model", "model", "--engine", "abacus", "--input", "blue.png"], "invalid choice: 'abacus'"),
    "threads": (["--model", "model", "--threads", "0", "--benchmark"], "whole number of at least 1 value: '0'"),
    "batch": (["--model", "model", "--benchmark", "--batch-sizes", "0"], "whole number of at least 1 value: '0'"),
    "topk": (["--model", "model", "--topk", "many", "--input", "blue.png"], "value: 'many'"),
    "no folder": (["--model", "gone", "--benchmark"], "model folder gone does not exist"),
    "no card": (["--model", ".", "--benchmark"], "card.json does not exist"),
    "lacking": (["--model", "model", "--engine", "paddle-inference", "--input", "blue.png"], "needs inference.json"),
    "no image": (["--model", "model", "--input", "gone.png"], "gone.png does not exist"),
    "text": (["--model", "model", "--input", "notes.txt"], "notes.txt"),
}


@pytest.mark.parametrize("flags, reason", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(command, exported, photos, monkeypatch, flags, reason):
    monkeypatch.chdir(photos[0].parent)
    Path("model").symlink_to(exported)
    Path("notes.txt").write_text("no image")
    status, out, err = command(*flags)
    assert (status, out, len(err)) == (2, [], 1)
    assert err[0].startswith("infer: error: ") and reason in err[0]


def test_no_engine_at_all_is_one_line(command, exported, monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    status, out, err = command("--model", exported, "--benchmark")
    assert (status, out) == (2, [])
    assert err[-1] == "infer: error: no engine is installed: pip install -e '.[deploy]'"
