"""Rung 06 sees whatever initial weights can have wrong."""

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from maintenance.checks import gallery
from mobilenetv3_common.initial import draw_initial
from mobilenetv3_proof.step import ModelRung
from portproof.compare import FAIL, PASS
from sturdyio.files import load_npy

ROOT = Path(__file__).resolve().parents[1]
RUNG = "06_test_init"
MODEL = "models/mobilenet_v3.py"
LINEAR = "nn.init.normal_(m.weight, 0, 0.01)"
BUILT = "            nn.Linear(last_channel, num_classes),\n        )\n        self.reset_parameters()\n"

# Beside those of maintenance/checks/faults.yaml.
FAULTS = {
    "linear deviation 0.02": (LINEAR, LINEAR.replace("0.01", "0.02"), r"classifier\.0\.weight/std"),
    "linear mean 0.0001": (LINEAR, LINEAR.replace("0, 0.01", "0.0001, 0.01"), r"classifier\.0\.weight/mean"),
    "one tensor all equal": (
        BUILT,
        f"{BUILT}        nn.init.constant_(self.features[12][0].weight, (1 / 288) ** 0.5)\n",
        r"features\.12\.0\.weight/mean",
    ),
    "one filter for all": (
        BUILT,
        f"{BUILT}        w = self.features[2].block[1][0].weight\n        w.set_value(w[:1].expand(w.shape))\n",
        r"features\.2\.block\.1\.0\.weight/(std|quantiles|distinct)",
    ),
    "one draw for two layers": (
        BUILT,
        f"{BUILT}        se = self.features[4].block[2]\n"
        "        se.fc2.weight.set_value(se.fc1.weight.reshape(se.fc2.weight.shape) / 2)\n",
        r"features\.4\.block\.2\.fc1\.weight/other tensors",
    ),
    "one draw for all seeds": (
        BUILT,
        BUILT.replace("self", '__import__("paddle").seed(0)\n        self'),
        r"features\.0\.0\.weight/distinct",
    ),
    "seed not followed": (
        BUILT,
        f"{BUILT}        import numpy\n        w = self.classifier[0].weight\n"
        "        w.set_value(numpy.random.default_rng().normal(0, 0.01, w.shape).astype('float32'))\n",
        r"classifier\.0\.weight/same seed again",
    ),
}


def fault_of(name: str) -> gallery.Fault:
    right, wrong, expected = FAULTS[name]
    return gallery.Fault(name, "initialisation", RUNG, MODEL, right, wrong, expected)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, gallery.Outcome]:
    """Every fault's. That the rung passes without one is test_the_rung_passes_and_leaves_its_files'."""
    faults, known = [fault_of(name) for name in FAULTS], {RUNG: gallery.Run(PASS, "")}
    _, found = gallery.run_gallery(faults, {RUNG}, jobs=2, below=False, known=known)
    return {outcome.fault.name: outcome for outcome in found}


@pytest.mark.thorough("test_the_tutorial_shows_what_the_rung_says runs the rung with one")
@pytest.mark.parametrize("name", FAULTS)
def test_the_rung_fails_and_names_the_fault(outcomes, name):
    assert outcomes[name].problem == ""


@pytest.fixture(scope="module")
def rung() -> ModuleType:
    """The step script as a module."""
    spec = importlib.util.spec_from_file_location("step_06", ROOT / "steps" / f"{RUNG}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_rung(rung: ModuleType, folder: Path, *flags: str):
    return rung.main(rung.get_args_parser().parse_args(["--output-dir", str(folder), *flags]))


@pytest.mark.thorough("test_the_tutorial_shows_what_the_rung_says runs it without a fault")
def test_the_rung_passes_and_leaves_its_files(rung, tmp_path, arch, capsys):
    step = run_rung(rung, tmp_path, "--model", arch, "--seed", "3")
    assert step.status == PASS
    said = capsys.readouterr().out
    assert re.search(r"PASS 06_test_init: all \d{4} items within their limits\n$", said)
    assert said.strip() in (tmp_path / "log" / "init_diff.log").read_text()
    ref, port = (load_npy(tmp_path / f"init_{side}.npy") for side in ("ref", "paddle"))
    assert ref.keys() == port.keys()
    assert len(ref) == 2 * len(step.model(step.ref).state_dict())
    assert ref["classifier.3.weight/std"] == pytest.approx(0.01, rel=0.01)
    assert ref["classifier.3.weight/std"] != port["classifier.3.weight/std"]


def rescaled(factor: Callable[[Sequence[int]], float]) -> Callable[..., np.ndarray]:
    """`draw_initial` with convolutions times `factor(shape)`."""

    def draw(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
        return draw_initial(name, shape, seed) * np.float32(factor(shape) if len(shape) == 4 else 1)

    return draw


def uniform(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """Convolutions uniform, of the right variance."""
    bound = math.sqrt(6 / (shape[0] * math.prod(shape[2:])))
    rng = np.random.default_rng([seed, *name.encode()])
    return (rng.uniform(-bound, bound, shape) if len(shape) == 4 else draw_initial(name, shape, seed)).astype("f4")


def drawn_before(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """Draws that go on where the last ended."""
    return draw_initial(name, shape, int(torch.randint(2**31, ()))) if len(shape) > 1 else draw_initial(name, shape, 0)


# In what both sides share, so that the port is no different from the reference.
SHARED_FAULTS = {
    "fan-in": (rescaled(lambda shape: (shape[0] / shape[1]) ** 0.5), "features.0.0.weight/std"),
    "gain 1": (rescaled(lambda shape: 0.5**0.5), "features.0.0.weight/std"),
    "fan-out divided by the groups": (
        rescaled(lambda shape: shape[0] ** 0.5 if shape[1] == 1 else 1),
        "features.1.block.0.0.weight/std",
    ),
    "uniform": (uniform, "features.0.0.weight/largest"),
    "linear deviation 0.02": (
        lambda name, shape, seed: draw_initial(name, shape, seed) * np.float32(2 if len(shape) == 2 else 1),
        "classifier.0.weight/std",
    ),
    "batch-norm weights 0": (
        lambda name, shape, seed: draw_initial("bias" if len(shape) == 1 else name, shape, seed),
        "features.0.1.weight/all 1",
    ),
    "one stream for all": (
        lambda name, shape, seed: draw_initial("weight" if name.endswith("weight") else "bias", shape, seed),
        "features.0.0.weight/other tensors",
    ),
    "seed left out": (lambda name, shape, seed: draw_initial(name, shape, 0), "features.0.0.weight/distinct"),
    "what was drawn before": (drawn_before, "features.0.0.weight/same seed again"),
}


def check_shared(rung: ModuleType, folder: Path) -> ModelRung:
    """The rung's check of the shared draw alone."""
    step = ModelRung(RUNG, rung.get_args_parser().parse_args(["--output-dir", str(folder)]))
    rung.init(*step.both(rung.shared, step), rung.expected, shared=True, rung=step)
    return step


@pytest.mark.thorough("one draw", but="fan-in")
@pytest.mark.parametrize("name", SHARED_FAULTS)
def test_a_wrong_shared_draw_is_seen_though_both_sides_have_it(name, rung, tmp_path, monkeypatch):
    wrong, item = SHARED_FAULTS[name]
    monkeypatch.setattr("mobilenetv3_ref.models.initial.draw_initial", wrong)
    monkeypatch.setattr("mobilenetv3_paddle.models.initial.draw_initial", wrong)
    exact, equal = check_shared(rung, tmp_path).verdicts
    assert item in {row.name for row in exact.rows if row.status == FAIL}
    assert equal.status == (FAIL if name == "what was drawn before" else PASS)


@pytest.mark.thorough("test_a_wrong_shared_draw_is_seen_though_both_sides_have_it")
def test_the_shared_draw_is_seen_to_differ(rung, tmp_path, monkeypatch):
    """In one bit of one value of one seed."""

    def one_bit(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
        array = draw_initial(name, shape, seed)
        if name == "classifier.3.weight":
            array[-1, -1] = np.nextafter(array[-1, -1], np.float32(1))
        return array

    monkeypatch.setattr("mobilenetv3_paddle.models.initial.draw_initial", one_bit)
    step = check_shared(rung, tmp_path)
    assert [row.name for row in step.verdicts[1].rows if row.status == FAIL] == ["classifier.3.weight/shared draw"]
    assert step.verdicts[0].status == PASS
