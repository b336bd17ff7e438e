"""Damage every kind of file that is read, in a seeded way, and read it: it is read, or refused in one line.

  python maintenance/checks/fuzz_files.py --flips 10000               all, a quarter of an hour
  python maintenance/checks/fuzz_files.py --flips 300 --format torch.pth --format map.yaml

A flip is one of: a bit turned over, a byte replaced, the end cut off, some bytes put in, some zeroed. In place of a
damaged pickle, the formats named "grown" have one that a grammar made (see grown_pickles.py). One process reads all
files, with as much memory above what it has at the beginning of a format as that format's bound says. A failure is any
other exception than a refusal, a refusal of another form than one line that names the file, one for want of memory, and
a reading of more than 20 seconds, or 2 of a grown pickle; a crash ends the program. The file that did it is the last
in the folder that is named first.

Exit status: 0 no failure, 1 some.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import pickle
import random
import resource
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.lib import format as npy_format
from PIL import Image

from maintenance.benchmarks.speed import in_kilobytes
from maintenance.checks.grown_pickles import grown
from mobilenetv3_common.images import MOST_PIXELS, read_image
from mobilenetv3_common.metrics import MetricsLog, read_metrics
from portproof.commands.arguments import read_map
from portproof.io.ckpt import load_ckpt, save_ckpt
from portproof.io.records import save_record
from portproof.ladder.pairs.named import load_inputs
from sturdyio.cli import ArgumentParser, HelpFormatter, UserError, positive_int, run
from sturdyio.files import load_npy, load_safetensors, most_memory, save_safetensors

PROG = "fuzz_files"
LONGEST = 20  # seconds that a file may take
GROWN_MEMORY, GROWN_LONGEST = 2**29, 2  # bytes and seconds for a grown pickle
IMAGE_BYTES = 20 * MOST_PIXELS  # see images.py

rng = np.random.default_rng(0)
ARRAYS = {
    "conv.weight": rng.standard_normal((4, 3, 2, 2)).astype(np.float32),
    "norm.running_mean": rng.standard_normal(4).astype(np.float32),
    "norm.num_batches_tracked": np.array(7),
    "linear.weight": rng.standard_normal((4, 5)),
}


def damaged(data: bytes, draws: random.Random) -> bytes:
    """`data` with one flip."""
    at = draws.randrange(len(data))
    kind = draws.choice(("bit", "byte", "cut", "insert", "zero"))
    if kind == "cut":
        return data[:at]
    length = draws.randint(1, 64)
    new = {
        "bit": lambda: bytes([data[at] ^ 1 << draws.randrange(8)]),
        "byte": lambda: draws.randbytes(1),
        "insert": lambda: draws.randbytes(length) + data[at : at + 1],
        "zero": lambda: bytes(len(data[at : at + length])),
    }[kind]()
    return data[:at] + new + data[at + (length if kind == "zero" else 1) :]


@dataclass
class Format:
    """A kind of file: what writes a sound one, what reads it, and the memory that this may take, in bytes.

    `seal` makes a file of the damaged bytes, such as one whose sums fit; `damage` is what damages them.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    memory: int = 2 * most_memory(2**14)  # its content, and one copy of it while it is made
    seal: Callable[[bytes], bytes] = bytes
    damage: Callable[[bytes, random.Random], bytes] = damaged
    longest: float | None = None  # seconds that a file may take; None: LONGEST


@dataclass
class Row:
    """What became of a format's flips."""

    format: str
    flips: int
    refused: int = 0
    valid: int = 0
    failures: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds
    peak: int = 0  # bytes above those at the beginning


def framework_formats(name: str, package: ModuleType, suffix: str, to_tensor: Callable) -> dict[str, Format]:
    """The files of a package and of the kit's backend: weights, checkpoints."""
    from mobilenetv3_common.digest import digest
    from portproof.backends import backend

    weights, checkpoint = package.models.weights, package.train.checkpoint
    state = {key: to_tensor(array) for key, array in ARRAYS.items()}
    content: dict[str, Any] = dict.fromkeys(sorted(checkpoint.KEYS - {"digest"})) | {
        "model": state,
        "optimizer": {"state": {0: {"step": 3.0}}, "param_groups": [{"betas": (0.9, 0.99), "params": [0]}]},
        "args": {"lr": 0.1, "opt": "sgd", "resume": None},
        "epoch": 3,
    }

    def write_checkpoint(path: Path) -> None:
        weights.save_pickle(content, path)
        read = weights.load_pickle(path)
        weights.save_pickle({**content, "digest": digest(read)}, path)

    def save(path: Path) -> None:
        weights.save_pickle(state, path)

    return {
        f"{name}{suffix}": Format(save, weights.read_weights),
        f"{name} kit{suffix}": Format(save, backend(name).read_weights),
        f"{name} checkpoint{suffix}": Format(write_checkpoint, checkpoint.read_checkpoint),
        f"{name}.safetensors": Format(lambda path: save_safetensors(ARRAYS, path), weights.read_weights),
    }


def torch_formats() -> dict[str, Format]:
    import torch

    import mobilenetv3_ref.models.weights
    import mobilenetv3_ref.train.checkpoint

    read = mobilenetv3_ref.models.weights.read_weights
    state = {key: torch.from_numpy(array.copy()) for key, array in ARRAYS.items()}
    pickled = io.BytesIO()
    torch.save(state, pickled)

    def save_legacy(path: Path) -> None:
        torch.save(state, path, _use_new_zipfile_serialization=False)

    def save_pickle(path: Path) -> None:
        with zipfile.ZipFile(pickled) as archive:
            path.write_bytes(archive.read("archive/data.pkl"))

    def seal_pickle(damaged: bytes) -> bytes:
        """An archive like `pickled`, with this in it as the pickle."""
        made = io.BytesIO()
        with zipfile.ZipFile(pickled) as old, zipfile.ZipFile(made, "w") as new:
            for name in old.namelist():
                new.writestr(name, damaged if name.endswith("data.pkl") else old.read(name))
        return made.getvalue()

    found = framework_formats("torch", mobilenetv3_ref, ".pth", lambda array: torch.from_numpy(array.copy()))
    found["torch legacy.pth"] = Format(save_legacy, read)
    found["torch pickle.pth"] = Format(save_pickle, read, seal=seal_pickle)
    return found | recording_formats(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))


def recording_formats(model: Any) -> dict[str, Format]:
    import portproof
    from portproof.recording.file import NAME, Recording, sealed
    from sturdyio.files import load_safetensors_with_metadata

    recorded = portproof.record(model, (np.ones((2, 3), np.float32),))
    with tempfile.TemporaryDirectory() as folder:
        recorded.save(f"{folder}/recording.safetensors")
        arrays, texts = load_safetensors_with_metadata(f"{folder}/recording.safetensors")
    body = texts[NAME].partition("\n")[2]

    def seal_text(damaged: bytes) -> bytes:
        """A recording with this text, whose digest fits."""
        return safetensors.numpy.save(arrays, {NAME: sealed(damaged.decode("utf-8", "replace"))})

    return {
        "recording.safetensors": Format(recorded.save, Recording.load),
        "recording text.safetensors": Format(lambda path: path.write_text(body), Recording.load, seal=seal_text),
    }


def paddle_formats() -> dict[str, Format]:
    import paddle

    import mobilenetv3_paddle.models.weights
    import mobilenetv3_paddle.train.checkpoint

    def save_new(path: Path) -> None:
        paddle.save({key: paddle.to_tensor(array) for key, array in ARRAYS.items()}, str(path), protocol=4)

    read = mobilenetv3_paddle.models.weights.read_weights
    found = framework_formats("paddle", mobilenetv3_paddle, ".pdparams", paddle.to_tensor)
    return found | {"paddle protocol 4.pdparams": Format(save_new, read)}


def array_formats() -> dict[str, Format]:
    def save_ckpt_with_sum(path: Path) -> None:
        save_ckpt(ARRAYS, path)
        data = path.read_bytes()
        path.write_bytes(data + b"crc_num" + zlib.crc32(data).to_bytes(10, "big"))

    return {
        "record.npy": Format(lambda path: save_record(ARRAYS, path), load_npy),
        "array.npy": Format(lambda path: np.save(path, ARRAYS["linear.weight"]), load_npy),
        "inputs.npz": Format(lambda path: np.savez(path, *ARRAYS.values()), load_inputs),
        "inputs deflated.npz": Format(lambda path: np.savez_compressed(path, **ARRAYS), load_inputs),
        "results.safetensors": Format(lambda path: save_safetensors(ARRAYS, path), load_safetensors),
        "mindspore.ckpt": Format(lambda path: save_ckpt(ARRAYS, path), load_ckpt),
        "mindspore sum.ckpt": Format(save_ckpt_with_sum, load_ckpt),
    }


def text_formats() -> dict[str, Format]:
    def write_metrics(path: Path) -> None:
        log = MetricsLog(path)
        for step in range(1, 7):
            log.write("train", epoch=0, step=step, loss=2.5 / step, lr=0.1)
        log.write("eval", epoch=0, step=6, loss=1.25, top1=0.5)
        log.close()

    lines = "conv1: conv_1\nlayer1.0.conv2: layers.0.conv\n'0': \"1\"\nattn.in_proj: [attn.q, attn.k, attn.v]\n"
    return {
        "map.yaml": Format(lambda path: path.write_text(lines), read_map),
        "metrics.jsonl": Format(write_metrics, read_metrics),
    }


def image_formats() -> dict[str, Format]:
    noise = Image.fromarray(rng.integers(0, 256, (6, 5, 3), np.uint8)).resize((40, 30))
    kinds: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "gray.jpg": (noise.convert("L"), {"progressive": True}),
        "cmyk.jpg": (noise.convert("CMYK"), {}),
        "color.jpg": (noise, {"exif": exif()}),
        "palette.png": (noise.quantize(16), {"transparency": 3}),
        "color.png": (noise.convert("RGBA"), {}),
        "color.ppm": (noise, {}),
        "color.bmp": (noise, {}),
        "raw.tif": (noise, {}),
        "deflate.tif": (noise, {"compression": "tiff_adobe_deflate"}),
        "lzw.tif": (noise, {"compression": "tiff_lzw"}),
        "jpeg.tif": (noise, {"compression": "jpeg"}),
        "color.webp": (noise, {"quality": 80}),
        "lossless.webp": (noise.convert("RGBA"), {"lossless": True}),
    }
    found = {
        name: Format(lambda path, image=image, how=how: image.save(path, **how), read_image, IMAGE_BYTES)
        for name, (image, how) in kinds.items()
    }
    return found | {"gif.jpg": Format(lambda path: noise.save(path, "GIF"), read_image, IMAGE_BYTES)}


def exif() -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = 6  # orientation
    return found


def grown_formats() -> dict[str, Format]:
    """What reads pickles, each given those that a grammar made."""
    import torch  # noqa: F401 - what its import takes is not the reader's

    from sturdyio.files import load_pdparams
    from sturdyio.pth import MAGIC, VERSION, load_pth

    def write(path: Path) -> None:
        path.write_bytes(pickle.dumps({"x": np.ones(2)}, 2))

    def record(pickled: bytes) -> bytes:
        made = io.BytesIO()
        npy_format.write_array_header_1_0(made, {"descr": "|O", "fortran_order": False, "shape": ()})
        array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
        state = b"(K\x01)cnumpy\ndtype\n(U\x02O8K\x00K\x01tR\x89]" + pickled[2:-1] + b"atb."
        return made.getvalue() + b"\x80\x02" + array + state

    def zipped(pickled: bytes) -> bytes:
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("a/data.pkl", pickled)
            archive.writestr("a/data/0", bytes(64))
        return made.getvalue()

    def legacy(pickled: bytes) -> bytes:
        head = [pickle.dumps(value, 2) for value in (MAGIC, VERSION, {"little_endian": True})]
        return b"".join(head) + pickled + pickle.dumps([], 2)

    kinds = {
        "grown.pdparams": (load_pdparams, bytes),
        "grown.npy": (load_npy, record),
        "grown zip.pth": (load_pth, zipped),
        "grown legacy.pth": (load_pth, legacy),
    }

    def damage(_whole: bytes, draws: random.Random) -> bytes:
        return grown(draws)

    return {
        name: Format(write, read, GROWN_MEMORY, seal, damage, GROWN_LONGEST) for name, (read, seal) in kinds.items()
    }


GROUPS = (array_formats, text_formats, image_formats, torch_formats, paddle_formats, grown_formats)


def complaint(path: Path, read: Callable[[Path], Any]) -> str | None:
    """How `read` fails, "" if it refuses the file as it should, None if it reads it."""
    try:
        read(path)
    except UserError as error:
        if isinstance(error.__cause__, MemoryError) or "alloc" in str(error):
            return f"takes too much memory: {error}"
        return "" if str(path) in str(error) and str(error).isprintable() else f"refused otherwise: {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def limited(memory: int) -> Iterator[None]:
    """This process has so many bytes more than now, as far as address space goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_kilobytes("VmSize") * 1024 + memory, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def fuzz(name: str, kind: Format, folder: Path, flips: int, seed: int) -> Row:
    """Read `flips` damaged files of a format, after a sound one."""
    path, row = folder / name, Row(name, flips)
    kind.write(path)
    whole = path.read_bytes()
    path.write_bytes(kind.seal(whole))
    kind.read(path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = in_kilobytes("VmHWM")
    with limited(kind.memory):
        for number in range(flips):
            path.write_bytes(kind.seal(kind.damage(whole, random.Random(f"{seed} {name} {number}"))))
            faulthandler.dump_traceback_later(kind.longest or LONGEST, exit=True)
            start = time.perf_counter()
            said = complaint(path, kind.read)
            row.longest = max(row.longest, time.perf_counter() - start)
            faulthandler.cancel_dump_traceback_later()
            row.valid += said is None
            row.refused += said == ""
            if said:
                row.failures.append(f"flip {number}: {said:.500}")
    row.peak = max(0, in_kilobytes("VmHWM") - before) * 1024
    path.unlink()
    return row


def get_args_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--flips", type=positive_int, default=300, metavar="N", help="of each format")
    add("--format", action="append", metavar="NAME", help="one of those that the table names (all)")
    add("--seed", type=int, default=0, metavar="N", help="of the draws")
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser


def main(args: argparse.Namespace) -> int:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    formats = {name: kind for group in GROUPS for name, kind in group().items()}
    unknown = set(args.format or ()) - formats.keys()
    if unknown:
        raise UserError(f"--format {unknown.pop()} is none of {', '.join(formats)}")
    rows = []
    folder = Path(tempfile.mkdtemp(prefix="fuzz_files."))
    print(
        f"files in {folder}\n{'format':30}{'flips':>7}{'refused':>9}{'valid':>7}{'fail':>6}{'longest':>12}{'peak':>9}"
    )
    for name in args.format or formats:
        row = fuzz(name, formats[name], folder, args.flips, args.seed)
        rows.append(row)
        counts = f"{row.flips:7}{row.refused:9}{row.valid:7}{len(row.failures):8}"
        print(f"{name:30}{counts}{row.longest * 1000:9.0f} ms{row.peak / 1e6:6.0f} MB", flush=True)
        print("".join(f"  {failure}\n" for failure in row.failures[:5]), end="", flush=True)
    folder.rmdir()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    failures = sum(len(row.failures) for row in rows)
    print(f"{'FAIL' if failures else 'PASS'} {PROG}: {failures} of {sum(row.flips for row in rows)} flips failed")
    return int(failures > 0)


if __name__ == "__main__":
    run(lambda: main(get_args_parser().parse_args()), PROG)
