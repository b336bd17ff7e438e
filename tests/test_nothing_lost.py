"""Training that is killed, preempted or out of disk space: what is on disk then, and that it ends all the same.

Killed runs are 10 a side, and without --all one of the port; this kills more:

    KILLS=1000 sh shell/test.sh --all tests/test_nothing_lost.py
"""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_train_shell import ended, trainers

ROOT = Path(__file__).parents[1]
PACKAGES = ("mobilenetv3_ref", "mobilenetv3_paddle")
KILLS = int(os.environ.get("KILLS", "10"))
# All that has a state or draws: of 12 images, batches of 4, the last of which is a step of its own.
RECIPE = [
    *("--train-crop-size", "32", "--val-crop-size", "32", "--val-resize-size", "32", "--batch-size", "4"),
    *("--workers", "0", "--epochs", "3", "--print-freq", "1", "--opt", "rmsprop", "--lr", "0.01", "--dropout", "0.5"),
    *("--lr-warmup-epochs", "1", "--gradient-accumulation-steps", "2", "--model-ema", "--model-ema-steps", "1"),
    *("--auto-augment", "imagenet", "--random-erase", "0.5", "--mixup-alpha", "0.2", "--checkpoint-freq", "1"),
]


@pytest.fixture(params=PACKAGES)
def package(request) -> str:
    """Each package in turn."""
    return request.param


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """12 training and 6 validation images in 3 classes."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for name in ("cat", "dog", "emu"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(rng.integers(0, 256, (36, 40, 3), np.uint8))
                image.save(root / split / name / f"{i}.png")
    return root


def content(folder: Path, package: str) -> dict[str, bytes]:
    """All that a run leaves, by file: its weights and checkpoint without the flags, and its record."""
    checkpoints = importlib.import_module(f"{package}.train.checkpoint")
    digest = importlib.import_module("mobilenetv3_common.digest").digest
    found = {"metrics.jsonl": (folder / "metrics.jsonl").read_bytes()}
    for path in folder.glob(f"*{checkpoints.SUFFIX}"):
        value = checkpoints.load_pickle(path)
        found[path.name] = digest({key: item for key, item in value.items() if key not in ("args", "digest")}).encode()
    return found


def environment() -> dict[str, str]:
    return os.environ | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.thorough("test_a_full_disk_leaves_the_last_checkpoint, test_a_resumed_run_ends_like_an_unbroken_one")
@pytest.mark.timeout(300 + 30 * KILLS)
def test_killed_runs_end_like_an_unbroken_one(package, data, tmp_path):
    command = [sys.executable, ROOT / "tests" / "killed_runs.py", package, str(KILLS), "0", tmp_path]
    done = subprocess.run(
        [*map(str, command), *RECIPE, f"--data-path={data}"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"killed {KILLS} times")
    unbroken = content(tmp_path / "unbroken", package)
    assert len(unbroken) == 8  # three epochs' weights and averages, a checkpoint, the record
    runs = sorted(tmp_path.glob("killed_*"))
    for folder in runs:
        assert content(folder, package) == unbroken, folder
        left = {path.name for path in folder.iterdir() if not path.match("metrics.*.jsonl")}  # of earlier beginnings
        assert left - {"run.lock"} == unbroken.keys()  # nothing half-written; the lock of one killed when all was done


def command(package: str, data: Path, out: Path, *flags: str | Path) -> list[str]:
    line = [sys.executable, "-m", f"{package}.train", *RECIPE, "--data-path", data, "--output-dir", out, *flags]
    return list(map(str, line))


@pytest.mark.thorough(
    "test_a_full_disk_leaves_the_last_checkpoint, test_a_killed_process_takes_the_others_down_and_is_named"
)
@pytest.mark.timeout(200 + 60 * KILLS // 20)
def test_killed_processes_end_like_unbroken_ones(package, data, tmp_path):
    """Of two that train together one is killed, once for every 20 kills of a single one."""
    suffix = importlib.import_module(f"{package}.train.checkpoint").SUFFIX
    rng = np.random.default_rng(0)

    def start(out: Path) -> subprocess.Popen:
        resume = [f"--resume={path}" for path in out.glob(f"checkpoint{suffix}")]
        flags = [*RECIPE, "--data-path", data, "--output-dir", out, *resume]
        return subprocess.Popen(
            ["sh", str(ROOT / "shell" / "train_dist.sh"), *map(str, flags)],
            cwd=tmp_path,
            env=environment() | {"FRAMEWORK": {"mobilenetv3_ref": "torch"}.get(package, "paddle")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(process: subprocess.Popen) -> int:
        stderr = process.communicate(timeout=100)[1]
        assert "Traceback" not in stderr
        return process.returncode

    assert finish(start(tmp_path / "unbroken")) == 0
    out = tmp_path / "killed"
    for _ in range(max(1, KILLS // 20)):
        process = start(out)
        wait_for(out / f"checkpoint{suffix}", process)
        time.sleep(rng.uniform(0, 0.5))
        ranks = [pid for pid, rank in trainers(tmp_path).items() if rank]
        if not ranks:  # it has ended
            break
        os.kill(int(rng.choice(ranks)), signal.SIGKILL)
        assert finish(process) != 0
    assert finish(start(out)) == 0
    assert content(out, package) == content(tmp_path / "unbroken", package)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


# The training command, whose loader's workers start as argv[1] says.
STARTED = """
import importlib, multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv.pop(1))
    importlib.import_module(sys.argv.pop(1) + ".train.main").command()
"""
# Prints the bits of two batches out of three, and stays there.
READING = """
import hashlib, importlib, multiprocessing, sys, time
def read(package, data_path, workers):
    data = importlib.import_module(package + ".data")
    dataset = data.build_dataset(data_path, train=True, crop_size=32, auto_augment="imagenet", random_erase=0.5)
    batches = iter(data.build_loader(dataset, 4, train=True, workers=workers))
    two = [tensor.numpy().tobytes() for batch in (next(batches), next(batches)) for tensor in batch]
    return batches, hashlib.sha256(b"".join(two)).hexdigest()
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    batches, digest = read(*sys.argv[2:], 2)
    print(digest, flush=True)
    time.sleep(600)
"""
METHODS = ("fork", "spawn", "forkserver")


@pytest.mark.thorough("one of the port's", but="paddle-spawn")
@pytest.mark.parametrize("method", METHODS[1:])
def test_workers_read_the_same_bits_and_end_with_a_killed_run(package, method, data, tmp_path):
    (tmp_path / "reading.py").write_text(READING)
    command = [sys.executable, "reading.py", method, package, str(data)]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    bits = process.stdout.readline().strip()
    assert len(trainers(tmp_path)) >= 3
    process.kill()
    process.wait()
    process.stdout.close()
    assert ended(tmp_path)
    assert bits == runpy.run_path(str(tmp_path / "reading.py"))["read"](package, data, 0)[1]


@pytest.mark.thorough("one of the port's", but=r"paddle-fork\]")
@pytest.mark.parametrize("method", METHODS)
def test_sigterm_to_all_processes_saves_and_exits(package, method, data, tmp_path):
    """As a cluster sends it, to the loader's workers, too, and to those that are just being started."""
    out = tmp_path / "out"
    suffix = importlib.import_module(f"{package}.train.checkpoint").SUFFIX
    flags = ("--workers", "1", "--epochs", "100", "--checkpoint-freq", "0")
    (tmp_path / "started.py").write_text(STARTED)
    line = command(package, data, out, *flags)
    line = [sys.executable, "started.py", method, package, *line[line.index(f"{package}.train") + 1 :]]
    process = subprocess.Popen(
        line,
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(out / f"checkpoint{suffix}", process)
    time.sleep(0.5)  # those of the next epoch, if they are not forked, import a framework
    os.killpg(process.pid, signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    last = stderr.splitlines()[-1]
    assert process.returncode == 143, stderr
    assert ended(tmp_path)
    assert last.startswith(f"python -m {package}.train: stopped by SIGTERM ")
    assert last.endswith(f"go on with --resume {out / f'checkpoint{suffix}'}")
    assert "Traceback" not in stderr
    saved = importlib.import_module(f"{package}.train.checkpoint").read_checkpoint(out / f"checkpoint{suffix}")
    assert saved["epoch"] < 100


# A process that may not write files above a size finds a disk full in the middle of a file, and with an OSError, too.
FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv[:2] = ["train"]
from {package}.train.main import command
command()
"""


@pytest.mark.thorough("the port", but="paddle")
def test_a_full_disk_leaves_the_last_checkpoint(package, data, tmp_path):
    """It takes the weights of the first epoch (6.2 MB), and no more of the checkpoint than 20 MB."""
    out = tmp_path / "out"
    suffix = importlib.import_module(f"{package}.train.checkpoint").SUFFIX
    line = [*command(package, data, out, "--epochs", "1", "--lr-warmup-epochs", "0")[3:]]
    first = subprocess.run(
        [sys.executable, "-c", FULL_DISK.format(package=package), "1000000000", *line],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert first.returncode == 0, first.stderr
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".jsonl"}
    second = subprocess.run(
        [sys.executable, "-c", FULL_DISK.format(package=package), "7000000", *line, "--seed", "1"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2, second.stderr
    last = second.stderr.splitlines()[-1]
    assert f"{out / f'checkpoint{suffix}'} cannot be written" in last and last.endswith(
        "free space or choose another folder"
    )
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".jsonl"}
    assert after == before
