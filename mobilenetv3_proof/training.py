"""Training runs of one package, from its own loaders, training loop and evaluation, for `portproof.ladder`.

`ref` and `port` are what `train` starts, `ref_trainer` and `port_trainer` what `resume` does; `Trainee.exact_run` is
what `train_fp64` runs.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mobilenetv3_common.arguments import optimizer_options, parse_args
from mobilenetv3_common.seeds import derive_seed
from mobilenetv3_proof.package import PORT, REF, Package
from portproof.backends import Backend
from portproof.ladder.rungs.fp64_runs import Batches
from sturdyio.cli import Stopped

EPOCHS_KEPT = 6  # in memory: the short mode's, 19 MB; a full run's would be 700 MB


@dataclass(frozen=True)
class Recipe:
    """What a run is trained with; both sides get the same."""

    data_path: str
    model: str
    epochs: int
    batch_size: int = 16
    size: int = 48  # pixels; at 32 the last blocks have one, and batch norm next to nothing to average
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-3  # as large as shows within a hundred steps
    lr_gamma: float = 0.85  # once an epoch
    crop_scale: float = 0.8  # digits cut in half are other digits
    hflip_prob: float = 0.5

    def options(self) -> dict[str, str | float]:
        """As `ref` and `port` take them."""
        return asdict(self)


class Watched:
    """A criterion that keeps each batch's mean loss and share of right answers."""

    def __init__(self, backend: Backend, criterion: Callable) -> None:
        self.backend, self.criterion = backend, criterion
        self.losses: list[float] = []
        self.right: list[float] = []

    def __call__(self, output: Any, target: Any) -> Any:
        loss = self.criterion(output, target)
        scores, labels = map(self.backend.to_array, (output, target))
        self.losses.append(loss.item())
        self.right.append(float((scores.argmax(1) == labels).mean()))
        return loss


class Trainee(Package):
    """What a package is trained with: its own loaders, optimizer and loop."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.data, self.models = map(self.module, ("data", "models"))
        self.engine, self.criterion, self.optimizer = map(
            self.module, ("train.engine", "train.criterion", "train.optimizer")
        )

    def loaders(self, recipe: Recipe, seed: int) -> tuple[Any, Any]:
        """Of training and of validation."""
        build, size = self.data.build_dataset, recipe.size
        augmentation = {"crop_scale": recipe.crop_scale, "hflip_prob": recipe.hflip_prob}
        train = build(recipe.data_path, train=True, crop_size=size, seed=seed, **augmentation)
        val = build(recipe.data_path, train=False, crop_size=size, resize_size=size)
        return (
            self.data.build_loader(train, recipe.batch_size, train=True, seed=seed),
            self.data.build_loader(val, 4 * recipe.batch_size, train=False),
        )

    def build_optimizer(self, model: Any, recipe: Recipe) -> tuple[Any, Any]:
        settings = {"lr": recipe.lr, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
        return self.optimizer.build_optimizer(model, **settings, lr_step_size=1, lr_gamma=recipe.lr_gamma)

    def train_epoch(self, model: Any, watched: Watched, optimizer: Any, batches: Any, epoch: int) -> None:
        """By its own loop, which says nothing."""
        silent = self.engine.Hooks(log=lambda line: None)
        self.engine.train_one_epoch(model, watched, optimizer, batches, self.device, epoch, hooks=silent)

    def exact_run(
        self, recipe: Recipe, seed: int, arrays: Mapping[str, np.ndarray], batches: Batches
    ) -> tuple[Any, list[float]]:
        """(the model behind a run from `arrays` in float64, with dropout; the losses of all steps)."""
        factory = partial(self.models.MODELS[recipe.model], num_classes=10)
        model = self.build(factory, arrays, "float64")
        optimizer, lr_scheduler = self.build_optimizer(model, recipe)
        watched = Watched(self.backend, self.criterion.build_criterion())
        loader, val_loader = self.loaders(recipe, seed)
        for epoch in range(recipe.epochs):
            self.data.set_epoch(loader, epoch)
            self.train_epoch(model, watched, optimizer, batches(loader, model), epoch)
            lr_scheduler.step()
            evaluate(self, model, watched.criterion, in_precision_of(model, self.backend, val_loader))
        return model, watched.losses


def ref(seed: int, draw: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """A run of the reference, see `training_run`."""
    return training_run(REF, Recipe(**options), seed, draw)


def port(seed: int, draw: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """A run of the port."""
    return training_run(PORT, Recipe(**options), seed, draw)


@lru_cache(maxsize=1)  # the draws of a seed come one after the other
def readers(package: str, recipe: Recipe, seed: int) -> tuple[Trainee, Callable[[int], list], list]:
    """(a package, its training batches by epoch, its validation batches), read once for all draws of `seed`."""
    trainee = Trainee(package)
    train_loader, val_loader = trainee.loaders(recipe, seed)

    @lru_cache(maxsize=EPOCHS_KEPT)
    def batches(epoch: int) -> list:
        trainee.data.set_epoch(train_loader, epoch)
        return list(train_loader)

    return trainee, batches, list(val_loader)


def training_run(package: str, recipe: Recipe, seed: int, draw: int) -> dict[str, Any]:
    """Train from the initial weights of `seed` on the batches of `seed`, with the `draw`-th series of dropout masks.

    What is returned is the record that `portproof.ladder.statistics.trajectory` describes, with all its keys.
    """
    trainee, batches, val_batches = readers(package, recipe, seed)
    model = trainee.models.MODELS[recipe.model](num_classes=10)  # with its dropout
    trainee.models.shared_init(model, seed)
    optimizer, lr_scheduler = trainee.build_optimizer(model, recipe)
    criterion = trainee.criterion.build_criterion()
    watched = Watched(trainee.backend, criterion)
    arrays = trainee.backend.arrays_of(model)
    record: dict[str, Any] = {"lr": [], "top1": []}
    for epoch in range(recipe.epochs):
        trainee.module("device").seed_everything(derive_seed(seed, epoch, draw))
        record["lr"].append(trainee.backend.training.learning_rate(optimizer))
        before = arrays.parameters()
        trainee.train_epoch(model, watched, optimizer, batches(epoch), epoch)
        lr_scheduler.step()
        record["eval"] = evaluate(trainee, model, criterion, val_batches)
        record["top1"].append(record["eval"][1])
    after = arrays.parameters()
    record |= {"losses": watched.losses, "right": watched.right}
    record |= {f"parameters/{name}": array for name, array in after.items()}
    record |= {f"moved/{name}": array - before[name] for name, array in after.items()}
    record |= {f"running/{name}": array for name, array in arrays.buffers().items()}
    reestimate(trainee, model, batches(recipe.epochs))
    record |= {f"reestimated/{name}": array for name, array in arrays.buffers().items()}
    record["reestimated_eval"] = evaluate(trainee, model, criterion, val_batches)
    record["mirrored_eval"] = evaluate(trainee, model, criterion, mirrored(val_batches))
    return record


def evaluate(trainee: Trainee, model: Any, criterion: Any, loader: Any) -> tuple[float, float, float]:
    """(loss, top-1, images) of the package's own evaluation."""
    metrics = trainee.engine.evaluate(model, criterion, loader, trainee.device)
    return metrics["loss"], metrics["top1"], metrics["samples"]


def in_precision_of(model: Any, backend: Backend, loader: Any) -> Iterator[tuple[Any, Any]]:
    for image, label in loader:
        yield backend.to_tensor(backend.to_array(image), model), label


def mirrored(loader: Any) -> Iterator[tuple[Any, Any]]:
    for image, label in loader:
        yield image.flip([3]), label


def set_norm_share(trainee: Trainee, model: Any, share: float) -> None:
    """Set the share of the new batch in every batch norm's running statistics."""
    for _, layer in trainee.backend.layers.named_modules(model):
        if hasattr(layer, "running_var"):
            layer.momentum = share
        elif hasattr(layer, "_variance"):
            layer._momentum = 1 - share  # Paddle's momentum is the share of the old value


def reestimate(trainee: Trainee, model: Any, loader: Any) -> None:
    """Set the running statistics to the plain mean of those of the loader's batches."""
    model.train()
    for count, (image, _) in enumerate(loader, 1):
        set_norm_share(trainee, model, 1 / count)
        model(image)


def ref_trainer(seed: int, options: Mapping[str, Any], dtype: str) -> "StoppedTraining":
    """A run of the reference that can be resumed."""
    return StoppedTraining(Trainee(REF), Recipe(**options), seed, dtype)


def port_trainer(seed: int, options: Mapping[str, Any], dtype: str) -> "StoppedTraining":
    """A run of the port that can be resumed."""
    return StoppedTraining(Trainee(PORT), Recipe(**options), seed, dtype)


class StopAfter:
    """A request to stop, as SIGTERM is one, that comes when so many losses are there."""

    def __init__(self, losses: list[float], steps: int) -> None:
        self.losses, self.steps = losses, steps

    @property
    def asked(self) -> bool:
        return len(self.losses) >= self.steps


class WatchedTraining(Watched):
    """Keeps nothing of an evaluation."""

    def __call__(self, output: Any, target: Any) -> Any:
        if self.backend.requires_grad(output):
            return super().__call__(output, target)
        return self.criterion(output, target)


class StoppedTraining:
    """A run of a package's own training command, stopped and resumed as that is, for `portproof.ladder.resume`."""

    def __init__(self, trainee: Trainee, recipe: Recipe, seed: int, dtype: str) -> None:
        main, checkpoint = map(trainee.module, ("train.main", "train.checkpoint"))
        flags = {
            "data-path": recipe.data_path,
            "model": recipe.model,
            "epochs": recipe.epochs,
            "batch-size": recipe.batch_size,
            "train-crop-size": recipe.size,
            "val-crop-size": recipe.size,
            "val-resize-size": recipe.size,
            "train-crop-scale": recipe.crop_scale,
            "hflip-prob": recipe.hflip_prob,
            "lr": recipe.lr,
            "momentum": recipe.momentum,
            "weight-decay": recipe.weight_decay,
            "lr-step-size": 1,
            "lr-gamma": recipe.lr_gamma,
            "seed": seed,
            "workers": 0,
            "output-dir": tempfile.mkdtemp(dir="."),  # the kit removes the folder in which it starts runs
        }
        if dtype == "float64":
            flags["dropout"] = 0.0
        words = [f"--{name}={value}" for name, value in flags.items()]
        args = parse_args(main.PROG, trainee.backend.name, [*words, "--shared-init"])
        loaders = main.build_loaders(args, 0, 1)
        model = trainee.backend.training.to_device(main.build_model(args, 10), trainee.device, dtype)
        optimizer, schedule = trainee.optimizer.build_optimizer(model, **optimizer_options(args))
        state = checkpoint.TrainingState(model, optimizer, schedule, trainee.module("train.amp").Amp(), None)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.watched = WatchedTraining(trainee.backend, main.build_criterion(args.label_smoothing))
        stop = StopAfter(self.watched.losses, 0)
        self.trainer = trainee.module("train.trainer").Trainer(
            args, state, self.watched, *loaders, trainee.device, stop
        )

    def train(self, steps: int) -> list[float]:
        self.trainer.stop.steps = steps
        with suppress(Stopped):
            self.trainer.train()
        return self.watched.losses

    def save(self, path: str) -> None:
        """As its command has saved it when it was stopped."""
        shutil.copyfile(self.trainer.checkpoint(), path)

    def load(self, path: str) -> None:
        """As with --resume, at once."""
        self.trainer.args.resume = path
        self.trainer.resume()
