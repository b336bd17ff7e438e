"""Rung 07: its records hold what the test measures, its float64 half sees one wrong number, its digits are real.

The rung itself takes minutes. What it says of the port, and of a port with a fault in it, is tried by

    python steps/07_test_train.py --short
    python maintenance/checks/fault_gallery.py --quick --only "momentum lost between epochs"
    TRAIN_FAULTS=1 python -m pytest tests/test_train_step.py     four minutes of two cores
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from maintenance.checks import gallery
from mobilenetv3_common.digits import write_digits
from mobilenetv3_proof.step import ModelRung
from mobilenetv3_proof.training import Recipe, Trainee
from portproof.compare import FAIL, PASS, REFUSED
from portproof.ladder.rungs.runs import calls_of
from portproof.ladder.rungs.trainers import KINDS
from portproof.ladder.statistics import trajectory
from portproof.ladder.workers import launch_runs
from sturdyio.cli import UserError

ROOT = Path(__file__).resolve().parents[1]
PATHS = {"reference": "mobilenetv3_proof.training:ref", "port": "mobilenetv3_proof.training:port"}
ONE_RUN = {side: [(3, 0)] for side in PATHS}  # seed, draw


@pytest.fixture(scope="module")
def rung() -> ModuleType:
    """The step script as a module."""
    spec = importlib.util.spec_from_file_location("step_07", ROOT / "steps" / "07_test_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "small"
    assert write_digits(folder, 4, 2) == (40, 20)
    return folder


# The digits


def test_all_digits_are_written_once_and_split_by_class(tmp_path):
    assert write_digits(tmp_path / "digits") == (1442, 355)
    numbers = sorted(int(path.stem) for path in (tmp_path / "digits").rglob("*.png"))
    assert numbers == list(range(1797))
    for label in range(10):
        train, val = (len(list((tmp_path / "digits" / split / str(label)).iterdir())) for split in ("train", "val"))
        assert val == (train + val) // 5


def test_a_digit_is_scikit_learns(digits):
    from sklearn.datasets import load_digits

    known = load_digits()
    for path in digits.rglob("*.png"):
        pixels = np.asarray(Image.open(path))
        assert pixels.shape == (8, 8) and pixels.dtype == np.uint8
        np.testing.assert_allclose(pixels / 255 * 16, known.images[int(path.stem)], atol=16 / 255 / 2)
        assert path.parent.name == str(known.target[int(path.stem)])


def test_digits_that_are_there_are_left_and_others_refused(digits):
    path = digits / "train" / "0" / "0000.png"
    before = path.stat().st_mtime_ns
    assert write_digits(digits, 4, 2) == (40, 20)
    assert path.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="not this set"):
        write_digits(digits, 5, 2)
    with pytest.raises(UserError, match="ask for fewer"):
        write_digits(digits.parent / "many", 4, 60)
    assert not (digits.parent / "many").exists() and not list(digits.parent.glob(".digits-*"))


@pytest.mark.thorough("test_all_digits_are_written_once_and_split_by_class")
def test_the_tool_says_what_it_wrote_and_names_a_mistake_in_a_line(tmp_path):
    def tool(*flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "tools" / "make_digits.py"), *flags]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = tool("--output-dir", str(tmp_path / "digits"), "--train-per-class", "2", "--val-per-class", "1")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'digits'} holds 20 + 10 images\n")
    (tmp_path / "file").touch()
    refused = tool("--output-dir", str(tmp_path / "file"))
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "remove it" in refused.stderr


# The records of real runs


@pytest.fixture(scope="module")
def records(digits, tmp_path_factory) -> dict[str, dict]:
    """Of a run of one epoch of five batches, by each package, in its own process."""
    options = Recipe(str(digits), "mobilenet_v3_small", epochs=1, batch_size=8).options()
    done = launch_runs(PATHS, calls_of(ONE_RUN, options), tmp_path_factory.mktemp("runs"))
    return {side: done[side].records[0][3, 0] for side in PATHS}


def test_both_packages_leave_the_same_record(records):
    ref, port = records.values()
    assert {name: array.shape for name, array in ref.items()} == {name: array.shape for name, array in port.items()}
    assert ref["losses"].shape == ref["right"].shape == (5,)
    assert ref["eval"][2] == port["eval"][2] == 20
    np.testing.assert_allclose(port["losses"][0], ref["losses"][0], rtol=0.02)  # the same weights, other dropout masks


def test_features_measure_what_they_say(records):
    """Each against a record that was changed in one respect."""
    features = trajectory.FEATURES | trajectory.TOP1
    for record in records.values():
        assert all(np.isfinite(feature.value(record)) for feature in features.values())
    record = records["reference"]

    def change(prefix: str, edit) -> dict[str, float]:
        """The features that differ, and by how much, when `edit` was applied to what begins with `prefix`."""
        other = record | {name: edit(name, array) for name, array in record.items() if name.startswith(prefix)}
        pairs = {name: (feature.value(record), feature.value(other)) for name, feature in features.items()}
        return {
            name: pytest.approx(after - before, abs=1e-4) for name, (before, after) in pairs.items() if after != before
        }

    twice = np.log(2)
    halved = change("parameters/", lambda name, array: array / 2)
    assert halved == {"norm of kernels": -twice, "norm of vectors": -twice}
    assert change("moved/", lambda name, array: array * 2) == {"length of the last epoch": twice}
    settled = {**{name.replace("reestimated/", "running/"): array for name, array in record.items()}}
    lag = change(
        "running/", lambda name, array: settled[name] + (record[name] - settled[name]) / 2 if "_mean" in name else array
    )
    assert lag == {"lag of running means": -2 * twice}
    larger = change("running/", lambda name, array: array * 2 if name.endswith("_var") else array)
    assert larger == {"lag of running variances": twice}
    assert change("mirrored_eval", lambda name, array: array * 2) == {"mirrored to upright loss": twice}
    last = change("losses", lambda name, array: array * np.array([1, 1, 1, 1, 2]))
    assert last == {"loss, last third": twice}


@pytest.mark.thorough("the port", but="port")
@pytest.mark.parametrize("side", PATHS)
def test_runs_that_end_early_are_told(tmp_path, side):
    options = Recipe(str(tmp_path / "nowhere"), "mobilenet_v3_small", epochs=1).options()
    with pytest.raises(UserError, match="nowhere"):
        launch_runs({side: PATHS[side]}, calls_of(ONE_RUN, options), tmp_path)


# The float64 half, over 16 or 24 steps


def exact(rung: ModuleType, digits: Path, folder: Path, port: type[Trainee] = Trainee, **changes: float) -> ModelRung:
    step = ModelRung(rung.NAME, rung.get_args_parser().parse_args(["--output-dir", str(folder)]))
    recipe = Recipe(str(digits), "mobilenet_v3_small", **rung.EXACT | changes)
    rung.check_exact(step, Trainee(rung.REF), port(rung.PORT), recipe)
    return step


def test_the_float64_half_passes(rung, digits, tmp_path):
    """With one change of the learning rate."""
    step = exact(rung, digits, tmp_path, epochs=2)
    assert step.status == PASS
    dropout, verdict = step.verdicts
    assert len(dropout.rows) == 2 and dropout.rows[0].shape == (16,)
    assert len(verdict.rows) == 1 + 142 + 102 and verdict.rows[0].shape == (16,)


class OneMoreDecay(Trainee):
    """A port whose weight decay is one in a million too large."""

    def build_optimizer(self, model, recipe):
        return super().build_optimizer(model, replace(recipe, weight_decay=recipe.weight_decay * (1 + 1e-6)))


class OtherOrder(Trainee):
    """A port whose training images have another order."""

    def loaders(self, recipe, seed):
        return super().loaders(recipe, seed + 1)


@pytest.mark.thorough(
    "test_the_float64_half_passes, the kit's test_ladder_runs.py::test_a_faulty_port_fails_and_is_named"
)
@pytest.mark.parametrize("port", [OneMoreDecay, OtherOrder])
def test_the_float64_half_sees_one_wrong_step(rung, digits, tmp_path, port):
    assert exact(rung, digits, tmp_path, port).status == FAIL


@pytest.mark.thorough("the kit's test_ladder_runs.py::test_a_mistake_is_named")
def test_a_rate_that_magnifies_rounding_proves_nothing(rung, digits, tmp_path):
    assert exact(rung, digits, tmp_path, lr=0.5).status == REFUSED


# Resumed runs


@pytest.mark.thorough("test_the_float64_half_passes; test_a_resumed_run_ends_like_an_unbroken_one")
def test_a_run_of_the_command_goes_on_as_if_it_had_not_been_stopped(rung, tmp_path):
    step = ModelRung(rung.NAME, rung.get_args_parser().parse_args(["--output-dir", str(tmp_path)]))
    rung.check_resumed(step)
    assert step.status == PASS, "\n".join(step.log)
    text = "\n".join(step.log)
    assert "not shown" not in text and "not compared" not in text  # saved when all had changed since the beginning
    assert {row.item.kind for row in step.verdicts[1].rows} == {*KINDS, "seed"}


# Real runs of a port with a mistake that hardly shows in one step, against those of the reference

MISTAKES = {
    "none": ("__init__.py", "", ""),
    "weight decay off": ("train/optimizer.py", "float(decays[kind])", "0.0"),
    "another gamma": (
        "train/lr_scheduler.py",
        "else schedule.lr_gamma",
        "else schedule.lr_gamma**0.5",
    ),
    "batch-norm momentum inverted": ("models/mobilenet_v3.py", "momentum=0.99", "momentum=0.01"),
    "flip missing": ("data/presets.py", "if rng.random() < self.hflip_prob:", "if rng.random() < 0:"),
}


@pytest.fixture(scope="module")
def short_runs(rung, tmp_path_factory):
    """(options, seed, the reference's runs) of the short mode."""
    plan, seed = rung.SHORT, 11
    images = tmp_path_factory.mktemp("short") / "digits"
    write_digits(images, plan.train_per_class, plan.val_per_class)
    options = Recipe(str(images), "mobilenet_v3_small", **plan.recipe).options()
    runs = {"reference": [(seed, k) for k in range(plan.draws)]}
    calls = calls_of(runs, options)
    done = launch_runs({"reference": PATHS["reference"]}, calls, tmp_path_factory.mktemp("ref"))["reference"]
    return options, seed, list(done.records[0].values())


@pytest.mark.skipif("TRAIN_FAULTS" not in os.environ, reason="minutes of training: TRAIN_FAULTS=1 runs it")
@pytest.mark.parametrize("name", MISTAKES)
def test_runs_with_a_mistake_are_no_runs_of_the_reference(rung, short_runs, tmp_path, name):
    """The float32 half alone, without the learning rates, which are compared exactly."""
    options, seed, ref = short_runs
    file, right, wrong = MISTAKES[name]
    fault = gallery.Fault(name, "", "", file, right, wrong, "")
    gallery.copy_port(tmp_path, fault if name != "none" else None)
    assert name == "none" or (gallery.ROOT / rung.PORT / file).read_text().count(right) == 1
    runs = {"port": [(seed, 0)]}  # the worker takes the copy, which lies where it runs
    done = launch_runs({"port": PATHS["port"]}, calls_of(runs, options), tmp_path)["port"]
    verdict = trajectory.judge([ref], list(done.records[0].values()), trajectory.FEATURES, name)
    shares = {row.name: row.difference / row.atol for row in verdict.rows}
    print(name, {feature: f"{share:.2f}" for feature, share in sorted(shares.items(), key=lambda item: -item[1])})
    assert verdict.status == (PASS if name == "none" else FAIL)
