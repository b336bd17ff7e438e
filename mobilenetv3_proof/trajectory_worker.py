"""Training runs of one package, from its own loaders, training loop and evaluation, each reduced to a record of arrays.

    python -m mobilenetv3_proof.trajectory_worker FOLDER PACKAGE

FOLDER/job.json is what `trajectory.launch` writes. FOLDER/PACKAGE.NAME.npz is the record of each run.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mobilenetv3_common.seeds import derive_seed
from mobilenetv3_proof.package import Package
from portproof.backends import Backend


@dataclass(frozen=True)
class Recipe:
    """What a run is trained with; both sides get the same."""

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

    def to_json(self) -> dict[str, str | float]:
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

    def loaders(self, data_path: str, recipe: Recipe, seed: int) -> tuple[Any, Any]:
        """Of training and of validation."""
        build, size = self.data.build_dataset, recipe.size
        augmentation = {"crop_scale": recipe.crop_scale, "hflip_prob": recipe.hflip_prob}
        train = build(data_path, train=True, crop_size=size, seed=seed, **augmentation)
        val = build(data_path, train=False, crop_size=size, resize_size=size)
        return (
            self.data.build_loader(train, recipe.batch_size, train=True, seed=seed),
            self.data.build_loader(val, 4 * recipe.batch_size, train=False),
        )

    def build_optimizer(self, model: Any, recipe: Recipe) -> tuple[Any, Any]:
        settings = {"lr": recipe.lr, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
        return self.optimizer.build_optimizer(model, **settings, lr_step_size=1, lr_gamma=recipe.lr_gamma)


def training_run(trainee: Trainee, data_path: str, recipe: Recipe, seed: int, draw: int) -> dict[str, np.ndarray]:
    """Train from the initial weights of `seed` on the batches of `seed`, with the `draw`-th series of dropout masks.

    losses, right    each batch's mean loss, and share of right answers, (epochs * batches,)
    lr, top1         each epoch's learning rate, and top-1 in eval mode behind it, (epochs,)
    parameters/NAME  at the end; moved/NAME: what the last epoch has changed
    running/NAME     batch norm's statistics at the end; reestimated/NAME: averaged over one more epoch's batches,
                     with the weights as they are at the end
    eval, reestimated_eval, mirrored_eval
                     (loss, top-1, images) of the validation images with the running statistics, with the re-estimated
                     ones, and with these and every image mirrored
    """
    model = trainee.models.MODELS[recipe.model](num_classes=10)  # with its dropout
    trainee.models.shared_init(model, seed)
    optimizer, lr_scheduler = trainee.build_optimizer(model, recipe)
    criterion = trainee.criterion.build_criterion()
    watched, (train_loader, val_loader) = Watched(trainee.backend, criterion), trainee.loaders(data_path, recipe, seed)
    record: dict[str, Any] = {"lr": [], "top1": []}
    for epoch in range(recipe.epochs):
        trainee.module("device").seed_everything(derive_seed(seed, epoch, draw))
        trainee.data.set_epoch(train_loader, epoch)
        record["lr"].append(trainee.backend.learning_rate(optimizer))
        before = trainee.backend.parameters(model)
        silent = trainee.engine.Hooks(log=lambda line: None)
        trainee.engine.train_one_epoch(model, watched, optimizer, train_loader, trainee.device, epoch, hooks=silent)
        lr_scheduler.step()
        record["eval"] = evaluate(trainee, model, criterion, val_loader)
        record["top1"].append(record["eval"][1])
    after = trainee.backend.parameters(model)
    record |= {"losses": watched.losses, "right": watched.right}
    record |= {f"parameters/{name}": array for name, array in after.items()}
    record |= {f"moved/{name}": array - before[name] for name, array in after.items()}
    record |= {f"running/{name}": array for name, array in trainee.backend.buffers(model).items()}
    trainee.data.set_epoch(train_loader, recipe.epochs)
    reestimate(trainee, model, train_loader)
    record |= {f"reestimated/{name}": array for name, array in trainee.backend.buffers(model).items()}
    record["reestimated_eval"] = evaluate(trainee, model, criterion, val_loader)
    record["mirrored_eval"] = evaluate(trainee, model, criterion, mirrored(val_loader))
    return {name: np.array(value) for name, value in record.items()}


def evaluate(trainee: Trainee, model: Any, criterion: Any, loader: Any) -> tuple[float, float, float]:
    """(loss, top-1, images) of the package's own evaluation."""
    metrics = trainee.engine.evaluate(model, criterion, loader, trainee.device)
    return metrics["loss"], metrics["top1"], metrics["samples"]


def mirrored(loader: Any) -> Iterator[tuple[Any, Any]]:
    for image, label in loader:
        yield image.flip([3]), label


def reestimate(trainee: Trainee, model: Any, loader: Any) -> None:
    """Set the running statistics to the plain mean of those of the loader's batches."""
    model.train()
    for count, (image, _) in enumerate(loader, 1):
        trainee.backend.set_norm_share(model, 1 / count)
        model(image)


def main(folder: Path, package: str) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    trainee, recipe = Trainee(package), Recipe(**job["recipe"])
    trainee.backend.set_threads(int(os.environ["OMP_NUM_THREADS"]))
    for name, run in job["runs"][package].items():
        record = training_run(trainee, job["data_path"], recipe, **run)
        part = folder / f".{package}.{name}.npz"
        np.savez(part, **record)
        part.rename(folder / f"{package}.{name}.npz")
        print(f"{package} {name}: top-1 {record['top1'][-1]:.3f}, loss {record['losses'][-1]:.3f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
