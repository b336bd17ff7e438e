"""lite_data/ holds what it promises; tools/prepare_lite_data.py writes it, or a sample of ImageNet."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
from PIL import ExifTags, Image

from sturdyio.cli import UserError

ROOT = Path(__file__).parents[1]
LITE_DATA = ROOT / "lite_data"
SCRIPT = ROOT / "tools" / "prepare_lite_data.py"
SPLITS = ("train", "val")
CROP = 224

spec = importlib.util.spec_from_file_location("prepare_lite_data", SCRIPT)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def image_paths(root: Path) -> list[Path]:
    """The files below `root`'s train and val, relative to it, sorted."""
    return sorted(p.relative_to(root) for split in SPLITS for p in (root / split).rglob("*") if p.is_file())


def properties(path: Path) -> tuple:
    """What a decoder can stumble over: format, mode, size, EXIF."""
    with Image.open(path) as image:
        return image.format, image.mode, image.size, dict(image.getexif())


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=np.int16)


def run_main(*flags: str | Path) -> None:
    tool.main(tool.get_args_parser().parse_args([str(flag) for flag in flags]))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("standard") / "lite"
    run_main("--output-dir", folder)
    return folder


@pytest.fixture
def imagenet(tmp_path) -> Path:
    """A tree of 5 classes, 4 training and 3 validation images each, whose bytes are their own path."""
    for split, count in (("train", 4), ("val", 3)):
        for wnid in (f"n0000000{c}" for c in range(5)):
            for i in range(count):
                path = tmp_path / "imagenet" / split / wnid / f"{wnid}_{i}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{split} {path.name}")
    return tmp_path / "imagenet"


def test_counts_and_classes():
    classes = {}
    for split in SPLITS:
        files = list((LITE_DATA / split).rglob("*.JPEG"))
        assert len(files) == 16
        classes[split] = {path.parent.name for path in files}
        assert all(path.name.startswith(path.parent.name + "_") for path in files)
    assert classes["train"] == classes["val"]
    assert len(classes["train"]) >= 8


def test_files_are_small_and_whole():
    sizes = {path: (LITE_DATA / path).stat().st_size for path in image_paths(LITE_DATA)}
    assert len(sizes) == 32  # and nothing but the images
    assert max(sizes.values()) <= 60_000
    assert sum(sizes.values()) <= 800_000
    for path in sizes:
        assert pixels(LITE_DATA / path).std() > 5  # a photograph, not a blank


def test_no_image_is_in_the_set_twice():
    assert len({pixels(LITE_DATA / path).tobytes() for path in image_paths(LITE_DATA)}) == 32


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "oddity",
    [
        lambda form, mode, size, exif: (form, mode) == ("JPEG", "L"),
        lambda form, mode, size, exif: (form, mode) == ("JPEG", "CMYK"),
        lambda form, mode, size, exif: (form, mode) == ("PNG", "RGB"),
        lambda form, mode, size, exif: exif.get(ExifTags.Base.Orientation) == 6 and size[0] > size[1],
        lambda form, mode, size, exif: max(size) < CROP,
        lambda form, mode, size, exif: max(size) >= 5 * min(size),
    ],
    ids=["grayscale", "cmyk", "png", "exif", "small", "long"],
)
def test_each_oddity_is_in_each_split(split, oddity):
    assert any(oddity(*properties(path)) for path in (LITE_DATA / split).rglob("*.JPEG"))


def test_cmyk_images_use_the_black_channel():
    for path in image_paths(LITE_DATA):
        with Image.open(LITE_DATA / path) as image:
            if image.mode == "CMYK":
                assert np.asarray(image)[..., 3].std() > 10


def test_readme_lists_each_file_as_it_is_stored():
    listed = {}
    for line in (LITE_DATA / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith(("| `train/", "| `val/")):
            path, _, photograph, stored, oddity = (cell.strip() for cell in line.strip("|").split("|"))
            listed[Path(path.strip("`"))] = (photograph, stored, "EXIF" in oddity)
    expected = {}
    for path in image_paths(LITE_DATA):
        form, mode, size, exif = properties(LITE_DATA / path)
        expected[path] = (path.name.split("_")[1], f"{form} {mode} {size[0]}x{size[1]}", bool(exif))
    assert listed == expected


def test_readme_credits_each_photograph():
    text = (LITE_DATA / "README.md").read_text(encoding="utf-8")
    for name, (package, _) in tool.PHOTOGRAPHS.items():
        shipped = {"skimage": "scikit-image", "sklearn": "scikit-learn"}[package]
        assert f"| {name} | {shipped} |" in text


def test_tool_writes_the_committed_set(written):
    assert image_paths(written) == image_paths(LITE_DATA)
    for path in image_paths(LITE_DATA):
        assert properties(written / path) == properties(LITE_DATA / path), path
        difference = np.abs(pixels(written / path) - pixels(LITE_DATA / path))
        assert difference.mean() < 1, path  # another libjpeg may round otherwise
        if PIL.__version__ == "13.0.0":
            assert difference.max() == 0, path
            if properties(written / path)[0] == "JPEG":  # PNG bytes depend on the machine's zlib
                assert (written / path).read_bytes() == (LITE_DATA / path).read_bytes(), path


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin="/other/version/__init__.py")])
def test_missing_photograph_names_the_fix(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=r"pip install -r requirements\.txt"):
        run_main("--output-dir", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_sample_copies_files_unchanged(imagenet, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    run_main("--imagenet", imagenet, "--classes", 3, "--per-class", 2, "--seed", 7, "--output-dir", out)
    files = image_paths(out)
    assert len(files) == 2 * 3 * 2
    assert all((out / path).read_bytes() == (imagenet / path).read_bytes() for path in files)
    train, val = ({path.parent.name for path in files if path.parts[0] == split} for split in SPLITS)
    assert train == val
    assert len(train) == 3
    assert "seed 7" in capsys.readouterr().out
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_sample_depends_on_the_seed_alone(imagenet, tmp_path, monkeypatch):
    def draw(seed: int, name: str) -> list[Path]:
        flags = ("--classes", 3, "--per-class", 2, "--seed", seed)
        run_main("--imagenet", imagenet, *flags, "--output-dir", tmp_path / name)
        return image_paths(tmp_path / name)

    first = draw(0, "a")
    assert draw(1, "b") != first
    listing = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: reversed(list(listing(folder))))
    assert draw(0, "c") == first  # a file system lists in an order of its own


def test_sample_of_all_classes_into_an_empty_folder(imagenet, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    run_main("--imagenet", imagenet, "--classes", "all", "--per-class", 3, "--output-dir", out)
    assert len(image_paths(out)) == 2 * 5 * 3
    assert len(list((out / "val").iterdir())) == 5


def test_sample_skips_what_is_no_image(imagenet, tmp_path):
    for folder in (imagenet / "val").iterdir():
        (folder / "checksums.txt").touch()
    (imagenet / "val" / ".cache").mkdir()
    run_main("--imagenet", imagenet, "--classes", "all", "--per-class", 3, "--output-dir", tmp_path / "out")
    assert {path.suffix for path in image_paths(tmp_path / "out")} == {".JPEG"}


def flatten_val(imagenet: Path) -> None:
    for path in list((imagenet / "val").rglob("*.JPEG")):
        path.rename(imagenet / "val" / path.name)
    for folder in (path for path in (imagenet / "val").iterdir() if path.is_dir()):
        folder.rmdir()


def remove_class(imagenet: Path) -> None:
    (imagenet / "val" / "n00000003").rename(imagenet / "n00000003")


@pytest.mark.parametrize(
    ("flags", "damage", "message"),
    [
        (["--classes", "5", "--per-class", "4"], None, r"val/n00000000 has 3 images.*--per-class"),
        (["--classes", "6"], None, r"--classes 6 is more than the 5 classes"),
        (["--classes", "2"], flatten_val, r"val is not sorted into class folders: move .* valprep\.sh"),
        (["--classes", "2"], remove_class, r"n00000003 is in .*train but not in .*val"),
        (["--classes", "2"], lambda tree: (tree / "val").rename(tree / "test"), r"has no folder val: name"),
        (["--classes", "2"], lambda tree: tree.rename(tree.parent / "moved"), r"imagenet does not exist"),
    ],
    ids=["few images", "few classes", "flat val", "classes differ", "no val", "no tree"],
)
def test_sample_refuses(imagenet, tmp_path, flags, damage, message):
    if damage:
        damage(imagenet)
    with pytest.raises(UserError, match=message):
        run_main("--imagenet", imagenet, *flags, "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [["--per-class", "0"], ["--per-class", "x"], ["--classes", "0"]])
def test_counts_below_one_are_refused(flags, imagenet, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run_main("--imagenet", imagenet, *flags, "--output-dir", tmp_path / "out")
    assert stop.value.code == 2
    assert f"argument {flags[0]}: invalid whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--per-class", "3"], ["--classes", "all"], ["--seed", "1"]])
def test_sampling_flags_need_a_tree(flags, tmp_path):
    with pytest.raises(UserError, match=f"{flags[0]} only acts together with --imagenet"):
        run_main(*flags, "--output-dir", tmp_path / "out")


def test_used_output_folder_is_refused_and_kept(imagenet, tmp_path):
    note = tmp_path / "out" / "note.txt"
    note.parent.mkdir()
    note.write_text("mine")
    for flags in ([], ["--imagenet", imagenet, "--classes", 2]):
        with pytest.raises(UserError, match=f"{note.parent} exists and is not empty"):
            run_main(*flags, "--output-dir", note.parent)
    assert list(note.parent.iterdir()) == [note]


def test_failed_copy_leaves_nothing(imagenet, tmp_path, monkeypatch):
    def full_disk(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(tool.shutil, "copyfile", full_disk)
    with pytest.raises(UserError, match=r"nothing was written to .*out: .*No space left"):
        run_main("--imagenet", imagenet, "--classes", 2, "--output-dir", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [imagenet]


def test_written_folder_is_open_to_others(written):
    assert written.stat().st_mode & 0o777 == (written / "train").stat().st_mode & 0o777


def test_command_line_refuses_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    used = subprocess.run(
        [sys.executable, SCRIPT, "--output-dir", tmp_path], capture_output=True, text=True, check=False
    )
    unwritable = subprocess.run(
        [sys.executable, SCRIPT, "--output-dir", tmp_path / "file" / "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    for result, message in ((used, "is not empty"), (unwritable, "cannot be written")):
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.startswith("prepare_lite_data: error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        run_main("--help")
    text = capsys.readouterr().out
    for flag in ("--output-dir", "--imagenet", "--classes", "--per-class", "--seed"):
        assert flag in text
