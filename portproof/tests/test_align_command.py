"""`portproof align`, with and without --locate-only: what it says of any pair, its exit codes, and users' mistakes."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from safetensors.numpy import save_file
from toy_sources import PORT, PORT_SUM, REF, REF_SUM

import portproof
from portproof.backends.paddle_backend import ALWAYS_SAID
from portproof.commands import align
from portproof.compare import FAIL, Item, Row, Verdict
from portproof.io import process
from portproof.ladder.pairs.whole import AlignVerdict
from portproof.report.summary import SCHEMA
from sturdyio import cli

# Beside the toy pairs: what is no model, and losses.
PAIR = f"""
{REF}
{PORT}
{REF_SUM}
{PORT_SUM}

def broken():
    raise RuntimeError("no such size")


def loss(output, labels):
    return torch.nn.functional.cross_entropy(output, labels)


def port_loss(output, labels, scale=1.0):
    return scale * paddle.nn.functional.cross_entropy(output, labels)


class PortLoss:
    def __call__(self, output, labels):
        return port_loss(output, labels)
"""
ONLY = "--locate-only"
DEFAULTS = {"--ref": "a_pair:Ref", "--port": "a_pair:Port", "--input": "4,5"}


@dataclass
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, from which modules are imported: the pair, and a module that cannot be."""
    (tmp_path / "a_pair.py").write_text(PAIR, encoding="utf-8")
    (tmp_path / "no_module.py").write_text("import paddle\n1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("a_pair", None)


@pytest.fixture
def run(folder, capsys) -> Callable[..., Ended]:
    """run(words, flags) -> how it ended, in this process; the pair of PAIR unless the flags say otherwise."""

    def run(*words: str, **flags: object) -> Ended:
        given = DEFAULTS | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        words += tuple(str(word) for flag, value in given.items() if value is not None for word in (flag, value))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.run(lambda: align.main(align.get_args_parser().parse_args(words)), align.PROG)
        return Ended(ended.value.code, *capsys.readouterr())

    return run


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_an_aligned_pair(run):
    result = run()
    assert result.returncode == 0, result.stderr
    assert last_line(result.stdout).startswith("PASS align: all ")
    assert "a_pair:Port against a_pair:Ref, cpu, seed 0, probe weights" in result.stdout
    assert "map: 4 tensors, 4 outputs, by order, type and shape, confirmed by values everywhere" in result.stdout


def test_a_fault(run):
    result = run(port="a_pair:Port(activation='ReLU6')", mode="eval")
    assert result.returncode == 1, result.stderr
    assert last_line(result.stdout).startswith("FAIL align: ") and "train mode" not in result.stdout
    assert "located: act (ReLU), the port's act (ReLU6): forward" in result.stdout
    assert "cause, tested: it is ReLU6, not ReLU" in result.stdout


FILES = {"json": "verdict.json", "report": "verdict.html"}


@pytest.mark.parametrize(("activation", "status"), [("ReLU", 0), ("ReLU6", 1)])
def test_a_verdict_for_programs(run, folder, activation, status):
    result = run("--quiet", port=f"a_pair:Port(activation={activation!r})", mode="eval", **FILES)
    assert result.returncode == status, result.stderr
    (printed,) = result.stdout.splitlines()  # the last line alone
    data = json.loads((folder / "verdict.json").read_text())
    assert (data["schema"], data["status"], data["sentence"]) == (SCHEMA, printed.split()[0], printed)
    (verdict,) = data["verdicts"]
    assert verdict["sentence"] == printed and len(verdict["rows"]) > 10
    if status:
        found = verdict["location"]
        assert (found["module"], found["port_type"], found["phase"]) == ("act", "ReLU6", "forward")
        assert found["causes"] == ["it is ReLU6, not ReLU"]
    else:
        assert verdict["location"] is None
    page = (folder / "verdict.html").read_text()
    assert f">{printed.split()[0]}</span>" in page and "eval mode, float64/output" in page
    assert ("it is ReLU6, not ReLU" in page) == bool(status)


def test_several_verdicts_for_programs(run, folder):
    result = run(*LOSS, mode="eval", **FILES)
    assert result.returncode == 0 and "wrote verdict.json\nwrote verdict.html\n" in result.stdout
    data = json.loads((folder / "verdict.json").read_text())
    assert [verdict["status"] for verdict in data["verdicts"]] == ["PASS", "PASS"]
    assert data["sentence"].startswith("PASS portproof align: all ")


def test_a_refused_verdict_for_programs(run, folder):
    assert run(ref="a_pair:Sum", port="a_pair:PortSum", **FILES).returncode == 2
    assert json.loads((folder / "verdict.json").read_text())["status"] == "REFUSED"
    assert "REFUSED" in (folder / "verdict.html").read_text()


def test_a_file_of_an_earlier_run_is_not_left(run, folder):
    """Nor is a file removed that is something else."""
    for name in (*FILES.values(), "weights.pth"):
        (folder / name).write_text("{}")
    assert run(port="a_pair:broken", **FILES).returncode == 1
    assert not any((folder / name).exists() for name in FILES.values())
    assert "does not end in .json: choose another name" in last_line(run(json="weights.pth").stderr)
    assert "does not end in .html: choose another name" in last_line(run(report="weights.pth").stderr)
    assert (folder / "weights.pth").read_text() == "{}"
    (folder / "a.json").mkdir()
    refused = run(json="a.json")
    assert refused.returncode == 2 and "a.json cannot be written" in last_line(refused.stderr)


def test_in_a_notebook(run):
    verdict = Verdict("x", [Row(Item("<a>"), FAIL, reason="shape")])
    shown = AlignVerdict(**vars(verdict))._repr_html_()
    assert shown.startswith("<details open><summary><b>FAIL x: 1 of 1 items") and "&lt;a&gt;" in shown
    assert "<a>" not in shown and AlignVerdict("x")._repr_html_().startswith("<details><summary>")


def test_an_ambiguous_map_and_what_settles_it(run, folder):
    pair = {"ref": "a_pair:Sum", "port": "a_pair:PortSum"}
    result = run(**pair)
    assert result.returncode == 2, result.stdout
    assert "REFUSED align: a and b may be the port's u and v, or the other way round" in result.stdout
    (folder / "map.yaml").write_text("a: u\n", encoding="utf-8")
    assert run(**pair, map="map.yaml").returncode == 0
    refused = run(ONLY, **pair)
    assert refused.returncode == 2 and "the map is ambiguous" in last_line(refused.stderr)


@pytest.mark.parametrize("activation", ["ReLU", "ReLU6"])
def test_the_locator(run, activation):
    result = run(ONLY, port=f"a_pair:Port(activation={activation!r})")
    if activation == "ReLU":
        assert result.returncode == 0, result.stderr
        assert last_line(result.stdout) == "not located: each module alone gives what the reference's gives"
    else:
        assert result.returncode == 1, result.stderr
        assert "located: act (ReLU), the port's act (ReLU6): forward" in result.stdout


DICTS = """
class RefOfDict(Ref):
    def forward(self, x):
        return {"alpha": super().forward(x), "beta": x}


class PortOfDict(Port):
    def forward(self, x):
        return {"z": super().forward(x), "y": x}


class Drop(torch.nn.Module):
    def forward(self, x):
        return x * (torch.rand(len(x), 1) > 0.5) if self.training else x


class PortDrop(paddle.nn.Layer):
    def forward(self, x):
        return x * (paddle.rand([len(x), 1]) > 0.5).astype(x.dtype) if self.training else x


def dropping():
    return torch.nn.Sequential(Ref(), Drop())


def port_dropping():
    return paddle.nn.Sequential(Port(), PortDrop())
"""


def test_the_locator_lends_random_numbers_and_asks_which_output_is_which(run, folder):
    (folder / "a_pair.py").write_text(PAIR + DICTS, encoding="utf-8")
    result = run(ONLY, ref="a_pair:dropping", port="a_pair:port_dropping")
    assert result.returncode == 0 and "in train mode: uniform (4, 1)" in result.stdout, result.stdout + result.stderr
    dicts = {"ref": "a_pair:RefOfDict", "port": "a_pair:PortOfDict"}
    refused = run(ONLY, **dicts)
    assert refused.returncode == 2 and "returns alpha, beta and the port y, z" in last_line(refused.stderr)
    result = run(ONLY, "--match", "alpha=z", "--match", "beta=y", **dicts)
    assert result.returncode == 0, result.stdout + result.stderr


def save_weights(folder: Path, change: float = 0.0) -> None:
    """ref.safetensors and port.pdparams of the same random weights, but for one element of the port's."""
    rng = np.random.default_rng(0)
    shapes = {"first.weight": (6, 5), "first.bias": (6,), "last.weight": (3, 6), "last.bias": (3,)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(arrays, folder / "ref.safetensors")
    names = {name: name.replace("first", "one").replace("last", "two") for name in arrays}
    port = {names[name]: np.ascontiguousarray(array.T) for name, array in arrays.items()}
    port["two.bias"][1] += change
    paddle.save({name: paddle.to_tensor(array) for name, array in port.items()}, str(folder / "port.pdparams"))


def test_weights_of_the_reference(run, folder):
    save_weights(folder)
    result = run(weights="ref.safetensors")
    assert result.returncode == 0, result.stderr + result.stdout
    assert "reference weights" in result.stdout


@pytest.mark.parametrize("change", [0.0, 1e-6])
def test_weights_of_the_port(run, folder, change):
    save_weights(folder, change)
    result = run(weights="ref.safetensors", port_weights="port.pdparams")
    assert "own weights" in result.stdout, result.stderr
    if change:
        assert result.returncode == 1
        assert "located: last (Linear), the port's two (Linear): weights" in result.stdout
    else:
        assert result.returncode == 0, result.stdout


def test_one_precision(run):
    out = run("--verbose", precision="float64").stdout
    assert "eval mode, float64/output" in out and "float32" not in out
    located = run(ONLY, precision="float32", port="a_pair:Port(activation='ReLU6')")
    assert located.returncode == 1 and "eval mode, float32: output 0 differs" in located.stdout


def test_modules_that_are_left_out(run):
    wrong = {"port": "a_pair:Port(activation='ReLU6')"}
    assert "left out, not compared: act, first" in run("--leave-out", "act", "--leave-out", "first", **wrong).stdout
    located = run(ONLY, leave_out="act", **wrong)
    assert located.returncode == 1 and "located: the model itself" in located.stdout
    assert "leave_out names 'no'" in last_line(run(leave_out="no").stderr)


def test_the_map_is_printed_and_written(run, folder):
    result = run("--print-map", save_map="found.yaml")
    assert result.returncode == 0, result.stderr
    assert "map of modules with weights:\n  first: one\n  last: two\n" in result.stdout
    assert (folder / "found.yaml").read_text(encoding="utf-8") == "first: one\nlast: two\n"
    again = run(map="found.yaml")
    assert again.returncode == 0 and "wrote found.yaml: 2 lines" in result.stdout
    refused = run(ref="a_pair:Sum", port="a_pair:PortSum", save_map="none.yaml")
    assert refused.returncode == 2 and "no map is written to none.yaml" in last_line(refused.stderr)
    assert not (folder / "none.yaml").exists()


@pytest.mark.parametrize("name", ["mapped.pdparams", "mapped.safetensors"])
def test_the_ports_weights_are_written(run, folder, name):
    save_weights(folder)
    result = run(weights="ref.safetensors", save_weights=name)
    assert result.returncode == 0 and f"wrote {name}: 4 tensors" in result.stdout, result.stderr
    assert run(weights="ref.safetensors", port_weights=name).returncode == 0
    structure = run(weights="ref.safetensors", save_weights="wrong.pdparams", port="a_pair:PortSum")
    assert structure.returncode == 1 and "weights not written: wrong.pdparams is not written" in structure.stderr
    assert not (folder / "wrong.pdparams").exists()


LOSS = ("--loss", "a_pair:loss", "a_pair:port_loss", "--labels", "4:int64:3")
ADAM = ("--optimizer", "torch.optim:Adam(lr=0.001)", "paddle.optimizer:Adam(learning_rate=0.001)")
TRAININGS = {
    "SGD": (LOSS, 0),
    "Adam": ((*LOSS, *ADAM), 0),
    "an object": (("--loss", "a_pair:loss", "a_pair:PortLoss", *LOSS[3:]), 0),
    "a loss that is scaled": ((*LOSS[:2], "a_pair:port_loss(scale=1.01)", *LOSS[3:]), 1),
    "another rate": ((*LOSS, *ADAM[:2], "paddle.optimizer:Adam(learning_rate=0.002)"), 1),
}


@pytest.mark.parametrize(("words", "status"), TRAININGS.values(), ids=TRAININGS)
def test_steps_of_training(run, words, status):
    result = run(*words, "--steps", "2", mode="eval")
    assert result.returncode == status, result.stdout + result.stderr
    assert "PASS align" in result.stdout and "eval mode, float64, 2 iterations" in result.stdout
    assert "iteration 1 " in result.stdout and "iteration 2 " not in result.stdout
    assert last_line(result.stdout).startswith("FAIL backward" if status else "PASS backward")


def test_steps_of_training_with_weights_and_inputs_of_files(run, folder):
    save_weights(folder)
    np.savez(folder / "given.npz", np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32))
    result = run(*LOSS, input=None, inputs="given.npz", weights="ref.safetensors")
    assert result.returncode == 0 and "train mode, float64, 3 iterations" in result.stdout, result.stderr


def test_a_repeated_warning_is_shown_once_and_a_bar_on_a_terminal_only(monkeypatch, capsys):
    printed = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *args, **kwargs: printed.append(str(message)))
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with process.shown("align"):
            warnings.simplefilter("always")
            for i in range(3):
                process.count_pass()
                warnings.warn("the same", stacklevel=1)
                warnings.warn(f"another, {min(i, 1)}", stacklevel=1)
        assert ("align: " in capsys.readouterr().err) is terminal
    assert printed == ["the same", "another, 0", "another, 1"] * 2
    assert not process._listeners


def test_what_paddle_says_of_every_batch_norm_is_shown_of_the_users_own_calls_alone(recwarn):
    class Warning2D(paddle.nn.BatchNorm2D):
        def forward(self, x):
            warnings.warn("of the port", stacklevel=1)
            paddle.nn.layer.norm.warnings.warn("of a norm", DeprecationWarning, 1)
            return super().forward(x)

    verdict = portproof.align(
        torch.nn.BatchNorm2d(2), Warning2D(2), [np.arange(36.0, dtype="float32").reshape(2, 2, 3, 3)]
    )
    assert verdict.notes and {str(each.message) for each in recwarn} == {"of the port", "of a norm"}
    assert {each.filename for each in recwarn} == {__file__}
    recwarn.clear()
    paddle.nn.BatchNorm2D(2)(paddle.ones([2, 2, 3, 3]))
    assert [str(each.message) for each in recwarn] == [ALWAYS_SAID]


def test_training_with_a_keyword_in_the_file_of_inputs_is_refused(run, folder):
    """It would be left out, and the models trained on something else."""
    x = np.zeros((4, 5), np.float32)
    np.savez(folder / "given.npz", **{"0": x, "mask": x})
    result = run(*LOSS, input=None, inputs="given.npz")
    assert result.returncode == 2 and "--loss calls the models on positional arguments" in last_line(result.stderr)


def test_inputs_by_keyword(run):
    assert run(input="x=4,5").returncode == 0
    wrong = run(input="y=4,5")
    assert wrong.returncode == 2 and "unexpected keyword argument 'y'" in last_line(wrong.stderr)


@pytest.mark.parametrize("name", ["0", "arr_0", "x"])
def test_inputs_of_a_file(run, folder, name):
    x = np.random.default_rng(0).normal(size=(7, 5))
    np.savez(folder / "given.npz", **{name: x})
    result = run(input=None, inputs="given.npz")
    assert result.returncode == 0, result.stderr
    assert "/42 (" in run(input=None, inputs="given.npz", port="a_pair:Port(activation='ReLU6')", mode="eval").stdout


def test_a_file_of_inputs_that_is_none(run, folder):
    (folder / "text.npz").write_text("text", encoding="utf-8")
    np.save(folder / "pickle.npy", np.array([{}], object), allow_pickle=True)
    np.savez(folder / "empty.npz")
    np.savez(folder / "pickle.npz", np.array([{}], object))
    np.savez(folder / "twice.npz", **{"0": np.zeros((7, 5)), "arr_0": np.ones((7, 5))})
    for name in ("text.npz", "pickle.npy", "pickle.npz", "empty.npz", "nothing.npz", "twice.npz"):
        result = run(input=None, inputs=name)
        assert result.returncode == 2 and f"--inputs {name} " in last_line(result.stderr), result.stderr
        assert "Traceback" not in result.stderr
    assert "give one of the two" in last_line(run(inputs="text.npz").stderr)


MISTAKES = {
    "no such module": (
        {"ref": "nothing:Net"},
        "No module named 'nothing': install it with pip, or put the folder that holds it into PYTHONPATH",
    ),
    "a module that raises": ({"ref": "no_module:Net"}, "importing no_module raised ZeroDivisionError"),
    "no such keyword of the port": ({"port": "a_pair:Port(depth=3)"}, "making it raised TypeError"),
    "no such factory": ({"ref": "a_pair:Net"}, "a_pair has no Net that can be called"),
    "a misspelt factory": ({"ref": "a_pair:Reff"}, "a_pair has no Reff that can be called: did you mean Ref?"),
    "no factory": ({"port": "math:pi"}, "math has no pi that can be called"),
    "no colon": ({"ref": "a_pair"}, "is no PKG.MOD:FACTORY"),
    "a positional argument": ({"ref": "a_pair:Ref(3)"}, "is no PKG.MOD:FACTORY"),
    "an expression": ({"ref": "a_pair:Ref(classes=1 + x)"}, "is no PKG.MOD:FACTORY"),
    "no such keyword": ({"ref": "a_pair:Ref(depth=3)"}, "--ref 'a_pair:Ref(depth=3)': making it raised TypeError"),
    "a factory that raises": ({"ref": "a_pair:broken"}, "--ref 'a_pair:broken': making it raised RuntimeError"),
    "the sides exchanged": (
        {"ref": "a_pair:Port", "port": "a_pair:Ref"},
        "the reference is a Port, no torch",
    ),
    "no shape": ({"input": "4,x"}, "--input '4,x' is no shape"),
    "an empty input": ({"input": "4,0"}, "--input '4,0' is no shape"),
    "a type that is none": ({"input": "4,5:float99"}, "--input '4,5:float99' is no shape"),
    "a shape that does not fit": ({"input": "4,6"}, "give inputs (--input) of other shapes than 4x6"),
    "a name that is no argument": (
        {"input": None, "inputs": "named.npz"},
        "'in0': call each array as an argument of its forward, or 0, 1, ... in their order (--inputs)",
    ),
    "a call that is none": ({"ref": "a_pair:Ref(classes={[]: 1})"}, "is no PKG.MOD:FACTORY"),
    "too many axes": ({"input": ",".join(["1"] * 80)}, "has more than 32 axes"),
    "more than memory holds": ({"input": "99999,99999,99999"}, "or 268435456 numbers"),
    "past int64": ({"input": f"4,5:int64:{2**63 + 1}"}, f"int64 has no numbers of {2**63}"),
    "past int32": ({"input": f"4,5:int32:{2**31 + 1}"}, f"int32 has no numbers of {2**31}"),
    "a large seed": ({"seed": 2**32}, "invalid whole number from 0 to 4294967295 value: '4294967296'"),
    "a negative seed": ({"seed": -1}, "invalid whole number from 0 to 4294967295 value: '-1'"),
    "no map": ({"map": "nothing.yaml"}, "map nothing.yaml does not exist"),
    "a list for a map": ({"map": "list.yaml"}, "map list.yaml holds no lines NAME: NAME"),
    "no YAML": ({"map": "bad.yaml"}, "map bad.yaml refused"),
    "YAML without end": ({"map": "deep.yaml"}, "map deep.yaml refused"),
    "YAML of ever more": ({"map": "bomb.yaml"}, "map bomb.yaml holds no lines NAME: NAME"),
    "YAML of one text again and again": ({"map": "alias.yaml"}, "names more than 2000000 bytes for 'a'"),
    "a match of no output": ({"match": "a=b"}, "outputs (--match) name 'a', but the reference's are"),
    "a name twice": ({"map": "twice.yaml"}, "map twice.yaml names 'first' twice"),
    "a map of what is not there": ({"map": "wrong.yaml"}, "the port has no module with weights of that name"),
    "no weights": ({"weights": "nothing.pth"}, "weights nothing.pth does not exist"),
    "weights that do not fit": ({"weights": "other.safetensors"}, "weights other.safetensors"),
    "weights of the port alone": ({"port_weights": "port.pdparams"}, "--port-weights are compared with --weights"),
}


@pytest.mark.parametrize(("flags", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_status_2(run, folder, flags, message):
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64))  # 2 ** 63 names
    alias = "a: [&x " + "n" * 100_000 + ", *x" * 20_000 + "]\n"
    maps = {"alias": alias, "twice": "first: one\nfirst: two\n"}
    maps |= {"list": "- a\n", "bad": "a: [b\n", "wrong": "first: nothing\n", "deep": "[" * 5000, "bomb": bomb}
    for name, text in maps.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    save_file({"first.weight": np.zeros((2, 2), np.float32)}, folder / "other.safetensors")
    np.savez(folder / "named.npz", in0=np.zeros((4, 5), np.float32))
    for words in ((), (ONLY,)) if "ref" in flags else ((),):
        result = run(*words, **flags)
        assert result.returncode == 2, result.stdout + result.stderr
        line = last_line(result.stderr)
        assert ": error: " in line and message in line, line
        assert "Traceback" not in result.stderr


def test_a_port_whose_code_raises_fails(run):
    for port, reason in (
        ("no_module:Net", "importing no_module raised ZeroDivisionError"),
        ("a_pair:broken", "making it raised RuntimeError: no such size"),
    ):
        result = run(port=port)
        assert (result.returncode, result.stderr) == (1, "")
        assert result.stdout.startswith(f"FAIL portproof align: --port {port!r}: {reason}")


def test_flags_that_are_missing_or_do_not_go_together(run):
    assert "required: --ref" in last_line(run(ref=None).stderr)
    assert "leave --mode out" in last_line(run(ONLY, mode="eval").stderr)
    assert "leave --save-map out" in last_line(run(ONLY, save_map="map.yaml").stderr)
    assert "leave --json out" in last_line(run(ONLY, json="verdict.json").stderr)
    assert "give --loss" in last_line(run(labels="4:int64:3").stderr)
    assert "give these alone" in last_line(run(save_weights="a.pdparams").stderr)
    assert "does not end in .pdparams" in last_line(run(weights="a.pth", save_weights="a.npz").stderr)
    assert "leave NAME= out of --input" in last_line(run(*LOSS, input="x=4,5").stderr)


@pytest.mark.thorough("one of its ways", but="locate-only")
@pytest.mark.parametrize("words", [(), (ONLY,)], ids=["align", "locate-only"])
def test_as_a_command(folder, words):
    """Its help, and a pair in a folder that PYTHONPATH names."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = [*words, *(word for pair in DEFAULTS.items() for word in pair)]
    for flags, status, text in ((given, 0, "a_pair:Port against a_pair:Ref"), (["--help"], 0, "--port-weights FILE")):
        result = subprocess.run(
            [sys.executable, "-m", "portproof", "align", *flags],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert result.returncode == status, result.stderr
        assert text in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no card")
def test_a_card_that_is_not_there(run):
    result = run(device="gpu")
    assert result.returncode == 2 and "sees no card" in last_line(result.stderr)
