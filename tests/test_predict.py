"""tools/predict.py and the two packages' predict.py: right, alike, and each without the other's framework."""

import gc
import importlib.util
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import mobilenetv3_paddle.predict
import mobilenetv3_ref.predict
from mobilenetv3_common.image_paths import find_images
from mobilenetv3_common.images import read_image
from mobilenetv3_common.wnids import IMAGENET_CLASSES
from sturdyio.cli import run
from sturdyio.files import save_safetensors

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "predict.py"
VAL = ROOT / "lite_data" / "val"
IMAGES = sorted(VAL.rglob("*.JPEG"))
PACKAGES = {"torch": mobilenetv3_ref.predict, "paddle": mobilenetv3_paddle.predict}


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


predict, convert_weights, make_probe_weights = map(load_tool, ("predict", "convert_weights", "make_probe_weights"))


def call(tool, *flags: str | Path) -> None:
    tool.main(tool.get_args_parser().parse_args([str(flag) for flag in flags]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Callable[..., dict[str, Path]]:
    """weights(model, num_classes) -> {framework: file}, one network."""
    made = {}

    def make(model: str = "mobilenet_v3_small", num_classes: int = 1000) -> dict[str, Path]:
        if (model, num_classes) not in made:
            folder = tmp_path_factory.mktemp("weights")
            files = {"torch": folder / "probe.pth", "paddle": folder / "probe.pdparams"}
            call(make_probe_weights, "--model", model, "--num-classes", num_classes, files["torch"])
            call(convert_weights, "--from", "torch", "--to", "paddle", "--model", model, *files.values())
            made[model, num_classes] = files
        return made[model, num_classes]

    return make


@pytest.fixture
def command(capsys, weights) -> Callable[..., tuple[int, list[str], list[str]]]:
    """command(*flags, framework="paddle") -> exit status, lines on stdout, lines on stderr; weights if not named."""

    def run_command(*flags: str | Path, framework: str = "paddle") -> tuple[int, list[str], list[str]]:
        flags = ("--framework", framework, *flags)
        if "--weights" not in flags:
            flags += ("--weights", weights()[framework])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(lambda: predict.main(predict.get_args_parser().parse_args([str(flag) for flag in flags])), predict.PROG)
        out, err = capsys.readouterr()
        return ended.value.code, out.splitlines(), err.splitlines()

    return run_command


def oracle(model: str, path: Path, images: list[Image.Image]) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities of `images` after torchvision's own model and transform, in float32 and in float64."""
    network = torchvision.models.get_model(model)
    network.load_state_dict(torch.load(path, weights_only=True))
    transform = torchvision.models.MobileNet_V3_Small_Weights.DEFAULT.transforms()
    batch = torch.stack([transform(image) for image in images])
    with torch.no_grad():
        single = network.eval()(batch).softmax(1).numpy()
        return single, network.double()(batch.double()).softmax(1).numpy()


# --- probabilities and names


@pytest.mark.thorough("one model", but="small")
@pytest.mark.parametrize("model", ["mobilenet_v3_small", "mobilenet_v3_large"])
def test_both_packages_give_torchvisions_probabilities(weights, model):
    files = weights(model)
    images = [read_image(path) for path in IMAGES[::2]]
    ref, port = (PACKAGES[f].Predictor(model, files[f])(images) for f in ("torch", "paddle"))
    single, fp64_ref = oracle(model, files["torch"], images)
    assert np.array_equal(ref, single)
    assert (port.dtype, port.shape) == (np.float32, (len(images), 1000))
    # The reference's own rounding is the measure: the port stays within a small multiple of it.
    own, ports = (np.abs(p / fp64_ref - 1).max() for p in (ref, port))
    assert 0 < ports <= 4 * own < 1e-3
    top = [np.argsort(-p, axis=1)[:, :5] for p in (ref, port)]
    assert np.array_equal(*top)


def test_channels_last_rounds_differently_and_no_more(command, weights):
    """The same classes, and probabilities within the four printed places, which hold less than float32's error."""
    flags = ("--input", *IMAGES[:2], "--batch-size", 2)
    plain, last = (command(*flags, *more, framework="torch") for more in ((), ("--channels-last",)))
    assert last == plain and plain[0] == 0
    images = [read_image(path) for path in IMAGES[:2]]
    plain, last = (
        PACKAGES["torch"].Predictor("mobilenet_v3_small", weights()["torch"], channels_last=chosen)(images)
        for chosen in (False, True)
    )
    assert not np.array_equal(plain, last)  # other kernels, that add in another order


@pytest.mark.parametrize("framework", PACKAGES)
def test_images_of_a_batch_are_not_held_together(weights, framework):
    kept: list[weakref.ref] = []

    def images():
        for path in IMAGES[:3]:
            gc.collect()
            assert sum(image() is not None for image in kept) <= 1  # the one before
            image = read_image(path)
            kept.append(weakref.ref(image))
            yield image
            del image

    predictor = PACKAGES[framework].Predictor("mobilenet_v3_small", weights()[framework])
    assert predictor(images()).shape == (3, 1000)
    assert predictor([]).shape == (0, 1000)


def test_class_names_are_torchvisions():
    assert torchvision.models.MobileNet_V3_Small_Weights.DEFAULT.meta["categories"] == IMAGENET_CLASSES
    assert (len(IMAGENET_CLASSES), IMAGENET_CLASSES[281]) == (1000, "tabby")


@pytest.mark.parametrize("framework", PACKAGES)
def test_other_numbers_of_classes_have_no_names(command, weights, framework):
    status, out, err = command(
        "--input", IMAGES[0], "--topk", 10, "--weights", weights(num_classes=10)[framework], framework=framework
    )
    assert (status, err) == (0, [])
    rows = [line.split() for line in out[:-1]]
    assert sorted(int(class_id) for class_id, _ in rows) == list(range(10))
    assert sum(float(probability) for _, probability in rows) == pytest.approx(1, abs=1e-3)


# --- what is printed


@pytest.mark.parametrize("framework", PACKAGES)
def test_an_image_ends_in_its_best_class(command, weights, framework):
    status, out, err = command("--input", IMAGES[2], "--topk", 3, framework=framework)
    predictor = PACKAGES[framework].Predictor("mobilenet_v3_small", weights()[framework])
    probabilities = predictor([read_image(IMAGES[2])])[0]
    best = np.argsort(-probabilities)[:3]
    assert (status, err) == (0, [])
    assert [line.split(maxsplit=2) for line in out[:-1]] == [
        [str(i), f"{probabilities[i]:.4f}", IMAGENET_CLASSES[i]] for i in best
    ]
    assert re.fullmatch(r"class_id: \d+, prob: \d\.\d{4}", out[-1])
    assert out[-1] == f"class_id: {best[0]}, prob: {probabilities[best[0]]:.4f}"


def test_a_folder_gives_a_line_an_image_in_sorted_order(command, weights):
    status, out, err = command("--input", VAL, "--topk", 2)
    predictor = PACKAGES["paddle"].Predictor("mobilenet_v3_small", weights()["paddle"])
    expected = []
    for path, row in zip(IMAGES, predictor([read_image(path) for path in IMAGES]), strict=True):
        expected.append(
            f"{path}: " + ", ".join(f"{i} {IMAGENET_CLASSES[i]} {row[i]:.4f}" for i in np.argsort(-row)[:2])
        )
    assert (status, err) == (0, [])
    top1 = "top1: 0.00000, of 16 images in folders named by wnid"  # probe weights know no classes
    assert out == [*expected, top1, "predicted 16 of 16 images, skipped 0"]


def split_numbers(lines: list[str]) -> tuple[list[str], list[float]]:
    """`lines` without their probabilities, and these, which another kernel may round the other way."""
    number = r"\d\.\d{4}"
    return re.split(number, "\n".join(lines)), [float(found) for found in re.findall(number, "\n".join(lines))]


def assert_alike(one: list[str], other: list[str]) -> None:
    """The same printed, probabilities within one in the last digit."""
    (text, numbers), (other_text, other_numbers) = split_numbers(one), split_numbers(other)
    assert text == other_text
    assert numbers == pytest.approx(other_numbers, rel=0, abs=1.01e-4)


def test_frameworks_and_batch_sizes_print_the_same(command):
    ref, port, small_batches = (
        command("--input", VAL, "--batch-size", size, framework=framework)[1]
        for framework, size in (("torch", 16), ("paddle", 16), ("paddle", 5))
    )
    assert_alike(ref, port)
    assert_alike(port, small_batches)


def test_only_image_files_at_any_depth_are_taken(command, tmp_path):
    names = ["b.PNG", "a/deep/er/z.jpg", "a.webp", "notes.txt", "a/c.npy", "odd \udcff.bmp"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            Image.new("RGB", (30, 20), "red").save(file, "PNG")
    status, out, err = command("--input", tmp_path, "--topk", 1)
    assert (status, err) == (0, [])
    taken = [line.split(": ")[0].removeprefix(f"{tmp_path}/") for line in out]
    assert taken == ["a/deep/er/z.jpg", "a.webp", "b.PNG", r"odd \udcff.bmp", "predicted 4 of 4 images, skipped 0"]


def test_links_to_folders_are_followed_once(tmp_path):
    """Also those that lead back to a folder above, in which the search would never end."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for path in (root / "a" / "x.png", root / "b" / "deep" / "y.png", elsewhere / "z.png"):
        path.parent.mkdir(parents=True)
        path.touch()
    links = {
        "a/above": root,
        "a/first": root / "b",
        "b/deep/far above": tmp_path,
        "linked": elsewhere,
        "again": elsewhere,
        "itself": root / "itself",
    }
    for name, target in links.items():
        (root / name).symlink_to(target, target_is_directory=True)
    found = ["a/x.png", "again/z.png", "b/deep/y.png"]
    assert find_images(root) == [root / name for name in found]


@pytest.mark.parametrize("flags", [("--val-crop-size", 192), ("--val-resize-size", 300)])
@pytest.mark.parametrize("framework", PACKAGES)
def test_sizes_reach_the_preprocessing(command, framework, flags):
    plain, changed = (command("--input", IMAGES[0], *more, framework=framework) for more in ((), flags))
    assert changed[0] == 0
    assert plain[1] != changed[1]


@pytest.mark.parametrize("framework", PACKAGES)
def test_device_reaches_the_package(command, monkeypatch, framework):
    asked = []
    select_device = PACKAGES[framework].select_device
    monkeypatch.setattr(
        PACKAGES[framework], "select_device", lambda name: (asked.append(name), select_device("cpu"))[1]
    )
    assert command("--input", IMAGES[0], "--device", "gpu", framework=framework)[0] == 0
    assert asked == ["gpu"]


def test_a_training_checkpoint_serves_as_weights(command, weights, tmp_path):
    state_dict = torch.load(weights()["torch"], weights_only=True)
    torch.save({"model": state_dict, "epoch": 3, "args": {"lr": 0.1}}, tmp_path / "checkpoint.pth")
    given, plain = (
        command("--input", IMAGES[0], *more, framework="torch")
        for more in (("--weights", tmp_path / "checkpoint.pth"), ())
    )
    assert given == plain


# --- one framework is enough


def run_without(modules: str, *flags: str | Path) -> subprocess.CompletedProcess:
    """The command line in a Python in which `modules` cannot be imported."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({modules.split()}))\n"
        f"sys.argv[0] = {str(SCRIPT)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, flags)], capture_output=True, text=True, check=False
    )


@pytest.mark.thorough("the port", but="^paddle")
@pytest.mark.parametrize(
    "framework, others", [("paddle", "torch torchvision mobilenetv3_ref"), ("torch", "paddle mobilenetv3_paddle")]
)
def test_each_framework_works_without_the_other(command, weights, framework, others):
    flags = ("--framework", framework, "--weights", weights()[framework], "--input", IMAGES[0])
    result = run_without(others, *flags)
    assert (result.returncode, result.stderr) == (0, "")
    assert_alike(result.stdout.splitlines(), command("--input", IMAGES[0], framework=framework)[1])


@pytest.mark.parametrize("framework", PACKAGES)
def test_a_missing_framework_is_named_with_its_remedy(framework):
    result = run_without("torch paddle", "--framework", framework, "--weights", "w", "--input", IMAGES[0])
    assert (result.returncode, result.stdout) == (2, "")
    line = rf"predict: error: --framework {framework} .*'?{framework}'?.* pip install -e '\.\[{framework}\]'\n"
    assert re.fullmatch(line, result.stderr)


# --- mistakes


def break_image(path: Path, how: str) -> Path:
    data = IMAGES[0].read_bytes()
    path.write_bytes({"truncated": data[: len(data) // 2], "text": b"no image at all", "empty": b""}[how])
    return path


@pytest.mark.parametrize("how", ["truncated", "text", "empty"])
def test_one_broken_image_is_an_error(command, tmp_path, how):
    path = break_image(tmp_path / "broken.jpg", how)
    status, out, err = command("--input", path)
    assert (status, out, len(err)) == (2, [], 1)
    assert err[0].startswith("predict: error: ")
    assert str(path) in err[0]


def test_broken_images_in_a_folder_are_named_and_skipped(command, tmp_path):
    broken = [break_image(tmp_path / f"{how}.jpg", how) for how in ("truncated", "text", "empty")]
    good = tmp_path / "good.jpg"
    good.write_bytes(IMAGES[0].read_bytes())
    for batch_size in (1, 8):
        status, out, err = command("--input", tmp_path, "--batch-size", batch_size)
        assert status == 1
        assert [line.split(": ")[0] for line in out] == [str(good), "predicted 1 of 4 images, skipped 3"]
        assert len(err) == 3
        for path, line in zip(sorted(broken), err, strict=True):
            assert line.startswith(f"predict: skipped: image {path} ")


MISTAKES = {
    "missing input": (["--input", "nowhere.jpg"], "nowhere.jpg does not exist"),
    "folder without images": (["--input", "."], "holds no images"),
    "no class": (["--topk", "0"], "--topk 0 is outside 1 to 1000"),
    "too many classes": (["--topk", "1001"], "--topk 1001 is outside 1 to 1000"),
    "crop larger than image": (["--val-resize-size", "223"], "--val-resize-size 223 is smaller than"),
    "missing weights": (["--weights", "nowhere.pdparams"], "nowhere.pdparams does not exist"),
    "other model": (["--model", "mobilenet_v3_large"], "do not fit this model"),
    "channels last": (["--channels-last"], "PaddlePaddle is slower"),
}


@pytest.mark.parametrize("flags, reason", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(command, tmp_path, monkeypatch, flags, reason):
    monkeypatch.chdir(tmp_path)
    status, out, err = command("--input", IMAGES[0], *flags)
    assert (status, out, len(err)) == (2, [], 1)
    assert reason in err[0]


@pytest.mark.parametrize("framework", PACKAGES)
def test_the_other_frameworks_weights_are_refused(command, weights, framework):
    (other,) = PACKAGES.keys() - {framework}
    status, _, err = command("--input", IMAGES[0], "--weights", weights()[other], framework=framework)
    assert (status, len(err)) == (2, 1)
    assert "convert them to one of these" in err[0]


@pytest.mark.parametrize("framework, package", [("torch", mobilenetv3_ref), ("paddle", mobilenetv3_paddle)])
def test_outputs_that_overflow_are_refused(command, weights, tmp_path, framework, package):
    arrays = package.models.read_weights(weights()[framework])
    arrays["classifier.3.weight"] *= np.float32(1e38)
    path = tmp_path / "huge.safetensors"
    save_safetensors(arrays, path)
    status, out, err = command("--input", IMAGES[0], "--weights", path, framework=framework)
    assert (status, out, len(err)) == (2, [], 1)
    assert "NaN" in err[0]


def test_batch_size_zero_is_refused_by_argparse(capsys):
    with pytest.raises(SystemExit) as ended:
        predict.get_args_parser().parse_args(["--weights", "w", "--input", "i", "--batch-size", "0"])
    assert ended.value.code == 2
    assert "--batch-size/-b: invalid whole number of at least 1 value: '0'" in capsys.readouterr().err
