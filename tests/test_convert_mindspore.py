"""tools/convert_weights.py to and from MindSpore: no bit is lost, MindSpore reads the file and computes PyTorch's.

MindSpore runs in a process of its own, with the interpreter MINDSPORE_PYTHON or this one.
"""

import importlib.util
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import mobilenetv3_paddle.models
import mobilenetv3_ref.models
from portproof.backends import backend
from portproof.compare.ruler import kernel_atol
from portproof.convert.rules import MINDSPORE_RULES, mindspore_to_torch, torch_to_mindspore
from portproof.io.ckpt import load_ckpt, save_ckpt
from sturdyio.cli import UserError, run
from sturdyio.files import load_safetensors

ROOT = Path(__file__).parents[1]
NEEDS_MINDSPORE = pytest.mark.thorough("few have MindSpore; test_from_mindspore_and_back_no_bit_is_lost")
MINDSPORE = os.environ.get("MINDSPORE_PYTHON", sys.executable)
SMALL, LARGE = "mobilenet_v3_small", "mobilenet_v3_large"
READ = {"torch": mobilenetv3_ref.models.read_weights, "paddle": mobilenetv3_paddle.models.read_weights}
SUFFIX = {"torch": ".pth", "paddle": ".pdparams", "mindspore": ".ckpt"}
COUNT = "num_batches_tracked"
Arrays = dict[str, np.ndarray]

spec = importlib.util.spec_from_file_location("convert_weights", ROOT / "tools" / "convert_weights.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def convert(source: str, target: str, path: Path, output: Path, model: str = SMALL) -> Path:
    flags = ["--from", source, "--to", target, "--model", model, str(path), str(output)]
    tool.main(tool.get_args_parser().parse_args(flags))
    return output


@pytest.fixture
def refusal(capsys) -> Callable[..., str]:
    """refusal(source, target, path, output) -> the one line on stderr with which the command ends in status 2."""

    def end(*args) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(lambda: convert(*args), tool.PROG)
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert re.fullmatch(r"convert_weights: error: .+\n", err)
        return err

    return end


def random_bits(model: str = SMALL, num_classes: int = 7) -> Arrays:
    """A state_dict of PyTorch's of any bits that are a finite number, counts of batches included."""
    rng, arrays = np.random.default_rng(0), {}
    for key, tensor in mobilenetv3_ref.models.MODELS[model](num_classes=num_classes).state_dict().items():
        bits = rng.integers(0, 2**32, tuple(tensor.shape), np.uint32).view(np.float32)
        arrays[key] = np.where(np.isfinite(bits), bits, np.float32(-0.0))
        if key.endswith(COUNT):
            arrays[key] = np.array(rng.integers(1, 2**62))
    return arrays


def save_torch(arrays: Arrays, path: Path) -> Path:
    torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, path)
    return path


def assert_same_bits(got: Arrays, expected: Arrays) -> None:
    assert got.keys() == expected.keys()
    for key, array in expected.items():
        assert (got[key].dtype, got[key].shape) == (array.dtype, array.shape), key
        assert got[key].tobytes() == array.tobytes(), key


# --- there and back, without MindSpore


@pytest.mark.thorough("the small model", but="small")
@pytest.mark.parametrize("model, num_classes", [(SMALL, 7), (LARGE, 1280)])  # 1280: a square matrix
@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_from_torch_and_back_only_the_counts_of_batches_become_0(tmp_path, model, num_classes, suffix):
    arrays = random_bits(model, num_classes)
    there = convert("torch", "mindspore", save_torch(arrays, tmp_path / "a.pth"), tmp_path / f"b{suffix}", model)
    assert not any(COUNT in key for key in (load_ckpt if suffix == ".ckpt" else load_safetensors)(there))
    back = convert("mindspore", "torch", there, tmp_path / "c.pth", model)
    expected = {key: np.zeros((), np.int64) if key.endswith(COUNT) else array for key, array in arrays.items()}
    assert_same_bits(READ["torch"](back), expected)


@pytest.mark.parametrize("middle", ["torch", "paddle"])
def test_from_mindspore_and_back_no_bit_is_lost(tmp_path, middle):
    first = convert("torch", "mindspore", save_torch(random_bits(), tmp_path / "a.pth"), tmp_path / "b.ckpt")
    there = convert("mindspore", middle, first, tmp_path / f"c{SUFFIX[middle]}")
    back = convert(middle, "mindspore", there, tmp_path / "d.ckpt")
    assert_same_bits(load_ckpt(back), load_ckpt(first))


def test_names_and_layouts_are_mindspores(tmp_path, capsys):
    arrays = random_bits(num_classes=1024)  # a square matrix: a transposed one would fit, too
    converted = load_ckpt(convert("torch", "mindspore", save_torch(arrays, tmp_path / "a.pth"), tmp_path / "b.ckpt"))
    expected = {  # one of each kind, by hand
        "features.0.0.weight": arrays["features.0.0.weight"],
        "features.1.block.1.fc1.bias": arrays["features.1.block.1.fc1.bias"],
        "features.0.1.gamma": arrays["features.0.1.weight"],
        "features.0.1.beta": arrays["features.0.1.bias"],
        "features.0.1.moving_mean": arrays["features.0.1.running_mean"],
        "features.0.1.moving_variance": arrays["features.0.1.running_var"],
        "classifier.3.weight": arrays["classifier.3.weight"],
        "classifier.3.bias": arrays["classifier.3.bias"],
    }
    assert_same_bits({key: converted[key] for key in expected}, expected)
    assert len(converted) == len(arrays) - 34
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == f"wrote {tmp_path / 'b.ckpt'}: 210 tensors, 1024 classes"
    said = {(layer, name): (count, *rest) for count, layer, name, *rest in (row.split(maxsplit=4) for row in rows[1:])}
    assert said["BatchNorm2d", "running_var"] == ("34", "moving_variance", "same")
    assert said["BatchNorm2d", COUNT] == ("34", "-", "left out")


def test_from_paddle_a_matrix_is_transposed(tmp_path):
    arrays = random_bits(num_classes=1024)
    source = convert("torch", "paddle", save_torch(arrays, tmp_path / "a.pth"), tmp_path / "a.pdparams")
    converted = load_ckpt(convert("paddle", "mindspore", source, tmp_path / "b.ckpt"))
    name = "classifier.3.weight"
    assert_same_bits({name: converted[name]}, {name: arrays[name]})
    assert READ["paddle"](source)[name].tobytes() != arrays[name].tobytes()


@pytest.mark.thorough("test_from_mindspore_and_back_no_bit_is_lost")
@pytest.mark.parametrize("source, target", [("torch", "mindspore"), ("mindspore", "torch")])
def test_neither_mindspore_nor_paddle_is_needed(tmp_path, source, target):
    save_torch(random_bits(), tmp_path / "a.pth")
    convert("torch", "mindspore", tmp_path / "a.pth", tmp_path / "a.ckpt")
    code = (
        "import runpy, sys; sys.modules |= dict.fromkeys(('paddle', 'mindspore'));"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    flags = ["--from", source, "--to", target, "--model", SMALL, f"a{SUFFIX[source]}", f"b{SUFFIX[target]}"]
    command = [sys.executable, "-c", code, ROOT / "tools" / "convert_weights.py", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / f"b{SUFFIX[target]}").exists()


# --- what is refused


def message(number: int, content: bytes) -> bytes:
    """A field of bytes, at most 127 of them."""
    return bytes([number << 3 | 2, len(content)]) + content


def checkpoint(name: str = "x", dims: bytes = b"\x08\x02", kind: str = "Float32", content: bytes = bytes(8)) -> bytes:
    tensor = dims + message(2, kind.encode()) + message(3, content)
    return message(1, message(1, name.encode()) + message(2, tensor))


def with_sum(data: bytes, crc: int | None = None) -> bytes:
    return data + b"crc_num" + (zlib.crc32(data) if crc is None else crc).to_bytes(10, "big")


def test_the_messages_above_are_right(tmp_path):
    path = tmp_path / "a.ckpt"
    for data in (checkpoint(), with_sum(checkpoint())):
        path.write_bytes(data)
        assert_same_bits(load_ckpt(path), {"x": np.zeros(2, np.float32)})
    path.write_bytes(checkpoint("x", content=b"abcd") + checkpoint("x", content=b"efgh"))  # one array in two slices
    assert load_ckpt(path)["x"].tobytes() == b"abcdefgh"
    save_ckpt({"x": np.zeros(2, np.float32)}, path)
    assert path.read_bytes() == checkpoint()


FAULTY = {  # content -> what the message says
    "too short": (checkpoint(content=bytes(4)), "x has 4 bytes for the shape (2,) of Float32"),
    "too long": (checkpoint(content=bytes(12)), "x has 12 bytes for the shape (2,) of Float32"),
    "negative": (checkpoint(dims=b"\x08" + b"\xff" * 9 + b"\x01"), "bytes for the shape"),
    "huge": (checkpoint(dims=b"\x08" + b"\xff" * 6 + b"\x01"), "bytes for the shape"),
    "unknown type": (checkpoint(kind="BFloat16"), "BFloat16, which NumPy has not"),
    "text": (checkpoint("epoch", dims=b"\x08\x00", kind="str"), "str, which NumPy has not"),
    "twice": (checkpoint() + checkpoint("y") + checkpoint(), "it holds x twice"),
    "twice, of two types": (checkpoint() + checkpoint(kind="Int32"), "it holds x twice"),
    "no tensor": (message(1, message(1, b"x")), "x is no plain array"),
    "no type": (message(1, message(1, b"x") + message(2, b"")), "x is of the type , which NumPy has not"),
    "number for a name": (message(1, b"\x08\x01"), "a parameter without a name is no plain array"),
    "no UTF-8": (message(1, message(1, b"\xff") + message(2, b"")), "is no text"),
    "nothing in it": (message(9, b""), "it holds no parameters"),
    "another sum": (with_sum(checkpoint(), 1), "CRC-32"),
    "ends early": (bytes([10, checkpoint()[1] + 1]) + checkpoint()[2:], "it ends early"),
    "endless number": (b"\xff" * 20, "no checkpoint of MindSpore"),
    "pickle": (b"\x80\x02}q\x00.", "no checkpoint of MindSpore"),
    "control characters": (checkpoint("\x1b[31m\nx", content=bytes(4)), r"\x1b[31m x has 4 bytes"),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_a_faulty_ckpt_is_one_line_and_writes_nothing(refusal, tmp_path, kind):
    data, reason = FAULTY[kind]
    source, output = tmp_path / "in.ckpt", tmp_path / "old.pth"
    source.write_bytes(data)
    output.write_bytes(b"old")
    error = refusal("mindspore", "torch", source, output)
    assert f"{source} refused: " in error
    assert reason in error
    assert output.read_bytes() == b"old"


def test_a_ckpt_cut_short_anywhere_is_refused(tmp_path):
    save_ckpt({"a.weight": np.arange(6.0).reshape(2, 3), "a.bias": np.array(3)}, tmp_path / "a.ckpt")
    whole = (tmp_path / "a.ckpt").read_bytes()
    refused = []
    for end in range(1, len(whole)):
        (tmp_path / "b.ckpt").write_bytes(whole[:end])
        try:
            assert load_ckpt(tmp_path / "b.ckpt").keys() == {"a.weight"}  # between two parameters: the model says so
        except UserError:
            refused.append(end)
    assert len(refused) == len(whole) - 2


def test_any_changed_byte_is_a_refusal_or_an_array(tmp_path, rng):
    """Nothing else is raised, whatever the file holds; with a sum, every change is found."""
    save_ckpt({"a.weight": np.arange(6.0).reshape(2, 3), "a.bias": np.array(3)}, tmp_path / "a.ckpt")
    whole = (tmp_path / "a.ckpt").read_bytes()
    for data in (whole, with_sum(whole)):
        found = 0
        for place in range(len(whole)):
            changed = bytearray(data)
            changed[place] ^= rng.integers(1, 256)
            (tmp_path / "b.ckpt").write_bytes(changed)
            try:
                assert all(isinstance(array, np.ndarray) for array in load_ckpt(tmp_path / "b.ckpt").values())
            except UserError:
                found += 1
        assert found == len(whole) if data is not whole else 0 < found < len(whole)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda arrays: arrays.pop("features.0.1.gamma"), "1 missing (first: features.0.1.gamma)"),
        (lambda arrays: arrays.update(global_step=np.zeros(1, np.int32)), "1 unexpected (first: global_step)"),
        (lambda arrays: arrays.update({"classifier.0.weight": arrays["classifier.0.weight"].T}), "of another shape"),
        (lambda arrays: arrays.update({"classifier.0.bias": np.zeros(1024)}), "of another dtype"),
        (lambda arrays: arrays["features.0.1.gamma"].fill(np.nan), "hold NaN or Inf in features.0.1.gamma"),
    ],
)
def test_weights_that_do_not_fit_are_refused(refusal, tmp_path, change, reason):
    model = mobilenetv3_ref.models.MODELS[SMALL](num_classes=3)
    types = backend("torch").layers.types(model)
    arrays = torch_to_mindspore(mobilenetv3_ref.models.weights.to_arrays(model.state_dict()), types)
    change(arrays)
    save_ckpt(arrays, tmp_path / "a.ckpt")
    error = refusal("mindspore", "torch", tmp_path / "a.ckpt", tmp_path / "b.pth")
    assert "taken for mindspore's mobilenet_v3_small," in error
    assert reason in error
    assert not (tmp_path / "b.pth").exists()


@pytest.mark.parametrize("source, path", [("torch", "a.ckpt"), ("mindspore", "a.pth"), ("mindspore", "missing.ckpt")])
def test_a_wrong_name_is_refused(refusal, tmp_path, source, path):
    (tmp_path / "a.ckpt").write_bytes(checkpoint())
    (tmp_path / "a.pth").write_bytes(checkpoint())
    assert str(tmp_path / path) in refusal(source, "paddle", tmp_path / path, tmp_path / "b.pdparams")


def test_a_full_disk_leaves_the_old_file(refusal, monkeypatch, tmp_path):
    def fill(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    source, output = save_torch(random_bits(), tmp_path / "a.pth"), tmp_path / "b.ckpt"
    output.write_bytes(b"old")
    monkeypatch.setattr(Path, "write_bytes", fill)
    assert "No space left" in refusal("torch", "mindspore", source, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pth", "b.ckpt"]
    assert output.read_bytes() == b"old"


# --- with MindSpore


LAYERS = {  # as in mobilenetv3_mindspore.py: a layer, the shape of its input
    "BatchNorm1d": (lambda: torch.nn.BatchNorm1d(6), (4, 6)),
    "LayerNorm": (lambda: torch.nn.LayerNorm(6), (4, 6)),
    "GroupNorm": (lambda: torch.nn.GroupNorm(3, 6), (2, 6, 4, 4)),
    "Embedding": (lambda: torch.nn.Embedding(5, 4), ()),
}


def layer_case(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer of PyTorch's with values that differ everywhere, in eval mode, and an input."""
    build, shape = LAYERS[name]
    layer, generator = torch.nn.Sequential(build()).eval(), torch.Generator().manual_seed(len(name))
    for tensor in layer.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return layer, torch.randn(shape, generator=generator) if shape else torch.tensor([[3, 0], [4, 3]])


def in_both(model: torch.nn.Module, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What `model` gives in float32, and `fp64_ref`."""
    with torch.inference_mode():
        ref = model(x).numpy()
        fp64_ref = model.double()(x.double() if x.is_floating_point() else x).numpy()
    return ref, fp64_ref


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory, probe, images) -> Path:
    """The folder through which files went to MindSpore and came back."""
    if subprocess.run([MINDSPORE, "-c", "import mindspore"], capture_output=True, check=False).returncode:
        reason = "MindSpore is not installed: pip install -e '.[mindspore]', or name its Python in MINDSPORE_PYTHON"
        pytest.fail(reason) if os.environ.get("MINDSPORE_REQUIRED") else pytest.skip(reason)
    folder = tmp_path_factory.mktemp("exchanged")
    for suffix in (".ckpt", ".safetensors"):
        convert("torch", "mindspore", save_torch(probe(SMALL), folder / "a.pth"), folder / f"small{suffix}")
    np.save(folder / "images.npy", images)
    for name in LAYERS:
        layer, x = layer_case(name)
        arrays = {key: tensor.numpy() for key, tensor in layer.state_dict().items()}
        save_ckpt(torch_to_mindspore(arrays, backend("torch").layers.types(layer)), folder / f"{name}.ckpt")
        np.save(folder / f"{name}.npy", x.numpy() if name != "Embedding" else x.numpy().astype(np.int32))
    command = [MINDSPORE, Path(__file__).with_name("mobilenetv3_mindspore.py"), folder]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def results(exchanged) -> Arrays:
    with np.load(exchanged / "results.npz") as file:
        return dict(file)


@NEEDS_MINDSPORE
@pytest.mark.parametrize("format", ["read", "safetensors"])
def test_mindspore_reads_every_bit(exchanged, results, format):
    read = {key.removeprefix(f"{format} "): array for key, array in results.items() if key.startswith(format)}
    assert_same_bits(read, load_ckpt(exchanged / "small.ckpt"))


@NEEDS_MINDSPORE
@pytest.mark.parametrize("name", ["own.ckpt", "sum.ckpt", "own.safetensors"])
def test_what_mindspore_writes_is_read_to_the_bit(exchanged, tmp_path, probe, name):
    back = READ["torch"](convert("mindspore", "torch", exchanged / name, tmp_path / "a.pth"))
    kept = {key: array for key, array in probe(SMALL).items() if not key.endswith(COUNT)}
    assert_same_bits({key: back[key] for key in kept}, kept)


@NEEDS_MINDSPORE
def test_every_type_of_mindspores_that_numpy_has_is_read(exchanged):
    arrays = load_ckpt(exchanged / "types.ckpt")
    assert arrays.pop("number").tobytes() == np.float32(0.1).tobytes()
    assert len(arrays) == 12
    for name, array in arrays.items():
        assert array.dtype.name == name
        assert np.array_equal(array, np.arange(6).reshape(1, 2, 3).astype(name))
    save_ckpt(arrays, exchanged / "again.ckpt")
    assert_same_bits(load_ckpt(exchanged / "again.ckpt"), arrays)


@NEEDS_MINDSPORE
def test_mindspore_computes_torchs_logits(results, probe, images):
    """MobileNetV3 small of MindSpore's own layers: as close as another faultless float32 network would be."""
    model = mobilenetv3_ref.models.MODELS[SMALL]().eval()
    mobilenetv3_ref.models.load_state_dict(model, probe(SMALL))
    ref, fp64_ref = in_both(model, torch.from_numpy(images))
    limit = kernel_atol({"logits": fp64_ref}, {"logits": ref})["logits"]
    distance = np.abs(results["logits"] - ref).max()
    assert distance <= limit
    assert (
        limit < 1e-4 * np.abs(fp64_ref).max() < np.abs(fp64_ref - fp64_ref.mean(axis=0)).max()
    )  # it tells images apart


@NEEDS_MINDSPORE
@pytest.mark.parametrize("name", LAYERS)
def test_mindspore_computes_each_layer_of_the_table(results, name):
    layer, x = layer_case(name)
    ref, fp64_ref = in_both(layer, x)
    assert np.abs(results[name] - ref).max() <= kernel_atol({name: fp64_ref}, {name: ref})[name]
    types = {"BatchNorm2d", "Conv2d", "Linear", *LAYERS}  # the first three are MobileNetV3's
    assert set(MINDSPORE_RULES) == types


@pytest.mark.parametrize("name", LAYERS)
def test_layers_come_back(name):
    layer, _ = layer_case(name)
    arrays = {key: tensor.numpy() for key, tensor in layer.state_dict().items()}
    types = backend("torch").layers.types(layer)
    back = mindspore_to_torch(torch_to_mindspore(arrays, types), types)
    assert_same_bits(back, {key: arrays[key] for key in back})
    assert back.keys() == arrays.keys()
