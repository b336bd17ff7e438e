"""`portproof compare`: other people's result files, read without running what may hide in them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reprod_log import ReprodLogger

from sturdyio.files import save_safetensors

COMMAND = [sys.executable, "-m", "portproof", "compare"]


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """As reprod_log writes it."""
    logger = ReprodLogger()
    for name, array in arrays.items():
        logger.add(name, array)
    logger.save(str(path))
    return path


def run_compare(*args: object) -> tuple[int, str, str]:
    command = [*COMMAND, *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def arrays(rng) -> dict[str, np.ndarray]:
    return {"logits": rng.normal(size=(3, 7)).astype(np.float32), "labels": np.arange(3)}


def test_equal_files_pass(tmp_path, arrays):
    ref, port = write(tmp_path / "ref.npy", arrays), write(tmp_path / "port.npy", dict(reversed(arrays.items())))
    code, out, _ = run_compare(ref, port, "--rtol", "0")
    assert code == 0 and out.splitlines()[-1] == "PASS port.npy: all 2 items within their limits"


def test_a_verdict_for_programs(tmp_path, arrays):
    ref, port = write(tmp_path / "ref.npy", arrays), write(tmp_path / "port.npy", arrays | {"labels": np.arange(3) + 1})
    code, out, _ = run_compare(ref, port, "--rtol", "0", "--quiet", "--json", tmp_path / "verdict.json")
    data = json.loads((tmp_path / "verdict.json").read_text())
    assert (code, out) == (1, f"{data['sentence']}\n") and out.startswith("FAIL port.npy: 1 of 2 items")
    (verdict,) = data["verdicts"]
    assert [(row["name"], row["status"]) for row in verdict["rows"]] == [("logits", "PASS"), ("labels", "FAIL")]


# What reprod_log 1.0.1 lets pass, or cannot tell: NaN, broadcasting, a transposed array, a mean that hides the worst.
WRONG = {
    "NaN": lambda x: x | {"logits": x["logits"] * np.nan},
    "broadcast": lambda x: x | {"logits": x["logits"][:, :1]},
    "transposed": lambda x: x | {"logits": x["logits"].T},
    "one value": lambda x: x | {"logits": x["logits"] + np.float32(1e-3) * (np.arange(21) == 5).reshape(3, 7)},
    "dtype": lambda x: x | {"logits": x["logits"].astype(np.float64)},
    "a label": lambda x: x | {"labels": np.array([0, 2, 2])},
    "missing": lambda x: {"labels": x["labels"]},
    "extra": lambda x: x | {"more": np.ones(2)},
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_differs_fails(tmp_path, arrays, kind):
    ref, port = write(tmp_path / "ref.npy", arrays), write(tmp_path / "port.npy", WRONG[kind](arrays))
    code, out, _ = run_compare(ref, port, "--rtol", "1e-5")
    assert code == 1 and out.splitlines()[-1].startswith("FAIL port.npy: 1 of ")
    assert "first difference: " in out


def test_the_limit_comes_from_the_float64_run(tmp_path, arrays):
    fp64_ref = arrays | {"logits": arrays["logits"].astype(np.float64) + 1e-7}
    near, far = (arrays | {"logits": arrays["logits"] + np.float32(error)} for error in (1e-6, 1e-5))
    files = {"ref": arrays, "fp64_ref": fp64_ref, "near": near, "far": far}
    ref, exact, one, other = (write(tmp_path / f"{name}.npy", content) for name, content in files.items())
    assert run_compare(ref, one, "--fp64-ref", exact)[0] == 0
    assert run_compare(ref, other, "--fp64-ref", exact)[0] == 1
    code, _, err = run_compare(ref, one, "--fp64-ref", ref)  # its own float32 is none
    assert code == 2 and "has no float64 logits of shape (3, 7)" in err


def test_safetensors_and_plain_arrays_are_read(tmp_path, arrays):
    save_safetensors(arrays, tmp_path / "port.safetensors")
    assert run_compare(write(tmp_path / "ref.npy", arrays), tmp_path / "port.safetensors", "--rtol", "0")[0] == 0
    np.save(tmp_path / "plain.npy", arrays["logits"])
    assert run_compare(tmp_path / "plain.npy", tmp_path / "plain.npy", "--rtol", "0")[0] == 0


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_file_that_asks_to_run_code_is_refused(tmp_path, arrays):
    np.save(tmp_path / "bad.npy", np.array({"logits": Hostile()}, dtype=object), allow_pickle=True)
    command = [*COMMAND, "bad.npy", "bad.npy", "--rtol", "0"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2 and "the file asks to run" in result.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        (("no.npy", "no.npy", "--rtol", "0"), "does not exist"),
        (("ref.npy", "ref.npy"), "give --fp64-ref, or --rtol or --atol or both"),
        (
            ("ref.npy", "ref.npy", "--fp64-ref", "ref.npy", "--atol", "1"),
            "give --fp64-ref, or --rtol or --atol or both",
        ),
        (("ref.npy", "ref.npy", "--rtol", "-1"), "no limit"),
        (("ref.npy", "ref.npy", "--atol", "nan"), "no limit"),
        (("ref.txt", "ref.npy", "--rtol", "0"), "neither .npy nor .npz nor .safetensors"),
    ],
)
def test_a_users_mistake_is_one_line(tmp_path, arrays, args, words):
    write(tmp_path / "ref.npy", arrays)
    (tmp_path / "ref.txt").write_text("text")
    code, _, err = run_compare(*(tmp_path / a if a.startswith(("ref", "no")) else a for a in args))
    assert code == 2 and words in err.splitlines()[-1] and "Traceback" not in err


def test_numbers_archives_and_empty_names(tmp_path):
    np.save(tmp_path / "ref.npy", {"loss": 3.0, "": 2}, allow_pickle=True)
    np.save(tmp_path / "port.npy", {"loss": np.float64(3.5), "": np.array(2)}, allow_pickle=True)
    code, out, err = run_compare(tmp_path / "ref.npy", tmp_path / "port.npy", "--atol", "0.1")
    lines = [line.split()[:4] for line in out.splitlines()[:2]]
    assert code == 1 and lines == [["FAIL", "loss", "scalar", "max|d|"], ["ok", "(no", "name)", "scalar"]], out + err
    np.savez(tmp_path / "ref.npz", x=np.ones(3))
    np.savez_compressed(tmp_path / "port.npz", x=np.array([1.0, 1.0, 1.25]))
    for limits, status in (((0.1, 0.1), 1), ((0.1, 0.15), 0), ((0.25, 0), 0), ((0, 0.25), 0), ((0, 0.24), 1)):
        rtol, atol = limits
        flags = ("--rtol", rtol, "--atol", atol, "--quiet")
        assert run_compare(tmp_path / "ref.npz", tmp_path / "port.npz", *flags)[0] == status, limits


EQUAL_NAN = ("--equal-nan",)


@pytest.mark.parametrize(
    ("port", "flags", "status"),
    [("same", (), 1), ("same", EQUAL_NAN, 0), ("more", EQUAL_NAN, 1), ("off", EQUAL_NAN, 1)],
)
def test_nan_on_both_sides(tmp_path, port, flags, status):
    """With --equal-nan no difference where both have it, and said; else a failure."""
    files = {
        "ref": [1.0, np.nan, 3.0],
        "same": [1.0, np.nan, 3.0],
        "more": [np.nan, np.nan, 3.0],
        "off": [1, np.nan, 4],
    }
    for name in ("ref", port):
        write(tmp_path / f"{name}.npy", {"x": np.array(files[name], np.float32), "labels": np.arange(2)})
    code, out, _ = run_compare(tmp_path / "ref.npy", tmp_path / f"{port}.npy", "--rtol", "1e-6", *flags)
    assert code == status, out
    assert ("; 1 values are NaN on both sides" in out) == bool(flags)


@pytest.mark.parametrize(("others", "status"), [({}, 2), ({"loss": np.ones(1, np.float32)}, 0)])
def test_nothing_but_nan_proves_nothing(tmp_path, others, status):
    path = write(tmp_path / "nan.npy", {"x": np.full(3, np.nan, np.float32), **others})
    code, out, _ = run_compare(path, path, "--rtol", "1e-6", *EQUAL_NAN)
    assert code == status, out
    assert "1 not judged; 3 values are NaN" in out if others else "are accepted or not judged" in out


BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(("torch", "paddle", "scipy", "yaml"), None))
from portproof.__main__ import main
sys.argv = ["portproof", *sys.argv[1:]]
main()
"""


def test_no_framework_is_needed(tmp_path, arrays):
    path = write(tmp_path / "ref.npy", arrays)
    command = [sys.executable, "-c", BLOCKED, "compare", path, path, "--rtol", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "PASS ref.npy: all 2 items within their limits"
