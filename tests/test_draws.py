"""The draws of the data pipeline are distributed as torchvision's own.

The samples are large enough for a distribution function that is off by 0.02 anywhere, or a probability by as much, to
be seen: the tests break the draws by that.
"""

import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision import transforms
from torchvision.transforms import v2

from mobilenetv3_common.draws import (
    IMAGENET_POLICY,
    MAGNITUDES,
    auto_augment_operations,
    batch_rng,
    item_rng,
    random_erasing_box,
    random_mix,
    random_resized_crop_box,
)
from mobilenetv3_paddle.data.presets import ClassificationPresetTrain

# Two samples of 60,000 are told apart at p < 1e-4 from a distance of 0.0129 on (see `differently_distributed`); one of
# 0.02, less the noise of 0.005 that the two bring, lies above.
COUNT, P = 60_000, 1e-4


def features(boxes: list[tuple[int, int, int, int]]) -> dict[str, np.ndarray]:
    """What is compared of many boxes; area and ratio show at once what `scale` and `ratio` bound."""
    top, left, height, width = np.array(boxes, dtype=float).T
    ratio = width / np.maximum(height, 1)
    return {"top": top, "left": left, "height": height, "width": width, "area": height * width, "ratio": ratio}


def differently_distributed(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """The features in which a two-sample Kolmogorov-Smirnov test tells the two apart at p < P.

    P(D > d) <= 2 exp(-2 d^2 n m / (n + m)) from 458 draws a side on, n = m (Wei and Dudley, arXiv:1107.5356).
    """
    found = []
    for name in one:
        sides = np.sort(one[name]), np.sort(other[name])
        points = np.concatenate(sides)
        cdfs = [np.searchsorted(side, points, side="right") / len(side) for side in sides]
        bound = math.sqrt(math.log(2 / P) / 2 * sum(1 / len(side) for side in sides))
        if np.abs(cdfs[0] - cdfs[1]).max() > bound:
            found.append(name)
    return found


def is_share(count: int, probability: float) -> bool:
    """Whether `count` of COUNT goes with a probability, at p >= P."""
    return stats.binomtest(count, COUNT, probability).pvalue >= P


class Skewed:
    """A generator whose draws are a little off: `random` below by a factor, whole numbers with fewer of the highest."""

    def __init__(self, rng: np.random.Generator, factor: float = 1.0, lost: float = 0.0) -> None:
        self.rng, self.factor, self.lost = rng, factor, lost

    def random(self, size: int | None = None) -> np.ndarray:
        return self.rng.random(size) * self.factor

    def integers(self, high: int, size: int | None = None) -> np.ndarray:
        drawn = self.rng.integers(high, size=size)
        return np.where((drawn == high - 1) & (self.rng.random(size) < self.lost), 0, drawn)


# Crops


def crops(rng: np.random.Generator, width: int, height: int, **bounds) -> dict[str, np.ndarray]:
    return features([random_resized_crop_box(rng, height, width, **bounds) for _ in range(COUNT)])


@cache
def torchvisions_crops(width: int, height: int, scale: tuple[float, float] = (0.08, 1.0)) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    image, crop = Image.new("1", (width, height)), transforms.RandomResizedCrop(224, scale)
    return features([crop.get_params(image, crop.scale, crop.ratio) for _ in range(COUNT)])


@pytest.mark.thorough("one size", but="^11-17")
@pytest.mark.parametrize("width, height, scale", [(500, 375, 0.08), (500, 375, 0.5), (11, 17, 0.08), (7, 2, 0.08)])
def test_crop_boxes_are_distributed_as_torchvisions(rng, width, height, scale):
    ours = crops(rng, width, height, scale=(scale, 1.0))
    assert differently_distributed(ours, torchvisions_crops(width, height, (scale, 1.0))) == []


@pytest.mark.thorough("test_crop_boxes_are_distributed_as_torchvisions")
def test_that_test_sees_other_bounds(rng):
    oracle = torchvisions_crops(500, 375)
    for scale in ((0.1, 1.0), (0.08, 0.8), (0.06, 1.0)):
        assert "area" in differently_distributed(crops(rng, 500, 375, scale=scale), oracle)
    for ratio in ((0.765, 4 / 3), (3 / 4, 1.307), (0.735, 1.36)):
        assert "ratio" in differently_distributed(crops(rng, 500, 375, ratio=ratio), oracle)


def test_the_crop_when_no_draw_fits_is_torchvisions(rng):
    """No box holds twice the image's area."""
    for width, height in [(400, 100), (101, 400), (1, 9), (23, 3), (640, 479), (3, 4), (1, 1)]:
        box = random_resized_crop_box(rng, height, width, scale=(2.0, 2.0))
        image = Image.new("1", (width, height))
        assert box == transforms.RandomResizedCrop.get_params(image, scale=(2.0, 2.0), ratio=(3 / 4, 4 / 3))


# AutoAugment


def test_policy_and_magnitudes_are_torchvisions():
    """To the last bit of float32; of the bins that torchvision has none for, ours is 0."""
    oracle = transforms.AutoAugment()
    assert [tuple((name, p, bin_ or 0) for name, p, bin_ in policy) for policy in oracle.policies] == [
        tuple((name, p, bin_) for name, p, bin_ in policy) for policy in IMAGENET_POLICY
    ]
    assert {name for policy in IMAGENET_POLICY for name, _, _ in policy} == set(MAGNITUDES)
    space = oracle._augmentation_space(10, (224, 224))
    for name, (magnitudes, signed) in MAGNITUDES.items():
        assert (list(magnitudes), signed) == (space[name][0].reshape(-1).tolist(), space[name][1]), name


def torchvisions_operations(monkeypatch) -> Counter:
    """How often torchvision's AutoAugment makes what of an image."""
    oracle, made = transforms.AutoAugment(), []
    space = oracle._augmentation_space(10, (1, 1))
    monkeypatch.setattr(oracle, "_augmentation_space", lambda *_: space)

    def note(image: Image.Image, name: str, magnitude: float, **_how) -> Image.Image:
        made[-1] += ((name, magnitude),)
        return image

    monkeypatch.setattr(transforms.autoaugment, "_apply_op", note)
    image = Image.new("RGB", (1, 1))
    for _ in range(COUNT):
        made.append(())
        oracle(image)
    return Counter(made)


def operations(rng) -> Counter:
    return Counter(tuple(auto_augment_operations(rng)) for _ in range(COUNT))


def parts(drawn: Counter) -> list[Counter]:
    """What is drawn, and two parts of it: how many operations an image gets, and their signs."""
    numbers, signs = Counter(), Counter()
    for made, count in drawn.items():
        numbers[len(made)] += count
        for name, magnitude in made:
            signs[np.sign(magnitude) if MAGNITUDES[name][1] else 0] += count
    return [drawn, numbers, signs]


def p_value(one: Counter, other: Counter) -> float:
    """The lowest of chi-square tests that both, and their parts, are of one distribution."""
    p_values = []
    for sides in zip(parts(one), parts(other), strict=True):
        every = sides[0].keys() | sides[1].keys()
        p_values.append(stats.chi2_contingency([[side[what] for what in every] for side in sides]).pvalue)
    return min(p_values)


def test_auto_augment_is_distributed_as_torchvisions(rng, monkeypatch):
    oracle = torchvisions_operations(monkeypatch)
    assert len(oracle) > 50
    assert p_value(operations(rng), oracle) >= P
    assert p_value(operations(Skewed(rng)), oracle) >= P
    for skewed in (Skewed(rng, factor=0.97), Skewed(rng, factor=1.03), Skewed(rng, lost=0.06)):
        assert p_value(operations(skewed), oracle) < P


# RandomErasing


def erased(rng: np.random.Generator, height: int, width: int, **bounds) -> dict[str, np.ndarray]:
    boxes = [random_erasing_box(rng, height, width, **bounds) for _ in range(COUNT)]
    return {
        **features([box or (0, 0, height, width) for box in boxes]),
        "none": np.array([box is None for box in boxes]),
    }


@cache
def torchvisions_erased(height: int, width: int) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    image, erasing = torch.zeros(1, height, width), transforms.RandomErasing()
    drawn = [erasing.get_params(image, erasing.scale, erasing.ratio, [0.0]) for _ in range(COUNT)]
    none = np.array([value is image for *_, value in drawn])
    return {**features([tuple(box) for *box, _ in drawn]), "none": none}


@pytest.mark.thorough("one size", but="^30-200")
@pytest.mark.parametrize("height, width", [(224, 224), (30, 200), (2, 2)])
def test_erased_boxes_are_distributed_as_torchvisions(rng, height, width):
    assert differently_distributed(erased(rng, height, width), torchvisions_erased(height, width)) == []


@pytest.mark.thorough("test_erased_boxes_are_distributed_as_torchvisions")
def test_that_test_sees_other_boxes(rng):
    oracle = torchvisions_erased(30, 200)
    assert "height" in differently_distributed(erased(rng, 200, 30), oracle)
    square = torchvisions_erased(224, 224)
    for scale in ((0.027, 0.33), (0.02, 0.323)):
        assert "area" in differently_distributed(erased(rng, 224, 224, scale=scale), square)
    for ratio in ((0.3, 3.14), (0.315, 3.3)):
        assert "ratio" in differently_distributed(erased(rng, 224, 224, ratio=ratio), square)


# Probabilities of the preset


@pytest.mark.thorough("test_every_option_gives_torchvisions_pixels")
def test_flips_and_erasings_come_as_often_as_asked():
    """On 2x2 pixels, all of which are cropped, and none of which is 0 once normalized."""
    flip = ClassificationPresetTrain(crop_size=2, hflip_prob=0.3, crop_scale=1.0)
    erase = ClassificationPresetTrain(crop_size=16, hflip_prob=0.0, crop_scale=1.0, random_erase=0.2)
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    rngs = [item_rng(0, 0, index) for index in range(COUNT)]
    top_rows = [flip(image, rng)[0, 0] for rng in rngs]
    flips = sum(left > right for left, right in top_rows)
    erasings = sum((erase(image, rng) == 0).any() for rng in rngs)
    assert is_share(flips, 0.3) and not is_share(flips, 0.32) and not is_share(flips, 0.28)
    assert is_share(erasings, 0.2) and not is_share(erasings, 0.22) and not is_share(erasings, 0.18)


# Mixup and CutMix


def shares(rng: np.random.Generator, alpha: float) -> dict[str, np.ndarray]:
    return {"share": np.array([random_mix(rng, 9, 9, alpha, 0.0).share for _ in range(COUNT)])}


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixups_share_is_distributed_as_torchs(rng, alpha):
    # In float64: in float32, one share in sixty rounds to 1 if alpha is 0.2, and torch puts it just below.
    oracle = {"share": torch._sample_dirichlet(torch.full((COUNT, 2), alpha, dtype=torch.float64))[:, 0].numpy()}
    assert differently_distributed(shares(rng, alpha), oracle) == []
    assert differently_distributed(shares(rng, alpha * 1.1), oracle) == ["share"]
    assert differently_distributed({"share": shares(rng, alpha)["share"] + 0.02}, oracle) == ["share"]


@pytest.mark.thorough("one size", but="^0.5")
@pytest.mark.parametrize("alpha, height, width", [(1.0, 224, 224), (0.5, 12, 31)])
def test_cutmixs_boxes_are_distributed_as_torchvisions(rng, alpha, height, width):
    images, cutmix = [torch.zeros(2, 3, height, width)], v2.CutMix(alpha=alpha, num_classes=2)
    drawn = [cutmix.make_params(images) for _ in range(COUNT)]
    boxes = [(y1, x1, y2 - y1, x2 - x1) for x1, y1, x2, y2 in (params["box"] for params in drawn)]
    oracle = {**features(boxes), "share": np.array([params["lam_adjusted"] for params in drawn])}

    def ours(alpha: float) -> dict[str, np.ndarray]:
        mixes = [random_mix(rng, height, width, 0.0, alpha) for _ in range(COUNT)]
        return {**features([mix.box for mix in mixes]), "share": np.array([mix.share for mix in mixes])}

    assert differently_distributed(ours(alpha), oracle) == []
    assert "share" in differently_distributed(ours(alpha * 1.1), oracle)


def test_with_both_each_is_taken_every_other_time(rng):
    mixes = [random_mix(rng, 8, 8, 0.2, 1.0) for _ in range(COUNT)]
    assert is_share(sum(mix.box is None for mix in mixes), 0.5)
    mixup = {"share": np.array([mix.share for mix in mixes if mix.box is None])}
    assert differently_distributed(mixup, shares(rng, 0.2)) == []


def test_no_batch_draws_as_an_image():
    """NumPy fills a short key with zeros, so that [seed, epoch, index] is [seed, epoch, index, 0]."""
    assert item_rng(3, 2, 1).random() == np.random.default_rng([3, 2, 1, 0]).random()
    items = {item_rng(3, epoch, index).random() for epoch in range(20) for index in range(20)}
    batches = {batch_rng(3, epoch, batch).random() for epoch in range(20) for batch in range(20)}
    assert len(items | batches) == 800
