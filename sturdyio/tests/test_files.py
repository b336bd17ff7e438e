"""Either the whole file appears or none, and reading one never runs what hides in it."""

import codecs
import copyreg
import io
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from importlib import import_module
from pathlib import Path

import numpy as np
import paddle
import pytest
import safetensors.numpy
import torch
from numpy.lib import format as npy_format
from reprod_log import ReprodLogger

from sturdyio import files, pth
from sturdyio.cli import UserError
from sturdyio.files import atomic_path, load_npy, load_npz, load_pdparams, load_safetensors, save_safetensors
from sturdyio.pth import load_pth

STAND_INS = pth._Unpickler.stand_ins

ARRAYS = {
    "float32": np.array([[1.5, -0.0, np.nan], [np.inf, 1e-45, 3.0]], np.float32),
    "transposed": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "float16": np.array([0.1, 65504], np.float16),
    "int64": np.array([-(2**63), 2**63 - 1]),
    "uint8": np.arange(256, dtype=np.uint8),
    "bool": np.array([[True], [False]]),
    "scalar": np.array(7.25, np.float32),
    "none": np.zeros((0, 3), np.float32),
}


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    assert got.flags.writeable


def refusal(load, path: Path) -> str:
    """The message with which `load` refuses `path`: one printable line that names it."""
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.isprintable()
    assert len(message) < 500
    return message


def write_npy(path: Path, pickled: bytes) -> Path:
    """An .npy file of one object, for which the reader is to use `pickled`."""
    with path.open("wb") as stream:
        npy_format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": ()})
        stream.write(pickled)
    return path


def write_zip(path: Path, contents: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def legacy_pth(pickled: bytes, memory: bytes = b"") -> bytes:
    """A file of torch.save's old form with this content, and with what may lie behind it."""
    head = [pickle.dumps(value, 2) for value in (pth.MAGIC, pth.VERSION, {"little_endian": True})]
    return b"".join(head) + pickled + memory


# --- round trips


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_paddle_state_dicts_come_back_bit_for_bit(tmp_path, protocol):
    paddle.seed(0)
    net = paddle.nn.Sequential(paddle.nn.Conv2D(3, 4, 3), paddle.nn.BatchNorm2D(4))
    schedule = paddle.optimizer.lr.StepDecay(0.1, step_size=2)
    optimizer = paddle.optimizer.Momentum(schedule, parameters=net.parameters())
    net(paddle.randn([2, 3, 8, 8])).mean().backward()
    optimizer.step()
    schedule.step()
    model, state = net.state_dict(), optimizer.state_dict()
    checkpoint = {
        "epoch": 3,
        "model": model,
        "optimizer": state,
        "best": np.float64(0.1),
        "flags": OrderedDict(lr=0.1, sizes=[224, (1, 2.5)], resume=None, ema=True),
        "bfloat16": paddle.to_tensor([1.5], dtype="bfloat16"),
        "pair": ("name", np.arange(2)),
        **ARRAYS,
    }
    for name, saved in {"model": model, "optimizer": state, "checkpoint": checkpoint}.items():
        paddle.save(saved, str(tmp_path / name), protocol=protocol)

    loaded = load_pdparams(tmp_path / "model")
    assert list(loaded) == list(model)
    for name, tensor in model.items():
        assert_same_bits(loaded[name], tensor.numpy())

    loaded = load_pdparams(tmp_path / "optimizer")
    assert list(loaded) == list(state)
    assert loaded.pop("LR_Scheduler") == state["LR_Scheduler"] == {"last_epoch": 1, "last_lr": 0.1}
    for name, array in loaded.items():
        assert_same_bits(array, state[name].numpy())

    loaded = load_pdparams(tmp_path / "checkpoint")
    assert list(loaded) == list(checkpoint)
    assert loaded["epoch"] == 3
    assert list(loaded["model"]) == list(model)
    for name, tensor in model.items():
        assert_same_bits(loaded["model"][name], tensor.numpy())
    assert loaded["best"] == 0.1
    assert type(loaded["best"]) is np.float64
    assert loaded["flags"] == {"lr": 0.1, "sizes": [224, (1, 2.5)], "resume": None, "ema": True}
    assert_same_bits(loaded["bfloat16"], np.array([0x3FC0], np.uint16))  # NumPy has no bfloat16: its bits
    assert loaded["pair"][0] == "name"  # a tuple of our own stays one; only Paddle's tensors are unwrapped
    assert_same_bits(loaded["pair"][1], np.arange(2))
    for name, array in ARRAYS.items():
        assert_same_bits(loaded[name], array)


def test_loaded_weights_are_what_paddle_itself_loads(tmp_path):
    net = paddle.nn.Linear(3, 2)
    paddle.save(net.state_dict(), str(tmp_path / "net.pdparams"))
    theirs = paddle.load(str(tmp_path / "net.pdparams"), return_numpy=True)
    ours = load_pdparams(tmp_path / "net.pdparams")
    assert list(ours) == list(theirs)
    for name, array in theirs.items():
        assert_same_bits(ours[name], array)


PTH_FORMS = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
}


@pytest.mark.parametrize("form", [*PTH_FORMS, "zip without sums"])
def test_torch_files_come_back_bit_for_bit(tmp_path, form):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 4))
    net[2].weight = torch.nn.Parameter(net[0].weight.detach()[:, 0, 0, :1].expand(4, 4))  # of 4 numbers in memory
    optimizer = torch.optim.Adam(net.parameters())
    memory = torch.arange(24.0)
    numpy_types = [torch.from_numpy(array.copy()) for array in ARRAYS.values()]
    content = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameter": net[0].weight,
        "views": [memory[3:9].reshape(2, 3).T, memory[::5], memory],
        "types": [*numpy_types, torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.uint16), 1j * memory],
        "plain": {"lr": 0.1, "betas": (0.9, 1), "resume": None, "ema": True, "steps": Counter([3, 5, 5])},
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "best": np.float64(0.5),  # which torch.load refuses
    }
    options = torch.serialization.set_crc32_options, torch.serialization.get_crc32_options()
    try:
        options[0](form != "zip without sums")
        torch.save(content, tmp_path / "a.pth", **PTH_FORMS.get(form, {}))
    finally:
        options[0](options[1])
    loaded = load_pth(tmp_path / "a.pth")

    def assert_same(got, expected) -> None:
        if isinstance(expected, dict):
            assert list(got) == list(expected)
            for key, value in expected.items():
                assert_same(got[key], value)
        elif isinstance(expected, torch.Tensor):
            layout = (expected.dtype, expected.shape, expected.stride())
            assert (got.dtype, got.shape, got.stride()) == layout
            raw = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (got, expected)]
            assert torch.equal(*raw)
        elif isinstance(expected, list):
            assert len(got) == len(expected)
            for pair in zip(got, expected):
                assert_same(*pair)
        else:
            assert got == (str(expected) if isinstance(expected, torch.device) else expected)

    assert_same(loaded, content)
    loaded["views"][2][:] = -1
    assert loaded["views"][0][0, 0] == loaded["views"][1][1] == -1  # the three share memory, as they did


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("package", [b"numpy.core.", b"numpy._core."])
def test_every_pickle_protocol_and_both_numpy_names(tmp_path, protocol, package):
    pickled = pickle.dumps({**ARRAYS, "big endian": np.arange(3, dtype=">i4")}, protocol)
    for module in (b"multiarray", b"numeric"):  # a name's length stands before it from protocol 4 on
        for written in (b"numpy.core.", b"numpy._core."):
            old, new = written + module, package + module
            pickled = pickled.replace(bytes([len(old)]) + old, bytes([len(new)]) + new)
            pickled = pickled.replace(b"c" + old + b"\n", b"c" + new + b"\n")
    if protocol >= 4:  # frames of another length than they say: leave them out
        pickled = pickled[:2] + pickled[11:]
    (tmp_path / "file").write_bytes(pickled)
    loaded = load_pdparams(tmp_path / "file")
    for name, array in ARRAYS.items():
        assert_same_bits(loaded[name], array)
    assert loaded["big endian"].tolist() == [0, 1, 2]


def test_reprod_log_records_come_back_bit_for_bit(tmp_path):
    logger = ReprodLogger()
    for name, array in ARRAYS.items():
        logger.add(name, array)
    logger.save(str(tmp_path / "record.npy"))
    loaded = load_npy(tmp_path / "record.npy")
    assert list(loaded) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert_same_bits(loaded[name], array)


def test_numbers_of_a_record_are_arrays(tmp_path):
    np.save(tmp_path / "record.npy", {"loss": 0.1, "step": 3, "done": True, "top1": np.float32(0.5)}, allow_pickle=True)
    loaded = load_npy(tmp_path / "record.npy")
    expected = {"loss": np.array(0.1), "step": np.array(3), "done": np.array(True), "top1": np.array(0.5, np.float32)}
    for name, array in expected.items():
        assert_same_bits(loaded[name], array)


@pytest.mark.parametrize("name", ARRAYS)
def test_plain_npy_arrays_come_back_bit_for_bit(tmp_path, name):
    np.save(tmp_path / "array.npy", ARRAYS[name])
    loaded = load_npy(tmp_path / "array.npy")
    assert list(loaded) == ["data"]
    assert_same_bits(loaded["data"], ARRAYS[name])


def test_safetensors_come_back_bit_for_bit(tmp_path):
    save_safetensors(ARRAYS, tmp_path / "new folder" / "weights.safetensors")
    for load in (load_safetensors, safetensors.numpy.load_file):
        loaded = load(tmp_path / "new folder" / "weights.safetensors")
        assert loaded.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert_same_bits(loaded[name], array)


# --- files that want to run something


class Call:
    """Pickles as a call of `function`, made while the pickle is read."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced

    def __call__(self):
        """Lets a Call be the function of another one."""


class TouchesOnBuild:
    """Makes the file `canary` when a pickle sets its state."""

    def __init__(self, canary: str):
        self.canary = canary

    def __setstate__(self, state):
        Path(state["canary"]).touch()


class TouchingArray(np.ndarray):
    """An array type that makes a file when it gets its data."""

    def __setstate__(self, state):
        super().__setstate__(state[:-1])
        Path(state[-1]).touch()

    def __reduce__(self):
        function, arguments, state = super().__reduce__()
        return function, arguments, (*state, self.canary)


def touching_array(canary: str) -> TouchingArray:
    array = np.zeros(2).view(TouchingArray)
    array.canary = canary
    return array


def touching_codec(canary: str) -> Call:
    def encode(text: str) -> tuple[bytes, int]:
        Path(canary).touch()
        return b"", len(text)

    codec = Path(canary).parent.name.lower()  # found once, a codec stays: each test needs its own
    codecs.register(lambda name: codecs.CodecInfo(encode, None) if name == codec else None)
    return Call(codecs.encode, "text", codec)


def object_array(item) -> np.ndarray:
    array = np.empty(1, object)
    array[0] = item
    return array


ATTACKS = {
    "os.system": lambda canary: Call(os.system, f"touch '{canary}'"),
    "subprocess": lambda canary: Call(subprocess.call, ["touch", canary]),
    "eval": lambda canary: Call(eval, f"open({canary!r}, 'w').close()"),
    "exec": lambda canary: Call(exec, f"open({canary!r}, 'w').close()"),
    "open": lambda canary: Call(open, canary, "w"),
    "numpy function": lambda canary: Call(np.savetxt, canary, [0.0]),
    "numpy.memmap": lambda canary: Call(np.memmap, canary, "u1", "w+", 0, (1,)),
    "method by name": lambda canary: Call(Path.touch, Path(canary)),
    "getattr": lambda canary: Call(Call(getattr, Call(import_module, "os"), "mknod"), canary),
    "setstate": TouchesOnBuild,
    "subclass of ndarray": touching_array,
    "codec": touching_codec,
    "in an object array": lambda canary: object_array(Call(os.system, f"touch '{canary}'")),
    "among arrays": lambda canary: {**ARRAYS, "x": [(Call(os.system, f"touch '{canary}'"),)]},
    "as a key": lambda canary: {Call(os.system, f"touch '{canary}'"): 1},
}


@pytest.fixture
def canary(tmp_path):
    """A file that does not exist, and that every attack makes."""
    return tmp_path / "canary"


def assert_fires_only_in_pickle(pickled: bytes, canary: Path) -> list[str]:
    """`pickle.loads` runs what hides in `pickled`; each of our loaders refuses it and runs nothing."""
    pickle.loads(pickled)
    assert canary.exists()  # else the attack is no attack, and refusing it proves nothing
    canary.unlink()
    weights = canary.parent / "weights.pdparams"
    weights.write_bytes(pickled)
    record = write_npy(canary.parent / "record.npy", pickled)
    zipped = write_zip(canary.parent / "weights.pth", {"a/data.pkl": pickled})
    legacy = canary.parent / "legacy.pth"
    legacy.write_bytes(legacy_pth(pickled))
    loads = {weights: load_pdparams, record: load_npy, zipped: load_pth, legacy: load_pth}
    messages = [refusal(load, path) for path, load in loads.items()]
    assert not canary.exists()
    return messages


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_do_not_fire(canary, attack, protocol):
    for message in assert_fires_only_in_pickle(pickle.dumps(ATTACKS[attack](str(canary)), protocol), canary):
        assert "asks" in message


def test_attack_in_a_file_of_numpy_save_does_not_fire(canary):
    path = canary.parent / "record.npy"
    np.save(path, {"x": Call(os.system, f"touch '{canary}'")})
    assert "'posix.system'" in refusal(load_npy, path)
    assert not canary.exists()
    np.load(path, allow_pickle=True)
    assert canary.exists()


@pytest.mark.parametrize(
    "template",
    [b"(S'touch %s'\nios\nsystem\n.", b"(cos\nsystem\nS'touch %s'\no.", b"cos\nsystem\n(S'touch %s'\ntR."],
    ids=["INST", "OBJ", "GLOBAL"],
)
def test_old_operations_do_not_fire(canary, template):
    for message in assert_fires_only_in_pickle(template % os.fsencode(canary), canary):
        assert "'os.system'" in message or "the operation INST" in message


def test_cached_extension_does_not_fire(canary):
    pickled = b"\x80\x02\x82\xf0X%c\x00\x00\x00%s\x85R." % (len(str(canary)), os.fsencode(canary))
    copyreg.add_extension("os", "mknod", 0xF0)
    try:
        for message in assert_fires_only_in_pickle(pickled, canary):
            assert "the operation EXT1" in message
    finally:
        copyreg.remove_extension("os", "mknod", 0xF0)


@pytest.mark.parametrize("opcode", [b"Pid\n", b"K\x01Q", b"\x97"], ids=["PERSID", "BINPERSID", "NEXT_BUFFER"])
def test_references_outside_the_file_are_refused(tmp_path, opcode):
    (tmp_path / "file").write_bytes(opcode + b".")
    refusal(load_pdparams, tmp_path / "file")
    refusal(load_npy, write_npy(tmp_path / "record", opcode + b"."))


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("arguments", [b"", b")R", b")\x81"], ids=["itself", "called", "new"])
@pytest.mark.parametrize("state", [b"}U\x08__init__NsN\x86", b"N}U\x08__init__Ns\x86"], ids=["dict", "slots"])
def test_stand_ins_cannot_be_altered(tmp_path, name, arguments, state):
    before = {stand_in: dict(vars(stand_in)) for stand_in in STAND_INS.values()}
    module, _, attribute = name.rpartition(".")
    pickled = f"c{module}\n{attribute}\n".encode() + arguments + state + b"b."
    (tmp_path / "file").write_bytes(pickled)
    refusal(load_pdparams, tmp_path / "file")
    assert {stand_in: dict(vars(stand_in)) for stand_in in STAND_INS.values()} == before


# --- damaged, foreign and hostile files


def small_files(folder: Path) -> dict:
    """Loader by path, one real file for each kind."""
    arrays = {"weight": np.float32([[1, 2]]), "steps": np.array(3)}
    for protocol in (2, 4):
        paddle.save({**arrays, "LR": {"last": 0.1}}, str(folder / f"{protocol}.pdparams"), protocol=protocol)
    np.save(folder / "record.npy", arrays)
    np.save(folder / "plain.npy", arrays["weight"])
    save_safetensors(arrays, folder / "weights.safetensors")
    np.savez(folder / "stored.npz", **arrays)
    np.savez_compressed(folder / "deflated.npz", **arrays)
    for name, form in PTH_FORMS.items():
        torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, folder / f"{name}.pth", **form)
    loaders = {
        ".pdparams": load_pdparams,
        ".npy": load_npy,
        ".npz": load_npz,
        ".safetensors": load_safetensors,
        ".pth": load_pth,
    }
    return {path: loaders[path.suffix] for path in sorted(folder.iterdir())}


def test_truncated_files_are_refused_wherever_they_end(tmp_path):
    for path, load in small_files(tmp_path).items():
        load(path)
        for length in reversed(range(path.stat().st_size)):
            os.truncate(path, length)
            refusal(load, path)


def test_flipped_bytes_give_a_result_or_a_refusal(tmp_path):
    rng = random.Random(0)
    for path, load in small_files(tmp_path).items():
        whole, refused = path.read_bytes(), 0
        for _ in range(300):
            damaged = bytearray(whole)
            for position in rng.sample(range(len(whole)), rng.randint(1, 3)):
                damaged[position] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                load(path)
            except UserError as error:
                assert str(error).isprintable()
                refused += 1
        assert refused > 30


def test_a_refusal_is_all_that_is_said(tmp_path, recwarn):
    with (tmp_path / "x.npy").open("wb") as stream:
        np.save(stream, ARRAYS["uint8"])
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole.replace(b"(256,)", b"(1if,)"))  # Python warns of such a number
    refusal(load_npy, tmp_path / "x.npy")
    assert not recwarn.list


@pytest.mark.parametrize("load", [load_pdparams, load_npy, load_safetensors])
def test_foreign_files_are_refused(tmp_path, load):
    foreign = {
        "page.html": b"<!DOCTYPE html>\n<html><title>404 Not Found</title></html>\n",
        "weights.pth": b"PK\x03\x04" + bytes(200),
        "noise": random.Random(0).randbytes(4096),
        "zeros": bytes(4096),
        "text": b"weights\n" * 100,
    }
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
        assert "fetch or write it again" in refusal(load, tmp_path / name)
    (tmp_path / "empty").touch()
    assert "is empty" in refusal(load, tmp_path / "empty")
    assert "does not exist" in refusal(load, tmp_path / "missing")
    assert "is a folder" in refusal(load, tmp_path)


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x")

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "Permission denied" in refusal(load_npy, tmp_path / "file")


def test_a_message_that_quotes_the_file_cannot_steer_the_terminal(tmp_path):
    (tmp_path / "file").write_bytes(b"cnumpy\ndtype\n(V3,\x1b[31m\ntR.")
    assert r"3,\x1b[31m" in refusal(load_pdparams, tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        np.arange(3),
        {1: np.arange(3)},
        {"x": {1, 2}},
        {"x": b"bytes"},
        {"x": object_array({"y": 1})},
        {"x": np.array(["text"])},
        {"x": np.zeros(1, [("field", "f4")])},
        {"x": np.array(["2024-01-01"], "datetime64[D]")},
        {"x": {("a", "tuple"): 1}},
    ],
    ids=str,
)
def test_pdparams_of_anything_but_plain_values_by_name_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(pickle.dumps(content, 4))
    refusal(load_pdparams, tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [
        {"x": "1.0"},
        {"x": 2**70},
        {"x": [np.zeros(2)]},
        {1: np.zeros(2)},
        {"x": object_array(1)},
        object_array({"x": np.zeros(2)}),
        np.array(["text"]),
        np.zeros(1, [("field", "f4")]),
        [1, None],
    ],
    ids=str,
)
def test_npy_of_anything_but_arrays_by_name_is_refused(tmp_path, content):
    np.save(tmp_path / "file.npy", content)
    refusal(load_npy, tmp_path / "file.npy")


def test_file_of_types_numpy_does_not_have_is_refused(tmp_path):
    header = b'{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    (tmp_path / "file").write_bytes(safetensors_of(header, b"\x80\x3f"))
    assert "BF16" in refusal(load_safetensors, tmp_path / "file")


def safetensors_of(header: bytes, content: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + content


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_comes_twice_is_refused(tmp_path):
    """Readers keep one of the two, and do not agree on which."""
    path = tmp_path / "file"
    floats, integers = (b'"x":{"dtype":"%s","shape":[1],"data_offsets":[0,4]}' % dtype for dtype in (b"F32", b"I32"))
    path.write_bytes(safetensors_of(b"{%s,%s}" % (floats, integers), bytes(4)))
    assert "it holds 'x' twice" in refusal(load_safetensors, path)
    path.write_bytes(safetensors_of(b'{%s,"__metadata__":{"a":"1","a":"2"}}' % floats, bytes(4)))
    assert "it holds 'a' twice" in refusal(load_safetensors, path)
    for names, twice in ((("x.npy", "x.npy"), "x.npy"), (("x.npy", "x"), "x")):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, plain_npy((2,)))
        assert f"it holds {twice!r} twice" in refusal(load_npz, path)


def plain_npy(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    npy_format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return stream.getvalue() + bytes(16)


def torch_pickle(numel: int, size: tuple[int, ...], stride: tuple[int, ...], copies: int = 1) -> bytes:
    """The pickle of a dict of so many copies of a tensor, which lies in memory "0" of so many float32."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"I%d\n" % value for value in values) + b"t"

    memory = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI%d\ntQ" % numel
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + memory + b"I0\n" + numbers(size) + numbers(stride) + b"I00\nNtR"
    items = b"".join(b"I%d\nh\x01" % number for number in range(copies))
    return b"\x80\x02}(I-1\n" + tensor + b"q\x01" + items + b"u."


def zip_bytes(contents: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    write_zip(stream, contents, method)
    return stream.getvalue()


def lying_zip(content: bytes, size: int) -> bytes:
    """A deflated archive of this content whose directory says that it is of that size."""
    made = zip_bytes({"a/data.pkl": content}, zipfile.ZIP_DEFLATED)
    return made.replace(len(content).to_bytes(4, "little"), size.to_bytes(4, "little"))


LARGE = 2**29  # bytes: more than any small file may claim
ZEROS = plain_npy((2**21,)) + bytes(2**24)
MEMORY = {"a/data/0": bytes(4)}

BOMBS = {  # each claims 256 MB or more, so that a reader who believes it is found out and survives
    "npy shape": (load_npy, plain_npy((2**25,))),
    "npy huge shape": (load_npy, plain_npy((2**62, 2**62))),
    "npy negative shape": (load_npy, plain_npy((-1, -(2**25)))),
    "npy shape of as many as there are": (load_npy, plain_npy((-1,))),
    "memo number": (load_pdparams, b"\x80\x02]r" + (2**24).to_bytes(4, "little") + b"."),
    "memo number in text": (load_pdparams, b"]p%d\n." % 2**24),
    "bytes": (load_pdparams, b"\x80\x03B" + (2**28).to_bytes(4, "little") + b"x."),
    "bytes8": (load_pdparams, b"\x80\x04\x8e" + (2**28).to_bytes(8, "little") + b"x."),
    "bytearray8": (load_pdparams, b"\x80\x05\x96" + (2**28).to_bytes(8, "little") + b"x."),
    "text": (load_pdparams, b"\x80\x02X" + (2**28).to_bytes(4, "little") + b"x."),
    "bytes call": (load_pdparams, b"c__builtin__\nbytes\n(I%d\ntR." % 2**28),
    "array call": (load_pdparams, b"cnumpy\nndarray\n((I%d\nttR." % 2**28),
    "header": (load_safetensors, (2**28).to_bytes(8, "little") + b"{}"),
    "npz deflated": (load_npz, lying_zip(plain_npy((LARGE // 8,)), LARGE)),
    "npz of bzip2": (load_npz, zip_bytes({"x.npy": ZEROS}, zipfile.ZIP_BZIP2)),
    "npz that lies": (load_npz, lying_zip(ZEROS, 144)),
    "npz shape": (load_npz, zip_bytes({"x.npy": plain_npy((2**25,))})),
    "pth deflated": (load_pth, lying_zip(torch_pickle(1, (1,), (1,)), LARGE)),
    "pth memory": (load_pth, zip_bytes({"a/data.pkl": torch_pickle(LARGE, (1,), (1,)), **MEMORY})),
    "pth stride 0": (load_pth, zip_bytes({"a/data.pkl": torch_pickle(1, (LARGE,), (0,)), **MEMORY})),
    "pth huge shape": (load_pth, zip_bytes({"a/data.pkl": torch_pickle(1, (2**40, 2**40), (0, 0)), **MEMORY})),
    "pth beyond its memory": (load_pth, zip_bytes({"a/data.pkl": torch_pickle(1, (2, 2**20), (1, 1)), **MEMORY})),
    "pth copies": (load_pth, zip_bytes({"a/data.pkl": torch_pickle(1, (2**20,), (0,), 100), **MEMORY})),
    "pth bytearray": (load_pth, zip_bytes({"a/data.pkl": b"c__builtin__\nbytearray\n(I%d\ntR." % LARGE})),
    "pth tensor call": (load_pth, zip_bytes({"a/data.pkl": b"ctorch\nFloatTensor\n(I%d\ntR." % LARGE})),
    "legacy memory": (load_pth, legacy_pth(torch_pickle(LARGE, (1,), (1,)), pickle.dumps(["0"], 2) + bytes(12))),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_short_file_cannot_claim_much_memory(tmp_path, bomb):
    load, content = BOMBS[bomb]
    (tmp_path / "file").write_bytes(content)
    tracemalloc.start()
    try:
        refusal(load, tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 4 * len(content)
    finally:
        tracemalloc.stop()


def test_a_file_larger_than_the_memory_is_not_read(tmp_path, monkeypatch):
    """A sparse file of 128 GiB, on a machine of 16."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**22, "SC_PAGE_SIZE": 2**12}.__getitem__)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    with (tmp_path / "file").open("wb") as file:
        file.truncate(2**37)
    for load in (load_pdparams, load_npy, load_npz, load_safetensors, load_pth):
        assert f"has {2**37} bytes, more than this machine's memory" in refusal(load, tmp_path / "file")


def test_an_archive_that_is_what_it_says_cannot_claim_much_memory_either(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "most_memory", lambda size: 8 * size)  # else it would take seconds to write one
    (tmp_path / "file").write_bytes(zip_bytes({"x.npy": ZEROS}, zipfile.ZIP_DEFLATED))
    tracemalloc.start()
    try:
        assert f"it unpacks to {len(ZEROS)} bytes" in refusal(load_npz, tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def text(letters: bytes) -> bytes:
    return b"X" + len(letters).to_bytes(4, "little") + letters


def four(number: int) -> bytes:
    return number.to_bytes(4, "little")


def doubled(times: int) -> bytes:
    """A tuple of two of a tuple of two of ...: 2 ** times parts for who visits each."""
    return b"N" + b"".join(b"r" + four(n) + b"j" + four(n) + b"\x86" for n in range(times))


def called_often(function: bytes, argument: bytes, times: int) -> bytes:
    """A list of so many results of the same call."""
    kept = b"c" + function + b"\nr" + four(1000) + argument + b"\x85r" + four(1001) + b"00"
    return kept + b"](" + (b"j" + four(1000) + b"j" + four(1001) + b"R") * times + b"e"


def names(keys: list[bytes]) -> bytes:
    return b"}(" + b"".join(key + b"N" for key in keys) + b"u"


MANY = 60_000
WHOLE = [b"J" + four(n) for n in range(MANY)]
PAIRS = b"(" + b"".join(number + b"N\x86" for number in WHOLE) + b"l"
SAME_HASH = [b"\x8a\x20" + (n * (2**61 - 1) << 128).to_bytes(32, "little") for n in range(1, MANY)]
NAMELESS = b"r" + four(1) + b"(" + b"N" * MANY + b"tr" + four(2) + b"0" + b"h\x01h\x02R0" * 20_000
ENDLESS = {  # small files, of which each would take minutes or gigabytes
    "tuple as a key": b"}" + doubled(60) + b"Ns",
    "dtype of nested lists": b"cnumpy\ndtype\n" + doubled(60) + b"\x85R",
    "order of bytes": b"cnumpy\ndtype\n(" + text(b"f4") + b"tRN" + doubled(60) + b"\x86b",
    "codec": b"c_codecs\nencode\n" + text(b"a") + doubled(60) + b"\x86R",
    "shape": b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01" + doubled(60) + b"NNNtb",
    "pairs again and again": called_often(b"collections\nOrderedDict", PAIRS, 2000),
    "numbers that share a hash": names(SAME_HASH),
    "many arguments": b"cnumpy\nndarray\n" + NAMELESS,
    "empty dicts": b"(" + b"}" * 1_100_000 + b"l",
    "memo": b"(" + b"N\x94" * 1_100_000 + b"l",
}
ENDLESS_PTH = {
    "device": b"ctorch\ndevice\n" + doubled(60) + b"\x85R",
    "storage's name": b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + doubled(60) + text(b"cpu") + b"K\x01tQ",
    "counts again and again": called_often(b"collections\nCounter", names(WHOLE), 2000),
    "sizes again and again": called_often(b"torch\nSize", text(b"x" * MANY), 3000),
    "tensor's shape": b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00" + doubled(60) + doubled(60) + b"tR",
}


def endless_files(name: str, folder: Path) -> dict:
    """Loader by path, of every file that may hold that pickle."""
    value = {**ENDLESS, **ENDLESS_PTH}[name]
    pickled = b"\x80\x02}" + text(b"x") + value + b"s."
    loads = {write_zip(folder / "zip.pth", {"a/data.pkl": pickled}): load_pth}
    (folder / "legacy.pth").write_bytes(legacy_pth(pickled))
    loads[folder / "legacy.pth"] = load_pth
    if name in ENDLESS:
        (folder / "x.pdparams").write_bytes(pickled)
        loads |= {folder / "x.pdparams": load_pdparams, write_npy(folder / "x.npy", pickled): load_npy}
    return loads


@pytest.mark.parametrize("name", [*ENDLESS, *ENDLESS_PTH])
def test_a_small_pickle_that_never_ends_is_refused(tmp_path, name):
    def refused(load, path) -> None:
        memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (memory + 2**29, memory + 2**29))
        refusal(load, path)

    for path, load in endless_files(name, tmp_path).items():
        child = multiprocessing.get_context("fork").Process(target=refused, args=(load, path))
        child.start()
        child.join(20)
        child.kill()
        child.join()
        assert child.exitcode == 0, path.name


def test_deep_and_cyclic_pickles_are_refused(tmp_path):
    cycle = {}
    cycle["self"] = [cycle]
    deep = b"}X\x01\x00\x00\x00x" + b"]" * 100_000 + b"a" * 99_999 + b"s."
    for content in (pickle.dumps(cycle), deep):
        (tmp_path / "file").write_bytes(content)
        refusal(load_pdparams, tmp_path / "file")


def test_shared_parts_are_visited_once(tmp_path):
    shared = np.arange(2)
    for _ in range(18):  # 2 ** 18 visits, were each one followed
        shared = [shared, shared]
    (tmp_path / "file").write_bytes(pickle.dumps({"x": shared}))
    loaded = load_pdparams(tmp_path / "file")["x"]
    assert loaded[0] is loaded[1]


# --- writing


def leftovers(path: Path) -> list[Path]:
    return [other for other in path.parent.iterdir() if other != path]


def test_atomic_path_writes_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "new" / "folder" / "array.npy"
    with atomic_path(path) as temporary:
        assert temporary.parent == path.parent
        np.save(temporary, ARRAYS["float32"])  # would write to another name if the suffix were lost
        assert not path.exists()
    assert_same_bits(np.load(path), ARRAYS["float32"])
    assert leftovers(path) == []

    monkeypatch.chdir(tmp_path)
    with atomic_path("here.txt") as temporary:
        temporary.write_text("text")
    assert (tmp_path / "here.txt").read_text() == "text"


def test_atomic_path_has_the_bytes_on_disk_before_the_name(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "file.txt"
    with atomic_path(path) as temporary:
        temporary.write_text("text")
    assert synced == [(temporary, False), (tmp_path, True)]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), UserError("mine")], ids=repr)
def test_an_error_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(type(error)) as caught, atomic_path(path) as temporary:
        temporary.write_text("half")
        raise error
    assert caught.value is error
    assert path.read_text() == "old"
    assert leftovers(path) == []


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch, owner, name):
    path = tmp_path / "file.safetensors"
    save_safetensors({"x": np.zeros(2)}, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, full)
    assert "No space left on device" in refusal(lambda path: save_safetensors({"x": np.ones(2)}, path), path)
    assert load_safetensors(path)["x"].tolist() == [0, 0]
    assert leftovers(path) == []


def test_a_really_full_disk_is_one_line(tmp_path):
    def write(path):
        with atomic_path(path), Path("/dev/full").open("w") as stream:
            stream.write("text")

    assert "No space left on device" in refusal(write, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("/dev/null")

    def write(path):
        with atomic_path(path) as temporary:
            temporary.write_text("new")

    refusal(write, tmp_path / "file" / "below")
    assert "not a regular file" in refusal(write, tmp_path)
    assert "not a regular file" in refusal(write, tmp_path / "link")
    assert (tmp_path / "file").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_a_killed_process_keeps_the_old_file(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_safetensors(ARRAYS, path)
    script = (
        "import os, signal, sys\n"
        "from sturdyio.files import atomic_path\n"
        "with atomic_path(sys.argv[1]) as temporary:\n"
        "    temporary.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert load_safetensors(path).keys() == ARRAYS.keys()
    assert [other.read_bytes() for other in leftovers(path)] == [b"half"]  # it did die halfway


def test_neither_framework_is_imported():
    script = "import sys, sturdyio.pth, sturdyio.state_dict; sys.exit(bool({'torch', 'paddle'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
