"""How fast both packages are, each against the library that it could have been written with.

A contest is two ways to do the same work. Both run in turns in one process, and what counts is the ratio, which a busy
or slow machine changes little.
"""

import importlib
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mobilenetv3_proof.package import PORT, REF, Package

RMSPROP = {"lr": 1e-3, "weight_decay": 1e-5, "opt": "rmsprop"}  # with the official recipe's alpha, epsilon and momentum
OFFICIAL = {"auto_augment": "imagenet", "random_erase": 0.2}  # the official recipe's augmentation
LIBRARIES = {PORT: "paddle.vision.models", REF: "torchvision.models"}


@dataclass(frozen=True)
class Contest:
    """Ours against theirs; a call ends when its work is done, for so many `images` (0: it is not counted in images)."""

    part: str
    name: str
    theirs_name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    bound: float  # the least that ours / theirs may be, in work per time
    images: int = 0


@dataclass(frozen=True)
class Result:
    """Seconds a call, or memory, as medians, and the rounds' ratios: ours / theirs in work per time."""

    part: str
    name: str
    theirs_name: str
    ours: float
    theirs: float
    ratios: Sequence[float]
    bound: float
    images: int
    unit: str = "s"  # or "GiB", of memory

    @property
    def ratio(self) -> float:
        """Their median."""
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the median of all such ratios lies with 95 % confidence, however they are distributed.

        Of n rounds the k-th smallest and the k-th largest, with the largest k for which fewer than k of n lie below the
        median with a probability of 2.5 % at most (David and Nagaraja, Order Statistics, 3rd edition, section 7.1). Of
        fewer than six rounds the smallest and the largest, which hold it with less confidence.
        """
        n, k = len(self.ratios), 1
        while sum(math.comb(n, below) for below in range(k + 1)) / 2**n <= 0.025:
            k += 1
        ordered = sorted(self.ratios)
        return ordered[k - 1], ordered[-k]

    @property
    def met(self) -> bool:
        """Whether the bound may be reached: not if all of the interval lies below it."""
        return self.interval[1] >= self.bound


def in_kilobytes(name: str) -> int:
    """This process's `name` of /proc, such as VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def cpu_time() -> float:
    """Seconds that this process and its workers that have ended have computed."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


CLOCKS = {"wall": time.perf_counter, "cpu": cpu_time}


def measure(contest: Contest, rounds: int, clock: Callable[[], float], turn: float) -> Result:
    """Run both `rounds` times, in turns; who goes first changes from round to round.

    What takes less than `turn` seconds is called as often as fills them.
    """

    def seconds(run: Callable[[], Any], calls: int) -> float:
        start = clock()
        for _ in range(calls):
            run()
        return (clock() - start) / calls

    for run in (contest.ours, contest.theirs):
        run()  # the first call also makes what the others find: accumulators, chosen kernels, files in memory
    calls = max(1, math.ceil(turn / max(seconds(contest.theirs, 1), 1e-6)))
    ours, theirs = [], []
    for number in range(rounds):
        turns = [(contest.ours, ours), (contest.theirs, theirs)]
        for run, times in turns if number % 2 else reversed(turns):
            times.append(seconds(run, calls))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    about = (contest.part, contest.name, contest.theirs_name)
    return Result(*about, median(ours), median(theirs), ratios, contest.bound, contest.images)


class Entrant(Package):
    """How to build, train and run a model of the package or of its framework's library, on one batch of noise."""

    def __init__(self, name: str, device: str, batch_size: int, image_size: int) -> None:
        super().__init__(name, device)
        self.library = importlib.import_module(LIBRARIES[name])
        self.module("device").seed_everything(0)  # also chooses kernels as a training run does
        rng = np.random.default_rng(0)
        image = rng.normal(size=(batch_size, 3, image_size, image_size)).astype(np.float32)
        batch = (image, rng.integers(1000, size=batch_size))
        self.image, self.target = (self.backend.tensor(array, self.device) for array in batch)

    def own(self, arch: str, **kwargs: Any) -> Any:
        """The package's model."""
        return self.module("models").MODELS[arch](**kwargs).to(self.device)

    def theirs(self, arch: str) -> Any:
        """The library's model of that name."""
        return getattr(self.library, arch)().to(self.device)

    def rmsprop(self, model: Any) -> Any:
        """The package's optimizer over `model`'s parameters."""
        return self.module("train.optimizer").build_optimizer(model, **RMSPROP)[0]

    def training(self, model: Any, optimizer: Any, amp: str | None) -> Callable[[], float]:
        """A step of training as the package does it."""
        engine, mixed = self.module("train.engine"), self.module("train.amp").Amp(amp, self.device)
        criterion = self.module("train.criterion").build_criterion()
        model.train()

        def step() -> float:
            return engine.train_step(model, criterion, optimizer, self.image, self.target, amp=mixed)[0].item()

        return step

    def plain_training(self, model: Any, optimizer: Any, amp: str | None) -> Callable[[], float]:
        """A step in the framework's own words, with its own loss."""
        mixed = self.module("train.amp").Amp(amp, self.device)
        criterion = self.backend.framework.nn.CrossEntropyLoss()
        model.train()

        def step() -> float:
            self.backend.training.clear_gradients(optimizer)
            loss = criterion(mixed.forward(model, self.image), self.target)
            mixed.scaler.scale(loss).backward()
            mixed.scaler.step(optimizer)
            mixed.scaler.update()
            return loss.item()

        return step

    def inference(self, model: Any, amp: str | None) -> Callable[[], float]:
        """A forward pass in eval mode."""
        mixed = self.module("train.amp").Amp(amp, self.device)
        model.eval()

        def forward() -> float:
            with self.backend.framework.no_grad():
                return mixed.forward(model, self.image).sum().item()

        return forward

    def update(self, optimizer: Any, train: Callable[[], float]) -> Callable[[], None]:
        """The optimizer's step alone, with the gradients that one step of training leaves."""
        train()

        def step() -> None:
            optimizer.step()
            if self.device != "cpu":
                self.backend.framework.device.synchronize()

        return step


def model_contests(entrant: Entrant, models: Sequence[str], amps: Sequence[str | None]) -> Iterator[Contest]:
    """Forward passes and training steps against the library's models, with the same optimizer."""
    images = len(entrant.image)
    for arch in models:
        for amp in amps:
            title = f"{entrant.role}, {arch}, {amp or 'float32'}"
            runs = entrant.inference(entrant.own(arch), amp), entrant.inference(entrant.theirs(arch), amp)
            yield Contest("forward", title, entrant.library.__name__, *runs, 0.98, images)
            own, theirs = entrant.own(arch), entrant.theirs(arch)
            runs = (
                entrant.training(own, entrant.rmsprop(own), amp),
                entrant.plain_training(theirs, entrant.rmsprop(theirs), amp),
            )
            yield Contest("train", title, entrant.library.__name__, *runs, 0.98, images)


def layer_contests(entrant: Entrant, arch: str) -> Iterator[Contest]:
    """What the port has of its own where Paddle has something like it: batch norm, and RMSprop."""
    from paddle import nn, optimizer

    images = len(entrant.image)
    norm_layer = partial(nn.BatchNorm2D, epsilon=1e-3, momentum=0.99)
    own, native = entrant.own(arch), entrant.own(arch, norm_layer=norm_layer)
    runs = entrant.training(own, entrant.rmsprop(own), None), entrant.training(native, entrant.rmsprop(native), None)
    yield Contest("parts", f"step with our batch norm, {arch}", "paddle.nn.BatchNorm2D", *runs, 0.97, images)

    def paddles(model: nn.Layer) -> optimizer.Optimizer:
        settings = {"rho": 0.9, "epsilon": 0.0316**2, "momentum": 0.9, "weight_decay": RMSPROP["weight_decay"]}
        return optimizer.RMSProp(RMSPROP["lr"], parameters=model.parameters(), **settings)

    ours, theirs = (entrant.own(arch) for _ in range(2))
    optimizers = entrant.rmsprop(ours), paddles(theirs)
    trainings = entrant.training(ours, optimizers[0], None), entrant.training(theirs, optimizers[1], None)
    yield Contest("parts", f"step with our RMSprop, {arch}", "paddle.optimizer.RMSProp", *trainings, 0.97, images)
    updates = [entrant.update(opt, train) for opt, train in zip(optimizers, trainings, strict=True)]
    yield Contest("parts", f"update by our RMSprop, {arch}", "paddle.optimizer.RMSProp", *updates, 1 / 1.5)


def nhwc_port(entrant: Entrant, arch: str) -> Any:
    """The port, with its activations in memory as (N, H, W, C), of Paddle's own layers where ours take no layout."""
    from paddle import nn

    norm_layer = partial(nn.BatchNorm2D, epsilon=1e-3, momentum=0.99, data_format="NHWC")
    model = entrant.own(arch, norm_layer=norm_layer)
    for layer in model.sublayers(include_self=True):
        if isinstance(layer, nn.Conv2D):
            layer._data_format, layer._channel_dim = "NHWC", 3
        if hasattr(layer, "avgpool"):
            layer.avgpool = nn.AdaptiveAvgPool2D(1, data_format="NHWC")
    model.register_forward_pre_hook(lambda _, inputs: inputs[0].transpose([0, 2, 3, 1]))
    return model


def layout_contests(entrant: Entrant, arch: str) -> Iterator[Contest]:
    """What a package trains with, or offers to, against the other layout in memory."""
    images = len(entrant.image)
    for what in ("inference", "training"):
        if entrant.role == "port":
            names, bound = ("port", "NHWC"), 1.0  # else it should offer that
            models = entrant.own(arch), nhwc_port(entrant, arch)
        else:
            names, bound = ("reference, channels last", "channels first"), 1.1  # less is not worth a flag
            models = entrant.own(arch), entrant.own(arch)
            models[0].to(memory_format=entrant.backend.framework.channels_last)
        if what == "inference":
            ours, theirs = (entrant.inference(model, None) for model in models)
        else:
            ours, theirs = (entrant.training(model, entrant.rmsprop(model), None) for model in models)
        yield Contest("layout", f"{names[0]}, {arch}, {what}", names[1], ours, theirs, bound, images)


def loader_contests(data_path: str, images: int, batch_size: int, image_size: int) -> Iterator[Contest]:
    """The port's loader against the reference's: a pass over the training images, which are repeated."""

    def whole_pass(package: str, workers: int, **augmentation: Any) -> Callable[[], None]:
        data = importlib.import_module(f"{package}.data")
        dataset = data.build_dataset(data_path, train=True, crop_size=image_size, **augmentation)
        dataset.samples = (dataset.samples * math.ceil(images / len(dataset.samples)))[:images]
        loader = data.build_loader(dataset, batch_size, train=True, workers=workers)

        def run() -> None:
            for _ in loader:
                pass

        return run

    for what, augmentation in (("plain", {}), ("official", OFFICIAL)):
        for workers in (0, 1, 2):
            runs = [whole_pass(package, workers, **augmentation) for package in (PORT, REF)]
            name = f"port, {what} augmentation, {workers} workers"
            yield Contest("loader", name, "mobilenetv3_ref.data", *runs, 0.95, images)
