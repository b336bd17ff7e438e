"""tools/average_checkpoints.py: the mean to the last bit, the same in both frameworks, of the best files of a run."""

import hashlib
import importlib.util
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch

import mobilenetv3_paddle.models
import mobilenetv3_paddle.train.checkpoint
import mobilenetv3_ref.models
from mobilenetv3_common.metrics import NAME, MetricsLog
from portproof.backends import backend
from portproof.convert.rules import paddle_to_torch, torch_to_paddle
from sturdyio.cli import run
from sturdyio.files import save_safetensors

SPEC = importlib.util.spec_from_file_location(
    "average_checkpoints", Path(__file__).parents[1] / "tools" / "average_checkpoints.py"
)
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)

MODELS = {"torch": mobilenetv3_ref.models, "paddle": mobilenetv3_paddle.models}
SUFFIX = {"torch": ".pth", "paddle": ".pdparams"}
SMALL = "mobilenet_v3_small"
REF = mobilenetv3_ref.models.MODELS[SMALL](num_classes=3, width_mult=0.25, reduced_tail=True)
TYPES = backend("torch").layers.types(REF)


@pytest.fixture(params=["torch", "paddle"])
def framework(request) -> str:
    """Each framework in turn."""
    return request.param


def call(framework: str, *arguments: str | Path) -> None:
    tool.main(tool.get_args_parser().parse_args(["--framework", framework, *map(str, arguments)]))


def drawn(seed: int) -> dict[str, np.ndarray]:
    """A state_dict of the small model: floats of many sizes, counts of batches of either parity."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, tensor in REF.state_dict().items():
        shape = tuple(tensor.shape)
        if name.endswith("num_batches_tracked"):
            arrays[name] = np.array(rng.integers(0, 1000))
        else:
            arrays[name] = (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape)).astype(np.float32)
    return arrays


def save(framework: str, arrays: dict[str, np.ndarray], path: Path, checkpoint: bool = False) -> Path:
    """Write the reference's `arrays` as the framework's own weights."""
    arrays = torch_to_paddle(arrays, TYPES) if framework == "paddle" else arrays
    if path.suffix == ".safetensors":
        save_safetensors(arrays, path)
        return path
    to_tensor, write = (torch.from_numpy, torch.save) if framework == "torch" else (paddle.to_tensor, paddle.save)
    state = {name: to_tensor(np.array(array)) for name, array in arrays.items()}
    write({"model": state, "epoch": 3} if checkpoint else state, str(path))
    return path


def read(framework: str, path: Path) -> dict[str, np.ndarray]:
    """The weights under the reference's names."""
    arrays = MODELS[framework].read_weights(path)
    return paddle_to_torch(arrays, TYPES) if framework == "paddle" else arrays


def exact_means(states: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The means in exact arithmetic, rounded once to float32 by way of float64; of integers, rounded down."""
    means = {}
    for name, first in states[0].items():
        columns = zip(*(state[name].ravel().tolist() for state in states), strict=True)
        if first.dtype.kind == "f":
            values = [float(sum(map(Fraction, column)) / len(states)) for column in columns]
        else:
            values = [sum(column) // len(states) for column in columns]
        means[name] = np.array(values).astype(first.dtype).reshape(first.shape)
    return means


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("count", [2, 3])
def test_the_mean_to_the_last_bit(framework, count, tmp_path):
    """Of a weight file, a checkpoint and a .safetensors file; it loads into the model."""
    states, suffix = [drawn(seed) for seed in range(count)], SUFFIX[framework]
    paths = [
        save(framework, states[0], tmp_path / f"a{suffix}"),
        save(framework, states[1], tmp_path / f"b{suffix}", checkpoint=True),
        *(save(framework, state, tmp_path / "c.safetensors") for state in states[2:]),
    ]
    out = tmp_path / f"out{suffix}"
    call(framework, out, *paths)
    assert_same_bits(read(framework, out), exact_means(states))
    model = MODELS[framework].MODELS[SMALL](num_classes=3, width_mult=0.25, reduced_tail=True)
    MODELS[framework].load_weights(model, out)


def test_both_frameworks_give_the_same_bits(tmp_path):
    states = [drawn(seed) for seed in range(3)]
    results = []
    for name in MODELS:
        paths = [save(name, state, tmp_path / f"{i}{SUFFIX[name]}") for i, state in enumerate(states)]
        call(name, tmp_path / f"{name}.safetensors", *paths)
        results.append(read(name, tmp_path / f"{name}.safetensors"))
    assert_same_bits(*results)


def test_integers_as_torchvision_averages_them(tmp_path):
    """utils.py: torch.Tensor `//=`; 3, 4 and 4 batches make 3."""
    states = [drawn(0) for _ in range(3)]
    for state, value in zip(states, (3, 4, 4), strict=True):
        state["features.0.1.num_batches_tracked"] = np.array(value)
    paths = [save("torch", state, tmp_path / f"{i}.pth") for i, state in enumerate(states)]
    call("torch", tmp_path / "out.pth", *paths)
    total = torch.tensor(3 + 4 + 4)
    total //= 3
    assert int(read("torch", tmp_path / "out.pth")["features.0.1.num_batches_tracked"]) == total.item() == 3


def run_folder(framework: str, folder: Path, top1: list[float], ema: bool = True) -> list[dict[str, np.ndarray]]:
    """The output folder of a run with an evaluation of `top1` after each epoch; the weights of the epochs."""
    log = MetricsLog(folder / NAME)
    states = [drawn(seed) for seed in range(len(top1))]
    for epoch, value in enumerate(top1):
        log.write("train", epoch=epoch, step=epoch + 1, loss=1.0, top1=1.0)
        log.write("eval", epoch=epoch, step=epoch + 1, loss=1.0, top1=value)
        if ema:
            log.write("eval_ema", epoch=epoch, step=epoch + 1, loss=1.0, top1=1.0 - epoch / 10)
        save(framework, states[epoch], folder / f"model_{epoch}{SUFFIX[framework]}")
    log.close()
    return states


def test_the_best_of_a_run(framework, tmp_path, capsys):
    """By the evaluation of the weights themselves; of equal ones the later."""
    states = run_folder(framework, tmp_path / "run", [0.2, 0.5, 0.4, 0.1, 0.4])
    call(framework, tmp_path / "out.safetensors", "--best", 2, tmp_path / "run")
    assert capsys.readouterr().out.splitlines()[:2] == ["epoch 1: top1 0.50000", "epoch 4: top1 0.40000"]
    assert_same_bits(read(framework, tmp_path / "out.safetensors"), exact_means([states[1], states[4]]))
    call(framework, tmp_path / "one.safetensors", "--best", 1, tmp_path / "run")
    assert_same_bits(read(framework, tmp_path / "one.safetensors"), states[1])


# --- what is refused, and leaves no file


@pytest.fixture
def refusal(capsys) -> Callable[..., str]:
    """refusal(framework, *arguments) -> the one line on stderr with which the command ends, its status being 2."""

    def end(framework: str, *arguments: str | Path) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(lambda: call(framework, *arguments), tool.PROG)
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert re.fullmatch(rf"{tool.PROG}: error: .+\n", err)
        return err

    return end


def without(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in arrays.items() if key != name}


BIAS = "classifier.3.bias"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: without(a, BIAS), rf"a\.pth has {BIAS}, .*b\.pth has not"),
        (lambda a: {**a, "more": a[BIAS]}, r"b\.pth has more, .*a\.pth has not"),
        (lambda a: {**a, BIAS: a[BIAS][:2]}, rf"{BIAS} is float32 \(3,\) in .*a\.pth and float32 \(2,\) in .*b\.pth"),
        (lambda a: {**a, BIAS: a[BIAS].astype(np.float64)}, rf"{BIAS} is float32 .*a\.pth and float64"),
        (lambda a: {**a, BIAS: a[BIAS] * np.float32(np.inf)}, rf"b\.pth holds NaN or Inf in {BIAS}"),
    ],
)
def test_refuses_files_that_do_not_go_together(tmp_path, refusal, change, message):
    a = save("torch", drawn(0), tmp_path / "a.pth")
    b = save("torch", change(drawn(1)), tmp_path / "b.pth")
    assert re.search(message, refusal("torch", tmp_path / "out.pth", a, b))
    assert not (tmp_path / "out.pth").exists()


def test_refuses_arguments_that_mean_nothing(framework, tmp_path, refusal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suffix = SUFFIX[framework]
    a, b = (save(framework, drawn(seed), Path(f"{seed}{suffix}")) for seed in (0, 1))
    before = hashlib.sha256(a.read_bytes()).hexdigest()
    out = f"out{suffix}"
    assert "0" + suffix + " exists already" in refusal(framework, a, a, b)  # the output forgotten
    assert hashlib.sha256(a.read_bytes()).hexdigest() == before
    assert "is given twice" in refusal(framework, out, a, b, tmp_path / a)
    assert "alone has no average" in refusal(framework, out, a)
    assert "name the files to average, or --best" in refusal(framework, out)
    assert "name the files to average, or --best" in refusal(framework, out, a, b, "--best", 2, ".")
    assert "out.onnx is not" in refusal(framework, "out.onnx", a, b)
    assert "does not exist" in refusal(framework, out, a, f"9{suffix}")
    assert "nowhere does not exist" in refusal(framework, out, "--best", 2, "nowhere")
    assert "--best 0 is no whole number" in refusal(framework, out, "--best", 0, ".")
    assert f"{NAME} does not exist" in refusal(framework, out, "--best", 2, ".")
    run_folder(framework, Path(), [0.5, 0.4], ema=False)
    assert "has 2 evaluations" in refusal(framework, out, "--best", 3, ".")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted([".jsonl", *[suffix] * 4])


def test_refuses_a_best_file_that_is_gone(tmp_path, capsys):
    run_folder("torch", tmp_path, [0.5, 0.4])
    (tmp_path / "model_1.pth").unlink()
    with pytest.raises(SystemExit) as ended:
        run(lambda: call("torch", tmp_path / "out.pth", "--best", 2, tmp_path), tool.PROG)
    assert ended.value.code == 2
    assert "model_1.pth does not exist" in capsys.readouterr().err
