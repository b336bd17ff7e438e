"""Weights for ImageNet's 1000 classes on a few of its folders: the labels are then ImageNet's own."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import paddle
import pytest
import torch
from PIL import Image
from torchvision import datasets

import mobilenetv3_paddle.train.main
import mobilenetv3_ref.train.main
from mobilenetv3_common.wnids import IMAGENET_CLASSES, IMAGENET_LABELS, WNIDS
from portproof.backends import backend
from portproof.compare import PASS
from portproof.convert.rules import torch_to_paddle
from sturdyio.cli import UserError

pytestmark = pytest.mark.thorough("the port", but="^(?!reference)")
ROOT = Path(__file__).parents[1]
SIDES = {
    "reference": SimpleNamespace(package=mobilenetv3_ref, framework="torch", suffix=".pth"),
    "port": SimpleNamespace(package=mobilenetv3_paddle, framework="paddle", suffix=".pdparams"),
}
FLAGS = "--train-crop-size 32 --val-crop-size 32 --val-resize-size 32 --batch-size 4 --workers 0 --epochs 1"
IMAGES = {"n01443537": 1, "n02123045": 2, "n15075141": 3}  # goldfish, tabby, toilet tissue
TOP1, TOP5 = 2 / 6, 5 / 6  # of the weights below


@pytest.fixture(params=SIDES.values(), ids=SIDES.keys())
def side(request) -> SimpleNamespace:
    """Each package in turn."""
    return request.param


@pytest.fixture(scope="module")
def weights(probe, tmp_path_factory) -> dict[str, Path]:
    """{framework: file}, for which every image is a tabby, then toilet tissue; its sixth guess is goldfish."""
    folder = tmp_path_factory.mktemp("weights")
    arrays = dict(probe("mobilenet_v3_small"))
    arrays["classifier.3.weight"] = np.zeros_like(arrays["classifier.3.weight"])
    arrays["classifier.3.bias"] = np.zeros_like(arrays["classifier.3.bias"])
    arrays["classifier.3.bias"][[281, 999, 500, 501, 502, 1]] = 9, 8, 7, 6, 5, 4
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / "bias.pth")
    converted = torch_to_paddle(arrays, backend("torch").layers.types(mobilenetv3_ref.models.mobilenet_v3_small()))
    paddle.save({name: paddle.to_tensor(array) for name, array in converted.items()}, str(folder / "bias.pdparams"))
    return {side.framework: folder / f"bias{side.suffix}" for side in SIDES.values()}


def write_images(root: Path, images: dict[str, int], *empty: str) -> Path:
    """`root` with train/ and val/: so many images in each of these folders, none in the `empty` ones."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, count in {**images, **dict.fromkeys(empty, 0)}.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (36, 40, 3), np.uint8)).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """6 images in 3 of ImageNet's folders."""
    return write_images(tmp_path_factory.mktemp("few"), IMAGES)


@pytest.fixture(scope="module")
def all_folders(tmp_path_factory) -> Path:
    """The same images in ImageNet's 1000 folders, most of which are empty."""
    return write_images(tmp_path_factory.mktemp("all"), IMAGES, *sorted({*WNIDS} - {*IMAGES}))


@pytest.fixture
def status(monkeypatch, tmp_path, capfd):
    """status(side, *flags): exit status (None: it did not exit), lines on stdout and on stderr of its command."""

    def command(side: SimpleNamespace, *flags: str | Path) -> tuple[int | None, list[str], list[str]]:
        flags = (*FLAGS.split(), "--output-dir", tmp_path / "out", *flags)
        monkeypatch.setattr(sys, "argv", ["train", *map(str, flags)])
        capfd.readouterr()
        code = None
        try:
            side.package.train.main.command()
        except SystemExit as ended:
            code = ended.code
        out, err = capfd.readouterr()
        return code, out.splitlines(), err.splitlines()

    return command


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"wnids_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_is_imagenets():
    """1000 in sorted order, and each folder of lite_data with the class that its page names."""
    assert len(WNIDS) == 1000 and sorted({*WNIDS}) == WNIDS
    page = (ROOT / "lite_data" / "README.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| `\w+/(n\d{8})/.*?` \| ([^|]+) \|", page, re.MULTILINE))
    assert len(named) == 10
    named |= {"n01440764": "tench", "n01443537": "goldfish", "n15075141": "toilet tissue"}
    assert {wnid: IMAGENET_CLASSES[IMAGENET_LABELS[wnid]] for wnid in named} == named


@pytest.mark.parametrize("data", ["few", "all_folders"])
def test_top1_of_a_few_folders(side, status, weights, data, request):
    """All folders or few, the right answers are the tabbies; 3 kinds of labels by place would give 0."""
    root = request.getfixturevalue(data)
    code, out, err = status(side, "--data-path", root, "--test-only", "--weights", weights[side.framework])
    assert (code or 0, err) == (0, [])
    bias = np.zeros(1000)
    bias[[281, 999, 500, 501, 502, 1]] = 9, 8, 7, 6, 5, 4
    loss = np.log(np.exp(bias).sum()) - (4 + 2 * 9 + 3 * 8) / 6
    found = re.fullmatch(r"\[Eval\] top1: ([\d.]+), top5: ([\d.]+), loss: ([\d.]+), samples: 6", out[-1])
    assert [float(number) for number in found.groups()] == pytest.approx([TOP1, TOP5, loss], abs=2e-5)
    noted = [line for line in out if "class folders have no images" in line]
    assert noted == ([f"data folder {root / 'val'}: 997 of 1000 class folders have no images"] * (data != "few"))


def test_few_folders_may_be_empty_in_a_test_and_not_in_training(side, status, weights, tmp_path):
    root = write_images(tmp_path / "data", IMAGES, "n01440764")
    flags = ("--data-path", root)
    code, out, _ = status(side, *flags, "--test-only", "--weights", weights[side.framework])
    assert out[-1].startswith(f"[Eval] top1: {TOP1:.5f}, ")
    code, _, err = status(side, *flags)
    assert (code, len(err)) == (2, 1)
    assert f"data folder {root / 'val'} must hold one folder a class, each with images in it" in err[0]
    with pytest.raises(UserError, match="each with images in it"):
        side.package.data.build_dataset(write_images(tmp_path / "none", {}, *WNIDS[:3]), train=False, num_classes=1000)


def test_training_has_the_folders_places_for_labels(side, few, all_folders):
    for root in (few, all_folders):
        for train in (True, False):
            ours = side.package.data.build_dataset(root, train=train)
            theirs = datasets.ImageFolder(root / "train" if train else root / "val", allow_empty=True)
            assert ours.class_to_idx == theirs.class_to_idx
            assert [label for _, label in ours.samples] == theirs.targets
    tested = side.package.data.build_dataset(all_folders, train=False, num_classes=1000)
    assert (tested.class_to_idx, tested.samples) == (ours.class_to_idx, ours.samples)


def test_all_folders_are_trained_on(side, status, all_folders):
    code, out, err = status(side, "--data-path", all_folders, "--lr", "0.01")
    assert (code or 0, err) == (0, [])
    assert [line for line in out if "samples: 6" in line]
    assert f"data folder {all_folders / 'train'}: 997 of 1000 class folders have no images" in out


@pytest.mark.parametrize(
    "names, words",
    [
        (("n02123045", "tabby"), r"1 of 2 class folders \(first: tabby\) are no wnids .* name each by its wnid"),
        (("n02123045", "n02123999"), r"1 of 2 class folders \(first: n02123999\) are no wnids"),
    ],
)
def test_other_names_are_refused(side, status, weights, tmp_path, names, words):
    root = write_images(tmp_path / "data", dict.fromkeys(names, 1))
    code, _, err = status(side, "--data-path", root, "--test-only", "--weights", weights[side.framework])
    assert (code, len(err)) == (2, 1)
    assert re.search(f"error: data folder {root / 'val'}: {words}", err[0])
    rung = load("steps/03_test_metric.py")
    flags = ["--data-path", root, "--weights", weights["torch"], "--output-dir", tmp_path / "result"]
    with pytest.raises(UserError, match=words):
        rung.main(rung.get_args_parser().parse_args([str(flag) for flag in flags]))


def test_other_numbers_of_classes_are_refused(side, status, few, tmp_path):
    path = tmp_path / f"seven{side.suffix}"
    side.package.models.save_weights(side.package.models.mobilenet_v3_small(num_classes=7), path)
    code, _, err = status(side, "--data-path", few, "--test-only", "--weights", path)
    assert (code, len(err)) == (2, 1)
    assert f"{few / 'val'} has 3 class folders, but the weights are for 7 classes" in err[0]


def test_weights_of_another_model_are_named_before_the_folders(side, status, weights, tmp_path):
    root = write_images(tmp_path / "data", {"cat": 1})
    flags = ("--test-only", "--model", "mobilenet_v3_large", "--weights", weights[side.framework])
    code, _, err = status(side, "--data-path", root, *flags)
    assert (code, len(err)) == (2, 1)
    assert "do not fit this model" in err[0]


def test_the_rung_takes_a_few_folders(few, weights, tmp_path, capsys):
    rung = load("steps/03_test_metric.py")
    flags = ["--data-path", few, "--weights", weights["torch"], "--output-dir", tmp_path]
    step = rung.main(rung.get_args_parser().parse_args([str(flag) for flag in flags]))
    assert step.status == PASS
    assert f"  top1 {TOP1:.4f}, top5 {TOP5:.4f} of 6 images" in capsys.readouterr().out.splitlines()


def test_predictions_in_such_folders_are_counted(side, few, weights, capsys):
    tool = load("tools/predict.py")
    flags = ["--framework", side.framework, "--weights", weights[side.framework], "--topk", 1, "--input", few / "val"]
    assert tool.main(tool.get_args_parser().parse_args([str(flag) for flag in flags])) == 0
    *lines, top1, end = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split()[:2] for line in lines] == [["281", "tabby"]] * 6
    assert (top1, end) == (
        f"top1: {TOP1:.5f}, of 6 images in folders named by wnid",
        "predicted 6 of 6 images, skipped 0",
    )
