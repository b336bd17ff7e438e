"""Several processes of toy callables against one, with and without mistakes."""

import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
import toy_processes
from torch.utils.data import DistributedSampler

from portproof.backends import backend
from portproof.compare import FAIL, PASS, REFUSED, Item, tensor_item
from portproof.io.cli import resolve
from portproof.ladder import workers
from portproof.ladder.rung import Rung
from portproof.ladder.rungs import processes
from portproof.ladder.rungs.processes import Processes, dist, strided_shares
from portproof.ladder.rungs.ready_made import data_parallel_step
from portproof.ladder.workers import Outcome, launch, record_of
from sturdyio.cli import UserError

REF, PORT = "toy_processes:ref", "toy_processes:port"
# {the port's mistake: (what fails, in which comparison)}
SEVERAL, AGREE, LINES = "port, 2 processes (as", "port, process 1 of 2", "2 processes, the log lines of each"
FAULTS = {
    "gradients summed": ("epoch 0/gradient/w", SEVERAL),
    "same share": ("epoch 0/images", SEVERAL),
    "one share": ("epoch 0/samples", SEVERAL),
    "weights of one process": ("epoch 0/parameter/w", AGREE),
    "every process logs": ("epoch 0/lines", LINES),
    "the last process logs": ("epoch 0/lines", LINES),
    "own buffers": ("epoch 0/mean", AGREE),
}


@pytest.fixture(scope="module")
def rung() -> Rung:
    """Two processes of both sides, in a right run, each of the faulty ones, and two with statistics of their own."""
    runs = {"right": {}, "own": {"statistics": True}, "equal": {"statistics": "equal"}}
    runs |= {fault: {"fault": fault, "statistics": fault == "own buffers"} for fault in FAULTS}
    rung = Rung("08_test", quiet=True)
    own = ["own", "equal", "own buffers"]
    dist(REF, PORT, {2: runs}, own_statistics=own, trained_on={"right": {"epoch 0": toy_processes.ORDER}}, rung=rung)
    return rung


def failures(rung: Rung) -> dict[str, list[tuple[str, str]]]:
    """{run: [(item, comparison)]}"""
    found = defaultdict(list)
    for verdict in rung.verdicts:
        for row in verdict.rows:
            if row.status == FAIL:
                run, _, item = row.name.partition("/")
                found[run].append((item, verdict.title))
    return found


def test_right_runs_pass(rung):
    assert not failures(rung).keys() & {"right", "own", "equal"}
    titles = [verdict.title.partition(" (")[0] for verdict in rung.verdicts if verdict.rows]
    assert titles == [
        "one process, the port against the reference, float64",
        "reference, the images of each process, against the documented",
        "reference, 2 processes",
        "reference, process 1 of 2",
        "port, the images of each process, against the documented",
        "port, 2 processes",
        "port, process 1 of 2",
        "2 processes, the log lines of each, the port against the reference",
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_where_it_shows(rung, fault):
    item, title = FAULTS[fault]
    found = failures(rung)[fault]
    assert any(name == item and where.startswith(title) for name, where in found), found
    assert not any("reference, " in where[:11] for _, where in found)


def test_buffers_that_never_differed_are_refused(rung):
    refusals = [verdict.refusal for verdict in rung.verdicts if verdict.refusal]
    assert refusals == [
        f"{who}, 2 processes: no buffer of 'equal' differed between them before they were made equal"
        for who in ("reference", "port")
    ]


def test_files_hold_images_losses_and_counts(rung):
    ref, port = rung.files
    assert ref.keys() == port.keys()
    assert {key.rpartition("/")[0] for key in ref if "/right/" in key} == {
        f"{count}/right/epoch 0" for count in ("one process", "2 processes")
    }
    assert (ref["2 processes/right/epoch 0/images"] == np.arange(8)).all()


def test_a_process_that_dies_leaves_what_all_had_ended(tmp_path):
    runs = {"right": {}, "wrong": {"fault": "dies"}}
    died = launch("paddle", PORT, 2, runs, tmp_path, 120)
    assert not died.is_machines and died.reason == "process 1 of 2 ended with an error: RuntimeError: lost"
    assert [list(record) for record in died.records] == [["right"], ["right"]]


def test_processes_that_do_not_come_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "command", lambda *args: [sys.executable, "-c", "raise OSError('no network')"])
    outcome = launch("torch", REF, 2, {"a": {}}, tmp_path, 60)
    assert outcome.is_machines and "before all processes ran: OSError: no network" in outcome.reason
    verdict = dist(REF, PORT, {2: {"a": {}}})
    assert verdict.status == REFUSED and "no network" in str(verdict)


@pytest.fixture
def alike(monkeypatch) -> None:
    """Processes that all do what one does, in this one."""

    def fake(framework: str, run: str, count: int, runs: dict, folder: Path, timeout: float) -> Outcome:
        records = {name: record_of(resolve(run, ""), it, "float64") for name, it in runs.items()}
        return Outcome([records for _ in range(count)])

    monkeypatch.setattr(processes, "launch", fake)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_step_of_one_process_is_recorded_in_eval_mode(framework):
    """By PyTorch's names and layouts, though the step sets train mode."""
    if framework == "torch":
        linear, norm, sgd = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), lambda p: torch.optim.SGD(p, 0.5)
        model = torch.nn.Sequential(linear, norm)
    else:
        linear, norm, sgd = paddle.nn.Linear(3, 2), paddle.nn.BatchNorm1D(2), lambda p: paddle.optimizer.SGD(0.5, p)
        model = paddle.nn.Sequential(linear, norm)
    before = backend(framework).arrays_of(model).parameters()["0.weight"]

    def make(model):
        optimizer = sgd(list(model.parameters()))

        def step(x):
            model.train()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            return loss

        return step, optimizer

    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    found = data_parallel_step(model, make, [x], "float64")
    of_weight = {item.kind: array for item, array in found.items() if item.name == "0.weight"}
    gradient = np.tile(x.sum(0, dtype=np.float64), (2, 1)) / np.sqrt(1 + 1e-5)  # as running statistics give it
    np.testing.assert_allclose(of_weight["gradient"], gradient, rtol=1e-12)
    np.testing.assert_allclose(of_weight["parameter"], before - 0.5 * gradient, rtol=1e-12)
    np.testing.assert_array_equal(found[Item("samples", "images")], range(4))


@pytest.mark.parametrize("variables", [("RANK", "WORLD_SIZE"), ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")])
def test_a_batch_that_cannot_be_shared_is_one_clear_line(variables, monkeypatch):
    for name, value in zip(variables, "12"):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("portproof.ladder.rungs.ready_made.join_group", lambda join, leave: None)
    with pytest.raises(UserError, match=r"2 processes cannot share a batch of 3 samples equally"):
        data_parallel_step(torch.nn.Linear(3, 2), lambda model: [model], [np.zeros((3, 3))], "float32")


def test_a_ports_tensors_have_the_references_names(alike):
    """Of gradients, parameters and buffers; other items keep their names."""
    translated, not_translated = (Rung("08_test", quiet=True) for _ in range(2))
    dist(REF, "toy_processes:renamed", {2: {"right": {}}}, names={"": "net"}, rung=translated)
    dist(REF, "toy_processes:renamed", {2: {"right": {}}}, rung=not_translated)
    of_tensors = {"epoch 0/parameter/w", "epoch 0/gradient/w"}
    assert not of_tensors & {item for item, _ in failures(translated)["right"]}
    assert of_tensors <= {item for item, _ in failures(not_translated)["right"]}


def test_a_model_that_is_a_child_in_the_reference_keeps_its_other_items():
    """What belongs to no module is not of the port's model itself."""
    record = {tensor_item("w", "gradient"): 1.0, Item("samples", "images"): 2}
    (each,) = Processes([{"run": record}], who="port", back={"": "net"}).each(["run"])
    assert [(item.name, item.module) for item in each] == [("net.w", "net"), ("samples", "")]


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("rank", [0, 1, 4])
def test_strided_shares_are_those_of_torchs_sampler(processes, rank):
    if rank >= processes:
        return
    share = strided_shares(lambda epoch: np.roll(np.arange(7), epoch), evaluated=4)
    sampler = DistributedSampler(range(7), processes, rank, shuffle=False)
    assert share(True, 0, rank, processes).tolist() == list(sampler)
    assert share(True, 2, rank, processes).tolist() == [(index - 2) % 7 for index in sampler]
    assert share(False, 1, rank, processes).tolist() == list(range(4))[rank::processes]


def test_shares_are_compared_with_the_documented(alike):
    def documented(train: bool, epoch: int, rank: int, n: int) -> np.ndarray:
        return (np.roll(np.arange(6), epoch) if train else np.arange(6))[rank::n]

    same, first = "toy_processes:one_number", lambda train, epoch, rank, n: documented(train, epoch, 0, n)
    assert dist(same, same, {2: {"a": {}}}, shares=[documented, documented, documented]).status == PASS
    verdict = dist(same, same, {2: {"a": {}}}, shares=[documented, documented, first])
    assert verdict.first_failure.name == "train, 2 processes/epoch 0"
    assert "rank or world_size not given to the sampler" in str(verdict)
    verdict = dist(same, same, {2: {"a": {}}}, shares=[documented, documented, lambda *args: 1 / 0])
    assert verdict.first_failure.reason.startswith("the port raised ZeroDivisionError")
    with pytest.raises(UserError, match="the reference's share of the images raised ZeroDivisionError"):
        dist(same, same, {2: {"a": {}}}, shares=[documented, lambda *args: 1 / 0, documented])


def test_a_port_that_raises_fails(alike, monkeypatch):
    fake = processes.launch
    monkeypatch.setattr(  # there it would be the launcher's to say
        processes, "launch", lambda framework, run, *args: fake(framework, "toy_processes:one_number", *args)
    )
    verdict = dist("toy_processes:one_number", "toy_processes:raises", {2: {"a": {}}})
    assert verdict.status == FAIL and verdict.first_failure.name == "port, one process"
    assert verdict.first_failure.reason == "the port raised ZeroDivisionError: no steps"
    with pytest.raises(UserError, match="the reference's run in one process raised ZeroDivisionError: no steps"):
        dist("toy_processes:raises", "toy_processes:one_number", {2: {"a": {}}})


def test_a_reference_that_dies_among_several_is_the_users(alike, monkeypatch):
    def fake(framework: str, *args) -> Outcome:
        return Outcome([{}, {}], "process 1 of 2 ended with an error: ValueError: lost")

    monkeypatch.setattr(processes, "launch", fake)
    with pytest.raises(UserError, match="the reference, 2 processes: process 1 of 2 .*lost"):
        dist("toy_processes:one_number", "toy_processes:one_number", {2: {"a": {}}})


def test_nothing_recorded_is_refused(alike):
    assert dist("toy_processes:empty", "toy_processes:empty", {2: {"a": {}}}).status == REFUSED


@pytest.mark.parametrize("name, message", [("no_dict", "it returned list"), ("no_array", "loss is no array")])
def test_what_is_no_record_is_said(alike, name, message):
    with pytest.raises(UserError, match=message):
        dist(f"toy_processes:{name}", "toy_processes:one_number", {2: {"a": {}}})


ONE = {2: {"a": {}}}
WRONG = {
    "no runs": ((REF, PORT, {}), {}, "runs must be"),
    "no run of three": ((REF, PORT, {**ONE, 3: {}}), {}, "runs must be"),
    "one process": ((REF, PORT, {1: {"a": {}}}), {}, "2 or more"),
    "twice": ((REF, PORT, {**ONE, 3: {"a": {}}}), {}, "two runs are called 'a'"),
    "no JSON": ((REF, PORT, {2: {"a": {1, 2}}}), {}, "no JSON"),
    "unknown statistics": ((REF, PORT, ONE), {"own_statistics": ["b"]}, "'b' must be one of the runs"),
    "unknown images": ((REF, PORT, ONE), {"trained_on": {"b": {}}}, "'b' must be one of the runs"),
    "none like one": ((REF, PORT, ONE), {"own_statistics": ["a"]}, "name one in which several processes are one"),
    "two shares": ((REF, PORT, ONE), {"shares": [len, len]}, "shares must be three functions"),
    "no path": (("toy_processes", PORT, ONE), {}, "the reference 'toy_processes' is no PKG.MOD:NAME"),
    "no module": ((REF, "process_toy:port", ONE), {}, "the port 'process_toy:port'"),
    "no callable": ((REF, "toy_processes:NOT_CALLABLE", ONE), {}, "has no NOT_CALLABLE that can be called"),
    "other items": (("toy_processes:other_in_float32",) * 2 + (ONE,), {}, "otherwise in float32 than in float64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments_are_one_clear_line(alike, name):
    args, kwargs, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        dist(*args, **kwargs)


@pytest.mark.parametrize(
    "visible, cards, flags", [(None, 0, []), (None, 1, ["0,0"]), ("", 0, [","]), ("5,6", 2, ["5,5"])]
)
def test_processes_on_the_cpu_may_be_more_than_cards(monkeypatch, tmp_path, visible, cards, flags):
    monkeypatch.setattr("paddle.device.cuda.device_count", lambda: cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    line = workers.command("paddle", 2, tmp_path)
    assert line[line.index("--devices") + 1 :][:1] == flags if flags else "--devices" not in line


def processes_in(folder: Path) -> list[int]:
    """Those whose command line names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.thorough("test_no_process_outlives_the_caller")
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_processes_that_never_end_are_ended(framework, tmp_path):
    died = launch(framework, "toy_processes:waits", 2, {"a run": {}}, tmp_path, 20)  # to start they may take 10 s
    assert not died.is_machines and re.fullmatch(r"process \d of 2 did not end within 20 s.*", died.reason)
    wait_until(lambda: processes_in(tmp_path) == [])


@pytest.mark.thorough("one framework", but="paddle")
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_no_process_outlives_the_caller(framework, tmp_path):
    """Not even one that is killed."""
    code = (
        "import pathlib, sys; from portproof.ladder.workers import launch; "
        "launch(sys.argv[1], 'toy_processes:waits', 2, {'a run': {}}, pathlib.Path(sys.argv[2]), 60)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, framework, str(tmp_path)], cwd=Path(__file__).parent)
    wait_until(lambda: all((tmp_path / f"{rank}.stage").is_file() for rank in range(2)))
    assert len(processes_in(tmp_path)) >= 4  # this one, the launcher and its two
    caller.kill()
    caller.wait()
    wait_until(lambda: processes_in(tmp_path) == [])
