"""Several processes against one, on both sides: which images, which gradients, which buffers, which evaluation.

With batch norm in train mode several processes are not one, since each normalizes with its own share of the batch. So
equality is shown with `--freeze-norm --dropout 0`, and of train mode that all processes end with the same buffers.
"""

import importlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from distributed_runs import recorded_run

import mobilenetv3_ref.models
from reprod.align.capture_torch import layer_types
from reprod.align.convert import torch_to_paddle
from reprod.recipe.files import save_safetensors
from reprod.recipe.sampler import BatchSampler

ROOT = Path(__file__).parents[1]
LITE_DATA = ROOT / "lite_data"
PACKAGES = ("mobilenetv3_ref", "mobilenetv3_paddle")
SMALL = "--train-crop-size 64 --val-crop-size 64 --val-resize-size 64 --workers 0 --epochs 2 --lr 0.001"
FROZEN = ["--freeze-norm", "--dropout", "0"]
FAULTS = ("summed", "same share")
COUNTS = (16, 2)  # images to evaluate; of two, a third process gets none
GLOBAL_BATCH = 8


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


@pytest.fixture(params=PACKAGES)
def package(request) -> str:
    """Each package in turn."""
    return request.param


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the launched processes have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def flags(probe, tmp_path_factory) -> Callable[..., list[str]]:
    """flags(package, world_size): those of a run on lite_data from probe weights, in batches of 8 over all processes.

    With a network's initial weights in eval mode the gradients are all but zero, and any two runs end alike.
    """
    folder = tmp_path_factory.mktemp("weights")

    def make(package: str, world_size: int, data: Path = LITE_DATA) -> list[str]:
        num_classes = len(list((data / "val").iterdir()))
        arrays = probe("mobilenet_v3_small", num_classes=num_classes)
        if package == "mobilenetv3_paddle":
            arrays = torch_to_paddle(arrays, layer_types(mobilenetv3_ref.models.mobilenet_v3_small()))
        weights = folder / f"{package}_{num_classes}.safetensors"
        save_safetensors(arrays, weights)
        paths = ["--data-path", data, "--output-dir", tmp_path_factory.mktemp("out"), "--weights", weights]
        return [*map(str, paths), "--batch-size", str(GLOBAL_BATCH // world_size), *SMALL.split()]

    return make


@pytest.fixture(scope="module")
def evaluations(flags, tmp_path_factory) -> Callable[[str, int], list[dict]]:
    """evaluations(package, world_size): the runs that evaluate each of COUNTS images."""
    few = tmp_path_factory.mktemp("few")
    for name in ("n02123045/n02123045_chelsea_2.JPEG", "n03877845/n03877845_china_3.JPEG"):
        (few / "val" / name).parent.mkdir(parents=True)
        shutil.copy(LITE_DATA / "val" / name, few / "val" / name)
    folders = dict(zip(COUNTS, (LITE_DATA, few), strict=True))

    def make(package: str, world_size: int) -> list[dict]:
        return [
            {"name": f"{count} images", "flags": [*flags(package, world_size, folder), "--test-only"]}
            for count, folder in folders.items()
        ]

    return make


def launch(package: str, world_size: int, runs: list[dict], folder: Path) -> list[dict[str, dict[str, np.ndarray]]]:
    """Of every process {name of the run: its record}."""
    if package == "mobilenetv3_paddle" and 0 < paddle.device.cuda.device_count() < world_size:
        pytest.skip("Paddle's launcher starts no more processes than there are cards, not even on the CPU")
    script = [str(Path(__file__).with_name("distributed_runs.py")), package, str(folder / "runs.json"), str(folder)]
    (folder / "runs.json").write_text(json.dumps(runs), encoding="utf-8")
    if package == "mobilenetv3_ref":
        launcher = ["torch.distributed.run", "--standalone"]
    else:
        launcher = ["paddle.distributed.launch", "--log_dir", str(folder / "log")]
    command = [sys.executable, "-m", *launcher, "--nproc_per_node", str(world_size), *script]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [
        {run["name"]: dict(np.load(folder / f"{run['name']}_{rank}.npz")) for run in runs} for rank in range(world_size)
    ]


@pytest.fixture(scope="module")
def several_processes(flags, evaluations, tmp_path_factory) -> Callable[[str, int], list[dict[str, dict]]]:
    """several_processes(package, world_size): the records of all, from one launch; three processes only evaluate."""

    @cache
    def run(package: str, world_size: int) -> list[dict[str, dict]]:
        runs = evaluations(package, world_size)
        if world_size == 2:
            own = flags(package, 2)
            runs += [{"name": "frozen", "flags": own + FROZEN}, {"name": "live", "flags": own}]
            runs += [{"name": fault, "flags": own + FROZEN, "fault": fault} for fault in FAULTS]
        return launch(package, world_size, runs, tmp_path_factory.mktemp("launch"))

    return run


def parameters(record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: array for key, array in record.items() if key.startswith("after/")}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest difference of any parameter or buffer."""
    a, b = parameters(a), parameters(b)
    assert a.keys() == b.keys()
    assert len(a) > 200
    return max(float(np.abs(a[key].astype(np.float64) - b[key]).max()) for key in a)


def test_two_processes_train_like_one(package, flags, several_processes, monkeypatch):
    """After four steps on the same global batches all parameters are those of one process, within float32 rounding.

    Two processes differ from one in the order in which a batch is summed: each half, then the halves. One process whose
    images are permuted inside each batch differs from itself in that order, too, so it shows how far rounding carries:
    6e-8 to 2.4e-7 on either side, which is one unit in the last place of weights near 1. The limit is 16 times the
    largest of four such runs, since halves are another sort of order; each fault lies 2000 limits away.
    """
    training = importlib.import_module(f"{package}.train.main")
    one = recorded_run(training, flags(package, 1) + FROZEN)
    in_order = BatchSampler.__iter__
    permuted = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(BatchSampler, "__iter__", lambda self, rng=rng: map(rng.permutation, in_order(self)))
        permuted.append(distance(recorded_run(training, flags(package, 1) + FROZEN), one))
    limit = 16 * max(permuted)
    assert 0 < limit < 1e-5

    first, second = several_processes(package, 2)
    assert distance(first["frozen"], one) <= limit
    assert distance(first["frozen"], second["frozen"]) == 0
    assert [fault for fault in FAULTS if distance(first[fault], one) <= 100 * limit] == []


def test_all_processes_end_with_the_buffers_of_the_first(package, several_processes):
    """Batch norm in train mode gives each process statistics of its own, until they are made equal."""
    first, second = (record["live"] for record in several_processes(package, 2))
    buffers = [key for key in first if key.startswith("before/") and key.endswith(("mean", "var", "variance"))]
    assert len(buffers) == 2 * 34
    for key in buffers:
        assert not np.array_equal(first[key], second[key])
        assert np.array_equal(first[key.replace("before/", "after/")], first[key])
    assert distance(first, second) == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluation_counts_every_image_once_on_any_number_of_processes(
    package, evaluations, several_processes, world_size
):
    """Every process learns what one process finds. The loss is a float32 mean over other batches: a few units apart.

    An image too few, or one twice, would change it by a percent.
    """
    training = importlib.import_module(f"{package}.train.main")
    for count, run in zip(COUNTS, evaluations(package, 1), strict=True):
        one = recorded_run(training, run["flags"])
        assert one["samples"] == count
        for record in several_processes(package, world_size):
            found = record[run["name"]]
            assert [found[key] for key in ("samples", "top1", "top5")] == [
                one[key] for key in ("samples", "top1", "top5")
            ]
            assert found["loss"] == pytest.approx(one["loss"], rel=1e-6)
