"""tools/predict.py: what --input may be, formats, the contact sheet, exported models, and memory."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exported_models import need
from PIL import Image
from test_predict import predict
from tiny_export import write_tiny_export

need("deploy", "onnx", "onnxruntime")

from mobilenetv3_common.contact_sheet import SIDE, ContactSheet  # noqa: E402 - not before they are known to be there
from mobilenetv3_common.image_paths import find_inputs, read_list  # noqa: E402
from mobilenetv3_common.predictions import ClassScore, Prediction, softmax  # noqa: E402
from mobilenetv3_common.wnids import IMAGENET_CLASSES  # noqa: E402
from mobilenetv3_deploy.predict import Predictor  # noqa: E402
from sturdyio.cli import run  # noqa: E402

ROOT = Path(__file__).parents[1]
COLOURS = {"blue": (20, 40, 220), "green": (10, 200, 30), "red": (230, 20, 10)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    return write_tiny_export(tmp_path_factory.mktemp("exported") / "model", 0)


@pytest.fixture
def photos(tmp_path) -> Path:
    """A folder with an image of each colour, one of them a folder deeper, and a text."""
    for name, colour in COLOURS.items():
        path = tmp_path / "photos" / ("deep" if name == "red" else "") / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 40), colour).save(path)
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    return tmp_path / "photos"


@pytest.fixture
def command(capsys, exported, monkeypatch):
    """command(*flags, stdin="") -> exit status, lines on stdout, lines on stderr, of the exported model."""

    def run_command(*flags: str | Path, stdin: str = "") -> tuple[int, list[str], list[str]]:
        source = () if {"--weights", "--exported"} & set(flags) else ("--exported", exported)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(os.fsencode(stdin)), encoding="utf-8"))
        capsys.readouterr()
        words = [str(word) for word in (*source, *flags)]
        with pytest.raises(SystemExit) as ended:
            run(lambda: predict.main(predict.get_args_parser().parse_args(words)), predict.PROG)
        out, err = capsys.readouterr()
        return ended.value.code, out.splitlines(), err.splitlines()

    return run_command


# --- which images


def names(lines: list[str]) -> list[str]:
    return [Path(line.split(": ")[0]).stem for line in lines[:-1]]


def test_inputs_are_files_folders_patterns_and_lists(command, photos):
    blue, green, red = photos / "blue.png", photos / "green.png", photos / "deep" / "red.png"
    cases = {
        (red, blue): ["red", "blue"],
        (photos,): ["blue", "red", "green"],
        (photos / "*.png",): ["blue", "green"],
        (photos / "**" / "*.png",): ["blue", "red", "green"],
        (photos / "[gr]*.png", photos / "deep"): ["green", "red"],
        ("-",): ["green", "red", "green"],
        (blue, "-", blue): ["blue", "green", "red", "green", "blue"],
    }
    for inputs, expected in cases.items():
        status, out, err = command("--input", *inputs, stdin=f"{green}\n{red}\n\n{green}")
        assert (status, names(out), err) == (0, expected, [])
        assert out[-1] == f"predicted {len(expected)} of {len(expected)} images, skipped 0"


def test_a_name_that_looks_like_a_pattern_is_a_file_first(command, photos):
    odd = photos / "[gr]*.png"
    (photos / "blue.png").rename(odd)
    status, out, _ = command("--input", odd)
    assert status == 0 and out[-1].startswith("class_id: ")
    assert find_inputs([str(odd)]) == [odd]


def test_a_list_is_read_as_it_is_asked_for(photos):
    """So its length does not matter: ten thousand names are never in memory."""
    asked = []

    def lines():
        for number in range(10_000):
            asked.append(number)
            yield f"{number}.png\n"

    paths = read_list(["-"], lines())
    assert [next(paths) for _ in range(3)] == [Path(f"{number}.png") for number in range(3)]
    assert len(asked) == 3


def test_what_cannot_be_read_among_several_is_named_and_skipped(command, photos):
    flags = ("--input", "-", "--format", "jsonl")
    missing, folder, text = photos / "missing.png", photos / "deep", photos / "notes.txt"
    status, out, err = command(*flags, stdin=f"{missing}\n{folder}\n{text}\n{photos / 'blue.png'}\n")
    assert (status, len(out), len(err)) == (1, 1, 4)
    for path, line in zip((missing, folder, text), err, strict=False):
        assert line.startswith(f"predict: skipped: image {path} ")
    assert err[-1] == "predicted 1 of 4 images, skipped 3"


# --- formats


def test_formats_hold_the_same_figures(command, photos, exported):
    model = Predictor(exported)
    paths = [photos / "blue.png", photos / "deep" / "red.png"]
    expected = []
    for path, row in zip(paths, model([Image.open(path) for path in paths]), strict=True):
        for rank, i in enumerate(np.argsort(-row)[:3], 1):
            expected.append((str(path), rank, int(i), IMAGENET_CLASSES[i], float(row[i])))
    flags = ("--input", *paths, "--topk", 3)
    status, out, err = command(*flags, "--format", "jsonl")
    assert (status, err) == (0, ["predicted 2 of 2 images, skipped 0"])
    found = [
        (record["path"], rank, one["class_id"], one["name"], one["probability"])
        for record in map(json.loads, out)
        for rank, one in enumerate(record["top"], 1)
    ]
    assert found == expected
    status, out, err = command(*flags, "--format", "csv")
    assert (status, err) == (0, ["predicted 2 of 2 images, skipped 0"])
    rows = list(csv.DictReader(out))
    assert [
        (r["path"], int(r["rank"]), int(r["class_id"]), r["name"], float(r["probability"])) for r in rows
    ] == expected
    _, out, _ = command(*flags)
    cells = [f"{i} {name} {p:.4f}" for _, _, i, name, p in expected]
    assert out[:2] == [f"{paths[0]}: {', '.join(cells[:3])}", f"{paths[1]}: {', '.join(cells[3:])}"]


def test_one_image_is_one_record(command, photos):
    status, out, err = command("--input", photos / "blue.png", "--format", "jsonl")
    assert (status, len(out), err) == (0, 1, [])
    status, out, err = command("--input", photos / "blue.png", "--format", "csv")
    assert (status, len(out), err) == (0, 6, [])


def test_awkward_names_stay_one_record(command, photos):
    name = 'a, "b"\n\udcff.png'
    (photos / "blue.png").rename(photos / name)
    _, out, _ = command("--input", photos, "--format", "jsonl")
    assert str(photos / name) in [json.loads(line)["path"] for line in out]


# --- the contact sheet


def test_the_sheet_shows_the_images_in_order(command, photos, tmp_path):
    (photos / "broken.png").write_bytes(b"none")
    path = tmp_path / "new" / "sheet.png"
    status, _, _ = command("--input", photos, "--visualize", path)
    assert status == 1
    with Image.open(path) as sheet:
        pixels = np.asarray(sheet)
    order = [COLOURS[name] for name in ("blue", "red", "green")]  # of two columns
    places = [np.argwhere((pixels == colour).all(axis=2)) for colour in order]
    tops, lefts = (np.array([place.min(axis=0)[axis] for place in places]) for axis in (0, 1))
    assert all(len(place) == 60 * 40 for place in places)  # they are not made larger
    assert tops[0] == tops[1] < tops[2] and lefts[0] == lefts[2] < lefts[1]
    below = pixels[tops[0] + SIDE // 2 + 40 : tops[2] - SIDE // 2]
    assert (below < 128).any()  # text


def test_the_sheet_keeps_the_first_images_small():
    sheet = ContactSheet(most=2)
    for _ in range(5):
        sheet.add_image(Image.new("RGB", (3000, 2000)))
        sheet.add_prediction(Prediction("x", [ClassScore(1, "y", 0.5)]))
    assert [image.size for image in sheet.images] == [(SIDE, round(SIDE * 2 / 3))] * 2
    assert len(sheet.predictions) == 2


# --- exported models


def test_an_exported_model_that_gives_probabilities_is_believed(exported, tmp_path):
    claims = Predictor(write_tiny_export(tmp_path / "model", 0, output="probabilities"))
    images = [Image.new("RGB", (300, 300), colour) for colour in COLOURS.values()]
    assert np.array_equal(softmax(claims(images)), Predictor(exported)(images))
    assert Predictor(exported)([]).shape == (0, 1000)


def test_softmax_is_right_where_exp_would_overflow():
    assert softmax(np.array([[1000, 1000 + np.log(3)]], np.float64)) == pytest.approx(np.array([[0.25, 0.75]]))


MISTAKES = {
    "both": (["--weights", "w", "--exported", "e"], "not allowed with argument"),
    "engine of weights": (["--weights", "w", "--engine", "onnxruntime"], "--engine onnxruntime runs exported models"),
    "unknown engine": (["--engine", "abacus"], "engine 'abacus' is unknown"),
    "framework": (["--framework", "torch"], "--framework is of --weights"),
    "crop": (["--val-crop-size", "192"], "--val-crop-size is of --weights"),
    "no match": (["--input", "none*.png"], "none*.png does not exist and matches no file"),
    "empty list": (["--input", "-"], "standard input names no images"),
    "missing among several": (["--input", "photos", "gone.png"], "gone.png does not exist"),
    "sheet": (["--visualize", "sheet.txt"], "end its name in .png"),
    "no place": (["--visualize", "photos/blue.png/sheet.png"], "cannot be written"),
    "format": (["--format", "xml"], "invalid choice: 'xml'"),
}


@pytest.mark.parametrize("flags, reason", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(command, photos, monkeypatch, flags, reason):
    monkeypatch.chdir(photos.parent)
    given = ("--input", photos) if "--input" not in flags else ()
    status, out, err = command(*given, *flags)
    assert (status, out, len(err)) == (2, [], 1)
    assert reason in err[0]


def test_no_framework_is_imported(exported, photos):
    code = (
        "import runpy, sys\nsys.modules.update(dict.fromkeys(['torch', 'paddle']))\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [ROOT / "tools" / "predict.py", "--exported", exported, "--input", photos]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


# --- many images


def peak(exported: Path, images: list[Path]) -> int:
    """The most memory in bytes that the command takes for them, named on standard input."""
    code = (
        "import resource, runpy, sys\nsys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as ended: assert not ended.code, ended\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    words = [ROOT / "tools" / "predict.py", "--exported", exported, "--input", "-", "--format", "jsonl", "-b", "8"]
    listed = "".join(f"{path}\n" for path in images)
    result = subprocess.run(
        [sys.executable, "-c", code, *words], input=listed, capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert len(lines) == len(images) + 1
    return int(lines[-1])


def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    """2,000 more images of 30 kB decoded, or of 12 kB preprocessed, would take 24 MB at least, were they kept."""
    exported = write_tiny_export(tmp_path / "model", 0, resize=32, crop=32)
    path = tmp_path / "small.jpg"
    Image.new("RGB", (100, 100), "red").save(path)
    few, many = (peak(exported, [path] * count) for count in (100, 2100))
    assert many - few < 12e6
