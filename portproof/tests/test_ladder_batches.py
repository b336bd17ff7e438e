"""`data` and `facts` see every difference, name its batch and side, and hold one batch at a time."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import torch

from portproof.compare import FAIL, PASS, REFUSED, Item
from portproof.ladder.rung import Rung
from portproof.ladder.rungs.batches import (
    by_sample,
    covering,
    data,
    facts,
    image_folder,
    loaders,
    must_vary,
    single_samples,
)
from portproof.python39 import zip_strict
from sturdyio.cli import UserError


def arrays(number: int, n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3, 6, 5) and labels (n,)."""
    rng = np.random.default_rng(number)
    return rng.normal(size=(n, 3, 6, 5)).astype(np.float32), rng.integers(0, 9, n)


def ref_batches(length: int = 3) -> Iterator[tuple]:
    for number in range(length):
        yield tuple(map(torch.from_numpy, arrays(number)))


def port_batches(length: int = 3, change: Callable = lambda number, images, labels: (images, labels)) -> Iterator[list]:
    for number in range(length):
        yield [paddle.to_tensor(array) for array in change(number, *arrays(number))]


def failed(verdict) -> dict[str, str]:
    return {row.name: row.reason for row in verdict.rows if row.status == FAIL}


def test_equal_batches_pass():
    verdict = data(ref_batches(), port_batches(), title="train")
    assert verdict.status == PASS
    assert [row.name for row in verdict.rows] == [f"batches/batch {n}[{i}]" for n in range(3) for i in range(2)]
    assert "train\n  ok      batches  6 items" in str(verdict)


def test_one_bit_is_seen_and_its_batch_named():
    def change(number, images, labels):
        if number == 1:
            images[2, 0, 3, 4] = np.nextafter(images[2, 0, 3, 4], np.float32(9))
        return images, labels

    rung = Rung("data", quiet=True)
    verdict = data(ref_batches(), port_batches(change=change), hints={"batch": "the crop"}, rung=rung)
    assert list(failed(verdict)) == ["batches/batch 1[0]"]
    assert verdict.first_failure.worst.index == (2, 0, 3, 4)
    assert "usual causes: the crop" in str(verdict)
    assert list(rung.pictures) == ["batches/batch 1[0][2]"]
    ref, port = rung.pictures["batches/batch 1[0][2]"]
    assert ref.shape == port.shape == (3, 6, 5) and (ref != port).sum() == 1


def test_what_rounding_alone_moves_is_told(rng):
    """Such as a spectrogram of two libraries."""
    x = rng.normal(size=(2, 8)).astype(np.float32)
    told = "1 items differ by no more than float32 rounds"
    assert told in str(data([x], [x * (1 + 2.0**-23)]))
    assert told not in str(data([x], [x + 1e-4 * np.eye(2, 8, dtype=np.float32)]))


def test_four_images_that_differ_are_kept():
    rung = Rung("data", quiet=True)
    data(ref_batches(), port_batches(change=lambda n, images, labels: (images + 1, labels)), rung=rung)
    assert list(rung.pictures) == [f"batches/batch 0[0][{i}]" for i in range(4)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda n, images, labels: (images.astype("f8"), labels), "dtype: reference float32, port float64"),
        (lambda n, images, labels: (images[:3], labels), "shape: reference (4, 3, 6, 5), port (3, 3, 6, 5)"),
        (lambda n, images, labels: (images.transpose(0, 2, 3, 1), labels), "shape: reference (4, 3, 6, 5)"),
        (lambda n, images, labels: (images * np.float32("nan"), labels), "not finite: reference 0, port 360"),
    ],
)
def test_dtype_shape_and_nan_are_seen(change, reason):
    reasons = failed(data(ref_batches(), port_batches(change=change)))
    assert set(reasons) == {f"batches/batch {n}[0]" for n in range(3)}
    assert all(text.startswith(reason) for text in reasons.values())


@pytest.mark.parametrize(("lengths", "side"), [((3, 2), "port"), ((2, 3), "reference")])
def test_a_side_that_ends_early_is_named_with_the_batch(lengths, side):
    verdict = data(ref_batches(lengths[0]), port_batches(lengths[1]))
    reason = f"the {side} has no batch 2: its batches end before the other side's"
    assert failed(verdict) == {f"batches/batch 2[{i}]": reason for i in range(2)}
    assert len(verdict.rows) == 6


def test_an_endless_side_ends_with_the_other():
    endless = (tuple(map(torch.from_numpy, arrays(number))) for number in count())
    assert "batches/batch 3[0]" in failed(data(endless, port_batches()))
    assert data(islice(endless, 0), port_batches(0)).status == REFUSED


@pytest.mark.parametrize(
    ("batch", "other", "reason"),
    [
        ((1, 2), (1,), "structure: reference (array, array), port (array)"),
        ((1, 2), {"a": 1, "b": 2}, "structure: reference (array, array), port {a: array, b: array}"),
        ({"a": 1, "b": (2, 3)}, {"a": 1, "b": 2}, "structure: reference {a: array, b: (array, array)}, port {a: array"),
        ({"a": 1}, {"b": 1}, "structure: reference {a: array}, port {b: array}"),
        (1, (1,), "structure: reference array, port (array)"),
        ({Item("x"): 1}, {"x": 1}, "structure: reference items, port {x: array}"),
    ],
)
def test_another_structure_is_named(batch, other, reason):
    reasons = failed(data([(0,), batch], [(0,), other]))
    assert list(reasons) == ["batches/structure/batch 1"]
    assert reasons["batches/structure/batch 1"].startswith(reason)


def test_nested_batches_strings_and_numbers():
    def batch(change: float = 0) -> dict:
        return {"image": [np.ones(2), np.zeros(2)], "meta": {"name": ["a", "b"], "size": 5 + change, "box": None}}

    assert data([batch()], [batch()]).status == PASS
    assert list(failed(data([batch()], [batch(1)]))) == ["batches/batch 0[meta][size]"]


def test_items_of_ones_own():
    item, other = Item("cat.png", "image", section="val"), Item("dog.png", "image", section="val")
    image = np.zeros((3, 4, 4), np.float32)
    rung = Rung("data", quiet=True)
    verdict = data([{item: image, other: image}], [{item: image + 1}], hints={"image": "the crop"}, rung=rung)
    assert failed(verdict) == {"val/cat.png": "", "val/dog.png": "the port does not have it"}
    assert list(rung.pictures) == ["val/cat.png"]
    assert failed(data([{item: image}, {other: image}], [{item: image}]))["val/dog.png"].startswith("the port has no b")


def test_samples_are_named_one_by_one():
    class Loader(list):
        dataset = SimpleNamespace(samples=[(f"file {i}", 0) for i in range(3)])

    def batches(order: list[list[int]], shift: int = 0) -> Iterator:
        tensors = [torch.stack([torch.full((3, 2, 2), float(i + shift)) for i in indices]) for indices in order]
        loader = Loader(zip_strict(tensors, [torch.tensor(indices) for indices in order]))
        loader.batch_sampler = order
        return by_sample(loader, section="val")

    order = [[2, 0], [1]]
    verdict = data(batches(order), batches(order))
    assert verdict.status == PASS
    names = ["order of batch 0", "size of batch 0", "file 2", "file 0", "file 2 label", "file 0 label"]
    assert [row.name for row in verdict.rows[:6]] == [f"val/{name}" for name in names]
    assert len(verdict.rows) == 10
    assert list(failed(data(batches(order), batches(order, 1)))) == ["val/file 2", "val/file 0", "val/file 1"]
    assert "val/order of batch 0" in failed(data(batches(order), batches([[0, 2], [1]])))
    assert "val/size of batch 0" in failed(data(batches(order), batches([[2], [1]])))


class Digits:
    """A folder of six images, 6 x 5; what is drawn for an image is added to it, and follows the epoch."""

    root, classes = "data/val", ["cat", "dog"]
    samples = [(f"data/val/{('cat', 'dog')[i % 2]}/{i}.png", i % 2) for i in range(6)]

    def __init__(self, tensor: Callable = torch.from_numpy, change: float = 0.0) -> None:
        self.tensor, self.change, self.epoch = tensor, change, 0

    def __len__(self) -> int:
        return len(self.samples)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, i: int) -> tuple:
        image = np.full((3, 6, 5), i + 10 * self.epoch + (self.change if (self.epoch, i) == (1, 3) else 0), np.float32)
        return self.tensor(image), self.samples[i][1]


def ref_loader(workers: int) -> tuple:
    folder = Digits()
    return torch.utils.data.DataLoader(folder, 4, num_workers=workers), folder.set_epoch


def port_loader(workers: int, change: float = 0.0, follows: bool = True) -> tuple:
    folder = Digits(paddle.to_tensor, change)
    loader = paddle.io.DataLoader(folder, batch_size=4, num_workers=workers)
    return loader, folder.set_epoch if follows else lambda epoch: None


def test_loaders_are_compared_in_every_epoch_and_named_by_file():
    rung = Rung("data", quiet=True)
    verdict = loaders(ref_loader, port_loader, name="val", workers=[0], keep={"image": 5}, rung=rung)
    assert verdict.status == PASS and len(verdict.rows) == 2 * (6 + 6 + 4)
    assert [line for line in verdict.log if "pipeline" in line.splitlines()[0]] == verdict.log
    assert [v.title for v in rung.verdicts] == [f"val pipeline, epoch {epoch}, 0 workers" for epoch in (0, 1)]
    assert list(rung.files[0]) == list(rung.files[1]) == [f"val/{i}.png" for i in range(5)]


def test_a_loader_that_does_not_follow_the_epoch_is_seen():
    verdict = loaders(ref_loader, partial(port_loader, follows=False), name="val", workers=[0])
    assert list(failed(verdict)) == [f"val/{i}.png" for i in range(6)]
    assert verdict.first_failure.worst.ref == 10
    rung = Rung("data", quiet=True)
    loaders(ref_loader, partial(port_loader, change=0.5), workers=[0], rung=rung)
    assert [v.status for v in rung.verdicts] == [PASS, FAIL] and list(failed(rung.verdicts[1])) == ["3.png"]


def test_loaders_that_cannot_be_made_are_named():
    with pytest.raises(UserError, match="the reference's make function raised TypeError: it returns int"):
        loaders(int, port_loader)
    assert "the port raised ZeroDivisionError" in str(loaders(ref_loader, lambda workers: 1 / 0))
    assert "no (loader, set_epoch)" in str(loaders(ref_loader, int))
    assert loaders(ref_loader, port_loader, epochs=[]).status == REFUSED


def test_single_samples_are_those_of_their_epoch():
    chosen, folders = [(1, 2), (1, 3)], (Digits(), Digits(paddle.to_tensor, 0.5))
    verdict = data(*(single_samples(folder, chosen, kinds=["image"], section="rare") for folder in folders))
    assert [row.name for row in verdict.rows] == ["rare/2.png epoch 1", "rare/3.png epoch 1"]
    assert list(failed(verdict)) == ["rare/3.png epoch 1"]


def test_a_folder_of_images_says_what_it_holds():
    said = {str(item): value for item, value in image_folder(Digits(), "val").items()}
    assert said["length/val"] == 6 and said["classes/val"] == ["cat", "dog"] and said["labels/val"] == (0, 1) * 3
    assert said["files/val"][:2] == ["cat/0.png", "dog/1.png"]


def test_one_batch_is_held_at_a_time():
    alive = []

    class Batch(np.ndarray):
        pass

    def batches() -> Iterator[np.ndarray]:
        for number in range(5):
            batch = np.full(9, float(number)).view(Batch)
            alive.append(weakref.ref(batch))
            yield batch
            del batch
            assert sum(ref() is not None for ref in alive) <= 2

    assert data(batches(), batches()).status == PASS


# What a caller or a port can get wrong.


def raising(length: int) -> Iterator[np.ndarray]:
    yield from (np.ones(2) for _ in range(length))
    raise OSError("disk gone")


@pytest.mark.parametrize("length", [0, 2])
def test_a_reference_that_raises_is_named(length):
    with pytest.raises(UserError, match=f"the reference's batch {length} raised OSError: disk gone"):
        data(raising(length), [np.ones(2)] * 5)


@pytest.mark.parametrize("length", [0, 2])
def test_a_port_that_raises_fails(length):
    verdict = data([np.ones(2)] * 5, raising(length))
    assert failed(verdict) == {f"batch {length}": "the port raised OSError: disk gone"}
    assert sum(row.status == PASS for row in verdict.rows) == length


def test_what_cannot_be_compared_is_named():
    with pytest.raises(UserError, match=r"batch 1\[a\] is a object, which is no array, tensor, number or string"):
        data([{"a": 1}, {"a": object()}], [{"a": 1}] * 2)
    assert "batch 1[a] is a object" in failed(data([{"a": 1}] * 2, [{"a": 1}, {"a": object()}]))["batch 1"]
    with pytest.raises(UserError, match="the reference's batches raised TypeError: 'int' object is not iterable"):
        data(5, [])
    assert "the port raised TypeError" in str(data([], 5))


@pytest.mark.parametrize("batches", [[], [()], [{}], [np.empty(0)]])
def test_nothing_to_compare_is_refused(batches):
    assert data(batches, batches).status == REFUSED


def test_a_batch_without_arrays_that_one_side_lacks_fails():
    assert list(failed(data([np.ones(1), ()], [np.ones(1)]))) == ["batches/batch 1"]


# Facts.

LISTED = {"classes": ["cat", "dog"], "labels": (0, 1, 1), "size": 224, "policy": None, "mean": np.array([0.5, 0.25])}


def test_equal_facts_pass_and_their_numbers_are_kept():
    rung = Rung("facts", quiet=True)
    verdict = facts(LISTED, dict(LISTED), title="the folder", rung=rung)
    assert verdict.status == PASS and len(verdict.rows) == 5
    assert "the folder\n  ok      classes" in str(verdict)
    assert [sorted(side) for side in rung.files] == [["labels", "mean", "size"]] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("classes", ["dog", "cat"]),
        ("labels", (0, 1, 2)),
        ("size", 223),
        ("size", 224.0),
        ("policy", "imagenet"),
        ("mean", torch.tensor([0.5, 0.3], dtype=torch.float64)),
    ],
)
def test_a_fact_that_differs_is_named(name, value):
    assert list(failed(facts(LISTED, LISTED | {name: value}))) == [name]


def test_facts_on_one_side_only_fail_and_no_facts_are_refused():
    short = {name: value for name, value in LISTED.items() if name != "size"}
    assert failed(facts(LISTED, short)) == {"size": "the port does not have it"}
    assert failed(facts(short, LISTED)) == {"size": "the reference does not have it"}
    assert facts({}, {}).status == REFUSED


def test_a_fact_of_another_kind_is_named():
    with pytest.raises(UserError, match="the reference's facts raised TypeError: size is a object"):
        facts({"size": object()}, LISTED)
    assert "the port raised TypeError: size is a object" in str(facts(LISTED, LISTED | {"size": object()}))


# What inputs can prove.


@pytest.mark.parametrize(("flags", "status"), [([True, False], PASS), ([True] * 2, REFUSED), ([], REFUSED)])
def test_draws_that_are_all_alike_are_refused(flags, status):
    rung = Rung("draws", quiet=True)
    must_vary({"flipped": flags}, what="training draws", of="images", rung=rung)
    assert (rung.status if rung.verdicts else PASS) == status
    assert rung.log[0] == f"training draws looked at: {len(flags)}, of which {sum(flags)} are flipped"
    assert status == PASS or "none of the images, or all of them, are flipped" in rung.log[1]


def test_the_draws_that_show_every_case_are_chosen():
    rung, read = Rung("draws", quiet=True), []

    def draws() -> Iterator[tuple[int, list[str]]]:
        for number, shown in enumerate([["a"], ["a"], [], ["b", "c"], ["c"]]):
            read.append(number)
            yield number, shown

    assert covering("the policy", "abc", draws(), of="images", rung=rung) == [0, 3]
    assert read == [0, 1, 2, 3] and not rung.verdicts
    assert rung.log == ["the policy: 3 of 3 cases drawn, in 2 images"]
    assert covering("the policy", "abcd", draws(), rung=rung) == [0, 3]
    assert rung.status == REFUSED and "the policy never draws d" in rung.log[-1]
