"""tools/convert_weights.py keeps every bit, refuses what it should; tools/make_probe_weights.py writes what it says."""

import errno
import hashlib
import importlib.util
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
import torchvision

import mobilenetv3_paddle.models
import mobilenetv3_ref.models
from portproof.backends.probe import probe_weights
from sturdyio.cli import UserError, run
from sturdyio.files import load_npy, save_safetensors

ROOT = Path(__file__).parents[1]
PACKAGES = {"torch": mobilenetv3_ref.models, "paddle": mobilenetv3_paddle.models}
SMALL, LARGE = "mobilenet_v3_small", "mobilenet_v3_large"
TO_PADDLE, TO_TORCH = ("--from", "torch", "--to", "paddle"), ("--from", "paddle", "--to", "torch")


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


convert_weights, make_probe_weights = load_tool("convert_weights"), load_tool("make_probe_weights")


def call(tool, *flags: str | Path) -> None:
    tool.main(tool.get_args_parser().parse_args([str(flag) for flag in flags]))


@pytest.fixture
def refusal(capsys) -> Callable[..., str]:
    """refusal(tool, *flags) -> the one line on stderr with which the command ends, its status being 2."""

    def end(tool, *flags: str | Path) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(lambda: call(tool, *flags), tool.PROG)
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert re.fullmatch(rf"{tool.PROG}: error: .+\n", err)
        return err

    return end


def random_arrays(framework: str, model: str, num_classes: int) -> dict[str, np.ndarray]:
    """A state_dict of any bits that are a finite number, counts of batches included."""
    rng = np.random.default_rng(0)
    state_dict = PACKAGES[framework].MODELS[model](num_classes=num_classes).state_dict()
    arrays = {}
    for key, tensor in state_dict.items():
        if key.endswith("num_batches_tracked"):
            arrays[key] = np.array(rng.integers(1, 2**62))
        else:
            bits = rng.integers(0, 2**32, tuple(tensor.shape), np.uint32).view(np.float32)
            arrays[key] = np.where(np.isfinite(bits), bits, np.float32(-0.0))
    return arrays


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for key, array in expected.items():
        assert (got[key].dtype, got[key].shape) == (array.dtype, array.shape), key
        assert got[key].tobytes() == array.tobytes(), key


def save(arrays: dict[str, np.ndarray], path: Path) -> Path:
    """Write `arrays` as the suffix says, with the framework's own function."""
    if path.suffix == ".safetensors":
        save_safetensors(arrays, path)
    elif path.suffix == ".pdparams":
        paddle.save({key: paddle.to_tensor(array) for key, array in arrays.items()}, str(path))
    else:
        torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, path)
    return path


@pytest.fixture(scope="module")
def official(tmp_path_factory) -> Path:
    """A file as torchvision's are: the state_dict of its own model, the hash in the name."""
    path = tmp_path_factory.mktemp("official") / "weights.pth"
    torch.save(torchvision.models.mobilenet_v3_small().state_dict(), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return path.rename(path.with_name(f"mobilenet_v3_small-{digest[:8]}.pth"))


# --- what comes out


@pytest.mark.thorough("the small model", but="small")
@pytest.mark.parametrize("model, num_classes", [(LARGE, 1000), (SMALL, 1024), (SMALL, 7)])  # 1024: a square matrix
@pytest.mark.parametrize("there, back", [("a.pth .pdparams", ".pt"), ("a.safetensors .safetensors", ".pth")])
def test_there_and_back_from_torch_no_bit_is_lost(tmp_path, model, num_classes, there, back):
    arrays = random_arrays("torch", model, num_classes)
    first, second = there.split()
    source = save(arrays, tmp_path / first)
    middle, end = tmp_path / f"b{second}", tmp_path / f"c{back}"
    call(convert_weights, *TO_PADDLE, "--model", model, source, middle)
    call(convert_weights, *TO_TORCH, "--model", model, middle, end)
    assert_same_bits(mobilenetv3_ref.models.read_weights(end), arrays)
    if back == ".pt":  # what plain PyTorch gets to see
        loaded = torch.load(end, weights_only=True)
        assert_same_bits({key: tensor.numpy() for key, tensor in loaded.items()}, arrays)


@pytest.mark.thorough("the small model", but="small")
@pytest.mark.parametrize("model, num_classes", [(SMALL, 1000), (LARGE, 3)])
@pytest.mark.parametrize(
    "there, back", [("a.pdparams .pth", ".pdparams"), ("a.safetensors .safetensors", ".safetensors")]
)
def test_there_and_back_from_paddle_no_bit_is_lost(tmp_path, model, num_classes, there, back):
    arrays = random_arrays("paddle", model, num_classes)
    first, second = there.split()
    source = save(arrays, tmp_path / first)
    middle, end = tmp_path / f"b{second}", tmp_path / f"c{back}"
    call(convert_weights, *TO_TORCH, "--model", model, source, middle)
    call(convert_weights, *TO_PADDLE, "--model", model, middle, end)
    assert_same_bits(mobilenetv3_paddle.models.read_weights(end), arrays)
    if back == ".pdparams":  # what plain PaddlePaddle gets to see
        assert_same_bits({key: tensor.numpy() for key, tensor in paddle.load(str(end)).items()}, arrays)


def test_names_and_layouts_are_paddles(tmp_path):
    arrays = random_arrays("torch", SMALL, 1024)
    call(convert_weights, *TO_PADDLE, save(arrays, tmp_path / "a.pth"), tmp_path / "b.pdparams")
    converted = mobilenetv3_paddle.models.read_weights(tmp_path / "b.pdparams")
    expected = {  # one of each kind, by hand
        "features.0.0.weight": arrays["features.0.0.weight"],
        "features.1.block.1.fc1.bias": arrays["features.1.block.1.fc1.bias"],
        "features.0.1.weight": arrays["features.0.1.weight"],
        "features.0.1.bias": arrays["features.0.1.bias"],
        "features.0.1._mean": arrays["features.0.1.running_mean"],
        "features.0.1._variance": arrays["features.0.1.running_var"],
        "features.0.1.num_batches_tracked": arrays["features.0.1.num_batches_tracked"],
        "classifier.3.weight": arrays["classifier.3.weight"].T,
        "classifier.3.bias": arrays["classifier.3.bias"],
    }
    assert_same_bits({key: converted[key] for key in expected}, expected)
    assert len(converted) == len(arrays)


def test_a_file_of_torchvisions_is_taken_and_summed_up(official, tmp_path, capsys):
    output = tmp_path / "new" / "folder" / "mobilenet_v3_small.pdparams"
    call(convert_weights, *TO_PADDLE, official, output)
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == f"wrote {output}: 244 tensors, 1000 classes"
    counts = {(layer, name): (int(count), *rest) for count, layer, name, *rest in map(str.split, rows[1:])}
    assert sum(count for count, *_ in counts.values()) == 244
    assert counts["Linear", "weight"] == (2, "weight", "transposed")
    assert counts["BatchNorm2d", "running_mean"] == (34, "_mean", "same")
    assert counts["Conv2d", "weight"] == (52, "weight", "same")
    assert mobilenetv3_paddle.models.mobilenet_v3_small(weights=output)


@pytest.mark.parametrize("framework, flags, suffix", [("torch", TO_PADDLE, ".pth"), ("paddle", TO_TORCH, ".pdparams")])
def test_a_checkpoint_gives_its_model(tmp_path, framework, flags, suffix):
    model = PACKAGES[framework].mobilenet_v3_small(num_classes=5)
    arrays = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    content = {"model": model.state_dict(), "optimizer": {}, "epoch": 3, "args": {"lr": 0.1}}
    (torch if framework == "torch" else paddle).save(content, str(tmp_path / f"checkpoint{suffix}"))
    (other,) = PACKAGES.keys() - {framework}
    back = TO_TORCH if flags is TO_PADDLE else TO_PADDLE
    call(convert_weights, *flags, tmp_path / f"checkpoint{suffix}", tmp_path / "b.safetensors")
    call(convert_weights, *back, tmp_path / "b.safetensors", tmp_path / f"c{suffix}")
    assert_same_bits(PACKAGES[framework].read_weights(tmp_path / f"c{suffix}"), arrays)


# --- what is refused


class Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.mkdir, (self.path,)


def torch_canary(path: Path, canary: Canary) -> None:
    torch.save({"features.0.0.weight": torch.zeros(1), "hidden": canary}, path)


def paddle_canary(path: Path, canary: Canary) -> None:
    path.write_bytes(pickle.dumps({"features.0.0.weight": np.zeros(1), "hidden": canary}, protocol=2))


@pytest.mark.parametrize(
    "flags, write, load, suffix",
    [
        (TO_PADDLE, torch_canary, lambda path: torch.load(path, weights_only=False), ".pth"),
        (TO_TORCH, paddle_canary, lambda path: paddle.load(str(path)), ".pdparams"),
    ],
)
def test_a_file_that_asks_to_run_code_is_refused_unrun(refusal, tmp_path, flags, write, load, suffix):
    canary = tmp_path / "canary"
    source, output = tmp_path / f"evil{suffix}", tmp_path / "b.safetensors"
    write(source, Canary(canary))
    assert str(source) in refusal(convert_weights, *flags, source, output)
    assert not canary.exists()
    assert not output.exists()
    load(source)  # read without care, it does run
    assert canary.exists()


def test_an_npy_file_that_asks_to_run_code_is_refused_unrun(tmp_path):
    canary = tmp_path / "canary"
    np.save(tmp_path / "evil.npy", {"logits": Canary(canary)}, allow_pickle=True)
    with pytest.raises(UserError, match=r"evil\.npy"):
        load_npy(tmp_path / "evil.npy")
    assert not canary.exists()
    np.load(tmp_path / "evil.npy", allow_pickle=True)
    assert canary.exists()


@pytest.mark.thorough("test_a_file_that_asks_to_run_code_is_refused_unrun")
def test_the_command_line_ends_in_status_2_and_one_line(tmp_path):
    torch_canary(tmp_path / "evil.pth", Canary(tmp_path / "canary"))
    command = [
        sys.executable,
        "-W",
        "ignore",
        ROOT / "tools" / "convert_weights.py",
        *TO_PADDLE,
        "evil.pth",
        "b.pdparams",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"convert_weights: error: evil\.pth refused: the file asks to run '.*\n", result.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pth"]


def with_nan(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays["features.3.block.0.1.running_var"][5] = np.nan
    return arrays


def write_input(kind: str, folder: Path, official: Path) -> Path:
    """A weight file for --from torch and the small model with the fault `kind`."""
    path = folder / "in.pth"
    data = official.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "empty":
        path.touch()
    elif kind == "wrong hash":
        path = folder / "mobilenet_v3_small-047dcff4.pth"
        path.write_bytes(data)
    elif kind == "unknown suffix":
        path = folder / "in.bin"
        path.write_bytes(data)
    elif kind == "suffix of the other framework":
        path = save(random_arrays("paddle", SMALL, 2), folder / "in.pdparams")
    elif kind == "weights of the other framework":
        path = save(random_arrays("paddle", SMALL, 2), folder / "in.safetensors")
    elif kind == "other model":
        save(random_arrays("torch", LARGE, 2), path)
    elif kind == "NaN":
        save(with_nan(random_arrays("torch", SMALL, 2)), path)
    elif kind == "half precision":
        save({key: np.zeros_like(array, np.float16) for key, array in random_arrays("torch", SMALL, 2).items()}, path)
    elif kind == "no state_dict":
        torch.save(torch.zeros(3), path)
    elif kind == "no weights":
        torch.save({}, path)
    return path  # kind "missing": not written


FAULTS = {  # kind of input -> what the message says
    "missing": "in.pth does not exist",
    "empty": "in.pth is empty",
    "truncated": "in.pth refused",
    "wrong hash": "are damaged",
    "unknown suffix": "in.bin does not end as torch's weights do, .pth, .pt, .safetensors: check --from",
    "suffix of the other framework": "in.pdparams does not end as torch's weights do",
    "weights of the other framework": "do not fit this model",
    "other model": "taken for torch's mobilenet_v3_small, do not fit this model",
    "NaN": "hold NaN or Inf in features.3.block.0.1.running_var",
    "half precision": "of another dtype",
    "no state_dict": "holds a Tensor",
    "no weights": "244 missing",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_input_is_one_line_and_writes_nothing(refusal, official, tmp_path, kind):
    source, output = write_input(kind, tmp_path, official), tmp_path / "old.pdparams"
    output.write_bytes(b"old")
    before = sorted(tmp_path.iterdir())
    message = refusal(convert_weights, *TO_PADDLE, source, output)
    assert FAULTS[kind] in message
    assert str(source) in message
    assert (sorted(tmp_path.iterdir()), output.read_bytes()) == (before, b"old")


@pytest.mark.parametrize("framework", PACKAGES)
def test_equal_frameworks_are_refused(refusal, official, tmp_path, framework):
    message = refusal(convert_weights, "--from", framework, "--to", framework, official, tmp_path / "b.safetensors")
    assert f"both {framework}" in message


@pytest.mark.parametrize(
    "output, reason",
    [
        ("out.pth", "does not end as paddle's weights do, .pdparams, .safetensors: check --to"),
        ("out", "does not end as paddle's weights do, .pdparams, .safetensors: check --to"),
        ("a_file/out.pdparams", "cannot be written"),
        ("folder.pdparams", "is not a regular file"),
        ("mobilenet_v3_small-047dcff4.pdparams", "choose a name without -047dcff4"),
    ],
)
def test_an_output_that_cannot_be_is_refused(refusal, official, tmp_path, output, reason):
    (tmp_path / "a_file").touch()
    (tmp_path / "folder.pdparams").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert reason in refusal(convert_weights, *TO_PADDLE, official, tmp_path / output)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("link", [False, True])
def test_the_input_is_never_the_output(refusal, tmp_path, link):
    source = output = save(random_arrays("torch", SMALL, 2), tmp_path / "a.safetensors")
    if link:
        output = tmp_path / "b.safetensors"
        output.symlink_to(source)
    data = source.read_bytes()
    assert "is the input" in refusal(convert_weights, *TO_PADDLE, source, output)
    assert source.read_bytes() == data


@pytest.mark.parametrize("library, flags, suffix", [(paddle, TO_PADDLE, ".pdparams"), (torch, TO_TORCH, ".pth")])
def test_a_full_disk_leaves_the_old_file(refusal, monkeypatch, tmp_path, library, flags, suffix):
    def fill(content, target) -> None:
        with open(target, "wb") if isinstance(target, str) else target as file:  # noqa: PTH123  as the libraries
            file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    source = save(random_arrays(flags[1], SMALL, 2), tmp_path / "a.safetensors")
    output = tmp_path / f"b{suffix}"
    output.write_bytes(b"old")
    monkeypatch.setattr(library, "save", fill)
    assert "No space left" in refusal(convert_weights, *flags, source, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", f"b{suffix}"]
    assert output.read_bytes() == b"old"


# --- probe weights


@pytest.mark.thorough("the small model", but="small")
@pytest.mark.parametrize("model, num_classes", [(SMALL, 10), (LARGE, 1000)])
def test_one_seed_is_one_network_in_every_format(tmp_path, capsys, model, num_classes):
    flags = ("--model", model, "--num-classes", num_classes, "--seed", 3)
    expected = probe_weights(mobilenetv3_ref.models.MODELS[model](num_classes=num_classes, dropout=0.0), 3)
    for suffix in (".pth", ".safetensors", ".pdparams"):
        path = tmp_path / f"probe{suffix}"
        call(make_probe_weights, *flags, path)
        assert capsys.readouterr().out == f"wrote {path}: probe weights of {model}, {num_classes} classes, seed 3\n"
    for name in ("probe.pth", "probe.safetensors"):
        assert_same_bits(mobilenetv3_ref.models.read_weights(tmp_path / name), expected)
    call(convert_weights, *TO_TORCH, "--model", model, tmp_path / "probe.pdparams", tmp_path / "back.pth")
    assert_same_bits(mobilenetv3_ref.models.read_weights(tmp_path / "back.pth"), expected)


def test_another_seed_is_another_network(tmp_path):
    for seed in (0, 1):
        call(make_probe_weights, "--seed", seed, tmp_path / f"{seed}.pth")
    zero, one = (mobilenetv3_ref.models.read_weights(tmp_path / f"{seed}.pth") for seed in (0, 1))
    assert all(not np.array_equal(zero[key], one[key]) for key in zero if not key.endswith("num_batches_tracked"))


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("probe.bin",), "probe.bin ends in none of .pth, .pt, .safetensors, .pdparams"),
        (("--seed", "-1", "probe.pth"), "invalid whole number from 0 to 4294967295 value: '-1'"),
        (("a_file/probe.pth",), "cannot be written"),
    ],
)
def test_mistakes_with_probe_weights_are_one_line(refusal, tmp_path, monkeypatch, flags, reason):
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    assert reason in refusal(make_probe_weights, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


@pytest.mark.parametrize("missing", ["mobilenetv3_ref.models", "mobilenetv3_paddle.models"])
def test_a_missing_framework_is_named_with_its_remedy(refusal, official, tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)  # imports of it fail
    flags = {
        convert_weights: (*TO_PADDLE, official, tmp_path / "b.pdparams"),
        make_probe_weights: (tmp_path / "b.pth",),
    }
    for tool, its in flags.items():
        message = refusal(tool, *its)
        assert missing in message
        assert "pip install -e '.[align]'" in message
