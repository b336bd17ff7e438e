"""Files that are not what their names say: one line and status 2, in the memory that the readers promise."""

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest
from PIL import Image

from mobilenetv3_common.images import (
    FORMATS,
    IMAGE_SUFFIXES,
    MOST_PIXELS,
    MOST_SCANS,
    decoding_work,
    jpeg_scans,
    read_image,
)
from sturdyio.cli import UserError

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "maintenance" / "checks" / "fuzz_files.py"


def python(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.thorough("the kit's test_flipped_bytes_give_a_result_or_a_refusal")
def test_damaged_files_of_every_format_are_read_or_refused(tmp_path):
    done = python(FUZZ, "--flips", "100", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(row["refused"] + row["valid"] == row["flips"] == 100 for row in rows)
    assert all(row["refused"] > 16 for row in rows)  # the flips do damage
    suffixes = {Path(row["format"]).suffix for row in rows}
    kinds = {".pth", ".pdparams", ".ckpt", ".safetensors", ".npy", ".npz", ".yaml", ".jsonl"}
    assert suffixes >= kinds | {".jpg", ".png", ".ppm", ".bmp", ".tif", ".webp"}


BROKEN = {
    "raise IndexError('list index out of range')": "IndexError: list index",
    "bytearray(2**31)": "too much memory",
    "raise UserError('no name')": "refused otherwise",
    "raise UserError(f'{path}\\n')": "refused otherwise",
    "import time; time.sleep(60)": "Timeout",
    "import os; os.abort()": "Fatal Python error: Aborted",
}


def test_the_search_finds_readers_that_fail():
    """All but the last two, which end the program, in one process."""
    code = """
import faulthandler, sys, tempfile
from pathlib import Path
from maintenance.checks import fuzz_files
from sturdyio.cli import UserError
from sturdyio.files import refusing

fuzz_files.LONGEST = 1
faulthandler.enable()
for line in {lines!r}:
    calls = []
    def read(path):
        calls.append(path)
        if len(calls) > 1:  # the first file is whole
            if line.startswith("bytearray"):
                with refusing(path, "less"):
                    exec(line)
            exec(line)
    kind = fuzz_files.Format(lambda path: path.write_bytes(bytes(100)), read)
    print(fuzz_files.fuzz("x", kind, Path(tempfile.mkdtemp()), 1, 0).failures, flush=True)
"""
    *going_on, hang, crash = BROKEN
    done = python("-c", code.format(lines=going_on))
    assert done.returncode == 0, done.stderr
    for line, said in zip(going_on, done.stdout.splitlines(), strict=True):
        assert BROKEN[line] in said
    for line in (hang, crash):
        done = python("-c", code.format(lines=[line]))
        assert done.returncode != 0
        assert BROKEN[line] in done.stderr


# --- images


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_image(path)
    message = str(caught.value)
    assert message.startswith(f"image {path} ")
    assert message.isprintable()
    return message


def test_other_formats_under_an_images_name_are_refused(tmp_path):
    """All that Pillow can write; it would read most of them, and for some start a program or take any memory."""
    Image.init()
    written = []
    for name in sorted(set(Image.SAVE) & set(Image.OPEN) - set(FORMATS)):
        path = tmp_path / f"{name}.jpg"
        for mode in ("RGB", "L", "1"):
            content = io.BytesIO()  # under a name, Pillow would write all files of that suffix as SPIDER from now on
            try:
                Image.new(mode, (16, 16)).save(content, name)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            path.write_bytes(content.getvalue())
            assert "is none of JPEG, PNG" in refusal(path)
            written.append(name)
            break
    assert {"AVIF", "DDS", "EPS", "TGA", "JPEG2000", "ICO"} <= set(written)


def test_formats_that_are_read_may_have_each_others_names(tmp_path):
    image = Image.new("RGB", (5, 4), "red")
    for name in FORMATS:
        for suffix in IMAGE_SUFFIXES:
            image.save(tmp_path / f"x{suffix}", name)
            assert read_image(tmp_path / f"x{suffix}").size == (5, 4)


def test_a_picture_of_more_pixels_than_allowed_is_refused_unread(tmp_path):
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    for height in (2**13, 2**14):  # Pillow warns of the first, and refuses the second itself
        header = struct.pack(">IIBBBBB", MOST_PIXELS // 2**13 + 1, height, 8, 2, 0, 0, 0)
        path = tmp_path / "large.png"
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))))
        assert f"more than {MOST_PIXELS} pixels" in refusal(path) or "exceeds limit" in refusal(path)


def test_a_length_that_is_not_there_claims_no_memory(tmp_path):
    path = tmp_path / "x.png"
    Image.new("RGB", (40, 30)).save(path)
    whole = path.read_bytes()
    at = whole.index(b"IDAT") - 4
    path.write_bytes(whole[:at] + b"\x7f" + whole[at + 1 :])
    tracemalloc.start()
    try:
        with contextlib.suppress(UserError):
            read_image(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")  # opened, it would wait for ever
    (tmp_path / "folder.jpg").mkdir()
    for name in ("pipe.jpg", "folder.jpg", "missing.jpg"):
        refusal(tmp_path / name)


def with_scans(path: Path, count: int) -> None:
    """A progressive JPEG with so many scans in it, the last of its own again and again."""
    made = io.BytesIO()
    Image.effect_noise((64, 48), 60).convert("RGB").save(made, "JPEG", progressive=True, exif=exif_with_thumbnail())
    whole = made.getvalue()
    own = jpeg_scans(whole)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    path.write_bytes(whole[:-2] + last * (count - own) + whole[-2:])


def exif_with_thumbnail() -> bytes:
    """Metadata with a JPEG in it, whose scan is none of the picture's."""
    small = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(small, "JPEG")
    return b"Exif\0\0" + small.getvalue()


def test_the_scans_of_a_jpeg_are_counted_before_it_is_decoded(tmp_path):
    path = tmp_path / "x.jpg"
    Image.new("RGB", (64, 48), "red").save(path)
    assert jpeg_scans(path.read_bytes()) == 1
    with_scans(path, 10)
    assert jpeg_scans(path.read_bytes()) == 10  # what libjpeg writes for colour, and not that of the thumbnail
    assert read_image(path).size == (64, 48)
    with_scans(path, MOST_SCANS)
    assert read_image(path).size == (64, 48)
    with_scans(path, 200)
    assert "it has 200 scans, more than 64" in refusal(path)


def test_a_jpeg_of_countless_segments_is_not_opened(tmp_path, monkeypatch):
    """Pillow would read each of them before it knows the size."""
    path = tmp_path / "x.jpg"
    Image.new("RGB", (64, 48), "red").save(path)
    whole, comment = path.read_bytes(), b"\xff\xfe\0\2"
    path.write_bytes(whole[:2] + comment * 1000 + whole[2:])
    assert read_image(path).size == (64, 48)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    path.write_bytes(whole[:2] + comment * 1024 + whole[2:])
    assert "it has more than 1024 segments" in refusal(path)


def test_the_work_of_an_image_is_known_before_it_is_decoded(tmp_path, monkeypatch):
    path = tmp_path / "x.jpg"
    with_scans(path, 10)
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    assert decoding_work(path.read_bytes(), "image") == 64 * 48 * 10
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(10**6))
    assert decoding_work(path.read_bytes(), "image") == len(whole) + 10**6  # what waits takes memory, too


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_what_8_bits_a_channel_cut_off_is_said(tmp_path, mode):
    path, said = tmp_path / "grey.tif", []
    Image.new(mode, (5, 4), 1000).save(path)
    assert read_image(path, said.append).getpixel((0, 0)) == (255, 255, 255)
    assert said == [f"image {path} has more than 8 bits a channel: what is above 255 becomes white, as in torchvision"]
    Image.new("L", (5, 4), 100).save(path)
    assert read_image(path, said.append).getpixel((0, 0)) == (100, 100, 100)
    assert len(said) == 1
