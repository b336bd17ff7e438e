"""Weights of any pair, converted: every bit there and back, names that differ, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from toy_sources import PORT_SUM, REF_SUM

from portproof.backends import backend
from portproof.commands import convert
from portproof.mapping.conversion import convert_state_dict, key_map
from sturdyio import cli
from sturdyio.cli import UserError
from sturdyio.files import load_pdparams, load_safetensors, save_safetensors

PAIR = f"""
import paddle
import torch

{REF_SUM}
{PORT_SUM}

class Ref(torch.nn.Module):
    def __init__(self, names=("conv", "norm", "first", "last"), classes=6, tied=False):
        super().__init__()
        layers = (torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 6), torch.nn.Linear(6, classes))
        self.names = names
        for name, layer in zip(names, layers):
            setattr(self, name, layer)
        if tied:
            layers[3].weight = torch.nn.Parameter(layers[3].weight.detach())
            self.again = torch.nn.Linear(6, classes)
            self.again.weight = layers[3].weight

    def forward(self, x):
        conv, norm, first, last = (getattr(self, name) for name in self.names)
        x = torch.relu(norm(conv(x))).mean((2, 3))
        x = last(torch.relu(first(x)))
        return self.again(torch.relu(x)) + x if hasattr(self, "again") else x


class Port(paddle.nn.Layer):
    def __init__(self, names=("conv", "norm", "first", "last"), classes=6, tied=False):
        super().__init__()
        layers = (
            paddle.nn.Conv2D(3, 4, 3), paddle.nn.BatchNorm2D(4), paddle.nn.Linear(4, 6), paddle.nn.Linear(6, classes)
        )
        self.names = names
        for name, layer in zip(names, layers):
            setattr(self, name, layer)
        if tied:
            self.again = paddle.nn.Linear(6, classes)
            self.again.weight = layers[3].weight

    def forward(self, x):
        conv, norm, first, last = (getattr(self, name) for name in self.names)
        x = paddle.nn.functional.relu(norm(conv(x))).mean((2, 3))
        x = last(paddle.nn.functional.relu(first(x)))
        return self.again(paddle.nn.functional.relu(x)) + x if hasattr(self, "again") else x
"""
OTHER = "(names=('a', 'b', 'c', 'd'))"
INPUT = ("--input", "4,3,16,16")


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """The current folder, with the module a_pair, which is given."""
    (tmp_path / "a_pair.py").write_text(PAIR, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import a_pair

    yield a_pair
    sys.modules.pop("a_pair", None)


@pytest.fixture
def run(pair, capsys) -> Callable[..., tuple[int, str, str]]:
    """run(*words, ref=, port=) -> (status, stdout, stderr) of `portproof convert`."""

    def run(*words: str, ref: str = "Ref", port: str = "Port") -> tuple[int, str, str]:
        args = ["--ref", f"a_pair:{ref}", "--port", f"a_pair:{port}", *words]
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.run(lambda: convert.main(convert.get_args_parser().parse_args(args)), convert.PROG)
        return ended.value.code, *capsys.readouterr()

    return run


def to(target: str, source_file: str, target_file: str) -> tuple[str, ...]:
    return "--from", "paddle" if target == "torch" else "torch", "--to", target, source_file, target_file


def bits(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """A state_dict of any bits that are a finite number; batches are counted as on the way back from PaddlePaddle."""
    rng, arrays = np.random.default_rng(0), {}
    for key, tensor in model.state_dict().items():
        drawn = rng.integers(0, 2**32, tuple(tensor.shape), np.uint32).view(np.float32)
        arrays[key] = np.where(np.isfinite(drawn), drawn, np.float32(-0.0))
        if key.endswith("num_batches_tracked"):
            arrays[key] = np.zeros((), np.int64)
    return arrays


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for key, array in expected.items():
        assert (got[key].dtype, got[key].shape, got[key].tobytes()) == (array.dtype, array.shape, array.tobytes()), key


@pytest.mark.parametrize("there", ["b.pdparams", "b.safetensors"])
@pytest.mark.parametrize("port", ["Port", f"Port{OTHER}"], ids=["same names", "other names"])
def test_there_and_back_no_bit_is_lost(run, pair, there, port):
    arrays = bits(pair.Ref())
    torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, "a.pth")
    code, out, err = run(*to("paddle", "a.pth", there), *INPUT, port=port)
    assert code == 0, err
    *_, last = out.splitlines()
    assert last == f"wrote {there}: 10 tensors"  # without the count of batches
    assert [line.split() for line in out.splitlines() if "Linear" in line and "weight" in line] == [
        ["2", "Linear", "weight", "weight", "transposed"]
    ]
    how = "by name" if port == "Port" else "by order, type and shape, confirmed by values everywhere"
    assert f"map: 10 tensors, {how}\n" in out
    middle = load_pdparams(there) if there.endswith(".pdparams") else load_safetensors(there)
    prefix = "last" if port == "Port" else "d"
    assert middle[f"{prefix}.weight"].tobytes() == arrays["last.weight"].T.tobytes()
    assert middle[f"{'norm' if port == 'Port' else 'b'}._variance"].tobytes() == arrays["norm.running_var"].tobytes()
    assert run(*to("torch", there, "c.pth"), *INPUT, port=port)[0] == 0
    assert_same_bits({key: tensor.numpy() for key, tensor in torch.load("c.pth", weights_only=True).items()}, arrays)


def test_the_file_is_what_the_framework_loads(run, pair):
    """PaddlePaddle's own loader takes it, and the port computes what the reference does."""
    ref, port = pair.Ref().eval(), pair.Port(("a", "b", "c", "d"))
    torch.save(ref.state_dict(), "a.pth")
    assert run(*to("paddle", "a.pth", "b.pdparams"), *INPUT, port=f"Port{OTHER}")[0] == 0
    assert port.set_state_dict(paddle.load("b.pdparams")) == ([], [])
    port.eval()
    images = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    with torch.no_grad():
        expected = ref(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(port(paddle.to_tensor(images)).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_map_settles_what_values_do_not(run, pair):
    rng = np.random.default_rng(0)
    arrays = {key: rng.normal(size=tuple(t.shape)).astype(np.float32) for key, t in pair.Sum().state_dict().items()}
    save_safetensors(arrays, "a.safetensors")
    sides = {"ref": "Sum", "port": "PortSum"}
    flags = (*to("paddle", "a.safetensors", "b.safetensors"), "--input", "4,5")
    code, _, err = run(*flags, **sides)
    assert code == 2 and "the map of names is not certain (a and b may be the port's u and v" in err
    assert not Path("b.safetensors").exists()
    for text, port_name in (("a: u\n", "u"), ("a: v\n", "v"), ("a: v\nb: u\n", "v")):
        Path("map.yaml").write_text(text, encoding="utf-8")
        code, _, err = run(*flags, "--map", "map.yaml", **sides)
        assert code == 0, err
        assert load_safetensors("b.safetensors")[f"{port_name}.bias"].tobytes() == arrays["a.bias"].tobytes()


def test_a_tensor_that_a_model_uses_twice_is_under_both_names(run, pair):
    arrays = bits(pair.Ref(tied=True))
    arrays["again.weight"] = arrays["last.weight"]
    sides = {"ref": "Ref(tied=True)", "port": "Port(tied=True)"}
    save_safetensors(arrays, "a.safetensors")
    assert run(*to("paddle", "a.safetensors", "b.pdparams"), **sides)[0] == 0
    converted = load_pdparams("b.pdparams")
    assert converted.keys() == pair.Port(tied=True).state_dict().keys()
    assert (
        converted["again.weight"].tobytes() == converted["last.weight"].tobytes() == arrays["last.weight"].T.tobytes()
    )
    assert run(*to("torch", "b.pdparams", "c.safetensors"), **sides)[0] == 0
    assert_same_bits(load_safetensors("c.safetensors"), arrays)
    arrays["again.weight"] = arrays["last.weight"] + 1
    save_safetensors(arrays, "a.safetensors")
    code, _, err = run(*to("paddle", "a.safetensors", "d.pdparams"), **sides)
    assert code == 2 and "have two values for again.weight" in err and not Path("d.pdparams").exists()


def test_every_kind_of_layer_goes_there_and_back():
    ref = torch.nn.Sequential(
        torch.nn.Conv1d(2, 4, 3), torch.nn.ConvTranspose2d(4, 3, 2), torch.nn.BatchNorm3d(3), torch.nn.GroupNorm(2, 4),
        torch.nn.LayerNorm((2, 3)), torch.nn.Embedding(5, 4), torch.nn.LSTM(4, 3), torch.nn.PReLU(3),
        torch.nn.InstanceNorm2d(3, affine=True),
    )  # fmt: skip
    port = paddle.nn.Sequential(
        paddle.nn.Conv1D(2, 4, 3), paddle.nn.Conv2DTranspose(4, 3, 2), paddle.nn.BatchNorm3D(3),
        paddle.nn.GroupNorm(2, 4), paddle.nn.LayerNorm([2, 3]), paddle.nn.Embedding(5, 4), paddle.nn.LSTM(4, 3),
        paddle.nn.PReLU(3), paddle.nn.InstanceNorm2D(3),
    )  # fmt: skip
    arrays = bits(ref)
    there = convert_state_dict(arrays, ref, port)
    assert there.keys() == port.state_dict().keys()
    assert_same_bits(convert_state_dict(there, port, ref), arrays)
    before = backend("torch").state_arrays(ref)
    convert_state_dict(arrays, ref, port)
    assert_same_bits(backend("torch").state_arrays(ref), before)  # the models are as they were


def change(key: str, value: object) -> Callable[[dict], None]:
    return lambda arrays: arrays.__setitem__(key, value)


REFUSED = {
    "missing": (lambda arrays: arrays.pop("last.bias"), "weights a.safetensors do not fit this model, 1 missing"),
    "unexpected": (change("more", np.zeros(1, np.float32)), "1 unexpected (first: more)"),
    "shape": (change("last.bias", np.zeros(7, np.float32)), "1 of another shape (first: last.bias (7,) for (6,))"),
    "dtype": (change("last.bias", np.zeros(6)), "1 of another dtype (first: last.bias float64 for float32)"),
    "NaN": (change("last.bias", np.full(6, np.nan, np.float32)), "hold NaN or Inf in last.bias"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_that_do_not_fit_are_refused_and_the_old_file_stays(run, pair, kind):
    alter, message = REFUSED[kind]
    arrays = bits(pair.Ref())
    alter(arrays)
    save_safetensors(arrays, "a.safetensors")
    Path("old.pdparams").write_bytes(b"old")
    code, out, err = run(*to("paddle", "a.safetensors", "old.pdparams"))
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
    assert Path("old.pdparams").read_bytes() == b"old"


FILES = ("a.safetensors", "b.pdparams")
OTHER_TENSORS = "the two models do not have the same tensors"
MISTAKES = {
    "another size": ({"port": "Port(classes=7)"}, FILES, f"{OTHER_TENSORS}: last.weight: shape"),
    "a layer more": ({"port": "Port(tied=True)"}, FILES, OTHER_TENSORS),
    "the sides exchanged": ({"ref": "Port", "port": "Ref"}, FILES, "the reference is a Port, no torch"),
    "one framework": ({}, (*FILES, "--to", "torch"), "--from and --to are both torch"),
    "a suffix": ({}, ("a.safetensors", "b.pth"), "b.pth does not end as paddle's weights do, .pdparams, .safetensors"),
    "no such file": ({}, ("none.pth", "b.pdparams"), "weights none.pth does not exist"),
    "the input itself": ({}, ("a.safetensors", "a.safetensors"), "output a.safetensors is the input"),
    "a hash": ({}, ("a.safetensors", "b-047dcff4.pdparams"), "choose a name without -047dcff4"),
    "a map of what is not there": ({}, (*FILES, "--map", "map.yaml"), "has no module with weights of that name"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(run, pair, kind):
    sides, words, message = MISTAKES[kind]
    save_safetensors(bits(pair.Ref()), "a.safetensors")
    Path("map.yaml").write_text("first: nothing\n", encoding="utf-8")
    before = sorted(Path().iterdir())
    code, out, err = run("--from", "torch", "--to", "paddle", *INPUT, *words, **sides)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert sorted(Path().iterdir()) == before


def test_tensors_without_a_mate_are_named(pair):
    ref, port = pair.Ref(), pair.Port()
    names, _ = key_map(ref, port, [])
    names.pop("last.bias")
    with pytest.raises(UserError, match=r"the other model has nothing for last\.bias"):
        convert_state_dict(bits(ref), ref, port, names)
    with pytest.raises(UserError, match="a list is no model"):
        convert_state_dict({}, [], port)
    more = pair.Port(tied=True)
    with pytest.raises(UserError, match=r"converted weights do not fit this model, 1 missing \(first: again\.bias\)"):
        convert_state_dict(bits(ref), ref, more)
