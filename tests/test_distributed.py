"""Several processes against one: the sampler's shares, rung 08 with and without faults, synchronized batch norm.

That two processes of either side are one is rung 08's to show; here it is shown to see what goes wrong.
"""

import importlib
import importlib.util
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import paddle
import pytest
import torch
from sync_batch_norm_worker import BIAS, EPSILON, WEIGHT, batch

import mobilenetv3_paddle.train.distributed
from maintenance.checks import gallery
from mobilenetv3_common.sampler import BatchSampler
from portproof.compare import PASS
from sturdyio.cli import Stopped
from sturdyio.files import load_npy

ROOT = Path(__file__).resolve().parents[1]
RUNG = "08_test_dist"
PACKAGES = ("mobilenetv3_ref", "mobilenetv3_paddle")


def sampled(length: int, batch_size: int, world_size: int, **kwargs) -> list[list[list[int]]]:
    """The batches of every process."""
    samplers = [BatchSampler(length, batch_size, rank=r, world_size=world_size, **kwargs) for r in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(3)
    batches = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(share) for share in batches]
    return batches


SIZES = list(itertools.product([1, 2, 3, 7, 16, 33, 100], [1, 2, 3, 8, 40], [1, 2, 3, 8]))


def test_evaluation_takes_every_image_once_and_in_order():
    for length, batch_size, world_size in SIZES:
        shares = sampled(length, batch_size, world_size, shuffle=False, pad=False)
        images = [[i for batch in share for i in batch] for share in shares]
        assert sorted(itertools.chain(*images)) == list(range(length))
        assert all(share == sorted(share) for share in images)
        counts = [len(share) for share in images]
        assert max(counts) - min(counts) <= 1
        sampler = BatchSampler(length, batch_size, shuffle=False, pad=False, rank=world_size - 1, world_size=world_size)
        assert sampler.rounds == max(map(len, shares)) <= len(sampler) + 1


class Batches(list):
    """The batches of one process, as a loader has them."""

    batch_sampler: BatchSampler


@pytest.mark.parametrize("package, tensor", [(PACKAGES[0], torch.tensor), (PACKAGES[1], paddle.to_tensor)])
def test_an_evaluation_asks_equally_often_whether_to_stop(package, tensor):
    """In every process, since asking is waiting for the others, and whichever time the answer is yes."""
    engine = importlib.import_module(f"{package}.train.engine")
    model = {"mobilenetv3_ref": torch, "mobilenetv3_paddle": paddle}[package].nn.Flatten()
    for length, batch_size, world_size in [(5, 2, 2), (3, 1, 2), (4, 2, 2), (2, 3, 3), (1, 1, 3), (7, 4, 1)]:
        for rank, last in itertools.product(range(world_size), range(4)):
            sampler = BatchSampler(length, batch_size, shuffle=False, pad=False, rank=rank, world_size=world_size)
            loader = Batches([tensor([[0.5, 0.25]] * len(batch)), tensor([0] * len(batch))] for batch in sampler)
            loader.batch_sampler = sampler
            stop = mock.Mock(side_effect=[time == last for time in range(9)])
            stops = last < sampler.rounds
            with (
                pytest.raises(Stopped) if stops else nullcontext(),
                mock.patch.object(engine, "all_reduce_sum", lambda *_: [0.0, 0, 0, 1]),
            ):
                engine.evaluate(model, lambda output, _: output.mean(), loader, "cpu", stop)
            assert stop.call_count == (last + 1 if stops else sampler.rounds)


def test_training_shares_are_equal_and_no_image_is_left_out():
    for length, batch_size, world_size in SIZES:
        shares = sampled(length, batch_size, world_size, shuffle=True, pad=True, seed=5)
        assert len({tuple(map(len, share)) for share in shares}) == 1
        assert all(len(batch) == batch_size for share in shares for batch in share[:-1])
        counts = Counter(i for share in shares for batch in share for i in batch)
        assert counts.keys() == set(range(length))
        assert counts.total() == math.ceil(length / world_size) * world_size
        assert world_size > length or max(counts.values()) <= 2


def test_processes_share_the_batches_that_one_process_takes():
    for length, batch_size, world_size in SIZES:
        if length % world_size == 0:  # else the several processes see some images twice
            one = sampled(length, batch_size * world_size, 1, shuffle=True, pad=True, seed=5)[0]
            several = zip(*sampled(length, batch_size, world_size, shuffle=True, pad=True, seed=5), strict=True)
            assert [sorted(itertools.chain(*batches)) for batches in several] == [sorted(batch) for batch in one]


def test_order_is_a_new_permutation_for_every_epoch_and_seed():
    def order(seed: int, epoch: int, shuffle: bool = True) -> tuple[int, ...]:
        sampler = BatchSampler(50, 7, shuffle=shuffle, pad=True, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(itertools.chain(*sampler))

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert order(1, 2) == orders[5]
    assert order(1, 2, shuffle=False) == tuple(range(50))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the launched processes have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rung() -> ModuleType:
    """The step script as a module."""
    spec = importlib.util.spec_from_file_location("step_08", ROOT / "steps" / f"{RUNG}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough("test_synchronized_batch_norm_is_that_of_the_joined_batch; the kit's test_right_runs_pass")
def test_processes_do_what_one_does(rung, tmp_path, capsys):
    step = rung.main(rung.get_args_parser().parse_args(["--output-dir", str(tmp_path), "--seed", "2"]))
    assert step.status == PASS
    assert capsys.readouterr().out.endswith("items within their limits\n")
    # Each side: shares, two processes, and three; log lines of both numbers.
    assert len(step.verdicts) == 1 + 2 * (1 + 2 + 3) + 2
    ref, port = (load_npy(tmp_path / f"dist_{side}.npy") for side in ("ref", "paddle"))
    assert ref.keys() == port.keys()
    for processes in ("one process", "3 processes"):
        seen = [ref[f"{processes}/everything/epoch 1, batch {batch}/own/images"] for batch in range(2)]
        assert list(map(len, seen)) == [6, 6] and set(np.concatenate(seen)) == set(range(12))
    for processes in ("one process", "2 processes"):
        for count in (16, 15, 1):
            name = "1 image" if count == 1 else f"{count} images"
            assert ref[f"{processes}/{name}/evaluation/samples"] == count
        seen = [ref[f"{processes}/frozen/epoch 0, batch {batch}/own/images"] for batch in range(3)]
        assert list(map(len, seen)) == [6, 6, 4] and set(np.concatenate(seen)) == set(range(16))


# Beside those of maintenance/checks/faults.yaml.
FAULTS = {
    "group not joined": (
        "train/main.py",
        "    init_distributed(device)\n",
        "",
        r"frozen/epoch 0/iteration 0/gradient/features\.0\.0\.weight",
    ),
    "same share in every process": (
        "train/main.py",
        '"rank": rank,',
        '"rank": 0,',
        "frozen/epoch 0/iteration 0/images",
    ),
    "learning rate times the processes": (
        "train/main.py",
        "        optimizer, lr_scheduler = build_optimizer",
        "        args.lr *= world_size\n        optimizer, lr_scheduler = build_optimizer",
        "frozen/epoch 0/iteration 1/loss",
    ),
    "set_epoch missing": (
        "train/trainer.py",
        "        set_epoch(self.train_loader, epoch, first_batch)\n",
        "",
        "everything/epoch 1/iteration 0/images",
    ),
    "a process that dies": (
        "train/main.py",
        "    init_distributed(device)\n",
        "    init_distributed(device)\n    if rank:\n        raise RuntimeError('lost')\n",
        "port, 2 processes",
    ),
}


# Each takes more than a minute of a core: DIST_FAULTS=1 tries all, which takes six. The tutorial's is another one.
TRIED = list(FAULTS) if "DIST_FAULTS" in os.environ else ["a process that dies"]


def fault_of(name: str) -> gallery.Fault:
    file, right, wrong, expected = FAULTS[name]
    return gallery.Fault(name, "training", RUNG, file, right, wrong, expected)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, gallery.Outcome]:
    """Every fault's. That the rung passes without one is test_processes_do_what_one_does'."""
    faults, known = [fault_of(name) for name in TRIED], {RUNG: gallery.Run(PASS, "")}
    _, found = gallery.run_gallery(faults, {RUNG}, jobs=2, below=False, known=known)
    return {outcome.fault.name: outcome for outcome in found}


# All faults are tried before the first of these; each starts six processes.
@pytest.mark.thorough("the kit's test_a_fault_is_named_where_it_shows")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TRIED)
def test_the_rung_fails_and_names_the_fault(outcomes, name):
    assert outcomes[name].problem == ""


def joined_batch_norm(images: np.ndarray, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """What the worker records, of torch's own layer in one process."""
    layer = torch.nn.BatchNorm2d(images.shape[1], eps=EPSILON, momentum=0.25, dtype=torch.float64)
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), (WEIGHT, BIAS), strict=True):
            parameter.copy_(torch.tensor(value))
    x = torch.tensor(images, requires_grad=True)
    y = layer(x)
    y.backward(torch.tensor(cotangent))
    found = {
        "y": y,
        "dx": x.grad,
        "dweight": layer.weight.grad,
        "dbias": layer.bias.grad,
        **dict(layer.named_buffers()),
    }
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


@pytest.mark.thorough("the port", but="paddle")
@pytest.mark.parametrize("package", PACKAGES)
def test_synchronized_batch_norm_is_that_of_the_joined_batch(package, tmp_path):
    """Over three processes with 3, 1 and 2 images, in float64, against torch's layer on all 6."""
    launcher = {
        "mobilenetv3_ref": ["torch.distributed.run", "--standalone", "--nproc_per_node=3"],
        "mobilenetv3_paddle": ["paddle.distributed.launch", "--nproc_per_node=3", f"--log_dir={tmp_path / 'log'}"],
    }[package]
    worker = ROOT / "tests" / "sync_batch_norm_worker.py"
    subprocess.run([sys.executable, "-m", *launcher, str(worker), package, str(tmp_path)], check=True, timeout=120)
    parts = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(3)]
    for name, expected in joined_batch_norm(*batch()).items():
        own = [part[name] for part in parts]
        if name in ("y", "dx"):
            found = np.concatenate(own)
        elif name in ("dweight", "dbias"):  # a process's own loss reaches its own images alone
            found = np.sum(own, axis=0)
        else:
            assert all((other == own[0]).all() for other in own)
            found = own[0]
        # Both add 180 values a channel, in another order: at most 180 half ulps.
        np.testing.assert_allclose(found, expected, rtol=0, atol=180 * 2.0**-53 * np.abs(expected).max(), err_msg=name)
    for part in parts:  # outside of train mode it is the plain layer
        assert (part["eval"] == part["eval, plain"]).all()


def test_a_native_batch_norm_is_not_passed_over():
    """It would go on with each process's own statistics."""
    model = paddle.nn.Sequential(paddle.nn.Conv2D(3, 3, 1), paddle.nn.BatchNorm2D(3))
    with pytest.raises(ValueError, match="paddle.nn.BatchNorm2D counts no batches"):
        mobilenetv3_paddle.train.distributed.convert_sync_batchnorm(model)
