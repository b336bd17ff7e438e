"""The kit's comparisons of two metrics and of two evaluations, on metrics and models of a few lines."""

import numpy as np
import paddle
import paddle.nn.functional as PF
import pytest
import torch
import torch.nn.functional as F

from portproof.compare import FAIL, PASS, REFUSED
from portproof.ladder import cases
from portproof.ladder.rung import Rung
from portproof.ladder.rungs import metrics
from portproof.ladder.rungs.metrics import evaluation, metric
from portproof.python39 import zip_strict
from sturdyio.cli import UserError


def rank(logits, target):
    """The rank of each label, ties by class number, of tensors of either framework."""
    is_torch = isinstance(logits, torch.Tensor)
    own = (torch.take_along_dim if is_torch else paddle.take_along_axis)(logits, target[:, None], 1)
    behind = (torch if is_torch else paddle).arange(logits.shape[1]) >= target[:, None]
    return logits.shape[1] - ((logits < own) | ((logits == own) & behind)).sum(1)


def top3(logits, target):
    return int((rank(logits, target) < 3).sum())


def exact_top3(logits, labels):
    orders = [sorted(range(len(row)), key=lambda c, row=row: (-row[c], c)) for row in logits]
    found = zip_strict(logits, orders, labels)
    return sum(not np.isnan(row[label]) and order.index(label) < 3 for row, order, label in found)


def one_by_one(verdict):
    return {row.item.section for row in verdict.rows if row.status == FAIL and row.name.endswith("batches of 1")}


# --- metric


def test_a_faultless_port_passes_on_every_case_and_batch_size():
    verdict = metric(top3, top3)
    assert verdict.status == PASS
    assert len(verdict.rows) == 3 * len(cases.metrics())
    assert {row.atol for row in verdict.rows} == {0.0}
    shapes = {row.name: row.shape for row in verdict.rows}
    assert shapes["drawn/metric"] == ()
    assert shapes["drawn/metric, batches of 5"] == (5,)
    assert shapes["drawn/metric, batches of 1"] == (23,)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (lambda x, y: int((rank(x, y) < 4).sum()), {"ties", "infinite", "huge", "one NaN", "drawn"}),
        (
            lambda x, y: int(((x > paddle.take_along_axis(x, y[:, None], 1)).sum(1) < 3).sum()),
            {"ties", "NaN", "one NaN"},
        ),
        (lambda x, y: int((rank(PF.sigmoid(x), y) < 3).sum()), {"huge"}),
        (lambda x, y: int((rank(x.nan_to_num(), y) < 3).sum()), {"NaN", "one NaN"}),
    ],
)
def test_a_fault_shows_on_its_case(fault, where):
    verdict = metric(top3, fault)
    assert verdict.status == FAIL
    assert one_by_one(verdict) == where


def test_a_fault_of_the_last_batch_shows():
    """The sum over a batch divided by a number that only a full one has."""
    verdict = metric(lambda x, y: top3(x, y) / len(y), lambda x, y: top3(x, y) / max(len(y), 5), batch_sizes=[5])
    assert verdict.status == FAIL
    assert verdict.first_failure.worst.index == (4,)  # of 24 samples


def test_both_sides_are_judged_against_what_is_exact():
    given = {"tie": cases.ties()}
    options = {"exact": exact_top3, "batch_sizes": [1], "name": "top3", "title": "ties"}
    assert metric(top3, top3, given, **options).status == PASS

    def by_topk(x, y):
        return int((x.topk(3, 1)[1] == y[:, None]).sum())

    rung = Rung("03", quiet=True)
    metric(by_topk, top3, given, **options, rung=rung)
    assert [(v.title, v.status) for v in rung.verdicts] == [("ties, reference", FAIL), ("ties, port", PASS)]
    assert rung.verdicts[0].first_failure.name == "tie/top3"
    assert metric(by_topk, by_topk, given, **options).status == FAIL


def test_a_float_has_the_kernel_limit_and_a_dict_names_its_items(rng):
    given = {"drawn": (rng.normal(size=(40, 6)), rng.normal(size=(40, 6)))}

    def errors(x, y):
        return {"mse": ((x - y) ** 2).mean(), "worst": [float((x - y).abs().max())]}

    verdict = metric(errors, errors, given, batch_sizes=[None])
    assert verdict.status == PASS
    assert [(row.name, row.shape) for row in verdict.rows] == [("drawn/mse", ()), ("drawn/worst", (1,))]
    assert 0 < max(row.atol for row in verdict.rows) < 1e-4

    def off(x, y):
        return errors(x, y) | {"mse": ((x - y) ** 2).sum() / (x.size - 1)}

    assert metric(errors, off, given).first_failure.name == "drawn/mse"
    fewer = metric(errors, lambda x, y: {"mse": errors(x, y)["mse"]}, given)
    assert fewer.first_failure.reason == "the port does not have it"


def test_arrays_of_a_sample_each_are_compared_batch_by_batch():
    verdict = metric(rank, rank, {"drawn": cases.metrics()["drawn"]}, batch_sizes=[5])
    assert verdict.status == PASS
    assert [row.shape for row in verdict.rows] == [(5,)] * 4 + [(3,)]
    verdict = metric(rank, lambda x, y: rank(x, y)[:-1], {"drawn": cases.metrics()["drawn"]}, batch_sizes=[None])
    assert verdict.first_failure.reason == "shape: reference (23,), port (22,)"


def test_nan_and_infinity_of_the_reference_must_be_the_ports():
    def mean(x, y):
        return x.mean()

    given = {name: cases.metrics()[name] for name in ("NaN", "drawn")} | {"infinite": (np.array([np.inf, 1.0]),) * 2}
    verdict = metric(mean, mean, given, batch_sizes=[None])
    assert verdict.status == PASS
    words = [row.name for row in verdict.rows if "not finite" in row.name]
    assert words == ["NaN/metric, where not finite", "infinite/metric, where not finite"]
    for fault in (lambda x, y: x.nan_to_num().mean(), lambda x, y: (x - x.max() + x.max()).mean()):
        assert metric(mean, fault, given, batch_sizes=[None]).status == FAIL
    only = metric(lambda x, y: x.nan_to_num().mean(), mean, given, batch_sizes=[None])
    assert "not finite: reference 0, port 1" in only.first_failure.reason


def test_a_count_may_be_a_float_on_one_side():
    assert metric(top3, lambda x, y: float(top3(x, y))).status == PASS
    assert metric(top3, lambda x, y: top3(x, y) + 1e-9).status == FAIL


def test_a_constant_metric_is_refused():
    verdict = metric(lambda x, y: 1.0, lambda x, y: 1.0)
    assert verdict.status == REFUSED
    assert "is 1.0 on every case" in verdict.refusal


def raising(*args):
    raise KeyError("axis")


def test_whoever_raises_is_named():
    with pytest.raises(UserError, match="the reference's metric on ties raised KeyError"):
        metric(raising, top3)
    with pytest.raises(UserError, match="`exact` on ties raised KeyError"):
        metric(top3, top3, exact=raising)
    verdict = metric(top3, raising)
    assert verdict.status == FAIL
    assert verdict.first_failure.reason == "the port raised KeyError: 'axis'"
    with pytest.raises(UserError, match="raised TypeError: metric is object"):
        metric(lambda x, y: None, top3)
    assert "metric is object" in metric(top3, lambda x, y: None).first_failure.reason


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one case at least"),
        ({"a": (np.ones(3), np.ones(4))}, r"arrays \[\(3,\), \(4,\)\] cannot be cut into batches of 5"),
        ({"a": (np.float64(1),)}, "cannot be cut into batches"),
    ],
)
def test_cases_that_are_none(given, message):
    with pytest.raises(UserError, match=message):
        metric(lambda *arrays: 1, lambda *arrays: 1, given)


def test_no_batch_sizes_compare_nothing():
    assert metric(top3, top3, batch_sizes=[]).status == REFUSED


# --- ranked labels


def test_ranked_labels_are_at_every_rank_and_clear(rng):
    logits = rng.normal(size=(32, 20))
    labels = cases.ranked_labels(logits, 1e-3)
    ranks = [(row > row[label]).sum() for row, label in zip_strict(logits, labels)]
    assert set(ranks) == set(range(8))
    for row, label in zip_strict(logits, labels):
        assert np.sort(np.abs(row - row[label]))[1] > 1e-3


@pytest.mark.parametrize("classes", [2, 5, 8, 9])
def test_ranked_labels_of_few_classes(rng, classes):
    logits = rng.normal(size=(16, classes))
    labels = cases.ranked_labels(logits, 0.0)
    ranks = [(row > row[label]).sum() for row, label in zip_strict(logits, labels)]
    assert ranks == [i % min(8, classes) for i in range(16)]


def test_no_rank_is_clear():
    assert cases.ranked_labels(np.zeros((3, 10)), 1e-6) is None


# --- evaluation

CLASSES = 12
WEIGHT = np.random.default_rng(1).normal(size=(6, CLASSES)).astype(np.float32)
IMAGES = np.random.default_rng(2).normal(size=(13, 6)).astype(np.float32)
LABELS = np.arange(13) % CLASSES


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, CLASSES, bias=False)
        self.linear.weight.data = torch.from_numpy(WEIGHT.T.copy())
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x))


class PaddleNet(paddle.nn.Layer):
    def __init__(self, weight=WEIGHT):
        super().__init__()
        self.linear = paddle.nn.Linear(6, CLASSES, bias_attr=False)
        self.linear.weight.set_value(weight)
        self.drop = paddle.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x))


def loader(tensor, size=5, images=IMAGES, labels=LABELS):
    return [(tensor(images[i : i + size]), tensor(labels[i : i + size])) for i in range(0, len(images), size)]


TORCH, PADDLE = loader(torch.from_numpy), loader(paddle.to_tensor)


def evaluator(criterion, k=3, eval_mode=True, limit=None, averages=False):
    def evaluate(model, batches):
        if eval_mode:
            model.eval()
        right = total = loss = 0
        for images, labels in list(batches)[:limit]:
            logits, n = model(images), 1 if averages else len(labels)
            right += int((rank(logits, labels) < k).sum()) * n / len(labels)
            loss += float(criterion(logits, labels)) * n
            total += n
        return {"loss": loss / total, "top": right / total, "samples": total}

    return evaluate


REF, PORT = evaluator(F.cross_entropy), evaluator(PF.cross_entropy)


def evaluated(ref=REF, port=PORT, nets=(TorchNet, PaddleNet), loaders=(TORCH, PADDLE), **options):
    return evaluation((ref, nets[0](), loaders[0]), (port, nets[1](), loaders[1]), **options)


def test_a_faultless_evaluation_passes():
    rung = Rung("03", quiet=True)
    verdict = evaluated(rung=rung)
    assert verdict.status == PASS
    assert [row.name for row in verdict.rows] == ["logits", "labels", *["top", "samples", "loss"] * 2]
    names = ["top", "samples", "loss"]
    assert list(rung.files[1]) == ["logits", "labels", *(f"ranked/{name}" for name in names), *names]
    assert "of 13 images" in str(verdict)
    assert "of one size" not in str(verdict)
    results = {"samples": "samples", "loss": "loss"}
    assert [row.name for row in evaluated(results=results).rows[2:4]] == ["samples", "loss"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"k": 4}, "top"),
        ({"limit": -1}, "top"),
        ({"averages": True}, "top"),
        ({"eval_mode": False}, "loss"),
    ],
)
def test_a_faulty_evaluation_is_caught(options, named):
    paddle.seed(0)
    verdict = evaluated(port=evaluator(PF.cross_entropy, **options))
    assert named in {row.name for row in verdict.rows if row.status == FAIL}


def test_a_faulty_loss_is_caught():
    verdict = evaluated(port=evaluator(lambda x, y: PF.cross_entropy(x, y) * 1.0001))
    assert verdict.first_failure.name == "loss"


def test_logits_and_labels_that_differ_end_it():
    verdict = evaluated(nets=(TorchNet, lambda: PaddleNet(WEIGHT * 1.0001)))
    assert verdict.first_failure.name == "logits"
    assert len(verdict.rows) == 2
    moved = loader(paddle.to_tensor, labels=np.roll(LABELS, 1))
    assert evaluated(loaders=(TORCH, moved)).first_failure.name == "labels"
    assert evaluated(loaders=(TORCH, PADDLE[:-1])).first_failure.reason == "shape: reference (13, 12), port (10, 12)"


def test_a_loader_keeps_what_else_it_has():
    class Loader(list):
        dataset = range(13)

    def by_dataset(evaluate):
        def wrapped(model, batches):
            assert len(batches) == 3
            return evaluate(model, batches)["top"] * len(batches.dataset)

        return wrapped

    verdict = evaluated(by_dataset(REF), by_dataset(PORT), loaders=(Loader(TORCH), Loader(PADDLE)))
    assert verdict.status == PASS
    assert verdict.rows[2].name == "metric"


def test_a_loader_is_read_once_if_its_images_fit(monkeypatch):
    class Loader(list):
        read = 0

        def __iter__(self):
            self.read += 1
            return ((images.clone(), labels) for images, labels in super().__iter__())

    def in_place(evaluate):
        def wrapped(model, batches):
            found = evaluate(model, batches)
            for images, _ in batches:
                images.zero_()
            return found

        return wrapped

    loaders = Loader(TORCH), Loader(PADDLE)
    assert evaluated(in_place(REF), in_place(PORT), loaders=loaders).status == PASS
    assert [it.read for it in loaders] == [1, 1]
    monkeypatch.setattr(metrics, "MOST_KEPT", 10)
    assert evaluated(loaders=loaders).status == PASS
    assert [it.read for it in loaders] == [5, 4]


def test_models_stay_as_they_were():
    nets = TorchNet().eval(), PaddleNet()
    nets[1].eval()
    assert evaluation((REF, nets[0], TORCH), (PORT, nets[1], PADDLE)).status == PASS
    assert not nets[0].training
    assert not nets[1].training


def test_who_raises_in_an_evaluation_is_named():
    with pytest.raises(UserError, match="the reference's evaluation raised KeyError"):
        evaluated(ref=raising)
    assert evaluated(port=raising).first_failure.reason == "the port raised KeyError: 'axis'"
    broken = type("Broken", (PaddleNet,), {"forward": raising})
    assert evaluated(nets=(TorchNet, broken)).first_failure.name == "model"
    with pytest.raises(UserError, match="the reference's model in float64 raised KeyError"):
        evaluated(nets=(type("Broken", (TorchNet,), {"forward": raising}), PaddleNet))


def test_bad_loaders_and_results():
    with pytest.raises(UserError, match="the reference's loader is a generator, read only once"):
        evaluated(loaders=((batch for batch in TORCH), PADDLE))
    with pytest.raises(UserError, match="the port's loader is a list_iterator, read only once"):
        evaluated(loaders=(TORCH, iter(PADDLE)))
    with pytest.raises(UserError, match="the loader of the torch side has no batches"):
        evaluated(loaders=([], PADDLE))
    assert "has no batches" in evaluated(loaders=(TORCH, [])).first_failure.reason
    with pytest.raises(UserError, match="returns loss, top, samples: no top1"):
        evaluated(results={"top1": "metric"})
    for given in ((REF, PORT, TorchNet(), PaddleNet(), TORCH, PADDLE), ((REF, TORCH), (PORT, PADDLE))):
        with pytest.raises(UserError, match=r"takes ref and port, each \(evaluate, model, loader\)"):
            evaluation(*given)
    floats = loader(torch.from_numpy, labels=LABELS.astype(np.float32))
    with pytest.raises(UserError, match="whole-number labels"):
        evaluated(loaders=(floats, PADDLE))


def test_weights_that_prove_nothing_are_refused():
    def zero():
        net = TorchNet()
        net.linear.weight.data.mul_(0)
        return net

    verdict = evaluated(nets=(zero, lambda: PaddleNet(WEIGHT * 0)))
    assert verdict.status == REFUSED
    assert "within rounding" in str(verdict)


def test_batches_of_one_size_are_said():
    one_size = loader(torch.from_numpy, 13), loader(paddle.to_tensor, 13)
    assert "all batches are of one size" in str(evaluated(loaders=one_size))
