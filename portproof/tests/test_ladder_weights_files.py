"""`ladder.weights_file`: loaders of a small pair whose tensors have other names on the two sides."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

from portproof.compare import FAIL, PASS
from portproof.ladder.rungs.weights_files import _unlike, weights_file
from portproof.python39 import zip_strict
from sturdyio.cli import UserError

WIDTH = 5
NAMES = {"fc": "first", "norm": "bn"}


class Ref(torch.nn.Module):
    def __init__(self, tied: bool = False):
        super().__init__()
        self.fc, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0))
        if tied:
            self.again = self.fc


class Port(paddle.nn.Layer):
    def __init__(self, tied: bool = False):
        super().__init__()
        self.first, self.bn = paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.BatchNorm1D(WIDTH)
        self.register_buffer("mask", paddle.ones([WIDTH], dtype="bool"))
        self.register_buffer("none", paddle.zeros([0]))
        if tied:
            self.again = self.first


def load_ref(model, path):
    model.load_state_dict(torch.load(path, weights_only=True))


def load_port(model, path):
    model.set_state_dict(paddle.load(str(path)))


def loads_nothing(model, path):
    pass


def loads_once(model, path):
    known = vars(loads_once).setdefault("known", {})
    if not known:
        known.update(paddle.load(str(path)))
    model.set_state_dict(known)


def skips_a_key(model, path):
    state = paddle.load(str(path))
    del state["bn._variance"]
    model.set_state_dict(state)


def renames_all(model, path):
    model.set_state_dict({f"module.{key}": value for key, value in paddle.load(str(path)).items()})


def transposes(model, path):
    state = paddle.load(str(path))
    model.set_state_dict({**state, "first.weight": state["first.weight"].T})


def keeps_the_mask(model, path):
    state = paddle.load(str(path))
    model.set_state_dict({**state, "mask": model.mask.clone()})


def raises(model, path):
    raise RuntimeError("no such file format")


def convert(path, port_path, transposed=True):
    state = torch.load(path, weights_only=True)
    found = {"mask": state["mask"], "none": state["none"], "bn.weight": state["norm.weight"]}
    found |= {"bn.bias": state["norm.bias"], "first.bias": state["fc.bias"]}
    found |= {"bn._mean": state["norm.running_mean"], "bn._variance": state["norm.running_var"]}
    found["first.weight"] = state["fc.weight"].T if transposed else state["fc.weight"]
    paddle.save({key: paddle.to_tensor(tensor.numpy()) for key, tensor in found.items()}, str(port_path))


def failed(verdict) -> set[str]:
    return {row.name for row in verdict.rows if row.status == FAIL}


@pytest.mark.parametrize("tied", [False, True])
def test_loaders_without_a_fault_pass(tied):
    verdict = weights_file(Ref(tied), Port(tied), load_ref, load_port)
    assert verdict.status == PASS, str(verdict)
    names = [key for key in Port(tied).state_dict() if key != "none"]
    assert [row.name for row in verdict.rows] == [f"file {i}/weights/{name}" for i in (1, 2) for name in names]
    assert {row.atol for row in verdict.rows} == {0.0}


@pytest.mark.parametrize(
    ("load", "names"),
    [
        (loads_nothing, {"first.weight", "first.bias", "bn.weight", "bn.bias", "bn._mean", "bn._variance", "mask"}),
        (renames_all, {"first.weight", "first.bias", "bn.weight", "bn.bias", "bn._mean", "bn._variance", "mask"}),
        (skips_a_key, {"bn._variance"}),
        (transposes, {"first.weight"}),
        (keeps_the_mask, {"mask"}),
    ],
)
def test_a_loader_with_a_fault_fails_at_what_it_leaves(load, names):
    verdict = weights_file(Ref(), Port(), load_ref, load)
    assert verdict.status == FAIL
    assert failed(verdict) == {f"file {i}/weights/{name}" for i in (1, 2) for name in names}


def test_a_loader_that_keeps_what_it_read_first_fails_at_the_second_file():
    verdict = weights_file(Ref(), Port(), load_ref, loads_once)
    assert verdict.status == FAIL
    assert {name.partition("/")[0] for name in failed(verdict)} == {"file 2"}
    assert len(failed(verdict)) == 7


def test_a_loader_that_raises_fails():
    verdict = weights_file(Ref(), Port(), load_ref, raises)
    assert verdict.status == FAIL and "no such file format" in str(verdict)


def test_a_loader_may_return_a_model_of_its_own():
    def build(model, path, load=load_port):
        model = Port()
        load(model, path)
        return model

    assert weights_file(Ref(), Port(), load_ref, build).status == PASS
    verdict = weights_file(Ref(), Port(), load_ref, lambda model, path: build(model, path, skips_a_key))
    assert failed(verdict) == {"file 1/weights/bn._variance", "file 2/weights/bn._variance"}


def test_the_models_that_are_given_stay_as_they_are():
    ref, port = Ref(), Port()
    before = [ref.fc.weight.detach().numpy().copy(), port.first.weight.numpy()]
    weights_file(ref, port, load_ref, load_port)
    for array, now in zip_strict(before, [ref.fc.weight.detach().numpy(), port.first.weight.numpy()]):
        np.testing.assert_array_equal(array, now)


def test_files_of_other_kinds_and_what_is_in_them():
    """All differs from all that was there before, and variances are positive."""
    ref, port, written = Ref(), Port(), []

    def write(path, arrays):
        written.append(arrays)
        np.savez(path.with_suffix(".npz"), **arrays)
        return path.with_suffix(".npz")

    def load_ref(model, path):
        model.load_state_dict({key: torch.from_numpy(array) for key, array in np.load(path).items()})

    def load_port(model, path):
        model.set_state_dict(dict(np.load(path)))

    verdict = weights_file(ref, port, load_ref, load_port, write_ref=write, write_port=write)
    assert verdict.status == PASS, str(verdict)
    (ref_1, port_1, ref_2, port_2), start = written, {key: t.numpy() for key, t in ref.state_dict().items()}
    for states in ((start, ref_1, ref_2), ({key: t.numpy() for key, t in port.state_dict().items()}, port_1, port_2)):
        for key in set(states[0]) - {"none"}:
            old, first, second = (state[key] for state in states)
            equal = np.all if key == "mask" else np.any
            assert not any(equal(a == b) for a, b in ((old, first), (old, second), (first, second))), key
    assert (ref_1["norm.running_var"] > 0).all() and (port_2["bn._variance"] > 0).all()
    weights_file(ref, port, load_ref, load_port, write_ref=write, write_port=write, seed=1)
    assert not (written[4]["fc.weight"] == ref_1["fc.weight"]).any()


def test_what_was_there_before_is_not_drawn_again():
    earlier = [np.array(number) for number in range(99)]
    assert _unlike(earlier, np.random.default_rng(0)) == 99


def test_a_single_boolean_is_turned_each_time():
    ref, port, seen = Ref(), Port(), []
    for model, flag in ((ref, torch.tensor(True)), (port, paddle.to_tensor([True]))):
        model.register_buffer("flag", flag)

    def load(model, path):
        load_port(model, path)
        seen.append(bool(model.flag))

    assert weights_file(ref, port, load_ref, load).status == PASS
    assert seen == [False, True]


def test_a_converted_file_is_loaded_too():
    verdict = weights_file(Ref(), Port(), load_ref, load_port, convert=convert, names=NAMES)
    assert verdict.status == PASS, str(verdict)
    converted = {row.item.name for row in verdict.rows if row.item.section == "converted"}
    assert converted == set(Ref().state_dict()) - {"none", "norm.num_batches_tracked"}
    verdict = weights_file(
        Ref(), Port(), load_ref, load_port, convert=lambda *paths: convert(*paths, transposed=False), names=NAMES
    )
    assert failed(verdict) == {"converted/weights/fc.weight"}
    verdict = weights_file(Ref(), Port(), load_ref, load_port, convert=raises, names=NAMES)
    assert verdict.status == FAIL and "no such file format" in str(verdict)


# Users' mistakes


@pytest.mark.parametrize("load", [loads_nothing, raises])
def test_a_reference_that_does_not_load_is_refused(load):
    with pytest.raises(UserError, match="the reference's loading function"):
        weights_file(Ref(), Port(), load, load_port)


def test_what_is_no_model_is_refused():
    with pytest.raises(UserError, match="the port is a Ref, no paddle.nn.Layer"):
        weights_file(Ref(), Ref(), load_ref, load_port)
