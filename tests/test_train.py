"""The two training commands in one process: what each flag does, how a run is resumed, what is refused and how."""

import argparse
import errno
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import paddle
import pytest
import torch
from PIL import Image

import mobilenetv3_paddle.train.main
import mobilenetv3_ref.models
import mobilenetv3_ref.train.main
from mobilenetv3_common import log
from mobilenetv3_common.arguments import get_args_parser
from mobilenetv3_common.metrics import read_metrics
from portproof.backends import backend
from portproof.convert.rules import torch_to_paddle
from sturdyio.cli import Stopped, UserError
from sturdyio.files import save_safetensors
from sturdyio.locks import FolderLock

pytestmark = pytest.mark.thorough("the port", but="^(?!reference)")
ROOT = Path(__file__).parents[1]
SIDES = {
    "reference": SimpleNamespace(package=mobilenetv3_ref, framework=torch, to_tensor=torch.from_numpy),
    "port": SimpleNamespace(package=mobilenetv3_paddle, framework=paddle, to_tensor=paddle.to_tensor),
}
SMALL = "--train-crop-size 32 --val-crop-size 32 --val-resize-size 32 --batch-size 4 --workers 0 --epochs 1 --lr 0.05"
CLASSES = ("cat", "dog", "emu")
LINE = re.compile(
    r"\[Epoch (?P<epoch>\d+), iter: (?P<iter>\d+)\] acc: (?P<acc>\d\.\d{5}), lr: (?P<lr>\d\.\d{5}), "
    r"loss: (?P<loss>\d+\.\d{5}), avg_reader_cost: (?P<reader>\d+\.\d{5}) sec, "
    r"avg_batch_cost: (?P<batch>\d+\.\d{5}) sec, avg_samples: (?P<samples>\d+\.\d+), "
    r"avg_ips: (?P<ips>\d+\.\d{5}) images/sec\., eta: (?P<eta>\d:\d\d:\d\d)"
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """At this size a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SIDES.values(), ids=SIDES.keys())
def side(request) -> SimpleNamespace:
    """Each package in turn."""
    return request.param


def write_images(root: Path, train: int = 4, val: int = 2, classes: tuple[str, ...] = CLASSES, seed: int = 0) -> Path:
    """`root` with `train` and `val` images a class, 40 x 36 pixels."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(rng.integers(0, 256, (36, 40, 3), np.uint8))
                image.save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """12 training and 6 validation images in 3 classes."""
    return write_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def weights(probe, tmp_path_factory) -> Callable[..., Path]:
    """weights(side, num_classes=3): a file of probe weights, the same network for both sides."""
    folder = tmp_path_factory.mktemp("weights")

    def write(side: SimpleNamespace, num_classes: int = 3) -> Path:
        arrays = probe("mobilenet_v3_small", num_classes=num_classes)
        if side.package is mobilenetv3_paddle:
            arrays = torch_to_paddle(arrays, backend("torch").layers.types(mobilenetv3_ref.models.mobilenet_v3_small()))
        path = folder / f"{side.package.__name__}_{num_classes}.safetensors"
        save_safetensors(arrays, path)
        return path

    return write


def parse(side: SimpleNamespace, data: Path, out: Path, *flags: str | float | Path) -> argparse.Namespace:
    flags = (*SMALL.split(), "--data-path", data, "--output-dir", out, *flags)
    return get_args_parser("train", "either").parse_args([str(flag) for flag in flags])


def train(side: SimpleNamespace, data: Path, out: Path, *flags: str | float | Path) -> None:
    side.package.train.main.main(parse(side, data, out, *flags))


def suffix(side: SimpleNamespace) -> str:
    return side.package.train.checkpoint.SUFFIX


def flat(value, name: str = "") -> dict[str, np.ndarray]:
    """The leaves of nested containers as arrays, by their path."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, item in items for path, leaf in flat(item, f"{name}/{key}").items()}
    return {name: value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)}


def state(side: SimpleNamespace, out: Path) -> dict[str, np.ndarray]:
    """All that the checkpoint of a run holds: model, optimizer, schedule, epoch; without the flags."""
    content = side.package.models.weights.load_pickle(out / f"checkpoint{suffix(side)}")
    del content["args"], content["digest"]
    return flat(content)


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """The names of what is not in both with the same dtype and the same bits."""

    def bits(arrays: dict[str, np.ndarray], name: str) -> tuple | None:
        return (arrays[name].dtype, arrays[name].tobytes()) if name in arrays else None

    return [name for name in a | b if bits(a, name) != bits(b, name)]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Callable[..., dict[str, np.ndarray]]:
    """trained(side, *flags): the state after a run, made once."""
    states = {}

    def run_once(side: SimpleNamespace, *flags: str | float) -> dict[str, np.ndarray]:
        key = (side.package, *flags)
        if key not in states:
            out = tmp_path_factory.mktemp("trained")
            train(side, data, out, *flags)
            states[key] = state(side, out)
        return states[key]

    return run_once


# Flags that change the weights: those they are added to, and they.
CHANGES_WEIGHTS = {
    "train_crop_size": ((), ("--train-crop-size", 40)),
    "model": ((), ("--model", "mobilenet_v3_large")),
    "dropout": ((), ("--dropout", 0.9)),
    "freeze_norm": ((), ("--freeze-norm",)),
    "epochs": ((), ("--epochs", 2)),
    "batch_size": ((), ("-b", 6)),
    "lr": ((), ("--lr", 0.02)),
    "momentum": ((), ("--momentum", 0.5)),
    "weight_decay": ((), ("--wd", 0.01)),
    "label_smoothing": ((), ("--label-smoothing", 0.1)),
    "seed": ((), ("--seed", 1)),
    "lr_step_size": (("--epochs", 2), ("--lr-step-size", 1)),
    "lr_gamma": (("--epochs", 2, "--lr-step-size", 1), ("--lr-gamma", 0.5)),
    "train_crop_scale": ((), ("--train-crop-scale", 0.9)),
    "hflip_prob": ((), ("--hflip-prob", 0)),
    "auto_augment": ((), ("--auto-augment", "imagenet")),
    "random_erase": ((), ("--random-erase", 1)),
    "mixup_alpha": ((), ("--mixup-alpha", 1)),
    "cutmix_alpha": ((), ("--cutmix-alpha", 1)),
    "shared_init": ((), ("--shared-init",)),
    "opt": ((), ("--opt", "rmsprop")),
    "norm_weight_decay": ((), ("--norm-weight-decay", 0.1)),
    "bias_weight_decay": ((), ("--bias-weight-decay", 0.1)),
    "clip_grad_norm": ((), ("--clip-grad-norm", 0.1)),
    "gradient_accumulation_steps": ((), ("--gradient-accumulation-steps", 2)),
    "lr_scheduler": (("--epochs", 2), ("--lr-scheduler", "exponentiallr")),
    "lr_min": (("--epochs", 2, "--lr-scheduler", "cosineannealinglr"), ("--lr-min", 0.04)),
    "lr_warmup_epochs": (("--epochs", 2), ("--lr-warmup-epochs", 1)),
    "lr_warmup_method": (("--epochs", 3, "--lr-warmup-epochs", 2), ("--lr-warmup-method", "linear")),
    "lr_warmup_decay": (("--epochs", 2, "--lr-warmup-epochs", 1), ("--lr-warmup-decay", 0.5)),
}
# Where the effect of the others is shown.
ELSEWHERE = {
    "data_path": "test_other_images_give_other_weights",
    "weights": "test_training_starts_from_the_weights",
    "val_crop_size": "test_only_evaluates",
    "val_resize_size": "test_only_evaluates",
    "test_only": "test_only_evaluates",
    "workers": "test_workers_read_the_images_and_change_no_bit",
    "device": "test_a_mistake_is_one_line",
    "output_dir": "test_a_run_writes_and_logs",
    "print_freq": "test_print_freq",
    "resume": "test_a_resumed_run_ends_like_an_unbroken_one",
    "finetune": "test_finetunes_for_other_classes",
    "sync_bn": "test_sync_bn_alone_changes_nothing",
    "model_ema": "test_the_average_is_evaluated_and_saved",
    "model_ema_steps": "test_the_average_is_evaluated_and_saved",
    "model_ema_decay": "test_the_average_is_evaluated_and_saved",
    "amp": "test_mixed_precision",
    "checkpoint_freq": "test_saves_within_an_epoch",
    "event_log": "test_event_log",
}


def test_every_flag_is_tested():
    flags = {action.dest for action in get_args_parser("train", "either")._actions} - {"help"}
    assert flags == CHANGES_WEIGHTS.keys() | ELSEWHERE.keys()
    assert not CHANGES_WEIGHTS.keys() & ELSEWHERE.keys()
    assert [name for name in ELSEWHERE.values() if name not in globals()] == []


@pytest.mark.thorough("one flag of each kind", but=r"-(lr|opt|dropout|mixup_alpha|lr_warmup_epochs|model)\]")
@pytest.mark.parametrize("flag", CHANGES_WEIGHTS)
def test_flag_changes_the_weights(side, trained, flag):
    before, added = CHANGES_WEIGHTS[flag]
    changed = differing(trained(side, *before), trained(side, *before, *added))
    assert [name for name in changed if name.startswith("/model/") and name.endswith("weight")]


def test_the_same_flags_give_the_same_bits(side, data, trained, tmp_path):
    train(side, data, tmp_path)
    assert differing(state(side, tmp_path), trained(side)) == []


def test_the_seed_draws_the_initial_weights(side, trained):
    """With a learning rate of 0 they are still there at the end."""
    flags = ("--lr", 0, "--freeze-norm")
    changed = differing(trained(side, *flags), trained(side, *flags, "--seed", 1))
    assert [name for name in changed if name.startswith("/model/") and name.endswith("weight")]


def test_other_images_give_other_weights(side, trained, tmp_path):
    train(side, write_images(tmp_path / "data", seed=1), tmp_path)
    assert differing(state(side, tmp_path), trained(side))


def test_training_starts_from_the_weights(side, data, weights, tmp_path):
    """At a learning rate of 0 it ends there, too; only the running statistics move, unless they are frozen."""
    train(side, data, tmp_path, "--weights", weights(side), "--lr", 0, "--freeze-norm")
    read = side.package.models.read_weights
    assert differing(read(tmp_path / f"model_0{suffix(side)}"), read(weights(side))) == []


def test_workers_read_the_images_and_change_no_bit(side, data, trained, tmp_path, monkeypatch):
    def read_image(path):
        (tmp_path / str(os.getpid())).touch()
        return read(path)

    read = side.package.data.dataset.read_image
    monkeypatch.setattr(side.package.data.dataset, "read_image", read_image)
    for workers, readers in ((0, 1), (2, 4)):  # two each for training and evaluation
        train(side, data, tmp_path / "out", "--workers", workers)
        assert differing(state(side, tmp_path / "out"), trained(side)) == []
        pids = [int(file.name) for file in tmp_path.iterdir() if file.is_file()]
        assert (len(pids), os.getpid() in pids) == (readers, workers == 0)
        (tmp_path / str(os.getpid())).unlink(missing_ok=True)


def test_each_epoch_has_an_order_of_its_own(side, data, tmp_path, monkeypatch):
    def read_image(path):
        if Path(path).parents[1].name == "train":
            order.append(path)
        return read(path)

    order = []
    read = side.package.data.dataset.read_image
    monkeypatch.setattr(side.package.data.dataset, "read_image", read_image)
    train(side, data, tmp_path, "--epochs", 3)
    orders = [order[:12], order[12:24], order[24:]]
    assert [sorted(epoch) for epoch in orders] == [sorted(map(str, data.glob("train/*/*")))] * 3
    assert len(set(map(tuple, orders))) == 3


def test_a_run_writes_and_logs(side, data, tmp_path, capsys):
    train(side, data, tmp_path, "--epochs", 2, "--seed", 3)
    end = suffix(side)
    names = [f"checkpoint{end}", "metrics.jsonl", f"model_0{end}", f"model_1{end}"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    read = side.package.models.read_weights
    newest = read(tmp_path / f"model_1{end}")
    assert differing(read(tmp_path / f"checkpoint{end}"), newest) == []
    assert differing(read(tmp_path / f"model_0{end}"), newest)

    seed, *lines = capsys.readouterr().out.splitlines()
    assert seed == "seed 3, 1 process(es), global batch size 4"
    assert len(lines) == 4
    for epoch, (training, evaluation) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        values = LINE.fullmatch(training).groupdict()
        assert (values["epoch"], values["iter"], values["lr"], values["samples"]) == (str(epoch), "2", "0.05000", "4.0")
        assert float(values["acc"]) * 12 == pytest.approx(round(float(values["acc"]) * 12), abs=1e-3)
        assert float(values["ips"]) == pytest.approx(4 / float(values["batch"]), rel=0.01)
        assert re.fullmatch(
            rf"\[Eval, Epoch {epoch}\] top1: \d\.\d{{5}}, top5: 1\.00000, loss: \d\.\d{{5}}, samples: 6", evaluation
        )


@pytest.mark.parametrize("print_freq, iters", [(1, ["1", "2"]), (2, ["2"])])
def test_print_freq(side, data, tmp_path, capsys, print_freq, iters):
    train(side, data, tmp_path, "--print-freq", print_freq)
    assert [line["iter"] for line in LINE.finditer(capsys.readouterr().out)] == iters


class Clock:
    """Time that passes only when it is told to, and by a sixteenth of a second when something is written."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        self.lines = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def write(self, line: str) -> None:
        self.now += 0.0625
        self.lines.append(line)


@pytest.mark.parametrize(
    "num_batches, print_freq, iters",
    [(1, 10, [0]), (4, 1, [1, 2, 3]), (7, 3, [3, 6]), (8, 3, [3, 6, 7]), (5, 10, [4])],
)
def test_a_line_covers_the_batches_since_the_one_before(monkeypatch, num_batches, print_freq, iters):
    """Against the guide's format, with costs that are exact in binary; the time to write a line is nobody's cost."""
    clock = Clock(monkeypatch)
    training = log.TrainingLog(5, num_batches, print_freq, clock.write)
    form = (
        "[Epoch {}, iter: {}] acc: {:.5f}, lr: {:.5f}, loss: {:.5f}, avg_reader_cost: {:.5f} sec, "
        "avg_batch_cost: {:.5f} sec, avg_samples: {}, avg_ips: {:.5f} images/sec."
    )
    expected, first = [], 0
    for i in range(num_batches):
        clock.now += 0.25
        training.batch_read()
        clock.now += 0.5 + i
        training.batch_done(loss=i / 8, lr=0.1 / (i + 1), correct=i % 3, samples=4 + i)
        if i in iters:
            interval = range(first, i + 1)
            count, samples = len(interval), sum(4 + j for j in interval)
            cost = sum(0.75 + j for j in interval)
            acc = sum(j % 3 for j in interval) / samples
            numbers = (acc, 0.1 / (i + 1), i / 8, 0.25, cost / count, samples / count, samples / cost)
            expected.append(form.format(5, i, *numbers))
            first = i + 1
    assert clock.lines == expected


def logits_of(side: SimpleNamespace, model, image: np.ndarray) -> np.ndarray:
    with side.framework.no_grad():
        return model(side.to_tensor(image[None])).numpy()[0].astype(np.float64)


def oracle(side: SimpleNamespace, data: Path, weights: Path, crop: int, resize: int) -> tuple[float, float, float]:
    """Mean loss, top-1 and top-5 of the validation set, image by image, in NumPy."""
    dataset = side.package.data.build_dataset(data, train=False, crop_size=crop, resize_size=resize)
    model = side.package.models.mobilenet_v3_small(weights=weights, num_classes=len(dataset.classes))
    model.eval()
    losses, places = [], []
    for image, label in dataset:
        logits = logits_of(side, model, np.asarray(image))
        losses.append(np.log(np.exp(logits - logits.max()).sum()) - (logits[label] - logits.max()))
        places.append(int((logits > logits[label]).sum()))
    return np.mean(losses), np.mean([place < 1 for place in places]), np.mean([place < 5 for place in places])


@pytest.fixture(scope="module")
def wide_data(tmp_path_factory) -> Path:
    """7 classes, so that top-5 can miss."""
    return write_images(tmp_path_factory.mktemp("wide"), train=1, val=3, classes=tuple("abcdefg"))


@pytest.mark.thorough("one size", but="-32-48-")
@pytest.mark.parametrize("batch_size", [4, 21])
@pytest.mark.parametrize("crop, resize", [(32, 32), (48, 48), (32, 48)])
def test_only_evaluates(side, wide_data, weights, tmp_path, capsys, batch_size, crop, resize):
    """Every image once, whatever the batches; nothing is written; the sizes are those of the flags."""
    file = weights(side, 7)
    flags = ("--val-crop-size", crop, "--val-resize-size", resize, "-b", batch_size, "--test-only", "--weights", file)
    train(side, wide_data, tmp_path / "out", *flags)
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r"\[Eval\] top1: ([\d.]+), top5: ([\d.]+), loss: ([\d.]+), samples: 21", line)
    loss, top1, top5 = oracle(side, wide_data, file, crop, resize)
    assert [float(number) for number in found.groups()] == pytest.approx([top1, top5, loss], abs=2e-5)
    assert not (tmp_path / "out").exists()
    assert 0 < top5 < 1


def test_evaluation_of_a_checkpoint_is_that_of_its_run(side, data, tmp_path, capsys):
    train(side, data, tmp_path)
    end = suffix(side)
    for flags in (("--resume", tmp_path / f"checkpoint{end}"), ("--weights", tmp_path / f"model_0{end}")):
        train(side, data, tmp_path / "out", "--test-only", *flags)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[Eval")]
    assert [line.replace("Eval, Epoch 0", "Eval") for line in lines] == [lines[1]] * 3
    assert not (tmp_path / "out").exists()


SCHEDULE = ("--dropout", 0.5, "--lr-step-size", 2, "--lr-gamma", 0.5)


@pytest.mark.thorough("one set of flags", but="flags1")
@pytest.mark.parametrize("flags", [SCHEDULE, (*SCHEDULE, "--momentum", 0, "--freeze-norm", "--label-smoothing", 0.1)])
def test_a_resumed_run_ends_like_an_unbroken_one(side, data, trained, tmp_path, capsys, flags):
    """Two epochs and a third one: parameters, buffers, optimizer and schedule to the last bit."""
    train(side, data, tmp_path, *flags, "--epochs", 2)
    file = tmp_path / f"checkpoint{suffix(side)}"
    train(side, data, tmp_path / "resumed", *flags, "--epochs", 3, "--resume", file)
    assert f"resumed from {file} at epoch 2" in capsys.readouterr().out
    assert sorted(path.stem for path in (tmp_path / "resumed").iterdir()) == ["checkpoint", "metrics", "model_2"]
    unbroken = trained(side, *flags, "--epochs", 3)
    assert differing(state(side, tmp_path / "resumed"), unbroken) == []
    for part in ("/model/", "/optimizer/", "/lr_scheduler/", "/epoch"):
        assert differing({k: v for k, v in state(side, tmp_path).items() if k.startswith(part)}, unbroken)


def test_a_batch_of_one_image_is_trained_on(side, tmp_path):
    """The last of five in batches of four, at 64 pixels, where batch norm still has four values per channel."""
    data = write_images(tmp_path / "data", train=5, classes=("only",))
    train(side, data, tmp_path / "out", "--train-crop-size", 64)
    train(side, data, tmp_path / "frozen", "--train-crop-size", 32, "--freeze-norm")
    batches = {key: int(value) for key, value in state(side, tmp_path / "out").items() if key.endswith("_tracked")}
    assert set(batches.values()) == {2}
    frozen = state(side, tmp_path / "frozen")
    assert {int(frozen[key]) for key in batches} == {0}


class Abort(Exception):
    """Not the user's mistake."""


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error, raised", [(FULL, UserError), (Abort(), Abort)])
def test_a_save_that_fails_leaves_the_last_checkpoint(side, data, tmp_path, monkeypatch, error, raised):
    """Half of a file is on disk when it happens."""

    def save(content, target) -> None:
        with open(target, "wb") if isinstance(target, str) else target as file:  # noqa: PTH123  as paddle.save does
            file.write(b"half")
        raise error

    train(side, data, tmp_path)
    before = files(tmp_path)
    assert len(before) == 2
    monkeypatch.setattr(side.framework, "save", save)
    with pytest.raises(raised):
        train(side, data, tmp_path)
    assert files(tmp_path) == before


def files(folder: Path) -> dict[Path, bytes]:
    """All that a run leaves but the record of its numbers, which an attempt may have set aside and begun anew."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"}


@pytest.fixture
def refused(data, tmp_path, monkeypatch, capfd) -> Callable[..., str]:
    """refused(side, *flags): the line on stderr of a command that must end with status 2 and write nothing."""

    def command(side: SimpleNamespace, *flags: str | float | Path) -> str:
        before = files(tmp_path)
        flags = (*SMALL.split(), "--data-path", data, "--output-dir", tmp_path / "out", *flags)
        monkeypatch.setattr(sys, "argv", ["train", *map(str, flags)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            side.package.train.main.command()
        [line] = capfd.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert files(tmp_path) == before
        start = f"python -m {side.package.__name__}.train: error: "
        assert line.startswith(start)
        return line.removeprefix(start)

    return command


def test_an_older_framework_is_refused(side, refused, monkeypatch):
    """The lowest version is the one that pyproject.toml names, in each extra; a build without a version passes."""
    distribution = {"torch": "torch", "paddle": "paddlepaddle"}[side.framework.__name__]
    [lowest] = set(re.findall(rf'"{distribution}(?:>=([\d.]+))?"', (ROOT / "pyproject.toml").read_text()))
    major, minor = map(int, lowest.split("."))
    for version in (f"{major}.{minor - 1}.9+cu126", f"{major - 1}.99.0", f"{major}.{minor - 1}.0-rc1"):
        monkeypatch.setattr(side.framework, "__version__", version)
        words = f"{side.framework.__name__} {version} is older than {lowest}, the first that works here: "
        assert refused(side).startswith(words)
    for version in (f"{lowest}.0", f"{major}.{minor + 9}.1+cpu", f"{major + 1}.0.0", "0.0.0"):
        monkeypatch.setattr(side.framework, "__version__", version)
        assert side.package.device.select_device("cpu")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--device gpu", "--device gpu: this sees no card; use --device cpu"),
        ("--model mobilenet_v4", "--model 'mobilenet_v4' mobilenet_v3_small"),
        ("--batch-size 0", "--batch-size '0' at least 1"),
        ("--batch-size four", "--batch-size 'four'"),
        ("--epochs 0", "--epochs '0' at least 1"),
        ("--print-freq 0", "--print-freq '0' at least 1"),
        ("--train-crop-size 0", "--train-crop-size '0' from 1 to 2048"),
        ("--lr-step-size 0", "--lr-step-size '0' at least 1"),
        ("--workers -1", "--workers -1 is outside 0"),
        ("--seed -1", "--seed '-1' from 0 to 4294967295"),
        ("--dropout 1.1", "--dropout 1.1 is outside 0 to 1"),
        ("--label-smoothing 1.5", "--label-smoothing 1.5 is outside 0 to 1"),
        ("--seed 4294967296", "--seed '4294967296' from 0 to 4294967295"),
        ("--val-resize-size 99999999", "--val-resize-size from 1 to 2048"),
        ("--label-smoothing nan", "--label-smoothing nan is outside 0 to 1"),
        ("--lr -0.1", "--lr -0.1 is outside 0"),
        ("--lr inf", "--lr inf is outside 0"),
        ("--momentum -1", "--momentum -1.0 is outside 0 to 1"),
        ("--weight-decay -1", "--weight-decay -1.0 is outside 0"),
        ("--lr-gamma -1", "--lr-gamma -1.0 is outside 0"),
        ("--val-resize-size 31", "--val-resize-size 31 is smaller than --val-crop-size 32"),
        ("--batch-size 11", "--train-crop-size 32 one image --batch-size --freeze-norm"),
        ("--weights nowhere.pth", "weights nowhere.pth does not exist"),
        ("--resume nowhere.pth", "checkpoint nowhere.pth does not exist"),
        ("--resume a --weights b", "--resume and --weights both give one"),
        ("--test-only", "--test-only --weights or --resume"),
        ("--data-path nowhere", "data folder nowhere/val does not exist"),
        ("--workers", "--workers expected one argument"),
        ("--work 2", "unrecognized arguments: --work 2"),
    ],
)
def test_a_mistake_is_one_line(side, refused, flags, words):
    if flags == "--device gpu" and (torch.cuda.is_available() or paddle.device.cuda.device_count()):
        pytest.skip("this machine has a card")
    line = refused(side, *flags.split())
    assert [word for word in words.split() if word.strip("'") not in line] == []


def test_flags_are_checked_before_anything_else(side, refused, monkeypatch):
    """Whatever else would be wrong, too, and without a look at it."""
    for name in ("select_device", "build_loaders", "build_model"):
        monkeypatch.setattr(side.package.train.main, name, lambda *args: pytest.fail("the flags come first"))
    assert refused(side, "--data-path", "nowhere", "--lr", -1).startswith("--lr -1.0 is outside 0")


def test_data_that_will_not_do_is_named(side, refused, data, tmp_path):
    def broken(name: str) -> Path:
        return shutil.copytree(data, tmp_path / name)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"data folder {empty / 'val'} does not exist" in refused(side, "--data-path", empty)

    misnamed = broken("misnamed")
    (misnamed / "train").rename(misnamed / "training")
    assert f"data folder {misnamed / 'train'} does not exist" in refused(side, "--data-path", misnamed)

    other = broken("other")
    (other / "train" / "dog").rename(other / "train" / "dogs")
    assert re.search(f"{other}.* 2 .*dog, only in val", refused(side, "--data-path", other))

    hollow = broken("hollow")
    shutil.rmtree(hollow / "train" / "emu")
    (hollow / "train" / "emu").mkdir()
    assert f"data folder {hollow / 'train'} must hold one folder a class" in refused(side, "--data-path", hollow)

    flat_folder = broken("flat")
    shutil.rmtree(flat_folder / "val")
    shutil.copytree(data / "val" / "cat", flat_folder / "val")
    assert f"data folder {flat_folder / 'val'} must hold one folder a class" in refused(
        side, "--data-path", flat_folder
    )


@pytest.mark.timeout(120, method="thread")  # a signal would not wake Paddle's loader
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_broken_image_is_named(side, refused, data, tmp_path, workers, split):
    """A worker's exception comes out as a traceback of many lines; without workers Paddle's loader would hang."""
    broken = shutil.copytree(data, tmp_path / "data")
    image = broken / split / "dog" / "1.png"
    image.write_bytes(image.read_bytes()[:1000])
    line = refused(side, "--data-path", broken, "--workers", workers)
    assert line.startswith(f"image {image} cannot be read (")
    assert line.endswith("): replace or remove it")


@pytest.mark.timeout(120, method="thread")  # a signal would not wake Paddle's loader
def test_a_fault_in_the_data_code_is_no_users_mistake(side, data, tmp_path, monkeypatch):
    """It ends the run, with and without workers, with where it happened."""

    def read_image(path):
        raise TypeError("a fault in the code")

    monkeypatch.setattr(side.package.data.dataset, "read_image", read_image)
    for workers in (0, 2):
        with pytest.raises((TypeError, RuntimeError), match="a fault in the code"):
            train(side, data, tmp_path, "--workers", workers)
        assert multiprocessing.active_children() == []


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Callable[[SimpleNamespace], tuple[Path, Path]]:
    """finished(side): checkpoint and weights of a run of one epoch."""
    folders = {}

    def run_once(side: SimpleNamespace) -> tuple[Path, Path]:
        if side.package not in folders:
            folders[side.package] = tmp_path_factory.mktemp("finished")
            train(side, data, folders[side.package])
        out, end = folders[side.package], suffix(side)
        return out / f"checkpoint{end}", out / f"model_0{end}"

    return run_once


def test_a_checkpoint_that_will_not_do_is_named(side, refused, finished, tmp_path):
    checkpoint, model = finished(side)
    content = checkpoint.read_bytes()
    bad = tmp_path / f"bad{suffix(side)}"
    for damaged in (b"", content[: len(content) // 2], content[:-1], b"no checkpoint" * 99, bytes(5000)):
        bad.write_bytes(damaged)
        for flag in ("--resume", "--weights"):
            assert str(bad) in refused(side, flag, bad, "--epochs", 2)
    assert f"{tmp_path} is a folder" in refused(side, "--resume", tmp_path)
    assert re.search(f"{model} lacks .*optimizer.* --weights", refused(side, "--resume", model, "--epochs", 2))
    line = refused(side, "--resume", checkpoint, "--test-only", "--model", "mobilenet_v3_large")
    assert re.search(f"{checkpoint} do not fit this model, .*: check --model", line)
    [foreign] = (finished(other)[0] for other in SIDES.values() if other is not side)
    assert str(foreign) in refused(side, "--resume", foreign, "--epochs", 2)
    assert str(foreign) in refused(side, "--weights", foreign)


def test_what_a_resumed_run_cannot_change_is_refused(side, refused, finished):
    checkpoint = finished(side)[0]
    assert f"{checkpoint} already has 1 epochs: raise --epochs" in refused(side, "--resume", checkpoint)
    for flags in ("--lr 0.1", "--momentum 0.8", "--weight-decay 0", "--lr-step-size 7", "--lr-gamma 0.2"):
        line = refused(side, "--resume", checkpoint, "--epochs", 2, *flags.split())
        assert line.startswith(flags.split()[0])
        assert f"{checkpoint} was trained with" in line


def test_weights_for_other_classes_are_refused_with_both_sizes(side, refused, weights):
    line = refused(side, "--weights", weights(side, 7))
    found, wanted = ("(7, 1024)", "(3, 1024)") if side.framework is torch else ("(1024, 7)", "(1024, 3)")
    assert f"classifier.3.weight {found} for {wanted}" in line


def test_an_output_folder_that_cannot_be_is_refused(side, refused, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        assert f"output folder {out} cannot be written" in refused(side, "--output-dir", out)


@pytest.mark.parametrize("batch_size, place", [(4, "at epoch 0, iter 1"), (12, "in the evaluation of epoch 0")])
def test_a_loss_that_is_no_number_leaves_the_last_checkpoint(side, data, tmp_path, batch_size, place):
    """With one batch an epoch the loss of training is still good when the weights are not."""
    train(side, data, tmp_path / "out")
    before = state(side, tmp_path / "out")
    with pytest.raises(
        UserError, match=rf"the loss is (nan|inf)(, the norm of its gradients (nan|inf),)? {place}: .*lower --lr"
    ):
        train(side, data, tmp_path / "out", "--lr", 1e30, "--batch-size", batch_size)
    kept, end = tmp_path / "out" / "kept", suffix(side)
    kept.mkdir()
    newest = f"checkpoint_before_epoch_0{end}" if batch_size == 12 else f"checkpoint{end}"
    shutil.copy(tmp_path / "out" / newest, kept / f"checkpoint{end}")
    assert differing(state(side, kept), before) == []


def test_finetunes_for_other_classes(side, data, weights, tmp_path, capsys):
    """All but the last layer comes from the file, and that one from its draw; at a learning rate of 0 they stay."""
    still = ("--lr", 0, "--freeze-norm")
    train(side, data, tmp_path / "fresh", *still)
    train(side, data, tmp_path / "tuned", *still, "--finetune", weights(side, 7))
    assert "from their initial draw: classifier.3.weight, classifier.3.bias\n" in capsys.readouterr().out
    read = side.package.models.read_weights
    tuned = read(tmp_path / "tuned" / f"model_0{suffix(side)}")
    last = ["classifier.3.bias", "classifier.3.weight"]
    assert sorted(differing(tuned, read(weights(side, 7)))) == last
    assert not set(last) & set(differing(tuned, read(tmp_path / "fresh" / f"model_0{suffix(side)}")))


def test_both_sides_start_from_the_shared_draw(data, tmp_path):
    flags = ("--shared-init", "--lr", 0, "--freeze-norm", "--seed", 4)
    for name, side in SIDES.items():
        train(side, data, tmp_path / name, *flags)
    ref, port = (
        side.package.models.read_weights(tmp_path / name / f"model_0{suffix(side)}") for name, side in SIDES.items()
    )
    types = backend("torch").layers.types(mobilenetv3_ref.models.mobilenet_v3_small())
    assert differing(torch_to_paddle(ref, types), port) == []


def test_sync_bn_alone_changes_nothing(side, trained):
    """One process has all of the batch; rung 08 has several."""
    assert differing(trained(side, "--sync-bn"), trained(side)) == []


def test_the_average_is_evaluated_and_saved(side, data, trained, tmp_path, capsys):
    """Against the averages of the weights that checkpoints after every step hold, in float64."""
    share, steps = 0.75, 2
    decay = 1 - (1 - share) / (4 * steps)  # torchvision scales the new share by images a step, steps and 1 / epochs
    train(side, data, tmp_path, "--model-ema", "--model-ema-steps", steps, "--model-ema-decay", decay)
    name = "features.0.0.weight"
    snapshots = [trained(side)[f"/model/{name}"]]  # after the third step
    first = tmp_path / "first"
    with pytest.raises(Stopped):
        stop_after(side, data, first, 1)
    snapshots.insert(0, state(side, first)[f"/model/{name}"])
    expected = share * snapshots[0].astype(np.float64) + (1 - share) * snapshots[1]
    read = side.package.models.read_weights
    averaged = read(tmp_path / f"model_ema_0{suffix(side)}")
    assert np.abs(averaged[name] - expected).max() <= 2**-22 * np.abs(expected).max()  # two float32 roundings
    assert differing(read(tmp_path / f"model_0{suffix(side)}"), averaged)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("]")[0] for line in lines if line.startswith("[Eval")] == [
        "[Eval, Epoch 0",
        "[Eval, EMA, Epoch 0",
    ]
    train(side, data, tmp_path / "out", "--test-only", "--weights", tmp_path / f"model_ema_0{suffix(side)}")
    [averaged_line] = [line for line in lines if line.startswith("[Eval, EMA")]
    assert capsys.readouterr().out.splitlines()[-1].partition("]")[2] == averaged_line.partition("]")[2]


def stop_after(side: SimpleNamespace, data: Path, out: Path, steps: int, *flags: str | float | Path) -> None:
    """A run that SIGTERM reaches within step `steps`, counted from 1; raises Stopped if it obeys."""
    engine = side.package.train.engine
    done = []

    def train_step(*args, **kwargs):
        done.append(1)
        if len(done) == steps:
            signal.raise_signal(signal.SIGTERM)
        return real(*args, **kwargs)

    real = engine.train_step
    with mock.patch.object(engine, "train_step", train_step):
        train(side, data, out, *flags)


@pytest.mark.thorough("one step", but=r"-2\]")
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_sigterm_ends_a_run_after_its_step(side, data, trained, tmp_path, steps):
    """It goes on to the same bits; after the third step an epoch is over but not evaluated."""
    flags = ("--epochs", 2, "--dropout", 0.5)
    with pytest.raises(Stopped, match=f"checkpoint{suffix(side)}"):
        stop_after(side, data, tmp_path, steps, *flags)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(side, data, tmp_path, *flags, "--resume", tmp_path / f"checkpoint{suffix(side)}")
    assert differing(state(side, tmp_path), trained(side, *flags)) == []


def test_sigterm_in_an_evaluation(side, data, trained, tmp_path):
    trainer = side.package.train.trainer
    real = trainer.evaluate

    def evaluate(*args):
        signal.raise_signal(signal.SIGTERM)
        return real(*args)

    flags = ("--epochs", 2, "--model-ema")
    with (
        mock.patch.object(trainer, "evaluate", evaluate),
        pytest.raises(Stopped, match="before the evaluation of epoch 0"),
    ):
        train(side, data, tmp_path, *flags)
    train(side, data, tmp_path, *flags, "--resume", tmp_path / f"checkpoint{suffix(side)}")
    assert differing(state(side, tmp_path), trained(side, *flags)) == []


def test_sigterm_in_the_last_epoch_changes_nothing(side, data, trained, tmp_path):
    """Once the last evaluation has begun to be saved there is nothing to stop."""
    trainer = side.package.train.trainer
    real = trainer.evaluation_line

    def evaluation_line(*args):
        signal.raise_signal(signal.SIGTERM)
        return real(*args)

    with mock.patch.object(trainer, "evaluation_line", evaluation_line):
        train(side, data, tmp_path)
    assert differing(state(side, tmp_path), trained(side)) == []


def test_saves_within_an_epoch(side, data, tmp_path, monkeypatch):
    """With batches 0 and 1 as one step and batch 2 as another, and after the epoch."""
    trainer = side.package.train.trainer
    saved = []

    def save_checkpoint(path, state, *, epoch, batch, **more):
        saved.append((epoch, batch))

    monkeypatch.setattr(trainer, "save_checkpoint", save_checkpoint)
    train(side, data, tmp_path, "--checkpoint-freq", 1, "--gradient-accumulation-steps", 2)
    assert saved == [(0, 2), (0, 3), (1, 0)]
    saved.clear()
    train(side, data, tmp_path, "--checkpoint-freq", 2)
    assert saved == [(0, 2), (1, 0)]


def test_accumulated_batches_are_one(side, data, trained, weights):
    """Without batch norm's statistics of each batch. Of 12 images the float32 sums differ in their order only: by some
    2^-24 of the largest term for each of the 50 or so additions that lie on one path through the network."""
    flags = ("--freeze-norm", "--dropout", 0, "--weights", weights(side))
    before = side.package.models.read_weights(weights(side))
    joined = trained(side, *flags, "-b", 12)
    apart = trained(side, *flags, "-b", 4, "--gradient-accumulation-steps", 3)
    moved = max(np.abs(joined[f"/model/{name}"] - before[name]).max() for name in before)
    for name in before:
        assert np.abs(joined[f"/model/{name}"] - apart[f"/model/{name}"]).max() <= 50 * 2**-24 * max(1, moved), name
    assert moved > 1e-3


def test_mixed_precision(side, refused, data, trained, tmp_path):
    """bfloat16 has 8 bits, so a run comes out near, and not the same. Paddle has none on the CPU."""
    assert "--amp float16 needs --device gpu" in refused(side, "--amp", "float16")
    if side.framework is paddle:
        line = refused(side, "--amp", "bfloat16", "--data-path", "nowhere")
        assert "--amp bfloat16: PaddlePaddle has no mixed precision on the CPU" in line
        return
    train(side, data, tmp_path, "--amp", "bfloat16")
    mixed, full = state(side, tmp_path), trained(side)
    assert mixed["/model/classifier.3.weight"].dtype == np.float32
    assert 0 < np.abs(mixed["/model/classifier.3.weight"] - full["/model/classifier.3.weight"]).max() < 0.05


def test_event_log(side, data, tmp_path):
    train(side, data, tmp_path, "--event-log", "--model-ema")
    assert [path.name for path in (tmp_path / "events").iterdir()]


def test_the_record_of_a_run(side, data, tmp_path, capsys):
    """metrics.jsonl holds what the log says; a run that was stopped and resumed leaves the same."""
    flags = ("--epochs", 2, "--print-freq", 1)
    train(side, data, tmp_path / "unbroken", *flags)
    records = read_metrics(tmp_path / "unbroken" / "metrics.jsonl")
    assert [(r["kind"], r["epoch"], r["step"]) for r in records] == [
        *[("train", 0, step) for step in (2, 3)],
        ("eval", 0, 3),
        *[("train", 1, step) for step in (5, 6)],
        ("eval", 1, 6),
    ]
    lines = capsys.readouterr().out.splitlines()[1:]
    for record, line in zip(records, lines, strict=True):
        assert f"loss: {record['loss']:.5f}," in line
    with pytest.raises(Stopped):
        stop_after(side, data, tmp_path / "stopped", 5, *flags)
    train(side, data, tmp_path / "stopped", *flags, "--resume", tmp_path / "stopped" / f"checkpoint{suffix(side)}")
    assert read_metrics(tmp_path / "stopped" / "metrics.jsonl") == records


def test_damage_inside_a_checkpoint_is_found(side, refused, finished, tmp_path):
    """One bit of one number, which every reader takes for another number."""
    checkpoint = finished(side)[0]
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 1
    bad = tmp_path / f"bad{suffix(side)}"
    bad.write_bytes(content)
    line = refused(side, "--resume", bad, "--epochs", 2)
    assert str(bad) in line and ("is damaged" in line or "refused" in line)


def test_other_images_are_refused(side, refused, data, finished, tmp_path):
    """By their names: in the middle of an epoch some would be taken twice. The folder itself may have moved."""
    checkpoint = finished(side)[0]
    more, renamed, moved = (shutil.copytree(data, tmp_path / name) for name in ("more", "renamed", "moved"))
    for name in ("new.png", "newer.png"):
        shutil.copy(more / "train" / "dog" / "0.png", more / "train" / "cat" / name)
    (renamed / "train" / "cat" / "0.png").rename(renamed / "train" / "cat" / "9.png")
    for folder, here, there in (
        (more, "14 images in 3 classes", "12 images in 3 classes"),
        (renamed, "12 images in 3 classes", "12 images in 3 classes with other names"),
    ):
        line = refused(side, "--resume", checkpoint, "--epochs", 2, "--data-path", folder)
        assert line.startswith(f"data folder {folder} has {here} to train on: checkpoint {checkpoint} ")
        assert f" was trained on {there}, " in line
    (moved / "val" / "cat" / "0.png").rename(moved / "val" / "cat" / "9.png")  # which no training sees
    train(side, moved, tmp_path / "out", "--resume", checkpoint, "--epochs", 2)


def test_the_second_run_in_a_folder_is_refused(side, refused, tmp_path):
    """It says who has it, and changes nothing."""
    (tmp_path / "out").mkdir()
    with FolderLock(tmp_path / "out"):
        line = refused(side)
    assert f"{tmp_path / 'out'} is in use by process {os.getpid()} on {os.uname().nodename} since 20" in line


def test_a_run_whose_folder_was_taken_over_writes_no_checkpoint(side, data, tmp_path):
    """As when a machine slept for an hour, and the run was begun elsewhere meanwhile."""
    trainer, lock = side.package.train.trainer, tmp_path / "run.lock"
    real = trainer.evaluate

    def evaluate(*args):
        lock.write_text(lock.read_text().replace('"pid": ', '"pid": 1'))
        return real(*args)

    train(side, data, tmp_path)
    before = state(side, tmp_path)
    with (
        mock.patch.object(trainer, "evaluate", evaluate),
        pytest.raises(UserError, match=f"{tmp_path} was taken over by process 1{os.getpid()} on "),
    ):
        train(side, data, tmp_path, "--seed", 1)
    assert differing(state(side, tmp_path), before) == []
    assert lock.exists()


def test_a_run_from_the_beginning_keeps_the_record(side, data, tmp_path, capsys):
    train(side, data, tmp_path)
    first = (tmp_path / "metrics.jsonl").read_bytes()
    train(side, data, tmp_path, "--seed", 1)
    [kept] = tmp_path.glob("metrics.*.jsonl")
    assert kept.read_bytes() == first != (tmp_path / "metrics.jsonl").read_bytes()
    assert f"the record of an earlier run is now {kept}\n" in capsys.readouterr().out


def test_the_record_is_on_disk_before_the_checkpoint(side, data, tmp_path, monkeypatch):
    """Whatever the checkpoint has behind it: a power cut must not leave less."""
    synced = []

    def fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((target.name, target.is_file() and target.read_bytes().count(b"\n")))

    monkeypatch.setattr(os, "fsync", fsync)
    train(side, data, tmp_path, "--checkpoint-freq", 1, "--print-freq", 1)
    places = [place for place, (name, _) in enumerate(synced) if name.startswith(".checkpoint.")]
    assert len(places) == 4  # three steps, the end of the epoch
    assert [synced[place - 1] for place in places] == [("metrics.jsonl", lines) for lines in range(4)]


@pytest.mark.parametrize("which", ["Eval", "Eval, EMA"])
def test_an_evaluation_that_is_no_number_is_saved_first(side, data, trained, tmp_path, capsys, which):
    """One image of the validation set may be at fault. The run can go on."""
    trainer = side.package.train.trainer
    real = trainer.evaluate
    results = [{}, {"loss": math.nan}] if which != "Eval" else [{"loss": math.inf}, {}]
    flags = ("--epochs", 2, "--model-ema")

    def evaluate(*args):
        return real(*args) | results.pop(0)

    with (
        mock.patch.object(trainer, "evaluate", evaluate),
        pytest.raises(
            UserError, match=rf"in the evaluation of epoch 0: .*; {tmp_path}/checkpoint\.\w+ has the epoch, "
        ),
    ):
        train(side, data, tmp_path, *flags)
    assert re.search(rf"\[{which}, Epoch 0\] .* loss: (nan|inf), samples: 6", capsys.readouterr().out)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["kind"] for r in records] == ["train", "eval", "eval_ema"]
    assert [r["loss"] is None for r in records] == [False, which == "Eval", which != "Eval"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["checkpoint", "metrics", "model_0", "model_ema_0"]
    train(side, data, tmp_path, *flags, "--resume", tmp_path / f"checkpoint{suffix(side)}")
    assert differing(state(side, tmp_path), trained(side, *flags)) == []


def test_another_number_of_processes_is_refused(side, refused, finished, monkeypatch):
    trainer = side.package.train.trainer
    monkeypatch.setattr(trainer, "launched_rank", lambda: (0, 0, 2))
    line = refused(side, "--resume", finished(side)[0], "--epochs", 2)
    assert line.startswith("2 process(es): checkpoint") and "was trained with 1" in line
