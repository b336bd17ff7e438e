"""Rung 06 sees whatever initial weights can have wrong, and what a right sample shows stays within its limits."""

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from maintenance import gallery
from mobilenetv3_common.initial import draw_initial
from mobilenetv3_proof.step import Step
from portproof.compare import FAIL, PASS, REFUSED, compare
from portproof.io.files import load_npy
from portproof.ladder import distribution

ROOT = Path(__file__).resolve().parents[1]
RUNG = "06_test_init"
MODEL = "models/mobilenet_v3.py"
LINEAR = "nn.init.normal_(m.weight, 0, 0.01)"
BUILT = "            nn.Linear(last_channel, num_classes),\n        )\n        self.reset_parameters()\n"

# Beside those of maintenance/faults.yaml.
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
    return gallery.Fault(name, "initialisation", "", "", RUNG, MODEL, right, wrong, expected)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, gallery.Outcome]:
    """Every fault's, and before them a run without one, which must pass."""
    _, found = gallery.run_gallery([fault_of(name) for name in FAULTS], {RUNG}, jobs=2, below=False)
    return {outcome.fault.name: outcome for outcome in found}


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


def test_nothing_drawn_proves_nothing(rung, tmp_path, monkeypatch):
    """As in a port and a reference whose parameters are all constants."""

    def constants(step, seed, shared=False):
        return {"features.0.1.weight": np.ones(16, np.float32), "features.0.1.bias": np.zeros(16, np.float32)}

    monkeypatch.setattr(rung, "run_ref", constants)
    monkeypatch.setattr(rung, "run_paddle", constants)
    assert run_rung(rung, tmp_path).status == REFUSED


def test_a_parameter_on_one_side_only_fails(rung, tmp_path, monkeypatch, capsys):
    def renamed(step, seed, shared=False):
        arrays = rung.run_ref(step, seed, shared)
        return {name.replace("classifier.3.weight", "classifier.4.weight"): array for name, array in arrays.items()}

    monkeypatch.setattr(rung, "SEEDS", 2)
    monkeypatch.setattr(rung, "run_paddle", renamed)
    step = run_rung(rung, tmp_path)
    missing = [row.name for row in step.verdicts[1].rows if row.reason.startswith(("the port", "the reference"))]
    assert {"classifier.3.weight/std", "structure/classifier.4.weight"} <= set(missing)


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


@pytest.mark.parametrize("name", SHARED_FAULTS)
def test_a_wrong_shared_draw_is_seen_though_both_sides_have_it(name, rung, tmp_path, monkeypatch):
    wrong, item = SHARED_FAULTS[name]
    monkeypatch.setattr("mobilenetv3_ref.models.initial.draw_initial", wrong)
    monkeypatch.setattr("mobilenetv3_paddle.models.initial.draw_initial", wrong)
    args = rung.get_args_parser().parse_args(["--output-dir", str(tmp_path)])
    rung.check_shared(step := Step(RUNG, args))
    exact, equal = step.verdicts
    assert item in {row.name for row in exact.rows if row.status == FAIL}
    assert equal.status == (FAIL if name == "what was drawn before" else PASS)


def test_the_shared_draw_is_seen_to_differ(rung, tmp_path, monkeypatch):
    """In one bit of one value of one seed."""

    def one_bit(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
        array = draw_initial(name, shape, seed)
        if name == "classifier.3.weight":
            array[-1, -1] = np.nextafter(array[-1, -1], np.float32(1))
        return array

    monkeypatch.setattr("mobilenetv3_paddle.models.initial.draw_initial", one_bit)
    args = rung.get_args_parser().parse_args(["--output-dir", str(tmp_path)])
    rung.check_shared(step := Step(RUNG, args))
    assert [row.name for row in step.verdicts[1].rows if row.status == FAIL] == ["classifier.3.weight/shared draw"]
    assert step.verdicts[0].status == PASS


SHAPES = [(8, 8, 16, 1, 1), (2, 48, 64), (10, 16, 3, 3, 3), (3, 5000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_samples_leave_the_limits_as_often_as_p_says(shape, rng, monkeypatch):
    """At P = 0.05, a rate that 600 samples can show; quantiles rarer, since their bound is one for every n."""
    monkeypatch.setattr(distribution, "P", 0.05)
    exact, limits = distribution.expectations(shape, 0.3)
    zeros = {name for name, item in exact.items() if not item.any()}
    outside = dict.fromkeys(exact, 0)
    for _ in range(600):
        found = distribution.statistics(rng.normal(0, 0.3, shape).astype(np.float32), 0.3)
        for row in compare(exact, found, limits, zeros=zeros).rows:
            outside[row.name] += row.status != PASS
    assert outside.pop("distinct") == 0
    for name, count in outside.items():
        assert 600 * 0.05 / 3 < count < 600 * 0.05 * 2, f"{name}: {count}"


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("std", lambda rng, shape: rng.normal(0, 0.375, shape)),
        ("std", lambda rng, shape: rng.normal(0, 0.225, shape)),
        ("mean", lambda rng, shape: rng.normal(0.09, 0.3, shape)),
        ("quantiles", lambda rng, shape: rng.choice([-0.3, 0.3], shape)),
        ("largest", lambda rng, shape: rng.uniform(-0.3 * 3**0.5, 0.3 * 3**0.5, shape)),
        ("largest", lambda rng, shape: np.resize([x for x in rng.normal(0, 0.3, 1300) if abs(x) < 0.6], shape)),
        ("largest", lambda rng, shape: rng.standard_t(3, shape) * 0.3),
        ("distinct", lambda rng, shape: rng.normal(0, 0.3, (*shape[:-1], 1)).repeat(shape[-1], -1)),
        ("correlation, seeds", lambda rng, shape: rng.normal(0, 0.3, shape[1:])[None].repeat(shape[0], 0)),
        ("correlation, axis 1", lambda rng, shape: rng.normal(0, 0.3, (*shape[:2], 1)).repeat(shape[2], 2)),
    ],
)
def test_what_1024_values_show(name, draw, rng):
    """The least that the step promises to see in any one tensor."""
    shape = (2, 16, 32)
    exact, limits = distribution.expectations(shape, 0.3)
    for _ in range(50):
        found = distribution.statistics(draw(rng, shape), 0.3)
        assert np.abs(found[name] - exact[name]).max() > limits[name]


def test_beginnings_are_compared_in_both_layouts(rng):
    draws = rng.normal(0, 1, 600)
    samples = {
        "conv": draws[:300].reshape(3, 100, 1, 1) * 0.1,
        "linear": np.ascontiguousarray(draws.reshape(20, 30).T) * 0.01,  # as Paddle's, under the reference's name
        "alone": rng.normal(0, 1, (10, 50)),
    }
    found, limit = distribution.between(samples)
    largest = {name: np.abs(array).max() for name, array in found.items()}
    assert largest["conv"] == pytest.approx(1) and largest["linear"] == pytest.approx(1)
    assert largest["alone"] < limit < 0.5
