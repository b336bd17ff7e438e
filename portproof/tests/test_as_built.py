"""Saved buffers as each side was built: constants are compared, statistics and what is drawn are not."""

from functools import partial

import numpy as np
import paddle
import pytest
import torch
from toy_pairs import Port, Ref, normal

from portproof import align, judge, record
from portproof.backends import backend
from portproof.commands import align as align_command
from portproof.commands import judge as judge_command
from portproof.commands import record as record_command
from portproof.compare import FAIL, PASS, Verdict
from portproof.ladder import forward
from portproof.ladder.pairs.as_built import _of_one_type, as_built
from sturdyio.cli import UserError

X = normal(4, 5)
TABLE = np.linspace(1, 2, 5).astype(np.float32)
NAMES = "table", "picked", "ema", "drawn"


def made(framework, model, values):
    for name, value in values.items():
        model.register_buffer(name, framework.to_tensor(value) if framework is paddle else framework.tensor(value))
    return model


def code(m, x):
    if m.training:
        m.ema += 1
    return m.fc((x * m.table)[:, m.picked] @ m.drawn)


def values(rng, table=TABLE, picked=(3, 0, 4), ema=0.0):
    drawn = rng.normal(size=(3, 3)).astype(np.float32)
    return {"table": table, "picked": np.array(picked), "ema": np.full(2, ema, np.float32), "drawn": drawn}


def ref(**options):
    np_random = np.random.default_rng(np.random.randint(1000))  # noqa: NPY002 - follows the seed, as torch.randn does
    return made(torch, Ref(code, fc=torch.nn.Linear(3, 2)), values(np_random, **options))


def port(**options):
    np_random = np.random.default_rng(np.random.randint(1000))  # noqa: NPY002
    return made(paddle, Port(code, fc=paddle.nn.Linear(3, 2)), values(np_random, **options))


def loaded():
    """Its weights do not follow the seed, nor does what was drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return made(torch, Ref(code, fc=torch.nn.Linear(3, 2)), values(np.random.default_rng(3)))


def bad(verdict: Verdict) -> list[str]:
    return [row.name for row in verdict.bad]


def judged(**wrong) -> Verdict:
    return align(ref(), port(**wrong), [X], factories=(ref, lambda: port(**wrong)))


def test_a_right_pair_and_what_is_not_compared():
    verdict = judged()
    assert verdict.status == PASS, str(verdict)
    assert [row.name for row in verdict.rows if row.item.section == "buffers as built"] == [
        "buffers as built/table",
        "buffers as built/picked",
    ]
    assert {row.item.kind for row in verdict.rows if row.item.section == "buffers as built"} == {"buffer"}
    notes = [note for note in verdict.notes if note.startswith("not compared as built")]
    assert notes == [
        "not compared as built, since a pass in train mode changes them: ema",
        "not compared as built, since the seed changes them: drawn",
    ]


WRONG = {"table": {"table": TABLE[::-1].copy()}, "picked": {"picked": (3, 0, 2)}}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_constant_is_named_with_both_values(name):
    verdict = judged(**WRONG[name])
    assert bad(verdict) == [f"buffers as built/{name}"] and verdict.status == FAIL, str(verdict)
    (row,) = verdict.bad
    assert f"reference {row.worst.ref!r}, port {row.worst.port!r}" in str(verdict)
    assert any(note.startswith(f"buffers as built/{name} at") for note in verdict.notes)
    assert verdict.location.phase == "buffers as built"


def test_a_statistic_of_another_value_is_no_fault():
    assert judged(ema=7.0).status == PASS


def test_rounding_is_no_fault_and_more_is():
    assert judged(table=TABLE + np.float32(4e-6)).status == PASS  # 5 rows * 2^-24 * 16, of 2, is 9.5e-6
    assert bad(judged(table=TABLE + np.float32(2e-5))) == ["buffers as built/table"]


def test_models_alone_count_as_just_built():
    verdict = align(ref(), port(**WRONG["table"]), [X])
    assert bad(verdict) == ["buffers as built/table", "buffers as built/drawn"], str(verdict)
    assert any("drawn at random, or loaded: only factories" in note for note in verdict.notes)


def test_a_reference_with_weights_of_its_own_was_not_just_built():
    verdict = align(ref(), port(**WRONG["table"]), [X], weights="reference")
    assert verdict.status == PASS, str(verdict)
    own = "not compared as built, since the reference was given with weights of its own: table, picked, ema, drawn"
    assert own in verdict.notes
    verdict = align(ref(), port(**WRONG["table"]), [X], weights="reference", factories=(ref, port))
    assert verdict.status == PASS and len([n for n in verdict.notes if "as built" in n]) == 2  # the factory's is right


def test_a_factory_of_loaded_models():
    verdict = align(loaded(), port(**WRONG["table"]), [X], factories=(loaded, port))
    assert verdict.status == PASS, str(verdict)
    reason = "each reference that is made has the same weights, loaded perhaps: table, picked, drawn"
    assert f"not compared as built, since {reason}" in verdict.notes


@pytest.mark.parametrize(
    ("factory", "message"),
    [(lambda: 3, "factory makes a int, no model"), (lambda: ref(table=np.ones(1, np.float32)), "another model")],
)
def test_a_factory_of_something_else(factory, message):
    with pytest.raises(UserError, match=f"the reference's .*{message}"):
        align(ref(), port(), [X], factories=(factory, None))


def test_what_one_side_does_not_save_is_not_compared():
    one = port()
    del one._buffers["table"]
    one.register_buffer("table", paddle.to_tensor(TABLE), persistable=False)
    verdict = align(ref(), one, [X], factories=(ref, port))
    assert verdict.status == PASS and not any(row.name == "buffers as built/table" for row in verdict.rows)


def test_a_library_layers_statistics():
    net = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    other = paddle.nn.Sequential(paddle.nn.Linear(5, 3), paddle.nn.BatchNorm1D(3))
    verdict = align(net, other, [X], modes=("eval",))
    statistics = "1.running_mean, 1.running_var"
    assert f"not compared as built, since a pass in train mode changes them: {statistics}" in verdict.notes
    assert verdict.status == PASS and int(verdict.passes.split()[1]) <= 7  # nothing is run to see it


def test_no_pass_in_train_mode():
    def fails(m, x):
        if m.training:
            raise ValueError
        return code(m, x)

    one = ref()
    one.code = fails
    verdict = align(one, port(), [X], modes=("eval",))
    assert verdict.status == PASS, str(verdict)
    assert any("since the reference does not run in train mode, which would tell: table" in n for n in verdict.notes)


def test_judging_agrees_with_align(tmp_path):
    for wrong in ({}, *WRONG.values()):
        path = tmp_path / "net.ref.safetensors"
        record(ref(), [X], factory=ref).save(path)
        verdict = judge(port(**wrong), path, factory=lambda wrong=wrong: port(**wrong))
        same = judged(**wrong)
        assert (verdict.status, bad(verdict)) == (same.status, bad(same)), str(verdict)
        assert [n for n in verdict.notes if "as built" in n] == [n for n in same.notes if "as built" in n]


def test_a_rung_compares_them():
    verdict = forward(ref(), port(**WRONG["table"]), [X], factories=(ref, lambda: port(**WRONG["table"])))
    assert bad(verdict) == ["buffers as built/table"] and any("buffers as built" in line for line in verdict.log)
    assert forward(ref(), port(), [X], factories=(ref, port)).status == PASS


MINUS = float("-inf")
MASK = np.triu(np.ones((3, 3)), 1)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (np.where(MASK, MINUS, 0), np.where(MASK, -1e4, 0), True),
        (np.where(MASK, -1e9, 0), np.where(MASK.T, -1e9, 0), False),
        (MASK.astype(bool), MASK.astype(np.int64), True),
        (MASK.astype(bool), ~MASK.astype(bool), False),
        (MASK.astype(bool), MASK.astype(np.float32), True),
        (MASK.astype(bool), np.where(MASK, MINUS, 0), None),
        (np.array([1.0, np.nan, np.inf]), np.array([1.0, np.nan, np.inf]), True),
        (np.array([1.0, np.inf]), np.array([1.0, MINUS]), False),
    ],
)
def test_the_forms_of_a_mask(first, second, equal):
    found = _of_one_type(first, second)
    assert (found is None) == (equal is None)
    if found:
        assert np.array_equal(*found) == equal
        assert found[0].dtype == found[1].dtype


def test_the_command(tmp_path, monkeypatch, capsys):
    source = """
import paddle, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor([0.5, 0.25, 2.0]))
        self.register_buffer("drawn", torch.randn(3, 3))
    def forward(self, x): return self.fc(x) * self.scale @ self.drawn
class Port(paddle.nn.Layer):
    def __init__(self, last=2.0):
        super().__init__()
        self.fc = paddle.nn.Linear(5, 3)
        self.register_buffer("scale", paddle.to_tensor([0.5, 0.25, last]))
        self.register_buffer("drawn", paddle.randn([3, 3]))
    def forward(self, x): return self.fc(x) * self.scale @ self.drawn
"""
    (tmp_path / "built_pair.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(command, *arguments):
        status = command.main(command.get_args_parser().parse_args(arguments))
        return status, capsys.readouterr().out

    ref_net, recording = ("--ref", "built_pair:Net", "--input", "4,5"), "net.ref.safetensors"
    assert run(record_command, *ref_net, "--output", recording)[0] == 0
    for there, status in (("Port", 0), ("Port(last=3.0)", 1)):
        for command in ((align_command, *ref_net), (judge_command, recording)):
            found, out = run(*command, "--port", f"built_pair:{there}")
            assert found == status, out
            assert "not compared as built, since the seed changes them: drawn" in out
            assert ("buffers as built/scale at (2,): reference 2.0, port 3.0" in out) == bool(status)
            assert "only factories" not in out


def test_the_models_own_are_not_changed():
    one = ref()
    before = {key: tensor.clone() for key, tensor in one.state_dict().items()}
    model = backend("torch").wrap(one, "reference")
    found = as_built(model, [X], ref)
    assert list(found.constants) == ["table", "picked"] and set(found.others) == {"ema", "drawn"} and found.rebuilt
    assert all(torch.equal(tensor, before[key]) for key, tensor in one.state_dict().items())


def frozen_ref(table=TABLE, drawn=False):
    made = Ref(lambda m, x: m.fc(x * m.table), fc=torch.nn.Linear(5, 2))
    made.table = torch.nn.Parameter(torch.rand(5) if drawn else torch.tensor(table), requires_grad=False)
    return made


def frozen_port(table=TABLE, is_buffer=False, drawn=False):
    made = Port(lambda m, x: m.fc(x * m.table), fc=paddle.nn.Linear(5, 2))
    value = paddle.rand([5]) if drawn else paddle.to_tensor(table)
    if is_buffer:
        made.register_buffer("table", value)
    else:
        made.table = made.create_parameter([5], paddle.ParamAttr(trainable=False))
        made.table.set_value(value)
    return made


@pytest.mark.parametrize("is_buffer", [True, False])
def test_frozen_parameters_are_constants_if_factories_show_that_nothing_draws_them(is_buffer):
    """Positions of a transformer, say."""
    wrong = TABLE[::-1].copy()
    for table, status in ((TABLE, PASS), (wrong, FAIL)):
        made = partial(frozen_port, table, is_buffer)
        verdict = align(frozen_ref(), made(), [X], factories=(frozen_ref, made))
        assert verdict.status == status, str(verdict)
        assert bad(verdict) == ([] if status == PASS else ["buffers as built/table"])
    without = align(frozen_ref(), frozen_port(wrong, is_buffer), [X])
    assert without.status == PASS and any("a frozen parameter may be drawn at random" in n for n in without.notes)
    drawn = align(
        frozen_ref(drawn=True), frozen_port(is_buffer=is_buffer, drawn=True), [X],
        factories=(lambda: frozen_ref(drawn=True), lambda: frozen_port(is_buffer=is_buffer, drawn=True)),
    )  # fmt: skip
    assert drawn.status == PASS and any("the seed changes them: table" in note for note in drawn.notes), str(drawn)


@pytest.mark.parametrize("kind", ["embedding", "parameter", "buffer"])
def test_a_frozen_embedding_is_a_table(kind):
    """Sinusoids, which the port may hold in another way, and as it is built."""
    table = np.sin(np.arange(18.0).reshape(6, 3)).astype(np.float32)

    def made():
        ref = Ref(lambda m, x: m.fc(x + m.positions.weight[: x.shape[1]]), fc=torch.nn.Linear(3, 2))
        ref.positions = torch.nn.Embedding.from_pretrained(torch.tensor(table), freeze=True)
        return ref

    def made_there(table):
        port = Port(lambda m, x: m.fc(x + getattr(m.table, "weight", m.table)[: x.shape[1]]), fc=paddle.nn.Linear(3, 2))
        if kind == "embedding":
            port.table = paddle.nn.Embedding(6, 3)
            port.table.weight.set_value(table)
            port.table.weight.stop_gradient = True
        elif kind == "parameter":
            port.table = port.create_parameter([6, 3], paddle.ParamAttr(trainable=False))
            port.table.set_value(table)
        else:
            port.register_buffer("table", paddle.to_tensor(table))
        return port

    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    for array, status in ((table, PASS), (table * 2, FAIL)):
        make = partial(made_there, array)
        verdict = align(made(), make(), [x], factories=(made, make))
        assert verdict.status == status, str(verdict)
        assert bad(verdict) == ([] if status == PASS else ["buffers as built/positions.weight"])
