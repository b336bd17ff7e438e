"""The record of a run, the curves for both viewers, and the picture that tools/plot_curves.py makes of records."""

import errno
import importlib.util
import io
import json
import os
import re
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from visualdl import LogReader

import mobilenetv3_paddle.train.event_log
import mobilenetv3_ref.train.event_log
from mobilenetv3_common.metrics import NAME, MetricsLog, read_metrics
from sturdyio.cli import UserError, run

ROOT = Path(__file__).parents[1]
EPOCHS, STEPS = 3, 4  # steps an epoch
SPEC = importlib.util.spec_from_file_location("plot_curves", ROOT / "tools" / "plot_curves.py")
plot_curves = importlib.util.module_from_spec(SPEC)
sys.modules["plot_curves"] = plot_curves  # where dataclasses look for it
SPEC.loader.exec_module(plot_curves)


def write_run(path: Path, epoch: int = 0, step: int = 0, stop: int | None = None, ema: bool = False) -> None:
    """A whole run, or from (epoch, step) on, or until step `stop`, after which the process is gone."""
    log = MetricsLog(path, epoch=epoch, step=step)
    for e in range(epoch, EPOCHS):
        for s in range(max(step, e * STEPS), (e + 1) * STEPS):
            if s == stop:
                return
            log.write("train", epoch=e, step=s + 1, loss=1 / (s + 3), lr=0.1 * 0.5**e, top1=s / 16)
        log.write("eval", epoch=e, step=(e + 1) * STEPS, loss=0.3 / (e + 1), top1=e / 8, top5=e / 4)
        if ema:
            log.write("eval_ema", epoch=e, step=(e + 1) * STEPS, loss=0.2 / (e + 1), top1=e / 7, top5=e / 3)
    log.close()


# --- the record


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / NAME
    write_run(path)
    records = read_metrics(path)
    assert len(records) == EPOCHS * (STEPS + 1)
    assert records[0] == {"kind": "train", "epoch": 0, "step": 1, "loss": 1 / 3, "lr": 0.1, "top1": 0.0}
    assert records[-1] == {"kind": "eval", "epoch": 2, "step": 12, "loss": 0.3 / 3, "top1": 0.25, "top5": 0.5}


def test_a_line_is_there_when_write_returns(tmp_path):
    log = MetricsLog(tmp_path / NAME)
    log.write("train", epoch=0, step=1, loss=0.5)
    assert (tmp_path / NAME).read_text() == '{"kind": "train", "epoch": 0, "step": 1, "loss": 0.5}\n'


def test_nan_and_infinity_are_null(tmp_path):
    MetricsLog(tmp_path / NAME).write("eval", epoch=0, step=1, loss=float("nan"), top1=float("inf"), top5=0.5)
    line = (tmp_path / NAME).read_text()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (record["loss"], record["top1"], record["top5"]) == (None, None, 0.5)


def test_a_new_run_starts_a_new_record_and_keeps_the_older_ones(tmp_path):
    """Under the time of their last line, whatever they hold; an empty one is nothing to keep."""
    path = tmp_path / NAME
    for content in (b"first", b"second", b"third", b""):
        path.write_bytes(content)
        os.utime(path, (0, 1.7e9))
        log = MetricsLog(path)
        log.close()
        assert path.read_bytes() == b""
    assert log.aside is None
    date = datetime.fromtimestamp(1.7e9).astimezone().strftime("%Y%m%d-%H%M%S")
    kept = {other.name: other.read_text() for other in tmp_path.iterdir() if other != path}
    names = (f"metrics.{date}.jsonl", f"metrics.{date}-1.jsonl", f"metrics.{date}-2.jsonl")
    assert kept == dict(zip(names, ("first", "second", "third"), strict=True))


def points() -> list[tuple[int, int, int]]:
    """(epoch, steps done, steps at which the run was killed): from every checkpoint, killed at once and later."""
    found = []
    for step in range(1, EPOCHS * STEPS + 1):
        for epoch in {step // STEPS, (step - 1) // STEPS}:  # before the evaluation of an epoch, and after it
            found += [(epoch, step, killed) for killed in (step, step + 1, EPOCHS * STEPS) if killed >= step]
    return [point for point in found if point[0] < EPOCHS]


# What may come after the last line that was synced.
TORN = [b"", b'{"kind": "train",', bytes(99), bytes(9) + b', "top1": 0.5}\n', bytes(9) + b'0.5}\n{"kind": "tr\xc3']


@pytest.mark.parametrize("epoch, step, killed", points())
@pytest.mark.parametrize("torn", TORN)
def test_killed_and_resumed_is_as_unbroken(tmp_path, epoch, step, killed, torn):
    """Even where the last line was only half written, or a power cut left zeros of it and of those before."""
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    write_run(unbroken, ema=True)
    write_run(resumed, stop=killed, ema=True)
    resumed.write_bytes(resumed.read_bytes() + torn)
    write_run(resumed, epoch, step, ema=True)
    assert resumed.read_bytes() == unbroken.read_bytes()


def test_resumed_elsewhere_begins_an_empty_record(tmp_path):
    write_run(tmp_path / NAME, epoch=2, step=2 * STEPS)
    assert {record["epoch"] for record in read_metrics(tmp_path / NAME)} == {2}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{}\n", "line 1, lacks kind"),
        (b'{"kind": "train", "epoch": 0, "step": 1}\n[1, 2]\n', "line 2, lacks kind"),
        (b'{"kind": "train", "epoch": "0", "step": 1}\n', "line 1, lacks"),
        (b'{"kind": "train", "epoch": 0, "step": 1, "loss": "low"}\n', "holds what is no number"),
        (b'{"kind": "train", "epoch": -1, "step": 1}\n', "line 1, lacks"),
        (b'{"kind": "train", "epoch": 0, "step": 1, "loss": 1e999}\n', "holds what is no number"),
        (b"epoch 1\nepoch 2\n", "line 1, is no JSON"),
        (b"[" * 100_000 + b"\n", "line 1, is no JSON"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_refuses_what_is_no_record(tmp_path, content, message):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_metrics(tmp_path / NAME)
    with pytest.raises(UserError, match=message):
        MetricsLog(tmp_path / NAME, epoch=1, step=4)
    assert (tmp_path / NAME).read_bytes() == content


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_refuses_a_missing_record_and_a_full_disk(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="does not exist"):
        read_metrics(tmp_path / NAME)
    log = MetricsLog(tmp_path / NAME)
    monkeypatch.setattr(log, "file", FullDisk())
    with pytest.raises(UserError, match=f"{NAME} cannot be written .*No space left"):
        log.write("train", epoch=0, step=1)
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", lambda _: FullDisk().flush())
    with pytest.raises(UserError, match=f"{NAME} cannot be written .*No space left"):
        log.sync()


# --- the curves for a viewer


def tensorboard_values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def visualdl_values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    (path,) = folder.iterdir()
    reader = LogReader(file_path=str(path))
    tags = reader.get_tags()["scalar"]
    return {tag: [(item.id, item.value) for item in reader.get_data("scalar", tag)] for tag in tags}


METRICS = {1: {"train/loss": 2.5, "train/lr": 0.1}, 3: {"train/loss": 1.25, "train/lr": 0.05}, 4: {"eval/top1": 0.75}}


def float32(value: float) -> float:
    return float(np.float32(value))


EXPECTED = {
    "train/loss": [(1, 2.5), (3, 1.25)],
    "train/lr": [(1, float32(0.1)), (3, float32(0.05))],
    "eval/top1": [(4, 0.75)],
}


def write_events(package, folder: Path, first_step: int = 0) -> None:
    log = package.train.event_log.EventLog(folder, first_step)
    for step, metrics in METRICS.items():
        if step > first_step:
            log.write(metrics, step)
    log.close()


def test_tensorboard_has_what_was_written(tmp_path):
    write_events(mobilenetv3_ref, tmp_path)
    assert tensorboard_values(tmp_path) == EXPECTED


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path):
    write_events(mobilenetv3_ref, tmp_path)
    log = mobilenetv3_ref.train.event_log.EventLog(tmp_path, 1)
    log.write({"train/loss": 2.0}, 3)
    log.close()
    assert tensorboard_values(tmp_path)["train/loss"] == [(1, 2.5), (3, 2.0)]


def test_visualdl_has_what_was_written(tmp_path):
    write_events(mobilenetv3_paddle, tmp_path)
    assert visualdl_values(tmp_path / "from_step_0") == EXPECTED


def test_visualdl_keeps_both_parts_of_a_resumed_run(tmp_path):
    """VisualDL reads one file of a folder."""
    write_events(mobilenetv3_paddle, tmp_path)
    write_events(mobilenetv3_paddle, tmp_path, 1)
    assert visualdl_values(tmp_path / "from_step_0") == EXPECTED
    assert visualdl_values(tmp_path / "from_step_1")["train/loss"] == [(3, 1.25)]


@pytest.mark.parametrize(
    "package, module, values",
    [
        (mobilenetv3_ref, "torch.utils.tensorboard", tensorboard_values),
        (mobilenetv3_paddle, "visualdl", lambda folder: visualdl_values(folder / "from_step_0")),
    ],
)
def test_a_number_is_on_disk_when_write_returns_and_a_missing_viewer_is_named(
    tmp_path, monkeypatch, package, module, values
):
    log = package.train.event_log.EventLog(tmp_path)
    for step in (1, 2, 3):  # the first is written at once anyway
        log.write({f"train/{i}": 0.5 for i in range(100)}, step)
    assert values(tmp_path) == {f"train/{i}": [(1, 0.5), (2, 0.5), (3, 0.5)] for i in range(100)}
    log.close()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {module.split('.')[-1]}"):
        package.train.event_log.EventLog(tmp_path)


# --- the picture


def call(*arguments: str | Path) -> None:
    plot_curves.main(plot_curves.get_args_parser().parse_args([str(argument) for argument in arguments]))


def lines(axes) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def test_curves_are_the_records(tmp_path):
    for name in ("ref", "paddle"):
        write_run(tmp_path / name / NAME, ema=name == "ref")
    figure = plot_curves.draw([plot_curves.read_run(tmp_path / name, name) for name in ("ref", "paddle")])
    panels = {axes.get_title(loc="left"): lines(axes) for axes in figure.axes}
    assert list(panels) == [*plot_curves.TITLES.values(), ""]
    quarters, epochs = [s / 4 for s in range(1, 13)], [1.0, 2.0, 3.0]
    assert panels["training: loss"] == [(quarters, [1 / (s + 3) for s in range(12)])] * 2
    assert panels["learning rate"] == [(quarters, [0.1] * 4 + [0.05] * 4 + [0.025] * 4)] * 2
    assert panels["training: top-1 accuracy, %"][0][1] == [100 * s / 16 for s in range(12)]
    own, averaged = [0.3, 0.15, 0.3 / 3], [0.2, 0.1, 0.2 / 3]
    assert panels["validation: loss"] == [(epochs, own), (epochs, averaged), (epochs, own)]
    assert panels["validation: top-1 accuracy, %"][0] == (epochs, [0.0, 12.5, 25.0])
    legend = [text.get_text() for text in figure.axes[-1].get_legend().get_texts()]
    assert legend == [" ref", " paddle", " averaged weights"]


def test_the_picture_shows_them(tmp_path):
    """The pixels of either run's colour change with its numbers."""
    pictures = []
    for top1 in (0.25, 0.5):
        folder = tmp_path / "_a$x^$"  # what Matplotlib would hide, and refuse as a formula
        write_run(folder / NAME)
        MetricsLog(folder / NAME, epoch=2, step=8).write("eval", epoch=2, step=12, loss=0.1, top1=top1)
        call(tmp_path / "curves.png", folder)
        pictures.append(np.asarray(Image.open(tmp_path / "curves.png").convert("RGB")))
    assert pictures[0].shape == pictures[1].shape == (840, 1560, 3)
    assert (pictures[0] != pictures[1]).any()
    colour = np.array([0xE6, 0x9F, 0x00])
    assert all((picture == colour).all(axis=2).sum() > 1000 for picture in pictures)
    call(tmp_path / "curves.svg", folder)
    assert b"<svg" in (tmp_path / "curves.svg").read_bytes()


def test_long_curves_are_averaged_in_groups():
    values = plot_curves.thinned(np.arange(1000.0))
    assert values.tolist() == [5 * i + 2 for i in range(200)]
    assert plot_curves.thinned(np.arange(200.0)).tolist() == list(range(200))


def test_runs_are_called_by_their_folders(tmp_path):
    a, b, c = tmp_path / "a" / "output", tmp_path / "b" / "output", tmp_path / "c"
    assert plot_curves.labels_of([a, c]) == ["output", "c"]
    assert plot_curves.labels_of([a, b, c]) == [str(a), str(b), "c"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("curves.txt", "run"), "curves.txt ends in none of .png, .svg, .pdf"),
        (("curves.png", "nowhere"), "nowhere/metrics.jsonl does not exist"),
        (("curves.png", "begun"), "begun/metrics.jsonl has no evaluation yet"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run" / NAME)
    write_run(tmp_path / "begun" / NAME, stop=2)
    with pytest.raises(SystemExit) as ended:
        run(lambda: call(*arguments), plot_curves.PROG)
    assert ended.value.code == 2
    assert re.fullmatch(rf"plot_curves: error: .*{re.escape(message)}.*\n", capsys.readouterr().err)
    assert not Path(arguments[0]).exists()
